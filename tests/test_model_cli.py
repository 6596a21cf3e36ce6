"""`generate`: what it prints, what it refuses; and that the demo's second half fails when decoding does."""

import functools
import io
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from jax_impl import HybridCache, checks, demo
from jax_impl.__main__ import main
from jax_impl.model import cli, decode, example, measure, weights
from jax_impl.model.config import load_config
from jax_impl.model.decode import Engine
from jax_impl.model.drafters import NoDrafts
from jax_impl.model.tiny import TINY, tiny_model, write_tiny_checkpoint
from tests import adapters

TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
PROMPTS = [[1, 2, 3], [9], [77, 78, 79, 80]]

pytestmark = pytest.mark.skipif(not adapters.is_installed("safetensors"), reason="safetensors is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **TWO_LAYERS)


@functools.cache
def greedy() -> list[list[int]]:
    engine = Engine(*tiny_model(**TWO_LAYERS), max_requests=3, max_len=64, num_draft_tokens=1, drafter=NoDrafts())
    return engine.generate(PROMPTS, 40)


def generate(capsys: pytest.CaptureFixture[str], directory: object, *arguments: str) -> tuple[str, str]:
    """What a command that succeeds prints to stdout and stderr."""
    assert main(["generate", "--model", str(directory), *arguments]) == 0
    return capsys.readouterr()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a refused command: exit code 2, and nothing on stdout."""
    try:
        code = main(["generate", *arguments])
    except SystemExit as caught:  # argparse
        code = caught.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert "Traceback" not in printed.err
    return printed.err.splitlines()[-1]


# ---- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", ["lookup", "tree", "none"])
def test_ids_in_ids_out(capsys: Any, checkpoint: pathlib.Path, speculate: str) -> None:
    options = ("--max-new-tokens", "40", "--speculate", speculate)
    out, err = generate(capsys, checkpoint, "--prompt-ids", "1,2 3", *options)
    assert (out, err) == (" ".join(map(str, greedy()[0])) + "\n", "")


def test_tokens_are_printed_as_they_come(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, checkpoint: pathlib.Path
) -> None:
    """Before the last step is taken, all tokens of the steps before it are out."""
    step, seen = Engine.step, []

    def watched(engine: Engine) -> Any:
        seen.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    out, _ = generate(capsys, checkpoint, "--prompt-ids", "1,2,3", "--max-new-tokens", "40", "--speculate", "none")
    assert [int(text) for text in [*seen, out]] == greedy()[0]


def test_a_batch_is_one_line_per_request(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, checkpoint: pathlib.Path
) -> None:
    """More requests than rows, budgets of their own, names by line number, an empty line; stdin as a file."""
    lines = [{"prompt_ids": PROMPTS[0]}, None, {"prompt_ids": PROMPTS[1], "id": "x", "max_new_tokens": 7}]
    lines.append({"prompt_ids": PROMPTS[2], "id": [3]})
    text = "\n".join("" if line is None else json.dumps(line) for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    out, err = generate(capsys, checkpoint, "--batch", "-", "--requests", "2", "--max-new-tokens", "40")
    printed = {json.dumps(line["id"]): line for line in map(json.loads, out.splitlines())}
    budgets = {"1": 40, '"x"': 7, "[3]": 40}
    assert printed == {
        name: {"id": json.loads(name), "tokens": tokens[:budget], "finish_reason": "length"}
        for (name, budget), tokens in zip(budgets.items(), greedy(), strict=True)
    }
    assert "tokens" in err
    assert "100%" in err


@pytest.mark.parametrize("name", ["\ud800", "é"])
def test_an_id_of_any_text_is_printed(capsys: Any, checkpoint: pathlib.Path, tmp_path: Any, name: str) -> None:
    """In ASCII, so that no encoding of stdout matters."""
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "id": name}))
    out, _ = generate(capsys, checkpoint, "--batch", str(path), "--max-new-tokens", "2")
    assert out.isascii()
    assert json.loads(out)["id"] == name


def test_statistics_go_to_stderr(capsys: Any, checkpoint: pathlib.Path) -> None:
    out, err = generate(capsys, checkpoint, "--prompt-ids", "1,2,3", "--max-new-tokens", "40", "--stats")
    assert out.split() == [str(token) for token in greedy()[0]]
    text = " ".join(err.split())
    assert "generated tokens, without each request's first, which the prefill samples 39 " in text
    steps = int(re.findall(r"request steps: steps × the requests in each (\d+)", text)[0])
    mean = float(
        re.findall(r"mean accepted length = generated tokens / request steps, .*? (\d+\.\d+) draft 1", text)[0]
    )
    assert float(mean) == pytest.approx(39 / steps, abs=5e-4)
    counts = [int(count) for count in re.findall(r"n = \d: request steps .*?% (\d+)", text)]
    assert (len(counts), sum(counts)) == (4, steps)
    assert sum(n * count for n, count in enumerate(counts, start=1)) == 39
    assert len(re.findall(r"draft \d: accepted / verified, of", text)) == 3


def test_statistics_of_trees(capsys: Any) -> None:
    """Only where there were any."""
    counts = decode.Statistics(3)
    counts.add([2], [3], [[0, 2, -1]], [False])
    cli.print_statistics(counts)
    assert "branch" not in capsys.readouterr().err
    counts.add([2], [3], [[0, 2, -1]], [True])
    cli.print_statistics(counts)
    text = " ".join(capsys.readouterr().err.split())
    assert "drafts were a tree of two branches 1 request steps that accepted a token of the second branch 2" in text


def test_text_in_text_out(capsys: Any, tmp_path: pathlib.Path) -> None:
    """A byte tokenizer: most tokens are no whole character, and nothing is printed twice or left out."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import decoders, models, pre_tokenizers

    write_tiny_checkpoint(tmp_path, **TWO_LAYERS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = "héllo ∂"
    ids = tokenizer.encode(prompt).ids
    out, _ = generate(capsys, tmp_path, "--prompt", prompt, "--max-new-tokens", "30")
    printed, _ = generate(capsys, tmp_path, "--prompt-ids", str(ids)[1:-1], "--max-new-tokens", "30")
    tokens = [int(token) for token in printed.split()]
    assert out == tokenizer.decode(tokens) + "\n"
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps({"prompt": prompt}))
    line = json.loads(generate(capsys, tmp_path, "--batch", str(batch), "--max-new-tokens", "30")[0])
    assert (line["text"], line["tokens"]) == (tokenizer.decode(tokens), tokens)
    assert "that can be encoded" in error_of(capsys, "--model", str(tmp_path), "--prompt", "\ud800")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert error_of(capsys, "--model", str(tmp_path), "--prompt", "x").startswith("error: tokenizer.json of ")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()  # read for text alone
    assert error_of(capsys, "--model", str(tmp_path), "--prompt", "x") == (
        f"error: tokenizer.json of {tmp_path}: Is a directory."
    )
    assert generate(capsys, tmp_path, "--prompt-ids", str(ids)[1:-1], "--max-new-tokens", "30")[0] == printed


def test_a_stop_token_of_the_checkpoint_ends_a_request(capsys: Any, tmp_path: pathlib.Path) -> None:
    stop = greedy()[1][11]
    write_tiny_checkpoint(tmp_path, **TWO_LAYERS, eos_token_id=stop)
    assert load_config(tmp_path).stop_token_ids == (stop,)
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps({"prompt_ids": PROMPTS[1]}))
    line = json.loads(generate(capsys, tmp_path, "--batch", str(batch), "--max-new-tokens", "40")[0])
    assert line["tokens"] == greedy()[1][: greedy()[1].index(stop) + 1]
    assert line["finish_reason"] == "stop"


