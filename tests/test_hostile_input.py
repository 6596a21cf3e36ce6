"""Input that nobody should pass, and what is said about it: one message with every problem, and never a wrong bit."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from jax_impl import ConvCacheSpec, ConvWeight, use_storage
from tests.cases import assert_same_bits, values

SPEC = ConvCacheSpec(2, 6, 4, 128, 4, 3, "float32")


def arrays() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x, pool, buffer and weight of random values."""
    shapes = ((2, 3, 128), SPEC.state_shape, SPEC.windows_shape, (128, 4))
    x, pool, windows, weight = (jnp.asarray(values(shape, "float32", seed)) for seed, shape in enumerate(shapes))
    return x, pool, windows, weight


def lines_of(call: Any) -> list[str]:
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    return str(caught.value).splitlines()


@pytest.mark.parametrize("null_slot", [2**31, 2**40, -(2**40), np.uint32(2**32 - 1)])
@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_null_slot_that_no_slot_can_have_matches_nothing(null_slot: Any, implementation: Any) -> None:
    x, pool, windows, weight = arrays()
    slots, accepted = np.array([3, -1], np.int32), np.array([2, 1], np.int32)
    step: dict[str, Any] = {"spec": SPEC, "implementation": implementation}

    def run(null: Any) -> Any:
        both = {**step, "null_slot": null}
        y, buffer = jax_impl.causal_conv1d_verify(x, pool, windows, weight, state_indices=slots, layer=1, **both)
        return y, jax_impl.commit_conv_state(pool, buffer, slots, accepted, **both)

    for got, expected in zip(run(null_slot), run(None), strict=True):
        assert_same_bits(np.asarray(got), np.asarray(expected))


def test_verify_reports_all_problems_beside_a_bad_weight() -> None:
    x, pool, windows, _ = arrays()
    found = lines_of(
        lambda: jax_impl.causal_conv1d_verify(
            x[:, :2], pool, windows, jnp.zeros((4, 128)), spec=SPEC, state_indices=[1, 2], layer=7, window_rows=[1]
        )
    )
    assert found == [
        "`weight`: expected channel, tap = (128, 4), got (4, 128). The last tap meets the current token.",
        "`layer`: expected 0 to num_layers - 1 = 1, got 7.",
        "`x`: expected request, token, channel = (2, 3, 128), got (2, 2, 128).",
        "`window_rows`: expected request = (2,), got (1,).",
    ]


def test_verify_reports_all_problems_beside_a_bad_pool() -> None:
    x, pool, windows, weight = arrays()
    found = lines_of(
        lambda: jax_impl.causal_conv1d_verify(
            x[:, :, :127], pool[:, :, :2], windows, weight, spec=SPEC, state_indices=[1, 2], layer=7
        )
    )
    assert found == [
        "`conv_state`: expected layer, slot, column, channel = (2, 6, 3, 128), got (2, 6, 2, 128).",
        "`layer`: expected 0 to num_layers - 1 = 1, got 7.",
        "`x`: expected request, token, channel = (2, 3, 128), got (2, 3, 127).",
    ]


def test_prefill_and_commit_report_all_problems() -> None:
    x, pool, windows, _ = arrays()
    found = lines_of(
        lambda: jax_impl.causal_conv1d_prefill(
            x[:, :, :5], pool, jnp.zeros((3, 3)), spec=SPEC, state_indices=[1, 2], layer=0, lengths=[1],
            has_initial_state=[1, 0],
        )
    )  # fmt: skip
    assert [line.split(":")[0] for line in found] == ["`weight`", "`lengths`", "`has_initial_state`", "`x`"]
    many = np.zeros(5, np.int32)
    found = lines_of(lambda: jax_impl.commit_conv_state(pool, windows, many, many[:4], spec=SPEC))
    assert found == [
        "`num_accepted_tokens`: expected request = (5,), got (4,).",
        "`window_rows`: expected given, or at most max_requests = 4 requests, got None with 5 requests. "
        "Without it request b uses buffer row b.",
    ]


