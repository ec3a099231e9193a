# SPDX-License-Identifier: Apache-2.0
"""vLLM's own lint, and this project's rules, on what each patch of a series adds.

pre-commit runs the hooks of the release's own configuration. Those that it would clone
from a git host (ruff, typos) come from the package index instead, in the versions that
the release pins. What the stock tree already has is no finding.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import build_tree, git, kept, patches
from .errors import UserError
from .paths import build_root, shown
from .proof import content
from .release import Release
from .upstream_tests import Progress

_PINNED = re.compile(r"v?(\d[\w.]*)$")
_SECTION = re.compile(r"^(?P<name>\S.*?)\.{3,}.*(?P<state>Passed|Failed|Skipped)$")
_AT = re.compile(r"^\s*(?P<path>[^\s:]+):(?P<line>\d+)(?::\d+)?:?\s*(?P<text>.*)$")
_UNFORMATTED = re.compile(r"^Would reformat: (\S+)$")
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")

# Slow, so only on the whole series; the others run on every patch.
_SLOW = ("mypy",)
WHOLE = "the whole series"


@dataclass(frozen=True)
class Finding:
    """Something to mend: the patch's file (or ``WHOLE``), ``path:line``, the rule."""

    patch: str
    where: str
    rule: str


def local_config(config: dict, ruff: str) -> dict:
    """The hooks of a release's pre-commit configuration that need no git host.

    These are ruff and typos in the pinned versions, and the tree's own Python hooks.
    ruff reports and changes nothing.

    Raises:
        UserError: ruff is pinned otherwise than ``ruff``, or typos is not pinned.
    """
    pins = {
        repo["repo"].rstrip("/").rsplit("/", 1)[-1]: repo["rev"]
        for repo in config["repos"]
        if "rev" in repo
    }

    def pinned(repo: str) -> str:
        found = _PINNED.fullmatch(str(pins.get(repo, "")))
        if not found:
            raise UserError(
                f"the release's .pre-commit-config.yaml pins no version of {repo}: "
                "teach scripts/offload_parity/series_lint.py where it went"
            )
        return found[1]

    version = pinned("ruff-pre-commit")
    if ruff != f"ruff=={version}":
        raise UserError(
            f"release.toml says {ruff}, the release's own configuration {version}: "
            "correct release.toml"
        )
    common = {"language": "python", "types_or": ["python", "pyi"]}
    hooks = [
        {
            "id": "ruff-check",
            "name": "ruff check",
            "entry": "ruff check --force-exclude --no-cache --output-format concise",
            "additional_dependencies": [ruff],
        }
        | common,
        {
            "id": "ruff-format",
            "name": "ruff format",
            "entry": "ruff format --check --force-exclude --no-cache",
            "additional_dependencies": [ruff],
        }
        | common,
        {
            "id": "typos",
            "name": "typos",
            "entry": "typos --force-exclude --format brief",
            "language": "python",
            "types": ["text"],
            "additional_dependencies": [f"typos=={pinned('typos')}"],
        },
    ]
    for repo in config["repos"]:
        if repo["repo"] == "local":
            hooks += [hook for hook in repo["hooks"] if hook["language"] == "python"]
    kept = {key: value for key, value in config.items() if key in ("exclude",)}
    return kept | {
        "default_stages": ["pre-commit"],
        "repos": [{"repo": "local", "hooks": hooks}],
    }


def sections(output: str) -> Iterator[tuple[str, str, list[str]]]:
    """Each hook in pre-commit's output: its name, its state and what it printed."""
    name = state = ""
    lines: list[str] = []
    for line in output.splitlines():
        if match := _SECTION.match(line):
            if name:
                yield name, state, lines
            name, state, lines = match["name"], match["state"], []
        elif line.strip() and not re.match(r"- (hook id|exit code|duration):", line):
            lines.append(line)
    if name:
        yield name, state, lines


def new_lines(mine: Sequence[str], stock: Sequence[str]) -> list[tuple[str, str]]:
    """What a hook says of the patched tree and not of stock: (``path:line``, text).

    Line numbers move, so they do not count. A hook that names no file and line at all
    is quoted as it is.
    """

    def key(line: str) -> str:
        at = _AT.match(line)
        return f"{at['path']} {at['text']}" if at else line.strip()

    left = [key(line) for line in stock]
    located: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for line in mine:
        if key(line) in left:
            left.remove(key(line))
            continue
        at = _AT.match(line)
        if unformatted := _UNFORMATTED.match(line):
            located.append((unformatted[1], "would be reformatted"))
        elif not at:
            others.append(("", line.strip()))
        elif not at["text"].startswith("note:"):
            located.append((f"{at['path']}:{at['line']}", at["text"]))
    return located or others


