"""One measured point after another: what is timed at each, and the row of the results file that comes of it."""

import dataclasses
import functools
import gc
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax

from jax_impl.bench import comparing, compiling, drafts, form, prefill, report, rollback, step, subjects, timing
from jax_impl.bench.subjects import Case, Subject
from jax_impl.cache import ConvCache
from jax_impl.layout import ConvCacheSpec

XLA_CALLS = 10  # XLA compiles each call anew; with fewer, what a turn of the loop costs would show
REPEATS = {
    "commit": 20,
    "verify": 20,
    "step": 10,
    "rollback": 5,
    "prefill": 5,
    "drafts": 5,
    "compile": 1,
    "scaling": 10,
}
SCALING_BATCH = 64
SCALING = {"conv_dim": (1024, 2048, 4096, 8192, 16384), "num_slots": (64, 512, 2048, 8192)}

AnyCase = TypeVar("AnyCase", bound=Case)
Makers = dict[str, Callable[[], Subject]]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says about every point.

    Attributes:
      batches: requests per call.
      repeats: timed runs per subject; None takes `REPEATS`.
      accept: counts of the requests; None accepts all tokens in a whole step and random counts elsewhere.
      check: whether every result is compared with the XLA form before its geometry is timed.
      kernel_times: whether CUPTI is asked.
      only: kinds of subjects to time, of `form.SUBJECTS`; empty for all.

    `rollback`, `prefill` and `drafts` have batches of their own.
    """

    batches: Sequence[int]
    repeats: int | None = None
    accept: Literal["all", "random"] | None = None
    check: bool = False
    kernel_times: bool = True
    only: Sequence[str] = ()


def measure(operation: str, spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """Rows of one operation on one geometry. What fails is recorded in its row under `errors`, by subject.

    A geometry whose results are wrong is not timed; it leaves one row that says so.
    """
    if options.check and (wrong := _check(operation, spec)):
        yield wrong
        return
    if operation == "compile":
        yield from _compile_rows(spec, options)
    elif operation == "scaling":
        yield from _scaling_rows(spec, options)
    elif operation == "rollback":
        yield from _rollback_rows(spec, options)
    elif operation == "prefill":
        yield from _prefill_rows(spec, options)
    elif operation == "drafts":
        yield from _drafts_rows(spec, options)
    else:
        yield from _rows(operation, spec, options.batches, options)


def _check(operation: str, spec: ConvCacheSpec) -> Row | None:
    """A row with the error when a comparison fails, None when all results are right."""
    point = comparing.reduced(operation, spec)
    try:
        if comparing.check(point):
            return None
        why = "results differ from the XLA form"
    except Exception as error:
        why = timing.reason(error)
    return {**identity(operation, point.spec, point.batch), "errors": {"check": why}}


# ---- one row ---------------------------------------------------------------------------------------------------------


def geometry(spec: ConvCacheSpec) -> Row:
    """The sizes that a table's title names."""
    return {name: getattr(spec, name) for name in ("width", "conv_dim", "num_layers", "num_slots", "dtype")}


def identity(operation: str, spec: ConvCacheSpec, batch: int) -> Row:
    """What a row is about."""
    tokens = {"axis_order": spec.axis_order, "num_draft_tokens": spec.num_draft_tokens}
    return {"operation": operation, **tokens, **geometry(spec), "batch": batch}


def timed(subject: Subject, repeats: int, kernel_times: bool) -> Row:
    """All times of a subject, and the facts about its program."""
    times: Row = timing.marginal_us(subject.run, subject.calls, repeats)
    if subject.alone:
        times |= timing.wall_us(subject.alone, 1, repeats)
    times |= subject.facts
    if kernel_times:
        times |= timing.kernel_us(subject.run, subject.calls)
    return times


