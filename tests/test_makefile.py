# SPDX-License-Identifier: Apache-2.0
"""What a newcomer types: make and its variables."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import MASK, NEW, OLD, ROOT, World, git

TARGETS = (
    *("help", "apply", "fetch", "status", "unapply", "edit", "export", "check"),
    *("port", "range-diff", "upstream"),
    *("test", "proof", "lint", "each-commit", "parity", "fuzz", "sweep", "bench"),
    *("mutants", "matrix", "e2e"),
    *("probe", "serve-sim", "experiment"),
    *("image", "image-test", "image-probe", "image-status", "image-stand-in"),
    *("clean", "distclean"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this project whose tools are those that run the tests."""
    folder = tmp_path / "the project's $copy"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "scripts", folder / "scripts",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    tools = folder / "build" / "tools"
    (tools / "bin").mkdir(parents=True)
    python = tools / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tools / ".ready").touch()
    (tools / ".plots").touch()
    return folder


def make(
    folder: Path, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ("make", *map(str, args)),
        cwd=folder, env=clean | (env or {}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("args", [(), ("help",)])
def test_help_is_the_default_and_lists_every_target(project: Path, args: tuple) -> None:
    # nothing is made or needed for it
    shutil.rmtree(project / "build")
    done = make(project, *args, "HOST_PYTHON=/no/such/python")
    assert (done.returncode, done.stderr) == (0, "")
    listed = re.findall(r"^  ([\w-]+) +\S.*$", done.stdout, re.MULTILINE)
    assert tuple(listed) == TARGETS
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony and tuple(phony[1].split()) == TARGETS


def test_apply_twice(world: World, project: Path) -> None:
    done = make(project, "apply")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Applied 4 patches")
    again = make(project, "apply", f"RELEASE={NEW}")
    assert again.returncode == 0 and again.stdout.startswith("Already applied")


def test_variables_reach_the_script_as_written(
    world: World, project: Path, tmp_path: Path, clone
) -> None:
    odd = 'it\'s a "path" with $HOME $(shell touch ran) `touch ran`; touch ran & #x'
    tree = clone(NEW, odd)
    done = make(project, "apply", f"VLLM={tree}")
    assert done.returncode == 0, done.stderr
    assert "one_mask" in (tree / MASK).read_text()
    assert git(tree, "branch", "--show-current") == f"offload-parity/{NEW}"
    assert not (project / "ran").exists()
    assert make(project, "unapply", f"VLLM={tree}").returncode == 0


def test_variables_of_the_environment_do_not_count(world: World, project: Path) -> None:
    """PYTHON and RELEASE are often set for something else."""
    env = {"PYTHON": sys.executable, "RELEASE": "1.2.3", "VLLM": "/nowhere"}
    done = make(project, "apply", env=env)
    assert done.returncode == 0 and f"vLLM {NEW}" in done.stdout


def test_settings_of_python_do_not_reach_the_tools(
    world: World, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('another click')")
    for name, value in (("PYTHONPATH", str(tmp_path)), ("PYTHONSAFEPATH", "1")):
        done = make(project, "status", env={name: value})
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("apply", "RELEASE=1.2.3"), "vLLM 1.2.3 is not supported"),
        (("apply", "VLLM=x", "PYTHON=y"), "give one of them"),
        (("fetch", "VLLM=x"), "make fetch takes no VLLM="),
        (("check", "PYTHON=x"), "make check takes no PYTHON="),
        (("probe", "URL=http://127.0.0.1:1"), "http://127.0.0.1:1: no connection"),
        (("port", "FROM=1.2.3", "TO=9.9.9"), "); choose one with FROM="),
        (("port", f"FROM={NEW}"), "TO= is missing: make port FROM="),
        (("port", f"FROM={NEW}", "TO=newest"), "TO=newest is no version"),
        (("port", f"FROM={NEW}", f"TO={NEW}"), "are both 9.9.0"),
        (("port", f"FROM={NEW}", f"TO={OLD}"), "give BACK=1"),
        (("port", f"FROM={OLD}", "TO=9.8.1"), "cannot find vllm-9.8.1.tar.gz"),
        (("range-diff", f"A={NEW}"), "B= is missing"),
        (("range-diff", f"A={NEW}", f"B={NEW}"), "A= and B= are both 9.9.0"),
        (("range-diff", f"A={NEW}", "B=1.2.3"), "); choose one with B="),
        (("range-diff", "A=1.2.3", f"B={NEW}"), "); choose one with A="),
        (("serve-sim", "STOCK=maybe"), "STOCK=maybe: give STOCK=1 or leave it out"),
        (("serve-sim", "PROFILE=gpt-2", "MTP=1", "PORT=9"), "'gpt-2' is not one of"),
    ],
)
def test_refusals_are_one_line_and_no_success(
    world: World, project: Path, args: tuple, words: str
) -> None:
    done = make(project, *args)
    assert done.returncode == 2  # make's own code for a recipe that failed
    lines = done.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert words in done.stderr and "Traceback" not in done.stderr
    assert all(line.startswith(("error: ", "make: ")) for line in lines), lines


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("test", "RELEASED=0.25.1"), "unknown variable RELEASED=; known: RELEASE"),
        (("apply", "release=0.25.1"), "unknown variable release=; known: RELEASE"),
        (("test", "VLLM=x"), "make test takes no VLLM=: leave it out"),
        (("clean", "RELEASE=0.25.1"), "make clean takes no RELEASE=: leave it out"),
        (("probe", "PORT=1"), "make probe takes no PORT=: leave it out"),
        (("serve-sim", "URL=x"), "make serve-sim takes no URL=: leave it out"),
        (("apply", "SEED=1"), "make apply takes no SEED=: leave it out"),
        (("check", "FROM=0.25.1"), "make check takes no FROM=: leave it out"),
        (("apply", "VLLM="), "VLLM= is empty: give it a value or leave it out"),
        (("fuzz", "SECONDS=1", "RELEASE= "), "RELEASE= is empty: give it a value"),
        (("matrix", "TABLE="), "TABLE= is empty: give it a value or leave it out"),
    ],
)
def test_variable_that_would_have_no_effect_is_refused(
    project: Path, args: tuple, words: str
) -> None:
    done = make(project, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_usage_error_of_the_script_is_exit_code_2(world: World) -> None:
    code, out, err = world.run("apply", "--nonsense")
    assert (code, out) == (2, "") and err.startswith("error: ")


def test_old_python_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "build/tools/.ready").unlink()
    old = tmp_path / "old"
    old.write_text(
        "#!/bin/sh\nexec "
        f"'{sys.executable}' -c \"import sys; sys.version_info = (3, 9, 1); "
        "sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read(), "
        "{'__name__': '__main__', '__file__': sys.argv[0]})\" \"$@\"\n"
    )
    old.chmod(0o755)
    done = make(project, "status", f"HOST_PYTHON={old}")
    assert done.returncode == 2
    assert "error: Python 3.11 or newer is needed" in done.stderr
    assert "HOST_PYTHON=" in done.stderr and "Traceback" not in done.stderr


