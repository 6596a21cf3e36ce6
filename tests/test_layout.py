"""Shapes, columns and bytes: against numbers written out, against the allocated arrays, and across the two packages."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl import ConvCache, ConvCacheSpec, allocate_conv_cache, causal_conv1d_verify, reset_conv_state, use_storage
from tests.cases import (
    DTYPES,
    FULL_GRID,
    INT32_MAX,
    INT32_MIN,
    assert_same_bits,
    both_orders,
    spec_id,
    spec_of,
    unique_bits,
)


@pytest.mark.parametrize(
    ("axis_order", "storage", "state_len", "state_shape", "windows_shape"),
    [
        ("time_major", "sliding", None, (2, 7, 3, 96), (2, 5, 7, 96)),
        ("channel_major", "sliding", None, (2, 7, 96, 3), (2, 5, 96, 7)),
        ("time_major", "dense", None, (2, 7, 3, 96), (2, 5, 5, 3, 96)),
        ("channel_major", "dense", None, (2, 7, 96, 3), (2, 5, 5, 96, 3)),
        ("time_major", "sliding", 4, (2, 7, 4, 96), (2, 5, 8, 96)),
        ("channel_major", "dense", 4, (2, 7, 96, 4), (2, 5, 5, 96, 4)),
    ],
)
def test_shapes(axis_order: Any, storage: Any, state_len: Any, state_shape: Any, windows_shape: Any) -> None:
    """K = 4, D = 5: D+K-2 = 7 columns, one more when the state keeps K."""
    spec = ConvCacheSpec(2, 7, 5, 96, 4, 5, axis_order=axis_order, storage=storage, state_len=state_len)
    assert spec.state_shape == state_shape
    assert spec.windows_shape == windows_shape
    assert spec.window_shape == state_shape[2:]
    column = 4 if storage == "dense" else 3
    assert len(spec.state_axes.split(", ")) == 4
    assert len(spec.windows_axes.split(", ")) == len(windows_shape) == column + 1
    assert spec.state_shape[spec.column_axis] == spec.state_columns == (state_len or 3)
    named = dict(zip(spec.windows_axes.split(", "), windows_shape, strict=True))
    assert named["channel"] == 96
    assert named["column"] == (spec.num_columns if storage == "sliding" else spec.state_columns)


def test_axis_words() -> None:
    spec = spec_of(storage="dense", axis_order="channel_major")
    assert spec.state_axes == "layer, slot, channel, column"
    assert spec.windows_axes == "layer, row, token, channel, column"
    assert spec_of().windows_axes == "layer, row, column, channel"


@pytest.mark.parametrize("spec", FULL_GRID[:: len(FULL_GRID) // 15], ids=spec_id)
def test_bytes_are_those_of_the_allocated_arrays(spec: ConvCacheSpec) -> None:
    cache = allocate_conv_cache(spec)
    assert cache.conv_state.nbytes == spec.state_bytes == spec.num_layers * spec.num_slots * spec.slot_bytes
    assert cache.conv_windows.nbytes == spec.windows_bytes == spec.max_requests * spec.row_bytes
    dense = allocate_conv_cache(dataclasses.replace(spec, storage="dense"))
    assert dense.conv_windows.nbytes == spec.dense_windows_bytes
    assert cache.conv_state.dtype == cache.conv_windows.dtype == np.dtype(spec.dtype)
    assert not np.asarray(cache.conv_state).view(np.uint8).any()
    assert not np.asarray(cache.conv_windows).view(np.uint8).any()


@pytest.mark.parametrize("spec", FULL_GRID[:: len(FULL_GRID) // 15], ids=spec_id)
def test_the_oracle_allocates_the_same(spec: ConvCacheSpec, torch_ref: Any) -> None:
    theirs = torch_ref.ConvCacheSpec(**dataclasses.asdict(spec))
    cache = torch_ref.allocate_conv_cache(theirs)
    assert tuple(cache.conv_state.shape) == spec.state_shape
    assert tuple(cache.conv_windows.shape) == spec.windows_shape
    assert cache.conv_state.nbytes == spec.state_bytes == theirs.state_bytes
    assert cache.conv_windows.nbytes == spec.windows_bytes == theirs.windows_bytes
    assert theirs.dense_windows_bytes == spec.dense_windows_bytes


@pytest.mark.parametrize(("width", "tokens", "saving"), [(4, 2, 1.5), (4, 4, 2), (4, 8, 2.4), (2, 9, 1), (7, 1, 1)])
def test_the_saving_depends_on_width_and_tokens_only(width: int, tokens: int, saving: float) -> None:
    """D (K-1) / (D+K-2); nothing is saved with K = 2 or D = 1."""
    for slots, rows, dim, order, dtype in itertools.product((3, 700), (1, 17), (5, 96), ("time_major",), DTYPES):
        spec = ConvCacheSpec(3, slots, rows, dim, width, tokens, dtype, order)
        assert spec.dense_windows_bytes / spec.windows_bytes == pytest.approx(saving)


@pytest.mark.parametrize(("layers", "dim", "rows", "dense", "sliding"), [
    (18, 6144, 17, 0.0420, 0.0210),  # Qwen3.5-0.8B, one rank, 16 requests + 1
    (30, 4096, 33, 0.0906, 0.0453),  # Qwen3.5-35B-A3B, two ranks, 32 requests + 1
])  # fmt: skip
def test_the_published_table(layers: int, dim: int, rows: int, dense: float, sliding: float) -> None:
    """K = 4, D = 4, bfloat16, in units of 2^30 bytes: rows are requests in flight, not slots."""
    spec = ConvCacheSpec(layers, 512, rows, dim, 4, 4)
    assert round(spec.dense_windows_bytes / 2**30, 4) == dense
    assert round(spec.windows_bytes / 2**30, 4) == sliding


def test_windows_of_the_picture() -> None:
    spec = ConvCacheSpec(1, 1, 1, 8, 4, 4)
    assert spec.first_token_column == 2
    columns = ["h2", "h3", "x0", "x1", "x2", "x3"]
    assert len(columns) == spec.num_columns
    assert [columns[spec.window_columns(n)] for n in (1, 2, 3, 4)] == [
        ["h2", "h3", "x0"], ["h3", "x0", "x1"], ["x0", "x1", "x2"], ["x1", "x2", "x3"],
    ]  # fmt: skip


def test_a_spec_is_a_value() -> None:
    """Equal specs hash alike and share one compilation; a dtype object is kept by name; nothing can be assigned."""
    spec = spec_of(dtype=np.dtype("float32"))
    assert spec == spec_of(dtype="float32")
    assert hash(spec) == hash(spec_of(dtype=np.float32, state_len=3))
    assert (spec.dtype, spec.state_len) == ("float32", 3)
    assert spec != spec_of(dtype="float32", state_len=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.width = 5  # type: ignore[misc]
    numpy_width: Any = np.int64(4)
    assert spec_of(numpy_width) == spec_of()
    assert type(spec_of(numpy_width).width) is int


def test_a_cache_is_a_pytree() -> None:
    cache = allocate_conv_cache(spec_of())
    leaves, structure = jax.tree.flatten(cache)
    assert [leaf.shape for leaf in leaves] == [cache.spec.state_shape, cache.spec.windows_shape]
    again = jax.jit(lambda c: c)(cache)
    assert isinstance(again, ConvCache)
    assert again.spec == cache.spec
    assert jax.tree.structure(again) == structure


def test_shardings_are_those_asked_for() -> None:
    device = jax.devices()[0]
    one = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh(np.asarray([device]), ("x",))
    pair = (one, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "x")))
    cache = allocate_conv_cache(spec_of(), pair)
    assert (cache.conv_state.sharding, cache.conv_windows.sharding) == pair
    assert allocate_conv_cache(spec_of(), pair[1]).conv_state.sharding == pair[1]


@both_orders
@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_zeroes_slots_and_nothing_else(axis_order: Any, dtype: str) -> None:
    spec = spec_of(axis_order=axis_order, dtype=dtype)
    pool = unique_bits(spec.state_shape, spec.dtype, 5)
    slots = np.asarray([3, -1, 0, spec.num_slots, INT32_MIN, INT32_MAX, 8, 3], np.int32)
    got = np.asarray(reset_conv_state(jax.numpy.array(pool), slots, spec=spec, null_slot=0))
    expected = pool.copy()
    expected[:, [3, 8]] = 0
    assert_same_bits(got, expected)
    one = np.asarray(reset_conv_state(jax.numpy.array(pool[1]), slots, spec=spec, null_slot=0))
    assert_same_bits(one, expected[1])
    assert_same_bits(np.asarray(reset_conv_state(jax.numpy.array(pool), [], spec=spec)), pool)


# --- which storage ----------------------------------------------------------------------------------------------------


CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 1]
TOPOLOGIES = [
    ((1,), "sliding"),
    ((2,), "dense"),
    ((1, CHAIN), "sliding"),
    ((4, CHAIN), "sliding"),  # the links decide, not the label
    ((1, TREE), "dense"),
    ((1, [CHAIN, CHAIN]), "sliding"),
    ((1, [CHAIN, TREE]), "dense"),
    ((1, [TREE, CHAIN]), "dense"),
    ((1, [-1, -1]), "dense"),
    ((1, [-1]), "sliding"),
    ((1, []), "sliding"),
    ((1, np.asarray([CHAIN, TREE])), "dense"),
    ((1, (tuple(CHAIN),)), "sliding"),
]


@pytest.mark.parametrize(("arguments", "expected"), TOPOLOGIES)
def test_links_decide_the_storage(arguments: tuple[Any, ...], expected: str) -> None:
    assert use_storage(*arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), TOPOLOGIES)
def test_the_oracle_decides_the_same(arguments: tuple[Any, ...], expected: str, torch_ref: Any) -> None:
    assert torch_ref.use_storage(*arguments) == expected


def test_an_array_of_links_on_the_device() -> None:
    assert use_storage(1, jax.numpy.asarray([CHAIN, TREE])) == "dense"


def test_a_prepared_weight_is_the_same_weight() -> None:
    """`prepare_conv_weight` changes the layout, not the numbers; all layers at once too."""
    from jax_impl import prepare_conv_weight

    spec = spec_of()
    weight = unique_bits((2, 128, 1, 4), "float16", 3).astype(np.float32)
    weight[~np.isfinite(weight)] = 0.25
    weight, bias = weight / 2**12, np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 128)
    cache, x = allocate_conv_cache(spec), jax.numpy.linspace(-2, 2, 2 * 3 * 128).reshape(2, 3, 128)
    slots = np.asarray([3, 1], np.int32)
    stacked = prepare_conv_weight(jax.numpy.asarray(weight), jax.numpy.asarray(bias))
    assert stacked.taps.shape == (2, 4, 128)
    for layer in range(2):
        given = (cache.conv_state, cache.conv_windows)
        options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": layer}
        plain, _ = causal_conv1d_verify(
            x, *given, jax.numpy.asarray(weight[layer]), jax.numpy.asarray(bias[layer]), **options
        )
        one = prepare_conv_weight(jax.numpy.asarray(weight[layer]), jax.numpy.asarray(bias[layer]))
        for prepared in (stacked, one):
            assert_same_bits(np.asarray(causal_conv1d_verify(x, *given, prepared, **options)[0]), np.asarray(plain))
