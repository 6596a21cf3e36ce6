"""What the Triton kernels share: where a column of a window lies, which node a path has, and how columns are stored.

    column j of window_n = column n+j of the slot where n+j < S, else x of node p[n+j-S] of a path p (chain: 0, 1, …)

That is how inputs storage puts the state after n tokens together; in the other storages the row has it in one piece. A
pointer is chosen for each column before the load, so that S columns are read, not S from each place.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# (Triton types static_range, constants and launch options for its own compiler, not for pyright.)

import triton
import triton.language as tl


@triton.jit
def node_at(p_path, i_b, i_n, HAS_PATH: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Entry i_n of request i_b's path, of a chain i_n. Beyond the ends some other entry, for nobody to use."""
    i_node = i_n
    if HAS_PATH:
        i_entry = tl.minimum(tl.maximum(i_n, 0), NUM_TOKENS - 1)
        i_node = tl.load(p_path + i_b.to(tl.int64) * NUM_TOKENS + i_entry)
    return i_node


@triton.jit
def path_holds(
    p_path, i_b, num_tokens, bound,
    HAS_PATH: tl.constexpr, SLIDING: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_NEEDED: tl.constexpr,
):  # fmt: skip
    """Whether the last NUM_NEEDED of the first `num_tokens` entries are nodes below `bound` (sliding: in order)."""
    m_holds = num_tokens <= NUM_TOKENS
    if HAS_PATH:
        for i_e in tl.static_range(NUM_NEEDED):
            i_n = num_tokens - 1 - i_e
            i_node = node_at(p_path, i_b, i_n, HAS_PATH, NUM_TOKENS)
            if SLIDING:
                m_holds = m_holds & ((i_n < 0) | (i_node == i_n))
            else:
                m_holds = m_holds & ((i_n < 0) | ((i_node >= 0) & (i_node < bound)))
    return m_holds


@triton.jit
def load_window(
    # inputs
    p_slot, p_row, p_path,
    # place: the request, the tokens after which, and channels
    i_b, num_tokens, o_d, num_channels,
    # sizes, and strides in elements
    conv_dim, stride_window_token,
    # constants
    HAS_STEP: tl.constexpr, HAS_PATH: tl.constexpr, SLIDING: tl.constexpr, INPUTS: tl.constexpr,
    TIME_MAJOR: tl.constexpr, NUM_TOKENS: tl.constexpr, STATE_COLUMNS: tl.constexpr, PIECE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The S columns of the state after `num_tokens` tokens of the step in the row; of no token, those of the slot.

    Without HAS_STEP there is no row, and no other state than that of the slot.
    """
    b_window = ()
    for i_s in tl.static_range(STATE_COLUMNS):
        m_slot = True
        i_c = i_s
        p_from = p_slot
        if HAS_STEP and INPUTS:
            i_c = num_tokens + i_s
            m_slot = i_c < STATE_COLUMNS
            i_c = tl.where(m_slot, i_c, node_at(p_path, i_b, i_c - STATE_COLUMNS, HAS_PATH, NUM_TOKENS))
            p_from = tl.where(m_slot, p_slot, p_row)
        elif HAS_STEP:
            m_slot = num_tokens <= 0
            i_token = num_tokens - 1
            if not SLIDING:
                i_token = node_at(p_path, i_b, i_token, HAS_PATH, NUM_TOKENS)
            p_from = tl.where(m_slot, p_slot, p_row + i_token.to(tl.int64) * stride_window_token)
        if TIME_MAJOR:
            o_c = i_c * conv_dim + o_d
        elif HAS_STEP:
            o_c = o_d * tl.where(m_slot, STATE_COLUMNS, PIECE_COLUMNS) + i_c
        else:
            o_c = o_d * STATE_COLUMNS + i_c
        b_window += (tl.load(p_from + o_c, mask=o_d < num_channels, other=0),)
    return b_window


@triton.jit
def store_pieces(
    # outputs
    p_row,
    # inputs
    b_pieces,
    # place
    o_d, num_channels, num_valid,
    # sizes, and strides in elements
    conv_dim, stride_piece,
    # constants
    FIRST: tl.constexpr, BY_COLUMN: tl.constexpr, HAS_VALID: tl.constexpr, HELD: tl.constexpr,
    TIME_MAJOR: tl.constexpr, NUM_PIECES: tl.constexpr, PIECE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_PIECE: tl.constexpr,
):  # fmt: skip
    """Writes pieces of PIECE_COLUMNS columns each, which `b_pieces` has from FIRST on.

    BY_COLUMN there is one piece, of which the first HELD + `num_valid` columns are written (all of them without
    HAS_VALID); else the first `num_valid` pieces are. channel_major gathers a piece in a tile first, so that the store
    runs along memory.
    """
    for i_w in tl.static_range(NUM_PIECES):
        p_piece = p_row + tl.cast(i_w, tl.int64) * stride_piece
        if not BY_COLUMN:
            num_channels = tl.where(i_w < num_valid, conv_dim, 0)
        if TIME_MAJOR:
            for i_c in tl.static_range(PIECE_COLUMNS):
                num_written = num_channels
                if BY_COLUMN and HAS_VALID:
                    num_written = tl.where(i_c < HELD + num_valid, num_channels, 0)
                b_column = b_pieces[FIRST + i_w * PIECE_COLUMNS + i_c]
                tl.store(p_piece + i_c * conv_dim + o_d, b_column, mask=o_d < num_written)
        else:
            o_c = tl.arange(0, BLOCK_PIECE)
            b_piece = tl.zeros((BLOCK, BLOCK_PIECE), p_row.dtype.element_ty)
            for i_c in tl.static_range(PIECE_COLUMNS):
                b_column = b_pieces[FIRST + i_w * PIECE_COLUMNS + i_c]
                b_piece = tl.where(o_c[None, :] == i_c, b_column[:, None], b_piece)
            m_c = (o_d < num_channels)[:, None] & (o_c < PIECE_COLUMNS)[None, :]
            if BY_COLUMN and HAS_VALID:
                m_c = m_c & (o_c < HELD + num_valid)[None, :]
            tl.store(p_piece + o_d[:, None] * PIECE_COLUMNS + o_c[None, :], b_piece, mask=m_c)
