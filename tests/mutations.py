"""What the tests would notice: one-line breaks of the source, each of which some test has to catch.

    python tests/mutations.py                     all of them, about half an hour on two cores
    python tests/mutations.py --only null         those whose name or file has "null" in it
    python tests/mutations.py --out FILE          the result as JSON too

Run by hand, in an environment in which the tests run, torch among them. The tree is copied to a temporary folder; each
break is applied to the copy, its selection of tests runs until the first failure, and the break is taken back. A break
that no test notices has SURVIVED, and the exit status is 1. Every selection runs once without a break first: a test
that fails anyway catches nothing. `test_mutations.py` checks in every run that each fragment is still there, once.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPIED = ("jax_impl", "torch_ref", "tests", "pyproject.toml", "README.md")
PATHS = {"xla": "jax-xla", "interpret": "jax-pallas_interpret", "eager": "torch-eager", "triton": "torch-triton"}
# A loop that no longer ends is caught as well.
LIMIT_S = 300

# name: pytest's arguments. "commit-xla" and the like are written out for each path; "commit-xla/track|rows" are those
# of its tests with one of these words in their names, where an interpreter would take long for all of them.
SELECTIONS: dict[str, tuple[str, ...]] = {
    "layout": ("tests/test_layout.py",),
    # the interpreter keeps an input as it was whatever a kernel stores to it; on a card, and to the lint, it shows
    "lint": ("tests/test_kernel_lint.py", "-k", "kernels_read"),
    "pairs": ("tests/test_verify.py", "-k", "two_requests"),
    "paths": ("tests/test_inputs.py", "-k", "path_to_node"),
    "rollback": ("tests/test_rollback.py", "-k", "accepted_from_index"),
    "slots": ("tests/test_sharding.py", "-k", "of_one_rank or past_32_bits or global_number"),
}
for _short, _path in PATHS.items():
    SELECTIONS |= {
        f"commit-{_short}": ("tests/test_gather_commit.py", "-k", f"{_path} and not equals_the_definition"),
        f"grid-commit-{_short}": ("tests/test_gather_commit.py", "-k", f"{_path} and commit_equals"),
        f"verify-{_short}": ("tests/test_verify.py", "-k", f"{_path} and not verify_equals"),
        f"steps-{_short}": ("tests/test_decode_equivalence.py", "-k", _path),
        f"grid-{_short}": ("tests/test_verify.py", "-k", f"{_path} and verify_equals"),
        f"inputs-verify-{_short}": ("tests/test_inputs.py", "-k", f"{_path} and test_verify and K4"),
        f"inputs-commit-{_short}": ("tests/test_inputs.py", "-k", f"{_path} and test_commit and K4"),
    }


@dataclasses.dataclass(frozen=True)
class Mutation:
    """`old` occurs once in `file`; with a line around it where the line that changes does not."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _read(text: str) -> list[Mutation]:
    """Breaks as `mutations.txt` has them."""
    found = []
    for entry in re.split(r"\n\n+", text.strip()):
        if entry.startswith("#"):
            continue
        head, *rest = entry.splitlines()
        old, new = ("\n".join(line[1:] for line in rest if line[0] == sign) for sign in "-+")
        file, name, tests = head.split(": ")
        found.append(Mutation(name, file, old, new, tuple(tests.split())))
    return found


MUTATIONS = _read(pathlib.Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`caught_by` is the test that failed, or how pytest ended; None where nothing noticed."""

    mutation: Mutation
    caught_by: str | None


def run_tests(folder: pathlib.Path, selection: str) -> str | None:
    """The first test of a selection that fails in `folder`, or None where all pass.

    Raises:
      RuntimeError: nothing was selected, or pytest could not collect the tests.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # a break of equal size within one second would meet the old bytecode
    }
    name, _, some = selection.partition("/")
    arguments = [*SELECTIONS[name]]
    if some:
        arguments[-1] += f" and ({some.replace('|', ' or ')})"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1]
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    raise RuntimeError(f"{selection}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def break_source(text: str, mutation: Mutation) -> str:
    """The source with one break.

    Raises:
      ValueError: the fragment is not there once, or nothing changes.
    """
    count = text.count(mutation.old)
    if count != 1 or mutation.old == mutation.new:
        raise ValueError(f"`{mutation.name}`: expected the fragment once in {mutation.file}, got {count} times.")
    return text.replace(mutation.old, mutation.new)


def try_mutation(folder: pathlib.Path, mutation: Mutation) -> Outcome:
    file = folder / mutation.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(break_source(whole, mutation), encoding="utf-8")
    try:
        results = (run_tests(folder, selection) for selection in mutation.tests)
        caught = next((result for result in results if result), None)
    finally:
        file.write_text(whole, encoding="utf-8")
    return Outcome(mutation, caught)


def as_json(outcomes: list[Outcome]) -> str:
    versions = {"python": platform.python_version()}
    for package in ("jax", "numpy", "torch", "triton", "pytest", "hypothesis"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "date": datetime.date.today().isoformat(),
        "tool": "tests/mutations.py",
        "versions": versions,
        "caught": sum(one.caught_by is not None for one in outcomes),
        "survived": [one.mutation.name for one in outcomes if one.caught_by is None],
        "mutations": [
            {
                "name": one.mutation.name,
                "file": one.mutation.file,
                "old": one.mutation.old.strip(),
                "new": one.mutation.new.strip(),
                "caught_by": one.caught_by,
            }
            for one in outcomes
        ],
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Breaks the source in listed ways and says which the tests notice.")
    parser.add_argument("--only", metavar="NAME", help="only breaks with this in their name or file")
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help="write the result as JSON")
    parser.add_argument("--list", action="store_true", help="print the breaks and stop")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if not options.only or options.only in f"{one.file} {one.name}"]
    if options.list or not chosen:
        print("\n".join(f"{one.file}: {one.name}" for one in chosen) or "no break has this name")
        return int(not chosen)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for selection in sorted({selection.partition("/")[0] for one in chosen for selection in one.tests}):
            failing = run_tests(folder, selection)
            print(f"{selection}: {'passes unbroken' if failing is None else f'FAILS UNBROKEN, {failing}'}", flush=True)
            if failing is not None:
                return 2
        outcomes = []
        for number, mutation in enumerate(chosen, 1):
            outcome = try_mutation(folder, mutation)
            outcomes.append(outcome)
            said = "SURVIVED" if outcome.caught_by is None else f"caught by {outcome.caught_by}"
            print(f"[{number}/{len(chosen)}] {mutation.file}: {mutation.name}: {said}", flush=True)
    survived = [one.mutation.name for one in outcomes if one.caught_by is None]
    print(f"{len(outcomes) - len(survived)} caught; survived: {', '.join(survived) or 'none'}")
    if options.out:
        options.out.write_text(as_json(outcomes), encoding="utf-8")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
