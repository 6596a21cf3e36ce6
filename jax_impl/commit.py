"""The masked scatter: every request's accepted state into its slot of the pool, in place.

    conv_state[:, slot[b]] = window(n[b]) of conv_windows[:, row[b]]       for every request b that is not skipped

Reads `conv_windows`, writes `conv_state` at the named slots and nowhere else, bit for bit. All reads see the buffer as
it was before the call, and no request reads the pool, so slots may repeat the pattern of rows in any permutation.

Source: contracts of the layout in `jax_impl.layout`; the scatter of SGLang's pull request #28302.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import checks, runs
from jax_impl.implementation import choose_implementation
from jax_impl.layout import ConvCacheSpec, Problems
from jax_impl.runs import live_slot
from jax_impl.windows import live_window, row_array, take_windows

# Bytes of one thread per run of channels. Nothing but copies: the widest access needs the fewest instructions.
THREAD_BYTES = 16


@dataclasses.dataclass(frozen=True)
class _Call:
    """Checked index arguments of one call, shared by all its groups of arrays.

    `destinations` holds one or two pairs (slots, accepted counts): the committed set and, if given, the tracked set.
    """

    destinations: tuple[tuple[jax.Array, jax.Array], ...]
    rows: jax.Array | None
    valid: jax.Array | None
    null_slot: int | None

    @property
    def batch(self) -> int:
        return self.destinations[0][0].shape[0]


def commit_conv_state(
    conv_state: Any,
    conv_windows: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    spec: Any,
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
    implementation: checks.Implementation | None = None,
) -> Any:
    """Copies each request's accepted window into its slot.

    A request is skipped, never clamped or wrapped, when its count is outside 1 … D or above its valid tokens, its slot
    is outside 0 … C-1 or the null slot, or its row is outside 0 … R-1. Counts of 0 are the usual way to skip.

    Args:
      conv_state: the pool, all layers `spec.state_shape` or one layer's `spec.state_shape[1:]`; or a pytree of either
        (one array per layer, several conv groups). Donate it to update in place.
      conv_windows: the verify buffer in the same form, or an equal pytree.
      state_indices: int32 `[B]`, slot of each request.
      num_accepted_tokens: int32 `[B]`, n of each request, 0 … D; 0 commits nothing.
      spec: geometry; for several conv groups a pytree of specs that is a prefix of `conv_state`'s.
      window_rows: int32 `[B]`, buffer row of each request; None means row b for request b.
      num_valid_tokens: int32 `[B]`, tokens that verify wrote; a request with n > v is skipped. None means D.
      null_slot: the pool's padding slot, or None.
      track_indices: int32 `[B]`, a second destination per request (a prefix-cache snapshot), or None.
      track_num_tokens: int32 `[B]`, the count whose window goes there; same skip rules. Given with `track_indices`.
      implementation: None chooses; "xla", "pallas" or "pallas_interpret" is obeyed or raises.

    Returns:
      `conv_state` with the windows written; a pytree when given one.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests name different slots, and track slots are not among the committed ones; the content of a slot named
      twice is unspecified, everything else is still right (`jax_impl.debug.check_commit` reports it).

    Moves:
      L * live * S * conv_dim elements read and written.

    Example:
      >>> import jax.numpy as jnp
      >>> spec = ConvCacheSpec(1, 2, 1, 1, width=4, num_draft_tokens=4, dtype="float32")
      >>> windows = jnp.arange(6.0).reshape(spec.windows_shape)
      >>> pool = jnp.full(spec.state_shape, 9.0)
      >>> commit_conv_state(pool, windows, jnp.array([1]), jnp.array([3]), spec=spec).ravel().tolist()
      [9.0, 9.0, 9.0, 2.0, 3.0, 4.0]
    """
    problems = Problems()
    call, batch = _check_indices(
        problems,
        state_indices,
        num_accepted_tokens,
        window_rows,
        num_valid_tokens,
        null_slot,
        track_indices,
        track_num_tokens,
    )
    checks.implementation_name(problems, implementation)
    groups = _check_groups(problems, conv_state, conv_windows, spec, None if window_rows is not None else batch)
    problems.raise_if_any()
    assert call is not None
    requests = call.batch * len(call.destinations)
    chosen = choose_implementation(implementation, [group.spec for group in groups], requests)
    commit = _commit_xla if chosen == "xla" else functools.partial(_commit_pallas, interpret=chosen != "pallas")
    committed = [commit(call, group) for group in groups]
    return jax.tree.unflatten(jax.tree.structure(conv_state), committed)


@dataclasses.dataclass(frozen=True)
class _Group:
    """One pool with its buffer."""

    spec: ConvCacheSpec
    conv_state: jax.Array
    conv_windows: jax.Array
    stacked: bool


def _check_indices(
    problems: Problems,
    state_indices: Any,
    num_accepted_tokens: Any,
    window_rows: Any,
    num_valid_tokens: Any,
    null_slot: Any,
    track_indices: Any,
    track_num_tokens: Any,
) -> tuple[_Call | None, int | None]:
    """The index arguments as int32 `[B]`, and B, the length of `state_indices`; None where they do not fit."""
    slots = checks.index_array(problems, "state_indices", state_indices, None)
    batch = None if slots is None else slots.shape[0]
    named = {
        "num_accepted_tokens": num_accepted_tokens,
        "window_rows": window_rows,
        "num_valid_tokens": num_valid_tokens,
        "track_indices": track_indices,
        "track_num_tokens": track_num_tokens,
    }
    arrays = {
        name: checks.index_array(problems, name, value, batch)
        for name, value in named.items()
        if value is not None or name == "num_accepted_tokens"
    }
    if (track_indices is None) != (track_num_tokens is None):
        missing = "track_indices" if track_indices is None else "track_num_tokens"
        problems.add(missing, "given together with the other track argument", "None")
    null = checks.null_slot_value(problems, null_slot)
    if problems.messages:
        return None, batch
    accepted = arrays["num_accepted_tokens"]
    assert slots is not None and accepted is not None
    destinations = [(slots, accepted)]
    if track_indices is not None:
        track, count = arrays["track_indices"], arrays["track_num_tokens"]
        assert track is not None and count is not None
        destinations.append((track, count))
    return _Call(tuple(destinations), arrays.get("window_rows"), arrays.get("num_valid_tokens"), null), batch


def _check_groups(problems: Problems, conv_state: Any, conv_windows: Any, spec: Any, batch: int | None) -> list[_Group]:
    """Pools with their buffers and specs, in the order of `conv_state`'s leaves; `batch` rows are used in order."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(conv_state)
    states = [state for _, state in with_paths]
    if not states:
        problems.add("conv_state", "at least one array", structure)
        return []
    windows, windows_structure = jax.tree.flatten(conv_windows)
    if structure != windows_structure:
        problems.add("conv_windows", f"the pytree of conv_state, {structure}", windows_structure)
        return []
    try:
        per_spec = jax.tree.map(lambda one, group: [one] * len(jax.tree.leaves(group)), spec, conv_state)
    except ValueError:
        problems.add(
            "spec", f"one ConvCacheSpec or a prefix of conv_state's pytree {structure}", jax.tree.structure(spec)
        )
        return []
    specs = jax.tree.leaves(per_spec)
    groups = []
    for one, (path, state), buffer in zip(specs, with_paths, windows, strict=True):
        checks.spec_argument(one)
        place = jax.tree_util.keystr(path)
        stacked = checks.cache_array(problems, f"conv_state{place}", state, one)
        checks.cache_array(problems, f"conv_windows{place}", buffer, one, stacked=stacked)
        if batch is not None:
            row_array(problems, None, batch, one)
        groups.append(_Group(one, state, buffer, bool(stacked)))
    return groups


