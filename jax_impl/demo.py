"""`python -m jax_impl demo`: a published model's cache, checked bit for bit, and a tiny model decoded with it.

The first half is a model's cache without the model. Prompts are prefilled; then every step verifies D draft tokens per
request, accepts a random number of them, nothing and everything included, and commits. After the prefill and after
every step the pool is compared, as integers, with

    a definition in NumPy loops, written here, that shares no code with the package, and
    a second pool that decodes the accepted tokens one at a time with `causal_conv1d_update`.

Each batch has one padding row, and slots that no request owns hold random bits which must stay as they are. The layers
run inside one jitted step with a donated cache, as in a serving engine.

The second half decodes with it: four requests of a small random checkpoint, speculatively, whose tokens must be those
of greedy decoding, with chains of drafts and with trees. The memory table closes the run.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_impl.arguments import not_negative, positive, published_model
from jax_impl.capacity import Capacity, PublishedRow, SavingRow, capacity, gib, published_table, saving_table, times
from jax_impl.layout import AXIS_ORDERS, ITEM_BYTES, STORAGES, ConvCacheSpec
from jax_impl.model.cli import SAFETENSORS, print_statistics
from jax_impl.presets import Preset
from jax_impl.tables import RICH, WITHOUT_RICH, print_table, progress, require

Implementation = Literal["xla", "pallas", "pallas_interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas", "pallas_interpret")
NULL_SLOT = 0
SPARE_SLOTS = 2
MAX_PROMPT_TOKENS = 9
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
MAX_RUN_BYTES = 16 * 2**30  # of all arrays of a run together, so that a slip of a digit does not take the machine down


# ---- the command line ------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Registers `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="run a published model's cache and check every step bit for bit",
        description="Allocates a published model's geometry, runs verify and commit steps with random acceptance and "
        "compares the pool bit for bit with a NumPy definition and with one-token decoding after every step. "
        "Then a tiny checkpoint is decoded speculatively and greedily. Exit code 1 on any difference.",
    )
    option = parser.add_argument
    option("--model", type=published_model, default="Qwen3.5-0.8B", metavar="NAME", help="default: %(default)s")
    option("--requests", type=positive, default=16, metavar="N", help="requests in flight; the buffer has one row more")
    option("--draft-tokens", type=positive, default=4, metavar="D", help="tokens verified per step (%(default)s)")
    option("--axis-order", choices=AXIS_ORDERS, default="time_major")
    option("--storage", choices=STORAGES, default="sliding")
    option("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="of pool and buffer (%(default)s)")
    option(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="of verify, commit and decoding; default: chosen for the device",
    )
    option("--steps", type=positive, default=20, metavar="N", help="verify + commit steps (%(default)s)")
    option("--seed", type=not_negative, default=0, help="of all random numbers (%(default)s)")
    option("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    if args.json:
        require(SAFETENSORS)
    else:
        require(RICH | SAFETENSORS, WITHOUT_RICH)
    preset: Preset = args.model
    spec = preset.spec(
        num_slots=1 + args.requests + SPARE_SLOTS,
        max_requests=args.requests + 1,
        num_draft_tokens=args.draft_tokens,
        dtype=args.dtype,
        axis_order=args.axis_order,
        storage=args.storage,
    )
    _refuse_large(spec, args)
    start = time.perf_counter()
    counts: dict[int, int] = dict.fromkeys(range(args.draft_tokens + 1), 0)
    with progress("verify + commit", args.steps, hidden=args.json) as advance:
        mismatch = simulate(
            preset,
            spec,
            steps=args.steps,
            seed=args.seed,
            implementation=args.implementation,
            counts=counts,
            advance=advance,
        )
    seconds = time.perf_counter() - start
    decoded = None
    if mismatch is None:  # after a difference there is nothing to show
        from jax_impl.model import example

        decoded = example.run(args.implementation, args.storage)
    if args.json:
        report = _report(preset, spec, args, counts, seconds, mismatch)
        whole = decoded is not None and decoded.mismatch is None
        print(json.dumps(report | {"ok": whole, "decoding": decoded and decoded.report()}))
    else:
        _print_report(preset, spec, args, counts, seconds, mismatch, decoded)
    return 0 if decoded is not None and decoded.mismatch is None else 1


def run_bytes(spec: ConvCacheSpec) -> int:
    """Bytes of the arrays that a run holds at once, device and host together.

    Pools: two on the device, and in NumPy the random bits, the same by column, the definition's, its copy from before a
    step and both results, which channel_major swaps once more. One buffer. Float32 arrays `[L, R, tokens, conv_dim]`:
    x on both sides, two results, the definition's y, scale and tolerance, and the difference.
    """
    pools = 8 if spec.axis_order == "time_major" else 10
    tokens = max(spec.num_draft_tokens, MAX_PROMPT_TOKENS)
    per_token = 8 * ITEM_BYTES["float32"] * spec.num_layers * spec.max_requests * spec.conv_dim
    return pools * spec.state_bytes + spec.windows_bytes + per_token * tokens


def _refuse_large(spec: ConvCacheSpec, args: argparse.Namespace) -> None:
    """Ends the command, before anything is allocated, when the run takes more than `MAX_RUN_BYTES`."""
    num_bytes = run_bytes(spec)
    if num_bytes <= MAX_RUN_BYTES:
        return
    raised = {"--requests": args.requests, "--draft-tokens": args.draft_tokens}
    default = {name: args.parser.get_default(name.strip("-").replace("-", "_")) for name in raised}
    names = [name for name, value in raised.items() if value > default[name]] or ["--model"]
    args.parser.error(
        f"argument{'s' * (len(names) > 1)} {', '.join(names)}: expected a run of at most {MAX_RUN_BYTES:,} bytes "
        f"({MAX_RUN_BYTES / 2**30:.4g} GiB), got {num_bytes:,} bytes: {args.model.name} with {args.requests} requests "
        f"and {args.draft_tokens} draft tokens, all copies that are compared included. `plan` takes any size."
    )


# ---- the run ---------------------------------------------------------------------------------------------------------


class Mismatch(NamedTuple):
    """The first element that differs."""

    against: str
    what: str
    step: int
    layer: int
    slot: int
    num_accepted_tokens: int
    position: tuple[int, int]
    got: str
    expected: str

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "the prefill"
        axis = "column" if self.what == "conv_state" else "token"
        return (
            f"`{self.what}` differs from {self.against} after {when}: layer {self.layer}, slot {self.slot}, "
            f"n = {self.num_accepted_tokens}, {axis} {self.position[0]}, channel {self.position[1]}: "
            f"expected {self.expected}, got {self.got}."
        )


class Batch(NamedTuple):
    """Inputs `[L, B, T, conv_dim]` of one call and, per request, int32 `[B]` and whether it is not padding."""

    x: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    valid: np.ndarray
    accepted: np.ndarray
    live: np.ndarray

    @property
    def commits(self) -> np.ndarray:
        """Tokens that each request moves its slot on by; 0 for padding."""
        return np.where(self.live, self.accepted, 0)


def make_prompts(rng: np.random.Generator, spec: ConvCacheSpec, live_slots: np.ndarray) -> Batch:
    """Random prompts of random lengths, the first one shorter than the state."""
    requests = len(live_slots)
    lengths = rng.integers(1, MAX_PROMPT_TOKENS + 1, requests).astype(np.int32)
    lengths[0] = 1
    x = rng.standard_normal((spec.num_layers, requests, MAX_PROMPT_TOKENS, spec.conv_dim), np.float32)
    return Batch(x, live_slots.astype(np.int32), np.arange(requests), lengths, lengths, np.full(requests, True))


def make_batch(rng: np.random.Generator, spec: ConvCacheSpec, live_slots: np.ndarray, step: int) -> Batch:
    """Random tokens in random rows, every accepted count in turn, and one padding row somewhere in the batch."""
    requests, tokens = len(live_slots), spec.num_draft_tokens
    accepted = rng.permutation((np.arange(requests) + step) % (tokens + 1))
    # what engines put in padding rows: the null slot, -1, one past the pool, rubbish, or a live slot with n = 0
    padding = (NULL_SLOT, -1, spec.num_slots, INT32_MAX, INT32_MIN, int(live_slots[0]))[step % 6]
    slots = np.append(live_slots, padding)
    accepted = np.append(accepted, 0 if padding == live_slots[0] else tokens)
    valid = rng.integers(np.maximum(accepted, 1), tokens + 1)
    order = rng.permutation(requests + 1)
    x = rng.standard_normal((spec.num_layers, requests + 1, tokens, spec.conv_dim), np.float32)
    rows = rng.permutation(spec.max_requests)
    live = np.arange(requests + 1) < requests
    slots, rows, valid, accepted = (np.asarray(a[order], np.int32) for a in (slots, rows, valid, accepted))
    return Batch(x, slots, rows, valid, accepted, live[order])


def simulate(
    preset: Preset,
    spec: ConvCacheSpec,
    *,
    steps: int,
    seed: int = 0,
    implementation: Implementation | None = None,
    counts: dict[int, int] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Mismatch | None:
    """Prefill and `steps` verify + commit steps; stops at the first difference and returns it.

    Args:
      preset: the model, for its activation and bias.
      spec: geometry; slot 0 is the null slot, and there are max_requests - 1 requests.
      steps: verify + commit steps.
      seed: of all random numbers.
      implementation: of all operations.
      counts: filled with how often each count was accepted.
      advance: called once per finished step.
    """
    import jax.numpy as jnp  # only when the demo runs: `plan` and `--help` work without an array framework

    from jax_impl import allocate_conv_cache

    rng = np.random.default_rng(seed)
    dtype, bits = jnp.dtype(spec.dtype), np.dtype(f"uint{8 * spec.item_bytes}")
    weight = rng.uniform(-0.5, 0.5, (spec.num_layers, spec.conv_dim, spec.width)).astype(np.float32)
    bias = rng.standard_normal((spec.num_layers, spec.conv_dim), np.float32) if preset.bias else None
    prefill, verify_and_commit, decode = compile_steps(preset, spec, weight, bias, implementation)

    requests = spec.max_requests - 1
    live_slots = 1 + rng.permutation(spec.num_slots - 1)[:requests]
    cache = allocate_conv_cache(spec)
    assert (cache.conv_state.nbytes, cache.conv_windows.nbytes) == (spec.state_bytes, spec.windows_bytes)
    conv_windows = cache.conv_windows
    old_bits = rng.integers(0, 2 ** (8 * spec.item_bytes), spec.state_shape, bits)
    conv_state = jnp.array(old_bits.view(dtype), copy=True)  # a copy: donation must not reach the array here
    by_column = _by_column(old_bits, spec).copy()
    definition = Definition(by_column.copy(), dtype, weight, bias, preset.activation)
    by_column[:, live_slots] = 0  # decoding a prompt token by token starts from an empty slot
    one_token_state = jnp.array(_by_column(by_column, spec).view(dtype), copy=True)

    def check(step: int, batch: Batch, results: tuple[Any, ...], fresh: bool = False) -> Mismatch | None:
        y, state, one_token_y, one_token_state = (np.asarray(array) for array in results)
        expected, scale = definition.advance(batch, fresh=fresh)
        # float32 sums of K products and a bias in two orders, then an exponential that is good to a few last places
        tolerance = 2.0**-23 * (spec.width + 8) * scale
        got = Result(y, _by_column(state.view(bits), spec))
        one_token = Result(one_token_y, _by_column(one_token_state.view(bits), spec))
        return compare(step, batch.slots, batch.commits, got, expected, tolerance, one_token)

    batch = make_prompts(rng, spec, live_slots)
    y, conv_state = prefill(conv_state, batch.x, batch.slots, batch.valid)
    one_token_y, one_token_state = decode(one_token_state, batch.x, batch.slots, batch.commits)
    mismatch = check(0, batch, (y, conv_state, one_token_y, one_token_state), fresh=True)

    for step in range(1, steps + 1):
        if mismatch is not None:
            break
        batch = make_batch(rng, spec, live_slots, step)
        y, conv_state, conv_windows = verify_and_commit(conv_state, conv_windows, *batch[:5])
        one_token_y, one_token_state = decode(one_token_state, batch.x, batch.slots, batch.commits)
        mismatch = check(step, batch, (y, conv_state, one_token_y, one_token_state))
        if counts is not None:
            for n in batch.accepted[batch.live]:
                counts[int(n)] += 1
        advance()
    return mismatch


def compile_steps(
    preset: Preset,
    spec: ConvCacheSpec,
    weight: np.ndarray,
    bias: np.ndarray | None,
    implementation: Implementation | None,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The three jitted programs of the run: prefill, verify + commit, and decoding one token at a time.

    Each scans over the layers, and each has its pool donated.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    from jax_impl import causal_conv1d_prefill, causal_conv1d_update, causal_conv1d_verify, commit_conv_state

    skipping: dict[str, Any] = {"spec": spec, "null_slot": NULL_SLOT, "implementation": implementation}
    common: dict[str, Any] = skipping | {"activation": preset.activation}
    parameters = (jnp.arange(spec.num_layers), jnp.asarray(weight), None if bias is None else jnp.asarray(bias))

    def prefill(conv_state, x, slots, lengths):
        def layer_step(conv_state, per_layer):
            x, (layer, weight, bias) = per_layer
            y, conv_state = causal_conv1d_prefill(
                x, conv_state, weight, bias, state_indices=slots, lengths=lengths, layer=layer, **common
            )
            return conv_state, y

        conv_state, y = lax.scan(layer_step, conv_state, (x, parameters))
        return y, conv_state

    def verify_and_commit(conv_state, conv_windows, x, slots, rows, valid, accepted):
        def layer_step(conv_windows, per_layer):
            x, (layer, weight, bias) = per_layer
            y, conv_windows = causal_conv1d_verify(
                x,
                conv_state,
                conv_windows,
                weight,
                bias,
                state_indices=slots,
                layer=layer,
                window_rows=rows,
                num_valid_tokens=valid,
                **common,
            )
            return conv_windows, y

        conv_windows, y = lax.scan(layer_step, conv_windows, (x, parameters))
        conv_state = commit_conv_state(
            conv_state,
            conv_windows,
            slots,
            accepted,
            window_rows=rows,
            num_valid_tokens=valid,
            **skipping,
        )
        return y, conv_state, conv_windows

    def decode(conv_state, x, slots, counts):
        def layer_step(conv_state, per_layer):
            x, (layer, weight, bias) = per_layer

            def token_step(conv_state, token):
                index, x = token
                alive = jnp.where(index < counts, slots, -1)
                y, conv_state = causal_conv1d_update(
                    x, conv_state, weight, bias, state_indices=alive, layer=layer, **common
                )
                return conv_state, y

            tokens = (jnp.arange(x.shape[1]), jnp.swapaxes(x, 0, 1))
            conv_state, y = lax.scan(token_step, conv_state, tokens)
            return conv_state, jnp.swapaxes(y, 0, 1)

        conv_state, y = lax.scan(layer_step, conv_state, (x, parameters))
        return y, conv_state

    return (
        jax.jit(prefill, donate_argnums=0),
        jax.jit(verify_and_commit, donate_argnums=(0, 1)),
        jax.jit(decode, donate_argnums=0),
    )


# ---- the definition --------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What one way of running a step returned: `y` `[L, B, T, conv_dim]` and the pool's bits `[L, C, S, conv_dim]`."""

    y: np.ndarray
    state_bits: np.ndarray


