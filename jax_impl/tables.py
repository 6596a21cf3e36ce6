"""Tables and progress bars of the commands. rich draws them, and is imported only when one is drawn."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax_impl.arguments import CliError

RICH = {"rich": "tables"}
WITHOUT_RICH = "--json works without it."


def require(uses: Mapping[str, str], otherwise: str = "") -> None:
    """Raises `CliError` that names all packages of the extra `cli` which are not installed.

    Args:
      uses: what needs each package, in the plural, by the package's name.
      otherwise: how to do without the first package, said where only that one is missing.
    """
    missing = [package for package in uses if not _is_installed(package)]
    if not missing:
        return
    needs = ", ".join(f"{uses[package]} need `{package}`" for package in missing)
    verb = "are" if len(missing) > 1 else "is"
    hint = f" {otherwise}" if otherwise and missing == [next(iter(uses))] else ""
    raise CliError(f"{needs}, which {verb} not installed: pip install '.[cli]'.{hint}")


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def require_rich(otherwise: str = WITHOUT_RICH) -> None:
    """Raises `CliError` when rich is not installed; `otherwise` says how to do without."""
    require(RICH, otherwise)


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
