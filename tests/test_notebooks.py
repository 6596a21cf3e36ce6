"""Notebooks as they are kept: complete outputs that do not change from run to run, prose before every cell, pictures.

CI executes them; here their files are read, with nothing but JSON.
"""

import base64
import itertools
import json
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
README = (ROOT / "README.md").read_text()
NAMES = [
    "01_layout_by_hand",
    "02_verify_and_commit",
    "03_cross_framework_equality",
    "04_capacity_planning",
    "05_speculative_decoding_end_to_end",
    "06_inside_a_serving_step",
]
# What differs between machines or runs: paths, addresses, warnings.
CHANGING = re.compile(r"(?:^|[\s'\"(])/(?:tmp|home|root|work|usr|opt)/|site-packages|0x[0-9a-f]{6,}|Warning|\d ?ms\b")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def code_cells(path: pathlib.Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def texts(output: dict[str, Any]) -> list[str]:
    """Everything in an output that is text."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return ["".join(value) for value in [*data.values(), output.get("text", "")]]


def pictures(path: pathlib.Path) -> list[bytes]:
    """The PNG files among a notebook's outputs."""
    data = [output.get("data", {}) for cell in code_cells(path) for output in cell["outputs"]]
    return [base64.b64decode("".join(one["image/png"])) for one in data if "image/png" in one]


def test_there_are_six() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 3 * 2**20


@each_notebook
def test_prose_stands_before_every_cell(path: pathlib.Path) -> None:
    cells = read(path)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for before, cell in itertools.pairwise(cells):
        if cell["cell_type"] == "code":
            assert before["cell_type"] == "markdown", "".join(cell["source"])
            assert len("".join(before["source"])) > 40


@each_notebook
def test_it_was_run_from_top_to_bottom_without_errors(path: pathlib.Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] in ("stream", "execute_result", "display_data") for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert read(path)["metadata"]["kernelspec"]["name"] == "python3"
    assert not [cell for cell in read(path)["cells"] if cell["metadata"]], "metadata has the time of the run"


@each_notebook
def test_most_cells_show_something(path: pathlib.Path) -> None:
    """Source that only prepares is rare: it says what it did, or is next to what does."""
    cells = code_cells(path)
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 2


@each_notebook
def test_outputs_are_those_of_any_run(path: pathlib.Path) -> None:
    for cell in code_cells(path):
        for output in cell["outputs"]:
            for text in texts(output):
                assert not CHANGING.search(text), CHANGING.findall(text)


@each_notebook
def test_the_first_cell_installs_and_names_the_devices(path: pathlib.Path) -> None:
    first = code_cells(path)[0]
    source = "".join(first["source"])
    assert '%pip install -q "..[notebooks]"' in source
    assert "".join(texts(first["outputs"][-1])).startswith("JAX on ")


@each_notebook
def test_cells_define_nothing(path: pathlib.Path) -> None:
    """Logic is imported from the packages, where it has tests."""
    for cell in code_cells(path):
        source = "".join(cell["source"])
        assert not re.search(r"^\s*(def|class|while|lambda) ", source, re.MULTILINE), source
        assert len(source.splitlines()) <= 20


def test_exercises_have_answers() -> None:
    prose = [
        "".join(cell["source"])
        for cell in read(FOLDER / "04_capacity_planning.ipynb")["cells"]
        if cell["cell_type"] == "markdown"
    ]
    asked = re.findall(r"^(\d)\. ", next(text for text in prose if text.startswith("## Exercises")), re.MULTILINE)
    answered = [number for text in prose for number in re.findall(r"^\*\*(\d)\.\*\*", text, re.MULTILINE)]
    assert asked == answered == ["1", "2", "3", "4"]


def test_equality_is_what_the_outputs_say() -> None:
    """The kept tables of notebooks 3, 5 and 6 report no difference and no copy."""
    said = {name: [t for c in code_cells(FOLDER / f"{name}.ipynb") for o in c["outputs"] for t in texts(o)]
            for name in NAMES}  # fmt: skip
    bits = [text for text in said[NAMES[2]] if "different bits" in text and "-+-" in text]
    assert len(bits) == 1
    assert re.findall(r"(\d+) of \d+", bits[0]) == ["0"] * 7
    assert any(text.count("| yes") == 4 and "greedy decoding" in text for text in said[NAMES[4]])
    assert any("assisted generation is not supported" in text for text in said[NAMES[4]])
    assert "the same bits: True\n" in said[NAMES[5]]
    (programs,) = [text for text in said[NAMES[5]] if "pool-sized copies" in text and "-+-" in text]
    assert programs.count("| yes") >= 3
    assert len(re.findall(r"\| none", programs)) == 7


def test_the_readme_links_every_notebook_once() -> None:
    for path in NOTEBOOKS:
        assert README.count(f"(notebooks/{path.name})") == 1


def test_the_readme_shows_a_picture_of_notebook_1_and_one_of_the_benchmark() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((notebooks/[^)]+)\)", README)
    assert len(shown) == 2
    overlap, measured = (ROOT / name for name in shown)
    assert overlap.read_bytes() in pictures(NOTEBOOKS[0])
    file, _, operation = measured.stem.rpartition("-")  # as bench names the plots beside its file
    points = json.loads((measured.parent / f"{file}.json").read_text())["points"]
    assert operation in {point["operation"] for point in points}
    assert measured.read_bytes().startswith(b"\x89PNG")
