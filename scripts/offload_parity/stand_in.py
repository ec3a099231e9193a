# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's official image, where no registry can be reached.

It is laid out as by the release's own docker/Dockerfile (target vllm-openai): vllm in
the dist-packages of the system's Python, `vllm` in /usr/local/bin, entrypoint `vllm
serve`. The package is the sdist's, without compiled parts; what it imports comes from
the unit tests' environment, which every container mounts; `vllm` shows what it gets.
Debian's Python stands for Ubuntu's.
"""

import csv
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import build_tree, index
from .containers import Engine
from .errors import UserError
from .release import Release
from .unit_env import UnitEnv

NEEDS = {"buildah": "buildah", "debootstrap": "debootstrap"}
DEBIAN = "localhost/stand-in-debian"

# What `vllm serve` gets; a server would start here.
_VLLM = """\
#!/usr/bin/python3
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "uid": os.getuid(), "cwd": os.getcwd()}))
"""
_PATH = (
    "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
_CLEAN = (
    "var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale",
    "usr/share/man", "var/log",
)  # fmt: skip


def check_machine() -> None:
    """Refuse a machine on which no image can be built.

    Raises:
        UserError: it lacks a program or the right to.
    """
    if sys.platform != "linux" or os.geteuid():
        raise UserError(
            "the stand-in image needs root on Linux (debootstrap, chroot): run it with "
            "sudo"
        )
    missing = [package for name, package in NEEDS.items() if not shutil.which(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be installed (Debian and Ubuntu: apt "
            f"install {' '.join(missing)})"
        )


def _engine(folder: Path) -> Engine:
    """Buildah, with overlaid layers where the machine can do that."""
    wanted = os.environ.get("STORAGE_DRIVER")
    for driver in [wanted] if wanted else ["overlay", "vfs"]:
        # Another's storage in the same folder would be refused.
        words = f"buildah --root {folder}/{driver} --runroot {folder}/{driver}-run"
        engine = Engine(f"{words} --storage-driver {driver}")
        if engine.works():
            return engine
    raise UserError("buildah has no storage that works here: set STORAGE_DRIVER")


class Builder:
    """Buildah with images and containers of its own, in one folder."""

    def __init__(self, folder: Path, env: UnitEnv) -> None:
        self.folder = folder
        os.environ.setdefault("BUILDAH_ISOLATION", "chroot")
        self.engine = _engine(folder)
        (self._site,) = (env.root / "lib").glob("python*/site-packages")
        self.python = self._site.parent.name
        self.dist = f"/usr/local/lib/{self.python}/dist-packages"
        # Read-only there, too: no container may change the environment.
        self.mount = f"{self._site}:/opt/stand-in:ro"

    @property
    def options(self) -> tuple[str, ...]:
        """For builds: what the package imports."""
        return ("--volume", self.mount)

    def ask(self, *words: str) -> str:
        """What a command of Buildah's prints.

        Raises:
            UserError: it failed; the message is the last line it said.
        """
        done = subprocess.run(
            [*self.engine.words, *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"buildah {words[0]}: {last[0]}")
        return done.stdout.strip()

    def run(
        self, container: str, *words: str, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return subprocess.run(
            [*self.engine.words, "run", "-v", self.mount, *options, container, "--",
             *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    @contextmanager
    def container(self, image: str) -> Iterator[tuple[str, Path]]:
        """A container of an image, and the folder that holds its files."""
        with self.engine.container(image) as name:
            yield name, Path(self.ask("mount", name))

    def debian(self) -> None:
        """Make the image that has Python only.

        Raises:
            UserError: debootstrap failed, or its Python is not the environment's.
        """
        suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
        with self.engine.container("scratch") as name:
            root = Path(self.ask("mount", name))
            log = self.folder / "debootstrap.log"
            with log.open("wb") as out:
                done = subprocess.run(
                    ["debootstrap", "--variant=minbase",
                     "--include=python3,python3-pip,python3-venv", suite, root],
                    stdout=out, stderr=subprocess.STDOUT, check=False,
                )  # fmt: skip
            if done.returncode:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise UserError(f"debootstrap failed: {''.join(last)}; its log: {log}")
            if not (root / "usr/bin" / self.python).exists():
                raise UserError(
                    f"{suite} has another Python than the environment of the unit "
                    f"tests ({self.python}): build that with the system's python3"
                )
            for place in _CLEAN:
                shutil.rmtree(root / place, ignore_errors=True)
                (root / place).mkdir()
            for file in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                file.unlink()
            (root / "opt/stand-in").mkdir()
            self.ask("commit", "--quiet", name, DEBIAN)

    def base(self, release: Release) -> str:
        """Make the stand-in of a release's official image and return its name."""
        image = f"localhost/stand-in:{release.version}"
        with self.container(DEBIAN) as (name, root):
            dist = root / self.dist.lstrip("/")
            self._install(release, dist)
            (dist / "stand-in.pth").write_text("/opt/stand-in\n")
            script = root / "usr/local/bin/vllm"
            script.write_text(_VLLM)
            script.chmod(0o755)
            (root / "vllm-workspace").mkdir()
            # As the official image, which has bytecode of everything.
            self.run(name, "python3", "-m", "compileall", "-q", f"{self.dist}/vllm/v1")
            self.ask(
                "config", "--entrypoint", '["vllm", "serve"]',
                "--workingdir", "/vllm-workspace", "--env", f"PATH={_PATH}",
                "--env", "VLLM_USAGE_SOURCE=production-docker-image",
                "--label", "ai.vllm.image.tag=stand-in", name,
            )  # fmt: skip
            self.ask("commit", "--quiet", name, image)
        return image

    def _install(self, release: Release, dist: Path) -> None:
        """Put the sdist's package where pip puts the wheel's."""
        unpacked = self.folder / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()
        tree = build_tree.unpack(index.fetch(release), unpacked)
        dist.mkdir(parents=True, exist_ok=True)
        shutil.move(tree / "vllm", dist / "vllm")
        info = dist / f"vllm-{release.version}.dist-info"
        info.mkdir()
        shutil.copy(tree / "vllm.egg-info" / "PKG-INFO", info / "METADATA")
        shutil.copy(tree / "vllm.egg-info" / "entry_points.txt", info)
        (info / "INSTALLER").write_text("uv\n")
        files = [p for p in dist.rglob("*") if p.is_file() and p.parent != dist]
        names = [str(path.relative_to(dist)) for path in files]
        names.append(f"{info.name}/RECORD")
        with (info / "RECORD").open("w", newline="") as out:
            csv.writer(out).writerows([name, "", ""] for name in sorted(names))
        shutil.rmtree(unpacked)
