"""Verify, update and prefill: y against float64 within one bound, state and buffer bit for bit, on every path.

Everything that must not be read is a NaN with a payload: slots that no live request names, inputs of skipped requests
and of tokens beyond v, the column that only a state of K columns keeps.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import causal_conv1d_prefill
from jax_impl.layout import AXIS_ORDERS, ConvCacheSpec
from jax_impl.prefill import chunk_of
from tests.adapters import DEFINITION, Path
from tests.adapters import path as named_path
from tests.cases import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    Batch,
    assert_same_bits,
    assert_y_close,
    both_orders,
    both_storages,
    mixed_batch,
    on_grid,
    poison,
    spec_of,
    unique_bits,
    values,
)


def ints(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def live_requests(spec: ConvCacheSpec, batch: Batch) -> np.ndarray:
    """Requests that verify does not skip; it knows no accepted counts."""
    live = (batch.slots >= 0) & (batch.slots < spec.num_slots) & (batch.valid >= 1)
    live &= (batch.rows >= 0) & (batch.rows < spec.max_requests) & (batch.valid <= spec.num_draft_tokens)
    return live if batch.null_slot is None else live & (batch.slots != batch.null_slot)


def poisoned_pool(spec: ConvCacheSpec, slots: np.ndarray, seed: int) -> np.ndarray:
    """Normal values in the named slots, NaN in all others and in the column that the convolution never reads."""
    pool = poison(spec.state_shape, spec.dtype)
    pool[:, slots] = values((spec.num_layers, len(slots), *spec.window_shape), spec.dtype, seed)
    unread = np.moveaxis(pool, spec.column_axis, 0)[: spec.state_columns - (spec.width - 1)]
    unread[...] = poison(unread.shape, spec.dtype)
    return pool


def magnitude_of(x: Any, pool: Any, windows: Any, weight: Any, bias: Any, **options: Any) -> np.ndarray:
    """|bias| + Σ |weight · column| of every element of y."""
    positive = [None if array is None else np.abs(array) for array in (x, pool, windows, weight, bias)]
    return DEFINITION.verify_exactly(*positive, **options | {"activation": None})[0]


# --- the grid ---------------------------------------------------------------------------------------------------------


@on_grid(every_second_for="jax-xla")
def test_verify_equals_the_definition(path: Path, spec: ConvCacheSpec) -> None:
    """One layer of a stack, all reasons to skip mixed; dtypes, bias, SiLU, rows, v and null slot take turns."""
    turn = spec.width + spec.num_draft_tokens + (spec.axis_order == "time_major") + 2 * (spec.storage == "dense")
    explicit = [("rows", "valid"), ("valid",), ("rows",), ()][turn % 4]
    batch = mixed_batch(spec, seed=turn, explicit=explicit, null_slot=[0, None, 0][turn % 3])
    live = live_requests(spec, batch)
    x = values((len(live), spec.num_draft_tokens, spec.conv_dim), DTYPES[(turn // 2) % 3], turn)
    x[~live | (batch.valid < 1)] = poison((), x.dtype.name)
    for request, valid in enumerate(batch.valid.clip(0, spec.num_draft_tokens)):
        x[request, valid:] = poison((), x.dtype.name)
    pool = poisoned_pool(spec, batch.slots[live], turn)
    windows = unique_bits(spec.windows_shape, spec.dtype, turn)
    weight = values((spec.conv_dim, spec.width), DTYPES[(turn // 3) % 3], turn + 1)
    bias = values((spec.conv_dim,), DTYPES[(turn // 4) % 3], turn + 2) if turn % 3 else None
    options: dict[str, Any] = {
        "spec": spec,
        "state_indices": batch.slots,
        "layer": turn % spec.num_layers,
        "window_rows": batch.given("rows"),
        "num_valid_tokens": batch.given("valid"),
        "null_slot": batch.null_slot,
        "activation": ["silu", None][turn % 2],
    }
    y, buffer, pool_after = path.verify(x, pool, windows, weight, bias, **options)
    exact, expected, _ = DEFINITION.verify_exactly(x, pool, windows, weight, bias, **options)
    assert_same_bits(pool_after, pool, "conv_state")
    assert_same_bits(buffer, expected, "conv_windows")
    computed = live[:, None] & (np.arange(spec.num_draft_tokens) < batch.valid[:, None])
    assert y.dtype == x.dtype
    assert_same_bits(y[~computed], np.zeros_like(y[~computed]), "y of what is skipped")
    magnitude = magnitude_of(x, pool, windows, weight, bias, **options)
    assert_y_close(y[computed], exact[computed], magnitude[computed], spec)


# --- verify against numbers written out -------------------------------------------------------------------------------


@both_orders
def test_one_hot_weights_pick_columns(any_path: Path, axis_order: Any) -> None:
    """Weights [1, 0, 0, 0] give the oldest column, [0, 0, 0, 1] the current input."""
    spec = ConvCacheSpec(1, 2, 1, 128, 4, 3, dtype="float32", axis_order=axis_order)
    history = np.broadcast_to(np.asarray([1, 2, 3], np.float32)[:, None], (3, 128))
    pool = np.zeros(spec.state_shape, np.float32)
    pool[0, 1] = history if axis_order == "time_major" else history.T
    x = np.broadcast_to(np.asarray([4, 5, 6], np.float32)[None, :, None], (1, 3, 128)).copy()
    windows = np.zeros(spec.windows_shape, np.float32)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(1), "layer": 0, "activation": None}
    for tap, expected in enumerate([[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]):
        weight = np.zeros((128, 4), np.float32)
        weight[:, tap] = 1
        y, buffer, _ = any_path.verify(x, pool, windows, weight, **options)
        assert y[0, :, 77].tolist() == expected
        columns = buffer[0, 0, :, 5] if axis_order == "time_major" else buffer[0, 0, 5]
        assert columns.tolist() == [2, 3, 4, 5, 6]
        first, _ = any_path.update(x[:, 0], pool, weight, **options)
        assert first[0, 77] == expected[0]
        y, _ = any_path.prefill(x, pool, weight, **options, has_initial_state=np.asarray([True]))
        assert y[0, :, 77].tolist() == expected


@both_orders
@both_storages
def test_fewer_tokens_than_state_columns(any_path: Path, axis_order: Any, storage: Any) -> None:
    """K = 5, D = 2: old state columns in front, the new ones behind."""
    spec = ConvCacheSpec(1, 2, 1, 128, 5, 2, dtype="float32", axis_order=axis_order, storage=storage)
    history = np.broadcast_to(np.asarray([1, 2, 3, 4], np.float32)[:, None], (4, 128))
    pool = np.zeros(spec.state_shape, np.float32)
    pool[0, 1] = history if axis_order == "time_major" else history.T
    x = np.broadcast_to(np.asarray([5, 6], np.float32)[None, :, None], (1, 2, 128)).copy()
    weight = np.ones((128, 5), np.float32)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(1), "layer": 0, "activation": None}
    y, windows, _ = any_path.verify(x, pool, np.zeros(spec.windows_shape, np.float32), weight, **options)
    assert y[0, :, 0].tolist() == [15, 20]
    for n, expected in [(1, [2, 3, 4, 5]), (2, [3, 4, 5, 6])]:
        taken = any_path.gather(windows, ints(n), spec=spec)
        assert (taken[0, 0, :, 9] if axis_order == "time_major" else taken[0, 0, 9]).tolist() == expected


def test_silu_and_bias(any_path: Path) -> None:
    """SiLU(bias + weight · x) for one tap that is not zero."""
    spec = ConvCacheSpec(1, 2, 1, 128, 2, 1, dtype="float32")
    weight = np.tile(np.asarray([0, 2], np.float32), (128, 1))
    x, bias = np.full((1, 1, 128), 1.5, np.float32), np.full(128, -1, np.float32)
    windows, pool = np.zeros(spec.windows_shape, np.float32), np.zeros(spec.state_shape, np.float32)
    y, _, _ = any_path.verify(x, pool, windows, weight, bias, spec=spec, state_indices=ints(1), layer=0)
    assert y == pytest.approx(2 / (1 + np.exp(-2)), rel=1e-6)


@both_orders
def test_with_width_two_sliding_and_dense_hold_the_same_bits(any_path: Path, axis_order: Any) -> None:
    sliding = spec_of(2, 5, axis_order=axis_order, dtype="float16")
    dense = dataclasses.replace(sliding, storage="dense")
    pool, x = values(sliding.state_shape, "float16", 1), values((3, 5, 128), "float16", 2)
    weight, windows = values((128, 2), "float16", 3), poison(sliding.windows_shape, "float16")
    options: dict[str, Any] = {"state_indices": ints(4, 1, 9), "layer": 1, "num_valid_tokens": ints(5, 2, 3)}
    y, columns, _ = any_path.verify(x, pool, windows, weight, spec=sliding, **options)
    same, per_token, _ = any_path.verify(x, pool, windows.reshape(dense.windows_shape), weight, spec=dense, **options)
    assert_same_bits(same, y)
    per_token = np.squeeze(per_token, dense.column_axis)  # [L, R, token, channel] in both orders
    assert_same_bits(np.ascontiguousarray(np.moveaxis(columns, sliding.column_axis, 2)), per_token)


# --- what verify touches ----------------------------------------------------------------------------------------------


@both_orders
@both_storages
def test_the_pool_keeps_its_bits(path: Path, axis_order: Any, storage: Any) -> None:
    """Repeated verify steps with other inputs leave nothing in the pool: an aborted step needs no undo."""
    spec = spec_of(4, 3, axis_order=axis_order, storage=storage, dtype="float32")
    pool = poisoned_pool(spec, ints(3, 5, 8), 1)
    windows, weight = poison(spec.windows_shape, spec.dtype), values((128, 4), "float32", 2)
    options: dict[str, Any] = {
        "spec": spec,
        "state_indices": ints(3, 5, -1, 8),
        "layer": 1,
        "num_valid_tokens": ints(3, 1, 3, 2),
    }
    for repeat in range(200 if path.is_fast else 5):
        x = values((4, 3, 128), "float32", repeat)
        _, windows, after = path.verify(x, pool, windows, weight, **options)
        assert_same_bits(after, pool)


@both_orders
@both_storages
def test_columns_beyond_the_valid_tokens_keep_their_bits(path: Path, axis_order: Any, storage: Any) -> None:
    """v = 0 … D+1 in one batch: the row's other columns, the other rows and the other layers are as before."""
    spec = spec_of(4, 5, num_layers=3, axis_order=axis_order, storage=storage)
    pool, windows = values(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    x, weight = values((7, 5, 128), spec.dtype, 3), values((128, 4), spec.dtype, 4)
    valid = ints(3, 0, 5, 1, 6, 2, 4)
    options: dict[str, Any] = {
        "spec": spec,
        "state_indices": ints(1, 2, 3, 4, 5, 6, 7),
        "layer": 1,
        "num_valid_tokens": valid,
    }
    y, after, _ = path.verify(x, pool, windows, weight, **options)
    for row, v in enumerate(valid):
        before, now = windows[1, row], after[1, row]
        written = 0 if not 1 <= v <= 5 else v if storage == "dense" else spec.first_token_column + v
        if storage == "sliding" and axis_order == "channel_major":
            before, now = before.T, now.T
        assert_same_bits(np.ascontiguousarray(now[written:]), np.ascontiguousarray(before[written:]))
        assert not written or (now[:written].view(np.uint16) != before[:written].view(np.uint16)).any()
        assert not y[row, 0 if not 1 <= v <= 5 else v :].view(np.uint16).any()
    assert_same_bits(after[[0, 2]], windows[[0, 2]])
    assert_same_bits(after[1, 7:], windows[1, 7:])


@pytest.mark.parametrize("dtype", DTYPES)
@both_orders
def test_columns_are_bit_copies(path: Path, axis_order: Any, dtype: Any) -> None:
    """State columns with any bits, NaNs and subnormals among them, arrive as they were; so do inputs of that dtype."""
    spec = spec_of(4, 3, axis_order=axis_order, dtype=dtype, num_layers=1)
    pool, x = unique_bits(spec.state_shape, dtype, 1), unique_bits((9, 3, 128), dtype, 2)
    windows, weight = poison(spec.windows_shape, dtype), np.zeros((128, 4), np.float32)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(9, 8, 7, 6, 5, 4, 3, 2, 1), "layer": 0}
    with np.errstate(all="ignore"):
        x[np.isnan(x)] = 1.5  # whether an input that is a NaN keeps its payload is the backend's business
        _, got, _ = path.verify(x, pool, windows, weight, **options)
        _, expected, _ = DEFINITION.verify(x, pool, windows, weight, **options)
        if dtype == "bfloat16" and path.widens_bfloat16:
            assert (np.isnan(got) == np.isnan(expected)).all()
            got, expected = (np.where(np.isnan(array), np.asarray(0, dtype), array) for array in (got, expected))
    assert_same_bits(got, expected)


