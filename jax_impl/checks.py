"""What every operation checks about its arguments while it is traced.

Only what is static is checked here: ranks, axes, dtypes and options. Values of index arrays are never looked at; the
operations skip every value that is out of range, and `jax_impl.debug` reports such values when asked.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_impl.layout import ITEM_BYTES, ConvCacheSpec, Problems, dtype_name, shown

Implementation = Literal["xla", "pallas", "pallas_interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas", "pallas_interpret")

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def is_used_up(problems: Problems, name: str, value: Any) -> bool:
    """Records a problem for an array that was donated or deleted: its memory is another array's, or nobody's."""
    if isinstance(value, Tracer) or not isinstance(value, jax.Array) or not value.is_deleted():
        return False
    got = f"a donated or deleted array of shape {tuple(value.shape)}"
    problems.add(name, "an array with its content", got, "Go on with what the call that it was donated to returned.")
    return True


def index_array(
    problems: Problems, name: str, value: Any, batch: int | None, tokens: int | Literal["D"] | None = None
) -> jax.Array | None:
    """`value` as an int32 array `[batch]`, saturated; records a problem and returns None when it cannot be one.

    Wider integers saturate instead of wrapping: 2^32 + 3 becomes 2^31 - 1, which every operation skips, and never 3.
    `batch` None accepts any length. With `tokens` the array is `[batch, tokens]`; "D" accepts any number of them.
    """
    if _holds_used_up(problems, name, value):
        return None
    array = _as_array(value)
    if tokens is not None and isinstance(value, list | tuple) and not value:
        array = np.zeros((0, tokens if isinstance(tokens, int) else 0), np.int32)  # of no requests, tokens are unknown
    if array is None or not jnp.issubdtype(array.dtype, jnp.integer):
        problems.add(name, "an integer array", _what_came(value, array), "Index arrays are int32.")
        return None
    axes, expected = ("request", (batch,)) if tokens is None else ("request, token", (batch, tokens))
    if not shape_fits(array.shape, expected):
        problems.add(name, f"{axes} = {shape_text(expected)}", tuple(array.shape))
        return None
    if array.dtype == jnp.int32:
        return jnp.asarray(array)
    limits = jnp.iinfo(array.dtype)
    low, high = max(int(limits.min), INT32_MIN), min(int(limits.max), INT32_MAX)
    if (low, high) != (int(limits.min), int(limits.max)):
        clip: Callable[..., Any] = jnp.clip if isinstance(array, jax.Array) else np.clip
        array = clip(array, np.asarray(low, array.dtype), np.asarray(high, array.dtype))
    return jnp.asarray(array.astype(jnp.int32))


def _what_came(value: Any, array: Any) -> str:
    """What came instead of an array of some dtype: the dtype of another, or the value that is none."""
    if array is None:
        return "a ragged or mixed list"
    return dtype_name(array.dtype) if array.dtype.kind in "biufcV" else shown(value)


def shape_fits(shape: tuple[int, ...], expected: tuple[int | str | None, ...]) -> bool:
    """Whether a shape is the expected one; None, or a letter, stands for a number that is not known."""
    pairs = zip(expected, shape, strict=False)
    return len(shape) == len(expected) and all(not isinstance(want, int) or want == size for want, size in pairs)


def shape_text(expected: tuple[int | str | None, ...]) -> str:
    """An expected shape for a message: B where the number is not known.

    >>> shape_text((None,)), shape_text((None, 4)), shape_text((3,))
    ('(B,)', '(B, 4)', '(3,)')
    """
    sizes = ["B" if size is None else str(size) for size in expected]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def _holds_used_up(problems: Problems, name: str, value: Any) -> bool:
    """`is_used_up` of the array, or of the scalars of a list or of the lists in it."""
    if isinstance(value, list | tuple):
        return any(_holds_used_up(problems, name, one) for one in value)
    return is_used_up(problems, name, value)


def _as_array(value: Any) -> Any:
    """`value` as a NumPy or jax array; integers of any size in a list are saturated. None if it is neither."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, list | tuple):
        kinds = {_kind(one) for one in value}
        if kinds == {"list"}:
            return _stacked([_as_array(one) for one in value])
        if kinds == {"integer"} or not kinds:
            return np.asarray([_saturated(one) for one in value], np.int32)
        if kinds in ({"integer", "integer scalar"}, {"integer scalar"}):
            return jnp.stack([jnp.asarray(one if isinstance(one, jax.Array) else _saturated(one)) for one in value])
        if kinds == {"bool scalar"}:
            return jnp.stack(value)
        if len(kinds) > 1 and kinds != {"integer", "other"}:
            return None
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return None


