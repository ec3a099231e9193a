# SPDX-License-Identifier: Apache-2.0
"""Applying to a git checkout that somebody already has."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import (
    GONE,
    MASK,
    NEW,
    OLD,
    REACH,
    STORE,
    TEST,
    TITLES,
    World,
    commit,
    files_of,
    git,
    snapshot,
    stock_files,
    text,
    write,
)
from offload_parity import build_tree, exporting, release

Clone = Callable[..., Path]
BRANCH = f"offload-parity/{NEW}"


def subjects(tree: Path, since: str) -> list[str]:
    return git(tree, "log", "--reverse", "--format=%s", f"{since}..").splitlines()


def test_apply_makes_a_branch(world: World, clone: Clone) -> None:
    tree = clone()
    start = git(tree, "rev-parse", "HEAD")
    out = world.good("apply", "--vllm", tree)
    assert f"Applied 4 patches to vLLM {NEW}" in out and BRANCH in out
    assert git(tree, "branch", "--show-current") == BRANCH
    assert git(tree, "rev-parse", "main") == start
    assert subjects(tree, "main") == list(TITLES)
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "log", "-1", "--format=%an <%ae>") == (
        "Zoë Ångström, PhD <zoe@example.org>"
    )
    assert (tree / REACH).exists() and not (tree / GONE).exists()
    assert git(tree, "worktree", "list").count("\n") == 0
    assert not [*tree.rglob("*.rej"), *tree.rglob("*.orig")]
    assert world.good("check")


def test_older_release_is_recognised_by_its_files(world: World, clone: Clone) -> None:
    tree = clone(OLD)
    git(tree, "tag", "-d", f"v{OLD}")
    git(tree, "tag", f"v{NEW}")  # a tag that lies
    assert f"vLLM {OLD}" in world.good("apply", "--vllm", tree)
    assert "only_in_the_old_release" in (tree / MASK).read_text()


def test_second_apply_says_so_and_changes_nothing(
    world: World, clone: Clone, unchanged
) -> None:
    tree = clone()
    world.good("apply", "--vllm", tree)
    unchanged(tree)
    assert "Already applied: 4 patches" in world.good("apply", "--vllm", tree)


def test_unrelated_commits_on_top(world: World, clone: Clone) -> None:
    tree = clone()
    files = {MASK: "# own line\n" * 9 + text("mask", {55: "own = 1"}), "own.py": "x\n"}
    commit(tree, "Own work", files)
    commit(tree, "More", {"own2.py": "y\n"})
    world.good("apply", "--vllm", tree)
    assert subjects(tree, "main") == list(TITLES)
    mask = (tree / MASK).read_text()
    assert "own = 1" in mask and "one_mask" in mask and mask.startswith("# own")
    assert "Already applied" in world.good("apply", "--vllm", tree)
    # and after more commits, in the same files
    commit(tree, "Later", {STORE: (tree / STORE).read_text() + "# later\n"})
    assert "Already applied" in world.good("apply", "--vllm", tree)


def test_three_way_merge_with_a_change_in_the_context(
    world: World, clone: Clone
) -> None:
    """Plain git apply would refuse: a line of the context differs."""
    tree = clone()
    commit(tree, "Own", {MASK: text("mask", {8: "own = 8"})})
    world.good("apply", "--vllm", tree)
    mask = (tree / MASK).read_text()
    assert "own = 8" in mask and "one_mask = 10" in mask


def test_merged_own_branch(world: World, clone: Clone) -> None:
    tree = clone()
    git(tree, "switch", "-q", "-c", "side", "HEAD~1")
    commit(tree, "Side", {"side.py": "x\n"})
    git(tree, "switch", "-q", "main")
    git(tree, "merge", "-q", "--no-edit", "side")
    world.good("apply", "--vllm", tree)
    assert subjects(tree, "main") == list(TITLES)


@pytest.mark.parametrize("kind", ["worktree", "shallow", "partial", "detached"])
def test_kinds_of_checkouts(
    world: World, clone: Clone, tmp_path: Path, kind: str
) -> None:
    tree = clone()
    other = tmp_path / "other tree"
    if kind == "worktree":
        git(tree, "worktree", "add", "-q", "-b", "mine", str(other))
    elif kind == "detached":
        other = tree
        git(tree, "switch", "-q", "--detach")
    else:
        git(tree, "config", "uploadpack.allowFilter", "true")
        how = "--depth=1" if kind == "shallow" else "--filter=blob:none"
        git(tree, "clone", "-q", how, tree.as_uri(), str(other))
    before = snapshot(other)
    world.good("apply", "--vllm", other)
    assert git(other, "branch", "--show-current") == BRANCH
    assert git(other, "rev-list", "--count", f"{before['HEAD']}..") == "4"
    world.good("status", "--vllm", other)
    world.good("unapply", "--vllm", other)
    after = snapshot(other)
    if kind == "detached":
        assert git(other, "branch", "--show-current") == ""
    for part in ("HEAD", "HEAD file", "status", "index", "files", "refs", "config"):
        assert after[part] == before[part], part


def test_hostile_configuration_and_hooks(
    world: World, clone: Clone, tmp_path: Path
) -> None:
    tree = clone()
    for name in ("applypatch-msg", "pre-applypatch", "post-checkout", "pre-commit"):
        hook = tree / ".git/hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\nexit 1\n")
        hook.chmod(0o755)
    for setting in (
        "commit.gpgSign=true", "am.threeWay=false", "am.keepcr=true",
        "apply.whitespace=error-all", "diff.noprefix=true", "core.quotePath=true",
        "merge.conflictStyle=diff3", "rerere.enabled=true", "diff.renames=copies",
        "mailinfo.scissors=true", "status.showUntrackedFiles=all",
        "log.showSignature=true",
        "branch.autoSetupMerge=always", "color.ui=always", "diff.external=/bin/false",
        "format.pretty=oneline", "log.date=relative", "status.relativePaths=true",
        "status.branch=true", "status.short=true", "log.decorate=full",
        "checkout.defaultRemote=x", "pager.log=true", "diff.interHunkContext=40",
        "diff.indentHeuristic=false", "diff.orderFile=/none", "diff.relative=true",
        "diff.suppressBlankEmpty=true", "format.pretty=%s",
    ):  # fmt: skip
        git(tree, "config", *setting.split("=", 1))
    world.good("apply", "--vllm", tree)
    assert subjects(tree, "main") == list(TITLES)
    world.good("status", "--vllm", tree)
    assert "Already applied" in world.good("apply", "--vllm", tree)
    world.good("unapply", "--vllm", tree)
    # and where the patches are found by their ids
    world.good("apply", "--vllm", tree)
    write(tree, {STORE: (tree / STORE).read_text() + "# later\n"})
    mine = ("commit.gpgSign=false", "core.hooksPath=/none", "diff.orderFile=/dev/null")
    plain = [part for setting in mine for part in ("-c", setting)]
    git(tree, *plain, "commit", "-q", "-a", "-m", "Later")
    assert "Already applied" in world.good("apply", "--vllm", tree)
    assert not (tmp_path / "ran").exists()


def test_user_setting_does_not_join_hunks(world: World, clone: Clone) -> None:
    """A patch of two hunks in one file, looked for by its id."""
    world.good("edit")
    built = world.build / f"vllm-{NEW}"
    lines = (built / STORE).read_text().splitlines(keepends=True)
    lines[40], lines[52] = "first = 1\n", "second = 1\n"
    commit(built, "[Core] Two hunks", {STORE: "".join(lines)})
    world.good("export")
    tree = clone()
    world.good("apply", "--vllm", tree)
    commit(tree, "Later", {STORE: (tree / STORE).read_text() + "# later\n"})
    git(tree, "config", "diff.interHunkContext", "30")
    assert "Already applied: 5" in world.good("apply", "--vllm", tree)


def fake_git(tmp_path: Path, when: str, what: str) -> dict[str, str]:
    """An environment whose git does ``what`` after a command like ``when``."""
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(
        f"""#!/bin/sh
{shutil.which("git")} "$@"; code=$?
case "$*" in {when}) {what};; esac
exit $code
"""
    )
    fake.chmod(0o755)
    return {"PATH": f"{fake.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_switch_that_could_not_write_a_file(
    world: World, clone: Clone, unchanged, tmp_path: Path, command: str
) -> None:
    """git says so on stderr and exits 0."""
    tree = clone()
    if command == "unapply":
        world.good("apply", "--vllm", tree)
    unchanged(tree)
    env = fake_git(
        tmp_path, '*"--discard-changes"*) ;; *" switch -q "*',
        f"echo old > '{tree}/{MASK}'",
    )  # fmt: skip
    run = world.start(command, "--vllm", str(tree), env=env)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and err.count("\n") == 1, err
    assert f"{MASK} cannot be written" in err


def test_switch_that_failed_half_way(
    world: World, clone: Clone, unchanged, tmp_path: Path
) -> None:
    """As where git may not unlink a file: it exits 1 and others are written."""
    tree = clone()
    unchanged(tree)
    new = tree / REACH
    env = fake_git(tmp_path, "none", ":")
    fake = tmp_path / "bin" / "git"
    fake.write_text(
        f"""#!/bin/sh