def test_no_nan_of_a_previous_owner(path: Path) -> None:
    """A row full of NaN, a pool full of NaN but for one slot: y is finite, and what is committed too."""
    spec = spec_of(4, 3)
    pool = poisoned_pool(spec, ints(6), 1)
    windows, weight = poison(spec.windows_shape, spec.dtype), values((128, 4), spec.dtype, 2)
    x = values((3, 3, 128), spec.dtype, 3)
    x[0], x[2], x[1, 2:] = poison((), spec.dtype), poison((), spec.dtype), poison((), spec.dtype)
    slots, valid = ints(-1, 6, INT32_MAX), ints(3, 2, 3)
    for layer in range(spec.num_layers):
        y, windows, _ = path.verify(
            x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer, num_valid_tokens=valid
        )
        assert np.isfinite(y.astype(np.float32)).all()
        assert not y[[0, 2]].view(np.uint16).any()
    committed = path.commit(pool, windows, slots, ints(3, 2, 1), spec=spec, num_valid_tokens=valid)
    assert np.isfinite(committed[:, 6].astype(np.float32)).all()


@pytest.mark.parametrize(("axis_order", "storage"), [("time_major", "dense"), ("channel_major", "sliding")])
def test_two_requests_of_one_grid_point(monkeypatch: pytest.MonkeyPatch, axis_order: Any, storage: Any) -> None:
    """Large batches give a grid point two requests: live next to skipped, short next to long, verify and update."""
    from jax_impl import conv

    path = named_path("jax-pallas_interpret")
    spec = spec_of(4, 3, axis_order=axis_order, storage=storage)
    slots, valid, rows = ints(2, -1, 0, 7, 4, 5), ints(3, 3, 1, 2, 0, 3), ints(5, 1, 0, 3, 8, 2)
    pool = poisoned_pool(spec, ints(2, 0, 7, 5), 1)
    windows, weight = unique_bits(spec.windows_shape, spec.dtype, 2), values((128, 4), "float32", 3)
    x = values((6, 3, 128), "float32", 4)
    step: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1, "as_given": True}
    options: dict[str, Any] = step | {"window_rows": rows, "num_valid_tokens": valid}
    singly = path.verify(x, pool, windows, weight, **options), path.update(x[:, 0], pool, weight, **step)
    monkeypatch.setattr(conv, "FULL_GRID", dict.fromkeys(AXIS_ORDERS, 1))
    assert conv.requests_per_block(6, 1, 6, axis_order) == 2
    assert conv.requests_per_block(5, 1, 6, axis_order) == 1
    assert conv.requests_per_block(6, 1, 19, axis_order) == 1
    y, buffer, _ = path.verify(x, pool, windows, weight, **options)
    assert_same_bits(y, singly[0][0])
    assert_same_bits(buffer, singly[0][1])
    y, pool = path.update(x[:, 0], pool, weight, **step)
    assert_same_bits(y, singly[1][0])
    assert_same_bits(pool, singly[1][1])


