# SPDX-License-Identifier: Apache-2.0
"""Random cases, drawn and shrunk by Hypothesis.

A history is drawn as a list of small steps that refer to earlier ones by number, so
that leaving any of them out leaves a history.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from . import contract
from .geometry import (
    EXAONE_FULL,
    EXAONE_SWA,
    GEMMA,
    GLM,
    GPT_OSS,
    PURE_SWA,
    SMALL,
    SMALL_NO_EAGLE,
    SPREAD,
    STATES,
    Geometry,
)
from .history import MODES, Case, Event, Parts, Setup, cut
from .peer import Lost, Peer
from .release_adapter import supports
from .scenarios import retentions, room
from .stock import below_stock

# The first is what a failure is shrunk to, if it fails there as well.
GEOMETRIES = tuple(
    geometry
    for geometry in (
        SMALL_NO_EAGLE,
        SMALL,
        GPT_OSS,
        GLM,
        EXAONE_SWA,
        EXAONE_FULL,
        PURE_SWA,
        GEMMA,
        *SPREAD,
        *STATES,
    )
    if supports(geometry)
)
_MODE_WEIGHTS = {"hits": 3, "mixed": 1, "crowded": 2}
_LONGEST = 14  # alignment blocks
_ROUND = 200
_SHRINK_SECONDS = 45
_QUIET = {
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}


# --- what is drawn ---


@dataclass(frozen=True)
class _Step:
    """A step of a history, before it is known what the earlier steps are.

    `kind` is how a prompt is made, or an event's. `ref` picks an earlier prompt.
    """

    kind: str
    ref: int = 0
    length: int = 1
    own: int = 1
    max_tokens: int = 1


_PROMPTS = ("new", "replay", "extend", "edit", "sibling", "truncate", "turn")


@st.composite
def _lengths(draw: Any, align: int) -> int:
    """Near a multiple of the alignment, or anything."""
    if draw(st.booleans()):
        return draw(st.integers(1, _LONGEST * align))
    blocks = draw(st.integers(0, _LONGEST))
    return max(1, blocks * align + draw(st.integers(-3, 5)))


def _prompts(align: int, decoded: Sequence[int]) -> st.SearchStrategy[_Step]:
    return st.builds(
        _Step,
        kind=st.sampled_from(_PROMPTS),
        ref=st.integers(0, 7),
        length=_lengths(align),
        own=st.integers(1, align) | _lengths(align),
        max_tokens=st.sampled_from(decoded),
    )


class _Maker:
    """Turns steps into events."""

    def __init__(self, align: int) -> None:
        self._align = align
        self._longest = _LONGEST * align
        self._seed = 100
        self.made: list[Parts] = []
        self.sends = 0

    def prompt(self, step: _Step, kind: str) -> Event:
        """The event that sends or submits a step's prompt."""
        self._seed += 1
        own, follows = ((self._seed, step.own),), None
        how = step.kind if self.made else "new"
        parts: Parts = self.made[step.ref % len(self.made)] if self.made else ()
        size = sum(length for _, length in parts)
        keep = min(step.length, size)
        if how == "turn" and not (kind == "send" and self.sends):
            how = "extend"
        match how:
            case "new":
                parts = ((self._seed, step.length),)
            case "extend":
                parts = (*parts, *own)
            case "edit":
                edited = min(step.own, self._align, size)
                parts = (*cut(parts, size - edited), (self._seed, edited))
            case "sibling":
                parts = (*cut(parts, keep), *own)
            case "truncate":
                parts = cut(parts, keep)
            case "turn":
                parts, follows = cut(own, 2 * self._align), step.ref % self.sends
        parts = cut(parts, self._longest)
        if follows is None:
            self.made.append(parts)
        self.sends += kind == "send"
        return Event(kind, parts, follows, step.max_tokens)


def _setup(draw: Any, geometries: Sequence[Geometry]) -> Setup:
    geometry = draw(st.sampled_from(geometries))
    factor = draw(st.sampled_from([f for f in (1, 2, 4) if supports(geometry, f)]))
    retention = draw(st.sampled_from(retentions(geometry, factor)))
    return Setup(geometry, retention, "host", factor)


