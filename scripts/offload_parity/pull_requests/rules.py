# SPDX-License-Identifier: Apache-2.0
"""vLLM's contribution rules, held against a pull request; what is left to be done.

The rules are those of the release's own AGENTS.md, tests/AGENTS.md, contributing guide,
pull-request template and CI areas; where a release has no such file, that rule is said
to be left out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import git, series_lint
from ..release import Release
from . import ci_areas
from .branches import ASSISTED, SIGNED, Branch
from .changes import Change
from .description import AI_STATEMENT
from .evidence import NO_FIGURES, Evidence
from .identity import Submitter

OK, HAND, FAULT = "ok", "by hand", "FAULT"

GUIDE = "docs/contributing/README.md"
TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
CHECKLIST = ".agents/skills/pr-checklist/SKILL.md"
MAIN_ALONE = "upstream takes changes to main alone"
# What a line of a commit list shows.
TITLE_LENGTH = 72
# The checklist's bounds on new lines of code, and the guide's on a change with no RFC.
_LOW, _HIGH, _RFC = 50, 250, 500
_OPEN_AT_ONCE = 6
_SOLD = re.compile(
    r"pytest\.(mark\.)?(skip|xfail|flaky)|importorskip|\breruns?\b|\bsleep\("
    r"|\b[ar]tol\b|approx\("
)
_DOUBLES = re.compile(r"\b(MagicMock|Mock|SimpleNamespace|monkeypatch)\b|assert_called")
_ENTRY = re.compile(r"\bvllm_runner\b|\bRemoteOpenAIServer\b|\bLLM\(")
_VISIBLE = re.compile(r"add_argument\(|[\"']vllm:\w|VLLM_[A-Z_]+\s*[\"':=]")


@dataclass(frozen=True)
class Result:
    """One rule on one pull request, or on all of them (``where`` is empty then)."""

    state: str
    rule: str
    words: str
    where: str = ""


@dataclass(frozen=True)
class Added:
    """A line that a pull request adds."""

    path: str
    line: int
    text: str


def added_lines(bare: git.Repo, branch: Branch) -> list[Added]:
    """Every line that a pull request adds, in order."""
    found: list[Added] = []
    path, number = "", 0
    for line in bare.lines("diff", "-U0", *git.DIFF[:-2], branch.root, branch.tip):
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)", line):
            number = int(hunk[1])
        elif line.startswith("+"):
            found.append(Added(path, number, line[1:]))
            number += 1
    return found


def check_one(
    bare: git.Repo,
    branch: Branch,
    text: str,
    evidence: Evidence,
    tree: Path,
    steps: Sequence[ci_areas.Step],
) -> list[Result]:
    """Hold one pull request against the rules; ``tree`` is the release's own."""
    files = bare.lines("diff", "--name-only", branch.root, branch.tip)
    added = added_lines(bare, branch)
    results = [
        *check_title(branch.change, _read(tree, GUIDE)),
        *check_sign_off(bare, branch),
        *check_text(text, _read(tree, TEMPLATE)),
        *check_evidence(evidence),
        *check_size(added, files),
        *check_tests(added, files),
        *check_areas(bare, branch, steps, files),
        *check_docs(added, files),
        *check_duplicates(branch.change),
    ]
    return [Result(r.state, r.rule, r.words, branch.change.name) for r in results]


