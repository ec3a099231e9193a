# SPDX-License-Identifier: Apache-2.0
"""The serving image, as far as no container engine is needed."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

import fake_server
from conftest import MASK, NEW, OLD, REACH, ROOT, STORE, World, write
from offload_parity import image, image_building, installed, patches, release
from offload_parity.containers import Engine
from offload_parity.errors import UserError
from test_installed import Env

DOCKER = ROOT / "docker"
ENV_FILES = [DOCKER / ".env", *sorted((DOCKER / "env").glob("*.env"))]


@pytest.fixture
def env(world: World, tmp_path: Path) -> Env:
    """What an image has: a vllm with what it requires, and its command."""
    # An image's layer cannot take a file away, as the third patch would.
    series = world.patches / NEW / "series"
    series.write_text("\n".join(patches.listed(world.patches / NEW)[:2]))
    made = Env(tmp_path / "image")
    made.install(NEW)
    (made.site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    command = made.folder / "bin" / "vllm"
    command.write_text(
        f"#!{made.python}\nimport json, os, sys\n"
        "print(json.dumps([os.getpid(), sys.argv[1:]]))\n"
    )
    command.chmod(0o755)
    return made


def package(env: Env) -> installed.Package:
    return installed.find(str(env.python))


def serve(world: World, env: Env, *args: str, code: int = 0) -> tuple[list, str]:
    """Run docker/serve as in a container without git: what vllm got, and stderr."""
    programs = world.root / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("sh", "env", "dirname"):
        if not (programs / name).exists():
            (programs / name).symlink_to(shutil.which(name))
    run = subprocess.Popen(
        [DOCKER / "serve", *args],
        env=world.environment() | {"PATH": f"{env.folder / 'bin'}:{programs}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    if code:
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
        return [], err
    pid, given = json.loads(out)
    # A signal for the container must reach vllm itself.
    assert pid == run.pid
    return given, err


def test_serve_patches_then_becomes_vllm(world: World, env: Env) -> None:
    given, err = serve(world, env, "MODEL", "--option", "two words", "")
    assert given == ["serve", "MODEL", "--option", "two words", ""]
    assert f"vLLM {NEW} is patched: 2 patches" in err
    assert "from_reach" in env.read(MASK) and (env.site / REACH).exists()
    before = env.everything()
    given, err = serve(world, env, "MODEL")
    assert given == ["serve", "MODEL"] and "is patched already" in err
    assert env.everything() == before


def test_serve_renews_what_an_older_repository_patched(world: World, env: Env) -> None:
    series = world.patches / NEW / "series"
    both = series.read_text()
    series.write_text(both.splitlines()[0])
    serve(world, env)
    assert "from_reach" not in env.read(MASK)
    series.write_text(both)
    assert "is patched: 2 patches" in serve(world, env)[1]
    assert "from_reach" in env.read(MASK)


def test_serve_starts_nothing_unpatched(world: World, env: Env) -> None:
    write(env.site, {MASK: "other = 1\n"})
    before = env.everything()
    assert "conflicts with 0001" in serve(world, env, code=1)[1]
    assert env.everything() == before
    shutil.rmtree(env.vllm)
    assert "is none of vLLM's" in serve(world, env, code=1)[1]


def test_serve_takes_no_image_built_with_another_series(world: World, env: Env) -> None:
    image.patch(package(env), NEW, "", world.root / "out")
    assert "is patched already" in serve(world, env)[1]
    series = world.patches / NEW / "series"
    series.write_text(series.read_text().splitlines()[0])
    assert "another version of the series" in serve(world, env, code=1)[1]


def test_serve_writes_nothing_into_the_repository(world: World, env: Env) -> None:
    before = set((ROOT / "scripts").rglob("*"))
    serve(world, env)
    assert set((ROOT / "scripts").rglob("*")) == before


def test_patch_copies_what_changed_and_a_record(world: World, env: Env) -> None:
    out = world.root / "out"
    done = image.patch(package(env), NEW, "abc", out)
    root = out / str(env.site.resolve()).lstrip("/")
    copied = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    names = {MASK, STORE, REACH}
    compiled = {n for n in copied if n.endswith(".pyc")}
    assert len(compiled) == len(names)
    own = {f"vllm/{image.FOLDER}/{n}" for n in ("LICENSE", image.RECORD)}
    assert copied == names | compiled | own
    for name in names:
        assert (root / name).read_bytes() == (env.site / name).read_bytes()
    assert set(done.files) == names and done.revision == "abc"
    assert done.series == image.digest(release.get(NEW))
    # By its hash: the bytecode is taken whatever times the files get.
    assert all((root / n).read_bytes()[4] == 0b11 for n in compiled)
    stamp = image.date(patches.read_series(release.get(NEW)))
    assert {p.stat().st_mtime for p in out.rglob("*")} == {stamp}


def test_same_series_same_record(world: World, env: Env, tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        other = Env(tmp_path / name)
        other.install(NEW)
        image.patch(package(other), NEW, "abc", tmp_path / f"out-{name}")
        texts.append(other.read(f"vllm/{image.FOLDER}/{image.RECORD}"))
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    assert document["spdxVersion"] == "SPDX-2.3"
    # In SPDX's words: A is a file that was added to B, a patch that was applied to B.
    assert sorted(
        (r["spdxElementId"], r["relationshipType"], r["relatedSpdxElement"])
        for r in document["relationships"]
    ) == [
        ("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-vllm"),
        ("SPDXRef-File-1", "FILE_MODIFIED", "SPDXRef-vllm"),
        ("SPDXRef-File-2", "FILE_MODIFIED", "SPDXRef-vllm"),
        ("SPDXRef-File-3", "FILE_ADDED", "SPDXRef-vllm"),
        ("SPDXRef-vllm-offload-parity", "PATCH_APPLIED", "SPDXRef-vllm"),
    ]


def test_status_reports_the_record_and_what_drifted(world: World, env: Env) -> None:
    done = image.patch(package(env), NEW, "abc", world.root / "out")
    out = world.good("status", "--python", env.python)
    assert f"series {done.series[:12]}, revision abc, 3 files" in out
    write(env.site, {STORE: "edited = 1\n"})
    code, out, _ = world.run("status", "--python", env.python)
    assert code == 1 and f"{STORE} is not as recorded" in out


def _patched(env: Env, out: Path) -> None:
    image.patch(package(env), NEW, "", out)


def _part(env: Env, out: Path) -> None:
    """The first patch alone, and no record."""
    installed.apply(package(env), NEW)
    installed.unapply(package(env))
    first = patches.read_series(release.get(NEW)).patches[0]
    for file in first.files:
        if file.path.startswith("vllm/"):
            path = env.site / file.path
            path.write_bytes(patches.apply_file(path.read_bytes(), file))


def _edited(env: Env, out: Path) -> None:
    write(env.site, {STORE: env.read(STORE) + "own = 1\n"})


def _other(env: Env, out: Path) -> None:
    env.install(OLD)


def _unsupported(env: Env, out: Path) -> None:
    env.install(NEW, "1.0")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_patched, f"patched already (vLLM {NEW}, series "),
        (_part, "patched already (1 of 2 patches"),
        (_edited, f"{STORE} is not that of vLLM {NEW}"),
        (_other, f"has vLLM {OLD}, not {NEW}: set VLLM_VERSION={OLD}"),
        (_unsupported, f"has vLLM 1.0, not {NEW}: there are series for {NEW}, {OLD}"),
    ],
)
def test_base_that_cannot_be_patched(
    world: World, env: Env, prepare, words: str
) -> None:
    prepare(env, world.root / "first")
    before = env.everything()
    with pytest.raises(UserError) as error:
        image.patch(package(env), NEW, "", world.root / "out")
    assert words in str(error.value)
    assert env.everything() == before and not (world.root / "out").exists()


def test_series_that_removes_a_file_is_refused(world: World, tmp_path: Path) -> None:
    env = Env(tmp_path / "whole")
    env.install(NEW)
    with pytest.raises(UserError, match=r"removes vllm/old_mask\.py"):
        image.patch(package(env), NEW, "", tmp_path / "out")


def test_in_image_script_on_a_python_without_vllms_packages(tmp_path: Path) -> None:
    env = Env(tmp_path / "plain")
    done = subprocess.run(
        [env.python, "-B", ROOT / "scripts/in_image.py", "ready"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "lacks click" in done.stderr


def fake_engine(folder: Path, name: str, said: str, code: int = 0) -> Engine:
    """An engine that notes what it is asked, prints something and ends."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"notes = open({str(folder / 'asked')!r}, 'a')\n"
        "print(json.dumps(sys.argv[1:]), file=notes)\n"
        f"print({said!r})\nsys.exit({code})\n"
    )
    script.chmod(0o755)
    return Engine(shlex.quote(str(script)))


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


