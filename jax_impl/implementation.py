"""Which implementation an operation runs, decided in one place for all of them."""

from collections.abc import Sequence

import jax

from jax_impl.checks import Implementation
from jax_impl.layout import ConvCacheSpec


def choose_implementation(
    implementation: Implementation | None, specs: Sequence[ConvCacheSpec], requests: int
) -> Implementation:
    """The implementation to run, decided without importing the kernels where none can run.

    Raises:
      ValueError: a named kernel cannot take the geometry or the number of requests, or there is no GPU for it.
    """
    if implementation == "xla" or (implementation is None and jax.default_backend() != "gpu"):
        return "xla"
    from jax_impl import pallas_backend

    return pallas_backend.choose(implementation, specs, requests)
