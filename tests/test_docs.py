# SPDX-License-Identifier: Apache-2.0
"""Every command in README and docs: it is run for real, and its words are right."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import ROOT
from offload_parity import costs, matrix, patches, proof, release
from test_makefile import TARGETS, make, project

__all__ = ["project"]

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=lambda path: path.name
)
CI = ".ci/run"
CHECKS = "scripts/offload_parity/image_checks.py"
STEPS = "scripts/offload_parity/steps.py"
# What runs each command, or what it does: CI, a step of a target that CI runs, a check
# of make image-stand-in, or a test. Commands are named by how they begin.
RUN_BY = {
    "make help": (
        "tests/test_makefile.py",
        "test_help_is_the_default_and_lists_every_target",
    ),
    "make apply": (CI, ""),
    "make fetch": ("tests/test_index.py", "test_downloads_into_the_cache"),
    "make status": ("tests/test_installed.py", "test_apply_and_back"),
    "make unapply": ("tests/test_installed.py", "test_apply_and_back"),
    "make edit": ("tests/test_exporting.py", "test_edit_says_where"),
    "make export": ("tests/test_exporting.py", "test_dropped_and_reworded_commits"),
    "make check": (STEPS, "series"),
    "make port": ("tests/test_porting.py", "test_all_of_it_applies"),
    "make range-diff": (
        "tests/test_range_diff.py",
        "test_series_that_differ_in_one_patch",
    ),
    "make upstream": (CI, ""),
    "make test": (CI, ""),
    "make proof": (STEPS, "proof_of"),
    "make lint": (CI, ""),
    "make each-commit": (CI, ""),
    "make e2e": (CI, ""),
    "make parity": (STEPS, "laws_and_probes"),
    "make fuzz": (CI, ""),
    "make sweep": (
        "tests/parity/test_sweep.py",
        "test_a_sample_is_of_its_size_and_the_same_again",
    ),
    "make bench": (
        "tests/parity/test_bench.py",
        "test_counts_grow_with_what_is_looked_at",
    ),
    "make mutants": (
        "tests/parity/test_planted.py",
        "test_the_first_finding_kills_and_the_function_stays",
    ),
    "make matrix": (STEPS, "matrix_again"),
    "make probe": (CHECKS, "probed"),
    "make serve-sim": (
        "tests/test_sim_server.py",
        "test_it_is_ready_until_it_is_interrupted",
    ),
    "make experiment": (STEPS, "laws_and_probes"),
    "make image": (CHECKS, "serve"),
    "make image-test": (CHECKS, "tests"),
    "make image-probe": (CHECKS, "probed"),
    "make image-status": (CHECKS, "serve"),
    "make image-stand-in": (CI, ""),
    "make clean": ("tests/test_makefile.py", "test_clean_keeps_tools_and_downloads"),
    "make distclean": (
        "tests/test_makefile.py",
        "test_clean_keeps_tools_and_downloads",
    ),
    "docker run": (CHECKS, "mounted"),
    "git -C build/vllm-": (
        "tests/test_exporting.py",
        "test_git_am_of_the_exported_patches_gives_them_again",
    ),
    "docker compose": (
        "tests/test_image.py",
        "test_compose_file_probes_once_the_server_is_healthy",
    ),
}


def blocks(text: str) -> list[str]:
    """The commands in a page's fenced blocks, each as one line."""
    found = []
    for kind, body in re.findall(
        r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    ):
        body = body.replace("\\\n", " ")
        lines = body.splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif kind not in ("sh", "bash"):
            continue
        found += [" ".join(line.partition("  #")[0].split()) for line in lines]
    return [line.partition(" # ")[0] for line in found if line]


def inline(text: str) -> list[str]:
    """The make commands in a page's running text."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(words.split()) for words in re.findall(r"`(make [^`]+)`", text)]


def commands() -> list[str]:
    """Every command of every page, each once."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [*blocks(text), *inline(text)]
    return list(dict.fromkeys(found))


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_commands_are_found() -> None:
    page = (
        "Run `make test`, `x`.\n\n```console\n$ make apply \\\n    A=1\nout\n```\n"
        "```sh\nmake status  # look\ncurl x\n```\n```python\nmake = 1\n```\n"
    )
    assert blocks(page) == ["make apply A=1", "make status", "curl x"]
    assert inline(page) == ["make test"]


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_by_something(command: str) -> None:
    starts = [start for start in RUN_BY if f"{command} ".startswith(f"{start} ")]
    starts += [
        start for start in RUN_BY if start[-1] in "-" and command.startswith(start)
    ]
    assert starts, "name in RUN_BY what runs it"
    path, name = RUN_BY[starts[0]]
    if path == CI:
        ran = re.findall(r"^run .*?(make \S+)", (ROOT / CI).read_text(), re.MULTILINE)
        assert starts[0] in ran
    else:
        assert name in functions(ROOT / path), path


