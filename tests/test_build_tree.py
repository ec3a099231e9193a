# SPDX-License-Identifier: Apache-2.0
"""The built trees: ids, second runs, interruptions, edits."""

import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import (
    GONE,
    MASK,
    NEW,
    OLD,
    REACH,
    ROOT,
    STORE,
    TITLES,
    World,
    add_release,
    commit,
    files_of,
    git,
    small_files,
    snapshot,
    stock_files,
    text,
)
from offload_parity import build_tree, index, release
from offload_parity.errors import UserError
from offload_parity.git import GitError


@pytest.fixture
def tree(world: World) -> Path:
    """Where the tree of the default release is built."""
    return world.build / f"vllm-{NEW}"


def test_apply_builds_the_tree(world: World, tree: Path) -> None:
    out = world.good("apply")
    assert "Applied 4 patches" in out and f"vllm-{NEW}" in out
    assert git(tree, "rev-parse", "base")[:12] in out
    for title in TITLES:
        assert title in out
    assert f"Next: make test RELEASE={NEW}\n" in out
    assert out.endswith("To serve it: make apply PYTHON=<your server's python>\n")
    assert git(tree, "log", "--reverse", "--format=%s", "base..") == "\n".join(TITLES)
    assert git(tree, "rev-list", "--count", "HEAD") == "5"
    assert git(tree, "branch", "--show-current") == f"offload-parity/{NEW}"
    assert git(tree, "status", "--porcelain") == ""
    assert (tree / REACH).read_text() == "positions = []"
    assert not (tree / GONE).exists()
    # every file of the sdist is in the base commit, ignored ones too
    listed = git(
        tree, "-c", "core.quotePath=false", "ls-tree", "-r", "--name-only", "base"
    )
    assert sorted(listed.splitlines()) == sorted(stock_files(NEW))
    assert (tree / "tools/run.sh").stat().st_mode & 0o111


def test_named_release(world: World) -> None:
    assert f"vLLM {OLD}" in world.good("apply", "--release", OLD)
    mask = (world.build / f"vllm-{OLD}" / MASK).read_text()
    assert "only_in_the_old_release" in mask and "one_mask" in mask


def stamps(folder: Path) -> dict[str, tuple]:
    """Identity, time and size of everything under ``folder``."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_ino, path.lstat().st_mtime_ns, path.lstat().st_size,
        )
        for path in folder.rglob("*")
    }  # fmt: skip


def test_second_apply_rewrites_nothing(world: World, tree: Path) -> None:
    world.good("apply")
    before = stamps(tree)
    assert world.good("apply").startswith("Already applied: 4 patches")
    assert stamps(tree) == before


def test_second_apply_needs_no_sdist(world: World) -> None:
    world.good("apply")
    shutil.rmtree(world.cache)
    assert "Already applied" in world.good("apply")
    assert not world.cache.exists()


def test_ids_are_the_same_whatever_the_user_has_configured(
    world: World, tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world.good("apply")
    ids = git(tree, "log", "--format=%H")
    shutil.rmtree(world.build)

    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "applypatch-msg", "post-checkout", "commit-msg"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "attributes").write_text("* text eol=crlf\n")
    home = Path(os.environ["HOME"])
    (home / ".gitconfig").write_text(
        f"""
[core]
    autocrlf = true
    hooksPath = {hooks}
    attributesFile = {tmp_path}/attributes
    fileMode = false
[commit]
    gpgSign = true
[init]
    defaultBranch = trunk
    defaultObjectFormat = sha256
    templateDir = {hooks}
[user]
    name = Somebody Else
    useConfigOnly = true
[am]
    keepcr = true
    threeWay = false
[apply]
    whitespace = error-all
[format]
    signature = mine
    numbered = true
[diff]
    noprefix = true
    algorithm = patience
    context = 9
[i18n]
    commitEncoding = ISO-8859-1
