# SPDX-License-Identifier: Apache-2.0
"""Random histories from a printed seed.

"hits": requests one by one with room for all, sparse beside dense retention (laws L1
to L4). "safety": many at once, with little room, slow copies, aborts and resets; the
ledger and vLLM's own assertions judge. "async": the same with asynchronous scheduling.
All keep the ledger.
"""

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .engine import Engine
from .geometry import (
    EXAONE_FULL,
    EXAONE_SWA,
    GEMMA,
    GPT_OSS,
    PURE_SWA,
    SMALL,
    SMALL_NO_EAGLE,
    Geometry,
)
from .history import Event, Parts, Setup, cut, play
from .laws import Laws
from .release_adapter import supports_blocks_per_chunk

GEOMETRIES = (SMALL, SMALL_NO_EAGLE, EXAONE_SWA, EXAONE_FULL, GPT_OSS, PURE_SWA, GEMMA)
MODES = ("hits", "safety", "async")


@dataclass(frozen=True)
class Case:
    """One random history; the same mode, geometries and seed give the same case."""

    mode: str
    seed: int
    setup: Setup
    history: tuple[Event, ...]

    def describe(self) -> dict[str, Any]:
        """The case as plain data."""
        setup = asdict(self.setup)
        setup["geometry"] = self.setup.geometry.name
        return {
            "mode": self.mode,
            "seed": self.seed,
            "setup": setup,
            "history": [
                {k: v for k, v in asdict(event).items() if v != Event.__dict__.get(k)}
                for event in self.history
            ],
        }


