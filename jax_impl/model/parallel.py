"""Decoding on a mesh: heads over a tensor axis, requests and their slots over a data axis.

The step of `decode` runs inside a `shard_map`, on a rank's own share of everything: its heads, its slots, its requests.
A rank's geometry is a `ModelConfig` with fewer heads and the name of the tensor axis; in every layer the ranks' outputs
are summed twice, behind the mixer and behind the MLP. These sums are the only collectives of a step: the convolution,
the recurrence and the commit need none. Embedding and logits are computed whole on every rank.

Slots are global numbers in the engine and become a rank's own by `localize_slots`. A prompt runs on every data rank and
leaves its states on the one that owns its slot.
"""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.conv import ConvWeight
from jax_impl.layout import ConvCacheSpec, Problems
from jax_impl.model import decode
from jax_impl.model.config import ModelConfig
from jax_impl.model.decode import DecodeState, Engine, StepResult
from jax_impl.model.drafters import Drafter
from jax_impl.model.hybrid import ModelCache
from jax_impl.model.weights import DenseMlp, FullAttention, Layer, LinearAttention, MoeMlp, Parameters
from jax_impl.presets import ConvPart
from jax_impl.sharding import cache_specs, local_spec, localize_slots, shard_channels, shard_conv_weights


def local_config(config: ModelConfig, num_ranks: int, tensor_axis: str | None) -> ModelConfig:
    """One rank's share of a model: its heads and its part of every MLP.

    Raises:
      ValueError: one message with every number that the ranks do not divide.
    """
    problems, shares = Problems(), {}
    sizes = ["num_heads", "num_kv_heads", "linear_key_heads", "linear_value_heads", "intermediate_size"]
    named = {name: getattr(config, name) for name in sizes if name != "intermediate_size" or config.moe is None}
    if config.moe is not None:
        moe = ("intermediate_size", "shared_intermediate_size")
        named |= {f"moe.{name}": getattr(config.moe, name) for name in moe}
        if len(config.moe_layers) < config.num_layers:
            named["intermediate_size"] = config.intermediate_size
    for name, size in named.items():
        shares[name] = size // num_ranks
        if size % num_ranks:
            problems.add(f"config.{name}", f"a multiple of {num_ranks} ranks", size, "Heads are not split.")
    problems.raise_if_any()
    of_moe = {name.removeprefix("moe."): shares.pop(name) for name in list(shares) if name.startswith("moe.")}
    moe_config = None if config.moe is None else dataclasses.replace(config.moe, **of_moe)
    return dataclasses.replace(config, **shares, moe=moe_config, tensor_axis=tensor_axis)


def shard_parameters(config: ModelConfig, parameters: Parameters, num_ranks: int) -> Parameters:
    """Parameters whose rows are in the order of the ranks, so that `parameter_specs` gives each its heads."""

    def reordered(array: jax.Array, axis: int, *parts: tuple[int, int | None]) -> jax.Array:
        named = [ConvPart(str(number), *part) for number, part in enumerate(parts)]
        return shard_channels(array, named, num_ranks, axis)

    keys, values = (config.key_size, config.linear_key_heads), (config.value_size, config.linear_value_heads)
    heads = (config.linear_value_heads, config.linear_value_heads)
    query = (2 * config.num_heads * config.head_dim, config.num_heads)
    key = (config.num_kv_heads * config.head_dim, config.num_kv_heads)

    def dense(mlp: DenseMlp) -> DenseMlp:
        inner = mlp.down.shape[-1]
        return mlp._replace(gate_up=reordered(mlp.gate_up, -2, (inner, None), (inner, None)))

    def layer(one: Layer) -> Layer:
        mixer, mlp = one.mixer, one.mlp
        if isinstance(mixer, LinearAttention):
            mixer = mixer._replace(in_proj=reordered(mixer.in_proj, 0, keys, keys, values, values, heads, heads))
        else:
            mixer = mixer._replace(qkv_proj=reordered(mixer.qkv_proj, 0, query, key, key))
        if isinstance(mlp, MoeMlp):
            inner = (mlp.down.shape[-1], None)
            mlp = mlp._replace(gate_up=reordered(mlp.gate_up, -2, inner, inner), shared=dense(mlp.shared))
        else:
            mlp = dense(mlp)
        return one._replace(mixer=mixer, mlp=mlp)

    conv_parts = [ConvPart("q", *keys), ConvPart("k", *keys), ConvPart("v", *values)]
    conv = shard_conv_weights(parameters.conv, conv_parts, num_ranks)
    return parameters._replace(layers=tuple(map(layer, parameters.layers)), conv=conv)


