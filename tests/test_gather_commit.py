"""Gather and commit are bit copies: every comparison here is of integers, on every path.

The batches hold every accepted count next to every reason to skip a request; elements are unique, so an element in the
wrong place is seen, and most 16-bit patterns are NaNs, subnormals or zeros of both signs at some place.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jax_impl.layout import ConvCacheSpec
from tests.adapters import DEFINITION, Path
from tests.cases import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    assert_same_bits,
    both_orders,
    both_storages,
    mixed_batch,
    on_grid,
    poison,
    spec_of,
    unique_bits,
)


def cache_of(spec: ConvCacheSpec, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A pool and a buffer whose elements are all different."""
    return unique_bits(spec.state_shape, spec.dtype, seed), unique_bits(spec.windows_shape, spec.dtype, seed + 7)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def arange_windows(spec: ConvCacheSpec, requests: int) -> np.ndarray:
    """A sliding float32 buffer with one layer and channel, where row r holds 10 r, 10 r + 1, …"""
    columns = np.arange(spec.num_columns, dtype=np.float32) + 10 * np.arange(requests, dtype=np.float32)[:, None]
    return columns.reshape(spec.windows_shape)


# --- the definition itself, and everyone, against numbers written out -------------------------------------------------


@both_orders
def test_the_picture(any_path: Path, axis_order: Any) -> None:
    """K = 4, D = 4: window n of columns 0 … 5 is columns n-1 … n+1; a skipped count reads zeros and commits nothing."""
    spec = ConvCacheSpec(1, 6, 5, 128, 4, 4, dtype="float32", axis_order=axis_order)
    by_time = np.broadcast_to(np.arange(6, dtype=np.float32)[None, None, :, None], (1, 5, 6, 128))
    windows = np.ascontiguousarray(by_time if axis_order == "time_major" else by_time.swapaxes(-1, -2))
    taken = any_path.gather(windows, ints(1, 2, 3, 4, 0), spec=spec)
    first_channel = taken[0, :, :, 0] if axis_order == "time_major" else taken[0, :, 0, :]
    assert first_channel.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [0, 0, 0]]
    pool = np.full(spec.state_shape, 9, np.float32)
    pool = any_path.commit(pool, windows, ints(3, 0, 5, 2, 1), ints(1, 2, 3, 4, 0), spec=spec)
    last_channel = pool[0, :, :, -1] if axis_order == "time_major" else pool[0, :, -1, :]
    assert last_channel.tolist() == [[1, 2, 3], [9, 9, 9], [3, 4, 5], [0, 1, 2], [9, 9, 9], [2, 3, 4]]


@both_orders
def test_state_of_k_columns_takes_windows_of_k(any_path: Path, axis_order: Any) -> None:
    spec = ConvCacheSpec(1, 3, 2, 128, 3, 2, dtype="float32", axis_order=axis_order, state_len=3)
    assert spec.num_columns == 4
    by_time = np.broadcast_to(np.arange(4, dtype=np.float32)[None, None, :, None], (1, 2, 4, 128))
    windows = np.ascontiguousarray(by_time if axis_order == "time_major" else by_time.swapaxes(-1, -2))
    taken = any_path.gather(windows, ints(1, 2), spec=spec)
    first_channel = taken[0, :, :, 0] if axis_order == "time_major" else taken[0, :, 0, :]
    assert first_channel.tolist() == [[0, 1, 2], [1, 2, 3]]


# --- the grid ---------------------------------------------------------------------------------------------------------


@on_grid()
def test_commit_equals_the_definition(path: Path, spec: ConvCacheSpec) -> None:
    """All counts and skips mixed; rows, valid tokens, the null slot and a track set are given in turn."""
    turn = spec.width + spec.num_draft_tokens + (spec.axis_order == "time_major") + 2 * (spec.storage == "dense")
    explicit = [("rows", "valid"), ("valid",), ("rows",), ()][turn % 4]
    batch = mixed_batch(spec, seed=turn, explicit=explicit, null_slot=[0, None, 0][turn % 3])
    pool, windows = cache_of(spec)
    options: dict[str, Any] = {
        "spec": spec,
        "window_rows": batch.given("rows"),
        "num_valid_tokens": batch.given("valid"),
        "null_slot": batch.null_slot,
    }
    if turn % 2:
        options |= track_set(spec, batch.slots, seed=turn)
    got = path.commit(pool, windows, batch.slots, batch.accepted, **options)
    assert_same_bits(got, DEFINITION.commit(pool, windows, batch.slots, batch.accepted, **options), "conv_state")


