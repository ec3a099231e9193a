# SPDX-License-Identifier: Apache-2.0
"""Which steps of vLLM's CI run a test, and whether a change of a file starts them."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

AREAS = ".buildkite/test_areas"
_ONE_MARK = re.compile(r"(not )?\w+")
# Options of pytest whose value is the next word.
_WITH_VALUE = {"-k", "-m", "-n", "-p", "-o", "--shard-id", "--num-shards", "--timeout"}


@dataclass(frozen=True)
class Target:
    """A path or pattern that a step hands to pytest, and the marks it selects by."""

    path: str
    marks: str = ""

    def holds(self, test_file: str, text: str) -> bool:
        """Whether pytest is given the file; ``text`` is what stands in it."""
        file = test_file.removeprefix("tests/")
        path = self.path.removeprefix("tests/").rstrip("/")
        given = path in ("", ".") or fnmatch(file, path) or fnmatch(file, f"{path}/*")
        if not given or not _ONE_MARK.fullmatch(self.marks):
            # A longer expression is taken to select some of the file.
            return given
        word = self.marks.removeprefix("not ")
        marked = f"pytest.mark.{word}" in text
        return marked != self.marks.startswith("not ")


@dataclass(frozen=True)
class Step:
    """A step: what it is called, what it hands to pytest, and what starts it."""

    label: str
    targets: tuple[Target, ...]
    starts: tuple[str, ...]

    def runs(self, test_file: str, text: str) -> bool:
        """Whether it runs a test file, in which ``text`` stands."""
        return any(target.holds(test_file, text) for target in self.targets)

    def started_by(self, file: str) -> bool:
        """Whether a change of ``file`` starts it; the last rule that fits counts."""
        started = not self.starts
        for rule in self.starts:
            if file.startswith(rule.removeprefix("!")):
                started = not rule.startswith("!")
        return started


def read(tree: Path) -> list[Step]:
    """The steps of a tree's test areas that call pytest."""
    steps = []
    for path in sorted((tree / AREAS).glob("*.yaml")):
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        for step in found.get("steps") or ():
            targets = tuple(t for line in _commands(step) for t in _targets(line))
            if targets:
                starts = tuple(step.get("source_file_dependencies") or ())
                steps.append(Step(step.get("label", path.stem), targets, starts))
    return steps


def _commands(step: dict[str, Any]) -> Sequence[str]:
    found = step.get("commands", step.get("command", ()))
    return [found] if isinstance(found, str) else [str(line) for line in found or ()]


def _targets(line: str) -> Iterator[Target]:
    """What a command line hands to pytest, the first time that it calls it."""
    try:
        words = shlex.split(line)
    except ValueError:
        return
    if "pytest" not in words:
        return
    rest = iter(words[words.index("pytest") + 1 :])
    marks = ""
    for word in rest:
        if word in _WITH_VALUE:
            value = next(rest, "")
            marks = value if word == "-m" else marks
        elif word in ("&&", "||", ";", "|"):
            return
        elif not word.startswith("-"):
            yield Target(word.partition("::")[0], marks)


def gaps(
    steps: Sequence[Step], files: Sequence[str], read_test: Callable[[str], str]
) -> dict[str, str]:
    """What CI would not run of a change's tests: by file, why.

    That is a test file that no step runs, and a source file whose change starts no step
    that runs any of the change's tests. ``read_test`` returns a test file's text.
    """
    tests = [f for f in files if f.startswith("tests/") and "/test_" in f]
    sources = [f for f in files if f.startswith("vllm/")]
    running = {
        test: [step for step in steps if step.runs(test, read_test(test))]
        for test in tests
    }
    found = {test: "no step runs it" for test, its in running.items() if not its}
    starting = [step for its in running.values() for step in its]
    for source in sources:
        if not any(step.started_by(source) for step in starting):
            found[source] = "its change starts no step that runs a test of this change"
    return found
