"""Shapes, columns and bytes of the convolution state and of its verify buffer.

All shape arithmetic of the package is in this module, and it imports no array framework, so capacity planning and
tests can use it anywhere.

A short causal convolution of width K remembers its last K-1 inputs. Verifying D draft tokens at once makes D candidate
states, one per accepted count, and neighbouring candidates overlap in all but one column. The sliding buffer keeps the
shared run of columns once:

    committed state   h1 h2 h3                  K = 4, D = 4
    shared columns       h2 h3 x0 x1 x2 x3      D + K - 2 = 6 columns instead of D * (K - 1) = 12
    after x0            [h2 h3 x0]              columns 0 … 2
    after x3                     [x1 x2 x3]     columns 3 … 5

With `state_len` S columns of state per slot (S is K-1, or K in stacks that keep one column more), the buffer has
D + S - 1 columns and the state after n accepted tokens is the slice `columns[n - 1 : n - 1 + S]`.

The old columns are in the pool as well, so a buffer of the D new inputs alone says as much, storage "inputs":

    after x1      last S columns of [h1 h2 h3 | x0 x1]      a chain
    after x3      last S columns of [h1 h2 h3 | x0 x3]      a tree in which x3 follows x0
"""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Literal

AxisOrder = Literal["time_major", "channel_major"]
Storage = Literal["sliding", "dense", "inputs"]

