"""Tables and progress bars of the commands. rich draws them, and is imported only when one is drawn."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from jax_impl.arguments import CliError


def require_rich(otherwise: str = "--json works without it.") -> None:
    """Raises `CliError` when rich is not installed; `otherwise` says how to do without."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise CliError(f"tables need `rich`, which is not installed: pip install '.[cli]'. {otherwise}") from None


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str | None = None,
    *,
    stderr: bool = False,
) -> None:
    """Prints a table to stdout or stderr; the first column is text, the others are numbers."""
    require_rich()
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):  # in a narrow terminal numbers fold, none of their digits is cut off
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    stream = sys.stderr if stderr else sys.stdout
    Console(file=stream, width=None if stream.isatty() else 250).print(table)


@contextlib.contextmanager
def progress(what: str, steps: int, *, hidden: bool = False) -> Iterator[Callable[..., object]]:
    """A progress bar on stderr; yields the function that advances it, by one step or by the number it is given.

    It appears with the first step, so that a run that is refused prints the error and nothing else.
    """
    if hidden:
        yield lambda count=1: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar, started = Progress(console=Console(stderr=True), redirect_stdout=False), False
    task = bar.add_task(what, total=steps)

    def advance(count: int = 1) -> None:
        nonlocal started
        if not started:
            bar.start()
            started = True
        bar.advance(task, count)

    try:
        yield advance
    finally:
        if started:
            bar.stop()
