"""Arrays that JAX and torch share through dlpack, without a copy; and what goes wrong with them.

Every row of the table is tried when it is asked for, in the versions that are installed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.walkthrough import show
from jax_impl.walkthrough.show import Markdown, Table

ELEMENTS = 1024


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _tried(attempt: Callable[[], object]) -> str:
    """What happens, in a word and the name of the error."""
    try:
        attempt()
    except Exception as error:  # whatever the installed versions raise is the answer
        return f"refused, {type(error).__name__}"
    return "accepted"


def _tensor(*shape: int, **options: Any) -> Any:
    """A torch tensor of zeros where JAX's default device is."""
    import torch

    return torch.zeros(shape, device="cuda" if jax.default_backend() == "gpu" else "cpu", **options)


def shares_memory(array: jax.Array, tensor: Any) -> bool:
    """Whether a JAX array on one device and a torch tensor begin at the same address."""
    return array.unsafe_buffer_pointer() == tensor.data_ptr()


def exchange_table() -> Table | Markdown:
    """What crosses without a copy; a sentence where torch is not installed."""
    if absent := show.missing("torch"):
        return Markdown(f"{absent} pip install '.[torch]'")
    import torch

    rows = []
    for dtype in ("float32", "bfloat16", "int32"):
        array = jnp.arange(ELEMENTS).astype(dtype)
        there = torch.from_dlpack(array)
        back = jnp.from_dlpack(there)
        same = bool((array == back).all()) and str(there.dtype) == f"torch.{dtype}"
        shared = shares_memory(array, there) and shares_memory(back, there)
        rows.append((f"JAX → torch → JAX, {dtype}", _yes(same), _yes(shared)))
    turned = _tensor(3, ELEMENTS)
    turned += torch.arange(3 * ELEMENTS, device=turned.device).reshape(3, ELEMENTS)
    turned = turned.T
    taken = jnp.from_dlpack(turned)
    same = str(turned.dtype) == f"torch.{taken.dtype}" and np.asarray(taken).tolist() == turned.tolist()
    rows.append(("torch → JAX, transposed", _yes(same), _yes(shares_memory(taken, turned))))
    return Table(("exchange", "same values and dtype", "same memory"), rows)


def traps_table() -> Table | Markdown:
    """What goes wrong with shared memory; a sentence where torch is not installed."""
    if absent := show.missing("torch"):
        return Markdown(f"{absent} pip install '.[torch]'")
    import torch

    rows = []
    array = jnp.zeros(ELEMENTS)
    torch.from_dlpack(array).fill_(7)
    jax.block_until_ready(array)
    changed = bool((np.array(array) == 7).all())
    rows.append(("torch writes into a shared tensor", "the JAX array changes under its owner", _yes(changed)))

    add_one = jax.jit(lambda pool: pool + 1, donate_argnums=0)
    array = jnp.zeros(ELEMENTS)
    tensor = torch.from_dlpack(array)
    in_place = shares_memory(jax.block_until_ready(add_one(array)), tensor)
    rows.append(("a JAX array is donated while torch holds it", "the update is in place", _yes(in_place)))

    tensor = _tensor(ELEMENTS)
    in_place = shares_memory(jax.block_until_ready(add_one(jnp.from_dlpack(tensor))), tensor)
    rows.append(("a tensor's memory is donated to JAX", "the update is in place", _yes(in_place)))

    wide = jnp.from_dlpack(_tensor(4, dtype=torch.int64))
    rows.append(("an int64 tensor", "its dtype in JAX", str(wide.dtype)))
    gaps = _tensor(3, 4)[:, ::2]
    rows.append(("a tensor with gaps (every second column)", "from_dlpack", _tried(lambda: jnp.from_dlpack(gaps))))
    rows.append(
        ("a tensor that records gradients", "from_dlpack",
         _tried(lambda: jnp.from_dlpack(_tensor(4, requires_grad=True))))
    )  # fmt: skip
    numpy = np.asarray(jnp.zeros(4, jnp.bfloat16)).copy()
    rows.append(("bfloat16 by way of NumPy", "torch.from_numpy", _tried(lambda: torch.from_numpy(numpy))))
    return Table(("situation", "question", "here"), rows)
