"""The public functions: each one checks its arguments, chooses an implementation and calls it.

Every mismatch of a call is reported in one `ValueError`, before anything is written. Nothing is cast silently, with
one exception: index arrays of any integer type saturate to int32, so that 2^32+3 is a skipped index and not slot 3.

The functions take no gradients, and update `conv_state` and `conv_windows` in place; what they return of these two
are the very tensors that they were given, so that code written for the JAX package reads the same.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch

from torch_ref import reference
from torch_ref.layout import ConvCacheSpec, as_integer, mismatch, raise_mismatches

IndexArray: TypeAlias = Any  # an integer tensor, a NumPy array or a list of integers, [B]
Implementation: TypeAlias = Literal["eager", "triton"] | None
Activation: TypeAlias = Literal["silu"] | None

FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INT32 = torch.iinfo(torch.int32)


@torch.no_grad()
def causal_conv1d_verify(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    conv_windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: IndexArray,
    layer: int | torch.Tensor | None = None,
    window_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    activation: Activation = "silu",
    implementation: Implementation = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves D draft tokens and records every state they could lead to; the pool is only read.

    The row receives the state without its oldest column, then x_0 … x_{v-1}; `commit_conv_state` picks a window later.

    Args:
      x: `[request, token, channel]` = (B, D, conv_dim), any strides; rounded once to the state's dtype.
      conv_state: the pool, `spec.state_shape`, or one layer of it; slot and layer strides are free.
      conv_windows: the buffer, `spec.windows_shape`, or one layer of it; written.
      weight: `[channel, tap]` = (conv_dim, K) or (conv_dim, 1, K); tap K-1 meets the current token.
      bias: `[channel]` or None.
      spec: the geometry.
      state_indices: slot of each request, int `[B]`.
      layer: index into stacked tensors; None for one layer's. A tensor may be out of range: all is skipped then.
      window_rows: buffer row of each request, int `[B]`; None for row b.
      num_valid_tokens: tokens v that count, 1 … D, int `[B]`; None for D.
      null_slot: a slot that is never used, or None.
      activation: "silu" or None.
      implementation: "eager", "triton", or None: triton for CUDA tensors, eager elsewhere.

    Returns:
      y `[request, token, channel]` in x's dtype, zero for skipped requests and for tokens from v on; and
      `conv_windows` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Assumes: live requests have different rows.
    Moves: per request S + D columns in, D+S-1 columns and D columns of y out.
    """
    wrong: list[str] = []
    call = _Call(spec, conv_state, wrong)
    call.take_windows(conv_windows)
    call.take_inputs(x, weight, bias, ("token", spec.num_draft_tokens), state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    rows, valid = call.take_rows(window_rows), call.index("num_valid_tokens", num_valid_tokens)
    backend = _choose(implementation, call.device, wrong)
    y = backend.verify(call.x, call.state, call.windows, **call.common, rows=rows, valid=valid)
    return y, conv_windows


@torch.no_grad()
def causal_conv1d_verify_float64(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: IndexArray,
    layer: int | torch.Tensor | None = None,
    window_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """y of `causal_conv1d_verify` in float64 and not rounded at the end, as the centre of error bounds; writes nothing.

    The columns are rounded to the state's dtype as always; products, sums and SiLU are float64. There is no buffer, so
    without `window_rows` any number of requests is welcome.
    """
    wrong: list[str] = []
    call = _Call(spec, conv_state, wrong)
    call.take_inputs(x, weight, bias, ("token", spec.num_draft_tokens), state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    rows, valid = call.index("window_rows", window_rows), call.index("num_valid_tokens", num_valid_tokens)
    raise_mismatches(wrong)
    return reference.verify(call.x, call.state, None, **call.common, rows=rows, valid=valid, dtype=torch.float64)


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: IndexArray,
    layer: int | torch.Tensor | None = None,
    null_slot: int | None = None,
    activation: Activation = "silu",
    implementation: Implementation = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One plain decode step: each slot drops its oldest column and appends x.

    Args:
      x: `[request, channel]` = (B, conv_dim).
      conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation: as for
        `causal_conv1d_verify`; the pool is written.

    Returns:
      y `[request, channel]` in x's dtype, zero for skipped requests; and `conv_state` itself.

    Raises:
      ValueError: as for `causal_conv1d_verify`.

    Assumes: live requests have different slots.
    """
    wrong: list[str] = []
    call = _Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    call.take_inputs(x, weight, bias, None, state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    backend = _choose(implementation, call.device, wrong)
    return backend.update(call.x, call.state, **call.common), conv_state


@torch.no_grad()
def causal_conv1d_prefill(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: IndexArray,
    lengths: IndexArray | None = None,
    has_initial_state: torch.Tensor | Sequence[bool] | Any | None = None,
    layer: int | torch.Tensor | None = None,
    null_slot: int | None = None,
    activation: Activation = "silu",
    implementation: Implementation = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole prompts, or chunks of them: convolves T tokens and leaves each slot with the last S inputs.

    Args:
      x: `[request, token, channel]` = (B, T, conv_dim).
      lengths: tokens of each prompt that count, 1 … T, int `[B]`; None for T. Other lengths skip the request.
      has_initial_state: bool `[B]`, True continues from the slot (chunked prefill), False starts from zeros; None is
        False for all.
      implementation: None or "eager"; there is no Triton prefill.
      conv_state, weight, bias, spec, state_indices, layer, null_slot, activation: as for `causal_conv1d_update`.

    Returns:
      y `[request, token, channel]`, zero for skipped requests and from `lengths[b]` on; and `conv_state` itself.

    Raises:
      ValueError: as for `causal_conv1d_verify`.

    Assumes: live requests have different slots.
    """
    wrong: list[str] = []
    call = _Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    num_tokens = x.shape[1] if isinstance(x, torch.Tensor) and x.ndim == 3 else 0
    call.take_inputs(x, weight, bias, ("token", num_tokens), state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    counts = call.index("lengths", lengths)
    if counts is None:
        counts = torch.full_like(call.common["slots"], num_tokens)
    continues = call.flags("has_initial_state", has_initial_state)
    if implementation not in (None, "eager"):
        wrong.append(mismatch("implementation", "None or 'eager'", repr(implementation), "Prefill has no kernel."))
    raise_mismatches(wrong)
    y = reference.prefill(call.x, call.state, **call.common, lengths=counts, continues=continues)
    return y, conv_state


@torch.no_grad()
def gather_windows(
    conv_windows: torch.Tensor,
    num_accepted_tokens: IndexArray,
    *,
    spec: ConvCacheSpec,
    window_rows: IndexArray | None = None,
) -> torch.Tensor:
    """The state after `num_accepted_tokens[b]` tokens of every request, in a new tensor.

    Args:
      conv_windows: the buffer, `spec.windows_shape`, or one layer of it; any strides, a `dense_view` too.
      num_accepted_tokens: n, int `[B]`.
      spec: the geometry.
      window_rows: buffer row of each request; None for row b.

    Returns:
      `[L, B, *spec.window_shape]`, without L for one layer's buffer; zeros for skipped requests.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.
    """
    wrong: list[str] = []
    call = _Call(spec, None, wrong, first=conv_windows)
    windows = call.leaf("conv_windows", conv_windows, spec.windows_shape, spec.windows_axes)
    accepted = call.first_index("num_accepted_tokens", num_accepted_tokens)
    rows = call.take_rows(window_rows)
    raise_mismatches(wrong)
    taken = reference.gather(windows, spec=spec, accepted=accepted, rows=rows)
    return taken if conv_windows.ndim == len(spec.windows_shape) else taken[0]


@torch.no_grad()
def commit_conv_state(
    conv_state: Any,
    conv_windows: Any,
    state_indices: IndexArray,
    num_accepted_tokens: IndexArray,
    *,
    spec: Any,
    window_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    track_indices: IndexArray | None = None,
    track_num_tokens: IndexArray | None = None,
    implementation: Implementation = None,
) -> Any:
    """Copies each request's accepted window into its slot, bit for bit, in place and in every layer.

    A request is skipped, and its slot keeps every bit, when its slot is negative, beyond the pool or `null_slot`, its
    row lies outside the buffer, n < 1, n > D, or, with `num_valid_tokens`, v < 1, v > D or n > v.

    Args:
      conv_state: the pool, `spec.state_shape`, or one layer of it, or a list, tuple or dict (nested at will) of such.
      conv_windows: the buffers, in the same structure.
      state_indices: slot of each request, int `[B]`.
      num_accepted_tokens: n, int `[B]`; 0 commits nothing.
      spec: one `ConvCacheSpec`, or the upper part of the same structure with one for each branch.
      window_rows: buffer row of each request; None for row b.
      num_valid_tokens: v, int `[B]`, as given to verify.
      null_slot: a slot that is never written, or None.
      track_indices, track_num_tokens: a second slot and count for each request, under the same rules; both or none.
      implementation: "eager", "triton", or None: triton for CUDA tensors, eager elsewhere.

    Returns:
      `conv_state` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Assumes: live requests have different slots; of two with one slot, either may win, other slots are right.
    Moves: 2 * S * conv_dim elements per live request and layer.
    """
    wrong: list[str] = []
    calls: list[_Call] = []
    for path, state, windows, group in _groups(conv_state, conv_windows, spec, "", wrong):
        call = _Call(group, state, wrong, path)
        call.check_written(f"conv_state{path}", state)
        call.take_windows(windows, written=False)
        calls.append(call)
    device = calls[0].device if calls else torch.device("cpu")
    shared = _Indices(device, wrong)
    slots = shared.first_index("state_indices", state_indices)
    accepted = shared.index("num_accepted_tokens", num_accepted_tokens)
    rows = shared.index("window_rows", window_rows)
    valid = shared.index("num_valid_tokens", num_valid_tokens)
    if (track_indices is None) != (track_num_tokens is None):
        missing, given = ("track_indices", "track_num_tokens")[:: 1 if track_indices is None else -1]
        wrong.append(mismatch(missing, f"an index array beside `{given}`", None, "The two come together."))
    track_slots = shared.index("track_indices", track_indices)
    track_accepted = shared.index("track_num_tokens", track_num_tokens)
    for call in calls:
        call.same_device(f"conv_state{call.path}", device)
        if rows is None:
            call.check_rows(shared.num_requests)
    _check_null_slot(null_slot, wrong)
    backend = _choose(implementation, device, wrong)
    for call in calls:
        backend.commit(
            call.state,
            call.windows,
            spec=call.spec,
            slots=slots,
            accepted=accepted,
            rows=rows,
            valid=valid,
            null_slot=null_slot,
            track_slots=track_slots,
            track_accepted=track_accepted,
        )
    return conv_state


@torch.no_grad()
def reset_conv_state(
    conv_state: torch.Tensor,
    state_indices: IndexArray,
    *,
    spec: ConvCacheSpec,
    null_slot: int | None = None,
) -> torch.Tensor:
    """Zeroes slots in place, in every layer of the given tensor; skips what commit would skip.

    Args:
      conv_state: the pool, `spec.state_shape`, or one layer of it.
      state_indices: slots, int `[B]`; negative ones, ones beyond the pool and `null_slot` are skipped.
      spec: the geometry.
      null_slot: a slot that is never written, or None.

    Returns:
      `conv_state` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.
    """
    wrong: list[str] = []
    call = _Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    slots = call.first_index("state_indices", state_indices)
    _check_null_slot(null_slot, wrong)
    raise_mismatches(wrong)
    reference.reset(call.state, spec=spec, slots=slots, null_slot=null_slot)
    return conv_state


class _Indices:
    """Index arrays of one call, as int32 `[B]` on one device. The first one (or x) fixes B."""

    def __init__(self, device: torch.device, wrong: list[str]) -> None:
        self.device = device
        self.wrong = wrong
        self.num_requests: int | None = None

    def same_device(self, name: str, device: torch.device) -> None:
        if device != self.device:
            self.wrong.append(mismatch(name, f"device {self.device}", device, "All tensors of a call share a device."))

    def first_index(self, name: str, value: IndexArray) -> torch.Tensor:
        """An index array that must be there."""
        if value is None:
            self.wrong.append(mismatch(name, "an integer array of requests", None))
        taken = self.index(name, value)
        return torch.zeros(0, dtype=torch.int32, device=self.device) if taken is None else taken

    def index(self, name: str, value: IndexArray | None) -> torch.Tensor | None:
        """An index array that may be None; wider integers saturate."""
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
                self.wrong.append(mismatch(name, "an integer dtype", value.dtype))
                return None
            self.same_device(name, value.device)
            taken = _saturated(value)
        else:
            dtype = getattr(value, "dtype", None)
            numbers = value.tolist() if hasattr(value, "tolist") else value
            if dtype is not None and getattr(dtype, "kind", None) not in ("i", "u"):
                self.wrong.append(mismatch(name, "an integer dtype", dtype))
                return None
            integers = [as_integer(n) for n in numbers] if isinstance(numbers, Sequence) else [None]
            if None in integers:
                self.wrong.append(mismatch(name, "a flat list of integers", repr(value)))
                return None
            clipped = [min(max(n, INT32.min), INT32.max) for n in integers if n is not None]
            taken = torch.tensor(clipped, dtype=torch.int32, device=self.device)
        return self._of_length(name, taken)

    def flags(self, name: str, value: Any) -> torch.Tensor:
        """A bool array; None is all False."""
        if value is None:
            return torch.zeros(self.num_requests or 0, dtype=torch.bool, device=self.device)
        if isinstance(value, torch.Tensor):
            taken = value
            self.same_device(name, value.device)
        else:
            taken = torch.tensor(value.tolist() if hasattr(value, "tolist") else value, device=self.device)
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


class _Call(_Indices):
    """Checks one call's tensors and brings them into the form of the backends; mismatches go to `wrong`.

    After it, `state` and `windows` have a leading layer axis, and `common` holds what all steps share.
    """

    def __init__(self, spec: Any, conv_state: Any, wrong: list[str], path: str = "", first: Any = None) -> None:
        if not isinstance(spec, ConvCacheSpec):
            raise_mismatches([mismatch(f"spec{path}", "a torch_ref.ConvCacheSpec", type(spec).__name__)])
        first = conv_state if first is None else first
        super().__init__(first.device if isinstance(first, torch.Tensor) else torch.device("cpu"), wrong)
        self.spec: ConvCacheSpec = spec
        self.path = path
        self.common: dict[str, Any] = {"spec": spec, "layer": None}
        self.x = self.state = self.windows = torch.empty(0)
        self.is_stacked = isinstance(conv_state, torch.Tensor) and conv_state.ndim == len(spec.state_shape)
        if first is conv_state:
            self.state = self.leaf("conv_state", conv_state, spec.state_shape, spec.state_axes)

    def leaf(self, name: str, tensor: Any, shape: tuple[int, ...], axes: str) -> torch.Tensor:
        """A pool or buffer, stacked or one layer's, with a layer axis."""
        name = f"{name}{self.path}"
        if not isinstance(tensor, torch.Tensor):
            self.wrong.append(mismatch(name, "a torch.Tensor", type(tensor).__name__))
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
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.numel() == 0:
            return
        (rows, row_stride), (items, item_stride) = zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True)
        if (rows > 1 and row_stride != items) or (items > 1 and item_stride != 1):
            expected = f"strides of {self.spec.entry_axes} = {(items, 1)}"
            self.wrong.append(mismatch(name, expected, (row_stride, item_stride), "The other strides are free."))
        elif written and _shares_memory(tensor):
            self.wrong.append(mismatch(name, "elements that share no memory", f"strides {tuple(tensor.stride())}"))

    def take_windows(self, conv_windows: Any, *, written: bool = True) -> None:
        """The buffer beside the pool."""
        shape = self.spec.windows_shape
        self.windows = self.leaf("conv_windows", conv_windows, shape, self.spec.windows_axes)
        self.check_written(f"conv_windows{self.path}", conv_windows, written=written)
        if isinstance(conv_windows, torch.Tensor) and (conv_windows.ndim == len(shape)) != self.is_stacked:
            expected = "a layer axis, as conv_state has" if self.is_stacked else "no layer axis, as conv_state has none"
            self.wrong.append(mismatch(f"conv_windows{self.path}", expected, tuple(conv_windows.shape)))

    def take_inputs(
        self, x: Any, weight: Any, bias: Any, tokens: tuple[str, int] | None, state_indices: IndexArray
    ) -> None:
        """x, the filter and the slots; `tokens` is the middle axis of x and its length."""
        middle = () if tokens is None else (tokens[1],)
        axes = "request, channel" if tokens is None else "request, token, channel"
        dim, width = self.spec.conv_dim, self.spec.width
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
        if not isinstance(tensor, torch.Tensor):
            self.wrong.append(mismatch(name, "a torch.Tensor", type(tensor).__name__))
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
                self.wrong.append(mismatch("layer", "None for one layer's tensors", repr(layer)))
        elif isinstance(layer, torch.Tensor):
            if layer.dtype.is_floating_point or layer.dtype in (torch.bool, torch.complex64) or layer.numel() != 1:
                self.wrong.append(mismatch("layer", "one integer", f"{layer.dtype} {tuple(layer.shape)}"))
            else:
                self.same_device("layer", layer.device)
                self.common["layer"] = _saturated(layer).reshape(())
        else:
            index = as_integer(layer)
            if index is None or not 0 <= index < self.spec.num_layers:
                self.wrong.append(mismatch("layer", f"{inside} for stacked tensors", repr(layer)))
            else:
                self.state = self.state[index : index + 1]
                self.windows = self.windows[index : index + 1]

    def take_options(self, null_slot: Any, activation: Any) -> None:
        """The static choices."""
        _check_null_slot(null_slot, self.wrong)
        if activation not in ("silu", None):
            self.wrong.append(mismatch("activation", "'silu' or None", repr(activation)))
        self.common |= {"null_slot": null_slot, "silu": activation == "silu"}

    def take_rows(self, window_rows: IndexArray | None) -> torch.Tensor | None:
        """Buffer rows; without them request b needs row b to exist."""
        if window_rows is None:
            self.check_rows(self.num_requests)
        return self.index("window_rows", window_rows)

    def check_rows(self, num_requests: int | None) -> None:
        if num_requests is not None and num_requests > self.spec.max_requests:
            expected = f"an index array, since requests = {num_requests} exceed max_requests = {self.spec.max_requests}"
            self.wrong.append(mismatch("window_rows", expected, None, "None means row b for request b."))


def _saturated(value: torch.Tensor) -> torch.Tensor:
    # from 2^63 on a uint64 turns negative in int64, and a negative index is skipped just as well
    if value.dtype == torch.int32:
        return value  # already what kernels read; converting it would cost launches of its own
    return value.long().clamp(INT32.min, INT32.max).int()


def _shares_memory(tensor: torch.Tensor) -> bool:
    # axes nest when each steps over everything that the finer ones reach; layouts in use all do
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _check_null_slot(null_slot: Any, wrong: list[str]) -> None:
    if null_slot is not None and (isinstance(null_slot, torch.Tensor) or as_integer(null_slot) is None):
        wrong.append(mismatch("null_slot", "a Python integer or None", repr(null_slot)))


def _groups(
    state: Any, windows: Any, spec: Any, path: str, wrong: list[str]
) -> Iterator[tuple[str, torch.Tensor, Any, Any]]:
    """The leaves of equal structures, each with its place in words and its spec."""
    if isinstance(state, torch.Tensor):
        yield path, state, windows, spec
        return
    if not isinstance(state, (list, tuple, Mapping)):
        wrong.append(mismatch(f"conv_state{path}", "a tensor, list, tuple or dict", type(state).__name__))
        return
    keys = _keys(state)
    whole = isinstance(spec, ConvCacheSpec)
    for name, other in (("conv_windows", windows), *(() if whole else (("spec", spec),))):
        if type(other) is not type(state) or set(_keys(other)) != set(keys):
            wrong.append(mismatch(f"{name}{path}", f"the structure {_outline(state)} of conv_state", _outline(other)))
            return
    for key in keys:
        branch = spec if whole else spec[key]
        yield from _groups(state[key], windows[key], branch, f"{path}[{key!r}]", wrong)


def _keys(node: Any) -> list[Any]:
    return list(node) if isinstance(node, Mapping) else list(range(len(node)))


def _outline(node: Any) -> str:
    name = type(node).__name__
    return f"{name} of {_keys(node)}" if isinstance(node, (list, tuple, Mapping)) else name


def _choose(implementation: Any, device: torch.device, wrong: list[str]) -> ModuleType:
    """The module that does the work, after every mismatch of the call has been reported. Imports Triton only for it."""
    name = implementation
    if implementation is None:
        name = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "eager"
    elif implementation not in ("eager", "triton"):
        wrong.append(mismatch("implementation", "None, 'eager' or 'triton'", repr(implementation)))
    elif implementation == "triton" and importlib.util.find_spec("triton") is None:
        wrong.append(mismatch("implementation", "'eager' where triton is not installed", repr(implementation)))
    if name != "triton" or wrong:
        raise_mismatches(wrong)
        return reference
    from torch_ref import kernels

    if device.type != "cuda" and not kernels.is_interpreted():
        hint = "On CPU the kernels need TRITON_INTERPRET=1, set before their first use."
        wrong.append(mismatch("implementation", f"'eager' for {device.type} tensors", "'triton'", hint))
    raise_mismatches(wrong)
    return kernels
