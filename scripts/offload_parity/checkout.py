# SPDX-License-Identifier: Apache-2.0
"""Apply a series to a git checkout of vLLM that somebody already has.

The work is done in a temporary work tree. The user's own files change in one step, a
switch to the new branch, once everything has applied.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import build_tree, git, index, patches, release
from .build_tree import WHO
from .errors import UserError
from .files import folder_lock, lock
from .paths import build_root, expanded
from .release import Release
from .signals import uninterrupted

# How many commits that touch the series' files are searched for a release.
_SEARCHED = 500


@dataclass(frozen=True)
class Standing:
    """How far a checkout has a series.

    ``base`` is the commit at which the files are those of the release, None if there
    is none. ``applied`` has one entry per patch. ``ours``: no release was recognised,
    but the branch that ``apply`` made.
    """

    series: patches.Series
    base: str | None
    applied: tuple[bool, ...]
    ours: bool = False

    @property
    def full(self) -> bool:
        """Whether every patch is applied."""
        return all(self.applied)

    @property
    def partly(self) -> bool:
        """Whether some are and some are not."""
        return any(self.applied) and not self.full

    def named(self, applied: bool) -> str:
        """The names of the patches that are (or are not) applied."""
        return ", ".join(
            patch.name
            for patch, is_applied in zip(self.series.patches, self.applied, strict=True)
            if is_applied == applied
        )


def open_checkout(path: Path) -> git.Repo:
    """The repository of the user's checkout.

    Raises:
        UserError: ``path`` is not the top folder of a git checkout of vLLM.
    """
    path = expanded(path).absolute()
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name a git checkout of vLLM")
    repo = git.Repo(path)
    done = repo.run("rev-parse", "--show-toplevel", check=False)
    top = Path(done.stdout.decode("utf-8", "surrogateescape").rstrip("\n"))
    fault = done.stderr.decode(errors="replace")
    if "dubious ownership" in fault:
        raise UserError(
            f"{path} belongs to another user: allow it with git config --global --add "
            f"safe.directory {path}"
        )
    is_vllm = (path / "vllm" / "__init__.py").is_file() and (path / "vllm/v1").is_dir()
    if not is_vllm:
        above = [p for p in path.parents if (p / "vllm/v1").is_dir()]
        hint = (
            f": name {above[0]}"
            if above
            else " (no vllm/v1 in it): name a git checkout of vLLM"
        )
        raise UserError(f"{path} is not the top of a vLLM tree{hint}")
    if done.returncode or not top.samefile(path):
        raise UserError(
            f"{path} is a vLLM tree but no git checkout: use make apply without VLLM=, "
            "or PYTHON= for an installed package"
        )
    if repo.commit_id("HEAD") is None:
        raise UserError(f"{path} has no commit yet: commit the release's files first")
    return repo


def examine(repo: git.Repo, version: str | None) -> Standing:
    """Recognise the release that a checkout is at and how far it has the series.

    The release is the one whose files an ancestor of HEAD has, whatever the commits
    on top of it did; else the one whose series ``apply`` put there. ``version``
    overrides that.

    Raises:
        UserError: no supported release is recognised.
    """
    candidates = _candidates(version)
    if standing := _examine(repo, candidates):
        return standing
    if version is None:
        raise UserError(
            f"{_unrecognised(repo, candidates)}; make apply VLLM= tries each series"
        )
    return Standing(candidates[0], None, _applied(repo, candidates[0], None))


def _candidates(version: str | None) -> tuple[patches.Series, ...]:
    """The series that may be meant, the newest release's first."""
    wanted = (release.get(version),) if version else release.supported()
    candidates = tuple(patches.read_series(each) for each in wanted)
    candidates = tuple(series for series in candidates if series.patches)
    if not candidates:
        raise UserError("the series has no patches yet: nothing to apply")
    return candidates


def _examine(repo: git.Repo, candidates: tuple[patches.Series, ...]) -> Standing | None:
    """The standing to a release that is recognised, None if none is."""
    if found := _recognise(repo, candidates):
        series, base = found
        return Standing(series, base, _applied(repo, series, base))
    return _on_our_branch(repo, candidates)


def _on_our_branch(
    repo: git.Repo, candidates: tuple[patches.Series, ...]
) -> Standing | None:
    """The series whose branch is checked out, as ``apply`` left it or with more."""
    for series in candidates:
        branch = series.release.branch
        tip = _setting(repo, branch, "Tip")
        if (
            repo.branch() == branch
            and repo.commit_id(tip)
            and repo.ok("merge-base", "--is-ancestor", tip, "HEAD")
        ):
            start = _setting(repo, branch, "Start")
            return Standing(series, start, (True,) * len(series.patches), ours=True)
    return None


