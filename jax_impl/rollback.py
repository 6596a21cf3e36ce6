"""Everything a serving step rolls back after verification: conv groups, recurrent state and snapshots, in one call.

    conv_state[l, slot]      = window(n) of the verify buffer
    recurrent_state[l, slot] = step_states[l, row, n - 1]

A recurrent (SSM) state has no sliding window: verification leaves one dense state per token, and the commit picks the
accepted one. That is a dense window of one column whose channels are the state's elements, so it is committed by the
kernel of `jax_impl.commit`, in the same launch as the conv groups.

Reads the verify buffers and the step states, writes the pools at the named slots and nowhere else, bit for bit.

Source: contracts of the layout in `jax_impl.layout`; the update of conv and SSM pools after verification in SGLang.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.cache import ConvCache
from jax_impl.commit import Group, check_groups, check_indices, check_path, run_commit
from jax_impl.layout import ConvCacheSpec, Problems, dtype_name, shown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    """All state of a hybrid model's recurrent layers. A pytree.

    Attributes:
      conv: a `ConvCache`, or a pytree of them: q, k and v apart, groups of different width, one cache per layer.
      recurrent_state: pytree of pools `[L, C, …]`, or None.
    """

    conv: Any
    recurrent_state: Any = None


def commit_after_verify(
    cache: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    step_states: Any = None,
    window_rows: Any = None,
    step_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
    implementation: checks.Implementation | None = None,
    accepted_path: Any = None,
) -> Any:
    """Rolls every state of a cache back to each request's accepted token, and snapshots a second set.

    Skip rules as in `commit_conv_state`. Arrays of different storage may differ in two cases that `debug.check_commit`
    reports: a snapshot of a request without a slot, and a path through a node outside the valid ones.

    Args:
      cache: a `ConvCache`, a pytree of them, or a `HybridCache`. Donate it to update in place.
      state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        accepted_path, implementation: as in `commit_conv_state`. Of step states, those of the path's last node.
      step_states: of a `HybridCache` the states after each token, a pytree like `recurrent_state` of `[L, R, D, …]`.
      step_rows: int32 `[B]`, row of each request in `step_states`; None means `window_rows`. In the order of the
        requests, as verify makes them, it is `jnp.arange(B)`.

    Returns:
      The cache with its pools committed, of the type given; buffers are passed on as they are.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      As `commit_conv_state`: live slots of both sets are all different.

    Moves:
      Per live destination, L * S * conv_dim elements of each conv group and L * (elements of a state) of each
      recurrent one, read and written; one kernel launch (`commit_conv_state` says when there are more).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_impl import ConvCacheSpec, allocate_conv_cache
      >>> conv = allocate_conv_cache(ConvCacheSpec(1, 4, 2, 1, width=2, num_draft_tokens=3, dtype="float32"))
      >>> cache = HybridCache(conv, recurrent_state=jnp.zeros((1, 4, 2)))
      >>> steps = jnp.arange(12.0).reshape(1, 2, 3, 2)
      >>> cache = commit_after_verify(cache, jnp.array([3, 0]), jnp.array([2, 0]), step_states=steps)
      >>> cache.recurrent_state[0, 3].tolist(), cache.recurrent_state[0, 0].tolist()
      ([2.0, 3.0], [0.0, 0.0])
    """
    problems = Problems()
    hybrid = cache if isinstance(cache, HybridCache) else HybridCache(cache)
    caches, structure = _conv_caches(problems, hybrid.conv)
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
    of_steps = rows if step_rows is None else checks.index_array(problems, "step_rows", step_rows, batch)
    checks.implementation_name(problems, implementation)
    states, windows, specs = (
        structure.unflatten([getattr(one, field) for one in caches]) for field in ("conv_state", "conv_windows", "spec")
    )
    owner = "cache.conv" if isinstance(cache, HybridCache) else "cache"
    _check_one_size(problems, owner, [one.spec for one in caches])
    in_order = batch if window_rows is None else None
    conv = check_groups(problems, states, windows, specs, in_order=in_order, rows=rows, owner=owner)
    recurrent = _recurrent_groups(
        problems,
        ("cache.recurrent_state", hybrid.recurrent_state),
        step_states,
        in_order=batch if window_rows is None and step_rows is None else None,
        rows=of_steps,
        layer_axis=True,
        like=conv[0].spec if conv else None,
        shares_rows=window_rows is not None and step_rows is None,
    )
    path = check_path(problems, accepted_path, batch, [*conv, *(group for group, _ in recurrent)])
    problems.raise_if_any()
    assert call is not None
    call = dataclasses.replace(call, path=path)
    committed = run_commit(call, [*conv, *(group for group, _ in recurrent)], implementation)
    done = [dataclasses.replace(one, conv_state=pool) for one, pool in zip(caches, committed, strict=False)]
    return _like(cache, structure.unflatten(done), _as_given(hybrid.recurrent_state, recurrent, committed[len(conv) :]))


def _like(cache: Any, conv: Any, recurrent_state: Any) -> Any:
    """The conv caches and recurrent states in the form in which `cache` was given."""
    return HybridCache(conv, recurrent_state) if isinstance(cache, HybridCache) else conv


def _conv_caches(problems: Problems, conv: Any) -> tuple[list[ConvCache], Any]:
    """The caches of a pytree, and its structure; raises at once where it holds anything else, or nothing."""
    caches, structure = jax.tree.flatten(conv, is_leaf=lambda one: isinstance(one, ConvCache))
    strangers = [type(one).__name__ for one in caches if not isinstance(one, ConvCache)]
    if strangers or not caches:
        problems.add("cache", "a ConvCache, a pytree of them or a HybridCache", ", ".join(strangers) or "no ConvCache")
        problems.raise_if_any()
    return caches, structure


def _check_one_size(problems: Problems, owner: str, specs: Sequence[ConvCacheSpec]) -> None:
    """Records a problem unless all groups have as many slots and tokens, so that all skip the same requests."""
    for axis, field in (("C", "num_slots"), ("D", "num_draft_tokens")):
        sizes = sorted({getattr(spec, field) for spec in specs})
        if len(sizes) > 1:
            problems.add(owner, f"one {field} ({axis}) in all groups", sizes, "They would skip different requests.")


def commit_recurrent_state(
    state: Any,
    step_states: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
    layer_axis: bool = True,
    implementation: checks.Implementation | None = None,
    accepted_path: Any = None,
) -> Any:
    """Copies the state after each request's last accepted token into its slot.

        state[l, slot[b]] = step_states[l, row[b], n[b] - 1]        for every request b that is not skipped

    Args:
      state: pool `[L, C, …]` of bfloat16, float16 or float32 with any trailing shape, or a pytree of such pools. Donate
        it to update in place.
      step_states: `[L, R, D, …]`, states after each of the D tokens of a request; a pytree like `state`.
      state_indices, num_accepted_tokens, num_valid_tokens, null_slot, track_indices, track_num_tokens, accepted_path,
        implementation: as in `commit_conv_state`, with the same skip rules; of a path the last node counts.
      window_rows: int32 `[B]`, row of each request in `step_states`; None means row b for request b.
      layer_axis: False when each array is one layer's, `[C, …]` and `[R, D, …]`.

    Returns:
      `state` with the accepted states written. Bit copies.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Moves:
      L * live * (elements of a state) read and written, in one launch for all arrays and both index sets.

    Example:
      >>> import jax.numpy as jnp
      >>> steps = jnp.arange(8.0).reshape(1, 2, 4)  # no trailing axes: a state is one number
      >>> commit_recurrent_state(jnp.zeros((1, 3)), steps, jnp.array([2, 1]), jnp.array([4, 1])).tolist()
      [[0.0, 4.0, 3.0]]
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
    if not isinstance(layer_axis, bool | np.bool_):
        problems.add("layer_axis", "True or False", shown(layer_axis), "It is static: part of the program.")
        problems.raise_if_any()
    if not jax.tree.leaves(state):
        problems.add("state", "at least one array", jax.tree.structure(state))
    groups = _recurrent_groups(
        problems,
        ("state", state),
        step_states,
        in_order=batch if window_rows is None else None,
        rows=rows,
        layer_axis=layer_axis,
        like=None,
        shares_rows=False,
    )
    path = check_path(problems, accepted_path, batch, [group for group, _ in groups])
    problems.raise_if_any()
    assert call is not None
    call = dataclasses.replace(call, path=path)
    committed = run_commit(call, [group for group, _ in groups], implementation)
    return _as_given(state, groups, committed)


