"""Convolution geometry of published hybrid models, and its division over tensor-parallel ranks.

The channels of one convolution are a row of parts that are divided separately: a rank of a Gated DeltaNet layer holds
`[q_r | k_r | v_r]`, its own share of every part, and not a plain slice of `[q | k | v]`. A preset therefore keeps the
parts, not only their sum:

    GDN     q and k: Hk heads of dk channels · v: Hv heads of dv channels        conv_dim = 2 * Hk * dk + Hv * dv
    KDA     q, k and v: H heads of d channels                                    conv_dim = 3 * H * d
    Mamba2  x: d_inner channels · B and C: G groups of N channels                conv_dim = d_inner + 2 * G * N
    Mamba1, LFM, RG-LRU: one part

OLMo-Hybrid and KDA checkpoints hold one convolution for each of q, k and v; engines pack the three states into one.
A part whose head count is not recorded is divided by channels. Every preset says what it was read from: grade A is a
class default of transformers or an official configuration, grade B transcriptions that agree, to be checked before use.

This module imports no array framework.
"""

import dataclasses
import difflib
import functools
from typing import Any, Literal

from jax_impl.layout import AxisOrder, ConvCacheSpec, Storage, as_integer, shown

Kind = Literal["GDN", "KDA", "Mamba2", "Mamba1", "LFM", "RG-LRU"]
Grade = Literal["A", "B"]

_CLASS_DEFAULT = "the class default of transformers 5.24"
_OFFICIAL = "the official configuration file"
_TRANSCRIBED = "transcriptions of the configuration that agree"
_TRANSCRIBED_INNER = f"{_TRANSCRIBED}; G is stated, d_inner is twice the hidden size and N is what then remains"


def _check_ranks(name: str, ranks: Any) -> None:
    number = as_integer(ranks)
    if number is None or number < 1:
        raise ValueError(f"`{name}`: expected an integer of at least 1, got {shown(ranks)}.")


@dataclasses.dataclass(frozen=True)
class ConvPart:
    """One run of channels that tensor parallelism divides on its own.

    Args:
      name: the part's usual letter or word.
      channels: channels at TP 1.
      num_heads: heads (or groups) that stay whole on a rank; None when not recorded.
      repeats: whether ranks may share one group by holding copies of it (Mamba2's B and C).
    """

    name: str
    channels: int
    num_heads: int | None = None
    repeats: bool = False

    def channels_per_rank(self, tp: int) -> int:
        """Channels of this part on one of `tp` ranks.

        Raises:
          ValueError: `tp` is not a positive integer, or the heads (without known heads the channels) do not divide.
        """
        _check_ranks("tp", tp)
        if self.num_heads is None:
            unit, count, whole = "channels", self.channels, self.channels
        else:
            unit, count, whole = "groups" if self.repeats else "heads", self.num_heads, self.channels
            if self.repeats and count % tp and tp > count:
                # tp - G groups are added first, so that every rank holds one group
                whole, count = self.channels // count * tp, tp
        if count % tp:
            raise ValueError(
                f"`tp`: expected a divisor of part {self.name} = {count} {unit}, got {tp}. "
                f"Every part is divided over the ranks separately; {unit} are not split."
            )
        return whole // tp


@dataclasses.dataclass(frozen=True)
class Preset:
    """Convolution geometry of one published model.

    Args:
      name: the published name.
      kind: family of the recurrent layer: GDN, KDA, Mamba2, Mamba1, LFM or RG-LRU.
      model_type: the `model_type` of its configuration.
      num_layers: all layers of the model.
      num_conv_layers: layers with this convolution.
      parts: the parts of the channels, in the order in which a rank holds them.
      width: kernel width K.
      bias: whether the convolution has a bias.
      activation: "silu" or None.
      grade: "A" or "B", see the module.
      source: what the numbers were read from.
      aliases: other released names with the same geometry.

    Example:
      >>> preset = get_preset("qwen3.5-0.8b")
      >>> preset.conv_dim, preset.conv_dim_per_rank(2)
      (6144, 3072)
    """

    name: str
    kind: Kind
    model_type: str
    num_layers: int
    num_conv_layers: int
    parts: tuple[ConvPart, ...]
    width: int
    bias: bool
    activation: Literal["silu"] | None
    grade: Grade
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def conv_dim(self) -> int:
        """Channels of one layer's convolution at TP 1."""
        return sum(part.channels for part in self.parts)

    def conv_dim_per_rank(self, tp: int) -> int:
        """Channels of one layer's convolution on one of `tp` ranks.

        Each part is divided on its own. Mamba2's groups are repeated first when there are fewer than ranks:
        `tp - G` groups are added, so a rank's channels are then more than `conv_dim / tp`.

        Raises:
          ValueError: `tp` is not a positive integer, or a part does not divide.

        Example:
          >>> get_preset("Bamba-9B").conv_dim, get_preset("Bamba-9B").conv_dim_per_rank(2)
          (8448, 4352)
        """
        _check_ranks("tp", tp)
        try:
            return sum(part.channels_per_rank(tp) for part in self.parts)
        except ValueError as error:
            raise ValueError(f"{error} Model: {self.name}.") from None

    def spec(
        self,
        *,
        num_slots: int,
        max_requests: int,
        num_draft_tokens: int,
        tp: int = 1,
        dtype: Any = "bfloat16",
        axis_order: AxisOrder = "time_major",
        storage: Storage = "sliding",
        state_len: int | None = None,
    ) -> ConvCacheSpec:
        """The geometry of this model's cache on one of `tp` ranks.

        Args:
          num_slots: slots C of the pool.
          max_requests: rows R of the verify buffer.
          num_draft_tokens: tokens D verified per step.
          tp: tensor-parallel ranks.
          dtype: dtype of pool and buffer.
          axis_order: "time_major" or "channel_major".
          storage: "sliding" or "dense".
          state_len: columns per slot, K-1 (the default) or K.

        Raises:
          ValueError: `tp` does not divide a part, or a number is out of range.

        Example:
          >>> get_preset("Qwen3.5-0.8B").spec(num_slots=512, max_requests=17, num_draft_tokens=4).windows_bytes
          22560768
        """
        geometry = functools.partial(
            ConvCacheSpec,
            num_layers=self.num_conv_layers,
            num_slots=num_slots,
            max_requests=max_requests,
            width=self.width,
            num_draft_tokens=num_draft_tokens,
            dtype=dtype,
            axis_order=axis_order,
            storage=storage,
            state_len=state_len,
        )
        try:
            conv_dim = self.conv_dim_per_rank(tp)
        except ValueError as error:
            try:
                geometry(conv_dim=1)
            except ValueError as others:  # what is wrong with either is said together
                raise ValueError(f"{error}\n{others}") from None
            raise
        return geometry(conv_dim=conv_dim)


