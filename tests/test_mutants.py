# SPDX-License-Identifier: Apache-2.0
"""Mutants: what is changed, where they stand, and when one counts as noticed."""

import ast
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import mutants as script
from conftest import NEW, World, git
from offload_parity import build_tree, mutants, patches, release, simulation
from offload_parity.errors import UserError
from offload_parity.mutants import DECIDING, Overlay

SOURCE = '''\
def other(a, b):
    return a < b


def kept(a, b):
    """It's größer < kleiner."""
    assert a < b
    if a <= b and b:
        return [x for x in a if x == b]
    return a - (b if a is None else 1)
'''


def changed(source: str) -> dict[str, str]:
    function = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "kept"
    )
    return dict(mutants.mutate(source, function))


def test_comparisons_sums_and_conditions_change_one_at_a_time() -> None:
    found = changed(SOURCE)
    assert set(found) == {
        "kept: a <= b => a < b",
        "kept: a <= b and b => not (a <= b and b)",
        "kept: x == b => x != b",
        "kept: a - (b if a is None else 1) => a + (b if a is None else 1)",
        "kept: a is None => not a is None",
    }
    one = found["kept: a <= b => a < b"]
    assert one == SOURCE.replace("a <= b and", "(a < b) and")
    for text in found.values():
        compile(text, "x", "exec")
        assert text.count("\n") == SOURCE.count("\n") and "größer" in text


def test_the_same_change_at_two_places_has_two_names() -> None:
    source = "def kept(a):\n    return a + 1, a + 1\n"
    assert set(changed(source)) == {
        "kept: a + 1 => a - 1",
        "kept: a + 1 => a - 1 (no. 2)",
    }


def deciding(folder: Path) -> Path:
    """A tree with the files and functions that decide in a release."""
    for path, names in DECIDING.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for name in names[:1]:
            *classes, last = name.split(".")
            lines += [f"class {each}:" for each in classes]
            body = f"def {last}(a):\n    return a < 1\n"
            lines.append(textwrap.indent(body, "    ") if classes else body)
        file.write_text("\n".join(lines))
    (folder / "vllm" / "__init__.py").write_text("here = 1\n")
    (folder / ".git").write_text("")
    return folder


def test_functions_are_found_by_name_in_either_release(tmp_path) -> None:
    tree = deciding(tmp_path / "tree")
    assert [m.name for m in mutants.mutants(tree)] == [
        "replay_boundaries: a < 1 => a <= 1",
        "reachable_block_mask: a < 1 => a <= 1",
        "_reachable_boundaries: a < 1 => a <= 1",
    ]
    next(tree.rglob("kv_cache_coordinator.py")).write_text("def renamed(): pass\n")
    with pytest.raises(UserError, match="has none of replay_boundaries: name what"):
        mutants.mutants(tree)


def test_mutants_name_their_function_and_are_read_back(tmp_path) -> None:
    found = mutants.mutants(deciding(tmp_path / "tree"))
    assert [m.function for m in found] == [names[0] for names in DECIDING.values()]
    mutants.write(found, tmp_path / "file")
    lines = (tmp_path / "file").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [vars(m) for m in found]


def test_overlay_shows_changed_files_and_leaves_the_tree_alone(tmp_path) -> None:
    tree = deciding(tmp_path / "tree")
    overlay = Overlay(tmp_path / "over", tree)
    one, two = list(DECIDING)[:2]
    before = (tree / one).read_text()
    for files in ({one: b"1"}, {one: None, two: b"2"}, {"vllm/new/a.py": b"3"}, {}):
        overlay.show(files)
        for path in (one, two, "vllm/new/a.py"):
            plain = tree / path
            want = files.get(path, plain.read_bytes() if plain.exists() else None)
            shown = overlay.path / path
            assert (shown.read_bytes() if shown.exists() else None) == want
        assert (overlay.path / "vllm" / "__init__.py").read_text() == "here = 1\n"
        assert not (overlay.path / ".git").exists()
    assert (tree / one).read_text() == before


def test_a_patch_is_taken_out_and_what_builds_on_it(world: World) -> None:
    wanted = release.get(NEW)
    tree = build_tree.repo(build_tree.ensure_patched(wanted))
    before = git(tree.path, "for-each-ref")
    # 0002 changes lines that 0001 made, 0003 a line of it; 0004 only the test.
    found = mutants.without(tree, wanted, 2)
    assert found.patch.startswith("0003-") and found.dropped == ()
    titles = git(tree.path, "log", "--format=%s", f"base..{found.commit}")
    assert (
        titles.splitlines()[0] == "[Test] Only a test" and len(titles.splitlines()) == 3
    )
    first = mutants.without(tree, wanted, 0)
    assert first.dropped and first.dropped[-1].startswith("0003-")
    before_it, with_it = mutants.around(tree, 2)
    titles = git(tree.path, "log", "--format=%s", f"base..{with_it}").splitlines()
    assert len(titles) == 3
    assert before_it == git(tree.path, "rev-parse", f"{with_it}^").strip()
    assert git(tree.path, "for-each-ref") == before
    assert git(tree.path, "status", "--porcelain") == ""


