"""Verify steps as serving engines hold their state, and what the compiled programs say about copies.

    list_step    one pool per layer [slots, channels, K-1], slot 0 is padding
    scan_step    one pool of all layers [layers, slots, K-1, channels], slot -1 is padding, layers in `lax.scan`
    sliced_step  the same with a mistake: right, and slow
    shard_step   the second on several devices, channels divided

A layer is a stand-in for the real one: its convolution on a residual stream.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl import ConvCache, allocate_conv_cache, causal_conv1d_verify, commit_conv_state
from jax_impl.bench import plots, report
from jax_impl.bench.program import large_copies
from jax_impl.layout import ConvCacheSpec
from jax_impl.walkthrough.show import Markdown, Picture, Table

# float16 and not bfloat16: JAX 0.10 copies a bfloat16 pool on the CPU. Products of 16-bit numbers are exact in float32,
# so programs that fuse them differently still agree in every bit of the next layer's inputs.
SPEC = ConvCacheSpec(4, 1024, 8, 256, width=4, num_draft_tokens=4, dtype="float16")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


# ---- the steps -------------------------------------------------------------------------------------------------------


def list_step(
    states: list[jax.Array],
    windows: list[jax.Array],
    hidden: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    accepted: jax.Array,
    *,
    spec: ConvCacheSpec,
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """A pool and a buffer per layer, as lists; requests in slot 0 are padding."""
    buffers = []
    for state, buffer, weight in zip(states, windows, weights, strict=True):
        y, buffer = causal_conv1d_verify(hidden, state, buffer, weight, spec=spec, state_indices=slots, null_slot=0)
        hidden = hidden + y
        buffers.append(buffer)
    states = commit_conv_state(states, buffers, slots, accepted, spec=spec, null_slot=0)
    return states, buffers, hidden


def scan_step(
    cache: ConvCache, hidden: jax.Array, weights: jax.Array, slots: jax.Array, accepted: jax.Array
) -> tuple[ConvCache, jax.Array]:
    """The cache as one pytree; the buffer is carried through the scan, the pool is only read until the commit."""

    def layer_step(carry: Any, layer_and_weight: Any) -> Any:
        windows, hidden = carry
        layer, weight = layer_and_weight
        y, windows = causal_conv1d_verify(
            hidden, cache.conv_state, windows, weight, spec=cache.spec, state_indices=slots, layer=layer
        )
        return (windows, hidden + y), None

    layers = jnp.arange(cache.spec.num_layers), weights
    (windows, hidden), _ = lax.scan(layer_step, (cache.conv_windows, hidden), layers)
    state = commit_conv_state(cache.conv_state, windows, slots, accepted, spec=cache.spec)
    return ConvCache(state, windows, cache.spec), hidden


def sliced_step(
    cache: ConvCache, hidden: jax.Array, weights: jax.Array, slots: jax.Array, accepted: jax.Array
) -> tuple[ConvCache, jax.Array]:
    """How not to do it: the pool goes through the scan as xs and ys, so layers are cut out and a new pool stacked."""

    def layer_step(hidden: Any, of_layer: Any) -> Any:
        state, windows, weight = of_layer
        y, windows = causal_conv1d_verify(hidden, state, windows, weight, spec=cache.spec, state_indices=slots)
        state = commit_conv_state(state, windows, slots, accepted, spec=cache.spec)
        return hidden + y, (state, windows)

    hidden, (state, windows) = lax.scan(layer_step, hidden, (cache.conv_state, cache.conv_windows, weights))
    return ConvCache(state, windows, cache.spec), hidden


def shard_step(mesh: Mesh, spec: ConvCacheSpec) -> Any:
    """`scan_step` under `jax.shard_map`: channels over the mesh's axis "tp", every device has its share of all slots.

    Args:
      mesh: with an axis "tp" that divides conv_dim.
      spec: geometry of all devices together.
    """
    local = shard_spec(spec, mesh.shape["tp"])
    pool, stream, weights, index = P(None, None, None, "tp"), P(None, None, "tp"), P(None, "tp", None), P()

    def on_one_device(state: Any, windows: Any, hidden: Any, weights: Any, slots: Any, accepted: Any) -> Any:
        cache, hidden = scan_step(ConvCache(state, windows, local), hidden, weights, slots, accepted)
        return cache.conv_state, cache.conv_windows, hidden

    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(pool, pool, stream, weights, index, index),
        out_specs=(pool, pool, stream),
    )


def shard_spec(spec: ConvCacheSpec, devices: int) -> ConvCacheSpec:
    """The geometry of one of `devices` that divide the channels.

    >>> shard_spec(SPEC, 8).conv_dim
    32
    """
    if spec.conv_dim % devices:
        raise ValueError(f"`devices`: expected a divisor of conv_dim = {spec.conv_dim}, got {devices}.")
    return dataclasses.replace(spec, conv_dim=spec.conv_dim // devices)


# ---- what they are run on --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one step in NumPy: pool `[L, C, K-1, conv_dim]`, hidden `[B, D, conv_dim]`, weights `[L, conv_dim, K]`,
    slots and accepted counts `[B]`; the last request is padding.
    """

    pool: np.ndarray
    hidden: np.ndarray
    weights: np.ndarray
    slots: np.ndarray
    accepted: np.ndarray

    def of_step(self, padding: int) -> tuple[jax.Array, ...]:
        """hidden, weights, slots and counts as new arrays, the padding request with the slot that a stack gives it."""
        slots = np.append(self.slots[:-1], padding).astype(np.int32)
        return tuple(jnp.array(one) for one in (self.hidden, self.weights, slots, self.accepted))

    def list_state(self, spec: ConvCacheSpec) -> tuple[list[jax.Array], list[jax.Array]]:
        """The pool and an empty buffer as `list_step` holds them, `spec` in channel_major."""
        pools = [jnp.array(np.swapaxes(one, -1, -2)) for one in self.pool]
        return pools, [jnp.zeros(spec.windows_shape[1:], spec.dtype) for _ in pools]

    def cache(self, spec: ConvCacheSpec, sharding: Any = None) -> ConvCache:
        """The pool and an empty buffer as `scan_step` holds them."""
        empty = allocate_conv_cache(spec, sharding)
        return ConvCache(jax.device_put(jnp.array(self.pool), empty.conv_state.sharding), empty.conv_windows, spec)


