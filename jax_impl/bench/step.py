"""A whole decoding step as an engine calls it: a verify in every layer, then one commit, in one jit.

    unrolled   a Python loop over the layers; every layer has an x and a y of its own, which are arguments and results
    scan       `lax.scan`: pool and buffer are the carry, the layer's index and x (of a stacked array) come along as xs
    chained    unrolled, but x of the next layer is y of this one: one x goes in and one y comes out

Pool and buffer are donated; weights are stacked `[L, K, conv_dim]`. The kernel writes y whether or not anyone reads it,
so under scan it is not stacked for the kernel; XLA would drop it, so there it is.

In an engine x and y are temporaries inside one program. A call of the unrolled step passes 2 L + 6 arrays, which costs
the host more than small batches cost the device; a call of the chained step passes 8. But a chained layer finds its x
in the cache, where the layer before left it: its device time is not to be compared with the copies. What is, is its
wall time with its own device time, and with the unrolled step's.

References: the same bytes copied in one CUDA graph, and the step of `torch_ref`'s Triton kernels in one.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_impl import checks, sharding
from jax_impl.bench import subjects
from jax_impl.bench.subjects import Case, Subject
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import ConvWeight, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

Form = Literal["unrolled", "scan", "chained"]
FORMS: tuple[Form, ...] = ("unrolled", "scan")  # of which each gives y of every layer
TIMED: tuple[Form, ...] = (*FORMS, "chained")

Step = Callable[..., Any]  # (pool, windows), x, weight, slots, rows, accepted → (pool, windows), y of all layers


def whole_step(
    form: Form, spec: ConvCacheSpec, implementation: checks.Implementation, *, stack_y: bool, mesh: Any = None
) -> Step:
    """The step as a function to be jitted with its first argument donated, on one device or on the arrays of a mesh.

    It takes ((pool, buffer), x, weight, slots, rows, accepted) and returns (pool, buffer) and y: when unrolled lists of
    L arrays `[B, D, conv_dim]`; under scan x is one array `[L, B, D, conv_dim]`, and so is y with `stack_y`, otherwise
    None; chained x is `[B, D, conv_dim]` of the first layer and y of the last.
    """
    verify_of: Callable[..., Any] = causal_conv1d_verify
    commit_of: Callable[..., Any] = commit_conv_state
    if mesh is not None:
        verify_of = functools.partial(sharding.sharded_verify, mesh=mesh)
        commit_of = functools.partial(sharding.sharded_commit, mesh=mesh)

    def verify(carried: Any, x: jax.Array, layer: Any, weight: ConvWeight, slots: Any, rows: Any) -> tuple[Any, Any]:
        pool, windows = carried
        y, windows = verify_of(
            x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer, window_rows=rows,
            implementation=implementation,
        )  # fmt: skip
        return (pool, windows), y

    def commit(carried: Any, slots: Any, rows: Any, accepted: Any) -> tuple[jax.Array, jax.Array]:
        pool, windows = carried
        pool = commit_of(pool, windows, slots, accepted, spec=spec, window_rows=rows, implementation=implementation)
        return pool, windows

    def unrolled(carried: Any, x: Any, weight: ConvWeight, slots: Any, rows: Any, accepted: Any) -> Any:
        outputs = []
        for layer in range(spec.num_layers):
            carried, y = verify(carried, x[layer], layer, weight, slots, rows)
            outputs.append(y)
        return commit(carried, slots, rows, accepted), outputs

    def scan(carried: Any, x: jax.Array, weight: ConvWeight, slots: Any, rows: Any, accepted: Any) -> Any:
        def body(carried: Any, layer_and_x: Any) -> tuple[Any, Any]:
            layer, of_layer = layer_and_x
            carried, y = verify(carried, of_layer, layer, weight, slots, rows)
            return carried, y if stack_y else None

        layers = jnp.arange(spec.num_layers, dtype=jnp.int32)
        carried, outputs = jax.lax.scan(body, carried, (layers, x))
        return commit(carried, slots, rows, accepted), outputs

    def chained(carried: Any, x: jax.Array, weight: ConvWeight, slots: Any, rows: Any, accepted: Any) -> Any:
        for layer in range(spec.num_layers):
            carried, x = verify(carried, x, layer, weight, slots, rows)
        return commit(carried, slots, rows, accepted), x

    return {"unrolled": unrolled, "scan": scan, "chained": chained}[form]


def inputs(form: Form, case: Case) -> tuple[Any, ConvWeight]:
    """Random x in the form's way, and the stacked weights of all layers."""
    x, weights = subjects.verify_inputs(case, case.spec.num_layers)
    taps = jnp.stack([weight.taps for weight in weights])
    return {"unrolled": lambda: x, "scan": lambda: jnp.stack(x), "chained": lambda: x[0]}[form](), ConvWeight(taps)