def parameter_specs(parameters: Parameters, tensor_axis: str | None) -> Any:
    """Partition specs of reordered parameters, as a pytree like them."""
    rows, columns, whole = P(tensor_axis), P(None, tensor_axis), P()
    tree: Any = Layer  # pytree classes, here of partition specs

    def layer(one: Layer) -> Any:
        if isinstance(one.mixer, LinearAttention):
            mixer: Any = LinearAttention(*map(_leaf, (rows, rows, rows, whole, columns)))
        else:
            mixer = FullAttention(*map(_leaf, (rows, whole, whole, columns)))
        mlp: Any = DenseMlp(*map(_leaf, (rows, columns)))
        if isinstance(one.mlp, MoeMlp):
            router, gate_up, down = map(_leaf, (whole, P(None, tensor_axis), P(None, None, tensor_axis)))
            mlp = MoeMlp(router, gate_up, down, mlp, _leaf(whole))
        return tree(whole, mixer, whole, mlp)

    conv = ConvWeight(_leaf(P(None, None, tensor_axis)))
    return Parameters(_leaf(whole), tuple(map(layer, parameters.layers)), conv, _leaf(whole), _leaf(whole))


def _leaf(spec: P) -> Any:
    """A partition spec where a pytree usually has an array."""
    return spec


def state_specs(state: DecodeState, data_axis: str | None, tensor_axis: str | None) -> Any:
    """Partition specs of what lives between steps, as a pytree like it."""
    by_slot, keys = _leaf(P(data_axis)), _leaf(P(None, data_axis, None, tensor_axis))
    hybrid = cache_specs(state.cache.hybrid, data_axis=data_axis, tensor_axis=tensor_axis)
    return DecodeState(ModelCache(hybrid, keys, keys), by_slot, by_slot, by_slot, _leaf(P()))


def _with_spec(state: DecodeState, spec: ConvCacheSpec) -> DecodeState:
    hybrid = state.cache.hybrid
    hybrid = dataclasses.replace(hybrid, conv=dataclasses.replace(hybrid.conv, spec=spec))
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, hybrid=hybrid))


def _steps_of_a_rank(
    drafter: Drafter, spec: ConvCacheSpec, local: ConvCacheSpec, data_axis: str | None, static: dict[str, Any]
) -> tuple[Any, Any]:
    """`verify_step` and `prefill_step` on a rank's shards, with global slot numbers; `static` goes on to both.

    `data_axis` is None where one rank has all slots.
    """

    def own(slots: jax.Array) -> jax.Array:
        if data_axis is None:
            return slots
        return localize_slots(slots, jax.lax.axis_index(data_axis), local.num_slots)

    def verify(parameters: Parameters, state: DecodeState, slots: jax.Array) -> tuple[DecodeState, StepResult]:
        state, result = decode.verify_step(parameters, _with_spec(state, local), drafter, own(slots), **static)
        return _with_spec(state, spec), result

    def prefill(
        parameters: Parameters, state: DecodeState, tokens: Any, lengths: Any, slots: Any, budgets: Any
    ) -> tuple[DecodeState, jax.Array]:
        mine, state = own(slots), _with_spec(state, local)
        state, first = decode.prefill_step(parameters, state, tokens, lengths, mine, budgets, **static)
        if data_axis is not None:  # every rank learns what the owner of each slot has sampled
            first = jax.lax.psum(jnp.where(mine >= 0, first, 0), data_axis)
        return _with_spec(state, spec), first

    return verify, prefill


