# SPDX-License-Identifier: Apache-2.0
"""The virtual environment in which vLLM's unit tests run: no GPU, nothing compiled.

It lies in ``build/unit-env-<key>``; the key is a digest of what is asked for. One
environment serves every supported release: it holds what the newest one asks for,
because vLLM's requirement lists raise lower bounds from release to release, and the
tests of older releases run with the newer packages.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import build_tree, release
from .errors import UserError
from .files import lock
from .paths import build_root, shown

# What this project's own runs need beside vLLM's requirements.
OWN_PACKAGES = ("pytest-xdist==3.8.0", "hypothesis==6.170.17")

# As messages name it.
WHAT = "the environment for vLLM's unit tests"
# Measured with torch's CPU build on x86-64 Linux.
SIZES = "about 0.6 GB to download, 2.3 GB on disk with torch's CPU build"
NEEDED_BYTES = 3_000_000_000

# vLLM's tests build a configuration for this model; the hub is never asked.
_MODEL = "facebook/opt-125m"
_REVISION = "0" * 40
# vLLM cuts prompts to the model's length, 2,048 tokens as published.
_MODEL_LENGTH = 1_048_576

_SETTINGS_OF_OTHERS = ("VLLM_", "PYTEST_", "PYTHON", "HF_", "TRANSFORMERS_", "TORCH")


@dataclass(frozen=True)
class UnitEnv:
    """An environment, finished once it is handed out."""

    root: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def finished(self) -> Path:
        """What it was built of; written last."""
        return self.root / "finished.json"

    def variables(self, *python_path: Path) -> dict[str, str]:
        """The environment variables of a run, with ``python_path`` importable.

        Bytecode and caches stay out of vLLM's trees and of the user's home.
        """
        cache = build_root() / "cache"
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_SETTINGS_OF_OTHERS)
        }
        return env | {
            "VIRTUAL_ENV": str(self.root),
            "PATH": f"{self.root / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(map(str, python_path)),
            "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
            # Chooses the CPU from 0.28 on; the plugin below does it before.
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "HF_HOME": str(self.root / "hf-home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # Not empty: vLLM reads an empty value as "may become visible later".
            "CUDA_VISIBLE_DEVICES": "-1",
        }


@dataclass(frozen=True)
class Needs:
    """What an environment is made of."""

    python: str
    torch: str
    requirements: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def key(self) -> str:
        """Names the environment: other needs, another key."""
        text = json.dumps([vars(self), _MODEL, _MODEL_LENGTH, _PLUGIN], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def needs_of(newest: release.Release, requirements: str) -> Needs:
    """What ``newest`` asks for; ``requirements`` is its requirement file's text."""
    lines = (line.split("#")[0].strip() for line in requirements.splitlines())
    return Needs(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=newest.unit_tests.torch,
        requirements=tuple(x for x in lines if x and not x.lower().startswith("torch")),
        packages=newest.unit_tests.packages + OWN_PACKAGES,
    )


def ensure() -> UnitEnv:
    """The environment, built first if it is not there or was not finished.

    Raises:
        UserError: no network, no room, no torch for this Python, no venv module, or
            pip failed otherwise.
    """
    newest = release.default()
    file = build_tree.ensure_stock(newest) / newest.unit_tests.requirements
    try:
        needs = needs_of(newest, file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{shown(newest.folder / 'release.toml')}: requirements names "
            f"{newest.unit_tests.requirements}, which vLLM {newest.version} lacks"
        ) from error
    return build(needs, build_root() / f"unit-env-{needs.key}")


def interpreter(named: Path | None = None) -> Path:
    """The interpreter for vLLM's code: ``named``, or that of the environment.

    Raises:
        UserError: ``named`` is none, or as ``ensure``.
    """
    if named is None:
        return ensure().python
    python = named.absolute()
    if python.is_dir() or not os.access(python, os.X_OK):
        raise UserError(f"{named} is no interpreter: name one with --python")
    return python


def build(needs: Needs, root: Path) -> UnitEnv:
    """Build ``root``, or return it as it is if it is finished and runs."""
    env = UnitEnv(root)
    with locked(env):
        if is_ready(env):
            return env
        remove_unfinished(root)
        check_room(root.parent, NEEDED_BYTES, WHAT)
        print(
            f"Building {shown(root)} for vLLM's unit tests: {needs.torch} and "
            f"{len(needs.requirements) + len(needs.packages)} requirements with what "
            f"they need,\n{SIZES}; what pip has cached is not downloaded again.",
            flush=True,
        )
        make_venv(root)
        with pip_log("unit-env") as log:
            # torch first: the only large one, and the one that may not exist.
            pip(env, log, WHAT, needs.torch)
            pip(env, log, WHAT, needs.torch, *needs.requirements, *needs.packages)
            complete(env)
            env.finished.write_text(json.dumps(vars(needs), indent=1))
    return env


def locked(env: UnitEnv) -> contextlib.AbstractContextManager[None]:
    """The lock of whoever builds or changes an environment."""
    return lock(env.root.with_name(f".{env.root.name}.lock"))


def complete(env: UnitEnv) -> None:
    """Add what is no package of an index: the CPU's plugin and the model's files."""
    _write_plugin(env)
    _write_model(env)


