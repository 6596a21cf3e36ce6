"""One verify and one commit in every implementation, and arrays that two frameworks share.

    NumPy                 the demo's definition: loops over layers, requests and tokens
    JAX XLA               the plain form                     JAX Pallas    the kernels
    torch eager           the oracle's definition            Triton        its kernels

Kernels are compiled where there is a GPU for them and interpreted elsewhere.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import causal_conv1d_verify, commit_conv_state
from jax_impl.demo import NULL_SLOT, Batch, Definition, make_batch
from jax_impl.layout import ConvCacheSpec
from jax_impl.walkthrough import show
from jax_impl.walkthrough.show import Picture, Table

SPEC = ConvCacheSpec(2, 9, 7, 256, width=4, num_draft_tokens=4, dtype="bfloat16")
MAX_ULPS = 6  # the last bar of the histogram is this and everything above

Bits = np.ndarray


def prepare() -> str:
    """Chooses where Triton runs, before it is imported, and says which implementations can be compared here."""
    if absent := show.missing("torch", "triton"):
        return f"{absent} Without them there is less to compare: pip install '.[torch]'"
    if not _torch_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
    return f"torch is here; Triton kernels are {'compiled' if _torch_gpu() else 'interpreted'}."


def _torch_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclasses.dataclass(frozen=True)
class Example:
    """Inputs of one step: every accepted count, some tokens that are not valid, and one padding row."""

    spec: ConvCacheSpec
    batch: Batch
    pool: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    @property
    def integers(self) -> np.dtype:
        """The integers that pool elements are compared as."""
        return np.dtype(f"uint{8 * self.spec.item_bytes}")


def example(spec: ConvCacheSpec = SPEC, seed: int = 0) -> Example:
    """Normal deviates in a pool of `spec`, float32 inputs that have to be rounded to it, float32 weights."""
    rng = np.random.default_rng(seed)
    live = rng.permutation(np.arange(1, spec.num_slots))[: spec.max_requests - 1]
    pool = rng.standard_normal(spec.state_shape, np.float32).astype(jnp.dtype(spec.dtype))
    weight = rng.uniform(-0.5, 0.5, (spec.num_layers, spec.conv_dim, spec.width)).astype(np.float32)
    bias = rng.standard_normal((spec.num_layers, spec.conv_dim), np.float32)
    return Example(spec, make_batch(rng, spec, live, step=0), pool, weight, bias)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one implementation returned: pool and buffer as integers (None where there is no buffer), and y."""

    state: Bits
    windows: Bits | None
    y: np.ndarray


def in_numpy(given: Example, number: type[np.floating[Any]] = np.float32) -> Outcome:
    """By the demo's definition, which has no buffer; products and sums in `number`."""
    bits = given.pool.view(given.integers).copy()
    definition = Definition(bits, given.pool.dtype, given.weight, given.bias, "silu", number)
    result, _ = definition.advance(given.batch)
    return Outcome(result.state_bits, None, result.y)


def in_jax(given: Example, implementation: Any) -> Outcome:
    """By `jax_impl`, a verify in every layer and one commit in one jit."""
    spec, batch = given.spec, given.batch

    @jax.jit
    def step(pool: Any, windows: Any, x: Any, weight: Any, bias: Any) -> Any:
        common = {"spec": spec, "window_rows": batch.rows, "num_valid_tokens": batch.valid, "null_slot": NULL_SLOT}
        outputs = []
        for layer in range(spec.num_layers):
            y, windows = causal_conv1d_verify(
                x[layer], pool, windows, weight[layer], bias[layer], state_indices=batch.slots, layer=layer,
                implementation=implementation, **common,
            )  # fmt: skip
            outputs.append(y)
        pool = commit_conv_state(pool, windows, batch.slots, batch.accepted, implementation=implementation, **common)
        return pool, windows, jnp.stack(outputs)

    empty = jnp.zeros(spec.windows_shape, spec.dtype)
    arrays = step(jnp.asarray(given.pool), empty, *map(jnp.asarray, (batch.x, given.weight, given.bias)))
    pool, windows, y = map(np.asarray, arrays)
    return Outcome(pool.view(given.integers), windows.view(given.integers), y)


