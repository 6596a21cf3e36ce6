"""Verify and update in Triton: one program takes one block of channels of one request through all its tokens.

    context of token t = the state after its parent: after token t-1 in a chain, before the step for a root
    y_t                = silu(bias + sum over k of weight[k] * the last K of [context, x_t])
    state after t      = the last S of [context, x_t]

All memory is read and written as integers and becomes a float only between registers. The products and sums are
separate float32 operations, oldest tap first.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# (Triton types static_range, constants and launch options for its own compiler, not for pyright.)

import triton
import triton.language as tl

from torch_ref.columns import load_window, path_holds, store_pieces


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
def _load_parents(p_parents, i_b, HAS_PARENTS: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """The link of every token, as scalars."""
    i_parents = ()
    for i_t in tl.static_range(NUM_TOKENS if HAS_PARENTS else 0):
        i_parents += (tl.load(p_parents + i_b.to(tl.int64) * NUM_TOKENS + i_t),)
    return i_parents


@triton.jit
def _links_hold(i_parents, num_valid, SLIDING: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Whether the links of the first `num_valid` tokens point backwards (sliding: to the token before)."""
    m_hold = i_parents[0] == i_parents[0]
    for i_t in tl.static_range(NUM_TOKENS):
        if SLIDING:
            m_hold = m_hold & ((i_parents[i_t] == i_t - 1) | (i_t >= num_valid))
        else:
            m_hold = m_hold & (((i_parents[i_t] >= -1) & (i_parents[i_t] < i_t)) | (i_t >= num_valid))
    return m_hold