case "$*" in *" switch -q --no-track "*)
    echo new > '{tree}/{MASK}'; rm '{tree}/{GONE}'
    mkdir -p '{new.parent}'; echo new > '{new}'
    echo 'error: unable to unlink' >&2; exit 1;;
esac
exec {shutil.which("git")} "$@"
"""
    )
    run = world.start("apply", "--vllm", str(tree), env=env)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "error: unable to unlink" in err
    assert not new.parent.exists()


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_folder_that_cannot_be_written(
    world: World, clone: Clone, unchanged, monkeypatch, command: str
) -> None:
    tree = clone()
    if command == "unapply":
        world.good("apply", "--vllm", tree)
    unchanged(tree)
    closed, real = tree / "vllm/v1/core", os.access
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda p, m: p != closed and real(p, m))
    err = world.refused(command, "--vllm", tree)
    assert "cannot be written" in err and f"make {closed} writable" in err


def test_two_runs_side_by_side(world: World, clone: Clone) -> None:
    tree = clone()
    before = snapshot(tree)
    outputs = []
    for run in [world.start("apply", "--vllm", str(tree)) for _ in range(3)]:
        out, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "")
        outputs.append(out)
    assert sum("Applied 4" in out for out in outputs) == 1
    assert sum("Already applied" in out for out in outputs) == 2
    world.good("unapply", "--vllm", tree)
    assert snapshot(tree) == before


def test_record_of_a_branch_that_appeared_meanwhile_is_kept(
    world: World, clone: Clone, tmp_path: Path
) -> None:
    tree = clone()
    env = fake_git(tmp_path, "*offloadParityFrom*", f"git branch {BRANCH} HEAD")
    run = world.start("apply", "--vllm", str(tree), env=env)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "already exists" in err
    assert git(tree, "config", f"branch.{BRANCH}.offloadParityTip")


def test_work_tree_of_a_killed_run_is_removed(
    world: World, clone: Clone, tmp_path: Path
) -> None:
    tree = clone()
    before = snapshot(tree)
    env = fake_git(tmp_path, "*am*0001-*", f"kill -{signal.SIGKILL.value} $PPID")
    run = world.start("apply", "--vllm", str(tree), env=env | {"TMPDIR": str(tmp_path)})
    run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert git(tree, "worktree", "list").count("\n") == 1
    world.good("apply", "--vllm", tree)
    assert git(tree, "worktree", "list").count("\n") == 0
    assert not list(tmp_path.glob("offload-parity-*"))
    world.good("unapply", "--vllm", tree)
    assert snapshot(tree) == before


def test_home_folder_that_is_not_known(world: World) -> None:
    for name in ("apply", "status", "unapply"):
        err = world.refused(name, "--vllm", "~nosuchuser/vllm")
        assert "~nosuchuser/vllm: no home folder is known" in err


def test_checkout_with_converted_line_ends(world: World, clone: Clone) -> None:
    tree = clone()
    git(tree, "config", "core.autocrlf", "true")
    (tree / MASK).unlink()
    git(tree, "checkout", "-q", "--", ".")
    assert b"\r\n" in (tree / MASK).read_bytes()
    git(tree, "add", "-A")
    world.good("apply", "--vllm", tree)
    assert git(tree, "status", "--porcelain") == ""
    assert b"one_mask = 10\r\n" in (tree / MASK).read_bytes()
    assert "\r" not in git(tree, "show", f"HEAD:{MASK}")


def test_committer_is_the_user_or_else_the_project(world: World, clone: Clone) -> None:
    tree = clone()
    world.good("apply", "--vllm", tree)
    assert git(tree, "log", "-1", "--format=%cn") == "vllm-offload-parity"
    world.good("unapply", "--vllm", tree)
    git(tree, "config", "user.name", "Me")
    git(tree, "config", "user.email", "me@example.org")
    world.good("apply", "--vllm", tree)
    assert git(tree, "log", "-1", "--format=%cn %ce") == "Me me@example.org"


def test_submodules_and_untracked_files_do_not_matter(
    world: World, clone: Clone, tmp_path: Path
) -> None:
    tree = clone()
    other = clone(OLD, "sub")
    git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other))
    git(tree, "commit", "-q", "-m", "Submodule")
    write(tree / "sub", {MASK: "dirty\n"})
    write(tree, {"notes.txt": "untracked\n"})
    world.good("apply", "--vllm", tree)
    assert (tree / "notes.txt").read_text() == "untracked\n"
    assert (tree / "sub" / MASK).read_text() == "dirty\n"


# Refusals: one line, and the checkout as it was.


def test_not_a_folder(world: World, tmp_path: Path) -> None:
    assert "is not a folder" in world.refused("apply", "--vllm", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in world.refused("apply", "--vllm", tmp_path / "file")


def test_not_a_vllm_tree(world: World, clone: Clone, tmp_path: Path, unchanged) -> None:
    tree = tmp_path / "other"
    tree.mkdir()
    git(tree, "init", "-q")
    commit(tree, "x", {"setup.py": "x\n"})
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert "not the top of a vLLM tree (no vllm/v1 in it)" in err


def test_a_folder_inside_a_checkout(world: World, clone: Clone, unchanged) -> None:
    tree = clone()
    unchanged(tree)
    assert f"name {tree}" in world.refused("apply", "--vllm", tree / "vllm")


def test_unpacked_source_inside_another_repository(
    world: World, tmp_path: Path, unchanged
) -> None:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "x", {"x": "x\n"})
    write(tmp_path / "vllm-src", stock_files(NEW))
    before = files_of(tmp_path / "vllm-src")
    err = world.refused("apply", "--vllm", tmp_path / "vllm-src")
    assert "no git checkout" in err
    assert files_of(tmp_path / "vllm-src") == before
    shutil.rmtree(tmp_path / ".git")
    assert "no git checkout" in world.refused("apply", "--vllm", tmp_path / "vllm-src")
    unchanged(_repository_in(tmp_path))


def _repository_in(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", str(tmp_path / "any"))
    commit(tmp_path / "any", "x", {"x": "x\n"})
    return tmp_path / "any"


def test_no_commit_yet(world: World, tmp_path: Path) -> None:
    write(tmp_path / "new", stock_files(NEW))
    git(tmp_path / "new", "init", "-q")
    assert "no commit yet" in world.refused("apply", "--vllm", tmp_path / "new")


@pytest.mark.parametrize("how", ["changed", "staged", "deleted", "added", "mode"])
def test_dirty(world: World, clone: Clone, unchanged, how: str) -> None:
    tree = clone()
    if how == "deleted":
        (tree / MASK).unlink()
    elif how == "mode":
        (tree / MASK).chmod(0o755)
    elif how == "added":
        write(tree, {"vllm/new file.py": "x\n"})
        git(tree, "add", "-A")
    else:
        write(tree, {MASK: "x\n"})
        if how == "staged":
            git(tree, "add", "-A")
    unchanged(tree)
    name = "vllm/new file.py" if how == "added" else MASK
    err = world.refused("apply", "--vllm", tree)
    assert f"uncommitted changes, such as {name}: commit or stash" in err


def test_untracked_file_where_the_series_adds_one(
    world: World, clone: Clone, unchanged
) -> None:
    tree = clone()
    write(tree, {REACH: "mine\n", ".git/info/exclude": "positions.py\n"})
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert f"file {REACH} that git does not know" in err


def test_commit_between_releases_that_no_series_fits(
    world: World, clone: Clone, unchanged
) -> None:
    tree = clone()
    git(tree, "switch", "-q", "--detach", "HEAD~1")
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert f"supported are {NEW}, {OLD}; the nearest is {NEW}, 3 of 4 places" in err
    (patch,) = (world.patches / NEW).glob("0001-*")
    assert f"conflicts with {patch.name} at {MASK}, hunk 1 of 1 (lines 7-13)" in err
    err = world.refused("status", "--vllm", tree)
    assert "3 of 4 places" in err and "make apply VLLM= tries each series" in err


def fork(folder: Path, version: str, changes: dict[int, str]) -> Path:
    """A checkout with one commit, which has a release's files but for some lines."""
    write(folder, stock_files(version) | {MASK: text("mask", changes)})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "One commit of a fork")
    return folder


