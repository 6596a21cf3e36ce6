"""How times are taken, and what is recorded beside them.

Device time is the marginal time of one call in a long run that keeps the device busy (graphs replayed back to back):
the run is timed with n and with 2n calls, and the difference is divided by n. What it costs to start the run cancels,
the gap between two kernels of one graph does not. Every reference is timed the same way in the same run.
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

TARGET_SECONDS = 0.01  # of the shorter run, long enough that starting it does not show


def quantiles(samples_us: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 of microseconds, rounded to a nanosecond."""
    ordered = sorted(samples_us)
    at = lambda share: ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]  # noqa: E731
    return {
        "median_us": round(statistics.median(ordered), 3),
        "p10_us": round(at(0.1), 3),
        "p90_us": round(at(0.9), 3),
    }


def marginal_us(runner: Callable[[int], None], calls: int, repeats: int) -> dict[str, float]:
    """Device time of one call; `runner(rounds)` makes `rounds * calls` of them and waits."""

    def seconds(rounds: int) -> float:
        start = time.perf_counter()
        runner(rounds)
        return time.perf_counter() - start

    seconds(2)
    one = max(min(seconds(1) for _ in range(3)), 1e-6)
    rounds = max(1, round(TARGET_SECONDS / one))
    pairs = [(seconds(rounds), seconds(2 * rounds)) for _ in range(repeats)]
    floor = statistics.median(first for first, _ in pairs)
    return quantiles([(second - floor) * 1e6 / (rounds * calls) for _, second in pairs])


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
        "method": "marginal time of one call in runs of n and 2n replayed calls; rotating slots, rows and inputs",
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "none"
