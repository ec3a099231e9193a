# SPDX-License-Identifier: Apache-2.0
"""The proofs: claims in messages, the tests that commits touch, and the two runs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import commit, git, write
from offload_parity import build_tree, patches, proof
from offload_parity.git import Repo
from offload_parity.proof import ADAPTED, FAILS, HARDWARE, Claim
from offload_parity.unit_env import UnitEnv
from offload_parity.upstream_tests import Outcome, Run

ENV = UnitEnv(Path(sys.prefix))
FILE = "tests/v1/test_hits.py"
MESSAGE = f"""\
[Core][Bugfix] Title

What was wrong.

{FAILS}
  tests/v1/test_a.py::test_one: assert 6656 == 6912
  tests/v1/test_a.py::TestB::test_two: ValueError: a: b
    and more of it

{ADAPTED}
  tests/v1/test_a.py::test_three: its double needs a position

Signed-off-by: A <a@example.org>
"""


def test_claims_are_read_from_both_blocks() -> None:
    assert proof.parse_claims(MESSAGE) == (
        [
            Claim("tests/v1/test_a.py::test_one", "assert 6656 == 6912", FAILS),
            Claim(
                "tests/v1/test_a.py::TestB::test_two",
                "ValueError: a: b and more of it",
                FAILS,
            ),
            Claim(
                "tests/v1/test_a.py::test_three", "its double needs a position", ADAPTED
            ),
        ],
        [],
    )


def test_message_without_blocks_claims_nothing() -> None:
    assert proof.parse_claims("Title\n\n  tests/a.py::test_b: x\n") == ([], [])


@pytest.mark.parametrize(
    "line",
    ["  tests/a.py::test_one", "  test_one: x", "  tests/a.py: x", "  t.py::a: x"],
)
def test_line_that_is_no_claim_is_said(line: str) -> None:
    claims, unclear = proof.parse_claims(f"Title\n\n{FAILS}\n{line}\n")
    assert claims == []
    assert line.strip() in unclear[0]


def test_test_named_twice_is_said() -> None:
    line = "  tests/a.py::test_one: x\n"
    assert "twice" in proof.parse_claims(f"Title\n\n{FAILS}\n{line}{line}")[1][0]


OLD = '''\
import pytest

@pytest.mark.parametrize("x", [1])
def test_same(x):
    """What it says."""
    assert x  # why

def test_moved():
    assert 1 == 1

def test_cases():
    pass

def test_gone():
    pass

class TestAll:
    async def test_method(self):
        assert 1

def helper():
    return 1
'''
NEW = '''\
import pytest


@pytest.mark.parametrize("x", [1])
def test_same(x):
    """It says something else."""
    assert (x)


def test_moved():
    assert 1 == 2


@pytest.mark.parametrize("x", [1])
def test_cases():
    pass


class TestAll:
    async def test_method(self):
        assert 2

    def test_more(self):
        pass


def helper():
    return 2
'''


def test_touched_tests_are_found_by_what_they_do() -> None:
    touched = proof.touched_tests(OLD, NEW)
    assert touched.added == {"TestAll::test_more"}
    assert touched.changed == {"test_moved", "test_cases", "TestAll::test_method"}
    assert touched.removed == {"test_gone"}


def test_new_file_has_only_new_tests() -> None:
    assert proof.touched_tests(None, "def test_a(): pass").added == {"test_a"}


SOURCE = "def hit(n):\n    return n // 256 * 256{}\n"
TESTS = """\
import pytest
from vllm.hits import hit

def test_old():
    assert hit(512) == 512
"""
ADDED = """
def test_added():
    assert hit(700) == 640

