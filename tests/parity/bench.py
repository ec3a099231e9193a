# SPDX-License-Identifier: Apache-2.0
"""What the host tier costs: chunks stored per request, and time in vLLM's decisions.

All at DeepSeek-V4's shape. Times are those of the calls into vLLM's own functions, in
CPU seconds, so that other processes on the machine do not count; beside them stand
counts that do not vary at all.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import release_adapter
from .engine import Engine
from .geometry import DSV4, DSV4_NO_EAGLE
from .prompts import prompt

RETENTIONS: tuple[int | None, ...] = (None, 4096, 0)
# The prompts of the server scenario.
STORED_LENGTH = 49_004
TIMED_LENGTHS = (10_000, 50_000, 200_000, 1_000_000)
# Counts do not vary, so shorter prompts tell as much.
COUNTED_LENGTHS = (50_000, 200_000)
# Above it only the cases that cost in a way of their own, and once.
_LONG = 200_000
_SHORT_REPEATS = 3
# Where a sibling parts from the first prompt.
_SHARED = 0.4
_BUDGET = 8192


def stored() -> Iterator[dict[str, Any]]:
    """Chunks that one request of `STORED_LENGTH` tokens leaves in the host tier.

    `resent` are those that the same request adds when it is sent again.
    """
    tokens = prompt(1, STORED_LENGTH)
    for geometry in (DSV4, DSV4_NO_EAGLE):
        hashes = None
        for retention in RETENTIONS:
            blocks = _blocks(geometry, STORED_LENGTH)
            engine = Engine(geometry, retention, gpu_blocks=blocks, host_chunks=blocks)
            hashes = hashes or engine.parts.block_hashes(tokens)
            first = engine.run(tokens, hashes=hashes)
            engine.reset_gpu()
            again = engine.run(tokens, hashes=hashes)
            yield {
                "kind": "stored",
                "release": release_adapter.version(),
                "geometry": geometry.name,
                "retention": retention,
                "length": STORED_LENGTH,
                "chunks": first.stored_chunks,
                "resent": again.stored_chunks,
                "hit": again.num_external,
            }


def _blocks(geometry: Any, length: int) -> int:
    """GPU blocks of all groups that a prompt fills, and some to spare."""
    return sum(-(-(length + _BUDGET) // g.block) + 1 for g in geometry.groups) + 64


@dataclass
class Meter:
    """What the calls of one run cost.

    Attributes:
        seconds: CPU time per function.
        counts: per counted thing, how often.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added up."""
        self.seconds[name] = 0.0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began

        return wrapper

    def counted(
        self,
        name: str,
        function: Callable[..., Any],
        weight: Callable[[Any], int] = lambda _: 1,
    ) -> Callable[..., Any]:
        """The function, its calls added up, each with the weight of its result."""
        self.counts[name] = 0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.counts[name] += weight(result)
            return result

        return wrapper


def _mask_length(mask: Any) -> int:
    return 0 if mask is None else len(mask)


@contextmanager
def metered(parts: release_adapter.Parts, count: bool) -> Iterator[Meter]:
    """Time vLLM's decisions of one engine, or count what they look at.

    Counting slows what it counts, so the two are not done at once.
    """
    meter = Meter()
    undo: list[tuple[Any, str]] = []
    for name, (owner, attribute) in parts.decisions().items():
        if not count:
            setattr(owner, attribute, meter.timed(name, getattr(owner, attribute)))
            undo.append((owner, attribute))
    original = None
    if count:
        manager = parts.manager
        manager.lookup = meter.counted("host lookups", manager.lookup)
        undo.append((manager, "lookup"))
        kind = release_adapter.SlidingWindowManager
        original = vars(kind)["reachable_block_mask"]
        made = meter.counted("mask elements", kind.reachable_block_mask, _mask_length)
        kind.reachable_block_mask = staticmethod(made)
    try:
        yield meter
    finally:
        for owner, attribute in undo:
            # The class's own method shows again.
            delattr(owner, attribute)
        if original is not None:
            kind.reachable_block_mask = original


@dataclass(frozen=True)
class Send:
    """One timed request: its name, its tokens, and whether the GPU is emptied first."""

    case: str
    tokens: Sequence[int]
    hashes: Sequence[Any]
    empty_gpu: bool


class Prompts:
    """The prompts of all lengths and the hashes of their blocks, each made once."""

    def __init__(self, parts: release_adapter.Parts, longest: int) -> None:
        self._parts = parts
        self._tokens = prompt(1, longest)
        self._hashes = parts.block_hashes(self._tokens)
        self._siblings: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}

    def first(self, length: int) -> tuple[list[int], list[Any]]:
        """The first prompt."""
        return self._tokens[:length], self._hashes

    def sibling(self, length: int, number: int) -> tuple[list[int], list[Any]]:
        """One that parts from it."""
        key = length, number
        if key not in self._siblings:
            shared = int(length * _SHARED)
            tokens = self._tokens[:shared] + prompt(1 + number, length - shared)
            self._siblings[key] = tokens, self._parts.block_hashes(tokens)
        return self._siblings[key]

    def sends(self, length: int) -> Iterator[Send]:
        """What is sent, in order: who is first to part pays for the others."""
        yield Send("miss", *self.first(length), True)
        yield Send("sibling", *self.sibling(length, 1), True)
        if length <= _LONG:
            yield Send("later sibling", *self.sibling(length, 2), True)
        yield Send("hit", *self.first(length), True)
        yield Send("hit on the GPU", *self.first(length), False)
        if length <= _LONG:
            yield Send("sibling on the GPU", *self.sibling(length, 3), False)


def measured(
    lengths: Sequence[int], count: bool, retention: int
) -> Iterator[dict[str, Any]]:
    """One record per length, repetition and case.

    With `count` it holds counts, otherwise CPU seconds per decision.
    """
    blocks = _blocks(DSV4, max(lengths))
    engine = Engine(DSV4, retention, gpu_blocks=blocks, host_chunks=blocks)
    prompts = Prompts(engine.parts, max(lengths))
    # Or each collection would walk all that vLLM imports and every block.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    for length in lengths:
        short = length < _LONG and not count
        for _ in range(_SHORT_REPEATS if short else 1):
            for send in prompts.sends(length):
                meter, result = _measure(engine, send, count)
                yield {
                    "kind": "counted" if count else "timed",
                    "release": release_adapter.version(),
                    "retention": retention,
                    "length": length,
                    "case": send.case,
                    "local": result.num_local,
                    "external": result.num_external,
                    "figures": meter.counts if count else meter.seconds,
                }
            engine.reset_gpu()
            engine.reset_host()
    # Python takes long to end with a frozen heap.
    gc.unfreeze()


def _measure(engine: Engine, send: Send, count: bool) -> tuple[Meter, Any]:
    if send.empty_gpu:
        engine.reset_gpu()
    # A collection would hit one call or another.
    gc.collect()
    gc.disable()
    try:
        with metered(engine.parts, count) as meter:
            return meter, engine.run(send.tokens, hashes=send.hashes)
    finally:
        gc.enable()


def records(
    what: str, lengths: Sequence[int], retention: int
) -> Iterator[dict[str, Any]]:
    """What `python -m parity bench` prints."""
    if what == "stored":
        yield from stored()
    elif what == "counted":
        yield from measured(lengths or COUNTED_LENGTHS, True, retention)
    else:
        yield from measured(lengths or TIMED_LENGTHS, False, retention)