# --- layers, forms and indices ----------------------------------------------------------------------------------------


@both_orders
@both_storages
def test_one_layers_arrays_equal_a_layer_of_a_stack(path: Path, axis_order: Any, storage: Any) -> None:
    spec = spec_of(3, 3, axis_order=axis_order, storage=storage, dtype="float16")
    pool, windows = values(spec.state_shape, "float16", 1), poison(spec.windows_shape, "float16")
    x, weight = values((3, 3, 128), "float16", 3), values((128, 3), "float16", 4)
    slots, rows = ints(2, -1, 7), ints(5, 1, 0)
    options: dict[str, Any] = {"spec": spec, "state_indices": slots, "window_rows": rows}
    y, stacked, _ = path.verify(x, pool, windows, weight, layer=1, **options)
    same, single, _ = path.verify(x, pool[1], windows[1], weight, **options)
    assert_same_bits(same, y)
    assert_same_bits(single, stacked[1])
    assert_same_bits(stacked[0], windows[0])
    y, advanced = path.update(x[:, 0], pool, weight, layer=1, spec=spec, state_indices=slots)
    same, alone = path.update(x[:, 0], pool[1], weight, spec=spec, state_indices=slots)
    assert_same_bits(same, y)
    assert_same_bits(alone, advanced[1])
    assert_same_bits(advanced[0], pool[0])


