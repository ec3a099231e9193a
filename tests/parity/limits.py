# SPDX-License-Identifier: Apache-2.0
"""Where a law is known not to hold on a release, and why.

Their findings are counted apart; a test plays each one's case, so that a limit that is
gone is noticed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .geometry import (
    MAMBA,
    MAMBA_FINE,
    MAMBA_FINE_MTP,
    MAMBA_MTP,
    STATES,
    STRADDLING,
    WHOLE,
    Geometry,
)
from .history import Case, Setup
from .scenarios import (
    Scenario,
    edits_extended,
    extension,
    partly,
    replay,
    room,
    siblings,
)


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
        when: which setups of these fall under it.
    """

    release: str
    law: str
    geometries: tuple[str, ...]
    tiers: tuple[str, ...]
    why: str
    case: Callable[[], Case]
    when: Callable[[Setup], bool] = lambda setup: True

    def __str__(self) -> str:
        places = "/".join(self.geometries)
        return f"{self.law} of {places}, {' and '.join(self.tiers)}: {self.why}"


def _case(
    scenario: Scenario,
    geometry: Geometry,
    blocks_per_chunk: int = 1,
    tier: str = "host",
    retention: int = 0,
    mode: str = "hits",
    **more: int,
) -> Callable[[], Case]:
    def make() -> Case:
        options = tuple((room(geometry, scenario.history, tier) | more).items())
        setup = Setup(geometry, retention, tier, blocks_per_chunk, options)
        return Case(scenario.name, mode, setup, scenario.history)

    return make


def _in_larger_chunks(setup: Setup) -> bool:
    return setup.blocks_per_chunk > 1


def _of_both(release: str, *rest: Any) -> tuple[Limit, Limit]:
    """L6 and L7: what is kept beyond the named tails (L6) is useless, too (L7)."""
    return Limit(release, "L6", *rest), Limit(release, "L7", *rest)


def _of_all_states(release: str) -> tuple[Limit, ...]:
    """The limits of Mamba states on each release that serves them."""
    return (
        Limit(
            release,
            "L3",
            tuple(geometry.name for geometry in (*STATES, MAMBA_FINE_MTP)),
            ("host", "both"),
            "a state exists only where a step ends, and the scheduler ends one at the "
            "junction that the GPU shows, not at one that only the host shows",
            _case(siblings(64, 64, 3), MAMBA),
        ),
        *_of_both(
            release,
            (MAMBA_FINE.name, MAMBA_FINE_MTP.name),
            ("gpu", "host", "both"),
            "the laws count whole blocks, and here the states inside a block are kept "
            "under keys of their own",
            _case(replay(92), MAMBA_FINE),
        ),
    )


# The releases that resume where a Mamba group has a state, with a connector.
_STATEFUL = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


def _of_states(release: str) -> tuple[Limit, ...]:
    """The limits of Mamba states on one release of those."""
    inside = (
        "with a drafter no state inside a block is stored (supports_partial_tail)"
        if release != "0.33.0"
        else "of a request that loaded nothing the state inside a block is left to the "
        "GPU (_build_partial_tail_store_jobs)"
    )
    return (
        *_of_all_states(release),
        *(
            Limit(
                release,
                law,
                (MAMBA_FINE_MTP.name,),
                ("host", "both"),
                inside,
                _case(scenario, MAMBA_FINE_MTP),
            )
            for law, scenario in (("L1", replay(92)), ("L2", extension(92, 8)))
        ),
        *(
            Limit(
                release,
                law,
                (MAMBA.name, MAMBA_MTP.name, MAMBA_FINE.name),
                ("host", "both"),
                "in chunks of several blocks: the scheduler ends a step at a prompt's "
                "last blocks, and a state serves where a chunk ends",
                _case(scenario, MAMBA, 2, max_num_batched_tokens=101),
                _in_larger_chunks,
            )
            for law, scenario in (("L1", replay(225)), ("L2", extension(225, 1)))
        ),
        *_of_both(
            release,
            (MAMBA_MTP.name,),
            ("gpu", "host", "both"),
            "of a prompt that ends with a block the GPU keeps one state more, a block "
            "below, which vLLM's own tests ask for, and hands both over",
            _case(replay(448), MAMBA_MTP, max_num_batched_tokens=101),
        ),
    )


