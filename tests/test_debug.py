"""The debug checks name every request that is skipped or unspecified, and nothing else."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_impl import allocate_conv_cache, commit_conv_state
from jax_impl.debug import check_commit, check_verify
from jax_impl.layout import STORAGES, ConvCacheSpec
from tests import histories

SPEC = ConvCacheSpec(2, 7, 5, 128, 4, 3)
DENSE, INPUTS = (dataclasses.replace(SPEC, storage=storage) for storage in ("dense", "inputs"))


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


# --- paths and snapshots ----------------------------------------------------------------------------------------------


def test_nodes_that_a_window_needs() -> None:
    """Rows of inputs need the last S nodes of what counts, dense rows the last one, sliding rows a chain."""
    paths = [[0, 2, -1], [0, 1, 2], [-1, 1, 2], [1, 3, -1], [2, -1, -1]]
    given: dict[str, Any] = {"num_valid_tokens": [2, 3, 3, 3, 3], "accepted_path": paths}
    slots, counts = [0, 1, 2, 3, 4], [2, 3, 3, 2, 1]
    of_node = "`accepted_path`: request {} needs node {}, outside its {} valid tokens; it is skipped."
    assert check_commit(slots, counts, spec=INPUTS, **given) == [
        of_node.format(0, 2, 2), of_node.format(2, -1, 3), of_node.format(3, 3, 3)
    ]  # fmt: skip
    assert check_commit(slots, counts, spec=DENSE, **given) == [
        of_node.format(0, 2, 2), of_node.format(3, 3, 3),
        "`accepted_path`: request 2 has node -1 behind node -1; on a path a parent comes before its child.",
    ]  # fmt: skip
    of_chain = (
        "`accepted_path`: request {} needs node {} at place {}: a tree cannot live in the shared run "
        '(use storage "inputs" or "dense"); it is skipped.'
    )
    assert check_commit(slots, counts, spec=SPEC, **given) == [
        of_chain.format(0, 2, 1), of_chain.format(3, 3, 1), of_chain.format(4, 2, 0),
        "`accepted_path`: request 2 has node -1 behind node -1; on a path a parent comes before its child.",
    ]  # fmt: skip


def test_what_stands_behind_the_count_is_not_looked_at() -> None:
    paths = [[0, 2, 1], [0, 0, 9], [-1, -1, -1], [5, 5, 5]]
    for spec in (SPEC, DENSE, INPUTS):
        assert check_commit([0, 1, 2, -1], [1, 1, 0, 3], spec=spec, accepted_path=paths) == []
    assert check_commit([0, 1], [2, 3], spec=INPUTS, accepted_path=[[2, 0, 1], [0, 1, 1]]) == [
        "`accepted_path`: request 0 has node 0 behind node 2; on a path a parent comes before its child.",
        "`accepted_path`: request 1 has node 1 behind node 1; on a path a parent comes before its child.",
    ]


def test_a_snapshot_along_a_path() -> None:
    found = check_commit(
        [0, 1], [1, 1], spec=DENSE, track_indices=[5, 6], track_num_tokens=[2, 1], num_valid_tokens=[2, 3],
        accepted_path=[[0, 2, 1], [1, -1, -1]],
    )  # fmt: skip
    assert found == [
        "`accepted_path`: request 0 needs node 2, outside its 2 valid tokens, for its snapshot; it is skipped."
    ]


def test_snapshots_of_inputs_are_made_of_a_slot() -> None:
    """One without a slot of its own is skipped; a slot that one request reads and another one's snapshot writes."""
    tracked: dict[str, Any] = {"track_indices": [4, 5, 6, 2], "track_num_tokens": [1, 2, 3, 1]}
    slots, accepted = [-1, 0, 2, 1], [1, 1, 0, 1]
    assert check_commit(slots, accepted, spec=INPUTS, null_slot=0, **tracked) == [
        "`track_indices`: request 0 makes its snapshot of slot -1, which holds no state; it is skipped.",
        "`track_indices`: request 1 makes its snapshot of slot 0, which holds no state; it is skipped.",
        "`track_indices`: requests 3 snapshot to slot 2, which requests 2 make theirs of; its content is unspecified.",
    ]
    assert check_commit(slots, accepted, spec=SPEC, null_slot=0, **tracked) == []
    assert check_commit([9], [0], spec=INPUTS, track_indices=[4], track_num_tokens=[1]) == [
        "`track_indices`: request 0 makes its snapshot of slot 9, which holds no state; it is skipped."
    ]
    committed: dict[str, Any] = {"track_indices": [5, 2], "track_num_tokens": [1, 1]}
    assert check_commit([2, 3], [1, 0], spec=INPUTS, **committed) == [
        "`track_indices`: requests 1 snapshot to slot 2, which requests 0 commit to; its content is unspecified."
    ]
    one_into_itself: dict[str, Any] = {"track_indices": [2], "track_num_tokens": [3]}
    assert check_commit([2], [0], spec=INPUTS, **one_into_itself) == []


