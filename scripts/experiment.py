# SPDX-License-Identifier: Apache-2.0
"""Run all probes on simulated servers, stock beside patched, and write the report."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from tqdm import tqdm

from offload_parity import cli as scripts
from offload_parity import experiment, sim_server, simulation, unit_env, upstream_tests
from offload_parity import release as releases
from offload_parity.experiment import Size
from offload_parity.paths import build_root, shown
from offload_parity.probes import plots
from offload_parity.simulation import Tree


@click.command(help=__doc__)
@click.option("--release", help="One release; default: all supported.")
@click.option("--stock", type=click.Path(path_type=Path), multiple=True,
              help="A tree to take as stock, in place of the built ones.")  # fmt: skip
@click.option("--patched", type=click.Path(path_type=Path), multiple=True,
              help="A tree to take as patched, in place of the built ones.")  # fmt: skip
@click.option("--python", type=click.Path(path_type=Path),
              help="Interpreter that has vLLM's requirements.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), default=Size.tokens,
              show_default=True)  # fmt: skip
@click.option("--prompts", type=click.IntRange(1), default=Size.prompts,
              show_default=True)  # fmt: skip
@click.option("--no-plots", is_flag=True, help="Tables only: needs no matplotlib.")
@click.option("--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
              help="Servers side by side; default: 2, 1 on a single core.")  # fmt: skip
def cli(release, stock, patched, python, tokens, prompts, no_plots, jobs) -> None:
    """Measure, print the tables and write them."""
    began = time.monotonic()
    folder = build_root() / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    if not no_plots:
        plots.check(folder / "experiment.png")
    size = Size(tokens=tokens, prompts=prompts)
    own = [Tree("stock", p.resolve()) for p in stock]
    own += [Tree("patched", p.resolve()) for p in patched]
    groups: dict[str, list[Tree]] = {}
    for tree in own:
        groups.setdefault(sim_server.version_of(tree.path), []).append(tree)
    if not own:
        for each in releases.chosen(release):
            groups[each.version] = simulation.trees_of(each)
    plans = [p for version, t in groups.items() for p in experiment.plans(version, t)]
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
    (folder / "experiment.md").write_text(text, encoding="utf-8")
    rows = [experiment.row(found) for found in everything]
    (folder / "experiment.json").write_text(json.dumps(rows, indent=1), "utf-8")
    click.echo(text.split("\n\n![")[0])
    click.echo(f"\n{shown(folder / 'experiment.md')}")


if __name__ == "__main__":
    scripts.run(cli)