"""
    )
    for name, value in {
        "GIT_AUTHOR_NAME": "Other",
        "GIT_AUTHOR_DATE": "2001-02-03T04:05:06Z",
        "GIT_COMMITTER_EMAIL": "other@example.org",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_DIR": str(tmp_path / "nowhere"),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
    }.items():
        monkeypatch.setenv(name, value)
    old = os.umask(0o077)
    try:
        world.good("apply")
        world.good("check")
    finally:
        os.umask(old)
    for name in ("GIT_DIR", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name)
    assert git(tree, "log", "--format=%H") == ids
    assert not (tmp_path / "hook-ran").exists()


def test_works_in_a_path_with_spaces_and_inside_another_repository(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outer = tmp_path / "öuter repo"
    outer.mkdir()
    git(outer, "init", "-q")
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(outer / "build dir"))
    world.good("apply")
    assert git(outer, "worktree", "list").count("\n") == 0
    tree = outer / "build dir" / f"vllm-{NEW}"
    assert git(tree, "rev-list", "--count", "HEAD") == "5"


@pytest.mark.parametrize(
    ("how", "step"), [(signal.SIGINT, 5), (signal.SIGTERM, 9), (signal.SIGKILL, 2)]
)
def test_interrupted_build_is_done_again(
    world: World, tree: Path, tmp_path: Path, how: signal.Signals, step: int
) -> None:
    """Stopped at one git command after the other."""
    real = shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    running = tmp_path / "running"
    stopped = 0
    for turn in range(1, 60, step):
        count = tmp_path / "count"
        count.write_text("0")
        fake.write_text(
            f"""#!/bin/sh
