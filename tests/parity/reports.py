# SPDX-License-Identifier: Apache-2.0
"""Public reports of this family, each as a case that shows it, where it shows.

The numbers are those of vLLM's tracker. What lives on no release that this project
builds, or not in what is simulated, is listed with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import contract
from .geometry import (
    DSV4,
    DSV4_NO_EAGLE,
    GEMMA,
    GEMMA_NO_EAGLE,
    STRADDLING,
    UNFLAGGED,
    Geometry,
)
from .history import Case, Setup
from .scenarios import Scenario, edit_near_end, replay, room


@dataclass(frozen=True)
class Report:
    """A public report.

    Attributes:
        number: in vLLM's tracker.
        title: what is wrong, in short.
        law: the law that finds it.
        shown_on: the stock releases on which it shows.
        case: makes the case, None if none can.
        elsewhere: why it does not show on the other releases.
    """

    number: str
    title: str
    law: str = ""
    shown_on: tuple[str, ...] = ()
    case: Callable[[], Case] | None = None
    elsewhere: str = ""


def _hits(
    scenario: Scenario,
    geometry: Geometry,
    retention: int | None,
    tier: str,
    **more: int,
) -> Callable[[], Case]:
    def make() -> Case:
        options = room(geometry, scenario.history, tier) | more
        setup = Setup(geometry, retention, tier, options=tuple(options.items()))
        return Case(scenario.name, "hits", setup, scenario.history)

    return make


_ALL = (
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
REPORTS = (
    Report(
        "46971",
        "holes at prefill chunks in a drafter's stored blocks",
        "L1",
        ("0.25.1",),
        _hits(replay(8514), GEMMA, None, "host"),
        "fixed in 0.26",
    ),
    Report(
        "53951",
        "the stored tail of an EAGLE group is one block short",
        "L1",
        ("0.25.1", "0.26.0"),
        _hits(replay(500), DSV4, None, "host"),
        "dense retention stores every block",
    ),
    Report(
        "51761",
        "the EAGLE drop moves the GPU's boundary to where no tail is",
        "L1",
        ("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0"),
        _hits(replay(8193), DSV4, 0, "gpu"),
        "the boundary is chosen one alignment block lower",
    ),
    Report(
        "54713 and 55036",
        "only one of the two replay boundaries is stored",
        "L1",
        _ALL,
        _hits(replay(8193), DSV4, 0, "host"),
    ),
    Report(
        "57610",
        "a request that parts in the last block hits nothing",
        "L4",
        _ALL,
        _hits(edit_near_end(4100, 5), GEMMA_NO_EAGLE, 0, "gpu"),
    ),
    Report(
        "52735 and 52771",
        "with a drafter that no group is flagged for, all groups are a drafter's",
        "L1",
        ("0.25.1",),
        _hits(replay(500), UNFLAGGED, None, "host"),
        "the store takes none for a drafter's",
    ),
    Report(
        "48959",
        "the load of a hit that ends inside a block is one block too long",
        "L5",
        ("0.25.1", "0.26.0"),
        _hits(replay(150), STRADDLING, None, "host"),
        "the hit ends where all that is loaded was looked up",
    ),
    Report(
        "54914",
        "a load asks for a key that eviction removed",
        elsewhere="the longer load that may ask for one is refused before (48959)",
    ),
    Report(
        "54362",
        "the frontier of a prefill step is stored as if it were the prompt's end",
        "L6",
        ("0.27.1", "0.28.0", "0.29.0"),
        # Each boundary is named, so what is left over lies at the steps' ends.
        _hits(replay(1024), DSV4_NO_EAGLE, 256, "host", max_num_batched_tokens=400),
        "the store counts whole segments, or to the prompt's end",
    ),
    Report(
        "56701 and 56709",
        "multi-module MTP restores history that no lookup checked",
        elsewhere="the simulation drafts with one module",
    ),
    Report(
        "56871",
        "the host's capacity is divided by the number of groups",
        elsewhere="each engine that is built asserts its host's capacity",
    ),
)


def on(release: str) -> list[dict]:
    """Play each report on the tree in use, which is of this release."""
    records = []
    for report in REPORTS:
        words: list[str] = []
        if report.case is not None:
            for verdict in contract.judge(report.case(), ledger=False):
                if verdict.law == report.law:
                    words += verdict.words
        records.append(
            {
                "release": release,
                "report": report.number,
                "title": report.title,
                "law": report.law,
                "expected": release in report.shown_on,
                "found": bool(words),
                "words": words[0] if words else report.elsewhere,
            }
        )
    return records
