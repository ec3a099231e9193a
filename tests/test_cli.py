# SPDX-License-Identifier: Apache-2.0
"""Every script turns a foreseeable fault into one line and an exit status."""

import errno
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from offload_parity import cli
from offload_parity.errors import UserError

SCRIPTS = Path(cli.__file__).parents[1]


def ended(capsys, command) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.run(command)
    out, err = capsys.readouterr()
    assert out == ""
    return end.value.code, err


@pytest.fixture(autouse=True)
def handlers():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    hang_up = signal.getsignal(signal.SIGHUP)
    yield
    for number, handler in (before | {signal.SIGHUP: hang_up}).items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no\n  network"), 1, "error: no network\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            (
                "error: [Errno 28] No space left on device: '/x/y'; make room and run "
                "it again\n"
            ),
        ),
        (click.UsageError("No such option: --x"), 2, "error: No such option: --x\n"),
        (click.FileError("f", "gone"), 1, "error: Could not open file 'f': gone\n"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was left half done\n"),
    ],
)
def test_fault_is_one_line(capsys, error, status, line) -> None:
    def command() -> None:
        raise error

    assert ended(capsys, command) == (status, line)


def test_wrong_option_of_a_click_command(capsys, monkeypatch) -> None:
    @click.command()
    @click.option("--jobs", type=click.IntRange(1))
    def command(jobs) -> None:
        raise AssertionError("it must not run")

    monkeypatch.setattr(sys, "argv", ["x.py", "--jobs", "0"])
    status, err = ended(capsys, command)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_termination_is_like_ctrl_c(capsys) -> None:
    status, err = ended(capsys, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (status, err.split(";")[0]) == (130, "interrupted")


def test_defects_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda: 1 / 0)


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from offload_parity import cli\n"
        "cli.run(lambda: [print('x' * 1000) for _ in range(1000)])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(SCRIPTS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait() == 141


@pytest.mark.parametrize("script", sorted(p.name for p in SCRIPTS.glob("*.py")))
def test_every_script_says_its_version(script: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    facts = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{facts['name']} {facts['version']}\n"


def test_version_is_no_value_of_the_script_s_own(capsys, monkeypatch) -> None:
    @click.command()
    @click.option("--release", "version")
    def command(version: str) -> None:
        print(version)

    monkeypatch.setattr("sys.argv", ["script.py", "--release", "0.33.0"])
    cli.run(command)
    assert capsys.readouterr().out == "0.33.0\n"


@pytest.mark.parametrize("script", sorted(p.name for p in SCRIPTS.glob("*.py")))
def test_every_script_has_a_help_that_does_nothing(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--help"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().startswith(f"usage: {script}")
    assert "--version" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script", sorted({p.name for p in SCRIPTS.glob("*.py")} - {"clean.py"})
)
def test_scripts_end_by_the_same_rules(script: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--no-such-option"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
