"""Geometry of the convolution pool and of the verify buffer, in plain Python.

This is the oracle's own arithmetic. It was written from the definition, not from the JAX package, so that an agreement
of the two means something; it imports neither torch nor any other framework.

One slot keeps the last S inputs of a causal convolution of width K (S = K-1, or K where a stack keeps one more).
A verify step appends D inputs. Number the inputs of one request so that its oldest state column is 0:

    inputs      0 … S-1           S … S+D-1
                committed state   draft tokens x_0 … x_{D-1}

The state after n tokens is inputs n … n+S-1. Over n = 1 … D these windows cover inputs 1 … S+D-1, so a *sliding* row
stores just those D+S-1 columns (buffer column c is input c+1), and a *dense* row stores all D windows apart. An
*inputs* row stores inputs S … S+D-1 only, the D new ones: the older ones are in the pool for as long as nothing
overwrites them, and a window is put together from both.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

AxisOrder = Literal["time_major", "channel_major"]
Storage = Literal["sliding", "dense", "inputs"]

BYTES_PER_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
STORAGES: tuple[Storage, ...] = ("sliding", "dense", "inputs")
LARGEST = 2**31 - 1


def mismatch(name: str, expected: str, got: object, hint: str = "") -> str:
    """One line of an error: which argument, what it should have been, what it was, and why or what to do.

    >>> mismatch("x", "request, channel = (2, 8)", (2, 9), "Did a shard lose a channel?")
    '`x`: expected request, channel = (2, 8), got (2, 9). Did a shard lose a channel?'
    """
    line = f"`{name}`: expected {expected}, got {got}."
    return f"{line} {hint}" if hint else line


def shown(value: Any) -> str:
    """What was given in the place of something else, on one short line: a tensor or array as its dtype and shape.

    >>> shown("half"), shown([2] * 99)[-6:]
    ("'half'", ', 2...')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        return f"a {value.dtype} array of shape {tuple(value.shape)}"
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else line[:77] + "..."


def raise_mismatches(wrong: Sequence[str]) -> None:
    """Raises one `ValueError` with every line of `wrong`; does nothing when there is none."""
    if wrong:
        raise ValueError("\n".join(wrong))


