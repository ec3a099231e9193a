# SPDX-License-Identifier: Apache-2.0
"""The environment of vLLM's unit tests, built from wheels that the test makes."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from offload_parity import release, unit_env
from offload_parity.errors import UserError
from offload_parity.unit_env import Needs, UnitEnv

REQUIREMENTS = """\
# comment
numpy
torch == 2.14.0
torchvision==0.1  # comes with torch
transformers >= 5.16.1, < 5.21.0  # why
six>=1.16.0; python_version > '3.11'

"""
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
WHEEL = """\
Wheel-Version: 1.0
Generator: test
Root-Is-Purelib: true
Tag: py3-none-any
"""
OFFLINE = """\
WARNING: Retrying after connection broken by 'NewConnectionError(...)'
ERROR: No matching distribution found for torch==2.13.0
"""
NEEDS = Needs("3.11", "torch==2.13.0", ("transformers>=1",), ())


def wheel(folder: Path, name: str, version: str, code: str) -> None:
    """Write a wheel of one module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": METADATA.format(name=name, version=version),
        f"{info}/WHEEL": WHEEL,
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as out:
        for path, text in [*files.items(), (f"{info}/RECORD", record)]:
            out.writestr(path, text)


# What transformers' OPTConfig does with the arguments that the environment gives it.
TRANSFORMERS = """\
import json, pathlib
class OPTConfig:
    def __init__(self, **facts):
        self.facts = facts
    def save_pretrained(self, folder):
        pathlib.Path(folder, "config.json").write_text(json.dumps(self.facts))
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build folder; pip sees nothing but three small wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "torch", "2.13.0", "")
    wheel(wheels, "torch", "2.14.0", "")
    wheel(wheels, "transformers", "5.17.0", TRANSFORMERS)
    for name in [*os.environ]:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    # An environment of its own: a user's wish to install elsewhere does not count.
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("OFFLOAD_PARITY_BUILD", str(tmp_path / "build"))
    (tmp_path / "build").mkdir()
    return tmp_path / "build"


@pytest.fixture
def newest() -> release.Release:
    return release.default()


def test_needs_leave_torch_lines_and_comments_out(newest) -> None:
    needs = unit_env.needs_of(newest, REQUIREMENTS)
    assert needs.requirements == (
        "numpy",
        "transformers >= 5.16.1, < 5.21.0",
        "six>=1.16.0; python_version > '3.11'",
    )
    assert needs.torch == newest.unit_tests.torch
    assert set(newest.unit_tests.packages) < set(needs.packages)


def test_key_names_the_needs() -> None:
    assert NEEDS.key == replace(NEEDS).key
    others = [
        replace(NEEDS, python="3.12"),
        replace(NEEDS, torch="torch==2.14.0"),
        replace(NEEDS, requirements=("transformers>=2",)),
        replace(NEEDS, packages=("pytest",)),
    ]
    assert len({NEEDS.key, *(other.key for other in others)}) == 5


def test_build_once_and_again_after_an_interruption(build: Path, capsys) -> None:
    root = build / "unit-env-x"
    env = unit_env.build(NEEDS, root)
    out = capsys.readouterr().out
    assert "torch==2.13.0" in out
    assert "GB to download" in out
    asked = (
        "import json, torch\nfrom importlib.metadata import entry_points, version\n"
        "(plugin,) = entry_points(group='vllm.platform_plugins')\n"
        "print(json.dumps([version('torch'), plugin.load()()]))"
    )
    done = subprocess.run(
        [env.python, "-c", asked], capture_output=True, check=True, env=env.variables()
    )
    assert json.loads(done.stdout) == ["2.13.0", "vllm.platforms.cpu.CpuPlatform"]
    (config,) = root.glob("hf-home/hub/models--facebook--opt-125m/snapshots/*/*.json")
    assert json.loads(config.read_text())["max_position_embeddings"] == 1_048_576
    revision = root / "hf-home/hub/models--facebook--opt-125m/refs/main"
    assert revision.read_text() == config.parent.name

    (root / "mine").touch()
    assert unit_env.build(NEEDS, root) == env
    assert capsys.readouterr().out == ""
    assert (root / "mine").exists()

    (root / "finished.json").unlink()
    unit_env.build(NEEDS, root)
    assert "not finished" in capsys.readouterr().out
    assert not (root / "mine").exists()
    assert (root / "finished.json").exists()


def test_environment_whose_python_is_gone_is_built_again(build: Path, capsys) -> None:
    root = build / "unit-env-x"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(build / "gone")
    (root / "finished.json").touch()
    env = unit_env.build(NEEDS, root)
    assert (
        subprocess.run([env.python, "-c", "import torch"], check=False).returncode == 0
    )


def test_no_torch_for_this_python_is_one_line(build: Path) -> None:
    root = build / "unit-env-x"
    with pytest.raises(
        UserError, match=r"torch==9\.9 for Python 3\.\d+ on this machine"
    ):
        unit_env.build(replace(NEEDS, torch="torch==9.9"), root)
    assert not (root / "finished.json").exists()


def test_no_room_is_said_before_anything_is_built(build: Path, monkeypatch) -> None:
    monkeypatch.setattr(unit_env, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(UserError, match="make room"):
        unit_env.build(NEEDS, build / "unit-env-x")
    assert not (build / "unit-env-x").exists()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "make room"),
        (
            OFFLINE,
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "Python 3."),
        ("x\nERROR: first\nERROR: xgrammar conflicts\ny", "xgrammar conflicts"),
        ("configuration: option timeout: invalid value: 'abc'", "option timeout"),
        ("", "see above"),
    ],
)
def test_pip_failures_are_explained(said: str, line: str) -> None:
    assert line in unit_env.explain(said, Path("pip.log"))


def test_python_settings_of_others_do_not_count(build: Path, monkeypatch) -> None:
    for name in ("PYTHONHOME", "PYTHONPATH"):
        monkeypatch.setenv(name, "/elsewhere")
    env = unit_env.build(NEEDS, build / "unit-env-x")
    assert unit_env.is_ready(env)


def test_link_to_an_unfinished_environment_stays(build: Path) -> None:
    (build / "elsewhere").mkdir()
    (build / "unit-env-x").symlink_to(build / "elsewhere")
    with pytest.raises(UserError, match=r"symbolic link.*remove it and run again"):
        unit_env.build(NEEDS, build / "unit-env-x")
    assert (build / "elsewhere").is_dir()


def test_variables_choose_the_cpu_and_shut_the_hub_out(
    build: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("HTTPS_PROXY", "kept")
    env = UnitEnv(Path(sys.prefix)).variables(Path("/a"), Path("/b"))
    assert "VLLM_PLUGINS" not in env
    assert "PYTEST_ADDOPTS" not in env
    assert env["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])
    assert env["VLLM_TARGET_DEVICE"] == "cpu"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["HTTPS_PROXY"] == "kept"
    # vLLM reads an empty list of devices as "may become visible later".
    assert env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert Path(env["PYTHONPYCACHEPREFIX"]).is_relative_to(build)
