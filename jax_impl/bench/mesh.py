"""A whole step on a mesh, beside the same work of one of its ranks on one device.

    one     the plain step on one device: 1 / tensor of the channels, the slots and requests of one data rank
    all     `jax_impl.sharding` on data × tensor devices, of which each has as much to do

    step ratio   all / one: 1 when nothing is lost, whatever the mesh
    throughput   data × one / all: requests per second, in those of one data rank on one device

By the device, where many steps follow each other in one program, and by the wall, one call a step. A call of the
unrolled step hands 2 L + 6 arrays to every device, one after another: at small batches the wall is the host's time and
no device's. A call of the chained step, in which x of a layer is y of the one before, hands over 8, as a model's own
program does; it is timed by the wall alone.

Requests of a rank name slots and rows of that rank's part, as an engine places them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jax_impl import checks, sharding
from jax_impl.bench import subjects, timing
from jax_impl.bench.report import MESH_TIMES, at
from jax_impl.bench.step import called_step, timed_step, whole_step
from jax_impl.bench.subjects import Case
from jax_impl.conv import ConvWeight
from jax_impl.layout import AxisOrder, ConvCacheSpec

LOOPS = 64  # steps of one program, so that it takes longer than to start it on every device

SUBJECTS = ("one", "one_chained", "all", "all_chained")  # in the order in which they are timed

Row = dict[str, Any]
Sizes = tuple[int, int]  # data ranks, tensor ranks


def make_mesh(sizes: Sizes) -> jax.sharding.Mesh:
    """The first devices as a mesh of axes "data" and "tensor"."""
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(sizes, ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices)


def global_spec(local: ConvCacheSpec, sizes: Sizes) -> ConvCacheSpec:
    """The geometry of all ranks together."""
    data, tensor = sizes
    return dataclasses.replace(
        local,
        num_slots=local.num_slots * data,
        max_requests=local.max_requests * data,
        conv_dim=local.conv_dim * tensor,
    )


def index_sets(local: ConvCacheSpec, batch: int, data: int, accept: Any) -> tuple[np.ndarray, ...]:
    """Slots, rows and accepted counts of `batch` requests on each data rank, as global numbers."""
    slots, rows, accepted = [], [], []
    for rank in range(data):
        one = subjects.index_sets(Case(local, batch, 1, accept, seed=rank), 1)
        slots.append(one[0][0] + np.int32(rank * local.num_slots))
        rows.append(one[1][0] + np.int32(rank * local.max_requests))
        accepted.append(one[2][0])
    return tuple(map(np.concatenate, (slots, rows, accepted)))


def inputs(spec: ConvCacheSpec, indices: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """Pool and buffer, x of every layer, weight and index arrays, made on the default device."""
    cache = subjects.random_cache(spec)
    x, weights = subjects.verify_inputs(Case(spec, len(indices[0]), spec.num_layers), spec.num_layers)
    weight = ConvWeight(jnp.stack([one.taps for one in weights]))
    return (cache.conv_state, cache.conv_windows), x, weight, *map(jnp.asarray, indices)


def shardings(spec: ConvCacheSpec, mesh: Any) -> tuple[Any, ...]:
    """How `inputs` are divided over the mesh."""
    specs, on = sharding.partition_specs(spec), lambda of: NamedSharding(mesh, of)
    weight = ConvWeight(on(specs.conv_weight.taps))  # pyright: ignore[reportArgumentType]  # a tree of its shape
    return (
        (on(specs.conv_state), on(specs.conv_windows)),
        [on(specs.x)] * spec.num_layers,
        weight,
        *[on(specs.indices)] * 3,
    )


def placed(arguments: tuple[Any, ...], spec: ConvCacheSpec, mesh: Any) -> tuple[Any, ...]:
    """`inputs`, divided over the mesh."""
    return jax.tree.map(jax.device_put, arguments, shardings(spec, mesh))


def check(sizes: Sizes, local: ConvCacheSpec, batch: int, implementation: checks.Implementation) -> bool:
    """Prints and returns whether the step on the mesh leaves the bits of the plain step on one device."""
    spec, mesh = global_spec(local, sizes), make_mesh(sizes)
    arguments = inputs(spec, index_sets(local, batch, sizes[0], "random"))
    plain = jax.jit(whole_step("unrolled", spec, implementation, stack_y=True))(*arguments)
    on_mesh = jax.jit(whole_step("unrolled", spec, implementation, stack_y=True, mesh=mesh))(
        *placed(arguments, spec, mesh)
    )
    unsigned = {2: np.uint16, 4: np.uint32}[spec.item_bytes]
    same = all(
        np.array_equal(np.asarray(one).view(unsigned), np.asarray(other).view(unsigned))
        for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(on_mesh), strict=True)
    )
    where = f"check mesh data={sizes[0]} tensor={sizes[1]} {spec.axis_order} conv_dim={spec.conv_dim} B={batch}"
    print(f"{where} {implementation}: {'same' if same else 'DIFFERENT'}", flush=True)
    return same


def small(sizes: Sizes, order: AxisOrder) -> bool:
    """`check` on a geometry that the CPU compiles in seconds, of the XLA form."""
    return check(sizes, ConvCacheSpec(2, 11, 6, 24, 4, 4, axis_order=order), 5, "xla")


def rows(
    local: ConvCacheSpec,
    sizes: Sizes,
    batches: Sequence[int],
    repeats: int,
    accept: Any,
    *,
    compare: bool,
    implementation: checks.Implementation = "pallas",
) -> Iterator[Row]:
    """One row per batch size, requests of one data rank; what fails is recorded under `errors`."""
    spec = global_spec(local, sizes)
    if compare and not check(sizes, dataclasses.replace(local, num_layers=2), min(batches), implementation):
        batches = ()
        yield {**_identity(spec, sizes, 0), "errors": {"check": "results differ from the plain step"}}
    for batch in batches:
        row = _identity(spec, sizes, batch)
        try:
            arguments = inputs(local, index_sets(local, batch, 1, accept))
            _time(row, "one", local, None, arguments, implementation, repeats)
            mesh, indices = make_mesh(sizes), index_sets(local, batch, sizes[0], accept)
            arguments = placed(inputs(spec, indices), spec, mesh)
            _time(row, "all", spec, mesh, arguments, implementation, repeats)
        except Exception as error:
            row["errors"] = {next(name for name in SUBJECTS if name not in row): timing.reason(error)}
        ratios = dict(_ratios(row))
        row["step_ratio"] = {kind: round(ratio, 4) for kind, ratio in ratios.items()}
        row["throughput"] = {kind: round(sizes[0] / ratio, 4) for kind, ratio in ratios.items()}
        yield row


def _ratios(row: Row) -> Iterator[tuple[str, float]]:
    """All devices' time over one's, of every kind of which both are there."""
    for kind, (form, path) in MESH_TIMES.items():
        if f"all{form}" in row:  # which is timed last
            yield kind, at(row, f"all{form}", *path) / at(row, f"one{form}", *path)


def _identity(spec: ConvCacheSpec, sizes: Sizes, batch: int) -> Row:
    names = ("axis_order", "num_draft_tokens", "width", "conv_dim", "num_layers", "num_slots", "dtype")
    fields = {name: getattr(spec, name) for name in names}
    return {"operation": "mesh", **fields, "batch": batch, "data": sizes[0], "tensor": sizes[1]}


def _time(
    row: Row,
    name: str,
    spec: ConvCacheSpec,
    mesh: Any,
    arguments: tuple[Any, ...],
    implementation: checks.Implementation,
    repeats: int,
) -> None:
    """Records device time of a step in a program of many, wall time of one call of a queue, and latency of one alone.

    Of the chained step, under `{name}_chained`, the last two.
    """
    caches, x, *others = arguments
    step_of = functools.partial(whole_step, spec=spec, implementation=implementation, stack_y=False, mesh=mesh)
    unrolled = timed_step(step_of("unrolled"), caches, x, (x, *others), LOOPS)
    assert unrolled.alone is not None
    times: Row = timing.marginal_us(unrolled.run, unrolled.calls, repeats)
    row[name] = times | timing.wall_us(unrolled.alone, 1, repeats) | unrolled.facts
    del unrolled  # its arrays with it
    alone, facts = called_step(step_of("chained"), caches, x[0], (x[0], *others))
    row[f"{name}_chained"] = timing.wall_us(alone, 1, repeats) | facts