def as_integer(value: Any) -> int | None:
    """`value` as a Python integer, or None when it is no integer; a bool is none.

    >>> as_integer(3), as_integer(True), as_integer(3.0)
    (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _name_of(dtype: Any) -> Any:
    if isinstance(dtype, str):
        return dtype
    # torch prints torch.bfloat16, a NumPy dtype object has .name, a NumPy scalar type has .__name__
    return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class ConvCacheSpec:
    """Sizes and memory order of one group of equally shaped convolution layers.

    Args:
      num_layers: layers L.
      num_slots: slots C of the pool, each with the committed state of one sequence.
      max_requests: rows R of the verify buffer, each for one request in flight; may be 0.
      conv_dim: channels.
      width: kernel width K, 2 or more.
      num_draft_tokens: tokens D verified in one step, 1 or more; the already sampled token counts.
      dtype: "bfloat16", "float16" or "float32"; a dtype object is stored by its name.
      axis_order: "time_major" for (column, channel), "channel_major" for (channel, column).
      storage: "sliding" for the shared run of columns, "dense" for one whole window per token, "inputs" for the new
        inputs alone.
      state_len: columns S of a slot: K-1 (default) or K.

    Raises:
      ValueError: names every field that is out of range.

    Example:
      >>> spec = ConvCacheSpec(2, 9, 3, conv_dim=5, width=4, num_draft_tokens=4)
      >>> spec.state_shape, spec.windows_shape
      ((2, 9, 3, 5), (2, 3, 6, 5))
      >>> spec.dense_windows_bytes / spec.windows_bytes
      2.0
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
        wrong: list[str] = []
        sizes = (("num_layers", 1), ("num_slots", 1), ("max_requests", 0), ("conv_dim", 1), ("width", 2))
        for name, low in (*sizes, ("num_draft_tokens", 1)):
            size = as_integer(getattr(self, name))
            if size is None:
                wrong.append(mismatch(name, "an integer", shown(getattr(self, name))))
            elif not low <= size <= LARGEST:
                wrong.append(mismatch(name, f"an integer from {low} to 2^31-1", size))
            else:
                self._set(name, size)
        self._set("dtype", _name_of(self.dtype) if not hasattr(self.dtype, "device") else shown(self.dtype))
        choices = (
            ("dtype", tuple(BYTES_PER_ITEM)),
            ("axis_order", ("time_major", "channel_major")),
            ("storage", STORAGES),
        )
        for name, allowed in choices:
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in allowed:
                wrong.append(mismatch(name, f"one of {', '.join(allowed)}", shown(getattr(self, name))))
        if not any(line.startswith("`width`") for line in wrong):
            self._resolve_state_len(wrong)
        raise_mismatches(wrong)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else; fields are normalised once, at birth

    def _resolve_state_len(self, wrong: list[str]) -> None:
        if self.state_len is None:
            self._set("state_len", self.width - 1)
            return
        columns = as_integer(self.state_len)
        if columns is None:
            wrong.append(mismatch("state_len", "an integer", shown(self.state_len)))
        elif columns not in (self.width - 1, self.width):
            wrong.append(mismatch("state_len", f"width - 1 = {self.width - 1} or width = {self.width}", columns))
        else:
            self._set("state_len", columns)

    @property
    def state_columns(self) -> int:
        """Columns S of one slot, which is also the length of one window."""
        assert self.state_len is not None
        return self.state_len

    @property
    def num_columns(self) -> int:
        """Columns of one sliding row, D+S-1; of an inputs row, D."""
        return self.first_token_column + self.num_draft_tokens

    @property
    def first_token_column(self) -> int:
        """Column of a row that holds x_0: of a sliding row S-1, since it starts with input 1; of an inputs row 0."""
        return 0 if self.storage == "inputs" else self.state_columns - 1

    @property
    def is_time_major(self) -> bool:
        """Whether the channels of one column lie side by side in memory."""
        return self.axis_order == "time_major"

    @property
    def column_axis(self) -> int:
        """Axis of the columns, from the end."""
        return -2 if self.is_time_major else -1

    def _ordered(self, columns: int) -> tuple[int, int]:
        return (columns, self.conv_dim) if self.is_time_major else (self.conv_dim, columns)

    @property
    def entry_axes(self) -> str:
        """Words for the last two axes."""
        return "column, channel" if self.is_time_major else "channel, column"

    @property
    def window_shape(self) -> tuple[int, int]:
        """One window: (S, conv_dim) or (conv_dim, S)."""
        return self._ordered(self.state_columns)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The pool: (L, C, *window)."""
        return (self.num_layers, self.num_slots, *self.window_shape)

    @property
    def state_axes(self) -> str:
        """Words for the axes of `state_shape`."""
        return f"layer, slot, {self.entry_axes}"

    @property
    def windows_shape(self) -> tuple[int, ...]:
        """The buffer: sliding (L, R, D+S-1, conv_dim) or (L, R, conv_dim, D+S-1), inputs likewise with D columns;
        dense (L, R, D, *window)."""
        if self.storage == "dense":
            return (self.num_layers, self.max_requests, self.num_draft_tokens, *self.window_shape)
        return (self.num_layers, self.max_requests, *self._ordered(self.num_columns))

    @property
    def windows_axes(self) -> str:
        """Words for the axes of `windows_shape`."""
        return f"layer, row, token, {self.entry_axes}" if self.storage == "dense" else f"layer, row, {self.entry_axes}"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return BYTES_PER_ITEM[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return self.item_bytes * self.conv_dim * self.state_columns

    @property
    def state_bytes(self) -> int:
        """Bytes of the pool."""
        return self.slot_bytes * self.num_slots * self.num_layers

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's row over all layers."""
        stored = self.state_columns * self.num_draft_tokens if self.storage == "dense" else self.num_columns
        return self.item_bytes * self.conv_dim * stored * self.num_layers

    @property
    def windows_bytes(self) -> int:
        """Bytes of the buffer as it is stored."""
        return self.row_bytes * self.max_requests

    @property
    def dense_windows_bytes(self) -> int:
        """Bytes of the buffer if every window were stored apart."""
        return self.slot_bytes * self.num_draft_tokens * self.max_requests * self.num_layers

    def window_columns(self, num_accepted_tokens: int) -> slice:
        """Columns of a sliding row that are the state after `num_accepted_tokens` tokens, 1 … D.

        Raises:
          ValueError: the count is out of range; 0 tokens have no window, the pool itself is that state. Or the storage
            is another, whose windows are no run of columns.

        >>> ConvCacheSpec(1, 1, 1, 8, width=5, num_draft_tokens=3).window_columns(3)
        slice(2, 6, None)
        """
        if self.storage != "sliding":
            raise_mismatches([mismatch("storage", "'sliding'", repr(self.storage), "Only its windows are such a run.")])
        if not 1 <= num_accepted_tokens <= self.num_draft_tokens:
            expected = f"1 to num_draft_tokens = {self.num_draft_tokens}"
            raise_mismatches([mismatch("num_accepted_tokens", expected, num_accepted_tokens)])
        return slice(num_accepted_tokens - 1, num_accepted_tokens + self.state_columns - 1)


