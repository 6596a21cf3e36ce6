"""Storage "inputs", draft trees and steps that resume without a commit, on every path against naive loops.

Everything that a call must not read is a NaN with a payload: the loops record what they read, the rest is overwritten.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import path_to_node
from jax_impl.layout import AXIS_ORDERS, STORAGES, ConvCacheSpec
from tests import definition, histories
from tests.adapters import FAST, PATHS, Path
from tests.cases import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    Batch,
    assert_same_bits,
    assert_y_close,
    mixed_batch,
    poison,
    spec_id,
    spec_of,
    unique_bits,
    values,
)

# (K, D, S - (K-1), channels): old columns left over (D < S), none left over, K state columns, more than one block
SIZES = ((4, 3, 0, 128), (5, 2, 1, 128), (2, 3, 0, 128), (3, 5, 1, 640))
SPECS = [
    spec_of(
        width, tokens, conv_dim=dim, dtype=DTYPES[(i + j) % 3], axis_order=order, storage=storage,
        state_len=width - 1 + extra, max_requests=tokens + 22, num_slots=tokens + 25,
    )
    for i, (width, tokens, extra, dim) in enumerate(SIZES)
    for j, (order, storage) in enumerate((order, storage) for order in AXIS_ORDERS for storage in STORAGES)
    if storage == "inputs" or i == 0
]  # fmt: skip
KINDS = ("chain", "kept", "tree", "resume", "resume-tree", "resume-kept")
# An interpreter takes the first size alone, in every form.
CASES = [
    (name, spec, marks) for name, marks in PATHS.items() for spec in (SPECS if name in FAST or marks else SPECS[:6])
]
of_any_storage = pytest.mark.parametrize(
    ("path", "spec"), [pytest.param(*one, marks=marks) for *one, marks in CASES], indirect=["path"], ids=spec_id
)
of_any_kind = pytest.mark.parametrize(
    ("path", "spec", "kind"),
    [
        pytest.param(name, spec, kind, marks=marks)
        for name, spec, marks in CASES
        for kind in KINDS
        if "kept" not in kind or spec.storage == "inputs"
    ],
    indirect=["path"],
    ids=spec_id,
)


def random_links(rng: np.random.Generator, batch: int, spec: ConvCacheSpec) -> np.ndarray:
    """A random tree a request, every third one a chain."""
    tokens = np.arange(spec.num_draft_tokens)
    links = rng.integers(-1, np.broadcast_to(tokens, (batch, len(tokens))))
    links[::3] = tokens - 1
    return links.astype(np.int32)


def random_paths(rng: np.random.Generator, counts: np.ndarray, spec: ConvCacheSpec) -> np.ndarray:
    """A path of `counts` nodes a request, -1 behind it; every third one that of a chain."""
    tokens = spec.num_draft_tokens
    paths = np.full((len(counts), tokens), -1, np.int32)
    for request, count in enumerate(counts.clip(0, tokens)):
        nodes = np.arange(tokens) if request % 3 == 0 else np.sort(rng.permutation(tokens))
        chosen = np.arange(count) if request % 3 == 0 else np.sort(rng.choice(nodes, count, replace=False))
        paths[request, :count] = chosen
    return paths


def spoil(rng: np.random.Generator, array: np.ndarray, outside: tuple[int, ...]) -> None:
    """Puts one value that must not be followed into every fourth row, one after the other."""
    for row in range(3, len(array), 4):
        array[row, rng.integers(array.shape[1])] = outside[row // 4 % len(outside)]


def nothing_seen(spec: ConvCacheSpec) -> tuple[np.ndarray, np.ndarray]:
    by_column = dataclasses.replace(spec, axis_order="time_major")
    return np.zeros(by_column.state_shape[:3], np.bool_), np.zeros(by_column.windows_shape[:-1], np.bool_)


def poisoned(array: np.ndarray, seen: np.ndarray, spec: ConvCacheSpec) -> np.ndarray:
    """The array with NaN in every column that is not seen."""
    array = array.copy()
    definition.by_column(array, spec)[~seen] = definition.bits(poison((), spec.dtype))
    return array


def live_otherwise(spec: ConvCacheSpec, batch: Batch, links: np.ndarray | None) -> np.ndarray:
    """Requests that a verify from the slots does not skip."""
    live = (batch.slots >= 0) & (batch.slots < spec.num_slots) & (batch.valid >= 1)
    live &= (batch.rows >= 0) & (batch.rows < spec.max_requests) & (batch.valid <= spec.num_draft_tokens)
    if links is not None:
        live &= np.asarray(
            [histories.links_hold(of.tolist(), v, spec) for of, v in zip(links, batch.valid, strict=True)]
        )
    return live if batch.null_slot is None else live & (batch.slots != batch.null_slot)


def given(batch: Batch) -> dict[str, Any]:
    options = {"window_rows": batch.given("rows"), "num_valid_tokens": batch.given("valid")}
    return {"null_slot": batch.null_slot} | {name: one for name, one in options.items() if one is not None}


@of_any_kind
def test_verify(path: Path, spec: ConvCacheSpec, kind: str) -> None:
    """All reasons to skip mixed; x given or kept in the buffer, a chain or trees, from the slot or resumed."""
    seed = SPECS.index(spec)
    rng = np.random.default_rng(seed)
    explicit = [("rows", "valid"), ("valid",), ("rows",)][(seed + KINDS.index(kind)) % 3]
    batch = mixed_batch(spec, seed=seed, explicit=explicit, null_slot=[0, None][seed % 2])
    size, tokens = len(batch.slots), spec.num_draft_tokens
    extra: dict[str, Any] = {}
    if "tree" in kind:
        extra["parents"] = random_links(rng, size, spec)
        spoil(rng, extra["parents"], (tokens - 1, tokens, -2, INT32_MIN, INT32_MAX))
        extra["parents"][np.arange(tokens) >= batch.valid[:, None]] = tokens  # which says nothing
    if "resume" in kind:  # every count among requests that are live otherwise, then counts that skip
        counts = [*range(tokens + 1), -1, tokens + 1, INT32_MIN, INT32_MAX]
        order = np.argsort(~live_otherwise(spec, batch, extra.get("parents")), kind="stable")
        extra["resume_tokens"] = np.empty(size, np.int32)
        extra["resume_tokens"][order] = np.resize(counts, size)
        if spec.storage == "inputs":  # the slot moves on: of two requests that name it, one at most may
            first = np.unique(batch.slots, return_index=True)[1]
            extra["resume_tokens"][np.setdiff1d(np.arange(size), first)] = -1
    if kind == "resume-tree":
        extra["resume_path"] = random_paths(rng, extra["resume_tokens"], spec)
        spoil(rng, extra["resume_path"], (tokens, -2, INT32_MIN, INT32_MAX))
    x = values((size, tokens, spec.conv_dim), spec.dtype if "kept" in kind else DTYPES[seed % 3], seed)
    pool, windows = values(spec.state_shape, spec.dtype, 1), values(spec.windows_shape, spec.dtype, 2)
    previous = values(spec.windows_shape, spec.dtype, 3) if kind == "resume-kept" else None
    weight = values((spec.conv_dim, spec.width), "float32", 4)
    bias = values((spec.conv_dim,), "float32", 5) if seed % 2 else None
    layer = seed % spec.num_layers
    model: dict[str, Any] = {
        "spec": spec, "slots": batch.slots, "rows": batch.rows, "valid": batch.valid, "null_slot": batch.null_slot,
        "layer": layer, "activation": ["silu", None][seed // 2 % 2], "previous": previous,
        "parents": extra.get("parents"), "resume": extra.get("resume_tokens"), "resume_path": extra.get("resume_path"),
    }  # fmt: skip
    own = None if "kept" in kind else x
    seen = nothing_seen(spec)
    _, live = histories.verify(own, pool.copy(), windows.copy(), weight, bias, **model, number=np.float64, seen=seen)
    assert live, "no request is live"
    if spec.storage == "inputs" and "resume" in kind:
        assert len(set(batch.slots[live])) == len(live), "a slot is written twice"
    if "resume" in kind:
        resumed = {int(extra["resume_tokens"][b]) for b in live}
        every = set(range(tokens + 1)) if "tree" not in kind else {0} if spec.storage == "sliding" else {0, 1}
        assert resumed >= every
    computed = np.zeros((size, tokens), np.bool_)
    computed[live] = np.arange(tokens) < batch.valid[live, None]
    pool = poisoned(pool, seen[0], spec)
    if previous is not None:
        model["previous"] = extra["resume_windows"] = poisoned(previous, seen[1], spec)
    if own is None:
        kept = np.zeros_like(seen[1])
        kept[layer, batch.rows[live]] = computed[live]
        windows = poisoned(windows, kept, spec)
    else:
        x[~computed] = poison((), x.dtype.name)
        windows = (
            poisoned(windows, seen[1], spec) if "resume" in kind else unique_bits(spec.windows_shape, spec.dtype, 6)
        )
    options = extra | given(batch) | {"spec": spec, "state_indices": batch.slots, "layer": layer}
    y, buffer, pool_after = path.verify(own, pool, windows, weight, bias, **options, activation=model["activation"])
    expected_pool, expected = pool.copy(), windows.copy()
    exact, _ = histories.verify(own, expected_pool, expected, weight, bias, **model, number=np.float64)
    assert_same_bits(buffer, expected, "conv_windows")
    assert_same_bits(pool_after, expected_pool, "conv_state")
    assert_same_bits(y[~computed], np.zeros_like(y[~computed]), "y of what is skipped")
    positive = [None if array is None else np.abs(array) for array in (own, pool, windows, weight, bias)]
    positive_model = model | {"activation": None, "previous": None if previous is None else np.abs(model["previous"])}
    magnitude, _ = histories.verify(*positive, **positive_model, number=np.float64)
    assert_y_close(y[computed], exact[computed], magnitude[computed], spec)


@pytest.mark.parametrize("with_path", [False, True], ids=["chain", "path"])
@pytest.mark.parametrize("tracked", [False, True], ids=["accepted", "tracked"])
@of_any_storage
def test_commit_and_gather(path: Path, spec: ConvCacheSpec, tracked: bool, with_path: bool) -> None:
    """Every count, path and reason to skip; the snapshot too is made of the slot as it was."""
    seed = SPECS.index(spec) + 100 * tracked + 200 * with_path
    rng = np.random.default_rng(seed)
    explicit = [("rows", "valid"), ("valid",), ("rows",)][seed % 3]
    spec = dataclasses.replace(spec, num_slots=2 * spec.num_slots)  # room for snapshots beside all slots in use
    batch = mixed_batch(spec, seed=seed, explicit=explicit, null_slot=[0, None][seed % 2])
    size, tokens = len(batch.slots), spec.num_draft_tokens
    sets = [(batch.slots, batch.accepted)]
    extra: dict[str, Any] = {}
    if tracked:
        free = rng.permutation(np.setdiff1d(np.arange(1, spec.num_slots), batch.slots))[:size]
        counts = rng.permutation(np.resize(np.asarray([*range(tokens + 1), -1, tokens + 1]), size))
        counts[np.isin(batch.slots, [one for one in batch.slots if (batch.slots == one).sum() > 1])] = (
            0  # not named twice
        )
        free[::5] = np.resize([-1, spec.num_slots, INT32_MIN, INT32_MAX], len(free[::5]))
        sets.append((free.astype(np.int32), counts.astype(np.int32)))
        extra |= {"track_indices": sets[1][0], "track_num_tokens": sets[1][1]}
    if with_path:
        paths = extra["accepted_path"] = random_paths(rng, batch.accepted, spec)
        everything = live_otherwise(spec, batch, None) & (batch.accepted == tokens) & (batch.valid == tokens)
        kept = paths[everything]  # of all tokens, which is a chain
        spoil(rng, paths, (tokens, -2, INT32_MIN, INT32_MAX))
        paths[everything] = kept
    nodes = extra.get("accepted_path")
    model: dict[str, Any] = {
        "spec": spec, "rows": batch.rows, "valid": batch.valid, "null_slot": batch.null_slot, "path": nodes
    }  # fmt: skip
    pool, windows = unique_bits(spec.state_shape, spec.dtype, seed), unique_bits(spec.windows_shape, spec.dtype, 7)
    seen = nothing_seen(spec)
    histories.commit(pool.copy(), windows, sets, **model, seen=seen)
    unread = poisoned(windows, seen[1], spec)
    got = path.commit(pool, unread, batch.slots, batch.accepted, spec=spec, **extra, **given(batch))
    expected = pool.copy()
    histories.commit(expected, unread, sets, **model)
    assert (definition.bits(expected) != definition.bits(pool)).any(), "nothing is live"
    assert_same_bits(got, expected, "conv_state")
    if tracked:
        return
    # gather: as a commit into slots of its own; of inputs, of the slots too
    options: dict[str, Any] = {"spec": spec, "window_rows": batch.given("rows"), "accepted_path": nodes}
    if spec.storage == "inputs":
        options |= {"conv_state": pool, "state_indices": batch.slots, "null_slot": batch.null_slot}
    found = path.gather(windows, batch.accepted, **options)
    everyone = np.full(size, tokens)
    for request, (slot, n, row) in enumerate(zip(batch.slots, batch.accepted, batch.rows, strict=True)):
        live = histories.is_state(int(n), None if nodes is None else nodes[request], everyone[request], spec)
        live &= 0 <= row < spec.max_requests
        live &= spec.storage != "inputs" or (0 <= slot < spec.num_slots and slot != batch.null_slot)
        window = np.zeros((spec.num_layers, *spec.window_shape), spec.dtype)
        if live:
            rows, slots = definition.by_column(windows, spec), definition.by_column(pool, spec)
            for layer in range(spec.num_layers):
                definition.by_column(window, spec)[layer] = histories.state_after(
                    int(n), None if nodes is None else nodes[request],
                    slots[layer, slot] if spec.storage == "inputs" else None, rows[layer, row], spec,
                )  # fmt: skip
        assert_same_bits(np.ascontiguousarray(found[:, request]), window, f"window of request {request}")


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_path_to_node(tokens: int) -> None:
    """By walking up the links; where one of them leads nowhere, nothing is accepted."""
    rng, size = np.random.default_rng(tokens), 200
    links = rng.integers(-1, np.broadcast_to(np.arange(tokens), (size, tokens))).astype(np.int32)
    spoil(rng, links, (tokens - 1, tokens, -2, INT32_MIN, INT32_MAX))
    nodes = rng.integers(-1, tokens, size).astype(np.int32)
    nodes[:4] = [-2, tokens, INT32_MIN, INT32_MAX]
    paths, counts = (np.asarray(one) for one in path_to_node(jnp.asarray(links), jnp.asarray(nodes)))
    refused = 0
    for parents, node, path, count in zip(links.tolist(), nodes.tolist(), paths.tolist(), counts.tolist(), strict=True):
        line: list[int] = [node] if 0 <= node < tokens else []
        while line and line[0] >= 0:
            above = parents[line[0]]
            line = [above, *line] if -1 <= above < line[0] else []
        expected = line[1:]
        refused += 0 <= node < tokens and not expected
        assert count == len(expected)
        assert path[:count] == expected
        assert count == 0 or path[count:] == [-1] * (tokens - count)
    assert refused