@triton.jit
def _load_tokens(
    p_request, o_d, num_valid, conv_dim, stride_x_token, stride_x_channel,
    X_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, NUM_TOKENS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """x_0 … x_{D-1} as bit patterns of the state's dtype; zeros from token `num_valid` on.

    A scalar condition on a block is written as a bound on o_d: cheaper than a mask of masks, and the form that the
    interpreter of some Triton versions accepts.
    """
    b_tokens = ()
    for i_t in tl.static_range(NUM_TOKENS):
        p_token = p_request + tl.cast(i_t, tl.int64) * stride_x_token + o_d.to(tl.int64) * stride_x_channel
        b_x = tl.load(p_token, mask=o_d < tl.where(i_t < num_valid, conv_dim, 0), other=0)
        if X_DTYPE != STATE_DTYPE:
            b_x = _narrow(_widen(b_x, X_DTYPE), STATE_DTYPE, BY_HAND)
        b_tokens += (b_x,)
    return b_tokens


@triton.jit
def _contexts(
    b_history, b_tokens, i_parents,
    HAS_PARENTS: tl.constexpr, NUM_TOKENS: tl.constexpr, STATE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The S columns before each token, token after token: those of a chain by their number, else chosen by the links.

    Column j of the state after token p is column j+1 of p's context, and x_p at the end; it is column j of the context
    of every token with the parent p.
    """
    b_columns = b_history + b_tokens
    b_contexts = ()
    for i_t in tl.static_range(NUM_TOKENS):
        for i_s in tl.static_range(STATE_COLUMNS):
            b_column = b_columns[i_s]
            if HAS_PARENTS:
                for i_p in tl.static_range(i_t):
                    b_after = b_tokens[i_p] if i_s + 1 == STATE_COLUMNS else b_contexts[i_p * STATE_COLUMNS + i_s + 1]
                    b_column = tl.where(i_parents[i_t] == i_p, b_after, b_column)
            else:
                b_column = b_columns[i_t + i_s]
            b_contexts += (b_column,)
    return b_contexts


@triton.jit
def _pieces(
    b_history, b_tokens, b_contexts,
    SLIDING: tl.constexpr, INPUTS: tl.constexpr, NUM_TOKENS: tl.constexpr, STATE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a row stores: the tokens (inputs), before them the state but its oldest column (sliding), or all windows."""
    b_pieces = ()
    if SLIDING:
        for i_s in tl.static_range(1, STATE_COLUMNS):
            b_pieces += (b_history[i_s],)
    for i_t in tl.static_range(NUM_TOKENS):
        if not SLIDING and not INPUTS:
            for i_s in tl.static_range(1, STATE_COLUMNS):
                b_pieces += (b_contexts[i_t * STATE_COLUMNS + i_s],)
        b_pieces += (b_tokens[i_t],)
    return b_pieces


@triton.jit
def _store_y(
    # outputs
    p_request,
    # inputs
    b_contexts, b_tokens, b_taps, b_bias,
    # place
    o_d, num_valid,
    # sizes
    conv_dim,
    # constants
    SILU: tl.constexpr, X_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, NUM_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, STATE_COLUMNS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Convolves and writes y, zeros from token `num_valid` on."""
    for i_t in tl.static_range(NUM_TOKENS):
        b_y = b_bias
        for i_k in tl.static_range(WIDTH - 1):
            b_column = b_contexts[i_t * STATE_COLUMNS + STATE_COLUMNS + 1 - WIDTH + i_k]
            b_y += _widen(b_column, STATE_DTYPE) * b_taps[i_k]
        b_y += _widen(b_tokens[i_t], STATE_DTYPE) * b_taps[WIDTH - 1]
        if SILU:
            b_y = b_y * (1.0 / (1.0 + tl.exp(-b_y)))
        b_y = tl.where(i_t < num_valid, b_y, 0.0)
        tl.store(
            p_request + tl.cast(i_t, tl.int64) * conv_dim + o_d, _narrow(b_y, X_DTYPE, BY_HAND), mask=o_d < conv_dim
        )


@triton.jit
def verify_kernel(
    # inputs
    p_x, p_weight, p_bias, p_layer, p_slots, p_rows, p_valid, p_parents, p_resume, p_resume_path, p_previous,
    # inputs and outputs
    p_state, p_windows,
    # outputs
    p_y,
    # sizes, and strides in elements
    num_layers, num_blocks, num_slots, num_rows, null_slot, conv_dim, stride_x_request, stride_x_token,
    stride_x_channel, stride_state_layer, stride_state_slot, stride_window_layer, stride_window_row,
    stride_window_token, stride_previous_layer, stride_previous_row,
    # constants
    STRIDE_WEIGHT_CHANNEL: tl.constexpr, STRIDE_WEIGHT_TAP: tl.constexpr, STRIDE_BIAS: tl.constexpr,
    HAS_LAYER: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr,
    HAS_PARENTS: tl.constexpr, HAS_RESUME: tl.constexpr, HAS_PATH: tl.constexpr, X_IN_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, IN_PLACE: tl.constexpr, SLIDING: tl.constexpr, INPUTS: tl.constexpr,
    TIME_MAJOR: tl.constexpr, X_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_PIECES: tl.constexpr, PIECE_COLUMNS: tl.constexpr,
    HELD: tl.constexpr, WIDTH: tl.constexpr, STATE_COLUMNS: tl.constexpr, NUM_NEEDED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_PIECE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    """A skipped request runs through with every access but y's masked off: 0 valid tokens, nothing to read or write."""
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
    i_parents = _load_parents(p_parents, i_b, HAS_PARENTS, NUM_TOKENS)
    if HAS_PARENTS:
        m_live = m_live & _links_hold(i_parents, num_valid, SLIDING, NUM_TOKENS)
    num_resumed = tl.load(p_resume + i_b) if HAS_RESUME else 0
    if HAS_RESUME:
        m_live = m_live & (num_resumed >= 0) & path_holds(
            p_resume_path, i_b, num_resumed, NUM_TOKENS, HAS_PATH, SLIDING, NUM_TOKENS, NUM_NEEDED
        )  # fmt: skip
    num_valid = tl.where(m_live, num_valid, 0)
    num_channels = tl.where(m_live, conv_dim, 0)

    p_slot = p_state + i_l * stride_state_layer + i_slot.to(tl.int64) * stride_state_slot
    p_row = p_windows + i_l * stride_window_layer + i_row.to(tl.int64) * stride_window_row
    p_before = p_slot
    if HAS_RESUME:
        p_before = p_previous + i_l * stride_previous_layer + i_row.to(tl.int64) * stride_previous_row
    b_history = load_window(
        p_slot, p_before, p_resume_path, i_b, num_resumed, o_d, num_channels, conv_dim, stride_window_token,
        HAS_RESUME, HAS_PATH, SLIDING, INPUTS, TIME_MAJOR, NUM_TOKENS, STATE_COLUMNS, PIECE_COLUMNS,
    )  # fmt: skip
    p_tokens = p_row if X_IN_ROWS else p_x + i_b.to(tl.int64) * stride_x_request
    b_tokens = _load_tokens(
        p_tokens, o_d, num_valid, conv_dim, stride_x_token, stride_x_channel, X_DTYPE, STATE_DTYPE, NUM_TOKENS, BY_HAND
    )
    b_contexts = _contexts(b_history, b_tokens, i_parents, HAS_PARENTS, NUM_TOKENS, STATE_COLUMNS)
    if IN_PLACE:
        tl.debug_barrier()  # the slot and the row are read by all threads before any of them writes there
    if not X_IN_ROWS:
        store_pieces(
            p_row, _pieces(b_history, b_tokens, b_contexts, SLIDING, INPUTS, NUM_TOKENS, STATE_COLUMNS), o_d,
            num_channels, num_valid, conv_dim, stride_window_token,
            0, SLIDING or INPUTS, HAS_VALID, HELD, TIME_MAJOR, NUM_PIECES, PIECE_COLUMNS, BLOCK, BLOCK_PIECE,
        )  # fmt: skip
    if INPUTS and HAS_RESUME:
        store_pieces(
            p_slot, b_history, o_d, tl.where(num_resumed > 0, num_channels, 0), 0, conv_dim, 0,
            0, True, False, 0, TIME_MAJOR, 1, STATE_COLUMNS, BLOCK, BLOCK_STATE,
        )  # fmt: skip
    _store_y(
        p_y + i_b.to(tl.int64) * NUM_TOKENS * conv_dim, b_contexts, b_tokens, b_taps, b_bias, o_d, num_valid, conv_dim,
        SILU, X_DTYPE, STATE_DTYPE, NUM_TOKENS, WIDTH, STATE_COLUMNS, BY_HAND,
    )  # fmt: skip
