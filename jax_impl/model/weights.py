"""Parameters of a hybrid model: what they are, and how they are read from and written to safetensors files.

`assemble` states every tensor of a checkpoint once, by name and shape. It builds the parameters from whatever gives it
tensors: the files of a checkpoint, a random generator on the device, or a recorder of names and shapes.

Projections that read the same input are one matrix here, so that a layer has few products: of a linear layer the rows
of q | k | v | z | b | a, of an attention layer q and its gate | k | v, of an MLP gate | up. Qwen3-Next's files group
the rows of a linear layer by key head; they are put in that order once, here. Norms and decays stay float32, matrices
have the dtype that the model computes in.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.conv import ConvWeight, prepare_conv_weight
from jax_impl.model.config import ModelConfig, MoeConfig, load_config, read_json

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
FILE_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of the dtypes that files may have
SHOWN_PROBLEMS = 4
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit


class LinearAttention(NamedTuple):
    """A Gated DeltaNet layer; its convolution is in `Parameters.conv`.

    in_proj `[conv_dim + value_size + 2 * value heads, hidden]`, rows q | k | v | z | b | a · a_log, dt_bias
    `[value heads]` · norm `[value_dim]` · out_proj `[hidden, value_size]`.
    """

    in_proj: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out_proj: jax.Array


class FullAttention(NamedTuple):
    """A gated attention layer.

    qkv_proj `[(2 * heads + 2 * kv_heads) * head_dim, hidden]`: per head q | gate, then k, then v · q_norm, k_norm
    `[head_dim]` · out_proj `[hidden, heads * head_dim]`.
    """

    qkv_proj: jax.Array
    q_norm: jax.Array
    k_norm: jax.Array
    out_proj: jax.Array


class DenseMlp(NamedTuple):
    """SwiGLU: gate_up `[2 * intermediate, hidden]`, rows gate | up · down `[hidden, intermediate]`."""

    gate_up: jax.Array
    down: jax.Array


class MoeMlp(NamedTuple):
    """Experts: router `[E, hidden]` · gate_up `[E, 2 * I, hidden]` · down `[E, hidden, I]`; and one for every token.

    shared_gate `[1, hidden]` scales the shared expert.
    """

    router: jax.Array
    gate_up: jax.Array
    down: jax.Array
    shared: DenseMlp
    shared_gate: jax.Array


class Layer(NamedTuple):
    """Norm, mixer, norm, MLP; the norms are `[hidden]`, centred at zero."""

    input_norm: jax.Array
    mixer: LinearAttention | FullAttention
    post_norm: jax.Array
    mlp: DenseMlp | MoeMlp


class Parameters(NamedTuple):
    """All parameters. embedding and lm_head `[vocab, hidden]` are one array when tied; conv is stacked by layer."""

    embedding: jax.Array
    layers: tuple[Layer, ...]
    conv: ConvWeight
    norm: jax.Array
    lm_head: jax.Array


Tensor = Callable[[str, tuple[int, ...], Any], jax.Array]  # name, shape, dtype → the tensor


def assemble(config: ModelConfig, tensor: Tensor, dtype: Dtype, *, fused_experts: bool = False) -> Parameters:
    """Builds the parameters from tensors that `tensor(name, shape, dtype)` gives.

    Args:
      config: geometry.
      tensor: called once per tensor with the checkpoint's name, without the prefix of a nested text model.
      dtype: of the matrices.
      fused_experts: each layer's experts are two tensors, as newer files have them, instead of three per expert.
    """
    matrix = lambda name, *shape: tensor(name, shape, dtype)  # noqa: E731
    vector = lambda name, *shape: tensor(name, shape, "float32")  # noqa: E731
    layers, conv = [], []
    for index, kind in enumerate(config.layer_types):
        name = f"model.layers.{index}"
        if kind == "linear_attention":
            mixer = _linear_attention(config, f"{name}.linear_attn", matrix, vector)
            conv.append(matrix(f"{name}.linear_attn.conv1d.weight", config.conv_dim, 1, config.width))
        else:
            mixer = _full_attention(config, f"{name}.self_attn", matrix, vector)
        if config.moe is not None and index in config.moe_layers:
            mlp = _moe_mlp(config.moe, config.hidden_size, f"{name}.mlp", matrix, fused_experts)
        else:
            mlp = _dense_mlp(f"{name}.mlp", config.hidden_size, config.intermediate_size, matrix)
        norms = [vector(f"{name}.{norm}_layernorm.weight", config.hidden_size) for norm in ("input", "post_attention")]
        layers.append(Layer(norms[0], mixer, norms[1], mlp))
    embedding = matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    norm = vector("model.norm.weight", config.hidden_size)
    lm_head = embedding if config.tied else matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    return Parameters(embedding, tuple(layers), prepare_conv_weight(jnp.stack(conv)), norm, lm_head)


def _linear_attention(config: ModelConfig, name: str, matrix: Any, vector: Any) -> LinearAttention:
    hidden, heads = config.hidden_size, config.linear_value_heads
    if config.grouped:
        in_proj = _ungroup(
            config,
            matrix(f"{name}.in_proj_qkvz.weight", config.conv_dim + config.value_size, hidden),
            matrix(f"{name}.in_proj_ba.weight", 2 * heads, hidden),
        )
    else:
        rows = {"qkv": config.conv_dim, "z": config.value_size, "b": heads, "a": heads}
        parts = [matrix(f"{name}.in_proj_{part}.weight", count, hidden) for part, count in rows.items()]
        in_proj = jnp.concatenate(parts)
    return LinearAttention(
        in_proj=in_proj,
        a_log=vector(f"{name}.A_log", heads),
        dt_bias=vector(f"{name}.dt_bias", heads),
        norm=vector(f"{name}.norm.weight", config.linear_value_dim),
        out_proj=matrix(f"{name}.out_proj.weight", hidden, config.value_size),
    )


def _ungroup(config: ModelConfig, qkvz: jax.Array, ba: jax.Array) -> jax.Array:
    """Rows grouped by key head, [q | k | v … | z …] and [b … | a …], as q | k | v | z | b | a of all heads."""
    groups, per_group = config.linear_key_heads, config.value_size // config.linear_key_heads
    ends = [config.linear_key_dim, 2 * config.linear_key_dim, 2 * config.linear_key_dim + per_group]
    parts = jnp.split(qkvz.reshape(groups, -1, config.hidden_size), ends, axis=1)
    parts += jnp.split(ba.reshape(groups, -1, config.hidden_size), 2, axis=1)
    return jnp.concatenate([part.reshape(-1, config.hidden_size) for part in parts])


def _full_attention(config: ModelConfig, name: str, matrix: Any, vector: Any) -> FullAttention:
    rows = {"q": 2 * config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    parts = [
        matrix(f"{name}.{part}_proj.weight", count * config.head_dim, config.hidden_size)
        for part, count in rows.items()
    ]
    return FullAttention(
        qkv_proj=jnp.concatenate(parts),
        q_norm=vector(f"{name}.q_norm.weight", config.head_dim),
        k_norm=vector(f"{name}.k_norm.weight", config.head_dim),
        out_proj=matrix(f"{name}.o_proj.weight", config.hidden_size, config.num_heads * config.head_dim),
    )


def _dense_mlp(name: str, hidden: int, intermediate: int, matrix: Any) -> DenseMlp:
    parts = [matrix(f"{name}.{part}_proj.weight", intermediate, hidden) for part in ("gate", "up")]
    return DenseMlp(jnp.concatenate(parts), matrix(f"{name}.down_proj.weight", hidden, intermediate))


def _moe_mlp(moe: MoeConfig, hidden: int, name: str, matrix: Any, fused: bool) -> MoeMlp:
    inner = moe.intermediate_size
    if fused:
        gate_up = matrix(f"{name}.experts.gate_up_proj", moe.num_experts, 2 * inner, hidden)
        down = matrix(f"{name}.experts.down_proj", moe.num_experts, hidden, inner)
    else:
        experts = [_dense_mlp(f"{name}.experts.{one}", hidden, inner, matrix) for one in range(moe.num_experts)]
        gate_up, down = jnp.stack([one.gate_up for one in experts]), jnp.stack([one.down for one in experts])
    return MoeMlp(
        router=matrix(f"{name}.gate.weight", moe.num_experts, hidden),
        gate_up=gate_up,
        down=down,
        shared=_dense_mlp(f"{name}.shared_expert", hidden, moe.shared_intermediate_size, matrix),
        shared_gate=matrix(f"{name}.shared_expert_gate.weight", 1, hidden),
    )


def tensor_shapes(config: ModelConfig, *, fused_experts: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this geometry has; nothing is allocated."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        shapes[name] = shape
        return jnp.zeros(shape, dtype)

    jax.eval_shape(lambda: assemble(config, note, "bfloat16", fused_experts=fused_experts))
    return shapes


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """Where a tensor is, and what the file's header says about it."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


