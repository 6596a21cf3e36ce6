"""The operations on a `jax.sharding.Mesh`: channels over a tensor axis, slots and requests over a data axis.

    conv_state    (L, C, S, conv_dim)       slots C over data, channels over tensor; channel_major likewise
    conv_windows  (L, R, D+S-1, conv_dim)   rows R over data, channels over tensor; dense and inputs likewise
    x, y          (B, D, conv_dim)          requests B over data, channels over tensor
    weight        (conv_dim, K)             channels over tensor
    indices       (B,), (B, D)              requests over data

The convolution is depthwise and a commit copies inside a slot, so no rank needs anything of another: every function
here is a `shard_map` around the plain one on the rank's own shards, and its program has no collective. Nothing is
fenced either: a rank reads and writes its own shards only, in the order of its own program, so donated buffers are
updated in place on every device and across hosts as they are on one.

Channels. A rank of a Gated DeltaNet or KDA layer holds `[q_r | k_r | v_r]`, its share of the heads of every part.
`shard_conv_weights` puts the channels of a checkpoint in the order `[q_0 | k_0 | v_0 | q_1 | k_1 | v_1 | …]` once, at
load time; then a plain division of the channel axis gives each rank its heads. Everything with this axis is in that
order: pool, buffer, weight, bias, x and y.

Slots. Index arrays hold global slot and row numbers; links and paths of draft trees number the tokens of a request,
and are the same on every mesh. Request b is on the data rank that owns its part of the batch,
and its slot and row must be in the same rank's part of pool and buffer: rank r has the slots r·C/dp … (r+1)·C/dp - 1.
`localize_slots` makes them the rank's own numbers; a slot or row of another rank is skipped, like one outside the pool.

Layers. A pipeline stage holds its own layers and nothing else: `dataclasses.replace(spec, num_layers=…)` on the
stage's devices, layers numbered from its first one. The stages share slots, rows and accepted counts, and each commits
its own pool; the only thing that moves between them is the activations of the model.

Plain `jit` on sharded arrays: the XLA forms keep a pool that is divided over channels where it is, without a
collective. One that is divided over slots stays too, but windows are summed over ranks, which is no bit copy (-0.0
becomes 0.0): use the functions here. The kernels refuse to be lowered for several devices outside of a `shard_map`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl import checks
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import Activation, ConvWeight, causal_conv1d_update, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec, Problems, as_integer, shown
from jax_impl.prefill import causal_conv1d_prefill
from jax_impl.presets import ConvPart
from jax_impl.rollback import HybridCache, commit_after_verify
from jax_impl.windows import gather_windows

# ---- which axis goes where -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConvPartitionSpecs:
    """How every array of a convolution is divided; see `partition_specs`.

    Attributes:
      conv_state, conv_windows: stacked pool and buffer.
      weight: `[conv_dim, K]`. conv_weight: a `ConvWeight` of `[L, K, conv_dim]` and `[L, conv_dim]`, stacked.
      bias: `[conv_dim]`.
      x: x and y of verify and prefill, `[B, tokens, conv_dim]`. token: those of update, `[B, conv_dim]`.
      indices: every index array `[B]`. token_indices: those of `[B, D]`, links and paths of draft trees.
      windows: what `sharded_gather` returns for a stacked buffer.
      recurrent_state: `[L, C, heads, …]`. step_states: `[L, R, D, heads, …]`.
    """

    conv_state: P
    conv_windows: P
    weight: P
    conv_weight: ConvWeight
    bias: P
    x: P
    token: P
    indices: P
    token_indices: P
    windows: P
    recurrent_state: P
    step_states: P


def partition_specs(
    spec: ConvCacheSpec, *, data_axis: str | None = "data", tensor_axis: str | None = "tensor"
) -> ConvPartitionSpecs:
    """The partition specs of pool, buffer, weights, activations and index arrays.

    Args:
      spec: geometry; axis order and storage decide.
      data_axis: mesh axis over which slots, rows and requests are divided; None leaves them whole.
      tensor_axis: mesh axis over which channels (and heads) are divided; None leaves them whole.

    Raises:
      ValueError: an axis is no name.

    Example:
      >>> specs = partition_specs(ConvCacheSpec(2, 8, 4, 128, width=4, num_draft_tokens=4))
      >>> tuple(specs.conv_state), tuple(specs.x)
      ((None, 'data', None, 'tensor'), ('data', None, 'tensor'))
    """
    checks.spec_argument(spec)
    problems = Problems()
    _check_axes(problems, data_axis, tensor_axis)
    problems.raise_if_any()
    data, tensor = data_axis, tensor_axis
    entry = (None, tensor) if spec.axis_order == "time_major" else (tensor, None)
    token = (None,) if spec.storage == "dense" else ()
    return ConvPartitionSpecs(
        conv_state=P(None, data, *entry),
        conv_windows=P(None, data, *token, *entry),
        weight=P(tensor, None),
        conv_weight=_untyped(ConvWeight)(P(None, None, tensor), P(None, tensor)),
        bias=P(tensor),
        x=P(data, None, tensor),
        token=P(data, tensor),
        indices=P(data),
        token_indices=P(data, None),
        windows=P(None, data, *entry),
        recurrent_state=P(None, data, tensor),
        step_states=P(None, data, None, tensor),
    )


def _check_axes(problems: Problems, data_axis: Any, tensor_axis: Any) -> None:
    for name, axis in (("data_axis", data_axis), ("tensor_axis", tensor_axis)):
        if axis is not None and not isinstance(axis, str):
            problems.add(name, "None or the name of a mesh axis", shown(axis))


def _untyped(of: Any) -> Any:
    """A pytree class whose leaves are partition specs here, not arrays."""
    return of


def local_spec(
    spec: ConvCacheSpec,
    mesh: Any,
    *,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    parts: Sequence[ConvPart] | None = None,
) -> ConvCacheSpec:
    """The geometry of one rank's shards.

    Args:
      spec: geometry of the global arrays.
      mesh: a `jax.sharding.Mesh` or an abstract one.
      data_axis, tensor_axis: as in `partition_specs`; an axis that is named must be one of the mesh.
      parts: parts of the channels, as a preset lists them, to check that heads stay whole; None checks channels only.

    Raises:
      ValueError: one message with every number that the mesh does not divide.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
      >>> one = local_spec(ConvCacheSpec(2, 8, 4, 128, width=4, num_draft_tokens=4), mesh)
      >>> one.num_slots, one.max_requests, one.conv_dim
      (4, 2, 32)
    """
    checks.spec_argument(spec)
    problems = Problems()
    place = _place(problems, mesh, data_axis, tensor_axis)
    problems.raise_if_any()
    assert place is not None
    local = place.local(problems, spec)
    if parts is not None:
        _check_parts(problems, parts, place.tensor_ranks, spec.conv_dim)
    problems.raise_if_any()
    assert local is not None
    return local


@dataclasses.dataclass(frozen=True)
class _Place:
    """A mesh and the two of its axes that count here; an axis is None when nothing is divided over it."""

    mesh: Any
    data_axis: str | None
    tensor_axis: str | None

    @property
    def data_ranks(self) -> int:
        return 1 if self.data_axis is None else self.mesh.shape[self.data_axis]

    @property
    def tensor_ranks(self) -> int:
        return 1 if self.tensor_axis is None else self.mesh.shape[self.tensor_axis]

    def specs(self, spec: ConvCacheSpec) -> ConvPartitionSpecs:
        return partition_specs(spec, data_axis=self.data_axis, tensor_axis=self.tensor_axis)

    def divides(self, problems: Problems, name: str, what: str, size: int, over: str, hint: str = "") -> bool:
        """Records a problem unless the ranks of the axis `over`, "data" or "tensor", divide `size`."""
        ranks = self.data_ranks if over == "data" else self.tensor_ranks
        if size % ranks:
            axis = self.data_axis if over == "data" else self.tensor_axis
            got = f"{size}, which leaves {size % ranks} over"
            problems.add(name, f"{what} in equal shares for {ranks} ranks of axis {axis!r}", got, hint)
        return size % ranks == 0

    def local(self, problems: Problems, spec: ConvCacheSpec, name: str = "spec") -> ConvCacheSpec | None:
        """The geometry of a shard; None with every problem recorded."""
        up = -(-spec.num_slots // self.data_ranks) * self.data_ranks
        rows = -(-spec.max_requests // self.data_ranks) * self.data_ranks
        fits = [
            self.divides(problems, f"{name}.conv_dim", "channels", spec.conv_dim, "tensor", "Heads are not split."),
            self.divides(problems, f"{name}.num_slots", "slots", spec.num_slots, "data", f"{up} would do."),
            self.divides(problems, f"{name}.max_requests", "rows", spec.max_requests, "data", f"{rows} would do."),
        ]
        if not all(fits):
            return None
        return dataclasses.replace(
            spec,
            conv_dim=spec.conv_dim // self.tensor_ranks,
            num_slots=spec.num_slots // self.data_ranks,
            max_requests=spec.max_requests // self.data_ranks,
        )


def _place(problems: Problems, mesh: Any, data_axis: Any, tensor_axis: Any) -> _Place | None:
    """The checked mesh and axes; None with a problem recorded."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        problems.add("mesh", "a jax.sharding.Mesh", type(mesh).__name__)
        return None
    before = len(problems.messages)
    _check_axes(problems, data_axis, tensor_axis)
    for name, axis in (("data_axis", data_axis), ("tensor_axis", tensor_axis)):
        if isinstance(axis, str) and axis not in mesh.shape:
            sizes = ", ".join(f"{known} = {size}" for known, size in mesh.shape.items())
            problems.add(name, f"None or an axis of the mesh ({sizes})", repr(axis))
    if isinstance(data_axis, str) and isinstance(tensor_axis, str) and data_axis == tensor_axis:
        problems.add("tensor_axis", "another axis than data_axis", repr(tensor_axis))
    return _Place(mesh, data_axis, tensor_axis) if len(problems.messages) == before else None


