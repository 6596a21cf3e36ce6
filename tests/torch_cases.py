"""What the tests of torch_ref's commits share: backends, tensors from arrays and back, and pools in one envelope."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jax_impl.layout import ConvCacheSpec
from tests import adapters

on_torch = pytest.mark.parametrize(
    "path",
    [pytest.param(name, marks=marks) for name, marks in adapters.PATHS.items() if name.startswith("torch")],
    indirect=True,
)

# every int32 value that a careless index would wrap, clamp or overflow with, for 11 slots or rows
HOSTILE = (-1, 11, 12, 22, -11, -12, -(2**31), 2**31 - 1, -(2**31) + 1, 65536, -65536)
WIDE = (2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63))  # each is 3, -1 or 0 in its lower 32 bits

GAP = 0xD5  # a byte that fills the gaps of an envelope; as a float of any width it is a large negative number


def device_of(path: adapters.Path) -> str:
    return "cuda" if path.on_gpu else "cpu"


def how(path: adapters.Path) -> dict[str, Any]:
    return {"implementation": path.implementation}


def tensor_of(tree: Any, path: adapters.Path) -> Any:
    """Copies of NumPy arrays, nested in dicts, lists and tuples, as tensors on the path's device."""
    import torch

    if isinstance(tree, dict):
        return {key: tensor_of(value, path) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tensor_of(value, path) for value in tree)
    if not isinstance(tree, np.ndarray):
        return tree
    integers = torch.from_numpy(tree.view({2: np.int16, 4: np.int32}[tree.itemsize]).copy())
    return integers.view(getattr(torch, tree.dtype.name)).to(device_of(path))


def array_of(tensor: Any) -> np.ndarray:
    """A copy of a tensor of any strides."""
    import torch

    integers = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return integers.cpu().numpy().view(str(tensor.dtype).removeprefix("torch.")).copy()


def oracle_spec(spec: ConvCacheSpec) -> Any:
    """The same geometry in torch_ref's own class."""
    import torch_ref

    return torch_ref.ConvCacheSpec(**dataclasses.asdict(spec))


def commit_loops(
    state: np.ndarray,
    steps: np.ndarray,
    slots: Any,
    counts: Any,
    *,
    rows: Any = None,
    valid: Any = None,
    null: Any = None,
) -> None:
    """The definition of a recurrent commit, on `[L, C, …]` and `[L, R, D, …]` of integers, in place."""
    num_tokens = steps.shape[2]
    rows = range(len(slots)) if rows is None else rows
    valid = [num_tokens] * len(slots) if valid is None else valid
    for slot, n, row, v in zip(slots, counts, rows, valid, strict=True):
        wanted = 1 <= n <= v <= num_tokens and slot != null
        if wanted and 0 <= row < steps.shape[1] and 0 <= slot < state.shape[1]:
            for layer in range(len(state)):
                state[layer, slot] = steps[layer, row, n - 1]


class Envelope:
    """Memory in which one slot holds all layers of all pools side by side, with gaps between them.

    `pools` maps names to (layers, entry shape, dtype). Layer l of every pool comes before layer l+1 of any. Gaps are
    2 to 6 bytes, as much as the alignment of the next pool asks for.
    """

    def __init__(self, num_slots: int, pools: dict[str, tuple[int, tuple[int, ...], str]], device: str) -> None:
        import torch

        end, offsets = 2, {}
        for name, (_, entry, dtype) in pools.items():
            item = np.dtype(dtype).itemsize
            offsets[name] = -(-(end + 2) // item) * item
            end = offsets[name] + item * math.prod(entry)
        self.layer_bytes = -(-(end + 2) // 4) * 4
        self.slot_bytes = self.layer_bytes * max(layers for layers, _, _ in pools.values()) + 4
        self.memory = torch.full((num_slots * self.slot_bytes,), GAP, dtype=torch.uint8, device=device)
        self.views = {}
        for name, (layers, entry, dtype) in pools.items():
            item = np.dtype(dtype).itemsize
            inner = [math.prod(entry[i + 1 :]) for i in range(len(entry))]
            strides = (self.layer_bytes // item, self.slot_bytes // item, *inner)
            self.views[name] = (getattr(torch, dtype), (layers, num_slots, *entry), strides, offsets[name] // item)

    def pool(self, name: str) -> Any:
        """One pool, `[L, C, *entry]`, a view of the memory."""
        return self._pool(self.memory, name)

    def _pool(self, memory: Any, name: str) -> Any:
        dtype, *view = self.views[name]
        return memory.view(dtype).as_strided(*view)

    def holding(self, values: dict[str, np.ndarray]) -> Any:
        """A copy of the memory in which the named pools have other values: what the bytes should become."""
        import torch

        memory = self.memory.clone()
        for name, array in values.items():
            integers = torch.from_numpy(array.view({2: np.int16, 4: np.int32}[array.itemsize]).copy())
            self._pool(memory, name).view(integers.dtype).copy_(integers)
        return memory
