"""The masked scatter: every request's accepted state into its slot of the pool, in place.

    conv_state[:, slot[b]] = window(n[b]) of conv_windows[:, row[b]]       for every request b that is not skipped

Reads `conv_windows`, writes `conv_state` at the named slots and nowhere else, bit for bit. All reads see the buffer as
it was before the call, and no request reads the pool, so slots may repeat the pattern of rows in any permutation.
Rows of storage "inputs" are the exception: their window is made of the request's own slot and its inputs, both windows
of a request of the slot as it was before the call.

One call takes any number of groups: pools with their own geometry, one array per layer, and recurrent states, which
`jax_impl.rollback` brings as groups whose window is one column. All groups that the kernel takes, and both index sets,
share one launch: a grid of destinations × units, where the units of a group are its layers × channel blocks.

Source: contracts of the layout in `jax_impl.layout`; the scatter of SGLang's pull request #28302.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl import checks, history, runs
from jax_impl.entries import Block, load_either, store_entry
from jax_impl.implementation import choose_implementation
from jax_impl.layout import ConvCacheSpec, Problems
from jax_impl.runs import live_slot
from jax_impl.windows import live_window, row_array, take_windows

# Bytes of one thread per run of channels. Nothing but copies: the widest access needs the fewest instructions. That
# holds for states of one column too: with 32 bytes a thread an H200 takes 1.07 times as long, with 64 1.3 times.
THREAD_BYTES = 16
# Pools of one launch; a kernel has 4 KiB of parameters, and each pool and buffer takes one.
MAX_GROUPS = 64


@dataclasses.dataclass(frozen=True)
class Call:
    """Checked index arguments of one call, shared by all its groups of arrays.

    `destinations` holds one or two pairs (slots, accepted counts): the committed set and, if given, the tracked set.
    `path` `[B, D]` has the nodes that are counted, None where they are those of a chain.
    """

    destinations: tuple[tuple[jax.Array, jax.Array], ...]
    valid: jax.Array | None
    null_slot: int | None
    path: jax.Array | None = None

    @property
    def batch(self) -> int:
        return self.destinations[0][0].shape[0]


@dataclasses.dataclass(frozen=True)
class Group:
    """One pool with its buffer; `rows` None means row b for request b."""

    spec: ConvCacheSpec
    state: jax.Array
    windows: jax.Array
    stacked: bool
    rows: jax.Array | None


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
    accepted_path: Any = None,
) -> Any:
    """Copies each request's accepted window into its slot.

    A request is skipped, never clamped or wrapped, when its count is outside 1 … D or above its valid tokens, its slot
    is outside 0 … C-1 or the null slot, or its row is outside 0 … R-1. Counts of 0 are the usual way to skip.

    With storage "inputs" the window is the last S columns of the request's slot and its accepted inputs, also for the
    tracked set, which is then skipped too where `state_indices` names no slot.

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
      accepted_path: int32 `[B, D]`, of a draft tree: the accepted nodes from the root on, of which the first
        `num_accepted_tokens` (and `track_num_tokens`) count; `jax_impl.path_to_node` makes it. A destination whose
        window needs a node outside the valid ones is skipped; with storage "sliding", one whose path is no chain.
        None is a chain.

    Returns:
      `conv_state` with the windows written; a pytree when given one.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests name different slots, and track slots are not among the committed ones; the content of a slot named
      twice is unspecified, everything else is still right (`jax_impl.debug.check_commit` reports it). With storage
      "inputs" a snapshot is unspecified too whose own slot another request commits or snapshots to.

    Moves:
      L * live * S * conv_dim elements read and written, in one kernel launch for all groups and both index sets
      together (one for every 64 groups; the plain form takes a gather and a scatter per group and set).

    Example:
      >>> import jax.numpy as jnp
      >>> spec = ConvCacheSpec(1, 2, 1, 1, width=4, num_draft_tokens=4, dtype="float32")
      >>> windows = jnp.arange(6.0).reshape(spec.windows_shape)
      >>> pool = jnp.full(spec.state_shape, 9.0)
      >>> commit_conv_state(pool, windows, jnp.array([1]), jnp.array([3]), spec=spec).ravel().tolist()
      [9.0, 9.0, 9.0, 2.0, 3.0, 4.0]
    """
    problems = Problems()
    call, rows, batch = check_indices(
        problems,
        state_indices,
        num_accepted_tokens,
        window_rows=window_rows,
        num_valid_tokens=num_valid_tokens,
        null_slot=null_slot,
        track_indices=track_indices,
        track_num_tokens=track_num_tokens,
    )
    checks.implementation_name(problems, implementation)
    in_order = batch if window_rows is None else None
    groups = check_groups(problems, conv_state, conv_windows, spec, in_order=in_order, rows=rows)
    path = check_path(problems, accepted_path, batch, groups)
    problems.raise_if_any()
    assert call is not None
    call = dataclasses.replace(call, path=path)
    return jax.tree.unflatten(jax.tree.structure(conv_state), run_commit(call, groups, implementation))


def check_indices(
    problems: Problems,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    window_rows: Any,
    num_valid_tokens: Any,
    null_slot: Any,
    track_indices: Any,
    track_num_tokens: Any,
) -> tuple[Call | None, jax.Array | None, int | None]:
    """The call, `window_rows` as int32 `[B]` if given, and B, the length of `state_indices`; None where they misfit."""
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
        return None, arrays.get("window_rows"), batch
    accepted = arrays["num_accepted_tokens"]
    assert slots is not None and accepted is not None
    destinations = [(slots, accepted)]
    if track_indices is not None:
        track, count = arrays["track_indices"], arrays["track_num_tokens"]
        assert track is not None and count is not None
        destinations.append((track, count))
    return Call(tuple(destinations), arrays.get("num_valid_tokens"), null), arrays.get("window_rows"), batch


def check_path(problems: Problems, path: Any, batch: int | None, groups: Sequence[Group]) -> jax.Array | None:
    """`accepted_path` as int32 `[B, D]`, or None; records a problem unless D is that of every group."""
    if path is None:
        return None
    lengths: list[int | Literal["D"]] = [*sorted({group.spec.num_draft_tokens for group in groups})] or ["D"]
    return [checks.index_array(problems, "accepted_path", path, batch, tokens) for tokens in lengths][-1]


def check_groups(
    problems: Problems,
    conv_state: Any,
    conv_windows: Any,
    spec: Any,
    *,
    in_order: int | None,
    rows: jax.Array | None,
    owner: str = "",
) -> list[Group]:
    """Pools with their buffers and specs, in the order of `conv_state`'s leaves; `in_order` requests use row b each.

    `owner` is what holds caches of both, for messages: its leaves are named `owner['q'].conv_state`.
    """
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
        names = [f"{owner}{place}.{array}" if owner else f"{array}{place}" for array in ("conv_state", "conv_windows")]
        stacked = checks.cache_array(problems, names[0], state, one)
        checks.cache_array(problems, names[1], buffer, one, stacked=stacked)
        if in_order is not None:
            row_array(problems, None, in_order, one)
        groups.append(Group(one, state, buffer, bool(stacked), rows))
    return groups


def run_commit(call: Call, groups: Sequence[Group], implementation: checks.Implementation | None) -> list[jax.Array]:
    """The groups' pools after the call. Unless an implementation is named, each group takes the best it can."""
    requests = call.batch * len(call.destinations)
    specs = [group.spec for group in groups]
    if implementation is None:
        chosen = [choose_implementation(None, [spec], requests) for spec in specs]
    else:
        chosen = [choose_implementation(implementation, specs, requests)] * len(groups)
    in_kernel = [group for group, name in zip(groups, chosen, strict=True) if name != "xla"]
    launched = iter(_commit_pallas(call, in_kernel, interpret="pallas_interpret" in chosen))
    return [
        _commit_xla(call, group) if name == "xla" else next(launched)
        for group, name in zip(groups, chosen, strict=True)
    ]


