"""Steps that resume instead of being committed, and trees, are one-token decoding too: bit for bit within a backend.

A pool that is decoded one token at a time runs beside the speculative one, which is only committed when a sequence
leaves, for a snapshot, and at the end. What a step must not read is NaN.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_impl.layout import ConvCacheSpec
from tests import adapters, definition, histories
from tests.adapters import Path
from tests.cases import assert_same_bits, poison, spec_of, values

REQUESTS = 4
SIZES: dict[str, Any] = {"num_layers": 1, "num_slots": 13, "max_requests": 7}
# (geometry, whether the caller keeps x of every step in the buffer, steps of a slow path)
CASES = {
    "sliding": (spec_of(4, 4, **SIZES), False, 3),
    "sliding-channel_major": (
        spec_of(3, 3, dtype="float16", axis_order="channel_major", state_len=3, **SIZES),
        False,
        0,
    ),
    "dense": (spec_of(5, 2, dtype="float32", storage="dense", **SIZES), False, 0),
    "inputs": (spec_of(4, 4, storage="inputs", **SIZES), False, 3),
    "inputs-channel_major": (
        spec_of(5, 3, dtype="float16", axis_order="channel_major", storage="inputs", state_len=5, **SIZES),
        False,
        0,
    ),
    "kept": (spec_of(4, 4, dtype="float32", storage="inputs", **SIZES), True, 0),
    "kept-channel_major": (spec_of(2, 3, storage="inputs", axis_order="channel_major", **SIZES), True, 0),
}
TREES = {
    "dense": (spec_of(4, 4, storage="dense", axis_order="channel_major", **SIZES), 0),
    "inputs": (spec_of(4, 4, dtype="float32", storage="inputs", **SIZES), 3),
    "inputs-channel_major": (spec_of(3, 5, storage="inputs", axis_order="channel_major", **SIZES), 0),
}


def runs_long(name: str) -> bool:
    return name in adapters.FAST or name.endswith("gpu")


def on_paths(cases: dict[str, Any], *names: str) -> pytest.MarkDecorator:
    """Every case on the paths that are fast, those with a few steps for slow paths on all of them."""
    every = [
        pytest.param(name, *case, marks=marks, id=f"{name}-{key}")
        for name, marks in adapters.PATHS.items()
        for key, case in cases.items()
        if runs_long(name) or case[-1]
    ]
    return pytest.mark.parametrize(("path", *names), every, indirect=["path"])


def ints(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


@dataclasses.dataclass
class Runs:
    """The two pools, and what a step of the speculative one needs of the step before it.

    Attributes:
      pool: of the steps that resume. by_token: decoded one token at a time; the same sequences in the same slots.
      buffers: what the last step left, and the one before it where the caller keeps x in two that take turns.
      slots, rows: of each request. counts, paths: its tokens of the last step, 0 where its slot is up to date.
    """

    path: Path
    spec: ConvCacheSpec
    weight: np.ndarray
    pool: np.ndarray
    by_token: np.ndarray
    buffers: list[np.ndarray]
    slots: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    paths: np.ndarray
    valid: np.ndarray

    @property
    def common(self) -> dict[str, Any]:
        return {"spec": self.spec, "window_rows": self.rows}

    def decode(self, x: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """One token after another along `nodes` `[B, D]` until -1: y `[B, D]` by place, and the pool after each."""
        pools, y = [self.by_token], np.zeros_like(x)
        for place in range(nodes.shape[1]):
            if not (nodes[:, place:] >= 0).any():
                break
            running = np.where(nodes[:, place] >= 0, self.slots, -1).astype(np.int32)
            token = x[np.arange(len(x)), nodes[:, place].clip(0)]
            y[:, place], pool = self.path.update(
                token, pools[-1], self.weight, spec=self.spec, state_indices=running, layer=0
            )
            pools.append(pool)
        return y, pools

    def verify(self, x: np.ndarray, kept: bool, valid: np.ndarray, live: np.ndarray, **options: Any) -> np.ndarray:
        """A step of the live requests, which resume from what they have; the others are padding. Returns y."""
        options |= {"state_indices": np.where(live, self.slots, -1).astype(np.int32), "layer": 0} | self.common
        own = x
        if kept:
            own, fresh = None, self.buffers.pop(0).copy()
            options["resume_windows"] = self.buffers[0]
            row = definition.by_column(fresh, self.spec)
            row[:] = definition.bits(poison((), self.spec.dtype))
            for request, count in enumerate(valid):
                row[0, self.rows[request], :count] = definition.bits(x[request, :count])
            self.buffers.append(fresh)
        before = self.pool
        y, self.buffers[-1], self.pool = self.path.verify(
            own, before, self.buffers[-1], self.weight, num_valid_tokens=valid, resume_tokens=self.counts, **options
        )
        if self.spec.storage != "inputs":
            assert_same_bits(self.pool, before, "the pool, which such a step only reads")
        return y

    def committed(self, counts: np.ndarray, **track: Any) -> np.ndarray:
        """The pool after a commit of `counts` tokens of the last step."""
        track |= {"accepted_path": self.paths} if (self.paths >= 0).any() else {}
        return self.path.commit(
            self.pool, self.buffers[-1], self.slots, counts, num_valid_tokens=self.valid, **track, **self.common
        )

    def settle(self, leaving: np.ndarray) -> None:
        """Commits requests that leave, or all at the end; their slots are up to date then."""
        self.pool = self.committed(np.where(leaving, self.counts, 0).astype(np.int32))
        self.counts = np.where(leaving, 0, self.counts).astype(np.int32)
        slots = self.slots[leaving]
        assert_same_bits(self.pool[:, slots], self.by_token[:, slots], "slots of sequences that leave")

    def snapshot(self, slot: int, request: int) -> None:
        """Copies a request's state, which is not committed itself, to another slot, in both pools."""
        counts, tracks = np.zeros(len(self.slots), np.int32), np.full(len(self.slots), -1, np.int32)
        counts[request], tracks[request] = self.counts[request], slot
        self.pool = self.committed(np.zeros_like(counts), track_indices=tracks, track_num_tokens=counts)
        self.by_token = self.by_token.copy()
        self.by_token[:, slot] = self.by_token[:, self.slots[request]]
        assert_same_bits(self.pool[:, slot], self.by_token[:, slot], "snapshot")

    def join(self, request: int, slot: int, seed: int) -> None:
        """A sequence that takes over a request's place in the batch, in a slot and with a state of its own."""
        self.slots = self.slots.copy()
        self.slots[request], self.counts[request] = slot, 0
        state = values(self.pool[:, slot].shape, self.spec.dtype, seed)
        self.pool, self.by_token = self.pool.copy(), self.by_token.copy()
        self.pool[:, slot] = self.by_token[:, slot] = state


