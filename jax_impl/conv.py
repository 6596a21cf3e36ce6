"""The short causal convolution on cached state: verify D draft tokens, decode one token.

    y[b, t, c] = act( bias[c] + Σ_j weight[c, j] * u[b, t - K + 1 + j, c] )          j = 0 … K-1

u is the request's history: the newest K-1 columns of its slot, then its new inputs. A new input is rounded to the
state's dtype before it is used, because a later step will read it back from the pool in that dtype; products and sums
are float32, bias first, taps oldest to newest. So D tokens at once equal D steps of one token, bit for bit.

    causal_conv1d_verify    reads conv_state, writes conv_windows; conv_state only where it resumes from inputs
    causal_conv1d_update    advances conv_state by one token

Whole prompts are convolved in `jax_impl.prefill`, with the sums of this module.

Source: the depthwise causal convolution of Mamba, Gated DeltaNet and KDA layers; the buffer is the layout of SGLang's
pull request #28302.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl import checks, history, runs
from jax_impl.entries import Block, load_either, load_entry, store_entry
from jax_impl.implementation import choose_implementation
from jax_impl.layout import ConvCacheSpec, Problems
from jax_impl.runs import live_slot
from jax_impl.windows import row_array

Activation = Literal["silu"]

# Bytes of one thread per run of channels in the kernels. With 16, a thread keeps so many columns in registers that too
# few threads are resident to hide the memory's latency; 8 gain nothing over 4 at any batch size.
THREAD_BYTES = 4
# The same for verify in channel_major, from so many columns of a row on. There the columns of a thread's channels are
# one run of memory, stored in pieces as wide as its length allows: with 4 bytes a thread the 10 columns of K = 4, D = 8
# go out 8 bytes at a time; with 8 bytes, 16 at a time, in half as many transactions.
CHANNEL_MAJOR_THREAD_BYTES = {1: 4, 16: 8}
# Grid points from which on one of them takes two requests: four for each of an H200's 132 multiprocessors, or all that
# fit at once in channel_major, whose kernel needs more registers.
FULL_GRID = {"time_major": 528, "channel_major": 2112}
# Columns a request may have for two to share a grid point. With the 19 of K = 4, D = 16 they take 182 registers a
# thread, which leaves two blocks per multiprocessor.
MAX_PAIRED_COLUMNS = 11


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvWeight:
    """Convolution weights in the layout that the kernels read: one contiguous run of channels per tap.

    Made once, at load time, by `prepare_conv_weight`; a pytree, so it can be passed through `jit`.

    Attributes:
      taps: `[K, conv_dim]`, or `[L, K, conv_dim]` to be indexed by the call's `layer`.
      bias: `[conv_dim]` or `[L, conv_dim]`; or None.
    """

    taps: jax.Array
    bias: jax.Array | None = None


def prepare_conv_weight(weight: jax.Array, bias: jax.Array | None = None) -> ConvWeight:
    """Turns a checkpoint's weight into the kernels' layout. Without this, every call transposes it again.

    Args:
      weight: `[conv_dim, 1, K]` as checkpoints store it, or `[conv_dim, K]`; with a leading layer axis
        `[L, conv_dim, 1, K]` for all layers of a stacked cache.
      bias: `[conv_dim]`, `[L, conv_dim]` with a leading layer axis, or None.

    Returns:
      `ConvWeight` in the same dtypes. Pass it as `weight`, with `bias=None`.

    Raises:
      ValueError: the rank or the bias does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> prepare_conv_weight(jnp.zeros((640, 1, 4))).taps.shape
      (4, 640)
    """
    problems = Problems()
    taps, offset = checks.float_array(problems, "weight", weight), None
    if bias is not None:
        offset = checks.float_array(problems, "bias", bias)
    if taps is not None and (taps.ndim not in (2, 3, 4) or (taps.ndim > 2 and taps.shape[-2] != 1)):
        problems.add("weight", "channel, tap or channel, 1, tap or layer, channel, 1, tap", tuple(taps.shape))
    elif taps is not None:
        taps = taps[..., 0, :] if taps.ndim > 2 else taps
        if offset is not None and offset.shape != taps.shape[:-1]:
            problems.add("bias", f"{taps.shape[:-1]} like the weight", tuple(offset.shape))
    problems.raise_if_any()
    assert taps is not None
    return ConvWeight(jnp.swapaxes(taps, -1, -2), offset)


@dataclasses.dataclass(frozen=True)
class Call:
    """Checked arguments of one call, all arrays int32 or in their own float dtype.

    `x` may be None where verify finds its inputs in the buffer.
    """

    x: Any
    weight: ConvWeight
    spec: ConvCacheSpec
    slots: jax.Array
    null_slot: int | None
    layer: jax.Array | None
    stacked: bool
    activation: Activation | None


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What a verify step is told about its drafts beyond a chain that starts at the slot; int32 arrays.

    Attributes:
      parents: `[B, D]`, links of a tree. resume_tokens: `[B]`, tokens of the step before that count. resume_path:
        `[B, D]`, their nodes. resume_windows: the array in which that step's inputs are; None is the buffer itself.
    """

    parents: jax.Array | None = None
    resume_tokens: jax.Array | None = None
    resume_path: jax.Array | None = None
    resume_windows: jax.Array | None = None

    def advances(self, spec: ConvCacheSpec) -> bool:
        """Whether the step moves the slots on: its inputs replace those that the old slots would need."""
        return self.resume_tokens is not None and spec.storage == "inputs"


