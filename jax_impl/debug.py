"""Checks of values: what the operations skip without a word, reported row by row.

The operations never look at the values of index arrays; they skip what is out of range, and leave the content of a slot
that two live requests name unspecified. These checks read the arrays on the host, so they are for debugging and tests.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_impl.layout import ConvCacheSpec


def check_commit(
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    spec: ConvCacheSpec,
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
) -> list[str]:
    """Everything about a commit's index arrays that is skipped or unspecified, one sentence each; [] when all is well.

    A count of 0, a negative slot and the null slot are the ways to skip on purpose and are not reported.

    Args:
      state_indices, num_accepted_tokens, spec, window_rows, num_valid_tokens, null_slot, track_indices,
        track_num_tokens: as in `commit_conv_state`; concrete arrays or lists.

    Returns:
      Sentences that name the argument and the request.

    Example:
      >>> spec = ConvCacheSpec(1, 8, 4, 128, width=4, num_draft_tokens=4)
      >>> check_commit([3, 3, 9], [1, 2, 5], spec=spec)  # doctest: +NORMALIZE_WHITESPACE
      ['`num_accepted_tokens`: request 2 has 5, more than num_draft_tokens = 4; it is skipped.',
       '`state_indices`: request 2 names slot 9, outside the pool of 8 slots; it is skipped.',
       '`state_indices`: requests 0, 1 commit to slot 3; its content is unspecified.']
    """
    slots, accepted = np.asarray(state_indices, np.int64), np.asarray(num_accepted_tokens, np.int64)
    rows = np.arange(len(slots)) if window_rows is None else np.asarray(window_rows, np.int64)
    valid = None if num_valid_tokens is None else np.asarray(num_valid_tokens, np.int64)
    found = _check_set("state_indices", "num_accepted_tokens", slots, accepted, valid, spec)
    wanted = accepted >= 1
    found += [
        f"`window_rows`: request {request} reads row {rows[request]}, outside the buffer of {spec.max_requests} rows; "
        "it is skipped."
        for request in np.flatnonzero(wanted & ((rows < 0) | (rows >= spec.max_requests)))
    ]
    committed = _targets(slots, accepted, valid, null_slot, spec)
    found += _shared("state_indices", "commit", committed)
    if track_indices is None or track_num_tokens is None:
        return found
    tracks, counts = np.asarray(track_indices, np.int64), np.asarray(track_num_tokens, np.int64)
    found += _check_set("track_indices", "track_num_tokens", tracks, counts, valid, spec)
    tracked = _targets(tracks, counts, valid, null_slot, spec)
    found += _shared("track_indices", "snapshot", tracked)
    for slot in sorted(tracked.keys() & committed.keys()):
        found.append(
            f"`track_indices`: {_requests(tracked[slot])} snapshot to slot {slot}, which {_requests(committed[slot])} "
            "commit to; its content is unspecified."
        )
    return found


def _check_set(
    slot_name: str, count_name: str, slots: np.ndarray, counts: np.ndarray, valid: Any, spec: ConvCacheSpec
) -> list[str]:
    found = [
        f"`{count_name}`: request {request} has {counts[request]}, more than num_draft_tokens = "
        f"{spec.num_draft_tokens}; it is skipped."
        for request in np.flatnonzero(counts > spec.num_draft_tokens)
    ]
    found += [
        f"`{count_name}`: request {request} has {counts[request]}, below 0; it is skipped."
        for request in np.flatnonzero(counts < 0)
    ]
    if valid is not None:
        too_many = (counts >= 1) & (counts <= spec.num_draft_tokens) & (counts > valid)
        found += [
            f"`{count_name}`: request {request} has {counts[request]}, more than its {valid[request]} valid tokens; "
            "it is skipped."
            for request in np.flatnonzero(too_many)
        ]
    found += [
        f"`{slot_name}`: request {request} names slot {slots[request]}, outside the pool of {spec.num_slots} slots; "
        "it is skipped."
        for request in np.flatnonzero((counts >= 1) & (slots >= spec.num_slots))
    ]
    return found


def _targets(
    slots: np.ndarray, counts: np.ndarray, valid: Any, null_slot: int | None, spec: ConvCacheSpec
) -> dict[int, list[int]]:
    """Live slots with the requests that write them."""
    live = (counts >= 1) & (counts <= spec.num_draft_tokens) & (slots >= 0) & (slots < spec.num_slots)
    if valid is not None:
        live &= counts <= valid
    if null_slot is not None:
        live &= slots != null_slot
    targets = defaultdict(list)
    for request in np.flatnonzero(live):
        targets[int(slots[request])].append(int(request))
    return targets


def _shared(name: str, verb: str, targets: dict[int, list[int]]) -> list[str]:
    return [
        f"`{name}`: {_requests(requests)} {verb} to slot {slot}; its content is unspecified."
        for slot, requests in sorted(targets.items())
        if len(requests) > 1
    ]


def _requests(numbers: Iterable[int]) -> str:
    return f"requests {', '.join(map(str, numbers))}"