def start(path: Path, spec: ConvCacheSpec, rng: np.random.Generator, buffers: int) -> Runs:
    pool, weight = values(spec.state_shape, spec.dtype, 2), values((128, spec.width), "float32", 1)
    slots, rows = (rng.permutation(size)[:REQUESTS].astype(np.int32) for size in (spec.num_slots, spec.max_requests))
    return Runs(
        path, spec, weight, pool, pool, [poison(spec.windows_shape, spec.dtype) for _ in range(buffers)], slots, rows,
        counts=np.zeros(REQUESTS, np.int32), paths=np.full((REQUESTS, spec.num_draft_tokens), -1, np.int32),
        valid=np.full(REQUESTS, spec.num_draft_tokens, np.int32),
    )  # fmt: skip


@on_paths(CASES, "spec", "kept", "few")
def test_fifty_steps_without_a_commit(path: Path, spec: ConvCacheSpec, kept: bool, few: int) -> None:
    """y of every token of every step, and the pool wherever it says something, are those of one-token decoding.

    Requests sit steps out, leave with a commit and hand their slot on, and have snapshots made, of which one is a
    sequence of its own later. Rows of inputs may accept nothing; the others forget the state before the step then.
    """
    rng, tokens = np.random.default_rng(7), spec.num_draft_tokens
    runs, events = start(path, spec, rng, 2 if kept else 1), set()
    for step in range(50 if runs_long(path.name) else few):
        free = [slot for slot in rng.permutation(spec.num_slots).tolist() if slot not in runs.slots]
        leaving, request = rng.integers(0, 6, REQUESTS) == 0, int(rng.integers(REQUESTS))
        if step and not leaving[request] and runs.counts[request] and rng.integers(2):
            runs.snapshot(free.pop(), request)
            events.add("snapshot")
        if step and leaving.any():
            runs.settle(leaving)
            for one in np.flatnonzero(leaving):
                runs.join(int(one), [free[0], int(runs.slots[one])][int(rng.integers(2))], 100 + step)
                free = [slot for slot in free if slot not in runs.slots]
                events.add("join")
        live = rng.integers(0, 5, REQUESTS) > 0 if not kept else np.ones(REQUESTS, bool)
        x = values((REQUESTS, tokens, 128), spec.dtype if kept else "float32", 1000 + step)
        valid = rng.integers(1, tokens + 1, REQUESTS).astype(np.int32)
        least = 0 if spec.storage == "inputs" else 1
        accepted = rng.integers(least, valid + 1).astype(np.int32)
        events |= {("accepted", int(n)) for n in accepted[live]} | {("resumed", int(n)) for n in runs.counts[live]}
        y = runs.verify(x, kept, valid, live)
        if spec.storage == "inputs":
            slots = runs.slots[live]
            assert_same_bits(runs.pool[:, slots], runs.by_token[:, slots], f"slots that step {step} moves on")
        computed = (np.arange(tokens) < valid[:, None]) & live[:, None]
        alone, pools = runs.decode(x, np.where(computed, np.arange(tokens), -1))
        assert_same_bits(y[computed], alone[computed], f"y of step {step}")
        assert not y[~computed].any()
        runs.by_token = runs.by_token.copy()
        for one in np.flatnonzero(live):
            runs.by_token[:, runs.slots[one]] = pools[accepted[one]][:, runs.slots[one]]
        runs.counts = np.where(live, accepted, runs.counts).astype(np.int32)
        runs.valid = np.where(live, valid, runs.valid).astype(np.int32)
    runs.settle(np.ones(REQUESTS, bool))
    assert_same_bits(runs.pool, runs.by_token, "the whole pool after a last commit")
    if runs_long(path.name):
        assert {"snapshot", "join"} <= events
        assert events >= {(what, n) for what in ("accepted", "resumed") for n in range(least, tokens + 1)}


