"""What an engine keeps when requests fail, when streams share it or end early, and what its size is said to be."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.layout import STORAGES
from jax_impl.model import attention
from jax_impl.model.decode import Engine, cache_bytes, prefill_bytes, prefill_step
from jax_impl.model.tiny import tiny_model

pytest.importorskip("safetensors", reason="safetensors is not installed")

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What the prompts generate."""
    return engine(model).generate(PROMPTS, 8)


def engine(model: Any, **options: Any) -> Engine:
    return Engine(*model, **{"max_requests": 2, "max_len": 32, **options})


# ---- requests that cannot join ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_add_that_raises_loses_nothing(
    model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The prefill fails when rows and slots are taken, or when its result is read; another request decodes on."""
    made = engine(model, num_slots=3)
    (first,) = (new.request for new in made.add(PROMPTS[:1], 8))
    rows, slots, prefill = list(made._rows), list(made._free_slots), made._prefill

    def failing(*arguments: Any) -> Any:
        if when == "after":
            prefill(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made, "_prefill", failing)
        with pytest.raises(KeyboardInterrupt) as raised:
            made.add(PROMPTS[1:], 8)
    assert not hasattr(raised.value, "__notes__")
    assert (list(made._rows), list(made._free_slots), list(made.requests.values())) == (rows, slots, [first])
    made.step()
    (second,) = (new.request for new in made.add(PROMPTS[1:], 8))
    while made.requests:
        made.step()
    assert [first.tokens, second.tokens] == expected


def test_an_implementation_that_is_not_here_loses_nothing(model: Any) -> None:
    made = engine(model, implementation="pallas")
    with pytest.raises(ValueError, match="implementation"):
        made.add(PROMPTS, 3)
    assert (made.free, made.requests) == (2, {})


def test_a_state_that_is_gone_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that fails after it was given the state leaves no engine, and says so."""
    made = engine(model)

    def failing(*arguments: Any) -> Any:
        jax.tree.map(lambda leaf: leaf.delete(), made.state)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made, "_prefill", failing)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        made.add(PROMPTS, 3)
    assert ["make a new engine" in note for note in raised.value.__notes__] == [True]
    assert (made.free, made.requests) == (2, {})


# ---- arguments of the engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"storage": "x", "axis_order": "y", "implementation": "z"}, "implementation axis_order storage"),
        (
            {"max_requests": 0, "num_slots": -3, "max_len": 1, "num_draft_tokens": 0, "drafter": 3},
            "max_len max_requests drafter num_slots num_draft_tokens",
        ),
        ({"max_requests": "2", "max_len": 4097}, "max_len max_requests"),  # and not num_slots, which follows it
        ({"max_requests": 2**31, "stop_token_ids": "x"}, "stop_token_ids max_requests"),
        ({"config": 1, "parameters": 2, "max_len": "3", "num_draft_tokens": 0, "storage": []},
         "config parameters max_len num_draft_tokens storage"),
    ],
)  # fmt: skip
def test_all_wrong_arguments_are_in_one_message(model: Any, options: dict[str, Any], names: str) -> None:
    given = dict(zip(("config", "parameters"), model, strict=True))
    arguments: dict[str, Any] = given | {"max_requests": 2, "max_len": 32} | options
    with pytest.raises(ValueError, match="expected") as raised:
        Engine(**arguments)
    assert re.findall(r"^`(\w+)`: expected ", str(raised.value), re.M) == names.split()
    assert len(str(raised.value).splitlines()) == len(names.split())


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([1, 1.7], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 1.7."),
        (["1"], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 1."),
        ([1], 2.5, "`max_new_tokens`: expected an integer, got 2.5."),
        ([1], [3, 4], "`max_new_tokens`: expected one number, or one of each of 1 prompts, got 2."),
    ],
)
def test_numbers_that_are_no_integers(model: Any, prompt: Any, budget: Any, message: str) -> None:
    made = engine(model)
    for call in (made.add, made.generate):
        with pytest.raises(ValueError, match=re.escape(message)):
            call([prompt], budget)
    assert (made.free, made.requests) == (2, {})


@pytest.mark.parametrize(
    ("length", "budget", "message"),
    [
        (3, 4094, "`max_new_tokens`: expected at most 4093 behind a prompt of 3 tokens, got 4094. The model has 4096 "
         "positions: ask for fewer tokens, or shorten the prompt."),
        (4095, 2, "`max_new_tokens`: expected at most 1 behind a prompt of 4095 tokens, got 2. The model has 4096 "
         "positions: ask for fewer tokens, or shorten the prompt."),
        (4096, 2, "`prompt`: expected at most 4095 tokens, got 4096. The model has 4096 positions, and a new token "
         "needs one: shorten the prompt."),
        (3, 4093, "`max_len`: expected at least 4096 tokens, got 32. There is a prompt of 3 and "
         "max_new_tokens = 4093."),
    ],
)  # fmt: skip
def test_a_larger_max_len_is_asked_for_where_the_model_allows_it(
    model: Any, length: int, budget: int, message: str
) -> None:
    with pytest.raises(ValueError, match="expected") as raised:
        engine(model).check_request([1] * length, budget)
    assert str(raised.value) == message


def test_integers_of_any_type(model: Any, expected: list[list[int]]) -> None:
    made = engine(model, stop_token_ids=[np.int32(255)])
    prompts: Any = [np.asarray(PROMPTS[0], np.int16), [jnp.int32(token) for token in PROMPTS[1]]]
    budgets: list[Any] = [np.int64(4), jnp.int32(4), np.asarray([4, 4]), (4, np.uint8(4))]
    for budget in budgets:
        assert made.generate(prompts, budget) == [tokens[:4] for tokens in expected]