def check_all(
    release: Release,
    newest: Release,
    branches: Sequence[Branch],
    who: Submitter,
    tree: Path,
) -> Iterator[Result]:
    """What concerns all of a release's pull requests together."""
    lint = series_lint.read_report(release)
    rule = "hooks and lint at each commit"
    if lint is None:
        words = f"not run on this series: make lint RELEASE={release.version}"
        yield Result(FAULT, rule, words)
    else:
        state = FAULT if lint else OK
        yield Result(state, rule, f"{len(lint)} findings, by the release's own hooks")
    if not who.reachable:
        words = f"{who.email} reaches nobody: sign off with an address of yours"
        yield Result(HAND, "DCO", words)
    if release != newest:
        words = (
            f"{MAIN_ALONE}: send the pack of {newest.version}; this one shows what "
            f"{release.version} needs"
        )
        yield Result(HAND, "main", words)
    words = (
        "in a clone of vLLM: git switch -c NAME main, then git am --3way NAME.mbox; "
        "mend conflicts, run the tests and pre-commit there again"
    )
    yield Result(HAND, "main", words)
    if len(branches) > _OPEN_AT_ONCE:
        words = (
            f"{len(branches)} changes, and {_OPEN_AT_ONCE} may be open at once: send "
            "those first that stand alone or at the front"
        )
        yield Result(HAND, "limit", words)
    if (tree / CHECKLIST).exists():
        words = f"go through {CHECKLIST} for each, and tick its template's boxes"
        yield Result(HAND, "checklist", words)
    yield Result(
        HAND, "accountability",
        "read every changed line; add the AI tools that you used yourself as trailers",
    )  # fmt: skip
    yield Result(
        HAND, "model evaluation",
        "run one with a real model on a GPU, offload on: nothing here computes tokens",
    )  # fmt: skip


def eased(result: Result) -> Result:
    """A result on a change that is not sent: titles and pages are no faults there."""
    if result.state == FAULT and result.rule in ("title", "docs"):
        return replace(result, state=HAND)
    return result


def _read(tree: Path, name: str) -> str:
    try:
        return (tree / name).read_text(encoding="utf-8")
    except OSError:
        return ""


def known_tags(guide: str) -> set[str]:
    """The tags that the contributing guide names for titles."""
    _, _, rest = guide.partition("### PR Title")
    section = rest.partition("\n### ")[0]
    named = re.findall(r"`((?:\[[^\]`]+\])+)`", section)
    return {tag for group in named for tag in re.findall(r"\[([^\]]+)\]", group)}


def check_title(change: Change, guide: str) -> Iterator[Result]:
    tags = re.findall(r"\[([^\]]+)\]", change.title)
    known = known_tags(guide)
    if not known:
        yield Result(HAND, "title", f"this release has no list of tags in {GUIDE}")
    elif not set(tags) & known:
        words = f"{change.title!r} begins with no tag that {GUIDE} names"
        yield Result(FAULT, "title", words)
    elif other := [tag for tag in tags if tag not in known]:
        words = f"tags of our own, which the guide allows: {', '.join(other)}"
        yield Result(OK, "title", words)
    if len(change.title) > TITLE_LENGTH:
        words = f"{len(change.title)} characters, at most {TITLE_LENGTH}"
        yield Result(FAULT, "title", f"{words}: give it a shorter one")


def check_sign_off(bare: git.Repo, branch: Branch) -> Iterator[Result]:
    for commit in branch.commits:
        author, message = bare.out(
            "log", "-1", "--format=%an <%ae>%x00%B", commit
        ).split("\0")
        lines = message.splitlines()
        if f"{SIGNED} {author}" not in lines:
            words = f"{commit[:12]} is not signed off by its author, {author}"
            yield Result(FAULT, "DCO", words)
        if ASSISTED not in lines:
            words = f"{commit[:12]} lacks the trailer {ASSISTED!r}"
            yield Result(FAULT, "AI assistance", words)


def check_text(text: str, template: str) -> Iterator[Result]:
    headings = re.findall(r"^## .+$", template, re.MULTILINE)
    if not headings:
        yield Result(HAND, "template", f"this release has no {TEMPLATE}")
    elif missing := [h for h in headings if f"\n{h}\n" not in text]:
        words = f"the release's template has other sections: {', '.join(missing)}"
        yield Result(HAND, "template", words)
    if AI_STATEMENT not in text:
        yield Result(FAULT, "AI assistance", "the text does not state it")


