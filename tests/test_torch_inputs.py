"""torch_ref's inputs storage, draft trees and steps without a commit, against loops over NumPy integers.

The loops are the rules as they are written down: a state is the last S of [old state, inputs along a path]. On a
machine without CUDA the kernels run in Triton's interpreter; `-m gpu` runs the same tests on compiled kernels.
"""

import dataclasses
import doctest
import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_ref  # noqa: E402
from tests import adapters  # noqa: E402
from tests.adapters import Path  # noqa: E402
from tests.cases import INT32_MAX, INT32_MIN, assert_same_bits, assert_y_close, poison, unique_bits, values  # noqa: E402
from tests.definition import bits  # noqa: E402
from tests.torch_cases import array_of, commit_loops, how, on_torch, tensor_of  # noqa: E402
from torch_ref import ConvCacheSpec  # noqa: E402
from torch_ref.layout import STORAGES  # noqa: E402

both_orders = pytest.mark.parametrize("order", ["time_major", "channel_major"])
all_storages = pytest.mark.parametrize("storage", STORAGES)
LIMITS = (INT32_MIN, INT32_MAX)
NULL = 2  # the null slot of these batches


def spec_of(storage: Any = "inputs", order: Any = "time_major", **changes: Any) -> ConvCacheSpec:
    fields: dict[str, Any] = {"num_layers": 2, "num_slots": 40, "max_requests": 37, "conv_dim": 5}
    fields |= {"width": 4, "num_draft_tokens": 3, "dtype": "float32"} | changes
    return ConvCacheSpec(axis_order=order, storage=storage, **fields)


def changed(spec: ConvCacheSpec, **changes: Any) -> ConvCacheSpec:
    return dataclasses.replace(spec, **changes)


def by_column(array: np.ndarray, spec: ConvCacheSpec) -> np.ndarray:
    """Integers, with (column, channel) last; the same memory."""
    return bits(array if spec.axis_order == "time_major" else array.swapaxes(-1, -2))


SIZES = [
    # width, tokens, channels, dtype of the state, of x, extra state column
    (3, 4, 5, "float32", "float32", 1),
    (4, 3, 130, "bfloat16", "bfloat16", 0),
    (2, 3, 1, "bfloat16", "float32", 0),
    (5, 2, 7, "float32", "bfloat16", 1),
    (4, 1, 3, "bfloat16", "bfloat16", 0),
    (7, 6, 33, "float16", "float16", 0),
    (4, 7, 300, "float32", "float16", 0),
]


def size_id(value: Any) -> str | None:
    return "K{}-D{}-{}-{}-{}-{}".format(*value) if isinstance(value, tuple) else None


def on_sizes(names: str, cases: list[Any], few: list[Any]) -> pytest.MarkDecorator:
    """Every path, size and case; in the interpreter, where a batch takes seconds, one size of few cases by default.

    `-m thorough` adds the other sizes but the last two: two minutes of two processes.
    """
    every = []
    for (path, marks), size, case in itertools.product(adapters.PATHS.items(), SIZES, cases):
        is_interpreted = path == "torch-triton"
        if path.startswith("torch") and not (is_interpreted and size in SIZES[-2:]):
            is_long = is_interpreted and (size is not SIZES[0] or case not in few)
            every.append(pytest.param(path, size, *case, marks=(*marks, *(is_long * (pytest.mark.thorough,)))))
    return pytest.mark.parametrize(f"path, size, {names}", every, indirect=["path"], ids=size_id)


# --- the rules --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """One request: of the step before `resume` tokens along `path` were accepted, this one has `valid` tokens."""

    slot: int
    row: int
    valid: int
    parents: list[int]
    resume: int
    path: list[int]
    count: int = 0  # of a commit
    track_slot: int = -1
    track_count: int = 0


def is_slot(slot: int, spec: ConvCacheSpec) -> bool:
    return 0 <= slot < spec.num_slots and slot != NULL


def nodes_of(path: list[int], count: int, bound: int, spec: ConvCacheSpec) -> list[int] | None:
    """The first `count` nodes of a path, or None if one that the window needs is wrong; those not needed may be."""
    nodes = path[:count]
    if spec.storage == "sliding":
        return nodes if count == 0 or nodes[-1] == count - 1 else None
    needed = nodes[-spec.state_columns :] if spec.storage == "inputs" else nodes[-1:]
    return nodes if all(0 <= node < bound for node in needed) else None


def state_after(held: Any, row: Any, nodes: list[int], spec: ConvCacheSpec) -> Any:
    """The state after these nodes of the step in `row`; of none the old state. Lists of columns in and out."""
    if not nodes:
        return held
    if spec.storage == "inputs":
        nodes = [node if 0 <= node < spec.num_draft_tokens else 0 for node in nodes]  # only ones that are not needed
        return np.asarray([*held, *(row[node] for node in nodes)])[-spec.state_columns :]
    if spec.storage == "dense":
        return row[nodes[-1]]
    return row[len(nodes) - 1 : len(nodes) - 1 + spec.state_columns]


def ancestry(token: int, parents: list[int]) -> list[int]:
    """The path from the root to a token."""
    nodes = [token]
    while parents[nodes[0]] >= 0:
        nodes.insert(0, parents[nodes[0]])
    return nodes


def is_live(request: Request, spec: ConvCacheSpec) -> bool:
    tokens = spec.num_draft_tokens
    if not (is_slot(request.slot, spec) and 0 <= request.row < spec.max_requests and 1 <= request.valid <= tokens):
        return False
    links = request.parents[: request.valid]
    if spec.storage == "sliding" and links != list(range(-1, request.valid - 1)):
        return False
    if not all(-1 <= link < token for token, link in enumerate(links)):
        return False
    return 0 <= request.resume <= tokens and nodes_of(request.path, request.resume, tokens, spec) is not None


def verified(
    spec: ConvCacheSpec, requests: list[Request], layer: int, x: Any, pool: Any, windows: Any, previous: Any
) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[np.ndarray, list[np.ndarray]]]]:
    """The buffer and the pool after a verify of one layer, and for each live request what its tokens meet.

    `x` is of the state's dtype; None takes the inputs from `windows`.
    """
    after, advanced, met = windows.copy(), pool.copy(), {}
    target, before = by_column(after, spec)[layer], by_column(previous, spec)[layer]
    for index, request in enumerate(requests):
        if not is_live(request, spec):
            continue
        nodes = nodes_of(request.path, request.resume, spec.num_draft_tokens, spec)
        assert nodes is not None
        history = state_after(by_column(pool, spec)[layer, request.slot], before[request.row], nodes, spec).copy()
        inputs = by_column(windows, spec)[layer, request.row] if x is None else bits(x)[index]
        lines = [
            np.asarray([*history, *(inputs[node] for node in ancestry(token, request.parents))])
            for token in range(request.valid)
        ]
        met[index] = history, lines
        for token, line in enumerate(lines if x is not None else []):
            if spec.storage == "dense":
                target[request.row, token] = line[-spec.state_columns :]
            else:
                target[request.row, spec.first_token_column + token] = line[-1]
        if spec.storage == "sliding":
            target[request.row, : spec.state_columns - 1] = history[1:]
        if spec.storage == "inputs" and request.resume:
            by_column(advanced, spec)[layer, request.slot] = history
    return after, advanced, met