def _stacked(rows: list[Any]) -> Any:
    """The lists of a list as one array; None if they are ragged or mixed."""
    if any(row is None for row in rows) or len({(row.shape, row.dtype) for row in rows}) > 1:
        return None
    return jnp.stack(rows) if any(isinstance(row, jax.Array) for row in rows) else np.stack(rows)


def _kind(one: Any) -> str:
    """What a member of a list is; members of an index list are all integers, on the host or on the device."""
    if isinstance(one, list | tuple):
        return "list"
    if isinstance(one, jax.Array):
        kinds = {"i": "integer scalar", "b": "bool scalar"}
        # an integer that is not int32 would have to be saturated on its own before it meets the others
        known = one.ndim == 0 and (one.dtype == jnp.int32 or one.dtype.kind == "b")
        return kinds[one.dtype.kind] if known else "other"
    if isinstance(one, bool | np.bool_):
        return "bool"
    return "integer" if isinstance(one, int | np.integer) else "other"


def _saturated(number: Any) -> np.int32:
    return np.int32(min(max(int(number), INT32_MIN), INT32_MAX))


def given(value: Any) -> str:
    """For a message about an argument that should not be there at all: "an array", or else the value itself.

    >>> given([1, 2]), given(7)
    ('an array', '7')
    """
    return "an array" if isinstance(value, jax.Array | np.ndarray | list | tuple) else shown(value)


def null_slot_value(problems: Problems, null_slot: Any) -> int | None:
    """`null_slot` as an int or None; a traced value would make the skip rule depend on data and is refused."""
    if null_slot is None:
        return None
    if isinstance(null_slot, bool) or not isinstance(null_slot, int | np.integer):
        problems.add("null_slot", "a Python integer or None", shown(null_slot), "It is static: part of the program.")
        return None
    inside = INT32_MIN <= int(null_slot) <= INT32_MAX
    return int(null_slot) if inside else None  # no slot has such a number


def implementation_name(problems: Problems, implementation: Any) -> None:
    """Records a problem unless `implementation` is None or a known name."""
    known = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not known:
        problems.add("implementation", f"None or one of {', '.join(IMPLEMENTATIONS)}", shown(implementation))


def bool_array(problems: Problems, name: str, value: Any, batch: int | None) -> jax.Array | None:
    """`value` as a bool array `[batch]`, or None with a problem recorded."""
    if _holds_used_up(problems, name, value):
        return None
    array = _as_array(value)
    if isinstance(value, list | tuple) and not value:
        array = np.zeros(0, np.bool_)
    if array is None or array.dtype != np.bool_:
        problems.add(name, "a bool array", _what_came(value, array))
        return None
    if batch is not None and array.shape != (batch,):
        problems.expect(name, "request", (batch,), array.shape)
        return None
    return jnp.asarray(array)


