# SPDX-License-Identifier: Apache-2.0
"""What the probes say of servers whose tiers are known."""

import csv
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import fake_server
import probe_boundaries
import probe_gpu_cache
import probe_prefix
from fake_server import BLOCK_BYTES
from offload_parity.probes import boundaries, server
from offload_parity.probes.boundaries import Point, judge, lengths, verdict
from offload_parity.probes.command import open_server
from offload_parity.probes.meter import Seen
from offload_parity.probes.server import Address
from test_probe_server import run


@pytest.fixture(autouse=True)
def no_waits(monkeypatch) -> None:
    monkeypatch.setattr(server, "_POLL_S", 0.001)


def seen(host: int, gpu: int = 0) -> Seen:
    return Seen(1000, gpu, host, 0.1, 0, 0, 0)


def test_prompts_forward_and_in_reverse(fake, capsys) -> None:
    fake.host_hit = lambda length, hit: hit if len(fake.seen) < 15 else 0
    args = ("600", "8", "5", "--url", fake.url, "--json")
    assert run(probe_gpu_cache.cli, *args) == 0
    said = json.loads(capsys.readouterr().out)
    assert [r["index"] for r in said["requests"]] == [*range(8), *reversed(range(8))]
    back = said["requests"][8:]
    tiers = ["GPU"] * 3 + ["HOST"] * 2 + ["miss"] * 3
    assert [r["tier"] for r in back] == tiers
    assert all(r["gpu"] == 512 for r in back[:3])
    assert all(r["host"] == 512 for r in back[3:5])
    tiers = said["summary"]["tiers"]
    assert (tiers["GPU"]["requests"], tiers["HOST"]["hit"]) == (3, 512)
    assert said["summary"]["hits"] == 5 and said["summary"]["prompts"] == 8
    assert said["summary"]["loaded_bytes"] == 2 * 512 * BLOCK_BYTES
    assert said["summary"]["stored_bytes"] == 8 * 600 * BLOCK_BYTES
    assert said["summary"]["host_over_miss"] > 0


def test_a_tier_that_is_never_read_is_said(fake, capsys) -> None:
    fake.host_hit = lambda length, hit: 0
    assert run(probe_gpu_cache.cli, "600", "5", "5", "--url", fake.url) == 0
    assert "was written and never read" in capsys.readouterr().out


def test_the_group_that_limited_the_host_is_said(fake, capsys) -> None:
    # The first is from before the probe.
    fake.limited = {("1", "false"): 50, ("2", "true"): 7}

    def host_hit(length: int, hit: int) -> int:
        fake.limited["2", "true"] += hit
        return 0

    fake.host_hit = host_hit
    args = ("600", "5", "5", "--url", fake.url)
    assert run(probe_gpu_cache.cli, *args) == 0
    out = capsys.readouterr().out
    assert "group 2 (EAGLE) lacked 2,560 tokens that full attention had" in out
    assert "group 1" not in out

    fake.limited.clear()
    fake.host_hit = lambda length, hit: 0
    args = ("600", "5", "6", "--url", fake.url, "--json")
    assert run(probe_gpu_cache.cli, *args) == 0
    assert json.loads(capsys.readouterr().out)["limited_tokens"] == {}