# ---- streams ---------------------------------------------------------------------------------------------------------


def in_turn(streams: list[Any]) -> Iterable[tuple[int, Any]]:
    """One progress of each stream after the other until all have ended."""
    running = dict(enumerate(streams))
    while running:
        for index, stream in list(running.items()):
            try:
                yield index, next(stream)[1]
            except StopIteration:
                del running[index]


@pytest.mark.parametrize("rows", [1, 2])
def test_streams_of_one_engine_hand_out_all_tokens(model: Any, expected: list[list[int]], rows: int) -> None:
    """Each steps the other's requests too, or waits for a row; the last progress of a request says why it ended."""
    made, got = engine(model, max_requests=rows), [[], []]
    reasons: list[list[Any]] = [[], []]
    for index, new in in_turn([made.stream([prompt], 8) for prompt in PROMPTS]):
        got[index] += new.tokens
        reasons[index].append(new.request.finish_reason if len(got[index]) == 8 else None)
    assert got == expected
    assert [[reason for reason in seen if reason] for seen in reasons] == [["length"], ["length"]]
    assert (made.free, made.requests) == (rows, {})


def test_a_stream_that_ends_early_frees_its_slots(model: Any, expected: list[list[int]]) -> None:
    """Its own only: a request beside it stays."""
    made = engine(model, max_requests=3)
    (other,) = (new.request for new in made.add(PROMPTS[:1], 8))
    stream: Any = made.stream([*PROMPTS, [7]], 20)
    next(stream)
    assert (made.free, len(made.requests)) == (0, 3)
    stream.close()
    assert (made.free, list(made.requests.values())) == (2, [other])
    for _, new in made.stream(PROMPTS[1:], 8):
        assert new.tokens
        break
    del new
    assert list(made.requests.values()) == [other]
    while made.requests:
        made.step()
    assert other.tokens == expected[0]


def test_a_request_that_is_made_to_leave_its_stream(model: Any, expected: list[list[int]]) -> None:
    made, got = engine(model), [[], []]
    for index, new in made.stream(PROMPTS, 8):
        got[index] += new.tokens
        if index == 0 and new.request.identity in made.requests:
            made.leave(new.request)
    assert got == [expected[0][: len(got[0])], expected[1]]
    assert len(got[0]) == 1


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("requests", "tokens"), [(1, 300), (3, 40), (9, 33)])
def test_attention_in_parts_is_attention(
    model: Any, monkeypatch: pytest.MonkeyPatch, requests: int, tokens: int
) -> None:
    """Parts that do not divide the tokens, against all of them at once; old keys are NaN."""
    config, parameters = model
    weights = parameters.layers[1].mixer
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    q, gate = draw(requests, tokens, 4, 16), draw(requests, tokens, 4, 16)
    keys, values = draw(requests, tokens + 9, 2, 16), draw(requests, tokens + 9, 2, 16)
    values = values.at[:, tokens + 5 :].set(jnp.nan)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) + 5, (requests, tokens))
    num_keys = jnp.full(requests, tokens + 5, jnp.int32)
    arguments = (weights, q, gate, keys, values, positions, num_keys)
    whole, parts = attention.query_block, []
    for block in (lambda batch, tokens: tokens, whole, lambda batch, tokens: 7):
        monkeypatch.setattr(attention, "query_block", block)
        parts.append(np.asarray(attention.attend(*arguments)))
    scale = np.abs(parts[0]).max() * (tokens + 14) * np.finfo(np.float32).eps  # of sums over keys in another order
    assert config.num_heads == 4
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], rtol=0, atol=scale)


def test_scores_are_held_in_parts() -> None:
    """256 tokens in all, at least 32 of each sequence, and never more than there are."""
    blocks = [attention.query_block(*sizes) for sizes in [(1, 4096), (2, 4096), (8, 64), (300, 4096), (1, 4), (8, 32)]]
    assert blocks == [256, 128, 32, 32, 4, 32]


@pytest.mark.parametrize(("requests", "max_len"), [(8, 4096), (1, 4096), (16, 50)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_counts_the_prefill(model: Any, dtype: Any, requests: int, max_len: int) -> None:
    """What the compiler says that the longest prefill takes, which is the scores' square when nothing divides it."""
    config, parameters = tiny_model(dtype, num_hidden_layers=2, full_attention_interval=2)
    made = Engine(config, parameters, max_requests=requests, max_len=max_len)
    length = max(32, 1 << (max_len - 1).bit_length())
    tokens, ints = np.zeros((requests, length), np.int32), np.zeros((3, requests), np.int32)
    analysis = prefill_step.lower(parameters, made.state, tokens, *ints, config=config).compile().memory_analysis()
    assert analysis is not None
    counted = prefill_bytes(config, dtype, max_requests=requests, max_len=max_len)
    assert counted / 3 < analysis.temp_size_in_bytes <= counted
    sizes: dict[str, Any] = {"max_requests": requests, "max_len": max_len, "num_draft_tokens": 4}
    assert cache_bytes(config, dtype, **sizes) == counted + sum(
        leaf.nbytes for leaf in jax.tree.leaves(made.state.cache)
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_the_size_counts_the_storage(model: Any, storage: Any) -> None:
    """And, where that is more than a prefill, the recurrent states of a step."""
    sizes: dict[str, Any] = {"max_requests": 2, "max_len": 64, "num_draft_tokens": 32}
    cache = Engine(*model, storage=storage, **sizes).state.cache
    step_states_bytes = 32 * cache.hybrid.recurrent_state.nbytes
    largest = max(step_states_bytes, prefill_bytes(model[0], "float32", max_requests=2, max_len=64))
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert cache_bytes(model[0], "float32", storage=storage, **sizes) == allocated + largest
