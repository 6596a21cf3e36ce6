"""The compiled GPU program without a GPU: commit is in place, alone and in loops, for every geometry.

XLA and Mosaic compile for an H200 that is described by `h200_target.textproto`. That proves what the program is
(aliases, memory, copies, custom calls), not what it computes; `test_gpu.py` does that on the card.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_impl import (
    ConvCache,
    ConvWeight,
    HybridCache,
    causal_conv1d_prefill,
    causal_conv1d_update,
    causal_conv1d_verify,
    commit_after_verify,
    commit_conv_state,
    conv,
    gather_windows,
    sharding,
)
from jax_impl.bench import mesh, step, subjects
from jax_impl.bench.program import launches
from jax_impl.layout import ConvCacheSpec
from tests import mesh_cases
from tests.cases import DTYPES, both_orders, both_storages

WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


@pytest.fixture(scope="module")
def h200() -> Iterator[Any]:
    """A mesh of one H200 that is not there, set as the target of everything that is traced."""
    mesh = jax.sharding.Mesh(np.asarray(devices_of("1x1x1")).reshape(1), ("x",))
    with jax.set_mesh(mesh):
        yield mesh


def devices_of(topology: str) -> list[Any]:
    """H200s of hosts × hosts × devices per host; skips without the compiler."""
    for wheel in WHEELS:
        try:
            importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{wheel} is not installed")
    from jax.experimental import topologies

    target = Path(__file__).with_name("h200_target.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology=topology
    ).devices


def compiled(
    function: Callable[..., Any], mesh: Any, *shapes: tuple[tuple[int, ...], str], donate: Sequence[int] = (0,)
) -> Any:
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def arrays_of(spec: ConvCacheSpec, batch: int) -> list[tuple[tuple[int, ...], str]]:
    return [(spec.state_shape, spec.dtype), (spec.windows_shape, spec.dtype), ((batch,), "int32"), ((batch,), "int32")]


INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = \(?\w+\[([\d,]*)\][^=]*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)


def instructions(program: Any) -> list[tuple[str, int]]:
    """(opcode, elements of its first result) of every instruction of the optimized module, fused ones too."""
    text = program.as_text()
    found = [(op, math.prod(int(n) for n in dims.split(",") if n)) for dims, op in INSTRUCTION.findall(text)]
    assert ("parameter" in dict(found)) and len(found) >= 5, "the text of the module was not understood"
    return found


COPIES = {"copy", "copy-start", "convert", "all-gather", "all-gather-start", "transpose", "concatenate", "pad", "slice"}


def assert_in_place(program: Any, spec: ConvCacheSpec) -> None:
    """Aliases at least the pool, needs next to no memory besides, and moves no pool-sized array."""
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= spec.state_bytes
    assert memory.temp_size_in_bytes < spec.state_bytes / 100
    pool = math.prod(spec.state_shape)
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= pool]


STORE = re.compile(r"st\.global(?:\.v(\d))?\.[bfu](\d+)")


def custom_calls(program: Any) -> list[str]:
    return re.findall(r'custom_call_target="(mosaic[^"]*)"', program.as_text())


def commit(spec: ConvCacheSpec, implementation: Any) -> Callable[..., Any]:
    return functools.partial(commit_conv_state, spec=spec, implementation=implementation)


def alone(one: Callable[..., Any]) -> Callable[..., Any]:
    return one


def in_scan(one: Callable[..., Any]) -> Callable[..., Any]:
    """Eight steps; the pool is the carry and the buffer is closed over."""

    def steps(pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
        return lax.scan(lambda carry, i: (one(carry, windows, slots + i, accepted), None), pool, jnp.arange(8))[0]

    return steps


def in_while(one: Callable[..., Any]) -> Callable[..., Any]:
    """As many steps as the first count says."""

    def steps(pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
        def body(carry: Any) -> Any:
            step, pool = carry
            return step + 1, one(pool, windows, slots + step, accepted)

        return lax.while_loop(lambda carry: carry[0] < accepted[0], body, (jnp.int32(0), pool))[1]

    return steps


@pytest.mark.parametrize("place", [alone, in_scan, in_while])
@both_orders
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_one_launch_in_place(h200: Any, dtype: str, axis_order: Any, place: Any) -> None:
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3, dtype, axis_order)
    program = compiled(place(commit(spec, "pallas")), h200, *arrays_of(spec, 9))
    assert_in_place(program, spec)
    assert len(custom_calls(program)) == 1
    assert f"specconv_commit_{axis_order}" in program.as_text()


@pytest.mark.parametrize("place", [alone, in_scan, in_while])
@both_orders
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_xla_form_is_in_place(
    h200: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, axis_order: Any, place: Any
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # copies are of integers there
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3, dtype, axis_order)
    program = compiled(place(commit(spec, "xla")), h200, *arrays_of(spec, 9))
    assert_in_place(program, spec)
    assert not custom_calls(program)


@both_orders
@both_storages
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_all_arguments_at_once_are_still_in_place(
    h200: Any, axis_order: Any, storage: Any, implementation: Any
) -> None:
    """Rows, valid tokens, a null slot and a track set in one launch; one layer's pool and a list of layers too."""
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3, "bfloat16", axis_order, storage)

    def step(pool: Any, windows: Any, slots: Any, accepted: Any, rows: Any, valid: Any) -> Any:
        return commit_conv_state(
            pool,
            windows,
            slots,
            accepted,
            spec=spec,
            window_rows=rows,
            num_valid_tokens=valid,
            null_slot=0,
            track_indices=slots,
            track_num_tokens=valid,
            implementation=implementation,
        )

    more = [((9,), "int32")] * 2
    program = compiled(step, h200, *arrays_of(spec, 9), *more)
    assert_in_place(program, spec)
    assert len(custom_calls(program)) == (implementation == "pallas")
    layers = [(shape[1:], dtype) for shape, dtype in arrays_of(spec, 9)[:2]]
    program = compiled(step, h200, *layers, *arrays_of(spec, 9)[2:], *more)
    assert program.memory_analysis().alias_size_in_bytes >= spec.state_bytes // 6


