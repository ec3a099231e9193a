# SPDX-License-Identifier: Apache-2.0
"""Where a law is known not to hold on a release, and why.

Their findings are counted apart; a test plays each one's case, so that a limit that is
gone is noticed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .geometry import MAMBA, MAMBA_FINE, STATES, WHOLE, Geometry
from .history import Case, Setup
from .scenarios import Scenario, replay, room, siblings


@dataclass(frozen=True)
class Limit:
    """A law that does not hold.

    Attributes:
        release: of vLLM, stock and patched.
        law: which.
        geometries: names of the geometries.
        tiers: see `Setup`.
        why: the reason.
        case: makes the smallest case that shows it.
    """

    release: str
    law: str
    geometries: tuple[str, ...]
    tiers: tuple[str, ...]
    why: str
    case: Callable[[], Case]

    def __str__(self) -> str:
        places = "/".join(self.geometries)
        return f"{self.law} of {places}, {' and '.join(self.tiers)}: {self.why}"


def _on_host(scenario: Scenario, geometry: Geometry) -> Callable[[], Case]:
    def make() -> Case:
        options = tuple(room(geometry, scenario.history, "host").items())
        setup = Setup(geometry, 0, "host", options=options)
        return Case(scenario.name, "hits", setup, scenario.history)

    return make


_PARTS = (
    "the laws count whole blocks, and here the states inside a block are kept under "
    "keys of their own"
)
LIMITS = (
    Limit(
        "0.33.0",
        "L3",
        tuple(geometry.name for geometry in STATES),
        ("host", "both"),
        "a state exists only where a step ends, and the scheduler ends one at the "
        "junction that the GPU shows, not at one that only the host shows",
        _on_host(siblings(64, 64, 3), MAMBA),
    ),
    *(
        Limit(
            "0.33.0",
            law,
            (MAMBA_FINE.name,),
            ("gpu", "host", "both"),
            _PARTS,
            _on_host(replay(92), MAMBA_FINE),
        )
        for law in ("L6", "L7")
    ),
    *(
        Limit(
            "0.25.1",
            law,
            (WHOLE.name,),
            ("host", "both"),
            "its lookup may end a token short of a block, at the prompt's last token, "
            "so a window of whole blocks is stored with one block more",
            _on_host(replay(368), WHOLE),
        )
        for law in ("L6", "L7")
    ),
)


def of(release: str, law: str, setup: Setup) -> Limit | None:
    """The limit that a law's findings fall under, if any."""
    for limit in LIMITS:
        if (
            (limit.release, limit.law) == (release, law)
            and setup.geometry.name in limit.geometries
            and setup.tier in limit.tiers
        ):
            return limit
    return None
