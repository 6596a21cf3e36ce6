"""torch_ref on its own: eager torch against slow definitions written here, and Triton against both.

On a machine without CUDA the kernels run in Triton's interpreter; `-m gpu` runs the same tests on compiled kernels.
"""

import dataclasses
import doctest
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, when it is imported

import jax_impl.layout as jax_layout  # noqa: E402  (imports no framework)
import torch_ref  # noqa: E402
from torch_ref import ConvCacheSpec  # noqa: E402

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
ORDERS, STORAGES = ("time_major", "channel_major"), ("sliding", "dense")
POISON = {"bfloat16": 0x7FD5, "float16": 0x7ED5, "float32": 0x7FD5AAAA}  # NaNs with a payload that nothing computes
DTYPES = {name: getattr(torch, name) for name in POISON}
SPEC = ConvCacheSpec(2, 11, 9, conv_dim=5, width=4, num_draft_tokens=3)

both_orders = pytest.mark.parametrize("order", ORDERS)
both_storages = pytest.mark.parametrize("storage", STORAGES)


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where and how a test runs."""

    implementation: Any
    device: str


EAGER = pytest.param(Backend("eager", "cpu"), id="eager")
BACKENDS = [
    EAGER,
    pytest.param(Backend("triton", "cpu"), id="triton"),
    pytest.param(Backend("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    backend = request.param
    if backend.implementation == "triton":
        pytest.importorskip("triton")
    if backend.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return backend


def changed(spec: ConvCacheSpec = SPEC, /, **changes: Any) -> ConvCacheSpec:
    return dataclasses.replace(spec, **{"state_len": None} | changes)


def bits(tensor: Any) -> Any:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = int((bits(actual.cpu()) != bits(expected.cpu())).sum())
    assert different == 0, f"{different} elements differ"


def time_first(tensor: Any, spec: ConvCacheSpec) -> Any:
    return tensor if spec.axis_order == "time_major" else tensor.transpose(-1, -2)


def normal(shape: Any, dtype: Any, seed: int, device: str = "cpu") -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def scrambled(shape: Any, spec: ConvCacheSpec, seed: int, device: str = "cpu") -> Any:
    """Bit patterns of every kind: NaNs, infinities, subnormals, both zeros."""
    integer = {2: torch.int16, 4: torch.int32}[spec.item_bytes]
    limit = 8 * spec.item_bytes - 1
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(-(2**limit), 2**limit, shape, generator=generator).to(integer)
    return pattern.view(DTYPES[spec.dtype]).to(device)


def poisoned(shape: Any, spec: ConvCacheSpec, device: str = "cpu") -> Any:
    integer = {2: torch.int16, 4: torch.int32}[spec.item_bytes]
    return torch.full(shape, POISON[spec.dtype], dtype=integer, device=device).view(DTYPES[spec.dtype])


def envelope(tensor: Any, spec: ConvCacheSpec, *, layers_inside: bool = True) -> Any:
    """The same values in poisoned memory with gaps: all layers of a slot side by side, or slots inside layers."""
    num_layers, num_slots, *entry = tensor.shape
    size = int(np.prod(entry))
    if layers_inside:
        layer_stride = size + 3
        slot_stride = num_layers * layer_stride + 5
    else:
        slot_stride = size + 3
        layer_stride = num_slots * slot_stride + 5
    memory = poisoned((num_layers * layer_stride + num_slots * slot_stride + 7,), spec, str(tensor.device))
    inner = tensor.stride()[2:]
    strided = memory.as_strided(tensor.shape, (layer_stride, slot_stride, *inner), 7)
    bits(strided).copy_(bits(tensor))
    return strided


def whole_memory(tensor: Any) -> Any:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


# --- definitions, slow and literal ------------------------------------------------------------------------------------


def expected_columns(x: Any, state: Any, spec: ConvCacheSpec, layer: int, slot: int, request: int) -> Any:
    return torch.cat([time_first(state, spec)[layer, slot], x[request].to(state.dtype)])


def expected_windows(x: Any, state: Any, windows: Any, spec: ConvCacheSpec, layer: int, requests: Any) -> Any:
    """The buffer after verify; `requests` lists (request, slot, row, valid) of those that are not skipped."""
    after = windows.clone()
    for request, slot, row, valid in requests:
        columns = expected_columns(x, state, spec, layer, slot, request)
        target = bits(time_first(after, spec))[layer, row]
        for t in range(valid if spec.storage == "dense" else 0):
            target[t] = bits(columns)[t + 1 : t + 1 + spec.state_columns]
        for c in range(spec.state_columns - 1 + valid if spec.storage == "sliding" else 0):
            target[c] = bits(columns)[c + 1]
    return after


def expected_y(x: Any, state: Any, weight: Any, bias: Any, spec: ConvCacheSpec, layer: int, requests: Any) -> Any:
    """y in float64 by one dot product for each token, and the sum of the magnitudes of what was summed."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    scale = torch.zeros(x.shape, dtype=torch.float64)
    for request, slot, _, valid in requests:
        columns = expected_columns(x, state, spec, layer, slot, request).double()[-x.shape[1] - spec.width + 1 :]
        for t in range(valid):
            products = columns[t : t + spec.width].T * weight.double()
            y[request, t] = products.sum(1) + (0 if bias is None else bias.double())
            scale[request, t] = products.abs().sum(1) + (0 if bias is None else bias.double().abs())
    return y, scale


def silu(a: Any) -> Any:
    return a / (1 + torch.exp(-a))


def y_bound(y: Any, scale: Any, spec: ConvCacheSpec, dtype: Any) -> Any:
    """Half a unit of y's own dtype, and per term of the sum, of SiLU and of its exponential one of float32."""
    mantissa = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    return 0.5001 * 2.0**-mantissa * y.abs() + 2.0**-23 * (spec.width + 6) * (scale + scale**2) + 2.0**-24


# --- layout -----------------------------------------------------------------------------------------------------------


def test_layout_agrees_with_the_other_package() -> None:
    names = ["state_shape", "windows_shape", "window_shape", "state_axes", "windows_axes", "entry_axes", "column_axis"]
    names += ["state_columns", "num_columns", "first_token_column", "item_bytes", "state_bytes", "windows_bytes"]
    names += ["dense_windows_bytes", "slot_bytes", "row_bytes", "state_len", "dtype"]
    for width, tokens, order, storage, extra in itertools.product((2, 3, 5), (1, 3, 8), ORDERS, STORAGES, (0, 1)):
        arguments: Any = (3, 7, 5, 6, width, tokens, "float16", order, storage, width - 1 + extra)
        ours, theirs = ConvCacheSpec(*arguments), jax_layout.ConvCacheSpec(*arguments)
        for name in names:
            assert getattr(ours, name) == getattr(theirs, name), name
        for n in range(1, tokens + 1 if storage == "sliding" else 0):
            assert ours.window_columns(n) == theirs.window_columns(n)


