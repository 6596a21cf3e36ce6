"""The compiled kernels on a Hopper card: geometries, address arithmetic past 32 bits, and buffers that stay in place.

The other files run on the card too, with `-m gpu`, on small geometries. Here many geometries share one compilation: one
jit commits or verifies a tuple of conv groups.
"""

import dataclasses
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_impl import causal_conv1d_verify, commit_conv_state
from jax_impl.layout import ConvCacheSpec
from tests import adapters
from tests.adapters import DEFINITION
from tests.cases import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    assert_same_bits,
    assert_y_close,
    both_orders,
    both_storages,
    poison,
    unique_bits,
    values,
)

pytestmark = pytest.mark.gpu

WIDTHS = (2, 3, 4, 5, 7)


@pytest.fixture(autouse=True)
def on_the_card() -> Iterator[None]:
    """Skips without the card, and gives memory back after each test: JAX and torch share it."""
    adapters.path("jax-pallas-gpu")
    yield
    gc.collect()
    jax.clear_caches()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def ints(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def on_device(tree: Any) -> Any:
    return jax.tree.map(jnp.array, tree)


def group(tokens: int, conv_dim: int, width: int, dtype: str, axis_order: Any, **changes: Any) -> ConvCacheSpec:
    return ConvCacheSpec(2, 29, 27, conv_dim, width, tokens, dtype, axis_order, **changes)


# --- the scatter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@both_orders
def test_scatter(axis_order: Any, width: int, dtype: str) -> None:
    """D × conv_dim in one program, against the definition and, for one of them, Triton: equal bits."""
    specs = tuple(
        group(tokens, conv_dim, width, dtype, axis_order, storage="dense" if tokens == 8 else "sliding")
        for tokens, conv_dim in itertools.product((1, 2, 3, 4, 8, 17), (128, 640, 8192))
    )
    pools = tuple(unique_bits(spec.state_shape, dtype, i) for i, spec in enumerate(specs))
    windows = tuple(unique_bits(spec.windows_shape, dtype, 50 + i) for i, spec in enumerate(specs))
    accepted = np.asarray([*range(-1, 19), INT32_MIN, INT32_MAX, 1, 1, 1, 1, 1], np.int32)
    rng = np.random.default_rng(width)
    slots = rng.permutation(29)[:27].astype(np.int32)
    slots[-5:] = -1, 29, 30, INT32_MIN, INT32_MAX
    rows = rng.permutation(27).astype(np.int32)
    step = jax.jit(
        functools.partial(commit_conv_state, spec=specs, window_rows=jnp.array(rows), implementation="pallas"),
        donate_argnums=0,
    )
    got = jax.device_get(step(*on_device((pools, windows, slots, accepted))))
    options: dict[str, Any] = {"window_rows": rows}
    for spec, pool, buffer, mine in zip(specs, pools, windows, got, strict=True):
        expected = DEFINITION.commit(pool, buffer, slots, accepted, spec=spec, **options)
        assert_same_bits(np.asarray(mine), expected, f"D = {spec.num_draft_tokens}, conv_dim = {spec.conv_dim}")
        if (spec.num_draft_tokens, spec.conv_dim) == (4, 640) and adapters.is_installed("triton"):
            triton = adapters.path("torch-triton-gpu")
            assert_same_bits(triton.commit(pool, buffer, slots, accepted, spec=spec, **options), expected, "triton")


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
@both_orders
def test_scatter_of_a_models_stack(axis_order: Any, batch: int) -> None:
    """Every block size that the batch size chooses, with all arguments, on one real geometry."""
    spec = ConvCacheSpec(3, 300, 256, 8192, 4, 4, axis_order=axis_order)
    rng = np.random.default_rng(batch)
    pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    slots, rows = rng.permutation(300)[:batch].astype(np.int32), rng.permutation(256)[:batch].astype(np.int32)
    free = np.setdiff1d(np.arange(300, dtype=np.int32), slots)
    options: dict[str, Any] = {
        "window_rows": rows,
        "num_valid_tokens": rng.integers(0, 6, batch).astype(np.int32),
        "track_indices": np.resize(np.r_[free[:40], np.full(216, -1)], batch).astype(np.int32),
        "track_num_tokens": rng.integers(0, 6, batch).astype(np.int32),
        "null_slot": 7,
    }
    accepted = rng.integers(-1, 6, batch).astype(np.int32)
    got = adapters.path("jax-pallas-gpu").commit(pool, windows, slots, accepted, spec=spec, **options)
    assert_same_bits(got, DEFINITION.commit(pool, windows, slots, accepted, spec=spec, **options))


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@both_orders
def test_verify(axis_order: Any, width: int, dtype: str) -> None:
    """D = 1 … 17 in one program: y within the bound around float64, the buffer bit for bit, zeros where skipped."""
    dims = (128, 640, 128, 8192 if width == 4 else 640)
    specs = [
        dataclasses.replace(group(tokens, dim, width, dtype, axis_order), num_slots=9, max_requests=8, storage=storage)
        for tokens, dim, storage in zip((1, 2, 4, 17), dims, ("sliding", "dense", "sliding", "sliding"), strict=True)
    ]
    slots, valid = ints(3, 8, -1, 0, 9, 5, 3), ints(INT32_MAX, 17, 1, 1, 1, 0, 17)
    calls = []
    for i, spec in enumerate(specs):
        x = values((7, spec.num_draft_tokens, spec.conv_dim), DTYPES[i % 3], 1)
        pool = poison(spec.state_shape, dtype)
        pool[:, [3, 8, 0]] = values((2, 3, *spec.window_shape), dtype, 2)
        weight, bias = values((spec.conv_dim, width), dtype, 3), values((spec.conv_dim,), "float32", 4)
        calls.append((x, pool, poison(spec.windows_shape, dtype), weight, bias if i % 2 else None))
    counts = [np.minimum(valid, spec.num_draft_tokens + (valid == INT32_MAX)).astype(np.int32) for spec in specs]

    def step(arrays: Any, counts: Any) -> Any:
        return [
            causal_conv1d_verify(
                *call, spec=spec, state_indices=jnp.array(slots), layer=jnp.int32(1), num_valid_tokens=count,
                implementation="pallas",
            )
            for call, spec, count in zip(arrays, specs, counts, strict=True)
        ]  # fmt: skip

    results = jax.device_get(jax.jit(step)(on_device(calls), on_device(counts)))
    for (y, buffer), call, spec, count in zip(results, calls, specs, counts, strict=True):
        options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1, "num_valid_tokens": count}
        exact, expected, _ = DEFINITION.verify_exactly(*call, **options)
        absolute = [None if array is None else np.abs(array) for array in call]
        magnitude, _, _ = DEFINITION.verify_exactly(*absolute, **options | {"activation": None})
        assert_same_bits(np.asarray(buffer), expected, f"D = {spec.num_draft_tokens}")
        assert_y_close(np.asarray(y), exact, magnitude, spec)
        assert not y[[0, 2, 4, 5]].astype(np.float32).any()


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
@both_orders
def test_verify_of_a_models_layer(axis_order: Any, batch: int) -> None:
    """Every block size and number of requests per grid point that the batch size chooses, on one real geometry."""
    spec = ConvCacheSpec(2, 300, 256, 8192, 4, 4, axis_order=axis_order)
    rng = np.random.default_rng(batch)
    pool, windows = values(spec.state_shape, spec.dtype, 1), poison(spec.windows_shape, spec.dtype)
    x, weight = values((batch, 4, 8192), spec.dtype, 2), values((8192, 4), spec.dtype, 3)
    options: dict[str, Any] = {
        "spec": spec,
        "layer": 1,
        "state_indices": rng.integers(-1, 301, batch).astype(np.int32),
        "window_rows": rng.permutation(256)[:batch].astype(np.int32),
        "num_valid_tokens": rng.integers(0, 6, batch).astype(np.int32),
        "null_slot": 7,
    }
    path = adapters.path("jax-pallas-gpu")
    y, buffer, after = path.verify(x, pool, windows, weight, **options)
    exact, expected, _ = DEFINITION.verify_exactly(x, pool, windows, weight, **options)
    absolute = (np.abs(array) for array in (x, pool, windows, weight))
    magnitude, _, _ = DEFINITION.verify_exactly(*absolute, **options | {"activation": None})
    assert_same_bits(after, pool)
    assert_same_bits(buffer, expected)
    assert_y_close(y, exact, magnitude, spec)
    one_token = {name: options[name] for name in ("spec", "layer", "state_indices", "null_slot")}
    distinct = rng.permutation(300)[:batch].astype(np.int32)
    y, after = path.update(x[:, 0], pool, weight, **one_token | {"state_indices": distinct})
    _, expected = DEFINITION.update(x[:, 0], pool, weight, **one_token | {"state_indices": distinct})
    assert_same_bits(after, expected)
    first, _, _ = path.verify(x, pool, windows, weight, **options | {"state_indices": distinct})
    live = (options["num_valid_tokens"] >= 1) & (options["num_valid_tokens"] <= 4)
    assert_same_bits(y[live], first[live, 0])


