"""`python -m jax_impl bench`: what a commit and a verify cost, beside a device copy of the same bytes."""

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

from jax_impl.bench import report
from jax_impl.layout import AXIS_ORDERS, AxisOrder

OPERATIONS = ("commit", "verify")
BUFFER_ROWS = 256  # rows of the buffer, so that small batches rotate over more data than the cache holds


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("bench", help="time commit and verify against a device copy of the same bytes")
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(OPERATIONS)} or all (default)")
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B", help="model geometry (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=746, help="slots of the pool (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="requests per call")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4], help="D, tokens verified per step")
    parser.add_argument("--axis-order", nargs="+", default=list(AXIS_ORDERS), choices=AXIS_ORDERS)
    parser.add_argument("--dtype", default="bfloat16", help="of the state (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs per point (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare every result with the XLA form first")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="print a results file as a table and stop")
    parser.set_defaults(run=run)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON file")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; exit code 1 when --check finds a difference."""
    if arguments.report:
        print(report.table(arguments.report))
        return 0
    import jax

    from jax_impl import presets
    from jax_impl.bench import measure, timing

    wanted = arguments.operations or ["all"]
    operations = OPERATIONS if "all" in wanted else tuple(dict.fromkeys(wanted))
    orders: list[AxisOrder] = arguments.axis_order
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        print(f"bench: expected {', '.join(OPERATIONS)} or all, got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    if jax.default_backend() != "gpu":
        print("bench: no GPU here, correctness only: small sizes, interpreted kernels, no times.")
        checked = [measure.check(measure.small(name, order)) for name in operations for order in AXIS_ORDERS]
        return 0 if all(checked) else 1
    preset = presets.get_preset(arguments.preset)
    rows = []
    cases: Any = itertools.product(operations, orders, arguments.draft_tokens)
    for name, order, tokens in cases:
        spec = preset.spec(
            num_slots=arguments.slots,
            max_requests=BUFFER_ROWS,
            num_draft_tokens=tokens,
            tp=arguments.tp,
            dtype=arguments.dtype,
            axis_order=order,
        )
        if arguments.check and not measure.check(measure.reduced(name, spec)):
            return 1
        for row in measure.measure(name, spec, arguments.batch, arguments.repeats):
            rows.append(row)
            print(measure.line(row), flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {"environment": timing.environment(), "preset": preset.name, "tp": arguments.tp, "points": rows}
        path = arguments.out / f"{record['environment']['date']}-{'-'.join(operations)}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")
    return 0
