"""Partition specs, the order of channels, rank-local slots, refusals; and the runs of `tests.mesh_cases` on a mesh.

The number of host devices is fixed when JAX starts, so what needs several runs in a process of its own; two processes
that talk over loopback stand for two hosts.
"""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_impl import ConvCache, ConvCacheSpec, ConvWeight, prepare_conv_weight, sharding
from jax_impl.layout import STORAGES
from jax_impl.presets import PRESETS, ConvPart, get_preset
from tests import adapters
from tests.cases import INT32_MAX, INT32_MIN, both_orders, values
from tests.definition import bits
from tests.mesh_process import SPEC as SPEC_OF_PROCESSES
from tests.mesh_process import whole

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPEC = ConvCacheSpec(2, 8, 4, 128, width=4, num_draft_tokens=3)


def fresh(devices: int | None = None) -> dict[str, str]:
    """The environment of a process with so many host devices, or with the devices that the machine has."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if devices is None:
        return {name: value for name, value in inherited.items() if name != "JAX_PLATFORMS"}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
    }


def run_cases(environment: dict[str, str], *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/mesh_cases.py", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


# Eight devices run what takes four or eight, two the rest but for what one can: every case once.
CASES = {
    1: "data1-tensor1",
    2: "not data1-tensor1 and not data2-tensor2 and not tensor4 and not tensor8",
    8: "data2-tensor2 or tensor4 or tensor8",
}


@pytest.mark.parametrize("devices", CASES)
def test_on_host_devices(devices: int) -> None:
    report = run_cases(fresh(devices), "-k", CASES[devices])
    assert "devices are needed" not in report, report


@pytest.mark.long
def test_the_longer_cases_on_host_devices() -> None:
    assert "devices are needed" not in run_cases(fresh(4), "-m", "long and not gpu")


@pytest.mark.gpu
def test_on_the_devices_of_this_machine() -> None:
    """The compiled kernels on every mesh that the machine's GPUs can form."""
    assert "passed" in run_cases(fresh(), "-m", "gpu and not long")


# ---- channels --------------------------------------------------------------------------------------------------------


