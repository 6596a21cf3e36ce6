"""Thousands of random steps against a model of the contracts in NumPy: on the CPU, and a million rows on a GPU.

A step verifies in every layer, commits the accepted counts and a second set, and clears some slots; slots, rows, counts
and valid tokens are drawn anew each time, a third of them out of range or padding. Hundreds of steps are one scanned
program with donated arrays. What x holds is computed from its place, on the device and again on the host, so that
nothing of the size of x has to travel.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_impl import causal_conv1d_verify, commit_conv_state, reset_conv_state
from jax_impl.layout import ConvCacheSpec
from tests.cases import INT32_MAX, INT32_MIN, both_orders
from tests.definition import bits

NULL_SLOT = 0
NAMES = ("slots", "rows", "valid", "accepted", "track_slots", "track_accepted", "cleared")


def pattern(step: Any, shape: tuple[int, ...], channels: Any, xp: Any) -> Any:
    """uint16 `[layer, request, token, channel]`: bits of normal bfloat16 numbers below 2, as many as there are."""
    layers, requests, tokens = shape
    place = xp.asarray(step).astype(xp.uint32).reshape(1, 1, 1, 1) * xp.uint32(0x9E3779B1)
    for axis, size in enumerate((layers, requests, tokens)):
        index = xp.arange(size, dtype=xp.uint32).reshape([-1 if axis == one else 1 for one in range(4)])
        place = place * xp.uint32(0x01000193) + index
    mixed = (place * xp.uint32(0x01000193) + channels.astype(xp.uint32).reshape(1, 1, 1, -1)) * xp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> xp.uint32(15))) * xp.uint32(0xC2B2AE35)
    return ((mixed >> xp.uint32(16)) & xp.uint32(0xBFFF) | xp.uint32(0x0080)).astype(xp.uint16)


def draw(spec: ConvCacheSpec, steps: int, requests: int, seed: int) -> dict[str, np.ndarray]:
    """Index arrays int32 `[steps, requests]`; in one step all slots of both sets differ, and all rows."""
    rng, tokens = np.random.default_rng(seed), spec.num_draft_tokens
    slots = rng.permuted(np.tile(np.arange(spec.num_slots), (steps, 1)), axis=1)
    rows = rng.permuted(np.tile(np.arange(spec.max_requests), (steps, 1)), axis=1)[:, :requests]
    count = functools.partial(rng.integers, size=(steps, requests))
    drawn = {
        "slots": slots[:, :requests],
        "rows": rows,
        "valid": count(1, tokens + 1),
        "accepted": count(-1, tokens + 2),
        "track_slots": slots[:, requests : 2 * requests],
        "track_accepted": count(-1, tokens + 2),
        "cleared": np.where(count(0, 40) == 0, slots[:, -requests:], -1),
    }
    outside = {
        "slots": [-1, NULL_SLOT, spec.num_slots, INT32_MAX, INT32_MIN],
        "track_slots": [-1, NULL_SLOT, spec.num_slots + 7, INT32_MAX, INT32_MIN],
        "rows": [-1, spec.max_requests, INT32_MAX, INT32_MIN],
        "valid": [0, -3, tokens + 1, INT32_MAX, INT32_MIN],
        "accepted": [INT32_MAX, INT32_MIN],
    }
    for name, wrong in outside.items():
        drawn[name] = np.where(count(0, 12) == 0, rng.choice(wrong, (steps, requests)), drawn[name])
    return {name: array.astype(np.int32) for name, array in drawn.items()}


def scanned(spec: ConvCacheSpec, implementations: tuple[Any, ...], keep: bool) -> Any:
    """A jitted run of steps on one cache per implementation, which returns what to compare.

    Its counts: elements in which the caches differ, and elements of y that should be zero and are not. With `keep` it
    also returns the first cache after every step.
    """
    dim = jnp.arange(spec.conv_dim, dtype=jnp.uint32)
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((spec.conv_dim, spec.width)), spec.dtype)
    number = lambda pattern: lax.bitcast_convert_type(pattern, jnp.bfloat16).astype(spec.dtype)  # noqa: E731

    def one(cache: tuple[jax.Array, jax.Array], x: jax.Array, given: dict[str, jax.Array], implementation: Any) -> Any:
        (pool, windows), ys = cache, []
        how: dict[str, Any] = {"spec": spec, "null_slot": NULL_SLOT, "implementation": implementation}
        batch: dict[str, Any] = {"window_rows": given["rows"], "num_valid_tokens": given["valid"]}
        for layer in range(spec.num_layers):
            y, windows = causal_conv1d_verify(
                x[layer], pool, windows, weight, state_indices=given["slots"], layer=layer, **batch, **how
            )
            ys.append(y)
        pool = commit_conv_state(
            pool, windows, given["slots"], given["accepted"], track_indices=given["track_slots"],
            track_num_tokens=given["track_accepted"], **batch, **how,
        )  # fmt: skip
        pool = reset_conv_state(pool, given["cleared"], spec=spec, null_slot=NULL_SLOT)
        return (pool, windows), jnp.stack(ys)

    def step(carry: Any, given: dict[str, jax.Array]) -> Any:
        caches, differences, nonzero = carry
        shape = (spec.num_layers, given["slots"].shape[0], spec.num_draft_tokens)
        x = number(pattern(given["step"], shape, dim, jnp))
        results = [one(cache, x, given, name) for cache, name in zip(caches, implementations, strict=True)]
        first = results[0][0]
        for other, _ in results[1:]:
            differences += sum(jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(first, other, strict=True))
        inside = lambda name, end: (given[name] >= 0) & (given[name] < end)  # noqa: E731
        live = inside("slots", spec.num_slots) & (given["slots"] != NULL_SLOT) & inside("rows", spec.max_requests)
        live &= (given["valid"] >= 1) & (given["valid"] <= spec.num_draft_tokens)
        token = jnp.arange(spec.num_draft_tokens, dtype=jnp.int32)
        computed = (live[:, None] & (token[None, :] < given["valid"][:, None]))[None, :, :, None]
        nonzero += sum(jnp.sum((y != 0) & ~computed, dtype=jnp.int32) for _, y in results)
        return (tuple(cache for cache, _ in results), differences, nonzero), first if keep else None

    def run(caches: Any, given: dict[str, jax.Array]) -> Any:
        (caches, differences, nonzero), kept = lax.scan(step, (caches, jnp.int32(0), jnp.int32(0)), given)
        return caches, differences, nonzero, kept

    return jax.jit(run, donate_argnums=0)


class Model:
    """The contracts on integers, for some of the channels: what pool and buffer hold after each step."""

    def __init__(self, spec: ConvCacheSpec, pool: np.ndarray, windows: np.ndarray, channels: np.ndarray) -> None:
        self.spec, self.channels = spec, channels
        self.pool, self.windows = self.view(pool).copy(), self.view(windows).copy()

    def view(self, array: np.ndarray) -> np.ndarray:
        """Integers, columns before channels, of the model's channels."""
        ordered = array if self.spec.axis_order == "time_major" else array.swapaxes(-1, -2)
        return bits(np.ascontiguousarray(ordered[..., self.channels]))

    def step(self, given: Mapping[str, Any]) -> None:
        spec, length, tokens = self.spec, self.spec.state_columns, self.spec.num_draft_tokens
        slots, rows, valid = given["slots"], given["rows"], given["valid"]
        x = pattern(given["step"], (spec.num_layers, len(slots), tokens), self.channels, np)
        x = bits(x.view("bfloat16").astype(spec.dtype))
        readable = (rows >= 0) & (rows < spec.max_requests) & (valid >= 1) & (valid <= tokens)
        live = readable & self.in_pool(slots)
        columns = np.concatenate([self.pool[:, np.where(live, slots, 0)], x], axis=2)
        for token in range(tokens):
            now = live & (valid > token)
            if spec.storage == "inputs":
                self.windows[:, rows[now], token] = x[:, now, token]
                continue
            if spec.storage == "dense":
                self.windows[:, rows[now], token] = columns[:, now, token + 1 : token + 1 + length]
                continue
            first = 0 if token == 0 else length - 1 + token  # the old columns come with the first token
            for column in range(first, length + token):
                self.windows[:, rows[now], column] = columns[:, now, column + 1]
        taken = []  # every window is read before any is written
        for name, counts in (("slots", given["accepted"]), ("track_slots", given["track_accepted"])):
            for n in range(1, tokens + 1):
                now = readable & self.in_pool(given[name]) & (counts == n) & (counts <= valid)
                if spec.storage == "inputs":  # of the request's own slot, also for the second set
                    now = now & live
                    taken.append((given[name][now], columns[:, now, n : n + length]))
                    continue
                window = slice(n - 1, n - 1 + length) if spec.storage == "sliding" else n - 1
                taken.append((given[name][now], self.windows[:, rows[now], window].copy()))
        for where, window in taken:
            self.pool[:, where] = window
        self.pool[:, given["cleared"][self.in_pool(given["cleared"])]] = 0

    def in_pool(self, slots: np.ndarray) -> np.ndarray:
        return (slots >= 0) & (slots < self.spec.num_slots) & (slots != NULL_SLOT)

    def compare(self, pool: Any, windows: Any, step: int) -> None:
        for got, expected, name in ((pool, self.pool, "pool"), (windows, self.windows, "buffer")):
            wrong = self.view(np.asarray(got)) != expected
            assert not wrong.any(), f"step {step}: {wrong.sum()} elements of the {name} are wrong"


