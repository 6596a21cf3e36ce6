"""What fails while an engine runs: interrupts, memory that runs out, logits that are NaN, threads beside each other.

Every fault is planted. After it the engine is asked again and says what an undisturbed one says, and no slot is lost.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from jax_impl import ConvCacheSpec
from jax_impl.model import decode
from jax_impl.model.decode import Engine, NotANumberError, OutOfSlotsError
from jax_impl.model.tiny import tiny_model
from tests.cases import assert_same_bits, values

PROMPTS = [[1, 2, 3], [4, 5], [9, 8, 7, 6]]
BUDGET = 9


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    return tiny_model(num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What the prompts generate undisturbed."""
    return engine(model).generate(PROMPTS, BUDGET)


def engine(model: Any, **options: Any) -> Engine:
    return Engine(*model, **{"max_requests": 2, "num_slots": 3, "max_len": 32, **options})


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1099511627776 bytes.")


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def bits_of(state: Any) -> list[np.ndarray]:
    """A copy of every array of an engine's state."""
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def run_out(made: Engine) -> None:
    while made.requests:
        made.step()


# ---- steps that raise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [out_of_memory, interrupted])
@pytest.mark.parametrize("after_steps", [0, 1])
def test_a_step_that_cannot_be_launched(
    model: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], after_steps: int
) -> None:
    """The compiled step raises before it ran: pool, buffer and slots keep their bits, and it can be repeated."""
    made = engine(model)
    requests = [new.request for new in made.add(PROMPTS[:2], BUDGET)]
    for _ in range(after_steps):
        made.step()
    before, tokens, free = bits_of(made.state), [list(one.tokens) for one in requests], made.free
    with monkeypatch.context() as patch:
        patch.setattr(decode, "verify_step", fault)
        for _ in range(2):  # and fails when it is repeated
            with pytest.raises((jax.errors.JaxRuntimeError, KeyboardInterrupt)):
                made.step()
    for got, was in zip(bits_of(made.state), before, strict=True):
        assert_same_bits(got, was)
    assert ([one.tokens for one in requests], made.free, made.statistics.steps) == (tokens, free, after_steps)
    run_out(made)
    assert [one.tokens for one in requests] == expected[:2]
    assert (made.free, len(made._free_slots)) == (2, 3)


