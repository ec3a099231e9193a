# SPDX-License-Identifier: Apache-2.0
"""The tests of an image: vLLM's own, the laws and the probes, on what it would serve.

They run in a virtual environment that adds pytest to the image's packages. There is no
git: the stock release is unpacked from its sdist, and the series' tests beside it.
"""

import shutil
import sys
from pathlib import Path

import click

from . import build_tree, index, patches, release, steps, unit_env, upstream_tests
from .errors import UserError
from .installed import Package
from .paths import build_root
from .release import Release
from .report import Report, Result
from .unit_env import UnitEnv
from .upstream_tests import Progress


def run(package: Package, version: str, sdist: str, jobs: int | None) -> bool:
    """Run all of them and print the table; whether all are good.

    Raises:
        UserError: ``sdist`` is not the release's.
    """
    wanted = release.get(version)
    archive = Path(sdist)
    if not archive.is_file() or index.sha256(archive) != wanted.sdist_sha256:
        raise UserError(f"{sdist} is not {wanted.sdist_name}: run make image-test")
    jobs = jobs or upstream_tests.default_jobs()
    env = UnitEnv(Path(sys.prefix))
    unit_env.complete(env)
    stock, tests = _trees(wanted, archive)
    report = Report()
    group = f"vLLM {wanted.version} in this image"

    def upstream(progress: Progress) -> Result:
        found, ran = upstream_tests.check_tree(
            wanted, env, stock, tests, "image", jobs, progress
        )
        return steps.describe(found, ran.log)

    report.run(group, "vLLM's tests", upstream)
    on = ["--stock", stock, "--patched", package.folder.parent]
    on += ["--python", env.python, "--jobs", str(jobs)]
    for name, step in steps.laws_and_probes(wanted, env.python, on):
        report.run(group, name, step)
    click.echo(f"\n{report.summary()}")
    return report.ok


def _trees(wanted: Release, archive: Path) -> tuple[Path, Path]:
    """The stock release, and the series' tests without a package of their own."""
    root = build_root()
    shutil.rmtree(root, ignore_errors=True)
    stock, tests = (
        build_tree.unpack(archive, _made(root / name)) for name in ("stock", "patched")
    )
    for name in ("vllm", "vllm.egg-info"):
        shutil.rmtree(tests / name)
    for patch in patches.read_series(wanted).patches:
        for file in patch.files:
            if not file.path.startswith("vllm/"):
                _change(tests / file.path, file)
    return stock, tests


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _change(path: Path, file: patches.FileChange) -> None:
    new = patches.apply_file(path.read_bytes() if path.exists() else None, file)
    if new is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(new)
