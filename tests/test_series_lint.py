# SPDX-License-Identifier: Apache-2.0
"""The lint of a series: vLLM's hooks, white space and this project's rules."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import commit, git
from offload_parity import build_tree, patches, series_lint
from offload_parity.errors import UserError
from offload_parity.git import Repo
from offload_parity.series_lint import Finding

CONFIG = {
    "exclude": "vllm/third_party/.*",
    "repos": [
        {
            "repo": "https://example.org/astral-sh/ruff-pre-commit",
            "rev": "v0.14.0",
            "hooks": [{"id": "ruff-check"}],
        },
        {
            "repo": "https://example.org/crate-ci/typos",
            "rev": "v1.43.5",
            "hooks": [{"id": "typos"}],
        },
        {
            "repo": "local",
            "hooks": [
                {"id": "mypy", "language": "python", "entry": "python mypy.py"},
                {"id": "rust", "language": "script", "entry": "rust.sh"},
                {"id": "sign", "language": "system", "entry": "bash"},
            ],
        },
    ],
}


def test_hooks_from_a_git_host_come_in_the_pinned_versions() -> None:
    config = series_lint.local_config(CONFIG, "ruff==0.14.0")
    (repo,) = config["repos"]
    assert repo["repo"] == "local"
    assert config["exclude"] == CONFIG["exclude"]
    needs = {h["id"]: h.get("additional_dependencies") for h in repo["hooks"]}
    assert needs == {
        "ruff-check": ["ruff==0.14.0"],
        "ruff-format": ["ruff==0.14.0"],
        "typos": ["typos==1.43.5"],
        "mypy": None,
    }


def test_ruff_pinned_otherwise_than_in_the_facts_is_said() -> None:
    with pytest.raises(UserError, match=r"ruff==0\.13\.0.*0\.14\.0"):
        series_lint.local_config(CONFIG, "ruff==0.13.0")


def test_release_that_pins_no_ruff_is_said() -> None:
    with pytest.raises(UserError, match="ruff-pre-commit"):
        series_lint.local_config({"repos": CONFIG["repos"][2:]}, "ruff==0.14.0")


OUTPUT = """\
[INFO] Installing environment for local.
ruff check................................................Failed
- hook id: ruff-check
- exit code: 1

vllm/a.py:58:89: E501 Line too long (89 > 88)
Found 1 error.

Check SPDX headers....................(no files to check)Skipped
Check imports.............................................Passed
- duration: 3.0s
"""


def test_output_of_pre_commit_is_read() -> None:
    assert list(series_lint.sections(OUTPUT)) == [
        (
            "ruff check",
            "Failed",
            ["vllm/a.py:58:89: E501 Line too long (89 > 88)", "Found 1 error."],
        ),
        ("Check SPDX headers", "Skipped", []),
        ("Check imports", "Passed", []),
    ]


def test_only_what_stock_does_not_have_counts() -> None:
    stock = ["vllm/a.py:10: error: no x  [attr]", "Found 1 error in 1 file"]
    mine = [
        "vllm/a.py:12: error: no x  [attr]",
        "vllm/a.py:40: error: no x  [attr]",
        "vllm/a.py:41: note: see there",
        "Found 2 errors in 1 file",
    ]
    assert series_lint.new_lines(mine, stock) == [
        ("vllm/a.py:40", "error: no x  [attr]")
    ]
    assert series_lint.new_lines(stock, stock) == []


def test_hook_that_names_no_line_is_quoted() -> None:
    said = ["The following files are missing the SPDX header:", "  vllm/a.py"]
    assert series_lint.new_lines(said, []) == [
        ("", "The following files are missing the SPDX header:"),
        ("", "vllm/a.py"),
    ]
    assert series_lint.new_lines(["Would reformat: vllm/a.py", "1 file"], []) == [
        ("vllm/a.py", "would be reformatted")
    ]


GOOD = """\
def old(values):
    return list(zip(values, values))


class Store:
    def keep(self):
        return 1
