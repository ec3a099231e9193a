# SPDX-License-Identifier: Apache-2.0
"""Carry a release's series to another release, patch by patch.

A patch that conflicts is left out and the next one is tried, so that the whole list is
seen at once. All of it happens in ``build/port/<from>-to-<to>``.
"""

import re
import shutil
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import yaml
from packaging.version import InvalidVersion, Version

from . import build_tree, download, exporting, files, git, index, patches
from . import release as releases
from .errors import UserError
from .patches import Patch, Series
from .paths import build_root, patches_root, shown
from .release import Release

APPLIES = "applies"
UPSTREAM = "applied upstream already"
CONFLICTS = "conflicts"
# It conflicts only because a patch before it was left out.
LATER = "applies later"

# What of a patch's conflicts is said; all of it goes to a file.
_PLACES = 3
_SIDE_LINES = 3
_VERSION_FILE = "vllm/_version.py"
_LINT_FILE = ".pre-commit-config.yaml"
_COMMIT = re.compile(r"^__commit_id__ = commit_id = 'g?([0-9a-f]+)'", re.MULTILINE)


@dataclass(frozen=True)
class Conflict:
    """A place in a file where the release and a patch differ.

    ``line`` is that of the release's file, 0 where there is none; ``ours`` are the
    release's lines there, ``theirs`` the patch's. ``why`` stands where there are none.
    """

    path: str
    line: int = 0
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Attempt:
    """What became of one patch.

    ``merged``: it applies, but not as it stands. ``after``: patches left out before
    it that change the same files.
    """

    patch: Patch
    state: str
    merged: bool = False
    conflicts: tuple[Conflict, ...] = ()
    after: tuple[str, ...] = ()
    full: str = field(default="", repr=False)


def target(source: Release, version: str, backwards: bool) -> tuple[Release, bool]:
    """The release to port to, and whether it has a folder already.

    What its folder would hold is taken from the source and from its sdist, which is
    fetched if it is not in the cache.

    Raises:
        UserError: it is no version, not newer, or on no index; or the source has no
            series.
    """
    version = version.strip().removeprefix("v")
    try:
        new, old = Version(version), Version(source.version)
    except InvalidVersion as error:
        raise UserError(
            f"TO={version} is no version: give one such as 0.34.0"
        ) from error
    if not patches.listed(source.folder):
        raise UserError(f"{shown(source.folder)} has no patches: nothing to port")
    if new == old:
        raise UserError(f"FROM= and TO= are both {version}: name two releases")
    if new < old and not backwards:
        raise UserError(
            f"vLLM {version} is older than {source.version}: give BACK=1 to port to an "
            "older release"
        )
    for known in releases.supported():
        if Version(known.version) == new:
            return known, True
    name = f"vllm-{version}.tar.gz"
    bare = replace(
        source,
        version=version,
        folder=patches_root() / version,
        sdist_name=name,
        sdist_sha256=download.find_digest(name),
    )
    commit, ruff = _read_sdist(index.fetch(bare))
    return replace(
        bare, upstream_commit=commit, lint_ruff=ruff or bare.lint_ruff
    ), False


