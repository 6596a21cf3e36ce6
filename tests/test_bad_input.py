"""Bad input, as a table: every argument of every public function has what it refuses, and the message in full.

`COMMON` has the values for an argument of that name wherever it occurs, `OWN` those of one function. A test fails when
a public function, or one of its arguments, has no entry, so a new one is noticed: give it a value in `bad_input_calls`
and a line here. `tests/test_errors.py` has more messages of the eight functions that everybody calls.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from jax_impl import capacity, debug, presets, sharding
from jax_impl.layout import ConvCacheSpec
from tests import adapters, bad_input_calls
from tests.bad_input_calls import OF_INPUTS, SPEC, ints, zeros

JAX = bad_input_calls.jax_calls()
# Pytrees, which JAX builds with placeholders in them: what they hold is checked where they are used.
CONTAINERS = {"ConvCache", "ConvWeight", "HybridCache"}


class Traced:
    """Stands for an int32 scalar that is traced where something static is needed."""


class Deleted:
    """Stands for an array that was donated, made anew for each test."""

    def __init__(self, *shape: int, dtype: Any = jnp.bfloat16) -> None:
        self.shape, self.dtype = shape, dtype

    def array(self) -> jax.Array:
        array = jnp.zeros(self.shape, self.dtype) + jnp.zeros((), self.dtype)
        array.delete()
        return array


def gone(name: str, *shape: int) -> str:
    return (
        f"`{name}`: expected an array with its content, got a donated or deleted array of shape {shape}. "
        "Go on with what the call that it was donated to returned."
    )


FLOATS = "expected dtype bfloat16, float16, float32"
STATE = "`conv_state`: expected layer, slot, column, channel = (2, 5, 3, 96)"
WINDOWS = "`conv_windows`: expected layer, row, column, channel = (2, 3, 5, 96)"
NO_CAST = "Pool and buffer are never cast."
STATIC = "It is static: part of the program."
FLAT = "Keep states that do not share this size or dtype in a pool of their own; torch_ref takes any envelope."
TRACED = "traced int32 array of shape ()"

Entries = list[tuple[Any, str]]


def size(name: str, low: int, bad: int) -> Entries:
    return [
        (bad, f"`{name}`: expected an integer from {low} to 2^31-1, got {bad}."),
        (Traced, f"`{name}`: expected an integer, got {TRACED}."),
    ]


def index(name: str) -> Entries:
    return [
        ([0.5, 1.5], f"`{name}`: expected an integer array, got float64. Index arrays are int32."),
        (np.zeros((2, 1), np.int32), f"`{name}`: expected request = (2,), got (2, 1)."),
        (ints(1, 2, 3), f"`{name}`: expected request = (2,), got (3,)."),
        (Deleted(2, dtype=jnp.int32), gone(name, 2)),
    ]


def table(name: str, requests: str = "2", tokens: str = "3") -> Entries:
    """Of an index array `[B, D]`."""
    shape = f"`{name}`: expected request, token = ({requests}, {tokens}), got"
    no_integers = f"`{name}`: expected an integer array, got"
    return [
        (ints(1, 2), f"{shape} (2,)."),
        (ints(1, 2, 3, 4, 5, 6).reshape(2, 3, 1), f"{shape} (2, 3, 1)."),
        (np.zeros((3, 3), np.int32), f"{shape} (3, 3)."),
        ([[-1, 0, 1]], f"{shape} (1, 3)."),
        ([[-1, 0], [-1, 0, 1]], f"{no_integers} a ragged or mixed list. Index arrays are int32."),
        ([[-1, 0, 0.5], [-1, 0, 1]], f"{no_integers} a ragged or mixed list. Index arrays are int32."),
        (zeros(2, 3), f"{no_integers} bfloat16. Index arrays are int32."),
        (np.ones((2, 3), bool), f"{no_integers} bool. Index arrays are int32."),
        (Deleted(2, 3, dtype=jnp.int32), gone(name, 2, 3)),
        *(
            []
            if tokens == "D"
            else [([[-1, 0], [-1, 0]], f"{shape} (2, 2)."), (np.zeros((2, 4), int), f"{shape} (2, 4).")]
        ),
    ]


COMMON: dict[str, Entries] = {
    **{name: table(name) for name in ("parents", "resume_path", "accepted_path")},
    "resume_tokens": [
        *index("resume_tokens"),
        (None, "`resume_path`: expected None without resume_tokens, got an array."),
    ],
    **{name: index(name) for name in ("num_accepted_tokens", "window_rows", "num_valid_tokens", "track_indices")},
    **{name: index(name) for name in ("track_num_tokens", "step_rows", "lengths")},
    "state_indices": [
        (zeros(2), "`state_indices`: expected an integer array, got bfloat16. Index arrays are int32."),
        (np.zeros((2, 1), np.int32), "`state_indices`: expected request = (B,), got (2, 1)."),
        (Deleted(2, dtype=jnp.int32), gone("state_indices", 2)),
    ],
    "has_initial_state": [
        (ints(1, 0), "`has_initial_state`: expected a bool array, got int32."),
        ([True], "`has_initial_state`: expected request = (2,), got (1,)."),
        (Deleted(2, dtype=jnp.bool_), gone("has_initial_state", 2)),
    ],
    "conv_state": [
        (zeros(2, 5, 96, 3), f"{STATE}, got (2, 5, 96, 3)."),
        (zeros(3), f"{STATE} or, for one layer, slot, column, channel = (5, 3, 96), got (3,)."),
        (
            zeros(2, 5, 3, 96, dtype=jnp.float16),
            f"`conv_state`: expected dtype bfloat16 of the spec, got float16. {NO_CAST}",
        ),
        (Deleted(2, 5, 3, 96), gone("conv_state", 2, 5, 3, 96)),
    ],
    "conv_windows": [
        (zeros(2, 3, 6, 96), f"{WINDOWS}, got (2, 3, 6, 96)."),  # of one draft token more
        (
            zeros(2, 3, 5, 96, dtype=jnp.float32),
            f"`conv_windows`: expected dtype bfloat16 of the spec, got float32. {NO_CAST}",
        ),
        (Deleted(2, 3, 5, 96), gone("conv_windows", 2, 3, 5, 96)),
    ],
    "x": [
        ("x", "`x`: expected an array, got str."),
        (None, "`x`: expected an array, got NoneType."),
    ],
    "weight": [
        (zeros(4, 96), "`weight`: expected channel, tap = (96, 4), got (4, 96). The last tap meets the current token."),
        (zeros(96, 4, dtype=jnp.int8), f"`weight`: {FLOATS}, got int8. Nothing is cast silently."),
        (Deleted(96, 4), gone("weight", 96, 4)),
    ],
    "bias": [
        (zeros(97), "`bias`: expected channel = (96,), got (97,)."),
        (zeros(96, dtype=jnp.int32), f"`bias`: {FLOATS}, got int32. Nothing is cast silently."),
        (Deleted(96), gone("bias", 96)),
    ],
    "spec": [
        ("Qwen3.5", "`spec`: expected a ConvCacheSpec, got str."),
        (7, "`spec`: expected a ConvCacheSpec, got int."),
    ],
    "layer": [
        (2, "`layer`: expected 0 to num_layers - 1 = 1, got 2."),
        (-1, "`layer`: expected 0 to num_layers - 1 = 1, got -1."),
        (1.5, "`layer`: expected an integer or an integer scalar, got 1.5."),
        (ints(1), "`layer`: expected scalar = (), got (1,)."),
        (Deleted(dtype=jnp.int32), gone("layer")),
    ],
    "null_slot": [
        (1.5, f"`null_slot`: expected a Python integer or None, got 1.5. {STATIC}"),
        (Traced, f"`null_slot`: expected a Python integer or None, got {TRACED}. {STATIC}"),
    ],
    "activation": [("gelu", "`activation`: expected None or \"silu\", got 'gelu'.")],
    "implementation": [
        ("triton", "`implementation`: expected None or one of xla, pallas, pallas_interpret, got 'triton'."),
        (
            np.zeros(2),
            "`implementation`: expected None or one of xla, pallas, pallas_interpret, got float64 array of shape (2,).",
        ),
    ],
    "cache": [(7, "`cache`: expected a ConvCache, a pytree of them or a HybridCache, got int.")],
    "step_states": [
        (
            zeros(2, 3, 3, 8),
            "`step_states`: expected layer, row, token, state = (2, 3, 3, 7), got (2, 3, 3, 8). "
            "`{state}` has the shape (2, 5, 7).",
        ),
        (
            zeros(2, 3, 3, 7, dtype=jnp.float32),
            "`step_states`: expected dtype bfloat16 of the pool, got float32. States are never cast.",
        ),
        (Deleted(2, 3, 3, 7), gone("step_states", 2, 3, 3, 7)),
    ],
    "mesh": [("m", "`mesh`: expected a jax.sharding.Mesh, got str.")],
    "data_axis": [
        ("batch", "`data_axis`: expected None or an axis of the mesh (data = 1, tensor = 1), got 'batch'."),
        (3, "`data_axis`: expected None or the name of a mesh axis, got 3."),
    ],
    "tensor_axis": [
        ("data", "`tensor_axis`: expected another axis than data_axis, got 'data'."),
        (3, "`tensor_axis`: expected None or the name of a mesh axis, got 3."),
    ],
    "parts": [("q", "`parts`: expected one ConvPart or more, as get_preset(…).parts, got 'q'.")],
    "num_ranks": [
        (0, "`num_ranks`: expected an integer of at least 1, got 0."),
        (Traced, f"`num_ranks`: expected an integer of at least 1, got {TRACED}."),
    ],
    "tp": [(0, "`tp`: expected an integer of at least 1, got 0.")],
    "envelope_elements": [
        (
            289,
            f"`envelope_elements`: expected a multiple of one state, S * conv_dim = 288 elements, got 289. {FLAT}",
        ),
        (
            Traced,
            f"`envelope_elements`: expected a multiple of one state, S * conv_dim = 288 elements, got {TRACED}. {FLAT}",
        ),
    ],
    "state_len": [(9, "`state_len`: expected width - 1 = 3 or width = 4, got 9.")],
    "num_slots": size("num_slots", 1, -1),
    "max_requests": size("max_requests", 0, -1),
    "num_draft_tokens": size("num_draft_tokens", 1, -1),
    "num_layers": size("num_layers", 1, 0),
    "conv_dim": size("conv_dim", 1, -96),
    "dtype": [("int8", "`dtype`: expected one of bfloat16, float16, float32, got 'int8'.")],
    "axis_order": [("NCW", "`axis_order`: expected one of time_major, channel_major, got 'NCW'.")],
    "storage": [("tree", "`storage`: expected one of sliding, dense, inputs, got 'tree'.")],
    "axis": [(1.5, "`axis`: expected an integer, got 1.5.")],
    "array": [(7, "`array`: expected an array, got 7."), (Deleted(4, 96), gone("array", 4, 96))],
}

_AXES = "channel, tap or channel, 1, tap or layer, channel, 1, tap"
_CHECKPOINT: Entries = [
    (zeros(4), f"`weight`: expected {_AXES}, got (4,)."),
    (zeros(97, 4), "`weight`: expected 96 channels on axis -2, got shape (97, 4)."),
    (Deleted(96, 4), gone("weight", 96, 4)),
]
_NO_NAME: dict[str, Entries] = {name: COMMON[name][1:] for name in ("data_axis", "tensor_axis")}  # there is no mesh
_NOT_SLIDING = 'None with storage "sliding"'
_VERIFY: dict[str, Entries] = {
    "x": [
        (zeros(2, 4, 96), "`x`: expected request, token, channel = (2, 3, 96), got (2, 4, 96)."),
        (
            None,
            '`x`: expected an array with storage "sliding", got None. Only rows of inputs can hold it already.',
        ),
    ],
    "resume_windows": [
        (
            zeros(2, 3, 5, 96),
            f"`resume_windows`: expected {_NOT_SLIDING}, got an array. It resumes from the row that it writes.",
        ),
        (7, f"`resume_windows`: expected {_NOT_SLIDING}, got 7. It resumes from the row that it writes."),
    ],
}


def inputs_array(name: str) -> Entries:
    """Of a buffer with rows of inputs."""
    shape = f"`{name}`: expected layer, row, column, channel = (2, 3, 3, 96)"
    return [
        (zeros(2, 3, 4, 96), f"{shape}, got (2, 3, 4, 96)."),
        (zeros(2, 3, 96, 3), f"{shape}, got (2, 3, 96, 3)."),
        (7, f"`{name}`: expected an array, got int."),
        (
            zeros(2, 3, 3, 96, dtype=jnp.float32),
            f"`{name}`: expected dtype bfloat16 of the spec, got float32. {NO_CAST}",
        ),
        (Deleted(2, 3, 3, 96), gone(name, 2, 3, 3, 96)),
    ]


_VERIFY_INPUTS: dict[str, Entries] = {
    "x": _VERIFY["x"][:1],
    "conv_windows": inputs_array("conv_windows"),
    "resume_windows": [
        *inputs_array("resume_windows"),
        (zeros(3, 3, 96), "`resume_windows`: expected layer, row, column, channel = (2, 3, 3, 96), got (3, 3, 96)."),
        (
            None,
            "`resume_windows`: expected the array that holds the inputs of the step before, where x is None, got None. "
            "The buffer holds those of this step.",
        ),
    ],
    "resume_tokens": [
        *index("resume_tokens"),
        (
            None,
            "`resume_path`: expected None without resume_tokens, got an array.\n"
            "`resume_windows`: expected None without resume_tokens, got an array.",
        ),
    ],
}
_COMMIT_INPUTS: dict[str, Entries] = {"conv_windows": inputs_array("conv_windows")}
_GATHER: dict[str, Entries] = {
    "conv_state": [
        (
            zeros(2, 5, 3, 96),
            f"`conv_state`: expected {_NOT_SLIDING}, got an array. Its rows hold whole windows.",
        )
    ],
    "state_indices": [
        ([1, 2], f"`state_indices`: expected {_NOT_SLIDING}, got an array. Its rows hold whole windows."),
    ],
    "null_slot": [(0, f"`null_slot`: expected {_NOT_SLIDING}, got 0. Its rows hold whole windows.")],
    "num_accepted_tokens": [
        ([0.5], "`num_accepted_tokens`: expected an integer array, got float64. Index arrays are int32."),
        ([[1, 2]], "`num_accepted_tokens`: expected request = (B,), got (1, 2)."),
        (Deleted(2, dtype=jnp.int32), gone("num_accepted_tokens", 2)),
    ],
}
_INPUTS_ONLY = "The rows hold the new inputs only."
_GATHER_INPUTS: dict[str, Entries] = {
    "num_accepted_tokens": _GATHER["num_accepted_tokens"],
    "conv_windows": inputs_array("conv_windows"),
    "conv_state": [
        *(entry for entry in COMMON["conv_state"] if "for one layer" not in entry[1]),
        (zeros(3), f"{STATE}, got (3,)."),
        (zeros(5, 3, 96), f"{STATE}, got (5, 3, 96)."),
        (None, f'`conv_state`: expected the pool with storage "inputs", got None. {_INPUTS_ONLY}'),
    ],
    "state_indices": [
        *index("state_indices"),
        (None, f'`state_indices`: expected the slot of each request with storage "inputs", got None. {_INPUTS_ONLY}'),
    ],
}
_WIDTH: dict[str, Entries] = {
    "width": [
        (
            0,
            "`width`: expected an integer from 2 to 2^31-1, got 0.\n"
            "`state_len`: expected width - 1 = -1 or width = 0, got 3.",
        )
    ]
}
OWN: dict[str, dict[str, Entries]] = {
    "ConvCacheSpec": {
        "width": [
            (
                1,
                "`width`: expected an integer from 2 to 2^31-1, got 1.\n"
                "`state_len`: expected width - 1 = 0 or width = 1, got 3.",
            )
        ]
    },
    "accepted_from_index": {
        "accept_index": [
            (np.zeros((2, 3)), "`accept_index`: expected an array of signed integers, got float64."),
            (np.zeros(3, np.int32), "`accept_index`: expected request, token = (B, D), got (3,)."),
            (Deleted(2, 3, dtype=jnp.int32), gone("accept_index", 2, 3)),
        ]
    },
    "allocate_conv_cache": {
        "sharding": [("gpu", "`sharding`: expected a jax.sharding.Sharding or a device, got str.")]
    },
    "causal_conv1d_verify": _VERIFY,
    "sharded_verify": _VERIFY,
    f"causal_conv1d_verify{OF_INPUTS}": _VERIFY_INPUTS,
    f"sharded_verify{OF_INPUTS}": _VERIFY_INPUTS,
    f"commit_conv_state{OF_INPUTS}": _COMMIT_INPUTS,
    f"sharded_commit{OF_INPUTS}": _COMMIT_INPUTS,
    f"gather_windows{OF_INPUTS}": _GATHER_INPUTS,
    f"sharded_gather{OF_INPUTS}": _GATHER_INPUTS,
    "path_to_node": {
        "parents": table("parents", tokens="D"),
        "nodes": [
            ([0.5], "`nodes`: expected an integer array, got float64. Index arrays are int32."),
            ([[1, 2]], "`nodes`: expected request = (B,), got (1, 2)."),
            (ints(1, 2, 3), "`parents`: expected request, token = (3, D), got (2, 3)."),
            (Deleted(2, dtype=jnp.int32), gone("nodes", 2)),
        ],
    },
    "causal_conv1d_update": {"x": [(zeros(2, 1, 96), "`x`: expected request, channel = (2, 96), got (2, 1, 96).")]},
    "causal_conv1d_prefill": {
        "x": [(np.zeros((2, 7, 96)), f"`x`: {FLOATS}, got float64. Nothing is cast silently.")]
    },
    "sharded_prefill": {"x": [(np.zeros((2, 7, 96)), f"`x`: {FLOATS}, got float64. Nothing is cast silently.")]},
    "commit_recurrent_state": {
        "state": [
            (
                zeros(2, 5, 8),
                "`step_states`: expected layer, row, token, state = (2, 3, 3, 8), got (2, 3, 3, 7). "
                "`state` has the shape (2, 5, 8).",
            ),
            (Deleted(2, 5, 7), gone("state", 2, 5, 7)),
        ],
        "layer_axis": [
            (1, f"`layer_axis`: expected True or False, got 1. {STATIC}"),
            (Traced, f"`layer_axis`: expected True or False, got {TRACED}. {STATIC}"),
        ],
    },
    "envelope_slots": {
        "first_element": [
            (-288, f"`first_element`: expected a multiple of one state, S * conv_dim = 288 elements, got -288. {FLAT}")
        ]
    },
    "localize_slots": {
        "slots": [
            ([[1], [2]], "`slots`: expected request = (B,), got (2, 1)."),
            (Deleted(2, dtype=jnp.int32), gone("slots", 2)),
        ],
        "rank": [
            (-1, "`rank`: expected an integer from 0 to 2^31-1 or an integer scalar, got -1."),
            (
                zeros(),
                "`rank`: expected an integer from 0 to 2^31-1 or an integer scalar, got bfloat16 array of shape ().",
            ),
            (Deleted(dtype=jnp.int32), gone("rank")),
        ],
        "slots_per_rank": [
            (-1, "`slots_per_rank`: expected an integer from 0 to 2^31-1, got -1."),
            (Traced, f"`slots_per_rank`: expected an integer from 0 to 2^31-1, got {TRACED}."),
        ],
    },
    "gather_windows": _GATHER,
    "sharded_gather": _GATHER,
    "partition_specs": _NO_NAME,
    "sharding.cache_specs": {
        **_NO_NAME,
        "cache": [(7, "`cache`: expected a ConvCache, a pytree of them or a HybridCache, got 7.")],
    },
    "prepare_conv_weight": {
        "weight": [
            (zeros(96, 4, 4), f"`weight`: expected {_AXES}, got (96, 4, 4)."),
            (Deleted(96, 1, 4), gone("weight", 96, 1, 4)),
        ],
        "bias": [
            (zeros(96, dtype=jnp.int32), f"`bias`: {FLOATS}, got int32. Nothing is cast silently."),
            (zeros(97), "`bias`: expected (96,) like the weight, got (97,)."),
            (Deleted(96), gone("bias", 96)),
        ],
    },
    "shard_conv_weights": {"weight": _CHECKPOINT},
    "sharding.unshard_conv_weights": {"weight": _CHECKPOINT},
    "track_tokens_at_boundary": {
        "seq_lens": [
            (zeros(2), "`seq_lens`: expected an array of signed integers, got bfloat16."),
            (Deleted(2, dtype=jnp.int32), gone("seq_lens", 2)),
        ],
        "interval": [
            (0, "`interval`: expected a Python integer from 1 to 2^31 - 1, got 0."),
            (Traced, f"`interval`: expected a Python integer from 1 to 2^31 - 1, got {TRACED}."),
        ],
    },
    "use_storage": {
        "topk": [(-1, "`topk`: expected an integer of at least 1, got -1.")],
        "parents": [(7, "`parents`: expected [token] or [request, token], got 7.")],
    },
    "capacity.saving": _WIDTH,
    "capacity.design_table": {
        **_WIDTH,
        "draft_tokens": [
            (3, "`draft_tokens`: expected integers, one or more, got 3."),
            ([0], "`num_draft_tokens`: expected an integer from 1 to 2^31-1, got 0."),
        ],
    },
    "capacity.saving_table": {
        "widths": [(4, "`widths`: expected integers, one or more, got 4.")],
        "draft_tokens": [(0.5, "`draft_tokens`: expected integers, one or more, got 0.5.")],
    },
    "presets.get_preset": {
        "name": [
            ("gpt", "`name`: expected a published model, got 'gpt'. No name is close; `python -m jax_impl plan` lists "
             "them all."),
        ]
    },
}  # fmt: skip

# What everything else is checked against: a wrong one is refused on its own.
STOPS = {"spec", "mesh", "cache", "data_axis", "tensor_axis", "layer_axis", "parts", "num_ranks"}
# Is right or wrong by another argument: with that one wrong too, nothing can be said about it.
DEPENDS = {"state", "state_len"}


def entries(function: str, parameter: str, common: Any = COMMON, own: Any = OWN) -> Entries:
    found = own.get(function, {}).get(parameter) or common.get(parameter, [])
    state = "cache.recurrent_state" if "after_verify" in function else "state"
    return [(value, message.replace("{state}", state)) for value, message in found]


def cases(calls: dict[str, Any], common: Any = COMMON, own: Any = OWN) -> list[Any]:
    return [
        pytest.param(function, parameter, value, message, id=f"{function}-{parameter}-{number}")
        for function, (_, good) in calls.items()
        for parameter in good
        for number, (value, message) in enumerate(entries(function, parameter, common, own))
    ]


def message_of(call: Callable[..., Any], good: dict[str, Any], parameter: str, value: Any) -> str:
    """The refusal of a good call in which one argument is exchanged."""

    def run(given: Any) -> Any:
        return call(**{**good, parameter: given})

    run = jax.jit(run) if value is Traced else run
    given = jnp.int32(1) if value is Traced else value.array() if isinstance(value, Deleted) else value
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole message is compared)
        run(given)
    return str(caught.value)


@pytest.mark.parametrize("function", JAX)
def test_the_good_call_works(function: str) -> None:
    """Else the tests below would test something else than they say."""
    call, good = JAX[function]
    call(**good)


@pytest.mark.parametrize(("function", "parameter", "value", "message"), cases(JAX))
def test_message(function: str, parameter: str, value: Any, message: str) -> None:
    call, good = JAX[function]
    assert message_of(call, good, parameter, value) == message
    live = [leaf for leaf in jax.tree.leaves(list(good.values())) if isinstance(leaf, jax.Array)]
    assert not any(leaf.is_deleted() for leaf in live)


def combined(calls: dict[str, Any], common: Any, own: Any) -> list[Any]:
    return [
        pytest.param(function, parameters, id=function)
        for function, (_, good) in calls.items()
        if len(
            parameters := [
                name for name in good if name not in STOPS | DEPENDS and entries(function, name, common, own)
            ]
        )
        > 1
    ]


@pytest.mark.parametrize(("function", "parameters"), combined(JAX, COMMON, OWN))
def test_all_problems_of_a_call_at_once(function: str, parameters: list[str]) -> None:
    """Every argument wrong in its own way: the one message names each, in whatever words."""
    call, good = JAX[function]
    bad = {name: entries(function, name)[0][0] for name in parameters}
    with pytest.raises(ValueError, match="expected") as caught:
        call(**{**good, **bad})
    named = set(re.findall(r"^`(\w+)", str(caught.value), re.MULTILINE))
    assert named >= set(parameters)


# ---- nothing is missing ----------------------------------------------------------------------------------------------

PLAIN_MODULES = {"debug": debug, "capacity": capacity, "presets": presets, "sharding": sharding}
# Of these modules: what takes no argument that can be wrong, or prints what it is given.
WITHOUT_INPUT = {"capacity.published_table", "capacity.times", "capacity.gib"}


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Everything that a user may call, by the name that the table has for it."""
    for name in jax_impl.__all__:
        if name not in CONTAINERS:
            yield name, getattr(jax_impl, name)
    for module, content in PLAIN_MODULES.items():
        for name, value in vars(content).items():
            if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != content.__name__:
                continue
            if name not in jax_impl.__all__ and f"{module}.{name}" not in WITHOUT_INPUT:
                yield f"{module}.{name}", value
    for owner in (presets.Preset, presets.ConvPart):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield f"presets.{owner.__name__}.{name}", value


