# SPDX-License-Identifier: Apache-2.0
"""Build, test and probe the patched serving image. The Makefile calls this."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from offload_parity import build_tree, git, index, patches
from offload_parity import cli as scripts
from offload_parity import image as images
from offload_parity import release as releases
from offload_parity.containers import Engine
from offload_parity.errors import UserError
from offload_parity.files import writable
from offload_parity.paths import ROOT, build_root, shown
from offload_parity.release import Release

# What wheels must run on at least; those for it run on every newer Python.
_PYTHON = "3.11"
_INPUTS = {"test": "test-requirements.txt", "build": "build-requirements.txt"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
def cli() -> None:
    """Run one of the commands."""


release_option = click.option("--release", help="Default: the newest supported.")
base_option = click.option("--base", help="Base image; default: the official one.")
container_option = click.option(
    "--container", default="docker", show_default=True,
    help="docker, podman or buildah, with options if you like.",
)  # fmt: skip
tag_option = click.option(
    "--tag", help="The image's name; default: vllm-offload-parity:<release>."
)
compiled_option = click.option(
    "--compiled", default="", help="1: compile the patched tree for CUDA (hours)."
)


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
        "SERIES_DIGEST": images.digest(release),
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
    date = images.date(patches.read_series(wanted))
    engine.build(target, tag, values, inputs, date, options)
    return wanted


@cli.command(name="build")
@release_option
@base_option
@container_option
@tag_option
@compiled_option
@click.argument("options", nargs=-1)
def build_command(release, base, container, tag, compiled, options) -> None:
    """Build the image that serves; OPTIONS are the engine's own."""
    name = tag_of(releases.get(release), tag)
    build("serve", release, base, container, name, compiled, options)
    labels = Engine(container).labels(name)
    click.echo(
        f"{name}: vLLM {labels['vllm-offload-parity.release']}, series "
        f"{labels['vllm-offload-parity.series'][:12]}, base "
        f"{labels['org.opencontainers.image.base.name']}"
    )
    click.echo("Next: make image-test (on the CPU); run it as you run the base image")


@cli.command()
@release_option
@base_option
@container_option
@compiled_option
@click.argument("options", nargs=-1)
def test(release, base, container, compiled, options) -> None:
    """Build the target that tests the patched package; fails if they do."""
    wanted = releases.get(release)
    tag = f"{tag_of(wanted, None)}-test"
    build("test", release, base, container, tag, compiled, options)
    click.echo(f"vLLM {wanted.version}: the image's tests pass")


@cli.command()
@click.option("--url", default="http://localhost:8000", show_default=True)
@release_option
@container_option
@tag_option
@click.argument("options", nargs=-1)
def probe(url, release, container, tag, options) -> None:
    """Probe a server from inside the image: what it needs is there."""
    name = tag_of(releases.get(release), tag)
    reports = writable(build_root() / "reports" / "image")
    mounts = {ROOT: "/offload-parity:ro", reports: "/reports"}
    status = Engine(container).run(
        name, ("/offload-parity/docker/probe", url), mounts, options
    )
    click.echo(f"the reports are in {shown(reports)}")
    sys.exit(status)


@cli.command()
@release_option
@container_option
@tag_option
def status(release, container, tag) -> None:
    """Say what an image's label and its record say, and what has drifted."""
    name = tag_of(releases.get(release), tag)
    engine = Engine(container)
    for label, value in sorted(engine.labels(name).items()):
        if label.startswith(("vllm-offload-parity.", "org.opencontainers.image.")):
            click.echo(f"{label}: {value}")
    inside = ("python3", "-B", "/offload-parity/scripts/series.py", "status")
    sys.exit(
        engine.run(name, (*inside, "--python", "python3"), {ROOT: "/offload-parity:ro"})
    )


if __name__ == "__main__":
    scripts.run(cli)