@st.composite
def _sequential(draw: Any, mode: str, geometries: Sequence[Geometry]) -> Case:
    """Requests one by one."""
    setup = _setup(draw, geometries)
    align = setup.geometry.gpu_alignment
    decoded = (1, 1, 1, 2, align + 3, 70)
    steps = _prompts(align, decoded)
    if mode == "hits":
        steps = st.one_of(*[steps] * 7, st.just(_Step("reset_gpu")))
    maker = _Maker(align)
    history = tuple(
        Event("reset_gpu") if step.kind == "reset_gpu" else maker.prompt(step, "send")
        for step in draw(st.lists(steps, min_size=2, max_size=9))
    )
    tier = draw(st.sampled_from(("host", "gpu", "both"))) if mode == "hits" else "both"
    if mode == "mixed" and history[-1].kind != "send":
        history += (Event("send", ((1, 1),)),)
    options = room(setup.geometry, history, tier)
    options["max_num_batched_tokens"] = draw(st.sampled_from((8192, 3 * align + 5)))
    if mode == "hits" and tier != "gpu":
        options["offload_prompt_only"] = draw(st.sampled_from((False, False, True)))
    if mode == "mixed":
        # Little more than the last and the longest send need.
        most = room(setup.geometry, history, "host")["gpu_blocks"]
        options["gpu_blocks"] = min(
            options["gpu_blocks"], most + draw(st.integers(0, most))
        )
    return Case(
        "random",
        mode,
        Setup(
            setup.geometry,
            setup.retention,
            tier,
            setup.blocks_per_chunk,
            tuple(options.items()),
        ),
        history,
        draw(st.integers(0, 99)),
    )


