"""Gated full attention on cached keys and values.

The cache is `[full layers, slots, max_len, kv_heads, head_dim]`. A step writes its tokens at the sequence's own length
and reads up to there, so rejected tokens are overwritten by the next step: the length alone rolls it back. Nodes of a
draft tree are written in their own order, where two may share a position; a node sees the committed tokens and its
ancestors, and the accepted path is then moved together.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.model.config import ModelConfig
from jax_impl.model.mixers import matmul, rms_norm
from jax_impl.model.weights import FullAttention


def rotary_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[B, T, 1, rotary_dim]` float32 of positions `[B, T]`."""
    exponents = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    frequencies = 1.0 / jnp.float32(config.rope_theta) ** exponents
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the leading channels of heads `[B, T, heads, head_dim]`: pairs are half of them apart."""
    cos, sin = angles
    turned, kept = jnp.split(x.astype(jnp.float32), [cos.shape[-1]], axis=-1)
    first, second = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return jnp.concatenate([turned, kept], axis=-1).astype(x.dtype)


def project(
    weights: FullAttention, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, its gate `[B, T, heads, head_dim]`, k and v `[B, T, kv_heads, head_dim]` of the input `[B, T, hidden]`."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rows = [2 * heads * dim, (2 * heads + kv_heads) * dim]
    q_gate, k, v = jnp.split(matmul(x, weights.qkv_proj), rows, axis=-1)
    q, gate = jnp.split(q_gate.reshape(*x.shape[:2], heads, 2 * dim), 2, axis=-1)
    k, v = (part.reshape(*x.shape[:2], kv_heads, dim) for part in (k, v))
    angles = rotary_angles(config, positions)
    q = rotate(rms_norm(q, weights.q_norm, config.norm_eps), angles)
    k = rotate(rms_norm(k, weights.k_norm, config.norm_eps), angles)
    return q, gate, k, v


def attend(
    weights: FullAttention,
    q: jax.Array,
    gate: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    num_keys: jax.Array,
) -> jax.Array:
    """Attention of q over the keys that each token sees, gated and projected: `[B, T, hidden]`.

    Long blocks run in parts of `query_block` tokens, one after the other: the scores are float32 `[B, heads, part, M]`
    and not T / part times that.

    Args:
      weights: of the layer.
      q, gate: `[B, T, heads, head_dim]`.
      keys, values: `[B, M, kv_heads, head_dim]`; key m is at position m.
      visible: int32 `[B, T]`, at least 0, the last key that each token sees; or bool `[B, T, M]`, which ones it sees,
        at least one.
      num_keys: int32 `[B]`, keys that this sequence has written; those behind them may hold anything.
    """
    batch, tokens, heads, dim = q.shape
    at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    written = (at[None, :] < num_keys[:, None])[:, :, None, None]
    values = jnp.where(written, values, jnp.zeros_like(values))  # what stands behind the written ones is of nobody
    part = query_block(batch, tokens)
    count = -(-tokens // part)

    def parts(array: jax.Array) -> jax.Array:
        """`[B, T, ...]` as `[count, B, part, ...]`; padding repeats the last token, which sees something."""
        padded = jnp.pad(array, ((0, 0), (0, count * part - tokens), *((0, 0),) * (array.ndim - 2)), mode="edge")
        return jnp.swapaxes(padded.reshape(batch, count, part, *array.shape[2:]), 0, 1)

    if count == 1:
        mixed = _weighted_values(q, keys, values, visible)
    else:
        by_part = lax.map(lambda one: _weighted_values(one[0], keys, values, one[1]), (parts(q), parts(visible)))
        mixed = jnp.swapaxes(by_part, 0, 1).reshape(batch, count * part, heads, dim)[:, :tokens]
    mixed = mixed * jax.nn.sigmoid(gate)
    return matmul(mixed.reshape(batch, tokens, heads * dim), weights.out_proj)


def query_block(batch: int, tokens: int) -> int:
    """Tokens of each sequence whose scores are held at a time: 256 in all sequences, but at least 32 of each."""
    return min(tokens, max(32, 256 // batch))


def _weighted_values(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """softmax(q kᵀ / √head_dim) v over the keys that each token sees: `[B, T, heads, head_dim]`."""
    batch, tokens, heads, dim = q.shape
    if visible.dtype != jnp.bool_:
        at = jnp.arange(keys.shape[1], dtype=jnp.int32)
        visible = at[None, None, :] <= visible[:, :, None]  # [B, T, M]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(batch, tokens, keys.shape[2], heads // keys.shape[2], dim)
    scores = jnp.einsum("btkgd,bmkd->bkgtm", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * dim**-0.5, -jnp.inf)
    share = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # A share of zero times NaN would be NaN: a rejected draft would spoil tokens that do not see it.
    is_number = jnp.isfinite(values)
    mixed = jnp.einsum("bkgtm,bmkd->btkgd", share, jnp.where(is_number, values, 0), precision=precision)
    is_bad = jnp.logical_not(jnp.all(is_number, axis=3))  # [B, M, kv_heads]
    sees_bad = jnp.any(visible[:, :, :, None] & is_bad[:, None], axis=2)  # [B, T, kv_heads]
    mixed = jnp.where(sees_bad[:, :, :, None, None], jnp.nan, mixed)
    return mixed.reshape(batch, tokens, heads, dim)


def ancestors(parents: jax.Array) -> jax.Array:
    """Bool `[B, D, D]`: whether node u is node t itself or one of its ancestors, from links `[B, D]`, -1 for none.

    >>> ancestors(jnp.array([[-1, 0, 0, 2]]))[0].astype(jnp.int32).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    """
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)
    reached = (parents[:, :, None] == node[None, None, :]) | jnp.eye(len(node), dtype=bool)[None]
    for _ in range((len(node) - 1).bit_length()):  # each time twice as far
        steps = reached.astype(jnp.float32)
        reached = jnp.einsum("btu,buv->btv", steps, steps) > 0
    return reached


def visible_to_nodes(is_ancestor: jax.Array, past_lengths: jax.Array, max_len: int) -> jax.Array:
    """Bool `[B, D, M]`: the keys that each node of a tree sees, when node u's are at place past length + u.

    They are those of committed tokens and of its ancestors, `is_ancestor` bool `[B, D, D]`.
    """
    node = jnp.arange(max_len, dtype=jnp.int32)[None, :] - past_lengths[:, None]
    inside = jnp.clip(node, 0, is_ancestor.shape[2] - 1)
    of_tree = jnp.take_along_axis(is_ancestor, inside[:, None, :], axis=2, mode="promise_in_bounds")
    return (node < 0)[:, None, :] | of_tree & (node == inside)[:, None, :]


def write_tokens(
    cache: jax.Array, fresh: jax.Array, layer: int, slots: jax.Array, places: jax.Array, is_valid: jax.Array
) -> jax.Array:
    """Writes k or v `[B, T, kv_heads, head_dim]` at each token's place; tokens that are not valid write nothing."""
    rows, at = _rows_and_places(cache, slots, places, is_valid)
    return cache.at[layer, rows, at].set(fresh, mode="drop", unique_indices=True)