def is_ready(env: UnitEnv) -> bool:
    """Whether it was built to its end and its interpreter starts.

    It does not after the Python below it was removed.
    """
    if not env.finished.exists():
        return False
    try:
        # A PYTHONHOME is for other programs: with it this interpreter would not start.
        done = subprocess.run(
            [env.python, "-c", ""],
            env=env.variables(),
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def remove_unfinished(root: Path, why: str = "was not finished") -> None:
    """Remove an environment that is to be built anew.

    Raises:
        UserError: it cannot be removed.
    """
    if not root.exists():
        return
    print(f"{shown(root)} {why}: building it again")
    try:
        shutil.rmtree(root)
    except OSError as error:
        raise UserError(
            # Of a link Python says no more than a sentence of its own.
            f"cannot remove {shown(root)}: {error.strerror or error}; remove it and "
            "run again"
        ) from error


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin what cannot end.

    Raises:
        UserError: less than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{shown(folder)} has {free / 1e9:.1f} GB of free space and {what} needs "
            f"{needed / 1e9:.0f} GB: make room or choose another folder with "
            "OFFLOAD_PARITY_BUILD"
        )


def make_venv(root: Path) -> None:
    """Make an empty virtual environment.

    Raises:
        UserError: this Python cannot.
    """
    done = subprocess.run(
        [sys.executable, "-m", "venv", root],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        if "ensurepip" in said:
            raise UserError(
                f"{sys.executable} cannot make a virtual environment: install its venv "
                "module (Debian and Ubuntu: the package python3-venv)"
            )
        raise UserError(f"python -m venv failed: {said.splitlines()[-1:]}")


@contextlib.contextmanager
def pip_log(name: str) -> Iterator[Path]:
    """A log for pip, which stays only if what is done with it fails."""
    log = build_root() / "reports" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    yield log
    log.unlink(missing_ok=True)


def pip(env: UnitEnv, log: Path, what: str, *requirements: str) -> None:
    """Install; pip's own progress is on the screen, all it says in ``log``.

    ``what`` is being built; ``requirements`` may hold options of ``pip install``.

    Raises:
        UserError: it failed.
    """
    on_screen = sys.stdout.isatty()
    settings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT") and "PYTHON" not in name
    }
    done = subprocess.run(
        [
            env.python, "-m", "pip", "install", "--no-input",
            # Runs keep bytecode elsewhere and never look at what pip would compile.
            "--no-compile", "--disable-pip-version-check", "--log", log,
            "--progress-bar", "on" if on_screen else "off", *requirements,
        ],
        env=settings | {"PIP_USER": "0"},
        stdin=subprocess.DEVNULL,
        # Of a setting that is none, pip says so before it opens the log.
        stdout=None if on_screen else subprocess.PIPE,
        stderr=None if on_screen else subprocess.STDOUT,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        text = log.read_text(errors="replace") if log.exists() else done.stdout or ""
        raise UserError(explain(text, log, what))


def explain(text: str, log: Path, what: str = WHAT) -> str:
    """One line that says why pip failed and what to do, from its log."""
    if "No space left on device" in text:
        return (
            f"no space left on the device for {what}: make room (pip's temporary "
            "files: TMPDIR, its cache: PIP_CACHE_DIR) and run again"
        )
    if re.search(
        r"NewConnectionError|NameResolutionError|Failed to establish a new connection"
        r"|Temporary failure in name resolution|ConnectTimeout|ProxyError|Max retries",
        text,
    ):
        return (
            "the package index cannot be reached: check the network or pip's index "
            f"settings (pip config list) and run again; pip's log: {shown(log)}"
        )
    if match := re.search(r"No matching distribution found for (\S+)", text):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing = f"pip finds no {match[1]} for Python {version} on this machine"
        if not match[1].startswith("torch"):
            return (
                f"{missing} ({platform.system()}, {platform.machine()}): {what} cannot "
                "be built here; try one for which it is published, such as x86-64 Linux"
            )
        return (
            f"{missing}: use Python 3.11 for the tools (make distclean, then run again "
            "with it first on PATH)"
        )
    errors = re.findall(r"ERROR: (.*)", text) or text.strip().splitlines()[-1:]
    errors = errors or ["see above"]
    return f"pip failed: {errors[-1]}; its log: {shown(log)}"


# vLLM's documented way to choose a platform from outside. Before 0.28 it honours no
# variable, and the tree's own vllm.egg-info hides any other distribution named vllm.
_PLUGIN = {
    "offload_parity_cpu.py": (
        "# SPDX-License-Identifier: Apache-2.0\n"
        '"""Makes vLLM choose the CPU."""\n\n\n'
        "def platform():\n"
        '    """The class that vLLM is to use."""\n'
        '    return "vllm.platforms.cpu.CpuPlatform"\n'
    ),
    "offload_parity_cpu-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: offload-parity-cpu\nVersion: 1.0\n"
    ),
    "offload_parity_cpu-1.0.dist-info/entry_points.txt": (
        "[vllm.platform_plugins]\noffload_parity_cpu = offload_parity_cpu:platform\n"
    ),
}


def site_packages(env: UnitEnv) -> Path:
    """Where its packages are."""
    (folder,) = (env.root / "lib").glob("python*/site-packages")
    return folder


def _write_plugin(env: UnitEnv) -> None:
    for name, text in _PLUGIN.items():
        path = site_packages(env) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _write_model(env: UnitEnv) -> None:
    """Make the hub's cache hold the configuration of the model that the tests name."""
    model = env.root / "hf-home" / "hub" / f"models--{_MODEL.replace('/', '--')}"
    snapshot = model / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_REVISION)
    code = (
        "import sys, transformers\n"
        "transformers.OPTConfig(architectures=['OPTForCausalLM'], "
        "max_position_embeddings=int(sys.argv[2])).save_pretrained(sys.argv[1])\n"
    )
    done = subprocess.run(
        [env.python, "-c", code, snapshot, str(_MODEL_LENGTH)],
        env=env.variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UserError(f"the environment for vLLM's unit tests does not work: {last}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def run_logged(
    command: list[str | Path], log: Path, *, cwd: Path, env: Mapping[str, str]
) -> int:
    """Run a command with its output in ``log``; its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.run(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