def test_a_pool_that_is_not_donated_is_copied(h200: Any) -> None:
    """What the detector is for: without donation the same step needs a copy, and the checks see it."""
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3)
    program = compiled(commit(spec, "pallas"), h200, *arrays_of(spec, 9), donate=())
    assert program.memory_analysis().alias_size_in_bytes < spec.state_bytes
    with pytest.raises(AssertionError):
        assert_in_place(program, spec)
    pool = math.prod(spec.state_shape)
    assert [op for op, size in instructions(program) if op in COPIES and size >= pool] == ["copy"]


@pytest.mark.parametrize("width", [2, 3, 4, 5, 7])
@both_orders
def test_every_geometry_compiles(h200: Any, axis_order: Any, width: int) -> None:
    """D = 1, 4, 17 in each dtype: nine conv groups that one call commits in one launch."""
    specs = tuple(
        ConvCacheSpec(2, 7, 3, 128 * (1 + tokens % 3), width, tokens, dtype, axis_order)
        for tokens, dtype in itertools.product((1, 4, 17), DTYPES)
    )

    def step(slots: Any, accepted: Any, *arrays: Any) -> Any:
        return commit_conv_state(arrays[:9], arrays[9:], slots, accepted, spec=specs, implementation="pallas")

    pools, windows = (
        [(getattr(spec, name), spec.dtype) for spec in specs] for name in ("state_shape", "windows_shape")
    )
    program = compiled(step, h200, ((3,), "int32"), ((3,), "int32"), *pools, *windows, donate=range(2, 11))
    assert len(custom_calls(program)) == 1
    assert program.memory_analysis().alias_size_in_bytes >= sum(spec.state_bytes for spec in specs)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_whole_cache_is_one_launch_in_place(h200: Any, per_layer: bool, tracked: bool) -> None:
    """Three conv groups of 22 layers (stacked, or 66 arrays in two launches), recurrent state, both index sets."""
    stack = ConvCacheSpec(22, 65, 64, 2048, 4, 4)
    specs = (
        stack,
        dataclasses.replace(stack, width=3, axis_order="channel_major"),
        dataclasses.replace(stack, conv_dim=4096),
    )
    lead = 1 if per_layer else 0
    conv_shapes = [
        (getattr(one, name)[lead:], one.dtype)
        for one in specs
        for _ in range(22 if per_layer else 1)
        for name in ("state_shape", "windows_shape")
    ]
    per_array = [one for one in specs for _ in range(22 if per_layer else 1)]

    def step(recurrent: Any, steps: Any, slots: Any, accepted: Any, *arrays: Any) -> Any:
        trios = zip(arrays[::2], arrays[1::2], per_array, strict=True)
        caches = [ConvCache(pool, buffer, one) for pool, buffer, one in trios]
        track = {"track_indices": slots + 9, "track_num_tokens": accepted - 1} if tracked else {}
        return commit_after_verify(
            HybridCache(caches, recurrent), slots, accepted, step_states=steps, implementation="pallas", **track
        )

    recurrent = ((22, 65, 16, 64, 128), "float32"), ((22, 8, 4, 16, 64, 128), "float32")
    donate = (0, *range(4, 4 + len(conv_shapes)))
    program = compiled(step, h200, *recurrent, ((8,), "int32"), ((8,), "int32"), *conv_shapes, donate=donate)
    assert len(custom_calls(program)) == (2 if per_layer else 1)
    pools = sum(one.state_bytes for one in specs) + 4 * math.prod(recurrent[0][0])
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < 2**20
    large = [(op, size) for op, size in instructions(program) if op in COPIES and size >= 65 * 2048]
    assert not large