@pytest.mark.parametrize("changes", [{58: "other = 58"}, {12: "mine", 28: "mine"}])
def test_commit_between_releases(world: World, tmp_path: Path, changes: dict) -> None:
    """Lines beside the patches changed, too, and the release's files are not there."""
    tree = fork(tmp_path / "fork", NEW, changes)
    before = files_of(tree)
    out = world.good("apply", "--vllm", tree)
    assert f"Applied 4 patches for vLLM {NEW} in " in out
    assert "no release's commit; all fit" in out
    assert subjects(tree, "main") == list(TITLES)
    patched = changes | {10: "one_mask = 10", 30: "from_reach = 30"}
    assert (tree / MASK).read_text() == text("mask", patched)
    out = world.good("status", "--vllm", tree)
    assert "no release's commit" in out and out.count("  applied  0") == 4
    assert "Already applied" in world.good("apply", "--vllm", tree)
    assert world.good("unapply", "--vllm", tree)
    assert files_of(tree) == before


def test_series_that_fits_is_taken(world: World, tmp_path: Path) -> None:
    """The newest series is nearest and does not apply as a whole."""
    newest = release.get(NEW)
    built = build_tree.ensure_patched(newest)
    lines = {10: "one_mask = 10", 30: "from_reach = 30", 40: "more = 40"}
    commit(built, "[Core] One more", {MASK: text("mask", lines)})
    exporting.export(newest)
    changes = {40: "only_in_the_old_release = 1", 58: "other = 58"}
    tree = fork(tmp_path / "fork", OLD, changes)
    out = world.good("apply", "--vllm", tree)
    assert f"Applied 4 patches for vLLM {OLD} in " in out
    assert git(tree, "branch", "--show-current") == f"offload-parity/{OLD}"
    world.good("unapply", "--vllm", tree)
    err = world.refused("apply", "--vllm", tree, "--release", NEW)
    assert "conflicts with 0005-" in err and "(lines 37-43)" in err


