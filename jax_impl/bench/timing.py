"""How times are taken, and what is recorded beside them.

Device time is the marginal time of one call in a long run of calls that the device replays by itself: the run is
timed with n and with 2n calls, and the difference is divided by n. What it costs to start the run cancels, the gap
between two kernels of one graph does not. Every reference is timed the same way in the same run.
"""

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def quantiles(samples_us: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 of microseconds, rounded to a nanosecond."""
    ordered = sorted(samples_us)
    at = lambda share: ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]  # noqa: E731
    return {
        "median_us": round(statistics.median(ordered), 3),
        "p10_us": round(at(0.1), 3),
        "p90_us": round(at(0.9), 3),
    }


def wall_us(run: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds of each of `repeats` runs; `run` returns after its work is done on the device."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def marginal_us(short: Callable[[], Any], long: Callable[[], Any], calls: int, repeats: int) -> dict[str, float]:
    """Device time of one call: `short` makes `calls` of them, `long` makes twice as many."""
    for run in (short, long, short, long):
        run()
    pairs = [(wall_us(short, 1)[0], wall_us(long, 1)[0]) for _ in range(repeats)]
    floor = statistics.median(first for first, _ in pairs)
    return quantiles([(second - floor) / calls for _, second in pairs])


def kernel_us(run: Callable[..., Any], arguments: Sequence[Any], iterations: int, name: str) -> dict[str, Any] | None:
    """Durations of the kernels whose name contains `name`, from the driver's activity records; None without them.

    `name` empty counts all kernels of one run together.
    """
    from jax.experimental.mosaic.gpu import profiler

    measure: Any = profiler.measure
    _, records = measure(run, aggregate=False, iterations=iterations)(*arguments)
    if records is None:
        return None
    per_run = records if iterations > 1 else [records]
    if name:
        samples = [milliseconds * 1e3 for one in per_run for kernel, milliseconds in one if name in kernel]
    else:
        samples = [sum(milliseconds for _, milliseconds in one) * 1e3 for one in per_run]
    return {**quantiles(samples), "kernels": len(samples) // iterations} if samples else None


def environment() -> dict[str, Any]:
    """Device, driver, versions, flags and date of a measurement."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    for package in ("jaxlib", "numpy", "torch", "triton"):
        try:
            versions[package] = str(__import__(package).__version__)
        except ImportError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "none")),
        "driver": _driver_version(),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "method": "marginal time of one call in a replayed run of n and 2n calls, rotating slots, rows and inputs",
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "none"
