# SPDX-License-Identifier: Apache-2.0
"""Test and lint the series: vLLM's own tests on the patched trees, and ours."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from tqdm import tqdm

from offload_parity import (
    build_tree,
    exporting,
    patches,
    proof,
    series_lint,
    unit_env,
    upstream_tests,
)
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.paths import ROOT, build_root, shown
from offload_parity.release import Release
from offload_parity.signals import clean_up_on_termination
from offload_parity.unit_env import UnitEnv
from offload_parity.upstream_tests import Comparison, Progress

# Lengths of the parity sweep that `test` tries; `parity` tries all.
_SWEEP_SAMPLE = 16
_SHOWN = 20
_SECONDS_BETWEEN_LINES = 60


@dataclass
class Step:
    """One line of the summary."""

    group: str
    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Result:
    """What a step says of itself: whether it is good, in short, and what is wrong."""

    ok: bool
    detail: str
    findings: list[str] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


class Report:
    """Runs the steps one after the other to the end and keeps what they say."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @property
    def ok(self) -> bool:
        """Whether every step is good."""
        return all(step.ok for step in self.steps)

    def run(
        self, group: str, name: str, work: Callable[[Progress], Result]
    ) -> Result | None:
        """Run one step and show how it ended; None if it broke."""
        title = f"{group}: {name}"
        click.echo(f"{title} …")
        step = Step(group, name)
        self.steps.append(step)
        began = time.monotonic()
        result = None
        try:
            with bar(title) as progress:
                result = work(progress)
            step.ok, step.detail = result.ok, result.detail
        except UserError as error:
            step.detail = str(error)
        step.seconds = time.monotonic() - began
        word = "ok" if step.ok else "FAILED"
        click.echo(f"{title}: {word}, {step.seconds:.0f} s, {step.detail}")
        if result and not result.ok:
            for finding in result.findings[:_SHOWN]:
                click.echo(f"  {finding}")
            if len(result.findings) > _SHOWN:
                click.echo(f"  … and {len(result.findings) - _SHOWN} more")
            for log in result.logs:
                click.echo(f"  log: {shown(log)}")
        return result

    def skip(self, group: str, name: str, why: str) -> None:
        """Note a step that cannot run."""
        self.steps.append(Step(group, name, detail=f"not run: {why}"))

    def summary(self) -> str:
        """The table: per release, what was tried, how it ended and how long it took."""
        lines = []
        width = max(len(step.name) for step in self.steps)
        for group in dict.fromkeys(step.group for step in self.steps):
            lines.append(group)
            for s in self.steps:
                if s.group == group:
                    word = "ok" if s.ok else "FAILED"
                    lines.append(
                        f"  {s.name:{width}}  {word:6}  {s.seconds:4.0f} s  {s.detail}"
                    )
        total = sum(step.seconds for step in self.steps)
        failed = sum(not step.ok for step in self.steps)
        end = f"{failed} of {len(self.steps)} failed" if failed else "all passed"
        return "\n".join([*lines, f"{end}, {total / 60:.1f} min"])


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar on a terminal, a line a minute elsewhere."""
    # Delayed: a step that reports no progress shows no bar.
    with tqdm(desc=title, unit="", leave=False, disable=None, delay=1) as shown_bar:
        said = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said
            if not shown_bar.disable:
                shown_bar.total = total or None
                shown_bar.update(done - shown_bar.n)
            elif time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                click.echo(f"  {done} of {total}")

        yield progress


def series_step(release: Release) -> Callable[[Progress], Result]:
    """The series applies to a fresh base, and an export writes the same files."""

    def work(_: Progress) -> Result:
        faults = exporting.check(release)
        count = len(patches.read_series(release).patches)
        return Result(not faults, f"{count} patches apply to a fresh tree", faults)

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


def proof_step(
    release: Release, env: UnitEnv, jobs: int, known: upstream_tests.Run | None
) -> Callable[[Progress], Result]:
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


def parity_tests_step(
    release: Release, env: UnitEnv, jobs: int, kind: str
) -> Callable[[Progress], Result]:
    """The simulation's own tests, those for a patched or for a stock tree."""

    def work(progress: Progress) -> Result:
        folder = ROOT / "tests" / "parity"
        ensure = {
            "patched": build_tree.ensure_patched,
            "stock": build_tree.ensure_stock,
        }[kind]
        log = upstream_tests.report_log(release, f"parity-tests-{kind}")
        run = upstream_tests.run_pytest(
            env, folder, ["."], log, jobs=jobs, progress=progress,
            python_path=(ensure(release), folder.parent),
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


def command_step(
    command: list[str | Path], log: Path, env: dict[str, str] | None = None
) -> Callable[[Progress], Result]:
    """A program of this project's; its last line is the detail."""

    def work(_: Progress) -> Result:
        status = unit_env.run_logged(
            command, log, cwd=ROOT, env=os.environ | (env or {})
        )
        last = unit_env.tail(log, 1).strip("= ")
        lines = unit_env.tail(log).splitlines()
        return Result(status == 0, last[:120], lines, [log])

    return work


def sweep_command(release: Release, env: UnitEnv, *options: str) -> list[str | Path]:
    """The command that compares the host tier's hits with dense retention's."""
    return [
        sys.executable, ROOT / "scripts" / "sweep.py", "--release", release.version,
        "--python", env.python, "--out", build_root() / "reports" / release.version,
        *options,
    ]  # fmt: skip


def chosen(version: str | None) -> tuple[Release, ...]:
    """The release named, or all supported ones."""
    return (releases.get(version),) if version else releases.supported()


release_option = click.option("--release", help="One release; default: all supported.")
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1),
    default=upstream_tests.default_jobs,
    help="Test processes side by side; default: 2, 1 on a single core.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
