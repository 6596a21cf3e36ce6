"""What a convolution cache costs in bytes, and what the sliding buffer and the buffer of inputs save.

Per request and layer the dense buffer holds D windows of S columns, the sliding one D + S - 1 columns, the one of
inputs D columns. The ratios

    saving = D * S / (D + S - 1)            with S = K - 1: D * (K - 1) / (D + K - 2)
    saving = S                              of inputs, at any D

depend on the number of draft tokens D and the width K only: not on the model, the slots or the requests. The first is
1, no saving at all, when D = 1 or S = 1 (that is K = 2).

Everything here is arithmetic on `ConvCacheSpec`; this module imports no array framework. Names end in `_bytes` where
the unit is bytes; GiB is 2^30 bytes.
"""

import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from jax_impl.layout import STORAGES, ConvCacheSpec, Problems, Storage, shown
from jax_impl.presets import get_preset

GIB_BYTES = 2**30

# model, ranks, rows (requests in flight + 1), draft tokens: the measurements published with the sliding buffer
PUBLISHED_SETTINGS: tuple[tuple[str, int, int, int], ...] = (
    ("Qwen3.5-0.8B", 1, 17, 4),
    ("Qwen3.5-35B-A3B", 2, 33, 4),
)


def saving(width: int, num_draft_tokens: int, state_len: int | None = None, storage: Storage = "sliding") -> Fraction:
    """How many times smaller a buffer is than the dense one: D * S / (D + S - 1), of inputs S; exactly.

    Args:
      width: kernel width K, at least 2.
      num_draft_tokens: tokens D verified per step, at least 1.
      state_len: columns S per slot, K-1 (the default) or K.
      storage: of the buffer, "sliding" by default.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> saving(4, 4), saving(4, 8), saving(4, 1), saving(2, 8)
      (Fraction(2, 1), Fraction(12, 5), Fraction(1, 1), Fraction(1, 1))
      >>> saving(4, 4, storage="inputs")
      Fraction(3, 1)
    """
    spec = ConvCacheSpec(1, 1, 1, 1, width, num_draft_tokens, storage=storage, state_len=state_len)
    return Fraction(dataclasses.replace(spec, storage="dense").row_bytes, spec.row_bytes)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Bytes of one geometry, whatever storage its spec names; see `capacity`.

    Args:
      slot_bytes: one slot of the pool, all layers together.
      sliding_row_bytes: one request's row of the sliding buffer, all layers together.
      dense_row_bytes: the same with one whole window per draft token.
      inputs_row_bytes: the same with the draft tokens' inputs alone.
      max_requests: rows of the buffer.
      num_slots: slots of the pool.
    """

    slot_bytes: int
    sliding_row_bytes: int
    dense_row_bytes: int
    inputs_row_bytes: int
    max_requests: int
    num_slots: int

    @property
    def saving(self) -> Fraction:
        """Dense bytes over sliding bytes."""
        return Fraction(self.dense_row_bytes, self.sliding_row_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.slot_bytes

    @property
    def sliding_windows_bytes(self) -> int:
        """Bytes of the whole sliding buffer."""
        return self.max_requests * self.sliding_row_bytes

    @property
    def dense_windows_bytes(self) -> int:
        """Bytes of the whole dense buffer."""
        return self.max_requests * self.dense_row_bytes

    @property
    def inputs_windows_bytes(self) -> int:
        """Bytes of the whole buffer of inputs."""
        return self.max_requests * self.inputs_row_bytes

    @property
    def sliding_rows_per_gib(self) -> int:
        """Whole rows of the sliding buffer in one GiB."""
        return GIB_BYTES // self.sliding_row_bytes

    @property
    def dense_rows_per_gib(self) -> int:
        """Whole rows of the dense buffer in one GiB."""
        return GIB_BYTES // self.dense_row_bytes

    @property
    def inputs_rows_per_gib(self) -> int:
        """Whole rows of the buffer of inputs in one GiB."""
        return GIB_BYTES // self.inputs_row_bytes


def capacity(spec: ConvCacheSpec) -> Capacity:
    """The bytes of a geometry in every storage.

    Example:
      >>> capacity(get_preset("Qwen3.5-0.8B").spec(num_slots=20, max_requests=17, num_draft_tokens=4)).dense_row_bytes
      2654208
    """
    _check_spec(spec)
    return Capacity(
        slot_bytes=spec.num_layers * spec.slot_bytes,
        sliding_row_bytes=dataclasses.replace(spec, storage="sliding").row_bytes,
        dense_row_bytes=dataclasses.replace(spec, storage="dense").row_bytes,
        inputs_row_bytes=dataclasses.replace(spec, storage="inputs").row_bytes,
        max_requests=spec.max_requests,
        num_slots=spec.num_slots,
    )


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, ConvCacheSpec):
        raise ValueError(f"`spec`: expected a ConvCacheSpec, got {type(spec).__name__}.")


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row of the published memory table, per rank."""

    model: str
    tp: int
    max_requests: int
    num_draft_tokens: int
    dense_windows_bytes: int
    sliding_windows_bytes: int

    @property
    def saving(self) -> Fraction:
        """Dense bytes over sliding bytes."""
        return Fraction(self.dense_windows_bytes, self.sliding_windows_bytes)


