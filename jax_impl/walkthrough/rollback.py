"""One verify step and its commit by hand, then many: every accepted count, rejected tokens, and commits that go wrong.

Everything is one layer in float32. The truth is always a second pool that decodes the accepted tokens one at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl import causal_conv1d_update, causal_conv1d_verify, commit_conv_state
from jax_impl.layout import ConvCacheSpec
from jax_impl.walkthrough import show
from jax_impl.walkthrough.show import Picture, Table

SPEC = ConvCacheSpec(1, 6, 4, 96, width=4, num_draft_tokens=4, dtype="float32")
DECAY = 0.98  # of the recurrent state behind the convolution: its memory is about 50 tokens

# What a commit can do with the accepted counts n, out of D.
COMMITS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "commit n": lambda n, tokens: n,
    "commit n - 1": lambda n, tokens: n - 1,
    "commit D": lambda n, tokens: jnp.full_like(n, tokens),
    "no commit": lambda n, tokens: jnp.zeros_like(n),
}


def every_count(conv_state: jax.Array, conv_windows: jax.Array, slot: int, *, spec: ConvCacheSpec) -> Table:
    """Commits row 0 of the buffer to `slot` once for every count 0 … D, each time from the same pool.

    Args:
      conv_state: one layer's pool of one channel, `spec.state_shape[1:]`; it is not changed.
      conv_windows: one layer's buffer, as verify left it.
    """
    rows = []
    for n in range(spec.num_draft_tokens + 1):
        counts = jnp.asarray([n], jnp.int32)
        after = commit_conv_state(conv_state, conv_windows, jnp.asarray([slot], jnp.int32), counts, spec=spec)
        columns = "–" if n == 0 else f"{n - 1} … {n + spec.state_columns - 2}"
        rows.append((n, columns, as_integers(after[slot]), as_integers(jnp.delete(after, slot, axis=0))))
    return Table(("accepted n", "columns of the row", f"slot {slot} after it", "all other slots"), rows)


def as_integers(array: jax.Array) -> list[int]:
    """The elements in order as integers, for arrays that hold whole numbers.

    >>> as_integers(jnp.array([[1.0, 2.0]]))
    [1, 2]
    """
    return [int(value) for value in np.asarray(array).ravel()]


# ---- many steps ------------------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """Errors against one-token decoding after every step, each `[steps]`, and the accepted counts `[steps, B]`.

    `conv_error` and `recurrent_error` are relative, |difference| / |truth| in the Euclidean norm; `different_bits`
    counts elements of the pool.
    """

    conv_error: np.ndarray
    recurrent_error: np.ndarray
    different_bits: np.ndarray
    accepted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """A number of steps with random inputs and random acceptance.

    Attributes:
      steps: verify + commit steps.
      accept_all: every draft is accepted in every step, which hides some mistakes.
      seed: of inputs, weights and acceptance.
      spec: geometry, of four requests in six slots.
    """

    steps: int = 100
    accept_all: bool = False
    seed: int = 0
    spec: ConvCacheSpec = SPEC

    def trace(self, commit: str) -> Trace:
        """Runs the steps with one of `COMMITS`.

        Raises:
          ValueError: `commit` is none of them.
        """
        if commit not in COMMITS:
            raise ValueError(f"`commit`: expected one of {', '.join(COMMITS)}, got {commit!r}.")
        spec, rng = self.spec, np.random.default_rng(self.seed)
        batch, tokens = spec.max_requests, spec.num_draft_tokens
        weight = rng.uniform(-0.5, 0.5, (spec.conv_dim, spec.width)).astype(np.float32)
        x = rng.standard_normal((self.steps, batch, tokens, spec.conv_dim), np.float32)
        accepted = rng.integers(1, tokens + 1, (self.steps, batch)).astype(np.int32)
        if self.accept_all:
            accepted = np.full_like(accepted, tokens)
        pool = rng.standard_normal(spec.state_shape[1:], np.float32)
        conv, recurrent, different = _trace(
            jnp.asarray(weight), jnp.asarray(x), jnp.asarray(accepted), jnp.asarray(pool), commit, spec
        )
        return Trace(np.asarray(conv), np.asarray(recurrent), np.asarray(different), accepted)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _trace(
    weight: jax.Array, x: jax.Array, accepted: jax.Array, pool: jax.Array, commit: str, spec: ConvCacheSpec
) -> Any:
    """The errors of `Trace`: a pool that is verified and committed, beside one that decodes token by token."""
    slots = jnp.asarray([5, 1, 4, 2], jnp.int32)
    zeros = jnp.zeros((slots.shape[0], spec.conv_dim), jnp.float32)

    def follow(recurrent: jax.Array, y: jax.Array, n: jax.Array) -> jax.Array:
        """The recurrent state after the first n of the tokens of y `[B, D, conv_dim]`."""
        for token in range(spec.num_draft_tokens):
            recurrent = jnp.where((token < n)[:, None], recurrent * DECAY + y[:, token], recurrent)
        return recurrent

    def decode(truth: jax.Array, x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = []
        for token in range(spec.num_draft_tokens):
            alive = jnp.where(token < n, slots, -1)
            y, truth = causal_conv1d_update(x[:, token], truth, weight, spec=spec, state_indices=alive)
            outputs.append(y)
        return truth, jnp.stack(outputs, axis=1)

    def step(carry: Any, inputs: Any) -> Any:
        (pool, windows, recurrent), (truth, recurrent_truth) = carry
        x, n = inputs
        y, windows = causal_conv1d_verify(x, pool, windows, weight, spec=spec, state_indices=slots)
        pool = commit_conv_state(pool, windows, slots, COMMITS[commit](n, spec.num_draft_tokens), spec=spec)
        truth, y_truth = decode(truth, x, n)
        recurrent, recurrent_truth = follow(recurrent, y, n), follow(recurrent_truth, y_truth, n)
        different = lax.bitcast_convert_type(pool, jnp.uint32) != lax.bitcast_convert_type(truth, jnp.uint32)
        errors = _relative(pool, truth), _relative(recurrent, recurrent_truth), jnp.sum(different, dtype=jnp.int32)
        return ((pool, windows, recurrent), (truth, recurrent_truth)), errors

    windows = jnp.zeros(spec.windows_shape[1:], spec.dtype)
    return lax.scan(step, ((pool, windows, zeros), (pool, zeros)), (x, accepted))[1]


def _relative(value: jax.Array, truth: jax.Array) -> jax.Array:
    return jnp.linalg.norm((value - truth).ravel()) / jnp.linalg.norm(truth.ravel())


def error_table(run: Run) -> Table:
    """The state of every kind of commit after the last step, and in how many steps its bits were right."""
    rows = []
    for name in COMMITS:
        trace = run.trace(name)
        right = int((trace.different_bits == 0).sum())
        rows.append(
            (name, f"{right} of {run.steps}", f"{trace.conv_error[-1]:.0%}", f"{trace.recurrent_error[-1]:.0%}")
        )
    counts = "every token accepted" if run.accept_all else "1 … D tokens accepted at random"
    columns = ("what is committed", "steps with the right bits", "conv state off by", "recurrent state off by")
    return Table(columns, rows, f"after {run.steps} steps, {counts}")


def error_picture(run: Run) -> Picture:
    """Error of conv state and recurrent state over the steps, for every kind of commit."""
    figure, panels = show.panels(9, 3, columns=2)
    for name, style in zip(COMMITS, ("k-", "C0-", "C1--", "C3:"), strict=True):
        trace = run.trace(name)
        for axes, error in zip(panels, (trace.conv_error, trace.recurrent_error), strict=True):
            axes.plot(
                np.arange(1, run.steps + 1), error, style, linewidth=1.4, label=name if axes is panels[1] else None
            )
    show.finish(panels[0], "convolution state", "step", "relative error")
    show.finish(panels[1], "recurrent state behind it", "step", "relative error")
    alt = "Relative error over the steps: zero when n is committed, around 1 for the other commits."
    return show.picture(figure, alt)


def rejected_tokens_vanish(run: Run) -> Table:
    """One step with drafts that agree in their first n tokens and differ afterwards, for every n: bits that differ."""
    spec, rng = run.spec, np.random.default_rng(run.seed)
    pool = jnp.asarray(rng.standard_normal(spec.state_shape[1:], np.float32))
    weight = jnp.asarray(rng.standard_normal((spec.conv_dim, spec.width), np.float32))
    first, second = rng.standard_normal((2, 1, spec.num_draft_tokens, spec.conv_dim), np.float32)
    slots = jnp.asarray([3], jnp.int32)
    rows = []
    for n in range(1, spec.num_draft_tokens + 1):
        token = np.arange(spec.num_draft_tokens)[None, :, None]
        buffers, pools = [], []
        for x in (first, np.where(token < n, first, second)):
            empty = jnp.zeros(spec.windows_shape[1:], spec.dtype)
            _, windows = causal_conv1d_verify(jnp.asarray(x), pool, empty, weight, spec=spec, state_indices=slots)
            buffers.append(np.asarray(windows).view(np.uint32))
            committed = commit_conv_state(pool, windows, slots, jnp.asarray([n], jnp.int32), spec=spec)
            pools.append(np.asarray(committed).view(np.uint32))
        differ = [int((one != other).sum()) for one, other in (buffers, pools)]
        rows.append((n, spec.num_draft_tokens - n, *differ))
    return Table(("accepted n", "rejected tokens", "elements that differ in the buffer", "in the pool"), rows)
