"""Bytes, ratios and tables against the published numbers, which are written out here."""

import dataclasses
from fractions import Fraction

import pytest

from jax_impl.capacity import GIB_BYTES, capacity, gib, published_table, saving, saving_table, times
from jax_impl.layout import ConvCacheSpec
from jax_impl.presets import get_preset


@pytest.mark.parametrize(
    ("model", "tp", "dense", "sliding"),
    [("Qwen3.5-0.8B", 1, 2_654_208, 1_327_104), ("Qwen3.5-35B-A3B", 2, 2_949_120, 1_474_560)],
)
@pytest.mark.parametrize("axis_order", ["time_major", "channel_major"])
@pytest.mark.parametrize("storage", ["sliding", "dense"])
def test_bytes_per_row(model, tp, dense, sliding, axis_order, storage):
    spec = get_preset(model).spec(
        num_slots=3, max_requests=5, num_draft_tokens=4, tp=tp, axis_order=axis_order, storage=storage
    )
    size = capacity(spec)
    assert (size.dense_row_bytes, size.sliding_row_bytes) == (dense, sliding)
    assert (size.dense_windows_bytes, size.sliding_windows_bytes) == (5 * dense, 5 * sliding)
    assert spec.windows_bytes == 5 * (sliding if storage == "sliding" else dense)


def test_bytes_per_slot_are_of_all_layers():
    size = capacity(get_preset("Qwen3.5-0.8B").spec(num_slots=20, max_requests=17, num_draft_tokens=4))
    assert size.slot_bytes == 18 * 3 * 6144 * 2
    assert size.state_bytes == 20 * 18 * 3 * 6144 * 2


def test_rows_per_gib():
    size = capacity(get_preset("Qwen3.5-0.8B").spec(num_slots=1, max_requests=1, num_draft_tokens=4))
    assert (size.dense_rows_per_gib, size.sliding_rows_per_gib) == (404, 809)
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
    assert (table[7, 4].dense_columns, table[7, 4].sliding_columns) == (24, 9)


def test_the_table_takes_iterators():
    assert len(saving_table(iter((4, 3)), iter((1, 2, 4)))) == 6


def test_text_forms():
    assert [times(Fraction(*pair)) for pair in ((1, 1), (3, 2), (2, 1), (12, 5), (8, 3))] == [
        "1×", "1.5×", "2×", "2.4×", "2.67×",
    ]  # fmt: skip
    assert gib(GIB_BYTES) == "1.0000"