def test_requests_that_a_path_or_their_slot_skips_share_nothing() -> None:
    """Only the skip is reported, not what they would have written together with others."""
    needs = "`{}`: request 1 needs node 3, outside {}; it is skipped."
    found = check_commit([4, 4], [1, 1], spec=INPUTS, accepted_path=[[0, -1, -1], [3, -1, -1]])
    assert found == [needs.format("accepted_path", "its 3 valid tokens")]
    resumed: dict[str, Any] = {"resume_tokens": [1, 1], "resume_path": [[0, -1, -1], [3, -1, -1]]}
    found = check_verify([4, 4], spec=INPUTS, window_rows=[2, 2], **resumed)
    assert found == [needs.format("resume_path", "the 3 tokens of the step before")]
    assert check_commit([1, -1], [0, 0], spec=INPUTS, track_indices=[5, 5], track_num_tokens=[1, 1]) == [
        "`track_indices`: request 1 makes its snapshot of slot -1, which holds no state; it is skipped."
    ]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_a_verify_that_is_right_is_silent() -> None:
    tree, chain = [[-1, 0, 0], [-1, -1, 1]], [[-1, 0, 1]] * 2
    resumed: dict[str, Any] = {"resume_tokens": [0, 2], "resume_path": [[-1, 5, -1], [0, 2, -1]]}
    for spec in (DENSE, INPUTS):
        assert check_verify([3, 1], spec=spec, parents=tree, **resumed) == []
    assert check_verify([3, 3, -1, 0, 9], spec=SPEC, null_slot=9) == []  # pools are read only, so slots may repeat
    assert check_verify([3, 1], spec=SPEC, parents=chain, resume_tokens=[3, 2], resume_path=[[0, 1, 2]] * 2) == []


def test_slots_rows_and_counts_of_a_verify() -> None:
    found = check_verify(
        [7, 1, 2, 3, 4], spec=SPEC, window_rows=[0, 5, 2, 3, 4], num_valid_tokens=[3, 3, 0, 4, 3],
        resume_tokens=[0, 1, 2, -1, 4],
    )  # fmt: skip
    assert found == [
        "`state_indices`: request 0 names slot 7, outside the pool of 7 slots; it is skipped.",
        "`window_rows`: request 1 writes row 5, outside the buffer of 5 rows; it is skipped.",
        "`num_valid_tokens`: request 2 has 0, outside 1 to 3; it is skipped.",
        "`num_valid_tokens`: request 3 has 4, outside 1 to 3; it is skipped.",
        "`resume_tokens`: request 3 has -1, outside 0 to 3; it is skipped.",
        "`resume_tokens`: request 4 has 4, outside 0 to 3; it is skipped.",
    ]


def test_links_that_do_not_point_backwards() -> None:
    links = [[-1, 1, 0], [0, 0, 0], [-1, 0, 5], [-1, -2, 0], [3, 3, 3]]
    for spec in (SPEC, DENSE, INPUTS):
        assert check_verify([1, 2, 3, 4, -1], spec=spec, parents=links, num_valid_tokens=[2, 1, 2, 2, 3]) == [
            f"`parents`: request {request} has link {link} at token {token}, which names no earlier one; it is skipped."
            for request, link, token in ((0, 1, 1), (1, 0, 0), (3, -2, 1))
        ]


def test_a_tree_in_the_shared_run_is_named() -> None:
    """By its links, whatever it is called: PITFALLS' [-1, 0, 0, 1], and two roots."""
    spec = dataclasses.replace(SPEC, num_draft_tokens=4)
    links = [[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, 1, 2], [-1, 0, 1, 0]]
    given: dict[str, Any] = {"parents": links, "num_valid_tokens": [4, 4, 4, 3]}
    assert check_verify([0, 1, 2, 3], spec=spec, **given) == [
        f"`parents`: request {request} has link {link} at token {token}: a tree cannot live in the shared run "
        '(use storage "inputs" or "dense"); it is skipped.'
        for request, link, token in ((0, 0, 2), (2, -1, 1))
    ]
    for storage in ("dense", "inputs"):
        assert check_verify([0, 1, 2, 3], spec=dataclasses.replace(spec, storage=storage), **given) == []