def load_model(directory: str | os.PathLike[str], dtype: Dtype | None = None) -> tuple[ModelConfig, Parameters]:
    """Reads a checkpoint: `config.json` and `model.safetensors`, or the shards of `model.safetensors.index.json`.

    Every header is compared with the shapes that the configuration asks for before any tensor is read, so what is
    allocated is bounded by the sizes of the files. Tensors that the text model does not have are left alone.

    Args:
      directory: the checkpoint.
      dtype: of the matrices, "float32" or "bfloat16"; None keeps the checkpoint's, which must be one of the two.

    Raises:
      ValueError: a file is missing, cut or no safetensors file, a tensor is missing or of another shape or dtype, or
        the architecture is another one; the message names the file and the tensor.
      ImportError: safetensors is not installed.
    """
    directory = pathlib.Path(directory)
    config = load_config(directory)
    chosen = dtype or config.dtype
    if chosen not in DTYPES:
        source = "dtype" if dtype else f"{directory / 'config.json'}: dtype"
        raise ValueError(f"`{source}`: expected one of {', '.join(DTYPES)}, got {chosen!r}. Choose what to compute in.")
    found = _find_tensors(directory)
    prefix = "model.language_model." if "model.language_model.embed_tokens.weight" in found else "model."
    stored = lambda name: name.replace("model.", prefix, 1) if name.startswith("model.") else name  # noqa: E731
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in found)
    if not fused:
        _check_count(directory, config, found, stored)
    wanted = {stored(name): shape for name, shape in tensor_shapes(config, fused_experts=fused).items()}
    _check_tensors(directory, found, wanted)
    with contextlib.ExitStack() as stack:
        opened: dict[pathlib.Path, Any] = {}

        def read(name: str, shape: tuple[int, ...], as_dtype: Any) -> jax.Array:
            place = found[stored(name)]
            if place.file not in opened:
                opened[place.file] = stack.enter_context(_open(place.file))
            array: np.ndarray = opened[place.file].get_tensor(stored(name))
            return jnp.asarray(array.astype(jnp.dtype(as_dtype)))

        return config, assemble(config, read, chosen, fused_experts=fused)