@pytest.mark.parametrize("n", [0, 700])
def test_cases(n):
    assert hit(n) == n // 64 * 64
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch) -> SimpleNamespace:
    """A stock tree and a repository for a series, in place of a release's trees."""
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    stock, tree = tmp_path / "stock", tmp_path / "tree"
    files = {
        "vllm/__init__.py": "",
        "vllm/hits.py": SOURCE.format(""),
        FILE: TESTS,
        "pyproject.toml": "",
    }
    write(stock, files)
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    commit(tree, "base", files)
    git(tree, "update-ref", build_tree.BASE, "HEAD")
    series = SimpleNamespace(patches=[])
    monkeypatch.setattr(build_tree, "ensure_stock", lambda _: stock)
    monkeypatch.setattr(build_tree, "ensure_patched", lambda _: tree)
    monkeypatch.setattr(build_tree, "repo", Repo)
    monkeypatch.setattr(patches, "read_series", lambda _: series)

    def add(message: str, files: dict[str, str]) -> None:
        commit(tree, message, files)
        name = f"{len(series.patches) + 1:04}-x.patch"
        path = tmp_path / name
        path.write_text(message)
        series.patches.append(SimpleNamespace(name=name, path=path, files=()))

    def commits() -> list[str]:
        names = [patch.name for patch in series.patches]
        return [f.what for f in proof.read_commits(Repo(tree), names)[1]]

    def check() -> proof.Proof:
        return proof.check(SimpleNamespace(version="9.9.0"), ENV, jobs=1)

    return SimpleNamespace(
        stock=stock, tree=tree, add=add, commits=commits, check=check
    )


def claims(*lines: str, block: str = FAILS) -> str:
    """A message that claims these lines."""
    return f"Title\n\nWhy.\n\n{block}\n" + "".join(f"  {FILE}::{x}\n" for x in lines)


FIXED = SOURCE.format(" + n % 256 // 64 * 64")


