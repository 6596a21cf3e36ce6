"""Severity: strict promotion, no rank promotion, warnings are errors (pyproject.toml); and one device policy.

The default run is for a machine without an accelerator and stays on the CPU even where there is one. `-m gpu` selects
the compiled paths; Triton decides between its compiler and its interpreter once, when it is imported, hence here.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Annotations of these modules are executed in every test, by beartype, where it is installed. Not of those that a user
# calls: what they say to an argument of another type is theirs, and tested. Nor of pytrees, which JAX fills with
# placeholders.
TYPED_MODULES = ("jax_impl.runs", "jax_impl.model.attention", "jax_impl.model.mixers")
if all(importlib.util.find_spec(name) for name in ("jaxtyping", "beartype")):
    from jaxtyping import install_import_hook

    install_import_hook(list(TYPED_MODULES), "beartype.beartype")

from tests import adapters  # noqa: E402  (its imports pass the hook)

# pytest imports every module to look for examples in docstrings. These have none, and import torch and Triton.
collect_ignore_glob = ["torch_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    selects_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX and torch share one GPU
    if not selects_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def path(request: pytest.FixtureRequest) -> adapters.Path:
    """One implementation, to be compared with the definition."""
    return adapters.path(request.param)


@pytest.fixture(params=["spec", *(pytest.param(name, marks=marks) for name, marks in adapters.PATHS.items())])
def any_path(request: pytest.FixtureRequest) -> adapters.Path:
    """One implementation or the definition itself, for tests whose expectation comes from elsewhere."""
    return adapters.path(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `path` and names none runs on every path."""
    named = any("path" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "path" in metafunc.fixturenames and not named:
        every = [pytest.param(name, marks=marks) for name, marks in adapters.PATHS.items()]
        metafunc.parametrize("path", every, indirect=True)


@pytest.fixture
def fresh_steps() -> Iterator[None]:
    """Decoding steps are traced anew with what a test has planted, and forgotten after it."""
    from jax_impl.model import decode

    step: Any = decode.verify_step
    step.clear_cache()
    yield
    step.clear_cache()


@pytest.fixture
def torch_ref():
    """The oracle package, or a skip."""
    if not adapters.is_installed("torch"):
        pytest.skip("torch is not installed")
    import torch_ref

    return torch_ref
