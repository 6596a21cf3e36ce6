"""Greedy decoding of many requests at once, speculative and exact.

One jitted step with a donated state does everything that a step is:

    draft → block [last token, drafts] → verify in every layer → accept the drafts that greedy decoding agrees with
          → one `commit_after_verify` of all layers' states → append the accepted tokens and the bonus token

    n = 1 + the drafts before the first that differs from the argmax behind its predecessor

Of a tree of drafts the accepted ones are a path: from the root, the last token, to the child that is the argmax behind
its parent, as long as there is one. The path says what is committed, and its keys and values are moved together.
Where logits are NaN nothing is accepted, so that nothing has to be undone: states only move by accepted tokens.

A slot's states hold all tokens of its history but the last. The step stops a sequence at a stop token or at its budget
by itself, so that many steps can be launched without waiting for one; between steps requests join and leave.
"""

import collections
import dataclasses
import functools
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.checks import Implementation, implementation_name
from jax_impl.layout import AxisOrder, ConvCacheSpec, Problems, Storage, as_integer, shown
from jax_impl.model import attention, hybrid
from jax_impl.model.config import ModelConfig
from jax_impl.model.drafters import CorruptedReplay, Drafter, PromptLookup
from jax_impl.model.hybrid import ModelCache
from jax_impl.model.weights import Parameters
from jax_impl.rollback import commit_after_verify

Prompts = Sequence[Sequence[SupportsIndex]]
Budgets = SupportsIndex | Iterable[SupportsIndex]
SHORTEST_PREFILL = 32  # prompts are padded to a power of two of at least this many tokens, so that programs are few


class NotANumberError(RuntimeError):
    """The model gave NaN instead of logits. The requests concerned are where they were, and so are all others."""


class OutOfSlotsError(RuntimeError):
    """There is no free slot or no free row for a request. Nothing has changed; wait until a request leaves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What lives on the device between steps, by slot.

    Attributes:
      cache: the states of all layers.
      history: int32 `[C, max_len]`, prompt and generated tokens.
      lengths: int32 `[C]`, tokens in `history`; the last of them has not been through the model yet.
      remaining: int32 `[C]`, tokens that may still be generated; 0 when finished.
      step: int32 scalar, steps so far.
    """

    cache: ModelCache
    history: jax.Array
    lengths: jax.Array
    remaining: jax.Array
    step: jax.Array


class StepResult(NamedTuple):
    """What a step did, per row: the new tokens `[R, D]`, -1 from `accepted` on; accepted n and verified v `[R]`.

    `path` `[R, D]` has the accepted tokens' places in the block, 0 … n - 1 of a chain, -1 from `accepted` on;
    `is_tree` `[R]` says whether the verified drafts had branches.
    """

    tokens: jax.Array
    accepted: jax.Array
    verified: jax.Array
    path: jax.Array
    is_tree: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "stop_token_ids", "implementation"), donate_argnames="state")
