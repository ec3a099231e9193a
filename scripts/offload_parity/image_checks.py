# SPDX-License-Identifier: Apache-2.0
"""What is checked of every target of docker/Dockerfile, on a stand-in for the image."""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click

from . import (
    experiment,
    image,
    image_building,
    installed,
    patches,
    sim_server,
    simulation,
    stand_in,
)
from . import release as releases
from .errors import UserError
from .paths import ROOT, build_root
from .release import Release
from .report import Result
from .stand_in import Builder
from .unit_env import UnitEnv

_MOST_BYTES = 5_000_000
_REPO = ("-v", f"{ROOT}:/offload-parity:ro")
_SERVE = ("/offload-parity/docker/serve", "MODEL", "--option", "two words")
_GIVEN = ["serve", "MODEL", "--option", "two words"]
# What of an image's configuration says how it runs.
_BEHAVIOUR = (
    "Entrypoint",
    "Cmd",
    "User",
    "WorkingDir",
    "Env",
    "ExposedPorts",
    "Volumes",
)


@dataclass
class Stand:
    """A release's stand-in, and what is built on it."""

    builder: Builder
    wanted: Release
    log: Path

    @cached_property
    def base(self) -> str:
        """The stand-in of the official image."""
        return self.builder.base(self.wanted)

    @cached_property
    def series(self) -> patches.Series:
        """The release's series."""
        return patches.read_series(self.wanted)

    @property
    def package(self) -> str:
        """Where the package lies in an image."""
        return f"{self.builder.dist.lstrip('/')}/vllm"

    def build(
        self, target: str, base: str = "", compiled: str = "", **values: str
    ) -> str:
        """Build a target as ``make image`` does; the image's name.

        Raises:
            UserError: it failed.
        """
        tag = f"localhost/out-{target}{compiled}:{self.wanted.version}"
        options = [*self.builder.options, "--no-cache"]
        for name, value in values.items():
            options += ["--build-arg", f"{name}={value}"]
        with self.log.open("a") as out, contextlib.redirect_stdout(out):
            image_building.build(
                target, self.wanted.version, base or self.base,
                self.builder.engine.text, tag, compiled, tuple(options),
            )  # fmt: skip
        return tag

    def changed(
        self, name: str, edit: Callable[[Path], object], version: str | None = None
    ) -> str:
        """The base with an edit of its package; the new image's name."""
        tag = f"localhost/bad-{name}:{self.wanted.version}"
        with self.builder.container(self.base) as (container, root):
            edit(root / self.package)
            if version:
                dist = root / self.builder.dist.lstrip("/")
                (info,) = dist.glob("vllm-*.dist-info")
                meta = info / "METADATA"
                old = meta.read_text()
                meta.write_text(
                    re.sub(r"(?m)^Version: .*$", f"Version: {version}", old)
                )
            self.builder.ask("commit", "--quiet", container, tag)
        return tag


def files(root: Path) -> dict[str, Any]:
    """Each file, folder and link of an image: kind, mode, owner and content."""
    found = {}
    for path in root.rglob("*"):
        facts = path.lstat()
        content = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = patches.blob_id(path.read_bytes())
        found[str(path.relative_to(root))] = (
            facts.st_mode, facts.st_uid, facts.st_gid, content,
        )  # fmt: skip
    return found