def exact_y(spec: ConvCacheSpec, met: Any, num_requests: int, weight: Any, bias: Any) -> tuple[Any, Any]:
    """y in float64 and the sum of the magnitudes of what was summed; zero for skipped requests and tokens."""
    y = np.zeros((num_requests, spec.num_draft_tokens, spec.conv_dim))
    magnitude = np.zeros_like(y)
    for index, (_, lines) in met.items():
        for token, line in enumerate(lines):
            products = line[-spec.width :].view(spec.dtype).astype(np.float64) * weight.astype(np.float64).T
            total = products.sum(0) + bias
            y[index, token] = total / (1 + np.exp(-total))
            magnitude[index, token] = np.abs(products).sum(0) + np.abs(bias)
    return y, magnitude


def window_of(
    spec: ConvCacheSpec, request: Request, count: int, bound: int, pool: Any, windows: Any, *, chains: bool
) -> np.ndarray | None:
    """Integers `[L, S, conv_dim]` of the state after `count` of `bound` tokens, or None where that is skipped."""
    if not (0 <= request.row < spec.max_requests and 1 <= count <= bound <= spec.num_draft_tokens):
        return None
    nodes = list(range(count)) if chains else nodes_of(request.path, count, bound, spec)
    if nodes is None or (spec.storage == "inputs" and not is_slot(request.slot, spec)):
        return None
    held = by_column(pool, spec)[:, request.slot] if spec.storage == "inputs" else [None] * spec.num_layers
    rows = by_column(windows, spec)[:, request.row]
    return np.asarray([state_after(*layer, nodes, spec) for layer in zip(held, rows, strict=True)])


def committed(spec: ConvCacheSpec, requests: list[Request], pool: Any, windows: Any, *, chains: bool) -> np.ndarray:
    """The pool after a commit of the accepted and the tracked windows; all reads see the pool as it was."""
    after = pool.copy()
    for request in requests:
        for slot, count in ((request.slot, request.count), (request.track_slot, request.track_count)):
            window = window_of(spec, request, count, request.valid, pool, windows, chains=chains)
            if is_slot(slot, spec) and window is not None:
                by_column(after, spec)[:, slot] = window
    return after


# --- batches ----------------------------------------------------------------------------------------------------------


def random_parents(spec: ConvCacheSpec, rng: Any) -> list[int]:
    if spec.storage == "sliding":
        return list(range(-1, spec.num_draft_tokens - 1))
    return [int(rng.integers(-1, token)) for token in range(spec.num_draft_tokens)]


def random_path(spec: ConvCacheSpec, rng: Any, count: int, bound: int) -> list[int]:
    """A path of `count` nodes below `bound`, which then goes on with what must not be looked at; -1 is one of it."""
    junk = rng.choice([-1, -2, spec.num_draft_tokens, 0, *LIMITS], spec.num_draft_tokens).tolist()
    nodes = list(range(count)) if spec.storage == "sliding" else sorted(rng.permutation(bound)[:count].tolist())
    needed = spec.state_columns if spec.storage == "inputs" else 1
    nodes[:-needed] = junk[: len(nodes[:-needed])]
    return nodes + junk[len(nodes) :]


def batch_of(spec: ConvCacheSpec, rng: Any) -> list[Request]:
    """Every resumed count beside random trees, and every reason to skip; live slots and rows are different."""
    tokens = spec.num_draft_tokens
    slots = iter([slot for slot in rng.permutation(spec.num_slots).tolist() if slot != NULL])
    rows = iter(rng.permutation(spec.max_requests).tolist())

    def good(resume: int | None = None, valid: int | None = None) -> Request:
        resume = int(rng.integers(0, tokens + 1)) if resume is None else resume
        valid = int(rng.integers(1, tokens + 1)) if valid is None else valid
        path = random_path(spec, rng, resume, tokens)
        return Request(next(slots), next(rows), valid, random_parents(spec, rng), resume, path)

    requests = [good(resume) for resume in (*range(tokens + 1), 0)]
    beyond = good(valid=1)
    beyond.parents[1:] = ([tokens, *LIMITS] * tokens)[: tokens - 1]  # links of tokens that are not there
    requests.append(beyond)
    for slot in (-1, spec.num_slots, NULL, *LIMITS):
        requests.append(dataclasses.replace(good(), slot=slot))
    for row in (-1, spec.max_requests, LIMITS[0]):
        requests.append(dataclasses.replace(good(), row=row))
    for valid in (0, tokens + 1):
        requests.append(dataclasses.replace(good(), valid=valid))
    for resume in (-1, tokens + 1, *LIMITS):
        requests.append(dataclasses.replace(good(), resume=resume))
    for node in (-1, tokens, LIMITS[0]):
        wrong = good(tokens)
        wrong.path[-1] = node
        requests.append(wrong)
    for token, link in ((0, 0), (tokens - 1, tokens - 1), (tokens - 1, -2), (0, LIMITS[0])):
        wrong = good(valid=tokens)
        wrong.parents[token] = link
        requests.append(wrong)
    requests.append(dataclasses.replace(requests[1], valid=0))  # a live slot and row once more, as padding
    return [requests[index] for index in rng.permutation(len(requests))]


def column_of(requests: list[Request], name: str) -> np.ndarray:
    return np.asarray([getattr(request, name) for request in requests], np.int32)


