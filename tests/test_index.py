# SPDX-License-Identifier: Apache-2.0
"""Downloads: pip's settings, the digest, the cache, and what can go wrong."""

import contextlib
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import NEW, OLD, World, sdist, small_files
from offload_parity import download, index, release

NAME = f"vllm-{NEW}.tar.gz"


class Index:
    """A simple index on 127.0.0.1 whose answers a test can spoil."""

    def __init__(self) -> None:
        self.files = {NAME: sdist(NEW), f"vllm-{OLD}.tar.gz": sdist(OLD)}
        self.requests: list[str] = []
        self.authorization: list[str | None] = []
        self.cut = 0  # bytes of a file that never come
        self.delay = 0.0  # seconds before a file comes
        self.status = 200
        self.hold = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer.authorization.append(self.headers["Authorization"])
                # As a proxy we are asked for whole URLs.
                path = re.sub(r"^http://[^/]*", "", self.path)
                if outer.status != 200:
                    self.send_error(outer.status)
                elif path == "/simple/vllm/":
                    links = "".join(
                        f'<a href="../../files/{name}">{name}</a>'
                        for name in outer.files
                    )
                    self.answer(f"<html><body>{links}</body></html>".encode())
                elif (name := path.removeprefix("/files/")) in outer.files:
                    self.answer(outer.files[name], outer.cut, outer.delay)
                else:
                    self.send_error(404)

            def answer(self, data: bytes, cut: int = 0, delay: float = 0) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:50])
                self.wfile.flush()
                if delay:
                    outer.hold.wait(delay)
                with contextlib.suppress(OSError):
                    self.wfile.write(data[50 : len(data) - cut])

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[], Index]]:
    with contextlib.ExitStack() as stack:

        def start() -> Index:
            one = Index()
            stack.callback(one.close)
            return one

        yield start


@pytest.fixture
def online(world: World, monkeypatch: pytest.MonkeyPatch, serve) -> Index:
    """An empty cache, and pip set to a local index."""
    for path in world.cache.iterdir():
        path.unlink()
    one = serve()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", one.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    return one


def left(world: World) -> list[str]:
    """What is in the cache beside locks."""
    return sorted(p.name for p in world.cache.iterdir() if p.suffix != ".lock")


def test_downloads_into_the_cache(world: World, online: Index) -> None:
    out = world.good("fetch")
    assert str(world.cache / NAME) in out
    assert (world.cache / NAME).read_bytes() == online.files[NAME]
    assert left(world) == [NAME]
    assert online.requests == ["/simple/vllm/", f"/files/{NAME}"]


def test_named_release(world: World, online: Index) -> None:
    world.good("fetch", "--release", OLD)
    assert left(world) == [f"vllm-{OLD}.tar.gz"]