@pytest.mark.parametrize("layer", [-1, 2, INT32_MIN, INT32_MAX])
def test_a_traced_layer_outside_the_stack_skips_everything(path: Path, layer: int) -> None:
    spec = spec_of(3, 3)
    pool, windows = values(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    x, weight = values((2, 3, 128), spec.dtype, 3), values((128, 3), spec.dtype, 4)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(2, 7), "layer": np.asarray(layer, np.int32)}
    y, buffer, _ = path.verify(x, pool, windows, weight, **options)
    assert not y.view(np.uint16).any()
    assert_same_bits(buffer, windows)
    y, after = path.update(x[:, 0], pool, weight, **options)
    assert not y.view(np.uint16).any()
    assert_same_bits(after, pool)
    y, after = path.prefill(x, pool, weight, **options)
    assert not y.view(np.uint16).any()
    assert_same_bits(after, pool)


def test_weights_of_checkpoints_have_an_axis_of_one(path: Path) -> None:
    spec = spec_of(4, 3)
    pool, windows = values(spec.state_shape, spec.dtype, 1), poison(spec.windows_shape, spec.dtype)
    x, weight = values((2, 3, 128), spec.dtype, 3), values((128, 4), spec.dtype, 4)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(2, 7), "layer": 0}
    y, buffer, _ = path.verify(x, pool, windows, weight, **options)
    same, again, _ = path.verify(x, pool, windows, weight[:, None, :], **options)
    assert_same_bits(same, y)
    assert_same_bits(again, buffer)


