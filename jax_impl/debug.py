"""Checks of values: what the operations skip without a word, reported row by row.

The operations never look at the values of index arrays; they skip what is out of range, and leave the content of a slot
that two live requests name unspecified. These checks do look, on the host or, through `jax.experimental.checkify`,
inside a jitted step, so they are for debugging and tests.

    check_verify    before a verify: slots, rows, links of trees, what a step resumes from
    check_commit    before a commit: slots, counts, paths, snapshots
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from jax_impl import checks
from jax_impl.layout import ConvCacheSpec, Problems

# How the consequences of findings end.
SKIPPED = "; it is skipped."
NO_TREE = f': a tree cannot live in the shared run (use storage "inputs" or "dense"){SKIPPED}'
UNSPECIFIED = "; its content is unspecified."


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
    accepted_path: Any = None,
) -> list[str]:
    """Everything about a commit's index arrays that is skipped or unspecified, one sentence each; [] when all is well.

    A count of 0, a negative slot and the null slot are the ways to skip on purpose and are not reported.

    Where an argument is traced, as inside `jit`, the list is empty and each kind of finding becomes a
    `checkify.check` instead: transform the jitted function with `checkify.checkify` and look at, or throw, its error.
    Its message lists the requests, filled up with -1 to the length of the batch.

    Args:
      state_indices, num_accepted_tokens, spec, window_rows, num_valid_tokens, null_slot, track_indices,
        track_num_tokens, accepted_path: as in `commit_conv_state`.

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
        "accepted_path": accepted_path,
    }
    problems = Problems()
    if (track_indices is None) != (track_num_tokens is None):
        missing = "track_indices" if track_indices is None else "track_num_tokens"
        problems.add(missing, "given together with the other track argument", "None")
    return _report(problems, given, ("state_indices", "num_accepted_tokens"), null_slot, spec, _of_commit)


def check_verify(
    state_indices: Any,
    *,
    spec: ConvCacheSpec,
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    parents: Any = None,
    resume_tokens: Any = None,
    resume_path: Any = None,
) -> list[str]:
    """Everything about a verify's index arrays that is skipped or unspecified, one sentence each; [] when all is well.

    A negative slot and the null slot are the ways to skip on purpose and are not reported. Traced arguments as in
    `check_commit`.

    Args:
      state_indices, spec, window_rows, num_valid_tokens, null_slot, parents, resume_tokens, resume_path: as in
        `causal_conv1d_verify`.

    Returns:
      Sentences that name the argument and the request.

    Raises:
      ValueError: lengths that the verify would refuse too.

    Example:
      >>> spec = ConvCacheSpec(1, 8, 4, 128, width=4, num_draft_tokens=4)
      >>> check_verify([3, 1], spec=spec, parents=[[-1, 0, 1, 2], [-1, 0, 0, 1]])  # doctest: +NORMALIZE_WHITESPACE
      ['`parents`: request 1 has link 0 at token 2: a tree cannot live in the shared run (use storage "inputs" or
       "dense"); it is skipped.']
    """
    given = {
        "state_indices": state_indices,
        "window_rows": window_rows,
        "num_valid_tokens": num_valid_tokens,
        "parents": parents,
        "resume_tokens": resume_tokens,
        "resume_path": resume_path,
    }
    problems = Problems()
    if resume_tokens is None and resume_path is not None:
        problems.add("resume_path", "None without resume_tokens", checks.given(resume_path))
    return _report(problems, given, ("state_indices",), null_slot, spec, _of_verify)


