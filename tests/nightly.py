"""Run by hand, or every night: the tests on the newest JAX or on the minimum of every requirement, newly installed.

    python tests/nightly.py                  the newest release of JAX, on the newest Python found
    python tests/nightly.py --pre            pre-releases and nightly builds too
    python tests/nightly.py --minimum        exactly the lower bounds of pyproject.toml, on Python 3.11
    python tests/nightly.py --python PATH --environment DIRECTORY --keep -- tests/test_verify.py

Failures are sorted by where the exception was raised or the warning was given. `jax_impl/pallas_backend.py` is the one
module that knows Pallas and the versions of JAX, so it alone may break with a new JAX.

Exit code: 0 all passed · 1 only `pallas_backend.py` has to follow · 2 something else failed · 3 nothing could be run.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAY_BREAK = "jax_impl/pallas_backend.py"
EXTRAS = ("cli", "plots", "model", "test")  # what the CPU tests use; torch only when asked for
NOT_INSTALLED = ("transformers",)  # without torch it is of no use


def requirements(extras: Iterable[str], project: pathlib.Path = ROOT) -> list[str]:
    """The requirements of the package and of its extras, as they stand in pyproject.toml."""
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*content["dependencies"]]
    for extra in extras:
        found += content["optional-dependencies"][extra]
    return sorted(dict.fromkeys(found))


def minimum(requirement: str) -> str:
    """A requirement pinned to its lower bound.

    >>> minimum("numpy>=2.0"), minimum("triton>=3.6; sys_platform == 'linux'"), minimum("ruff==0.17.6")
    ('numpy==2.0', "triton==3.6; sys_platform == 'linux'", 'ruff==0.17.6')
    """
    if not re.search(r">=|==", requirement):
        raise ValueError(f"`requirement`: expected a lower bound, got {requirement!r}.")
    return requirement.replace(">=", "==", 1)


def newest_python() -> str:
    """The newest Python with `venv` among those of pyenv and on the path, else this one."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    found: dict[tuple[int, ...], str] = {sys.version_info[:2]: sys.executable}
    for python in root.glob("3.*/bin/python3"):
        version = tuple(int(part) for part in re.findall(r"\d+", python.parent.parent.name)[:2])
        found.setdefault(version, str(python))
    for minor in range(11, 20):
        if (path := shutil.which(f"python3.{minor}")) and (3, minor) not in found:
            found[(3, minor)] = path
    for version in sorted(found, reverse=True):
        if subprocess.run([found[version], "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found[version]
    return sys.executable


def oldest_python() -> str:
    """Python 3.11, where there is one."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    return next((str(one) for one in sorted(root.glob("3.11.*/bin/python3"))), shutil.which("python3.11") or "")


def install(environment: pathlib.Path, python: str, wanted: Sequence[str], options: Sequence[str]) -> str:
    """Makes an environment with exactly these requirements; the path of its Python."""
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    own = str(environment / "bin" / "python")
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([own, "-m", "pip", "install", "-q", *options, *wanted], check=True, env=quiet)
    return own


def run_tests(python: str, tests: Sequence[str], report: pathlib.Path) -> int:
    """Runs pytest on the checkout, not on an installed copy; its exit code."""
    command = [python, "-m", "pytest", "-q", "-n", "2", f"--junit-xml={report}", *tests]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def blame(report: pathlib.Path) -> dict[str, list[str]]:
    """Failed tests by the file of this repository in which each failure came up: the last one in its traceback."""
    blamed: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        for failure in (*case.iter("failure"), *case.iter("error")):
            blamed[culprit(failure.text or "")].append(f"{case.get('classname')}::{case.get('name')}")
    return dict(blamed)


def culprit(traceback: str) -> str:
    """The file of ours that a traceback goes through last.

    What raises inside of JAX has been called from there, and a test that only compares is blamed itself.

    >>> culprit("tests/test_verify.py:12: in test\\njax_impl/pallas_backend.py:3: in f\\n/site/jax/a.py:9: Error")
    'jax_impl/pallas_backend.py'
    """
    own = re.findall(r"^(?:.*/)?((?:jax_impl|torch_ref|tests)/[\w/]+\.py):\d+:", traceback, re.MULTILINE)
    package = [file for file in own if not file.startswith("tests/")]
    return (package or own or ["elsewhere"])[-1]


def verdict(blamed: dict[str, list[str]], exit_code: int) -> int:
    """The exit code of this script.

    >>> verdict({}, 0), verdict({MAY_BREAK: ["a"]}, 1), verdict({MAY_BREAK: ["a"], "jax_impl/conv.py": ["b"]}, 1)
    (0, 1, 2)
    >>> verdict({}, 4)  # pytest itself could not start
    3
    """
    if exit_code == 0:
        return 0
    if not blamed:
        return 3
    return 1 if set(blamed) == {MAY_BREAK} else 2


def describe(python: str, blamed: dict[str, list[str]]) -> None:
    """Prints what was installed and who has to follow."""
    names = (
        "jax",
        "jaxlib",
        "numpy",
        "ml_dtypes",
        "torch",
        "triton",
        "rich",
        "matplotlib",
        "safetensors",
        "tokenizers",
    )
    code = (
        "import sys, importlib.metadata as m\n"
        f"for name in {names!r}:\n"
        "    try: print(name, m.version(name), end='  ')\n"
        "    except m.PackageNotFoundError: pass\n"
        "print('Python', sys.version.split()[0])"
    )
    print(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for file, tests in sorted(blamed.items(), key=lambda item: -len(item[1])):
        print(f"{file}: {len(tests)} failures{'' if file != MAY_BREAK else ' (the module that follows JAX)'}")
        for test in tests[:5]:
            print(f"    {test}")
        if len(tests) > 5:
            print(f"    and {len(tests) - 5} more")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minimum", action="store_true", help="install the lower bound of every requirement")
    parser.add_argument("--pre", action="store_true", help="pre-releases too")
    parser.add_argument("--torch", action="store_true", help="with the torch extra, which is large")
    parser.add_argument("--python", help="the interpreter; default: 3.11 for --minimum, else the newest")
    parser.add_argument("--environment", type=pathlib.Path, help="where to make it; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="use the environment if it is there, and leave it there")
    parser.add_argument("tests", nargs="*", help="files for pytest; default: all")
    options = parser.parse_args(arguments)
    python = options.python or (oldest_python() if options.minimum else newest_python())
    if not python:
        print("no Python 3.11 was found; name one with --python", file=sys.stderr)
        return 3
    wanted = requirements([*EXTRAS, *(["torch"] if options.torch else [])])
    if not options.torch:
        wanted = [one for one in wanted if not one.startswith(NOT_INSTALLED)]
    if options.minimum:
        wanted = [minimum(one) for one in wanted]
    environment = options.environment or pathlib.Path(tempfile.mkdtemp(prefix="specconv-nightly-"))
    try:
        own = environment / "bin" / "python"
        if options.keep and own.exists():
            own = str(own)
        else:
            upgrade = ["--pre"] if options.pre else []
            own = install(environment, python, wanted, upgrade)
        with tempfile.TemporaryDirectory() as scratch:
            report = pathlib.Path(scratch) / "report.xml"
            exit_code = run_tests(own, options.tests, report)
            blamed = blame(report) if report.exists() else {}
        describe(own, blamed)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"nothing was run: {error}", file=sys.stderr)
        return 3
    finally:
        if not options.keep and options.environment is None:
            shutil.rmtree(environment, ignore_errors=True)
    return verdict(blamed, exit_code)


if __name__ == "__main__":
    sys.exit(main())