@both_orders
def test_requests_in_another_order_give_the_same(path: Path, axis_order: Any) -> None:
    spec = spec_of(4, 3, axis_order=axis_order, dtype="float32")
    pool, windows = values(spec.state_shape, "float32", 1), poison(spec.windows_shape, "float32")
    x, weight = values((5, 3, 128), "bfloat16", 3), values((128, 4), "float32", 4)
    slots, rows, order = ints(2, 7, 2, -1, 0), ints(5, 1, 0, 3, 8), [3, 1, 4, 0, 2]
    y, buffer, _ = path.verify(x, pool, windows, weight, spec=spec, layer=0, state_indices=slots, window_rows=rows)
    same, again, _ = path.verify(
        x[order], pool, windows, weight, spec=spec, layer=0, state_indices=slots[order], window_rows=rows[order]
    )
    assert_same_bits(same, y[order])
    assert_same_bits(again, buffer)


@both_orders
@both_storages
def test_no_requests(path: Path, axis_order: Any, storage: Any) -> None:
    spec = spec_of(3, 2, axis_order=axis_order, storage=storage)
    pool, windows = values(spec.state_shape, spec.dtype, 1), poison(spec.windows_shape, spec.dtype)
    weight, x = values((128, 3), spec.dtype, 4), np.zeros((0, 2, 128), spec.dtype)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(), "layer": 0}
    y, buffer, _ = path.verify(x, pool, windows, weight, **options)
    assert y.shape == (0, 2, 128)
    assert_same_bits(buffer, windows)
    y, after = path.update(x[:, 0], pool, weight, **options)
    assert y.shape == (0, 128)
    assert_same_bits(after, pool)
    y, after = path.prefill(x, pool, weight, **options)
    assert y.shape == (0, 2, 128)
    assert_same_bits(after, pool)


