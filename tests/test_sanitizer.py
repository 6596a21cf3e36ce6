"""The script that runs kernels under compute-sanitizer: what it calls, how it reads verdicts, and when it fails."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests import adapters, sanitizer


@pytest.mark.long
def test_every_call_can_be_made() -> None:
    """In the plain form; each is of other arguments."""
    made = {name: call() for name, call in sanitizer.calls(adapters.path("jax-xla"))}
    assert len(made) == len(list(sanitizer.calls(adapters.DEFINITION))) == 48
    for word in ("update", "prefill", "rollback", "list", "tree", "kept", "resumed", "dense", "channel_major", "K=7"):
        assert any(word in name for name in made), word


class Recorded(adapters.Path):
    """Keeps the geometry, slots and counts of every verify and commit."""

    def verify(self, x: Any, conv_state: Any, conv_windows: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        counts = [options[name] for name in ("num_valid_tokens", "resume_tokens") if name in options]
        return options["spec"], options["state_indices"], counts

    def commit(self, conv_state: Any, conv_windows: Any, slots: Any, accepted: Any, **options: Any) -> Any:
        return options["spec"], slots, [accepted, options.get("track_num_tokens", accepted)]


def test_the_last_column_is_read_and_written() -> None:
    """Of rows with many columns too: some live request has all of them."""
    seen = 0
    for name, call in sanitizer.calls(Recorded("recorded")):
        if name.startswith(("verify", "commit")):
            spec, slots, all_counts = call()
            live = (slots >= 0) & (slots < spec.num_slots) & (slots != sanitizer.NULL)
            for counts in all_counts:
                assert spec.num_draft_tokens in counts[live], name
                seen += 1
    assert seen > 60


LOG = """verify
========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("log", "summary", "clean"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", "0 errors", True),
        ("========= ERROR SUMMARY: 10 errors\n", "10 errors", False),
        (LOG.format(hazards=0), "0 hazards displayed (0 errors, 0 warnings)", True),
        (LOG.format(hazards=3), "3 hazards displayed (3 errors, 0 warnings)", False),
        ("========= Error: Device not supported\n", None, False),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 3 errors\n", "3 errors", False),
    ],
)
def test_a_summary_is_clean_only_without_errors(log: str, summary: str | None, clean: bool) -> None:
    assert sanitizer.summary(log) == summary
    assert sanitizer.is_clean(summary) == clean


@pytest.mark.parametrize(
    ("planted", "found", "returned", "skipped", "expected"),
    [(2, 0, 0, 0, 0), (0, 0, 0, 0, 1), (2, 1, 0, 0, 1), (2, 0, 1, 0, 1), (2, 0, 0, 1, 1)],
    ids=["clean", "planted error missed", "errors", "a call raised", "a call is missing"],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    planted: int,
    found: int,
    returned: int,
    skipped: int,
    expected: int,
) -> None:
    """Each comes of one of the processes, the one with the last part of the calls."""
    names = [name for name, _ in sanitizer.calls(adapters.DEFINITION)]

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != "compute-sanitizer":  # nvidia-smi
            raise FileNotFoundError(command[0])
        part = int(command[command.index("--part") + 1])
        last = part == sanitizer.PARTS - 1
        made = names[part :: sanitizer.PARTS][skipped if last else 0 :]
        errors = planted if command[-1] == "planted" else found * last
        out = "\n".join([*made, f"========= ERROR SUMMARY: {errors} errors", ""])
        return subprocess.CompletedProcess(command, returned * last, out, "")

    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: name)
    out = tmp_path / "verdict.json"
    assert sanitizer.main(["--tools", "memcheck", "--out", str(out)]) == expected
    assert out.exists() == (planted > 0)
    if planted:
        written = json.loads(out.read_text())
        assert written["memcheck"] == {0: "0 errors"}.get(expected, "1 errors" if found else None)
        assert written["calls"] == names


def test_without_the_tool_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    assert sanitizer.main([]) == 3
    assert "compute-sanitizer is not on the path" in capsys.readouterr().err


def test_it_starts_as_a_script() -> None:
    done = subprocess.run([sys.executable, sanitizer.__file__, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "memcheck" in done.stdout
