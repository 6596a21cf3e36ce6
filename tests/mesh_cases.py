"""What `tests.test_sharding` runs in a process of its own, because the number of devices is fixed when JAX starts.

Every case takes the devices that there are and skips meshes that need more. Expectations come from the definition and
from the plain functions on one device: equal bits.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_impl
from jax_impl import ConvCache, ConvCacheSpec, ConvWeight, HybridCache, sharding
from tests import adapters
from tests.adapters import DEFINITION
from tests.cases import INT32_MAX, INT32_MIN, assert_same_bits, unique_bits, values

MESHES = [(1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4)]  # data × tensor
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)
ORDERS = ("time_major", "channel_major")
on_gpu = pytest.mark.gpu
on_every_form = pytest.mark.parametrize(
    "form", ["xla", pytest.param("xla", marks=on_gpu, id="xla-gpu"), pytest.param("pallas", marks=on_gpu)]
)


def on_every_mesh(*more: tuple[int, int], **others: Sequence[Any]) -> pytest.MarkDecorator:
    """Every mesh, with the values of other parameters taking turns: compilations are what these tests cost."""
    names = ("shape", *others)
    turns = zip((*MESHES, *more), *(itertools.cycle(one) for one in others.values()), strict=False)
    every = [pytest.param(*turn, id="-".join(map(shown, turn))) for turn in turns]
    return pytest.mark.parametrize(names, every)


def shown(value: Any) -> str:
    """A parameter in a test's name."""
    if isinstance(value, tuple):
        return f"data{value[0]}-tensor{value[1]}"
    if isinstance(value, ConvCacheSpec):
        return f"{value.dtype}-{value.axis_order}-{value.storage}"
    return str(getattr(value, "__name__", value))


PLAIN: dict[str, Callable[..., Any]] = {
    "verify": jax_impl.causal_conv1d_verify,
    "update": jax_impl.causal_conv1d_update,
    "prefill": jax_impl.causal_conv1d_prefill,
    "gather": jax_impl.gather_windows,
    "commit": jax_impl.commit_conv_state,
}
COLLECTIVES = re.compile(r"\b(all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)")
NULL = 9  # a slot that requests name and nothing writes
WIDTH, TOKENS = 4, 3
# In axis order, storage and dtype; the kernels' channels are a multiple of 128 on every rank.
SPECS = [
    ConvCacheSpec(2, 32, 16, 1024, WIDTH, TOKENS, "float32"),
    ConvCacheSpec(2, 32, 16, 1024, WIDTH, TOKENS, "bfloat16", "channel_major"),
    ConvCacheSpec(2, 32, 16, 1024, WIDTH, TOKENS, "float16", "channel_major", "dense", state_len=WIDTH),
]


@pytest.fixture(autouse=True)
def on_the_right_devices(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        adapters.path("jax-pallas-gpu")  # skips, naming what is missing


def make_mesh(shape: tuple[int, int], axis_type: Any = AxisType.Auto) -> jax.sharding.Mesh:
    """The first devices as a mesh of `shape`; a skip where there are fewer, or where fewer devices have run it."""
    count = shape[0] * shape[1]
    if len(jax.devices()) < count:
        pytest.skip(f"{count} devices are needed, there are {len(jax.devices())}")
    return jax.make_mesh(shape, ("data", "tensor"), (axis_type,) * 2, devices=jax.devices()[:count])


def put(mesh: Any, tree: Any, specs: Any) -> Any:
    """Arrays on the mesh, divided as `specs`, a tree of partition specs like theirs."""
    return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), tree, specs)