@pytest.mark.parametrize("name", ["docker", "podman", "buildah"])
def test_build_asks_each_engine_in_its_words(tmp_path: Path, name: str) -> None:
    engine = fake_engine(tmp_path, name, "done")
    engine.build("serve", "x:1", {"A": "b c"}, {"inputs": tmp_path}, 7)
    (words,) = asked(tmp_path)
    assert words[0] == "build" and words[-1] == str(ROOT)
    assert words[words.index("--target") + 1] == "serve"
    assert "A=b c" in words and f"inputs={tmp_path}" in words
    # OCI's format would drop the health check.
    assert ("--format" in words) == (name != "docker")


def test_failed_build_ends_with_the_scripts_own_line(tmp_path: Path) -> None:
    said = "#7 0.5 error: the base image is patched already\nexit code: 1"
    engine = fake_engine(tmp_path, "podman", said, 1)
    with pytest.raises(UserError, match=r"^the base image is patched already$"):
        engine.build("serve", "x:1", {}, {}, 7)


def test_base_is_pinned_by_its_digest(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    engine = fake_engine(tmp_path, "docker", json.dumps([f"host:5000/v@{digest}"]))
    assert engine.pinned("host:5000/v:1") == (f"host:5000/v@{digest}", digest)
    assert engine.pinned(f"v@{digest}") == (f"v@{digest}", digest)
    local = fake_engine(tmp_path / "local", "podman", "[]")
    assert local.pinned("mine:1") == ("mine:1", "")


def test_base_that_cannot_be_pulled(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, "podman", "no route", 1)
    with pytest.raises(UserError, match=r"cannot pull the base image v:1 .*BASE="):
        engine.pinned("v:1")


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("https://me:secret@host.example/x.git", "https://host.example/x.git"),
        ("/home/me/x", ""),
        ("git@host.example:x.git", ""),
    ],
)
def test_source_label_shows_no_secret_and_no_folder(
    monkeypatch: pytest.MonkeyPatch, url: str, label: str
) -> None:
    monkeypatch.setenv("SOURCE_URL", url)
    assert image_building.source() == label


