# SPDX-License-Identifier: Apache-2.0
"""Real tiny models on a CPU: what the host tier restores is the right data."""

import click

from offload_parity import cli as scripts
from offload_parity import e2e, e2e_env, upstream_tests
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.paths import shown
from offload_parity.report import Report, Result, finish
from offload_parity.upstream_tests import Progress


def chosen(version: str | None) -> tuple[releases.Release, ...]:
    """The release named, or all whose compiled CPU backend can be installed."""
    able = releases.with_cpu_package()
    if version is None:
        return able
    wanted = releases.get(version)
    if wanted not in able:
        raise UserError(
            f"make e2e does not run on vLLM {wanted.version}: its release.toml names "
            "no package with the compiled CPU backend ([e2e]); choose one with "
            f"RELEASE= of {releases.names(able)}"
        )
    return (wanted,)


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", help="One release; default: all with a CPU package.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)
def cli(release: str | None, jobs: int) -> None:
    """Build the environment, run the tests on both packages, show the table."""
    report = Report()
    for each in chosen(release):
        group = f"vLLM {each.version}"
        env = []

        def environment(_: Progress, each=each, env=env) -> Result:
            env.append(e2e_env.ensure(each))
            return Result(True, shown(env[0].root))

        report.run(group, "environment", environment)
        for kind in e2e.KINDS:
            if env:
                report.run(group, kind, e2e.tests(each, env[0], kind, jobs))
            else:
                report.skip(group, kind, "there is no environment")
    finish(report)


if __name__ == "__main__":
    scripts.run(cli)
