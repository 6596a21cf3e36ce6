"""What the public functions share: the checks of their arguments, and the choice of who does the work.

Every mismatch of a call is collected before anything is written. Nothing is cast, but index arrays of any integer type
saturate to int32. What passes comes out in the one form that the backends take.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch

from torch_ref import reference
from torch_ref.layout import ConvCacheSpec, as_integer, mismatch, raise_mismatches, shown

IndexArray: TypeAlias = Any  # an integer tensor, a NumPy array or a list of integers, [B]
Implementation: TypeAlias = Literal["eager", "triton"] | None
Activation: TypeAlias = Literal["silu"] | None

FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
SHARED_DEVICE = "All tensors of a call share a device."
INT32 = torch.iinfo(torch.int32)


def is_strided(value: Any) -> bool:
    """Whether `value` is a tensor with a place in memory for every element, which a sparse one has not."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


class Indices:
    """Index arrays of one call, as int32 `[B]` on one device. The first one (or x) fixes B."""

    def __init__(self, device: torch.device, wrong: list[str]) -> None:
        self.device = device
        self.wrong = wrong
        self.num_requests: int | None = None

    def same_device(self, name: str, device: torch.device) -> None:
        if device != self.device:
            self.wrong.append(mismatch(name, f"device {self.device}", device, SHARED_DEVICE))

    def first_index(self, name: str, value: IndexArray) -> torch.Tensor:
        """An index array that must be there."""
        if value is None:
            self.wrong.append(mismatch(name, "an integer array of requests", None))
        taken = self.index(name, value)
        return torch.zeros(0, dtype=torch.int32, device=self.device) if taken is None else taken

    def index(self, name: str, value: IndexArray | None) -> torch.Tensor | None:
        """An index array that may be None; wider integers saturate."""
        taken = self._integers(name, value)
        return None if taken is None else self._of_length(name, taken)

    def table(self, name: str, value: IndexArray | None, num_tokens: int | None) -> torch.Tensor | None:
        """An index for each request and token, int32 `[B, D]`, that may be None; so may D, where it is not known."""
        taken = self._integers(name, value, nested=True)
        if taken is None:
            return None
        if taken.numel() == 0 and not isinstance(value, torch.Tensor):
            taken = taken.reshape(0, num_tokens or 0)  # a list of no requests has no tokens to count
        expected = {"B": self.num_requests, "D": num_tokens}
        known = [size in (None, found) for size, found in zip(expected.values(), taken.shape, strict=False)]
        if taken.ndim != len(expected) or not all(known):
            sizes = ", ".join(axis if size is None else str(size) for axis, size in expected.items())
            self.wrong.append(mismatch(name, f"request, token = ({sizes})", tuple(taken.shape)))
        return taken.contiguous()

    def _integers(self, name: str, value: IndexArray | None, *, nested: bool = False) -> torch.Tensor | None:
        """An integer tensor, NumPy array or list as int32; a `nested` list has a list for each request."""
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            if not is_strided(value):
                self.wrong.append(mismatch(name, "a strided torch.Tensor", value.layout))
                return None
            if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
                self.wrong.append(mismatch(name, "an integer dtype", value.dtype))
                return None
            self.same_device(name, value.device)
            return _saturated(value)
        dtype = getattr(value, "dtype", None)
        if dtype is not None and getattr(dtype, "kind", None) not in ("i", "u"):
            self.wrong.append(mismatch(name, "an integer dtype", dtype))
            return None
        try:
            clipped = _clipped(value.tolist() if hasattr(value, "tolist") else value, nested=nested)
            return torch.tensor(clipped, dtype=torch.int32, device=self.device)
        except (TypeError, ValueError):
            expected = "a list of as many integers for each request" if nested else "a flat list of integers"
            self.wrong.append(mismatch(name, expected, shown(value)))
            return None

    def flags(self, name: str, value: Any) -> torch.Tensor:
        """A bool array; None is all False."""
        if value is None:
            return torch.zeros(self.num_requests or 0, dtype=torch.bool, device=self.device)
        if isinstance(value, torch.Tensor) and not is_strided(value):
            self.wrong.append(mismatch(name, "a strided torch.Tensor", value.layout))
            return torch.zeros(self.num_requests or 0, dtype=torch.bool, device=self.device)
        if isinstance(value, torch.Tensor):
            taken = value
            self.same_device(name, value.device)
        else:
            try:
                taken = torch.tensor(value.tolist() if hasattr(value, "tolist") else value, device=self.device)
            except (TypeError, ValueError, RuntimeError):
                self.wrong.append(mismatch(name, "a flat list of bools", shown(value)))
                return torch.zeros(self.num_requests or 0, dtype=torch.bool, device=self.device)
            taken = taken.bool() if taken.numel() == 0 else taken
        if taken.dtype != torch.bool:
            self.wrong.append(mismatch(name, "dtype torch.bool", taken.dtype))
        return self._of_length(name, taken)

    def _of_length(self, name: str, taken: torch.Tensor) -> torch.Tensor:
        if self.num_requests is None and taken.ndim == 1:
            self.num_requests = len(taken)
        if tuple(taken.shape) != (self.num_requests,):
            requests = "B" if self.num_requests is None else self.num_requests
            self.wrong.append(mismatch(name, f"request = ({requests},)", tuple(taken.shape)))
        return taken.contiguous()


