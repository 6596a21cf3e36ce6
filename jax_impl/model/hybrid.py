"""The model on its cache: prompts into slots, and blocks of draft tokens verified without touching what is committed.

    prefill   reads nothing, writes every state of the named slots: a slot's old content never matters
    verify    reads conv_state and recurrent_state, writes conv_windows, keys and values past each length, and returns
              the recurrent state after every token; `commit_after_verify` then moves both states on in one call, and
              after a tree `keep_path` moves the accepted keys and values together

Both run the same layers and differ in how a layer meets its state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import ConvCacheSpec, allocate_conv_cache, causal_conv1d_prefill, causal_conv1d_verify
from jax_impl.checks import Implementation
from jax_impl.history import links_hold
from jax_impl.layout import AxisOrder, Storage
from jax_impl.model import attention, mixers
from jax_impl.model.config import ModelConfig
from jax_impl.model.mixers import matmul, rms_norm
from jax_impl.model.weights import DenseMlp, FullAttention, LinearAttention, MoeMlp, Parameters
from jax_impl.rollback import HybridCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelCache:
    """Everything that sequences leave behind, by slot.

    Attributes:
      hybrid: conv_state with its verify buffer, and the recurrent state `[linear layers, C, Hv, dk, dv]` float32.
      keys, values: `[full layers, C, max_len, kv_heads, head_dim]`, in the model's dtype.
    """

    hybrid: HybridCache
    keys: jax.Array
    values: jax.Array

    @property
    def spec(self) -> ConvCacheSpec:
        """Geometry of the convolution's cache."""
        return self.hybrid.conv.spec


def conv_geometry(config: ModelConfig) -> dict[str, int]:
    """The fields of the convolution's `ConvCacheSpec` that the model decides."""
    return {"num_layers": config.num_linear_layers, "conv_dim": config.conv_dim, "width": config.width}


def allocate_model_cache(
    config: ModelConfig,
    dtype: str,
    *,
    num_slots: int,
    max_requests: int,
    max_len: int,
    num_draft_tokens: int,
    axis_order: AxisOrder = "time_major",
    storage: Storage = "sliding",
) -> ModelCache:
    """A zeroed cache of `num_slots` sequences of up to `max_len` tokens, `max_requests` of them verified at a time."""
    spec = ConvCacheSpec(
        **conv_geometry(config),
        num_slots=num_slots,
        max_requests=max_requests,
        num_draft_tokens=num_draft_tokens,
        dtype=dtype,
        axis_order=axis_order,
        storage=storage,
    )
    heads = (config.linear_value_heads, config.linear_key_dim, config.linear_value_dim)
    recurrent_state = jnp.zeros((spec.num_layers, num_slots, *heads), jnp.float32)
    shape = (config.num_full_layers, num_slots, max_len, config.num_kv_heads, config.head_dim)
    hybrid = HybridCache(allocate_conv_cache(spec), recurrent_state)
    return ModelCache(hybrid, jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def prefill(
    parameters: Parameters,
    config: ModelConfig,
    cache: ModelCache,
    tokens: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ModelCache]:
    """Runs whole prompts, padded to one length, and leaves their states in their slots.

    Args:
      parameters, config: the model.
      cache: donate it to update in place.
      tokens: int32 `[B, T]`, prompts padded at the end.
      lengths: int32 `[B]`, tokens of each prompt, up to T. A length outside 1 … T skips the request.
      slots: int32 `[B]`. A slot outside the pool skips the request; live requests name different slots.
      implementation: of the convolution.

    Returns:
      The final hidden states `[B, T, hidden]` for `logits_of`, meaningless past each length; and the cache.
    """
    pool = cache.hybrid.recurrent_state
    batch, count = tokens.shape
    live = (slots >= 0) & (slots < pool.shape[1]) & (lengths >= 1) & (lengths <= count)
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], tokens.shape)
    is_valid = live[:, None] & (positions < lengths[:, None])
    dead_slot = jnp.int32(pool.shape[1]) + jnp.arange(batch, dtype=jnp.int32)
    conv_state, keys, values = cache.hybrid.conv.conv_state, cache.keys, cache.values

    hidden, linear, full = parameters.embedding[tokens], 0, 0
    for layer in parameters.layers:
        x = rms_norm(hidden, layer.input_norm, config.norm_eps)
        if isinstance(layer.mixer, LinearAttention):
            projected = mixers.project(layer.mixer, config, x)
            mixed, conv_state = causal_conv1d_prefill(
                projected.qkv, conv_state, parameters.conv, spec=cache.spec, state_indices=jnp.where(live, slots, -1),
                lengths=lengths, layer=linear, implementation=implementation,
            )  # fmt: skip
            fresh = jnp.zeros((batch, *pool.shape[2:]), jnp.float32)
            o, state = mixers.delta_rule(config, fresh, mixed, projected, is_valid, keep_states=False)
            pool = pool.at[linear, jnp.where(live, slots, dead_slot)].set(state, mode="drop", unique_indices=True)
            hidden, linear = (
                hidden + _of_all_ranks(config, mixers.output(layer.mixer, config, o, projected.z)),
                linear + 1,
            )
        else:
            assert isinstance(layer.mixer, FullAttention)
            q, gate, k, v = attention.project(layer.mixer, config, x, positions)
            keys = attention.write_tokens(keys, k, full, slots, positions, is_valid)
            values = attention.write_tokens(values, v, full, slots, positions, is_valid)
            mixed = attention.attend(layer.mixer, q, gate, k, v, positions, lengths)
            hidden, full = hidden + _of_all_ranks(config, mixed), full + 1
        hidden = _add_mlp(config, layer.post_norm, layer.mlp, hidden)
    conv = dataclasses.replace(cache.hybrid.conv, conv_state=conv_state)
    cache = ModelCache(HybridCache(conv, pool), keys, values)
    return rms_norm(hidden, parameters.norm, config.norm_eps), cache