def _commit_xla(call: _Call, group: _Group) -> jax.Array:
    spec, pool = group.spec, group.conv_state
    rows = jnp.arange(call.batch, dtype=jnp.int32) if call.rows is None else call.rows
    taken = []
    for slots, accepted in call.destinations:  # every window is read before any is written
        live = live_window(accepted, rows, call.valid, spec=spec) & live_slot(slots, call.null_slot, spec=spec)
        windows = take_windows(group.conv_windows, accepted, rows, live, spec=spec, stacked=group.stacked)
        taken.append((windows, runs.Runs(spec, slots, live, of="state", stacked=group.stacked)))
    for windows, where in taken:
        pool = runs.put(pool, windows, where)
    return pool


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about one launch; `block` channels per grid point, `vector` neighbouring ones per thread."""

    spec: ConvCacheSpec
    stacked: bool
    null_slot: int | None
    block: int
    vector: int
    interpret: bool


def _commit_kernel(
    # inputs
    inputs: dict[str, Any],
    # outputs
    conv_state_out: Any,
    *,
    plan: _Plan,
) -> None:
    """One channel block of one destination in one layer; a skipped destination ends after a few scalar reads."""
    from jax_impl.pallas_backend import grid_index, load_runs, load_tile, span, store_runs, when

    spec, batch, block, vector, interpret = (
        plan.spec,
        inputs["slots_in"].shape[0],
        plan.block,
        plan.vector,
        plan.interpret,
    )
    destination = grid_index("destination")
    tracked = destination >= batch  # the second half of the axis is the tracked set
    request = destination - jnp.where(tracked, batch, 0)
    slot, accepted = inputs["slots_in"][request], inputs["accepted_in"][request]
    if "track_slots_in" in inputs:
        slot = jnp.where(tracked, inputs["track_slots_in"][request], slot)
        accepted = jnp.where(tracked, inputs["track_accepted_in"][request], accepted)
    row = inputs["rows_in"][request] if "rows_in" in inputs else request
    valid = inputs["valid_in"][request] if "valid_in" in inputs else None
    live = live_window(accepted, row, valid, spec=spec) & live_slot(slot, plan.null_slot, spec=spec)

    @when(live)
    def _copy() -> None:
        layer = (grid_index("layer"),) if plan.stacked else ()
        channels = span(grid_index("block") * block, block)
        entry = (*layer, slot)
        first = accepted - 1
        dense = spec.storage == "dense"
        source = (*layer, row, first) if dense else (*layer, row)
        columns = span(0 if dense else first, spec.state_columns)
        everything = span(0, spec.state_columns)
        if spec.axis_order == "channel_major":
            shape = (block, spec.state_columns)
            window = load_tile(inputs["windows_in"], (*source, channels, columns), shape, interpret)
            conv_state_out[(*entry, channels, everything)] = window
            return
        shape = (spec.state_columns, block)
        runs_read = load_runs(inputs["windows_in"], (*source, columns, channels), shape, vector, interpret)
        store_runs(conv_state_out, (*entry, everything, channels), dict(enumerate(runs_read)), vector, interpret)


def _commit_pallas(call: _Call, group: _Group, *, interpret: bool, thread_bytes: int = THREAD_BYTES) -> jax.Array:
    """Launches the scatter: destinations × layers × channel blocks, all of them in one kernel.

    `thread_bytes` is for tests and measurements.
    """
    from jax_impl import pallas_backend

    if call.batch == 0 or group.spec.max_requests == 0:
        return group.conv_state
    spec = group.spec
    block, vector = pallas_backend.block_of(spec.conv_dim, spec.item_bytes, thread_bytes)
    (slots, accepted), *track = call.destinations
    inputs = {"windows_in": group.conv_windows, "slots_in": slots, "accepted_in": accepted}
    if track:
        inputs |= {"track_slots_in": track[0][0], "track_accepted_in": track[0][1]}
    if call.rows is not None:
        inputs["rows_in"] = call.rows
    if call.valid is not None:
        inputs["valid_in"] = call.valid
    plan = _Plan(spec, group.stacked, call.null_slot, block, vector, interpret)
    return _run_commit(inputs, group.conv_state, plan=plan)


@functools.partial(jax.jit, static_argnames="plan")
def _run_commit(inputs: dict[str, jax.Array], conv_state: jax.Array, *, plan: _Plan) -> jax.Array:
    """The launch, as a jitted function of its own so that equal groups share one traced kernel."""
    from jax_impl import pallas_backend

    spec = plan.spec
    sets = 2 if "track_slots_in" in inputs else 1
    (conv_state,) = pallas_backend.call_in_place(
        functools.partial(_commit_kernel, plan=plan),
        inputs,
        (conv_state,),
        grid={
            "destination": sets * inputs["slots_in"].shape[0],
            "layer": spec.num_layers if plan.stacked else 1,
            "block": spec.conv_dim // plan.block,
        },
        name=f"specconv_commit_{spec.axis_order}",
        interpret=plan.interpret,
    )
    return conv_state