def _read_sdist(archive: Path) -> tuple[str, str | None]:
    """The commit that an sdist was cut from, and the ruff that its lint pins."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                if path in (_VERSION_FILE, _LINT_FILE):
                    found[path] = tar.extractfile(member).read().decode()
                if len(found) == 2:
                    break
    except (tarfile.TarError, EOFError) as error:
        raise UserError(
            f"{archive.name} cannot be unpacked ({error}): remove {archive} and retry"
        ) from error
    commit = _COMMIT.search(found.get(_VERSION_FILE, ""))
    hooks = yaml.safe_load(found.get(_LINT_FILE, "")) or {}
    ruff = next(
        (
            f"ruff=={repo['rev'].removeprefix('v')}"
            for repo in hooks.get("repos", ())
            if str(repo.get("repo", "")).endswith("/ruff-pre-commit")
        ),
        None,
    )
    return commit[1] if commit else "unknown", ruff


def folder_of(source: Release, new: Release) -> Path:
    """Where the attempts lie."""
    return build_root() / "port" / f"{source.version}-to-{new.version}"


def start(source: Release, new: Release) -> git.Repo:
    """A fresh work tree of the new release that knows the source's files.

    Raises:
        UserError: a tree cannot be built, or somebody edited the work tree of an
            earlier run.
    """
    folder = folder_of(source, new)
    with files.lock(build_root() / ".lock"):
        old = build_tree.ensure_base(source)
        base = build_tree.ensure_base(new)
        work = base.at(folder / "tree")
        _remove(base, work, folder)
        folder.mkdir(parents=True, exist_ok=True)
        git.add_blobs(
            base,
            patches.contents(
                patches.read_series(source), partial(old.content, build_tree.BASE)
            ),
        )
        base.run("worktree", "add", "-q", "--detach", str(work.path), build_tree.BASE)
    return work


def _remove(base: git.Repo, work: git.Repo, folder: Path) -> None:
    """Remove what an earlier run left, but nothing that somebody did there since."""
    tip = folder / "tip"
    if tip.exists() and (work.path / ".git").exists() and work.ok("rev-parse", "HEAD"):
        known = tip.read_text(encoding="utf-8").strip()
        if work.commit_id("HEAD") != known or work.changes(untracked=False):
            raise UserError(
                f"{shown(work.path)} was edited since make port left it: move "
                f"{shown(folder)} away or remove it first"
            )
    if folder.exists():
        shutil.rmtree(folder)
    base.run("worktree", "prune")


def finish(work: git.Repo) -> None:
    """Remember what the work tree is like, so that edits are seen."""
    tip = work.path.parent / "tip"
    files.replace(tip, f"{work.commit_id('HEAD')}\n".encode())


def attempts(work: git.Repo, series: Series) -> Iterator[Attempt]:
    """Try each patch on what the ones before it left.

    A patch that builds on one that was left out would conflict for that alone, so it
    is tried on a sketch as well: there each conflict is decided for the patch. The work
    tree itself gets only what applies.
    """
    left_out: list[Patch] = []
    sketch: str | None = None
    for patch in series.patches:
        before = work.commit_id("HEAD")
        found = _attempt(work, patch)
        tip = work.commit_id("HEAD")
        if sketch or found.state == CONFLICTS:
            work.run("checkout", "-q", "--detach", sketch or before)
            mended = _attempt(work, patch, decide=True)
            sketch = work.commit_id("HEAD")
            work.run("checkout", "-q", "--detach", tip)
            if found.state == CONFLICTS:
                paths = {file.path for file in patch.files}
                after = tuple(
                    earlier.name[:4]
                    for earlier in left_out
                    if any(file.path in paths for file in earlier.files)
                )
                if mended.state == CONFLICTS or not after:
                    found = mended if mended.state == CONFLICTS else found
                else:
                    found = Attempt(patch, LATER, after=after)
        if found.state in (CONFLICTS, LATER):
            left_out.append(patch)
        yield found


def _attempt(work: git.Repo, patch: Patch, decide: bool = False) -> Attempt:
    """Apply a patch or leave the tree as it is; ``decide``: conflicts for the patch."""
    before = work.commit_id("HEAD")
    done = git.am(work, patch.path)
    if not done.returncode:
        if work.commit_id("HEAD") == before:
            return Attempt(patch, UPSTREAM)
        blobs = work.blobs("HEAD", [file.path for file in patch.files])
        merged = any(blobs.get(file.path) != file.new_blob for file in patch.files)
        return Attempt(patch, APPLIES, merged)
    conflicts = tuple(_conflicts(work))
    full = work.out("diff", *git.DIFF)
    decided = decide and conflicts and _decide(work)
    if not decided:
        work.run("am", "--abort", check=False)
        work.run("reset", "-q", "--hard", before)
        work.run("clean", "-q", "-f", "-d")
        if work.ok("apply", "--check", "-R", str(patch.path)):
            return Attempt(patch, UPSTREAM)
    if not conflicts:
        fault = (done.stderr or done.stdout).decode(errors="replace").splitlines()
        where = patches.conflict(patch, partial(work.content, "HEAD"))
        conflicts = (Conflict(where or patch.files[0].path, why=(fault or [""])[-1]),)
    return Attempt(patch, CONFLICTS, False, conflicts, full=full)


def _decide(work: git.Repo) -> bool:
    """End the merge with the patch's side of each conflict; whether that worked."""
    for path in git.unmerged(work):
        if not {"2", "3"} <= _stages(work, path):
            work.run("rm", "-q", "-f", "--ignore-unmatch", "--", path, check=False)
            continue
        text = (work.path / path).read_bytes()
        (work.path / path).write_bytes(with_theirs(text))
        work.run("add", "-f", "--", path)
    return work.ok("am", "--continue")


def with_theirs(text: bytes) -> bytes:
    """A file with the second side in place of each conflict that git marked."""
    lines = []
    side = ""
    for line in patches.split_lines(text):
        if line.startswith(b"<<<<<<< "):
            side = "ours"
        elif line == b"=======\n" and side == "ours":
            side = "theirs"
        elif line.startswith(b">>>>>>> ") and side == "theirs":
            side = ""
        elif side != "ours":
            lines.append(line)
    return b"".join(lines)


def _stages(work: git.Repo, path: str) -> set[str]:
    """The sides that a conflict has: "1" the base's, "2" ours, "3" the patch's."""
    return {line.split()[2] for line in work.lines("ls-files", "-u", "--", path)}


