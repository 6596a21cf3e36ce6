"""The same steps in Triton: one launch commits all layers, one launch verifies (or updates) one layer.

    columns   c_0 … c_{S-1} = the slot's state, c_{S+t} = x_t rounded to the state's dtype
    y_t       = silu(bias + sum over k of weight[k] * c_{S+t-(K-1)+k}),  k = 0 … K-1 in this order, in float32
    window_n  = c_n … c_{n+S-1},  the state after n tokens

`commit` reads the buffer (in inputs storage the pool, too) and writes the pool; `verify` reads the pool (a step that
resumes: the buffer, too) and writes the buffer and y; `update`, and a verify that resumes in inputs storage, read and
write the pool. All memory is read and written as integers and becomes a float only between registers, so copies keep
every bit. Numbers: the products and sums are separate float32 operations (no fused multiply-add), which makes the
result the same for every D, for a chain and the same path in a tree, and the same as `reference` up to the hardware's
exponential in SiLU.

The launches are here, the device code in `verify_kernel`, `commit_kernel` and, for both, `columns`. Names in it follow
flash-linear-attention: p_ pointer, i_ program or scalar index, o_ offsets, m_ mask, b_ block.
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

from torch_ref.commit_kernel import commit_inputs_kernel, commit_kernel
from torch_ref.layout import LARGEST, ConvCacheSpec, mismatch, raise_mismatches
from torch_ref.reference import bits
from torch_ref.verify_kernel import verify_kernel

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
NUM_WARPS = 4
NUM_THREADS = 32 * NUM_WARPS
VECTOR_BYTES = 16  # the widest access of one thread
RESIDENT_PROGRAMS = 2112  # 132 multiprocessors of an H200, each with 16 programs of 4 warps


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
    entry = spec.conv_dim * max(_piece_columns(spec), spec.width)
    if entry > LARGEST:
        wrong.append(mismatch("implementation", "'eager' for a row of 2^31 elements or more", f"'triton' for {entry}"))
    if num_programs > LARGEST:
        wrong.append(mismatch("implementation", "'eager' for 2^31 blocks or more", f"'triton' for {num_programs}"))
    raise_mismatches(wrong)


def _piece_columns(spec: ConvCacheSpec) -> int:
    """Columns that lie together in a row: of dense storage one window, else all."""
    return spec.state_columns if spec.storage == "dense" else spec.num_columns


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
    path: torch.Tensor | None = None,
) -> None:
    """One launch over requests, layers and blocks; see `reference.commit`.

    Moves: 2 * S * conv_dim elements for each live request and layer.
    """
    options = {
        "HAS_ROWS": rows is not None,
        "HAS_VALID": valid is not None,
        "HAS_NULL": _can_match(null_slot, spec),
        "HAS_TRACK": track_slots is not None,
        "HAS_PATH": path is not None,
        "NUM_TOKENS": spec.num_draft_tokens,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
    }
    indices = (slots, rows, accepted, valid, track_slots, track_accepted, path)
    sizes = (spec.num_slots, windows.shape[1], null_slot if _can_match(null_slot, spec) else 0)
    if spec.storage == "inputs":
        _commit_inputs(state, windows, indices, sizes, spec, len(slots), options)
    else:
        _commit_windows(state, windows, indices, sizes, spec, len(slots), options)


def _commit_windows(
    state: torch.Tensor,
    windows: torch.Tensor,
    indices: tuple[torch.Tensor | None, ...],
    sizes: tuple[int | None, ...],
    spec: ConvCacheSpec,
    num_requests: int,
    options: dict[str, object],
) -> None:
    num_layers = state.shape[0]
    length = spec.state_columns * spec.conv_dim
    block = min(NUM_THREADS * VECTOR_BYTES // spec.item_bytes, triton.next_power_of_2(length))
    if num_requests * num_layers * triton.cdiv(length, block) > 4 * RESIDENT_PROGRAMS:
        block = min(4 * block, triton.next_power_of_2(length))  # four vectors a thread in flight, fewer programs
    num_blocks = triton.cdiv(length, block)
    num_programs = num_requests * num_layers * num_blocks
    if num_programs == 0:
        return
    _check_size(spec, num_programs)
    interleaved = spec.storage == "sliding" and not spec.is_time_major
    with _launching(state):
        commit_kernel[(num_programs,)](
            bits(windows),
            bits(state),
            *indices,
            num_layers,
            num_blocks,
            *sizes,
            length,
            windows.stride(0),
            windows.stride(1),
            _token_stride(windows, spec),
            state.stride(0),
            state.stride(1),
            SLIDING=spec.storage == "sliding",
            RUN=spec.state_columns if interleaved else 1,
            PITCH=spec.num_columns if interleaved else 1,
            BLOCK=block,
            **options,
        )


def _commit_inputs(
    state: torch.Tensor,
    windows: torch.Tensor,
    indices: tuple[torch.Tensor | None, ...],
    sizes: tuple[int | None, ...],
    spec: ConvCacheSpec,
    num_requests: int,
    options: dict[str, object],
) -> None:
    num_layers = state.shape[0]
    block = _channel_block(spec, num_requests * num_layers)
    num_blocks = triton.cdiv(spec.conv_dim, block)
    num_programs = num_requests * num_layers * num_blocks
    if num_programs == 0:
        return
    _check_size(spec, num_programs)
    with _launching(state):
        commit_inputs_kernel[(num_programs,)](
            bits(windows),
            bits(state),
            *indices,
            num_layers,
            num_blocks,
            *sizes,
            spec.conv_dim,
            windows.stride(0),
            windows.stride(1),
            state.stride(0),
            state.stride(1),
            TIME_MAJOR=spec.is_time_major,
            STATE_COLUMNS=spec.state_columns,
            BLOCK=block,
            BLOCK_PIECE=triton.next_power_of_2(spec.state_columns),
            **options,
        )


def _can_match(null_slot: int | None, spec: ConvCacheSpec) -> bool:
    # a null slot outside the pool is skipped anyway, and need not fit a kernel argument
    return null_slot is not None and 0 <= null_slot < spec.num_slots


def _channel_block(spec: ConvCacheSpec, num_requests: int) -> int:
    """Channels of one program: a 16-byte vector a thread where that fills the device, else a 4-byte one."""
    largest = NUM_THREADS * VECTOR_BYTES // spec.item_bytes
    if not spec.is_time_major:
        # the tile of one piece has this many elements for each channel; 16 a thread keep it in registers
        piece = spec.state_columns if spec.storage == "dense" else max(spec.num_columns, spec.state_columns)
        largest = max(32, 16 * NUM_THREADS // triton.next_power_of_2(piece))
    block = min(largest, 256)
    if num_requests * triton.cdiv(spec.conv_dim, largest) >= 256:
        block = largest
    return min(block, triton.next_power_of_2(spec.conv_dim))


def verify(
    x: torch.Tensor | None,
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
    parents: torch.Tensor | None = None,
    resume: torch.Tensor | None = None,
    resume_path: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """One launch over requests and channel blocks; see `reference.verify`.

    Moves, for each request and channel: S elements of state, D of x, K of weight, D+S-1 of the row (D*S when dense, D
    of inputs, none when it has x), D of y; S more to the slot when an inputs step resumes.
    """
    x_dtype = state.dtype if x is None else x.dtype
    y = torch.empty((len(slots), spec.num_draft_tokens, spec.conv_dim), dtype=x_dtype, device=state.device)
    if y.numel() == 0:
        return y
    block = _channel_block(spec, len(slots))
    num_blocks = triton.cdiv(spec.conv_dim, block)
    _check_size(spec, len(slots) * num_blocks)
    in_rows = (0, spec.conv_dim, 1) if spec.is_time_major else (0, 1, spec.num_columns)
    before = windows if previous is None else previous
    with _launching(state):
        verify_kernel[(len(slots) * num_blocks,)](
            None if x is None else bits(x),
            bits(weight),
            None if bias is None else bits(bias),
            layer,
            slots,
            rows,
            valid,
            parents,
            resume,
            resume_path,
            bits(before),
            bits(state),
            bits(windows),
            bits(y),
            spec.num_layers if layer is not None else 1,
            num_blocks,
            spec.num_slots,
            windows.shape[1],
            null_slot if _can_match(null_slot, spec) else 0,
            spec.conv_dim,
            *(in_rows if x is None else x.stride()),
            *state.stride()[:2],
            *windows.stride()[:2],
            _token_stride(windows, spec),
            *before.stride()[:2],
            HAS_LAYER=layer is not None,
            HAS_ROWS=rows is not None,
            HAS_VALID=valid is not None,
            HAS_NULL=_can_match(null_slot, spec),
            HAS_PARENTS=parents is not None,
            HAS_RESUME=resume is not None,
            HAS_PATH=resume_path is not None,
            X_IN_ROWS=x is None,
            SILU=silu,
            IN_PLACE=in_place or resume is not None,
            BLOCK=block,
            **_constants(x_dtype, state.dtype, weight, bias, spec),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return y


def _constants(
    x_dtype: torch.dtype, state_dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None, spec: ConvCacheSpec
) -> dict[str, object]:
    """What a model fixes once: the geometry, the filter's layout and the dtypes. The filter's strides are constants
    because a known pitch lets one thread load all taps of a channel at once."""
    piece_columns = _piece_columns(spec)
    return {
        "STRIDE_WEIGHT_CHANNEL": weight.stride(0),
        "STRIDE_WEIGHT_TAP": weight.stride(1),
        "STRIDE_BIAS": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "SLIDING": spec.storage == "sliding",
        "INPUTS": spec.storage == "inputs",
        "TIME_MAJOR": spec.is_time_major,
        "X_DTYPE": TRITON_DTYPES[x_dtype],
        "STATE_DTYPE": TRITON_DTYPES[state_dtype],
        "WEIGHT_DTYPE": TRITON_DTYPES[weight.dtype],
        "BIAS_DTYPE": None if bias is None else TRITON_DTYPES[bias.dtype],
        "NUM_TOKENS": spec.num_draft_tokens,
        "NUM_PIECES": spec.num_draft_tokens if spec.storage == "dense" else 1,
        "PIECE_COLUMNS": piece_columns,
        "HELD": spec.first_token_column,
        "NUM_NEEDED": spec.state_columns if spec.storage == "inputs" else 1,
        "WIDTH": spec.width,
        "STATE_COLUMNS": spec.state_columns,
        "BLOCK_TAPS": triton.next_power_of_2(spec.width),
        "BLOCK_PIECE": triton.next_power_of_2(piece_columns),
        "BLOCK_STATE": triton.next_power_of_2(spec.state_columns),
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
