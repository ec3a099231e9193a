# SPDX-License-Identifier: Apache-2.0
"""The vllm package of a container image: patched for good, with a record of it.

With the patched files come their bytecode, a licence and the record, an SPDX document,
and nothing else. All get the series' date: the same series makes the same bytes.
"""

import hashlib
import json
import os
import py_compile
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

from . import installed, patches, release
from .errors import UserError
from .installed import Package
from .paths import ROOT
from .release import Release

# No Python name, so it can't be imported.
FOLDER = "offload-parity"
RECORD = "record.spdx.json"


@dataclass(frozen=True)
class Record:
    """What an image's record says; ``files`` has the sha256 of each."""

    release: str
    series: str
    revision: str
    files: dict[str, str]


def folder(package: Package) -> Path:
    """Where the record and the licence lie."""
    return package.folder / FOLDER


def digest(wanted: Release) -> str:
    """The digest of a release's series, as record and label name it."""
    return patches.series_digest(patches.read_series(wanted))


def date(series: patches.Series) -> int:
    """When the newest patch of a series was made, in seconds since 1970."""
    return max(
        int(parsedate_to_datetime(patch.date).timestamp()) for patch in series.patches
    )


def patch(package: Package, version: str, revision: str, out: Path) -> Record:
    """Patch a package that is a release's own, record it and copy what that changed.

    ``out`` stands for the root of the image that is to get it.

    Raises:
        UserError: it is another release, is patched already or is not as published, or
            the series removes a file, which a copy cannot.
    """
    wanted = release.get(version)
    _check_version(package, wanted)
    standing = installed.examine(package, wanted.version)
    if known := read(package):
        raise UserError(
            f"the base image is patched already (vLLM {known.release}, series "
            f"{known.series[:12]}): build on one that is not"
        )
    there = standing.total
    if set(standing.files.values()) != {"patched"}:
        there = standing.applied
    if there or package.backup.exists():
        raise UserError(
            f"the base image is patched already ({there} of {standing.total} patches "
            f"in {package.folder}): build on one that is not"
        )
    foreign = [path for path, state in standing.files.items() if state != "stock"]
    if foreign:
        raise UserError(
            f"the base image's {foreign[0]} is not that of vLLM {wanted.version}, so "
            f"the series does not fit ({len(foreign)} of {len(standing.files)} files "
            "differ): build on an image of the release as published"
        )
    before = {path: package.read(path) for path in standing.files}
    installed.apply(package, wanted.version)
    gone = [path for path in standing.files if not package.file(path).exists()]
    if gone:
        raise UserError(f"the series removes {gone[0]}, and an image's layer cannot")
    _write(package, standing.series, revision, before)
    out.mkdir(parents=True)
    _export(package, out, standing.files, date(standing.series))
    return read(package)


def record(package: Package, version: str, revision: str) -> Record:
    """Record a package that was built from a patched tree, whatever else it changes.

    Raises:
        UserError: it is another release, or a file of the series is as published.
    """
    wanted = release.get(version)
    _check_version(package, wanted)
    standing = installed.examine(package, wanted.version)
    stock = [path for path, state in standing.files.items() if state == "stock"]
    if stock:
        raise UserError(
            f"{package.file(stock[0])} is not patched: run make apply RELEASE="
            f"{wanted.version} and build from that tree"
        )
    _write(package, standing.series, revision, dict.fromkeys(standing.files))
    return read(package)


def read(package: Package) -> Record | None:
    """The record of a package, None if it has none.

    Raises:
        UserError: it cannot be read.
    """
    path = folder(package) / RECORD
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        series = document["packages"][1]
        files = {
            file["fileName"].removeprefix("./"): _sums(file)["SHA256"]
            for file in document["files"]
        }
        return Record(
            release=document["packages"][0]["versionInfo"],
            series=_sums(series)["SHA256"],
            revision=series["versionInfo"],
            files=files,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): start from the image as it was built"
        ) from error


def drifted(package: Package, known: Record) -> list[str]:
    """The files that are no longer as the record says."""
    return [
        path
        for path, sha256 in known.files.items()
        if _sha256(package.read(path) or b"") != sha256
    ]


def ready(package: Package, version: str | None) -> tuple[patches.Series, str]:
    """Patch a package that is about to be served, and say in a word what was done.

    A container may be restarted with another version of the series in place, which is
    taken back first.

    Raises:
        UserError: as ``installed.apply``; the package is then as it was.
    """
    standing = installed.examine(package, version)
    series = standing.series
    known = read(package)
    if known and known.series != patches.series_digest(series):
        raise UserError(
            f"this image was built with another version of the series "
            f"({known.series[:12]}): serve from it as it is, or start from the "
            "official image"
        )
    renew = package.backup.exists() and set(standing.files.values()) != {"patched"}
    if renew and not installed.interrupted(package):
        installed.unapply(package)
    _, new, _ = installed.apply(package, version)
    return series, "patched" if new else "patched already"