@both_orders
@pytest.mark.parametrize("state_len", [3, 4])
@pytest.mark.parametrize("conv_dim", [128, 640, 8192])
def test_every_block_size_compiles(h200: Any, axis_order: Any, state_len: int, conv_dim: int) -> None:
    """Few requests take narrow blocks, many take wide ones: both batch sizes of a real model's stack."""
    for batch in (1, 64):
        spec = ConvCacheSpec(30, 65, 64, conv_dim, 4, 4, axis_order=axis_order, state_len=state_len)
        program = compiled(commit(spec, "pallas"), h200, *arrays_of(spec, batch))
        assert_in_place(program, spec)


@both_orders
def test_gather_reads_windows_only(h200: Any, axis_order: Any) -> None:
    """The result and nothing else is allocated: no rows are gathered whole."""
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 16, axis_order=axis_order)
    program = compiled(
        lambda windows, accepted: gather_windows(windows, accepted, spec=spec),
        h200,
        *arrays_of(spec, 9)[1:3],
        donate=(),
    )
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes == 6 * 9 * spec.slot_bytes
    assert memory.temp_size_in_bytes < spec.windows_bytes / 100


@both_orders
@both_storages
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_verify_in_every_layer_is_in_place(
    h200: Any, monkeypatch: pytest.MonkeyPatch, axis_order: Any, storage: Any, implementation: Any
) -> None:
    """A loop over a traced layer reads the stacked pool and writes the stacked buffer: no slice of either is made."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = ConvCacheSpec(6, 101, 301, 640, 4, 3, axis_order=axis_order, storage=storage)

    def step(windows: Any, pool: Any, x: Any, weight: Any, slots: Any, valid: Any) -> Any:
        def one_layer(layer: Any, windows: Any) -> Any:
            return causal_conv1d_verify(
                x,
                pool,
                windows,
                weight,
                spec=spec,
                state_indices=slots,
                layer=layer,
                num_valid_tokens=valid,
                implementation=implementation,
            )[1]

        return lax.fori_loop(0, spec.num_layers, one_layer, windows)

    arrays = [(spec.windows_shape, spec.dtype), (spec.state_shape, spec.dtype), ((9, 3, 640), spec.dtype)]
    program = compiled(step, h200, *arrays, ((640, 4), "float32"), ((9,), "int32"), ((9,), "int32"))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= spec.windows_bytes
    one_layer = math.prod(spec.state_shape[1:])
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= one_layer]
    assert len(custom_calls(program)) == (implementation == "pallas")


# Bytes of a piece by bytes of a thread, for rows of 2, 5, 10 and 19 columns.
PIECES = {4: (8, 4, 8, 4), 8: (16, 8, 16, 8), 16: (16, 16, 16, 16)}


@pytest.mark.parametrize("thread_bytes", PIECES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_stored_in_the_widest_pieces(
    h200: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], dtype: str, thread_bytes: int
) -> None:
    """Channel-major verify, as the text of its kernel says: as many stores as the row has pieces, beside those of y."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setattr(conv, "default_thread_bytes", lambda *_, **__: thread_bytes)
    for (width, tokens), piece in zip(((3, 1), (4, 3), (5, 7), (4, 17)), PIECES[thread_bytes], strict=True):
        spec = ConvCacheSpec(2, 7, 6, 1024, width, tokens, dtype, "channel_major")

        def step(windows: Any, pool: Any, x: Any, weight: Any, slots: Any, spec: ConvCacheSpec = spec) -> Any:
            options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1, "implementation": "pallas"}
            return causal_conv1d_verify(x, pool, windows, weight, **options)[::-1]

        jax.clear_caches()
        capfd.readouterr()
        arrays = [(spec.windows_shape, dtype), (spec.state_shape, dtype), ((6, tokens, 1024), dtype)]
        program = compiled(step, h200, *arrays, ((1024, width), dtype), ((6,), "int32"))
        assert program.memory_analysis().alias_size_in_bytes >= spec.windows_bytes
        stores = [int(count or 1) * int(bits) // 8 for count, bits in STORE.findall(capfd.readouterr().out)]
        run_bytes = spec.num_columns * thread_bytes
        assert sorted(stores) == sorted([thread_bytes] * tokens + [piece] * (run_bytes // piece))


@both_orders
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_update_kernel_is_in_place(h200: Any, axis_order: Any, dtype: str) -> None:
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3, dtype, axis_order)

    def step(pool: Any, x: Any, weight: Any, slots: Any, layer: Any) -> Any:
        options = {"spec": spec, "state_indices": slots, "layer": layer}
        return causal_conv1d_update(x, pool, weight, **options, implementation="pallas")[::-1]

    arrays = [(spec.state_shape, dtype), ((9, 640), dtype), ((640, 4), dtype), ((9,), "int32"), ((), "int32")]
    program = compiled(step, h200, *arrays)
    assert_in_place(program, spec)
    assert len(custom_calls(program)) == 1


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 512])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@both_orders
def test_prefill_is_one_launch_in_place(h200: Any, axis_order: Any, ragged: bool, continues: bool, tokens: int) -> None:
    """Prompts shorter than the state too, whose oldest columns are then known to be zero or the slot's."""
    spec = ConvCacheSpec(30, 65, 64, 8192, 4, 4, axis_order=axis_order)

    def prompt(pool: Any, x: Any, taps: Any, slots: Any, lengths: Any, carried: Any) -> Any:
        return causal_conv1d_prefill(
            x,
            pool,
            ConvWeight(taps),
            spec=spec,
            state_indices=slots,
            layer=7,
            lengths=lengths if ragged else None,
            has_initial_state=carried if continues else None,
            implementation="pallas",
        )

    shapes = [(spec.state_shape, spec.dtype), ((4, tokens, 8192), spec.dtype), ((4, 8192), spec.dtype)]
    program = compiled(prompt, h200, *shapes, ((4,), "int32"), ((4,), "int32"), ((4,), "bool"))
    assert len(custom_calls(program)) == 1
    assert_in_place(program, spec)


