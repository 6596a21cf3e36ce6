"""The rollback after verification: every request's accepted state into its slot, in place.

    conv_state[:, slot[b]]      = window(n[b]) of conv_windows[:, row[b]]
    recurrent_state[:, slot[b]] = step_states[:, row[b], n[b] - 1]          for every request b that is not skipped

and, where `track_indices` are given, the same once more with the tracked slots and counts: a snapshot of an earlier
step for the prefix cache. All functions here check everything that they are given before they write anything, and read
what was there before the call: a buffer whose range of memory overlaps that of a pool is copied first.

A request is skipped, never clamped or wrapped, when its count is below 1, above D or above its valid tokens, its valid
tokens are outside 1 … D, its slot is outside the pool or the null slot, or its row is outside the buffer; with an
`accepted_path`, when its window needs an entry that is none of its valid tokens.

A conv buffer of inputs storage has no windows: each is put together from the old state in the slot and the inputs in
the row. So a tracked window, too, needs the slot of its request.

A recurrent commit is the commit of a dense buffer whose windows are one column of prod(…) channels, so both backends
need one commit only. The Triton backend launches once for each tensor of a structure, for both index sets together:
different pools have different sizes and addresses. Stack the layers where launches count; a stacked pool is one tensor.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from torch_ref.cache import ConvCache, HybridCache
from torch_ref.checks import (
    FLOATS,
    SHARED_DEVICE,
    Call,
    Implementation,
    IndexArray,
    Indices,
    apart,
    check_null_slot,
    check_rows,
    choose_backend,
    is_strided,
    leaves_of,
    memory_range,
    shares_memory,
)
from torch_ref.layout import LARGEST, ConvCacheSpec, as_integer, mismatch, shown

Cache = TypeVar("Cache")


@torch.no_grad()
def commit_conv_state(
    conv_state: Any,
    conv_windows: Any,
    state_indices: IndexArray,
    num_accepted_tokens: IndexArray,
    *,
    spec: Any,
    window_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    track_indices: IndexArray | None = None,
    track_num_tokens: IndexArray | None = None,
    implementation: Implementation = None,
    accepted_path: IndexArray | None = None,
) -> Any:
    """Copies each request's accepted window into its slot, bit for bit, and leaves everything else as it is.

    Args:
      conv_state: the pool, `spec.state_shape`, or one layer of it; or a structure of such tensors (lists, tuples and
        dicts, nested as you like): one tensor per layer, several conv groups.
      conv_windows: the buffer, of the same structure.
      state_indices: slot of each request, int `[B]`.
      num_accepted_tokens: n, int `[B]`; 0 commits nothing.
      spec: one `ConvCacheSpec`, or the upper part of the same structure with one for each branch.
      window_rows: buffer row of each request; None for row b.
      num_valid_tokens: v, int `[B]`, as given to verify.
      null_slot: a slot that is never written, or None.
      track_indices, track_num_tokens: a second slot and count for each request, under the same rules; both or none. In
        inputs storage its window is made from the old state in `state_indices`, too, and is skipped without one.
      implementation: "eager", "triton", or None: triton for CUDA tensors, eager elsewhere.
      accepted_path: nodes of a draft tree from the root to the last accepted one, int `[B, D]`: of a row the first n
        count, and for the tracked window the first `track_num_tokens`. Of these a stored window needs the last one,
        inputs storage the last S; they are below v, in sliding storage entry n-1 is n-1, else the destination is
        skipped. None for a chain.

    Returns:
      `conv_state` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Assumes: live requests have different slots, and a tracked slot is one that no request commits, in inputs storage
      none of the live `state_indices` at all; of two with one slot, either may win, other slots are right.
    Moves: 2 * S * conv_dim elements per live request, layer and index set.
    """
    wrong: list[str] = []
    groups = [
        _conv_group(Call(group, state, wrong, path), state, windows)
        for path, state, windows, group in leaves_of(
            ("conv_state", "conv_windows"), (conv_state, conv_windows), wrong, spec
        )
    ]
    if not groups and not wrong:
        wrong.append(mismatch("conv_state", "at least one tensor", shown(conv_state)))
    indices = _Given(
        state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        accepted_path,
    )  # fmt: skip
    _commit(groups, indices, implementation, wrong)
    return conv_state


@torch.no_grad()
def commit_recurrent_state(
    state: Any,
    step_states: Any,
    state_indices: IndexArray,
    num_accepted_tokens: IndexArray,
    *,
    window_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    track_indices: IndexArray | None = None,
    track_num_tokens: IndexArray | None = None,
    layer_axis: bool = True,
    implementation: Implementation = None,
    accepted_path: IndexArray | None = None,
) -> Any:
    """Copies each request's recurrent state after its accepted tokens into its slot, bit for bit.

    Args:
      state: the pool, `[layer, slot, …]` = (L, C, …); "…" is any shape, also none. float32, bfloat16 or float16. Layer
        and slot strides are free, the entry "…" is contiguous. Or a structure of such tensors (lists, tuples and dicts,
        nested as you like).
      step_states: the state after every token of the step, `[layer, row, token, …]` = (L, R, D, …), in the dtype of
        `state`; layer, row and token strides are free. The same structure.
      state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        implementation, accepted_path: as for `commit_conv_state`; rows are those of `step_states`, and so is D.
      layer_axis: False when each tensor is one layer's, `[slot, …]` and `[row, token, …]`.

    Returns:
      `state` itself.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Assumes: as for `commit_conv_state`.
    Moves: 2 * prod(…) elements per live request, layer and index set.

    Example:
      >>> state, steps = torch.zeros(1, 3), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
      >>> commit_recurrent_state(state, steps, [2, 0], [2, 0]).tolist()
      [[0.0, 0.0, 2.0]]
    """
    wrong: list[str] = []
    names = ("state", "step_states")
    if not isinstance(layer_axis, bool):
        raise ValueError(mismatch("layer_axis", "True or False", shown(layer_axis)))
    groups = [
        _recurrent_group((f"state{path}", f"step_states{path}"), (held, steps), wrong, layer_axis=layer_axis)
        for path, held, steps, _ in leaves_of(names, (state, step_states), wrong)
    ]
    if not groups and not wrong:
        wrong.append(mismatch("state", "at least one tensor", shown(state)))
    indices = _Given(
        state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        accepted_path,
    )  # fmt: skip
    _commit(groups, indices, implementation, wrong)
    return state


@torch.no_grad()
def commit_after_verify(
    cache: Cache,
    state_indices: IndexArray,
    num_accepted_tokens: IndexArray,
    *,
    step_states: Any = None,
    window_rows: IndexArray | None = None,
    step_rows: IndexArray | None = None,
    num_valid_tokens: IndexArray | None = None,
    null_slot: int | None = None,
    track_indices: IndexArray | None = None,
    track_num_tokens: IndexArray | None = None,
    implementation: Implementation = None,
    accepted_path: IndexArray | None = None,
) -> Cache:
    """Rolls everything that a model keeps back to the accepted token: all conv groups, and the recurrent state.

    Args:
      cache: a `ConvCache`, a dict, list or tuple of them, or a `HybridCache`.
      step_states: the recurrent state after every token, `[L, R, D, …]`, in the structure of `cache.recurrent_state`;
        None where the cache has none. Layers, slots and tokens are as many as in the first conv spec.
      step_rows: row of each request in `step_states`, int `[B]`; None means `window_rows`. Step states that are in the
        order of the requests take `range(B)` where `window_rows` is given.
      state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        implementation, accepted_path: as for `commit_conv_state`, the same for all groups.

    Returns:
      `cache` itself; its tensors are updated in place.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated. Nothing has been written then.

    Assumes, Moves: as for `commit_conv_state` and `commit_recurrent_state`.

    Example:
      >>> from torch_ref import ConvCacheSpec, allocate_conv_cache
      >>> conv = allocate_conv_cache(ConvCacheSpec(1, 2, 1, conv_dim=1, width=3, num_draft_tokens=2))
      >>> _ = conv.conv_windows.copy_(torch.arange(1, 4).reshape(1, 1, 3, 1))
      >>> cache = HybridCache(conv, recurrent_state=torch.zeros(1, 2))
      >>> cache = commit_after_verify(cache, [1], [2], step_states=torch.tensor([[[7.0, 8.0]]]))
      >>> cache.conv.conv_state.flatten().tolist(), cache.recurrent_state.tolist()
      ([0.0, 0.0, 2.0, 3.0], [[0.0, 8.0]])
    """
    wrong: list[str] = []
    is_hybrid = isinstance(cache, HybridCache)
    conv, place = (cache.conv, "cache.conv") if is_hybrid else (cache, "cache")
    calls = [
        (Call(one.spec, one.conv_state, wrong, owner=f"{path}."), one) for path, one in _caches(conv, place, wrong)
    ]
    groups = [_conv_group(call, one.conv_state, one.conv_windows) for call, one in calls]
    if not groups and not wrong:
        wrong.append(mismatch(place, "at least one ConvCache", shown(conv)))
    for field in ("num_slots", "num_draft_tokens"):
        sizes = sorted({getattr(call.spec, field) for call, _ in calls})
        if len(sizes) > 1:
            hint = "Groups that differ in it would skip different requests."
            wrong.append(mismatch(place, f"specs with one {field}", sizes, hint))
    like = groups[0].spec if groups else None
    held = cache.recurrent_state if is_hybrid else None
    groups += _recurrent_groups(
        held, step_states, wrong, like, shares_rows=window_rows is not None and step_rows is None
    )
    indices = _Given(
        state_indices, num_accepted_tokens, window_rows, num_valid_tokens, null_slot, track_indices, track_num_tokens,
        accepted_path, step_rows,
    )  # fmt: skip
    _commit(groups, indices, implementation, wrong)
    return cache


def _caches(node: Any, path: str, wrong: list[str]) -> Iterator[tuple[str, ConvCache]]:
    """Every `ConvCache` of a structure (None is an empty one) with its place in words."""
    if isinstance(node, ConvCache):
        yield path, node
    elif isinstance(node, (list, tuple, Mapping)):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _caches(value, f"{path}[{key!r}]", wrong)
    elif node is not None:
        wrong.append(mismatch(path, "a ConvCache, or a dict, list or tuple of them", type(node).__name__))


@dataclasses.dataclass(frozen=True)
class _Given:
    """The index arguments of a call, as they were given."""

    state_indices: IndexArray
    num_accepted_tokens: IndexArray
    window_rows: IndexArray | None
    num_valid_tokens: IndexArray | None
    null_slot: Any
    track_indices: IndexArray | None
    track_num_tokens: IndexArray | None
    accepted_path: IndexArray | None
    step_rows: IndexArray | None = None

    def checked(self, indices: Indices, wrong: list[str], num_tokens: list[int]) -> dict[str, Any]:
        """The same as the backends take them; `num_tokens` has the D of every group."""
        checked = {
            "slots": indices.first_index("state_indices", self.state_indices),
            "accepted": indices.first_index("num_accepted_tokens", self.num_accepted_tokens),
            "rows": indices.index("window_rows", self.window_rows),
            "valid": indices.index("num_valid_tokens", self.num_valid_tokens),
            "null_slot": as_integer(self.null_slot),
        }
        if (self.track_indices is None) != (self.track_num_tokens is None):
            order = 1 if self.track_indices is None else -1
            missing, given = ("track_indices", "track_num_tokens")[::order]
            wrong.append(mismatch(missing, f"an index array beside `{given}`", None, "The two come together."))
        checked["track_slots"] = indices.index("track_indices", self.track_indices)
        checked["track_accepted"] = indices.index("track_num_tokens", self.track_num_tokens)
        for tokens in num_tokens or [None]:  # with two different ones one of them is refused
            checked["path"] = indices.table("accepted_path", self.accepted_path, tokens)
        check_null_slot(self.null_slot, wrong)
        return checked


@dataclasses.dataclass(frozen=True)
class _Group:
    """One pool and its buffer. With a spec they passed the checks and have the form of the backends."""

    name: str
    state: Any
    windows: Any
    spec: ConvCacheSpec | None = None
    rows_of: str = ""  # the name of step states, whose rows are their own


def _conv_group(call: Call, conv_state: Any, conv_windows: Any) -> _Group:
    call.check_written("conv_state", conv_state)
    call.take_windows(conv_windows, written=False)
    return _Group(call.called("conv_state"), call.state, call.windows, call.spec)


def _recurrent_group(
    names: tuple[str, str],
    pair: tuple[Any, Any],
    wrong: list[str],
    *,
    layer_axis: bool = True,
    like: ConvCacheSpec | None = None,
) -> _Group:
    """A recurrent pool and its step states as a dense group of width 2, whose windows are one column.

    `like` is the geometry with which they share layers, slots and tokens, if there is one.
    """
    before = len(wrong)
    (name, steps_name), (state, steps) = names, pair
    group = _Group(name, state, steps)
    for called, tensor in zip(names, pair, strict=True):
        if not is_strided(tensor):
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            wrong.append(mismatch(called, "a torch.Tensor", got))
    if len(wrong) > before:
        return group
    if state.dtype not in FLOATS:
        wrong.append(mismatch(name, f"dtype {', '.join(FLOATS.values())}", state.dtype))
    if steps.dtype != state.dtype:
        hint = "Nothing is cast silently; the states of a step have the pool's dtype."
        wrong.append(mismatch(steps_name, f"dtype {state.dtype}", steps.dtype, hint))
    if steps.device != state.device:
        wrong.append(mismatch(steps_name, f"device {state.device}", steps.device, SHARED_DEVICE))
    if not _check_recurrent_shapes(names, pair, wrong, layer_axis, like):
        return group
    state, steps = pair if layer_axis else (state.unsqueeze(0), steps.unsqueeze(0))
    for called, tensor, leading in ((name, state, 2), (steps_name, steps, 3)):
        if tensor.numel() and not tensor[(0,) * leading].is_contiguous():
            expected = f"a contiguous entry {tuple(tensor.shape[leading:])}"
            got = f"strides {tuple(tensor.stride()[leading:])}"
            wrong.append(mismatch(called, expected, got, "The other strides are free."))
        elif leading == 2 and shares_memory(tensor):
            wrong.append(mismatch(called, "elements that share no memory", f"strides {tuple(tensor.stride())}"))
    if len(wrong) > before:
        return group
    size, (num_layers, num_rows, num_tokens) = math.prod(state.shape[2:]), steps.shape[:3]
    dtype = FLOATS[state.dtype]
    spec = ConvCacheSpec(num_layers, state.shape[1], num_rows, size, 2, num_tokens, dtype, storage="dense")
    pool = state.as_strided(spec.state_shape, (*state.stride()[:2], size, 1), state.storage_offset())
    buffer = steps.as_strided(spec.windows_shape, (*steps.stride()[:3], size, 1), steps.storage_offset())
    return _Group(name, pool, buffer, spec, rows_of=steps_name)


def _recurrent_groups(
    held: Any, step_states: Any, wrong: list[str], like: ConvCacheSpec | None, *, shares_rows: bool
) -> Iterator[_Group]:
    """The recurrent pools of a cache whose convs are `like`; with `shares_rows` the rows of both have one number."""
    names = ("cache.recurrent_state", "step_states")
    for path, pool, steps, _ in leaves_of(names, (held, step_states), wrong):
        group = _recurrent_group((names[0] + path, names[1] + path), (pool, steps), wrong, like=like)
        if shares_rows and like and group.spec and group.spec.max_requests != like.max_requests:
            found = f"{group.spec.max_requests} rows beside {like.max_requests} of the verify buffer"
            hint = "Give `step_rows`: range(B) for step states in the order of the requests."
            wrong.append(
                mismatch(group.rows_of, f"{like.max_requests} rows, as `window_rows` is for both", found, hint)
            )
        yield group


def _check_recurrent_shapes(
    names: tuple[str, str], pair: tuple[Any, Any], wrong: list[str], layer_axis: bool, like: ConvCacheSpec | None
) -> bool:
    """Whether a recurrent pool and its step states fit each other, and `like`."""
    before = len(wrong)
    (name, steps_name), (held, steps) = names, (tuple(tensor.shape) for tensor in pair)
    lead = 2 if layer_axis else 1  # axes of the pool before the entry
    layers = "layer, " if layer_axis else ""
    if len(held) < lead:
        wrong.append(mismatch(name, f"{layers}slot, …", held))
        return False
    fits = len(steps) == len(held) + 1 and steps[: lead - 1] == held[: lead - 1] and steps[lead + 1 :] == held[lead:]
    if not fits:
        sizes = ", ".join(map(str, (*held[: lead - 1], "R", "D", *held[lead:])))
        wrong.append(mismatch(steps_name, f"{layers}row, token, … = ({sizes})", steps, f"`{name}` is {held}."))
        return False
    found = (held[0] if layer_axis else 1, held[lead - 1], steps[lead])
    if like is not None:
        wanted = (like.num_slots, like.num_draft_tokens)
        if found[1:] != wanted:
            wrong.append(mismatch(name, f"slots, tokens = {wanted}", found[1:], "Those of the conv cache."))
    if 0 in (*found, *held[lead:]):
        wrong.append(mismatch(steps_name, "no axis of size 0 but rows", steps, f"`{name}` is {held}."))
    elif math.prod(held[lead:]) > LARGEST:
        wrong.append(mismatch(name, "an entry of less than 2^31 elements", math.prod(held[lead:])))
    return len(wrong) == before


def _commit(groups: list[_Group], given: _Given, implementation: Implementation, wrong: list[str]) -> None:
    """Checks what the groups share, and copies."""
    tensors = [group.state for group in groups if isinstance(group.state, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    indices = Indices(device, wrong)
    arguments = given.checked(indices, wrong, sorted({g.spec.num_draft_tokens for g in groups if g.spec is not None}))
    step_rows = indices.index("step_rows", given.step_rows)
    rows = {True: arguments["rows"] if step_rows is None else step_rows, False: arguments["rows"]}
    for group in groups:
        if isinstance(group.state, torch.Tensor):
            indices.same_device(group.name, group.state.device)
        in_order = given.window_rows is None and not (group.rows_of and given.step_rows is not None)
        if in_order and group.spec is not None:
            called = f"the rows of {group.rows_of}" if group.rows_of else "max_requests"
            check_rows(indices.num_requests, group.spec.max_requests, called, wrong)
    backend = choose_backend(implementation, device, wrong)
    pools = [memory_range(group.state) for group in groups]
    buffers = [apart(group.windows, pools) for group in groups]  # all of them before the first write
    for group, windows in zip(groups, buffers, strict=True):
        arguments["rows"] = rows[bool(group.rows_of)]
        backend.commit(group.state, windows, spec=group.spec, **arguments)
