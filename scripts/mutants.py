# SPDX-License-Identifier: Apache-2.0
"""Plant defects in the patched trees: each one must break a law.

Takes out each patch in turn and changes each comparison, sum and condition of the
functions that decide what is kept. Exit status 1 if one goes unnoticed that
patches/<release>/mutants.toml does not excuse.
"""

import json
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from offload_parity import build_tree, mutants, unit_env, upstream_tests
from offload_parity import cli as scripts
from offload_parity import patches as series
from offload_parity import release as releases
from offload_parity.files import replace
from offload_parity.mutants import Excuses, Overlay, Without
from offload_parity.paths import build_root, shown
from offload_parity.release import Release
from offload_parity.simulation import Broken, Job, Runner, Tree
from offload_parity.unit_env import UnitEnv

# A tree without a patch may compute for ever; the laws take less than a minute.
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``killer`` is what noticed it, None if nothing did."""

    name: str
    killer: str | None
    excuse: str | None = None

    def __str__(self) -> str:
        if self.killer:
            return f"  killed    {self.name}\n              by {self.killer}"
        word = "excused " if self.excuse else "SURVIVED"
        return f"  {word}  {self.name}" + (
            f"\n              {self.excuse}" if self.excuse else ""
        )


def code_verdicts(
    release: Release, env: UnitEnv, excuses: Excuses, jobs: int, only: str
) -> tuple[list[Verdict], set[str]]:
    """Judge every mutant of the deciding functions, in one process.

    Also returns what the laws find on the patched tree itself, which kills nothing.
    """
    tree = build_tree.ensure_patched(release)
    work = [m for m in mutants.mutants(tree) if only in m.name]
    folder = build_root() / "reports" / release.version
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mutants.jsonl"
    mutants.write(work, file)
    arguments = ("mutants", str(file), "--jobs", str(jobs))
    (ended,) = Runner(env.python, 1, unit="mutant").run(
        [Job(Tree("patched", tree), arguments)]
    )
    itself, *judged = ended.records
    killers = {record["mutant"]: record["killer"] for record in judged}
    return [
        Verdict(m.name, killers[m.name], excuses.survivors.get(m.name)) for m in work
    ], set(itself["known"])


def killer_of(env: UnitEnv, tree: Path, known: set[str]) -> str | None:
    """The first thing that the laws find on a tree and that is not known.

    Raises:
        Broken: the simulation does not run there.
    """

    def new(record: dict[str, Any]) -> bool:
        return not known.issuperset(mutants.findings(record))

    runner = Runner(
        env.python, 1, accepted=(0, 1), show=False, until=new, timeout_s=_TIMEOUT_S
    )
    (ended,) = runner.run([Job(Tree("mutant", tree), ("laws", "--quick", "--jsonl"))])
    found = (words for record in ended.records for words in mutants.findings(record))
    return next((words for words in found if words not in known), None)


def patch_verdicts(
    release: Release,
    env: UnitEnv,
    excuses: Excuses,
    jobs: int,
    only: str,
    known: set[str],
) -> list[Verdict]:
    """Judge the series without each of its patches, a process each."""
    path = build_tree.ensure_patched(release)
    tree = build_tree.repo(path)
    names = [patch.name for patch in series.read_series(release).patches]
    numbers = [n for n, name in enumerate(names) if only in f"without {name}"]
    slots: queue.Queue[Overlay] = queue.Queue()
    for slot in range(jobs):
        slots.put(Overlay(mutants.overlay_root(release, slot), path))

    def laws(found: Without) -> str | None:
        overlay = slots.get()
        try:
            overlay.show(mutants.changed_files(tree, found.commit))
            return killer_of(env, overlay.path, known)
        finally:
            slots.put(overlay)

    # Two that write to one repository may get in each other's way.
    git = threading.Lock()

    def one(number: int) -> Verdict:
        with git:
            found = mutants.without(tree, release, number)
        if names[number][:4] in excuses.unit_tests:
            killer = mutants.failing_unit_test(tree, release, env, found)
        else:
            try:
                killer = laws(found)
            except Broken:
                # What builds on it applies, yet does not run without it.
                with git:
                    found = mutants.below(tree, release, number)
                killer = laws(found)
        also = ", ".join(name[:4] for name in found.dropped)
        return Verdict(
            f"without {names[number]}" + (f" (and {also})" if also else ""),
            killer,
            excuses.survivors.get(f"without {names[number][:4]}"),
        )

    with ThreadPoolExecutor(jobs) as pool:
        try:
            verdicts = []
            with tqdm(total=len(numbers), unit=" patches", disable=None) as bar:
                for verdict in pool.map(one, numbers):
                    bar.update()
                    bar.write(str(verdict))
                    verdicts.append(verdict)
            return verdicts
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def faults(verdicts: list[Verdict], excuses: Excuses, known_patches: set[str]):
    """What is wrong with the list and with ``mutants.toml``, in words."""
    for v in verdicts:
        if not v.killer and not v.excuse:
            yield f"no law notices {v.name}"
        if v.killer and v.excuse:
            yield f"mutants.toml excuses {v.name}, which is killed"
    names = {v.name for v in verdicts} | {f"without {n}" for n in known_patches}
    for name in sorted(excuses.survivors.keys() - names):
        yield f"mutants.toml excuses {name}, which is no mutant"
    for number in sorted(excuses.unit_tests.keys() - known_patches):
        yield f"mutants.toml names {number}, which is no patch"


def write(release: Release, verdicts: list[Verdict]) -> Path:
    """Write the list to the series' folder."""
    path = release.folder / "mutants.json"
    found = {
        "killed": {v.name: v.killer for v in verdicts if v.killer},
        "excused": {v.name: v.excuse for v in verdicts if v.excuse and not v.killer},
        "survived": [v.name for v in verdicts if not v.excuse and not v.killer],
    }
    replace(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", help="One release; default: all supported.")
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
@click.option("--only", default="", help="Only mutants whose name holds this.")
def cli(release, jobs, only) -> None:
    """Plant, judge, list."""
    env = unit_env.ensure()
    bad = 0
    for each in releases.chosen(release):
        began = time.monotonic()
        excuses = mutants.excuses(each)
        verdicts, known = code_verdicts(each, env, excuses, jobs, only)
        click.echo(
            f"vLLM {each.version}; {len(known)} findings on the patched tree itself "
            "kill nothing"
        )
        for verdict in verdicts:
            click.echo(str(verdict))
        verdicts += patch_verdicts(each, env, excuses, jobs, only, known)
        wrong = []
        if not only:
            numbers = {p.name[:4] for p in series.read_series(each).patches}
            wrong = list(faults(verdicts, excuses, numbers))
            click.echo(f"written to {shown(write(each, verdicts))}")
        survived = [v for v in verdicts if not v.killer and not v.excuse]
        for words in wrong:
            click.echo(f"FAULT {words}")
        click.echo(
            f"vLLM {each.version}: {sum(bool(v.killer) for v in verdicts)} of "
            f"{len(verdicts)} killed, {len(survived)} survived, "
            f"{(time.monotonic() - began) / 60:.1f} min"
        )
        bad += len(wrong) + len(survived)
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
