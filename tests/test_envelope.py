"""A flat envelope, all states of a slot back to back, gives the same bits as a stack of pools."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import causal_conv1d_verify, commit_conv_state, envelope_slots, envelope_spec
from jax_impl.layout import ConvCacheSpec
from tests.adapters import DEFINITION
from tests.cases import (
    INT32_MAX,
    INT32_MIN,
    assert_same_bits,
    assert_y_close,
    both_orders,
    mixed_batch,
    spec_of,
    unique_bits,
    values,
)

IMPLEMENTATIONS = ["xla", "pallas_interpret"]


def packed(pool: np.ndarray, before: int, after: int) -> np.ndarray:
    """`[C, E]`: the layers of each slot behind `before` states of something else, and `after` more at the end."""
    layers, slots = pool.shape[:2]
    by_slot = pool.transpose(1, 0, 2, 3).reshape(slots, layers, -1)
    others = unique_bits((slots, before + after, by_slot.shape[-1]), pool.dtype.name, 99)
    together = np.concatenate([others[:, :before], by_slot, others[:, before:]], axis=1)
    return together.reshape(slots, -1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@both_orders
def test_verify_and_commit_in_an_envelope(axis_order: Any, implementation: Any) -> None:
    """Two layers between three foreign states; every accepted count and every reason to skip."""
    spec = spec_of(4, 3, num_slots=26, max_requests=25, dtype="float32", axis_order=axis_order)
    pool = values(spec.state_shape, "float32", 1)
    windows = unique_bits(spec.windows_shape, "float32", 2)
    flat = packed(pool, before=2, after=1)
    one = envelope_spec(spec, flat.shape[1])
    assert one.state_shape == (1, 26 * 5, *spec.window_shape)
    batch = mixed_batch(spec, seed=4, explicit=("rows",), null_slot=0)
    x, weight = values((len(batch.slots), 3, 128), "float32", 3), values((128, 4), "float32", 4)
    where: dict[str, Any] = {
        "spec": spec,
        "envelope_elements": flat.shape[1],
        "first_element": 2 * 3 * 128,
        "null_slot": 0,
    }
    rows: dict[str, Any] = {"window_rows": batch.rows}

    @jax.jit
    def step(flat: jax.Array, windows: jax.Array, layer: jax.Array) -> tuple[jax.Array, ...]:
        slots = envelope_slots(batch.slots, layer, **where)
        states = flat.reshape(one.state_shape[1:])
        y, windows = causal_conv1d_verify(
            jnp.asarray(x),
            states,
            windows,
            jnp.asarray(weight),
            spec=one,
            state_indices=slots,
            implementation=implementation,
            **rows,
        )
        done = commit_conv_state(
            states, windows, slots, batch.accepted, spec=one, implementation=implementation, **rows
        )
        return y, windows, done.reshape(flat.shape)

    for layer in range(2):
        y, buffer, flat = step(flat, windows[layer], jnp.int32(layer))
        options = {"spec": spec, "state_indices": batch.slots, "layer": layer, "null_slot": 0, **rows}
        exact, windows, _ = DEFINITION.verify_exactly(x, pool, windows, weight, **options)
        magnitude, _, _ = DEFINITION.verify_exactly(
            np.abs(x), np.abs(pool), windows, np.abs(weight), **options | {"activation": None}
        )
        assert_y_close(np.asarray(y), exact, magnitude, spec)
        assert_same_bits(np.asarray(buffer), windows[layer])
    expected = DEFINITION.commit(pool, windows, batch.slots, batch.accepted, spec=spec, null_slot=0, **rows)
    assert (expected != pool).any()
    assert_same_bits(np.asarray(flat), packed(expected, before=2, after=1))


def test_a_donated_envelope_is_updated_where_it_is() -> None:
    spec = spec_of(dtype="float32", num_slots=301)
    flat = jnp.zeros((spec.num_slots, 5 * 3 * 128))
    one = envelope_spec(spec, flat.shape[1])

    def step(flat: jax.Array, slots: jax.Array) -> jax.Array:
        where = envelope_slots(slots, 1, spec=spec, envelope_elements=flat.shape[1])
        windows = jnp.ones(one.windows_shape[1:])
        done = commit_conv_state(flat.reshape(one.state_shape[1:]), windows, where, slots, spec=one)
        return done.reshape(flat.shape)

    program = jax.jit(step, donate_argnums=0).lower(flat, jnp.array([1], jnp.int32)).compile()
    address = flat.unsafe_buffer_pointer()
    after = program(flat, jnp.array([1], jnp.int32))
    assert after.unsafe_buffer_pointer() == address
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < after.nbytes / 10
    assert after[1].reshape(5, -1).sum(axis=1).tolist() == [0, 384, 0, 0, 0]


def test_slots_outside_the_pool_stay_outside() -> None:
    """A number past the last envelope must not become a state of another one; a wrapped one neither."""
    spec = ConvCacheSpec(3, 10, 4, 128, 4, 4)
    given = np.asarray([-1, 10, 11, INT32_MIN, INT32_MAX, 2**30, 0, 9], np.int32)
    where = {"spec": spec, "envelope_elements": 5 * 384}
    assert envelope_slots(given, 2, **where).tolist() == [-1] * 6 + [2, 47]
    assert envelope_slots(given, 2, null_slot=9, **where).tolist() == [-1] * 6 + [2, -1]
    assert envelope_slots(given, jnp.int32(3), **where).tolist() == [-1] * 8


def test_an_envelope_that_is_no_whole_number_of_states_is_refused() -> None:
    spec = ConvCacheSpec(3, 10, 4, 128, 4, 4)
    hint = "Keep states that do not share this size or dtype in a pool of their own; torch_ref takes any envelope."
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"`envelope_elements`: expected a multiple of one state, S * conv_dim = 384 elements, got 385. {hint}"
        ),
    ):
        envelope_spec(spec, 385)
    with pytest.raises(
        ValueError, match=re.escape("`envelope_elements`: expected at least 1152 for 3 layers, got 768.")
    ):
        envelope_spec(spec, 768)
    with pytest.raises(ValueError, match=re.escape("`first_element`: expected a multiple of one state")):
        envelope_slots([1], 0, spec=spec, envelope_elements=4 * 384, first_element=1)
    with pytest.raises(
        ValueError, match=re.escape("`envelope_elements`: expected at least 1920 for 3 layers, got 1536.")
    ):
        envelope_slots([1], 0, spec=spec, envelope_elements=4 * 384, first_element=2 * 384)
    huge = ConvCacheSpec(1, 2**20, 4, 128, 2, 1)
    with pytest.raises(ValueError, match=re.escape("a pool of fewer than 2^31 states")):
        envelope_spec(huge, 128 * 2**12)
