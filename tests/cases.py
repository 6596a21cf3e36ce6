"""Geometries, batches and comparisons that every test file shares."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from jax_impl.layout import AXIS_ORDERS, AxisOrder, ConvCacheSpec, Storage
from tests import adapters, definition

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
DTYPES = ("bfloat16", "float16", "float32")
MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
SMALLEST_EXPONENT = {"bfloat16": -126, "float16": -14, "float32": -126}

both_orders = pytest.mark.parametrize("axis_order", AXIS_ORDERS)
# Rows that hold whole windows; those of storage "inputs" are read together with the slot, and have tests of their own.
both_storages = pytest.mark.parametrize("storage", ["sliding", "dense"])


def spec_of(width: int = 4, num_draft_tokens: int = 3, **changes: Any) -> ConvCacheSpec:
    """A small geometry that every path can take: 128 channels, more slots than rows."""
    fields: dict[str, Any] = {"num_layers": 2, "num_slots": 11, "max_requests": 9, "conv_dim": 128} | changes
    return ConvCacheSpec(width=width, num_draft_tokens=num_draft_tokens, **fields)


def _grid(sizes: Iterable[tuple[int, int]], dims: tuple[int, ...]) -> Iterator[ConvCacheSpec]:
    """(width, tokens): sliding in both axis orders, dense in one of them; the other fields take turns."""
    both: list[tuple[AxisOrder, Storage]] = [("time_major", "sliding"), ("channel_major", "sliding")]
    dense: Iterator[tuple[AxisOrder, Storage]] = itertools.cycle([("time_major", "dense"), ("channel_major", "dense")])
    combinations = ((*size, *form) for size in sizes for form in (*both, next(dense)))
    for i, (width, num_draft_tokens, axis_order, storage) in enumerate(combinations):
        requests = num_draft_tokens + 20  # what a mixed batch has at most
        yield ConvCacheSpec(
            num_layers=2,
            num_slots=requests + 3,
            max_requests=requests + 2,
            conv_dim=dims[(i + i // 15) % len(dims)],
            width=width,
            num_draft_tokens=num_draft_tokens,
            dtype=DTYPES[(i + i // 9) % 3],
            axis_order=axis_order,
            storage=storage,
            state_len=width - 1 + i % 2,
        )


FULL_GRID = tuple(_grid(itertools.product((2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 7, 8, 16)), (1, 5, 96, 128, 1000)))
# 1408 = 11 × 128 channels are several blocks in every dtype, 128 one.
SMALL_GRID = tuple(_grid(((2, 3), (3, 1), (4, 3), (5, 2), (7, 3)), (*[128] * 5, 1408)))


def spec_id(value: object) -> str | None:
    """Short name of a geometry in test ids; None leaves other parameters to pytest."""
    if not isinstance(value, ConvCacheSpec):
        return None
    s = value
    return f"K{s.width}-S{s.state_len}-D{s.num_draft_tokens}-{s.conv_dim}-{s.dtype}-{s.axis_order}-{s.storage}"


def on_grid(*, every_second_for: str = "") -> pytest.MarkDecorator:
    """Parametrises a test with `path` and `spec`: the full grid, or the small one where a case takes long.

    `every_second_for` names a path whose compiler needs the whole time: every (width, tokens) stays, in fewer forms.
    """
    every = [
        pytest.param(name, spec, marks=marks)
        for name, marks in adapters.PATHS.items()
        for spec in (FULL_GRID[:: 1 + (name == every_second_for)] if name in adapters.FAST else SMALL_GRID)
    ]
    return pytest.mark.parametrize(("path", "spec"), every, indirect=["path"], ids=spec_id)


# --- values -----------------------------------------------------------------------------------------------------------


def unique_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Elements whose bits differ (16-bit dtypes: any 65,536 neighbours), NaNs, subnormals and -0.0 among them."""
    size, unsigned = int(np.prod(shape)), {2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]
    scrambled = np.arange(size, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(40503 * seed)
    return scrambled.astype(unsigned).view(dtype).reshape(shape)


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal deviates, rounded to `dtype`."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def poison(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """NaN with a payload that no computation makes."""
    pattern = {"bfloat16": 0x7FD5, "float16": 0x7ED5, "float32": 0x7FD5AAAA}[dtype]
    return np.full(shape, pattern, {2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]).view(dtype)


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    """Index arrays of one call. `window_rows` and `num_valid_tokens` hold what None stands for, where None is meant."""

    slots: np.ndarray
    rows: np.ndarray
    accepted: np.ndarray
    valid: np.ndarray
    null_slot: int | None
    explicit: frozenset[str]

    def given(self, name: Literal["rows", "valid"]) -> np.ndarray | None:
        return getattr(self, name) if name in self.explicit else None


def mixed_batch(spec: ConvCacheSpec, seed: int = 0, *, explicit: Any = ("rows", "valid"), null_slot: Any = 0) -> Batch:
    """Every accepted count and every reason to skip in one shuffled batch, with the padding rows of three conventions.

    Live: n = 1 … D, each in a slot and row of its own. Skipped: counts 0, -1, D+1 and the int32 limits; slots -1, C,
    C+1 and the limits; with rows given, rows -1, R and the limits; with valid tokens given, n > v, v = 0, v > D and
    the limits. Padding: slot -1 with a good count, a live slot again with n = 0, and the null slot 0 with a good count.
    """
    rng, tokens = np.random.default_rng(seed), spec.num_draft_tokens
    outside_slots = [-1, spec.num_slots, spec.num_slots + 1, INT32_MIN, INT32_MAX]
    outside_rows = [-1, spec.max_requests, INT32_MIN, INT32_MAX]
    outside_counts = [0, -1, tokens + 1, INT32_MIN, INT32_MAX]
    free_slots = iter(rng.permutation(np.arange(1 if null_slot == 0 else 0, spec.num_slots)).tolist())
    free_rows = iter(rng.permutation(spec.max_requests).tolist())
    requests: list[tuple[int, int, int, int]] = []  # slot, row, n, v
    live_slots = []
    for n in range(1, tokens + 1):
        live_slots.append(next(free_slots))
        requests.append((live_slots[-1], next(free_rows), n, int(rng.integers(n, tokens + 1))))
    requests += [(next(free_slots), next(free_rows), n, tokens) for n in outside_counts]
    requests += [(slot, next(free_rows), tokens, tokens) for slot in outside_slots]
    if "rows" in explicit:
        requests += [(next(free_slots), row, tokens, tokens) for row in outside_rows]
    if "valid" in explicit:
        requests += [(next(free_slots), next(free_rows), 1, v) for v in (0, INT32_MIN, INT32_MAX)]
        requests += [(next(free_slots), next(free_rows), tokens, tokens - 1)]
    if null_slot is not None:
        requests += [(null_slot, next(free_rows), 1, tokens)]
    requests += [(live_slots[-1], next(free_rows), 0, tokens)]
    order = rng.permutation(len(requests))
    slots, rows, accepted, valid = np.asarray(requests, np.int64)[order].T.astype(np.int32)
    if "rows" not in explicit:
        rows = np.arange(len(slots), dtype=np.int32)
    if "valid" not in explicit:
        valid = np.full_like(slots, tokens)
    return Batch(slots, rows, accepted, valid, null_slot, frozenset(explicit))


# --- comparisons ------------------------------------------------------------------------------------------------------


def assert_same_bits(got: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Shape, dtype and every bit."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    differs = definition.bits(np.ascontiguousarray(got)) != definition.bits(np.ascontiguousarray(expected))
    assert not differs.any(), f"{what}: {differs.sum()} elements differ, first at {np.argwhere(differs)[0]}"


def ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """Distance of neighbouring numbers of `dtype` around `value`, which is rounded to it first."""
    rounded = np.abs(value.astype(dtype).astype(np.float64))
    exponent = np.where(rounded > 0, np.frexp(rounded)[1] - 1, SMALLEST_EXPONENT[dtype])
    return np.ldexp(1.0, np.maximum(exponent, SMALLEST_EXPONENT[dtype]) - MANTISSA_BITS[dtype])


def assert_y_close(y: np.ndarray, exact: np.ndarray, magnitude: np.ndarray, spec: ConvCacheSpec) -> None:
    """y within one ulp of its dtype around the float64 value, plus what float32 sums may lose.

    `magnitude` is |bias| + Σ |weight · column|. Each of the K products and K sums loses at most half a float32 ulp of
    it, and SiLU (slope at most 1.1, exponential and division good to four ulp each) as much again.
    """
    accumulation = (2 * spec.width + 10) * 2.0**-24 * magnitude
    error = np.abs(y.astype(np.float64) - exact)
    bound = ulp(exact, ml_dtypes.finfo(y.dtype).dtype.name) + accumulation
    worst = np.nanargmax(error / bound) if error.size else 0
    assert not error.size or (error <= bound).all(), (
        f"error {error.flat[worst]} > {bound.flat[worst]} at element {worst}"
    )