def test_the_command_knows_every_option_of_the_library() -> None:
    assert (cli.IMPLEMENTATIONS, cli.DTYPES) == (checks.IMPLEMENTATIONS, weights.DTYPES)


def test_the_help_promises_no_more_than_holds_in_bfloat16(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "in bfloat16 up to near ties" in " ".join(capsys.readouterr().out.split())


def test_layouts_dtypes_and_the_tiny_model(capsys: Any) -> None:
    layout = ("--axis-order", "channel_major", "--storage", "dense", "--draft-tokens", "3", "--dtype", "bfloat16")
    first, _ = generate(capsys, "tiny", "--prompt-ids", "5", "--max-new-tokens", "9", *layout)
    assert len(first.split()) == 9


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model tiny", "one of the arguments --prompt --prompt-ids --batch --measure is required"),
        ("--prompt-ids 1", "argument --model: required."),
        ("--model tiny --prompt-ids 1,x", "argument --prompt-ids: expected token ids such as 5,17,3, got '1,x'."),
        ("--model tiny --prompt-ids -1", "argument --prompt-ids: expected token ids such as 5,17,3, got '-1'."),
        ("--model tiny --prompt-ids 256", "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 256."),
        ("--model tiny --prompt hi", "text needs a tokenizer.json in the checkpoint, which tiny does not have."),
        ("--model nowhere --prompt-ids 1", '--model: expected a directory or "tiny", got nowhere.'),
        ("--model /dev --prompt-ids 1", "`/dev/config.json`: expected a JSON file, got No such file"),
        (
            "--model tiny --prompt-ids 1,2,3 --max-new-tokens 4094",
            "error: `max_new_tokens`: expected at most 4093 behind a prompt of 3 tokens, got 4094. The model has 4096 "
            "positions: ask for fewer tokens, or shorten the prompt.",
        ),
        (
            "--model tiny --prompt-ids 1,2,3 --max-new-tokens 4093 --max-len 64",
            "`max_len`: expected at least 4096 tokens, got 64.",
        ),
        ("--model tiny --prompt-ids 1 --max-len 64", "`max_len`: expected at least 65 tokens, got 64."),
        (
            "--model tiny --prompt-ids 1 --max-len 4097",
            "`max_len`: expected 2 to the model's 4096 positions, got",
        ),
        (
            "--model tiny --prompt-ids 1 --max-new-tokens 1 --max-len 1",
            "`max_len`: expected 2 to the model's 4096 positions, got 1.",
        ),
        ("--model tiny --prompt-ids 1 --draft-tokens 65", "expected an integer from 1 to 64, got '65'."),
        ("--model tiny --prompt-ids 1 --implementation pallas", "`implementation`: expected an NVIDIA GPU"),
        ("--model tiny --prompt-ids 1 --out x", "argument --out: only with --measure."),
        ("--model tiny --measure", "argument --model: not allowed with --measure, which makes a model of its own."),
        (
            "--measure --draft-tokens 8 --dtype float32 --speculate none --requests 2",
            "argument --speculate, --draft-tokens, --dtype: not allowed with --measure, which makes a model",
        ),
        (f"--model {'x' * 5000} --prompt-ids 1", '--model: expected a directory or "tiny", got xxx'),
        (
            "--model tiny --prompt-ids 1 --speculate tree --storage sliding",
            "--storage: expected inputs or dense with --speculate tree, got sliding, which holds chains only.",
        ),
        ("--model tiny --batch /nowhere", "--batch /nowhere: No such file or directory."),
    ],
)
def test_bad_arguments_are_one_line(capsys: Any, arguments: str, message: str) -> None:
    assert message in error_of(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", ": expected at least one line, got none."),
        ("{", ", line 2: expected JSON, got "),
        ("[" * 100_000, ", line 2: expected JSON, got "),
        ("[1]", ", line 2: expected an object, got list."),
        ("{}", ', line 2: expected "prompt" or "prompt_ids", got neither.'),
        ('{"prompt": "a", "prompt_ids": [1]}', ', line 2: expected "prompt" or "prompt_ids", got both.'),
        ('{"prompt": 3}', ', line 2: expected "prompt" to be text, got int.'),
        ('{"prompt_ids": []}', ', line 2: expected "prompt_ids" to be a list of at least one token, got'),
        ('{"prompt_ids": [1, true]}', ', line 2: expected "prompt_ids" to be a list of at least one token'),
        ('{"prompt_ids": [1], "max_new_tokens": []}', ', line 2: expected "max_new_tokens" to be an integer, got [].'),
        ('{"prompt_ids": [1], "id": [NaN]}', ', line 2: expected "id" to be JSON, got NaN, an infinity or'),
        ('{"prompt_ids": [1], "id": 1e999}', ', line 2: expected "id" to be JSON, got NaN, an infinity or'),
        ('{"prompt_ids": [1], "max_tokens": 1}', ", line 2: expected only the fields prompt, prompt_ids, "
         "max_new_tokens, id, got 'max_tokens'."),
    ],
)  # fmt: skip
def test_a_bad_line_of_a_batch_is_named(capsys: Any, tmp_path: pathlib.Path, line: str, message: str) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n" + line)
    assert error_of(capsys, "--model", "tiny", "--batch", str(path)).startswith(f"error: --batch {path}{message}")


