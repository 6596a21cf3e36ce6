"""`python -m jax_impl generate --measure`: tokens per second with and without speculation, on random weights.

A model of about 1e9 parameters is made on the device. Plain decoding verifies one token per step. Speculative decoding
verifies D with drafts from a corrupted replay of the model's own greedy tokens, so that each draft is accepted with a
chosen probability if those before it are. Steps are launched ahead, without waiting for one; requests never end in
them. The greedy tokens to replay come from the step that verifies D, all drafts wrong: in 16 bits a program of other
shapes may decide a near tie differently, and the replay would part from the model. How much of them plain decoding
repeats is reported.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from jax_impl.bench import report, timing
from jax_impl.model.config import ModelConfig, parse_config
from jax_impl.model.decode import Engine, Statistics
from jax_impl.model.drafters import Drafter, NoDrafts, corrupted_replay
from jax_impl.model.tiny import TINY
from jax_impl.model.weights import Parameters, count_parameters, random_parameters

ACCEPTANCES = (0.3, 0.6, 0.9)
NUM_DRAFT_TOKENS = 4
REPEATS = 3
METHOD = "generated tokens / seconds of steps launched back to back, all requests running; median of repeats"
# The linear layers of Qwen3.5-4B, which are those of 35B-A3B, in a smaller model: 1.1e9 parameters.
LARGE: dict[str, Any] = TINY | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run: requests, tokens of each prompt, and steps per timed run."""

    requests: int
    prompt_tokens: int = 32
    steps: int = 48

    @property
    def new_tokens(self) -> int:
        """A budget that no request reaches: every step of a run, and one before it, may accept D tokens."""
        return NUM_DRAFT_TOKENS * (self.steps + 2)


def run(requests: int, out: pathlib.Path | None) -> int:
    """Measures, prints, and writes a dated JSON file into `out`; returns the exit code."""
    if jax.default_backend() == "gpu":
        config, sizes = parse_config(LARGE), Sizes(requests)
    else:
        print("measure: no GPU here; a tiny model runs instead, and its numbers say nothing.")
        config, sizes = parse_config(TINY), Sizes(requests, prompt_tokens=5, steps=8)
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"`--out`: expected a directory, got {out}: {error.strerror}.") from None
    start = time.perf_counter()
    parameters = random_parameters(config, "bfloat16")
    record = measure(config, parameters, sizes)
    for line in lines(record):
        print(line)
    print(f"all of it took {time.perf_counter() - start:.0f} s")
    if out:
        path = out / f"{record['environment']['date']}-decode-B{requests}.json"
        report.write(path, record)
        print(f"wrote {path}")
    return 0


def measure(config: ModelConfig, parameters: Parameters, sizes: Sizes) -> dict[str, Any]:
    """Plain decoding, then speculative decoding at each acceptance."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (sizes.requests, sizes.prompt_tokens)).tolist()
    max_len = sizes.prompt_tokens + sizes.new_tokens

    def engine(num_draft_tokens: int, drafter: Drafter) -> Engine:
        made = Engine(
            config, parameters, max_requests=sizes.requests, max_len=max_len, num_draft_tokens=num_draft_tokens,
            drafter=drafter,
        )  # fmt: skip
        made.warm_up()
        return made

    one_by_one = engine(1, NoDrafts())
    plain, by_one = timed(one_by_one, prompts, sizes, None)
    del one_by_one  # its cache makes room
    replay = corrupted_replay(sizes.requests, max_len, config.vocab_size, 0.0)
    speculating = engine(NUM_DRAFT_TOKENS, replay)
    targets = speculating.generate(prompts, sizes.new_tokens)
    points = []
    for acceptance in ACCEPTANCES:
        speculating.drafter = corrupted_replay(sizes.requests, max_len, config.vocab_size, acceptance)
        point, tokens = timed(speculating, prompts, sizes, targets)
        same = np.mean([got == wanted[: len(got)] for got, wanted in zip(tokens, targets, strict=True)])
        speedup = round(point["tokens_per_s"] / plain["tokens_per_s"], 3)
        points.append({"acceptance": acceptance, **point, "speedup": speedup, "requests_as_greedy": float(same)})
    common = [common_prefix(got, wanted) / len(got) for got, wanted in zip(by_one, targets, strict=True)]
    return {
        "environment": timing.environment() | {"method": METHOD},
        "model": dataclasses.asdict(config)
        | {"num_parameters": count_parameters(parameters), "conv_dim": config.conv_dim},
        "dtype": str(parameters.embedding.dtype),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        **dataclasses.asdict(sizes),
        "plain": plain | {"common_prefix_with_targets": round(float(np.mean(common)), 4)},
        "speculative": points,
    }


def timed(
    engine: Engine, prompts: list[list[int]], sizes: Sizes, targets: list[list[int]] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Speed and acceptance of `REPEATS` runs of the same requests, and the tokens of the last one."""
    speeds, step_ms, tokens = [], [], []
    engine.statistics = Statistics(engine.statistics.num_draft_tokens)
    for _ in range(REPEATS):
        requests = [new.request for new in engine.add(prompts, sizes.new_tokens)]
        for request, target in zip(requests, targets or [], strict=targets is not None):
            engine.replay(request, target)
        engine.step()  # replaying has queued small copies; they are over when this is
        before = engine.statistics.tokens
        start = time.perf_counter()
        results = [engine.launch() for _ in range(sizes.steps)]
        jax.block_until_ready(results[-1])
        seconds = time.perf_counter() - start
        for result in results:
            engine.collect(result)
        speeds.append((engine.statistics.tokens - before) / seconds)
        step_ms.append(1e3 * seconds / sizes.steps)
        tokens = [request.tokens for request in requests]
        for request in requests:
            engine.leave(request)
    counts = engine.statistics
    return {
        "tokens_per_s": round(statistics.median(speeds), 1),
        "all_tokens_per_s": [round(speed, 1) for speed in speeds],
        "step_ms": round(statistics.median(step_ms), 4),
        "mean_accepted_length": round(counts.mean_accepted_length, 4),
        "position_rates": [round(rate, 4) for rate in counts.position_rates],
        "histogram": counts.histogram,
    }, tokens


def common_prefix(first: list[int], second: list[int]) -> int:
    """Tokens until the first difference."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def lines(record: dict[str, Any]) -> list[str]:
    """What is printed of a record."""
    plain = record["plain"]
    head = f"{record['environment']['device']}, {record['model']['num_parameters']:,} parameters, {record['dtype']}"
    printed = [
        f"{head}, B = {record['requests']}, D = {record['num_draft_tokens']}; mean accepted length = "
        "generated tokens / request steps",
        f"plain: {plain['tokens_per_s']:,.1f} tokens/s, {plain['step_ms']:.3f} ms a step; "
        f"{plain['common_prefix_with_targets']:.0%} of its tokens until it parts from the step that verifies D",
    ]
    for point in record["speculative"]:
        rates = ", ".join(f"{rate:.2f}" for rate in point["position_rates"])
        printed.append(
            f"acceptance {point['acceptance']}: {point['tokens_per_s']:,.1f} tokens/s, {point['speedup']:.2f}× plain, "
            f"{point['step_ms']:.3f} ms a step, mean accepted length {point['mean_accepted_length']:.2f}, "
            f"by position {rates}, greedy tokens in {point['requests_as_greedy']:.0%} of requests"
        )
    return printed
