"""Good calls of every public function, all arguments by keyword: bad input is made of them, one argument at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.layout import ConvCacheSpec

SPEC = ConvCacheSpec(2, 5, 3, 96, 4, 3)
INPUTS = ConvCacheSpec(2, 5, 3, 96, 4, 3, storage="inputs")
LINKS = [[-1, 0, 1], [-1, 0, 1]]
PATHS = [[0, 1, -1], [0, 1, 2]]
# Calls with storage "inputs" have their name behind the function's: some arguments are of this storage only.
OF_INPUTS = " of inputs"


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


def ints(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def jax_calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function of the JAX package with the arguments of a call that works, all of them given."""
    import jax_impl
    from jax_impl import capacity, debug, presets, sharding
    from jax_impl.presets import ConvPart

    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    on_mesh: dict[str, Any] = {"mesh": mesh, "data_axis": "data", "tensor_axis": "tensor"}
    state, windows = zeros(*SPEC.state_shape), zeros(*SPEC.windows_shape)
    options: dict[str, Any] = {"null_slot": 0, "implementation": "xla"}
    convolution: dict[str, Any] = {
        "conv_state": state, "weight": zeros(96, 4), "bias": zeros(96), "spec": SPEC, "state_indices": ints(1, 2),
        "layer": 0, "activation": "silu", **options,
    }  # fmt: skip
    verified: dict[str, Any] = {"window_rows": ints(2, 0), "num_valid_tokens": ints(3, 2)}
    indices: dict[str, Any] = {
        "state_indices": ints(1, 2), "num_accepted_tokens": ints(1, 2), "track_indices": ints(3, 4),
        "track_num_tokens": ints(1, 0), "null_slot": 0, "accepted_path": PATHS, **verified,
    }  # fmt: skip
    commit: dict[str, Any] = {**indices, "implementation": "xla"}
    cache = jax_impl.HybridCache(jax_impl.ConvCache(state, windows, SPEC), zeros(2, 5, 7))
    after: dict[str, Any] = {**commit, "cache": cache, "step_states": zeros(2, 3, 3, 7), "step_rows": ints(1, 0)}
    resumed: dict[str, Any] = {"parents": LINKS, "resume_tokens": ints(1, 3), "resume_path": PATHS}
    verify = {
        "x": zeros(2, 3, 96), "conv_windows": windows, **convolution, **verified, **resumed, "resume_windows": None,
    }  # fmt: skip
    of_inputs = {"spec": INPUTS, "conv_windows": zeros(*INPUTS.windows_shape)}
    verify_inputs = {**verify, **of_inputs, "x": None, "resume_windows": zeros(*INPUTS.windows_shape)}
    prefill = {"x": zeros(2, 7, 96), **convolution, "lengths": ints(7, 3), "has_initial_state": [True, False]}
    gather: dict[str, Any] = {
        "conv_windows": windows, "num_accepted_tokens": ints(1, 2), "spec": SPEC, "window_rows": ints(2, 0),
        "conv_state": None, "state_indices": None, "null_slot": None, "accepted_path": PATHS,
    }  # fmt: skip
    gather_inputs = {**gather, **of_inputs, "conv_state": state, "state_indices": ints(1, 2), "null_slot": 0}
    commit_conv = {"conv_state": state, "conv_windows": windows, "spec": SPEC, **commit}
    parts = (ConvPart("q", 32, 2), ConvPart("v", 64, 4))
    channels = {"array": zeros(4, 96), "parts": parts, "num_ranks": 2, "axis": -1}
    preset = presets.get_preset("Qwen3.5-0.8B")
    of_rows = {"num_slots": 4, "max_requests": 2, "num_draft_tokens": 3}
    sizes = {"num_layers": 2, "conv_dim": 96, "width": 4, "num_slots": 4, "max_requests": 2, "num_draft_tokens": 3}
    form = {"dtype": "bfloat16", "axis_order": "time_major", "storage": "sliding", "state_len": 3}
    return {
        "ConvCacheSpec": (jax_impl.ConvCacheSpec, {**sizes, **form}),
        "accepted_from_index": (jax_impl.accepted_from_index, {"accept_index": np.zeros((2, 3), np.int32)}),
        "allocate_conv_cache": (jax_impl.allocate_conv_cache, {"spec": SPEC, "sharding": jax.devices()[0]}),
        "causal_conv1d_prefill": (jax_impl.causal_conv1d_prefill, prefill),
        "causal_conv1d_update": (jax_impl.causal_conv1d_update, {"x": zeros(2, 96), **convolution}),
        "causal_conv1d_verify": (jax_impl.causal_conv1d_verify, verify),
        f"causal_conv1d_verify{OF_INPUTS}": (jax_impl.causal_conv1d_verify, verify_inputs),
        "commit_after_verify": (jax_impl.commit_after_verify, after),
        "commit_conv_state": (jax_impl.commit_conv_state, commit_conv),
        f"commit_conv_state{OF_INPUTS}": (jax_impl.commit_conv_state, {**commit_conv, **of_inputs}),
        "commit_recurrent_state": (
            jax_impl.commit_recurrent_state,
            {"state": zeros(2, 5, 7), "step_states": zeros(2, 3, 3, 7), "layer_axis": True, **commit},
        ),
        "envelope_slots": (
            jax_impl.envelope_slots,
            {"state_indices": ints(1, 2), "layer": 1, "spec": SPEC, "envelope_elements": 4 * 288, "first_element": 288,
             "null_slot": 0},
        ),
        "envelope_spec": (jax_impl.envelope_spec, {"spec": SPEC, "envelope_elements": 2 * 288}),
        "gather_windows": (jax_impl.gather_windows, gather),
        f"gather_windows{OF_INPUTS}": (jax_impl.gather_windows, gather_inputs),
        "localize_slots": (
            jax_impl.localize_slots, {"slots": ints(1, 2), "rank": 1, "slots_per_rank": 2, "null_slot": 0},
        ),
        "partition_specs": (
            jax_impl.partition_specs, {"spec": SPEC, "data_axis": "data", "tensor_axis": "tensor"},
        ),
        "path_to_node": (jax_impl.path_to_node, {"parents": jnp.asarray(LINKS), "nodes": ints(1, 2)}),
        "prepare_conv_weight": (jax_impl.prepare_conv_weight, {"weight": zeros(96, 1, 4), "bias": zeros(96)}),
        "reset_conv_state": (
            jax_impl.reset_conv_state, {"conv_state": state, "state_indices": ints(1, 2), "spec": SPEC, "null_slot": 0},
        ),
        "shard_conv_weights": (
            jax_impl.shard_conv_weights, {"weight": zeros(96, 4), "parts": parts, "num_ranks": 2},
        ),
        "sharded_commit": (jax_impl.sharded_commit, {**commit_conv, **on_mesh}),
        "sharded_commit_after_verify": (jax_impl.sharded_commit_after_verify, {**after, **on_mesh}),
        f"sharded_commit{OF_INPUTS}": (jax_impl.sharded_commit, {**commit_conv, **of_inputs, **on_mesh}),
        "sharded_gather": (jax_impl.sharded_gather, {**gather, **on_mesh}),
        f"sharded_gather{OF_INPUTS}": (jax_impl.sharded_gather, {**gather_inputs, **on_mesh}),
        "sharded_prefill": (jax_impl.sharded_prefill, {**prefill, **on_mesh}),
        "sharded_update": (jax_impl.sharded_update, {"x": zeros(2, 96), **convolution, **on_mesh}),
        "sharded_verify": (jax_impl.sharded_verify, {**verify, **on_mesh}),
        f"sharded_verify{OF_INPUTS}": (jax_impl.sharded_verify, {**verify_inputs, **on_mesh}),
        "track_tokens_at_boundary": (
            jax_impl.track_tokens_at_boundary,
            {"seq_lens": ints(3, 4), "num_accepted_tokens": ints(1, 2), "interval": 4},
        ),
        "use_storage": (jax_impl.use_storage, {"topk": 1, "parents": [-1, 0]}),
        "debug.check_commit": (debug.check_commit, {"spec": SPEC, **indices}),
        "debug.check_verify": (
            debug.check_verify, {"spec": SPEC, "state_indices": ints(1, 2), "null_slot": 0, **verified, **resumed},
        ),
        "capacity.capacity": (capacity.capacity, {"spec": SPEC}),
        "capacity.saving": (capacity.saving, {"width": 4, "num_draft_tokens": 3, "state_len": 3, "storage": "inputs"}),
        "capacity.design_table": (capacity.design_table, {"width": 4, "draft_tokens": (3,), "state_len": 3}),
        "capacity.column_bytes": (capacity.column_bytes, {"spec": SPEC}),
        "capacity.saving_table": (capacity.saving_table, {"widths": (4,), "draft_tokens": (3,), "state_len": 3}),
        "presets.get_preset": (presets.get_preset, {"name": "Qwen3.5-0.8B"}),
        "presets.Preset.spec": (preset.spec, {**of_rows, "tp": 2, **form}),
        "presets.Preset.conv_dim_per_rank": (preset.conv_dim_per_rank, {"tp": 2}),
        "presets.ConvPart.channels_per_rank": (parts[0].channels_per_rank, {"tp": 2}),
        "sharding.cache_specs": (sharding.cache_specs, {"cache": cache, "data_axis": "data", "tensor_axis": "tensor"}),
        "sharding.channel_order": (sharding.channel_order, {"parts": parts, "num_ranks": 2}),
        "sharding.local_spec": (sharding.local_spec, {"spec": SPEC, **on_mesh, "parts": parts}),
        "sharding.shard_channels": (sharding.shard_channels, channels),
        "sharding.unshard_channels": (sharding.unshard_channels, channels),
        "sharding.unshard_conv_weights": (
            sharding.unshard_conv_weights, {"weight": zeros(96, 4), "parts": parts, "num_ranks": 2},
        ),
    }  # fmt: skip


