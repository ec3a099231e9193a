# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM's container images, on the Python and the packages there.

docker/Dockerfile and docker/serve call it, with this repository mounted.
"""

import sys
from pathlib import Path

try:
    import click

    from offload_parity import cli as scripts
    from offload_parity import image, installed
    from offload_parity.errors import UserError
except ImportError as wrong:
    sys.exit(
        f"error: {sys.executable} (Python {sys.version.split()[0]}) lacks "
        f"{wrong.name}, which every image of vLLM's has: is the base image one?"
    )


def package() -> installed.Package:
    """The vllm that this interpreter imports."""
    try:
        return installed.find(sys.executable)
    except UserError as error:
        raise UserError(f"the image is none of vLLM's: {error}") from error


@click.group(help=__doc__.splitlines()[0])
def cli() -> None:
    """Run one of the commands."""


release_option = click.option("--release", required=True, help="The vLLM release.")
revision_option = click.option(
    "--revision", default="", help="The commit of this project, for the record."
)
series_option = click.option(
    "--series", default="", help="The digest that the series must have."
)


def check_series(release: str, series: str) -> None:
    """Refuse a label that would not be true."""
    have = image.digest(image.release.get(release))
    if series not in ("", have):
        raise UserError(
            f"SERIES_DIGEST={series[:12]} is not that of the series ({have[:12]}): "
            "build with make image, or leave it out"
        )


@cli.command()
@release_option
@revision_option
@series_option
@click.option(
    "--out", required=True, type=click.Path(path_type=Path),
    help="A new folder for the changed files, below it as in the image.",
)  # fmt: skip
def patch(release: str, revision: str, series: str, out: Path) -> None:
    """Patch the image's vllm for good; refused unless it is a release's own."""
    check_series(release, series)
    done = image.patch(package(), release, revision, out)
    click.echo(f"vLLM {done.release}: {len(done.files)} files patched, {done.series}")


@cli.command()
@release_option
@revision_option
@series_option
def record(release: str, revision: str, series: str) -> None:
    """Record a vllm that was built from a patched tree."""
    check_series(release, series)
    done = image.record(package(), release, revision)
    click.echo(f"vLLM {done.release}: {len(done.files)} files recorded, {done.series}")


@cli.command()
def folder() -> None:
    """Say where the image's vllm lies."""
    click.echo(package().folder)


@cli.command()
@click.option("--release", help="Take the series of this release; default: vllm's own.")
def ready(release: str | None) -> None:
    """Patch the container's vllm if it is not patched yet (docker/serve)."""
    found = package()
    series, word = image.ready(found, release)
    click.echo(
        f"vLLM {found.version} is {word}: {len(series.patches)} patches, series "
        f"{image.digest(series.release)[:12]}"
    )


@cli.command()
@release_option
@click.option("--sdist", required=True, help="The release's source.")
@click.option("--jobs", type=click.IntRange(1), help="Processes side by side.")
def test(release: str, sdist: str, jobs: int | None) -> None:
    """Run vLLM's tests, the laws and the probes on the image's vllm, on the CPU."""
    # More than patching needs.
    from offload_parity import image_tests

    if not image_tests.run(package(), release, sdist, jobs):
        sys.exit(1)


if __name__ == "__main__":
    scripts.run(cli)
