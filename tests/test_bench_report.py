"""Results files: which are read, what tables and plots say of them, and what a README gets."""

import json
import math
import pathlib
import re
import sys
from typing import Any

import pytest

from jax_impl.__main__ import main
from jax_impl.bench import drafts, measure, plots, report
from jax_impl.layout import AXIS_ORDERS

RESULTS = pathlib.Path(__file__).parent.parent / "notebooks" / "results"
ENVIRONMENT = {"date": "2026-11-29", "device": "GPU", "driver": "1", "versions": {"jax": "0.11.2"}}


def row(operation: str = "commit", **more: Any) -> report.Row:
    """A point of a model with 30 layers, at D = 4 and B = 16."""
    sizes = {"num_draft_tokens": 4, "width": 4, "conv_dim": 8192, "num_layers": 30, "num_slots": 746, "batch": 16}
    return {"operation": operation, "axis_order": "time_major", "dtype": "bfloat16", **sizes, **more}


def timed(microseconds: float, **more: Any) -> dict[str, Any]:
    return {"median_us": microseconds, **more}


def walled(microseconds: float, launches: float = 31.0) -> dict[str, Any]:
    """A subject of a whole step whose wall time is given; on the device it takes half, and one step alone longer."""
    return timed(microseconds / 2, wall=timed(microseconds), latency=timed(microseconds + 9), launches=launches)


def record(*rows: report.Row, **environment: Any) -> report.Record:
    return {"environment": ENVIRONMENT | environment, "preset": "Qwen3.5-35B-A3B", "tp": 1, "points": list(rows)}


def saved(path: pathlib.Path, content: report.Record) -> pathlib.Path:
    path.write_text(json.dumps(content))
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "3",
        "{}",
        '{"environment": 1}',
        json.dumps(record()),
        json.dumps(record(row())),
        json.dumps(record(row(pallas={"us": 2.0}))),
        json.dumps(record(row("other", pallas=timed(2.0)))),
        json.dumps(record(row(pallas=timed(2.0)))).replace('"batch"', '"rows"'),
        json.dumps(record(row(pallas=timed(2.0)))).replace('"driver"', '"other"'),
    ],
)
def test_other_files_are_refused_with_one_kind_of_error(tmp_path: pathlib.Path, content: str | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"`{path}`: expected a file written by bench --out, got")):
        report.read(path)


