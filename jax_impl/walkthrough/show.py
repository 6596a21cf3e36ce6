"""What a notebook displays: pictures, tables, the source of a function, and the devices it runs on.

The objects know how to show themselves (`_repr_png_` and so on) and nothing in them changes from run to run, so a
notebook that is executed again keeps its outputs.
"""

import dataclasses
import html
import importlib.util
import inspect
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

DPI = 80  # small files: notebooks and their pictures are in the repository
HISTORY, DRAFT, OTHER, WRONG = "#d9d9d9", "#9ecae1", "#ffffff", "#fcae91"  # fills that print in grey too


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as the bytes of a PNG file, and what it shows in words."""

    png: bytes
    alt: str

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the file; its folder is made where it is missing."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.png)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of short texts: HTML in a notebook, aligned columns elsewhere.

    >>> Table(("n", "slot"), [(0, "h1 h2 h3"), (1, "h2 h3 x0")], "after a commit")
    n | slot
    --+---------
    0 | h1 h2 h3
    1 | h2 h3 x0
    after a commit
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"`rows`: expected {len(self.columns)} cells in each, got {wrong[0]!r}.")

    def _repr_html_(self) -> str:
        def line(cells: Sequence[Any], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        body = "\n".join(line(row, "td") for row in self.rows)
        return f"<table>{caption}\n<thead>{line(self.columns, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table>"

    def __repr__(self) -> str:
        lines = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [" | ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in lines]
        texts.insert(1, "-+-".join("-" * size for size in widths))
        return "\n".join([*texts, self.caption] if self.caption else texts)


@dataclasses.dataclass(frozen=True)
class Markdown:
    """Text that a notebook renders as Markdown."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def source(function: Callable[..., Any]) -> Markdown:
    """The source of a function, to be read where it is used."""
    return Markdown(f"```python\n{inspect.getsource(function)}```")


def devices() -> str:
    """What the notebook runs on, in one line.

    >>> devices().startswith("JAX on ")
    True
    """
    import jax

    found = jax.devices()
    kernels = "interpreted"
    if jax.default_backend() == "gpu":
        from jax_impl import pallas_backend

        kernels = "compiled" if pallas_backend.runs_here() else "interpreted"
    return f"JAX on {len(found)} × {found[0].platform}; Pallas kernels are {kernels}."


def missing(*modules: str) -> str | None:
    """A sentence that names the modules which are not installed, None when all are.

    >>> missing("no_such_module")
    'no_such_module is not installed.'
    """
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    verb = "are" if len(absent) > 1 else "is"
    return f"{' and '.join(absent)} {verb} not installed." if absent else None


def panels(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure outside of any window, `width` × `height` inches, and its axes from left to right.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if absent := missing("matplotlib"):
        raise ImportError(f"pictures need matplotlib: {absent} pip install '.[notebooks]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def picture(figure: Any, alt: str) -> Picture:
    """Renders a figure; `alt` says what it shows."""
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, metadata={"Software": None})  # without the version of matplotlib
    return Picture(file.getvalue(), alt)


def finish(axes: Any, title: str, x: str, y: str) -> None:
    """Names of a plot and its axes, with units; a grid; and a legend where lines have labels."""
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