def _setting(repo: git.Repo, branch: str, name: str) -> str:
    """What ``apply`` noted of its branch, empty if nothing."""
    done = repo.run(
        "config", "--get", f"branch.{branch}.offloadParity{name}", check=False
    )
    return done.stdout.decode().strip()


def apply(repo: git.Repo, version: str | None) -> tuple[Standing, bool]:
    """Apply the series on a new branch; False if it was applied already.

    Raises:
        UserError: anything is in the way; the checkout is then as it was.
    """
    with _locked(repo):
        _remove_left_worktrees(repo)
        return _apply(repo, version)


def _apply(repo: git.Repo, version: str | None) -> tuple[Standing, bool]:
    if what := repo.in_progress():
        raise UserError(
            f"{repo.path}: another {what} is in progress; finish or abort it first"
        )
    candidates = _candidates(version)
    standing = _examine(repo, candidates)
    if standing is None:
        # A commit between releases: the series that fits best is tried first.
        todo = sorted(
            candidates, key=lambda series: _fit(repo, series).share, reverse=True
        )
        standings = [Standing(s, None, _applied(repo, s, None)) for s in todo]
    elif standing.full:
        return standing, False
    else:
        standings = [standing]
    if changed := repo.changes(untracked=False):
        raise UserError(
            f"{repo.path} has uncommitted changes, such as {changed[0]}: commit or "
            "stash them first"
        )
    start = repo.commit_id("HEAD")
    known = repo.ok("-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT")
    worker = git.Repo(repo.path, who=None if known else WHO)
    faults: list[str] = []
    with worker.worktree(start) as work:
        for one in standings:
            try:
                _refuse(repo, one)
                if one.base is None:
                    git.add_blobs(repo, _known_contents(repo, one.series))
                for patch in one.series.patches:
                    _am(repo, work, patch, one.series.release)
                tip = work.commit_id("HEAD")
                break
            except UserError as error:
                faults.append(str(error))
                work.run("am", "--abort", check=False)
                work.run("reset", "-q", "--hard", start)
        else:
            if len(standings) == 1:
                raise UserError(faults[0])
            raise UserError(
                f"{_unrecognised(repo, candidates)}; no series applies as a whole: "
                f"{faults[0]}"
            )
    with uninterrupted():
        _switch(repo, one.series.release.branch, start, tip)
    return one, True


def _refuse(repo: git.Repo, standing: Standing) -> None:
    """Refuse what is in the way of a series that is to be applied."""
    wanted = standing.series.release
    if standing.partly:
        raise UserError(
            f"{repo.path} has part of the series for {wanted.version}: applied "
            f"{standing.named(True)}; missing {standing.named(False)}; go back to a "
            "commit without them first"
        )
    if repo.commit_id(f"refs/heads/{wanted.branch}"):
        raise UserError(
            f"{repo.path} has a branch {wanted.branch} already: switch to it or rename "
            f"it (git branch -m {wanted.branch} old)"
        )
    tracked = repo.blobs("HEAD", standing.series.chains())
    for path, chain in standing.series.chains().items():
        if chain[0] is None and path not in tracked and (repo.path / path).exists():
            raise UserError(
                f"{repo.path} has a file {path} that git does not know and the series "
                "adds: move it away first"
            )


def _known_contents(repo: git.Repo, series: patches.Series) -> Iterator[bytes]:
    """What a three-way merge of the series needs of its release's files.

    They come from the checkout's history, or from the release if that is built or in
    the cache; nothing is downloaded for it.
    """
    first = {path: chain[0] for path, chain in series.chains().items()}
    built: list[git.Repo] = []

    def read(path: str) -> bytes | None:
        if first[path] is None:
            return None
        done = repo.run("cat-file", "blob", first[path], check=False)
        if not done.returncode:
            return done.stdout
        if not built and (
            build_tree.existing(series.release) or index.cached(series.release)
        ):
            with lock(build_root() / ".lock"):
                built.append(build_tree.ensure_base(series.release))
        return built[0].content(build_tree.BASE, path) if built else None

    return patches.contents(series, read)


def unapply(repo: git.Repo, version: str | None) -> tuple[str, str]:
    """Go back to where ``apply`` started and delete its branch.

    Returns the branch and where the checkout is now.

    Raises:
        UserError: there is no such branch, it holds commits of somebody else, or a
            file cannot be written.
    """
    with _locked(repo):
        return _unapply(repo, version)


