"""Verify D and commit n is n steps of plain decoding, bit for bit within a backend, for every n and over many steps."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_impl.layout import ConvCacheSpec
from tests.adapters import DEFINITION, Path
from tests.cases import assert_same_bits, both_orders, both_storages, poison, spec_of, values


def ints(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def decode(
    path: Path,
    pool: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """`counts[b]` one-token steps of request b, one token of every request that still has one at a time: (y, pool)."""
    y = np.zeros_like(x)
    for token in range(counts.max(initial=0)):
        running = np.where(counts > token, slots, -1).astype(np.int32)
        y[:, token], pool = path.update(x[:, token], pool, weight, state_indices=running, **options)
    return y, pool


LONG_RUNS = [
    pytest.param(spec_of(4, 4, num_layers=1), id="K4-D4-bfloat16"),
    pytest.param(
        spec_of(3, 5, num_layers=1, dtype="float16", axis_order="channel_major"), id="K3-D5-float16-channel_major"
    ),
    pytest.param(spec_of(5, 2, num_layers=1, dtype="float32", storage="dense"), id="K5-D2-float32-dense"),
    pytest.param(spec_of(3, 3, num_layers=1, state_len=3, axis_order="channel_major"), id="K3-S3-D3-channel_major"),
    pytest.param(spec_of(2, 3, num_layers=1, dtype="float32"), id="K2-D3-float32"),
]


@pytest.mark.parametrize("spec", LONG_RUNS)
def test_fifty_steps_of_random_acceptance(any_path: Path, spec: ConvCacheSpec) -> None:
    """After every step the pool equals the one-token run's and the definition's; y of accepted tokens too.

    Four requests; between them a padding row, rows that are permuted anew in each step, drafts that are shorter in some
    steps (v < D), and steps that accept nothing. float32 inputs are finer than a 16-bit state.
    """
    steps = 50 if any_path.is_fast else 8
    rng = np.random.default_rng(spec.width)
    slots = ints(7, 2, -1, 9, 4)
    weight, pool = values((128, spec.width), "float32", 1), values(spec.state_shape, spec.dtype, 2)
    windows = poison(spec.windows_shape, spec.dtype)
    by_token, by_definition = pool, pool
    for step in range(steps):
        x = values((5, spec.num_draft_tokens, 128), "float32", 1000 + step)
        valid = rng.integers(1, spec.num_draft_tokens + 1, 5).astype(np.int32)
        accepted = rng.integers(0, valid + 1).astype(np.int32)
        rows = rng.permutation(spec.max_requests)[:5].astype(np.int32)
        shared: dict[str, Any] = {"spec": spec, "window_rows": rows, "num_valid_tokens": valid}
        y, windows, after = any_path.verify(x, pool, windows, weight, state_indices=slots, layer=0, **shared)
        assert_same_bits(after, pool, f"pool after verify in step {step}")
        pool = any_path.commit(pool, windows, slots, accepted, **shared)
        counts = np.where(slots < 0, 0, accepted)
        one_by_one, by_token = decode(any_path, by_token, x, weight, slots, counts, spec=spec, layer=0)
        assert_same_bits(pool, by_token, f"pool after step {step}")
        _, by_definition = decode(DEFINITION, by_definition, x, weight, slots, counts, spec=spec, layer=0)
        assert_same_bits(pool, by_definition, f"pool after step {step} against the definition")
        was_accepted = np.arange(spec.num_draft_tokens) < counts[:, None]
        assert_same_bits(y[was_accepted], one_by_one[was_accepted], f"y of step {step}")


@pytest.mark.parametrize(
    ("width", "dtype", "with_bias", "activation"),
    [(2, "bfloat16", False, None), (4, "float16", True, "silu"), (4, "bfloat16", False, "silu")],
)
@both_orders
def test_tokens_at_once_equal_tokens_one_by_one(
    any_path: Path, axis_order: Any, dtype: Any, with_bias: bool, width: int, activation: Any
) -> None:
    """float32 inputs finer than the state: both ways round the column before it is used (no excess precision).

    Without a bias the first sum is of two products, which a compiler may fuse with either; it must choose alike.
    """
    conv_dim = 96 if any_path.is_fast else 128
    tokens = 5 if any_path.is_fast else 3
    spec = spec_of(width, tokens, conv_dim=conv_dim, axis_order=axis_order, dtype=dtype)
    single = dataclasses.replace(spec, num_draft_tokens=1)
    pool, x = values(spec.state_shape, dtype, 1), values((3, tokens, conv_dim), "float32", 2)
    weight, slots = values((conv_dim, width), "float32", 3), ints(8, 3, 5)
    bias = values((conv_dim,), "float32", 4) if with_bias else None
    options: dict[str, Any] = {"state_indices": slots, "layer": 1, "activation": activation}
    at_once, windows, _ = any_path.verify(
        x, pool, poison(spec.windows_shape, dtype), weight, bias, spec=spec, **options
    )
    stepped, committed = pool, pool
    row = poison(single.windows_shape, dtype)
    for token in range(tokens):
        y, stepped = any_path.update(x[:, token], stepped, weight, bias, spec=spec, **options)
        assert_same_bits(y, at_once[:, token], f"y of token {token}, update")
        y, row, _ = any_path.verify(x[:, token : token + 1], committed, row, weight, bias, spec=single, **options)
        assert_same_bits(y, at_once[:, token : token + 1], f"y of token {token}, verify of one")
        committed = any_path.commit(committed, row, slots, ints(1, 1, 1), spec=single)
        n = np.full(3, token + 1, np.int32)
        window = any_path.gather(windows, n, spec=spec)[1]
        assert_same_bits(stepped[1, slots], window, f"state after {token + 1} tokens, update")
        assert_same_bits(committed[1, slots], window, f"state after {token + 1} tokens, verify of one")


@pytest.mark.parametrize(
    ("dtype", "tokens", "with_bias"),
    [("bfloat16", 7, True), ("float32", 7, False), ("float32", 7, True), ("bfloat16", 35, False)],
)
@both_orders
def test_a_prompt_at_once_equals_its_tokens_one_by_one(
    any_path: Path, axis_order: Any, dtype: Any, tokens: int, with_bias: bool
) -> None:
    """Whole, in two chunks of which the first is shorter than the state, and token by token."""
    spec = spec_of(4, 2, axis_order=axis_order, dtype=dtype)
    x, weight = values((2, tokens, 128), "float32", 2), values((128, 4), "float32", 3)
    pool, slots = values(spec.state_shape, dtype, 1), ints(8, 3)
    options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1}
    options |= {"bias": values((128,), "float32", 4)} if with_bias else {}
    y, whole = any_path.prefill(x, pool, weight, **options)
    first, chunked = any_path.prefill(x[:, :2], pool, weight, **options)
    second, chunked = any_path.prefill(x[:, 2:], chunked, weight, has_initial_state=np.asarray([True, True]), **options)
    assert_same_bits(np.concatenate([first, second], axis=1), y)
    assert_same_bits(chunked, whole)
    emptied = pool.copy()
    emptied[1, slots] = 0
    del options["state_indices"]
    one_by_one, stepped = decode(any_path, emptied, x, weight, slots, ints(tokens, tokens), **options)
    assert_same_bits(stepped, whole)
    if "triton" not in any_path.name:  # its prefill is the eager one: another arithmetic
        assert_same_bits(one_by_one, y)


@both_orders
@both_storages
def test_a_step_without_drafts_follows_a_partial_acceptance(any_path: Path, axis_order: Any, storage: Any) -> None:
    """n = 3 of 4, then one token with v = 1 and n = 1: the second step starts from the window after three tokens."""
    spec = ConvCacheSpec(1, 3, 2, 128, 4, 4, dtype="float32", axis_order=axis_order, storage=storage)
    pool, weight = np.zeros(spec.state_shape, np.float32), np.ones((128, 4), np.float32)
    windows = poison(spec.windows_shape, "float32")
    shared: dict[str, Any] = {"spec": spec, "window_rows": ints(1)}
    step: dict[str, Any] = {"state_indices": ints(2), "layer": 0, "activation": None}
    x = np.tile(np.asarray([1, 2, 3, 4], np.float32)[None, :, None], (1, 1, 128))
    y, windows, _ = any_path.verify(x, pool, windows, weight, **shared, **step)
    assert y[0, :, 0].tolist() == [1, 3, 6, 10]
    pool = any_path.commit(pool, windows, ints(2), ints(3), **shared)
    x = poison(x.shape, "float32")
    x[0, 0] = 10
    y, windows, _ = any_path.verify(x, pool, windows, weight, **shared, **step, num_valid_tokens=ints(1))
    assert y[0, :, 0].tolist() == [1 + 2 + 3 + 10, 0, 0, 0]
    pool = any_path.commit(pool, windows, ints(2), ints(1), **shared, num_valid_tokens=ints(1))
    assert (pool[0, 2, :, 64] if axis_order == "time_major" else pool[0, 2, 64]).tolist() == [2, 3, 10]


def test_speculative_and_plain_requests_in_one_batch(any_path: Path) -> None:
    """[speculative, plain, speculative] with n = [3, 1, 2]: each gets its own state."""
    spec = spec_of(4, 3, dtype="float32")
    pool, x = values(spec.state_shape, "float32", 1), values((3, 3, 128), "float32", 2)
    weight, slots, accepted, valid = values((128, 4), "float32", 3), ints(5, 1, 8), ints(3, 1, 2), ints(3, 1, 3)
    windows, together = poison(spec.windows_shape, "float32"), pool
    for layer in range(spec.num_layers):
        _, windows, _ = any_path.verify(
            x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer, num_valid_tokens=valid
        )
    together = any_path.commit(pool, windows, slots, accepted, spec=spec, num_valid_tokens=valid)
    expected = pool
    for layer in range(spec.num_layers):
        _, expected = decode(any_path, expected, x, weight, slots, accepted, spec=spec, layer=layer)
    assert_same_bits(together, expected)
