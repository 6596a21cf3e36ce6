"""Bytes, ratios and tables against the published numbers, which are written out here."""

import dataclasses
from fractions import Fraction

import pytest

from jax_impl.capacity import (
    DESIGNS,
    GIB_BYTES,
    capacity,
    column_bytes,
    design_table,
    gib,
    published_table,
    saving,
    saving_table,
    times,
)
from jax_impl.layout import ConvCacheSpec
from jax_impl.presets import get_preset


@pytest.mark.parametrize(
    ("model", "tp", "dense", "sliding"),
    [("Qwen3.5-0.8B", 1, 2_654_208, 1_327_104), ("Qwen3.5-35B-A3B", 2, 2_949_120, 1_474_560)],
)
@pytest.mark.parametrize("axis_order", ["time_major", "channel_major"])
@pytest.mark.parametrize("storage", ["sliding", "dense", "inputs"])
def test_bytes_per_row(model, tp, dense, sliding, axis_order, storage):
    spec = get_preset(model).spec(
        num_slots=3, max_requests=5, num_draft_tokens=4, tp=tp, axis_order=axis_order, storage=storage
    )
    size = capacity(spec)
    assert (size.dense_row_bytes, size.sliding_row_bytes) == (dense, sliding)
    assert (size.dense_windows_bytes, size.sliding_windows_bytes) == (5 * dense, 5 * sliding)
    inputs = dense // 3  # K-1 = 3 columns a token, of which one is new
    assert (size.inputs_row_bytes, size.inputs_windows_bytes) == (inputs, 5 * inputs)
    assert spec.windows_bytes == 5 * {"sliding": sliding, "dense": dense, "inputs": inputs}[storage]


def test_bytes_per_slot_are_of_all_layers():
    size = capacity(get_preset("Qwen3.5-0.8B").spec(num_slots=20, max_requests=17, num_draft_tokens=4))
    assert size.slot_bytes == 18 * 3 * 6144 * 2
    assert size.state_bytes == 20 * 18 * 3 * 6144 * 2


def test_rows_per_gib():
    size = capacity(get_preset("Qwen3.5-0.8B").spec(num_slots=1, max_requests=1, num_draft_tokens=4))
    assert (size.dense_rows_per_gib, size.sliding_rows_per_gib, size.inputs_rows_per_gib) == (404, 809, 1213)
    assert 809 * size.sliding_row_bytes <= GIB_BYTES < 810 * size.sliding_row_bytes


def test_published_table():
    rows = [
        (row.model, row.tp, row.max_requests, row.num_draft_tokens, gib(row.dense_windows_bytes),
         gib(row.sliding_windows_bytes), row.saving)
        for row in published_table()
    ]  # fmt: skip
    assert rows == [
        ("Qwen3.5-0.8B", 1, 17, 4, "0.0420", "0.0210", 2),
        ("Qwen3.5-35B-A3B", 2, 33, 4, "0.0906", "0.0453", 2),
    ]


@pytest.mark.parametrize(
    ("width", "num_draft_tokens", "sliding_over_dense"),
    [(4, 4, 0.5), (4, 8, 0.417), (3, 4, 0.625), (7, 4, 0.375)],
)
def test_published_ratios(width, num_draft_tokens, sliding_over_dense):
    assert float(round(1 / saving(width, num_draft_tokens), 3)) == sliding_over_dense


@pytest.mark.parametrize(
    ("num_draft_tokens", "expected"),
    [(1, Fraction(1)), (2, Fraction(3, 2)), (4, Fraction(2)), (8, Fraction(12, 5)), (16, Fraction(8, 3))],
)
def test_saving_at_width_4(num_draft_tokens, expected):
    assert saving(4, num_draft_tokens) == expected


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 16])
def test_width_2_saves_nothing_unless_the_stack_keeps_two_columns(num_draft_tokens):
    assert saving(2, num_draft_tokens) == 1
    assert saving(2, num_draft_tokens, state_len=2) == Fraction(2 * num_draft_tokens, num_draft_tokens + 1)


@pytest.mark.parametrize("storage", ["sliding", "dense"])
def test_saving_depends_on_neither_slots_nor_rows_nor_channels(storage):
    small = ConvCacheSpec(1, 1, 1, 1, 4, 5, storage=storage)
    large = dataclasses.replace(small, num_layers=7, num_slots=900, max_requests=33, conv_dim=6144, dtype="float32")
    assert capacity(small).saving == capacity(large).saving == saving(4, 5) == Fraction(15, 7)


@pytest.mark.parametrize("width", [2, 4, 7])
def test_inputs_save_the_columns_of_a_state_at_any_length(width):
    assert {saving(width, tokens, storage="inputs") for tokens in (1, 3, 16)} == {width - 1}
    assert saving(width, 5, state_len=width, storage="inputs") == width
    assert saving(width, 5, storage="dense") == 1


def test_designs():
    """In columns at K = 4, D = 1, 4 and 8, and of stacks that keep K columns; as their sources state the formulas."""
    table = {
        (row.design, row.num_draft_tokens): (row.slot_columns, row.row_columns) for row in design_table(4, (1, 4, 8))
    }
    assert [table[design.name, 1] for design in DESIGNS] == [(3, 3), (3, 3), (3, 1), (3, 0), (3, 0)]
    assert [table[design.name, 4] for design in DESIGNS] == [(3, 12), (3, 6), (3, 4), (6, 0), (12, 0)]
    assert [table[design.name, 8] for design in DESIGNS] == [(3, 24), (3, 10), (3, 8), (10, 0), (24, 0)]
    wide = [(row.slot_columns, row.row_columns) for row in design_table(4, (4,), state_len=4)]
    assert wide == [(4, 16), (4, 7), (4, 4), (7, 0), (16, 0)]
    spec = get_preset("Qwen3.5-0.8B").spec(num_slots=1, max_requests=1, num_draft_tokens=4)
    assert column_bytes(spec) * table["dense", 4][1] == capacity(spec).dense_row_bytes


def test_saving_checks_its_arguments():
    with pytest.raises(ValueError, match=r"`width`: expected an integer from 2 to 2\^31-1, got 1\."):
        saving(1, 4)
    with pytest.raises(ValueError, match=r"`num_draft_tokens`: expected an integer from 1 to 2\^31-1, got 0\."):
        saving(4, 0)


def test_saving_table_shows_where_there_is_none():
    table = {(row.width, row.num_draft_tokens): row for row in saving_table()}
    assert {key for key, row in table.items() if row.saving == 1} == {(2, d) for d in (1, 2, 4, 8, 16)} | {
        (4, 1),
        (3, 1),
        (7, 1),
    }
    assert (table[4, 4].dense_columns, table[4, 4].sliding_columns) == (12, 6)
    assert (table[7, 4].dense_columns, table[7, 4].sliding_columns, table[7, 4].inputs_columns) == (24, 9, 4)


def test_the_table_takes_iterators():
    assert len(saving_table(iter((4, 3)), iter((1, 2, 4)))) == 6


def test_text_forms():
    assert [times(Fraction(*pair)) for pair in ((1, 1), (3, 2), (2, 1), (12, 5), (8, 3))] == [
        "1×", "1.5×", "2×", "2.4×", "2.67×",
    ]  # fmt: skip
    assert gib(GIB_BYTES) == "1.0000"
