# SPDX-License-Identifier: Apache-2.0
"""Carry a series to another release: what applies, what upstream has, what conflicts.

Exit status 1 if a patch conflicts, or a law fails on what applied.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote

import click

from offload_parity import (
    build_tree,
    files,
    patches,
    porting,
    sim_server,
    simulation,
    unit_env,
)
from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.git import Repo
from offload_parity.paths import ROOT, shown
from offload_parity.porting import APPLIES, CONFLICTS, LATER, UPSTREAM, Attempt
from offload_parity.release import Release
from offload_parity.simulation import Tree


def attempt_all(source: Release, new: Release, work: Repo) -> list[Attempt]:
    """Try every patch and say what became of it; conflicts in full go to files."""
    found = []
    for attempt in porting.attempts(work, patches.read_series(source)):
        found.append(attempt)
        for line in porting.said(attempt, new):
            click.echo(f"  {line}")
        if attempt.full:
            path = work.path.parent / f"{attempt.patch.name[:4]}.conflict"
            files.replace(path, f"{attempt.full}\n".encode())
    counts = (
        f"{sum(a.state == state for a in found)} {words}"
        for state, words in (
            (APPLIES, "apply"),
            (UPSTREAM, "are upstream already"),
            (CONFLICTS, "conflict"),
            (LATER, "apply once these are mended"),
        )
    )
    click.echo(f"{len(found)} patches: {', '.join(counts)}")
    if any(attempt.full for attempt in found):
        click.echo(f"The conflicts in full: {shown(work.path.parent)}/*.conflict")
    return found


def judge(stock: Path, patched: Path, folder: Path) -> tuple[bool, str]:
    """Judge the laws on both trees; whether all hold on the second, in words too."""
    report = folder / "parity.json"
    report.unlink(missing_ok=True)
    words = [sys.executable, ROOT / "scripts" / "laws.py", "laws"]
    words += ["--stock", stock, "--patched", patched, "--out", folder]
    with subprocess.Popen(words) as process:
        try:
            status = process.wait()
        except BaseException:
            # Asked, not killed: it ends the simulations that it started.
            process.terminate()
            process.wait()
            raise
    if not report.exists():
        return False, (
            "the contract could not be judged: what the release calls otherwise "
            "belongs into tests/parity/release_adapter.py"
        )
    return status == 0, "all laws hold" if status == 0 else "a law fails (above)"


def block_bytes(new: Release, stock: Path) -> int | None:
    """The bytes of a block of DeepSeek-V4's shape, asked of a simulated server."""
    plan = sim_server.Plan(Tree("stock", stock), new.version)
    try:
        python = unit_env.interpreter()
        with sim_server.serve(plan, sim_server.free_port(), python) as running:
            return running.facts["block_bytes"]
    except UserError as error:
        click.echo(f"deepseek_v4.block_bytes is left as it was: {error}")
        return None


@click.command(help=__doc__.splitlines()[0])
@click.option("--from", "source", default="", help="The release that has a series.")
@click.option("--to", "version", default="", help="The release to carry it to.")
@click.option("--back", default="", help="1: to an older release, too.")
def cli(source: str, version: str, back: str) -> None:
    """Try each patch, judge the laws, write the new release's folder."""
    if back not in ("", "0", "1"):
        raise UserError(f"BACK={back}: give BACK=1 or leave it out")
    for name, value in (("FROM", source), ("TO", version)):
        if not value.strip():
            raise UserError(
                f"{name}= is missing: make port FROM=<a release> TO=<a newer one>"
            )
    old = releases.get(source, "FROM")
    new, there = porting.target(old, version, back == "1")
    click.echo(f"Trying the series of vLLM {old.version} on {new.version} …")
    work = porting.start(old, new)
    folder = work.path.parent
    found = attempt_all(old, new, work)
    (stock,) = simulation.trees_of(new, ("stock",))
    good, words = judge(stock.path, work.path, folder)
    click.echo(f"vLLM {new.version}, with what applied: {words}")
    if there:
        porting.write_series(work, folder)
        porting.finish(work)
        click.echo(
            f"{shown(new.folder)} is there already and stays as it is; what applied is "
            f"in {shown(folder)}: series, patches, and the tree as commits"
        )
    else:
        _write(old, new, work, stock.path)
    left = [a.patch for a in found if a.state in (CONFLICTS, LATER)]
    _next(old, new, left, there)
    if left or not good:
        sys.exit(1)


def _write(old: Release, new: Release, work: Repo, stock: Path) -> None:
    """Make the new release's folder, and its tree from that."""
    measured = block_bytes(new, stock)
    if measured:
        new = replace(new, dsv4_block_bytes=measured)
    names = porting.write_folder(old, new, work)
    porting.drop(old, new)
    build_tree.apply(new)
    click.echo(
        f"{shown(new.folder)}: release.toml and {len(names)} patches; the tree is "
        f"{shown(build_tree.patched_path(new))}"
    )


def _next(old: Release, new: Release, left: list[patches.Patch], there: bool) -> None:
    """Say how to go on."""
    if there:
        return
    click.echo("Next:")
    click.echo(f"  make edit RELEASE={new.version}")
    tree = shown(build_tree.patched_path(new))
    for patch in left:
        # Without that, git takes [Core] off the title.
        am = "am --3way --keep-non-patch"
        click.echo(f"  git -C {tree} {am} {quote(str(patch.path))}")
    click.echo(f"  make export RELEASE={new.version}")
    click.echo(f"  make test RELEASE={new.version}")
    click.echo(f"  make matrix RELEASE={new.version}")


if __name__ == "__main__":
    scripts.run(cli)
