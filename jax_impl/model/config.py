"""Geometry of a hybrid model, read from a checkpoint's `config.json`. Imports no array framework.

Qwen3.5 (`qwen3_5_text`, or `qwen3_5` with the text model nested under `text_config`), its MoE form, and Qwen3-Next.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any, Literal

from jax_impl.layout import Problems

LayerType = Literal["linear_attention", "full_attention"]

# model_type → whether the linear layers' projections are grouped per key head, and whether layers may be MoE
ARCHITECTURES = {
    "qwen3_5": (False, False),
    "qwen3_5_text": (False, False),
    "qwen3_5_moe": (False, True),
    "qwen3_5_moe_text": (False, True),
    "qwen3_next": (True, True),
}
NESTED = ("qwen3_5", "qwen3_5_moe")  # multimodal files: the text model is under `text_config`
OUTER = ("eos_token_id", "quantization_config", "tie_word_embeddings")  # beside it, where it does not have them
DEFAULT_FULL_ATTENTION_INTERVAL = 4
MAX_FILE_BYTES = 16 * 2**20  # of a JSON file, far above any real one
MAX_SIZE = 2**24  # of any one dimension, so that a broken file cannot ask for an absurd shape
MAX_LAYERS = 4096


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Sizes of a mixture-of-experts block: `experts_per_token` of `num_experts`, and one shared expert."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalize: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a hybrid model: frozen and hashable, so it can be a static argument of `jit`.

    Attributes:
      model_type: the checkpoint's own name of its architecture.
      layer_types: "linear_attention" or "full_attention" of each layer.
      moe_layers: layers whose MLP is a mixture of experts; `moe` holds its sizes, None without any.
      rotary_dim: leading channels of a head that are rotated.
      linear_key_heads, linear_value_heads, linear_key_dim, linear_value_dim: heads of a linear layer and their sizes.
      width: kernel width K of the convolution.
      grouped: the checkpoint stores the linear layers' projections per key head, as Qwen3-Next does.
      tied: the output projection is the embedding.
      dtype: the checkpoint's own dtype, or None when it does not say.
      stop_token_ids: tokens that end a sequence.
      tensor_axis: for one rank's share of a model, the mesh axis over which the ranks' outputs are summed.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    width: int
    max_positions: int
    grouped: bool = False
    tied: bool = False
    moe: MoeConfig | None = None
    moe_layers: tuple[int, ...] = ()
    dtype: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    tensor_axis: str | None = None

    @property
    def num_layers(self) -> int:
        """Layers of both kinds."""
        return len(self.layer_types)

    @property
    def num_linear_layers(self) -> int:
        """Layers with a convolution and a recurrent state."""
        return self.layer_types.count("linear_attention")

    @property
    def num_full_layers(self) -> int:
        """Layers with keys and values."""
        return self.layer_types.count("full_attention")

    @property
    def key_size(self) -> int:
        """Channels of all key heads of a linear layer."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads of a linear layer."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, q | k | v."""
        return 2 * self.key_size + self.value_size


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """Reads `config.json`, and the stop tokens of `generation_config.json` where there is one.

    Raises:
      ValueError: the file cannot be read, is of another architecture, or has sizes that do not fit together; the
        message names the file and every field.
    """
    path = pathlib.Path(directory) / "config.json"
    raw = read_json(path)
    generation = path.with_name("generation_config.json")
    stop = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw, str(path), stop, str(generation))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file that holds one object, of a size that a configuration may have.

    Raises:
      ValueError: it cannot be read or holds something else; the message names the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"`{path}`: expected a JSON file, got {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"`{path}`: expected at most {MAX_FILE_BYTES:,} bytes, got more.")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}`: expected JSON, got {type(error).__name__}: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"`{path}`: expected a JSON object, got {type(value).__name__}.")
    return value


def parse_config(
    raw: dict[str, Any], name: str = "config.json", stop: Any = None, stop_name: str = "generation_config.json"
) -> ModelConfig:
    """A `ModelConfig` from the content of `config.json`, which messages call `name`.

    `stop`, from the file that messages call `stop_name`, overrides its eos_token_id.
    """
    model_type = raw.get("model_type")
    text, nested = raw, isinstance(model_type, str) and model_type in NESTED
    problems = Problems()
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        problems.add(f"{name}: model_type", f"one of {', '.join(ARCHITECTURES)}", _shown(model_type))
        problems.raise_if_any()
    if nested:
        text = raw.get("text_config")
        if not isinstance(text, dict):
            problems.add(f"{name}: text_config", "an object", _shown(text), f"{model_type} nests its text model there.")
            problems.raise_if_any()
    assert isinstance(model_type, str) and isinstance(text, dict)
    grouped, may_be_moe = ARCHITECTURES[model_type]
    outer = {field: raw[field] for field in OUTER if text.get(field) is None and raw.get(field) is not None}
    fields = _Fields(text | outer, name, problems)
    layer_types = _layer_types(fields)
    theta, fraction = _rope(fields)
    head_dim = fields.size("head_dim")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2:
        problems.add(f"{name}: partial_rotary_factor", "an even number of rotated channels", rotary_dim)
    moe, moe_layers = _moe(fields, len(layer_types), model_type == "qwen3_next") if may_be_moe else (None, ())
    config = ModelConfig(
        model_type=model_type,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size") if len(moe_layers) < len(layer_types) else 1,
        layer_types=layer_types,
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        linear_key_heads=fields.size("linear_num_key_heads"),
        linear_value_heads=fields.size("linear_num_value_heads"),
        linear_key_dim=fields.size("linear_key_head_dim"),
        linear_value_dim=fields.size("linear_value_head_dim"),
        width=fields.size("linear_conv_kernel_dim"),
        max_positions=fields.size("max_position_embeddings", high=2**31 - 1),
        grouped=grouped,
        tied=fields.flag("tie_word_embeddings", False),
        moe=moe,
        moe_layers=moe_layers,
        dtype=text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype"),
        stop_token_ids=_stop_tokens(fields, fields.values.get("eos_token_id"))
        if stop is None
        else _stop_tokens(dataclasses.replace(fields, file=stop_name), stop),
    )
    _check_together(config, fields)
    problems.raise_if_any()
    return config


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Reads the fields of one file; what does not fit is recorded and replaced by something harmless."""

    values: dict[str, Any]
    file: str
    problems: Problems

    def add(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.problems.add(f"{self.file}: {field}", expected, got, hint)

    def size(self, field: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.values.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.add(field, f"an integer from {low} to {high}", _shown(value))
            return max(low, 2)
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            self.add(field, "a positive number", _shown(value))
            return default
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            self.add(field, "true or false", _shown(value))
            return default
        return value


def _shown(value: object) -> str:
    """A value of a file in a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    num_layers = fields.size("num_hidden_layers", high=MAX_LAYERS)
    given = fields.values.get("layer_types")
    if given is None:
        interval = fields.size("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
        return tuple(
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)
        )
    kinds = ("linear_attention", "full_attention")
    if not isinstance(given, list) or len(given) != num_layers or any(kind not in kinds for kind in given):
        fields.add("layer_types", f"{num_layers} times {' or '.join(kinds)}", _shown(given))
        return ("linear_attention",) * num_layers
    return tuple(given)


def _rope(fields: _Fields) -> tuple[float, float]:
    """Base and rotated share of the rotary embedding, from its object or the older top-level fields.

    Of two objects `rope_scaling` counts, as in transformers. A multimodal rotary embedding gives every axis the same
    position in text, so its sections do not matter here.
    """
    field = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = fields.values.get(field) or {}
    if not isinstance(given, dict):
        fields.add(field, "an object", _shown(given))
        given = {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "mrope"):
        fields.add(field, 'rope_type "default"', _shown(kind), "Scaled positions are not implemented.")
    inner = _Fields({**fields.values, **given}, fields.file, fields.problems)
    fraction = inner.number("partial_rotary_factor", 0.25)
    if fraction > 1:
        fields.add("partial_rotary_factor", "at most 1", fraction)
        fraction = 1.0
    return inner.number("rope_theta", 10_000.0), fraction


def _moe(fields: _Fields, num_layers: int, optional: bool) -> tuple[MoeConfig | None, tuple[int, ...]]:
    """Sizes of the experts and the layers that have them.

    Where experts are not `optional`, as in Qwen3.5, every layer has them and their weights are normalised, whatever the
    fields say that choose it in Qwen3-Next.
    """
    if optional and fields.size("num_experts", low=0) == 0:
        return None, ()
    dense = (fields.values.get("mlp_only_layers") or []) if optional else []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        fields.add("mlp_only_layers", "a list of layer numbers", _shown(dense))
        dense = []
    step = fields.size("decoder_sparse_step", 1) if optional else 1
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    moe = MoeConfig(
        num_experts=fields.size("num_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        shared_intermediate_size=fields.size("shared_expert_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", True) if optional else True,
    )
    if moe.experts_per_token > moe.num_experts:
        fields.add("num_experts_per_tok", f"at most num_experts = {moe.num_experts}", moe.experts_per_token)
    return (moe, layers) if layers else (None, ())


def _stop_tokens(fields: _Fields, given: Any) -> tuple[int, ...]:
    tokens = [] if given is None else given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MAX_SIZE for token in tokens):
        fields.add("eos_token_id", "a token or a list of tokens", _shown(given))
        return ()
    return tuple(sorted(set(tokens)))


def _check_together(config: ModelConfig, fields: _Fields) -> None:
    """What is only wrong in combination, and options of the architecture that are not implemented."""
    if config.num_linear_layers == 0:
        fields.add("layer_types", "at least one linear_attention layer", "none", "Without one nothing is rolled back.")
    if config.width < 2:
        fields.add("linear_conv_kernel_dim", "at least 2", config.width)
    if config.num_heads % config.num_kv_heads:
        fields.add("num_key_value_heads", f"a divisor of num_attention_heads = {config.num_heads}", config.num_kv_heads)
    if config.linear_value_heads % config.linear_key_heads:
        expected = f"a divisor of linear_num_value_heads = {config.linear_value_heads}"
        fields.add("linear_num_key_heads", expected, config.linear_key_heads)
    only = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "quantization_config": None}
    for field, value in only.items():
        got = fields.values.get(field, value)
        if got != value:
            fields.add(field, _shown(value), _shown(got), "Nothing else is implemented.")
    if config.dtype is not None and not isinstance(config.dtype, str):
        fields.add("dtype", "a name", _shown(config.dtype))