def verify_step(
    parameters: Parameters,
    state: DecodeState,
    drafter: Drafter,
    slots: jax.Array,
    *,
    config: ModelConfig,
    stop_token_ids: tuple[int, ...] = (),
    implementation: Implementation | None = None,
) -> tuple[DecodeState, StepResult]:
    """One step of all rows.

    Args:
      parameters: of the model.
      state: donated.
      drafter: proposes up to D - 1 tokens per row, as a chain or, with storage "inputs" or "dense", as a tree.
      slots: int32 `[R]`, the slot of each row's request, or -1 where there is none.
      config, stop_token_ids, implementation: static.

    Returns:
      The state, and what happened in each row: nothing where there is no request, or a finished one.

    Raises:
      ValueError: the drafter proposes trees, and the storage is "sliding".
    """
    tokens_per_step = state.cache.spec.num_draft_tokens
    live = (slots >= 0) & (slots < state.lengths.shape[0])
    inside = jnp.where(live, slots, 0)
    history, lengths = state.history[inside], state.lengths[inside]
    remaining = jnp.where(live, state.remaining[inside], 0)

    drafts = drafter.propose(history, lengths, inside, state.step, tokens_per_step - 1)
    verified = jnp.minimum(1 + jnp.clip(drafts.count, 0, tokens_per_step - 1), remaining)
    position = jnp.arange(tokens_per_step, dtype=jnp.int32)[None, :]
    parents, verified = _checked_links(drafts.parents, verified, state.cache.spec)
    last = jnp.take_along_axis(history, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    block = jnp.concatenate([last, drafts.tokens], axis=1)
    block = jnp.where(position < verified[:, None], block, 0)

    hidden, cache, step_states = hybrid.verify(
        parameters, config, state.cache, block, verified, lengths - 1, slots, parents=parents,
        implementation=implementation,
    )  # fmt: skip
    greedy, is_number = _greedy(hybrid.logits_of(parameters, hidden))
    is_stop = _is_stop(greedy, stop_token_ids)
    path = None
    if parents is None:
        accepted = _accept(block, greedy, is_number, verified, is_stop)
    else:
        path = _accept_path(block, greedy, is_number, verified, is_stop, parents)
        accepted = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
        greedy, is_stop = (
            jnp.take_along_axis(of, jnp.maximum(path, 0), axis=1, mode="promise_in_bounds") for of in (greedy, is_stop)
        )
        cache = hybrid.keep_path(cache, slots, lengths - 1, path)
    committed = commit_after_verify(
        cache.hybrid, slots, accepted, step_states=step_states, num_valid_tokens=verified, accepted_path=path,
        implementation=implementation,
    )  # fmt: skip

    new = position < accepted[:, None]
    nowhere = jnp.int32(state.history.shape[1]) + position  # past the end, where writes are dropped
    places = jnp.where(new, lengths[:, None] + position, nowhere)
    stopped = jnp.any(is_stop & new, axis=1)
    left = jnp.where(stopped, 0, remaining - accepted)
    rows = jnp.where(live, slots, state.lengths.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32))
    state = DecodeState(
        cache=dataclasses.replace(cache, hybrid=committed),
        history=state.history.at[rows[:, None], places].set(greedy, mode="drop"),
        lengths=state.lengths.at[rows].add(accepted, mode="drop"),
        remaining=state.remaining.at[rows].set(left, mode="drop"),
        step=state.step + 1,
    )
    is_tree = jnp.zeros_like(live)
    if parents is not None:
        is_tree = jnp.any((parents != position - 1) & (position < verified[:, None]), axis=1)
    path = jnp.where(new, position, -1) if path is None else path
    return state, StepResult(jnp.where(new, greedy, -1), accepted, verified, path, is_tree)


def _greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit's token int32 `[...]`, and whether all logits behind it are numbers."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), ~jnp.isnan(jnp.max(logits, axis=-1))


def _accept(
    block: jax.Array, greedy: jax.Array, is_number: jax.Array, verified: jax.Array, is_stop: jax.Array
) -> jax.Array:
    """n of each row.

    Nothing is accepted behind a stop token, nor from the first token on that comes of NaN logits.
    """
    follows = (block[:, 1:] == greedy[:, :-1]) & ~is_stop[:, :-1] & is_number[:, 1:]
    run = jnp.concatenate([is_number[:, :1], follows], axis=1).astype(jnp.int32)
    accepted = jnp.sum(jnp.cumprod(run, axis=1), axis=1, dtype=jnp.int32)
    return jnp.minimum(accepted, verified)


def _accept_path(
    block: jax.Array,
    greedy: jax.Array,
    is_number: jax.Array,
    verified: jax.Array,
    is_stop: jax.Array,
    parents: jax.Array,
) -> jax.Array:
    """The accepted nodes `[R, D]` of each tree, from the root on, then -1; none behind a stop token or NaN logits.

    A node agrees when its token is the argmax behind its parent, and no earlier child of that parent has it too; it is
    accepted when all of its ancestors agree. So accepted nodes are one path, in the order of the block.
    """
    node = jnp.arange(block.shape[1], dtype=jnp.int32)
    is_valid = node[None, :] < verified[:, None]
    parent = jnp.clip(parents, 0, block.shape[1] - 1)
    told, ends = (jnp.take_along_axis(of, parent, axis=1, mode="promise_in_bounds") for of in (greedy, is_stop))
    are_twins = (parents[:, :, None] == parents[:, None, :]) & (block[:, :, None] == block[:, None, :])
    is_second = jnp.any(are_twins & (node[:, None] > node[None, :])[None], axis=2)
    agrees = is_number & ((node == 0)[None, :] | (block == told) & ~ends & ~is_second)
    accepted = jnp.all(agrees[:, None, :] | ~attention.ancestors(parents), axis=2) & is_valid
    place = jnp.cumsum(accepted, axis=1, dtype=jnp.int32) - 1
    is_there = accepted[:, None, :] & (place[:, None, :] == node[None, :, None])  # row, place on the path, node
    path = jnp.sum(jnp.where(is_there, node[None, None, :], 0), axis=2, dtype=jnp.int32)
    return jnp.where(jnp.any(is_there, axis=2), path, -1)