class MeshEngine(Engine):
    """An `Engine` whose model and cache are divided over a mesh.

    Args:
      config, parameters: the model, whole.
      mesh: a `jax.sharding.Mesh`. data_axis, tensor_axis: two of its axes, or None.
      options: of `Engine`. `max_requests` and `num_slots` count those of all data ranks together; drafters that hold
        arrays are refused.

    Raises:
      ValueError: heads, channels, slots or rows that the mesh does not divide, in one message each for cache and model.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        mesh: jax.sharding.Mesh,
        data_axis: str | None = "data",
        tensor_axis: str | None = "tensor",
        **options: Any,
    ) -> None:
        super().__init__(config, parameters, **options)
        spec = self.state.cache.spec
        local = local_spec(spec, mesh, data_axis=data_axis, tensor_axis=tensor_axis)
        tensor_ranks = 1 if tensor_axis is None else mesh.shape[tensor_axis]
        own_config = local_config(config, tensor_ranks, tensor_axis)
        if jax.tree.leaves(self.drafter):
            problem = f"`drafter`: expected one without arrays, got {type(self.drafter).__name__}."
            raise ValueError(f"{problem} What it holds by slot is not divided.")
        self._rows_per_rank, self._slots_per_rank = local.max_requests, local.num_slots
        specs = state_specs(self.state, data_axis, tensor_axis)
        weights = parameter_specs(parameters, tensor_axis)
        place = lambda one, spec: jax.device_put(one, NamedSharding(mesh, spec))  # noqa: E731
        self.parameters = jax.tree.map(place, shard_parameters(config, parameters, tensor_ranks), weights)
        self.state = jax.tree.map(place, self.state, specs)
        static = {"config": own_config, "stop_token_ids": self.stop_token_ids, "implementation": self.implementation}
        divided_over = data_axis if local.num_slots < spec.num_slots else None
        verify, prefill = _steps_of_a_rank(self.drafter, spec, local, divided_over, static)

        def on_mesh(step: Any, arguments: tuple[Any, ...], result: Any) -> Any:
            mapped = jax.shard_map(
                step, mesh=mesh, in_specs=(weights, specs, *arguments), out_specs=(specs, result), check_vma=False
            )
            return jax.jit(mapped, donate_argnums=1)

        by_row: Any = P(data_axis)
        self._mesh_verify = on_mesh(verify, (by_row,), StepResult(*[by_row] * 5))
        self._mesh_prefill = on_mesh(prefill, (P(), P(), P(), P()), P())

    @property
    def free(self) -> int:
        """Requests that can join now: free rows and slots of the same data rank."""
        rows = collections.Counter(row // self._rows_per_rank for row in self._rows)
        slots = collections.Counter(slot // self._slots_per_rank for slot in self._free_slots)
        return (rows & slots).total()

    def launch(self) -> StepResult:
        """Starts a step on all ranks."""
        self._check_state()
        self.state, result = self._mesh_verify(self.parameters, self.state, self._slots_of_rows)
        return result

    def _take_row_and_slot(self) -> tuple[int, int]:
        row, slot = next(
            (row, slot)
            for row in self._rows
            for slot in self._free_slots
            if row // self._rows_per_rank == slot // self._slots_per_rank
        )
        self._rows.remove(row)
        self._free_slots.remove(slot)
        return row, slot

    def _prefill(self, tokens: np.ndarray, *ints: np.ndarray) -> jax.Array:
        self.state, first = self._mesh_prefill(self.parameters, self.state, tokens, *ints)
        return first
