# SPDX-License-Identifier: Apache-2.0
"""How two series differ."""

from conftest import MASK, NEW, OLD, World, commit, files_of, text
from offload_parity import build_tree, exporting, release


def lines(out: str) -> list[str]:
    """The line of each patch."""
    return [line for line in out.splitlines()[1:] if not line.startswith("    ")]


def test_series_that_differ_in_one_patch(world: World) -> None:
    """From the patches alone: no tree is there before."""
    newest = release.get(NEW)
    tree = build_tree.ensure_patched(newest)
    more = {10: "one_mask = 10", 30: "from_reach = 30", 50: "more = 50"}
    commit(tree, "[Core] One more", {MASK: text("mask", more)})
    exporting.export(newest)
    before = files_of(tree)
    out = world.good("range-diff", "--a", NEW, "--b", OLD)
    assert f"< only for {NEW}, > only for {OLD}" in out.splitlines()[0]
    found = lines(out)
    assert [line.split()[2] for line in found] == ["=", "=", "=", "=", "<"]
    assert found[4].endswith("[Core] One more")
    assert files_of(tree) == before
    assert world.good("status").count("the series is applied") == 1


def test_a_tree_that_is_edited_does_not_count(world: World) -> None:
    tree = build_tree.ensure_patched(release.get(OLD))
    commit(tree, "Mine", {MASK: "mine\n"})
    out = world.good("range-diff", "--a", OLD, "--b", NEW)
    assert len(lines(out)) == 4 and "Mine" not in out


def test_a_series_that_was_changed_since_its_tree_was_built(world: World) -> None:
    build_tree.ensure_patched(release.get(OLD))
    path = world.patches / OLD / "series"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    found = lines(world.good("range-diff", "--a", OLD, "--b", NEW))
    assert [line.split()[2] for line in found] == ["=", "=", "=", ">"]


def test_a_series_without_patches(world: World) -> None:
    (world.patches / OLD / "series").write_text("")
    err = world.refused("range-diff", "--a", NEW, "--b", OLD)
    assert "has no patches: nothing to compare" in err