class Call(Indices):
    """Checks one call's tensors and brings them into the form of the backends; mismatches go to `wrong`.

    After it, `state` and `windows` have a leading layer axis, and `common` holds what all steps share.
    """

    def __init__(
        self, spec: Any, conv_state: Any, wrong: list[str], path: str = "", owner: str = "", first: Any = None
    ) -> None:
        self.owner, self.path = owner, path  # what messages put before and after the name of an argument
        if not isinstance(spec, ConvCacheSpec):
            raise_mismatches([mismatch(self.called("spec"), "a torch_ref.ConvCacheSpec", type(spec).__name__)])
        first = conv_state if first is None else first
        super().__init__(first.device if isinstance(first, torch.Tensor) else torch.device("cpu"), wrong)
        self.spec: ConvCacheSpec = spec
        self.common: dict[str, Any] = {"spec": spec, "layer": None}
        self.x = self.state = self.windows = torch.empty(0)
        self.previous: torch.Tensor | None = None
        self.is_stacked = isinstance(conv_state, torch.Tensor) and conv_state.ndim == len(spec.state_shape)
        if first is conv_state:
            self.state = self.leaf("conv_state", conv_state, spec.state_shape, spec.state_axes)

    def called(self, name: str) -> str:
        """The argument's name with its place: `cache.conv['q'].conv_state`, `conv_state['q']`."""
        return f"{self.owner}{name}{self.path}"

    def leaf(self, name: str, tensor: Any, shape: tuple[int, ...], axes: str) -> torch.Tensor:
        """A pool or buffer, stacked or one layer's, with a layer axis."""
        name = self.called(name)
        if not is_strided(tensor):
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            self.wrong.append(mismatch(name, "a torch.Tensor", got))
            return torch.empty(0)
        if tensor.dtype != getattr(torch, self.spec.dtype):
            hint = "Nothing is cast silently; the pool and its buffer share spec.dtype."
            self.wrong.append(mismatch(name, f"dtype torch.{self.spec.dtype}", tensor.dtype, hint))
        self.same_device(name, tensor.device)
        one_layer = tensor.ndim == len(shape) - 1
        expected = shape[1:] if one_layer else shape
        if tuple(tensor.shape) != expected:
            words = axes.removeprefix("layer, ") if one_layer else axes
            self.wrong.append(mismatch(name, f"{words} = {expected}", tuple(tensor.shape)))
        return tensor.unsqueeze(0) if one_layer else tensor

    def check_written(self, name: str, tensor: Any, *, written: bool = True) -> None:
        """Layer and slot strides are free, the entry is contiguous, and no two elements share memory."""
        if not is_strided(tensor) or tensor.ndim < 2 or tensor.numel() == 0:
            return
        name = self.called(name)
        (rows, row_stride), (items, item_stride) = zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True)
        if (rows > 1 and row_stride != items) or (items > 1 and item_stride != 1):
            expected = f"strides of {self.spec.entry_axes} = {(items, 1)}"
            self.wrong.append(mismatch(name, expected, (row_stride, item_stride), "The other strides are free."))
        elif written and shares_memory(tensor):
            self.wrong.append(mismatch(name, "elements that share no memory", f"strides {tuple(tensor.stride())}"))

    def take_windows(self, conv_windows: Any, *, written: bool = True) -> None:
        """The buffer beside the pool."""
        shape = self.spec.windows_shape
        self.windows = self.leaf("conv_windows", conv_windows, shape, self.spec.windows_axes)
        self.check_written("conv_windows", conv_windows, written=written)
        self.check_form("conv_windows", conv_windows, shape)

    def take_previous(self, resume_windows: Any) -> None:
        """The buffer of the step before, where it is another one than this step's."""
        if resume_windows is not None:
            shape = self.spec.windows_shape
            self.previous = self.leaf("resume_windows", resume_windows, shape, self.spec.windows_axes)
            self.check_written("resume_windows", resume_windows, written=False)
            self.check_form("resume_windows", resume_windows, shape)

    def check_form(self, name: str, tensor: Any, stacked: tuple[int, ...]) -> None:
        """Stacked or one layer's, as the pool is."""
        if isinstance(tensor, torch.Tensor) and (tensor.ndim == len(stacked)) != self.is_stacked:
            expected = "a layer axis, as conv_state has" if self.is_stacked else "no layer axis, as conv_state has none"
            self.wrong.append(mismatch(self.called(name), expected, tuple(tensor.shape)))

    def take_inputs(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        tokens: tuple[str, int] | None,
        state_indices: IndexArray,
        *,
        x_in_rows: bool = False,
    ) -> None:
        """x, unless the rows have it, the filter and the slots; `tokens` is the middle axis of x and its length."""
        middle = () if tokens is None else (tokens[1],)
        axes = "request, channel" if tokens is None else "request, token, channel"
        dim, width = self.spec.conv_dim, self.spec.width
        if not x_in_rows:
            self.x = self._float("x", x)
            if self.x.ndim == 2 + len(middle):
                self.num_requests = self.x.shape[0]
        slots = self.first_index("state_indices", state_indices)
        self._shape("x", x, axes, (self.num_requests or 0, *middle, dim))
        taps = self._float("weight", weight)
        if taps.ndim == 3 and taps.shape[1] == 1:
            taps = taps[:, 0]
        self._shape("weight", taps, "channel, tap", (dim, width), f"(channel, 1, tap) = {(dim, 1, width)} is as good.")
        if bias is not None:
            bias = self._float("bias", bias)
            self._shape("bias", bias, "channel", (dim,))
        self.common |= {"weight": taps, "bias": bias, "slots": slots}

    def _float(self, name: str, tensor: Any) -> torch.Tensor:
        if not is_strided(tensor):
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            self.wrong.append(mismatch(name, "a torch.Tensor", got))
            return torch.empty(0)
        if tensor.dtype not in FLOATS:
            self.wrong.append(mismatch(name, f"dtype {', '.join(FLOATS.values())}", tensor.dtype))
        self.same_device(name, tensor.device)
        return tensor

    def _shape(self, name: str, tensor: Any, axes: str, shape: tuple[int, ...], hint: str = "") -> None:
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) != shape:
            self.wrong.append(mismatch(name, f"{axes} = {shape}", tuple(tensor.shape), hint))

    def take_layer(self, layer: Any) -> None:
        """A static layer becomes a view of that layer; a tensor stays an index for the device."""
        inside = f"an index from 0 to {self.spec.num_layers - 1}"
        if not self.is_stacked:
            if layer is not None:
                self.wrong.append(mismatch("layer", "None for one layer's tensors", shown(layer)))
        elif isinstance(layer, torch.Tensor):
            is_integer = not (layer.dtype.is_floating_point or layer.dtype.is_complex or layer.dtype == torch.bool)
            if not is_integer or layer.numel() != 1:
                self.wrong.append(mismatch("layer", "one integer", f"{layer.dtype} {tuple(layer.shape)}"))
            else:
                self.same_device("layer", layer.device)
                self.common["layer"] = _saturated(layer).reshape(())
        else:
            index = as_integer(layer)
            if index is None or not 0 <= index < self.spec.num_layers:
                self.wrong.append(mismatch("layer", f"{inside} for stacked tensors", shown(layer)))
            else:
                self.state = self.state[index : index + 1]
                self.windows = self.windows[index : index + 1] if self.windows.ndim else self.windows
                self.previous = (
                    None if self.previous is None or not self.previous.ndim else self.previous[index : index + 1]
                )

    def take_options(self, null_slot: Any, activation: Any) -> None:
        """The static choices."""
        check_null_slot(null_slot, self.wrong)
        if activation is not None and not (isinstance(activation, str) and activation == "silu"):
            self.wrong.append(mismatch("activation", "'silu' or None", shown(activation)))
        self.common |= {"null_slot": as_integer(null_slot), "silu": activation == "silu"}

    def take_rows(self, window_rows: IndexArray | None) -> torch.Tensor | None:
        """Buffer rows; without them request b needs row b to exist."""
        if window_rows is None:
            self.check_rows(self.num_requests)
        return self.index("window_rows", window_rows)

    def check_rows(self, num_requests: int | None) -> None:
        check_rows(num_requests, self.spec.max_requests, "max_requests", self.wrong)


