# SPDX-License-Identifier: Apache-2.0
"""What is said of a server that is missing or unsuitable."""

import json
import socket
import sys

import pytest

import fake_server
import make_request
import probe_boundaries
import probe_gpu_cache
import probe_prefix
from offload_parity import cli
from offload_parity.errors import UserError
from offload_parity.probes import server as server_module
from offload_parity.probes.command import open_server
from offload_parity.probes.counters import Counters, difference
from offload_parity.probes.server import Address

PROBES = {
    "gpu_cache": (probe_gpu_cache.cli, ("600", "2")),
    "prefix": (probe_prefix.cli, ("--prefix", "600", "--own", "300")),
    "boundaries": (probe_boundaries.cli, ()),
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_SETTLE_S", 0.3)


def run(command, *args: str) -> int:
    """The exit status of a script with this command line."""
    before = sys.argv
    sys.argv = ["probe", *args]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.run(command)
            sys.exit(0)
    finally:
        sys.argv = before
    return ended.value.code or 0


def refused(capsys, command, *args: str) -> str:
    """The one line that a refusal says."""
    assert run(command, *args) == 1
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1 and not any("Traceback" in line for line in lines), lines
    return said[0]


def test_no_server_at_all(capsys) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for command, args in PROBES.values():
            said = refused(capsys, command, *args, "--url", url)
            assert url in said and "no connection" in said and "--url" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"details": False}, "--enable-prompt-tokens-details"),
        ({"offload": False}, "--kv-offloading-size"),
        ({"metrics": False}, "--disable-log-stats"),
        ({"asleep": True}, "wake it up"),
        ({"engines": ("0", "1")}, "2 engines (0, 1)"),
        ({"models": []}, "serves no model"),
        (
            {"models": [{"id": "a"}, {"id": "b"}]},
            "serves a, b: choose one with --model",
        ),
        ({"models": [{"id": "fake", "max_model_len": 100}]}, "--max-model-len of 100"),
    ],
)
@pytest.mark.parametrize("probe", PROBES)
def test_unsuitable_servers(fake, capsys, probe: str, change: dict, words: str) -> None:
    vars(fake).update(change)
    command, args = PROBES[probe]
    assert words in refused(capsys, command, *args, "--url", fake.url)


@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("/metrics", fake_server.error(404, {"detail": "x"}), "/metrics answers 404"),
        (
            "/metrics",
            lambda h: h.reply("vllm:request_success_total{ nonsense"),
            "cannot be read",
        ),
        (
            "/v1/models",
            fake_server.error(500, {"error": {"message": "out of order"}}),
            "out of order",
        ),
        ("/v1/models", fake_server.error(401, {"error": "x"}), "refuses the API key"),
        ("/v1/models", lambda h: h.reply("<html>"), "is this a vLLM server?"),
        ("/v1/models", lambda h: h.reply({"ok": True}), "lists no models"),
        ("/tokenize", fake_server.error(404, {"detail": "x"}), "has no /tokenize"),
        (
            "/v1/chat/completions",
            fake_server.error(500, "boom"),
            "failed with 500: boom",
        ),
        ("/v1/chat/completions", fake_server.truncated, "broke off"),
        ("/v1/chat/completions", fake_server.half_json, "no whole JSON"),
        (
            "/v1/chat/completions",
            lambda h: h.reply({"choices": []}),
            "nothing of its usage",
        ),
    ],
)
def test_faulty_answers(fake, capsys, path: str, fault, words: str) -> None:
    fake.faults[path] = fault
    said = refused(capsys, probe_gpu_cache.cli, "600", "2", "--url", fake.url)
    assert words in said


@pytest.mark.parametrize(
    "fault", [fake_server.dribble, lambda h: __import__("time").sleep(1)]
)
def test_an_answer_that_never_becomes_whole(fake, capsys, fault) -> None:
    fake.faults["/v1/chat/completions"] = fault
    args = ("600", "2", "--url", fake.url, "--timeout", "0.4")
    assert "no whole answer in 0.4 s" in refused(capsys, probe_gpu_cache.cli, *args)


def test_a_restart_in_mid_run_is_noticed(fake) -> None:
    meter, maker = open_server(Address(fake.url))
    meter.send(maker.prompt(300, 1), 300)
    meter.send(maker.prompt(300, 3), 300)
    fake.requests = fake.stored = 0
    with pytest.raises(UserError, match="went backwards"):
        meter.send(maker.prompt(300, 2), 300)
    with pytest.raises(UserError, match="restarted, or several replicas"):
        difference(Counters(started=1.0), Counters(started=2.0))