def test_other_integers_saturate_and_never_wrap(path: Path) -> None:
    spec = spec_of(3, 2)
    pool, windows = values(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    x, weight = values((4, 2, 128), spec.dtype, 3), values((128, 3), spec.dtype, 4)
    wide: dict[str, Any] = {
        "state_indices": [3, 2**32 + 3, 5, 4],
        "window_rows": np.asarray([2, 1, 2**32 + 1, 0]),
        "num_valid_tokens": np.asarray([2, 2, 2, 2**32 + 1], np.uint64),
    }
    plain = {"state_indices": ints(3, -1, 5, 4), "window_rows": ints(2, 1, -1, 0), "num_valid_tokens": ints(2, 2, 2, 0)}
    y, buffer, _ = path.verify(x, pool, windows, weight, spec=spec, layer=1, as_given=True, **wide)
    same, expected, _ = path.verify(x, pool, windows, weight, spec=spec, layer=1, **plain)
    assert_same_bits(y, same)
    assert_same_bits(buffer, expected)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_rounded_to_the_state_once(path: Path, dtype: Any, x_dtype: Any) -> None:
    """Columns are x in the state's dtype, round to nearest even; y is what those columns give, in x's dtype."""
    spec = spec_of(3, 3, dtype=dtype)
    x = values((4, 3, 128), x_dtype, 3)
    if x_dtype == "float32":  # ties of bfloat16 and float16, both to even: down, up, and just above the tie
        x[0, 0, :6] = np.asarray(
            [0x3F808000, 0x3F818000, 0x3F808001, 0x3F801000, 0x3F803000, 0x3F801001], np.uint32
        ).view(np.float32)
    pool, windows = values(spec.state_shape, dtype, 1), poison(spec.windows_shape, dtype)
    weight, bias = values((128, 3), "float32", 4), values((128,), "float32", 5)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(2, 7, 0, 5), "layer": 1}
    y, buffer, _ = path.verify(x, pool, windows, weight, bias, **options)
    exact, expected, _ = DEFINITION.verify_exactly(x, pool, windows, weight, bias, **options)
    assert_same_bits(buffer, expected)
    assert_y_close(y, exact, magnitude_of(x, pool, windows, weight, bias, **options), spec)


@both_orders
def test_float16_subnormals(path: Path, axis_order: Any) -> None:
    """Inputs, states and outputs below 2^-14: none is flushed to zero on the way into a column or into y."""
    spec = spec_of(3, 3, dtype="float16", axis_order=axis_order)
    tiny = np.float32(2.0**-24)
    x = values((2, 3, 128), "float32", 3) * 300 * tiny
    pool = (values(spec.state_shape, "float32", 1) * 300 * tiny).astype(np.float16)
    windows, weight = poison(spec.windows_shape, "float16"), np.ones((128, 3), np.float16)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(2, 7), "layer": 1, "activation": None}
    for inputs in (x, x.astype(np.float16)):
        y, buffer, _ = path.verify(inputs, pool, windows, weight, **options)
        exact, expected, _ = DEFINITION.verify_exactly(inputs, pool, windows, weight, None, **options)
        assert np.count_nonzero(expected[1, :2]) > 0.98 * expected[1, :2].size
        assert_same_bits(buffer, expected)
        assert_y_close(y, exact, magnitude_of(inputs, pool, windows, weight, None, **options), spec)


def test_products_are_not_rounded_before_the_sum(path: Path) -> None:
    """(1 + 2^-7)^2 - (1 + 2^-6) = 2^-14 exactly; with products rounded to bfloat16 it would be 0."""
    spec = spec_of(2, 1, num_layers=1, dtype="bfloat16")
    pool = np.full(spec.state_shape, 1 + 2**-7, "bfloat16")
    x = np.full((1, 1, 128), 1 + 2**-6, "bfloat16")
    weight = np.tile(np.asarray([1 + 2**-7, -1], np.float32), (128, 1)).astype("bfloat16")
    windows = poison(spec.windows_shape, spec.dtype)
    y, _, _ = path.verify(x, pool, windows, weight, spec=spec, state_indices=ints(3), layer=0, activation=None)
    assert (y == np.asarray(2**-14, "bfloat16")).all()