def fill(row: Row, makers: Makers, options: Options) -> Row:
    """Adds each subject's times to the row; one that fails, for want of memory say, leaves its error there instead."""
    repeats = options.repeats or REPEATS[row["operation"]]
    for name, make in makers.items():
        if options.only and not form.is_of(name, options.only):
            continue
        try:
            row[name] = timed(make(), repeats, options.kernel_times)
        except Exception as error:  # the other subjects and points stand
            row.setdefault("errors", {})[name] = timing.reason(error)
        _release()
    copies = [row[name]["median_us"] for name in row if name.startswith("copy_")]
    for name in makers:
        of_bytes = not name.startswith("copy_") and not name.endswith("_chained")  # whose x is in the cache
        if copies and name in row and of_bytes and row[name]["median_us"] > 0:
            row[name]["copy_fraction"] = round(min(copies) / row[name]["median_us"], 4)
    return row


def _release() -> None:
    """Gives memory back that a subject held: JAX and torch share it."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _with_arrays(
    row: Row, held: list[Any], make: Callable[[], tuple[Any, ...]], makers_of: Callable[..., Makers], options: Options
) -> Row:
    """The row with its times. `held` keeps the arrays for the next point of the geometry; it begins empty."""
    try:
        if not held:
            held.append(make())
    except Exception as error:
        row["errors"] = {"arrays": timing.reason(error)}
        _release()
        return row
    return fill(row, makers_of(*held[0]), options)


# ---- the operations --------------------------------------------------------------------------------------------------


def _rows(operation: str, spec: ConvCacheSpec, batches: Sequence[int], options: Options) -> Iterator[Row]:
    """One row per batch size; arrays of one geometry are shared by its batch sizes."""
    makers_of = {"commit": commit_makers, "verify": verify_makers, "step": step_makers}[operation]
    accept = options.accept or ("all" if operation == "step" else "random")
    held: list[Any] = []
    for batch in batches:
        case = Case(spec, batch, _calls(operation, spec, batch), accept)
        row = {**identity(operation, spec, batch), "accept": accept, "bytes": _bytes(operation, case)}
        make = lambda: (subjects.random_cache(spec), _twin(spec))  # noqa: E731
        yield _with_arrays(row, held, make, functools.partial(makers_of, case), options)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _twin(spec: ConvCacheSpec) -> Any:
    return subjects.torch_cache(spec) if _has_torch() else None


def _calls(operation: str, spec: ConvCacheSpec, batch: int) -> int:
    """Distinct calls: at small batches more, so that together they touch more than the cache holds."""
    if operation == "verify":
        return spec.num_layers * (4 if batch < 8 else 1)
    return max(4, 64 // max(1, batch))


def _bytes(operation: str, case: Case) -> int:
    of = {"commit": lambda: case.commit_bytes, "verify": lambda: case.verify_bytes, "step": lambda: case.step_bytes}
    return of[operation]()


def commit_makers(case: Case, cache: ConvCache, twin: Any) -> Makers:
    """What a commit is timed beside; `twin` None means that there is no torch."""
    makers: Makers = {
        "pallas": functools.partial(subjects.jax_commit, case, cache, "pallas"),
        "xla": functools.partial(subjects.jax_commit, _few(case), cache, "xla"),
    }
    if twin is not None:
        makers["triton"] = functools.partial(subjects.torch_commit, case, twin)
        makers |= _copies([case.commit_bytes] * case.calls)
    return makers


def verify_makers(case: Case, cache: ConvCache, twin: Any) -> Makers:
    """What a verify of one layer is timed beside."""
    makers: Makers = {
        "pallas": functools.partial(subjects.jax_verify, case, cache, "pallas"),
        "xla": functools.partial(subjects.jax_verify, _few(case), cache, "xla"),
    }
    if twin is not None:
        makers["triton"] = functools.partial(subjects.torch_verify, case, twin)
        makers |= _copies([case.verify_bytes] * case.calls)
    return makers


def step_makers(case: Case, cache: ConvCache, twin: Any) -> Makers:
    """What a whole step is timed beside."""
    makers: Makers = {
        f"pallas_{form}": functools.partial(step.jax_step, form, case, cache, "pallas") for form in step.TIMED
    }
    makers["xla_scan"] = functools.partial(step.jax_step, "scan", case, cache, "xla")
    if twin is not None:
        makers["triton"] = functools.partial(step.torch_step, case, twin)
        makers["copy_driver"] = functools.partial(step.copies, case, kernel=False)
        makers["copy_kernel"] = functools.partial(step.copies, case, kernel=True)
    return makers


def _few(case: AnyCase) -> AnyCase:
    return dataclasses.replace(case, calls=min(case.calls, XLA_CALLS))


def _copies(sizes: list[int]) -> Makers:
    return {
        "copy_driver": functools.partial(subjects.torch_copies, sizes, kernel=False),
        "copy_kernel": functools.partial(subjects.torch_copies, sizes, kernel=True),
    }


def rollback_makers(case: rollback.Case, arrays: Any, twin: Any) -> Makers:
    """What a rollback is timed beside: the XLA form of conv groups only, for the recurrent pools are large."""
    makers: Makers = {
        form: functools.partial(rollback.jax_rollback, form, case, arrays, "pallas") for form in rollback.forms(case)
    }
    if not case.recurrent:
        makers["xla"] = functools.partial(rollback.jax_rollback, "pallas", _few(case), arrays, "xla")
    if twin is not None:
        makers["triton"] = functools.partial(rollback.torch_rollback, case, twin)
        makers |= _copies([case.rollback_bytes] * case.calls)
    return makers


def _rollback_rows(spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """Conv groups alone, then with recurrent state; each with one index set and two, at every batch."""
    accept = options.accept or "random"
    sizes = {"model": rollback.MODEL, "groups": len(rollback.PARTS), "state": rollback.state_entry(spec)}
    for recurrent in (False, True):
        held: list[Any] = []  # freed before the next kind's are made
        make = lambda recurrent=recurrent: (  # noqa: E731
            rollback.random_arrays(spec, recurrent),
            rollback.torch_arrays(spec, recurrent) if _has_torch() else None,
        )
        for track, batch in itertools.product((False, True), rollback.BATCHES):
            case = rollback.rotating(rollback.Case(spec, batch, 1, accept, recurrent=recurrent, track=track))
            row = {**identity("rollback", spec, batch), **sizes, "recurrent": recurrent, "track": track}
            row |= {"accept": accept, "bytes": case.rollback_bytes}
            yield _with_arrays(row, held, make, functools.partial(rollback_makers, case), options)


def prefill_makers(case: prefill.Case, cache: ConvCache) -> Makers:
    """What one layer's prefill is timed beside, from zeros and `continued` from the slots."""
    makers: Makers = {}
    for suffix, continued in (("", False), ("_continued", True)):
        of = functools.partial(prefill.jax_prefill, continued=continued)
        makers[f"pallas{suffix}"] = functools.partial(of, case, cache, "pallas")
        makers[f"xla{suffix}"] = functools.partial(of, _few(case), cache, "xla")
    return makers | (_copies([case.prefill_bytes] * case.calls) if _has_torch() else {})


