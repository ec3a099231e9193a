# SPDX-License-Identifier: Apache-2.0
"""Judges what the host tier costs: the figures of stock and patched, side by side."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

Record = dict[str, Any]

# Sparse retention's, at which decisions are timed and counted.
RETENTIONS = (0, 4096)
# Times below it, and differences below it, are those of a few calls: no case for a
# ratio. In seconds.
FLOOR_S = 0.001
# How much more a token may cost in a prompt that is several times as long, noise aside.
# Memory that no longer fits into a cache takes part of it; quadratic growth would be
# the ratio of the lengths, 5.
GROWTH_LIMIT = 1.5
_GB, _GIB = 10**9, 2**30
_HOST_GB = 64


@dataclass(frozen=True)
class Cell:
    """One kind of request in one setting."""

    retention: int
    case: str
    length: int


@dataclass
class Timing:
    """One decision in one cell: CPU seconds of each repetition, and what was hit."""

    samples: list[float]
    hit: tuple[int, int]

    @property
    def best(self) -> float:
        """The fastest repetition."""
        return min(self.samples)

    @property
    def noise(self) -> float:
        """How far the second fastest repetition is above the fastest, as a ratio."""
        if len(self.samples) < 2 or not self.best:
            return 1.0
        return sorted(self.samples)[1] / self.best


@dataclass(frozen=True)
class Growth:
    """Cost per token at the longest prompt against that at the one before it."""

    retention: int
    case: str
    decision: str
    ratio: float


@dataclass(frozen=True)
class Ratio:
    """Patched against stock in one cell; ``decision`` "all" is the sum."""

    cell: Cell
    decision: str
    ratio: float
    stock_s: float
    patched_s: float
    allowed: float
    same_hits: bool

    @property
    def too_slow(self) -> bool:
        """Whether patched takes more than stock, noise and trifles aside.

        Where the two hit differently they do not do the same; then the sum counts.
        """
        judged = self.same_hits or self.decision == "all"
        return (
            judged
            and self.ratio > self.allowed
            and self.patched_s - self.stock_s > FLOOR_S
        )


Timings = dict[tuple[str, Cell, str], Timing]


def timings(records: Iterable[Record]) -> Timings:
    """Per tree, cell and decision; "all" is the sum of a request's decisions."""
    found: Timings = {}
    for record in records:
        if record["kind"] != "timed":
            continue
        cell = Cell(record["retention"], record["case"], record["length"])
        figures = record["figures"] | {"all": sum(record["figures"].values())}
        for decision, seconds in figures.items():
            hit = (record["local"], record["external"])
            key = (record["tree"], cell, decision)
            found.setdefault(key, Timing([], hit)).samples.append(seconds)
    return found


def common_noise(found: Timings) -> float:
    """What nearly all cells stay below: their noise at the 95th percentile."""
    noise = [t.noise for t in found.values() if t.best >= FLOOR_S]
    if len(noise) < 2:
        return max(noise, default=1.0)
    return quantiles(noise, n=20, method="inclusive")[-1]


def ratios(found: Timings) -> list[Ratio]:
    """Patched against stock, in the order measured."""
    common = common_noise(found)
    result = []
    for (tree, cell, decision), stock in found.items():
        if tree != "stock":
            continue
        patched = found["patched", cell, decision]
        if max(stock.best, patched.best) < FLOOR_S:
            continue
        ratio = patched.best / stock.best if stock.best else float("inf")
        result.append(
            Ratio(
                cell, decision, ratio, stock.best, patched.best,
                max(common, stock.noise, patched.noise), stock.hit == patched.hit,
            )
        )  # fmt: skip
    return result


def growths(found: Timings, tree: str) -> list[Growth]:
    """Of each case, from the second longest prompt to the longest."""
    lengths = sorted({cell.length for _, cell, _ in found})[-2:]
    if len(lengths) < 2:
        return []
    shorter, longer = lengths
    result = []
    for (label, cell, decision), timing in found.items():
        before = Cell(cell.retention, cell.case, shorter)
        if label != tree or cell.length != longer or timing.best < FLOOR_S:
            continue
        if (earlier := found.get((tree, before, decision))) and earlier.best:
            ratio = timing.best / earlier.best / (longer / shorter)
            result.append(Growth(cell.retention, cell.case, decision, ratio))
    return result