def verify(
    parameters: Parameters,
    config: ModelConfig,
    cache: ModelCache,
    tokens: jax.Array,
    num_valid_tokens: jax.Array,
    past_lengths: jax.Array,
    slots: jax.Array,
    *,
    parents: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ModelCache, jax.Array]:
    """Runs a block of D tokens per request on top of its committed states, which stay as they are.

    Args:
      parameters, config: the model.
      cache: donate it to update in place.
      tokens: int32 `[B, D]`; request b uses row b of the verify buffer.
      num_valid_tokens: int32 `[B]`, v. Outside 1 … D skips the request.
      past_lengths: int32 `[B]`, tokens of each sequence that its states hold: the position of `tokens[:, 0]`.
      slots: int32 `[B]`. A slot outside the pool skips the request.
      parents: int32 `[B, D]`, links of draft trees: the earlier token that each one follows, -1 for the committed
        states. Every token is computed on top of its ancestors; in the cache, node t's keys and values are behind those
        of node t - 1. A link among tokens < v that does not point backwards skips the request, as do branches with
        storage "sliding". None is a chain.
      implementation: of the convolution.

    Returns:
      The final hidden states `[B, D, hidden]` for `logits_of`, meaningless from token v on; the cache with its buffer,
      keys and values written; and the recurrent states after each token `[linear layers, B, D, Hv, dk, dv]`.
    """
    spec, pool = cache.spec, cache.hybrid.recurrent_state
    token = jnp.arange(spec.num_draft_tokens, dtype=jnp.int32)[None, :]
    live = (slots >= 0) & (slots < spec.num_slots) & (num_valid_tokens >= 1) & (num_valid_tokens <= tokens.shape[1])
    places = jnp.maximum(past_lengths, 0)[:, None] + token
    positions, visible, links = places, places, None
    if parents is not None:
        live &= links_hold([parents[:, node] for node in range(tokens.shape[1])], num_valid_tokens, spec=spec)
        links = jnp.where(live[:, None] & (token < num_valid_tokens[:, None]), parents, token - 1)
        is_ancestor = attention.ancestors(links)
        positions = places[:, :1] + jnp.sum(is_ancestor, axis=2, dtype=jnp.int32) - 1
        visible = attention.visible_to_nodes(is_ancestor, places[:, 0], cache.keys.shape[2])
    is_valid = live[:, None] & (token < num_valid_tokens[:, None])
    num_keys = past_lengths + jnp.where(live, num_valid_tokens, 0)
    rows = jnp.where(live, slots, 0)
    conv_windows, keys, values = cache.hybrid.conv.conv_windows, cache.keys, cache.values

    hidden, full, step_states = parameters.embedding[tokens], 0, []
    for layer in parameters.layers:
        x = rms_norm(hidden, layer.input_norm, config.norm_eps)
        if isinstance(layer.mixer, LinearAttention):
            linear = len(step_states)
            projected = mixers.project(layer.mixer, config, x)
            mixed, conv_windows = causal_conv1d_verify(
                projected.qkv, cache.hybrid.conv.conv_state, conv_windows, parameters.conv, spec=spec,
                state_indices=slots, layer=linear, num_valid_tokens=num_valid_tokens, parents=parents,
                implementation=implementation,
            )  # fmt: skip
            o, states = mixers.delta_rule(
                config, pool[linear, rows], mixed, projected, is_valid, keep_states=True, parents=links
            )
            step_states.append(states)
            hidden = hidden + _of_all_ranks(config, mixers.output(layer.mixer, config, o, projected.z))
        else:
            assert isinstance(layer.mixer, FullAttention)
            q, gate, k, v = attention.project(layer.mixer, config, x, positions)
            keys = attention.write_tokens(keys, k, full, slots, places, is_valid)
            values = attention.write_tokens(values, v, full, slots, places, is_valid)
            past = [attention.read_slots(array, full, slots) for array in (keys, values)]
            mixed = attention.attend(layer.mixer, q, gate, *past, visible, num_keys)
            hidden, full = hidden + _of_all_ranks(config, mixed), full + 1
        hidden = _add_mlp(config, layer.post_norm, layer.mlp, hidden)
    conv = dataclasses.replace(cache.hybrid.conv, conv_windows=conv_windows)
    cache = ModelCache(HybridCache(conv, pool), keys, values)
    return rms_norm(hidden, parameters.norm, config.norm_eps), cache, jnp.stack(step_states)