def _clipped(numbers: Any, *, nested: bool) -> list[Any]:
    """A list of integers, or of such lists, within int32."""
    if not isinstance(numbers, Sequence):
        raise TypeError
    if nested:
        return [_clipped(inner, nested=False) for inner in numbers]
    integers = [as_integer(n) for n in numbers]
    if None in integers:
        raise TypeError
    return [min(max(n, INT32.min), INT32.max) for n in integers if n is not None]


def _saturated(value: torch.Tensor) -> torch.Tensor:
    # from 2^63 on a uint64 turns negative in int64, and a negative index is skipped just as well
    if value.dtype == torch.int32:
        return value  # already what kernels read; converting it would cost launches of its own
    return value.long().clamp(INT32.min, INT32.max).int()


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place."""
    # axes nest when each steps over everything that the finer ones reach; layouts in use all do
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def apart(windows: torch.Tensor, pools: list[tuple[int, int]]) -> torch.Tensor:
    """A buffer, or a copy of it where it may share memory with one of the pools."""
    first, end = memory_range(windows)
    if all(end <= pool_first or pool_end <= first for pool_first, pool_end in pools):
        return windows
    return windows.clone(memory_format=torch.contiguous_format)


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last; those of an empty tensor are equal."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (reach + 1)


def check_null_slot(null_slot: Any, wrong: list[str]) -> None:
    """A null slot is static."""
    if null_slot is not None and (isinstance(null_slot, torch.Tensor) or as_integer(null_slot) is None):
        wrong.append(mismatch("null_slot", "a Python integer or None", shown(null_slot)))


def check_rows(num_requests: int | None, num_rows: int, rows_called: str, wrong: list[str]) -> None:
    """Without `window_rows` request b needs row b to exist."""
    if num_requests is not None and num_requests > num_rows:
        expected = f"an index array, since requests = {num_requests} exceed {rows_called} = {num_rows}"
        line = mismatch("window_rows", expected, None, "None means row b for request b.")
        if line not in wrong:  # groups of one model share their rows
            wrong.append(line)


def leaves_of(
    names: tuple[str, str], trees: tuple[Any, Any], wrong: list[str], spec: Any = None, path: str = ""
) -> Iterator[tuple[str, Any, Any, Any]]:
    """The leaves of two equal structures (None is an empty one), each with its place in words and its spec.

    `spec` is whole, for all leaves below, or has the same structure down to where it is whole; None is whole too.
    """
    first, second = trees
    if isinstance(first, torch.Tensor):
        yield path, first, second, spec
        return
    if first is None:
        if second is not None:
            wrong.append(mismatch(f"{names[1]}{path}", f"None, as {names[0]} has there", type(second).__name__))
        return
    if not isinstance(first, (list, tuple, Mapping)):
        wrong.append(mismatch(f"{names[0]}{path}", "a tensor, list, tuple or dict", type(first).__name__))
        return
    keys = _keys(first)
    specs: dict[Any, Any] = dict.fromkeys(keys, spec)
    others = [(names[1], second)]
    if not (spec is None or isinstance(spec, ConvCacheSpec)):
        specs = spec
        others.append(("spec", spec))
    for name, other in others:
        if type(other) is not type(first) or set(_keys(other)) != set(keys):
            expected = f"the structure {_outline(first)} of {names[0]}"
            wrong.append(mismatch(f"{name}{path}", expected, _outline(other)))
            return
    for key in keys:
        yield from leaves_of(names, (first[key], second[key]), wrong, specs[key], f"{path}[{key!r}]")


def _keys(node: Any) -> list[Any]:
    return list(node) if isinstance(node, Mapping) else list(range(len(node)))


def _outline(node: Any) -> str:
    name = type(node).__name__
    return f"{name} of {_keys(node)}" if isinstance(node, (list, tuple, Mapping)) else name


def choose_backend(implementation: Any, device: torch.device, wrong: list[str]) -> ModuleType:
    """The module that does the work, after every mismatch of the call has been reported. Imports Triton only for it."""
    name = implementation
    if implementation is None:
        name = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "eager"
    elif not isinstance(implementation, str) or implementation not in ("eager", "triton"):
        wrong.append(mismatch("implementation", "None, 'eager' or 'triton'", shown(implementation)))
    elif implementation == "triton" and importlib.util.find_spec("triton") is None:
        wrong.append(mismatch("implementation", "'eager' where triton is not installed", shown(implementation)))
    if wrong or name != "triton":
        raise_mismatches(wrong)
        return reference
    from torch_ref import kernels

    if device.type != "cuda" and not kernels.is_interpreted():
        hint = "On CPU the kernels need TRITON_INTERPRET=1, set before their first use."
        wrong.append(mismatch("implementation", f"'eager' for {device.type} tensors", "'triton'", hint))
    raise_mismatches(wrong)
    return kernels