exec 9>"{running}"; flock -s 9
n=$(($(cat "{count}") + 1)); echo $n > "{count}"
[ $n = {turn} ] && kill -{how.value} $PPID && sleep 0.1
exec {real} "$@"
"""
        )
        fake.chmod(0o755)
        path = f"{fake.parent}:{os.environ['PATH']}"
        run = world.start("apply", env={"PATH": path})
        _, err = run.communicate(timeout=60)
        assert "Traceback" not in err
        if run.returncode == 0 and int(count.read_text()) < turn:
            break
        stopped += run.returncode != 0
        assert "pplied" in world.good("apply")
        assert git(tree, "log", "--reverse", "--format=%s", "base..") == "\n".join(
            TITLES
        )
        assert git(tree, "status", "--porcelain") == ""
        assert git(tree, "worktree", "list").count("\n") == 0 or how == signal.SIGKILL
        extra = {p.name for p in world.build.iterdir()} - {f"vllm-{NEW}", ".lock"}
        assert not extra
        # The last git of a run that was killed outlives it, and still writes.
        with running.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        shutil.rmtree(tree)
    else:
        pytest.fail("never ran to its end")
    assert stopped > 2


def test_two_runs_side_by_side(world: World, tree: Path) -> None:
    runs = [world.start("apply") for _ in range(3)]
    outputs = []
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "")
        outputs.append(out)
    assert sum("Applied 4" in out for out in outputs) == 1
    assert sum("Already applied" in out for out in outputs) == 2


@pytest.mark.parametrize("edit", ["commit", "reset", "dirty", "staged", "detached"])
def test_edited_tree_is_left_alone(
    world: World, tree: Path, unchanged, edit: str
) -> None:
    world.good("apply")
    if edit == "commit":
        commit(tree, "Mine", {MASK: text("mine")})
    elif edit == "reset":
        git(tree, "reset", "-q", "--hard", "HEAD~2")
    elif edit == "detached":
        git(tree, "checkout", "-q", "--detach")
    else:
        (tree / MASK).write_text("mine\n")
        if edit == "staged":
            git(tree, "add", MASK)
    unchanged(tree)
    err = world.refused("apply")
    assert "was edited" in err
    assert f"make export RELEASE={NEW}" in err and f"make unapply RELEASE={NEW}" in err


def test_tree_follows_a_changed_series(world: World, tree: Path) -> None:
    world.good("apply")
    series = world.patches / NEW / "series"
    series.write_text("".join(series.read_text().splitlines(keepends=True)[:-1]))
    assert "another version of the series" in world.run("status", "--release", NEW)[1]
    assert "Applied 3 patches" in world.good("apply")
    assert git(tree, "log", "--reverse", "--format=%s", "base..") == "\n".join(
        TITLES[:3]
    )
    assert git(tree, "status", "--porcelain") == ""


def test_patch_that_does_not_apply_leaves_no_half_built_tree(
    world: World, tree: Path
) -> None:
    (path,) = (world.patches / NEW).glob("0001-*")
    path.write_text(path.read_text().replace(" mask_9 = 9", " mask_9 = other"))
    err = world.refused("apply")
    assert f"{path.name} does not apply" in err and f"{MASK}, hunk 1 of 1" in err
    assert git(tree, "log", "--format=%s") == f"vLLM {NEW}"
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "worktree", "list").count("\n") == 0


def test_patch_edited_by_hand_is_noticed(world: World) -> None:
    """It applies, but its result is not what its index line says."""
    (path,) = (world.patches / NEW).glob("0001-*")
    path.write_text(path.read_text().replace("+one_mask = 10", "+one_mask = 11"))
    err = world.refused("apply")
    assert f"{path.name}: {MASK} comes out as blob" in err and "edited by hand" in err


def test_unapply_and_apply_again(world: World, tree: Path) -> None:
    world.good("apply")
    tip = git(tree, "rev-parse", "HEAD")
    assert f"stock vLLM {NEW}" in world.good("unapply")
    assert git(tree, "rev-parse", "HEAD") == git(tree, "rev-parse", "base")
    assert (tree / GONE).exists() and not (tree / REACH).exists()
    out = world.good("status", "--release", NEW)
    assert "stock" in out and out.count("not applied  0") == 4 and "missing" not in out
    world.good("unapply")
    world.good("apply")
    assert git(tree, "rev-parse", "HEAD") == tip


def test_unapply_loses_nothing_that_somebody_made(world: World, tree: Path) -> None:
    world.good("apply")
    mine = commit(tree, "Mine", {MASK: text("mine")})
    (tree / STORE).write_text("not committed\n")
    out = world.good("unapply")
    assert "git stash list" in out and f"edited/{mine[:12]}" in out
    assert git(tree, "rev-parse", f"edited/{mine[:12]}") == mine
    git(tree, "checkout", "-q", mine)
    git(tree, "stash", "pop")
    assert (tree / STORE).read_text() == "not committed\n"


def test_unapply_from_another_branch_keeps_both(world: World, tree: Path) -> None:
    world.good("apply")
    mine = commit(tree, "Mine", {MASK: text("mine")})
    git(tree, "switch", "-q", "-c", "side", "base")
    other = commit(tree, "Other", {STORE: text("other")})
    out = world.good("unapply")
    for tip in (mine, other):
        assert f"edited/{tip[:12]}" in out
        assert git(tree, "rev-parse", f"edited/{tip[:12]}") == tip


def test_unapply_during_a_rebase_is_refused(
    world: World, tree: Path, unchanged
) -> None:
    world.good("apply")
    commit(tree, "Mine", {MASK: text("mine")})
    git(tree, "rebase", "-q", "-i", "base", GIT_SEQUENCE_EDITOR="sed -i 1s/pick/edit/")
    unchanged(tree)
    assert "rebase is in progress" in world.refused("unapply")


@pytest.mark.parametrize("damage", ["HEAD", "refs", "objects"])
def test_damaged_tree_is_refused_and_nothing_around_it_touched(
    world: World, tree: Path, unchanged, damage: str
) -> None:
    """The repository that encloses the build folder is not worked on instead."""
    outer = world.root
    git(outer, "init", "-q")
    commit(outer, "Project", {"README.md": "project\n", ".gitignore": "build/\n"})
    world.good("apply")
    (outer / "README.md").write_text("being edited\n")
    place = tree / ".git" / damage
    place.rename(world.root / "build" / damage)
    unchanged(outer)
    for name in ("unapply", "apply", "export", "edit", "check"):
        assert "is damaged: remove it (rm -r" in world.refused(name)
    code, out, _ = world.run("status")
    assert code == 1 and "is damaged: remove it" in out and f"vLLM {OLD}" in out


def test_state_without_a_tip_is_never_written(world: World, tree: Path) -> None:
    world.good("apply")
    state = build_tree.read_state(build_tree.repo(tree))
    with pytest.raises(UserError, match="damaged"):
        build_tree.write_state(build_tree.repo(tree), build_tree.State("", None))
    assert build_tree.read_state(build_tree.repo(tree)) == state


def test_git_fault_is_the_line_that_says_it() -> None:
    stderr = (
        "hint: x\nerror: The following files would be overwritten by checkout:\n"
        "\tvllm/x.py\nPlease move them.\nAborting\n"
    )
    assert str(GitError(("-c", "a=b", "switch"), stderr)) == (
        "git switch failed: error: The following files would be overwritten by "
        "checkout: vllm/x.py"
    )
    assert str(GitError(("x",), "one\ntwo\n")) == "git x failed: two"
    assert str(GitError(("x",), "")) == "git x failed: no message"


def test_unapply_without_a_tree(world: World) -> None:
    assert "is not there" in world.refused("unapply")


def test_something_else_in_the_way(world: World, tree: Path) -> None:
    tree.mkdir(parents=True)
    (tree / "mine").write_text("mine")
    before = files_of(tree)
    assert "in the way" in world.refused("apply")
    assert files_of(tree) == before


def test_stock_tree(world: World, tree: Path) -> None:
    wanted = release.get(NEW)
    stock = build_tree.ensure_stock(wanted)
    assert stock == world.build / f"vllm-{NEW}-stock"
    assert git(stock, "rev-parse", "HEAD") == git(stock, "rev-parse", "base")
    names = set(files_of(stock)) - {".git"}
    assert names == set(stock_files(NEW))
    world.good("apply")
    before = stamps(stock)
    assert build_tree.ensure_stock(wanted) == stock and stamps(stock) == before


def test_edits_of_the_stock_tree_are_put_aside(
    world: World, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = build_tree.ensure_stock(release.get(NEW))
    (stock / MASK).write_text("committed")
    git(stock, "commit", "-qam", "mine")
    tip = git(stock, "rev-parse", "HEAD").strip()
    (stock / MASK).write_text("changed")
    capsys.readouterr()
    build_tree.ensure_stock(release.get(NEW))
    assert (stock / MASK).read_text() == text("mask")
    assert git(stock, "show", f"stash@{{0}}:{MASK}").strip() == "changed"
    assert git(stock, "rev-parse", f"edited/{tip[:12]}").strip() == tip
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("made stock again" in line for line in said)


def test_stock_tree_after_the_project_folder_moved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = release.get(NEW)
    build_tree.ensure_stock(wanted)
    world.good("apply")
    world.build.rename(world.root / "moved")
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(world.root / "moved"))
    stock = build_tree.ensure_stock(wanted)
    assert git(stock, "status", "--porcelain") == ""
    assert "Already applied" in world.good("apply")


def test_archive_that_leaves_its_folder_is_refused(
    world: World, tmp_path: Path
) -> None:
    shutil.rmtree(world.patches / NEW)
    add_release(world, NEW, {"../../evil": "x", **stock_files(NEW)})
    assert "cannot be unpacked" in world.refused("apply")
    assert not list(world.root.rglob("evil"))


def test_full_disk_while_building(world: World, tree: Path) -> None:
    run = world.start("apply", preexec_fn=small_files)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and err.count("\n") == 1, err
    assert not tree.exists()
    assert [p.name for p in world.build.iterdir() if p.name != ".lock"] == []


def test_no_git(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in world.refused("apply")


def test_status(world: World, tree: Path) -> None:
    out = world.good("status")
    assert f"vLLM {NEW}: source in the cache, no tree built" in out
    assert f"vLLM {OLD}: source in the cache" in out
    world.good("apply")
    (world.cache / f"vllm-{OLD}.tar.gz").write_bytes(b"damaged")
    out = world.good("status")
    assert out.count("applied  0") == 4 and f"vLLM {OLD}: source not in the" in out
    (tree / MASK).write_text("mine\n")
    before = snapshot(tree)
    code, out, err = world.run("status")
    assert code == 1 and "edited" in out and MASK in out and err == ""
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("version", "base"),
    [
        ("0.33.0", "4db4ea595c7fc3c325eb095c2a0c728d56010aae"),
        ("0.32.0", "88a86ae9ed80a1bcfef74a37e9ba08b31cc5fb29"),
        ("0.31.0", "3de02f5cf6ce2d6fa7af745825011f57f9d4ba06"),
        ("0.30.0", "5d8a5947ea1756a1ad067ea5d8247cdfb33a144f"),
        ("0.29.0", "b334f1d06fae8998bda9c267ae595ec57d1bf4f0"),
        ("0.28.0", "84ec7d7100e2b7c8121d7a35ad2430973918e286"),
        ("0.27.1", "db67fbf7afd0ce97fe606e57ca1c17f69dedd870"),
        ("0.26.0", "620fdcbcb6b6d7e0104061f37865a556fcf7a9bc"),
        ("0.25.1", "6f372067e1059cad23094c6a0ba531a1608c5183"),
    ],
)
def test_own_series_applies_to_the_real_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, base: str
) -> None:
    """The base commit has this id on every machine, and every blob id is right."""
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    wanted = release.read(ROOT / "patches" / version)
    tree = build_tree.ensure_patched(wanted)
    assert git(tree, "rev-parse", "base") == base
    assert index.cached(wanted)
    shown = subprocess.run(
        ("git", "diff", "--check", "base.."), cwd=tree, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (shown.returncode, shown.stdout) == (0, "")
