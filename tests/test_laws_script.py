# SPDX-License-Identifier: Apache-2.0
"""What `make parity` makes of the verdicts of two trees."""

import subprocess
import time
from pathlib import Path

import click
import pytest

import laws
import sweep
from offload_parity import simulation
from offload_parity.errors import UserError


def verdict(tree: str, law: str, **more) -> dict:
    base = {
        "tree": tree, "law": law, "case": "replay [1]", "geometry": "g",
        "retention": 0, "tier": "host", "checks": 2, "words": [],
    }  # fmt: skip
    return base | more


def hits(tree: str, *figures: int) -> dict:
    return verdict(
        tree, "L6", hits=list(figures), stored=[5, 0], owed=[None, 32], excused=[],
        computed=[0, 64], unpeeked=[[], []], align=32, local=[0] * len(figures),
        least_load=0, astray=False, priced=False,
    )  # fmt: skip


def test_findings_are_counted_by_tree_and_law():
    found = laws.tally(
        [
            verdict("stock", "L1", words=["send 1 hits 0 of 32"]),
            verdict("patched", "L1"),
            verdict("patched", "L7", exempt={"full attention": 3}),
        ]
    )
    assert found["stock"].findings == {
        "L1": ["g, retention 0, host: replay [1]: send 1 hits 0 of 32"]
    }
    assert found["patched"].findings == {}
    assert found["patched"].checks == {"L1": 2, "L7": 2}
    assert found["patched"].exempt == {"full attention": 3}
    lines = laws.table({"1.2.3": found}).splitlines()
    assert "| 1.2.3 | L1 replay | 1 of 2 | 0 of 2 |" in lines


def test_a_patched_hit_below_stock_is_a_finding_of_l6():
    found = laws.tally([hits("stock", 0, 64), hits("patched", 0, 32)])
    assert found["stock"].findings == {}
    assert found["patched"].findings == {
        "L6": ["g, retention 0, host: replay [1]: send 1 hits 32, on stock 64"]
    }
    assert not laws.tally([hits("stock", 0, 64), hits("patched", 0, 64)])[
        "patched"
    ].findings


def test_another_case_is_not_compared():
    other = hits("stock", 0, 64) | {"case": "another"}
    assert not laws.tally([other, hits("patched", 0, 32)])["patched"].findings


def test_reports_that_are_not_as_stated_are_counted(capsys):
    base = {"release": "1.2.3", "report": "7", "title": "t", "law": "L1"}
    shows = base | {"found": True, "expected": True, "words": "send 1 hits 0 of 32"}
    missing = base | {"found": False, "expected": True, "words": ""}
    assert laws._print_reports([shows, missing]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "found by L1: send 1" in said[0]
    assert said[1].endswith("does not show (EXPECTED TO SHOW)")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300", "1.5", ""])
def test_seconds_that_are_no_time_are_refused(seconds):
    with pytest.raises(click.BadParameter, match="is not "):
        laws.fuzz.make_context("fuzz", [f"--seconds={seconds}"])


def test_a_fuzz_that_is_interrupted_leaves_no_process(monkeypatch, tmp_path):
    """Nor the stock tree's, which the other one started."""
    here = tmp_path / "pid"
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nsleep 60 &\necho $! > "{here}"\nwait\n')
    python.chmod(0o755)
    tree = simulation.Tree("t", tmp_path)
    monkeypatch.setattr(laws.simulation, "trees_of", lambda release: [tree, tree])
    monkeypatch.setattr(laws.unit_env, "interpreter", lambda named: python)

    def interrupt(self, timeout=None):
        while not (here.exists() and here.read_text().strip()):
            time.sleep(0.05)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        laws.fuzz.callback(None, 5, 1, None)
    until = time.monotonic() + 5
    while _runs(int(here.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(int(here.read_text()))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    monkeypatch, tmp_path
):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "out").touch()

    def never(*_, **__):
        raise AssertionError("it must not run")

    monkeypatch.setattr(laws.simulation, "Runner", never)
    arguments = ["--patched", str(tmp_path), "--out", str(tmp_path / "out")]
    for command in (laws.laws, sweep.cli):
        with pytest.raises(UserError, match="nothing can be written to"):
            command(arguments, standalone_mode=False)
