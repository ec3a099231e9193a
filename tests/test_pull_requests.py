# SPDX-License-Identifier: Apache-2.0
"""A series as pull requests: branches, texts, and vLLM's rules held against them."""

import json
import sys
from pathlib import Path

import pytest

import upstream
from conftest import GONE, MASK, NEW, OLD, STORE, TEST, TITLES, World, git, stock_files
from offload_parity import build_tree, each_commit, patches, proof, release, series_lint
from offload_parity.each_commit import GOOD, Ended
from offload_parity.errors import UserError
from offload_parity.pull_requests import (
    branches,
    changes,
    ci_areas,
    description,
    evidence,
    identity,
    pack,
    rules,
)
from offload_parity.pull_requests.evidence import Evidence
from offload_parity.pull_requests.identity import Submitter
from offload_parity.pull_requests.rules import FAULT, HAND, Added
from offload_parity.unit_env import UnitEnv

WHO = Submitter("Ada Lovelace", "ada@engine.org")
TOML = """\
[[change]]
patches = ["0001", "0002"]
title = "[Bugfix][Core] One mask, and its title"
summary = "Short."
since = "Since the beginning."
alternatives = "None were good."
[[change.related]]
number = 123
what = "It says so."
differs = "This differs."
[[change]]
patches = ["0003"]
[[change]]
patches = ["0004"]
alone = true
"""


