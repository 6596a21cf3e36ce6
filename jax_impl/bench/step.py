"""A whole decoding step as an engine calls it: a verify in every layer, then one commit, in one jit.

    unrolled   a Python loop over the layers; every layer has an x of its own, as the layer before would leave it
    scan       `lax.scan`: pool and buffer are the carry, the layer's index and x (of a stacked array) come along as xs

Pool and buffer are donated; weights are stacked `[L, K, conv_dim]`. The kernel writes y whether or not anyone reads it,
so under scan it is not stacked for the kernel; XLA would drop it, so there it is.

References: the same bytes copied in one CUDA graph, and the step of `torch_ref`'s Triton kernels in one.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_impl import checks
from jax_impl.bench import subjects
from jax_impl.bench.subjects import Case, Subject
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import ConvWeight, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

Form = Literal["unrolled", "scan"]
FORMS: tuple[Form, ...] = ("unrolled", "scan")
# Sets of slots, rows and counts that the steps of a queue take in turn. With one, every array stays where it is, as the
# outputs of the step before do in an engine that keeps its indices on the device; each new address costs XLA an update
# of the graph that it replays.
INDEX_SETS = 1

Step = Callable[..., Any]  # (pool, windows), x, weight, slots, rows, accepted → (pool, windows), y of all layers


def whole_step(form: Form, spec: ConvCacheSpec, implementation: checks.Implementation, *, stack_y: bool) -> Step:
    """The step as a function to be jitted with its first argument donated.

    It takes ((pool, buffer), x, weight, slots, rows, accepted) and returns (pool, buffer) and y of all layers: a list
    when unrolled, with `stack_y` one array under scan, otherwise None. x is a list `[B, D, conv_dim]` of L arrays when
    unrolled, one array `[L, B, D, conv_dim]` under scan.
    """

    def verify(carried: Any, x: jax.Array, layer: Any, weight: ConvWeight, slots: Any, rows: Any) -> tuple[Any, Any]:
        pool, windows = carried
        y, windows = causal_conv1d_verify(
            x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer, window_rows=rows,
            implementation=implementation,
        )  # fmt: skip
        return (pool, windows), y

    def commit(carried: Any, slots: Any, rows: Any, accepted: Any) -> tuple[jax.Array, jax.Array]:
        pool, windows = carried
        pool = commit_conv_state(
            pool, windows, slots, accepted, spec=spec, window_rows=rows, implementation=implementation
        )
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

    return unrolled if form == "unrolled" else scan


def inputs(form: Form, case: Case) -> tuple[Any, ConvWeight]:
    """Random x in the form's way, and the stacked weights of all layers."""
    x, weights = subjects.verify_inputs(case, case.spec.num_layers)
    taps = jnp.stack([weight.taps for weight in weights])
    return (x if form == "unrolled" else jnp.stack(x)), ConvWeight(taps)


def jax_step(form: Form, case: Case, cache: ConvCache, implementation: checks.Implementation) -> Subject:
    """The step: `run` loops LOOPS of them on the device, `alone` calls the jitted step once a round."""
    stack_y = implementation == "xla"
    step = whole_step(form, case.spec, implementation, stack_y=stack_y)
    x, weight = inputs(form, case)
    indices = [tuple(map(jnp.asarray, one)) for one in zip(*subjects.index_sets(case, INDEX_SETS), strict=True)]

    def own_cache() -> tuple[jax.Array, jax.Array]:
        return jnp.copy(cache.conv_state), jnp.copy(cache.conv_windows)

    def own_y() -> Any:
        return [jnp.zeros_like(one) for one in x] if form == "unrolled" else jnp.zeros_like(x) if stack_y else None

    # y is donated and comes back in the same arrays, so that every call finds its arrays where the last one had them:
    # in an engine they are temporaries of a larger program.
    own_program = jax.jit(lambda carried, *arguments: step(carried[0], *arguments), donate_argnums=0, keep_unused=True)
    _, facts = subjects.compiled_with_facts(step, (own_cache(), x, weight, *indices[0]), (0,), 1)
    held = [(own_cache(), own_y())]

    def alone(rounds: int) -> None:
        for number in range(rounds):
            held[0] = own_program(held[0], x, weight, *indices[number % INDEX_SETS])
        jax.block_until_ready(held[0])

    # y is carried, or XLA would drop what is written to it.
    device = subjects.looped(
        lambda carried, *arguments: step(carried[0], *arguments), (own_cache(), own_y()), (x, weight, *indices[0]), 1
    )
    return Subject(device.run, device.calls, facts, alone=alone)


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
