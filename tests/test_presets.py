"""Presets: the published table row by row, the division over ranks, the look-up, and what importing them loads."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jax_impl.presets import PRESETS, ConvPart, get_preset

ROOT = Path(__file__).parents[1]

# model, kind, model_type, layers, layers with the convolution, conv_dim at TP 1, K, grade
PUBLISHED = """
Qwen3-Next-80B-A3B          GDN     qwen3_next        48 36  8192 4 A
Qwen3.5-0.8B                GDN     qwen3_5_text      24 18  6144 4 A
Qwen3.5-4B                  GDN     qwen3_5_text      32 24  8192 4 B
Qwen3.5-9B                  GDN     qwen3_5_text      32 24  8192 4 A
Qwen3.5-27B                 GDN     qwen3_5_text      64 48 10240 4 B
Qwen3.5-35B-A3B             GDN     qwen3_5_moe_text  40 30  8192 4 A
Qwen3.5-122B-A10B           GDN     qwen3_5_moe_text  48 36 12288 4 B
Qwen3.5-397B-A17B           GDN     qwen3_5_moe_text  60 45 12288 4 A
OLMo-Hybrid-7B              GDN     olmo_hybrid       32 24 11520 4 A
Kimi-Linear-48B-A3B         KDA     kimi_linear       27 20 12288 4 A
Kimi-K3                     KDA     kimi_k3           93 69 36864 4 A
GLM-5.3-Flash               KDA     glm5_next         45 34 24576 4 A
Ling-3.0-Flash              KDA     bailing_hybrid    42 35 12288 4 A
Nemotron-H-8B               Mamba2  nemotron_h        52 24 10240 4 B
Nemotron-Nano-9B-v2         Mamba2  nemotron_h        56 27 12288 4 B
Nemotron-3-Nano-30B-A3B     Mamba2  nemotron_h        52 23  6144 4 B
Nemotron-3-Super-120B-A12B  Mamba2  nemotron_h        88 40 10240 4 B
Falcon-H1-1.5B              Mamba2  falcon_h1         24 24  3584 4 B
Falcon-H1-3B                Mamba2  falcon_h1         32 32  4608 4 B
Falcon-H1-7B                Mamba2  falcon_h1         44 44  3584 4 B
Granite-4.0-H-Tiny          Mamba2  granitemoehybrid  40 36  3328 4 B
Granite-4.0-H-Small         Mamba2  granitemoehybrid  40 36  8448 4 B
Bamba-9B                    Mamba2  bamba             32 29  8448 4 B
Zamba2-2.7B                 Mamba2  zamba2            54 54  5248 4 A
mamba2-2.7b                 Mamba2  mamba2            64 64  5376 4 B
Jamba-v0.1                  Mamba1  jamba             32 28  8192 4 A
Falcon-Mamba-7B             Mamba1  falcon_mamba      64 64  8192 4 B
LFM2-1.2B                   LFM     lfm2              16 10  2048 3 B
LFM2-2.6B                   LFM     lfm2              30 22  2048 3 B
LFM2-8B-A1B                 LFM     lfm2_moe          24 18  2048 3 B
LFM3-1.7B                   LFM     lfm3              24 13  2048 7 A
RecurrentGemma-2B           RG-LRU  recurrent_gemma   26 18  2560 4 A
"""
ROWS = [line.split() for line in PUBLISHED.strip().splitlines()]


def test_every_published_model_has_a_preset_and_no_other():
    assert [preset.name for preset in PRESETS] == [row[0] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_preset_equals_the_published_row(row):
    preset = get_preset(row[0])
    assert [
        preset.name,
        preset.kind,
        preset.model_type,
        str(preset.num_layers),
        str(preset.num_conv_layers),
        str(preset.conv_dim),
        str(preset.width),
        preset.grade,
    ] == row
    assert preset.conv_dim_per_rank(1) == preset.conv_dim


@pytest.mark.parametrize(
    ("kind", "bias", "activation"),
    [
        ("GDN", False, "silu"),
        ("KDA", False, "silu"),
        ("Mamba2", True, "silu"),
        ("Mamba1", True, "silu"),
        ("LFM", False, None),
        ("RG-LRU", True, None),
    ],
)
def test_bias_and_activation_follow_the_kind(kind, bias, activation):
    found = {(preset.bias, preset.activation) for preset in PRESETS if preset.kind == kind}
    assert found == {(bias, activation)}


def test_every_preset_names_its_source_by_grade():
    for preset in PRESETS:
        assert ("transcriptions" in preset.source) == (preset.grade == "B"), preset.name


def test_presets_are_frozen_and_hashable():
    preset = get_preset("Qwen3.5-0.8B")
    assert len(set(PRESETS)) == len(PRESETS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.width = 3  # type: ignore[misc]


# ---- parts and ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen3.5-0.8B", {"q": (2048, 16), "k": (2048, 16), "v": (2048, 16)}),
        ("Qwen3.5-35B-A3B", {"q": (2048, 16), "k": (2048, 16), "v": (4096, 32)}),
        ("Qwen3.5-27B", {"q": (2048, 16), "k": (2048, 16), "v": (6144, 48)}),
        ("Qwen3.5-397B-A17B", {"q": (2048, 16), "k": (2048, 16), "v": (8192, 64)}),
        ("OLMo-Hybrid-7B", {"q": (2880, 30), "k": (2880, 30), "v": (5760, 30)}),
        ("Kimi-K3", {"q": (12288, None), "k": (12288, None), "v": (12288, None)}),
        ("Bamba-9B", {"x": (8192, None), "B": (128, 1), "C": (128, 1)}),
        ("Nemotron-H-8B", {"x": (8192, 128), "B": (1024, 8), "C": (1024, 8)}),
    ],
)
def test_parts(name, parts):
    assert {part.name: (part.channels, part.num_heads) for part in get_preset(name).parts} == parts


@pytest.mark.parametrize(
    ("name", "tp", "channels"),
    [
        ("Qwen3.5-0.8B", 2, 3072),
        ("Qwen3.5-0.8B", 16, 384),
        ("Qwen3.5-35B-A3B", 2, 4096),
        ("Qwen3.5-27B", 16, 128 + 128 + 3 * 128),
        ("Kimi-Linear-48B-A3B", 32, 3 * 128),
        ("OLMo-Hybrid-7B", 3, 3840),
        ("Kimi-K3", 3, 12288),  # heads not recorded: by channels
        ("LFM3-1.7B", 4, 512),
        # fewer groups than ranks: B and C are repeated, so a rank has more than its share
        ("Bamba-9B", 2, 4096 + 2 * 128),
        ("Bamba-9B", 8, 1024 + 2 * 128),
        ("Zamba2-2.7B", 4, 1280 + 2 * 64),
        ("Nemotron-H-8B", 8, 1024 + 2 * 128),
        ("Nemotron-H-8B", 16, 512 + 2 * 128),
        ("Nemotron-H-8B", 4, 2560),
    ],
)
def test_channels_per_rank(name, tp, channels):
    assert get_preset(name).conv_dim_per_rank(tp) == channels


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("Qwen3.5-0.8B", 3, "`tp`: expected a divisor of part q = 16 heads, got 3."),
        ("Qwen3.5-27B", 32, "`tp`: expected a divisor of part q = 16 heads, got 32."),
        ("OLMo-Hybrid-7B", 4, "`tp`: expected a divisor of part q = 30 heads, got 4."),
        ("Nemotron-3-Nano-30B-A3B", 7, "`tp`: expected a divisor of part x = 64 heads, got 7."),
        ("Bamba-9B", 3, "`tp`: expected a divisor of part x = 8192 channels, got 3."),
        ("LFM2-1.2B", 3, "`tp`: expected a divisor of part hidden = 2048 channels, got 3."),
    ],
)
def test_a_part_that_does_not_divide_is_named(name, tp, message):
    with pytest.raises(ValueError, match=r"^`tp`") as caught:
        get_preset(name).conv_dim_per_rank(tp)
    unit = message.split()[-3].removesuffix(",")
    assert str(caught.value) == (
        f"{message} Every part is divided over the ranks separately; {unit} are not split. Model: {name}."
    )


def test_the_part_that_fails_is_named_although_the_sum_divides():
    # 2 + 2 + 5 heads of 3 channels: 27 channels divide by 3, none of the parts does
    assert sum(part.channels for part in (ConvPart("q", 6, 2), ConvPart("k", 6, 2), ConvPart("v", 15, 5))) % 3 == 0
    with pytest.raises(ValueError, match=r"part q = 2 heads, got 3\."):
        ConvPart("q", 6, 2).channels_per_rank(3)


def test_more_groups_than_ranks_are_not_padded():
    with pytest.raises(ValueError, match=r"part B = 8 groups, got 3\."):
        ConvPart("B", 1024, 8, repeats=True).channels_per_rank(3)


@pytest.mark.parametrize("tp", [0, -2, True, 2.0, "2"])
def test_tp_must_be_a_positive_integer(tp):
    with pytest.raises(ValueError, match=r"^`tp`: expected an integer of at least 1, got "):
        get_preset("Qwen3.5-0.8B").conv_dim_per_rank(tp)


def test_spec_of_a_rank():
    spec = get_preset("Qwen3.6-35B-A3B").spec(
        num_slots=7, max_requests=5, num_draft_tokens=3, tp=2, dtype="float32", axis_order="channel_major",
        storage="dense", state_len=4,
    )  # fmt: skip
    assert spec.state_shape == (30, 7, 4096, 4)
    assert spec.windows_shape == (30, 5, 3, 4096, 4)
    assert (spec.dtype, spec.width) == ("float32", 4)


# ---- look-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("qwen3.5-0.8b", "Qwen3.5-0.8B"),
        ("Qwen3.6-27B", "Qwen3.5-27B"),
        ("qwen3.8-27b", "Qwen3.5-27B"),
        ("Qwen/Qwen3.6-35B-A3B", "Qwen3.5-35B-A3B"),
        ("MAMBA2-2.7B", "mamba2-2.7b"),
    ],
)
def test_names_and_aliases(asked, name):
    assert get_preset(asked).name == name


def test_no_name_is_taken_twice():
    names = [name.lower() for preset in PRESETS for name in (preset.name, *preset.aliases)]
    assert len(set(names)) == len(names) == len(ROWS) + 3


def test_unknown_name_lists_close_ones():
    with pytest.raises(ValueError, match=r"^`name`") as caught:
        get_preset("Kimi-K33")
    assert str(caught.value).startswith("`name`: expected a published model, got 'Kimi-K33'. Close names: Kimi-K3")
    with pytest.raises(ValueError, match="No name is close"):
        get_preset("zzzz")


# ---- imports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["layout", "capacity", "presets"])
def test_shape_arithmetic_imports_no_framework(module):
    code = (
        f"import sys, jax_impl.{module}\n"
        "print(sorted({'jax', 'jaxlib', 'numpy', 'ml_dtypes', 'torch', 'triton', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
