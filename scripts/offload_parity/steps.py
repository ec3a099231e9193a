# SPDX-License-Identifier: Apache-2.0
"""The steps of ``make test`` and ``make lint``, each as work for a report."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import (
    e2e,
    e2e_env,
    each_commit,
    exporting,
    matrix,
    patches,
    proof,
    series_lint,
    simulation,
    unit_env,
    upstream_tests,
)
from .errors import UserError
from .paths import ROOT, build_root
from .release import Release
from .report import Result
from .unit_env import UnitEnv
from .upstream_tests import Comparison, Progress

Work = Callable[[Progress], Result]


def series(release: Release) -> Work:
    """The series applies to a fresh base, and an export writes the same files."""

    def work(_: Progress) -> Result:
        faults = exporting.check(release)
        count = len(patches.read_series(release).patches)
        return Result(not faults, f"{count} patches apply to a fresh tree", faults)

    return work


def matrix_row(release: Release) -> Work:
    """The release's row of the matrix, if it has one, was measured with this series."""

    def work(_: Progress) -> Result:
        if missing := matrix.missing(release):
            return Result(True, missing)
        why = matrix.stale(release)
        return Result(not why, why or "measured with this series")

    return work


def matrix_again(
    release: Release, env: UnitEnv, jobs: int, tests: Comparison | None
) -> Work:
    """What of the row can be had in a minute is still so, vLLM's tests as well."""

    def work(progress: Progress) -> Result:
        results = matrix.measured_again(release, env, jobs, progress)
        if tests:
            cell = matrix.Cell(release.version, matrix.TESTS, matrix.BOTH)
            results[cell] = matrix.counted(tests)
        found = matrix.differences(release, results)
        detail = f"{len(results)} measurements, {len(found)} not as in the row"
        return Result(not found, detail, found)

    return work


def describe(found: Comparison, log: Path) -> Result:
    """A comparison as a result."""
    same = "".join(f", {n} {word} as on stock" for word, n in found.as_stock.items())
    renamed = f", {len(found.renamed)} with other parameters" if found.renamed else ""
    failed = f", {len(found.failed)} FAILED" if found.failed else ""
    detail = (
        f"{found.passed} passed{same}{failed}, {len(found.new)} new{renamed}, "
        f"{len(found.lost)} lost"
    )
    findings = [f"failed: {i}: {why}" for i, why in found.failed.items()]
    findings += [f"lost: {i}: {why}" for i, why in found.lost.items()]
    return Result(found.ok, detail, [proof.one_line(x)[:400] for x in findings], [log])


def proof_of(
    release: Release, env: UnitEnv, jobs: int, known: upstream_tests.Run | None
) -> Work:
    """Every new test fails on stock for its reason and passes patched."""

    def work(progress: Progress) -> Result:
        found = proof.check(release, env, jobs=jobs, patched=known, progress=progress)
        return Result(
            not found.findings,
            f"{len(found.rows)} new or changed tests, {len(found.findings)} findings",
            [f"{f.patch}: {f.what}" for f in found.findings],
            [upstream_tests.report_log(release, "proof-stock")] if found.rows else [],
        )

    return work


