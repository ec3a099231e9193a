# SPDX-License-Identifier: Apache-2.0
"""A branch per pull request, its commits signed off by who submits them.

A change that is marked as standing alone begins at the release, any other one at the
change before it.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import build_tree, git, patches
from ..errors import UserError
from ..paths import shown
from ..proof import ADAPTED, FAILS, HARDWARE
from ..release import Release
from .changes import Change, path_of, upstream_title
from .identity import Submitter

# vLLM asks for a trailer of this kind on commits that AI tools helped to write.
ASSISTED = "Assisted-by: AI coding agent"
SIGNED = "Signed-off-by:"


@dataclass(frozen=True)
class Branch:
    """A pull request as commits.

    Attributes:
        change: what it holds.
        name: of the branch.
        root: the commit that it begins after.
        commits: its own, in order.
    """

    change: Change
    name: str
    root: str
    commits: tuple[str, ...]

    @property
    def tip(self) -> str:
        """Its last commit."""
        return self.commits[-1]


def body_of(message: str) -> str:
    """A patch's message without its title and without what only the proof reads."""
    kept: list[str] = []
    in_block = False
    for line in message.partition("\n")[2].splitlines():
        if line.strip() in (FAILS, ADAPTED, HARDWARE):
            in_block = True
        elif in_block and line.strip() and not line[0].isspace():
            in_block = False
        if not in_block:
            kept.append(line)
    return "\n".join(kept).strip()


def message_of(title: str, body: str, who: Submitter) -> str:
    """What a commit says upstream."""
    parts = [title, body, f"{ASSISTED}\n{SIGNED} {who}\n"]
    return "\n\n".join(part for part in parts if part)


def build(
    release: Release, changes: Sequence[Change], who: Submitter, folder: Path
) -> tuple[git.Repo, list[Branch]]:
    """Make a bare repository in ``folder`` that has the release and all branches.

    Raises:
        UserError: the tree cannot be built, or a change that is marked as standing
            alone does not apply to the release.
    """
    tree = build_tree.repo(build_tree.ensure_patched(release))
    path = folder / "vllm.git"
    shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    tree.run(
        "clone", "-q", "--bare", "--local", "--no-tags", "--single-branch",
        "--template=", str(tree.path.resolve()), str(path.resolve()),
    )  # fmt: skip
    bare = tree.at(path)
    base = tree.commit_id(build_tree.BASE)
    bare.run("update-ref", "refs/heads/base", base)
    bare.run("symbolic-ref", "HEAD", "refs/heads/base")
    bare.run("update-ref", "-d", f"refs/heads/{release.branch}")
    names = [patch.name for patch in patches.read_series(release).patches]
    ids = build_tree.commits(tree)
    commits_of = dict(zip(names, ids, strict=True))
    lone = [change for change in changes if change.alone]
    applied = _apply_alone(bare, release, lone)
    branches: list[Branch] = []
    before = base
    for change in changes:
        own = [commits_of[patch.name] for patch in change.patches]
        trees = [f"{commit}^{{tree}}" for commit in own]
        stacked = _commits(bare, own, trees, before, who)
        root, commits = before, stacked
        if change.alone and before != base:
            root = base
            commits = _commits(bare, own, applied[change.name], base, who)
        name = f"upstream/{change.name}"
        bare.run("update-ref", f"refs/heads/{name}", commits[-1])
        branches.append(Branch(change, name, root, tuple(commits)))
        before = stacked[-1]
    return bare, branches


def _apply_alone(
    bare: git.Repo, release: Release, changes: Sequence[Change]
) -> dict[str, list[str]]:
    """By a change's name, the files after each of its patches, as tree ids.

    The patches are applied to the release without those before them.
    """
    if not changes:
        return {}
    trees: dict[str, list[str]] = {}
    with bare.worktree("refs/heads/base") as work:
        for change in changes:
            work.run("checkout", "-q", "--force", "--detach", "refs/heads/base")
            for patch in change.patches:
                if git.am(work, patch.path).returncode:
                    raise UserError(
                        f"{shown(path_of(release))}: {patch.name} does not apply to "
                        "the release without the patches before it: take alone = true "
                        "away"
                    )
                tree = work.out("rev-parse", "HEAD^{tree}")
                trees.setdefault(change.name, []).append(tree)
    return trees


def _commits(
    bare: git.Repo,
    originals: Iterable[str],
    trees: Iterable[str],
    parent: str,
    who: Submitter,
) -> list[str]:
    """Commits with the messages and dates of ``originals``, after ``parent``."""
    made: list[str] = []
    for original, tree in zip(originals, trees, strict=True):
        message = bare.out("log", "-1", "--format=%B", original)
        title = upstream_title(message.partition("\n")[0])
        date = bare.out("log", "-1", "--format=%aI", original)
        # The series' own author has no address, and who signs off answers for it.
        env = {
            f"GIT_{role}_{what}": value
            for role in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", who.name), ("EMAIL", who.email))
        }
        env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        parent = bare.out(
            "commit-tree", tree, "-p", parent,
            stdin=message_of(title, body_of(message), who).encode(), env=env,
        )  # fmt: skip
        made.append(parent)
    return made


def write_mails(bare: git.Repo, branch: Branch, folder: Path) -> Path:
    """Write a branch's own commits as ``git am`` reads them."""
    path = folder / f"{branch.change.name}.mbox"
    mails = bare.run(
        "format-patch", "--stdout", "--no-signature", "--zero-commit", *git.DIFF,
        f"{branch.root}..{branch.tip}",
    )  # fmt: skip
    path.write_bytes(mails.stdout)
    return path


def touched_files(bare: git.Repo, branch: Branch) -> list[str]:
    """The files that a pull request changes."""
    return bare.lines("diff", "--name-only", branch.root, branch.tip)
