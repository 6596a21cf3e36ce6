"""Speculative decoding says what greedy decoding says, whatever is drafted, accepted, joined, left or reused.

The model is random and float32: a wrong state changes its tokens within a few steps, which the planted faults show.
`-m long` runs the interpreted kernels over all 200 tokens of all prompts, `-m gpu` the compiled ones.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl.commit
from jax_impl import HybridCache
from jax_impl.layout import AXIS_ORDERS, STORAGES
from jax_impl.model import decode, hybrid
from jax_impl.model.decode import Engine, OutOfSlotsError, Statistics
from jax_impl.model.drafters import CorruptedReplay, NoDrafts, PromptLookup, corrupted_replay
from jax_impl.model.tiny import tiny_model
from tests import adapters
from tests.cases import assert_same_bits

pytest.importorskip("safetensors", reason="safetensors is not installed")

NEW_TOKENS, MAX_LEN, TOKENS, CONV_DIM = 200, 256, 4, 128
LAYERS = ["linear_attention", "full_attention"]  # few, for the compiler's sake; the oracle's tests decode more of them
Model = tuple[Any, Any]

on_gpu = pytest.param("pallas", marks=pytest.mark.gpu)
FORMS = list(itertools.product(AXIS_ORDERS, STORAGES))
forms = pytest.mark.parametrize(("axis_order", "storage"), FORMS)
# Ten seconds and more each: every storage, both orders, and the others by hand.
INTERPRETED = [("time_major", "sliding"), ("channel_major", "inputs"), ("channel_major", "dense")]
IN_FULL = [
    pytest.param(*form, marks=pytest.mark.long if form in INTERPRETED else pytest.mark.thorough) for form in FORMS
]


@functools.cache
def model(dtype: Any) -> Model:
    return tiny_model(dtype, num_hidden_layers=len(LAYERS), layer_types=LAYERS)


@functools.cache
def prompts() -> list[list[int]]:
    """Eight prompts, the first ones shorter than the convolution's state."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, length).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 31)]


def engine(**options: Any) -> Engine:
    """More slots than rows, and slots that are not row numbers."""
    dtype = options.pop("dtype", "float32")
    fields: dict[str, Any] = {"max_requests": 8, "num_slots": 11, "max_len": MAX_LEN, "num_draft_tokens": TOKENS}
    made = Engine(*model(dtype), **{**fields, **options})
    made._free_slots.rotate(3)
    return made


def small_engine(**options: Any) -> Engine:
    """Two rows and three slots, so that requests wait and slots are used again."""
    return engine(**{"max_requests": 2, "num_slots": 3, "max_len": 64, **options})


@functools.cache
def greedy(dtype: str = "float32") -> list[list[int]]:
    """Plain decoding, one token per request and step, of all prompts."""
    return engine(drafter=NoDrafts(), num_draft_tokens=1, dtype=dtype).generate(prompts(), NEW_TOKENS)


def replayed(made: Engine, which: Sequence[int], new_tokens: int) -> list[list[int]]:
    """Decodes prompts with a replay of what they generate when decoded greedily."""
    requests = [new.request for new in made.add([prompts()[i] for i in which], new_tokens)]
    for i, request in zip(which, requests, strict=True):
        made.replay(request, greedy()[i])
    while made.requests:
        made.step()
    return [request.tokens for request in requests]


def need(implementation: str) -> None:
    if implementation == "pallas":
        adapters.path("jax-pallas-gpu")  # skips, naming what is missing


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", on_gpu])
@forms
def test_speculative_equals_greedy(axis_order: Any, storage: Any, implementation: Any) -> None:
    """200 tokens of 8 prompts, drafts looked up: equal, with every accepted count and with steps without drafts."""
    need(implementation)
    made = engine(axis_order=axis_order, storage=storage, implementation=implementation)
    assert made.generate(prompts(), NEW_TOKENS) == greedy()
    counts = made.statistics
    assert min(counts.histogram) > 0
    assert counts.tokens == len(prompts()) * (NEW_TOKENS - 1)
    assert counts.proposed[0] < counts.request_steps  # some steps proposed nothing
    assert counts.steps < NEW_TOKENS - 1


@pytest.mark.parametrize(("axis_order", "storage"), INTERPRETED[:2])
def test_interpreted_kernels_decode_the_same(axis_order: Any, storage: Any) -> None:
    """A few prompts and tokens of `test_interpreted_kernels_in_full`, drafts replayed so that every count occurs."""
    replay = corrupted_replay(5, MAX_LEN, 256, 0.7)
    made = engine(
        axis_order=axis_order, storage=storage, implementation="pallas_interpret", max_requests=2, num_slots=5,
        drafter=replay,
    )  # fmt: skip
    which = [0, 6]
    assert replayed(made, which, 24) == [greedy()[i][:24] for i in which]
    assert min(made.statistics.histogram) > 0