@both_orders
@both_storages
def test_two_hundred_steps_leave_the_pool_alone(axis_order: Any, storage: Any) -> None:
    """Grids of several batch sizes, 200 times each: the same y, the same buffer, and not one bit of the pool."""
    spec = ConvCacheSpec(3, 70, 64, 640, 4, 4, axis_order=axis_order, storage=storage)
    pool = jnp.array(values(spec.state_shape, spec.dtype, 1))
    weight = jnp.array(values((640, 4), spec.dtype, 2))
    before = jnp.array(pool)
    for batch in (1, 16, 64):
        x, slots = jnp.array(values((batch, 4, 640), spec.dtype, 3)), jnp.arange(batch, dtype=jnp.int32) + 3

        @jax.jit
        def verify(pool: Any, windows: Any, x: Any = x, slots: Any = slots) -> Any:
            return causal_conv1d_verify(
                x, pool, windows, weight, spec=spec, state_indices=slots, layer=1, implementation="pallas"
            )

        windows = jnp.zeros(spec.windows_shape, spec.dtype)
        first = verify(pool, windows)
        differing = jnp.int32(0)
        for _ in range(200):
            again = verify(pool, windows)
            differing += sum((a != b).sum(dtype=jnp.int32) for a, b in zip(first, again, strict=True))
        assert int(differing) == 0
    assert_same_bits(np.asarray(pool), np.asarray(before))