def test_bias_first_then_taps_from_oldest_to_newest(path: Path) -> None:
    """Each tap cancels the sum before it, so any other order of the same four terms gives another float32."""
    spec = spec_of(3, 1, num_layers=1, dtype="float32")
    big = np.float32(2**24)
    pool = np.zeros(spec.state_shape, np.float32)
    pool[0, 3] = np.asarray([1, 1], np.float32)[:, None]
    weight = np.tile(np.asarray([1, -big, 3], np.float32), (128, 1))  # ((2^24 + 1) - 2^24) + 3 = 0 + 3, ties to even
    bias, x = np.full(128, big), np.ones((1, 1, 128), np.float32)
    windows = poison(spec.windows_shape, spec.dtype)
    options: dict[str, Any] = {"spec": spec, "state_indices": ints(3), "layer": 0, "activation": None}
    y, _, _ = path.verify(x, pool, windows, weight, bias, **options)
    assert (y == 3).all()


# --- update and prefill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_len", [3, 4])
@both_orders
def test_update_equals_the_definition(path: Path, axis_order: Any, state_len: int) -> None:
    """State[1:] + x in live slots; every other slot and layer keeps its bits; y of skipped requests is zero."""
    spec = spec_of(4, 1, axis_order=axis_order, state_len=state_len)
    slots = ints(3, -1, 5, 0, spec.num_slots, 8, INT32_MIN, INT32_MAX, -spec.num_slots)
    live = ints(3, 5, 8)
    pool = poisoned_pool(spec, live, 1)
    x, weight, bias = values((9, 128), "float32", 2), values((128, 4), "float16", 3), values((128,), "float32", 4)
    x[[1, 3, 4, 6, 7, 8]] = poison((), "float32")
    options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1, "null_slot": 0}
    y, got = path.update(x, pool, weight, bias, **options)
    everyone = {"has_initial_state": np.ones(9, np.bool_)}
    exact, expected = DEFINITION.prefill_exactly(x[:, None], pool, weight, bias, **options, **everyone)
    assert_same_bits(got, expected)
    skipped = [1, 3, 4, 6, 7, 8]
    assert not y[skipped].view(np.uint32).any()
    magnitude = DEFINITION.prefill_exactly(
        np.abs(x[:, None]),
        np.abs(pool),
        np.abs(weight),
        np.abs(bias),
        **options | everyone | {"activation": None},
    )[0]
    assert_y_close(y[[0, 2, 5]], exact[[0, 2, 5], 0], magnitude[[0, 2, 5], 0], spec)


@pytest.mark.parametrize("state_len", [3, 4])
@both_orders
def test_ragged_prefill_equals_the_definition(path: Path, axis_order: Any, state_len: int) -> None:
    """Lengths below, at and above the state's columns, fresh and continued prompts, every reason to skip."""
    spec = spec_of(4, 2, num_slots=17, axis_order=axis_order, state_len=state_len, dtype="float16")
    lengths = ints(1, 2, 3, 4, 7, 1, 2, 7, 0, 8, -1, INT32_MIN, INT32_MAX, 5, 5)
    slots = ints(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1, 0)
    continues = np.asarray([False] * 5 + [True] * 10)
    pool = poisoned_pool(spec, ints(6, 7, 8), 1)
    if state_len == 4:
        pool[:, 6:9] = values((2, 3, *spec.window_shape), spec.dtype, 9)  # the oldest column moves into the new state
    x = values((15, 7, 128), "bfloat16", 2)
    for request, length in enumerate(lengths):
        x[request, max(0, length) if length <= 7 else 0 :] = poison((), "bfloat16")
    x[13:] = poison((), "bfloat16")
    weight = values((128, 4), "float32", 3)
    options: dict[str, Any] = {
        "spec": spec,
        "state_indices": slots,
        "lengths": lengths,
        "has_initial_state": continues,
        "layer": 1,
        "null_slot": 0,
    }
    y, got = path.prefill(x, pool, weight, **options)
    exact, expected = DEFINITION.prefill_exactly(x, pool, weight, None, **options)
    assert_same_bits(got, expected)
    computed = (np.arange(7) < lengths[:, None]) & ((slots > 0) & (lengths <= 7))[:, None]
    assert not y[~computed].view(np.uint16).any()
    magnitude = DEFINITION.prefill_exactly(
        np.abs(x), np.abs(pool), np.abs(weight), None, **options | {"activation": None}
    )[0]
    assert_y_close(y[computed], exact[computed], magnitude[computed], spec)


