"""Which columns a request's state is made of: its slot's, its buffer row's, those of a path through a draft tree.

The state after n tokens on a path p (in a chain p = 0, 1, 2 …) is the last S columns of

    [ s_0 … s_{S-1} | x[p_0] … x[p_{n-1}] ]          slot, then inputs

so its column j is s_{n+j} while n + j < S, and x[p_{n+j-S}] from there on. A sliding row has those columns in a row for
a chain, a dense one has the whole window of every token.

Everything here decides by index alone and serves arrays in the plain form and scalars in the kernels alike, except
`take_state_after`, which is the plain form's read. What names no column is skipped, never clamped: indices are brought
into range only where the answer is not used.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl import checks, runs
from jax_impl.layout import ConvCacheSpec, Problems

# place on the path → node there: `path[b, place]`, for a place from 0 to D-1
Entry = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Column:
    """Where one column of a state is: input `of_inputs` if `is_input`, else column `of_slot` of the slot."""

    is_input: jax.Array
    of_slot: jax.Array
    of_inputs: jax.Array


def columns_after(
    count: jax.Array, entry: Entry | None, valid: jax.Array | None, *, spec: ConvCacheSpec
) -> tuple[jax.Array | bool, list[Column]]:
    """The S columns of the state after `count` tokens of a path, and whether all its nodes are among the valid ones.

    After 0 tokens they are the slot's. For a count outside 0 … D they are those of another count: the caller skips it.
    """
    tokens, size = spec.num_draft_tokens, spec.state_columns
    within: jax.Array | bool = True
    count, columns = jnp.clip(count, 0, tokens), []
    for column in range(size):
        place = count + (column - size)  # negative: the column is still one of the slot's
        is_input = place >= 0
        node = place = jnp.clip(place, 0, tokens - 1)
        if entry is not None:
            node = entry(place)
            within &= jnp.logical_not(is_input) | _is_valid(node, valid, spec)
        columns.append(Column(is_input, jnp.clip(count + column, 0, size - 1), jnp.clip(node, 0, tokens - 1)))
    return within, columns


def token_after(
    count: jax.Array, entry: Entry | None, valid: jax.Array | None, *, spec: ConvCacheSpec
) -> tuple[jax.Array | bool, jax.Array]:
    """The token whose window in a sliding or dense row is the state after `count` tokens of a path, and whether it is.

    A sliding row has the windows of a chain only: there the path's last node must be the token before `count`.
    """
    last = jnp.clip(count, 1, spec.num_draft_tokens) - 1
    if entry is None:
        return True, last
    node = entry(last)
    if spec.storage == "sliding":
        return node == last, last
    return _is_valid(node, valid, spec), jnp.clip(node, 0, spec.num_draft_tokens - 1)


def _is_valid(node: jax.Array, valid: jax.Array | None, spec: ConvCacheSpec) -> jax.Array:
    return (node >= 0) & (node < (spec.num_draft_tokens if valid is None else valid))


def links_hold(links: Sequence[jax.Array], valid: jax.Array | None, *, spec: ConvCacheSpec) -> jax.Array | bool:
    """Whether the links of all valid tokens point backwards; for a sliding row, to the token before each."""
    hold: jax.Array | bool = True
    for token, parent in enumerate(links):
        fits = parent == token - 1 if spec.storage == "sliding" else (parent >= -1) & (parent < token)
        hold &= fits if valid is None else fits | (valid <= token)
    return hold


def entry_of(path: jax.Array | None) -> Entry | None:
    """Nodes of paths `[B, D]` by place `[B]`, for the plain form."""
    if path is None:
        return None
    return lambda place: jnp.take_along_axis(path, place[:, None], axis=1, mode="promise_in_bounds")[:, 0]


def entry_in(path: Any, request: jax.Array) -> Entry | None:
    """Nodes of one request's path by place, out of a kernel's `[B, D]`."""
    return None if path is None else lambda place: path[request, place]


def take_state_after(
    conv_state: jax.Array, inputs: jax.Array, slot_runs: runs.Runs, rows: jax.Array, columns: Sequence[Column]
) -> jax.Array:
    """States `[(L,) B, *window]` in the spec's axis order out of pool and rows of inputs; zeros where not live.

    `slot_runs` says where the slots are; bits are preserved. Of every column only the array that has it is used.
    """
    spec, live = slot_runs.spec, slot_runs.live

    def stacked(field: str) -> jax.Array:
        return jnp.stack([getattr(one, field) for one in columns], axis=1)

    is_input = stacked("is_input")

    def taken(array: jax.Array, of: str, indices: jax.Array, starts: jax.Array, wanted: jax.Array) -> jax.Array:
        where = dataclasses.replace(
            slot_runs,
            of=of,
            rows=jnp.broadcast_to(indices[:, None], wanted.shape),
            starts=starts,
            live=wanted & live[:, None],
            num_columns=1,
        )
        found = runs.take(array, where)  # every column a run of its own
        return jnp.squeeze(found, axis=spec.column_axis)

    old = taken(conv_state, "state", slot_runs.rows, stacked("of_slot"), jnp.logical_not(is_input))
    new = taken(inputs, "windows", rows, stacked("of_inputs"), is_input)
    # Column by column one of the two is all zero bits, so that their union is the other.
    state = runs.union(old, new)
    return state if spec.axis_order == "time_major" else jnp.swapaxes(state, -1, -2)


def node_histories(
    state: Sequence[jax.Array],
    fresh: Sequence[jax.Array],
    links: Sequence[jax.Array],
    choose: Callable[[jax.Array, list[list[jax.Array]]], list[jax.Array]],
) -> list[list[jax.Array]]:
    """The S columns before each node of a tree: its parent's, moved on by the parent's input.

    `state` are the S columns before the root's children; `choose` picks the candidate number `link + 1`.
    """
    after, before = [list(state)], []
    for x, link in zip(fresh, links, strict=True):
        before.append(choose(link, after))
        after.append([*before[-1][1:], x])
    return before


def choose_plain(link: jax.Array, candidates: list[list[jax.Array]]) -> list[jax.Array]:
    """Candidate `link + 1` of arrays `[B, conv_dim]`, for links `[B]`; the first for a link outside.

    Of floats it has a gradient; a compiler may change a NaN's payload on the way, which it cannot do to integers.
    """
    chosen = candidates[0]
    for number, candidate in enumerate(candidates[1:]):
        is_it = (link == number)[:, None]
        chosen = [lax.select(jnp.broadcast_to(is_it, a.shape), b, a) for a, b in zip(chosen, candidate, strict=True)]
    return chosen


def path_to_node(parents: jax.Array, nodes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The path from a draft tree's root to a node of each request, as a commit takes it.

    Args:
      parents: int32 `[B, D]`, link of each node: -1 for the committed state, else the index of an earlier node.
      nodes: int32 `[B]`, the last accepted node of each request; -1, or anything else outside 0 … D-1, for none.

    Returns:
      `accepted_path` int32 `[B, D]`, the nodes from the root's child to `nodes`, then -1; and `num_accepted_tokens`
      int32 `[B]`, how many they are. 0 where there is no node, and where a link on the way does not point backwards.

    Raises:
      ValueError: shapes or dtypes do not fit.

    Example:
      >>> path, count = path_to_node(jnp.array([[-1, 0, 0, 2]]), jnp.array([3]))
      >>> path.tolist(), count.tolist()
      ([[0, 2, 3, -1]], [3])
    """
    problems = Problems()
    last = checks.index_array(problems, "nodes", nodes, None)
    links = checks.index_array(problems, "parents", parents, None if last is None else last.shape[0], "D")
    problems.raise_if_any()
    assert last is not None and links is not None
    tokens = links.shape[1]
    node = jnp.where((last >= 0) & (last < tokens), last, -1)
    backwards, holds = [], jnp.ones_like(node, jnp.bool_)
    for _ in range(tokens):  # the longest path takes every node
        backwards.append(node)
        place = jnp.clip(node, 0, max(tokens - 1, 0))[:, None]
        link = jnp.take_along_axis(links, place, axis=1, mode="promise_in_bounds")[:, 0]
        holds &= (node < 0) | ((link >= -1) & (link < node))
        node = jnp.where(holds & (node >= 0), link, -1)
    if not tokens:
        return links, jnp.zeros_like(last)
    reversed_path = jnp.stack(backwards, axis=1)
    count = jnp.where(holds, (reversed_path >= 0).sum(axis=1, dtype=jnp.int32), 0)
    place = count[:, None] - 1 - jnp.arange(tokens, dtype=jnp.int32)[None, :]
    path = jnp.take_along_axis(reversed_path, jnp.clip(place, 0, tokens - 1), axis=1, mode="promise_in_bounds")
    return jnp.where(place >= 0, path, -1), count