@on_paths(TREES, "spec", "few")
def test_trees_equal_one_token_decoding_along_the_path(path: Path, spec: ConvCacheSpec, few: int) -> None:
    """Random trees, a random accepted node each: y along its path, and the pool, whether steps resume or commit."""
    rng, tokens = np.random.default_rng(3), spec.num_draft_tokens
    runs, branched = start(path, spec, rng, 1), 0
    everyone, committed = np.ones(REQUESTS, bool), set()
    for step in range(20 if runs_long(path.name) else few):
        x = values((REQUESTS, tokens, 128), "float32", 1000 + step)
        links = np.stack([rng.integers(-1, np.arange(tokens)) for _ in range(REQUESTS)]).astype(np.int32)
        links[0] = np.arange(tokens) - 1
        valid = rng.integers(1, tokens + 1, REQUESTS).astype(np.int32)
        nodes = rng.integers(-1 if spec.storage == "inputs" else 0, valid)
        taken = [histories.ancestors(int(node), of.tolist()) for node, of in zip(nodes, links, strict=True)]
        branched += sum(one != list(range(len(one))) for one in taken)
        path_before = {"resume_path": runs.paths} if (runs.paths >= 0).any() else {}
        y = runs.verify(x, False, valid, everyone, parents=links, **path_before)
        runs.counts = ints(*map(len, taken))
        runs.valid, runs.paths = valid, np.full((REQUESTS, tokens), -1, np.int32)
        for request, one in enumerate(taken):
            runs.paths[request, : len(one)] = one
        alone, pools = runs.decode(x, runs.paths)
        for request, one in enumerate(taken):
            assert_same_bits(y[request, one], alone[request, : len(one)], f"y along the path in step {step}")
        runs.by_token = pools[-1]
        if rng.integers(3) == 0:
            runs.settle(everyone)
            committed.add(step)
        elif runs.counts[1]:
            runs.snapshot(next(slot for slot in range(spec.num_slots) if slot not in runs.slots), 1)
    runs.settle(everyone)
    assert_same_bits(runs.pool, runs.by_token, "the whole pool after a last commit")
    assert branched and (not runs_long(path.name) or 3 < len(committed) < 17)