def causal_conv1d_verify(
    x: jax.Array | None,
    conv_state: jax.Array,
    conv_windows: jax.Array,
    weight: jax.Array | ConvWeight,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: Any,
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
    """Convolves D draft tokens per request and records every state they may lead to.

    The pool is only read. The request's buffer row receives state[1:] in columns 0 … S-2 and the new inputs in columns
    S-1 … S-2+v (dense: whole windows 0 … v-1; inputs: the new inputs in columns 0 … v-1); columns beyond keep their
    bits.

    With `resume_tokens` no commit is needed between steps: a request's history is then the state after so many tokens
    of the step before, read from its buffer row, which is rewritten in the same launch. With storage "inputs" the row
    would no longer have what the old slot needs, so there the slot is moved on in the same launch.

    Args:
      x: `[B, D, conv_dim]`, inputs of the D tokens of each request; bfloat16, float16 or float32. None with storage
        "inputs" says that the buffer's rows hold them, for callers who keep x of all layers in one array anyway.
      conv_state: the pool, `spec.state_shape`, or one layer's `spec.state_shape[1:]`.
      conv_windows: the verify buffer, `spec.windows_shape`, or one layer's; donate it to update in place.
      weight: `[conv_dim, K]` or `[conv_dim, 1, K]`, the last tap meets the current token; or a `ConvWeight` from
        `prepare_conv_weight`, which the kernels read as it is.
      bias: `[conv_dim]` or None.
      spec: geometry.
      state_indices: int32 `[B]`, slot of each request. Outside 0 … C-1 or equal to `null_slot` skips the request.
      layer: which layer of stacked arrays, an int or an int32 scalar (traced is fine); None with one layer's arrays.
      window_rows: int32 `[B]`, buffer row of each request; None means row b for request b. Outside 0 … R-1 skips.
      num_valid_tokens: int32 `[B]`, v of each request; None means D. Outside 1 … D skips the request.
      null_slot: the pool's padding slot, or None.
      activation: "silu" or None.
      implementation: None chooses; "xla", "pallas" or "pallas_interpret" is obeyed or raises.
      parents: int32 `[B, D]`, links of a draft tree: -1 for the committed state, else an earlier node; each node is
        convolved over its own ancestors. A request with another link among its valid tokens is skipped. Storage
        "sliding" holds chains only and skips every request whose links are not t-1. None is a chain.
      resume_tokens: int32 `[B]`: 0 takes the history from the slot, 1 … D from the row (storage "inputs": from slot and
        row together), anything else skips the request. None is 0 everywhere.
      resume_path: int32 `[B, D]`, the nodes that count of the step before, when that was a tree, as `accepted_path` of
        a commit. None is a chain.
      resume_windows: with storage "inputs" the array in which the step before has left its inputs; None is
        `conv_windows`. Needed where x is None.

    Returns:
      `y` `[B, D, conv_dim]` in x's dtype (the spec's where x is None), zero for skipped requests and for tokens ≥ v;
      and the buffer. With storage "inputs" and `resume_tokens` also the pool, in which the slots of live requests that
      resumed from 1 or more tokens hold the state after those.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests of one call name different rows; where the slots are moved on, also different slots. A request that
      resumes is committed before a step of which no token may count: its row no longer has the state before the step.

    Moves:
      B * (K-1 + D) columns read, B * (D + D+S-1) columns written; with storage "inputs" B * 2D written, B * D where x
      is None, and B * S more where the slots are moved on.

    Example:
      >>> import jax.numpy as jnp
      >>> spec = ConvCacheSpec(1, 2, 1, 1, width=2, num_draft_tokens=2, dtype="float32")
      >>> state, windows = jnp.full(spec.state_shape, 3.0), jnp.zeros(spec.windows_shape)
      >>> y, windows = causal_conv1d_verify(
      ...     jnp.array([[[4.0], [5.0]]]), state, windows, jnp.array([[10.0, 1.0]]),
      ...     spec=spec, state_indices=jnp.array([1]), layer=0, activation=None)
      >>> y.ravel().tolist(), windows.ravel().tolist()
      ([34.0, 45.0], [4.0, 5.0])
    """
    call, rows, valid, drafts = _check_verify(
        x, conv_state, conv_windows, weight, bias, spec, state_indices, layer, window_rows, num_valid_tokens, null_slot,
        activation, implementation, parents, resume_tokens, resume_path, resume_windows,
    )  # fmt: skip
    chosen = choose_implementation(implementation, [spec], call.slots.shape[0])
    if chosen == "xla":
        return _verify_xla(call, conv_state, conv_windows, rows, valid, drafts)
    return _verify_pallas(call, conv_state, conv_windows, rows, valid, drafts, interpret=chosen != "pallas")


def _check_verify(
    x: Any,
    conv_state: Any,
    conv_windows: Any,
    weight: Any,
    bias: Any,
    spec: ConvCacheSpec,
    state_indices: Any,
    layer: Any,
    window_rows: Any,
    num_valid_tokens: Any,
    null_slot: Any,
    activation: Any,
    implementation: Any,
    parents: Any,
    resume_tokens: Any,
    resume_path: Any,
    resume_windows: Any,
) -> tuple[Call, jax.Array | None, jax.Array | None, Drafts]:
    """What a verify is asked for: the call, rows and valid tokens if given, the drafts. Raises unless all fits."""
    checks.spec_argument(spec)
    problems = Problems()
    inputs_kept = x is None and spec.storage == "inputs"
    if x is None and not inputs_kept:
        problems.add("x", f'an array with storage "{spec.storage}"', None, "Only rows of inputs can hold it already.")
    call, batch, stacked = check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation,
        needs_x=x is not None,
    )  # fmt: skip
    if not inputs_kept:
        check_x(problems, x, "request, token, channel", (batch, spec.num_draft_tokens, spec.conv_dim))
    rows = row_array(problems, window_rows, batch, spec)
    valid = None
    if num_valid_tokens is not None:
        valid = checks.index_array(problems, "num_valid_tokens", num_valid_tokens, batch)
    checks.cache_array(problems, "conv_windows", conv_windows, spec, stacked=stacked)
    drafts = _check_drafts(
        problems, parents, resume_tokens, resume_path, resume_windows, spec,
        batch=batch, stacked=stacked, inputs_kept=inputs_kept,
    )  # fmt: skip
    problems.raise_if_any()
    assert call is not None
    return call, None if window_rows is None else rows, valid, drafts