def test_prepare_conv_weight_reports_both() -> None:
    found = lines_of(lambda: jax_impl.prepare_conv_weight(jnp.zeros((2, 3, 4)), jnp.zeros(3, jnp.int32)))
    assert [line.split(":")[0] for line in found] == ["`bias`", "`weight`"]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.zeros((2, 1), np.int32), "`state_indices`: expected request = (B,), got (2, 1)."),
        (3, "`state_indices`: expected request = (B,), got ()."),
        ([[1], [2, 3]], "`state_indices`: expected an integer array, got a ragged or mixed list."),
        ([1.5, 2], "`state_indices`: expected an integer array, got float64. Index arrays are int32."),
        (np.zeros(0), "`state_indices`: expected an integer array, got float64. Index arrays are int32."),
    ],
)
def test_index_arrays_that_are_none(indices: Any, message: str) -> None:
    _, pool, _, _ = arrays()
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_impl.reset_conv_state(pool, indices, spec=SPEC)


@pytest.mark.parametrize("indices", [[2**63, -1], [2**70, 6], [-(2**70), 2**31], []])
def test_lists_of_large_integers_saturate(indices: Any) -> None:
    _, pool, _, _ = arrays()
    assert_same_bits(np.asarray(jax_impl.reset_conv_state(pool, indices, spec=SPEC)), np.asarray(pool))


def test_lists_of_traced_scalars_are_stacked() -> None:
    _, pool, _, _ = arrays()
    reset = jax.jit(lambda pool, slot: jax_impl.reset_conv_state(pool, [slot, 4], spec=SPEC))
    expected = np.asarray(pool).copy()
    expected[:, [1, 4]] = 0
    assert_same_bits(np.asarray(reset(pool, jnp.int32(1))), expected)


def test_empty_weights_layers_and_groups() -> None:
    x, pool, windows, weight = arrays()
    step: dict[str, Any] = {"spec": SPEC, "state_indices": [1, 2]}
    nothing: Any = None
    message = "`weight.taps`: expected an array, got NoneType."
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_impl.causal_conv1d_verify(x, pool, windows, ConvWeight(nothing), layer=0, **step)
    for_array = jax_impl.causal_conv1d_verify(x, pool, windows, weight, layer=np.array(1), **step)
    for_number = jax_impl.causal_conv1d_verify(x, pool, windows, weight, layer=1, **step)
    assert_same_bits(np.asarray(for_array[1]), np.asarray(for_number[1]))
    for empty in (None, [], {}):
        assert lines_of(lambda empty=empty: jax_impl.commit_conv_state(empty, empty, [1], [1], spec=SPEC)) == [
            f"`conv_state`: expected at least one array, got {jax.tree.structure(empty)}."
        ]
    with pytest.raises(
        ValueError, match=re.escape("`sharding`: expected a jax.sharding.Sharding or a device, got str.")
    ):
        jax_impl.allocate_conv_cache(SPEC, sharding="x")


def test_no_requests_and_a_list_of_no_flags() -> None:
    _, pool, _, weight = arrays()
    x = jnp.zeros((0, 5, 128), jnp.float32)
    y, after = jax_impl.causal_conv1d_prefill(
        x, pool, weight, spec=SPEC, state_indices=[], lengths=[], has_initial_state=[], layer=0
    )
    assert y.shape == x.shape
    assert_same_bits(np.asarray(after), np.asarray(pool))


def test_a_kernel_on_a_buffer_without_rows() -> None:
    x, pool, _, weight = arrays()
    spec = ConvCacheSpec(2, 6, 0, 128, 4, 3, "float32")
    step: dict[str, Any] = {"spec": spec, "state_indices": [1, 2], "layer": 0, "window_rows": [0, 1]}
    y, _ = jax_impl.causal_conv1d_verify(
        x, pool, jnp.zeros(spec.windows_shape), weight, implementation="pallas_interpret", **step
    )
    assert not np.asarray(y).any()


