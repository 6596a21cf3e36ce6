"""torch_ref's recurrent commit, and the counts that drive a commit, against loops over NumPy integers.

On a machine without CUDA the kernels run in Triton's interpreter; `-m gpu` runs the same tests on compiled kernels.
"""

import doctest
import importlib
import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_ref  # noqa: E402
from tests import definition  # noqa: E402
from tests.adapters import Path  # noqa: E402
from tests.cases import INT32_MAX, INT32_MIN, assert_same_bits, mixed_batch, poison, spec_of, unique_bits  # noqa: E402
from tests.torch_cases import (  # noqa: E402
    GAP,
    HOSTILE,
    WIDE,
    Envelope,
    array_of,
    commit_loops,
    device_of,
    how,
    on_torch,
    tensor_of,
)


def sizes(tokens: int = 3, requests: int = 25) -> Any:
    """Room for a mixed batch: more slots than rows."""
    return spec_of(num_draft_tokens=tokens, num_slots=requests + 3, max_requests=requests + 2)


def arrays(spec: Any, entry: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A pool and its step states of unique bits, NaNs of many payloads among them."""
    state = unique_bits((spec.num_layers, spec.num_slots, *entry), dtype, 1)
    steps = unique_bits((spec.num_layers, spec.max_requests, spec.num_draft_tokens, *entry), dtype, 2)
    return state, steps


def expected(state: np.ndarray, steps: np.ndarray, *sets: tuple[Any, Any], **options: Any) -> np.ndarray:
    after = state.copy()
    for slots, counts in sets:
        commit_loops(definition.bits(after), definition.bits(steps), slots, counts, **options)
    return after


# --- commit_recurrent_state -------------------------------------------------------------------------------------------


@on_torch
@pytest.mark.parametrize(
    ("entry", "dtype", "tokens"),
    [
        ((), "float32", 3),
        ((1,), "bfloat16", 1),
        ((5,), "float16", 4),
        ((3, 7), "bfloat16", 2),
        ((2, 3, 5, 1), "float32", 5),
        ((4, 33, 17), "float32", 2),  # 2244 elements: several blocks, the last one ragged
    ],
    ids=str,
)
def test_every_count_beside_padding(path: Path, entry: tuple[int, ...], dtype: str, tokens: int) -> None:
    spec = sizes(tokens)
    state, steps = arrays(spec, entry, dtype)
    for seed, explicit in enumerate(((), ("rows",), ("rows", "valid"))):
        batch = mixed_batch(spec, seed, explicit=explicit)
        pool, buffer = tensor_of((state, steps), path)
        returned = torch_ref.commit_recurrent_state(
            pool, buffer, batch.slots, batch.accepted, window_rows=batch.given("rows"),
            num_valid_tokens=batch.given("valid"), null_slot=batch.null_slot, **how(path),
        )  # fmt: skip
        assert returned is pool
        wanted = expected(
            state, steps, (batch.slots, batch.accepted), rows=batch.rows, valid=batch.valid, null=batch.null_slot
        )
        assert (definition.bits(wanted) != definition.bits(state)).any((0, *range(2, state.ndim))).sum() == tokens
        assert_same_bits(array_of(pool), wanted)
        assert_same_bits(array_of(buffer), steps)


@on_torch
def test_all_patterns_of_sixteen_bits(path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        steps = np.arange(65536, dtype=np.uint16).view(dtype).reshape(1, 1, 1, 256, 256)
        pool = torch_ref.commit_recurrent_state(
            tensor_of(np.zeros((1, 2, 256, 256), dtype), path), tensor_of(steps, path), [1], [1], **how(path)
        )
        assert_same_bits(array_of(pool)[0, 1], steps[0, 0, 0])
        assert not array_of(pool)[0, 0].view(np.uint16).any()


@on_torch
def test_track_and_accept_from_one_row(path: Path) -> None:
    spec = sizes(requests=8)
    state, steps = arrays(spec, (3, 5), "float32")
    slots, counts, rows = [1, 2, 0, 4, -1, 5], [3, 0, 2, 1, 1, 3], [8, 7, 6, 5, 4, 3]
    tracks, track_counts, valid = [6, 7, 8, 9, 10, 0], [1, 2, 0, 3, 3, 1], [3, 3, 3, 2, 3, 3]
    pool, buffer = tensor_of((state, steps), path)
    torch_ref.commit_recurrent_state(
        pool, buffer, slots, counts, window_rows=rows, num_valid_tokens=valid, null_slot=0, track_indices=tracks,
        track_num_tokens=track_counts, **how(path),
    )  # fmt: skip
    wanted = state.copy()
    for slot, row, n in [(1, 8, 3), (4, 5, 1), (5, 3, 3), (6, 8, 1), (7, 7, 2), (10, 4, 3)]:
        wanted[:, slot] = steps[:, row, n - 1]
    assert_same_bits(array_of(pool), wanted)


@on_torch
def test_slots_may_be_any_permutation_even_of_one_memory(path: Path) -> None:
    """The step states are the pool itself, with one token each: every read sees the pool as it was."""
    rng = np.random.default_rng(3)
    state = unique_bits((2, 11, 4, 3), "float16", 1)
    for slots in (rng.permutation(11), np.roll(np.arange(11), 1), np.arange(11)[::-1].copy()):
        pool = tensor_of(state, path)
        torch_ref.commit_recurrent_state(pool, pool.unsqueeze(2), slots, [1] * 11, **how(path))
        wanted = np.empty_like(state)
        wanted[:, slots] = state
        assert_same_bits(array_of(pool), wanted)


@on_torch
@pytest.mark.parametrize("place", ["slots", "rows", "counts", "valid", "track_slots", "track_counts"])
def test_hostile_indices_write_nothing(path: Path, place: str) -> None:
    state = poison((2, 11, 3), "float32")
    steps = unique_bits((2, 11, 10, 3), "float32", 2)
    given: dict[str, Any] = {"slots": list(range(11)), "rows": list(range(11)), "counts": [1] * 11, "valid": None}
    given |= {"track_slots": None, "track_counts": None}
    if place.startswith("track"):
        given |= {"counts": [0] * 11, "track_slots": list(range(11)), "track_counts": [1] * 11}
    for hostile in (HOSTILE, [0, *WIDE, INT32_MIN, -2, 2**31, 11, 12, 13]):
        given[place] = torch.tensor(hostile, dtype=torch.int64, device=device_of(path))
        if place in ("slots", "track_slots", "rows"):
            given[place][given[place] == 0] = -1  # slot and row 0 are good ones
        pool, buffer = tensor_of((state, steps), path)
        torch_ref.commit_recurrent_state(
            pool, buffer, given["slots"], given["counts"], window_rows=given["rows"], num_valid_tokens=given["valid"],
            track_indices=given["track_slots"], track_num_tokens=given["track_counts"],
            **how(path),
        )  # fmt: skip
        assert_same_bits(array_of(pool), state)


@on_torch
def test_null_slot_conventions(path: Path) -> None:
    state, steps = arrays(sizes(requests=3), (7,), "bfloat16")
    for null, live in ((0, []), (None, [0]), (-1, [0]), (2**40, [0]), (4, [0])):
        pool = torch_ref.commit_recurrent_state(
            tensor_of(state, path), tensor_of(steps, path), [0, -1, 4], [1, 1, 2], null_slot=null, **how(path)
        )
        wanted = state.copy()
        wanted[:, live] = steps[:, live, 0]
        if null != 4:
            wanted[:, 4] = steps[:, 2, 1]
        assert_same_bits(array_of(pool), wanted)


@on_torch
def test_structures_and_single_layers(path: Path) -> None:
    spec = sizes(requests=4)
    wide, flat = arrays(spec, (2, 5), "float32"), arrays(spec, (), "float16")
    state = {"gdn": [wide[0][:1], wide[0][1:]], "mamba": (flat[0], None)}
    steps = {"mamba": (flat[1], None), "gdn": [wide[1][:1], wide[1][1:]]}
    pool, buffer = tensor_of((state, steps), path)
    sets = (([3, 6, -1, 0], [3, 1, 2, 0]), ([1, -1, 2, 7], [2, 1, 1, 4]))
    returned = torch_ref.commit_recurrent_state(
        pool, buffer, *sets[0], track_indices=sets[1][0], track_num_tokens=sets[1][1],
        **how(path),
    )  # fmt: skip
    assert returned is pool
    assert_same_bits(np.concatenate([array_of(layer) for layer in pool["gdn"]]), expected(*wide, *sets))
    assert_same_bits(array_of(pool["mamba"][0]), expected(*flat, *sets))
    # one layer's tensors: [C] and [R, D], and as many rows as slots
    one = torch_ref.commit_recurrent_state(
        tensor_of(flat[0][1], path), tensor_of(flat[1][1], path), *sets[0], layer_axis=False, **how(path)
    )
    assert_same_bits(array_of(one), expected(*flat, sets[0])[1])
    state, steps = unique_bits((4, 3, 5), "float32", 1), unique_bits((4, 2, 3, 5), "float32", 2)
    one = torch_ref.commit_recurrent_state(
        tensor_of([state], path), tensor_of([steps], path), [3, 1], [2, 1], layer_axis=False, **how(path)
    )
    assert_same_bits(array_of(one[0]), expected(state[None], steps[None], ([3, 1], [2, 1]))[0])


@on_torch
def test_free_strides_and_gaps(path: Path) -> None:
    """A pool inside an envelope, and step states in the order (token, row, layer), each with rows to spare."""
    spec = sizes()
    state, steps = arrays(spec, (3, 5), "bfloat16")
    shape = {"other": (2, (7,), "float32"), "recurrent": (2, (3, 5), "bfloat16")}
    envelope = Envelope(spec.num_slots, shape, device_of(path))
    assert int((envelope.memory == GAP).sum()) == envelope.memory.numel()
    envelope.memory = envelope.holding({"recurrent": state})
    pool = envelope.pool("recurrent")
    spread = tensor_of(poison((spec.num_draft_tokens, spec.max_requests, 3, 4, 5), "bfloat16"), path)
    buffer = spread[:, :, :2, :3].permute(2, 1, 0, 3, 4)
    buffer.view(torch.int16).copy_(tensor_of(steps, path).view(torch.int16))
    batch = mixed_batch(spec, 4)
    torch_ref.commit_recurrent_state(
        pool, buffer, batch.slots, batch.accepted, window_rows=batch.rows, num_valid_tokens=batch.valid,
        null_slot=batch.null_slot, **how(path),
    )  # fmt: skip
    wanted = expected(
        state, steps, (batch.slots, batch.accepted), rows=batch.rows, valid=batch.valid, null=batch.null_slot
    )
    after = envelope.holding({"recurrent": wanted})
    assert torch.equal(envelope.memory, after)
    assert int((after == GAP).sum()) >= 2 * 28 * (6 + 4 * 7)  # the gaps and the other pool


@on_torch
def test_offsets_past_two_to_the_31(path: Path) -> None:
    """8 GiB of address space of which a few pages are touched: layer, slot, row or token lies 2^31 elements away."""
    try:
        memory = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device=device_of(path))
    except RuntimeError:
        pytest.skip("8 GiB of address space are missing")
    far = 2**31 + 64
    for axis in ("layer", "slot", "row", "token"):
        # in the middle, so that an offset taken in 32 bits, which is negative, ends at the start instead of outside
        near = memory[:4096].fill_(1)
        if axis in ("layer", "slot"):
            strides = (far, 32, 1) if axis == "layer" else (32, far, 1)
            pool = memory.as_strided((2, 2, 5), strides, 2**31).fill_(2)
            steps = torch.full((2, 2, 3, 5), 2.0, dtype=memory.dtype, device=memory.device)
        else:
            strides = (32, far, 64, 1) if axis == "row" else (32, 64, far, 1)
            steps = memory.as_strided((2, 2, 2, 5), strides, 2**31).fill_(2)
            pool = torch.full((2, 3, 5), 2.0, dtype=memory.dtype, device=memory.device)
        steps[1, 1, 1] = 3
        torch_ref.commit_recurrent_state(pool, steps, [-1, 1], [2, 2], **how(path))
        assert pool[1, 1].tolist() == [3] * 5, axis
        assert int(pool.eq(2).sum()) == pool.numel() - 5, axis
        assert bool((near == 1).all()), axis


@on_torch
def test_no_requests_and_no_rows(path: Path) -> None:
    state, steps = tensor_of((unique_bits((2, 4, 3), "float32", 1), unique_bits((2, 3, 5, 3), "float32", 2)), path)
    before = array_of(state)
    torch_ref.commit_recurrent_state(state, steps, [], [], **how(path))
    torch_ref.commit_recurrent_state(state, steps[:, :0], [1, 2], [1, 1], window_rows=[0, -1], **how(path))
    assert_same_bits(array_of(state), before)


def test_random_steps_equal_a_sequential_recurrence() -> None:
    """A decaying outer-product state in float32: after every step the pool is what one token at a time leaves."""
    rng = np.random.default_rng(7)
    pool = torch.from_numpy(rng.standard_normal((2, 9, 3, 4)).astype(np.float32))
    plain = pool.clone()
    steps = torch.full((2, 6, 4, 3, 4), float("nan"))
    for _ in range(30):
        slots, rows = rng.permutation(9)[:5], rng.permutation(6)[:5]
        accepted = rng.integers(0, 5, 5)
        update = torch.from_numpy(rng.standard_normal((2, 5, 4, 3, 4)).astype(np.float32))
        for b in range(5):
            held = pool[:, slots[b]]
            for t in range(4):
                held = 0.9 * held + update[:, b, t]
                steps[:, rows[b], t] = held
            for t in range(accepted[b]):
                plain[:, slots[b]] = 0.9 * plain[:, slots[b]] + update[:, b, t]
        torch_ref.commit_recurrent_state(pool, steps, slots, accepted, window_rows=rows, implementation="eager")
        assert torch.equal(pool, plain)


# --- errors -----------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros
ERRORS = [
    (
        {"step_states": ZEROS(2, 3, 4, 6)},
        "`step_states`: expected layer, row, token, … = (2, R, D, 5), got (2, 3, 4, 6). `state` is (2, 9, 5).",
    ),
    (
        {"step_states": ZEROS(1, 3, 4, 5)},
        "`step_states`: expected layer, row, token, … = (2, R, D, 5), got (1, 3, 4, 5). `state` is (2, 9, 5).",
    ),
    (
        {"layer_axis": False},
        "`step_states`: expected row, token, … = (R, D, 9, 5), got (2, 3, 4, 5). `state` is (2, 9, 5).",
    ),
    ({"state": ZEROS(9), "step_states": ZEROS(3, 4)}, "`state`: expected layer, slot, …, got (9,)."),
    (
        {"step_states": ZEROS(2, 3, 0, 5)},
        "`step_states`: expected no axis of size 0 but rows, got (2, 3, 0, 5). `state` is (2, 9, 5).",
    ),
    (
        {"state": ZEROS(2, 9, 0), "step_states": ZEROS(2, 3, 4, 0)},
        "`step_states`: expected no axis of size 0 but rows, got (2, 3, 4, 0). `state` is (2, 9, 0).",
    ),
    (
        {"state": ZEROS(2, 9, 5, dtype=torch.float64)},
        "`state`: expected dtype bfloat16, float16, float32, got torch.float64.\n"
        "`step_states`: expected dtype torch.float64, got torch.float32. "
        "Nothing is cast silently; the states of a step have the pool's dtype.",
    ),
    (
        {"step_states": ZEROS(2, 3, 4, 5, device="meta"), "num_accepted_tokens": [1]},
        "`step_states`: expected device cpu, got meta. All tensors of a call share a device.\n"
        "`num_accepted_tokens`: expected request = (2,), got (1,).",
    ),
    (
        {"state": ZEROS(2, 9, 10)[..., ::2]},
        "`state`: expected a contiguous entry (5,), got strides (2,). The other strides are free.",
    ),
    (
        {"state": ZEROS(1, 9, 5).expand(2, 9, 5)},
        "`state`: expected elements that share no memory, got strides (0, 5, 1).",
    ),
    (
        {"step_states": ZEROS(2, 1, 4, 5)},
        "`window_rows`: expected an index array, since requests = 2 exceed the rows of step_states = 1, got None. "
        "None means row b for request b.",
    ),
    (
        {"state": [ZEROS(9, 5)], "step_states": {"a": ZEROS(3, 4, 5)}},
        "`step_states`: expected the structure list of [0] of state, got dict of ['a'].",
    ),
    ({"state": [], "step_states": []}, "`state`: expected at least one tensor, got []."),
    ({"state": {"a": 3}, "step_states": {"a": 3}}, "`state['a']`: expected a tensor, list, tuple or dict, got int."),
    ({"step_states": None}, "`step_states`: expected a torch.Tensor, got NoneType."),
    ({"state": [None]}, "`step_states`: expected the structure list of [0] of state, got Tensor."),
    (
        {"state": [None], "step_states": [ZEROS(2, 3, 4, 5)]},
        "`step_states[0]`: expected None, as state has there, got Tensor.",
    ),
    (
        {"num_accepted_tokens": None, "track_indices": [1, 2], "null_slot": 1.0, "implementation": "cuda"},
        "`num_accepted_tokens`: expected an integer array of requests, got None.\n"
        "`track_num_tokens`: expected an index array beside `track_indices`, got None. The two come together.\n"
        "`null_slot`: expected a Python integer or None, got 1.0.\n"
        "`implementation`: expected None, 'eager' or 'triton', got 'cuda'.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"state": ZEROS(2, 9, 5), "step_states": ZEROS(2, 3, 4, 5)}
    right |= {"state_indices": [1, 2], "num_accepted_tokens": [1, 2]}
    torch_ref.commit_recurrent_state(**right)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        torch_ref.commit_recurrent_state(**right | changes)
    assert str(caught.value) == message


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_accepted_from_index(device: str) -> None:
    rng = np.random.default_rng(1)
    index = rng.integers(-3, 9, (200, 7))
    index[:8] = [[5] * n + [-1] * (7 - n) for n in range(8)]
    index[8:10] = [[INT32_MAX, 0, -1, 4, 4, 4, 4], [INT32_MIN, 4, 4, 4, 4, 4, 4]]
    counts = []
    for row in index.tolist():
        counts.append(0)
        while counts[-1] < 7 and row[counts[-1]] >= 0:
            counts[-1] += 1
    for dtype in (torch.int64, torch.int32):
        taken = torch_ref.accepted_from_index(torch.tensor(index, dtype=dtype, device=device))
        assert (taken.dtype, taken.device.type, taken.tolist()) == (torch.int32, device, counts)
    assert torch_ref.accepted_from_index(index).tolist() == counts
    assert torch_ref.accepted_from_index(index[:3].tolist()).tolist() == counts[:3]
    for shape in ((0, 7), (3, 0)):
        empty = torch_ref.accepted_from_index(torch.zeros(shape, dtype=torch.int32, device=device))
        assert (empty.dtype, empty.tolist()) == (torch.int32, [0] * shape[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_track_tokens_at_boundary(device: str) -> None:
    lengths = [*range(70), 127, 128, INT32_MAX, INT32_MAX - 1, INT32_MAX - 3, INT32_MAX - 63, -1, -5, INT32_MIN]
    counts = [*range(-2, 18), 64, 130, INT32_MIN, INT32_MAX]
    narrow = np.array([(s, n) for s in lengths for n in counts])
    wide = np.array([(s, n) for s in (2**63 - 1, 2**40 + 5, -(2**63)) for n in (1, 60, INT32_MAX, 2**63 - 1)])
    for interval, (dtype, pairs) in itertools.product(
        (1, 2, 7, 16, 64, 1000, INT32_MAX), ((torch.int32, narrow), (torch.int64, narrow), (torch.int64, wide))
    ):
        wanted = []
        for s, n in pairs.tolist():
            n = min(n, INT32_MAX)  # counts saturate like every index
            last = (s + n) // interval * interval
            wanted.append(last - s if s >= 0 and n > 0 and (s + n) // interval > s // interval else 0)
            assert 0 <= wanted[-1] <= max(n, 0)
        given = [torch.tensor(column, dtype=dtype, device=device) for column in pairs.T]
        taken = torch_ref.track_tokens_at_boundary(given[0], given[1], interval)
        assert (taken.dtype, taken.device.type) == (torch.int32, device)
        assert taken.tolist() == wanted, interval
    assert torch_ref.track_tokens_at_boundary([62, 63], [2, 0], 64).tolist() == [2, 0]
    assert torch_ref.track_tokens_at_boundary([], [], 64).tolist() == []
    beside = torch.tensor([4], device=device)
    assert torch_ref.track_tokens_at_boundary([62], beside, 64).tolist() == [2]


COUNT_ERRORS = [
    ("accepted_from_index", ([1, 2],), "`accept_index`: expected request, token, got (2,)."),
    ("accepted_from_index", ([[1.0]],), "`accept_index`: expected an integer dtype, got torch.float32."),
    ("accepted_from_index", ([[True]],), "`accept_index`: expected an integer dtype, got torch.bool."),
    (
        "accepted_from_index",
        (np.array([[255]], np.uint8),),
        "`accept_index`: expected a signed integer dtype, got torch.uint8. -1 is the padding.",
    ),
    ("accepted_from_index", ("abc",), "`accept_index`: expected request, token, an array of integers, got 'abc'."),
    (
        "track_tokens_at_boundary",
        ([1, 2], [1], 0),
        "`num_accepted_tokens`: expected request = (2,), got (1,).\n"
        "`interval`: expected an integer from 1 to 2^31-1, got 0.",
    ),
    ("track_tokens_at_boundary", ([1], [1], True), "`interval`: expected an integer from 1 to 2^31-1, got True."),
    (
        "track_tokens_at_boundary",
        ([[1]], ZEROS(1), 2**31),
        "`seq_lens`: expected request, got (1, 1).\n"
        "`num_accepted_tokens`: expected an integer dtype, got torch.float32.\n"
        "`interval`: expected an integer from 1 to 2^31-1, got 2147483648.",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "message"), COUNT_ERRORS, ids=range(len(COUNT_ERRORS)))
def test_errors_of_counts(name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        getattr(torch_ref, name)(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("module", ["acceptance", "commit"])
def test_examples_in_docstrings(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"torch_ref.{module}"))
    assert outcome.failed == 0
    assert outcome.attempted > 0