def test_excuses_are_read_and_checked(world: World) -> None:
    wanted = release.get(NEW)
    assert mutants.excuses(wanted) == mutants.Excuses()
    path = wanted.folder / "mutants.toml"
    path.write_text('[survivors]\n"f: a < b => a <= b" = "never equal"\n')
    assert mutants.excuses(wanted).survivors == {"f: a < b => a <= b": "never equal"}
    path.write_text("[surviors]\n")
    with pytest.raises(UserError, match=r"mutants.toml: .*surviors.*; mend the file"):
        mutants.excuses(wanted)


@pytest.fixture
def judged(monkeypatch, world: World):
    """Verdicts on a patch of the world's series, from what runs of the laws find."""

    def judge(patch: str, *runs: list[str]) -> script.Verdict:
        told = list(runs)
        monkeypatch.setattr(
            script, "judged", lambda *_, **__: [{"known": told.pop(0), "seconds": 1}]
        )
        env = SimpleNamespace(python=Path("/x"))
        patches = script.Patches(release.get(NEW), env, 1)
        (verdict,) = patches.verdicts(mutants.Excuses(), f"without {patch}", {"known"})
        assert not told
        return verdict

    return judge


def test_what_the_laws_find_anyway_kills_nothing(judged) -> None:
    assert judged("0003", ["known"]).killer is None
    verdict = judged("0003", ["known", "new", "newer"])
    assert verdict.killer == "new" and verdict.name.endswith(".patch")


def test_a_patch_that_others_need_counts_in_the_series_up_to_it(judged) -> None:
    verdict = judged("0001", ["old", "new"], ["old", "known"])
    assert verdict.killer == "new"
    assert verdict.name.endswith(".patch (in the series up to it)")
    assert judged("0001", ["old"], ["old"]).killer is None
    # It applies, yet what is there calls what is not.
    broken = ["L5 c: TypeError in a.py:f: f() takes 1 argument"]
    verdict = judged("0003", broken, ["old"], ["old"])
    assert verdict.killer is None and verdict.name.endswith("up to it)")


def test_mutants_are_read_from_a_run(monkeypatch, tmp_path) -> None:
    records = [{"known": []}, {"mutant": "m", "killer": None}]

    class Told:
        def __init__(self, *_, **__):
            pass

        def run(self, jobs):
            (job,) = jobs
            assert job.arguments == ("mutants", "--jobs", "2", "--file", "f")
            return [SimpleNamespace(records=records)]

    monkeypatch.setattr(script, "Runner", Told)
    env = SimpleNamespace(python=Path("/x"))
    assert script.judged(env, tmp_path, Path("f"), 2) == records


def test_survivors_and_stale_excuses_are_faults() -> None:
    Verdict = script.Verdict
    verdicts = [
        Verdict("a", "L1 …"), Verdict("b", None, "equal"), Verdict("c", None),
        Verdict("d", "L1 …", "equal"),
    ]  # fmt: skip
    excuses = mutants.Excuses(dict.fromkeys("bde", "equal"), {"0001": "", "0009": ""})
    assert list(script.faults(verdicts, excuses, {"0001"})) == [
        "no law notices c",
        "mutants.toml excuses d, which is killed",
        "mutants.toml excuses e, which is no mutant",
        "mutants.toml names 0009, which is no patch",
    ]


def test_the_list_is_written_beside_the_series(world: World) -> None:
    wanted = release.get(NEW)
    verdicts = [script.Verdict("a", "L1 …"), script.Verdict("b", None, "equal")]
    found = json.loads(script.write(wanted, verdicts).read_text())
    digest = patches.series_digest(patches.read_series(wanted))
    assert found.pop("series") == digest
    assert found == {"killed": {"a": "L1 …"}, "excused": {"b": "equal"}, "survived": []}


def test_a_verdict_says_what_became_of_a_mutant() -> None:
    assert "SURVIVED  x" in str(script.Verdict("x", None))
    assert "excused   x\n" in str(script.Verdict("x", None, "equivalent"))
    assert "by L1" in str(script.Verdict("x", "L1 …"))


def test_a_run_that_does_not_end_is_broken(tmp_path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    job = simulation.Job(simulation.Tree("m", tmp_path), ("mutants",))
    with pytest.raises(simulation.Broken, match="did not end in 0 s") as broken:
        simulation.Runner(python, 1, timeout_s=0.3, show=False).run([job])
    assert broken.value.why == "it did not end in 0 s"
