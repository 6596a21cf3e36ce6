"""The command line: what it prints, what it refuses, and that the demo fails when the system does."""

import csv
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_impl.commit
import jax_impl.conv
from jax_impl import checks, demo
from jax_impl.__main__ import PLAN_COLUMNS, main
from jax_impl.bench import comparing, measure, report
from jax_impl.model import decode, example
from jax_impl.presets import PRESETS, get_preset

ROOT = Path(__file__).parents[1]
SMALL = ["demo", "--model", "LFM2-1.2B", "--requests", "3", "--steps", "6"]  # one step with each kind of padding


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jax_impl", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def refused(capsys, *arguments):
    """The last line that a refused command prints."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()[-1]


# ---- plan ------------------------------------------------------------------------------------------------------------


def plan(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_plan_of_the_published_settings(capsys):
    (row,) = plan(capsys, "--model", "qwen3.5-0.8b")["rows"]
    assert row == {
        "model": "Qwen3.5-0.8B",
        "kind": "GDN",
        "grade": "A",
        "tp": 1,
        "num_layers": 18,
        "conv_dim": 6144,
        "width": 4,
        "state_len": 3,
        "num_draft_tokens": 4,
        "dtype": "bfloat16",
        "slot_bytes": 663_552,
        "dense_row_bytes": 2_654_208,
        "sliding_row_bytes": 1_327_104,
        "inputs_row_bytes": 884_736,
        "saving": 2.0,
        "dense_rows_per_gib": 404,
        "sliding_rows_per_gib": 809,
        "inputs_rows_per_gib": 1213,
        "max_requests": 17,
        "dense_windows_bytes": 45_121_536,
        "sliding_windows_bytes": 22_560_768,
        "inputs_windows_bytes": 15_040_512,
    }
    (row,) = plan(capsys, "--model", "Qwen3.5-35B-A3B", "--tp", "2", "--requests", "32")["rows"]
    assert (row["dense_row_bytes"], row["sliding_row_bytes"]) == (2_949_120, 1_474_560)
    assert (row["dense_windows_bytes"], row["sliding_windows_bytes"]) == (33 * 2_949_120, 33 * 1_474_560)


def test_plan_lists_the_designs_of_what_it_planned(capsys):
    """Every width, state and D once, in columns; the printed table has bytes where there is one geometry."""
    arguments = ("--model", "Qwen3.5-0.8B", "--draft-tokens", "4", "2")
    designs = plan(capsys, *arguments)["designs"]
    assert [(one["design"], one["num_draft_tokens"], one["slot_columns"], one["row_columns"]) for one in designs] == [
        ("dense", 4, 3, 12), ("sliding", 4, 3, 6), ("inputs", 4, 3, 4), ("wide slots", 4, 6, 0),
        ("slot groups", 4, 12, 0),
        ("dense", 2, 3, 6), ("sliding", 2, 3, 4), ("inputs", 2, 3, 2), ("wide slots", 2, 4, 0),
        ("slot groups", 2, 6, 0),
    ]  # fmt: skip
    both = plan(capsys, "--model", "LFM3-1.7B", "Kimi-K3", "Qwen3.5-0.8B", "--tp", "1", "2")["designs"]
    assert [(one["width"], one["state_len"]) for one in both] == [(7, 6)] * 5 + [(4, 3)] * 5
    assert main(["plan", *arguments]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "inputs 4 3 K-1 + D 663,552 + 884,736 663,552 + 442,368" in lines
    assert "wide slots 4 3 K+D-2 + 0 1,327,104 + 0 884,736 + 0" in lines
    assert main(["plan", "--model", "LFM3-1.7B", "Kimi-K3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "dense 7 6 K-1 + D(K-1) 6 + 24" in lines


def test_plan_takes_every_combination_in_order(capsys):
    names = ("--model", "Kimi-K3", "--model", "LFM3-1.7B", "Kimi-K3")
    rows = plan(capsys, *names, "--tp", "1", "2", "--draft-tokens", "1", "8")["rows"]
    seen = [(row["model"], row["tp"], row["num_draft_tokens"]) for row in rows]
    assert seen == [(model, tp, d) for model in ("Kimi-K3", "LFM3-1.7B") for tp in (1, 2) for d in (1, 8)]
    assert [row["saving"] for row in rows[:2]] == [1.0, 2.4]


def test_plan_of_everything_leaves_out_what_does_not_divide(capsys):
    result = plan(capsys, "--tp", "4")
    assert [row["model"] for row in result["left_out"]] == ["OLMo-Hybrid-7B"]
    assert "part q = 30 heads, got 4" in result["left_out"][0]["reason"]
    assert {row["model"] for row in result["rows"]} == {preset.name for preset in PRESETS} - {"OLMo-Hybrid-7B"}
    assert plan(capsys, "--model", "all")["rows"] == plan(capsys)["rows"]


def test_plan_of_an_explicit_geometry(capsys):
    geometry = ("--num-layers", "5", "--conv-dim", "96", "--width", "2")
    (row,) = plan(capsys, *geometry, "--tp", "3", "--dtype", "float32", "--state-len", "K")["rows"]
    assert (row["model"], row["conv_dim"], row["state_len"], row["dtype"]) == ("custom", 32, 2, "float32")
    assert (row["dense_row_bytes"], row["sliding_row_bytes"]) == (5 * 4 * 2 * 32 * 4, 5 * (4 + 2 - 1) * 32 * 4)
    (row,) = plan(capsys, *geometry)["rows"]
    assert row["saving"] == 1.0
    (row,) = plan(capsys, "--num-layers", "90", "--conv-dim", "999999937", "--width", "4")["rows"]
    assert row["sliding_rows_per_gib"] == 0


def test_plan_csv_is_the_json(capsys):
    arguments = ("--model", "all", "--tp", "1", "2", "--draft-tokens", "3", "5")
    expected = plan(capsys, *arguments)["rows"]
    done = run("plan", *arguments, "--csv")
    assert (done.returncode, done.stderr) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert rows == [{name: str(value) for name, value in row.items()} for row in expected]
    assert tuple(rows[0]) == tuple(expected[0]) == PLAN_COLUMNS


def test_plan_csv_and_json_need_neither_rich_nor_jax():
    code = (
        "import sys\n"
        "sys.modules['rich'] = sys.modules['jax'] = None\n"
        "from jax_impl.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def without(*arguments):
        return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)

    assert without("plan", "--csv").returncode == without("plan", "--json").returncode == 0
    assert without("plan", "--help").returncode == without("demo", "--help").returncode == 0
    for command in ("plan", "demo"):
        done = without(command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "error: tables need `rich`, which is not installed: pip install '.[cli]'. --json works without it.\n"
        )


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        (
            ("rich", "safetensors"),
            (),
            "tables need `rich`, checkpoints need `safetensors`, which are not installed: pip install '.[cli]'.",
        ),
        (
            ("rich", "safetensors"),
            ("--json",),
            "checkpoints need `safetensors`, which is not installed: pip install '.[cli]'.",
        ),
        (("safetensors",), (), "checkpoints need `safetensors`, which is not installed: pip install '.[cli]'."),
        (
            ("rich",),
            (),
            "tables need `rich`, which is not installed: pip install '.[cli]'. --json works without it.",
        ),
    ],
)
def test_demo_names_all_missing_packages_at_once(capsys, monkeypatch, missing, options, message):
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    assert main([*SMALL, *options]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_plan_table(capsys):
    assert main(["plan", "--model", "Qwen3.5-0.8B", "Kimi-K3", "--draft-tokens", "1", "4"]) == 0
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert (
        "Qwen3.5-0.8B GDN A 1 18 6144 4 1 663,552 663,552 663,552 221,184 1× 1,618 1,618 4,854 0.0105 0.0105 0.0035"
        in lines
    )
    assert (
        "Qwen3.5-0.8B GDN A 1 18 6144 4 4 663,552 2,654,208 1,327,104 884,736 2× 404 809 1,213 0.0420 0.0210 0.0140"
        in lines
    )
    kimi = "Kimi-K3 KDA A 1 69 36864 4 4 15,261,696 61,046,784 30,523,392 20,348,928 2× 17 35 52 0.9665 0.4833 0.3222"
    assert kimi in lines
    assert "GiB is 2^30 bytes" in printed


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "jax_impl", "plan", "--csv", "--draft-tokens", *map(str, range(1, 2000))],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plan", "--model", "Kimi-K33"),
            "argument --model: expected a published model, got 'Kimi-K33'. Close names: Kimi-K3.",
        ),
        (("plan", "--tp", "0"), "argument --tp: expected an integer from 1 to 10^9, got '0'."),
        (("plan", "--requests", "many"), "argument --requests: expected an integer from 1 to 10^9, got 'many'."),
        (
            ("plan", "--model", "Qwen3.5-0.8B", "--tp", "3"),
            "argument --tp: expected a divisor of part q = 16 heads, got 3. Every part is divided over the ranks "
            "separately; heads are not split. Model: Qwen3.5-0.8B.",
        ),
        (
            ("plan", "--model", "Kimi-K3", "--width", "4"),
            "argument --model: not allowed with --width. Give a model or a geometry.",
        ),
        (
            ("plan", "--conv-dim", "8"),
            "argument --conv-dim: a geometry needs --num-layers, --conv-dim, --width. Add --num-layers and --width, "
            "or give --model.",
        ),
        (
            ("plan", "--num-layers", "1", "--conv-dim", "8", "--width", "1"),
            "argument --width: expected an integer from 2 to 2^31-1, got 1.",
        ),
        (
            ("plan", "--num-layers", "1", "--conv-dim", "8", "--width", "4", "--tp", "3"),
            "argument --tp: expected a divisor of part conv_dim = 8 channels, got 3. Every part is divided over the "
            "ranks separately; channels are not split.",
        ),
        (("plan", "--json", "--csv"), "argument --csv: not allowed with argument --json"),
        (("demo", "--draft-tokens", "0"), "argument --draft-tokens: expected an integer from 1 to 10^9, got '0'."),
        (("demo", "--seed", "-1"), "argument --seed: expected an integer of at least 0, got '-1'."),
    ],
)
def test_bad_arguments_are_named_with_the_fix(capsys, arguments, message):
    assert refused(capsys, *arguments) == f"python -m jax_impl {arguments[0]}: error: {message}"


def test_help_and_missing_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "demo" in printed
    assert "plan" in printed
    assert "the following arguments are required: COMMAND" in refused(capsys)


def test_interruption_is_one_line_and_exit_code_130(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "simulate", interrupted)
    assert main([*SMALL, "--json"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoding(monkeypatch):
    """What the demo asks its second half for, which then says that all is well; `test_model_cli` runs it."""
    asked = []

    def run(implementation, storage):
        asked.append((implementation, storage))
        return example.Example(None, decode.Statistics(4), decode.Statistics(4), 200, 1, 1.0)

    monkeypatch.setattr(example, "run", run)
    return asked


def test_demo_in_a_process_of_its_own():
    done = run(*SMALL)
    assert done.returncode == 0, done.stderr
    assert "6 verify + commit steps left the same bits as the NumPy definition" in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "Qwen3.5-0.8B 1 17 4 0.0420 0.0210 2×" in lines
    assert "Qwen3.5-35B-A3B 2 33 4 0.0906 0.0453 2×" in lines
    assert "LFM2-1.2B, this run 1 4 4 0.0012 0.0008 1.6×" in lines
    assert "width 3 1 2 2 1×, no saving" in lines
    assert "width 2 16 16 16 1×, no saving" in lines
    assert "verify + commit" in done.stderr


@pytest.mark.parametrize("axis_order", ["time_major", "channel_major"])
@pytest.mark.parametrize("storage", ["sliding", "dense", "inputs"])
def test_demo_json(capsys, decoding, axis_order, storage):
    options = ("--axis-order", axis_order, "--storage", storage, "--draft-tokens", "2", "--seed", "5")
    assert main([*SMALL, *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert (result["ok"], result["mismatch"], result["steps"], result["seed"]) == (True, None, 6, 5)
    assert decoding == [(None, storage)]
    assert result["accepted_counts"] == {"0": 6, "1": 6, "2": 6}
    spec = result["spec"]
    assert (spec["axis_order"], spec["storage"], spec["num_layers"]) == (axis_order, storage, 10)
    assert (spec["conv_dim"], spec["max_requests"], spec["num_slots"]) == (2048, 4, 6)
    memory = result["memory"]
    assert [row["sliding_windows_bytes"] for row in memory["published"]] == [22_560_768, 48_660_480]
    assert memory["model"]["sliding_windows_bytes"] == 4 * 10 * 3 * 2048 * 2
    assert [row["saving"] for row in memory["saving"] if row["num_draft_tokens"] == 1] == [1.0, 1.0]


def test_demo_hands_its_options_on(capsys, monkeypatch, decoding):
    seen = []
    monkeypatch.setattr(demo, "simulate", lambda preset, spec, **options: seen.append((preset, spec, options)))
    options = ("--implementation", "pallas_interpret", "--seed", "9", "--dtype", "float16")
    assert main([*SMALL, *options, "--json"]) == 0
    ((preset, spec, options),) = seen
    assert (preset.name, spec.dtype, spec.num_draft_tokens) == ("LFM2-1.2B", "float16", 4)
    assert (options["implementation"], options["seed"], options["steps"]) == ("pallas_interpret", 9, 6)
    assert decoding == [("pallas_interpret", "sliding")]
    assert json.loads(capsys.readouterr().out)["implementation"] == "pallas_interpret"


@pytest.mark.thorough
def test_the_implementation_is_that_of_the_commit(monkeypatch):
    commit, seen = jax_impl.commit.commit_conv_state, set()

    def recorded(*arguments, implementation, **options):
        seen.add(implementation)
        return commit(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax_impl.commit, "commit_conv_state", recorded)
    assert main([*SMALL, "--implementation", "pallas_interpret", "--json"]) == 0
    assert seen == {"pallas_interpret"}


@pytest.mark.parametrize("options", [("--dtype", "float32"), ("--model", "RecurrentGemma-2B", "--dtype", "float16")])
@pytest.mark.usefixtures("decoding")
def test_demo_of_other_dtypes_and_kinds(capsys, options):
    assert main([*SMALL, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_the_demo_knows_every_implementation():
    assert demo.IMPLEMENTATIONS == checks.IMPLEMENTATIONS


def flip_one_bit(conv_state):
    """The pool with the lowest bit of layer 4, slot 2, column 1, channel 77 flipped."""
    from jax import lax
    from jax import numpy as jnp

    bits = lax.bitcast_convert_type(conv_state, jnp.uint16)
    bits = bits.at[4, 2, 1, 77].set(bits[4, 2, 1, 77] ^ jnp.uint16(1))
    return lax.bitcast_convert_type(bits, conv_state.dtype)


def test_one_wrong_bit_in_the_pool_fails_the_demo(capsys, monkeypatch):
    commit = jax_impl.commit.commit_conv_state

    def corrupted(*arguments, **options):
        return flip_one_bit(commit(*arguments, **options))

    monkeypatch.setattr(jax_impl.commit, "commit_conv_state", corrupted)
    assert main([*SMALL, "--json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert not result["ok"]
    found = result["mismatch"]
    assert (found["what"], found["against"]) == ("conv_state", "the NumPy definition")
    assert (found["step"], found["layer"], found["slot"], found["position"]) == (1, 4, 2, [1, 77])
    assert int(found["got"], 16) ^ int(found["expected"], 16) == 1
    assert found["message"] == (
        "`conv_state` differs from the NumPy definition after step 1: layer 4, slot 2, "
        f"n = {found['num_accepted_tokens']}, column 1, channel 77: "
        f"expected {found['expected']}, got {found['got']}."
    )
    assert main(SMALL) == 1
    assert f"FAILED: {found['message']}" in capsys.readouterr().err


def test_a_commit_that_keeps_one_token_too_few_fails_the_demo(capsys, monkeypatch):
    commit = jax_impl.commit.commit_conv_state

    def late(conv_state, conv_windows, state_indices, num_accepted_tokens, **options):
        return commit(conv_state, conv_windows, state_indices, num_accepted_tokens - 1, **options)

    monkeypatch.setattr(jax_impl.commit, "commit_conv_state", late)
    assert main([*SMALL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["mismatch"]["step"] == 1


@pytest.mark.parametrize("what", ["conv_state", "y"])
def test_a_one_token_step_that_differs_fails_the_demo(capsys, monkeypatch, what):
    update = jax_impl.conv.causal_conv1d_update

    def doubled(x, *arguments, **options):
        right, wrong = update(x, *arguments, **options), update(x + x, *arguments, **options)
        return (right[0], wrong[1]) if what == "conv_state" else (wrong[0], right[1])

    monkeypatch.setattr(jax_impl.conv, "causal_conv1d_update", doubled)
    assert main([*SMALL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["mismatch"]
    assert (found["against"], found["what"], found["step"]) == ("one-token decoding", what, 0)


@pytest.mark.parametrize("name", ["causal_conv1d_verify", "causal_conv1d_prefill"])
def test_a_wrong_output_fails_the_demo(capsys, monkeypatch, name):
    module = importlib.import_module(getattr(jax_impl, name).__module__)
    function = getattr(module, name)

    def swapped(x, conv_state, *arguments, **options):
        y, after = function(x, conv_state, *arguments, **options)
        return y[..., ::-1], after

    monkeypatch.setattr(module, name, swapped)
    assert main([*SMALL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["mismatch"]
    assert (found["what"], found["step"]) == ("y", int(name.endswith("verify")))


# ---- the demo's own definition ---------------------------------------------------------------------------------------


def test_batches_hold_every_count_and_every_kind_of_padding():
    spec = get_preset("LFM2-1.2B").spec(num_slots=8, max_requests=6, num_draft_tokens=4)
    rng = np.random.default_rng(3)
    live_slots = np.array([6, 1, 4, 3, 7])
    paddings = set()
    for step in range(1, 7):
        batch = demo.make_batch(rng, spec, live_slots, step)
        assert sorted(batch.accepted[batch.live]) == [0, 1, 2, 3, 4]
        assert sorted(batch.slots[batch.live]) == [1, 3, 4, 6, 7]
        assert sorted(batch.rows) == [0, 1, 2, 3, 4, 5]
        assert (batch.valid >= np.maximum(batch.accepted, 1)).all()
        assert (batch.valid <= 4).all()
        (padding,) = batch.slots[~batch.live]
        paddings.add(int(padding))
        assert (batch.accepted[~batch.live][0] == 0) == (padding == live_slots[0])
        assert batch.commits[~batch.live] == 0
    assert paddings == {0, -1, 8, 2**31 - 1, -(2**31), 6}


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_definition_by_hand(n):
    state = np.array([[[[90.0], [91.0]], [[10.0], [20.0]]]], np.float32)  # slot 0 is the null slot, slot 1 is live
    weight = np.array([[[100.0, 10.0, 1.0]]], np.float32)
    definition = demo.Definition(state.view(np.uint32), np.dtype(np.float32), weight, None, None)
    x = np.repeat(np.array([[1.0, 2.0, 3.0, 4.0], [7.0] * 4, [8.0] * 4], np.float32)[None, :, :, None], 1, 0)
    slots, rows, valid, accepted = np.array([[1, 0, 1], [0, 1, 2], [4, 4, 1], [n, 4, 0]], np.int32)
    batch = demo.Batch(x, slots, rows, valid, accepted, np.array([True, False, False]))
    result, scale = definition.advance(batch)
    assert result.y[0, 0, :, 0].tolist() == [1201.0, 2012.0, 123.0, 234.0]
    assert (result.y[0, 1] == 0).all()
    assert result.y[0, 2, :, 0].tolist() == [1208.0, 0.0, 0.0, 0.0]  # a padding row that repeats a live slot
    assert (scale == np.abs(result.y)).all()
    inputs = [10.0, 20.0, 1.0, 2.0, 3.0, 4.0]
    assert result.state_bits.view(np.float32)[0, :, :, 0].tolist() == [[90.0, 91.0], inputs[n : n + 2]]


# ---- what the library refuses, and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_option_that_the_library_refuses_is_one_line_and_exit_code_2(capsys, form):
    assert main([*SMALL, "--implementation", "pallas", *form]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        'error: `implementation`: expected an NVIDIA GPU for "pallas", got platform cpu. '
        'Use "pallas_interpret" to run the kernel on the CPU, or "xla".\n'
    )


def raising(error):
    """A stand-in for `simulate` that raises `error`."""

    def raises(*arguments, **options):
        raise error

    return raises


def test_several_mismatches_are_still_one_line(capsys, monkeypatch):
    monkeypatch.setattr(demo, "simulate", raising(ValueError("`a`: expected 1, got 2.\n`b`: expected 3, got 4.")))
    assert main([*SMALL, "--json"]) == 2
    assert capsys.readouterr() == ("", "error: `a`: expected 1, got 2. `b`: expected 3, got 4.\n")


def test_an_error_that_names_no_argument_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(demo, "simulate", raising(ValueError("operands could not be broadcast together")))
    with pytest.raises(ValueError, match="broadcast"):
        main([*SMALL, "--json"])


@pytest.mark.parametrize(
    ("options", "names", "sizes"),
    [
        (("--requests", "1000000000"), "argument --requests", "1000000000 requests and 4 draft tokens"),
        (("--draft-tokens", "1000000000"), "argument --draft-tokens", "16 requests and 1000000000 draft tokens"),
        (
            ("--requests", "5000", "--draft-tokens", "5000"),
            "arguments --requests, --draft-tokens",
            "5000 requests and 5000 draft tokens",
        ),
        (
            ("--model", "Kimi-K3", "--dtype", "float32", "--storage", "dense"),
            "argument --model",
            "16 requests and 4 draft tokens",
        ),
    ],
)
def test_a_demo_too_large_is_refused_before_it_allocates(capsys, monkeypatch, options, names, sizes):
    monkeypatch.setattr(demo, "simulate", raising(AssertionError("the run began")))
    message = refused(capsys, "demo", "--json", *options)
    assert message.startswith(
        f"python -m jax_impl demo: error: {names}: expected a run of at most 17,179,869,184 bytes (16 GiB), got "
    )
    assert f"{sizes}" in message


def test_the_bytes_of_a_demo_by_hand():
    spec = get_preset("LFM2-1.2B").spec(num_slots=6, max_requests=4, num_draft_tokens=4)
    pool, buffer = 10 * 6 * 2 * 2048 * 2, 10 * 4 * 5 * 2048 * 2
    assert demo.run_bytes(spec) == 8 * pool + buffer + 8 * 10 * 4 * 9 * 2048 * 4  # prompts have 9 tokens
    spec = get_preset("LFM2-1.2B").spec(num_slots=6, max_requests=4, num_draft_tokens=10, axis_order="channel_major")
    buffer = 10 * 4 * 11 * 2048 * 2
    assert demo.run_bytes(spec) == 10 * pool + buffer + 8 * 10 * 4 * 10 * 2048 * 4  # both results are transposed


@pytest.mark.usefixtures("decoding")
def test_the_limit_is_allowed_and_one_byte_more_is_not(capsys, monkeypatch):
    monkeypatch.setattr(demo, "simulate", lambda *arguments, **options: None)
    spec = get_preset("LFM2-1.2B").spec(num_slots=6, max_requests=4, num_draft_tokens=4)
    monkeypatch.setattr(demo, "MAX_RUN_BYTES", demo.run_bytes(spec))
    assert main([*SMALL, "--json"]) == 0
    monkeypatch.setattr(demo, "MAX_RUN_BYTES", demo.run_bytes(spec) - 1)
    capsys.readouterr()
    assert f"got {demo.run_bytes(spec):,} bytes" in refused(capsys, *SMALL, "--json")


@pytest.mark.usefixtures("decoding")
def test_the_default_demo_of_every_model_is_within_the_limit(capsys, monkeypatch):
    monkeypatch.setattr(demo, "simulate", lambda *arguments, **options: None)
    for preset in PRESETS:
        assert main(["demo", "--model", preset.name, "--json"]) == 0, preset.name


# ---- bench -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "gpu"])
def no_run(request, monkeypatch):
    """Both kinds of device, and a failure when anything is checked or measured."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    monkeypatch.setattr(comparing, "check", raising(AssertionError("the run began")))
    monkeypatch.setattr(measure, "measure", raising(AssertionError("the run began")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("comit",),
            "argument OPERATION: expected commit, verify, step, rollback, prefill, drafts, compile, scaling or all, "
            "got comit.",
        ),
        (
            ("all", "comit"),
            "argument OPERATION: expected commit, verify, step, rollback, prefill, drafts, compile, scaling or all, "
            "got comit.",
        ),
        (
            ("--preset", "Kimi-K33"),
            "argument --preset/--model: expected a published model, got 'Kimi-K33'. Close names: Kimi-K3.",
        ),
        (("--dtype", "int8"), "argument --dtype: invalid choice: 'int8' (choose from "),
        (("--tp", "0"), "argument --tp: expected an integer from 1 to 10^9, got '0'."),
        (
            ("--tp", "3"),
            "argument --tp: expected a divisor of part q = 16 heads, got 3. Every part is divided over the ranks "
            "separately; heads are not split. Model: Qwen3.5-35B-A3B.",
        ),
        (("--batch", "4", "0"), "argument --batch: expected an integer from 1 to 256, got '0'."),
        (("--batch", "257"), "argument --batch: expected an integer from 1 to 256, got '257'."),
        (("--batch", "many"), "argument --batch: expected an integer from 1 to 256, got 'many'."),
        (("--draft-tokens", "4", "0"), "argument --draft-tokens: expected an integer from 1 to 10^9, got '0'."),
        (("--repeats", "0"), "argument --repeats: expected an integer from 1 to 10^9, got '0'."),
        (("--slots", "0"), "argument --slots: expected an integer from 1 to 10^9, got '0'."),
        (("--subjects", "cuda"), "argument --subjects: invalid choice: 'cuda' (choose from "),
        (
            ("--plots", "folder"),
            "argument --plots: expected with --report. A run draws its plots beside its file, see --out.",
        ),
        (
            ("--batch", "4", "17", "8", "--slots", "16"),
            "argument --slots: expected at least the largest --batch, 17, got 16. Each request has a slot of its own.",
        ),
    ],
)
@pytest.mark.usefixtures("no_run")
def test_bench_refuses_bad_arguments_on_every_device(capsys, arguments, message):
    assert refused(capsys, "bench", *arguments).startswith(f"python -m jax_impl bench: error: {message}")


