# SPDX-License-Identifier: Apache-2.0
"""Which patches make a pull request, and what its text says that they do not.

``patches/<release>/upstream.toml`` is the one place for both; a release without it gets
a pull request per patch:

    [[change]]
    patches = ["0008", "0009"]
    title = "[Bugfix][KV Offload] …"     # needed for several patches only
    summary = "One or two lines."
    since = "Where the fault comes from, as far as that is known."
    alternatives = "What was left, and why."
    alone = true                         # applies to the release without the others
    formerly = ["Other title"]           # of the same change in older series
    [[change.related]]
    number = 12345                       # in vLLM's tracker
    what = "What it says."
    differs = "How this change differs from it."
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import patches
from .. import release as releases
from ..errors import UserError
from ..patches import Patch
from ..paths import shown
from ..release import Release

_NAME_LENGTH = 50
_TAG = re.compile(r"\[([^\]]+)\]")
# What vLLM's contributing guide calls the areas that the patches' titles name.
_AREAS = {"KVConnector": "KV Connector", "Offloading": "KV Offload"}
# Tags that say what kind of change it is come first.
_KINDS = ("Bugfix", "Feature", "Perf", "Refactor", "CI", "CI/Build", "Test", "Doc")
_KEYS = {"patches", "title", "summary", "since", "alternatives", "alone", "formerly",
         "related"}  # fmt: skip


@dataclass(frozen=True)
class Related:
    """A public report or pull request, and how the change differs from it."""

    number: int
    what: str
    differs: str


@dataclass(frozen=True)
class Change:
    """One pull request.

    Attributes:
        number: its place in the order in which they must land, from 1.
        patches: what it consists of.
        title: with vLLM's tags.
        summary, since, alternatives: as in ``upstream.toml``, empty without it.
        alone: whether it applies to the release without those before it.
        related: public issues and pull requests.
        seen_on: the releases whose series carry it, newest first.
    """

    number: int
    patches: tuple[Patch, ...]
    title: str
    summary: str = ""
    since: str = ""
    alternatives: str = ""
    alone: bool = False
    related: tuple[Related, ...] = ()
    seen_on: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its branch and files: the place and the title's words."""
        words = re.findall(r"[a-z0-9]+", subject(self.title).lower())
        name = f"{self.number:02}"
        for word in words:
            if len(name) + len(word) > _NAME_LENGTH:
                break
            name += f"-{word}"
        return name


def path_of(release: Release) -> Path:
    """Where a release's ``upstream.toml`` is or would be."""
    return release.folder / "upstream.toml"


def subject(title: str) -> str:
    """A title without its tags."""
    return re.sub(r"^(\[[^\]]+\])+\s*", "", title)


def upstream_title(title: str) -> str:
    """A patch's title with the tags that vLLM's contributing guide asks for."""
    tags = [
        _AREAS.get(tag, tag) for tag in _TAG.findall(title.partition("] ")[0] + "]")
    ]
    if "KV Offload" in tags and "KV Connector" in tags:
        # The one is a part of the other.
        tags.remove("KV Connector")
    tags.sort(key=lambda tag: tag not in _KINDS)
    return "".join(f"[{tag}]" for tag in tags) + f" {subject(title)}"


def read(release: Release) -> list[Change]:
    """The pull requests of a release's series, in the order in which they must land.

    Raises:
        UserError: ``upstream.toml`` cannot be read, or does not name every patch of
            the series once and in order.
    """
    series = patches.read_series(release).patches
    by_number = {patch.name[:4]: patch for patch in series}
    entries = _entries(release)
    where = shown(path_of(release))
    if entries is None:
        entries = [{"patches": [number]} for number in by_number]
    named = [number for entry in entries for number in entry["patches"]]
    if named != [*by_number]:
        wrong = next(
            (n for n in [*named, *by_number] if named.count(n) != (n in by_number)),
            "the order",
        )
        raise UserError(
            f"{where}: it must name each patch of the series once, in order; look at "
            f"{wrong}"
        )
    carried = _carried()
    return [
        _change(number, entry, [by_number[n] for n in entry["patches"]], carried, where)
        for number, entry in enumerate(entries, 1)
    ]


def _entries(release: Release) -> list[dict[str, Any]] | None:
    path = path_of(release)
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["change"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise UserError(f"{shown(path)}: {error}; mend the file") from error
    for entry in entries:
        if unknown := entry.keys() - _KEYS:
            raise UserError(f"{shown(path)}: unknown key {min(unknown)}: mend it")
        if not entry.get("patches"):
            raise UserError(f"{shown(path)}: a change names no patches: add them")
        if len(entry["patches"]) > 1 and "title" not in entry:
            raise UserError(
                f"{shown(path)}: the change of {', '.join(entry['patches'])} needs a "
                "title of its own"
            )
    return entries


def _carried() -> dict[str, tuple[str, ...]]:
    """By a patch's title without tags, the releases whose series have it."""
    found: dict[str, list[str]] = {}
    for release in releases.supported():
        for patch in patches.read_series(release).patches:
            found.setdefault(subject(patch.title), []).append(release.version)
    return {title: tuple(versions) for title, versions in found.items()}


def _change(
    number: int,
    entry: dict[str, Any],
    own: Sequence[Patch],
    carried: dict[str, tuple[str, ...]],
    where: str,
) -> Change:
    titles = [subject(patch.title) for patch in own] + entry.get("formerly", [])
    for title in titles:
        if title not in carried:
            raise UserError(f"{where}: no series has a patch {title!r}: mend formerly")
    return Change(
        number=number,
        patches=tuple(own),
        title=entry.get("title") or upstream_title(own[0].title),
        summary=_text(entry, "summary"),
        since=_text(entry, "since"),
        alternatives=_text(entry, "alternatives"),
        alone=entry.get("alone", False),
        related=tuple(
            Related(one["number"], _text(one, "what"), _text(one, "differs"))
            for one in entry.get("related", ())
        ),
        seen_on=_in_order(v for title in titles for v in carried[title]),
    )


def _in_order(versions: Iterable[str]) -> tuple[str, ...]:
    named = set(versions)
    return tuple(r.version for r in releases.supported() if r.version in named)


def _text(entry: dict[str, Any], key: str) -> str:
    return " ".join(entry.get(key, "").split())