def _unapply(repo: git.Repo, version: str | None) -> tuple[str, str]:
    branch = _our_branch(repo, version)
    settings = f"branch.{branch}."
    start = repo.out("config", "--get", f"{settings}offloadParityStart")
    tip = repo.out("config", "--get", f"{settings}offloadParityTip")
    origin = repo.run(
        "config", "--get", f"{settings}offloadParityFrom", check=False
    ).stdout.decode().strip()  # fmt: skip
    extra = repo.lines("log", "--format=%h %s", branch, f"^{tip}")
    if extra or repo.commit_id(branch) != tip:
        what = "; ".join(extra[:3]) or "its commits were rewritten"
        raise UserError(
            f"{repo.path}: branch {branch} holds more than the series ({what}): move "
            f"that to another branch first, or leave it with git switch "
            f"{origin or start[:12]}"
        )
    here = repo.branch() == branch
    if here and (changed := repo.changes(untracked=False)):
        raise UserError(
            f"{repo.path} has uncommitted changes, such as {changed[0]}: commit them "
            "to another branch or stash them first"
        )
    with uninterrupted():
        if here and origin and repo.commit_id(f"refs/heads/{origin}"):
            _move(repo, f"refs/heads/{origin}", origin)
        elif here:
            _move(repo, start, "--detach", start)
        repo.run("branch", "-q", "-D", branch)
    return branch, repo.branch() or f"commit {repo.commit_id('HEAD')[:12]}"


def drifted(repo: git.Repo, series: patches.Series) -> list[str]:
    """Files of the series that have uncommitted changes."""
    touched = series.chains()
    return [path for path in repo.changes(untracked=False) if path in touched]


def _recognise(
    repo: git.Repo, candidates: tuple[patches.Series, ...]
) -> tuple[patches.Series, str] | None:
    """The series, and the nearest ancestor of HEAD that has its release's files."""
    stock = [
        {path: chain[0] for path, chain in series.chains().items() if chain[0]}
        for series in candidates
    ]
    paths = sorted(set().union(*stock))
    commits = repo.lines("rev-list", f"-n{_SEARCHED}", "HEAD", "--", *paths)
    for commit in ["HEAD", *commits]:
        blobs = repo.blobs(commit, paths)
        for series, files in zip(candidates, stock, strict=True):
            if files and all(blobs.get(path) == blob for path, blob in files.items()):
                return series, repo.commit_id(commit)
    return None


def _applied(
    repo: git.Repo, series: patches.Series, base: str | None
) -> tuple[bool, ...]:
    """For each patch whether HEAD has it."""
    chains = series.chains()
    count = len(series.patches)
    blobs = repo.blobs("HEAD", chains)
    for done in range(count, 0, -1):
        if all(blobs.get(path) == chain[done] for path, chain in chains.items()):
            return tuple(number < done for number in range(count))
    # Other commits changed the files too: look for the patches among the commits.
    # One that was reverted does not count.
    since = [f"{base}..HEAD"] if base else [f"-n{_SEARCHED}", "HEAD"]
    ids = Counter(_patch_ids(repo, [*since, "--", *chains]))
    ids.subtract(Counter(_patch_ids(repo, ["-R", *since, "--", *chains])))
    return tuple(
        ids[_patch_id(repo, patch.path.read_bytes())] > 0 for patch in series.patches
    )


def _patch_ids(repo: git.Repo, commits: list[str]) -> list[str]:
    log = repo.run(
        "log", "-p", "--no-merges", "--pretty=medium", "--no-notes", *git.DIFF, *commits
    ).stdout
    return [line.split()[0] for line in repo.lines("patch-id", "--stable", stdin=log)]


def _patch_id(repo: git.Repo, patch: bytes) -> str:
    return repo.out("patch-id", "--stable", stdin=patch).split()[0]


@dataclass(frozen=True)
class _Fit:
    """How many of the places that a series changes are as they are in its release."""

    series: patches.Series
    found: int
    total: int

    @property
    def share(self) -> float:
        return self.found / max(self.total, 1)


def _fit(repo: git.Repo, series: patches.Series) -> _Fit:
    seen: set[str] = set()
    found = total = 0
    for patch in series.patches:
        # Later patches start from what earlier ones leave.
        first = tuple(file for file in patch.files if file.path not in seen)
        seen.update(file.path for file in patch.files)
        hits, of = patches.fit(first, partial(repo.content, "HEAD"))
        found, total = found + hits, total + of
    return _Fit(series, found, total)


def _unrecognised(repo: git.Repo, candidates: tuple[patches.Series, ...]) -> str:
    """The refusal of a checkout that is at no supported release."""
    best = max((_fit(repo, s) for s in candidates), key=lambda fit: fit.share)
    near = best.series.release
    tag = repo.run("describe", "--tags", "--abbrev=0", check=False).stdout.decode()
    after = f" (its last tag is {tag.strip()})" if tag.strip() else ""
    return (
        f"{repo.path} is at no supported release{after}: supported are "
        f"{release.names(tuple(series.release for series in candidates))}; the nearest "
        f"is {near.version}, {best.found} of {best.total} places to change are as there"
    )