def readable(spec: ConvCacheSpec, requests: list[Request], layer: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Which columns of the pool and of the previous buffer a verify may look at, bool arrays in the spec's order."""
    pool, buffer = np.zeros(spec.state_shape, bool), np.zeros(shape, bool)
    held = pool if spec.axis_order == "time_major" else pool.swapaxes(-1, -2)
    rows = buffer if spec.axis_order == "time_major" else buffer.swapaxes(-1, -2)
    for request in requests:
        if is_live(request, spec):
            nodes = nodes_of(request.path, request.resume, spec.num_draft_tokens, spec) or []
            if spec.storage == "inputs":
                held[layer, request.slot, len(nodes) :] = True
                rows[layer, request.row, nodes[-spec.state_columns :]] = True
            elif not nodes:
                held[layer, request.slot] = True
            elif spec.storage == "dense":
                rows[layer, request.row, nodes[-1]] = True
            else:
                rows[layer, request.row, len(nodes) - 1 : len(nodes) - 1 + spec.state_columns] = True
    return pool, buffer


def kept_where(mask: np.ndarray, array: np.ndarray) -> np.ndarray:
    return np.where(mask, bits(array), bits(poison(array.shape, str(array.dtype)))).view(array.dtype)


# --- layout -----------------------------------------------------------------------------------------------------------


@both_orders
@pytest.mark.parametrize("extra", [0, 1])
def test_an_inputs_row_has_one_column_for_each_token(order: Any, extra: int) -> None:
    spec = spec_of("inputs", order, state_len=3 + extra, num_draft_tokens=7, dtype="bfloat16")
    assert spec.windows_shape == ((2, 37, 7, 5) if order == "time_major" else (2, 37, 5, 7))
    assert (spec.num_columns, spec.first_token_column, spec.row_bytes) == (7, 0, 2 * 7 * 5 * 2)
    assert spec.windows_axes == "layer, row, " + spec.entry_axes
    cache = torch_ref.allocate_conv_cache(spec, device="cpu")
    assert cache.conv_windows.nbytes == spec.windows_bytes == 37 * spec.row_bytes
    assert spec.dense_windows_bytes == (3 + extra) * spec.windows_bytes


def test_only_sliding_rows_have_windows_as_runs_of_columns() -> None:
    for storage in ("dense", "inputs"):
        with pytest.raises(ValueError, match=rf"^`storage`: expected 'sliding', got '{storage}'\."):
            spec_of(storage).window_columns(1)
        with pytest.raises(ValueError, match=rf"^`spec.storage`: expected 'sliding', got '{storage}'\."):
            torch_ref.dense_view(torch.zeros(1), spec=spec_of(storage))
    assert spec_of("sliding").window_columns(2) == slice(1, 4)


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(importlib.import_module("torch_ref.acceptance"))
    assert outcome.failed == 0
    assert outcome.attempted >= 4


# --- verify -----------------------------------------------------------------------------------------------------------


WHAT = [("trees", "inputs"), ("trees", "dense"), *itertools.product(("resume", "both"), STORAGES)]


@on_sizes("what, storage", WHAT, [("trees", "dense"), ("resume", "inputs"), *itertools.product(["both"], STORAGES)])
@both_orders
def test_verify_by_the_rules(path: Path, size: Any, what: str, storage: Any, order: Any) -> None:
    """Every count to resume from, trees, padding and hostile indices; NaN in all that must not be read or written."""
    width, tokens, dim, dtype, x_dtype, extra = size
    spec = spec_of(
        storage, order, width=width, num_draft_tokens=tokens, conv_dim=dim, dtype=dtype, state_len=width - 1 + extra
    )
    rng = np.random.default_rng(tokens)
    requests, layer = batch_of(spec, rng), 1
    if what == "trees":
        requests = [dataclasses.replace(request, resume=0) for request in requests]
    if what == "resume":
        requests = [dataclasses.replace(request, parents=list(range(-1, tokens - 1))) for request in requests]
    given = values((len(requests), tokens, dim), x_dtype, 1)
    given[np.arange(tokens) >= column_of(requests, "valid")[:, None]] = np.nan
    x = given.astype(np.float32).astype(dtype)
    pool_mask, row_mask = readable(spec, requests, layer, spec.windows_shape)
    pool = kept_where(pool_mask, values(spec.state_shape, dtype, 2))
    windows = kept_where(row_mask, values(spec.windows_shape, dtype, 3))
    weight, bias = values((dim, width), "float32", 4), values((dim,), "float32", 5)
    after, advanced, met = verified(spec, requests, layer, x, pool, windows, windows)
    exact, magnitude = exact_y(spec, met, len(requests), weight, bias)

    state, buffer = tensor_of([pool, windows], path)
    options: dict[str, Any] = {}
    if what != "resume":
        options["parents"] = [request.parents for request in requests]
    if what != "trees":
        options |= {"resume_tokens": column_of(requests, "resume"), "resume_path": [r.path for r in requests]}
    y, *returned = torch_ref.causal_conv1d_verify(
        tensor_of(given, path), state, buffer, tensor_of(weight, path), tensor_of(bias, path), spec=spec, layer=layer,
        state_indices=column_of(requests, "slot"), window_rows=column_of(requests, "row"),
        num_valid_tokens=column_of(requests, "valid"), null_slot=NULL, **options, **how(path),
    )  # fmt: skip
    assert len(met) >= tokens + 2
    writes_pool = storage == "inputs" and what != "trees"
    assert all(a is b for a, b in zip(returned, [buffer, state][: 1 + writes_pool], strict=True))
    assert_same_bits(array_of(buffer), after, "buffer")
    assert_same_bits(array_of(state), advanced if writes_pool else pool, "pool")
    y = array_of(y)
    assert y.dtype == given.dtype
    assert not bits(y)[magnitude == 0].any()
    assert_y_close(y, exact, magnitude, spec)  # type: ignore[arg-type]


# --- commit and gather ------------------------------------------------------------------------------------------------


def commit_batch(spec: ConvCacheSpec, rng: Any) -> list[Request]:
    """Every count with a tracked one beside it, and for both destinations every reason to skip one of them or both."""
    tokens = spec.num_draft_tokens
    slots = iter([slot for slot in rng.permutation(spec.num_slots).tolist() if slot != NULL])
    rows = iter(rng.permutation(spec.max_requests).tolist())

    def good(count: int | None = None, *, clean: bool = True, **changes: Any) -> Request:
        count = int(rng.integers(1, tokens + 1)) if count is None else count
        valid = int(rng.integers(max(count, 1), tokens + 1))
        nodes = random_path(spec, rng, count, valid)
        if clean:  # no junk before what the accepted window needs, so that the tracked one has its path, too
            nodes[:count] = range(count) if spec.storage == "sliding" else sorted(rng.permutation(valid)[:count])
        request = Request(
            next(slots), next(rows), valid, [], 0, [int(node) for node in nodes], count, next(slots),
            int(rng.integers(1, max(count, 1) + 1)),
        )  # fmt: skip
        return dataclasses.replace(request, **changes)

    requests = [good(count) for count in range(tokens + 1)] + [good(count, clean=False) for count in range(tokens + 1)]
    for slot in (-1, spec.num_slots, NULL, *LIMITS):
        requests += [good(slot=slot), good(track_slot=slot)]
    requests += [good(row=row) for row in (-1, spec.max_requests, LIMITS[1])]
    requests += [good(valid=valid) for valid in (0, tokens + 1, *LIMITS)]
    for count in (-1, tokens + 1, *LIMITS):
        requests += [good(count=1, track_count=count), dataclasses.replace(good(), count=count)]
    requests += [good(tokens, valid=tokens - 1), good(1, track_count=tokens, valid=tokens - 1)]
    for node in (-1, tokens, *LIMITS):
        wrong = good(tokens, track_count=max(tokens - 1, 1))
        wrong.path[-1] = node
        requests.append(wrong)
    beyond = good(tokens, valid=tokens - 1 or 1)
    beyond.path[0] = beyond.valid  # a node, but of a token that is not there
    requests.append(dataclasses.replace(beyond, count=1, track_count=1))
    requests.append(dataclasses.replace(requests[1], count=0, track_count=0))  # a live slot and row once more
    return [requests[index] for index in rng.permutation(len(requests))]


def indices_of(requests: list[Request], *, chains: bool, tracks: bool = True) -> dict[str, Any]:
    """The arguments of a commit beside its slots and counts."""
    given: dict[str, Any] = {"window_rows": column_of(requests, "row"), "null_slot": NULL}
    given["num_valid_tokens"] = column_of(requests, "valid")
    if tracks:
        given["track_indices"] = column_of(requests, "track_slot")
        given["track_num_tokens"] = column_of(requests, "track_count")
    if not chains:
        given["accepted_path"] = np.asarray([request.path for request in requests], np.int32)
    return given


CHAINS_AND_PATHS = [(True, "inputs"), *itertools.product([False], STORAGES)]  # other chains: test_torch_ref


@on_sizes("chains, storage", CHAINS_AND_PATHS, CHAINS_AND_PATHS)
@both_orders
def test_commit_by_the_rules(path: Path, size: Any, chains: bool, storage: Any, order: Any) -> None:
    width, tokens, dim, dtype, _, extra = size
    spec = spec_of(
        storage, order, width=width, num_draft_tokens=tokens, conv_dim=dim, dtype=dtype, state_len=width - 1 + extra,
        num_slots=110, max_requests=51,
    )  # fmt: skip
    requests = commit_batch(spec, np.random.default_rng(tokens))
    pool, windows = unique_bits(spec.state_shape, dtype, 1), unique_bits(spec.windows_shape, dtype, 2)
    state, buffer = tensor_of([pool, windows], path)
    for tracks in (True, False) if path.name != "torch-triton" else (True,):
        if not tracks:
            requests = [dataclasses.replace(request, track_count=0) for request in requests]
            state = tensor_of(pool, path)
        returned = torch_ref.commit_conv_state(
            state, buffer, column_of(requests, "slot"), column_of(requests, "count"), spec=spec,
            **indices_of(requests, chains=chains, tracks=tracks), **how(path),
        )  # fmt: skip
        assert returned is state
        assert_same_bits(array_of(state), committed(spec, requests, pool, windows, chains=chains))
    assert_same_bits(array_of(buffer), windows)


@both_orders
@all_storages
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "paths"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("size", SIZES[:3], ids=size_id)
def test_gather_by_the_rules(size: Any, stacked: bool, chains: bool, storage: Any, order: Any) -> None:
    width, tokens, dim, dtype, _, extra = size
    spec = spec_of(
        storage, order, width=width, num_draft_tokens=tokens, conv_dim=dim, dtype=dtype, state_len=width - 1 + extra,
        num_slots=110, max_requests=51,
    )  # fmt: skip
    requests = commit_batch(spec, np.random.default_rng(tokens))
    pool, windows = unique_bits(spec.state_shape, dtype, 1), unique_bits(spec.windows_shape, dtype, 2)
    expected = np.zeros((2, len(requests), *spec.window_shape), dtype)
    for index, request in enumerate(requests):
        window = window_of(spec, request, request.count, tokens, pool, windows, chains=chains)
        if window is not None:
            by_column(expected, spec)[:, index] = window
    state, buffer = tensor_of([pool, windows], adapters.path("torch-eager"))
    options: dict[str, Any] = {"window_rows": column_of(requests, "row")}
    if storage == "inputs":
        options |= {"conv_state": state if stacked else state[1], "state_indices": column_of(requests, "slot")}
        options["null_slot"] = NULL
    if not chains:
        options["accepted_path"] = [request.path for request in requests]
    taken = torch_ref.gather_windows(
        buffer if stacked else buffer[1], column_of(requests, "count"), spec=spec, **options
    )  # fmt: skip
    assert_same_bits(array_of(taken), expected if stacked else expected[1])
    assert_same_bits(array_of(state), pool)


# --- steps without a commit -------------------------------------------------------------------------------------------


def random_node(rng: Any, parents: list[int], valid: int) -> list[int]:
    """The path to one of the tokens that count."""
    return ancestry(int(rng.integers(0, valid)), parents)


def padded(nodes: list[int], spec: ConvCacheSpec) -> list[int]:
    return nodes + [-1] * (spec.num_draft_tokens - len(nodes))


@on_torch
@both_orders
@all_storages
def test_fifty_steps_without_a_commit(path: Path, storage: Any, order: Any) -> None:
    """Each step resumes from the one before, along a random path of a random tree; requests leave, and others come.

    The accepted tokens are those that one-token decoding sees, so y and every state have its bits.
    """
    spec = spec_of(storage, order, dtype="float16", state_len=4, num_slots=11, max_requests=7)
    rng, layer = np.random.default_rng(5), 1
    pool, windows = values(spec.state_shape, "float16", 1), poison(spec.windows_shape, "float16")
    state, buffer, plain, weight = tensor_of([pool, windows, pool, values((5, 4), "float32", 2)], path)
    slots, rows = [3, -1, 7, 1], [6, 2, 0, 5]
    counts, accepted = np.zeros(4, np.int32), np.full((4, 3), -1)
    given: dict[str, Any] = {"spec": spec, "state_indices": slots, "window_rows": rows}
    for step in range(50 if path.name != "torch-triton" else 3):
        x = tensor_of(values((4, 3, 5), "float32", 100 + step), path)
        parents, valid = [random_parents(spec, rng) for _ in slots], rng.integers(1, 4, 4)
        y, *_ = torch_ref.causal_conv1d_verify(
            x, state, buffer, weight, **given, layer=layer, num_valid_tokens=valid, parents=parents,
            resume_tokens=counts, resume_path=accepted, **how(path),
        )  # fmt: skip
        nodes = [random_node(rng, links, v) for links, v in zip(parents, valid, strict=True)]
        if storage == "inputs" and step % 3 == 2:
            nodes[0] = []  # the step before is in the slot, so that nothing is lost when a step is
        counts, accepted = np.asarray([len(n) for n in nodes], np.int32), np.asarray([padded(n, spec) for n in nodes])
        for place in range(3):
            now = [slot if n > place else -1 for slot, n in zip(slots, counts, strict=True)]
            token = torch.tensor([max(node[place], 0) for node in accepted], device=x.device)
            chosen = x[torch.arange(4, device=x.device), token]
            single, _ = torch_ref.causal_conv1d_update(
                chosen, plain, weight, spec=spec, state_indices=now, layer=layer, **how(path)
            )
            for b in (b for b, slot in enumerate(now) if slot >= 0):
                assert_same_bits(array_of(y[b, token[b]]), array_of(single[b]))
        if step % 4 == 1:  # one leaves, and a copy of its state is left to another; the rest goes on uncommitted
            torch_ref.commit_conv_state(
                state, buffer, slots, [counts[0], 1, 0, 0], spec=spec, window_rows=rows, num_valid_tokens=valid,
                accepted_path=accepted, **how(path),
            )  # fmt: skip
            assert_same_bits(array_of(state[layer, slots[0]]), array_of(plain[layer, slots[0]]))
            state[layer, 9], plain[layer, 9] = state[layer, slots[0]], plain[layer, slots[0]]
            counts[0] = 0
        taken = torch_ref.gather_windows(
            buffer, counts, spec=spec, window_rows=rows, accepted_path=accepted,
            **({"conv_state": state, "state_indices": slots} if storage == "inputs" else {}),
        )  # fmt: skip
        for b in (b for b, slot in enumerate(slots) if slot >= 0):
            now = taken[layer, b] if counts[b] else state[layer, slots[b]]
            assert_same_bits(array_of(now), array_of(plain[layer, slots[b]]), f"step {step}, request {b}")
    torch_ref.commit_conv_state(
        state, buffer, slots, counts, spec=spec, window_rows=rows, accepted_path=accepted, **how(path)
    )
    assert_same_bits(array_of(state[layer]), array_of(plain[layer]))


@on_torch
@both_orders
@pytest.mark.parametrize("one_layer", [True, False])
def test_inputs_that_the_caller_keeps(path: Path, one_layer: bool, order: Any) -> None:
    """x as the buffer of two steps in turn: verify writes nothing but y, and the pool where it resumes."""
    spec = spec_of("inputs", order, num_slots=5, max_requests=3)
    pool, x = values(spec.state_shape, "float32", 1), values((3, 2, 3, 3, 5), "float32", 2)
    held = np.ascontiguousarray(x if order == "time_major" else x.swapaxes(-1, -2))  # step, layer, row, …
    weight = values((5, 4), "float32", 3)
    state, again, buffer, kept, taps = tensor_of(
        [pool, pool, poison(spec.windows_shape, "float32"), held, weight], path
    )
    at: Any = slice(None) if not one_layer else 1
    layer: dict[str, Any] = {} if one_layer else {"layer": 1}
    given: dict[str, Any] = {"spec": spec, "state_indices": [4, 0, 2], "num_valid_tokens": [3, 2, 3], **layer}
    for step, counts in enumerate([None, [3, 1, 0], [1, 2, 3]]):
        more = {} if counts is None else {"resume_tokens": counts}
        y, *rest = torch_ref.causal_conv1d_verify(
            tensor_of(x[step, 1], path), state[at], buffer[at], taps, **given, **more, **how(path)
        )
        if counts is not None:
            more["resume_windows"] = kept[step - 1][at]
        windows, slots = kept[step][at], again[at]
        y2, *rest2 = torch_ref.causal_conv1d_verify(None, slots, windows, taps, **given, **more, **how(path))
        assert rest2[0] is windows
        assert len(rest2) == len(rest) == 1 + (counts is not None)
        assert all(one is slots for one in rest2[1:])
        assert_same_bits(array_of(y2), array_of(y))
        assert array_of(y)[0].any()
        assert_same_bits(array_of(again), array_of(state))
    assert_same_bits(array_of(kept), held)
    assert (array_of(state)[1] != pool[1]).any()


@on_torch
def test_the_previous_buffer_may_share_memory(path: Path) -> None:
    """Row r of the previous step is where row r+1 of this one goes: what is read is what was there before."""
    spec = spec_of("inputs", num_layers=1, num_slots=6, max_requests=5)
    memory, pool = values((1, 6, 3, 5), "float32", 1), values(spec.state_shape, "float32", 2)
    x, weight = values((5, 3, 5), "float32", 3), values((5, 4), "float32", 4)
    requests = [Request(b, b, 3, [-1, 0, 1], b % 4, [0, 1, 2]) for b in (0, 1, 3, 4, 5)]
    requests = [dataclasses.replace(request, row=b) for b, request in enumerate(requests)]
    for first, second in ((slice(1, 6), slice(0, 5)), (slice(0, 5), slice(1, 6)), (slice(0, 5), slice(0, 5))):
        windows, previous = memory[:, first].copy(), memory[:, second].copy()
        after, advanced, _ = verified(changed(spec), requests, 0, x, pool, windows, previous)
        shared, state = tensor_of([memory, pool], path)
        torch_ref.causal_conv1d_verify(
            tensor_of(x, path), state, shared[:, first], tensor_of(weight, path), spec=spec, layer=0,
            state_indices=[r.slot for r in requests], resume_tokens=[r.resume for r in requests],
            resume_windows=shared[:, second], **how(path),
        )  # fmt: skip
        assert_same_bits(array_of(shared[:, first]), after)
        assert_same_bits(array_of(state), advanced)


@on_torch
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_storages_agree(path: Path, trees: bool) -> None:
    """y and the state after every node are the same bits in all storages and orders that can have them."""
    tokens, width = 4, 4
    parents = [[-1, 0, 0, 2], [-1, -1, 1, 1], [-1, 0, 1, 2]] if trees else [[-1, 0, 1, 2]] * 3
    x, pool = values((3, tokens, 5), "bfloat16", 1), values((1, 7, width - 1, 5), "bfloat16", 2)
    weight, outcomes = values((5, width), "float32", 3), []
    for storage, order in itertools.product(STORAGES[trees:], ("time_major", "channel_major")):
        spec = spec_of(
            storage, order, num_layers=1, num_slots=7, max_requests=3, num_draft_tokens=tokens, dtype="bfloat16"
        )
        held = pool if order == "time_major" else np.ascontiguousarray(pool.swapaxes(-1, -2))
        state, buffer = tensor_of([held, poison(spec.windows_shape, "bfloat16")], path)
        y, _ = torch_ref.causal_conv1d_verify(
            tensor_of(x, path), state, buffer, tensor_of(weight, path), spec=spec, layer=0, state_indices=[5, 1, 0],
            parents=parents, **how(path),
        )  # fmt: skip
        outcome = [array_of(y)]
        for node in range(tokens):
            nodes, counts = torch_ref.path_to_node(parents, [node] * 3)
            taken = torch_ref.gather_windows(
                buffer, counts.to(y.device), spec=spec, accepted_path=nodes.to(y.device),
                **({"conv_state": state, "state_indices": [5, 1, 0]} if storage == "inputs" else {}),
            )  # fmt: skip
            outcome.append(by_column(array_of(taken), spec).copy())
        outcomes.append(outcome)
    for outcome in outcomes[1:]:
        for mine, theirs in zip(outcome, outcomes[0], strict=True):
            assert_same_bits(mine, theirs)
    assert all((outcomes[0][1] != outcomes[0][i]).any() for i in range(2, tokens + 1))


# --- forms of the arguments -------------------------------------------------------------------------------------------


@on_torch
@both_orders
def test_layer_index_as_a_tensor_and_free_strides(path: Path, order: Any) -> None:
    """Pool and buffer with other layer and slot strides; a layer outside the stack skips all."""
    spec = spec_of("inputs", order, num_slots=6, max_requests=5)
    requests = [Request(b + 1, 4 - b, 1 + b % 3, [-1, 0, 0], b % 4, [0, 1, 2]) for b in range(4)]
    pool, windows = values(spec.state_shape, "float32", 1), values(spec.windows_shape, "float32", 2)
    previous, x = values(spec.windows_shape, "float32", 3), values((4, 3, 5), "float32", 4)
    for layer in (1, -1, 2, INT32_MIN):
        *tensors, before = tensor_of([pool, windows, previous], path)  # the previous buffer is as it comes
        state, buffer = (
            torch.stack([t, torch.full_like(t, torch.nan)], dim=2).transpose(0, 1).contiguous().transpose(0, 1)[:, :, 0]
            for t in tensors
        )
        assert not state.is_contiguous()
        y, _, _ = torch_ref.causal_conv1d_verify(
            tensor_of(x, path), state, buffer, tensor_of(values((5, 4), "float32", 5), path), spec=spec,
            layer=torch.tensor(layer, device=state.device), state_indices=column_of(requests, "slot"),
            window_rows=column_of(requests, "row"), num_valid_tokens=column_of(requests, "valid"),
            parents=[r.parents for r in requests], resume_tokens=column_of(requests, "resume"), resume_windows=before,
            null_slot=NULL, **how(path),
        )  # fmt: skip
        after, advanced = windows, pool
        if layer == 1:
            after, advanced, _ = verified(spec, requests, 1, x, pool, windows, previous)
        assert bool(y.any()) == (layer == 1)
        assert_same_bits(array_of(buffer), after)
        assert_same_bits(array_of(state), advanced)
        for request in requests:
            request.count = request.valid
        torch_ref.commit_conv_state(
            state, buffer, column_of(requests, "slot"), column_of(requests, "count"), spec=spec,
            window_rows=column_of(requests, "row"), null_slot=NULL, **how(path),
        )  # fmt: skip
        whole = [dataclasses.replace(request, valid=3) for request in requests]
        assert_same_bits(array_of(state), committed(spec, whole, advanced, after, chains=True))


@on_torch
@both_orders
def test_no_requests_and_no_rows(path: Path, order: Any) -> None:
    spec = spec_of("inputs", order, max_requests=0)
    pool = values(spec.state_shape, "float32", 1)
    state, weight = tensor_of([pool, values((5, 4), "float32", 2)], path)
    buffer = torch.zeros(spec.windows_shape, device=state.device)
    for batch, rows in ((0, None), (2, [0, -1])):
        ones: Any = [1] * batch
        given: dict[str, Any] = {"spec": spec, "state_indices": ones, "window_rows": rows, "layer": 0}
        more: dict[str, Any] = {"resume_tokens": ones, "parents": [[-1, 0, 1]] * batch, **how(path)}
        y, *_ = torch_ref.causal_conv1d_verify(
            torch.ones(batch, 3, 5, device=state.device), state, buffer, weight, **given, **more
        )
        y2, *_ = torch_ref.causal_conv1d_verify(None, state, buffer, weight, resume_windows=buffer, **given, **more)
        torch_ref.commit_conv_state(
            state, buffer, ones, ones, spec=spec, window_rows=rows, accepted_path=[[0, 1, 2]] * batch, **how(path)
        )
        taken = torch_ref.gather_windows(
            buffer, ones, spec=spec, window_rows=rows, conv_state=state, state_indices=ones,
            accepted_path=np.zeros((batch, 3), np.int64),
        )  # fmt: skip
        assert y.shape == y2.shape == (batch, 3, 5)
        assert taken.shape == (2, batch, *spec.window_shape)
        assert not y.any() and not y2.any() and not taken.any()
    assert_same_bits(array_of(state), pool)


@on_torch
@both_orders
def test_offsets_past_two_to_the_31(path: Path, order: Any) -> None:
    """As for the other storages: pool and buffer begin in the middle of 8 GiB of which a few pages are touched."""
    spec = spec_of("inputs", order, num_slots=3, max_requests=3, dtype="bfloat16")
    for strides in ((2**31 + 64, 32), (32, 2**30 + 64)):
        try:
            memory = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device="cuda" if path.on_gpu else "cpu")
        except RuntimeError:
            pytest.skip("8 GiB of address space are missing")
        last, other = ((5, 1), (5, 1)) if order == "time_major" else ((3, 1), (3, 1))
        pool = memory.as_strided(spec.state_shape, (*strides, *last), 2**31)
        windows = memory.as_strided(spec.windows_shape, (*strides, *other), 2**31 + 128)
        alias = memory[:4096].fill_(1)
        pool[1, 2].fill_(2)
        windows[1, 2].fill_(4)
        x = torch.full((1, 3, 5), 3.0, dtype=torch.bfloat16, device=memory.device)
        options: dict[str, Any] = {"spec": spec, "window_rows": [2], **how(path)}
        y, *_ = torch_ref.causal_conv1d_verify(
            x, pool, windows, torch.ones(5, 4, device=memory.device), state_indices=[2], layer=1, activation=None,
            resume_tokens=[1], parents=[[-1, 0, -1]], **options,
        )  # fmt: skip
        assert y[0, :, 4].tolist() == [11.0, 12.0, 11.0]
        columns = pool[1, 2] if order == "time_major" else pool[1, 2].T
        assert columns[:, 4].tolist() == [2, 2, 4]
        torch_ref.commit_conv_state(pool[1], windows[1], [2], [2], accepted_path=[[0, 2, -1]], **options)
        assert columns[:, 4].tolist() == [4, 3, 3]
        assert bool((alias == 1).all())
        del memory, pool, windows, alias


