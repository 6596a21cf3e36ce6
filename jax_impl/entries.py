"""What the kernels read and write of one channel block: states, rows and single columns, in either axis order."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jax_impl.layout import ConvCacheSpec


@dataclasses.dataclass(frozen=True)
class Block:
    """What is static about the channels of one grid point.

    Attributes:
      block: channels of one grid point. vector: neighbouring channels of one thread.
      interpret: run on the CPU.
    """

    spec: ConvCacheSpec
    block: int
    vector: int
    interpret: bool


def load_entry(
    ref: Any, place: tuple[Any, ...], channels: Any, count: int, *, plan: Block, read_only: bool
) -> list[jax.Array]:
    """The first `count` columns, all that the entry at `place` has, of one channel block: each `(block,)`.

    `read_only` says that this launch never writes the array.
    """
    from jax_impl.pallas_backend import load_columns, load_runs, span

    everything, how = span(0, count), (plan.vector, plan.interpret)
    if plan.spec.axis_order == "channel_major":
        index, shape = (*place, channels, everything), (plan.block, count)
        return load_columns(ref, index, shape, *how, read_only=read_only)
    return load_runs(ref, (*place, everything, channels), (count, plan.block), *how, read_only=read_only)


def load_either(
    first: tuple[Any, Sequence[tuple[Any, ...]]],
    second: tuple[Any, Sequence[tuple[Any, ...]]],
    take_second: Sequence[jax.Array],
    channels: Any,
    *,
    plan: Block,
) -> list[jax.Array]:
    """Columns that are each in one of two arrays, each `(block,)`; only from that one anything is read.

    Either array comes with the place of every column, (leading indices …, column), and `take_second` says for each
    where it is.
    """
    from jax_impl.pallas_backend import load_either

    def index(place: tuple[Any, ...]) -> tuple[Any, ...]:
        *entry, column = place
        return (*entry, column, channels) if plan.spec.axis_order == "time_major" else (*entry, channels, column)

    return [
        load_either((first[0], index(one)), (second[0], index(other)), take, plan.block, plan.vector, plan.interpret)
        for one, other, take in zip(first[1], second[1], take_second, strict=True)
    ]


def store_entry(
    columns_out: Any, place: tuple[Any, ...], channels: Any, columns: list[jax.Array], limit: Any, *, plan: Block
) -> None:
    """Columns of one channel block at `place`, in the spec's axis order; with `limit` only the columns before it."""
    from jax_impl.pallas_backend import span, store_column, store_columns, store_runs, when

    count, how = len(columns), (plan.vector, plan.interpret)
    if plan.spec.axis_order == "time_major":
        index = (*place, span(0, count), channels)
        if limit is None:
            store_runs(columns_out, index, dict(enumerate(columns)), *how)
            return
        # The first token is always valid, so only the columns after it can be beyond the limit.
        certain = plan.spec.first_token_column + 1
        store_runs(columns_out, index, dict(enumerate(columns[:certain])), *how)
        for column in range(certain, count):
            when(limit > column)(functools.partial(store_runs, columns_out, index, {column: columns[column]}, *how))
        return
    index = (*place, channels, span(0, count))
    if limit is None:
        store_columns(columns_out, index, columns, *how)
        return
    when(limit == count)(functools.partial(store_columns, columns_out, index, columns, *how))
    for column in range(count):
        when((limit < count) & (limit > column))(
            functools.partial(store_column, columns_out, index, column, count, columns[column], *how)
        )
