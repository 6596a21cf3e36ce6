"""The comparison that comes before a measurement: kernels, and Triton on a GPU, against the XLA form."""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.bench import compiling, drafts, prefill, rollback, subjects
from jax_impl.bench.step import FORMS, inputs, whole_step
from jax_impl.cache import ConvCache
from jax_impl.commit import commit_conv_state
from jax_impl.conv import Activation, ConvWeight, causal_conv1d_verify
from jax_impl.layout import AxisOrder, ConvCacheSpec
from jax_impl.prefill import causal_conv1d_prefill
from jax_impl.rollback import HybridCache

# A step of y's dtype at 1: two results that are rounded to it from nearly one value are at most so far apart.
ULP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}

PREFILL_LENGTHS = (37, 2, 16, 30, 1)  # of the compared prompts: around the state's columns and the kernel's chunks
ROLLBACKS = ((False, False), (False, True), (True, False), (True, True))  # recurrent state or not, tracked set or not

Results = dict[str, np.ndarray]  # pools and buffer compare as integers, y within `_y_bound`
Others = dict[str, Callable[[], Results]]  # by what is printed of them


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation on a geometry with a batch size."""

    operation: str
    spec: ConvCacheSpec
    batch: int


def small(operation: str, order: AxisOrder) -> list[Point]:
    """Points that the interpreter runs in seconds; several sizes for `scaling`."""
    spec = ConvCacheSpec(2, 11, 6, 128, 4, 4, axis_order=order)
    if operation == "rollback":
        of_parts = len(rollback.PARTS) * spec.conv_dim
        return [Point(operation, dataclasses.replace(spec, conv_dim=of_parts, num_slots=7, max_requests=4), 3)]
    if operation != "scaling":
        return [Point(operation, spec, 5)]
    sizes = [{"conv_dim": 256}, {"num_slots": 7}, {"num_slots": 19}]
    specs = [dataclasses.replace(spec, **size) for size in sizes]
    return [Point(of, one, 5) for of in ("commit", "verify") for one in specs]


def reduced(operation: str, spec: ConvCacheSpec) -> Point:
    """The measured geometry with two layers, for the comparison before it is timed; each request needs a slot."""
    operation = "step" if operation == "scaling" else operation  # both of its operations at once
    if operation == "rollback":  # whose states are large
        slots, rows = min(37, spec.num_slots), min(19, spec.max_requests)
        spec = dataclasses.replace(spec, num_layers=2, num_slots=slots, max_requests=rows)
        return Point(operation, spec, min(16, slots // 2))
    return Point(operation, dataclasses.replace(spec, num_layers=2), min(16, spec.num_slots))


def check(point: Point) -> bool:
    """Prints and returns whether every implementation agrees with the XLA form.

    Pool and buffer must have the same bits, y may differ by the rounding of its sums and one of its own. A compiled
    program is compared with what it should be: in place.
    """
    spec = point.spec
    where = f"check {point.operation} {spec.axis_order} conv_dim={spec.conv_dim} C={spec.num_slots} B={point.batch}"
    if point.operation == "compile":
        return _check_programs(point, where)
    comparisons = {
        "rollback": _rollback_comparisons,
        "prefill": _prefill_comparisons,
        "drafts": _drafts_comparisons,
    }
    same = True
    for expected, bound, others in comparisons.get(point.operation, _comparisons)(point):
        for name, results in others.items():
            wrong = _differences(expected, results(), bound)
            same &= not wrong
            print(f"{where} {name}: {'DIFFERENT ' + ', '.join(wrong) if wrong else 'same'}", flush=True)
    return same


def _kernel() -> checks.Implementation:
    return "pallas" if jax.default_backend() == "gpu" else "pallas_interpret"


def _has_triton() -> bool:
    return _kernel() == "pallas" and importlib.util.find_spec("torch") is not None


def _comparisons(point: Point) -> Iterator[tuple[Results, Any, Others]]:
    """Results of the XLA form, how far y may be from them, and the implementations to compare with them."""
    kernel: checks.Implementation = _kernel()
    cache = subjects.random_cache(point.spec)
    expected = _results(point, cache, "xla", "unrolled")
    others: Others = {}
    if point.operation == "step":
        others["xla scan"] = lambda: _results(point, cache, "xla", "scan")
        others |= {f"{kernel} {form}": lambda form=form: _results(point, cache, kernel, form) for form in FORMS}
    else:
        others[kernel] = lambda: _results(point, cache, kernel, "unrolled")
    if _has_triton():
        others["triton"] = lambda: _triton_results(point, cache)
    yield expected, _y_bound(point, cache, expected["y"]) if "y" in expected else None, others
    if point.operation == "step":
        handed_on, chained = _chained_results(point, cache, kernel)
        yield handed_on, None, {f"{kernel} chained": lambda: chained}


def _chained_results(point: Point, cache: ConvCache, implementation: checks.Implementation) -> tuple[Results, Results]:
    """What the unrolled step leaves when y is handed on by hand, layer by layer, and what the chained one leaves.

    Of one implementation: another's y differs by its rounding, which the next layer would then write to the buffer.
    """
    spec, case = point.spec, _case(point)
    indices = [jnp.asarray(one) for (one,) in subjects.index_sets(case, 1)]
    caches, (first, weight) = (cache.conv_state, cache.conv_windows), inputs("chained", case)
    unrolled, chained = (
        jax.jit(whole_step(form, spec, implementation, stack_y=False)) for form in ("unrolled", "chained")
    )
    x = [first] * spec.num_layers
    for layer in range(spec.num_layers):
        expected, y = unrolled(caches, x, weight, *indices)
        x = [*x[: layer + 1], *y[layer : spec.num_layers - 1]]
    (pool, windows), last = chained(caches, first, weight, *indices)
    return _without_tolerance(expected[0], expected[1], y[-1]), _without_tolerance(pool, windows, last)


def _without_tolerance(pool: jax.Array, windows: jax.Array, last: jax.Array) -> Results:
    return {"pool": np.asarray(pool), "buffer": np.asarray(windows), "last y": np.asarray(last)}


def _differences(expected: Results, got: Results, y_bound: Any) -> list[str]:
    """Names of the arrays that differ."""
    wrong = []
    for name, array in expected.items():
        if name == "y":
            same = np.all(np.abs(array.astype(np.float64) - got[name].astype(np.float64)) <= y_bound)
        else:
            bits = np.uint16 if array.dtype.itemsize == 2 else np.uint32
            same = np.array_equal(array.view(bits), got[name].view(bits))
        if not same:
            wrong.append(name)
    return wrong


def _y_bound(point: Point, cache: ConvCache, y: np.ndarray) -> np.ndarray:
    """How far apart two right values of each y can be.

    Each side makes K+1 roundings of 2^-24 in its float32 sum, relative to the sum of the products' magnitudes, and the
    activation adds a few, 2^-21 of y where a kernel approximates it; then both are rounded to y's dtype.
    """
    spec, case = point.spec, _case(point)
    (slots,), (rows,), _ = (list(map(jnp.asarray, one)) for one in subjects.index_sets(case, 1))
    x, weights = subjects.verify_inputs(case, spec.num_layers)
    pool = jnp.abs(cache.conv_state)

    @jax.jit
    def magnitude(x: jax.Array, taps: jax.Array, layer: jax.Array) -> jax.Array:
        return causal_conv1d_verify(
            jnp.abs(x).astype(jnp.float32), pool, cache.conv_windows, ConvWeight(jnp.abs(taps)), spec=spec,
            state_indices=slots, layer=layer, window_rows=rows, activation=None, implementation="xla",
        )[0]  # fmt: skip

    layers = [1] if point.operation == "verify" else range(spec.num_layers)
    sums = np.stack([np.asarray(magnitude(x[one], weights[one].taps, jnp.int32(one))) for one in layers])
    return _rounding(spec, sums, y)


def _rounding(spec: ConvCacheSpec, sums: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`_y_bound` for given sums of magnitudes."""
    absolute = (spec.width + 10) * 2.0**-23 * sums.astype(np.float64).reshape(y.shape)
    return ULP[spec.dtype] * np.abs(y.astype(np.float64)) + absolute


