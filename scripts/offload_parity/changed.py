# SPDX-License-Identifier: Apache-2.0
"""Which releases' series a change of this project touches, and from which patch on."""

from dataclasses import dataclass
from itertools import takewhile

from . import git, patches
from .errors import UserError
from .paths import ROOT, patches_root
from .release import Release

# What a change is a change of, where it is not named.
_TRUNKS = ("origin/main", "main")


@dataclass(frozen=True)
class Base:
    """The commit that a change is compared with, and how it was chosen."""

    commit: str
    words: str


def base(since: str | None = None, repo: git.Repo | None = None) -> Base | None:
    """The commit before a change: named, or where its branch began, or the last one.

    None in a checkout that has no history, or in no repository.

    Raises:
        UserError: ``since`` is no commit here.
    """
    repo = repo or git.Repo(ROOT)
    if since is not None:
        if commit := repo.commit_id(since):
            return Base(commit, f"since {since}")
        raise UserError(f"SINCE={since} is no commit of this repository: name another")
    head = repo.commit_id("HEAD")
    if head is None:
        return None
    for trunk in _TRUNKS:
        began = repo.run("merge-base", "HEAD", trunk, check=False).stdout.decode()
        if (commit := began.strip()) and commit != head:
            return Base(commit, f"since {commit[:12]}, where it left {trunk}")
    if commit := repo.commit_id("HEAD^"):
        return Base(commit, f"since {commit[:12]}, the commit before")
    return None


def first_changed(
    release: Release, since: str, repo: git.Repo | None = None
) -> int | None:
    """The place in the series of the first patch that is not as it was, from 0.

    None if the whole series is as it was; a patch is that of before if it has the same
    bytes at the same place. Changes that are not committed count.

    Raises:
        UserError: the series lie outside the repository.
    """
    repo = repo or git.Repo(ROOT)
    root = patches_root()
    if not root.is_relative_to(repo.path):
        raise UserError(
            f"{root} is in no repository that tells what changed: give RELEASE="
        )
    folder = f"{root.relative_to(repo.path)}/{release.version}"
    listing = repo.content(since, f"{folder}/series") or b""
    names = [f"{folder}/{name}" for name in patches.names_in(listing.decode())]
    old = repo.blobs(since, names) if names else {}
    before = [old.get(name) for name in names]
    now = [
        patches.blob_id(patch.path.read_bytes())
        for patch in patches.read_series(release).patches
    ]
    if now == before:
        return None
    pairs = zip(before, now, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
