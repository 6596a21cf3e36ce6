"""One measured point after another, and the comparison that comes before them."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_impl.bench import subjects, timing
from jax_impl.commit import commit_conv_state
from jax_impl.conv import causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

XLA_CALLS = 10
SUBJECTS = ("pallas", "xla", "triton", "copy_driver", "copy_kernel")


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation on a geometry with a batch size."""

    operation: str
    spec: ConvCacheSpec
    batch: int


def small(operation: str, order: Any) -> Point:
    """A point that the interpreter runs in seconds."""
    return Point(operation, ConvCacheSpec(2, 11, 6, 128, 4, 4, axis_order=order), 5)


def reduced(operation: str, spec: ConvCacheSpec) -> Point:
    """The measured geometry with two layers, for the comparison before it is timed; each request needs a slot."""
    return Point(operation, dataclasses.replace(spec, num_layers=2), min(16, spec.num_slots))


def check(point: Point) -> bool:
    """Whether the kernel and the XLA form give the same bits for pool and buffer, and y within one rounding."""
    spec, kernel = point.spec, "pallas" if jax.default_backend() == "gpu" else "pallas_interpret"
    case = subjects.Case(spec, point.batch, 1)
    cache = subjects.random_cache(spec)
    (slots,), (rows,), (accepted,) = subjects.index_sets(case, 1)
    (x,), weights = subjects.verify_inputs(case, 1)

    def results(implementation: Any) -> list[np.ndarray]:
        if point.operation == "commit":
            commit = jax.jit(
                lambda pool, windows: commit_conv_state(
                    pool, windows, slots, accepted, spec=spec, window_rows=rows, implementation=implementation
                )
            )
            return [np.asarray(commit(cache.conv_state, cache.conv_windows))]
        verify = jax.jit(
            lambda x, pool, windows: causal_conv1d_verify(
                x, pool, windows, weights[1], spec=spec, state_indices=slots, layer=1, window_rows=rows,
                implementation=implementation,
            )
        )  # fmt: skip
        y, windows = verify(x, cache.conv_state, cache.conv_windows)
        return [np.asarray(windows), np.asarray(y)]

    kept, *outputs = zip(results("xla"), results(kernel), strict=True)
    bits = np.uint16 if spec.item_bytes == 2 else np.uint32
    same = np.array_equal(kept[0].view(bits), kept[1].view(bits))
    for expected, got in outputs:
        wide, other = expected.astype(np.float64), got.astype(np.float64)
        rounding = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-20}[spec.dtype]
        same &= bool(np.all(np.abs(wide - other) <= rounding * (1e-3 + np.abs(wide))))
    print(f"check {point.operation} {spec.axis_order} B={point.batch}: {'same' if same else 'DIFFERENT'}")
    return same


def measure(operation: str, spec: ConvCacheSpec, batches: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """One row per batch size; arrays of one geometry are shared by its batch sizes."""
    cache = subjects.random_cache(spec)
    twin = subjects.torch_cache(spec) if importlib.util.find_spec("torch") is not None else None
    for batch in batches:
        # At small batches more distinct calls, so that together they touch more than the cache holds.
        calls = spec.num_layers * (4 if batch < 8 else 1) if operation == "verify" else max(4, 64 // max(1, batch))
        case = subjects.Case(spec, batch, calls)
        num_bytes = case.commit_bytes if operation == "commit" else case.verify_bytes
        ours = subjects.jax_commit if operation == "commit" else subjects.jax_verify
        # XLA compiles each call anew, so it gets fewer; where they fit the cache that is in its favour.
        few = dataclasses.replace(case, calls=min(calls, XLA_CALLS))
        makers: dict[str, tuple[int, Callable[[], subjects.Runner]]] = {
            "pallas": (calls * subjects.LOOPS, functools.partial(ours, case, cache, "pallas")),
            "xla": (few.calls * subjects.LOOPS, functools.partial(ours, few, cache, "xla")),
        }
        if twin is not None:
            theirs = subjects.torch_commit if operation == "commit" else subjects.torch_verify
            makers |= {
                "triton": (calls, functools.partial(theirs, case, twin)),
                "copy_driver": (calls, functools.partial(subjects.torch_copy, num_bytes, calls, kernel=False)),
                "copy_kernel": (calls, functools.partial(subjects.torch_copy, num_bytes, calls, kernel=True)),
            }
        row: dict[str, Any] = {
            "operation": operation,
            "axis_order": spec.axis_order,
            "num_draft_tokens": spec.num_draft_tokens,
            "width": spec.width,
            "conv_dim": spec.conv_dim,
            "num_layers": spec.num_layers,
            "num_slots": spec.num_slots,
            "dtype": spec.dtype,
            "batch": batch,
            "bytes": num_bytes,
        }
        for name, (made, make) in makers.items():
            row[name] = timing.marginal_us(make(), made, repeats)
        yield row


def line(row: dict[str, Any]) -> str:
    """One printed line of a row: times in microseconds and the ratio to the faster copy."""
    times = {name: row[name]["median_us"] for name in SUBJECTS if name in row}
    copies = [times[name] for name in ("copy_driver", "copy_kernel") if name in times]
    ratio = f"  pallas/copy {times['pallas'] / min(copies):.3f}" if copies else ""
    head = f"{row['operation']} {row['axis_order']} D={row['num_draft_tokens']} B={row['batch']}"
    return head + "".join(f"  {name} {value:.2f}" for name, value in times.items()) + ratio
