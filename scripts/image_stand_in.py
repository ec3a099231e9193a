# SPDX-License-Identifier: Apache-2.0
"""Build and check every target of docker/Dockerfile on a stand-in for vLLM's image.

With Buildah and debootstrap, as root; no image registry and no GPU are needed.
"""

import shutil
import sys
from collections.abc import Callable

import click

from offload_parity import cli as scripts
from offload_parity import (
    image_checks,
    stand_in,
    unit_env,
)
from offload_parity import release as releases
from offload_parity.paths import build_root, shown
from offload_parity.report import Report, Result
from offload_parity.stand_in import Builder


@click.command(help=__doc__)
@click.option("--release", help="The release to test whole; default: the newest.")
@click.option("--keep", is_flag=True, help="Keep the images, to look at them.")
@click.option("--only", help="Only the steps whose name has this.")
def cli(release: str | None, keep: bool, only: str | None) -> None:
    """Run the checks and print the table; the images are removed."""
    newest = releases.get(release)
    stand_in.check_machine()
    env = unit_env.ensure()
    folder = build_root() / "image-stand-in"
    folder.mkdir(parents=True, exist_ok=True)
    logs = build_root() / "reports"
    logs.mkdir(exist_ok=True)
    builder = Builder(folder, env)
    report = Report()

    def step(group: str, name: str, work: Callable[[], Result]) -> None:
        if not only or only in name or name == "Debian with Python":
            report.run(group, name, lambda _: work())

    def debian() -> Result:
        if not (keep and builder.engine.has(stand_in.DEBIAN)):
            builder.debian()
        return Result(True, stand_in.DEBIAN)

    try:
        step("stand-in", "Debian with Python", debian)
        for wanted in releases.supported():
            log = logs / f"image-{wanted.version}.log"
            log.unlink(missing_ok=True)
            stand = image_checks.Stand(builder, wanted, log)
            group = f"vLLM {wanted.version}"
            checks: list[tuple[str, Callable[..., Result]]] = [
                ("serve", image_checks.serve),
                ("runs", image_checks.runs),
                ("mounted", image_checks.mounted),
            ]
            if wanted == newest:
                checks += [
                    ("reproducible", image_checks.reproducible),
                    ("failures", image_checks.failures),
                    ("probe", lambda stand: image_checks.probed(stand, env)),
                    ("compiled", image_checks.compiled),
                    ("test", image_checks.tests),
                    ("test, broken", image_checks.broken),
                ]
            for name, check in checks:
                step(group, name, lambda check=check, stand=stand: check(stand))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    click.echo(f"\n{report.summary()}\nlogs: {shown(logs)}/image-*.log")
    if not report.ok:
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