WRITTEN = json.dumps(record(row(pallas=timed(2.0))))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "no JSON: line 1, column 1"),
        ('{"points": [\n1,,]}', "no JSON: line 2, column 3"),
        (b"\xff\xfe", "no text: byte 0"),
        ("[" * 100_000, "lists or objects nested too deep"),
        ("9" * 5000, "no JSON: a number of too many digits"),
        ("[]", "a list"),
        ("3", "the number 3"),
        ("null", "null"),
        ('{"tool": "compute-sanitizer"}', "no `points`"),
        ('{"points": {}}', "an object as `points`, not a list"),
        (json.dumps(record()), "no points"),
        (json.dumps(record() | {"points": ["x"]}), "the text 'x' as `points[0]`, not an object"),
        (WRITTEN.replace('"environment"', '"where"'), "no `environment`"),
        (WRITTEN.replace('"driver"', '"other"'), "no `environment.driver`"),
        (WRITTEN.replace('"GPU"', r'"\ud800"'), r"the text '\ud800' as `environment.device`, not printable text"),
        (WRITTEN.replace('"tp": 1', '"tp": true'), "true as `tp`, not a whole number"),
        (WRITTEN.replace('"batch": 16', '"batch": "x"'), "the text 'x' as `points[0].batch`, not a whole number"),
        (WRITTEN.replace('"batch"', '"rows"'), "no `points[0].batch`"),
        (WRITTEN.replace('"commit"', '"other"'), "the text 'other' as `points[0].operation`, not one of"),
        (WRITTEN.replace('"time_major"', '"$x"'), "the text '$x' as `points[0].axis_order`, not one of"),
        (WRITTEN.replace("2.0", '"1"'), "the text '1' as `points[0].pallas.median_us`, not a number"),
        (WRITTEN.replace("2.0", "NaN"), "the number nan as `points[0].pallas.median_us`, not a number"),
        (WRITTEN.replace('{"median_us": 2.0}', "[2]"), "a list as `points[0].pallas`, not an object"),
        (WRITTEN.replace('"median_us"', '"us"'), "no time in `points[0]`"),
        (WRITTEN.replace('"width": 4', '"width": 0'), "sizes that no cache has: `width`: "),
        (json.dumps(record(row(errors=3))), "the number 3 as `points[0].errors`, not an object"),
        (json.dumps(record(row(errors={"xla": 3}))), "the number 3 as `points[0].errors.xla`, not text"),
        (json.dumps(record(row(pallas=timed(1.0, wall=2)))), "the number 2 as `points[0].pallas.wall`, not an object"),
        (json.dumps(record(row("mesh", one=timed(1.0)))), "no `points[0].data`"),
        (json.dumps(record(row("mesh", data=1, tensor=2, step_ratio=1.9))), "the number 1.9 as `points[0].step_ratio`"),
        (json.dumps(record(row("rollback", pallas=timed(1.0), recurrent=True))), "no `points[0].track`"),
        (json.dumps(record(row("rollback", pallas=timed(1.0), model="x"))), "no `points[0].groups`"),
        (json.dumps(record(row("scaling", pallas=timed(1.0), over="conv_dim"))), "no `points[0].of`"),
        (json.dumps(record(row(pallas=timed(1.0))) | {"geometry": {"width": 4}}), "no `geometry.num_layers`"),
        (json.dumps(record(row(pallas=timed(1.0))) | {"command_buffers": 1}), "the number 1 as `command_buffers`"),
    ],
)
def test_a_file_of_another_form_is_named_in_words_and_left_out(
    tmp_path: pathlib.Path, capsys: Any, content: str | bytes, found: str
) -> None:
    """One line that says what was found, no exception's; the results file after it is printed and drawn."""
    pytest.importorskip("matplotlib")
    path, own = tmp_path / "x.json", saved(tmp_path / "own.json", record(row(pallas=timed(2.0))))
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["bench", "--report", str(path), str(own), "--plots", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"left out: `{path}`: expected a file written by bench --out, got {found}")
    assert line.endswith(".")
    assert "Error" not in line
    assert printed.out.count("GPU, driver 1, JAX") == 1
    assert {drawn.name.partition("-")[0] for drawn in (tmp_path / "new").iterdir()} == {"own"}
    assert main(["bench", "--report", str(path)]) == 1


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "cells"),
    [
        ({}, "2.00 | – | – | 2.5 | – | –"),
        ({"triton": timed(3.0)}, "2.00 | – | – | 2.5 | 1.50 | –"),
        ({"copy_driver": timed(1.6), "copy_kernel": timed(1.25)}, "2.00 | 1.25 | 62.5% | 2.5 | – | –"),
        ({"copy_driver": timed(1.6)}, "2.00 | 1.60 | 80.0% | 2.5 | – | –"),
        ({"pallas": timed(2.0, kernel=timed(1.5))}, "2.00 | – | – | 2.5 | – | 1.50"),
        ({"pallas": timed(2.0, kernel=None)}, "2.00 | – | – | 2.5 | – | –"),
        ({"xla": {}}, "2.00 | – | – | – | – | –"),
    ],
)
def test_a_table_leaves_out_what_was_not_measured(tmp_path: pathlib.Path, more: Any, cells: str) -> None:
    point = row(**{"pallas": timed(2.0), "xla": timed(5.0), **more})
    title, *_, line = report.tables(report.read(saved(tmp_path / "x.json", record(point)))).splitlines()
    assert line == f"| commit | time_major | 4 | 16 | {cells} |"
    assert title == (
        "GPU, driver 1, JAX 0.11.2, Triton none, 2026-11-29; "
        "Qwen3.5-35B-A3B at TP 1: L=30, conv_dim=8192, K=4, bfloat16, C=746."
    )


STEP = row(
    "step",
    pallas_unrolled=walled(50.0),
    pallas_chained=walled(46.0),
    pallas_scan=walled(60.0, 93.0),
    xla_scan=walled(200.0),
    triton=walled(80.0),
    copy_driver=walled(48.0),
    copy_kernel=walled(40.0),
)
STEP_LINE = (
    "| time_major | 4 | 16 | 25.0 | 20.0 | 1.250 | 40.0 | 0.62 | 50.0 | 46.0 | 23.0 | 60.0 | 200.0 | 59.0 | 31, 93 |"
)
OF_MODEL = {
    "num_layers": 20, "conv_dim": 12288, "num_slots": 160, "model": "Kimi-Linear-48B-A3B", "groups": 3,
    "state": [32, 128, 128],
}  # fmt: skip


