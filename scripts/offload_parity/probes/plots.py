# SPDX-License-Identifier: Apache-2.0
"""The pictures. matplotlib is imported only when one is asked for."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..paths import shown
from .boundaries import Point
from .gpu_cache import Request
from .meter import BOTH, GPU, HOST, MISS
from .prefix import Sibling

_COLOURS = {GPU: "#1b7f3b", BOTH: "#6aa84f", HOST: "#2f6fb2", MISS: "#c0392b"}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "--plot needs matplotlib: install it with "
            f"{sys.executable} -m pip install matplotlib"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn.

    Raises:
        UserError: no matplotlib, no folder, or no known format.
    """
    _pyplot()
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{path}: name a .png, .svg or .pdf file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.absolute().parent} is no folder: make it first")


def _bars(
    axes: Any, heights: Sequence[int], tiers: Sequence[str], width: float
) -> None:
    for tier, colour in _COLOURS.items():
        places = [i for i, t in enumerate(tiers) if t == tier]
        if places:
            # A miss has no height, so it is marked on the axis.
            axes.bar(
                places, [heights[i] for i in places], width, color=colour, label=tier
            )
            if tier == MISS:
                axes.plot(places, [0] * len(places), "|", color=colour, markersize=9)


def _finish(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"{shown(path.absolute())} written", file=sys.stderr)


def gpu_cache(requests: Sequence[Request], title: str, path: Path) -> None:
    """Hit length by request and tier."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    seen = [r.seen for r in requests]
    _bars(axes, [s.cached for s in seen], [s.tier for s in seen], 1.0)
    turn = sum(r.direction == "forward" for r in requests)
    axes.axvline(turn - 0.5, color="black", linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="request: forward, then in reverse",
             ylabel="cached tokens", xlim=(-0.5, len(seen) - 0.5))  # fmt: skip
    axes.legend(frameon=False)
    _finish(pyplot, figure, path)


def prefix(found: Sequence[Sibling], shared: int, title: str, path: Path) -> None:
    """Hit length by sibling and tier, a panel per mode."""
    pyplot = _pyplot()
    modes = list(dict.fromkeys(s.mode for s in found))
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(4.5 * len(modes), 3.6), sharey=True, squeeze=False
    )
    for axes, mode in zip(panels[0], modes, strict=True):
        seen = [s.seen for s in found if s.mode == mode]
        _bars(axes, [s.cached for s in seen], [s.tier for s in seen], 0.7)
        axes.axhline(shared, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(seen)), range(1, len(seen) + 1))
        axes.set(title=mode, xlabel="sibling")
        axes.legend(frameon=False)
    panels[0][0].set_ylabel("cached tokens")
    figure.suptitle(title)
    _finish(pyplot, figure, path)


def boundaries(points: Sequence[Point], title: str, path: Path) -> None:
    """Hit length by prompt length; where it falls short in red."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    whole = not any(p.seen.host for p in points)
    for label, colour, wanted in (
        ("restored", _COLOURS[HOST], False),
        ("short", _COLOURS[MISS], True),
    ):
        chosen = [p for p in points if (bool(p.short) or whole) == wanted]
        if chosen:
            axes.plot([p.length for p in chosen], [p.seen.host for p in chosen], "o",
                      color=colour, label=label, markersize=4)  # fmt: skip
    axes.set(title=title, xlabel="prompt tokens", ylabel="tokens from the host")
    highest = max((p.seen.host for p in points), default=0) or max(
        p.length for p in points
    )
    axes.set_ylim(-0.03 * highest, 1.1 * highest)
    axes.legend(frameon=False)
    _finish(pyplot, figure, path)