def jax_step(form: Form, case: Case, cache: ConvCache, implementation: checks.Implementation) -> Subject:
    """The step on one device, of one set of slots, rows and counts."""
    stack_y = implementation == "xla"
    step = whole_step(form, case.spec, implementation, stack_y=stack_y)
    x, weight = inputs(form, case)
    (slots,), (rows,), (accepted,) = (list(map(jnp.asarray, one)) for one in subjects.index_sets(case, 1))
    y = None if form == "scan" and not stack_y else x
    return timed_step(step, (cache.conv_state, cache.conv_windows), y, (x, weight, slots, rows, accepted))


def timed_step(step: Step, caches: Any, y: Any, arguments: tuple[Any, ...], loops: int = subjects.LOOPS) -> Subject:
    """A step to time: `run` loops `loops` of them on the device, `alone` calls the jitted step once a round.

    `caches` are pool and buffer, of which copies are donated; `y` are arrays of the kind that the step returns, x for
    instance. y is carried, or XLA would drop what is written to it; it is donated and comes back in the same arrays, so
    that every call finds its arrays where the last one had them, as it does in an engine. Each new address costs XLA an
    update of the graph that it replays; hence one set of indices, too.
    """
    alone, facts = called_step(step, caches, y, arguments)
    device = subjects.looped(carrying_y(step), _own(caches, y), arguments, 1, loops)
    return Subject(device.run, device.calls, facts, alone=alone)


def called_step(
    step: Step, caches: Any, y: Any, arguments: tuple[Any, ...]
) -> tuple[Callable[[int], None], dict[str, Any]]:
    """`alone` and `facts` of `timed_step`, for a step that is timed by the wall only."""
    _, facts = subjects.compiled_with_facts(step, (caches, *arguments), (0,), 1)
    program = jax.jit(carrying_y(step), donate_argnums=0, keep_unused=True)
    held = [_own(caches, y)]

    def alone(rounds: int) -> None:
        for _ in range(rounds):
            held[0] = program(held[0], *arguments)
        jax.block_until_ready(held[0])

    return alone, facts


def _own(caches: Any, y: Any) -> Any:
    """Copies that a program may have for itself."""
    return jax.tree.map(jnp.copy, caches), jax.tree.map(jnp.zeros_like, y)


def carrying_y(step: Step) -> Step:
    """The step as a function of what it returns, (pool, buffer) and the last y."""
    return lambda carried, *arguments: step(carried[0], *arguments)


def torch_step(case: Case, cache: Any) -> Subject:
    """The Triton kernels' step in one CUDA graph."""
    layers = case.spec.num_layers
    (slots,), (rows,), (accepted,) = (subjects.on_device(one) for one in subjects.index_sets(case, 1))
    x, weight = subjects.torch_inputs(case, cache, layers)

    def once(call: int) -> Any:
        if call == layers:
            return subjects.triton_commit(cache, slots, rows, accepted)
        return subjects.triton_verify(cache, x[call], weight, call, slots, rows)

    return subjects.replayed(once, layers + 1, steps=1)


def copies(case: Case, *, kernel: bool) -> Subject:
    """The step's bytes as copies in one CUDA graph: one for each verify, one for the commit."""
    sizes = [case.verify_bytes] * case.spec.num_layers + [case.commit_bytes]
    return subjects.torch_copies(sizes, kernel=kernel, steps=1)