def without_entry(functions: Any, calls: dict[str, Any], common: Any, own: Any) -> list[str]:
    missing = []
    for name, function in functions:
        parameters = [one for one in inspect.signature(function).parameters if one != "self"]
        good = calls[name][1] if name in calls else {}
        missing += [
            f"{name}({parameter})"
            for parameter in parameters
            if parameter not in good or not entries(name, parameter, common, own)
        ]
    return missing


def test_every_argument_has_an_entry() -> None:
    """A new argument needs a good value in `bad_input_calls` and a bad one, with its message, here."""
    assert without_entry(public_functions(), JAX, COMMON, OWN) == []
    assert {name for name, _ in public_functions()} == {name.removesuffix(OF_INPUTS) for name in JAX}


# ---- anything at all -------------------------------------------------------------------------------------------------

JUNK: dict[str, Any] = {
    "None": None,
    "a bool": True,
    "a float": float("nan"),
    "a negative number": -1,
    "a number past int64": 2**70,
    "a string": "x",
    "an object": object(),
    "a ragged list": [[1], [2, 3]],
    "a dict": {"a": 1.5},
    "a type": int,
    "float64 of three axes": np.zeros((2, 2, 2)),
    "objects": np.array([object(), 1]),
    "complex": jnp.zeros((2, 3), jnp.complex64),
    "five axes": jnp.zeros((1,) * 5),
    "no axes": jnp.zeros((), jnp.bfloat16),
    "deleted": Deleted(2, 5, 3, 96),
    "deleted integers": Deleted(2, dtype=jnp.int32),
}  # fmt: skip
# Each call of a sharded function is traced; they hand everything to the plain ones, so that a few kinds do.
SOME_JUNK = {what: JUNK[what] for what in ("an object", "float64 of three axes", "deleted")}
LINE = re.compile(r"`[^`]+`: expected .+, got .+\.")


