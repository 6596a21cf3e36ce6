"""The definition, in eager torch: verify, update, prefill, gather, commit and reset on checked arguments.

    columns   c_0 … c_{S-1} = the slot's state, c_{S+t} = x_t rounded to the state's dtype
    y_t       = silu(bias + sum over k of weight[k] * c_{S+t-(K-1)+k}),  k = 0 … K-1 in this order, in float32
    window_n  = c_n … c_{n+S-1},  the state after n tokens

In a tree of drafts a node's path from the root takes the place of x_0 … x_t, in y and in windows alike. In a step that
resumes, a window of the step before takes the place of the slot's state.

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


def _of(table: torch.Tensor | None, request: torch.Tensor) -> torch.Tensor | None:
    return None if table is None else table[request]


def _layer_index(layer: torch.Tensor | None, spec: ConvCacheSpec) -> torch.Tensor | int:
    # an index outside the stack is moved inside only so that the read is legal; nothing of it is ever kept
    return 0 if layer is None else layer.clamp(0, spec.num_layers - 1).long()


def links_hold(parents: torch.Tensor, count: torch.Tensor, spec: ConvCacheSpec) -> torch.Tensor:
    """Whether the links of the first `count[b]` tokens point backwards (sliding: to the token before), bool `[B]`."""
    token = _positions(spec.num_draft_tokens, parents)
    good = parents == token - 1 if spec.storage == "sliding" else (parents >= -1) & (parents < token)
    return (good | (token >= count[:, None])).all(1)


def path_holds(
    path: torch.Tensor | None, counts: torch.Tensor, bound: torch.Tensor | int, spec: ConvCacheSpec
) -> torch.Tensor:
    """Whether the entries that the state after `counts[b]` tokens of a path asks for are right, bool `[B]`.

    That state needs the last S tokens of it in inputs storage; a stored window needs the last one. They are nodes below
    `bound`; in sliding storage, where a column has room for one node, node i is entry i. A chain (None) is right.
    """
    if path is None:
        return torch.ones_like(counts, dtype=torch.bool)
    entries = spec.state_columns if spec.storage == "inputs" else 1
    place = counts[:, None].long() - 1 - _positions(entries, counts)
    node = path.gather(1, place.clamp(0, spec.num_draft_tokens - 1))
    limit = bound[:, None] if isinstance(bound, torch.Tensor) else bound
    good = node == place if spec.storage == "sliding" else (node >= 0) & (node < limit)
    return (good | (place < 0)).all(1)


def _window_after(
    held: torch.Tensor, inputs: torch.Tensor, counts: torch.Tensor, path: torch.Tensor | None, spec: ConvCacheSpec
) -> torch.Tensor:
    """The last S of [held, the first `counts[b]` inputs of the path], bits `[…, B, S, conv_dim]`, of sound requests.

    Args:
      held, inputs: bits `[…, B, S, conv_dim]` and `[…, B, D, conv_dim]`.
    """
    column = counts[:, None].long() + _positions(spec.state_columns, counts)
    if path is not None:
        place = column - spec.state_columns
        node = path.gather(1, place.clamp(min=0)).long()
        column = torch.where(place < 0, column, spec.state_columns + node)
    request = _positions(len(counts), counts)[:, None]
    return torch.cat([held, inputs], dim=-2)[..., request, column, :]


def _lineages(parents: torch.Tensor, spec: ConvCacheSpec) -> torch.Tensor:
    """Which columns a token's S+1 newest are, its own one last: int `[B, D, S+1]`, into S of state and D of x."""
    first = spec.state_columns
    column = (first + _positions(parents.shape[1], parents)).expand(parents.shape)
    line = [column]
    for _ in range(first):
        above = first + parents.gather(1, (column - first).clamp(min=0))  # -1 leads to the newest column of the state
        column = torch.where(column < first, column - 1, above)
        line.append(column)
    return torch.stack(line[::-1], dim=-1)


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
    lineages: torch.Tensor | None = None,
) -> torch.Tensor:
    """y before it is rounded and masked, `[B, T, conv_dim]` in `dtype`; columns are `[B, S+T, conv_dim]`."""
    num_tokens = columns.shape[1] - spec.state_columns
    request = _positions(len(columns), columns)[:, None]
    total = columns.new_zeros((columns.shape[0], num_tokens, columns.shape[2]), dtype=dtype)
    if bias is not None:
        total = total + bias.to(dtype)
    oldest = spec.state_columns + 1 - spec.width  # input of token 0 that meets tap 0
    for tap in range(oldest, oldest + spec.width):
        met = columns[:, tap : tap + num_tokens] if lineages is None else columns[request, lineages[..., tap]]
        total = total + met.to(dtype) * weight[:, tap - oldest].to(dtype)
    if not silu:
        return total
    # torch's float32 sigmoid differs in the last bit between its vector loop and its scalar tail, so that one token
    # would depend on how many others are in the tensor; from float64 it is the correctly rounded value in both
    return total * torch.sigmoid(total.double()).to(dtype)


