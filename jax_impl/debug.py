"""Checks of values: what the operations skip without a word, reported row by row.

The operations never look at the values of index arrays; they skip what is out of range, and leave the content of a slot
that two live requests name unspecified. These checks read the arrays on the host, so they are for debugging and tests.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_impl.layout import ConvCacheSpec, Problems


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

    Raises:
      ValueError: lengths that the commit would refuse too.

    Example:
      >>> spec = ConvCacheSpec(1, 8, 4, 128, width=4, num_draft_tokens=4)
      >>> check_commit([3, 3, 9], [1, 2, 5], spec=spec)  # doctest: +NORMALIZE_WHITESPACE
      ['`num_accepted_tokens`: request 2 has 5, more than num_draft_tokens = 4; it is skipped.',
       '`state_indices`: request 2 names slot 9, outside the pool of 8 slots; it is skipped.',
       '`state_indices`: requests 0, 1 commit to slot 3; its content is unspecified.']
    """
    given = {
        "state_indices": state_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "window_rows": window_rows,
        "num_valid_tokens": num_valid_tokens,
        "track_indices": track_indices,
        "track_num_tokens": track_num_tokens,
    }
    arrays = {name: np.asarray(value, np.int64) for name, value in given.items() if value is not None}
    slots, accepted = arrays["state_indices"], arrays["num_accepted_tokens"]
    problems = Problems()
    for name, array in arrays.items():
        problems.expect(name, "request", slots.shape[:1], array.shape)
    if (track_indices is None) != (track_num_tokens is None):
        problems.add("track_indices", "given together with `track_num_tokens`", "one of them")
    if window_rows is None and slots.size > spec.max_requests:
        problems.add("window_rows", f"given, or at most max_requests = {spec.max_requests} requests", slots.size)
    problems.raise_if_any()
    rows = arrays.get("window_rows", np.arange(slots.size))
    valid = arrays.get("num_valid_tokens", np.full(slots.size, spec.num_draft_tokens))
    readable = (rows >= 0) & (rows < spec.max_requests) & (valid >= 1) & (valid <= spec.num_draft_tokens)
    wanted = accepted >= 1
    if track_num_tokens is not None:
        wanted = wanted | (arrays["track_num_tokens"] >= 1)
    found = _check_set("state_indices", "num_accepted_tokens", slots, accepted, valid, spec)
    found += [
        f"`window_rows`: request {request} reads row {rows[request]}, outside the buffer of {spec.max_requests} rows; "
        "it is skipped."
        for request in np.flatnonzero(wanted & ((rows < 0) | (rows >= spec.max_requests)))
    ]
    found += [
        f"`num_valid_tokens`: request {request} has {valid[request]}, outside 1 to {spec.num_draft_tokens}; "
        "it is skipped."
        for request in np.flatnonzero(wanted & ((valid < 1) | (valid > spec.num_draft_tokens)))
    ]
    committed = _targets(slots, accepted, valid, readable, null_slot, spec)
    found += _shared("state_indices", "commit", committed)
    if track_indices is None:
        return found
    tracks, counts = arrays["track_indices"], arrays["track_num_tokens"]
    found += _check_set("track_indices", "track_num_tokens", tracks, counts, valid, spec)
    tracked = _targets(tracks, counts, valid, readable, null_slot, spec)
    found += _shared("track_indices", "snapshot", tracked)
    for slot in sorted(tracked.keys() & committed.keys()):
        found.append(
            f"`track_indices`: {_requests(tracked[slot])} snapshot to slot {slot}, which {_requests(committed[slot])} "
            "commit to; its content is unspecified."
        )
    return found


def _check_set(
    slot_name: str, count_name: str, slots: np.ndarray, counts: np.ndarray, valid: np.ndarray, spec: ConvCacheSpec
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
    too_many = (counts >= 1) & (counts <= spec.num_draft_tokens) & (counts > valid) & (valid >= 1)
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
    slots: np.ndarray,
    counts: np.ndarray,
    valid: np.ndarray,
    readable: np.ndarray,
    null_slot: int | None,
    spec: ConvCacheSpec,
) -> dict[int, list[int]]:
    """Live slots with the requests that write them."""
    live = readable & (counts >= 1) & (counts <= valid) & (slots >= 0) & (slots < spec.num_slots)
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