@pytest.mark.parametrize("function", JAX)
def test_anything_is_taken_or_refused_by_name(function: str) -> None:
    """No other error than a `ValueError` whose lines all have the form; no line is longer than a paragraph."""
    call, good = JAX[function]
    for parameter in good:
        for what, value in (SOME_JUNK if function.startswith("sharded_") else JUNK).items():
            try:
                call(**{**good, parameter: value.array() if isinstance(value, Deleted) else value})
            except ValueError as error:
                lines = str(error).splitlines()
                assert all(LINE.match(line) for line in lines), (parameter, what, lines)
                assert max(map(len, lines)) < 500, (parameter, what)


# ---- engines ---------------------------------------------------------------------------------------------------------

ENGINE: dict[str, Entries] = {
    "config": [({}, "`config`: expected a ModelConfig, got dict.")],
    "parameters": [({}, "`parameters`: expected a Parameters, got dict.")],
    "max_requests": [(0, "`max_requests`: expected an integer of at least 1, got 0.")],
    "num_slots": [(-1, "`num_slots`: expected an integer from 1 to 2^31-1, got -1.")],
    "max_len": [(1, "`max_len`: expected 2 to the model's 4096 positions, got 1.")],
    "num_draft_tokens": [(0, "`num_draft_tokens`: expected an integer from 1 to 2^31-1, got 0.")],
    "drafter": [(3, "`drafter`: expected None or a Drafter, got 3.")],
    "stop_token_ids": [(["end"], "`stop_token_ids`: expected None or integers, got ['end'].")],
    "axis_order": COMMON["axis_order"],
    "storage": COMMON["storage"],
    "implementation": COMMON["implementation"],
}


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from jax_impl.model.tiny import tiny_model

    return tiny_model(num_hidden_layers=2, full_attention_interval=2)