@pytest.fixture
def known(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose user is known to git."""
    monkeypatch.setenv("GIT_COMMITTER_NAME", WHO.name)
    monkeypatch.setenv("GIT_COMMITTER_EMAIL", WHO.email)
    return world


def write_toml(world: World, text: str = TOML) -> None:
    (world.patches / NEW / "upstream.toml").write_text(text)


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("[Core][Bugfix] Retain it", "[Bugfix][Core] Retain it"),
        ("[KVConnector][Offloading][Bugfix] Store it", "[Bugfix][KV Offload] Store it"),
        ("[KVConnector][Mooncake] Store it", "[KV Connector][Mooncake] Store it"),
        ("[KVConnector] Store a list[int] too", "[KV Connector] Store a list[int] too"),
        ("[Core] Read [x] only", "[Core] Read [x] only"),
    ],
)
def test_titles_have_the_tags_of_the_guide(title: str, wanted: str) -> None:
    assert changes.upstream_title(title) == wanted


def test_without_a_file_each_patch_is_a_change(world: World) -> None:
    found = changes.read(release.get(NEW))
    assert [c.title for c in found] == [changes.upstream_title(t) for t in TITLES]
    assert found[0].name == "01-one-mask"
    assert found[0].seen_on == (NEW, OLD)


def test_the_file_groups_patches_and_says_more(world: World) -> None:
    write_toml(world)
    found = changes.read(release.get(NEW))
    assert [len(c.patches) for c in found] == [2, 1, 1]
    assert found[0].title == "[Bugfix][Core] One mask, and its title"
    assert found[0].related[0].number == 123
    assert [c.alone for c in found] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[change]", "mend the file"),
        ("x = 1", "'change'"),
        ('[[change]]\npatches = ["0001"]', "look at 0002"),
        (TOML + '[[change]]\npatches = ["0004"]', "look at 0004"),
        (TOML + '[[change]]\npatches = ["0009"]', "look at 0009"),
        (TOML + "why = 1", "unknown key why"),
        (TOML + "[[change]]", "names no patches"),
        (TOML.replace("title = ", "# "), "needs a title of its own"),
        (TOML + 'formerly = ["Gone"]', "no series has a patch 'Gone'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    world: World, text: str, words: str
) -> None:
    write_toml(world, text)
    with pytest.raises(UserError, match=r"upstream\.toml") as error:
        changes.read(release.get(NEW))
    assert words in str(error.value)


def test_every_committed_file_fits_its_series() -> None:
    found = [r for r in release.supported() if changes.path_of(r).exists()]
    assert release.default() in found
    for each in found:
        for change in changes.read(each):
            assert change.summary and change.alternatives, change.title
            assert len(change.title) <= rules.TITLE_LENGTH, change.title


def test_no_identity_is_refused_before_anything_is_done(world: World) -> None:
    code, out, err = world.run_script(upstream, "--release", NEW)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "git does not know who you are" in err and "git config" in err
    assert not world.build.exists()


def test_the_identity_is_the_user_s_own(known: World) -> None:
    assert identity.submitter() == WHO
    assert WHO.reachable
    for email in ("ci@localhost", "m@x.invalid", "you@Example.com", "r@h.localdomain"):
        assert not Submitter("M", email).reachable, email


@pytest.mark.parametrize(
    ("name", "email"),
    [
        ("Ada", "nobody"),
        ("Ada", "a b@c.org"),
        ("Ada", "a@@b.org"),
        ("Jos\udce9", "a@b.org"),
    ],
)
def test_an_identity_that_signs_nothing_is_named(
    known: World, monkeypatch: pytest.MonkeyPatch, name: str, email: str
) -> None:
    monkeypatch.setenv("GIT_COMMITTER_NAME", name)
    monkeypatch.setenv("GIT_COMMITTER_EMAIL", email)
    with pytest.raises(UserError, match=r"git knows you as .*mend user\.name"):
        identity.submitter()


def test_branches_follow_each_other_and_are_signed_off(known: World) -> None:
    write_toml(known)
    wanted = release.get(NEW)
    folder = pack.folder_of(wanted)
    bare, made = branches.build(wanted, changes.read(wanted), WHO, folder)
    base = bare.commit_id("base")
    assert [b.root for b in made] == [base, made[0].tip, base]
    assert made[0].name == "upstream/01-one-mask-and-its-title"
    for branch in made:
        for commit in branch.commits:
            text = bare.out("log", "-1", "--format=%an <%ae>%n%cn <%ce>%n%B", commit)
            assert text.startswith(f"{WHO}\n{WHO}\n[")
            assert text.rstrip().endswith(
                f"\n\n{branches.ASSISTED}\nSigned-off-by: {WHO}"
            )
    # What only the proof reads is left out, the rest is kept.
    first = bare.out("log", "-1", "--format=%B", made[0].commits[0])
    assert "What was wrong." in first
    # The stacked files are those of the series, the lone one changes its own alone.
    tree = build_tree.repo(build_tree.patched_path(wanted))
    assert bare.out("rev-parse", f"{made[1].tip}^{{tree}}") == tree.out(
        "rev-parse", "HEAD~1^{tree}"
    )
    assert bare.lines("diff", "--name-only", "base", made[2].tip) == [TEST]


def test_the_mails_apply_to_a_clone_of_vllm(known: World, clone) -> None:
    write_toml(known)
    found = pack.write(release.get(NEW), WHO, None)
    tree = clone(NEW)
    for branch in found.branches:
        mail = found.folder / f"{branch.change.name}.mbox"
        git(tree, "am", "-q", "--3way", "--keep-non-patch", str(mail))
    log = git(tree, "log", "--format=%s", "-4").splitlines()
    assert log[-1] == "[Bugfix][KV Connector] One mask"
    assert not (tree / GONE).exists()


def test_a_change_that_does_not_stand_alone_is_refused(known: World) -> None:
    write_toml(
        known, TOML.replace('patches = ["0003"]', 'patches = ["0003"]\nalone = true')
    )
    with pytest.raises(UserError, match=r"0003.*does not apply to the release"):
        pack.write(release.get(NEW), WHO, None)


def test_body_leaves_out_what_the_proof_reads() -> None:
    message = (
        f"Title\n\nWrong.\n\n{proof.FAILS}\n  t::a: x\n    more\n\n"
        f"{proof.HARDWARE}\n  t::b: y\n\nMore words.\n"
    )
    assert branches.body_of(message) == "Wrong.\n\nMore words."


def evidence_of(**facts) -> Evidence:
    row = proof.Row("p", "tests/v1/test_mask.py::test_a", 2, "assert 1 == 2", "passed")
    ended = Ended(row.test, GOOD, 2)
    return Evidence(**({"failing": [row], "passing": [ended]} | facts))


def test_the_text_says_all_that_is_asked_for(known: World) -> None:
    write_toml(known)
    wanted = release.get(NEW)
    all_of_them = changes.read(wanted)
    _, made = branches.build(wanted, all_of_them, WHO, pack.folder_of(wanted))
    message = f"Why.\n\n{proof.FAILS}\n  tests/v1/test_mask.py::test_a: assert 1 == 2\n"
    template = "## Overview\n\n---\n\n- [ ] I thought.\n**BEFORE SUBMITTING**\n"
    text = description.write(wanted, made[0], message, evidence_of(), WHO, [], template)
    for words in (
        "<!-- title: [Bugfix][Core] One mask, and its title -->",
        "Short.",
        "https://github.com/vllm-project/vllm/issues/123",
        "This differs.",
        "pytest tests/v1/test_mask.py",
        "FAILED tests/v1/test_mask.py::test_a - assert 1 == 2",
        "PASSED tests/v1/test_mask.py::test_a (2 cases)",
        "Since the beginning.",
        "None were good.",
        f"{OLD} to {NEW}",
        description.AI_STATEMENT,
        "- [ ] I thought.",
        str(WHO),
        "nothing has to land before it",
    ):
        assert words in text, words
    assert proof.FAILS not in text
    unknown = evidence.gather(wanted, made[1].change, None)
    stacked = description.write(
        wanted, made[1], message, unknown, WHO, all_of_them[:1], template
    )
    assert "Lands after: [Bugfix][Core] One mask" in stacked
    assert description.NO_PROOF in stacked and description.NOT_RUN in stacked
    assert "make matrix RELEASE=" in stacked and "make bench RELEASE=" in stacked
    for each in (text, stacked):
        assert description.SEARCHED in each and description.EVALUATION in each
    assert "No older release was looked at." in stacked


def test_paragraphs_are_not_wrapped_and_each_commit_has_its_title(known: World) -> None:
    text = "One\ntwo.\n\n- a\n  b\n- c\n\n    x = 1\n    y\n\nThree\nfour."
    wanted = "One two.\n\n- a\n  b\n- c\n\n    x = 1\n    y\n\nThree four."
    assert description.unwrapped(text) == wanted
    write_toml(known)
    folder = pack.write(release.get(NEW), WHO, None).folder
    several = (folder / "01-one-mask-and-its-title.md").read_text()
    assert several.count("\n#### ") == 2 and "\n#### One mask\n\n" in several
    assert "####" not in (folder / "03-only-a-test.md").read_text()


def test_a_law_that_notices_is_a_claim(known: World) -> None:
    write_toml(known)
    change = changes.read(release.get(NEW))[0]
    names = [patch.name for patch in change.patches]
    laws = {names[0]: "L1 g, 0, gpu: replay", names[1]: "tests/t.py::test_a: 1 == 2"}
    branch = branches.Branch(change, "b", "", ("",))
    text = description.write(
        release.get(NEW), branch, "", evidence_of(laws=laws), WHO, [], ""
    )
    assert 'Without "One mask" a law of' in text
    assert "L1 (replay); shape, retention interval, tier and case: `g, 0, gpu" in text
    # Tests are shown as such, and once.
    assert "1 == 2`" not in text


def test_what_several_patches_share_is_no_effect_of_one(world: World) -> None:
    names = [p.name for p in patches.read_series(release.get(NEW)).patches]
    killed = {
        f"without {names[0]}": "L1 one",
        f"without {names[1]} (in the series up to it)": "L2 both",
        f"without {names[2]}": "L2 both",
        "mask: a => b": "L1 one",
    }
    (world.patches / NEW / "mutants.json").write_text(json.dumps({"killed": killed}))
    assert evidence.noticed(release.get(NEW)) == {names[0]: "L1 one"}
    found = {"series": "another", "killed": killed}
    (world.patches / NEW / "mutants.json").write_text(json.dumps(found))
    assert evidence.noticed(release.get(NEW)) == {}


def test_costs_come_from_the_bench(world: World) -> None:
    stored = {"geometry": "g", "retention": 0, "tokens": 9, "chunks": 1000}
    report = {
        "stored": [
            stored | {"tree": "stock", "megabytes": 10.5},
            stored | {"tree": "patched", "megabytes": 9.5, "chunks": 900},
        ],
        "patched_over_stock": [
            {"decision": "all", "ratio": 0.9}, {"decision": "all", "ratio": 1.1},
            {"decision": "store", "ratio": 7},
        ],
        "noise": 1.2,
        "faults": [],
    }  # fmt: skip
    (world.patches / NEW / "bench.json").write_text(json.dumps(report))
    change = changes.read(release.get(NEW))[0]
    costs = evidence.gather(release.get(NEW), change, None).costs
    assert "| g | 0 | 1,000 chunks, 10.5 MB | 900 chunks, 9.5 MB |" in costs
    assert "0.90 to 1.10 in 2 settings (noise 1.20), 0 of them too slow" in costs
    report["series"] = "another"
    (world.patches / NEW / "bench.json").write_text(json.dumps(report))
    costs = evidence.gather(release.get(NEW), change, None).costs
    assert costs.startswith(evidence.NO_FIGURES)


STEPS = """\
steps:
- label: Core
  source_file_dependencies:
  - vllm/
  - "!vllm/distributed/"
  - tests/v1/core
  commands:
  - export X=1
  - pytest -v -s -m 'not cpu_test' v1/core && pytest v1/other/test_x.py::test_y
- label: Shell
  commands:
  - bash run.sh
"""


def test_ci_areas_say_what_is_not_run(tmp_path: Path) -> None:
    areas = tmp_path / ci_areas.AREAS
    areas.mkdir(parents=True)
    (areas / "a.yaml").write_text(STEPS)
    (areas / "empty.yaml").write_text("# all disabled\n")
    (step,) = ci_areas.read(tmp_path)
    assert step.targets == (ci_areas.Target("v1/core", "not cpu_test"),)
    files = ["vllm/v1/core/a.py", "vllm/distributed/b.py", "tests/v1/core/test_a.py"]

    def gaps(files: list[str], text: str = "") -> dict[str, str]:
        return ci_areas.gaps([step], files, lambda _: text)

    assert list(gaps(files)) == ["vllm/distributed/b.py"]
    assert gaps(["tests/v1/kv/test_b.py"]) == {
        "tests/v1/kv/test_b.py": "no step runs it"
    }
    assert gaps(files[:1] + files[2:]) == {}
    marked = gaps(files[2:], "pytestmark = pytest.mark.cpu_test")
    assert marked == {files[2]: "no step runs it"}


@pytest.mark.parametrize(
    ("path", "marks", "text", "held"),
    [
        ("v1/core/test_a.py", "", "", True),
        ("v1/core/test_*.py", "", "", True),
        ("v1/cor", "", "", False),
        ("v1", "cpu_test", "", False),
        ("v1", "cpu_test", "@pytest.mark.cpu_test", True),
        ("v1", "cpu_test or slow", "", True),
    ],
)
def test_what_a_step_hands_to_pytest(
    path: str, marks: str, text: str, held: bool
) -> None:
    target = ci_areas.Target(path, marks)
    assert target.holds("tests/v1/core/test_a.py", text) is held


def states(results) -> dict[str, str]:
    return {result.rule: result.state for result in results}


def check(known: World, **facts) -> dict[str, str]:
    """The rules' results on the first change of the made-up series."""
    wanted = release.get(NEW)
    bare, made = branches.build(
        wanted, changes.read(wanted), WHO, pack.folder_of(wanted)
    )
    tree = build_tree.stock_path(wanted)
    build_tree.ensure_stock(wanted)
    text = facts.pop("text", description.AI_STATEMENT)
    found = rules.check_one(bare, made[0], text, evidence_of(**facts), tree, [])
    return states(found)


def test_a_good_change_leaves_only_what_hands_must_do(known: World) -> None:
    assert set(check(known).values()) == {HAND}


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        ({"text": "nothing"}, "AI assistance"),
        ({"failing": None}, "failure shown before the fix"),
        ({"doubts": ["fails for another reason"]}, "failure shown before the fix"),
        ({"passing": None}, "tests at its tip"),
        ({"passing": [Ended("t", "failed", 1, "no")]}, "tests at its tip"),
    ],
)
def test_faults(known: World, facts: dict, rule: str) -> None:
    assert check(known, **facts)[rule] == FAULT


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("    time.sleep(1)", FAULT),
        ("@pytest.mark.skipif(x)", FAULT),
        ("@pytest.mark.flaky(reruns=2)", FAULT),
        ("    assert a == approx(b)", FAULT),
        ("    request = MagicMock()", HAND),
        ("    assert hit == 6912", None),
    ],
)
def test_lines_of_tests_that_vllm_does_not_take(line: str, state: str | None) -> None:
    added = [Added("tests/a.py", 3, line), Added("tests/a.py", 4, "vllm_runner")]
    found = list(rules.check_tests(added, ["tests/a.py"]))
    assert [result.state for result in found] == ([state] if state else [])


