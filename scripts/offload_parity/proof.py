# SPDX-License-Identifier: Apache-2.0
"""Each test that a patch brings fails on the stock release for its stated reason.

A patch's message names the tests it adds or changes and what their failure says:

    Fails on the release this series is for:
      tests/v1/core/test_x.py::test_name: assert 6656 == 6912

An ``assert`` in one of vLLM's helpers says only AssertionError; the source line that
pytest shows counts as said after it: ``AssertionError at assert not missing``.

A test that a patch only adapts to the new code, so that it passes on stock as well,
stands in a second block with the reason for touching it:

    Adapted, passes on that release too:
      tests/v1/core/test_y.py::test_other: its request double needs a real position

A third block names tests that are skipped without hardware which no CPU has, with the
reason that pytest gives:

    Not run without its hardware:
      tests/v1/test_z.py::test_third: only available on ROCm

The tests run twice: over the stock source, in a folder of links that has the patched
tree's ``tests``, and on the patched tree.
"""

import ast
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import build_tree, git, kept, patches, upstream_tests
from .paths import build_root
from .release import Release
from .unit_env import UnitEnv
from .upstream_tests import Outcome, Progress, Run

FAILS = "Fails on the release this series is for:"
ADAPTED = "Adapted, passes on that release too:"
HARDWARE = "Not run without its hardware:"
# Below so many tests a second process costs more, to import vLLM, than it saves.
_WORTH_TWO = 30
_NAME_ONLY = re.compile(r"[\w.]+:?")
_ENTRY = re.compile(r"(tests/\S+?\.py(?:::\w+)+): (\S.*)")


@dataclass(frozen=True)
class Claim:
    """What a patch says of one test; ``block`` is the header it stands under."""

    test: str
    text: str
    block: str


@dataclass(frozen=True)
class Finding:
    """Something that is not as the patch says."""

    patch: str
    what: str


@dataclass(frozen=True)
class Touched:
    """Tests of one file that a commit adds, changes or removes."""

    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


@dataclass
class Row:
    """A line of the table: a claim and what the two runs showed."""

    patch: str
    test: str
    cases: int
    stock: str
    patched: str


@dataclass
class Proof:
    """All claims of a series and what is wrong with them."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Commit:
    """One patch as a commit; ``patch`` is its file's name."""

    patch: str
    id: str
    claims: tuple[Claim, ...]
    touched: frozenset[str]


def parse_claims(message: str) -> tuple[list[Claim], list[str]]:
    """The claims in a commit message, and what in its blocks cannot be read.

    A line that is indented further than the first of its block continues an entry.
    """
    claims: list[Claim] = []
    unclear: list[str] = []
    block = ""
    margin = 0
    for line in message.splitlines():
        text = line.strip()
        if text in (FAILS, ADAPTED, HARDWARE):
            block, margin = text, 0
            continue
        indent = len(line) - len(line.lstrip())
        if not text or not indent:
            block = ""
        if not block:
            continue
        margin = margin or indent
        if indent > margin and claims:
            last = claims[-1]
            claims[-1] = Claim(last.test, f"{last.text} {text}", last.block)
        elif entry := _ENTRY.fullmatch(text):
            claims.append(Claim(entry[1], entry[2], block))
        else:
            unclear.append(f"this line is not `path::test: text`: {text}")
    for test in sorted({c.test for c in claims}):
        if sum(c.test == test for c in claims) > 1:
            unclear.append(f"{test} is named twice")
    return claims, unclear