def in_torch(given: Example, implementation: Any) -> Outcome:
    """By `torch_ref`, in place on tensors of the GPU where there is one and Triton is to run."""
    import torch

    import torch_ref

    spec, batch = torch_ref.ConvCacheSpec(**dataclasses.asdict(given.spec)), given.batch
    device = "cuda" if _torch_gpu() and implementation == "triton" else "cpu"
    signed, dtype = np.dtype(f"int{8 * spec.item_bytes}"), getattr(torch, spec.dtype)
    pool = torch.from_numpy(given.pool.view(signed).copy()).view(dtype).to(device)  # NumPy has no bfloat16 of torch's
    windows = torch.zeros(spec.windows_shape, dtype=dtype, device=device)
    x, weight, bias = (torch.from_numpy(array.copy()).to(device) for array in (batch.x, given.weight, given.bias))
    slots, accepted, rows, valid = (
        torch.from_numpy(array.copy()).to(device) for array in (batch.slots, batch.accepted, batch.rows, batch.valid)
    )
    common: dict[str, Any] = {"spec": spec, "window_rows": rows, "num_valid_tokens": valid, "null_slot": NULL_SLOT}
    common["implementation"] = implementation
    outputs = [
        torch_ref.causal_conv1d_verify(
            x[layer], pool, windows, weight[layer], bias[layer], state_indices=slots, layer=layer, **common
        )[0]
        for layer in range(spec.num_layers)
    ]
    torch_ref.commit_conv_state(pool, windows, slots, accepted, **common)
    state, buffer = (tensor.cpu().view(getattr(torch, signed.name)).numpy() for tensor in (pool, windows))
    return Outcome(state.view(given.integers), buffer.view(given.integers), torch.stack(outputs).cpu().numpy())


def implementations() -> dict[str, Callable[[Example], Outcome]]:
    """Those that run here, by name; torch's are left out where it is not installed."""
    pallas, kernels = "pallas_interpret", "interpreted"
    if jax.default_backend() == "gpu":
        from jax_impl import pallas_backend

        pallas, kernels = ("pallas", "compiled") if pallas_backend.runs_here() else (pallas, kernels)
    found: dict[str, Callable[[Example], Outcome]] = {
        "NumPy": in_numpy,
        "JAX XLA": functools.partial(in_jax, implementation="xla"),
        f"JAX Pallas, {kernels}": functools.partial(in_jax, implementation=pallas),
    }
    if show.missing("torch") is None:
        found["torch eager"] = functools.partial(in_torch, implementation="eager")
    if show.missing("torch", "triton") is None:
        name = "compiled" if _torch_gpu() else "interpreted"
        found[f"Triton, {name}"] = functools.partial(in_torch, implementation="triton")
    return found


def outcomes(given: Example) -> dict[str, Outcome]:
    """What each of the implementations returns."""
    return {name: run(given) for name, run in implementations().items()}


def state_table(found: Mapping[str, Outcome]) -> Table:
    """Elements of pool and buffer whose bits differ: the pool from NumPy's, the buffer from JAX XLA's."""
    pool, buffer = found["NumPy"].state, found["JAX XLA"].windows

    def differ(one: Bits | None, reference: Bits | None) -> str:
        if one is None or reference is None:
            return "keeps none"
        count = np.count_nonzero(one != reference)
        return "the reference" if one is reference else f"{count} of {one.size}"

    rows = [(name, differ(one.state, pool), differ(one.windows, buffer)) for name, one in found.items()]
    return Table(("implementation", "pool: different bits", "buffer: different bits"), rows)


def ulps(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How many float32 values lie from each value to the exact one rounded: 0 is correctly rounded.

    >>> one = np.float32(1)
    >>> ulps(np.array([one, np.nextafter(one, np.float32(2)), -one]), np.array([1.0, 1.0, -1.0])).tolist()
    [0, 1, 0]
    """

    def ordered(array: np.ndarray) -> np.ndarray:
        bits = array.astype(np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(2**31) - bits, bits)

    return np.abs(ordered(values) - ordered(exact))


def _counts(given: Example, one: Outcome) -> np.ndarray:
    """How many y of live requests are 0, 1, … `MAX_ULPS` and more ulps from the float64 result."""
    valid = np.arange(given.spec.num_draft_tokens) < given.batch.valid[:, None]
    live = np.broadcast_to((valid & given.batch.live[:, None])[None, :, :, None], given.batch.x.shape)
    distance = ulps(one.y[live], in_numpy(given, np.float64).y[live])
    return np.bincount(np.minimum(distance, MAX_ULPS), minlength=MAX_ULPS + 1)


def _labels() -> list[str]:
    return [*map(str, range(MAX_ULPS)), f"≥ {MAX_ULPS}"]


def ulp_table(given: Example, found: Mapping[str, Outcome]) -> Table:
    """Shares of the y at each distance from the float64 result, in float32 ulps."""
    rows = []
    for name, one in found.items():
        counts = _counts(given, one)
        rows.append((name, *(f"{count / counts.sum():.1%}" for count in counts)))
    return Table(("y of", *(f"{label} ulp" for label in _labels())), rows)


def ulp_picture(given: Example, found: Mapping[str, Outcome]) -> Picture:
    """The same as bars, side by side."""
    figure, (axes,) = show.panels(7.5, 3.2)
    width = 0.8 / len(found)
    for index, (name, one) in enumerate(found.items()):
        counts = _counts(given, one)
        place = np.arange(len(counts)) + (index - (len(found) - 1) / 2) * width
        axes.bar(place, counts / counts.sum(), width, label=name, color=f"C{index}")
    axes.set_xticks(range(MAX_ULPS + 1), _labels())
    show.finish(axes, "y against float64", "distance in float32 ulps", "share of all values")
    return show.picture(figure, "Histogram of the distance of y from the float64 result in ulps, by implementation.")
