"""Who proposes the tokens of a block. Drafters are pytrees and run on the device, inside the jitted step.

A drafter sees each request's tokens so far and proposes up to D - 1 more, or none: one after the other, or as a tree
whose root is the last token so far. What it proposes changes how fast a sequence grows and never what it says.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Drafts(NamedTuple):
    """Proposed tokens int32 `[B, D - 1]`, and how many of each row count, int32 `[B]` from 0 to D - 1.

    `parents` int32 `[B, D]` makes them a tree: node 0 is the last token so far, whose link is not looked at, node i is
    `tokens[:, i - 1]` and follows the earlier node `parents[:, i]`. A node whose link is none, and all behind it, do
    not count. None is a chain: every token follows the one before it.
    """

    tokens: jax.Array
    count: jax.Array
    parents: jax.Array | None = None


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
        place, following = _continuations(history, lengths, self.max_ngram, max_drafts)
        first, count = _longest(following, place)
        return Drafts(_tokens_at(history, first, max_drafts), count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeLookup:
    """Proposes what followed twice: where the newest tokens have had two different continuations, both.

    The first continuation is the one of `PromptLookup`. The second comes from another occurrence of the same suffix,
    chosen by the same rule among those that part from the first early enough for both to have a token of their own.
    Nodes are the tokens that both begin with, then the rest of the first, then the rest of the second, which gets half
    of the places that are left. Without a second continuation the drafts are a chain, those of `PromptLookup`.
    """

    max_ngram: int = dataclasses.field(default=3, metadata={"static": True})

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        """Up to `max_drafts` tokens on one or two branches.

        >>> history = jnp.array([[7, 8, 1, 2, 7, 8, 1, 3, 7, 8]])
        >>> drafts = TreeLookup().propose(history, jnp.array([10]), jnp.array([0]), jnp.int32(0), 5)
        >>> drafts.tokens.tolist(), drafts.parents.tolist()  # 1, then 2 7 or 3 7
        ([[1, 2, 7, 3, 7]], [[-1, 0, 1, 2, 1, 4]])
        """
        node = jnp.arange(max_drafts + 1, dtype=jnp.int32)[None, :]
        links = jnp.broadcast_to(node - 1, (lengths.shape[0], max_drafts + 1))
        if max_drafts == 0:
            return Drafts(*NoDrafts().propose(history, lengths, slots, step, 0)[:2], links)
        place, following = _continuations(history, lengths, self.max_ngram, max_drafts)
        first, count = _longest(following, place)
        tokens = _tokens_at(history, first, max_drafts)

        # How many tokens each continuation shares with the first, and whether the next one of both is another.
        common, is_same = jnp.zeros_like(following), following >= 0
        padded = jnp.pad(history, ((0, 0), (0, max_drafts)))
        is_other = jnp.zeros_like(is_same)
        for draft in range(max_drafts - 1):  # to part at the last draft leaves no place for a second
            both = is_same & (draft < jnp.minimum(following, count[:, None]))
            is_equal = padded[:, draft : draft + history.shape[1]] == tokens[:, draft : draft + 1]
            is_other |= both & ~is_equal
            is_same = both & is_equal
            common += is_same.astype(jnp.int32)
        second, second_count = _longest(jnp.where(is_other, following, 0), place)
        shared = jnp.take_along_axis(common, second[:, None], axis=1, mode="promise_in_bounds")[:, 0]
        of_second = jnp.where(second_count > 0, jnp.minimum(second_count - shared, (max_drafts - shared) // 2), 0)
        of_first = jnp.minimum(count, max_drafts - of_second)

        draft = node[:, :-1]
        others = _tokens_at(history, second - of_first + shared, max_drafts)
        tokens = jnp.where(draft < of_first[:, None], tokens, others)
        is_second_start = (of_second > 0)[:, None] & (node == 1 + of_first[:, None])
        return Drafts(tokens, of_first + of_second, jnp.where(is_second_start, shared[:, None], links))


def _continuations(
    history: jax.Array, lengths: jax.Array, max_ngram: int, max_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Where the longest suffix that occurred before has gone on: places `[1, max_len]`, and how many tokens follow.

    The count int32 `[B, max_len]` is from 1 to `max_drafts` where the tokens before a place are that suffix, else 0.
    """
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    following = jnp.zeros_like(history)
    for ngram in range(1, max_ngram + 1):  # a longer one that is found overrides a shorter one
        is_same = (place >= ngram) & (place < lengths[:, None])
        for back in range(1, ngram + 1):
            newest = _tokens_at(history, lengths - back, 1)
            is_same &= jnp.pad(history, ((0, 0), (back, 0)))[:, : history.shape[1]] == newest
        found = jnp.any(is_same, axis=1)[:, None]
        count = jnp.where(is_same, jnp.minimum(lengths[:, None] - place, max_drafts), 0)
        following = jnp.where(found, count, following)
    return place, following


def _longest(following: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The place `[B]` with the most tokens behind it, the latest of these, and how many they are; 0 for none."""
    best = jnp.argmax(following * place.shape[1] + place, axis=1).astype(jnp.int32)
    count = jnp.take_along_axis(following, best[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    return best, count


def _tokens_at(history: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """`count` tokens from place `first` `[B]` on; what is outside the history is anything."""
    places = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(history, jnp.clip(places, 0, history.shape[1] - 1), axis=1, mode="promise_in_bounds")


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
