"""The short causal convolution on cached state: verify D draft tokens, decode one token, prefill a prompt.

    y[b, t, c] = act( bias[c] + Σ_j weight[c, j] * u[b, t - K + 1 + j, c] )          j = 0 … K-1

u is the request's history: the newest K-1 columns of its slot, then its new inputs. A new input is rounded to the
state's dtype before it is used, because a later step will read it back from the pool in that dtype; products and sums
are float32, bias first, taps oldest to newest. So D tokens at once equal D steps of one token, bit for bit.

    causal_conv1d_verify    reads conv_state, writes conv_windows, never conv_state
    causal_conv1d_update    advances conv_state by one token
    causal_conv1d_prefill   leaves the last S inputs of each prompt in conv_state

Source: the depthwise causal convolution of Mamba, Gated DeltaNet and KDA layers; the buffer is the layout of SGLang's
pull request #28302.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl import checks, runs
from jax_impl.layout import ConvCacheSpec, Problems
from jax_impl.windows import live_slot, row_array

Activation = Literal["silu"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """Checked arguments of one call, all arrays int32 or in their own float dtype."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    spec: ConvCacheSpec
    slots: jax.Array
    null_slot: int | None
    layer: jax.Array | None
    stacked: bool
    activation: Activation | None


def causal_conv1d_verify(
    x: jax.Array,
    conv_state: jax.Array,
    conv_windows: jax.Array,
    weight: jax.Array,
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
) -> tuple[jax.Array, jax.Array]:
    """Convolves D draft tokens per request and records every state they may lead to.

    The pool is only read. The request's buffer row receives state[1:] in columns 0 … S-2 and the new inputs in columns
    S-1 … S-2+v (dense: whole windows 0 … v-1); columns beyond keep their bits.

    Args:
      x: `[B, D, conv_dim]`, inputs of the D tokens of each request; bfloat16, float16 or float32.
      conv_state: the pool, `spec.state_shape`, or one layer's `spec.state_shape[1:]`.
      conv_windows: the verify buffer, `spec.windows_shape`, or one layer's; donate it to update in place.
      weight: `[conv_dim, K]` or `[conv_dim, 1, K]`; the last tap meets the current token.
      bias: `[conv_dim]` or None.
      spec: geometry.
      state_indices: int32 `[B]`, slot of each request. A slot outside 0 … C-1 or equal to `null_slot` skips the request.
      layer: which layer of stacked arrays, an int or an int32 scalar (traced is fine); None with one layer's arrays.
      window_rows: int32 `[B]`, buffer row of each request; None means row b for request b. Outside 0 … R-1 skips.
      num_valid_tokens: int32 `[B]`, v of each request; None means D. Outside 1 … D skips the request.
      null_slot: the pool's padding slot, or None.
      activation: "silu" or None.
      implementation: None chooses; "xla", "pallas" or "pallas_interpret" is obeyed or raises.

    Returns:
      `y` `[B, D, conv_dim]` in x's dtype, zero for skipped requests and for tokens ≥ v; and the buffer.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests of one call name different rows.

    Moves:
      B * (K-1 + D) columns read, B * (D + D+S-1) columns written.

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
    checks.spec_argument(spec)
    problems = Problems()
    call = _check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation
    )
    batch = None if call is None else call.slots.shape[0]
    rows = row_array(problems, window_rows, batch, spec)
    valid = None
    if num_valid_tokens is not None:
        valid = checks.index_array(problems, "num_valid_tokens", num_valid_tokens, batch)
    checks.cache_array(problems, "conv_windows", conv_windows, spec, stacked=None if call is None else call.stacked)
    if call is not None:
        expected = (call.slots.shape[0], spec.num_draft_tokens, spec.conv_dim)
        if call.x.shape != expected:
            problems.expect("x", "request, token, channel", expected, call.x.shape)
    problems.raise_if_any()
    assert call is not None and rows is not None
    return _verify_xla(call, conv_state, conv_windows, rows, valid)


def causal_conv1d_update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
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
    call = _check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation
    )
    if call is not None and call.x.shape != (call.slots.shape[0], spec.conv_dim):
        problems.expect("x", "request, channel", (call.slots.shape[0], spec.conv_dim), call.x.shape)
    problems.raise_if_any()
    assert call is not None
    call = dataclasses.replace(call, x=call.x[:, None, :])
    live = _live_requests(call)
    columns = _history_then_inputs(call, _take_state(call, conv_state, live))
    y = _convolve(call, columns, live[:, None])
    return y[:, 0], _put_state(call, conv_state, columns[:, -spec.state_columns :], live)


def causal_conv1d_prefill(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    spec: ConvCacheSpec,
    state_indices: Any,
    lengths: Any = None,
    has_initial_state: Any = None,
    layer: Any = None,
    null_slot: int | None = None,
    activation: Activation | None = "silu",
    implementation: checks.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves whole prompts, padded to one length, and leaves each prompt's last S inputs in its slot.

    Args:
      x: `[B, T, conv_dim]`, prompts padded at the end.
      conv_state: the pool, stacked or one layer's; donate it to update in place.
      lengths: int32 `[B]`, tokens of each prompt; None means T. A length outside 1 … T skips the request.
      has_initial_state: bool `[B]`: True continues from the slot's state (a later chunk of a prompt), False starts from
        zeros. None means False for all.
      weight, bias, spec, state_indices, layer, null_slot, activation, implementation: as in `causal_conv1d_verify`.

    Returns:
      `y` `[B, T, conv_dim]` in x's dtype, zero for skipped requests and past each length; and the pool.

    Raises:
      ValueError: one message with every shape, dtype and option that does not fit.

    Assumes:
      Live requests of one call name different slots.

    Moves:
      B * (S + T) columns read and as many written.
    """
    checks.spec_argument(spec)
    problems = Problems()
    call = _check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation
    )
    batch = None if call is None else call.slots.shape[0]
    length = None if lengths is None else checks.index_array(problems, "lengths", lengths, batch)
    carried = None
    if has_initial_state is not None:
        carried = has_initial_state if isinstance(has_initial_state, jax.Array) else np.asarray(has_initial_state)
        if carried.dtype != np.bool_:
            problems.add("has_initial_state", "a bool array", carried.dtype)
        elif batch is not None and carried.shape != (batch,):
            problems.expect("has_initial_state", "request", (batch,), carried.shape)
    if call is not None and (
        call.x.ndim != 3 or call.x.shape[::2] != (call.slots.shape[0], spec.conv_dim) or not call.x.shape[1]
    ):
        problems.add(
            "x", f"request, token, channel = ({call.slots.shape[0]}, T ≥ 1, {spec.conv_dim})", tuple(call.x.shape)
        )
    problems.raise_if_any()
    assert call is not None
    return _prefill_xla(call, conv_state, length, None if carried is None else jnp.asarray(carried))