def foreign(numbers: np.ndarray, total: int, ranks: int) -> np.ndarray:
    """Global numbers with -1 for those that are not of the rank of their request."""
    owner = np.arange(len(numbers)) // (len(numbers) // ranks)
    inside = (numbers >= 0) & (numbers < total)
    return np.where(inside & (numbers // (total // ranks) == owner), numbers, -1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sixteen requests: each half names slots and rows of its half, some of the other, padding and the int32 limits.

    Of draft trees: links, a path, and how much of it a step resumes from; some of each skip their request.
    """

    slots: np.ndarray
    rows: np.ndarray
    accepted: np.ndarray
    valid: np.ndarray
    tracked: np.ndarray
    links: np.ndarray
    path: np.ndarray
    resumed: np.ndarray

    def of_ranks(self, ranks: int) -> "Batch":
        """What is left of it when requests, slots and rows are divided over so many ranks."""
        slots, tracked = (foreign(one, 32, ranks) for one in (self.slots, self.tracked))
        return dataclasses.replace(self, slots=slots, tracked=tracked, rows=foreign(self.rows, 16, ranks))


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    slots = np.concatenate([rng.permutation(np.arange(1, 16))[:8], rng.permutation(np.arange(17, 32))[:8]])
    rows = np.concatenate([rng.permutation(8), 8 + rng.permutation(8)])
    free = [slot for slot in range(32) if slot not in slots]
    tracked = np.concatenate([rng.permutation(free[:8]), rng.permutation(free[8:])])
    slots[1], slots[4], slots[10] = slots[10], NULL, -1  # of the other half, the null slot, padding
    slots[12:15] = 32, INT32_MIN, INT32_MAX
    rows[2], rows[11] = rows[11], -1
    tracked[:3] = -1, INT32_MIN, NULL
    accepted, valid = np.resize([1, 2, 3, 0, 3, 2, 4], 16), np.resize([3, 3, 2, 1, 3], 16)
    links = np.stack([rng.integers(-1, np.arange(TOKENS)) for _ in range(16)])
    path = np.stack([np.sort(rng.permutation(TOKENS)) for _ in range(16)])
    path[::3] = rng.permutation(TOKENS)[:1]
    links[5, 0], path[3, 0], path[8, -1] = 0, TOKENS, INT32_MIN
    resumed = np.resize([1, 0, 3, 2, 2, -1, 4, 3, 1], 16)
    arrays = (slots, rows, accepted, valid, tracked, links, path, resumed)
    return Batch(*(one.astype(np.int32) for one in arrays))


class OnMesh:
    """A cache and inputs as NumPy arrays, on one device, and divided over a mesh."""

    def __init__(self, spec: ConvCacheSpec, mesh: Any, form: Any, data_axis: str | None = "data") -> None:
        self.spec, self.mesh, self.form, self.data_axis = spec, mesh, form, data_axis
        self.ranks = 1 if data_axis is None else mesh.shape["data"]
        self.specs = sharding.partition_specs(spec, data_axis=data_axis)
        self.pool, self.windows = values(spec.state_shape, spec.dtype, 1), values(spec.windows_shape, spec.dtype, 2)
        self.previous = values(spec.windows_shape, spec.dtype, 6)
        self.x = values((16, TOKENS, spec.conv_dim), "float32", 3)
        taps, bias = values((2, WIDTH, spec.conv_dim), "float32", 4), values((2, spec.conv_dim), "float32", 5)
        self.weight = ConvWeight(jnp.array(taps), jnp.array(bias))

    def divided(self, name: str, value: Any = None) -> Any:
        field = {"pool": "conv_state", "weight": "conv_weight", "x": "x"}.get(name, "conv_windows")
        return put(self.mesh, getattr(self, name) if value is None else value, getattr(self.specs, field))

    def both(self, name: str, arrays: tuple[Any, Any], indices: dict[str, str], **static: Any) -> tuple[Any, Any]:
        """Results of the plain function on one device, with what is left for the ranks, and of the sharded one.

        `arrays` are those of one device and those of the mesh; `indices` names the field of the batch of an argument.
        """
        if name != "gather":
            static |= {"implementation": self.form, "null_slot": NULL}
        plain = functools.partial(PLAIN[name], spec=self.spec, **static)
        sharded = getattr(sharding, f"sharded_{name}")
        on_mesh = functools.partial(sharded, spec=self.spec, mesh=self.mesh, data_axis=self.data_axis, **static)
        left, given = (
            {key: getattr(one, field) for key, field in indices.items()}
            for one in (batch().of_ranks(self.ranks), batch())
        )
        return jax.jit(plain)(**arrays[0], **left), jax.jit(on_mesh)(**arrays[1], **given)

    def arrays(self, **named: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments by name, on one device and on the mesh."""
        one = {key: jax.tree.map(jnp.array, getattr(self, name)) for key, name in named.items()}
        return one, {key: self.divided(name) for key, name in named.items()}


@on_every_form
@on_every_mesh((1, 1), spec=SPECS)
def test_every_operation_equals_one_device(shape: Any, spec: ConvCacheSpec, form: Any) -> None:
    """Verify, gather, commit with snapshots, update and prefill: every bit, and nothing of another rank's slots."""
    mesh = make_mesh(shape)
    here, own = OnMesh(spec, mesh, form), batch().of_ranks(shape[0])
    assert (np.count_nonzero(own.slots != batch().slots) > 3) == (shape[0] == 2)  # some are of the other rank
    state = {"x": "x", "conv_state": "pool", "weight": "weight"}

    indices = {"state_indices": "slots", "window_rows": "rows", "num_valid_tokens": "valid"}
    (y, windows), got = here.both("verify", here.arrays(**state, conv_windows="windows"), indices, layer=1)
    assert_same_bits(np.asarray(got[0]), np.asarray(y), "y")
    assert_same_bits(np.asarray(got[1]), np.asarray(windows), "windows")
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, here.specs.x), 3)

    here.pool, here.windows = (
        unique_bits(shape, spec.dtype, seed) for seed, shape in enumerate((spec.state_shape, spec.windows_shape))
    )
    indices = {"num_accepted_tokens": "accepted", "window_rows": "rows"}
    _, taken = here.both("gather", here.arrays(conv_windows="windows"), indices)
    expected = DEFINITION.gather(here.windows, own.accepted, spec=spec, window_rows=own.rows)
    assert_same_bits(np.asarray(taken), expected, "gather")
    assert taken.sharding.is_equivalent_to(NamedSharding(mesh, here.specs.windows), 4)

    indices |= {"state_indices": "slots", "num_valid_tokens": "valid"}
    indices |= {"track_indices": "tracked", "track_num_tokens": "valid"}
    _, pool = here.both("commit", here.arrays(conv_state="pool", conv_windows="windows"), indices)
    options = {"window_rows": own.rows, "num_valid_tokens": own.valid, "null_slot": NULL}
    options |= {"track_indices": own.tracked, "track_num_tokens": own.valid}
    expected = DEFINITION.commit(here.pool, here.windows, own.slots, own.accepted, spec=spec, **options)
    assert_same_bits(np.asarray(pool), expected, "commit")
    assert pool.sharding.is_equivalent_to(NamedSharding(mesh, here.specs.conv_state), 4)

    here.pool = values(spec.state_shape, spec.dtype, 9)
    indices = {"state_indices": "slots", "lengths": "valid"}
    for name in ("prefill", "update"):
        arrays = here.arrays(**state)
        if name == "update":
            arrays[0]["x"], arrays[1]["x"] = arrays[0]["x"][:, 0], put(mesh, here.x[:, 0], here.specs.token)
            del indices["lengths"]
        alone, on_mesh = here.both(name, arrays, indices, layer=0)
        for one, other in zip(on_mesh, alone, strict=True):
            assert_same_bits(np.asarray(one), np.asarray(other), name)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=shown)