def check_evidence(evidence: Evidence) -> Iterator[Result]:
    rule = "failure shown before the fix"
    if evidence.failing is None:
        yield Result(FAULT, rule, "no proof of this series: make proof")
    elif not any(row.stock not in ("passed", "skipped") for row in evidence.failing):
        yield Result(HAND, rule, "no test of it fails on the release: say why none can")
    for words in evidence.doubts:
        yield Result(FAULT, rule, f"the proof does not hold: {words}")
    for figures in (evidence.table, evidence.costs):
        if figures.startswith(NO_FIGURES):
            yield Result(HAND, "effect", figures)
    if evidence.passing is None:
        yield Result(FAULT, "tests at its tip", "not run: leave TESTS=0 out")
    elif bad := [one for one in evidence.passing if not one.good]:
        words = f"{bad[0].test} is {bad[0].outcome}: {bad[0].said}"
        yield Result(FAULT, "tests at its tip", words)


def check_size(added: Sequence[Added], files: Sequence[str]) -> Iterator[Result]:
    code = sum(line.path.startswith("vllm/") for line in added)
    tests = sum(line.path.startswith("tests/") for line in added)
    words = f"{code} new lines of code, {tests} of tests"
    if code > _RFC:
        yield Result(FAULT, "size", f"{words}: over {_RFC}, which takes an RFC first")
    elif code > _HIGH:
        yield Result(HAND, "size", f"{words}: justify over {_HIGH}, or cut it")
    elif tests > 5 * max(code, 10):
        yield Result(HAND, "size", f"{words}: say why the tests need so many")
    core = [f for f in files if f.startswith("vllm/v1/core/")]
    if core and code >= _LOW:
        yield Result(HAND, "core components", f"{words}, in {', '.join(core)}")


def check_tests(added: Sequence[Added], files: Sequence[str]) -> Iterator[Result]:
    lines = [line for line in added if line.path.startswith("tests/")]
    if not any(f.startswith("tests/") for f in files):
        yield Result(FAULT, "tests", "it brings none")
        return
    for line in lines:
        if _SOLD.search(line.text):
            words = f"{line.path}:{line.line} skips, repeats, waits or tolerates"
            yield Result(FAULT, "tests", f"{words}: {line.text.strip()}")
    doubles = [line for line in lines if _DOUBLES.search(line.text)]
    if doubles:
        first = doubles[0]
        words = (
            f"lines that stand in for a real object or patch one: {len(doubles)}, the "
            f"first at {first.path}:{first.line}: {first.text.strip()}"
        )
        yield Result(HAND, "real objects", words)
    if not any(_ENTRY.search(line.text) for line in lines):
        words = (
            "no test of it goes through LLM or a server: add one with a GPU, or say "
            "that the scheduler's own entry points show it"
        )
        yield Result(HAND, "entry point", words)


def check_areas(
    bare: git.Repo,
    branch: Branch,
    steps: Sequence[ci_areas.Step],
    files: Sequence[str],
) -> Iterator[Result]:
    if not steps:
        yield Result(HAND, "CI areas", f"this release has no {ci_areas.AREAS}")
        return

    def read_test(name: str) -> str:
        return (bare.content(branch.tip, name) or b"").decode()

    for file, why in ci_areas.gaps(steps, files, read_test).items():
        yield Result(HAND, "CI areas", f"{file}: {why}; ask for CI, or add a step")


def check_docs(added: Sequence[Added], files: Sequence[str]) -> Iterator[Result]:
    visible = [
        line
        for line in added
        if line.path.startswith("vllm/")
        and (_VISIBLE.search(line.text) or line.path == "vllm/envs.py")
    ]
    if not visible:
        return
    pages = [f for f in files if f.startswith("docs/")]
    first = visible[0]
    words = f"{first.path}:{first.line} is visible to users: {first.text.strip()}"
    if pages:
        yield Result(OK, "docs", f"{words}; documented in {', '.join(pages)}")
    else:
        yield Result(FAULT, "docs", f"{words}; no page of docs/ says so")


def check_duplicates(change: Change) -> Iterator[Result]:
    numbers = [str(one.number) for one in change.related]
    asked = [f"gh issue view {n} --repo vllm-project/vllm --comments" for n in numbers]
    search = "gh pr list --repo vllm-project/vllm --state open --search"
    asked += [f'{search} "{n} in:body"' for n in numbers]
    asked.append(f'{search} "{change.title.partition("] ")[2]}"')
    yield Result(HAND, "duplicates", "; ".join(asked))
