"""What the programs around the operations look like once compiled: seconds, temporary memory, copies of the pool.

Nothing runs, so no arrays are made and any geometry fits. A whole step is compiled for several numbers of layers under
scan and unrolled; a commit where engines put it: alone in jit, under scan, under while_loop, and at the end of a larger
step whose layers feed each other and whose counts depend on its outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl import checks
from jax_impl.bench import program, subjects
from jax_impl.bench.step import FORMS, whole_step
from jax_impl.commit import commit_conv_state
from jax_impl.conv import ConvWeight
from jax_impl.layout import ConvCacheSpec

LAYERS = (1, 8, 30, 60)
BATCH = 64
STEPS = 8  # of the loops
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}

Shape = Callable[[tuple[int, ...], str], Any]  # shape and dtype to what stands for the array


def shape_alone(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """An array of the default device that need not exist."""
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """One program to compile: its `form`, geometry and batch; `command_buffers` False turns them off for it alone."""

    form: str
    spec: ConvCacheSpec
    batch: int
    command_buffers: bool = True


def programs(spec: ConvCacheSpec, batch: int, layers: tuple[int, ...] = LAYERS) -> Iterator[Program]:
    """Whole steps of 1 … 60 layers in both forms, then a commit in every place, with and without command buffers.

    Each has a number of slots of its own, so that none finds another's compiled kernels.
    """
    plans = [(form, count, True) for form in FORMS for count in layers]
    plans += [(place, spec.num_layers, buffers) for place in PLACES for buffers in (True, False)]
    for number, (form, count, buffers) in enumerate(plans):
        own = dataclasses.replace(spec, num_layers=count, num_slots=spec.num_slots + number)
        yield Program(form, own, batch, buffers)


# ---- where a commit stands -------------------------------------------------------------------------------------------


def _in_jit(commit: Callable[..., Any], pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
    return commit(pool, windows, slots, accepted)


def _in_scan(commit: Callable[..., Any], pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
    """As many steps as `STEPS`, each with other slots."""
    steps = jnp.arange(STEPS, dtype=jnp.int32)
    return lax.scan(lambda carry, step: (commit(carry, windows, slots + step, accepted), None), pool, steps)[0]


def _in_while_loop(commit: Callable[..., Any], pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
    """As many steps as the largest count, which the compiler does not know."""

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 1, commit(carry[1], windows, slots + carry[0], accepted)

    return lax.while_loop(lambda carry: carry[0] < accepted.max(), body, (jnp.int32(0), pool))[1]


_COMMIT_IN = {"jit": _in_jit, "scan of commits": _in_scan, "while_loop": _in_while_loop}
PLACES = (*_COMMIT_IN, "larger step")


def _larger_step(spec: ConvCacheSpec, implementation: checks.Implementation) -> Callable[..., Any]:
    """Steps in a scan: each layer's y goes through an elementwise mixer to the next, and y decides what is accepted."""
    step = whole_step("scan", spec, implementation, stack_y=True)

    def run(carried: Any, x: jax.Array, weight: ConvWeight, slots: jax.Array, rows: jax.Array) -> Any:
        def one(carry: Any, number: jax.Array) -> tuple[Any, None]:
            carried, x, accepted = carry
            carried, y = step(carried, x, weight, slots + number, rows, accepted)
            score = y.astype(jnp.float32).mean(axis=(0, 3))
            accepted = (score > 0).sum(axis=1, dtype=jnp.int32)
            return (carried, jnp.tanh(y), accepted), None

        nothing = jnp.zeros_like(slots)
        (carried, _, accepted), _ = lax.scan(one, (carried, x, nothing), jnp.arange(STEPS, dtype=jnp.int32))
        return carried, accepted

    return run


# ---- one program -----------------------------------------------------------------------------------------------------


def _function_and_arguments(
    plan: Program, implementation: checks.Implementation, array: Shape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to jit and the shapes to do it with; the first argument is donated."""
    spec, batch = plan.spec, plan.batch
    pool, windows = array(spec.state_shape, spec.dtype), array(spec.windows_shape, spec.dtype)
    index = array((batch,), "int32")
    of_layer = (batch, spec.num_draft_tokens, spec.conv_dim)
    if plan.form in _COMMIT_IN:

        def commit(pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
            return commit_conv_state(pool, windows, slots, accepted, spec=spec, implementation=implementation)

        return functools.partial(_COMMIT_IN[plan.form], commit), (pool, windows, index, index)
    weight = ConvWeight(array((spec.num_layers, spec.width, spec.conv_dim), spec.dtype))
    stacked = array((spec.num_layers, *of_layer), spec.dtype)
    if plan.form == "larger step":
        return _larger_step(spec, implementation), ((pool, windows), stacked, weight, index, index)
    form: Any = plan.form
    x = stacked if form == "scan" else [array(of_layer, spec.dtype)] * spec.num_layers
    step = whole_step(form, spec, implementation, stack_y=implementation == "xla")
    return step, ((pool, windows), x, weight, index, index, index)


def compiled(plan: Program, implementation: checks.Implementation, array: Shape = shape_alone) -> dict[str, Any]:
    """Facts about the compiled program, and the opcodes that copy as much as the pool, which should be none."""
    jax.clear_caches()  # or the second program is not traced
    function, arguments = _function_and_arguments(plan, implementation, array)
    options = None if plan.command_buffers else NO_COMMAND_BUFFERS
    result, facts = subjects.compiled_with_facts(function, arguments, (0,), 1, options)
    copies = program.large_copies(result.as_text(), math.prod(plan.spec.state_shape))
    return {**facts, "pool_copies": copies, "state_bytes": plan.spec.state_bytes}


def in_place(row: dict[str, Any]) -> bool:
    """Whether a compiled program aliases the pool and copies none of its size."""
    return row["alias_bytes"] >= row["state_bytes"] and not row["pool_copies"]