def _case(point: Point) -> subjects.Case:
    return subjects.Case(point.spec, point.batch, point.spec.num_layers)


def _results(point: Point, cache: ConvCache, implementation: checks.Implementation, form: Any) -> Results:
    """What one call of the operation leaves, of random arrays."""
    spec, case = point.spec, _case(point)
    (slots,), (rows,), (accepted,) = (list(map(jnp.asarray, one)) for one in subjects.index_sets(case, 1))
    if point.operation == "commit":
        commit = jax.jit(
            lambda pool, windows: commit_conv_state(
                pool, windows, slots, accepted, spec=spec, window_rows=rows, implementation=implementation
            )
        )
        return {"pool": np.asarray(commit(cache.conv_state, cache.conv_windows))}
    if point.operation == "verify":
        x, weights = subjects.verify_inputs(case, spec.num_layers)
        verify = jax.jit(
            lambda x, pool, windows: causal_conv1d_verify(
                x, pool, windows, weights[1], spec=spec, state_indices=slots, layer=1, window_rows=rows,
                implementation=implementation,
            )
        )  # fmt: skip
        y, windows = verify(x[1], cache.conv_state, cache.conv_windows)
        return {"buffer": np.asarray(windows), "y": np.asarray(y)}
    x, weight = inputs(form, case)
    step = jax.jit(whole_step(form, spec, implementation, stack_y=True))
    (pool, windows), y = step((cache.conv_state, cache.conv_windows), x, weight, slots, rows, accepted)
    return {"pool": np.asarray(pool), "buffer": np.asarray(windows), "y": np.stack([np.asarray(one) for one in y])}


