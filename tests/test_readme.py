"""What the README states in numbers is what the package computes and what was measured."""

import json
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


def points(**more):
    """A results file of one point that was measured without torch, and `more` subjects."""
    environment = {"date": "2026-11-29", "device": "GPU", "driver": "1", "versions": {"jax": "0.11.2"}}
    sizes = {"num_draft_tokens": 4, "width": 4, "conv_dim": 8192, "num_layers": 30, "num_slots": 746, "batch": 16}
    times = {name: {"median_us": value} for name, value in {"pallas": 2.0, "xla": 5.0, **more}.items()}
    point = {"operation": "commit", "axis_order": "time_major", "dtype": "bfloat16", **sizes, **times}
    return json.dumps({"environment": environment, "preset": "Qwen3.5-35B-A3B", "tp": 1, "points": [point]})


@pytest.mark.parametrize(
    ("more", "cells"),
    [
        ({}, "2.00 | – | – | 2.5 | –"),
        ({"triton": 3.0}, "2.00 | – | – | 2.5 | 1.50"),
        ({"copy_driver": 1.6, "copy_kernel": 1.25}, "2.00 | 1.25 | 1.60 | 2.5 | –"),
        ({"copy_driver": 1.6}, "2.00 | 1.60 | 1.25 | 2.5 | –"),
    ],
)
def test_report_leaves_out_what_was_not_measured(tmp_path, more, cells):
    path = tmp_path / "x.json"
    path.write_text(points(**more))
    title, *_, row = report.table(path).splitlines()
    assert row == f"| commit | time_major | 4 | 16 | {cells} |"
    assert "Triton none" in title


@pytest.mark.parametrize("content", [None, "", "3", '{"environment": 1}', points().replace('"pallas"', '"other"')])
def test_report_refuses_other_files_with_one_kind_of_error(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"`{path}`: expected a file written by bench --out, got")):
        report.table(path)
