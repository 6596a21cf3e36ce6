"""Checkpoints: what is read, and that a broken one is refused by the name of its file and tensor, before it is read."""

import json
import pathlib
import re
import resource
import struct
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.model import config as config_module
from jax_impl.model import weights
from jax_impl.model.config import MAX_FILE_BYTES, load_config, parse_config
from jax_impl.model.tiny import TINY, tiny_model, write_tiny_checkpoint
from jax_impl.model.weights import load_model, random_parameters, tensor_shapes

pytest.importorskip("safetensors", reason="safetensors is not installed")

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
NORM, PROJECTION = "model.layers.0.input_layernorm.weight", "model.layers.0.linear_attn.in_proj_qkv.weight"


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_tiny_checkpoint(tmp_path, **SMALL)


def rewrite(directory: pathlib.Path, change: Callable[[dict[str, Any]], object], shards: int = 1) -> None:
    """Writes the tensors again, changed; in several files with an index when `shards` is above 1."""
    from safetensors.numpy import load_file, save_file

    tensors: dict[str, Any] = load_file(directory / "model.safetensors")
    change(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, directory / file)
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(directory: pathlib.Path, file: str = "config.json", **fields: Any) -> None:
    path = directory / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **fields}))


def refused(directory: pathlib.Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"^`.*") as caught:
        load_model(directory, **options)
    return str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_shards_are_the_single_file(checkpoint: pathlib.Path) -> None:
    _, single = load_model(checkpoint)
    rewrite(checkpoint, lambda tensors: None, shards=3)
    _, sharded = load_model(checkpoint)
    for got, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_converted_by_choice(checkpoint: pathlib.Path, dtype: Any, stored: str) -> None:
    """Matrices in the chosen dtype, rounded once; norms and decays in float32."""
    import ml_dtypes

    bits = np.dtype(getattr(ml_dtypes, stored, stored))
    kept: dict[str, Any] = {}

    def narrow(tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensors[name] = kept[name] = tensors[name].astype(bits)

    rewrite(checkpoint, narrow)
    _, parameters = load_model(checkpoint, dtype)
    embedding = kept["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    assert str(parameters.embedding.dtype) == dtype
    np.testing.assert_array_equal(np.asarray(parameters.embedding), embedding)
    assert str(parameters.layers[0].input_norm.dtype) == "float32"
    np.testing.assert_array_equal(np.asarray(parameters.layers[0].input_norm), kept[NORM].astype(np.float32))


def test_the_checkpoints_dtype_is_kept_unless_another_is_chosen(checkpoint: pathlib.Path) -> None:
    assert str(load_model(checkpoint)[1].embedding.dtype) == "float32"
    edit(checkpoint, dtype="float16")
    assert "config.json: dtype`: expected one of float32, bfloat16, got 'float16'" in refused(checkpoint)
    assert str(load_model(checkpoint, "bfloat16")[1].embedding.dtype) == "bfloat16"


def test_a_tied_embedding_is_one_array() -> None:
    _, parameters = tiny_model(**SMALL, tie_word_embeddings=True)
    assert parameters.lm_head is parameters.embedding


def test_stop_tokens_of_both_files(checkpoint: pathlib.Path) -> None:
    assert load_config(checkpoint).stop_token_ids == ()
    edit(checkpoint, eos_token_id=7)
    assert load_config(checkpoint).stop_token_ids == (7,)
    edit(checkpoint, "generation_config.json", eos_token_id=[9, 3])
    assert load_config(checkpoint).stop_token_ids == (3, 9)


def nested(outer: dict[str, Any], without: str = "") -> dict[str, Any]:
    """A file with the text model under `text_config`, one field left out there, and fields beside it."""
    return {"model_type": "qwen3_5", "text_config": {name: TINY[name] for name in TINY if name != without}, **outer}


def test_what_a_nested_text_model_leaves_to_the_file_around_it() -> None:
    assert parse_config(nested({"eos_token_id": 7})).stop_token_ids == (7,)
    assert parse_config(nested({"tie_word_embeddings": True}, "tie_word_embeddings")).tied
    assert not parse_config(nested({"tie_word_embeddings": True})).tied  # its own field counts
    own = nested({"eos_token_id": 7})
    own["text_config"]["eos_token_id"] = [8, 9]
    assert parse_config(own).stop_token_ids == (8, 9)
    assert parse_config(own, stop=3).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config`: expected None, got {'bits': 4}."),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings`: expected true or false, got 'no'."),
        ({"eos_token_id": "end"}, "eos_token_id`: expected a token or a list of tokens, got 'end'."),
    ],
)
def test_what_is_wrong_around_a_nested_text_model(outer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_config(nested(outer, "tie_word_embeddings"))


def test_which_layers_have_experts_is_chosen_in_qwen3_next_alone() -> None:
    """In Qwen3.5 all layers have them and their weights are normalised, whatever the file says."""
    raw = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    raw |= {"shared_expert_intermediate_size": 4}
    raw |= {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    chosen = parse_config(raw | {"model_type": "qwen3_next"})
    always = parse_config(raw | {"model_type": "qwen3_5_moe_text"})
    assert chosen.moe is not None
    assert always.moe is not None
    assert (chosen.moe.normalize, chosen.moe_layers) == (False, (1, 3))
    assert (always.moe.normalize, always.moe_layers) == (True, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="num_experts`: expected an integer from 1 to 16777216, got 0"):
        parse_config(raw | {"model_type": "qwen3_5_moe_text", "num_experts": 0})


def test_of_two_rotary_objects_rope_scaling_counts() -> None:
    config = parse_config(TINY | {"rope_scaling": {"type": "mrope", "rope_theta": 5e5, "partial_rotary_factor": 0.5}})
    assert (config.rope_theta, config.rotary_dim) == (5e5, 8)


def test_older_fields_and_defaults() -> None:
    """The published Qwen3-Next file has its rotary base at the top, and no list of layer types."""
    raw = {field: value for field, value in TINY.items() if field != "rope_parameters"}
    config = parse_config({**raw, "rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_scaling": None})
    assert (config.rope_theta, config.rotary_dim) == (1e7, 8)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.conv_dim, config.num_linear_layers, config.num_full_layers) == (128, 3, 1)


def test_random_parameters_have_the_shapes_of_a_checkpoint() -> None:
    config, parameters = tiny_model(**SMALL)
    made = random_parameters(config, "bfloat16")
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]  # noqa: E731
    assert shapes(made) == shapes(parameters)
    for leaf in jax.tree.leaves(made):
        assert float(np.std(np.asarray(leaf, np.float32))) > 0  # nothing at a constant


