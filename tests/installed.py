"""What an installed package does with nothing beside it: run by `.ci/run` in an empty environment, not in a checkout.

torch and Pallas are made impossible to import, as if they were not there, and JAX sees no accelerator. Prints what it
found; an assertion says what is missing.
"""

import importlib.abc
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

ABSENT = ("torch", "triton", "jax.experimental.pallas", "jax._src.pallas")


class Absent(importlib.abc.MetaPathFinder):
    """Refuses to find what should not be needed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raises for an absent package and everything in it."""
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def check_content(root: pathlib.Path) -> None:
    """Typed packages, all subpackages, the licence, and no tests among the installed files."""
    for file in ("jax_impl/py.typed", "torch_ref/py.typed", "jax_impl/bench/cli.py", "jax_impl/model/decode.py"):
        assert (root / file).is_file(), file
    files = importlib.metadata.files("specconv") or []
    assert any(file.name == "LICENSE" for file in files)
    assert not [file for file in files if file.parts[0] in ("tests", "notebooks")]


def check_use() -> None:
    """One step of verify and commit, by the package's front."""
    import jax.numpy as jnp

    import jax_impl

    spec = jax_impl.ConvCacheSpec(1, 4, 2, 6, width=4, num_draft_tokens=3, dtype="float32")
    cache, slots = jax_impl.allocate_conv_cache(spec), jnp.array([3, 1])
    y, windows = jax_impl.causal_conv1d_verify(
        jnp.ones((2, 3, 6)), cache.conv_state, cache.conv_windows, jnp.ones((6, 4)), spec=spec, state_indices=slots,
        layer=0,
    )  # fmt: skip
    state = jax_impl.commit_conv_state(cache.conv_state, windows, slots, jnp.array([2, 0]), spec=spec)
    assert y.shape == (2, 3, 6)
    assert state[0, :, :, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1]]


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.meta_path.insert(0, Absent())
    import jax_impl
    import torch_ref

    root = pathlib.Path(jax_impl.__file__).parent.parent
    if "site-packages" in root.parts:
        check_content(root)
        assert importlib.metadata.version("specconv") == jax_impl.__version__
    for name in jax_impl.__all__:
        assert getattr(jax_impl, name) is not None, name
    for module in ("debug", "capacity", "presets", "envelope", "sharding", "model.decode", "model.parallel"):
        importlib.import_module(f"jax_impl.{module}")
    check_use()
    assert torch_ref.ConvCacheSpec(1, 2, 1, 8, 4, 3).num_columns == 5
    missing = None
    try:
        _ = torch_ref.commit_conv_state
    except ModuleNotFoundError as error:
        missing = error.name
    assert missing == "torch"
    assert not [name for name in sys.modules if name.split(".")[0] in ABSENT or "pallas" in name]
    print(f"jax_impl {jax_impl.__version__} from {root}: works without torch, a GPU and Pallas")


if __name__ == "__main__":
    main()
