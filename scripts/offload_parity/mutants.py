# SPDX-License-Identifier: Apache-2.0
"""Defects planted in a patched tree, each of which the laws have to notice.

A mutant is the tree with one patch taken out, or with one comparison, sum or condition
changed in a function that decides what is kept. ``patches/<release>/mutants.toml``
excuses those that no law can notice, with the reason:

    [survivors]        # what cannot be noticed; the key is the mutant's name
    "function: old => new" = "reason"
    "without 0001" = "reason"
    [unit_tests]       # patches of code that the simulation does not run
    "0003" = "reason"
"""

import ast
import copy
import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

from . import build_tree, git, patches, proof, upstream_tests
from .errors import UserError
from .files import replace
from .paths import build_root, shown
from .release import Release
from .unit_env import UnitEnv

_SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
# The functions that decide which positions and blocks are kept, under the names that
# one release or another has for them.
DECIDING = {
    "vllm/v1/core/kv_cache_coordinator.py": ("replay_boundaries",),
    "vllm/v1/core/single_type_kv_cache_manager.py": (
        "SlidingWindowManager.reachable_block_mask",
    ),
    _SCHEDULER: (
        "OffloadingConnectorScheduler._reachable_boundaries",
        "OffloadingConnectorScheduler._reachable_store_block_mask",
        "OffloadingConnectorScheduler._replay_boundaries",
        "OffloadingConnectorScheduler._reachable_blocks",
        "OffloadingConnectorScheduler._reachable_chunks",
        "OffloadingConnectorScheduler._holds_kv",
    ),
}
_SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed function, and its file: the path in the tree and the new source."""

    name: str
    path: str
    function: str
    source: str = field(repr=False)


@dataclass(frozen=True)
class Excuses:
    """What ``mutants.toml`` says; the keys are names and patch numbers."""

    survivors: dict[str, str] = field(default_factory=dict)
    unit_tests: dict[str, str] = field(default_factory=dict)


def excuses(release: Release) -> Excuses:
    """Read the release's ``mutants.toml``; there need be none.

    Raises:
        UserError: it is no TOML or has other tables.
    """
    path = release.folder / "mutants.toml"
    if not path.exists():
        return Excuses()
    try:
        return Excuses(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{shown(path)}: {error}; mend the file") from error


# --- changed code ---


def mutants(tree: Path) -> list[Mutant]:
    """Every mutant of the deciding functions of a tree.

    Raises:
        UserError: a file has none of the functions that it should have.
    """
    found = []
    for path, names in DECIDING.items():
        source = (tree / path).read_text(encoding="utf-8")
        module = ast.parse(source)
        functions = {n: f for n in names if (f := _function(module, n))}
        if not functions:
            raise UserError(
                f"{shown(tree / path)} has none of {', '.join(names)}: name what "
                "decides there now in scripts/offload_parity/mutants.py"
            )
        for called, function in functions.items():
            found += [
                Mutant(name, path, called, text)
                for name, text in mutate(source, function)
            ]
    return found


def _function(module: ast.Module, name: str) -> ast.FunctionDef | None:
    body = module.body
    *classes, last = name.split(".")
    for each in classes:
        body = next(
            (n.body for n in body if isinstance(n, ast.ClassDef) and n.name == each), []
        )
    return next(
        (n for n in body if isinstance(n, ast.FunctionDef) and n.name == last), None
    )


def mutate(source: str, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Names and sources of a file with one thing in a function changed.

    Comparisons lose or gain their equality, == and != and + and - change places, and
    conditions are negated; assertions stay as they are.
    """
    seen = set()
    names: dict[str, int] = {}
    skipped = {
        id(inner)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for inner in ast.walk(node)
    }
    for node in ast.walk(function):
        if id(node) in skipped:
            continue
        for old, new in _changes(node):
            text = _replaced(source, old, new)
            if text in seen:
                continue
            seen.add(text)
            name = f"{function.name}: {ast.unparse(old)} => {ast.unparse(new)}"
            names[name] = names.get(name, 0) + 1
            if names[name] > 1:
                name += f" (no. {names[name]})"
            yield name, text


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            if type(op) in _SWAPPED:
                new = copy.deepcopy(node)
                new.ops[index] = _SWAPPED[type(op)]()
                yield node, new
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        new = copy.deepcopy(node)
        new.op = _SWAPPED[type(node.op)]()
        yield node, new
    for test in (
        [node.test]
        if isinstance(node, ast.If | ast.IfExp | ast.While)
        else getattr(node, "ifs", [])
    ):
        single = isinstance(test, ast.Compare) and len(test.ops) == 1
        # The negation of == is !=, which is there already.
        if not (single and isinstance(test.ops[0], ast.Eq | ast.NotEq)):
            yield test, ast.UnaryOp(ast.Not(), test)