# ---- broken checkpoints ----------------------------------------------------------------------------------------------


def test_a_missing_tensor(checkpoint: pathlib.Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(NORM))
    assert refused(checkpoint) == f"`{checkpoint}/model.safetensors`: expected tensor `{NORM}`, got none."
    rewrite(checkpoint, lambda tensors: None, shards=2)
    assert refused(checkpoint) == f"`{checkpoint}/model.safetensors.index.json`: expected tensor `{NORM}`, got none."


def test_a_wrong_shape(checkpoint: pathlib.Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({PROJECTION: tensors[PROJECTION][:, :-1].copy()}))
    assert refused(checkpoint) == (
        f"`{checkpoint}/model.safetensors`: expected tensor `{PROJECTION}` of shape (128, 48), got (128, 47)."
    )


def test_a_dtype_that_cannot_be_read(checkpoint: pathlib.Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({PROJECTION: tensors[PROJECTION].astype(np.int8)}))
    message = f"`{checkpoint}/model.safetensors`: expected tensor `{PROJECTION}` in F32, BF16, F16, got I8."
    assert refused(checkpoint) == message


def test_a_file_that_was_cut(checkpoint: pathlib.Path) -> None:
    """The first tensor that is not whole is named, wherever the file ends; or what is wrong with its header."""
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")
    for end, name in (ends[0], ends[7], ends[-1]):
        path.write_bytes(content[: 8 + length + end - 1])
        message = refused(checkpoint)
        assert message.startswith(f"`{path}`: expected a whole safetensors file, got {8 + length + end - 1:,} bytes, ")
        assert message.endswith(f"tensor `{name}` ends at byte {8 + length + end:,}: the file was cut.")
    for kept in (0, 5, 8, 8 + length // 2):
        path.write_bytes(content[:kept])
        assert refused(checkpoint).startswith(f"`{path}`: expected a whole safetensors file, got ")


@pytest.mark.parametrize("length", [2**63, 2**32, 101 * 2**20])
def test_a_header_of_absurd_length_is_not_read(checkpoint: pathlib.Path, length: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert refused(checkpoint).startswith(f"`{path}`: expected a whole safetensors file, got ")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("2^60 elements", {"shape": [2**60]}),
        ("elements that overflow", {"shape": [2**40, 2**40]}),
        ("a negative size", {"shape": [-1]}),
        ("a size of 2^70", {"shape": [2**70]}),
        ("an end beyond the file", {"data_offsets": [0, 2**62]}),
        ("an end before the start", {"data_offsets": [8, 0]}),
        ("a negative offset", {"data_offsets": [-8, 0]}),
        ("no offsets", {"data_offsets": []}),
        ("an unknown dtype", {"dtype": "PICKLE"}),
        ("no shape", {"shape": None}),
    ],
)
def test_a_header_that_lies(checkpoint: pathlib.Path, what: str, change: dict[str, Any]) -> None:
    """The file is refused by name before memory is asked for: of terabytes there would be none."""
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header[NORM] |= change
    lying = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(lying)) + lying + content[8 + length :])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(checkpoint).startswith(f"`{path}`: expected a whole safetensors file, got "), what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB


