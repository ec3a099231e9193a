# SPDX-License-Identifier: Apache-2.0
"""Mutants are judged one by one, and leave nothing behind."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from parity import planted
from parity.geometry import SMALL
from parity.plan import plan

PATH = "vllm/v1/core/single_type_kv_cache_manager.py"
FUNCTION = "SlidingWindowManager.reachable_block_mask"
SOURCE = (Path(vllm.__file__).parents[1] / PATH).read_text()


def mutant(name: str, first: str) -> planted.Mutant:
    """The function with a statement put before its others."""
    head, rest = SOURCE.split("class SlidingWindowManager", 1)
    before, rest = rest.split("def reachable_block_mask", 1)
    signature, rest = rest.split(":\n        ", 1)
    while signature.count("(") != signature.count(")"):
        more, rest = rest.split(":\n        ", 1)
        signature += ":\n        " + more
    source = (
        f"{head}class SlidingWindowManager{before}def reachable_block_mask"
        f"{signature}:\n        {first}\n        {rest}"
    )
    return planted.Mutant(name, PATH, FUNCTION, source)


@pytest.fixture(scope="module")
def judge() -> Iterator[planted.Judge]:
    cases = [(c, u) for c, u in plan([SMALL], 0, quick=True) if c.mode == "hits"]
    yield planted.Judge([pair for pair in cases if pair[0].setup.tier == "host"][:4])
    # Python takes long to end with a frozen heap.
    gc.unfreeze()


def test_the_first_finding_kills_and_the_function_stays(judge):
    code = SlidingWindowManager.reachable_block_mask.__code__
    work = [
        mutant("same", "pass"),
        mutant("raises", "raise RuntimeError('planted')"),
        mutant("ends", "import os; os._exit(3)"),
    ]
    killers = {m.name: words for m, words in judge.killers(work, 2)}
    assert killers["same"] is None
    assert "planted" in killers["raises"] and killers["raises"].startswith("L")
    assert killers["ends"] == "it ended with status 3"
    assert SlidingWindowManager.reachable_block_mask.__code__ is code


def test_what_never_ends_is_killed(judge, monkeypatch):
    monkeypatch.setattr(planted, "_PATIENCE", 0)
    monkeypatch.setattr(planted, "_GRACE_S", 1)
    work = [mutant("hangs", "while True: pass")]
    assert [w for _, w in judge.killers(work, 1)] == ["it did not end in 1 s"]


def test_known_findings_kill_nothing(judge, monkeypatch):
    broken = mutant("raises", "raise RuntimeError('planted')")
    ((_, words),) = judge.killers([broken], 1)
    first = judge._order[0]
    monkeypatch.setattr(judge, "_cases", [judge._cases[first]])
    monkeypatch.setattr(judge, "_order", [0])
    monkeypatch.setattr(judge, "known", judge.known | {words: None})
    ((_, other),) = judge.killers([broken], 1)
    assert other != words


def test_a_source_without_the_function_is_refused():
    with pytest.raises(LookupError, match="no function SlidingWindow"):
        planted.plant(planted.Mutant("x", PATH, FUNCTION, "a = 1\n"))