# --- edges of arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["sliding", "dense"])
@both_orders
def test_guard_rows_of_nan(axis_order: Any, storage: Any) -> None:
    """The first and last layer, slot and row: everything around them is NaN before and after, and y never is."""
    path = adapters.path("jax-pallas-gpu")
    spec = ConvCacheSpec(3, 5, 4, 640, 4, 4, axis_order=axis_order, storage=storage)
    x, weight = values((1, 4, 640), spec.dtype, 1), values((640, 4), spec.dtype, 2)
    for layer, slot, row in itertools.product((0, 2), (0, 4), (0, 3)):
        pool, windows = poison(spec.state_shape, spec.dtype), poison(spec.windows_shape, spec.dtype)
        pool[layer, slot] = values(spec.window_shape, spec.dtype, 3)
        options: dict[str, Any] = {"spec": spec, "window_rows": ints(row)}
        y, buffer, after = path.verify(x, pool, windows, weight, state_indices=ints(slot), layer=layer, **options)
        assert np.isfinite(y.astype(np.float32)).all()
        assert_same_bits(after, pool)
        assert np.isfinite(buffer[layer, row].astype(np.float32)).all()
        kept = np.ones(buffer.shape[:2], np.bool_)
        kept[layer, row] = False
        assert_same_bits(buffer[kept], windows[kept])
        committed = path.commit(pool, buffer, ints(slot), ints(2), **options)
        expected = DEFINITION.commit(pool, buffer, ints(slot), ints(2), **options)
        assert_same_bits(committed, expected)


# --- address arithmetic -----------------------------------------------------------------------------------------------

# More than 2^32 elements in pool and buffer, so that an index cut to 32 or 31 bits is another element of the array. No
# size is a power of two: the other element is in no slot or row that the step writes.
HUGE = ConvCacheSpec(29, 6100, 3050, 8192, 4, 4)
assert np.prod(HUGE.state_shape, dtype=np.int64) > 2**32
assert np.prod(HUGE.windows_shape, dtype=np.int64) > 2**32


def huge_inputs(spec: ConvCacheSpec) -> tuple[np.ndarray, np.ndarray]:
    """x of every layer, never zero, and weights that pick the oldest column."""
    x = 1 + np.abs(values((spec.num_layers, 1, 4, spec.conv_dim), spec.dtype, 1).astype(np.float32))
    return x.astype(spec.dtype), np.tile(np.asarray([1, 0, 0, 0], np.float32), (spec.conv_dim, 1))


def by_time(array: np.ndarray, spec: ConvCacheSpec) -> np.ndarray:
    return array if spec.axis_order == "time_major" else array.swapaxes(-1, -2)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@both_orders
