# SPDX-License-Identifier: Apache-2.0
"""Commits to patch files and back: edit, export, check."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from conftest import (
    MASK,
    NEW,
    OLD,
    REACH,
    STORE,
    TITLES,
    World,
    commit,
    git,
    text,
    write,
)


@pytest.fixture
def tree(world: World) -> Path:
    """The patched tree, as `make edit` leaves it."""
    world.good("edit")
    return world.build / f"vllm-{NEW}"


def folder(world: World) -> dict[str, tuple]:
    """The release's folder: bytes, identity and time of each file."""
    return {
        path.name: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in (world.patches / NEW).iterdir()
    }


def patch(world: World, number: int) -> Path:
    (path,) = (world.patches / NEW).glob(f"{number:04}-*.patch")
    return path


def test_edit_says_where(world: World) -> None:
    out = world.good("edit")
    tree = world.build / f"vllm-{NEW}"
    assert str(tree) in out and f"offload-parity/{NEW}" in out
    assert f"make export RELEASE={NEW}" in out
    (tree / MASK).write_text("mine\n")
    assert "is being edited: uncommitted changes" in world.good("edit")


def test_export_of_unchanged_commits_touches_no_file(world: World, tree: Path) -> None:
    before = folder(world)
    assert "nothing changed" in world.good("export")
    assert folder(world) == before
    # whatever the maintainer's git is set to, in this tree too
    for setting in (
        "format.signature=me", "format.numbered=true", "format.pretty=fuller",
        "format.attach=x", "format.cc=a@b.example", "format.to=a@b.example",
        "format.headers=X-Mine: 1", "format.signOff=true", "format.from=true",
        "format.thread=deep", "format.coverLetter=true", "format.useAutoBase=true",
        "format.suffix=.txt", "format.subjectPrefix=RFC", "format.notes=true",
        "format.encodeEmailHeaders=false", "format.filenameMaxLength=30",
        "format.outputDirectory=/nowhere", "diff.noprefix=true",
        "diff.mnemonicPrefix=true", "diff.algorithm=patience", "diff.context=9",
        "diff.interHunkContext=20", "diff.renames=copies", "diff.orderFile=/none",
        "diff.suppressBlankEmpty=true", "diff.statGraphWidth=3", "diff.statNameWidth=9",
        "diff.indentHeuristic=false", "diff.external=/bin/false", "core.abbrev=5",
        "color.ui=always", "i18n.logOutputEncoding=latin1", "diff.relative=true",
        "diff.submodule=log", "diff.wordRegex=.", "diff.colorMoved=zebra",
        "format.noprefix=true", "format.mboxrd=true", "log.follow=true",
    ):  # fmt: skip
        git(tree, "config", *setting.split("=", 1))
    assert "nothing changed" in world.good("export")
    assert folder(world) == before


def test_git_am_of_the_exported_patches_gives_them_again(
    world: World, tree: Path, tmp_path: Path
) -> None:
    """Plain git, as a stranger would use it, then an export: the same bytes."""
    tip = git(tree, "rev-parse", "HEAD^{tree}")
    git(tree, "reset", "-q", "--hard", "base")
    names = sorted(map(str, (world.patches / NEW).glob("*.patch")))
    git(tree, "am", "-q", "--keep-non-patch", *names)
    assert git(tree, "rev-parse", "HEAD^{tree}") == tip
    before = folder(world)
    assert "nothing changed" in world.good("export")
    assert folder(world) == before


def test_apply_after_export_is_up_to_date(world: World, tree: Path) -> None:
    commit(tree, "[Core] One more\n\nWhy.", {REACH: "positions = [1]\n"})
    out = world.good("export")
    assert "new: 0005-Core-One-more.patch" in out and "rewritten: series" in out
    assert out.count("\n") == 2
    series = (world.patches / NEW / "series").read_text()
    assert series.startswith("# in order\n0001-")
    assert series.endswith("\n0005-Core-One-more.patch\n")
    assert "Already applied: 5 patches" in world.good("apply")
    world.good("check", "--release", NEW)
    ids = git(tree, "log", "--format=%T %s", "base..")
    shutil.rmtree(world.build)
    world.good("apply")
    assert git(tree, "log", "--format=%T %s", "base..") == ids


