# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of ``make e2e``: vLLM with its compiled CPU backend.

It lies in ``build/e2e-env-<key>`` and sees the packages of the unit tests' environment,
so that only what is compiled is installed again. vllm lies in it twice: as published in
``stock``, and with the series where an interpreter looks for it, put there by the same
code as ``make apply PYTHON=``. The files that are the same share their bytes. What is
no longer as it was published is built again.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from . import installed, unit_env
from .errors import UserError
from .paths import build_root, shown
from .release import EndToEnd, Release
from .unit_env import UnitEnv

WHAT = "the environment of make e2e"
# Measured on x86-64 Linux.
SIZES = "about 0.2 GB to download, 0.7 GB on disk"
NEEDED_BYTES = 1_500_000_000

# One operation of the compiled backend's, as the engine finds it.
_TRY_KERNELS = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
out = torch.empty(1, 8)
torch.ops._C.silu_and_mul(out, torch.ones(1, 16))
"""


@dataclass(frozen=True)
class E2eEnv(UnitEnv):
    """A finished environment."""

    @property
    def stock(self) -> Path:
        """The folder that holds the package as published."""
        return self.root / "stock"

    def variables(self, *python_path: Path) -> dict[str, str]:
        """The environment variables of a run, with ``python_path`` importable."""
        return super().variables(*python_path) | {
            # The tests look into the engine: it runs in their process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # One thread each, wherever: other processes run beside it.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }


def ensure(release: Release) -> E2eEnv:
    """The environment with the series as it is now, built first if need be.

    Raises:
        UserError: as ``unit_env.ensure``; no package for this machine or processor; one
            for another torch; the series does not apply.
    """
    assert release.e2e is not None
    base = unit_env.ensure()
    env = build(release.e2e, base, root_of(release.e2e, base))
    bring_series(env, release)
    return env


def existing(release: Release) -> E2eEnv | None:
    """The environment with the series as it is now, None if it must be built."""
    assert release.e2e is not None
    base = unit_env.ensure()
    env = E2eEnv(root_of(release.e2e, base))
    if not unit_env.is_ready(env) or changed(env, release.e2e):
        return None
    bring_series(env, release)
    return env


def root_of(wanted: EndToEnd, base: UnitEnv) -> Path:
    """Where the environment lies: other needs, another folder."""
    text = json.dumps([vars(wanted), base.root.name])
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return build_root() / f"e2e-env-{key}"


def build(wanted: EndToEnd, base: UnitEnv, root: Path) -> E2eEnv:
    """Build ``root``, or return it as it is if it is finished and runs."""
    env = E2eEnv(root)
    with unit_env.locked(env):
        if not unit_env.is_ready(env):
            unit_env.remove_unfinished(root)
        elif path := changed(env, wanted):
            unit_env.remove_unfinished(root, f"has another {path} than was published")
        else:
            check_torch(
                wanted, unit_env.site_packages(env), unit_env.site_packages(base)
            )
            return env
        unit_env.check_room(root.parent, NEEDED_BYTES, WHAT)
        what = ", ".join((wanted.package, *wanted.packages))
        print(
            f"Building {shown(root)} for make e2e: {what} over {shown(base.root)},\n"
            f"{SIZES}; what pip has cached is not downloaded again.",
            flush=True,
        )
        unit_env.make_venv(root)
        site = unit_env.site_packages(env)
        # Relative: the whole folder may be moved.
        way = os.path.relpath(unit_env.site_packages(base), site)
        (site / "unit-env.pth").write_text(f"{way}\n")
        with unit_env.pip_log("e2e-env") as log:
            # Only the package itself: its list asks for more than the engine imports.
            unit_env.pip(env, log, WHAT, "--no-deps", wanted.package)
            check_torch(wanted, site, unit_env.site_packages(base))
            unit_env.pip(env, log, WHAT, *wanted.packages)
        copy_linked(site / "vllm", env.stock / "vllm")
        check_processor(env, wanted)
        env.finished.write_text(json.dumps(vars(wanted), indent=1))
    return env


def copy_linked(package: Path, to: Path) -> None:
    """Copy a package; the files share their bytes."""
    try:
        shutil.copytree(package, to, symlinks=True, copy_function=os.link)
    except OSError as error:
        # Of the many that one cause makes, as shutil collects them, the first.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise UserError(
            f"cannot copy {shown(package)} to {shown(to)} ({why}): make room or choose "
            "a folder on another file system with OFFLOAD_PARITY_BUILD"
        ) from error


def changed(env: E2eEnv, wanted: EndToEnd) -> str | None:
    """A file of the package in ``stock`` that is not as published, None if all are."""
    package = _distribution(
        Requirement(wanted.package).name, unit_env.site_packages(env)
    )
    for file in package.files or ():
        if file.parts[0] != "vllm" or file.hash is None:
            continue
        try:
            with (env.stock / file).open("rb") as data:
                found = hashlib.file_digest(data, file.hash.mode).digest()
        except OSError:
            return str(file)
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != file.hash.value:
            return str(file)
    return None


def check_torch(wanted: EndToEnd, site: Path, base_site: Path) -> None:
    """The torch that is there is the one that the package was compiled for.

    Raises:
        UserError: it is not.
    """
    name = Requirement(wanted.package).name
    package = _distribution(name, site)
    there = _distribution("torch", base_site).version
    for line in package.requires or ():
        needs = Requirement(line)
        if needs.name != "torch" or (needs.marker and not needs.marker.evaluate()):
            continue
        if not needs.specifier.contains(there, prereleases=True):
            raise UserError(
                f"{name} {package.version} is compiled for torch{needs.specifier} and "
                f"{shown(base_site)} has torch {there}: give pip an index with that "
                "one (PIP_EXTRA_INDEX_URL=torch's for CPUs), remove the environment "
                "that has the other, and run again"
            )


def _distribution(name: str, site: Path) -> importlib.metadata.Distribution:
    for found in importlib.metadata.distributions(name=name, path=[str(site)]):
        return found
    raise UserError(f"{shown(site)} has no {name}: remove {WHAT} and run again")


def check_processor(env: E2eEnv, wanted: EndToEnd) -> None:
    """The compiled backend runs here, tried with one of its operations.

    Raises:
        UserError: it does not.
    """
    done = subprocess.run(
        [env.python, "-c", _TRY_KERNELS],
        env=env.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(
            f"the kernels of {wanted.package} do not run on this processor "
            f"({_why(done.returncode, done.stderr)}): run make e2e on another (x86-64: "
            "with AVX2)"
        )


def _why(status: int, said: str) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return (said.strip().splitlines() or [f"status {status}"])[-1]


def bring_series(env: E2eEnv, release: Release) -> None:
    """Make the installed package that of the series as it is now.

    Raises:
        UserError: the series does not apply.
    """
    package = unit_env.site_packages(env) / "vllm"
    with unit_env.locked(env):
        if has_series(env, release):
            return
        # Whatever it has: an earlier state of the series, part of one, an edit.
        shutil.rmtree(package, ignore_errors=True)
        copy_linked(env.stock / "vllm", package)
        installed.apply(_installed(env), release.version)


def has_series(env: E2eEnv, release: Release) -> bool:
    """Whether the installed package is that in ``stock`` with the series, no more."""
    try:
        package = _installed(env)
        series = installed.examine(package, release.version).files
    except UserError:
        return False
    there, published = dict(_files(package.folder)), dict(_files(env.stock / "vllm"))
    differ = {path for path, _ in there.items() ^ published.items()}
    return set(series.values()) == {"patched"} and differ <= series.keys()


def _installed(env: E2eEnv) -> installed.Package:
    # Not what a PYTHONPATH of the user's would find: that is no file of ours.
    return installed.find(str(env.python), env.variables())


def _files(package: Path) -> Iterator[tuple[str, int]]:
    """The files, with what tells whether two are one; not what apply keeps."""
    for path in package.rglob("*"):
        name = path.relative_to(package.parent)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield str(name), path.stat().st_ino
