"""torch_ref's commit of several conv groups and of whole caches, and its pools inside one envelope.

Expectations are the NumPy loops of `tests.definition` and `tests.torch_cases`. On a machine without CUDA the kernels
run in Triton's interpreter; `-m gpu` runs the same tests on compiled kernels, and larger ones.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_ref  # noqa: E402
from jax_impl.layout import ConvCacheSpec  # noqa: E402
from tests import definition  # noqa: E402
from tests.adapters import DEFINITION, Path  # noqa: E402
from tests.cases import Batch, assert_same_bits, both_orders, mixed_batch, unique_bits, values  # noqa: E402
from tests.torch_cases import (  # noqa: E402
    GAP,
    HOSTILE,
    Envelope,
    array_of,
    commit_loops,
    device_of,
    how,
    on_torch,
    oracle_spec,
    tensor_of,
)

TOKENS, REQUESTS = 4, 25


def spec_of(conv_dim: int = 12, width: int = 4, num_layers: int = 2, **changes: Any) -> ConvCacheSpec:
    """Room for a mixed batch and for its snapshots, in slots that no request commits."""
    return ConvCacheSpec(num_layers, 2 * REQUESTS, REQUESTS + 2, conv_dim, width, TOKENS, **changes)


# q, k and v of KDA apart, and a fourth group that has nothing in common with them but the requests
SPECS: dict[str, ConvCacheSpec] = {
    "q": spec_of(),
    "k": spec_of(axis_order="channel_major"),
    "v": spec_of(20, dtype="float16"),
    "short": spec_of(7, 3, 3, dtype="float32", axis_order="channel_major", storage="dense", state_len=3),
}


def arrays_of(specs: dict[str, ConvCacheSpec]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    states = {name: unique_bits(spec.state_shape, spec.dtype, i) for i, (name, spec) in enumerate(specs.items())}
    windows = {name: unique_bits(spec.windows_shape, spec.dtype, 9 + i) for i, (name, spec) in enumerate(specs.items())}
    return states, windows


def batch_with_tracks(spec: ConvCacheSpec, seed: int) -> tuple[Batch, dict[str, Any]]:
    """A mixed batch whose requests snapshot another step into slots that the batch leaves alone; some do not."""
    batch = mixed_batch(spec, seed)
    free = np.setdiff1d(np.arange(spec.num_slots), batch.slots)
    count = len(batch.slots)
    tracks = np.resize(np.r_[free[: count - 6], -1, spec.num_slots, 0, 2**31 - 1, -(2**31), free[count]], count)
    options = {
        "window_rows": batch.rows,
        "num_valid_tokens": batch.valid,
        "null_slot": batch.null_slot,
        "track_indices": tracks.astype(np.int32),
        "track_num_tokens": np.random.default_rng(seed).integers(-1, TOKENS + 2, count).astype(np.int32),
    }
    return batch, options


def committed(state: Any, windows: Any, batch: Batch, specs: Any, options: dict[str, Any]) -> Any:
    return DEFINITION.commit(state, windows, batch.slots, batch.accepted, spec=specs, **options)


def recurrent_committed(state: np.ndarray, steps: np.ndarray, batch: Batch, options: dict[str, Any]) -> np.ndarray:
    after = state.copy()
    sets = ((batch.slots, batch.accepted), (options["track_indices"], options["track_num_tokens"]))
    for slots, counts in sets:
        commit_loops(
            definition.bits(after), definition.bits(steps), slots, counts, rows=batch.rows, valid=batch.valid,
            null=batch.null_slot,
        )  # fmt: skip
    return after


def assert_tree(tensors: Any, arrays: Any) -> None:
    if isinstance(tensors, dict):
        assert tensors.keys() == arrays.keys()
        tensors, arrays = list(tensors.values()), [arrays[key] for key in tensors]
    if isinstance(tensors, list | tuple):
        for tensor, array in zip(tensors, arrays, strict=True):
            assert_tree(tensor, array)
    else:
        assert_same_bits(array_of(tensors), arrays)


# --- several conv groups ----------------------------------------------------------------------------------------------


@on_torch
def test_four_groups_and_snapshots_in_one_call(path: Path) -> None:
    states, windows = arrays_of(SPECS)
    for seed in range(3):
        batch, options = batch_with_tracks(SPECS["q"], seed)
        wanted = committed(states, windows, batch, SPECS, options)
        assert all((definition.bits(wanted[k]) != definition.bits(states[k])).any((0, 2, 3)).sum() > 8 for k in SPECS)
        pool = tensor_of(states, path)
        returned = torch_ref.commit_conv_state(
            pool, tensor_of(windows, path), batch.slots, batch.accepted,
            spec={name: oracle_spec(spec) for name, spec in SPECS.items()}, **options, **how(path),
        )  # fmt: skip
        assert returned is pool
        assert_tree(pool, wanted)


@on_torch
def test_a_spec_for_each_branch_of_lists_and_tuples(path: Path) -> None:
    states, windows = arrays_of(SPECS)
    state = (list(states["q"]), {"short": (states["short"], None), "v": [states["v"][1]]})
    buffer = (list(windows["q"]), {"v": [windows["v"][1]], "short": (windows["short"], None)})
    specs: Any = (oracle_spec(SPECS["q"]), {"v": oracle_spec(SPECS["v"]), "short": oracle_spec(SPECS["short"])})
    batch, options = batch_with_tracks(SPECS["q"], 5)
    wanted = committed(states, windows, batch, SPECS, options)
    pool = tensor_of(state, path)
    torch_ref.commit_conv_state(
        pool, tensor_of(buffer, path), batch.slots, batch.accepted, spec=specs, **options, **how(path)
    )
    assert_tree(pool[0], list(wanted["q"]))
    assert_tree(pool[1]["short"][0], wanted["short"])
    assert_tree(pool[1]["v"], [wanted["v"][1]])


@on_torch
@both_orders
def test_all_reads_come_before_any_write(path: Path, axis_order: Any) -> None:
    """Two groups that swap their pools and a permutation of slots: each group's buffer is the other one's pool."""
    spec = ConvCacheSpec(2, 11, 11, 5, 4, 1, axis_order=axis_order, storage="dense")
    rng = np.random.default_rng(2)
    slots, tracks = np.r_[rng.permutation(11)[:5], [-1] * 6], np.full(11, -1)
    tracks[:4] = np.setdiff1d(np.arange(11), slots)[:4]
    states = [unique_bits(spec.state_shape, spec.dtype, seed) for seed in (1, 2)]
    options: dict[str, Any] = {"track_indices": tracks, "track_num_tokens": np.ones(11, np.int32)}
    wanted = [state.copy() for state in states]
    for mine, other in ((0, 1), (1, 0)):
        for where in (slots, tracks):
            for b in np.flatnonzero(where >= 0):
                wanted[mine][:, where[b]] = states[other][:, b]
    pools = tensor_of(states, path)
    buffers = [pools[1].unsqueeze(2), pools[0].unsqueeze(2)]
    torch_ref.commit_conv_state(
        pools, buffers, slots, np.ones(11, np.int32), spec=oracle_spec(spec), **options, **how(path)
    )
    assert_tree(pools, wanted)


# --- whole caches -----------------------------------------------------------------------------------------------------


def cache_of(states: Any, windows: Any, path: Path) -> dict[str, Any]:
    return {
        name: torch_ref.ConvCache(
            tensor_of(states[name], path), tensor_of(windows[name], path), oracle_spec(SPECS[name])
        )
        for name in states
    }


@on_torch
def test_one_call_after_verify(path: Path) -> None:
    """Groups as one cache, a dict, and lists with a gap; one recurrent state, and two with rows of their own."""
    states, windows = arrays_of(SPECS)
    batch, options = batch_with_tracks(SPECS["q"], 7)
    wanted = committed(states, windows, batch, SPECS, options)
    held = unique_bits((2, 2 * REQUESTS, 3, 5), "float32", 20)
    steps = unique_bits((2, REQUESTS + 2, TOKENS, 3, 5), "float32", 21)
    wanted_held = recurrent_committed(held, steps, batch, options)

    def commit(cache: Any, **more: Any) -> None:
        returned = torch_ref.commit_after_verify(cache, batch.slots, batch.accepted, **more, **options, **how(path))
        assert returned is cache

    groups = cache_of(states, windows, path)
    commit(groups["v"])
    assert_tree(groups["v"].conv_state, wanted["v"])
    groups = cache_of(states, windows, path)
    commit(groups)
    assert_tree({name: group.conv_state for name, group in groups.items()}, wanted)
    groups = cache_of(states, windows, path)
    pool = tensor_of(held, path)
    commit(torch_ref.HybridCache(groups, pool), step_states=tensor_of(steps, path))
    assert_tree({name: group.conv_state for name, group in groups.items()}, wanted)
    assert_tree(pool, wanted_held)
    assert_tree({name: group.conv_windows for name, group in groups.items()}, windows)
    groups = cache_of(states, windows, path)
    layers = tensor_of({"first": held, "second": held[:, :, 0].copy()}, path)
    hybrid = torch_ref.HybridCache([groups["q"], None, (groups["short"],)], layers)
    step_rows = np.random.default_rng(9).permutation(REQUESTS + 2)[: len(batch.slots)]
    moved = np.zeros((2, REQUESTS + 7, *steps.shape[2:]), np.float32)
    moved[:, step_rows] = steps[:, batch.rows.clip(0, REQUESTS + 1)]
    inside = (batch.rows >= 0) & (batch.rows < REQUESTS + 2)
    given = {"first": moved, "second": moved[:, :, :, 0].copy()}
    commit(hybrid, step_states=tensor_of(given, path), step_rows=np.where(inside, step_rows, -1))
    assert_tree([groups["q"].conv_state, groups["short"].conv_state], [wanted["q"], wanted["short"]])
    assert_tree(layers, {"first": wanted_held, "second": wanted_held[:, :, 0].copy()})
    assert_tree(groups["k"].conv_state, states["k"])


@on_torch
def test_hostile_indices_leave_a_whole_cache_alone(path: Path) -> None:
    spec = ConvCacheSpec(2, 11, 11, 5, 4, 10)
    state, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    held, steps = unique_bits((2, 11, 3), "float32", 3), unique_bits((2, 11, 10, 3), "float32", 4)
    conv = torch_ref.ConvCache(tensor_of(state, path), tensor_of(windows, path), oracle_spec(spec))
    cache = torch_ref.HybridCache(conv, tensor_of(held, path))
    fine, ones, none = np.arange(11), np.ones(11, np.int32), np.zeros(11, np.int32)
    bad = np.array(HOSTILE)
    for slots, counts, rows, valid, tracks, track_counts in (
        (bad, ones, fine, None, bad, ones),
        (fine, bad, fine, None, fine[::-1].copy(), bad),
        (fine, ones, bad, None, fine, ones),
        (fine, ones, fine, bad, fine, ones),
        (fine, none, fine, fine, fine, fine + 1),
    ):
        torch_ref.commit_after_verify(
            cache, slots, counts, step_states=tensor_of(steps, path), window_rows=rows, num_valid_tokens=valid,
            track_indices=tracks, track_num_tokens=track_counts, **how(path),
        )  # fmt: skip
        assert_tree(conv.conv_state, state)
        assert_tree(cache.recurrent_state, held)


def test_steps_of_random_acceptance_and_snapshots_equal_one_token_decoding() -> None:
    """Two conv groups feed a recurrence; after every step pools and snapshots are what one token at a time leaves."""
    specs = [ConvCacheSpec(1, 12, 6, 5, width, TOKENS) for width in (4, 3)]
    rng = np.random.default_rng(11)
    one = [torch_ref.allocate_conv_cache(oracle_spec(spec), device="cpu") for spec in specs]
    plain = [torch.zeros_like(cache.conv_state) for cache in one]
    weights = [torch.from_numpy(values((5, spec.width), "float32", spec.width)) for spec in specs]
    cache = torch_ref.HybridCache(one, torch.zeros(1, 12, 5))
    plain_held, lengths = torch.zeros(1, 12, 5), np.zeros(12, np.int64)
    steps = torch.full((1, 6, TOKENS, 5), float("nan"))
    for seed in range(30):
        slots, rows = rng.permutation(6)[:3], rng.permutation(6)[:3]  # slots from 6 on are for snapshots
        accept_index = np.where(np.arange(TOKENS) < rng.integers(0, TOKENS + 1, (3, 1)), 7, -1)
        x = torch.from_numpy(values((3, TOKENS, 5), "float32", seed)).bfloat16()
        index: dict[str, Any] = {"state_indices": slots, "window_rows": rows}
        ys = [
            torch_ref.causal_conv1d_verify(x, c.conv_state, c.conv_windows, w, spec=c.spec, layer=0, **index)[0]
            for c, w in zip(one, weights, strict=True)
        ]
        for b in range(3):
            held = cache.recurrent_state[0, slots[b]]
            for t in range(TOKENS):
                held = 0.5 * held + ys[0][b, t].float() * ys[1][b, t].float()
                steps[0, rows[b], t] = held
        accepted = torch_ref.accepted_from_index(accept_index)
        tracked = torch_ref.track_tokens_at_boundary(lengths[slots], accepted, 3)
        snapshots = slots + 6
        torch_ref.commit_after_verify(
            cache, slots, accepted, step_states=steps, window_rows=rows, track_indices=snapshots,
            track_num_tokens=tracked,
        )  # fmt: skip
        for t in range(TOKENS):
            still = [int(slot) if t < n else -1 for slot, n in zip(slots, accepted.tolist(), strict=True)]
            ys = [
                torch_ref.causal_conv1d_update(x[:, t], p, w, spec=c.spec, state_indices=still, layer=0)[0]
                for p, w, c in zip(plain, weights, one, strict=True)
            ]
            for b, slot in enumerate(still):
                if slot < 0:
                    continue
                plain_held[0, slot] = 0.5 * plain_held[0, slot] + ys[0][b].float() * ys[1][b].float()
                lengths[slot] += 1
                if lengths[slot] % 3 == 0:
                    for pool in (*plain, plain_held):
                        pool[0, slot + 6] = pool[0, slot]
        for got, want in (
            (cache.recurrent_state, plain_held),
            *((c.conv_state, p) for c, p in zip(one, plain, strict=True)),
        ):
            assert_same_bits(array_of(got), array_of(want))


def hybrid(**changes: Any) -> Any:
    """A right call of commit_after_verify but for `changes`, and its cache."""
    spec = torch_ref.ConvCacheSpec(2, 9, 4, 5, 4, 3)
    conv = [torch_ref.allocate_conv_cache(spec, device="cpu") for _ in range(2)]
    for cache in conv:
        cache.conv_windows.fill_(1)
    cache = torch_ref.HybridCache(conv, torch.zeros(2, 9, 4))
    arguments: dict[str, Any] = {"state_indices": [1, 2], "num_accepted_tokens": [1, 2]}
    return cache, {"cache": cache, "step_states": torch.ones(2, 4, 3, 4)} | arguments | changes


ERRORS = [
    (
        {"step_states": None},
        "`step_states`: expected a torch.Tensor, got NoneType.",
    ),
    (
        {"step_states": torch.ones(2, 4, 4, 4), "null_slot": "x"},
        "`cache.recurrent_state`: expected slots, tokens = (9, 3), got (9, 4). Those of the conv cache.\n"
        "`null_slot`: expected a Python integer or None, got 'x'.",
    ),
    (
        {"step_states": torch.ones(2, 4, 3, 4).half(), "num_accepted_tokens": [1]},
        "`step_states`: expected dtype torch.float32, got torch.float16. "
        "Nothing is cast silently; the states of a step have the pool's dtype.\n"
        "`num_accepted_tokens`: expected request = (2,), got (1,).",
    ),
    (
        {"state_indices": [1] * 5, "num_accepted_tokens": [1] * 5},
        "`window_rows`: expected an index array, since requests = 5 exceed max_requests = 4, got None. "
        "None means row b for request b.\n"
        "`window_rows`: expected an index array, since requests = 5 exceed the rows of step_states = 4, got None. "
        "None means row b for request b.",
    ),
    (
        {"step_states": torch.ones(2, 2, 3, 4), "window_rows": [0, 1]},
        "`step_states`: expected 4 rows, as `window_rows` is for both, got 2 rows beside 4 of the verify buffer. "
        "Give `step_rows`: range(B) for step states in the order of the requests.",
    ),
    ({"step_rows": [0]}, "`step_rows`: expected request = (2,), got (1,)."),
    ({"cache": 3, "step_states": None}, "`cache`: expected a ConvCache, or a dict, list or tuple of them, got int."),
    ({"cache": {}, "step_states": None}, "`cache`: expected at least one ConvCache, got {}."),
    (
        {"cache": torch_ref.HybridCache([None], torch.zeros(2, 9, 4))},
        "`cache.conv`: expected at least one ConvCache, got [None].",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(changes: dict[str, Any], message: str) -> None:
    cache, arguments = hybrid()
    torch_ref.commit_after_verify(**arguments)
    assert cache.conv[1].conv_state[:, 1].eq(1).all()
    assert cache.recurrent_state[:, 2].eq(1).all()
    cache, arguments = hybrid(**changes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        torch_ref.commit_after_verify(**arguments)
    assert str(caught.value) == message
    assert not any(one.conv_state.any() for one in cache.conv)
    assert not cache.recurrent_state.any()


def test_errors_name_the_place_in_the_cache() -> None:
    cache, arguments = hybrid()
    other = dataclasses.replace(cache.conv[0].spec, num_draft_tokens=4)
    short = torch_ref.ConvCache(cache.conv[0].conv_state[:, :8], cache.conv[0].conv_windows, other)
    arguments["cache"] = {"kda": (cache.conv[1], short)}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        torch_ref.commit_after_verify(**arguments)
    assert str(caught.value).splitlines() == [
        "`cache['kda'][1].conv_state`: expected layer, slot, column, channel = (2, 9, 3, 5), got (2, 8, 3, 5).",
        "`cache['kda'][1].conv_windows`: expected layer, row, column, channel = (2, 4, 6, 5), got (2, 4, 5, 5).",
        "`cache`: expected specs with one num_draft_tokens, got [3, 4]. "
        "Groups that differ in it would skip different requests.",
        "`step_states`: expected None, as cache.recurrent_state has there, got Tensor.",
    ]
    assert not cache.conv[1].conv_state.any()


# --- one envelope -----------------------------------------------------------------------------------------------------


@on_torch
@both_orders
def test_every_function_in_an_envelope(path: Path, axis_order: Any) -> None:
    """A slot holds two conv groups of different dtypes and a recurrent state, all layers back to back, with gaps.

    Every function gives the bits that it gives on contiguous pools, and no byte of the gaps changes. Commits are held
    against the definition besides.
    """
    specs = {
        "wide": ConvCacheSpec(3, 13, 5, 9, 4, 3, "bfloat16", axis_order),
        "narrow": ConvCacheSpec(3, 13, 5, 6, 3, 3, "float32", axis_order, state_len=3),
    }
    places = {name: (3, spec.window_shape, spec.dtype) for name, spec in specs.items()}
    envelope = Envelope(13, places | {"recurrent": (3, (2, 3), "float32")}, device_of(path))
    arrays = {name: values(spec.state_shape, spec.dtype, i) for i, (name, spec) in enumerate(specs.items())}
    arrays["recurrent"] = unique_bits((3, 13, 2, 3), "float32", 5)
    envelope.memory = envelope.holding(arrays)
    plain = tensor_of(arrays, path)
    inside = {name: envelope.pool(name) for name in arrays}
    slots, rows, counts, tracks = [12, 0, -1, 5], [4, 1, 2, 0], [3, 0, 2, 1], [7, 3, 8, 13]
    steps = unique_bits((3, 5, 3, 2, 3), "float32", 6)

    def check() -> None:
        assert torch.equal(envelope.memory, envelope.holding({name: array_of(plain[name]) for name in plain}))

    def twice(name: str, function: str, *inputs: Any, **options: Any) -> Any:
        """The same call on both pools, whose results, but for the pool itself, must be equal."""
        outcomes = []
        for pools in (plain, inside):
            y, returned = getattr(torch_ref, f"causal_conv1d_{function}")(
                inputs[0], pools[name], *(one.clone() if one is inputs[1] else one for one in inputs[1:]),
                spec=oracle_spec(specs[name]), **options,
            )  # fmt: skip
            assert function == "verify" or returned is pools[name]
            outcomes.append((y, returned))
        assert_same_bits(array_of(outcomes[1][0]), array_of(outcomes[0][0]))
        check()
        return outcomes

    caches = {}
    for name, spec in specs.items():
        weight = tensor_of(values((spec.conv_dim, spec.width), "float32", 8), path)
        x = tensor_of(values((4, 3, spec.conv_dim), "bfloat16", 9), path)
        windows = tensor_of(unique_bits(spec.windows_shape, spec.dtype, 10), path)
        twice(name, "prefill", x, weight, state_indices=slots, lengths=[3, 1, 2, 2], layer=1)
        for layer in range(3):
            _, (_, returned) = twice(
                name, "verify", x, windows, weight, state_indices=slots, layer=layer, window_rows=rows, **how(path)
            )
            windows = returned
        twice(name, "update", x[:, 0], weight, state_indices=slots, layer=2, **how(path))
        torch_ref.reset_conv_state(inside[name], [2, -1, 13], spec=oracle_spec(spec))
        torch_ref.reset_conv_state(plain[name], [2], spec=oracle_spec(spec))
        check()
        caches[name] = torch_ref.ConvCache(inside[name], windows, oracle_spec(spec))
    before = {name: array_of(plain[name]) for name in plain}
    wanted = {
        name: DEFINITION.commit(
            before[name], array_of(caches[name].conv_windows), np.array(slots), np.array(counts), spec=spec,
            window_rows=np.array(rows), track_indices=np.array(tracks), track_num_tokens=np.array([1, 3, 3, 2]),
        )
        for name, spec in specs.items()
    }  # fmt: skip
    wanted["recurrent"] = before["recurrent"]
    for where, n in ((slots, counts), (tracks, [1, 3, 3, 2])):
        commit_loops(definition.bits(wanted["recurrent"]), definition.bits(steps), where, n, rows=rows)
    torch_ref.commit_after_verify(
        torch_ref.HybridCache(caches, inside["recurrent"]), slots, counts, step_states=tensor_of(steps, path),
        window_rows=rows, track_indices=tracks, track_num_tokens=[1, 3, 3, 2], **how(path),
    )  # fmt: skip
    assert torch.equal(envelope.memory, envelope.holding(wanted))
    assert int((envelope.memory == GAP).sum()) >= 13 * (3 * 6 + 4)


@on_torch
@both_orders
def test_a_buffer_inside_an_envelope(path: Path, axis_order: Any) -> None:
    """Rows of several buffers side by side: gathered, verified into and committed from where they lie."""
    spec = ConvCacheSpec(3, 9, 7, 11, 4, 3, "float16", axis_order)
    dense = dataclasses.replace(spec, storage="dense", conv_dim=6)
    places = {"sliding": (3, spec.windows_shape[2:], "float16"), "dense": (3, dense.windows_shape[2:], "float16")}
    envelope = Envelope(7, places | {"recurrent": (3, (3, 2, 3), "float32")}, device_of(path))
    arrays = {name: unique_bits((3, 7, *entry), dtype, i) for i, (name, (_, entry, dtype)) in enumerate(places.items())}
    arrays["recurrent"] = unique_bits((3, 7, 3, 2, 3), "float32", 4)
    envelope.memory = envelope.holding(arrays)
    slots, rows, counts = np.array([8, 0, -1, 5]), np.array([6, 1, 2, 0]), np.array([3, 1, 2, 4])
    for name, one in (("sliding", spec), ("dense", dense)):
        buffer, state = envelope.pool(name), unique_bits(one.state_shape, one.dtype, 3)
        pool = tensor_of(state, path)
        torch_ref.commit_conv_state(pool, buffer, slots, counts, spec=oracle_spec(one), window_rows=rows, **how(path))
        wanted = DEFINITION.commit(state, arrays[name], slots, counts, spec=one, window_rows=rows)
        assert_same_bits(array_of(pool), wanted)
        taken = torch_ref.gather_windows(buffer, counts, spec=oracle_spec(one), window_rows=rows)
        assert_same_bits(array_of(taken), DEFINITION.gather(arrays[name], counts, spec=one, window_rows=rows))
        assert torch.equal(envelope.memory, envelope.holding(arrays))
        pool = tensor_of(values(one.state_shape, one.dtype, 8), path)
        x = tensor_of(values((4, 3, one.conv_dim), "float16", 5), path)
        weight = tensor_of(values((one.conv_dim, 4), "float32", 6), path)
        torch_ref.causal_conv1d_verify(
            x, pool, buffer, weight, spec=oracle_spec(one), state_indices=slots, layer=1, window_rows=rows, **how(path)
        )
        _, arrays[name], _ = DEFINITION.verify(
            array_of(x), array_of(pool), arrays[name], array_of(weight), spec=one, state_indices=slots, layer=1,
            window_rows=rows,
        )  # fmt: skip
        assert torch.equal(envelope.memory, envelope.holding(arrays))
    state = unique_bits((3, 9, 2, 3), "float32", 7)
    pool = torch_ref.commit_recurrent_state(
        tensor_of(state, path), envelope.pool("recurrent"), slots, counts, window_rows=rows, **how(path)
    )
    commit_loops(definition.bits(state), definition.bits(arrays["recurrent"]), slots, counts, rows=rows)
    assert_same_bits(array_of(pool), state)


# --- on a card --------------------------------------------------------------------------------------------------------


def _card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pytest.importorskip("triton")


@pytest.mark.gpu
def test_a_models_cache_on_the_card() -> None:
    """KDA's three groups and a recurrent state of 2 MiB a slot and layer: Triton equals the loops, for every count."""
    _card()
    spec = ConvCacheSpec(2, 40, 32, 4096, 4, 4)
    generator = torch.Generator("cuda").manual_seed(1)

    def random(shape: Any, dtype: Any) -> Any:
        integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        limit = 2 ** (8 * dtype.itemsize - 1)
        drawn = torch.randint(-limit, limit, shape, generator=generator, device="cuda", dtype=torch.int64)
        return drawn.to(integer).view(dtype)

    specs = [dataclasses.replace(spec, axis_order=order) for order in ("time_major", "channel_major", "time_major")]
    groups = {
        name: torch_ref.ConvCache(
            random(one.state_shape, torch.bfloat16), random(one.windows_shape, torch.bfloat16), oracle_spec(one)
        )
        for name, one in zip("qkv", specs, strict=True)
    }
    held, steps = random((2, 40, 32, 128, 128), torch.float32), random((2, 32, 4, 32, 128, 128), torch.float32)
    rng = np.random.default_rng(2)
    slots = rng.permutation(40)
    counts, track_counts = rng.integers(-1, 6, 32), np.r_[rng.integers(-1, 6, 8), np.zeros(24, np.int64)]
    tracks, rows = np.r_[slots[32:], np.full(24, -1)], rng.permutation(32)
    wanted, pools = held.clone(), {name: group.conv_state.clone() for name, group in groups.items()}
    for where, count in ((slots[:32], counts), (tracks, track_counts)):
        for slot, n, row in zip(where.tolist(), count.tolist(), rows.tolist(), strict=True):
            if 1 <= n <= 4 and slot >= 0:
                wanted.view(torch.int32)[:, slot] = steps.view(torch.int32)[:, row, n - 1]
                for name, one in zip("qkv", specs, strict=True):
                    columns = groups[name].conv_windows.view(torch.int16)[:, row]
                    axis = 1 if one.axis_order == "time_major" else 2
                    pools[name].view(torch.int16)[:, slot] = columns.narrow(axis, n - 1, 3)
    torch_ref.commit_after_verify(
        torch_ref.HybridCache(groups, held), slots[:32], counts, step_states=steps, window_rows=rows,
        track_indices=tracks, track_num_tokens=track_counts, implementation="triton",
    )  # fmt: skip
    assert torch.equal(held.view(torch.int32), wanted.view(torch.int32))
    for name, pool in pools.items():
        assert torch.equal(groups[name].conv_state.view(torch.int16), pool.view(torch.int16))