@on_grid()
def test_gather_equals_the_definition(path: Path, spec: ConvCacheSpec) -> None:
    explicit = ("rows",) if (spec.width + spec.num_draft_tokens) % 2 else ()
    batch = mixed_batch(spec, seed=3, explicit=explicit)
    _, windows = cache_of(spec)
    options = {"spec": spec, "window_rows": batch.given("rows")}
    got = path.gather(windows, batch.accepted, **options)
    assert_same_bits(got, DEFINITION.gather(windows, batch.accepted, **options), "windows")


def track_set(spec: ConvCacheSpec, slots: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Snapshots into slots that no request of the batch names, of counts -1 … D+1, with slots outside between them."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(-1, spec.num_draft_tokens + 2, len(slots)).astype(np.int32)
    free = [slot for slot in range(spec.num_slots) if slot not in slots]
    where = [*free, -1, spec.num_slots, INT32_MIN, INT32_MAX] + [-1] * len(slots)
    return {"track_indices": rng.permutation(np.asarray(where[: len(slots)], np.int32)), "track_num_tokens": counts}


# --- indices and padding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_elements", [3, 96, 1024])
@both_orders
def test_slots_outside_the_pool_write_nothing(path: Path, axis_order: Any, row_elements: int) -> None:
    """-1 is the last slot in JAX, C in layer 0 is slot 0 of layer 1 in memory: neither is written, nor others."""
    width, conv_dim = {3: (4, 1), 96: (4, 32), 1024: (9, 128)}[row_elements]
    if not path.is_fast:  # the kernels take multiples of 128 channels
        conv_dim = 128
    spec = spec_of(width, 2, conv_dim=conv_dim, axis_order=axis_order, dtype="float32")
    pool, windows = cache_of(spec)
    outside = ints(-1, spec.num_slots, spec.num_slots + 1, INT32_MIN, INT32_MAX, -spec.num_slots, -2)
    assert_same_bits(path.commit(pool, windows, outside, np.full_like(outside, 2), spec=spec), pool)


@both_orders
@both_storages
def test_counts_outside_the_tokens_write_nothing(path: Path, axis_order: Any, storage: Any) -> None:
    """n = 0, -1, D+1 and beyond: not the nearest window, not zeros."""
    spec = spec_of(4, 3, axis_order=axis_order, storage=storage)
    pool, windows = cache_of(spec)
    counts = ints(0, -1, 4, 5, 6, INT32_MIN, INT32_MAX)
    assert_same_bits(path.commit(pool, windows, ints(1, 2, 3, 4, 5, 6, 7), counts, spec=spec), pool)
    assert not path.gather(windows, counts, spec=spec).view(np.uint16).any()


@both_orders
@both_storages
def test_rows_outside_the_buffer_write_nothing(path: Path, axis_order: Any, storage: Any) -> None:
    spec = spec_of(3, 3, axis_order=axis_order, storage=storage)
    pool, windows = cache_of(spec)
    outside = ints(-1, spec.max_requests, spec.max_requests + 1, INT32_MIN, INT32_MAX)
    options = {"spec": spec, "window_rows": outside}
    assert_same_bits(path.commit(pool, windows, ints(1, 2, 3, 4, 5), ints(1, 2, 3, 1, 2), **options), pool)
    assert not path.gather(windows, ints(1, 2, 3, 1, 2), **options).view(np.uint16).any()


@pytest.mark.parametrize("null_slot", [0, 4])
def test_padding_rows_of_three_conventions(path: Path, null_slot: int) -> None:
    """The null slot, slot -1, and a live slot repeated with n = 0, each before and after the live request."""
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    slots, accepted = ints(null_slot, -1, 7, 7, 7, -1, null_slot), ints(1, 1, 0, 2, 0, 3, 3)
    got = path.commit(pool, windows, slots, accepted, spec=spec, null_slot=null_slot)
    expected = pool.copy()
    expected[:, 7] = windows[:, 3, 1:4]
    assert_same_bits(got, expected)


def test_without_a_null_slot_slot_zero_is_like_any_other(path: Path) -> None:
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    expected = pool.copy()
    expected[:, 0] = windows[:, 0, 2:5]
    assert_same_bits(path.commit(pool, windows, ints(0), ints(3), spec=spec), expected)


@both_orders
@both_storages
def test_permuted_rows_and_slots(path: Path, axis_order: Any, storage: Any) -> None:
    """Request b reads row p[b] and writes slot q[b]; all slots and all rows are in use."""
    spec = spec_of(4, 3, num_slots=9, axis_order=axis_order, storage=storage)
    pool, windows = cache_of(spec)
    rows, slots = ints(4, 0, 8, 2, 6, 1, 7, 3, 5), ints(8, 7, 1, 0, 3, 2, 6, 5, 4)
    accepted = ints(1, 2, 3, 3, 2, 1, 1, 3, 2)
    options = {"spec": spec, "window_rows": rows}
    got = path.commit(pool, windows, slots, accepted, **options)
    assert_same_bits(got[:, slots], path.gather(windows, accepted, **options))
    assert_same_bits(got, DEFINITION.commit(pool, windows, slots, accepted, **options))


def test_duplicate_live_slots_leave_all_others_right(path: Path) -> None:
    """The slot named twice holds one of the two windows or parts of them; every other slot is right."""
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    slots, accepted = ints(5, 2, 5, 8), ints(1, 2, 3, 1)
    got = path.commit(pool, windows, slots, accepted, spec=spec)
    expected = DEFINITION.commit(pool, windows, slots, accepted, spec=spec)
    others = [slot for slot in range(spec.num_slots) if slot != 5]
    assert_same_bits(got[:, others], expected[:, others])


def test_duplicate_rows_go_to_every_slot(path: Path) -> None:
    """Two requests may read one row: a fork of a sequence."""
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    options = {"spec": spec, "window_rows": ints(6, 6, 6)}
    got = path.commit(pool, windows, ints(1, 9, 4), ints(3, 3, 1), **options)
    assert_same_bits(got, DEFINITION.commit(pool, windows, ints(1, 9, 4), ints(3, 3, 1), **options))
    assert_same_bits(got[:, 1], got[:, 9])


def test_valid_tokens_bound_the_accepted_count(path: Path) -> None:
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    valid = ints(3, 2, 2, 1, 0, 4, INT32_MAX, INT32_MIN)
    accepted = ints(3, 2, 3, 2, 1, 1, 1, 1)
    slots = ints(1, 2, 3, 4, 5, 6, 7, 8)
    got = path.commit(pool, windows, slots, accepted, spec=spec, num_valid_tokens=valid)
    expected = pool.copy()
    expected[:, 1], expected[:, 2] = windows[:, 0, 2:5], windows[:, 1, 1:4]
    assert_same_bits(got, expected)


@both_orders
def test_track_set_is_its_own_step_of_the_same_row(path: Path, axis_order: Any) -> None:
    """A snapshot of an earlier count next to the commit, in one call; its own count of 0 or slot -1 writes nothing."""
    spec = spec_of(4, 3, axis_order=axis_order)
    pool, windows = cache_of(spec)
    track = {"track_indices": ints(4, 5, -1, 7), "track_num_tokens": ints(1, 0, 2, 3)}
    got = path.commit(pool, windows, ints(0, 1, 2, 3), ints(3, 2, 1, 0), spec=spec, **track)
    windows = windows if axis_order == "time_major" else windows.swapaxes(-1, -2)
    expected = pool.copy()
    by_time = expected if axis_order == "time_major" else expected.swapaxes(-1, -2)
    for slot, row, n in [(0, 0, 3), (1, 1, 2), (2, 2, 1), (4, 0, 1), (7, 3, 3)]:
        by_time[:, slot] = windows[:, row, n - 1 : n + 2]
    assert_same_bits(got, expected)


@both_orders
@both_storages
def test_no_requests(path: Path, axis_order: Any, storage: Any) -> None:
    spec = spec_of(3, 2, axis_order=axis_order, storage=storage)
    pool, windows = cache_of(spec)
    assert_same_bits(path.commit(pool, windows, ints(), ints(), spec=spec), pool)
    assert path.gather(windows, ints(), spec=spec).shape == (2, 0, *spec.window_shape)


def test_a_buffer_without_rows(path: Path) -> None:
    """max_requests = 0 is a legal geometry: every row is outside."""
    spec = spec_of(3, 2, max_requests=0)
    pool, windows = cache_of(spec)
    got = path.commit(pool, windows, ints(1, 2), ints(1, 2), spec=spec, window_rows=ints(0, -1))
    assert_same_bits(got, pool)


def index_kinds() -> list[Any]:
    """Slots 5, 7 and skips as other integers; 2^32 + 3 must not become slot 3."""
    wide = [5, 2**32 + 3, 7, -(2**32) + 4, 2**31, -1]
    unsigned = [5, 2**31 + 3, 7, 2**32 - 1, 2**32 - 11, 2**31]
    return [
        pytest.param(np.asarray(wide, np.int64), id="int64"),
        pytest.param(np.asarray(unsigned, np.uint32), id="uint32"),
        pytest.param(np.asarray([5, 2**63 + 3, 7, 2**32 + 2, 2**64 - 1, 2**31], np.uint64), id="uint64"),
        pytest.param(np.asarray([5, -1, 7, -128, 127, 99], np.int8), id="int8"),
        pytest.param(np.asarray([5, 255, 7, 11, 128, 200], np.uint8), id="uint8"),
        pytest.param(wide, id="list"),
        pytest.param(tuple(wide), id="tuple"),
        pytest.param(np.asarray([5, -1, 7, INT32_MIN, INT32_MAX, 11], np.int32), id="numpy int32"),
    ]


@pytest.mark.parametrize("slots", index_kinds())
def test_other_integers_saturate_and_never_wrap(path: Path, slots: Any) -> None:
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    got = path.commit(pool, windows, slots, [1, 1, 3, 1, 1, 1], spec=spec, as_given=True)
    expected = pool.copy()
    expected[:, 5], expected[:, 7] = windows[:, 0, 0:3], windows[:, 2, 2:5]
    assert_same_bits(got, expected)


def test_other_integers_as_counts_and_rows(path: Path) -> None:
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    counts, rows = np.asarray([2, 2**32 + 1, 1, 3]), np.asarray([8, 0, 2**32, 1], np.uint64)
    options = {"spec": spec, "window_rows": rows, "num_valid_tokens": [3, 3, 3, 2**40], "as_given": True}
    got = path.commit(pool, windows, [1, 2, 3, 4], counts, **options)
    expected = pool.copy()
    expected[:, 1] = windows[:, 8, 1:4]
    assert_same_bits(got, expected)
    taken = path.gather(windows, counts, spec=spec, window_rows=rows, as_given=True)
    assert_same_bits(taken[:, 0], windows[:, 8, 1:4])
    assert not taken[:, 1:3].view(np.uint16).any()


@pytest.mark.parametrize("bad", [np.asarray([True, False]), np.asarray([1.0, 2.0]), [True, False], [1.0, 2.0]])
def test_bools_and_floats_are_no_indices(path: Path, bad: Any) -> None:
    spec = spec_of(4, 3)
    pool, windows = cache_of(spec)
    with pytest.raises(ValueError, match=r"`state_indices`: expected an? .*integer"):
        path.commit(pool, windows, bad, [1, 1], spec=spec, as_given=True)
    with pytest.raises(ValueError, match=r"`num_accepted_tokens`: expected an? .*integer"):
        path.gather(windows, bad, spec=spec, as_given=True)


# --- what is copied ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@both_orders
def test_all_sixteen_bit_patterns_survive(path: Path, axis_order: Any, dtype: Any) -> None:
    """NaN payloads, signaling NaNs, subnormals and -0.0: 8 layers × 8 requests × 4 columns × 256 channels = 65,536."""
    spec = ConvCacheSpec(8, 9, 8, 256, 5, 1, dtype=dtype, axis_order=axis_order)
    windows = np.arange(65536, dtype=np.uint16).view(dtype).reshape(spec.windows_shape)
    pool = np.zeros(spec.state_shape, dtype)
    slots = ints(8, 7, 6, 5, 4, 3, 2, 1)
    got = path.commit(pool, windows, slots, np.full_like(slots, 1), spec=spec)
    assert_same_bits(got[:, slots], windows)
    assert_same_bits(path.gather(windows, np.full_like(slots, 1), spec=spec), windows)
    assert len(np.unique(got.view(np.uint16))) == 65536


def test_float32_patterns_survive(path: Path) -> None:
    """Quiet and signaling NaNs of both signs with payloads, infinities, zeros and subnormals."""
    spec = spec_of(3, 1, num_layers=1, dtype="float32")
    patterns = [
        0x7FC00001,
        0x7F800001,
        0xFFC12345,
        0xFF812345,
        0x7F800000,
        0xFF800000,
        0x80000000,
        1,
        0x807FFFFF,
        0x7FFFFFFF,
    ]
    windows = np.resize(np.asarray(patterns, np.uint32), spec.windows_shape).view(np.float32)
    got = path.commit(np.zeros(spec.state_shape, np.float32), windows, ints(3, 2), ints(1, 1), spec=spec)
    assert_same_bits(got[:, 3], windows[:, 0])
    assert_same_bits(path.gather(windows, ints(1, 1), spec=spec), windows[:, :2])


@both_orders
@both_storages
def test_columns_outside_the_window_are_not_read(path: Path, axis_order: Any, storage: Any) -> None:
    """A row full of NaN from its previous owner, but for the accepted window: no NaN reaches the pool."""
    spec = spec_of(4, 5, axis_order=axis_order, storage=storage, dtype="float32")
    for n in range(1, 6):
        windows = poison(spec.windows_shape, spec.dtype)
        row = windows[:, 2] if storage == "dense" else np.moveaxis(windows[:, 2], spec.column_axis, 1)
        row[:, n - 1 if storage == "dense" else spec.window_columns(n)] = 3.5
        got = path.commit(np.zeros(spec.state_shape, np.float32), windows, ints(-1, 1, 6), ints(3, 0, n), spec=spec)
        assert (got[:, 6] == 3.5).all()
        assert not got[:, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]].any()


