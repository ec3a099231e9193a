# SPDX-License-Identifier: Apache-2.0
"""The matrix: what is measured anew, what a row holds, and the table in README.md."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import matrix as script
from conftest import MASK, NEW, OLD, ROOT, World, commit, text
from offload_parity import build_tree, exporting, matrix, patches, release
from offload_parity.errors import UserError
from offload_parity.matrix import BOTH, TESTS, Cell
from offload_parity.unit_env import UnitEnv


@pytest.fixture
def real(monkeypatch) -> None:
    """This project's own series, whatever the environment says."""
    monkeypatch.setenv("OFFLOAD_PARITY_PATCHES", str(ROOT / "patches"))


def test_the_table_in_the_readme_is_that_of_the_rows(real) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert matrix.shown_table(readme) == matrix.committed_table(), (
        "run make matrix TABLE=1"
    )


def test_each_row_was_measured_with_its_series(real) -> None:
    found = [matrix.stale(each) for each in release.supported()]
    assert [why for why in found if why] == []


def test_each_row_has_no_fault(real) -> None:
    rows = {each.version: matrix.read_row(each) for each in release.supported()}
    found = {name: matrix.faults(row) for name, row in rows.items() if row}
    assert {name: words for name, words in found.items() if words} == {}


def result(cell: Cell) -> Any:
    """What a cell might be measured to be."""
    if cell.name == TESTS:
        return {"known": 9, "new": 3, "failed": [], "lost": []}
    patched = cell.kind == "patched"
    records = []
    for geometry in ("dsv4-mtp", "dsv4"):
        for retention in (None, 0, 4096):
            one = {
                "release": cell.version, "tree": cell.kind, "geometry": geometry,
                "retention": retention,
            }  # fmt: skip
            match cell.name:
                case "chunks":
                    chunks = {None: 4600, 0: 237, 4096: 467}[retention]
                    records.append(one | {"chunks": chunks if patched else 4388})
                case "siblings":
                    for state in ("kept", "evicted"):
                        hits = [0, 0, 19712, 19712] if patched else [0, 0, 0, 0]
                        records.append(one | {"gpu": state, "hits": hits})
                case "resends":
                    for length in (500, 8193):
                        short = not patched and length == 8193 and retention == 0
                        records.append(
                            one | {
                                "blocks_per_chunk": 1, "length": length,
                                "gpu": 256, "host": 0 if short else 256,
                                "want_gpu": 256, "want_host": 256,
                                "align_gpu": 256, "align_host": 256,
                            }
                        )  # fmt: skip
                case "laws":
                    records.append(
                        one | {
                            "law": "L3", "case": "c", "tier": "host", "checks": 2,
                            "words": [] if patched else ["send 2 hits 0 of 19712"],
                        }
                    )  # fmt: skip
    return records


class FakeBench:
    """Measures nothing; remembers what it was asked."""

    # Where Ctrl-C comes, and what breaks.
    interrupted: Cell | None = None
    broken: Cell | None = None

    def __init__(self, wanted, env) -> None:
        self.series = {
            each.version: patches.series_digest(patches.read_series(each))
            for each in wanted
        }
        self.asked: list[Cell] = []
        self.stopped = threading.Event()

    def key(self, cell: Cell) -> str:
        """Of what the result depends on."""
        return "stock" if cell.kind == "stock" else self.series[cell.version]

    def measure(self, cell: Cell) -> Any:
        self.asked.append(cell)
        if cell == self.interrupted:
            assert self.stopped.wait(5)
            raise UserError("stopped")
        if cell == self.broken:
            raise UserError("the simulation broke")
        return result(cell)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def benches(world: World, monkeypatch) -> list[FakeBench]:
    """The benches of the runs, in order; README.md is one of the world's."""
    made: list[FakeBench] = []

    def make(wanted, env) -> FakeBench:
        made.append(FakeBench(wanted, env))
        return made[-1]

    monkeypatch.setattr(script, "Bench", make)
    monkeypatch.setattr(script.unit_env, "ensure", lambda: UnitEnv(Path("/nowhere")))
    monkeypatch.setattr(script, "ROOT", world.root)
    (world.root / "README.md").write_text(f"# T\n{matrix._BEGIN}\n{matrix._END}\nend\n")
    return made