def _check_call(
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
) -> _Call | None:
    """What the three functions have in common; None when a later check would have nothing to compare with."""
    inputs = checks.float_array(problems, "x", x)
    slots = checks.index_array(problems, "state_indices", state_indices, None)
    stacked = checks.cache_array(problems, "conv_state", conv_state, spec)
    taps, offset = checks.weight_and_bias(problems, weight, bias, spec)
    picked = checks.layer_index(problems, layer, stacked, spec)
    null = checks.null_slot_value(problems, null_slot)
    checks.activation_name(problems, activation)
    checks.implementation_name(problems, implementation)
    if inputs is None or slots is None or stacked is None or taps is None:
        return None
    return _Call(inputs, taps, offset, spec, slots, null, picked, stacked, activation)


def _verify_xla(
    call: _Call, conv_state: jax.Array, conv_windows: jax.Array, rows: jax.Array, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    spec, tokens = call.spec, call.spec.num_draft_tokens
    live = _live_requests(call) & (rows >= 0) & (rows < spec.max_requests)
    token_is_valid = jnp.broadcast_to(live[:, None], (rows.shape[0], tokens))
    if valid is not None:
        live &= (valid >= 1) & (valid <= tokens)
        token_is_valid = live[:, None] & (jnp.arange(tokens, dtype=jnp.int32)[None, :] < valid[:, None])
    columns = _history_then_inputs(call, _take_state(call, conv_state, live))
    y = _convolve(call, columns, token_is_valid)
    where = runs.Runs(spec, rows, live, of="windows", stacked=call.stacked, layer=call.layer)
    surplus = columns.shape[1] - spec.num_columns  # 1 when the state keeps K-1 columns: its oldest is not carried over
    shared = columns[:, surplus:]
    if spec.storage == "sliding" and valid is None:
        return y, runs.put(conv_windows, _entry(shared, spec), where)
    if spec.storage == "sliding":
        count = spec.num_columns
        is_state = jnp.arange(count, dtype=jnp.int32)[None, :] < spec.first_token_column
        pieces = jnp.expand_dims(shared, 2)
        written = jnp.concatenate(
            [live[:, None] & is_state[:, : spec.first_token_column], token_is_valid], axis=1
        )
    else:
        count = tokens
        pieces = jnp.stack([shared[:, t : t + spec.state_columns] for t in range(tokens)], axis=1)
        written = token_is_valid
    position = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], written.shape)
    where = dataclasses.replace(
        where, rows=jnp.broadcast_to(rows[:, None], written.shape), live=written, starts=position, num_columns=1
    )
    return y, runs.put(conv_windows, _entry(pieces, spec), where)


