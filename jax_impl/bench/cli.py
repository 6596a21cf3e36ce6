"""`python -m jax_impl bench`: what a commit and a verify cost, beside a device copy of the same bytes."""

import argparse
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_impl.arguments import positive, published_model, up_to
from jax_impl.bench import report
from jax_impl.layout import AXIS_ORDERS, ITEM_BYTES, ConvCacheSpec

OPERATIONS = ("commit", "verify")
BUFFER_ROWS = 256  # rows of the buffer, so that small batches rotate over more data than the cache holds


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("bench", help="time commit and verify against a device copy of the same bytes")
    rows = up_to(BUFFER_ROWS, f"{BUFFER_ROWS}")  # with more requests two of them would share a row
    option = parser.add_argument
    option("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(OPERATIONS)} or all (default)")
    option("--preset", type=published_model, default="Qwen3.5-35B-A3B", help="model geometry (default: %(default)s)")
    option("--tp", type=positive, default=1, help="tensor-parallel ranks (default: %(default)s)")
    option("--slots", type=positive, default=746, help="slots of the pool (default: %(default)s)")
    option("--batch", type=rows, nargs="+", default=[1, 4, 16, 64, 256], help=f"requests per call, 1 to {BUFFER_ROWS}")
    option(
        "--draft-tokens",
        type=positive,
        nargs="+",
        default=list(report.DRAFT_TOKENS),
        help="D, tokens per step",
    )
    option("--axis-order", nargs="+", default=list(AXIS_ORDERS), choices=AXIS_ORDERS)
    option("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="of the state (default: %(default)s)")
    option("--repeats", type=positive, default=20, help="timed runs per point (default: %(default)s)")
    option("--check", action="store_true", help="compare every result with the XLA form first")
    option("--report", type=pathlib.Path, metavar="FILE", help="print a results file as a table and stop")
    option("--out", type=pathlib.Path, help="directory for the JSON file, which is written after every point")
    parser.set_defaults(run=run, parser=parser)


def _refuse_mismatches(args: argparse.Namespace) -> None:
    """Ends the command when arguments that are fine alone do not fit each other, on every device."""
    unknown = [name for name in args.operations if name not in (*OPERATIONS, "all")]
    if unknown:
        args.parser.error(f"argument OPERATION: expected {', '.join(OPERATIONS)} or all, got {', '.join(unknown)}.")
    try:
        args.preset.conv_dim_per_rank(args.tp)
    except ValueError as error:
        args.parser.error(f"argument --tp: {str(error).removeprefix('`tp`: ')}")
    if args.slots < max(args.batch):
        args.parser.error(
            f"argument --slots: expected at least the largest --batch, {max(args.batch)}, got {args.slots}. "
            "Each request has a slot of its own."
        )


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measures and prints; exit code 1 when a comparison with the XLA form finds a difference.

    Raises:
      ValueError: --report names a file that is no results file.
    """
    if args.report:
        print(report.table(args.report))
        return 0
    _refuse_mismatches(args)
    operations = OPERATIONS if "all" in (args.operations or ["all"]) else tuple(dict.fromkeys(args.operations))
    import jax

    from jax_impl.bench import measure

    if jax.default_backend() != "gpu":
        print("bench: no GPU here, correctness only: small sizes, interpreted kernels, no times.")
        checked = [measure.check(measure.small(name, order)) for name in operations for order in AXIS_ORDERS]
        return 0 if all(checked) else 1
    return _measure(args, operations)


def _measure(args: argparse.Namespace, operations: tuple[str, ...]) -> int:
    """Measures every point, and writes what there is after each, so that an interrupted run keeps it."""
    from jax_impl.bench import measure, timing

    environment, points = timing.environment(), []
    record = {"environment": environment, "preset": args.preset.name, "tp": args.tp, "points": points}
    path = None
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            args.parser.error(f"argument --out: expected a directory, got {args.out}: {error.strerror}.")
        path = args.out / report.file_name(environment["date"], operations, args.draft_tokens)
    for name, spec in _geometries(args, operations):
        if args.check and not measure.check(measure.reduced(name, spec)):
            return 1
        for point in measure.measure(name, spec, args.batch, args.repeats):
            points.append(point)
            print(measure.line(point), flush=True)
            if path:
                report.write(path, record)
    if path:
        print(f"wrote {path}")
    return 0


def _geometries(args: argparse.Namespace, operations: tuple[str, ...]) -> Iterator[tuple[str, ConvCacheSpec]]:
    """Operations with the geometries that they are measured on, in the order of the table."""
    for name, order, tokens in itertools.product(operations, args.axis_order, args.draft_tokens):
        yield (
            name,
            args.preset.spec(
                num_slots=args.slots,
                max_requests=BUFFER_ROWS,
                num_draft_tokens=tokens,
                tp=args.tp,
                dtype=args.dtype,
                axis_order=order,
            ),
        )
