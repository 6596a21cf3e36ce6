"""What bench measures, without a GPU: program texts, times under a clock of the test, and what a failure leaves."""

import dataclasses
import itertools
import json
import re
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.bench import (
    comparing,
    compiling,
    drafts,
    measure,
    prefill,
    program,
    rollback,
    step,
    subjects,
    timing,
)
from jax_impl.bench.form import SUBJECTS
from jax_impl.bench.subjects import Case, Subject
from jax_impl.layout import ConvCacheSpec
from jax_impl.presets import get_preset
from tests.cases import assert_same_bits, both_orders, spec_of

SPEC = ConvCacheSpec(3, 11, 8, 128, 4, 4, "float32")
HYBRID = ConvCacheSpec(2, 7, 4, 3 * 128, 4, 4, "float32")  # q, k and v with one head each


# --- the text of a program --------------------------------------------------------------------------------------------

MODULE = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[2,8]{1,0})->bf16[2,8]{1,0}}

FileNames
1 "step.py"

%fused_add (param_0: s32[]) -> s32[] {
  %constant.1 = s32[] constant(1)
  ROOT %add.1 = s32[] add(%param_0, %constant.1), metadata={op_name="jit(step)/add(x)"}
}

%fused_pad (p.0: bf16[8]) -> bf16[2,8] {
  ROOT %pad.1 = bf16[2,8]{1,0} pad(%p.0, %c), padding=0_8
}

%body.1 (state: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %state = (s32[], bf16[2,8]{1,0:T(8,128)}) parameter(0)
  %gte.0 = s32[] get-tuple-element(%state), index=0
  %fusion-start = ((s32[]), s32[], u32[]) fusion-start(%gte.0), kind=kLoop, calls=%fused_add
  %fusion-done = s32[] fusion-done(%fusion-start)
  %kernel.1 = (bf16[2,8]{1,0}, /*index=1*/bf16[2,8]{1,0}) custom-call(%gte.0), custom_call_target="mosaic_gpu_v2"
  ROOT %tuple.1 = (s32[], bf16[2,8]{1,0}) tuple(%fusion-done, %gte.0)
}

%condition.1 (state.1: (s32[], bf16[2,8])) -> pred[] {
  %state.1 = (s32[], bf16[2,8]{1,0}) parameter(0)
  ROOT %compare.1 = pred[] fusion(%state.1), kind=kLoop, calls=%fused_compare
}

%graph (p.1: bf16[2,8]) -> bf16[2,8] {
  %p.1 = bf16[2,8]{1,0} parameter(0)
  %copy.2 = bf16[1,8]{1,0} copy(%p.1)
  ROOT %kernel.2 = bf16[2,8]{1,0} custom-call(%copy.2), custom_call_target="mosaic_gpu_v2"
}

%one_kernel (p.2: bf16[2,8]) -> bf16[2,8] {
  ROOT %kernel.3 = bf16[2,8]{1,0} custom-call(%p.2), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (p.3: bf16[2,8]) -> bf16[2,8] {
  %p.3 = bf16[2,8]{1,0} parameter(0)
  %bitcast.1 = u16[2,8]{1,0} bitcast(%p.3)
  %tuple.2 = (s32[], bf16[2,8]{1,0}) tuple(%c.1, %p.3)
  %while.1 = (s32[], bf16[2,8]{1,0}) while(%tuple.2), condition=%condition.1, body=%body.1, backend_config={TRIPS}
  %call.1 = bf16[2,8]{1,0} call(%p.3), to_apply=%graph
  %branch.1 = bf16[2,8]{1,0} conditional(%p.3), BRANCHES
  ROOT %fusion.9 = bf16[2,8]{1,0} fusion(%call.1), kind=kLoop, calls=%fused_pad
}
"""
KNOWN, UNKNOWN = '"known_trip_count":{"n":"30"}', '"known_init_step":{"init":"0"}'


@pytest.mark.parametrize(("trips", "in_loop"), [(KNOWN, 30 * 2), (UNKNOWN, 2 + 1)])
@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%graph, %one_kernel}", "true_computation=%one_kernel, false_computation=%graph"],
)
def test_launches_by_hand(trips: str, in_loop: int, branches: str) -> None:
    """A loop of two launches, a call of two, a branch of two or one, and a fusion."""
    text = MODULE.replace("TRIPS", trips).replace("BRANCHES", branches)
    assert program.launches(text) == in_loop + 2 + 2 + 1


def test_large_copies_by_hand() -> None:
    """The pad inside a fusion and the copy inside a call; convert and fusion are none, nor is a smaller result."""
    text = MODULE.replace("TRIPS", KNOWN).replace("BRANCHES", "branch_computations={%graph}")
    assert program.large_copies(text, 16) == ["pad"]
    assert program.large_copies(text, 8) == ["pad", "copy"]
    assert program.large_copies(text.replace("copy(", "copy-start("), 8) == ["pad", "copy-start"]


@pytest.mark.parametrize("text", ["", "HloModule x", "%a (p: s32[]) -> s32[] {\n  ROOT %b = s32[] negate(%p)\n}\n"])
def test_a_text_without_an_entry_is_refused(text: str) -> None:
    for read in (program.launches, lambda text: program.large_copies(text, 1)):
        with pytest.raises(ValueError, match="`text`: expected the text of a compiled HLO module"):
            read(text)


def test_facts_of_a_real_program() -> None:
    compiled, facts = subjects.compiled_with_facts(
        lambda a: jax.lax.fori_loop(0, 6, lambda _, b: b * 2, a), (jax.ShapeDtypeStruct((64,), "float32"),), (0,), 6
    )
    assert np.asarray(compiled(jax.numpy.ones(64, "float32"))).tolist() == [64.0] * 64
    assert facts["alias_bytes"] == 256
    assert facts["launches"] >= 1.0
    assert min(facts["trace_s"], facts["compile_s"], facts["temp_bytes"]) >= 0


# --- compiled programs ------------------------------------------------------------------------------------------------


def test_a_program_that_is_not_in_place() -> None:
    row = {"alias_bytes": 100, "state_bytes": 100, "pool_copies": []}
    assert compiling.in_place(row)
    assert not compiling.in_place(row | {"alias_bytes": 99})
    assert not compiling.in_place(row | {"pool_copies": ["copy"]})


def test_no_two_programs_share_a_geometry() -> None:
    plans = list(compiling.programs(SPEC, 4))
    assert len({plan.spec.num_slots for plan in plans}) == len(plans) == 2 * 4 + 2 * 4
    assert [plan.spec.num_layers for plan in plans] == [1, 8, 30, 60, 1, 8, 30, 60, *[3] * 8]
    assert {plan.form for plan in plans if not plan.command_buffers} == set(compiling.PLACES)


# --- times ------------------------------------------------------------------------------------------------------------


class Clock:
    """A device whose rounds take 40 µs, after 700 µs to start and wait for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rounds = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def run(self, rounds: int) -> None:
        self.rounds.append(rounds)
        self.now += 700e-6 + rounds * 40e-6


def test_device_time_leaves_out_what_starting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert timing.marginal_us(clock.run, 8, 5) == {"median_us": 5.0, "p10_us": 5.0, "p90_us": 5.0}
    warm, *_ = clock.rounds
    assert warm == 2
    assert clock.rounds[-10:] == [14, 28] * 5  # 10 ms are 14 rounds of 740 µs


def test_wall_time_is_of_a_queue_and_latency_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = timing.wall_us(clock.run, 1, 3)
    assert times["latency"]["median_us"] == pytest.approx(740)
    assert times["wall"]["median_us"] == pytest.approx(40 + 700 / 68, abs=1e-3)  # 50 ms are 68 rounds of 740 µs
    assert clock.rounds[-15:] == [1] * 15


def test_quantiles_by_hand() -> None:
    assert timing.quantiles([3.0, 1.0, 2.0]) == {"median_us": 2.0, "p10_us": 1.0, "p90_us": 3.0}
    assert timing.quantiles(range(11)) == {"median_us": 5, "p10_us": 1, "p90_us": 9}


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """JAX's own profiler over a stand-in for CUPTI: (kernel, milliseconds) of all recorded rounds, to be filled."""
    from jax.experimental.mosaic.gpu import profiler

    records: list[tuple[str, float]] = []
    extension = types.SimpleNamespace(_cupti_init=lambda: None, _cupti_get_timings=lambda finalize: list(records))
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=extension))
    return records