@pytest.mark.parametrize(("axis_order", "storage"), IN_FULL)
def test_interpreted_kernels_in_full(axis_order: Any, storage: Any) -> None:
    made = engine(axis_order=axis_order, storage=storage, implementation="pallas_interpret")
    assert made.generate(prompts(), NEW_TOKENS) == greedy()
    assert min(made.statistics.histogram) > 0


@pytest.mark.parametrize("implementation", ["xla", on_gpu])
def test_plain_steps_in_a_wide_block_equal_greedy(implementation: Any) -> None:
    """The reference itself run through the verify step of D tokens, one of them valid."""
    need(implementation)
    made = engine(drafter=NoDrafts(), implementation=implementation)
    assert made.generate(prompts(), NEW_TOKENS) == greedy()
    assert made.statistics.histogram == [len(prompts()) * (NEW_TOKENS - 1), 0, 0, 0]


@pytest.mark.parametrize("implementation", ["xla", on_gpu])
def test_bfloat16(implementation: Any) -> None:
    """In 16 bits the order of a sum shows in its last place, so programs of other shapes may decide a near tie
    differently; the verify step of D tokens against itself may not, with one token valid or with all."""
    need(implementation)
    plain = engine(drafter=NoDrafts(), implementation=implementation, dtype="bfloat16")
    made = engine(implementation=implementation, dtype="bfloat16")
    assert made.generate(prompts(), 100) == plain.generate(prompts(), 100)
    assert made.statistics.mean_accepted_length > 1.2


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_corrupted_replay_is_accepted_at_the_chosen_rate(acceptance: float) -> None:
    """Equal tokens at every rate; each draft behind accepted ones is accepted with the chosen probability."""
    made = engine(drafter=corrupted_replay(11, MAX_LEN, 256, acceptance))
    assert replayed(made, range(8), NEW_TOKENS) == greedy()
    counts = made.statistics
    for position, (proposed, accepted) in enumerate(zip(counts.proposed, counts.accepted, strict=True)):
        expected = acceptance ** (position + 1)
        deviation = np.sqrt(expected * (1 - expected) / proposed)
        assert abs(accepted / proposed - expected) <= 4 * deviation + 1e-12