def test_release_by_hand(world: World, tmp_path: Path, unchanged) -> None:
    """RELEASE= overrides what would be taken."""
    tree = fork(tmp_path / "fork", NEW, {58: "other = 58"})
    out = world.good("apply", "--vllm", tree, "--release", OLD)
    assert f"Applied 4 patches for vLLM {OLD} in " in out and "RELEASE= says" in out
    assert subjects(tree, "main") == list(TITLES)
    world.good("unapply", "--vllm", tree)
    unchanged(tree)
    world.refused("apply", "--vllm", tree, "--release", "1.2.3")


@pytest.mark.parametrize(
    ("path", "files", "number", "hunk"),
    [
        (MASK, {MASK: text("mask", {10: "mine = 10"})}, 1, "hunk 1 of 1 (lines 7-13)"),
        (MASK, {MASK: text("mask", {30: "mine = 30"})}, 2, "hunk 1 of 1 (lines 27-33)"),
        (TEST, {TEST: text("test", {50: "mine = 50"})}, 4, "hunk 1 of 1 (lines 47-53)"),
        (STORE, {STORE: None}, 1, "(the file is not there)"),
        (GONE, {GONE: text("mine", lines=5)}, 3, "hunk 1 of 1 (lines 1-5)"),
        (REACH, {REACH: "mine\n"}, 2, "(the file is there already)"),
    ],
)
def test_conflict_names_patch_file_and_hunk(
    world: World,
    clone: Clone,
    unchanged,
    path: str,
    files: dict,
    number: int,
    hunk: str,
) -> None:
    tree = clone()
    commit(tree, "Mine", files)
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    (patch,) = (world.patches / NEW).glob(f"000{number}-*")
    assert f"conflicts with {patch.name} at {path}" in err and hunk in err


