# SPDX-License-Identifier: Apache-2.0
"""At which prompt lengths does a resend restore nothing from the host?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .meter import Meter, Seen
from .prompts import PromptMaker

# Prompts at which the alignment of hits is measured, anywhere in their blocks.
_SAMPLES = (1537, 1811, 2203, 2657, 3119)
_POINTS = 32
_BATCH = 8
_CANARIES = 10


@dataclass(frozen=True)
class Point:
    """A length, and what the resend found.

    Attributes:
        length: input tokens.
        seen: of the resend.
        short: what a shorter prompt hits and this one does not, in tokens; 0 if it hits
            as much as it should.
    """

    length: int
    seen: Seen
    short: int = 0

    def row(self) -> dict[str, Any]:
        """As a table shows it."""
        return {
            "tokens": self.length,
            "host": self.seen.host,
            "gpu": self.seen.gpu,
            "tier": self.seen.tier,
            "short_by": self.short,
            "affected": bool(self.short),
            "seconds": round(self.seen.seconds, 3),
        }


def alignment(
    meter: Meter,
    maker: PromptMaker,
    seed: object,
    note: Callable[[str], None] = lambda _: None,
) -> int:
    """The tokens that hits are multiples of, measured on the GPU side.

    Raises:
        UserError: no resend hits the GPU.
    """
    hits = set()
    for length in _SAMPLES:
        note(f"measuring the alignment with {length} tokens")
        content = maker.prompt(length, f"{seed} alignment {length}")
        meter.send(content, length)
        hits.add(meter.send(content, length).gpu)
    hits.discard(0)
    if not hits:
        raise UserError(
            f"{meter.server.url}: prompts that were just sent hit nothing on the GPU: "
            "is prefix caching on?"
        )
    return math.gcd(*hits)


def lengths(
    align: int, around: int | None = None, step: int | None = None
) -> list[int]:
    """The lengths to try: one alignment block, with a boundary in its middle.

    Args:
        align: tokens to which hits are aligned.
        around: the boundary; by default an odd multiple of `align` past 2,048, where no
            retention interval but the alignment itself keeps anything.
        step: by default so that there are about 32, and the boundary's neighbours.
    """
    if around is None:
        multiple = -(-2048 // align)
        around = (multiple + 1 - multiple % 2) * align
    step = step or max(align // _POINTS, 1)
    first = max(around - align // 2, 2)
    found = set(range(first, first + align, step))
    return sorted(found | {around - 1, around, around + 1})


def judge(points: Sequence[Point]) -> list[Point]:
    """Mark the lengths at which less is restored than at a shorter one.

    What a prompt can restore never falls with its length: a boundary that a shorter
    one resumes at lies in it too. What was still on the GPU is not judged.
    """
    best = 0
    judged = []
    for point in sorted(points, key=lambda p: p.length):
        if point.seen.gpu:
            judged.append(point)
            continue
        best = max(best, point.seen.host)
        judged.append(Point(point.length, point.seen, best - point.seen.host))
    return judged


def run(
    meter: Meter,
    maker: PromptMaker,
    tried: Sequence[int],
    seed: object,
    done: Callable[[Point | None], None],
    filler: int,
    most_fillers: int,
    note: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Send prompts of all lengths, empty the GPU, and send them again.

    Args:
        meter, maker: of the server.
        tried: the lengths.
        seed: keeps runs apart.
        done: called after each request of a length, with what a resend showed.
        filler: tokens of a prompt that only pushes others out of the GPU.
        most_fillers: how many of them may be sent.
        note: called with what else goes on.

    Raises:
        UserError: the GPU side could not be emptied.
    """
    # Emptying is quick, so few prompts at a time: a small host tier keeps them.
    size = _BATCH if meter.empty_gpu() else len(tried)
    points = []
    for start in range(0, len(tried), size):
        batch = tried[start : start + size]
        contents = {n: maker.prompt(n, f"{seed} {n}") for n in batch}
        for length, content in contents.items():
            meter.send(content, length)
            done(None)
        if not meter.empty_gpu():
            _evict(meter, maker, seed, filler, most_fillers, note)
        # The newest first: what the host has no room for are the oldest.
        for length, content in reversed(contents.items()):
            points.append(Point(length, meter.send(content, length)))
            done(points[-1])
    return judge(points)


def _evict(
    meter: Meter,
    maker: PromptMaker,
    seed: object,
    filler: int,
    most: int,
    note: Callable[[str], None],
) -> None:
    """Push everything out of the GPU with other prompts.

    Canaries, sent after all that is to go, are looked at one by one, since a look
    brings a canary back: after 1, 2, 4, … fillers.
    """
    length = min(filler, max(_SAMPLES))
    canaries = [maker.prompt(length, f"{seed} canary {i}") for i in range(_CANARIES)]
    for content in canaries:
        meter.send(content, length)
    sent, next_look = 0, 1
    while sent < most:
        note(f"pushing out with {sent + 1} prompts")
        meter.send(maker.prompt(filler, f"{seed} filler {sent}"), filler)
        sent += 1
        if sent >= next_look and canaries:
            next_look *= 2
            if not meter.send(canaries.pop(), length).gpu:
                return
    raise UserError(
        f"{meter.server.url}: {sent} prompts of {filler:,} tokens did not push the "
        "others out of the GPU: raise --fillers, or start the server with "
        "VLLM_SERVER_DEV_MODE=1, where the probe can empty it"
    )


def _ranges(values: Sequence[int], tried: Sequence[int]) -> str:
    """Lengths as ranges of neighbours among those tried."""
    places = {n: i for i, n in enumerate(tried)}
    parts: list[list[int]] = []
    for value in values:
        if parts and places[value] == places[parts[-1][-1]] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)


def verdict(points: Sequence[Point]) -> tuple[str, list[str]]:
    """OK, AFFECTED or UNKNOWN, and what it rests on."""
    tried = [p.length for p in points]
    on_gpu = [p.length for p in points if p.seen.gpu]
    looked_at = [p for p in points if not p.seen.gpu]
    first = next((i for i, p in enumerate(looked_at) if p.seen.host), 0)
    judged = looked_at[first:]
    lines = []
    if on_gpu:
        lines.append(f"not judged, still on the GPU: {_ranges(on_gpu, tried)}")
    if first:
        lines.append(
            "not judged, no shorter length restored anything: "
            f"{_ranges([p.length for p in looked_at[:first]], tried)}"
        )
    if not judged:
        return "UNKNOWN", lines
    if not any(p.seen.host for p in judged):
        lines.append(
            f"a resend restores nothing at any of {len(judged)} lengths (a host tier "
            "that holds fewer prompts than were sent meanwhile would do so, too)"
        )
        return "AFFECTED", lines
    nothing = [p.length for p in judged if p.short and not p.seen.host]
    less = [p.length for p in judged if p.short and p.seen.host]
    if nothing:
        lines.append(
            f"a resend restores nothing, though shorter ones do, at "
            f"{len(nothing)} of {len(judged)} lengths: {_ranges(nothing, tried)}"
        )
    if less:
        lines.append(
            f"a resend restores less than shorter ones do at {len(less)} of "
            f"{len(judged)} lengths: {_ranges(less, tried)}"
        )
    if nothing or less:
        return "AFFECTED", lines
    if len({p.seen.host for p in judged}) < 2:
        lines.append(
            f"all {len(judged)} lengths restore the same, so no boundary lies among "
            "them: leave --align out, or choose another with --around"
        )
        return "UNKNOWN", lines
    lines.append(f"a resend restores what it should at all {len(judged)} lengths")
    return "OK", lines