@pytest.mark.parametrize("parameter", ENGINE)
def test_an_engine_refuses(model: Any, parameter: str) -> None:
    from jax_impl.model.decode import Engine

    good = dict(zip(("config", "parameters"), model, strict=True)) | {"max_requests": 2, "max_len": 16}
    for value, message in ENGINE[parameter]:
        assert message_of(Engine, good, parameter, value) == message
    assert set(inspect.signature(Engine).parameters) == set(ENGINE)


@pytest.mark.parametrize(
    ("prompts", "budget", "message"),
    [
        (7, 2, "`prompts`: expected a list of prompts, got 7."),
        ("text", 2, "`prompts`: expected a list of prompts, got 'text'."),
        ([7], 2, "`prompt`: expected tokens, as integers, got 7."),
        ([[]], 2, "`prompt`: expected at least one token, got none."),
        ([[1]], None, "`max_new_tokens`: expected an integer, got None."),
        ([[1]], -1, "`max_new_tokens`: expected at least 1, got -1."),
        ([[1], [2]], [3], "`max_new_tokens`: expected one number, or one of each of 2 prompts, got 1."),
    ],
)
def test_an_engine_refuses_requests(model: Any, prompts: Any, budget: Any, message: str) -> None:
    from jax_impl.model.decode import Engine

    made = Engine(*model, max_requests=2, max_len=16)
    for call in (made.add, made.generate, lambda *given: list(made.stream(*given))):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(prompts, budget)
        assert str(caught.value) == message
    assert (made.free, made.requests) == (2, {})


