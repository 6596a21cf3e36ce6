"""The commit in Triton: one program copies one block of one window, and the same block of the tracked window.

`commit_kernel` copies windows that a row has as they are; `commit_inputs_kernel` puts each together from the old state
in the slot and the inputs in the row, and so reads all that it needs of both before it writes the slot.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# (Triton types static_range, constants and launch options for its own compiler, not for pyright.)

import triton
import triton.language as tl

from torch_ref.columns import load_window, node_at, path_holds, store_pieces


@triton.jit
def _copy_window(
    # inputs
    p_windows,
    # outputs
    p_state,
    # inputs: one int32 for each request, of the path D
    p_slots, p_rows, p_accepted, p_valid, p_path,
    # place of the program
    i_b, i_l, i_n,
    # sizes, and strides in elements
    num_slots, num_rows, null_slot, length, stride_window_layer, stride_window_row, stride_window_token,
    stride_state_layer, stride_state_slot,
    # constants
    HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr, HAS_PATH: tl.constexpr,
    SLIDING: tl.constexpr, NUM_TOKENS: tl.constexpr, RUN: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
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
    m_live = m_live & path_holds(p_path, i_b, num_accepted, num_valid, HAS_PATH, SLIDING, NUM_TOKENS, 1)
    i_token = num_accepted - 1
    if HAS_PATH and not SLIDING:
        i_token = node_at(p_path, i_b, i_token, HAS_PATH, NUM_TOKENS)
    if m_live:
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        p_from = p_windows + i_l.to(tl.int64) * stride_window_layer + i_row.to(tl.int64) * stride_window_row
        p_from += i_token.to(tl.int64) * stride_window_token
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
    # inputs: one int32 for each request, of the path D
    p_slots, p_rows, p_accepted, p_valid, p_track_slots, p_track_accepted, p_path,
    # sizes, and strides in elements
    num_layers, num_blocks, num_slots, num_rows, null_slot, length, stride_window_layer, stride_window_row,
    stride_window_token, stride_state_layer, stride_state_slot,
    # constants
    HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr, HAS_TRACK: tl.constexpr,
    HAS_PATH: tl.constexpr, SLIDING: tl.constexpr, NUM_TOKENS: tl.constexpr, RUN: tl.constexpr, PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
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
            p_path,
            i_b, i_l, i_n,
            num_slots, num_rows, null_slot, length,
            stride_window_layer, stride_window_row, stride_window_token, stride_state_layer, stride_state_slot,
            HAS_ROWS, HAS_VALID, HAS_NULL, HAS_PATH, SLIDING, NUM_TOKENS, RUN, PITCH, BLOCK,
        )  # fmt: skip


@triton.jit
def commit_inputs_kernel(
    # inputs
    p_windows,
    # inputs and outputs
    p_state,
    # inputs: one int32 for each request, of the path D
    p_slots, p_rows, p_accepted, p_valid, p_track_slots, p_track_accepted, p_path,
    # sizes, and strides in elements
    num_layers, num_blocks, num_slots, num_rows, null_slot, conv_dim, stride_window_layer, stride_window_row,
    stride_state_layer, stride_state_slot,
    # constants
    HAS_ROWS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_NULL: tl.constexpr, HAS_TRACK: tl.constexpr,
    HAS_PATH: tl.constexpr, TIME_MAJOR: tl.constexpr, NUM_TOKENS: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PIECE: tl.constexpr,
):  # fmt: skip
    """One program makes both windows of one block of channels, and then writes them."""
    i_p = tl.program_id(0)
    o_d = (i_p % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    i_l = ((i_p // num_blocks) % num_layers).to(tl.int64)
    i_b = i_p // num_blocks // num_layers
    i_slot = tl.load(p_slots + i_b)
    i_row = tl.load(p_rows + i_b) if HAS_ROWS else i_b
    m_from = (i_slot >= 0) & (i_slot < num_slots) & (i_row >= 0) & (i_row < num_rows)
    if HAS_NULL:
        m_from = m_from & (i_slot != null_slot)
    num_valid = NUM_TOKENS
    if HAS_VALID:
        num_valid = tl.load(p_valid + i_b)
        m_from = m_from & (num_valid <= NUM_TOKENS)
    p_slot = p_state + i_l * stride_state_layer + i_slot.to(tl.int64) * stride_state_slot
    p_row = p_windows + i_l * stride_window_layer + i_row.to(tl.int64) * stride_window_row

    b_windows, i_targets, num_written = (), (), ()
    for i_set in tl.static_range(1 + HAS_TRACK):
        i_to = tl.load((p_track_slots if i_set else p_slots) + i_b)
        num_accepted = tl.load((p_track_accepted if i_set else p_accepted) + i_b)
        m_live = m_from & (i_to >= 0) & (i_to < num_slots) & (num_accepted >= 1) & (num_accepted <= num_valid)
        if HAS_NULL:
            m_live = m_live & (i_to != null_slot)
        m_live = m_live & path_holds(
            p_path, i_b, num_accepted, num_valid, HAS_PATH, False, NUM_TOKENS, STATE_COLUMNS
        )  # fmt: skip
        num_channels = tl.where(m_live, conv_dim, 0)
        b_windows += load_window(
            p_slot, p_row, p_path, i_b, num_accepted, o_d, num_channels, conv_dim, 0,
            True, HAS_PATH, False, True, TIME_MAJOR, NUM_TOKENS, STATE_COLUMNS, NUM_TOKENS,
        )  # fmt: skip
        i_targets += (i_to,)
        num_written += (num_channels,)
    tl.debug_barrier()  # the slot is read by all threads before any of them writes it
    for i_set in tl.static_range(1 + HAS_TRACK):
        p_to = p_state + i_l * stride_state_layer + tl.cast(i_targets[i_set], tl.int64) * stride_state_slot
        store_pieces(
            p_to, b_windows, o_d, num_written[i_set], 0, conv_dim, 0,
            i_set * STATE_COLUMNS, True, False, 0, TIME_MAJOR, 1, STATE_COLUMNS, BLOCK, BLOCK_PIECE,
        )  # fmt: skip
