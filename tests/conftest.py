# SPDX-License-Identifier: Apache-2.0
"""Two tiny made-up vLLM releases with a series each, and checkouts of them."""

import gzip
import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import fake_server
import series
from fake_server import FakeServer
from offload_parity import build_tree, cli, exporting, release

# A job in the background ignores Ctrl-C, and so would the programs interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
NEW, OLD = "9.9.0", "9.8.0"
MASK = "vllm/v1/core/mask.py"
STORE = "vllm/distributed/store.py"
REACH = "vllm/v1/core/reach/positions.py"
GONE = "vllm/old_mask.py"
TEST = "tests/v1/test_mask.py"
TITLES = (
    "[KVConnector][Bugfix] One mask",
    "[Core] A title that is so long that git has to fold it, größer als 78 Zeichen",
    "[KVConnector] Store what the mask says",
    "[Test] Only a test",
)
AUTHOR = ("Zoë Ångström, PhD", "zoe@example.org")

_FACTS = """\
version = "{version}"
upstream_commit = "abc123"
[sdist]
name = "vllm-{version}.tar.gz"
sha256 = "{sha256}"
[unit_tests]
python = "3.11"
torch = "torch==0"
requirements = "requirements/common.txt"
packages = ["pytest"]
paths = ["tests"]
[lint]
ruff = "ruff==0.14.0"
[deepseek_v4]
block_bytes = 1000
"""


def text(name: str, changes: dict[int, str] | None = None, lines: int = 60) -> str:
    """A file of numbered lines, some of them changed."""
    return "".join(
        f"{(changes or {}).get(n, f'{name}_{n} = {n}')}\n" for n in range(1, lines + 1)
    )


def stock_files(version: str) -> dict[str, str]:
    """The files of a made-up release."""
    odd = {} if version == NEW else {40: "only_in_the_old_release = 1"}
    return {
        "vllm/__init__.py": '"""vLLM"""\n',
        "vllm/_version.py": f"version = '{version}'\n",
        "vllm/v1/__init__.py": "",
        MASK: text("mask", odd),
        STORE: text("store", odd),
        GONE: text("gone", lines=5),
        TEST: text("test"),
        "tests/with space/ünïcode.txt": "here\n",
        "tools/run.sh": "#!/bin/sh\n",
        # As vLLM's: some files of the sdist are ignored in its repository.
        ".gitignore": "__pycache__/\nvllm/_version.py\n",
        "PKG-INFO": f"Name: vllm\nVersion: {version}\n",
    }


def write(tree: Path, files: dict[str, str]) -> None:
    """Write ``files`` into ``tree``."""
    for name, content in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    if "tools/run.sh" in files:
        (tree / "tools/run.sh").chmod(0o755)