def test_streams_that_are_closed_are_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it when the shell closes one
    assert error_of(capsys, "--model", "tiny", "--batch", "-") == (
        "error: --batch -: expected requests on stdin, which is closed."
    )
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "--model", "tiny", "--prompt-ids", "1"]) == 2
    assert capsys.readouterr().err == "error: expected an open stdout, got a closed one.\n"


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="there is no /dev/full to write to")
@pytest.mark.parametrize("arguments", [["plan", "--csv"], ["generate", "--model", "tiny", "--prompt-ids", "1"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    """In a process of its own: what stdout still holds must not fail at exit either."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jax_impl", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    expected = "error: expected output that can be written, got No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_requests_of_a_batch_that_do_not_fit_are_named(capsys: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [1], "max_new_tokens": 0, "id": "second"}')
    assert error_of(capsys, "--model", "tiny", "--batch", str(path)) == (
        "error: request 'second': `max_new_tokens`: expected at least 1, got 0."
    )
    path.write_text(f'{{"prompt_ids": [1], "max_new_tokens": {10**30}}}')
    assert "error: request 1: `max_new_tokens`: expected at most 4095" in error_of(
        capsys, "--model", "tiny", "--batch", str(path)
    )


def test_a_cache_too_large_is_refused_before_it_is_allocated(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "MAX_CACHE_BYTES", 10**6)
    message = error_of(capsys, "--model", "tiny", "--prompt-ids", "1", "--max-len", "4096")
    assert re.search(
        r"cache and prefill of at most 1,000,000 bytes, got [\d,]+ bytes for 1 requests of 4096 tokens", message
    )


@pytest.mark.parametrize(("package", "arguments"), [("safetensors", ()), ("rich", ("--stats",))])
def test_missing_packages_are_named(capsys: Any, monkeypatch: pytest.MonkeyPatch, package: str, arguments: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = error_of(capsys, "--model", "tiny", "--prompt-ids", "1", *arguments)
    assert f"need `{package}`, which is not installed: pip install '.[" in message


def test_no_progress_without_rich(capsys: Any, monkeypatch: pytest.MonkeyPatch, checkpoint: Any, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps({"prompt_ids": PROMPTS[0]}))
    out, err = generate(capsys, checkpoint, "--batch", str(path), "--max-new-tokens", "40")
    assert (json.loads(out)["tokens"], err) == (greedy()[0], "")


# ---- the demo and the measurement ------------------------------------------------------------------------------------

SMALL_DEMO = ["demo", "--model", "LFM2-1.2B", "--requests", "3", "--steps", "1"]


def test_the_demo_decodes_four_requests(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = functools.cache(example.run)  # once, printed twice
    monkeypatch.setattr(example, "run", decoded)
    monkeypatch.setattr(demo, "simulate", lambda *arguments, **options: None)
    assert main(SMALL_DEMO) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 requests × 200 tokens decoded speculatively are the tokens of greedy decoding" in out
    assert "mean accepted length = generated tokens / request steps" in out
    assert main([*SMALL_DEMO, "--json"]) == 0
    decoding = json.loads(capsys.readouterr().out)["decoding"]
    assert (decoding["ok"], decoding["mismatch"]) == (True, None)
    assert sum(int(n) * count for n, count in decoding["histogram"].items()) == 4 * 199
    assert min(decoding["histogram"].values()) > 0
    trees = decoding["trees"]
    assert 0 < trees["second_branches"] < trees["trees"] < trees["request_steps"]
    drafted = f"{trees['trees']} drafted two branches, and {trees['second_branches']} accepted the second."
    assert f"of {trees['request_steps']} request steps {drafted}" in out


@pytest.mark.usefixtures("fresh_steps")
def test_a_conv_commit_that_is_skipped_fails_the_demo(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = decode.commit_after_verify
    monkeypatch.setattr(demo, "simulate", lambda *arguments, **options: None)
    monkeypatch.setattr(
        decode,
        "commit_after_verify",
        lambda cache, *arguments, **options: HybridCache(
            cache.conv, commit(cache, *arguments, **options).recurrent_state
        ),
    )
    # Plain decoding runs through the same commit; with one token a step it goes wrong elsewhere.
    assert main([*SMALL_DEMO, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["mismatch"]) == (False, None)
    assert result["decoding"]["mismatch"].startswith("speculative decoding differs from greedy decoding: request ")


def test_a_difference_is_printed_and_fails_the_demo(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = example.Example("speculative decoding differs.", decode.Statistics(4), decode.Statistics(4), 200, 1, 1.0)
    monkeypatch.setattr(demo, "simulate", lambda *arguments, **options: None)
    monkeypatch.setattr(example, "run", lambda implementation, storage: wrong)
    assert main(SMALL_DEMO) == 1
    assert "FAILED: speculative decoding differs.\n" in capsys.readouterr().err


def test_measure_writes_a_dated_file(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(measure, "TINY", TINY | TWO_LAYERS)
    assert main(["generate", "--measure", "--requests", "2", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "acceptance 0.9: " in printed
    (path,) = (tmp_path / "new").iterdir()
    record = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-decode-B2\.json", path.name)
    assert {"date", "device", "driver", "versions", "method"} <= set(record["environment"])
    assert [point["acceptance"] for point in record["speculative"]] == [0.3, 0.6, 0.9]
    for point in record["speculative"]:
        assert point["requests_as_greedy"] == 1.0
        assert (len(point["all_tokens_per_s"]), len(point["position_rates"])) == (3, 3)
    lengths = [point["mean_accepted_length"] for point in record["speculative"]]
    assert 1 < lengths[0] < lengths[1] < lengths[2] <= 4
    assert record["plain"]["mean_accepted_length"] == 1
    assert main(["generate", "--measure", "--out", str(path)]) == 2
    assert f"`--out`: expected a directory, got {path}" in capsys.readouterr().err


def test_the_measured_model_has_about_a_billion_parameters() -> None:
    from jax_impl.model.config import parse_config
    from jax_impl.model.weights import tensor_shapes

    shapes = tensor_shapes(parse_config(measure.LARGE)).values()
    assert 0.9e9 < sum(functools.reduce(lambda a, b: a * b, shape) for shape in shapes) < 1.2e9
