# SPDX-License-Identifier: Apache-2.0
"""What holds on each release, stock and patched: measured, kept, and shown as a table.

A cell is one measurement of one release: a command of the simulation on one tree, or
vLLM's own tests on both. Finished cells stay in ``build/reports/matrix`` with a digest
of all that they depend on; the cells of a release make its row, which is committed as
``patches/<release>/matrix.json``; the rows make the table in README.md.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import (
    build_tree,
    patches,
    resends,
    simulation,
    upstream_tests,
    verdicts,
)
from . import release as releases
from .errors import UserError
from .files import replace
from .paths import ROOT, build_root, shown
from .release import Release
from .simulation import KINDS, Job, Runner, Tree
from .unit_env import UnitEnv
from .verdicts import NAMES

TESTS = "vLLM's tests"
BOTH = "both"
# Lengths per geometry and retention; the known ones, half near the alignment, half
# anywhere. All of them (make sweep) take an hour.
SAMPLE = 40
# The commands of `python -m parity`.
SIMULATED: dict[str, tuple[str, ...]] = {
    "laws": ("laws", "--jsonl", "--seed", "0"),
    "resends": ("replays", "--sample", str(SAMPLE), "--seed", "0"),
    "siblings": ("siblings",),
    "chunks": ("bench", "stored"),
}
# Those that make test measures again.
QUICK = ("siblings", "chunks")
# Seconds on one idle core, until an earlier run says better.
_EXPECTED = {
    TESTS: 240.0,
    "laws": 90.0,
    "resends": 60.0,
    "siblings": 25.0,
    "chunks": 25.0,
}
# What the table shows of the geometries and retentions that are measured.
_SHOWN_GEOMETRY = "dsv4-mtp"
_RETENTIONS = ("dense", "0", "4096")
_BEGIN = "<!-- matrix: written by make matrix, from patches/*/matrix.json -->"
_END = "<!-- end of the matrix -->"

Results = dict["Cell", Any]


@dataclass(frozen=True)
class Cell:
    """One measurement of one release, on the tree of a kind or on both."""

    version: str
    name: str
    kind: str

    def __str__(self) -> str:
        tree = "" if self.kind == BOTH else f"{self.kind}, "
        return f"vLLM {self.version}, {tree}{self.name}"

    @property
    def path(self) -> Path:
        """Where its result is kept."""
        name = f"{self.kind}-{self.name.replace(' ', '-').replace(chr(39), '')}.json"
        return build_root() / "reports" / "matrix" / self.version / name


@dataclass(frozen=True)
class Kept:
    """What a cell's file holds: the result, of what it is, and what it took."""

    key: str
    seconds: float
    result: Any


def cells(release: Release) -> list[Cell]:
    """The cells of a release's row, the longest first."""
    return [
        Cell(release.version, TESTS, BOTH),
        *(Cell(release.version, name, kind) for name in SIMULATED for kind in KINDS),
    ]


