# SPDX-License-Identifier: Apache-2.0
"""Histories: what is sent to an engine and what happens to it, as plain data."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from .engine import Engine
from .geometry import GEOMETRIES, Geometry, Group
from .prompts import prompt
from .release_adapter import drafters

Parts = tuple[tuple[int, int], ...]
Kind = Literal[
    "send",
    "submit",
    "step",
    "drain",
    "abort",
    "reset_gpu",
    "reset_host",
    "host_off",
    "host_on",
]
Tier = Literal["gpu", "host", "both"]
MODES = ("hits", "mixed", "crowded")


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
            "reset_gpu"; "reset_host"; "host_off" and "host_on", whether the host tier
            finds what it has.
        parts: the prompt of a send or submit.
        follows: send: the prompt begins with the prompt and the output of the
            `follows`-th send, and `parts` come after (a turn of a conversation).
        max_tokens: tokens to generate.
        count: see kind.
    """

    kind: Kind
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
    tier: Tier = "both"
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
    def tiers(self) -> tuple[str, ...]:
        """The tiers that may serve."""
        return ("gpu", "host") if self.tier == "both" else (self.tier,)

    @property
    def alignment(self) -> int:
        """Tokens to which this tier's hits count; the coarser one of two tiers."""
        gpu, host = self.geometry.gpu_alignment, self.host_alignment
        return {"gpu": gpu, "host": host, "both": max(gpu, host)}[self.tier]

    @property
    def host_alignment(self) -> int:
        """Tokens to which a host hit counts: the full-attention chunk."""
        return self.geometry.host_alignment(self.blocks_per_chunk)

    @property
    def peek(self) -> int:
        """Tokens that the tier's drafter groups match past a hit.

        Where both tiers serve, the host's.
        """
        return self._peek("gpu" if self.tier == "gpu" else "host")

    @property
    def largest_peek(self) -> int:
        """Tokens that the drafter groups of any tier in use match past a hit."""
        return max(map(self._peek, self.tiers))

    def _peek(self, tier: str) -> int:
        groups = self.geometry.groups
        block = max((groups[i].block for i in drafters(self.geometry)[tier]), default=0)
        return block * (1 if tier == "gpu" else self.blocks_per_chunk)

    def drafts(self, index: int) -> bool:
        """Whether a group matches one chunk past a hit, in the tier of `peek`."""
        tier = "gpu" if self.tier == "gpu" else "host"
        return index in drafters(self.geometry)[tier]

    def chunk(self, group: Group) -> int:
        """Tokens of a group's host chunk; of its block where the GPU alone serves."""
        return group.block * (1 if self.tier == "gpu" else self.blocks_per_chunk)

    @property
    def least_load(self) -> int:
        """Tokens that the host must hold past a hit on the GPU for a load to begin.

        A chunk of any group: vLLM skips less (`OffloadingConnectorScheduler`'s lookup;
        its `test_offloading_connector` asks for it).
        """
        return max(map(self.chunk, self.geometry.groups))