# ---- channels --------------------------------------------------------------------------------------------------------


def _check_parts(problems: Problems, parts: Sequence[ConvPart], num_ranks: int, channels: int | None) -> None:
    """Records every part that `num_ranks` ranks cannot share, and parts that are not the `channels` of the arrays."""
    before = len(problems.messages)
    total = 0
    if not isinstance(parts, Sequence) or not all(isinstance(part, ConvPart) for part in parts) or not parts:
        problems.add("parts", "one ConvPart or more, as get_preset(…).parts", shown(parts))
        return
    for part in parts:
        try:
            total += part.channels_per_rank(num_ranks) * num_ranks
        except ValueError as error:
            told = str(error).replace("`tp`", "`parts`", 1).replace(f"got {num_ranks}.", f"got {num_ranks} ranks.", 1)
            problems.messages.append(told)
            continue
        if part.repeats and part.num_heads and num_ranks > part.num_heads and num_ranks % part.num_heads:
            problems.add(
                "parts", f"a multiple of part {part.name} = {part.num_heads} groups as ranks", f"{num_ranks} ranks",
                "Ranks hold copies of a group only where each group gets the same number of them.",
            )  # fmt: skip
    if channels is not None and len(problems.messages) == before and total != channels:
        described = " + ".join(f"{part.name} {part.channels}" for part in parts)
        copies = ", with the copies of groups that ranks share" if any(part.repeats for part in parts) else ""
        problems.add("parts", f"conv_dim = {channels} channels together", f"{described} = {total}{copies}")


