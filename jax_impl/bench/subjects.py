"""One operation as something to time: each function compiles or captures it and returns a `Subject`.

Calls rotate over slots, buffer rows and inputs, so that no call finds its data in the cache unless the whole working
set fits there. Lists instead of stacked arrays keep slicing kernels out of the measured run. A JAX round is one program
that loops `LOOPS` times over its calls, so that the device always has work queued; a torch round is one CUDA graph.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.bench import program
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import ConvWeight, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

LOOPS = 8
TURN_BYTES = 2**30  # that the distinct calls of one run move together: more than a cache holds, and a loop's turn costs
TORCH_DEVICE = "cuda"


@dataclasses.dataclass
class Subject:
    """Something to time.

    Attributes:
      run: `run(rounds)` makes that many rounds and waits for the last.
      calls: of the operation in one round.
      facts: what is known of its program without timing it: compile time, temporary memory, launches per call.
      keep: what must live as long as `run`.
      alone: for a whole step, the round as a caller makes it: one step a round, not looped on the device.
    """

    run: Callable[[int], None]
    calls: int
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep: Any = None
    alone: Callable[[int], None] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured point: geometry, batch and number of calls in a run."""

    spec: ConvCacheSpec
    batch: int
    calls: int  # distinct calls, made in turn
    accept: Literal["all", "random"] = "random"  # accepted tokens of every request: D, or 1 … D at random
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

    @property
    def step_bytes(self) -> int:
        """Bytes of a whole step: a verify in every layer and one commit."""
        return self.spec.num_layers * self.verify_bytes + self.commit_bytes


def index_sets(case: Case, count: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Per call: distinct random slots, the next rows of the buffer in turn, and accepted counts 1 … D."""
    rng, spec, batch = np.random.default_rng(case.seed), case.spec, case.batch
    least = spec.num_draft_tokens if case.accept == "all" else 1
    slots = [rng.permutation(spec.num_slots)[:batch].astype(np.int32) for _ in range(count)]
    rows = [((np.arange(batch) + call * batch) % spec.max_requests).astype(np.int32) for call in range(count)]
    accepted = [rng.integers(least, spec.num_draft_tokens + 1, batch).astype(np.int32) for _ in range(count)]
    return slots, rows, accepted


def distinct_calls(num_bytes: int, most: int) -> int:
    """How many calls of `num_bytes` each move `TURN_BYTES` together: 2 … `most`."""
    return max(2, min(most, -(-TURN_BYTES // num_bytes)))


def random_cache(spec: ConvCacheSpec, seed: int = 0) -> ConvCache:
    """A cache of normal random values, made on the device."""
    state, windows = jax.random.split(jax.random.key(seed))
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return ConvCache(make(state, spec.state_shape, spec.dtype), make(windows, spec.windows_shape, spec.dtype), spec)


def jax_commit(case: Case, cache: ConvCache, implementation: checks.Implementation) -> Subject:
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

    arguments = (cache.conv_windows, slots, rows, accepted)
    return looped(commits, jnp.copy(cache.conv_state), arguments, case.calls)


def repeated(body: Callable[..., Any], loops: int = LOOPS) -> Callable[..., Any]:
    """`body(carried, *arguments)` applied `loops` times to what it returns."""

    def run(carried: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, loops, lambda _, value: body(value, *arguments), carried)

    return run


def looped(
    body: Callable[..., Any], carried: Any, arguments: tuple[Any, ...], calls: int, loops: int = LOOPS
) -> Subject:
    """A program that applies `body`, `calls` calls, `loops` times to `carried`, donated from round to round."""
    compiled, facts = compiled_with_facts(repeated(body, loops), (carried, *arguments), (0,), calls * loops)
    held = [carried]

    def rounds_of(rounds: int) -> None:
        for _ in range(rounds):
            held[0] = compiled(held[0], *arguments)
        jax.block_until_ready(held[0])

    return Subject(rounds_of, calls * loops, facts)


def compiled_with_facts(
    function: Callable[..., Any], arguments: Sequence[Any], donated: Sequence[int], calls: int, options: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The compiled function, and the seconds it took to trace and to compile beside `program.facts`.

    `arguments` are arrays or their shapes; `options` are compiler options that are not the process's.
    """
    start = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=tuple(donated)).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    done = time.perf_counter()
    seconds = {"trace_s": round(traced - start, 3), "compile_s": round(done - traced, 3)}
    return compiled, {**seconds, **program.facts(compiled, calls)}


def verify_inputs(case: Case, count: int, tokens: int | None = None) -> tuple[list[jax.Array], list[ConvWeight]]:
    """Inputs of `count` calls in the state's dtype, D tokens each unless told, and every layer's prepared weight."""
    spec = case.spec
    keys = jax.random.split(jax.random.key(case.seed), count + spec.num_layers)
    shape = (case.batch, tokens or spec.num_draft_tokens, spec.conv_dim)
    x = [jax.random.normal(key, shape, spec.dtype) for key in keys[:count]]
    return x, [ConvWeight(jax.random.normal(key, (spec.width, spec.conv_dim), spec.dtype)) for key in keys[count:]]


def jax_verify(case: Case, cache: ConvCache, implementation: checks.Implementation) -> Subject:
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
    return looped(verifies, carried, (cache.conv_state, x, weights, slots, rows), case.calls)


def torch_cache(spec: ConvCacheSpec) -> tuple[Any, Any, Any]:
    """Spec, pool and buffer of random values for the Triton subjects."""
    import torch

    import torch_ref

    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    twin = torch_ref.ConvCacheSpec(**fields)
    dtype = getattr(torch, spec.dtype)
    state = torch.randn(spec.state_shape, device=TORCH_DEVICE, dtype=dtype)
    return twin, state, torch.randn(spec.windows_shape, device=TORCH_DEVICE, dtype=dtype)


