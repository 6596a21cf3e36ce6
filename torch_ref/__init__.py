"""Exact conv-state rollback for speculative decoding in PyTorch: the oracle of the JAX package, without its code.

`reference` is the definition in eager torch, `kernels` the same steps in Triton; `ops`, `commit` and `acceptance` have
the public functions. Torch tensors are mutable, so the functions update the tensors that they are given and return
those same tensors.

The names are loaded on first use, so that the layout can be used without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ref.acceptance import accepted_from_index, path_to_node, track_tokens_at_boundary
    from torch_ref.cache import ConvCache, HybridCache, allocate_conv_cache, dense_view
    from torch_ref.commit import commit_after_verify, commit_conv_state, commit_recurrent_state
    from torch_ref.layout import ConvCacheSpec, use_storage
    from torch_ref.ops import (
        causal_conv1d_prefill,
        causal_conv1d_update,
        causal_conv1d_verify,
        causal_conv1d_verify_float64,
        gather_windows,
        reset_conv_state,
    )

__all__ = [
    "ConvCache",
    "ConvCacheSpec",
    "HybridCache",
    "accepted_from_index",
    "allocate_conv_cache",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "causal_conv1d_verify_float64",
    "commit_after_verify",
    "commit_conv_state",
    "commit_recurrent_state",
    "dense_view",
    "gather_windows",
    "path_to_node",
    "reset_conv_state",
    "track_tokens_at_boundary",
    "use_storage",
]

_MODULE_OF = {
    "ConvCache": "cache",
    "ConvCacheSpec": "layout",
    "HybridCache": "cache",
    "accepted_from_index": "acceptance",
    "allocate_conv_cache": "cache",
    "causal_conv1d_prefill": "ops",
    "causal_conv1d_update": "ops",
    "causal_conv1d_verify": "ops",
    "causal_conv1d_verify_float64": "ops",
    "commit_after_verify": "commit",
    "commit_conv_state": "commit",
    "commit_recurrent_state": "commit",
    "dense_view": "cache",
    "gather_windows": "ops",
    "path_to_node": "acceptance",
    "reset_conv_state": "ops",
    "track_tokens_at_boundary": "acceptance",
    "use_storage": "layout",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"torch_ref.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
