"""The tensors of a cache, and a view that shows every window of a sliding buffer."""

import dataclasses
from typing import Any

import torch

from torch_ref.layout import ConvCacheSpec, mismatch, raise_mismatches, shown


@dataclasses.dataclass(frozen=True, eq=False)
class ConvCache:
    """The pool and the verify buffer of one group of layers; the functions of this package update both in place."""

    conv_state: torch.Tensor
    conv_windows: torch.Tensor
    spec: ConvCacheSpec


@dataclasses.dataclass(frozen=True, eq=False)
class HybridCache:
    """What a hybrid model keeps between steps: its convolutions' caches, and the state of its recurrent layers.

    Attributes:
      conv: a `ConvCache`, or a dict, list or tuple of them (several conv groups), nested as you like.
      recurrent_state: the pool of recurrent states, `[L, C, …]`, or a structure of such tensors; or None.
    """

    conv: Any
    recurrent_state: Any = None


def allocate_conv_cache(spec: ConvCacheSpec, device: torch.device | str | int | None = None) -> ConvCache:
    """Allocates a zeroed pool and a zeroed buffer.

    Args:
      spec: the geometry.
      device: where; None is torch's default device.

    Returns:
      `ConvCache` with `spec.state_bytes` and `spec.windows_bytes` bytes.

    Raises:
      ValueError: `spec` is no `ConvCacheSpec`, or torch knows no such device.

    Example:
      >>> cache = allocate_conv_cache(ConvCacheSpec(2, 9, 3, conv_dim=5, width=4, num_draft_tokens=4))
      >>> cache.conv_windows.nbytes == cache.spec.windows_bytes == 2 * 3 * 6 * 5 * 2
      True
    """
    wrong: list[str] = []
    if not isinstance(spec, ConvCacheSpec):
        wrong.append(mismatch("spec", "a torch_ref.ConvCacheSpec", type(spec).__name__))
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError, ValueError):
        wrong.append(mismatch("device", "None or a device that torch has here", shown(device)))
    raise_mismatches(wrong)
    dtype = getattr(torch, spec.dtype)
    return ConvCache(
        conv_state=torch.zeros(spec.state_shape, dtype=dtype, device=device),
        conv_windows=torch.zeros(spec.windows_shape, dtype=dtype, device=device),
        spec=spec,
    )


def dense_view(conv_windows: torch.Tensor, *, spec: ConvCacheSpec) -> torch.Tensor:
    """Every window of a sliding buffer as a view: entry [l, r, t] is the state after t+1 tokens.

    For inspection only. Neighbouring windows share memory, so this view must never be written, and it must never be
    handed to another framework: few of them accept overlapping strides, and those that copy lose the sharing.

    Args:
      conv_windows: sliding buffer, `[L, R, D+S-1, conv_dim]` or `[L, R, conv_dim, D+S-1]`, or one layer's without L.
      spec: its geometry.

    Returns:
      `[L, R, D, S, conv_dim]` or `[L, R, D, conv_dim, S]`, without L for one layer: the shape of dense storage.

    Raises:
      ValueError: the storage is dense already or has the inputs alone, or the shape is another.

    Moves: nothing.

    Example:
      >>> spec = ConvCacheSpec(1, 1, 1, conv_dim=1, width=3, num_draft_tokens=3)
      >>> dense_view(torch.arange(4).reshape(1, 1, 4, 1), spec=spec)[0, 0, :, :, 0].tolist()
      [[0, 1], [1, 2], [2, 3]]
    """
    wrong: list[str] = []
    if not isinstance(spec, ConvCacheSpec):
        wrong.append(mismatch("spec", "a torch_ref.ConvCacheSpec", type(spec).__name__))
    if not isinstance(conv_windows, torch.Tensor) or conv_windows.layout != torch.strided:
        wrong.append(mismatch("conv_windows", "a strided torch.Tensor", shown(conv_windows)))
    raise_mismatches(wrong)
    if spec.storage != "sliding":
        hint = "A dense buffer is its own view." if spec.storage == "dense" else "The buffer lacks the state's columns."
        wrong.append(mismatch("spec.storage", "'sliding'", shown(spec.storage), hint))
    elif tuple(conv_windows.shape) not in (spec.windows_shape, spec.windows_shape[1:]):
        wrong.append(mismatch("conv_windows", f"{spec.windows_axes} = {spec.windows_shape}", tuple(conv_windows.shape)))
    raise_mismatches(wrong)
    step = conv_windows.stride(spec.column_axis)  # the next token's window starts one column later
    leading = conv_windows.ndim - 2
    shape = (*conv_windows.shape[:leading], spec.num_draft_tokens, *spec.window_shape)
    strides = (*conv_windows.stride()[:leading], step, *conv_windows.stride()[leading:])
    return conv_windows.as_strided(shape, strides, conv_windows.storage_offset())