"""
BAD = (
    GOOD
    + '''
    def lose(self):
        def inside():
            return 2

        return inside()

    def said(self):
        """Say it."""
        return 3


async def new(values):
    return [a + b for a, b in zip(values, values)]


def strict(values):
    """Add them."""
    return [a + b for a, b in zip(values, values, strict=True)]
'''
)


def test_own_rules_look_at_what_is_new_only() -> None:
    added = set(range(GOOD.count("\n") + 1, BAD.count("\n") + 1))
    assert series_lint.own_rules(GOOD, BAD, added) == [
        (9, "Store.lose is new and has no docstring"),
        (20, "new is new and has no docstring"),
        (21, "zip() without strict="),
    ]
    assert series_lint.own_rules(BAD, BAD, set()) == []


RUFF = '[tool.ruff.lint]\nselect = ["E", "F"]\n'
STOCK = {
    "vllm/mask.py": 'import os\n\nOLD = "' + "x" * 90 + '"\n',
    "pyproject.toml": RUFF,
    ".pre-commit-config.yaml": "repos: []\n",
}


@pytest.fixture
def lint(tmp_path: Path, monkeypatch):
    """Make a series of commits and lint it with the tools' own ruff.

    No environment is installed: the hooks are those that the release would have, run
    from where the tools are.
    """
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    tree = tmp_path / "tree"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    commit(tree, "base", STOCK)
    git(tree, "update-ref", build_tree.BASE, "HEAD")
    monkeypatch.setattr(build_tree, "ensure_patched", lambda _: tree)
    monkeypatch.setattr(build_tree, "repo", Repo)
    real = series_lint.local_config

    def config(_: dict, ruff: str) -> dict:
        made = real(CONFIG, ruff)
        kept = [h for h in made["repos"][0]["hooks"] if h["id"].startswith("ruff")]
        for hook in kept:
            hook["language"] = "system"
            del hook["additional_dependencies"]
        return made | {"repos": [{"repo": "local", "hooks": kept}]}

    monkeypatch.setattr(series_lint, "local_config", config)

    def run(*commits: dict[str, str]) -> list[Finding]:
        names = []
        for number, files in enumerate(commits, 1):
            commit(tree, f"patch {number}", files)
            path = tree.parent / f"{number:04}-x.patch"
            path.write_text(str(files))
            names.append(SimpleNamespace(name=path.name, path=path))
        series = SimpleNamespace(patches=names)
        monkeypatch.setattr(patches, "read_series", lambda _: series)
        return series_lint.check(
            SimpleNamespace(version="9.9.0", lint_ruff="ruff==0.14.0")
        )

    return run


def test_clean_series_has_no_findings_though_stock_has(lint) -> None:
    assert lint({"vllm/mask.py": STOCK["vllm/mask.py"] + "NEW = 1\n"}) == []


def test_what_was_found_is_kept_for_this_very_series(lint, monkeypatch) -> None:
    release = SimpleNamespace(version="9.9.0")
    found = lint({"vllm/more.py": "import os\n"})
    assert series_lint.read_report(release) == found and found
    series = SimpleNamespace(patches=[])
    monkeypatch.setattr(patches, "read_series", lambda _: series)
    assert series_lint.read_report(release) is None


def test_line_too_long_is_found_with_its_patch(lint) -> None:
    long = STOCK["vllm/mask.py"] + f"NEW = {'1' * 90}\n"
    found = lint({"vllm/mask.py": long}, {"vllm/more.py": "MORE = 1\n"})
    (too_long,) = [f for f in found if "E501" in f.rule]
    assert (too_long.patch, too_long.where) == ("0001-x.patch", "vllm/mask.py:4")


def test_fault_that_a_later_patch_mends_is_found_all_the_same(lint) -> None:
    found = lint({"vllm/more.py": "import os\n"}, {"vllm/more.py": "MORE = 1\n"})
    assert [(f.patch, f.where) for f in found] == [("0001-x.patch", "vllm/more.py:1")]
    assert "F401" in found[0].rule


def test_layout_white_space_and_docstrings_are_found(lint) -> None:
    found = lint({"vllm/more.py": "def f( a ):\n    return a \n"})
    rules = {(f.where, f.rule) for f in found}
    assert ("vllm/more.py:2", "trailing whitespace.") in rules
    assert ("vllm/more.py:1", "f is new and has no docstring") in rules
    assert any("format" in f.rule for f in found)
    assert {f.patch for f in found} == {"0001-x.patch"}


def test_file_that_is_no_python_is_found(lint) -> None:
    found = lint({"vllm/more.py": "def f(:\n"})
    assert any("is no Python" in f.rule for f in found)
