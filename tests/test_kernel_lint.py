"""How kernels are written, read off the source: what they read ends in `_in`, what they write in `_out`, in this order.

A kernel function is one that `call_in_place` launches, or one that such a function calls with a ref. In torch_ref,
whose kernels follow the field's dialect, the groups are the comments `# inputs`, `# outputs` and `# inputs and outputs`
in the signature. Of a dictionary the keys have the suffix as well.
While a kernel runs, the interpreter's race detector finds what no source shows: two blocks that write one place.
"""

import ast
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_impl import ConvCacheSpec, causal_conv1d_update, causal_conv1d_verify, commit_conv_state, pallas_backend

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jax_impl"
MAX_LINES = 90
PACKAGES = ("jax_impl", "torch_ref")
KERNELS_IN = ("commit", "conv", "entries", "prefill")
TRITON_IN = ("columns", "commit_kernel", "kernels", "verify_kernel")
LAUNCHED = {"_commit_kernel", "_conv_kernel", "_prefill_kernel"}

Functions = dict[str, ast.FunctionDef]


def tree_of(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def all_functions(tree: ast.AST) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def jax_functions() -> Functions:
    files = [PACKAGE / f"{name}.py" for name in KERNELS_IN]
    return {node.name: node for file in files for node in tree_of(file).body if isinstance(node, ast.FunctionDef)}


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Positional ones and `*rest`: where refs are. What is static stands after `*`."""
    arguments = function.args
    return [
        one.arg for one in [*arguments.posonlyargs, *arguments.args, *([arguments.vararg] if arguments.vararg else [])]
    ]


def is_in(name: str) -> bool:
    return name == "inputs" or name.endswith("_in")


def is_out(name: str) -> bool:
    return name.endswith("_out")


def launched(functions: Functions) -> set[str]:
    """Functions that stand in the first argument of a `call_in_place`."""
    calls = [
        call
        for function in functions.values()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("call_in_place")
    ]
    return {name for call in calls for name in names_in(call.args[0]) if name in functions}


def kernel_functions(functions: Functions) -> Functions:
    """The launched ones, and everything with a ref among its parameters that they reach."""
    found: Functions = {}
    waiting = sorted(launched(functions))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = functions[name]
            reached = names_in(functions[name]) & set(functions) - set(found)
            waiting += [one for one in reached if any(is_in(p) or is_out(p) for p in parameters(functions[one]))]
    return found


def root_of(target: ast.AST) -> str | None:
    """`a` of `a[…]`, `a.at[…]` and `a["key"][…]`."""
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def stores(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """What a kernel function stores to, and where: assignments to elements, and the first argument of store words.

    `partial(store, ref, …)` counts as `store(ref, …)`.
    """
    nodes: Iterator[Any] = ast.walk(function)
    for node in nodes:
        targets = list(node.targets) if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Subscript) and (name := root_of(target)):
                yield name, node.lineno
        if isinstance(node, ast.Call) and node.args:
            called, arguments = ast.unparse(node.func), node.args
            if called.endswith("partial"):
                called, arguments = ast.unparse(arguments[0]), arguments[1:]
            if "store" in called and arguments and (name := root_of(arguments[0])):
                yield name, node.lineno


def problems_of(functions: Functions) -> list[str]:
    """Every breach of the rules in the kernel functions among `functions`."""
    found = []
    for name, function in kernel_functions(functions).items():
        refs = [one for one in parameters(function) if is_in(one) or is_out(one)]
        others = [one for one in parameters(function) if one not in refs]
        if parameters(function) != [*filter(is_in, refs), *filter(is_out, refs), *others]:
            found.append(f"{name}: parameters are not in the order _in, _out, others")
        local = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        for target, line in stores(function):
            if is_in(target) or (target not in local and not is_out(target)):
                found.append(f"{name}:{line}: a store to {target}, which is no output")
        for array, key in named_elements(function):
            suffix = "_in" if array == "inputs" else "_out"
            if not key.endswith(suffix):
                found.append(f"{name}: {array}[{key!r}] does not end in {suffix}")
    return found


def named_elements(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """`inputs["key"]` and `…_out["key"]`."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and isinstance(node.slice, ast.Constant)
        ):
            array, key = node.value.id, node.slice.value
            if isinstance(key, str) and (array == "inputs" or is_out(array)):
                yield array, key


def test_the_kernels_are_found() -> None:
    assert launched(jax_functions()) == LAUNCHED
    helpers = {
        *("_copy_unit", "_move_unit", "_target", "_load_history", "_convolve_request", "_store_columns"),
        *("store_entry", "_convolve_chunk", "_first_state", "_last_inputs"),
    }
    assert helpers | LAUNCHED == set(kernel_functions(jax_functions()))


