"""A rollback of everything that a hybrid model keeps, in one launch, in one for each group, and layer by layer.

The model is Kimi-Linear-48B-A3B: the convolutions of q, k and v apart, and a float32 state of 2 MiB for each slot and
layer. Geometry, slots, rows and batches are those of this module whatever preset is measured; the pool of states and
the states after each token take 17 GiB, so the slots are few.

    pallas             one `commit_after_verify`
    launch_per_group   a call for each of q, k, v and the recurrent state
    lists_per_layer    one `commit_after_verify` of one array per layer: 60 pools in a launch instead of 3
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.bench import subjects
from jax_impl.bench.subjects import Subject
from jax_impl.cache import ConvCache
from jax_impl.layout import AxisOrder, ConvCacheSpec
from jax_impl.presets import get_preset
from jax_impl.rollback import HybridCache, commit_after_verify, commit_recurrent_state

MODEL = "Kimi-Linear-48B-A3B"
PARTS = ("q", "k", "v")  # of equal size in KDA
HEAD_CHANNELS = 128  # of a key and of a value; the state of a head is one by the other
SLOTS, ROWS, DRAFT_TOKENS = 160, 64, 4
BATCHES = (1, 16, 64)
MOST_CALLS = 32  # in one program
STATE_DTYPE = "float32"


def model_spec(dtype: str, axis_order: AxisOrder) -> ConvCacheSpec:
    """The measured geometry, q, k and v together."""
    return get_preset(MODEL).spec(
        num_slots=SLOTS, max_requests=ROWS, num_draft_tokens=DRAFT_TOKENS, dtype=dtype, axis_order=axis_order
    )


@dataclasses.dataclass(frozen=True)
class Case(subjects.Case):
    """One measured point.

    Attributes:
      spec: of q, k and v together.
      recurrent: whether the recurrent state is committed too.
      track: whether there is a second index set, as large as the first.
    """

    recurrent: bool = False
    track: bool = False

    @property
    def rollback_bytes(self) -> int:
        """Bytes one rollback reads and writes when every request is live."""
        once = self.commit_bytes
        if self.recurrent:
            item_bytes = np.dtype(STATE_DTYPE).itemsize
            once += 2 * self.spec.num_layers * self.batch * math.prod(state_entry(self.spec)) * item_bytes
        return once * (2 if self.track else 1)


def rotating(case: Case) -> Case:
    """The case with calls enough for a run."""
    return dataclasses.replace(case, calls=subjects.distinct_calls(case.rollback_bytes, MOST_CALLS))


def group_spec(spec: ConvCacheSpec) -> ConvCacheSpec:
    """Geometry of one of q, k and v."""
    return dataclasses.replace(spec, conv_dim=spec.conv_dim // len(PARTS))


def state_entry(spec: ConvCacheSpec) -> tuple[int, int, int]:
    """Shape of one slot's recurrent state in one layer: head, key, value."""
    return group_spec(spec).conv_dim // HEAD_CHANNELS, HEAD_CHANNELS, HEAD_CHANNELS