def point(operation, order, tokens, batch):
    """A point as `measure` yields it where torch is not installed."""
    return {
        "operation": operation, "axis_order": order, "num_draft_tokens": tokens, "width": 4, "conv_dim": 8192,
        "num_layers": 30, "num_slots": 746, "dtype": "bfloat16", "batch": batch, "bytes": 24,
        "pallas": {"median_us": 2.5}, "xla": {"median_us": 10.0},
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """A GPU that measures at once; returns what it was asked."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = []

    def rows(operation, spec, options):
        asked.append((operation, spec, options))
        for batch in options.batches:
            yield point(operation, spec.axis_order, spec.num_draft_tokens, batch)

    monkeypatch.setattr(measure, "measure", rows)
    return asked


BENCH = ("bench", "--axis-order", "time_major", "--batch", "1", "256", "--slots", "256")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("commit",), "commit"),
        (("verify", "commit"), "verify-commit"),
        (("commit", "verify", "--draft-tokens", "4"), "commit-verify"),
        (("commit", "verify", "--draft-tokens", "2", "8", "16"), "commit-verify-D2-8-16"),
        (("verify", "--draft-tokens", "4", "2"), "verify-D4-2"),
    ],
)
@pytest.mark.usefixtures("measured")
def test_bench_file_names(capsys, tmp_path, options, name):
    assert main([*BENCH, "--out", str(tmp_path / "new" / "folder"), *options]) == 0
    (path,) = (tmp_path / "new" / "folder").glob("*.json")
    record = json.loads(path.read_text())
    assert path.name == f"{record['environment']['date']}-{name}.json"
    assert (record["preset"], record["tp"]) == ("Qwen3.5-35B-A3B", 1)
    operations, tokens = name.split("-D")[0].split("-"), [int(n) for n in (name + "-D4").split("-D")[1].split("-")]
    points = [(p["operation"], p["num_draft_tokens"], p["batch"]) for p in record["points"]]
    assert points == [(o, d, b) for o in operations for d in tokens for b in (1, 256)]
    assert f"wrote {path}\n" in capsys.readouterr().out


def test_bench_hands_its_options_on(capsys, measured):
    assert main([*BENCH]) == 0
    assert [operation for operation, _, _ in measured] == list(report.OPERATIONS)
    operation, spec, options = measured[0]
    assert (operation, spec.num_layers, spec.conv_dim, spec.num_slots, spec.max_requests) == (
        "commit",
        30,
        8192,
        256,
        256,
    )
    assert options == measure.Options([1, 256])
    del measured[:]
    more = ("--model", "Kimi-K3", "--tp", "8", "--accept", "random", "--repeats", "3", "--subjects", "pallas", "copy")
    assert main([*BENCH, "all", *more, "--check", "--no-kernel-times", "--dtype", "float16"]) == 0
    _, spec, options = measured[-1]
    assert (spec.num_layers, spec.conv_dim, spec.dtype) == (69, 36864 // 8, "float16")
    assert options == measure.Options([1, 256], 3, "random", True, False, ("pallas", "copy"))


def test_bench_measures_a_rollback_and_a_prefill_once_for_all_draft_tokens(measured, tmp_path):
    """The rollback's model is its own, in one axis order; the file's geometry stays that of the preset."""
    assert (
        main(["bench", "rollback", "prefill", "--draft-tokens", "2", "8", "--slots", "300", "--out", str(tmp_path)])
        == 0
    )
    (rolled, *prefills) = [(operation, spec) for operation, spec, _ in measured]
    assert rolled == (
        "rollback",
        get_preset("Kimi-Linear-48B-A3B").spec(num_slots=160, max_requests=64, num_draft_tokens=4),
    )
    assert [(name, one.axis_order, one.num_draft_tokens, one.num_slots) for name, one in prefills] == [
        ("prefill", "time_major", 2, 300),
        ("prefill", "channel_major", 2, 300),
    ]
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-rollback-prefill-D2-8.json")
    geometry = json.loads(path.read_text())["geometry"]
    assert (geometry["num_layers"], geometry["conv_dim"], geometry["num_slots"]) == (30, 8192, 300)


def test_a_model_that_is_not_the_default_is_in_the_name_of_the_file(measured, tmp_path):
    assert main([*BENCH, "verify", "--model", "Kimi-K3", "--tp", "8", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-verify-Kimi-K3-tp8.json")
    assert report.results_files(tmp_path) == [path]


def test_a_second_run_of_a_day_overwrites_nothing(measured, tmp_path):
    for _ in range(3):
        assert main([*BENCH, "verify", "--out", str(tmp_path)]) == 0
    names = [path.name.removeprefix(measured_date(tmp_path)) for path in report.results_files(tmp_path)]
    assert sorted(names) == ["-verify.2.json", "-verify.3.json", "-verify.json"]


def measured_date(folder):
    return json.loads(next(folder.glob("*.json")).read_text())["environment"]["date"]


def test_a_run_draws_its_plots_beside_its_file(measured, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*BENCH, "verify", "--out", str(tmp_path)]) == 0
    date = measured_date(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{date}-verify-bytes.png", f"{date}-verify-verify.png", f"{date}-verify.json",
    ]  # fmt: skip


def test_a_run_without_matplotlib_says_how_to_draw(capsys, measured, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*BENCH, "verify", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().out.endswith(
        f"no plots, matplotlib is not installed: bench --report {path} --plots DIR draws them elsewhere\n"
    )


def test_a_point_that_fails_loses_no_other_and_fails_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def rows(operation, spec, options):
        yield point(operation, spec.axis_order, 4, 1) | {"errors": {"xla": "RuntimeError: RESOURCE_EXHAUSTED"}}
        yield point(operation, spec.axis_order, 4, 256)

    monkeypatch.setattr(measure, "measure", rows)
    assert main([*BENCH, "verify", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    assert [row["batch"] for row in json.loads(path.read_text())["points"]] == [1, 256]
    assert "xla FAILED RuntimeError: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    assert main(["bench", "--report", str(path)]) == 0
    assert "Failed: verify time_major D=4 B=1: xla." in capsys.readouterr().out


def test_bench_on_the_cpu_compares_and_says_so(capsys):
    assert main(["bench", "commit", "verify"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "bench: no GPU here, correctness only: small sizes, interpreted kernels, no times."
    assert lines == [
        f"check {operation} {order} conv_dim=128 C=11 B=5 pallas_interpret: same"
        for operation in ("commit", "verify")
        for order in ("time_major", "channel_major")
    ]


def test_every_operation_has_something_small_for_the_cpu(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(comparing, "check", lambda point: seen.append(point) or point.operation != "step")
    assert main(["bench"]) == 1
    assert [point.operation for point in seen if point.spec.axis_order == "time_major"] == [
        "commit", "verify", "step", "rollback", "prefill", "drafts", "compile", *["commit"] * 3, *["verify"] * 3,
    ]  # fmt: skip
    assert main(["bench", "commit", "compile"]) == 0


def test_bench_on_the_cpu_compiles_the_xla_form_and_says_so(capsys):
    assert main(["bench", "compile"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 * (2 * 2 + 4)
    assert all(line.startswith("check compile ") and line.endswith(", XLA form: in place") for line in lines)


@pytest.mark.usefixtures("no_run")
def test_bench_on_the_cpu_refuses_a_file_of_times(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert refused(capsys, "bench", "--out", str(tmp_path / "new")) == (
        "python -m jax_impl bench: error: argument --out: expected a GPU, got platform cpu. "
        "Without one bench compares results and takes no times, so there is nothing to write."
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("no_run")
def test_command_buffers_cannot_be_turned_off_once_jax_runs(capsys):
    assert main(["bench", "--no-command-buffers"]) == 2
    assert "needs a process in which JAX is not imported yet" in capsys.readouterr().err


def test_no_command_buffers_is_a_flag_of_xla_and_part_of_the_record(tmp_path):
    code = """
import sys
from jax_impl.__main__ import main
from jax_impl.bench import cli

measured = cli._measure

def measure_at_once(args, operations):
    import jax
    from jax_impl.bench import measure

    jax.numpy.zeros(1)  # XLA reads its flags and accepts them
    row = lambda operation, spec: measure.identity(operation, spec, 1) | {"pallas": {"median_us": 1.0}}
    measure.measure = lambda operation, spec, options: [row(operation, spec)]
    return measured(args, operations)

def flags_on_a_gpu(args, set_flags=cli._set_flags):
    set_flags(args)
    import jax

    jax.default_backend = lambda: "gpu"

cli._measure, cli._set_flags = measure_at_once, flags_on_a_gpu
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "commit", "--no-command-buffers", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["environment"]["xla_flags"] == "--xla_cpu_enable_fast_math=false --xla_gpu_enable_command_buffer="
    assert record["command_buffers"] is False
    assert path.name.endswith("-commit-no-command-buffers.json")
    assert report.results_files(tmp_path) == [path]


@pytest.mark.usefixtures("measured")
def test_an_interrupted_bench_keeps_every_point(capsys, monkeypatch, tmp_path):
    rows, seen = measure.measure, []

    def interrupted(*arguments):
        for row in rows(*arguments):
            seen.append([len(json.loads(path.read_text())["points"]) for path in tmp_path.iterdir()])
            if len(seen) == 4:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(measure, "measure", interrupted)
    assert main([*BENCH, "commit", "verify", "--out", str(tmp_path)]) == 130
    assert seen == [[], [1], [2], [3]]
    (path,) = tmp_path.iterdir()
    assert [p["batch"] for p in json.loads(path.read_text())["points"]] == [1, 256, 1]


def test_a_results_file_is_replaced_whole_or_not_at_all(monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    report.write(path, {"points": [1]})
    monkeypatch.setattr(report.os, "replace", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write(path, {"points": [1, 2]})
    assert json.loads(path.read_text()) == {"points": [1]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("measured")
def test_bench_out_that_cannot_be_a_directory_is_refused_before_anything_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "measure", raising(AssertionError("the run began")))
    (tmp_path / "file").write_text("")
    message = refused(capsys, *BENCH, "--out", str(tmp_path / "file" / "folder"))
    assert message.startswith("python -m jax_impl bench: error: argument --out: expected a directory, got ")


def test_the_comparison_before_a_run_has_no_more_requests_than_slots():
    spec = get_preset("LFM2-1.2B").spec(num_slots=8, max_requests=256, num_draft_tokens=4)
    assert comparing.reduced("commit", spec).batch == 8


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "3", '{"environment": 1, "points": []}', b"\xff\xfe"])
def test_bench_report_of_no_results_file_is_one_line(capsys, tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["bench", "--report", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"left out: `{path}`: expected a file written by bench --out, got ")
    assert printed.err.count("\n") == 1


@pytest.mark.usefixtures("measured")
def test_bench_prints_the_file_that_it_wrote(capsys, tmp_path):
    assert main([*BENCH, "commit", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert main(["bench", "--report", str(path)]) == 0
    assert "| commit | time_major | 4 | 256 | 2.50 | – | – | 4.0 | – | – |" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data=0"], "expected data=N,tensor=M with numbers from 1 to 4096, got 'data=0'"),
        (["--mesh", "model=2"], "expected data=N,tensor=M"),
        (["commit", "--mesh", "data=1"], "argument --mesh: expected without OPERATION, --tp and --subjects"),
        (["--mesh", "tensor=32"], "argument --mesh: tensor: expected a divisor of part q = 16 heads, got 32"),
        (["--mesh", "data=64"], "argument --mesh: expected at most 1 devices, got 64"),
    ],
)
def test_bench_refuses_meshes(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # it would ask for more
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
