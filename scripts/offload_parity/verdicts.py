# SPDX-License-Identifier: Apache-2.0
"""What the laws' verdicts say of the trees of a release, counted."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from . import simulation
from .paths import ROOT

# What compares two trees needs no vLLM.
sys.path.insert(0, str(ROOT / "tests"))
from parity.names import NAMES
from parity.stock import below_stock

__all__ = ["NAMES", "Tally", "table", "tally"]


@dataclass
class Tally:
    """What the laws say of one tree.

    Attributes:
        checks: how often each law was asked.
        findings: per law, what is wrong, in words.
        exempt: chunks that L7 does not speak of, by kind.
        limited: findings where a law is known not to hold, by the reason.
        broken: of the checks, how many found something.
    """

    checks: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(default_factory=dict)
    exempt: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: dict[str, Any], more: list[str] | None = None) -> None:
        """Count a verdict, with `more` findings that its tree alone cannot show."""
        law = verdict["law"]
        self.checks[law] += verdict["checks"]
        self.exempt.update(verdict.get("exempt", {}))
        self.limited.update(verdict.get("limited", {}))
        about = (
            f"{verdict['geometry']}, retention {verdict['retention']}, "
            f"{verdict['tier']}: {verdict['case']}"
        )
        wrong = [*verdict["words"], *(more or [])]
        # One check may find several things.
        self.broken[law] += min(len(wrong), max(verdict["checks"], 1))
        for words in wrong:
            self.findings.setdefault(law, []).append(f"{about}: {words}")


def tally(records: list[dict[str, Any]]) -> dict[str, Tally]:
    """The verdicts of a release's trees, by tree; L6 compares them."""
    stock = {
        _key(record): record
        for record in records
        if record["tree"] == "stock" and record["law"] == "L6"
    }
    tallies: dict[str, Tally] = {}
    for record in records:
        more = None
        if record["tree"] == "patched" and record["law"] == "L6":
            other = stock.get(_key(record))
            more = below_stock(record, other) if other else None
        tallies.setdefault(record["tree"], Tally()).add(record, more)
    return tallies


def _key(record: dict[str, Any]) -> tuple:
    return record["case"], record["geometry"], record["retention"], record["tier"]


def table(by_release: dict[str, dict[str, Tally]]) -> str:
    """Per release and law, the findings of each tree."""
    lines = ["| release | law | stock | patched |", "|---|---|---|---|"]
    for version, tallies in by_release.items():
        for law, name in NAMES.items():
            cells = [_cell(tallies.get(kind), law) for kind in simulation.KINDS]
            lines.append(f"| {version} | {law} {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Tally | None, law: str) -> str:
    if found is None:
        return ""
    return f"{found.broken[law]} of {found.checks[law]}"
