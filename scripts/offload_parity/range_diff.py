# SPDX-License-Identifier: Apache-2.0
"""How the series of two releases differ, patch by patch: git's range-diff."""

from pathlib import Path
from tempfile import TemporaryDirectory

from . import build_tree, git, patches
from .errors import UserError
from .files import lock
from .paths import build_root, shown
from .release import Release

# Two releases' patches of one purpose differ in more lines than git expects of two
# versions of a patch (60); with more than this, patches of different purposes pair.
_LIKE = 90


def compare(first: Release, second: Release, *, color: bool = False) -> str:
    """What ``git range-diff`` says of the two series as commits.

    The trees are built where they are missing; what somebody edits in them does not
    count, nor does any of the user's settings.

    Raises:
        UserError: it is one release, one has no patches, or a tree cannot be built.
    """
    if first == second:
        raise UserError(f"A= and B= are both {first.version}: name two releases")
    ranges, stores = [], []
    for release in (first, second):
        tree, tip = _commits(release)
        ranges.append(f"{tree.commit_id(build_tree.BASE)}..{tip}")
        stores.append(str(tree.path / ".git" / "objects"))
    # A repository of its own that borrows from both: nothing is written to either.
    with TemporaryDirectory(prefix=git.TEMPORARY) as folder:
        both = git.Repo(Path(folder).resolve(), isolated=True)
        both.run("init", "-q", "--bare", "--template=", "--object-format=sha1")
        alternates = both.path / "objects" / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        alternates.write_text("".join(f"{store}\n" for store in stores))
        return both.out(
            "range-diff",
            f"--creation-factor={_LIKE}",
            "--color=always" if color else "--no-color",
            *ranges,
        )


def _commits(release: Release) -> tuple[git.Repo, str]:
    """The repository that has the series as commits, and the last of these."""
    series = patches.read_series(release)
    if not series.patches:
        raise UserError(f"{shown(release.folder)} has no patches: nothing to compare")
    with lock(build_root() / ".lock"):
        tree = build_tree.ensure_base(release)
        state = build_tree.read_state(tree)
        if (
            state
            and state.series == patches.series_digest(series)
            and tree.commit_id(state.tip)
        ):
            return tree, state.tip
        with tree.worktree(build_tree.BASE) as work:
            build_tree.apply_series(work, series)
            return tree, work.commit_id("HEAD")
