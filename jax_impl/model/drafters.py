"""Who proposes the tokens of a block. Drafters are pytrees and run on the device, inside the jitted step.

A drafter sees each request's tokens so far and proposes up to D - 1 more, or none. What it proposes changes how fast a
sequence grows and never what it says.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Drafts(NamedTuple):
    """Proposed tokens int32 `[B, D - 1]`, and how many of each row count, int32 `[B]` from 0 to D - 1."""

    tokens: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """Proposes tokens inside a traced step."""

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        """Proposals to follow `history[b, :lengths[b]]`.

        Args:
          history: int32 `[B, max_len]`.
          lengths: int32 `[B]`, tokens so far; the last one has not been through the model yet.
          slots: int32 `[B]`, a slot inside the pool for every row, also where no request is.
          step: int32 scalar, a number that no two steps share.
          max_drafts: D - 1.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoDrafts:
    """Proposes nothing: every step verifies one token, which is plain decoding."""

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        """No tokens."""
        return Drafts(jnp.zeros((lengths.shape[0], max_drafts), jnp.int32), jnp.zeros_like(lengths))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last time that the newest tokens occurred, in the prompt or in what was generated.

    The longest suffix of up to `max_ngram` tokens that occurred before decides; among its occurrences, one that has
    the most tokens behind it, then the latest. Nothing is proposed when not even the newest token occurred before.
    """

    max_ngram: int = dataclasses.field(default=3, metadata={"static": True})

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        """Up to `max_drafts` tokens that followed an earlier occurrence.

        >>> history = jnp.array([[7, 8, 9, 5, 7, 8, 0, 0]])
        >>> drafts = PromptLookup().propose(history, jnp.array([6]), jnp.array([0]), jnp.int32(0), 3)
        >>> drafts.tokens.tolist(), drafts.count.tolist()
        ([[9, 5, 7]], [3])
        """
        if max_drafts == 0:
            return NoDrafts().propose(history, lengths, slots, step, 0)
        max_len = history.shape[1]
        first, count = jnp.zeros_like(lengths), jnp.zeros_like(lengths)
        start = jnp.arange(max_len, dtype=jnp.int32)[None, :]
        for ngram in range(1, self.max_ngram + 1):  # a longer one that is found overrides a shorter one
            padded = jnp.pad(history, ((0, 0), (0, ngram)))
            same = start + ngram < lengths[:, None]
            for offset in range(ngram):
                place = jnp.maximum(lengths - ngram + offset, 0)[:, None]
                newest = jnp.take_along_axis(history, place, axis=1)
                same &= padded[:, offset : offset + max_len] == newest
            following = jnp.minimum(lengths[:, None] - start - ngram, max_drafts)
            score = jnp.where(same, following * max_len + start, -1)
            best = jnp.argmax(score, axis=1).astype(jnp.int32)
            found = jnp.max(score, axis=1) >= 0
            first = jnp.where(found, best + ngram, first)
            count = jnp.where(found, jnp.take_along_axis(following, best[:, None], axis=1)[:, 0], count)
        places = jnp.minimum(first[:, None] + jnp.arange(max_drafts, dtype=jnp.int32)[None, :], max_len - 1)
        return Drafts(jnp.take_along_axis(history, places, axis=1), count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorruptedReplay:
    """Proposes known sequences, each token replaced by a wrong one with probability 1 - `acceptance`.

    With the greedy sequences as targets, a draft is accepted with that probability if those before it are: any
    acceptance rate can be had, for tests and measurements.

    Attributes:
      targets: int32 `[C, max_len]`, each slot's whole sequence, prompt included; -1 where it is not known.
      acceptance: float32 scalar, from 0 to 1.
      key: a typed PRNG key.
      vocab_size: a wrong token is the next one, modulo this.
    """

    targets: jax.Array
    acceptance: jax.Array
    key: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def remember(self, slot: int, tokens: Any) -> "CorruptedReplay":
        """The same drafter with the sequence of a slot replaced."""
        row = jnp.full((self.targets.shape[1],), -1, jnp.int32)
        known = jnp.asarray(tokens, jnp.int32)[: row.shape[0]]
        return dataclasses.replace(self, targets=self.targets.at[slot].set(row.at[: known.shape[0]].set(known)))

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        """The next tokens of the targets, some of them wrong; fewer where the target ends."""
        batch, max_len = history.shape
        places = lengths[:, None] + jnp.arange(max_drafts, dtype=jnp.int32)[None, :]
        tokens = self.targets[slots[:, None], jnp.minimum(places, max_len - 1)]
        known = (tokens >= 0) & (places < max_len)
        draw = jax.random.uniform(jax.random.fold_in(self.key, step), (batch, max_drafts))
        wrong = (tokens + 1) % self.vocab_size
        tokens = jnp.where(draw < self.acceptance, tokens, wrong)
        count = jnp.sum(jnp.cumprod(known.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        return Drafts(jnp.where(known, tokens, 0), count)


def corrupted_replay(
    num_slots: int, max_len: int, vocab_size: int, acceptance: float, seed: int = 0
) -> CorruptedReplay:
    """A `CorruptedReplay` that knows no sequence yet."""
    targets = jnp.full((num_slots, max_len), -1, jnp.int32)
    return CorruptedReplay(targets, jnp.float32(acceptance), jax.random.key(seed), vocab_size)
