# SPDX-License-Identifier: Apache-2.0
"""Failures that were found once, as files that are played ever since."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import click

from .history import Case

FOLDER = Path(__file__).resolve().parent.parent / "regressions"


class Unusable(click.ClickException):
    """A file that holds no case, or the folder; says which, and the next step."""

    # As a wrong option: not a finding.
    exit_code = 2


def write(
    release: str, law: str, case: Case, words: list[str], folder: Path = FOLDER
) -> Path:
    """Write a failing case, whole; its file is named by what is played.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{release}-{law}-{case.digest}.json"
    data = {"release": release, "law": law, "words": words, "case": case.to_json()}
    # Half a file would stop every later run.
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path


def check_folder(folder: Path = FOLDER) -> None:
    """Make the folder if it is not there, and show that it can be written.

    Raises:
        Unusable: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
    except OSError as error:
        raise Unusable(
            f"a failure could not be written to {folder} ({error.strerror}): make it a "
            "folder with room that you may write to"
        ) from error


def read_file(path: Path) -> Case:
    """The case that a file holds, named by it.

    Raises:
        Unusable: it holds none.
    """
    try:
        case = Case.from_json(json.loads(path.read_text(encoding="utf-8"))["case"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable(f"{path}: {error}; remove it or mend it") from error
    return replace(case, name=f"regression {path.stem}")


def read(folder: Path = FOLDER) -> Iterator[Case]:
    """The cases of a folder."""
    return map(read_file, sorted(folder.glob("*.json")))