def move_path(cache: jax.Array, slots: jax.Array, past_lengths: jax.Array, path: jax.Array) -> jax.Array:
    """Moves keys or values of an accepted path's nodes, in all layers, to where they follow the committed ones.

    `path` int32 `[B, D]` has the nodes from the root on, then -1. A slot outside the pool moves nothing.
    """
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    past, inside = jnp.maximum(past_lengths, 0)[:, None], (slots >= 0) & (slots < cache.shape[1])
    slots = jnp.where(inside, slots, 0)
    # Read as a whole before anything is written: a node's own place may be where another node goes.
    nodes = lax.optimization_barrier(cache[:, slots[:, None], past + jnp.maximum(path, 0)])
    rows, at = _rows_and_places(cache, slots, past + step, inside[:, None] & (path > step))
    return cache.at[:, rows, at].set(nodes, mode="drop", unique_indices=True)


def _rows_and_places(
    cache: jax.Array, slots: jax.Array, places: jax.Array, is_written: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Indices of what a scatter writes.

    A write that must not happen goes past the last place, where it is dropped, each to a place of its own: negative
    ones would wrap, and without the promise of unique places GPUs scatter 16-bit elements by compare-and-swap.
    """
    past_the_end = jnp.int32(cache.shape[2]) + lax.iota(jnp.int32, places.size).reshape(places.shape)
    at = jnp.where(is_written, places, past_the_end)
    return jnp.broadcast_to(jnp.maximum(slots, 0)[:, None], at.shape), at


def read_slots(cache: jax.Array, layer: int, slots: jax.Array) -> jax.Array:
    """Keys or values `[B, M, kv_heads, head_dim]` of slots; a slot outside the pool reads slot 0."""
    inside = (slots >= 0) & (slots < cache.shape[1])
    return cache[layer, jnp.where(inside, slots, 0)]
