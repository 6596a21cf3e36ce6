"""The list of breaks that `tests/mutations.py` tries, by hand, fits the source as it is: no break may rot."""

import collections
import json
import pathlib

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, ROOT, Mutation, break_source

RECORDS = sorted((ROOT / "notebooks" / "results").glob("*-mutations.json"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{pathlib.Path(one.file).stem}: {one.name}")
def test_each_break_applies_exactly_once(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert break_source(source, mutation) != source
    compile(break_source(source, mutation), mutation.file, "exec")
    assert mutation.tests
    assert {selection.partition("/")[0] for selection in mutation.tests} <= set(mutations.SELECTIONS)


def test_every_path_is_broken_under_names_of_its_own() -> None:
    names = collections.Counter((one.file, one.name) for one in MUTATIONS)
    assert max(names.values()) == 1
    per_file = collections.Counter(one.file for one in MUTATIONS)
    assert len(MUTATIONS) >= 30
    for file in ("jax_impl/conv.py", "jax_impl/commit.py", "jax_impl/history.py", "torch_ref/reference.py"):
        assert per_file[file] >= 10, file
    for file in ("columns", "commit_kernel", "verify_kernel"):  # the kernels of torch_ref
        assert per_file[f"torch_ref/{file}.py"] >= 7, file


@pytest.mark.parametrize("text", ["a = 1\na = 1\n", "b = 1\n"], ids=["twice", "not there"])
def test_a_fragment_that_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"`two`: expected the fragment once in a\.py, got [02] times"):
        break_source(text, Mutation("two", "a.py", "a = 1", "a = 2", ("layout",)))


def test_the_record_is_of_breaks_that_were_all_caught() -> None:
    """The newest record names no break that survived, nor one that is no longer in the list."""
    record = json.loads(RECORDS[-1].read_text(encoding="utf-8"))
    assert record["survived"] == []
    assert all(one["caught_by"] for one in record["mutations"])
    tried = {(one["file"], one["name"]) for one in record["mutations"]}
    assert len(tried) == len(record["mutations"]) == record["caught"]
    assert tried <= {(one.file, one.name) for one in MUTATIONS}
