# SPDX-License-Identifier: Apache-2.0
"""Fetch, apply, edit, export and compare the series. The Makefile calls this."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

import click

from offload_parity import (
    build_tree,
    checkout,
    exporting,
    image,
    index,
    installed,
    patches,
    range_diff,
)
from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.paths import shown

_OPTIONS = {
    "release": ("VERSION", "the vLLM release; default: the newest supported"),
    "vllm": ("PATH", "a git checkout of vLLM"),
    "python": ("INTERPRETER", "a Python that has vllm installed"),
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Fetch, apply, edit and export the patch series for vLLM's KV offload."""


def command(*targets: str) -> Callable:
    """Register a command; an option it has no use for is refused by name."""

    def register(function: Callable) -> click.Command:
        @wraps(function)
        def run(**values: str | None) -> None:
            if values["release"]:
                values["release"] = values["release"].strip()
            for name, value in values.items():
                variable = f"{name.upper()}="
                if value == "":
                    raise UserError(f"{variable} is empty: give it a value or leave it")
                if value is not None and name not in targets:
                    raise UserError(
                        f"make {function.__name__} takes no {variable}: leave it out"
                    )
            if values["vllm"] and values["python"]:
                raise UserError("VLLM= and PYTHON= are two targets: give one of them")
            function(**{name: values[name] for name in targets})

        for name, (metavar, text) in _OPTIONS.items():
            run = click.option(f"--{name}", metavar=metavar, help=text)(run)
        return cli.command(function.__name__)(run)

    return register


def _titles(series: patches.Series) -> None:
    """Print the patches."""
    for patch in series.patches:
        click.echo(f"  {patch.name[:4]} {patch.title}")


def _states(series: patches.Series, applied: Sequence[bool], untouched: bool) -> None:
    """Print the patches and whether each one is there.

    A patch that is absent is missing, except from a tree that is ``untouched``.
    """
    absent = "not applied" if untouched else "missing"
    for patch, there in zip(series.patches, applied, strict=True):
        state = "applied" if there else absent
        click.echo(f"  {state}  {patch.name[:4]} {patch.title}")


def _count(series: patches.Series) -> str:
    number = len(series.patches)
    return f"{number} patch{'' if number == 1 else 'es'}"


@command("release")
def fetch(release: str | None) -> None:
    """Download a release's source into the cache."""
    wanted = releases.get(release)
    click.echo(f"vLLM {wanted.version}: {index.fetch(wanted)} (sha256 as expected)")


@command("release", "vllm", "python")
def apply(release: str | None, vllm: str | None, python: str | None) -> None:
    """Apply the series to a built tree, a checkout or an installed package."""
    if vllm:
        _apply_checkout(vllm, release)
    elif python:
        _apply_installed(python, release)
    else:
        wanted = releases.get(release)
        new = build_tree.apply(wanted)
        path = build_tree.patched_path(wanted)
        base = build_tree.repo(path).commit_id(build_tree.BASE)
        series = patches.read_series(wanted)
        click.echo(
            f"{'Applied' if new else 'Already applied:'} {_count(series)} to vLLM "
            f"{wanted.version} in {shown(path)} (base {base[:12]}, branch "
            f"{wanted.branch})"
        )
        _titles(series)
        click.echo(f"Next: make test RELEASE={wanted.version}")
        click.echo("To serve it: make apply PYTHON=<your server's python>")


def _apply_checkout(path: str, version: str | None) -> None:
    repo = checkout.open_checkout(Path(path))
    standing, new = checkout.apply(repo, version)
    series, wanted = standing.series, standing.series.release
    if not new:
        click.echo(
            f"Already applied: {_count(series)} for vLLM {wanted.version} in "
            f"{repo.path}"
        )
        return
    if standing.base:
        what = f"to vLLM {wanted.version}"
        since = f"base {standing.base[:12]}"
    else:
        what = f"for vLLM {wanted.version}"
        since = "as RELEASE= says" if version else "no release's commit; all fit"
    click.echo(
        f"Applied {_count(series)} {what} in {repo.path} ({since}, "
        f"new branch {wanted.branch})"
    )
    _titles(series)
    click.echo(f"Next: make status VLLM={path} (to go back: make unapply VLLM={path})")


def _apply_installed(python: str, version: str | None) -> None:
    package = installed.find(python)
    standing, new, unchecked = installed.apply(package, version)
    series = standing.series
    click.echo(
        f"{'Applied' if new else 'Already applied:'} {_count(series)} for vLLM "
        f"{series.release.version} in {package.folder}"
    )
    if not new:
        return
    _titles(series)
    for name in unchecked:
        click.echo(f"  note: {name} had edits of its own; they are kept")
    click.echo(
        "Next: restart the server (to go back: make unapply "
        f"PYTHON={python}; originals are in {package.backup})"
    )


@command("release", "vllm", "python")
def unapply(release: str | None, vllm: str | None, python: str | None) -> None:
    """Take the series back."""
    if vllm:
        repo = checkout.open_checkout(Path(vllm))
        branch, now = checkout.unapply(repo, release)
        click.echo(f"{repo.path}: branch {branch} is gone, you are on {now}")
    elif python:
        package = installed.find(python)
        if installed.unapply(package):
            click.echo(f"{package.folder}: every file is as it was before make apply")
        else:
            click.echo(
                f"{package.folder}: vllm was installed anew since make apply; "
                "the old backup is removed"
            )
    else:
        wanted = releases.get(release)
        path = shown(build_tree.patched_path(wanted))
        for line in build_tree.unapply(wanted):
            click.echo(f"{path}: {line}")
        click.echo(f"{path} is stock vLLM {wanted.version}")