def _check_drafts(
    problems: Problems,
    parents: Any,
    resume_tokens: Any,
    resume_path: Any,
    resume_windows: Any,
    spec: ConvCacheSpec,
    *,
    batch: int | None,
    stacked: bool | None,
    inputs_kept: bool,
) -> Drafts:
    """The draft arguments as int32 arrays; `inputs_kept` says that the buffer holds the step's own inputs."""
    tokens = spec.num_draft_tokens

    def indices(name: str, value: Any, size: int | None) -> jax.Array | None:
        return None if value is None else checks.index_array(problems, name, value, batch, size)

    if resume_tokens is None:
        for name, value in (("resume_path", resume_path), ("resume_windows", resume_windows)):
            if value is not None:
                problems.add(name, "None without resume_tokens", checks.given(value))
    elif inputs_kept and resume_windows is None:
        problems.add(
            "resume_windows",
            "the array that holds the inputs of the step before, where x is None",
            "None",
            "The buffer holds those of this step.",
        )
    if resume_windows is not None:
        if spec.storage == "inputs":
            checks.cache_array(problems, "resume_windows", resume_windows, spec, stacked=stacked)
        else:
            hint = "It resumes from the row that it writes."
            problems.add("resume_windows", f'None with storage "{spec.storage}"', checks.given(resume_windows), hint)
    return Drafts(
        indices("parents", parents, tokens),
        indices("resume_tokens", resume_tokens, None),
        indices("resume_path", resume_path, tokens),
        resume_windows,
    )


def causal_conv1d_update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array | ConvWeight,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: Any,
    layer: Any = None,
    null_slot: int | None = None,
    activation: Activation | None = "silu",
    implementation: checks.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Plain decoding of one token per request: the state moves on by one column.

    Args:
      x: `[B, conv_dim]`, the token's input.
      conv_state: the pool, stacked or one layer's; donate it to update in place.
      weight, bias, spec, state_indices, layer, null_slot, activation, implementation: as in `causal_conv1d_verify`.

    Returns:
      `y` `[B, conv_dim]` in x's dtype, zero for skipped requests; and the pool, whose slots now hold state[1:] + x.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests of one call name different slots.

    Moves:
      B * (S + 1) columns read and as many written.
    """
    checks.spec_argument(spec)
    problems = Problems()
    call, batch, _ = check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation
    )
    check_x(problems, x, "request, channel", (batch, spec.conv_dim))
    problems.raise_if_any()
    assert call is not None
    call = dataclasses.replace(call, x=call.x[:, None, :])
    chosen = choose_implementation(implementation, [spec], call.slots.shape[0])
    if chosen != "xla":
        y, conv_state = _update_pallas(call, conv_state, interpret=chosen != "pallas")
        return y[:, 0], conv_state
    live = live_requests(call.slots, call.layer, spec=spec, null_slot=call.null_slot)
    call = without_invalid(call, live[:, None])
    # Read before the pool is written: fused into the write, it would need a second pool.
    columns = _history_then_inputs(call, lax.optimization_barrier(take_state(call, conv_state, live)))
    y = _convolve(call, [columns[: spec.width]], live[:, None])
    state = jnp.stack(columns[-spec.state_columns :], axis=1)
    return y[:, 0], put_state(call, conv_state, state, live)


def check_call(
    problems: Problems,
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any,
    spec: ConvCacheSpec,
    state_indices: Any,
    layer: Any,
    null_slot: Any,
    activation: Any,
    implementation: Any,
    *,
    needs_x: bool = True,
) -> tuple[Call | None, int | None, bool | None]:
    """What verify, update and prefill share: the call, B and whether the pool is stacked, each None if unknown."""
    inputs = checks.float_array(problems, "x", x) if needs_x else None
    slots = checks.index_array(problems, "state_indices", state_indices, None)
    stacked = checks.cache_array(problems, "conv_state", conv_state, spec)
    taps = _check_weight(problems, weight, bias, spec, stacked)
    picked = checks.layer_index(problems, layer, stacked, spec)
    null = checks.null_slot_value(problems, null_slot)
    checks.activation_name(problems, activation)
    checks.implementation_name(problems, implementation)
    batch = None if slots is None else slots.shape[0]
    if (inputs is None and needs_x) or slots is None or stacked is None or taps is None:
        return None, batch, stacked
    return Call(inputs, taps, spec, slots, null, picked, stacked, activation), batch, stacked


def check_x(problems: Problems, x: Any, axes: str, expected: tuple[int | None, ...]) -> None:
    """Records a problem unless x has the expected shape; None stands for a number that is not known."""
    if not isinstance(x, jax.Array | np.ndarray):
        return  # reported already
    if not checks.shape_fits(x.shape, expected):
        problems.add("x", f"{axes} = {checks.shape_text(expected)}", tuple(x.shape))


def _check_weight(
    problems: Problems, weight: Any, bias: Any, spec: ConvCacheSpec, stacked: bool | None
) -> ConvWeight | None:
    """The weight in the kernels' layout; None with a problem recorded when it does not fit."""
    dim, width = spec.conv_dim, spec.width
    if isinstance(weight, ConvWeight):
        if checks.float_array(problems, "weight.taps", weight.taps) is None:
            return None
        lead = (spec.num_layers,) if weight.taps.ndim == 3 else ()
        axes = "layer, " if lead else ""
        before = len(problems.messages)
        problems.expect("weight.taps", f"{axes}tap, channel", (*lead, width, dim), weight.taps.shape)
        if weight.bias is not None and checks.float_array(problems, "weight.bias", weight.bias) is not None:
            problems.expect("weight.bias", f"{axes}channel", (*lead, dim), weight.bias.shape)
        if bias is not None:
            problems.add("bias", "None with a ConvWeight", "an array", "Give it to prepare_conv_weight.")
        if lead and stacked is False:
            problems.add("weight.taps", f"tap, channel = {(width, dim)} with one layer's arrays", weight.taps.shape)
        return weight if len(problems.messages) == before else None
    taps = checks.float_array(problems, "weight", weight)
    if taps is not None:
        expected, axes = ((dim, 1, width), "channel, 1, tap") if taps.ndim == 3 else ((dim, width), "channel, tap")
        problems.expect("weight", axes, expected, taps.shape, "The last tap meets the current token.")
        taps = jnp.swapaxes(taps[:, 0] if taps.ndim == 3 else taps, 0, 1) if taps.shape == expected else None
    offset = None if bias is None else checks.float_array(problems, "bias", bias)
    if offset is not None:
        problems.expect("bias", "channel", (dim,), offset.shape)
    return None if taps is None else ConvWeight(taps, offset)