def make(
    mode: str,
    seed: int,
    geometries: tuple[Geometry, ...] = GEOMETRIES,
    busy_resets: bool = False,
) -> Case:
    """Draw a case; with `busy_resets` the host is also reset under running requests."""
    # A string seeds the same in every process; hash() of a tuple would not.
    draw = random.Random(f"{mode} {seed}")
    geometry = draw.choice(geometries)
    factor = draw.choice((1, 1, 2, 4))
    if not supports_blocks_per_chunk(geometry, factor):
        factor = 1
    align = geometry.gpu_alignment
    # Retention has to be a multiple of every chunk as well.
    retention = draw.choice((0, 0, align * 4 * factor, align * 8 * factor))
    prompts = _Prompts(draw, align)
    budget = draw.choice((align * 3 + 5, 1024, 8192))
    if mode == "hits":
        setup = Setup(
            geometry,
            retention,
            draw.choice(("gpu", "host", "both")),
            factor,
            (("gpu_blocks", 6000), ("max_num_batched_tokens", budget)),
        )
        return Case(mode, seed, setup, _sequential(draw, prompts, decode=factor == 1))
    longest = prompts.longest + 40
    need = sum(-(-longest // group.block) + 3 for group in geometry.groups)
    setup = Setup(
        geometry,
        draw.choice((None, retention)),
        "both",
        factor,
        (
            ("gpu_blocks", int(need * draw.choice((1.0, 1.3, 2.0))) + 8),
            ("host_chunks", draw.choice((need // 4, need, need * 3)) + 4),
            ("max_num_batched_tokens", budget),
            ("async_scheduling", mode == "async"),
            ("offload_prompt_only", draw.random() < 0.5),
            ("workers", draw.choice((1, 1, 2))),
        ),
    )
    return Case(mode, seed, setup, _crowded(draw, prompts, busy_resets))


class _Prompts:
    """Draws prompts that have something to do with each other."""

    def __init__(self, draw: random.Random, align: int) -> None:
        self._draw = draw
        self._align = align
        self._seed = 100
        self.made: list[Parts] = []
        self.longest = align * 14

    def _new_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _length(self, most: int) -> int:
        """Near a multiple of the alignment, or anything."""
        most = max(most, 1)
        if self._draw.random() < 0.5:
            blocks = self._draw.randint(0, most // self._align)
            near = blocks * self._align + self._draw.randint(-3, 5)
            return min(max(near, 1), most)
        return self._draw.randint(1, most)

    def next(self) -> Parts:
        draw = self._draw
        kind = draw.choice(("new", "replay", "extend", "edit", "sibling", "truncate"))
        if kind == "new" or not self.made:
            parts: Parts = ((self._new_seed(), self._length(self.longest)),)
        else:
            parts = draw.choice(self.made)
            length = sum(size for _, size in parts)
            if kind == "extend":
                more = self._length(max(1, self.longest - length))
                parts = (*parts, (self._new_seed(), more))
            elif kind == "edit":
                edited = min(length, draw.randint(1, self._align))
                parts = (*cut(parts, length - edited), (self._new_seed(), edited))
            elif kind == "sibling":
                keep = self._length(length)
                own = self._length(max(1, self.longest - keep))
                parts = (*cut(parts, keep), (self._new_seed(), own))
            elif kind == "truncate":
                parts = cut(parts, self._length(length))
        parts = cut(parts, self.longest)
        self.made.append(parts)
        return parts


def _sequential(
    draw: random.Random, prompts: _Prompts, decode: bool
) -> tuple[Event, ...]:
    """Requests one by one.

    No decoding with chunks of several blocks: releases to 0.33.0 break there ("safety"
    shows it), and hits are what this is about.
    """
    history: list[Event] = []
    for sends in range(draw.randint(2, 9)):
        if sends and draw.random() < 0.15:
            history.append(Event("reset_gpu"))
        follows = None
        parts = prompts.next()
        if sends and draw.random() < 0.15:
            follows = draw.randrange(sends)
            parts = cut(parts, draw.randint(1, 90))
        tokens = draw.randint(2, 70) if decode and draw.random() < 0.2 else 1
        history.append(Event("send", parts, follows, tokens))
    return tuple(history)


def _crowded(
    draw: random.Random, prompts: _Prompts, busy_resets: bool
) -> tuple[Event, ...]:
    history: list[Event] = []
    submitted = 0
    for _ in range(draw.randint(3, 14)):
        kind = draw.choices(
            ("submit", "step", "drain", "abort", "reset_gpu", "reset_host"),
            (10, 6, 3, 2, 1, 1),
        )[0]
        if kind == "submit":
            history.append(
                Event(kind, prompts.next(), max_tokens=draw.choice((1, 2, 8, 40)))
            )
            submitted += 1
        elif kind == "step":
            history.append(Event(kind, count=draw.randint(1, 6)))
        elif kind == "abort":
            if submitted:
                history.append(Event(kind, count=draw.randrange(submitted)))
        else:
            if kind == "reset_host" and not busy_resets:
                history.append(Event("drain"))
            history.append(Event(kind))
    return tuple(history)


def check(case: Case) -> list[str]:
    """Play a case; returns what is wrong, in words."""
    return (_check_hits if case.mode == "hits" else _check_safety)(case)


def _play(
    engine: Engine, case: Case, setup: Setup
) -> tuple[list[Any] | None, list[str]]:
    """The sends, or None if vLLM itself broke, and what the ledger says."""
    try:
        sent = play(engine, case.history, setup.tier)
        engine.check_at_rest()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = where.filename.rsplit("/", 1)[-1]
        return None, [
            f"{type(error).__name__} in {file}:{where.name}: {error}",
            *engine.ledger.findings,
        ]
    return sent, list(engine.ledger.findings)


def _check_hits(case: Case) -> list[str]:
    setup = case.setup
    sparse, found = _play(setup.engine(ledger=True), case, setup)
    dense_setup = replace(setup, retention=None)
    dense, dense_found = _play(dense_setup.engine(ledger=True), case, dense_setup)
    found += [f"dense: {words}" for words in dense_found]
    if sparse is None or dense is None:
        return found
    laws = Laws(setup)
    number = -1
    for event in case.history:
        if event.kind == "reset_gpu" and setup.tier == "gpu":
            laws.forget()
        if event.kind != "send":
            continue
        number += 1
        mine, other = sparse[number], dense[number]
        verdict = laws.want(mine.tokens, other.hit)
        if verdict is not None and mine.hit < verdict[1]:
            found.append(
                f"{verdict[0]}: send {number} of {len(mine.tokens)} tokens hits "
                f"{mine.hit} of {verdict[1]} (dense {other.hit})"
            )
        laws.add(mine.tokens, mine.output)
    return found


def _check_safety(case: Case) -> list[str]:
    delays = random.Random(f"delays {case.seed}")
    engine = case.setup.engine(
        ledger=True, transfer_delay=lambda: delays.choice((0, 0, 1, 3))
    )
    return _play(engine, case, case.setup)[1]


def shrink(case: Case, seconds: float = 15) -> Case:
    """Leave out events while the case still finds something."""
    end = time.monotonic() + seconds
    shorter = True
    while shorter and time.monotonic() < end:
        shorter = False
        for i in reversed(range(len(case.history))):
            history = case.history[:i] + case.history[i + 1 :]
            sends = sum(event.kind == "send" for event in case.history[:i])
            if any((e.follows or 0) >= sends for e in history if e.follows is not None):
                continue
            smaller = replace(case, history=history)
            if check(smaller):
                case, shorter = smaller, True
                break
    return case


def run(
    seconds: float,
    seed: int,
    modes: tuple[str, ...] = MODES,
    geometries: tuple[Geometry, ...] = GEOMETRIES,
    most: int | None = None,
    busy_resets: bool = False,
    found: Callable[[Case, list[str]], bool] = lambda case, words: True,
) -> int:
    """Check cases from `seed` on until the time is over; returns how many.

    `found` is told of each failing case; it stops the run by returning False.
    """
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end and (most is None or done < most):
        case = make(modes[done % len(modes)], seed + done, geometries, busy_resets)
        words = check(case)
        done += 1
        if words and not found(case, words):
            break
    return done
