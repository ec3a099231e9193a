# SPDX-License-Identifier: Apache-2.0
"""Docker, Podman and Buildah: what they are asked for here, in each one's words."""

import json
import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import UserError
from .paths import ROOT

KINDS = ("docker", "podman", "buildah")
_ERROR = re.compile(r"\berror: (.*)")


class Engine:
    """One of them; ``words`` may have a prefix and options, as ``sudo podman``."""

    def __init__(self, words: str) -> None:
        self.text = words
        try:
            self.words = shlex.split(words)
        except ValueError as error:
            raise UserError(
                f"CONTAINER={words}: {error}: write it as for a shell"
            ) from error
        kinds = [word for word in map(os.path.basename, self.words) if word in KINDS]
        if not kinds:
            raise UserError(f"CONTAINER={words}: give one of {', '.join(KINDS)}")
        self.kind = kinds[0]
        if shutil.which(self.words[0]) is None:
            others = [
                kind for kind in KINDS if kind != self.kind and shutil.which(kind)
            ]
            hint = f"use CONTAINER={others[0]}" if others else "install it"
            raise UserError(f"{self.words[0]} is not there: {hint}")

    def _ask(self, *words: str) -> str | None:
        """What a command prints, None if it fails."""
        done = subprocess.run(
            [*self.words, *words], capture_output=True, text=True, check=False
        )
        return None if done.returncode else done.stdout.strip()

    def _run(self, words: Sequence[str], out: IO[str] | None) -> int:
        done = subprocess.run([*self.words, *words], check=False, stdout=out)
        return done.returncode

    def works(self) -> bool:
        """Whether its storage can be used."""
        return self._ask("info") is not None

    def has(self, image: str) -> bool:
        """Whether an image is on this machine."""
        return self._ask("inspect", "--type", "image", image) is not None

    def labels(self, image: str) -> dict[str, str]:
        """The labels of an image.

        Raises:
            UserError: it is not there.
        """
        return self.config(image).get("Labels") or {}

    def config(self, image: str) -> dict:
        """How an image is run: its entrypoint, user, labels and so on.

        Raises:
            UserError: it is not there, or the engine does not work.
        """
        if self.kind == "buildah":
            said = self._ask("inspect", "--type", "image", image)
            found = said and json.loads(said)["Docker"]["config"]
        else:
            said = self._ask("image", "inspect", image)
            found = said and json.loads(said)[0]["Config"]
        if not found and not self.works():
            raise UserError(
                f"{self.text} does not work here: see what {self.text} info says"
            )
        if not found:
            raise UserError(f"there is no image {image}: build it with make image")
        return found

    def pinned(self, image: str) -> tuple[str, str]:
        """An image with its digest, pulled if need be, and the digest alone.

        One that no registry has stays as it is named.

        Raises:
            UserError: it is not on this machine and cannot be pulled.
        """
        if "@" in image:
            return image, image.partition("@")[2]
        if not self.has(image):
            # Gigabytes: its progress is shown.
            done = subprocess.run([*self.words, "pull", image], check=False)
            if done.returncode:
                raise UserError(
                    f"{self.kind} cannot pull the base image {image} (see above): "
                    "check the network, or name another with BASE="
                )
        if self.kind == "buildah":
            template = "{{.FromImageDigest}}"
            said = self._ask("inspect", "--type", "image", "-f", template, image)
            found = [f"{image}@{said}"] if said else []
        else:
            template = "{{json .RepoDigests}}"
            said = self._ask("image", "inspect", "-f", template, image)
            found = json.loads(said or "null") or []
        if not found:
            return image, ""
        digest = found[0].partition("@")[2]
        local = image.startswith("localhost/")
        return image if local else f"{_name(image)}@{digest}", digest

    def build(
        self,
        target: str,
        tag: str,
        arguments: Mapping[str, str],
        contexts: Mapping[str, Path],
        date: int,
        options: Sequence[str] = (),
    ) -> None:
        """Build a target of docker/Dockerfile; what the build says is shown.

        Raises:
            UserError: it failed; the message is what the project's own script said.
        """
        words = [*self.words, "build", "--file", str(ROOT / "docker" / "Dockerfile")]
        words += ["--target", target, "--tag", tag]
        if self.kind != "docker":
            # OCI's own format has no health check.
            words += ["--format", "docker", "--timestamp", str(date)]
        for name, value in arguments.items():
            words += ["--build-arg", f"{name}={value}"]
        for name, path in contexts.items():
            words += ["--build-context", f"{name}={path}"]
        process = subprocess.Popen(
            [*words, *options, str(ROOT)],
            env=os.environ | {"DOCKER_BUILDKIT": "1", "SOURCE_DATE_EPOCH": str(date)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        why = ""
        with process:
            for line in process.stdout:
                print(line, end="", flush=True)
                if match := _ERROR.search(line):
                    why = match[1]
        if process.returncode:
            raise UserError(why or f"{self.kind} could not build {target} (see above)")

    def run(
        self,
        image: str,
        entrypoint: Sequence[str],
        mounts: Mapping[Path, str],
        options: Sequence[str] = (),
        out: IO[str] | None = None,
    ) -> int:
        """Run a command in a new container on the host's network; its exit status.

        ``mounts`` maps folders to where they are mounted, with ``:ro`` or not; what it
        prints goes to ``out``.
        """
        volumes = [w for path, at in mounts.items() for w in ("-v", f"{path}:{at}")]
        if self.kind != "buildah":
            first, *rest = entrypoint
            words = ["run", "--rm", "--network", "host", *volumes, *options]
            words += ["--entrypoint", first, image, *rest]
            return self._run(words, out)
        with self.container(image) as name:
            words = ["run", *volumes, *options, name, "--", *entrypoint]
            return self._run(words, out)

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of Buildah's, removed at the end."""
        name = f"offload-parity-{uuid.uuid4().hex[:12]}"
        if self._ask("from", "--pull-never", "--name", name, image) is None:
            raise UserError(f"there is no image {image}: build it with make image")
        try:
            yield name
        finally:
            self._ask("rm", name)


def _name(image: str) -> str:
    """An image's name without its tag; a port is no tag."""
    head, slash, tail = image.rpartition("/")
    return head + slash + tail.partition(":")[0]
