"""What a caller reads after a mistake: every message in full, all of one call at once, and nothing changed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from jax_impl.layout import ConvCacheSpec

SPEC = ConvCacheSpec(2, 5, 3, 96, 4, 3)
ONE_TOKEN = ConvCacheSpec(2, 5, 3, 128, 4, 1)


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


def ints(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def good(name: str) -> dict[str, Any]:
    """Keyword arguments of a call that works."""
    state, windows = zeros(*SPEC.state_shape), zeros(*SPEC.windows_shape)
    convolution = {"conv_state": state, "weight": zeros(96, 4), "spec": SPEC, "state_indices": ints(1, 2), "layer": 0}
    indices = {"state_indices": ints(1, 2), "num_accepted_tokens": ints(1, 2)}
    return {
        "causal_conv1d_verify": {"x": zeros(2, 3, 96), "conv_windows": windows, **convolution},
        "causal_conv1d_update": {"x": zeros(2, 96), **convolution},
        "causal_conv1d_prefill": {"x": zeros(2, 7, 96), **convolution},
        "gather_windows": {"conv_windows": windows, "num_accepted_tokens": ints(1, 2), "spec": SPEC},
        "commit_conv_state": {"conv_state": state, "conv_windows": windows, **indices, "spec": SPEC},
        "reset_conv_state": {"conv_state": state, "state_indices": ints(1, 2), "spec": SPEC},
        "allocate_conv_cache": {"spec": SPEC},
        "prepare_conv_weight": {"weight": zeros(96, 1, 4), "bias": zeros(96)},
    }[name]


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole message is compared)
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "causal_conv1d_verify",
        "causal_conv1d_update",
        "causal_conv1d_prefill",
        "gather_windows",
        "commit_conv_state",
        "reset_conv_state",
        "allocate_conv_cache",
        "prepare_conv_weight",
    ],
)
def test_the_good_call_works(name: str) -> None:
    """Else the tests below would test something else than they say."""
    getattr(jax_impl, name)(**good(name))


STATE = "`conv_state`: expected layer, slot, column, channel = (2, 5, 3, 96)"
WINDOWS = "`conv_windows`: expected layer, row, column, channel = (2, 3, 5, 96)"
FLOATS = "expected dtype bfloat16, float16, float32"
UNCAST = "Nothing is cast silently."
CONVOLUTIONS = ("causal_conv1d_verify", "causal_conv1d_update", "causal_conv1d_prefill")

CASES: list[tuple[str | tuple[str, ...], dict[str, Any], str]] = [
    # --- shapes of caches
    (CONVOLUTIONS, {"conv_state": zeros(2, 5, 96, 3)}, f"{STATE}, got (2, 5, 96, 3)."),
    ("commit_conv_state", {"conv_state": zeros(2, 5, 96, 3)}, f"{STATE}, got (2, 5, 96, 3)."),
    ("reset_conv_state", {"conv_state": zeros(2, 6, 3, 96)}, f"{STATE}, got (2, 6, 3, 96)."),
    (
        "reset_conv_state",
        {"conv_state": zeros(5, 3)},
        f"{STATE} or, for one layer, slot, column, channel = (5, 3, 96), got (5, 3).",
    ),
    ("causal_conv1d_verify", {"conv_windows": zeros(2, 3, 6, 96)}, f"{WINDOWS}, got (2, 3, 6, 96)."),
    ("gather_windows", {"conv_windows": zeros(2, 3, 6, 96)}, f"{WINDOWS}, got (2, 3, 6, 96)."),
    ("commit_conv_state", {"conv_windows": zeros(2, 3, 6, 96)}, f"{WINDOWS}, got (2, 3, 6, 96)."),
    ("commit_conv_state", {"conv_windows": zeros(3, 5, 96)}, f"{WINDOWS}, got (3, 5, 96)."),
    (
        "commit_conv_state",
        {"conv_state": zeros(5, 3, 96)},
        "`conv_windows`: expected row, column, channel = (3, 5, 96), got (2, 3, 5, 96).",
    ),
    (
        "gather_windows",
        {"spec": ConvCacheSpec(2, 5, 3, 96, 4, 3, storage="dense", axis_order="channel_major")},
        "`conv_windows`: expected row, token, channel, column = (3, 3, 96, 3), got (2, 3, 5, 96).",
    ),
    # --- dtypes of caches
    (
        (*CONVOLUTIONS, "commit_conv_state", "reset_conv_state"),
        {"conv_state": zeros(*SPEC.state_shape, dtype=jnp.float16)},
        "`conv_state`: expected dtype bfloat16 of the spec, got float16. Pool and buffer are never cast.",
    ),
    (
        ("causal_conv1d_verify", "gather_windows", "commit_conv_state"),
        {"conv_windows": zeros(*SPEC.windows_shape, dtype=jnp.float32)},
        "`conv_windows`: expected dtype bfloat16 of the spec, got float32. Pool and buffer are never cast.",
    ),
    ((*CONVOLUTIONS, "reset_conv_state"), {"conv_state": [1.0]}, "`conv_state`: expected an array, got list."),
    # --- x, weight, bias
    (
        "causal_conv1d_verify",
        {"x": zeros(2, 4, 96)},
        "`x`: expected request, token, channel = (2, 3, 96), got (2, 4, 96).",
    ),
    ("causal_conv1d_update", {"x": zeros(3, 96)}, "`x`: expected request, channel = (2, 96), got (3, 96)."),
    (
        "causal_conv1d_prefill",
        {"x": zeros(2, 0, 96)},
        "`x`: expected request, token, channel = (2, T ≥ 1, 96), got (2, 0, 96).",
    ),
    (
        ("causal_conv1d_verify", "causal_conv1d_prefill"),
        {"x": np.zeros((2, 3, 96))},
        f"`x`: {FLOATS}, got float64. {UNCAST}",
    ),
    ("causal_conv1d_update", {"x": np.zeros((2, 96))}, f"`x`: {FLOATS}, got float64. {UNCAST}"),
    (CONVOLUTIONS, {"x": "x"}, "`x`: expected an array, got str."),
    (
        CONVOLUTIONS,
        {"weight": zeros(4, 96)},
        "`weight`: expected channel, tap = (96, 4), got (4, 96). The last tap meets the current token.",
    ),
    (
        CONVOLUTIONS,
        {"weight": zeros(96, 4, 1)},
        "`weight`: expected channel, 1, tap = (96, 1, 4), got (96, 4, 1). The last tap meets the current token.",
    ),
    (CONVOLUTIONS, {"weight": zeros(96, 4, dtype=jnp.int8)}, f"`weight`: {FLOATS}, got int8. {UNCAST}"),
    (CONVOLUTIONS, {"bias": zeros(97)}, "`bias`: expected channel = (96,), got (97,)."),
    (CONVOLUTIONS, {"bias": zeros(96, dtype=jnp.int32)}, f"`bias`: {FLOATS}, got int32. {UNCAST}"),
    # --- indices
    (
        (*CONVOLUTIONS, "commit_conv_state", "reset_conv_state"),
        {"state_indices": zeros(2)},
        "`state_indices`: expected an integer array, got bfloat16. Index arrays are int32.",
    ),
    (
        ("commit_conv_state", "reset_conv_state"),
        {"state_indices": [True, False]},
        "`state_indices`: expected an integer array, got bool. Index arrays are int32.",
    ),
    (
        "commit_conv_state",
        {"num_accepted_tokens": ints(1, 2, 3)},
        "`num_accepted_tokens`: expected request = (2,), got (3,).",
    ),
    (
        ("causal_conv1d_verify", "commit_conv_state"),
        {"window_rows": ints(1)},
        "`window_rows`: expected request = (2,), got (1,).",
    ),
    (
        ("causal_conv1d_verify", "commit_conv_state"),
        {"num_valid_tokens": np.zeros((2, 1), np.int32)},
        "`num_valid_tokens`: expected request = (2,), got (2, 1).",
    ),
    (
        "gather_windows",
        {"num_accepted_tokens": ints(1, 1, 1, 1)},
        "`window_rows`: expected given, or at most max_requests = 3 requests, got None with 4 requests. "
        "Without it request b uses buffer row b.",
    ),
    (
        "commit_conv_state",
        {"track_indices": ints(1, 2)},
        "`track_num_tokens`: expected given together with the other track argument, got None.",
    ),
    (
        "commit_conv_state",
        {"track_num_tokens": ints(1, 2)},
        "`track_indices`: expected given together with the other track argument, got None.",
    ),
    ("causal_conv1d_prefill", {"lengths": ints(7)}, "`lengths`: expected request = (2,), got (1,)."),
    (
        "causal_conv1d_prefill",
        {"has_initial_state": ints(1, 0)},
        "`has_initial_state`: expected a bool array, got int32.",
    ),
    (
        "causal_conv1d_prefill",
        {"has_initial_state": [True]},
        "`has_initial_state`: expected request = (2,), got (1,).",
    ),
    # --- options
    (CONVOLUTIONS, {"layer": 2}, "`layer`: expected 0 to num_layers - 1 = 1, got 2."),
    (CONVOLUTIONS, {"layer": -1}, "`layer`: expected 0 to num_layers - 1 = 1, got -1."),
    (
        CONVOLUTIONS,
        {"layer": None},
        "`layer`: expected an integer or an integer scalar with stacked arrays, got None.",
    ),
    (CONVOLUTIONS, {"layer": 1.0}, "`layer`: expected an integer or an integer scalar, got 1.0."),
    (CONVOLUTIONS, {"layer": ints(1)}, "`layer`: expected scalar = (), got (1,)."),
    (
        ("causal_conv1d_update", "causal_conv1d_prefill"),
        {"conv_state": zeros(5, 3, 96)},
        "`layer`: expected None with one layer's arrays, got 0. Pass stacked arrays to pick a layer.",
    ),
    (
        (*CONVOLUTIONS, "commit_conv_state", "reset_conv_state"),
        {"null_slot": 1.5},
        "`null_slot`: expected a Python integer or None, got 1.5. It is static: part of the program.",
    ),
    (CONVOLUTIONS, {"activation": "gelu"}, "`activation`: expected None or \"silu\", got 'gelu'."),
    (
        (*CONVOLUTIONS, "commit_conv_state"),
        {"implementation": "triton"},
        "`implementation`: expected None or one of xla, pallas, pallas_interpret, got 'triton'.",
    ),
    (
        (*CONVOLUTIONS, "commit_conv_state"),
        {"implementation": "pallas_interpret"},
        "`implementation`: expected conv_dim % 128 = 0 for the Pallas kernels, got conv_dim = 96. "
        'Use "xla", or None to fall back to it.',
    ),
    (
        (*CONVOLUTIONS, "gather_windows", "reset_conv_state", "allocate_conv_cache"),
        {"spec": "Qwen3.5"},
        "`spec`: expected a ConvCacheSpec, got str.",
    ),
    (
        "allocate_conv_cache",
        {"sharding": [None]},
        "`sharding`: expected one sharding or a pair (pool, buffer), got 1 of them.",
    ),
    # --- trees
    (
        "commit_conv_state",
        {"conv_windows": [zeros(*SPEC.windows_shape)]},
        "`conv_windows`: expected the pytree of conv_state, PyTreeDef(*), got PyTreeDef([*]).",
    ),
    (
        "commit_conv_state",
        {"spec": [SPEC, SPEC]},
        "`spec`: expected one ConvCacheSpec or a prefix of conv_state's pytree PyTreeDef(*), got PyTreeDef([*, *]).",
    ),
    # --- weights
    (
        "prepare_conv_weight",
        {"weight": zeros(96, 4, 4)},
        "`weight`: expected channel, tap or channel, 1, tap or layer, channel, 1, tap, got (96, 4, 4).",
    ),
    ("prepare_conv_weight", {"bias": zeros(95)}, "`bias`: expected (96,) like the weight, got (95,)."),
    ("prepare_conv_weight", {"weight": zeros(96, 4, dtype=jnp.int32)}, f"`weight`: {FLOATS}, got int32. {UNCAST}"),
    (
        CONVOLUTIONS,
        {"weight": jax_impl.prepare_conv_weight(zeros(96, 3))},
        "`weight.taps`: expected tap, channel = (4, 96), got (3, 96).",
    ),
    (
        CONVOLUTIONS,
        {"weight": jax_impl.prepare_conv_weight(zeros(3, 96, 1, 4), zeros(3, 96))},
        "`weight.taps`: expected layer, tap, channel = (2, 4, 96), got (3, 4, 96).\n"
        "`weight.bias`: expected layer, channel = (2, 96), got (3, 96).",
    ),
    (
        CONVOLUTIONS,
        {"weight": jax_impl.prepare_conv_weight(zeros(96, 4)), "bias": zeros(96)},
        "`bias`: expected None with a ConvWeight, got an array. Give it to prepare_conv_weight.",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param(name, changes, message, id=f"{name}-{'-'.join(changes)}-{i}")
        for i, (names, changes, message) in enumerate(CASES)
        for name in ([names] if isinstance(names, str) else names)
    ],
)
def test_message(name: str, changes: dict[str, Any], message: str) -> None:
    """One argument of a good call is exchanged for a bad one."""
    call = functools.partial(getattr(jax_impl, name), **good(name) | changes)
    assert message_of(call) == message


def test_pallas_needs_a_gpu() -> None:
    message = (
        '`implementation`: expected an NVIDIA GPU for "pallas", got platform cpu. '
        'Use "pallas_interpret" to run the kernel on the CPU, or "xla".'
    )
    spec = ONE_TOKEN
    state, windows = zeros(*spec.state_shape), zeros(*spec.windows_shape)
    options: dict[str, Any] = {"spec": spec, "implementation": "pallas"}
    step: dict[str, Any] = {"state_indices": ints(1), "layer": 0, **options}
    weight = zeros(128, 4)
    for call in (
        lambda: jax_impl.commit_conv_state(state, windows, ints(1), ints(1), **options),
        lambda: jax_impl.causal_conv1d_verify(zeros(1, 1, 128), state, windows, weight, **step),
        lambda: jax_impl.causal_conv1d_update(zeros(1, 128), state, weight, **step),
    ):
        assert message_of(call) == message


def test_two_reasons_against_the_kernel_in_one_message() -> None:
    call = functools.partial(jax_impl.commit_conv_state, **good("commit_conv_state") | {"implementation": "pallas"})
    assert message_of(call) == (
        "`implementation`: expected conv_dim % 128 = 0 for the Pallas kernels, got conv_dim = 96. "
        'Use "xla", or None to fall back to it.\n'
        '`implementation`: expected an NVIDIA GPU for "pallas", got platform cpu. '
        'Use "pallas_interpret" to run the kernel on the CPU, or "xla".'
    )


def test_everything_wrong_with_one_commit() -> None:
    call = functools.partial(
        jax_impl.commit_conv_state,
        zeros(2, 5, 3, 95, dtype=jnp.float16),
        zeros(2, 3, 5, 96),
        ints(1, 2),
        ints(1),
        spec=SPEC,
        window_rows=[0.5, 1.5],
        null_slot=True,
        track_indices=ints(1, 2, 3),
        implementation="cuda",  # type: ignore[arg-type]
    )
    assert message_of(call).splitlines() == [
        "`num_accepted_tokens`: expected request = (2,), got (1,).",
        "`window_rows`: expected an integer array, got float64. Index arrays are int32.",
        "`track_indices`: expected request = (2,), got (3,).",
        "`track_num_tokens`: expected given together with the other track argument, got None.",
        "`null_slot`: expected a Python integer or None, got True. It is static: part of the program.",
        "`implementation`: expected None or one of xla, pallas, pallas_interpret, got 'cuda'.",
        "`conv_state`: expected dtype bfloat16 of the spec, got float16. Pool and buffer are never cast.",
        "`conv_state`: expected layer, slot, column, channel = (2, 5, 3, 96), got (2, 5, 3, 95).",
    ]


def test_everything_wrong_with_one_verify() -> None:
    changes: dict[str, Any] = {
        "conv_windows": zeros(2, 3, 5, 97),
        "weight": zeros(96, 5),
        "bias": zeros(1),
        "layer": 7,
        "activation": "relu",
        "num_valid_tokens": [True, True],
    }
    call = functools.partial(jax_impl.causal_conv1d_verify, **good("causal_conv1d_verify") | changes)
    assert sorted(message_of(call).splitlines()) == sorted(
        [
            "`weight`: expected channel, tap = (96, 4), got (96, 5). The last tap meets the current token.",
            "`bias`: expected channel = (96,), got (1,).",
            "`layer`: expected 0 to num_layers - 1 = 1, got 7.",
            "`activation`: expected None or \"silu\", got 'relu'.",
            "`num_valid_tokens`: expected an integer array, got bool. Index arrays are int32.",
            f"{WINDOWS}, got (2, 3, 5, 97).",
        ]
    )


def test_every_group_is_checked() -> None:
    """Two conv groups, each with a mistake of its own."""
    other = ConvCacheSpec(1, 5, 3, 8, 3, 3, "float32")
    call = functools.partial(
        jax_impl.commit_conv_state,
        (zeros(*SPEC.state_shape), zeros(1, 5, 3, 8, dtype=jnp.float32)),
        (zeros(2, 3, 4, 96), zeros(*other.windows_shape, dtype=jnp.float32)),
        ints(1),
        ints(1),
        spec=(SPEC, other),
    )
    assert message_of(call).splitlines() == [
        f"{WINDOWS.replace('conv_windows', 'conv_windows[0]')}, got (2, 3, 4, 96).",
        "`conv_state[1]`: expected layer, slot, column, channel = (1, 5, 2, 8), got (1, 5, 3, 8).",
    ]


def test_errors_come_at_trace_time_and_leave_a_donated_pool_alone() -> None:
    pool = jnp.ones(SPEC.state_shape, SPEC.dtype)
    arguments = good("commit_conv_state") | {"num_accepted_tokens": ints(1, 2, 3)}
    del arguments["conv_state"], arguments["spec"]
    step = jax.jit(functools.partial(jax_impl.commit_conv_state, spec=SPEC), donate_argnames="conv_state")
    with pytest.raises(ValueError, match="`num_accepted_tokens`: expected request"):
        step(conv_state=pool, **arguments)
    assert not pool.is_deleted()
    assert bool((pool == 1).all())


# --- the layout -------------------------------------------------------------------------------------------------------


def test_everything_wrong_with_one_spec() -> None:
    bad: dict[str, Any] = {
        "num_layers": 0,
        "num_slots": 2**31,
        "max_requests": -1,
        "conv_dim": 1.5,
        "width": 1,
        "num_draft_tokens": True,
        "dtype": "float8_e4m3fn",
        "axis_order": "NCW",
        "storage": "tree",
        "state_len": 3,
    }
    assert message_of(lambda: ConvCacheSpec(**bad)).splitlines() == [
        "`num_layers`: expected an integer from 1 to 2^31-1, got 0.",
        "`num_slots`: expected an integer from 1 to 2^31-1, got 2147483648.",
        "`max_requests`: expected an integer from 0 to 2^31-1, got -1.",
        "`conv_dim`: expected an integer, got 1.5.",
        "`width`: expected an integer from 2 to 2^31-1, got 1.",
        "`num_draft_tokens`: expected an integer, got True.",
        "`dtype`: expected one of bfloat16, float16, float32, got 'float8_e4m3fn'.",
        "`axis_order`: expected one of time_major, channel_major, got 'NCW'.",
        "`storage`: expected one of sliding, dense, inputs, got 'tree'.",
        "`state_len`: expected width - 1 = 0 or width = 1, got 3.",
    ]


@pytest.mark.parametrize("state_len", [2, 5, True, "3"])
def test_state_len_is_one_of_two(state_len: Any) -> None:
    changes: dict[str, Any] = {"state_len": state_len}
    expected = "an integer" if state_len in (True, "3") else "width - 1 = 3 or width = 4"
    message = message_of(lambda: ConvCacheSpec(1, 1, 1, 8, 4, 4, **changes))
    assert message == f"`state_len`: expected {expected}, got {state_len!r}."


@pytest.mark.parametrize("count", [0, -1, 5, 2**31])
def test_window_columns_of_a_skipped_count(count: int) -> None:
    message = message_of(lambda: ConvCacheSpec(1, 1, 1, 8, 4, 4).window_columns(count))
    assert message == f"`num_accepted_tokens`: expected 1 to num_draft_tokens = 4, got {count}."


@pytest.mark.parametrize("topk", [0, -1, True, 1.0, None])
def test_topk_is_a_positive_integer(topk: Any) -> None:
    message = message_of(lambda: jax_impl.use_storage(topk))
    assert message == f"`topk`: expected an integer of at least 1, got {topk!r}."


@pytest.mark.parametrize(
    ("parents", "request_and_token", "limit", "got"),
    [
        ([0], (0, 0), -1, "0"),
        ([-1, 1], (0, 1), 0, "1"),
        ([[-1, 0], [-1, -2]], (1, 1), 0, "-2"),
        ([-1, 0, True], (0, 2), 1, "True"),
        ([-1, 0.0], (0, 1), 0, "0.0"),
    ],
)
def test_links_point_backwards(parents: Any, request_and_token: tuple[int, int], limit: int, got: str) -> None:
    request, token = request_and_token
    assert message_of(lambda: jax_impl.use_storage(1, parents)) == (
        f"`parents`: expected an index from -1 to {limit} for token {token} of request {request}, got {got}. "
        "A parent comes before its child; -1 is the committed state."
    )
