"""Whole prompts through the short causal convolution, chunk by chunk, leaving each prompt's last inputs in its slot.

    y[b, t, c] = act( bias[c] + Σ_j weight[c, j] * u[b, t - K + 1 + j, c] )          j = 0 … K-1

u is zeros or the slot's state, then the prompt's inputs, rounded to the state's dtype; sums as in `jax_impl.conv`, so a
prompt gives the bits that its tokens give one by one.

Reads x and, where a request continues, its slot; writes y and the slot. The kernel cuts a prompt into chunks that are
computed apart: each reads the K-1 inputs before it out of x, the first one out of the slot. The block that has read the
slot's channels is also the one that writes them, so no other can see them half way.

Source: the prefill step of causal-conv1d's varlen form, restated for a pool of slots.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl import checks
from jax_impl.conv import (
    Activation,
    Call,
    ConvWeight,
    Plan,
    activate,
    activate_in_kernel,
    check_call,
    check_x,
    layer_weight,
    live_requests,
    no_bias,
    prepare_launch,
    put_state,
    round_to_state,
    take_state,
    weighted_sum,
    without_invalid,
)
from jax_impl.entries import load_entry, store_entry
from jax_impl.implementation import choose_implementation
from jax_impl.layout import ConvCacheSpec, Problems

# Tokens of one chunk: each chunk reads K-1 tokens more, and each token takes a register per 4 bytes of a thread.
CHUNK = 16


def causal_conv1d_prefill(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array | ConvWeight,
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
      B * (S + T) columns read and as many written; the kernel reads K-1 columns again for every 16 tokens, out of the
      cache.

    Example:
      >>> import jax.numpy as jnp
      >>> spec = ConvCacheSpec(1, 2, 1, 1, width=2, num_draft_tokens=2, dtype="float32")
      >>> prompt, weight = jnp.array([[[4.0], [5.0], [6.0]]]), jnp.array([[10.0, 1.0]])
      >>> y, state = causal_conv1d_prefill(
      ...     prompt, jnp.zeros(spec.state_shape), weight, spec=spec, state_indices=jnp.array([1]), layer=0,
      ...     lengths=jnp.array([2]), activation=None)
      >>> y.ravel().tolist(), state.ravel().tolist()
      ([4.0, 45.0, 0.0], [0.0, 5.0])
    """
    checks.spec_argument(spec)
    problems = Problems()
    call, batch, _ = check_call(
        problems, x, conv_state, weight, bias, spec, state_indices, layer, null_slot, activation, implementation
    )
    length = None if lengths is None else checks.index_array(problems, "lengths", lengths, batch)
    carried = None
    if has_initial_state is not None:
        carried = checks.bool_array(problems, "has_initial_state", has_initial_state, batch)
    shape = tuple(getattr(x, "shape", (0,)))
    if len(shape) == 3 and shape[1] >= 1:
        check_x(problems, x, "request, token, channel", (batch, shape[1], spec.conv_dim))
    elif isinstance(x, jax.Array | np.ndarray):
        expected = checks.shape_text((batch, "T ≥ 1", spec.conv_dim))
        problems.add("x", f"request, token, channel = {expected}", shape)
    problems.raise_if_any()
    assert call is not None
    chosen = choose_implementation(implementation, [spec], call.slots.shape[0])
    if chosen == "xla" or (implementation is None and _launchable_chunk(shape[1], spec.width) is None):
        return _prefill_xla(call, conv_state, length, carried)
    return _prefill_pallas(call, conv_state, length, carried, interpret=chosen != "pallas")


