# SPDX-License-Identifier: Apache-2.0
"""Running a release's own tests and comparing them with stock, on made-up trees."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import files_of, write
from offload_parity import build_tree, patches, release, upstream_tests
from offload_parity.errors import UserError
from offload_parity.unit_env import UnitEnv
from offload_parity.upstream_tests import Outcome, Run

# The tools' own Python stands in for vLLM's environment.
ENV = UnitEnv(Path(sys.prefix))

WORDS = """\
import pytest

def test_good():
    pass

def test_bad():
    assert 1 + 1 == 3, "a reason"

@pytest.mark.skip(reason="no GPU")
def test_skip():
    pass

@pytest.mark.xfail
def test_xfail():
    assert False

@pytest.mark.xfail
def test_xpass():
    pass

@pytest.fixture
def broken():
    raise OSError("set up")

def test_setup(broken):
    pass

@pytest.fixture
def untidy():
    yield
    raise OSError("torn down")

def test_teardown(untidy):
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_cases(x):
    assert x == 1
"""


def run(ids: dict[str, str], errors: dict[str, str] | None = None) -> Run:
    """A run in which these ids ended so."""
    return Run(
        collected=list(ids),
        collect_errors=errors or {},
        outcomes={i: Outcome(i, word, 0.1, f"why {i}") for i, word in ids.items()},
    )


def never(ids: list[str]) -> Run:
    raise AssertionError(f"stock was asked for {ids}")


def test_every_outcome_is_recorded_and_the_tree_stays_as_it_was(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    tree = tmp_path / "tree"
    write(
        tree, {"tests/test_words.py": WORDS, "tests/test_broken.py": "import nowhere"}
    )
    before = files_of(tree)
    seen = []
    found = upstream_tests.run_pytest(
        ENV,
        tree,
        ["tests"],
        tmp_path / "logs" / "x.log",
        progress=lambda done, total: seen.append((done, total)),
    )
    words = {i.partition("::")[2]: o.outcome for i, o in found.outcomes.items()}
    assert words == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skip": "skipped",
        "test_xfail": "xfailed",
        "test_xpass": "xpassed",
        "test_setup": "error",
        "test_teardown": "error",
        "test_cases[1]": "passed",
        "test_cases[2]": "failed",
    }
    messages = {i.partition("::")[2]: o.message for i, o in found.outcomes.items()}
    assert messages["test_bad"].startswith(
        "AssertionError: a reason\nassert (1 + 1) == 3"
    )
    assert "no GPU" in messages["test_skip"]
    assert "torn down" in messages["test_teardown"]
    assert len(found.cases("tests/test_words.py::test_cases")) == 2
    assert "nowhere" in found.collect_errors["tests/test_broken.py"]
    assert seen[-1] == (9, 9)
    assert files_of(tree) == before


def test_runs_with_one_log_wait_for_each_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    code = "import time\n\ndef test_{}():\n    time.sleep(1)\n"
    trees = [tmp_path / "one", tmp_path / "two"]
    for tree in trees:
        write(tree, {"test_x.py": code.format(tree.name)})

    def run(tree: Path) -> list[str]:
        log = tmp_path / "x.log"
        return list(upstream_tests.run_pytest(ENV, tree, ["."], log).outcomes)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, trees))
    assert found == [["test_x.py::test_one"], ["test_x.py::test_two"]]


def test_what_a_killed_run_still_writes_is_not_read(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    code = (
        "import time\n\ndef test_a():\n    time.sleep(1)\n\ndef test_b():\n    pass\n"
    )
    write(tmp_path / "tree", {"test_x.py": code})
    with (tmp_path / "x.jsonl").open("w") as rest:
        # It goes on where it is, far behind what the new run has written.
        rest.write(" " * 10_000)

        def progress(*_: int) -> None:
            rest.write('{"id": "of another run"\n')
            rest.flush()

        found = upstream_tests.run_pytest(
            ENV, tmp_path / "tree", ["."], tmp_path / "x.log", progress=progress
        )
    assert list(found.outcomes) == ["test_x.py::test_a", "test_x.py::test_b"]


def test_bare_assertion_is_told_by_its_source_line(tmp_path: Path, monkeypatch) -> None:
    """As in vLLM's test helpers, whose files pytest does not rewrite."""
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    write(
        tmp_path,
        {
            "helper.py": "def check(found):\n    assert found == {1, 2}, ()\n"
            "def no_words(found):\n    assert not found\n",
            "test_a.py": "import sys\nsys.path.insert(0, '.')\nimport helper\n"
            "def test_a():\n    helper.no_words({3})\n"
            "def test_b():\n    helper.check({3})\n"
            "def test_c():\n    assert 1 == 2\n",
        },
    )
    found = upstream_tests.run_pytest(ENV, tmp_path, ["."], tmp_path / "x.log")
    assert {i.partition("::")[2]: o.said for i, o in found.outcomes.items()} == {
        "test_a": "AssertionError at assert not found",
        "test_b": "AssertionError: ()",
        "test_c": "assert 1 == 2",
    }


