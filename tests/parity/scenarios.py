# SPDX-License-Identifier: Apache-2.0
"""The fixed scenarios: one function per way in which a later request resumes.

Each returns a named history; `fixed` puts them on a geometry at lengths around its
alignment, as cases for contract.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .geometry import Geometry
from .history import Case, Event, Setup
from .release_adapter import supports


@dataclass(frozen=True)
class Scenario:
    """A named history."""

    name: str
    history: tuple[Event, ...]


def replay(length: int) -> Scenario:
    """The same prompt twice."""
    send = Event("send", ((1, length),))
    return Scenario(f"replay of {length}", (send, send))


def extension(length: int, suffix: int) -> Scenario:
    """A prompt, then the same with more behind it."""
    return Scenario(
        f"{length} extended by {suffix}",
        (Event("send", ((1, length),)), Event("send", ((1, length), (2, suffix)))),
    )


def edit_near_end(length: int, edited: int) -> Scenario:
    """A prompt, then the same with its last `edited` tokens changed."""
    return Scenario(
        f"last {edited} of {length} edited",
        (
            Event("send", ((1, length),)),
            Event("send", ((1, length - edited), (2, edited))),
        ),
    )


def edit_of_replay(length: int, edited: int) -> Scenario:
    """A prompt sent three times, the last time with its end changed."""
    first, last = edit_near_end(length, edited).history
    return Scenario(
        f"last {edited} of {length} edited after a replay", (first, first, last)
    )


def truncation(length: int, kept: int) -> Scenario:
    """A prompt, then its first `kept` tokens."""
    return Scenario(
        f"{length} cut to {kept}",
        (Event("send", ((1, length),)), Event("send", ((1, kept),))),
    )


def siblings(shared: int, own: int, count: int = 4) -> Scenario:
    """Prompts that share a prefix; from the third on nothing is news."""
    return Scenario(
        f"{count} siblings of {shared} + {own}",
        tuple(Event("send", ((1, shared), (2 + i, own))) for i in range(count)),
    )


def siblings_kept(shared: int, own: int, count: int = 4) -> Scenario:
    """Two siblings on the GPU together; it is emptied before each later one."""
    first = siblings(shared, own, count)
    later = [x for send in first.history[2:] for x in (Event("reset_gpu"), send)]
    return Scenario(f"{first.name}, two kept", (*first.history[:2], *later))


def edits_extended(length: int, edited: int, own: int) -> Scenario:
    """Longer prompts that part near a prompt's end; the second finds the host alone."""
    first = Event("send", ((1, length),))
    second, third = siblings(length - edited, own, 2).history
    return Scenario(
        f"{length} parted from by {own}, {edited} before its end, one kept",
        (first, second, Event("reset_gpu"), third),
    )


def siblings_of_two_lengths(shared: int, shorter: int, own: int) -> Scenario:
    """Siblings that part at one place, then siblings that part at an earlier one."""
    first = siblings(shared, own, 3)
    more = tuple(Event("send", ((1, shorter), (7 + i, own))) for i in range(2))
    return Scenario(f"{first.name}, 2 of {shorter}", (*first.history, *more))


def conversation(length: int, turn: int, decoded: int, turns: int = 3) -> Scenario:
    """Turns that each repeat the last one's prompt and output."""
    first = Event("send", ((1, length),), max_tokens=decoded)
    more = tuple(
        Event("send", ((2 + i, turn),), follows=i, max_tokens=decoded)
        for i in range(turns - 1)
    )
    return Scenario(f"{turns} turns of {length} + {turn}", (first, *more))


