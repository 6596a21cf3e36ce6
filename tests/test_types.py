"""Annotations that are executed: axis names and dtypes of the public functions, and the hook over the inner modules."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_impl
from jax_impl import runs
from jax_impl.layout import ConvCacheSpec
from jax_impl.model import attention, mixers

pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")
pytest.importorskip("beartype", reason="beartype is not installed")

from beartype import beartype
from jaxtyping import Array, BFloat16, Float, Int32, jaxtyped

typed = jaxtyped(typechecker=beartype)


@typed
def verify(
    x: Float[Array, "B D channel"],
    conv_state: BFloat16[Array, "L C S channel"],
    conv_windows: BFloat16[Array, "L R column channel"],
    weight: Float[Array, "channel K"],
    slots: Int32[Array, " B"],
    spec: ConvCacheSpec,
) -> tuple[Float[Array, "B D channel"], BFloat16[Array, "L R column channel"]]:
    """Verify as the contract has it: y like x, the buffer like the buffer."""
    y, conv_windows = jax_impl.causal_conv1d_verify(
        x, conv_state, conv_windows, weight, spec=spec, state_indices=slots, layer=1
    )
    return y, conv_windows


@typed
def gather(
    conv_windows: BFloat16[Array, "L R column channel"], accepted: Int32[Array, " B"], spec: ConvCacheSpec
) -> BFloat16[Array, "L B {spec.state_columns} channel"]:
    """Windows of S columns, one per request and layer."""
    return jax_impl.gather_windows(conv_windows, accepted, spec=spec)


@typed
def commit(
    conv_state: BFloat16[Array, "L C S channel"],
    conv_windows: BFloat16[Array, "L R column channel"],
    slots: Int32[Array, " B"],
    accepted: Int32[Array, " B"],
    spec: ConvCacheSpec,
) -> BFloat16[Array, "L C S channel"]:
    """The pool like the pool."""
    return jax_impl.commit_conv_state(conv_state, conv_windows, slots, accepted, spec=spec)


@typed
def prefill(
    x: Float[Array, "B T channel"],
    conv_state: BFloat16[Array, "L C S channel"],
    weight: Float[Array, "channel K"],
    slots: Int32[Array, " B"],
    spec: ConvCacheSpec,
) -> tuple[Float[Array, "B T channel"], BFloat16[Array, "L C S channel"]]:
    """Prompts of any length, y like x."""
    return jax_impl.causal_conv1d_prefill(x, conv_state, weight, spec=spec, state_indices=slots, layer=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_has_the_axes_that_it_says(dtype: Any) -> None:
    """Traced, so that shapes and dtypes alone are at work; y has x's dtype, state and buffer their own."""
    spec = ConvCacheSpec(3, 7, 5, 12, 4, 2)

    def step(x: jax.Array, prompt: jax.Array, state: jax.Array, windows: jax.Array, slots: jax.Array) -> Any:
        weight = jnp.ones((12, 4), dtype)
        y, windows = verify(x, state, windows, weight, slots, spec)
        other, state = prefill(prompt, state, weight, slots, spec)
        return y, other, gather(windows, slots, spec), commit(state, windows, slots, slots, spec)

    shape = jax.ShapeDtypeStruct
    y, other, windows, state = jax.eval_shape(
        step, shape((4, 2, 12), dtype), shape((4, 9, 12), dtype), shape(spec.state_shape, jnp.bfloat16),
        shape(spec.windows_shape, jnp.bfloat16), shape((4,), jnp.int32),
    )  # fmt: skip
    assert (y.dtype, other.dtype) == (dtype, dtype)
    assert (windows.shape, state.shape) == ((3, 4, 3, 12), spec.state_shape)


def test_an_axis_of_another_length_is_seen() -> None:
    """The types above are executed: a batch of indices that is not x's is refused by them."""
    spec = ConvCacheSpec(1, 3, 2, 8, 2, 2)
    cache = jax_impl.allocate_conv_cache(spec)
    with pytest.raises(Exception, match="B") as refused:
        commit(cache.conv_state, cache.conv_windows, jnp.array([1, 2]), jnp.array([1]), spec)
    assert type(refused.value).__module__.startswith(("jaxtyping", "beartype"))


def test_inner_modules_are_checked_too() -> None:
    """The import hook is on: an argument of another type than annotated is refused by beartype."""
    spec, wrong = ConvCacheSpec(1, 3, 2, 8, 2, 2), "no array"
    calls: list[Any] = [
        lambda: runs.live_slot(wrong, None, spec=spec),  # type: ignore[arg-type]
        lambda: attention.query_block(wrong, 3),  # type: ignore[arg-type]
        lambda: mixers.project(wrong, wrong, wrong),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(Exception, match="type") as refused:
            call()
        assert type(refused.value).__module__.startswith(("jaxtyping", "beartype")), type(refused.value)