def rolled_back(recurrent: bool, track: bool, **more: Any) -> report.Row:
    """A rollback of 4 µs beside a launch per group of 5 µs and a copy of 3 µs."""
    times = {"pallas": timed(4.0), "launch_per_group": timed(5.0), "copy_driver": timed(3.0), "triton": timed(6.0)}
    return row("rollback", **times, recurrent=recurrent, track=track) | OF_MODEL | more


PREFILL = row(
    "prefill",
    tokens=512,
    pallas=timed(4.0),
    pallas_continued=timed(5.0),
    xla=timed(10.0),
    xla_continued=timed(15.0),
    copy_kernel=timed(3.0),
)
DESIGNED = row(
    "drafts", of="step", design="kept", columns=17, pallas=timed(90.0), copy_driver=timed(81.0), sliding_ratio=0.75
)
COMPILED = {"trace_s": 0.5, "compile_s": 1.25, "launches": 31.0, "temp_bytes": 1000, "state_bytes": 50_000}
SCALED = {"pallas": timed(4.0), "copy_driver": timed(3.0), "over": "conv_dim"}


@pytest.mark.parametrize(
    ("point", "line"),
    [
        (
            STEP,
            STEP_LINE,
        ),
        (
            row("compile", form="scan", command_buffers=True, pool_copies=[], **COMPILED),
            "| scan | time_major | 30 | yes | 0.50 | 1.25 | 31 | 2.00% | none |",
        ),
        (
            row("compile", form="while_loop", command_buffers=False, pool_copies=["copy", "pad"], **COMPILED),
            "| commit: while_loop | time_major | 30 | no | 0.50 | 1.25 | 31 | 2.00% | copy, pad |",
        ),
        (
            rolled_back(False, False, xla=timed(14.0), lists_per_layer=timed(9.0)),
            "| conv | time_major | 1 | 16 | 4.00 | 3.00 | 75.0% | 0.80 | 2.25 | 3.5 | 1.50 |",
        ),
        (
            rolled_back(True, True),
            "| conv, recurrent | time_major | 2 | 16 | 4.00 | 3.00 | 75.0% | 0.80 | – | – | 1.50 |",
        ),
        (PREFILL, "| time_major | 16 | 512 | 4.00 | 3.00 | 75.0% | 2.5 | 5.00 | 3.0 |"),
        (DESIGNED, "| step | kept | time_major | 4 | 16 | 17 | 90.00 | 81.00 | 90.0% | 0.750 |"),
        (
            row("drafts", of="verify", design="inputs", columns=15, pallas=timed(3.0)),
            "| verify | inputs | time_major | 4 | 16 | 15 | 3.00 | – | – | – |",
        ),
        (row("scaling", of="verify", **SCALED), "| verify | time_major | 16 | 8192 | 746 | 4.00 | 3.00 | 75.0% |"),
    ],
)
def test_tables_of_the_other_operations(point: report.Row, line: str) -> None:
    text = report.tables(record(row(pallas=timed(2.0)), point)).split("\n\n")
    assert text[-1].splitlines()[-1] == line
    assert {row.count("|") for row in text[-1].splitlines()} == {line.count("|")}


MESHED = row(
    "mesh",
    data=2,
    tensor=1,
    one=walled(100.0),
    all=walled(104.0),
    one_chained=walled(90.0),
    all_chained=walled(91.8),
    step_ratio={"device": 1.02, "wall": 1.04, "chained": 1.02},
    throughput={"device": 1.96, "wall": 1.92, "chained": 1.961},
)


def test_what_the_times_of_a_step_are_is_said_above_them() -> None:
    """With the number of arrays that a call passes: x and y of 30 layers, and six others."""
    of_step, of_mesh = (report.tables(record(point)).split("\n\n") for point in (STEP, MESHED))
    assert "Unrolled, a call passes 66 arrays" in of_step[1]
    assert "passes 66 arrays to every device" in of_mesh[1]
    assert "Throughput: requests of all data ranks" in of_mesh[1]
    assert "Chained: " in of_mesh[1]
    cells = of_mesh[2].splitlines()[-1]
    device, wall, chained = (
        "50.0 | 52.0 | 1.020 | 1.96×",
        "100.0 | 104.0 | 1.040 | 1.92×",
        "90.0 | 91.8 | 1.020 | 1.96×",
    )
    assert cells == f"| time_major | 2 | 1 | 4 | 16 | {device} | {wall} | {chained} |"


