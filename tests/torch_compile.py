"""Compiles torch_ref's kernels for an H200 without one, and prints how their memory accesses follow on each other.

Run as a program, in a process of its own: Triton decides between compiler and interpreter when it is imported, and has
one driver, which is replaced here by one that only says what to compile for.
"""

import contextlib
import itertools
import json
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import torch_ref
from torch_ref import kernels

REQUESTS, TOKENS = 64, 4


class H200:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def accesses(ptx: str) -> list[tuple[str, int]]:
    """Runs of loads, barriers and stores in the order of the code, with the widest access of each run in bytes."""
    found = []
    for line in ptx.splitlines():
        if "bar.sync" in line:
            found.append(("barrier", 0))
        elif match := re.search(r"(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)", line):
            kind = {"ld": "load", "st": "store"}[match[1]]
            found.append((kind, int(match[2] or 1) * int(match[3]) // 8))
    return [(kind, max(size for _, size in run)) for kind, run in itertools.groupby(found, key=lambda one: one[0])]


def main() -> None:
    compiled: list[Any] = []
    triton.runtime.driver.set_active(H200())  # type: ignore[arg-type]
    triton.JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *a, **k: compiled.append(self.warmup(*a, grid=grid, **k))
    )
    kernels._launching = lambda tensor: contextlib.nullcontext()
    index, report = torch.ones(REQUESTS, dtype=torch.int32), {}
    table = index[:, None].expand(REQUESTS, TOKENS).contiguous()
    for storage, order in itertools.product(("sliding", "dense", "inputs"), ("time_major", "channel_major")):
        spec = torch_ref.ConvCacheSpec(2, 99, REQUESTS, 8192, 4, TOKENS, "bfloat16", order, storage)  # type: ignore[arg-type]
        cache = torch_ref.allocate_conv_cache(spec, "cpu")
        x, weight = torch.zeros(REQUESTS, TOKENS, 8192).bfloat16(), torch.zeros(8192, 4).bfloat16()
        common: dict[str, Any] = {"spec": spec, "slots": index, "rows": None, "valid": None, "null_slot": None}
        resume: dict[str, Any] = {"resume": index, "resume_path": table, "previous": None}
        steps = {"chain": (x, {}), "tree": (x, {"parents": table}), "resume": (x, {"parents": table, **resume})}
        if storage == "inputs":
            steps["kept"] = (None, resume | {"previous": torch.zeros_like(cache.conv_windows)})
        for name, (given, more) in steps.items():
            kernels.verify(
                given, cache.conv_state, cache.conv_windows, weight, None, layer=None, silu=True, **common, **more
            )
            report[f"verify {name} {storage} {order}"] = accesses(compiled.pop().asm["ptx"])
        kernels.commit(
            cache.conv_state, cache.conv_windows, accepted=index, path=table, track_slots=index, track_accepted=index,
            **common,
        )  # fmt: skip
        report[f"commit {storage} {order}"] = accesses(compiled.pop().asm["ptx"])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
