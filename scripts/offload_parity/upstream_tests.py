# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own tests on a patched tree and compare with stock: no test may be lost.

Every test of the stock tree must pass on the patched one. One that does not (vLLM skips
some without a GPU) is run on the stock tree too and must come out the same there.
"""

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import build_tree, patches
from .errors import UserError
from .files import lock
from .paths import ROOT, build_root, shown
from .release import Release
from .unit_env import UnitEnv, tail

# A test of vLLM's that waits for a hub or a device would never end.
_TEST_TIMEOUT_S = 300

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome:
    """How one test ended; the words are those of ``pytest_outcomes``."""

    id: str
    outcome: str
    seconds: float
    message: str
    line: str = ""

    @property
    def said(self) -> str:
        """The message, and the source line where it says nothing of its own."""
        return f"{self.message} at {self.line}" if self.line else self.message


@dataclass
class Run:
    """One run of pytest: what it collected and how each test ended."""

    collected: list[str] = field(default_factory=list)
    collect_errors: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    status: int = 0
    seconds: float = 0.0
    log: Path = Path()

    def read(self, line: str) -> None:
        """Take in one line of the plugin's."""
        record = json.loads(line)
        if "collected" in record:
            self.collected = record["collected"]
        elif "collect_error" in record:
            self.collect_errors[record["collect_error"]] = record["message"]
        else:
            self.outcomes[record["id"]] = Outcome(**record)

    def cases(self, test: str) -> list[Outcome]:
        """The outcomes of a test function, one per case of its parameters."""
        return [o for o in self.outcomes.values() if function_of(o.id) == test]