def wall_only(microseconds: float) -> dict[str, Any]:
    return {"wall": timed(microseconds), "latency": timed(microseconds + 9)}


def test_a_mesh_of_which_only_wall_times_are_known_has_dashes_for_the_device() -> None:
    """In the table, in its caption and in the printed line."""
    point = {name: value for name, value in MESHED.items() if not name.endswith("_chained")}
    point |= {"one": wall_only(100.0), "all": wall_only(104.0)}
    point |= {"step_ratio": {"wall": 1.04}, "throughput": {"wall": 1.92}}
    caption, cells = report.tables(record(point)).split("\n\n")[1:]
    dashes = "– | – | – | –"
    row = f"| time_major | 2 | 1 | 4 | 16 | {dashes} | 100.0 | 104.0 | 1.040 | 1.92× | {dashes} |"
    assert cells.splitlines()[-1] == row
    assert "On the device" not in caption
    assert "No times on the device were measured." in caption
    assert "Chained" not in caption
    line = measure.line(point)
    assert line.endswith(
        "data=2 tensor=1  wall: step ratio 1.040, throughput 1.92×  one – (wall 100.00)  all – (wall 104.00)"
    )


def test_the_committed_mesh_has_wall_times_only() -> None:
    """Its numbers were taken before device times were; under those names they were printed as such."""
    content = report.read(RESULTS / "2026-11-30-mesh-wall.json")
    assert "wall" in content["note"]
    for point in content["points"]:
        assert "median_us" not in point["one"].keys() | point["all"].keys()
        ratio = point["all"]["wall"]["median_us"] / point["one"]["wall"]["median_us"]
        assert point["step_ratio"]["wall"] == pytest.approx(ratio, abs=1e-4)
        assert point["throughput"]["wall"] == pytest.approx(point["data"] / ratio, abs=1e-4)
    first = report.tables(content).split("\n\n")[2].splitlines()[2]
    dashes = "– | – | – | –"
    assert first == f"| time_major | 2 | 1 | 4 | 16 | {dashes} | 281.1 | 535.8 | 1.906 | 1.05× | {dashes} |"
    assert RESULTS / "2026-11-30-mesh-wall.json" not in report.results_files(RESULTS)


def test_what_the_designs_are_is_said_above_them() -> None:
    """Each by its name, in the table's words."""
    caption = report.tables(record(DESIGNED)).split("\n\n")[1]
    for word in (
        "Sliding:",
        "Inputs:",
        "Kept:",
        "kept_tree",
        "Resumed:",
        "sliding_resumed",
        "kept_resumed",
        "Columns:",
    ):
        assert word in caption


def test_a_step_on_a_mesh_is_drawn_by_device_and_by_wall() -> None:
    pytest.importorskip("matplotlib")
    failed = row("mesh", data=2, tensor=1, errors={"check": "x"}) | {"batch": 0}
    (axes,) = plots._mesh_figure([MESHED, failed, MESHED | {"batch": 64, "tensor": 2}]).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()[1:]}
    assert lines == {
        "data=2 tensor=1, device": [[16, 1.02]],
        "data=2 tensor=1, wall": [[16, 1.04]],
        "data=2 tensor=1, chained": [[16, 1.02]],
        "data=2 tensor=2, device": [[64, 1.02]],
        "data=2 tensor=2, wall": [[64, 1.04]],
        "data=2 tensor=2, chained": [[64, 1.02]],
    }
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "64"]


def test_a_rollback_has_a_geometry_of_its_own() -> None:
    """It stands above the table, and the title names a preset only where other points are of it."""
    own = "Rollback of Kimi-Linear-48B-A3B: L=20, conv_dim=3×4096, K=4, bfloat16, C=160, state 32×128×128 in float32."
    rolled, other = rolled_back(False, False), row(pallas=timed(2.0))
    alone, mixed = (report.tables(record(*points)).split("\n\n") for points in ([rolled], [other, rolled]))
    assert alone[0] == "GPU, driver 1, JAX 0.11.2, Triton none, 2026-11-29."
    assert mixed[0].endswith("; Qwen3.5-35B-A3B at TP 1: L=30, conv_dim=8192, K=4, bfloat16, C=746.")
    assert (alone[1], mixed[2]) == (own, own)
    assert alone[2].startswith("| rollback of |")
    assert own not in mixed[1]