@pytest.mark.parametrize("count", [1, 2, 3])
def test_partly_applied(world: World, clone: Clone, unchanged, count: int) -> None:
    tree = clone()
    patches = sorted((world.patches / NEW).glob("*.patch"))
    git(tree, "am", "-q", *map(str, patches[:count]))
    if count == 2:  # others on top
        commit(tree, "Mine", {MASK: (tree / MASK).read_text() + "# mine\n"})
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    applied = ", ".join(p.name for p in patches[:count])
    missing = ", ".join(p.name for p in patches[count:])
    assert f"applied {applied}; missing {missing}" in err
    code, out, _ = world.run("status", "--vllm", tree)
    assert code == 1
    assert (out.count("applied  0"), out.count("missing  0")) == (count, 4 - count)


def test_a_later_patch_picked_alone(world: World, clone: Clone, unchanged) -> None:
    tree = clone()
    (last,) = (world.patches / NEW).glob("0004-*")
    git(tree, "am", "-q", "-3", str(last))
    unchanged(tree)
    assert f"applied {last.name}; missing" in world.refused("apply", "--vllm", tree)


def test_one_patch_in_another_form(world: World, clone: Clone, unchanged) -> None:
    """Its change is there, squashed with others: neither its id nor its blobs match."""
    tree = clone()
    commit(
        tree,
        "Squashed",
        {
            MASK: text("mask", {10: "one_mask = 10", 20: "mine = 20"}),
            STORE: text("store", {20: "store_mask = 20"}),
            TEST: text("test", {5: "new_test = 5"}),
        },
    )
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert "in another form" in err and "0001-" in err