def start(spec: ConvCacheSpec) -> tuple[np.ndarray, np.ndarray]:
    """Pool and buffer of markers; memory of former owners, so to speak."""
    rng = np.random.default_rng(1)
    numbers = [rng.integers(1, 2**14, shape).astype(np.uint16) for shape in (spec.state_shape, spec.windows_shape)]
    pool, windows = (one.view("bfloat16").astype(spec.dtype) for one in numbers)
    return pool, windows


def soak(
    spec: ConvCacheSpec, implementations: tuple[Any, ...], *, requests: int, steps: int, scans: int, every_step: bool
) -> None:
    """`scans` programs of `steps` steps each; the host's model looks at every step, or behind each scan."""
    pool, windows = start(spec)
    channels = np.arange(0, spec.conv_dim, 1 if every_step else 97)
    model, run = Model(spec, pool, windows, channels), scanned(spec, implementations, every_step)
    caches = tuple((jnp.array(pool), jnp.array(windows)) for _ in implementations)
    live = 0
    for scan in range(scans):
        given = draw(spec, steps, requests, scan)
        given["step"] = np.arange(scan * steps, (scan + 1) * steps, dtype=np.uint32)
        caches, differences, nonzero, kept = run(caches, given)
        for number in range(steps):
            one = {name: array[number] for name, array in given.items()}
            model.step(one)
            live += int((model.in_pool(one["slots"]) & (one["accepted"] > 0)).sum())
            if every_step:
                model.compare(kept[0][number], kept[1][number], scan * steps + number)
        assert (int(differences), int(nonzero)) == (0, 0), f"scan {scan}: elements that differ, y that is not zero"
        pool, windows = caches[0]
        model.compare(pool, windows, scan * steps + steps - 1)
    assert live > scans * steps * requests // 3  # the draws are not all padding