@both_orders
def test_the_plain_prefill_is_in_place(h200: Any, axis_order: Any) -> None:
    """Also with initial state, which is read before the pool is written."""
    spec = ConvCacheSpec(30, 65, 64, 2048, 4, 4, axis_order=axis_order)

    def prompt(pool: Any, x: Any, taps: Any, slots: Any, carried: Any) -> Any:
        return causal_conv1d_prefill(
            x, pool, ConvWeight(taps), spec=spec, state_indices=slots, layer=7, has_initial_state=carried,
            implementation="xla",
        )  # fmt: skip

    shapes = [(spec.state_shape, spec.dtype), ((2, 33, 2048), spec.dtype), ((4, 2048), spec.dtype)]
    program = compiled(prompt, h200, *shapes, ((2,), "int32"), ((2,), "bool"))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= spec.state_bytes
    pool = math.prod(spec.state_shape)
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= pool]
    assert memory.temp_size_in_bytes < spec.state_bytes / 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both_orders
def test_a_decoding_step_is_in_place(h200: Any, axis_order: Any, dtype: Any) -> None:
    """A whole model's step: a verify kernel per linear layer, one commit of both states, and no copy of any pool."""
    from jax_impl.model import decode, hybrid
    from jax_impl.model.config import parse_config
    from jax_impl.model.drafters import PromptLookup
    from jax_impl.model.tiny import TINY
    from jax_impl.model.weights import assemble

    config, slots, max_len = parse_config(TINY), 301, 64

    def state() -> Any:
        cache = hybrid.allocate_model_cache(
            config, dtype, num_slots=slots, max_requests=4, max_len=max_len, num_draft_tokens=4, axis_order=axis_order
        )
        by_slot = jnp.zeros(slots, jnp.int32)
        return decode.DecodeState(cache, jnp.zeros((slots, max_len), jnp.int32), by_slot, by_slot, jnp.int32(0))

    def placed(make: Callable[[], Any]) -> Any:
        here = jax.sharding.NamedSharding(h200, jax.sharding.PartitionSpec())
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=here), jax.eval_shape(make))

    shapes = placed(state)
    parameters = placed(lambda: assemble(config, lambda name, shape, dtype: jnp.zeros(shape, dtype), dtype))
    rows = placed(lambda: jnp.zeros(4, jnp.int32))
    step: Any = decode.verify_step
    program = step.lower(parameters, shapes, PromptLookup(), rows, config=config, implementation="pallas").compile()
    assert len(custom_calls(program)) == config.num_linear_layers + 1
    leaves = jax.tree.leaves(shapes)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    pool = min(leaf.size for leaf in (shapes.cache.hybrid.conv.conv_state, shapes.cache.keys))
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= pool]


