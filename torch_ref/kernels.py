"""The same steps in Triton: one launch commits all layers, one launch verifies (or updates) one layer.

    columns   c_0 … c_{S-1} = the slot's state, c_{S+t} = x_t rounded to the state's dtype
    y_t       = silu(bias + sum over k of weight[k] * c_{S+t-(K-1)+k}),  k = 0 … K-1 in this order, in float32
    window_n  = c_n … c_{n+S-1},  the state after n tokens

`commit` reads the buffer and writes the pool; `verify` reads the pool and writes the buffer and y; `update` reads and
writes the pool. All memory is read and written as integers and becomes a float only between registers, so copies keep
every bit. Numbers: the products and sums are separate float32 operations (no fused multiply-add), which makes the
result the same for every D, and the same as `reference` up to the hardware's exponential in SiLU.

Names follow flash-linear-attention: p_ pointer, i_ program or scalar index, o_ offsets, m_ mask, b_ block.
One launch axis: its limit is 2^31-1 programs, while the other axes end at 65,535.
The arguments come from `ops`, checked: entries (the last two axes) contiguous, all other strides free.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# (Triton types static_range and launch options for its own compiler, not for pyright.)

import contextlib
import dataclasses

import torch
import triton
import triton.language as tl

from torch_ref.layout import LARGEST, ConvCacheSpec, mismatch, raise_mismatches
from torch_ref.reference import bits

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
NUM_WARPS = 4
NUM_THREADS = 32 * NUM_WARPS
VECTOR_BYTES = 16  # the widest access of one thread
RESIDENT_PROGRAMS = 2112  # 132 multiprocessors of an H200, each with 16 programs of 4 warps


@triton.jit
def _widen(b_bits, DTYPE: tl.constexpr):
    """Bit patterns of DTYPE as float32 values, exactly."""
    if tl.bfloat16 == DTYPE:
        # a bfloat16 is the upper half of a float32; the interpreter's own conversion loses subnormals
        return (b_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return b_bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _narrow(b_x, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """float32 values rounded to the nearest DTYPE, ties to even, as bit patterns."""
    if tl.float32 == DTYPE:
        return b_x.to(tl.int32, bitcast=True)
    elif tl.float16 == DTYPE:
        return b_x.to(tl.float16).to(tl.int16, bitcast=True)
    elif BY_HAND:
        # the interpreter truncates to bfloat16; the device rounds
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        return tl.where(b_x == b_x, b_bits, 0x7FC0).to(tl.int16)
    else:
        return b_x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def _copy_window(
    # inputs
    p_windows,
    # outputs
    p_state,
    # inputs: one int32 for each request
    p_slots, p_rows, p_accepted, p_valid,
    # place of the program
    i_b, i_l, i_n,
    # sizes, and strides in elements
    num_slots, num_rows, null_slot, length, stride_window_layer, stride_window_row, stride_window_token,
    stride_state_layer, stride_state_slot,
    # constants
    HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr, NUM_TOKENS: tl.constexpr,
    RUN: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block i_n of one window: element o of a slot is element (o // RUN) * PITCH + o % RUN of the row.

    A window that is contiguous in the row has RUN = PITCH. A sliding channel_major row interleaves: RUN = S columns of
    the PITCH = D+S-1 of each channel.
    """
    i_slot = tl.load(p_slots + i_b)
    num_accepted = tl.load(p_accepted + i_b)
    i_row = i_b
    if HAS_ROWS:
        i_row = tl.load(p_rows + i_b)
    num_valid = NUM_TOKENS
    if HAS_VALID:
        num_valid = tl.load(p_valid + i_b)
    m_live = (i_slot >= 0) & (i_slot < num_slots) & (i_row >= 0) & (i_row < num_rows)
    m_live = m_live & (num_accepted >= 1) & (num_accepted <= num_valid) & (num_valid <= NUM_TOKENS)
    if HAS_NULL:
        m_live = m_live & (i_slot != null_slot)
    if m_live:
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        p_from = p_windows + i_l.to(tl.int64) * stride_window_layer + i_row.to(tl.int64) * stride_window_row
        p_from += (num_accepted - 1).to(tl.int64) * stride_window_token
        p_to = p_state + i_l.to(tl.int64) * stride_state_layer + i_slot.to(tl.int64) * stride_state_slot
        if RUN == PITCH:
            b_window = tl.load(p_from + o_n, mask=m_n)
        else:
            b_window = tl.load(p_from + (o_n // RUN) * PITCH + o_n % RUN, mask=m_n)
        tl.store(p_to + o_n, b_window, mask=m_n)


@triton.jit
def commit_kernel(
    # inputs
    p_windows,
    # outputs
    p_state,
    # inputs: one int32 for each request
    p_slots, p_rows, p_accepted, p_valid, p_track_slots, p_track_accepted,
    # sizes, and strides in elements
    num_layers, num_blocks, num_slots, num_rows, null_slot, length, stride_window_layer, stride_window_row,
    stride_window_token, stride_state_layer, stride_state_slot,
    # constants
    HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr, HAS_TRACK: tl.constexpr,
    NUM_TOKENS: tl.constexpr, RUN: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program copies one block of one window, and the same block of the tracked window."""
    i_p = tl.program_id(0)
    i_n = i_p % num_blocks
    i_l = (i_p // num_blocks) % num_layers
    i_b = i_p // num_blocks // num_layers
    for i_set in tl.static_range(1 + HAS_TRACK):
        _copy_window(
            p_windows, p_state,
            p_track_slots if i_set else p_slots, p_rows, p_track_accepted if i_set else p_accepted, p_valid,
            i_b, i_l, i_n,
            num_slots, num_rows, null_slot, length,
            stride_window_layer, stride_window_row, stride_window_token, stride_state_layer, stride_state_slot,
            HAS_ROWS, HAS_VALID, HAS_NULL, NUM_TOKENS, RUN, PITCH, BLOCK,
        )  # fmt: skip


@triton.jit
def _load_taps(
    p_weight,
    o_d,
    m_d,
    STRIDE_CHANNEL: tl.constexpr,
    STRIDE_TAP: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """The K taps as float32 blocks, oldest first: one tile in the order of memory, then picked as integers (exact)."""
    o_k = tl.arange(0, BLOCK_TAPS)
    p_taps = p_weight + o_d.to(tl.int64)[:, None] * STRIDE_CHANNEL + o_k[None, :] * STRIDE_TAP
    b_weight = tl.load(p_taps, mask=m_d[:, None] & (o_k < WIDTH)[None, :], other=0).to(tl.int32)
    b_taps = ()
    for i_k in tl.static_range(WIDTH):
        b_tap = tl.sum(tl.where(o_k[None, :] == i_k, b_weight, 0), axis=1)
        b_taps += (_widen(b_tap.to(p_weight.dtype.element_ty), DTYPE),)
    return b_taps


@triton.jit
def _load_columns(
    p_slot,
    p_request,
    o_d,
    num_channels,
    num_valid,
    conv_dim,
    stride_x_token,
    stride_x_channel,
    TIME_MAJOR: tl.constexpr,
    X_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    STATE_COLUMNS: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """c_0 … c_{S+D-1} as bit patterns; zeros where the request is skipped and from token `num_valid` on.

    A scalar condition on a block is written as a bound on o_d: cheaper than a mask of masks, and the form that the
    interpreter of some Triton versions accepts.
    """
    b_columns = ()
    for i_s in tl.static_range(STATE_COLUMNS):
        o_c = i_s * conv_dim + o_d if TIME_MAJOR else o_d * STATE_COLUMNS + i_s
        b_columns += (tl.load(p_slot + o_c, mask=o_d < num_channels, other=0),)
    for i_t in tl.static_range(NUM_TOKENS):
        p_token = p_request + tl.cast(i_t, tl.int64) * stride_x_token + o_d.to(tl.int64) * stride_x_channel
        b_x = tl.load(p_token, mask=o_d < tl.where(i_t < num_valid, conv_dim, 0), other=0)
        if X_DTYPE != STATE_DTYPE:
            b_x = _narrow(_widen(b_x, X_DTYPE), STATE_DTYPE, BY_HAND)
        b_columns += (b_x,)
    return b_columns


@triton.jit
def _store_pieces(
    p_row,
    b_columns,
    o_d,
    num_channels,
    num_valid,
    conv_dim,
    stride_window_token,
    HAS_VALID: tl.constexpr,
    SLIDING: tl.constexpr,
    TIME_MAJOR: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECE_COLUMNS: tl.constexpr,
    STATE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PIECE: tl.constexpr,
):
    """Writes the row: one piece of D+S-1 columns (sliding) or D pieces that are whole windows (dense).

    Of a sliding piece the first S-1+v columns are written, of dense pieces the first v. channel_major gathers a piece
    in a tile first, so that the store runs along memory.
    """
    for i_w in tl.static_range(NUM_PIECES):
        p_piece = p_row + tl.cast(i_w, tl.int64) * stride_window_token
        if not SLIDING:
            num_channels = tl.where(i_w < num_valid, conv_dim, 0)
        if TIME_MAJOR:
            for i_c in tl.static_range(PIECE_COLUMNS):
                num_written = num_channels
                if SLIDING and HAS_VALID:
                    num_written = tl.where(i_c < STATE_COLUMNS - 1 + num_valid, num_channels, 0)
                tl.store(p_piece + i_c * conv_dim + o_d, b_columns[i_w + 1 + i_c], mask=o_d < num_written)
        else:
            o_c = tl.arange(0, BLOCK_PIECE)
            b_piece = tl.zeros((BLOCK, BLOCK_PIECE), p_row.dtype.element_ty)
            for i_c in tl.static_range(PIECE_COLUMNS):
                b_piece = tl.where(o_c[None, :] == i_c, b_columns[i_w + 1 + i_c][:, None], b_piece)
            m_c = (o_d < num_channels)[:, None] & (o_c < PIECE_COLUMNS)[None, :]
            if SLIDING and HAS_VALID:
                m_c = m_c & (o_c < STATE_COLUMNS - 1 + num_valid)[None, :]
            tl.store(p_piece + o_d[:, None] * PIECE_COLUMNS + o_c[None, :], b_piece, mask=m_c)


@triton.jit
def verify_kernel(
    # inputs
    p_x, p_state, p_weight, p_bias, p_layer, p_slots, p_rows, p_valid,
    # outputs
    p_windows, p_y,
    # sizes, and strides in elements
    num_layers, num_blocks, num_slots, num_rows, null_slot, conv_dim, stride_x_request, stride_x_token,
    stride_x_channel, stride_state_layer, stride_state_slot, stride_window_layer, stride_window_row,
    stride_window_token,
    # constants
    STRIDE_WEIGHT_CHANNEL: tl.constexpr, STRIDE_WEIGHT_TAP: tl.constexpr, STRIDE_BIAS: tl.constexpr,
    HAS_LAYER: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, IN_PLACE: tl.constexpr, SLIDING: tl.constexpr,
    TIME_MAJOR: tl.constexpr, X_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_PIECES: tl.constexpr, PIECE_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, STATE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAPS: tl.constexpr,
    BLOCK_PIECE: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """One program takes one block of channels of one request through all its tokens.

    A skipped request runs through with every access but y's masked off: 0 valid tokens, no state, nothing to write.
    """
    i_p = tl.program_id(0)
    i_b = i_p // num_blocks
    o_d = (i_p % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < conv_dim
    b_taps = _load_taps(p_weight, o_d, m_d, STRIDE_WEIGHT_CHANNEL, STRIDE_WEIGHT_TAP, WEIGHT_DTYPE, WIDTH, BLOCK_TAPS)
    b_bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        b_bias = _widen(tl.load(p_bias + o_d.to(tl.int64) * STRIDE_BIAS, mask=m_d, other=0), BIAS_DTYPE)

    i_slot = tl.load(p_slots + i_b)
    i_row = tl.load(p_rows + i_b) if HAS_ROWS else i_b
    i_l = tl.load(p_layer).to(tl.int64) if HAS_LAYER else tl.cast(0, tl.int64)
    m_live = (i_slot >= 0) & (i_slot < num_slots) & (i_row >= 0) & (i_row < num_rows) & (i_l >= 0) & (i_l < num_layers)
    if HAS_NULL:
        m_live = m_live & (i_slot != null_slot)
    num_valid = NUM_TOKENS
    if HAS_VALID:
        num_valid = tl.load(p_valid + i_b)
        m_live = m_live & (num_valid >= 1) & (num_valid <= NUM_TOKENS)
    num_valid = tl.where(m_live, num_valid, 0)
    num_channels = tl.where(m_live, conv_dim, 0)

    p_slot = p_state + i_l * stride_state_layer + i_slot.to(tl.int64) * stride_state_slot
    p_request = p_x + i_b.to(tl.int64) * stride_x_request
    b_columns = _load_columns(
        p_slot, p_request, o_d, num_channels, num_valid, conv_dim, stride_x_token, stride_x_channel,
        TIME_MAJOR, X_DTYPE, STATE_DTYPE, NUM_TOKENS, STATE_COLUMNS, BY_HAND,
    )  # fmt: skip
    if IN_PLACE:
        tl.debug_barrier()  # the slot is read by all threads before any of them writes it
    p_row = p_windows + i_l * stride_window_layer + i_row.to(tl.int64) * stride_window_row
    _store_pieces(
        p_row, b_columns, o_d, num_channels, num_valid, conv_dim, stride_window_token,
        HAS_VALID, SLIDING, TIME_MAJOR, NUM_PIECES, PIECE_COLUMNS, STATE_COLUMNS, BLOCK, BLOCK_PIECE,
    )  # fmt: skip

    for i_t in tl.static_range(NUM_TOKENS):
        b_y = b_bias
        for i_k in tl.static_range(WIDTH):
            b_y += _widen(b_columns[STATE_COLUMNS + 1 - WIDTH + i_t + i_k], STATE_DTYPE) * b_taps[i_k]
        if SILU:
            b_y = b_y * (1.0 / (1.0 + tl.exp(-b_y)))
        b_y = tl.where(i_t < num_valid, b_y, 0.0)
        p_out = p_y + (i_b.to(tl.int64) * NUM_TOKENS + i_t) * conv_dim + o_d
        tl.store(p_out, _narrow(b_y, X_DTYPE, BY_HAND), mask=m_d)


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set when this module was imported; Triton decides it there, once."""
    return not isinstance(commit_kernel, triton.JITFunction)


def _launching(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    if is_interpreted():
        import numpy

        return numpy.errstate(all="ignore")  # the interpreter computes in NumPy, which warns where a device does not
    return torch.cuda.device(tensor.device)  # Triton launches on the current device, whatever the tensors say


def _check_size(spec: ConvCacheSpec, num_programs: int) -> None:
    # offsets inside one entry are 32 bits, offsets of layers, slots, rows and requests 64
    wrong = []
    columns = spec.num_columns if spec.storage == "sliding" else spec.state_columns
    entry = spec.conv_dim * max(columns, spec.width)
    if entry > LARGEST:
        wrong.append(mismatch("implementation", "'eager' for a row of 2^31 elements or more", f"'triton' for {entry}"))
    if num_programs > LARGEST:
        wrong.append(mismatch("implementation", "'eager' for 2^31 blocks or more", f"'triton' for {num_programs}"))
    raise_mismatches(wrong)


def _token_stride(windows: torch.Tensor, spec: ConvCacheSpec) -> int:
    """Elements from one accepted count's window to the next one's."""
    return windows.stride(2) if spec.storage == "dense" else spec.conv_dim if spec.is_time_major else 1


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
    """One launch over requests, layers and blocks; see `reference.commit`.

    Moves: 2 * S * conv_dim elements for each live request and layer.
    """
    num_layers = state.shape[0]
    length = spec.state_columns * spec.conv_dim
    block = min(NUM_THREADS * VECTOR_BYTES // spec.item_bytes, triton.next_power_of_2(length))
    if len(slots) * num_layers * triton.cdiv(length, block) > 4 * RESIDENT_PROGRAMS:
        block = min(4 * block, triton.next_power_of_2(length))  # four vectors a thread in flight, fewer programs
    num_blocks = triton.cdiv(length, block)
    num_programs = len(slots) * num_layers * num_blocks
    if num_programs == 0:
        return
    _check_size(spec, num_programs)
    interleaved = spec.storage == "sliding" and not spec.is_time_major
    with _launching(state):
        commit_kernel[(num_programs,)](
            bits(windows),
            bits(state),
            slots,
            rows,
            accepted,
            valid,
            track_slots,
            track_accepted,
            num_layers,
            num_blocks,
            spec.num_slots,
            windows.shape[1],
            null_slot if _can_match(null_slot, spec) else 0,
            length,
            windows.stride(0),
            windows.stride(1),
            _token_stride(windows, spec),
            state.stride(0),
            state.stride(1),
            HAS_ROWS=rows is not None,
            HAS_VALID=valid is not None,
            HAS_NULL=_can_match(null_slot, spec),
            HAS_TRACK=track_slots is not None,
            NUM_TOKENS=spec.num_draft_tokens,
            RUN=spec.state_columns if interleaved else 1,
            PITCH=spec.num_columns if interleaved else 1,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _can_match(null_slot: int | None, spec: ConvCacheSpec) -> bool:
    # a null slot outside the pool is skipped anyway, and need not fit a kernel argument
    return null_slot is not None and 0 <= null_slot < spec.num_slots


def _channel_block(spec: ConvCacheSpec, num_requests: int) -> int:
    """Channels of one program: a 16-byte vector a thread where that fills the device, else a 4-byte one."""
    largest = NUM_THREADS * VECTOR_BYTES // spec.item_bytes
    if not spec.is_time_major:
        # the tile of one piece has this many elements for each channel; 16 a thread keep it in registers
        piece = spec.num_columns if spec.storage == "sliding" else spec.state_columns
        largest = max(32, 16 * NUM_THREADS // triton.next_power_of_2(piece))
    block = min(largest, 256)
    if num_requests * triton.cdiv(spec.conv_dim, largest) >= 256:
        block = largest
    return min(block, triton.next_power_of_2(spec.conv_dim))


def verify(
    x: torch.Tensor,
    state: torch.Tensor,
    windows: torch.Tensor,
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
    in_place: bool = False,
) -> torch.Tensor:
    """One launch over requests and channel blocks; see `reference.verify`.

    Moves, for each request and channel: S elements of state, D of x, K of weight, D+S-1 of the row (D*S when dense),
    D of y.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block = _channel_block(spec, len(x))
    num_blocks = triton.cdiv(spec.conv_dim, block)
    _check_size(spec, len(x) * num_blocks)
    with _launching(state):
        verify_kernel[(len(x) * num_blocks,)](
            bits(x),
            bits(state),
            bits(weight),
            None if bias is None else bits(bias),
            layer,
            slots,
            rows,
            valid,
            bits(windows),
            bits(y),
            spec.num_layers if layer is not None else 1,
            num_blocks,
            spec.num_slots,
            windows.shape[1],
            null_slot if _can_match(null_slot, spec) else 0,
            spec.conv_dim,
            *x.stride(),
            *state.stride()[:2],
            *windows.stride()[:2],
            _token_stride(windows, spec),
            HAS_LAYER=layer is not None,
            HAS_ROWS=rows is not None,
            HAS_VALID=valid is not None,
            HAS_NULL=_can_match(null_slot, spec),
            SILU=silu,
            IN_PLACE=in_place,
            BLOCK=block,
            **_constants(x.dtype, state.dtype, weight, bias, spec),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return y


def _constants(
    x_dtype: torch.dtype, state_dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None, spec: ConvCacheSpec
) -> dict[str, object]:
    """What a model fixes once: the geometry, the filter's layout and the dtypes. The filter's strides are constants
    because a known pitch lets one thread load all taps of a channel at once."""
    piece_columns = spec.num_columns if spec.storage == "sliding" else spec.state_columns
    return {
        "STRIDE_WEIGHT_CHANNEL": weight.stride(0),
        "STRIDE_WEIGHT_TAP": weight.stride(1),
        "STRIDE_BIAS": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "SLIDING": spec.storage == "sliding",
        "TIME_MAJOR": spec.is_time_major,
        "X_DTYPE": TRITON_DTYPES[x_dtype],
        "STATE_DTYPE": TRITON_DTYPES[state_dtype],
        "WEIGHT_DTYPE": TRITON_DTYPES[weight.dtype],
        "BIAS_DTYPE": None if bias is None else TRITON_DTYPES[bias.dtype],
        "NUM_TOKENS": spec.num_draft_tokens,
        "NUM_PIECES": 1 if spec.storage == "sliding" else spec.num_draft_tokens,
        "PIECE_COLUMNS": piece_columns,
        "WIDTH": spec.width,
        "STATE_COLUMNS": spec.state_columns,
        "BLOCK_TAPS": triton.next_power_of_2(spec.width),
        "BLOCK_PIECE": triton.next_power_of_2(piece_columns),
        "BY_HAND": is_interpreted(),
    }


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
    """One token, x `[B, conv_dim]`: a verify of D = 1 whose only dense window is the slot that it read."""
    y = verify(
        x[:, None],
        state,
        state.unsqueeze(2),
        weight,
        bias,
        spec=dataclasses.replace(spec, num_draft_tokens=1, storage="dense"),
        layer=layer,
        slots=slots,
        rows=slots,
        valid=None,
        null_slot=null_slot,
        silu=silu,
        in_place=True,
    )
    return y[:, 0]
