# SPDX-License-Identifier: Apache-2.0
"""Reading a series and placing its hunks."""

import random
import subprocess
from pathlib import Path

import pytest

from conftest import (
    AUTHOR,
    GONE,
    MASK,
    NEW,
    REACH,
    STORE,
    TEST,
    TITLES,
    World,
    git,
    text,
)
from offload_parity import patches, release
from offload_parity.errors import UserError


def series() -> patches.Series:
    return patches.read_series(release.get(NEW))


def test_series_is_read_in_order(world: World) -> None:
    read = series()
    assert [patch.title for patch in read.patches] == list(TITLES)
    assert {patch.author for patch in read.patches} == {f'"{AUTHOR[0]}" <{AUTHOR[1]}>'}
    assert [file.path for file in read.patches[0].files] == [TEST, STORE, MASK]


def test_chains_follow_each_file_through_the_series(world: World) -> None:
    chains = series().chains()
    assert set(chains) == {MASK, STORE, TEST, REACH, GONE}
    after = {}, {10: "one_mask = 10"}, {10: "one_mask = 10", 30: "from_reach = 30"}
    mask = [patches.blob_id(text("mask", lines).encode()) for lines in after]
    assert chains[MASK] == (mask[0], mask[1], mask[2], mask[2], mask[2])
    assert chains[REACH][:2] == (None, None) and chains[REACH][2] == chains[REACH][4]
    assert chains[GONE][2] and chains[GONE][3:] == (None, None)


def test_order_that_does_not_chain_is_refused(world: World) -> None:
    path = world.patches / NEW / "series"
    names = path.read_text().split("\n")[1:-1]
    names[0], names[2] = names[2], names[0]
    path.write_text("\n".join(names))
    with pytest.raises(UserError, match=r"0001.*starts from .* before it leave"):
        series().chains()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Subject: ", "X-Subject: ", "no Subject line"),
        ("From: ", "X-From: ", "no From line"),
        ("Date: ", "X-Date: ", "no Date line"),
        ("diff --git", "diff --nothing", "there is no diff in it"),
        ("+one_mask", "one_mask", "hunk"),
        ("-mask_10 = 10\n+one_mask = 10\n", " mask_10 = 10\n", "changes nothing"),
    ],
)
def test_damaged_patch_names_its_file(
    world: World, old: str, new: str, words: str
) -> None:
    (path,) = (world.patches / NEW).glob("0001-*")
    data = path.read_text()
    if old == "From: ":  # the first line, From <id>, stays
        data = data.replace("\nFrom: ", "\nX-From: ")
    path.write_text(data.replace(old, new))
    err = world.refused("apply")
    assert words in err and path.name in err


def test_short_blob_ids_are_refused(world: World) -> None:
    (path,) = (world.patches / NEW).glob("0001-*")
    id_ = series().chains()[MASK][0]
    path.write_text(path.read_text().replace(id_, id_[:12]))
    assert "no index line with full blob ids" in world.refused("apply")


def test_listed_patch_that_is_missing(world: World) -> None:
    (path,) = (world.patches / NEW).glob("0002-*")
    path.unlink()
    err = world.refused("apply")
    assert path.name in err and "series lists it" in err


@pytest.mark.parametrize("again", ["{}", "../9.8.0/{}"])
def test_a_series_lists_each_patch_of_its_folder_once(world: World, again: str) -> None:
    series = world.patches / NEW / "series"
    (name, *_) = patches.listed(series.parent)
    series.write_text(f"{series.read_text()}{again.format(name)}\n")
    with pytest.raises(UserError, match=r"series lists .*list each patch of its fol"):
        patches.read_series(release.get(NEW))


def test_series_file_that_is_missing(world: World) -> None:
    (world.patches / NEW / "series").unlink()
    assert "series is missing" in world.refused("apply")


def applied(data: bytes | None, number: int, path: str) -> bytes | None:
    file = next(f for f in series().patches[number].files if f.path == path)
    return patches.apply_file(data, file)


def test_hunks_find_their_place_when_lines_moved(world: World) -> None:
    moved = "# new\n" * 7 + text("mask")
    want = "# new\n" * 7 + text("mask", {10: "one_mask = 10"})
    assert applied(moved.encode(), 0, MASK) == want.encode()


@pytest.mark.parametrize("change", [{9: "other"}, {13: "other"}, {10: "one_mask = 10"}])
def test_hunk_whose_lines_differ_has_no_place(world: World, change: dict) -> None:
    with pytest.raises(patches.HunkMismatch):
        applied(text("mask", change).encode(), 0, MASK)


def test_file_that_should_not_be_there_or_be_there(world: World) -> None:
    assert applied(None, 1, REACH) == b"positions = []"
    with pytest.raises(patches.HunkMismatch):
        applied(b"something", 1, REACH)
    with pytest.raises(patches.HunkMismatch):
        applied(None, 0, MASK)
    with pytest.raises(patches.HunkMismatch):
        applied((text("gone", lines=5) + "own line\n").encode(), 2, GONE)


def test_same_results_as_git_on_random_edits(tmp_path: Path) -> None:
    """Random files with random edits: what git apply accepts comes out the same."""
    rng = random.Random(7)
    git(tmp_path, "init", "-q")
    agreed = 0
    for _ in range(60):
        # few different lines, so that context is ambiguous; ends with or without \n
        old = [rng.choice("abcd\r\f") + str(rng.randrange(9)) for _ in range(30)]
        new = list(old)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(new))
            new[at : at + rng.randrange(3)] = ["x" * rng.randrange(1, 4)]
        ends = [rng.choice(["\n", ""]) for _ in range(2)]
        before, after = (
            ("\n".join(lines) + end).encode()
            for lines, end in zip((old, new), ends, strict=True)
        )
        (tmp_path / "f").write_bytes(before)
        git(tmp_path, "add", "f")
        (tmp_path / "f").write_bytes(after)
        diff = subprocess.run(
            ("git", "diff", "--full-index", "--no-ext-diff"),
            cwd=tmp_path, capture_output=True, check=True,
        ).stdout  # fmt: skip
        if not diff:
            continue
        mail = b"From: a <a@b>\nDate: x\nSubject: s\n\n---\n" + diff
        (tmp_path / "p").write_bytes(mail)
        (file,) = patches.read_patch(tmp_path / "p").files
        assert file.old_blob == patches.blob_id(before)
        assert patches.apply_file(before, file) == after
        # the same file with lines of its own at the start
        shifted = b"own\n" * rng.randrange(1, 5) + before
        (tmp_path / "f").write_bytes(shifted)
        by_git = subprocess.run(
            ("git", "apply", "p"), cwd=tmp_path, capture_output=True, check=False
        )
        if by_git.returncode == 0:
            agreed += 1
            assert patches.apply_file(shifted, file) == (tmp_path / "f").read_bytes()
    assert agreed > 20


def test_conflict_names_file_and_hunk(world: World) -> None:
    patch = series().patches[0]
    files = {MASK: text("mask"), STORE: text("store", {21: "x"}), TEST: text("test")}
    where = patches.conflict(patch, lambda path: files[path].encode())
    assert where == f"{STORE}, hunk 1 of 1 (lines 17-23)"
    assert patches.conflict(patch, lambda path: files[path].encode(), [MASK]) == ""