@pytest.mark.parametrize("header", [b"[" * 50_000, b'{"a":' * 50_000, b"{}", b'{"a": 1}', b"\xff" * 9, b"null"])
def test_a_header_that_is_no_header(checkpoint: pathlib.Path, header: bytes) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert refused(checkpoint).startswith(f"`{path}`: expected ")


def test_a_pickle_is_not_opened(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Neither under the name of a weights file nor under its own: nothing in a checkpoint runs."""
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return pathlib.Path.touch, (tmp_path / "ran",)

    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        content = pickle.dumps(Payload())
        (checkpoint / "model.safetensors").unlink(missing_ok=True)
        (checkpoint / name).write_bytes(content)
        assert "expected" in refused(checkpoint)
    assert not (tmp_path / "ran").exists()
    imported = {name for file in (weights, config_module) for name in vars(file) if name in ("pickle", "torch", "ast")}
    assert not imported


@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_nested_json_where_a_number_belongs(checkpoint: pathlib.Path, depth: int) -> None:
    """Refused by field, or as JSON that is too deep; the message stays short."""
    raw = (
        (checkpoint / "config.json")
        .read_text()
        .replace('"hidden_size": 48', f'"hidden_size": {"[" * depth}{"]" * depth}')
    )
    (checkpoint / "config.json").write_text(raw)
    message = refused(checkpoint)
    assert re.search(r"hidden_size`: expected an integer|expected JSON, got RecursionError", message)
    assert len(message) < 400


def test_no_weights_at_all(checkpoint: pathlib.Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert refused(checkpoint) == (
        f"`{checkpoint}/model.safetensors`: expected this file or model.safetensors.index.json, got neither."
    )


def test_a_missing_shard_and_an_index_that_is_wrong(checkpoint: pathlib.Path) -> None:
    rewrite(checkpoint, lambda tensors: None, shards=3)
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = checkpoint / content["weight_map"][NORM]
    moved = next(file for file in content["weight_map"].values() if file != shard.name)
    edit(checkpoint, index.name, weight_map={**content["weight_map"], NORM: moved})
    assert refused(checkpoint).startswith(f"`{checkpoint / moved}`: expected tensor `{NORM}`, which {index.name} says")
    for outside in ("../x.safetensors", "..", ".", ""):
        edit(checkpoint, index.name, weight_map={**content["weight_map"], NORM: outside})
        assert refused(checkpoint).endswith(f"expected names of files beside it, got {outside!r}.")
    for impossible in ("~" * 300, "~\0"):
        edit(checkpoint, index.name, weight_map={**content["weight_map"], NORM: impossible})
        assert refused(checkpoint).endswith(f"expected the shard that holds `{NORM}`, got no such file.")
    for wrong in ([], {}, {NORM: 3}, None):
        edit(checkpoint, index.name, weight_map=wrong)
        assert refused(checkpoint).startswith(f"`{index}`: expected an object weight_map")
    edit(checkpoint, index.name, **content)
    shard.unlink()
    first = next(name for name, file in content["weight_map"].items() if file == shard.name)
    assert refused(checkpoint) == f"`{shard}`: expected the shard that holds `{first}`, got no such file."


def test_many_problems_are_a_short_message(checkpoint: pathlib.Path) -> None:
    edit(checkpoint, hidden_size=52)
    message = refused(checkpoint)
    assert message.count("\n") == weights.SHOWN_PROBLEMS
    assert re.search(r"\nAnd \d+ more like these\.$", message)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "head_dim", "linear_num_value_heads"])
def test_nothing_is_read_when_a_size_is_absurd(
    checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Shapes of terabytes are compared with the header and refused; no tensor is read or allocated."""
    assembled = []
    assemble = weights.assemble
    monkeypatch.setattr(weights, "assemble", lambda *args, **kw: assembled.append(args) or assemble(*args, **kw))
    sizes: dict[str, Any] = {"num_attention_heads": 2**24, field: 2**24}
    edit(checkpoint, **sizes)
    assert re.search(r"expected tensor `.*` of shape \(.*16777216.*\), got \(", refused(checkpoint))
    assert len(assembled) == 1  # for the shapes alone


@pytest.mark.parametrize("count", [4, 2**24])
def test_experts_that_are_not_there_are_not_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The first one is named before the names and shapes of all, which may be millions, are made up."""
    more: dict[str, Any] = {"model_type": "qwen3_5_moe_text", "num_experts": 2, "num_experts_per_tok": 1}
    more |= {"moe_intermediate_size": 4, "shared_expert_intermediate_size": 4}
    write_tiny_checkpoint(tmp_path, **SMALL, **more)
    edit(tmp_path, num_experts=count)
    if count > 4:
        monkeypatch.setattr(weights, "tensor_shapes", None)
    name = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert f"`{tmp_path}/model.safetensors`: expected tensor `{name}`, got none." in refused(tmp_path)


# ---- broken configurations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type`: expected one of qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, "
         "qwen3_next, got 'llama'."),
        ({"model_type": None}, "model_type`: expected one of"),
        ({"model_type": ["qwen3_next"]}, "model_type`: expected one of"),
        ({"model_type": "qwen3_5"}, "text_config`: expected an object, got None. qwen3_5 nests its text model there."),
        ({"hidden_size": 0}, "hidden_size`: expected an integer from 1 to 16777216, got 0."),
        ({"hidden_size": 10**30}, "hidden_size`: expected an integer from 1 to 16777216, got 1000"),
        ({"hidden_size": 48.0}, "hidden_size`: expected an integer from 1 to 16777216, got 48.0."),
        ({"hidden_size": True}, "hidden_size`: expected an integer from 1 to 16777216, got True."),
        ({"vocab_size": None}, "vocab_size`: expected an integer"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers`: expected an integer from 1 to 4096, got 1000000."),
        ({"layer_types": ["linear_attention"]}, "layer_types`: expected 2 times linear_attention or full_attention"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types`: expected 2 times"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types`: expected at least one linear_attention layer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads`: expected a divisor of num_attention_heads = 4, got 3."),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads`: expected a divisor of linear_num_value_heads = 4,"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim`: expected at least 2, got 1."),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters`: expected rope_type \"default\", got 'yarn'."),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling`: expected rope_type \"default\", got 'yarn'."),
        ({"rope_scaling": 3}, "rope_scaling`: expected an object, got 3."),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta`: expected a positive number, got -1.0."),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor`: expected at most 1, got 1.5."),
        ({"rope_parameters": 3}, "rope_parameters`: expected an object, got 3."),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps`: expected a positive number, got 'tiny'."),
        ({"hidden_act": "gelu"}, "hidden_act`: expected 'silu', got 'gelu'. Nothing else is implemented."),
        ({"attention_bias": True}, "attention_bias`: expected False, got True."),
        ({"quantization_config": {"bits": 4}}, "quantization_config`: expected None, got {'bits': 4}."),
        ({"eos_token_id": "end"}, "eos_token_id`: expected a token or a list of tokens, got 'end'."),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings`: expected true or false, got 'no'."),
        ({"dtype": 32}, "dtype`: expected a name, got 32."),
        ({"model_type": "qwen3_next", "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 4,
          "shared_expert_intermediate_size": 4}, "num_experts_per_tok`: expected at most num_experts = 2, got 3."),
        ({"model_type": "qwen3_next", "num_experts": 2, "mlp_only_layers": "all"}, "mlp_only_layers`: expected a list"),
    ],
)  # fmt: skip
def test_a_broken_configuration_is_named_by_field(checkpoint: pathlib.Path, fields: Any, message: str) -> None:
    edit(checkpoint, **fields)
    assert f"{checkpoint}/config.json: {message}" in refused(checkpoint)


def test_a_broken_stop_token_is_named_by_its_file(checkpoint: pathlib.Path) -> None:
    edit(checkpoint, "generation_config.json", eos_token_id="end")
    assert refused(checkpoint) == (
        f"`{checkpoint}/generation_config.json: eos_token_id`: expected a token or a list of tokens, got 'end'."
    )


def test_all_problems_of_a_configuration_in_one_message(checkpoint: pathlib.Path) -> None:
    edit(checkpoint, hidden_size=0, vocab_size=-1, hidden_act="gelu")
    assert [line.split("`")[1].split(": ")[1] for line in refused(checkpoint).splitlines()] == [
        "vocab_size", "hidden_size", "hidden_act",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * (MAX_FILE_BYTES + 1)])
def test_a_configuration_that_is_no_object(checkpoint: pathlib.Path, content: bytes) -> None:
    (checkpoint / "config.json").write_bytes(content)
    assert refused(checkpoint).startswith(f"`{checkpoint}/config.json`: expected ")


def test_a_directory_that_is_not_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "nowhere"
    assert refused(path) == f"`{path}/config.json`: expected a JSON file, got No such file or directory."


def test_experts_are_read_in_both_forms(tmp_path: pathlib.Path) -> None:
    """Three tensors per expert, or two per layer with all of them."""
    more: dict[str, Any] = {"model_type": "qwen3_next", "num_experts": 3, "num_experts_per_tok": 2}
    more |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}
    write_tiny_checkpoint(tmp_path, **SMALL, **more)
    config, apart = load_model(tmp_path)

    def fuse(tensors: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{name}.{one}.{part}_proj.weight") for one in range(3)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{name}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{name}.down_proj"] = parts["down"]

    rewrite(tmp_path, fuse)
    _, fused = load_model(tmp_path)
    assert len(tensor_shapes(config)) == len(tensor_shapes(config, fused_experts=True)) + 7
    for got, expected in zip(jax.tree.leaves(fused), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
