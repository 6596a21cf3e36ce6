"""The rollback after verification: every request's accepted state into its slot, in place."""

from typing import Any

import torch

from torch_ref.checks import Call, Implementation, IndexArray, Indices, check_null_slot, choose_backend, leaves_of
from torch_ref.layout import mismatch


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
    calls: list[Call] = []
    for path, state, windows, group in leaves_of(conv_state, conv_windows, spec, "", wrong):
        call = Call(group, state, wrong, path)
        call.check_written(f"conv_state{path}", state)
        call.take_windows(windows, written=False)
        calls.append(call)
    device = calls[0].device if calls else torch.device("cpu")
    shared = Indices(device, wrong)
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
    check_null_slot(null_slot, wrong)
    backend = choose_backend(implementation, device, wrong)
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
