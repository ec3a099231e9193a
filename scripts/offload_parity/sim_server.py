# SPDX-License-Identifier: Apache-2.0
"""Start and stop a simulated server (``scripts/simulated_server``)."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from packaging.version import Version

from simulated_server.profiles import PROFILES
from simulated_server.settings import Settings

from . import simulation, unit_env
from .errors import UserError
from .paths import ROOT, build_root, shown
from .simulation import Tree

HOST = "127.0.0.1"
# The process of the server and that of its engine, measured.
NEEDED_BYTES = 2 * 10**9
_EXECUTOR = "simulated_server.executor.SimulatedExecutor"
_STOP_S = 15
# From 0.29 on an option, before a variable.
_OPTION_SINCE = Version("0.29")


@dataclass(frozen=True)
class Plan:
    """What is to be imitated.

    Attributes:
        tree: a vLLM tree, and how messages call it.
        version: its release.
        profile: a key of ``simulated_server.profiles.PROFILES``.
        mtp: tokens that the drafter proposes, 0 for none.
        gpu_bytes: KV cache of one rank.
        host_gib: the whole host tier; 0: no offloading.
        ranks: tensor-parallel ranks, each with a copy of its own.
        retention: None: the release's default; "dense", or a number of tokens.
        max_model_len: the longest request in tokens.
        prefill_tokens_per_s, host_bytes_per_s, decode_step_s: see ``Settings``.
        dev_mode: the server offers to empty its GPU side.
        options: more options of ``vllm serve``.
    """

    tree: Tree
    version: str
    profile: str = "deepseek-v4-flash"
    mtp: int = 2
    gpu_bytes: int = 7 * 10**9
    host_gib: float = 64
    ranks: int = 1
    retention: int | str | None = None
    max_model_len: int = 65_536
    prefill_tokens_per_s: float | None = None
    host_bytes_per_s: float | None = None
    decode_step_s: float = 0.0
    dev_mode: bool = True
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise UserError(
                f"no profile {self.profile!r}: choose one of {', '.join(PROFILES)}"
            )

    @property
    def timed(self) -> bool:
        """Whether seconds mean anything."""
        return bool(self.prefill_tokens_per_s)


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        url: its address.
        facts: what vLLM made of the profile, see ``_report`` in the executor.
        log: all that it said.
        process: the process group's leader.
    """

    url: str
    facts: dict[str, Any]
    log: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        return self.process.wait()


def version_of(path: Path) -> str:
    """The release of a vLLM tree, or of a folder that vllm is installed in.

    Raises:
        UserError: it is none.
    """
    simulation.check_tree(Tree("", path))
    for file in (
        path / "vllm.egg-info" / "PKG-INFO",
        *path.glob("vllm-[0-9]*.dist-info/METADATA"),
    ):
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8")
            if match := re.search(r"^Version: ([\d.]+)", text, re.MULTILINE):
                return match[1].rstrip(".")
    raise UserError(
        f"{shown(path)}/vllm.egg-info/PKG-INFO names no version: name a tree that "
        "make apply has built"
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def check_port(port: int) -> None:
    """Refuse a port that is taken.

    Raises:
        UserError: it is, or it cannot be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}): stop what listens "
                "there or choose another with PORT= (--port)"
            ) from error


def _check_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        available = int(re.search(r"MemAvailable: +(\d+)", text)[1]) * 1024
        if available < NEEDED_BYTES:
            raise UserError(
                f"{available / 1e9:.1f} GB of memory are free and a simulated server "
                f"needs {NEEDED_BYTES / 1e9:.0f} GB: end other programs"
            )


def arguments(plan: Plan, model: Path, port: int) -> list[str]:
    """The options of ``vllm serve``, after the model's folder."""
    profile = PROFILES[plan.profile]
    words = [
        str(model),
        "--host", HOST, "--port", str(port),
        "--served-model-name", plan.profile,
        "--distributed-executor-backend", _EXECUTOR,
        "--tensor-parallel-size", str(plan.ranks),
        "--tokenizer-mode", "hf", "--enforce-eager", "--load-format", "dummy",
        "--block-size", str(profile.block_size),
        "--max-model-len", str(plan.max_model_len),
        "--max-num-batched-tokens", "8192",
        "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--no-disable-hybrid-kv-cache-manager",
    ]  # fmt: skip
    if plan.host_gib:
        words += ["--kv-offloading-size", f"{plan.host_gib:g}"]
    if plan.mtp:
        config = {"method": "mtp", "num_speculative_tokens": plan.mtp}
        words += ["--speculative-config", json.dumps(config)]
    if plan.retention is not None and Version(plan.version) >= _OPTION_SINCE:
        interval = "None" if plan.retention == "dense" else str(plan.retention)
        words += ["--prefix-cache-retention-interval", interval]
    return [*words, *plan.options]


def _variables(plan: Plan, python: Path, settings: Settings) -> dict[str, str]:
    env = simulation.variables(plan.tree.path, python)
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "scripts")
    env |= settings.to_environment()
    env |= {"VLLM_HOST_IP": HOST, "NO_COLOR": "1"}
    env["VLLM_SERVER_DEV_MODE"] = str(int(plan.dev_mode))
    if isinstance(plan.retention, int) and Version(plan.version) < _OPTION_SINCE:
        env["VLLM_PREFIX_CACHE_RETENTION_INTERVAL"] = str(plan.retention)
    return env