def cli() -> None:
    """Run one of the commands."""


@cli.command()
@release_option
@jobs_option
@click.option(
    "--each-commit", is_flag=True, help="Run vLLM's tests after every patch as well."
)
def test(release: str | None, jobs: int, each_commit: bool) -> None:
    """Run everything: the series, vLLM's tests, the proofs, this project's tests."""
    wanted = chosen(release)
    report = Report()
    for each in wanted:
        report.run(f"vLLM {each.version}", "series", series_step(each))
    env: list[UnitEnv] = []

    def environment(_: Progress) -> Result:
        env.append(unit_env.ensure())
        return Result(True, shown(env[0].root))

    report.run("environment", "virtual environment", environment)
    for each in wanted:
        test_release(report, each, env[0] if env else None, jobs, each_commit)
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    own += ["-n", str(jobs), "--dist", "worksteal"]
    log = build_root() / "reports" / "own-tests.log"
    report.run("this project", "own tests", command_step(own, log))
    click.echo(f"\n{report.summary()}")
    if not report.ok:
        sys.exit(1)


def test_release(
    report: Report, release: Release, env: UnitEnv | None, jobs: int, each_commit: bool
) -> None:
    """Run what needs the environment, for one release."""
    group = f"vLLM {release.version}"
    if env is None:
        report.skip(group, "vLLM's tests and all others", "there is no environment")
        return
    runs = []

    def upstream(progress: Progress) -> Result:
        found, run = upstream_tests.check(release, env, jobs=jobs, progress=progress)
        runs.append(run)
        return describe(found, run.log)

    report.run(group, "vLLM's tests", upstream)
    if each_commit:
        report.run(group, "vLLM's tests, each patch", each_step(release, env, jobs))
    known = runs[0] if runs else None
    report.run(group, "proof", proof_step(release, env, jobs, known))
    for kind in ("stock", "patched"):
        step = parity_tests_step(release, env, jobs, kind)
        report.run(group, f"simulation, {kind}", step)
    report.run(
        group,
        "parity sweep",
        command_step(
            sweep_command(
                release, env, "--sample", str(_SWEEP_SAMPLE), "--jobs", str(jobs)
            ),
            upstream_tests.report_log(release, "parity-sweep"),
            {"PYTHONPYCACHEPREFIX": env.variables()["PYTHONPYCACHEPREFIX"]},
        ),
    )


def each_step(
    release: Release, env: UnitEnv, jobs: int
) -> Callable[[Progress], Result]:
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


@cli.command(name="proof")
@release_option
@jobs_option
def proof_command(release: str | None, jobs: int) -> None:
    """Show each new test failing on the stock release and passing on the patched."""
    env = unit_env.ensure()
    bad = 0
    for each in chosen(release):
        with bar(f"vLLM {each.version}") as progress:
            found = proof.check(each, env, jobs=jobs, progress=progress)
        click.echo(proof_table(each, found))
        bad += len(found.findings)
    if bad:
        sys.exit(1)


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


@cli.command()
@release_option
def lint(release: str | None) -> None:
    """Lint this project's files, then what each patch adds to vLLM."""
    wanted = chosen(release)
    report = Report()
    report.run("this project", "pre-commit hooks", own_hooks)
    for each in wanted:

        def work(progress: Progress, each: Release = each) -> Result:
            found = series_lint.check(each, progress)
            lines = [
                f"{f.patch}: {f'{f.where}: ' if f.where else ''}{f.rule}" for f in found
            ]
            log = upstream_tests.report_log(each, "lint")
            return Result(not found, f"{len(found)} findings", lines, [log])

        report.run(f"vLLM {each.version}", "lint of the series", work)
    click.echo(f"\n{report.summary()}")
    if not report.ok:
        sys.exit(1)


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


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@release_option
@click.pass_context
def parity(context: click.Context, release: str | None) -> None:
    """Compare the host tier's hits with dense retention's, stock and patched.

    Further options go to scripts/sweep.py.
    """
    env = unit_env.ensure()
    bad = 0
    for each in chosen(release):
        command = sweep_command(each, env, *context.args)
        bad += subprocess.run(command, check=False).returncode != 0
    if bad:
        sys.exit(1)


def main() -> None:
    """Run the command; a foreseeable fault is one line on stderr and exit code 1."""
    clean_up_on_termination()
    try:
        cli(standalone_mode=False)
    except click.UsageError as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