def test_past_two_to_the_thirty_two(axis_order: Any, implementation: Any) -> None:
    """The last row and slot of the last layer are written and read back; nothing else in 8 GiB arrays is."""
    spec = dataclasses.replace(HUGE, axis_order=axis_order)
    inputs, weight = huge_inputs(spec)
    slot, row = jnp.asarray([spec.num_slots - 1], jnp.int32), jnp.asarray([spec.max_requests - 1], jnp.int32)
    options: dict[str, Any] = {"spec": spec, "window_rows": row, "implementation": implementation}

    @functools.partial(jax.jit, donate_argnums=1)
    def verify(pool: Any, windows: Any, x: Any, layer: Any) -> Any:
        return causal_conv1d_verify(
            x, pool, windows, jnp.array(weight), state_indices=slot, layer=layer, activation=None, **options
        )

    count = jax.jit(lambda a: lax.map(lambda one: (one != 0).sum(dtype=jnp.int32), a))
    pool, windows = jnp.zeros(spec.state_shape, spec.dtype), jnp.zeros(spec.windows_shape, spec.dtype)
    for layer in range(spec.num_layers):
        y, windows = verify(pool, windows, jnp.array(inputs[layer]), jnp.int32(layer))
    assert count(windows).tolist() == [4 * spec.conv_dim] * spec.num_layers
    columns = by_time(np.asarray(windows[:, -1]), spec)
    assert_same_bits(np.ascontiguousarray(columns[:, 2:]), inputs[:, 0])

    commit = jax.jit(functools.partial(commit_conv_state, **options), donate_argnums=0)
    pool = commit(pool, windows, slot, jnp.asarray([3], jnp.int32))
    assert count(pool).tolist() == [3 * spec.conv_dim] * spec.num_layers
    assert_same_bits(np.ascontiguousarray(by_time(np.asarray(pool[:, -1]), spec)), inputs[:, 0, :3])
    last = spec.num_layers - 1
    y, windows = verify(pool, windows, jnp.array(inputs[last]), jnp.int32(last))
    assert_same_bits(np.asarray(y)[0, :3], inputs[last, 0, :3])


def test_a_failed_capture_leaves_nothing_behind() -> None:
    """Waiting for a captured stream ends the capture in an error; the next attempt captures, random numbers work."""
    adapters.path("torch-triton-gpu")
    import torch

    from jax_impl.bench import subjects

    source, target, calls = torch.arange(7, device="cuda"), torch.zeros(7, dtype=torch.int64, device="cuda"), []

    def once(call: int) -> None:
        calls.append(call)
        if len(calls) in fails_at:
            torch.cuda.current_stream().synchronize()
        target.copy_(source)

    before = torch.cuda.current_stream()
    fails_at: tuple[int, ...] = (4,)  # two calls warm up
    subject = subjects.replayed(once, 3)
    target.zero_()
    subject.run(1)
    assert torch.equal(source, target)
    assert len(calls) == 2 + 2 + 3
    fails_at = (len(calls) + 3, len(calls) + 4)
    with pytest.raises(RuntimeError):
        subjects.replayed(once, 3)
    assert torch.cuda.current_stream() == before
    assert torch.randn(7, device="cuda").isfinite().all()
    target.zero_()
    subjects.replayed(once, 3).run(1)
    assert torch.equal(source, target)


@both_orders
def test_triton_past_two_to_the_thirty_two(axis_order: Any) -> None:
    adapters.path("torch-triton-gpu")
    import torch

    import torch_ref

    jax.clear_caches()
    spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(dataclasses.replace(HUGE, axis_order=axis_order)))
    inputs, weight = huge_inputs(HUGE)
    x = torch.from_numpy(inputs.view(np.int16)).view(torch.bfloat16).cuda()
    cache = torch_ref.allocate_conv_cache(spec, "cuda")
    options: dict[str, Any] = {"spec": spec, "window_rows": [spec.max_requests - 1], "implementation": "triton"}
    slot = [spec.num_slots - 1]
    step: dict[str, Any] = {"state_indices": slot, "activation": None, **options}
    weights = torch.from_numpy(weight).cuda()
    given = (cache.conv_state, cache.conv_windows, weights)
    for layer in range(spec.num_layers):
        torch_ref.causal_conv1d_verify(x[layer], *given, layer=layer, **step)
    assert [int(one.count_nonzero()) for one in cache.conv_windows] == [4 * spec.conv_dim] * spec.num_layers
    torch_ref.commit_conv_state(cache.conv_state, cache.conv_windows, slot, [3], **options)
    assert [int(one.count_nonzero()) for one in cache.conv_state] == [3 * spec.conv_dim] * spec.num_layers
    held = cache.conv_state[:, -1] if axis_order == "time_major" else cache.conv_state[:, -1].transpose(-1, -2)
    assert torch.equal(held, x[:, 0, :3])
    last = spec.num_layers - 1
    y, _ = torch_ref.causal_conv1d_verify(x[last], *given, layer=last, **step)
    assert torch.equal(y[0, :3], x[last, 0, :3])