def test_collecting_runs_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    write(tmp_path, {"test_a.py": "def test_a():\n    open('ran', 'w')\n"})
    found = upstream_tests.run_pytest(
        ENV, tmp_path, ["."], tmp_path / "x.log", collect_only=True
    )
    assert found.collected == ["test_a.py::test_a"]
    assert not found.outcomes
    assert not (tmp_path / "ran").exists()


def test_pytest_that_breaks_is_one_line_with_its_log(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    write(tmp_path, {"conftest.py": "import nowhere", "test_a.py": ""})
    log = tmp_path / "x.log"
    with pytest.raises(UserError, match=r"pytest broke .*status 4.*nowhere"):
        upstream_tests.run_pytest(ENV, tmp_path, ["."], log)
    assert "nowhere" in log.read_text()


def test_same_tests_passing_are_good() -> None:
    both = run({"a.py::a": "passed", "a.py::b[1]": "passed"})
    found = upstream_tests.compare(both, both, never)
    assert found.ok
    assert (found.passed, found.new, found.lost) == (2, [], {})


def test_missing_test_is_lost() -> None:
    stock = run({"a.py::a": "passed", "a.py::b[1]": "passed", "a.py::b[2]": "passed"})
    found = upstream_tests.compare(
        stock, run({"a.py::a": "passed", "a.py::b[1]": "passed"}), never
    )
    assert not found.ok
    assert list(found.lost) == ["a.py::b[2]"]


def test_collected_test_that_did_not_end_is_lost() -> None:
    stock = run({"a.py::a": "passed"})
    patched = run({"a.py::a": "passed"})
    patched.outcomes.clear()
    assert list(upstream_tests.compare(stock, patched, never).lost) == ["a.py::a"]


def test_test_renamed_with_other_parameters_is_not_lost_while_it_has_as_many() -> None:
    stock = run({"a.py::a[1-2]": "passed", "a.py::a[3-4]": "passed"})
    patched = run({"a.py::a[1-9]": "passed", "a.py::a[3-4]": "passed"})
    found = upstream_tests.compare(stock, patched, never)
    assert found.ok
    assert found.renamed == ["a.py::a[1-2]"]
    fewer = run({"a.py::a[1-9]": "passed"})
    found = upstream_tests.compare(stock, fewer, never)
    assert list(found.lost) == ["a.py::a[3-4]"]


@pytest.mark.parametrize("word", ["skipped", "xfailed"])
def test_skip_counts_only_where_stock_skips_too(word: str) -> None:
    stock = run({"a.py::a": "passed", "a.py::b": "passed"})
    patched = run({"a.py::a": "passed", "a.py::b": word})
    asked = []

    def on_stock(ids: list[str]) -> Run:
        asked.append(ids)
        return run({"a.py::b": word})

    found = upstream_tests.compare(stock, patched, on_stock)
    assert found.ok
    assert asked == [["a.py::b"]]
    assert found.as_stock == {word: 1}
    found = upstream_tests.compare(stock, patched, lambda ids: run({ids[0]: "passed"}))
    assert not found.ok
    assert "on stock passed" in found.lost["a.py::b"]


def test_failure_counts_unless_stock_fails_too() -> None:
    stock = run({"a.py::a": "passed", "a.py::b": "passed"})
    patched = run({"a.py::a": "failed", "a.py::b": "error"})
    found = upstream_tests.compare(
        stock, patched, lambda _: run({"a.py::a": "passed", "a.py::b": "error"})
    )
    assert found.failed == {"a.py::a": "why a.py::a"}
    assert found.as_stock == {"error": 1}


def test_new_tests_are_counted_and_must_pass() -> None:
    stock = run({"a.py::a": "passed"})
    patched = run({"a.py::a": "passed", "a.py::b": "passed", "a.py::c": "skipped"})
    found = upstream_tests.compare(stock, patched, never)
    assert found.new == ["a.py::b", "a.py::c"]
    assert list(found.failed) == ["a.py::c"]


def test_new_test_may_be_skipped_like_its_file_s_stock_tests() -> None:
    stock = run({"a.py::a": "passed"})
    patched = run({"a.py::a": "skipped", "a.py::b": "skipped"})
    same = Outcome("a.py::a", "skipped", 0.0, "why a.py::b")
    found = upstream_tests.compare(
        stock, patched, lambda _: Run(outcomes={"a.py::a": same})
    )
    assert found.ok
    assert found.as_stock == {"skipped": 2}
    found = upstream_tests.compare(
        stock, patched, lambda _: run({"a.py::a": "skipped"})
    )
    assert list(found.failed) == ["a.py::b"]


def test_file_that_cannot_be_imported_any_more_fails() -> None:
    stock = run({"a.py::a": "passed"})
    found = upstream_tests.compare(stock, run({}, {"a.py": "ImportError"}), never)
    assert found.failed == {"a.py": "ImportError"}
    assert list(found.lost) == ["a.py::a"]


def change(path: str, new: str | None = "1" * 40) -> patches.FileChange:
    return patches.FileChange(path, "0" * 40, new, (), False)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch) -> SimpleNamespace:
    """A stock and a patched tree in place of a release's."""
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    tests = SimpleNamespace(paths=("tests/core", "tests/test_one.py"))
    series = SimpleNamespace(patches=())
    monkeypatch.setattr(build_tree, "ensure_stock", lambda _: stock)
    monkeypatch.setattr(build_tree, "ensure_patched", lambda _: patched)
    monkeypatch.setattr(patches, "read_series", lambda _: series)
    return SimpleNamespace(
        stock=stock,
        patched=patched,
        series=series,
        release=SimpleNamespace(version="9.9.0", unit_tests=tests),
    )


