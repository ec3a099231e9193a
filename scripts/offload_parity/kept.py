# SPDX-License-Identifier: Apache-2.0
"""What a run found on a release's series, kept until the series is another."""

import json
from pathlib import Path
from typing import Any

from . import patches
from .files import replace
from .patches import Series
from .paths import build_root
from .release import Release


def _path(release: Release, name: str) -> Path:
    return build_root() / "reports" / release.version / f"{name}.json"


def write(release: Release, series: Series, name: str, found: dict[str, Any]) -> None:
    """Keep what a run found on a release's series; ``name`` is the run's."""
    path = _path(release, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"series": patches.series_digest(series)} | found
    replace(path, (json.dumps(report, indent=1) + "\n").encode())


def read(release: Release, name: str) -> dict[str, Any] | None:
    """What the last run found, None if there is none of this very series."""
    return of_series(release, _path(release, name))


def of_series(release: Release, path: Path) -> dict[str, Any] | None:
    """A report on a release's series, None if it is missing or on another one.

    One that names no series is of a time before they did.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    series = patches.series_digest(patches.read_series(release))
    return report if report.get("series", series) == series else None