def test_two_steps_in_a_row(path: Path) -> None:
    """The second commit starts from what the first left, in slots that overlap."""
    spec = spec_of(4, 3, dtype="float16")
    pool, first = cache_of(spec)
    second = unique_bits(spec.windows_shape, spec.dtype, 99)
    steps = [(first, ints(1, 2, 3), ints(3, 0, 1)), (second, ints(3, 1, 2), ints(2, 1, 0))]
    expected = pool
    for windows, slots, accepted in steps:
        pool = path.commit(pool, windows, slots, accepted, spec=spec)
        expected = DEFINITION.commit(expected, windows, slots, accepted, spec=spec)
        assert_same_bits(pool, expected)


# --- the forms that arrays come in ------------------------------------------------------------------------------------


@both_orders
@both_storages
def test_one_layers_arrays(path: Path, axis_order: Any, storage: Any) -> None:
    spec = spec_of(4, 3, axis_order=axis_order, storage=storage)
    pool, windows = cache_of(spec)
    slots, accepted = ints(4, -1, 0, 9), ints(3, 1, 0, 2)
    whole = path.commit(pool, windows, slots, accepted, spec=spec)
    taken = path.gather(windows, accepted, spec=spec)
    for layer in range(spec.num_layers):
        assert_same_bits(path.commit(pool[layer], windows[layer], slots, accepted, spec=spec), whole[layer])
        assert_same_bits(path.gather(windows[layer], accepted, spec=spec), taken[layer])


