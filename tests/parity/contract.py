# SPDX-License-Identifier: Apache-2.0
"""Plays cases on the vLLM tree in use and judges the laws L1 to L8 (see laws.py)."""

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from . import limits, release_adapter
from .engine import Engine
from .history import Case, Event, Sent, Setup, play
from .laws import Demand, Laws, computed, positions, tail, unpeeked
from .prompts import prompt

_PROBE_SEED = 1_000_000


@dataclass
class Verdict:
    """What one law says of one case.

    Attributes:
        words: what is wrong; empty if nothing.
        hits, stored: of each send, in tokens and in host chunks.
        more: "checks", how often the law was asked; "limited", how often it was broken
            where that is known (see limits.py); and what only some laws tell.
    """

    law: str
    case: Case
    words: list[str] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the law holds."""
        return not self.words

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data; `case` is the case's name and digest."""
        setup = self.case.setup
        return {
            "release": release_adapter.version(),
            "law": self.law,
            "case": f"{self.case.name} [{self.case.digest}]",
            "geometry": setup.geometry.name,
            "retention": setup.retention,
            "tier": setup.tier,
            "ok": self.ok,
            "words": self.words,
            "hits": self.hits,
            "stored": self.stored,
            **self.more,
        }


def judge(case: Case, ledger: bool = True, useful: bool = False) -> list[Verdict]:
    """Every law that speaks of a case.

    Args:
        case: what to play.
        ledger: keep the books where room is ample, too (crowded cases always do).
        useful: ask L7 as well, which sends a prompt per chunk stored.
    """
    if case.mode == "crowded":
        verdicts = [_judge_crowded(case)]
    elif case.mode == "mixed":
        verdicts = _judge_mixed(case, ledger)
    else:
        verdicts = _judge_hits(case, ledger)
        if useful and case.setup.tier == "host" and case.setup.retention is not None:
            verdicts.append(_judge_useful(case))
    for verdict in verdicts:
        limit = limits.of(release_adapter.version(), verdict.law, case.setup)
        if limit is not None and verdict.words:
            verdict.more["limited"] = {str(limit): len(verdict.words)}
            verdict.words = []
    return verdicts


def figures(case: Case) -> dict[str, Any]:
    """Hits of each send, which L6 compares with another tree's."""
    engine = case.setup.engine(accept=_accept(case.delays))
    sent, words = _outcome(engine, case, case.setup)
    return {
        "hits": [s.hit for s in sent],
        "local": [s.local for s in sent],
        "priced": _is_priced(case.setup),
        "words": words,
    }


def _is_priced(setup: Setup) -> bool:
    """Whether the tier keeps with sparse retention what dense retention keeps."""
    return (
        setup.tier != "gpu"
        and setup.retention is not None
        and not release_adapter.store_heeds_retention()
    )


# --- playing ---


def _accept(seed: int) -> Callable[[], int]:
    """How many of the next drafts are right; the same numbers for the same seed."""
    draw = random.Random(f"drafts {seed}")
    return lambda: draw.choice((0, 1, 2))


def _outcome(
    engine: Engine,
    case: Case,
    setup: Setup,
    history: tuple[Event, ...] | None = None,
    after: Callable[[Sent], None] = lambda sent: None,
) -> tuple[list[Sent], list[str]]:
    """The sends up to where vLLM broke, if it did, and what is wrong."""
    sent: list[Sent] = []

    def note(one: Sent) -> None:
        sent.append(one)
        after(one)

    words = []
    try:
        play(engine, case.history if history is None else history, setup.tier, note)
        if engine.ledger is not None:
            engine.check_at_rest()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = where.filename.rsplit("/", 1)[-1]
        words.append(f"{type(error).__name__} in {file}:{where.name}: {error}")
    if engine.ledger is not None:
        words += engine.ledger.findings
    return sent, words


@lru_cache(maxsize=64)
def dense_run(
    setup: Setup, history: tuple[Event, ...], ledger: bool, delays: int
) -> tuple[list[Sent], list[str]]:
    """The same history with dense retention: what was sent, and what broke."""
    setup = replace(setup, retention=None)
    case = Case("dense", "hits", setup, history)
    engine = setup.engine(ledger=ledger, accept=_accept(delays))
    return _outcome(engine, case, setup)


def _marks(case: Case, ledger: bool) -> tuple[list[int], list[Sent], list[str]]:
    """What dense retention hits per send, its sends, and what broke.

    A host tier that is itself broken when dense must not set the mark: where both
    tiers count in the same steps the GPU's dense hit counts for the host as well.
    """
    setup = case.setup
    key = replace(setup, retention=None)
    dense, words = dense_run(key, case.history, ledger, case.delays)
    marks = [sent.hit for sent in dense]
    if setup.tier == "host" and setup.blocks_per_chunk == 1:
        gpu = replace(key, tier="gpu")
        other, _ = dense_run(gpu, case.history, False, case.delays)
        marks = [max(pair) for pair in zip(marks, (s.hit for s in other), strict=False)]
    return marks, dense, [f"dense: {x}" for x in words]


