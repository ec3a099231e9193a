# SPDX-License-Identifier: Apache-2.0
"""`python -m parity …` on the vLLM tree that PYTHONPATH names."""

import atexit
import gc
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import click
from tqdm import tqdm

from .geometry import GEOMETRIES, SWEPT

MODES = ("hits", "mixed", "crowded")
_FUZZ_BAR = "{percentage:3.0f}%|{bar}| {postfix}"


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
def siblings() -> None:
    """Print one JSON line per setting: what four requests that share a prefix hit."""
    from . import shared

    for record in shared.measure():
        print(json.dumps(record), flush=True)


@cli.command()
@click.option("--sample", type=click.IntRange(0), help="Random histories to play.")
@click.option("--seed", default=0, show_default=True)
@click.option("--law", "laws", multiple=True, help="Judge only these (repeatable).")
@click.option("--geometry", "names", multiple=True, type=click.Choice([*GEOMETRIES]))
@click.option("--quick", is_flag=True, help="A few cases that ask every law.")
@click.option("--jsonl", is_flag=True, help="A JSON line per verdict.")
def laws(sample, seed, laws, names, quick, jsonl) -> None:
    """Play the fixed scenarios and a sample of random ones; judge L1 to L8."""
    from . import contract
    from .names import NAMES
    from .plan import SAMPLE, plan

    for law in laws:
        if law not in NAMES:
            raise click.BadParameter(f"{law}: the laws are {', '.join(NAMES)}")
    if sample is None:
        sample = 10 if quick else SAMPLE
    _settle()
    cases = plan([GEOMETRIES[name] for name in names], sample, seed, quick)
    if jsonl:
        click.echo(json.dumps({"total": len(cases)}))
    checks, bad = Counter(), Counter()
    exempt: Counter[str] = Counter()
    limited: Counter[str] = Counter()
    for case, useful in cases:
        for verdict in contract.judge(case, ledger=False, useful=useful):
            if laws and verdict.law not in laws:
                continue
            checks[verdict.law] += verdict.more.get("checks", 0)
            bad[verdict.law] += len(verdict.words)
            exempt.update(verdict.more.get("exempt", {}))
            limited.update(verdict.more.get("limited", {}))
            if jsonl:
                click.echo(json.dumps(verdict.to_json()))
                continue
            for words in verdict.words:
                click.echo(f"{verdict.law} {_about(case)}: {words}")
    if not jsonl:
        for law, name in NAMES.items():
            if not laws or law in laws:
                click.echo(f"{law} {name}: {bad[law]} findings of {checks[law]} checks")
        if exempt:
            said = ", ".join(f"{n} {what}" for what, n in sorted(exempt.items()))
            click.echo(f"chunks that L7 exempts: {said}")
        for limit, count in limited.items():
            click.echo(f"limits: {count} findings: {limit}")
    sys.exit(any(bad.values()))


def _about(case) -> str:
    setup = case.setup
    return (
        f"{setup.geometry.name}, retention {setup.retention}, {setup.tier}: "
        f"{case.name} [{case.digest}]"
    )


def _settle() -> None:
    """Leave what the imports made out of every garbage collection to come."""
    gc.collect()
    gc.freeze()
    # Python takes half a minute to end with a frozen heap.
    atexit.register(gc.unfreeze)


@cli.command()
def serve() -> None:
    """Answer cases on stdin, a JSON line each, with their hits."""
    from .peer import serve as answers

    _settle()
    for line in answers(sys.stdin):
        click.echo(line)


@cli.command()
def reports() -> None:
    """Print one JSON line per public report: whether the tree in use shows it."""
    from . import release_adapter
    from . import reports as module

    for record in module.on(release_adapter.version()):
        click.echo(json.dumps(record))


@cli.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False))
def replay(files) -> None:
    """Play files of tests/regressions again and say what is wrong with each."""
    from . import contract, regressions

    found = 0
    for file in files:
        case = regressions.read_file(Path(file))
        click.echo(json.dumps(case.to_json(), indent=1))
        for verdict in contract.judge(case, useful=True):
            click.echo(f"{verdict.law}: hits {verdict.hits}, stored {verdict.stored}")
            for words in verdict.words:
                found += 1
                click.echo(f"  {words}")
    sys.exit(bool(found))