def _check_version(package: Package, wanted: Release) -> None:
    try:
        public = Version(package.version).public
    except InvalidVersion:
        public = package.version
    if public == wanted.version:
        return
    supported = release.supported()
    hint = f"set VLLM_VERSION={public}, or another base image"
    if public not in (one.version for one in supported):
        hint = f"there are series for {release.names(supported)}"
    raise UserError(
        f"the base image has vLLM {package.version}, not {wanted.version}: {hint}"
    )


def _sums(element: dict) -> dict[str, str]:
    return {one["algorithm"]: one["checksumValue"] for one in element["checksums"]}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(
    package: Package,
    series: patches.Series,
    revision: str,
    before: dict[str, bytes | None],
) -> None:
    """Write licence and record; ``before`` is what the series' files were."""
    place = folder(package)
    place.mkdir(exist_ok=True)
    document = _document(package, series, revision, before)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    (place / RECORD).write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", place / "LICENSE")


def _export(package: Package, out: Path, paths: Iterable[str], stamp: int) -> None:
    """Copy what the series changed, with bytecode, to where it lies below ``out``."""
    made = [package.file(path) for path in paths]
    # As in the official image; by its hash it is that of its source at any time.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    made += [
        Path(py_compile.compile(str(path), doraise=True, invalidation_mode=mode))
        for path in made
        if path.suffix == ".py"
    ]
    made += folder(package).iterdir()
    for path in made:
        for parent in reversed(path.parents[:-1]):
            like = below(out, parent)
            if not like.exists():
                like.mkdir()
                shutil.copystat(parent, like)
                os.chown(like, parent.stat().st_uid, parent.stat().st_gid)
        shutil.copy2(path, below(out, path))
        os.chown(below(out, path), path.stat().st_uid, path.stat().st_gid)
    # Files before their folders: copying one changes the other's time.
    for path in (*out.rglob("*"), out):
        os.utime(path, (stamp, stamp))


def below(root: Path, path: Path) -> Path:
    """Where an absolute path lies below another root."""
    return root / path.relative_to("/")


def _document(
    package: Package,
    series: patches.Series,
    revision: str,
    before: dict[str, bytes | None],
) -> dict:
    """The record: SPDX 2.3."""
    wanted = series.release
    sha256 = patches.series_digest(series)
    files, changes = [], []
    for number, path in enumerate(sorted(before), 1):
        data = package.read(path) or b""
        change = "FILE_ADDED" if before[path] is None else "FILE_MODIFIED"
        name = f"SPDXRef-File-{number}"
        files.append(
            {
                "SPDXID": name,
                "fileName": f"./{path}",
                "checksums": [
                    _sum("SHA1", hashlib.sha1(data, usedforsecurity=False).hexdigest()),
                    _sum("SHA256", _sha256(data)),
                ],
                "licenseConcluded": "Apache-2.0",
                "copyrightText": "NOASSERTION",
            }
        )
        changes.append(_relation(name, change, "SPDXRef-vllm"))
    made = datetime.fromtimestamp(date(series), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"vllm-{wanted.version}-offload-parity",
        "documentNamespace": f"urn:vllm-offload-parity:{wanted.version}:{sha256}",
        "creationInfo": {"created": made, "creators": ["Tool: vllm-offload-parity"]},
        "packages": [
            _package("vllm", wanted.version)
            | {
                "externalRefs": [
                    {
                        "referenceCategory": "PACKAGE-MANAGER",
                        "referenceType": "purl",
                        "referenceLocator": f"pkg:pypi/vllm@{wanted.version}",
                    }
                ]
            },
            _package("vllm-offload-parity", revision or "unknown")
            | {
                "checksums": [_sum("SHA256", sha256)],
                "comment": f"{len(series.patches)} patches for vLLM {wanted.version}; "
                "the digest is that of the series",
            },
        ],
        "files": files,
        "relationships": [
            _relation("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-vllm"),
            _relation("SPDXRef-vllm-offload-parity", "PATCH_APPLIED", "SPDXRef-vllm"),
            *changes,
        ],
    }


def _package(name: str, version: str) -> dict:
    return {
        "SPDXID": f"SPDXRef-{name}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "Apache-2.0",
        "licenseDeclared": "Apache-2.0",
        "copyrightText": "NOASSERTION",
    }


def _sum(algorithm: str, value: str) -> dict[str, str]:
    return {"algorithm": algorithm, "checksumValue": value}


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {
        "spdxElementId": one,
        "relationshipType": kind,
        "relatedSpdxElement": other,
    }
