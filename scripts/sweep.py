# SPDX-License-Identifier: Apache-2.0
"""The exact-replay sweep: sparse retention beside dense, stock beside patched.

Runs `python -m parity replays` once per tree, each in a process of its own, and
compares. Exit status 1 if any patched figure falls short.
"""

import json
import sys
from pathlib import Path

import click

from offload_parity import cli as scripts
from offload_parity import release, simulation, unit_env, upstream_tests
from offload_parity.files import replace, writable
from offload_parity.paths import build_root
from offload_parity.resends import compare, failures, markdown
from offload_parity.simulation import Job, Tree


@click.command(help=__doc__.splitlines()[0])
@click.option(
    "--release", "version", help="One release; default: the newest and the oldest."
)
@click.option(
    "--stock",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A tree to measure as stock, in place of the built ones (repeatable).",
)
@click.option(
    "--patched",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A tree to measure as patched, in place of the built ones (repeatable).",
)
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter that has vLLM's requirements; default: the unit tests' own.",
)
@click.option("--geometry", multiple=True, help="Repeatable; default: all.")
@click.option("--retention", multiple=True, help="Repeatable; default: None 0 4096.")
@click.option("--blocks-per-chunk", default=1, show_default=True)
@click.option(
    "--length", multiple=True, type=click.IntRange(1), help="Only these (repeatable)."
)
@click.option("--sample", type=click.IntRange(1), help="Only so many lengths.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for sweep.md and sweep.json; default: build/reports.",
)
def cli(
    version, stock, patched, python, geometry, retention, blocks_per_chunk, length,
    sample, seed, jobs, out,
) -> None:  # fmt: skip
    """Measure, print the table and write it."""
    trees = [
        *(Tree("stock", path.resolve()) for path in stock),
        *(Tree("patched", path.resolve()) for path in patched),
    ] or [
        tree for each in release.in_full(version) for tree in simulation.trees_of(each)
    ]
    for tree in trees:
        simulation.check_tree(tree)
    folder = writable(out or build_root() / "reports")
    arguments = [
        "replays",
        "--seed",
        str(seed),
        "--blocks-per-chunk",
        str(blocks_per_chunk),
    ]
    for option, values in (
        ("--geometry", geometry),
        ("--retention", retention),
        ("--length", length),
        ("--sample", [sample] if sample else []),
    ):
        for value in values:
            arguments += [option, str(value)]
    runner = simulation.Runner(unit_env.interpreter(python), jobs, unit="replay")
    ended = runner.run([Job(tree, tuple(arguments)) for tree in trees])
    records = [record for one in ended for record in one.records]
    rows = compare(records)
    table = markdown(rows)
    replace(folder / "sweep.md", table.encode())
    replace(folder / "sweep.json", json.dumps(rows, indent=1).encode())
    print(table)
    measured = sum(row["patched"]["tried"] for row in rows if "patched" in row)
    failed = failures(rows)
    print(f"{failed} of {measured} patched figures fall short")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