def test_what_users_see_needs_a_page() -> None:
    added = [Added("vllm/metrics.py", 1, '    name="vllm:new_counter",')]
    (found,) = rules.check_docs(added, ["vllm/metrics.py"])
    assert found.state == FAULT
    (found,) = rules.check_docs(added, ["vllm/metrics.py", "docs/usage/metrics.md"])
    assert found.state == rules.OK
    assert not list(rules.check_docs([Added("vllm/a.py", 1, "x = 1")], ["vllm/a.py"]))


def test_a_title_is_short_and_has_a_known_tag(world: World) -> None:
    guide = "### PR Title and more\n- `[Bugfix]`, `[Hardware][Vendor]`\n### X\n`[Y]`"
    assert rules.known_tags(guide) == {"Bugfix", "Hardware", "Vendor"}
    change = changes.read(release.get(NEW))[1]
    found = list(rules.check_title(change, guide))
    assert [result.state for result in found] == [FAULT, FAULT]


def test_big_changes_take_more_than_a_pull_request() -> None:
    def added(count: int) -> list[Added]:
        return [Added("vllm/v1/core/a.py", n, "x") for n in range(count)]

    assert states(rules.check_size(added(501), []))["size"] == FAULT
    assert states(rules.check_size(added(251), []))["size"] == HAND
    assert not list(rules.check_size(added(9), ["vllm/v1/core/a.py"]))
    found = list(rules.check_size(added(60), ["vllm/v1/core/a.py"]))
    assert [result.rule for result in found] == ["core components"]