@both_orders
@both_storages
def test_reported_bytes_are_allocated_bytes(order: Any, storage: Any) -> None:
    cache = torch_ref.allocate_conv_cache(changed(axis_order=order, storage=storage), device="cpu")
    assert cache.conv_state.nbytes == cache.spec.state_bytes == 2 * 11 * 3 * 5 * 2
    assert cache.conv_windows.nbytes == cache.spec.windows_bytes == 2 * 9 * 5 * 2 * (5 if storage == "sliding" else 9)
    assert cache.conv_state.shape == cache.spec.state_shape
    assert cache.conv_state.dtype == torch.bfloat16
    assert not cache.conv_windows.any()


def test_spec_errors_name_every_field() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        ConvCacheSpec(0, True, 0, 5, 1, 3, "int8", "row_major", "sparse", 9)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "`num_layers`: expected an integer from 1 to 2^31-1, got 0.",
        "`num_slots`: expected an integer, got True.",
        "`width`: expected an integer from 2 to 2^31-1, got 1.",
        "`dtype`: expected one of bfloat16, float16, float32, got 'int8'.",
        "`axis_order`: expected one of time_major, channel_major, got 'row_major'.",
        "`storage`: expected one of sliding, dense, inputs, got 'sparse'.",
    ]
    with pytest.raises(ValueError, match=r"^`state_len`: expected width - 1 = 3 or width = 4, got 9\.$"):
        changed(state_len=9)
    with pytest.raises(ValueError, match=r"^`num_accepted_tokens`: expected 1 to num_draft_tokens = 3, got 0\.$"):
        SPEC.window_columns(0)
    assert ConvCacheSpec(1, 1, 0, 5, 2, 1, torch.float16).dtype == "float16"  # type: ignore[arg-type]
    assert hash(changed()) == hash(changed())


def test_use_storage_trusts_links_over_labels() -> None:
    assert torch_ref.use_storage(1, parents=torch.tensor([[-1, 0, 1], [-1, 0, 0]])) == "dense"
    assert torch_ref.use_storage(4, parents=[[-1, 0, 1], [-1, 0, 1]]) == "sliding"
    assert torch_ref.use_storage(1, parents=[[-1, 0, 0, 2], [-1, 0, 1, 2]]) == "dense"
    with pytest.raises(
        ValueError, match=r"^`parents`: expected an index from -1 to 0 for token 1 of request 0, got 1\."
    ):
        torch_ref.use_storage(1, parents=[-1, 1])
    with pytest.raises(ValueError, match=r"^`topk`: expected an integer of at least 1, got 0\.$"):
        torch_ref.use_storage(0)


@pytest.mark.parametrize("module", ["layout", "cache"])
def test_examples_in_docstrings(module: str) -> None:
    __import__(f"torch_ref.{module}")
    outcome = doctest.testmod(sys.modules[f"torch_ref.{module}"])
    assert outcome.failed == 0
    assert outcome.attempted > 0


# --- verify -----------------------------------------------------------------------------------------------------------

GRID = [
    # width, tokens, dim, dtype of the state, of x, of weight and bias, extra state column
    (2, 1, 1, "bfloat16", "bfloat16", "float32", 0),
    (2, 5, 3, "float16", "float32", "bfloat16", 1),
    (3, 4, 130, "bfloat16", "float32", "bfloat16", 0),
    (4, 3, 96, "float32", "bfloat16", "float16", 0),
    (4, 4, 300, "bfloat16", "bfloat16", "bfloat16", 1),
    (5, 2, 7, "float32", "float32", "float32", 0),
    (5, 3, 33, "bfloat16", "float16", "float32", 1),
    (8, 17, 6, "float16", "float16", "float16", 0),
]


@both_orders
@both_storages
@pytest.mark.parametrize("case", GRID, ids=str)
def test_verify_equals_the_definition(backend: Backend, case: Any, order: Any, storage: Any) -> None:
    width, tokens, dim, dtype, x_dtype, w_dtype, extra = case
    spec = ConvCacheSpec(3, 7, 6, dim, width, tokens, dtype, order, storage, width - 1 + extra)
    state = normal(spec.state_shape, DTYPES[dtype], 1)
    windows, guard = poisoned(spec.windows_shape, spec), poisoned((), spec)
    x = normal((6, tokens, dim), torch.float32, 2).to(DTYPES[x_dtype])
    weight, bias = normal((dim, width), DTYPES[w_dtype], 3), normal((dim,), DTYPES[w_dtype], 4)
    slots, rows = [6, 0, 2, -1, 7, 4], [5, 1, 0, 3, 2, 9]
    valid = [tokens, tokens, max(1, tokens - 1), 1, 1, 1]
    live = [(0, 6, 5, valid[0]), (2, 2, 0, valid[2])]
    state[1, 0] = state[0] = state[2] = guard  # the null slot and the other layers are read by nobody
    x[2, valid[2] :] = float("nan")
    has_bias = width % 2 == 0
    on = [t.to(backend.device, copy=True) for t in (x, state, windows, weight, bias)]
    y, returned = torch_ref.causal_conv1d_verify(
        on[0], on[1], on[2], on[3], on[4] if has_bias else None, spec=spec, state_indices=slots, layer=1,
        window_rows=rows, num_valid_tokens=valid, null_slot=0, implementation=backend.implementation,
    )  # fmt: skip
    assert returned is on[2]
    assert_same_bits(on[1], state)
    assert_same_bits(returned, expected_windows(x, state, windows, spec, 1, live))
    total, scale = expected_y(x, state, weight, bias if has_bias else None, spec, 1, live)
    assert y.dtype == x.dtype
    error = (y.cpu().double() - silu(total)).abs()
    assert bool((error <= y_bound(silu(total), scale, spec, x.dtype)).all()), float(error.max())
    dead = torch.ones(6, tokens, dtype=torch.bool)
    dead[0] = False
    dead[2, : valid[2]] = False
    assert not bits(y.cpu())[dead].any()


@both_orders
def test_float64_verify(order: Any) -> None:
    spec = changed(axis_order=order, conv_dim=33, max_requests=0)
    state, x = normal(spec.state_shape, torch.bfloat16, 1), normal((4, 3, 33), torch.float32, 2)
    weight, bias = normal((33, 4), torch.float32, 3), normal((33,), torch.bfloat16, 4)
    live = [(0, 3, 0, 3), (2, 5, 0, 2)]
    total, _ = expected_y(x, state, weight, bias, spec, 1, live)
    for activation, expected in (("silu", silu(total)), (None, total)):
        y = torch_ref.causal_conv1d_verify_float64(
            x, state, weight, bias, spec=spec, state_indices=[3, -1, 5, 11], layer=1, num_valid_tokens=[3, 3, 2, 3],
            activation=activation,  # type: ignore[arg-type]
        )  # fmt: skip
        assert y.dtype == torch.float64
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)