def _replaced(source: str, old: ast.expr, new: ast.expr) -> str:
    """The source with one expression replaced, brackets around it."""
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: old.lineno - 1]) + lines[old.lineno - 1][: old.col_offset]
    after = lines[old.end_lineno - 1][old.end_col_offset :]
    after += b"".join(lines[old.end_lineno :])
    return (before + f"({ast.unparse(new)})".encode() + after).decode()


def write(work: list[Mutant], file: Path) -> None:
    """Write mutants as ``python -m parity mutants`` reads them."""
    lines = [json.dumps(vars(mutant)) + "\n" for mutant in work]
    replace(file, "".join(lines).encode())


class Overlay:
    """A tree of links to another in which some files are replaced.

    It stays at one place, so that bytecode of what is not replaced is found again.
    """

    def __init__(self, root: Path, tree: Path) -> None:
        self.path = root
        self._tree = tree

    def show(self, files: dict[str, bytes | None]) -> None:
        """Replace these files, by path in the tree, and no others; None: without it."""
        if self.path.exists():
            shutil.rmtree(self.path)
        replaced = {self.path / path: text for path, text in files.items()}
        around = {parent for path in replaced for parent in path.parents}
        self._link(Path(), replaced.keys(), around | {self.path})
        for path, text in replaced.items():
            if text is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)

    def _link(self, folder: Path, replaced: Set[Path], around: Set[Path]) -> None:
        (self.path / folder).mkdir(parents=True)
        for entry in (self._tree / folder).iterdir():
            ours = self.path / folder / entry.name
            if ours in around:
                self._link(folder / entry.name, replaced, around)
            elif ours not in replaced and entry.name != ".git":
                ours.symlink_to(entry)


# --- patches taken out ---


@dataclass(frozen=True)
class Without:
    """A commit that lacks a patch, and those that build on it."""

    patch: str
    commit: str
    dropped: tuple[str, ...]


def without(tree: git.Repo, release: Release, number: int) -> Without:
    """The series without one patch: later ones that no longer apply go as well.

    The commit is made in a temporary work tree; no branch holds it.
    """
    names = [patch.name for patch in patches.read_series(release).patches]
    ids = build_tree.commits(tree)
    dropped = []
    with tree.worktree(f"{ids[number]}^") as work:
        for name, commit in list(zip(names, ids, strict=True))[number + 1 :]:
            if not work.ok("cherry-pick", commit):
                work.run("cherry-pick", "--abort", check=False)
                work.run("reset", "-q", "--hard")
                dropped.append(name)
        return Without(names[number], work.commit_id("HEAD"), tuple(dropped))


def around(tree: git.Repo, number: int) -> tuple[str, str]:
    """The commits of the series before a patch and with it."""
    ids = build_tree.commits(tree)
    return tree.commit_id(f"{ids[number]}^"), ids[number]


def inconsistent(finding: str) -> bool:
    """Whether it says that code calls what is not there, which any change may do."""
    return bool(re.search(r": (Type|Attribute|Name|Import)Error", finding))


def changed_files(tree: git.Repo, commit: str) -> dict[str, bytes | None]:
    """vLLM's own files at a commit that differ from the series' tip, None if gone."""
    paths = tree.lines("diff", "--name-only", "--no-renames", commit, "HEAD", "vllm")
    return {path: tree.content(commit, path) for path in paths}


def failing_unit_test(
    tree: git.Repo, release: Release, env: UnitEnv, number: int
) -> str | None:
    """The first of a patch's own tests that fails before it, None if none does."""
    names = [patch.name for patch in patches.read_series(release).patches]
    commits, _ = proof.read_commits(tree, names)
    (claims,) = (c.claims for c in commits if c.patch == names[number])
    tests = [claim.test for claim in claims]
    before, after = around(tree, number)
    with tree.worktree(before) as work:
        work.run("checkout", "-q", after, "--", "tests")
        run = upstream_tests.run_pytest(
            env, work.path, upstream_tests.files_of(tests),
            upstream_tests.report_log(release, f"mutant-{names[number][:4]}"),
            only=tests,
        )  # fmt: skip
    for outcome in run.outcomes.values():
        if outcome.outcome in ("failed", "error"):
            return f"{outcome.id}: {proof.one_line(outcome.said)[:160]}"
    return next(iter(run.collect_errors.values()), None)


def overlay_root(release: Release, slot: int) -> Path:
    """Where a worker's overlay is."""
    return build_root() / f"vllm-{release.version}-mutant-{slot}"