def heads(part: str, count: int, size: int) -> list[str]:
    return [f"{part}{head}.{channel}" for head in range(count) for channel in range(size)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_gets_its_heads_of_every_part(ranks: int) -> None:
    """Named channels: a plain slice of the reordered axis is q, k and v of the rank's heads, in their order."""
    parts = ConvPart("q", 24, 8), ConvPart("k", 24, 8), ConvPart("v", 80, 16)
    q, k, v = heads("q", 8, 3), heads("k", 8, 3), heads("v", 16, 5)
    given = np.asarray([q + k + v], object)
    ordered = sharding.shard_channels(given, parts, ranks)
    for rank, mine in enumerate(np.split(ordered, ranks, axis=1)):
        of_rank = [
            name
            for part, count in (("q", 8), ("k", 8), ("v", 16))
            for name in heads(part, count, 5 if part == "v" else 3)
            if int(name[1:].split(".")[0]) // (count // ranks) == rank
        ]
        assert mine[0].tolist() == of_rank
    assert (sharding.unshard_channels(ordered, parts, ranks) == given).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_a_group_by_copies(ranks: int) -> None:
    """Mamba2's B and C: one group on every rank, two on the ranks whose heads belong to them."""
    for groups in (1, 2):
        parts = ConvPart("x", 16, 8), ConvPart("B", groups * 3, groups, repeats=True)
        ordered = sharding.shard_channels(np.arange(16 + 3 * groups), parts, ranks)
        for rank, mine in enumerate(np.split(ordered, ranks)):
            group = 16 + 3 * (rank * groups // ranks)
            assert mine.tolist() == [*range(rank * 16 // ranks, (rank + 1) * 16 // ranks), *range(group, group + 3)]
        assert (sharding.unshard_channels(ordered, parts, ranks) == np.arange(16 + 3 * groups)).all()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_published_model_is_divided_as_its_preset_says(preset: Any) -> None:
    for ranks in (1, 2, 4, 8):
        try:
            of_rank = preset.conv_dim_per_rank(ranks)
        except ValueError:
            with pytest.raises(ValueError, match="`parts`: expected a divisor of part"):
                sharding.channel_order(preset.parts, ranks)
            continue
        order = sharding.channel_order(preset.parts, ranks)
        assert len(order) == of_rank * ranks
        assert set(order) == set(range(preset.conv_dim))


def test_weights_in_every_form() -> None:
    """Two and four axes, taps with their bias: the same channels; and back."""
    parts = get_preset("Qwen3.5-0.8B").parts
    order = sharding.channel_order(parts, 2)
    weight = np.arange(6144 * 4, dtype=np.float32).reshape(6144, 4)
    for given, channels in ((weight, 0), (weight[:, None], 0), (np.stack([weight, -weight])[:, :, None], 1)):
        got = sharding.shard_conv_weights(given, parts, 2)
        assert (got == np.take(given, order, axis=channels)).all()
        assert (sharding.unshard_conv_weights(got, parts, 2) == given).all()
    prepared = prepare_conv_weight(jnp.asarray(weight), jnp.asarray(weight[:, 0]))
    got = sharding.shard_conv_weights(prepared, parts, 2)
    assert isinstance(got, ConvWeight) and got.bias is not None
    assert (np.asarray(got.taps) == weight[order].T).all() and (np.asarray(got.bias) == weight[order, 0]).all()
    back = sharding.unshard_conv_weights(got, parts, 2)
    assert (np.asarray(back.taps) == weight.T).all()


def test_uneven_channels_are_refused_with_every_number() -> None:
    parts = ConvPart("q", 48, 6), ConvPart("k", 48, 6), ConvPart("v", 96, 12)
    with pytest.raises(ValueError, match="`parts`") as caught:
        sharding.channel_order(parts, 4)
    assert str(caught.value).splitlines() == [
        f"`parts`: expected a divisor of part {name} = 6 heads, got 4 ranks. "
        "Every part is divided over the ranks separately; heads are not split."
        for name in "qk"
    ]
    three = (ConvPart("x", 8, 8), ConvPart("B", 9, 3, repeats=True))
    with pytest.raises(ValueError, match="expected a multiple of part B = 3 groups as ranks, got 4 ranks"):
        sharding.channel_order(three, 4)
    for ranks in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="`num_ranks`: expected an integer of at least 1"):
            sharding.channel_order(parts, ranks)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected 192 channels on axis -1, got shape \(4,\)"):
        sharding.shard_channels(np.zeros(4), parts, 2)
    with pytest.raises(ValueError, match=r"`weight`: expected channel, tap or"):
        sharding.shard_conv_weights(np.zeros(192), parts, 2)


# ---- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_slot_is_of_one_rank(ranks: int) -> None:
    """Over all numbers around the pool and at the ends of int32: one rank has it, under its own number, or none."""
    total, per_rank = 24, 24 // ranks
    numbers = np.r_[-40:64, INT32_MIN : INT32_MIN + 40, INT32_MAX - 40 : INT32_MAX + 1].astype(np.int32)
    local = np.stack([np.asarray(sharding.localize_slots(numbers, rank, per_rank)) for rank in range(ranks)])
    owners = (local >= 0).sum(axis=0)
    assert (owners == ((numbers >= 0) & (numbers < total))).all()
    assert set(local[local < 0]) == {-1}
    rank, place = np.nonzero(local >= 0)
    assert (rank * per_rank + local[rank, place] == numbers[place]).all()


def test_slots_of_ranks_past_32_bits() -> None:
    """A large pool: the offset of the last rank and the distance of the first slots do not wrap into it."""
    per_rank = 2**28
    got = sharding.localize_slots([2**31 - 1, 7 * per_rank, 0, -1, INT32_MIN, 2**40], 7, per_rank)
    assert got.tolist() == [per_rank - 1, 0, -1, -1, -1, per_rank - 1]  # wider integers saturate


def test_the_null_slot_is_a_global_number() -> None:
    assert sharding.localize_slots([0, 4, 5], 1, 4, null_slot=4).tolist() == [-1, -1, 1]
    assert sharding.localize_slots([0, 4, 5], 0, 4, null_slot=4).tolist() == [0, -1, -1]
    with pytest.raises(ValueError, match="`slots`: expected an integer array"):
        sharding.localize_slots([0.5], 0, 4)


# ---- geometry --------------------------------------------------------------------------------------------------------


@both_orders
def test_partition_specs_name_the_axes(axis_order: Any) -> None:
    """Of each array, the axes that hold slots, rows or requests, and channels; nothing else is divided."""
    for storage in STORAGES:
        spec = ConvCacheSpec(2, 8, 4, 128, 4, 3, axis_order=axis_order, storage=storage)
        specs = sharding.partition_specs(spec, data_axis="d", tensor_axis="t")
        for name in ("state", "windows"):
            words = getattr(spec, f"{name}_axes").split(", ")
            meaning = {"slot": "d", "row": "d", "channel": "t"}
            expected = P(*(meaning.get(word) for word in words))
            assert getattr(specs, f"conv_{name}") == expected
    only = sharding.partition_specs(SPEC, data_axis=None)
    assert (only.x, only.indices, only.weight) == (P(None, None, "tensor"), P(None), P("tensor", None))
    assert (only.token_indices, sharding.partition_specs(SPEC).token_indices) == (P(None, None), P("data", None))


def test_uneven_sizes_are_refused_together() -> None:
    mesh = AbstractMesh((3, 5), ("data", "tensor"))
    parts = ConvPart("q", 32, 2), ConvPart("k", 32, 2), ConvPart("v", 64, 4)
    with pytest.raises(ValueError, match=r"`spec\.conv_dim`") as caught:
        sharding.local_spec(SPEC, mesh, parts=parts)
    assert [line.split(".")[0] + line.partition("got")[2] for line in str(caught.value).splitlines()[:3]] == [
        "`spec 128, which leaves 3 over. Heads are not split.",
        "`spec 8, which leaves 2 over. 9 would do.",
        "`spec 4, which leaves 1 over. 6 would do.",
    ]
    assert "slots in equal shares for 3 ranks of axis 'data'" in str(caught.value)
    assert "`parts`: expected a divisor of part q = 2 heads, got 5 ranks" in str(caught.value)
    with pytest.raises(ValueError, match=r"`parts`: expected conv_dim = 128 channels together, got q 32 \+ k 32 = 64"):
        sharding.local_spec(SPEC, AbstractMesh((1, 2), ("data", "tensor")), parts=parts[:2])
    with pytest.raises(ValueError, match=r"`tensor_axis`: .*axis of the mesh \(data = 3, tensor = 5\), got 'model'"):
        sharding.local_spec(SPEC, mesh, tensor_axis="model")
    with pytest.raises(ValueError, match="`tensor_axis`: expected another axis than data_axis"):
        sharding.local_spec(SPEC, mesh, tensor_axis="data")
    with pytest.raises(ValueError, match=r"`mesh`: expected a jax\.sharding\.Mesh, got int"):
        sharding.local_spec(SPEC, 8)


def test_a_call_is_checked_in_global_numbers() -> None:
    """Before the mesh is: axes, dtypes and options are those of the plain function's messages."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    pool, windows = jnp.zeros(SPEC.state_shape, SPEC.dtype), jnp.zeros(SPEC.windows_shape, SPEC.dtype)
    arrays: dict[str, Any] = {"spec": SPEC, "mesh": mesh}
    with pytest.raises(ValueError, match=r"`conv_windows`: expected layer, row, column, channel = \(2, 4, 5, 128\)"):
        sharding.sharded_commit(pool, windows[:, :3], [0], [1], **arrays)
    with pytest.raises(ValueError, match=r"`x`: expected request, token, channel = \(1, 3, 128\)"):
        sharding.sharded_verify(
            jnp.zeros((1, 3, 64)), pool, windows, jnp.zeros((128, 4)), **arrays, state_indices=[0], layer=0
        )
    with pytest.raises(ValueError, match="`implementation`: expected None or one of"):
        sharding.sharded_commit(pool, windows, [0], [1], **arrays, implementation="cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`num_accepted_tokens`: expected an integer array"):
        sharding.sharded_gather(windows, [0.5], **arrays)


def test_what_the_plain_function_and_the_mesh_refuse_is_said_at_once() -> None:
    """Sizes that the mesh does not divide stand beside what is wrong on any device."""
    mesh, spec = AbstractMesh((2, 4), ("data", "tensor")), ConvCacheSpec(2, 9, 5, 130, width=4, num_draft_tokens=4)
    pool, windows = jnp.zeros(spec.state_shape, spec.dtype), jnp.zeros(spec.windows_shape, spec.dtype)
    slots, accepted = jnp.zeros(7, jnp.int32), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match="num_accepted_tokens") as caught:
        sharding.sharded_commit(pool, windows, slots, accepted, spec=spec, mesh=mesh)
    named = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert named[-4:] == ["`spec.conv_dim`", "`spec.num_slots`", "`spec.max_requests`", "`state_indices`"]
    cache = ConvCache(pool, windows, spec)
    with pytest.raises(ValueError, match="num_accepted_tokens") as caught:
        sharding.sharded_commit_after_verify(cache, slots, accepted, mesh=mesh)
    assert named[-4:] == [line.split(":")[0] for line in str(caught.value).splitlines()][-4:]
    with pytest.raises(ValueError, match="`spec`"):
        sharding.sharded_commit(pool, windows, slots, accepted, spec="x", mesh=mesh)


# ---- two processes ---------------------------------------------------------------------------------------------------


def arrays_of(folder: pathlib.Path, environments: list[dict[str, str]]) -> dict[str, np.ndarray]:
    """What `tests.mesh_process` leaves, with a process for each environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.mesh_process", str(folder), str(len(environments))]
    running = [
        subprocess.Popen([*command, str(rank), str(port)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank, environment in enumerate(environments)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
    finally:  # one that waits for another that is gone
        for process in running:
            process.kill()
    return whole(sorted(folder.glob(f"{len(environments)}-*.npz")))


def assert_same_arrays(several: dict[str, np.ndarray], one: dict[str, np.ndarray]) -> None:
    assert several.keys() == one.keys() >= {"pool", "windows", "y"}
    for name, array in one.items():
        assert array.shape == several[name].shape
        assert (array == several[name]).all(), name
    assert (one["pool"] != bits(values(SPEC_OF_PROCESSES.state_shape, "float32", 1))).any()


def test_two_processes_have_the_bits_of_one(tmp_path: pathlib.Path) -> None:
    """Two processes of two devices each, over loopback with gloo, and one process of one device."""
    assert_same_arrays(arrays_of(tmp_path, [fresh(2)] * 2), arrays_of(tmp_path, [fresh(1)]))


@pytest.mark.gpu
def test_two_processes_on_gpus_have_the_bits_of_one(tmp_path: pathlib.Path) -> None:
    """Kernels of two processes that form a mesh, each on a GPU of its own or both on the only one, and of one alone."""
    adapters.path("jax-pallas-gpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(jax.devices()))))
    gpus = itertools.cycle(visible.split(","))
    own = [fresh() | {"CUDA_VISIBLE_DEVICES": next(gpus), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} for _ in range(2)]
    assert_same_arrays(arrays_of(tmp_path, own), arrays_of(tmp_path, own[:1]))
