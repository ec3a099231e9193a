# SPDX-License-Identifier: Apache-2.0
"""Judge changed functions (see scripts/mutants.py), each in a fork of this process.

vLLM is imported once, and what dense retention hits is known from the tree itself.
"""

import gc
import importlib
import inspect
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any

from . import contract
from .geometry import GPT_OSS, MAMBA, MAMBA_MTP, PURE_SWA, SMALL, SMALL_NO_EAGLE, SPREAD
from .history import Case, Event, Setup
from .plan import plan
from .scenarios import conversation, fixed, retentions, room

# Forked children share what is imported.
_FORK = multiprocessing.get_context("fork")
# A mutant may compute for ever; this many times as long as the tree itself is enough.
_PATIENCE = 4
_GRACE_S = 30


@dataclass(frozen=True)
class Mutant:
    """A function, by its file's path in the tree, and the file's changed source."""

    name: str
    path: str
    function: str
    source: str


def read(file: Path) -> list[Mutant]:
    """Mutants from a file that holds one JSON object a line."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Mutant(**json.loads(line)) for line in lines]


def plant(mutant: Mutant) -> None:
    """Give the function in use the code that it has in the changed source.

    Raises:
        LookupError: the source has no such function.
    """
    name = mutant.path.removesuffix(".py").replace("/", ".")
    target: Any = importlib.import_module(name)
    for part in mutant.function.split("."):
        target = getattr(target, part)
    module = compile(mutant.source, mutant.path, "exec")
    target = inspect.unwrap(target)
    # A method that was reached through its class is bound to it.
    target = getattr(target, "__func__", target)
    target.__code__ = _code(module, mutant.function)


def _code(outer: CodeType, function: str) -> CodeType:
    inner = [c for c in outer.co_consts if isinstance(c, CodeType)]
    for code in inner:
        if code.co_qualname == function:
            return code
        if function.startswith(f"{code.co_qualname}."):
            return _code(code, function)
    raise LookupError(f"no function {function}")


def _findings(case: Case, useful: bool) -> Iterator[str]:
    """What is wrong with a case, each as law, setup, case and words."""
    setup = case.setup
    where = f"{setup.geometry.name}, {setup.retention}, {setup.tier}: {case.name}"
    where += f" [{case.digest}]"
    try:
        for verdict in contract.judge(case, ledger=False, useful=useful):
            for words in verdict.words:
                yield f"{verdict.law} {where}: {words}"
    except Exception as error:
        yield f"L5 {where}: {type(error).__name__}: {error}"


def cases() -> list[tuple[Case, bool]]:
    """The quick cases, and those of what decides only there.

    Chunks of several blocks; Mamba groups, which keep fewest positions, so that each
    one counts; context parallelism; and `_special`.
    """
    more = ((SMALL, 2), (GPT_OSS, 2), (MAMBA, 1), (MAMBA_MTP, 1))
    more += tuple((geometry, 1) for geometry in SPREAD)
    return with_dense(
        plan(sample=10, quick=True)
        + [x for geometry, factor in more for x in fixed(geometry, factor, some=True)]
        + [(case, False) for case in _special()]
    )


def _special() -> Iterator[Case]:
    """A boundary that decoded tokens reach, and a GPU hit with part of a chunk."""
    a = SMALL_NO_EAGLE.gpu_alignment
    turns = conversation(11 * a - 1, a, a + 3, 2)
    for retention in retentions(SMALL_NO_EAGLE):
        options = tuple(room(SMALL_NO_EAGLE, turns.history, "gpu").items())
        setup = Setup(SMALL_NO_EAGLE, retention, "gpu", options=options)
        yield Case(turns.name, "hits", setup, turns.history)
    for length in (177, 193, 209):
        send = Event("send", ((1, length),))
        history = (send, Event("reset_host"), send, Event("reset_gpu"), send)
        for geometry in (GPT_OSS, PURE_SWA):
            options = tuple(room(geometry, history, "both").items())
            setup = Setup(geometry, 0, "both", 2, options)
            yield Case(
                f"host reset before replay of {length}", "crowded", setup, history
            )


def with_dense(cases: Sequence[tuple[Case, bool]]) -> list[tuple[Case, bool]]:
    """The cases, and the same with dense retention, which marks are taken from."""
    dense = {}
    for case, _ in cases:
        setup = replace(case.setup, retention=None)
        if case.mode == "hits" and setup != case.setup and setup.tier != "both":
            twin = replace(case, name=f"{case.name}, dense", setup=setup)
            dense[setup, case.history] = twin, False
    return [*cases, *dense.values()]


class Judge:
    """Plays cases on the tree itself, then on its mutants up to the first finding.

    Attributes:
        known: findings of the tree itself, which kill no mutant, as they came.
        seconds: how long the cases took on it.
    """

    def __init__(self, cases: Sequence[tuple[Case, bool]]) -> None:
        self._cases = cases
        # The tree itself sets the marks; and it is faster than to play them again.
        contract.dense_run = lru_cache(maxsize=None)(contract.dense_run.__wrapped__)
        self.known: dict[str, None] = {}
        took = []
        for case, useful in cases:
            began = time.monotonic()
            self.known.update(dict.fromkeys(_findings(case, useful)))
            took.append(time.monotonic() - began)
        self.seconds = sum(took)
        # The quick ones first; what killed a mutant goes before all.
        self._order = sorted(range(len(cases)), key=took.__getitem__)
        gc.collect()
        gc.freeze()

    def killer(self, mutant: Mutant) -> tuple[int | None, str | None]:
        """The first case that has a finding of its own, and that; plants for good."""
        plant(mutant)
        for index in self._order:
            for words in _findings(*self._cases[index]):
                if words not in self.known:
                    return index, words
        return None, None

    def killers(
        self, mutants: Iterable[Mutant], jobs: int
    ) -> Iterator[tuple[Mutant, str | None]]:
        """Every mutant with what kills it, `jobs` of them at a time."""
        waiting = iter(mutants)
        limit = _PATIENCE * self.seconds + _GRACE_S
        running: dict[Connection, tuple[Mutant, Any, float]] = {}
        while True:
            while len(running) < jobs and (mutant := next(waiting, None)):
                ours, theirs = _FORK.Pipe(duplex=False)
                child = _FORK.Process(target=self._child, args=(mutant, theirs))
                child.start()
                theirs.close()
                running[ours] = mutant, child, time.monotonic() + limit
            if not running:
                return
            for ready in wait(list(running), timeout=1):
                mutant, child, _ = running.pop(ready)
                try:
                    index, words = ready.recv()
                except EOFError:
                    child.join()
                    index, words = None, f"it ended with status {child.exitcode}"
                child.join()
                if index is not None:
                    self._order.remove(index)
                    self._order.insert(0, index)
                yield mutant, words
            for late in [c for c, r in running.items() if time.monotonic() > r[2]]:
                mutant, child, _ = running.pop(late)
                child.kill()
                child.join()
                yield mutant, f"it did not end in {limit:.0f} s"

    def _child(self, mutant: Mutant, answer: Connection) -> None:
        answer.send(self.killer(mutant))
