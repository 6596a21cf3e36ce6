"""The command line: `python -m jax_impl demo`, `generate`, `plan` and `bench`.

A subcommand is a module with `add_parser(subparsers)` and `run(args) -> exit code`, listed in `SUBCOMMANDS`. All of
them are imported to build the help text, so such a module imports an array framework inside `run` only.
"""

import argparse
import csv
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from jax_impl.arguments import CliError, positive, published_model
from jax_impl.capacity import DESIGNS, DesignRow, capacity, design_table, gib, times
from jax_impl.layout import ITEM_BYTES, ConvCacheSpec
from jax_impl.presets import PRESETS, ConvPart, Preset
from jax_impl.tables import print_table

SUBCOMMANDS = ("jax_impl.demo", "jax_impl.model.cli", "jax_impl.bench.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (the process's arguments by default), runs the subcommand and returns the exit code.

    What the library refuses is one line on stderr and exit code 2: a `ValueError` whose message begins with the name
    of an argument, as all of the library's do. Any other `ValueError` is a bug and keeps its traceback. So is output
    that cannot be written: an `OSError` without a file's name, which is that of a stream.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_impl", description="Exact conv-state rollback for speculative decoding, in JAX."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    add_plan_parser(subparsers)
    args = parser.parse_args(argv)
    if sys.stdout is None:
        print("error: expected an open stdout, got a closed one.", file=sys.stderr)
        return 2
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        if not str(error).startswith("`"):
            raise
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        _discard_output()
        return 141
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        print(f"error: expected output that can be written, got {error.strerror}.", file=sys.stderr)
        return 2


def _discard_output() -> None:
    """Sends what stdout still holds nowhere, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


PLAN_CAPTION = (
    "A slot holds one sequence in the pool, a row one request in the verify buffer, all layers together. "
    "GiB is 2^30 bytes; rows are requests + 1. Saving is dense over sliding; 1× means none: D = 1, or a state of one "
    "column (K = 2). Rows of inputs are K-1 times smaller than dense ones. "
    "Grade B geometry was transcribed: check it before relying on it."
)
PLAN_COLUMNS: tuple[str, ...] = (
    "model",
    "kind",
    "grade",
    "tp",
    "num_layers",
    "conv_dim",
    "width",
    "state_len",
    "num_draft_tokens",
    "dtype",
    "slot_bytes",
    "dense_row_bytes",
    "sliding_row_bytes",
    "inputs_row_bytes",
    "saving",
    "dense_rows_per_gib",
    "sliding_rows_per_gib",
    "inputs_rows_per_gib",
    "max_requests",
    "dense_windows_bytes",
    "sliding_windows_bytes",
    "inputs_windows_bytes",
)


# ---- plan ------------------------------------------------------------------------------------------------------------


def model_or_all(text: str) -> Preset | str:
    """A preset by name, or "all", as an argparse type."""
    return "all" if text.lower() == "all" else published_model(text)


def add_plan_parser(subparsers: Any) -> None:
    """Registers `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="bytes per request, rows per GiB and saving of any geometry",
        description="Prints what the pool and the verify buffer cost per rank, dense, sliding and of inputs, for "
        "published models (all of them by default) or for a geometry given by --num-layers, --conv-dim and --width; "
        "and what other designs keep for a rollback.",
    )
    option = parser.add_argument
    option("--model", type=model_or_all, nargs="+", action="extend", metavar="NAME", help='published names, or "all"')
    option("--num-layers", type=positive, metavar="L", help="layers with a convolution, instead of --model")
    option("--conv-dim", type=positive, metavar="N", help="channels at TP 1, instead of --model")
    option("--width", type=positive, metavar="K", help="kernel width, instead of --model")
    option("--tp", type=positive, nargs="+", default=[1], metavar="N", help="tensor-parallel ranks (1)")
    option("--draft-tokens", type=positive, nargs="+", default=[4], metavar="D", help="tokens verified per step (4)")
    option(
        "--requests", type=positive, default=16, metavar="N", help="requests in flight; the buffer has N + 1 rows (16)"
    )
    option("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="of pool and buffer (%(default)s)")
    option(
        "--state-len", choices=("K-1", "K"), default="K-1", help="columns that the stack keeps per slot (%(default)s)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    form.add_argument("--csv", action="store_true", help="print CSV with a header line and nothing else")
    parser.set_defaults(run=run_plan, parser=parser)


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan; returns the exit code."""
    presets = _presets(args)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for preset in presets or [None]:
        for tp in args.tp:
            try:
                rows.extend(_plan_row(args, preset, tp, num_draft_tokens) for num_draft_tokens in args.draft_tokens)
            except ValueError as error:
                name, _, reason = str(error).partition(": ")
                if presets is not PRESETS:
                    args.parser.error(f"argument --{name.strip('`').replace('_', '-')}: {reason}")
                left_out.append({"model": preset.name if preset else "custom", "tp": tp, "reason": reason})
    if args.json:
        designs = [dataclasses.asdict(one) for one in _designs(rows)]
        print(json.dumps({"rows": rows, "left_out": left_out, "designs": designs}, indent=1))
        return 0
    if args.csv:
        writer = csv.DictWriter(sys.stdout, PLAN_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print_plan(args, rows)
        if rows:
            _print_designs(rows)
    for row in left_out:
        print(f"left out: {row['model']} at TP {row['tp']}: {row['reason']}", file=sys.stderr)
    return 0


def _presets(args: argparse.Namespace) -> Sequence[Preset]:
    """The presets to plan; `PRESETS` itself when all were asked for, nothing when a geometry was given."""
    geometry = {"--num-layers": args.num_layers, "--conv-dim": args.conv_dim, "--width": args.width}
    given = [name for name, value in geometry.items() if value is not None]
    if not given:
        return PRESETS if args.model is None or "all" in args.model else tuple(dict.fromkeys(args.model))
    if args.model is not None:
        args.parser.error(f"argument --model: not allowed with {', '.join(given)}. Give a model or a geometry.")
    missing = [name for name in geometry if name not in given]
    if missing:
        args.parser.error(
            f"argument {given[0]}: a geometry needs {', '.join(geometry)}. "
            f"Add {' and '.join(missing)}, or give --model."
        )
    return ()


def _plan_row(args: argparse.Namespace, preset: Preset | None, tp: int, num_draft_tokens: int) -> dict[str, Any]:
    """One line of the plan; `preset` None is the geometry of the options."""
    width = preset.width if preset else args.width
    spec = ConvCacheSpec(
        num_layers=preset.num_conv_layers if preset else args.num_layers,
        num_slots=1,
        max_requests=args.requests + 1,
        conv_dim=preset.conv_dim_per_rank(tp) if preset else ConvPart("conv_dim", args.conv_dim).channels_per_rank(tp),
        width=width,
        num_draft_tokens=num_draft_tokens,
        dtype=args.dtype,
        state_len=width - (args.state_len == "K-1"),
    )
    size = capacity(spec)
    return {
        "model": preset.name if preset else "custom",
        "kind": preset.kind if preset else "",
        "grade": preset.grade if preset else "",
        "tp": tp,
        "num_layers": spec.num_layers,
        "conv_dim": spec.conv_dim,
        "width": spec.width,
        "state_len": spec.state_columns,
        "num_draft_tokens": spec.num_draft_tokens,
        "dtype": spec.dtype,
        "slot_bytes": size.slot_bytes,
        "dense_row_bytes": size.dense_row_bytes,
        "sliding_row_bytes": size.sliding_row_bytes,
        "inputs_row_bytes": size.inputs_row_bytes,
        "saving": float(size.saving),
        "dense_rows_per_gib": size.dense_rows_per_gib,
        "sliding_rows_per_gib": size.sliding_rows_per_gib,
        "inputs_rows_per_gib": size.inputs_rows_per_gib,
        "max_requests": spec.max_requests,
        "dense_windows_bytes": size.dense_windows_bytes,
        "sliding_windows_bytes": size.sliding_windows_bytes,
        "inputs_windows_bytes": size.inputs_windows_bytes,
    }


def _print_plan(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("model", lambda row: row["model"]),
        ("kind", lambda row: row["kind"]),
        ("grade", lambda row: row["grade"]),
        ("TP", lambda row: f"{row['tp']}"),
        ("layers", lambda row: f"{row['num_layers']}"),
        ("channels", lambda row: f"{row['conv_dim']}"),
        ("K", lambda row: f"{row['width']}"),
        ("D", lambda row: f"{row['num_draft_tokens']}"),
        ("bytes/slot", lambda row: f"{row['slot_bytes']:,}"),
        ("dense bytes/row", lambda row: f"{row['dense_row_bytes']:,}"),
        ("sliding bytes/row", lambda row: f"{row['sliding_row_bytes']:,}"),
        ("inputs bytes/row", lambda row: f"{row['inputs_row_bytes']:,}"),
        ("saving", lambda row: times(Fraction(row["dense_row_bytes"], row["sliding_row_bytes"]))),
        ("dense rows/GiB", lambda row: f"{row['dense_rows_per_gib']:,}"),
        ("sliding rows/GiB", lambda row: f"{row['sliding_rows_per_gib']:,}"),
        ("inputs rows/GiB", lambda row: f"{row['inputs_rows_per_gib']:,}"),
        ("dense GiB", lambda row: gib(row["dense_windows_bytes"])),
        ("sliding GiB", lambda row: gib(row["sliding_windows_bytes"])),
        ("inputs GiB", lambda row: gib(row["inputs_windows_bytes"])),
    )
    print_table(
        f"Per rank, {args.dtype}, verify buffer of {args.requests + 1} rows",
        [heading for heading, _ in columns],
        [[text(row) for _, text in columns] for row in rows],
        caption=PLAN_CAPTION,
    )


def _designs(rows: Sequence[dict[str, Any]]) -> list[DesignRow]:
    """Columns by design for every width, state and number of draft tokens that was planned, each once."""
    planned = dict.fromkeys((row["width"], row["state_len"]) for row in rows)
    return [one for of in planned for one in design_table(of[0], _planned_tokens(rows), of[1])]


def _planned_tokens(rows: Sequence[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["num_draft_tokens"] for row in rows))


def _print_designs(rows: Sequence[dict[str, Any]]) -> None:
    """The table of `_designs`: bytes where one geometry was planned, else columns per channel."""
    geometries = {(row["num_layers"], row["conv_dim"]) for row in rows}
    scale = 1
    if len(geometries) == 1:
        scale = rows[0]["slot_bytes"] // rows[0]["state_len"]
    found: dict[tuple[str, int, int], list[str]] = {}
    for one in _designs(rows):
        cells = found.setdefault((one.design, one.width, one.state_len), [])
        cells.append(f"{one.slot_columns * scale:,} + {one.row_columns * scale:,}")
    formulas = {design.name: f"{design.slot} + {design.row}" for design in DESIGNS}
    unit = "Bytes, all layers together," if scale > 1 else "Columns of every channel,"
    print_table(
        f"{unit} by design: of a sequence in the pool + of a request in flight",
        ("design", "K", "state", "columns", *(f"D = {tokens}" for tokens in _planned_tokens(rows))),
        [(name, str(k), str(s), formulas[name], *cells) for (name, k, s), cells in found.items()],
        caption="; ".join(f"{design.name}: {design.source}" for design in DESIGNS)
        + ". What is in the pool is there for every sequence that is kept, in flight or not.",
    )


if __name__ == "__main__":
    sys.exit(main())