def test_what_runs_commands_is_up_to_date() -> None:
    every = commands()
    unused = [start for start in RUN_BY if not any(c.startswith(start) for c in every)]
    assert not [start for start in unused if start != "make help"]
    assert {start.split()[1] for start in RUN_BY if start.startswith("make ")} == {
        *TARGETS
    }


@cache
def options_of(script: str, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / script, *command, "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_takes_the_command_and_the_script_its_options(
    project: Path, command: str
) -> None:
    """Nothing is run: make says what it would, and the script knows each option."""
    done = make(project, "-n", *command.split()[1:])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for line in done.stdout.splitlines():
        if found := re.search(r"(scripts/\w+\.py)((?: [a-z][a-z-]*)?)(.*)", line):
            script, verb, rest = found.groups()
            known = options_of(script, *verb.split())
            for option in re.findall(r" (--[a-z-]+)", rest):
                assert option in known, (line, option)


def links() -> list[tuple[Path, str]]:
    return [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target
    ]


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda x: Path(x).name)
def test_what_pages_link_to_is_there(page: Path, target: str) -> None:
    assert (page.parent / target).exists()


def test_paths_that_the_readme_names_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"[`\s]((?:scripts|tests|docker|patches|docs)/[\w./*-]+)", text)
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("./")))]
    assert not missing


def test_the_picture_is_one() -> None:
    root = ElementTree.parse(ROOT / "docs/boundaries.svg").getroot()
    words = " ".join("".join(node.itertext()) for node in root)
    assert all(word in words for word in ("boundary", "tail", "peek", "junction"))
    for name in ("stock", "patched"):
        data = (ROOT / f"docs/experiment-{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 60_000


def test_what_make_apply_is_shown_to_say_is_what_it_says(monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_PATCHES", str(ROOT / "patches"))
    series = patches.read_series(release.default())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition("$ make apply\n")[2].partition("```")[0]
    titles = [f"{patch.name[:4]} {patch.title}" for patch in series.patches]
    assert re.findall(r"^  (\d{4} .*)$", shown, re.MULTILINE) == titles
    version = series.release.version
    assert f"Applied {len(titles)} patches to vLLM {version}" in shown
    assert f"vLLM {version} is patched: {len(titles)} patches, series " in text
    digest = patches.series_digest(series)[:12]
    assert set(re.findall(r"series ([0-9a-f]{12})\b", text)) == {digest}


def test_what_it_costs_is_what_make_bench_wrote() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    version = release.default().version
    found = json.loads((ROOT / f"patches/{version}/bench.json").read_text("utf-8"))
    for table in costs.quoted(found).split("\n\n"):
        assert f"\n\n{table}\n" in text


def test_what_make_test_is_shown_to_say_fits_the_series(monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_PATCHES", str(ROOT / "patches"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for each in (release.default(), release.supported()[-1]):
        shown = text.partition(f"\nvLLM {each.version}\n  series ")[2]
        shown = shown.partition("```")[0].partition("\nvLLM ")[0]
        series = patches.read_series(each).patches
        assert f"{len(series)} patches apply" in shown
        messages = [p.path.read_text("utf-8").partition("\n---\n")[0] for p in series]
        claims = sum(len(proof.parse_claims(message)[0]) for message in messages)
        assert f"{claims} new or changed tests" in shown
        passed, skipped, new = map(
            int, re.search(r"(\d+) passed, (\d+) skipped.*?(\d+) new", shown).groups()
        )
        row = matrix.read_row(each)["patched"]["tests"]
        assert (passed + skipped, new) == (row["known"] + row["new"], row["new"])
    for version, number in re.findall(
        r"^vLLM (\S+)\n  series  .* (\d+) patches apply", text, re.MULTILINE
    ):
        assert int(number) == len(patches.read_series(release.get(version)).patches)


def test_what_make_port_is_shown_to_say_counts_the_series(monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_PATCHES", str(ROOT / "patches"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"\$ make port FROM=(\S+) TO=\S+ BACK=1\n", text)
    counts = re.search(
        r"(\d+) patches: (\d+) apply, (\d+) are .* (\d+) conflict, (\d+) apply", text
    )
    total, applied, *others = map(int, counts.groups())
    assert total == len(patches.read_series(release.get(source)).patches)
    assert total == applied + sum(others)
    assert f"release.toml and {applied} patches;" in text


def test_the_changelog_names_every_release(monkeypatch) -> None:
    monkeypatch.setenv("OFFLOAD_PARITY_PATCHES", str(ROOT / "patches"))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(each.version in text for each in release.supported())
