# SPDX-License-Identifier: Apache-2.0
"""Distinct prompts forward, then in reverse: what fits in which tier."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .counters import Difference
from .meter import BOTH, GPU, HOST, MISS, TIERS, Meter, Seen
from .prompts import PromptMaker


@dataclass(frozen=True)
class Request:
    """One request: which prompt, in which direction, and what it found."""

    direction: str
    index: int
    seen: Seen

    def row(self) -> dict[str, Any]:
        """As a table shows it."""
        seen = self.seen
        return {
            "direction": self.direction,
            "index": self.index,
            "tokens": seen.tokens,
            "cached": seen.cached,
            "gpu": seen.gpu,
            "host": seen.host,
            "tier": seen.tier,
            "seconds": round(seen.seconds, 3),
            "stored_bytes": seen.stored_bytes,
            "loaded_bytes": seen.loaded_bytes,
            "others": seen.others,
        }


def run(
    meter: Meter,
    maker: PromptMaker,
    tokens: int,
    prompts: int,
    seed: object,
    done: Callable[[Request], None],
) -> list[Request]:
    """Send `prompts` prompts of `tokens` tokens forward and in reverse."""
    order = [("forward", i) for i in range(prompts)]
    order += [("reverse", i) for i in reversed(range(prompts))]
    maker.check(maker.prompt(tokens, f"{seed} 0"), tokens)
    requests = []
    for direction, index in order:
        content = maker.prompt(tokens, f"{seed} {index}")
        requests.append(Request(direction, index, meter.send(content, tokens)))
        done(requests[-1])
    return requests


def _span(values: list[int]) -> str | int | None:
    if not values:
        return None
    low, high = min(values), max(values)
    return low if low == high else f"{low} to {high}"


def summary(requests: list[Request], total: Difference) -> dict[str, Any]:
    """What fits: counted where all prompts had been sent before.

    Args:
        requests: in the order in which they were sent.
        total: what the counters moved by meanwhile.
    """
    back = [r for r in requests if r.direction == "reverse"]
    tiers: dict[str, dict[str, Any]] = {}
    for tier in TIERS:
        seen = [r.seen for r in back if r.seen.tier == tier]
        tiers[tier] = {
            "requests": len(seen),
            "hit": _span([s.cached for s in seen]),
            "seconds": round(median(s.seconds for s in seen), 3) if seen else None,
        }
    everything = [r.seen for r in requests]
    missed = [s.seconds for s in everything if s.tier == MISS]
    hosted = [s.seconds for s in everything if s.tier == HOST]
    faster = median(missed) / median(hosted) if missed and hosted else None
    return {
        "tiers": tiers,
        "hits": sum(tiers[t]["requests"] for t in (GPU, BOTH, HOST)),
        "prompts": len(back),
        "host_over_miss": round(faster, 2) if faster else None,
        "stored_bytes": total.stored_bytes,
        "loaded_bytes": total.loaded_bytes,
    }


def words(found: dict[str, Any]) -> list[str]:
    """The summary as lines."""
    lines = []
    for tier, one in found["tiers"].items():
        if one["requests"]:
            hit = f", hit {one['hit']} tokens" if one["hit"] else ""
            lines.append(
                f"{tier:8} {one['requests']:4} of {found['prompts']}{hit}, median "
                f"{one['seconds']:.3f} s"
            )
    if found["host_over_miss"]:
        lines.append(
            f"a host hit is {found['host_over_miss']:g} times as fast as a miss"
        )
    lines.append(
        f"stored {found['stored_bytes'] / 1e9:.1f} GB, loaded "
        f"{found['loaded_bytes'] / 1e9:.1f} GB"
    )
    if found["stored_bytes"] and not found["loaded_bytes"]:
        lines.append(
            "the host tier was written and never read: see probe_boundaries.py"
        )
    return lines