def faults(found: Timings) -> list[str]:
    """What of the patched tree's times is too much, in words."""
    noise = common_noise(found)
    words = [
        f"{r.cell.case} of {r.cell.length} tokens at retention {r.cell.retention}: "
        f"{r.decision} takes {r.ratio:.2f} times stock's {r.stock_s * 1e3:.1f} ms "
        f"(noise {r.allowed:.2f})"
        for r in ratios(found)
        if r.too_slow
    ]
    return words + [
        f"{g.case} at retention {g.retention}: {g.decision} grows faster than the "
        f"prompt, {g.ratio:.1f} times the cost per token (noise {noise:.2f})"
        for g in growths(found, "patched")
        if g.ratio > GROWTH_LIMIT * noise
    ]


def stored(records: Iterable[Record], block_bytes: int) -> list[Record]:
    """Per tree, geometry and retention what a request stores and how many fit.

    ``block_bytes``: of one GPU block on one rank, which is one chunk of the host.
    """
    return [
        {
            "tree": r["tree"],
            "geometry": r["geometry"],
            "retention": "dense" if r["retention"] is None else r["retention"],
            "tokens": r["length"],
            "chunks": r["chunks"],
            "resent_chunks": r["resent"],
            "hit_tokens": r["hit"],
            "megabytes": round(r["chunks"] * block_bytes / 1e6, 1),
            "requests_in_64_GB": _HOST_GB * _GB // (r["chunks"] * block_bytes),
            "requests_in_64_GiB_two_ranks": _HOST_GB
            * _GIB
            // (2 * r["chunks"] * block_bytes),
        }
        for r in records
        if r["kind"] == "stored"
    ]


def counts(records: Iterable[Record]) -> list[Record]:
    """Per cell what the decisions look at, stock beside patched."""
    cells: dict[Cell, Record] = defaultdict(dict)
    for r in records:
        if r["kind"] == "counted":
            cell = Cell(r["retention"], r["case"], r["length"])
            cells[cell][r["tree"]] = r["figures"] | {"hit": r["local"] + r["external"]}
    return [vars(cell) | trees for cell, trees in cells.items()]


def summary(records: Sequence[Record], block_bytes: int) -> Record:
    """What the file holds: no times, which are those of one machine."""
    found = timings(records)
    return {
        "stored": stored(records, block_bytes),
        "counts": counts(records),
        "noise": round(common_noise(found), 2),
        "patched_over_stock": [
            vars(r.cell) | {"decision": r.decision, "ratio": round(r.ratio, 2)}
            for r in ratios(found)
        ],
        "growth_per_token": {
            tree: [vars(g) | {"ratio": round(g.ratio, 2)} for g in growths(found, tree)]
            for tree in ("stock", "patched")
        },
        "faults": faults(found),
    }


def table(rows: Sequence[Record]) -> str:
    """Rows with the same keys as a Markdown table."""
    if not rows:
        return ""
    head = [name.replace("_", " ") for name in rows[0]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def quoted(found: Record) -> str:
    """What README.md quotes of the summary: chunks, and the time of whole requests."""
    rows: dict[tuple[str, str], Record] = {}
    for one in found["stored"]:
        key = one["geometry"], str(one["retention"])
        row = rows.setdefault(key, dict(zip(("shape", "retention"), key, strict=True)))
        row[f"chunks, {one['tree']}"] = f"{one['chunks']:,}"
        row[f"prompts in 64 GB, {one['tree']}"] = one["requests_in_64_GB"]
    whole = [row for row in _over_stock(found) if row.pop("decision") == "all"]
    return f"{table(list(rows.values()))}\n\n{table(whole)}"


def _over_stock(found: Record) -> list[Record]:
    """The ratios, a column for each length."""
    over: dict[tuple, Record] = {}
    for r in found["patched_over_stock"]:
        names = ("decision", "case", "retention")
        row = over.setdefault(tuple(r[n] for n in names), {n: r[n] for n in names})
        row[f"{r['length']:,}"] = r["ratio"]
    columns = list(dict.fromkeys(name for row in over.values() for name in row))
    return [{name: row.get(name, "") for name in columns} for row in over.values()]


def report(found: Record) -> str:
    """The summary as tables."""
    growth = {
        (g["decision"], g["case"], g["retention"]): g["ratio"]
        for g in found["growth_per_token"]["stock"]
    }
    grown = [
        {
            "decision": g["decision"],
            "case": g["case"],
            "retention": g["retention"],
            "stock": growth.get((g["decision"], g["case"], g["retention"]), ""),
            "patched": g["ratio"],
        }
        for g in found["growth_per_token"]["patched"]
    ]
    return "\n\n".join(
        (
            table(found["stored"]),
            f"Time, patched over stock (noise {found['noise']}):",
            table(_over_stock(found)),
            "Growth of the cost per token, longest prompt over the one before:",
            table(grown),
        )
    )