# --- several of them --------------------------------------------------------------------------------------------------


TOPOLOGIES = [("1x1x2", (1, 2)), ("1x1x2", (2, 1)), ("2x1x1", (2, 1)), ("1x1x8", (1, 8)), ("2x1x4", (2, 4))]


@pytest.mark.parametrize(("topology", "sizes"), TOPOLOGIES)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_on_many_gpus_no_operation_communicates(
    monkeypatch: pytest.MonkeyPatch, implementation: Any, topology: str, sizes: Any
) -> None:
    """GPUs of one host and of two: each operation is the kernel on a rank's own shards, in place, and nothing else."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    devices = np.asarray(devices_of(topology)).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    one = mesh_cases.SPECS[sizes[1] % 2]  # one of each axis order
    spec = dataclasses.replace(one, num_slots=5 * one.num_slots)  # no batch is as large as a rank's pool
    with jax.set_mesh(mesh):
        for name, function, arguments in mesh_cases.calls(spec, mesh, implementation):
            donated = () if name == "gather" else (0,)
            program: Any = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
            assert f"num_partitions={mesh.size}" in program.as_text()
            assert not mesh_cases.COLLECTIVES.findall(program.as_text()), name
            assert len(custom_calls(program)) == (implementation == "pallas" and name != "gather"), name
            if name in ("update", "prefill", "commit", "commit_after_verify"):
                assert program.memory_analysis().alias_size_in_bytes >= spec.state_bytes // mesh.size, name
                shard = math.prod(spec.state_shape) // mesh.size
                assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= shard], name


def step_on_mesh(axis_order: Any, sizes: tuple[int, int]) -> tuple[Any, ConvCacheSpec, tuple[Any, ...]]:
    """A mesh of H200s, the geometry of all its ranks, and divided shapes for a step of five requests a rank."""
    devices = devices_of("1x1x2")[: math.prod(sizes)]
    of = jax.sharding.Mesh(np.asarray(devices).reshape(sizes), ("data", "tensor"))
    local = ConvCacheSpec(3, 301, 37, 640, 4, 4, axis_order=axis_order)
    spec = mesh.global_spec(local, sizes)
    shapes = jax.eval_shape(lambda: mesh.inputs(spec, mesh.index_sets(local, 5, sizes[0], "all")))
    divided = lambda one, on: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=on)  # noqa: E731
    return of, spec, jax.tree.map(divided, shapes, mesh.shardings(spec, of))


@both_orders
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_the_step_that_bench_loops_on_a_mesh(axis_order: Any, sizes: Any) -> None:
    """Every turn is the kernels on a rank's own shards, in place; what is carried keeps its division."""
    of, spec, arguments = step_on_mesh(axis_order, sizes)
    with jax.set_mesh(of):
        again = subjects.repeated(
            step.carrying_y(step.whole_step("unrolled", spec, "pallas", stack_y=False, mesh=of)), mesh.LOOPS
        )
        lowered = jax.jit(again, donate_argnums=0).lower((arguments[0], arguments[1]), *arguments[1:])
    program: Any = lowered.compile()
    assert len(custom_calls(program)) == spec.num_layers + 1
    assert not mesh_cases.COLLECTIVES.search(program.as_text())
    memory, ranks = program.memory_analysis(), sizes[0] * sizes[1]
    assert memory.alias_size_in_bytes >= (spec.state_bytes + spec.windows_bytes) / ranks
    assert memory.temp_size_in_bytes < spec.state_bytes / ranks / 100
    for one, on in zip(
        jax.tree.leaves(program.output_shardings), jax.tree.leaves(mesh.shardings(spec, of)[:2]), strict=True
    ):
        assert one.is_equivalent_to(on, 4)


