"""Plots of a results file, from the file alone: time with the copy limit, cost against size, bytes against D.

matplotlib is imported when something is drawn, without a display.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jax_impl.bench.form import MESH
from jax_impl.bench.report import MESH_TIMES, Record, Row, at, copy_us
from jax_impl.layout import ConvCacheSpec

BYTES_TOKENS = tuple(range(1, 17))  # D of the plot of bytes

Value = Callable[[Row], float]  # of one series at one row; LookupError where it was not measured


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a plot."""

    label: str
    value: Value
    style: str


def _device(subject: str) -> Value:
    return lambda row: at(row, subject, "median_us")


def _wall(subject: str) -> Value:
    return lambda row: at(row, subject, "wall", "median_us")


def _of_step(design: str, value: Value) -> Value:
    """`value` at the rows of one design's whole step."""

    def of_design(row: Row) -> float:
        if (at(row, "of"), at(row, "design")) != ("step", design):
            raise LookupError(design)
        return value(row)

    return of_design


LIMIT = Series("limit: copy of the same bytes", copy_us, "k--")
OF_ONE_CALL = (
    Series("Pallas", _device("pallas"), "C0o-"),
    Series("XLA", _device("xla"), "C1s-"),
    Series("Triton", _device("triton"), "C2^-"),
    LIMIT,
)
TIMES = {
    "commit": ("device time of one commit of all layers (µs)", OF_ONE_CALL),
    "verify": ("device time of one layer's verify (µs)", OF_ONE_CALL),
    "step": (
        "wall time of one whole step (µs)",
        (
            Series("Pallas, unrolled", _wall("pallas_unrolled"), "C0o-"),
            Series("Pallas, chained", _wall("pallas_chained"), "C3v-"),
            Series("Pallas, scan", _wall("pallas_scan"), "C4D-"),
            Series("XLA, scan", _wall("xla_scan"), "C1s-"),
            Series("Triton in a CUDA graph", _wall("triton"), "C2^-"),
            Series("limit: the same copies in one graph", lambda row: copy_us(row, ("wall", "median_us")), "k--"),
        ),
    ),
    "drafts": (
        "device time of one whole step (µs)",
        (
            Series("sliding, commit", _of_step("sliding", _device("pallas")), "C0o-"),
            Series("inputs, commit", _of_step("inputs", _device("pallas")), "C1s-"),
            Series("kept inputs, commit", _of_step("kept", _device("pallas")), "C2^-"),
            Series("sliding, resumed", _of_step("sliding_resumed", _device("pallas")), "C3v-"),
            Series("kept inputs, resumed", _of_step("kept_resumed", _device("pallas")), "C4D-"),
            Series("limit: copies of the bytes of sliding", _of_step("sliding", copy_us), "k--"),
        ),
    ),
}
ROLLBACKS = (
    Series("one launch", _device("pallas"), "C0o-"),
    Series("one launch per group", _device("launch_per_group"), "C4D-"),
    Series("one array per layer", _device("lists_per_layer"), "C3v-"),
    Series("XLA", _device("xla"), "C1s-"),
    Series("Triton in a CUDA graph", _device("triton"), "C2^-"),
    LIMIT,
)
PREFILLS = (
    Series("Pallas", _device("pallas"), "C0o-"),
    Series("Pallas, continued", _device("pallas_continued"), "C4D-"),
    Series("XLA", _device("xla"), "C1s-"),
    Series("XLA, continued", _device("xla_continued"), "C3v-"),
    LIMIT,
)
SCALING_AXES = {"conv_dim": "channels conv_dim", "num_slots": "slots C of the pool"}


