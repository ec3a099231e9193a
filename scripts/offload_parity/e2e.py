# SPDX-License-Identifier: Apache-2.0
"""Run tests/e2e: tiny models on the installed package, as published and patched."""

import re
from collections import Counter
from collections.abc import Callable

from .e2e_env import E2eEnv
from .paths import ROOT
from .proof import one_line
from .release import Release
from .report import Result
from .upstream_tests import Outcome, Progress, Run, report_log, run_pytest

FOLDER = ROOT / "tests" / "e2e"
KINDS = ("stock", "patched")
# One model of each kind, with and without a drafter; one minute with its start.
QUICK = (
    "test_restore.py::test_resend[gemma-1-300]",
    "test_restore.py::test_resend[exaone-full-drafter-1-300]",
    "test_faults.py::test_another_prompts_chunk_is_noticed[exaone-full-drafter-1]",
)


def tests(
    release: Release, env: E2eEnv, kind: str, jobs: int, quick: bool = False
) -> Callable[[Progress], Result]:
    """The tests for a stock or a patched package, as work for a report."""

    def work(progress: Progress) -> Result:
        log = report_log(release, f"e2e-{kind}{'-quick' if quick else ''}")
        path = [env.stock] if kind == "stock" else []
        run = run_pytest(
            env, FOLDER, ["."], log, jobs=jobs, progress=progress,
            only=QUICK if quick else None,
            python_path=(*path, FOLDER.parent),
            variables={"E2E_TREE": kind},
        )  # fmt: skip
        return judge(run, len(QUICK) if quick else None)

    return work


def judge(run: Run, expected: int | None = None) -> Result:
    """A run as a result: what passed, by engine, what failed, what could not run."""
    states = Counter(outcome.outcome for outcome in run.outcomes.values())
    findings = [
        f"{o.outcome}: {o.id}: {o.said}"
        for o in run.outcomes.values()
        if o.outcome not in ("passed", "skipped")
    ]
    findings += [f"{path}: {why}" for path, why in run.collect_errors.items()]
    if missing := max(expected or 1, len(run.collected)) - len(run.outcomes):
        findings.append(f"{missing} tests did not end")
    detail = f"{states['passed']} of {len(run.collected)} passed"
    for why in dict.fromkeys(o.message for o in not_run(run)):
        engines = sorted({engine_of(o) for o in not_run(run) if o.message == why})
        detail += f"; not run: {', '.join(engines)}: {why}"
    return Result(
        not findings, detail, [one_line(x)[:400] for x in findings], [run.log]
    )


def not_run(run: Run) -> list[Outcome]:
    """What this machine cannot run."""
    return [o for o in run.outcomes.values() if o.outcome == "skipped"]


def engine_of(outcome: Outcome) -> str:
    """The model and the chunk factor in a test's id, without the length."""
    match = re.search(r"\[([\w-]+-[12])(?:-\d+)?\]", outcome.id)
    return match[1] if match else outcome.id
