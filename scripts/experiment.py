# SPDX-License-Identifier: Apache-2.0
"""Run all probes on simulated servers, stock beside patched, and write the report."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from tqdm import tqdm

from offload_parity import cli as scripts
from offload_parity import experiment, sim_server, simulation, unit_env, upstream_tests
from offload_parity import release as releases
from offload_parity.experiment import Size
from offload_parity.files import replace, writable
from offload_parity.paths import build_root, shown
from offload_parity.probes import plots
from offload_parity.simulation import Tree


@click.command(help=__doc__)
@click.option("--release", help="One release; default: the newest and the oldest.")
@click.option("--stock", type=click.Path(path_type=Path), multiple=True,
              help="A tree to take as stock, not the built ones.")  # fmt: skip
@click.option("--patched", type=click.Path(path_type=Path), multiple=True,
              help="A tree to take as patched, not the built ones.")  # fmt: skip
@click.option("--python", type=click.Path(path_type=Path),
              help="Interpreter that has vLLM's requirements.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small servers, few short prompts.")
@click.option("--no-plots", is_flag=True, help="Tables only: needs no matplotlib.")
@click.option("--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
              help="Servers side by side; default: 2, 1 on a single core.")  # fmt: skip
def cli(release, stock, patched, python, quick, no_plots, jobs) -> None:
    """Measure, print the tables and write them; status 1 if a figure is not right."""
    began = time.monotonic()
    folder = writable(build_root() / "reports")
    if not no_plots:
        plots.check(folder / "experiment.png")
    size = experiment.QUICK if quick else Size()
    own = [Tree("stock", p.resolve()) for p in stock]
    own += [Tree("patched", p.resolve()) for p in patched]
    groups: dict[str, list[Tree]] = {}
    for tree in own:
        groups.setdefault(sim_server.version_of(tree.path), []).append(tree)
    if not own:
        for each in releases.in_full(release):
            groups[each.version] = simulation.trees_of(each)
    plans = [p for version, t in groups.items() for p in experiment.plans(version, t)]
    if quick:
        # The release's default is asked by the whole experiment.
        plans = [experiment.quick(p) for p in plans if p.retention is not None]
    interpreter = unit_env.interpreter(python)
    total = len(plans) * size.requests(256)
    with (
        tqdm(total=total, unit=" requests", disable=None) as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):
        tasks = [
            pool.submit(experiment.one, plan, interpreter, size, bar.update)
            for plan in plans
        ]
        try:
            everything = [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not no_plots:
        # matplotlib is for one thread.
        for found in everything:
            experiment.draw(found, size, folder)
    text = experiment.report(everything, size, (time.monotonic() - began) / 60)
    path = folder / ("probes.md" if quick else "experiment.md")
    replace(path, text.encode())
    rows = [experiment.row(found) for found in everything]
    replace(path.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    click.echo(text.split("\n\n![")[0])
    click.echo(f"\n{shown(path)}")
    findings = [line for found in everything for line in experiment.check(found, size)]
    for line in findings:
        click.echo(f"FINDING {line}")
    click.echo(f"{len(everything)} servers, {len(findings)} findings")
    if findings:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