def _find_tensors(directory: pathlib.Path) -> dict[str, _Found]:
    """Every tensor of the checkpoint, from the headers of its files."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return dict(_header(single))
    if not index.exists():
        raise ValueError(f"`{single}`: expected this file or {index.name}, got neither.")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or any(not isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f"`{index}`: expected an object weight_map of tensor and file names, got another content.")
    found: dict[str, _Found] = {}
    for shard in sorted(set(shard_of.values())):
        if shard in ("", "..") or pathlib.PurePath(shard).name != shard:
            raise ValueError(f"`{index}`: expected names of files beside it, got {shard!r}.")
        if not os.path.exists(directory / shard):  # also of a name that no file can have
            first = next(name for name, file in shard_of.items() if file == shard)
            raise ValueError(f"`{directory / shard}`: expected the shard that holds `{first}`, got no such file.")
        found.update(item for item in _header(directory / shard) if shard_of.get(item[0]) == shard)
    absent = [name for name in shard_of if name not in found]
    if absent:
        raise ValueError(
            f"`{directory / shard_of[absent[0]]}`: expected tensor `{absent[0]}`, which {index.name} says is there, "
            "got a file without it."
        )
    return found


def _header(file: pathlib.Path) -> Iterator[tuple[str, _Found]]:
    with _open(file) as opened:
        for name in list(opened.keys()):
            entry = opened.get_slice(name)
            yield name, _Found(file, tuple(entry.get_shape()), str(entry.get_dtype()))


@contextlib.contextmanager
def _open(file: pathlib.Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(str(file), framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"`{file}`: expected a whole safetensors file, got {_why_unreadable(file, error)}.") from None
    with opened as handle:
        yield handle


def _why_unreadable(file: pathlib.Path, error: Exception) -> str:
    """What is wrong with a file that cannot be opened; for one that was cut, the first tensor that is not whole."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
        size, start = file.stat().st_size, 8 + length
        ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")
        cut = [(start + end, name) for end, name in ends if start + end > size]
        if cut:
            return f"{size:,} bytes, and tensor `{cut[0][1]}` ends at byte {cut[0][0]:,}: the file was cut"
    return str(error)


