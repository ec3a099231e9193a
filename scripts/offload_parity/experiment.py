# SPDX-License-Identifier: Apache-2.0
"""All probes on simulated servers, stock beside patched, and the report of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import sim_server
from .probes import boundaries, gpu_cache, plots, prefix
from .probes.command import open_server
from .probes.counters import Difference
from .probes.meter import MISS, Meter
from .probes.server import Address
from .sim_server import Plan, Running


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        tokens, prompts: of probe_gpu_cache.
        prefix, own: tokens of probe_prefix.
        siblings: of probe_prefix.
        step: tokens between two lengths of probe_boundaries; None: its default.
    """

    tokens: int = 49_004
    prompts: int = 100
    prefix: int = 20_000
    own: int = 3_000
    siblings: int = 4
    step: int | None = None

    @property
    def sibling_tokens(self) -> int:
        """Tokens of one of the prompts that share a prefix."""
        return self.prefix + self.own

    def requests(self, align: int) -> int:
        """How many requests that is, to show progress."""
        lengths = len(boundaries.lengths(align, step=self.step))
        return 2 * (self.prompts + self.siblings + lengths)


@dataclass
class Found:
    """What one server showed."""

    plan: Plan
    facts: dict[str, Any]
    cache: list[gpu_cache.Request]
    total: Difference
    siblings: list[prefix.Sibling]
    points: list[boundaries.Point]
    pictures: list[Path] = field(default_factory=list)


def measure(
    plan: Plan,
    running: Running,
    size: Size,
    done: Callable[[], None],
) -> Found:
    """Run the probes on a server, the one that fills the host tier last."""
    meter, maker = open_server(Address(running.url))
    align = boundaries.alignment(meter, maker, "alignment")
    points = boundaries.run(
        meter,
        maker,
        boundaries.lengths(align, step=size.step),
        "boundaries",
        lambda _: done(),
        0,
        0,
    )
    siblings = prefix.run(
        meter, maker, size.prefix, size.own, size.siblings, "prefix", lambda _: done()
    )
    meter = Meter(meter.server)
    cache = gpu_cache.run(
        meter, maker, size.tokens, size.prompts, "cache", lambda _: done()
    )
    return Found(plan, running.facts, cache, meter.totals(), siblings, points)


def draw(found: Found, size: Size, folder: Path) -> None:
    """Draw the pictures of one server into `folder`."""
    plan = found.plan
    stem = f"experiment-{plan.version}-{plan.tree.label}-{retention(plan)}"
    title = f"vLLM {plan.version} {plan.tree.label}, retention {retention(plan)}"
    paths = [folder / f"{stem}-{n}.png" for n in ("cache", "prefix", "boundaries")]
    plots.gpu_cache(found.cache, title, paths[0])
    plots.prefix(found.siblings, size.prefix, title, paths[1])
    plots.boundaries(found.points, title, paths[2])
    found.pictures = paths


def retention(plan: Plan) -> str:
    """As a table says it."""
    return "default" if plan.retention is None else str(plan.retention)


@dataclass(frozen=True)
class Arithmetic:
    """What a prompt takes by the rules, and how many fit.

    Attributes:
        full: blocks of full attention.
        positions: boundaries whose tails are kept.
        tails: blocks of each window group's tail.
        block_bytes: of one rank.
        ranks: copies.
        fit: prompts in the host tier.
    """

    full: int
    positions: int
    tails: tuple[int, ...]
    block_bytes: int
    ranks: int
    fit: int

    @property
    def blocks(self) -> int:
        """Blocks per prompt and rank."""
        return self.full + self.positions * sum(self.tails)

    @property
    def bytes(self) -> int:
        """Bytes per prompt, of all ranks."""
        return self.blocks * self.block_bytes * self.ranks