def test_good_series_has_no_findings(made_up) -> None:
    made_up.add(
        claims(
            "test_added: assert 512 == 640", "test_cases: assert 512 == ((700 // 64)"
        ),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    found = made_up.check()
    assert found.findings == []
    added, cases = found.rows
    assert added.stock.startswith("assert 512 == 640")
    assert (added.cases, added.patched) == (1, "passed")
    assert cases.stock.startswith("1 of 2: assert 512 == ((700 // 64)")
    assert (cases.cases, cases.patched) == (2, "passed")


def test_test_that_passes_on_stock_proves_nothing(made_up) -> None:
    made_up.add(
        claims("test_idle: assert 1 == 2"),
        {FILE: TESTS + "\ndef test_idle():\n    assert hit(256) == 256\n"},
    )
    (finding,) = made_up.check().findings
    assert finding.patch == "0001-x.patch"
    assert "test_idle every case is passed on the release" in finding.what


def test_other_reason_than_the_stated_one_is_found(made_up) -> None:
    made_up.add(
        claims("test_added: assert 256 == 640", "test_cases: assert 512 =="),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    (finding,) = made_up.check().findings
    assert "fails on the release with `assert 512 == 640" in finding.what
    assert "not with `assert 256 == 640`" in finding.what


def test_test_that_fails_on_the_patched_tree_is_found(made_up) -> None:
    made_up.add(
        claims("test_added: assert 512 == 640", "test_cases: assert 512 =="),
        {FILE: TESTS + ADDED},
    )
    found = made_up.check()
    assert [f.what.partition(" on the patched")[0] for f in found.findings] == [
        f"{FILE}::test_added is failed",
        f"{FILE}::test_cases is failed",
    ]


def test_stated_import_error_is_the_reason_of_a_whole_file(made_up) -> None:
    new = (
        TESTS.replace("import hit", "import hit, peek")
        + "\ndef test_p():\n    peek()\n"
    )
    made_up.add(
        claims("test_p: cannot import name 'peek'"),
        {"vllm/hits.py": FIXED + "\n\ndef peek():\n    pass\n", FILE: new},
    )
    found = made_up.check()
    assert found.findings == []
    assert found.rows[0].stock.startswith("cannot import name 'peek'")


def test_unnamed_new_test_is_found(made_up) -> None:
    made_up.add(
        claims("test_added: assert 512 == 640"),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    (finding,) = made_up.commits()
    assert f"{FILE}::test_cases is added or changed, but" in finding


def test_named_test_that_the_patch_does_not_touch_is_found(made_up) -> None:
    made_up.add(claims("test_old: assert 1 == 2"), {"vllm/hits.py": FIXED})
    (finding,) = made_up.commits()
    assert "test_old is named, but the patch neither adds nor changes it" in finding


def test_removed_test_is_found(made_up) -> None:
    made_up.add("Title", {FILE: TESTS.partition("def test_old")[0]})
    assert made_up.commits() == [f"removes {FILE}::test_old"]


def test_new_test_cannot_be_called_adapted(made_up) -> None:
    made_up.add(
        claims("test_n: why", block=ADAPTED),
        {FILE: TESTS + "\ndef test_n():\n    pass\n"},
    )
    (finding,) = made_up.commits()
    assert "test_n is new, so it must fail on the release" in finding


def test_adapted_test_must_pass_on_stock(made_up) -> None:
    changed = TESTS.replace("hit(512) == 512", "hit(2 * 256) == 512")
    made_up.add(claims("test_old: why", block=ADAPTED), {FILE: changed})
    found = made_up.check()
    assert found.findings == []
    assert found.rows[0].stock == "passed"

    made_up.add(
        claims("test_old: why", block=ADAPTED),
        {
            FILE: TESTS.replace("== 512", "== 9"),
            "vllm/hits.py": "def hit(n): return 9\n",
        },
    )
    assert any(
        "is failed on the release, not passed" in f.what
        for f in made_up.check().findings
    )


def test_test_that_a_later_patch_changes_is_checked_in_its_own_commit(made_up) -> None:
    first = "\ndef test_n():\n    assert hit(700) == 640\n"
    second = "\ndef test_n():\n    assert hit(700) == 700\n"
    made_up.add(
        claims("test_n: assert 512 == 640"),
        {"vllm/hits.py": FIXED, FILE: TESTS + first},
    )
    made_up.add(
        claims("test_n: assert 512 == 700"),
        {"vllm/hits.py": "def hit(n):\n    return n\n", FILE: TESTS + second},
    )
    found = made_up.check()
    assert found.findings == []
    assert [row.patch for row in found.rows] == ["0001-x.patch", "0002-x.patch"]
    assert git(made_up.tree, "worktree", "list").count("\n") == 0


def test_known_outcomes_of_the_patched_tree_are_not_run_again(made_up) -> None:
    made_up.add(
        claims("test_added: assert 512 == 640", "test_cases: assert 512 =="),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    known = Run(
        outcomes={
            i: Outcome(i, "skipped", 0.0, "from the known run")
            for i in (f"{FILE}::test_added", f"{FILE}::test_cases[0]")
        }
    )
    found = proof.check(SimpleNamespace(version="9.9.0"), ENV, jobs=1, patched=known)
    assert all("from the known run" in f.what for f in found.findings)
    assert len(found.findings) == 2


def test_what_was_found_is_kept_for_this_very_series(made_up) -> None:
    release = SimpleNamespace(version="9.9.0")
    assert proof.read_report(release) is None
    made_up.add(
        claims("test_added: assert 512 == 640", "test_cases: assert 512 =="),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    found = made_up.check()
    assert proof.read_report(release) == found and found.rows
    made_up.add("[Core] Another", {"vllm/more.py": ""})
    assert proof.read_report(release) is None


def test_bare_exception_is_no_reason_where_the_failure_says_more(made_up) -> None:
    made_up.add(
        claims("test_added: assert", "test_cases: assert 512 =="),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    (finding,) = made_up.check().findings
    assert "test_added states only `assert` where the failure says" in finding.what


def test_source_line_of_a_bare_assertion_may_be_stated() -> None:
    def judged(text: str) -> list[str]:
        claim = proof.Claim("tests/a.py::test_x", text, proof.FAILS)
        bad = Outcome(claim.test, "failed", 0.1, "AssertionError", "assert not missing")
        good = Outcome(claim.test, "passed", 0.1, "")
        runs = [Run(outcomes={o.id: o}) for o in (bad, good)]
        return proof.judge("0001-x.patch", claim, *runs)[1]

    assert judged("AssertionError at assert not missing") == []
    assert judged("AssertionError") == []
    (problem,) = judged("assert not extra")
    assert "with `AssertionError at assert not missing`, not" in problem


SKIPPED = """
def test_gpu():
    pytest.skip("only on ROCm")
"""


def test_test_without_its_hardware_is_skipped_for_the_stated_reason(made_up) -> None:
    made_up.add(
        claims("test_gpu: only on ROCm", block=HARDWARE), {FILE: TESTS + SKIPPED}
    )
    found = made_up.check()
    assert found.findings == []
    assert (found.rows[0].stock, found.rows[0].patched) == ("skipped", "skipped")


def test_test_that_runs_here_cannot_be_excused_by_hardware(made_up) -> None:
    made_up.add(
        claims("test_added: only on ROCm", "test_cases: x", block=HARDWARE),
        {"vllm/hits.py": FIXED, FILE: TESTS + ADDED},
    )
    found = [f.what for f in made_up.check().findings]
    assert any("test_added is failed on the release, not skipped" in x for x in found)
    assert any("test_added is passed on the patched tree" in x for x in found)
