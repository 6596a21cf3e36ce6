"""The entries of `test_bad_input` for the torch package, in the same form; needs torch."""

from typing import Any

import numpy as np
import torch

from tests.bad_input_calls import OF_INPUTS

Entries = list[tuple[Any, str]]
SHARED = "All tensors of a call share a device."
FLOATS = "expected dtype bfloat16, float16, float32"
STATE = "`conv_state`: expected layer, slot, column, channel = (2, 5, 3, 96)"
WINDOWS = "`conv_windows`: expected layer, row, column, channel = (2, 3, 5, 96)"
NO_CAST = "Nothing is cast silently; the pool and its buffer share spec.dtype."


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def elsewhere(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, str]:
    """A tensor that is right but for its device."""
    return zeros(*shape, dtype=dtype, device="meta"), f"`{name}`: expected device cpu, got meta. {SHARED}"


def index(name: str, requests: str = "2") -> Entries:
    return [
        ([0.5, 1.5], f"`{name}`: expected a flat list of integers, got [0.5, 1.5]."),
        (zeros(2), f"`{name}`: expected an integer dtype, got torch.bfloat16."),
        (np.zeros(2), f"`{name}`: expected an integer dtype, got float64."),
        (torch.zeros(2, 1, dtype=torch.int32), f"`{name}`: expected request = ({requests},), got (2, 1)."),
        elsewhere(name, 2, dtype=torch.int32),
    ]


def table(name: str, requests: str = "2") -> Entries:
    """Of an index array `[B, D]`."""
    shape = f"`{name}`: expected request, token = ({requests}, 3), got"
    nested = f"`{name}`: expected a list of as many integers for each request, got"
    return [
        (ints(1, 2), f"{shape} (2,)."),
        (torch.zeros(2, 4, dtype=torch.int32), f"{shape} (2, 4)."),
        (torch.zeros(3, 3, dtype=torch.int64), f"{shape} (3, 3)."),
        ([[-1, 0], [-1, 0]], f"{shape} (2, 2)."),
        ([[-1, 0], [-1, 0, 1]], f"{nested} [[-1, 0], [-1, 0, 1]]."),
        ([-1, 0], f"{nested} [-1, 0]."),
        (zeros(2, 3), f"`{name}`: expected an integer dtype, got torch.bfloat16."),
        (np.zeros((2, 3)), f"`{name}`: expected an integer dtype, got float64."),
        elsewhere(name, 2, 3, dtype=torch.int32),
    ]


def inputs_array(name: str) -> Entries:
    """Of a buffer with rows of inputs."""
    shape = f"`{name}`: expected layer, row, column, channel = (2, 3, 3, 96)"
    return [
        (zeros(2, 3, 4, 96), f"{shape}, got (2, 3, 4, 96)."),
        (
            zeros(2, 3, 3, 96, dtype=torch.float32),
            f"`{name}`: expected dtype torch.bfloat16, got torch.float32. {NO_CAST}",
        ),
        (7, f"`{name}`: expected a torch.Tensor, got int."),
        (zeros(3, 3, 96), f"`{name}`: expected a layer axis, as conv_state has, got (3, 3, 96)."),
    ]