def _state_shapes(spec: ConvCacheSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the recurrent pool and of the states after each token."""
    layers, entry = spec.num_layers, state_entry(spec)
    return (layers, spec.num_slots, *entry), (layers, spec.max_requests, spec.num_draft_tokens, *entry)


def index_sets(case: Case, count: int) -> list[dict[str, np.ndarray]]:
    """Per call the index arguments of `commit_after_verify`; the tracked slots are none of the committed ones."""
    both = dataclasses.replace(case, batch=case.batch * (2 if case.track else 1))
    slots, _, accepted = subjects.index_sets(both, count)
    _, rows, _ = subjects.index_sets(case, count)
    calls = []
    for call in range(count):
        first, second = (slots[call][part] for part in (slice(case.batch), slice(case.batch, None)))
        counts, track_counts = (accepted[call][part] for part in (slice(case.batch), slice(case.batch, None)))
        one = {"state_indices": first, "num_accepted_tokens": counts, "window_rows": rows[call]}
        calls.append(one | ({"track_indices": second, "track_num_tokens": track_counts} if case.track else {}))
    return calls


# ---- JAX -------------------------------------------------------------------------------------------------------------


def random_arrays(spec: ConvCacheSpec, recurrent: bool) -> tuple[HybridCache, Any]:
    """A cache of random values, made on the device, and the states after each token or None."""
    conv = {part: subjects.random_cache(group_spec(spec), seed) for seed, part in enumerate(PARTS)}
    if not recurrent:
        return HybridCache(conv), None
    keys = jax.random.split(jax.random.key(len(PARTS)))
    state, steps = (_random(key, shape) for key, shape in zip(keys, _state_shapes(spec), strict=True))
    return HybridCache(conv, state), steps


@functools.partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Recurrent states. Drawn with two axes: with six, the generator takes seconds to compile."""
    return jax.random.normal(key, (math.prod(shape[:-3]), math.prod(shape[-3:])), STATE_DTYPE).reshape(shape)


def _one_launch(cache: HybridCache, steps: Any, indices: Any, implementation: checks.Implementation) -> HybridCache:
    return commit_after_verify(cache, step_states=steps, implementation=implementation, **indices)


def _launch_per_group(
    cache: HybridCache, steps: Any, indices: Any, implementation: checks.Implementation
) -> HybridCache:
    conv = {
        part: commit_after_verify(one, implementation=implementation, **indices) for part, one in cache.conv.items()
    }
    if steps is None:
        return HybridCache(conv)
    return HybridCache(
        conv, commit_recurrent_state(cache.recurrent_state, steps, implementation=implementation, **indices)
    )


def _layers_apart(cache: HybridCache) -> HybridCache:
    """The conv groups with one array per layer."""
    return HybridCache(
        {
            part: [ConvCache(*layer, one.spec) for layer in zip(one.conv_state, one.conv_windows, strict=True)]
            for part, one in cache.conv.items()
        }
    )


FORMS: dict[str, Callable[..., HybridCache]] = {
    "pallas": _one_launch,
    "launch_per_group": _launch_per_group,
    "lists_per_layer": _one_launch,
}


def forms(case: Case) -> tuple[str, ...]:
    """The forms that a case is measured in: layers apart, which take long to compile, with one set of conv groups."""
    return tuple(form for form in FORMS if form != "lists_per_layer" or not (case.recurrent or case.track))


def form_and_cache(
    form: str, cache: HybridCache, implementation: checks.Implementation
) -> tuple[Callable[..., HybridCache], HybridCache]:
    """The rollback as a function of (cache, step states, one call's index arguments), and a cache of its own for it."""
    own = _layers_apart(cache) if form == "lists_per_layer" else jax.tree.map(jnp.copy, cache)
    return functools.partial(FORMS[form], implementation=implementation), own


def jax_rollback(
    form: str, case: Case, arrays: tuple[HybridCache, Any], implementation: checks.Implementation
) -> Subject:
    """Rollbacks in one of `FORMS`, cache donated."""
    rollback, own = form_and_cache(form, arrays[0], implementation)

    def rollbacks(cache: HybridCache, steps: Any, indices: Any) -> HybridCache:
        for one in indices:
            cache = rollback(cache, steps, one)
        return cache

    indices = jax.tree.map(jnp.asarray, index_sets(case, case.calls))
    return subjects.looped(rollbacks, own, (arrays[1], indices), case.calls)


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_arrays(spec: ConvCacheSpec, recurrent: bool) -> tuple[Any, Any]:
    """The same as `random_arrays` in tensors, of other values."""
    import torch

    import torch_ref

    conv = {}
    for part in PARTS:
        twin, state, windows = subjects.torch_cache(group_spec(spec))
        conv[part] = torch_ref.ConvCache(state, windows, twin)
    if not recurrent:
        return torch_ref.HybridCache(conv), None
    dtype = getattr(torch, STATE_DTYPE)
    state, steps = (torch.randn(shape, device=subjects.TORCH_DEVICE, dtype=dtype) for shape in _state_shapes(spec))
    return torch_ref.HybridCache(conv, state), steps


def on_device(indices: dict[str, np.ndarray]) -> dict[str, Any]:
    """The index arguments of a call as tensors."""
    return dict(zip(indices, subjects.on_device(list(indices.values())), strict=True))


def triton_rollback(cache: Any, steps: Any, indices: dict[str, Any]) -> Any:
    """One rollback: a launch for each pool."""
    import torch_ref

    return torch_ref.commit_after_verify(cache, step_states=steps, implementation="triton", **indices)


def torch_rollback(case: Case, arrays: tuple[Any, Any]) -> Subject:
    """Triton rollbacks in one CUDA graph; `arrays` come from `torch_arrays`."""
    calls = [on_device(one) for one in index_sets(case, case.calls)]
    subject = subjects.replayed(lambda call: triton_rollback(*arrays, calls[call]), case.calls)
    return dataclasses.replace(subject, facts={"launches": len(PARTS) + case.recurrent})