def _verify_xla(
    call: Call,
    conv_state: jax.Array,
    conv_windows: jax.Array,
    rows: jax.Array | None,
    valid: jax.Array | None,
    drafts: Drafts,
) -> tuple[jax.Array, ...]:
    spec, tokens = call.spec, call.spec.num_draft_tokens
    rows = jnp.arange(call.slots.shape[0], dtype=jnp.int32) if rows is None else rows
    live = live_requests(call.slots, call.layer, rows, valid, spec=spec, null_slot=call.null_slot)
    links = None if drafts.parents is None else [drafts.parents[:, token] for token in range(tokens)]
    if links is not None:
        live &= history.links_hold(links, valid, spec=spec)
    if drafts.resume_tokens is None:
        state = take_state(call, conv_state, live)
    else:
        live, state = _take_resumed(call, conv_state, conv_windows, rows, live, drafts)
    token_is_valid = jnp.broadcast_to(live[:, None], (rows.shape[0], tokens))
    if valid is not None:
        token_is_valid = live[:, None] & (jnp.arange(tokens, dtype=jnp.int32)[None, :] < valid[:, None])
    where = runs.Runs(spec, rows, live, of="windows", stacked=call.stacked, layer=call.layer)
    inputs_kept = call.x is None
    if inputs_kept:
        call = dataclasses.replace(call, x=_entry(runs.take(conv_windows, where), spec))
    call, is_dense, after = without_invalid(call, token_is_valid), spec.storage == "dense", None
    if links is None:
        columns = _history_then_inputs(call, state)
        y = _convolve(call, [columns[token : token + spec.width] for token in range(tokens)], token_is_valid)
        shared = columns[len(columns) - (tokens + spec.state_columns - 1) :]
        if is_dense:
            after = _stacked([shared[token : token + spec.state_columns] for token in range(tokens)])
        row = shared[len(shared) - spec.num_columns :]
    else:
        old = [state[:, column] for column in range(spec.state_columns)]
        row = [round_to_state(call.x, spec)[:, token] for token in range(tokens)]
        before = history.node_histories(old, row, links, history.choose_plain)
        inputs = list(zip(before, row, strict=True))
        y = _convolve(call, [[*one[len(one) - (spec.width - 1) :], x] for one, x in inputs], token_is_valid)
        after = _tree_windows(old, row, links) if is_dense else None
        row = [*old[1:], *row] if spec.storage == "sliding" else row
    if not inputs_kept:
        conv_windows = _put_row(conv_windows, row, after, where, token_is_valid, everything=valid is None)
    if not drafts.advances(spec):
        return y, conv_windows
    assert drafts.resume_tokens is not None
    return y, conv_windows, put_state(call, conv_state, state, live & (drafts.resume_tokens >= 1))


def _stacked(windows: list[list[jax.Array]]) -> jax.Array:
    """Windows of S columns for each token as `[B, tokens, S, conv_dim]`."""
    return jnp.stack([jnp.stack(window, axis=1) for window in windows], axis=1)


def _tree_windows(old: list[jax.Array], row: list[jax.Array], links: list[jax.Array]) -> jax.Array:
    """The S columns after every node of a tree, as bit copies of the slot's columns and of the inputs."""
    old_bits, row_bits = (list(map(runs.as_bits, columns)) for columns in (old, row))
    before = history.node_histories(old_bits, row_bits, links, history.choose_plain)
    windows = [[*one[1:], x] for one, x in zip(before, row_bits, strict=True)]
    return runs.from_bits(_stacked(windows), row[0].dtype)


def _put_row(
    conv_windows: jax.Array,
    row: list[jax.Array],
    after: jax.Array | None,
    where: runs.Runs,
    token_is_valid: jax.Array,
    *,
    everything: bool,
) -> jax.Array:
    """The buffer with the rows of one call: the columns `row`, or, where given, the windows `after` every token.

    Unless `everything` is written, what belongs to tokens that are not valid keeps its bits.
    """
    spec = where.spec
    if after is None and everything:
        return runs.put(conv_windows, _entry(jnp.stack(row, axis=1), spec), where)
    if after is None:  # column by column, because those of invalid tokens are not written
        old_columns = jnp.repeat(where.live[:, None], spec.first_token_column, axis=1)
        written = jnp.concatenate([old_columns, token_is_valid], axis=1)
        pieces = jnp.stack([column[:, None] for column in row], axis=1)
    else:
        written = token_is_valid
        pieces = after
    position = jnp.broadcast_to(jnp.arange(written.shape[1], dtype=jnp.int32)[None, :], written.shape)
    where = dataclasses.replace(
        where, rows=jnp.broadcast_to(where.rows[:, None], written.shape), live=written, starts=position, num_columns=1
    )
    return runs.put(conv_windows, _entry(pieces, spec), where)


