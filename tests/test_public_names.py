"""The public names of both packages and those of their arguments, as they stand: a change here is one for users.

`name=` has a default, names behind `*` are given by keyword. Who changes a line says so in the README's Changes.
"""

import inspect
from typing import Any

import pytest

import jax_impl

# fmt: off
JAX_IMPL = {
    "ConvCache": "conv_state, conv_windows, spec",
    "ConvCacheSpec": (
        "num_layers, num_slots, max_requests, conv_dim, width, num_draft_tokens, dtype=, axis_order=, "
        "storage=, state_len="
    ),
    "ConvWeight": "taps, bias=",
    "HybridCache": "conv, recurrent_state=",
    "accepted_from_index": "accept_index",
    "allocate_conv_cache": "spec, sharding=",
    "causal_conv1d_prefill": (
        "x, conv_state, weight, bias=, *, spec, state_indices, lengths=, has_initial_state=, layer=, "
        "null_slot=, activation=, implementation="
    ),
    "causal_conv1d_update": (
        "x, conv_state, weight, bias=, *, spec, state_indices, layer=, null_slot=, activation=, "
        "implementation="
    ),
    "causal_conv1d_verify": (
        "x, conv_state, conv_windows, weight, bias=, *, spec, state_indices, layer=, window_rows=, "
        "num_valid_tokens=, null_slot=, activation=, implementation=, parents=, resume_tokens=, "
        "resume_path=, resume_windows="
    ),
    "commit_after_verify": (
        "cache, state_indices, num_accepted_tokens, *, step_states=, window_rows=, step_rows=, "
        "num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, implementation=, "
        "accepted_path="
    ),
    "commit_conv_state": (
        "conv_state, conv_windows, state_indices, num_accepted_tokens, *, spec, window_rows=, "
        "num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, implementation=, "
        "accepted_path="
    ),
    "commit_recurrent_state": (
        "state, step_states, state_indices, num_accepted_tokens, *, window_rows=, num_valid_tokens=, "
        "null_slot=, track_indices=, track_num_tokens=, layer_axis=, implementation=, accepted_path="
    ),
    "envelope_slots": "state_indices, layer, *, spec, envelope_elements, first_element=, null_slot=",
    "envelope_spec": "spec, envelope_elements",
    "gather_windows": (
        "conv_windows, num_accepted_tokens, *, spec, window_rows=, conv_state=, state_indices=, "
        "null_slot=, accepted_path="
    ),
    "localize_slots": "slots, rank, slots_per_rank, null_slot=",
    "partition_specs": "spec, *, data_axis=, tensor_axis=",
    "path_to_node": "parents, nodes",
    "prepare_conv_weight": "weight, bias=",
    "reset_conv_state": "conv_state, state_indices, *, spec, null_slot=",
    "shard_conv_weights": "weight, parts, num_ranks",
    "sharded_commit": (
        "conv_state, conv_windows, state_indices, num_accepted_tokens, *, spec, mesh, data_axis=, "
        "tensor_axis=, window_rows=, num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, "
        "accepted_path=, implementation="
    ),
    "sharded_commit_after_verify": (
        "cache, state_indices, num_accepted_tokens, *, mesh, data_axis=, tensor_axis=, step_states=, "
        "window_rows=, step_rows=, num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, "
        "accepted_path=, implementation="
    ),
    "sharded_gather": (
        "conv_windows, num_accepted_tokens, *, spec, mesh, data_axis=, tensor_axis=, window_rows=, "
        "conv_state=, state_indices=, null_slot=, accepted_path="
    ),
    "sharded_prefill": (
        "x, conv_state, weight, bias=, *, spec, mesh, state_indices, data_axis=, tensor_axis=, lengths=, "
        "has_initial_state=, layer=, null_slot=, activation=, implementation="
    ),
    "sharded_update": (
        "x, conv_state, weight, bias=, *, spec, mesh, state_indices, data_axis=, tensor_axis=, layer=, "
        "null_slot=, activation=, implementation="
    ),
    "sharded_verify": (
        "x, conv_state, conv_windows, weight, bias=, *, spec, mesh, state_indices, data_axis=, "
        "tensor_axis=, layer=, window_rows=, num_valid_tokens=, null_slot=, activation=, implementation=, "
        "parents=, resume_tokens=, resume_path=, resume_windows="
    ),
    "track_tokens_at_boundary": "seq_lens, num_accepted_tokens, interval",
    "use_storage": "topk, parents=",
}
TORCH_REF = {
    "ConvCache": "conv_state, conv_windows, spec",
    "ConvCacheSpec": (
        "num_layers, num_slots, max_requests, conv_dim, width, num_draft_tokens, dtype=, axis_order=, "
        "storage=, state_len="
    ),
    "HybridCache": "conv, recurrent_state=",
    "accepted_from_index": "accept_index",
    "allocate_conv_cache": "spec, device=",
    "causal_conv1d_prefill": (
        "x, conv_state, weight, bias=, *, spec, state_indices, lengths=, has_initial_state=, layer=, "
        "null_slot=, activation=, implementation="
    ),
    "causal_conv1d_update": (
        "x, conv_state, weight, bias=, *, spec, state_indices, layer=, null_slot=, activation=, "
        "implementation="
    ),
    "causal_conv1d_verify": (
        "x, conv_state, conv_windows, weight, bias=, *, spec, state_indices, layer=, window_rows=, "
        "num_valid_tokens=, null_slot=, activation=, implementation=, parents=, resume_tokens=, "
        "resume_path=, resume_windows="
    ),
    "causal_conv1d_verify_float64": (
        "x, conv_state, weight, bias=, *, spec, state_indices, layer=, window_rows=, num_valid_tokens=, "
        "null_slot=, activation="
    ),
    "commit_after_verify": (
        "cache, state_indices, num_accepted_tokens, *, step_states=, window_rows=, step_rows=, "
        "num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, implementation=, "
        "accepted_path="
    ),
    "commit_conv_state": (
        "conv_state, conv_windows, state_indices, num_accepted_tokens, *, spec, window_rows=, "
        "num_valid_tokens=, null_slot=, track_indices=, track_num_tokens=, implementation=, "
        "accepted_path="
    ),
    "commit_recurrent_state": (
        "state, step_states, state_indices, num_accepted_tokens, *, window_rows=, num_valid_tokens=, "
        "null_slot=, track_indices=, track_num_tokens=, layer_axis=, implementation=, accepted_path="
    ),
    "dense_view": "conv_windows, *, spec",
    "gather_windows": (
        "conv_windows, num_accepted_tokens, *, spec, window_rows=, conv_state=, state_indices=, "
        "null_slot=, accepted_path="
    ),
    "path_to_node": "parents, nodes",
    "reset_conv_state": "conv_state, state_indices, *, spec, null_slot=",
    "track_tokens_at_boundary": "seq_lens, num_accepted_tokens, interval",
    "use_storage": "topk, parents=",
}
# fmt: on


