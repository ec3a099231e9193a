# SPDX-License-Identifier: Apache-2.0
"""A second tree in a process of its own, which plays the same cases."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from . import contract
from .history import Case

TESTS = Path(__file__).resolve().parent.parent


def serve(lines: IO[str]) -> Iterator[str]:
    """Answer each case, a JSON line, with its figures (see `contract.figures`)."""
    for line in lines:
        yield json.dumps(contract.figures(Case.from_json(json.loads(line))))


class Lost(click.ClickException):
    """The other tree's process ended: what was compared with it cannot go on."""

    # As a wrong option: not a finding.
    exit_code = 2


class Peer:
    """`python -m parity serve` on another tree.

    Raises:
        Lost: from `ask` and `answer`, the process ended.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, "-m", "parity", "serve"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, TESTS)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: Case) -> None:
        """Have it play a case meanwhile."""
        try:
            self._process.stdin.write(json.dumps(case.to_json()) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> dict[str, Any]:
        """The figures of the case asked for last."""
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> Lost:
        return Lost(
            f"the simulation on {self.tree} ended with {self._process.wait()}; "
            "what it said stands above; run again with the seed above"
        )

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
