"""Imports go one way, Pallas has one importer, planning needs no framework, and the oracle shares no code."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import from lower levels only, and from its own level what is listed after it.
LEVELS = {
    "layout": 0,
    "capacity": 1,
    "presets": 1,
    "pallas_backend": 1,
    "checks": 1,
    "arguments": 2,
    "runs": 1,
    "implementation": 2,
    "cache": 2,
    "history": 2,
    "entries": 2,
    "windows": 2,
    "debug": 3,
    "commit": 3,
    "conv": 3,
    "envelope": 2,
    "prefill": 4,
    "rollback": 4,
    "sharding": 4,
    "tables": 3,
    "demo": 7,
    "__main__": 8,
}
SAME_LEVEL = {
    ("capacity", "presets"),
    ("runs", "checks"),
    ("pallas_backend", "checks"),
    ("windows", "history"),
    ("sharding", "prefill"),
    ("sharding", "rollback"),
}
# The model's measurements are taken and recorded as the benchmarks' are; the notebooks' helpers may use everything.
PACKAGE_LEVELS = {"bench": 5, "model": 6, "walkthrough": 8}
WITHOUT_FRAMEWORK = ("layout", "capacity", "presets")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(file: Path) -> Iterator[str]:
    """Absolute names of everything a file imports anywhere, `from package import module` as `package.module`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level_of(dotted: str) -> int:
    parts = dotted.split(".")
    return PACKAGE_LEVELS[parts[1]] if parts[1] in PACKAGE_LEVELS else LEVELS[parts[1]]


@pytest.mark.parametrize("file", modules("jax_impl"), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    if own == "jax_impl.__init__":  # re-exports by name, lazily
        return
    for name in imports_of(file):
        if not name.startswith("jax_impl."):
            continue
        if name.split(".")[1] == own.split(".")[1]:  # inside one subpackage
            continue
        if name.split(".")[1] not in (*LEVELS, *PACKAGE_LEVELS):  # a re-exported name: only entry points use these
            assert level_of(own) >= PACKAGE_LEVELS["bench"], f"{own} imports {name} from the package's front"
            continue
        pair = (own.split(".")[1], name.split(".")[1])
        assert level_of(name) < level_of(own) or pair in SAME_LEVEL, f"{own} imports {name}"


def test_one_module_imports_pallas() -> None:
    importers = {
        file.relative_to(ROOT).as_posix()
        for package in ("jax_impl", "torch_ref")
        for file in modules(package)
        if any("pallas" in name and not name.startswith("jax_impl.") for name in imports_of(file))
    }
    assert importers == {"jax_impl/pallas_backend.py"}


def test_the_two_implementations_share_no_code() -> None:
    for file in modules("torch_ref"):
        assert not [name for name in imports_of(file) if name.split(".")[0] in ("jax", "jaxlib", "jax_impl")], file
    for file in modules("jax_impl"):
        if not {"bench", "walkthrough"} & set(file.parts):  # these measure and compare both in one run
            assert not [n for n in imports_of(file) if n.split(".")[0] in ("torch", "triton", "torch_ref")], file


def needs_torch(file: Path) -> bool:
    """Whether importing a test module imports torch, Triton or the oracle before it says that it needs them."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and "importorskip" in ast.unparse(node):
            return False
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if {"torch", "triton", "torch_ref"} & {name.split(".")[0] for name in names}:
                return True
    return False


def test_every_collected_test_module_can_be_imported_without_torch() -> None:
    """pytest imports all of tests/ except torch_*.py (conftest.py), also where torch is not installed."""
    needing = [file.name for file in modules("tests") if needs_torch(file)]
    assert needing, "the helpers of the torch tests import torch"
    assert all(name.startswith("torch_") for name in needing), needing


def loaded_after(statement: str) -> set[str]:
    """Top-level packages and Pallas modules that a fresh interpreter has loaded after `statement`."""
    report = "import sys; print(*(m for m in sys.modules if '.' not in m or 'pallas' in m))"
    command = [sys.executable, "-c", f"{statement}\n{report}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize("module", ["jax_impl", *(f"jax_impl.{name}" for name in WITHOUT_FRAMEWORK)])
def test_planning_needs_no_framework(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "jax_impl" in loaded
    assert not loaded & {"jax", "jaxlib", "numpy", "torch", "triton", "ml_dtypes"}


def test_a_name_of_the_package_loads_its_framework_but_not_pallas() -> None:
    statement = "import os; os.environ['JAX_PLATFORMS'] = 'cpu'; from jax_impl import commit_conv_state, gather_windows"
    loaded = loaded_after(statement)
    assert "jax" in loaded
    assert not [name for name in loaded if "pallas" in name]


def test_everything_plain_works_where_torch_and_pallas_are_missing() -> None:
    """The script that `.ci/run` gives to an installed wheel and sdist, here on the checkout."""
    command = [sys.executable, str(ROOT / "tests" / "installed.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("works without torch, a GPU and Pallas\n")


def test_every_public_name_resolves() -> None:
    import jax_impl

    for name in jax_impl.__all__:
        assert getattr(jax_impl, name).__module__.startswith("jax_impl.")
    assert set(jax_impl.__all__) <= set(dir(jax_impl))
    with pytest.raises(AttributeError, match="module 'jax_impl' has no attribute 'no_such_name'"):
        jax_impl.no_such_name  # noqa: B018


def test_the_oracle_has_the_same_functions_with_the_same_arguments(torch_ref) -> None:
    """Names and order of arguments; annotations and defaults of `implementation` differ by framework."""
    import inspect

    import jax_impl

    functions = (
        "causal_conv1d_verify",
        "causal_conv1d_update",
        "causal_conv1d_prefill",
        "gather_windows",
        "commit_conv_state",
        "reset_conv_state",
        "use_storage",
    )
    for name in functions:
        mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (jax_impl, torch_ref))
        assert list(mine) == list(theirs), name
        assert [p.kind for p in mine.values()] == [p.kind for p in theirs.values()], name
    fields = [inspect.signature(module.ConvCacheSpec).parameters for module in (jax_impl, torch_ref)]
    assert [(p.name, p.default) for p in fields[0].values()] == [(p.name, p.default) for p in fields[1].values()]


def test_no_module_does_work_when_imported_from_a_configured_jax() -> None:
    """No `jax.config` change, no environment variable read: numerics are the caller's."""
    for file in modules("jax_impl"):
        text = file.read_text(encoding="utf-8")
        assert "jax.config" not in text, file
        may = {"bench", "walkthrough"} & set(file.parts)
        assert "os.environ" not in text or may or file.name in ("demo.py", "__main__.py"), file
