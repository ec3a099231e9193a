# SPDX-License-Identifier: Apache-2.0
"""The experiment's arithmetic, what it calls a finding, and its report."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload_parity import experiment
from offload_parity.experiment import Found, Size
from offload_parity.probes import server
from offload_parity.probes.boundaries import Point
from offload_parity.probes.counters import Difference
from offload_parity.probes.gpu_cache import Request
from offload_parity.probes.meter import Seen
from offload_parity.probes.prefix import EVICTED, KEPT, Sibling
from offload_parity.sim_server import Plan, Running
from offload_parity.simulation import Tree

# DeepSeek-V4 on 0.25.1, as the executor reports it.
FACTS = {
    "gpu_blocks": 6732,
    "host_blocks": 64 * 2**30 // (2 * 1_039_680),
    "block_bytes": 1_039_680,
    "groups": [
        {"kind": kind, "block": block, "window": window, "eagle": eagle,
         "tail_blocks": tail}
        for kind, block, window, eagle, tail in (
            ("full", 256, None, False, None),
            ("swa", 64, 128, False, 2),
            ("swa", 64, 128, True, 2),
            ("swa", 4, 8, False, 2),
            ("swa", 8, 128, False, 16),
        )
    ],
}  # fmt: skip
PER_PROMPT = 467 * 1_039_680 * 2


def plan(label: str = "patched", **more) -> Plan:
    fields = {"version": "0.25.1", "ranks": 2, "retention": 4096}
    return Plan(tree=Tree(label, Path("tree")), **(fields | more))


def seen(cached: int, host: bool = True, stored: int = 0) -> Seen:
    tokens = (0, cached) if host else (cached, 0)
    return Seen(49_004, *tokens, 0.1, stored, 0, 0)


def found(label: str = "patched", hits: int = 70) -> Found:
    """As measured: 100 prompts, of which the newest 70 hit, 7 of them the GPU."""
    cache = [Request("forward", i, seen(0, stored=PER_PROMPT)) for i in range(100)]
    cache += [
        Request("reverse", 99 - i, seen(48_896 if i < hits else 0, host=i >= 7))
        for i in range(100)
    ]
    siblings = [
        Sibling(mode, i + 1, seen(cached))
        for mode in (KEPT, EVICTED)
        for i, cached in enumerate((0, 16_384, 19_712, 19_712))
    ]
    hits = ((2176, 2048), (2304, 2048), (2400, 2304))
    points = [Point(n, seen(host)) for n, host in hits]
    total = Difference(200, 0, 0, 100 * PER_PROMPT, 5 * 10**9)
    return Found(plan(label), FACTS, cache, total, siblings, points)


def test_the_arithmetic_of_the_49_000_token_table() -> None:
    sums = experiment.arithmetic(plan(), FACTS, 49_004)
    assert (sums.full, sums.positions, sums.tails) == (191, 12, (2, 3, 2, 16))
    assert (sums.blocks, sums.bytes, sums.fit) == (467, PER_PROMPT, 70)
    one_rank = FACTS | {"host_blocks": 64 * 2**30 // 1_039_680}
    assert experiment.arithmetic(plan(ranks=1), one_rank, 49_004).fit == 141
    assert experiment.arithmetic(plan(retention=None), FACTS, 49_004) is None
    # A replay boundary that is a multiple of the interval is kept once.
    assert experiment.arithmetic(plan(), FACTS, 8_192 + 64).positions == 2
    assert experiment.arithmetic(plan(), FACTS, 8_192 + 63).positions == 2


def test_what_was_measured_is_no_finding() -> None:
    assert experiment.check(found(), Size()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.points.append(Point(2320, seen(0), 2048)), "boundaries: a resend"),
        (lambda f: f.siblings.append(Sibling(EVICTED, 5, seen(16_384))),
         "prefix, GPU emptied: sibling 5 hits 16384 of 19712"),
        (lambda f: f.cache.__setitem__(-100, Request("reverse", 99, seen(48_640))),
         "cache: 69 prompts hit 48896, 70 fit"),
        (lambda f: f.cache.__setitem__(0, Request("forward", 0, seen(0, stored=5))),
         "cache: a prompt stores 5 bytes, not 971061120"),
    ],
)  # fmt: skip
def test_a_figure_that_is_not_right_is_a_finding(change, words: str) -> None:
    one = found()
    change(one)
    (line,) = experiment.check(one, Size())
    assert words in line and line.startswith("vLLM 0.25.1 patched, retention 4096: ")


def test_at_the_releases_default_the_newest_must_hit() -> None:
    one = found(hits=0)
    one.plan = replace(one.plan, retention=None)
    (line,) = experiment.check(one, Size())
    assert "the newest hits 0 of 48896" in line


def test_a_stock_tree_must_be_found_affected() -> None:
    (line,) = experiment.check(found("stock"), Size())
    assert "the fault that this release has is not found" in line
    one = found("stock")
    one.points = [Point(n, seen(0)) for n in (2176, 2304)]
    assert experiment.check(one, Size()) == []


def test_the_report_has_the_figures_and_the_arithmetic(tmp_path: Path) -> None:
    one = found()
    experiment.draw(one, Size(), tmp_path)
    text = experiment.report([one, found("stock", hits=7)], Size(), 12.0)
    assert (
        "| 0.25.1 | patched | 4096 | 2 | 64 | 7 × 48896 | 0 | 63 × 48896 | 30 |" in text
    )
    assert "| 0.25.1 | stock | 4096 | 2 | 64 | 7 × 48896 | 0 | 0 | 93 |" in text
    assert (
        "191 full blocks + 12 boundaries × (2 + 3 + 2 + 16) tail blocks = 467" in text
    )
    assert "into 64 GiB go 70 (141 with one rank). Measured: 971,061,120 bytes." in text
    assert (
        "| 0, 16,384, 19,712, 19,712 | 0, 16,384, 19,712, 19,712 | 0 of 3: OK |" in text
    )
    for picture in one.pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"]({picture.name})" in text


def test_the_quick_servers_are_the_same_but_for_their_size() -> None:
    small = experiment.quick(plan())
    assert (small.retention, small.ranks, small.mtp) == (4096, 2, 2)
    size = int(small.host_gib * 2**30) // (small.ranks * FACTS["block_bytes"])
    facts = FACTS | {"host_blocks": size}
    sums = experiment.arithmetic(small, facts, experiment.QUICK.tokens)
    # Some prompts must not fit, or the tier's size would not show.
    assert 0 < sums.fit < experiment.QUICK.prompts


def test_the_probes_as_it_runs_them(fake, monkeypatch) -> None:
    monkeypatch.setattr(server, "_POLL_S", 0.001)
    size = Size(tokens=600, prompts=4, prefix=1000, own=300, siblings=3, step=128)
    running = Running(fake.url, FACTS, Path("log"), None)
    done = []
    measured = experiment.measure(plan(), running, size, lambda: done.append(1))
    assert len(done) == size.requests(256)
    assert [s.seen.tier for s in measured.siblings[:2]] == ["miss", "GPU"]
    assert [r.seen.cached for r in measured.cache] == [0] * 4 + [512] * 4
    assert not any(point.short for point in measured.points)
