# SPDX-License-Identifier: Apache-2.0
"""Histories: what is sent to an engine and what happens to it, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from .engine import Engine
from .geometry import Geometry
from .prompts import prompt

Parts = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def _part(seed: int, length: int) -> tuple[int, ...]:
    return tuple(prompt(seed, length))


def tokens_of(parts: Parts) -> list[int]:
    """The prompt made of the first `length` tokens of each (seed, length)."""
    tokens: list[int] = []
    for seed, length in parts:
        tokens.extend(_part(seed, length))
    return tokens


def cut(parts: Parts, length: int) -> Parts:
    """The first `length` tokens of a prompt, as parts."""
    kept = []
    for seed, size in parts:
        if length <= 0:
            break
        kept.append((seed, min(size, length)))
        length -= size
    return tuple(kept)


@dataclass(frozen=True)
class Event:
    """One entry of a history.

    Attributes:
        kind: "send" and run to the end; "submit" without a step; "step" `count`
            times; "drain"; "abort" the request that was submitted `count`-th;
            "reset_gpu"; "reset_host".
        parts: the prompt of a send or submit.
        follows: send: the prompt begins with the prompt and the output of the
            `follows`-th send, and `parts` come after (a turn of a conversation).
        max_tokens: tokens to generate.
        count: see kind.
    """

    kind: Literal["send", "submit", "step", "drain", "abort", "reset_gpu", "reset_host"]
    parts: Parts = ()
    follows: int | None = None
    max_tokens: int = 1
    count: int = 0


@dataclass(frozen=True)
class Setup:
    """How an engine is built; `tier` says which tier may serve.

    "gpu": the host is off. "host": the GPU cache is emptied after each send.
    "both": as it comes.
    """

    geometry: Geometry
    retention: int | None
    tier: Literal["gpu", "host", "both"] = "both"
    blocks_per_chunk: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def engine(self, **more: Any) -> Engine:
        """Build it."""
        return Engine(
            self.geometry,
            self.retention,
            self.blocks_per_chunk,
            **dict(self.options),
            **more,
        )

    @property
    def alignment(self) -> int:
        """Tokens to which this tier's hits count; the coarser one of two tiers."""
        host = self.geometry.host_alignment(self.blocks_per_chunk)
        gpu = self.geometry.gpu_alignment
        return {"gpu": gpu, "host": host, "both": max(gpu, host)}[self.tier]


@dataclass
class Sent:
    """One send of a history and what it hit, in tokens."""

    tokens: list[int]
    hit: int
    stored_chunks: int
    output: list[int] = field(default_factory=list)


def play(engine: Engine, history: Sequence[Event], tier: str = "both") -> list[Sent]:
    """Play a history; returns its sends, in order."""
    if tier == "gpu":
        engine.set_host(lookup=False, store=False)
    sent: list[Sent] = []
    submitted: list[str] = []
    for event in history:
        match event.kind:
            case "send":
                tokens = tokens_of(event.parts)
                if event.follows is not None:
                    earlier = sent[event.follows]
                    tokens = earlier.tokens + earlier.output + tokens
                result = engine.run(tokens, event.max_tokens)
                sent.append(
                    Sent(tokens, result.num_hit, result.stored_chunks, result.output)
                )
                if tier == "host":
                    engine.reset_gpu()
            case "submit":
                tokens = tokens_of(event.parts)
                submitted.append(engine.submit(tokens, event.max_tokens))
            case "step":
                for _ in range(event.count):
                    engine.step()
            case "drain":
                engine.drain()
            case "abort":
                if event.count < len(submitted):
                    engine.abort(submitted[event.count])
            case "reset_gpu":
                engine.reset_gpu(running=True)
            case "reset_host":
                engine.reset_host()
    engine.drain()
    return sent