@pytest.mark.gpu
def test_a_step_can_be_captured_as_a_graph() -> None:
    """From the verifier's accept_index to the committed cache on the card: nothing waits, and a replay reads anew."""
    _card()
    spec = torch_ref.ConvCacheSpec(2, 9, 4, 640, 4, 4)
    conv = torch_ref.allocate_conv_cache(spec, device="cuda")
    cache = torch_ref.HybridCache(conv, torch.zeros(2, 9, 8, device="cuda"))
    steps = torch.ones(2, 4, 4, 8, device="cuda")
    conv.conv_windows.fill_(1)
    slots = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    lengths, tracks = torch.tensor([63, 64], device="cuda"), torch.tensor([7, 8], dtype=torch.int32, device="cuda")
    accept_index = torch.full((2, 4), -1, device="cuda")

    def step() -> None:
        accepted = torch_ref.accepted_from_index(accept_index)
        counts = torch_ref.track_tokens_at_boundary(lengths, accepted, 64)
        torch_ref.commit_after_verify(
            cache, slots, accepted, step_states=steps, track_indices=tracks, track_num_tokens=counts,
            implementation="triton",
        )  # fmt: skip

    step()  # compiles; nothing is accepted
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # raises at the first operation that waits for the device
        step()
    pools = (conv.conv_state, cache.recurrent_state)
    for index, length, written in (([4, 5, -1, -1], 63, [3, 7]), ([-1, 4, 4, 4], 63, []), ([4, -1, -1, -1], 62, [3])):
        accept_index[0] = torch.tensor(index, device="cuda")
        lengths[0] = length
        for pool in pools:
            pool.zero_()
        graph.replay()
        for pool in pools:
            assert [slot for slot in range(9) if bool(pool[:, slot].any())] == written
