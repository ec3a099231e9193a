# SPDX-License-Identifier: Apache-2.0
"""The fixed scenarios: one function per way in which a later request resumes.

Each returns a history and the sends that a law speaks of. `findings` plays one with
sparse and with dense retention and says where sparse hits less than it should.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .geometry import Geometry
from .history import Event, Setup, play

TIERS = ("gpu", "host")


@dataclass(frozen=True)
class Scenario:
    """A history, and which of its sends have to hit what dense retention hits."""

    name: str
    history: tuple[Event, ...]
    judged: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """A send that hits less with sparse retention than the law asks for."""

    scenario: str
    geometry: str
    retention: int
    tier: str
    send: int
    hit: int
    want: int

    def __str__(self) -> str:
        return (
            f"{self.geometry}, retention {self.retention}, {self.tier}: "
            f"{self.scenario}: send {self.send} hits {self.hit} of {self.want}"
        )


def replay(length: int) -> Scenario:
    """The same prompt twice."""
    send = Event("send", ((1, length),))
    return Scenario(f"replay of {length}", (send, send), (1,))


def extension(length: int, suffix: int) -> Scenario:
    """A prompt, then the same with more behind it."""
    return Scenario(
        f"{length} extended by {suffix}",
        (Event("send", ((1, length),)), Event("send", ((1, length), (2, suffix)))),
        (1,),
    )


def edit_near_end(length: int, edited: int) -> Scenario:
    """A prompt, then the same with its last `edited` tokens changed."""
    return Scenario(
        f"last {edited} of {length} edited",
        (
            Event("send", ((1, length),)),
            Event("send", ((1, length - edited), (2, edited))),
        ),
        (1,),
    )


def siblings(shared: int, own: int, count: int = 4) -> Scenario:
    """Prompts that share a prefix; from the third on nothing is news."""
    return Scenario(
        f"{count} siblings of {shared} + {own}",
        tuple(Event("send", ((1, shared), (2 + i, own))) for i in range(count)),
        tuple(range(2, count)),
    )


def conversation(length: int, turn: int, decoded: int, turns: int = 3) -> Scenario:
    """Turns that each repeat the last one's prompt and output.

    Nothing is judged against dense: see laws.py for what a turn must hit.
    """
    first = Event("send", ((1, length),), max_tokens=decoded)
    more = tuple(
        Event("send", ((2 + i, turn),), follows=i, max_tokens=decoded)
        for i in range(turns - 1)
    )
    return Scenario(f"{turns} turns of {length} + {turn}", (first, *more), ())


def fixed(geometry: Geometry) -> list[Scenario]:
    """The scenarios every release is held to, at lengths around the alignment."""
    a = geometry.gpu_alignment
    base = 16 * a
    return [
        *(replay(base + d) for d in (-1, 0, 1, a // 4, a // 2, a - 1)),
        *(extension(base + d, a) for d in (0, 1, a // 2)),
        *(edit_near_end(base + d, 5) for d in (4, 14, a // 2)),
        siblings(base + a // 3, 3 * a),
        siblings(base, 3 * a),
    ]


def hits(scenario: Scenario, setup: Setup) -> list[int]:
    """Tokens hit by each send of a scenario."""
    return [sent.hit for sent in play(setup.engine(), scenario.history, setup.tier)]


def findings(
    scenario: Scenario,
    geometry: Geometry,
    retentions: tuple[int, ...] = (0, 4096),
    tiers: tuple[str, ...] = TIERS,
    blocks_per_chunk: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Finding]:
    """Compare sparse with dense retention on the tree in use."""
    for tier in tiers:
        dense = Setup(geometry, None, tier, blocks_per_chunk)
        reference = hits(scenario, dense)
        for retention in retentions:
            setup = Setup(geometry, retention, tier, blocks_per_chunk)
            got = hits(scenario, setup)
            report(
                f"{geometry.name:14} {tier:4} {retention:5} {scenario.name}: "
                f"{got}, dense {reference}"
            )
            if retention and tier == "host" and scenario.name.startswith("last "):
                # Keeping that position in the host costs more than it brings.
                continue
            for send in scenario.judged:
                want = reference[send] // setup.alignment * setup.alignment
                if got[send] < want:
                    yield Finding(
                        scenario.name,
                        geometry.name,
                        retention,
                        tier,
                        send,
                        got[send],
                        want,
                    )