def test_runs_of_other_seeds_are_apart(fake, capsys) -> None:
    for seed in ("1", "2"):
        args = ("600", "2", seed, "--url", fake.url, "--csv")
        assert run(probe_gpu_cache.cli, *args) == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [r["tier"] for r in rows] == ["miss", "miss", "GPU", "GPU"]
    assert run(probe_gpu_cache.cli, "600", "2", "2", "--url", fake.url, "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["tier"] == "GPU"


def test_siblings_and_which_of_them_first_hits(fake, capsys) -> None:
    # From the host only the third resumes at the shared prefix.
    fake.host_hit = lambda length, hit: hit if len(fake.seen) >= 8 else 0
    args = ("3", "--prefix", "1000", "--own", "300", "--url", fake.url)
    assert run(probe_prefix.cli, *args, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    cached = [(r["mode"], r["cached"], r["tier"]) for r in said["requests"]]
    assert cached[:4] == [("GPU kept", 0, "miss"), *[("GPU kept", 768, "GPU")] * 3]
    assert [c[1:] for c in cached[4:]] == [(0, "miss"), (0, "miss")] + [
        (768, "HOST")
    ] * 2
    assert "sibling 3 is the first to hit, 768 of 1,000" in said["words"][-1]


def test_without_the_development_mode_one_round_is_left_out(fake, capsys) -> None:
    fake.dev_mode = False
    args = ("3", "--prefix", "1000", "--own", "300", "--url", fake.url)
    assert run(probe_prefix.cli, *args) == 0
    out = capsys.readouterr().out
    assert "GPU emptied " not in out and "VLLM_SERVER_DEV_MODE=1" in out


def test_the_lengths_stand_around_a_boundary_that_no_interval_keeps() -> None:
    for align in (16, 32, 256):
        tried = lengths(align)
        middle = next(n for n in tried if n % align == 0)
        assert middle > 2048 and middle // align % 2 == 1
        assert tried[0] <= middle - 1 < middle + 1 <= tried[-1] < tried[0] + align
        assert {middle - 1, middle, middle + 1} <= set(tried)
    assert lengths(256, around=512, step=1) == list(range(384, 640))


def test_a_length_is_short_where_a_shorter_one_hits_more() -> None:
    hosts = [(100, 64), (110, 64), (128, 0), (140, 0), (150, 128), (160, 64)]
    judged = judge([Point(n, seen(host)) for n, host in hosts])
    assert [p.short for p in judged] == [0, 0, 64, 64, 0, 64]
    word, lines = verdict(judged)
    assert word == "AFFECTED"
    assert "nothing, though shorter ones do, at 2 of 6 lengths: 128 to 140" in lines[0]
    assert "less than shorter ones do at 1 of 6 lengths: 160" in lines[1]


def test_what_is_still_on_the_gpu_is_not_judged() -> None:
    points = [Point(100, seen(64)), Point(128, seen(0, gpu=64)), Point(150, seen(128))]
    word, lines = verdict(judge(points))
    assert word == "OK" and lines[0] == "not judged, still on the GPU: 128"
    assert verdict([Point(128, seen(0, gpu=64))])[0] == "UNKNOWN"


def test_a_window_that_shows_nothing_is_unknown(fake, capsys) -> None:
    word, lines = verdict([Point(n, seen(256)) for n in (260, 300)])
    assert word == "UNKNOWN" and "no boundary lies among them" in lines[0]
    points = [Point(100, seen(0)), Point(130, seen(128)), Point(260, seen(256))]
    word, lines = verdict(judge(points))
    assert word == "OK"
    assert lines == [
        "not judged, no shorter length restored anything: 100",
        "a resend restores what it should at all 2 lengths",
    ]
    args = ("1", "--url", fake.url, "--align")
    assert run(probe_boundaries.cli, *args, "128") == 1
    assert "--align 128: hits of this server are aligned to 256 tokens" in (
        capsys.readouterr().err
    )
    assert run(probe_boundaries.cli, *args, "512") == 0


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.33.0", "has a series for 0.33.0: make apply"),
        ("0.33.0+cu129", "has a series for 0.33.0"),
        ("0.30.1", "has no series for vLLM 0.30.1, only for 0.33.0, "),
    ],
)
def test_the_silent_fault_is_found(fake, capsys, release: str, words: str) -> None:
    fake.version = release
    # The peek block of 64 tokens is not complete.
    fake.host_hit = lambda length, hit: 0 if length % 256 < 64 else hit
    assert run(probe_boundaries.cli, "1", "--url", fake.url) == 3
    out = capsys.readouterr().out
    assert "restores nothing, though shorter ones do, at 9 of 34 lengths" in out
    assert ": 2304 to 2360" in out
    assert words in out and out.splitlines()[-1].startswith("AFFECTED: ")


def test_a_sound_server_is_ok(fake, capsys) -> None:
    assert run(probe_boundaries.cli, "1", "--url", fake.url) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "OK: hits are aligned to 256 tokens"
    )


def test_a_host_that_restores_nothing_anywhere(fake, capsys) -> None:
    fake.host_hit = lambda length, hit: 0
    assert run(probe_boundaries.cli, "1", "--url", fake.url) == 3
    assert "restores nothing at any of 34 lengths" in capsys.readouterr().out


