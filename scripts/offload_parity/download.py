# SPDX-License-Identifier: Apache-2.0
"""Download a release's sdist from the package index that pip is set to."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

import requests
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    Link,
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
    UnsupportedContentTypeError,
    tqdm_progress_factory,
)
from requests.adapters import HTTPAdapter

from .errors import UserError
from .index import sha256
from .paths import cache_folder
from .release import Release

_PROJECT = "vllm"
# Where pip looks a setting up, the last one wins.
_SECTIONS = ("global", "download", "install", ":env:")


@dataclass(frozen=True)
class PipSettings:
    """Those of pip's settings that say where and how to download."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    proxy: str | None
    cert: str | None
    client_cert: str | None
    trusted_hosts: tuple[str, ...]
    timeout: float
    retries: int


def pip_settings() -> PipSettings:
    """What ``pip config list`` says for the pip of this interpreter.

    Raises:
        UserError: pip is missing or rejects its configuration.
    """
    done = subprocess.run(
        (sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        # It says on stdout that a value is none.
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UserError(
            f"pip's settings cannot be read: {(said or ['no message'])[-1]}"
        )
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key.removeprefix("default-")] = ast.literal_eval(value)
    merged: dict[str, str] = {}
    for section in _SECTIONS:
        merged |= found[section]

    offline = merged.get("no-index", "").lower() in ("1", "true", "yes", "on")
    index = merged.get("index-url") or PYPI_SIMPLE_ENDPOINT
    indexes = (index, *merged.get("extra-index-url", "").split())
    timeout = float(merged.get("timeout", 15))
    retries = int(merged.get("retries", 5))
    if not (timeout > 0 and retries >= 0):
        raise UserError(
            f"pip's settings say timeout {timeout:g} and retries {retries}: the first "
            "must be above 0, the other at least 0 (python -m pip config list)"
        )
    return PipSettings(
        indexes=() if offline else indexes,
        find_links=tuple(merged.get("find-links", "").split()),
        proxy=merged.get("proxy"),
        cert=merged.get("cert"),
        client_cert=merged.get("client-cert"),
        trusted_hosts=tuple(merged.get("trusted-host", "").split()),
        timeout=timeout,
        retries=retries,
    )


def find_digest(name: str) -> str:
    """The sha256 that the first place which has the file ``name`` states for it.

    Raises:
        UserError: none has it, states a digest, or can be reached.
    """
    settings = pip_settings()
    faults = []
    with PyPISimple(session=session_for(settings)) as client:
        for place, is_index in _places(settings):
            try:
                package = _find(client, settings, place, is_index, name)
            except (requests.RequestException, UnsupportedContentTypeError) as error:
                faults.append(f"{_public(place)}: {_reason(error)}")
                continue
            if package is None:
                faults.append(f"{_public(place)} does not have it")
            elif digest := (package.digests or {}).get("sha256"):
                return digest
            elif (local := _local(package.url)) and local.is_file():
                return sha256(local)
            else:
                faults.append(f"{_public(place)} states no sha256 for it")
    raise UserError(
        f"cannot find {name}: {'; '.join(faults) or 'pip has no index'}. Check the "
        "version, the network and pip's settings (python -m pip config list)"
    )


def download(release: Release, folder: Path) -> Path:
    """Download the sdist into ``folder``; the first place that has the right one."""
    settings = pip_settings()
    target = folder / release.sdist_name
    faults = []
    with PyPISimple(session=session_for(settings)) as client:
        for place, is_index in _places(settings):
            try:
                package = _find(client, settings, place, is_index, release.sdist_name)
                if package is None:
                    faults.append(f"{_public(place)} does not have it")
                    continue
                _get(client, settings, package, target)
            except (requests.RequestException, UnsupportedContentTypeError) as error:
                faults.append(f"{_public(place)}: {_reason(error)}")
                continue
            if (digest := sha256(target)) == release.sdist_sha256:
                return target
            target.unlink()
            faults.append(
                f"{_public(place)} gave a file with sha256 {digest[:12]}…, expected "
                f"{release.sdist_sha256[:12]}…"
            )
    raise UserError(
        f"cannot fetch {release.sdist_name}: {'; '.join(faults) or 'pip has no index'}."
        " Check the network and pip's settings (python -m pip config list), or put the "
        f"file into {cache_folder()}"
    )


def _places(settings: PipSettings) -> Iterator[tuple[str, bool]]:
    """Where to look, in order, and whether it is an index."""
    for place in settings.find_links:
        yield place, False
    for place in settings.indexes:
        yield place, True


def _find(
    client: PyPISimple, settings: PipSettings, place: str, is_index: bool, name: str
) -> DistributionPackage | None:
    """The package named ``name`` at an index or a find-links place, None if absent."""
    local = _local(place)
    if local:
        folder = local / _PROJECT if is_index else local
        if (folder / name).is_file():
            link = Link(text=name, url=(folder / name).resolve().as_uri(), attrs={})
            return DistributionPackage.from_link(link, _PROJECT)
        html = folder / "index.html" if folder.is_dir() else folder
        if not html.is_file():
            return None
        page = ProjectPage.from_html(_PROJECT, html.read_bytes(), html.as_uri())
    elif is_index:
        client.endpoint = place.rstrip("/") + "/"
        try:
            page = client.get_project_page(_PROJECT, timeout=settings.timeout)
        except NoSuchProjectError:
            return None
    else:
        answer = client.s.get(place, timeout=settings.timeout)
        answer.raise_for_status()
        page = ProjectPage.from_response(answer, _PROJECT)
    return next((p for p in page.packages if p.filename == name), None)


def _get(
    client: PyPISimple,
    settings: PipSettings,
    package: DistributionPackage,
    target: Path,
) -> None:
    """Copy or download ``package`` to ``target``, with a progress bar on a terminal."""
    if local := _local(package.url):
        shutil.copyfile(local, target)
        return
    bar = tqdm_progress_factory(
        desc=target.name, unit="B", unit_scale=True, disable=None, leave=False
    )
    # The digest that counts is the one in release.toml, not the index's.
    client.download_package(
        package, target, verify=False, progress=bar, timeout=settings.timeout
    )


def _local(place: str) -> Path | None:
    """The path of a file: URL or of a plain path, None for what needs the network."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    if "://" in place:
        return None
    return Path(os.path.expanduser(place))


class TrustingAdapter(HTTPAdapter):
    """For pip's trusted hosts: the certificate is not checked."""

    def cert_verify(self, conn, url, verify, cert) -> None:
        super().cert_verify(conn, url, False, cert)


def session_for(settings: PipSettings) -> requests.Session:
    session = requests.Session()
    if settings.proxy:
        session.proxies = {"http": settings.proxy, "https": settings.proxy}
        # Or the environment's proxy would win over pip's.
        session.trust_env = False
    if settings.cert:
        session.verify = settings.cert
    session.cert = settings.client_cert
    for prefix in ("https://", "http://"):
        session.mount(prefix, HTTPAdapter(max_retries=settings.retries))
    for host in settings.trusted_hosts:
        # A port may follow; a host without one is meant for every port.
        for prefix in _prefixes(host):
            session.mount(prefix, TrustingAdapter(max_retries=settings.retries))
    return session


def _prefixes(host: str) -> Iterator[str]:
    yield f"https://{host}/"
    if ":" not in host:
        yield f"https://{host}:"


def _public(place: str) -> str:
    """``place`` without a user's name and password."""
    parts = urlsplit(place)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: Exception) -> str:
    """A download's fault in a few words."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answers {error.response.status_code} {error.response.reason}"
    for kind, words in (
        (requests.exceptions.ProxyError, "the proxy cannot be reached"),
        (requests.exceptions.SSLError, "its certificate is not trusted"),
        (requests.Timeout, "no answer in time"),
        (requests.exceptions.ChunkedEncodingError, "the download broke off"),
        (requests.ConnectionError, "cannot be reached"),
    ):
        if isinstance(error, kind):
            return words
    return " ".join(str(error).split())