def test_functions(source: str) -> dict[str, str]:
    """Each test function of a file, ``name`` or ``Class::name``, as comparable text.

    Comments, layout and docstrings do not count; decorators and parameters do.
    """
    found: dict[str, str] = {}

    def visit(nodes: Iterable[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ) and node.name.startswith("test"):
                if ast.get_docstring(node, clean=False) is not None:
                    node.body = node.body[1:]
                found[prefix + node.name] = ast.dump(node)

    visit(ast.parse(source).body, "")
    return found


def touched_tests(old: str | None, new: str | None) -> Touched:
    """What differs between two versions of a test file; None: there is no file."""
    before = test_functions(old or "")
    after = test_functions(new or "")
    return Touched(
        added=frozenset(after.keys() - before.keys()),
        changed=frozenset(
            name for name in after.keys() & before.keys() if after[name] != before[name]
        ),
        removed=frozenset(before.keys() - after.keys()),
    )


def content(tree: git.Repo, revision: str, path: str) -> str | None:
    """A file's text in a commit, None if it is not there."""
    done = tree.run("show", f"{revision}:{path}", check=False)
    return None if done.returncode else done.stdout.decode("utf-8")


def read_commits(
    tree: git.Repo, names: list[str]
) -> tuple[list[Commit], list[Finding]]:
    """The series' commits with their claims, held against the tests they touch.

    ``names`` are the patches' file names, in order.
    """
    commits: list[Commit] = []
    findings: list[Finding] = []
    for name, commit in zip(names, build_tree.commits(tree), strict=True):
        claims, unclear = parse_claims(tree.out("log", "-1", "--format=%B", commit))
        problems = list(unclear)
        added: set[str] = set()
        changed: set[str] = set()
        for path in tree.lines("diff", "--name-only", f"{commit}^", commit):
            file = Path(path)
            if file.parts[0] != "tests" or not re.fullmatch(
                r"test_.*\.py|.*_test\.py", file.name
            ):
                continue
            touched = touched_tests(
                content(tree, f"{commit}^", path), content(tree, commit, path)
            )
            added |= {f"{path}::{test}" for test in touched.added}
            changed |= {f"{path}::{test}" for test in touched.changed}
            problems += [f"removes {path}::{test}" for test in sorted(touched.removed)]
        named = {claim.test for claim in claims}
        problems += [
            f"{test} is added or changed, but the message does not name it"
            for test in sorted((added | changed) - named)
        ]
        problems += [
            f"{test} is named, but the patch neither adds nor changes it"
            for test in sorted(named - added - changed)
        ]
        problems += [
            f"{c.test} is new, so it must fail on the release: it stands under "
            f'"{ADAPTED}"'
            for c in claims
            if c.block == ADAPTED and c.test in added
        ]
        findings += [Finding(name, problem) for problem in problems]
        commits.append(Commit(name, commit, tuple(claims), frozenset(added | changed)))
    return commits, findings


def overlay(root: Path, stock: Path, patched: Path) -> Path:
    """Make ``root`` look like the stock tree with the patched tree's ``tests``."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    for entry in stock.iterdir():
        if entry.name not in (".git", "tests"):
            (root / entry.name).symlink_to(entry)
    (root / "tests").symlink_to(patched / "tests")
    return root


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space, to compare."""
    return " ".join(text.split())


def _stock_cases(run: Run, test: str) -> list[Outcome]:
    """The cases on stock; a file that cannot be imported there fails all its tests."""
    path = test.partition("::")[0]
    cases = run.cases(test)
    if not cases and path in run.collect_errors:
        return [Outcome(test, "error", 0.0, run.collect_errors[path])]
    return cases


def judge(patch: str, claim: Claim, stock: Run, patched: Run) -> tuple[Row, list[str]]:
    """Hold one claim against the two runs."""
    before = _stock_cases(stock, claim.test)
    after = patched.cases(claim.test)
    if not before:
        shown, said = "did not run", "did not run over the stock source"
    elif claim.block == FAILS:
        shown, said = _judge_failing(claim, before)
    elif claim.block == ADAPTED:
        shown, said = _judge_all(before, "passed", "", "on the release")
    else:
        shown, said = _judge_all(before, "skipped", claim.text, "on the release")
    problems = [said] if said else []
    if not after:
        state = "did not run"
        problems.append("did not run on the patched tree")
    else:
        hardware = claim.block == HARDWARE
        word, text = ("skipped", claim.text) if hardware else ("passed", "")
        state, said = _judge_all(after, word, text, "on the patched tree")
        problems += [said] if said else []
    row = Row(patch, claim.test, len(after), shown, state)
    return row, [f"{claim.test} {problem}" for problem in problems]


def _judge_failing(claim: Claim, cases: list[Outcome]) -> tuple[str, str]:
    """What to show of a test that must fail as stated, and what is wrong or ""."""
    wanted = one_line(claim.text)
    bad = [c for c in cases if c.outcome in ("failed", "error")]
    right = [c for c in bad if wanted in one_line(c.said)]
    if not bad:
        words = ", ".join(sorted({c.outcome for c in cases}))
        return words, f"every case is {words} on the release: it proves nothing"
    if not right:
        first = one_line(bad[0].said)[:200]
        return first, f"fails on the release with `{first}`, not with `{wanted}`"
    message = one_line(right[0].message)
    said = one_line(right[0].said)
    shown = said[said.index(wanted) :]
    if len(bad) < len(cases):
        shown = f"{len(bad)} of {len(cases)}: {shown}"
    if _NAME_ONLY.fullmatch(wanted) and message != wanted:
        return shown, f"states only `{wanted}` where the failure says `{message[:200]}`"
    return shown, ""


def _judge_all(
    cases: list[Outcome], word: str, text: str, where: str
) -> tuple[str, str]:
    """What to show of a test whose cases must all end so, and what is wrong or ""."""
    for case in cases:
        said = one_line(case.message)
        if case.outcome != word:
            return case.outcome, f"is {case.outcome} {where}, not {word}: {said[:200]}"
        if text and one_line(text) not in said:
            return said[:200], f"is {word} {where} with `{said[:200]}`, not `{text}`"
    return word, ""


def check(
    release: Release,
    env: UnitEnv,
    *,
    jobs: int,
    patched: Run | None = None,
    progress: Progress | None = None,
) -> Proof:
    """Run the two runs of a release and judge every claim of its series.

    ``patched`` is a run of the patched tree that is there already; tests it lacks are
    run. A test that a later patch changes again is checked as it was in its own commit.

    What it found is kept for ``read_report``.

    Raises:
        UserError: a tree cannot be built or pytest broke.
    """
    stock = build_tree.ensure_stock(release)
    path = build_tree.ensure_patched(release)
    tree = build_tree.repo(path)
    series = patches.read_series(release)
    names = [patch.name for patch in series.patches]
    commits, findings = read_commits(tree, names)
    proof = Proof(findings=findings)

    def both(at: Path, claims: list[tuple[str, Claim]], known: Run, label: str) -> None:
        tests = sorted({claim.test for _, claim in claims})
        folder = overlay(build_root() / f"vllm-{release.version}-proof", stock, at)
        log = upstream_tests.report_log
        old = upstream_tests.run_pytest(
            env, folder, upstream_tests.files_of(tests),
            log(release, f"proof-stock{label}"), only=tests,
            jobs=jobs if len(tests) > _WORTH_TWO else 1, progress=progress,
        )  # fmt: skip
        missing = [test for test in tests if not known.cases(test)]
        if missing:
            new = upstream_tests.run_pytest(
                env, at, upstream_tests.files_of(missing),
                log(release, f"proof-patched{label}"), only=missing,
                jobs=jobs if len(missing) > _WORTH_TWO else 1, progress=progress,
            )  # fmt: skip
            known = Run(outcomes=known.outcomes | new.outcomes)
        for patch, claim in claims:
            row, problems = judge(patch, claim, old, known)
            proof.rows.append(row)
            proof.findings += [Finding(patch, problem) for problem in problems]

    final: list[tuple[str, Claim]] = []
    with ExitStack() as stack:
        for number, commit in enumerate(commits):
            later = frozenset().union(*(c.touched for c in commits[number + 1 :]))
            own = [(commit.patch, c) for c in commit.claims if c.test in later]
            final += [(commit.patch, c) for c in commit.claims if c.test not in later]
            if own:
                work = stack.enter_context(tree.worktree(commit.id))
                both(work.path, own, Run(), f"-{commit.patch[:4]}")
        if final:
            both(path, final, patched or Run(), "")
    proof.rows.sort(key=lambda row: (names.index(row.patch), row.test))
    kept.write(release, series, "proof", asdict(proof))
    return proof


def read_report(release: Release) -> Proof | None:
    """The last proof, None if there is none of this very series."""
    report = kept.read(release, "proof")
    if report is None:
        return None
    return Proof(
        [Row(**row) for row in report["rows"]],
        [Finding(**finding) for finding in report["findings"]],
    )