@cli.command()
@click.option("--seconds", type=click.IntRange(1), default=60, show_default=True)
@click.option("--seed", type=int, help="Of the first round; default: drawn and said.")
@click.option("--stock", type=click.Path(exists=True, path_type=Path), help="For L6.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), default=MODES)
@click.option("--geometry", "names", multiple=True, type=click.Choice([*GEOMETRIES]))
@click.option("--findings", default=3, show_default=True, help="Stop after so many.")
@click.option("--write/--no-write", default=True, help="Failures as regressions.")
def fuzz(seconds, seed, stock, modes, names, findings, write) -> None:
    """Play random histories; write each failing one, as short as it gets."""
    from . import fuzz as module
    from . import regressions, release_adapter
    from .peer import Peer

    if write:
        # Before the hours that may end with something to write.
        regressions.check_folder()
    _settle()
    release = release_adapter.version()
    if seed is None:
        seed = random.SystemRandom().randrange(1_000_000)
    geometries = tuple(GEOMETRIES[n] for n in names) or module.GEOMETRIES
    for geometry in geometries:
        if reason := release_adapter.refusal(geometry):
            raise click.BadParameter(f"{geometry.name}: {reason}; leave it out")
    click.echo(f"vLLM {release}, seed {seed}, {seconds} s")
    bar = tqdm(total=seconds, unit="s", disable=None, bar_format=_FUZZ_BAR)
    said = time.monotonic()

    def progress(done: int, left: float) -> None:
        nonlocal said
        bar.n = round(seconds - max(left, 0))
        bar.set_postfix_str(f"{done} histories, {max(left, 0):.0f} s left")
        if bar.disable and time.monotonic() - said > 60:
            said = time.monotonic()
            click.echo(f"  {done} histories, {max(left, 0):.0f} s left")

    bad = []

    def found(failure: module.Failure) -> bool:
        bad.append(failure)
        case = failure.case
        bar.clear()
        click.echo(f"{failure.law} {_about(case)}")
        for words in failure.words:
            click.echo(f"  {words}")
        click.echo(f"  {json.dumps(case.to_json())}")
        if write:
            try:
                path = regressions.write(release, failure.law, case, failure.words)
            except OSError as error:
                click.echo(f"  NOT WRITTEN ({error}): keep the line above", err=True)
            else:
                click.echo(f"  written to {path}: make parity plays it from now on")
        return len(bad) < findings

    run = module.Fuzz(
        seconds, seed, modes, geometries, Peer(stock) if stock else None, progress
    )
    run.run(found)
    bar.close()
    if run.peer is not None:
        run.peer.close()
    click.echo(f"{run.done} histories from seed {seed}, {len(bad)} findings")
    sys.exit(bool(bad))


@cli.command()
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--jobs", default=1, show_default=True, help="Mutants at a time.")
def mutants(file, jobs) -> None:
    """Print one JSON line on the tree itself and one per mutant of the file."""
    from . import planted

    work = planted.read(file) if file else []
    print(json.dumps({"total": len(work) + 1}), flush=True)
    _settle()
    judge = planted.Judge(planted.cases())
    known = {"known": list(judge.known), "seconds": judge.seconds}
    print(json.dumps(known), flush=True)
    for mutant, killer in judge.killers(work, jobs):
        print(json.dumps({"mutant": mutant.name, "killer": killer}), flush=True)


@cli.command()
@click.argument("what", type=click.Choice(["stored", "counted", "timed"]))
@click.option("--length", "lengths", multiple=True, type=click.IntRange(256))
@click.option("--retention", type=click.IntRange(0), default=0, help="Not of `stored`.")
def bench(what, lengths, retention) -> None:
    """Print one JSON line per figure of what the host tier costs (scripts/bench.py)."""
    from . import bench as module

    for record in module.records(what, lengths, retention):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(cli(prog_name="python -m parity"))
