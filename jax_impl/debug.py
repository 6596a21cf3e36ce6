"""Checks of values: what the operations skip without a word, reported row by row.

The operations never look at the values of index arrays; they skip what is out of range, and leave the content of a slot
that two live requests name unspecified. These checks do look, on the host or, through `jax.experimental.checkify`,
inside a jitted step, so they are for debugging and tests.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from jax_impl import checks
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

    Where an argument is traced, as inside `jit`, the list is empty and each kind of finding becomes a
    `checkify.check` instead: transform the jitted function with `checkify.checkify` and look at, or throw, its error.
    Its message lists the requests, filled up with -1 to the length of the batch.

    Args:
      state_indices, num_accepted_tokens, spec, window_rows, num_valid_tokens, null_slot, track_indices,
        track_num_tokens: as in `commit_conv_state`.

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
    checks.spec_argument(spec)
    problems = Problems()
    named = {name: value for name, value in given.items() if value is not None or name in list(given)[:2]}
    slots = checks.index_array(problems, "state_indices", named.pop("state_indices"), None)
    batch = None if slots is None else slots.shape[0]
    requests = batch or 0
    converted = {name: checks.index_array(problems, name, value, batch) for name, value in named.items()}
    converted = {"state_indices": slots, **converted}
    null = checks.null_slot_value(problems, null_slot)
    if (track_indices is None) != (track_num_tokens is None):
        missing = "track_indices" if track_indices is None else "track_num_tokens"
        problems.add(missing, "given together with the other track argument", "None")
    if window_rows is None and requests > spec.max_requests:
        problems.add("window_rows", f"given, or at most max_requests = {spec.max_requests} requests", requests)
    problems.raise_if_any()
    traced = any(isinstance(one, Tracer) for one in converted.values())
    arrays: dict[str, Any] = converted if traced else {name: np.asarray(one) for name, one in converted.items()}
    found = _findings(arrays, requests, null, spec, jnp if traced else np)
    if not traced:
        return [sentence for one in found for sentence in one.sentences()]
    for one in found:
        one.check()
    return []


@dataclasses.dataclass(frozen=True)
class _Finding:
    """One kind of finding: what is wrong with the requests of `mask`.

    Attributes:
      argument: its name.
      verb, consequence: the words around the value: "request 3 **has** 7**, more than …".
      mask: bool `[B]`. values: int `[B]`, what the argument holds. limit: int `[B]`, `{limit}` in the consequence.
      writers: mask of the requests that commit, where the finding is about slots named twice; None otherwise.
    """

    argument: str
    verb: str
    consequence: str
    mask: Any
    values: Any
    limit: Any = None
    writers: Any = None

    def sentences(self) -> list[str]:
        if self.verb in ("commit to slot", "snapshot to slot"):
            return self._by_slot()
        return [
            f"`{self.argument}`: request {request} {self.verb} {self.values[request]}"
            + self.consequence.format(limit=None if self.limit is None else self.limit[request])
            for request in np.flatnonzero(self.mask)
        ]

    def _by_slot(self) -> list[str]:
        """One sentence a slot instead of one a request."""
        sharers: dict[int, list[int]] = defaultdict(list)
        for request in np.flatnonzero(self.mask):
            sharers[int(self.values[request])].append(int(request))
        sentences = []
        for slot, requests in sorted(sharers.items()):
            others = ""
            if self.writers is not None:
                committed, slots = self.writers
                others = f", which {_requests(np.flatnonzero(committed & (slots == slot)))} commit to"
            sentences.append(f"`{self.argument}`: {_requests(requests)} {self.verb} {slot}{others}{self.consequence}")
        return sentences

    def check(self) -> None:
        requests = jnp.nonzero(self.mask, size=self.mask.shape[0], fill_value=-1)[0]
        values, limit = (
            None if array is None else jnp.where(requests >= 0, array[requests], -1)
            for array in (self.values, self.limit)
        )
        others = "" if self.writers is None else ", which others commit to"
        extra: dict[str, Any] = {} if limit is None else {"limit": limit}
        checkify.check(
            jnp.logical_not(self.mask.any()),
            f"`{self.argument}`: requests {{requests}} {self.verb} {{values}}{others}{self.consequence}",
            requests=requests,
            values=values,
            **extra,
        )


def _findings(
    arrays: dict[str, Any], requests: int, null_slot: int | None, spec: ConvCacheSpec, xp: Any
) -> list[_Finding]:
    """Every kind of finding, with masks computed by `xp`: NumPy on the host, jax.numpy when traced."""
    slots, accepted = arrays["state_indices"], arrays["num_accepted_tokens"]
    tokens, skipped = spec.num_draft_tokens, "; it is skipped."
    rows = arrays.get("window_rows", xp.arange(requests))
    valid = arrays.get("num_valid_tokens", xp.full(requests, tokens))
    in_buffer, in_range = (rows >= 0) & (rows < spec.max_requests), (valid >= 1) & (valid <= tokens)

    def meant(slots: Any) -> Any:
        """Requests that do not skip on purpose."""
        return slots >= 0 if null_slot is None else (slots >= 0) & (slots != null_slot)

    wanted = (accepted >= 1) & meant(slots)
    if "track_num_tokens" in arrays:
        wanted = wanted | ((arrays["track_num_tokens"] >= 1) & meant(arrays["track_indices"]))

    def of_set(slot_name: str, count_name: str) -> list[_Finding]:
        slots, counts = arrays[slot_name], arrays[count_name]
        intended = meant(slots)
        unread = (counts >= 1) & (counts <= tokens) & (counts > valid) & (valid >= 1)
        of_valid = f", more than its {{limit}} valid tokens{skipped}"
        return [
            _Finding(
                count_name,
                "has",
                f", more than num_draft_tokens = {tokens}{skipped}",
                (counts > tokens) & intended,
                counts,
            ),
            _Finding(count_name, "has", f", below 0{skipped}", (counts < 0) & intended, counts),
            _Finding(count_name, "has", of_valid, unread & intended, counts, limit=valid),
            _Finding(
                slot_name,
                "names slot",
                f", outside the pool of {spec.num_slots} slots{skipped}",
                (counts >= 1) & (slots >= spec.num_slots) & intended,
                slots,
            ),
        ]

    def writes(slots: Any, counts: Any) -> Any:
        live = in_buffer & in_range & (counts >= 1) & (counts <= valid) & (slots >= 0) & (slots < spec.num_slots)
        return live if null_slot is None else live & (slots != null_slot)

    unspecified = "; its content is unspecified."
    commits = writes(slots, accepted)
    shared = commits & (_occurrences(slots, slots, commits, xp) > 1)
    of_buffer = f", outside the buffer of {spec.max_requests} rows{skipped}"
    found = [
        *of_set("state_indices", "num_accepted_tokens"),
        _Finding("window_rows", "reads row", of_buffer, wanted & ~in_buffer, rows),
        _Finding("num_valid_tokens", "has", f", outside 1 to {tokens}{skipped}", wanted & ~in_range, valid),
        _Finding("state_indices", "commit to slot", unspecified, shared, slots),
    ]
    if "track_indices" not in arrays:
        return found
    tracks = arrays["track_indices"]
    snapshots = writes(tracks, arrays["track_num_tokens"])
    twice = snapshots & (_occurrences(tracks, tracks, snapshots, xp) > 1)
    collide = snapshots & (_occurrences(tracks, slots, commits, xp) > 0)
    return [
        *found,
        *of_set("track_indices", "track_num_tokens"),
        _Finding("track_indices", "snapshot to slot", unspecified, twice, tracks),
        _Finding("track_indices", "snapshot to slot", unspecified, collide, tracks, writers=(commits, slots)),
    ]


def _occurrences(wanted: Any, among: Any, live: Any, xp: Any) -> Any:
    """How often each of `wanted`, none of them negative where it matters, is among the live ones of `among`."""
    ordered = xp.sort(xp.where(live, among, -1))
    return xp.searchsorted(ordered, wanted, side="right") - xp.searchsorted(ordered, wanted, side="left")


def _requests(numbers: Iterable[int]) -> str:
    return f"requests {', '.join(map(str, numbers))}"