def _report(
    problems: Problems,
    given: dict[str, Any],
    needed: tuple[str, ...],
    null_slot: Any,
    spec: ConvCacheSpec,
    findings: Callable[["_Batch"], list["_Finding"]],
) -> list[str]:
    """Checks the arguments of one call and reports what `findings` finds: on the host as sentences, else by checkify.

    Args:
      problems: what is wrong with the call already.
      given: index arrays by name, None where they are not given; those of `needed` have to be.
    """
    checks.spec_argument(spec)
    named = {name: value for name, value in given.items() if value is not None or name in needed}
    of_tokens = ("parents", "resume_path", "accepted_path")
    slots = checks.index_array(problems, "state_indices", named.pop("state_indices"), None)
    batch = None if slots is None else slots.shape[0]
    sizes = {name: spec.num_draft_tokens if name in of_tokens else None for name in named}
    others = {name: checks.index_array(problems, name, value, batch, sizes[name]) for name, value in named.items()}
    converted, requests = {"state_indices": slots, **others}, batch or 0
    null = checks.null_slot_value(problems, null_slot)
    if "window_rows" not in named and requests > spec.max_requests:
        problems.add("window_rows", f"given, or at most max_requests = {spec.max_requests} requests", requests)
    problems.raise_if_any()
    traced = any(isinstance(one, Tracer) for one in converted.values())
    arrays: dict[str, Any] = converted if traced else {name: np.asarray(one) for name, one in converted.items()}
    found = findings(_Batch(arrays, requests, null, spec, jnp if traced else np))
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
      together: requests of one value are named in one sentence, because together they are the finding.
      others: mask, values and verb of the other requests that belong to it, where the finding is about two sets.
    """

    argument: str
    verb: str
    consequence: str
    mask: Any
    values: Any
    limit: Any = None
    together: bool = False
    others: Any = None

    def sentences(self) -> list[str]:
        if self.together:
            return self._by_value()
        return [
            f"`{self.argument}`: request {request} {self.verb} {self.values[request]}"
            + self.consequence.format(limit=None if self.limit is None else self.limit[request])
            for request in np.flatnonzero(self.mask)
        ]

    def _by_value(self) -> list[str]:
        """One sentence a slot or row instead of one a request."""
        sharers: dict[int, list[int]] = defaultdict(list)
        for request in np.flatnonzero(self.mask):
            sharers[int(self.values[request])].append(int(request))
        sentences = []
        for value, requests in sorted(sharers.items()):
            others = ""
            if self.others is not None:
                mask, values, verb = self.others
                others = f", which {_requests(np.flatnonzero(mask & (values == value)))} {verb}"
            sentences.append(f"`{self.argument}`: {_requests(requests)} {self.verb} {value}{others}{self.consequence}")
        return sentences

    def check(self) -> None:
        requests = jnp.nonzero(self.mask, size=self.mask.shape[0], fill_value=-1)[0]
        values, limit = (
            None if array is None else jnp.where(requests >= 0, array[requests], -1)
            for array in (self.values, self.limit)
        )
        others = "" if self.others is None else f", which others {self.others[2]}"
        extra: dict[str, Any] = {} if limit is None else {"limit": limit}
        checkify.check(
            jnp.logical_not(self.mask.any()),
            f"`{self.argument}`: requests {{requests}} {self.verb} {{values}}{others}{self.consequence}",
            requests=requests,
            values=values,
            **extra,
        )


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Index arrays of one call, and the arithmetic `xp` for their masks: NumPy on the host, jax.numpy when traced."""

    arrays: dict[str, Any]
    requests: int
    null_slot: int | None
    spec: ConvCacheSpec
    xp: Any

    @property
    def rows(self) -> Any:
        return self.arrays.get("window_rows", self.xp.arange(self.requests))

    @property
    def valid(self) -> Any:
        return self.arrays.get("num_valid_tokens", self.xp.full(self.requests, self.spec.num_draft_tokens))

    @property
    def in_buffer(self) -> Any:
        """Requests whose row and number of valid tokens are in range."""
        return (self.rows >= 0) & (self.rows < self.spec.max_requests) & self.valid_in_range

    @property
    def valid_in_range(self) -> Any:
        return (self.valid >= 1) & (self.valid <= self.spec.num_draft_tokens)

    def meant(self, slots: Any) -> Any:
        """Slots that do not skip on purpose."""
        return slots >= 0 if self.null_slot is None else (slots >= 0) & (slots != self.null_slot)

    def live(self, slots: Any) -> Any:
        return self.meant(slots) & (slots < self.spec.num_slots)

    def occurrences(self, wanted: Any, among: Any, live: Any) -> Any:
        """How often each of `wanted`, none of them negative where it matters, is among the live ones of `among`."""
        ordered = self.xp.sort(self.xp.where(live, among, -1))
        left, right = (self.xp.searchsorted(ordered, wanted, side=side) for side in ("left", "right"))
        return right - left

    def row_findings(self, verb: str, wanted: Any) -> list[_Finding]:
        """Rows and valid tokens out of range, of the requests that want something."""
        spec, outside = self.spec, (self.rows < 0) | (self.rows >= self.spec.max_requests)
        of_buffer = f", outside the buffer of {spec.max_requests} rows{SKIPPED}"
        of_valid = f", outside 1 to {spec.num_draft_tokens}{SKIPPED}"
        return [
            _Finding("window_rows", verb, of_buffer, wanted & outside, self.rows),
            _Finding("num_valid_tokens", "has", of_valid, wanted & ~self.valid_in_range, self.valid),
        ]

    def outside_the_pool(self, name: str, wanted: Any) -> _Finding:
        slots, of_pool = self.arrays[name], f", outside the pool of {self.spec.num_slots} slots{SKIPPED}"
        return _Finding(name, "names slot", of_pool, wanted & (slots >= self.spec.num_slots), slots)

    def path_findings(self, name: str, counts: Any, limit: Any, wanted: Any, what: str) -> tuple[list[_Finding], Any]:
        """Nodes of the first `counts` of a path that are no path, and a mask of the requests which that skips.

        `limit` is how many tokens there are to name, `what` says of what. Counts of wanted requests are in 1 … D.
        """
        if name not in self.arrays:
            return [], self.xp.zeros(self.requests, bool)
        path, xp = self.arrays[name], self.xp
        place, n = xp.arange(self.spec.num_draft_tokens)[None, :], counts[:, None]
        counted = wanted[:, None] & (place < n)
        if self.spec.storage == "sliding":
            skips, words = counted & (place == n - 1) & (path != place), f" at place {{limit}}{NO_TREE}"
            limit = counts - 1
        else:
            used = counted & (place >= n - (self.spec.state_columns if self.spec.storage == "inputs" else 1))
            skips, words = used & ((path < 0) | (path >= limit[:, None])), f", outside {what}{SKIPPED}"
        before = xp.concatenate([xp.full((self.requests, 1), -1, path.dtype), path[:, :-1]], axis=1)
        behind = counted & (path <= before) & ~skips.any(axis=1)[:, None]
        order = " behind node {limit}; on a path a parent comes before its child."
        found = [
            _Finding(name, "needs node", words, skips.any(axis=1), self._first(skips, path), limit),
            _Finding(name, "has node", order, behind.any(axis=1), *(self._first(behind, of) for of in (path, before))),
        ]
        return found, skips.any(axis=1)

    def link_findings(self, wanted: Any) -> tuple[list[_Finding], Any]:
        """Links of valid tokens that do not point backwards or branch where they must not, and a mask of both."""
        if "parents" not in self.arrays:
            return [], self.xp.zeros(self.requests, bool)
        links, token = self.arrays["parents"], self.xp.arange(self.spec.num_draft_tokens)[None, :]
        looked_at = wanted[:, None] & (token < self.valid[:, None])
        astray = looked_at & ((links < -1) | (links >= token))
        branch = looked_at & (links != token - 1) & ~astray.any(axis=1)[:, None] & (self.spec.storage == "sliding")
        words = f" at token {{limit}}, which names no earlier one{SKIPPED}", f" at token {{limit}}{NO_TREE}"
        token = self.xp.broadcast_to(token, links.shape)
        found = [
            _Finding("parents", "has link", text, mask.any(axis=1), self._first(mask, links), self._first(mask, token))
            for text, mask in zip(words, (astray, branch), strict=True)
        ]
        return found, (astray | branch).any(axis=1)

    def _first(self, mask: Any, of: Any) -> Any:
        """What `of` `[B, D]` has where the mask of a request is first true."""
        return self.xp.take_along_axis(of, mask.argmax(axis=1)[:, None], axis=1)[:, 0]


