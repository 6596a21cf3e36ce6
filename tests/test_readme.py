"""What the README states in numbers is what the package computes and what was measured."""

import pathlib
import re

import pytest

from jax_impl.bench import report
from jax_impl.capacity import saving, times

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = sorted((ROOT / "notebooks" / "results").glob("*-commit-verify.json"))


def test_saving_table():
    head, _, *lines = README.split("## What it saves")[1].split("\n\n")[2].strip().split("\n")
    draft_tokens = [int(number) for number in re.findall(r"D = (\d+)", head)]
    assert draft_tokens == [1, 2, 4, 8, 16]
    assert len(lines) == 4
    for line in lines:
        width = int(re.findall(r"K = (\d+)", line)[0])
        stated = [cell.strip() for cell in line.split("|")[2:-1]]
        assert stated == [times(saving(width, tokens)) for tokens in draft_tokens]


def test_measured_table_is_the_newest_results_file():
    stated = README.split("<!-- bench table -->")[1].split("<!-- end of bench table -->")[0].strip()
    assert stated == report.table(RESULTS[-1])


def test_report_names_a_file_that_is_no_results_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"`{path}`: expected a file written by bench --out, got")):
        report.table(path)