# ---- the torch package -----------------------------------------------------------------------------------------------

TORCH: dict[str, Any] = bad_input_calls.torch_calls() if adapters.is_installed("torch") else {}
TORCH_COMMON, TORCH_OWN = ({}, {}) if not TORCH else importlib.import_module("tests.torch_bad_input").tables()


def torch_bits(good: dict[str, Any]) -> list[Any]:
    """Copies of all tensors of a call."""
    import torch

    def tensors(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from tensors(getattr(value, field.name))

    return [tensor.clone() for value in good.values() for tensor in tensors(value)]


@pytest.mark.parametrize("function", TORCH)
def test_the_good_call_of_torch_works(function: str) -> None:
    call, good = bad_input_calls.torch_calls()[function]
    call(**good)


@pytest.mark.parametrize(("function", "parameter", "value", "message"), cases(TORCH, TORCH_COMMON, TORCH_OWN))
def test_message_of_torch(function: str, parameter: str, value: Any, message: str) -> None:
    """And no tensor, which these functions would write in place, has changed."""
    import torch

    call, good = TORCH[function]
    before = torch_bits(good)
    assert message_of(call, good, parameter, value) == message
    assert all(torch.equal(now, was) for now, was in zip(torch_bits(good), before, strict=True))


@pytest.mark.parametrize(("function", "parameters"), combined(TORCH, TORCH_COMMON, TORCH_OWN))
def test_all_problems_of_a_call_of_torch_at_once(function: str, parameters: list[str]) -> None:
    call, good = TORCH[function]
    bad = {name: entries(function, name, TORCH_COMMON, TORCH_OWN)[0][0] for name in parameters}
    with pytest.raises(ValueError, match="expected") as caught:
        call(**{**good, **bad})
    assert set(re.findall(r"^`(\w+)", str(caught.value), re.MULTILINE)) >= set(parameters)


def test_every_argument_of_torch_has_an_entry(torch_ref: Any) -> None:
    functions = [(name, getattr(torch_ref, name)) for name in torch_ref.__all__ if name not in CONTAINERS]
    assert without_entry(functions, TORCH, TORCH_COMMON, TORCH_OWN) == []


@pytest.mark.parametrize("function", TORCH)
def test_anything_is_taken_or_refused_by_name_in_torch(function: str) -> None:
    import torch

    tensors: dict[str, Any] = {
        "on another device": torch.zeros(2, dtype=torch.int32, device="meta"),
        "a pool on another device": torch.zeros(2, 5, 3, 96, dtype=torch.bfloat16, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "complex": torch.zeros(2, 3, dtype=torch.complex64),
        "no axes": torch.zeros((), dtype=torch.bfloat16),
        "five axes": torch.zeros((1,) * 5),
        "bools": torch.zeros(2, dtype=torch.bool),
    }
    others = {what: value for what, value in JUNK.items() if not isinstance(value, jax.Array | Deleted)}
    call, good = bad_input_calls.torch_calls()[function]
    for parameter in good:
        for what, value in (others | tensors).items():
            try:
                call(**{**good, parameter: value})
            except ValueError as error:
                lines = str(error).splitlines()
                assert all(LINE.match(line) for line in lines), (parameter, what, lines)


def test_a_spec_of_the_other_package_is_named(torch_ref: Any) -> None:
    """The two look alike and share no code: each takes its own."""
    call, good = TORCH["causal_conv1d_update"]
    assert message_of(call, good, "spec", SPEC) == "`spec`: expected a torch_ref.ConvCacheSpec, got ConvCacheSpec."
    call, good = JAX["causal_conv1d_update"]
    other = torch_ref.ConvCacheSpec(2, 5, 3, 96, 4, 3)
    assert message_of(call, good, "spec", other) == "`spec`: expected a ConvCacheSpec, got ConvCacheSpec."
    assert isinstance(SPEC, ConvCacheSpec)
