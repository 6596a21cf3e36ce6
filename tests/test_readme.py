"""What the README states in numbers is what the package computes and what was measured; files, tables and plots."""

import pathlib
import re

from jax_impl.bench import report
from jax_impl.capacity import DESIGNS, design_table, saving, times

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = report.results_files(ROOT / "notebooks" / "results")


def test_saving_table():
    head, _, *lines = README.split("## What it saves")[1].split("\n\n")[2].strip().split("\n")
    draft_tokens = [int(number) for number in re.findall(r"D = (\d+)", head)]
    assert draft_tokens == [1, 2, 4, 8, 16]
    assert len(lines) == 4
    for line in lines:
        width = int(re.findall(r"K = (\d+)", line)[0])
        stated = [cell.strip() for cell in line.split("|")[2:-1]]
        assert stated[:-1] == [times(saving(width, tokens)) for tokens in draft_tokens]
        assert {times(saving(width, tokens, storage="inputs")) for tokens in draft_tokens} == {stated[-1]}
    assert head.split("|")[-2].strip() == "inputs, any D"


def test_table_of_designs():
    """Formulas, numbers and sources are those of `jax_impl.capacity`."""
    _, _, *lines = README.split("What designs keep for a rollback at K = 4")[1].split("\n\n")[1].strip().split("\n")
    stated = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    numbers = {design.name: [] for design in DESIGNS}
    for row in design_table(4, (1, 2, 4, 8, 16)):
        numbers[row.design].append(f"{row.slot_columns} + {row.row_columns}")
    assert stated == [
        [design.name, f"{design.slot} + {design.row}", *numbers[design.name], design.source] for design in DESIGNS
    ]


def test_the_measured_block_is_what_the_command_writes(tmp_path):
    """`bench --update-readme` changes nothing in the README that is committed."""
    copy = tmp_path / "README.md"
    copy.write_text(README)
    report.update_readme(copy, RESULTS)
    assert copy.read_text() == README


def test_the_first_file_is_still_readable():
    rows = report.tables(report.read(ROOT / "notebooks" / "results" / "2026-11-29-commit-verify.json")).splitlines()
    assert "| commit | time_major | 4 | 256 | 195.67 | 178.47 | 91.2% | 1.2 | 1.01 | – |" in rows
    assert len([row for row in rows if row.startswith("| verify |")]) == 10