def published_table() -> tuple[PublishedRow, ...]:
    """The published memory table, computed from the presets.

    Source:
      The table of SGLang's pull request #28302, which prints these bytes over 2^30, rounded, as "GB".

    Example:
      >>> [(round(r.dense_windows_bytes / GIB_BYTES, 4), round(r.sliding_windows_bytes / GIB_BYTES, 4))
      ...  for r in published_table()]
      [(0.042, 0.021), (0.0906, 0.0453)]
    """
    rows = []
    for model, tp, max_requests, num_draft_tokens in PUBLISHED_SETTINGS:
        spec = get_preset(model).spec(
            num_slots=1, max_requests=max_requests, num_draft_tokens=num_draft_tokens, tp=tp, dtype="bfloat16"
        )
        size = capacity(spec)
        rows.append(
            PublishedRow(
                model, tp, max_requests, num_draft_tokens, size.dense_windows_bytes, size.sliding_windows_bytes
            )
        )
    return tuple(rows)


@dataclasses.dataclass(frozen=True)
class SavingRow:
    """Columns per channel for one width and number of draft tokens."""

    width: int
    num_draft_tokens: int
    dense_columns: int
    sliding_columns: int
    inputs_columns: int

    @property
    def saving(self) -> Fraction:
        """Dense columns over sliding columns."""
        return Fraction(self.dense_columns, self.sliding_columns)


def saving_table(
    widths: Iterable[int] = (4, 3, 7, 2), draft_tokens: Iterable[int] = (1, 2, 4, 8, 16), state_len: int | None = None
) -> tuple[SavingRow, ...]:
    """Columns and saving for every pair, the pairs without any saving (D = 1, or K = 2) among them.

    Example:
      >>> [str(row.saving) for row in saving_table(widths=(4,))]
      ['1', '3/2', '2', '12/5', '8/3']
      >>> [str(row.saving) for row in saving_table(widths=(2,))]
      ['1', '1', '1', '1', '1']
    """
    rows = []
    problems = Problems()
    all_widths, all_tokens = _sizes(problems, "widths", widths), _sizes(problems, "draft_tokens", draft_tokens)
    problems.raise_if_any()
    for width in all_widths:
        for num_draft_tokens in all_tokens:
            spec = ConvCacheSpec(1, 1, 1, 1, width, num_draft_tokens, state_len=state_len)
            dense = num_draft_tokens * spec.state_columns
            rows.append(SavingRow(width, num_draft_tokens, dense, spec.num_columns, num_draft_tokens))
    return tuple(rows)


def _sizes(problems: Problems, name: str, sizes: Any) -> tuple[int, ...]:
    """The integers of an argument, which the geometry checks one by one."""
    try:
        return tuple(sizes)
    except (TypeError, RuntimeError):
        problems.add(name, "integers, one or more", shown(sizes))
        return ()


