"""Donated arrays are updated where they are, and arrays that are not donated stay as they were.

JAX only warns when it cannot use a donated buffer; warnings are errors here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_impl import causal_conv1d_update, causal_conv1d_verify, commit_conv_state, reset_conv_state
from jax_impl.layout import ConvCacheSpec
from tests.adapters import DEFINITION
from tests.cases import assert_same_bits, both_orders, both_storages, spec_of, unique_bits, values

# On CPU, JAX 0.10 needs a copy of a bfloat16 pool to keep its bits.
IN_PLACE = ["float16", "float32", *(["bfloat16"] if jax.__version_info__ >= (0, 11) else [])]

Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def once(step: Step) -> Step:
    return step


def scanned(step: Step) -> Step:
    """Three steps; slots move on by one in each."""

    def run(pool: jax.Array, windows: jax.Array, slots: jax.Array, accepted: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, i: (step(carry, windows, slots + i, accepted), None), pool, jnp.arange(3))[0]

    return run


def looped(step: Step) -> Step:
    """Three steps, by a condition on traced values."""

    def run(pool: jax.Array, windows: jax.Array, slots: jax.Array, accepted: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, step(carry[1], windows, slots + carry[0], accepted)

        return lax.while_loop(lambda carry: carry[0] < accepted.max(), body, (jnp.int32(0), pool))[1]

    return run


@pytest.mark.parametrize("place", [once, scanned, looped])
@pytest.mark.parametrize("dtype", IN_PLACE)
@both_orders
@both_storages
def test_a_donated_pool_keeps_its_address(storage: Any, axis_order: Any, dtype: str, place: Any) -> None:
    """One commit under jit, three in scan, three in while_loop: no second pool in between; what they write is right."""
    spec = spec_of(4, 3, num_slots=301, axis_order=axis_order, storage=storage, dtype=dtype)
    slots, accepted = np.asarray([6, -9, 1], np.int32), np.asarray([3, 1, 2], np.int32)
    before, windows = unique_bits(spec.state_shape, dtype, 1), unique_bits(spec.windows_shape, dtype, 2)
    pool = jnp.array(before)
    address = pool.unsafe_buffer_pointer()
    step = jax.jit(place(lambda p, w, s, n: commit_conv_state(p, w, s, n, spec=spec)), donate_argnums=0)
    arguments = (pool, jnp.array(windows), jnp.array(slots), jnp.array(accepted))
    program = step.lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < spec.state_bytes / 10
    after = program(*arguments)
    assert after.unsafe_buffer_pointer() == address
    assert pool.is_deleted()
    expected = before
    for i in range(1 if place is once else 3):
        expected = DEFINITION.commit(expected, windows, slots + np.int32(i), accepted, spec=spec)
    assert_same_bits(np.asarray(after), expected)


@pytest.mark.parametrize("dtype", IN_PLACE)
@both_orders
def test_the_other_writers_are_in_place_too(axis_order: Any, dtype: str) -> None:
    """verify writes the donated buffer, update and reset the donated pool."""
    spec = spec_of(4, 3, axis_order=axis_order, dtype=dtype)
    pool, windows = jnp.array(values(spec.state_shape, dtype, 1)), jnp.zeros(spec.windows_shape, dtype)
    weight, x, slots = jnp.ones((128, 4)), jnp.ones((2, 3, 128)), jnp.asarray([3, 5], jnp.int32)
    options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1}
    address = windows.unsafe_buffer_pointer()
    verify = jax.jit(lambda w, p: causal_conv1d_verify(x, p, w, weight, **options)[1], donate_argnums=0)
    assert verify(windows, pool).unsafe_buffer_pointer() == address
    address = pool.unsafe_buffer_pointer()
    pool = jax.jit(lambda p: causal_conv1d_update(x[:, 0], p, weight, **options)[1], donate_argnums=0)(pool)
    assert pool.unsafe_buffer_pointer() == address
    pool = jax.jit(lambda p: reset_conv_state(p, slots, spec=spec), donate_argnums=0)(pool)
    assert pool.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("jitted", [True, False])
def test_without_donation_the_old_arrays_are_unchanged(implementation: Any, jitted: bool) -> None:
    """The functions are pure: pool and buffer that were given are as before, and still usable."""
    spec = spec_of(4, 3, dtype="float32")
    given = unique_bits(spec.state_shape, "float32", 1), unique_bits(spec.windows_shape, "float32", 2)
    pool, windows = (jnp.array(array) for array in given)
    weight, x, slots = jnp.ones((128, 4)), jnp.ones((2, 3, 128)), jnp.asarray([3, 5], jnp.int32)
    counts = jnp.asarray([3, 1], jnp.int32)

    def commit(p: jax.Array, w: jax.Array) -> jax.Array:
        return commit_conv_state(p, w, slots, counts, spec=spec, implementation=implementation)

    def verify(p: jax.Array, w: jax.Array) -> jax.Array:
        return causal_conv1d_verify(
            x, p, w, weight, spec=spec, state_indices=slots, layer=0, implementation=implementation
        )[1]

    for function, changed in ((commit, 0), (verify, 1)):
        result = (jax.jit(function) if jitted else function)(pool, windows)
        assert (np.asarray(result).view(np.uint32) != given[changed].view(np.uint32)).any()
        assert_same_bits(np.asarray(pool), given[0])
        assert_same_bits(np.asarray(windows), given[1])


def test_nothing_is_traced_again_for_other_indices() -> None:
    """Index values are data: one compilation serves every batch of a size, and no value is waited for."""
    spec = spec_of(4, 3)
    traces = []

    def step(pool: jax.Array, windows: jax.Array, slots: jax.Array, accepted: jax.Array) -> jax.Array:
        traces.append(1)
        return commit_conv_state(pool, windows, slots, accepted, spec=spec, null_slot=0)

    jitted = jax.jit(step, donate_argnums=0)
    pool, windows = jnp.zeros(spec.state_shape, spec.dtype), jnp.ones(spec.windows_shape, spec.dtype)
    with jax.transfer_guard_device_to_host("disallow"):
        for shift in range(4):
            pool = jitted(pool, windows, jnp.asarray([shift, -shift], jnp.int32), jnp.asarray([shift, 1], jnp.int32))
    assert len(traces) == 1


def test_vmap_over_pools() -> None:
    """Transformations that batch a call see plain array code."""
    spec = ConvCacheSpec(1, 4, 3, 5, 3, 2, "float32")
    pools, windows = (
        unique_bits((2, *spec.state_shape), "float32", 1),
        unique_bits((2, *spec.windows_shape), "float32", 2),
    )
    slots, accepted = np.asarray([[1, 2], [3, -1]], np.int32), np.asarray([[2, 0], [1, 2]], np.int32)
    step = jax.vmap(lambda p, w, s, n: commit_conv_state(p, w, s, n, spec=spec, implementation="xla"))
    got = np.asarray(step(*(jnp.array(array) for array in (pools, windows, slots, accepted))))
    for one in range(2):
        assert_same_bits(got[one], DEFINITION.commit(pools[one], windows[one], slots[one], accepted[one], spec=spec))
