"""transformers' own Qwen3.5 and Qwen3-Next, tiny and with every parameter perturbed, saved and read by our loader.

The oracle runs on the CPU in float32. It refuses to decode these models speculatively; here the tokens of speculative
decoding are compared with its greedy ones, and its record of past convolution inputs with the shared verify buffer.
"""

import functools
import inspect
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.model import hybrid
from jax_impl.model.config import load_config
from jax_impl.model.decode import Engine
from jax_impl.model.weights import load_model, tensor_shapes
from tests import adapters

# float32 sums of up to 96 terms in 4 layers, in two orders: a few hundred roundings of 2^-24 of the largest logit.
RELATIVE = 2e-5
WIDTH, TOKENS, VOCAB = 4, 4, 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": WIDTH,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
# name → module, class prefix, more fields, how it is saved
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5", "Qwen3_5", {}, {}),
    "Qwen3.5 tied": ("qwen3_5", "Qwen3_5", {"tie_word_embeddings": True}, {}),
    "Qwen3.5 MoE": ("qwen3_5_moe", "Qwen3_5Moe", EXPERTS, {}),
    "Qwen3-Next": ("qwen3_next", "Qwen3Next", {**EXPERTS, "mlp_only_layers": [1]}, {"max_shard_size": "60KB"}),
}
every_model = pytest.mark.parametrize("name", MODELS)
DECODED = ["Qwen3.5", "Qwen3-Next"]
implementations = pytest.mark.parametrize("implementation", ["xla", pytest.param("pallas", marks=pytest.mark.gpu)])


@functools.cache
def oracle(name: str) -> tuple[Any, Any, Any]:
    """(transformers' model, our config, our parameters), both float32."""
    for module in ("torch", "transformers", "safetensors"):
        if not adapters.is_installed(module):
            pytest.skip(f"{module} is not installed")
    import importlib

    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    module, prefix, more, saving = MODELS[name]
    module = importlib.import_module(f"transformers.models.{module}")
    config_class = getattr(module, f"{prefix}Config" if prefix == "Qwen3Next" else f"{prefix}TextConfig")
    model = getattr(module, f"{prefix}ForCausalLM")(config_class(**SIZES, **more)).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for which, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if which.endswith("A_log"):  # decays that remember more than a few tokens
                parameter.copy_(noise * 0.5)
            elif parameter.ndim == 1:
                parameter.add_(noise * 0.2)
            else:
                inputs = 4 if "conv1d" in which or "embed" in which else parameter.shape[-1]
                parameter.copy_(noise * 0.6 / inputs**0.5)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, **saving)
        assert len(list(pathlib.Path(directory).glob("*.safetensors"))) > 1 or not saving
        return model, *load_model(directory)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def theirs(model: Any, ids: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
    """Logits `[T, vocab]` of tokens that follow a cache, and the cache."""
    import torch

    # renamed in transformers 5.18 or later
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        out = model(torch.tensor(ids, dtype=torch.long)[None], use_cache=True, **{name: cache})
    return out.logits[0].numpy(), getattr(out, name)


def assert_close(got: Any, expected: np.ndarray, what: str) -> None:
    worst = np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()
    assert worst <= RELATIVE, f"{what}: {worst:.2e}"


@implementations
@every_model
def test_logits_of_prompts_and_of_steps(name: str, implementation: Any) -> None:
    """Two prompts of different lengths, then a block of D tokens on each against their steps of one token."""
    if implementation == "pallas":
        adapters.path("jax-pallas-gpu")
    model, config, parameters = oracle(name)
    cache = hybrid.allocate_model_cache(
        config, "float32", num_slots=5, max_requests=2, max_len=48, num_draft_tokens=TOKENS
    )
    lengths, slots = np.asarray([19, 7], np.int32), jnp.asarray([3, 1], jnp.int32)
    sequences = [tokens(length + TOKENS, seed) for seed, length in enumerate(lengths)]
    padded = np.stack([np.pad(ids[:length], (0, 32 - length)) for ids, length in zip(sequences, lengths, strict=True)])
    prefill, verify = (
        jax.jit(functools.partial(function, implementation=implementation), static_argnums=1)
        for function in (hybrid.prefill, block)
    )
    hidden, cache = prefill(parameters, config, cache, jnp.asarray(padded), jnp.asarray(lengths), slots)
    logits = hybrid.logits_of(parameters, hidden)
    blocks = jnp.asarray(np.stack([ids[-TOKENS:] for ids in sequences]))
    at_once = verify(parameters, config, cache, blocks, jnp.asarray([TOKENS, TOKENS]), jnp.asarray(lengths), slots)
    for row, (ids, length) in enumerate(zip(sequences, lengths, strict=True)):
        expected, past = theirs(model, ids[:length])
        assert_close(logits[row, :length], expected, f"prompt {row}")
        for token in range(TOKENS):
            expected, past = theirs(model, ids[length + token :][:1], past)
            assert_close(at_once[row, token], expected[0], f"token {token} behind prompt {row}")


def block(*arguments: Any, implementation: Any) -> jax.Array:
    hidden, _, _ = hybrid.verify(*arguments, implementation=implementation)
    return hybrid.logits_of(arguments[0], hidden)


@functools.cache
def their_greedy(name: str) -> list[list[int]]:
    """64 tokens behind three prompts, by transformers' own `generate`."""
    import torch

    generated = []
    for seed, length in enumerate((1, 6, 21)):
        prompt = torch.tensor(tokens(length, seed), dtype=torch.long)[None]
        out = oracle(name)[0].generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False
        )
        generated.append(out[0, length:].tolist())
    return generated


