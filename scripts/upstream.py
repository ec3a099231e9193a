# SPDX-License-Identifier: Apache-2.0
"""Write a release's series as pull requests for vLLM, a branch and a text each.

Nothing is sent. Exit status 1 if one is not as vLLM's contribution rules ask; what is
left to do by hand is listed.
"""

import sys
from contextlib import nullcontext

import click

from offload_parity import cli as scripts
from offload_parity import proof, unit_env, upstream_tests
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.files import writable
from offload_parity.paths import shown
from offload_parity.pull_requests import changes, identity, pack
from offload_parity.report import bar


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", help="The release; default: the newest.")
@click.option(
    "--tests", default="1", metavar="0|1",
    help="0: leave out the runs of tests; the texts then say so.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Test processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
def cli(release: str | None, tests: str, jobs: int) -> None:
    """Show what is missing, write the pack and print the rules' results."""
    if tests not in ("0", "1"):
        raise UserError(f"TESTS={tests}: give TESTS=0 or leave it out")
    # Before anything that takes a minute.
    who = identity.submitter()
    wanted = releases.get(release)
    changes.read(wanted)
    writable(pack.folder_of(wanted))
    env = unit_env.ensure() if tests == "1" else None
    if env and proof.read_report(wanted) is None:
        click.echo("The proof of this series is not there: it runs first")
        with bar(f"vLLM {wanted.version}: proof") as progress:
            proof.check(wanted, env, jobs=jobs, progress=progress)
    with bar(f"vLLM {wanted.version}: branches") if env else nullcontext() as progress:
        found = pack.write(wanted, who, env, jobs, progress)
    for branch in found.branches:
        click.echo(f"  {branch.change.name}  {branch.change.title}")
    for line in pack.in_short(found.results):
        click.echo(line)
    click.echo(
        f"{shown(found.folder)}: {len(found.branches)} branches and texts, signed off "
        f"by {who}, {len(found.faults)} faults; all of it is in ORDER.md; nothing was "
        "sent"
    )
    if found.faults:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