def _am(repo: git.Repo, work: git.Repo, patch: patches.Patch, wanted: Release) -> None:
    """Apply one patch in the temporary work tree."""
    paths = [file.path for file in patch.files]
    before = work.commit_id("HEAD")
    old = work.blobs("HEAD", paths)
    done = git.am(work, patch.path)
    if done.returncode:
        where = patches.conflict(
            patch, partial(work.content, "HEAD"), git.unmerged(work)
        )
        fault = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise UserError(
            f"{repo.path} conflicts with {patch.name} at "
            f"{where or (fault.splitlines() or ['an unknown place'])[-1]}: other "
            f"commits changed these lines; take a checkout nearer to {wanted.version}"
        )
    if work.commit_id("HEAD") == before:
        raise UserError(
            f"{repo.path} has the changes of {patch.name} already, in another form: "
            f"part of the series is applied; go back to a commit without it first"
        )
    new = work.blobs("HEAD", paths)
    for file in patch.files:
        if old.get(file.path) == file.old_blob and new.get(file.path) != file.new_blob:
            raise UserError(
                f"{patch.name}: {file.path} comes out as blob {new.get(file.path)}, "
                f"the patch says {file.new_blob}: get the series anew"
            )


def _switch(repo: git.Repo, branch: str, start: str, tip: str) -> None:
    """Put the user's checkout on the new branch and note where it came from."""
    origin = repo.branch()
    settings = f"branch.{branch}."
    # Written first: a run that is killed after the switch can still be taken back.
    repo.run("config", f"{settings}offloadParityStart", start)
    repo.run("config", f"{settings}offloadParityTip", tip)
    if origin:
        repo.run("config", f"{settings}offloadParityFrom", origin)
    try:
        _move(repo, tip, "--no-track", "-c", branch, tip)
    except UserError:
        ref = f"refs/heads/{branch}"
        if repo.commit_id(ref) == tip:
            # Refused by git while it is checked out.
            repo.run("branch", "-q", "-D", branch, check=False)
        if repo.commit_id(ref) is None:
            repo.run("config", "--remove-section", f"branch.{branch}", check=False)
        raise


def _move(repo: git.Repo, target: str, *how: str) -> None:
    """Switch to ``target`` with all of its files, or not at all.

    Raises:
        UserError: a file cannot be written; the checkout is then as it was.
    """
    here, start = repo.branch(), repo.commit_id("HEAD")
    listing = repo.out("diff-tree", "-r", "-z", "--name-only", "HEAD", target)
    files = [repo.path / path for path in listing.split("\0") if path]
    for path in files:
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{path} cannot be written: make {folder} writable first")
    absent = [path for path in files if not os.path.lexists(path)]
    try:
        repo.run("switch", "-q", *how)
        # git succeeds although it could not replace a file.
        if changed := repo.changes(untracked=False):
            raise UserError(
                f"{repo.path / changed[0]} cannot be written: make it and its folder "
                "writable first; the checkout is as it was"
            )
    except UserError:
        # Where git fails, it may have written some of the files.
        if repo.changes(untracked=False):
            back = (here,) if here else ("--detach", start)
            repo.run("switch", "-q", "--discard-changes", *back)
        for path in absent:
            with suppress(OSError):
                path.unlink()
                os.removedirs(path.parent)
        raise


def _locked(repo: git.Repo) -> AbstractContextManager[None]:
    """Keep a second run on the repository out."""
    common = repo.out("rev-parse", "--path-format=absolute", "--git-common-dir")
    return folder_lock(Path(common), repo.path)


def _remove_left_worktrees(repo: git.Repo) -> None:
    """Remove the temporary work trees of runs that were killed; we hold the lock."""
    for line in repo.lines("worktree", "list", "--porcelain"):
        path = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and path.parent.name.startswith(git.TEMPORARY):
            repo.run("worktree", "remove", "-f", "-f", str(path), check=False)
            with suppress(OSError):
                path.parent.rmdir()


def _our_branch(repo: git.Repo, version: str | None) -> str:
    """The branch that ``apply`` made."""
    done = repo.run(
        "config", "--get-regexp", "--name-only", r"^branch\..*\.offloadparitytip$",
        check=False,
    )  # fmt: skip
    ours = [
        name.removeprefix("branch.").rpartition(".")[0]
        for name in done.stdout.decode().splitlines()
    ]
    ours = [name for name in ours if repo.commit_id(f"refs/heads/{name}")]
    if version:
        ours = [name for name in ours if name == release.get(version).branch]
    if repo.branch() in ours:
        return repo.branch()
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise UserError(
            f"{repo.path} has the branches {', '.join(ours)}: choose with RELEASE="
        )
    raise UserError(f"{repo.path} has no branch that make apply made: nothing to do")
