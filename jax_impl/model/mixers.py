"""The Gated DeltaNet mixer around its convolution: projections, the recurrence over tokens, gated norm.

    S ← S · exp(g)          g = -exp(A_log) · softplus(a + dt_bias)          per value head, S [key_dim, value_dim]
    δ = (v - Sᵀk) · β       β = sigmoid(b)
    S ← S + k δᵀ
    o = Sᵀ q

q and k are l2-normalised, q divided by √key_dim; everything from the convolution's output to o is float32. The
recurrence is one `lax.scan` over tokens. A verified block keeps the state after each of its tokens, so that the
accepted one can be committed; the pool itself is only read. In a draft tree a token's S is its parent's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.model.config import ModelConfig
from jax_impl.model.weights import LinearAttention

L2_EPS = 1e-6


class Projected(NamedTuple):
    """What a linear layer makes of its input: qkv `[B, T, conv_dim]`, z `[B, T, Hv, dv]`, beta and decay `[B, T, Hv]`.

    `decay` is exp(g), both are float32.
    """

    qkv: jax.Array
    z: jax.Array
    beta: jax.Array
    decay: jax.Array


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` with `weight` `[out, in]`, in x's dtype; float32 is not rounded to a shorter format on the way."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * (1 + weight)` over the last axis, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (1 + _like(weight, wide))).astype(x.dtype)


def _like(weight: jax.Array, x: jax.Array) -> jax.Array:
    """A vector with leading axes of size one, to be multiplied with the last axis of x."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def project(weights: LinearAttention, config: ModelConfig, x: jax.Array) -> Projected:
    """Everything that a linear layer computes from its normalised input `[B, T, hidden]` alone."""
    heads, qkv = config.linear_value_heads, config.conv_dim
    ends = [qkv, qkv + config.value_size, qkv + config.value_size + heads]
    qkv, z, b, a = jnp.split(matmul(x, weights.in_proj), ends, axis=-1)
    step = jax.nn.softplus(a.astype(jnp.float32) + _like(weights.dt_bias, a))
    return Projected(
        qkv=qkv,
        z=z.reshape(*z.shape[:-1], heads, config.linear_value_dim),
        beta=jax.nn.sigmoid(b.astype(jnp.float32)),
        decay=jnp.exp(-jnp.exp(_like(weights.a_log, a)) * step),
    )


def delta_rule(
    config: ModelConfig,
    state: jax.Array,
    mixed: jax.Array,
    projected: Projected,
    is_valid: jax.Array,
    *,
    keep_states: bool,
    parents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over a block of tokens, or over a tree of them.

    Args:
      config: geometry.
      state: `[B, Hv, dk, dv]` float32, before the first token.
      mixed: `[B, T, conv_dim]`, the convolution's output q | k | v.
      projected: of the same tokens.
      is_valid: bool `[B, T]`; a token that is not valid leaves the state as it is.
      keep_states: return the state after each token instead of the last one.
      parents: int32 `[B, T]`, the earlier token that each one follows, or -1 for `state`; needs `keep_states`.

    Returns:
      o `[B, T, Hv, dv]` float32, and the states `[B, T, Hv, dk, dv]` or `[B, Hv, dk, dv]`.
    """
    q, k, v = _heads(config, mixed)

    def token_step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        q, k, v, beta, decay, valid = token
        decayed = state * decay[:, :, None, None]
        delta = (v - jnp.sum(decayed * k[:, :, :, None], axis=2)) * beta[:, :, None]
        advanced = decayed + k[:, :, :, None] * delta[:, :, None, :]
        state = jnp.where(valid[:, None, None, None], advanced, state)
        o = jnp.sum(state * q[:, :, :, None], axis=2)
        return state, (o, state) if keep_states else (o,)

    tokens = (q, k, v, projected.beta, projected.decay, is_valid)
    if parents is not None:
        assert keep_states
        return _over_tree(token_step, state, tokens, parents)
    by_token = [jnp.swapaxes(array, 0, 1) for array in tokens]
    # A block is a few tokens: unrolled, it is a few fused loops instead of a loop of launches.
    last, outputs = lax.scan(token_step, state, tuple(by_token), unroll=keep_states)
    o, *states = (jnp.swapaxes(array, 0, 1) for array in outputs)
    return o, states[0] if keep_states else last


def _over_tree(
    token_step: Any, state: jax.Array, tokens: tuple[jax.Array, ...], parents: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`token_step` on every node of trees `[B, T]`, from the state that its parent left; o and all states."""
    batch, count = parents.shape
    request = lax.iota(jnp.int32, batch)
    states, outputs = jnp.zeros((batch, count, *state.shape[1:]), state.dtype), []
    for node in range(count):
        link = parents[:, node]
        before = states.at[request, jnp.maximum(link, 0)].get(mode="promise_in_bounds")
        before = jnp.where((link < 0)[:, None, None, None], state, before)
        after, (o, _) = token_step(before, tuple(array[:, node] for array in tokens))
        states = states.at[:, node].set(after)
        outputs.append(o)
    return jnp.stack(outputs, axis=1), states


def _heads(config: ModelConfig, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k `[B, T, Hv, dk]`, v `[B, T, Hv, dv]`, float32; each key head serves Hv / Hk neighbouring value heads."""
    q, k, v = jnp.split(mixed.astype(jnp.float32), [config.key_size, 2 * config.key_size], axis=-1)
    lead, repeats = mixed.shape[:2], config.linear_value_heads // config.linear_key_heads

    def normalised(x: jax.Array) -> jax.Array:
        x = x.reshape(*lead, config.linear_key_heads, config.linear_key_dim)
        x = x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)
        return jnp.repeat(x, repeats, axis=2)

    v = v.reshape(*lead, config.linear_value_heads, config.linear_value_dim)
    return normalised(q) * config.linear_key_dim**-0.5, normalised(k), v


def output(weights: LinearAttention, config: ModelConfig, o: jax.Array, z: jax.Array) -> jax.Array:
    """Norm per head, then the gate, then the output projection: `[B, T, hidden]` in z's dtype."""
    o = o * lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + config.norm_eps)
    o = o * _like(weights.norm, o) * jax.nn.silu(z.astype(jnp.float32))
    return matmul(o.astype(z.dtype).reshape(*z.shape[:2], config.value_size), weights.out_proj)
