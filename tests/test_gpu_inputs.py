"""On a Hopper card: rows of inputs and steps that resume, past 32 bits of address, two hundred times, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import ConvCacheSpec, causal_conv1d_verify, commit_conv_state, pallas_backend, prepare_conv_weight
from tests import adapters
from tests.cases import assert_same_bits, both_orders, values

pytestmark = pytest.mark.gpu

REPEATS, THREAD_BYTES = 200, (2, 4, 8, 16)
# More than 2^32 elements in both arrays; no size is a power of two, so an index cut short names no slot or row in use.
HUGE: dict[str, Any] = {
    "num_layers": 29, "num_slots": 6100, "max_requests": 4600, "conv_dim": 8192, "width": 4, "num_draft_tokens": 4,
}  # fmt: skip


def by_time(array: np.ndarray, axis_order: str) -> np.ndarray:
    return array if axis_order == "time_major" else array.swapaxes(-1, -2)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@both_orders
def test_inputs_past_two_to_the_thirty_two(axis_order: Any, implementation: Any) -> None:
    """The last slot and row of every layer are read together and written; nothing else in the 8 GiB pool is."""
    adapters.path("jax-pallas-gpu")
    spec = ConvCacheSpec(**HUGE, axis_order=axis_order, storage="inputs")
    assert min(np.prod(spec.state_shape, dtype=np.int64), np.prod(spec.windows_shape, dtype=np.int64)) > 2**32
    layers, last = spec.num_layers, spec.num_layers - 1
    x = (1 + np.abs(values((layers, 1, 4, spec.conv_dim), "float32", 1))).astype(spec.dtype)
    old = (1 + np.abs(values((layers, 3, spec.conv_dim), "float32", 2))).astype(spec.dtype)
    slot, row = jnp.asarray([spec.num_slots - 1], jnp.int32), jnp.asarray([spec.max_requests - 1], jnp.int32)
    pool, windows = jnp.zeros(spec.state_shape, spec.dtype), jnp.zeros(spec.windows_shape, spec.dtype)
    fill = jax.jit(lambda array, value: array.at[:, -1].set(value), donate_argnums=0)
    pool = fill(pool, np.ascontiguousarray(by_time(old, axis_order)))
    windows = fill(windows, np.ascontiguousarray(by_time(x[:, 0], axis_order)))
    options: dict[str, Any] = {"spec": spec, "window_rows": row, "implementation": implementation}
    count = jax.jit(lambda a: jax.lax.map(lambda one: (one != 0).sum(dtype=jnp.int32), a))
    commit = jax.jit(functools.partial(commit_conv_state, **options), donate_argnums=0)
    pool = commit(pool, windows, slot, jnp.asarray([2], jnp.int32))
    expected = np.concatenate([old[:, 2:], x[:, 0, :2]], axis=1)
    assert count(pool).tolist() == [3 * spec.conv_dim] * layers
    assert_same_bits(np.ascontiguousarray(by_time(np.asarray(pool[:, -1]), axis_order)), expected)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def resume(pool: Any, windows: Any, x: Any) -> Any:
        weight = jnp.asarray(np.tile(np.asarray([1, 0, 0, 0], np.float32), (spec.conv_dim, 1)))
        return causal_conv1d_verify(
            x,
            pool,
            windows,
            weight,
            state_indices=slot,
            layer=last,
            activation=None,
            resume_tokens=slot * 0 + 1,
            **options,
        )

    y, windows, pool = resume(pool, windows, jnp.asarray(x[last][:, ::-1]))
    moved = np.concatenate([expected[last, 1:], x[last, :, 0]], axis=0)
    assert_same_bits(np.ascontiguousarray(by_time(np.asarray(pool[last, -1]), axis_order)), moved)
    assert_same_bits(np.asarray(y)[0, :3], moved)
    assert count(pool).tolist() == [3 * spec.conv_dim] * layers
    assert count(windows).tolist() == [4 * spec.conv_dim] * layers
    assert_same_bits(np.ascontiguousarray(by_time(np.asarray(windows[last, -1]), axis_order)), x[last, 0, ::-1])


@pytest.mark.parametrize("storage", ["sliding", "dense", "inputs"])
@both_orders
def test_two_hundred_resumed_steps_over_block_sizes(
    monkeypatch: pytest.MonkeyPatch, axis_order: Any, storage: Any
) -> None:
    """What reads the row that it writes, from the same arrays each time: equal bits throughout, where they were."""
    adapters.path("jax-pallas-gpu")
    spec = ConvCacheSpec(2, 61, 48, 2048, 4, 4, axis_order=axis_order, storage=storage)
    rng = np.random.default_rng(5)
    slots, rows = rng.permutation(61)[:48].astype(np.int32), rng.permutation(48).astype(np.int32)
    slots[[3, 17]] = -1, 61
    counts = rng.integers(0, 5, 48).astype(np.int32)
    tracked = np.setdiff1d(np.arange(61), slots)[:12].astype(np.int32)
    snapshots = np.full(48, -1, np.int32)
    snapshots[: len(tracked)] = tracked
    pool, windows = values(spec.state_shape, spec.dtype, 1), values(spec.windows_shape, spec.dtype, 4)
    x = jnp.asarray(values((48, 4, 2048), spec.dtype, 2))
    weight = prepare_conv_weight(jnp.asarray(values((2048, 4), spec.dtype, 3)))
    block_of, first = pallas_backend.block_of, None
    for thread_bytes in THREAD_BYTES:
        monkeypatch.setattr(
            pallas_backend, "block_of", lambda dim, item, _, size=thread_bytes: block_of(dim, item, size)
        )

        def step(pool: Any, windows: Any) -> Any:
            y, windows, *moved = causal_conv1d_verify(
                x, pool, windows, weight, spec=spec, state_indices=slots, layer=1, window_rows=rows,
                resume_tokens=counts, implementation="pallas",
            )  # fmt: skip
            pool = commit_conv_state(
                moved[0] if moved else pool, windows, slots, counts, spec=spec, window_rows=rows,
                track_indices=snapshots, track_num_tokens=counts, implementation="pallas",
            )  # fmt: skip
            return pool, windows, y

        program = jax.jit(step, donate_argnums=(0, 1))
        for repeat in range(REPEATS // len(THREAD_BYTES)):
            arrays = jnp.asarray(pool), jnp.asarray(windows)
            addresses = [array.unsafe_buffer_pointer() for array in arrays]
            results = program(*arrays)
            assert [array.unsafe_buffer_pointer() for array in results[:2]] == addresses
            got = jax.device_get(results)
            first = got if first is None else first
            for one, other, name in zip(got, first, ("pool", "buffer", "y"), strict=True):
                assert_same_bits(one, other, f"{name}: {thread_bytes} bytes a thread, repeat {repeat}")