def keep_path(cache: ModelCache, slots: jax.Array, past_lengths: jax.Array, path: jax.Array) -> ModelCache:
    """Keys and values of a tree's accepted path, int32 `[B, D]` and -1 behind it, moved to where a chain has them."""
    keys, values = (attention.move_path(array, slots, past_lengths, path) for array in (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def logits_of(parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """Logits `[..., vocab]` in float32 of final hidden states; 16-bit sums would leave ties."""
    precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    return jnp.einsum(
        "...i,oi->...o", hidden, parameters.lm_head, precision=precision, preferred_element_type=jnp.float32
    )


def _add_mlp(config: ModelConfig, norm: jax.Array, mlp: DenseMlp | MoeMlp, hidden: jax.Array) -> jax.Array:
    x = rms_norm(hidden, norm, config.norm_eps)
    return hidden + _of_all_ranks(config, _dense_mlp(mlp, x) if isinstance(mlp, DenseMlp) else _moe_mlp(mlp, config, x))


def _of_all_ranks(config: ModelConfig, part: jax.Array) -> jax.Array:
    """What a mixer or an MLP adds to the residual: the sum over the ranks that share its heads, or channels."""
    return part if config.tensor_axis is None else jax.lax.psum(part, config.tensor_axis)


def _dense_mlp(mlp: DenseMlp, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(matmul(x, mlp.gate_up), 2, axis=-1)
    return matmul(jax.nn.silu(gate) * up, mlp.down)


def _moe_mlp(mlp: MoeMlp, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Each token's experts, weighted by the router's softmax, and the shared expert behind its own gate.

    Pairs of token and expert are sorted by expert, so that each expert multiplies one run of rows.
    """
    assert config.moe is not None
    moe, flat = config.moe, x.reshape(-1, x.shape[-1])
    share = jax.nn.softmax(matmul(flat, mlp.router).astype(jnp.float32), axis=-1)
    share, expert = jax.lax.top_k(share, moe.experts_per_token)
    if moe.normalize:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    order = jnp.argsort(expert.ravel(), stable=True)
    sizes = jnp.bincount(expert.ravel(), length=moe.num_experts).astype(jnp.int32)
    rows = flat[order // moe.experts_per_token]
    gate, up = jnp.split(_by_expert(rows, mlp.gate_up, sizes), 2, axis=-1)
    routed = _by_expert(jax.nn.silu(gate) * up, mlp.down, sizes)
    routed = jnp.zeros_like(routed).at[order].set(routed, unique_indices=True)
    routed = routed.reshape(*expert.shape, -1) * share.astype(x.dtype)[:, :, None]
    shared = jax.nn.sigmoid(matmul(flat, mlp.shared_gate)) * _dense_mlp(mlp.shared, flat)
    return (jnp.sum(routed, axis=1) + shared).reshape(x.shape)


def _by_expert(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> Any:
    """Runs of `rows`, `sizes[e]` of them for expert e, times that expert's matrix `[E, out, in]` transposed."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jax.lax.ragged_dot(rows, jnp.swapaxes(weight, 1, 2), sizes, precision=precision)
