# SPDX-License-Identifier: Apache-2.0
"""The trees this project builds: ``build/vllm-<release>`` and its stock twin.

A tree is a git repository with one base commit, the unpacked sdist, and on its
branch one commit per patch. All ids are the same on every machine.
"""

import json
import shutil
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import mkdtemp

from . import git, index, patches
from .errors import UserError
from .files import lock, replace
from .paths import build_root, shown
from .release import Release

WHO = ("vllm-offload-parity", "vllm-offload-parity@localhost")
BASE = "refs/tags/base"
_DATE = "2020-01-01T00:00:00+00:00"
_STATE = "offload-parity.json"

APPLIED = "the series is applied"
STOCK = "stock, the series is not applied"


@dataclass(frozen=True)
class State:
    """What was last applied to a tree: the series' digest and the branch's tip.

    ``settled`` is False while the branch is being moved to ``tip``.
    """

    series: str
    tip: str
    settled: bool = True


def patched_path(release: Release) -> Path:
    """Where the patched tree of ``release`` is or would be."""
    return build_root() / f"vllm-{release.version}"


def stock_path(release: Release) -> Path:
    """Where the stock tree of ``release`` is or would be."""
    return build_root() / f"vllm-{release.version}-stock"


def repo(path: Path) -> git.Repo:
    """The repository of a built tree, shut off from the user's configuration."""
    return git.Repo(path, isolated=True, exact=True, who=WHO)


def commits(tree: git.Repo) -> list[str]:
    """The ids of the series' commits, in the order of its patches."""
    return tree.lines("rev-list", "--reverse", f"{BASE}..HEAD")


