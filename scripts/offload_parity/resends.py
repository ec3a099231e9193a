# SPDX-License-Identifier: Apache-2.0
"""Compares what resent prompts hit: sparse beside dense, stock beside patched."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

TIERS = ("host", "gpu")
EXAMPLES = 3


@dataclass(frozen=True)
class Short:
    """A length at which a tree hits less than it should."""

    length: int
    hit: int
    want: int


def compare(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per release, geometry, retention and tier.

    A row has, per tree: the lengths tried and those that fall short of the mark, and
    for patched trees those that fall short of stock.
    """
    cases: dict[tuple, dict[str, dict[int, dict]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        key = (
            record["release"],
            record["geometry"],
            record["blocks_per_chunk"],
            record["retention"],
        )
        cases[key][record["tree"]][record["length"]] = record
    rows = []
    for (version, geometry, factor, retention), trees in cases.items():
        for tier in TIERS:
            row: dict[str, Any] = {
                "release": version,
                "geometry": geometry,
                "blocks_per_chunk": factor,
                "retention": retention,
                "tier": tier,
            }
            for label, by_length in trees.items():
                row[label] = {
                    "tried": len(by_length),
                    "short": [
                        vars(Short(n, r[tier], r[f"want_{tier}"]))
                        for n, r in sorted(by_length.items())
                        if r[tier] < r[f"want_{tier}"]
                    ],
                }
            if {"stock", "patched"} <= trees.keys():
                row["below_stock"] = [
                    vars(Short(n, r[tier], stock))
                    for n, r in sorted(trees["patched"].items())
                    if r[tier] < (stock := _aligned(trees["stock"][n], tier))
                ]
            rows.append(row)
    return sorted(rows, key=_order)


def _aligned(record: dict[str, Any], tier: str) -> int:
    # Where a group is small enough to be kept whole, a hit can end between two
    # boundaries by luck; no position is kept for that, so it counts as the lower one.
    return record[tier] // record[f"align_{tier}"] * record[f"align_{tier}"]


def _order(row: dict[str, Any]) -> tuple:
    retention = -1 if row["retention"] is None else row["retention"]
    return (
        tuple(-part for part in Version(row["release"]).release),
        row["geometry"],
        row["blocks_per_chunk"],
        retention,
        row["tier"],
    )


def failures(rows: list[dict[str, Any]]) -> int:
    """How many patched figures fall short of the mark or of stock."""
    return sum(
        len(row.get("patched", {}).get("short", ())) + len(row.get("below_stock", ()))
        for row in rows
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, with the first few figures of each shortfall."""
    labels = [x for x in ("stock", "patched") if any(x in row for row in rows)]
    both = len(labels) == 2
    head = ["release", "geometry", "retention", "tier", "lengths"]
    for label in labels:
        head += [f"{label}: worse than dense", "first (length: hit of possible)"]
    if both:
        head.append("patched below stock")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        name = row["geometry"]
        if row["blocks_per_chunk"] > 1:
            name += f" ×{row['blocks_per_chunk']}"
        retention = "dense" if row["retention"] is None else str(row["retention"])
        tried = max(row[label]["tried"] for label in labels if label in row)
        cells = [row["release"], name, retention, row["tier"], str(tried)]
        for label in labels:
            short = row[label]["short"] if label in row else None
            cells += ["", ""] if short is None else [str(len(short)), _examples(short)]
        if both:
            below = row.get("below_stock", ())
            cells.append(f"{len(below)} {_examples(below)}".strip())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _examples(short: list[dict[str, int]]) -> str:
    return "; ".join(
        f"{x['length']}: {x['hit']} of {x['want']}" for x in short[:EXAMPLES]
    )