def _triton_results(point: Point, cache: ConvCache) -> Results:
    """The same of the Triton kernels, from the same arrays."""
    import torch

    spec, case = point.spec, _case(point)
    twin, state, windows = subjects.torch_cache(spec)
    state.copy_(_tensor(cache.conv_state))
    windows.copy_(_tensor(cache.conv_windows))
    twins = (twin, state, windows)
    (slots,), (rows,), (accepted,) = (subjects.on_device(one) for one in subjects.index_sets(case, 1))
    if point.operation == "commit":
        subjects.triton_commit(twins, slots, rows, accepted)
        return {"pool": _array(state)}
    x, weights = subjects.verify_inputs(case, spec.num_layers)
    weight = [_tensor(one.taps).T.contiguous() for one in weights]
    layers = [1] if point.operation == "verify" else range(spec.num_layers)
    y = [subjects.triton_verify(twins, _tensor(x[layer]), weight, layer, slots, rows)[0] for layer in layers]
    if point.operation == "verify":
        return {"buffer": _array(windows), "y": _array(y[0])}
    subjects.triton_commit(twins, slots, rows, accepted)
    return {"pool": _array(state), "buffer": _array(windows), "y": _array(torch.stack(y))}


def _tensor(array: Any) -> Any:
    """A JAX array's bits on the torch device."""
    import torch

    numbers = np.asarray(array)
    bits = torch.from_numpy(numbers.view(np.int16 if numbers.dtype.itemsize == 2 else np.int32).copy())
    return bits.to(subjects.TORCH_DEVICE).view(getattr(torch, numbers.dtype.name))


