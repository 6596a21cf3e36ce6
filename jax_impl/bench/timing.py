"""How times are taken, and what is recorded beside them.

Three times, none of which stands for another:

    device   the marginal time of one call in a long run that keeps the device busy: the run is timed with n and with 2n
             calls, and the difference is divided by n. What it costs to start the run cancels, the gap between two
             kernels does not. Every reference is timed the same way in the same run.
    kernel   the durations of the kernels of one call, as CUPTI reports them: without the gaps between them
    wall     what a caller waits: one call of a long queue that is waited for at its end, and one call alone (latency)
"""

import datetime
import importlib
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax

TARGET_SECONDS = 0.01  # of the shorter run, long enough that starting it does not show
QUEUE_SECONDS = 0.05  # of a queue whose end is waited for: that wait is then one part in some thousand
KERNEL_ROUNDS = 4  # that CUPTI records; at least 2, for which it returns one list each

Run = Callable[[int], None]  # makes that many rounds and waits for the last


def quantiles(samples_us: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 of microseconds, rounded to a nanosecond."""
    ordered = sorted(samples_us)
    at = lambda share: ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]  # noqa: E731
    return {
        "median_us": round(statistics.median(ordered), 3),
        "p10_us": round(at(0.1), 3),
        "p90_us": round(at(0.9), 3),
    }


def _seconds(run: Run, rounds: int) -> float:
    start = time.perf_counter()
    run(rounds)
    return time.perf_counter() - start


def _rounds_for(run: Run, seconds: float) -> int:
    """Rounds that take about so long, found after a warm-up."""
    run(2)
    return max(1, round(seconds / max(min(_seconds(run, 1) for _ in range(3)), 1e-6)))


def marginal_us(run: Run, calls: int, repeats: int) -> dict[str, float]:
    """Device time of one call; one round is `calls` of them."""
    rounds = _rounds_for(run, TARGET_SECONDS)
    pairs = [(_seconds(run, rounds), _seconds(run, 2 * rounds)) for _ in range(repeats)]
    floor = statistics.median(first for first, _ in pairs)
    return quantiles([(second - floor) * 1e6 / (rounds * calls) for _, second in pairs])


def wall_us(run: Run, calls: int, repeats: int) -> dict[str, dict[str, float]]:
    """Wall time of one call out of a queue of many, and of a round that is waited for at once."""
    rounds = _rounds_for(run, QUEUE_SECONDS)
    queued = [_seconds(run, rounds) * 1e6 / (rounds * calls) for _ in range(repeats)]
    alone = [_seconds(run, 1) * 1e6 / calls for _ in range(5 * repeats)]
    return {"wall": quantiles(queued), "latency": quantiles(alone)}


class _Round(jax.stages.Wrapped):
    """One round, in the form of a jitted function: the profiler would trace a plain one, and a round holds its state.

    It returns nothing because it waits itself, and because a donated array cannot be waited for afterwards.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> tuple[()]:
        self.run(1)
        return ()


def kernel_us(run: Run, calls: int) -> dict[str, Any]:
    """`kernel`: time in kernels of one call, and by kernel name; None with `kernel_reason` where CUPTI has no answer.

    CUPTI serves one subscriber a process and may be missing or refuse; driver copies are no kernels.
    """
    try:
        jitted = _Round(run)  # pyright: ignore[reportAbstractUsage]  # it is called, never traced or lowered
        profiler: Any = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
        _, rounds = profiler.measure(jitted, aggregate=False, iterations=KERNEL_ROUNDS)()
    except Exception as error:  # whatever it is, the other times stand
        return {"kernel": None, "kernel_reason": reason(error)}
    if not rounds:
        return {"kernel": None, "kernel_reason": "CUPTI recorded no kernel"}
    names: dict[str, list[float]] = defaultdict(list)
    for name, milliseconds in (kernel for one in rounds for kernel in one):
        names[name].append(milliseconds * 1e3)
    made = calls * len(rounds)
    by_name = {
        name: {"per_call": round(len(times) / made, 3), "us": round(sum(times) / made, 3)}
        for name, times in names.items()
    }
    total = quantiles([sum(milliseconds for _, milliseconds in one) * 1e3 / calls for one in rounds])
    return {"kernel": {**total, "names": by_name}}


def reason(error: BaseException) -> str:
    """An error as one line of a results file."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def environment() -> dict[str, Any]:
    """Device, driver, versions, flags and date of a measurement."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    for package in ("jaxlib", "numpy", "torch", "triton"):
        try:
            versions[package] = str(__import__(package).__version__)
        except ImportError:
            continue
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.strftime("%Y-%m-%d"),
        "time": now.strftime("%H:%M:%S"),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "none")),
        "driver": _driver_version(),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "method": "median_us: marginal time of one call in runs of n and 2n replayed calls; kernel: durations that "
        "CUPTI reports; wall: one call of a queue; latency: one call alone. Rotating slots, rows and inputs",
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "none"
