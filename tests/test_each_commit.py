# SPDX-License-Identifier: Apache-2.0
"""The tests that a series has brought so far, at each of its commits."""

import sys
from pathlib import Path

import pytest

from conftest import NEW, World, commit
from offload_parity import build_tree, each_commit, exporting, release
from offload_parity.proof import ADAPTED, FAILS, HARDWARE, Claim, Commit
from offload_parity.unit_env import UnitEnv

ENV = UnitEnv(Path(sys.prefix))
FILE = "tests/v1/test_hits.py"


def series_with(world: World, *tests: tuple[str, str, str]) -> None:
    """Add commits to the new release: the file's text, the block and the claims."""
    wanted = release.get(NEW)
    tree = build_tree.ensure_patched(wanted)
    for number, (source, block, claims) in enumerate(tests):
        message = f"[Core] Hit {number}\n\nWrong.\n\n{block}\n{claims}"
        commit(tree, message, {FILE: source})
    exporting.export(wanted)


def run(first: int = 4, jobs: int = 1):
    return each_commit.check(release.get(NEW), ENV, jobs=jobs, first=first)


def test_the_last_word_on_a_test_counts() -> None:
    one, two = Claim("t::a", "x", FAILS), Claim("t::a", "y", ADAPTED)
    other = Claim("t::b", "z", HARDWARE)
    commits = [
        Commit("1", "1", (one, other), frozenset()),
        Commit("2", "2", (two,), frozenset()),
    ]
    assert each_commit.claims_until(commits, 0) == (one, other)
    assert each_commit.claims_until(commits, 1) == (two, other)


def test_a_commit_that_breaks_an_earlier_test_is_found(world: World) -> None:
    one = "def test_one():\n    assert 1 == 1\n"
    broken = "def test_one():\n    assert 1 == 2\n\ndef test_two():\n    pass\n"
    mended = broken.replace("1 == 2", "2 == 2")
    series_with(
        world,
        (one, FAILS, f"  {FILE}::test_one: x\n"),
        (broken, FAILS, f"  {FILE}::test_one: y\n  {FILE}::test_two: x\n"),
        (mended, FAILS, f"  {FILE}::test_one: x\n"),
    )
    count, findings = run()
    assert count == 3
    (finding,) = findings
    assert finding.patch.startswith("0006") and "assert 1 == 2" in finding.what


def test_what_ran_on_the_same_files_is_not_run_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def test_one():\n    assert 1 == 1\n"
    series_with(world, (source, FAILS, f"  {FILE}::test_one: x\n"))
    assert run(jobs=2) == (1, [])

    def never(*args, **options):
        raise AssertionError("it ran again")

    monkeypatch.setattr(each_commit.upstream_tests, "run_pytest", never)
    assert run(jobs=2) == (1, [])
    (kept,) = (world.build / "reports" / NEW / "each-commit").glob("*.json")
    kept.write_text("{}")
    with pytest.raises(AssertionError, match="it ran again"):
        run()


def test_what_failed_runs_again(world: World, tmp_path: Path) -> None:
    """A full disk or a killed process is no property of the files."""
    there = tmp_path / "there"
    source = (
        f"import os\n\ndef test_one():\n    assert os.path.exists({str(there)!r})\n"
    )
    series_with(world, (source, FAILS, f"  {FILE}::test_one: x\n"))
    assert len(run()[1]) == 1
    there.touch()
    assert run() == (1, [])


def test_a_test_is_skipped_for_want_of_hardware_only_if_it_says_so(
    world: World,
) -> None:
    source = "import pytest\n\ndef test_one():\n    pytest.skip('no GPU')\n"
    series_with(world, (source, HARDWARE, f"  {FILE}::test_one: no GPU\n"))
    assert run() == (1, [])


def test_a_skip_that_nobody_announced_is_found(world: World) -> None:
    source = "import pytest\n\ndef test_one():\n    pytest.skip('no GPU')\n"
    series_with(world, (source, FAILS, f"  {FILE}::test_one: x\n"))
    _, (finding,) = run()
    assert "test_one is skipped at it: " in finding.what


def test_a_test_that_is_not_there_is_missing(world: World) -> None:
    series_with(world, ("x = 1\n", FAILS, f"  {FILE}::test_gone: x\n"))
    _, (finding,) = run()
    assert "test_gone is missing" in finding.what


def test_a_series_without_tests_runs_none(world: World) -> None:
    assert each_commit.check(release.get(NEW), ENV, jobs=1) == (4, [])