def float_array(problems: Problems, name: str, value: Any) -> jax.Array | None:
    """`value` as a jax array of a supported float dtype, or None with a problem recorded."""
    if not isinstance(value, jax.Array | np.ndarray):
        problems.add(name, "an array", type(value).__name__)
        return None
    if dtype_name(value.dtype) not in ITEM_BYTES:
        problems.add(name, f"dtype {', '.join(ITEM_BYTES)}", dtype_name(value.dtype), "Nothing is cast silently.")
        return None
    return None if is_used_up(problems, name, value) else jnp.asarray(value)


def cache_array(
    problems: Problems, name: str, value: Any, spec: ConvCacheSpec, *, stacked: bool | None = None
) -> bool | None:
    """Checks a pool (`conv_state`) or verify buffer (`conv_windows`) against the spec; `name` may have a path.

    Returns whether it is stacked over layers; None when it fits neither form. `stacked` asks for one of the forms.
    """
    is_pool = "conv_state" in name
    full, axes = (spec.state_shape, spec.state_axes) if is_pool else (spec.windows_shape, spec.windows_axes)
    if not isinstance(value, jax.Array | np.ndarray):
        problems.add(name, "an array", type(value).__name__)
        return None
    if dtype_name(value.dtype) != spec.dtype:
        problems.add(
            name, f"dtype {spec.dtype} of the spec", dtype_name(value.dtype), "Pool and buffer are never cast."
        )
    is_stacked = value.ndim == len(full)
    expected = full if (is_stacked if stacked is None else stacked) else full[1:]
    if tuple(value.shape) != expected:
        one = axes.removeprefix("layer, ")
        if stacked is None and value.ndim not in (len(full), len(full) - 1):
            problems.add(name, f"{axes} = {full} or, for one layer, {one} = {full[1:]}", tuple(value.shape))
        else:
            problems.expect(name, axes if expected == full else one, expected, value.shape)
        return None
    is_used_up(problems, name, value)
    return is_stacked


def layer_index(problems: Problems, layer: Any, stacked: bool | None, spec: ConvCacheSpec) -> jax.Array | None:
    """`layer` as an int32 scalar for stacked arrays, None for one layer's arrays."""
    if stacked is False:
        if layer is not None:
            problems.add("layer", "None with one layer's arrays", shown(layer), "Pass stacked arrays to pick a layer.")
        return None
    if layer is None:
        if stacked:
            problems.add("layer", "an integer or an integer scalar with stacked arrays", "None")
        return None
    if is_used_up(problems, "layer", layer):
        return None
    if isinstance(layer, np.ndarray) and layer.ndim == 0:
        layer = layer[()]
    if isinstance(layer, int | np.integer) and not isinstance(layer, bool):
        if not 0 <= int(layer) < spec.num_layers:
            problems.add("layer", f"0 to num_layers - 1 = {spec.num_layers - 1}", int(layer))
            return None
        return jnp.asarray(int(layer), jnp.int32)
    if isinstance(layer, bool) or not isinstance(layer, jax.Array) or not np.issubdtype(layer.dtype, np.integer):
        problems.add("layer", "an integer or an integer scalar", shown(layer))
        return None
    if layer.ndim != 0:
        problems.expect("layer", "scalar", (), layer.shape)
        return None
    index = index_array(problems, "layer", layer.reshape(1), 1)
    return None if index is None else index[0]


def activation_name(problems: Problems, activation: Any) -> None:
    """Records a problem unless `activation` is "silu" or None."""
    if activation is not None and not (isinstance(activation, str) and activation == "silu"):
        problems.add("activation", 'None or "silu"', shown(activation))


def spec_argument(spec: Any) -> ConvCacheSpec:
    """`spec` itself; everything else is checked against it, so a wrong one raises at once."""
    if not isinstance(spec, ConvCacheSpec):
        raise ValueError(f"`spec`: expected a ConvCacheSpec, got {type(spec).__name__}.")
    return spec


def target_platform() -> str:
    """Platform that a program traced now is for: that of the mesh set with `jax.set_mesh`, else of the default device.

    The mesh counts first, because a program can be compiled for a GPU on a machine that has none.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()