@both_orders
@pytest.mark.parametrize(("sizes", "more"), [((1, 2), 0), ((2, 1), 2)])
def test_what_a_step_on_a_mesh_launches(axis_order: Any, sizes: Any, more: int) -> None:
    """What a rank's work launches on one device; data ranks also make slots and rows their own numbers, once a step."""
    for ranks, own in ((1, 1), 0), (sizes, more):
        of, spec, (carried, x, *others) = step_on_mesh(axis_order, ranks)
        chained = step.whole_step("chained", spec, "pallas", stack_y=False, mesh=None if ranks == (1, 1) else of)
        with jax.set_mesh(of):
            compiled: Any = jax.jit(chained, donate_argnums=0).lower(carried, x[0], *others).compile()
        assert launches(compiled.as_text()) == spec.num_layers + 1 + own


def test_on_many_gpus_a_kernel_outside_of_shard_map_is_refused() -> None:
    """Without the refusal the compiler gathers, which the second half shows."""
    mesh = jax.sharding.Mesh(np.asarray(devices_of("1x1x2")).reshape(1, 2), ("data", "tensor"))
    spec = mesh_cases.SPECS[0]
    specs = sharding.partition_specs(spec)
    shapes = [(spec.state_shape, specs.conv_state), (spec.windows_shape, specs.conv_windows)]
    arrays = [
        jax.ShapeDtypeStruct(shape, spec.dtype, sharding=jax.sharding.NamedSharding(mesh, of)) for shape, of in shapes
    ]
    indices = [jax.ShapeDtypeStruct((16,), "int32")] * 2
    lower = lambda: jax.jit(commit(spec, "pallas"), donate_argnums=0).lower(*arrays, *indices)  # noqa: E731
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="a program on 2 devices"):
        lower()
    from jax.interpreters import mlir

    from jax_impl import pallas_backend

    mlir.register_lowering(pallas_backend._on_one_device, lambda _, array: [array])
    try:
        with jax.set_mesh(mesh):
            program: Any = lower().compile()
    finally:
        mlir.register_lowering(pallas_backend._on_one_device, pallas_backend._refuse_several_devices)
        jax.clear_caches()
    gathered = [size for op, size in instructions(program) if op.startswith("all-gather")]
    assert max(gathered) >= math.prod(spec.windows_shape)


# --- inputs, trees, steps that resume ---------------------------------------------------------------------------------

KINDS = ("chain", "kept", "tree", "resume", "resume-tree", "resume-kept")