def tables() -> tuple[dict[str, Entries], dict[str, dict[str, Entries]]]:
    """What `COMMON` and `OWN` are there."""
    names = ("window_rows", "num_valid_tokens", "track_indices", "track_num_tokens", "step_rows", "lengths")
    common: dict[str, Entries] = {
        **{name: [*index(name), (ints(1, 2, 3), f"`{name}`: expected request = (2,), got (3,).")] for name in names},
        **{name: table(name) for name in ("parents", "resume_path", "accepted_path")},
        "resume_tokens": [
            *index("resume_tokens"),
            (ints(1, 2, 3), "`resume_tokens`: expected request = (2,), got (3,)."),
            (None, "`resume_path`: expected None without `resume_tokens`, got [[0, 1, -1], [0, 1, 2]]."),
        ],
        "num_accepted_tokens": index("num_accepted_tokens"),
        "state_indices": index("state_indices", "B"),
        "has_initial_state": [
            ([1, 0], "`has_initial_state`: expected dtype torch.bool, got torch.int64."),
            ([True], "`has_initial_state`: expected request = (2,), got (1,)."),
            elsewhere("has_initial_state", 2, dtype=torch.bool),
        ],
        "conv_state": [
            (zeros(2, 5, 96, 3), f"{STATE}, got (2, 5, 96, 3)."),
            (
                zeros(2, 5, 3, 96, dtype=torch.float16),
                f"`conv_state`: expected dtype torch.bfloat16, got torch.float16. {NO_CAST}",
            ),
        ],
        "conv_windows": [
            (zeros(2, 3, 6, 96), f"{WINDOWS}, got (2, 3, 6, 96)."),  # of one draft token more
            (
                zeros(2, 3, 5, 96, dtype=torch.float32),
                f"`conv_windows`: expected dtype torch.bfloat16, got torch.float32. {NO_CAST}",
            ),
            (7, "`conv_windows`: expected a torch.Tensor, got int."),
        ],
        "x": [("x", "`x`: expected a torch.Tensor, got str.")],
        "weight": [
            (
                zeros(4, 96),
                "`weight`: expected channel, tap = (96, 4), got (4, 96). (channel, 1, tap) = (96, 1, 4) is as good.",
            ),
            (zeros(96, 4, dtype=torch.int8), f"`weight`: {FLOATS}, got torch.int8."),
            elsewhere("weight", 96, 4),
        ],
        "bias": [
            (zeros(97), "`bias`: expected channel = (96,), got (97,)."),
            (zeros(96, dtype=torch.int32), f"`bias`: {FLOATS}, got torch.int32."),
            elsewhere("bias", 96),
        ],
        "spec": [("Qwen3.5", "`spec`: expected a torch_ref.ConvCacheSpec, got str.")],
        "layer": [
            (2, "`layer`: expected an index from 0 to 1 for stacked tensors, got 2."),
            (1.5, "`layer`: expected an index from 0 to 1 for stacked tensors, got 1.5."),
            (ints(0, 1), "`layer`: expected one integer, got torch.int32 (2,)."),
            elsewhere("layer", dtype=torch.int32),
        ],
        "null_slot": [
            (1.5, "`null_slot`: expected a Python integer or None, got 1.5."),
            (torch.tensor(1), "`null_slot`: expected a Python integer or None, got a torch.int64 array of shape ()."),
        ],
        "activation": [("gelu", "`activation`: expected 'silu' or None, got 'gelu'.")],
        "implementation": [("pallas", "`implementation`: expected None, 'eager' or 'triton', got 'pallas'.")],
        "step_states": [
            (
                zeros(2, 3, 3, 8),
                "`step_states`: expected layer, row, token, … = (2, R, D, 7), got (2, 3, 3, 8). "
                "`{state}` is (2, 5, 7).",
            ),
            (
                zeros(2, 3, 3, 7, dtype=torch.float32),
                "`step_states`: expected dtype torch.bfloat16, got torch.float32. "
                "Nothing is cast silently; the states of a step have the pool's dtype.",
            ),
            elsewhere("step_states", 2, 3, 3, 7),
        ],
        "cache": [
            (
                7,
                "`cache`: expected a ConvCache, or a dict, list or tuple of them, got int.\n"
                "`step_states`: expected None, as cache.recurrent_state has there, got Tensor.",
            )
        ],
    }
    on_meta = (
        "`num_accepted_tokens`: expected device meta, got cpu. {}\n`window_rows`: expected device meta, got cpu. {}"
    )
    low = {"num_layers": 1, "num_slots": 1, "max_requests": 0, "conv_dim": 1, "width": 2, "num_draft_tokens": 1}
    choices = {
        "dtype": "bfloat16, float16, float32",
        "axis_order": "time_major, channel_major",
        "storage": "sliding, dense, inputs",
    }
    own: dict[str, dict[str, Entries]] = {
        "ConvCacheSpec": {
            **{
                name: [
                    (-1, f"`{name}`: expected an integer from {least} to 2^31-1, got -1."),
                    (0.5, f"`{name}`: expected an integer, got 0.5."),
                ]
                for name, least in low.items()
            },
            **{name: [("x", f"`{name}`: expected one of {known}, got 'x'.")] for name, known in choices.items()},
            "state_len": [(9, "`state_len`: expected width - 1 = 3 or width = 4, got 9.")],
        },
        "accepted_from_index": {
            "accept_index": [
                (zeros(2, 3), "`accept_index`: expected an integer dtype, got torch.bfloat16."),
                (ints(1, 2), "`accept_index`: expected request, token, got (2,)."),
            ]
        },
        "allocate_conv_cache": {
            "device": [("gpu", "`device`: expected None or a device that torch has here, got 'gpu'.")]
        },
        "causal_conv1d_verify_float64": {"state_indices": index("state_indices")},
        "causal_conv1d_verify": {
            "state_indices": index("state_indices"),
            "x": [
                (zeros(2, 4, 96), "`x`: expected request, token, channel = (2, 3, 96), got (2, 4, 96)."),
                (
                    None,
                    "`x`: expected a torch.Tensor for storage 'sliding', got None. "
                    "Only rows of inputs can have it already.",
                ),
                elsewhere("x", 2, 3, 96),
            ],
            "resume_windows": [
                (
                    zeros(2, 3, 5, 96),
                    "`resume_windows`: expected None for storage 'sliding', got a torch.bfloat16 array of shape "
                    "(2, 3, 5, 96). It resumes from the row that it writes.",
                ),
                (
                    7,
                    "`resume_windows`: expected None for storage 'sliding', got 7. "
                    "It resumes from the row that it writes.",
                ),
            ],
        },
        f"causal_conv1d_verify{OF_INPUTS}": {
            "state_indices": index("state_indices", "B"),
            "conv_windows": inputs_array("conv_windows"),
            "resume_windows": [
                *inputs_array("resume_windows"),
                elsewhere("resume_windows", 2, 3, 3, 96),
                (
                    None,
                    "`resume_windows`: expected the previous step's inputs where `x` is None, got None. "
                    "`conv_windows` has those of this step.",
                ),
            ],
            "resume_tokens": [
                *index("resume_tokens"),
                (
                    None,
                    "`resume_path`: expected None without `resume_tokens`, got [[0, 1, -1], [0, 1, 2]].\n"
                    "`resume_windows`: expected None without `resume_tokens`, got a torch.bfloat16 array of shape "
                    "(2, 3, 3, 96).",
                ),
            ],
        },
        f"commit_conv_state{OF_INPUTS}": {"conv_windows": inputs_array("conv_windows")},
        f"gather_windows{OF_INPUTS}": {
            "num_accepted_tokens": index("num_accepted_tokens", "B"),
            "conv_windows": inputs_array("conv_windows")[:3],
            "conv_state": [
                *common["conv_state"],
                elsewhere("conv_state", 2, 5, 3, 96),
                (
                    None,
                    "`conv_state`: expected the pool, for storage 'inputs', got None. "
                    "The rows have the new inputs only.",
                ),
            ],
            "state_indices": [
                *index("state_indices"),
                (None, "`state_indices`: expected an integer array of requests, got None."),
            ],
        },
        "path_to_node": {
            "parents": [
                (zeros(2, 3), "`parents`: expected an integer dtype, got torch.bfloat16."),
                (ints(1, 2), "`parents`: expected request, token, got (2,)."),
                ([[0], [1, 2]], "`parents`: expected request, token, an array of integers, got [[0], [1, 2]]."),
            ],
            "nodes": [
                (zeros(2), "`nodes`: expected an integer dtype, got torch.bfloat16."),
                (ints(1, 2, 3), "`nodes`: expected request = (2,), got (3,)."),
                elsewhere("nodes", 2, dtype=torch.int32),
            ],
        },
        "causal_conv1d_update": {
            "state_indices": index("state_indices"),
            "x": [
                (zeros(2, 1, 96), "`x`: expected request, channel = (2, 96), got (2, 1, 96)."),
                elsewhere("x", 2, 96),
            ],
        },
        "causal_conv1d_prefill": {
            "state_indices": index("state_indices"),
            "implementation": [
                ("triton", "`implementation`: expected None or 'eager', got 'triton'. Prefill has no kernel.")
            ],
            "x": [
                (zeros(2, 0, 96), "`x`: expected at least one token, got (2, 0, 96)."),
                (zeros(2, 96), "`x`: expected request, token, channel = (2, 1, 96), got (2, 96)."),
            ],
        },
        "commit_recurrent_state": {
            "state": [
                (
                    zeros(2, 5, 8),
                    "`step_states`: expected layer, row, token, … = (2, R, D, 8), got (2, 3, 3, 7). "
                    "`state` is (2, 5, 8).",
                ),
            ],
            "layer_axis": [(1, "`layer_axis`: expected True or False, got 1.")],
        },
        "dense_view": {
            "conv_windows": [
                (7, "`conv_windows`: expected a strided torch.Tensor, got 7."),
                (zeros(2, 3, 6, 96), f"{WINDOWS}, got (2, 3, 6, 96)."),
            ]
        },
        "gather_windows": {
            "conv_windows": [
                *common["conv_windows"],
                (zeros(2, 3, 5, 96, device="meta"), on_meta.format(SHARED, SHARED)),
            ],
            "num_accepted_tokens": index("num_accepted_tokens", "B"),
            "conv_state": [
                (
                    zeros(2, 5, 3, 96),
                    "`conv_state`: expected None for storage 'sliding', got a torch.bfloat16 array of shape "
                    "(2, 5, 3, 96). The rows have whole windows.",
                )
            ],
            "state_indices": [
                (
                    [1, 2],
                    "`state_indices`: expected None for storage 'sliding', got [1, 2]. The rows have whole windows.",
                )
            ],
            "null_slot": [(0, "`null_slot`: expected None for storage 'sliding', got 0. The rows have whole windows.")],
        },
        "track_tokens_at_boundary": {
            "seq_lens": [(zeros(2), "`seq_lens`: expected an integer dtype, got torch.bfloat16.")],
            "num_accepted_tokens": [
                (zeros(2), "`num_accepted_tokens`: expected an integer dtype, got torch.bfloat16."),
                (ints(1), "`num_accepted_tokens`: expected request = (2,), got (1,)."),
                elsewhere("num_accepted_tokens", 2, dtype=torch.int32),
            ],
            "interval": [(0, "`interval`: expected an integer from 1 to 2^31-1, got 0.")],
        },
        "use_storage": {
            "topk": [(0, "`topk`: expected an integer of at least 1, got 0.")],
            "parents": [(7, "`parents`: expected [token] or [request, token], got 7.")],
        },
    }
    return common, own