def arithmetic(plan: Plan, facts: dict[str, Any], tokens: int) -> Arithmetic | None:
    """For retention every so many tokens; None otherwise.

    The positions kept are the multiples of the interval and the replay boundary, the
    last at which every drafter's group has a complete peek block.
    """
    if not isinstance(plan.retention, int) or not plan.retention:
        return None
    groups = facts["groups"]
    align = max(g["block"] for g in groups if g["kind"] == "full")
    peek = max((g["block"] for g in groups if g["eagle"]), default=0)
    replay = (tokens - max(peek, 1)) // align * align
    kept = {*range(plan.retention, replay + 1, plan.retention), replay}
    tails = tuple(g["tail_blocks"] + g["eagle"] for g in groups if g["kind"] == "swa")
    full = sum(g["kind"] == "full" for g in groups) * (tokens // align)
    # The host counts one block for all ranks' copies of it.
    fit = facts["host_blocks"] // (full + len(kept) * sum(tails))
    return Arithmetic(full, len(kept), tails, facts["block_bytes"], plan.ranks, fit)


def row(found: Found) -> dict[str, Any]:
    """The line of the main table."""
    summary = gpu_cache.summary(found.cache, found.total)
    tiers = summary["tiers"]
    stored = sorted(r.seen.stored_bytes for r in found.cache if r.seen.tier == MISS)
    word, _ = boundaries.verdict(found.points)
    bad = sum(bool(p.short) for p in found.points)
    if not any(p.seen.host for p in found.points):
        bad = len(found.points)

    def hits(tier: str) -> str:
        one = tiers[tier]
        return f"{one['requests']} × {one['hit']}" if one["requests"] else "0"

    def first(mode: str) -> str:
        of_mode = [s.seen.cached for s in found.siblings if s.mode == mode]
        return ", ".join(f"{cached:,}" for cached in of_mode)

    return {
        "release": found.plan.version,
        "tree": found.plan.tree.label,
        "retention": retention(found.plan),
        "ranks": found.plan.ranks,
        "host GiB": f"{found.plan.host_gib:g}",
        "GPU hits": hits("GPU"),
        "GPU+host": hits("GPU+HOST"),
        "host hits": hits("HOST"),
        "misses": tiers[MISS]["requests"],
        "stored per prompt": f"{stored[len(stored) // 2]:,}" if stored else "",
        "loaded GB": round(summary["loaded_bytes"] / 1e9, 1),
        "siblings, GPU kept": first(prefix.KEPT),
        "siblings, host only": first(prefix.EVICTED),
        "lengths affected": f"{bad} of {len(found.points)}: {word}",
    }


_CACHE = ("host GiB", "GPU hits", "GPU+host", "host hits", "misses",
          "stored per prompt", "loaded GB")  # fmt: skip
_OTHER = ("siblings, GPU kept", "siblings, host only", "lengths affected")
_KEY = ("release", "tree", "retention", "ranks")


def _table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[n]) for n in names) + " |" for row in rows]
    return "\n".join(lines)


def _said(found: Found, tokens: int) -> str | None:
    """The arithmetic in words, beside what was measured."""
    sums = arithmetic(found.plan, found.facts, tokens)
    if sums is None:
        return None
    stored = [r.seen.stored_bytes for r in found.cache if r.direction == "forward"]
    tails = " + ".join(map(str, sums.tails))
    alone = found.facts["host_blocks"] * sums.ranks // sums.blocks
    one_rank = f" ({alone} with one rank)" if sums.ranks > 1 else ""
    return (
        f"vLLM {found.plan.version} {found.plan.tree.label}, retention "
        f"{found.plan.retention}: {sums.full} full blocks + {sums.positions} "
        f"boundaries × ({tails}) tail blocks = {sums.blocks} blocks of "
        f"{sums.block_bytes:,} bytes, times {sums.ranks} rank(s) = {sums.bytes:,} "
        f"bytes per prompt; into {found.plan.host_gib:g} GiB go {sums.fit}{one_rank}. "
        f"Measured: {max(stored):,} bytes."
    )