def test_a_request_that_another_replica_counted(fake) -> None:
    meter, maker = open_server(Address(fake.url))
    fake.extra_requests = -1
    with pytest.raises(UserError, match="does not count our request"):
        meter.send(maker.prompt(300, 1), 300)


def test_traffic_of_others_is_said(fake, capsys) -> None:
    fake.extra_requests = 2
    assert run(probe_gpu_cache.cli, "600", "2", "7", "--url", fake.url) == 0
    assert "8 requests of somebody else" in capsys.readouterr().out


def test_a_server_that_others_keep_busy_is_not_waited_for(
    fake, capsys, monkeypatch
) -> None:
    fake.others_running = 1
    monkeypatch.setattr(server_module, "_SETTLE_S", 60)
    monkeypatch.setattr(server_module, "_BUSY_S", 0.05)
    assert run(probe_gpu_cache.cli, "600", "2", "7", "--url", fake.url) == 0


def test_the_address_is_honoured(fake, capsys) -> None:
    fake.models.append({"id": "adapter", "parent": "fake"})
    args = ("50", "1", "--url", f"{fake.url}/v1/", "--api-key", "secret")
    assert run(make_request.cli, *args) == 0
    assert fake.seen[0]["model"] == "fake"
    assert all(h["Authorization"] == "Bearer secret" for h in fake.headers)
    assert "secret" not in "".join(capsys.readouterr())
    args = ("50", "1", "--url", fake.url, "--model")
    assert run(make_request.cli, *args, "adapter") == 0
    assert fake.seen[-1]["model"] == "adapter"
    capsys.readouterr()
    said = refused(capsys, make_request.cli, *args, "other")
    assert "does not serve 'other'; it serves fake, adapter" in said


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://"]
)
def test_an_address_that_is_none(capsys, url: str) -> None:
    said = refused(capsys, make_request.cli, "50", "1", "--url", url)
    assert f"{url!r} is no address of a server: give --url" in said


@pytest.mark.parametrize("key", ["ключ", "a\nb", "key\u2013x"])
def test_a_key_that_no_header_can_hold(fake, capsys, key: str) -> None:
    args = ("50", "1", "--url", fake.url, "--api-key", key)
    said = refused(capsys, make_request.cli, *args)
    assert "--api-key" in said and key not in said


def test_the_environments_login_and_certificates_do_not_win(
    fake, capsys, monkeypatch, tmp_path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(netrc))
    args = ("50", "1", "--url", fake.url, "--api-key", "secret")
    assert run(make_request.cli, *args) == 0
    assert all(h["Authorization"] == "Bearer secret" for h in fake.headers)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    server = server_module.Server(Address(fake.url, verify=False))
    sent = []
    monkeypatch.setattr(
        server._session, "send", lambda request, **more: sent.append(more) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        _ = server.model
    assert sent[0]["verify"] is False


def test_tls_that_is_not_trusted(capsys) -> None:
    with fake_server.running() as fake:
        url = fake.url.replace("http:", "https:")
        assert "TLS failed" in refused(
            capsys, make_request.cli, "50", "1", "--url", url
        )


def test_make_request_prints_the_servers_json_and_the_overhead(fake, capsys) -> None:
    assert run(make_request.cli, "50", "7", "--url", fake.url, "--max-tokens", "3") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["usage"]["prompt_tokens"] == 50
    assert "50 input tokens, 4 of them the chat template's (2 before, 2 after" in err
    assert fake.seen[-1]["max_tokens"] == 3


def test_a_request_to_a_server_that_hides_what_is_cached(fake, capsys) -> None:
    fake.details = False
    assert run(make_request.cli, "50", "7", "--url", fake.url) == 0
    assert "hides what was cached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("4", "1"), 1, "ask for at least 5"),
        (("50", "1", "--prefix", "48", "--prefix-seed", "x"), 1, "at most 47"),
        (("50", "1", "--prefix", "8"), 2, "give both or neither"),
        (("0", "1"), 2, "0 is not in the range"),
        (("65536", "1"), 1, "65,536 tokens and 1 of output are more than"),
        (("65000", "1", "--max-tokens", "600"), 1, "and 600 of output are more than"),
    ],
)
def test_requests_that_cannot_be_made(fake, capsys, args, status, words) -> None:
    assert run(make_request.cli, *args, "--url", fake.url) == status
    assert words in capsys.readouterr().err


def test_a_number_is_no_metric_of_another_name() -> None:
    text = (
        "vllm:prefix_cache_hits_total 3.0\nexternal_vllm:prefix_cache_hits_total 9.0\n"
    )
    assert Counters.parse(text).gpu_hits == 3
