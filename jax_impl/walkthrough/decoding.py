"""A whole model: what transformers says to speculative decoding of it, and what comes out of ours."""

import dataclasses
import functools
import pathlib
import random
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from jax_impl.model.config import ModelConfig
from jax_impl.model.decode import Engine, Statistics
from jax_impl.model.drafters import CorruptedReplay, NoDrafts, corrupted_replay
from jax_impl.model.tiny import tiny_model, write_tiny_checkpoint
from jax_impl.model.weights import Parameters
from jax_impl.walkthrough import show
from jax_impl.walkthrough.show import Picture, Table

MAX_LEN = 128
SMALLER: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}  # compiles in half of the time


def prompts(lengths: Sequence[int], vocab_size: int = 256, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


# ---- transformers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What transformers made of the tiny checkpoint: its greedy tokens, and how it answered the request for drafts.

    Where it cannot be asked, `tokens` is None and `answer` names what is not installed.
    """

    tokens: list[int] | None
    answer: str


def transformers_tries(prompt: Sequence[int], max_new_tokens: int) -> Theirs:
    """Decodes the tiny checkpoint with transformers, greedily and then with its prompt lookup."""
    if absent := show.missing("torch", "transformers"):
        return Theirs(None, f"{absent} With both, transformers answers: pip install '.[torch]' transformers")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # it draws no progress bars here
        return _transformers_tries(prompt, max_new_tokens)


def _transformers_tries(prompt: Sequence[int], max_new_tokens: int) -> Theirs:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(pathlib.Path(directory))
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([list(prompt)])
    generate = functools.partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    tokens = generate()[0, len(prompt) :].tolist()
    try:
        generate(prompt_lookup_num_tokens=3)
        answer = "accepted"
    except ValueError as error:
        answer = f"{type(error).__name__}: {error}"
    return Theirs(tokens, answer)


# ---- ours ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Tokens of each request, and the counts of the steps that made them."""

    tokens: list[list[int]]
    statistics: Statistics


def plain(model: tuple[ModelConfig, Parameters], texts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
    """Greedy decoding of all texts together, one token per step and request."""
    engine = Engine(*model, max_requests=len(texts), max_len=MAX_LEN, num_draft_tokens=1, drafter=NoDrafts())
    return Decoded(engine.generate(texts, new_tokens), engine.statistics)


def compare_table(greedy: Decoded, speculative: Decoded) -> Table:
    """Request by request: equal tokens; for both, steps and tokens per step."""
    rows = [
        (f"request {index}", len(one), "yes" if one == other else "no")
        for index, (one, other) in enumerate(zip(greedy.tokens, speculative.tokens, strict=True))
    ]
    steps = [f"{name} decoding took {one.statistics.steps} steps" for name, one in
             (("plain", greedy), ("speculative", speculative))]  # fmt: skip
    return Table(("", "tokens", "equal to greedy decoding"), rows, "; ".join(steps))


def acceptance_picture(statistics: Statistics) -> Picture:
    """How often each count was accepted, and how often the draft at each position was."""
    figure, (left, right) = show.panels(8, 2.8, columns=2)
    counts = range(1, statistics.num_draft_tokens + 1)
    left.bar(counts, statistics.histogram, color="C0")
    left.set_xticks(list(counts))
    show.finish(left, "accepted tokens n of a request's step", "n, the bonus token included", "steps")
    positions = range(1, statistics.num_draft_tokens)
    right.bar(positions, statistics.position_rates, color="C1")
    right.set_xticks(list(positions))
    right.set_ylim(0, 1)
    show.finish(right, "accepted / verified drafts", "draft position", "rate")
    return show.picture(figure, f"Accepted counts 1 … D: {statistics.histogram}; and acceptance by draft position.")


# ---- draft length ----------------------------------------------------------------------------------------------------


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens per step when each draft is right with this probability: Σ a^i for i = 0 … D-1.

    >>> expected_tokens(0.5, 4), expected_tokens(1.0, 4), expected_tokens(0.0, 4)
    (1.875, 4.0, 1.0)
    """
    return sum(acceptance**drafts for drafts in range(num_draft_tokens))


def tokens_per_step(
    draft_tokens: Sequence[int], rates: Sequence[float], *, new_tokens: int = 96
) -> dict[float, list[float]]:
    """Mean accepted length by draft length, for drafts that are right with each of the probabilities `rates`.

    The drafts are the greedy tokens of four requests, each replaced by a wrong one at random, so that any rate can be
    had. Every run must end with the greedy tokens.

    Raises:
      RuntimeError: a run generated other tokens.
    """
    model = tiny_model(**SMALLER)
    texts = prompts((3, 5, 8, 13))
    greedy: list[list[int]] | None = None
    found: dict[float, list[float]] = {rate: [] for rate in rates}
    for tokens in draft_tokens:

        def engine(rate: float, tokens: int = tokens) -> Engine:
            drafter = corrupted_replay(len(texts), MAX_LEN, model[0].vocab_size, rate)
            return Engine(*model, max_requests=len(texts), max_len=MAX_LEN, num_draft_tokens=tokens, drafter=drafter)

        if greedy is None:  # a drafter that has been told nothing proposes nothing: every step verifies one token
            greedy = engine(0.0).generate(texts, new_tokens)
        for rate in rates:
            one = engine(rate)
            if _replayed(one, texts, greedy, new_tokens) != greedy:
                raise RuntimeError(f"D = {tokens}, acceptance {rate}: the tokens are not those of greedy decoding.")
            found[rate].append(one.statistics.mean_accepted_length)
    return found


def _replayed(
    engine: Engine, texts: Sequence[Sequence[int]], greedy: Sequence[list[int]], new_tokens: int
) -> list[list[int]]:
    """Decodes all texts at once, after the drafter has been told what they become."""
    assert isinstance(engine.drafter, CorruptedReplay)
    requests = [new.request for new in engine.add(texts, new_tokens)]
    for request, tokens in zip(requests, greedy, strict=True):
        engine.replay(request, tokens)
    while engine.requests:
        engine.step()
    return [request.tokens for request in requests]


def draft_length_picture(draft_tokens: Sequence[int], found: dict[float, list[float]]) -> Picture:
    """Tokens per step against D: measured points on the curves of `expected_tokens`."""
    figure, (axes,) = show.panels(6, 3.4)
    for index, (rate, lengths) in enumerate(found.items()):
        curve = [expected_tokens(rate, tokens) for tokens in range(1, max(draft_tokens) + 1)]
        axes.plot(range(1, max(draft_tokens) + 1), curve, "-", color=f"C{index}", alpha=0.6)
        axes.plot(draft_tokens, lengths, "o", color=f"C{index}", label=f"a = {rate:g}")
    axes.set_xticks(list(draft_tokens))
    show.finish(axes, "points: decoded; lines: Σ aⁱ, i < D", "tokens D verified per step", "tokens per step")
    return show.picture(figure, "Tokens per step against D for several acceptance rates, on the curve Σ a^i.")