def test_dropped_and_reworded_commits(world: World, tree: Path) -> None:
    git(tree, "reset", "-q", "--hard", "HEAD~2")
    git(tree, "commit", "-q", "--amend", "-m", "[Core] Shorter")
    old = [patch(world, n).name for n in (2, 3, 4)]
    out = world.good("export")
    assert "new: 0002-Core-Shorter.patch" in out
    assert all(f"removed: {name}" in out for name in old)
    names = (world.patches / NEW / "series").read_text().splitlines()[1:]
    assert names == [patch(world, 1).name, "0002-Core-Shorter.patch"]
    assert {p.name for p in (world.patches / NEW).glob("*.patch")} == set(names)
    world.good("check", "--release", NEW)


def test_all_commits_dropped(world: World, tree: Path) -> None:
    git(tree, "reset", "-q", "--hard", "base")
    world.good("export")
    assert (world.patches / NEW / "series").read_text() == "# in order\n"
    assert "Already applied: 0 patches" in world.good("apply")
    assert "no patches yet" in world.refused(
        "apply", "--vllm", str(tree), "--release", NEW
    )


@pytest.mark.parametrize(
    "message",
    [
        "One line\nand its title goes on\n\nBody.\n",
        "[A][B] " + "word " * 60 + "\n\nä " + "x" * 300 + "\n",
        "Ünïcödé — title 🚀\n\nTrailer-like: yes\nSigned-off-by: A <a@b>\n",
        "t\n\n  indented\n\n\n> quoted\nFrom here on it is text\n",
        't: with = ?odd?= =?utf-8?q?marks?= and "quotes" <a@b>\n',
    ],
)
def test_odd_messages_survive(world: World, tree: Path, message: str) -> None:
    git(tree, "config", "commit.cleanup", "verbatim")
    commit(tree, message, {REACH: "positions = [1]\n"})
    world.good("export")
    before = folder(world)
    shutil.rmtree(world.build)
    world.good("edit")
    world.good("export")
    assert folder(world) == before
    world.good("check", "--release", NEW)


@pytest.mark.parametrize(
    "message",
    [
        "t\n\ntext\n---\nlost\n",
        "t\n\ndiff --git a/x b/x\n",
        "[PATCH v2] lost\n\nbody",
    ],
)
def test_messages_that_a_mail_would_lose_are_refused(
    world: World, tree: Path, message: str
) -> None:
    commit(tree, message, {REACH: "positions = [1]\n"})
    before = folder(world)
    err = world.refused("export")
    assert "does not come back from its patch file" in err
    assert folder(world) == before


@pytest.mark.parametrize("content", ["no end of line", "a\r\nb\r\n", "\f\n\v\n", ""])
def test_odd_contents_survive(world: World, tree: Path, content: str) -> None:
    commit(tree, "Odd", {"vllm/odd file ü.py": "x\n"})
    (tree / "vllm/odd file ü.py").write_bytes(content.encode())
    git(tree, "commit", "-q", "-am", "Odder")
    world.good("export")
    world.good("check", "--release", NEW)
    shutil.rmtree(world.build)
    world.good("apply")
    assert (tree / "vllm/odd file ü.py").read_bytes() == content.encode()


def test_empty_and_merge_commits_are_refused(world: World, tree: Path) -> None:
    before = folder(world)
    git(tree, "commit", "-q", "--allow-empty", "-m", "Nothing")
    assert "changes nothing: drop it" in world.refused("export")
    git(tree, "reset", "-q", "--hard", "HEAD~1")
    git(tree, "switch", "-q", "-c", "side", "HEAD~1")
    commit(tree, "Side", {"side.py": "x\n"})
    git(tree, "switch", "-q", "-")
    git(tree, "merge", "-q", "--no-edit", "side")
    assert "do not follow the base commit in a line" in world.refused("export")
    assert folder(world) == before


def test_export_needs_a_clean_tree_on_its_branch(world: World, tree: Path) -> None:
    before = folder(world)
    write(tree, {"new_test.py": "x\n"})
    assert "uncommitted changes, such as new_test.py" in world.refused("export")
    (tree / "new_test.py").unlink()
    git(tree, "switch", "-q", "--detach")
    assert f"not on branch offload-parity/{NEW}" in world.refused("export")
    assert folder(world) == before