def _conflicts(work: git.Repo) -> Iterator[Conflict]:
    for path in git.unmerged(work):
        stages = _stages(work, path)
        if "2" not in stages:
            yield Conflict(path, why="the release has no such file")
        elif "3" not in stages:
            yield Conflict(path, why="the patch removes it, and it was changed")
        else:
            text = (work.path / path).read_text(encoding="utf-8", errors="replace")
            yield from places(path, text)


def places(path: str, text: str) -> Iterator[Conflict]:
    """The conflicts that git marked in a file."""
    line = 1
    ours: list[str] = []
    theirs: list[str] = []
    side: list[str] | None = None
    for each in text.splitlines():
        if each.startswith("<<<<<<< "):
            ours, theirs = [], []
            side = ours
        elif each == "=======" and side is ours:
            side = theirs
        elif each.startswith(">>>>>>> ") and side is theirs:
            yield Conflict(path, line - len(ours), tuple(ours), tuple(theirs))
            side = None
        else:
            if side is not None:
                side.append(each)
            line += side is not theirs
    return


def said(attempt: Attempt, release: Release) -> list[str]:
    """An attempt in words, a line each."""
    words = attempt.state
    if attempt.merged:
        words += ", merged with the release's own changes"
    if attempt.state == LATER:
        words = f"applies once {_some(attempt.after)} do"
    lines = [f"{attempt.patch.name[:4]} {attempt.patch.title}: {words}"]
    for conflict in attempt.conflicts[:_PLACES]:
        where = f"{conflict.path}:{conflict.line}" if conflict.line else conflict.path
        lines.append(f"  {where}{': ' if conflict.why else ''}{conflict.why}")
        if not conflict.why:
            lines += _side(release.version, conflict.ours)
            lines += _side("the patch", conflict.theirs)
    if len(attempt.conflicts) > _PLACES:
        more = attempt.conflicts[_PLACES:]
        paths = dict.fromkeys(conflict.path for conflict in more)
        lines.append(f"  … {len(more)} more in {', '.join(paths)}")
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[: 2 if more else 3]) + more


def _side(name: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return [f"    {name}: nothing"]
    found = [f"    {name}:", *(f"      | {line}" for line in lines[:_SIDE_LINES])]
    if len(lines) > _SIDE_LINES:
        found.append(f"      … {len(lines) - _SIDE_LINES} more")
    return found


def write_series(work: git.Repo, folder: Path) -> list[str]:
    """Write the work tree's commits to a folder as a series; the patches' names."""
    names = [path.name for path in exporting.format_series(work, folder)]
    head = "# The patches of this release, in the order in which they apply.\n"
    text = head + "".join(f"{name}\n" for name in names)
    files.replace(folder / "series", text.encode())
    return names


def facts(source: Release, new: Release) -> str:
    """The text of the new release's ``release.toml``, from that of the source."""
    text = (source.folder / "release.toml").read_text(encoding="utf-8")
    for key, value in (
        ("version", f'"{new.version}"'),
        ("upstream_commit", f'"{new.upstream_commit}"'),
        ("name", f'"{new.sdist_name}"'),
        ("sha256", f'"{new.sdist_sha256}"'),
        ("ruff", f'"{new.lint_ruff}"'),
        ("block_bytes", f"{new.dsv4_block_bytes:_}"),
    ):
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
    # How the source differs from its neighbours says nothing of the new one.
    head, sdist, rest = text.partition("\n[sdist]\n")
    first, *others = head.splitlines()
    own = f"# Carried from {source.version} by make port: say here what differs."
    text = "\n".join([first, own, *(x for x in others if x and x[0] != "#")])
    text += f"\n{sdist}{rest}"
    # Whether the new release has a package for processors is not known.
    text = re.sub(r"(?m)\n(?:^#.*\n)*^\[e2e\]\n(?:^\w+ = .*\n)*", "", text)
    tomllib.loads(text)
    return text


def write_folder(source: Release, new: Release, work: git.Repo) -> list[str]:
    """Make ``patches/<new>``, whole or not at all; the patches' names.

    Raises:
        UserError: it is there already.
    """
    if new.folder.exists():
        raise UserError(f"{shown(new.folder)} is there already: it is left alone")
    folder = Path(mkdtemp(prefix=".new-", dir=new.folder.parent))
    try:
        names = write_series(work, folder)
        text = facts(source, new)
        files.replace(folder / "release.toml", text.encode())
        folder.chmod(0o755)
        folder.rename(new.folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Read back: what was written is what the other commands will find.
    releases.read(new.folder)
    patches.read_series(new).chains()
    return names


def drop(source: Release, new: Release) -> None:
    """Remove the work tree; what was written beside it stays."""
    with files.lock(build_root() / ".lock"):
        folder = folder_of(source, new)
        shutil.rmtree(folder / "tree")
        build_tree.ensure_base(new).run("worktree", "prune")
