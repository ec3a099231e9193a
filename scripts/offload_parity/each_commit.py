# SPDX-License-Identifier: Apache-2.0
"""Each patch stands alone: what a series has brought so far passes at every commit.

What passed is kept by the files of the commit, so that the same files are not tested
again, be it in another series, after a reword, or on a branch for upstream.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

from . import build_tree, git, patches, proof, upstream_tests
from .files import replace
from .paths import build_root
from .proof import HARDWARE, Claim, Commit
from .release import Release
from .unit_env import UnitEnv
from .upstream_tests import Progress

GOOD = "as it should"


@dataclass(frozen=True)
class Ended:
    """How one test function ended at a commit; ``cases`` is how many it has."""

    test: str
    outcome: str
    cases: int
    said: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended as it should."""
        return self.outcome == GOOD


def claims_until(commits: Sequence[Commit], number: int) -> tuple[Claim, ...]:
    """What the patches up to this one say of tests; the last word on each counts."""
    last = {c.test: c for commit in commits[: number + 1] for c in commit.claims}
    return tuple(last.values())


def run(
    release: Release,
    env: UnitEnv,
    work: git.Repo,
    claims: Sequence[Claim],
    name: str,
) -> list[Ended]:
    """Run the tests of ``claims`` on a work tree's files, or recall how they ended.

    ``name`` names the log.

    Raises:
        UserError: pytest broke.
    """
    if not claims:
        return []
    folder = build_root() / "reports" / release.version / "each-commit"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{work.out('rev-parse', 'HEAD^{tree}')}.json"
    key = {"environment": env.root.name, "tests": sorted(map(_words, claims))}
    try:
        report = json.loads(kept.read_text(encoding="utf-8"))
        if report["key"] == key:
            return [Ended(**ended) for ended in report["ended"]]
    except (OSError, ValueError, LookupError, TypeError):
        # None, or one that another version of this project wrote.
        pass
    tests = sorted({claim.test for claim in claims})
    found = upstream_tests.run_pytest(
        env, work.path, upstream_tests.files_of(tests), folder / f"{name}.log",
        only=tests,
    )  # fmt: skip
    ended = [_judge(claim, found) for claim in claims]
    if not all(one.good for one in ended):
        # It may have been the machine's fault: it runs again.
        return ended
    report = {"key": key, "ended": [vars(one) for one in ended]}
    replace(kept, json.dumps(report, indent=1).encode())
    return ended


def _words(claim: Claim) -> str:
    # Why a test fails on stock does not matter here; why it is not run does.
    return f"{claim.test} {claim.text if claim.block == HARDWARE else ''}".strip()


def _judge(claim: Claim, found: upstream_tests.Run) -> Ended:
    """Whether all cases of a test passed, or were skipped for want of hardware."""
    cases = found.cases(claim.test)
    if not cases:
        path = claim.test.partition("::")[0]
        why = found.collect_errors.get(path, "it did not run")
        return Ended(claim.test, "missing", 0, proof.one_line(why)[:200])
    hardware = claim.block == HARDWARE
    wanted = "skipped" if hardware else "passed"
    for case in cases:
        if case.outcome != wanted:
            said = proof.one_line(case.said)[:200]
            return Ended(claim.test, case.outcome, len(cases), said)
    return Ended(claim.test, GOOD, len(cases), claim.text if hardware else "")


def check(
    release: Release,
    env: UnitEnv,
    *,
    jobs: int,
    first: int = 0,
    progress: Progress | None = None,
) -> tuple[int, list[proof.Finding]]:
    """Run what the series has brought at each of its commits, from ``first`` on.

    Returns how many commits that is, and what did not pass. ``jobs`` commits are
    tested side by side.

    Raises:
        UserError: the tree cannot be built or pytest broke.
    """
    tree = build_tree.repo(build_tree.ensure_patched(release))
    names = [patch.name for patch in patches.read_series(release).patches]
    commits, _ = proof.read_commits(tree, names)
    findings: list[proof.Finding] = []
    wanted = range(first, len(commits))
    tips = [
        Tip(
            commits[number].id,
            claims_until(commits, number),
            f"after-{commits[number].patch[:4]}",
        )
        for number in wanted
    ]
    ended = run_all(release, env, tree, tips, jobs, progress)
    for number, tests in zip(wanted, ended, strict=True):
        findings += [
            proof.Finding(
                commits[number].patch, f"{e.test} is {e.outcome} at it: {e.said}"
            )
            for e in tests
            if not e.good
        ]
    return len(tips), findings


@dataclass(frozen=True)
class Tip:
    """A commit, the tests to run there, and the name of the log."""

    commit: str
    claims: tuple[Claim, ...]
    name: str


def run_all(
    release: Release,
    env: UnitEnv,
    tree: git.Repo,
    tips: Sequence[Tip],
    jobs: int,
    progress: Progress | None = None,
) -> list[list[Ended]]:
    """``run`` at each of some commits of ``tree``, ``jobs`` of them side by side."""
    places: SimpleQueue[git.Repo] = SimpleQueue()
    ended: list[list[Ended]] = []

    def at(tip: Tip) -> list[Ended]:
        work = places.get()
        try:
            work.run("checkout", "-q", "--force", "--detach", tip.commit)
            return run(release, env, work, tip.claims, tip.name)
        finally:
            places.put(work)

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for tip in tips[:jobs]:
            places.put(stack.enter_context(tree.worktree(tip.commit)))
        tasks = [pool.submit(at, tip) for tip in tips]
        try:
            for task in tasks:
                ended.append(task.result())
                if progress:
                    progress(len(ended), len(tips))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return ended
