"""Columns and windows drawn: which column of the shared run belongs to which window, and why a tree has none.

Columns are named as in the README: h1 … h(K-1) is the committed state, x0 … x(D-1) are the inputs of the draft tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import gather_windows
from jax_impl.capacity import saving_table, times
from jax_impl.layout import ConvCacheSpec, use_storage
from jax_impl.walkthrough import show
from jax_impl.walkthrough.rollback import as_integers
from jax_impl.walkthrough.show import Picture, Table

Window = tuple[str, ...]


def history_names(width: int) -> Window:
    """The committed state, oldest first.

    >>> history_names(4)
    ('h1', 'h2', 'h3')
    """
    return tuple(f"h{i}" for i in range(1, width))


def windows_of(width: int, parents: Sequence[int]) -> list[Window]:
    """The state after each draft: the last K-1 columns of the committed state and the draft's ancestors, itself last.

    Args:
      width: kernel width K.
      parents: for each draft the index of its parent, -1 for the committed state.

    Example:
      >>> windows_of(4, [-1, 0, 0])
      [('h2', 'h3', 'x0'), ('h3', 'x0', 'x1'), ('h3', 'x0', 'x2')]
    """
    windows: list[Window] = []
    for draft, parent in enumerate(parents):
        before = history_names(width) if parent < 0 else windows[parent]
        windows.append((*before[1:], f"x{draft}"))
    return windows


def wanted_in_columns(width: int, parents: Sequence[int]) -> list[list[str]]:
    """For each column of the shared run, the different values that the windows want there.

    The window after draft t is columns t … t+K-2. A run can be shared when no column is wanted to hold two values.

    >>> wanted_in_columns(3, [-1, 0]), wanted_in_columns(3, [-1, -1])
    ([['h2'], ['x0'], ['x1']], [['h2'], ['x0', 'h2'], ['x1']])
    """
    wanted: list[list[str]] = [[] for _ in range(len(parents) + width - 2)]
    for draft, window in enumerate(windows_of(width, parents)):
        for column, value in enumerate(window, start=draft):
            if value not in wanted[column]:
                wanted[column].append(value)
    return wanted


def slices_table(conv_windows: jax.Array, *, spec: ConvCacheSpec) -> Table:
    """The state after every accepted count, as columns of the one row of a buffer of whole numbers."""
    rows = []
    for n in range(1, spec.num_draft_tokens + 1):
        part, state = spec.window_columns(n), gather_windows(conv_windows, jnp.asarray([n], jnp.int32), spec=spec)
        rows.append((n, f"{part.start} … {part.stop - 1}", as_integers(state)))
    return Table(("accepted n", "columns", "state"), rows)


def column_table(width: int, parents: Sequence[int]) -> Table:
    """What every window wants in every column, and whether one value satisfies all."""
    windows = windows_of(width, parents)
    rows = []
    for column, wanted in enumerate(wanted_in_columns(width, parents)):
        cells = [w[column - t] if t <= column < t + len(w) else "" for t, w in enumerate(windows)]
        rows.append((column, *cells, "yes" if len(wanted) == 1 else f"no: {' or '.join(wanted)}"))
    after = [f"after x{draft}" for draft in range(len(parents))]
    storage = use_storage(1, list(parents))
    return Table(("column", *after, "one value"), rows, f"parents {list(parents)}: {storage} storage")


def saving_rows(widths: Sequence[int] = (2, 3, 4, 7), draft_tokens: Sequence[int] = (1, 2, 4, 8, 16)) -> Table:
    """Dense columns, shared columns and their ratio, for every K and D."""
    cells = {(r.width, r.num_draft_tokens): r for r in saving_table(widths, draft_tokens)}

    def cell(width: int, tokens: int) -> str:
        row = cells[width, tokens]
        return f"{row.dense_columns} → {row.sliding_columns}: {times(row.saving)}"

    rows = [(f"K = {width}", *(cell(width, tokens) for tokens in draft_tokens)) for width in widths]
    return Table(("", *(f"D = {tokens}" for tokens in draft_tokens)), rows)


def _box(axes: Any, x: float, y: float, text: str, fill: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x + 0.04, y + 0.12), 0.92, 0.76, facecolor=fill, edgecolor="black", linewidth=0.8))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)


def _row(axes: Any, y: float, first: int, names: Sequence[str], label: str, wrong: Sequence[str] = ()) -> None:
    """One line of boxes from column `first` on, and its label at the left."""
    axes.text(-0.2, y + 0.5, label, ha="right", va="center", fontsize=9)
    for column, name in enumerate(names, start=first):
        fill = show.WRONG if name in wrong else show.HISTORY if name.startswith("h") else show.DRAFT
        _box(axes, column, y, name, fill)


def _canvas(columns: int, rows: int, lead: float) -> tuple[Any, Any]:
    figure, (axes,) = show.panels(0.5 * (columns + lead) + 0.3, 0.36 * rows + 0.4)
    axes.set_xlim(-lead, columns + 0.1)
    axes.set_ylim(-rows - 0.1, 0.1)
    axes.axis("off")
    return figure, axes


def overlap_picture(width: int = 4, num_draft_tokens: int = 4) -> Picture:
    """Committed state, shared run, and the window after each token below the columns that it is made of."""
    spec = ConvCacheSpec(1, 1, 1, 1, width, num_draft_tokens)
    history = history_names(width)
    shared = (*history[1:], *(f"x{t}" for t in range(num_draft_tokens)))
    figure, axes = _canvas(spec.num_columns, num_draft_tokens + 2, lead=5.3)
    _row(axes, -1, -1, history, "")
    axes.text(-1.2, -0.5, "committed state", ha="right", va="center", fontsize=9)
    _row(axes, -2, 0, shared, "")
    axes.text(-1.2, -1.5, "shared columns", ha="right", va="center", fontsize=9, weight="bold")
    for token, window in enumerate(windows_of(width, range(-1, num_draft_tokens - 1))):
        _row(axes, -3 - token, token, window, "")
        axes.text(-1.2, -2.5 - token, f"after x{token}", ha="right", va="center", fontsize=9)
    dense = num_draft_tokens * (width - 1)
    title = f"K = {width}, D = {num_draft_tokens}: {dense} columns become {spec.num_columns}"
    axes.set_title(title, fontsize="medium")
    return show.picture(figure, f"{title}. Window n is the slice of the shared columns above it.")


def tree_picture(width: int, parents: Sequence[int]) -> Picture:
    """The windows of a draft tree in the columns where a shared run would look for them; conflicts are red."""
    wanted = wanted_in_columns(width, parents)
    figure, axes = _canvas(len(wanted), len(parents) + 1, lead=4.3)
    conflicts = 0
    for draft, window in enumerate(windows_of(width, parents)):
        wrong = [value for column, value in enumerate(window, start=draft) if len(wanted[column]) > 1]
        parent = "state" if parents[draft] < 0 else f"x{parents[draft]}"
        _row(axes, -1 - draft, draft, window, f"after x{draft}, child of {parent}", wrong)
    for column, values in enumerate(wanted):
        conflicts += len(values) > 1
        text = "✓" if len(values) == 1 else "✗"
        axes.text(column + 0.5, -len(parents) - 0.5, text, ha="center", va="center", fontsize=10)
    title = f"parents {list(parents)}: {conflicts} of {len(wanted)} columns would have to hold two values"
    axes.set_title(title, fontsize="medium")
    return show.picture(figure, title)