def test_slots_that_no_axis_divides(shape: Any) -> None:
    """`data_axis=None` on a mesh with such an axis: every rank has all slots, and writes the same to its copy."""
    mesh = make_mesh(shape)
    here = OnMesh(SPECS[0], mesh, "xla", data_axis=None)
    state, slots = {"conv_state": "pool"}, {"state_indices": "slots"}
    rows = {"window_rows": "rows", "num_valid_tokens": "valid"}
    counts = {"num_accepted_tokens": "accepted", "track_indices": "tracked", "track_num_tokens": "valid"}
    read = {"x": "x", "weight": "weight"} | state
    for name, arrays, indices, layer in (
        ("verify", read | {"conv_windows": "windows"}, slots | rows, {"layer": 1}),
        ("prefill", read, slots | {"lengths": "valid"}, {"layer": 0}),
        ("commit", state | {"conv_windows": "windows"}, slots | rows | counts, {}),
        ("gather", {"conv_windows": "windows"}, {"num_accepted_tokens": "accepted", "window_rows": "rows"}, {}),
    ):
        alone, on_mesh = here.both(name, here.arrays(**arrays), indices, **layer)
        for one, other in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(alone), strict=True):
            assert_same_bits(np.asarray(one), np.asarray(other), name)
            for shard in one.addressable_shards:
                assert_same_bits(np.asarray(shard.data), np.asarray(other)[shard.index], name)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=shown)
def test_a_continued_prompt_equals_one_device(shape: Any) -> None:
    """With few channels, where a CPU compiles other loops for half of them."""
    mesh, spec = make_mesh(shape), ConvCacheSpec(1, 16, 8, 16, 4, 3, "float32")
    specs = sharding.partition_specs(spec)
    sizes = ((8, 3, 16), spec.state_shape, (16, 4), (16,))
    arrays = tuple(values(size, "float32", i) for i, size in enumerate(sizes))
    continued = np.asarray([1, 1, 1, 0, 0, 1, 1, 1], np.bool_)
    slots = np.asarray([5, 2, 4, 1, 9, 11, 15, 13], np.int32)
    options: dict[str, Any] = {"spec": spec, "layer": 0, "state_indices": slots, "has_initial_state": continued}
    alone = jax.jit(functools.partial(jax_impl.causal_conv1d_prefill, **options))(*arrays)
    placed = put(mesh, arrays, (specs.x, specs.conv_state, specs.weight, specs.bias))
    on_mesh = sharding.sharded_prefill(*placed, mesh=mesh, **options)
    for one, other, name in zip(on_mesh, alone, ("y", "pool"), strict=True):
        assert_same_bits(np.asarray(one), np.asarray(other), name)


# ---- inputs, draft trees, steps that resume --------------------------------------------------------------------------

INPUTS = [dataclasses.replace(spec, storage="inputs") for spec in SPECS[:2]]
DRAFT_CASES = [((1, 1), INPUTS[0]), ((2, 1), INPUTS[1]), ((2, 4), INPUTS[0]), ((1, 2), SPECS[2]), ((2, 1), SPECS[0])]


def draft_calls(spec: ConvCacheSpec) -> Iterator[tuple[str, dict[str, str], dict[str, str], tuple[str, ...]]]:
    """Operations with the fields of their arrays and of their index arrays, and the names of what is donated."""
    both = {"conv_state": "pool", "conv_windows": "windows"}
    common = {"state_indices": "slots", "window_rows": "rows"}
    resumed = common | {"num_valid_tokens": "valid", "resume_tokens": "resumed"}
    accepted = common | {"num_accepted_tokens": "accepted", "accepted_path": "path"}
    tracked = {"num_valid_tokens": "valid", "track_indices": "tracked", "track_num_tokens": "valid"}
    tree = {} if spec.storage == "sliding" else {"parents": "links", "resume_path": "path"}
    moved = ("conv_state",) if spec.storage == "inputs" else ()
    yield "verify", both | {"x": "x", "weight": "weight"}, resumed | tree, ("conv_windows", *moved)
    yield "commit", both, accepted | tracked, ("conv_state",)
    if spec.storage == "inputs":
        kept = {"weight": "weight", "resume_windows": "previous"}
        yield "verify", both | kept, resumed, ("conv_windows", "conv_state")
        yield "gather", both, accepted, ()


