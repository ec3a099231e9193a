# SPDX-License-Identifier: Apache-2.0
"""The shape of the tree: what imports what, how thin scripts are, what tests mirror."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

SCRIPTS = ROOT / "scripts"
PACKAGE = SCRIPTS / "offload_parity"
FILES = sorted(
    path
    for folder in ("scripts", "tests", "docker")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
# What of an import is ours: what vLLM or Python keep inside is another matter.
OWN = {path.stem for path in FILES} | {"offload_parity", "parity", "simulated_server"}
# A script says what its options are and calls the package.
SCRIPT_LINES = 340


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def inside(source: str) -> Iterator[str]:
    """The private names of other modules that a module takes or reaches into."""
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            ours = node.level or (node.module or "").split(".")[0] in OWN
            yield from (a.name for a in node.names if ours and private(a.name))
            modules |= {a.asname or a.name for a in node.names if ours}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and private(node.attr)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules & OWN
        ):
            yield f"{node.value.id}.{node.attr}"


def test_the_rule_finds_what_it_forbids() -> None:
    bad = "from .a import _b\nimport proof\nfrom . import git\nproof._f()\ngit._g\n"
    assert sorted(inside(bad)) == ["_b", "git._g", "proof._f"]
    good = "import os\nfrom . import git\nos._exit(1)\ngit.run()\nself._h\n"
    assert not list(inside(good))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_reaches_inside_its_neighbour(path: Path) -> None:
    """A test may reach into the one module that it is the test of."""
    own = path.stem.removeprefix("test_").removesuffix("_script")
    found = {
        name
        for name in inside(path.read_text(encoding="utf-8"))
        if not (path.stem.startswith("test_") and name.startswith(f"{own}._"))
    }
    assert not found


def test_scripts_are_thin() -> None:
    long = {
        path.name: count
        for path in SCRIPTS.glob("*.py")
        if (count := len(path.read_text().splitlines())) > SCRIPT_LINES
    }
    assert not long


def test_the_package_does_not_import_its_scripts() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & scripts, path
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module not in scripts, path


# Modules that no test names, and what tests them.
TESTED_BY = {
    **dict.fromkeys(("image_tests", "stand_in"), "make image-stand-in"),
    "pytest_frozen_heap": "test_upstream_tests.py",
    "pytest_no_hub_wait": "test_upstream_tests.py",
    "pytest_outcomes": "test_upstream_tests.py",
    "signals": "test_cli.py",
}


def test_every_module_is_named_by_a_test() -> None:
    """A module that no test names is tested by chance only."""
    tests = [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)]
    text = "\n".join(f"{path.stem[5:]} {path.read_text('utf-8')}" for path in tests)
    unnamed = {
        path.stem
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__" and not re.search(rf"\b{path.stem}\b", text)
    }
    assert unnamed == TESTED_BY.keys()
