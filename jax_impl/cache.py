"""The pool of committed states and the verify buffer as one pytree, and how to allocate and reset them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import checks, runs
from jax_impl.layout import ConvCacheSpec, Problems


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvCache:
    """Convolution state of one group of layers. A pytree: the arrays are leaves, the spec is static.

    Attributes:
      conv_state: the pool, `spec.state_shape`; slot c of layer l is the committed state of one sequence.
      conv_windows: the verify buffer, `spec.windows_shape`; row r belongs to one request in flight.
      spec: the geometry.
    """

    conv_state: jax.Array
    conv_windows: jax.Array
    spec: ConvCacheSpec = dataclasses.field(metadata={"static": True})


def allocate_conv_cache(spec: ConvCacheSpec, sharding: Any = None) -> ConvCache:
    """A zeroed cache of the given geometry.

    Args:
      spec: geometry.
      sharding: a `jax.sharding.Sharding` (or device) for both arrays, or a pair (pool, buffer) of them.

    Returns:
      `ConvCache` with `conv_state` of `spec.state_bytes` and `conv_windows` of `spec.windows_bytes` bytes.

    Raises:
      ValueError: `spec` is not a `ConvCacheSpec`, or a pair of shardings does not have two members.

    Example:
      >>> cache = allocate_conv_cache(ConvCacheSpec(2, 8, 4, 128, width=4, num_draft_tokens=4))
      >>> cache.conv_state.shape, cache.conv_windows.shape
      ((2, 8, 3, 128), (2, 4, 6, 128))
    """
    checks.spec_argument(spec)
    state_sharding, windows_sharding = sharding, sharding
    if isinstance(sharding, tuple | list):
        if len(sharding) != 2:
            raise ValueError(
                f"`sharding`: expected one sharding or a pair (pool, buffer), got {len(sharding)} of them."
            )
        state_sharding, windows_sharding = sharding
    for one in (state_sharding, windows_sharding):
        if one is not None and not isinstance(one, jax.sharding.Sharding | jax.Device):
            raise ValueError(f"`sharding`: expected a jax.sharding.Sharding or a device, got {type(one).__name__}.")
    return ConvCache(
        conv_state=jnp.zeros(spec.state_shape, spec.dtype, device=state_sharding),
        conv_windows=jnp.zeros(spec.windows_shape, spec.dtype, device=windows_sharding),
        spec=spec,
    )


def reset_conv_state(
    conv_state: jax.Array, state_indices: Any, *, spec: ConvCacheSpec, null_slot: int | None = None
) -> jax.Array:
    """Zeroes slots of the pool, for sequences that start from nothing.

    Args:
      conv_state: the pool, all layers `spec.state_shape` or one layer's `spec.state_shape[1:]`.
      state_indices: int32 `[B]`, slots to clear. Slots outside 0 … C-1 and `null_slot` are skipped.
      spec: geometry.
      null_slot: a slot that is never written, or None.

    Returns:
      The pool with those slots zero. Donate the argument to update in place.

    Raises:
      ValueError: shapes or dtypes do not fit the spec.
    """
    checks.spec_argument(spec)
    problems = Problems()
    stacked = checks.cache_array(problems, "conv_state", conv_state, spec)
    slots = checks.index_array(problems, "state_indices", state_indices, None)
    null = checks.null_slot_value(problems, null_slot)
    problems.raise_if_any()
    assert slots is not None
    lead = (spec.num_layers,) if stacked else ()
    zeros = jnp.zeros((*lead, slots.shape[0], *spec.window_shape), spec.dtype)
    live = runs.live_slot(slots, null, spec=spec)
    where = runs.Runs(spec, slots, live, of="state", stacked=bool(stacked))
    return runs.put(conv_state, zeros, where)