def test_cached_file_needs_no_network_and_no_client(
    world: World, online: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.good("fetch")
    online.requests.clear()
    monkeypatch.setattr(download, "PyPISimple", None)
    monkeypatch.setattr(download, "pip_settings", None)
    world.good("fetch")
    world.good("apply")
    assert online.requests == []


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_cache_is_fetched_again(
    world: World, online: Index, damage: str
) -> None:
    data = online.files[NAME]
    bad = {"truncated": data[:-9], "changed": data[:-1] + b"x", "empty": b""}[damage]
    (world.cache / NAME).write_bytes(bad)
    assert "damaged" in world.good("fetch")
    assert (world.cache / NAME).read_bytes() == data


def test_damaged_cache_and_no_network_is_an_error(world: World, online: Index) -> None:
    (world.cache / NAME).write_bytes(b"bad")
    online.close()
    code, out, err = world.run("apply")
    assert code == 1 and "damaged" in out and "cannot be reached" in err
    assert not world.build.exists() or left_in_build(world) == []


def left_in_build(world: World) -> list[str]:
    return [p.name for p in world.build.iterdir() if p.name != ".lock"]


def test_wrong_digest_is_kept_out_of_the_cache(world: World, online: Index) -> None:
    online.files[NAME] = sdist(OLD)
    got = hashlib.sha256(online.files[NAME]).hexdigest()[:12]
    err = world.refused("fetch")
    assert f"sha256 {got}" in err and release.get(NEW).sdist_sha256[:12] in err
    assert left(world) == []


def test_broken_off_download_leaves_nothing(world: World, online: Index) -> None:
    online.cut = 10
    assert "the download broke off" in world.refused("fetch")
    assert left(world) == []
    online.cut = 0
    world.good("fetch")


def test_slow_answer_ends_in_time(
    world: World, online: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "0.3")
    online.delay = 30
    start = time.monotonic()
    err = world.refused("fetch")
    assert "cannot be reached" in err or "no answer in time" in err
    assert time.monotonic() - start < 10 and left(world) == []


@pytest.mark.parametrize("status", [403, 500, 503])
def test_error_answer_names_the_index(world: World, online: Index, status: int) -> None:
    online.status = status
    err = world.refused("fetch")
    assert f"{online.url}: answers {status}" in err and "pip's settings" in err


def test_index_without_the_file(world: World, online: Index) -> None:
    del online.files[NAME]
    assert f"{online.url} does not have it" in world.refused("fetch")
    online.status = 404
    assert f"{online.url} does not have it" in world.refused("fetch")


def test_no_network(world: World, online: Index) -> None:
    online.close()
    err = world.refused("apply")
    assert NAME in err and "cannot be reached" in err and str(world.cache) in err
    assert left(world) == []


def test_extra_index_has_it(
    world: World, online: Index, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [serve(), serve()]
    del online.files[NAME], others[0].files[NAME]
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", " ".join(o.url for o in others))
    world.good("fetch")
    assert others[1].requests == ["/simple/vllm/", f"/files/{NAME}"]


def test_a_wrong_file_on_one_index_does_not_hide_the_right_one(
    world: World, online: Index, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = serve()
    online.files[NAME] = b"something else"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", other.url)
    world.good("fetch")
    assert (world.cache / NAME).read_bytes() == other.files[NAME]


def test_settings_from_pips_configuration_file(
    world: World, online: Index, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A section for the command wins over global, the environment over both."""
    file = tmp_path / "pip.conf"
    one, two = serve(), serve()
    file.write_text(
        f"[global]\nindex-url = {one.url}\ntimeout = 3\nretries = 0\n"
        f"[install]\nindex-url = {two.url}\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert download.pip_settings().indexes == (online.url,)
    monkeypatch.delenv("PIP_INDEX_URL")
    found = download.pip_settings()
    assert found.indexes == (two.url,) and found.timeout == 3
    world.good("fetch")
    assert two.requests and not one.requests and not online.requests


def test_pip_settings_are_all_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "NO_INDEX": "false",
        "INDEX_URL": "https://a.example/simple",
        "EXTRA_INDEX_URL": "https://b.example/simple\n https://c.example/s",
        "FIND_LINKS": "/wheels https://d.example/list.html",
        "PROXY": "http://p.example:1",
        "CERT": "/ca.pem",
        "CLIENT_CERT": "/me.pem",
        "TRUSTED_HOST": "a.example b.example:8080",
        "TIMEOUT": "7",
        "RETRIES": "2",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    found = download.pip_settings()
    assert found == download.PipSettings(
        indexes=(
            "https://a.example/simple",
            "https://b.example/simple",
            "https://c.example/s",
        ),
        find_links=("/wheels", "https://d.example/list.html"),
        proxy="http://p.example:1",
        cert="/ca.pem",
        client_cert="/me.pem",
        trusted_hosts=("a.example", "b.example:8080"),
        timeout=7.0,
        retries=2,
    )
    with download.session_for(found) as session:
        assert session.verify == "/ca.pem" and session.cert == "/me.pem"
        trusted = {
            url: isinstance(session.get_adapter(url), download.TrustingAdapter)
            for url in (
                "https://a.example/x", "https://a.example:9/x", "https://b.example/",
                "https://b.example:8080/x", "https://a.example.evil/x",
            )
        }  # fmt: skip
    assert list(trusted.values()) == [True, True, False, True, False]


def test_proxy_of_pip_is_used(
    world: World, online: Index, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve()
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    monkeypatch.setenv("PIP_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    world.good("fetch")
    assert proxy.requests[0] == "http://index.invalid/simple/vllm/"


def test_proxy_of_the_environment_is_used(
    world: World, online: Index, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve()
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    world.good("fetch")
    assert proxy.requests[0] == "http://index.invalid/simple/vllm/"


def test_proxy_that_is_down(
    world: World, online: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:9")
    assert "the proxy cannot be reached" in world.refused("fetch")


def test_password_is_sent_but_not_shown(
    world: World, online: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"http://me:secret@127.0.0.1:{online.port}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", secret)
    world.good("fetch")
    assert all(sent and sent.startswith("Basic ") for sent in online.authorization)
    online.status = 401
    (world.cache / NAME).unlink()
    err = world.refused("fetch")
    assert "answers 401" in err and "secret" not in err


@pytest.mark.parametrize("form", ["folder", "file url", "page"])
def test_find_links(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    """With no index at all."""
    (world.cache / NAME).unlink()
    wheels = tmp_path / "my-wheels"
    wheels.mkdir()
    (wheels / NAME).write_bytes(sdist(NEW))
    page = wheels / "list.html"
    page.write_text(f'<a href="{NAME}">{NAME}</a>')
    place = {"folder": str(wheels), "file url": wheels.as_uri(), "page": str(page)}
    monkeypatch.setenv("PIP_FIND_LINKS", place[form])
    world.good("fetch")
    assert (world.cache / NAME).read_bytes() == sdist(NEW)


def test_file_index(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (world.cache / NAME).unlink()
    folder = tmp_path / "simple" / "vllm"
    folder.mkdir(parents=True)
    (tmp_path / NAME).write_bytes(sdist(NEW))
    (folder / "index.html").write_text(f'<a href="../../{NAME}">{NAME}</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    world.good("fetch")


def test_no_index_at_all(world: World) -> None:
    (world.cache / NAME).unlink()
    assert "pip has no index" in world.refused("fetch")


def test_broken_pip_configuration(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (world.cache / NAME).unlink()
    (tmp_path / "pip.conf").write_text("nonsense")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert "pip's settings cannot be read" in world.refused("fetch")


def test_full_disk(world: World, online: Index) -> None:
    done = world.start("fetch", preexec_fn=small_files)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 1, (out, err)
    assert err.count("\n") == 1 and f"cannot write {world.cache / NAME}" in err
    assert "OFFLOAD_PARITY_CACHE" in err and left(world) == []


def test_cache_that_is_a_file(world: World, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OFFLOAD_PARITY_CACHE", str(tmp_path / "file"))
    assert "cannot write" in world.refused("fetch")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_download_is_fetched_again(
    world: World, online: Index, how: signal.Signals
) -> None:
    online.delay = 60
    run = world.start("fetch")
    wait_for(lambda: len(online.requests) == 2)
    wait_for(lambda: [*world.cache.glob(".part-*/*")])
    run.send_signal(how)
    _, err = run.communicate(timeout=30)
    assert run.returncode != 0 and "Traceback" not in err
    assert not (world.cache / NAME).exists()
    assert left(world) == [] or how == signal.SIGKILL
    online.delay = 0
    world.good("fetch")
    assert left(world) == [NAME]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_runs_side_by_side_download_once(world: World, online: Index) -> None:
    online.delay = 1.0
    runs = [world.start("fetch") for _ in range(3)]
    for run in runs:
        _, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "")
    assert online.requests.count(f"/files/{NAME}") == 1


def test_default_cache_folder(world: World, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OFFLOAD_PARITY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert index.cache_folder() == tmp_path / "c" / "vllm-offload-parity"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert index.cache_folder() == Path(os.environ["HOME"]) / ".cache" / (
        "vllm-offload-parity"
    )


def test_pip_belongs_to_this_interpreter(world: World, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (world.cache / NAME).unlink()
    assert "pip's settings cannot be read" in world.refused("fetch")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PIP_TIMEOUT", "abc", "option timeout: invalid floating-point value: 'abc'"),
        ("PIP_TIMEOUT", "-1", "timeout -1"),
        ("PIP_RETRIES", "x", "option retries: invalid integer value: 'x'"),
        ("PIP_RETRIES", "-2", "retries -2"),
    ],
)
def test_odd_value_of_a_pip_setting_is_named(
    world: World, monkeypatch, name, value, words
) -> None:
    (world.cache / f"vllm-{NEW}.tar.gz").unlink()
    monkeypatch.setenv(name, value)
    assert words in world.refused("fetch")