AXIS_ORDERS: tuple[AxisOrder, ...] = ("time_major", "channel_major")
STORAGES: tuple[Storage, ...] = ("sliding", "dense", "inputs")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Problems:
    """Collects everything wrong with one call, so that the caller reads all of it at once.

    >>> problems = Problems()
    >>> problems.expect("x", "request, token, channel", (2, 4, 8), (2, 4, 9))
    >>> problems.raise_if_any()
    Traceback (most recent call last):
    ValueError: `x`: expected request, token, channel = (2, 4, 8), got (2, 4, 9).
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, name: str, expected: str, got: object, hint: str = "") -> None:
        """Records that argument `name` should have been `expected` and was `got`; `hint` says why or what to do."""
        self.messages.append(f"`{name}`: expected {expected}, got {got}." + (f" {hint}" if hint else ""))

    def expect(self, name: str, axes: str, expected: tuple[int, ...], got: tuple[int, ...], hint: str = "") -> None:
        """Records a shape mismatch; `axes` names the axes of `expected` in order."""
        if tuple(expected) != tuple(got):
            self.add(name, f"{axes} = {tuple(expected)}", tuple(got), hint)

    def raise_if_any(self) -> None:
        """Raises one `ValueError` with every recorded message, one a line."""
        if self.messages:
            raise ValueError("\n".join(self.messages))


def dtype_name(dtype: Any) -> str:
    """The plain name of a dtype given as a string or as any framework's dtype object.

    >>> dtype_name("bfloat16")
    'bfloat16'
    """
    if isinstance(dtype, str):
        return dtype
    if _is_array(dtype):
        return shown(dtype)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def _is_array(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "__array__") and hasattr(value, "shape")


def _is_traced(value: object) -> bool:
    return any(of.__name__ == "Tracer" for of in type(value).__mro__)


def shown(value: Any) -> str:
    """A wrong value as a message shows it: one line, cut when it is long; of an array dtype, shape and if it is traced.

    >>> shown(1.5), shown("x" * 100)[-7:]
    ('1.5', 'xxxx...')
    """
    if _is_array(value):
        return f"{'traced ' * _is_traced(value)}{dtype_name(value.dtype)} array of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_integer(value: Any) -> int | None:
    """`value` as a Python integer, or None where it is none; a bool and a traced value are none.

    >>> as_integer(3), as_integer(True), as_integer(3.0)
    (3, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # a RuntimeError of an array that was deleted
        return None


@dataclasses.dataclass(frozen=True)
class ConvCacheSpec:
    """Geometry of one group of convolution states: frozen and hashable, so it can be a static argument of `jit`.

    Args:
      num_layers: layers L that have this convolution.
      num_slots: slots C of the pool; a slot holds the committed state of one sequence.
      max_requests: rows R of the verify buffer; a row holds one request in flight. Usually far fewer than slots.
      conv_dim: channels of the convolution on this device.
      width: kernel width K, at least 2.
      num_draft_tokens: tokens D verified per step, the already sampled one included; at least 1.
      dtype: "bfloat16", "float16" or "float32" (a dtype object is accepted and stored by name).
      axis_order: "time_major", (column, channel): a window is one contiguous run; or "channel_major",
        (channel, column).
      storage: "sliding", the shared run of columns; "dense", one whole window per draft token; or "inputs", the D new
        inputs alone, which a commit reads together with the slot.
      state_len: columns of state per slot: K-1 (the default) or K. Stored as a number, so `dataclasses.replace` with
        another `width` has to give it again.

    Raises:
      ValueError: one message that names every field that is out of range.

    Example:
      >>> spec = ConvCacheSpec(18, 512, 17, 6144, 4, 4)
      >>> spec.state_shape, spec.windows_shape
      ((18, 512, 3, 6144), (18, 17, 6, 6144))
      >>> spec.windows_bytes, spec.dense_windows_bytes
      (22560768, 45121536)
    """

    num_layers: int
    num_slots: int
    max_requests: int
    conv_dim: int
    width: int
    num_draft_tokens: int
    dtype: str = "bfloat16"
    axis_order: AxisOrder = "time_major"
    storage: Storage = "sliding"
    state_len: int | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        set_field = object.__setattr__  # the dataclass is frozen; fields are normalised once, here
        set_field(self, "dtype", dtype_name(self.dtype))
        minimum = {
            "num_layers": 1,
            "num_slots": 1,
            "max_requests": 0,
            "conv_dim": 1,
            "width": 2,
            "num_draft_tokens": 1,
        }
        for name, low in minimum.items():
            value = self._as_int(name, problems)
            if value is None:
                continue
            set_field(self, name, value)
            if not low <= value < 2**31:
                problems.add(name, f"an integer from {low} to 2^31-1", value)
        if self.dtype not in ITEM_BYTES:
            problems.add("dtype", f"one of {', '.join(ITEM_BYTES)}", repr(self.dtype))
        if not isinstance(self.axis_order, str) or self.axis_order not in AXIS_ORDERS:
            problems.add("axis_order", f"one of {', '.join(AXIS_ORDERS)}", shown(self.axis_order))
        if not isinstance(self.storage, str) or self.storage not in STORAGES:
            problems.add("storage", f"one of {', '.join(STORAGES)}", shown(self.storage))
        if self.state_len is None:
            set_field(self, "state_len", self.width - 1 if isinstance(self.width, int) else None)
        else:
            value = self._as_int("state_len", problems)
            if value is not None and isinstance(self.width, int):
                set_field(self, "state_len", value)
                if value not in (self.width - 1, self.width):
                    problems.add("state_len", f"width - 1 = {self.width - 1} or width = {self.width}", value)
        problems.raise_if_any()

    def _as_int(self, name: str, problems: Problems) -> int | None:
        value = as_integer(getattr(self, name))
        if value is None:
            problems.add(name, "an integer", shown(getattr(self, name)))
        return value

    @property
    def state_columns(self) -> int:
        """Columns S of one slot and of one window: `state_len` once resolved."""
        assert self.state_len is not None
        return self.state_len

    @property
    def num_columns(self) -> int:
        """Columns of one row of inputs, D, or of a sliding one: D + S - 1, D + K - 2 with the default state length.

        A dense row has one window per token instead; this is what a sliding row would have.
        """
        return self.num_draft_tokens + self.first_token_column

    def _entry(self, columns: int) -> tuple[int, int]:
        return (columns, self.conv_dim) if self.axis_order == "time_major" else (self.conv_dim, columns)

    @property
    def entry_axes(self) -> str:
        """Axis words of the last two axes."""
        return "column, channel" if self.axis_order == "time_major" else "channel, column"

    @property
    def column_axis(self) -> int:
        """Axis of the columns counted from the end: -2 in time_major, -1 in channel_major."""
        return -2 if self.axis_order == "time_major" else -1

    @property
    def window_shape(self) -> tuple[int, int]:
        """One window, which is also one slot of one layer: (S, conv_dim) or (conv_dim, S)."""
        return self._entry(self.state_columns)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The pool: (L, C, S, conv_dim) in time_major, (L, C, conv_dim, S) in channel_major."""
        return (self.num_layers, self.num_slots, *self.window_shape)

    @property
    def windows_shape(self) -> tuple[int, ...]:
        """The verify buffer: sliding (L, R, D+S-1, conv_dim) or (L, R, conv_dim, D+S-1); dense (L, R, D, *window).

        With storage "inputs" (L, R, D, conv_dim) or (L, R, conv_dim, D).
        """
        if self.storage != "dense":
            return (self.num_layers, self.max_requests, *self._entry(self.num_columns))
        return (self.num_layers, self.max_requests, self.num_draft_tokens, *self.window_shape)

    @property
    def state_axes(self) -> str:
        """Axis words of `state_shape`."""
        return f"layer, slot, {self.entry_axes}"

    @property
    def windows_axes(self) -> str:
        """Axis words of `windows_shape`."""
        token = "token, " if self.storage == "dense" else ""
        return f"layer, row, {token}{self.entry_axes}"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_layers * self.num_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return self.state_columns * self.conv_dim * self.item_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's buffer row, all layers together."""
        columns = self.num_draft_tokens * self.state_columns if self.storage == "dense" else self.num_columns
        return self.num_layers * columns * self.conv_dim * self.item_bytes

    @property
    def windows_bytes(self) -> int:
        """Bytes of the whole verify buffer in this spec's storage."""
        return self.max_requests * self.row_bytes

    @property
    def dense_windows_bytes(self) -> int:
        """Bytes the verify buffer would take with one whole window per draft token."""
        return dataclasses.replace(self, storage="dense").windows_bytes

    def window_columns(self, num_accepted_tokens: int) -> slice:
        """Columns of a sliding row that are the state after `num_accepted_tokens` (1 … D) tokens.

        Raises:
          ValueError: the count is out of range, or the storage is not "sliding".

        >>> ConvCacheSpec(1, 1, 1, 8, 4, 4).window_columns(2)
        slice(1, 4, None)
        """
        if self.storage != "sliding":
            raise ValueError(
                f'`storage`: expected "sliding", got "{self.storage}". Only there a window is a slice of the row.'
            )
        if not 1 <= num_accepted_tokens <= self.num_draft_tokens:
            raise ValueError(
                f"`num_accepted_tokens`: expected 1 to num_draft_tokens = {self.num_draft_tokens}, "
                f"got {num_accepted_tokens}."
            )
        return slice(num_accepted_tokens - 1, num_accepted_tokens - 1 + self.state_columns)

    @property
    def first_token_column(self) -> int:
        """Column that holds x_0: 0 in a row of inputs; in a sliding one behind the state without its oldest column."""
        return 0 if self.storage == "inputs" else self.state_columns - 1


def use_storage(topk: int, parents: Any = None) -> Storage:
    """The storage that a draft topology allows: "sliding" for linear chains, "dense" for everything else.

    Two drafts that share a parent need different values in one column, so a tree cannot live in the shared run.
    When the links are known they decide, whatever the label says. Storage "inputs" holds chains and trees alike, so it
    needs no gate.

    Args:
      topk: drafts proposed per position, at least 1. Without `parents`, 1 means a chain.
      parents: for every draft the index of its parent, -1 for the committed state: `[D]` or one such list per
        request, `[B, D]`. A parent comes before its child.

    Returns:
      "sliding" or "dense".

    Raises:
      ValueError: `topk` is not a positive integer, a link does not point backwards, or the links are traced.

    Source:
      The gate of SGLang's pull request #28302, decided by links instead of by the label.

    Example:
      >>> use_storage(topk=1), use_storage(topk=4)
      ('sliding', 'dense')
      >>> use_storage(topk=1, parents=[-1, 0, 0, 1])
      'dense'
    """
    problems, number = Problems(), as_integer(topk)
    if number is None or number < 1:
        problems.add("topk", "an integer of at least 1", shown(topk))
    if parents is None:
        problems.raise_if_any()
        return "sliding" if number == 1 else "dense"
    links = _as_list(parents)
    nested = isinstance(links, list) and any(isinstance(row, list) for row in links)
    rows: Any = links if nested else [links]
    if not all(isinstance(row, list) and not any(isinstance(parent, list) for parent in row) for row in rows):
        hint = "The storage is static: it depends on values." if _is_traced(parents) else ""
        problems.add("parents", "[token] or [request, token]", shown(parents), hint)
        problems.raise_if_any()
    storage: Storage = "sliding"
    for request, row in enumerate(rows):
        for token, parent in enumerate(row):
            if isinstance(parent, bool) or not isinstance(parent, int) or not -1 <= parent < token:
                expected = f"an index from -1 to {token - 1} for token {token} of request {request}"
                hint = "A parent comes before its child; -1 is the committed state."
                problems.add("parents", expected, shown(parent), hint)
                problems.raise_if_any()
            if parent != token - 1:
                storage = "dense"
    problems.raise_if_any()
    return storage


def _as_list(links: Any) -> Any:
    """Nested sequences and arrays as nested lists, everything else as it is."""
    if hasattr(links, "tolist"):
        try:
            return links.tolist()
        except (RuntimeError, TypeError):  # an array that was deleted, or one that is traced
            return links
    if isinstance(links, Iterable) and not isinstance(links, str):
        return [_as_list(link) for link in links]
    return links