def _prefill_xla(
    call: _Call, conv_state: jax.Array, lengths: jax.Array | None, carried: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    spec, batch, tokens = call.spec, call.x.shape[0], call.x.shape[1]
    live = _live_requests(call)
    if lengths is None:
        lengths = jnp.full((batch,), tokens, jnp.int32)
    live &= (lengths >= 1) & (lengths <= tokens)
    continues = live if carried is None else live & carried
    state = (
        jnp.zeros((batch, spec.state_columns, spec.conv_dim), spec.dtype)
        if carried is None
        else _take_state(call, conv_state, continues)
    )
    y = _convolve(
        call,
        _history_then_inputs(call, state),
        live[:, None] & (jnp.arange(tokens, dtype=jnp.int32)[None, :] < lengths[:, None]),
    )
    everything = jnp.concatenate([state, _round_to_state(call.x, spec)], axis=1)
    start = jnp.where(live, lengths, 0)
    last = jax.vmap(lambda columns, at: lax.dynamic_slice_in_dim(columns, at, spec.state_columns, axis=0))
    return y, _put_state(call, conv_state, last(everything, start), live)


def _live_requests(call: _Call) -> jax.Array:
    """bool `[B]`: slots in the pool, and a layer in it; a layer outside the stack skips every request."""
    live = live_slot(call.slots, call.null_slot, spec=call.spec)
    if call.layer is None:
        return live
    return live & (call.layer >= 0) & (call.layer < call.spec.num_layers)


def _take_state(call: _Call, conv_state: jax.Array, live: jax.Array) -> jax.Array:
    """Slots' states as `[B, S, conv_dim]`, zeros where not live."""
    where = runs.Runs(call.spec, call.slots, live, of="state", stacked=call.stacked, layer=call.layer)
    return _entry(runs.take(conv_state, where), call.spec)


def _put_state(call: _Call, conv_state: jax.Array, state: jax.Array, live: jax.Array) -> jax.Array:
    where = runs.Runs(call.spec, call.slots, live, of="state", stacked=call.stacked, layer=call.layer)
    return runs.put(conv_state, _entry(state, call.spec), where)


def _entry(columns: jax.Array, spec: ConvCacheSpec) -> jax.Array:
    """(column, channel) to the spec's axis order and back: the same swap both ways."""
    return columns if spec.axis_order == "time_major" else jnp.swapaxes(columns, -1, -2)


def _round_to_state(x: jax.Array, spec: ConvCacheSpec) -> jax.Array:
    """x in the state's dtype. The barrier keeps the compiler from computing with the unrounded value instead."""
    if x.dtype == jnp.dtype(spec.dtype):
        return x
    return lax.optimization_barrier(x.astype(spec.dtype))


def _history_then_inputs(call: _Call, state: jax.Array) -> jax.Array:
    """`[B, K-1 + tokens, conv_dim]`: the newest K-1 state columns, then the inputs, all in the state's dtype."""
    history = state[:, call.spec.state_columns - (call.spec.width - 1) :]
    return jnp.concatenate([history, _round_to_state(call.x, call.spec)], axis=1)


def _convolve(call: _Call, columns: jax.Array, token_is_valid: jax.Array) -> jax.Array:
    """`[B, tokens, conv_dim]` in x's dtype, zero where `token_is_valid` is False."""
    tokens = call.x.shape[1]
    taps = call.weight.astype(jnp.float32)
    shape = (columns.shape[0], tokens, columns.shape[2])
    total = jnp.zeros(shape, jnp.float32)
    if call.bias is not None:
        total = jnp.broadcast_to(call.bias.astype(jnp.float32)[None, None, :], shape)
    for tap in range(call.spec.width):
        total = total + columns[:, tap : tap + tokens].astype(jnp.float32) * taps[None, None, :, tap]
    if call.activation == "silu":
        total = total * jax.nn.sigmoid(total)
    return jnp.where(token_is_valid[:, :, None], total, jnp.float32(0)).astype(call.x.dtype)