def _prefill_xla(
    call: Call, conv_state: jax.Array, lengths: jax.Array | None, carried: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    spec, batch, tokens = call.spec, call.x.shape[0], call.x.shape[1]
    live = live_requests(call.slots, call.layer, spec=spec, null_slot=call.null_slot)
    if lengths is None:
        lengths = jnp.full((batch,), tokens, jnp.int32)
    live &= (lengths >= 1) & (lengths <= tokens)
    continues = live if carried is None else live & carried
    state = None  # zeros
    if carried is not None:  # read it before the pool is written
        state = lax.optimization_barrier(take_state(call, conv_state, continues))
    is_valid = live[:, None] & (jnp.arange(tokens, dtype=jnp.int32)[None, :] < lengths[:, None])
    # x may be made from the pool, so it is made before the pool is written.
    call = without_invalid(dataclasses.replace(call, x=lax.optimization_barrier(call.x)), is_valid)
    taps, bias = layer_weight(call)
    fresh = round_to_state(call.x, spec)
    window = [_delayed(fresh, state, spec.width - 1 - tap) for tap in range(spec.width)]
    rows = [taps[tap][None, None, :] for tap in range(spec.width)]
    start = no_bias() if bias is None else bias[None, None, :]
    total = activate(weighted_sum(window, rows, start), call.activation)
    y = jnp.where(is_valid[:, :, None], total, jnp.float32(0)).astype(call.x.dtype)
    return y, put_state(call, conv_state, _last_columns(fresh, state, jnp.where(live, lengths, 0), spec), live)


def _delayed(fresh: jax.Array, state: jax.Array | None, tokens: int) -> jax.Array:
    """The history [state, fresh] as it was `tokens` ago, `[B, T, conv_dim]`; a state of None is zeros.

    Two reads at constant places and a selection, which fuse into the sum: a concatenation of state and inputs would be
    written out first. Pads would become branches, and a CPU compiler fuses no product of one branch into a sum behind
    it: the bits would depend on the shape.
    """
    if tokens == 0:
        return fresh
    place = np.arange(fresh.shape[1], dtype=np.int32) - tokens
    new = fresh.at[:, place.clip(0)].get(mode="promise_in_bounds")
    old = jnp.zeros((), fresh.dtype)
    if state is not None:
        columns = state.shape[1]
        old = state.at[:, (place + columns).clip(0, columns - 1)].get(mode="promise_in_bounds")
    return jnp.where((place < 0)[None, :, None], old, new)


def _last_columns(fresh: jax.Array, state: jax.Array | None, consumed: jax.Array, spec: ConvCacheSpec) -> jax.Array:
    """The S columns `[B, S, conv_dim]` before each request's next token, `consumed` tokens into `fresh`."""
    columns, tokens = spec.state_columns, fresh.shape[1]
    place = consumed[:, None] + jnp.arange(columns, dtype=jnp.int32)[None, :]  # in the history [state, fresh]
    pick = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    old = jnp.zeros((), fresh.dtype)
    if state is not None:
        old = pick(state, jnp.clip(place, 0, columns - 1)[:, :, None])
    new = pick(fresh, jnp.clip(place - columns, 0, tokens - 1)[:, :, None])
    return jnp.where((place < columns)[:, :, None], old, new)


def chunk_of(tokens: int, width: int) -> int | None:
    """Tokens of one chunk, such that every chunk but the first has the K-1 tokens before it in the prompt.

    The last chunk ends with the prompt: it overlaps the one before it, and both write the same values. None where no
    chunk fits, which takes K > 9.

    Example:
      >>> chunk_of(7, 4), chunk_of(17, 4), chunk_of(1000, 4), chunk_of(17, 16)
      (7, 9, 16, None)
    """
    if tokens <= CHUNK:
        return tokens
    chunk = CHUNK if tokens - CHUNK >= width - 1 else -(-tokens // 2)
    return chunk if min(chunk, tokens - chunk) >= width - 1 else None


def _launchable_chunk(tokens: int, width: int) -> int | None:
    """`chunk_of`, or None also where a launch cannot have so many chunks."""
    from jax_impl.pallas_backend import MAX_GRID

    chunk = chunk_of(tokens, width)
    return None if chunk is None or -(-tokens // chunk) > MAX_GRID else chunk


def _prefill_kernel(
    # inputs
    inputs: dict[str, Any],
    # outputs
    conv_state_out: Any,
    y_out: Any,
    *,
    plan: Plan,
) -> None:
    """One channel block of one chunk of one prompt."""
    from jax_impl.pallas_backend import grid_index, span, store_runs, when, zeros

    spec, tokens = plan.spec, inputs["x_in"].shape[1]
    request, chunk = grid_index("request"), grid_index("chunk")
    channels = span(grid_index("block") * plan.block, plan.block)
    layer = (inputs["layer_in"][0],) if plan.stacked else ()
    slot = inputs["slots_in"][request]
    length = inputs["lengths_in"][request] if "lengths_in" in inputs else jnp.int32(tokens)
    live = live_requests(slot, layer[0] if layer else None, spec=spec, null_slot=plan.null_slot)
    live &= (length >= 1) & (length <= tokens)
    start = jnp.minimum(chunk * plan.tokens, tokens - plan.tokens)
    place = (request, slot, layer, length, start, channels)
    filled = live & (start < length)
    first = chunk == 0
    convolve = functools.partial(_convolve_chunk, inputs, conv_state_out, y_out, place, plan=plan)
    when(filled & first)(functools.partial(convolve, is_first=True))
    if tokens > plan.tokens:
        when(filled & jnp.logical_not(first))(functools.partial(convolve, is_first=False))

    @when(jnp.logical_not(filled))
    def _nothing() -> None:
        nothing = dict.fromkeys(range(plan.tokens), zeros(plan.block, plan.y_dtype, plan.vector, plan.interpret))
        store_runs(y_out, (request, span(start, plan.tokens), channels), nothing, plan.vector, plan.interpret)


def _convolve_chunk(
    # inputs
    inputs: dict[str, Any],
    # outputs
    conv_state_out: Any,
    y_out: Any,
    place: tuple[Any, ...],
    *,
    plan: Plan,
    is_first: bool,
) -> None:
    """y of a chunk that holds at least one token of a live prompt; the first chunk also writes the slot."""
    from jax_impl.pallas_backend import load_runs, span, store_runs, zero_unless

    (request, slot, layer, length, start, channels), spec = place, plan.spec
    how, history = (plan.vector, plan.interpret), spec.width - 1

    def read(ref: Any, *index: Any, first: Any = 0, count: int) -> list[jax.Array]:
        return load_runs(ref, (*index, span(first, count), channels), (count, plan.block), *how)

    of_weight = layer if plan.stacked_weight else ()
    taps = read(inputs["taps_in"], *of_weight, count=spec.width)
    offset = read(inputs["bias_in"], *of_weight, count=1)[0] if "bias_in" in inputs else None
    if offset is None:
        offset = no_bias() if plan.interpret else jnp.float32(0)
    if is_first:
        fresh = read(inputs["x_in"], request, count=plan.tokens)
        fresh = [value.astype(spec.dtype) for value in fresh]
        state = _first_state(inputs, conv_state_out, (request, slot, layer, channels), plan=plan)
        last = _last_inputs(inputs, (request, length, channels), plan=plan)
        columns = state[spec.state_columns - history :] + fresh
        newest = [_newest(state, last, length, column) for column in range(spec.state_columns)]
        store_entry(conv_state_out, (*layer, slot), channels, newest, None, plan=plan)
    else:
        fresh = read(inputs["x_in"], request, first=start - history, count=history + plan.tokens)
        columns = [value.astype(spec.dtype) for value in fresh]
    outputs = {}
    for token in range(plan.tokens):
        total = weighted_sum(columns[token : token + spec.width], taps, offset)
        y = activate_in_kernel(total, plan=plan).astype(plan.y_dtype)
        kept = start + token < length
        outputs[token] = zero_unless(kept, y, *how)
    store_runs(y_out, (request, span(start, plan.tokens), channels), outputs, *how)


def _first_state(inputs: dict[str, Any], conv_state_out: Any, place: tuple[Any, ...], *, plan: Plan) -> list[jax.Array]:
    """The S columns before a prompt: its slot's if it continues, else zeros."""
    from jax_impl.pallas_backend import zeros

    request, slot, layer, channels = place
    nothing = zeros(plan.block, plan.spec.dtype, plan.vector, plan.interpret)
    if "continues_in" not in inputs:
        return [nothing] * plan.spec.state_columns
    continues = inputs["continues_in"][request] != 0
    count = plan.spec.state_columns
    found = load_entry(conv_state_out, (*layer, slot), channels, count, plan=plan, read_only=False)
    return [lax.select(lax.broadcast(continues, one.shape), one, nothing) for one in found]


def _last_inputs(inputs: dict[str, Any], place: tuple[Any, ...], *, plan: Plan) -> list[jax.Array]:
    """The inputs of the prompt's last S tokens; where the prompt is shorter, its first token in their stead."""
    from jax_impl.pallas_backend import load_runs, span

    (request, length, channels), count = place, plan.spec.state_columns
    last = []
    for column in range(count):
        token = jnp.maximum(length - count + column, 0)
        (value,) = load_runs(
            inputs["x_in"], (request, span(token, 1), channels), (1, plan.block), plan.vector, plan.interpret
        )
        last.append(value.astype(plan.spec.dtype))
    return last


def _newest(state: list[jax.Array], last: list[jax.Array], length: jax.Array, column: int) -> jax.Array:
    """One column of the state after the prompt: of its inputs, or of the old state where the prompt is too short."""
    value, columns = last[column], len(state)
    for short in range(1, columns - column):  # a prompt of so many tokens moves the old columns down by as many
        is_short = lax.broadcast(length == short, value.shape)
        value = lax.select(is_short, state[column + short], value)
    return value


def _prefill_pallas(
    call: Call, conv_state: jax.Array, lengths: jax.Array | None, carried: jax.Array | None, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Launches prefill over requests × chunks × channel blocks, in place on the pool."""
    from jax_impl import pallas_backend

    spec, (batch, tokens, _) = call.spec, call.x.shape
    chunk = _launchable_chunk(tokens, spec.width)
    if chunk is None:
        raise ValueError(
            "`implementation`: expected a prompt that the prefill kernel can cut into at most "
            f"{pallas_backend.MAX_GRID} chunks of up to {CHUNK} tokens, each with the K-1 = {spec.width - 1} tokens "
            f'before it in the prompt, got {tokens} tokens. Use "xla", or None to fall back to it.'
        )
    if batch == 0:
        return jnp.zeros(call.x.shape, call.x.dtype), conv_state
    inputs, plan = prepare_launch(call, tokens=chunk, advance=True, interpret=interpret, pair_requests=False)
    if lengths is not None:
        inputs["lengths_in"] = lengths
    if carried is not None:
        inputs["continues_in"] = carried.astype(jnp.int32)
    return _run_prefill(inputs, conv_state, plan=plan)


@functools.partial(jax.jit, static_argnames="plan")
def _run_prefill(inputs: dict[str, jax.Array], conv_state: jax.Array, *, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The launch, as a jitted function of its own so that all layers of a model share one traced kernel."""
    from jax_impl import pallas_backend

    batch, tokens, dim = inputs["x_in"].shape
    conv_state, y = pallas_backend.call_in_place(
        functools.partial(_prefill_kernel, plan=plan),
        inputs,
        (conv_state,),
        (pallas_backend.fresh_like(inputs["x_in"], (batch, tokens, dim), plan.y_dtype),),
        grid={"request": batch, "chunk": -(-tokens // plan.tokens), "block": dim // plan.block},
        name=f"specconv_prefill_{plan.spec.axis_order}",
        interpret=plan.interpret,
    )
    return y, conv_state