@dataclass(frozen=True)
class Case:
    """A history on an engine, and how it is judged (see contract.py).

    Attributes:
        name: says what the case is about; the same in every release.
        mode: "hits": requests one by one with room for all (L1 to L4, L6). "mixed":
            the last send is served by both tiers together (L8). "crowded": many at
            once with little room; the ledger and vLLM's assertions judge (L5).
        delays: seed of how many drafts are right, and, crowded only, of the steps
            that each copy takes.
    """

    name: str
    mode: Literal["hits", "mixed", "crowded"]
    setup: Setup
    history: tuple[Event, ...]
    delays: int = 0

    def to_json(self) -> dict[str, Any]:
        """The case as plain data, defaults left out."""
        setup = _plain(self.setup)
        setup["geometry"] = self.setup.geometry.name
        return _plain(self) | {
            "setup": setup,
            "history": [_plain(event) for event in self.history],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Case":
        """The case that `to_json` wrote.

        Raises:
            ValueError: it is none; the message says what is wrong with it.
        """
        try:
            setup = dict(data["setup"])
            name = setup.pop("geometry")
            if name not in GEOMETRIES:
                raise ValueError(f"no geometry is named {name!r}")
            geometry = GEOMETRIES[name]
            events = tuple(Event(**_tuples(event)) for event in data["history"])
            rest = {k: v for k, v in data.items() if k not in ("setup", "history")}
            case = cls(**rest, setup=Setup(geometry, **_tuples(setup)), history=events)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this is no case: {error!r}") from error
        for wrong in _wrong(case):
            raise ValueError(wrong)
        return case

    @property
    def digest(self) -> str:
        """Names the case by what is played, whatever it is called."""
        data = self.to_json() | {"name": ""}
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


# What stands beside them in `Setup`, or is not the case's to say, is none.
_ENGINE_OPTIONS = {
    name
    for name, parameter in inspect.signature(Engine).parameters.items()
    if isinstance(parameter.default, int)
} - {"blocks_per_chunk", "ledger", "force"}


def _wrong(case: Case) -> Iterator[str]:
    """What a case from a file says that cannot be played, in words."""
    setup = case.setup
    if case.mode not in MODES:
        yield f"no mode is named {case.mode!r}"
    if setup.tier not in get_args(Tier):
        yield f"no tier is named {setup.tier!r}"
    if not _is_number(case.delays):
        yield f"delays is {case.delays!r}, not a seed"
    if not _is_number(setup.blocks_per_chunk, 1):
        yield f"blocks_per_chunk is {setup.blocks_per_chunk!r}"
    elif setup.retention is not None and (
        not _is_number(setup.retention) or setup.retention % setup.host_alignment
    ):
        yield f"retention is {setup.retention!r}, not a number of whole chunks"
    for option in setup.options:
        match option:
            case (name, bool() | int() as value) if name in _ENGINE_OPTIONS:
                if value is not False and value < 1:
                    yield f"the engine's {name} is {value}"
            case _:
                yield f"no engine takes the option {option!r}"
    if not case.history:
        yield "its history is empty"
    sends = 0
    for event in case.history:
        if event.kind not in get_args(Kind):
            yield f"no event is named {event.kind!r}"
        prompt_parts = [p for p in event.parts if _is_part(p)]
        asks = event.kind in ("send", "submit")
        if len(prompt_parts) < len(event.parts) or (asks and not event.parts):
            yield f"{event.parts!r} are no parts of a prompt: [seed, length], …"
        if not (event.follows is None or _is_number(event.follows, 0, sends - 1)):
            yield f"no earlier send is number {event.follows!r}"
        if not (_is_number(event.max_tokens, 1) and _is_number(event.count)):
            yield f"{event!r} has a number that is none"
        sends += event.kind == "send"


def _is_number(value: Any, least: int = 0, most: int = 2**31) -> bool:
    return type(value) is int and least <= value <= most


def _is_part(part: Any) -> bool:
    match part:
        case (seed, length):
            return _is_number(seed) and _is_number(length, 1)
    return False


def _plain(thing: Any) -> dict[str, Any]:
    return {
        f.name: value
        for f in fields(thing)
        if (value := getattr(thing, f.name)) != f.default or f.default is MISSING
    }


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    """The same with a tuple for each list, at any depth."""

    def turn(value: Any) -> Any:
        return tuple(map(turn, value)) if isinstance(value, list) else value

    return {key: turn(value) for key, value in data.items()}


@dataclass
class Sent:
    """One send of a history and what it hit, in tokens; `local`: on the GPU."""

    tokens: list[int]
    hit: int
    stored_chunks: int
    output: list[int] = field(default_factory=list)
    local: int = 0

    @property
    def text(self) -> list[int]:
        """The tokens that were computed: not the last one decoded."""
        return self.tokens + self.output[:-1]


def play(
    engine: Engine,
    history: Sequence[Event],
    tier: str = "both",
    after: Callable[[Sent], None] = lambda sent: None,
) -> list[Sent]:
    """Play a history; returns its sends, in order.

    `after` is called after each send, when all its transfers are done.
    """
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
                    Sent(
                        tokens,
                        result.num_hit,
                        result.stored_chunks,
                        result.output,
                        result.num_local,
                    )
                )
                after(sent[-1])
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
            case "host_off" | "host_on":
                engine.set_host(lookup=event.kind == "host_on")
    engine.drain()
    return sent
