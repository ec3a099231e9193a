# SPDX-License-Identifier: Apache-2.0
"""Prompts that share a prefix and part there: which of them first hits it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .meter import Meter, Seen
from .prompts import PromptMaker

KEPT, EVICTED = "GPU kept", "GPU emptied"


@dataclass(frozen=True)
class Sibling:
    """One of them.

    Attributes:
        mode: whether the GPU side was emptied after each.
        number: from 1.
        seen: what it found.
    """

    mode: str
    number: int
    seen: Seen

    def row(self) -> dict[str, Any]:
        """As a table shows it."""
        return {
            "mode": self.mode,
            "sibling": self.number,
            "tokens": self.seen.tokens,
            "cached": self.seen.cached,
            "gpu": self.seen.gpu,
            "host": self.seen.host,
            "tier": self.seen.tier,
            "seconds": round(self.seen.seconds, 3),
        }


def run(
    meter: Meter,
    maker: PromptMaker,
    prefix: int,
    own: int,
    siblings: int,
    seed: object,
    done: Callable[[Sibling], None],
) -> list[Sibling]:
    """Send the siblings with the GPU kept, and again with it emptied after each.

    The second round is left out where the server does not offer it.
    """
    found = []
    tokens = prefix + own
    for mode in (KEPT, EVICTED):
        if mode == EVICTED and not meter.empty_gpu():
            break
        for number in range(1, siblings + 1):
            content = maker.prompt(
                tokens, f"{seed} {mode} {number}", prefix, f"{seed} {mode}", mark=number
            )
            found.append(Sibling(mode, number, meter.send(content, tokens)))
            done(found[-1])
            if mode == EVICTED:
                meter.empty_gpu()
    return found


def words(found: list[Sibling], prefix: int) -> list[str]:
    """Per mode the first sibling that hits, from where, and how much."""
    lines = []
    for mode in dict.fromkeys(s.mode for s in found):
        of_mode = [s for s in found if s.mode == mode]
        best = max(s.seen.cached for s in of_mode)
        first = next((s for s in of_mode if s.seen.cached), None)
        if first is None:
            lines.append(
                f"{mode}: none of {len(of_mode)} siblings hits the shared {prefix:,} "
                "tokens"
            )
            continue
        line = (
            f"{mode}: sibling {first.number} is the first to hit, "
            f"{first.seen.cached:,} of {prefix:,} shared tokens from {first.seen.tier}"
        )
        if best > first.seen.cached:
            full = next(s for s in of_mode if s.seen.cached == best)
            line += (
                f"; sibling {full.number} the first to hit most, {best:,} from "
                f"{full.seen.tier}"
            )
        lines.append(line)
    if KEPT in {s.mode for s in found} and EVICTED not in {s.mode for s in found}:
        lines.append(
            "the host alone was not asked: the server is not in its development mode "
            "(VLLM_SERVER_DEV_MODE=1)"
        )
    return lines
