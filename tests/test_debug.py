"""The debug checks name every request that is skipped or unspecified, and nothing else."""

import re

import pytest

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
    with pytest.raises(ValueError, match="given together with `track_num_tokens`"):
        check_commit([0], [1], spec=SPEC, track_indices=[1])