def _check_count(
    directory: pathlib.Path, config: ModelConfig, found: dict[str, _Found], stored: Callable[[str], str]
) -> None:
    """Raises for experts that cannot all be there, before as many names are listed as the configuration asks for.

    Among more names than there are tensors one is missing, and it is met after at most as many as there are.
    """
    experts = config.moe.num_experts if config.moe is not None else 0
    if 3 * experts * len(config.moe_layers) <= len(found):
        return
    names = (
        stored(f"model.layers.{layer}.mlp.experts.{one}.{part}_proj.weight")
        for layer in config.moe_layers
        for one in range(experts)
        for part in ("gate", "up", "down")
    )
    raise ValueError(_missing(directory, next(name for name in names if name not in found)))


def _missing(directory: pathlib.Path, name: str) -> str:
    """The message for a tensor that no file has."""
    file = directory / "model.safetensors"
    return f"`{file if file.exists() else f'{file}.index.json'}`: expected tensor `{name}`, got none."


def _check_tensors(directory: pathlib.Path, found: dict[str, _Found], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raises unless every wanted tensor is there with its shape and a dtype that can be read."""
    messages = []
    for name, shape in wanted.items():
        if name not in found:
            messages.append(_missing(directory, name))
            continue
        file, got, dtype = found[name]
        if got != shape:
            messages.append(f"`{file}`: expected tensor `{name}` of shape {shape}, got {got}.")
        if dtype not in FILE_DTYPES:
            messages.append(f"`{file}`: expected tensor `{name}` in {', '.join(FILE_DTYPES)}, got {dtype}.")
    if len(messages) > SHOWN_PROBLEMS:
        messages[SHOWN_PROBLEMS:] = [f"And {len(messages) - SHOWN_PROBLEMS} more like these."]
    if messages:
        raise ValueError("\n".join(messages))


# ---- random ----------------------------------------------------------------------------------------------------------


def random_tensor(name: str, shape: tuple[int, ...], normal: Callable[[tuple[int, ...]], Any]) -> Any:
    """A tensor of a random model whose activations keep their size, with no norm, decay or bias at a constant.

    `normal(shape)` gives standard normal numbers. Matrices divide by the root of their inputs; those that write to the
    residual are smaller, so that the newest token matters most and greedy decoding repeats itself now and then, as text
    does.
    """
    noise = normal(shape)
    if name.endswith("A_log"):
        return noise * 0.5
    if name.endswith(("dt_bias", "linear_attn.norm.weight")):
        return 1 + noise * 0.2
    if name.endswith("norm.weight"):
        return noise * 0.2
    if name.endswith(("embed_tokens.weight", "conv1d.weight")):
        return noise * 0.5
    scale = 0.2 if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
    return noise * (scale / math.sqrt(shape[-1]))


def random_parameters(config: ModelConfig, dtype: Dtype, seed: int = 0) -> Parameters:
    """Random parameters made on the device, without a file. Tensors of one shape share a program."""
    key, count = jax.random.key(seed), itertools.count()
    normal = jax.jit(
        lambda number, shape, dtype: jax.random.normal(jax.random.fold_in(key, number), shape, dtype),
        static_argnums=(1, 2),
    )

    def tensor(name: str, shape: tuple[int, ...], as_dtype: Any) -> jax.Array:
        return random_tensor(name, shape, lambda shape: normal(next(count), shape, as_dtype))

    return assemble(config, tensor, dtype, fused_experts=True)


def count_parameters(parameters: Parameters) -> int:
    """Numbers in all arrays, a tied output projection counted once."""
    leaves = {id(leaf): leaf.size for leaf in jax.tree.leaves(parameters)}
    return sum(leaves.values())


def write_checkpoint(
    directory: pathlib.Path, raw_config: dict[str, Any], config: ModelConfig, *, seed: int = 0
) -> None:
    """Writes a random checkpoint in the format of a real one, float32. Needs safetensors, and no torch."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    normal = lambda shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    tensors = {
        name: np.asarray(random_tensor(name, shape, normal), np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw_config, indent=1) + "\n")
