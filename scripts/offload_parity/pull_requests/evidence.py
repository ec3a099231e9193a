# SPDX-License-Identifier: Apache-2.0
"""What was shown of a pull request, read from what this project's runs wrote.

Nothing here runs or claims anything: where a run is missing, its command stands.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import kept, matrix, patches, proof
from ..each_commit import Ended
from ..release import Release
from .changes import Change

NO_FIGURES = "not measured for this series"


@dataclass
class Evidence:
    """All that is known of one pull request.

    Attributes:
        failing: its tests on the release, from ``make proof``; None if it did not run.
        doubts: what is wrong with that proof.
        passing: its tests at the branch's tip; None if they did not run.
        laws: per patch, the law that notices when it is taken out.
        table: the release's rows of the matrix.
        costs: bytes and scheduler time, stock beside patched.
    """

    failing: list[proof.Row] | None = None
    doubts: list[str] = field(default_factory=list)
    passing: list[Ended] | None = None
    laws: dict[str, str] = field(default_factory=dict)
    table: str = NO_FIGURES
    costs: str = NO_FIGURES


def gather(release: Release, change: Change, passing: list[Ended] | None) -> Evidence:
    """Read what the last runs showed of a change."""
    names = {patch.name for patch in change.patches}
    found = Evidence(passing=passing, table=_table(release), costs=_costs(release))
    if report := proof.read_report(release):
        found.failing = [row for row in report.rows if row.patch in names]
        found.doubts = [f.what for f in report.findings if f.patch in names]
    known = noticed(release)
    found.laws = {name: known[name] for name in sorted(names & known.keys())}
    return found


def noticed(release: Release) -> dict[str, str]:
    """By patch, what the laws said of the tree without it.

    A case that breaks without several patches tells nothing of any one of them.
    """
    killed: Mapping[str, str] = _measured(release, "mutants.json").get("killed", {})
    said = Counter(
        words for name, words in killed.items() if name.startswith("without")
    )
    found = {}
    for patch in patches.read_series(release).patches:
        for name, words in killed.items():
            if name.startswith(f"without {patch.name}") and said[words] == 1:
                found[patch.name] = words
    return found


def _table(release: Release) -> str:
    row = matrix.read_row(release)
    if row is None or matrix.stale(release):
        return f"{NO_FIGURES}: `make matrix RELEASE={release.version}`"
    return matrix.table({release.version: row}).strip()


def _costs(release: Release) -> str:
    """Bytes per prompt, and time of the scheduler's decisions, patched over stock."""
    if found := _measured(release, "bench.json"):
        return _stored(found) + "\n\n" + _time(found)
    return f"{NO_FIGURES}: `make bench RELEASE={release.version}`"


def _stored(found: Mapping[str, Any]) -> str:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in found["stored"]:
        row = rows.setdefault((one["geometry"], str(one["retention"])), {})
        row[one["tree"]] = f"{one['chunks']:,} chunks, {one['megabytes']:,} MB"
    tokens = {one["tokens"] for one in found["stored"]}
    lines = [
        f"Stored of one prompt of {max(tokens):,} tokens:\n",
        "| shape | retention | stock | whole series |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {shape} | {retention} | {row['stock']} | {row['patched']} |"
        for (shape, retention), row in rows.items()
    ]
    return "\n".join(lines)


def _time(found: Mapping[str, Any]) -> str:
    ratios = [r["ratio"] for r in found["patched_over_stock"] if r["decision"] == "all"]
    if not ratios:
        return "Scheduler time: every request took less than can be compared."
    return (
        f"Scheduler time per request, whole series over stock: {min(ratios):.2f} to "
        f"{max(ratios):.2f} in {len(ratios)} settings (noise {found['noise']:.2f}), "
        f"{len(found['faults'])} of them too slow."
    )


def _measured(release: Release, name: str) -> dict[str, Any]:
    """A file of the series' folder; empty if it is not there or of another series."""
    return kept.of_series(release, release.folder / name) or {}