def test_missing_python_is_refused(project: Path) -> None:
    (project / "build/tools/.ready").unlink()
    done = make(project, "status", "HOST_PYTHON=no-such-python")
    assert done.returncode == 2 and "no-such-python is not there" in done.stderr


def test_missing_venv_module_is_refused(project: Path, tmp_path: Path) -> None:
    """As on Debian without python3-venv."""
    (project / "build/tools/.ready").unlink()
    (tmp_path / "ensurepip.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'ensurepip'\", name='ensurepip')"
    )
    done = make(
        project, "status", f"HOST_PYTHON={sys.executable}",
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "lacks the module ensurepip" in done.stderr and "python3-venv" in done.stderr


def test_tools_that_cannot_be_installed(project: Path) -> None:
    """No network: a clear end, and the next run tries again."""
    (project / "build/tools/.ready").unlink()
    done = make(
        project, "status", f"HOST_PYTHON={sys.executable}",
        env={"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: the tools could not be installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "build/tools/.ready").exists()


def test_tools_are_not_installed_again_without_need(project: Path) -> None:
    """Offline after a git checkout, which gives files a new time."""
    ready = project / "build/tools/.ready"
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    version = ".".join(map(str, sys.version_info[:3]))
    ready.write_text("\n".join([version, *pins["tools"]]))
    os.utime(ready, (0, 0))
    args = ("check", "VLLM=x", f"HOST_PYTHON={sys.executable}")
    done = make(project, *args, env={"PIP_NO_INDEX": "1"})
    assert "make check takes no VLLM=" in done.stderr
    assert "Installing" not in done.stdout and ready.stat().st_mtime > 0


def test_the_pictures_need_one_package_more(project: Path) -> None:
    """It is installed with the first experiment, and not again."""
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    version = ".".join(map(str, sys.version_info[:3]))
    tools = project / "build/tools"
    (tools / ".ready").write_text("\n".join([version, *pins["tools"]]))
    args = ("experiment", "RELEASE=1.2.3", f"HOST_PYTHON={sys.executable}")
    no_network = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    (tools / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    done = make(project, *args, env=no_network)
    assert "Installing matplotlib" in done.stdout
    assert "error: the tools could not be installed" in done.stderr
    (tools / ".plots").write_text("\n".join([version, *pins["plots"]]))
    done = make(project, *args, env=no_network)
    assert "Installing" not in done.stdout and "Error 3" in done.stderr


def test_clean_keeps_tools_and_downloads(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFLOAD_PARITY_BUILD")
    make(project, "apply")
    (world.cache / "mine.txt").write_text("not ours")
    assert (project / "build" / f"vllm-{NEW}").is_dir()
    done = make(project, "clean", f"HOST_PYTHON={sys.executable}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [p.name for p in (project / "build").iterdir()] == ["tools"]
    assert (world.cache / f"vllm-{NEW}.tar.gz").exists()
    done = make(project, "distclean", f"HOST_PYTHON={sys.executable}")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (project / "build").exists()
    assert [p.name for p in world.cache.iterdir()] == ["mine.txt"]
    assert make(project, "distclean", f"HOST_PYTHON={sys.executable}").returncode == 0


def test_interrupted_clean_leaves_no_tree_under_its_name(
    world: World, project: Path
) -> None:
    make(project, "apply")
    # the programs of this test stop before the first file is removed
    code = (
        "import shutil, sys; sys.path.insert(0, 'scripts'); sys.argv = ['clean.py']\n"
        "def stop(_): raise KeyboardInterrupt\n"
        "shutil.rmtree = stop\n"
        "import clean; clean.main()"
    )
    subprocess.run(
        (sys.executable, "-c", code), cwd=project, capture_output=True, check=False
    )
    assert not (world.build / f"vllm-{NEW}").exists()
    assert (world.build / f".building-vllm-{NEW}").is_dir()
    assert make(project, "apply").stdout.startswith("Applied 4 patches")
    assert not list(world.build.glob(".building-*"))
    done = make(project, "clean", f"HOST_PYTHON={sys.executable}")
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(world.build.glob("*"))


def test_clean_touches_only_our_names_in_a_folder_of_the_user(
    world: World, project: Path
) -> None:
    """OFFLOAD_PARITY_BUILD may name a folder with other things in it."""
    make(project, "apply")
    (world.build / "thesis").mkdir()
    make(project, "distclean", f"HOST_PYTHON={sys.executable}")
    assert [p.name for p in world.build.iterdir()] == ["thesis"]