def _recurrent_groups(
    problems: Problems,
    named_state: tuple[str, Any],
    step_states: Any,
    *,
    in_order: int | None,
    rows: jax.Array | None,
    layer_axis: bool,
    like: ConvCacheSpec | None,
    shares_rows: bool,
) -> list[tuple[Group, tuple[int, ...]]]:
    """Each pool with its step states as a group of one-column windows, and the pool's shape as it was given.

    `in_order` requests use row b each. `like` is the geometry whose slots and draft tokens all pools must share, or
    None; with `shares_rows` its rows too.
    """
    name, state = named_state
    with_paths, structure = jax.tree_util.tree_flatten_with_path(state)
    if jax.tree.structure(step_states) != structure:
        problems.add("step_states", f"the pytree of `{name}`, {structure}", jax.tree.structure(step_states))
        return []
    groups = []
    for (path, pool), steps in zip(with_paths, jax.tree.leaves(step_states), strict=True):
        place = jax.tree_util.keystr(path)
        spec = _one_column_spec(problems, f"{name}{place}", pool, f"step_states{place}", steps, layer_axis, like)
        if spec is None:
            continue
        if in_order is not None and in_order > spec.max_requests:
            problems.add(
                f"step_states{place}",
                f"at least as many rows as requests, {in_order}",
                f"{spec.max_requests} rows",
                "Request b uses row b unless rows are given.",
            )
        if shares_rows and like and spec.max_requests != like.max_requests:
            problems.add(
                "step_rows",
                f"given, because step_states{place} has {spec.max_requests} rows and the verify buffer "
                f"{like.max_requests}",
                "None",
                "jnp.arange(B) for step states in the order of the requests.",
            )
        lead = pool.shape[: 1 + layer_axis]
        flat_pool = pool.reshape(*lead, 1, spec.conv_dim)
        flat_steps = steps.reshape(*steps.shape[: len(lead) + 1], 1, spec.conv_dim)
        groups.append((Group(spec, flat_pool, flat_steps, layer_axis, rows), pool.shape))
    return groups