def _array(tensor: Any) -> np.ndarray:
    """A tensor's bits."""
    import torch

    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).cpu().numpy()
    return bits.view(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


# ---- rollback, prefill and drafts ------------------------------------------------------------------------------------


def _rollback_comparisons(point: Point) -> Iterator[tuple[Results, Any, Others]]:
    """Conv groups alone and with recurrent state, with one index set and two; in every form that is timed."""
    kernel = _kernel()
    for recurrent, kinds in itertools.groupby(ROLLBACKS, key=lambda kind: kind[0]):
        arrays = rollback.random_arrays(point.spec, recurrent)
        for _, track in kinds:
            case = rollback.Case(point.spec, point.batch, 1, recurrent=recurrent, track=track)
            label = f"{'conv, recurrent' if recurrent else 'conv'}{', tracked' if track else ''}:"
            others: Others = {}
            for form in rollback.forms(case):
                name = f"{label} {kernel}{'' if form == 'pallas' else f' {form}'}"
                others[name] = functools.partial(_rollback_results, form, case, arrays, kernel)
            if _has_triton():
                others[f"{label} triton"] = functools.partial(_triton_rollback_results, case, arrays)
            yield _rollback_results("pallas", case, arrays, "xla"), None, others


def _rollback_results(
    form: str, case: rollback.Case, arrays: tuple[HybridCache, Any], implementation: checks.Implementation
) -> Results:
    """The pools that one rollback leaves, by the name of the part."""
    one, own = rollback.form_and_cache(form, arrays[0], implementation)
    (indices,) = rollback.index_sets(case, 1)
    cache = jax.jit(one, donate_argnums=0)(own, arrays[1], jax.tree.map(jnp.asarray, indices))
    pools = {}
    for part, group in cache.conv.items():
        layers = group if isinstance(group, list) else [group]
        pool = np.stack([np.asarray(layer.conv_state) for layer in layers])
        pools[part] = pool.reshape(rollback.group_spec(case.spec).state_shape)
    return pools | ({"recurrent": np.asarray(cache.recurrent_state)} if case.recurrent else {})


def _triton_rollback_results(case: rollback.Case, arrays: tuple[HybridCache, Any]) -> Results:
    cache, steps = rollback.torch_arrays(case.spec, case.recurrent)
    for part, twin in cache.conv.items():
        twin.conv_state.copy_(_tensor(arrays[0].conv[part].conv_state))
        twin.conv_windows.copy_(_tensor(arrays[0].conv[part].conv_windows))
    if case.recurrent:
        cache.recurrent_state.copy_(_tensor(arrays[0].recurrent_state))
        steps.copy_(_tensor(arrays[1]))
    (indices,) = rollback.index_sets(case, 1)
    rollback.triton_rollback(cache, steps, rollback.on_device(indices))
    pools = {part: _array(twin.conv_state) for part, twin in cache.conv.items()}
    return pools | ({"recurrent": _array(cache.recurrent_state)} if case.recurrent else {})


def _prefill_comparisons(point: Point) -> Iterator[tuple[Results, Any, Others]]:
    """Prompts of all lengths in one layer, from zeros and continued."""
    kernel, spec = _kernel(), point.spec
    cache, case = subjects.random_cache(spec), prefill.Case(spec, point.batch, 1, tokens=max(PREFILL_LENGTHS))
    (x,), weights = subjects.verify_inputs(case, 1, case.tokens)
    arrays = x, cache.conv_state, weights[1].taps
    magnitudes = tuple(map(jnp.abs, (x.astype(jnp.float32), *arrays[1:])))
    for continued in (False, True):
        results = functools.partial(_prefill_results, case, continued)
        expected = results("xla", arrays)
        bound = _rounding(spec, results("xla", magnitudes, activation=None)["y"], expected["y"])
        name = f"continued: {kernel}" if continued else kernel
        yield expected, bound, {name: functools.partial(results, kernel, arrays)}


def _prefill_results(
    case: prefill.Case,
    continued: bool,
    implementation: checks.Implementation,
    arrays: tuple[jax.Array, ...],
    activation: Activation | None = "silu",
) -> Results:
    """What one prefill leaves of x, pool and taps."""
    (slots,), _, _ = subjects.index_sets(case, 1)
    lengths = np.resize(np.asarray(PREFILL_LENGTHS, np.int32), case.batch)
    run = jax.jit(
        lambda x, pool, taps: causal_conv1d_prefill(
            x, pool, ConvWeight(taps), spec=case.spec, state_indices=slots, lengths=lengths,
            has_initial_state=np.ones(case.batch, bool) if continued else None, layer=1, activation=activation,
            implementation=implementation,
        )
    )  # fmt: skip
    y, pool = run(*arrays)
    return {"pool": np.asarray(pool), "y": np.asarray(y)}


def _drafts_comparisons(point: Point) -> Iterator[tuple[Results, Any, Others]]:
    """Every design's step; and what designs must have in common, whatever computes them.

    A tree whose links are a chain's is that chain. And a step that resumes, with a commit at its end, leaves what a
    commit before the step and one after it leave.
    """
    kernel, batch = _kernel(), point.batch
    counts = jnp.arange(batch, dtype=jnp.int32) % (point.spec.num_draft_tokens + 1)
    for design in drafts.DESIGNS["verify"]:
        case = subjects.Case(drafts.design_spec(point.spec, design, batch), batch, 1)
        (caches, _), (x, weight, slots, _, links) = drafts.inputs(case, design)
        arrays = caches, x, weight, slots, counts, links
        results = functools.partial(_drafts_results, case.spec, arrays)
        expected = results(design, "xla")
        bound = _rounding(case.spec, _drafts_magnitudes(case.spec, arrays, design), expected["y"])
        got = results(design, kernel)
        yield expected, bound, {f"{design}: {kernel}": lambda got=got: got}
        if design == "kept_tree":
            yield results("kept", kernel), bound, {f"{design} as kept: {kernel}": lambda got=got: got}
        if design.endswith("_resumed"):
            committing = results(design.removesuffix("_resumed"), kernel, commit_before=True)
            resuming = functools.partial(results, design, kernel, commit_after=True)
            yield committing, bound, {f"{design} as two commits: {kernel}": resuming}


def _drafts_results(
    spec: ConvCacheSpec,
    arrays: tuple[Any, ...],
    design: str,
    implementation: checks.Implementation,
    *,
    commit_before: bool = False,
    commit_after: bool = False,
    activation: Activation | None = "silu",
) -> Results:
    """What one step of a design leaves, with a commit of the step before or one more commit where it is asked for."""
    commit = functools.partial(commit_conv_state, spec=spec, implementation=implementation)
    step = drafts.step_of(design, spec, implementation, commits=True, activation=activation)

    @jax.jit
    def run(carried: Any, x: Any, weight: ConvWeight, slots: jax.Array, counts: jax.Array, links: jax.Array) -> Any:
        pool, windows, before = carried
        if commit_before:
            pool = commit(pool, windows if before is None else before, slots, counts)
        (pool, windows, _), y = step((pool, windows, before), x, weight, slots, counts, links)
        if commit_after:
            pool = commit(pool, windows, slots, counts)
        return pool, windows, y

    pool, windows, y = run(*arrays)
    return {"pool": np.asarray(pool), "buffer": np.asarray(windows), "y": np.stack([np.asarray(one) for one in y])}


def _drafts_magnitudes(spec: ConvCacheSpec, arrays: tuple[Any, ...], design: str) -> np.ndarray:
    """Sums of the products' magnitudes, in float32."""
    magnitudes = jax.tree.map(
        lambda one: jnp.abs(one).astype(jnp.float32) if jnp.issubdtype(one.dtype, jnp.floating) else one, arrays
    )
    return _drafts_results(dataclasses.replace(spec, dtype="float32"), magnitudes, design, "xla", activation=None)["y"]


def _check_programs(point: Point, where: str) -> bool:
    """Whether every program is in place. Off the GPU these are of the XLA form and float32.

    The kernels cannot be compiled there, and for bfloat16 the CPU's compiler in JAX 0.10 makes a copy.
    """
    gpu = jax.default_backend() == "gpu"
    spec = point.spec if gpu else dataclasses.replace(point.spec, dtype="float32")
    fine = True
    for plan in compiling.programs(spec, point.batch, (1, spec.num_layers)):
        if not gpu and not plan.command_buffers:
            continue  # an option of GPU programs
        row = compiling.compiled(plan, "pallas" if gpu else "xla")
        same = compiling.in_place(row)
        fine &= same
        said = "in place" if same else f"NOT IN PLACE: {row['pool_copies'] or 'not aliased'}"
        form = "" if gpu else ", XLA form"
        print(f"{where} {plan.form} L={plan.spec.num_layers}{form}: {said}", flush=True)
    return fine
