"""Properties of whole histories, drawn by hypothesis. What fails is shrunk and printed, with a blob to run it again.

The small profile is the same in every run. The large one (`-m thorough`, minutes) draws anew each time; what it
finds is kept in `.hypothesis` and tried first the next time. `--hypothesis-seed=N` repeats a run.

What a call should leave behind is `Model`, written from the contracts alone; pool and buffer are compared whole, as
integers.
"""

import dataclasses
import itertools
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_impl.layout import AXIS_ORDERS, ConvCacheSpec
from tests import adapters
from tests.adapters import Path
from tests.cases import DTYPES, INT32_MAX, INT32_MIN, assert_same_bits, poison, unique_bits, values

_phases = [
    phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain
]  # it takes longer than shrinking
_unchecked = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
_always = hypothesis.settings(deadline=None, print_blob=True, phases=_phases, suppress_health_check=_unchecked)
small = hypothesis.settings(_always, derandomize=True, database=None)
large = hypothesis.settings(_always)

INTERPRETED = ("jax-pallas_interpret", "torch-triton")
_names = [pytest.param(name, marks=marks) for name, marks in adapters.PATHS.items()]
every = pytest.mark.parametrize("name", _names)
fast = pytest.mark.parametrize("name", [one for one in _names if one.values[0] not in INTERPRETED])
interpreted = pytest.mark.parametrize("name", INTERPRETED)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A cache, the size of every batch and the pool's padding slot: what a program is compiled for."""

    spec: ConvCacheSpec
    batch: int
    null_slot: int | None


def geometry(
    width: int, tokens: int, conv_dim: int, batch: int, form: int = 0, layers: int = 1, null_slot: int | None = 0
) -> Geometry:
    """`form` counts through dtypes, axis orders and state lengths."""
    spec = ConvCacheSpec(
        num_layers=layers,
        num_slots=2 * batch + 3,
        max_requests=batch + 1,
        conv_dim=conv_dim,
        width=width,
        num_draft_tokens=tokens,
        dtype=DTYPES[form % 3],
        axis_order=AXIS_ORDERS[form % 2],
        state_len=width - 1 + form // 2 % 2,
    )
    return Geometry(spec, batch, null_slot)


# A program is compiled for each of these. The first one is what hypothesis shrinks to.
FEW = (geometry(4, 3, 5, 3), geometry(3, 7, 33, 5, 3, layers=2, null_slot=None), geometry(6, 11, 1, 2, 4))
FEW_IN_BLOCKS = (geometry(4, 3, 128, 2, 3),)


def _spread(dims: tuple[int, ...], count: int) -> tuple[Geometry, ...]:
    """Sizes that take turns with different periods: every K from 2 to 8 and every D from 1 to 17 are among them."""
    return tuple(
        geometry(2 + i % 7, 1 + 5 * i % 17, dims[i % len(dims)], 1 + i % 5, i % 12, 1 + i % 2, [0, None, 2][i % 3])
        for i in range(count)
    )


MANY, MANY_IN_BLOCKS = _spread((1, 7, 130, 33, 96), 34), _spread((128, 256), 9)


@st.composite
def geometries(draw: Any, name: str, is_large: bool, few: int = 2) -> Geometry:
    if "pallas" in name:
        return draw(st.sampled_from(MANY_IN_BLOCKS if is_large else FEW_IN_BLOCKS))
    if name != "torch-eager":
        return draw(st.sampled_from(MANY if is_large else FEW[: 1 if name in INTERPRETED else few]))
    return geometry(  # nothing is compiled
        draw(st.integers(2, 8)),
        draw(st.integers(1, 17)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 6)),
        draw(st.integers(0, 11)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([None, 0, 2])),
    )


def most_steps(name: str, is_large: bool) -> int:
    """Of one history: a step in an interpreter takes a hundred times as long as elsewhere."""
    return (4 if is_large else 2) if name in INTERPRETED else 50


# --- the model --------------------------------------------------------------------------------------------------------