def test_all_applied_as_one_commit(world: World, clone: Clone) -> None:
    tree = clone()
    patches = sorted((world.patches / NEW).glob("*.patch"))
    git(tree, "am", "-q", *map(str, patches))
    git(tree, "reset", "-q", "--soft", "HEAD~4")
    git(tree, "commit", "-q", "-m", "All of it")
    assert "Already applied" in world.good("apply", "--vllm", tree)


def test_reverted_series_can_be_applied_again(world: World, clone: Clone) -> None:
    tree = clone()
    world.good("apply", "--vllm", tree)
    git(tree, "revert", "--no-edit", "main..HEAD")
    commit(tree, "Mine", {MASK: text("mask", {57: "mine = 1"})})
    git(tree, "branch", "-m", "elsewhere")
    world.good("apply", "--vllm", tree)
    assert subjects(tree, "elsewhere") == list(TITLES)


def start_am(tree: Path, world: World) -> None:
    (patch,) = (world.patches / NEW).glob("0002-*")
    subprocess.run(
        ("git", "am", str(patch)), cwd=tree, capture_output=True, check=False
    )


def start_conflict(tree: Path, verb: str) -> None:
    git(tree, "branch", "-f", "side", "HEAD")
    commit(tree, "Ours", {"vllm/x.py": "ours\n"})
    git(tree, "switch", "-q", "side")
    commit(tree, "Theirs", {"vllm/x.py": "theirs\n"})
    git(tree, "switch", "-q", "main")
    subprocess.run(("git", verb, "side"), cwd=tree, capture_output=True, check=False)


@pytest.mark.parametrize("what", ["am", "rebase", "merge", "cherry-pick", "bisect"])
def test_something_in_progress(
    world: World, clone: Clone, unchanged, what: str
) -> None:
    tree = clone()
    git(tree, "config", "user.name", "Me")
    git(tree, "config", "user.email", "me@example.org")
    if what == "am":
        commit(tree, "Mine", {MASK: text("mask", {30: "mine"})})
        start_am(tree, world)
    elif what == "bisect":
        git(tree, "bisect", "start")
    else:
        start_conflict(tree, what)
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert what in err and "in progress" in err


def test_branch_is_there_already(world: World, clone: Clone, unchanged) -> None:
    tree = clone()
    git(tree, "branch", BRANCH)
    unchanged(tree)
    err = world.refused("apply", "--vllm", tree)
    assert f"has a branch {BRANCH} already" in err


