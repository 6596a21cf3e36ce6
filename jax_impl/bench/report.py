"""A results file: its name, how it is written and read, and the tables that the README prints of it."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_impl.bench import form
from jax_impl.bench.form import MESH, OPERATIONS
from jax_impl.layout import AXIS_ORDERS

NOT_MEASURED = "–"
DRAFT_TOKENS = (4,)  # what bench measures unless told; other numbers are part of the file's name
PRESET = "Qwen3.5-35B-A3B"  # likewise, at TP 1
COPIES = ("copy_driver", "copy_kernel")
MARKERS = ("<!-- bench table -->", "<!-- end of bench table -->")

# Names that bench gives to results files; others in the same folder are not its own.
_OPERATION = "|".join((*OPERATIONS, MESH))
_NAME = re.compile(
    rf"\d{{4}}-\d\d-\d\d-(all|({_OPERATION})(-({_OPERATION}))*)(-D\d+(-\d+)*)?"
    r"(-[A-Za-z][\w.-]*-tp\d+)?(-no-command-buffers)?(\.\d+)?\.json"
)

Row = dict[str, Any]
Record = dict[str, Any]


# ---- the file --------------------------------------------------------------------------------------------------------


def file_name(
    date: str,
    operations: Sequence[str],
    draft_tokens: Sequence[int] = DRAFT_TOKENS,
    *,
    preset: str = PRESET,
    tp: int = 1,
    command_buffers: bool = True,
) -> str:
    """The name of a results file: date, operations, and what is not the default.

    >>> file_name("2026-11-29", ["commit", "verify"]), file_name("2026-11-29", ["verify"], [2, 8])
    ('2026-11-29-commit-verify.json', '2026-11-29-verify-D2-8.json')
    >>> file_name("2026-11-29", OPERATIONS, preset="Kimi-K3", tp=8, command_buffers=False)
    '2026-11-29-all-Kimi-K3-tp8-no-command-buffers.json'
    """
    parts = [date, "all" if tuple(operations) == OPERATIONS else "-".join(operations)]
    if tuple(draft_tokens) != DRAFT_TOKENS:
        parts.append(f"D{'-'.join(map(str, draft_tokens))}")
    if (preset, tp) != (PRESET, 1):
        parts.append(f"{preset}-tp{tp}")
    if not command_buffers:
        parts.append("no-command-buffers")
    return f"{'-'.join(parts)}.json"


def free_path(folder: pathlib.Path, name: str) -> pathlib.Path:
    """`name` in `folder`, numbered when a file of an earlier run has it: no run overwrites another's."""
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{name.removesuffix('.json')}.{number}.json"
    return path


