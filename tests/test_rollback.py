"""Rolling back everything: recurrent states, whole caches of several conv groups, snapshots and their index arrays.

Bit copies, so every comparison is of integers, against the loops of `tests.definition`, on every path.
"""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import (
    ConvCache,
    HybridCache,
    accepted_from_index,
    commit_after_verify,
    commit_conv_state,
    commit_recurrent_state,
    track_tokens_at_boundary,
)
from jax_impl.layout import ConvCacheSpec
from tests.adapters import DEFINITION, Path
from tests.cases import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    Batch,
    assert_same_bits,
    both_orders,
    mixed_batch,
    poison,
    spec_of,
    unique_bits,
)
from tests.definition import bits


def recurrent_of(spec: ConvCacheSpec, trailing: tuple[int, ...], dtype: str, seed: int = 5) -> tuple[Any, Any]:
    """A pool `[L, C, …]` and step states `[L, R, D, …]` whose elements are all different."""
    steps = (spec.num_layers, spec.max_requests, spec.num_draft_tokens, *trailing)
    return unique_bits((spec.num_layers, spec.num_slots, *trailing), dtype, seed), unique_bits(steps, dtype, seed + 9)


def snapshots(spec: ConvCacheSpec, batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """A second set from the same rows: counts of their own, in slots that nobody commits to or out of range."""
    rng = np.random.default_rng(seed)
    free = [slot for slot in range(spec.num_slots) if slot not in batch.slots]
    where = [*free, -1, spec.num_slots, INT32_MIN, INT32_MAX, *[-1] * len(batch.slots)][: len(batch.slots)]
    counts = rng.integers(-1, spec.num_draft_tokens + 2, len(batch.slots))
    return {
        "track_indices": rng.permutation(np.asarray(where, np.int32)),
        "track_num_tokens": counts.astype(np.int32),
    }


def roomy_spec(num_draft_tokens: int = 4, width: int = 4, **changes: Any) -> ConvCacheSpec:
    """Slots and rows for a mixed batch, and five slots more to snapshot into."""
    requests = num_draft_tokens + 20
    return spec_of(width, num_draft_tokens, num_slots=requests + 8, max_requests=requests + 2, **changes)


# --- recurrent states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trailing", [(), (3,), (2, 8, 8), (3, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrent_commit_equals_the_definition(path: Path, dtype: str, trailing: tuple[int, ...]) -> None:
    """All counts and skips mixed, with a second set; a kernel refuses states that are no multiple of 128 elements."""
    spec = roomy_spec(3)
    if "pallas" in path.name and int(np.prod(trailing)) % 128:
        pool, steps = recurrent_of(spec, trailing, dtype)
        one = np.asarray([1], np.int32)
        with pytest.raises(ValueError, match="expected conv_dim % 128 = 0"):
            path.recurrent(pool, steps, one, one)
        return
    for turn, explicit in enumerate([("rows", "valid"), ()]):
        batch = mixed_batch(spec, seed=turn, explicit=explicit, null_slot=[0, None][turn])
        pool, steps = recurrent_of(spec, trailing, dtype)
        options: dict[str, Any] = {
            "window_rows": batch.given("rows"),
            "num_valid_tokens": batch.given("valid"),
            "null_slot": batch.null_slot,
            **snapshots(spec, batch, turn),
        }
        expected = DEFINITION.recurrent(pool, steps, batch.slots, batch.accepted, **options)
        assert (bits(expected) != bits(pool)).any()
        got = path.recurrent(pool, steps, batch.slots, batch.accepted, **options)
        assert_same_bits(got, expected, "state")


@pytest.mark.parametrize("fields", [1, 2])
def test_recurrent_states_come_in_pytrees(path: Path, fields: int) -> None:
    """Two pools of different shapes and dtypes in one call."""
    spec = roomy_spec(2)
    batch = mixed_batch(spec, seed=fields)
    pairs = [recurrent_of(spec, (2, 64), "float32"), recurrent_of(spec, (256,), "bfloat16", seed=3)][:fields]
    pool, steps = ({f"state{i}": pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    options = {"window_rows": batch.rows, "num_valid_tokens": batch.valid, "null_slot": 0}
    got = path.recurrent(pool, steps, batch.slots, batch.accepted, **options)
    expected = DEFINITION.recurrent(pool, steps, batch.slots, batch.accepted, **options)
    for name in pool:
        assert_same_bits(got[name], expected[name], name)


def test_what_is_not_accepted_may_be_poison(path: Path) -> None:
    """NaN in every step state but the accepted ones, and in every slot: no NaN moves."""
    spec, slots, accepted = spec_of(3, 3), np.asarray([4, 1, -1], np.int32), np.asarray([3, 1, 2], np.int32)
    pool = poison((2, spec.num_slots, 128), "float32")
    steps = poison((2, 3, 3, 128), "float32")
    steps[:, 0, 2], steps[:, 1, 0] = 30.0, 11.0
    got = path.recurrent(pool, steps, slots, accepted)
    assert (got[:, 4] == 30.0).all()
    assert (got[:, 1] == 11.0).all()
    untouched = [slot for slot in range(spec.num_slots) if slot not in (4, 1)]
    assert_same_bits(got[:, untouched], pool[:, untouched])


# --- whole caches -----------------------------------------------------------------------------------------------------


def kda_groups(tokens: int, seed: int) -> tuple[dict[str, tuple[ConvCacheSpec, Any, Any]], ConvCacheSpec]:
    """q, k and v of KDA kept apart: three widths, three dtypes, both axis orders; and the geometry they share."""
    shared = roomy_spec(tokens)
    q = dataclasses.replace(shared, conv_dim=256)
    k = dataclasses.replace(shared, width=3, state_len=2, dtype="float32", axis_order="channel_major")
    v = dataclasses.replace(shared, conv_dim=384, dtype="float16", axis_order="channel_major")
    groups = {
        name: (one, unique_bits(one.state_shape, one.dtype, seed + i), unique_bits(one.windows_shape, one.dtype, i))
        for i, (name, one) in enumerate({"q": q, "k": k, "v": v}.items())
    }
    return groups, shared


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("tracked", [False, True])
def test_three_groups_snapshots_and_recurrent_state_in_one_call(path: Path, tracked: bool, tokens: int) -> None:
    groups, shared = kda_groups(tokens, seed=3)
    batch = mixed_batch(shared, seed=tokens)
    pool, steps = recurrent_of(shared, (2, 8, 16), "float32")
    options: dict[str, Any] = {
        "step_states": {"ssm": steps},
        "window_rows": batch.rows,
        "num_valid_tokens": batch.valid,
        "null_slot": batch.null_slot,
        **(snapshots(shared, batch, 2) if tracked else {}),
    }
    got = path.after_verify(groups, {"ssm": pool}, batch.slots, batch.accepted, **options)
    expected = DEFINITION.after_verify(groups, {"ssm": pool}, batch.slots, batch.accepted, **options)
    for name in groups:
        assert_same_bits(got[0][name], expected[0][name], name)
    assert_same_bits(got[1]["ssm"], expected[1]["ssm"], "recurrent state")


def test_step_states_in_the_order_of_requests(path: Path) -> None:
    """A buffer with rows of its own beside step states that verification has just made."""
    groups, shared = kda_groups(3, seed=1)
    batch = mixed_batch(shared, seed=8)
    requests = len(batch.slots)
    pool, _ = recurrent_of(shared, (128,), "float32")
    steps = unique_bits((2, requests, 3, 128), "float32", 77)
    options: dict[str, Any] = {
        "step_states": steps,
        "window_rows": batch.rows,
        "step_rows": np.arange(requests, dtype=np.int32),
        "num_valid_tokens": batch.valid,
    }
    got = path.after_verify(groups, pool, batch.slots, batch.accepted, **options)
    expected = DEFINITION.after_verify(groups, pool, batch.slots, batch.accepted, **options)
    for name in groups:
        assert_same_bits(got[0][name], expected[0][name], name)
    assert_same_bits(got[1], expected[1], "recurrent state")


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_cache_comes_back_as_it_was_given(implementation: Any) -> None:
    """One cache, a list of caches per layer, a hybrid without recurrent state: types and buffers pass through."""
    spec = spec_of(4, 2, num_layers=1)
    one = ConvCache(jnp.zeros(spec.state_shape, spec.dtype), jnp.ones(spec.windows_shape, spec.dtype), spec)
    indices = jnp.array([3], jnp.int32), jnp.array([2], jnp.int32)
    for cache in (one, [one, one], {"a": (one,)}, HybridCache(one), HybridCache({"q": one, "k": one})):
        after = commit_after_verify(cache, *indices, implementation=implementation)
        assert jax.tree.structure(after) == jax.tree.structure(cache)
        for got in jax.tree.leaves(after, is_leaf=lambda leaf: isinstance(leaf, ConvCache)):
            assert float(got.conv_state.astype(jnp.float32).sum()) == 3 * 128
            assert_same_bits(np.asarray(got.conv_windows), np.asarray(one.conv_windows))


@both_orders
def test_lists_per_layer_equal_the_stack(path: Path, axis_order: Any) -> None:
    """Seven layers as seven arrays in one call, as engines keep them."""
    spec = spec_of(4, 3, num_layers=7, axis_order=axis_order)
    pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    slots, accepted = np.asarray([6, -9, 1, 5], np.int32), np.asarray([3, 1, 2, 0], np.int32)
    got = path.commit(list(pool), list(windows), slots, accepted, spec=spec)
    expected = DEFINITION.commit(pool, windows, slots, accepted, spec=spec)
    assert_same_bits(np.stack(got), expected)


def test_more_groups_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven arrays are three launches of at most three, and every one of them is written."""
    from jax_impl import commit

    monkeypatch.setattr(commit, "MAX_GROUPS", 3)
    spec = spec_of(2, 1, num_layers=1, num_slots=2, max_requests=1)
    pools = [jnp.zeros(spec.state_shape, spec.dtype) for _ in range(7)]
    buffers = [jnp.full(spec.windows_shape, i, spec.dtype) for i in range(7)]
    one = jnp.array([1], jnp.int32)
    got = commit_conv_state(pools, buffers, one, one, spec=spec, implementation="pallas_interpret")
    assert [float(pool[0, 1, 0, 0]) for pool in got] == list(range(7))
    assert not any(float(pool[0, 0].astype(jnp.float32).sum()) for pool in got)


def test_a_group_the_kernel_cannot_take_leaves_the_others_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no implementation named, each group runs in the best form it has."""
    from jax_impl import commit, pallas_backend

    chosen = []

    def choose(implementation: Any, specs: Any, requests: int) -> str:
        chosen.append("xla" if pallas_backend.unsupported(specs[0], requests) else "pallas_interpret")
        return chosen[-1]

    monkeypatch.setattr(commit, "choose_implementation", choose)
    ragged, even = spec_of(conv_dim=96), spec_of(conv_dim=128)
    arrays = [(jnp.zeros(s.state_shape, s.dtype), jnp.ones(s.windows_shape, s.dtype)) for s in (ragged, even, ragged)]
    pools, buffers = zip(*arrays, strict=True)
    one = jnp.array([1], jnp.int32)
    got = commit_conv_state(pools, buffers, one, one, spec=(ragged, even, ragged))
    assert chosen == ["xla", "pallas_interpret", "xla"]
    assert [float(pool.astype(jnp.float32).sum()) for pool in got] == [2 * 3 * 96, 2 * 3 * 128, 2 * 3 * 96]


def test_a_donated_cache_is_updated_where_it_is() -> None:
    spec = spec_of(dtype="float32")
    conv = ConvCache(jnp.zeros(spec.state_shape), jnp.ones(spec.windows_shape), spec)
    cache = HybridCache(conv, {"ssm": jnp.zeros((2, spec.num_slots, 4, 32))})
    steps = {"ssm": jnp.ones((2, spec.max_requests, 3, 4, 32))}
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    one = jnp.array([1], jnp.int32)
    after = jax.jit(commit_after_verify, donate_argnums=0)(cache, one, one, step_states=steps)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    assert float(after.recurrent_state["ssm"].sum()) == 2 * 4 * 32


# --- index arrays -----------------------------------------------------------------------------------------------------


def test_accepted_from_index_counts_the_leading_entries(torch_ref: Any) -> None:
    for length in (1, 2, 3, 4):
        for row in itertools.product([-1, 0, 7], repeat=length):
            expected = next((i for i, entry in enumerate(row) if entry < 0), length)
            array = np.asarray([row], np.int32)
            assert accepted_from_index(array).tolist() == [expected]
            assert torch_ref.accepted_from_index(array).tolist() == [expected]
    assert accepted_from_index(jnp.zeros((0, 3), jnp.int32)).shape == (0,)
    assert accepted_from_index(np.asarray([[1, -1]], np.int64)).dtype == jnp.int32


def test_track_tokens_at_boundary_by_stepping(torch_ref: Any) -> None:
    """Against walking token by token; also under jit, and next to the int32 limit."""
    jitted = jax.jit(track_tokens_at_boundary, static_argnums=2)
    for interval in (1, 2, 3, 5, 64):
        lengths, counts = np.meshgrid(np.arange(0, 3 * interval + 2), np.arange(-1, 9))
        lengths, counts = lengths.ravel().astype(np.int32), counts.ravel().astype(np.int32)
        expected = [
            max((t for t in range(1, n + 1) if (s + t) % interval == 0), default=0)
            for s, n in zip(lengths.tolist(), counts.tolist(), strict=True)
        ]
        assert jitted(lengths, counts, interval).tolist() == expected
        assert torch_ref.track_tokens_at_boundary(lengths, counts, interval).tolist() == expected
    hostile = np.asarray([INT32_MAX, INT32_MAX - 1, INT32_MIN, -1, 5], np.int32)
    counts = np.asarray([1, 4, 3, 3, INT32_MIN], np.int32)
    assert track_tokens_at_boundary(hostile, counts, 4).tolist() == [1, 2, 0, 0, 0]
    assert torch_ref.track_tokens_at_boundary(hostile, counts, 4).tolist() == [1, 2, 0, 0, 0]


def test_a_snapshot_at_the_boundary_is_the_state_there(path: Path) -> None:
    """Lengths 6 and 7 with 3 and 2 accepted tokens and an interval of 8: the states after 8 tokens go to slots 9, 8."""
    spec = spec_of(4, 3)
    lengths, accepted = np.asarray([6, 7, 3], np.int32), np.asarray([3, 2, 1], np.int32)
    track = np.asarray(track_tokens_at_boundary(lengths, accepted, 8))
    assert track.tolist() == [2, 1, 0]
    pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    slots, where = np.asarray([1, 2, 3], np.int32), np.asarray([9, 8, 7], np.int32)
    got = path.commit(pool, windows, slots, accepted, spec=spec, track_indices=where, track_num_tokens=track)
    at_boundary = path.gather(windows, np.asarray([2, 1], np.int32), spec=spec)
    assert_same_bits(got[:, [9, 8]], at_boundary)
    assert_same_bits(got[:, 7], pool[:, 7])


# --- errors -----------------------------------------------------------------------------------------------------------


def message_of(function: Any, *arguments: Any, **options: Any) -> list[str]:
    with pytest.raises(ValueError, match=r"^`") as caught:
        function(*arguments, **options)
    return str(caught.value).splitlines()


def test_every_mismatch_of_recurrent_arrays_in_one_message() -> None:
    state = {"a": jnp.zeros((2, 5, 4)), "b": jnp.zeros((2, 5, 4), jnp.bfloat16), "c": jnp.zeros((2, 5), jnp.int32)}
    steps = {"a": jnp.zeros((2, 3, 2, 5)), "b": jnp.zeros((2, 3, 2, 4)), "c": jnp.zeros((2, 3, 2))}
    two = jnp.array([1, 2], jnp.int32)
    assert message_of(commit_recurrent_state, state, steps, two, jnp.array([1], jnp.int32)) == [
        "`num_accepted_tokens`: expected request = (2,), got (1,).",
        "`step_states['a']`: expected layer, row, token, state = (2, 3, 2, 4), got (2, 3, 2, 5). "
        "`state['a']` has the shape (2, 5, 4).",
        "`step_states['b']`: expected dtype bfloat16 of the pool, got float32. States are never cast.",
        "`state['c']`: expected dtype bfloat16, float16, float32, got int32. Nothing is cast silently.",
    ]


def test_other_mismatches_of_recurrent_arrays() -> None:
    two = jnp.array([1, 2], jnp.int32)
    state, steps = jnp.zeros((2, 5, 4)), jnp.zeros((2, 3, 2, 4))
    assert message_of(commit_recurrent_state, state, {"a": steps}, two, two)[0].startswith(
        "`step_states`: expected the pytree of `state`"
    )
    assert message_of(commit_recurrent_state, [], [], two, two)[0].startswith("`state`: expected at least one array")
    four = jnp.arange(4, dtype=jnp.int32)
    assert message_of(commit_recurrent_state, state, steps, four, four) == [
        "`step_states`: expected at least as many rows as requests, 4, got 3 rows. "
        "Request b uses row b unless rows are given."
    ]
    assert message_of(commit_recurrent_state, state, steps, two, two, implementation="pallas_interpret") == [
        "`implementation`: expected conv_dim % 128 = 0 for the Pallas kernels, got conv_dim = 4. "
        'Use "xla", or None to fall back to it.'
    ]


def test_mismatches_of_a_whole_cache() -> None:
    spec = spec_of(4, 3)
    conv = ConvCache(jnp.zeros(spec.state_shape, spec.dtype), jnp.zeros(spec.windows_shape, spec.dtype), spec)
    two = jnp.array([1, 2], jnp.int32)
    assert message_of(commit_after_verify, {"q": 3}, two, two) == [
        "`cache`: expected a ConvCache, a pytree of them or a HybridCache, got int."
    ]
    pool, steps = jnp.zeros((2, spec.num_slots, 4)), jnp.zeros((2, spec.max_requests, 3, 4))
    assert message_of(commit_after_verify, conv, two, two, step_states=steps)[0].startswith(
        "`step_states`: expected the pytree of `cache.recurrent_state`"
    )
    assert message_of(commit_after_verify, HybridCache(conv, pool[:, :-1]), two, two, step_states=steps[:, :, :2]) == [
        "`cache.recurrent_state`: expected C = 11, D = 3 of the conv cache, got C = 10, D = 2."
    ]
    fewer = steps[:, :2]
    assert message_of(commit_after_verify, HybridCache(conv, pool), two, two, step_states=fewer, window_rows=two) == [
        "`step_rows`: expected given, because step_states has 2 rows and the verify buffer 9, got None. "
        "jnp.arange(B) for step states in the order of the requests."
    ]


def test_wrong_counts_and_intervals() -> None:
    assert message_of(accepted_from_index, jnp.zeros((2, 2))) == [
        "`accept_index`: expected an array of signed integers, got float32."
    ]
    assert message_of(accepted_from_index, jnp.zeros(2, jnp.int32)) == [
        "`accept_index`: expected request, token = (B, D), got (2,)."
    ]
    two = jnp.array([1, 2], jnp.int32)
    for interval in (0, 2**31, 1.5, True):
        assert message_of(track_tokens_at_boundary, two, two, interval) == [
            f"`interval`: expected a Python integer from 1 to 2^31 - 1, got {interval!r}."
        ]
    assert re.match(
        r"`num_accepted_tokens`: expected request = \(2,\)", message_of(track_tokens_at_boundary, two, two[:1], 4)[0]
    )
