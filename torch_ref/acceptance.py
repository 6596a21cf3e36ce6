"""Index arrays of a commit out of what an engine has at hand: what was accepted, and what to snapshot.

The functions stay on the device of the tensors that they are given, and wait for nothing.
"""

from typing import Any

import torch

from torch_ref.checks import INT32, SHARED_DEVICE, IndexArray, is_strided
from torch_ref.layout import LARGEST, as_integer, mismatch, raise_mismatches, shown


@torch.no_grad()
def accepted_from_index(accept_index: Any) -> torch.Tensor:
    """Accepted tokens of every request, from the indices of the accepted tokens padded with -1.

    Args:
      accept_index: `[request, token]` = (B, D), signed integers. The accepted tokens come first; what follows the first
        negative entry does not count, whatever it is.

    Returns:
      int32 `[B]`, 0 … D: the length of each row's leading run of entries that are not negative.

    Raises:
      ValueError: the argument has another shape or dtype than stated.

    Example:
      >>> accepted_from_index(torch.tensor([[4, 5, -1], [-1, -1, -1], [7, -1, 9]])).tolist()
      [2, 0, 1]
    """
    wrong: list[str] = []
    index = _integers("accept_index", accept_index, "request, token", wrong, signed=True)
    raise_mismatches(wrong)
    return (index >= 0).int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)


@torch.no_grad()
def track_tokens_at_boundary(seq_lens: IndexArray, num_accepted_tokens: IndexArray, interval: int) -> torch.Tensor:
    """The counts after which a sequence is as long as a prefix cache wants it: `track_num_tokens` of a commit.

        t = the largest multiple of interval in s+1 … s+n, minus s;  0 if there is none

    Args:
      seq_lens: committed length s before this step, int `[B]`.
      num_accepted_tokens: n, int `[B]`; saturates to int32 as everywhere.
      interval: tokens between snapshots, 1 or more.

    Returns:
      int32 `[B]`: t, 1 … n, where committing n tokens reaches or crosses a multiple of `interval`; else 0, also where
      n is 0 or negative, or s is negative.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Example:
      >>> track_tokens_at_boundary([62, 63, 64, 60, 63], [3, 1, 3, 3, 0], 64).tolist()
      [2, 1, 0, 0, 0]
    """
    wrong: list[str] = []
    devices = [value.device for value in (seq_lens, num_accepted_tokens) if isinstance(value, torch.Tensor)]
    lengths = _integers("seq_lens", seq_lens, "request", wrong, *devices[:1])
    accepted = _integers("num_accepted_tokens", num_accepted_tokens, "request", wrong, *devices[:1])
    if lengths.shape != accepted.shape and not wrong:
        wrong.append(mismatch("num_accepted_tokens", f"request = {tuple(lengths.shape)}", tuple(accepted.shape)))
    if lengths.device != accepted.device:
        wrong.append(mismatch("num_accepted_tokens", f"device {lengths.device}", accepted.device, SHARED_DEVICE))
    every = as_integer(interval)
    if every is None or not 1 <= every <= LARGEST:
        wrong.append(mismatch("interval", "an integer from 1 to 2^31-1", shown(interval)))
    raise_mismatches(wrong)
    assert every is not None
    past = lengths % every  # tokens since the last multiple; small, so that no sum below leaves int64
    tokens = accepted.clamp(0, INT32.max)
    reached = (past + tokens) // every * every - past  # of no new multiple the last one is left: 0 or less
    return reached.clamp(min=0).masked_fill(lengths < 0, 0).int()


@torch.no_grad()
def path_to_node(parents: IndexArray, nodes: IndexArray) -> tuple[torch.Tensor, torch.Tensor]:
    """The path from the root of a draft tree to the last accepted node: `accepted_path` and the count of a commit.

    Args:
      parents: links `[request, token]` = (B, D), integers; -1 is the committed state, others are less than their own
        index.
      nodes: the last accepted node of each request, int `[B]`; -1, or any other that is no node, accepts nothing.

    Returns:
      accepted_path, int32 `[B, D]`: the nodes from the root to `nodes[b]`, then -1; and num_accepted_tokens, int32
      `[B]`: how many these are. 0 and -1 throughout where a link on the way points anywhere but backwards or to -1.

    Raises:
      ValueError: an argument has another shape, dtype, device or range than stated.

    Example:
      >>> path, count = path_to_node([[-1, 0, 0, 2], [-1, 0, 1, 2]], [3, -1])
      >>> path.tolist(), count.tolist()
      ([[0, 2, 3, -1], [-1, -1, -1, -1]], [3, 0])
    """
    wrong: list[str] = []
    devices = [value.device for value in (parents, nodes) if isinstance(value, torch.Tensor)]
    links = _integers("parents", parents, "request, token", wrong, *devices[:1])
    last = _integers("nodes", nodes, "request", wrong, *devices[:1])
    if links.ndim == 2 and last.shape != links.shape[:1] and not wrong:
        wrong.append(mismatch("nodes", f"request = {tuple(links.shape[:1])}", tuple(last.shape)))
    if links.device != last.device:
        wrong.append(mismatch("nodes", f"device {links.device}", last.device, SHARED_DEVICE))
    raise_mismatches(wrong)
    num_tokens = links.shape[1]
    node = last.masked_fill((last < 0) | (last >= num_tokens), -1)
    is_sound = torch.ones_like(node, dtype=torch.bool)
    upwards = []
    for _ in range(num_tokens):
        upwards.append(node)
        link = links.gather(1, node.clamp(min=0)[:, None])[:, 0].masked_fill(node < 0, -1)
        is_sound &= (node < 0) | ((link >= -1) & (link < node))
        node = link.masked_fill(~is_sound, -1)
    path = torch.stack(upwards, dim=1) if upwards else links
    count = (path >= 0).sum(1).masked_fill(~is_sound, 0)
    place = count[:, None] - 1 - torch.arange(num_tokens, device=links.device)  # the root was met last
    return path.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1).int(), count.int()


def _integers(
    name: str, value: Any, axes: str, wrong: list[str], device: torch.device | str = "cpu", *, signed: bool = False
) -> torch.Tensor:
    """An integer array as int64: a tensor where it is, a list or a NumPy array on `device`."""
    if isinstance(value, torch.Tensor) and not is_strided(value):
        wrong.append(mismatch(name, "a strided torch.Tensor", value.layout))
        return torch.zeros(0, dtype=torch.int64, device=device)
    try:
        taken = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        wrong.append(mismatch(name, f"{axes}, an array of integers", shown(value)))
        return torch.zeros(0, dtype=torch.int64, device=device)
    if taken.numel() == 0 and not isinstance(value, torch.Tensor):
        taken = taken.long()  # an empty list has no dtype of its own
    if taken.dtype.is_floating_point or taken.dtype.is_complex or taken.dtype == torch.bool:
        wrong.append(mismatch(name, "an integer dtype", taken.dtype))
    elif signed and not taken.dtype.is_signed:
        wrong.append(mismatch(name, "a signed integer dtype", taken.dtype, "-1 is the padding."))
    if taken.ndim != len(axes.split(",")):
        wrong.append(mismatch(name, axes, tuple(taken.shape)))
    return (taken.real if taken.dtype.is_complex else taken).long()
