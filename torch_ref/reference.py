"""The definition, in eager torch: verify, update, prefill, gather, commit and reset on checked arguments.

    columns   c_0 … c_{S-1} = the slot's state, c_{S+t} = x_t rounded to the state's dtype
    y_t       = silu(bias + sum over k of weight[k] * c_{S+t-(K-1)+k}),  k = 0 … K-1 in this order, in float32
    window_n  = c_n … c_{n+S-1},  the state after n tokens

Everything here thinks in (column, channel); `time_first` turns a channel_major tensor into that view. Columns travel
as integers, so that a NaN payload or a negative zero arrives as it left.

The arguments come from `ops`, checked: tensors with a leading layer axis, int32 index tensors, `layer` a 0-d int32
tensor or None for layer 0. Masks become index lists through `nonzero`, which waits for the device; the Triton kernels
do not.
"""

import torch

from torch_ref.layout import ConvCacheSpec

INTEGER_OF_BYTES = {2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    return tensor.view(INTEGER_OF_BYTES[tensor.element_size()])


def time_first(tensor: torch.Tensor, spec: ConvCacheSpec) -> torch.Tensor:
    """The same memory with its last two axes as (column, channel)."""
    return tensor if spec.is_time_major else tensor.transpose(-1, -2)


def live_requests(
    spec: ConvCacheSpec,
    *,
    slots: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    null_slot: int | None = None,
    layer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which requests are not skipped, bool `[B]`: every index that was given lies in its range, as it is."""
    checks = []
    if slots is not None:
        checks.append((slots >= 0) & (slots < spec.num_slots))
        if null_slot is not None and 0 <= null_slot < spec.num_slots:  # a larger one would wrap in the comparison
            checks.append(slots != null_slot)
    if rows is not None:
        checks.append((rows >= 0) & (rows < spec.max_requests))
    if accepted is not None:
        checks.append((accepted >= 1) & (accepted <= spec.num_draft_tokens))
    if valid is not None:
        checks.append((valid >= 1) & (valid <= spec.num_draft_tokens))
        if accepted is not None:
            checks.append(accepted <= valid)
    live = torch.stack(checks).all(0)
    return live if layer is None else live & (layer >= 0) & (layer < spec.num_layers)


def _positions(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)


def _rows_of(rows: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    return _positions(len(slots), slots).int() if rows is None else rows


def _layer_index(layer: torch.Tensor | None, spec: ConvCacheSpec) -> torch.Tensor | int:
    # an index outside the stack is moved inside only so that the read is legal; nothing of it is ever kept
    return 0 if layer is None else layer.clamp(0, spec.num_layers - 1).long()


def _columns(
    x: torch.Tensor,
    state: torch.Tensor,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | int,
    slots: torch.Tensor,
    fresh: torch.Tensor,
) -> torch.Tensor:
    """Bits of c_0 … c_{S+T-1}, `[B, S+T, conv_dim]`; the state of `fresh` requests (bool `[B]`) is zero."""
    held = bits(time_first(state, spec))[layer, slots.masked_fill(fresh, 0).long()]
    return torch.cat([held.masked_fill(fresh[:, None, None], 0), bits(x.to(state.dtype))], dim=1)


def _convolve(
    columns: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spec: ConvCacheSpec,
    silu: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """y before it is rounded and masked, `[B, T, conv_dim]` in `dtype`; columns are `[B, S+T, conv_dim]`."""
    num_tokens = columns.shape[1] - spec.state_columns
    total = columns.new_zeros((columns.shape[0], num_tokens, columns.shape[2]), dtype=dtype)
    if bias is not None:
        total = total + bias.to(dtype)
    oldest = spec.state_columns + 1 - spec.width  # input of token 0 that meets tap 0
    for tap in range(spec.width):
        total = total + columns[:, oldest + tap : oldest + tap + num_tokens].to(dtype) * weight[:, tap].to(dtype)
    if not silu:
        return total
    # torch's float32 sigmoid differs in the last bit between its vector loop and its scalar tail, so that one token
    # would depend on how many others are in the tensor; from float64 it is the correctly rounded value in both
    return total * torch.sigmoid(total.double()).to(dtype)


def _masked_y(y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """y with exact zeros from token `count[b]` on."""
    return y.masked_fill((_positions(y.shape[1], y) >= count[:, None])[:, :, None], 0)


def verify(
    x: torch.Tensor,
    state: torch.Tensor,
    windows: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | None,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
    valid: torch.Tensor | None,
    null_slot: int | None,
    silu: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Writes each request's columns to its row (unless `windows` is None) and returns y.

    y has x's dtype, or stays in float64 when `dtype`, in which products and sums are taken, is float64.
    """
    if windows is not None:
        rows = _rows_of(rows, slots)
    live = live_requests(spec, slots=slots, rows=rows, valid=valid, null_slot=null_slot, layer=layer)
    count = torch.full_like(slots, spec.num_draft_tokens) if valid is None else valid
    count = count.masked_fill(~live, 0)
    at = _layer_index(layer, spec)
    columns = _columns(x, state, spec=spec, layer=at, slots=slots, fresh=~live)
    y = _convolve(columns.view(state.dtype), weight, bias, spec=spec, silu=silu, dtype=dtype)
    if windows is not None:
        target = bits(time_first(windows, spec))
        if spec.storage == "sliding":
            pieces, held = columns[:, 1:], spec.first_token_column
        else:
            pieces, held = columns.unfold(1, spec.state_columns, 1)[:, 1:].transpose(-1, -2), 0
        # piece p is a column (sliding) or a whole window (dense); the first `held` ones need no token
        written = live[:, None] & (_positions(pieces.shape[1], slots) < held + count[:, None])
        request, piece = written.nonzero(as_tuple=True)
        target[at, _rows_of(rows, slots)[request].long(), piece] = pieces[request, piece]
    return _masked_y(y if dtype == torch.float64 else y.to(x.dtype), count)


def update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | None,
    slots: torch.Tensor,
    null_slot: int | None,
    silu: bool,
) -> torch.Tensor:
    """One token, x `[B, conv_dim]`: shifts it into its slot and returns y `[B, conv_dim]`."""
    y = prefill(
        x[:, None],
        state,
        weight,
        bias,
        spec=spec,
        layer=layer,
        slots=slots,
        lengths=torch.ones_like(slots),
        continues=torch.ones_like(slots, dtype=torch.bool),
        null_slot=null_slot,
        silu=silu,
    )
    return y[:, 0]


def prefill(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    continues: torch.Tensor,
    null_slot: int | None,
    silu: bool,
) -> torch.Tensor:
    """T tokens of which `lengths[b]` count; `continues` (bool `[B]`) starts from the slot instead of zeros."""
    live = live_requests(spec, slots=slots, null_slot=null_slot, layer=layer)
    live = live & (lengths >= 1) & (lengths <= x.shape[1])
    count = lengths.masked_fill(~live, 0)
    at = _layer_index(layer, spec)
    columns = _columns(x, state, spec=spec, layer=at, slots=slots, fresh=~(live & continues))
    y = _convolve(columns.view(state.dtype), weight, bias, spec=spec, silu=silu, dtype=torch.float32)
    last = count[:, None] + _positions(spec.state_columns, slots)  # inputs n … n+S-1 are the state after n tokens
    request = live.nonzero().squeeze(1)
    target = bits(time_first(state, spec))
    target[at, slots[request].long()] = columns[request[:, None], last[request].long()]
    return _masked_y(y.to(x.dtype), count)


def _windows_at(windows: torch.Tensor, spec: ConvCacheSpec, rows: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Bits of the accepted windows of live requests, `[L, requests, S, conv_dim]`, in new memory."""
    source, row, token = bits(time_first(windows, spec)), rows.long(), accepted.long() - 1
    if spec.storage == "dense":
        return source[:, row, token]
    return source[:, row[:, None], token[:, None] + _positions(spec.state_columns, rows)]


def gather(
    windows: torch.Tensor, *, spec: ConvCacheSpec, accepted: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """Every request's accepted window in the spec's axis order, `[L, B, …]`; zeros for skipped requests."""
    rows = _rows_of(rows, accepted)
    request = live_requests(spec, rows=rows, accepted=accepted).nonzero().squeeze(1)
    taken = bits(windows).new_zeros((windows.shape[0], len(rows), spec.state_columns, spec.conv_dim))
    taken[:, request] = _windows_at(windows, spec, rows[request], accepted[request])
    return time_first(taken, spec).contiguous().view(windows.dtype)


def commit(
    state: torch.Tensor,
    windows: torch.Tensor,
    *,
    spec: ConvCacheSpec,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    rows: torch.Tensor | None,
    valid: torch.Tensor | None,
    null_slot: int | None,
    track_slots: torch.Tensor | None,
    track_accepted: torch.Tensor | None,
) -> None:
    """Reads the accepted and the tracked windows, then writes them to their slots."""
    rows = _rows_of(rows, slots)
    taken = []
    for slot, count in ((slots, accepted), (track_slots, track_accepted)):
        if slot is None or count is None:
            continue
        live = live_requests(spec, slots=slot, rows=rows, accepted=count, valid=valid, null_slot=null_slot)
        request = live.nonzero().squeeze(1)
        taken.append((slot[request].long(), _windows_at(windows, spec, rows[request], count[request])))
    target = bits(time_first(state, spec))
    for slot, window in taken:
        target[:, slot] = window


def reset(state: torch.Tensor, *, spec: ConvCacheSpec, slots: torch.Tensor, null_slot: int | None) -> None:
    """Zeroes the slots."""
    live = live_requests(spec, slots=slots, null_slot=null_slot)
    bits(state)[:, slots[live].long()] = 0
