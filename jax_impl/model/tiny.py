"""A small random checkpoint in the files of a real one: everything runs without a download and without torch."""

import pathlib
import tempfile
from typing import Any

from jax_impl.model.config import ModelConfig, parse_config
from jax_impl.model.weights import Dtype, Parameters, load_model, write_checkpoint

# Tokens are bytes. 128 channels in the convolution, which is the least that the kernels take.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_tiny_checkpoint(directory: pathlib.Path, *, seed: int = 0, **changes: Any) -> pathlib.Path:
    """Writes the checkpoint, with fields of its configuration changed, and returns its directory."""
    raw = {**TINY, **changes}
    write_checkpoint(directory, raw, parse_config(raw), seed=seed)
    return directory


def tiny_model(dtype: Dtype = "float32", *, seed: int = 0, **changes: Any) -> tuple[ModelConfig, Parameters]:
    """The checkpoint, written to a temporary directory and read by the loader of all checkpoints."""
    with tempfile.TemporaryDirectory() as directory:
        return load_model(write_tiny_checkpoint(pathlib.Path(directory), seed=seed, **changes), dtype)