def test_paths_that_a_step_resumes_from() -> None:
    paths, resumed = [[0, 3, -1], [-1, 1, 2], [1, 1, -1], [0, 2, 1]], [2, 3, 2, 2]
    given: dict[str, Any] = {"resume_tokens": resumed, "resume_path": paths}
    of_step = "`resume_path`: request {} needs node {}, outside the 3 tokens of the step before; it is skipped."
    behind = "`resume_path`: request {} has node {} behind node {}; on a path a parent comes before its child."
    of_chain = (
        "`resume_path`: request {} needs node {} at place 1: a tree cannot live in the shared run "
        '(use storage "inputs" or "dense"); it is skipped.'
    )
    slots = [0, 1, 2, 3]
    expected = [of_step.format(0, 3), of_step.format(1, -1), behind.format(2, 1, 1)]
    assert check_verify(slots, spec=INPUTS, **given) == expected
    expected = [of_step.format(0, 3), behind.format(1, -1, -1), behind.format(2, 1, 1)]
    assert check_verify(slots, spec=DENSE, **given) == expected
    expected = [of_chain.format(0, 3), of_chain.format(3, 2), behind.format(1, -1, -1), behind.format(2, 1, 1)]
    assert check_verify(slots, spec=SPEC, **given) == expected


def test_rows_and_moved_slots_named_twice() -> None:
    """Among requests that are not skipped; slots only where they are moved on, which one that resumes does."""
    slots, rows = [1, 1, 2, 2, 9, 4], [3, 0, 3, 1, 4, 4]
    of_rows = "`window_rows`: requests 0, 2 write row 3; its content is unspecified."
    outside = "`state_indices`: request 4 names slot 9, outside the pool of 7 slots; it is skipped."
    moved = "`state_indices`: requests 2, 3 resume from slot 2, which is moved on; its content is unspecified."
    given: dict[str, Any] = {"window_rows": rows, "resume_tokens": [0, 0, 0, 2, 1, 1]}
    assert check_verify(slots, spec=SPEC, **given) == [outside, of_rows]
    assert check_verify(slots, spec=INPUTS, window_rows=rows) == [outside, of_rows]
    assert check_verify(slots, spec=INPUTS, **given) == [outside, of_rows, moved]


def test_lengths_that_a_verify_refuses() -> None:
    with pytest.raises(ValueError, match=re.escape("`parents`: expected request, token = (2, 3), got (2, 4).")):
        check_verify([0, 1], spec=SPEC, parents=[[-1, 0, 1, 2]] * 2)
    with pytest.raises(ValueError, match=re.escape("`resume_tokens`: expected request = (2,), got (1,).")):
        check_verify([0, 1], spec=SPEC, resume_tokens=[1])
    with pytest.raises(ValueError, match="`resume_path`: expected None without resume_tokens"):
        check_verify([0], spec=SPEC, resume_path=[[0, 1, 2]])
    with pytest.raises(ValueError, match=re.escape("at most max_requests = 5 requests, got 6.")):
        check_verify([0] * 6, spec=SPEC)


@pytest.mark.parametrize("storage", STORAGES)
def test_exactly_what_the_loops_skip_is_reported_as_skipped(storage: Any) -> None:
    """Random verifies and commits of requests that all mean to run: nothing skipped is left out, nothing made up."""
    spec = dataclasses.replace(SPEC, storage=storage, num_layers=1, conv_dim=1, dtype="float32")
    rng, outcomes = np.random.default_rng(5), set()
    x, weight = np.zeros((4, 3, 1), np.float32), np.zeros((1, 4), np.float32)
    for _ in range(300):
        pick = lambda low, high, *more: rng.integers(low, high, (4, *more)).astype(np.int32)  # noqa: E731
        slots, rows, valid = pick(0, 8), rng.permutation(6)[:4].astype(np.int32), pick(1, 4)
        links, resumed = np.stack([np.arange(-1, 2)] * 4).astype(np.int32), pick(0, 4)
        links[0], links[1, 2] = pick(-1, 3, 3)[0], rng.integers(-1, 2)
        path = np.sort(pick(-1, 4, 3), axis=1)
        path[:2] = np.arange(3)
        pool, windows = np.zeros(spec.state_shape, np.float32), np.zeros(spec.windows_shape, np.float32)
        shared: dict[str, Any] = {"spec": spec, "slots": slots, "rows": rows, "valid": valid, "null_slot": None}
        _, live = histories.verify(
            x, pool, windows, weight, None, **shared, layer=0, activation=None, number=np.float64, parents=links,
            resume=resumed, resume_path=path,
        )  # fmt: skip
        given: dict[str, Any] = {"spec": spec, "window_rows": rows, "num_valid_tokens": valid}
        found = check_verify(slots, **given, parents=links, resume_tokens=resumed, resume_path=path)
        assert skipped(found) == set(range(4)) - set(live), found
        outcomes.add(len(live))
        n, pool = pick(1, 4), np.zeros(spec.state_shape, np.float32)
        del shared["slots"]
        written = set()
        for request in range(4):
            one, after = np.where(np.arange(4) == request, n, 0), pool.copy()
            histories.commit(after, windows + 1, [(slots, one)], **shared, path=path)
            written |= {request} if (after != pool).any() else set()
        assert skipped(check_commit(slots, n, **given, accepted_path=path)) == set(range(4)) - written
        outcomes.add(len(written))
    assert outcomes == {0, 1, 2, 3, 4}


