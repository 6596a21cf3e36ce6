"""Bytes of published models: what the pool and the verify buffer take, and how many requests fit."""

import itertools
from collections.abc import Sequence

from jax_impl.capacity import GIB_BYTES, Capacity, capacity, column_bytes, gib, saving, times
from jax_impl.layout import ConvCacheSpec
from jax_impl.presets import PRESETS, get_preset
from jax_impl.walkthrough import show
from jax_impl.walkthrough.show import Picture, Table


def size_of(model: str, *, tp: int = 1, num_draft_tokens: int = 4, requests: int = 16, slots: int = 1) -> Capacity:
    """The bytes of a model's cache on one rank in bfloat16; the buffer has one row more than there are requests.

    >>> size_of("Qwen3.5-0.8B").sliding_windows_bytes
    22560768
    """
    spec = get_preset(model).spec(
        num_slots=slots, max_requests=requests + 1, num_draft_tokens=num_draft_tokens, tp=tp, dtype="bfloat16"
    )
    return capacity(spec)


def formula_table(spec: ConvCacheSpec) -> Table:
    """The bytes of a verify buffer, factor by factor, in every storage."""
    size = capacity(spec)
    rows = [
        (
            name,
            f"{spec.num_layers} layers",
            f"{spec.max_requests} rows",
            f"{total // (column_bytes(spec) * spec.max_requests)} columns",
            f"{spec.conv_dim} channels",
            f"{spec.item_bytes} bytes",
            f"{total:,}",
            gib(total),
        )
        for name, total in (
            ("dense: D(K-1) columns", size.dense_windows_bytes),
            ("sliding: D+K-2 columns", size.sliding_windows_bytes),
            ("inputs: D columns", size.inputs_windows_bytes),
        )
    ]
    return Table(("storage", "L", "R", "", "conv_dim", "element", "product, bytes", "GiB"), rows)


def models_table(*, tp: int = 1, num_draft_tokens: int = 4, requests: int = 16) -> Table:
    """Every published model on one of `tp` ranks; those whose channels do not divide are named in the caption."""
    rows, left_out = [], []
    for preset in PRESETS:
        try:
            channels = preset.conv_dim_per_rank(tp)
        except ValueError:
            left_out.append(preset.name)
            continue
        size = size_of(preset.name, tp=tp, num_draft_tokens=num_draft_tokens, requests=requests)
        rows.append(
            (
                preset.name,
                preset.kind,
                preset.num_conv_layers,
                channels,
                preset.width,
                f"{size.slot_bytes:,}",
                gib(size.dense_windows_bytes),
                gib(size.sliding_windows_bytes),
                gib(size.inputs_windows_bytes),
                times(size.saving),
            )
        )
    caption = f"per rank at TP {tp}, D = {num_draft_tokens}, {requests} requests + 1 row, bfloat16"
    caption += f"; not divisible: {', '.join(left_out)}" if left_out else ""
    columns = (
        "model",
        "kind",
        "layers",
        "channels",
        "K",
        "bytes per slot",
        "dense GiB",
        "sliding GiB",
        "inputs GiB",
        "saving",
    )
    return Table(columns, rows, caption)


def tensor_parallel_table(model: str, ranks: Sequence[int], draft_tokens: Sequence[int], requests: int = 32) -> Table:
    """GiB per rank, dense → sliding, for every number of ranks and of draft tokens."""
    rows = []
    for tp in ranks:
        sizes = [size_of(model, tp=tp, num_draft_tokens=tokens, requests=requests) for tokens in draft_tokens]
        cells = [f"{gib(size.dense_windows_bytes)} → {gib(size.sliding_windows_bytes)}" for size in sizes]
        rows.append((f"TP {tp}", *cells))
    columns = ("", *(f"D = {tokens}" for tokens in draft_tokens))
    return Table(columns, rows, f"{model}, {requests} requests + 1 row, GiB per rank")


def requests_that_fit(model: str, budget_gib: float, *, tp: int = 1, num_draft_tokens: int = 4) -> tuple[int, int]:
    """Requests whose rows fit in a budget per rank, dense and sliding; one row is kept for padding.

    >>> requests_that_fit("Qwen3.5-0.8B", 0.0421)
    (16, 33)
    """
    size = size_of(model, tp=tp, num_draft_tokens=num_draft_tokens)
    dense, sliding = (
        max(0, int(budget_gib * GIB_BYTES // row) - 1) for row in (size.dense_row_bytes, size.sliding_row_bytes)
    )
    return dense, sliding


def draft_tokens_above(width: int, ratio: float) -> int | None:
    """The smallest D at which the shared buffer saves more than `ratio`; None when no D does, for it approaches K-1.

    >>> draft_tokens_above(4, 2), draft_tokens_above(4, 3)
    (5, None)
    """
    if ratio >= width - 1:
        return None
    return next(tokens for tokens in itertools.count(1) if saving(width, tokens) > ratio)


def gib_picture(models: Sequence[str], *, tp: int = 1, num_draft_tokens: int = 4, most: int = 512) -> Picture:
    """GiB of the verify buffer against requests in flight, dense (dashed) and sliding (solid)."""
    figure, (axes,) = show.panels(7, 3.6)
    requests = range(0, most + 1, most // 16)
    for index, model in enumerate(models):
        sizes = [size_of(model, tp=tp, num_draft_tokens=num_draft_tokens, requests=count) for count in requests]
        for form, style in (("dense", "--"), ("sliding", "-")):
            values = [getattr(size, f"{form}_windows_bytes") / GIB_BYTES for size in sizes]
            axes.plot(requests, values, style, color=f"C{index}", label=f"{model}, {form}")
    axes.set_xlim(0, most)
    axes.set_ylim(bottom=0)
    title = f"verify buffer per rank at TP {tp}, D = {num_draft_tokens}, bfloat16"
    show.finish(axes, title, "requests in flight", "GiB (2^30 bytes)")
    return show.picture(figure, f"{title}: straight lines; each sliding one is below its dense one.")