@on_torch
def test_a_pool_of_other_strides_inside_an_entry_is_refused(path: Path) -> None:
    """The kernels address an entry as contiguous; verify did not look and read other channels."""
    for storage in STORAGES:
        spec = spec_of(storage, num_slots=5, max_requests=3)
        state = tensor_of(np.ones((2, 5, 5, 3), np.float32), path).transpose(-1, -2)
        buffer = torch.zeros(spec.windows_shape, device=state.device)
        x, weight = torch.ones(1, 3, 5, device=state.device), torch.ones(5, 4, device=state.device)
        message = r"^`conv_state`: expected strides of column, channel = \(5, 1\), got \(1, 3\)\."
        with pytest.raises(ValueError, match=message):
            torch_ref.causal_conv1d_verify(
                x, state, buffer, weight, spec=spec, layer=0, state_indices=[1], **how(path)
            )  # fmt: skip


# --- the whole rollback along a path ----------------------------------------------------------------------------------


def last_nodes(requests: list[Request], tokens: int) -> tuple[list[int], list[int]]:
    """A dense commit along a path as one without: n is the number of the node that it ends with, plus one."""
    ends: tuple[list[int], list[int]] = ([], [])
    for request in requests:
        for end, count in zip(ends, (request.count, request.track_count), strict=True):
            counted = 1 <= count <= request.valid <= tokens
            node = request.path[count - 1] if counted else -1
            end.append(node + 1 if 0 <= node < request.valid else 0)
    return ends


