"""What is measured: each function returns a runner; `runner(rounds)` makes `rounds * calls` calls and waits for them.

Calls rotate over slots, buffer rows and inputs, so that no call finds its data in the cache unless the whole working
set fits there. Lists instead of stacked arrays keep slicing kernels out of the measured run. A JAX round is one program
that loops `LOOPS` times over its calls, so that the device always has work queued.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import ConvWeight, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

Runner = Callable[[int], None]
LOOPS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured point: geometry, batch and number of calls in a run; arrays are made by `inputs`."""

    spec: ConvCacheSpec
    batch: int
    calls: int  # distinct calls, made in turn
    seed: int = 0

    @property
    def steps(self) -> int:
        """Decoding steps that the calls of verify belong to: one call a layer."""
        return -(-self.calls // self.spec.num_layers)

    @property
    def commit_bytes(self) -> int:
        """Bytes one commit of all layers reads and writes when every request is live."""
        return 2 * self.spec.num_layers * self.batch * self.spec.slot_bytes

    @property
    def verify_bytes(self) -> int:
        """Bytes of one layer's verify: reads K-1 + D columns, writes D of y and D+S-1 of the row."""
        spec = self.spec
        columns = spec.width - 1 + 2 * spec.num_draft_tokens + spec.num_columns
        return self.batch * columns * spec.conv_dim * spec.item_bytes


def index_sets(case: Case, count: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Per call: distinct random slots, the next rows of the buffer in turn, and random accepted counts 1 … D."""
    rng, spec, batch = np.random.default_rng(case.seed), case.spec, case.batch
    slots = [rng.permutation(spec.num_slots)[:batch].astype(np.int32) for _ in range(count)]
    rows = [((np.arange(batch) + call * batch) % spec.max_requests).astype(np.int32) for call in range(count)]
    accepted = [rng.integers(1, spec.num_draft_tokens + 1, batch).astype(np.int32) for _ in range(count)]
    return slots, rows, accepted


def random_cache(spec: ConvCacheSpec, seed: int = 0) -> ConvCache:
    """A cache of normal random values, made on the device."""
    state, windows = jax.random.split(jax.random.key(seed))
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return ConvCache(make(state, spec.state_shape, spec.dtype), make(windows, spec.windows_shape, spec.dtype), spec)


def jax_commit(case: Case, cache: ConvCache, implementation: checks.Implementation) -> Runner:
    """Commits of all layers, pool donated."""
    slots, rows, accepted = (list(map(jnp.asarray, one)) for one in index_sets(case, case.calls))

    def commits(pool: jax.Array, windows: jax.Array, slots: Any, rows: Any, accepted: Any) -> jax.Array:
        for call in range(case.calls):
            pool = commit_conv_state(
                pool,
                windows,
                slots[call],
                accepted[call],
                spec=case.spec,
                window_rows=rows[call],
                implementation=implementation,
            )
        return pool

    return _looped(commits, jnp.copy(cache.conv_state), (cache.conv_windows, slots, rows, accepted))


def _looped(body: Callable[..., Any], carried: Any, arguments: tuple[Any, ...]) -> Runner:
    """A runner of a program that applies `body` LOOPS times to `carried`, which is donated from round to round."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carried: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, LOOPS, lambda _, value: body(value, *arguments), carried)

    compiled, held = run.lower(carried, *arguments).compile(), [carried]

    def runner(rounds: int) -> None:
        for _ in range(rounds):
            held[0] = compiled(held[0], *arguments)
        jax.block_until_ready(held[0])

    return runner


def verify_inputs(case: Case, count: int) -> tuple[list[jax.Array], list[ConvWeight]]:
    """Inputs of `count` calls in the state's dtype, and every layer's prepared weight."""
    spec = case.spec
    keys = jax.random.split(jax.random.key(case.seed), count + spec.num_layers)
    shape = (case.batch, spec.num_draft_tokens, spec.conv_dim)
    x = [jax.random.normal(key, shape, spec.dtype) for key in keys[:count]]
    return x, [ConvWeight(jax.random.normal(key, (spec.width, spec.conv_dim), spec.dtype)) for key in keys[count:]]


def jax_verify(case: Case, cache: ConvCache, implementation: checks.Implementation) -> Runner:
    """Verifies, one layer each in turn, buffer donated; the layers of one step share their index arrays."""
    slots, rows, _ = (list(map(jnp.asarray, one)) for one in index_sets(case, case.steps))
    x, weights = verify_inputs(case, case.calls)

    def verifies(carried: Any, pool: jax.Array, x: Any, weights: Any, slots: Any, rows: Any) -> Any:
        windows, outputs = carried[0], []  # every y is carried too, or XLA would drop it
        for call in range(case.calls):
            y, windows = causal_conv1d_verify(
                x[call],
                pool,
                windows,
                weights[call % case.spec.num_layers],
                spec=case.spec,
                state_indices=slots[call // case.spec.num_layers],
                layer=call % case.spec.num_layers,
                window_rows=rows[call // case.spec.num_layers],
                implementation=implementation,
            )
            outputs.append(y)
        return windows, outputs

    carried = jnp.copy(cache.conv_windows), [jnp.zeros_like(one) for one in x]
    return _looped(verifies, carried, (cache.conv_state, x, weights, slots, rows))


def torch_cache(spec: ConvCacheSpec) -> tuple[Any, Any, Any]:
    """Spec, pool and buffer of random values for the Triton subjects."""
    import torch

    import torch_ref

    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    twin = torch_ref.ConvCacheSpec(**fields)
    dtype = getattr(torch, spec.dtype)
    state = torch.randn(spec.state_shape, device="cuda", dtype=dtype)
    return twin, state, torch.randn(spec.windows_shape, device="cuda", dtype=dtype)


def _replayed(once: Callable[[int], Any], calls: int) -> Runner:
    """A CUDA graph of `calls` calls; the runner replays it and waits."""
    import torch

    once(0)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.extend(once(call) for call in range(calls))

    def runner(rounds: int) -> None:
        for _ in range(rounds):
            graph.replay()
        torch.cuda.synchronize()

    runner.kept = (graph, kept, once)  # type: ignore[attr-defined]  # what the graph reads and writes must outlive it
    return runner


def torch_commit(case: Case, cache: Any) -> Runner:
    """Triton commits in one CUDA graph; `cache` comes from `torch_cache`."""
    import torch

    import torch_ref

    twin, state, windows = cache
    slots, rows, accepted = ([torch.from_numpy(a).cuda() for a in one] for one in index_sets(case, case.calls))
    return _replayed(
        lambda call: torch_ref.commit_conv_state(
            state,
            windows,
            slots[call],
            accepted[call],
            spec=twin,
            window_rows=rows[call],
            implementation="triton",
        ),
        case.calls,
    )


def torch_verify(case: Case, cache: Any) -> Runner:
    """Triton verifies in one CUDA graph, one layer each in turn."""
    import torch

    import torch_ref

    twin, state, windows = cache
    spec = case.spec
    slots, rows, _ = ([torch.from_numpy(a).cuda() for a in one] for one in index_sets(case, case.steps))
    shape = (case.batch, spec.num_draft_tokens, spec.conv_dim)
    x = [torch.randn(shape, device="cuda", dtype=state.dtype) for _ in range(case.calls)]
    weight = torch.randn((spec.num_layers, spec.conv_dim, spec.width), device="cuda", dtype=state.dtype)
    return _replayed(
        lambda call: torch_ref.causal_conv1d_verify(
            x[call],
            state,
            windows,
            weight[call % spec.num_layers],
            spec=twin,
            state_indices=slots[call // spec.num_layers],
            layer=call % spec.num_layers,
            window_rows=rows[call // spec.num_layers],
            implementation="triton",
        ),
        case.calls,
    )


def torch_copy(num_bytes: int, calls: int, *, kernel: bool) -> Runner:
    """Device copies that read and write `num_bytes` together, over buffers larger than the cache.

    `kernel` False is the driver's copy; True is an elementwise kernel that reads and writes the same bytes, which
    starts faster when there are few.
    """
    import torch

    words = max(4, num_bytes // 8)
    sets = min(calls, max(2, 512 * 2**20 // num_bytes))
    source = torch.randint(0, 2**31 - 1, (sets, words), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    if kernel:
        return _replayed(lambda call: torch.bitwise_not(source[call % sets], out=target[call % sets]), calls)
    return _replayed(lambda call: target[call % sets].copy_(source[call % sets]), calls)
