"""The nightly script: which requirements it installs, and whom it blames."""

import pathlib
import re

import pytest

from tests import nightly

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_verify" name="one"><failure>tests/test_verify.py:9: in one
    call()
/somewhere/checkout/jax_impl/conv.py:12: in call
    run()
jax_impl/pallas_backend.py:40: in run
    pl.gone
/site-packages/jax/experimental/pallas/x.py:3: AttributeError</failure></testcase>
<testcase classname="tests.test_cli" name="two"><failure>tests/test_cli.py:9: in two
    assert 1 == 2
tests/test_cli.py:9: AssertionError</failure></testcase>
<testcase classname="tests.test_cli" name="three"/>
<testcase classname="tests.test_gpu" name="four"><error>no frames</error></testcase>
</testsuite></testsuites>"""


def test_failures_are_sorted_by_the_file_they_come_from(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert nightly.blame(path) == {
        "jax_impl/pallas_backend.py": ["tests.test_verify::one"],
        "tests/test_cli.py": ["tests.test_cli::two"],
        "elsewhere": ["tests.test_gpu::four"],
    }


@pytest.mark.parametrize(
    ("blamed", "exit_code", "expected"),
    [
        ({}, 0, 0),
        ({nightly.MAY_BREAK: ["a"]}, 1, 1),
        ({nightly.MAY_BREAK: ["a"], "tests/test_cli.py": ["b"]}, 1, 2),
        ({"elsewhere": ["a"]}, 1, 2),
        ({}, 2, 3),
    ],
)
def test_only_one_module_may_break(blamed: dict[str, list[str]], exit_code: int, expected: int) -> None:
    assert nightly.verdict(blamed, exit_code) == expected


def test_every_requirement_has_a_lower_bound_to_install() -> None:
    """And the lower bound of the interpreter is the one that the minimum run takes."""
    content = (nightly.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    everything = nightly.requirements(
        re.findall(r"^(\w+) = \[", content.split("[project.optional-dependencies]")[1], re.M)[:8]
    )
    pinned = [nightly.minimum(one) for one in everything]
    assert all("==" in one and ">=" not in one for one in pinned)
    assert {"jax==0.10.2", "numpy==2.0", "absl-py==2.0"} <= {nightly.minimum(one) for one in nightly.requirements(())}
    assert 'requires-python = ">=3.11"' in content
    with pytest.raises(ValueError, match="expected a lower bound, got 'rich'"):
        nightly.minimum("rich")


def test_the_module_that_may_break_is_there() -> None:
    assert (nightly.ROOT / nightly.MAY_BREAK).is_file()


def test_pythons_are_found() -> None:
    assert pathlib.Path(nightly.newest_python()).exists()
