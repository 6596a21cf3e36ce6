"""Exact conv-state rollback for speculative decoding in PyTorch: the oracle of the JAX package, without its code.

`reference` is the definition in eager torch, `kernels` the same steps in Triton, `ops` the public functions. Torch
tensors are mutable, so the functions update the tensors that they are given and return those same tensors.
"""

from torch_ref.cache import ConvCache, allocate_conv_cache, dense_view
from torch_ref.layout import ConvCacheSpec, use_storage
from torch_ref.ops import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    causal_conv1d_verify,
    causal_conv1d_verify_float64,
    commit_conv_state,
    gather_windows,
    reset_conv_state,
)

__all__ = [
    "ConvCache",
    "ConvCacheSpec",
    "allocate_conv_cache",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "causal_conv1d_verify_float64",
    "commit_conv_state",
    "dense_view",
    "gather_windows",
    "reset_conv_state",
    "use_storage",
]