def test_what_concerns_all(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, newest = release.get(OLD), release.get(NEW)
    tree = build_tree.ensure_stock(wanted)
    who = Submitter("CI", "ci@localhost")
    found = list(rules.check_all(wanted, newest, [], who, tree))
    assert found[0].state == FAULT and "make lint" in found[0].words
    assert any("takes changes to main alone" in result.words for result in found)
    assert any("reaches nobody" in result.words for result in found)
    monkeypatch.setattr(series_lint, "read_report", lambda _: [])
    found = list(rules.check_all(newest, newest, [], WHO, tree))
    assert found[0].state == rules.OK
    assert not any("main alone" in result.words for result in found)


def test_the_script_writes_the_pack_and_counts_the_faults(known: World) -> None:
    write_toml(known)
    code, out, err = known.run_script(upstream, "--release", NEW, "--tests", "0")
    assert (code, err) == (1, "")
    assert "FAULT: hooks and lint" in out and "nothing was sent" in out
    folder = pack.folder_of(release.get(NEW))
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "ORDER.md", "vllm.git", "01-one-mask-and-its-title.md",
        "01-one-mask-and-its-title.mbox",
    }  # fmt: skip
    order = (folder / "ORDER.md").read_text()
    assert "| `upstream/03-only-a-test` |" in order and "the release |" in order
    # Written anew, nothing of before stays but the user's own files.
    (folder / "notes.md").write_text("mine")
    (known.patches / NEW / "upstream.toml").unlink()
    known.run_script(upstream, "--release", NEW, "--tests", "0")
    names = {path.name for path in folder.iterdir()}
    assert "01-one-mask.md" in names and "01-one-mask-and-its-title.md" not in names
    assert (folder / "notes.md").read_text() == "mine" and ".new" not in names