def use_storage(topk: int, parents: Any = None) -> Storage:
    """Which storage a draft topology allows: "sliding" if it is one chain, else "dense".

    Siblings would need different values in one shared column. Known links decide; the label `topk` decides only
    without them.

    Args:
      topk: drafts per position, 1 or more.
      parents: parent index of every draft, -1 for the committed state, `[D]` or `[B, D]`; a list or any array with
        `tolist`. Parents come first.

    Returns:
      "sliding" or "dense".

    Raises:
      ValueError: `topk` is no positive integer, or a link does not point to an earlier draft.

    Example:
      >>> use_storage(1), use_storage(2), use_storage(2, parents=[-1, 0, 1]), use_storage(1, parents=[-1, 0, 0, 1])
      ('sliding', 'dense', 'sliding', 'dense')
    """
    drafts = as_integer(topk)
    wrong = []
    if drafts is None or drafts < 1:
        wrong.append(mismatch("topk", "an integer of at least 1", shown(topk)))
    if parents is None:
        raise_mismatches(wrong)
        return "sliding" if drafts == 1 else "dense"
    try:
        links: Any = parents.tolist() if hasattr(parents, "tolist") else parents
    except RuntimeError:  # a tensor without values on the host's side: on device meta, or sparse
        links = None
    chains: Any = links if isinstance(links, (list, tuple)) and links and hasattr(links[0], "__iter__") else [links]
    is_chain = True
    for request, links_of_one in enumerate(chains):
        chain: Any = links_of_one.tolist() if hasattr(links_of_one, "tolist") else links_of_one
        if not isinstance(chain, (list, tuple, range)):
            raise_mismatches([*wrong, mismatch("parents", "[token] or [request, token]", shown(parents))])
        for token, parent in enumerate(chain):
            index = as_integer(parent)
            if index is None or not -1 <= index < token:
                _refuse_link(request, token, parent, wrong)
            is_chain &= index == token - 1
    raise_mismatches(wrong)
    return "sliding" if is_chain else "dense"


def _refuse_link(request: int, token: int, parent: Any, wrong: list[str]) -> NoReturn:
    expected = f"an index from -1 to {token - 1} for token {token} of request {request}"
    hint = "A parent comes before its child; -1 is the committed state."
    raise ValueError("\n".join([*wrong, mismatch("parents", expected, shown(parent), hint)]))
