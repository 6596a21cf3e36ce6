"""The second half of the demo: four requests of the tiny checkpoint, decoded plainly and speculatively, compared."""

import dataclasses
import random
import time
from typing import Any

from jax_impl.checks import Implementation
from jax_impl.model.decode import Engine, Statistics
from jax_impl.model.drafters import NoDrafts, PromptLookup
from jax_impl.model.tiny import TINY, tiny_model
from jax_impl.model.weights import count_parameters

NEW_TOKENS, INTERPRETED_TOKENS = 200, 20  # the interpreter takes a tenth of a second per step
PROMPT_TOKENS = (2, 5, 12, 30)
MAX_LEN = 256


@dataclasses.dataclass(frozen=True)
class Example:
    """What came out. `mismatch` says where the tokens differ first, None when they do not."""

    mismatch: str | None
    statistics: Statistics
    new_tokens: int
    num_parameters: int
    seconds: float

    def report(self) -> dict[str, Any]:
        """For --json."""
        counts = self.statistics
        return {
            "ok": self.mismatch is None,
            "mismatch": self.mismatch,
            "requests": len(PROMPT_TOKENS),
            "new_tokens": self.new_tokens,
            "num_parameters": self.num_parameters,
            "histogram": dict(enumerate(counts.histogram, start=1)),
            "mean_accepted_length": counts.mean_accepted_length,
            "position_rates": counts.position_rates,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return (
            f"Tiny checkpoint, {self.num_parameters:,} parameters in the files of a real one: "
            f"{len(PROMPT_TOKENS)} requests × {self.new_tokens} tokens decoded speculatively are the tokens of greedy "
            f"decoding, in {self.seconds:.1f} s."
        )


def run(implementation: Implementation | None = None) -> Example:
    """Writes the checkpoint, loads it and decodes twice; `implementation` is that of the speculative half."""
    start = time.perf_counter()
    new_tokens = INTERPRETED_TOKENS if implementation == "pallas_interpret" else NEW_TOKENS
    config, parameters = tiny_model()
    rng = random.Random(0)
    prompts = [[rng.randrange(TINY["vocab_size"]) for _ in range(length)] for length in PROMPT_TOKENS]
    sizes: dict[str, Any] = {"max_requests": len(prompts), "num_slots": len(prompts) + 1, "max_len": MAX_LEN}
    plain = Engine(config, parameters, drafter=NoDrafts(), num_draft_tokens=1, **sizes)
    greedy = plain.generate(prompts, new_tokens)
    speculative = Engine(config, parameters, drafter=PromptLookup(), implementation=implementation, **sizes)
    speculative.warm_up()
    generated = speculative.generate(prompts, new_tokens)
    mismatch = next(
        (
            f"speculative decoding differs from greedy decoding: request {request}, token {place}: "
            f"expected {wanted}, got {got}."
            for request, pair in enumerate(zip(generated, greedy, strict=True))
            for place, (got, wanted) in enumerate(zip(*pair, strict=True))
            if got != wanted
        ),
        None,
    )
    return Example(
        mismatch, speculative.statistics, new_tokens, count_parameters(parameters), time.perf_counter() - start
    )