class Model:
    """Pool and buffer in (column, channel) order, as integers."""

    def __init__(self, spec: ConvCacheSpec, pool: np.ndarray, windows: np.ndarray) -> None:
        self.spec = spec
        self.pool, self.windows = self._columns(pool), self._columns(windows)

    def _columns(self, array: np.ndarray) -> np.ndarray:
        integers = array.view({2: np.uint16, 4: np.uint32}[array.itemsize])
        return (integers if self.spec.axis_order == "time_major" else integers.swapaxes(-1, -2)).copy()

    def stored(self, columns: np.ndarray) -> np.ndarray:
        ordered = columns if self.spec.axis_order == "time_major" else columns.swapaxes(-1, -2)
        return np.ascontiguousarray(ordered).view(self.spec.dtype)

    def has_slot(self, slot: int, null_slot: int | None) -> bool:
        return 0 <= slot < self.spec.num_slots and slot != null_slot

    def verify(self, x: np.ndarray, slots: Any, rows: Any, valid: Any, layer: int, null_slot: int | None) -> np.ndarray:
        """Which elements of y are computed, `[B, D]`."""
        spec, computed = self.spec, np.zeros(x.shape[:2], np.bool_)
        fresh = x.astype(spec.dtype).view(self.pool.dtype)
        for b, (slot, row, v) in enumerate(zip(slots, rows, valid, strict=True)):
            live = self.has_slot(slot, null_slot) and 0 <= row < spec.max_requests and 1 <= v <= spec.num_draft_tokens
            if live and 0 <= layer < spec.num_layers:
                computed[b, :v] = True
                run = np.concatenate([self.pool[layer, slot, 1:], fresh[b, :v]])
                if spec.storage == "sliding":
                    self.windows[layer, row, : len(run)] = run
                else:
                    for n in range(1, v + 1):
                        self.windows[layer, row, n - 1] = run[n - 1 :][: spec.state_columns]
        return computed

    def window(self, n: int, row: int, v: int) -> np.ndarray | None:
        """`[L, S, conv_dim]`, or None where there is none."""
        if not (1 <= n <= v <= self.spec.num_draft_tokens and 0 <= row < self.spec.max_requests):
            return None
        of_row = self.windows[:, row]
        return of_row[:, n - 1] if self.spec.storage == "dense" else of_row[:, n - 1 :][:, : self.spec.state_columns]

    def commit(self, sets: Any, rows: Any, valid: Any, null_slot: int | None) -> set[int]:
        """Writes the windows of each (slots, counts); returns the slots that are named twice."""
        named: list[int] = []
        before = self.windows.copy()
        for slots, counts in sets:
            for slot, n, row, v in zip(slots, counts, rows, valid, strict=True):
                window = self.window(n, row, v)
                if window is not None and self.has_slot(slot, null_slot):
                    self.pool[:, slot] = window
                    named.append(slot)
        assert (before == self.windows).all()
        return {slot for slot in named if named.count(slot) > 1}


def int32(numbers: Any) -> np.ndarray:
    return np.asarray(numbers, np.int32)