@implementations
@pytest.mark.parametrize("name", DECODED)
def test_sixty_four_tokens_decoded_speculatively_equal_their_greedy_ones(name: str, implementation: Any) -> None:
    if implementation == "pallas":
        adapters.path("jax-pallas-gpu")
    _, config, parameters = oracle(name)
    engine = Engine(config, parameters, max_requests=3, max_len=96, implementation=implementation)
    assert engine.generate([tokens(length, seed).tolist() for seed, length in enumerate((1, 6, 21))], 64) == (
        their_greedy(name)
    )
    assert engine.statistics.mean_accepted_length > 1


@pytest.mark.parametrize("name", DECODED)
def test_their_record_of_past_inputs_is_the_shared_buffer(name: str) -> None:
    """The last D + K - 2 columns that they record over D tokens, in every linear layer."""
    model, config, parameters = oracle(name)
    cache = hybrid.allocate_model_cache(
        config, "float32", num_slots=2, max_requests=1, max_len=32, num_draft_tokens=TOKENS
    )
    ids, slots = tokens(9 + TOKENS), jnp.asarray([1], jnp.int32)
    length = jnp.asarray([9], jnp.int32)
    prefill, verify = (jax.jit(function, static_argnums=1) for function in (hybrid.prefill, hybrid.verify))
    _, cache = prefill(parameters, config, cache, jnp.asarray(ids[None, :9]), length, slots)
    valid = jnp.asarray([TOKENS], jnp.int32)
    _, cache, _ = verify(parameters, config, cache, jnp.asarray(ids[None, 9:]), valid, length, slots)
    shared = np.asarray(cache.hybrid.conv.conv_windows)[:, 0]

    _, past = theirs(model, ids[:9])
    linear = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    for layer in linear:
        past.layers[layer].activate_past_recording()
    _, past = theirs(model, ids[9:], past)
    assert shared.shape == (len(linear), TOKENS + WIDTH - 2, config.conv_dim)
    for index, layer in enumerate(linear):
        recorded = past.layers[layer].conv_states[0][0].numpy().T
        assert_close(shared[index], recorded[-(TOKENS + WIDTH - 2) :], f"layer {layer}")


@every_model
def test_every_parameter_of_theirs_is_read(name: str) -> None:
    """By name and shape: nothing of their state is left over, and nothing is asked for that they do not have."""
    model, config, _ = oracle(name)
    fused = config.moe is not None  # as they hold experts, not as they save them
    have = {which: tuple(value.shape) for which, value in model.state_dict().items()}
    if config.tied:
        del have["lm_head.weight"]
    assert tensor_shapes(config, fused_experts=fused) == have


def test_a_nested_text_model_is_the_same_model(tmp_path: pathlib.Path) -> None:
    """Multimodal checkpoints nest the text model: `text_config`, and names behind `model.language_model.`."""
    import json

    from safetensors.numpy import save_file

    model, config, parameters = oracle("Qwen3.5 MoE")
    raw = json.loads(model.config.to_json_string(use_diff=False))
    text = {field: value for field, value in raw.items() if field != "model_type"} | {"model_type": "qwen3_5_moe_text"}
    nested = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    state = {which: value.numpy() for which, value in model.state_dict().items()}
    renamed = {which.replace("model.", "model.language_model.", 1): value for which, value in state.items()}
    save_file(
        {**renamed, "model.visual.patch_embed.proj.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors"
    )
    assert load_config(tmp_path).layer_types == config.layer_types
    _, same = load_model(tmp_path, "float32")
    for got, expected in zip(jax.tree.leaves(same), jax.tree.leaves(parameters), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
