"""`python -m jax_impl bench`: what the operations and a whole step cost, beside a device copy of the same bytes."""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jax_impl.arguments import CliError, positive, published_model, up_to
from jax_impl.bench import form, plots, report
from jax_impl.bench.form import OPERATIONS
from jax_impl.layout import AXIS_ORDERS, ITEM_BYTES, AxisOrder, ConvCacheSpec

BUFFER_ROWS = 256  # rows of the buffer, so that small batches rotate over more data than the cache holds
README = pathlib.Path("README.md")
RESULTS = pathlib.Path("notebooks", "results")  # beside the README
HOST_DEVICES = "--xla_force_host_platform_device_count"
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="time the operations and a whole step against a device copy of the same bytes",
        description="On a GPU, times the operations and writes JSON and plots; on the CPU, compares results only. "
        "commit: all layers in one launch. verify: one layer. step: a verify in every layer and one commit in one jit. "
        "rollback: the conv groups of a KDA model with and without its recurrent state, in one launch and in several; "
        "its geometry, slots, D and batches are fixed. prefill: one layer over whole prompts of fixed sizes. "
        "drafts: verify and whole step by what the buffer holds, with a commit and with steps that resume; its batches "
        "are fixed. "
        "compile: seconds, temporary memory and copies of the compiled programs. scaling: commit and verify over "
        "conv_dim and slots.",
    )
    rows = up_to(BUFFER_ROWS, f"{BUFFER_ROWS}")  # with more requests two of them would share a row
    option = parser.add_argument
    option("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(OPERATIONS)} or all (default)")
    option("--preset", "--model", type=published_model, default=report.PRESET, help="geometry (default: %(default)s)")
    option("--tp", type=positive, default=1, help="tensor-parallel ranks (default: %(default)s)")
    option("--slots", type=positive, default=746, help="slots of the pool (default: %(default)s)")
    option("--batch", type=rows, nargs="+", default=[1, 4, 16, 64, 256], help=f"requests per call, 1 to {BUFFER_ROWS}")
    option("--draft-tokens", type=positive, nargs="+", default=list(report.DRAFT_TOKENS), help="D, tokens per step")
    option("--axis-order", nargs="+", default=list(AXIS_ORDERS), choices=AXIS_ORDERS)
    option("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="of the state (default: %(default)s)")
    option("--accept", choices=("all", "random"), help="accepted tokens (default: all for step, random elsewhere)")
    option("--repeats", type=positive, help="timed runs per subject (default: 20, fewer where a call is long)")
    option("--subjects", nargs="+", default=[], choices=form.SUBJECTS, help="time these only (default: all)")
    option("--no-kernel-times", action="store_true", help="do not ask CUPTI, where another profiler is attached")
    option("--no-command-buffers", action="store_true", help="tell XLA to launch every kernel on its own")
    option(
        "--mesh", type=mesh_sizes, nargs="+", metavar="data=N,tensor=M",
        help="time a whole step on N × M devices beside the work of one of them on one device; --slots and --batch are "
        "those of one data rank, channels are divided over the tensor ranks",
    )  # fmt: skip
    option("--check", action="store_true", help="compare every result with the XLA form first")
    option(
        "--out", type=pathlib.Path, help="directory for the JSON file, which is written after every point, and plots"
    )
    of_files = parser.add_argument_group("from files, on any machine")
    of_files.add_argument(
        "--report",
        type=pathlib.Path,
        nargs="+",
        metavar="FILE",
        help="print results files as tables and stop; files that are none are named and left out",
    )
    of_files.add_argument("--plots", type=pathlib.Path, metavar="DIR", help="with --report, draw them there as well")
    of_files.add_argument(
        "--update-readme",
        type=pathlib.Path,
        nargs="?",
        const=README,
        metavar="README",
        help=f"write its table from the files given by --report, or from {RESULTS} beside it, and stop",
    )
    parser.set_defaults(run=run, parser=parser)


def mesh_sizes(text: str) -> tuple[int, int]:
    """Ranks of the axes data and tensor, as an argparse type; an axis that is not named has one."""
    sizes = {"data": 1, "tensor": 1}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in sizes or not number.isdecimal() or not 1 <= int(number) <= 4096:
            raise argparse.ArgumentTypeError(f"expected data=N,tensor=M with numbers from 1 to 4096, got {text!r}.")
        sizes[name] = int(number)
    return sizes["data"], sizes["tensor"]


def _refuse_mismatches(args: argparse.Namespace) -> None:
    """Ends the command when arguments that are fine alone do not fit each other, on every device."""
    unknown = [name for name in args.operations if name not in (*OPERATIONS, "all")]
    if unknown:
        args.parser.error(f"argument OPERATION: expected {', '.join(OPERATIONS)} or all, got {', '.join(unknown)}.")
    if args.plots:
        args.parser.error("argument --plots: expected with --report. A run draws its plots beside its file, see --out.")
    try:
        args.preset.conv_dim_per_rank(args.tp)
    except ValueError as error:
        args.parser.error(f"argument --tp: {str(error).removeprefix('`tp`: ')}")
    if args.mesh and (args.operations or args.tp != 1 or args.subjects):
        args.parser.error("argument --mesh: expected without OPERATION, --tp and --subjects. It times a whole step.")
    for _, tensor in args.mesh or ():
        try:
            args.preset.conv_dim_per_rank(tensor)
        except ValueError as error:
            args.parser.error(f"argument --mesh: {str(error).replace('`tp`', 'tensor', 1)}")
    if args.slots < max(args.batch):
        args.parser.error(
            f"argument --slots: expected at least the largest --batch, {max(args.batch)}, got {args.slots}. "
            "Each request has a slot of its own."
        )


# ---- from files ------------------------------------------------------------------------------------------------------


def _from_files(args: argparse.Namespace) -> int:
    """Prints, draws and rewrites from results files; nothing is measured. 1 when --report names none."""
    given = dict(_results_among(args.report or []))
    if args.report and not given:
        return 1
    if given and not args.update_readme:
        print("\n\n".join(map(report.tables, given.values())))
    if args.plots and given:
        _make_folder(args, "--plots", args.plots)
        for path, record in given.items():
            _draw(record, path.stem, args.plots)
    if args.update_readme:
        paths = given or report.results_files(args.update_readme.parent / RESULTS)
        report.update_readme(args.update_readme, paths)
        print(f"wrote {args.update_readme} from {len(paths)} file{'s' * (len(paths) != 1)}")
    return 0


def _results_among(paths: Sequence[pathlib.Path]) -> Iterator[tuple[pathlib.Path, report.Record]]:
    """Those that `bench --out` wrote; a folder of results has other files too, and each is named on stderr."""
    for path in paths:
        try:
            yield path, report.read(path)
        except ValueError as error:
            print(f"left out: {' '.join(str(error).splitlines())}", file=sys.stderr)


def _draw(record: report.Record, stem: str, folder: pathlib.Path) -> None:
    """Plots beside each other in a folder.

    Raises:
      CliError: matplotlib is not installed.
    """
    try:
        paths = plots.draw(record, stem, folder)
    except ImportError as error:
        raise CliError(f"plots need `matplotlib`: {error}. pip install '.[plots]'") from error
    for path in paths:
        print(f"wrote {path}")


def _make_folder(args: argparse.Namespace, option: str, folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        args.parser.error(f"argument {option}: expected a directory, got {folder}: {error.strerror}.")


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measures and prints; exit code 1 when a comparison differs, a point fails, or --report has no results file."""
    if args.update_readme or args.report:
        return _from_files(args)
    _refuse_mismatches(args)
    operations = OPERATIONS if "all" in (args.operations or ["all"]) else tuple(dict.fromkeys(args.operations))
    _set_flags(args)
    import jax

    needed = max((data * tensor for data, tensor in args.mesh or ()), default=1)
    if needed > len(jax.devices()):
        args.parser.error(f"argument --mesh: expected at most {len(jax.devices())} devices, got {needed}.")
    if jax.default_backend() == "gpu":
        return _measure(args, ("mesh",) if args.mesh else operations)
    if args.out:
        args.parser.error(
            f"argument --out: expected a GPU, got platform {jax.default_backend()}. "
            "Without one bench compares results and takes no times, so there is nothing to write."
        )
    from jax_impl.bench import comparing

    if args.mesh:
        from jax_impl.bench import mesh

        print("bench: no GPU here, correctness only: small sizes, the XLA form on host devices, no times.")
        same = [mesh.small(sizes, order) for sizes in args.mesh for order in AXIS_ORDERS]
        return 0 if all(same) else 1
    print("bench: no GPU here, correctness only: small sizes, interpreted kernels, no times.")
    points = [point for name in operations for order in AXIS_ORDERS for point in comparing.small(name, order)]
    fine = [comparing.check(point) for point in points]
    return 0 if all(fine) else 1


def _set_flags(args: argparse.Namespace) -> None:
    """Environment variables that XLA reads once, when its first device is opened.

    Raises:
      CliError: JAX has been imported by somebody else, who may have opened it.
    """
    if args.no_command_buffers:
        if "jax" in sys.modules:
            raise CliError("`--no-command-buffers` needs a process in which JAX is not imported yet.")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_COMMAND_BUFFERS}".strip()
    if args.mesh and HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        devices = max(data * tensor for data, tensor in args.mesh)  # of the CPU, where there is nothing else
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES}={devices}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX and torch share the GPU's memory


def _measure(args: argparse.Namespace, operations: tuple[str, ...]) -> int:
    """Measures every point, and writes what there is after each, so that an interrupted run keeps it."""
    from jax_impl.bench import measure, timing

    environment, points = timing.environment(), []
    command_buffers = NO_COMMAND_BUFFERS not in environment["xla_flags"].split()
    record = {
        "environment": environment,
        "preset": args.preset.name,
        "tp": args.tp,
        "command_buffers": command_buffers,
        "geometry": measure.geometry(_spec(args, args.axis_order[0], args.draft_tokens[0])),
        "points": points,
    }
    path = None
    if args.out:
        _make_folder(args, "--out", args.out)
        variant = {"preset": args.preset.name, "tp": args.tp, "command_buffers": command_buffers}
        name = report.file_name(environment["date"], operations, args.draft_tokens, **variant)
        path = report.free_path(args.out, name)
    options = measure.Options(
        args.batch,
        args.repeats,
        args.accept,
        check=args.check,
        kernel_times=not args.no_kernel_times,
        only=tuple(args.subjects),
    )
    for name, spec in _geometries(args, operations):
        measured = _on_meshes(args, spec, options) if name == "mesh" else measure.measure(name, spec, options)
        for row in measured:
            points.append(row)
            print(measure.line(row), flush=True)
            if path:
                report.write(path, record)
    if path:
        print(f"wrote {path}")
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(record, path.stem, path.parent)
        else:
            print(f"no plots, matplotlib is not installed: bench --report {path} --plots DIR draws them elsewhere")
    return 1 if any("errors" in row for row in points) else 0


def _on_meshes(args: argparse.Namespace, whole: ConvCacheSpec, options: Any) -> Iterator[report.Row]:
    """Rows of every mesh; a rank has its share of the channels of `whole`, and its slots and rows."""
    from jax_impl.bench import measure, mesh

    repeats, accept = options.repeats or measure.REPEATS["step"], options.accept or "all"
    for sizes in args.mesh:
        local = dataclasses.replace(whole, conv_dim=args.preset.conv_dim_per_rank(sizes[1]))
        yield from mesh.rows(local, sizes, args.batch, repeats, accept, compare=options.check)


def _geometries(args: argparse.Namespace, operations: tuple[str, ...]) -> Iterator[tuple[str, ConvCacheSpec]]:
    """Operations with the geometries that they are measured on, in the order of the table.

    A prefill has no draft tokens and is measured once for all of them; a rollback has its own model, in one axis order.
    """
    from jax_impl.bench import rollback

    for name in operations:
        if name == "rollback":
            yield name, rollback.model_spec(args.dtype, args.axis_order[0])
            continue
        tokens = args.draft_tokens[:1] if name == "prefill" else args.draft_tokens
        for order, number in itertools.product(args.axis_order, tokens):
            yield name, _spec(args, order, number)


def _spec(args: argparse.Namespace, order: AxisOrder, tokens: int) -> ConvCacheSpec:
    """The geometry that the command line names."""
    return args.preset.spec(
        num_slots=args.slots,
        max_requests=BUFFER_ROWS,
        num_draft_tokens=tokens,
        tp=args.tp,
        dtype=args.dtype,
        axis_order=order,
    )