def replayed(once: Callable[[int], Any], calls: int, steps: int | None = None) -> Subject:
    """A CUDA graph of `once(0)` … `once(calls - 1)`; a round is one replay of it.

    `steps` is 1 for the graph of a whole step: the round then counts as one call, and can be waited for alone.
    """
    import torch

    for call in (0, calls - 1):  # what is compiled on first use cannot be captured
        once(call)
    graph, kept = _captured(lambda: [once(call) for call in range(calls)])

    def run(rounds: int) -> None:
        for _ in range(rounds):
            graph.replay()
        torch.cuda.synchronize()

    facts = {"launches": calls / (steps or calls)}
    return Subject(run, steps or calls, facts, keep=(graph, kept, once), alone=run if steps else None)


def _captured(work: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of what `work` launches, and what it returned. A capture that fails is tried once more.

    In the mode "thread_local": in "global" a capture fails when JAX's threads, in the same process, allocate or query
    an event meanwhile.
    """
    import torch

    for attempts_left in (1, 0):
        torch.cuda.synchronize()
        stream, pool, graph = torch.cuda.current_stream(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                made = work()
            return graph, made
        except RuntimeError:
            _forget_capture(stream, pool)
            if not attempts_left:
                raise
    raise AssertionError  # both attempts return or raise


def _forget_capture(stream: Any, pool: Any) -> None:
    """Undoes what torch leaves behind when the end of a capture raises; later captures would fail for it.

    The capture's stream stays the current one, the allocator keeps asking whether an allocation belongs to the capture,
    and the random generator believes to be captured: it refuses every use outside ("Offset increment outside graph
    capture"). It is given a new state; only how random inputs are drawn depends on it.
    """
    import torch

    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError, AttributeError):  # private; raises when the capture did end
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def torch_commit(case: Case, cache: Any) -> Subject:
    """Triton commits in one CUDA graph; `cache` comes from `torch_cache`."""
    slots, rows, accepted = (on_device(one) for one in index_sets(case, case.calls))
    return replayed(lambda call: triton_commit(cache, slots[call], rows[call], accepted[call]), case.calls)


def torch_verify(case: Case, cache: Any) -> Subject:
    """Triton verifies in one CUDA graph, one layer each in turn."""
    layers = case.spec.num_layers
    slots, rows, _ = (on_device(one) for one in index_sets(case, case.steps))
    x, weight = torch_inputs(case, cache, case.calls)
    return replayed(
        lambda call: triton_verify(cache, x[call], weight, call % layers, slots[call // layers], rows[call // layers]),
        case.calls,
    )


def on_device(arrays: Sequence[np.ndarray]) -> list[Any]:
    """NumPy arrays as tensors on the GPU."""
    import torch

    return [torch.from_numpy(array).to(TORCH_DEVICE) for array in arrays]


def torch_inputs(case: Case, cache: Any, count: int) -> tuple[list[Any], Any]:
    """Random inputs of `count` verifies, and the weights of all layers."""
    import torch

    spec, state = case.spec, cache[1]
    shape = (case.batch, spec.num_draft_tokens, spec.conv_dim)
    x = [torch.randn(shape, device=TORCH_DEVICE, dtype=state.dtype) for _ in range(count)]
    return x, torch.randn((spec.num_layers, spec.conv_dim, spec.width), device=TORCH_DEVICE, dtype=state.dtype)


def triton_commit(cache: Any, slots: Any, rows: Any, accepted: Any) -> Any:
    """One commit of all layers."""
    import torch_ref

    twin, state, windows = cache
    return torch_ref.commit_conv_state(
        state, windows, slots, accepted, spec=twin, window_rows=rows, implementation="triton"
    )


def triton_verify(cache: Any, x: Any, weight: Any, layer: int, slots: Any, rows: Any) -> Any:
    """One layer's verify."""
    import torch_ref

    twin, state, windows = cache
    return torch_ref.causal_conv1d_verify(
        x, state, windows, weight[layer], spec=twin, state_indices=slots, layer=layer, window_rows=rows,
        implementation="triton",
    )  # fmt: skip


def torch_copies(sizes: Sequence[int], *, kernel: bool, steps: int | None = None) -> Subject:
    """Device copies in one CUDA graph; copy i reads and writes `sizes[i]` bytes together.

    Copies of one size rotate over buffers that together are larger than the cache. `kernel` False is the driver's copy;
    True is an elementwise kernel that reads and writes the same bytes, which starts faster when there are few.
    """
    import torch

    buffers = {size: _copy_buffers(size, sizes.count(size)) for size in set(sizes)}

    def once(call: int) -> None:
        source, target = buffers[sizes[call]]
        turn = sizes[:call].count(sizes[call]) % len(source)
        if kernel:
            torch.bitwise_not(source[turn], out=target[turn])
        else:
            target[turn].copy_(source[turn])

    return replayed(once, len(sizes), steps)


def _copy_buffers(num_bytes: int, calls: int) -> tuple[Any, Any]:
    """Sources and targets, one row a copy, no more than half a gigabyte of each if two rows are less."""
    import torch

    sets = min(calls, max(2, 512 * 2**20 // num_bytes))
    source = torch.randint(0, 2**31 - 1, (sets, max(4, num_bytes // 8)), dtype=torch.int32, device=TORCH_DEVICE)
    return source, torch.empty_like(source)