def test_more_requests_than_a_grid_axis_has_places() -> None:
    spec = ConvCacheSpec(1, 2, 1, 128, 2, 1)
    cache = jax_impl.allocate_conv_cache(spec)
    many = np.zeros(65_536, np.int32)
    step: dict[str, Any] = {"spec": spec, "window_rows": many}
    state, windows = cache.conv_state, cache.conv_windows
    message = "`implementation`: expected at most 65535 requests (both index sets of a commit together) for the Pallas"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_impl.commit_conv_state(state, windows, many, many, implementation="pallas_interpret", **step)
    assert jax_impl.commit_conv_state(state, windows, many, many, **step).shape == state.shape


def test_gradients_reach_parameters_and_are_refused_for_state() -> None:
    x, pool, windows, weight = arrays()

    def loss(x: jax.Array, weight: jax.Array, pool: jax.Array, windows: jax.Array) -> jax.Array:
        y, buffer = jax_impl.causal_conv1d_verify(x, pool, windows, weight, spec=SPEC, state_indices=[1, 2], layer=0)
        committed = jax_impl.commit_conv_state(pool, buffer, [1, 2], [1, 2], spec=SPEC)
        return jnp.sum(y) + 0 * jnp.sum(jax.lax.stop_gradient(committed))

    by_x, by_weight = jax.grad(loss, argnums=(0, 1))(x, weight, pool, windows)
    assert float(jnp.abs(by_x).min()) > 0
    assert float(jnp.abs(by_weight).max()) > 0
    for state in (2, 3):
        with pytest.raises(NotImplementedError, match="The pool and the verify buffer are state, not parameters"):
            jax.grad(loss, argnums=state)(x, weight, pool, windows)


def test_what_is_written_to_state_is_cut_off_from_gradients() -> None:
    """A later call's y depends on an earlier call's x, through the pool and through a row; its gradient does not."""
    x, pool, windows, weight = arrays()
    call: dict[str, Any] = {"spec": SPEC, "state_indices": [1, 2], "layer": 0}

    def later(x: jax.Array, resume: bool) -> jax.Array:
        _, buffer = jax_impl.causal_conv1d_verify(x, pool, windows, weight, **call)
        if resume:
            return jnp.sum(jax_impl.causal_conv1d_verify(x * 0, pool, buffer, weight, **call, resume_tokens=[1, 2])[0])
        committed = jax_impl.commit_conv_state(pool, buffer, [1, 2], [1, 2], spec=SPEC)
        return jnp.sum(jax_impl.causal_conv1d_verify(x * 0, committed, buffer, weight, **call)[0])

    for resume in (False, True):
        value, gradient = jax.value_and_grad(later)(x, resume)
        assert value != later(x * 2, resume)
        assert not np.asarray(gradient).any()


def test_values_that_are_no_array_are_shown() -> None:
    _, pool, windows, _ = arrays()
    for value, got in ((None, "None"), ("ab", "'ab'"), ([None, None], "[None, None]"), ([0.5, 1.0], "float64")):
        message = f"`num_accepted_tokens`: expected an integer array, got {got}. Index arrays are int32."
        with pytest.raises(ValueError, match=re.escape(message)):
            jax_impl.commit_conv_state(pool, windows, [1, 2], value, spec=SPEC)


def test_storage_of_odd_links() -> None:
    one: Any = np.int64(1)
    assert use_storage(one) == "sliding"
    assert use_storage(1, [np.array([-1, 0]), np.array([-1, 0, 1])]) == "sliding"
    assert use_storage(1, np.array([[-1, 0], [-1, -1]])) == "dense"
    for links in (5, np.array(-1), [[-1], 0], np.zeros((1, 1, 1), int)):
        with pytest.raises(ValueError, match=re.escape("`parents`: expected [token] or [request, token], got ")):
            use_storage(1, links)
    message = "`parents`: expected [token] or [request, token], got traced int32 array of shape (2,). The storage "
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(lambda links: use_storage(1, links))(jnp.array([-1, 0]))