def test_kernels_read_what_is_in_and_write_what_is_out() -> None:
    assert problems_of(jax_functions()) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("def k(inputs, y_out): inputs['x_in'][0] = 1", "a store to inputs"),
        ("def k(x_in, y_out): x_in[0] += 1", "a store to x_in"),
        ("def k(x_in, y_out): when(live)(partial(store_runs, x_in, 0))", "a store to x_in"),
        ("def k(x_in, y_out): store_columns(x_in.at[0], 1)", "a store to x_in"),
        ("def k(x_in, y): y[0] = x_in[0]", "a store to y,"),
        ("def k(y_out, x_in): y_out[0] = x_in[0]", "not in the order"),
        ("def k(inputs, place, y_out): y_out[0] = 1", "not in the order"),
        ("def k(inputs, y_out): y_out[0] = inputs['slots'][0]", "does not end in _in"),
        ("def k(arrays_out, *y_out): y_out[0] = arrays_out['state_in'][0]", "does not end in _out"),
        ("def k(inputs, *y_out): store_entry(inputs['x_in'], y_out[0])", "a store to inputs"),
        ("def k(inputs, *arrays): arrays[0][0] = 1", "a store to arrays,"),
        ("def k(x_in, y_out): helper(x_in)\ndef helper(x_in): x_in[0] = 1", "helper:2: a store to x_in"),
    ],
)
def test_a_breach_is_seen(line: str, problem: str) -> None:
    tree = ast.parse(f"{line}\ndef launch(): call_in_place(partial(k, plan=1), 2)")
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    (found,) = problems_of(functions)
    assert problem in found


def test_words_that_load_store_nothing() -> None:
    """`load_runs`, `load_entry` and the like take any ref: they must leave it alone, interpreted and compiled."""
    functions = [
        one for name in ("pallas_backend", "entries") for one in all_functions(tree_of(PACKAGE / f"{name}.py"))
    ]
    loads = [one for one in functions if one.name.startswith("load")]
    assert {"load_runs", "load_columns", "load_tile", "load_entry", "load_either"} <= {one.name for one in loads}
    for function in loads:
        assert not stored_parameters(function), function.name
    (breach,) = all_functions(ast.parse("def load(one, plan): store_runs(one[0], 1)"))
    assert stored_parameters(breach) == {"one"}


def stored_parameters(function: ast.FunctionDef) -> set[str]:
    return {name for name, _ in stores(function)} & set(parameters(function))


# --- Triton -----------------------------------------------------------------------------------------------------------


def triton_functions(source: str) -> Functions:
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)
    }


def signature_outputs(function: ast.FunctionDef, source: str) -> set[str]:
    """Pointer parameters under a comment "outputs" or "inputs and outputs"."""
    outputs: set[str] = set()
    group = ""
    for line in source.splitlines()[function.lineno : function.body[0].lineno - 1]:
        if line.strip().startswith("#"):
            group = line.strip().removeprefix("#").split(":")[0].strip()
        elif group in ("outputs", "inputs and outputs"):
            outputs |= {one.strip() for one in line.split(",") if one.strip().startswith("p_")}
    return outputs


def written_parameters(functions: Functions) -> dict[str, set[str]]:
    """Which parameters of each function `tl.store` reaches, directly or in a function that it calls."""
    written: dict[str, set[str]] = {name: set() for name in functions}
    for _ in functions:  # a call may be to a function further down
        for name, function in functions.items():
            origins: dict[str, set[str]] = {one.arg: {one.arg} for one in function.args.args}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign | ast.AugAssign):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if isinstance(target, ast.Name) and target.id.startswith("p_"):
                        pointers = [one for one in names_in(node.value) if one.startswith("p_")]
                        origins.setdefault(target.id, set()).update(*(origins.get(one, set()) for one in pointers))
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    reached = [node.args[0]] if called == "tl.store" else []
                    if called in functions:
                        pairs = zip(functions[called].args.args, node.args, strict=False)
                        reached += [value for parameter, value in pairs if parameter.arg in written[called]]
                    for value in reached:
                        pointers = [one for one in names_in(value) if one.startswith("p_")]
                        written[name] |= set(itertools.chain(*(origins.get(one, set()) for one in pointers)))
    return written


def triton_problems(sources: list[str]) -> list[str]:
    """Kernels and helpers that write something else than their outputs; a helper without outputs writes nothing."""
    by_source = [(source, triton_functions(source)) for source in sources]
    written = written_parameters({name: one for _, functions in by_source for name, one in functions.items()})
    found = []
    for source, functions in by_source:
        for name, function in functions.items():
            outputs = signature_outputs(function, source)
            if written[name] != outputs:
                found.append(f"{name}: writes {sorted(written[name])}, and its outputs are {sorted(outputs)}")
    return found