def kept(cell: Cell) -> Kept | None:
    """What is kept of a cell, whatever it depends on; None if nothing can be read."""
    try:
        return Kept(**json.loads(cell.path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def keep(cell: Cell, found: Kept) -> None:
    """Write a cell's file."""
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    replace(cell.path, json.dumps(vars(found)).encode())


def code_digest(folder: Path = ROOT / "tests") -> str:
    """A digest of the simulation's code and of the histories that it plays again."""
    code = [
        path
        for path in (folder / "parity").glob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ]
    return _digest(
        {
            path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
            for path in sorted([*code, *(folder / "regressions").glob("*.json")])
        }
    )


def _digest(facts: Any) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Bench:
    """The trees of the releases, and how a cell is measured on them.

    Args:
        wanted: the releases; their trees are built where they are missing.
        env: the environment of vLLM's unit tests.
    """

    def __init__(self, wanted: Sequence[Release], env: UnitEnv) -> None:
        self._env = env
        self._releases = {release.version: release for release in wanted}
        self._code = code_digest()
        self._trees: dict[tuple[str, str], Tree] = {}
        self._ids: dict[tuple[str, str], str] = {}
        self._stopping = threading.Event()
        for release in wanted:
            for tree in simulation.trees_of(release):
                place = release.version, tree.label
                self._trees[place] = tree
                self._ids[place] = build_tree.repo(tree.path).out(
                    "rev-parse", "HEAD^{tree}"
                )

    def key(self, cell: Cell) -> str:
        """A digest of all that the cell's result depends on."""
        facts: dict[str, Any] = {"environment": self._env.root.name}
        if cell.name == TESTS:
            release = self._releases[cell.version]
            facts["trees"] = [self._ids[cell.version, kind] for kind in KINDS]
            facts["paths"] = upstream_tests.paths_of(release)
        else:
            facts["tree"] = self._ids[cell.version, cell.kind]
            facts["code"] = self._code
            facts["arguments"] = SIMULATED[cell.name]
        return _digest(facts)

    def measure(self, cell: Cell) -> Any:
        """Measure a cell, in one process.

        Raises:
            UserError: it broke.
        """
        if cell.name == TESTS:
            result = self._tests(cell)
        else:
            tree = self._trees[cell.version, cell.kind]
            runner = Runner(self._env.python, 1, accepted=(0, 1), show=False)
            (ended,) = runner.run([Job(tree, SIMULATED[cell.name])])
            result = ended.records
        # A run that was stopped returns what it had so far.
        self._go_on()
        return result

    def _tests(self, cell: Cell) -> dict[str, Any]:
        found, _ = upstream_tests.check(
            self._releases[cell.version],
            self._env,
            jobs=1,
            progress=lambda done, total: self._go_on(),
        )
        return counted(found)

    def _go_on(self) -> None:
        if self._stopping.is_set():
            raise UserError("stopped")

    def stop(self) -> None:
        """End what is being measured, soon; it is not kept."""
        self._stopping.set()
        simulation.stop_all()


def counted(found: upstream_tests.Comparison) -> dict[str, Any]:
    """What the row holds of vLLM's own tests.

    How many pass and how many are skipped as on stock depends on what is installed.
    """
    return {
        "known": found.known,
        "new": len(found.new),
        "failed": sorted(found.failed),
        "lost": sorted(found.lost),
    }


@dataclass
class Progress:
    """How far a run is, in seconds that its cells are expected to take on one core."""

    expected: dict[Cell, float]
    jobs: int
    began: float = field(default_factory=time.monotonic)
    started: dict[Cell, float] = field(default_factory=dict)
    done: set[Cell] = field(default_factory=set)

    @property
    def total(self) -> float:
        """Of all cells."""
        return sum(self.expected.values())

    @property
    def reached(self) -> float:
        """Of the cells that are done, and part of those that run."""
        now = time.monotonic()
        running = (
            min(now - at, 0.95 * self.expected[cell])
            # Copied: other threads begin cells meanwhile.
            for cell, at in list(self.started.items())
            if cell not in self.done
        )
        return sum(self.expected[cell] for cell in self.done) + sum(running)

    @property
    def left_s(self) -> float:
        """What it will take yet, at the pace so far."""
        spent = time.monotonic() - self.began
        if self.reached < 0.01 * self.total or not spent:
            return (self.total - self.reached) / self.jobs
        return spent / self.reached * (self.total - self.reached)


def expected_seconds(cell: Cell) -> float:
    """What a cell took the last time, or takes elsewhere."""
    before = kept(cell)
    return before.seconds if before else _EXPECTED[cell.name]


def still_valid(cells: Iterable[Cell], bench: Bench) -> Results:
    """The results that are kept and depend on what they depended on."""
    found: Results = {}
    for cell in cells:
        before = kept(cell)
        if before and before.key == bench.key(cell):
            found[cell] = before.result
    return found


def run(
    work: Sequence[Cell],
    bench: Bench,
    jobs: int,
    *,
    ended: Callable[[Cell, Any | UserError, Progress], None],
    waiting: Callable[[Progress], None],
) -> None:
    """Measure the cells side by side; each is kept as soon as it ends.

    Args:
        work: the cells, in the order in which they are begun.
        bench: measures them.
        jobs: how many at a time.
        ended: called with each cell's result, or why it broke; the others go on.
        waiting: called once a second.
    """
    progress = Progress({cell: expected_seconds(cell) for cell in work}, jobs)

    def one(cell: Cell) -> Any:
        began = progress.started[cell] = time.monotonic()
        result = bench.measure(cell)
        keep(cell, Kept(bench.key(cell), time.monotonic() - began, result))
        return result

    with ThreadPoolExecutor(jobs) as pool:
        tasks: dict[Future[Any], Cell] = {pool.submit(one, cell): cell for cell in work}
        try:
            while tasks:
                finished, _ = wait(tasks, timeout=1, return_when=FIRST_COMPLETED)
                for task in finished:
                    cell = tasks.pop(task)
                    progress.done.add(cell)
                    try:
                        result = task.result()
                    except UserError as error:
                        result = error
                    ended(cell, result, progress)
                waiting(progress)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            bench.stop()
            raise


def measured_again(
    release: Release, env: UnitEnv, jobs: int, progress: Callable[[int, int], None]
) -> Results:
    """The cells that take a minute, measured if they are not kept.

    Raises:
        UserError: one broke.
    """
    bench = Bench([release], env)
    wanted = [cell for cell in cells(release) if cell.name in QUICK]
    results = still_valid(wanted, bench)

    def ended(cell: Cell, result: Any | UserError, _: Progress) -> None:
        if isinstance(result, UserError):
            raise result
        results[cell] = result

    run(
        [cell for cell in wanted if cell not in results],
        bench,
        jobs,
        ended=ended,
        waiting=lambda now: progress(len(now.done), len(now.expected)),
    )
    return results


def row_path(release: Release) -> Path:
    """Where a release's row is committed."""
    return release.folder / "matrix.json"


def row(release: Release, results: Mapping[Cell, Any]) -> dict[str, Any]:
    """A release's row from the results of all its cells."""
    found: dict[str, Any] = {
        "release": release.version,
        "series": patches.series_digest(patches.read_series(release)),
    }
    for kind in KINDS:
        found[kind] = {
            name: value
            for part in (TESTS, *SIMULATED)
            for name, value in _part(part, kind, release, results).items()
        }
    return found


def differences(release: Release, results: Mapping[Cell, Any]) -> list[str]:
    """Where results of some cells are not those of the release's row, in words."""
    committed = read_row(release)
    if committed is None:
        return [f"{shown(row_path(release))} is missing: {_remedy(release)}"]
    words = []
    for part in dict.fromkeys(cell.name for cell in results):
        for kind in KINDS:
            for name, now in _part(part, kind, release, results).items():
                before = committed[kind].get(name)
                if now != before:
                    words.append(f"{kind}, {name}: {now}, in the row {before}")
    return words


def _part(
    part: str, kind: str, release: Release, results: Mapping[Cell, Any]
) -> dict[str, Any]:
    """What one measurement says of a tree, by the name it has in a row."""
    if part == TESTS:
        tests = results[Cell(release.version, TESTS, BOTH)]
        names = ("known",) if kind == "stock" else ("known", "new", "failed", "lost")
        return {"tests": {name: tests[name] for name in names}}
    records = [
        record
        for each in KINDS
        for record in results[Cell(release.version, part, each)]
    ]
    mine = [record for record in records if record["tree"] == kind]
    match part:
        case "laws":
            # L6 compares the trees.
            judged = verdicts.tally(records)[kind]
            return {
                "laws": {
                    law: {"fails": judged.broken[law], "situations": judged.checks[law]}
                    for law in NAMES
                },
                "limited": dict(sorted(judged.limited.items())),
            }
        case "resends":
            compared = resends.compare(records)
            return {
                part: _nested(
                    (
                        (r["geometry"], _named(r["retention"]), r["tier"]),
                        _resend(r, kind),
                    )
                    for r in compared
                )
            }
        case "siblings":
            return {
                part: _nested(
                    ((r["geometry"], _named(r["retention"]), r["gpu"]), r["hits"])
                    for r in mine
                )
            }
        case _:
            return {
                part: _nested(
                    ((r["geometry"], _named(r["retention"])), r["chunks"]) for r in mine
                )
            }


def _resend(compared: Mapping[str, Any], kind: str) -> dict[str, int]:
    found = {
        "short": len(compared[kind]["short"]),
        "tried": compared[kind]["tried"],
    }
    if kind == "patched":
        found["below_stock"] = len(compared["below_stock"])
    return found


def _named(retention: int | None) -> str:
    return "dense" if retention is None else str(retention)


def _nested(items: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (*above, last), value in items:
        place = found
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def write_row(release: Release, found: Mapping[str, Any]) -> Path:
    """Write a row to the series' folder."""
    path = row_path(release)
    replace(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def faults(found: Mapping[str, Any]) -> list[str]:
    """What of a row's patched tree is not as it should be, in words."""
    mine = found["patched"]
    words = [
        f"{name} is {how}" for how in ("failed", "lost") for name in mine["tests"][how]
    ]
    words += [
        f"{law} {NAMES[law]} fails in {count['fails']} of {count['situations']}"
        for law, count in mine["laws"].items()
        if count["fails"]
    ]
    for geometry, by_retention in mine["resends"].items():
        for retention, by_tier in by_retention.items():
            for tier, count in by_tier.items():
                where = f"{geometry}, retention {retention}, {tier}"
                if count["short"]:
                    words.append(f"{where}: {count['short']} resends below dense")
                if count["below_stock"]:
                    words.append(f"{where}: {count['below_stock']} resends below stock")
    return words


def laws_of(found: Mapping[str, Any]) -> list[str]:
    """How often each law fails in a row's trees, and how often it was asked."""

    def count(kind: str, law: str) -> str:
        one = found[kind]["laws"][law]
        return f"{kind} {one['fails']:,} of {one['situations']:,}"

    return [
        f"{law} {name}: {', '.join(count(kind, law) for kind in KINDS)}"
        for law, name in NAMES.items()
    ]


def read_row(release: Release) -> dict[str, Any] | None:
    """A release's row as it is committed, None if there is none.

    Raises:
        UserError: the file cannot be read.
    """
    path = row_path(release)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["release"] != release.version:
            raise ValueError(f"it is the row of {found['release']}")
        # What the table takes of it is there.
        table({release.version: found})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{shown(path)} cannot be read ({error!r}): {_remedy(release)}"
        ) from error
    return found


def _remedy(release: Release) -> str:
    return f"run make matrix RELEASE={release.version}"


def missing(release: Release) -> str | None:
    """That a release has no row yet, in words; None if it has one."""
    return (
        f"not measured yet: {_remedy(release)}" if read_row(release) is None else None
    )


def stale(release: Release) -> str | None:
    """Why a release's row is not that of its series, in one line; None if it is.

    None as well if it has no row yet: the table says so.
    """
    found = read_row(release)
    series = patches.read_series(release)
    if found is None or found.get("series") == patches.series_digest(series):
        return None
    where = shown(row_path(release))
    return f"{where} was measured with another series: {_remedy(release)}"


def table(rows: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The rows by release in Markdown: a line per tree, in the order given."""
    head = (
        "release",
        "tree",
        "laws that fail",
        "chunks per request: dense / 0 / 4,096",
        "resends below dense: dense / 0 / 4,096",
        "third sibling hits: GPU kept / evicted",
        "vLLM's own tests",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for version, found in rows.items():
        if found is None:
            line = (version, "", "not measured yet", *[""] * (len(head) - 3))
            lines.append("| " + " | ".join(line) + " |")
            continue
        for kind in KINDS:
            one = found[kind]
            line = (
                version if kind == KINDS[0] else "",
                kind,
                _laws(one["laws"]),
                _chunks(one["chunks"]),
                _resends(one["resends"]),
                _siblings(one["siblings"]),
                _tests(one["tests"]),
            )
            lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def _laws(counts: Mapping[str, Mapping[str, int]]) -> str:
    failing = [law for law, count in counts.items() if count["fails"]]
    return " ".join(failing) or "none"


def _chunks(counts: Mapping[str, Mapping[str, int]]) -> str:
    return " / ".join(f"{counts[_SHOWN_GEOMETRY][r]:,}" for r in _RETENTIONS)


def _resends(counts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    short = dict.fromkeys(_RETENTIONS, 0)
    tried = dict.fromkeys(_RETENTIONS, 0)
    for by_retention in counts.values():
        for retention, by_tier in by_retention.items():
            for count in by_tier.values():
                short[retention] += count["short"]
                tried[retention] += count["tried"]
    if not any(short.values()):
        return f"none of {sum(tried.values()):,}"
    each = max(tried.values())
    return f"{' / '.join(map(str, short.values()))}, of {each} each"


def _siblings(hits: Mapping[str, Mapping[str, Mapping[str, list[int]]]]) -> str:
    third = hits[_SHOWN_GEOMETRY]["0"]
    return " / ".join(f"{third[state][2]:,}" for state in ("kept", "evicted"))


def _tests(count: Mapping[str, Any]) -> str:
    if "lost" not in count:
        return f"{count['known']:,}"
    bad = [f"{len(count[how])} {how}" for how in ("failed", "lost") if count[how]]
    return ", ".join(bad or ["none lost"]) + f", {count['new']} new"


def shown_table(text: str) -> str:
    """The table in a text such as README.md.

    Raises:
        UserError: the two marks are not there, once each and in this order.
    """
    before, begin, rest = text.partition(f"{_BEGIN}\n")
    inner, end, after = rest.partition(f"{_END}\n")
    if not (begin and end) or _BEGIN in after or _END in before + after:
        raise UserError(
            f"README.md has not the two lines {_BEGIN} and {_END}, once each: put "
            "them where the table belongs"
        )
    return inner


def with_table(text: str, new: str) -> str:
    """A text such as README.md with ``new`` in place of its table."""
    old = shown_table(text)
    return text.replace(f"{_BEGIN}\n{old}{_END}", f"{_BEGIN}\n{new}{_END}")


def committed_table() -> str:
    """The table of the rows that are committed, the newest release first."""
    return table({r.version: read_row(r) for r in releases.supported()})


def write_table(readme: Path = ROOT / "README.md") -> bool:
    """Write the table of the committed rows into README.md; False if it was there.

    Raises:
        UserError: README.md or a row cannot be read; README.md has no place for it.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{shown(readme)} cannot be read ({error}): restore it (git checkout)"
        ) from error
    new = with_table(text, committed_table())
    if new == text:
        return False
    replace(readme, new.encode())
    return True