def _take_resumed(
    call: Call, conv_state: jax.Array, conv_windows: jax.Array, rows: jax.Array, live: jax.Array, drafts: Drafts
) -> tuple[jax.Array, jax.Array]:
    """Which requests are live still, and the states `[B, S, conv_dim]` that they resume from, zeros for the others."""
    spec, count = call.spec, drafts.resume_tokens
    assert count is not None
    entry = history.entry_of(drafts.resume_path)
    resumes = count >= 1
    live &= (count >= 0) & (count <= spec.num_draft_tokens)
    slot_runs = runs.Runs(spec, call.slots, live, of="state", stacked=call.stacked, layer=call.layer)
    if spec.storage == "inputs":
        within, columns = history.columns_after(count, entry, None, spec=spec)
        live &= within
        previous = conv_windows if drafts.resume_windows is None else drafts.resume_windows
        slot_runs = dataclasses.replace(slot_runs, live=live)
        state = history.take_state_after(conv_state, previous, slot_runs, rows, columns)
    else:
        within, first = history.token_after(count, entry, None, spec=spec)
        live &= within | jnp.logical_not(resumes)
        columns = spec.state_columns if spec.storage == "sliding" else None
        row_runs = runs.Runs(
            spec, rows, live & resumes, "windows", call.stacked, call.layer, starts=first, num_columns=columns
        )
        slot_runs = dataclasses.replace(slot_runs, live=live & jnp.logical_not(resumes))
        state = runs.union(runs.take(conv_windows, row_runs), runs.take(conv_state, slot_runs))
    # Read before the row, or the slot, is written.
    return live, lax.optimization_barrier(_entry(state, spec))


def live_requests(
    slots: jax.Array,
    layer: jax.Array | None,
    rows: jax.Array | None = None,
    valid: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    null_slot: int | None,
) -> jax.Array:
    """Which requests are not skipped, for arrays in the plain form and for scalars in the kernel; None is not asked.

    Slots in the pool, a layer in the stack, rows in the buffer, and at least one and at most D valid tokens.
    """
    live = live_slot(slots, null_slot, spec=spec)
    if layer is not None:
        live &= (layer >= 0) & (layer < spec.num_layers)
    if rows is not None:
        live &= (rows >= 0) & (rows < spec.max_requests)
    if valid is not None:
        live &= (valid >= 1) & (valid <= spec.num_draft_tokens)
    return live


def take_state(call: Call, conv_state: jax.Array, live: jax.Array) -> jax.Array:
    """Slots' states as `[B, S, conv_dim]`, zeros where not live."""
    where = runs.Runs(call.spec, call.slots, live, of="state", stacked=call.stacked, layer=call.layer)
    return _entry(runs.take(conv_state, where), call.spec)


def put_state(call: Call, conv_state: jax.Array, state: jax.Array, live: jax.Array) -> jax.Array:
    """Writes states `[B, S, conv_dim]` to live slots; what they are made of has been read when the first is written."""
    state = lax.optimization_barrier(state)
    where = runs.Runs(call.spec, call.slots, live, of="state", stacked=call.stacked, layer=call.layer)
    return runs.put(conv_state, _entry(state, call.spec), where)


def _entry(columns: jax.Array, spec: ConvCacheSpec) -> jax.Array:
    """(column, channel) to the spec's axis order and back: the same swap both ways."""
    return columns if spec.axis_order == "time_major" else jnp.swapaxes(columns, -1, -2)


def round_to_state(x: jax.Array, spec: ConvCacheSpec) -> jax.Array:
    """x in the state's dtype. The barrier keeps the compiler from computing with the unrounded value instead."""
    if x.dtype == jnp.dtype(spec.dtype):
        return x
    return lax.optimization_barrier(x.astype(spec.dtype))


def _history_then_inputs(call: Call, state: jax.Array) -> list[jax.Array]:
    """K-1 + tokens columns `[B, conv_dim]`: the newest K-1 of the state, then the inputs, all in the state's dtype.

    Separate columns instead of one array, so that the compiler reads each where it is used and never writes them out.
    """
    first, fresh = call.spec.state_columns - (call.spec.width - 1), round_to_state(call.x, call.spec)
    old = [state[:, column] for column in range(first, call.spec.state_columns)]
    return old + [fresh[:, token] for token in range(call.x.shape[1])]


def without_invalid(call: Call, token_is_valid: jax.Array) -> Call:
    """The call with zeros for x of invalid tokens, so that what stands there reaches no gradient either."""
    zero = jnp.zeros((), call.x.dtype)
    return dataclasses.replace(call, x=jnp.where(token_is_valid[:, :, None], call.x, zero))


def _convolve(call: Call, windows: list[list[jax.Array]], token_is_valid: jax.Array) -> jax.Array:
    """`[B, tokens, conv_dim]` in x's dtype, out of the K columns of each token; zero where not `token_is_valid`."""
    taps, bias = layer_weight(call)
    rows = [taps[tap][None, :] for tap in range(call.spec.width)]
    start = no_bias() if bias is None else bias[None, :]
    sums = [activate(weighted_sum(window, rows, start), call.activation) for window in windows]
    return jnp.where(token_is_valid[:, :, None], jnp.stack(sums, axis=1), jnp.float32(0)).astype(call.x.dtype)