def test_what_failed_is_named_with_its_variant() -> None:
    more = {"errors": {"xla": "RuntimeError: x"}}
    text = report.tables(
        record(rolled_back(True, True, **more), rolled_back(False, False, **more), PREFILL | more, DESIGNED | more)
    )
    what = "time_major D=4 B=16"
    assert text.endswith(
        f"Failed: rollback {what} conv, recurrent, tracked: xla; rollback {what} conv: xla; prefill {what} T=512: xla; "
        f"drafts {what} step kept: xla."
    )


def test_a_point_that_was_not_timed_has_dashes_and_no_plot(tmp_path: pathlib.Path) -> None:
    """A comparison that fails leaves a row without its operation's own fields."""
    pytest.importorskip("matplotlib")
    wrong = [
        row(name, errors={"check": "results differ from the XLA form"}) for name in ("rollback", "prefill", "drafts")
    ]
    text = report.tables(report.read(saved(tmp_path / "x.json", record(*wrong))))
    assert "| – | time_major | – | 16 | – |" in text
    assert "| time_major | 16 | – | – |" in text
    assert "| – | – | time_major | 4 | 16 | – |" in text
    assert len(plots.draw(record(*wrong), "x", tmp_path)) == 4


def test_what_failed_is_named_below_the_tables() -> None:
    broken = row("step", errors={"xla_scan": "RuntimeError: x", "triton": "RuntimeError: y"})
    wrong = row("compile", errors={"check": "results differ from the XLA form"})
    text = report.tables(record(broken, wrong, row(pallas=timed(2.0))))
    assert "| time_major | 4 | 16 | – | – |" in text
    what = "time_major D=4 B=16"
    assert text.endswith(f"Failed: step {what}: xla_scan; step {what}: triton; compile {what}: check.")


# --- the newest files -------------------------------------------------------------------------------------------------


def test_only_files_that_bench_names_are_its_results(tmp_path: pathlib.Path) -> None:
    own = [
        "2026-11-29-all.json",
        "2026-11-29-commit-verify.json",
        "2026-11-30-step-D2-8-no-command-buffers.json",
        "2026-11-30-verify-Qwen3.5-0.8B-tp2.3.json",
    ]
    others = [
        "2026-12-01-sanitizer.json",
        "2026-11-30-mutations.json",
        "2026-11-29-verify-D2-8-16-partial.json",
        "x.json",
        "2026-11-29-.json",
    ]
    for name in own + others:
        (tmp_path / name).write_text("{}")
    assert [path.name for path in report.results_files(tmp_path)] == own


def test_the_newest_of_each_operation_is_shown() -> None:
    """An old run of two operations, a new one of one of them, an older one that nothing is left of."""
    commit, verify, other = (row(name, pallas=timed(2.0)) for name in ("commit", "verify", "verify"))
    eight = row("commit", pallas=timed(2.0)) | {"num_draft_tokens": 8}
    first = record(commit, verify)
    second = record(other, time="10:00:00")
    third = record(commit, eight, date="2026-12-01")
    shown = list(report.newest([second, third, first]))
    assert [one for one, _ in shown] == [second, third]
    assert [[point for point in one["points"] if keep(point)] for one, keep in shown] == [[other], [commit]]


def test_a_readme_has_no_scaling_and_each_program_once() -> None:
    programs = [row("compile", form="scan", command_buffers=True, pool_copies=[], **COMPILED) for _ in range(2)]
    programs[1]["axis_order"] = "channel_major"
    ((one, keep),) = report.newest([record(*programs, row("scaling", of="verify", **SCALED))])
    assert [point for point in one["points"] if keep(point)] == programs[:1]


def test_a_readme_has_rollbacks_and_prefills_of_one_model_once() -> None:
    """A rollback measured beside another preset is of the same model as ever; a prefill is of the preset."""
    first = record(rolled_back(False, False), PREFILL)
    second = record(rolled_back(True, False), PREFILL, date="2026-12-01") | {"preset": "Kimi-K3", "tp": 8}
    shown = [(one, [point for point in one["points"] if keep(point)]) for one, keep in report.newest([first, second])]
    assert shown == [(first, [PREFILL]), (second, second["points"])]


