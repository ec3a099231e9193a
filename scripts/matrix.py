# SPDX-License-Identifier: Apache-2.0
"""Measure what holds on each release, stock and patched, and write README's table.

Finished measurements are kept (build/reports/matrix): a run that was interrupted goes
on, and a series that changed is measured anew alone. Exit status 1 if a patched tree
is not as it should be.
"""

import sys
import time

import click
from tqdm import tqdm

from offload_parity import cli as scripts
from offload_parity import matrix, unit_env, upstream_tests
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.files import lock, writable
from offload_parity.matrix import Bench, Cell, Progress
from offload_parity.paths import ROOT, build_root, shown
from offload_parity.release import Release

_BAR = "{percentage:3.0f}%|{bar}| {postfix}"


class Screen:
    """A bar on a terminal, a line per finished cell everywhere."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._bar = tqdm(total=1.0, bar_format=_BAR, disable=None, leave=False)

    def cell(self, cell: Cell, words: str, progress: Progress) -> None:
        """Say how a cell ended."""
        done = f"{len(progress.done)} of {self._count}"
        say(f"{cell}: {words} ({done}, {_left(progress)})")

    def show(self, progress: Progress) -> None:
        """Move the bar."""
        if not self._bar.disable:
            self._bar.n = progress.reached / progress.total
            self._bar.set_postfix_str(
                f"{len(progress.done)} of {self._count}, {_left(progress)}"
            )

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def say(words: str) -> None:
    """Print a line above the bar; at once, for whoever follows a log."""
    tqdm.write(words)
    sys.stdout.flush()


def _left(progress: Progress) -> str:
    return f"{progress.left_s / 60:.0f} min left"


def measure(wanted: tuple[Release, ...], jobs: int) -> list[str]:
    """Measure what is not kept; write each row when its cells are there.

    Returns what is not as it should be, a line each.
    """
    bench = Bench(wanted, unit_env.ensure())
    cells = [cell for release in wanted for cell in matrix.cells(release)]
    results = matrix.still_valid(cells, bench)
    work = [cell for cell in cells if cell not in results]
    click.echo(f"{len(work)} measurements to take, {len(results)} are kept")
    wrong: list[str] = []
    screen = Screen(len(work))

    def finish(release: Release) -> None:
        if all(cell in results for cell in matrix.cells(release)):
            found = matrix.row(release, results)
            path = matrix.write_row(release, found)
            bad = [f"vLLM {release.version}: {w}" for w in matrix.faults(found)]
            wrong.extend(bad)
            say(f"vLLM {release.version}: {shown(path)}, {len(bad)} faults")
            for line in matrix.laws_of(found):
                say(f"  {line}")

    def ended(cell: Cell, result: object, progress: Progress) -> None:
        if isinstance(result, UserError):
            wrong.append(f"{cell}: {result}")
            screen.cell(cell, "BROKEN", progress)
            return
        results[cell] = result
        screen.cell(cell, f"{matrix.expected_seconds(cell):.0f} s", progress)
        finish(next(r for r in wanted if r.version == cell.version))

    for release in wanted:
        finish(release)
    try:
        matrix.run(work, bench, jobs, ended=ended, waiting=screen.show)
    except KeyboardInterrupt:
        # Not what was shown: a cell may have ended since.
        left = len(work) - len(matrix.still_valid(work, bench))
        click.echo(f"{left} measurements are left; what is done is kept: run it again")
        raise
    finally:
        screen.close()
    return wrong


def _remark(release: Release) -> str | None:
    """What the table cannot show of a release's row."""
    if missing := matrix.missing(release):
        return f"vLLM {release.version} is {missing}"
    return matrix.stale(release)


@click.command(help=__doc__.splitlines()[0])
@click.option("--release", "version", help="One release; default: all supported.")
@click.option(
    "--table", default="", is_flag=False, flag_value="1",
    help="Only write README's table from the rows.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1), default=upstream_tests.default_jobs,
    help="Processes side by side; default: 2, 1 on a single core.",
)  # fmt: skip
def cli(version: str | None, table: str, jobs: int) -> None:
    """Measure, write the rows and the table."""
    if table not in ("", "0", "1"):
        raise UserError(f"TABLE={table}: give TABLE=1 or leave it out")
    only_table = table == "1"
    wanted = releases.chosen(version)
    began = time.monotonic()
    wrong: list[str] = []
    if not only_table:
        for release in wanted:
            writable(release.folder)
        kept = writable(build_root() / "reports" / "matrix")
        # Two runs would measure the same.
        with lock(kept / ".lock"):
            wrong = measure(wanted, jobs)
    # Before README.md is written: a series may be unreadable.
    remarks = [why for r in releases.supported() if (why := _remark(r))]
    changed = matrix.write_table(ROOT / "README.md")
    click.echo(
        f"README.md: {'the table is rewritten' if changed else 'nothing changed'}"
    )
    for line in remarks:
        click.echo(line)
    for line in wrong:
        click.echo(f"FAULT {line}")
    if not only_table:
        minutes = (time.monotonic() - began) / 60
        click.echo(
            f"{len(wanted)} release{'s' * (len(wanted) != 1)}, {len(wrong)} faults, "
            f"{minutes:.1f} min"
        )
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