def _checked_links(
    parents: jax.Array | None, verified: jax.Array, spec: ConvCacheSpec
) -> tuple[jax.Array | None, jax.Array]:
    """Links with a root, and how many nodes there are before the first that does not follow an earlier one."""
    if parents is None:
        return None, verified
    if spec.storage == "sliding":
        problems = Problems()
        _refuse_trees(problems)
        problems.raise_if_any()
    node = jnp.arange(spec.num_draft_tokens, dtype=jnp.int32)[None, :]
    parents = jnp.where(node == 0, -1, parents)
    follows = (node == 0) | (parents >= 0) & (parents < node)
    sound = jnp.sum(jnp.cumprod(follows.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return parents, jnp.minimum(verified, sound)


def _refuse_trees(problems: Problems) -> None:
    hint = "The drafter proposes trees, and a shared run of columns holds chains only."
    problems.add("storage", '"inputs" or "dense"', '"sliding"', hint)


def _is_stop(tokens: jax.Array, stop_token_ids: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.logical_or, (tokens == stop for stop in stop_token_ids), jnp.zeros(tokens.shape, bool))


@functools.partial(jax.jit, static_argnames=("config", "stop_token_ids", "implementation"), donate_argnames="state")
def prefill_step(
    parameters: Parameters,
    state: DecodeState,
    prompts: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    budgets: jax.Array,
    *,
    config: ModelConfig,
    stop_token_ids: tuple[int, ...] = (),
    implementation: Implementation | None = None,
) -> tuple[DecodeState, jax.Array]:
    """Runs prompts int32 `[B, T]` into their slots and samples each one's first token, int32 `[B]`; -1 of NaN logits.

    Everything of the slots is replaced. A row with length 0 and slot -1 is padding.
    """
    hidden, cache = hybrid.prefill(
        parameters, config, state.cache, prompts, lengths, slots, implementation=implementation
    )
    newest = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
    first, is_number = _greedy(hybrid.logits_of(parameters, hidden))
    first = jnp.where(is_number, first, -1)
    stopped = _is_stop(first, stop_token_ids)
    count, max_len = state.history.shape
    position = jnp.arange(max_len, dtype=jnp.int32)[None, :]
    padded = jnp.pad(prompts, ((0, 0), (0, max(0, max_len - prompts.shape[1]))))[:, :max_len]
    history = jnp.where(position < lengths[:, None], padded, 0)
    history = jnp.where(position == lengths[:, None], first[:, None], history)
    rows = jnp.where(slots >= 0, slots, count + jnp.arange(slots.shape[0], dtype=jnp.int32))
    state = dataclasses.replace(
        state,
        cache=cache,
        history=state.history.at[rows].set(history, mode="drop"),
        lengths=state.lengths.at[rows].set(lengths + 1, mode="drop"),
        remaining=state.remaining.at[rows].set(jnp.where(stopped, 0, budgets - 1), mode="drop"),
    )
    return state, first


def cache_bytes(
    config: ModelConfig,
    dtype: str,
    *,
    max_requests: int,
    max_len: int,
    num_draft_tokens: int,
    storage: Storage = "sliding",
) -> int:
    """Bytes of an engine beside its parameters: its cache with one slot per request, and the more of what a step and a
    prefill of the longest prompts in all rows make on their way."""
    cache = jax.eval_shape(
        lambda: hybrid.allocate_model_cache(
            config, dtype, num_slots=max_requests, max_requests=max_requests, max_len=max_len,
            num_draft_tokens=num_draft_tokens, storage=storage,
        )
    )  # fmt: skip
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    recurrent = cache.hybrid.recurrent_state
    step_states_bytes = num_draft_tokens * recurrent.size * recurrent.dtype.itemsize
    return sum(sizes) + max(step_states_bytes, prefill_bytes(config, dtype, max_requests=max_requests, max_len=max_len))


def prefill_bytes(config: ModelConfig, dtype: str, *, max_requests: int, max_len: int) -> int:
    """Bytes that a prefill of `max_requests` prompts of `max_len` tokens holds at a time, estimated from its shapes.

    What the largest layer makes of every token, and the scores of one part of the attention: as they are, as
    exponentials and as shares. A compiler that fuses well needs less, one that keeps copies somewhat more.
    """
    length, itemsize = _padded_length(max_len), jnp.dtype(dtype).itemsize
    heads_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    key_heads_dim = config.linear_value_heads * config.linear_key_dim  # of q or k, repeated to the value heads
    of_token = []
    if config.num_linear_layers:  # projected, convolved; then in float32: the same, its heads by token, and o twice
        projected = 3 * config.conv_dim + config.value_size
        of_token.append(itemsize * projected)
        of_token[-1] += 4 * (config.conv_dim + 4 * key_heads_dim + 4 * config.value_size)
    if config.num_full_layers:  # projected, rotated in float32, mixed and gated
        of_token.append(itemsize * (6 * heads_dim + 4 * kv_dim) + 4 * 2 * (heads_dim + kv_dim))
    if config.moe is not None:  # of each of a token's experts: its row, gate and up, their product, what it adds twice
        pairs = config.moe.experts_per_token
        of_token.append(itemsize * pairs * (3 * config.hidden_size + 3 * config.moe.intermediate_size))
    if len(config.moe_layers) < config.num_layers or config.moe is None:
        of_token.append(itemsize * 3 * config.intermediate_size)
    residual = 3 * itemsize * config.hidden_size
    part = attention.query_block(max_requests, length)
    scores = max_requests * config.num_heads * part * length * (4 + 4 + itemsize) if config.num_full_layers else 0
    return max_requests * length * (max(of_token) + residual) + scores


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """One sequence being decoded: its prompt, what was generated so far, and where it lives.

    `finish_reason` is "stop" behind a stop token, "length" at the budget, and None before.
    """

    identity: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    row: int
    slot: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


@dataclasses.dataclass
class Statistics:
    """Counts over requests and steps; prefill and the first token, which it samples, are not in them.

    Attributes:
      steps: launched steps. request_steps: steps of one request each.
      tokens: generated tokens, n of each request step, the bonus token included.
      histogram: how often each n occurred, 1 … D.
      proposed, accepted: by draft position 1 … D - 1, how often a draft was verified there, and accepted. In a tree a
        draft's position is that of its node, branch after branch.
      trees: request steps whose drafts had branches. second_branches: those whose accepted path has left the first one.
      seconds: from each step's launch until its tokens were here.
    """

    num_draft_tokens: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    trees: int = 0
    second_branches: int = 0
    histogram: list[int] = dataclasses.field(init=False)
    proposed: list[int] = dataclasses.field(init=False)
    accepted: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.histogram = [0] * self.num_draft_tokens
        self.proposed = [0] * (self.num_draft_tokens - 1)
        self.accepted = [0] * (self.num_draft_tokens - 1)

    def add(
        self,
        accepted: Sequence[int],
        verified: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
        is_tree: Sequence[bool] | None = None,
    ) -> None:
        """Counts one step of all rows; rows without a request have n = 0. Without paths the drafts were chains."""
        self.steps += 1
        for row, (n, v) in enumerate(zip(accepted, verified, strict=True)):
            if n < 1:
                continue
            chain = list(range(n))
            path = chain if paths is None else list(paths[row][:n])
            self.tokens += n
            self.histogram[n - 1] += 1
            self.trees += is_tree is not None and is_tree[row]
            self.second_branches += path != chain
            for draft in range(v - 1):
                self.proposed[draft] += 1
                self.accepted[draft] += draft + 1 in path

    @property
    def request_steps(self) -> int:
        """Steps of one request each."""
        return sum(self.histogram)

    @property
    def mean_accepted_length(self) -> float:
        """Generated tokens / request steps: the bonus token counts, so plain decoding has 1."""
        return self.tokens / self.request_steps if self.request_steps else 0.0

    @property
    def position_rates(self) -> list[float]:
        """By draft position, accepted / verified drafts."""
        return [got / all_ if all_ else 0.0 for got, all_ in zip(self.accepted, self.proposed, strict=True)]


class Progress(NamedTuple):
    """New tokens of one request, after it joined or after a step."""

    request: Request
    tokens: list[int]


class Engine:
    """Decodes requests in slots of one cache.

    Args:
      config, parameters: the model.
      max_requests: rows of a step, requests in flight R.
      num_slots: slots C of the cache; None means one per row.
      max_len: tokens of one sequence, prompt and generated.
      num_draft_tokens: D, tokens verified per step and request.
      drafter: None means prompt lookup. One that proposes trees needs a storage that holds them.
      stop_token_ids: None means the checkpoint's.
      axis_order, storage: of the convolution's cache. implementation: of its operations.

    Raises:
      ValueError: one message that names every wrong argument: a size does not fit the model or the other sizes, or
        the drafter proposes trees and the storage is "sliding".

    Example:
      >>> from jax_impl.model.tiny import tiny_model
      >>> engine = Engine(*tiny_model(), max_requests=2, max_len=32)
      >>> [len(tokens) for tokens in engine.generate([[5, 6], [7, 8, 9], [5]], max_new_tokens=4)]
      [4, 4, 4]
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        max_requests: int = 8,
        num_slots: int | None = None,
        max_len: int = 512,
        num_draft_tokens: int = 4,
        drafter: Drafter | None = None,
        stop_token_ids: Sequence[int] | None = None,
        axis_order: AxisOrder = "time_major",
        storage: Storage = "sliding",
        implementation: Implementation | None = None,
    ) -> None:
        of_cache = {
            "num_slots": num_slots, "num_draft_tokens": num_draft_tokens, "axis_order": axis_order, "storage": storage,
        }  # fmt: skip
        _check_engine(config, parameters, max_requests, max_len, stop_token_ids, drafter, implementation, of_cache)
        num_slots = max_requests if num_slots is None else num_slots
        self.config, self.parameters, self.max_len = config, parameters, max_len
        self.drafter: Drafter = PromptLookup() if drafter is None else drafter
        stop_token_ids = config.stop_token_ids if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = tuple(operator.index(token) for token in stop_token_ids)
        self.implementation: Implementation | None = implementation
        cache = hybrid.allocate_model_cache(
            config, str(parameters.embedding.dtype), num_slots=num_slots, max_requests=max_requests, max_len=max_len,
            num_draft_tokens=num_draft_tokens, axis_order=axis_order, storage=storage,
        )  # fmt: skip
        by_slot = functools.partial(jnp.zeros, dtype=jnp.int32)
        self.state = DecodeState(
            cache, by_slot((num_slots, max_len)), by_slot(num_slots), by_slot(num_slots), jnp.int32(0)
        )
        self.requests: dict[int, Request] = {}
        self.statistics = Statistics(num_draft_tokens)
        self._rows = list(range(max_requests))
        self._free_slots = collections.deque(range(num_slots))  # oldest first, so that slots and rows drift apart
        self._slots_of_rows = jnp.full((max_requests,), -1, jnp.int32)
        self._unfinished: tuple[StepResult, list[Request]] | None = None  # a step that was launched and not collected
        self._next_identity = 0

    @property
    def free(self) -> int:
        """Requests that can join now."""
        return min(len(self._rows), len(self._free_slots))

    def check_request(self, prompt: Sequence[SupportsIndex], max_new_tokens: SupportsIndex) -> None:
        """Raises `ValueError` for a request that can never be served."""
        problems = Problems()
        if isinstance(prompt, str) or not isinstance(prompt, Iterable) or not hasattr(prompt, "__len__"):
            problems.add("prompt", "tokens, as integers", shown(prompt))
            problems.raise_if_any()
        numbers, budget = [_integer(token) for token in prompt], _integer(max_new_tokens)
        known, limit = range(self.config.vocab_size), self.config.max_positions
        bad = [token for token, number in zip(prompt, numbers, strict=True) if number is None or number not in known]
        if not len(prompt):
            problems.add("prompt", "at least one token", "none")
        if bad:
            problems.add("prompt", f"tokens from 0 to vocab_size - 1 = {self.config.vocab_size - 1}", bad[0])
        if budget is None:
            problems.add("max_new_tokens", "an integer", repr(max_new_tokens))
        elif budget < 1:
            problems.add("max_new_tokens", "at least 1", budget)
        elif len(prompt) >= limit:
            hint = f"The model has {limit} positions, and a new token needs one: shorten the prompt."
            problems.add("prompt", f"at most {limit - 1} tokens", len(prompt), hint)
        elif len(prompt) + budget > limit:
            most = f"at most {limit - len(prompt)} behind a prompt of {len(prompt)} tokens"
            hint = f"The model has {limit} positions: ask for fewer tokens, or shorten the prompt."
            problems.add("max_new_tokens", most, budget, hint)
        elif len(prompt) + budget > self.max_len:
            got = f"a prompt of {len(prompt)} and max_new_tokens = {budget}"
            problems.add("max_len", f"at least {len(prompt) + budget} tokens", self.max_len, f"There is {got}.")
        problems.raise_if_any()

    def _checked(self, prompts: Prompts, max_new_tokens: Budgets) -> tuple[list[tuple[int, ...]], list[int]]:
        """Prompts and the budget of each, as Python's integers, or `ValueError`."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable) or not hasattr(prompts, "__len__"):
            raise ValueError(f"`prompts`: expected a list of prompts, got {shown(prompts)}.")
        budgets: list[Any] = [max_new_tokens] * len(prompts)
        if isinstance(max_new_tokens, Iterable) and _integer(max_new_tokens) is None:  # an array without axes is one
            budgets = list(max_new_tokens)
        if len(budgets) != len(prompts):
            problems = Problems()
            problems.add("max_new_tokens", f"one number, or one of each of {len(prompts)} prompts", len(budgets))
            problems.raise_if_any()
        for prompt, budget in zip(prompts, budgets, strict=True):
            self.check_request(prompt, budget)
        return [tuple(map(operator.index, prompt)) for prompt in prompts], [
            operator.index(budget) for budget in budgets
        ]

    def add(self, prompts: Prompts, max_new_tokens: Budgets) -> list[Progress]:
        """Requests join: their prompts run into free slots, and each one's first token is sampled.

        Whatever it raises, no request has joined and rows and slots are as they were. Only a prefill that fails while
        it runs may take the engine's state, which it was given, with it; the error then says so.

        Args:
          prompts: tokens of each request, at least one.
          max_new_tokens: of all requests or of each.

        Returns:
          The requests with their first tokens; one that is finished by it has left already.

        Raises:
          OutOfSlotsError: there are fewer free slots or rows than prompts; no request joined.
          NotANumberError: the model gave NaN logits for a prompt.
          ValueError: a prompt is empty, has tokens that the model does not know or that are no integers, or does not
            fit `max_len`.
        """
        checked, budgets = self._checked(prompts, max_new_tokens)
        if len(prompts) > self.free:
            raise OutOfSlotsError(
                f"`prompts`: expected at most {self.free} requests, got {len(prompts)}: {len(self._free_slots)} slots "
                f"and {len(self._rows)} rows are free. Add them when others have left."
            )
        if not checked:
            return []
        rows, free_slots = self._rows.copy(), self._free_slots.copy()
        try:
            joined = [
                Request(self._next_identity + index, prompt, budget, *self._take_row_and_slot())
                for index, (prompt, budget) in enumerate(zip(checked, budgets, strict=True))
            ]
            sampled = self._run_prompts(joined)
            if min(sampled) < 0:
                bad = [index for index, token in enumerate(sampled) if token < 0]
                raise NotANumberError(f"`prompts`: expected logits that are numbers, got NaN for prompts {bad}.")
        except BaseException as error:  # an interrupt during the compilation too
            self._rows, self._free_slots = rows, free_slots
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                error.add_note("The prefill failed with the engine's state in it, which is gone: make a new engine.")
            raise
        self.requests.update((request.identity, request) for request in joined)
        self._next_identity += len(joined)
        self._place()
        return [self._receive(request, [token]) for request, token in zip(joined, sampled, strict=True)]

    def _run_prompts(self, joined: list[Request]) -> list[int]:
        """Runs the prompts of new requests into their slots; the first token of each."""
        batch = min(_power_of_two(len(joined)), self._slots_of_rows.shape[0])
        length = _padded_length(max(len(request.prompt) for request in joined))
        tokens, ints = np.zeros((batch, length), np.int32), np.tile(np.asarray([[0], [-1], [0]], np.int32), (1, batch))
        for index, request in enumerate(joined):
            tokens[index, : len(request.prompt)] = request.prompt
            ints[:, index] = len(request.prompt), request.slot, request.max_new_tokens
        return np.asarray(self._prefill(tokens, *ints))[: len(joined)].tolist()

    def replay(self, request: Request, tokens: Sequence[int]) -> None:
        """Tells a `CorruptedReplay` what a request is going to generate."""
        assert isinstance(self.drafter, CorruptedReplay)
        self.drafter = self.drafter.remember(request.slot, [*request.prompt, *tokens])

    def step(self) -> list[Progress]:
        """One step of all requests: their new tokens. A request that is finished by it has left.

        When it is interrupted, or fails, before its tokens are here, the next call goes on where it was: it waits for
        the step that runs, or launches it again.

        Raises:
          NotANumberError: logits of some requests are NaN. These have not moved and still run, so that the step may be
            repeated for them; what the others got is in their `tokens`.
          RuntimeError: a step that failed while it ran has taken the engine's state with it.
        """
        start = time.perf_counter()
        if self._unfinished is None:
            self._unfinished = self.launch(), list(self.requests.values())
        result, running = self._unfinished
        fetched: StepResult = jax.device_get(result)
        self._unfinished = None
        progress = self._hand_out(fetched, running)
        self.statistics.seconds += time.perf_counter() - start
        return progress

    def warm_up(self) -> None:
        """Compiles the step by taking one without requests, so that it does not count as time of the first step."""
        assert not self.requests
        jax.block_until_ready(self.launch())

    def launch(self) -> StepResult:
        """Starts a step and does not wait for it; `collect` its result, in order, before requests join or leave."""
        self._check_state()
        self.state, result = verify_step(
            self.parameters, self.state, self.drafter, self._slots_of_rows, config=self.config,
            stop_token_ids=self.stop_token_ids, implementation=self.implementation,
        )  # fmt: skip
        return result

    def collect(self, result: StepResult) -> list[Progress]:
        """Waits for a launched step and hands out its tokens."""
        return self._hand_out(jax.device_get(result), list(self.requests.values()))

    def _hand_out(self, fetched: StepResult, running: list[Request]) -> list[Progress]:
        """Gives the requests that were in a step their tokens; one that has left since gets none."""
        tokens, accepted, *counts = fetched
        self.statistics.add(accepted.tolist(), *(array.tolist() for array in counts))
        here = [request for request in running if request.identity in self.requests]
        moved = [request for request in here if accepted[request.row] > 0]
        progress = [self._receive(request, tokens[request.row, : accepted[request.row]].tolist()) for request in moved]
        stuck = [request.identity for request in here if accepted[request.row] == 0]
        if stuck:  # a step accepts a token of every request
            raise NotANumberError(
                f"`parameters`: expected logits that are numbers, got NaN for requests {stuck}. "
                "They are where they were before the step: repeat it, or make them leave."
            )
        return progress

    def _check_state(self) -> None:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            raise RuntimeError(
                "`state`: expected the arrays of the engine, got deleted ones. A step that failed while it ran took "
                "them along: make a new engine, and add its requests with what they have generated behind the prompts."
            )

    def leave(self, request: Request) -> None:
        """A request leaves, finished or not; its slot and row are free for others."""
        del self.requests[request.identity]
        self._rows = sorted([*self._rows, request.row])
        self._free_slots.append(request.slot)
        self._place()

    def stream(self, prompts: Prompts, max_new_tokens: Budgets) -> Iterator[tuple[int, Progress]]:
        """Decodes any number of prompts, which join as slots become free: (index of the prompt, its new tokens).

        Others may be decoding beside these, and step for both: what a request has that was not handed out yet is its
        next progress. Requests of a stream that is closed, or that raises, leave.
        """
        checked, budgets = self._checked(prompts, max_new_tokens)
        waiting = collections.deque(range(len(checked)))
        streamed: dict[int, Request] = {}  # by prompt, until all of its tokens are handed out
        handed_out = [0] * len(checked)
        try:
            while waiting or streamed:
                joining = [waiting.popleft() for _ in range(min(self.free, len(waiting)))]
                joined = self.add([checked[index] for index in joining], [budgets[index] for index in joining])
                streamed.update((index, new.request) for new, index in zip(joined, joining, strict=True))
                if self.requests and all(len(one.tokens) == handed_out[index] for index, one in streamed.items()):
                    self.step()
                for index, request in list(streamed.items()):
                    tokens = request.tokens[handed_out[index] :]
                    handed_out[index] += len(tokens)
                    if request.identity not in self.requests:  # finished, or made to leave
                        del streamed[index]
                    if tokens:
                        yield index, Progress(request, tokens)
        finally:
            for request in streamed.values():
                if request.identity in self.requests:
                    self.leave(request)

    def generate(self, prompts: Prompts, max_new_tokens: Budgets) -> list[list[int]]:
        """The generated tokens of each prompt."""
        checked, budgets = self._checked(prompts, max_new_tokens)
        generated: list[list[int]] = [[] for _ in checked]
        for index, new in self.stream(checked, budgets):
            generated[index].extend(new.tokens)
        return generated

    def _take_row_and_slot(self) -> tuple[int, int]:
        return self._rows.pop(0), self._free_slots.popleft()

    def _prefill(self, tokens: np.ndarray, *ints: np.ndarray) -> jax.Array:
        """Runs padded prompts, with their lengths, slots and budgets, and returns their first tokens."""
        self.state, first = prefill_step(
            self.parameters, self.state, tokens, *ints, config=self.config, stop_token_ids=self.stop_token_ids,
            implementation=self.implementation,
        )  # fmt: skip
        return first

    def _receive(self, request: Request, tokens: list[int]) -> Progress:
        request.tokens.extend(tokens)
        if tokens[-1] in self.stop_token_ids:
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.max_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason:
            self.leave(request)
        return Progress(request, tokens)

    def _place(self) -> None:
        """Tells the device which request is in which row."""
        slots = np.full(self._slots_of_rows.shape, -1, np.int32)
        for request in self.requests.values():
            slots[request.row] = request.slot
        self._slots_of_rows = jnp.asarray(slots)


def _check_engine(
    config: Any,
    parameters: Any,
    max_requests: Any,
    max_len: Any,
    stop_token_ids: Any,
    drafter: Any,
    implementation: Any,
    cache_options: dict[str, Any],
) -> None:
    """Raises one `ValueError` for all wrong arguments of an engine, those of its cache among them."""
    problems = Problems()
    for name, value, of in (("config", config, ModelConfig), ("parameters", parameters, Parameters)):
        if not isinstance(value, of):
            problems.add(name, f"a {of.__name__}", type(value).__name__)
    limit = config.max_positions if isinstance(config, ModelConfig) else None
    length, requests = as_integer(max_len), as_integer(max_requests)
    if length is None or length < 2 or (limit is not None and length > limit):
        expected = "an integer of at least 2" if limit is None else f"2 to the model's {limit} positions"
        problems.add("max_len", expected, shown(max_len))
        length = None
    if requests is None or requests < 1:
        problems.add("max_requests", "an integer of at least 1", shown(max_requests))
        requests = None
    if stop_token_ids is not None and (
        not isinstance(stop_token_ids, Iterable) or any(as_integer(token) is None for token in stop_token_ids)
    ):
        problems.add("stop_token_ids", "None or integers", shown(stop_token_ids))
    can_propose = callable(getattr(drafter, "propose", None))
    if drafter is not None and not can_propose:
        problems.add("drafter", "None or a Drafter", shown(drafter))
    implementation_name(problems, implementation)
    spec = _cache_spec(problems, config, parameters, requests, cache_options)
    if (
        can_propose
        and not (spec is None or requests is None or length is None)
        and spec.storage == "sliding"
        and _proposes_trees(drafter, requests, length, spec.num_draft_tokens - 1)
    ):
        _refuse_trees(problems)
    problems.raise_if_any()


def _cache_spec(
    problems: Problems, config: Any, parameters: Any, requests: int | None, options: dict[str, Any]
) -> ConvCacheSpec | None:
    """The convolution's geometry, or None with its problems recorded.

    What has been found wrong already is replaced by something right, so that it is named once.
    """
    fields: dict[str, Any] = {"num_layers": 1, "conv_dim": 1, "width": 2, **options, "max_requests": requests or 1}
    if isinstance(config, ModelConfig):
        fields.update(hybrid.conv_geometry(config))
    if isinstance(parameters, Parameters):
        fields["dtype"] = str(parameters.embedding.dtype)
    if fields["num_slots"] is None:  # as many as requests
        fields["num_slots"] = 1
    try:
        return ConvCacheSpec(**fields)
    except ValueError as error:
        problems.messages += str(error).splitlines()
    return None


def _proposes_trees(drafter: Any, max_requests: int, max_len: int, max_drafts: int) -> bool:
    """Whether drafts have links, found by tracing; a drafter that cannot be traced here is left to the step."""
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    by_row = array((max_requests,))
    try:
        drafts = jax.eval_shape(
            lambda drafter, *arrays: drafter.propose(*arrays, max_drafts),
            drafter, array((max_requests, max_len)), by_row, by_row, array(()),
        )  # fmt: skip
    except Exception:  # of any kind: it may need the mesh, or fail, which the step reports
        return False
    return getattr(drafts, "parents", None) is not None


def _integer(value: object) -> int | None:
    """A number of any integer type as Python's, or None: 1.7 and "1" are no integers."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _padded_length(length: int) -> int:
    """Tokens that a prompt of `length` tokens is padded to."""
    return _power_of_two(max(SHORTEST_PREFILL, length))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
