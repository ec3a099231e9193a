# SPDX-License-Identifier: Apache-2.0
"""Plant defects in the patched trees: each one must break a law.

Takes out each patch in turn and changes each comparison, sum and condition of the
functions that decide what is kept. Exit status 1 if one goes unnoticed that
patches/<release>/mutants.toml does not excuse.
"""

import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import click
from tqdm import tqdm

from offload_parity import build_tree, mutants, unit_env, upstream_tests
from offload_parity import cli as scripts
from offload_parity import patches as series
from offload_parity import release as releases
from offload_parity.mutants import Excuses, Mutant, Overlay
from offload_parity.release import Release
from offload_parity.simulation import Broken, Job, Runner, Tree
from offload_parity.unit_env import UnitEnv

# A mutant may compute for ever; this many times as long as the tree itself is enough.
_PATIENCE = 4
LAWS = ("laws", "--quick", "--jsonl")


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


class Judge:
    """Runs the laws on trees, and knows what they find on the patched tree itself."""

    def __init__(self, env: UnitEnv, tree: Path) -> None:
        self._env = env
        began = time.monotonic()
        (ended,) = Runner(env.python, 1, accepted=(0, 1), unit="case").run(
            [Job(Tree("patched", tree), LAWS)]
        )
        self.known = {self._words(r) for r in ended.records if not r["ok"]}
        self.seconds = time.monotonic() - began

    def _words(self, record: dict) -> str:
        where = f"{record['geometry']}, {record['retention']}, {record['tier']}"
        words = "; ".join(map(str, record["words"][:1]))
        return f"{record['law']} {where}: {record['case']}: {words}"

    def killer(self, tree: Path) -> str | None:
        """The first thing that the laws find on a mutant and not on the tree."""

        def new(record: dict) -> bool:
            return not record["ok"] and self._words(record) not in self.known

        runner = Runner(
            self._env.python, 1, accepted=(0, 1), show=False,
            until=new, timeout_s=_PATIENCE * self.seconds + 30,
        )  # fmt: skip
        (ended,) = runner.run([Job(Tree("mutant", tree), LAWS)])
        return next((self._words(r) for r in ended.records if new(r)), None)


def code_verdicts(
    release: Release, judge: Judge, excuses: Excuses, jobs: int, only: str
):
    """Judge every mutant of the deciding functions, several side by side."""
    tree = build_tree.ensure_patched(release)
    slots: queue.Queue[Overlay] = queue.Queue()
    for slot in range(jobs):
        slots.put(Overlay(mutants.overlay_root(release, slot), tree))

    def one(mutant: Mutant) -> Verdict:
        overlay = slots.get()
        try:
            overlay.plant(mutant)
            try:
                killer = judge.killer(overlay.path)
            except Broken as error:
                killer = error.why
            return Verdict(mutant.name, killer, excuses.survivors.get(mutant.name))
        finally:
            slots.put(overlay)

    work = [m for m in mutants.mutants(tree) if only in m.name]
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(work), unit=" mutants", disable=None) as bar,
    ):
        tasks = [pool.submit(one, mutant) for mutant in work]
        try:
            for task in as_completed(tasks):
                bar.update()
                bar.write(str(task.result()))
                yield task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def patch_verdicts(
    release: Release, judge: Judge, excuses: Excuses, env: UnitEnv, only: str
):
    """Judge the series without each of its patches."""
    tree = build_tree.repo(build_tree.ensure_patched(release))
    for number, patch in enumerate(series.read_series(release).patches):
        if only not in f"without {patch.name}":
            continue
        found = mutants.without(tree, release, number)
        if patch.name[:4] in excuses.unit_tests:
            killer = mutants.failing_unit_test(tree, release, env, found)
        else:
            try:
                killer = _killer_of(tree, judge, found)
            except Broken:
                # What builds on it applies, yet does not run without it.
                found = mutants.below(tree, release, number)
                killer = _killer_of(tree, judge, found)
        also = f" (and {', '.join(n[:4] for n in found.dropped)})"
        verdict = Verdict(
            f"without {patch.name}{also if found.dropped else ''}", killer
        )
        click.echo(str(verdict))
        yield verdict


def _killer_of(tree, judge: Judge, found: mutants.Without) -> str | None:
    with tree.worktree(found.commit) as work:
        return judge.killer(work.path)


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
        judge = Judge(env, build_tree.ensure_patched(each))
        click.echo(
            f"vLLM {each.version}: the laws take {judge.seconds:.0f} s; "
            f"{len(judge.known)} findings on the patched tree itself do not count"
        )
        verdicts = [
            *patch_verdicts(each, judge, excuses, env, only),
            *code_verdicts(each, judge, excuses, jobs, only),
        ]
        survived = [v for v in verdicts if not v.killer and not v.excuse]
        stale = [v for v in verdicts if v.killer and v.excuse]
        names = {v.name for v in verdicts}
        gone = set() if only else excuses.survivors.keys() - names
        for verdict in stale:
            click.echo(f"mutants.toml excuses {verdict.name}, which is killed")
        for name in sorted(gone):
            click.echo(f"mutants.toml excuses {name}, which is no mutant")
        click.echo(
            f"vLLM {each.version}: {sum(bool(v.killer) for v in verdicts)} of "
            f"{len(verdicts)} killed, {len(survived)} survived, "
            f"{(time.monotonic() - began) / 60:.1f} min"
        )
        bad += len(survived) + len(stale) + len(gone)
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
