"""One of the processes of `test_two_processes_have_the_bits_of_one`: writes the bits of its shards to a file.

python -m tests.mesh_process FOLDER PROCESSES RANK PORT
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

SPEC = ConvCacheSpec(2, 16, 8, 64, 4, 3, "float32")


def main(folder: str, processes: int, rank: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 4 // processes
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)  # a data rank is a process
    specs = sharding.partition_specs(SPEC)

    def place(array: np.ndarray, spec: P) -> jax.Array:  # every process makes its own shards
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)

    pool, windows = values(SPEC.state_shape, "float32", 1), values(SPEC.windows_shape, "float32", 2)
    x, weight = values((4, 8, 3, 64), "float32", 3), values((64, 4), "float32", 4)
    slots, accepted = np.asarray([0, 3, 5, 9, 8, 15, -1, 2], np.int32), np.asarray([1, 2, 3, 3, 0, 2, 3, 1], np.int32)

    def step(carried: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        pool, windows = carried
        call = functools.partial(sharding.sharded_verify, spec=SPEC, mesh=mesh, state_indices=slots)
        for layer in range(SPEC.num_layers):
            x, windows = call(x, pool, windows, own_weight, layer=layer)
        return (sharding.sharded_commit(pool, windows, slots, accepted, spec=SPEC, mesh=mesh), windows), x

    own_weight = place(weight, specs.weight)
    run = jax.jit(lambda carried, x: lax.scan(step, carried, x), donate_argnums=0)
    given = (place(pool, specs.conv_state), place(windows, specs.conv_windows))
    (pool, windows), y = run(given, place(x, P(None, *specs.x)))
    total = jax.jit(lambda y: abs(y).max(), out_shardings=NamedSharding(mesh, P()))(y)  # one collective, over gloo
    found: dict[str, Any] = {"total": bits(np.asarray(total.addressable_shards[0].data).reshape(1))}
    for name, array in {"pool": pool, "windows": windows, "y": y}.items():
        found |= {f"{name} {shard.index}": bits(np.asarray(shard.data)) for shard in array.addressable_shards}
    np.savez(pathlib.Path(folder) / f"{processes}-{rank}.npz", **found)
    if processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
