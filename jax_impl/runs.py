"""Bit-exact reads and writes of runs of columns, in plain `jax.lax`: what the "xla" paths are made of.

A run is a few neighbouring columns of one row of a pool or buffer. `take` reads one run per index, `put` writes one per
index; an index that is not live reads zeros and writes nothing. Every guard is explicit, because JAX wraps negative
indices and clamps slices: a write that is not live goes one past the end of its axis, where `lax` drops it, and a read
that is not live reads the first row and is replaced by zeros.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.checks import target_platform
from jax_impl.layout import ConvCacheSpec

_BITS = {2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Runs:
    """Where a set of runs lies in a pool ("state") or in a verify buffer ("windows").

    Attributes:
      spec: geometry.
      rows: int32, any shape: slot of the pool or row of the buffer.
      live: bool, broadcastable to `rows`: False reads zeros and writes nothing. False for a layer outside the stack.
      of: which array the runs are in.
      stacked: whether the array has the leading layer axis.
      layer: int32 scalar: only this layer of a stacked array. None: all layers.
      starts: int32 like `rows`: first column, or the token of a dense buffer. None: whole rows.
      num_columns: columns per run; None: all of them.
    """

    spec: ConvCacheSpec
    rows: jax.Array
    live: jax.Array
    of: Literal["state", "windows"]
    stacked: bool
    layer: jax.Array | None = None
    starts: jax.Array | None = None
    num_columns: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the indexed array."""
        full = self.spec.state_shape if self.of == "state" else self.spec.windows_shape
        return full if self.stacked else full[1:]

    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Axes that the index addresses, axes of those that a run does not keep, and the run's sizes on all axes."""
        shape, row = self.shape, int(self.stacked)
        sizes = list(shape)
        indexed = [row]
        sizes[row] = 1
        if self.layer is not None:
            indexed.insert(0, 0)
            sizes[0] = 1
        dropped = tuple(indexed)
        if self.starts is not None:
            dense = self.of == "windows" and self.spec.storage == "dense"
            position = row + 1 if dense else len(shape) + self.spec.column_axis
            indexed.append(position)
            sizes[position] = self.num_columns or 1
            if dense:
                dropped = (*dropped, position)
        return tuple(indexed), dropped, tuple(sizes)

    def index(self, dead_rows: jax.Array) -> jax.Array:
        """Index vectors `[..., len(indexed axes)]`, in bounds where live; the others are `dead_rows` at the origin."""
        shape = self.rows.shape
        parts = [jnp.where(self.live, self.rows, dead_rows)]
        if self.layer is not None:
            parts.insert(0, jnp.broadcast_to(jnp.clip(self.layer, 0, self.spec.num_layers - 1), shape))
        if self.starts is not None:
            parts.append(jnp.where(self.live, self.starts, jnp.int32(0)))
        return jnp.stack(parts, axis=-1).astype(jnp.int32)

    def offset_axes(self, dropped: tuple[int, ...]) -> tuple[int, ...]:
        """Axes of the result that belong to the run: index axes stand behind the layer axis, or first."""
        kept = len(self.shape) - len(dropped)
        if self.stacked and self.layer is None:
            return (0, *range(1 + self.rows.ndim, self.rows.ndim + kept))
        return tuple(range(self.rows.ndim, self.rows.ndim + kept))


def live_slot(slots: jax.Array, null_slot: int | None, *, spec: ConvCacheSpec) -> jax.Array:
    """Requests whose slot is in the pool and is not the null slot."""
    live = (slots >= 0) & (slots < spec.num_slots)
    return live if null_slot is None else live & (slots != null_slot)


@jax.custom_jvp
def _state(array: jax.Array) -> jax.Array:
    """The array itself. Copies are of bit patterns on most devices, where a gradient would silently be zero."""
    return array


@_state.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "The pool and the verify buffer are state, not parameters: gradients flow from y to x, weight and bias only. "
        "Pass them through jax.lax.stop_gradient, as what is written to them is."
    )


def take(array: jax.Array, where: Runs) -> jax.Array:
    """Reads runs: `[(L,) *rows.shape, *run]`; zeros where not live. Bits are preserved."""
    array = _state(array)
    indexed, dropped, sizes = where.axes()
    offsets = where.offset_axes(dropped)
    if array.size == 0:
        return jnp.zeros(_result_shape(where, offsets, dropped, sizes), array.dtype)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=offsets, collapsed_slice_dims=tuple(sorted(dropped)), start_index_map=indexed
    )
    # In bounds by construction: a mode that checks again would compute its mask in a kernel of its own.
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    found = lax.gather(_to_bits(array), where.index(jnp.zeros_like(where.rows)), dimensions, sizes, mode=mode)
    of_index = [axis for axis in range(found.ndim) if axis not in offsets]
    alive = lax.broadcast_in_dim(jnp.broadcast_to(where.live, where.rows.shape), found.shape, of_index)
    return _from_bits(jnp.where(alive, found, jnp.zeros_like(found)), array.dtype)


def _result_shape(
    where: Runs, offsets: tuple[int, ...], dropped: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    kept, index = iter([size for axis, size in enumerate(sizes) if axis not in dropped]), iter(where.rows.shape)
    return tuple(next(kept) if axis in offsets else next(index) for axis in range(len(offsets) + where.rows.ndim))


def put(array: jax.Array, values: jax.Array, where: Runs) -> jax.Array:
    """Writes runs and returns the array; everything else, and every run that is not live, keeps its bits."""
    array, values = _state(array), lax.stop_gradient(values)
    indexed, dropped, _ = where.axes()
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=where.offset_axes(dropped),
        inserted_window_dims=tuple(sorted(dropped)),
        scatter_dims_to_operand_dims=indexed,
    )
    # Dropped, because it is past the end; JAX would wrap a negative row to the last one. Each its own, so that no two
    # indices are equal unless two live requests name one row, whose content is unspecified anyway: without that promise
    # GPUs scatter 16-bit elements by compare-and-swap, seven times slower.
    ordinal = lax.iota(jnp.int32, where.rows.size).reshape(where.rows.shape)
    past_the_end = jnp.int32(where.shape[int(where.stacked)]) + ordinal
    written = lax.scatter(
        _to_bits(array),
        where.index(past_the_end),
        _to_bits(values),
        dimensions,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        unique_indices=True,
    )
    return _from_bits(written, array.dtype)


def union(one: jax.Array, other: jax.Array) -> jax.Array:
    """Both arrays in one, where at least one of them has zero bits at every element."""
    return from_bits(as_bits(one) | as_bits(other), one.dtype)


def as_bits(array: jax.Array) -> jax.Array:
    """The bit patterns of an array, as integers."""
    return lax.bitcast_convert_type(array, _BITS[array.dtype.itemsize])


def from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    """The array of which these are the bit patterns."""
    return lax.bitcast_convert_type(array, dtype)


def _needs_bits(dtype: jnp.dtype) -> bool:
    """Whether a copy must be of integers to keep NaN payloads.

    GPUs reinterpret a pool for free, so there copies are always of integers. On CPU a reinterpreted pool is a copied
    pool, and only bfloat16 before JAX 0.11 needs it: that compiler widens bfloat16 gathers and scatters to float32.
    """
    old = jax.__version_info__ < (0, 11)
    return target_platform() != "cpu" or (old and dtype == jnp.bfloat16)


def _to_bits(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array, _BITS[array.dtype.itemsize]) if _needs_bits(array.dtype) else array


def _from_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)
