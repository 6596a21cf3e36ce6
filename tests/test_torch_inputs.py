"""torch_ref's inputs storage, draft trees and steps without a commit, against loops over NumPy integers.

The loops are the rules as they are written down: a state is the last S of [old state, inputs along a path]. On a
machine without CUDA the kernels run in Triton's interpreter; `-m gpu` runs the same tests on compiled kernels.
"""

import dataclasses
import doctest
import importlib
import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_ref  # noqa: E402
from tests import adapters  # noqa: E402
from tests.adapters import Path  # noqa: E402
from tests.cases import INT32_MAX, INT32_MIN, assert_same_bits, assert_y_close, poison, unique_bits, values  # noqa: E402
from tests.definition import bits  # noqa: E402
from tests.torch_cases import array_of, how, tensor_of  # noqa: E402
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


# the interpreter needs seconds for a batch; by default it takes the first size alone
on_sizes = pytest.mark.parametrize(
    ("path", "size"),
    [
        pytest.param(name, size, marks=(*marks, *((pytest.mark.long,) if name == "torch-triton" and i > 0 else ())))
        for name, marks in adapters.PATHS.items()
        for i, size in enumerate(SIZES)
        if name.startswith("torch")
    ],
    indirect=["path"],
    ids=size_id,
)


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


@on_sizes
@both_orders
@pytest.mark.parametrize(
    ("what", "storage"),
    [("trees", "inputs"), ("trees", "dense"), *itertools.product(("resume", "both"), STORAGES)],
)
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


@on_sizes
@both_orders
@pytest.mark.parametrize(
    ("chains", "storage"),
    [(True, "inputs"), *itertools.product((False,), STORAGES)],  # chains of the other storages: test_torch_ref
)
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
