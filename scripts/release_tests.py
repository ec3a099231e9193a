# SPDX-License-Identifier: Apache-2.0
"""Test and lint the series: vLLM's own tests on the patched trees, and ours."""

import sys

import click

from offload_parity import changed, proof, steps, unit_env, upstream_tests
from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.paths import build_root, shown
from offload_parity.release import Release
from offload_parity.report import Report, Result, bar, finish
from offload_parity.unit_env import UnitEnv
from offload_parity.upstream_tests import Progress

release_option = click.option(
    "--release", help="One release; default: the newest and the oldest, lint: all."
)
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
@click.option("--all", "every", is_flag=True, help="Every release in full.")
def test(release: str | None, jobs: int, each_commit: bool, every: bool) -> None:
    """Run everything: the series, vLLM's tests, the proofs, this project's tests.

    Without a release, the newest and the oldest in full; of the others that the series
    applies and that its row of the matrix is its own.
    """
    wanted = releases.chosen(release)
    full = wanted if every else releases.in_full(release)
    report = Report()
    for each in wanted:
        report.run(f"vLLM {each.version}", "series", steps.series(each))
        report.run(f"vLLM {each.version}", "matrix", steps.matrix_row(each))
    env: list[UnitEnv] = []

    def environment(_: Progress) -> Result:
        env.append(unit_env.ensure())
        return Result(True, shown(env[0].root))

    report.run("environment", "virtual environment", environment)
    for each in full:
        test_release(report, each, env[0] if env else None, jobs, each_commit)
    for each in wanted:
        if each.e2e and env:
            group = f"vLLM {each.version}"
            report.run(group, "tiny models", steps.tiny_models(each))
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    own += ["-n", str(jobs), "--dist", "worksteal"]
    log = build_root() / "reports" / "own-tests.log"
    report.run("this project", "own tests", steps.command(own, log))
    if rest := tuple(each for each in wanted if each not in full):
        click.echo(
            f"\nOnly the series and the row of the matrix: {releases.names(rest)}. "
            f"In full: make test RELEASE={rest[0].version}"
        )
    finish(report)


def test_release(
    report: Report, release: Release, env: UnitEnv | None, jobs: int, each_commit: bool
) -> None:
    """Run what needs the environment, for one release."""
    group = f"vLLM {release.version}"
    if env is None:
        report.skip(group, "vLLM's tests and all others", "there is no environment")
        return
    runs, comparisons = [], []

    def upstream(progress: Progress) -> Result:
        found, run = upstream_tests.check(release, env, jobs=jobs, progress=progress)
        runs.append(run)
        comparisons.append(found)
        return steps.describe(found, run.log)

    report.run(group, "vLLM's tests", upstream)
    if each_commit:
        report.run(
            group, "vLLM's tests, each patch", steps.each_patch(release, env, jobs)
        )
    known = runs[0] if runs else None
    report.run(group, "proof", steps.proof_of(release, env, jobs, known))
    step = steps.matrix_again(
        release, env, jobs, comparisons[0] if comparisons else None
    )
    report.run(group, "matrix, again", step)
    for kind in ("stock", "patched"):
        step = steps.parity_tests(release, env, jobs, kind)
        report.run(group, f"simulation, {kind}", step)
    on = ["--release", release.version, "--jobs", str(jobs)]
    for name, step in steps.laws_and_probes(release, sys.executable, on):
        report.run(group, name, step)


@cli.command(name="proof")
@release_option
@jobs_option
def proof_command(release: str | None, jobs: int) -> None:
    """Show each new test failing on the stock release and passing on the patched."""
    env = unit_env.ensure()
    bad = 0
    for each in releases.in_full(release):
        with bar(f"vLLM {each.version}") as progress:
            found = proof.check(each, env, jobs=jobs, progress=progress)
        click.echo(steps.proof_table(each, found))
        bad += len(found.findings)
    if bad:
        sys.exit(1)


@cli.command(name="each-commit")
@click.option("--release", help="One release, all its commits; default: the touched.")
@click.option("--since", help="What the touched releases are touched since.")
@jobs_option
def each_commit_command(release: str | None, since: str | None, jobs: int) -> None:
    """Lint each patch at its own commit, and run there what the series has brought.

    Without a release: of those that the change since the last commit, or since where
    its branch began, touches, from the first patch that is not as it was.
    """
    if release and since:
        raise UserError("RELEASE= and SINCE= choose the releases: give one of them")
    wanted = touched(since) if not release else {releases.get(release): 0}
    if not wanted:
        click.echo("The series are as they were: no commit to test")
        return
    report = Report()
    env = unit_env.ensure()
    for each, first in wanted.items():
        group = f"vLLM {each.version}"
        report.run(group, "lint of each patch", steps.lint_kept(each))
        step = steps.own_at_each(each, env, jobs, first)
        report.run(group, "its tests at each commit", step)
    finish(report)


def touched(since: str | None) -> dict[Release, int]:
    """The releases that a change touches, each with its first changed patch's place."""
    base = changed.base(since)
    if base is None:
        newest = releases.default()
        click.echo(
            "This checkout has no history to compare with: all commits of "
            f"{newest.version}, the newest release"
        )
        return {newest: 0}
    places = {
        each: first
        for each in releases.supported()
        if (first := changed.first_changed(each, base.commit)) is not None
    }
    what = ", ".join(f"{r.version} from patch {n + 1}" for r, n in places.items())
    click.echo(f"Series that changed {base.words}: {what or 'none'}")
    return places


@cli.command()
@release_option
def lint(release: str | None) -> None:
    """Lint this project's files, then what each patch adds to vLLM."""
    wanted = releases.chosen(release)
    report = Report()
    report.run("this project", "pre-commit hooks", steps.own_hooks)
    for each in wanted:
        report.run(f"vLLM {each.version}", "lint of the series", steps.lint(each))
    finish(report)


if __name__ == "__main__":
    scripts.run(cli)
