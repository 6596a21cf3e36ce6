"""Until the commit of a whole hybrid cache is in the package."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.commit import commit_conv_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    conv: Any
    recurrent_state: Any


def commit_after_verify(
    cache, state_indices, num_accepted_tokens, *, step_states=None, num_valid_tokens=None, implementation=None
):
    conv = dataclasses.replace(
        cache.conv,
        conv_state=commit_conv_state(
            cache.conv.conv_state,
            cache.conv.conv_windows,
            state_indices,
            num_accepted_tokens,
            spec=cache.conv.spec,
            num_valid_tokens=num_valid_tokens,
            implementation=implementation,
        ),
    )
    pool = cache.recurrent_state
    n = num_accepted_tokens
    live = (n >= 1) & (n <= step_states.shape[2]) & (state_indices >= 0) & (state_indices < pool.shape[1])
    rows = jnp.arange(n.shape[0])
    taken = step_states[:, rows, jnp.where(live, n - 1, 0)]
    where = jnp.where(live, state_indices, pool.shape[1])
    return HybridCache(conv, pool.at[:, where].set(taken, mode="drop"))