@dataclasses.dataclass
class Definition:
    """What the pool must hold, written as loops over layers, requests and tokens.

    Attributes:
      state_bits: `[L, C, S, conv_dim]`, the pool as integers; a slot is a list of its last S inputs.
      dtype: dtype that the integers stand for.
      weight, bias, activation: parameters of the convolution.
      number: the type of products and sums, and of `y`.
    """

    state_bits: np.ndarray
    dtype: np.dtype
    weight: np.ndarray
    bias: np.ndarray | None
    activation: str | None
    number: type[np.floating[Any]] = np.float32

    def advance(self, batch: Batch, fresh: bool = False) -> tuple[Result, np.ndarray]:
        """Moves each live slot on by its accepted tokens, from nothing when `fresh`.

        Returns `y` of the valid tokens, zero elsewhere, with the pool's bits; and the size of the terms that were
        summed for each `y`, which its rounding error is relative to.
        """
        new_bits = batch.x.astype(self.dtype).view(self.state_bits.dtype)
        y, scale = np.zeros_like(batch.x, self.number), np.zeros_like(batch.x, self.number)
        before = self.state_bits.copy()  # every request reads the pool as it was before the call
        num_slots, state_len = before.shape[1:3]
        for layer in range(len(y)):
            for request, slot in enumerate(batch.slots):
                if slot < 0 or slot == NULL_SLOT or slot >= num_slots:
                    continue
                history = np.zeros_like(before[layer, slot]) if fresh else before[layer, slot]
                columns = np.concatenate([history, new_bits[layer, request]])
                n, v = batch.accepted[request], batch.valid[request]
                if n > 0:
                    self.state_bits[layer, slot] = columns[n : n + state_len]
                y[layer, request, :v], scale[layer, request, :v] = self._convolve(layer, columns, v)
        return Result(y, self.state_bits), scale

    def _convolve(self, layer: int, columns: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        values = columns.view(self.dtype).astype(self.number)
        taps = self.weight[layer].T
        total = np.zeros((tokens, values.shape[1]), self.number)
        if self.bias is not None:
            total += self.bias[layer]
        scale = np.abs(total)
        first = self.state_bits.shape[2] - (len(taps) - 1)  # the oldest column that meets a tap
        for tap in range(len(taps)):
            product = values[first + tap : first + tap + tokens] * taps[tap]
            total += product
            scale += np.abs(product)
        if self.activation == "silu":
            with np.errstate(over="ignore"):
                total = total / (1 + np.exp(-total))
        return total, scale


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(
    step: int,
    slots: np.ndarray,
    counts: np.ndarray,
    got: Result,
    expected: Result,
    tolerance: np.ndarray,
    one_token: Result,
) -> Mismatch | None:
    """The first difference of a step, or None.

    Pools are compared as integers. So is `y` of the committed tokens with one-token decoding; `y` of all tokens is
    compared with the definition, whose exponential and order of rounding are its own, within `tolerance`.
    """
    count_of = {int(slot): int(count) for slot, count in zip(slots, counts, strict=True) if count > 0}
    bits = np.dtype("uint32")
    committed = np.arange(got.y.shape[2]) < counts[:, None]

    def first(against: str, what: str, wrong: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> Mismatch:
        layer, row, *position = (int(i) for i in np.argwhere(wrong)[0])
        slot = row if what == "conv_state" else int(slots[row])
        n = count_of.get(slot, 0) if what == "conv_state" else int(counts[row])
        shown = [_shown(array[layer, row, *position]) for array in (values, wanted)]
        return Mismatch(against, what, step, layer, slot, n, (position[0], position[1]), *shown)

    for against, other in (("the NumPy definition", expected), ("one-token decoding", one_token)):
        if not np.array_equal(got.state_bits, other.state_bits):
            wrong = got.state_bits != other.state_bits
            return first(against, "conv_state", wrong, got.state_bits, other.state_bits)
    wrong = (got.y.view(bits) != one_token.y.view(bits)) & committed[None, :, :, None]
    if wrong.any():
        return first("one-token decoding", "y", wrong, got.y, one_token.y)
    wrong = ~(np.abs(got.y - expected.y) <= tolerance)
    if wrong.any():
        return first("the NumPy definition", "y", wrong, got.y, expected.y)
    return None


def _shown(value: Any) -> str:
    return f"0x{int(value):0{2 * value.dtype.itemsize}x}" if value.dtype.kind == "u" else repr(float(value))


def _by_column(state: np.ndarray, spec: ConvCacheSpec) -> np.ndarray:
    """The pool in (column, channel) order from the spec's order, and back: the same swap both ways."""
    return state if spec.axis_order == "time_major" else np.ascontiguousarray(np.swapaxes(state, -1, -2))


# ---- what is printed -------------------------------------------------------------------------------------------------


def _saving_text(ratio: Fraction) -> str:
    return f"{times(ratio)}, no saving" if ratio == 1 else times(ratio)


def _buffer_text(spec: ConvCacheSpec) -> str:
    what = "the dense buffer" if spec.storage == "dense" else "a buffer of inputs"
    return f"{what}, {gib(spec.windows_bytes)} GiB"


def _report(
    preset: Preset,
    spec: ConvCacheSpec,
    args: argparse.Namespace,
    counts: dict[int, int],
    seconds: float,
    mismatch: Mismatch | None,
) -> dict[str, Any]:
    """Everything that was run and found, for --json."""
    size = capacity(spec)
    published = [dataclasses.asdict(row) | {"saving": float(row.saving)} for row in published_table()]
    return {
        "ok": mismatch is None,
        "mismatch": None if mismatch is None else mismatch._asdict() | {"message": str(mismatch)},
        "model": preset.name,
        "spec": dataclasses.asdict(spec),
        "steps": args.steps,
        "seed": args.seed,
        "implementation": args.implementation,
        "accepted_counts": counts,
        "seconds": round(seconds, 3),
        "memory": {
            "published": published,
            "model": dataclasses.asdict(size)
            | {
                "dense_windows_bytes": size.dense_windows_bytes,
                "sliding_windows_bytes": size.sliding_windows_bytes,
                "inputs_windows_bytes": size.inputs_windows_bytes,
                "state_bytes": size.state_bytes,
                "saving": float(size.saving),
            },
            "saving": [dataclasses.asdict(row) | {"saving": float(row.saving)} for row in _saving_rows(spec)],
        },
    }


def _saving_rows(spec: ConvCacheSpec) -> tuple[SavingRow, ...]:
    """The saving by draft tokens for this width, and for K = 2 where there is none."""
    draft_tokens = sorted({1, 2, 4, 8, 16, spec.num_draft_tokens})
    return saving_table(widths=dict.fromkeys((spec.width, 2)), draft_tokens=draft_tokens)


def _print_report(
    preset: Preset,
    spec: ConvCacheSpec,
    args: argparse.Namespace,
    counts: dict[int, int],
    seconds: float,
    mismatch: Mismatch | None,
    decoded: Any,
) -> None:
    if mismatch is not None:
        print(f"FAILED: {mismatch}", file=sys.stderr)
    else:
        accepted = ", ".join(f"{n}: {count}×" for n, count in counts.items())
        print(
            f"{preset.name}: conv_state {spec.state_shape}, conv_windows {spec.windows_shape}, {spec.dtype}, "
            f"{spec.axis_order}, {spec.storage}\n"
            f"The prefill and {args.steps} verify + commit steps left the same bits as the NumPy definition and as "
            f"one-token decoding, in {seconds:.1f} s.\n"
            f"Accepted tokens: {accepted}; one padding row per step.\n"
        )
    if decoded is not None and decoded.mismatch is not None:
        print(f"FAILED: {decoded.mismatch}", file=sys.stderr)
    elif decoded is not None:
        print(decoded)
        print_statistics(decoded.statistics, stderr=False)
    size = capacity(spec)
    table: list[tuple[str, int, int, int, Capacity | PublishedRow]] = [
        (r.model, r.tp, r.max_requests, r.num_draft_tokens, r) for r in published_table()
    ]
    table.append((f"{preset.name}, this run", 1, spec.max_requests, spec.num_draft_tokens, size))
    rows = [
        (
            name,
            str(tp),
            str(rows),
            str(tokens),
            gib(r.dense_windows_bytes),
            gib(r.sliding_windows_bytes),
            _saving_text(r.saving),
        )
        for name, tp, rows, tokens, r in table
    ]
    print_table(
        "Verify buffer per rank",
        ("model", "TP", "rows", "draft tokens", "dense GiB", "sliding GiB", "saving"),
        rows,
        caption="The first two rows are the published table; GiB is 2^30 bytes; rows are requests + 1."
        + ("" if spec.storage == "sliding" else f" This run allocated {_buffer_text(spec)}."),
    )
    print_table(
        "Saving: D(K-1) columns become D+K-2; it depends on D and K only",
        ("", "draft tokens", "dense columns", "sliding columns", "saving"),
        [
            (
                f"width {r.width}",
                str(r.num_draft_tokens),
                str(r.dense_columns),
                str(r.sliding_columns),
                _saving_text(r.saving),
            )
            for r in _saving_rows(spec)
        ],
    )