def test_kernel_times_by_hand(cupti: list[tuple[str, float]]) -> None:
    """Two kernels a round of two calls; the fourth round is slower."""
    rounds = []
    cupti += [("verify", 0.004), ("copy", 0.001)] * 3 + [("verify", 0.006), ("copy", 0.001)]
    times = timing.kernel_us(rounds.append, 2)
    assert rounds == [1] * (1 + timing.KERNEL_ROUNDS)
    assert times["kernel"] == {
        "median_us": 2.5,
        "p10_us": 2.5,
        "p90_us": 3.5,
        "names": {"verify": {"per_call": 0.5, "us": 2.25}, "copy": {"per_call": 0.5, "us": 0.5}},
    }


def test_kernel_times_that_are_not_there_say_why(cupti: list[tuple[str, float]], monkeypatch: Any) -> None:
    assert timing.kernel_us(lambda rounds: None, 1) == {"kernel": None, "kernel_reason": "CUPTI recorded no kernel"}
    cupti += [("verify", 0.004)] * 3
    got = timing.kernel_us(lambda rounds: None, 1)
    assert got["kernel"] is None
    assert "not divisible" in got["kernel_reason"]
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu.profiler", None)
    assert timing.kernel_us(lambda rounds: None, 1)["kernel_reason"].startswith("ModuleNotFoundError: ")


# --- one row ----------------------------------------------------------------------------------------------------------


def fixed(monkeypatch: pytest.MonkeyPatch, microseconds: dict[str, float]) -> measure.Makers:
    """Subjects whose device time is given by name."""
    monkeypatch.setattr(measure, "timed", lambda subject, repeats, kernels: dict(subject.facts))
    return {name: lambda us=us: Subject(print, 1, {"median_us": us}) for name, us in microseconds.items()}


def exhausted() -> Subject:
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile allocating")


def test_a_row_compares_with_the_faster_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = fixed(monkeypatch, {"pallas": 4.0, "xla": 8.0, "copy_driver": 3.0, "copy_kernel": 2.0})
    row = measure.fill(measure.identity("commit", SPEC, 4), makers, measure.Options([4]))
    assert [row[name].get("copy_fraction") for name in makers] == [0.5, 0.25, None, None]
    assert "errors" not in row


def test_a_subject_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = fixed(monkeypatch, {"pallas": 4.0, "xla": 8.0, "triton": 5.0}) | {"xla": exhausted}
    row = measure.fill(measure.identity("commit", SPEC, 4), makers, measure.Options([4]))
    assert row["errors"] == {"xla": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    assert (row["pallas"]["median_us"], row["triton"]["median_us"]) == (4.0, 5.0)
    assert measure.line(row).endswith("  xla FAILED RuntimeError: RESOURCE_EXHAUSTED: out of memory")


def test_a_chained_step_is_not_compared_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = fixed(monkeypatch, {"pallas_unrolled": 4.0, "pallas_chained": 3.0, "copy_driver": 2.0})
    row = measure.fill(measure.identity("step", SPEC, 4), makers, measure.Options([4]))
    assert row["pallas_unrolled"]["copy_fraction"] == 0.5
    assert "copy_fraction" not in row["pallas_chained"]


def test_a_chained_step_that_loses_y_is_found(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = comparing.whole_step

    def wrong(form: Any, *of: Any, **options: Any) -> Any:
        one = real(form, *of, **options)
        return (lambda caches, x, *more: one(caches, x * 2, *more)) if form == "chained" else one

    monkeypatch.setattr(comparing, "whole_step", wrong)
    monkeypatch.setattr(comparing, "_kernel", lambda: "xla")
    (point,) = comparing.small("step", "time_major")
    assert not comparing.check(point)
    said = [line for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line]
    assert [line.partition("xla ")[2] for line in said] == ["chained: DIFFERENT pool, buffer, last y"]


def test_only_the_wanted_subjects_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = fixed(monkeypatch, {"pallas_scan": 4.0, "pallas_unrolled": 3.0, "copy_driver": 2.0})
    makers["xla_scan"] = exhausted
    row = measure.fill(measure.identity("step", SPEC, 4), makers, measure.Options([4], only=("pallas", "copy")))
    assert "errors" not in row
    assert {"pallas_scan", "pallas_unrolled", "copy_driver"} < set(row)


def test_everything_that_is_known_of_a_subject_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = measure.timed(Subject(clock.run, 8, {"launches": 1.0}, alone=clock.run), 2, True)
    assert (times["median_us"], times["launches"], times["kernel"]) == (5.0, 1.0, None)
    assert times["kernel_reason"]
    assert times["latency"]["median_us"] == pytest.approx(740)
    times = measure.timed(Subject(clock.run, 8), 2, False)
    assert not {"wall", "latency", "kernel"} & set(times)


def test_a_kind_of_subject_is_a_whole_name_or_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"pallas": 1.0, "launch_per_group": 2.0, "lists_per_layer": 3.0, "copy_driver": 4.0, "copykat": 5.0}
    makers = fixed(monkeypatch, times)
    for only, names in ((("lists_per_layer", "copy"), ["lists_per_layer", "copy_driver"]), (("pallas",), ["pallas"])):
        row = measure.fill(measure.identity("rollback", SPEC, 4), makers, measure.Options([4], only=only))
        assert [name for name in times if name in row] == names
        assert set(only) <= set(SUBJECTS)


def test_arrays_that_do_not_fit_fail_their_own_points_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "random_cache", lambda spec: exhausted())
    rows = list(measure.measure("step", SPEC, measure.Options([1, 4])))
    assert [(row["batch"], row["errors"]) for row in rows] == [
        (batch, {"arrays": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}) for batch in (1, 4)
    ]
    assert "pallas" not in json.dumps(rows)