# The releases whose host hits are not aligned to chunks.
_UNALIGNED = ("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")
_STATEFUL_BEFORE_0_30 = ("0.27.1", "0.28.0", "0.29.0")


def _of_states_before_0_30(release: str) -> Iterator[Limit]:
    """The limits of Mamba states on one release of those."""
    yield from _of_all_states(release)
    if release == "0.27.1":
        for law, scenario in (("L1", replay(92)), ("L2", extension(88, 8))):
            yield Limit(
                release,
                law,
                (MAMBA_FINE.name, MAMBA_FINE_MTP.name),
                ("host", "both"),
                "no state inside a block is stored",
                _case(scenario, MAMBA_FINE),
            )
        yield Limit(
            release,
            "L8",
            (MAMBA_FINE.name,),
            ("both",),
            "the host is asked for what lies past full attention's hit on the GPU, "
            "not for a state at its end",
            _case(partly(88, 72, 88), MAMBA_FINE, tier="both", mode="mixed"),
        )
    else:
        yield Limit(
            release,
            "L1",
            (MAMBA_FINE_MTP.name,),
            ("host", "both"),
            "with a drafter no state inside a block is stored (supports_partial_tail), "
            "and the GPU, which has one, sets the mark",
            _case(replay(92), MAMBA_FINE_MTP, max_num_batched_tokens=29),
        )
    yield Limit(
        release,
        "L6",
        (MAMBA_MTP.name,),
        ("gpu",),
        "the drafter's block is dropped from the n - 1 tokens that a resend may hit: "
        "it resumes a block below the named position if the prompt ends with a block; "
        "the first resend ends a step there, as at a junction, and keeps the state",
        _case(replay(352), MAMBA_MTP, tier="gpu"),
    )


LIMITS = (
    *(limit for release in _STATEFUL for limit in _of_states(release)),
    *(
        Limit(
            release,
            "L2",
            (MAMBA_FINE.name,),
            ("host", "both"),
            "the state at a prompt's very end is handed over when a token is computed "
            "after it, which no request does that decodes one",
            _case(extension(88, 8), MAMBA_FINE),
        )
        for release in ("0.28.0", "0.29.0", "0.30.0", "0.31.0")
    ),
    *(
        limit
        for release in _UNALIGNED
        for limit in (
            *_of_both(
                release,
                (WHOLE.name,),
                ("host", "both"),
                "its lookup may end a token short of a block, at the prompt's last "
                "token, so a window of whole blocks is stored with one block more",
                _case(replay(368), WHOLE),
            ),
            Limit(
                release,
                "L3",
                (WHOLE.name,),
                ("both",),
                "its lookup asks for one block of the window more than there is of a "
                "request that the GPU served, which cannot store it then",
                _case(edits_extended(368, 21, 96), WHOLE, tier="both", retention=256),
                lambda setup: bool(setup.retention),
            ),
            *_of_both(
                release,
                (STRADDLING.name,),
                ("host", "both"),
                "a hit may end inside a window's block, so no tail can be told apart "
                "and all of the window's blocks are stored",
                _case(replay(368), STRADDLING),
            ),
        )
    ),
    *(
        limit
        for release in _STATEFUL_BEFORE_0_30
        for limit in _of_states_before_0_30(release)
    ),
)

# What stock serves there is an accident: L6 asks only for what L1 to L4 ask for. By
# release, the geometries.
ASTRAY = {
    # A hit that ends inside a window's block loads a block that no lookup asked for,
    # which eviction may have removed.
    "0.27.1": (STRADDLING.name,),
    "0.28.0": (STRADDLING.name,),
    "0.29.0": (STRADDLING.name,),
    # A window that every rank holds whole is counted as if it were spread over them,
    # so its tails are stored at half their position.
    "0.31.0": ("swa-drafter-dcp2",),
    "0.32.0": ("swa-drafter-dcp2",),
    "0.33.0": ("swa-drafter-dcp2",),
}


def of(release: str, law: str, setup: Setup) -> Limit | None:
    """The limit that a law's findings fall under, if any."""
    for limit in LIMITS:
        if (
            (limit.release, limit.law) == (release, law)
            and setup.geometry.name in limit.geometries
            and setup.tier in limit.tiers
            and limit.when(setup)
        ):
            return limit
    return None