class _Stores:
    """Follows which chunks the host gains with each send.

    Where the GPU alone serves: which blocks its prefix cache gains.
    """

    def __init__(self, engine: Engine, case: Case) -> None:
        self._engine = engine
        self._setup = case.setup
        self._laws = {tier: Laws(case.setup) for tier in case.setup.tiers}
        self._resets = _resets(case)
        self._known: set[tuple[int, bytes]] = set()
        # Per send: its (group, chunk)s, how many are none of its own, and the tokens
        # shared with earlier texts it parted from.
        self.new: list[set[tuple[int, int]]] = []
        self.strange: list[int] = []
        self.shared: list[list[int]] = []

    def _held(self) -> set[tuple[int, bytes]]:
        parts = self._engine.parts
        if self._setup.tier == "gpu":
            return {(group, key) for _, group, key in parts.cached_blocks()}
        return {(group, key) for group, key, _, _ in parts.host_entries()}

    def _shown(self, hashes: Sequence[Any]) -> int:
        """Tokens of a text whose full attention the tier held before the send.

        Not all that was decoded is kept: up to 0.32 the GPU leaves out a block that the
        request's last step filled, and the host of 0.25.1 all that this step made.
        """
        parts = self._engine.parts
        shown = length = len(hashes) * parts.hash_block
        for index, group in enumerate(self._setup.geometry.groups):
            if group.kind == "full":
                size = self._setup.chunk(group)
                for i in range(length // size):
                    key = bytes(parts.last_hash(hashes, size, i))
                    if (index, key) not in self._known:
                        shown = min(shown, i * size)
                        break
        return shown

    def __call__(self, sent: Sent) -> None:
        for tier, laws in self._laws.items():
            if f"reset_{tier}" in self._resets[len(self.new)]:
                laws.forget()
        now = self._held()
        new = now - self._known
        own = []
        shared = {laws.shared(sent.tokens) for laws in self._laws.values()}
        if new:
            hashes = self._engine.parts.block_hashes(sent.text)
            shared.add(self._shown(hashes))
            # The GPU also serves the beginning of a block, under its last hash.
            places = {bytes(key): i for i, key in enumerate(hashes)}
            unit = self._engine.parts.hash_block
            sizes = [self._setup.chunk(g) for g in self._setup.geometry.groups]
            own = [
                (group, places[key] * unit // sizes[group])
                for group, key in new
                if key in places
            ]
        self._known = now
        self.new.append(set(own))
        self.strange.append(len(new) - len(own))
        self.shared.append([s for s in shared if 0 < s < len(sent.tokens)])
        for laws in self._laws.values():
            laws.add(sent)


# --- L1 to L4, and what is stored (L6) ---


def _judge_hits(case: Case, ledger: bool) -> list[Verdict]:
    setup = case.setup
    engine = setup.engine(ledger=ledger, accept=_accept(case.delays))
    stores = _Stores(engine, case)
    sent, words = _outcome(engine, case, setup, after=stores)
    marks, dense, dense_words = _marks(case, ledger)
    hits = [s.hit for s in sent]
    stored = [s.stored_chunks for s in sent]
    verdicts = {}

    def verdict(law: str) -> Verdict:
        new = Verdict(law, case, [], hits, stored, {"checks": 0})
        return verdicts.setdefault(law, new)

    owed: list[int | None] = []
    excused: list[int] = []
    for number, (one, law) in enumerate(
        _demands(case, sent, marks, [s.hit for s in dense])
    ):
        if law is None:
            owed.append(None)
            continue
        # What is known not to hold is not owed.
        limited = limits.of(release_adapter.version(), law.law, setup) is not None
        owed.append(None if law.excused or limited else law.hit)
        here = verdict(law.law)
        if law.excused:
            excused.append(number)
            here.more["excused"] = here.more.get("excused", 0) + 1
            continue
        here.more["checks"] += 1
        if one.hit < law.hit:
            here.words.append(
                f"send {number} of {len(one.tokens)} tokens hits {one.hit} of {law.hit}"
            )
    if ledger or words or dense_words:
        safe = verdict("L5")
        safe.more["checks"] = 1
        safe.words = words + dense_words
    here = verdict("L6")
    here.more |= {
        "checks": 1,
        "owed": owed,
        "excused": excused,
        "computed": [
            max((computed(one.tokens, s.text) for s in sent[:number]), default=0)
            for number, one in enumerate(sent)
        ],
        "unpeeked": [
            sorted(unpeeked(setup, one, sent[:number]))
            for number, one in enumerate(sent)
        ],
        "align": setup.alignment,
        "local": [s.local for s in sent],
        "least_load": setup.least_load,
        "astray": setup.geometry.name
        in limits.ASTRAY.get(release_adapter.version(), ()),
        "priced": _is_priced(setup),
    }
    if setup.retention is not None:
        here.words = list(_stored_for_nothing(setup, sent, stores))
    return list(verdicts.values())


def _demands(
    case: Case, sent: list[Sent], marks: list[int], dense: list[int]
) -> Iterator[tuple[Sent, Demand | None]]:
    """Each send and the law that speaks of it.

    A tier is asked for what it may remember. Where both serve and the GPU was emptied,
    the host alone remembers what came before.
    """
    tiers = case.setup.tiers
    laws = {tier: Laws(case.setup) for tier in tiers}
    resets = _resets(case)
    asked = dict.fromkeys(tiers, (marks, dense))
    if len(tiers) > 1 and any("reset_gpu" in kinds for kinds in resets):
        alone, _ = dense_run(
            replace(case.setup, tier="host", retention=None),
            case.history,
            False,
            case.delays,
        )
        asked["host"] = (
            [min(m, s.hit) for m, s in zip(marks, alone, strict=False)],
        ) * 2
    ends = [len(sent), *(len(hits) for pair in asked.values() for hits in pair)]
    for number, one in enumerate(sent[: min(ends)]):
        for tier in tiers:
            if f"reset_{tier}" in resets[number] or "reset_host" in resets[number]:
                laws[tier].forget()
        shared = {tier: each.shared(one.tokens) for tier, each in laws.items()}
        # A tier that forgot the text with the peek block cannot be asked for its hit.
        most = {
            tier: held
            if held == max(shared.values())
            else max(held - case.setup.largest_peek, 0)
            for tier, held in shared.items()
        }
        found = (
            laws[tier].demand(one.tokens, min(mark[number], most[tier]), own[number])
            for tier, (mark, own) in asked.items()
        )
        yield one, next((demand for demand in found if demand is not None), None)
        for each in laws.values():
            each.add(one)


def _resets(case: Case) -> list[set[str]]:
    """Which caches were emptied before each send, since the one before it."""
    resets: list[set[str]] = [set()]
    for event in case.history:
        if event.kind == "send":
            resets.append(set())
        else:
            resets[-1].add(event.kind)
    return resets


def _stored_for_nothing(
    setup: Setup, sent: list[Sent], stores: _Stores
) -> Iterator[str]:
    """Per send the chunks that belong to no named position."""
    what = "blocks" if setup.tier == "gpu" else "chunks"
    for number, (one, new) in enumerate(zip(sent, stores.new, strict=False)):
        if strange := stores.strange[number]:
            yield f"send {number} keeps {strange} {what} that are not of its text"
        named = positions(setup, one, stores.shared[number])
        allowed = set().union(*(tail(setup, place) for place in named))
        extra = sorted(
            (group, i)
            for group, i in new - allowed
            if setup.geometry.groups[group].kind != "full"
        )
        if extra:
            group, i = extra[0]
            end = (i + 1) * setup.chunk(setup.geometry.groups[group])
            yield (
                f"send {number} of {len(one.tokens)} tokens keeps {len(extra)} {what} "
                f"of no named position: group {group} up to token {end}, …"
            )


# --- L7 ---


def _judge_useful(case: Case) -> Verdict:
    """Drop each chunk of each tail that was kept, and send whom it is for."""
    setup = case.setup
    engine = setup.engine(accept=_accept(case.delays))
    stores = _Stores(engine, case)
    sent, words = _outcome(engine, case, setup, after=stores)
    verdict = Verdict(
        "L7", case, words, [s.hit for s in sent], [s.stored_chunks for s in sent]
    )
    exempt: Counter[str] = Counter()
    verdict.more = {"checks": 0, "exempt": exempt}
    if words:
        return verdict
    engine.set_host(store=False)
    full = {i for i, g in enumerate(setup.geometry.groups) if g.kind == "full"}
    for number, one in enumerate(sent):
        new = {chunk for chunk in stores.new[number] if chunk[0] not in full}
        exempt["full attention"] += len(stores.new[number]) - len(new)
        if not new:
            continue
        held = set(engine.host_keys(one.text))
        named = positions(setup, one, stores.shared[number])
        useful: set[tuple[int, int]] = set()
        for place, names in sorted(named.items()):
            wanted = tail(setup, place)
            if place + setup.peek > len(one.text) or (
                place + setup.peek > len(one.tokens)
                and not _peeks(setup, place) <= held
            ):
                # Kept before it is known whether decoded tokens complete the peek, and
                # whether that is stored: 0.25.1 never stores a drafter's last chunk
                # that was decoded. (Were it owed, dense retention would hit: L2.)
                if names & {"segment", "turn"}:
                    past = (wanted & new) - useful
                    exempt["past the last complete peek"] += len(past)
                    useful |= past
                continue
            if not wanted <= held or not wanted & new:
                continue
            useful |= wanted
            verdict.more["checks"] += 1
            what = (
                f"send {number} of {len(one.tokens)} tokens, "
                f"{' and '.join(sorted(names))} at {place}"
            )
            # One that parts right behind it; and the prompt, which may resume there.
            fresh = prompt(_PROBE_SEED, setup.alignment + setup.peek + 1)
            requests = [one.text[: place + setup.peek] + fresh]
            if "resend" in names:
                requests.append(one.tokens)
            try:
                words = list(_probe(engine, one, place, requests, wanted & new))
            except Exception as error:
                words = [f"{type(error).__name__}: {error}"]
                break
            finally:
                verdict.words += [f"{what}: {x}" for x in words]
        if useless := sorted(new - useful):
            group, i = useless[0]
            end = (i + 1) * setup.chunk(setup.geometry.groups[group])
            verdict.words.append(
                f"send {number} of {len(one.tokens)} tokens stores {len(useless)} "
                f"chunks of no complete tail: group {group} up to token {end}, …"
            )
    return verdict


def _peeks(setup: Setup, place: int) -> set[tuple[int, int]]:
    """(group, chunk) of what the drafter's groups match past a position."""
    groups = enumerate(setup.geometry.groups)
    return {(i, place // setup.chunk(g)) for i, g in groups if setup.drafts(i)}


def _probe(
    engine: Engine,
    sent: Sent,
    place: int,
    requests: list[list[int]],
    chunks: set[tuple[int, int]],
) -> Iterator[str]:
    """Whether a kept position serves, and no longer without any one of its chunks.

    `requests` are those that it is for; each chunk must count for one of them.
    """
    hashes = [engine.parts.block_hashes(tokens) for tokens in requests]

    def hits() -> list[int]:
        found = []
        for tokens, known in zip(requests, hashes, strict=True):
            engine.reset_gpu()
            found.append(engine.run(tokens, hashes=known).num_hit)
        return found

    base = hits()
    if max(base) < place:
        yield f"kept and serves nobody, {max(base)} tokens hit"
        return
    own = engine.parts.block_hashes(sent.text)
    idle = []
    for group, i in sorted(chunks):
        key = bytes(engine.parts.chunk_hash(own, group, i))
        restore = engine.parts.drop_host_chunk(group, key)
        if all(less >= full for less, full in zip(hits(), base, strict=True)):
            idle.append((group, i))
        restore()
    if idle:
        group, i = idle[0]
        yield (
            f"{max(base)} tokens hit without any one of {len(idle)} chunks, such as "
            f"chunk {i} of group {group}, too"
        )


# --- L8 ---


def _judge_mixed(case: Case, ledger: bool) -> list[Verdict]:
    """The last send with both tiers, with the GPU alone, with the host alone."""
    *before, last = case.history
    last_hits = {}
    words: list[str] = []
    for served, event in (("both", None), ("gpu", "host_off"), ("host", "reset_gpu")):
        history = (*before, *([Event(event)] if event else ()), last)
        engine = case.setup.engine(ledger=ledger, accept=_accept(case.delays))
        sent, wrong = _outcome(engine, case, case.setup, history)
        words += [f"{served}: {x}" for x in wrong]
        last_hits[served] = sent[-1].hit if sent else 0
        if served == "both":
            hits = [s.hit for s in sent]
            stored = [s.stored_chunks for s in sent]
    setup = case.setup
    ahead = last_hits["host"] - last_hits["gpu"]
    best = last_hits["host"] if ahead >= setup.least_load else last_hits["gpu"]
    want = best // setup.alignment * setup.alignment
    mixed = Verdict("L8", case, [], hits, stored, {"checks": 1, **last_hits})
    if last_hits["both"] < want and not words:
        mixed.words.append(
            f"the last send hits {last_hits['both']} of {want}: the GPU alone "
            f"{last_hits['gpu']}, the host alone {last_hits['host']}"
        )
    verdicts = [mixed]
    if ledger or words:
        verdicts.append(Verdict("L5", case, words, hits, stored, {"checks": 1}))
    return verdicts


# --- L5 ---


def _judge_crowded(case: Case) -> Verdict:
    delays = random.Random(f"delays {case.delays}")
    engine = case.setup.engine(
        ledger=True,
        transfer_delay=lambda: delays.choice((0, 0, 1, 3)),
        accept=_accept(case.delays),
    )
    sent, words = _outcome(engine, case, case.setup)
    return Verdict(
        "L5",
        case,
        words,
        [s.hit for s in sent],
        [s.stored_chunks for s in sent],
        {"checks": 1},
    )