# --- histories --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of an engine. `joined` are slots that a new request takes over: they are emptied before the step.

    A request is a slot: one that is not named waits, one that joins again has left. -1 and the null slot are padding,
    and so is a slot that is named again, with n = 0. Snapshots go to slots that no request of the step has.
    """

    joined: tuple[int, ...]
    slots: tuple[int, ...]
    first_row: int
    valid: tuple[int, ...]
    accepted: tuple[int, ...]
    track_slots: tuple[int, ...]
    track_counts: tuple[int, ...]


@st.composite
def histories(draw: Any, where: Geometry, most: int) -> list[Step]:
    spec, batch, started, found = where.spec, where.batch, set(), []
    per_request = st.tuples(
        st.integers(-1, spec.num_slots - 1),  # slot
        st.integers(1, spec.num_draft_tokens),  # v
        st.integers(0, spec.num_draft_tokens),  # n, at most v
        st.booleans(),  # joins
        st.integers(-1, spec.num_slots - 1),  # snapshot's slot
        st.integers(0, spec.num_draft_tokens),  # snapshot's count, at most n
    )
    for _ in range(draw(st.integers(1, most))):
        drawn = draw(st.lists(per_request, min_size=batch, max_size=batch))
        slots, valid = tuple(one[0] for one in drawn), tuple(one[1] for one in drawn)
        accepted = tuple(
            0 if one[0] in slots[:b] and one[0] not in (-1, where.null_slot) else min(one[2], one[1])
            for b, one in enumerate(drawn)
        )
        taken, tracks = {*slots}, []
        for one, n in zip(drawn, accepted, strict=True):
            is_padding = one[0] in (-1, where.null_slot)  # its row holds nothing of its own
            tracks.append((-1 if one[4] in taken or is_padding else one[4], min(one[5], n)))
            taken.add(one[4])
        live = {slot: one[3] for slot, one in zip(slots, drawn, strict=True) if slot not in (-1, where.null_slot)}
        joined = tuple(slot for slot, joins in live.items() if joins or slot not in started)
        started |= {*live, *(slot for slot, count in tracks if count)}
        found.append(
            Step(
                joined,
                slots,
                draw(st.integers(0, spec.max_requests - 1)),
                valid,
                accepted,
                *(tuple(column) for column in zip(*tracks, strict=True)),
            )
        )
    return found


@dataclasses.dataclass
class Engine:
    """One cache under test beside its model."""

    path: Path
    where: Geometry
    spec: ConvCacheSpec
    weight: np.ndarray
    pool: np.ndarray
    windows: np.ndarray

    def __post_init__(self) -> None:
        self.model = Model(self.spec, self.pool, self.windows)

    def run(self, x: np.ndarray, step: Step) -> np.ndarray:
        """Verify in every layer, then commit with snapshots; y `[L, B, D, conv_dim]`."""
        spec, null = self.spec, self.where.null_slot
        rows = [(step.first_row + b) % spec.max_requests for b in range(self.where.batch)]
        shared: dict[str, Any] = {
            "spec": spec,
            "window_rows": int32(rows),
            "num_valid_tokens": int32(step.valid),
            "null_slot": null,
        }
        every_y = []
        for layer in range(spec.num_layers):
            y, self.windows, after = self.path.verify(
                x[layer], self.pool, self.windows, self.weight, state_indices=int32(step.slots), layer=layer, **shared
            )
            assert_same_bits(after, self.pool, "the pool after verify")
            computed = self.model.verify(x[layer], step.slots, rows, step.valid, layer, null)
            assert not y[~computed].view(np.uint8).any(), "y of what is skipped"
            every_y.append(y)
        assert_same_bits(self.windows, self.model.stored(self.model.windows), "the buffer after verify")
        track = {"track_indices": int32(step.track_slots), "track_num_tokens": int32(step.track_counts)}
        self.pool = self.path.commit(
            self.pool, self.windows, int32(step.slots), int32(step.accepted), **shared, **track
        )
        sets = [(step.slots, step.accepted), (step.track_slots, step.track_counts)]
        assert not self.model.commit(sets, rows, step.valid, null), "the history names a slot twice"
        assert_same_bits(self.pool, self.model.stored(self.model.pool), "the pool after commit")
        return np.stack(every_y)

    def join(self, slots: tuple[int, ...]) -> None:
        self.pool = self.pool.copy()
        self.pool[:, list(slots)] = 0
        self.model.pool[:, list(slots)] = 0


def one_by_one(path: Path, pool: np.ndarray, x: np.ndarray, weight: np.ndarray, step: Step, where: Geometry) -> Any:
    """Plain decoding of the accepted tokens, with a copy of the slot where a snapshot is due: (y, pool)."""
    y, slots, counts = np.zeros_like(x), int32(step.slots), int32(step.accepted)
    for token in range(max(step.accepted)):
        running = np.where(counts > token, slots, -1).astype(np.int32)
        for layer in range(where.spec.num_layers):
            y[layer, :, token], pool = path.update(
                x[layer, :, token], pool, weight, spec=where.spec, state_indices=running, layer=layer,
                null_slot=where.null_slot,
            )  # fmt: skip
        for slot, to, count in zip(step.slots, step.track_slots, step.track_counts, strict=True):
            if to not in (-1, where.null_slot) and count == token + 1:
                pool = pool.copy()
                pool[:, to] = pool[:, slot]
    return y, pool


def check_history(data: Any, name: str, is_large: bool) -> None:
    path = adapters.path(name)
    where = data.draw(geometries(name, is_large, few=3), label="geometry")
    history = data.draw(histories(where, most_steps(name, is_large)), label="history")
    seed = data.draw(st.integers(0, 999), label="seed of the values")
    spec = where.spec
    weight = values((spec.conv_dim, spec.width), "float32", seed)
    pool = by_token = unique_bits(spec.state_shape, spec.dtype, seed)
    engines = [
        Engine(path, where, one, weight, pool, poison(one.windows_shape, one.dtype))
        for one in (spec, dataclasses.replace(spec, storage="dense"))
    ]
    for number, step in enumerate(history):
        x = values((spec.num_layers, where.batch, spec.num_draft_tokens, spec.conv_dim), "float32", seed + 7 + number)
        by_token = by_token.copy()
        by_token[:, list(step.joined)] = 0
        for engine in engines:
            engine.join(step.joined)
        sliding, dense = (engine.run(x, step) for engine in engines)
        assert_same_bits(dense, sliding, f"y of step {number}, dense and sliding")
        y, by_token = one_by_one(path, by_token, x, weight, step, where)
        assert_same_bits(engines[0].pool, by_token, f"the pool after step {number}, at once and one by one")
        counts = [0 if slot in (-1, where.null_slot) else n for slot, n in zip(step.slots, step.accepted, strict=True)]
        accepted = np.arange(spec.num_draft_tokens) < int32(counts)[:, None]
        assert_same_bits(sliding[:, accepted], y[:, accepted], f"y of step {number}, at once and one by one")


# --- any int32 --------------------------------------------------------------------------------------------------------


def check_any_int32(data: Any, name: str, is_large: bool) -> None:
    """Every index array holds anything at once: what is live is done, nothing else is touched, on every operation."""
    path = adapters.path(name)
    where = data.draw(geometries(name, is_large), label="geometry")
    spec, batch, null = where.spec, where.batch, where.null_slot

    def index(label: str, limit: int) -> list[int]:
        near = st.integers(-2, limit + 2)
        limits = st.sampled_from([INT32_MIN, INT32_MAX, -limit, 2 * limit, 2**16, -(2**16)])
        one = st.one_of(near, near, limits, st.integers(INT32_MIN, INT32_MAX))
        return data.draw(st.lists(one, min_size=batch, max_size=batch), label=label)

    slots, track_slots = index("state_indices", spec.num_slots), index("track_indices", spec.num_slots)
    rows = index("window_rows", spec.max_requests)
    valid, accepted, tracked = (index(one, spec.num_draft_tokens) for one in ("valid", "accepted", "tracked"))
    layer = index("layer", spec.num_layers)[0]
    if spec.width % 2:  # no geometry in two storages, which would take twice the programs
        spec = dataclasses.replace(spec, storage="dense")
    pool, windows = values(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    x, weight = (
        values((batch, spec.num_draft_tokens, spec.conv_dim), "float32", 3),
        values((spec.conv_dim, spec.width), "float32", 4),
    )
    model = Model(spec, pool, windows)
    shared: dict[str, Any] = {
        "spec": spec, "null_slot": null, "window_rows": int32(rows), "num_valid_tokens": int32(valid)
    }  # fmt: skip
    step: dict[str, Any] = {"state_indices": int32(slots), "layer": int32(layer)}
    y, buffer, after = path.verify(x, pool, windows, weight, **shared, **step)
    assert_same_bits(after, pool, "the pool after verify")
    computed = model.verify(x, slots, rows, valid, layer, null)
    assert not y[~computed].view(np.uint8).any(), "y of what is skipped"
    assert np.isfinite(y).all()
    twice = [row for row in range(spec.max_requests) if rows.count(row) > 1]
    once = np.isin(np.arange(spec.max_requests), twice, invert=True)
    assert_same_bits(buffer[:, once], model.stored(model.windows)[:, once], "the buffer after verify")

    model = Model(spec, pool, windows)
    track = {"track_indices": int32(track_slots), "track_num_tokens": int32(tracked)}
    after = path.commit(pool, windows, int32(slots), int32(accepted), **shared, **track)
    twice = model.commit([(slots, accepted), (track_slots, tracked)], rows, valid, null)
    once = np.isin(np.arange(spec.num_slots), list(twice), invert=True)
    assert_same_bits(after[:, once], model.stored(model.pool)[:, once], "the pool after commit")

    found = path.gather(windows, int32(accepted), spec=spec, window_rows=int32(rows))
    for b, (n, row) in enumerate(zip(accepted, rows, strict=True)):
        window = model.window(n, row, spec.num_draft_tokens)
        expected = np.zeros_like(found[:, b]) if window is None else model.stored(window)
        assert_same_bits(found[:, b], expected, f"the window of request {b}")

    y, after = path.update(x[:, 0], pool, weight, spec=spec, null_slot=null, **step)
    live = [model.has_slot(slot, null) and 0 <= layer < spec.num_layers for slot in slots]
    untouched = np.ones(pool.shape[:2], np.bool_)
    for slot in itertools.compress(slots, live):
        untouched[layer, slot] = False
    assert not y[~np.asarray(live)].view(np.uint8).any()
    assert_same_bits(after[untouched], pool[untouched], "the pool after update")
    lengths = accepted
    y, after = path.prefill(x, pool, weight, spec=spec, null_slot=null, lengths=int32(lengths), **step)
    filled = [one and 1 <= n <= x.shape[1] for one, n in zip(live, lengths, strict=True)]
    untouched = np.ones(pool.shape[:2], np.bool_)
    for slot in itertools.compress(slots, filled):
        untouched[layer, slot] = False
    computed = np.asarray(filled)[:, None] & (np.arange(x.shape[1]) < int32(lengths)[:, None])
    assert not y[~computed].view(np.uint8).any()
    assert_same_bits(after[untouched], pool[untouched], "the pool after prefill")


# --- any bits ---------------------------------------------------------------------------------------------------------


def check_any_bits(data: Any, name: str, is_large: bool) -> None:
    """Pool and buffer of any patterns: commit and gather move them as they are."""
    path = adapters.path(name)
    where = data.draw(geometries(name, is_large), label="geometry")
    spec = dataclasses.replace(where.spec, storage="dense") if where.spec.width % 2 else where.spec
    kind = np.dtype({2: np.uint16, 4: np.uint32}[spec.item_bytes])
    whole = hypothesis_numpy.from_dtype(kind)
    pool, windows = (
        data.draw(hypothesis_numpy.arrays(kind, shape, elements=whole, fill=whole), label=label).view(spec.dtype)
        for label, shape in (("pool", spec.state_shape), ("buffer", spec.windows_shape))
    )
    slots = data.draw(st.permutations(range(spec.num_slots)), label="slots")[: where.batch]
    accepted = data.draw(
        st.lists(st.integers(0, spec.num_draft_tokens), min_size=where.batch, max_size=where.batch), label="accepted"
    )
    model, rows = Model(spec, pool, windows), range(where.batch)
    valid = [spec.num_draft_tokens] * where.batch
    after = path.commit(pool, windows, int32(slots), int32(accepted), spec=spec, null_slot=where.null_slot)
    model.commit([(slots, accepted)], rows, valid, where.null_slot)
    assert_same_bits(after, model.stored(model.pool), "the pool after commit")
    found = path.gather(windows, int32(accepted), spec=spec)
    for b, n in enumerate(accepted):
        if n:
            window = model.window(n, b, spec.num_draft_tokens)
            assert window is not None
            assert_same_bits(found[:, b], model.stored(window), f"the window of request {b}")


# --- the tests --------------------------------------------------------------------------------------------------------

draws = hypothesis.given(data=st.data())


@fast
@hypothesis.settings(small, max_examples=5)
@draws
def test_sliding_and_dense_are_one_token_decoding(name: str, data: Any) -> None:
    check_history(data, name, is_large=False)


@interpreted
@hypothesis.settings(small, max_examples=2)
@draws
def test_sliding_and_dense_are_one_token_decoding_in_interpreters(name: str, data: Any) -> None:
    check_history(data, name, is_large=False)


@fast
@hypothesis.settings(small, max_examples=30)
@draws
def test_any_int32_is_safe_in_any_index_array(name: str, data: Any) -> None:
    check_any_int32(data, name, is_large=False)


@interpreted
@hypothesis.settings(small, max_examples=4)
@draws
def test_any_int32_is_safe_in_interpreters(name: str, data: Any) -> None:
    check_any_int32(data, name, is_large=False)


@every
@hypothesis.settings(small, max_examples=20)
@draws
def test_any_bits_survive(name: str, data: Any) -> None:
    check_any_bits(data, name, is_large=False)


@pytest.mark.thorough
@fast
@hypothesis.settings(large, max_examples=40)
@draws
def test_sliding_and_dense_are_one_token_decoding_at_length(name: str, data: Any) -> None:
    check_history(data, name, is_large=True)


@pytest.mark.thorough
@interpreted
@hypothesis.settings(large, max_examples=8)
@draws
def test_sliding_and_dense_are_one_token_decoding_at_length_in_interpreters(name: str, data: Any) -> None:
    check_history(data, name, is_large=True)


@pytest.mark.thorough
@fast
@hypothesis.settings(large, max_examples=60)
@draws
def test_any_int32_is_safe_at_length(name: str, data: Any) -> None:
    check_any_int32(data, name, is_large=True)


@pytest.mark.thorough
@interpreted
@hypothesis.settings(large, max_examples=8)
@draws
def test_any_int32_is_safe_at_length_in_interpreters(name: str, data: Any) -> None:
    check_any_int32(data, name, is_large=True)


@pytest.mark.thorough
@every
@hypothesis.settings(large, max_examples=30)
@draws
def test_any_bits_survive_at_length(name: str, data: Any) -> None:
    check_any_bits(data, name, is_large=True)
