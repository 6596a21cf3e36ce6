"""What the subcommands' argument parsers share: types with a message of their own, and an error that ends a command."""

import argparse
import contextlib
from collections.abc import Callable

from jax_impl.presets import Preset, get_preset


class CliError(Exception):
    """Ends a command with one line on stderr and exit code 2."""


def up_to(high: int, shown: str) -> Callable[[str], int]:
    """An argparse type: an integer from 1 to `high`, which messages write as `shown`."""

    def number(text: str) -> int:
        with contextlib.suppress(ValueError):
            if 1 <= int(text) <= high:
                return int(text)
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {shown}, got {text!r}.")

    return number


positive = up_to(10**9, "10^9")


def not_negative(text: str) -> int:
    """An integer of at least 0, as an argparse type."""
    with contextlib.suppress(ValueError):
        if int(text) >= 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}.")


def published_model(text: str) -> Preset:
    """A preset by name, as an argparse type."""
    try:
        return get_preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("`name`: ")) from None