def test_interrupted_it_leaves_the_pack_of_before(
    known: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = release.get(NEW)
    folder = pack.write(wanted, WHO, None).folder
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(rules, "check_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pack.write(wanted, WHO, None)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_what_is_in_the_way_is_said_before_the_proof(known: World) -> None:
    """With tests, that is before the environment and the proof: minutes."""
    place = pack.folder_of(release.get(NEW))
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    code, out, err = known.run_script(upstream, "--release", NEW)
    assert (code, out) == (1, "") and "nothing can be written to" in err
    assert place.read_text() == "mine"
    place.unlink()
    write_toml(known, "x = 1")
    code, out, err = known.run_script(upstream, "--release", NEW)
    assert (code, out) == (1, "") and "upstream.toml" in err


def test_the_screen_shows_every_fault_and_the_first_of_the_rest() -> None:
    results = [
        rules.Result(HAND, "search", "a", "01-x"),
        rules.Result(HAND, "search", "b", "02-y"),
        rules.Result(FAULT, "title", "long", "01-x"),
        rules.Result(FAULT, "title", "long", "02-y"),
        rules.Result(FAULT, "title", "none", "03-z"),
        rules.Result(rules.OK, "docs", "there"),
    ]
    faults = ["- FAULT: title: long [01, 02]", "- FAULT: title: none [03]"]
    rest = ["- by hand: search: a [01]", "- by hand: search: b [02]"]
    assert pack.said(results) == [*faults, *rest, "- ok: docs: there"]
    short = ["- by hand: search: a [01] … and 1 more", "- ok: docs: there"]
    assert pack.in_short(results) == [*faults, *short]


def test_a_name_ends_with_a_whole_word(world: World) -> None:
    long = changes.read(release.get(NEW))[1]
    assert long.name == "02-a-title-that-is-so-long-that-git-has-to-fold-it"


def test_an_older_release_says_that_upstream_takes_main(known: World) -> None:
    code, out, _ = known.run_script(upstream, "--release", OLD, "--tests", "0")
    assert code == 1 and f"{rules.MAIN_ALONE}: send the pack of {NEW}" in out
    folder = pack.folder_of(release.get(OLD))
    text = (folder / "01-one-mask.md").read_text()
    assert text.startswith(f"<!-- {rules.MAIN_ALONE}: {NEW}'s is the one")
    # What is not sent need not be called as is asked for, but it is shown all the same.
    assert rules.eased(rules.Result(FAULT, "title", "x")).state == HAND
    assert rules.eased(rules.Result(FAULT, "DCO", "x")).state == FAULT


def test_wrong_option_is_refused(known: World) -> None:
    code, _, err = known.run_script(upstream, "--tests", "maybe")
    assert code == 1 and "TESTS=maybe" in err


def test_tests_run_at_each_tip(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a branch builds on is run with it; what stands alone is run alone."""
    write_toml(known)
    asked = {}

    def run_all(release, env, tree, tips, jobs, progress):
        asked.update({t.name: [claim.test for claim in t.claims] for t in tips})
        return [[Ended(c.test, GOOD, 1) for c in t.claims] for t in tips]

    def claims(message):
        number = next((n for n, t in enumerate("abcd") if t in message[:1]), 0)
        return [proof.Claim(f"tests/t.py::test_{number}", "x", proof.FAILS)], []

    monkeypatch.setattr(each_commit, "run_all", run_all)
    monkeypatch.setattr(proof, "parse_claims", claims)
    names = [p.name for p in patches.read_series(release.get(NEW)).patches]
    messages = dict(zip(names, "abcd", strict=True))
    monkeypatch.setattr(pack, "_messages", lambda _: messages)
    pack.write(release.get(NEW), WHO, UnitEnv(Path(sys.prefix)), jobs=2)
    assert asked == {
        "01-one-mask-and-its-title": ["tests/t.py::test_0"],
        "02-store-what-the-mask-says": ["tests/t.py::test_0", "tests/t.py::test_2"],
        "03-only-a-test": ["tests/t.py::test_3"],
    }


def test_stock_files_are_those_of_the_branches_base(known: World) -> None:
    wanted = release.get(NEW)
    bare, _ = branches.build(wanted, changes.read(wanted), WHO, pack.folder_of(wanted))
    for name in (MASK, STORE):
        assert bare.content("base", name).decode() == stock_files(NEW)[name]