@pytest.mark.parametrize(("tokens", "width"), [(16, 4), (17, 4), (18, 3), (33, 2), (40, 8), (41, 4)])
@both_orders
def test_a_prompt_of_several_chunks_equals_the_definition(path: Path, axis_order: Any, tokens: int, width: int) -> None:
    """Lengths around every chunk's ends, prompts that end early, fresh and continued ones, with bias, in two blocks."""
    spec = spec_of(width, 2, num_slots=17, conv_dim=256, axis_order=axis_order, dtype="float32")
    lengths = ints(tokens, tokens - 1, 1, width - 1, 15, 16, min(17, tokens), 2, tokens, 0, tokens + 1)
    slots = ints(1, 2, 3, 4, 5, 6, 7, 8, -1, 9, 10)
    continues = np.asarray([True, False, True, True, False, True, False, True, True, True, True])
    pool = poisoned_pool(spec, slots[continues][:-3], 1)
    x = values((len(slots), tokens, 256), "float16", 2)
    for request, length in enumerate(lengths):
        x[request, max(0, length) if length <= tokens and slots[request] > 0 else 0 :] = poison((), "float16")
    weight, bias = values((256, width), "float32", 3), values((256,), "float32", 4)
    options: dict[str, Any] = {
        "spec": spec,
        "state_indices": slots,
        "lengths": lengths,
        "has_initial_state": continues,
        "layer": 1,
    }
    y, got = path.prefill(x, pool, weight, bias, **options)
    exact, expected = DEFINITION.prefill_exactly(x, pool, weight, bias, **options)
    assert_same_bits(got, expected)
    computed = (np.arange(tokens) < lengths[:, None]) & ((slots > 0) & (lengths <= tokens))[:, None]
    assert computed.sum() > 3 * tokens
    assert not y[~computed].view(np.uint16).any()
    magnitude = DEFINITION.prefill_exactly(
        np.abs(x), np.abs(pool), np.abs(weight), np.abs(bias), **options | {"activation": None}
    )[0]
    assert_y_close(y[computed], exact[computed], magnitude[computed], spec)


def test_every_chunk_but_the_first_has_its_history() -> None:
    """What the kernel relies on, for every length up to 200: chunks cover the prompt and start K-1 tokens into it."""
    for width in range(2, 10):
        for tokens in range(1, 200):
            chunk = chunk_of(tokens, width)
            assert chunk is not None
            assert chunk <= 16
            starts = [min(first, tokens - chunk) for first in range(0, tokens, chunk)]
            assert starts[0] == 0
            assert all(start >= width - 1 for start in starts[1:])
            assert {token for start in starts for token in range(start, start + chunk)} == set(range(tokens))


def test_a_wide_convolution_prefills_in_the_plain_form() -> None:
    """K = 12 has no chunks for 17 tokens: a named kernel is refused, and nobody's choice is the plain form."""
    spec = spec_of(12, 2)
    x, weight = jnp.zeros((1, 17, 128), jnp.bfloat16), jnp.zeros((128, 12), jnp.bfloat16)
    arguments = (x, jnp.zeros(spec.state_shape, jnp.bfloat16), weight)
    with pytest.raises(
        ValueError,
        match=r"`implementation`: expected a prompt that .* each with the K-1 = 11 tokens before it .* got 17 tokens",
    ):
        causal_conv1d_prefill(*arguments, spec=spec, state_indices=[1], layer=0, implementation="pallas_interpret")
    y, _ = causal_conv1d_prefill(*arguments, spec=spec, state_indices=[1], layer=0)
    assert y.shape == (1, 17, 128)


def test_prefill_without_options_fills_fresh_slots(path: Path) -> None:
    """No lengths: all T tokens. No initial state: what the slot held does not matter."""
    spec = spec_of(4, 2, dtype="float32")
    x, weight = values((2, 5, 128), "float32", 2), values((128, 4), "float32", 3)
    pool = poison(spec.state_shape, "float32")
    y, got = path.prefill(x, pool, weight, spec=spec, state_indices=ints(4, 9), layer=0)
    assert np.isfinite(y).all()
    assert_same_bits(got[0, [4, 9]], x[:, 2:])
    others = [0, 1, 2, 3, 5, 6, 7, 8, 10]
    assert_same_bits(got[0, others], pool[0, others])
    assert_same_bits(got[1], pool[1])