def sdist(version: str, files: dict[str, str] | None = None) -> bytes:
    """An sdist of a made-up release."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in (files or stock_files(version)).items():
            data = content.encode()
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(data)
            info.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue(), mtime=0)


def git(tree: Path, *args: str, **env: str) -> str:
    """Run git as a user would, with no configuration but the repository's."""
    who = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in zip(("NAME", "EMAIL"), AUTHOR, strict=True)
    }
    done = subprocess.run(
        ("git", *args),
        cwd=tree,
        env=os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"git {args}: {done.stdout}{done.stderr}"
    return done.stdout.rstrip("\n")


def commit(tree: Path, message: str, files: dict[str, str | None]) -> str:
    """Commit ``files`` (None: removed) and return the commit's id."""
    for name, content in files.items():
        if content is None:
            (tree / name).unlink()
        else:
            write(tree, {name: content})
        git(tree, "add", "-A", "-f", "--", name)
    git(tree, "commit", "-q", "-m", message)
    return git(tree, "rev-parse", "HEAD")


def steps(version: str) -> list[tuple[str, dict[str, str | None]]]:
    """The commits of the made-up series."""
    odd = {} if version == NEW else {40: "only_in_the_old_release = 1"}
    mask = {10: "one_mask = 10", **odd}
    store = {20: "store_mask = 20", **odd}
    test = {5: "new_test = 5"}
    return [
        (
            f"{TITLES[0]}\n\nWhat was wrong.\n\nFails on the release:\n  t::x: 1\n",
            {
                MASK: text("mask", mask),
                STORE: text("store", store),
                TEST: text("test", test),
            },
        ),
        (
            TITLES[1],
            {
                MASK: text("mask", mask | {30: "from_reach = 30"}),
                REACH: "positions = []",
            },
        ),
        (
            TITLES[2],
            {
                STORE: text("store", store | {20: "store_mask = 21\nmore = 1"}),
                GONE: None,
            },
        ),
        (TITLES[3], {TEST: text("test", test | {50: "last = 50"})}),
    ]


@dataclass
class World:
    """The folders of one test, and this project's commands run on them."""

    root: Path
    capsys: pytest.CaptureFixture | None = field(default=None, repr=False)
    monkeypatch: pytest.MonkeyPatch | None = field(default=None, repr=False)
    started: list[subprocess.Popen] = field(default_factory=list, repr=False)

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def environment(self) -> dict[str, str]:
        return {
            "OFFLOAD_PARITY_PATCHES": str(self.patches),
            "OFFLOAD_PARITY_BUILD": str(self.build),
            "OFFLOAD_PARITY_CACHE": str(self.cache),
        }

    def run(self, *args: str) -> tuple[int, str, str]:
        """Run a command of series.py in this process: exit code, stdout, stderr."""
        return self.run_script(series, *args)

    def run_script(self, script: ModuleType, *args: str) -> tuple[int, str, str]:
        """Run a script in this process: exit code, stdout, stderr."""
        words = [f"{script.__name__}.py", *map(str, args)]
        self.monkeypatch.setattr(sys, "argv", words)
        self.capsys.readouterr()
        code = 0
        try:
            cli.run(script.cli)
        except SystemExit as error:
            code = error.code or 0
        out, err = self.capsys.readouterr()
        return code, out, err

    def good(self, *args: str) -> str:
        """Run a command that must succeed and return what it printed."""
        code, out, err = self.run(*args)
        assert (code, err) == (0, ""), (code, out, err)
        return out

    def refused(self, *args: str) -> str:
        """Run a command that must fail with one line on stderr and return that."""
        code, out, err = self.run(*args)
        assert code == 1, (code, out, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return err

    def start(self, *args: str, **options) -> subprocess.Popen:
        """Start a command as a process of its own."""
        env = os.environ | self.environment() | options.pop("env", {})
        run = subprocess.Popen(
            (sys.executable, str(ROOT / "scripts/series.py"), *map(str, args)),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.started.append(run)
        return run


def small_files() -> None:
    """In a child: no file may grow past 300 bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))


def add_release(
    world: World, version: str, files: dict[str, str] | None = None
) -> None:
    """Give a world a release with its sdist in the cache and no patch yet."""
    data = sdist(version, files)
    world.cache.mkdir(exist_ok=True)
    (world.cache / f"vllm-{version}.tar.gz").write_bytes(data)
    folder = world.patches / version
    folder.mkdir(parents=True)
    (folder / "release.toml").write_text(
        _FACTS.format(version=version, sha256=hashlib.sha256(data).hexdigest())
    )
    (folder / "series").write_text("# in order\n")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A fake vLLM server."""
    with fake_server.running() as fake:
        yield fake


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose series were made as a maintainer makes them: commits, export."""
    world = World(tmp_path_factory.mktemp("template"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environment().items():
            patch.setenv(name, value)
        for version in (NEW, OLD):
            add_release(world, version)
            wanted = release.get(version)
            tree = build_tree.ensure_patched(wanted)
            for message, files in steps(version):
                commit(tree, message, files)
            exporting.export(wanted)
    shutil.rmtree(world.build)
    return world


@pytest.fixture
def world(
    template: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """A fresh copy of the template: two releases, both sdists in the cache."""
    world = World(tmp_path / "world", capsys, monkeypatch)
    shutil.copytree(template.root, world.root)
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    # No test may reach a real index, nor read the user's git configuration.
    for name in [*os.environ]:
        if name.startswith(("PIP_", "GIT_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    yield world
    for run in world.started:
        run.kill()
        run.communicate()


def upstream(folder: Path, version: str) -> Path:
    """A clone of a made-up vLLM at a release: some history, ignored files left out."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    files = stock_files(version)
    early = files | {MASK: text("mask", {10: "older = 1", 30: "older = 2"})}
    write(folder, early)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Earlier")
    write(folder, files)
    git(folder, "commit", "-q", "-am", f"Release {version}")
    git(folder, "tag", f"v{version}")
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Callable[..., Path]:
    """Make a checkout of a made-up release; its path has a space in it."""

    def make(version: str = NEW, name: str = "my vllm") -> Path:
        return upstream(tmp_path / "clones" / name, version)

    return make


def files_of(tree: Path) -> dict[str, tuple]:
    """Every file outside .git: its bytes, mode and (a link's) target."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if name.parts[0] == ".git" or (path.is_dir() and not path.is_symlink()):
            continue
        link = path.readlink() if path.is_symlink() else None
        found[str(name)] = (path.read_bytes(), path.lstat().st_mode, link)
    return found


def snapshot(tree: Path) -> dict[str, object]:
    """Everything about a checkout that a refusal must leave alone."""
    names = ("rebase-apply", "rebase-merge", "MERGE_HEAD", "sequencer", "worktrees")
    place = Path(git(tree, "rev-parse", "--absolute-git-dir"))
    return {
        "HEAD": git(tree, "rev-parse", "HEAD"),
        "HEAD file": (place / "HEAD").read_text(),
        "refs": git(tree, "for-each-ref"),
        "status": git(tree, "status", "--porcelain=v2", "-uall", "--ignored"),
        "index": git(tree, "ls-files", "-s"),
        "config": git(tree, "config", "--list", "--local"),
        "worktrees": git(tree, "worktree", "list"),
        "stash": git(tree, "stash", "list"),
        "in progress": {n: files_of(place / n) for n in names if (place / n).exists()},
        "files": files_of(tree),
    }


@pytest.fixture
def unchanged() -> Iterator[Callable[[Path], None]]:
    """Mark a checkout; at the end of the test it must be as it was when marked."""
    before = {}

    def mark(tree: Path) -> None:
        before[tree] = snapshot(tree)

    yield mark
    assert before, "the test marked nothing"
    for tree, was in before.items():
        assert snapshot(tree) == was