def write(path: pathlib.Path, record: Record) -> None:
    """Writes a results file, whole or not at all: whoever reads `path` sees the old content or the new."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file by `text`, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read(path: pathlib.Path) -> Record:
    """A results file.

    Raises:
      ValueError: the file cannot be read, or is not a results file.
    """
    try:
        record = form.load(path.read_text())
        form.require(record)
        return record
    except OSError as error:
        found = error.strerror
    except UnicodeDecodeError as error:
        found = f"no text: byte {error.start}"
    except ValueError as error:
        found = error
    raise ValueError(f"`{path}`: expected a file written by bench --out, got {found}.")


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(record: Record, keep: Callable[[Row], bool] = lambda row: True) -> str:
    """A results file as Markdown: a table for each operation, under a line that says where and when it was taken.

    Of the points that `keep` accepts. What was not measured, copies and Triton where torch is not installed for
    instance, is a dash.
    """
    points = [row for row in record["points"] if keep(row)]
    parts = [_title(record, points)]
    for operation in (*OPERATIONS, MESH):
        rows = [row for row in points if row["operation"] == operation]
        if rows:
            columns = _COLUMNS[operation]
            lines = [list(columns), ["---"] * len(columns)]
            lines += [[_cell(make, row) for make in columns.values()] for row in rows]
            parts += _captions(rows)
            parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    failed = [f"{_what(row)}: {name}" for row in points for name in row.get("errors", {})]
    if failed:
        parts.append(f"Failed: {'; '.join(failed)}.")
    return "\n\n".join(parts)


def _title(record: Record, points: Sequence[Row]) -> str:
    """Where and when a record was taken, and the geometry of those of its points that have none of their own."""
    environment, geometry = record["environment"], record.get("geometry") or record["points"][0]
    versions = environment["versions"]
    buffers = "" if record.get("command_buffers", True) else ", without command buffers"
    taken = (
        f"{environment['device']}, driver {environment['driver']}, JAX {versions['jax']}, "
        f"Triton {versions.get('triton', 'none')}, {environment['date']}{buffers}"
    )
    of_model = f"{record['preset']} at TP {record['tp']}: {_sizes(geometry)}"
    return f"{taken}." if points and all("model" in row for row in points) else f"{taken}; {of_model}."


def _sizes(of: Row, groups: int = 1) -> str:
    channels = f"{groups}×{of['conv_dim'] // groups}" if groups > 1 else of["conv_dim"]
    return f"L={of['num_layers']}, conv_dim={channels}, K={of['width']}, {of['dtype']}, C={of['num_slots']}"


def _captions(rows: Sequence[Row]) -> list[str]:
    """A line above a table whose geometry is its own, or whose numbers need telling apart."""
    explained = _EXPLAINED.get(rows[0]["operation"])
    if explained:
        times = [value for row in rows for value in row.values() if isinstance(value, dict)]
        wall_only = any(isinstance(of.get("wall"), dict) for of in times) and not any("median_us" in of for of in times)
        device = "No times on the device were measured." if wall_only else _ON_DEVICE
        chained = _CHAINED if any("one_chained" in row for row in rows) else ""
        return [explained.format(arrays=2 * rows[0]["num_layers"] + 6, device=device, chained=chained)]
    of = next((row for row in rows if "model" in row), None)
    if of is None:
        return []
    state = "×".join(map(str, of["state"]))
    return [f"{of['operation'].capitalize()} of {of['model']}: {_sizes(of, of['groups'])}, state {state} in float32."]


_ON_DEVICE = "On the device: steps follow each other in one program."
_CHAINED = " Chained: the next layer's x is y of this one, and a call passes 8."
_EXPLAINED = {
    "step": "A whole step. {device} Wall: one call of a queue of jitted calls. Unrolled, a call passes {arrays} "
    "arrays: x and y of every layer and six others. Chained, the next layer's x is y of this one, and a call passes 8, "
    "as a step inside a larger program would; x is then in the cache, so this device time is not to be compared with "
    "the copies.",
    "drafts": "A step is a verify in every layer and, unless it resumes, one commit. Sliding: rows of D+K-2 columns. "
    "Inputs: rows of the D inputs. Kept: the caller's own x is the buffer, and verify writes y alone; kept_tree: the "
    "same with the links of a tree, here a chain's. Resumed: no commit, the next verify finds its history itself, in "
    "the row of the step before (sliding_resumed) or in slot and inputs, and then it moves the slot on (kept_resumed). "
    "Columns: what one layer reads and writes of a request. Times on the device; the last column is over sliding's, a "
    "step's over that of sliding with its commit. With one request all layers together fit into the cache, for the "
    "copies too.",
    MESH: "A whole step, unrolled. One device: the work of one rank; all devices: that of all ranks. Step ratio: the "
    "latter over the former. Throughput: requests of all data ranks in the time that one device needs for those of "
    "one. {device} Wall: one call of a queue of jitted calls, each of which passes {arrays} arrays to every device."
    "{chained}",
}


def variant(row: Row) -> str:
    """What tells the points of one operation, axis order, D and B apart, where that is not all."""
    if "recurrent" in row:
        return f" {_takes_along(row)}" + (", tracked" if row["track"] else "")
    if "design" in row:
        return f" {row['of']} {row['design']}"
    if row["operation"] == MESH:
        return f" data={row['data']} tensor={row['tensor']}"
    return f" T={row['tokens']}" if "tokens" in row else ""


def _takes_along(row: Row) -> str:
    return "conv, recurrent" if row["recurrent"] else "conv"


def _what(row: Row) -> str:
    return f"{row['operation']} {row['axis_order']} D={row['num_draft_tokens']} B={row['batch']}{variant(row)}"


def _cell(make: Callable[[Row], Any], row: Row) -> str:
    """What a column says of a row; a dash when a number that it needs is not there."""
    try:
        return str(make(row))
    except (LookupError, ZeroDivisionError):
        return NOT_MEASURED


def copy_us(row: Row, of: Sequence[str] = ("median_us",)) -> float:
    """The faster copy of a row; `of` leads to the time inside a subject. LookupError when none was measured."""
    times = [at(row, name, *of) for name in COPIES if name in row]
    if not times:
        raise LookupError("copy_driver, copy_kernel")
    return min(times)


def at(row: Row, *names: str) -> Any:
    """`row[first][second]…`; LookupError where there is none, a field that holds None included."""
    value: Any = row
    for name in names:
        if not isinstance(value, dict):
            raise LookupError(name)
        value = value[name]
    return value


def _ratio(row: Row, one: str, other: str) -> float:
    """Device times of two subjects. LookupError when one was not measured."""
    return at(row, one, "median_us") / at(row, other, "median_us")


_WALL = ("wall", "median_us")
# Kinds of times of a step on a mesh: what the subjects "one" and "all" have behind their names, and where the time is.
MESH_TIMES = {"device": ("", ("median_us",)), "wall": ("", _WALL), "chained": ("_chained", _WALL)}


def _mesh_columns(title: str, kind: str) -> dict[str, Callable[[Row], str]]:
    """Both times of a kind, and their ratio in two ways."""
    form, path = MESH_TIMES[kind]
    return {
        f"one device{title} µs": lambda row: f"{at(row, f'one{form}', *path):.1f}",
        f"all devices{title} µs": lambda row: f"{at(row, f'all{form}', *path):.1f}",
        f"step ratio{title}": lambda row: f"{at(row, 'step_ratio', kind):.3f}",
        f"throughput{title}": lambda row: f"{at(row, 'throughput', kind):.2f}×",
    }


_TIMED = {
    "operation": lambda row: row["operation"],
    "axis order": lambda row: row["axis_order"],
    "D": lambda row: row["num_draft_tokens"],
    "B": lambda row: row["batch"],
    "Pallas µs": lambda row: f"{at(row, 'pallas', 'median_us'):.2f}",
    "copy µs": lambda row: f"{copy_us(row):.2f}",
    "of the copy's bandwidth": lambda row: f"{copy_us(row) / at(row, 'pallas', 'median_us'):.1%}",
    "XLA / Pallas": lambda row: f"{_ratio(row, 'xla', 'pallas'):.1f}",
    "Triton / Pallas": lambda row: f"{_ratio(row, 'triton', 'pallas'):.2f}",
    "kernel µs": lambda row: f"{at(row, 'pallas', 'kernel', 'median_us'):.2f}",
}
_COLUMNS: dict[str, dict[str, Callable[[Row], Any]]] = {
    "commit": _TIMED,
    "verify": _TIMED,
    "step": {
        "whole step": lambda row: row["axis_order"],
        "D": lambda row: row["num_draft_tokens"],
        "B": lambda row: row["batch"],
        "unrolled, on the device µs": lambda row: f"{at(row, 'pallas_unrolled', 'median_us'):.1f}",
        "copies µs": lambda row: f"{copy_us(row):.1f}",
        "unrolled / copies": lambda row: f"{at(row, 'pallas_unrolled', 'median_us') / copy_us(row):.3f}",
        "Triton graph µs": lambda row: f"{at(row, 'triton', 'median_us'):.1f}",
        "unrolled / Triton": lambda row: f"{_ratio(row, 'pallas_unrolled', 'triton'):.2f}",
        "unrolled, wall µs": lambda row: f"{at(row, 'pallas_unrolled', *_WALL):.1f}",
        "chained, wall µs": lambda row: f"{at(row, 'pallas_chained', *_WALL):.1f}",
        "chained, on the device µs": lambda row: f"{at(row, 'pallas_chained', 'median_us'):.1f}",
        "scan, wall µs": lambda row: f"{at(row, 'pallas_scan', *_WALL):.1f}",
        "XLA scan, wall µs": lambda row: f"{at(row, 'xla_scan', *_WALL):.1f}",
        "one step alone µs": lambda row: f"{at(row, 'pallas_unrolled', 'latency', 'median_us'):.1f}",
        "launches unrolled, scan": lambda row: (
            f"{at(row, 'pallas_unrolled', 'launches'):g}, {at(row, 'pallas_scan', 'launches'):g}"
        ),
    },
    "rollback": {
        "rollback of": lambda row: _takes_along(row),
        "axis order": lambda row: row["axis_order"],
        "sets": lambda row: 2 if row["track"] else 1,
        "B": lambda row: row["batch"],
        "one launch µs": lambda row: f"{at(row, 'pallas', 'median_us'):.2f}",
        "copy µs": lambda row: f"{copy_us(row):.2f}",
        "of the copy's bandwidth": lambda row: f"{copy_us(row) / at(row, 'pallas', 'median_us'):.1%}",
        "one launch / one per group": lambda row: f"{_ratio(row, 'pallas', 'launch_per_group'):.2f}",
        "one array per layer / one launch": lambda row: f"{_ratio(row, 'lists_per_layer', 'pallas'):.2f}",
        "XLA / one launch": lambda row: f"{_ratio(row, 'xla', 'pallas'):.1f}",
        "Triton / one launch": lambda row: f"{_ratio(row, 'triton', 'pallas'):.2f}",
    },
    "prefill": {
        "prefill": lambda row: row["axis_order"],
        "B": lambda row: row["batch"],
        "T": lambda row: row["tokens"],
        "Pallas µs": lambda row: f"{at(row, 'pallas', 'median_us'):.2f}",
        "copy µs": lambda row: f"{copy_us(row):.2f}",
        "of the copy's bandwidth": lambda row: f"{copy_us(row) / at(row, 'pallas', 'median_us'):.1%}",
        "XLA / Pallas": lambda row: f"{_ratio(row, 'xla', 'pallas'):.1f}",
        "continued µs": lambda row: f"{at(row, 'pallas_continued', 'median_us'):.2f}",
        "XLA / Pallas, continued": lambda row: f"{_ratio(row, 'xla_continued', 'pallas_continued'):.1f}",
    },
    "drafts": {
        "of": lambda row: row["of"],
        "design": lambda row: row["design"],
        "axis order": lambda row: row["axis_order"],
        "D": lambda row: row["num_draft_tokens"],
        "B": lambda row: row["batch"],
        "columns moved": lambda row: row["columns"],
        "Pallas µs": lambda row: f"{at(row, 'pallas', 'median_us'):.2f}",
        "copy µs": lambda row: f"{copy_us(row):.2f}",
        "of the copy's bandwidth": lambda row: f"{copy_us(row) / at(row, 'pallas', 'median_us'):.1%}",
        "design / sliding": lambda row: f"{row['sliding_ratio']:.3f}",
    },
    "compile": {
        "program": lambda row: row["form"] if row["form"] in ("unrolled", "scan") else f"commit: {row['form']}",
        "axis order": lambda row: row["axis_order"],
        "L": lambda row: row["num_layers"],
        "command buffers": lambda row: "yes" if row["command_buffers"] else "no",
        "trace s": lambda row: f"{row['trace_s']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.2f}",
        "launches": lambda row: f"{row['launches']:g}",
        "temporary, of the pool": lambda row: f"{row['temp_bytes'] / row['state_bytes']:.2%}",
        "pool copies": lambda row: ", ".join(row["pool_copies"]) or "none",
    },
    "scaling": {
        "operation": lambda row: row["of"],
        "axis order": lambda row: row["axis_order"],
        "B": lambda row: row["batch"],
        "conv_dim": lambda row: row["conv_dim"],
        "slots": lambda row: row["num_slots"],
        "Pallas µs": lambda row: f"{at(row, 'pallas', 'median_us'):.2f}",
        "copy µs": lambda row: f"{copy_us(row):.2f}",
        "of the copy's bandwidth": lambda row: f"{copy_us(row) / at(row, 'pallas', 'median_us'):.1%}",
    },
    MESH: {
        "whole step on a mesh": lambda row: row["axis_order"],
        "data": lambda row: row["data"],
        "tensor": lambda row: row["tensor"],
        "D": lambda row: row["num_draft_tokens"],
        "B per data rank": lambda row: row["batch"],
        **_mesh_columns("", "device"),
        **_mesh_columns(", wall", "wall"),
        **_mesh_columns(", chained, wall", "chained"),
    },
}


# ---- the README ------------------------------------------------------------------------------------------------------


def results_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The results files in a folder, by name."""
    return sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.name))