def test_other_prompts_push_out_what_cannot_be_emptied(fake, capsys) -> None:
    fake.dev_mode = False
    fake.gpu_prompts = 50
    fake.host_hit = lambda length, hit: 0 if length % 256 < 64 else hit
    args = ("1", "--url", fake.url, "--filler", "1000")
    assert run(probe_boundaries.cli, *args) == 3
    assert "still on the GPU" not in capsys.readouterr().out
    assert run(probe_boundaries.cli, *args[1:], "--fillers", "3") == 1
    assert "raise --fillers" in capsys.readouterr().err


def test_prefix_caching_that_is_off(fake, capsys) -> None:
    fake.gpu_prompts = 0
    fake.empty_gpu()
    fake.host_hit = lambda length, hit: 0
    fake.align = 1 << 20
    assert run(probe_boundaries.cli, "1", "--url", fake.url) == 1
    assert "is prefix caching on?" in capsys.readouterr().err


def test_the_alignment_is_measured(fake) -> None:
    for align in (16, 32, 256):
        fake.align = align
        meter, maker = open_server(Address(fake.url))
        assert boundaries.alignment(meter, maker, align) == align


@pytest.mark.parametrize(
    ("command", "args", "status"),
    [
        (probe_gpu_cache.cli, ("600", "3", "5"), 0),
        (probe_prefix.cli, ("5", "--prefix", "600", "--own", "300"), 0),
        (probe_boundaries.cli, ("5",), 0),
    ],
)
def test_pictures(fake, capsys, tmp_path: Path, command, args, status: int) -> None:
    picture = tmp_path / "picture.png"
    assert run(command, *args, "--url", fake.url, "--plot", str(picture)) == status
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_first(
    fake, capsys, monkeypatch
) -> None:
    args = ("600", "3", "5", "--url", fake.url, "--plot")
    for path, words in (("x.jpeg2", "name a .png"), ("/no/such/x.png", "is no folder")):
        assert run(probe_gpu_cache.cli, *args, path) == 1
        assert words in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(probe_gpu_cache.cli, *args, "x.png") == 1
    assert "-m pip install matplotlib" in capsys.readouterr().err
    assert not fake.seen


@pytest.mark.parametrize("command", [c.cli for c in (probe_gpu_cache, probe_prefix)])
def test_help_and_formats(capsys, command) -> None:
    assert run(command, "--help") == 0
    assert "--api-key" in capsys.readouterr().out
    assert run(command, "--json", "--csv") == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "args", "requests", "rows"),
    [
        (probe_gpu_cache.cli, ("600", "8", "5"), 10, 9),
        (probe_prefix.cli, ("5", "--prefix", "1000", "--own", "300"), 6, 5),
        # Those before measure the alignment, and send each length first.
        (probe_boundaries.cli, ("5", "--step", "64"), 19, 2),
    ],
)
def test_what_was_measured_is_printed_if_the_server_goes(
    fake, capsys, tmp_path: Path, command, args, requests: int, rows: int
) -> None:
    """An hour of rows is not thrown away, and no picture shows half of them."""

    def host_hit(length: int, hit: int) -> int:
        if len(fake.seen) == requests:
            fake.faults["/v1/chat/completions"] = fake_server.error(500, "gone")
        return hit

    fake.host_hit = host_hit
    plot = tmp_path / "half.svg"
    args = (*args, "--url", fake.url, "--json", "--plot", str(plot))
    assert run(command, *args) == 1
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert len(said["requests"]) == rows and said["unfinished"]
    assert f"NOT FINISHED, {rows} rows measured: " in said["words"][1]
    assert err.startswith("error: ") and "verdict" not in said
    assert not plot.exists()


def test_what_was_measured_is_printed_on_ctrl_c(fake, capsys) -> None:
    def host_hit(length: int, hit: int) -> int:
        if len(fake.seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return hit

    fake.host_hit = host_hit
    assert run(probe_gpu_cache.cli, "600", "8", "5", "--url", fake.url) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:2] == ["direction", "index"]
    assert "NOT FINISHED, 1 rows measured: interrupted" in out
    assert err.endswith("interrupted; nothing was left half done\n")