def _one_column_spec(
    problems: Problems,
    state_name: str,
    pool: Any,
    steps_name: str,
    steps: Any,
    layer_axis: bool,
    like: ConvCacheSpec | None,
) -> ConvCacheSpec | None:
    """The geometry of one pool of recurrent states: S = 1, one channel per element of a state."""
    before = len(problems.messages)
    for name, array in ((state_name, pool), (steps_name, steps)):
        checks.float_array(problems, name, array)
    if len(problems.messages) > before:
        return None
    if dtype_name(pool.dtype) != dtype_name(steps.dtype):
        problems.add(
            steps_name, f"dtype {dtype_name(pool.dtype)} of the pool", dtype_name(steps.dtype), "States are never cast."
        )
    lead, axes = 1 + layer_axis, "layer, slot" if layer_axis else "slot"
    if pool.ndim < lead:
        problems.add(state_name, f"{axes}, …", pool.shape)
        return None
    trailing = pool.shape[lead:]
    middle = steps.shape[lead - 1 : lead + 1] if steps.ndim == pool.ndim + 1 else ("R", "D")
    expected = (*pool.shape[: lead - 1], *middle, *trailing)
    if steps.ndim != pool.ndim + 1 or steps.shape != expected:
        problems.add(
            steps_name,
            f"{axes.replace('slot', 'row, token')}, state = ({', '.join(map(str, expected))})",
            steps.shape,
            f"`{state_name}` has the shape {pool.shape}.",
        )
        return None
    num_layers = pool.shape[0] if layer_axis else 1
    sizes = {"C": pool.shape[lead - 1], "D": steps.shape[lead]}
    if like is not None:
        wanted = {"C": like.num_slots, "D": like.num_draft_tokens}
        if sizes != wanted:
            described = [", ".join(f"{axis} = {size}" for axis, size in one.items()) for one in (wanted, sizes)]
            problems.add(state_name, f"{described[0]} of the conv cache", described[1])
    if 0 in (*trailing, num_layers, *sizes.values()):
        hint = f"`{state_name}` has the shape {pool.shape}."
        problems.add(steps_name, "no axis of size 0 but rows", steps.shape, hint)
    if len(problems.messages) > before:
        return None
    return ConvCacheSpec(
        num_layers=num_layers,
        num_slots=sizes["C"],
        max_requests=steps.shape[lead - 1],
        conv_dim=math.prod(trailing),
        width=2,
        num_draft_tokens=sizes["D"],
        dtype=dtype_name(pool.dtype),
        storage="dense",
    )