def in_readme(row: Row) -> bool:
    """Points that the README shows: D in `DRAFT_TOKENS`, the default axis order's programs, nothing of scaling."""
    if row["operation"] == "compile" and row["axis_order"] != AXIS_ORDERS[0]:
        return False
    return row["operation"] != "scaling" and row["num_draft_tokens"] in DRAFT_TOKENS


def newest(records: Iterable[Record]) -> Iterator[tuple[Record, Callable[[Row], bool]]]:
    """Each record that is the newest with some operation, and which of its points those are, of those in the README.

    Models, ranks and runs without command buffers count apart; an operation with a model of its own is one of that.
    """

    def kinds(record: Record) -> set[tuple[Any, ...]]:
        model, buffers = (record["preset"], record["tp"]), record.get("command_buffers", True)
        return {(row["operation"], row.get("model", model), buffers) for row in record["points"] if in_readme(row)}

    def when(record: Record) -> tuple[str, str]:
        return record["environment"]["date"], record["environment"].get("time", "")

    ordered = sorted(records, key=when)
    chosen = {kind: record for record in ordered for kind in kinds(record)}  # the last one stays
    for record in ordered:
        operations = {kind[0] for kind, one in chosen.items() if one is record}
        if operations:
            yield record, lambda row, operations=operations: row["operation"] in operations and in_readme(row)