@on_every_form
@pytest.mark.parametrize(("shape", "spec"), DRAFT_CASES, ids=shown)
def test_drafts_equal_one_device(shape: Any, spec: ConvCacheSpec, form: Any) -> None:
    """Every bit, without a collective, and every shard of a donated array stays where it is."""
    mesh = make_mesh(shape)
    here, own = OnMesh(spec, mesh, form), batch().of_ranks(shape[0])
    for name, fields, indices, donated in draft_calls(spec):
        one, divided = here.arrays(**fields)
        static: dict[str, Any] = {"spec": spec} | ({"implementation": form} if name != "gather" else {})
        static |= {} if name == "gather" and spec.storage != "inputs" else {"null_slot": NULL}
        static |= {"layer": 1} | ({} if "x" in fields else {"x": None}) if name == "verify" else {}
        alone = jax.jit(functools.partial(PLAIN[name], **static))(
            **one, **{key: getattr(own, field) for key, field in indices.items()}
        )
        given = {key: getattr(batch(), field) for key, field in indices.items()}
        placed = {key: here.specs.token_indices if of.ndim == 2 else here.specs.indices for key, of in given.items()}
        others = {key: array for key, array in divided.items() if key not in donated} | put(mesh, given, placed)
        kept = {key: jnp.copy(divided[key]) for key in donated}  # may else be NumPy's memory, which is not donated
        on_mesh = functools.partial(getattr(sharding, f"sharded_{name}"), mesh=mesh, **static)
        step: Any = jax.jit(lambda kept, others, on_mesh=on_mesh: on_mesh(**kept, **others), donate_argnums=0)
        program = step.lower(kept, others).compile()
        assert not COLLECTIVES.findall(program.as_text()), name
        where = [addresses(array) for array in kept.values()]
        results = jax.tree.leaves(program(kept, others))
        for number, (got, expected) in enumerate(zip(results, jax.tree.leaves(alone), strict=True)):
            assert_same_bits(np.asarray(got), np.asarray(expected), f"{name}, {number}")
        assert [one for one in where if one not in [addresses(array) for array in results]] == [], name
        changed = [np.asarray(array) for array in results if array.shape == spec.state_shape]
        assert all((array != here.pool).any() for array in changed), name
        assert len(changed) == ("conv_state" in donated)


# ---- the program -----------------------------------------------------------------------------------------------------


def shapes(mesh: Any, tree: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda one, spec: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
    )