def test_tap_order(backend: Backend) -> None:
    spec = changed(state_len=4, num_layers=1)
    state = torch.arange(11 * 4 * 5).reshape(1, 11, 4, 5).to(torch.bfloat16).to(backend.device, copy=True)
    x = (torch.arange(2 * 3 * 5).reshape(2, 3, 5) - 40).to(torch.bfloat16).to(backend.device, copy=True)
    columns = torch.cat([state[0, [2, 4]], x], dim=1)
    for tap in range(4):
        weight = torch.zeros(5, 1, 4, device=backend.device)
        weight[:, 0, tap] = 1
        y, _ = torch_ref.causal_conv1d_verify(
            x, state[0], poisoned(spec.windows_shape[1:], spec, backend.device), weight, spec=spec,
            state_indices=[2, 4], activation=None, implementation=backend.implementation,
        )  # fmt: skip
        assert torch.equal(y, columns[:, 1 + tap : 4 + tap])  # of four state columns the oldest is never read


@both_orders
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
def test_tokens_at_once_equal_single_steps(backend: Backend, order: Any, x_dtype: str) -> None:
    # 4099 channels end in a remainder of every vector width, where a library's scalar loop takes over
    dim = 4099 if backend.implementation == "eager" else 37
    spec = changed(axis_order=order, conv_dim=dim, width=5, num_draft_tokens=4)
    state = normal(spec.state_shape, torch.bfloat16, 1, backend.device)
    windows = poisoned(spec.windows_shape, spec, backend.device)
    x = normal((3, 4, dim), DTYPES[x_dtype], 2, backend.device)
    weight, bias = normal((dim, 5), torch.float32, 3, backend.device), normal((dim,), torch.float32, 4, backend.device)
    options: dict[str, Any] = {"layer": 1, "state_indices": [4, 9, 0], "implementation": backend.implementation}
    at_once, _ = torch_ref.causal_conv1d_verify(x, state, windows, weight, bias, spec=spec, **options)
    one = changed(spec, num_draft_tokens=1)
    stepped, updated = state.clone(), state.clone()
    for t in range(4):
        row = poisoned(one.windows_shape, one, backend.device)
        y, _ = torch_ref.causal_conv1d_verify(x[:, t : t + 1], stepped, row, weight, bias, spec=one, **options)
        torch_ref.commit_conv_state(
            stepped[1], row[1], [4, 9, 0], [1, 1, 1], spec=one, implementation=backend.implementation
        )
        assert_same_bits(y[:, 0], at_once[:, t])
        y, _ = torch_ref.causal_conv1d_update(x[:, t], updated, weight, bias, spec=spec, **options)
        assert_same_bits(y, at_once[:, t])
        assert_same_bits(updated, stepped)
        accepted = torch_ref.gather_windows(windows, [t + 1] * 3, spec=spec)
        assert_same_bits(accepted[1], updated[1, [4, 9, 0]])


@both_orders
@both_storages
def test_many_steps_of_random_acceptance(backend: Backend, order: Any, storage: Any) -> None:
    spec = changed(axis_order=order, storage=storage, num_layers=1, dtype="float16")
    rng = np.random.default_rng(5)
    pool = normal(spec.state_shape, torch.float16, 1, backend.device)
    plain = pool.clone()
    weight = normal((5, 4), torch.float32, 2, backend.device)
    windows = poisoned(spec.windows_shape, spec, backend.device)
    how: dict[str, Any] = {"spec": spec, "implementation": backend.implementation}
    for step in range(50 if backend.implementation == "eager" else 5):
        slots, rows = rng.permutation(11)[:4].tolist(), rng.permutation(9)[:4].tolist()
        valid = rng.integers(1, 4, 4)
        accepted = [int(rng.integers(0, v + 1)) for v in valid]
        x = normal((4, 3, 5), torch.float32, 100 + step, backend.device)
        index: dict[str, Any] = {"state_indices": slots, "window_rows": rows, "num_valid_tokens": valid}
        torch_ref.causal_conv1d_verify(x, pool, windows, weight, layer=0, **index, **how)
        torch_ref.commit_conv_state(pool, windows, index.pop("state_indices"), accepted, **index, **how)
        for t in range(3):
            still = [slot if n > t else -1 for slot, n in zip(slots, accepted, strict=True)]
            torch_ref.causal_conv1d_update(x[:, t], plain, weight, state_indices=still, layer=0, **how)
        assert_same_bits(pool, plain)


@both_orders
def test_layer_index_as_a_tensor(backend: Backend, order: Any) -> None:
    spec = changed(axis_order=order)
    state, x = normal(spec.state_shape, torch.bfloat16, 1, backend.device), normal((2, 3, 5), torch.bfloat16, 2)
    x, weight = x.to(backend.device, copy=True), normal((5, 4), torch.float32, 3, backend.device)
    for layer in (0, 1, -1, 2, INT32_MIN, 2**32 + 1):
        windows = poisoned(spec.windows_shape, spec, backend.device)
        index = torch.tensor(layer, device=backend.device)
        y, _ = torch_ref.causal_conv1d_verify(
            x, state, windows, weight, spec=spec, state_indices=[1, 2], layer=index,
            implementation=backend.implementation,
        )  # fmt: skip
        live = [(0, 1, 0, 3), (1, 2, 1, 3)] if layer in (0, 1) else []
        expected = expected_windows(
            x.cpu(), state.cpu(), poisoned(spec.windows_shape, spec), spec, layer if live else 0, live
        )
        assert_same_bits(windows, expected)
        assert bool(y.any()) == bool(live)
        outcomes = []
        for chosen in (index, layer if live else 0):
            pool = state.clone()
            single, _ = torch_ref.causal_conv1d_update(
                x[:, 0], pool, weight, spec=spec, state_indices=[1, 2] if live or chosen is index else [-1, -1],
                layer=chosen, implementation=backend.implementation,
            )  # fmt: skip
            assert_same_bits(single, y[:, 0])
            outcomes.append(pool)
        assert_same_bits(*outcomes)


def test_x_and_weight_of_any_strides(backend: Backend) -> None:
    device = backend.device
    x, state = normal((4, 3, 5), torch.bfloat16, 1, device), normal(SPEC.state_shape, torch.bfloat16, 2, device)
    weight, bias = normal((5, 4), torch.float16, 3, device), normal((5,), torch.float32, 4, device)
    outcomes = []
    for strided in (False, True):
        if strided:
            x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            weight = weight.T.contiguous().T
            bias = torch.stack([bias, bias + 1], dim=1)[:, 0]
            assert (x.stride(), weight.stride(), bias.stride()) == ((3, 1, 12), (1, 5), (2,))
        y, after = torch_ref.causal_conv1d_verify(
            x, state, poisoned(SPEC.windows_shape, SPEC, device), weight, bias, spec=SPEC, layer=1,
            state_indices=[0, 3, 1, 2], implementation=backend.implementation,
        )  # fmt: skip
        outcomes.append((y, after))
    assert_same_bits(outcomes[0][0], outcomes[1][0])
    assert_same_bits(outcomes[0][1], outcomes[1][1])


