"""Pools that keep a slot's states back to back: the flat envelope, taken through a reshape.

Some engines give every slot one envelope, in which the states of all layers lie one after another:

    envelope [C, E]     slot c:  [ … | layer 0 | layer 1 | … | layer L-1 | … ]        each S · conv_dim elements

JAX arrays have no strides, so a layer of it is no view. But where E and the first state's offset are multiples of one
state, the envelope is a one-layer pool of C · E / (S · conv_dim) small slots, and reshaping to it moves nothing:

    spec = envelope_spec(model_spec, E)                       one layer, more slots
    pool = envelope.reshape(spec.state_shape)                 a bitcast, also of a donated array
    slots = envelope_slots(state_indices, layer, spec=model_spec, envelope_elements=E, first_element=o)
    y, windows = causal_conv1d_verify(x, pool, windows, …, spec=spec, state_indices=slots)
    pool = commit_conv_state(pool, windows, slots, num_accepted_tokens, spec=spec)

`windows` is one layer's buffer. Every other envelope (states of two dtypes, offsets between two multiples) is refused:
keep such states in pools of their own. `torch_ref` takes any envelope, through strided views.

Imports only what it computes with; reads and writes no state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.layout import ConvCacheSpec, Problems, shown


def envelope_spec(spec: ConvCacheSpec, envelope_elements: int) -> ConvCacheSpec:
    """The geometry of a flat envelope as a pool of one layer.

    Args:
      spec: geometry of the model's layers; its num_slots is the number of envelopes.
      envelope_elements: elements of one envelope, all states of all layers and whatever else it holds.

    Returns:
      `spec` with one layer and num_slots · E / (S · conv_dim) slots. Reshape the envelope to its `state_shape`.

    Raises:
      ValueError: the envelope is not a whole number of states, or holds fewer than the layers need.

    Example:
      >>> spec = ConvCacheSpec(3, 10, 4, 128, width=4, num_draft_tokens=4)
      >>> envelope_spec(spec, 5 * 3 * 128).state_shape
      (1, 50, 3, 128)
    """
    problems = Problems()
    per_envelope = _states_per_envelope(problems, spec, envelope_elements, 0)
    problems.raise_if_any()
    return dataclasses.replace(spec, num_layers=1, num_slots=spec.num_slots * per_envelope)


def envelope_slots(
    state_indices: Any,
    layer: Any,
    *,
    spec: ConvCacheSpec,
    envelope_elements: int,
    first_element: int = 0,
    null_slot: int | None = None,
) -> jax.Array:
    """Where a layer's states are in the pool that `envelope_spec` describes.

    Args:
      state_indices: int32 `[B]`, envelope of each request. Outside 0 … num_slots-1 and `null_slot` give -1, a slot that
        every operation skips.
      layer: int or int32 scalar, traced is fine; an array outside 0 … num_layers-1 gives -1.
      spec: geometry of the model's layers, as given to `envelope_spec`.
      envelope_elements: elements of one envelope.
      first_element: offset of layer 0's state in the envelope.
      null_slot: the padding envelope, or None.

    Returns:
      int32 `[B]`.

    Raises:
      ValueError: the offset or the envelope is not a whole number of states; the layers go past its end; or `layer` is
        a Python integer outside 0 … num_layers-1.

    Example:
      >>> spec = ConvCacheSpec(3, 10, 4, 128, width=4, num_draft_tokens=4)
      >>> where = dict(spec=spec, envelope_elements=5 * 384, first_element=384)
      >>> envelope_slots([0, 2, -1], 1, **where).tolist()
      [2, 12, -1]
    """
    problems = Problems()
    per_envelope = _states_per_envelope(problems, spec, envelope_elements, first_element)
    slots = checks.index_array(problems, "state_indices", state_indices, None)
    number = checks.layer_index(problems, layer, True, spec)
    null = checks.null_slot_value(problems, null_slot)
    problems.raise_if_any()
    assert slots is not None and number is not None
    live = (slots >= 0) & (slots < spec.num_slots) & (number >= 0) & (number < spec.num_layers)
    if null is not None:
        live &= slots != null
    first = first_element // (spec.state_columns * spec.conv_dim)
    return jnp.where(live, jnp.where(live, slots, 0) * per_envelope + first + number, jnp.int32(-1))


def _states_per_envelope(problems: Problems, spec: ConvCacheSpec, envelope_elements: int, first_element: int) -> int:
    """States that fit one envelope, of which the layers' begin at `first_element`; 0 where that cannot be said."""
    checks.spec_argument(spec)
    before, state = len(problems.messages), spec.state_columns * spec.conv_dim
    hint = "Keep states that do not share this size or dtype in a pool of their own; torch_ref takes any envelope."
    for name, value in (("envelope_elements", envelope_elements), ("first_element", first_element)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0 or value % state:
            problems.add(name, f"a multiple of one state, S * conv_dim = {state} elements", shown(value), hint)
    if len(problems.messages) > before:
        return 0
    envelope_elements, first_element = int(envelope_elements), int(first_element)
    end = first_element + spec.num_layers * state
    if end > envelope_elements:
        problems.add("envelope_elements", f"at least {end} for {spec.num_layers} layers", envelope_elements)
    if spec.num_slots * (envelope_elements // state) > checks.INT32_MAX:
        problems.add(
            "envelope_elements", "a pool of fewer than 2^31 states", spec.num_slots * envelope_elements // state
        )
    return envelope_elements // state