@pytest.mark.parametrize("then", ["step", "leave", "join"])
def test_an_interrupt_while_the_step_runs(
    model: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The device has moved on, the host has not: the next step hands out the tokens of this one first.

    Between the two a request may leave, and another may join in its row.
    """
    made = engine(model)
    first, second = (new.request for new in made.add(PROMPTS[:2], BUDGET))
    with monkeypatch.context() as patch:
        patch.setattr(decode.jax, "device_get", interrupted)
        for _ in range(2):  # also when the wait itself is repeated
            with pytest.raises(KeyboardInterrupt):
                made.step()
    running = [first, second]
    if then != "step":
        made.leave(first)
        running = [second]
    if then == "join":
        running += [new.request for new in made.add(PROMPTS[2:], BUDGET)]
    steps = made.statistics.steps
    progress = made.step()
    assert made.statistics.steps == steps + 1
    assert all(new.request is not first for new in progress) == (then != "step")
    run_out(made)
    by_prompt = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    assert [one.tokens for one in running] == [by_prompt[one.prompt] for one in running]
    assert (made.free, len(made._free_slots)) == (2, 3)


def test_a_state_that_a_failed_step_took_along(model: Any) -> None:
    """Nothing is computed from what is gone: the message says what to do."""
    made = engine(model)
    made.add(PROMPTS[:2], BUDGET)
    jax.tree.map(lambda leaf: leaf.delete(), made.state)
    with pytest.raises(RuntimeError) as raised:
        made.step()
    assert str(raised.value) == (
        "`state`: expected the arrays of the engine, got deleted ones. A step that failed while it ran took them "
        "along: make a new engine, and add its requests with what they have generated behind the prompts."
    )


def test_requests_of_a_lost_engine_go_on_in_a_new_one(model: Any, expected: Any) -> None:
    """What the message says to do works."""
    lost = engine(model)
    requests = [new.request for new in lost.add(PROMPTS[:2], BUDGET)]
    lost.step()
    again = engine(model)
    prompts = [[*one.prompt, *one.tokens] for one in requests]
    rest = again.generate(prompts, [BUDGET - len(one.tokens) for one in requests])
    assert [one.tokens + more for one, more in zip(requests, rest, strict=True)] == expected[:2]


def test_between_verify_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of `jit`, an interrupt there has cost nothing: the pool is as it was, and the step is done again."""
    spec = ConvCacheSpec(2, 5, 3, 12, 4, 3, "float32")
    pool, windows = (jnp.asarray(values(shape, "float32", 3)) for shape in (spec.state_shape, spec.windows_shape))
    x, weight = jnp.asarray(values((2, 3, 12), "float32", 4)), jnp.asarray(values((12, 4), "float32", 5))
    before, slots = np.array(pool), jnp.asarray([3, 0])
    verify = jax.jit(jax_impl.causal_conv1d_verify, static_argnames=("spec", "layer"), donate_argnames="conv_windows")

    def step(pool: jax.Array, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        for layer in range(spec.num_layers):
            _, windows = verify(x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer)
        return jax_impl.commit_conv_state(pool, windows, slots, jnp.asarray([2, 3]), spec=spec), windows

    expected, _ = step(pool, jnp.array(windows))
    with monkeypatch.context() as patch:
        patch.setattr(jax_impl.commit, "commit_conv_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(pool, jnp.array(windows))
    assert_same_bits(np.asarray(pool), before)
    got, _ = step(pool, jnp.array(windows))
    assert_same_bits(np.asarray(got), np.asarray(expected))


# ---- logits that are no numbers --------------------------------------------------------------------------------------


def poisoned(parameters: Any) -> Any:
    """The model with one NaN in its output projection: all logits' maximum is NaN, no state is."""
    return parameters._replace(lm_head=parameters.lm_head.at[17, 3].set(jnp.nan))


def test_nan_logits_move_nothing(model: Any, expected: Any) -> None:
    """No token is accepted, so that no state moves: with the right parameters again, the same step is taken."""
    made = engine(model)
    requests = [new.request for new in made.add(PROMPTS[:2], BUDGET)]
    made.step()
    hybrid, tokens = bits_of(made.state.cache.hybrid.conv.conv_state), [list(one.tokens) for one in requests]
    recurrent, lengths = bits_of(made.state.cache.hybrid.recurrent_state), np.array(made.state.lengths)
    good, made.parameters = made.parameters, poisoned(made.parameters)
    with pytest.raises(NotANumberError) as raised:
        made.step()
    assert str(raised.value) == (
        "`parameters`: expected logits that are numbers, got NaN for requests [0, 1]. "
        "They are where they were before the step: repeat it, or make them leave."
    )
    assert [one.tokens for one in requests] == tokens
    assert_same_bits(bits_of(made.state.cache.hybrid.conv.conv_state)[0], hybrid[0])
    assert_same_bits(bits_of(made.state.cache.hybrid.recurrent_state)[0], recurrent[0])
    np.testing.assert_array_equal(np.asarray(made.state.lengths), lengths)
    made.parameters = good
    run_out(made)
    assert [one.tokens for one in requests] == expected[:2]


def test_nan_of_one_request_leaves_the_others_alone(model: Any, expected: Any) -> None:
    """A NaN in one slot: its request is stuck and named; the one beside it and the next in its slot are right."""
    made = engine(model)
    first, second = (new.request for new in made.add(PROMPTS[:2], BUDGET))
    pool = made.state.cache.hybrid.conv.conv_state
    spoilt = dataclasses.replace(made.state.cache.hybrid.conv, conv_state=pool.at[:, first.slot].set(jnp.nan))
    hybrid = dataclasses.replace(made.state.cache.hybrid, conv=spoilt)
    made.state = dataclasses.replace(made.state, cache=dataclasses.replace(made.state.cache, hybrid=hybrid))
    before = list(first.tokens)
    while second.finish_reason is None:
        with pytest.raises(NotANumberError, match=r"got NaN for requests \[0\]"):
            made.step()
    assert (first.tokens, second.tokens) == (before, expected[1])
    made.leave(first)
    assert made.generate(PROMPTS, BUDGET) == expected  # through all three slots
    assert (made.free, len(made._free_slots)) == (2, 3)


def test_nan_behind_a_draft_cuts_the_run(model: Any) -> None:
    """Tokens before the first NaN are accepted, those from there on are not."""
    greedy, block = jnp.asarray([[5, 6, 7]] * 4), jnp.asarray([[1, 5, 6]] * 4)
    is_number = jnp.asarray([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], bool)
    is_stop = jnp.zeros_like(is_number)
    accepted = decode._accept(block, greedy, is_number, jnp.full(4, 3), is_stop)
    assert accepted.tolist() == [3, 2, 1, 0]


def test_a_prompt_with_nan_logits_does_not_join(model: Any, expected: Any) -> None:
    made = engine(model)
    good, made.parameters = made.parameters, poisoned(made.parameters)
    with pytest.raises(NotANumberError) as raised:
        made.add(PROMPTS[:2], BUDGET)
    assert str(raised.value) == "`prompts`: expected logits that are numbers, got NaN for prompts [0, 1]."
    assert (made.free, made.requests, len(made._free_slots)) == (2, {}, 3)
    made.parameters = good
    assert made.generate(PROMPTS, BUDGET) == expected


def test_a_full_engine_is_as_it_was(model: Any, expected: Any) -> None:
    made = engine(model)
    requests = [new.request for new in made.add(PROMPTS[:2], BUDGET)]
    before = bits_of(made.state)
    with pytest.raises(OutOfSlotsError):
        made.add(PROMPTS[2:], BUDGET)
    for got, was in zip(bits_of(made.state), before, strict=True):
        assert_same_bits(got, was)
    run_out(made)
    assert [one.tokens for one in requests] == expected[:2]


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_on_caches_of_their_own() -> None:
    """Eight threads call the same jitted functions, traced by whoever comes first; results are those of one thread."""
    spec = ConvCacheSpec(2, 7, 4, 20, 4, 3, "float32")
    weight = jnp.asarray(values((20, 4), "float32", 1))

    def rollback(pool: Any, windows: Any, x: Any, slots: Any, accepted: Any) -> Any:
        for layer in range(spec.num_layers):
            _, windows = jax_impl.causal_conv1d_verify(
                x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer
            )
        return jax_impl.commit_conv_state(pool, windows, slots, accepted, spec=spec), windows

    def decode_with(seed: int, step: Any) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        pool, windows = (
            jnp.asarray(values(shape, "float32", seed)) for shape in (spec.state_shape, spec.windows_shape)
        )
        for _ in range(25):
            x = rng.standard_normal((3, 3, 20)).astype(np.float32)
            slots, accepted = rng.permutation(7)[:3].astype(np.int32), rng.integers(-1, 5, 3).astype(np.int32)
            pool, windows = step(pool, windows, x, slots, accepted)
        return np.asarray(pool), np.asarray(windows)

    shared = jax.jit(rollback, donate_argnums=(0, 1))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda seed: decode_with(seed, shared), range(8)))
    alone = jax.jit(rollback, donate_argnums=(0, 1))
    for seed, got in enumerate(together):
        for array, expected in zip(got, decode_with(seed, alone), strict=True):
            assert_same_bits(array, expected, f"thread {seed}")


def test_engines_in_threads(model: Any, expected: Any) -> None:
    """Whole engines too, each with its own state, sharing the compiled step."""
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: engine(model).generate(PROMPTS, BUDGET), range(4))) == [expected] * 4