def _of_verify(batch: _Batch) -> list[_Finding]:
    """Every kind of finding about a verify."""
    spec, slots, rows = batch.spec, batch.arrays["state_indices"], batch.rows
    wanted, tokens = batch.meant(slots), spec.num_draft_tokens
    links, live = batch.link_findings(wanted & batch.valid_in_range)
    live = batch.live(slots) & batch.in_buffer & ~live
    found = [batch.outside_the_pool("state_indices", wanted), *batch.row_findings("writes row", wanted), *links]
    resume = batch.arrays.get("resume_tokens")
    if resume is not None:
        in_range = (resume >= 0) & (resume <= tokens)
        found.append(_Finding("resume_tokens", "has", f", outside 0 to {tokens}{SKIPPED}", wanted & ~in_range, resume))
        limit = batch.xp.full(batch.requests, tokens)
        what = "the {limit} tokens of the step before"
        paths, skipped = batch.path_findings("resume_path", resume, limit, wanted & in_range & (resume >= 1), what)
        found, live = found + paths, live & in_range & ~skipped
    shared = live & (batch.occurrences(rows, rows, live) > 1)
    found.append(_Finding("window_rows", "write row", UNSPECIFIED, shared, rows, together=True))
    if resume is None or spec.storage != "inputs":  # the pool is only read
        return found
    moved = live & (batch.occurrences(slots, slots, live) > 1)
    moved &= batch.occurrences(slots, slots, live & (resume >= 1)) > 0
    words = f", which is moved on{UNSPECIFIED}"
    return [*found, _Finding("state_indices", "resume from slot", words, moved, slots, together=True)]


