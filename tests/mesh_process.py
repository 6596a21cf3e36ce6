"""One of the two processes of a mesh, or the only one, on one device: writes the bits of its shards to a file.

python -m tests.mesh_process FOLDER PROCESSES RANK PORT

A data rank is a process; on CPUs it has two devices, on GPUs one. Alone it skips what two ranks would.
"""

import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl import ConvCacheSpec, sharding
from tests.cases import values
from tests.definition import bits

SPEC = ConvCacheSpec(2, 16, 8, 256, 4, 3, "float32")
SLOTS, ACCEPTED = np.asarray([0, 3, 5, 9, 8, 15, -1, 2], np.int32), np.asarray([1, 2, 3, 3, 0, 2, 3, 1], np.int32)
OF_TWO_RANKS = np.asarray([0, 3, 5, -1, 8, 15, -1, -1], np.int32)  # without slots of the other half's rank


def main(folder: str, processes: int, rank: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    on_gpu = jax.default_backend() == "gpu"
    shape = (processes, 1 if on_gpu or processes == 1 else 2)
    assert (len(jax.devices()), len(jax.local_devices())) == (shape[0] * shape[1], shape[1])
    mesh = jax.make_mesh(shape, ("data", "tensor"), (AxisType.Auto,) * 2)
    slots, specs = SLOTS if processes > 1 else OF_TWO_RANKS, sharding.partition_specs(SPEC)

    def place(array: np.ndarray, spec: P) -> jax.Array:  # every process makes its own shards
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)

    pool, windows = values(SPEC.state_shape, "float32", 1), values(SPEC.windows_shape, "float32", 2)
    x, weight = values((4, 8, 3, 256), "float32", 3), values((256, 4), "float32", 4)

    def step(carried: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        pool, windows = carried
        call = functools.partial(sharding.sharded_verify, spec=SPEC, mesh=mesh, state_indices=slots)
        for layer in range(SPEC.num_layers):
            x, windows = call(x, pool, windows, own_weight, layer=layer)
        return (sharding.sharded_commit(pool, windows, slots, ACCEPTED, spec=SPEC, mesh=mesh), windows), x

    own_weight = place(weight, specs.weight)
    run = jax.jit(lambda carried, x: lax.scan(step, carried, x), donate_argnums=0)
    given = (place(pool, specs.conv_state), place(windows, specs.conv_windows))
    compiled: Any = run.lower(given, place(x, P(None, *specs.x))).compile()
    assert ("mosaic_gpu" in compiled.as_text()) == on_gpu
    (pool, windows), y = compiled(given, place(x, P(None, *specs.x)))
    found = {}
    for name, array in {"pool": pool, "windows": windows, "y": y}.items():
        for shard in array.addressable_shards:
            found[f"{name} {bounds(shard.index, array.shape)}"] = bits(np.asarray(shard.data))
    if not on_gpu:  # one collective, over gloo; NCCL does not let processes share a card
        total = jax.jit(lambda y: abs(y).max(), out_shardings=NamedSharding(mesh, P()))(y)
        found["total 0:1"] = bits(np.asarray(total.addressable_shards[0].data).reshape(1))
    np.savez(pathlib.Path(folder) / f"{processes}-{rank}.npz", **found)
    if processes > 1:
        jax.distributed.shutdown()


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Which part of an array a shard is, as text: `0:2,8:16`.

    >>> bounds((slice(None), slice(8, 16)), (2, 16))
    '0:2,8:16'
    """
    ends = (one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop in ends)


def whole(files: list[pathlib.Path]) -> dict[str, np.ndarray]:
    """The arrays of which processes wrote parts, put together.

    Raises:
      AssertionError: a part is missing, or two processes wrote different ones.
    """
    parts: dict[str, list[tuple[tuple[slice, ...], np.ndarray]]] = {}
    for file in files:
        for key, part in np.load(file).items():
            name, where = key.split()
            ends = (map(int, one.split(":")) for one in where.split(","))
            parts.setdefault(name, []).append((tuple(slice(*pair) for pair in ends), part))
    arrays = {}
    for name, found in parts.items():
        shape = tuple(max(index[axis].stop for index, _ in found) for axis in range(len(found[0][0])))
        array, written = np.zeros(shape, found[0][1].dtype), np.zeros(shape, bool)
        for index, part in found:
            assert (array[index] == part)[written[index]].all(), name
            array[index], written[index] = part, True
        assert written.all(), name
        arrays[name] = array
    return arrays


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