def test_export_without_a_tree(world: World) -> None:
    assert f"run make edit RELEASE={OLD}" in world.refused("export", "--release", OLD)


@pytest.mark.parametrize("failing", ["nothing at all", "worktree remove"])
def test_interrupted_export_leaves_the_folder_as_it_was(
    world: World, tree: Path, tmp_path: Path, failing: str
) -> None:
    # Git's first try to remove the work tree fails if a child of it still writes there.
    commit(tree, "[Core] One more", {REACH: "positions = [1]\n"})
    before = folder(world)
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(
        f"""#!/bin/sh
case "$*" in
    *"am -q"*) kill -{signal.SIGINT.value} $PPID;;
    *"{failing}"*) if mkdir {tmp_path}/once 2>/dev/null; then exit 1; fi;;
esac
exec {shutil.which("git")} "$@"
"""
    )
    fake.chmod(0o755)
    run = world.start("export", env={"PATH": f"{fake.parent}:{os.environ['PATH']}"})
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err
    assert folder(world) == before
    assert git(tree, "worktree", "list").count("\n") == 0
    world.good("export")


def test_check_passes(world: World) -> None:
    out = world.good("check")
    assert f"{NEW}: 4 patches, ok" in out and f"{OLD}: 4 patches, ok" in out


def check_fails(world: World) -> str:
    code, _, err = world.run("check")
    assert code == 1
    return err


def test_check_listed_but_missing(world: World) -> None:
    path = patch(world, 3)
    path.unlink()
    assert f"series lists {path.name}, which is not there" in check_fails(world)


def test_check_present_but_not_listed(world: World) -> None:
    (world.patches / NEW / "0009-stray.patch").write_text("x")
    assert "0009-stray.patch is not in series" in check_fails(world)


def test_check_listed_twice(world: World) -> None:
    with (world.patches / NEW / "series").open("a") as file:
        file.write(patch(world, 1).name + "\n")
    assert f"lists {patch(world, 1).name} 2 times" in check_fails(world)


def test_check_wrong_order(world: World) -> None:
    series = world.patches / NEW / "series"
    series.write_text("\n".join(reversed(series.read_text().splitlines())))
    assert "before it leave" in check_fails(world)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What was wrong.", "What was wrong, reworded by hand.  "),
        ("Subject: [PATCH]", "Subject: [PATCH 1/4]"),
        (" 3 files changed", " 4 files changed"),
        ("From 0000", "From 1234"),
    ],
)
def test_check_patch_that_an_export_would_write_otherwise(
    world: World, old: str, new: str
) -> None:
    path = patch(world, 1)
    data = path.read_text()
    assert old in data
    path.write_text(data.replace(old, new))
    assert f"{path.name}: an export would write it otherwise" in check_fails(world)


def test_check_wrong_file_name(world: World) -> None:
    path = patch(world, 1)
    path.rename(path.with_name("0001-other.patch"))
    series = world.patches / NEW / "series"
    series.write_text(series.read_text().replace(path.name, "0001-other.patch"))
    assert "an export would write it otherwise" in check_fails(world)


def test_check_result_that_differs_from_the_index_line(world: World) -> None:
    path = patch(world, 1)
    path.write_text(path.read_text().replace("+store_mask = 20", "+store_mask = 2"))
    assert f"{path.name}: {STORE} comes out as blob" in check_fails(world)


def test_check_commits_that_were_not_exported(world: World, tree: Path) -> None:
    commit(tree, "Mine", {MASK: text("mine")})
    err = check_fails(world)
    assert "was edited" in err and f"make export RELEASE={NEW}" in err
    world.good("check", "--release", OLD)


def test_check_names_every_fault(world: World) -> None:
    patch(world, 1).unlink()
    (world.patches / OLD / "stray.patch").write_text("x")
    assert check_fails(world).count("error: ") == 2


def test_titles_are_those_of_the_commits(world: World, tree: Path) -> None:
    out = world.good("apply")
    assert all(title in out for title in TITLES)