def _of_commit(batch: _Batch) -> list[_Finding]:
    """Every kind of finding about a commit."""
    arrays, slots, valid = batch.arrays, batch.arrays["state_indices"], batch.valid
    tokens, meant, of_inputs = batch.spec.num_draft_tokens, batch.meant, batch.spec.storage == "inputs"

    def of_set(slot_name: str, count_name: str, purpose: str) -> tuple[list[_Finding], list[_Finding], Any]:
        """Findings about one set, those about its path, and the requests of it that write."""
        slots, counts = arrays[slot_name], arrays[count_name]
        intended = meant(slots)
        unread = (counts >= 1) & (counts <= tokens) & (counts > valid) & (valid >= 1)
        of_tokens = f", more than num_draft_tokens = {tokens}{SKIPPED}"
        of_valid = f", more than its {{limit}} valid tokens{SKIPPED}"
        found = [
            _Finding(count_name, "has", of_tokens, (counts > tokens) & intended, counts),
            _Finding(count_name, "has", f", below 0{SKIPPED}", (counts < 0) & intended, counts),
            _Finding(count_name, "has", of_valid, unread & intended, counts, limit=valid),
            batch.outside_the_pool(slot_name, (counts >= 1) & intended),
        ]
        counted = batch.valid_in_range & (counts >= 1) & (counts <= valid)
        what = f"its {{limit}} valid tokens{purpose}"
        paths, skipped = batch.path_findings("accepted_path", counts, valid, counted & intended, what)
        return found, paths, batch.in_buffer & counted & batch.live(slots) & ~skipped

    accepted, paths, commits = of_set("state_indices", "num_accepted_tokens", "")
    wanted = (arrays["num_accepted_tokens"] >= 1) & meant(slots)
    if "track_indices" in arrays:
        wanted = wanted | ((arrays["track_num_tokens"] >= 1) & meant(arrays["track_indices"]))
    shared = commits & (batch.occurrences(slots, slots, commits) > 1)
    twice = _Finding("state_indices", "commit to slot", UNSPECIFIED, shared, slots, together=True)
    found = [*accepted, *batch.row_findings("reads row", wanted), *paths, twice]
    if "track_indices" not in arrays:
        return found
    tracks = arrays["track_indices"]
    tracked, paths, snapshots = of_set("track_indices", "track_num_tokens", ", for its snapshot")
    found += [*tracked, *paths]
    if of_inputs:
        words, sourceless = f", which holds no state{SKIPPED}", snapshots & ~batch.live(slots)
        found.append(_Finding("track_indices", "makes its snapshot of slot", words, sourceless, slots))
        snapshots = snapshots & ~sourceless
    twice = snapshots & (batch.occurrences(tracks, tracks, snapshots) > 1)
    collide = snapshots & (batch.occurrences(tracks, slots, commits) > 0)
    to_slot = functools.partial(
        _Finding, "track_indices", "snapshot to slot", UNSPECIFIED, values=tracks, together=True
    )
    found += [to_slot(mask=twice), to_slot(mask=collide, others=(commits, slots, "commit to"))]
    if of_inputs:
        written = batch.occurrences(slots, slots, commits) - batch.xp.where(commits, 1, 0)  # by other requests
        words = f", which another request commits to{UNSPECIFIED}"
        found.append(_Finding("track_indices", "makes its snapshot of slot", words, snapshots & (written > 0), slots))
        # Another request's slot, which it does not commit to but reads.
        reads = snapshots & ~commits
        elsewhere = batch.occurrences(tracks, slots, reads) - batch.xp.where(reads & (tracks == slots), 1, 0)
        found.append(to_slot(mask=snapshots & (elsewhere > 0), others=(reads, slots, "make theirs of")))
    return found


def _requests(numbers: Iterable[int]) -> str:
    return f"requests {', '.join(map(str, numbers))}"