def test_triton_kernels_write_exactly_their_outputs() -> None:
    sources = [(ROOT / "torch_ref" / f"{name}.py").read_text(encoding="utf-8") for name in TRITON_IN]
    outputs = {
        name: signature_outputs(function, source)
        for source in sources
        for name, function in triton_functions(source).items()
    }
    assert {name: one for name, one in outputs.items() if one} == {
        "_copy_window": {"p_state"},
        "commit_kernel": {"p_state"},
        "commit_inputs_kernel": {"p_state"},
        "verify_kernel": {"p_state", "p_windows", "p_y"},
        "store_pieces": {"p_row"},
        "_store_y": {"p_request"},
    }
    assert triton_problems(sources) == []


@pytest.mark.parametrize(
    ("signature", "body", "seen"),
    [
        ("    # inputs\n    p_x,\n    # outputs\n    p_y,", "tl.store(p_x, 1); tl.store(p_y, 1)", "['p_x', 'p_y']"),
        ("    # inputs\n    p_x,\n    # outputs\n    p_y,", "p_at = p_x + 1; put(p_at); put(p_y)", "['p_x', 'p_y']"),
        ("    # inputs\n    p_x,\n    # outputs\n    p_y,", "tl.load(p_x)", "writes []"),
        ("    # inputs and outputs\n    p_x,", "tl.load(p_x)", "writes []"),
        ("    # inputs\n    p_x,\n    # sizes\n    n,", "tl.store(p_x + n, 1)", "outputs are []"),
        ("    p_x,", "put(p_x)", "outputs are []"),
    ],
)
def test_a_breach_in_triton_is_seen(signature: str, body: str, seen: str) -> None:
    helper = "@triton.jit\ndef put(\n    # outputs\n    p_to,\n):\n    tl.store(p_to, 0)\n"
    (found,) = triton_problems([helper, f"@triton.jit\ndef k(\n{signature}\n):\n    {body}\n"])
    assert seen in found


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_long(package: str) -> None:
    """From `def` to the last line, the docstring included."""
    too_long = [
        f"{file.relative_to(ROOT)}: {one.name} has {one.end_lineno - one.lineno + 1} lines"
        for file in sorted((ROOT / package).rglob("*.py"))
        for one in all_functions(tree_of(file))
        if one.end_lineno - one.lineno + 1 > MAX_LINES
    ]
    assert too_long == []


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def race_detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted kernels look for accesses of two blocks to one place, and print what they find."""
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"race detection is missing in JAX {jax.__version__}")
    jax.clear_caches()
    detecting = pallas_backend.plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(pallas_backend, "_interpret_parameters", lambda _: detecting)
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize(("slots", "races"), [([1, 4, 0], False), ([1, -1, 4], False), ([1, 4, 1], True)], ids=str)
@pytest.mark.parametrize("operation", ["commit", "track", "update", "verify"])
def test_blocks_race_for_a_slot_that_is_named_twice_only(
    capsys: pytest.CaptureFixture[str], operation: str, slots: list[int], races: bool
) -> None:
    """Verify only reads the pool: there it is the row, not the slot, that two requests must not share."""
    if races and jax.__version_info__ >= (0, 12):
        pytest.skip(f"JAX {jax.__version__} raises for a race, and its interpreter needs a new process afterwards")
    spec = ConvCacheSpec(1, 5, 5, 128, 3, 2, "float32")
    pool, windows, weight = jnp.zeros(spec.state_shape), jnp.ones(spec.windows_shape), jnp.ones((128, 3))
    where, three = jnp.asarray(slots, jnp.int32), jnp.asarray([1, 2, 1], jnp.int32)
    options: dict[str, Any] = {"spec": spec, "implementation": "pallas_interpret"}
    if operation == "commit":
        result = commit_conv_state(pool, windows, where, three, **options)
    elif operation == "track":  # each set names a slot once; a snapshot and a commit meet in slot 1
        first, second = jnp.asarray([slots[0], -1, -1]), jnp.asarray([-1, -1, slots[2]])
        track = {"track_indices": second.astype(jnp.int32), "track_num_tokens": three}
        result = commit_conv_state(pool, windows, first.astype(jnp.int32), three, **track, **options)
    elif operation == "update":
        result = causal_conv1d_update(jnp.ones((3, 128)), pool, weight, state_indices=where, layer=0, **options)
    else:
        step: dict[str, Any] = {
            "state_indices": jnp.asarray([1, 1, 1], jnp.int32),
            "window_rows": where,
            "layer": 0,
        }
        result = causal_conv1d_verify(jnp.ones((3, 2, 128)), pool, windows, weight, **step, **options)
    jax.block_until_ready(result)
    assert ("RACE DETECTED" in capsys.readouterr().out) == races
