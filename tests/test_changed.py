# SPDX-License-Identifier: Apache-2.0
"""Which series a change touches, in a repository made for it."""

import shutil
from pathlib import Path

import pytest

import release_tests
from conftest import NEW, OLD, World, git
from offload_parity import changed, patches, release
from offload_parity.errors import UserError
from offload_parity.git import Repo


@pytest.fixture
def history(world: World) -> Repo:
    """The world's patches as a repository with one commit."""
    git(world.root, "init", "-q", "-b", "main")
    (world.root / ".gitignore").write_text("build\ncache\n")
    git(world.root, "add", "-A")
    git(world.root, "commit", "-q", "-m", "First")
    return Repo(world.root)


def names() -> list[str]:
    return patches.listed(release.get(NEW).folder)


def edit(world: World, number: int) -> None:
    """Change a word in the message of a patch."""
    path = world.patches / NEW / names()[number]
    path.write_text(path.read_text().replace("+0000", "+0100"))


def test_the_base_is_the_commit_before_or_where_the_branch_began(
    world: World, history: Repo
) -> None:
    first = history.commit_id("HEAD")
    assert changed.base(repo=history) is None
    git(world.root, "commit", "-q", "--allow-empty", "-m", "Second")
    assert changed.base(repo=history).commit == first
    second = history.commit_id("HEAD")
    git(world.root, "switch", "-q", "-c", "topic")
    for number in range(2):
        git(world.root, "commit", "-q", "--allow-empty", "-m", f"Topic {number}")
    assert changed.base(repo=history).commit == second
    assert "where it left main" in changed.base(repo=history).words
    assert changed.base(first, history).commit == first
    with pytest.raises(UserError, match="SINCE=nowhere is no commit"):
        changed.base("nowhere", history)


def test_no_repository_has_no_base(tmp_path: Path) -> None:
    assert changed.base(repo=Repo(tmp_path)) is None


def test_a_shallow_checkout_has_no_base(
    world: World, history: Repo, tmp_path: Path
) -> None:
    git(world.root, "commit", "-q", "--allow-empty", "-m", "Second")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{world.root}", "shallow")
    assert changed.base(repo=Repo(tmp_path / "shallow")) is None


def test_the_first_changed_patch(world: World, history: Repo) -> None:
    new, old = release.get(NEW), release.get(OLD)
    assert changed.first_changed(new, "HEAD", history) is None
    edit(world, 2)
    assert changed.first_changed(new, "HEAD", history) == 2
    assert changed.first_changed(old, "HEAD", history) is None
    git(world.root, "commit", "-q", "-a", "-m", "Changed")
    assert changed.first_changed(new, "HEAD", history) is None
    assert changed.first_changed(new, "HEAD^", history) == 2


def test_a_patch_that_was_put_in_or_taken_out(world: World, history: Repo) -> None:
    new = release.get(NEW)
    series = world.patches / NEW / "series"
    lines = series.read_text().splitlines(keepends=True)
    series.write_text("".join(lines[:-1]))
    assert changed.first_changed(new, "HEAD", history) == 3
    series.write_text("".join([lines[0], *lines[2:]]))
    assert changed.first_changed(new, "HEAD", history) == 0


def test_series_outside_the_repository_are_told(
    world: World, history: Repo, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"tells what changed: give RELEASE="):
        changed.first_changed(release.get(NEW), "HEAD", Repo(tmp_path / "elsewhere"))


def test_a_new_release_is_changed_from_its_first_patch(
    world: World, history: Repo
) -> None:
    shutil.rmtree(world.patches / OLD)
    git(world.root, "commit", "-q", "-a", "-m", "Gone")
    git(world.root, "checkout", "-q", "HEAD^", "--", f"patches/{OLD}")
    assert changed.first_changed(release.get(OLD), "HEAD", history) == 0


def test_touched_says_what_it_compares(
    world: World, history: Repo, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(changed, "ROOT", world.root)
    assert release_tests.touched(None) == {release.get(NEW): 0}
    assert "no history to compare with" in capsys.readouterr().out
    git(world.root, "commit", "-q", "--allow-empty", "-m", "Second")
    assert release_tests.touched(None) == {}
    assert capsys.readouterr().out.endswith("the commit before: none\n")
    edit(world, 1)
    assert release_tests.touched(None) == {release.get(NEW): 1}
    assert f"{NEW} from patch 2" in capsys.readouterr().out


def test_nothing_touched_is_nothing_to_do(
    world: World, history: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "ROOT", world.root)
    code, out, err = world.run_script(release_tests, "each-commit", "--since", "HEAD")
    assert (code, err) == (0, "") and "no commit to test" in out
    code, _, err = world.run_script(
        release_tests, "each-commit", "--since", "HEAD", "--release", NEW
    )
    assert code == 1 and "give one of them" in err