def draw(record: Record, stem: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws every plot that the record has points for.

    Args:
      record: as `jax_impl.bench.report.read` returns it.
      stem: what the files' names begin with.
      folder: where they go; it exists.

    Returns:
      The files: `stem-<operation>.png` and `stem-bytes.png`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figures = {}
    for operation in TIMES:
        rows = [row for row in record["points"] if row["operation"] == operation]
        if rows:
            figures[operation] = _time_figure(rows, operation)
    for operation, make in OTHERS.items():
        rows = [row for row in record["points"] if row["operation"] == operation]
        if rows:
            figures[operation] = make(rows)
    figures["bytes"] = _bytes_figure(record)
    source = (
        f"{record['environment']['device']}, {record['environment']['date']}, {record['preset']} at TP {record['tp']}"
    )
    paths = []
    for name, figure in figures.items():
        figure.suptitle(f"{name}: {source}", fontsize="medium", parse_math=False)
        paths.append(folder / f"{stem}-{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure outside of any window, and its axes `[rows, columns]`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.8 * columns, 1 + 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey="row")


def _line(axes: Any, series: Series, rows: Sequence[Row], along: str) -> None:
    """Draws the rows that have the series' value; a series without any is left out."""
    points = []
    for row in rows:
        try:
            points.append((row[along], series.value(row)))
        except LookupError:
            continue
    if points:
        axes.plot(*zip(*sorted(points), strict=True), series.style, label=series.label, markersize=4)


def _finish(axes: Any, title: str, x: str, y: str, ticks: Sequence[int]) -> None:
    """Axes with names and units, and the measured sizes as ticks."""
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a key, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def _logarithmic(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _time_figure(rows: Sequence[Row], operation: str) -> Any:
    """A row of panels for each D, a column for each axis order."""
    label, lines = TIMES[operation]
    orders, tokens = _values(rows, "axis_order"), _values(rows, "num_draft_tokens")
    figure, panels = _panels(len(tokens), len(orders))
    for i, number in enumerate(tokens):
        for j, order in enumerate(orders):
            of_panel = [row for row in rows if (row["num_draft_tokens"], row["axis_order"]) == (number, order)]
            axes = panels[i, j]
            _logarithmic(axes)
            for series in lines:
                _line(axes, series, of_panel, "batch")
            _finish(axes, f"{order}, D = {number}", "requests B", label, sorted(_values(of_panel, "batch")))
    return figure


def _rollback_figure(rows: Sequence[Row]) -> Any:
    """A row of panels for conv groups alone and one with recurrent state; a column for each number of index sets."""
    kinds = [row for row in rows if "recurrent" in row]
    along = (_values(kinds, "recurrent"), _values(kinds, "track"))
    figure, panels = _panels(max(1, len(along[0])), max(1, len(along[1])))
    for (i, recurrent), (j, track) in itertools.product(*map(enumerate, along)):
        of_panel = [row for row in kinds if (row["recurrent"], row["track"]) == (recurrent, track)]
        axes = panels[i, j]
        _logarithmic(axes)
        for series in ROLLBACKS:
            _line(axes, series, of_panel, "batch")
        title = (
            f"{'conv groups and recurrent state' if recurrent else 'conv groups'}, {1 + track} index set{'s' * track}"
        )
        _finish(axes, title, "requests B", "device time of one rollback (µs)", sorted(_values(of_panel, "batch")))
    return figure


def _prefill_figure(rows: Sequence[Row]) -> Any:
    """Time against the tokens of a call, a panel for each axis order."""
    sized = [row | {"of call": row["batch"] * row["tokens"]} for row in rows if "tokens" in row]
    orders = _values(rows, "axis_order")
    figure, panels = _panels(1, len(orders))
    for j, order in enumerate(orders):
        of_panel, axes = [row for row in sized if row["axis_order"] == order], panels[0, j]
        _logarithmic(axes)
        for series in PREFILLS:
            _line(axes, series, of_panel, "of call")
        sizes = ", ".join(f"{row['batch']}×{row['tokens']}" for row in sorted(of_panel, key=lambda row: row["of call"]))
        ticks = sorted(_values(of_panel, "of call"))
        _finish(axes, f"{order}, {sizes}", "tokens B·T of one call", "device time of one layer's prefill (µs)", ticks)
    return figure


def _scaling_figure(rows: Sequence[Row]) -> Any:
    """Time against conv_dim and against the slots, a row of panels for each axis order."""
    orders = _values(rows, "axis_order")
    figure, panels = _panels(len(orders), len(SCALING_AXES))
    for i, order in enumerate(orders):
        for j, (field, label) in enumerate(SCALING_AXES.items()):
            of_panel = [row for row in rows if (row["axis_order"], row.get("over")) == (order, field)]
            axes = panels[i, j]
            _logarithmic(axes)
            for color, of in enumerate(("commit", "verify")):
                of_line = [row for row in of_panel if row["of"] == of]
                _line(axes, Series(of, _device("pallas"), f"C{color}o-"), of_line, field)
                _line(axes, Series(f"{of}: copy of the same bytes", copy_us, f"C{color}--"), of_line, field)
            batch = "B = " + ", ".join(map(str, _values(of_panel, "batch")))
            _finish(axes, f"{order}, {batch}", label, "device time (µs)", sorted(_values(of_panel, field)))
    return figure


def _compile_figure(rows: Sequence[Row]) -> Any:
    """Seconds to compile a whole step against its layers."""
    orders = _values(rows, "axis_order")
    figure, panels = _panels(1, len(orders))
    for j, order in enumerate(orders):
        steps = [row for row in rows if row["axis_order"] == order and row.get("form") in ("scan", "unrolled")]
        for form, style in (("unrolled", "C0o-"), ("scan", "C4D-")):
            of_line = [row for row in steps if row["form"] == form]
            _line(panels[0, j], Series(form, lambda row: at(row, "compile_s"), style), of_line, "num_layers")
        ticks = sorted(_values(steps, "num_layers"))
        _finish(panels[0, j], order, "layers L", "time to compile a whole step (s)", ticks)
        panels[0, j].set_ylim(bottom=0)
    return figure


def _mesh_figure(rows: Sequence[Row]) -> Any:
    """Time of a step on a mesh over that of a rank's work on one device; a panel for each axis order.

    By the device, by the wall, and by the wall of the chained step.
    """
    orders, meshes = _values(rows, "axis_order"), dict.fromkeys((row["data"], row["tensor"]) for row in rows)
    figure, panels = _panels(1, len(orders))
    for j, order in enumerate(orders):
        of_panel, axes = [row for row in rows if row["axis_order"] == order and row["batch"]], panels[0, j]
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="k", linestyle="--")
        for (number, (data, tensor)), (kind, style) in itertools.product(
            enumerate(meshes), zip(MESH_TIMES, ("o-", "s:", "^--"), strict=True)
        ):
            of_line = [row for row in of_panel if (row["data"], row["tensor"]) == (data, tensor)]
            ratio = lambda row, kind=kind: at(row, "step_ratio", kind)  # noqa: E731
            _line(axes, Series(f"data={data} tensor={tensor}, {kind}", ratio, f"C{number}{style}"), of_line, "batch")
        _finish(axes, order, "requests B of a data rank", "all devices / one", sorted(_values(of_panel, "batch")))
    return figure


OTHERS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "rollback": _rollback_figure,
    "prefill": _prefill_figure,
    "scaling": _scaling_figure,
    "compile": _compile_figure,
    MESH: _mesh_figure,
}


def row_bytes(record: Record, storage: Any, num_draft_tokens: int) -> int:
    """Bytes of one request's row of the verify buffer, all layers together, in the record's geometry."""
    of = record.get("geometry") or record["points"][0]
    spec = ConvCacheSpec(
        of["num_layers"], 1, 1, of["conv_dim"], of["width"], num_draft_tokens, of["dtype"], storage=storage
    )
    return spec.row_bytes


def _bytes_figure(record: Record) -> Any:
    """Bytes of a request's row in every storage against D."""
    figure, panels = _panels(1, 1)
    axes = panels[0, 0]
    for storage, label, style in (
        ("dense", "dense: D·(K-1) columns", "C1s-"),
        ("sliding", "sliding: D+K-2 columns", "C0o-"),
        ("inputs", "inputs: D columns", "C2^-"),
    ):
        sizes = [row_bytes(record, storage, tokens) / 2**20 for tokens in BYTES_TOKENS]
        axes.plot(BYTES_TOKENS, sizes, style, label=label, markersize=4)
    _finish(axes, "verify buffer, one request", "tokens D of one step", "all layers (MiB = 2^20 bytes)", BYTES_TOKENS)
    axes.set_ylim(bottom=0)
    return figure