# --- views and strides ------------------------------------------------------------------------------------------------


@both_orders
@pytest.mark.parametrize("extra", [0, 1])
def test_dense_view_of_sliding_is_the_dense_buffer(order: Any, extra: int) -> None:
    sliding = changed(axis_order=order, state_len=3 + extra)
    dense = dataclasses.replace(sliding, storage="dense")
    state, x = normal(sliding.state_shape, torch.bfloat16, 1), normal((9, 3, 5), torch.bfloat16, 2)
    weight = normal((5, 4), torch.float32, 3)
    buffers = {}
    for spec in (sliding, dense):
        buffers[spec.storage] = envelope(torch_ref.allocate_conv_cache(spec).conv_windows, spec)
        for layer in range(2):
            torch_ref.causal_conv1d_verify(
                x, state, buffers[spec.storage], weight, spec=spec, state_indices=list(range(9)), layer=layer
            )
    view = torch_ref.dense_view(buffers["sliding"], spec=sliding)
    assert view.shape == dense.windows_shape
    assert view.data_ptr() == buffers["sliding"].data_ptr()
    assert_same_bits(view, buffers["dense"])
    assert_same_bits(torch_ref.dense_view(buffers["sliding"][1], spec=sliding), buffers["dense"][1])
    n = [3, 0, 1, 2, 4, 3, 1, 2, 3]
    assert_same_bits(
        torch_ref.gather_windows(view, n, spec=dense), torch_ref.gather_windows(buffers["sliding"], n, spec=sliding)
    )
    with pytest.raises(ValueError, match=r"^`conv_windows`: expected (elements that share no memory|strides of)"):
        torch_ref.causal_conv1d_verify(x, state, view, weight, spec=dense, state_indices=list(range(9)), layer=0)
    with pytest.raises(
        ValueError, match=r"^`spec\.storage`: expected 'sliding', got 'dense'\. A dense buffer is its own"
    ):
        torch_ref.dense_view(buffers["dense"], spec=dense)
    with pytest.raises(
        ValueError, match=r"^`conv_windows`: expected layer, row, column, channel = \(2, 9, 5, 5\), got"
    ):
        torch_ref.dense_view(state, spec=SPEC)


@both_orders
@both_storages
@pytest.mark.parametrize("layers_inside", [True, False])
def test_free_layer_and_slot_strides(backend: Backend, order: Any, storage: Any, layers_inside: bool) -> None:
    spec = changed(axis_order=order, storage=storage, conv_dim=7)
    state = normal(spec.state_shape, torch.bfloat16, 1, backend.device)
    windows = normal(spec.windows_shape, torch.bfloat16, 2, backend.device)
    x, weight = normal((4, 3, 7), torch.bfloat16, 3, backend.device), normal((7, 4), torch.float32, 4, backend.device)
    slots, pools, buffers, ys = [10, 3, -1, 0], [], [], []
    for strided in (False, True):
        how: dict[str, Any] = {"spec": spec, "implementation": backend.implementation if strided else "eager"}
        pool, buffer = state.clone(), windows.clone()
        if strided:
            pool = envelope(pool, spec, layers_inside=layers_inside)
            buffer = envelope(buffer, spec, layers_inside=not layers_inside)
        y, _ = torch_ref.causal_conv1d_verify(x, pool, buffer, weight, state_indices=slots, layer=1, **how)
        torch_ref.commit_conv_state(pool, buffer, slots, [3, 1, 2, 2], **how)
        y1, _ = torch_ref.causal_conv1d_update(x[:, 0], pool, weight, state_indices=slots, layer=0, **how)
        y2, _ = torch_ref.causal_conv1d_prefill(x, pool, weight, spec=spec, state_indices=[5, 6, 7, 8], layer=1)
        torch_ref.reset_conv_state(pool, [9, 2, -1, 11], spec=spec)
        pools.append(pool)
        buffers.append(buffer)
        ys.append(torch.cat([y, y1[:, None], y2], dim=1))
    assert_same_bits(pools[1], pools[0])
    assert_same_bits(buffers[1], buffers[0])
    torch.testing.assert_close(ys[1], ys[0], rtol=2**-7, atol=2**-20)  # the two may round to neighbours
    for tensor in (pools[1], buffers[1]):  # every gap still holds its poison
        memory = whole_memory(tensor)
        bits(tensor).fill_(POISON["bfloat16"])
        assert bool((bits(memory) == POISON["bfloat16"]).all())


@both_orders
def test_offsets_past_two_to_the_31(backend: Backend, order: Any) -> None:
    # 8 GiB of address space, of which only a few pages are touched. The pool begins in the middle, so that an offset
    # of 2^31 and more taken in 32 bits, which is negative, ends in the first page instead of outside
    spec = ConvCacheSpec(2, 3, 3, 5, 4, 2, axis_order=order)
    entry = spec.conv_dim if order == "time_major" else spec.state_columns
    for name in ("layer", "slot"):
        strides = (2**31 + 64, 32) if name == "layer" else (32, 2**30 + 64)
        try:
            memory = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device=backend.device)
        except RuntimeError:
            pytest.skip("8 GiB of address space are missing")
        pool = memory.as_strided(spec.state_shape, (*strides, entry, 1), 2**31)
        alias = memory[:4096].fill_(1)
        pool[1, 2].fill_(2)
        windows = torch.zeros(spec.windows_shape, dtype=torch.bfloat16, device=backend.device)
        x = torch.full((1, 2, 5), 3.0, dtype=torch.bfloat16, device=backend.device)
        weight = torch.ones(5, 4, device=backend.device)
        how: dict[str, Any] = {"spec": spec, "implementation": backend.implementation}
        y, _ = torch_ref.causal_conv1d_verify(
            x, pool, windows, weight, state_indices=[2], layer=1, activation=None, **how
        )
        assert y[0].tolist() == [[9.0] * 5, [10.0] * 5], name
        torch_ref.commit_conv_state(pool[1], windows[1], [2], [2], **how)
        assert time_first(pool, spec)[1, 2, :, 0].tolist() == [2, 3, 3]
        torch_ref.causal_conv1d_update(x[:, 0] + 1, pool, weight, state_indices=[2], layer=1, **how)
        assert time_first(pool, spec)[1, 2, :, 4].tolist() == [3, 3, 4]
        torch_ref.commit_conv_state(pool, windows, [2], [1], **how)
        assert time_first(pool, spec)[1, 2, :, 4].tolist() == [2, 2, 3]
        torch_ref.reset_conv_state(pool, [2], spec=spec)
        assert not pool[1, 2].any()
        assert bool((alias == 1).all()), name
        del memory, pool, alias


