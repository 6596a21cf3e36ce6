"""Whole prompts through one layer's convolution, from zeros and continued from the slots' states."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_impl import checks
from jax_impl.bench import subjects
from jax_impl.bench.subjects import Subject
from jax_impl.cache import ConvCache
from jax_impl.layout import ConvCacheSpec
from jax_impl.prefill import causal_conv1d_prefill

SIZES = ((1, 512), (4, 512), (32, 128), (1, 8192), (8, 2048))  # prompts B, tokens T of each


@dataclasses.dataclass(frozen=True)
class Case(subjects.Case):
    """One measured point: prompts of `tokens` tokens each, without padding."""

    tokens: int = 1

    @property
    def prefill_bytes(self) -> int:
        """Bytes of one layer's prefill: T columns of x and S of the state read, y and the state written.

        A prompt that starts from zeros reads its own last S inputs instead of the state.
        """
        spec = self.spec
        return 2 * self.batch * (self.tokens + spec.state_columns) * spec.conv_dim * spec.item_bytes


def rotating(spec: ConvCacheSpec, batch: int, tokens: int) -> Case:
    """A point with calls enough for a run, at most one a layer."""
    case = Case(spec, batch, 1, tokens=tokens)
    return dataclasses.replace(case, calls=subjects.distinct_calls(case.prefill_bytes, max(2, spec.num_layers)))


def jax_prefill(case: Case, cache: ConvCache, implementation: checks.Implementation, *, continued: bool) -> Subject:
    """Prefills, one layer each in turn, pool donated; with `continued` the prompts go on from their slots."""
    slots = list(map(jnp.asarray, subjects.index_sets(case, case.calls)[0]))
    x, weights = subjects.verify_inputs(case, case.calls, case.tokens)
    lengths, flags = jnp.full(case.batch, case.tokens, jnp.int32), jnp.ones(case.batch, bool) if continued else None

    def prefills(carried: Any, x: Any, weights: Any, slots: Any, lengths: Any, flags: Any) -> Any:
        pool, outputs = carried[0], []  # every y is carried too, or XLA would drop it
        for call in range(case.calls):
            y, pool = causal_conv1d_prefill(
                x[call],
                pool,
                weights[call % case.spec.num_layers],
                spec=case.spec,
                state_indices=slots[call],
                lengths=lengths,
                has_initial_state=flags,
                layer=call % case.spec.num_layers,
                implementation=implementation,
            )
            outputs.append(y)
        return pool, outputs

    carried = jnp.copy(cache.conv_state), [jnp.zeros_like(one) for one in x]
    return subjects.looped(prefills, carried, (x, weights, slots, lengths, flags), case.calls)