@command("release", "vllm", "python")
def status(release: str | None, vllm: str | None, python: str | None) -> None:
    """Say which release it is, which patches are applied and what has drifted."""
    if vllm:
        good = _status_checkout(vllm, release)
    elif python:
        good = _status_installed(python, release)
    else:
        wanted = releases.chosen(release)
        # Each of them is shown, whatever the first one says.
        states = [_status_built(one) for one in wanted]
        good = all(states)
    sys.exit(0 if good else 1)


def _status_built(wanted: releases.Release) -> bool:
    sdist = "in the cache" if index.cached(wanted) else "not in the cache"
    path = build_tree.patched_path(wanted)
    if not (path / ".git").is_dir():
        click.echo(f"vLLM {wanted.version}: source {sdist}, no tree built")
        return True
    series = patches.read_series(wanted)
    state = build_tree.standing(wanted, series)
    click.echo(f"vLLM {wanted.version}: source {sdist}, tree {shown(path)}: {state}")
    applied = [state == build_tree.APPLIED] * len(series.patches)
    _states(series, applied, state == build_tree.STOCK)
    return state in (build_tree.APPLIED, build_tree.STOCK)


def _status_checkout(path: str, version: str | None) -> bool:
    repo = checkout.open_checkout(Path(path))
    standing = checkout.examine(repo, version)
    drifted = checkout.drifted(repo, standing.series)
    known = standing.base and (
        f"applied at {standing.base[:12]}, no release's commit"
        if standing.ours
        else f"at or after {standing.base[:12]}"
    )
    click.echo(
        f"vLLM {standing.series.release.version} ({known or 'as RELEASE= says'}) in "
        f"{repo.path}, on {repo.branch() or 'no branch'}"
    )
    _states(standing.series, standing.applied, not standing.partly)
    for name in drifted:
        click.echo(f"  drifted  {name} has uncommitted changes")
    return not (standing.partly or drifted)


def _status_installed(python: str, version: str | None) -> bool:
    package = installed.find(python)
    standing = installed.examine(package, version)
    click.echo(
        f"vLLM {package.version} in {package.folder} (Python {package.python}), series "
        f"for {standing.series.release.version}"
    )
    states = set(standing.files.values())
    applied = standing.total if states == {"patched"} else standing.applied
    there = [n < applied for n in range(standing.total)]
    _states(standing.series, there, states == {"stock"})
    for name, state in standing.files.items():
        if state == "drifted" or (state == "partly" and not applied):
            click.echo(f"  drifted  {name} is neither stock nor as the series makes it")
    known = image.read(package)
    changed = image.drifted(package, known) if known else []
    if known:
        click.echo(
            f"  recorded in this image: series {known.series[:12]}, revision "
            f"{known.revision}, {len(known.files)} files"
        )
    for name in changed:
        click.echo(f"  drifted  {name} is not as recorded")
    stopped = installed.interrupted(package)
    if stopped:
        click.echo("  an earlier run was interrupted: make apply or unapply mends that")
    good = states in ({"stock"}, {"patched"}, set()) or (known and not changed)
    return bool(good and not changed and not stopped)


@command("release")
def edit(release: str | None) -> None:
    """Show where to edit the series as commits."""
    wanted = releases.get(release)
    path, what = exporting.edit(wanted)
    where = shown(path)
    if what:
        click.echo(f"{where} is being edited: {what}")
    click.echo(
        f"Edit the commits after the tag base on branch {wanted.branch} in {where}:\n"
        f"  git -C {where} log --oneline base..\n"
        f"  git -C {where} rebase -i base    (or commit on top)\n"
        f"Then: make export RELEASE={wanted.version}"
    )


@command("release")
def export(release: str | None) -> None:
    """Write the commits of the patched tree back to patches/<release>."""
    wanted = releases.get(release)
    done = exporting.export(wanted)
    for line in done:
        click.echo(f"{shown(wanted.folder)}: {line}")
    if not done:
        click.echo(f"{shown(wanted.folder)}: nothing changed")


@command("release")
def check(release: str | None) -> None:
    """Check that the patches, their series files and an export agree."""
    faults = []
    for wanted in releases.chosen(release):
        found = exporting.check(wanted)
        faults += found
        if not found:
            click.echo(
                f"{shown(wanted.folder)}: {_count(patches.read_series(wanted))}, ok"
            )
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    sys.exit(1 if faults else 0)


@cli.command("range-diff")
@click.option("--a", "first", default="", help="A release.")
@click.option("--b", "second", default="", help="Another one.")
def range_diff_command(first: str, second: str) -> None:
    """Show how the series of two releases differ, patch by patch."""
    for name, value in (("A", first), ("B", second)):
        if not value.strip():
            raise UserError(
                f"{name}= is missing: make range-diff A=<release> B=<another one>"
            )
    one, other = releases.get(first, "A"), releases.get(second, "B")
    text = range_diff.compare(one, other, color=sys.stdout.isatty())
    click.echo(
        f"{shown(one.folder)} against {shown(other.folder)}: = the same, ! changed, "
        f"< only for {one.version}, > only for {other.version}"
    )
    click.echo(text)


if __name__ == "__main__":
    scripts.run(cli)