# --- commit, gather, reset --------------------------------------------------------------------------------------------


def committed(state: Any, windows: Any, spec: ConvCacheSpec, requests: Any) -> Any:
    """The pool after commit; `requests` lists (slot, row, n) of those that are not skipped."""
    after = state.clone()
    for slot, row, n in requests:
        source = bits(time_first(windows, spec))[:, row]
        taken = source[:, n - 1] if spec.storage == "dense" else source[:, n - 1 : n - 1 + spec.state_columns]
        bits(time_first(after, spec))[:, slot] = taken
    return after


@both_orders
@both_storages
@pytest.mark.parametrize(("width", "tokens", "dim"), [(2, 1, 1), (2, 4, 130), (3, 2, 96), (5, 7, 3), (7, 3, 300)])
def test_commit_every_count_beside_padding(
    backend: Backend, width: int, tokens: int, dim: int, order: Any, storage: Any
) -> None:
    size = tokens + 6
    dtype = "float32" if dim == 3 else "bfloat16"
    spec = ConvCacheSpec(2, size + 3, size + 1, dim, width, tokens, dtype, order, storage, width - dim % 2)
    state, windows = scrambled(spec.state_shape, spec, 1), scrambled(spec.windows_shape, spec, 2)
    rng = np.random.default_rng(width)
    slots, rows = (1 + rng.permutation(size + 2)).tolist()[:size], rng.permutation(size + 1).tolist()[:size]
    counts = [*range(tokens + 1), tokens + 1, tokens, tokens, 1, 1]
    slots[-4:] = [-1, spec.num_slots, 0, slots[tokens]]
    rows[-1] = -1
    live = [(slots[n], rows[n], n) for n in range(1, tokens + 1)]
    pool = state.to(backend.device, copy=True)
    returned = torch_ref.commit_conv_state(
        pool, windows.to(backend.device, copy=True), slots, counts, spec=spec, window_rows=rows, null_slot=0,
        implementation=backend.implementation,
    )  # fmt: skip
    assert returned is pool
    assert_same_bits(pool, committed(state, windows, spec, live))
    taken = torch_ref.gather_windows(windows, counts, spec=spec, window_rows=rows)
    for request, (n, row) in enumerate(zip(counts, rows, strict=True)):
        good = 1 <= n <= tokens and row >= 0
        target = torch.zeros_like(state[:, :1])
        if good:
            target = committed(target, windows, spec, [(0, row, n)])
        assert_same_bits(taken[:, request : request + 1], target)


def test_one_launch_axis_and_more_than_one_block(backend: Backend) -> None:
    # 3 * 3000 elements are three blocks of at most 4096; dim 3000 is no multiple of a vector of 16 bytes
    spec = ConvCacheSpec(3, 4, 2, 3000, 4, 2)
    for order, storage in itertools.product(ORDERS, STORAGES):
        spec = dataclasses.replace(spec, axis_order=order, storage=storage)
        state, windows = scrambled(spec.state_shape, spec, 1), scrambled(spec.windows_shape, spec, 2)
        pool = torch_ref.commit_conv_state(
            state.to(backend.device, copy=True), windows.to(backend.device, copy=True), [3, 1], [2, 1], spec=spec,
            implementation=backend.implementation,
        )  # fmt: skip
        assert_same_bits(pool, committed(state, windows, spec, [(3, 0, 2), (1, 1, 1)]))


@both_orders
@both_storages
def test_all_bit_patterns_survive(backend: Backend, order: Any, storage: Any) -> None:
    dim = 65536 // 4
    for dtype in ("bfloat16", "float16"):
        spec = ConvCacheSpec(1, 2, 1, dim, 5, 1, dtype, order, storage)
        patterns = torch.arange(65536).to(torch.int16).view(DTYPES[dtype]).reshape(spec.window_shape)
        windows = patterns.reshape(spec.windows_shape).to(backend.device, copy=True)
        pool = torch_ref.allocate_conv_cache(spec, device=backend.device).conv_state
        torch_ref.commit_conv_state(pool, windows, [1], [1], spec=spec, implementation=backend.implementation)
        assert_same_bits(pool[0, 1], patterns)
        assert_same_bits(torch_ref.gather_windows(windows, [1], spec=spec)[0, 0], patterns)
        if dtype == "float16" and backend.device == "cpu":
            continue  # NumPy's float16, which the interpreter uses, is slow
        # and through verify: as state, then as tokens
        buffer = poisoned(spec.windows_shape, spec, backend.device)
        x = time_first(patterns, spec)[None, :1].to(backend.device, copy=True)
        torch_ref.causal_conv1d_verify(
            x, pool, buffer, torch.zeros(dim, 5, device=backend.device), spec=spec, state_indices=[1], layer=0,
            implementation=backend.implementation,
        )  # fmt: skip
        row = time_first(buffer, spec).reshape(4, dim)
        assert_same_bits(row, time_first(patterns, spec)[[1, 2, 3, 0]])


HOSTILE = [-1, 11, 12, 22, -11, -12, INT32_MIN, INT32_MAX, INT32_MIN + 1, 65536, -65536]


@both_orders
@both_storages
def test_hostile_indices_write_nothing(backend: Backend, order: Any, storage: Any) -> None:
    spec = changed(axis_order=order, storage=storage, max_requests=11, num_draft_tokens=10)
    state = scrambled(spec.state_shape, spec, 1, backend.device)
    windows = scrambled(spec.windows_shape, spec, 2, backend.device)
    x, weight = torch.ones(11, 10, 5, device=backend.device), torch.ones(5, 4, device=backend.device)
    fine = list(range(11))
    ones = [1] * 11
    how: dict[str, Any] = {"spec": spec, "implementation": backend.implementation}
    for slots, rows, counts, valid in (
        (HOSTILE, fine, ones, None),
        (fine, HOSTILE, ones, None),
        (fine, fine, [0, *HOSTILE[:-1]], None),
        (fine, fine, ones, [0, *HOSTILE[:-1]]),
        (fine, fine, [n + 1 for n in fine], fine),
    ):
        pool, buffer = state.clone(), windows.clone()
        index: dict[str, Any] = {"window_rows": rows, "num_valid_tokens": valid}
        torch_ref.commit_conv_state(pool, buffer, slots, counts, **index, **how)
        assert_same_bits(pool, state)
        if counts is ones:
            y, _ = torch_ref.causal_conv1d_verify(x, pool, buffer, weight, state_indices=slots, layer=1, **index, **how)
            assert_same_bits(buffer, windows)
            assert not bits(y).any()
    y, _ = torch_ref.causal_conv1d_update(x[:, 0], pool, weight, state_indices=HOSTILE, layer=1, **how)
    y2, _ = torch_ref.causal_conv1d_prefill(x, pool, weight, spec=spec, state_indices=HOSTILE, layer=1)
    torch_ref.reset_conv_state(pool, HOSTILE, spec=spec)
    assert_same_bits(pool, state)
    assert not bits(y).any()
    assert not bits(y2).any()
    assert not bits(torch_ref.gather_windows(windows, ones, spec=spec, window_rows=HOSTILE)).any()


