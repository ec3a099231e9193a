# SPDX-License-Identifier: Apache-2.0
"""Build, test and probe the patched serving image. The Makefile calls this."""

import os
import sys

import click

from offload_parity import cli as scripts
from offload_parity import image_building
from offload_parity import release as releases
from offload_parity.containers import Engine
from offload_parity.files import writable
from offload_parity.paths import ROOT, build_root, shown


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
def cli() -> None:
    """Run one of the commands."""


release_option = click.option("--release", help="Default: the newest supported.")
base_option = click.option("--base", help="Base image; default: the official one.")
container_option = click.option(
    "--container", default="docker", show_default=True,
    help="docker, podman or buildah, with options if you like.",
)  # fmt: skip
tag_option = click.option(
    "--tag", help="The image's name; default: localhost/vllm-offload-parity:<release>."
)
compiled_option = click.option(
    "--compiled", default="", help="1: compile the patched tree for CUDA (hours)."
)


@cli.command(name="build")
@release_option
@base_option
@container_option
@tag_option
@compiled_option
@click.argument("options", nargs=-1)
def build_command(release, base, container, tag, compiled, options) -> None:
    """Build the image that serves; OPTIONS are the engine's own."""
    name = image_building.tag_of(releases.get(release), tag)
    image_building.build("serve", release, base, container, name, compiled, options)
    labels = Engine(container).labels(name)
    click.echo(
        f"{name}: vLLM {labels['vllm-offload-parity.release']}, series "
        f"{labels['vllm-offload-parity.series'][:12]}, base "
        f"{labels['org.opencontainers.image.base.name']}"
    )
    click.echo("Next: make image-test (on the CPU); run it as you run the base image")


@cli.command()
@release_option
@base_option
@container_option
@compiled_option
@click.argument("options", nargs=-1)
def test(release, base, container, compiled, options) -> None:
    """Build the target that tests the patched package; fails if they do."""
    wanted = releases.get(release)
    tag = f"{image_building.tag_of(wanted, None)}-test"
    image_building.build("test", release, base, container, tag, compiled, options)
    click.echo(f"vLLM {wanted.version}: the image's tests pass")


@cli.command()
@click.option("--url", default="http://localhost:8000", show_default=True)
@release_option
@container_option
@tag_option
@click.argument("options", nargs=-1)
def probe(url, release, container, tag, options) -> None:
    """Probe a server from inside the image: what it needs is there."""
    name = image_building.tag_of(releases.get(release), tag)
    engine = Engine(container)
    # Docker and Podman would ask a registry for one that is not there.
    engine.config(name)
    reports = writable(build_root() / "reports" / "image")
    mounts = {ROOT: "/offload-parity:ro", reports: "/reports"}
    # The server is to be there already; docker/probe's own limit is for one that loads.
    wait = ("--env", f"WAIT_SECONDS={os.environ.get('WAIT_SECONDS', '60')}")
    # By its name alone: other users see command lines.
    key = ("--env", "OPENAI_API_KEY") if "OPENAI_API_KEY" in os.environ else ()
    status = engine.run(
        name, ("/offload-parity/docker/probe", url), mounts, (*wait, *key, *options)
    )
    click.echo(f"the reports are in {shown(reports)}")
    sys.exit(status)


@cli.command()
@release_option
@container_option
@tag_option
def status(release, container, tag) -> None:
    """Say what an image's label and its record say, and what has drifted."""
    name = image_building.tag_of(releases.get(release), tag)
    engine = Engine(container)
    for label, value in sorted(engine.labels(name).items()):
        if label.startswith(("vllm-offload-parity.", "org.opencontainers.image.")):
            click.echo(f"{label}: {value}")
    inside = ("python3", "-B", "/offload-parity/scripts/series.py", "status")
    sys.exit(
        engine.run(name, (*inside, "--python", "python3"), {ROOT: "/offload-parity:ro"})
    )


if __name__ == "__main__":
    scripts.run(cli)
