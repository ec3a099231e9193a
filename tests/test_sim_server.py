# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping a simulated server, and why it may not start."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import serve_sim
from offload_parity import sim_server
from offload_parity.errors import UserError
from offload_parity.sim_server import Plan
from offload_parity.simulation import Tree
from simulated_server.profiles import PROFILES
from simulated_server.settings import VARIABLE, Settings
from test_probe_server import run

FACTS = {
    "gpu_blocks": 6732,
    "host_blocks": 66_096,
    "block_bytes": 1_039_680,
    "groups": [
        {"kind": "full", "block": 256, "window": None, "eagle": False},
        {"kind": "swa", "block": 64, "window": 128, "eagle": True},
    ],
}
# What takes the server's place: it reports, answers /health and ends on a signal.
SERVER = f"""
    import http.server, json, os, pathlib, signal, sys, threading
    settings = json.loads(os.environ["{VARIABLE}"])
    options = sys.argv[sys.argv.index("simulated_server") + 1:]
    port = int(options[options.index("--port") + 1])
    pathlib.Path(settings["report"]).write_text('{json.dumps(FACTS)}')
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args): pass
    print("serving", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch):
    """An interpreter whose `python -m simulated_server` runs the given code."""
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))

    def make(code: str) -> Path:
        folder = tmp_path / "env" / "bin"
        folder.mkdir(parents=True)
        (folder / "program.py").write_text(textwrap.dedent(code))
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{folder}/program.py" "$@"\n'
        )
        python.chmod(0o755)
        return python

    return make


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm.egg-info").mkdir()
    (folder / "vllm.egg-info" / "PKG-INFO").write_text(
        "Name: vllm\nVersion: 0.25.1+cpu\n"
    )
    return folder


def plan(tree: Path, **more) -> Plan:
    return Plan(tree=Tree("stock", tree), version="0.25.1", **more)


def test_a_server_answers_and_leaves_nothing(interpreter, tree) -> None:
    python, port = interpreter(SERVER), sim_server.free_port()
    with sim_server.serve(plan(tree), port, python) as running:
        assert running.url == f"http://127.0.0.1:{port}"
        assert running.facts == FACTS and running.process.poll() is None
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            sim_server.check_port(port)
    assert running.process.poll() is not None
    assert "serving" in running.log.read_text()
    sim_server.check_port(port)


def test_a_server_that_ignores_signals_is_ended(interpreter, tree, monkeypatch) -> None:
    monkeypatch.setattr(sim_server, "_STOP_S", 0.2)
    ignoring = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    python = interpreter(ignoring + textwrap.dedent(SERVER))
    with sim_server.serve(plan(tree), sim_server.free_port(), python) as running:
        pass
    assert running.process.returncode == -signal.SIGKILL


def saying(log: str) -> str:
    """A program that says this and fails."""
    return f"print({log!r}); raise SystemExit(1)"


SMALL = (
    "(EngineCore pid=1) ERROR 11-30 01:00:00 [core.py:9] ValueError: To serve at least "
    "one request with the models max seq len (65536), (6.32 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.93 GiB)."
)
BUDGET = (
    "KV budget of 0.93 GiB is too small for a request of 65,536 tokens, which needs "
    "6.32 GiB: raise --gpu-gb or lower --max-model-len"
)
ODD = "(APIServer pid=1)   Value error, heads (8) are odd [type=x, y=z]"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (saying(SMALL), BUDGET),
        (saying(ODD), "did not start: heads (8) are odd; its log"),
        ("import os; os.kill(os.getpid(), 9)", "was killed or found no memory left"),
        ("raise SystemExit(3)", "did not start: exit status 3"),
        ("raise MemoryError", "was killed or found no memory left"),
        ("raise KeyError('x')", "did not start: KeyError: 'x'"),
    ],
)
def test_why_a_server_does_not_start(interpreter, tree, code: str, words: str) -> None:
    python = interpreter(code)
    with (
        pytest.raises(UserError) as error,
        sim_server.serve(plan(tree), sim_server.free_port(), python),
    ):
        raise AssertionError("it must not be ready")
    assert words in str(error.value) and "sim-0.25.1-stock-" in str(error.value)


def test_a_server_that_never_answers(interpreter, tree) -> None:
    python = interpreter("import time; time.sleep(60)")
    with (
        pytest.raises(UserError, match="did not answer in 0 s"),
        sim_server.serve(plan(tree), sim_server.free_port(), python, timeout_s=0.3),
    ):
        raise AssertionError("it must not be ready")


def test_too_little_memory_is_refused(interpreter, tree, monkeypatch) -> None:
    monkeypatch.setattr(sim_server, "NEEDED_BYTES", 10**18)
    with (
        pytest.raises(UserError, match="GB of memory are free"),
        sim_server.serve(plan(tree), sim_server.free_port(), interpreter("")),
    ):
        raise AssertionError("it must not be ready")


def test_options_and_variables_by_release(tree, tmp_path) -> None:
    old = plan(tree, retention=4096, ranks=2)
    words = sim_server.arguments(old, tmp_path, 1)
    assert "--prefix-cache-retention-interval" not in words
    settings = Settings("gemma", 0, 1, "x")
    env = sim_server._variables(old, tmp_path / "bin" / "python", settings)
    assert env["VLLM_PREFIX_CACHE_RETENTION_INTERVAL"] == "4096"
    assert Settings(**json.loads(env[VARIABLE])) == settings

    new = Plan(
        tree=Tree("x", tree), version="0.33.0", retention="dense", mtp=0, host_gib=0
    )
    words = sim_server.arguments(new, tmp_path, 1)
    assert words[words.index("--prefix-cache-retention-interval") + 1] == "None"
    assert "--kv-offloading-size" not in words and "--speculative-config" not in words
    assert "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" not in sim_server._variables(
        new, tmp_path / "bin" / "python", settings
    )
    default = Plan(tree=Tree("x", tree), version="0.33.0")
    words = sim_server.arguments(default, tmp_path, 1)
    assert "--prefix-cache-retention-interval" not in words
    assert "--kv-offloading-size" in words and "--speculative-config" in words


def test_the_version_of_a_tree(tree, tmp_path) -> None:
    assert sim_server.version_of(tree) == "0.25.1"
    with pytest.raises(UserError, match="is no vLLM tree"):
        sim_server.version_of(tmp_path)
    (tree / "vllm.egg-info" / "PKG-INFO").unlink()
    with pytest.raises(UserError, match="names no version"):
        sim_server.version_of(tree)


def test_an_unknown_profile(tree, capsys) -> None:
    with pytest.raises(UserError, match=f"choose one of {', '.join(PROFILES)}"):
        plan(tree, profile="gpt-2")
    assert run(serve_sim.cli, "--profile", "gpt-2") == 2
    assert "deepseek-v4-flash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tree", "x", "--stock"), "leave out --release and --stock"),
        (("--decode-step", "0.1"), "needs --prefill-rate"),
        (("--retention", "often"), "give dense or a number of tokens"),
        (("--stock=maybe",), "give STOCK=1 or leave it out"),
        (("--tree", "/no/such/tree"), "is no vLLM tree"),
    ],
)
def test_command_lines_that_make_no_sense(capsys, args, words: str) -> None:
    port = str(sim_server.free_port())
    assert run(serve_sim.cli, *args, "--port", port) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_at_once(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(serve_sim.cli, "--port", port) == 1
    assert f"port {port} cannot be used" in capsys.readouterr().err


def test_it_is_ready_until_it_is_interrupted(interpreter, tree) -> None:
    python, port = interpreter(SERVER), sim_server.free_port()
    with subprocess.Popen(
        [sys.executable, serve_sim.__file__, "--tree", tree, "--python", python,
         "--port", str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ctrl-C stops it" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    text = "".join([*said, rest])
    assert f"Ready: http://127.0.0.1:{port}" in text and "Stopping" in text
    assert "full 256, swa 64 (window 128) drafter" in text
    assert "GPU 7 GB = 6,732 blocks; host 64 GiB = 66,096 blocks" in text
    assert "seconds mean nothing" in text


def test_a_server_that_ends_by_itself_is_an_error(interpreter, tree, capsys) -> None:
    dying = textwrap.dedent(SERVER).replace(
        "print(", "threading.Timer(1.0, lambda: os._exit(7)).start()\nprint(", 1
    )
    python, port = interpreter(dying), sim_server.free_port()
    args = ("--tree", tree, "--python", python, "--port", port)
    assert run(serve_sim.cli, *map(str, args)) == 1
    assert "the server ended by itself" in capsys.readouterr().err


def test_profiles_are_whole() -> None:
    for profile in PROFILES.values():
        with_mtp, without = profile.layers(True), profile.layers(False)
        assert [x for x in with_mtp if not x.draft] == without
        assert [x.draft for x in with_mtp].count(True) == 1 and with_mtp[-1].draft
        names = [layer.name for layer in with_mtp]
        assert len(set(names)) == len(names)


def test_nothing_is_left_after_a_kill(interpreter, tree) -> None:
    # The engine's process outlives the server when that is killed.
    engine = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {engine!r}])\n"
    python = interpreter("import sys\n" + code + textwrap.dedent(SERVER))
    with sim_server.serve(plan(tree), sim_server.free_port(), python) as running:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pids = [int(x) for x in running.log.read_text().split() if x.isdigit()]
            if pids:
                break
            time.sleep(0.05)
        running.process.kill()
    for _ in range(100):
        try:
            os.kill(pids[0], 0)
        except ProcessLookupError:
            return
        # A zombie is left to whoever adopted it.
        if "Z" in Path(f"/proc/{pids[0]}/stat").read_text().split(")")[1].split()[:1]:
            return
        time.sleep(0.05)
    raise AssertionError("the engine's process is still there")
