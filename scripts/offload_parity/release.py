# SPDX-License-Identifier: Apache-2.0
"""The vLLM releases this project has a patch series for.

``patches/<release>/release.toml`` holds a release's facts; a release is supported
when its folder is there.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .errors import UserError
from .paths import patches_root, shown


@dataclass(frozen=True)
class UnitTests:
    """What a release's own unit tests need, see ``release.toml``."""

    python: str
    torch: str
    requirements: str
    packages: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class EndToEnd:
    """What ``make e2e`` installs for a release, see ``release.toml``."""

    package: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """One vLLM release and the folder that holds its series."""

    version: str
    folder: Path
    upstream_commit: str
    sdist_name: str
    sdist_sha256: str
    unit_tests: UnitTests = field(repr=False)
    lint_ruff: str
    dsv4_block_bytes: int
    e2e: EndToEnd | None = field(default=None, repr=False)

    @property
    def branch(self) -> str:
        """The branch that holds the series, in a built tree and in a checkout."""
        return f"offload-parity/{self.version}"


def read(folder: Path) -> Release:
    """Read one release's facts.

    Raises:
        UserError: ``release.toml`` is not TOML, lacks a key, names another release
            or what is no version.
    """
    path = folder / "release.toml"
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
        tests = facts["unit_tests"]
        release = Release(
            version=facts["version"],
            folder=folder,
            upstream_commit=facts["upstream_commit"],
            sdist_name=facts["sdist"]["name"],
            sdist_sha256=facts["sdist"]["sha256"],
            unit_tests=UnitTests(
                python=tests["python"],
                torch=tests["torch"],
                requirements=tests["requirements"],
                packages=tuple(tests["packages"]),
                paths=tuple(tests["paths"]),
            ),
            lint_ruff=facts["lint"]["ruff"],
            dsv4_block_bytes=facts["deepseek_v4"]["block_bytes"],
            e2e=_end_to_end(facts["e2e"]) if "e2e" in facts else None,
        )
        Version(release.version)
    except KeyError as error:
        raise UserError(f"{shown(path)}: the key {error} is missing; add it") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{shown(path)}: {error}; mend the file") from error
    if release.version != folder.name:
        raise UserError(
            f"{shown(path)}: version is {release.version!r} but the folder is named "
            f"{folder.name!r}; make them equal"
        )
    return release


def _end_to_end(facts: dict) -> EndToEnd:
    return EndToEnd(facts["package"], tuple(facts["packages"]))


def with_cpu_package() -> tuple[Release, ...]:
    """The releases whose compiled CPU backend can be installed, newest first."""
    return tuple(release for release in supported() if release.e2e)


def supported() -> tuple[Release, ...]:
    """Every supported release, newest first.

    Raises:
        UserError: there is none, or one of them cannot be read.
    """
    root = patches_root()
    releases = [read(path.parent) for path in root.glob("*/release.toml")]
    if not releases:
        raise UserError(f"no release in {shown(root)}: expected <release>/release.toml")
    return tuple(sorted(releases, key=lambda r: Version(r.version), reverse=True))


def default() -> Release:
    """The newest supported release."""
    return supported()[0]


def names(releases: tuple[Release, ...]) -> str:
    """The releases' versions as a sentence lists them."""
    return ", ".join(release.version for release in releases)


def nearest(version: str) -> Release | None:
    """The supported release nearest to ``version``, None if that is no version."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None

    def place(at: Version) -> int:
        return at.major * 10**6 + at.minor * 10**3 + at.micro

    return min(
        supported(), key=lambda r: abs(place(Version(r.version)) - place(wanted))
    )


def unsupported(version: str) -> str:
    """The part of a refusal that says what is supported instead of ``version``."""
    releases = supported()
    near = nearest(version)
    hint = f", the nearest is {near.version}" if near and len(releases) > 1 else ""
    return f"vLLM {version} is not supported (supported: {names(releases)}{hint})"


def get(version: str | None, variable: str = "RELEASE") -> Release:
    """The release named ``version`` (a leading "v" is fine); None means the default.

    ``variable``: of make, in which it is named.

    Raises:
        UserError: it is not supported; the message names those that are.
    """
    version = (version or "").strip()
    if not version:
        return default()
    for release in supported():
        if release.version == version.removeprefix("v"):
            return release
    raise UserError(f"{unsupported(version)}; choose one with {variable}=")


def chosen(version: str | None) -> tuple[Release, ...]:
    """The release named, or all supported ones.

    Raises:
        UserError: as ``get``.
    """
    return (get(version),) if version else supported()


def in_full(version: str | None) -> tuple[Release, ...]:
    """The release named, or the newest and the oldest, for what takes minutes each.

    What lies between has parts of both.

    Raises:
        UserError: as ``get``.
    """
    found = chosen(version)
    return found[:1] + found[1:][-1:]