def _prefill_rows(spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """One row per number and length of prompts."""
    held: list[Any] = []
    for batch, tokens in prefill.SIZES:
        case = prefill.rotating(spec, batch, tokens)
        row = {**identity("prefill", spec, batch), "tokens": tokens, "bytes": case.prefill_bytes}
        make = lambda: (subjects.random_cache(spec),)  # noqa: E731
        yield _with_arrays(row, held, make, functools.partial(prefill_makers, case), options)


def drafts_makers(case: Case, design: str, of: drafts.Of) -> Makers:
    """What a design's verify or whole step is timed beside; `case` has the design's geometry."""
    makers: Makers = {"pallas": functools.partial(drafts.jax_rounds, design, of, case, "pallas")}
    if _has_torch():
        makers["copy_driver"] = functools.partial(drafts.copies, case, design, of, kernel=False)
        makers["copy_kernel"] = functools.partial(drafts.copies, case, design, of, kernel=True)
    return makers


def _drafts_rows(spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """One row per design, with its time over that of the first, which the others are alternatives to.

    Without CUPTI's times, for there are many points.
    """
    options = dataclasses.replace(options, kernel_times=False)
    accept = options.accept or "random"
    for batch, of in itertools.product(
        sorted({min(batch, spec.num_slots) for batch in drafts.BATCHES}), drafts.DESIGNS
    ):
        first: Row = {}
        for design in drafts.DESIGNS[of]:
            own = drafts.design_spec(spec, design, batch)
            row = {**identity("drafts", own, batch), "of": of, "design": design, "accept": accept}
            row |= {
                "columns": drafts.columns_of(own, design, of),
                "bytes": drafts.moved_bytes(own, design, of, batch),
            }
            row = fill(row, drafts_makers(Case(own, batch, 1, accept), design, of), options)
            first = first or row
            if "pallas" in row and first.get("pallas", {}).get("median_us", 0) > 0:
                row["sliding_ratio"] = round(row["pallas"]["median_us"] / first["pallas"]["median_us"], 4)
            yield row


def _scaling_rows(spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """Commit and verify with one size changed at a time: cost should follow conv_dim and ignore the slots."""
    only = tuple(options.only) or ("pallas", "copy")
    options = dataclasses.replace(options, only=only, repeats=options.repeats or REPEATS["scaling"])
    for field, values in SCALING.items():
        for value in values:
            sized = dataclasses.replace(spec, **{field: value})
            for of in ("commit", "verify"):
                for row in _rows(of, sized, [min(SCALING_BATCH, sized.num_slots)], options):
                    yield {**row, "operation": "scaling", "of": of, "over": field}


def _compile_rows(spec: ConvCacheSpec, options: Options) -> Iterator[Row]:
    """One row per compiled program, with no arrays made."""
    for plan in compiling.programs(spec, min(compiling.BATCH, spec.num_slots)):
        row = {**identity("compile", plan.spec, plan.batch), "form": plan.form, "command_buffers": plan.command_buffers}
        try:
            row |= compiling.compiled(plan, "pallas")
        except Exception as error:
            row["errors"] = {"compile": timing.reason(error)}
        jax.clear_caches()
        yield row


# ---- what is printed -------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """One printed line of a row: times in microseconds, and how near the copy limit the kernel comes."""
    head = f"{row['operation']} {row['axis_order']} D={row['num_draft_tokens']} B={row['batch']}"
    if "form" in row:
        head += f" {row['form']} L={row['num_layers']}" + ("" if row["command_buffers"] else " no command buffers")
    head += report.variant(row)
    if "over" in row:
        head += f" {row['of']} conv_dim={row['conv_dim']} C={row['num_slots']}"
    for kind, ratio in row.get("step_ratio", {}).items():
        head += f"  {kind}: step ratio {ratio:.3f}, throughput {row['throughput'][kind]:.2f}×"
    if "compile_s" in row:
        head += (
            f"  trace {row['trace_s']:.2f} s  compile {row['compile_s']:.2f} s  launches {row['launches']:g}"
            f"  temp {row['temp_bytes']} bytes  pool copies {', '.join(row['pool_copies']) or 'none'}"
        )
    if "sliding_ratio" in row:
        head += f"  {row['sliding_ratio']:.3f} of sliding"
    for name, times in row.items():
        if not isinstance(times, dict):
            continue
        walled = isinstance(times.get("wall"), dict)  # a ratio by the wall is a number
        if walled or "median_us" in times:
            head += f"  {name} {times['median_us']:.2f}" if "median_us" in times else f"  {name} {report.NOT_MEASURED}"
            head += f" (wall {times['wall']['median_us']:.2f})" if walled else ""
            head += f" ({times['copy_fraction']:.1%} of copy)" if "copy_fraction" in times else ""
    return head + "".join(f"  {name} FAILED {why}" for name, why in row.get("errors", {}).items())
