"""The second half of the demo: four requests of the tiny checkpoint, decoded plainly, speculatively and with trees."""

import dataclasses
import random
import time
from typing import Any

from jax_impl.checks import Implementation
from jax_impl.layout import Storage
from jax_impl.model.decode import Engine, Statistics
from jax_impl.model.drafters import Drafter, NoDrafts, PromptLookup, TreeLookup
from jax_impl.model.tiny import TINY, tiny_model
from jax_impl.model.weights import count_parameters

NEW_TOKENS, INTERPRETED_TOKENS = 200, 20  # the interpreter takes a tenth of a second per step
INTERPRETED_TREE_TOKENS = 5  # and several times that for a step of trees
PROMPT_TOKENS = (2, 5, 12, 30)
MAX_LEN = 256


@dataclasses.dataclass(frozen=True)
class Example:
    """What came out. `mismatch` says where the tokens differ first, None when they do not."""

    mismatch: str | None
    statistics: Statistics
    of_trees: Statistics
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
            "trees": {
                "request_steps": self.of_trees.request_steps,
                "trees": self.of_trees.trees,
                "second_branches": self.of_trees.second_branches,
                "mean_accepted_length": self.of_trees.mean_accepted_length,
            },
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return (
            f"Tiny checkpoint, {self.num_parameters:,} parameters in the files of a real one: "
            f"{len(PROMPT_TOKENS)} requests × {self.new_tokens} tokens decoded speculatively are the tokens of greedy "
            f"decoding, with chains of drafts and with trees, in {self.seconds:.1f} s.\n"
            f"Mean accepted length {self.statistics.mean_accepted_length:.3f} with chains and "
            f"{self.of_trees.mean_accepted_length:.3f} with trees: of {self.of_trees.request_steps} request steps "
            f"{self.of_trees.trees} drafted two branches, and {self.of_trees.second_branches} accepted the second."
        )


def run(implementation: Implementation | None = None, storage: Storage = "sliding") -> Example:
    """Writes the checkpoint, loads it and decodes three times; the options are those of speculative decoding.

    Storage "sliding", which cannot hold trees, is "inputs" for them.
    """
    start = time.perf_counter()
    new_tokens = INTERPRETED_TOKENS if implementation == "pallas_interpret" else NEW_TOKENS
    config, parameters = tiny_model()
    rng = random.Random(0)
    prompts = [[rng.randrange(TINY["vocab_size"]) for _ in range(length)] for length in PROMPT_TOKENS]
    sizes: dict[str, Any] = {"max_requests": len(prompts), "num_slots": len(prompts) + 1, "max_len": MAX_LEN}
    plain = Engine(config, parameters, drafter=NoDrafts(), num_draft_tokens=1, **sizes)
    greedy = plain.generate(prompts, new_tokens)

    def speculate(drafter: Drafter, storage: Storage, count: int, what: str) -> tuple[str | None, Statistics]:
        engine = Engine(config, parameters, drafter=drafter, implementation=implementation, storage=storage, **sizes)
        engine.warm_up()
        mismatch = next(
            (
                f"{what} differs from greedy decoding: request {request}, token {place}: expected {wanted}, got {got}."
                for request, pair in enumerate(zip(engine.generate(prompts, count), greedy, strict=True))
                for place, (got, wanted) in enumerate(zip(pair[0], pair[1][:count], strict=True))
                if got != wanted
            ),
            None,
        )
        return mismatch, engine.statistics

    tree_tokens = INTERPRETED_TREE_TOKENS if implementation == "pallas_interpret" else new_tokens
    for_trees: Storage = "inputs" if storage == "sliding" else storage
    mismatch, of_chains = speculate(PromptLookup(), storage, new_tokens, "speculative decoding")
    mismatch_of_trees, of_trees = speculate(TreeLookup(), for_trees, tree_tokens, "speculative decoding with trees")
    seconds = time.perf_counter() - start
    return Example(
        mismatch or mismatch_of_trees, of_chains, of_trees, new_tokens, count_parameters(parameters), seconds
    )
