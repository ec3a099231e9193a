# SPDX-License-Identifier: Apache-2.0
"""A release's series, read from its patch files alone.

Reading and placing hunks is our own: the libraries that apply patches look at one line
number only, ignore line ends, and write as they go, and none is in vLLM's images, where
this module runs on what is there.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email import policy
from email.parser import BytesParser
from hashlib import sha1, sha256
from io import BytesIO
from itertools import pairwise
from pathlib import Path

from .errors import UserError
from .paths import shown
from .release import Release

_INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", re.MULTILINE)
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)
_HUNK_HEAD = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n", re.MULTILINE)
# Of a line in a hunk: on which sides it stands, the old (0) and the new (1).
_SIDES = {b" ": (0, 1), b"-": (0,), b"+": (1,)}
_ABSENT = "0" * 40


@dataclass(frozen=True)
class Hunk:
    """One hunk: at line ``start`` (from 1) the lines ``old`` become ``new``.

    Lines are bytes with their line end; ``changed`` is the first and the last line,
    in the old file, that the hunk really changes.
    """

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    changed: tuple[int, int]


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file; a blob id of None means that there is no file."""

    path: str
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]
    executable: bool


@dataclass(frozen=True)
class Patch:
    """One patch file in git's mail format."""

    path: Path
    title: str
    author: str
    date: str
    files: tuple[FileChange, ...]

    @property
    def name(self) -> str:
        """The name of the file, as in ``series``."""
        return self.path.name


@dataclass(frozen=True)
class Series:
    """The patches of one release, in order."""

    release: Release
    patches: tuple[Patch, ...]

    def chains(self) -> dict[str, tuple[str | None, ...]]:
        """For each touched file its blob id before the series and after each patch.

        Every chain has ``len(patches) + 1`` entries.

        Raises:
            UserError: a patch does not start from what the patches before it leave.
        """
        chains: dict[str, list[str | None]] = {}
        for number, patch in enumerate(self.patches):
            for file in patch.files:
                chain = chains.setdefault(file.path, [file.old_blob])
                chain += chain[-1:] * (number + 1 - len(chain))
                if chain[-1] != file.old_blob:
                    raise UserError(
                        f"{patch.name}: {file.path} starts from {file.old_blob}, the "
                        f"patches before it leave {chain[-1]}: mend the order in "
                        "series or run make edit and make export"
                    )
                chain.append(file.new_blob)
        length = len(self.patches) + 1
        return {
            path: tuple(chain + chain[-1:] * (length - len(chain)))
            for path, chain in chains.items()
        }


class HunkMismatch(Exception):
    """A hunk whose old lines are not in the file; ``number`` counts from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"hunk {number}")
        self.number = number


def blob_id(data: bytes | None) -> str | None:
    """git's id of a file with this content, None for no file."""
    if data is None:
        return None
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def listed(folder: Path) -> list[str]:
    """The patch file names in ``series``.

    Raises:
        UserError: there is no ``series`` or it cannot be read.
    """
    path = folder / "series"
    try:
        return names_in(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{shown(path)} is missing: write it with make export"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{shown(path)} cannot be read: {error}") from error


def names_in(text: str) -> list[str]:
    """The patch file names that the text of a ``series`` lists."""
    lines = text.splitlines()
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def read_series(release: Release) -> Series:
    """Read every patch of a release.

    Raises:
        UserError: a listed patch is missing, is listed twice, lies elsewhere or is no
            patch of the expected form.
    """
    names = listed(release.folder)
    for name in names:
        if Path(name).name != name or names.count(name) > 1:
            raise UserError(
                f"{shown(release.folder / 'series')} lists {name}: list each patch of "
                "its folder once"
            )
    return Series(release, tuple(read_patch(release.folder / n) for n in names))


def series_digest(series: Series) -> str:
    """A digest of every byte of the series, in order."""
    digest = sha256()
    for patch in series.patches:
        digest.update(sha256(patch.path.read_bytes()).digest())
    return digest.hexdigest()