def torch_calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The same of the torch package."""
    import torch

    import torch_ref

    spec = torch_ref.ConvCacheSpec(2, 5, 3, 96, 4, 3)
    inputs = torch_ref.ConvCacheSpec(2, 5, 3, 96, 4, 3, storage="inputs")

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    state, windows = zeros(*spec.state_shape), zeros(*spec.windows_shape)
    convolution: dict[str, Any] = {
        "conv_state": state, "weight": zeros(96, 4), "bias": zeros(96), "spec": spec, "state_indices": ints(1, 2),
        "layer": 0, "activation": "silu", "null_slot": 0,
    }  # fmt: skip
    verified: dict[str, Any] = {"window_rows": ints(2, 0), "num_valid_tokens": ints(3, 2)}
    commit: dict[str, Any] = {
        "state_indices": ints(1, 2), "num_accepted_tokens": ints(1, 2), "track_indices": ints(3, 4),
        "track_num_tokens": ints(1, 0), "null_slot": 0, "accepted_path": PATHS, **verified, "implementation": "eager",
    }  # fmt: skip
    eager = {"implementation": "eager"}
    cache = torch_ref.HybridCache(torch_ref.ConvCache(state, windows, spec), zeros(2, 5, 7))
    prefill = {"x": zeros(2, 7, 96), **convolution, "lengths": ints(7, 3), "has_initial_state": [True, False], **eager}
    verify: dict[str, Any] = {
        "x": zeros(2, 3, 96), "conv_windows": windows, **convolution, **verified, **eager, "parents": LINKS,
        "resume_tokens": ints(1, 3), "resume_path": PATHS, "resume_windows": None,
    }  # fmt: skip
    of_inputs = {"spec": inputs, "conv_windows": zeros(*inputs.windows_shape)}
    verify_inputs = {**verify, **of_inputs, "x": None, "resume_windows": zeros(*inputs.windows_shape)}
    gather: dict[str, Any] = {
        "conv_windows": windows, "num_accepted_tokens": ints(1, 2), "spec": spec, "window_rows": ints(2, 0),
        "conv_state": None, "state_indices": None, "null_slot": None, "accepted_path": PATHS,
    }  # fmt: skip
    gather_inputs = {**gather, **of_inputs, "conv_state": state, "state_indices": ints(1, 2), "null_slot": 0}
    commit_conv = {"conv_state": state, "conv_windows": windows, "spec": spec, **commit}
    sizes = {"num_layers": 2, "conv_dim": 96, "width": 4, "num_slots": 4, "max_requests": 2, "num_draft_tokens": 3}
    form = {"dtype": "bfloat16", "axis_order": "time_major", "storage": "sliding", "state_len": 3}
    return {
        "ConvCacheSpec": (torch_ref.ConvCacheSpec, {**sizes, **form}),
        "accepted_from_index": (torch_ref.accepted_from_index, {"accept_index": torch.zeros(2, 3, dtype=torch.int32)}),
        "allocate_conv_cache": (torch_ref.allocate_conv_cache, {"spec": spec, "device": "cpu"}),
        "causal_conv1d_prefill": (torch_ref.causal_conv1d_prefill, prefill),
        "causal_conv1d_update": (torch_ref.causal_conv1d_update, {"x": zeros(2, 96), **convolution, **eager}),
        "causal_conv1d_verify": (torch_ref.causal_conv1d_verify, verify),
        f"causal_conv1d_verify{OF_INPUTS}": (torch_ref.causal_conv1d_verify, verify_inputs),
        "causal_conv1d_verify_float64": (
            torch_ref.causal_conv1d_verify_float64, {"x": zeros(2, 3, 96), **convolution, **verified},
        ),
        "commit_after_verify": (
            torch_ref.commit_after_verify,
            {**commit, "cache": cache, "step_states": zeros(2, 3, 3, 7), "step_rows": ints(1, 0)},
        ),
        "commit_conv_state": (torch_ref.commit_conv_state, commit_conv),
        f"commit_conv_state{OF_INPUTS}": (torch_ref.commit_conv_state, {**commit_conv, **of_inputs}),
        "commit_recurrent_state": (
            torch_ref.commit_recurrent_state,
            {"state": zeros(2, 5, 7), "step_states": zeros(2, 3, 3, 7), "layer_axis": True, **commit},
        ),
        "dense_view": (torch_ref.dense_view, {"conv_windows": windows, "spec": spec}),
        "gather_windows": (torch_ref.gather_windows, gather),
        f"gather_windows{OF_INPUTS}": (torch_ref.gather_windows, gather_inputs),
        "path_to_node": (torch_ref.path_to_node, {"parents": torch.tensor(LINKS), "nodes": ints(1, 2)}),
        "reset_conv_state": (
            torch_ref.reset_conv_state,
            {"conv_state": state, "state_indices": ints(1, 2), "spec": spec, "null_slot": 0},
        ),
        "track_tokens_at_boundary": (
            torch_ref.track_tokens_at_boundary,
            {"seq_lens": ints(3, 4), "num_accepted_tokens": ints(1, 2), "interval": 4},
        ),
        "use_storage": (torch_ref.use_storage, {"topk": 1, "parents": [-1, 0]}),
    }  # fmt: skip
