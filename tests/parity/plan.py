# SPDX-License-Identifier: Apache-2.0
"""Which cases `python -m parity laws` plays on a tree."""

from collections.abc import Sequence

from . import fuzz, regressions
from .geometry import (
    DSV4,
    DSV4_NO_EAGLE,
    EXAONE_FULL,
    EXAONE_SWA,
    GEMMA,
    GLM,
    GPT_OSS,
    MAMBA_FINE_MTP,
    PURE_FULL,
    PURE_SWA,
    SMALL,
    SMALL_NO_EAGLE,
    SPREAD,
    STATES,
    UNFLAGGED,
    WHOLE,
    Geometry,
)
from .history import Case
from .release_adapter import supports
from .scenarios import crowds, fixed

# (geometry, chunk factor, a few scenarios only): what the time of `make parity` allows.
_FIXED = (
    (SMALL, 1, False),
    (SMALL_NO_EAGLE, 1, False),
    (GPT_OSS, 1, False),
    (GLM, 1, False),
    (EXAONE_SWA, 1, False),
    (EXAONE_FULL, 1, False),
    (GEMMA, 1, True),
    (PURE_SWA, 1, True),
    (PURE_FULL, 1, True),
    (DSV4, 1, True),
    (DSV4_NO_EAGLE, 1, True),
    (SMALL, 2, True),
    (SMALL, 4, True),
    (GPT_OSS, 2, True),
    (GPT_OSS, 4, True),
    (MAMBA_FINE_MTP, 1, True),
    *((geometry, 1, True) for geometry in (UNFLAGGED, WHOLE, *SPREAD, *STATES)),
)
_CROWDED = (SMALL, GPT_OSS, EXAONE_SWA)
_QUICK = (SMALL, SMALL_NO_EAGLE, GPT_OSS, WHOLE)
SAMPLE = 60


def plan(
    geometries: Sequence[Geometry] = (),
    sample: int = SAMPLE,
    seed: int = 0,
    quick: bool = False,
) -> list[tuple[Case, bool]]:
    """The cases, and whether L7 is asked; `geometries` narrows them down.

    The same for the stock and the patched tree of a release, so that they compare.
    """
    cases: list[tuple[Case, bool]] = []

    def wanted(geometry: Geometry) -> bool:
        return geometry in (geometries or (_QUICK if quick else (geometry,)))

    rows = _FIXED if not quick else tuple((g, 1, True) for g in _QUICK)
    listed = {geometry for geometry, _, _ in rows}
    more = tuple((g, 1, True) for g in geometries if g not in listed)
    for geometry, factor, some in (*rows, *more):
        if wanted(geometry):
            cases += fixed(geometry, factor, some)
    for geometry in _CROWDED[: 1 if quick else None]:
        if wanted(geometry):
            cases += ((case, False) for case in crowds(geometry))
    drawn = [g for g in fuzz.GEOMETRIES if wanted(g)]
    if sample and drawn:
        cases += ((case, False) for case in fuzz.sample(sample, seed, geometries=drawn))
    # All of them, quick or not: each is what once went unnoticed.
    for case in regressions.read():
        setup = case.setup
        if setup.geometry in (geometries or (setup.geometry,)) and supports(
            setup.geometry, setup.blocks_per_chunk, setup.retention
        ):
            cases.append((case, True))
    return cases
