"""Run by hand on a GPU: every kernel under compute-sanitizer, on small arrays with an allocation each.

    python tests/sanitizer.py [--out FILE] [--tools memcheck racecheck …]

Before that, memcheck has to find a commit whose check of slot numbers is taken out, or its silence would say nothing.

Exit code: 0 no errors and no hazards · 1 some, or the planted error was not found · 3 nothing could be run.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

try:
    from jax_impl import ConvCacheSpec
    from tests import adapters
    from tests.cases import INT32_MAX, INT32_MIN, unique_bits, values
except ImportError as missing:
    if __name__ != "__main__":
        raise
    print(f"nothing was run: {missing}; pip install '.[test]'", file=sys.stderr)
    sys.exit(3)

PARTS = 8  # processes beside each other
TOOLS = ("memcheck", "racecheck", "synccheck")
SLOTS, ROWS, NULL, REQUESTS = 17, 11, 6, 11
SUMMARY = re.compile(r"^=+ (?:RACECHECK|ERROR) SUMMARY: (.*)$", re.MULTILINE)
CLEAN = re.compile(r"^0 (errors|hazards)\b")

Call = tuple[str, Callable[[], Any]]


def indices(tokens: int) -> dict[str, np.ndarray]:
    """Eleven requests of up to D = `tokens`: live ones, up to the last column, and of each way to be skipped one."""
    listed = {
        "slots": [4, 16, 0, 9, 2, 7, -1, SLOTS, NULL, 12, 14],
        "rows": [10, 0, 7, 5, 4, 9, 3, 1, 2, ROWS, 6],
        "accepted": [tokens, 1, 2, 3, tokens, 0, 3, tokens, 2, 1, 3],
        "valid": [tokens, 2, 3, 3, tokens, tokens, tokens, 1, tokens, tokens, 2],
        "tracked": [1, 3, -1, NULL, 5, 8, 10, 11, 13, SLOTS, INT32_MAX],
        "resumed": [2, 0, tokens, 1, 3, tokens + 1, 1, INT32_MIN, 2, 1, 2],
    }
    return {name: np.asarray(one, np.int32) for name, one in listed.items()}


def calls(path: adapters.Path) -> Iterator[Call]:
    """Every operation in both axis orders and all storages; narrow, wide and many columns; trees; resumed steps."""
    tree, way = np.asarray([[-1, 0, 0, 1]] * REQUESTS, np.int32), np.asarray([[0, 1, 3, 2]] * REQUESTS, np.int32)
    for order in ("time_major", "channel_major"):
        for storage, width, tokens in (
            ("sliding", 4, 4), ("dense", 4, 4), ("inputs", 4, 4), ("sliding", 2, 17), ("inputs", 7, 16),
        ):  # fmt: skip
            spec = ConvCacheSpec(2, SLOTS, ROWS, 640, width, tokens, "bfloat16", order, storage)  # pyright: ignore[reportArgumentType]
            name = f"{order} {storage} K={width} D={tokens}"
            pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
            x, weight = values((REQUESTS, tokens, 640), spec.dtype, 3), values((640, width), "float32", 4)
            of, read = indices(tokens), (x, pool, windows, weight)
            common = {"state_indices": of["slots"], "null_slot": NULL}
            verify = {**common, "spec": spec, "layer": 1, "window_rows": of["rows"], "num_valid_tokens": of["valid"]}
            linked = storage != "sliding" and tokens == 4
            yield f"verify {name}", functools.partial(path.verify, *read, **verify)
            resumed = verify | {"resume_tokens": of["resumed"]}
            yield f"verify, resumed {name}", functools.partial(path.verify, *read, **resumed)
            if linked:
                links = resumed | {"parents": tree, "resume_path": way}
                yield f"verify, tree {name}", functools.partial(path.verify, *read, **links)
            if storage == "inputs":
                kept = resumed | {"resume_windows": unique_bits(spec.windows_shape, spec.dtype, 5)}
                yield f"verify, kept {name}", functools.partial(path.verify, None, *read[1:], **kept)
            commit = {"spec": spec, "null_slot": NULL, "window_rows": of["rows"], "num_valid_tokens": of["valid"]}
            commit |= {"track_indices": of["tracked"], "track_num_tokens": of["accepted"]}
            commit |= {"accepted_path": way} if linked else {}
            given = (pool, windows, of["slots"], of["accepted"])
            yield f"commit {name}", functools.partial(path.commit, *given, **commit)
        spec = ConvCacheSpec(2, SLOTS, ROWS, 640, 4, 4, "bfloat16", order)
        yield from _prompts(path, spec, order)
        yield from _groups(path, spec, order)


def _prompts(path: adapters.Path, spec: ConvCacheSpec, order: str) -> Iterator[Call]:
    """An update, and prompts of which some start from their slot: short ones, and long ones in chunks."""
    pool, weight = unique_bits(spec.state_shape, spec.dtype, 1), values((640, 4), "float32", 4)
    state = {"state_indices": indices(4)["slots"], "null_slot": NULL, "spec": spec, "layer": 1}
    token = values((REQUESTS, 640), spec.dtype, 3)
    yield f"update {order}", functools.partial(path.update, token, pool, weight, **state)
    for tokens in (7, 512):
        x, lengths = values((REQUESTS, tokens, 640), spec.dtype, 3), np.resize([tokens, 1, 0, tokens - 2, 3], REQUESTS)
        told = state | {"lengths": lengths.astype(np.int32), "has_initial_state": np.arange(REQUESTS) % 2 == 0}
        yield f"prefill {order} T={tokens}", functools.partial(path.prefill, x, pool, weight, **told)


def _groups(path: adapters.Path, spec: ConvCacheSpec, order: str) -> Iterator[Call]:
    """Conv groups of different width with recurrent states, and a list of pools, each in one launch."""
    specs = {
        "q": spec,
        "k": dataclasses.replace(spec, width=3, state_len=2),
        "v": dataclasses.replace(spec, conv_dim=128),
    }
    groups = {
        key: (one, unique_bits(one.state_shape, one.dtype, 1), unique_bits(one.windows_shape, one.dtype, 2))
        for key, one in specs.items()
    }
    of = indices(4)
    state, steps = values((2, SLOTS, 4, 8, 16), "float32", 5), values((2, ROWS, 4, 4, 8, 16), "float32", 6)
    options = {
        "window_rows": of["rows"], "step_rows": of["rows"][::-1].copy(), "num_valid_tokens": of["valid"],
        "track_indices": of["tracked"], "track_num_tokens": of["accepted"], "null_slot": NULL, "step_states": steps,
    }  # fmt: skip
    given = (of["slots"], of["accepted"])
    yield f"rollback {order}", functools.partial(path.after_verify, groups, state, *given, **options)
    one = dataclasses.replace(spec, num_layers=1)
    pools, buffers = (
        [unique_bits(shape[1:], one.dtype, i) for i in range(3)] for shape in (one.state_shape, one.windows_shape)
    )
    yield f"commit of a list {order}", functools.partial(path.commit, pools, buffers, *given, spec=one, null_slot=NULL)


def planted(path: adapters.Path) -> Iterator[Call]:
    """A commit that writes one slot behind the end of the pool."""
    from jax_impl import commit

    setattr(commit, "live_slot", lambda slots, null_slot, *, spec: slots >= 0)  # noqa: B010  # pyright sees its type
    spec = ConvCacheSpec(2, SLOTS, ROWS, 640, 4, 4)
    pool, windows = (values(shape, spec.dtype, 1) for shape in (spec.state_shape, spec.windows_shape))
    slots, accepted = np.asarray([SLOTS, 3], np.int32), np.asarray([2, 1], np.int32)
    yield "commit", functools.partial(path.commit, pool, windows, slots, accepted, spec=spec)


def run_calls(named: Callable[[adapters.Path], Iterator[Call]], part: int) -> None:
    """What runs under the sanitizer: the compiled kernels of every `PARTS`-th call."""
    path = adapters.JaxPath("jax-pallas-gpu", "pallas", on_gpu=True)
    for name, call in itertools.islice(named(path), part, None, PARTS):
        print(name, flush=True)
        call()


def summary(log: str) -> str | None:
    """The first line of a sanitizer's output that sums up, of those with errors if there are any; None without one.

    >>> summary("========= ERROR SUMMARY: 2 errors\\n"), summary("no device")
    ('2 errors', None)
    """
    found = SUMMARY.findall(log)
    return next((one.strip() for one in found if not is_clean(one)), found[0].strip() if found else None)


def is_clean(verdict: str | None) -> bool:
    """Whether a summary is of no error and no hazard.

    >>> is_clean("0 errors"), is_clean("0 hazards displayed (0 errors, 0 warnings)"), is_clean("10 errors")
    (True, True, False)
    """
    return verdict is not None and CLEAN.match(verdict) is not None


def check(tool: str, what: str, part: int) -> tuple[str | None, list[str], str]:
    """Runs a part of the calls under a tool: its summary, the calls that were begun, and all that was printed."""
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--print-limit", "20"]
    command += ["--padding", "65536"] if tool == "memcheck" else []  # arrays lie back to back
    command += [sys.executable, "-m", "tests.sanitizer", "--part", str(part), "--calls", what]
    # Exact sizes: the other allocators hand out pieces of two MiB and more, behind which memcheck sees nothing wrong.
    own = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    begun = [line for line in done.stdout.splitlines() if line and not line.startswith("=")]
    log = done.stdout + done.stderr
    return (summary(log) if done.returncode == 0 or what == "planted" else None), begun, log


def check_all(tool: str) -> tuple[str | None, list[str]]:
    """Runs all calls, in processes beside each other: the first summary that is not clean, or the one of them all."""
    with concurrent.futures.ThreadPoolExecutor(PARTS) as pool:
        parts = list(pool.map(functools.partial(check, tool, "all"), range(PARTS)))
    begun = [name for _, names, _ in parts for name in names]
    for verdict, _, log in parts:
        if not is_clean(verdict):
            print(log[-3000:], file=sys.stderr)
            return verdict, begun
    return parts[0][0], begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help="write the verdict as JSON")
    parser.add_argument("--calls", choices=("all", "planted"), help="make the calls in this process and stop")
    parser.add_argument("--part", type=int, default=0, help=f"with --calls, the first of every {PARTS} to make")
    options = parser.parse_args(arguments)
    if options.calls:
        run_calls({"all": calls, "planted": planted}[options.calls], options.part)
        return 0
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 3
    found, _, log = check("memcheck", "planted", 0)
    print(f"planted error: {found}", flush=True)
    if found is None or is_clean(found):
        print(log[-3000:], file=sys.stderr)
        return 1
    verdicts: dict[str, Any] = {}
    expected = [name for name, _ in calls(adapters.DEFINITION)]
    for tool in options.tools:
        verdict, begun = check_all(tool)
        verdicts[tool] = verdict if sorted(begun) == sorted(expected) else None
        print(f"{tool}: {verdict}, {len(begun)} of {len(expected)} calls", flush=True)
    if options.out:
        from jax_impl.bench import timing

        record = {"environment": timing.environment(), "tool": "tests/sanitizer.py", "planted error": found}
        options.out.write_text(json.dumps({**record, **verdicts, "calls": expected}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_clean, verdicts.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