def verify_of(kind: str, spec: ConvCacheSpec, implementation: Any) -> Callable[..., Any]:
    """A verify of layer 3 with pool, buffer and everything that the kind needs as arguments."""

    def step(pool: Any, windows: Any, slots: Any, x: Any, weight: Any, links: Any, previous: Any) -> Any:
        options: dict[str, Any] = {"num_valid_tokens": slots, "null_slot": 0, "layer": 3}
        if "tree" in kind:
            options["parents"] = links
        if "resume" in kind:
            options |= {"resume_tokens": slots, "resume_path": links if "tree" in kind else None}
            options["resume_windows"] = previous if "kept" in kind else None
        return causal_conv1d_verify(
            None if "kept" in kind else x, pool, windows, weight, spec=spec, state_indices=slots, window_rows=slots,
            implementation=implementation, **options,
        )  # fmt: skip

    return step


@both_orders
@pytest.mark.parametrize(
    ("storage", "kind"),
    [(one, kind) for one in ("sliding", "dense", "inputs") for kind in KINDS if "kept" not in kind or one == "inputs"],
)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_every_kind_of_verify_is_in_place(
    h200: Any, monkeypatch: pytest.MonkeyPatch, axis_order: Any, storage: Any, kind: str, implementation: Any
) -> None:
    """One launch, no copy of pool or buffer; the pool is an output only where the slots are moved on."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = ConvCacheSpec(6, 101, 301, 640, 4, 3, axis_order=axis_order, storage=storage)
    index, links = ((9,), "int32"), ((9, 3), "int32")
    shapes = [(spec.state_shape, spec.dtype), (spec.windows_shape, spec.dtype), index, ((9, 3, 640), "bfloat16")]
    shapes += [((640, 4), "bfloat16"), links, (spec.windows_shape, spec.dtype)]
    advances = "resume" in kind and storage == "inputs"
    donate = [0, 1] if advances else [1]
    program = compiled(verify_of(kind, spec, implementation), h200, *shapes, donate=donate)
    memory, smallest = program.memory_analysis(), min(math.prod(spec.state_shape), math.prod(spec.windows_shape))
    assert memory.alias_size_in_bytes >= spec.windows_bytes + advances * spec.state_bytes
    assert memory.temp_size_in_bytes < spec.state_bytes / 5
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= smallest]
    assert len(custom_calls(program)) == (implementation == "pallas")


@both_orders
@pytest.mark.parametrize("with_path", [False, True], ids=["chain", "path"])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_a_commit_of_inputs_is_in_place(
    h200: Any, monkeypatch: pytest.MonkeyPatch, axis_order: Any, with_path: bool, implementation: Any
) -> None:
    """Both index sets in one launch, out of slot and row, in every storage in one call."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    storages: tuple[Any, ...] = ("inputs", "sliding", "dense")
    specs = [ConvCacheSpec(6, 101, 9, 640, 4, 3, axis_order=axis_order, storage=one) for one in storages]

    def step(pools: Any, buffers: Any, slots: Any, accepted: Any, path: Any) -> Any:
        return commit_conv_state(
            pools, buffers, slots, accepted, spec=specs, null_slot=0, num_valid_tokens=slots, track_indices=slots,
            track_num_tokens=accepted, accepted_path=path if with_path else None, implementation=implementation,
        )  # fmt: skip

    here = jax.sharding.NamedSharding(h200, jax.sharding.PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=here)
    pools, buffers = (
        [array(getattr(one, name), one.dtype) for one in specs] for name in ("state_shape", "windows_shape")
    )
    index, path = array((9,), jnp.int32), array((9, 3), jnp.int32)
    program = jax.jit(step, donate_argnums=0).lower(pools, buffers, index, index, path).compile()
    memory, pool = program.memory_analysis(), math.prod(specs[0].state_shape)
    assert memory is not None
    assert memory.alias_size_in_bytes >= 3 * specs[0].state_bytes
    assert memory.temp_size_in_bytes < specs[0].state_bytes / 5
    assert not [(op, size) for op, size in instructions(program) if op in COPIES and size >= pool]
    assert len(custom_calls(program)) == (implementation == "pallas")