def test_other_owner(
    world: World, clone: Clone, unchanged, tmp_path: Path, monkeypatch
) -> None:
    tree = clone()
    unchanged(tree)
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\nGIT_TEST_ASSUME_DIFFERENT_OWNER=1 "
        f'exec {shutil.which("git")} "$@"\n'
    )
    fake.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
        err = world.refused("apply", "--vllm", tree)
    assert "belongs to another user" in err and "safe.directory" in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    world: World, clone: Clone, tmp_path: Path, how: signal.Signals
) -> None:
    """Ctrl-C at one git command after the other: all or nothing."""
    tree = clone()
    before = snapshot(tree)
    real = shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    stopped = 0
    for turn in range(1, 200, 4 if how == signal.SIGINT else 11):
        count = tmp_path / "count"
        count.write_text("0")
        fake.write_text(
            f"""#!/bin/sh
n=$(($(cat "{count}") + 1)); echo $n > "{count}"
[ $n = {turn} ] && kill -{how.value} 0
exec {real} "$@"
"""
        )
        fake.chmod(0o755)
        run = world.start(
            "apply", "--vllm", str(tree), start_new_session=True,
            env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
        )  # fmt: skip
        _, err = run.communicate(timeout=60)
        assert "Traceback" not in err
        if git(tree, "branch", "--show-current") == BRANCH:
            # from the switch on it is done whatever arrives
            assert subjects(tree, "main") == list(TITLES)
            assert git(tree, "status", "--porcelain") == ""
            world.good("unapply", "--vllm", tree)
        else:
            stopped += 1
            assert run.returncode != 0
        assert snapshot(tree) == before
        if int(count.read_text()) < turn:
            break
    else:
        pytest.fail("never ran to its end")
    assert stopped > 2


def test_unapply_returns_to_where_it_started(world: World, clone: Clone) -> None:
    tree = clone()
    git(tree, "switch", "-q", "-c", "feature/x")
    commit(tree, "Mine", {"mine.py": "x\n"})
    before = snapshot(tree)
    world.good("apply", "--vllm", tree)
    out = world.good("unapply", "--vllm", tree)
    assert f"branch {BRANCH} is gone, you are on feature/x" in out
    assert snapshot(tree) == before
    assert "no branch that make apply made" in world.refused("unapply", "--vllm", tree)


def test_unapply_refuses_to_drop_commits(world: World, clone: Clone, unchanged) -> None:
    tree = clone()
    world.good("apply", "--vllm", tree)
    commit(tree, "My own fix", {"mine.py": "x\n"})
    unchanged(tree)
    err = world.refused("unapply", "--vllm", tree)
    assert "My own fix" in err and "git switch main" in err


def test_unapply_refuses_to_drop_uncommitted_changes(
    world: World, clone: Clone, unchanged
) -> None:
    tree = clone()
    world.good("apply", "--vllm", tree)
    write(tree, {STORE: "mine\n"})
    unchanged(tree)
    assert f"such as {STORE}" in world.refused("unapply", "--vllm", tree)
    code, out, _ = world.run("status", "--vllm", tree)
    assert code == 1 and f"drifted  {STORE}" in out


def test_unapply_from_another_branch(world: World, clone: Clone) -> None:
    tree = clone()
    before = snapshot(tree)
    world.good("apply", "--vllm", tree)
    git(tree, "switch", "-q", "main")
    world.good("unapply", "--vllm", tree)
    assert snapshot(tree) == before


def test_unapply_when_the_first_branch_is_gone(world: World, clone: Clone) -> None:
    tree = clone()
    start = git(tree, "rev-parse", "HEAD")
    world.good("apply", "--vllm", tree)
    git(tree, "branch", "-D", "main")
    assert f"you are on commit {start[:12]}" in world.good("unapply", "--vllm", tree)
    assert git(tree, "rev-parse", "HEAD") == start


def test_status(world: World, clone: Clone, unchanged) -> None:
    tree = clone()
    out = world.good("status", "--vllm", tree)
    assert f"vLLM {NEW}" in out and out.count("not applied  0") == 4
    world.good("apply", "--vllm", tree)
    unchanged(tree)
    assert world.good("status", "--vllm", tree).count("applied  0") == 4