def report(everything: Sequence[Found], size: Size, minutes: float) -> str:
    """The report in Markdown."""
    rows = [row(found) for found in everything]
    said = [_said(found, size.tokens) for found in everything]
    plan = everything[0].plan
    intro = (
        f"DeepSeek-V4-Flash with MTP {plan.mtp}, GPU KV cache of "
        f"{plan.gpu_bytes / 1e9:g} GB per rank. "
        f"{size.prompts} prompts of {size.tokens:,} tokens forward, then in reverse; "
        "counted is the way back (number of requests × cached tokens). Hits are vLLM's "
        f"own; nothing is computed, so seconds mean nothing. {minutes:.1f} minutes."
    )
    others = (
        f"{size.siblings} prompts that share {size.prefix:,} of "
        f"{size.sibling_tokens:,} tokens, one after the other (cached tokens of "
        "each), and resends of prompts of all lengths across one alignment block from "
        "the host:"
    )
    parts = [
        "# The experiment: stock beside patched, on simulated servers",
        intro,
        _table(rows, (*_KEY, *_CACHE)),
        "By the rules a prompt takes:",
        "\n".join(f"- {line}" for line in said if line),
        others,
        _table(rows, (*_KEY, *_OTHER)),
    ]
    for found in everything:
        for picture in found.pictures:
            parts.append(f"![{picture.stem}]({picture.name})")
    return "\n\n".join(parts) + "\n"


def check(found: Found, size: Size) -> list[str]:
    """What is not as this project says it is.

    On a stock tree: the boundary probe finds the fault. On a patched one: resends of
    every length restore what they should, the third prompt with a shared prefix hits it
    from both tiers, and a prompt takes the blocks that the rules say, so that as many
    fit.
    """
    word, lines = boundaries.verdict(found.points)
    if found.plan.tree.label != "patched":
        unseen = "boundaries: the fault that this release has is not found"
        return [] if word == "AFFECTED" else [_named(found, unseen)]
    findings = []
    if word != "OK":
        findings += [f"boundaries: {line}" for line in lines]
    groups = found.facts["groups"]
    align = max(g["block"] for g in groups if g["kind"] == "full")
    peek = max((g["block"] for g in groups if g["eagle"]), default=0)
    shared = (size.prefix - peek) // align * align
    findings += [
        f"prefix, {s.mode}: sibling {s.number} hits {s.seen.cached} of {shared}"
        for s in found.siblings
        if s.number > 2 and s.seen.cached != shared
    ]
    back = [r.seen for r in found.cache if r.direction == "reverse"]
    whole = (size.tokens - max(peek, 1)) // align * align
    hits = sum(s.cached == whole for s in back)
    sums = arithmetic(found.plan, found.facts, size.tokens)
    if sums is None:
        if back[0].cached != whole:
            findings.append(f"cache: the newest hits {back[0].cached} of {whole}")
        return [_named(found, line) for line in findings]
    if hits != min(size.prompts, sums.fit):
        findings.append(f"cache: {hits} prompts hit {whole}, {sums.fit} fit")
    first = found.cache[0].seen.stored_bytes
    if first != sums.bytes:
        findings.append(f"cache: a prompt stores {first} bytes, not {sums.bytes}")
    return [_named(found, line) for line in findings]


def _named(found: Found, line: str) -> str:
    plan = found.plan
    return f"vLLM {plan.version} {plan.tree.label}, retention {retention(plan)}: {line}"


# Servers and prompts for a run of a minute: both tiers are too small for all prompts.
QUICK = Size(tokens=9_004, prompts=10, prefix=5_000, own=1_000)


def quick(plan: Plan) -> Plan:
    """A server as small as `QUICK` needs it.

    A step's tokens must fit into the windows' groups, so steps are smaller, too.
    """
    return replace(
        plan,
        gpu_bytes=6 * 10**8,
        host_gib=0.875 * plan.ranks,
        max_model_len=12_288,
        options=("--max-num-batched-tokens", "1024"),
    )


def plans(version: str, trees: Sequence[Any]) -> list[Plan]:
    """The servers of one release.

    0.25.1 keeps a copy of MLA blocks per tensor-parallel rank, 0.33.0 keeps one for all
    (`replicated_layout` in vllm/v1/kv_offload/cpu/spec.py, on CUDA), which one rank
    stands for.
    """
    ranks = 2 if version.startswith("0.25.") else 1
    return [
        Plan(tree=tree, version=version, ranks=ranks, retention=interval)
        for interval in (4096, None)
        for tree in trees
    ]


def one(plan: Plan, python: Path, size: Size, done: Callable[[], None]) -> Found:
    """Start a server, measure, stop it."""
    with sim_server.serve(plan, sim_server.free_port(), python) as running:
        return measure(plan, running, size, done)
