# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m parity …`` (``tests/parity``) on vLLM trees, side by side.

A subcommand that is run here prints one JSON object a line, as it goes:

    {"total": number}   how many records will follow, to show progress; optional
    anything else       a record

Its exit status says whether it found anything; what it writes on stderr counts as why
it broke. With status 2 it refuses what it was given; its last line says why.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tqdm import tqdm

from . import build_tree
from .errors import UserError
from .paths import ROOT, shown
from .release import Release
from .unit_env import UnitEnv

KINDS = ("stock", "patched")
_TESTS = ROOT / "tests"
# As click ends on a wrong option, and `python -m parity` on what it cannot play.
_REFUSED = 2


@dataclass(frozen=True)
class Tree:
    """A vLLM tree to run on; ``label`` is what records call it."""

    label: str
    path: Path


@dataclass(frozen=True)
class Job:
    """One process: a subcommand with its options, on one tree."""

    tree: Tree
    arguments: tuple[str, ...]


class Broken(UserError):
    """A run that did not end as it should; ``why`` is what it said last."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass
class Ended:
    """What a process printed, and its exit status."""

    job: Job
    records: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    status: int = 0


def trees_of(release: Release, kinds: Sequence[str] = KINDS) -> list[Tree]:
    """The built trees of a release, made first where they are missing.

    Raises:
        UserError: one of them cannot be built.
    """
    ensure = {
        "stock": build_tree.ensure_stock,
        "patched": build_tree.ensure_patched,
    }
    return [Tree(kind, ensure[kind](release)) for kind in kinds]


def check_tree(tree: Tree) -> None:
    """Refuse a folder that holds no vLLM.

    Raises:
        UserError: it holds none.
    """
    if not (tree.path / "vllm" / "__init__.py").exists():
        raise UserError(
            f"{tree.path} is no vLLM tree: name a folder that holds vllm/__init__.py"
        )


def variables(tree: Path, python: Path) -> dict[str, str]:
    """The environment of a run: figures depend on nothing of the user's.

    Bytecode stays out of the tree.
    """
    # The interpreter stands in <root>/bin.
    return UnitEnv(python.parent.parent).variables(tree, _TESTS) | {
        "PYTHONHASHSEED": "0",
    }


def start(
    tree: Path, python: Path, *arguments: str | Path, **more: Any
) -> subprocess.Popen[str]:
    """Start ``python -m parity …`` on a tree; ``more`` is for ``Popen``.

    It has a session of its own: what it starts ends with it (``kill``), and Ctrl-C on
    the terminal reaches this process alone.
    """
    return subprocess.Popen(
        [python, "-m", "parity", *arguments],
        cwd=ROOT,
        env=variables(tree, python),
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        **more,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """End what ``start`` started, and everything that it started itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_runners: WeakSet["Runner"] = WeakSet()


def stop_all() -> None:
    """End the processes of every runner; those in other threads return nothing."""
    for runner in list(_runners):
        runner.stop()


class Runner:
    """Runs jobs side by side with one progress bar; all end when one breaks.

    Args:
        python: an interpreter that has vLLM's requirements.
        jobs: processes at a time.
        accepted: the exit statuses of a run that did not break. Those of a subcommand
            that reports findings are 0 and 1.
        unit: what a record is called on the bar.
        show: whether there is a bar.
        timeout_s: a run that takes longer is broken.
    """

    def __init__(
        self,
        python: Path,
        jobs: int,
        *,
        accepted: Sequence[int] = (0,),
        unit: str = "record",
        show: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self._python = python
        self._jobs = jobs
        self._accepted = accepted
        self._unit = unit
        self._show = show
        self._timeout_s = timeout_s
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        _runners.add(self)

    def run(self, work: Sequence[Job]) -> list[Ended]:
        """Run them all; what each printed, in the order given.

        Raises:
            UserError: one broke; the message ends with what it said last.
        """
        with (
            # None: on a terminal only.
            tqdm(
                unit=f" {self._unit}s", disable=None if self._show else True, total=0
            ) as bar,
            ThreadPoolExecutor(self._jobs) as pool,
        ):
            tasks = [pool.submit(self._one, job, bar) for job in work]
            try:
                return [task.result() for task in tasks]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise

    def _one(self, job: Job, bar: tqdm) -> Ended:
        with self._lock:
            if self._stopped:
                return Ended(job)
            process = start(
                job.tree.path,
                self._python,
                *job.arguments,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._running.add(process)
        ended = Ended(job)
        complaints: list[str] = []
        timer = threading.Timer(self._timeout_s or 0, kill, [process])
        if self._timeout_s:
            timer.start()
        with process:
            reader = threading.Thread(target=lambda: complaints.extend(process.stderr))
            reader.start()
            for line in process.stdout:
                self._take(line, ended, bar)
            reader.join()
        late = self._timeout_s is not None and timer.finished.is_set()
        timer.cancel()
        with self._lock:
            self._running.discard(process)
        ended.status = process.returncode
        if late:
            self._break(job, f"it did not end in {self._timeout_s:.0f} s")
        # An uncaught exception ends with 1, as findings do.
        if ended.status not in self._accepted or any(
            line.startswith("Traceback ") for line in complaints
        ):
            last = next((x for x in reversed(complaints) if x.strip()), "no message")
            if ended.status == _REFUSED and last.startswith("Error: "):
                raise UserError(last.removeprefix("Error: ").strip())
            self._break(job, last.strip())
        return ended

    def _break(self, job: Job, why: str) -> None:
        if self._stopped:
            return
        raise Broken(
            f"the simulation broke on {shown(job.tree.path)}: {why}; try "
            f"`python -m parity {' '.join(job.arguments)}` with "
            f"PYTHONPATH={job.tree.path}:{_TESTS}",
            why,
        )

    def _take(self, line: str, ended: Ended, bar: tqdm) -> None:
        if not line.startswith("{"):
            ended.said.append(line.rstrip("\n"))
            return
        record = json.loads(line)
        with self._lock:
            if record.keys() == {"total"}:
                bar.total += record["total"]
                bar.refresh()
                return
            bar.update()
        ended.records.append({"tree": ended.job.tree.label, **record})

    def stop(self) -> None:
        """End its processes and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                kill(process)