@both_orders
@pytest.mark.parametrize("storage", ["sliding", "dense", "inputs"])
def test_thousands_of_steps(axis_order: Any, storage: Any) -> None:
    """2,500 steps in each form of the cache, every element looked at after every step."""
    spec = ConvCacheSpec(2, 23, 9, 12, 4, 3, "float32", axis_order, storage)
    soak(spec, ("xla",), requests=5, steps=500, scans=5, every_step=True)


def test_a_few_steps_of_the_kernels() -> None:
    """The run that is meant for a GPU, interpreted: kernels and plain form have the same bits."""
    spec = ConvCacheSpec(1, 9, 4, 128, 3, 2, "bfloat16")
    soak(spec, ("pallas_interpret", "xla"), requests=3, steps=3, scans=1, every_step=False)


@pytest.mark.gpu
@both_orders
def test_a_million_rows(axis_order: Any) -> None:
    """4,000 steps of 256 requests: kernels against plain form in every element, the host in every 97th channel."""
    spec = ConvCacheSpec(3, 800, 300, 1152, 4, 4, "bfloat16", axis_order)
    soak(spec, ("pallas", "xla"), requests=256, steps=400, scans=10, every_step=False)


def test_the_model_sees_one_wrong_column() -> None:
    """A commit one column too far, in one of many steps, is noticed; so this file can fail."""
    spec = ConvCacheSpec(1, 9, 4, 8, 4, 3, "float32")
    pool, windows = start(spec)
    model = Model(spec, pool, windows, np.arange(8))
    given = draw(dataclasses.replace(spec), 1, 3, 0)
    one = {name: array[0] for name, array in given.items()} | {"step": np.uint32(0)}
    one |= {
        "slots": np.asarray([1, 2, 3], np.int32),
        "accepted": np.asarray([3, 1, 2], np.int32),
        "rows": np.asarray([0, 1, 2], np.int32),
    }
    one |= {"valid": np.asarray([3, 3, 3], np.int32)}
    model.step(one)
    shifted = model.pool.copy()
    shifted[:, 2] = model.windows[:, 1, 1:4]
    with pytest.raises(AssertionError, match="24 elements of the pool are wrong"):
        model.compare(shifted.view(np.float32), model.windows.view(np.float32), 0)