@pytest.mark.usefixtures("fresh_steps")
@pytest.mark.parametrize("fault", ["window starts one late", "window starts one early", "conv commit skipped"])
def test_a_planted_fault_changes_the_tokens(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The tests above can fail: what engines got wrong is seen in the tokens of most prompts."""
    take, commit = jax_impl.commit.take_windows, decode.commit_after_verify

    def shifted(windows: Any, accepted: Any, *arguments: Any, spec: Any, **options: Any) -> Any:
        if spec.conv_dim == CONV_DIM:  # the convolution's, not the recurrent state's
            accepted = jnp.clip(accepted + (1 if fault.endswith("late") else -1), 1, TOKENS)
        return take(windows, accepted, *arguments, spec=spec, **options)

    def skipped(cache: HybridCache, *arguments: Any, **options: Any) -> HybridCache:
        return HybridCache(cache.conv, commit(cache, *arguments, **options).recurrent_state)

    if fault == "conv commit skipped":
        monkeypatch.setattr(decode, "commit_after_verify", skipped)
    else:
        monkeypatch.setattr(jax_impl.commit, "take_windows", shifted)
    made = engine(drafter=corrupted_replay(11, MAX_LEN, 256, 0.6), implementation="xla")
    wrong = [got != expected for got, expected in zip(replayed(made, range(8), NEW_TOKENS), greedy(), strict=True)]
    assert sum(wrong) >= 6


# ---- one step --------------------------------------------------------------------------------------------------------


def test_verification_leaves_what_is_committed_alone() -> None:
    """Pools of both kinds keep their bits; the recurrent states of one row after n tokens are those of n steps."""
    config, parameters = model("float32")
    made = engine(drafter=NoDrafts())
    made.add(prompts(), 8)
    state, slots = made.state, made._slots_of_rows[:3]
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, TOKENS)), jnp.int32)
    valid = jnp.asarray([4, 2, 1], jnp.int32)
    verify = jax.jit(hybrid.verify, static_argnums=1)
    past = state.lengths[slots] - 1
    _, cache, step_states = verify(parameters, config, state.cache, tokens, valid, past, slots)
    before, after = state.cache.hybrid, cache.hybrid
    assert_same_bits(np.asarray(after.conv.conv_state), np.asarray(before.conv.conv_state))
    assert_same_bits(np.asarray(after.recurrent_state), np.asarray(before.recurrent_state))
    for row, v in enumerate(valid.tolist()):  # a token that is not valid leaves the state of the last valid one
        for token in range(v, TOKENS):
            assert_same_bits(np.asarray(step_states[:, row, token]), np.asarray(step_states[:, row, v - 1]))


def test_a_donated_step_stays_in_place() -> None:
    """Every array of the state keeps its buffer: no copy of a pool. float32, which needs no copy on any backend."""
    made = engine()
    made.add(prompts(), 50)
    made.step()

    def addresses() -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(made.state) if leaf.nbytes > 1024]

    before = addresses()
    for _ in range(3):
        made.step()
    assert sorted(addresses()) == sorted(before)  # equal shapes may trade places


def test_steps_do_not_wait_for_the_host() -> None:
    """No callback in the program, and steps launched ahead say the same, beyond the end of some requests too."""
    stop = greedy()[1][17]
    made = engine(stop_token_ids=(stop,))
    arguments = (made.parameters, made.state, made.drafter, made._slots_of_rows)
    program = decode.verify_step.trace(*arguments, config=made.config, implementation="xla").jaxpr
    assert "callback" not in str(program)
    requests = [new.request for new in made.add(prompts(), [3, 30, 30, 3, 30, 30, 30, 30])]
    results = [made.launch() for _ in range(29)]
    for result in results:
        made.collect(result)
    for tokens, request in zip(greedy(), requests, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else NEW_TOKENS
        assert request.tokens == tokens[: min(end, request.max_new_tokens)]
    assert requests[1].finish_reason == "stop"
    assert made.statistics.tokens == sum(len(request.tokens) - 1 for request in requests)  # nothing behind an end


# ---- requests --------------------------------------------------------------------------------------------------------


def poisoned(state: decode.DecodeState) -> decode.DecodeState:
    """Every float of the cache a NaN, as a bad owner may leave it."""
    nan = lambda leaf: jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    return dataclasses.replace(state, cache=jax.tree.map(nan, state.cache))


def test_requests_join_and_leave_and_reuse_slots() -> None:
    """Twelve requests of different lengths through two rows and three slots, which start full of NaN."""
    made = small_engine()
    made.state = poisoned(made.state)
    which = [0, 7, 3, 1, 5, 2, 6, 4, 0, 3, 7, 1]
    budgets = [17, 1, 40, 2, 9, 30, 3, 25, 5, 1, 12, 28]
    seen: dict[int, set[int]] = {}
    generated: list[list[int]] = [[] for _ in which]
    for index, new in made.stream([prompts()[i] for i in which], budgets):
        generated[index] += new.tokens
        seen.setdefault(new.request.slot, set()).add(index)
    assert generated == [greedy()[i][:budget] for i, budget in zip(which, budgets, strict=True)]
    assert sorted(seen) == [0, 1, 2]
    assert min(len(indices) for indices in seen.values()) > 1
    assert (made.free, made.requests) == (2, {})


def test_a_cancelled_request_leaves_its_slot() -> None:
    made = small_engine()
    first, second = (new.request for new in made.add(prompts()[:2], 60))
    for _ in range(3):
        made.step()
    made.leave(first)
    (third,) = (new.request for new in made.add([prompts()[4]], 50))
    assert third.row == first.row
    while made.requests:
        made.step()
    assert (first.finish_reason, third.finish_reason) == (None, "length")
    assert [second.tokens, third.tokens] == [greedy()[1][:60], greedy()[4][:50]]


@pytest.mark.parametrize(("rows", "slots"), [(3, 2), (2, 3)])
def test_out_of_slots_is_named_and_loses_nothing(rows: int, slots: int) -> None:
    made = small_engine(max_requests=rows, num_slots=slots)
    requests = [new.request for new in made.add(prompts()[:1], 30)]
    message = rf"expected at most 1 requests, got 2: {slots - 1} slots and {rows - 1} rows are free"
    with pytest.raises(OutOfSlotsError, match=message):
        made.add(prompts()[1:3], 30)
    assert (made.free, len(made.requests)) == (1, 1)
    requests += [new.request for new in made.add(prompts()[1:2], 30)]
    made.step()
    with pytest.raises(OutOfSlotsError, match="at most 0 requests, got 1"):
        made.add(prompts()[2:3], 30)
    while made.requests:
        made.step()
    requests += [new.request for new in made.add(prompts()[2:3], 30)]
    while made.requests:
        made.step()
    assert [request.tokens for request in requests] == [tokens[:30] for tokens in greedy()[:3]]


def test_stop_tokens_end_a_sequence_inside_a_block() -> None:
    """The stop token is the last one handed out, wherever in a block it is accepted, and as the first token too."""
    ends = [greedy()[0][0], greedy()[1][37], greedy()[2][90]]
    expected = []
    for tokens in greedy():
        first = next((i for i, token in enumerate(tokens) if token in ends), NEW_TOKENS - 1)
        expected.append(tokens[: first + 1])
    assert len({len(tokens) for tokens in expected}) > 3
    made = engine(drafter=corrupted_replay(11, MAX_LEN, 256, 0.9), stop_token_ids=tuple(ends))
    assert replayed(made, range(8), NEW_TOKENS) == expected
    reasons = {"stop" if tokens[-1] in ends else "length" for tokens in expected}
    made.drafter = corrupted_replay(11, MAX_LEN, 256, 0.9)  # which knows nothing and proposes nothing
    finished = [new.request for _, new in made.stream(prompts(), NEW_TOKENS) if new.request.finish_reason]
    assert {request.finish_reason for request in finished} == reasons


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([], 3, "`prompt`: expected at least one token, got none."),
        ([3, 256], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 256."),
        ([3, -1], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got -1."),
        ([3], 0, "`max_new_tokens`: expected at least 1, got 0."),
        ([3] * 20, 13, "`max_len`: expected at least 33 tokens, got 32. There is a prompt of 20 and"),
    ],
)
def test_requests_that_can_never_be_served(prompt: list[int], budget: int, message: str) -> None:
    made = engine(max_len=32)
    with pytest.raises(ValueError, match=re.escape(message)):
        made.add([[1], prompt], budget)
    assert (made.free, made.requests) == (8, {})


def test_the_longest_sequence_fits() -> None:
    assert small_engine().generate([prompts()[7]], 33) == [greedy()[7][:33]]


@pytest.mark.parametrize(("options", "name"), [({"max_len": 4097}, "max_len"), ({"max_requests": 0}, "max_requests")])
def test_engine_sizes(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`: expected"):
        engine(**options)


# ---- drafters --------------------------------------------------------------------------------------------------------


def looked_up(history: list[int], max_drafts: int, max_ngram: int = 3) -> list[int]:
    """The drafter's rule as loops."""
    for ngram in range(min(max_ngram, len(history) - 1), 0, -1):
        found = [
            history[start + ngram :][:max_drafts]
            for start in range(len(history) - ngram)
            if history[start : start + ngram] == history[-ngram:]
        ]
        if found:
            return max(reversed(found), key=len)
    return []


@pytest.mark.parametrize("max_drafts", [0, 1, 3, 7])
def test_prompt_lookup_by_loops(max_drafts: int) -> None:
    """Random histories over few words, one token long too; what is behind a history is never looked at."""
    rng = np.random.default_rng(max_drafts)
    max_len, batch = 23, 300
    lengths = rng.integers(1, max_len + 1, batch).astype(np.int32)
    history = rng.integers(0, 4, (batch, max_len)).astype(np.int32)
    propose = jax.jit(PromptLookup().propose, static_argnums=4)
    drafts = propose(jnp.asarray(history), jnp.asarray(lengths), jnp.asarray(lengths), jnp.int32(0), max_drafts)
    expected = [looked_up(row[:length].tolist(), max_drafts) for row, length in zip(history, lengths, strict=True)]
    tokens, counts = np.asarray(drafts.tokens), np.asarray(drafts.count)
    assert [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)] == expected
    assert {len(row) for row in expected} == set(range(max_drafts + 1))