@pytest.fixture
def run(world: World, benches):
    """Run ``make matrix``'s script."""

    return partial(world.run_script, script)


def test_a_row_says_what_was_measured(world: World, run, benches) -> None:
    code, out, err = run("--release", NEW)
    assert (code, err) == (0, "")
    assert "9 measurements to take, 0 are kept" in out
    assert "1 release, 0 faults, 0.0 min" in out
    assert "  L3 siblings: stock 6 of 12, patched 0 of 12\n" in out
    row = json.loads((world.patches / NEW / "matrix.json").read_text())
    assert row["series"] == benches[0].series[NEW]
    assert row["stock"]["tests"] == {"known": 9}
    assert row["patched"]["tests"]["new"] == 3
    assert row["stock"]["laws"]["L3"] == {"fails": 6, "situations": 12}
    assert row["patched"]["laws"]["L3"] == {"fails": 0, "situations": 12}
    assert row["patched"]["chunks"]["dsv4"] == {"dense": 4600, "0": 237, "4096": 467}
    stock = row["stock"]["resends"]["dsv4-mtp"]
    assert stock["0"]["host"] == {"short": 1, "tried": 2}
    assert row["patched"]["siblings"]["dsv4"]["0"]["kept"] == [0, 0, 19712, 19712]
    assert "seconds" not in json.dumps(row)
    readme = (world.root / "README.md").read_text().splitlines()
    assert readme[0] == "# T" and readme[-1] == "end"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme[4:6]]
    chunks, resends = "4,388 / 4,388 / 4,388", "0 / 2 / 0, of 8 each"
    assert cells[0] == [NEW, "stock", "L3", chunks, resends, "0 / 0", "9"]
    chunks, hits = "4,600 / 237 / 467", "19,712 / 19,712"
    new = "none lost, 3 new"
    assert cells[1] == ["", "patched", "none", chunks, "none of 24", hits, new]


def test_only_what_changed_is_measured_again(world: World, run, benches) -> None:
    assert run()[0] == 0
    assert len(benches[0].asked) == 18
    assert run()[0] == 0
    assert benches[1].asked == []
    newest = release.get(NEW)
    tree = build_tree.ensure_patched(newest)
    commit(tree, "[Test] More", {MASK: text("mask", {10: "one_mask = 1"})})
    exporting.export(newest)
    why = matrix.stale(newest)
    assert "was measured with another series: run make matrix RELEASE=9.9.0" in why
    assert run("--table")[1].splitlines()[-1] == why
    assert matrix.stale(release.get(OLD)) is None
    code, out, _ = run()
    assert code == 0 and "14 are kept" not in out
    assert {cell.version for cell in benches[2].asked} == {NEW}
    assert {cell.kind for cell in benches[2].asked} == {BOTH, "patched"}
    assert matrix.stale(newest) is None


def test_a_row_that_is_missing_is_said_in_the_table(world: World) -> None:
    wanted = release.get(NEW)
    assert matrix.stale(wanted) is None
    assert f"| {NEW} |  | not measured yet |" in matrix.committed_table()
    for text_of_file in (
        "{", "[]", "7", "null", '{"series": "", "release": "9.9.0"}',
        '{"series": "", "release": "9.8.0"}',
    ):  # fmt: skip
        matrix.row_path(wanted).write_text(text_of_file)
        with pytest.raises(UserError, match=r"cannot be read .*run make matrix REL"):
            matrix.stale(wanted)


def test_an_interrupted_run_goes_on(world: World, run, benches, monkeypatch) -> None:
    cells = matrix.cells(release.get(NEW))

    def first_cell(self, cell, words, progress) -> None:
        # Cells that ended and were not shown yet are kept as well.
        while cells[4] not in progress.started:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeBench, "interrupted", cells[4])
        patch.setattr(script.Screen, "cell", first_cell)
        code, out, _ = run("--release", NEW, "--jobs", "1")
    assert code == 130 and "5 measurements are left; what is done is kept" in out
    assert not (world.patches / NEW / "matrix.json").exists()
    code, out, _ = run("--release", NEW, "--jobs", "1")
    assert code == 0 and benches[1].asked == cells[4:]