def _qkv(
    key_heads: int | None, value_heads: int | None, key_channels: int, value_channels: int
) -> tuple[ConvPart, ConvPart, ConvPart]:
    return (
        ConvPart("q", key_channels, key_heads),
        ConvPart("k", key_channels, key_heads),
        ConvPart("v", value_channels, value_heads),
    )


def _gdn(
    name: str,
    model_type: str,
    layers: int,
    conv_layers: int,
    value_heads: int,
    grade: Grade,
    source: str,
    aliases: tuple[str, ...] = (),
) -> Preset:
    """A model of the Qwen family: 16 key heads, 128 channels per head, one fused convolution without bias."""
    parts = _qkv(16, value_heads, 16 * 128, value_heads * 128)
    return Preset(name, "GDN", model_type, layers, conv_layers, parts, 4, False, "silu", grade, source, aliases)


def _kda(
    name: str, model_type: str, layers: int, conv_layers: int, channels: int, heads: int | None, source: str
) -> Preset:
    """A Kimi Delta Attention model: q, k and v of equal size, no bias, SiLU."""
    parts = _qkv(heads, heads, channels, channels)
    return Preset(name, "KDA", model_type, layers, conv_layers, parts, 4, False, "silu", "A", source)


def _mamba2(
    name: str,
    model_type: str,
    layers: int,
    conv_layers: int,
    d_inner: int,
    heads: int | None,
    groups: int,
    state_size: int,
    grade: Grade,
    source: str,
) -> Preset:
    """A Mamba2 model: x of d_inner channels, B and C of `groups` groups each, with bias and SiLU."""
    b_and_c = [ConvPart(part, groups * state_size, groups, repeats=True) for part in ("B", "C")]
    parts = (ConvPart("x", d_inner, heads), *b_and_c)
    return Preset(name, "Mamba2", model_type, layers, conv_layers, parts, 4, True, "silu", grade, source)


def _mamba1(name: str, model_type: str, layers: int, conv_layers: int, grade: Grade, source: str) -> Preset:
    parts = (ConvPart("x", 8192),)
    return Preset(name, "Mamba1", model_type, layers, conv_layers, parts, 4, True, "silu", grade, source)


def _lfm(name: str, model_type: str, layers: int, conv_layers: int, width: int, grade: Grade, source: str) -> Preset:
    parts = (ConvPart("hidden", 2048),)
    return Preset(name, "LFM", model_type, layers, conv_layers, parts, width, False, None, grade, source)