def calls(spec: ConvCacheSpec, mesh: Any, form: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Each operation as a function of its donated array and others, and their shapes on the mesh."""
    specs = sharding.partition_specs(spec)
    axes = {"spec": spec, "mesh": mesh}
    array = lambda shape, dtype, of: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, of))  # noqa: E731
    pool = array(spec.state_shape, spec.dtype, specs.conv_state)
    windows = array(spec.windows_shape, spec.dtype, specs.conv_windows)
    ints = array((16,), "int32", specs.indices)
    x, token = array((16, TOKENS, 1024), spec.dtype, specs.x), array((16, 1024), spec.dtype, specs.token)
    weight = array((1024, WIDTH), spec.dtype, specs.weight)
    options = {**axes, "layer": 1, "implementation": form}
    yield (
        "verify",
        lambda windows, pool, x, weight, slots, rows: sharding.sharded_verify(
            x, pool, windows, weight, **options, state_indices=slots, window_rows=rows
        ),
        (windows, pool, x, weight, ints, ints),
    )
    yield (
        "update",
        lambda pool, x, weight, slots: sharding.sharded_update(x, pool, weight, **options, state_indices=slots),
        (pool, token, weight, ints),
    )
    yield (
        "prefill",
        lambda pool, x, weight, slots, lengths: sharding.sharded_prefill(
            x, pool, weight, **options, state_indices=slots, lengths=lengths
        ),
        (pool, x, weight, ints, ints),
    )
    yield "gather", lambda windows, accepted: sharding.sharded_gather(windows, accepted, **axes), (windows, ints)
    yield (
        "commit",
        lambda pool, windows, slots, accepted, track: sharding.sharded_commit(
            pool, windows, slots, accepted, **axes, track_indices=track, track_num_tokens=accepted, implementation=form
        ),
        (pool, windows, ints, ints, ints),
    )

    recurrent = array((2, spec.num_slots, 8, 8, 16), "float32", specs.recurrent_state)
    steps = array((2, 16, TOKENS, 8, 8, 16), "float32", specs.step_states)

    def roll_back(pools: Any, windows: Any, steps: Any, slots: Any, accepted: Any) -> Any:
        cache = HybridCache(ConvCache(pools[0], windows, spec), pools[1])
        return sharding.sharded_commit_after_verify(
            cache, slots, accepted, mesh=mesh, step_states=steps, implementation=form
        )

    yield "commit_after_verify", roll_back, ((pool, recurrent), windows, steps, ints, ints)


@on_every_form
@on_every_mesh(spec=SPECS, axis_type=AXIS_TYPES)
def test_no_collective(shape: Any, spec: ConvCacheSpec, axis_type: Any, form: Any) -> None:
    """Not one, in any operation; and the module does belong to all devices."""
    mesh = make_mesh(shape, axis_type)
    for name, function, arguments in calls(spec, mesh, form):
        program: Any = jax.jit(function, donate_argnums=0 if name != "gather" else ()).lower(*arguments).compile()
        text = program.as_text()
        assert f"num_partitions={mesh.size}" in text or mesh.size == 1, name
        assert not COLLECTIVES.findall(text), name


def test_the_collectives_would_be_seen() -> None:
    """What the detector is for: a pool that is asked for whole."""
    mesh = make_mesh((1, 2))
    whole = jax.jit(lambda pool: pool + 1, out_shardings=NamedSharding(mesh, P()))
    pool = jax.ShapeDtypeStruct((4, 8), "float32", sharding=NamedSharding(mesh, P(None, "tensor")))
    program: Any = whole.lower(pool).compile()
    assert COLLECTIVES.findall(program.as_text())


@on_every_mesh(spec=SPECS)
def test_plain_jit_leaves_the_xla_form_divided(shape: Any, spec: ConvCacheSpec) -> None:
    """Over channels without any collective. Over slots too, only windows travel: nothing as large as a rank's pool."""
    mesh, everywhere = make_mesh(shape), dataclasses.replace(spec, num_slots=4096, max_requests=2048)
    for data_axis in (None, "data"):
        specs = sharding.partition_specs(everywhere, data_axis=data_axis)
        given = [(everywhere.state_shape, spec.dtype, specs.conv_state)]
        given += [(everywhere.windows_shape, spec.dtype, specs.conv_windows), *[((16,), "int32", specs.indices)] * 2]
        arguments = [jax.ShapeDtypeStruct(size, of, sharding=NamedSharding(mesh, one)) for size, of, one in given]
        commit = functools.partial(jax_impl.commit_conv_state, spec=everywhere, implementation="xla")
        program: Any = jax.jit(commit, donate_argnums=0).lower(*arguments).compile()
        assert program.output_shardings.is_equivalent_to(arguments[0].sharding, 4)
        text = program.as_text()
        if data_axis is None:
            assert not COLLECTIVES.findall(text)
        moved = re.findall(r"\w+\[([\d,]+)\]\S* (?:all|reduce-scatter|collective)[\w-]*\(", text)
        sizes = [np.prod([int(size) for size in dims.split(",")]) for dims in moved]
        assert max(sizes, default=0) <= 2 * 16 * spec.state_columns * 1024 < np.prod(everywhere.state_shape) / 8


@pytest.mark.parametrize(("jitted", "axis_type"), [(True, AxisType.Auto), (False, AxisType.Explicit)], ids=shown)
@pytest.mark.parametrize("form", ["pallas_interpret", pytest.param("pallas", marks=on_gpu)])
def test_kernels_are_not_divided_by_the_compiler(form: Any, jitted: bool, axis_type: Any) -> None:
    """Outside of shard_map they refuse, with the fix named, whatever of the pool is divided; inside they lower."""
    mesh = make_mesh((1, 2), axis_type)
    spec = SPECS[0]
    specs = sharding.partition_specs(spec)
    cache = jax_impl.allocate_conv_cache(spec, (NamedSharding(mesh, specs.conv_state),) * 2)
    zeros = jnp.zeros(16, jnp.int32)
    x, weight = jnp.zeros((16, TOKENS, 1024), jnp.float32), jnp.zeros((1024, WIDTH), jnp.float32)
    options: dict[str, Any] = {"spec": spec, "implementation": form}

    def commit(pool: Any, windows: Any) -> Any:
        return jax_impl.commit_conv_state(pool, windows, zeros, zeros, **options)

    def verify(pool: Any, windows: Any) -> Any:
        return jax_impl.causal_conv1d_verify(x, pool, windows, weight, **options, state_indices=zeros, layer=0)

    def prefill(pool: Any, _: Any) -> Any:
        return jax_impl.causal_conv1d_prefill(x, pool, weight, **options, state_indices=zeros, layer=0)

    for call in (commit, verify, prefill):
        with pytest.raises(ValueError, match=r"on one device for the Pallas.*jax_impl\.sharding.*or use \"xla\""):
            (jax.jit(call) if jitted else call)(cache.conv_state, cache.conv_windows)
    inside = functools.partial(sharding.sharded_commit, **options, mesh=mesh)
    jax.jit(inside).lower(cache.conv_state, cache.conv_windows, zeros, zeros)


def test_a_shard_map_over_some_of_the_axes_is_refused() -> None:
    """What it leaves to the compiler would be gathered."""
    mesh, spec, zeros = make_mesh((1, 2)), SPECS[0], jnp.zeros(16, jnp.int32)
    commit = functools.partial(jax_impl.commit_conv_state, spec=spec, implementation="pallas_interpret")
    some = jax.shard_map(commit, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
    with pytest.raises(ValueError, match="got a program on 2 devices"):
        jax.jit(some).lower(jnp.zeros(spec.state_shape), jnp.zeros(spec.windows_shape), zeros, zeros)


# ---- in place --------------------------------------------------------------------------------------------------------


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def once(step: Any) -> Any:
    return step


def in_scan(step: Any) -> Any:
    def run(pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
        return lax.scan(lambda carry, i: (step(carry, windows, slots + i, accepted), None), pool, jnp.arange(3))[0]

    return run


def in_while(step: Any) -> Any:
    def run(pool: Any, windows: Any, slots: Any, accepted: Any) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, step(carry[1], windows, slots + carry[0], accepted)

        return lax.while_loop(lambda carry: carry[0] < accepted.max(), body, (jnp.int32(0), pool))[1]

    return run


@on_every_form
@on_every_mesh(axis_order=ORDERS, place=(in_scan, in_while, once))
def test_every_shard_of_a_donated_pool_stays_where_it_is(shape: Any, axis_order: Any, place: Any, form: Any) -> None:
    mesh = make_mesh(shape)
    spec = ConvCacheSpec(2, 602, 16, 1024, WIDTH, TOKENS, "float32", axis_order)
    specs = sharding.partition_specs(spec)
    before, windows = unique_bits(spec.state_shape, "float32", 1), unique_bits(spec.windows_shape, "float32", 2)
    pool, buffer = put(mesh, (before, windows), (specs.conv_state, specs.conv_windows))
    slots = np.r_[np.arange(8) * 5, 301 + np.arange(8) * 7].astype(np.int32)
    accepted = np.resize([3, 1, 2, 0], 16).astype(np.int32)
    commit = functools.partial(sharding.sharded_commit, spec=spec, mesh=mesh, implementation=form)
    where = addresses(pool)
    arguments = (pool, buffer, *put(mesh, (slots, accepted), (specs.indices,) * 2))
    program: Any = jax.jit(place(commit), donate_argnums=0).lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < spec.state_bytes / mesh.size / 5
    after = program(*arguments)
    assert addresses(after) == where
    assert pool.is_deleted()
    expected = before
    for step in range(1 if place is once else 3):
        expected = DEFINITION.commit(expected, windows, slots + np.int32(step), accepted, spec=spec, window_rows=None)
    assert_same_bits(np.asarray(after), expected)


@on_every_form
@on_every_mesh()
def test_the_other_writers_keep_their_shards_too(shape: Any, form: Any) -> None:
    mesh, spec = make_mesh(shape), SPECS[0]
    for name, function, arguments in calls(spec, mesh, form):
        if name == "gather":
            continue
        arrays = jax.tree.map(lambda one: jax.device_put(jnp.ones(one.shape, one.dtype), one.sharding), arguments)
        where = [addresses(leaf) for leaf in jax.tree.leaves(arrays[0])]
        after = jax.tree.leaves(jax.jit(function, donate_argnums=0)(*arrays))
        assert all(one in [addresses(leaf) for leaf in after] for one in where), name


# ---- whole caches, layers over devices -------------------------------------------------------------------------------


@on_every_form
@on_every_mesh(axis_type=AXIS_TYPES)
def test_a_whole_cache(shape: Any, axis_type: Any, form: Any) -> None:
    """Conv groups of different width and order, recurrent states, snapshots, rows of their own: one call."""
    mesh, own = make_mesh(shape, axis_type), batch().of_ranks(shape[0])
    specs = {"q": SPECS[0], "k": dataclasses.replace(SPECS[1], width=3, state_len=2), "v": SPECS[2]}
    arrays = {
        name: (spec, unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2))
        for name, spec in specs.items()
    }
    state, steps = unique_bits((2, 32, 8, 8, 16), "float32", 5), unique_bits((2, 16, TOKENS, 8, 8, 16), "float32", 6)
    in_order = np.arange(16, dtype=np.int32)
    conv = {
        name: ConvCache(jnp.array(pool), jnp.array(windows), spec) for name, (spec, pool, windows) in arrays.items()
    }
    cache = HybridCache(conv, jnp.array(state))
    cache = put(mesh, cache, sharding.cache_specs(cache))
    placed = put(mesh, steps, sharding.partition_specs(SPECS[0]).step_states)

    def options(one: Batch) -> dict[str, Any]:
        return {
            "window_rows": one.rows, "step_rows": in_order, "num_valid_tokens": one.valid, "track_indices": one.tracked,
            "track_num_tokens": one.valid, "null_slot": NULL,
        }  # fmt: skip

    step = functools.partial(sharding.sharded_commit_after_verify, mesh=mesh, implementation=form)
    step = jax.jit(step, donate_argnums=0, static_argnames="null_slot")
    after = step(cache, batch().slots, batch().accepted, step_states=placed, **options(batch()))
    pools, states = DEFINITION.after_verify(arrays, state, own.slots, own.accepted, step_states=steps, **options(own))
    for name, spec in specs.items():
        assert_same_bits(np.asarray(after.conv[name].conv_state), pools[name], name)
        assert after.conv[name].spec == spec
    assert_same_bits(np.asarray(after.recurrent_state), states)


@on_every_form
def test_a_pipeline_stage_holds_its_own_layers(form: Any) -> None:
    """Five layers over two stages: each verifies and commits its own, with the same indices; pools equal the whole."""
    stages = [range(3), range(3, 5)]
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip(f"2 devices are needed, there are {len(devices)}")
    spec = dataclasses.replace(SPECS[0], num_layers=5)
    pool, windows = values(spec.state_shape, spec.dtype, 1), values(spec.windows_shape, spec.dtype, 2)
    x, weight = values((4, TOKENS, 1024), spec.dtype, 3), values((1024, WIDTH), spec.dtype, 4)
    slots, accepted = np.asarray([3, 30, 7, 0], np.int32), np.asarray([3, 1, 2, 0], np.int32)

    def run(pool: Any, windows: Any, x: Any, weight: Any, spec: ConvCacheSpec) -> Any:
        for layer in range(spec.num_layers):
            x, windows = jax_impl.causal_conv1d_verify(
                x, pool, windows, weight, spec=spec, state_indices=slots, layer=layer, implementation=form
            )
        pool = jax_impl.commit_conv_state(pool, windows, slots, accepted, spec=spec, implementation=form)
        return pool, windows, x

    whole = jax.jit(functools.partial(run, spec=spec))(pool, windows, x, weight)
    done = []
    for layers, device in zip(stages, devices, strict=True):
        mine = dataclasses.replace(spec, num_layers=len(layers))
        held = [jax.device_put(array[np.asarray(layers)], device) for array in (pool, windows)]
        x = jax.device_put(x, device)  # what moves between the stages
        *arrays, x = jax.jit(functools.partial(run, spec=mine))(*held, x, jax.device_put(weight, device))
        done.append([np.asarray(array) for array in arrays])
    for whole_array, of_stages in zip(whole, zip(*done, strict=True), strict=False):
        assert_same_bits(np.concatenate(of_stages), np.asarray(whole_array))
    assert_same_bits(np.asarray(x), np.asarray(whole[2]))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_arrays_that_lie_elsewhere_are_refused() -> None:
    mesh, spec = make_mesh((1, 2)), SPECS[0]
    specs = sharding.partition_specs(spec)
    whole = jax.device_put(np.zeros(spec.state_shape, np.float32), NamedSharding(mesh, P()))
    windows = put(mesh, np.zeros(spec.windows_shape, np.float32), specs.conv_windows)
    zeros = np.zeros(16, np.int32)
    message = r"`conv_state`: expected divided as .*'tensor'.* on this mesh, got .*jax\.device_put"
    with pytest.raises(ValueError, match=message):
        sharding.sharded_commit(whole, windows, zeros, zeros, spec=spec, mesh=mesh)


def test_what_a_kernel_does_not_take_is_said_of_a_rank() -> None:
    mesh, spec = make_mesh((1, 2)), ConvCacheSpec(2, 8, 4, 128, 4, 3)
    zeros = np.zeros(4, np.int32)
    pool, windows = (jnp.zeros(shape, spec.dtype) for shape in (spec.state_shape, spec.windows_shape))
    with pytest.raises(ValueError, match=r"got conv_dim = 64\. .* On each rank of the mesh: conv_dim = 64 of 128\."):
        sharding.sharded_commit(pool, windows, zeros, zeros, spec=spec, mesh=mesh, implementation="pallas_interpret")


# ---- a whole model ---------------------------------------------------------------------------------------------------


# Of a mixture of experts, with three of eight for each token and one shared.
EXPERTS = {
    "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip


@functools.cache
def model(experts: bool = False) -> Any:
    """The tiny checkpoint with heads of twice the size, so that half of its convolution is 128 channels."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from jax_impl.model.tiny import tiny_model

    layers = ["linear_attention", "full_attention"]
    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} | (EXPERTS if experts else {})
    return tiny_model("float32", num_hidden_layers=2, layer_types=layers, **wide)


MODELS = [((1, 2), False), ((2, 1), False)]
PROMPTS = [[7], [1, 2, 3, 1, 2], list(range(20, 50)), [5, 5, 5, 5], [200, 3], [9, 8, 7, 9, 8]]


@functools.cache
def greedy(experts: bool = False) -> list[list[int]]:
    from jax_impl.model.decode import Engine
    from jax_impl.model.drafters import NoDrafts

    plain = Engine(*model(experts), drafter=NoDrafts(), num_draft_tokens=1, max_requests=6, max_len=96)
    return plain.generate(PROMPTS, 48)


@on_every_form
@pytest.mark.parametrize(("shape", "experts"), [*MODELS, pytest.param((2, 2), True, marks=pytest.mark.long)], ids=shown)
def test_the_tiny_model_says_the_same_on_a_mesh(shape: Any, experts: bool, form: Any) -> None:
    """Heads over two ranks, requests over two, and both: the tokens of greedy decoding on one device, speculatively."""
    from jax_impl.model.parallel import MeshEngine

    # Six prompts in four rows, and slots that are used again.
    sizes: dict[str, Any] = {"max_requests": 4, "num_slots": 6, "max_len": 96}
    engine = MeshEngine(*model(experts), mesh=make_mesh(shape), implementation=form, **sizes)
    assert engine.generate(PROMPTS, 48) == greedy(experts)
    assert engine.statistics.mean_accepted_length > 1.2
    assert engine.free == 4


def test_a_drafter_that_is_not_divided_is_refused() -> None:
    from jax_impl.model.drafters import corrupted_replay
    from jax_impl.model.parallel import MeshEngine

    replay, mesh = corrupted_replay(4, 32, 256, 0.5), make_mesh((1, 2))
    with pytest.raises(ValueError, match="`drafter`: expected one without arrays, got CorruptedReplay"):
        MeshEngine(*model(), mesh=mesh, drafter=replay, max_requests=4, max_len=32)


def test_a_model_that_ranks_do_not_divide_is_refused() -> None:
    from jax_impl.model.parallel import local_config

    with pytest.raises(ValueError, match="config") as caught:
        local_config(model()[0], 3, "tensor")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        f"`config.{name}`" for name in ("num_heads", "num_kv_heads", "linear_key_heads", "linear_value_heads")
    ]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_bench_on_a_mesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Times of a small step of the XLA form, the row and the table that come of them; and the command's comparison."""
    from jax_impl.__main__ import main
    from jax_impl.bench import measure, mesh, report, timing

    make_mesh((2, 1))
    monkeypatch.setattr(timing, "QUEUE_SECONDS", 0.001)
    monkeypatch.setattr(timing, "TARGET_SECONDS", 0.001)
    local = ConvCacheSpec(1, 7, 5, 24, 4, 4, "float32")
    (row,) = mesh.rows(local, (2, 1), [3], 2, "all", compare=True, implementation="xla")
    assert "errors" not in row, row
    for kind, (form, path) in report.MESH_TIMES.items():
        alone, on_mesh = (report.at(row, f"{of}{form}", *path) for of in ("one", "all"))
        assert row["step_ratio"][kind] == pytest.approx(on_mesh / alone, abs=1e-3)
        assert row["throughput"][kind] == pytest.approx(2 * alone / on_mesh, abs=1e-3)
    assert (row["conv_dim"], row["num_slots"], row["batch"]) == (24, 14, 3)
    environment = {"device": "d", "driver": "1", "versions": {"jax": "0"}, "date": "2026-01-01"}
    path = tmp_path / report.file_name("2026-01-01", ["mesh"])
    report.write(path, {"environment": environment, "preset": "p", "tp": 1, "points": [row]})
    assert report.results_files(tmp_path) == [path]
    assert f"| time_major | 2 | 1 | 4 | 3 | {row['one']['median_us']:.1f} |" in report.tables(report.read(path))
    for kind in report.MESH_TIMES:
        assert f"{kind}: step ratio {row['step_ratio'][kind]:.3f}" in measure.line(row)
    assert main(["bench", "--mesh", "tensor=2"]) == 0
    assert capsys.readouterr().out.count("data=1 tensor=2") == 2


def test_a_step_that_fails_leaves_the_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chained step on the mesh alone: its ratio is missing, and the error says what of."""
    from jax_impl.bench import measure, mesh, timing

    monkeypatch.setattr(timing, "QUEUE_SECONDS", 0.001)
    monkeypatch.setattr(timing, "TARGET_SECONDS", 0.001)
    real = mesh.whole_step

    def failing(form: Any, *given: Any, mesh: Any = None, **more: Any) -> Any:
        if form == "chained" and mesh is not None:
            raise RuntimeError("no memory")
        return real(form, *given, mesh=mesh, **more)

    monkeypatch.setattr(mesh, "whole_step", failing)
    local = ConvCacheSpec(1, 7, 5, 24, 4, 4, "float32")
    (row,) = mesh.rows(local, (1, 1), [3], 2, "all", compare=False, implementation="xla")
    assert row["errors"] == {"all_chained": "RuntimeError: no memory"}
    assert set(row["step_ratio"]) == set(row["throughput"]) == {"device", "wall"}
    line = measure.line(row)
    assert "data=1 tensor=1  device: step ratio" in line
    assert line.endswith("all_chained FAILED RuntimeError: no memory")


def test_a_step_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_impl.bench import mesh

    make_mesh((1, 2))
    real = mesh.whole_step
    monkeypatch.setattr(
        mesh,
        "whole_step",
        lambda *given, **more: (lambda carried, x, *_: (carried, x)) if "mesh" in more else real(*given, **more),
    )
    local = ConvCacheSpec(1, 7, 5, 24, 4, 4, "float32")
    (row,) = mesh.rows(local, (1, 2), [3], 2, "all", compare=True, implementation="xla")
    assert row["errors"] == {"check": "results differ from the plain step"}