def serve(stand: Stand) -> Result:
    """Build what is served: only what the series changes may differ from the base."""
    name = stand.build("serve")
    wrong = []
    before = stand.builder.engine.config(stand.base)
    after = stand.builder.engine.config(name)
    for key in _BEHAVIOUR:
        if (before.get(key) or None) != (after.get(key) or None):
            wrong.append(f"{key} is {after.get(key)}, the base's {before.get(key)}")
    wrong += _labels(stand, after["Labels"])
    chains = {
        f"{stand.package}/{path.removeprefix('vllm/')}": chain[-1]
        for path, chain in stand.series.chains().items()
        if path.startswith("vllm/")
    }
    place = f"{stand.package}/{image.FOLDER}"
    expected = {*chains, place, f"{place}/LICENSE", f"{place}/{image.RECORD}"}
    for path in map(Path, chains):
        # Of these the stand-in's base has some.
        cache = path.parent / "__pycache__"
        tag = stand.builder.python.replace("python3.", "cpython-3")
        expected |= {str(cache), f"{cache}/{path.stem}.{tag}.pyc"}
    added = 0
    with (
        stand.builder.container(stand.base) as (_, old),
        stand.builder.container(name) as (container, new),
    ):
        was, now = files(old), files(new)
        for path in sorted(was.keys() | now.keys()):
            if was.get(path) == now.get(path) or path in expected:
                continue
            wrong.append(f"/{path} is not as in the base")
        for path, blob in chains.items():
            if now.get(path, (0, 0, 0, None))[-1] != blob:
                wrong.append(f"/{path} is not as the series makes it")
        added = sum((new / p).lstat().st_size for p in expected if was.get(p) != now[p])
        said = _status(stand, container)
    if said:
        wrong.append(said)
    if added > _MOST_BYTES:
        wrong.append(f"{added:,} bytes are added")
    detail = f"{len(chains)} files patched, {added:,} bytes added to the base"
    return Result(not wrong, detail, wrong, [stand.log])


def _labels(stand: Stand, labels: dict[str, str]) -> list[str]:
    wanted = {
        "org.opencontainers.image.source": image_building.source(),
        "org.opencontainers.image.revision": image_building.revision(),
        "org.opencontainers.image.base.name": stand.base,
        "vllm-offload-parity.release": stand.wanted.version,
        "vllm-offload-parity.series": image.digest(stand.wanted),
    }
    wrong = [
        f"label {name} is {labels.get(name)}, not {value}"
        for name, value in wanted.items()
        if labels.get(name) != value
    ]
    if not labels.get("org.opencontainers.image.base.digest", "").startswith("sha256:"):
        wrong.append("no label says the base's digest")
    return wrong


def _status(stand: Stand, container: str) -> str:
    """What is wrong with what `make status` says in a container."""
    done = stand.builder.run(
        container, "python3", "-B", "/offload-parity/scripts/series.py",
        "status", "--python", "python3", options=_REPO,
    )  # fmt: skip
    revision = image_building.revision()
    known = f"series {image.digest(stand.wanted)[:12]}, revision {revision}"
    if done.returncode or known not in done.stdout:
        return f"status does not say {known}: {done.stdout}{done.stderr}"
    return ""


def reproducible(stand: Stand) -> Result:
    """A second build gives the same layers; Docker's format also names containers."""
    layers = []
    for _ in range(2):
        tag = stand.build("serve")
        found = json.loads(stand.builder.ask("inspect", "--type", "image", tag))
        layers.append(found["Docker"]["rootfs"]["diff_ids"])
    wrong = [] if layers[0] == layers[1] else [f"{layers[0]}, then {layers[1]}"]
    return Result(not wrong, f"{len(layers[0])} layers twice the same", wrong)


def runs(stand: Stand) -> Result:
    """The image runs as the base image does, and its health check tells."""
    tag = f"localhost/out-serve:{stand.wanted.version}"
    config = stand.builder.engine.config(tag)
    wrong = []
    said = []
    for one in (stand.base, tag):
        with stand.builder.container(one) as (name, _):
            words = [*config["Entrypoint"], *_GIVEN[1:]]
            done = stand.builder.run(name, *words)
            said.append((done.returncode, done.stdout, done.stderr))
    if said[0] != said[1] or json.loads(said[1][1])["argv"] != _GIVEN:
        wrong.append(f"the image gives {said[1]}, the base {said[0]}")
    kind, *check = config["Healthcheck"]["Test"]
    with stand.builder.container(tag) as (name, _), healthy() as url:
        for address, good in ((url, True), (f"{url}/nothing", False)):
            env = ("--env", f"HEALTH_URL={address}")
            done = stand.builder.run(name, *check, options=env)
            if kind != "CMD" or (done.returncode == 0) != good:
                wrong.append(f"the health check of {address} ends with {done}")
    return Result(not wrong, "entrypoint and health check", wrong)