@dataclasses.dataclass(frozen=True)
class Design:
    """One way to keep what a rollback needs, in columns of every channel.

    Attributes:
      name: short. source: who keeps it so.
      slot, row: formulas of the columns of one sequence in the pool, and of one request in a buffer of its own.
    """

    name: str
    slot: str
    row: str
    source: str


# Designs whose columns are all in the pool take them for every sequence that is kept, in flight or not.
DESIGNS: tuple[Design, ...] = (
    Design("dense", "K-1", "D(K-1)", 'SGLang before pull request #28302; storage "dense" here'),
    Design("sliding", "K-1", "D+K-2", 'SGLang since pull request #28302, for chains; storage "sliding" here'),
    Design("inputs", "K-1", "D", 'storage "inputs" here'),
    Design(
        "wide slots", "K+D-2", "0", "vLLM, `MambaStateShapeCalculator`: the kernel reads at num_accepted_tokens - 1"
    ),
    Design("slot groups", "D(K-1)", "0", "tpu-inference, pull request #3189: a slot per token of a step"),
)


@dataclasses.dataclass(frozen=True)
class DesignRow:
    """Columns of one design at one number of draft tokens; times `column_bytes` of a geometry, bytes."""

    design: str
    width: int
    state_len: int
    num_draft_tokens: int
    slot_columns: int
    row_columns: int


def design_table(
    width: int = 4, draft_tokens: Iterable[int] = (1, 2, 4, 8, 16), state_len: int | None = None
) -> tuple[DesignRow, ...]:
    """Columns of every design in `DESIGNS` for every number of draft tokens.

    Args:
      width: kernel width K. draft_tokens: tokens D verified per step.
      state_len: columns S of a state; K, where a stack keeps K of them, stands for K-1 in every formula.

    Example:
      >>> [(row.design, row.slot_columns, row.row_columns) for row in design_table(draft_tokens=(4,))]
      [('dense', 3, 12), ('sliding', 3, 6), ('inputs', 3, 4), ('wide slots', 6, 0), ('slot groups', 12, 0)]
    """
    rows = []
    problems = Problems()
    all_tokens = _sizes(problems, "draft_tokens", draft_tokens)
    if problems.messages:  # beside it, what is wrong with the geometry at any number of tokens
        try:
            ConvCacheSpec(1, 1, 1, 1, width, 1, state_len=state_len)
        except ValueError as error:
            problems.messages.append(str(error))
    problems.raise_if_any()
    for tokens in all_tokens:
        specs = {one: ConvCacheSpec(1, 1, 1, 1, width, tokens, storage=one, state_len=state_len) for one in STORAGES}
        one = specs["sliding"]
        state = one.state_columns
        columns = {name: (state, spec.row_bytes // spec.item_bytes) for name, spec in specs.items()}
        columns |= {"wide slots": (state + tokens - 1, 0), "slot groups": (tokens * state, 0)}
        rows += [DesignRow(design.name, width, state, tokens, *columns[design.name]) for design in DESIGNS]
    return tuple(rows)


def column_bytes(spec: ConvCacheSpec) -> int:
    """Bytes of one column, all layers together.

    >>> column_bytes(get_preset("Qwen3.5-0.8B").spec(num_slots=1, max_requests=1, num_draft_tokens=4))
    221184
    """
    _check_spec(spec)
    return spec.num_layers * spec.conv_dim * spec.item_bytes


def times(ratio: Fraction) -> str:
    """A ratio as text: exact when it is a whole number, and never "1×" for anything but 1.

    >>> times(Fraction(1)), times(Fraction(2)), times(Fraction(12, 5)), times(Fraction(8, 3))
    ('1×', '2×', '2.4×', '2.67×')
    """
    return f"{round(float(ratio), 2):g}×"


def gib(size_bytes: int) -> str:
    """Bytes over 2^30 with four digits, the form of the published table.

    >>> gib(45121536)
    '0.0420'
    """
    return f"{size_bytes / GIB_BYTES:.4f}"