PRESETS: tuple[Preset, ...] = (
    _gdn("Qwen3-Next-80B-A3B", "qwen3_next", 48, 36, 32, "A", _CLASS_DEFAULT),
    _gdn("Qwen3.5-0.8B", "qwen3_5_text", 24, 18, 16, "A", _OFFICIAL),
    _gdn("Qwen3.5-4B", "qwen3_5_text", 32, 24, 32, "B", _TRANSCRIBED),
    _gdn("Qwen3.5-9B", "qwen3_5_text", 32, 24, 32, "A", _CLASS_DEFAULT),
    _gdn("Qwen3.5-27B", "qwen3_5_text", 64, 48, 48, "B", _TRANSCRIBED, ("Qwen3.6-27B", "Qwen3.8-27B")),
    _gdn("Qwen3.5-35B-A3B", "qwen3_5_moe_text", 40, 30, 32, "A", _CLASS_DEFAULT, ("Qwen3.6-35B-A3B",)),
    _gdn("Qwen3.5-122B-A10B", "qwen3_5_moe_text", 48, 36, 64, "B", _TRANSCRIBED),
    _gdn("Qwen3.5-397B-A17B", "qwen3_5_moe_text", 60, 45, 64, "A", _OFFICIAL),
    Preset(
        "OLMo-Hybrid-7B", "GDN", "olmo_hybrid", 32, 24, _qkv(30, 30, 2880, 5760), 4, False, "silu", "A", _CLASS_DEFAULT
    ),
    _kda("Kimi-Linear-48B-A3B", "kimi_linear", 27, 20, 4096, 32, _CLASS_DEFAULT),
    _kda("Kimi-K3", "kimi_k3", 93, 69, 12288, None, f"{_OFFICIAL}; the head count was not recorded"),
    _kda("GLM-5.3-Flash", "glm5_next", 45, 34, 8192, 64, _CLASS_DEFAULT),
    _kda("Ling-3.0-Flash", "bailing_hybrid", 42, 35, 4096, 32, _CLASS_DEFAULT),
    _mamba2("Nemotron-H-8B", "nemotron_h", 52, 24, 8192, 128, 8, 128, "B", _TRANSCRIBED),
    _mamba2("Nemotron-Nano-9B-v2", "nemotron_h", 56, 27, 10240, 128, 8, 128, "B", _TRANSCRIBED),
    _mamba2("Nemotron-3-Nano-30B-A3B", "nemotron_h", 52, 23, 4096, 64, 8, 128, "B", _TRANSCRIBED),
    _mamba2("Nemotron-3-Super-120B-A12B", "nemotron_h", 88, 40, 8192, 128, 8, 128, "B", _TRANSCRIBED),
    _mamba2("Falcon-H1-1.5B", "falcon_h1", 24, 24, 3072, 48, 1, 256, "B", _TRANSCRIBED),
    _mamba2("Falcon-H1-3B", "falcon_h1", 32, 32, 4096, 32, 1, 256, "B", _TRANSCRIBED),
    _mamba2("Falcon-H1-7B", "falcon_h1", 44, 44, 3072, 24, 1, 256, "B", _TRANSCRIBED),
    _mamba2("Granite-4.0-H-Tiny", "granitemoehybrid", 40, 36, 3072, None, 1, 128, "B", _TRANSCRIBED_INNER),
    _mamba2("Granite-4.0-H-Small", "granitemoehybrid", 40, 36, 8192, None, 1, 128, "B", _TRANSCRIBED_INNER),
    _mamba2("Bamba-9B", "bamba", 32, 29, 8192, None, 1, 128, "B", _TRANSCRIBED_INNER),
    _mamba2("Zamba2-2.7B", "zamba2", 54, 54, 5120, None, 1, 64, "A", _CLASS_DEFAULT),
    _mamba2("mamba2-2.7b", "mamba2", 64, 64, 5120, None, 1, 128, "B", _TRANSCRIBED_INNER),
    _mamba1("Jamba-v0.1", "jamba", 32, 28, "A", _CLASS_DEFAULT),
    _mamba1("Falcon-Mamba-7B", "falcon_mamba", 64, 64, "B", _TRANSCRIBED),
    _lfm("LFM2-1.2B", "lfm2", 16, 10, 3, "B", _TRANSCRIBED),
    _lfm("LFM2-2.6B", "lfm2", 30, 22, 3, "B", _TRANSCRIBED),
    _lfm("LFM2-8B-A1B", "lfm2_moe", 24, 18, 3, "B", _TRANSCRIBED),
    _lfm("LFM3-1.7B", "lfm3", 24, 13, 7, "A", _CLASS_DEFAULT),
    Preset(
        "RecurrentGemma-2B",
        "RG-LRU",
        "recurrent_gemma",
        26,
        18,
        (ConvPart("x", 2560),),
        4,
        True,
        None,
        "A",
        _CLASS_DEFAULT,
    ),
)


def get_preset(name: str) -> Preset:
    """The preset of a published model, by name or alias; upper and lower case and an owner before "/" are ignored.

    Raises:
      ValueError: no such model; the message lists names that are close.

    Example:
      >>> get_preset("Qwen/Qwen3.6-27B").name
      'Qwen3.5-27B'
    """
    by_name = {known.lower(): (known, preset) for preset in PRESETS for known in (preset.name, *preset.aliases)}
    wanted = name.rsplit("/", 1)[-1].lower() if isinstance(name, str) else ""
    if wanted in by_name:
        return by_name[wanted][1]
    close = [by_name[key][0] for key in difflib.get_close_matches(wanted, by_name, n=4)]
    hint = (
        f"Close names: {', '.join(close)}." if close else "No name is close; `python -m jax_impl plan` lists them all."
    )
    raise ValueError(f"`name`: expected a published model, got {shown(name)}. {hint}")