@contextlib.contextmanager
def serve(
    plan: Plan,
    port: int,
    python: Path,
    *,
    timeout_s: float = 300,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Running]:
    """A simulated server, stopped at the end.

    Args:
        plan: what to imitate.
        port: where it listens, on this machine only.
        python: an interpreter that has vLLM's requirements.
        timeout_s: how long it may take to answer.
        waiting: called while it starts, with the seconds so far.

    Raises:
        UserError: the port is taken, there is too little memory, or it does not start;
            the message says why and names the log.
    """
    check_port(port)
    _check_memory()
    log = build_root() / "reports" / f"sim-{plan.version}-{plan.tree.label}-{port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="offload-parity-"))
    try:
        settings = Settings(
            profile=plan.profile,
            mtp=plan.mtp,
            gpu_bytes=plan.gpu_bytes,
            report=str(folder / "report.json"),
            prefill_tokens_per_s=plan.prefill_tokens_per_s,
            host_bytes_per_s=plan.host_bytes_per_s,
            decode_step_s=plan.decode_step_s,
        )
        words = arguments(plan, folder / "model", port)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [python, "-m", "simulated_server", *words],
                cwd=folder,
                env=_variables(plan, python, settings),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C is ours: it would reach the engine before the server.
                start_new_session=True,
            )
        try:
            url = f"http://{HOST}:{port}"
            _await(process, url, log, plan, timeout_s, waiting)
            facts = json.loads(Path(settings.report).read_text(encoding="utf-8"))
            yield Running(url, facts, log, process)
        finally:
            _stop(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    plan: Plan,
    timeout_s: float,
    waiting: Callable[[float], None],
) -> None:
    began = time.monotonic()
    while True:
        if process.poll() is not None:
            raise UserError(explain(log, process.returncode, plan))
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=2).ok:
                return
        seconds = time.monotonic() - began
        if seconds > timeout_s:
            raise UserError(
                f"the simulated server did not answer in {timeout_s:.0f} s; its log: "
                f"{shown(log)}"
            )
        waiting(seconds)
        time.sleep(0.2)


def explain(log: Path, status: int, plan: Plan) -> str:
    """One line that says why a server did not start, from its log."""
    text = log.read_text(errors="replace")
    where = f"its log: {shown(log)}"
    if "address already in use" in text.lower():
        return f"the port is taken: choose another with PORT= (--port); {where}"
    if match := re.search(
        r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV "
        r"cache memory \(([\d.]+) GiB\)",
        text,
    ):
        return (
            f"the GPU's KV budget of {match[2]} GiB is too small for a request of "
            f"{plan.max_model_len:,} tokens, which needs {match[1]} GiB: raise "
            f"--gpu-gb or lower --max-model-len; {where}"
        )
    if status == -signal.SIGKILL or "MemoryError" in text:
        return f"the simulated server was killed or found no memory left; {where}"
    errors = re.findall(
        # vLLM's own exceptions, and pydantic's about an option.
        r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(?:(\w+(?:Error|Exception): .+)"
        r"|  Value error, (.+?)(?: \[type=.*)?)$",
        text,
        re.MULTILINE,
    )
    errors = [a or b for a, b in errors if "Engine core initialization" not in a]
    last = errors[-1] if errors else (unit_env.tail(log, 1) or f"exit status {status}")
    return f"the simulated server did not start: {last[:300]}; {where}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its engine; forcibly what does not end in time."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    # The engine's process is in the same group, whether or not the leader lives.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