def _as_given(state: Any, groups: Sequence[tuple[Group, tuple[int, ...]]], committed: Sequence[jax.Array]) -> Any:
    pools = [pool.reshape(shape) for pool, (_, shape) in zip(committed, groups, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(state), pools)


def accepted_from_index(accept_index: Any) -> jax.Array:
    """Accepted counts from the index rows that tree and chain verification kernels return.

    Args:
      accept_index: signed integers `[B, D]`: the accepted positions of each request first, -1 after them. What stands
        behind the first negative entry is not looked at.

    Returns:
      int32 `[B]`: entries before the first negative one, 0 … D.

    Raises:
      ValueError: not an integer array of two axes.

    Source:
      `accept_index` of SGLang's verification, whose step index is this count minus one.

    Example:
      >>> import jax.numpy as jnp
      >>> accepted_from_index(jnp.array([[0, 1, 2, -1], [4, -1, -1, -1], [-1, -1, -1, -1]])).tolist()
      [3, 1, 0]
    """
    problems = Problems()
    array = _integers(problems, "accept_index", accept_index, 2, "request, token = (B, D)")
    problems.raise_if_any()
    assert array is not None
    return jnp.cumprod(jnp.asarray(array >= 0), axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def track_tokens_at_boundary(seq_lens: Any, num_accepted_tokens: Any, interval: int) -> jax.Array:
    """The count whose state belongs into the prefix cache: where a request crosses a multiple of the interval.

    Args:
      seq_lens: signed integers `[B]`, committed tokens of each request before this step; of any width on the host.
      num_accepted_tokens: int32 `[B]`, n of each request in this step.
      interval: tokens between snapshots, a Python integer ≥ 1.

    Returns:
      int32 `[B]`: t in 1 … n such that `seq_lens + t` is the last multiple of `interval` in seq_lens+1 … seq_lens+n;
      0 where there is none, and for rows with n ≤ 0 or a negative length. It is the `track_num_tokens` of a commit.

    Raises:
      ValueError: shapes or types that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> track_tokens_at_boundary(jnp.array([62, 63, 64, 60]), jnp.array([4, 1, 4, 3]), 64).tolist()
      [2, 1, 0, 0]
    """
    problems = Problems()
    lengths = _integers(problems, "seq_lens", seq_lens, 1, "request = (B,)")
    batch = None if lengths is None else lengths.shape[0]
    accepted = checks.index_array(problems, "num_accepted_tokens", num_accepted_tokens, batch)
    if isinstance(interval, bool) or not isinstance(interval, int | np.integer) or not 1 <= interval < 2**31:
        problems.add("interval", "a Python integer from 1 to 2^31 - 1", shown(interval))
    problems.raise_if_any()
    assert lengths is not None and accepted is not None
    # Host integers may be wider than int32, so they are reduced where they are. The sum is unsigned: that of two int32
    # fits whatever they are.
    known = lengths >= 0
    every = np.asarray(interval, lengths.dtype) if np.iinfo(lengths.dtype).max >= interval else None
    rest = lengths if every is None else lengths % every
    past = jnp.where(jnp.asarray(known), jnp.asarray(rest.astype(np.int32)), 0).astype(jnp.uint32)
    counted = jnp.asarray(known) & (accepted > 0)
    grown = past + jnp.where(counted, accepted, 0).astype(jnp.uint32)
    beyond = (grown % jnp.uint32(interval)).astype(jnp.int32)
    return jnp.where(counted & (grown >= jnp.uint32(interval)), accepted - beyond, 0)


def _integers(problems: Problems, name: str, value: Any, ndim: int, axes: str) -> Any:
    """`value` as a signed integer array where it is, host integers in their own width; None with a problem recorded."""
    before = len(problems.messages)
    if checks.is_used_up(problems, name, value):
        return None
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:
        problems.add(name, axes, "a ragged list")
        return None
    if array.size == 0 and not hasattr(value, "dtype"):
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.signedinteger):
        problems.add(name, "an array of signed integers", dtype_name(array.dtype))
    if array.ndim != ndim:
        problems.add(name, axes, tuple(array.shape))
    return array if len(problems.messages) == before else None
