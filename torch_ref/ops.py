"""The functions of one conv state: each one checks its arguments, chooses an implementation and calls it.

Every mismatch of a call is reported in one `ValueError`, before anything is written. Nothing is cast silently, with
one exception: index arrays of any integer type saturate to int32, so that 2^32+3 is a skipped index and not slot 3.

The functions take no gradients, and update `conv_state` and `conv_windows` in place; what they return of these two
are the very tensors that they were given, so that code written for the JAX package reads the same.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_ref import reference
from torch_ref.checks import (
    Activation,
    Call,
    Implementation,
    IndexArray,
    apart,
    check_null_slot,
    choose_backend,
    memory_range,
)
from torch_ref.layout import ConvCacheSpec, mismatch, raise_mismatches, shown


@torch.no_grad()
def causal_conv1d_verify(
    x: torch.Tensor | None,
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
    parents: IndexArray | None = None,
    resume_tokens: IndexArray | None = None,
    resume_path: IndexArray | None = None,
    resume_windows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Convolves D draft tokens and records every state they could lead to; the pool is only read, with one exception.

    A sliding row receives the state without its oldest column, then x_0 … x_{v-1}; an inputs row x_0 … x_{v-1} alone; a
    dense row the window after each of them. `commit_conv_state` picks a window later. Or nothing is committed, and the
    next verify resumes from the row: `resume_tokens` says after how many tokens. An inputs row does not suffice for
    that, so in this storage a step that resumes also writes the state from which it starts to the slot.

    Args:
      x: `[request, token, channel]` = (B, D, conv_dim), any strides; rounded once to the state's dtype. None in inputs
        storage where the rows have it: who keeps the inputs of all layers in one tensor passes that as the buffer.
      conv_state: the pool, `spec.state_shape`, or one layer of it; slot and layer strides are free. Written only where
        an inputs step resumes.
      conv_windows: the buffer, `spec.windows_shape`, or one layer of it; written, unless it has x.
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
      parents: links of a draft tree, int `[B, D]`, -1 for the committed state, others less than their own index, in
        sliding storage by one: a token meets its ancestors. Another link among v tokens skips. None for a chain.
      resume_tokens: tokens r of the previous step that were accepted, int `[B]`: 1 … D start from the window after r of
        them, 0 from the slot; others are skipped. None for 0.
      resume_path: their nodes, where the previous step was a tree, int `[B, D]`, the first r of a row count. Skipped
        when the window needs an entry that is no node; in sliding storage when entry r-1 is not r-1.
      resume_windows: inputs storage only: the buffer of the previous step; None for `conv_windows`.

    Returns:
      y `[request, token, channel]` in x's dtype (without x in the state's), zero for skipped requests and for tokens
      from v on; `conv_windows` itself; and, where an inputs step resumes, `conv_state` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Assumes: live requests have different rows, and different slots where these are written.
    Moves: per request S + D columns in, D+S-1 columns (D in inputs storage, none without x) and D columns of y out; S
      more where an inputs step resumes.
    """
    wrong: list[str] = []
    call = Call(spec, conv_state, wrong)
    is_inputs = spec.storage == "inputs"
    advances = is_inputs and resume_tokens is not None
    call.check_written("conv_state", conv_state, written=advances)
    call.take_windows(conv_windows, written=x is not None)
    if is_inputs:
        call.take_previous(resume_windows)
    tokens = ("token", spec.num_draft_tokens)
    call.take_inputs(x, weight, bias, tokens, state_indices, x_in_rows=x is None)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    rows, valid = call.take_rows(window_rows), call.index("num_valid_tokens", num_valid_tokens)
    links = call.table("parents", parents, spec.num_draft_tokens)
    resume = call.index("resume_tokens", resume_tokens)
    path = call.table("resume_path", resume_path, spec.num_draft_tokens)
    _check_resume(spec, x, resume_tokens, resume_path, resume_windows, wrong)
    backend = choose_backend(implementation, call.device, wrong)
    y = backend.verify(
        None if x is None else call.x, call.state, call.windows, **call.common, rows=rows, valid=valid, parents=links,
        resume=resume, resume_path=path, previous=_apart_from(call.previous, call.windows, call.state),
    )  # fmt: skip
    return (y, conv_windows, conv_state) if advances else (y, conv_windows)


def _check_resume(
    spec: ConvCacheSpec, x: Any, resume_tokens: Any, resume_path: Any, resume_windows: Any, wrong: list[str]
) -> None:
    """Which arguments of a step that resumes go together."""
    if resume_tokens is None:
        for name, value in (("resume_path", resume_path), ("resume_windows", resume_windows)):
            if value is not None:
                wrong.append(mismatch(name, "None without `resume_tokens`", shown(value)))
    if resume_windows is not None and spec.storage != "inputs":
        hint = "It resumes from the row that it writes."
        wrong.append(mismatch("resume_windows", f"None for storage '{spec.storage}'", shown(resume_windows), hint))
    if x is None and spec.storage != "inputs":
        hint = "Only rows of inputs can have it already."
        wrong.append(mismatch("x", f"a torch.Tensor for storage '{spec.storage}'", None, hint))
    if spec.storage == "inputs" and x is None and resume_tokens is not None and resume_windows is None:
        hint = "`conv_windows` has those of this step."
        wrong.append(mismatch("resume_windows", "the previous step's inputs where `x` is None", None, hint))