def test_lists_per_layer(path: Path) -> None:
    spec = spec_of(4, 3, num_layers=3)
    pool, windows = cache_of(spec)
    slots, accepted = ints(4, -1, 0, 9), ints(3, 1, 0, 2)
    whole = path.commit(pool, windows, slots, accepted, spec=spec)
    layers = path.commit(list(pool), list(windows), slots, accepted, spec=spec)
    assert isinstance(layers, list)
    assert_same_bits(np.stack(layers), whole)


def test_several_conv_groups(path: Path) -> None:
    """K = 3 and K = 4 of different channels, layers and dtypes, committed by one call with one set of indices."""
    narrow = spec_of(3, 3, num_layers=1, dtype="float32", axis_order="channel_major")
    wide = spec_of(4, 3, conv_dim=256, storage="dense")
    pools, windows = zip(cache_of(narrow, 1), cache_of(wide, 2), strict=True)
    slots, accepted, rows = ints(4, -1, 0, 9), ints(3, 1, 0, 2), ints(5, 1, 2, 8)
    options = {"spec": (narrow, wide), "window_rows": rows}
    got = path.commit(pools, windows, slots, accepted, **options)
    expected = DEFINITION.commit(pools, windows, slots, accepted, **options)
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_bits(mine, theirs)


def test_a_group_of_lists(path: Path) -> None:
    """A spec per group, a list of layers in one of them: the specs are a prefix of the pools' tree."""
    narrow, wide = spec_of(3, 3, num_layers=2), spec_of(4, 3)
    (a, wa), (b, wb) = cache_of(narrow, 1), cache_of(wide, 2)
    slots, accepted = ints(4, 7), ints(3, 2)
    got = path.commit((list(a), b), (list(wa), wb), slots, accepted, spec=(narrow, wide))
    assert_same_bits(np.stack(got[0]), DEFINITION.commit(a, wa, slots, accepted, spec=narrow))
    assert_same_bits(got[1], DEFINITION.commit(b, wb, slots, accepted, spec=wide))