def described(function: Any) -> str:
    """The names of a function's arguments, in order."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}=")
    return ", ".join(names)


def test_names_of_the_jax_package() -> None:
    assert sorted(jax_impl.__all__) == list(JAX_IMPL)


def test_names_of_the_torch_package(torch_ref: Any) -> None:
    assert sorted(torch_ref.__all__) == list(TORCH_REF)


@pytest.mark.parametrize("name", JAX_IMPL)
def test_arguments_of_the_jax_package(name: str) -> None:
    assert described(getattr(jax_impl, name)) == JAX_IMPL[name]


@pytest.mark.parametrize("name", TORCH_REF)
def test_arguments_of_the_torch_package(torch_ref: Any, name: str) -> None:
    assert described(getattr(torch_ref, name)) == TORCH_REF[name]


def test_the_modules_a_user_may_name() -> None:
    """Documented places beside the package's front: their names are kept as well."""
    from jax_impl import capacity, debug, presets, sharding
    from jax_impl.model import decode, weights

    kept = {
        capacity: (
            "Capacity", "capacity", "column_bytes", "design_table", "gib", "published_table", "saving", "saving_table",
            "times",
        ),
        debug: ("check_commit", "check_verify"),
        presets: ("ConvPart", "PRESETS", "Preset", "get_preset"),
        sharding: (
            "ConvPartitionSpecs", "cache_specs", "channel_order", "local_spec", "shard_channels", "unshard_channels",
            "unshard_conv_weights",
        ),
        decode: ("DecodeState", "Engine", "NotANumberError", "OutOfSlotsError", "prefill_step", "verify_step"),
        weights: ("load_model", "random_parameters", "write_checkpoint"),
    }  # fmt: skip
    assert {
        module.__name__: [name for name in names if not hasattr(module, name)] for module, names in kept.items()
    } == {module.__name__: [] for module in kept}