def _apart_from(previous: torch.Tensor | None, windows: torch.Tensor, state: torch.Tensor) -> torch.Tensor | None:
    """The previous buffer, or a copy of it where it may share memory with what is written, but is not this buffer."""
    if previous is None or (previous.data_ptr() == windows.data_ptr() and previous.stride() == windows.stride()):
        return previous
    return apart(previous, [memory_range(windows), memory_range(state)])


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
    call = Call(spec, conv_state, wrong)
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
    call = Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    call.take_inputs(x, weight, bias, None, state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    backend = choose_backend(implementation, call.device, wrong)
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
    call = Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    num_tokens = x.shape[1] if isinstance(x, torch.Tensor) and x.ndim == 3 else 1
    if isinstance(x, torch.Tensor) and x.ndim == 3 and num_tokens == 0:
        wrong.append(mismatch("x", "at least one token", tuple(x.shape)))
    call.take_inputs(x, weight, bias, ("token", num_tokens), state_indices)
    call.take_layer(layer)
    call.take_options(null_slot, activation)
    counts = call.index("lengths", lengths)
    if counts is None:
        counts = torch.full_like(call.common["slots"], num_tokens)
    continues = call.flags("has_initial_state", has_initial_state)
    if implementation is not None and not (isinstance(implementation, str) and implementation == "eager"):
        wrong.append(mismatch("implementation", "None or 'eager'", shown(implementation), "Prefill has no kernel."))
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
    conv_state: torch.Tensor | None = None,
    state_indices: IndexArray | None = None,
    null_slot: int | None = None,
    accepted_path: IndexArray | None = None,
) -> torch.Tensor:
    """The state after `num_accepted_tokens[b]` tokens of every request, in a new tensor.

    Args:
      conv_windows: the buffer, `spec.windows_shape`, or one layer of it; any strides, a `dense_view` too.
      num_accepted_tokens: n, int `[B]`.
      spec: the geometry.
      window_rows: buffer row of each request; None for row b.
      conv_state, state_indices, null_slot: of inputs storage, which puts windows together from the pool and the row:
        the pool, stacked or one layer's as the buffer is, the slot of each request, and a slot that is never used or
        None. Other storages take none of them.
      accepted_path: nodes of a tree from the root to the last accepted one, int `[B, D]`; the first n of a row count.
        Skipped when the window needs one that is no node; in sliding storage when entry n-1 is not n-1. None for a
        chain.

    Returns:
      `[L, B, *spec.window_shape]`, without L for one layer's buffer; zeros for skipped requests.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.
    """
    wrong: list[str] = []
    call = Call(spec, conv_state, wrong, first=conv_windows)
    windows = call.leaf("conv_windows", conv_windows, spec.windows_shape, spec.windows_axes)
    accepted = call.first_index("num_accepted_tokens", num_accepted_tokens)
    rows = call.take_rows(window_rows)
    path = call.table("accepted_path", accepted_path, spec.num_draft_tokens)
    state = slots = None
    if spec.storage == "inputs":
        if conv_state is None:
            hint = "The rows have the new inputs only."
            wrong.append(mismatch("conv_state", "the pool, for storage 'inputs'", None, hint))
        else:
            state = call.leaf("conv_state", conv_state, spec.state_shape, spec.state_axes)
            call.check_form("conv_windows", conv_windows, spec.windows_shape)
        slots = call.first_index("state_indices", state_indices)
        check_null_slot(null_slot, wrong)
    else:
        for name, value in (("conv_state", conv_state), ("state_indices", state_indices), ("null_slot", null_slot)):
            if value is not None:
                hint = "The rows have whole windows."
                wrong.append(mismatch(name, f"None for storage '{spec.storage}'", shown(value), hint))
    raise_mismatches(wrong)
    taken = reference.gather(
        windows, spec=spec, accepted=accepted, rows=rows, path=path, state=state, slots=slots, null_slot=null_slot
    )
    return taken if conv_windows.ndim == len(spec.windows_shape) else taken[0]


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
    call = Call(spec, conv_state, wrong)
    call.check_written("conv_state", conv_state)
    slots = call.first_index("state_indices", state_indices)
    check_null_slot(null_slot, wrong)
    raise_mismatches(wrong)
    reference.reset(call.state, spec=spec, slots=slots, null_slot=null_slot)
    return conv_state