@on_torch
def test_everything_rolls_back_along_a_path(path: Path) -> None:
    """Inputs of two widths and orders, dense windows, recurrent states: one path for all; then these states alone."""
    common: dict[str, Any] = {"num_slots": 110, "max_requests": 51, "num_layers": 1}
    specs = {
        "q": spec_of("inputs", dtype="bfloat16", **common),
        "k": spec_of("inputs", "channel_major", width=3, state_len=3, conv_dim=3, **common),
        "v": spec_of("dense", dtype="float16", conv_dim=3, **common),
    }
    requests = commit_batch(specs["q"], np.random.default_rng(8))
    pools = {n: unique_bits(s.state_shape, s.dtype, i) for i, (n, s) in enumerate(specs.items())}
    rows = {n: unique_bits(s.windows_shape, s.dtype, i + 9) for i, (n, s) in enumerate(specs.items())}
    held, steps = unique_bits((2, 110, 2, 3), "float32", 5), unique_bits((2, 51, 3, 2, 3), "float32", 6)
    ends, track_ends = last_nodes(requests, 3)
    expected = held.copy()
    more: dict[str, Any] = {"rows": column_of(requests, "row"), "valid": column_of(requests, "valid"), "null": NULL}
    for slots, counts in ((column_of(requests, "slot"), ends), (column_of(requests, "track_slot"), track_ends)):
        commit_loops(bits(expected), bits(steps), slots, counts, **more)

    slots, counts = column_of(requests, "slot"), column_of(requests, "count")
    indices = indices_of(requests, chains=False)
    state, after_steps = tensor_of([held, steps], path)
    conv = {n: torch_ref.ConvCache(*tensor_of([pools[n], rows[n]], path), spec=spec) for n, spec in specs.items()}
    cache = torch_ref.HybridCache(conv, state)
    assert torch_ref.commit_after_verify(cache, slots, counts, step_states=after_steps, **indices, **how(path)) is cache
    for name, spec in specs.items():
        after = committed(spec, requests, pools[name], rows[name], chains=False)
        assert_same_bits(array_of(conv[name].conv_state), after, name)
    assert_same_bits(array_of(state), expected, "recurrent")
    alone = tensor_of(held, path)
    torch_ref.commit_recurrent_state(alone, after_steps, slots, counts, **indices, **how(path))
    assert_same_bits(array_of(alone), expected)
    assert (bits(expected) != bits(held)).any(axis=(0, 2, 3)).sum() >= 8


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 5, 7])
def test_path_to_node_by_the_links(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    links = np.asarray([[rng.integers(-1, token) for token in range(tokens)] for _ in range(300)])
    links[rng.random(links.shape) < 0.1] = rng.choice([-2, tokens - 1, tokens, *LIMITS])
    nodes = rng.integers(-2, tokens + 2, 300)
    nodes[:4] = [*LIMITS, -1, tokens]
    paths, counts = torch_ref.path_to_node(links, torch.from_numpy(nodes))
    assert paths.dtype == counts.dtype == torch.int32
    seen = set()
    for parents, node, got, count in zip(links.tolist(), nodes.tolist(), paths.tolist(), counts.tolist(), strict=True):
        upwards, now = [], node
        while 0 <= now < tokens:
            upwards.append(now)
            above = parents[now]
            if not -1 <= above < now:  # a link that leads nowhere: nothing is accepted
                upwards = []
                break
            now = above
        assert got == upwards[::-1] + [-1] * (tokens - len(upwards))
        assert count == len(upwards)
        seen.add(count)
    assert len(seen) > tokens / 2


# --- errors -----------------------------------------------------------------------------------------------------------


def verify_call(storage: Any, **changes: Any) -> Any:
    spec = spec_of(storage, num_slots=5, max_requests=3)
    arguments: dict[str, Any] = {"x": torch.ones(2, 3, 5), "conv_state": torch.zeros(spec.state_shape)}
    arguments |= {"conv_windows": torch.zeros(spec.windows_shape), "weight": torch.ones(5, 4), "spec": spec}
    return torch_ref.causal_conv1d_verify(**(arguments | {"state_indices": [1, 2], "layer": 0} | changes))


def gather_call(storage: Any, **changes: Any) -> Any:
    spec = spec_of(storage, num_slots=5, max_requests=3)
    windows = torch.zeros(spec.windows_shape)
    arguments: dict[str, Any] = {"conv_windows": windows, "num_accepted_tokens": [1, 2], "spec": spec}
    return torch_ref.gather_windows(**(arguments | changes))


def commit_call(storage: Any, **changes: Any) -> Any:
    specs = [spec_of(storage, num_slots=5, max_requests=3, num_draft_tokens=tokens) for tokens in (3, 4)]
    state, windows = [[torch.zeros(getattr(s, f"{n}_shape")) for s in specs] for n in ("state", "windows")]
    return torch_ref.commit_conv_state(state, windows, [1, 2], [1, 1], spec=specs, **changes)


@pytest.mark.parametrize(
    ("call", "storage", "changes", "message"),
    [
        (
            verify_call, "sliding", {"x": None},
            "`x`: expected a torch.Tensor for storage 'sliding', got None. Only rows of inputs can have it already.",
        ),
        (
            verify_call, "dense", {"x": None},
            "`x`: expected a torch.Tensor for storage 'dense', got None. Only rows of inputs can have it already.",
        ),
        (
            verify_call, "inputs", {"x": None, "resume_tokens": [1, 1]},
            "`resume_windows`: expected the previous step's inputs where `x` is None, got None. `conv_windows` has "
            "those of this step.",
        ),
        (
            verify_call, "inputs", {"resume_path": [[0, 1, 2]] * 2, "resume_windows": torch.zeros(2, 3, 3, 5)},
            "`resume_path`: expected None without `resume_tokens`, got [[0, 1, 2], [0, 1, 2]].\n"
            "`resume_windows`: expected None without `resume_tokens`, got a torch.float32 array of shape (2, 3, 3, 5).",
        ),
        (
            verify_call, "dense", {"resume_tokens": [1, 1], "resume_windows": torch.zeros(2, 3, 3, 3, 5)},
            "`resume_windows`: expected None for storage 'dense', got a torch.float32 array of shape (2, 3, 3, 3, 5). "
            "It resumes from the row that it writes.",
        ),
        (
            verify_call, "inputs", {"resume_tokens": [1, 1], "resume_windows": torch.zeros(3, 3, 5).half()},
            "`resume_windows`: expected dtype torch.float32, got torch.float16. Nothing is cast silently; the pool and "
            "its buffer share spec.dtype.\n"
            "`resume_windows`: expected a layer axis, as conv_state has, got (3, 3, 5).",
        ),
        (
            verify_call, "inputs", {"resume_tokens": [1, 1], "conv_state": torch.zeros(2, 1, 3, 5).expand(2, 5, 3, 5)},
            "`conv_state`: expected elements that share no memory, got strides (15, 0, 5, 1).",
        ),
        (
            verify_call, "inputs", {"parents": [[-1, 0]] * 2, "resume_tokens": [1], "resume_path": [0, 1]},
            "`parents`: expected request, token = (2, 3), got (2, 2).\n"
            "`resume_tokens`: expected request = (2,), got (1,).\n"
            "`resume_path`: expected a list of as many integers for each request, got [0, 1].",
        ),
        (
            verify_call, "inputs", {"parents": torch.zeros(2, 3)},
            "`parents`: expected an integer dtype, got torch.float32.",
        ),
        (
            verify_call, "inputs", {"parents": [[-1, 0, 1], [-1, 0]]},
            "`parents`: expected a list of as many integers for each request, got [[-1, 0, 1], [-1, 0]].",
        ),
        (
            gather_call, "inputs", {},
            "`conv_state`: expected the pool, for storage 'inputs', got None. The rows have the new inputs only.\n"
            "`state_indices`: expected an integer array of requests, got None.",
        ),
        (
            gather_call, "inputs", {"conv_state": torch.zeros(5, 3, 5), "state_indices": [1, 1], "null_slot": 0.5},
            "`conv_windows`: expected no layer axis, as conv_state has none, got (2, 3, 3, 5).\n"
            "`null_slot`: expected a Python integer or None, got 0.5.",
        ),
        (
            gather_call, "dense", {"conv_state": torch.zeros(1), "state_indices": [1], "null_slot": 0},
            "`conv_state`: expected None for storage 'dense', got a torch.float32 array of shape (1,). The rows "
            "have whole windows.\n"
            "`state_indices`: expected None for storage 'dense', got [1]. The rows have whole windows.\n"
            "`null_slot`: expected None for storage 'dense', got 0. The rows have whole windows.",
        ),
        (
            commit_call, "inputs", {"accepted_path": [[0, 1, 2]] * 2},
            "`accepted_path`: expected request, token = (2, 4), got (2, 3).",
        ),
    ],
)  # fmt: skip
def test_errors(call: Any, storage: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        call(storage, **changes)
    assert str(caught.value) == message


def test_errors_of_path_to_node() -> None:
    with pytest.raises(ValueError, match=r"^`nodes`: expected request = \(2,\), got \(1,\)\.$"):
        torch_ref.path_to_node([[-1, 0], [-1, 0]], [1])
    with pytest.raises(ValueError, match=r"^`parents`: expected request, token, got \(2,\)\.$"):
        torch_ref.path_to_node([-1, 0], [1])
    with pytest.raises(ValueError, match=r"^`parents`: expected an integer dtype, got torch.float32\.$"):
        torch_ref.path_to_node(torch.zeros(1, 2), [1])


@pytest.mark.parametrize(
    ("path", "dim", "batch", "steps"),
    [
        pytest.param("torch-triton", 70, 3, 6, marks=pytest.mark.thorough),  # 5 s
        pytest.param("torch-triton-gpu", 5000, 97, 20, marks=pytest.mark.gpu),
    ],
    indirect=["path"],
)
@both_orders
@all_storages
def test_steps_in_triton_are_those_in_eager(
    path: Path, dim: int, batch: int, steps: int, storage: Any, order: Any
) -> None:
    """Many programs at once, step after step in place: the bits of y (no exponential in it), buffer and pool."""
    spec = spec_of(
        storage, order, conv_dim=dim, num_draft_tokens=5, num_slots=2 * batch, max_requests=batch, dtype="bfloat16"
    )
    rng = np.random.default_rng(7)
    slots, rows = rng.permutation(2 * batch)[:batch], rng.permutation(batch)
    given = (
        values(spec.state_shape, "bfloat16", 1),
        poison(spec.windows_shape, "bfloat16"),
        values((dim, 4), "float32", 2),
    )
    triton, eager = tensor_of(given, path), tensor_of(given, path)
    both: Any = ("triton", triton), ("eager", eager)
    counts, accepted = np.zeros(batch, np.int32), np.full((batch, 5), -1)
    for step in range(steps):
        x = tensor_of(values((batch, 5, dim), "float32", 50 + step), path)
        parents, valid = [random_parents(spec, rng) for _ in slots], rng.integers(1, 6, batch)
        ys = [
            torch_ref.causal_conv1d_verify(
                x, *tensors, spec=spec, state_indices=slots, window_rows=rows, layer=1, num_valid_tokens=valid,
                activation=None, parents=parents, resume_tokens=counts, resume_path=accepted,
                implementation=implementation,
            )[0]
            for implementation, tensors in both
        ]  # fmt: skip
        assert_same_bits(array_of(ys[0]), array_of(ys[1]), f"y of step {step}")
        nodes = [random_node(rng, links, v) for links, v in zip(parents, valid, strict=True)]
        counts, accepted = np.asarray([len(n) for n in nodes], np.int32), np.asarray([padded(n, spec) for n in nodes])
        if step % 5 == 4:
            for implementation, (state, buffer, _) in both:
                torch_ref.commit_conv_state(
                    state, buffer, slots, counts, spec=spec, window_rows=rows, accepted_path=accepted,
                    track_indices=np.setdiff1d(np.arange(2 * batch), slots), track_num_tokens=counts // 2,
                    implementation=implementation,
                )  # fmt: skip
        for mine, theirs in zip(triton, eager, strict=True):
            assert_same_bits(array_of(mine), array_of(theirs), f"step {step}")


# --- compiled code ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_kernels_compiled_for_an_h200_read_before_they_write() -> None:
    """What the interpreter cannot show: wide accesses, and where a row or slot is rewritten a barrier before it."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.torch_compile"]
    root = pathlib.Path(__file__).parents[1]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    report = json.loads(outcome.stdout)
    assert len(report) == 26
    for name, runs in report.items():
        kinds = [kind for kind, _ in runs]
        first_store = kinds.index("store")
        in_place = "resume" in name or "kept" in name or name.startswith("commit inputs")
        if in_place:
            assert "load" not in kinds[first_store:], name
            assert "barrier" in kinds[len(kinds) - kinds[::-1].index("load") : first_store], name
        if name.endswith("time_major"):
            assert all(size == 16 for kind, size in runs if kind == "store"), name
            assert 16 in [size for kind, size in runs if kind == "load"], name
            assert in_place or kinds[first_store - 1] == "load", name