def read_patch(path: Path) -> Patch:
    """Read one patch file.

    Raises:
        UserError: it is missing, is not in git's mail format, or lacks full blob ids.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{shown(path)} cannot be read ({error.strerror}), but series lists it: "
            "restore it or run make export"
        ) from error
    mail = BytesParser(policy=policy.default).parsebytes(data, headersonly=True)
    for header in ("From", "Date", "Subject"):
        if not mail[header]:
            raise UserError(
                f"{shown(path)}: no {header} line: write it with make export"
            )
    if not _DIFF.search(data):
        raise UserError(f"{shown(path)}: there is no diff in it: remove it from series")
    try:
        # No line of a hunk starts like that.
        starts = [match.start() for match in _DIFF.finditer(data)] + [len(data)]
        files = tuple(_file_change(data[a:b]) for a, b in pairwise(starts))
    except ValueError as error:
        raise UserError(f"{shown(path)}: {error}: write it with make export") from error
    return Patch(
        path=path,
        title=re.sub(r"^\[PATCH[^\]]*\] *", "", " ".join(mail["Subject"].split())),
        author=str(mail["From"]),
        date=str(mail["Date"]),
        files=files,
    )


def _file_change(diff: bytes) -> FileChange:
    head, *hunks = _HUNK_HEAD.split(diff)
    facts = head.decode("utf-8", "surrogateescape")
    names = facts.partition("\n")[0].removeprefix("diff --git ")
    path = names[2 : len(names) // 2]
    if names != f"a/{path} b/{path}" or "\nGIT binary" in facts:
        raise ValueError(f"{names} is binary or renamed")
    ids = _INDEX.search(facts)
    if not ids or any(len(blob) != 40 for blob in ids.groups()):
        raise ValueError(f"{path} has no index line with full blob ids")
    old, new = (None if blob == _ABSENT else blob for blob in ids.groups())
    # The split leaves four parts of each hunk: where it starts, its two lengths, its
    # lines.
    parts = zip(*[iter(hunks)] * 4, strict=True)
    return FileChange(
        path, old, new, tuple(_hunk(*part) for part in parts), "mode 100755" in facts
    )


def _hunk(start: bytes, old_length: bytes, new_length: bytes, body: bytes) -> Hunk:
    first = int(start)
    old_left, new_left = (int(n) if n else 1 for n in (old_length, new_length))
    old: list[bytes] = []
    new: list[bytes] = []
    changed: list[int] = []
    last: tuple[list[bytes], ...] = ()
    for line in split_lines(body):
        kind, value = line[:1], line[1:]
        if kind == b"\\":
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        if len(old) == old_left and len(new) == new_left:
            break  # the mail's signature follows
        if kind not in _SIDES:
            raise ValueError(f"the hunk at line {first} has a line that starts oddly")
        last = tuple((old, new)[side] for side in _SIDES[kind])
        for side in last:
            side.append(value)
        if len(last) == 1:
            changed.append(first + len(old) - (kind == b"-"))
    if (len(old), len(new)) != (old_left, new_left):
        raise ValueError(f"the hunk at line {first} has not the lines that it says")
    if not changed:
        raise ValueError(f"the hunk at line {first} changes nothing")
    return Hunk(first, tuple(old), tuple(new), (changed[0], max(changed)))


def split_lines(data: bytes) -> list[bytes]:
    """``data`` as lines with their ends; only a line feed ends a line, as for git."""
    return BytesIO(data).readlines()


def _place(lines: Sequence[bytes], hunk: Hunk, wanted: int, first: int) -> int | None:
    """The index, from ``first`` on and nearest to ``wanted``, where ``hunk`` fits."""
    old = list(hunk.old)
    if not old:
        return 0 if not lines else None
    last = len(lines) - len(old)
    for at in sorted(range(first, last + 1), key=lambda at: abs(at - wanted)):
        if lines[at] == old[0] and lines[at : at + len(old)] == old:
            return at
    return None


def apply_hunks(data: bytes, hunks: Sequence[Hunk]) -> bytes:
    """Apply all hunks; each may have moved as a whole, but its lines must be there.

    Raises:
        HunkMismatch: for the first hunk that has no place.
    """
    lines = split_lines(data)
    result: list[bytes] = []
    done = 0
    drift = 0
    for number, hunk in enumerate(hunks, 1):
        wanted = max(hunk.start - 1, 0)
        at = _place(lines, hunk, wanted + drift, done)
        if at is None:
            raise HunkMismatch(number)
        drift = at - wanted
        result += lines[done:at]
        result += hunk.new
        done = at + len(hunk.old)
    return b"".join(result + lines[done:])


def apply_file(data: bytes | None, file: FileChange) -> bytes | None:
    """What ``file`` makes of ``data``, None where there is no file.

    Raises:
        HunkMismatch: for the first hunk that has no place.
    """
    if (data is None) != (file.old_blob is None):
        raise HunkMismatch(1)
    result = apply_hunks(data or b"", file.hunks)
    if file.new_blob is None:
        if result:
            raise HunkMismatch(1)
        return None
    return result


def contents(series: Series, read: Callable[[str], bytes | None]) -> Iterator[bytes]:
    """What the series' files hold before each patch, which a three-way merge needs.

    ``read`` returns a file's content before the series. A file that is not the one the
    series starts from is left out.
    """
    files: dict[str, bytes | None] = {}
    for patch in series.patches:
        for file in patch.files:
            if file.path not in files:
                files[file.path] = read(file.path)
            data = files[file.path]
            if blob_id(data) != file.old_blob:
                continue
            if data is not None:
                yield data
            files[file.path] = apply_file(data, file)


def conflict(
    patch: Patch, read: Callable[[str], bytes | None], only: Sequence[str] = ()
) -> str:
    """The file and hunk of ``patch`` that does not fit, as a message says it.

    ``read`` returns a file's content; ``only`` limits the search to some files. Empty
    if every hunk fits.
    """
    for file in patch.files:
        if only and file.path not in only:
            continue
        data = read(file.path)
        if data is None and file.old_blob:
            return f"{file.path} (the file is not there)"
        if data is not None and not file.old_blob:
            return f"{file.path} (the file is there already)"
        try:
            apply_file(data, file)
        except HunkMismatch as error:
            hunk = file.hunks[error.number - 1]
            return (
                f"{file.path}, hunk {error.number} of {len(file.hunks)} "
                f"(lines {hunk.start}-{hunk.start + max(len(hunk.old) - 1, 0)})"
            )
    return ""


def fit(
    files: Sequence[FileChange], read: Callable[[str], bytes | None]
) -> tuple[int, int]:
    """How many hunks have their old lines in the files, and of how many hunks."""
    found = total = 0
    for file in files:
        lines = split_lines(read(file.path) or b"")
        hunks = [hunk for hunk in file.hunks if hunk.old]
        total += len(hunks)
        found += sum(_place(lines, h, h.start - 1, 0) is not None for h in hunks)
    return found, total
