"""The debug checks name every request that is skipped or unspecified, and nothing else."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_impl import allocate_conv_cache, commit_conv_state
from jax_impl.debug import check_commit
from jax_impl.layout import ConvCacheSpec

SPEC = ConvCacheSpec(2, 7, 5, 128, 4, 3)


def test_a_commit_that_skips_on_purpose_is_silent() -> None:
    assert check_commit([0, 3, 3, -1, 6], [2, 1, 0, 2, 3], spec=SPEC, null_slot=0) == []


def test_slots_named_twice() -> None:
    assert check_commit([4, 2, 4, 2, 1], [1, 3, 2, 0, 1], spec=SPEC) == [
        "`state_indices`: requests 0, 2 commit to slot 4; its content is unspecified."
    ]
    assert check_commit([0, 0], [1, 1], spec=SPEC, null_slot=0) == []


def test_counts_slots_and_rows_out_of_range() -> None:
    found = check_commit(
        [7, 1, 2, 3, 4], [1, 4, -1, 2, 3], spec=SPEC, window_rows=[0, 1, 2, 5, -1], num_valid_tokens=[3, 3, 3, 1, 3]
    )
    assert found == [
        "`num_accepted_tokens`: request 1 has 4, more than num_draft_tokens = 3; it is skipped.",
        "`num_accepted_tokens`: request 2 has -1, below 0; it is skipped.",
        "`num_accepted_tokens`: request 3 has 2, more than its 1 valid tokens; it is skipped.",
        "`state_indices`: request 0 names slot 7, outside the pool of 7 slots; it is skipped.",
        "`window_rows`: request 3 reads row 5, outside the buffer of 5 rows; it is skipped.",
        "`window_rows`: request 4 reads row -1, outside the buffer of 5 rows; it is skipped.",
    ]


def test_a_snapshot_into_a_committed_slot() -> None:
    found = check_commit([1, 2, 3], [1, 1, 0], spec=SPEC, track_indices=[2, 3, 3], track_num_tokens=[1, 1, 2])
    assert found == [
        "`track_indices`: requests 1, 2 snapshot to slot 3; its content is unspecified.",
        "`track_indices`: requests 0 snapshot to slot 2, which requests 1 commit to; its content is unspecified.",
    ]


def test_requests_that_read_nothing_share_no_slot() -> None:
    """Two requests to one slot, one of them skipped for its row or its valid tokens: only the skip is reported."""
    assert check_commit([3, 3], [2, 2], spec=SPEC, window_rows=[0, 7]) == [
        "`window_rows`: request 1 reads row 7, outside the buffer of 5 rows; it is skipped."
    ]
    assert check_commit([3, 3], [2, 2], spec=SPEC, num_valid_tokens=[9, 0]) == [
        "`num_valid_tokens`: request 0 has 9, outside 1 to 3; it is skipped.",
        "`num_valid_tokens`: request 1 has 0, outside 1 to 3; it is skipped.",
    ]


def test_lengths_that_a_commit_refuses() -> None:
    with pytest.raises(ValueError, match=re.escape("`num_accepted_tokens`: expected request = (2,), got (1,).")):
        check_commit([0, 1], [1], spec=SPEC)
    with pytest.raises(ValueError, match=re.escape("at most max_requests = 5 requests, got 6.")):
        check_commit([0] * 6, [0] * 6, spec=SPEC)
    with pytest.raises(
        ValueError, match="`track_num_tokens`: expected given together with the other track argument, got None"
    ):
        check_commit([0], [1], spec=SPEC, track_indices=[1])


# --- inside jit -------------------------------------------------------------------------------------------------------


@jax.jit
@checkify.checkify
def checked_step(arrays: dict[str, jax.Array]) -> jax.Array:
    assert check_commit(spec=SPEC, null_slot=0, **arrays) == []
    return arrays["state_indices"] + 1


def reported(**arguments: Any) -> str | None:
    """What `checkify` says of a jitted step that checks its commit."""
    error, result = checked_step({name: jnp.asarray(value, jnp.int32) for name, value in arguments.items()})
    assert result.tolist() == [slot + 1 for slot in arguments["state_indices"]]
    return error.get()


def test_a_traced_commit_that_is_right_is_silent() -> None:
    fine = {"state_indices": [0, 3, 3, -1, 6], "num_accepted_tokens": [2, 1, 0, 2, 3]}
    assert reported(**fine) is None
    assert reported(**fine, track_indices=[1, 2, 0, 3, 4], track_num_tokens=[1, 1, 3, 0, 3]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_accepted_tokens": [1, 4, 0]},
            "`num_accepted_tokens`: requests [ 1 -1 -1] has [ 4 -1 -1], more than num_",
        ),
        ({"num_accepted_tokens": [1, 0, -5]}, "`num_accepted_tokens`: requests [ 2 -1 -1] has [-5 -1 -1], below 0"),
        ({"num_valid_tokens": [1, 3, 3]}, "requests [ 0 -1 -1] has [ 2 -1 -1], more than its [ 1 -1 -1] valid tokens"),
        ({"num_valid_tokens": [3, 0, 3]}, "`num_valid_tokens`: requests [ 1 -1 -1] has [ 0 -1 -1], outside 1 to 3"),
        (
            {"state_indices": [7, 1, 9]},
            "`state_indices`: requests [ 0  2 -1] names slot [ 7  9 -1], outside the pool of 7",
        ),
        (
            {"state_indices": [4, 2, 4]},
            "`state_indices`: requests [ 0  2 -1] commit to slot [ 4  4 -1]; its content is",
        ),
        (
            {"window_rows": [0, 5, -1]},
            "`window_rows`: requests [ 1  2 -1] reads row [ 5 -1 -1], outside the buffer of 5",
        ),
        (
            {"track_indices": [6, 6, 5], "track_num_tokens": [1, 2, 1]},
            "`track_indices`: requests [ 0  1 -1] snapshot to slot [ 6  6 -1]; its content",
        ),
        (
            {"track_indices": [5, 1, 3], "track_num_tokens": [1, 2, 0]},
            "`track_indices`: requests [ 1 -1 -1] snapshot to slot [ 1 -1 -1], which others commit to; its content",
        ),
    ],
)
def test_a_traced_commit_names_the_requests(arguments: dict[str, list[int]], message: str) -> None:
    fine = {"state_indices": [1, 2, 3], "num_accepted_tokens": [2, 1, 3]}
    assert reported(**fine) is None
    found = reported(**(fine | arguments))
    assert found is not None
    assert message in found


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_checked_step_commits_as_ever(implementation: Any) -> None:
    """The check and the commit in one jitted function, with the error carried out of it."""
    cache = allocate_conv_cache(SPEC)
    windows = jnp.ones(SPEC.windows_shape, SPEC.dtype)

    def step(slots: jax.Array, accepted: jax.Array) -> jax.Array:
        check_commit(slots, accepted, spec=SPEC)
        return commit_conv_state(cache.conv_state, windows, slots, accepted, spec=SPEC, implementation=implementation)

    error, pool = jax.jit(checkify.checkify(step))(jnp.array([2, 2], jnp.int32), jnp.array([1, 3], jnp.int32))
    assert "requests [0 1] commit to slot [2 2]" in str(error.get())
    assert float(pool.astype(jnp.float32).sum()) == SPEC.num_layers * SPEC.state_columns * SPEC.conv_dim


def test_random_commits_say_the_same_on_the_host_and_inside_jit() -> None:
    """A kind of finding is reported in one place if and only if it is in the other."""
    rng = np.random.default_rng(11)
    outcomes = set()
    for _ in range(200):
        sizes = {"state_indices": 9, "num_accepted_tokens": 4, "track_indices": 9, "track_num_tokens": 3}
        low = {"state_indices": 0, "num_accepted_tokens": -1, "track_indices": 0, "track_num_tokens": 0}
        one = {name: rng.integers(low[name], size, 3).tolist() for name, size in sizes.items()}
        found = check_commit(spec=SPEC, null_slot=0, **one)
        traced = reported(**one)
        assert (traced is None) == (not found), one
        if traced is not None:
            assert traced.split(":")[0] in {sentence.split(":")[0] for sentence in found}
        outcomes.add(traced is None)
    assert outcomes == {True, False}