def read_state(tree: git.Repo) -> State | None:
    """What was last applied, None if the record is missing or unreadable."""
    try:
        return State(**json.loads((tree.path / ".git" / _STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_state(tree: git.Repo, state: State) -> None:
    """Record what is applied."""
    if not state.tip:
        raise UserError(_damaged(tree.path))
    replace(tree.path / ".git" / _STATE, json.dumps(vars(state)).encode())


def existing(release: Release) -> git.Repo | None:
    """The release's tree, None if there is none.

    Raises:
        UserError: its repository is damaged.
    """
    tree = repo(patched_path(release))
    if not (tree.path / ".git").is_dir():
        return None
    if tree.commit_id(BASE) is None:
        raise UserError(_damaged(tree.path))
    return tree


def _damaged(path: Path) -> str:
    remove = f"rm -r {quote(str(path))}"
    return f"{shown(path)} is damaged: remove it ({remove}) and run make apply"


def edits(tree: git.Repo, release: Release, state: State | None) -> str | None:
    """What somebody changed in the tree by hand, None if nothing."""
    if tree.branch() != release.branch:
        return f"it is not on branch {release.branch}"
    if changed := tree.changes(untracked=False):
        return f"uncommitted changes, such as {changed[0]}"
    if state is None or tree.commit_id("HEAD") != state.tip:
        return "its commits are not those of the series"
    return None


def standing(release: Release, series: patches.Series) -> str:
    """How the built tree stands to the series, in words; nothing is changed."""
    try:
        tree = existing(release)
    except UserError as error:
        return str(error)
    state = read_state(tree)
    if state and not state.settled:
        return "interrupted: make apply finishes it"
    if what := edits(tree, release, state):
        return f"edited: {what}"
    if state.series == patches.series_digest(series):
        return APPLIED
    if state.tip == tree.commit_id(BASE):
        return STOCK
    return "another version of the series: make apply renews it"


def ensure_patched(release: Release) -> Path:
    """Make sure that the patched tree is there and return its path.

    Raises:
        UserError: the sdist cannot be had, a patch does not apply, or somebody
            edited the tree.
    """
    apply(release)
    return patched_path(release)


def ensure_stock(release: Release) -> Path:
    """Make sure that the stock tree is there, unchanged, and return its path.

    What somebody changed in it is put aside, and said.
    """
    path = stock_path(release)
    with lock(build_root() / ".lock"):
        tree = ensure_base(release)
        stock = tree.at(path)
        # A moved project folder leaves a stock tree that points to the old place.
        if path.exists() and not (
            stock.ok("rev-parse", "-q", "--verify", "HEAD")
            and _same_repository(stock, tree)
        ):
            shutil.rmtree(path)
        if not path.exists():
            tree.run("worktree", "prune")
            tree.run("worktree", "add", "-q", "--detach", str(path), BASE)
        elif stock.commit_id("HEAD") != tree.commit_id(BASE) or stock.changes(
            untracked=False
        ):
            for kept in _put_aside(stock, ["HEAD"], {tree.commit_id(BASE)}):
                print(f"{shown(path)} was edited and is made stock again: {kept}")
            stock.run("checkout", "-q", "--force", "--detach", BASE)
    return path


def apply(release: Release) -> bool:
    """Build the patched tree; False if it was there already and nothing changed.

    Raises:
        UserError: as ``ensure_patched``.
    """
    series = patches.read_series(release)
    digest = patches.series_digest(series)
    with lock(build_root() / ".lock"):
        tree = ensure_base(release)
        state = read_state(tree)
        if state and not state.settled:
            # A run was interrupted while it moved the branch.
            tree.run("checkout", "-q", "--force", "-B", release.branch, state.tip)
            state = State(state.series, state.tip)
            write_state(tree, state)
        if what := edits(tree, release, state):
            raise UserError(
                f"{shown(tree.path)} was edited ({what}): keep that with `make export "
                f"RELEASE={release.version}` or put it aside with `make unapply "
                f"RELEASE={release.version}`"
            )
        if state.series == digest:
            return False
        with tree.worktree(BASE) as work:
            apply_series(work, series)
            tip = work.commit_id("HEAD")
        move(tree, release, State(digest, tip))
    return True


def apply_series(tree: git.Repo, series: patches.Series) -> None:
    """Apply a series to a work tree of its own release, where no line may differ.

    Raises:
        UserError: a patch does not apply, or gives other files than it says.
    """
    for patch in series.patches:
        if git.am(tree, patch.path).returncode:
            where = patches.conflict(patch, partial(tree.content, "HEAD"))
            raise UserError(
                f"{patch.name} does not apply to what the patches before it leave: "
                f"{where or 'see git am'}; mend the series (make edit, make export)"
            )
        found = tree.blobs("HEAD", [file.path for file in patch.files])
        for file in patch.files:
            if found.get(file.path) != file.new_blob:
                raise UserError(
                    f"{patch.name}: {file.path} comes out as blob "
                    f"{found.get(file.path)}, the patch says {file.new_blob}: it was "
                    "edited by hand; mend it with make edit and make export"
                )


def move(tree: git.Repo, release: Release, state: State) -> None:
    """Move the tree's branch and files to ``state``; a later run mends a stop."""
    write_state(tree, State(state.series, state.tip, settled=False))
    tree.run("checkout", "-q", "--force", "-B", release.branch, state.tip)
    write_state(tree, state)


def unapply(release: Release) -> list[str]:
    """Put the patched tree back to the base commit.

    Nothing that somebody made is lost: commits outside the series go to a branch of
    their own, uncommitted changes to git's stash. Returns a line for each of them.

    Raises:
        UserError: there is no such tree, or a rebase or the like is in progress.
    """
    with lock(build_root() / ".lock"):
        tree = existing(release)
        if tree is None:
            raise UserError(
                f"{shown(patched_path(release))} is not there: nothing to take back; a "
                "checkout is named with VLLM=, an installed package with PYTHON="
            )
        if what := tree.in_progress():
            raise UserError(
                f"{shown(tree.path)}: a {what} is in progress; finish or abort it first"
            )
        state = read_state(tree)
        base = tree.commit_id(BASE)
        kept = _put_aside(
            tree,
            ["HEAD", f"refs/heads/{release.branch}"],
            {base, state and state.tip},
        )
        move(tree, release, State("", base))
    return kept


def _put_aside(tree: git.Repo, places: list[str], known: set[str | None]) -> list[str]:
    """Keep what a forced checkout would lose; a line for each of them.

    Uncommitted changes go to git's stash, commits at ``places`` that are not ``known``
    to a branch each.
    """
    kept = []
    if tree.changes(untracked=False):
        tree.run("stash", "push", "-q")
        kept.append("uncommitted changes are kept: git stash list")
    for tip in dict.fromkeys(map(tree.commit_id, places)):
        if tip is None or tip in known:
            continue
        name = f"edited/{tip[:12]}"
        if not tree.commit_id(f"refs/heads/{name}"):
            tree.run("branch", name, tip)
        kept.append(f"commits that are not in the series are kept: branch {name}")
    return kept


def _same_repository(stock: git.Repo, tree: git.Repo) -> bool:
    common = Path(stock.out("rev-parse", "--path-format=absolute", "--git-common-dir"))
    return common.resolve() == (tree.path / ".git").resolve()


def ensure_base(release: Release) -> git.Repo:
    """The release's tree, unpacked and committed first if it is not there.

    The caller holds the lock of the build folder.
    """
    root = build_root()
    path = patched_path(release)
    if tree := existing(release):
        return tree
    if path.exists():
        raise UserError(
            f"{shown(path)} is in the way and is no tree of this project: move it away"
        )
    archive = index.fetch(release)
    # We hold the lock: what other runs left here, they left when they were killed.
    for stale in root.glob(".building-*"):
        shutil.rmtree(stale)
    folder = Path(mkdtemp(prefix=".building-", dir=root))
    try:
        new = repo(unpack(archive, folder))
        # Without a template no file of this machine's git gets in.
        new.run(
            "init", "-q", "--template=", "--object-format=sha1", "-b", release.branch
        )
        new.run("add", "-A", "-f")
        new.run(
            "commit", "-q", "--no-verify", "-m", f"vLLM {release.version}",
            "-m", f"The tree of {release.sdist_name}, cut from vLLM's commit "
            f"{release.upstream_commit}.",
            env={"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE},
        )  # fmt: skip
        new.run("update-ref", BASE, "HEAD")
        write_state(new, State("", new.commit_id("HEAD")))
        new.path.rename(path)
    except OSError as error:
        raise UserError(
            f"cannot build {shown(path)}: {error.strerror}; make room or choose "
            "another folder with OFFLOAD_PARITY_BUILD"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return repo(path)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an sdist and return its one top folder."""
    try:
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 knows no filter; the digest was checked.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(
            f"{archive.name} cannot be unpacked ({error}): remove {archive} and retry"
        ) from error
    (top,) = folder.iterdir()
    return top
