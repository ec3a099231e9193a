# SPDX-License-Identifier: Apache-2.0
"""Build the patched serving image: its inputs, its arguments, its name."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from . import build_tree, git, image, index, patches
from . import release as releases
from .containers import Engine
from .errors import UserError
from .files import writable
from .paths import ROOT, build_root, shown
from .release import Release

# What wheels must run on at least; those for it run on every newer Python.
_PYTHON = "3.11"
_INPUTS = {"test": "test-requirements.txt", "build": "build-requirements.txt"}


def tag_of(release: Release, tag: str | None) -> str:
    """How the image is called."""
    return tag or f"localhost/vllm-offload-parity:{release.version}"


def revision() -> str:
    """The commit of this project, marked if files were changed since."""
    repo = git.Repo(ROOT)
    commit = repo.commit_id("HEAD") if (ROOT / ".git").exists() else None
    if commit is None:
        return "unknown"
    return commit + ("-changed" if repo.changes(untracked=False) else "")


def source() -> str:
    """Where this project's repository was cloned from, if everybody can reach it."""
    url = os.environ.get("SOURCE_URL", "")
    if not url and (ROOT / ".git").exists():
        repo = git.Repo(ROOT)
        if repo.ok("config", "--get", "remote.origin.url"):
            url = repo.out("config", "--get", "remote.origin.url")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return ""
    # Without a name and a password.
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def arguments(release: Release, engine: Engine, base: str | None) -> dict[str, str]:
    """The build's arguments."""
    name = base or f"vllm/vllm-openai:v{release.version}"
    pinned, digest = engine.pinned(name)
    if "@" not in pinned:
        click.echo(f"note: {pinned} is on this machine only: not pinned by digest")
    return {
        "VLLM_VERSION": release.version,
        "BASE_IMAGE": pinned,
        "BASE_DIGEST": digest,
        "SOURCE": source(),
        "REVISION": revision(),
        "SERIES_DIGEST": image.digest(release),
    }


def contexts(release: Release, *, test: bool, compiled: bool) -> dict[str, Path]:
    """The build's inputs from this machine, fetched first if need be."""
    found = {}
    inputs = build_root() / "image"
    if test or compiled:
        fetch_wheels(inputs, "test" if test else "build")
        found["inputs"] = inputs
    if test:
        target = inputs / release.sdist_name
        if not target.exists():
            shutil.copyfile(index.fetch(release), target)
        if compiled:
            fetch_wheels(inputs, "build")
    if compiled:
        # One with edits stays as it is: they are why it is compiled.
        tree = found["tree"] = build_tree.patched_path(release)
        series = patches.read_series(release)
        if (
            not tree.is_dir()
            or build_tree.standing(release, series) == build_tree.STOCK
        ):
            build_tree.ensure_patched(release)
    return found


def fetch_wheels(folder: Path, kind: str) -> None:
    """Download what a stage adds, with pip's own settings; it checks the digests.

    Raises:
        UserError: pip could not.
    """
    into = writable(folder / kind)
    listed = ROOT / "docker" / _INPUTS[kind]
    machine = platform.machine().replace("arm64", "aarch64").replace("AMD64", "x86_64")
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--dest",
        into,
        "-r",
        listed,
    ]
    words += ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    words += ["--python-version", _PYTHON, "--disable-pip-version-check"]
    for level in ("2_28", "2_17"):
        words += ["--platform", f"manylinux_{level}_{machine}"]
    words += ["--platform", f"manylinux2014_{machine}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [x for x in done.stderr.splitlines() if "ERROR" in x] or [""]
        raise UserError(
            f"pip could not download {shown(listed)} ({said[-1].strip()}): check the "
            "network and pip's settings (pip config list)"
        )


def build(
    target: str,
    release: str | None,
    base: str | None,
    container: str,
    tag: str,
    compiled: str,
    options: tuple[str, ...] = (),
) -> Release:
    """Build one target and return the release."""
    if compiled not in ("", "0", "1"):
        raise UserError(f"COMPILED={compiled}: give COMPILED=1 or leave it out")
    wanted = releases.get(release)
    engine = Engine(container)
    inputs = contexts(wanted, test=target == "test", compiled=compiled == "1")
    values = arguments(wanted, engine, base)
    values["PATCHED"] = "compiled" if compiled == "1" else "patched"
    date = image.date(patches.read_series(wanted))
    engine.build(target, tag, values, inputs, date, options)
    return wanted