WIDE = [2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    "as_index",
    [
        pytest.param(list, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(lambda v: np.asarray(v, np.int64), id="numpy"),
        pytest.param(lambda v: torch.tensor(v, dtype=torch.int64), id="torch"),
        pytest.param(lambda v: [np.int64(n) for n in v], id="numpy-scalars"),
    ],
)
def test_wide_integers_saturate(backend: Backend, as_index: Callable[..., Any]) -> None:
    state, windows = scrambled(SPEC.state_shape, SPEC, 1), scrambled(SPEC.windows_shape, SPEC, 2)
    how: dict[str, Any] = {"spec": SPEC, "implementation": backend.implementation}

    def there(value: Any) -> Any:
        return value.to(backend.device) if isinstance(value, torch.Tensor) else value

    slots, ones = there(as_index([*WIDE, 3])), there(as_index([1] * 5))
    pool = torch_ref.commit_conv_state(there(state.clone()), there(windows), slots, ones, **how).cpu()
    assert_same_bits(pool, committed(state, windows, SPEC, [(3, 4, 1)]))
    # 2^32 + 3 rows, counts or valid tokens are no 3 either
    pool = torch_ref.commit_conv_state(
        there(state.clone()), there(windows), [*range(5)], there(as_index([*WIDE, 3])), **how
    )
    assert_same_bits(pool.cpu(), committed(state, windows, SPEC, [(4, 4, 3)]))
    pool = torch_ref.commit_conv_state(
        there(state.clone()), there(windows), [*range(5)], ones, window_rows=slots, **how
    )
    assert_same_bits(pool.cpu(), committed(state, windows, SPEC, [(4, 3, 1)]))
    pool = torch_ref.commit_conv_state(
        there(state.clone()), there(windows), [*range(5)], ones, num_valid_tokens=slots, **how
    )
    assert_same_bits(pool.cpu(), committed(state, windows, SPEC, [(4, 4, 1)]))


def test_unsigned_64_bit_indices_never_wrap() -> None:
    pool = torch_ref.allocate_conv_cache(SPEC, device="cpu").conv_state
    numbers = np.array([2**64 - 1, 2**63 + 2**32 + 3, 2**32 + 3, 4], np.uint64)
    for slots in (numbers, torch.from_numpy(numbers)):
        pool.fill_(1)
        torch_ref.reset_conv_state(pool, slots, spec=SPEC)
        assert pool[0, :, 0, 0].tolist() == [1] * 4 + [0] + [1] * 6


def test_null_slot_conventions(backend: Backend) -> None:
    state, windows = scrambled(SPEC.state_shape, SPEC, 1), scrambled(SPEC.windows_shape, SPEC, 2)
    for null_slot, live in ((0, []), (None, [(0, 0, 1)]), (-1, [(0, 0, 1)]), (2**40, [(0, 0, 1)])):
        pool = torch_ref.commit_conv_state(
            state.to(backend.device, copy=True),
            windows.to(backend.device, copy=True),
            [0, -1, 4],
            [1, 1, 2],
            spec=SPEC,
            null_slot=null_slot,
            implementation=backend.implementation,
        )
        assert_same_bits(pool, committed(state, windows, SPEC, [*live, (4, 2, 2)]))


@both_orders
@both_storages
def test_track_is_a_second_destination(backend: Backend, order: Any, storage: Any) -> None:
    spec = changed(axis_order=order, storage=storage)
    state, windows = scrambled(spec.state_shape, spec, 1), scrambled(spec.windows_shape, spec, 2)
    pool = torch_ref.commit_conv_state(
        state.to(backend.device, copy=True),
        windows.to(backend.device, copy=True),
        [1, 2, 0, 4, -1, 5],
        [3, 0, 2, 1, 1, 3],
        spec=spec,
        window_rows=[8, 7, 6, 5, 4, 3],
        num_valid_tokens=[3, 3, 3, 2, 3, 3],
        null_slot=0,
        track_indices=[6, 7, 8, 9, 10, 0],
        track_num_tokens=[1, 2, 0, 3, 3, 1],
        implementation=backend.implementation,
    )
    live = [(1, 8, 3), (4, 5, 1), (5, 3, 3)]
    tracked = [(6, 8, 1), (7, 7, 2), (10, 4, 3)]  # row 2 has n = 0, row 3 asks for more than its valid tokens
    assert_same_bits(pool, committed(state, windows, spec, live + tracked))


def test_structures_of_several_groups(backend: Backend) -> None:
    wide = changed(width=3, conv_dim=6, storage="dense", axis_order="channel_major", dtype="float32")
    specs = {"linear": SPEC, "short": wide}
    states = {k: scrambled(s.state_shape, s, 1) for k, s in specs.items()}
    buffers = {k: scrambled(s.windows_shape, s, 2) for k, s in specs.items()}
    pool = {
        "linear": list(states["linear"].to(backend.device, copy=True).unbind()),
        "short": states["short"].to(backend.device, copy=True),
    }
    windows = {
        "short": buffers["short"].to(backend.device, copy=True),
        "linear": list(buffers["linear"].to(backend.device, copy=True).unbind()),
    }
    how: dict[str, Any] = {"implementation": backend.implementation}
    returned = torch_ref.commit_conv_state(pool, windows, [1, 2], [3, 1], spec=specs, **how)
    assert returned is pool
    live = [(1, 0, 3), (2, 1, 1)]
    assert_same_bits(torch.stack(pool["linear"]), committed(states["linear"], buffers["linear"], SPEC, live))
    assert_same_bits(pool["short"], committed(states["short"], buffers["short"], wide, live))
    torch_ref.commit_conv_state(tuple(pool["linear"]), tuple(windows["linear"]), [4], [2], spec=SPEC, **how)
    expected = committed(states["linear"], buffers["linear"], SPEC, [*live, (4, 0, 2)])
    assert_same_bits(torch.stack(pool["linear"]), expected)


def test_an_error_in_one_group_writes_none() -> None:
    state, windows = scrambled(SPEC.state_shape, SPEC, 1), scrambled(SPEC.windows_shape, SPEC, 2)
    pool = [state.clone(), state[:, :, :2].clone()]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        torch_ref.commit_conv_state(pool, [windows, windows], [1], [1], spec=SPEC)
    assert str(caught.value) == (
        "`conv_state[1]`: expected layer, slot, column, channel = (2, 11, 3, 5), got (2, 11, 2, 5)."
    )
    assert_same_bits(pool[0], state)


@both_orders
def test_reset_zeroes_slots_and_nothing_else(order: Any) -> None:
    spec = changed(axis_order=order)
    state = scrambled(spec.state_shape, spec, 1)
    expected = state.clone()
    expected[:, [3, 10]] = 0
    pool = state.clone()
    assert torch_ref.reset_conv_state(pool, [3, -1, 10, 0, 11], spec=spec, null_slot=0) is pool
    assert_same_bits(pool, expected)
    one = state[0].clone()
    torch_ref.reset_conv_state(one, [3, 10], spec=spec)
    assert_same_bits(one, expected[0])


@both_orders
@both_storages
def test_no_requests_and_no_rows(backend: Backend, order: Any, storage: Any) -> None:
    spec = changed(axis_order=order, storage=storage, max_requests=0)
    state = scrambled(spec.state_shape, spec, 1, backend.device)
    pool, windows = state.clone(), torch_ref.allocate_conv_cache(spec, device=backend.device).conv_windows
    weight = torch.ones(5, 4, device=backend.device)
    how: dict[str, Any] = {"spec": spec, "implementation": backend.implementation}
    for batch, rows in ((0, None), (2, [0, -1])):
        x = torch.ones(batch, 3, 5, device=backend.device)
        y, _ = torch_ref.causal_conv1d_verify(
            x, pool, windows, weight, state_indices=[1] * batch, layer=0, window_rows=rows, **how
        )
        torch_ref.commit_conv_state(pool, windows, [1] * batch, [1] * batch, window_rows=rows, **how)
        taken = torch_ref.gather_windows(windows, [1] * batch, spec=spec, window_rows=rows)
        assert y.shape == x.shape
        assert taken.shape == (2, batch, *spec.window_shape)
        assert not y.any()
        assert not taken.any()
    y, _ = torch_ref.causal_conv1d_update(x[:0, 0], pool, weight, state_indices=[], layer=0, **how)
    assert y.shape == (0, 5)
    assert_same_bits(pool, state)


# --- prefill ----------------------------------------------------------------------------------------------------------


@both_orders
@pytest.mark.parametrize("extra", [0, 1])
def test_prefill_equals_single_steps(order: Any, extra: int) -> None:
    spec = changed(axis_order=order, state_len=3 + extra, conv_dim=37)
    state = normal(spec.state_shape, torch.bfloat16, 1)
    bits(state)[1, 5] = POISON["bfloat16"]  # a prompt that starts from zeros reads nothing of its slot
    x, weight = normal((6, 7, 37), torch.float32, 2), normal((37, 4), torch.bfloat16, 3)
    bias, slots, lengths = normal((37,), torch.float16, 4), [5, 3, 8, -1, 0, 2], [7, 2, 1, 7, 8, 5]
    x[1, 2:] = float("nan")
    continues = [False, True, True, True, True, False]
    pool = state.clone()
    y, returned = torch_ref.causal_conv1d_prefill(
        x, pool, weight, bias, spec=spec, state_indices=slots, lengths=lengths, has_initial_state=continues, layer=1
    )
    assert returned is pool
    stepped = state.clone()
    torch_ref.reset_conv_state(stepped[1], [5, 2], spec=spec)
    live = [True, True, True, False, False, True]  # slot -1; length 8 of 7
    for t in range(7):
        still = [s if good and t < n else -1 for s, n, good in zip(slots, lengths, live, strict=True)]
        single, _ = torch_ref.causal_conv1d_update(
            x[:, t], stepped, weight, bias, spec=spec, state_indices=still, layer=1
        )
        assert_same_bits(y[:, t], single)
    assert_same_bits(pool, stepped)


def test_prefill_in_chunks_equals_prefill_at_once() -> None:
    x, weight = normal((2, 9, 5), torch.bfloat16, 1), normal((5, 4), torch.float32, 2)
    pools = [normal(SPEC.state_shape, torch.bfloat16, 3) for _ in range(2)]
    how: dict[str, Any] = {"spec": SPEC, "state_indices": [4, 1], "layer": 0}
    whole, _ = torch_ref.causal_conv1d_prefill(x, pools[0], weight, **how)
    first, _ = torch_ref.causal_conv1d_prefill(x[:, :2], pools[1], weight, **how)
    rest, _ = torch_ref.causal_conv1d_prefill(
        x[:, 2:], pools[1], weight, has_initial_state=torch.tensor([True, True]), **how
    )
    assert_same_bits(torch.cat([first, rest], dim=1), whole)
    assert_same_bits(pools[1], pools[0])


# --- errors -----------------------------------------------------------------------------------------------------------


def call(name: str, **changes: Any) -> Any:
    """A call that is right but for `changes`."""
    cache = torch_ref.allocate_conv_cache(SPEC, device="cpu")
    arguments: dict[str, Any] = {"conv_state": cache.conv_state, "spec": SPEC, "state_indices": [1, 2]}
    if name in ("verify", "update", "prefill"):
        shape = (2, 5) if name == "update" else (2, 3, 5)
        arguments |= {"x": torch.zeros(shape), "weight": torch.zeros(5, 4), "layer": 0}
    if name in ("verify", "commit", "gather"):
        arguments["conv_windows"] = cache.conv_windows
    if name in ("commit", "gather"):
        arguments["num_accepted_tokens"] = [1, 2]
    if name == "gather":
        del arguments["conv_state"], arguments["state_indices"]
    names = {"commit": "commit_conv_state", "gather": "gather_windows", "reset": "reset_conv_state"}
    return getattr(torch_ref, names.get(name, f"causal_conv1d_{name}"))(**arguments | changes)


ZEROS = torch.zeros
SHARED = "All tensors of a call share a device."
ERRORS = [
    ("verify", {"x": ZEROS(2, 4, 5)}, "`x`: expected request, token, channel = (2, 3, 5), got (2, 4, 5)."),
    ("verify", {"x": ZEROS(3, 3, 5)}, "`state_indices`: expected request = (3,), got (2,)."),
    ("update", {"x": ZEROS(2, 1, 5)}, "`x`: expected request, channel = (2, 5), got (2, 1, 5)."),
    (
        "verify",
        {"x": ZEROS(2, 3, 5, dtype=torch.float64)},
        "`x`: expected dtype bfloat16, float16, float32, got torch.float64.",
    ),
    (
        "verify",
        {"weight": ZEROS(4, 5), "bias": ZEROS(4)},
        "`weight`: expected channel, tap = (5, 4), got (4, 5). (channel, 1, tap) = (5, 1, 4) is as good.\n"
        "`bias`: expected channel = (5,), got (4,).",
    ),
    (
        "verify",
        {"conv_state": ZEROS(SPEC.state_shape)},
        "`conv_state`: expected dtype torch.bfloat16, got torch.float32. "
        "Nothing is cast silently; the pool and its buffer share spec.dtype.",
    ),
    (
        "verify",
        {"conv_windows": ZEROS(2, 9, 6, 5, dtype=torch.bfloat16)},
        "`conv_windows`: expected layer, row, column, channel = (2, 9, 5, 5), got (2, 9, 6, 5).",
    ),
    (
        "verify",
        {"conv_windows": ZEROS(9, 5, 5, dtype=torch.bfloat16)},
        "`conv_windows`: expected a layer axis, as conv_state has, got (9, 5, 5).",
    ),
    (
        "update",
        {"conv_state": ZEROS(2, 11, 3, 8, dtype=torch.bfloat16)[..., :5]},
        "`conv_state`: expected strides of column, channel = (5, 1), got (8, 1). The other strides are free.",
    ),
    (
        "update",
        {"conv_state": ZEROS(1, 11, 3, 5, dtype=torch.bfloat16).expand(2, 11, 3, 5)},
        "`conv_state`: expected elements that share no memory, got strides (0, 15, 5, 1).",
    ),
    ("verify", {"layer": 2}, "`layer`: expected an index from 0 to 1 for stacked tensors, got 2."),
    ("verify", {"layer": -1}, "`layer`: expected an index from 0 to 1 for stacked tensors, got -1."),
    ("verify", {"layer": None}, "`layer`: expected an index from 0 to 1 for stacked tensors, got None."),
    ("verify", {"layer": True}, "`layer`: expected an index from 0 to 1 for stacked tensors, got True."),
    ("verify", {"layer": torch.tensor([0, 1])}, "`layer`: expected one integer, got torch.int64 (2,)."),
    (
        "update",
        {"conv_state": ZEROS(11, 3, 5, dtype=torch.bfloat16)},
        "`layer`: expected None for one layer's tensors, got 0.",
    ),
    ("update", {"activation": "relu"}, "`activation`: expected 'silu' or None, got 'relu'."),
    ("update", {"null_slot": 0.0}, "`null_slot`: expected a Python integer or None, got 0.0."),
    (
        "verify",
        {"x": ZEROS(10, 3, 5), "state_indices": [0] * 10},
        "`window_rows`: expected an index array, since requests = 10 exceed max_requests = 9, got None. "
        "None means row b for request b.",
    ),
    ("prefill", {"lengths": [1]}, "`lengths`: expected request = (2,), got (1,)."),
    ("prefill", {"has_initial_state": [0, 1]}, "`has_initial_state`: expected dtype torch.bool, got torch.int64."),
    (
        "prefill",
        {"implementation": "triton"},
        "`implementation`: expected None or 'eager', got 'triton'. Prefill has no kernel.",
    ),
    ("commit", {"num_accepted_tokens": [1]}, "`num_accepted_tokens`: expected request = (2,), got (1,)."),
    ("commit", {"state_indices": [1.0, 2.0]}, "`state_indices`: expected a flat list of integers, got [1.0, 2.0]."),
    (
        "commit",
        {"state_indices": [True, False]},
        "`state_indices`: expected a flat list of integers, got [True, False].",
    ),
    ("commit", {"window_rows": ZEROS(2)}, "`window_rows`: expected an integer dtype, got torch.float32."),
    (
        "commit",
        {"num_valid_tokens": np.array([True, False])},
        "`num_valid_tokens`: expected an integer dtype, got bool.",
    ),
    ("commit", {"state_indices": None}, "`state_indices`: expected an integer array of requests, got None."),
    (
        "commit",
        {"track_indices": [1, 2]},
        "`track_num_tokens`: expected an index array beside `track_indices`, got None. The two come together.",
    ),
    (
        "commit",
        {"track_num_tokens": [1, 2]},
        "`track_indices`: expected an index array beside `track_num_tokens`, got None. The two come together.",
    ),
    (
        "commit",
        {"conv_state": [ZEROS(1)]},
        "`conv_windows`: expected the structure list of [0] of conv_state, got Tensor.",
    ),
    ("commit", {"conv_state": 3}, "`conv_state`: expected a tensor, list, tuple or dict, got int."),
    ("commit", {"implementation": "pallas"}, "`implementation`: expected None, 'eager' or 'triton', got 'pallas'."),
    (
        "commit",
        {"state_indices": ZEROS(2, dtype=torch.int32, device="meta")},
        f"`state_indices`: expected device cpu, got meta. {SHARED}",
    ),
    (
        "verify",
        {"conv_windows": ZEROS(SPEC.windows_shape, dtype=torch.bfloat16, device="meta")},
        f"`conv_windows`: expected device cpu, got meta. {SHARED}",
    ),
    ("verify", {"x": ZEROS(2, 3, 5, device="meta")}, f"`x`: expected device cpu, got meta. {SHARED}"),
    (
        "gather",
        {"num_accepted_tokens": [[1, 2]]},
        "`num_accepted_tokens`: expected a flat list of integers, got [[1, 2]].",
    ),
    ("reset", {"conv_state": None}, "`conv_state`: expected a torch.Tensor, got NoneType."),
    ("reset", {"spec": None}, "`spec`: expected a torch_ref.ConvCacheSpec, got NoneType."),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), ERRORS, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(ERRORS)]
)
def test_errors(name: str, changes: dict[str, Any], message: str) -> None:
    call(name)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        call(name, **changes)
    assert str(caught.value) == message


