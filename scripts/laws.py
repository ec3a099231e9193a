# SPDX-License-Identifier: Apache-2.0
"""The parity contract: laws L1 to L8 on vLLM's scheduler, stock beside patched.

Runs `python -m parity …` (tests/parity) once per tree, each in a process of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity import simulation, unit_env, upstream_tests
from offload_parity.errors import UserError
from offload_parity.files import replace, writable
from offload_parity.paths import build_root, shown
from offload_parity.simulation import Job, Tree
from offload_parity.verdicts import NAMES, Tally, table, tally

_SHOWN = 5


def _print_findings(version: str, kind: str, found: Tally) -> None:
    for law, words in sorted(found.findings.items()):
        print(f"vLLM {version}, {kind}, {law} {NAMES[law]}: {len(words)} findings")
        for line in words[:_SHOWN]:
            print(f"  {line}")
        if len(words) > _SHOWN:
            print(f"  … and {len(words) - _SHOWN} more")


def _print_reports(records: list[dict[str, Any]]) -> int:
    """The public reports on stock trees; how many are not as they are stated."""
    wrong = 0
    for r in sorted(records, key=lambda record: record["release"]):
        state = f"found by {r['law']}" if r["found"] else "does not show"
        line = f"vLLM {r['release']}, stock, {r['report']}, {r['title']}: {state}"
        if r["found"] != r["expected"]:
            wrong += 1
            line += f" (EXPECTED{'' if r['expected'] else ' NOT'} TO SHOW)"
        print(f"{line}: {r['words']}" if r["words"] else line)
    return wrong


@click.group(help=__doc__.splitlines()[0])
def cli() -> None:
    """Run one of the commands."""


release_option = click.option(
    "--release", "version", help="One release; default: the newest and the oldest."
)
python_option = click.option(
    "--python", type=click.Path(path_type=Path),
    help="Interpreter that has vLLM's requirements; default: the unit tests' own.",
)  # fmt: skip


def _trees(kind: str):
    return click.option(
        f"--{kind}", multiple=True, type=click.Path(path_type=Path),
        help=f"A tree to take as {kind}, in place of the built ones (repeatable).",
    )  # fmt: skip


@cli.command()
@release_option
@click.option(
    "--only-stock", default="",
    help="1: show what the laws find on the stock releases, and the public reports.",
)  # fmt: skip
@_trees("stock")
@_trees("patched")
@click.option("--sample", type=click.IntRange(0), help="Random histories per tree.")
@click.option("--seed", default=0, show_default=True)
@python_option
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="Folder for parity.md and parity.json; default: build/reports.",
)  # fmt: skip
def laws(
    version, only_stock, stock, patched, sample, seed, python, jobs, out
) -> None:  # fmt: skip
    """Judge the laws; exit status 1 if a patched tree breaks one.

    With --only-stock=1: if a public report does not show where it is stated to.
    """
    if only_stock not in ("", "0", "1"):
        raise UserError(f"STOCK={only_stock}: give STOCK=1 or leave it out")
    proving = only_stock == "1"
    trees = [
        *(Tree("stock", path.resolve()) for path in stock),
        *(Tree("patched", path.resolve()) for path in patched),
    ]
    for tree in trees:
        simulation.check_tree(tree)
    if not trees:
        kinds = ("stock",) if proving else simulation.KINDS
        for each in releases.in_full(version):
            trees += simulation.trees_of(each, kinds)
    folder = writable(out or build_root() / "reports")
    arguments = ["laws", "--jsonl", "--seed", str(seed)]
    if sample is not None:
        arguments += ["--sample", str(sample)]
    work = [Job(tree, tuple(arguments)) for tree in trees]
    if proving:
        work += [Job(tree, ("reports",)) for tree in trees]
    runner = simulation.Runner(
        unit_env.interpreter(python), jobs, accepted=(0, 1), unit="verdict"
    )
    records = [record for one in runner.run(work) for record in one.records]
    verdicts = [record for record in records if "report" not in record]
    by_release = {
        name: tally([record for record in verdicts if record["release"] == name])
        for name in dict.fromkeys(record["release"] for record in verdicts)
    }
    shown_kind = "stock" if proving else "patched"
    for name, tallies in by_release.items():
        if shown_kind in tallies:
            _print_findings(name, shown_kind, tallies[shown_kind])
    _write(by_release, folder)
    if proving:
        wrong = _print_reports([record for record in records if "report" in record])
        print(f"{wrong} public reports are not as they are stated to be")
        sys.exit(bool(wrong))
    bad = sum(
        len(words)
        for tallies in by_release.values()
        if "patched" in tallies
        for words in tallies["patched"].findings.values()
    )
    print(f"{bad} findings on patched trees")
    sys.exit(bool(bad))


def _write(by_release: dict[str, dict[str, Tally]], folder: Path) -> None:
    """Print the table and write it, and all findings beside it."""
    text = table(by_release)
    replace(folder / "parity.md", text.encode())
    everything = {
        name: {kind: vars(found) for kind, found in tallies.items()}
        for name, tallies in by_release.items()
    }
    replace(folder / "parity.json", json.dumps(everything, indent=1).encode())
    print(f"checks that found something, of all:\n\n{text}")
    for name, tallies in by_release.items():
        for kind, found in tallies.items():
            said = ", ".join(f"{n} {what}" for what, n in sorted(found.exempt.items()))
            print(f"vLLM {name}, {kind}: chunks that L7 exempts: {said or 'none'}")
            for limit, count in found.limited.items():
                print(f"vLLM {name}, {kind}: limits: {count} findings: {limit}")
    print(f"all findings: {shown(folder / 'parity.json')}")


@cli.command()
@release_option
# A year at most: no infinity, and nan is no number.
@click.option(
    "--seconds", type=click.IntRange(1, 365 * 86400), default=60, show_default=True
)
@click.option("--seed", type=int, help="Default: drawn, and said.")
@python_option
def fuzz(version, seconds, seed, python) -> None:
    """Play random histories on a patched release, hits beside stock's.

    A failure is shrunk and written to tests/regressions.
    """
    release = releases.get(version) if version else releases.default()
    stock, patched = simulation.trees_of(release)
    interpreter = unit_env.interpreter(python)
    arguments = ["fuzz", "--seconds", str(seconds), "--stock", stock.path]
    if seed is not None:
        arguments += ["--seed", str(seed)]
    with simulation.start(patched.path, interpreter, *arguments) as run:
        try:
            status = run.wait()
        finally:
            # The stock tree's process, too.
            simulation.kill(run)
    sys.exit(status)


if __name__ == "__main__":
    scripts.run(cli)