@pytest.mark.parametrize("change", [{"tp": 2}, {"preset": "Kimi-K3"}, {"command_buffers": False}])
def test_other_models_and_flags_do_not_replace_each_other(change: Any) -> None:
    first = record(row(pallas=timed(2.0)))
    second = record(row(pallas=timed(3.0)), date="2026-12-01") | change
    assert [one for one, _ in report.newest([second, first])] == [first, second]
    assert ("without command buffers" in report.tables(second)) == ("command_buffers" in change)


# --- the README -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A README with an empty block, and two results files beside it."""
    results = tmp_path / "notebooks" / "results"
    results.mkdir(parents=True)
    saved(results / "2026-11-29-commit.json", record(row(pallas=timed(2.0))))
    saved(results / "2026-12-01-step.json", record(STEP, date="2026-12-01"))
    (results / "2026-12-01-notes.json").write_text("{}")
    (tmp_path / "README.md").write_text("# Title\n\n<!-- bench table -->\n<!-- end of bench table -->\n\nEnd.\n")
    return tmp_path


def test_update_readme_writes_between_the_markers(checkout: pathlib.Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(checkout)
    for _ in range(2):  # the second time over its own text
        assert main(["bench", "--update-readme"]) == 0
        assert capsys.readouterr().out == "wrote README.md from 2 files\n"
        head, rest = pathlib.Path("README.md").read_text().split("<!-- bench table -->\n")
        block, tail = rest.split("\n<!-- end of bench table -->")
        assert (head, tail) == ("# Title\n\n", "\n\nEnd.\n")
        assert block == report.readme_block(report.results_files(checkout / "notebooks" / "results"))
        assert [line for line in block.splitlines() if re.match(r"\| (commit|time_major) \|", line)] == [
            "| commit | time_major | 4 | 16 | 2.00 | – | – | – | – | – |",
            STEP_LINE,
        ]


def test_update_readme_of_given_files(checkout: pathlib.Path, capsys: Any) -> None:
    readme, file = checkout / "README.md", checkout / "notebooks" / "results" / "2026-12-01-step.json"
    assert main(["bench", "--report", str(file), "--update-readme", str(readme)]) == 0
    assert capsys.readouterr().out == f"wrote {readme} from 1 file\n"
    assert "| commit |" not in readme.read_text()


@pytest.mark.parametrize("text", [None, "", "<!-- bench table -->", "<!-- end of bench table --><!-- bench table -->"])
def test_a_readme_without_the_block_is_refused_and_kept(checkout: pathlib.Path, capsys: Any, text: str | None) -> None:
    readme = checkout / "README.md"
    readme.unlink()
    if text is not None:
        readme.write_text(text)
    assert main(["bench", "--update-readme", str(readme)]) == 2
    assert re.match(rf"error: `{re.escape(str(readme))}`: expected (one|a README)", capsys.readouterr().err)
    assert text is None or readme.read_text() == text


def test_no_results_are_no_block(tmp_path: pathlib.Path) -> None:
    (tmp_path / "README.md").write_text("<!-- bench table --><!-- end of bench table -->")
    with pytest.raises(ValueError, match="`paths`: expected results files written by bench --out, got none"):
        report.update_readme(tmp_path / "README.md", [])


# --- plots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def everything() -> report.Record:
    """A record with points of every operation, in both axis orders, some of them failed."""
    rows: list[report.Row] = []
    for order in AXIS_ORDERS:
        for batch in (1, 16):
            more = {"axis_order": order, "batch": batch}
            times = {"pallas": timed(2.0 * batch), "copy_driver": timed(1.0 * batch)}
            rows += [row(name, **times) | more for name in ("commit", "verify")]
            rows += [PREFILL | more | {"tokens": 128 // batch}]
            rows += [
                DESIGNED | times | more | {"of": of, "design": design}
                for of, design in (("verify", "kept"), ("step", "sliding"), ("step", "kept_resumed"))
            ]
            rows += [STEP | more, row("step", errors={"arrays": "x"}) | more | {"batch": 64}]
        rows += [
            row("compile", form=form, command_buffers=True, **COMPILED) | {"axis_order": order, "num_layers": n}
            for form in ("scan", "unrolled", "jit")
            for n in (1, 30)
        ]
        rows += [
            row("scaling", of=of, **SCALED | {"over": over}) | {"axis_order": order, over: size}
            for of in ("commit", "verify")
            for over, size in (("conv_dim", 1024), ("conv_dim", 2048), ("num_slots", 64))
        ]
        rows.append(row("scaling", errors={"check": "x"}) | {"axis_order": order})
    rows.append(MESHED)
    for recurrent, track in ((False, False), (False, True), (True, False)):
        rows += [rolled_back(recurrent, track, batch=batch, lists_per_layer=timed(9.0)) for batch in (1, 16)]
    return record(*rows)


def test_plots_of_every_operation(everything: report.Record, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plots.draw(everything, "stem", tmp_path)
    names = ("commit", "verify", "step", "drafts", "rollback", "prefill", "scaling", "compile", "mesh", "bytes")
    assert paths == [tmp_path / f"stem-{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_name_of_a_device_is_drawn_as_it_stands(tmp_path: pathlib.Path) -> None:
    """Dollar signs begin no formula, whose errors would end the command."""
    pytest.importorskip("matplotlib")
    assert len(plots.draw(record(row(pallas=timed(2.0)), device=r"$\frac$"), "x", tmp_path)) == 2


def figure_of(everything: report.Record, operation: str) -> Any:
    pytest.importorskip("matplotlib")
    rows = [point for point in everything["points"] if point["operation"] == operation]
    return plots._time_figure(rows, operation)


def test_time_against_requests_has_its_limit_and_units(everything: report.Record) -> None:
    figure = figure_of(everything, "commit")
    assert [axes.get_title() for axes in figure.axes] == ["time_major, D = 4", "channel_major, D = 4"]
    for axes in figure.axes:
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("requests B", "device time of one commit of all layers (µs)")
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        assert lines == {"Pallas": [[1, 2], [16, 32]], "limit: copy of the same bytes": [[1, 1], [16, 16]]}


def test_a_step_is_drawn_by_its_wall_time(everything: report.Record) -> None:
    axes, _ = figure_of(everything, "step").axes
    assert axes.get_ylabel() == "wall time of one whole step (µs)"
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert lines["Pallas, unrolled"] == [50.0, 50.0]
    assert lines["Pallas, chained"] == [46.0, 46.0]
    assert lines["limit: the same copies in one graph"] == [40.0, 40.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "16", "64"]


def test_designs_are_drawn_by_their_whole_steps(everything: report.Record) -> None:
    """A line for each that commits or resumes; the limit is that of the first."""
    labels = [series.label for series in plots.TIMES["drafts"][1]]
    assert len(labels) == len(set(labels)) == len(drafts.DESIGNS["step"]) + 1
    axes, _ = figure_of(everything, "drafts").axes
    assert axes.get_ylabel() == "device time of one whole step (µs)"
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {
        "sliding, commit": [[1, 2], [16, 32]],
        "kept inputs, resumed": [[1, 2], [16, 32]],
        "limit: copies of the bytes of sliding": [[1, 1], [16, 16]],
    }
    for design in drafts.DESIGNS["step"]:
        (one, *_) = plots._time_figure([DESIGNED | {"design": design}], "drafts").axes
        assert len(one.get_lines()) == (2 if design == "sliding" else 1)


def test_a_rollback_is_drawn_by_what_it_takes_along(everything: report.Record) -> None:
    pytest.importorskip("matplotlib")
    figure = plots._rollback_figure([point for point in everything["points"] if point["operation"] == "rollback"])
    assert [axes.get_title() for axes in figure.axes] == [
        f"{what}, {sets}"
        for what in ("conv groups", "conv groups and recurrent state")
        for sets in ("1 index set", "2 index sets")
    ]
    first, *_, last = figure.axes
    assert (first.get_xlabel(), first.get_ylabel()) == ("requests B", "device time of one rollback (µs)")
    lines = {line.get_label(): line.get_xydata().tolist() for line in first.get_lines()}
    assert lines == {
        "one launch": [[1, 4], [16, 4]],
        "one launch per group": [[1, 5], [16, 5]],
        "one array per layer": [[1, 9], [16, 9]],
        "Triton in a CUDA graph": [[1, 6], [16, 6]],
        "limit: copy of the same bytes": [[1, 3], [16, 3]],
    }
    assert not last.get_lines()


def test_a_prefill_is_drawn_by_its_tokens(everything: report.Record) -> None:
    """One prompt of 128 tokens and 16 of 8 are as many; every axis order has a panel."""
    pytest.importorskip("matplotlib")
    points = [point for point in everything["points"] if point["operation"] == "prefill"]
    points[0]["tokens"] = 64
    figure = plots._prefill_figure(points)
    assert [axes.get_title() for axes in figure.axes] == ["time_major, 1×64, 16×8", "channel_major, 1×128, 16×8"]
    for axes, small in zip(figure.axes, (64, 128), strict=True):
        assert (axes.get_xlabel(), axes.get_ylabel()) == (
            "tokens B·T of one call", "device time of one layer's prefill (µs)",
        )  # fmt: skip
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        assert lines["Pallas, continued"] == [[small, 5], [128, 5]]
        assert lines["XLA"] == [[small, 10], [128, 10]]
        assert len(lines) == 5


def test_bytes_against_tokens_are_the_layouts() -> None:
    """K = 4: D·3 columns, D + 2, and D of 8192 channels in 30 layers, two bytes each."""
    pytest.importorskip("matplotlib")
    one = record(row(pallas=timed(2.0)))
    (axes,) = plots._bytes_figure(one).axes
    dense, sliding, inputs = (line.get_xydata() for line in axes.get_lines())
    column = 30 * 8192 * 2 / 2**20
    assert [(x, y) for x, y in dense] == [(d, d * 3 * column) for d in range(1, 17)]
    assert all(math.isclose(y, (d + 2) * column) for d, y in sliding)
    assert [(x, y) for x, y in inputs] == [(d, d * column) for d in range(1, 17)]


def test_report_draws_on_any_machine(tmp_path: pathlib.Path, capsys: Any) -> None:
    """Every plot of both files: of the operation, and of bytes."""
    pytest.importorskip("matplotlib")
    files = [saved(tmp_path / f"{name}.json", record(row(pallas=timed(2.0)))) for name in ("a", "b")]
    assert main(["bench", "--report", *map(str, files), "--plots", str(tmp_path / "new")]) == 0
    assert len(list((tmp_path / "new").glob("*.png"))) == 4
    assert capsys.readouterr().out.count("GPU, driver 1, JAX") == 2


def test_report_names_files_that_are_not_its_own_and_goes_on(tmp_path: pathlib.Path, capsys: Any) -> None:
    """Between two results files one of another tool, one that is missing; a table and plots of both results files."""
    pytest.importorskip("matplotlib")
    first, last = (saved(tmp_path / f"{name}.json", record(row(pallas=timed(2.0)))) for name in ("a", "d"))
    others = [saved(tmp_path / "b.json", {"tool": "compute-sanitizer"}), tmp_path / "c.json"]
    files = map(str, (first, *others, last))
    assert main(["bench", "--report", *files, "--plots", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr()
    named = [line.partition(": expected a file written by bench --out, got ")[0] for line in printed.err.splitlines()]
    assert named == [f"left out: `{path}`" for path in others]
    assert printed.out.count("GPU, driver 1, JAX") == 2
    assert {path.name[0] for path in (tmp_path / "new").glob("*.png")} == {"a", "d"}


def test_update_readme_from_no_results_file_keeps_it(checkout: pathlib.Path, capsys: Any) -> None:
    """The files beside the README do not stand in for those that --report names."""
    readme = checkout / "README.md"
    before = readme.read_text()
    other = saved(checkout / "other.json", {"tool": "compute-sanitizer"})
    assert main(["bench", "--report", str(other), "--update-readme", str(readme)]) == 1
    assert readme.read_text() == before
    assert capsys.readouterr().err.startswith(f"left out: `{other}`: ")


def test_the_committed_results_are_reported_but_for_other_tools(capsys: Any) -> None:
    assert main(["bench", "--report", *map(str, sorted(RESULTS.glob("*.json")))]) == 0
    lines = capsys.readouterr().err.splitlines()
    named = {line.split("`")[1].removeprefix(f"{RESULTS}/") for line in lines}
    own = {path.name for path in report.results_files(RESULTS)} | {"2026-11-30-mesh-wall.json"}
    assert not named & own
    assert {"2026-12-01-sanitizer.json", "2026-11-30-decode-B8.json", "2026-11-30-mutations.json"} <= named
    assert all(line.endswith("`: expected a file written by bench --out, got no `points`.") for line in lines)


def test_plots_without_matplotlib_say_what_to_install(tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any) -> None:
    file = saved(tmp_path / "a.json", record(row(pallas=timed(2.0))))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["bench", "--report", str(file), "--plots", str(tmp_path)]) == 2
    assert "pip install '.[plots]'" in capsys.readouterr().err
