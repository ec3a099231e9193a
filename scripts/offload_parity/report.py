# SPDX-License-Identifier: Apache-2.0
"""Steps that run one after the other, and the table of how they ended."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from tqdm import tqdm

from .errors import UserError
from .paths import shown
from .upstream_tests import Progress

_SHOWN = 20
_SECONDS_BETWEEN_LINES = 60


@dataclass
class Step:
    """One line of the summary."""

    group: str
    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Result:
    """What a step says of itself: whether it is good, in short, and what is wrong."""

    ok: bool
    detail: str
    findings: list[str] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


class Report:
    """Runs the steps one after the other to the end and keeps what they say."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @property
    def ok(self) -> bool:
        """Whether every step is good."""
        return all(step.ok for step in self.steps)

    def run(
        self, group: str, name: str, work: Callable[[Progress], Result]
    ) -> Result | None:
        """Run one step and show how it ended; None if it broke."""
        title = f"{group}: {name}"
        click.echo(f"{title} …")
        step = Step(group, name)
        self.steps.append(step)
        began = time.monotonic()
        result = None
        try:
            with bar(title) as progress:
                result = work(progress)
            step.ok, step.detail = result.ok, result.detail
        except UserError as error:
            step.detail = str(error)
        step.seconds = time.monotonic() - began
        word = "ok" if step.ok else "FAILED"
        click.echo(f"{title}: {word}, {step.seconds:.0f} s, {step.detail}")
        if result and not result.ok:
            for finding in result.findings[:_SHOWN]:
                click.echo(f"  {finding}")
            if len(result.findings) > _SHOWN:
                click.echo(f"  … and {len(result.findings) - _SHOWN} more")
            for log in result.logs:
                click.echo(f"  log: {shown(log)}")
        return result

    def skip(self, group: str, name: str, why: str) -> None:
        """Note a step that cannot run."""
        self.steps.append(Step(group, name, detail=f"not run: {why}"))

    def summary(self) -> str:
        """The table: per release, what was tried, how it ended and how long it took."""
        lines = []
        width = max(len(step.name) for step in self.steps)
        for group in dict.fromkeys(step.group for step in self.steps):
            lines.append(group)
            for s in self.steps:
                if s.group == group:
                    word = "ok" if s.ok else "FAILED"
                    lines.append(
                        f"  {s.name:{width}}  {word:6}  {s.seconds:4.0f} s  {s.detail}"
                    )
        total = sum(step.seconds for step in self.steps)
        failed = sum(not step.ok for step in self.steps)
        end = f"{failed} of {len(self.steps)} failed" if failed else "all passed"
        return "\n".join([*lines, f"{end}, {total / 60:.1f} min"])


def finish(report: Report) -> None:
    """Show the table and end the program with 1 if a step is bad."""
    click.echo(f"\n{report.summary()}")
    if not report.ok:
        sys.exit(1)


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar on a terminal, a line a minute elsewhere."""
    # Delayed: a step that reports no progress shows no bar.
    with tqdm(desc=title, unit="", leave=False, disable=None, delay=1) as shown_bar:
        said = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said
            if not shown_bar.disable:
                shown_bar.total = total or None
                shown_bar.update(done - shown_bar.n)
            elif time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                click.echo(f"  {done} of {total}")

        yield progress