def test_a_measurement_that_breaks_does_not_stop_the_others(
    world: World, run, benches, monkeypatch
) -> None:
    broken = Cell(NEW, "siblings", "stock")
    monkeypatch.setattr(FakeBench, "broken", broken)
    code, out, _ = run()
    assert code == 1
    assert f"FAULT {broken}: the simulation broke" in out
    assert not (world.patches / NEW / "matrix.json").exists()
    assert (world.patches / OLD / "matrix.json").exists()
    assert not broken.path.exists()


def test_the_table_alone(world: World, run, benches) -> None:
    assert run()[0] == 0
    (world.root / "README.md").write_text(f"{matrix._BEGIN}\nold\n{matrix._END}\n")
    code, out, _ = run("--table")
    assert code == 0 and "the table is rewritten" in out
    assert "nothing changed" in run("--table=1")[1]
    assert len(benches) == 1
    rows = (world.root / "README.md").read_text().splitlines()[3:-1]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {NEW}", "stock"], ["| ", "patched"], [f"| {OLD}", "stock"],
        ["| ", "patched"],
    ]  # fmt: skip
    assert run("--table=maybe")[0] == 1
    matrix.row_path(release.get(OLD)).unlink()
    code, out, _ = run("--table")
    assert code == 0 and f"vLLM {OLD} is not measured yet: run make matrix" in out


@pytest.mark.parametrize("what", ["readme", "patch"])
def test_what_cannot_be_read_is_named_and_readme_stays(
    world: World, run, benches, what: str
) -> None:
    assert run()[0] == 0
    readme = world.root / "README.md"
    before = f"{matrix._BEGIN}\nold\n{matrix._END}\n".encode()
    if what == "readme":
        before += b"\xff"
        name = "README.md"
    else:
        name = patches.listed(world.patches / NEW)[0]
        (world.patches / NEW / name).unlink()
    readme.write_bytes(before)
    code, _, err = run("--table")
    assert code == 1 and f"{name} cannot be read (" in err and "restore it" in err
    assert readme.read_bytes() == before


@pytest.mark.parametrize(
    "readme",
    [
        "# no table\n",
        f"{matrix._END}\n{matrix._BEGIN}\n",
        f"{matrix._BEGIN}\n{matrix._END}\n{matrix._BEGIN}\n{matrix._END}\n",
    ],
)
def test_a_readme_without_a_place_for_the_table_is_refused(
    world: World, run, readme: str
) -> None:
    (world.root / "README.md").write_text(readme)
    code, _, err = run("--table")
    assert code == 1 and "put them where the table belongs" in err
    assert (world.root / "README.md").read_text() == readme


def test_what_is_wrong_with_a_patched_tree_is_a_fault(world: World) -> None:
    wanted = release.get(NEW)
    results = {cell: result(cell) for cell in matrix.cells(wanted)}
    assert matrix.faults(matrix.row(wanted, results)) == []
    results[Cell(NEW, TESTS, BOTH)] |= {"lost": ["tests/a.py::b"]}
    for name in ("resends", "laws"):
        stock = result(Cell(NEW, name, "stock"))
        results[Cell(NEW, name, "patched")] = [r | {"tree": "patched"} for r in stock]
    found = matrix.row(wanted, results)
    assert matrix.faults(found) == [
        "tests/a.py::b is lost",
        "L3 siblings fails in 6 of 12",
        "dsv4, retention 0, host: 1 resends below dense",
        "dsv4-mtp, retention 0, host: 1 resends below dense",
    ]
    line = matrix.table({NEW: found}).splitlines()[-1]
    assert "| L3 |" in line and "| 1 lost, 3 new |" in line


def test_what_is_measured_again_is_compared_with_the_row(
    world: World, run, monkeypatch
) -> None:
    wanted = release.get(NEW)
    missing = matrix.differences(wanted, {})
    assert len(missing) == 1 and "run make matrix RELEASE=9.9.0" in missing[0]
    assert run("--release", NEW)[0] == 0
    for cell in matrix.cells(wanted):
        if cell.name == "siblings":
            cell.path.unlink()
    monkeypatch.setattr(matrix, "Bench", FakeBench)
    env = UnitEnv(Path("/nowhere"))
    results = matrix.measured_again(wanted, env, 2, lambda done, total: None)
    assert {cell.name for cell in results} == {"siblings", "chunks"}
    assert matrix.differences(wanted, results) == []
    results[Cell(NEW, TESTS, BOTH)] = result(Cell(NEW, TESTS, BOTH))
    assert matrix.differences(wanted, results) == []
    results[Cell(NEW, TESTS, BOTH)] |= {"new": 4}
    chunks = Cell(NEW, "chunks", "stock")
    results[chunks] = [r | {"chunks": 4389} for r in results[chunks]]
    found = matrix.differences(wanted, results)
    assert [words.split(":")[0] for words in found] == [
        "stock, chunks",
        "patched, tests",
    ]
    assert "4389" in found[0] and "in the row" in found[0]