class Hooks:
    """pre-commit with a release's own hooks, in one work tree."""

    def __init__(self, release: Release, work: git.Repo) -> None:
        self.release = release
        self.work = work
        folder = build_root() / "lint" / release.version
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "pre-commit.yaml"
        self.log = build_root() / "reports" / release.version / "lint.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        text = (work.path / ".pre-commit-config.yaml").read_text(encoding="utf-8")
        config = local_config(yaml.safe_load(text), release.lint_ruff)
        self.config.write_text(yaml.safe_dump(config, sort_keys=False))
        self.slow = [
            hook["id"]
            for hook in config["repos"][0]["hooks"]
            if hook["id"].startswith(_SLOW)
        ]
        self.env = git.environment(isolated=True) | {
            "PRE_COMMIT_HOME": str(build_root() / "pre-commit"),
            "MYPY_CACHE_DIR": str(folder / "mypy"),
            "PRE_COMMIT_COLOR": "never",
            # The tools' environment, which may not be active.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def run(self, files: Sequence[str], *, slow: bool) -> dict[str, list[str]]:
        """What each failing hook prints of ``files``, at the work tree's commit.

        Some hooks mend what they find; that is undone.

        Raises:
            UserError: a hook could not be installed.
        """
        if not files:
            return {}
        env = self.env | ({} if slow else {"SKIP": ",".join(self.slow)})
        done = subprocess.run(
            [
                sys.executable, "-m", "pre_commit", "run", "--config", str(self.config),
                "--color", "never", "--files", *files,
            ],
            cwd=self.work.path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(files)}\n{done.stdout}{done.stderr}\n")
        found = list(sections(done.stdout))
        if done.returncode not in (0, 1) or not found:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise UserError(
                f"vLLM's lint hooks could not be installed or started ({last}): check "
                f"the network; the log: {shown(self.log)}"
            )
        self.work.run("checkout", "-q", "--force", "HEAD", "--", ".")
        return {name: lines for name, state, lines in found if state == "Failed"}


def added_lines(tree: git.Repo, commit: str, path: str) -> set[int]:
    """The numbers of the lines that a commit adds to a file."""
    found: set[int] = set()
    for line in tree.lines("diff", "-U0", f"{commit}^", commit, "--", path):
        if match := _HUNK.match(line):
            first, count = int(match[1]), int(match[2] or 1)
            found |= set(range(first, first + count))
    return found


def functions(source: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """A file's functions and methods by qualified name; none inside another."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}

    def visit(nodes: Sequence[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node

    visit(ast.parse(source).body, "")
    return found


def own_rules(old: str | None, new: str, added: set[int]) -> list[tuple[int, str]]:
    """This project's rules on a file that a patch changes: (line, rule).

    Every function that is new has a docstring; every new ``zip`` says ``strict``.
    """
    before = functions(old or "")
    found = [
        (node.lineno, f"{name} is new and has no docstring")
        for name, node in functions(new).items()
        if name not in before and not ast.get_docstring(node)
    ]
    for node in ast.walk(ast.parse(new)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "zip"
            and node.lineno in added
            and not any(keyword.arg == "strict" for keyword in node.keywords)
        ):
            found.append((node.lineno, "zip() without strict="))
    return sorted(found)


def check_text(tree: git.Repo, patch: str, commit: str) -> list[Finding]:
    """What needs nothing but the commit: white space and this project's rules."""
    found = []
    for line in tree.lines("diff", "--check", f"{commit}^", commit, check=False):
        if (at := _AT.match(line)) and not line.startswith("+"):
            found.append(Finding(patch, f"{at['path']}:{at['line']}", at["text"]))
    for path in touched(tree, f"{commit}^", commit):
        if not path.endswith(".py"):
            continue
        new = content(tree, commit, path) or ""
        try:
            rules = own_rules(
                content(tree, f"{commit}^", path), new, added_lines(tree, commit, path)
            )
        except SyntaxError as error:
            rules = [(error.lineno or 1, f"is no Python: {error.msg}")]
        found += [Finding(patch, f"{path}:{line}", rule) for line, rule in rules]
    return found


def touched(tree: git.Repo, old: str, new: str) -> list[str]:
    """The files that differ between two commits and exist in the second."""
    return tree.lines("diff", "--name-only", "--diff-filter=d", old, new)


def read_report(release: Release) -> list[Finding] | None:
    """What the last lint found, None if there is none of this very series."""
    report = kept.read(release, "lint")
    if report is None:
        return None
    return [Finding(**finding) for finding in report["findings"]]


def check(release: Release, progress: Progress | None = None) -> list[Finding]:
    """Lint every patch of a release's series.

    What it found is kept for ``read_report``.

    Raises:
        UserError: the tree cannot be built or a hook cannot be installed.
    """
    tree = build_tree.repo(build_tree.ensure_patched(release))
    series = patches.read_series(release)
    names = [patch.name for patch in series.patches]
    tip = tree.commit_id("HEAD")
    ids = build_tree.commits(tree)
    findings: list[Finding] = []
    with tree.worktree(build_tree.BASE) as work:
        hooks = Hooks(release, work)

        def run(commit: str, files: list[str], slow: bool) -> dict[str, list[str]]:
            work.run("checkout", "-q", "--force", "--detach", commit)
            return hooks.run(files, slow=slow)

        def compare(patch: str, commit: str, files: list[str], slow: bool) -> None:
            mine = run(commit, files, slow)
            if not mine:
                return
            base = tree.lines("ls-tree", "--name-only", build_tree.BASE, "--", *files)
            stock = run(build_tree.BASE, base, slow)
            for hook, lines in mine.items():
                new = new_lines(lines, stock.get(hook, []))
                findings.extend(Finding(patch, at, f"{hook}: {x}") for at, x in new)

        steps = len(names) + 1
        for number, (name, commit) in enumerate(zip(names, ids, strict=True)):
            findings += check_text(tree, name, commit)
            compare(name, commit, touched(tree, f"{commit}^", commit), False)
            if progress:
                progress(number + 1, steps)
        whole = touched(tree, build_tree.BASE, tip)
        before = len(findings)
        if names:
            compare(WHOLE, tip, whole, True)
        seen = {(f.where, f.rule) for f in findings[:before]}
        findings[before:] = [
            f for f in findings[before:] if (f.where, f.rule) not in seen
        ]
        if progress:
            progress(steps, steps)
    kept.write(release, series, "lint", {"findings": [vars(f) for f in findings]})
    return findings