def parity_tests(release: Release, env: UnitEnv, jobs: int, kind: str) -> Work:
    """The simulation's own tests, those for a patched or for a stock tree."""

    def work(progress: Progress) -> Result:
        folder = ROOT / "tests" / "parity"
        (tree,) = simulation.trees_of(release, (kind,))
        log = upstream_tests.report_log(release, f"parity-tests-{kind}")
        run = upstream_tests.run_pytest(
            env, folder, ["."], log, jobs=jobs, progress=progress,
            python_path=(tree.path, folder.parent),
            variables={"PARITY_TREE": kind, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        bad = [o for o in run.outcomes.values() if o.outcome != "passed"]
        findings = [f"{o.outcome}: {o.id}: {o.message}" for o in bad]
        findings += [f"{path}: {why}" for path, why in run.collect_errors.items()]
        missing = len(run.collected) - len(run.outcomes)
        if missing:
            findings.append(f"{missing} tests did not end")
        return Result(
            not findings,
            f"{len(run.outcomes) - len(bad)} of {len(run.collected)} passed",
            [proof.one_line(x)[:400] for x in findings],
            [log],
        )

    return work


def tiny_models(release: Release) -> Work:
    """A minute of ``make e2e``, where that has built its environment."""

    def work(progress: Progress) -> Result:
        env = e2e_env.existing(release)
        if env is None:
            return Result(True, f"not run: make e2e RELEASE={release.version} does")
        # Importing vLLM takes most of it: once will do.
        return e2e.tests(release, env, "patched", jobs=1, quick=True)(progress)

    return work


def command(words: list[str | Path], log: Path) -> Work:
    """A program of this project's; its last line is the detail."""

    def work(_: Progress) -> Result:
        status = unit_env.run_logged(words, log, cwd=ROOT, env=os.environ)
        last = unit_env.tail(log, 1).strip("= ")
        lines = unit_env.tail(log).splitlines()
        return Result(status == 0, last[:120], lines, [log])

    return work


def laws_and_probes(
    release: Release, python: str | Path, on: Sequence[str | Path]
) -> Iterator[tuple[str, Work]]:
    """The parity contract and the probes' short run, by name; ``on``: which trees."""
    for name, words in (
        ("parity", ("laws.py", "laws")),
        ("probes", ("experiment.py", "--quick", "--no-plots")),
    ):
        script = [python, ROOT / "scripts" / words[0], *words[1:], *on]
        yield name, command(script, upstream_tests.report_log(release, name))


def each_patch(release: Release, env: UnitEnv, jobs: int) -> Work:
    """vLLM's tests after each patch, so that a bisection meets no broken commit."""

    def work(progress: Progress) -> Result:
        findings: list[str] = []
        count = 0
        for name, found in upstream_tests.check_each_commit(
            release, env, jobs=jobs, progress=progress
        ):
            count += 1
            here = describe(found, Path())
            findings += [f"{name}: {finding}" for finding in here.findings]
        return Result(not findings, f"{count} commits below the last", findings)

    return work


def own_at_each(release: Release, env: UnitEnv, jobs: int, first: int) -> Work:
    """What the series has brought passes at each commit, from place ``first`` on."""

    def work(progress: Progress) -> Result:
        count, found = each_commit.check(
            release, env, jobs=jobs, first=first, progress=progress
        )
        return Result(
            not found,
            f"{count} commits, {len(found)} findings",
            [f"{f.patch}: {f.what}" for f in found],
        )

    return work


def lint_kept(release: Release) -> Work:
    """The lint of the series at each commit; what this very series showed is kept."""

    def work(progress: Progress) -> Result:
        if series_lint.read_report(release) == []:
            return Result(True, "0 findings, as make lint showed")
        return lint(release)(progress)

    return work


def proof_table(release: Release, found: proof.Proof) -> str:
    """The two runs of each test, patch by patch, and what is wrong."""
    lines = [f"vLLM {release.version}: {len(found.rows)} new or changed tests"]
    for patch in dict.fromkeys(row.patch for row in found.rows):
        lines.append(f"  {patch}")
        for row in found.rows:
            if row.patch == patch:
                cases = f" ({row.cases} cases)" if row.cases != 1 else ""
                lines += [
                    f"    {row.test}{cases}",
                    f"      stock:   {row.stock[:160]}",
                    f"      patched: {row.patched}",
                ]
    lines += [f"  FINDING {f.patch}: {f.what}" for f in found.findings]
    if not found.findings:
        lines.append(
            "  every one fails on stock as stated and passes on the patched tree"
        )
    return "\n".join(lines)


def own_hooks(_: Progress) -> Result:
    """Run the pre-commit hooks of this repository on all its files."""
    if not (ROOT / ".git").exists():
        raise UserError(
            "this folder is no git repository, and pre-commit asks git for its files: "
            "run make lint in a clone"
        )
    log = build_root() / "reports" / "pre-commit.log"
    status = unit_env.run_logged(
        [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never"],
        log,
        cwd=ROOT,
        env=os.environ | {"PRE_COMMIT_HOME": str(build_root() / "pre-commit")},
    )
    failed = [
        line
        for name, state, lines in series_lint.sections(log.read_text(errors="replace"))
        if state == "Failed"
        for line in (f"{name}:", *lines)
    ]
    if status and not failed:
        failed = unit_env.tail(log).splitlines()
    return Result(status == 0, "all files of this repository", failed, [log])


def lint(release: Release) -> Work:
    """Hold what the series adds against the release's own lint."""

    def work(progress: Progress) -> Result:
        found = series_lint.check(release, progress)
        lines = [
            f"{f.patch}: {f'{f.where}: ' if f.where else ''}{f.rule}" for f in found
        ]
        log = upstream_tests.report_log(release, "lint")
        return Result(not found, f"{len(found)} findings", lines, [log])

    return work