@pytest.mark.parametrize("found", [False, None])
def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch, found: bool | None) -> None:
    monkeypatch.setattr(measure, "_rows", lambda *arguments: [{"operation": "timed"}])
    monkeypatch.setattr(comparing, "check", lambda point: exhausted() if found is None else found)
    (row,) = measure.measure("verify", SPEC, measure.Options([1], check=True))
    why = {False: "results differ from the XLA form", None: "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}[found]
    assert row["errors"] == {"check": why}
    monkeypatch.setattr(comparing, "check", lambda point: True)
    assert list(measure.measure("verify", SPEC, measure.Options([1], check=True))) == [{"operation": "timed"}]


def test_scaling_changes_one_size_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def rows(operation: str, spec: ConvCacheSpec, batches: list[int], options: measure.Options) -> Any:
        seen.append((operation, spec, batches, options.only))
        yield measure.identity(operation, spec, *batches)

    monkeypatch.setattr(measure, "_rows", rows)
    got = list(measure.measure("scaling", SPEC, measure.Options([1])))
    assert {row["operation"] for row in got} == {"scaling"}
    assert [row["of"] for row in got] == ["commit", "verify"] * 9
    assert [row["conv_dim"] for row in got[::2]] == [1024, 2048, 4096, 8192, 16384, *[128] * 4]
    assert [row["num_slots"] for row in got[::2]] == [*[11] * 5, 64, 512, 2048, 8192]
    assert [row["over"] for row in got[::2]] == ["conv_dim"] * 5 + ["num_slots"] * 4
    assert {(tuple(batches), only) for _, _, batches, only in seen} == {
        ((11,), ("pallas", "copy")),
        ((64,), ("pallas", "copy")),
    }
    assert {dataclasses.replace(spec, conv_dim=1, num_slots=1) for _, spec, _, _ in seen} == {
        dataclasses.replace(SPEC, conv_dim=1, num_slots=1)
    }


@pytest.fixture
def makers_seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rows are not timed: (batch, calls by subject, arrays) of each point."""
    seen: list[Any] = []

    def fill(row: measure.Row, makers: measure.Makers, options: measure.Options) -> measure.Row:
        partials: dict[str, Any] = dict(makers)
        cases = {name: one.args for name, one in partials.items()}
        calls = {name: next((a.calls for a in args if isinstance(a, Case)), None) for name, args in cases.items()}
        seen.append((row["batch"], calls, {name: args[-2] for name, args in cases.items() if name == "pallas"}))
        return row

    monkeypatch.setattr(measure, "fill", fill)
    return seen


@pytest.mark.parametrize("torch_installed", [False, True])
def test_points_of_a_rollback(monkeypatch: Any, makers_seen: list[Any], torch_installed: bool) -> None:
    """Conv groups, then with recurrent state; the arrays of either are made once, and freed before the other's."""
    made: list[Any] = []
    monkeypatch.setattr(measure, "_has_torch", lambda: torch_installed)
    monkeypatch.setattr(
        rollback, "random_arrays", lambda spec, recurrent: made.append(recurrent) or ("arrays", recurrent)
    )
    monkeypatch.setattr(rollback, "torch_arrays", lambda spec, recurrent: made.append("torch") or ("twin", recurrent))
    rows = list(measure.measure("rollback", rollback.model_spec("bfloat16", "time_major"), measure.Options([1])))
    assert made == ([False, "torch", True, "torch"] if torch_installed else [False, True])
    points = [(row["recurrent"], row["track"], row["batch"]) for row in rows]
    assert points == list(itertools.product((False, True), (False, True), (1, 16, 64)))
    more = ["triton", "copy_driver", "copy_kernel"] if torch_installed else []
    for (batch, calls, arrays), row in zip(makers_seen, rows, strict=True):
        lists = ["lists_per_layer"] if not (row["recurrent"] or row["track"]) else []
        xla = ["xla"] if not row["recurrent"] else []
        assert list(calls) == ["pallas", "launch_per_group", *lists, *xla, *more]
        assert batch == row["batch"]
        assert arrays == {"pallas": ("arrays", row["recurrent"])}
        assert calls.get("xla", 10) <= 10
    assert {row["model"] for row in rows} == {"Kimi-Linear-48B-A3B"}
    assert [calls["pallas"] for _, calls, _ in makers_seen] == [32, 23, 6, 32, 12, 3, 13, 2, 2, 7, 2, 2]


def test_points_of_a_prefill(monkeypatch: Any, makers_seen: list[Any]) -> None:
    monkeypatch.setattr(measure, "_has_torch", lambda: True)
    monkeypatch.setattr(subjects, "random_cache", lambda spec: "cache")
    spec = get_preset("Qwen3.5-35B-A3B").spec(num_slots=746, max_requests=256, num_draft_tokens=4)
    rows = list(measure.measure("prefill", spec, measure.Options([1])))
    assert [(row["batch"], row["tokens"]) for row in rows] == [(1, 512), (4, 512), (32, 128), (1, 8192), (8, 2048)]
    for _, calls, arrays in makers_seen:
        assert list(calls) == ["pallas", "xla", "pallas_continued", "xla_continued", "copy_driver", "copy_kernel"]
        assert (arrays, calls["pallas_continued"]) == ({"pallas": "cache"}, calls["pallas"])
        assert calls["xla"] == calls["xla_continued"] == min(10, calls["pallas"])
    assert [calls["pallas"] for _, calls, _ in makers_seen] == [30, 16, 8, 4, 2]


@pytest.mark.parametrize("torch_installed", [False, True])
def test_points_of_drafts(monkeypatch: Any, makers_seen: list[Any], torch_installed: bool) -> None:
    """Every design at every batch that has slots enough, with a row of the buffer for each request."""
    monkeypatch.setattr(measure, "_has_torch", lambda: torch_installed)
    spec = get_preset("Qwen3.5-35B-A3B").spec(num_slots=100, max_requests=256, num_draft_tokens=4)
    rows = list(measure.measure("drafts", spec, measure.Options([7])))
    kinds = [(of, design) for of, designs in drafts.DESIGNS.items() for design in designs]
    points = [(row["batch"], row["of"], row["design"]) for row in rows]
    assert points == [(batch, *kind) for batch in (1, 64, 100) for kind in kinds]
    columns = [17, 15, 11, 11, 17, 14, 23, 21, 17, 17, 14]
    assert [row["columns"] for row in rows] == columns * 3
    layers = [1] * 6 + [30] * 5
    assert [row["bytes"] for row in rows[:11]] == [
        8192 * 2 * one * number for one, number in zip(columns, layers, strict=True)
    ]
    more = ["copy_driver", "copy_kernel"] if torch_installed else []
    for row, (batch, calls, arrays) in zip(rows, makers_seen, strict=True):
        assert list(calls) == ["pallas", *more]
        case = arrays["pallas"]
        assert (case.batch, case.spec.max_requests, case.spec.num_slots) == (batch, batch, 100)
        assert case.spec.storage == ("sliding" if row["design"].startswith("sliding") else "inputs")
    assert "sliding_ratio" not in rows[0]


def test_a_design_is_over_sliding_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A design that fails has no ratio, and where sliding fails no other has one."""
    times = {"sliding": 4.0, "inputs": None, "kept": 3.0, "kept_tree": 3.2, "sliding_resumed": 5.0, "kept_resumed": 2.0}
    times_seen: list[Any] = []

    def makers(case: Case, design: str, of: str) -> measure.Makers:
        us = None if (of, design, case.batch) == ("step", "sliding", 5) else times[design]
        return {"pallas": exhausted if us is None else lambda: Subject(print, 1, {"median_us": us * len(of)})}

    monkeypatch.setattr(drafts, "BATCHES", (1, 5))
    monkeypatch.setattr(measure, "drafts_makers", makers)
    monkeypatch.setattr(measure, "_release", lambda: None)  # there is nothing to, and it takes its time
    monkeypatch.setattr(measure, "timed", lambda subject, *of: times_seen.append(of) or dict(subject.facts))
    rows = list(measure.measure("drafts", SPEC, measure.Options([1])))
    assert set(times_seen) == {(5, False)}
    ratios = [row.get("sliding_ratio") for row in rows]
    of_verify, of_step = [1.0, None, 0.75, 0.8, 1.25, 0.5], [1.0, None, 0.75, 1.25, 0.5]
    assert ratios == [*of_verify, *of_step, *of_verify, *[None] * 5]
    assert measure.line(rows[8]) == "drafts time_major D=4 B=1 step kept  0.750 of sliding  pallas 12.00"
    assert rows[1]["errors"] == {"pallas": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}


def test_a_line_says_which_of_an_operations_points_it_is() -> None:
    of_rollback = measure.identity("rollback", HYBRID, 4) | {"recurrent": True, "track": True}
    of_prefill = measure.identity("prefill", SPEC, 4) | {"tokens": 512, "xla": {"median_us": 3.0}}
    assert measure.line(of_rollback) == "rollback time_major D=4 B=4 conv, recurrent, tracked"
    assert measure.line(of_prefill) == "prefill time_major D=4 B=4 T=512  xla 3.00"


def test_programs_are_rows_and_one_that_fails_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(plan: compiling.Program, implementation: Any) -> dict[str, Any]:
        assert implementation == "pallas"
        if plan.form == "unrolled":
            exhausted()
        return {"compile_s": 1.0, "trace_s": 0.5, "launches": 31.0, "temp_bytes": 7, "pool_copies": []}

    monkeypatch.setattr(compiling, "compiled", compiled)
    rows = list(measure.measure("compile", SPEC, measure.Options([1])))
    assert {row["form"] for row in rows if "errors" in row} == {"unrolled"}
    facts = "trace 0.50 s  compile 1.00 s  launches 31  temp 7 bytes  pool copies none"
    assert measure.line(rows[5]) == f"compile time_major D=4 B=11 scan L=8  {facts}"
    assert measure.line(rows[-1]).startswith("compile time_major D=4 B=11 larger step L=3 no command buffers  trace")


# --- what is timed ----------------------------------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    """K = 4, D = 4: three columns of state and four inputs in, four outputs and six columns of the row out."""
    case = Case(spec_of(4, 4, num_layers=3, conv_dim=128), 5, 1)
    assert case.verify_bytes == 5 * 17 * 128 * 2
    assert case.commit_bytes == 3 * 5 * 2 * 3 * 128 * 2
    assert case.step_bytes == 3 * case.verify_bytes + case.commit_bytes


def test_bytes_of_a_rollback_and_a_prefill_by_hand() -> None:
    """Kimi-Linear: 20 layers, three columns of 3·4096 channels, 2 MiB of state; and T + K-1 columns."""
    spec = rollback.model_spec("bfloat16", "time_major")
    assert (spec.num_layers, spec.num_slots, spec.max_requests, spec.num_draft_tokens) == (20, 160, 64, 4)
    assert rollback.group_spec(spec).conv_dim == 4096
    assert rollback.state_entry(spec) == (32, 128, 128)
    (heads,) = {part.num_heads for part in get_preset(rollback.MODEL).parts}
    assert heads == 32
    conv, state = 20 * 5 * 2 * 3 * 3 * 4096 * 2, 20 * 5 * 2 * 2 * 2**20
    for recurrent, track in itertools.product((False, True), (False, True)):
        case = rollback.Case(spec, 5, 1, recurrent=recurrent, track=track)
        assert case.rollback_bytes == (conv + recurrent * state) * (1 + track)
    case = prefill.Case(spec_of(4, 4, num_layers=3, conv_dim=128), 5, 1, tokens=512)
    assert case.prefill_bytes == 5 * 2 * (512 + 3) * 128 * 2


def test_the_calls_of_a_run_move_a_gigabyte() -> None:
    assert [subjects.distinct_calls(2**20 * size, 30) for size in (1, 35, 100, 512, 1500)] == [30, 30, 11, 2, 2]


def test_tracked_slots_are_not_committed_ones() -> None:
    """C = 7 and B = 3: both sets together are six different slots; the rows take turns."""
    case = rollback.Case(HYBRID, 3, 8, track=True)
    calls = rollback.index_sets(case, 8)
    for one in calls:
        assert len({*one["state_indices"].tolist(), *one["track_indices"].tolist()} & set(range(7))) == 6
    assert [one["window_rows"].tolist() for one in calls[:3]] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]
    for name in ("num_accepted_tokens", "track_num_tokens"):
        assert {n for one in calls for n in one[name]} == {1, 2, 3, 4}
    assert {array.dtype for one in calls for array in one.values()} == {np.dtype(np.int32)}
    assert set(rollback.index_sets(dataclasses.replace(case, track=False), 1)[0]) == {
        "state_indices", "num_accepted_tokens", "window_rows",
    }  # fmt: skip


def test_index_sets_rotate() -> None:
    slots, rows, accepted = subjects.index_sets(Case(SPEC, 4, 5), 5)
    assert all(len(set(one)) == 4 and max(one) < 11 and min(one) >= 0 for one in slots)
    assert [one.tolist() for one in rows[:3]] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert {n for one in accepted for n in one} == {1, 2, 3, 4}
    _, _, accepted = subjects.index_sets(Case(SPEC, 4, 5, "all"), 5)
    assert {n for one in accepted for n in one} == {4}


@both_orders
def test_a_looped_subject_makes_every_call(axis_order: Any) -> None:
    """What the timed commits and verifies leave behind is what one call after another leaves."""
    spec = dataclasses.replace(SPEC, axis_order=axis_order)
    cache, case = subjects.random_cache(spec), Case(spec, 2, 3)
    seen = []

    def looped(body: Any, carried: Any, arguments: Any, calls: int) -> Subject:
        seen.append((jax.jit(body)(carried, *arguments), calls))
        return Subject(print, calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subjects, "looped", looped)
        subjects.jax_commit(case, cache, "xla")
        subjects.jax_verify(case, cache, "xla")
    (pool, commits), ((windows, outputs), verifies) = seen
    assert (commits, verifies) == (3, 3)
    slots, rows, accepted = subjects.index_sets(case, 3)
    expected = np.array(cache.conv_state)
    source = np.asarray(cache.conv_windows)
    swap = (lambda a: a) if axis_order == "time_major" else (lambda a: a.swapaxes(-1, -2))
    for call, b in itertools.product(range(3), range(2)):
        n = accepted[call][b]
        expected[:, slots[call][b]] = swap(swap(source[:, rows[call][b]])[..., n - 1 : n + 2, :])
    assert_same_bits(np.asarray(pool), expected)
    (step_slots,), (step_rows,), _ = subjects.index_sets(case, 1)
    x, _ = subjects.verify_inputs(case, 3)
    for layer, b in itertools.product(range(3), range(2)):
        row = swap(np.asarray(windows)[layer, step_rows[b]])
        state = swap(np.asarray(cache.conv_state)[layer, step_slots[b]])
        assert_same_bits(row, np.concatenate([state[1:], np.asarray(x[layer])[b]]))
    assert all(np.asarray(y).any() for y in outputs)


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads of 16 channels instead of one of 128: an eighth of the recurrent state."""
    monkeypatch.setattr(rollback, "HEAD_CHANNELS", 16)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each looped subject leaves after one round of its calls, and the number of them."""
    seen: list[Any] = []

    def looped(body: Any, carried: Any, arguments: Any, calls: int) -> Subject:
        seen.append((jax.jit(body)(carried, *arguments), calls))
        return Subject(print, calls)

    monkeypatch.setattr(subjects, "looped", looped)
    return seen


@pytest.mark.parametrize(
    ("form", "axis_order"),
    [
        ("pallas", "time_major"),
        ("pallas", "channel_major"),
        ("launch_per_group", "channel_major"),
        ("lists_per_layer", "time_major"),
    ],
)
@pytest.mark.usefixtures("small_heads")
def test_the_timed_rollbacks_make_every_call(bodies: list[Any], axis_order: Any, form: str) -> None:
    """Every pool after three calls is what the windows and step states say, whatever the form."""
    spec = dataclasses.replace(HYBRID, axis_order=axis_order)
    for recurrent in (False, True):
        case = rollback.Case(spec, 3, 3, recurrent=recurrent, track=recurrent)
        if form not in rollback.forms(case):
            assert (form, recurrent, case.track) == ("lists_per_layer", True, True)
            continue
        cache, steps = rollback.random_arrays(spec, recurrent)
        rollback.jax_rollback(form, case, (cache, steps), "xla")
        got, calls = bodies.pop()
        assert calls == 3
        for part, group in cache.conv.items():
            expected, windows = np.array(group.conv_state), np.asarray(group.conv_windows)
            for one in rollback.index_sets(case, 3):
                for slot, row, n in committed(one):
                    columns = np.arange(n - 1, n + 2)
                    expected[:, slot] = windows[:, row].take(columns, axis=1 if axis_order == "time_major" else 2)
            pools = got.conv[part] if form == "lists_per_layer" else [got.conv[part]]
            pool = np.stack([np.asarray(one.conv_state) for one in pools]).reshape(expected.shape)
            assert_same_bits(pool, expected, part)
        if recurrent:
            expected = np.array(cache.recurrent_state)
            for one in rollback.index_sets(case, 3):
                for slot, row, n in committed(one):
                    expected[:, slot] = np.asarray(steps)[:, row, n - 1]
            assert_same_bits(np.asarray(got.recurrent_state), expected)


def committed(indices: dict[str, np.ndarray]) -> list[tuple[int, int, int]]:
    """(slot, row, count) of every destination of one call."""
    rows = indices["window_rows"].tolist()
    sets = [("state_indices", "num_accepted_tokens"), ("track_indices", "track_num_tokens")]
    return [
        one
        for slots, counts in sets
        if slots in indices
        for one in zip(indices[slots].tolist(), rows, indices[counts].tolist(), strict=True)
    ]


@pytest.mark.usefixtures("small_heads")
def test_each_form_launches_what_it_says(bodies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel launches of one call, counted where the kernels are started."""
    from jax_impl import commit

    launches: list[int] = []
    launch = commit._launch
    monkeypatch.setattr(
        commit, "_launch", lambda call, groups, **more: launches.append(len(groups)) or launch(call, groups, **more)
    )
    expected = {
        (False, "pallas"): [3],
        (False, "launch_per_group"): [1, 1, 1],
        (False, "lists_per_layer"): [6],
        (True, "pallas"): [4],
        (True, "launch_per_group"): [1, 1, 1, 1],
    }
    for (recurrent, form), groups in expected.items():
        arrays = rollback.random_arrays(HYBRID, recurrent)
        one, own = rollback.form_and_cache(form, arrays[0], "pallas_interpret")
        (indices,) = rollback.index_sets(rollback.Case(HYBRID, 3, 1, recurrent=recurrent), 1)
        jax.eval_shape(one, own, arrays[1], indices)
        assert launches == groups, form
        del launches[:]


@both_orders
def test_the_timed_prefills_make_every_call(bodies: list[Any], axis_order: Any) -> None:
    """Slots hold the last inputs; only the first K-1 tokens see whether a prompt continues."""
    spec = dataclasses.replace(SPEC, axis_order=axis_order)
    cache, case = subjects.random_cache(spec), prefill.Case(spec, 2, 3, tokens=7)
    for continued in (False, True):
        prefill.jax_prefill(case, cache, "xla", continued=continued)
    prefill.jax_prefill(case, jax.tree.map(jax.numpy.zeros_like, cache), "xla", continued=True)
    ((pool, fresh), calls), ((same_pool, carried), _), ((_, from_zeros), _) = bodies
    assert calls == 3
    x, weights = subjects.verify_inputs(case, 3, 7)
    largest = 4 * max(float(abs(one).max()) for one in x) * max(float(abs(one.taps).max()) for one in weights)
    rounding = (4 + 10) * 2.0**-23 * largest  # two programs' sums of K products and their activations
    np.testing.assert_allclose(fresh, from_zeros, rtol=0, atol=rounding)
    assert_same_bits(np.asarray(pool), np.asarray(same_pool))
    expected = np.array(cache.conv_state)
    slots, _, _ = subjects.index_sets(case, 3)
    for call in range(3):
        last = np.asarray(x[call])[:, -3:]
        expected[call, slots[call]] = last if axis_order == "time_major" else last.swapaxes(-1, -2)
        (new, old) = np.asarray(fresh[call]), np.asarray(carried[call])
        assert new.shape == (2, 7, 128)
        assert (new != old).any(axis=(0, 2)).tolist() == [True] * 3 + [False] * 4
    assert_same_bits(np.asarray(pool), expected)


@pytest.mark.parametrize(
    ("design", "axis_order"),
    [
        ("sliding", "time_major"),
        ("kept", "channel_major"),
        ("sliding_resumed", "channel_major"),
        ("kept_resumed", "time_major"),
    ],
)
def test_the_timed_designs_make_every_call(bodies: list[Any], axis_order: Any, design: str) -> None:
    """What a round leaves by hand: the last columns of state and accepted inputs, and what a row holds."""
    spec = drafts.design_spec(dataclasses.replace(SPEC, num_layers=2, axis_order=axis_order), design, 5)
    case = Case(spec, 5, 1)
    columns = lambda a: np.asarray(a if axis_order == "time_major" else a.swapaxes(-1, -2))  # noqa: E731
    (caches, _), (x, _, slots, counts, _) = drafts.inputs(case, design)
    pool, windows, *before = [columns(one) for one in caches if one is not None]
    old, given = pool[:, slots], windows if x is None else np.stack(x)

    def after(start: np.ndarray, more: np.ndarray) -> np.ndarray:
        accepted = [np.concatenate([start[:, b], more[:, b, :n]], axis=1)[:, -3:] for b, n in enumerate(counts)]
        return np.stack(accepted, axis=1)

    state, row = {
        "sliding": lambda: (after(old, given), np.concatenate([old[:, :, 1:], given], axis=2)),
        "kept": lambda: (after(old, given), given),
        "sliding_resumed": lambda: (
            old,
            np.concatenate([after(windows[:, :, :2], windows[:, :, 2:])[:, :, 1:], given], axis=2),
        ),
        "kept_resumed": lambda: (after(after(old, *before), given), given),
    }[design]()
    drafts.jax_rounds(design, "step", case, "xla")
    ((((got, buffer, *_), outputs), calls),) = bodies
    assert calls == (2 if design == "kept_resumed" else 1)
    assert_same_bits(columns(got)[:, slots], state)
    assert_same_bits(columns(buffer), row)
    assert len(outputs) == 2
    assert all(np.asarray(y).any(axis=(1, 2)).all() for y in outputs)


def test_a_designs_verifies_are_one_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: the pool is what it was, unless the verify itself moves it on."""
    inputs = drafts.inputs
    monkeypatch.setattr(drafts, "inputs", lambda *of: jax.eval_shape(lambda: inputs(*of)))
    for design in ("kept_tree", "sliding_resumed", "kept_resumed"):
        made: list[Any] = []

        def looped(body: Any, *of: Any, made: list[Any] = made) -> None:
            made.append((str(jax.make_jaxpr(body)(*of[0:1], *of[1])), of[2]))

        monkeypatch.setattr(subjects, "looped", looped)
        for of in ("verify", "step"):
            drafts.jax_rounds(design, of, Case(drafts.design_spec(SPEC, design, 5), 5, 1), "xla")
        (verifies, calls), (whole, steps) = made
        assert (calls, steps) == ((6, 2) if design == "kept_resumed" else (3, 1))
        assert (verifies == whole) == design.endswith("_resumed")


def test_copies_of_a_design_are_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each verify and one for the commit, timed on the device only."""
    seen: list[Any] = []
    monkeypatch.setattr(
        subjects, "torch_copies", lambda *of, **more: seen.append((of, more)) or Subject(print, 1, alone=print)
    )
    column = 5 * 128 * 4
    cases: tuple[tuple[str, drafts.Of, list[int]], ...] = (
        ("sliding", "step", [17] * 3 + [3 * 6]),
        ("kept", "step", [11] * 3 + [3 * 6]),
        ("kept_resumed", "step", [14] * 3),
        ("kept_resumed", "verify", [14] * 3),
    )
    for design, of, sizes in cases:
        spec = drafts.design_spec(SPEC, design, 5)
        subject = drafts.copies(Case(spec, 5, 1), design, of, kernel=True)
        ((made,), more) = seen.pop()
        assert made == [one * column for one in sizes]
        assert more == {"kernel": True, **({"steps": 1} if of == "step" else {})}
        if of == "step":
            assert sum(made) == drafts.moved_bytes(spec, design, of, 5)
            assert subject.alone is None


@pytest.mark.parametrize("form", step.TIMED)
def test_the_timed_step_runs_looped_and_alone(form: Any) -> None:
    cache = subjects.random_cache(SPEC)
    before = np.asarray(cache.conv_state).copy()
    subject = step.jax_step(form, Case(SPEC, 2, 1, "all"), cache, "xla")
    assert subject.alone is not None
    for run in (subject.run, subject.alone):
        run(1)
        run(2)
    assert subject.calls == subjects.LOOPS
    assert subject.facts["alias_bytes"] >= SPEC.state_bytes + SPEC.windows_bytes
    assert_same_bits(np.asarray(cache.conv_state), before)  # a copy of it was donated


@both_orders
def test_a_whole_step_is_verifies_then_a_commit(axis_order: Any) -> None:
    """Both forms, all of D accepted: the pool holds the last inputs of every layer."""
    spec = dataclasses.replace(SPEC, axis_order=axis_order)
    case, cache = Case(spec, 2, 1, "all"), subjects.random_cache(spec)
    (slots,), (rows,), (accepted,) = subjects.index_sets(case, 1)
    for form in step.FORMS:
        x, weight = step.inputs(form, case)
        run = jax.jit(step.whole_step(form, spec, "xla", stack_y=False))
        (pool, _), y = run((cache.conv_state, cache.conv_windows), x, weight, slots, rows, accepted)
        assert (y is None) == (form == "scan")
        got = np.asarray(pool)[:, slots]
        last = np.stack([np.asarray(one) for one in x])[:, :, 1:]
        assert_same_bits(got, last if axis_order == "time_major" else np.ascontiguousarray(last.swapaxes(-1, -2)))


@both_orders
def test_a_chained_step_hands_y_on(axis_order: Any) -> None:
    """It equals the unrolled step whose x is y of the layer before, and passes eight arrays a call."""
    spec = dataclasses.replace(SPEC, axis_order=axis_order)
    case, cache = Case(spec, 2, 1, "random"), subjects.random_cache(spec)
    indices = [one for (one,) in subjects.index_sets(case, 1)]
    caches = cache.conv_state, cache.conv_windows
    x, weight = step.inputs("chained", case)
    arguments = (caches, x, weight, *indices)
    unrolled, chained = (jax.jit(step.whole_step(form, spec, "xla", stack_y=False)) for form in ("unrolled", "chained"))
    every_x = [x] * spec.num_layers
    for layer in range(spec.num_layers):
        expected, y = unrolled(caches, every_x, weight, *indices)
        every_x[layer + 1 :] = [y[layer]] * (spec.num_layers - layer - 1)
    got, last = chained(*arguments)
    for one, other in zip((*expected, y[-1]), (*got, last), strict=True):
        assert_same_bits(np.asarray(other), np.asarray(one))
    assert not np.array_equal(np.asarray(y[0]), np.asarray(y[1]))
    assert len(jax.tree.leaves((arguments, last))) == 8


# --- torch, on the CPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_cpu(torch_ref: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch with its tensors on the CPU, and a CUDA graph that notes what is done with it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.setattr(subjects, "TORCH_DEVICE", "cpu")
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    class Capture:
        def __init__(self, graph: Graph, *, pool: Any, capture_error_mode: str) -> None:
            done.append(f"capture {capture_error_mode}")

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            if torch.bench_failures:
                raise torch.bench_failures.pop()
            done.append("captured")

    class Generator:
        device, initial_seed = "cpu", staticmethod(lambda: 7)

        def graphsafe_set_state(self, state: Any) -> None:
            done.append(f"generator {state.initial_seed()}")

    fakes = {
        "synchronize": lambda: done.append("wait"),
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "current_stream": lambda: "stream",
        "set_stream": done.append,
        "default_generators": [Generator()],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    fresh = type("Generator", (torch.Generator,), {"graphsafe_get_state": lambda self: self})
    monkeypatch.setattr(torch, "Generator", fresh)
    for name in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(
            torch._C, f"_cuda_{name}", lambda *of, name=name: done.append(f"{name} {of}"), raising=False
        )
    torch.bench_failures = []
    torch.bench_done = done
    yield torch
    del torch.bench_done, torch.bench_failures


def test_a_graph_is_warmed_up_captured_and_replayed(torch_cpu: Any) -> None:
    calls = []
    subject = subjects.replayed(calls.append, 4)
    assert calls == [0, 3, 0, 1, 2, 3]
    assert torch_cpu.bench_done == ["wait", "capture thread_local", "captured"]
    subject.run(2)
    assert torch_cpu.bench_done[3:] == ["replay", "replay", "wait"]
    assert (subject.calls, subject.facts, subject.alone) == (4, {"launches": 1.0}, None)
    subject = subjects.replayed(calls.append, 4, steps=1)
    assert (subject.calls, subject.facts, subject.alone) == (1, {"launches": 4.0}, subject.run)


UNDONE = ["stream", "wait", "endAllocateToPool (0, (0, 1))", "releasePool (0, (0, 1))", "generator 7"]


def test_a_capture_that_fails_is_tried_once_more(torch_cpu: Any) -> None:
    """What torch leaves behind is undone before; what the first attempt made is not kept."""
    torch_cpu.bench_failures = [RuntimeError("capture")]
    subject = subjects.replayed(lambda call: call, 3)
    assert torch_cpu.bench_done == [
        *["wait", "capture thread_local", *UNDONE],
        *["wait", "capture thread_local", "captured"],
    ]
    assert subject.keep[1] == [0, 1, 2]


def test_a_capture_that_fails_twice_is_recorded_and_undone(torch_cpu: Any) -> None:
    """The row says so, and nothing of it is left for the next subject."""
    torch_cpu.bench_failures = [RuntimeError("second"), RuntimeError("first")]
    row = measure.identity("commit", SPEC, 2)
    row = measure.fill(row, {"triton": lambda: subjects.replayed(lambda call: call, 3)}, measure.Options([2]))
    assert row["errors"] == {"triton": "RuntimeError: second"}
    assert torch_cpu.bench_done == ["wait", "capture thread_local", *UNDONE] * 2


@pytest.mark.parametrize("kernel", [False, True])
def test_copies_read_and_write_their_bytes_together(torch_cpu: Any, monkeypatch: Any, kernel: bool) -> None:
    made = []
    monkeypatch.setattr(
        subjects, "_copy_buffers", lambda *sizes, make=subjects._copy_buffers: made.append(make(*sizes)) or made[-1]
    )
    subject = subjects.torch_copies([1600, 1600, 800, 1600], kernel=kernel, steps=1)
    assert (subject.calls, subject.facts) == (1, {"launches": 4.0})
    by_row = {source[0].nbytes * 2: (source, target) for source, target in made}
    assert {size: len(source) for size, (source, _) in by_row.items()} == {1600: 3, 800: 1}
    for source, target in by_row.values():
        assert torch_cpu.equal(target, ~source if kernel else source)


@both_orders
def test_the_triton_step_is_that_of_jax(torch_cpu: Any, axis_order: Any) -> None:
    """`--check` compares Triton too: the same arrays give the same pool, buffer and y."""
    spec = ConvCacheSpec(2, 7, 4, 128, 4, 2, "float32", axis_order)
    cache = subjects.random_cache(spec)
    for operation in ("commit", "verify", "step"):
        point = comparing.Point(operation, spec, 2)
        expected = comparing._results(point, cache, "xla", "unrolled")
        got = comparing._triton_results(point, cache)
        assert set(got) == set(expected)
        bound = comparing._y_bound(point, cache, expected["y"]) if "y" in expected else None
        assert not comparing._differences(expected, got, bound)


@both_orders
def test_the_timed_triton_calls(torch_cpu: Any, monkeypatch: Any, axis_order: Any) -> None:
    """A step is the verifies of all layers in order, then the commit; the other two are one kind of call each."""
    spec = ConvCacheSpec(2, 7, 4, 128, 4, 2, "float32", axis_order)
    case, twin = Case(spec, 2, 3), subjects.torch_cache(spec)
    calls: list[Any] = []
    verify, commit = subjects.triton_verify, subjects.triton_commit
    monkeypatch.setattr(subjects, "triton_verify", lambda *a: calls.append(a[3]) or verify(*a))
    monkeypatch.setattr(subjects, "triton_commit", lambda *a: calls.append("commit") or commit(*a))
    assert step.torch_step(case, twin).calls == 1
    assert calls[2:] == [0, 1, "commit"]
    del calls[:]
    assert subjects.torch_verify(case, twin).calls == 3
    assert calls[2:] == [0, 1, 0]
    del calls[:]
    assert subjects.torch_commit(case, twin).calls == 3
    assert calls == ["commit"] * 5
    assert step.copies(case, kernel=False).facts == {"launches": 3.0}


@pytest.mark.usefixtures("small_heads")
@both_orders
def test_the_triton_rollback_is_that_of_jax(torch_cpu: Any, axis_order: Any) -> None:
    spec = dataclasses.replace(HYBRID, axis_order=axis_order)
    for recurrent in (False, True):
        arrays = rollback.random_arrays(spec, recurrent)
        case = rollback.Case(spec, 3, 1, recurrent=recurrent, track=True)
        expected = comparing._rollback_results("pallas", case, arrays, "xla")
        got = comparing._triton_rollback_results(case, arrays)
        assert set(got) == set(expected) == {*"qkv", *(["recurrent"] if recurrent else [])}
        assert not comparing._differences(expected, got, None)


def test_the_timed_triton_rollbacks(torch_cpu: Any, monkeypatch: Any) -> None:
    """Every call has index arguments of its own, and starts a kernel for each pool."""
    case = rollback.Case(HYBRID, 3, 2, recurrent=True, track=True)
    slots: list[Any] = []
    monkeypatch.setattr(
        rollback, "triton_rollback", lambda cache, steps, indices: slots.append(indices["track_indices"].tolist())
    )
    subject = rollback.torch_rollback(case, rollback.torch_arrays(HYBRID, True))
    assert (subject.calls, subject.facts) == (2, {"launches": 4})
    of_calls = [one["track_indices"].tolist() for one in rollback.index_sets(case, 2)]
    assert slots == [*of_calls, *of_calls]  # warmed up, then captured


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_heads")
def test_the_comparison_of_rollbacks_and_prefills(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """What is timed is what the interpreted kernels agree on; here in one axis order and two of the four kinds."""
    assert set(comparing.ROLLBACKS) == set(itertools.product((False, True), (False, True)))
    monkeypatch.setattr(comparing, "ROLLBACKS", ((False, False), (True, True)))
    for operation in ("rollback", "prefill"):
        (point,) = comparing.small(operation, "time_major")
        assert comparing.check(point)
    head = "check rollback time_major conv_dim=384 C=7 B=3"
    forms = ["pallas_interpret", "pallas_interpret launch_per_group", "pallas_interpret lists_per_layer"]
    expected = [f"{head} conv: {form}: same" for form in forms]
    expected += [f"{head} conv, recurrent, tracked: {form}: same" for form in forms[:2]]
    head = "check prefill time_major conv_dim=128 C=11 B=5"
    expected += [f"{head} pallas_interpret: same", f"{head} continued: pallas_interpret: same"]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_comparison_before_a_rollback_is_timed_is_small() -> None:
    """Two layers; slots for two index sets, and few of them: a slot's recurrent state is 4 MiB then."""
    spec = rollback.model_spec("bfloat16", "channel_major")
    point = comparing.reduced("rollback", spec)
    assert point.batch * 2 <= point.spec.num_slots < 40
    assert point.batch <= point.spec.max_requests
    sizes = {"num_layers": 20, "num_slots": 160, "max_requests": 64}
    assert dataclasses.replace(point.spec, **sizes) == spec
    assert point.spec.num_layers == 2


def with_one_bit_flipped(array: jax.Array) -> jax.Array:
    """The array with another last bit in its last element."""
    unsigned = {2: "uint16", 4: "uint32"}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, unsigned).ravel()
    other = bits.at[-1].set(bits[-1] ^ bits.dtype.type(1)).reshape(array.shape)
    return jax.lax.bitcast_convert_type(other, array.dtype)


@pytest.fixture
def wrong_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function whose interpreted kernel leaves its first result off by one bit or one part in fifty."""
    name = request.param
    for module in (comparing, step, rollback):
        if not hasattr(module, name):
            continue
        original = getattr(module, name)

        def off(*arguments: Any, implementation: Any, original: Any = original, **options: Any) -> Any:
            result = original(*arguments, implementation="xla", **options)
            if implementation == "xla":
                return result
            if name.startswith("causal_conv1d"):
                return result[0] * jax.numpy.bfloat16(1.02), result[1]
            (first, *others), structure = jax.tree.flatten(result)
            return structure.unflatten([with_one_bit_flipped(first), *others])

        monkeypatch.setattr(module, name, off)


@pytest.mark.parametrize(
    ("operation", "wrong_kernel", "wrong", "lines"),
    [
        ("commit", "commit_conv_state", "pool", 1),
        ("verify", "causal_conv1d_verify", "y", 1),
        ("step", "commit_conv_state", "pool", 2),
        ("step", "causal_conv1d_verify", "y", 2),
        ("prefill", "causal_conv1d_prefill", "y", 2),
        ("rollback", "commit_after_verify", "k(, q, v)?", 2),
        ("rollback", "commit_recurrent_state", "recurrent", 1),
    ],
    indirect=["wrong_kernel"],
)
@pytest.mark.usefixtures("wrong_kernel", "small_heads")
def test_a_wrong_kernel_is_found(capsys: Any, monkeypatch: Any, operation: str, wrong: str, lines: int) -> None:
    monkeypatch.setattr(comparing, "ROLLBACKS", ((True, True),))
    (point,) = comparing.small(operation, "time_major")
    assert not comparing.check(point)
    said = capsys.readouterr().out.splitlines()
    different = [line for line in said if ": DIFFERENT " in line]
    assert len(different) == lines
    assert all(re.fullmatch(wrong, line.split(": DIFFERENT ")[1]) for line in different)
    assert all("pallas_interpret" in line for line in different)
    fine = [line.split()[-3:-1] for line in said if line.endswith(": same") and operation == "step"]
    assert fine == ([["xla", "scan:"], ["pallas_interpret", "chained:"]] if operation == "step" else [])


def test_wrong_designs_are_found(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are ignored, by the XLA form too, and y of a step that resumes is off by one part in fifty in the other."""
    verify, commit = drafts.causal_conv1d_verify, drafts.commit_conv_state

    def wrong(*arguments: Any, implementation: str, parents: Any, **options: Any) -> Any:
        rootless = None if parents is None else jax.numpy.full_like(parents, -1)
        y, *others = verify(*arguments, implementation="xla", parents=rootless, **options)
        off = implementation != "xla" and options["resume_tokens"] is not None
        return y * jax.numpy.bfloat16(1.02) if off else y, *others

    monkeypatch.setattr(drafts, "causal_conv1d_verify", wrong)
    for module in (comparing, drafts):
        monkeypatch.setattr(
            module, "commit_conv_state", lambda *of, implementation, **more: commit(*of, implementation="xla", **more)
        )
    monkeypatch.setattr(drafts, "DESIGNS", {"verify": ("kept_tree", "kept_resumed")})
    point = comparing.Point("drafts", ConvCacheSpec(1, 7, 1, 128, 4, 3, axis_order="channel_major"), 4)
    assert not comparing.check(point)
    said = [line.partition("B=4 ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "kept_tree: pallas_interpret: same",
        "kept_tree as kept: pallas_interpret: DIFFERENT y",
        "kept_resumed: pallas_interpret: DIFFERENT y",
        "kept_resumed as two commits: pallas_interpret: DIFFERENT y",
    ]


@pytest.mark.long
@both_orders
def test_the_comparison_of_designs(capsys: pytest.CaptureFixture[str], axis_order: Any) -> None:
    (point,) = comparing.small("drafts", axis_order)
    assert comparing.check(point)
    head = f"check drafts {axis_order} conv_dim=128 C=11 B=5"
    resumed = [name for one in ("sliding", "kept") for name in (f"{one}_resumed", f"{one}_resumed as two commits")]
    names = ("sliding", "inputs", "kept", "kept_tree", "kept_tree as kept", *resumed)
    expected = [f"{head} {name}: pallas_interpret: same" for name in names]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_program_with_a_copy_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"alias_bytes": 9, "state_bytes": 9, "pool_copies": ["copy"]}
    monkeypatch.setattr(compiling, "compiled", lambda plan, implementation: row)
    (point,) = comparing.small("compile", "time_major")
    assert not comparing.check(point)
    assert "larger step L=2, XLA form: NOT IN PLACE: ['copy']" in capsys.readouterr().out
    row["pool_copies"] = []
    assert comparing.check(point)
