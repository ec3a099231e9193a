# SPDX-License-Identifier: Apache-2.0
"""Running the simulation on several trees: records, status, and what goes wrong."""

import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from offload_parity import simulation
from offload_parity.errors import UserError
from offload_parity.simulation import Job, Runner, Tree


@pytest.fixture
def interpreter(tmp_path: Path):
    """An interpreter whose `python -m parity` runs the given code."""

    def make(code: str) -> Path:
        bin_folder = tmp_path / "env" / "bin"
        bin_folder.mkdir(parents=True)
        program = bin_folder / "program.py"
        program.write_text("import json, os, sys, time\n" + textwrap.dedent(code))
        python = bin_folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
        python.chmod(0o755)
        return python

    return make


def job(tmp_path: Path, label: str, *arguments: str) -> Job:
    return Job(Tree(label, tmp_path / label), arguments)


def test_records_carry_their_tree_and_keep_the_order_of_the_jobs(
    interpreter, tmp_path
) -> None:
    python = interpreter("""
        tree = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        if tree.endswith("stock"):
            time.sleep(0.3)
        print(json.dumps({"total": 2}))
        for n in (1, 2):
            print(json.dumps({"n": n, "argv": sys.argv[1:]}), flush=True)
        print("done")
        sys.exit(1)
    """)
    jobs = [job(tmp_path, "stock", "laws", "--quick"), job(tmp_path, "patched", "x")]
    ended = Runner(python, 2, accepted=(0, 1)).run(jobs)
    assert [e.job for e in ended] == jobs
    assert [[(r["tree"], r["n"]) for r in e.records] for e in ended] == [
        [("stock", 1), ("stock", 2)],
        [("patched", 1), ("patched", 2)],
    ]
    assert ended[0].records[0]["argv"] == ["-m", "parity", "laws", "--quick"]
    assert [(e.status, e.said) for e in ended] == [(1, ["done"])] * 2


def test_settings_of_the_user_do_not_reach_a_run(
    interpreter, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "7")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    (ended,) = Runner(interpreter("print(json.dumps(dict(os.environ)))"), 1).run(
        [job(tmp_path, "stock")]
    )
    (found,) = ended.records
    assert "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" not in found
    assert found["PYTHONHASHSEED"] == "0"
    assert not Path(found["PYTHONPYCACHEPREFIX"]).is_relative_to(tmp_path / "stock")


@pytest.mark.parametrize(
    "code",
    ["print('no room', file=sys.stderr); sys.exit(3)", "raise ValueError('no room')"],
)
def test_a_run_that_breaks_stops_the_others_and_says_why(
    interpreter, tmp_path, code
) -> None:
    python = interpreter(f"""
        if "slow" in sys.argv:
            time.sleep(60)
        {code}
    """)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"broke on .*bad: .*no room; try"):
        Runner(python, 2, accepted=(0, 1)).run(
            [job(tmp_path, "bad"), job(tmp_path, "good", "slow"), job(tmp_path, "next")]
        )
    assert time.monotonic() - began < 30


def test_what_a_run_refuses_is_said_as_it_says_it(interpreter, tmp_path) -> None:
    python = interpreter("""
        print("Usage: …\\n\\nError: x.json: no case; remove it", file=sys.stderr)
        sys.exit(2)
    """)
    with pytest.raises(UserError) as refused:
        Runner(python, 1, accepted=(0, 1)).run([job(tmp_path, "stock")])
    assert str(refused.value) == "x.json: no case; remove it"


FORKING = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.environ["HERE"], "w") as file:
        file.write(str(child.pid))
    if "wait" in sys.argv:
        time.sleep(60)
    sys.exit(3)
"""


def ended_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", ["stop_all", "timeout"])
def test_what_a_run_started_ends_with_it(
    interpreter, tmp_path, monkeypatch, how
) -> None:
    here = tmp_path / "pid"
    monkeypatch.setenv("HERE", str(here))
    runner = Runner(interpreter(FORKING), 1, timeout_s=3 if how == "timeout" else None)
    if how == "stop_all":

        def stop() -> None:
            while not (here.exists() and here.read_text()):
                time.sleep(0.05)
            simulation.stop_all()

        thread = threading.Thread(target=stop)
        thread.start()
        # Another thread's end; nothing is wrong with the tree.
        assert runner.run([job(tmp_path, "m", "wait")])[0].status != 0
        thread.join()
    else:
        with pytest.raises(simulation.Broken, match="did not end in 3 s"):
            runner.run([job(tmp_path, "m", "wait")])
    assert ended_within(int(here.read_text()), 5)


def test_findings_are_a_break_where_none_are_foreseen(interpreter, tmp_path) -> None:
    with pytest.raises(UserError, match="broke"):
        Runner(interpreter("sys.exit(1)"), 1).run([job(tmp_path, "stock")])


def test_a_folder_without_vllm_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="is no vLLM tree"):
        simulation.check_tree(Tree("stock", tmp_path))