def _commit_xla(call: Call, group: Group) -> jax.Array:
    spec, pool = group.spec, group.state
    rows = jnp.arange(call.batch, dtype=jnp.int32) if group.rows is None else group.rows
    # What is made of the pool, as step states are, is made before it is written and not fused into the write.
    buffer = lax.optimization_barrier(group.windows)
    source, taken = call.destinations[0][0], []
    for slots, accepted in call.destinations:  # every window is read before any is written
        live = live_window(accepted, rows, call.valid, spec=spec) & live_slot(slots, call.null_slot, spec=spec)
        if spec.storage == "inputs":
            live &= live_slot(source, call.null_slot, spec=spec)
            within, columns = history.columns_after(accepted, history.entry_of(call.path), call.valid, spec=spec)
            live &= within
            where = runs.Runs(spec, source, live, of="state", stacked=group.stacked)
            windows = lax.optimization_barrier(history.take_state_after(pool, buffer, where, rows, columns))
        else:
            if call.path is not None:
                live &= history.token_after(accepted, history.entry_of(call.path), call.valid, spec=spec)[0]
            windows = take_windows(
                buffer, accepted, rows, live, call.path, call.valid, spec=spec, stacked=group.stacked
            )
        taken.append((windows, runs.Runs(spec, slots, live, of="state", stacked=group.stacked)))
    for windows, where in taken:
        pool = runs.put(pool, windows, where)
    return pool


