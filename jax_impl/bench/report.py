"""A results file as the table that the README prints."""

import json
import pathlib
from typing import Any

HEADER = (
    "| operation | axis order | D | B | Pallas µs | copy µs | Pallas / copy | XLA / Pallas | Triton / Pallas |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(path: pathlib.Path) -> str:
    """The points of one results file as a Markdown table, under a line that says where and when they were taken.

    Raises:
      ValueError: the file is not a results file.
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
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"`{path}`: expected a file written by bench --out, got {error!r}.") from error


def _row(point: dict[str, Any]) -> str:
    times = {name: value["median_us"] for name, value in point.items() if isinstance(value, dict)}
    ours, copy = times["pallas"], min(times["copy_driver"], times["copy_kernel"])
    cells = [
        point["operation"],
        point["axis_order"],
        str(point["num_draft_tokens"]),
        str(point["batch"]),
        f"{ours:.2f}",
        f"{copy:.2f}",
        f"{ours / copy:.2f}",
        f"{times['xla'] / ours:.1f}",
        f"{times['triton'] / ours:.2f}",
    ]
    return f"| {' | '.join(cells)} |"