def skipped(sentences: list[str]) -> set[int]:
    return {int(re.findall(r"request (\d+)", one)[0]) for one in sentences if one.endswith("it is skipped.")}


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


@pytest.mark.parametrize(
    ("storage", "arguments", "message"),
    [
        (
            "sliding",
            {"parents": [[-1, 0, 1], [-1, 0, 0], [-1, -1, 0]]},
            "`parents`: requests [ 1  2 -1] has link [ 0 -1 -1] at token [ 2  1 -1]: a tree cannot live in the shared "
            'run (use storage "inputs" or "dense"); it is skipped.',
        ),
        (
            "inputs",
            {"parents": [[-1, 0, 1], [-1, 1, 0], [-1, -1, 0]]},
            "`parents`: requests [ 1 -1 -1] has link [ 1 -1 -1] at token [ 1 -1 -1], which names no earlier one",
        ),
        (
            "inputs",
            {"window_rows": [2, 1, 2]},
            "`window_rows`: requests [ 0  2 -1] write row [ 2  2 -1]; its content is unspecified.",
        ),
        (
            "inputs",
            {"state_indices": [4, 2, 4], "resume_tokens": [0, 1, 3]},
            "`state_indices`: requests [ 0  2 -1] resume from slot [ 4  4 -1], which is moved on; its content is",
        ),
        ("dense", {"resume_tokens": [0, 4, 3]}, "`resume_tokens`: requests [ 1 -1 -1] has [ 4 -1 -1], outside 0 to 3"),
        (
            "inputs",
            {"resume_tokens": [2, 1, 0], "resume_path": [[0, 3, -1], [2, -1, -1], [-1, -1, -1]]},
            "`resume_path`: requests [ 0 -1 -1] needs node [ 3 -1 -1], outside the [ 3 -1 -1] tokens of the step",
        ),
    ],
)
def test_a_traced_verify_names_the_requests(storage: Any, arguments: dict[str, Any], message: str) -> None:
    spec = dataclasses.replace(SPEC, storage=storage)

    @jax.jit
    @checkify.checkify
    def checked(arrays: dict[str, Any]) -> jax.Array:
        assert check_verify(spec=spec, **arrays) == []
        return arrays["state_indices"] + 1

    fine: dict[str, Any] = {"state_indices": [1, 2, 3]}
    for given in (fine, fine | arguments):
        error, result = checked({name: jnp.asarray(value, jnp.int32) for name, value in given.items()})
        assert result.tolist() == [slot + 1 for slot in given["state_indices"]]
        assert (error.get() is None) == (given is fine)
    assert message in str(error.get())


def test_a_traced_commit_looks_at_paths_and_at_the_slots_of_snapshots() -> None:
    fine = {"state_indices": [1, 2, 3], "num_accepted_tokens": [2, 1, 0]}
    path = {"accepted_path": [[1, 0, -1], [0, -1, -1], [-1, -1, -1]]}
    assert "requests [ 0 -1 -1] needs node [ 0 -1 -1] at place [ 1 -1 -1]: a tree" in str(reported(**fine, **path))
    tracked = {"track_indices": [4, 5, 2], "track_num_tokens": [1, 1, 1]}

    @jax.jit
    @checkify.checkify
    def checked(arrays: dict[str, Any]) -> None:
        check_commit(spec=INPUTS, **arrays)

    for slots, message in (
        ([1, -1, 3], "requests [ 1 -1 -1] makes its snapshot of slot [-1 -1 -1], which holds no state; it is skipped."),
        ([1, 6, 3], None),
    ):
        given = fine | tracked | {"state_indices": slots, "num_accepted_tokens": [0, 0, 0]}
        error, _ = checked({name: jnp.asarray(value, jnp.int32) for name, value in given.items()})
        assert error.get() is None if message is None else message in str(error.get())
    given = {
        "state_indices": [2, 1],
        "num_accepted_tokens": [0, 1],
        "track_indices": [4, 2],
        "track_num_tokens": [1, 1],
    }
    error, _ = checked({name: jnp.asarray(value, jnp.int32) for name, value in given.items()})
    assert "requests [ 1 -1] snapshot to slot [ 2 -1], which others make theirs of; its content" in str(error.get())


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