def test_touched_test_files_run_beside_the_release_s_paths(made_up) -> None:
    made_up.series.patches = (
        SimpleNamespace(
            files=(
                change("vllm/test_like.py"),
                change("tests/core/test_inside.py"),
                change("tests/other/test_touched.py"),
                change("tests/other/utils.py"),
                change("tests/other/test_removed.py", None),
            )
        ),
    )
    assert upstream_tests.paths_of(made_up.release) == [
        "tests/core",
        "tests/test_one.py",
        "tests/other/test_touched.py",
    ]


def test_check_notices_a_lost_test(made_up) -> None:
    kept = "def test_kept():\n    pass\n"
    skip = "import pytest\n\ndef test_gpu():\n    pytest.skip('no GPU')\n"
    files = {"tests/core/test_a.py": kept, "tests/test_one.py": skip}
    write(made_up.patched, files)
    write(
        made_up.stock,
        files | {"tests/core/test_a.py": kept + "\ndef test_lost():\n    pass\n"},
    )
    found, patched = upstream_tests.check(made_up.release, ENV, jobs=1)
    assert list(found.lost) == ["tests/core/test_a.py::test_lost"]
    assert found.passed == 1
    assert found.as_stock == {"skipped": 1}
    assert patched.status == 0


def test_log_lies_below_the_release(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path))
    log = upstream_tests.report_log(release.default(), "patched")
    assert log.is_relative_to(tmp_path / "reports" / release.default().version)