@dataclasses.dataclass(frozen=True)
class _GroupPlan:
    """What is static about one group in a launch.

    Attributes:
      rows: which of the launch's row arrays is the group's; None means row b for request b.
      block: channels of one unit. vector: neighbouring channels of one thread.
      first_unit: where the group's units begin among those of all groups.
    """

    spec: ConvCacheSpec
    stacked: bool
    rows: int | None
    block: int
    vector: int
    first_unit: int

    @property
    def blocks(self) -> int:
        """Units of one layer."""
        return self.spec.conv_dim // self.block

    @property
    def end(self) -> int:
        return self.first_unit + self.blocks * (self.spec.num_layers if self.stacked else 1)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about one launch."""

    groups: tuple[_GroupPlan, ...]
    null_slot: int | None
    interpret: bool


def _commit_kernel(
    # inputs
    inputs: dict[str, Any],
    # outputs
    *states_out: Any,
    plan: _Plan,
) -> None:
    """One unit of one destination: a channel block of one layer of one group.

    Where a window is made of the slot that it goes to, one grid point serves both destinations of a request, because
    both need the slot as it was.
    """
    from jax_impl.pallas_backend import grid_index, when

    batch = inputs["slots_in"].shape[0]
    destination, unit = grid_index("destination"), grid_index("unit")
    tracked = destination >= batch  # the second half of the axis is the tracked set
    request = destination - jnp.where(tracked, batch, 0)
    sets = [(inputs["slots_in"][request], inputs["accepted_in"][request])]
    slot, accepted = sets[0]
    if "track_slots_in" in inputs:
        sets.append((inputs["track_slots_in"][request], inputs["track_accepted_in"][request]))
        slot, accepted = (jnp.where(tracked, track, own) for own, track in zip(*sets, strict=True))
    valid = inputs["valid_in"][request] if "valid_in" in inputs else None
    entry = history.entry_in(inputs.get("path_in"), request)

    def search(first: int, end: int) -> None:
        """Finds the unit's group among groups first … end-1, halving them: few comparisons however many there are."""
        if end - first == 1:
            group, windows_in, state_out = plan.groups[first], inputs["windows_in"][first], states_out[first]
            row = request if group.rows is None else inputs["rows_in"][group.rows][request]
            if group.spec.storage == "inputs":
                make = functools.partial(
                    _move_unit, windows_in, state_out, sets, row, valid, entry, group=group, plan=plan
                )
                when(jnp.logical_not(tracked))(make)
                return
            live = live_window(accepted, row, valid, spec=group.spec) & live_slot(slot, plan.null_slot, spec=group.spec)
            token = accepted - 1
            if entry is not None:
                within, token = history.token_after(accepted, entry, valid, spec=group.spec)
                live &= within
            copy = functools.partial(
                _copy_unit, windows_in, state_out, (slot, row, token), group=group, interpret=plan.interpret
            )
            when(live)(copy)
            return
        middle = (first + end) // 2
        before = unit < plan.groups[middle].first_unit
        when(before)(functools.partial(search, first, middle))
        when(jnp.logical_not(before))(functools.partial(search, middle, end))

    search(0, len(plan.groups))


def _copy_unit(
    # inputs
    windows_in: Any,
    # outputs
    state_out: Any,
    request: tuple[jax.Array, jax.Array, jax.Array],
    *,
    group: _GroupPlan,
    interpret: bool,
) -> None:
    """Copies the window of a live request (slot, row, its first column or token) in this unit's channels."""
    from jax_impl.pallas_backend import load_runs, load_tile, span, store_runs

    spec, block, (slot, row, first) = group.spec, group.block, request
    layer, channels = _place_of_unit(group)
    entry = (*layer, slot)
    dense = spec.storage == "dense"
    source = (*layer, row, first) if dense else (*layer, row)
    columns = span(0 if dense else first, spec.state_columns)
    everything = span(0, spec.state_columns)
    if spec.axis_order == "channel_major":
        shape = (block, spec.state_columns)
        state_out[(*entry, channels, everything)] = load_tile(
            windows_in, (*source, channels, columns), shape, interpret
        )
        return
    shape, how = (spec.state_columns, block), (group.vector, interpret)
    runs_read = load_runs(windows_in, (*source, columns, channels), shape, *how)
    store_runs(state_out, (*entry, everything, channels), dict(enumerate(runs_read)), *how)


def _place_of_unit(group: _GroupPlan) -> tuple[tuple[jax.Array, ...], Any]:
    """Layer, of stacked arrays, and channels of this unit."""
    from jax_impl.pallas_backend import grid_index, span

    unit = grid_index("unit") - group.first_unit
    layer = (lax.div(unit, jnp.int32(group.blocks)),) if group.stacked else ()
    return layer, span(lax.rem(unit, jnp.int32(group.blocks)) * group.block, group.block)


