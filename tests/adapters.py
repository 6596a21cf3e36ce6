"""Every path of the project behind one interface of NumPy arrays: same calls in, same arrays out, inputs left alone.

A path is named after what runs. Arguments are stacked or one layer's arrays, and for commit also pytrees of them, as in
the public functions. `as_given=True` passes index arguments on as they are and calls without `jit`, so that a path's
own conversion of indices is what gets tested.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (registers "bfloat16" with NumPy)
import numpy as np
import pytest

from tests import definition

_GPU = (pytest.mark.gpu,)

# name: marks. The definition itself is not among them: tests that have another expectation ask for `any_path`.
PATHS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "jax-xla": (),
    "jax-pallas_interpret": (),
    "torch-eager": (),
    "torch-triton": (),
    "jax-xla-gpu": _GPU,
    "jax-pallas-gpu": _GPU,
    "torch-triton-gpu": _GPU,
}
FAST = ("spec", "jax-xla", "torch-eager")  # no interpreter, and no compilation of a second or more


@functools.cache
def path(name: str) -> "Path":
    """The named path; skips the test, naming what is missing, where it cannot run."""
    if name == "spec":
        return DEFINITION
    framework, implementation = name.removesuffix("-gpu").split("-")
    if framework == "torch":
        for module in ("torch", "triton") if implementation == "triton" else ("torch",):
            if not is_installed(module):
                pytest.skip(f"{module} is not installed")
    if name.endswith("-gpu"):
        _need_gpu(framework)
    return (JaxPath if framework == "jax" else TorchPath)(name, implementation, name.endswith("-gpu"))


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _need_gpu(framework: str) -> None:
    if framework == "torch":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        return
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX sees no GPU; its default backend is {jax.default_backend()}")
    capability = float(jax.devices()[0].compute_capability)
    if capability < 9.0:
        pytest.skip(f"compute capability 9.0 is missing; the GPU has {capability}")


@dataclasses.dataclass(frozen=True)
class Path:
    """Calls of one implementation. Pools and buffers that a call may change come back as new arrays."""

    name: str
    implementation: str = ""
    on_gpu: bool = False

    @property
    def is_fast(self) -> bool:
        return self.name in FAST

    @property
    def widens_bfloat16(self) -> bool:
        """Whether the compiler moves bfloat16 through float32, which loses NaN payloads: JAX before 0.11 on CPU."""
        import jax

        return self.name.startswith("jax") and not self.on_gpu and jax.__version_info__ < (0, 11)

    def verify(self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        """(y, conv_windows, conv_state): the pool as it is after the call, for the test that nothing wrote it."""
        raise NotImplementedError

    def update(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        """(y, conv_state)"""
        raise NotImplementedError

    def prefill(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        """(y, conv_state)"""
        raise NotImplementedError

    def gather(self, conv_windows: Any, num_accepted_tokens: Any, **options: Any) -> Any:
        """windows"""
        raise NotImplementedError

    def commit(self, conv_state: Any, conv_windows: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        """conv_state"""
        raise NotImplementedError

    def recurrent(self, state: Any, step_states: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        """state"""
        raise NotImplementedError

    def after_verify(self, groups: Any, state: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        """(conv pools, recurrent pools); `groups` is a dict of (spec, pool, buffer), `state` a dict of pools."""
        raise NotImplementedError


class DefinitionPath(Path):
    """`tests.definition` with what the public functions add: defaults, one layer's arrays, pytrees, tracking."""

    def verify(self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        exact, windows, state = self.verify_exactly(
            x, conv_state, conv_windows, weight, bias, **options, number=np.float32
        )
        return exact.astype(x.dtype), windows, state

    def verify_exactly(
        self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any
    ) -> Any:
        """As `verify`, with y in float64 and not rounded at the end."""
        spec, layer = options["spec"], options.get("layer")
        slots, rows, valid = _indices(spec, options, len(x))
        state, windows = conv_state.copy(), conv_windows.copy()
        pool, buffer = (state, windows) if layer is not None else (state[None], windows[None])
        y = definition.verify(
            x,
            pool,
            buffer,
            weight.reshape(spec.conv_dim, spec.width),
            bias,
            slots=slots,
            rows=rows,
            valid=valid,
            number=options.get("number", np.float64),
            **_common(options),
        )
        return y, windows, state

    def update(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        everyone = np.ones(len(x), np.bool_)
        y, state = self.prefill(x[:, None], conv_state, weight, bias, has_initial_state=everyone, **options)
        return y[:, 0], state

    def prefill(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        exact, state = self.prefill_exactly(x, conv_state, weight, bias, **options, number=np.float32)
        return exact.astype(x.dtype), state

    def prefill_exactly(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        """As `prefill`, with y in float64 and not rounded at the end."""
        spec, state = options["spec"], conv_state.copy()
        lengths, continues = options.get("lengths"), options.get("has_initial_state")
        y = definition.prefill(
            x,
            state if options.get("layer") is not None else state[None],
            weight.reshape(spec.conv_dim, spec.width),
            bias,
            slots=options["state_indices"],
            number=options.get("number", np.float64),
            lengths=np.full(len(x), x.shape[1]) if lengths is None else lengths,
            continues=np.zeros(len(x), np.bool_) if continues is None else continues,
            **_common(options),
        )
        return y, state

    def gather(self, conv_windows: Any, num_accepted_tokens: Any, **options: Any) -> Any:
        spec = options["spec"]
        stacked = conv_windows.ndim == len(spec.windows_shape)
        spec = spec if stacked else dataclasses.replace(spec, num_layers=1)
        _, rows, valid = _indices(spec, options, len(num_accepted_tokens))
        windows = conv_windows if stacked else conv_windows[None]
        taken = definition.gather(windows, num_accepted_tokens, spec=spec, rows=rows, valid=valid)
        return taken if stacked else taken[0]

    def commit(self, conv_state: Any, conv_windows: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        spec = options["spec"]
        if isinstance(conv_state, list | tuple | dict):
            keys = list(conv_state) if isinstance(conv_state, dict) else range(len(conv_state))
            done = {}
            for key in keys:
                own = spec if hasattr(spec, "width") else spec[key]
                done[key] = self.commit(conv_state[key], conv_windows[key], slots, accepted, **options | {"spec": own})
            return done if isinstance(conv_state, dict) else type(conv_state)(done.values())
        state, stacked = conv_state.copy(), conv_state.ndim == len(spec.state_shape)
        _, rows, valid = _indices(spec, options, len(slots))
        for where, count in _destinations(slots, accepted, options):
            definition.commit(
                state if stacked else state[None],
                conv_windows if stacked else conv_windows[None],
                where,
                count,
                spec=spec,
                rows=rows,
                valid=valid,
                null_slot=options.get("null_slot"),
            )
        return state

    def recurrent(self, state: Any, step_states: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        if isinstance(state, dict):
            return {key: self.recurrent(state[key], step_states[key], slots, accepted, **options) for key in state}
        state, rows, valid = state.copy(), options.get("window_rows"), options.get("num_valid_tokens")
        for where, count in _destinations(slots, accepted, options):
            definition.commit_recurrent(
                state,
                step_states,
                where,
                count,
                rows=np.arange(len(slots)) if rows is None else rows,
                valid=np.full(len(slots), step_states.shape[2]) if valid is None else valid,
                null_slot=options.get("null_slot"),
            )
        return state

    def after_verify(self, groups: Any, state: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        steps, step_rows = options.pop("step_states", None), options.pop("step_rows", None)
        pools = {
            name: self.commit(pool, buffer, slots, accepted, spec=spec, **options)
            for name, (spec, pool, buffer) in groups.items()
        }
        if state is not None:
            rows = options.get("window_rows") if step_rows is None else step_rows
            state = self.recurrent(state, steps, slots, accepted, **options | {"window_rows": rows})
        return pools, state


def _destinations(slots: Any, accepted: Any, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    if options.get("track_indices") is None:
        return [(slots, accepted)]
    return [(slots, accepted), (options["track_indices"], options["track_num_tokens"])]


def _indices(spec: Any, options: dict[str, Any], batch: int) -> tuple[Any, Any, Any]:
    rows, valid = options.get("window_rows"), options.get("num_valid_tokens")
    return (
        options.get("state_indices"),
        np.arange(batch) if rows is None else rows,
        np.full(batch, spec.num_draft_tokens) if valid is None else valid,
    )


def _common(options: dict[str, Any]) -> dict[str, Any]:
    layer = options.get("layer")
    return {
        "spec": options["spec"],
        "null_slot": options.get("null_slot"),
        "layer": 0 if layer is None else layer,
        "activation": options.get("activation", "silu"),
    }


DEFINITION = DefinitionPath("spec")


# --- JAX --------------------------------------------------------------------------------------------------------------


class JaxPath(Path):
    """`jax_impl` under `jit`, with the array that the call returns updated donated."""

    def _call(self, name: str, donated: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        import jax

        options = {"implementation": self.implementation} | options
        if name == "gather_windows":
            del options["implementation"]  # one form only, for every device
        as_given = options.pop("as_given", False)
        arrays, options = jax.tree.map(functools.partial(_to_jax, floats_only=as_given), (arrays, options))
        function = _function(name) if as_given else _jitted(name, donated)
        return arrays, function(*arrays, **options)

    def verify(self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        taken = (x, conv_state, conv_windows, weight, bias)
        arrays, (y, windows, *moved) = self._call("causal_conv1d_verify", "conv_windows", taken, options)
        return np.asarray(y), np.asarray(windows), np.asarray(moved[0] if moved else arrays[1])

    def update(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        _, (y, state) = self._call("causal_conv1d_update", "conv_state", (x, conv_state, weight, bias), options)
        return np.asarray(y), np.asarray(state)

    def prefill(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        _, (y, state) = self._call("causal_conv1d_prefill", "conv_state", (x, conv_state, weight, bias), options)
        return np.asarray(y), np.asarray(state)

    def gather(self, conv_windows: Any, num_accepted_tokens: Any, **options: Any) -> Any:
        _, windows = self._call("gather_windows", "", (conv_windows, num_accepted_tokens), options)
        return np.asarray(windows)

    def commit(self, conv_state: Any, conv_windows: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        import jax

        taken = (conv_state, conv_windows, slots, accepted)
        _, state = self._call("commit_conv_state", "conv_state", taken, options)
        return jax.tree.map(np.asarray, state)

    def recurrent(self, state: Any, step_states: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        import jax

        taken = (state, step_states, slots, accepted)
        return jax.tree.map(np.asarray, self._call("commit_recurrent_state", "state", taken, options)[1])

    def after_verify(self, groups: Any, state: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        import jax

        import jax_impl

        conv = {name: jax_impl.ConvCache(pool, buffer, spec) for name, (spec, pool, buffer) in groups.items()}
        taken = (jax_impl.HybridCache(conv, state), slots, accepted)
        after = self._call("commit_after_verify", "cache", taken, options)[1]
        pools = {name: np.asarray(one.conv_state) for name, one in after.conv.items()}
        return pools, jax.tree.map(np.asarray, after.recurrent_state)


def _to_jax(value: Any, floats_only: bool) -> Any:
    import jax.numpy as jnp

    return jnp.array(value) if isinstance(value, np.ndarray) and not (floats_only and _is_index(value)) else value


def _is_index(value: np.ndarray) -> bool:
    return value.dtype.kind in "iub"


def _function(name: str) -> Callable[..., Any]:
    import jax_impl

    return getattr(jax_impl, name)


@functools.cache
def _jitted(name: str, donated: str) -> Callable[..., Any]:
    import inspect

    import jax

    known = inspect.signature(_function(name)).parameters
    static = [key for key in ("spec", "null_slot", "activation", "implementation", "layer_axis") if key in known]
    return jax.jit(_function(name), static_argnames=static, donate_argnames=[donated] if donated else [])


# --- torch ------------------------------------------------------------------------------------------------------------


class TorchPath(Path):
    """`torch_ref` on CPU tensors, or on the GPU."""

    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        import torch_ref

        options = {"implementation": self.implementation} | options
        if name in ("gather_windows", "causal_conv1d_prefill"):
            del options["implementation"]  # eager only
        if "spec" in options:
            options["spec"] = _map(_to_torch_spec, options["spec"])
        to = functools.partial(
            _to_torch, device="cuda" if self.on_gpu else "cpu", floats_only=options.pop("as_given", False)
        )
        tensors = tuple(_map(to, value) for value in arrays)
        moved = {key: value if key == "spec" else _map(to, value) for key, value in options.items()}
        return tensors, getattr(torch_ref, name)(*tensors, **moved)

    def verify(self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        taken = (x, conv_state, conv_windows, weight, bias)
        tensors, (y, windows, *moved) = self._call("causal_conv1d_verify", taken, options)
        assert windows is tensors[2] and all(one is tensors[1] for one in moved)
        return _from_torch(y), _from_torch(windows), _from_torch(tensors[1])

    def update(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        tensors, (y, state) = self._call("causal_conv1d_update", (x, conv_state, weight, bias), options)
        assert state is tensors[1]
        return _from_torch(y), _from_torch(state)

    def prefill(self, x: Any, conv_state: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        tensors, (y, state) = self._call("causal_conv1d_prefill", (x, conv_state, weight, bias), options)
        assert state is tensors[1]
        return _from_torch(y), _from_torch(state)

    def gather(self, conv_windows: Any, num_accepted_tokens: Any, **options: Any) -> Any:
        return _from_torch(self._call("gather_windows", (conv_windows, num_accepted_tokens), options)[1])

    def commit(self, conv_state: Any, conv_windows: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        taken = (conv_state, conv_windows, slots, accepted)
        return _map(_from_torch, self._call("commit_conv_state", taken, options)[1])

    def recurrent(self, state: Any, step_states: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        taken = (state, step_states, slots, accepted)
        return _map(_from_torch, self._call("commit_recurrent_state", taken, options)[1])

    def after_verify(self, groups: Any, state: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        import torch_ref

        to = functools.partial(_to_torch, device="cuda" if self.on_gpu else "cpu", floats_only=False)
        conv = {
            name: torch_ref.ConvCache(to(pool), to(buffer), _to_torch_spec(spec))
            for name, (spec, pool, buffer) in groups.items()
        }
        cache = torch_ref.HybridCache(conv, _map(to, state))
        after = self._call("commit_after_verify", (cache, slots, accepted), options)[1]
        pools = {name: _from_torch(one.conv_state) for name, one in after.conv.items()}
        return pools, _map(_from_torch, after.recurrent_state)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list) and not all(isinstance(value, int) for value in tree):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _to_torch_spec(spec: Any) -> Any:
    import torch_ref

    return torch_ref.ConvCacheSpec(**dataclasses.asdict(spec))


def _to_torch(value: Any, device: str, floats_only: bool) -> Any:
    import torch

    if not isinstance(value, np.ndarray) or (floats_only and _is_index(value)):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(value.copy()).to(device)


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("bfloat16")
    return tensor.numpy()
