"""The windowed gather: the state after each request's accepted tokens, read out of the verify buffer.

    sliding   window(n) = columns[n - 1 : n - 1 + S]        dense   window(n) = windows[n - 1]
    inputs    window(n) = last S columns of [slot, inputs of the first n tokens]

Reads `conv_windows`, with storage "inputs" the pool too, and writes nothing. A serving step commits without it; it is
for inspection, for moving states between caches, and for engines that keep their own scatter.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import checks, history, runs
from jax_impl.layout import ConvCacheSpec, Problems


def gather_windows(
    conv_windows: jax.Array,
    num_accepted_tokens: Any,
    *,
    spec: ConvCacheSpec,
    window_rows: Any = None,
    conv_state: jax.Array | None = None,
    state_indices: Any = None,
    null_slot: int | None = None,
    accepted_path: Any = None,
) -> jax.Array:
    """Each request's state after its accepted tokens.

    Args:
      conv_windows: verify buffer, all layers `spec.windows_shape` or one layer's `spec.windows_shape[1:]`.
      num_accepted_tokens: int32 `[B]`, n of each request; a count outside 1 … D reads zeros.
      spec: geometry.
      window_rows: int32 `[B]`, buffer row of each request; None means row b for request b. A row outside 0 … R-1 reads
        zeros.
      conv_state, state_indices, null_slot: with storage "inputs" the pool, the slot of each request, int32 `[B]`, and
        the padding slot: a slot outside the pool, or that one, reads zeros. Not given with other storages.
      accepted_path: int32 `[B, D]`, nodes of a draft tree as in `commit_conv_state`; None is a chain.

    Returns:
      `[L, B, S, conv_dim]` (time_major) or `[L, B, conv_dim, S]` (channel_major), without L for one layer's buffer;
      S = `spec.state_len`. Bit copies.

    Raises:
      ValueError: shapes or dtypes do not fit the spec, or B > R without `window_rows`.

    Moves:
      L * B * S * conv_dim elements read and written.

    Example:
      >>> import jax.numpy as jnp
      >>> spec = ConvCacheSpec(1, 1, 1, 1, width=4, num_draft_tokens=4, dtype="float32")
      >>> columns = jnp.arange(6.0).reshape(spec.windows_shape)
      >>> gather_windows(columns, jnp.array([2]), spec=spec).ravel().tolist()
      [1.0, 2.0, 3.0]
    """
    checks.spec_argument(spec)
    problems = Problems()
    stacked = checks.cache_array(problems, "conv_windows", conv_windows, spec)
    accepted = checks.index_array(problems, "num_accepted_tokens", num_accepted_tokens, None)
    batch = None if accepted is None else accepted.shape[0]
    rows = row_array(problems, window_rows, batch, spec)
    path, slots = accepted_path, None
    if accepted_path is not None:
        path = checks.index_array(problems, "accepted_path", accepted_path, batch, spec.num_draft_tokens)
    null = None
    if spec.storage == "inputs":
        hint, of = "The rows hold the new inputs only.", 'with storage "inputs"'
        if conv_state is None:
            problems.add("conv_state", f"the pool {of}", None, hint)
        else:
            checks.cache_array(problems, "conv_state", conv_state, spec, stacked=stacked)
        if state_indices is None:
            problems.add("state_indices", f"the slot of each request {of}", None, hint)
        else:
            slots = checks.index_array(problems, "state_indices", state_indices, batch)
        null = checks.null_slot_value(problems, null_slot)
    else:
        given = {"conv_state": conv_state, "state_indices": state_indices, "null_slot": null_slot}
        for name, value in given.items():
            if value is not None:
                problems.add(
                    name, f'None with storage "{spec.storage}"', checks.given(value), "Its rows hold whole windows."
                )
    problems.raise_if_any()
    assert accepted is not None and rows is not None
    live = live_window(accepted, rows, None, spec=spec)
    if slots is None:
        return take_windows(conv_windows, accepted, rows, live, path, spec=spec, stacked=bool(stacked))
    assert conv_state is not None
    within, columns = history.columns_after(accepted, history.entry_of(path), None, spec=spec)
    live &= within & runs.live_slot(slots, null, spec=spec)
    where = runs.Runs(spec, slots, live, of="state", stacked=bool(stacked))
    return history.take_state_after(conv_state, conv_windows, where, rows, columns)


def row_array(problems: Problems, window_rows: Any, batch: int | None, spec: ConvCacheSpec) -> jax.Array | None:
    """`window_rows` as int32 `[B]`; None becomes 0 … B-1, which needs B ≤ R."""
    if window_rows is not None:
        return checks.index_array(problems, "window_rows", window_rows, batch)
    if batch is None:
        return None
    if batch > spec.max_requests:
        problems.add(
            "window_rows",
            f"given, or at most max_requests = {spec.max_requests} requests",
            f"None with {batch} requests",
            "Without it request b uses buffer row b.",
        )
        return None
    return jnp.arange(batch, dtype=jnp.int32)


def live_window(accepted: jax.Array, rows: jax.Array, valid: jax.Array | None, *, spec: ConvCacheSpec) -> jax.Array:
    """Requests whose accepted count and row name a window: never clamped, never wrapped."""
    live = (accepted >= 1) & (accepted <= spec.num_draft_tokens) & (rows >= 0) & (rows < spec.max_requests)
    if valid is not None:
        live &= (accepted <= valid) & (valid <= spec.num_draft_tokens)
    return live


def take_windows(
    conv_windows: jax.Array,
    accepted: jax.Array,
    rows: jax.Array,
    live: jax.Array,
    path: jax.Array | None = None,
    valid: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    stacked: bool,
) -> jax.Array:
    """`gather_windows` on checked arguments, of rows that hold whole windows."""
    columns, first = spec.state_columns if spec.storage == "sliding" else None, accepted - 1
    if path is not None:
        within, first = history.token_after(accepted, history.entry_of(path), valid, spec=spec)
        live &= within
    where = runs.Runs(spec, rows, live, of="windows", stacked=stacked, starts=first, num_columns=columns)
    return runs.take(conv_windows, where)