# --- in place ---------------------------------------------------------------------------------------------------------


def alone(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


def in_scan(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pool, *rest: lax.scan(lambda carry, _: (step(carry, *rest), None), pool, length=3)[0]


def in_while(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(pool: Any, *rest: Any) -> Any:
        body = lambda carry: (carry[0] + 1, step(carry[1], *rest))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < rest[-1].max(), body, (jnp.int32(0), pool))[1]

    return run


@pytest.mark.parametrize("place", [alone, in_scan, in_while])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both_orders
def test_a_donated_gibibyte_stays_where_it_is(axis_order: Any, dtype: str, implementation: Any, place: Any) -> None:
    """Address before and after, aliases and temporary memory of the program that ran, and the peak on the device."""
    spec = ConvCacheSpec(30, 746 if dtype == "bfloat16" else 373, 64, 8192, 4, 4, dtype, axis_order)
    assert spec.state_bytes > 2**30
    pool, windows = jnp.zeros(spec.state_shape, dtype), jnp.ones(spec.windows_shape, dtype)
    slots, accepted = jnp.asarray([5, -1, 9], jnp.int32), jnp.asarray([3, 2, 1], jnp.int32)
    step = place(functools.partial(commit_conv_state, spec=spec, implementation=implementation))
    program = jax.jit(step, donate_argnums=0).lower(pool, windows, slots, accepted).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= spec.state_bytes
    assert memory.temp_size_in_bytes < spec.state_bytes / 100
    address = pool.unsafe_buffer_pointer()
    after = program(pool, windows, slots, accepted)
    assert after.unsafe_buffer_pointer() == address
    written = jax.jit(lambda pool: (pool != 0).any((0, 2, 3)))(after)
    assert np.flatnonzero(np.asarray(written)).tolist() == [5, 9]


@both_orders
def test_a_whole_step_is_in_place(axis_order: Any) -> None:
    """Verify in every layer under fori_loop with a traced layer, then commit, in one jit: both arrays stay."""
    spec = ConvCacheSpec(5, 41, 9, 640, 4, 4, axis_order=axis_order)
    pool, windows = values(spec.state_shape, spec.dtype, 1), poison(spec.windows_shape, spec.dtype)
    x, weight = values((5, 4, 4, 640), spec.dtype, 2), values((5, 640, 4), spec.dtype, 3)
    slots, accepted = ints(40, 3, -1, 17), ints(2, 4, 1, 0)
    options: dict[str, Any] = {"spec": spec, "implementation": "pallas"}

    def step(pool: Any, windows: Any, x: Any, weight: Any, slots: Any, accepted: Any) -> Any:
        def one_layer(layer: Any, windows: Any) -> Any:
            return causal_conv1d_verify(
                x[layer], pool, windows, weight[layer], state_indices=slots, layer=layer, **options
            )[1]

        windows = lax.fori_loop(0, 5, one_layer, windows)
        return commit_conv_state(pool, windows, slots, accepted, **options), windows

    arrays = on_device((pool, windows, x, weight, slots, accepted))
    addresses = [array.unsafe_buffer_pointer() for array in arrays[:2]]
    results = jax.jit(step, donate_argnums=(0, 1))(*arrays)
    assert [array.unsafe_buffer_pointer() for array in results] == addresses
    for layer in range(5):
        _, windows, _ = DEFINITION.verify(
            x[layer], pool, windows, weight[layer], spec=spec, state_indices=slots, layer=layer
        )
    assert_same_bits(np.asarray(results[1]), windows)
    assert_same_bits(np.asarray(results[0]), DEFINITION.commit(pool, windows, slots, accepted, spec=spec))