def _move_unit(
    # inputs
    windows_in: Any,
    # outputs: read too, at the request's own slot
    state_out: Any,
    sets: Sequence[tuple[jax.Array, jax.Array]],
    row: jax.Array,
    valid: jax.Array | None,
    entry: history.Entry | None,
    *,
    group: _GroupPlan,
    plan: _Plan,
) -> None:
    """Makes the windows of a request's destinations out of its slot and its inputs, in this unit's channels."""
    from jax_impl.pallas_backend import when

    spec, source = group.spec, sets[0][0]
    layer, channels = _place_of_unit(group)
    block = Block(spec, group.block, group.vector, plan.interpret)
    readable = live_slot(source, plan.null_slot, spec=spec)
    chosen = []
    for slot, accepted in sets:
        within, columns = history.columns_after(accepted, entry, valid, spec=spec)
        live = readable & within & live_slot(slot, plan.null_slot, spec=spec)
        chosen.append((live & live_window(accepted, row, valid, spec=spec), slot, columns))

    def window(columns: Sequence[history.Column]) -> list[jax.Array]:
        return load_either(
            (state_out, [(*layer, source, one.of_slot) for one in columns]),
            (windows_in, [(*layer, row, one.of_inputs) for one in columns]),
            [one.is_input for one in columns],
            channels,
            plan=block,
        )

    def store(slot: jax.Array, columns: list[jax.Array]) -> None:
        store_entry(state_out, (*layer, slot), channels, columns, None, plan=block)

    (live, slot, columns), *track = chosen

    def committed() -> None:
        store(slot, window(columns))

    if not track:
        when(live)(committed)
        return
    ((snapshot, track_slot, track_columns),) = track

    def both() -> None:
        made = window(track_columns), window(columns)  # both are loaded before either is stored
        store(track_slot, made[0])
        when(live)(functools.partial(store, slot, made[1]))

    when(live & jnp.logical_not(snapshot))(committed)
    when(snapshot)(both)


def _commit_pallas(
    call: Call, groups: Sequence[Group], *, interpret: bool, thread_bytes: int = THREAD_BYTES
) -> list[jax.Array]:
    """Launches the scatter of all groups in one kernel, or one for every `MAX_GROUPS` of them.

    `thread_bytes` is for tests and measurements.
    """
    done: list[jax.Array] = []
    for first in range(0, len(groups), MAX_GROUPS):
        some = groups[first : first + MAX_GROUPS]
        used = [group for group in some if call.batch and group.spec.max_requests]
        written = iter(_launch(call, used, interpret=interpret, thread_bytes=thread_bytes) if used else ())
        done += [next(written) if any(group is one for one in used) else group.state for group in some]
    return done


def _launch(call: Call, groups: Sequence[Group], *, interpret: bool, thread_bytes: int) -> tuple[jax.Array, ...]:
    from jax_impl import pallas_backend

    rows: list[jax.Array] = []
    plans: list[_GroupPlan] = []
    for group in groups:
        spec, number = group.spec, None
        if group.rows is not None:
            number = next((i for i, known in enumerate(rows) if known is group.rows), len(rows))
            rows += [group.rows] if number == len(rows) else []
        block, vector = pallas_backend.block_of(spec.conv_dim, spec.item_bytes, thread_bytes)
        first_unit = plans[-1].end if plans else 0
        plans.append(_GroupPlan(spec, group.stacked, number, block, vector, first_unit))
    (slots, accepted), *track = call.destinations
    inputs: dict[str, Any] = {
        "windows_in": [group.windows for group in groups],
        "slots_in": slots,
        "accepted_in": accepted,
        "rows_in": rows,
    }
    if track:
        inputs |= {"track_slots_in": track[0][0], "track_accepted_in": track[0][1]}
    if call.valid is not None:
        inputs["valid_in"] = call.valid
    if call.path is not None:
        inputs["path_in"] = call.path
    plan = _Plan(tuple(plans), call.null_slot, interpret)
    return _run_commit(inputs, tuple(group.state for group in groups), plan=plan)


@functools.partial(jax.jit, static_argnames="plan")
def _run_commit(inputs: dict[str, Any], states: tuple[jax.Array, ...], *, plan: _Plan) -> tuple[jax.Array, ...]:
    """The launch, as a jitted function of its own so that equal calls share one traced kernel."""
    from jax_impl import pallas_backend

    sets = 2 if "track_slots_in" in inputs else 1
    orders = sorted({group.spec.axis_order for group in plan.groups})
    return pallas_backend.call_in_place(
        functools.partial(_commit_kernel, plan=plan),
        inputs,
        states,
        grid={"destination": sets * inputs["slots_in"].shape[0], "unit": plan.groups[-1].end},
        name=f"specconv_commit_{'_and_'.join(orders)}",
        interpret=plan.interpret,
    )
