# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes what was collected and each test's outcome.

``-p offload_parity.pytest_outcomes --outcomes FILE`` appends one JSON object a line, as
it happens, so a reader of the file can show progress:

    {"collected": [node id, …]}
    {"collect_error": path, "message": text}
    {"id": node id, "outcome": word, "seconds": number, "message": text, "line": text}

``line`` is the source line that failed, where the message is a bare AssertionError, as
from an ``assert`` in a file that pytest does not rewrite. The words are passed, failed,
error (in setup or teardown), skipped, xfailed, xpassed.
It runs in vLLM's environment, so it imports nothing but pytest.
"""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser):
    """Add ``--outcomes`` and ``--only-tests``."""
    parser.addoption("--outcomes", metavar="FILE", help="write each test's outcome")
    parser.addoption(
        "--only-tests",
        metavar="FILE",
        help="run only the node ids in FILE, with or without parameters",
    )


def pytest_configure(config):
    """Start recording, in pytest-xdist's controller only."""
    path = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


def pytest_collection_modifyitems(config, items):
    """Leave out what ``--only-tests`` does not name."""
    path = config.getoption("--only-tests")
    if not path:
        return
    wanted = set(Path(path).read_text(encoding="utf-8").splitlines())
    chosen, others = [], []
    for item in items:
        named = {item.nodeid, item.nodeid.split("[", 1)[0]} & wanted
        (chosen if named else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def message(report):
    """Why a test did not pass: the exception's message, without the source."""
    longrepr = report.longrepr
    if longrepr is None:
        return ""
    if isinstance(longrepr, tuple):  # a skip: path, line, reason
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    return crash.message if crash else str(longrepr)


def failing_line(report):
    """The source line that raised a bare AssertionError, else ""."""
    if message(report) != "AssertionError":
        return ""
    traceback = getattr(report.longrepr, "reprtraceback", None)
    for entry in reversed(traceback.reprentries if traceback else ()):
        for line in getattr(entry, "lines", ()):
            if line.startswith(">"):
                return line[1:].strip()
    return ""


class Recorder:
    """Follows the reports of a run and writes them down."""

    def __init__(self, path):
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._running = {}
        self._collected = False

    def _write(self, **record):
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report):
        """Record a file that cannot be imported."""
        if report.failed:
            self._write(collect_error=report.nodeid, message=message(report))

    def pytest_collection_finish(self, session):
        """Record the node ids; with pytest-xdist the controller has none."""
        if session.items:
            self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        """Record the node ids of the first worker; the others have the same."""
        if not self._collected:
            self._collected = True
            self._write(collected=list(ids))

    def pytest_runtest_logreport(self, report):
        """Join the reports of setup, call and teardown to one outcome."""
        state = self._running.setdefault(
            report.nodeid,
            {"outcome": "passed", "seconds": 0.0, "message": "", "line": ""},
        )
        state["seconds"] += report.duration
        expected = hasattr(report, "wasxfail")
        if report.failed:
            # A crashed worker reports no phase.
            word = "error" if report.when in ("setup", "teardown") else "failed"
        elif report.skipped:
            word = "xfailed" if expected else "skipped"
        else:
            word = "xpassed" if expected else "passed"
        if word != "passed" and state["outcome"] in ("passed", "xpassed", "xfailed"):
            state["outcome"] = word
            state["message"] = message(report)
            state["line"] = failing_line(report)
        if report.when not in ("setup", "call"):
            self._write(id=report.nodeid, **self._running.pop(report.nodeid))

    def pytest_unconfigure(self):
        """Close the file."""
        self._file.close()
