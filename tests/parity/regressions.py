# SPDX-License-Identifier: Apache-2.0
"""Failures that were found once, as files that are played ever since."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .history import Case

FOLDER = Path(__file__).resolve().parent.parent / "regressions"


def write(
    release: str, law: str, case: Case, words: list[str], folder: Path = FOLDER
) -> Path:
    """Write a failing case; its file is named by what is played."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{release}-{law}-{case.digest}.json"
    data = {"release": release, "law": law, "words": words, "case": case.to_json()}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def read_file(path: Path) -> Case:
    """The case that a file holds, named by it.

    Raises:
        ValueError: it holds none; the message names it.
    """
    try:
        case = Case.from_json(json.loads(path.read_text(encoding="utf-8"))["case"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}; remove it or mend it") from error
    return replace(case, name=f"regression {path.stem}")


def read(folder: Path = FOLDER) -> Iterator[Case]:
    """The cases of a folder."""
    return map(read_file, sorted(folder.glob("*.json")))