@pytest.mark.parametrize("words", ["", "containerd", "no-dir/docker", "docker '"])
def test_engine_that_is_not_there(words: str) -> None:
    with pytest.raises(UserError, match=r"CONTAINER=|is not there"):
        Engine(words)


def variables(path: Path) -> dict[str, str]:
    """What an .env file sets."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals and re.fullmatch(r"[A-Z_]+", name), line
            assert name not in found
            found[name] = value
    return found


@pytest.mark.parametrize("path", ENV_FILES, ids=lambda path: path.name)
def test_env_file_sets_what_the_compose_file_needs(path: Path) -> None:
    values = variables(path)
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{(\w+)\}", text))
    assert used <= values.keys() and values.keys() <= used
    assert values["RELEASE"] == release.default().version
    # All of the host tier lies in /dev/shm.
    assert int(values["SHM_GIB"]) > int(values["HOST_GIB"]) > 0

    def value(match: re.Match) -> str:
        return values.get(match[1]) or match[2] or ""

    server = yaml.safe_load(text)["services"]["vllm"]
    words = shlex.split(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, server["command"]))
    assert words[0] == values["MODEL"] and "$" not in " ".join(words)
    assert words[words.index("--kv-offloading-size") + 1] == values["HOST_GIB"]
    assert "--enable-prompt-tokens-details" in words
    assert ("--speculative-config.method" in words) == (
        "SPECULATIVE=-" in path.read_text()
    )


def test_compose_file_probes_once_the_server_is_healthy() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    probe = services["probe"]
    assert probe["profiles"] == ["probe"]
    assert probe["depends_on"]["vllm"]["condition"] == "service_healthy"
    assert probe["entrypoint"][0] == "/offload-parity/docker/probe"
    assert any(volume.endswith(":/reports") for volume in probe["volumes"])
    assert services["vllm"]["build"]["target"] == "serve"
    assert services["vllm"]["ulimits"]["memlock"] == -1


def test_dockerfile_has_the_newest_release_and_the_stages() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert f"ARG VLLM_VERSION={release.default().version}\n" in text
    stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
    assert stages == ["patch", "patched", "wheel", "compiled", "test", "serve"]


@pytest.mark.parametrize("name", ["test", "build"])
def test_what_is_added_has_digests(name: str) -> None:
    text = (DOCKER / f"{name}-requirements.txt").read_text()
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        assert re.match(r"[\w-]+==[\w.]+ \\\n    --hash=sha256:[0-9a-f]{64}", entry)


def probe(folder: Path, url: str, wait: str = "1") -> tuple[int, str]:
    """Run docker/probe; how it ends, and what it says."""
    done = subprocess.run(
        [DOCKER / "probe", url, folder],
        env=os.environ | {"WAIT_SECONDS": wait},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_probe_needs_a_folder_for_its_reports(tmp_path: Path) -> None:
    code, err = probe(tmp_path / "none", "http://127.0.0.1:1")
    assert code == 1 and "mount a folder" in err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1/v1/"])
def test_probe_gives_up_on_a_server_that_does_not_answer(
    tmp_path: Path, url: str
) -> None:
    code, err = probe(tmp_path, url)
    where = "http://127.0.0.1:1/health"
    assert code == 1 and err.splitlines() == [
        f"waiting for {where}, at most 1 s (WAIT_SECONDS)",
        f"error: {where} did not answer in 1 s (WAIT_SECONDS)",
    ]


@pytest.mark.parametrize(
    ("url", "wait", "words"),
    [
        ("ftp://host", "1", "ftp://host is no address of a server"),
        ("http://", "1", "no address of a server"),
        ("http://127.0.0.1:1", "soon", "WAIT_SECONDS=soon"),
    ],
)
def test_probe_waits_for_nothing_that_cannot_be(
    tmp_path: Path, url: str, wait: str, words: str
) -> None:
    code, err = probe(tmp_path, url, wait)
    assert code == 1 and words in err and err.count("\n") == 1


def test_probe_ends_on_ctrl_c_with_what_was_measured(tmp_path: Path, fake) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        [DOCKER / "probe", fake.url, tmp_path],
        env=os.environ | {"PATH": path},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip

        def host_hit(length: int, hit: int) -> int:
            if len(fake.seen) == 30:
                os.killpg(process.pid, signal.SIGINT)
            return hit

        # It is healthy.
        fake.faults["/health"] = fake_server.error(200, "")
        fake.host_hit = host_hit
        assert process.wait(60) == 130
    assert [file.name for file in tmp_path.iterdir()] == ["boundaries.txt"]
    assert "rows measured: interrupted" in (tmp_path / "boundaries.txt").read_text()


def image_probe(engine: Engine, build: Path) -> subprocess.CompletedProcess[str]:
    """Run what make image-probe runs."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts/image.py", "probe", "--container",
         engine.text],
        env=os.environ | {"OFFLOAD_PARITY_BUILD": str(build)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_image_probe_does_not_wait_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WAIT_SECONDS", raising=False)
    engine = fake_engine(tmp_path, "docker", json.dumps([{"Config": {"User": "0"}}]))
    image_probe(engine, tmp_path / "build")
    assert "WAIT_SECONDS=60" in asked(tmp_path)[-1]


def test_image_probe_hands_the_api_key_over_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(tmp_path, "docker", json.dumps([{"Config": {"User": "0"}}]))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    image_probe(engine, tmp_path / "build")
    words = asked(tmp_path)[-1]
    assert words[words.index("OPENAI_API_KEY") - 1] == "--env"
    assert not any("secret" in word for word in words)
    monkeypatch.delenv("OPENAI_API_KEY")
    image_probe(engine, tmp_path / "build")
    assert "OPENAI_API_KEY" not in asked(tmp_path)[-1]


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [('[{"Config": null}]', 0, "no image localhost/"), ("", 1, "docker info says")],
)
def test_image_probe_without_an_image(
    tmp_path: Path, said: str, code: int, words: str
) -> None:
    engine = fake_engine(tmp_path, "docker", said, code)
    done = image_probe(engine, tmp_path / "build")
    assert done.returncode == 1 and words in done.stderr
    assert all(words[0] != "run" for words in asked(tmp_path))


def test_stand_in_builds_nothing_for_an_unknown_release(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/image_stand_in.py", "--release", "9"],
        env=os.environ | {"OFFLOAD_PARITY_BUILD": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "vLLM 9 is not supported" in done.stderr
    assert not any(tmp_path.iterdir())