@contextlib.contextmanager
def healthy() -> Iterator[str]:
    """A server that answers at /health only; its address there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()


def mounted(stand: Stand) -> Result:
    """The base with this repository mounted: patch, then serve."""
    wrong = []

    def check(what: str, name: str, words: str, *options: str) -> None:
        done = stand.builder.run(name, *_SERVE, options=(*_REPO, *options))
        argv = json.loads(done.stdout)["argv"] if done.returncode == 0 else None
        if argv != _GIVEN or not re.search(words, done.stderr):
            wrong.append(f"{what}: {done.returncode} {done.stdout} {done.stderr}")

    def patched(root: Path) -> None:
        for path, chain in stand.series.chains().items():
            file = root / stand.builder.dist.lstrip("/") / path
            if path.startswith("vllm/") and installed_blob(file) != chain[-1]:
                wrong.append(f"{file} is not patched")

    with stand.builder.container(stand.base) as (name, root):
        if stand.builder.run(name, "sh", "-c", "command -v git").returncode == 0:
            wrong.append("the stand-in has git, the official image may not")
        # Not root: one line, and nothing is changed.
        before = files(root / stand.package)
        done = stand.builder.run(
            name, *_SERVE, options=(*_REPO, "--user", "1000:0")
        )  # fmt: skip
        if (
            done.returncode != 1
            or "run as the user who owns the package" not in done.stderr
            or done.stderr.count("error: ") != 1
            or files(root / stand.package) != before
        ):
            wrong.append(f"not root: {done}")
        check("first start", name, " is patched: ")
        patched(root)
        check("restart", name, "is patched already")
        check("another user", name, "is patched already", "--user", "1000:0")
    with stand.builder.container(stand.base) as (name, root):
        # Several at once; then one that was killed at some point.
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(check, "side by side", name, "is patched")
        patched(root)
    for seconds in ("0.5", "1.0"):
        with stand.builder.container(stand.base) as (name, root):
            stand.builder.run(
                name, "timeout", "-s", "KILL", seconds, *_SERVE, options=_REPO
            )
            check("after a kill", name, "is patched")
            patched(root)
    return Result(not wrong, "first start, restart, side by side, killed", wrong)


def installed_blob(path: Path) -> str | None:
    """git's id of a file, None if there is none."""
    return patches.blob_id(path.read_bytes() if path.exists() else None)


def failures(stand: Stand) -> Result:
    """Each base that cannot be patched fails the build with its own line."""
    other = next(r for r in releases.supported() if r != stand.wanted)
    chains = installed.chains_of(stand.series)
    path, chain = next((p, c) for p, c in chains.items() if c[0])
    inner = path.removeprefix("vllm/")

    def edit(package: Path) -> None:
        text = (package / inner).read_text()
        (package / inner).write_text(text + "edited = True\n")

    def part(package: Path) -> None:
        number = next(n for n in range(len(chain)) if chain[n] != chain[0])
        for one in stand.series.patches[:number]:
            for file in one.files:
                if file.path in chains:
                    target = package / file.path.removeprefix("vllm/")
                    old = target.read_bytes() if target.exists() else None
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(patches.apply_file(old, file))

    def nothing(package: Path) -> None:
        pass

    serve_tag = f"localhost/out-serve:{stand.wanted.version}"
    bases = {
        "no vllm": lambda: stand_in.DEBIAN,
        "an unsupported release": lambda: stand.changed("old", nothing, "0.1.0"),
        "another release": lambda: stand.changed("other", nothing, other.version),
        "patched already": lambda: serve_tag,
        "an edited file": lambda: stand.changed("edited", edit),
        "part of the series": lambda: stand.changed("part", part),
        "a series of another digest": lambda: stand.base,
        "an unsupported VLLM_VERSION": lambda: stand.base,
    }
    arguments = {
        "a series of another digest": {"SERIES_DIGEST": "0" * 64},
        "an unsupported VLLM_VERSION": {"VLLM_VERSION": "0.1.0"},
    }
    words = {
        "no vllm": "which every image of vLLM's has",
        "an unsupported release": r"has vLLM 0\.1\.0, not .*there are series for",
        "another release": "set VLLM_VERSION=" + re.escape(other.version),
        "patched already": "patched already .*, series ",
        "an edited file": f"{path} is not that of vLLM",
        "part of the series": r"patched already \(\d+ of \d+ patches",
        "a series of another digest": "SERIES_DIGEST=0+ is not that of the series",
        "an unsupported VLLM_VERSION": r"vLLM 0\.1\.0 is not supported \(supported: ",
    }
    wrong = []
    for name, base in bases.items():
        try:
            stand.build("serve", base(), **arguments.get(name, {}))
            wrong.append(f"{name}: the build did not fail")
        except UserError as error:
            click.echo(f"  {name}: error: {error}")
            if not re.search(words[name], str(error)):
                wrong.append(f"{name}: {error}")
    for tag in stand.builder.ask("images", "-n", "--format", "{{.Name}}").split():
        if tag.startswith("localhost/bad-"):
            stand.builder.ask("rmi", f"{tag}:{stand.wanted.version}")
    return Result(not wrong, f"{len(bases)} bases refused", wrong, [stand.log])