def _masked_y(y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """y with exact zeros from token `count[b]` on."""
    return y.masked_fill((_positions(y.shape[1], y) >= count[:, None])[:, :, None], 0)


def _history(
    state: torch.Tensor,
    windows: torch.Tensor,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | int,
    slots: torch.Tensor,
    rows: torch.Tensor,
    resume: torch.Tensor,
    path: torch.Tensor | None,
) -> torch.Tensor:
    """Bits of the state after `resume[b]` tokens of the step in `windows`, `[B, S, conv_dim]`, of live requests."""
    held = bits(time_first(state, spec))[layer, slots]
    if spec.storage == "inputs":
        return _windows_at(windows, spec, rows, resume, path, held=held, layer=layer)
    ahead = (resume > 0).nonzero().squeeze(1)
    held[ahead] = _windows_at(windows, spec, rows[ahead], resume[ahead], _of(path, ahead), layer=layer)
    return held


def verify(
    x: torch.Tensor | None,
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
    parents: torch.Tensor | None = None,
    resume: torch.Tensor | None = None,
    resume_path: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes each request's columns to its row (unless `windows` is None, or has x already) and returns y.

    With `resume` the state is the one after that many tokens of the step in `previous` (None: in `windows`), and inputs
    storage writes it to the slot. y has x's dtype (without x the state's), or stays in float64 when `dtype`, in which
    products and sums are taken, is float64.
    """
    if windows is not None:
        rows = _rows_of(rows, slots)
    live = live_requests(spec, slots=slots, rows=rows, valid=valid, null_slot=null_slot, layer=layer)
    count = torch.full_like(slots, spec.num_draft_tokens) if valid is None else valid
    if parents is not None:
        live = live & links_hold(parents, count, spec)
    if resume is not None:
        live = live & (resume >= 0) & (resume <= spec.num_draft_tokens)
        live = live & path_holds(resume_path, resume, spec.num_draft_tokens, spec)
    count = count.masked_fill(~live, 0)
    request, at, first = live.nonzero().squeeze(1), _layer_index(layer, spec), spec.state_columns
    slot, row = slots[request].long(), _rows_of(rows, slots)[request].long()
    columns = bits(state).new_zeros((len(slots), first + spec.num_draft_tokens, spec.conv_dim))  # those of the skipped
    if resume is None or windows is None:
        columns[request, :first] = bits(time_first(state, spec))[at, slot]
    else:
        columns[request, :first] = _history(
            state, windows if previous is None else previous, spec=spec, layer=at, slots=slot, rows=row,
            resume=resume[request], path=_of(resume_path, request),
        )  # fmt: skip
    if x is not None:
        columns[request, first:] = bits(x.to(state.dtype))[request]
    elif windows is not None:
        columns[request, first:] = bits(time_first(windows, spec))[at, row]
    lineages = None
    if parents is not None:
        beyond = _positions(spec.num_draft_tokens, slots) >= count[:, None]
        lineages = _lineages(parents.masked_fill(beyond, -1), spec)
    y = _convolve(columns.view(state.dtype), weight, bias, spec=spec, silu=silu, dtype=dtype, lineages=lineages)
    if windows is not None and x is not None:
        _write_rows(windows, columns, lineages, spec=spec, layer=at, rows=_rows_of(rows, slots), count=count)
    if spec.storage == "inputs" and resume is not None:
        ahead = resume[request] > 0
        bits(time_first(state, spec))[at, slot[ahead]] = columns[request[ahead], :first]
    return _masked_y(y if dtype == torch.float64 else y.to(state.dtype if x is None else x.dtype), count)


def _write_rows(
    windows: torch.Tensor,
    columns: torch.Tensor,
    lineages: torch.Tensor | None,
    *,
    spec: ConvCacheSpec,
    layer: torch.Tensor | int,
    rows: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Writes to each row what the first `count[b]` tokens leave in it; 0 tokens nothing."""
    target, held = bits(time_first(windows, spec)), 0
    if spec.storage == "sliding":
        pieces, held = columns[:, 1:], spec.first_token_column
    elif spec.storage == "inputs":
        pieces = columns[:, spec.state_columns :]
    elif lineages is None:
        pieces = columns.unfold(1, spec.state_columns, 1)[:, 1:].transpose(-1, -2)
    else:
        pieces = columns[_positions(len(columns), columns)[:, None, None], lineages[..., 1:]]
    # piece p is a column, or in dense storage a whole window; the first `held` ones need no token
    written = (count[:, None] > 0) & (_positions(pieces.shape[1], rows) < held + count[:, None])
    request, piece = written.nonzero(as_tuple=True)
    target[layer, rows[request].long(), piece] = pieces[request, piece]


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


def _windows_at(
    windows: torch.Tensor,
    spec: ConvCacheSpec,
    rows: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor | None,
    *,
    held: torch.Tensor | None = None,
    layer: torch.Tensor | int | slice = slice(None),
) -> torch.Tensor:
    """Bits of the states after `counts[b]` tokens, `[L, requests, S, conv_dim]` in new memory, of live requests.

    Without L for one `layer`. Inputs storage needs the states before the step, `held`, in the same form.
    """
    source, row, token = bits(time_first(windows, spec)), rows.long(), counts.long() - 1
    if held is not None:
        return _window_after(held, source[layer, row], counts, path, spec)
    if spec.storage == "dense":
        token = token if path is None else path.gather(1, token[:, None])[:, 0].long()
        return source[layer, row, token]
    return source[layer, row[:, None], token[:, None] + _positions(spec.state_columns, rows)]


def gather(
    windows: torch.Tensor,
    *,
    spec: ConvCacheSpec,
    accepted: torch.Tensor,
    rows: torch.Tensor | None,
    path: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    null_slot: int | None = None,
) -> torch.Tensor:
    """Every request's accepted window in the spec's axis order, `[L, B, …]`; zeros for skipped requests.

    Inputs storage has `state` and `slots`.
    """
    rows = _rows_of(rows, accepted)
    live = live_requests(spec, slots=slots, rows=rows, accepted=accepted, null_slot=null_slot)
    request = (live & path_holds(path, accepted, spec.num_draft_tokens, spec)).nonzero().squeeze(1)
    held = None
    if state is not None and slots is not None:
        held = bits(time_first(state, spec))[:, slots[request].long()]
    taken = bits(windows).new_zeros((windows.shape[0], len(rows), spec.state_columns, spec.conv_dim))
    taken[:, request] = _windows_at(
        windows, spec, rows[request], accepted[request], _of(path, request), held=held
    )  # fmt: skip
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
    path: torch.Tensor | None = None,
) -> None:
    """Reads the accepted and the tracked windows, then writes them to their slots.

    In inputs storage both are made from the state in `slots`, which a tracked destination therefore needs, too.
    """
    rows = _rows_of(rows, slots)
    target, taken = bits(time_first(state, spec)), []
    for slot, count in ((slots, accepted), (track_slots, track_accepted)):
        if slot is None or count is None:
            continue
        live = live_requests(spec, slots=slot, rows=rows, accepted=count, valid=valid, null_slot=null_slot)
        live = live & path_holds(path, count, spec.num_draft_tokens if valid is None else valid, spec)
        if spec.storage == "inputs":
            live = live & live_requests(spec, slots=slots, null_slot=null_slot)
        request = live.nonzero().squeeze(1)
        held = target[:, slots[request].long()] if spec.storage == "inputs" else None
        window = _windows_at(windows, spec, rows[request], count[request], _of(path, request), held=held)
        taken.append((slot[request].long(), window))
    for slot, window in taken:
        target[:, slot] = window


def reset(state: torch.Tensor, *, spec: ConvCacheSpec, slots: torch.Tensor, null_slot: int | None) -> None:
    """Zeroes the slots."""
    live = live_requests(spec, slots=slots, null_slot=null_slot)
    bits(state)[:, slots[live].long()] = 0