@st.composite
def _crowded(draw: Any, geometries: Sequence[Geometry]) -> Case:
    """Many requests at once, with little room."""
    setup = _setup(draw, geometries)
    align = setup.geometry.gpu_alignment
    steps = st.one_of(
        *[_prompts(align, (1, 2, 8, 40))] * 4,
        *[st.builds(_Step, kind=st.just("step"), length=st.integers(1, 6))] * 2,
        *[st.builds(_Step, kind=st.just("abort"), ref=st.integers(0, 13))],
        st.sampled_from([_Step("drain"), _Step("reset_gpu"), _Step("reset_host")]),
    )
    maker = _Maker(align)
    history: list[Event] = []
    for step in draw(st.lists(steps, min_size=3, max_size=14)):
        if step.kind in _PROMPTS:
            history.append(maker.prompt(step, "submit"))
        elif step.kind == "step":
            history.append(Event("step", count=step.length))
        elif step.kind == "abort":
            history.append(Event("abort", count=step.ref))
        else:
            history.append(Event(step.kind))
    longest = _LONGEST * align + 40
    need = sum(-(-longest // group.block) + 3 for group in setup.geometry.groups)
    options = {
        "gpu_blocks": int(need * draw(st.sampled_from((2.0, 1.3, 1.0)))) + 8,
        "host_chunks": draw(st.sampled_from((need * 3, need, need // 4))) + 4,
        "max_num_batched_tokens": draw(st.sampled_from((8192, 1024, 3 * align + 5))),
        "async_scheduling": draw(st.booleans()),
        "offload_prompt_only": draw(st.booleans()),
        "workers": draw(st.sampled_from((1, 1, 2))),
    }
    retention = draw(st.sampled_from((setup.retention, None)))
    return Case(
        "random",
        "crowded",
        Setup(
            setup.geometry,
            retention,
            "both",
            setup.blocks_per_chunk,
            tuple(options.items()),
        ),
        tuple(history),
        draw(st.integers(0, 99)),
    )


def cases(
    modes: Sequence[str] = MODES, geometries: Sequence[Geometry] = GEOMETRIES
) -> st.SearchStrategy[Case]:
    """Random cases of some modes."""
    kinds = {
        "hits": lambda: _sequential("hits", geometries),
        "mixed": lambda: _sequential("mixed", geometries),
        "crowded": lambda: _crowded(geometries),
    }
    weighted = [m for m in MODES if m in modes for _ in range(_MODE_WEIGHTS[m])]
    return st.sampled_from(weighted).flatmap(lambda mode: kinds[mode]())


def sample(
    count: int,
    seed: int,
    modes: Sequence[str] = MODES,
    geometries: Sequence[Geometry] = GEOMETRIES,
) -> list[Case]:
    """`count` cases; the same numbers give the same cases on any tree."""
    found: dict[str, Case] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count * 2, phases=[Phase.generate], **_QUIET)
    @hypothesis.given(cases(modes, geometries))
    def collect(case: Case) -> None:
        found.setdefault(case.digest, case)

    collect()
    # Hypothesis begins with the smallest.
    return list(found.values())[-count:]


# --- what is done with it ---


class _Found(Exception):
    """Tells Hypothesis that a case fails."""


@dataclass
class Failure:
    """A failing case, shrunk as far as the time allowed."""

    law: str
    case: Case
    words: list[str]


@dataclass
class Fuzz:
    """A run: what is played, until when, and who is told.

    Attributes:
        seconds: the time that it may take; shrinking a failure counts.
        seed: the first round's; each round of cases has the next one.
        peer: the stock tree to compare hits with, if any.
        progress: told of the histories played and the seconds left.
        done: histories played.
    """

    seconds: float
    seed: int
    modes: Sequence[str] = MODES
    geometries: Sequence[Geometry] = GEOMETRIES
    peer: Peer | None = None
    progress: Callable[[int, float], None] = lambda done, left: None
    done: int = 0
    _lost: Lost | None = None
    _words: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def check(self, case: Case) -> dict[str, list[str]]:
        """What is wrong with a case, by law."""
        asked = self.peer is not None and case.mode == "hits"
        if asked:
            self.peer.ask(case)
        found: dict[str, list[str]] = {}
        for verdict in contract.judge(case):
            words = list(verdict.words)
            if asked and verdict.law == "L6":
                words += below_stock(verdict.to_json(), self.peer.answer())
            if words:
                found.setdefault(verdict.law, []).extend(words)
        return found

    def run(self, found: Callable[[Failure], bool]) -> None:
        """Play random cases; `found` is told of each failure, and stops with False.

        Raises:
            Lost: the stock tree's process ended.
        """
        end = time.monotonic() + self.seconds
        number = self.seed
        known: set[tuple[str, str]] = set()
        while time.monotonic() < end:
            failure = self._round(number, end, known)
            number += 1
            if failure is not None:
                known.add((failure.law, failure.case.setup.geometry.name))
                if not found(failure):
                    return

    def _round(
        self, seed: int, end: float, known: set[tuple[str, str]]
    ) -> Failure | None:
        best: Failure | None = None
        until = end

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=_ROUND, phases=[Phase.generate, Phase.shrink], **_QUIET
        )
        @hypothesis.given(cases(self.modes, self.geometries))
        def play(case: Case) -> None:
            nonlocal best, until
            words = self._words.get(case.digest)
            if words is None:
                if self._lost or time.monotonic() > until:
                    return
                try:
                    words = self.check(case)
                except Lost as error:
                    # Hypothesis would take it for a failing case and shrink that.
                    self._lost = error
                    return
                self._words[case.digest] = words
                self.done += 1
                self.progress(self.done, end - time.monotonic())
            laws = [
                law
                for law in words
                if (law, case.setup.geometry.name) not in known
                and (best is None or law == best.law)
            ]
            if not laws:
                return
            if best is None:
                until = min(end, time.monotonic() + _SHRINK_SECONDS)
            failure = Failure(laws[0], case, words[laws[0]])
            if best is None or _size(case) <= _size(best.case):
                best = failure
            raise _Found(laws[0])

        self._words.clear()
        try:
            play()
        except (_Found, hypothesis.errors.Flaky):
            # Flaky: the time was over while it shrank.
            assert best is not None
        if best is None and self._lost:
            raise self._lost
        return best


def _size(case: Case) -> tuple[int, int]:
    tokens = sum(size for event in case.history for _, size in event.parts)
    return len(case.history), tokens
