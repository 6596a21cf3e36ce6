"""What the notebooks call: pictures that are the same bytes twice, tables, and experiments whose answers are known."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.capacity import GIB_BYTES
from jax_impl.layout import use_storage
from jax_impl.presets import get_preset
from jax_impl.walkthrough import decoding, exchange, frameworks, overlap, planning, rollback, serving, show
from tests import adapters

RESULTS = pathlib.Path(__file__).parent.parent / "notebooks" / "results"
TREE = [-1, 0, 0, 1]


def needs(*modules: str) -> Any:
    return pytest.mark.skipif(
        not all(map(adapters.is_installed, modules)), reason=f"{' or '.join(modules)} is not installed"
    )


# ---- show ------------------------------------------------------------------------------------------------------------


def test_pictures_are_the_same_bytes_every_time(tmp_path: pathlib.Path) -> None:
    first, again = overlap.overlap_picture(4, 4), overlap.overlap_picture(4, 4)
    assert first.png == again.png
    assert first.png != overlap.overlap_picture(4, 3).png
    assert first._repr_png_().startswith(b"\x89PNG")
    first.save(tmp_path / "images" / "one.png")
    assert (tmp_path / "images" / "one.png").read_bytes() == first.png


def test_a_table_escapes_and_counts_its_cells() -> None:
    table = show.Table(("a", "b"), [("<x>", 1)], "c & d")
    assert "<td>&lt;x&gt;</td><td>1</td>" in table._repr_html_()
    assert "<caption>c &amp; d</caption>" in table._repr_html_()
    assert repr(table) == "a   | b\n----+--\n<x> | 1\nc & d"
    with pytest.raises(ValueError, match=re.escape("`rows`: expected 2 cells in each, got (1,).")):
        show.Table(("a", "b"), [(1,)])


def test_missing_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show.missing("json") is None
    assert show.missing("no_such_a", "json", "no_such_b") == "no_such_a and no_such_b are not installed."
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pictures need matplotlib: matplotlib is not installed"):
        overlap.overlap_picture()
    assert frameworks.prepare().startswith("torch and triton are not installed.")
    assert list(frameworks.implementations()) == ["NumPy", "JAX XLA", "JAX Pallas, interpreted"]
    assert exchange.exchange_table() == exchange.traps_table()
    assert repr(exchange.traps_table()).startswith("torch is not installed.")
    theirs = decoding.transformers_tries([1], 1)
    assert theirs.tokens is None
    assert "torch and transformers are not installed." in theirs.answer


def test_importing_loads_neither_matplotlib_nor_torch() -> None:
    names = ", ".join(
        f"jax_impl.walkthrough.{path.stem}" for path in pathlib.Path(show.__file__).parent.glob("[a-z]*.py")
    )
    code = (
        f"import {names}, sys; print([m for m in ('matplotlib', 'torch', 'transformers', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


# ---- 01 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "tokens"), [(2, 3), (3, 1), (4, 4), (5, 2), (7, 5)])
def test_a_chain_wants_one_value_in_each_column(width: int, tokens: int) -> None:
    shared = [*overlap.history_names(width)[1:], *(f"x{t}" for t in range(tokens))]
    assert overlap.wanted_in_columns(width, range(-1, tokens - 1)) == [[name] for name in shared]


def test_a_tree_wants_two_values_where_its_branches_meet() -> None:
    assert overlap.windows_of(4, TREE)[2:] == [("h3", "x0", "x2"), ("x0", "x1", "x3")]
    wanted = overlap.wanted_in_columns(4, TREE)
    assert [len(values) for values in wanted] == [1, 1, 2, 2, 2, 1]
    table = overlap.column_table(4, TREE)
    assert [row[-1] for row in table.rows][1:3] == ["yes", "no: x0 or h3"]
    assert use_storage(1, TREE) in table.caption
    assert "3 of 6 columns" in overlap.tree_picture(4, TREE).alt


def test_saving_rows_say_where_there_is_none() -> None:
    rows = overlap.saving_rows(widths=(2, 4), draft_tokens=(1, 4)).rows
    assert rows == [("K = 2", "1 → 1: 1×", "4 → 4: 1×"), ("K = 4", "3 → 3: 1×", "12 → 6: 2×")]


# ---- 02 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces() -> dict[tuple[str, bool], rollback.Trace]:
    runs = {accept_all: rollback.Run(steps=100, accept_all=accept_all) for accept_all in (False, True)}
    return {(name, accept_all): run.trace(name) for name in rollback.COMMITS for accept_all, run in runs.items()}


def test_committing_n_is_exact_and_nothing_else_is(traces: dict[tuple[str, bool], rollback.Trace]) -> None:
    right = traces["commit n", False]
    assert set(right.accepted.ravel()) == {1, 2, 3, 4}
    assert not right.different_bits.any()
    assert not right.conv_error.any()
    assert not right.recurrent_error.any()
    for name in ("commit n - 1", "commit D", "no commit"):
        wrong = traces[name, False]
        assert (wrong.different_bits > 0).all(), name
        assert wrong.conv_error[-1] > 0.3, name
        assert wrong.recurrent_error[-1] > 0.1, name


def test_full_acceptance_hides_committing_everything(traces: dict[tuple[str, bool], rollback.Trace]) -> None:
    assert not traces["commit D", True].different_bits.any()
    assert traces["commit n - 1", True].different_bits.all()
    with pytest.raises(ValueError, match=r"`commit`: expected one of commit n, .*, got 'n'"):
        rollback.Run().trace("n")


def test_rejected_tokens_are_in_the_buffer_and_not_in_the_pool() -> None:
    rows = rollback.rejected_tokens_vanish(rollback.Run()).rows
    dim = rollback.SPEC.conv_dim
    assert rows == [(n, 4 - n, (4 - n) * dim, 0) for n in (1, 2, 3, 4)]


# ---- 03 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given() -> frameworks.Example:
    return frameworks.example()


@pytest.fixture(scope="module")
def found(given: frameworks.Example) -> dict[str, frameworks.Outcome]:
    return frameworks.outcomes(given)


def test_every_implementation_has_the_same_bits(found: dict[str, frameworks.Outcome]) -> None:
    table = frameworks.state_table(found)
    assert len(table.rows) == 3 + 2 * adapters.is_installed("torch")
    assert {cell.split()[0] for row in table.rows for cell in row[1:]} == {"0", "the", "keeps"}


def test_one_bit_is_noticed(found: dict[str, frameworks.Outcome]) -> None:
    spoiled = found["JAX XLA"].state.copy()
    spoiled[1, 3, 2, 5] ^= 1
    table = frameworks.state_table(found | {"spoiled": dataclasses.replace(found["JAX XLA"], state=spoiled)})
    assert table.rows[-1] == ("spoiled", f"1 of {spoiled.size}", "the reference")


def test_ulps_count_float32_values() -> None:
    start = np.asarray([1.0, -1.0, 3e-39, -3e-39, 0.0], np.float32)
    moved = start.copy()
    for _ in range(3):
        moved = np.nextafter(moved, np.float32(np.inf))
    assert frameworks.ulps(moved, start.astype(np.float64)).tolist() == [3] * 5
    assert frameworks.ulps(np.asarray([-0.0], np.float32), np.asarray([0.0])).tolist() == [0]


def test_y_is_near_the_exact_one(given: frameworks.Example, found: dict[str, frameworks.Outcome]) -> None:
    """Most within one ulp; a product rounded to bfloat16 on the way would be hundreds away."""
    for name, one in found.items():
        counts = frameworks._counts(given, one)
        live = int(given.batch.valid[given.batch.live].sum()) * given.spec.conv_dim * given.spec.num_layers
        assert counts.sum() == live
        assert counts[:2].sum() > 0.75 * live, name
    rounded = given.weight.astype(jnp.bfloat16).astype(np.float32)
    coarse = frameworks.in_numpy(dataclasses.replace(given, weight=rounded))
    assert frameworks._counts(given, coarse)[-1] > 0.9 * live


@needs("torch")
def test_what_crosses_and_what_does_not() -> None:
    table, traps = exchange.exchange_table(), exchange.traps_table()
    assert isinstance(table, show.Table)
    assert isinstance(traps, show.Table)
    assert {cell for row in table.rows for cell in row[1:]} == {"yes"}
    answers = {row[0]: row[2] for row in traps.rows}
    assert answers["torch writes into a shared tensor"] == "yes"
    assert answers["a JAX array is donated while torch holds it"] == "no"
    assert answers["an int64 tensor"] == "int32"
    assert answers["bfloat16 by way of NumPy"] == "refused, TypeError"


# ---- 04 --------------------------------------------------------------------------------------------------------------


def test_published_bytes() -> None:
    row = next(row for row in planning.models_table().rows if row[0] == "Qwen3.5-0.8B")
    assert row[-4:] == ("0.0420", "0.0210", "0.0140", "2×")
    spec = get_preset("Qwen3.5-0.8B").spec(num_slots=1, max_requests=17, num_draft_tokens=4)
    formulas = planning.formula_table(spec)
    assert [(row[3], row[6]) for row in formulas.rows] == [
        ("12 columns", "45,121,536"), ("6 columns", "22,560,768"), ("4 columns", "15,040,512")
    ]  # fmt: skip
    table = planning.tensor_parallel_table("Qwen3.5-35B-A3B", (2,), (4,), requests=32)
    assert table.rows == [("TP 2", "0.0906 → 0.0453")]


def test_models_that_do_not_divide_are_named() -> None:
    table = planning.models_table(tp=7)
    assert "not divisible: Qwen3-Next-80B-A3B" in table.caption
    assert len(table.rows) < len(planning.models_table().rows)


def test_as_many_requests_fit_as_are_said_to() -> None:
    dense, sliding = planning.requests_that_fit("Kimi-K3", 0.5, tp=8, num_draft_tokens=8)
    for count, field in ((dense, "dense_windows_bytes"), (sliding, "sliding_windows_bytes")):
        sizes = [
            getattr(planning.size_of("Kimi-K3", tp=8, num_draft_tokens=8, requests=n), field)
            for n in (count, count + 1)
        ]
        assert sizes[0] <= GIB_BYTES // 2 < sizes[1]
    assert planning.requests_that_fit("Kimi-K3", 0.0) == (0, 0)
    assert planning.draft_tokens_above(7, 3) == 6


# ---- 05 --------------------------------------------------------------------------------------------------------------


def test_tokens_per_step_follow_the_formula() -> None:
    found = decoding.tokens_per_step((4,), (0.0, 1.0), new_tokens=41)
    assert found[0.0] == [1.0]
    assert found[1.0] == [4.0]  # 40 tokens behind the first one, in ten steps
    assert decoding.expected_tokens(0.9, 8) == pytest.approx((1 - 0.9**8) / (1 - 0.9))
    assert decoding.draft_length_picture((4,), found).png


def test_other_tokens_than_greedy_ones_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_replayed", lambda *arguments: [[0]] * 4)
    with pytest.raises(RuntimeError, match=r"D = 4, acceptance 0.5: the tokens are not those of greedy decoding."):
        decoding.tokens_per_step((4,), (0.5,), new_tokens=41)


# ---- 06 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs() -> dict[str, serving.Program]:
    spec, given = serving.SPEC, serving.inputs()
    lists = dataclasses.replace(spec, axis_order="channel_major")
    on_lists = functools.partial(serving.list_step, spec=lists)
    return {
        "list": serving.run_donated(on_lists, *given.list_state(lists), *given.of_step(0), donate=(0, 1)),
        "scan": serving.run_donated(serving.scan_step, given.cache(spec), *given.of_step(-1), donate=(0,)),
    }


def test_steps_are_in_place_and_agree(programs: dict[str, serving.Program]) -> None:
    for one in programs.values():
        assert one.in_place
        assert one.pool_copies == one.collectives == []
        assert one.temp_share < 0.05
    pools = [programs["list"].results[0], programs["scan"].results[0].conv_state]
    assert serving.same_bits(pools)
    before = serving.inputs().pool
    assert not serving.same_bits([pools[1], before])
    changed = (np.asarray(pools[1]) != before).any(axis=(0, 2, 3))
    given = serving.inputs()
    live = given.slots[:-1][given.accepted[:-1] > 0]
    assert set(np.flatnonzero(changed)) == set(live.tolist())


def test_a_copy_is_seen(programs: dict[str, serving.Program]) -> None:
    """A pool that goes through a scan as xs and ys comes out right, at its address, and was copied on the way."""
    one = serving.run_donated(
        serving.sliced_step, serving.inputs().cache(serving.SPEC), *serving.inputs().of_step(-1), donate=(0,)
    )
    assert one.pool_copies
    assert one.temp_share > 0.9
    assert serving.same_bits([one.results[0].conv_state, programs["scan"].results[0].conv_state])


def test_a_result_in_new_memory_is_seen() -> None:
    for step, expected in ((lambda pool: pool + 1, True), (lambda pool: jnp.concatenate([pool, pool]), False)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            assert serving.run_donated(step, jnp.zeros((4, 4096)), donate=(0,)).in_place == expected


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import json
from jax_impl.walkthrough import serving
spec, given, mesh = serving.SPEC, serving.inputs(), serving.host_mesh()
one = serving.run_donated(serving.scan_step, given.cache(spec), *given.of_step(-1), donate=(0,))
cache = given.cache(spec, serving.pool_sharding(mesh))
many = serving.run_donated(
    serving.shard_step(mesh, spec), cache.conv_state, cache.conv_windows, *given.of_step(-1), donate=(0, 1))
print(json.dumps([mesh.size, len(many.results[0].addressable_shards), many.in_place, many.pool_copies, many.collectives,
                  serving.same_bits([one.results[0].conv_state, many.results[0]])]))
"""


def test_eight_devices_agree_without_speaking() -> None:
    """In a process of its own, because the number of devices is chosen before JAX starts."""
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [8, 8, True, [], [], True]


def test_channels_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="`devices`: expected a divisor of conv_dim = 256, got 3"):
        serving.shard_spec(serving.SPEC, 3)


def test_measured_numbers_are_those_of_the_files(tmp_path: pathlib.Path) -> None:
    from jax_impl.bench import report

    files = report.results_files(RESULTS)
    assert serving.measured(RESULTS).text == report.readme_block(files)
    shown = serving.measured_picture(RESULTS, "commit")
    assert isinstance(shown, show.Picture)
    assert repr(serving.measured_picture(tmp_path, "commit")) == f"No file in {tmp_path.name} has commit."


def test_sources_are_shown_as_they_are() -> None:
    text = show.source(serving.list_step).text
    assert text.startswith("```python\ndef list_step(")
    assert text.endswith("```")


def test_devices_are_named() -> None:
    assert show.devices() == f"JAX on {jax.device_count()} × cpu; Pallas kernels are interpreted."
