# SPDX-License-Identifier: Apache-2.0
"""What requests that share a long prefix hit, one after the other."""

from collections.abc import Iterator
from typing import Any

from . import release_adapter, scenarios
from .geometry import DSV4, DSV4_NO_EAGLE, Geometry
from .history import Setup, play

SHARED, OWN, COUNT = 20_000, 3_000, 4
RETENTIONS: tuple[int | None, ...] = (None, 0, 4096)
# Whether the GPU still holds the earlier ones, and the tier that can serve then.
TIERS = {"kept": "gpu", "evicted": "host"}


def hits(geometry: Geometry, retention: int | None, tier: str) -> list[int]:
    """The hits of `COUNT` siblings in tokens, served by one tier alone."""
    setup = Setup(geometry, retention, tier, options=(("gpu_blocks", 60_000),))
    scenario = scenarios.siblings(SHARED, OWN, COUNT)
    return [sent.hit for sent in play(setup.engine(), scenario.history, tier)]


def measure() -> Iterator[dict[str, Any]]:
    """One JSON-able record per geometry, retention and state of the GPU cache."""
    for geometry in (DSV4, DSV4_NO_EAGLE):
        for retention in RETENTIONS:
            for state, tier in TIERS.items():
                yield {
                    "release": release_adapter.version(),
                    "geometry": geometry.name,
                    "retention": retention,
                    "gpu": state,
                    "hits": hits(geometry, retention, tier),
                }
