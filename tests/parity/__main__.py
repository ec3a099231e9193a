# SPDX-License-Identifier: Apache-2.0
"""`python -m parity …` on the vLLM tree that PYTHONPATH names."""

import json
import sys

import click

from .geometry import GEOMETRIES, SWEPT


def _retention(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


@click.group()
def cli() -> None:
    """Run the simulation on one vLLM tree."""


@cli.command()
@click.option("--geometry", "names", multiple=True, type=click.Choice([*GEOMETRIES]))
@click.option("--retention", "retentions", multiple=True, default=("None", "0", "4096"))
@click.option("--blocks-per-chunk", default=1, show_default=True)
@click.option("--sample", type=click.IntRange(1), help="Try only so many lengths.")
@click.option("--seed", default=0, show_default=True)
@click.option("--length", "only", multiple=True, type=click.IntRange(1))
def replays(names, retentions, blocks_per_chunk, sample, seed, only) -> None:
    """Print one JSON line per replayed prompt (see scripts/sweep.py)."""
    from . import sweep

    for name in names or [geometry.name for geometry in SWEPT]:
        geometry = GEOMETRIES[name]
        lengths = sorted(set(only)) or sweep.lengths(geometry, sample, seed)
        for record in sweep.measure(
            geometry, lengths, [_retention(r) for r in retentions], blocks_per_chunk
        ):
            print(json.dumps(record), flush=True)


@cli.command()
@click.option("--geometry", "names", multiple=True, type=click.Choice([*GEOMETRIES]))
@click.option("--verbose", is_flag=True, help="Show the hits of every send.")
def scenarios(names, verbose) -> None:
    """Play the fixed scenarios, sparse beside dense; print what falls short."""
    from . import scenarios as module

    report = click.echo if verbose else lambda line: None
    found = 0
    for name in names or [geometry.name for geometry in SWEPT]:
        geometry = GEOMETRIES[name]
        for scenario in module.fixed(geometry):
            for finding in module.findings(scenario, geometry, report=report):
                found += 1
                click.echo(str(finding))
    click.echo(f"{found} findings")
    sys.exit(bool(found))


@cli.command()
@click.option("--seconds", default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The first case's seed.")
@click.option("--cases", type=click.IntRange(1), help="Stop after so many.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["hits", "safety", "async"]),
    default=("hits", "safety", "async"),
)
@click.option("--geometry", "names", multiple=True, type=click.Choice([*GEOMETRIES]))
@click.option("--findings", default=5, show_default=True, help="Stop after so many.")
@click.option("--shrink/--no-shrink", default=True)
@click.option("--busy-resets", is_flag=True, help="Reset a host that is in use, too.")
def fuzz(seconds, seed, cases, modes, names, findings, shrink, busy_resets) -> None:
    """Play random histories; print each failing one, as short as it gets."""
    from . import fuzz as module
    from . import release_adapter

    geometries = tuple(GEOMETRIES[n] for n in names) or module.GEOMETRIES
    bad = []

    def found(case, words) -> bool:
        bad.append(case)
        small = module.shrink(case) if shrink else case
        click.echo(f"--- mode {case.mode} seed {case.seed}")
        for line in module.check(small) or words:
            click.echo(line)
        click.echo(json.dumps(small.describe()))
        return len(bad) < findings

    click.echo(f"vLLM {release_adapter.version()}, seed {seed}")
    done = module.run(
        seconds, seed, tuple(modes), geometries, cases, busy_resets, found
    )
    click.echo(f"{done} histories from seed {seed}, {len(bad)} with findings")
    sys.exit(bool(bad))


@cli.command()
@click.argument("what", type=click.Choice(["stored", "counted", "timed"]))
@click.option("--length", "lengths", multiple=True, type=click.IntRange(256))
def bench(what, lengths) -> None:
    """Print one JSON line per figure of what the host tier costs (scripts/bench.py)."""
    from . import bench as module

    for record in module.records(what, lengths):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(cli(prog_name="python -m parity"))
