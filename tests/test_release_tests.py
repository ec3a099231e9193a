# SPDX-License-Identifier: Apache-2.0
"""The commands that test and lint: what they show and how they end."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import release_tests
from offload_parity import (
    cli,
    exporting,
    matrix,
    proof,
    series_lint,
    steps,
    unit_env,
)
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.proof import Finding, Proof, Row
from offload_parity.report import Report, Result
from offload_parity.unit_env import UnitEnv


def broken(_):
    raise UserError("no network")


def test_report_goes_on_after_a_failure_and_shows_everything(capsys, tmp_path) -> None:
    report = Report()
    report.run("vLLM 9.9.0", "first", broken)
    report.run("vLLM 9.9.0", "second", lambda _: Result(True, "3 passed"))
    report.run(
        "ours",
        "third",
        lambda _: Result(False, "1 lost", ["lost: a.py::b"], [tmp_path / "x.log"]),
    )
    out = capsys.readouterr().out
    assert "lost: a.py::b" in out
    assert "x.log" in out
    assert not report.ok
    lines = report.summary().splitlines()
    assert lines[0] == "vLLM 9.9.0"
    assert lines[1].split() == ["first", "FAILED", "0", "s", "no", "network"]
    assert lines[2].split() == ["second", "ok", "0", "s", "3", "passed"]
    assert lines[3] == "ours"
    assert lines[-1].startswith("2 of 3 failed")


def test_report_of_good_steps_is_good() -> None:
    report = Report()
    report.run("ours", "one", lambda _: Result(True, ""))
    assert report.ok
    assert "all passed" in report.summary()


def test_failing_program_shows_its_last_lines_and_its_log(tmp_path, capsys) -> None:
    report = Report()
    command = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    step = steps.command(command, tmp_path / "logs" / "x.log")
    report.run("ours", "program", step)
    out = capsys.readouterr().out
    assert "why" in out
    assert "x.log" in out
    assert not report.ok


def test_proof_table_shows_both_runs_and_the_findings() -> None:
    row = Row(
        "0001-x.patch", "tests/a.py::test_b", 2, "1 of 2: assert 1 == 2", "passed"
    )
    release = releases.default()
    text = steps.proof_table(release, Proof([row]))
    assert "tests/a.py::test_b (2 cases)" in text
    assert "stock:   1 of 2: assert 1 == 2" in text
    assert "patched: passed" in text
    assert "FINDING" not in text
    found = Proof([row], [Finding("0001-x.patch", "test_b proves nothing")])
    text = steps.proof_table(release, found)
    assert "FINDING 0001-x.patch: test_b proves nothing" in text


@pytest.fixture
def fake(monkeypatch) -> None:
    """Nothing is built: an environment that is not there, a series that is good."""
    monkeypatch.setattr(unit_env, "ensure", lambda: UnitEnv(Path("/nowhere")))
    monkeypatch.setattr(exporting, "check", lambda _: [])


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([Finding("p", "bad")], 1)])
def test_proof_ends_by_its_findings(fake, monkeypatch, findings, code) -> None:
    monkeypatch.setattr(proof, "check", lambda *_, **__: Proof([], findings))
    done = CliRunner().invoke(release_tests.cli, ["proof", "--release", "0.33.0"])
    assert done.exit_code == code, done.output


def test_lint_ends_with_1_and_names_patch_line_and_rule(fake, monkeypatch) -> None:
    finding = series_lint.Finding("0001-x.patch", "vllm/a.py:3", "ruff check: E501")
    monkeypatch.setattr(steps, "own_hooks", lambda _: Result(True, ""))
    monkeypatch.setattr(series_lint, "check", lambda *_: [finding])
    done = CliRunner().invoke(release_tests.cli, ["lint", "--release", "0.33.0"])
    assert done.exit_code == 1
    assert "0001-x.patch: vllm/a.py:3: ruff check: E501" in done.output


def test_release_that_is_not_supported_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["release_tests.py", "proof", "--release", "0.1"])
    monkeypatch.setattr(unit_env, "ensure", lambda: UnitEnv(Path("/nowhere")))
    with pytest.raises(SystemExit) as end:
        cli.run(release_tests.cli)
    assert end.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_series_that_is_broken_does_not_hide_the_rest(fake, monkeypatch) -> None:
    def no_environment():
        raise UserError("the package index cannot be reached")

    good = Result(True, "5 passed")
    monkeypatch.setattr(exporting, "check", lambda _: ["series lists 0001-x.patch"])
    monkeypatch.setattr(unit_env, "ensure", no_environment)
    monkeypatch.setattr(steps, "command", lambda *_: lambda _: good)
    done = CliRunner().invoke(release_tests.cli, ["test", "--release", "0.33.0"])
    assert done.exit_code == 1
    assert "series lists 0001-x.patch" in done.output
    assert "not run: there is no environment" in done.output
    assert "5 passed" in done.output


@pytest.mark.parametrize(
    ("words", "full"),
    [
        ([], ["3.0", "1.0"]),
        (["--all"], ["3.0", "2.1", "2.0", "1.0"]),
        (["--release", "2.0"], ["2.0"]),
    ],
)
def test_the_newest_and_the_oldest_release_in_full(
    fake, monkeypatch, words: list[str], full: list[str]
) -> None:
    """Of the others the cheap steps."""
    one = releases.default()
    known = tuple(replace(one, version=v) for v in ("3.0", "2.1", "2.0", "1.0"))
    tested, rows = [], []
    monkeypatch.setattr(releases, "supported", lambda: known)
    monkeypatch.setattr(steps, "command", lambda *_: lambda _: Result(True, ""))
    monkeypatch.setattr(
        release_tests,
        "test_release",
        lambda _, each, *more: tested.append(each.version),
    )
    monkeypatch.setattr(matrix, "read_row", lambda each: {})
    monkeypatch.setattr(matrix, "stale", lambda each: rows.append(each.version))
    done = CliRunner().invoke(release_tests.cli, ["test", *words])
    assert done.exit_code == 0, done.output
    assert tested == full
    assert rows == ([r.version for r in known] if "--release" not in words else full)
    said = "Only the series and the row of the matrix: 2.1, 2.0. In full: make test "
    assert (said in done.output) == (not words)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_release_is_tested_twice(monkeypatch, count: int) -> None:
    known = (releases.default(),) * count
    monkeypatch.setattr(releases, "supported", lambda: known)
    assert len(releases.in_full(None)) == min(count, 2)


def test_a_row_of_another_series_fails(fake, monkeypatch, capsys) -> None:
    why = "patches/0.33.0/matrix.json was measured with another series"
    monkeypatch.setattr(matrix, "read_row", lambda _: {})
    monkeypatch.setattr(matrix, "stale", lambda _: why)
    report = Report()
    report.run("vLLM 0.33.0", "matrix", steps.matrix_row(releases.default()))
    assert not report.ok and why in capsys.readouterr().out
