# SPDX-License-Identifier: Apache-2.0
"""The exact-replay sweep: sparse retention beside dense, stock beside patched.

Runs `python -m parity replays` once per tree, each in a process of its own, and
compares. Exit status 1 if any patched figure falls short.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from packaging.version import Version

from offload_parity import cli as scripts
from offload_parity import release, simulation, unit_env, upstream_tests
from offload_parity.files import replace, writable
from offload_parity.paths import build_root
from offload_parity.simulation import Job, Tree

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


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", "version", help="One supported release; default: each.")
@click.option(
    "--stock",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A tree to measure as stock, in place of the built ones (repeatable).",
)
@click.option(
    "--patched",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A tree to measure as patched, in place of the built ones (repeatable).",
)
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter that has vLLM's requirements; default: the unit tests' own.",
)
@click.option("--geometry", multiple=True, help="Repeatable; default: all.")
@click.option("--retention", multiple=True, help="Repeatable; default: None 0 4096.")
@click.option("--blocks-per-chunk", default=1, show_default=True)
@click.option(
    "--length", multiple=True, type=click.IntRange(1), help="Only these (repeatable)."
)
@click.option("--sample", type=click.IntRange(1), help="Only so many lengths.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for sweep.md and sweep.json; default: build/reports.",
)
def cli(
    version, stock, patched, python, geometry, retention, blocks_per_chunk, length,
    sample, seed, jobs, out,
) -> None:  # fmt: skip
    """Measure, print the table and write it."""
    trees = [
        *(Tree("stock", path.resolve()) for path in stock),
        *(Tree("patched", path.resolve()) for path in patched),
    ] or [
        tree for each in release.chosen(version) for tree in simulation.trees_of(each)
    ]
    for tree in trees:
        simulation.check_tree(tree)
    folder = writable(out or build_root() / "reports")
    arguments = [
        "replays",
        "--seed",
        str(seed),
        "--blocks-per-chunk",
        str(blocks_per_chunk),
    ]
    for option, values in (
        ("--geometry", geometry),
        ("--retention", retention),
        ("--length", length),
        ("--sample", [sample] if sample else []),
    ):
        for value in values:
            arguments += [option, str(value)]
    runner = simulation.Runner(unit_env.interpreter(python), jobs, unit="replay")
    ended = runner.run([Job(tree, tuple(arguments)) for tree in trees])
    records = [record for one in ended for record in one.records]
    rows = compare(records)
    table = markdown(rows)
    replace(folder / "sweep.md", table.encode())
    replace(folder / "sweep.json", json.dumps(rows, indent=1).encode())
    print(table)
    measured = sum(row["patched"]["tried"] for row in rows if "patched" in row)
    failed = failures(rows)
    print(f"{failed} of {measured} patched figures fall short")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