def inputs(spec: ConvCacheSpec = SPEC, seed: int = 0) -> Inputs:
    """Normal deviates, pool and weights in the pool's dtype; every accepted count 0 … D in turn."""
    rng, batch = np.random.default_rng(seed), spec.max_requests
    shape = (spec.num_layers, spec.num_slots, spec.state_columns, spec.conv_dim)
    return Inputs(
        pool=rng.standard_normal(shape, np.float32).astype(spec.dtype),
        hidden=rng.standard_normal((batch, spec.num_draft_tokens, spec.conv_dim), np.float32),
        weights=rng.uniform(-0.5, 0.5, (spec.num_layers, spec.conv_dim, spec.width)).astype(spec.dtype),
        slots=rng.permutation(np.arange(1, spec.num_slots))[:batch].astype(np.int32),
        accepted=(np.arange(batch) % (spec.num_draft_tokens + 1)).astype(np.int32),
    )


# ---- what the programs do --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step that has run once with its state donated.

    Attributes:
      results: what it returned.
      in_place: every donated buffer, on every device, is a buffer of the results.
      pool_copies: opcodes of its copies that are as large as the largest donated array of a device.
      temp_share: temporary bytes over donated bytes, of one device.
      collectives: opcodes with which devices speak to each other.
    """

    results: Any
    in_place: bool
    pool_copies: list[str]
    temp_share: float
    collectives: list[str]


def run_donated(step: Any, *arguments: Any, donate: Sequence[int]) -> Program:
    """Compiles a step for its arguments and runs it; those numbered in `donate` are used up."""
    leaves = jax.tree.leaves([arguments[index] for index in donate])
    before, shards = addresses(leaves), [shard.data.size for leaf in leaves for shard in leaf.addressable_shards]
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    compiled = jax.jit(step, donate_argnums=tuple(donate)).lower(*arguments).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    results = jax.block_until_ready(compiled(*arguments))
    return Program(
        results=results,
        in_place=before <= addresses(jax.tree.leaves(results)),
        pool_copies=large_copies(text, max(shards)),
        temp_share=memory.temp_size_in_bytes / num_bytes,
        collectives=collectives(text),
    )


def addresses(arrays: Sequence[jax.Array]) -> set[int]:
    """Where the arrays' data begins, on every device."""
    return {shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards}


def collectives(text: str) -> list[str]:
    """Opcodes in `COLLECTIVES` in the text of a compiled program.

    >>> collectives("  %x = f32[8]{0} all-gather-start(f32[1]{0} %y), dimensions={0}")
    ['all-gather']
    """
    return re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)


def programs_table(programs: dict[str, Program]) -> Table:
    """What was found out about each step."""
    rows = [
        (
            name,
            "yes" if one.in_place else "no",
            ", ".join(one.pool_copies) or "none",
            f"{one.temp_share:.0%} of it",
            ", ".join(one.collectives) or "none",
        )
        for name, one in programs.items()
    ]
    columns = ("step", "donated buffers keep their addresses", "pool-sized copies", "temporary memory",
               "collectives")  # fmt: skip
    return Table(columns, rows)


def same_bits(states: Sequence[Any]) -> bool:
    """Whether 16-bit pools are equal as integers: arrays `[L, C, K-1, conv_dim]`, or lists of `[C, conv_dim, K-1]`."""

    def bits(state: Any) -> np.ndarray:
        if isinstance(state, list):
            state = np.swapaxes(np.stack([np.asarray(one) for one in state]), -1, -2)
        return np.ascontiguousarray(np.asarray(state)).view(np.uint16)

    first, *others = map(bits, states)
    return all(np.array_equal(first, other) for other in others)


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Of pool and buffer `[layer, slot or row, column, channel]`: channels over "tp"."""
    return NamedSharding(mesh, P(None, None, None, "tp"))


def host_mesh() -> Mesh:
    """All devices of the CPU in one axis "tp"."""
    return Mesh(np.asarray(jax.devices("cpu")), ("tp",))


# ---- measured --------------------------------------------------------------------------------------------------------


def measured(folder: pathlib.Path) -> Markdown:
    """The newest measurement of every operation in a folder of results, as the README has it."""
    return Markdown(report.readme_block(report.results_files(folder)))


def measured_picture(folder: pathlib.Path, operation: str) -> Picture | Markdown:
    """The newest plot of an operation's time over requests; a sentence where no file has it."""
    with_it = [
        record
        for record, keep in report.newest(map(report.read, report.results_files(folder)))
        if any(row["operation"] == operation and keep(row) for row in record["points"])
    ]
    if not with_it:
        return Markdown(f"No file in {folder.name} has {operation}.")
    record = with_it[-1]
    with tempfile.TemporaryDirectory() as drawn:
        paths = plots.draw(record, "newest", pathlib.Path(drawn))
        (path,) = [path for path in paths if path.stem == f"newest-{operation}"]
        png = path.read_bytes()
    environment = record["environment"]
    return Picture(png, f"Time of one {operation} over requests, {environment['device']}, {environment['date']}.")
