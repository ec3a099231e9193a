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
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from offload_parity import build_tree, mutants, simulation, unit_env, upstream_tests
from offload_parity import cli as scripts
from offload_parity import patches as series
from offload_parity import release as releases
from offload_parity.files import lock, replace, writable
from offload_parity.mutants import Excuses, Overlay
from offload_parity.paths import build_root, shown
from offload_parity.release import Release
from offload_parity.simulation import Broken, Job, Runner, Tree
from offload_parity.unit_env import UnitEnv

# A tree without a patch may compute for ever; the laws take less than a minute.
_TIMEOUT_S = 600
_IN_PLACE = " (in the series up to it)"


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


def judged(
    env: UnitEnv, tree: Path, file: Path | None = None, jobs: int = 1, show: bool = True
) -> list[dict[str, Any]]:
    """The record on a tree itself and those on the mutants of a file.

    Raises:
        Broken: the simulation does not run there.
    """
    options = ("--jobs", str(jobs)) + (("--file", str(file)) if file else ())
    runner = Runner(
        env.python, 1, unit="mutant", show=show, timeout_s=None if file else _TIMEOUT_S
    )
    (ended,) = runner.run([Job(Tree("patched", tree), ("mutants", *options))])
    return ended.records


def code_verdicts(
    release: Release, env: UnitEnv, excuses: Excuses, jobs: int, only: str
) -> tuple[list[Verdict], set[str]]:
    """Judge every mutant of the deciding functions, in one process.

    Also returns what the laws find on the patched tree itself, which kills nothing.
    """
    tree = build_tree.ensure_patched(release)
    work = [m for m in mutants.mutants(tree) if only in m.name]
    folder = writable(build_root() / "reports" / release.version)
    file = folder / "mutants.jsonl"
    mutants.write(work, file)
    itself, *records = judged(env, tree, file, jobs)
    killers = {record["mutant"]: record["killer"] for record in records}
    return [
        Verdict(m.name, killers[m.name], excuses.survivors.get(m.name)) for m in work
    ], set(itself["known"])


class Patches:
    """Judges the series without each of its patches, a process each."""

    def __init__(self, release: Release, env: UnitEnv, jobs: int) -> None:
        path = build_tree.ensure_patched(release)
        self.names = [patch.name for patch in series.read_series(release).patches]
        self._release = release
        self._env = env
        self._tree = build_tree.repo(path)
        self._jobs = jobs
        self._slots: queue.Queue[Overlay] = queue.Queue()
        for slot in range(jobs):
            self._slots.put(Overlay(mutants.overlay_root(release, slot), path))
        # Two that write to one repository may get in each other's way.
        self._git = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def verdicts(
        self, excuses: Excuses, only: str, known: set[str]
    ) -> Iterator[Verdict]:
        """One after the other; ``known``: what the laws find on the patched tree."""

        def one(number: int) -> Verdict:
            name = f"without {self.names[number]}"
            if self.names[number][:4] in excuses.unit_tests:
                return Verdict(
                    name + _IN_PLACE,
                    mutants.failing_unit_test(
                        self._tree, self._release, self._env, number
                    ),
                )
            killer, how = self._killer(number, known)
            return Verdict(name + how, killer, excuses.survivors.get(name[:12]))

        chosen = [n for n, name in enumerate(self.names) if only in f"without {name}"]
        with (
            ThreadPoolExecutor(self._jobs) as pool,
            tqdm(total=len(chosen), unit=" patches", disable=None) as bar,
        ):
            try:
                for verdict in pool.map(one, chosen):
                    bar.update()
                    bar.write(str(verdict))
                    yield verdict
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # Else the other threads would finish what they are at, for minutes.
                simulation.stop_all()
                raise

    def _killer(self, number: int, known: set[str]) -> tuple[str | None, str]:
        """What notices that a patch is missing, and from what it is missing."""
        with self._git:
            found = mutants.without(self._tree, self._release, number)
        if not found.dropped:
            try:
                words = _first(self._findings(found.commit), known)
            except Broken:
                words = None
            else:
                if not (words and mutants.inconsistent(words)):
                    return words, ""
        # Later patches build on it: what it does in the series up to it counts.
        before, after = mutants.around(self._tree, number)
        return _first(self._findings(before), set(self._findings(after))), _IN_PLACE

    def _findings(self, commit: str) -> list[str]:
        """What the laws find there; asked for once, though two patches need it."""
        with self._locks[commit]:
            if commit not in self._found:
                with self._shown(commit) as tree:
                    itself, *_ = judged(self._env, tree, show=False)
                self._found[commit] = itself["known"]
            return self._found[commit]

    @contextmanager
    def _shown(self, commit: str) -> Iterator[Path]:
        overlay = self._slots.get()
        try:
            overlay.show(mutants.changed_files(self._tree, commit))
            yield overlay.path
        finally:
            self._slots.put(overlay)


def _first(findings: list[str], known: set[str]) -> str | None:
    return next((words for words in findings if words not in known), None)


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
        "series": series.series_digest(series.read_series(release)),
        "killed": {v.name: v.killer for v in verdicts if v.killer},
        "excused": {v.name: v.excuse for v in verdicts if v.excuse and not v.killer},
        "survived": [v.name for v in verdicts if not v.excuse and not v.killer],
    }
    replace(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", help="One release; default: the newest and the oldest.")
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
@click.option("--only", default="", help="Only mutants whose name holds this.")
def cli(release, jobs, only) -> None:
    """Plant, judge, list."""
    env = unit_env.ensure()
    bad = 0
    for each in releases.in_full(release):
        # Two runs would change each other's overlays.
        with lock(build_root() / f".vllm-{each.version}-mutants.lock"):
            bad += report(each, env, jobs, only)
    if bad:
        sys.exit(1)


def report(each: Release, env: UnitEnv, jobs: int, only: str) -> int:
    """One release's list on the screen and in its file; how much is wrong with it."""
    began = time.monotonic()
    excuses = mutants.excuses(each)
    if not only:
        writable(each.folder)
    verdicts, known = code_verdicts(each, env, excuses, jobs, only)
    click.echo(
        f"vLLM {each.version}; {len(known)} findings on the patched tree itself "
        "kill nothing"
    )
    for verdict in verdicts:
        click.echo(str(verdict))
    taken_out = Patches(each, env, jobs)
    verdicts += taken_out.verdicts(excuses, only, known)
    wrong = []
    if not only:
        numbers = {name[:4] for name in taken_out.names}
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
    return len(wrong) + len(survived)


if __name__ == "__main__":
    scripts.run(cli)