def test_replay_proposes_what_it_knows() -> None:
    drafter: CorruptedReplay = corrupted_replay(3, 8, 10, 1.0).remember(2, [1, 2, 3, 4, 9])
    history = jnp.zeros((3, 8), jnp.int32)
    slots, lengths = jnp.asarray([2, 2, 0], jnp.int32), jnp.asarray([1, 4, 1], jnp.int32)
    drafts = drafter.propose(history, lengths, slots, jnp.int32(0), 3)
    assert drafts.tokens.tolist() == [[2, 3, 4], [9, 0, 0], [0, 0, 0]]
    assert drafts.count.tolist() == [3, 1, 0]
    wrong = dataclasses.replace(drafter, acceptance=jnp.float32(0)).propose(history, lengths, slots, jnp.int32(0), 3)
    assert wrong.tokens.tolist() == [[3, 4, 5], [0, 0, 0], [0, 0, 0]]


def test_statistics_by_hand() -> None:
    counts = Statistics(3)
    counts.add([3, 1, 0], [3, 2, 0])
    counts.add([1, 2, 0], [1, 3, 0])
    assert (counts.steps, counts.request_steps, counts.tokens) == (2, 4, 7)
    assert counts.histogram == [2, 1, 1]
    assert (counts.proposed, counts.accepted) == ([3, 2], [2, 1])
    assert (counts.mean_accepted_length, counts.position_rates) == (1.75, [2 / 3, 1 / 2])