def tests(stand: Stand) -> Result:
    """The target that tests what would be served."""
    stand.build("test")
    table = re.findall(r"^  .* ok .*$", stand.log.read_text(), re.MULTILINE)
    return Result(True, "; ".join(" ".join(line.split()) for line in table[-3:]))


def broken(stand: Stand) -> Result:
    """A defect in what would be served fails the test target's build."""

    def defect(package: Path) -> None:
        path = package / "v1/core/kv_cache_metrics.py"
        path.write_text("raise ImportError('a planted defect')\n")

    base = stand.changed("broken", defect)
    try:
        stand.build("test", base)
    except UserError:
        text = stand.log.read_text()
        failed = re.findall(r"^  (\S.*?)  +FAILED ", text, re.MULTILINE)
        return Result("vLLM's tests" in failed, f"failed: {', '.join(failed)}")
    finally:
        stand.builder.ask("rmi", base)
    return Result(False, "the build did not fail", [], [stand.log])


def compiled(stand: Stand) -> Result:
    """The target that builds from the patched tree; here without compiled parts."""
    tag = stand.build(
        "serve", compiled="1", VLLM_TARGET_DEVICE="empty", BUILD_PACKAGES=""
    )
    wrong = []
    with stand.builder.container(tag) as (name, root):
        said = _status(stand, name)
        for path, chain in installed.chains_of(stand.series).items():
            file = root / stand.builder.dist.lstrip("/") / path
            if installed_blob(file) != chain[-1]:
                wrong.append(f"{path} is not as in the tree")
    return Result(not (wrong or said), "without compiled parts", [*wrong, said])


def probed(stand: Stand, env: UnitEnv) -> Result:
    """The probes run from inside the image, on a simulated server."""
    (tree,) = simulation.trees_of(stand.wanted, ("patched",))
    plan = experiment.quick(sim_server.Plan(tree=tree, version=stand.wanted.version))
    port = sim_server.free_port()
    reports = build_root() / "reports" / "image-stand-in"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    mounts = {ROOT: "/offload-parity:ro", reports: "/reports"}
    with (
        sim_server.serve(plan, port, env.python) as running,
        stand.log.open("a") as log,
    ):
        words = ("/offload-parity/docker/probe", running.url)
        options = ("-v", stand.builder.mount, "--env", "PROMPTS=4")
        status = stand.builder.engine.run(
            f"localhost/out-serve:{stand.wanted.version}", words, mounts, options, log
        )
    written = sorted(path.name for path in reports.iterdir())
    text = (reports / "boundaries.txt").read_text()
    wrong = [] if status == 0 and "OK: hits" in text else [f"status {status}: {text}"]
    if written != ["boundaries.txt", "gpu_cache.txt", "prefix.txt"]:
        wrong.append(f"written: {written}")
    return Result(not wrong, "boundaries, prefix, gpu_cache", wrong)
