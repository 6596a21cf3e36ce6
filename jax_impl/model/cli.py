"""`python -m jax_impl generate`: text or tokens from a checkpoint, decoded speculatively and streamed as they come.

stdout has the generated text, or token ids, or with --batch one JSON object per finished request, and nothing else;
progress and statistics go to stderr.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from jax_impl.arguments import CliError, positive, up_to
from jax_impl.layout import AXIS_ORDERS, STORAGES
from jax_impl.tables import print_table, progress, require, require_rich

IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret")
DTYPES = ("float32", "bfloat16")
MAX_CACHE_BYTES = 64 * 2**30  # so that a slip of a digit does not take the machine down
MAX_BATCH_BYTES = 256 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20  # ten times a large one
LEN_MULTIPLE = 64
SAFETENSORS = {"safetensors": "checkpoints"}
BATCH_FIELDS = ("prompt", "prompt_ids", "max_new_tokens", "id")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def add_parser(subparsers: Any) -> None:
    """Registers `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="decode a Qwen3.5 or Qwen3-Next checkpoint speculatively, with the tokens of greedy decoding "
        "(in bfloat16 up to near ties)",
        description="Greedy decoding of a hybrid model's checkpoint. Drafts looked up in the text so far are verified "
        "several at a time; in float32 the tokens are those of plain greedy decoding, and in bfloat16 up to near ties, "
        "which a program of another shape may decide differently.",
    )
    option = parser.add_argument
    option("--model", metavar="DIR", help='directory of config.json and safetensors files, or "tiny": a random one')
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="needs the checkpoint's tokenizer.json")
    prompts.add_argument("--prompt-ids", type=token_ids, metavar="N,N,…", help="tokens instead of text")
    prompts.add_argument(
        "--batch",
        metavar="FILE",
        help='JSON lines with "prompt" or "prompt_ids", "max_new_tokens", "id"; - is stdin',
    )
    prompts.add_argument(
        "--measure", action="store_true", help="time a random model of about 1e9 parameters, on a GPU; no --model"
    )
    option(
        "--speculate",
        choices=("lookup", "tree", "none"),
        default="lookup",
        help="where drafts come from: looked up in the text, as one continuation or as a tree of two (%(default)s)",
    )
    option(
        "--draft-tokens", type=up_to(64, "64"), default=4, metavar="D", help="tokens verified per step (%(default)s)"
    )
    option("--max-new-tokens", type=positive, default=64, metavar="N", help="per request (%(default)s)")
    option("--max-len", type=positive, metavar="N", help="tokens of one sequence; default: what the prompts need")
    option("--requests", type=up_to(4096, "4096"), default=8, metavar="N", help="decoded at a time (%(default)s)")
    option("--dtype", choices=DTYPES, help="of weights and states; default: the checkpoint's")
    option("--implementation", choices=IMPLEMENTATIONS, help="of the convolution; default: chosen for the device")
    option("--axis-order", choices=AXIS_ORDERS, default="time_major")
    option("--storage", choices=STORAGES, help="default: sliding, and inputs for trees, which sliding cannot hold")
    option("--stats", action="store_true", help="print speed and acceptance to stderr at the end")
    option("--out", type=pathlib.Path, metavar="DIR", help="where --measure writes its JSON file")
    parser.set_defaults(run=run, parser=parser)


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas or spaces, as an argparse type."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"expected token ids such as 5,17,3, got {text!r}.")
    return ids


@dataclasses.dataclass(frozen=True)
class Job:
    """One request of the command: `name` is its id in the output; text asks for text back."""

    name: Any
    prompt_ids: list[int]
    max_new_tokens: int
    as_text: bool


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns the exit code."""
    if args.measure:
        used = ("measure", "requests", "out")
        unused = [name for name, value in vars(args).items() if value != args.parser.get_default(name)]
        unused = [f"--{name.replace('_', '-')}" for name in unused if name not in used]
        if unused:
            args.parser.error(
                f"argument {', '.join(unused)}: not allowed with --measure, which makes a model of its own. "
                "It takes --requests and --out."
            )
        from jax_impl.model import measure

        return measure.run(args.requests, args.out)
    for value, name in ((args.out, "--out"), (not args.model, "--model")):
        if value:
            args.parser.error(f"argument {name}: {'only with --measure' if value is args.out else 'required'}.")
    if args.speculate == "tree" and args.storage == "sliding":
        raise CliError(
            "--storage: expected inputs or dense with --speculate tree, got sliding, which holds chains only."
        )
    if args.stats:
        require_rich("Leave out --stats to do without.")
    lines = None if args.batch is None else read_batch(args.batch)  # before the weights, which take longer
    config, parameters, tokenizer = _load(args)
    jobs = list(_jobs(args, lines, tokenizer))
    engine = _engine(args, config, parameters, jobs)
    engine.warm_up()
    if args.batch is None:
        _stream_one(engine, jobs[0], tokenizer)
    else:
        _stream_batch(engine, jobs, tokenizer)
    if args.stats:
        print_statistics(engine.statistics)
    return 0


def _load(args: argparse.Namespace) -> tuple[Any, Any, "_Tokenizer"]:
    """Configuration, parameters and tokenizer of --model."""
    require(SAFETENSORS)
    from jax_impl.model.tiny import write_tiny_checkpoint
    from jax_impl.model.weights import load_model

    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(args.model)
        if args.model == "tiny":
            directory = write_tiny_checkpoint(pathlib.Path(temporary))
        elif not os.path.isdir(directory):  # also of a name that no directory can have
            raise CliError(f'--model: expected a directory or "tiny", got {args.model}.')
        return (*load_model(directory, args.dtype), _Tokenizer(directory / "tokenizer.json", args.model))


def _engine(args: argparse.Namespace, config: Any, parameters: Any, jobs: Sequence[Job]) -> Any:
    """An engine that all jobs fit, refused before it is allocated when it is too large."""
    from jax_impl.model.decode import Engine, cache_bytes
    from jax_impl.model.drafters import NoDrafts, PromptLookup, TreeLookup

    needed = max((len(job.prompt_ids) + job.max_new_tokens for job in jobs), default=1)
    max_len = args.max_len or max(2, min(-(-needed // LEN_MULTIPLE) * LEN_MULTIPLE, config.max_positions))
    drafter = {"lookup": PromptLookup, "tree": TreeLookup, "none": NoDrafts}[args.speculate]()
    storage = args.storage or ("inputs" if args.speculate == "tree" else "sliding")
    sizes = {
        "max_requests": max(1, min(args.requests, len(jobs))),
        "max_len": max_len,
        "num_draft_tokens": 1 if args.speculate == "none" else args.draft_tokens,
    }
    num_bytes = cache_bytes(config, str(parameters.embedding.dtype), storage=storage, **sizes)
    if num_bytes > MAX_CACHE_BYTES:
        raise CliError(
            f"--requests, --max-len, --draft-tokens: expected cache and prefill of at most {MAX_CACHE_BYTES:,} bytes, "
            f"got {num_bytes:,} bytes for {sizes['max_requests']} requests of {sizes['max_len']} tokens."
        )
    engine = Engine(
        config, parameters, drafter=drafter, axis_order=args.axis_order, storage=storage,
        implementation=args.implementation, **sizes,
    )  # fmt: skip
    for job in jobs:
        try:
            engine.check_request(job.prompt_ids, job.max_new_tokens)
        except ValueError as error:
            where = f"request {job.name!r}: " if args.batch is not None else ""
            raise CliError(where + " ".join(str(error).splitlines())) from None
    return engine


# ---- prompts ---------------------------------------------------------------------------------------------------------


class _Tokenizer:
    """The checkpoint's tokenizer.json, read when text is first asked for."""

    def __init__(self, path: pathlib.Path, model: str) -> None:
        self._path, self._model, self._loaded = path, model, None

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            try:
                with self._path.open("rb") as file:
                    content = file.read(MAX_TOKENIZER_BYTES + 1)
            except FileNotFoundError:  # so is the tiny checkpoint's, which is gone by now and has none
                raise CliError(
                    f"text needs a tokenizer.json in the checkpoint, which {self._model} does not have. "
                    "Give token ids instead: --prompt-ids."
                ) from None
            except OSError as error:
                raise CliError(f"tokenizer.json of {self._model}: {error.strerror}.") from None
            if len(content) > MAX_TOKENIZER_BYTES:
                raise CliError(f"tokenizer.json of {self._model}: expected at most {MAX_TOKENIZER_BYTES:,} bytes.")
            try:
                from tokenizers import Tokenizer
            except ImportError:
                raise CliError(
                    "text needs `tokenizers`, which is not installed: pip install '.[model]'. "
                    "Or give token ids: --prompt-ids."
                ) from None
            try:
                self._loaded = Tokenizer.from_buffer(content)
            except Exception as error:  # the package raises plain Exception
                raise CliError(f"tokenizer.json of {self._model}: {error}.") from None
        return self._loaded

    def encode(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        try:
            text.encode()  # half a surrogate pair is no text, which not every version of tokenizers says
            return tokenizer.encode(text).ids
        except (TypeError, UnicodeError) as error:
            raise CliError(f"expected text that can be encoded, got {text[:40]!r}: {error}.") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer().decode(list(ids), skip_special_tokens=True)


def _jobs(args: argparse.Namespace, lines: Any, tokenizer: _Tokenizer) -> Iterator[Job]:
    """The requests, in order."""
    if lines is None:
        as_text = args.prompt is not None
        ids = tokenizer.encode(args.prompt) if as_text else args.prompt_ids
        yield Job(None, ids, args.max_new_tokens, as_text)
        return
    for number, line in lines:
        as_text = "prompt" in line
        ids = tokenizer.encode(line["prompt"]) if as_text else line["prompt_ids"]
        yield Job(line.get("id", number), ids, line.get("max_new_tokens", args.max_new_tokens), as_text)


def read_batch(file: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers; empty lines are passed over.

    Raises:
      CliError: the file cannot be read, or a line is not a request; the message names the line.
    """
    if file == "-" and sys.stdin is None:
        raise CliError("--batch -: expected requests on stdin, which is closed.")
    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as opened:
            content = opened.read(MAX_BATCH_BYTES + 1)
    except OSError as error:
        raise CliError(f"--batch {file}: {error.strerror}.") from None
    if len(content) > MAX_BATCH_BYTES:
        raise CliError(f"--batch {file}: expected at most {MAX_BATCH_BYTES:,} bytes, got more.")
    requests = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CliError(f"--batch {file}, line {number}: expected JSON, got {error}.") from None
        wrong = _wrong_request(request)
        if wrong:
            raise CliError(f"--batch {file}, line {number}: {wrong}")
        requests.append((number, request))
    if not requests:
        raise CliError(f"--batch {file}: expected at least one line, got none.")
    return requests


def _wrong_request(request: Any) -> str | None:
    """What is wrong with one line of a batch, or None."""
    if not isinstance(request, dict):
        return f"expected an object, got {type(request).__name__}."
    unknown = [field for field in request if field not in BATCH_FIELDS]
    if unknown:
        return f"expected only the fields {', '.join(BATCH_FIELDS)}, got {', '.join(map(repr, unknown))[:80]}."
    if ("prompt" in request) == ("prompt_ids" in request):
        return 'expected "prompt" or "prompt_ids", got ' + ("both." if "prompt" in request else "neither.")
    is_int = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    if not isinstance(request.get("prompt", ""), str):
        return f'expected "prompt" to be text, got {type(request["prompt"]).__name__}.'
    ids = request.get("prompt_ids", [0])
    if not isinstance(ids, list) or not ids or not all(map(is_int, ids)):
        return 'expected "prompt_ids" to be a list of at least one token, got something else.'
    if not is_int(request.get("max_new_tokens", 1)):
        return f'expected "max_new_tokens" to be an integer, got {request["max_new_tokens"]!r}.'
    try:
        json.dumps(request.get("id"), allow_nan=False)
    except (ValueError, RecursionError):
        return 'expected "id" to be JSON, got NaN, an infinity or too deep a nesting.'
    return None


# ---- what is printed -------------------------------------------------------------------------------------------------


def _stream_one(engine: Any, job: Job, tokenizer: _Tokenizer) -> None:
    """Prints the tokens of one request as they come, as text or as ids."""
    tokens: list[int] = []
    shown = ""
    for _, new in engine.stream([job.prompt_ids], job.max_new_tokens):
        if not job.as_text:
            print(*new.tokens, sep=" ", end="\n" if new.request.finish_reason else " ", flush=True)
            continue
        tokens += new.tokens
        text = tokenizer.decode(tokens)
        if new.request.finish_reason or not text.endswith(REPLACEMENT):  # else a character is not whole yet
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if job.as_text:
        print()


def _stream_batch(engine: Any, jobs: Sequence[Job], tokenizer: _Tokenizer) -> None:
    """Prints one JSON line per request when it is finished."""
    budgets = [job.max_new_tokens for job in jobs]
    with _progress(sum(budgets)) as advance:
        for index, new in engine.stream([job.prompt_ids for job in jobs], budgets):
            advance(len(new.tokens))
            request, job = new.request, jobs[index]
            if request.finish_reason is None:
                continue
            advance(job.max_new_tokens - len(request.tokens))
            line = {"id": job.name, "tokens": request.tokens, "finish_reason": request.finish_reason}
            if job.as_text:
                line["text"] = tokenizer.decode(request.tokens)
            print(json.dumps(line), flush=True)  # ASCII, which any stdout can encode


def _progress(total: int) -> Any:
    """A progress bar unless the output itself is on the terminal, or rich is not installed."""
    try:
        require_rich()
    except CliError:
        return progress("tokens", total, hidden=True)
    return progress("tokens", total, hidden=sys.stdout.isatty())


def print_statistics(statistics: Any, *, stderr: bool = True) -> None:
    """Speed, and how many drafts were accepted, with the formula beside every number."""
    counts, steps = statistics, statistics.request_steps
    speed = counts.tokens / counts.seconds if counts.seconds else 0.0
    rows = [
        ("tokens/s = generated tokens / seconds of the steps, without prefill and compilation", f"{speed:,.1f}"),
        ("generated tokens, without each request's first, which the prefill samples", f"{counts.tokens:,}"),
        ("request steps: steps × the requests in each", f"{steps:,}"),
        (
            "mean accepted length = generated tokens / request steps, the bonus token included (plain decoding: 1)",
            f"{counts.mean_accepted_length:.3f}",
        ),
    ]
    for draft, (rate, proposed) in enumerate(zip(counts.position_rates, counts.proposed, strict=True), start=1):
        rows.append((f"draft {draft}: accepted / verified, of {proposed:,} verified", f"{rate:.3f}"))
    if counts.trees:
        rows.append(("request steps whose drafts were a tree of two branches", f"{counts.trees:,}"))
        rows.append(("request steps that accepted a token of the second branch", f"{counts.second_branches:,}"))
    for accepted, count in enumerate(counts.histogram, start=1):
        share = count / steps if steps else 0.0
        rows.append((f"n = {accepted}: request steps  {'█' * round(50 * share)} {share:.1%}", f"{count:,}"))
    print_table("Decoding", ("", "value"), rows, stderr=stderr)