@pytest.mark.parametrize("dtype", DTYPES)
@both_orders
def test_with_width_two_sliding_and_dense_agree(any_path: Path, axis_order: Any, dtype: Any) -> None:
    """K = 2: one column per window, so the two storages are the same bytes; no path has a special case."""
    sliding = spec_of(2, 5, axis_order=axis_order, dtype=dtype)
    dense = dataclasses.replace(sliding, storage="dense")
    assert sliding.windows_bytes == dense.windows_bytes == sliding.dense_windows_bytes
    pool, windows = cache_of(sliding)
    per_token = np.moveaxis(windows, sliding.column_axis, 2)  # [L, R, token, channel]
    per_token = np.ascontiguousarray(np.expand_dims(per_token, sliding.column_axis))
    assert per_token.shape == dense.windows_shape
    slots, accepted = ints(3, 1, 4, 10, 5, 9, 2), ints(1, 2, 3, 4, 5, 0, 6)
    assert_same_bits(
        any_path.commit(pool, windows, slots, accepted, spec=sliding),
        any_path.commit(pool, per_token, slots, accepted, spec=dense),
    )


@both_storages
def test_axis_orders_hold_the_same_columns(any_path: Path, storage: Any) -> None:
    """Both orders of the same data commit the same columns at every n; full acceptance would hide a swapped axis."""
    time_major = spec_of(4, 7, storage=storage)
    channel_major = dataclasses.replace(time_major, axis_order="channel_major")
    pool, windows = cache_of(time_major)
    swapped_pool, swapped_windows = (np.ascontiguousarray(array.swapaxes(-1, -2)) for array in (pool, windows))
    slots, accepted = ints(3, 1, 4, 10, 5, 9, 2), ints(1, 2, 3, 4, 5, 6, 7)
    first = any_path.commit(pool, windows, slots, accepted, spec=time_major)
    second = any_path.commit(swapped_pool, swapped_windows, slots, accepted, spec=channel_major)
    assert_same_bits(second, np.ascontiguousarray(first.swapaxes(-1, -2)))


def test_every_pair_of_counts_in_neighbouring_rows(path: Path) -> None:
    """Mixed batches: the count of one request never leaks into the next."""
    spec = spec_of(4, 3, num_slots=33, max_requests=32)
    pairs = ints(*itertools.chain.from_iterable(itertools.product(range(4), repeat=2)))
    pool, windows = cache_of(spec)
    slots = np.arange(1, 33, dtype=np.int32)
    got = path.commit(pool, windows, slots, pairs, spec=spec)
    assert_same_bits(got, DEFINITION.commit(pool, windows, slots, pairs, spec=spec))