def in_new_process(code: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


COMMIT = """
import torch, torch_ref
spec = torch_ref.ConvCacheSpec(1, 2, 1, 5, 4, 3)
cache = torch_ref.allocate_conv_cache(spec, device="cpu")
cache.conv_windows.fill_(1)
def commit(name):
    try:
        pool, windows = cache.conv_state, cache.conv_windows
        torch_ref.commit_conv_state(pool, windows, [1], [3], spec=spec, implementation=name)
        print(pool[0, :, 0, 0].tolist())
    except ValueError as error:
        print(error)
"""


def test_triton_on_cpu_needs_the_interpreter() -> None:
    pytest.importorskip("triton")
    said = in_new_process(COMMIT + "commit('triton')\ncommit(None)").splitlines()
    assert said == [
        "`implementation`: expected 'eager' for cpu tensors, got 'triton'. "
        "On CPU the kernels need TRITON_INTERPRET=1, set before their first use.",
        "[0.0, 1.0]",
    ]


def test_works_without_triton_and_without_jax() -> None:
    blocked = "import sys\nfor name in ('triton', 'jax', 'jax_impl'):\n    sys.modules[name] = None\n"
    said = in_new_process(blocked + COMMIT + "commit('triton')\ncommit(None)").splitlines()
    assert said == [
        "`implementation`: expected 'eager' where triton is not installed, got 'triton'.",
        "[0.0, 1.0]",
    ]
