# SPDX-License-Identifier: Apache-2.0
"""From commits to patch files and back: edit, export and check a series."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from . import build_tree, git, patches
from .errors import UserError
from .files import lock, replace, writable
from .paths import build_root, shown
from .release import Release


def edit(release: Release) -> tuple[Path, str | None]:
    """Make sure that the patched tree is there; what was edited in it already."""
    if tree := build_tree.existing(release):
        what = build_tree.edits(tree, release, build_tree.read_state(tree))
        if what:
            return tree.path, what
    return build_tree.ensure_patched(release), None


def export(release: Release) -> list[str]:
    """Write the commits of the patched tree to the release's folder.

    Returns a line for each file that changed. Files that would not change are not
    touched.

    Raises:
        UserError: there is no such tree, it has uncommitted changes, it is not on its
            branch, or a commit does not survive the way through a patch file.
    """
    path = build_tree.patched_path(release)
    tree = build_tree.existing(release)
    if tree is None:
        raise UserError(
            f"{shown(path)} is not there: run make edit RELEASE={release.version}"
        )
    with lock(build_root() / ".lock"):
        if tree.branch() != release.branch:
            raise UserError(
                f"{shown(path)} is not on branch {release.branch}: finish what is in "
                f"progress there, then git switch {release.branch}"
            )
        if changed := tree.changes(untracked=True):
            raise UserError(
                f"{shown(path)} has uncommitted changes, such as {changed[0]}: commit "
                "or remove them first"
            )
        place = writable(release.folder)
        with TemporaryDirectory(prefix=".export-", dir=place) as folder:
            done = _install(release, _round_trip(tree, Path(folder)))
        series = patches.read_series(release)
        build_tree.write_state(
            tree,
            build_tree.State(patches.series_digest(series), tree.commit_id("HEAD")),
        )
    return done


def check(release: Release) -> list[str]:
    """What is wrong with a release's folder, a line each; empty if nothing."""
    names = patches.listed(release.folder)
    present = {path.name for path in release.folder.glob("*.patch")}
    where = shown(release.folder)
    faults = [
        f"{where}/series lists {name}, which is not there: restore it or make export"
        for name in names
        if name not in present
    ]
    faults += [
        f"{where}/{name} is not in series: list it or remove it"
        for name in sorted(present.difference(names))
    ]
    faults += [
        f"{where}/series lists {name} {times} times: keep one"
        for name, times in Counter(names).items()
        if times > 1
    ]
    if faults:
        return faults
    patches.read_series(release).chains()
    with lock(build_root() / ".lock"):
        tree = build_tree.ensure_base(release)
        with (
            tree.worktree(build_tree.BASE) as work,
            TemporaryDirectory(prefix="offload-parity-") as folder,
        ):
            build_tree.apply_series(work, patches.read_series(release))
            new = format_series(work, Path(folder))
            faults += _differences(release, new, "an export would write it otherwise")
        if not faults and (
            what := build_tree.edits(tree, release, build_tree.read_state(tree))
        ):
            faults.append(
                f"{shown(tree.path)} was edited ({what}): run make export "
                f"RELEASE={release.version} or make unapply RELEASE={release.version}"
            )
    return faults


def format_series(tree: git.Repo, folder: Path) -> list[Path]:
    """Write the commits from the base to HEAD as patch files into ``folder``.

    Raises:
        UserError: HEAD does not follow from the base in a line.
    """
    base = build_tree.BASE
    if not tree.ok("merge-base", "--is-ancestor", base, "HEAD") or tree.lines(
        "rev-list", "--merges", f"{base}..HEAD"
    ):
        raise UserError(
            f"{shown(tree.path)}: the commits do not follow the base commit in a line: "
            "rebase them onto the tag base"
        )
    for commit in tree.lines("rev-list", f"{base}..HEAD"):
        if not tree.out("diff-tree", "--name-only", "-r", commit, "--"):
            raise UserError(
                f"commit {commit[:12]} in {shown(tree.path)} changes nothing: drop it"
            )
    # Everything that a configuration could change is stated.
    names = tree.lines(
        "-c", "format.mboxrd=false",
        "format-patch", "-o", str(folder), "--zero-commit", "--no-signature", "-N",
        *git.DIFF, "--no-notes", "-p", "--stat=79",
        "--subject-prefix=PATCH", "--no-attach", "--no-thread", "--no-cover-letter",
        "--no-base", "--no-from", "--no-to", "--no-cc", "--no-add-header",
        "--no-signoff",
        "--suffix=.patch", "--filename-max-length=64",
        "--encode-email-headers", f"{base}..HEAD",
    )  # fmt: skip
    return [Path(name) for name in names]


def _round_trip(tree: git.Repo, folder: Path) -> list[Path]:
    """Patch files that give the tree's commits again, in ``folder``.

    What a mail cannot carry, such as spaces at the end of a message's line, is left
    out once: the files are those that come from applying the first ones.
    """
    first, second = folder / "1", folder / "2"
    commits = build_tree.commits(tree)
    what = "--format=%T%n%an <%ae>%n%ad%n%B"
    with tree.worktree(build_tree.BASE) as work:
        for commit, patch in zip(commits, format_series(tree, first), strict=True):
            done = git.am(work, patch)
            wanted, got = (
                repo.out("log", "-1", "--no-decorate", what, revision).split()
                for repo, revision in ((tree, commit), (work, "HEAD"))
            )
            if done.returncode or wanted != got:
                title = tree.out("log", "-1", "--format=%s", commit)
                raise UserError(
                    f"commit {commit[:12]} ({title}) does not come back from its patch "
                    "file as it was: reword its message (no line of it may be --- or "
                    "look like a diff, the title may not start with [PATCH])"
                )
        new = format_series(work, second)
    for patch in new:
        try:
            patches.read_patch(patch)
        except UserError as error:
            raise UserError(
                str(error).replace(shown(second), shown(tree.path))
            ) from None
    return new


def _differences(release: Release, new: list[Path], words: str) -> list[str]:
    """A line for each patch of the folder that is not as in ``new``."""
    written = {path.name: path.read_bytes() for path in new}
    have = {path.name: path.read_bytes() for path in release.folder.glob("*.patch")}
    lines = [
        f"{shown(release.folder / name)}: {words}"
        for name in sorted(written.keys() | have.keys())
        if written.get(name) != have.get(name)
    ]
    if not lines and patches.listed(release.folder) != [path.name for path in new]:
        lines.append(f"{shown(release.folder / 'series')}: {words}")
    return lines


def _install(release: Release, new: list[Path]) -> list[str]:
    """Put the new patch files in place of the old; a line for each that changed."""
    folder = release.folder
    done = []
    for path in new:
        target = folder / path.name
        if not target.exists() or target.read_bytes() != path.read_bytes():
            done.append(f"{'rewritten' if target.exists() else 'new'}: {path.name}")
            replace(target, path.read_bytes())
    names = [path.name for path in new]
    if not (folder / "series").exists() or patches.listed(folder) != names:
        series = folder / "series"
        old = series.read_text(encoding="utf-8").splitlines() if series.exists() else []
        head = [line for line in old if line.startswith("#")]
        replace(series, "".join(f"{line}\n" for line in head + names).encode())
        done.append("rewritten: series")
    for path in folder.glob("*.patch"):
        if path.name not in names:
            path.unlink()
            done.append(f"removed: {path.name}")
    return done