def channel_order(parts: Sequence[ConvPart], num_ranks: int) -> np.ndarray:
    """Where each channel of the order `[q_0 | k_0 | v_0 | q_1 | …]` is in `[q | k | v]`.

    Ranks that share a group (Mamba2's B and C with fewer groups than ranks) each get a copy, so that the result may be
    longer than the channels are.

    Raises:
      ValueError: one message with every part whose heads the ranks do not divide.

    Example:
      >>> parts = ConvPart("q", 4, 2), ConvPart("k", 4, 2), ConvPart("v", 8, 2)
      >>> channel_order(parts, 2).tolist()
      [0, 1, 4, 5, 8, 9, 10, 11, 2, 3, 6, 7, 12, 13, 14, 15]
    """
    problems, count = Problems(), as_integer(num_ranks)
    if count is None or count < 1:
        problems.add("num_ranks", "an integer of at least 1", shown(num_ranks))
    _check_parts(problems, parts, count if count and count > 0 else 1, None)
    problems.raise_if_any()
    starts = np.cumsum([0, *(part.channels for part in parts)])
    pieces = []
    for rank in range(num_ranks):
        for part, start in zip(parts, starts, strict=False):
            count = part.channels_per_rank(num_ranks)
            shares = part.channels // count  # fewer than ranks where groups are copied
            pieces.append(np.arange(count) + start + rank * shares // num_ranks * count)
    return np.concatenate(pieces)


def shard_channels(array: Any, parts: Sequence[ConvPart], num_ranks: int, axis: int = -1) -> Any:
    """Puts the channels of one axis in the order of the ranks: `[q | k | v]` to `[q_0 | k_0 | v_0 | q_1 | …]`.

    For biases, rows of the projection in front of the convolution, and pools that come from one device.

    Raises:
      ValueError: heads that the ranks do not divide, or an axis that is not as long as the parts together.
    """
    return _shard(array, parts, num_ranks, axis, "array")


def _shard(array: Any, parts: Sequence[ConvPart], num_ranks: int, axis: int, name: str) -> Any:
    order, total = channel_order(parts, num_ranks), sum(part.channels for part in parts)
    _check_axis(array, axis, total, name)
    return array.take(order, axis=axis)


def unshard_channels(array: Any, parts: Sequence[ConvPart], num_ranks: int, axis: int = -1) -> Any:
    """The inverse of `shard_channels`; of a group that ranks share the first copy is taken."""
    return _unshard(array, parts, num_ranks, axis, "array")


def _unshard(array: Any, parts: Sequence[ConvPart], num_ranks: int, axis: int, name: str) -> Any:
    order = channel_order(parts, num_ranks)
    _check_axis(array, axis, len(order), name)
    return array.take(np.unique(order, return_index=True)[1], axis=axis)


def _check_axis(array: Any, axis: int, channels: int, name: str) -> None:
    problems = Problems()
    _check_is_array(problems, name, array)
    if as_integer(axis) is None:
        problems.add("axis", "an integer", shown(axis))
    problems.raise_if_any()
    if not -array.ndim <= axis < array.ndim or array.shape[axis] != channels:
        raise ValueError(f"`{name}`: expected {channels} channels on axis {axis}, got shape {tuple(array.shape)}.")


def _check_is_array(problems: Problems, name: str, value: Any) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        problems.add(name, "an array", shown(value))
    checks.is_used_up(problems, name, value)


def shard_conv_weights(weight: Any, parts: Sequence[ConvPart], num_ranks: int) -> Any:
    """Reorders the channels of a convolution's weight, so that a plain split gives each rank its heads of every part.

    Args:
      weight: `[conv_dim, K]`, `[conv_dim, 1, K]` or `[L, conv_dim, 1, K]`, channels q|k|v as in the checkpoint; or a
        `ConvWeight`, whose bias is reordered with it. A bias of its own goes through `shard_channels`.
      parts: the parts of the channels in their order, as `get_preset(…).parts`.
      num_ranks: tensor-parallel ranks.

    Returns:
      The weight in the same form, `num_ranks` times a rank's channels long.

    Raises:
      ValueError: one message with every part whose heads the ranks do not divide.

    Example:
      >>> parts = ConvPart("q", 2, 2), ConvPart("k", 2, 2), ConvPart("v", 4, 2)
      >>> shard_conv_weights(np.arange(8)[:, None], parts, 2)[:, 0].tolist()
      [0, 2, 4, 5, 1, 3, 6, 7]
    """
    return _map_channels(weight, functools.partial(_shard, parts=parts, num_ranks=num_ranks))


def unshard_conv_weights(weight: Any, parts: Sequence[ConvPart], num_ranks: int) -> Any:
    """The inverse of `shard_conv_weights`."""
    return _map_channels(weight, functools.partial(_unshard, parts=parts, num_ranks=num_ranks))


def _map_channels(weight: Any, change: Callable[..., Any]) -> Any:
    if isinstance(weight, ConvWeight):
        bias = None if weight.bias is None else change(weight.bias, axis=-1, name="weight.bias")
        return ConvWeight(change(weight.taps, axis=-1, name="weight.taps"), bias)
    return change(weight, axis=_channel_axis(weight), name="weight")


def _channel_axis(weight: Any) -> int:
    """Axis of the channels of a weight in a checkpoint's form."""
    problems = Problems()
    _check_is_array(problems, "weight", weight)
    problems.raise_if_any()
    if weight.ndim not in (2, 3, 4):
        axes = "channel, tap or channel, 1, tap or layer, channel, 1, tap"
        raise ValueError(f"`weight`: expected {axes}, got {tuple(weight.shape)}.")
    return -2 if weight.ndim == 2 else -3


# ---- slots -----------------------------------------------------------------------------------------------------------


def localize_slots(slots: Any, rank: Any, slots_per_rank: int, null_slot: int | None = None) -> jax.Array:
    """Global slot numbers as the numbers of one rank's own slots; -1, which is skipped, for everything else.

    Rank r owns the slots r * slots_per_rank … (r + 1) * slots_per_rank - 1. Slots of other ranks, padding, numbers
    outside the pool and `null_slot` become -1: nothing wraps into a slot of the rank. Rows are numbered the same way.

    Args:
      slots: integers `[B]`, saturated to int32.
      rank: the rank, an integer or an int32 scalar such as `jax.lax.axis_index("data")`.
      slots_per_rank: slots of each rank's part of the pool.
      null_slot: the pool's padding slot as a global number, or None. Do not give it to the operation as well.

    Raises:
      ValueError: `slots` is no integer array, `rank` no integer scalar or `slots_per_rank` no positive integer.

    Example:
      >>> localize_slots([8, 3, 11, -1, 12, 2**31 - 1], 2, 4).tolist()
      [0, -1, 3, -1, -1, -1]
    """
    problems = Problems()
    indices = checks.index_array(problems, "slots", slots, None)
    null = checks.null_slot_value(problems, null_slot)
    count = as_integer(slots_per_rank)
    if count is None or not 0 <= count <= checks.INT32_MAX:
        problems.add("slots_per_rank", "an integer from 0 to 2^31-1", shown(slots_per_rank))
    number = as_integer(rank)
    on_device = isinstance(rank, jax.Array) and rank.ndim == 0 and jnp.issubdtype(rank.dtype, jnp.integer)
    if not checks.is_used_up(problems, "rank", rank) and not on_device and (number is None or not 0 <= number < 2**31):
        problems.add("rank", "an integer from 0 to 2^31-1 or an integer scalar", shown(rank))
    problems.raise_if_any()
    assert indices is not None
    first = jnp.asarray(rank, jnp.int32) * jnp.int32(slots_per_rank)
    offset = indices - first  # may wrap, for slots that are not the rank's: looked at only behind the comparison
    mine = (indices >= first) & (offset >= 0) & (offset < slots_per_rank)
    if null is not None:
        mine &= indices != null
    return jnp.where(mine, offset, jnp.int32(-1))


# ---- the operations --------------------------------------------------------------------------------------------------


def sharded_verify(
    x: jax.Array | None,
    conv_state: jax.Array,
    conv_windows: jax.Array,
    weight: jax.Array | ConvWeight,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    mesh: Any,
    state_indices: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    layer: Any = None,
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    activation: Activation | None = "silu",
    implementation: checks.Implementation | None = None,
    parents: Any = None,
    resume_tokens: Any = None,
    resume_path: Any = None,
    resume_windows: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """`causal_conv1d_verify` on global arrays of a mesh.

    Args:
      x, conv_state, conv_windows, weight, bias: global arrays, divided as `partition_specs` says, channels in the order
        of `shard_conv_weights`. Arrays that lie elsewhere are refused where that can be seen, outside of `jit`; inside,
        they are moved. x None as in the plain function.
      spec: geometry of the global arrays.
      mesh: a `jax.sharding.Mesh`. data_axis, tensor_axis: two of its axes, or None.
      state_indices, window_rows: global numbers `[B]`. `window_rows=None` means that a rank's b-th request has the b-th
        row of the rank's part. A slot or row of another rank skips the request.
      num_valid_tokens, layer, activation, implementation, parents, resume_tokens, resume_path: as in the plain
        function. resume_windows: too, divided as `conv_windows`.
      null_slot: a global number.

    Returns:
      y and the buffer, divided as x and `conv_windows`; with storage "inputs" and `resume_tokens` also the pool.

    Raises:
      ValueError: what the plain function says of the global arrays; sizes that the mesh does not divide, all in one
        message.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, causal_conv1d_verify, spec, null_slot, x=x, conv_state=conv_state, conv_windows=conv_windows,
        weight=weight, bias=bias, state_indices=state_indices, layer=layer, window_rows=window_rows,
        num_valid_tokens=num_valid_tokens, activation=activation, implementation=implementation, parents=parents,
        resume_tokens=resume_tokens, resume_path=resume_path, resume_windows=resume_windows,
    )  # fmt: skip
    specs = place.specs(spec)
    results = [specs.x, _unstacked(specs.conv_windows, call.stacked), _unstacked(specs.conv_state, call.stacked)]
    moves_on = spec.storage == "inputs" and resume_tokens is not None
    return _run(place, call, {}, tuple(results if moves_on else results[:2]))


def sharded_update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array | ConvWeight,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    mesh: Any,
    state_indices: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    layer: Any = None,
    null_slot: int | None = None,
    activation: Activation | None = "silu",
    implementation: checks.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d_update` on global arrays of a mesh; arguments as in `sharded_verify`, x `[B, conv_dim]`.

    Returns:
      y and the pool, divided as they came.

    Raises:
      ValueError: as `sharded_verify`.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, causal_conv1d_update, spec, null_slot, x=x, conv_state=conv_state, weight=weight, bias=bias,
        state_indices=state_indices, layer=layer, activation=activation, implementation=implementation,
    )  # fmt: skip
    specs = place.specs(spec)
    return _run(place, call, {}, (specs.token, _unstacked(specs.conv_state, call.stacked)))


def sharded_prefill(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array | ConvWeight,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    mesh: Any,
    state_indices: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    lengths: Any = None,
    has_initial_state: Any = None,
    layer: Any = None,
    null_slot: int | None = None,
    activation: Activation | None = "silu",
    implementation: checks.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d_prefill` on global arrays of a mesh; arguments as in `sharded_verify`, x `[B, T, conv_dim]`.

    Returns:
      y and the pool, divided as they came.

    Raises:
      ValueError: as `sharded_verify`.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, causal_conv1d_prefill, spec, null_slot, x=x, conv_state=conv_state, weight=weight, bias=bias,
        state_indices=state_indices, lengths=lengths, has_initial_state=has_initial_state, layer=layer,
        activation=activation, implementation=implementation,
    )  # fmt: skip
    specs = place.specs(spec)
    return _run(place, call, {}, (specs.x, _unstacked(specs.conv_state, call.stacked)))


def sharded_gather(
    conv_windows: jax.Array,
    num_accepted_tokens: Any,
    *,
    spec: ConvCacheSpec,
    mesh: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    window_rows: Any = None,
    conv_state: jax.Array | None = None,
    state_indices: Any = None,
    null_slot: int | None = None,
    accepted_path: Any = None,
) -> jax.Array:
    """`gather_windows` on a global buffer of a mesh; arguments as in `sharded_verify`.

    Args:
      conv_state, state_indices, null_slot: with storage "inputs", as in the plain function: the pool, global numbers.

    Returns:
      `[L, B, S, conv_dim]` or `[L, B, conv_dim, S]`, requests over the data axis, channels over the tensor axis.

    Raises:
      ValueError: as `sharded_verify`.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, gather_windows, spec, null_slot, conv_windows=conv_windows, num_accepted_tokens=num_accepted_tokens,
        window_rows=window_rows, conv_state=conv_state, state_indices=state_indices, accepted_path=accepted_path,
    )  # fmt: skip
    return _run(place, call, {}, _unstacked(place.specs(spec).windows, call.stacked))


def sharded_commit(
    conv_state: Any,
    conv_windows: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    spec: Any,
    mesh: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    window_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
    accepted_path: Any = None,
    implementation: checks.Implementation | None = None,
) -> Any:
    """`commit_conv_state` on global arrays of a mesh; arguments as in `sharded_verify`.

    A snapshot (`track_indices`) goes to a slot of the same data rank; one of another rank is skipped.

    Args:
      conv_state, conv_windows: global pool and buffer, or pytrees of them. Donate the pool to update its shards in
        place.
      spec: geometry, or a pytree of them; all have the same number of slots and of rows.

    Returns:
      The pool, or the pytree of pools, divided as it came.

    Raises:
      ValueError: as `sharded_verify`.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, commit_conv_state, spec, null_slot, conv_state=conv_state, conv_windows=conv_windows,
        state_indices=state_indices, num_accepted_tokens=num_accepted_tokens, window_rows=window_rows,
        num_valid_tokens=num_valid_tokens, track_indices=track_indices, track_num_tokens=track_num_tokens,
        accepted_path=accepted_path, implementation=implementation,
    )  # fmt: skip
    return _run(place, call, {}, _pool_specs(place, spec, conv_state, "conv_state"))


def sharded_commit_after_verify(
    cache: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    *,
    mesh: Any,
    data_axis: str | None = "data",
    tensor_axis: str | None = "tensor",
    step_states: Any = None,
    window_rows: Any = None,
    step_rows: Any = None,
    num_valid_tokens: Any = None,
    null_slot: int | None = None,
    track_indices: Any = None,
    track_num_tokens: Any = None,
    accepted_path: Any = None,
    implementation: checks.Implementation | None = None,
) -> Any:
    """`commit_after_verify` on the global arrays of a mesh; arguments as in `sharded_commit`.

    Recurrent pools `[L, C, heads, …]` and step states `[L, R, D, heads, …]` are divided over slots, rows and heads; a
    pool without an axis behind the slots is divided over slots only.

    Args:
      cache: a `ConvCache`, a pytree of them or a `HybridCache` of global arrays, with the geometry of the global
        arrays; all groups have the same number of slots and of rows.
      step_rows: global rows of `step_states`.

    Returns:
      The cache with its pools committed, divided as it came.

    Raises:
      ValueError: as `sharded_verify`.
    """
    place = _start(mesh, data_axis, tensor_axis)
    call = _call(
        place, commit_after_verify, None, null_slot, cache=cache, step_states=step_states, state_indices=state_indices,
        num_accepted_tokens=num_accepted_tokens, window_rows=window_rows, step_rows=step_rows,
        num_valid_tokens=num_valid_tokens, track_indices=track_indices, track_num_tokens=track_num_tokens,
        accepted_path=accepted_path, implementation=implementation,
    )  # fmt: skip
    specs = cache_specs(cache, data_axis=data_axis, tensor_axis=tensor_axis)
    own: dict[str, Any] = {"cache": specs}
    if step_states is not None:
        steps = place.specs(_geometries(None, call.arrays)[0]).step_states
        own["step_states"] = jax.tree.map(lambda array: P(*steps[: array.ndim]), step_states)
    return _run(place, call, own, specs)


def cache_specs(cache: Any, *, data_axis: str | None = "data", tensor_axis: str | None = "tensor") -> Any:
    """The partition specs of a cache, as a pytree of its own form: for `jax.device_put` or `shard_map`.

    Args:
      cache: a `ConvCache`, a pytree of them or a `HybridCache`; arrays or their shapes.
      data_axis, tensor_axis: as in `partition_specs`.

    Raises:
      ValueError: `cache` is something else, or an axis is no name.

    Example:
      >>> from jax_impl import allocate_conv_cache
      >>> cache = allocate_conv_cache(ConvCacheSpec(2, 8, 4, 128, width=4, num_draft_tokens=4))
      >>> tuple(cache_specs(cache).conv_windows)
      (None, 'data', None, 'tensor')
    """

    problems = Problems()
    _check_axes(problems, data_axis, tensor_axis)
    inner = cache.conv if isinstance(cache, HybridCache) else cache
    strangers = [one for one in jax.tree.leaves(inner, is_leaf=_is_cache) if not _is_cache(one)]
    if strangers:
        problems.add("cache", "a ConvCache, a pytree of them or a HybridCache", shown(strangers[0]))
    problems.raise_if_any()

    def of_conv(one: ConvCache) -> ConvCache:
        specs = partition_specs(one.spec, data_axis=data_axis, tensor_axis=tensor_axis)
        stacked = one.conv_state.ndim == len(one.spec.state_shape)
        state, windows = _unstacked(specs.conv_state, stacked), _unstacked(specs.conv_windows, stacked)
        return dataclasses.replace(one, conv_state=_untyped(state), conv_windows=_untyped(windows))

    if not isinstance(cache, HybridCache):
        return _map_caches(of_conv, cache)
    recurrent = P(None, data_axis, tensor_axis)
    pools = jax.tree.map(lambda pool: P(*recurrent[: pool.ndim]), cache.recurrent_state)
    return HybridCache(_map_caches(of_conv, cache.conv), pools)


def _map_caches(change: Callable[[ConvCache], ConvCache], tree: Any) -> Any:
    if isinstance(tree, HybridCache):
        return dataclasses.replace(tree, conv=_map_caches(change, tree.conv))
    return jax.tree.map(change, tree, is_leaf=_is_cache)


def _is_cache(one: Any) -> bool:
    return isinstance(one, ConvCache)


# ---- what they share -------------------------------------------------------------------------------------------------

# Arguments of the operations by name. What is in none of these is an array of floats or a tree of such; `layer` is
# static unless its value is on a device.
_STATIC = ("activation", "implementation", "layer")
_SLOTS, _ROWS = ("state_indices", "track_indices"), ("window_rows", "step_rows")
_OF_REQUESTS = (
    *_SLOTS, *_ROWS, "num_accepted_tokens", "num_valid_tokens", "track_num_tokens", "resume_tokens", "lengths",
    "has_initial_state",
)  # fmt: skip
_OF_TOKENS = ("parents", "resume_path", "accepted_path")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call on global arrays.

    Attributes:
      operation: the plain function. arrays: its array arguments by name, index arrays int32. static: the others.
      spec: geometry of the global arrays, or None where they are part of the cache. null_slot: a global number.
    """

    operation: Callable[..., Any]
    arrays: dict[str, Any]
    static: dict[str, Any]
    spec: Any
    null_slot: int | None

    @property
    def stacked(self) -> bool:
        """Whether pool or buffer have the layer axis, of an operation on one of them."""
        of = "conv_state" if "conv_state" in self.arrays else "conv_windows"
        full = self.spec.state_shape if of == "conv_state" else self.spec.windows_shape
        return self.arrays[of].ndim == len(full)


def _start(mesh: Any, data_axis: Any, tensor_axis: Any) -> _Place:
    problems = Problems()
    place = _place(problems, mesh, data_axis, tensor_axis)
    problems.raise_if_any()
    assert place is not None
    return place


def _call(place: _Place, operation: Callable[..., Any], spec: Any, null_slot: Any, **given: Any) -> _Call:
    """Checks a call as the plain function does, by tracing it on the shapes of the global arrays: nothing is run.

    Raises:
      ValueError: what the plain function says, and sizes that the mesh does not divide.
    """
    problems = Problems()
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    wrong: dict[str, Any] = {}  # goes to the plain function as it is, which refuses it beside all else that is wrong
    parameters = inspect.signature(operation).parameters
    for name, value in given.items():
        if name in _STATIC and not isinstance(value, jax.Array):
            static[name] = value
        elif value is None and parameters[name].default is None:
            continue
        elif name in (*_OF_REQUESTS, *_OF_TOKENS):
            if name == "has_initial_state":
                taken = checks.bool_array(Problems(), name, value, None)
            else:
                taken = checks.index_array(Problems(), name, value, None, "D" if name in _OF_TOKENS else None)
            (wrong if taken is None else arrays)[name] = value if taken is None else taken
        else:
            arrays[name] = value
    plain = {**static, "null_slot": null_slot} | ({} if operation is commit_after_verify else {"spec": spec})
    named = plain.get("implementation")
    if isinstance(named, str) and named in checks.IMPLEMENTATIONS:
        plain["implementation"] = "xla"
    leaves, structure = jax.tree.flatten(arrays)
    # Tracing would make 32 bits of a host array's 64, silently; such an array goes along as it is, too.
    narrow = lambda one: isinstance(one, jax.Array) or (isinstance(one, np.ndarray) and one.dtype.itemsize < 8)  # noqa: E731
    places = {i: one for i, one in enumerate(leaves) if narrow(one)}
    shapes = {i: jax.ShapeDtypeStruct(one.shape, one.dtype) for i, one in places.items()}

    def checked(shapes: dict[int, Any]) -> Any:
        arrays = structure.unflatten([shapes.get(i, one) for i, one in enumerate(leaves)])
        return operation(**arrays, **wrong, **plain)

    for path, one in jax.tree_util.tree_leaves_with_path(arrays):
        checks.is_used_up(problems, f"{path[0].key}{jax.tree_util.keystr(path[1:])}", one)
    try:
        jax.eval_shape(checked, shapes)
    except ValueError as error:
        problems.messages.append(str(error))
        for one in _geometries(spec, arrays):
            place.local(problems, one)
        _check_batch(problems, place, arrays)
    problems.raise_if_any()
    return _Call(operation, arrays, static, spec, checks.null_slot_value(problems, null_slot))


def _run(place: _Place, call: _Call, own: dict[str, Any], out_specs: Any) -> Any:
    """Runs the plain function on every rank's shards.

    Args:
      place: the mesh.
      call: what is called.
      own: partition specs of the arguments that `_usual_specs` does not know.
      out_specs: of the result.
    """
    problems = Problems()
    shards = {one: place.local(problems, one) for one in _geometries(call.spec, call.arrays)}
    sizes = {(one.num_slots, one.max_requests) for one in shards}
    if len(sizes) > 1:
        got = " and ".join(f"num_slots = {slots}, max_requests = {rows}" for slots, rows in sorted(sizes))
        problems.add("spec", "groups of the same slots and rows", got, "Ranks number them together.")
    specs = {name: own[name] if name in own else _usual_specs(place, call, name) for name in call.arrays}
    _check_shares(problems, place, call)
    for name, array in call.arrays.items():
        jax.tree.map(functools.partial(_check_placed, problems, place, name), array, specs[name])
    problems.raise_if_any()
    arrays = {name: _divided_by_name(place, array, specs[name]) for name, array in call.arrays.items()}
    back: dict[Any, Any] = {shard: one for one, shard in shards.items()}

    def of_rank(arrays: dict[str, Any]) -> Any:
        static = dict(call.static)
        if place.data_ranks > 1:
            arrays = _localized(place, arrays, call.null_slot, next(iter(back)))
        elif call.null_slot is not None:  # one rank has all slots under their own numbers: nothing to launch for them
            static["null_slot"] = call.null_slot
        if call.spec is None:
            arrays["cache"] = _respecified(arrays["cache"], shards)
        else:
            static["spec"] = jax.tree.map(shards.__getitem__, call.spec)
        try:
            done = call.operation(**arrays, **static)
        except ValueError as error:  # global sizes are checked: what is refused here is those of a rank
            sizes = ", ".join(f"conv_dim = {shard.conv_dim} of {one.conv_dim}" for shard, one in back.items())
            raise ValueError(f"{error} On each rank of the mesh: {sizes}.") from None
        return _respecified(done, back) if call.spec is None else done

    # check_vma=False: the types that it gives to arrays inside are not those of a kernel's refs.
    mapped = jax.shard_map(of_rank, mesh=place.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)(arrays)  # outside of jit, every operation inside would be a program of its own


def _geometries(spec: Any, arrays: dict[str, Any]) -> list[ConvCacheSpec]:
    """What is a geometry in a call's `spec` or, where that is None, in its caches; each once."""
    if spec is None:
        caches = jax.tree.leaves(arrays.get("cache"), is_leaf=_is_cache)
        found = [one.spec for one in caches if _is_cache(one)]
    else:
        found = jax.tree.leaves(spec)
    return list(dict.fromkeys(one for one in found if isinstance(one, ConvCacheSpec)))


def _respecified(cache: Any, specs: dict[Any, Any]) -> Any:
    return _map_caches(lambda one: dataclasses.replace(one, spec=specs[one.spec]), cache)


def _localized(place: _Place, arrays: dict[str, Any], null_slot: int | None, local: Any) -> dict[str, Any]:
    """The arrays of one of several data ranks, inside `shard_map`, with slots and rows as its own numbers."""
    slots, rows = local.num_slots, local.max_requests
    sizes = {name: rows if name in _ROWS else slots for name in (*_SLOTS, *_ROWS)}
    if "step_states" in arrays:
        sizes["step_rows"] = jax.tree.leaves(arrays["step_states"])[0].shape[1]
    rank = jax.lax.axis_index(place.data_axis)
    own = {
        name: localize_slots(arrays[name], rank, size, null_slot if name in _SLOTS else None)
        for name, size in sizes.items()
        if name in arrays
    }
    return {**arrays, **own}


def _usual_specs(place: _Place, call: _Call, name: str) -> Any:
    """Partition specs of an argument by its name."""
    array = call.arrays[name]
    if name in ("conv_state", "conv_windows", "resume_windows"):
        return _pool_specs(place, call.spec, array, name)
    data, tensor = place.data_axis, place.tensor_axis
    if name == "x":
        return None if array is None else P(data, *[None] * (array.ndim - 2), tensor)
    if name == "weight" and isinstance(array, ConvWeight):
        bias = None if array.bias is None else P(*[None] * (array.bias.ndim - 1), tensor)
        return _untyped(ConvWeight)(P(*[None] * (array.taps.ndim - 1), tensor), bias)
    if name in ("weight", "bias"):
        return P(tensor, *[None] * (array.ndim - 1))
    return P() if name == "layer" else P(data, *[None] * (array.ndim - 1))


def _pool_specs(place: _Place, spec: Any, arrays: Any, name: str) -> Any:
    """Partition specs of pools or buffers, a pytree like them; `spec` is one geometry or a prefix."""

    def of_one(one: ConvCacheSpec, array: Any) -> P:
        specs, is_pool = place.specs(one), name == "conv_state"
        full = one.state_shape if is_pool else one.windows_shape
        return _unstacked(specs.conv_state if is_pool else specs.conv_windows, array.ndim == len(full))

    return jax.tree.map(lambda one, group: jax.tree.map(functools.partial(of_one, one), group), spec, arrays)


def _unstacked(spec: P, stacked: bool) -> P:
    """The partition spec of one layer's array where the arrays are not stacked."""
    return spec if stacked else P(*spec[1:])


def _check_shares(problems: Problems, place: _Place, call: _Call) -> None:
    """Records batch, heads and rows of step states that the mesh does not divide."""
    _check_batch(problems, place, call.arrays)
    recurrent = getattr(call.arrays.get("cache"), "recurrent_state", None)
    for path, pool in jax.tree_util.tree_leaves_with_path(recurrent):
        name = f"cache.recurrent_state{jax.tree_util.keystr(path)}"
        if pool.ndim > 2:
            place.divides(problems, name, "heads", pool.shape[2], "tensor", "Heads are not split.")
    for path, steps in jax.tree_util.tree_leaves_with_path(call.arrays.get("step_states")):
        place.divides(problems, f"step_states{jax.tree_util.keystr(path)}", "rows", steps.shape[1], "data")


def _check_batch(problems: Problems, place: _Place, arrays: dict[str, Any]) -> None:
    """Records a batch that the data ranks do not divide, if the call has one."""
    for name in ("state_indices", "num_accepted_tokens"):
        if name in arrays and arrays[name].ndim:
            batch = arrays[name].shape[0]
            place.divides(problems, name, "requests", batch, "data", "Fill up with requests of slot -1.")
            return


def _check_placed(problems: Problems, place: _Place, name: str, array: Any, spec: P) -> None:
    """Records a problem for an array that lies on devices in another way, where that can be seen.

    It would be moved, all of it, in every call. Inside `jit` the sharding of an argument is not known yet.
    """
    if isinstance(array, Tracer) or not isinstance(array, jax.Array) or not array.committed:
        return
    if not array.sharding.is_equivalent_to(NamedSharding(place.mesh, spec), array.ndim):
        problems.add(name, f"divided as {spec} on this mesh", array.sharding, "Put it there once, with jax.device_put.")


def _divided_by_name(place: _Place, array: Any, specs: Any) -> Any:
    """The array, or the index array in the mesh's own type where axes are part of types: hosts make them whole."""
    explicit = jax.sharding.AxisType.Explicit in place.mesh.axis_types
    if not explicit or not isinstance(specs, P) or jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.sharding.reshard(array, NamedSharding(place.mesh, specs))