def test_a_measurement_that_breaks_again_is_an_error(
    world: World, run, monkeypatch
) -> None:
    broken = Cell(NEW, "siblings", "stock")
    monkeypatch.setattr(matrix, "Bench", FakeBench)
    monkeypatch.setattr(FakeBench, "broken", broken)
    with pytest.raises(UserError, match="the simulation broke"):
        matrix.measured_again(
            release.get(NEW), UnitEnv(Path("/nowhere")), 1, lambda done, total: None
        )


def test_the_key_is_of_the_tree_and_of_the_simulation(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    wanted = release.get(NEW)
    env = UnitEnv(tmp_path / "unit-env-1")
    cells = matrix.cells(wanted)

    def keys() -> dict[Cell, str]:
        bench = matrix.Bench([wanted], env)
        return {cell: bench.key(cell) for cell in cells}

    before = keys()
    assert keys() == before
    with monkeypatch.context() as patch:
        patch.setattr(matrix, "code_digest", lambda: "another")
        changed = [cell for cell, key in keys().items() if key != before[cell]]
        assert changed == [cell for cell in cells if cell.name != TESTS]
    tree = build_tree.patched_path(wanted)
    commit(tree, "[Test] More", {MASK: text("mask", {10: "one_mask = 1"})})
    exporting.export(wanted)
    changed = [cell for cell, key in keys().items() if key != before[cell]]
    assert changed == [cell for cell in cells if cell.kind != "stock"]


def test_the_simulation_s_tests_are_no_part_of_its_digest(tmp_path: Path) -> None:
    for name in ("parity", "regressions"):
        (tmp_path / name).mkdir()
    (tmp_path / "parity" / "laws.py").write_text("1")
    before = matrix.code_digest(tmp_path)
    (tmp_path / "parity" / "test_laws.py").write_text("1")
    assert matrix.code_digest(tmp_path) == before
    (tmp_path / "regressions" / "1.json").write_text("{}")
    after = matrix.code_digest(tmp_path)
    assert after != before
    (tmp_path / "parity" / "laws.py").write_text("2")
    assert matrix.code_digest(tmp_path) not in (before, after)


def test_what_is_stopped_is_not_kept(world: World, tmp_path: Path, monkeypatch) -> None:
    """A simulation that is ended returns what it had."""
    wanted = release.get(NEW)
    bench = matrix.Bench([wanted], UnitEnv(tmp_path))

    class Stopped:
        def __init__(self, *_, **__) -> None:
            pass

        def run(self, work):
            bench.stop()
            return [matrix.simulation.Ended(work[0])]

    monkeypatch.setattr(matrix, "Runner", Stopped)
    with pytest.raises(UserError, match="stopped"):
        bench.measure(Cell(NEW, "laws", "stock"))
    # vLLM's tests end at the next one that is done.
    monkeypatch.setattr(
        matrix.upstream_tests, "check", lambda *_, progress, **__: progress(1, 2)
    )
    with pytest.raises(UserError, match="stopped"):
        bench.measure(Cell(NEW, TESTS, BOTH))


def test_the_estimate_is_that_of_the_pace(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, second = Cell(NEW, "laws", "stock"), Cell(NEW, "laws", "patched")
    progress = matrix.Progress({first: 60.0, second: 60.0}, jobs=2, began=100.0)
    assert progress.left_s == 60.0
    progress.started[first] = 100.0
    now[0] = 220.0
    progress.done.add(first)
    assert progress.reached == 60.0 and progress.left_s == 120.0
    progress.started[second] = 220.0
    now[0] = 500.0
    assert progress.reached == 60.0 + 57.0