@dataclass
class Comparison:
    """What became of stock's ``known`` tests on the patched tree, and of new ones.

    ``lost`` and ``failed`` map a test's id to the reason.
    """

    known: int = 0
    passed: int = 0
    as_stock: Counter[str] = field(default_factory=Counter)
    new: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed and nothing was lost."""
        return not self.failed and not self.lost


def function_of(node_id: str) -> str:
    """A node id without the parameters."""
    return node_id.split("[", 1)[0]


def files_of(node_ids: Iterable[str]) -> list[str]:
    """The files that hold these tests."""
    return list(dict.fromkeys(node_id.partition("::")[0] for node_id in node_ids))


def report_log(release: Release, name: str) -> Path:
    """Where the log of a step lies."""
    return build_root() / "reports" / release.version / f"{name}.log"


def paths_of(release: Release) -> list[str]:
    """The paths of ``release.toml`` and every other test file the series touches."""
    paths = list(release.unit_tests.paths)
    for patch in patches.read_series(release).patches:
        for file in patch.files:
            name = Path(file.path).name
            if (
                file.path.startswith("tests/")
                and name.startswith("test_")
                and name.endswith(".py")
                and file.new_blob
                and not any(Path(file.path).is_relative_to(path) for path in paths)
            ):
                paths.append(file.path)
    return paths


def pytest_command(env: UnitEnv, outcomes: Path, options: Sequence[str]) -> list[str]:
    """The command that runs pytest in a tree without leaving anything in it."""
    return [
        str(env.python), "-m", "pytest", "-v", "--rootdir", ".",
        "-p", "no:cacheprovider", "-p", "offload_parity.pytest_frozen_heap",
        "-p", "offload_parity.pytest_no_hub_wait",
        # One word each: pytest takes a path that stands alone for a place to run, and
        # looks for its settings above all of them.
        "-p", "offload_parity.pytest_outcomes", f"--outcomes={outcomes}",
        "-W", "ignore::DeprecationWarning", "-o", f"timeout={_TEST_TIMEOUT_S}",
        *options,
    ]  # fmt: skip


def run_pytest(
    env: UnitEnv,
    tree: Path,
    targets: Iterable[str],
    log: Path,
    *,
    jobs: int = 1,
    collect_only: bool = False,
    progress: Progress | None = None,
    only: Iterable[str] | None = None,
    python_path: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Run pytest in ``tree`` on paths, with ``python_path`` importable.

    ``only`` limits it to these node ids, with or without parameters. They are no
    arguments of pytest's: it would run nothing at all when one of them is missing.
    ``progress`` is called with the number of tests done and of all. A file that cannot
    be imported does not keep the others from running. A second run with the same log
    waits.

    Raises:
        UserError: pytest itself broke, so there is nothing to judge.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    outcomes, chosen = log.with_suffix(".jsonl"), log.with_suffix(".ids")
    options = ["--continue-on-collection-errors"]
    if collect_only:
        options += ["--collect-only", "-q"]
    elif jobs > 1:
        # A worker that is done takes tests from the other's queue: the two long files
        # hold most of the time.
        options += ["-n", str(jobs), "--dist", "worksteal"]
    if only is not None:
        options.append(f"--only-tests={chosen}")
    run = Run(log=log)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(log.with_suffix(".lock")))
        began = time.monotonic()
        # Anew: the pytest of a killed run may yet write to the old ones.
        for path in (outcomes, log):
            path.unlink(missing_ok=True)
        outcomes.touch()
        if only is not None:
            chosen.write_text("\n".join(only), encoding="utf-8")
        out = stack.enter_context(log.open("wb"))
        lines = stack.enter_context(outcomes.open(encoding="utf-8"))
        process = subprocess.Popen(
            pytest_command(env, outcomes, [*options, *targets]),
            cwd=tree,
            env=env.variables(*python_path, ROOT / "scripts") | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            rest = ""
            while True:
                ended = process.poll() is not None
                text = rest + lines.read()
                *whole, rest = text.split("\n")
                for line in whole:
                    run.read(line)
                if progress and whole:
                    progress(len(run.outcomes), len(run.collected))
                if ended:
                    break
                time.sleep(0.3)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    run.status = process.returncode
    run.seconds = time.monotonic() - began
    # 0: passed, 1: some failed, 2: a file cannot be imported, 5: nothing to run.
    nothing = not (run.collected or run.collect_errors or only)
    if run.status not in (0, 1, 2, 5) or nothing:
        raise UserError(
            f"pytest broke in {shown(tree)} (status {run.status}); its log: "
            f"{shown(log)}; it ends with: {tail(log, 3)}"
        )
    return run


def compare(
    stock: Run, patched: Run, on_stock: Callable[[list[str]], Run]
) -> Comparison:
    """Judge ``patched`` by what ``stock`` collected.

    ``on_stock`` runs the given ids on the stock tree; it is asked only for those that
    did not pass on the patched one. A case whose parameters changed counts as renamed
    while its test still has as many cases.
    """
    known = set(stock.collected)
    result = Comparison(
        known=len(known), new=[i for i in patched.collected if i not in known]
    )
    doubtful = []
    for path, message in patched.collect_errors.items():
        if path not in stock.collect_errors:
            result.failed[path] = message
    new_cases = Counter(function_of(i) for i in result.new)
    for node_id in stock.collected:
        outcome = patched.outcomes.get(node_id)
        if outcome and outcome.outcome == "passed":
            result.passed += 1
        elif outcome:
            doubtful.append(node_id)
        elif new_cases[function_of(node_id)] > 0 and "[" in node_id:
            new_cases[function_of(node_id)] -= 1
            result.renamed.append(node_id)
        else:
            result.lost[node_id] = "the patched tree does not have or did not end it"
    reference = on_stock(doubtful) if doubtful else Run()
    for node_id in doubtful:
        mine = patched.outcomes[node_id]
        theirs = reference.outcomes.get(node_id)
        if theirs and theirs.outcome == mine.outcome:
            result.as_stock[mine.outcome] += 1
        elif mine.outcome in ("failed", "error"):
            result.failed[node_id] = mine.said
        else:
            word = theirs.outcome if theirs else "missing"
            result.lost[node_id] = f"{mine.outcome}, on stock {word}: {mine.message}"
    # Without its hardware a file's new tests are skipped like those it has on stock.
    skips = {
        (node_id.partition("::")[0], outcome.message)
        for node_id, outcome in reference.outcomes.items()
        if outcome.outcome == "skipped"
    }
    for node_id in result.new:
        outcome = patched.outcomes.get(node_id, Outcome(node_id, "missing", 0.0, ""))
        if outcome.outcome == "passed":
            result.passed += 1
        elif (
            outcome.outcome == "skipped"
            and (node_id.partition("::")[0], outcome.message) in skips
        ):
            result.as_stock["skipped"] += 1
        else:
            result.failed[node_id] = (
                f"a new test that is {outcome.outcome}: {outcome.said}"
            )
    return result


def check(
    release: Release, env: UnitEnv, *, jobs: int, progress: Progress | None = None
) -> tuple[Comparison, Run]:
    """Run a release's tests on its patched tree and compare with its stock tree.

    Raises:
        UserError: a tree cannot be built or pytest broke.
    """
    tree = build_tree.ensure_patched(release)
    stock = build_tree.ensure_stock(release)
    return check_tree(release, env, stock, tree, "patched", jobs, progress)


def check_each_commit(
    release: Release, env: UnitEnv, *, jobs: int, progress: Progress | None = None
) -> Iterator[tuple[str, Comparison]]:
    """The same after each patch of the series but the last, for those who bisect."""
    tree = build_tree.repo(build_tree.ensure_patched(release))
    stock = build_tree.ensure_stock(release)
    names = [patch.name for patch in patches.read_series(release).patches]
    ids = build_tree.commits(tree)
    for name, commit in list(zip(names, ids, strict=True))[:-1]:
        with tree.worktree(commit) as work:
            label = f"after-{name[:4]}"
            yield (
                name,
                check_tree(release, env, stock, work.path, label, jobs, progress)[0],
            )


def check_tree(
    release: Release,
    env: UnitEnv,
    stock_tree: Path,
    tree: Path,
    label: str,
    jobs: int,
    progress: Progress | None,
) -> tuple[Comparison, Run]:
    """Run a release's tests in ``tree`` and compare with those of ``stock_tree``.

    ``label`` names the log. A tree without the package takes the installed one.
    """
    paths = [path for path in paths_of(release) if (tree / path).exists()]
    old = [path for path in paths if (stock_tree / path).exists()]
    stock = run_pytest(
        env, stock_tree, old, report_log(release, "stock-collect"), collect_only=True
    )
    patched = run_pytest(
        env, tree, paths, report_log(release, label), jobs=jobs, progress=progress
    )

    def on_stock(ids: list[str]) -> Run:
        log = report_log(release, "stock-doubtful")
        return run_pytest(env, stock_tree, files_of(ids), log, only=ids)

    return compare(stock, patched, on_stock), patched


def default_jobs() -> int:
    """Processes to run side by side: one per core, two at most by default.

    Each one imports vLLM and torch anew and takes about 1 GB.
    """
    return min(2, len(os.sched_getaffinity(0)))