def layer_weight(call: Call) -> tuple[jax.Array, jax.Array | None]:
    """Taps `[K, conv_dim]` and bias of the call's layer; a layer outside the stack is skipped elsewhere."""
    weight = call.weight
    if weight.taps.ndim == 2 or call.layer is None:
        return weight.taps, weight.bias
    pick = functools.partial(lax.dynamic_index_in_dim, index=call.layer, keepdims=False)
    return pick(weight.taps), None if weight.bias is None else pick(weight.bias)


def activate(total: jax.Array, activation: Activation | None) -> jax.Array:
    return total * jax.nn.sigmoid(total) if activation == "silu" else total


def weighted_sum(window: Sequence[jax.Array], taps: Sequence[jax.Array], start: jax.Array) -> jax.Array:
    """start + Σ taps[j] * window[j] in float32: bias (or zero) first, then taps oldest to newest, on every path."""
    total = start.astype(jnp.float32)
    for tap, column in zip(taps, window, strict=True):
        total = total + column.astype(jnp.float32) * tap.astype(jnp.float32)
    return total


def no_bias() -> jax.Array:
    """A zero that XLA cannot see through.

    Compilers fuse a product into the addition it feeds. XLA drops the addition of a plain zero, and in the sum of the
    first two products either could then be the fused one: two programs would round differently.
    """
    return lax.optimization_barrier(jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class Plan(Block):
    """What is static about one kernel launch.

    Attributes:
      advance: False is verify, which reads the pool and writes the buffer; True is update, which rewrites the slot.
      requests: of one grid point; they share its taps, and their loads are in flight together.
      written: names of the arrays that are written in place: "windows_out", "state_out", both or none.
    """

    tokens: int
    y_dtype: Any
    null_slot: int | None
    activation: Activation | None
    stacked: bool
    stacked_weight: bool
    advance: bool
    requests: int
    written: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Target:
    """Scalars of one request in a kernel: what it reads, where its columns go, and whether it does.

    `inside` says that slot and row exist, which is all that an address waits for; `live` that nothing skips it.
    """

    request: jax.Array
    inside: jax.Array
    live: jax.Array
    layer: tuple[jax.Array, ...]
    slot: jax.Array
    row: jax.Array
    valid: jax.Array | None
    links: list[jax.Array] | None
    resume: jax.Array | None
    places: Any


def _conv_kernel(
    # inputs
    inputs: dict[str, Any],
    # outputs: the arrays of `plan.written`, then y
    *outputs_out: Any,
    plan: Plan,
) -> None:
    """One channel block of `plan.requests` requests: every load before the first store, each column stored once.

    Nothing branches before the loads: a request that is skipped reads slot 0 instead and stores zeros to y only. So the
    inputs and taps are in flight while the slot numbers are fetched, and the states follow at once.
    """
    from jax_impl.pallas_backend import grid_index, load_runs, span

    spec, how = plan.spec, (plan.vector, plan.interpret)
    *written, y_out = outputs_out
    arrays_out = dict(zip(plan.written, written, strict=True))
    channels = span(grid_index("block") * plan.block, plan.block)
    layer = (inputs["layer_in"][0],) if plan.stacked else ()
    safe_layer = tuple(jnp.clip(one, 0, spec.num_layers - 1) for one in layer)
    requests = [grid_index("request") * plan.requests + number for number in range(plan.requests)]
    targets = [_target(inputs, request, layer, plan=plan) for request in requests]

    def read(ref: Any, *place: Any, count: int) -> list[jax.Array]:
        return load_runs(ref, (*place, span(0, count), channels), (count, plan.block), *how)

    if "x_in" in inputs:
        fresh = [read(inputs["x_in"], request, count=plan.tokens) for request in requests]
    else:
        places = [(*safe_layer, jnp.where(one.inside, one.row, jnp.int32(0))) for one in targets]
        fresh = [
            load_entry(inputs["windows_in"], at, channels, plan.tokens, plan=plan, read_only=True) for at in places
        ]
    of_weight = safe_layer if plan.stacked_weight else ()
    taps = read(inputs["taps_in"], *of_weight, count=spec.width)
    if "bias_in" in inputs:
        start = read(inputs["bias_in"], *of_weight, count=1)[0]
    else:
        start = no_bias() if plan.interpret else jnp.float32(0)
    states = [_load_history(inputs, arrays_out, one, safe_layer, channels, plan=plan) for one in targets]
    for target, state, x in zip(targets, states, fresh, strict=True):
        _convolve_request(arrays_out, y_out, target, (state, x, taps, start), channels, plan=plan)


def _target(inputs: dict[str, Any], request: jax.Array, layer: tuple[jax.Array, ...], *, plan: Plan) -> Target:
    """The scalars of one request; those of an update have the slot for a row."""
    spec, slot = plan.spec, inputs["slots_in"][request]
    row = slot if plan.advance else inputs["rows_in"][request] if "rows_in" in inputs else request
    valid = inputs["valid_in"][request] if "valid_in" in inputs else None
    live = live_requests(
        slot,
        layer[0] if layer else None,
        None if plan.advance else row,
        valid,
        spec=spec,
        null_slot=plan.null_slot,
    )
    inside, links, resume, places = live, None, None, None
    if "parents_in" in inputs:
        links = [inputs["parents_in"][request, token] for token in range(plan.tokens)]
        live &= history.links_hold(links, valid, spec=spec)
    if "resume_in" in inputs:
        resume = inputs["resume_in"][request]
        entry = history.entry_in(inputs.get("resume_path_in"), request)
        live &= (resume >= 0) & (resume <= spec.num_draft_tokens)
        find = history.columns_after if spec.storage == "inputs" else history.token_after
        within, places = find(resume, entry, None, spec=spec)
        live &= within | (resume == 0)
    return Target(request, inside, live, layer, slot, row, valid, links, resume, places)


def _load_history(
    # inputs
    inputs: dict[str, Any],
    # outputs: read here, as they were
    arrays_out: dict[str, Any],
    target: Target,
    layer: tuple[jax.Array, ...],
    channels: Any,
    *,
    plan: Plan,
) -> list[jax.Array]:
    """The S columns before a request's first token: its slot's, or those after the tokens that it resumes from."""
    spec, count = plan.spec, plan.spec.state_columns
    slot, row = ((*layer, jnp.where(target.inside, one, jnp.int32(0))) for one in (target.slot, target.row))
    pool = arrays_out["state_out"] if "state_out" in plan.written else inputs["state_in"]
    if target.resume is None:
        return load_entry(pool, slot, channels, count, plan=plan, read_only=not plan.advance)
    buffer = inputs["previous_in"] if "previous_in" in inputs else arrays_out["windows_out"]
    if spec.storage == "inputs":
        columns: list[history.Column] = target.places
        return load_either(
            (pool, [(*slot, one.of_slot) for one in columns]),
            (buffer, [(*row, one.of_inputs) for one in columns]),
            [one.is_input for one in columns],
            channels,
            plan=plan,
        )
    first = target.places
    in_row = [(first, column) if spec.storage == "dense" else (first + column,) for column in range(count)]
    return load_either(
        (pool, [(*slot, column) for column in range(count)]),
        (buffer, [(*row, *one) for one in in_row]),
        [target.resume >= 1] * count,
        channels,
        plan=plan,
    )


def _convolve_request(
    # outputs
    arrays_out: dict[str, Any],
    y_out: Any,
    target: Target,
    loaded: tuple[list[jax.Array], list[jax.Array], list[jax.Array], jax.Array],
    channels: Any,
    *,
    plan: Plan,
) -> None:
    """Stores all that one request leaves: `loaded` are its state, its inputs, the taps and what the sums start from."""
    from jax_impl.pallas_backend import choose_runs, span, store_runs, when, zero_unless

    spec, tokens, how, history_len = plan.spec, plan.tokens, (plan.vector, plan.interpret), plan.spec.width - 1
    state, x, taps, start = loaded
    row_columns = [value.astype(spec.dtype) for value in x]
    if target.links is None:
        columns = state[spec.state_columns - history_len :] + row_columns
        inputs_of = [columns[token : token + spec.width] for token in range(tokens)]
        newest = state[1:] + row_columns
        after = [newest[token : token + spec.state_columns] for token in range(tokens)]
    else:
        choose = functools.partial(choose_runs, vector=plan.vector, interpret=plan.interpret)
        before = history.node_histories(state, row_columns, target.links, choose)
        pairs = list(zip(before, row_columns, strict=True))
        inputs_of = [[*one[len(one) - history_len :], value] for one, value in pairs]
        after = [[*one[1:], value] for one, value in pairs]
    store = functools.partial(_store_columns, arrays_out, target, (state, row_columns, after), channels, plan=plan)
    when(target.live)(store)
    outputs = {}
    for token in range(tokens):
        total = weighted_sum(inputs_of[token], taps, start)
        y = activate_in_kernel(total, plan=plan).astype(plan.y_dtype)
        kept = target.live if target.valid is None else target.live & (target.valid > token)
        outputs[token] = zero_unless(kept, y, *how)
    store_runs(y_out, (target.request, span(0, tokens), channels), outputs, *how)


def _store_columns(
    # outputs
    arrays_out: dict[str, Any],
    target: Target,
    made: tuple[list[jax.Array], list[jax.Array], list[list[jax.Array]]],
    channels: Any,
    *,
    plan: Plan,
) -> None:
    """What a live request leaves in pool and buffer, out of its state, its inputs and the states after each token."""
    from jax_impl.pallas_backend import when

    (state, row_columns, after), spec = made, plan.spec
    slot, row = (*target.layer, target.slot), (*target.layer, target.row)
    if plan.advance:
        store_entry(arrays_out["state_out"], slot, channels, after[0], None, plan=plan)
        return
    if "windows_out" in plan.written and spec.storage == "dense":
        for token, window in enumerate(after):
            at = (*row, token)
            store = functools.partial(store_entry, arrays_out["windows_out"], at, channels, window, None, plan=plan)
            if target.valid is None or token == 0:
                store()
            else:
                when(target.valid > token)(store)
    elif "windows_out" in plan.written:
        whole = row_columns if spec.storage == "inputs" else [*state[1:], *row_columns]
        limit = None if target.valid is None else target.valid + spec.first_token_column
        store_entry(arrays_out["windows_out"], row, channels, whole, limit, plan=plan)
    if "state_out" in plan.written:
        assert target.resume is not None
        moved = functools.partial(store_entry, arrays_out["state_out"], slot, channels, state, None, plan=plan)
        when(target.resume >= 1)(moved)


def activate_in_kernel(total: jax.Array, *, plan: Plan) -> jax.Array:
    """The activation: the plain form for float32 results, the hardware's approximation for 16-bit ones."""
    from jax_impl.pallas_backend import silu

    if plan.activation == "silu" and plan.y_dtype != jnp.float32:
        return silu(total, plan.vector, plan.interpret)
    return activate(total, plan.activation)


def default_thread_bytes(spec: ConvCacheSpec, *, advance: bool) -> int:
    """Bytes of one thread per run of channels, from the tables above."""
    if advance or spec.axis_order == "time_major" or spec.storage == "dense":
        return THREAD_BYTES
    return next(size for least, size in reversed(CHANNEL_MAJOR_THREAD_BYTES.items()) if spec.num_columns >= least)


def requests_per_block(batch: int, blocks: int, columns: int, axis_order: str) -> int:
    """Requests that one grid point takes: two when the batch is even and enough grid points remain, else one."""
    two = batch % 2 == 0 and batch // 2 * blocks >= FULL_GRID[axis_order] and columns <= MAX_PAIRED_COLUMNS
    return 2 if two else 1


def prepare_launch(
    call: Call,
    *,
    tokens: int,
    advance: bool,
    interpret: bool,
    thread_bytes: int | None = None,
    pair_requests: bool = True,
    written: tuple[str, ...] = ("state_out",),
) -> tuple[dict[str, jax.Array], Plan]:
    """What every convolution kernel reads besides pool and buffer, and what is static about its launch.

    `tokens` are those of one grid point; with `pair_requests` it may take two requests. `thread_bytes` None takes
    `default_thread_bytes`.
    """
    from jax_impl import pallas_backend

    spec, batch, dim = call.spec, call.slots.shape[0], call.spec.conv_dim
    y_dtype = jnp.dtype(spec.dtype) if call.x is None else call.x.dtype
    thread_bytes = thread_bytes or default_thread_bytes(spec, advance=advance)
    block, vector = pallas_backend.block_of(dim, max(spec.item_bytes, y_dtype.itemsize), thread_bytes)
    inputs = {"slots_in": call.slots, "taps_in": call.weight.taps}
    if call.x is not None:
        inputs["x_in"] = call.x
    if call.weight.bias is not None:
        inputs["bias_in"] = call.weight.bias[..., None, :]  # one run, like a tap
    if call.layer is not None:
        inputs["layer_in"] = call.layer.reshape(1)
    columns = (spec.width - 1 + tokens) * max(1, thread_bytes // THREAD_BYTES)  # in registers of THREAD_BYTES
    plan = Plan(
        spec=spec,
        tokens=tokens,
        y_dtype=y_dtype,
        null_slot=call.null_slot,
        activation=call.activation,
        stacked=call.stacked,
        stacked_weight=call.weight.taps.ndim == 3,
        advance=advance,
        requests=requests_per_block(batch, dim // block, columns, spec.axis_order) if pair_requests else 1,
        block=block,
        vector=vector,
        interpret=interpret,
        written=written,
    )
    return inputs, plan


@functools.partial(jax.jit, static_argnames="plan")
def _run_conv(inputs: dict[str, jax.Array], written: tuple[jax.Array, ...], *, plan: Plan) -> tuple[jax.Array, ...]:
    """The launch, as a jitted function of its own so that all layers of a model share one traced kernel.

    Returns y, then the arrays of `plan.written`.
    """
    from jax_impl import pallas_backend

    batch, dim = inputs["slots_in"].shape[0], plan.spec.conv_dim
    like = inputs["x_in"] if "x_in" in inputs else inputs["windows_in"]
    *updated, y = pallas_backend.call_in_place(
        functools.partial(_conv_kernel, plan=plan),
        inputs,
        written,
        (pallas_backend.fresh_like(like, (batch, plan.tokens, dim), plan.y_dtype),),
        grid={"request": batch // plan.requests, "block": dim // plan.block},
        name=f"specconv_{'update' if plan.advance else 'verify'}_{plan.spec.axis_order}",
        interpret=plan.interpret,
    )
    return y, *updated


def _verify_pallas(
    call: Call,
    conv_state: jax.Array,
    conv_windows: jax.Array,
    rows: jax.Array | None,
    valid: jax.Array | None,
    drafts: Drafts = Drafts(),
    *,
    interpret: bool,
    thread_bytes: int | None = None,
) -> tuple[jax.Array, ...]:
    """Launches verify over requests × channel blocks. `thread_bytes` is for tests and measurements."""
    spec, batch = call.spec, call.slots.shape[0]
    advances, inputs_kept = drafts.advances(spec), call.x is None
    if batch == 0 or spec.max_requests == 0:
        y_dtype = jnp.dtype(spec.dtype) if inputs_kept else call.x.dtype
        y = jnp.zeros((batch, spec.num_draft_tokens, spec.conv_dim), y_dtype)
        return (y, conv_windows, conv_state) if advances else (y, conv_windows)
    arrays = {"windows_out": None if inputs_kept else conv_windows, "state_out": conv_state if advances else None}
    written = {name: array for name, array in arrays.items() if array is not None}
    inputs, plan = prepare_launch(
        call,
        tokens=spec.num_draft_tokens,
        advance=False,
        interpret=interpret,
        thread_bytes=thread_bytes,
        written=tuple(written),
    )
    optional = {
        "state_in": None if advances else conv_state,
        "windows_in": conv_windows if inputs_kept else None,
        "rows_in": rows,
        "valid_in": valid,
        "parents_in": drafts.parents,
        "resume_in": drafts.resume_tokens,
        "resume_path_in": drafts.resume_path,
        "previous_in": drafts.resume_windows,
    }
    inputs |= {name: array for name, array in optional.items() if array is not None}
    y, *after = _run_conv(inputs, tuple(written.values()), plan=plan)
    done = {"windows_out": conv_windows} | dict(zip(written, after, strict=True))
    return y, *(done[name] for name in ("windows_out", "state_out") if name in done)


def _update_pallas(
    call: Call, conv_state: jax.Array, *, interpret: bool, thread_bytes: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Launches the one-token step over requests × channel blocks, in place on the pool."""
    if call.slots.shape[0] == 0:
        return jnp.zeros(call.x.shape, call.x.dtype), conv_state
    inputs, plan = prepare_launch(call, tokens=1, advance=True, interpret=interpret, thread_bytes=thread_bytes)
    y, conv_state = _run_conv(inputs, (conv_state,), plan=plan)
    return y, conv_state
