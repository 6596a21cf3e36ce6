"""The compiled verify, two hundred times over every block size: a race or an access out of bounds would move a bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import ConvCacheSpec, causal_conv1d_verify, conv, pallas_backend, prepare_conv_weight
from tests import adapters
from tests.cases import assert_same_bits, both_orders, poison, values

REPEATS = 200
THREAD_BYTES = (2, 4, 8, 16)


@pytest.mark.gpu
@both_orders
def test_two_hundred_repeats_over_block_sizes(monkeypatch: pytest.MonkeyPatch, axis_order: Any) -> None:
    """Fifty repeats for each of four block sizes, with one and with two requests a grid point: equal bits throughout.

    The buffer is poisoned before every repeat, so a column that one repeat does not write shows too.
    """
    adapters.path("jax-pallas-gpu")
    spec = ConvCacheSpec(2, 61, 48, 2048, 4, 4, axis_order=axis_order)
    rng = np.random.default_rng(5)
    slots, rows = rng.permutation(61)[:48].astype(np.int32), rng.permutation(48).astype(np.int32)
    slots[[3, 17]] = -1, 61
    valid = rng.integers(1, 5, 48).astype(np.int32)
    pool, x = values(spec.state_shape, spec.dtype, 1), jnp.asarray(values((48, 4, 2048), spec.dtype, 2))
    weight = prepare_conv_weight(jnp.asarray(values((2048, 4), spec.dtype, 3)))
    clean, before = poison(spec.windows_shape, spec.dtype), jnp.asarray(pool)
    block_of, first = pallas_backend.block_of, None
    for thread_bytes in THREAD_BYTES:
        for requests in (1, 2):
            monkeypatch.setattr(conv, "requests_per_block", lambda *_, requests=requests: requests)
            monkeypatch.setattr(
                pallas_backend, "block_of", lambda dim, item, _, size=thread_bytes: block_of(dim, item, size)
            )
            step = jax.jit(
                lambda windows, x, pool: causal_conv1d_verify(
                    x, pool, windows, weight, spec=spec, state_indices=slots, layer=1, window_rows=rows,
                    num_valid_tokens=valid, implementation="pallas",
                ),
                donate_argnums=0,
            )  # fmt: skip
            for repeat in range(REPEATS // len(THREAD_BYTES) // 2):
                got = jax.device_get(step(jnp.asarray(clean), x, before))
                first = got if first is None else first
                what = f"{thread_bytes} bytes a thread, {requests} requests, repeat {repeat}"
                assert_same_bits(got[0], first[0], what)
                assert_same_bits(got[1], first[1], what)
    assert_same_bits(np.asarray(before), pool)
    assert first is not None
    live = (slots >= 0) & (slots < 61) & (valid == 4)
    assert np.isfinite(first[1][1, rows[live]].astype(np.float32)).all()