def readme_block(paths: Iterable[pathlib.Path]) -> str:
    """What stands between the README's markers: the newest measurement of every operation, file by file.

    Raises:
      ValueError: a file is not a results file, or there is none.
    """
    blocks = [tables(record, keep) for record, keep in newest(map(read, paths))]
    if not blocks:
        raise ValueError("`paths`: expected results files written by bench --out, got none.")
    return "\n\n".join(blocks)


def update_readme(readme: pathlib.Path, paths: Iterable[pathlib.Path]) -> None:
    """Writes `readme_block` between the markers of a README.

    Raises:
      ValueError: the README cannot be read or has not one block of markers, or a file is not a results file.
    """
    try:
        text = readme.read_text()
    except OSError as error:
        raise ValueError(f"`{readme}`: expected a README with a block {MARKERS[0]}, got {error.strerror}.") from error
    head, *rest = text.split(MARKERS[0])
    _, *tail = rest[0].split(MARKERS[1]) if len(rest) == 1 else ("",)
    if len(tail) != 1:
        raise ValueError(f"`{readme}`: expected one {MARKERS[0]} and one {MARKERS[1]} after it, got others.")
    write_text(readme, f"{head}{MARKERS[0]}\n{readme_block(paths)}\n{MARKERS[1]}{tail[0]}")
