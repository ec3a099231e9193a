# SPDX-License-Identifier: Apache-2.0
"""Write a release's pull requests under ``build/upstream/``. Nothing is sent."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import build_tree, each_commit, git, patches, proof
from .. import release as releases
from ..files import folder_lock, replace, writable
from ..paths import build_root, shown
from ..release import Release
from ..signals import uninterrupted
from ..unit_env import UnitEnv
from ..upstream_tests import Progress
from . import branches, changes, ci_areas, description, evidence, rules
from .branches import Branch
from .identity import Submitter
from .rules import Result

_STATES = (rules.FAULT, rules.HAND, rules.OK)


@dataclass(frozen=True)
class Pack:
    """What was written, and what the rules say of it."""

    folder: Path
    branches: list[Branch]
    results: list[Result]

    @property
    def faults(self) -> list[Result]:
        """What has to be mended before anything is sent."""
        return [result for result in self.results if result.state == rules.FAULT]


def folder_of(release: Release) -> Path:
    """Where a release's pack is or would be."""
    return build_root() / "upstream" / release.version


def write(
    release: Release,
    who: Submitter,
    env: UnitEnv | None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Pack:
    """Write the branches, mails and texts; with ``env`` the tests run at each tip.

    Interrupted, it leaves the pack of before; other files in the folder stay.

    Raises:
        UserError: the tree cannot be built, or ``upstream.toml`` is not as it must be.
    """
    folder = writable(folder_of(release))
    with folder_lock(folder, shown(folder)):
        new = folder / ".new"
        shutil.rmtree(new, ignore_errors=True)
        try:
            found = _write(release, who, env, jobs, progress, new)
            with uninterrupted():
                _replace(folder, new)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return found


def _replace(folder: Path, new: Path) -> None:
    """Put what was written into ``new`` in the place of an earlier pack's files."""
    for stale in (*folder.glob("[0-9][0-9]-*.md"), *folder.glob("[0-9][0-9]-*.mbox")):
        stale.unlink()
    shutil.rmtree(folder / "vllm.git", ignore_errors=True)
    for path in new.iterdir():
        path.rename(folder / path.name)


def _write(
    release: Release,
    who: Submitter,
    env: UnitEnv | None,
    jobs: int,
    progress: Progress | None,
    folder: Path,
) -> Pack:
    wanted = changes.read(release)
    bare, made = branches.build(release, wanted, who, folder)
    tree = build_tree.ensure_stock(release)
    steps = ci_areas.read(tree)
    template = tree / rules.TEMPLATE
    template_text = template.read_text(encoding="utf-8") if template.exists() else ""
    messages = _messages(release)
    passing = (
        _at_tips(release, env, bare, made, messages, jobs, progress) if env else {}
    )
    newest = releases.default()
    results: list[Result] = []
    for number, branch in enumerate(made):
        name = branch.change.name
        message = _own(branch, messages)
        found = evidence.gather(release, branch.change, passing.get(name))
        before = [] if branch.change.alone else wanted[:number]
        text = description.write(
            release, branch, message, found, who, before, template_text
        )
        if release != newest:
            note = f"{rules.MAIN_ALONE}: {newest.version}'s is the one to send"
            text = f"<!-- {note} -->\n{text}"
        replace(folder / f"{name}.md", text.encode())
        branches.write_mails(bare, branch, folder)
        results += rules.check_one(bare, branch, text, found, tree, steps)
    if release != newest:
        # It is not sent, so it need not be called and documented as is asked for.
        results = [rules.eased(result) for result in results]
    results += rules.check_all(release, newest, made, who, tree)
    replace(folder / "ORDER.md", order(release, made, results).encode())
    return Pack(folder_of(release), made, results)


def _messages(release: Release) -> dict[str, str]:
    """The patches' own messages, whole, by file name: a branch's are shorter."""
    tree = build_tree.repo(build_tree.patched_path(release))
    names = [patch.name for patch in patches.read_series(release).patches]
    ids = build_tree.commits(tree)
    return {
        name: tree.out("log", "-1", "--format=%b", commit)
        for name, commit in zip(names, ids, strict=True)
    }


def _own(branch: Branch, messages: Mapping[str, str]) -> str:
    """The messages of a branch's patches, each under its title if there are several."""
    own = branch.change.patches
    if len(own) == 1:
        return messages[own[0].name]
    return "\n\n".join(
        f"#### {changes.subject(patch.title)}\n\n{messages[patch.name]}"
        for patch in own
    )


def _at_tips(
    release: Release,
    env: UnitEnv,
    bare: git.Repo,
    made: Sequence[Branch],
    messages: Mapping[str, str],
    jobs: int,
    progress: Progress | None,
) -> dict[str, list[each_commit.Ended]]:
    """By a change's name, how its own tests end at its branch's tip.

    A branch that builds on others also runs the tests that those brought, as
    ``make each-commit`` does, and so shares what that showed.
    """
    own = {b.change.name: proof.parse_claims(_own(b, messages))[0] for b in made}

    tips = []
    for number, branch in enumerate(made):
        first = number if branch.change.alone else 0
        claims = {
            claim.test: claim
            for before in made[first : number + 1]
            for claim in own[before.change.name]
        }
        tip = each_commit.Tip(branch.tip, tuple(claims.values()), branch.change.name)
        tips.append(tip)
    ended = each_commit.run_all(release, env, bare, tips, jobs, progress)
    found = {}
    for name, tests in zip(own, ended, strict=True):
        brought = {claim.test for claim in own[name]}
        found[name] = [one for one in tests if one.test in brought or not one.good]
    return found


def order(release: Release, made: Sequence[Branch], results: Sequence[Result]) -> str:
    """The list of all pull requests and of what is left to do, in Markdown."""
    lines = [
        f"# vLLM {release.version}: {len(made)} pull requests, in landing order",
        "",
        "| branch | title | patches | begins at |",
        "|---|---|---|---|",
    ]
    for branch in made:
        own = ", ".join(patch.name[:4] for patch in branch.change.patches)
        first = branch is made[0] or branch.change.alone
        at = "the release" if first else "the one before"
        lines.append(f"| `{branch.name}` | {branch.change.title} | {own} | {at} |")
    where = (
        f"The branches are in `{shown(folder_of(release) / 'vllm.git')}`, whose `base` "
        "is the release; each `.mbox` has a branch's commits for `git am --3way`, each "
        "`.md` its text for `gh pr create --body-file`. The next run writes all of it "
        "anew: fill in copies of the texts."
    )
    lines += ["", where, "", "## By vLLM's rules", "", *said(results), ""]
    return "\n".join(lines)


def _lines(results: Sequence[Result]) -> dict[tuple[str, str], list[str]]:
    """By state and rule a line per different word, with the changes it concerns."""
    ranked = sorted(results, key=lambda r: _STATES.index(r.state))
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for result in ranked:
        by_words = found.setdefault((result.state, result.rule), {})
        by_words.setdefault(result.words, []).append(result.where[:2])
    return {
        (state, rule): [
            f"- {state}: {rule}: {words}"
            + (f" [{', '.join(where)}]" if any(where) else "")
            for words, where in by_words.items()
        ]
        for (state, rule), by_words in found.items()
    }


def said(results: Sequence[Result]) -> list[str]:
    """The results: faults first, then what is left to do by hand."""
    return [line for lines in _lines(results).values() for line in lines]


def in_short(results: Sequence[Result]) -> list[str]:
    """The same for a screen: of what is no fault the first line of each rule."""
    short = []
    for (state, _), lines in _lines(results).items():
        if state == rules.FAULT or len(lines) == 1:
            short += lines
        else:
            short.append(f"{lines[0]} … and {len(lines) - 1} more")
    return short
