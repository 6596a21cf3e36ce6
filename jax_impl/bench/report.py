"""A results file: its name, how it is written, and the table that the README prints of it."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

HEADER = (
    "| operation | axis order | D | B | Pallas µs | copy µs | Pallas / copy | XLA / Pallas | Triton / Pallas |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
NOT_MEASURED = "–"
DRAFT_TOKENS = (4,)  # what bench measures unless told; other numbers are part of the file's name


def file_name(date: str, operations: Sequence[str], draft_tokens: Sequence[int]) -> str:
    """The name of a results file.

    >>> file_name("2026-11-29", ["commit", "verify"], [4]), file_name("2026-11-29", ["verify"], [2, 8])
    ('2026-11-29-commit-verify.json', '2026-11-29-verify-D2-8.json')
    """
    tokens = "" if tuple(draft_tokens) == DRAFT_TOKENS else f"-D{'-'.join(map(str, draft_tokens))}"
    return f"{date}-{'-'.join(operations)}{tokens}.json"


def write(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a results file, whole or not at all: whoever reads `path` sees the old content or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def table(path: pathlib.Path) -> str:
    """The points of one results file as a Markdown table, under a line that says where and when they were taken.

    Copies and Triton are measured where torch is installed; their cells hold a dash elsewhere.

    Raises:
      ValueError: the file cannot be read, or is not a results file.
    """
    try:
        record = json.loads(path.read_text())
        environment, points = record["environment"], record["points"]
        versions = environment["versions"]
        title = (
            f"{environment['device']}, driver {environment['driver']}, JAX {versions['jax']}, "
            f"Triton {versions.get('triton', 'none')}, {environment['date']}; {record['preset']} at TP {record['tp']}: "
            f"L={points[0]['num_layers']}, conv_dim={points[0]['conv_dim']}, K={points[0]['width']}, "
            f"{points[0]['dtype']}, C={points[0]['num_slots']}."
        )
        return "\n".join([title, "", HEADER, *map(_row, points)])
    except OSError as error:
        raise ValueError(f"`{path}`: expected a file written by bench --out, got {error.strerror}.") from error
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"`{path}`: expected a file written by bench --out, got {error!r}.") from error


def _row(point: dict[str, Any]) -> str:
    times = {name: value["median_us"] for name, value in point.items() if isinstance(value, dict)}
    ours, triton = times["pallas"], times.get("triton")
    copy = min((times[name] for name in ("copy_driver", "copy_kernel") if name in times), default=None)
    cells = [
        point["operation"],
        point["axis_order"],
        str(point["num_draft_tokens"]),
        str(point["batch"]),
        f"{ours:.2f}",
        NOT_MEASURED if copy is None else f"{copy:.2f}",
        NOT_MEASURED if copy is None else f"{ours / copy:.2f}",
        f"{times['xla'] / ours:.1f}",
        NOT_MEASURED if triton is None else f"{triton / ours:.2f}",
    ]
    return f"| {' | '.join(cells)} |"