def room(geometry: Geometry, history: Sequence[Event], tier: str) -> dict[str, int]:
    """Engine options with which nothing that was sent has to make room.

    A pool costs time to build and to empty, so it is no larger than it need be.
    """
    lengths: list[int] = []
    for event in history:
        if event.kind == "send":
            before = 0 if event.follows is None else lengths[event.follows]
            length = before + sum(size for _, size in event.parts) + event.max_tokens
            lengths.append(length)
    # L7 sends what no history names, alone and little longer.
    longest = max(lengths, default=0) + 16 * geometry.gpu_alignment
    kept = [longest] if tier == "host" else lengths
    blocks, chunks = (
        sum(-(-n // g.block) + 4 for n in texts for g in geometry.groups)
        for texts in (kept, lengths)
    )
    return {"gpu_blocks": max(blocks, 2), "host_chunks": max(chunks, 1)}


def partly(length: int, kept: int, resumed: int) -> Scenario:
    """The host holds a prompt, the GPU its beginning, and more of it comes back."""
    return Scenario(
        f"{resumed} of {length}, {kept} on the GPU",
        (
            Event("send", ((1, length),)),
            Event("reset_gpu"),
            Event("send", ((1, kept), (2, kept // 2))),
            Event("send", ((1, resumed), (99, kept))),
        ),
    )


def sparse_interval(geometry: Geometry, blocks_per_chunk: int = 1) -> int:
    """A retention interval in tokens that short prompts reach."""
    return 8 * geometry.gpu_alignment * blocks_per_chunk


def retentions(geometry: Geometry, blocks_per_chunk: int = 1) -> list[int | None]:
    """The sparse retentions that the release takes; dense where it takes none."""
    sparse = (0, sparse_interval(geometry, blocks_per_chunk))
    return [r for r in sparse if supports(geometry, blocks_per_chunk, r)] or [None]


def _lengths(geometry: Geometry) -> tuple[int, int]:
    """The alignment and a length that is no multiple of the interval, in tokens."""
    return geometry.gpu_alignment, 11 * geometry.gpu_alignment


def useful(geometry: Geometry) -> Iterator[Scenario]:
    """The scenarios whose stored chunks are dropped one by one."""
    a, base = _lengths(geometry)
    yield replay(base + a // 2)
    yield extension(base, a)
    yield siblings(base + a // 3, 3 * a, 3)
    yield conversation(base + 1, a + 3, a // 2 + 3, 2)


def first(geometry: Geometry) -> Iterator[Scenario]:
    """Where one tier serves: lengths at which a boundary just counts, or does not."""
    a, base = _lengths(geometry)
    peek = geometry.peek
    for d in dict.fromkeys((0, -1, a - 1, peek)):
        yield replay(base + d)
    yield extension(base + a // 2, a)
    yield edit_near_end(base + a // 2, 5)
    yield siblings(base, 3 * a)
    if peek > 3:
        # They part in the peek block, with which the prompts end.
        yield siblings(base + 3, peek - 3)
    # What is their own ends with a block.
    yield siblings(base + 3, a - 3)


def further(geometry: Geometry) -> Iterator[Scenario]:
    """More scenarios in which one tier serves."""
    a, base = _lengths(geometry)
    yield replay(base + 1)
    yield extension(base + 1, a)
    for d in (4, 14):
        yield edit_near_end(base + d, 5)
    yield edit_of_replay(base + a // 2, 5)
    yield truncation(base, 5 * a + 3)
    yield siblings_of_two_lengths(base + 3, 5 * a + 1, a)


def together(geometry: Geometry) -> Iterator[Scenario]:
    """The scenarios in which both tiers serve."""
    a, base = _lengths(geometry)
    yield siblings_kept(base + a // 3, 3 * a)
    yield siblings_kept(base, 3 * a)
    yield edits_extended(base + a // 2, a // 2 + 5, 3 * a)


def mixed(geometry: Geometry) -> Iterator[Scenario]:
    """The scenarios in which a send is served by both tiers at once."""
    a, base = _lengths(geometry)
    yield partly(base, 9 * a, base)
    yield partly(base + a // 2, 5 * a + 3, base + a // 2)
    yield partly(base, 5 * a, 8 * a)


def crowds(geometry: Geometry) -> Iterator[Case]:
    """Fixed histories with too little room, aborts and resets."""
    a, base = _lengths(geometry)
    need = sum(-(-(base + a) // group.block) + 3 for group in geometry.groups)
    prompts = [((1, 5 * a), (2 + i, 6 * a)) for i in range(5)]
    many = tuple(Event("submit", parts, max_tokens=a) for parts in prompts)
    steps = Event("step", count=3)
    histories = {
        "preemption": (*many, Event("drain"), Event("reset_gpu"), *many),
        "aborts": (
            *many,
            Event("drain"),
            Event("reset_gpu"),
            *many,
            steps,
            *(x for i in (5, 8) for x in (Event("abort", count=i), steps)),
            *many,
            Event("step", count=1),
            *(Event("abort", count=i) for i in (10, 11, 13)),
        ),
        "resets": (
            *many,
            steps,
            Event("reset_gpu"),
            *many,
            Event("drain"),
            Event("reset_host"),
            *many,
            steps,
            # Twice, with jobs in flight.
            Event("reset_host"),
            Event("reset_host"),
            *many,
        ),
    }
    for name, history in histories.items():
        for asynchronous in (False, True):
            options = (
                ("gpu_blocks", int(need * 1.3) + 8),
                # All that is resumed is there, or the host is full.
                ("host_chunks", need // 3 if asynchronous else need * 3),
                ("max_num_batched_tokens", a * 3 + 5),
                ("async_scheduling", asynchronous),
                ("workers", 1 + asynchronous),
            )
            words = f"{name}, asynchronous" if asynchronous else name
            yield Case(words, "crowded", Setup(geometry, 0, options=options), history)


def fixed(
    geometry: Geometry, blocks_per_chunk: int = 1, some: bool = False
) -> Iterator[tuple[Case, bool]]:
    """The cases every release is held to, and whether L7 is asked.

    `some`: the few that ask every law. None if the release cannot serve the geometry.
    """
    factor = blocks_per_chunk
    if not supports(geometry, factor):
        return
    a, base = _lengths(geometry)
    intervals = retentions(geometry, factor)
    suffix = f", {factor} blocks per chunk" if factor > 1 else ""

    def case(
        scenario: Scenario, retention: int | None, tier: str, mode: str = "hits", **more
    ) -> Case:
        options = room(geometry, scenario.history, tier) | more
        setup = Setup(geometry, retention, tier, factor, tuple(options.items()))
        return Case(scenario.name + suffix, mode, setup, scenario.history)

    probed = list(useful(geometry))
    rest = [*first(geometry), *(() if some else further(geometry))]
    for scenario in (*probed, *rest):
        for retention in intervals:
            for tier in ("gpu", "host"):
                yield case(scenario, retention, tier), scenario in probed
    # Prefill in several steps, none of which ends where a tail does.
    budget = {"max_num_batched_tokens": 3 * a + 5}
    for scenario in (replay(base + a // 2), siblings(base + a // 3, 3 * a)):
        chunked = replace(scenario, name=f"{scenario.name}, chunked prefill")
        for tier in ("gpu", "host"):
            yield case(chunked, intervals[0], tier, **budget), False
    # Where decoded tokens are not stored nothing is kept for them to complete.
    prompts_only = replay(base + 1)
    prompts_only = replace(prompts_only, name=f"{prompts_only.name}, prompts only")
    yield case(prompts_only, intervals[0], "host", offload_prompt_only=True), True
    yield case(prompts_only, intervals[0], "both", offload_prompt_only=True), False
    for scenario in together(geometry):
        for retention in intervals:
            yield case(scenario, retention, "both"), False
    for scenario in list(mixed(geometry))[:: 2 if some else 1]:
        for retention in dict.fromkeys((*intervals, None)):
            yield case(scenario, retention, "both", "mixed"), False
