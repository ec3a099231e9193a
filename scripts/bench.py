# SPDX-License-Identifier: Apache-2.0
"""What the host tier costs, stock beside patched: chunks stored and CPU time.

Exit status 1 if a decision of the patched tree takes longer than stock's, beyond the
noise measured in the same run, or grows faster than the prompt.
"""

import json
import sys
import time
from collections.abc import Iterable

import click

from offload_parity import cli as scripts
from offload_parity import costs, patches, simulation, unit_env
from offload_parity import release as releases
from offload_parity.files import replace, writable
from offload_parity.paths import build_root, shown
from offload_parity.release import Release
from offload_parity.simulation import Job, Runner, Tree


def measure(release: Release, jobs: int, repeats: int, lengths: tuple[int, ...]):
    """All records of one release, the times of both trees taken side by side."""
    trees = simulation.trees_of(release)
    options = tuple(word for n in lengths for word in ("--length", str(n)))
    work = [Job(tree, ("bench", "stored")) for tree in trees]

    def add(what: str, order: Iterable[Tree]) -> None:
        """A process per retention: what one leaves in memory would slow the next."""
        for retention in costs.RETENTIONS:
            words = ("bench", what, "--retention", str(retention), *options)
            work.extend(Job(tree, words) for tree in order)

    add("counted", trees)
    for repeat in range(repeats):
        # Whatever favours the first to start favours each of them in turn.
        add("timed", trees if repeat % 2 == 0 else trees[::-1])
    ended = Runner(unit_env.interpreter(), jobs, unit="measurement").run(work)
    return [record for one in ended for record in one.records]


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", help="One release; default: the newest and the oldest.")
@click.option(
    "--repeats", type=click.IntRange(2), default=4, show_default=True,
    help="Processes per tree; each sends short prompts several times.",
)  # fmt: skip
@click.option(
    "--length", "lengths", multiple=True, type=click.IntRange(256),
    help="Only prompts of these lengths; the series' file is left alone.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True,
    help="Processes side by side; more than one slow each other, unevenly.",
)  # fmt: skip
def cli(release, repeats, lengths, jobs) -> None:
    """Measure, print the tables and write the file."""
    bad = 0
    for each in releases.in_full(release):
        began = time.monotonic()
        folder = build_root() / "reports" / each.version if lengths else each.folder
        writable(folder)
        series = patches.series_digest(patches.read_series(each))
        records = measure(each, jobs, repeats, lengths)
        found = {"series": series} | costs.summary(records, each.dsv4_block_bytes)
        path = folder / "bench.json"
        replace(path, (json.dumps(found, indent=1) + "\n").encode())
        click.echo(f"vLLM {each.version}\n\n{costs.report(found)}\n")
        for fault in found["faults"]:
            click.echo(f"FAULT {fault}")
        bad += len(found["faults"])
        minutes = (time.monotonic() - began) / 60
        click.echo(
            f"vLLM {each.version}: {len(found['faults'])} faults, {minutes:.1f} min, "
            f"{shown(path)}"
        )
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
