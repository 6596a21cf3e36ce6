"""Exact rollback of short-convolution state in speculative decoding, for JAX on NVIDIA GPUs.

The names below are loaded on first use, so that layout, capacity and presets can be used without any array framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_impl.cache import ConvCache, allocate_conv_cache, reset_conv_state
    from jax_impl.commit import commit_conv_state
    from jax_impl.conv import (
        ConvWeight,
        causal_conv1d_update,
        causal_conv1d_verify,
        prepare_conv_weight,
    )
    from jax_impl.envelope import envelope_slots, envelope_spec
    from jax_impl.history import path_to_node
    from jax_impl.layout import ConvCacheSpec, use_storage
    from jax_impl.prefill import causal_conv1d_prefill
    from jax_impl.rollback import (
        HybridCache,
        accepted_from_index,
        commit_after_verify,
        commit_recurrent_state,
        track_tokens_at_boundary,
    )
    from jax_impl.sharding import (
        localize_slots,
        partition_specs,
        shard_conv_weights,
        sharded_commit,
        sharded_commit_after_verify,
        sharded_gather,
        sharded_prefill,
        sharded_update,
        sharded_verify,
    )
    from jax_impl.windows import gather_windows

__version__ = "0.1.0"

__all__ = [
    "ConvCache",
    "ConvCacheSpec",
    "ConvWeight",
    "HybridCache",
    "accepted_from_index",
    "allocate_conv_cache",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "commit_after_verify",
    "commit_conv_state",
    "commit_recurrent_state",
    "envelope_slots",
    "envelope_spec",
    "gather_windows",
    "localize_slots",
    "partition_specs",
    "path_to_node",
    "prepare_conv_weight",
    "reset_conv_state",
    "shard_conv_weights",
    "sharded_commit",
    "sharded_commit_after_verify",
    "sharded_gather",
    "sharded_prefill",
    "sharded_update",
    "sharded_verify",
    "track_tokens_at_boundary",
    "use_storage",
]

_MODULE_OF = {
    "ConvCache": "cache",
    "ConvCacheSpec": "layout",
    "ConvWeight": "conv",
    "HybridCache": "rollback",
    "accepted_from_index": "rollback",
    "allocate_conv_cache": "cache",
    "causal_conv1d_prefill": "prefill",
    "causal_conv1d_update": "conv",
    "causal_conv1d_verify": "conv",
    "commit_after_verify": "rollback",
    "commit_conv_state": "commit",
    "commit_recurrent_state": "rollback",
    "envelope_slots": "envelope",
    "envelope_spec": "envelope",
    "gather_windows": "windows",
    "localize_slots": "sharding",
    "partition_specs": "sharding",
    "path_to_node": "history",
    "prepare_conv_weight": "conv",
    "reset_conv_state": "cache",
    "shard_conv_weights": "sharding",
    "sharded_commit": "sharding",
    "sharded_commit_after_verify": "sharding",
    "sharded_gather": "sharding",
    "sharded_prefill": "sharding",
    "sharded_update": "sharding",
    "sharded_verify": "sharding",
    "track_tokens_at_boundary": "rollback",
    "use_storage": "layout",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
