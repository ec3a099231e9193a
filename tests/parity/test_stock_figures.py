# SPDX-License-Identifier: Apache-2.0
"""The simulation shows what published releases were measured to do.

Run with PARITY_TREE=stock and a published release on PYTHONPATH.
"""

import pytest

from parity import release_adapter, scenarios, shared, sweep
from parity.engine import Engine
from parity.geometry import DSV4, DSV4_NO_EAGLE, GEMMA, GEMMA_NO_EAGLE, GEOMETRIES
from parity.history import Setup, play
from parity.prompts import prompt

# (geometry, retention): {length: (GPU hit, host hit)}
REPLAYS = {
    "0.33.0": {
        ("dsv4-mtp", 0): {8193: (7936, 0), 7102: (6656, 6912)},
        ("dsv4-mtp", 4096): {8193: (7936, 4096), 7102: (6656, 6912)},
        ("dsv4-mtp", None): {8193: (7936, 7936), 7102: (6912, 6912)},
        ("gemma-eagle", 0): {
            8076: (8032, 0),
            4937: (4896, 0),
            8514: (8480, 0),
            7656: (7616, 0),
            7341: (7296, 0),
            6342: (6304, 0),
            8193: (8160, 0),
        },
        ("gemma", 0): {8193: (8192, 8192)},
    },
    "0.29.0": {
        ("dsv4-mtp", 0): {8192: (7936, 0), 8193: (0, 0), 7102: (6912, 6912)},
        ("dsv4-mtp", 4096): {8192: (7936, 0), 8193: (4096, 0), 7102: (6912, 6912)},
        ("dsv4-mtp", None): {8192: (7936, 0), 8193: (7936, 0), 7102: (6912, 6912)},
        ("gemma-eagle", 0): {8076: (0, 8048), 4937: (0, 4912), 8193: (0, 8176)},
        ("gemma", 0): {8193: (8192, 8192)},
    },
    # The GPU side knows no peek, and the store's tails end a chunk early.
    "0.27.1": {
        ("dsv4-mtp", None): {
            500: (256, 256),
            7102: (6912, 6912),
            8192: (7936, 0),
            8193: (7936, 0),
        },
        ("dsv4-mtp", 0): {7102: (6912, 6912), 8192: (7936, 0), 8193: (0, 0)},
        ("dsv4-mtp", 4096): {7102: (6912, 6912), 8193: (4096, 0)},
        ("dsv4", 0): {500: (256, 256), 8193: (8192, 8192)},
        ("gemma-eagle", None): {8193: (8160, 8176), 8514: (8480, 8496)},
        ("gemma-eagle", 0): {8193: (0, 8176), 8514: (0, 8496), 4937: (0, 4912)},
    },
    "0.26.0": {
        ("dsv4-mtp", None): {500: (256, 0), 7102: (6912, 0), 8193: (7936, 0)},
        ("dsv4-mtp", 0): {500: (256, 0), 7102: (6912, 0), 8193: (0, 0)},
        ("dsv4-mtp", 4096): {500: (256, 0), 7102: (6912, 0), 8193: (4096, 0)},
        ("dsv4", None): {500: (256, 256), 8193: (8192, 8192)},
        ("gemma-eagle", None): {8193: (8160, 8176), 8514: (8480, 8496)},
        ("gemma-eagle", 0): {8193: (0, 8176), 8514: (0, 8496), 4937: (0, 4912)},
    },
    "0.25.1": {
        ("dsv4-mtp", None): {500: (256, 0), 7102: (6912, 0), 8193: (7936, 0)},
        ("dsv4-mtp", 0): {500: (256, 0), 7102: (6912, 0), 8193: (0, 0)},
        ("dsv4-mtp", 4096): {500: (256, 0), 7102: (6912, 0), 8193: (4096, 0)},
        ("dsv4", None): {500: (256, 256), 8193: (8192, 8192)},
        ("gemma-eagle", None): {8193: (8160, 8160), 8514: (8480, 8160)},
    },
}
# (geometry, retention): chunks stored for 49,004 tokens
CHUNKS = {
    "0.33.0": {
        ("dsv4", 0): 213,
        ("dsv4-mtp", 0): 214,
        ("dsv4", 4096): 455,
        ("dsv4-mtp", 4096): 467,
        ("dsv4", None): 4410,
        ("dsv4-mtp", None): 4600,
    },
    # Its store knows no retention, like those before.
    "0.29.0": {
        ("dsv4", 0): 4410,
        ("dsv4-mtp", 0): 4601,
        ("dsv4-mtp", 4096): 4601,
        ("dsv4", None): 4410,
        ("dsv4-mtp", None): 4601,
    },
    "0.27.1": {
        ("dsv4", 0): 4410,
        ("dsv4-mtp", 0): 4601,
        ("dsv4", None): 4410,
        ("dsv4-mtp", None): 4601,
    },
    "0.26.0": {("dsv4", 0): 4393, ("dsv4-mtp", 0): 4393, ("dsv4-mtp", None): 4393},
    "0.25.1": {("dsv4-mtp", None): 4388, ("dsv4-mtp", 0): 4388},
}
# Four siblings of 20,000 + 3,000 tokens: (geometry, tier, retention): their hits
SIBLINGS = {
    "0.33.0": {
        (DSV4_NO_EAGLE, "gpu", 0): [0, 0, 19968, 19968],
        (DSV4_NO_EAGLE, "host", 0): [0, 0, 0, 0],
        (DSV4_NO_EAGLE, "host", 4096): [0, 16384, 16384, 16384],
        (DSV4, "gpu", 0): [0, 0, 0, 0],
        (DSV4, "gpu", 4096): [0, 16384, 16384, 16384],
        (DSV4, "host", None): [0, 19712, 19712, 19712],
    },
    # Of 20,000 tokens the store keeps a drafter's chunk below 19,968, not the one past.
    "0.29.0": {
        (DSV4_NO_EAGLE, "gpu", 0): [0, 0, 19968, 19968],
        (DSV4_NO_EAGLE, "host", 0): [0, 19968, 19968, 19968],
        (DSV4, "gpu", 0): [0, 0, 0, 0],
        (DSV4, "gpu", 4096): [0, 16384, 16384, 16384],
        (DSV4, "host", 0): [0, 0, 0, 0],
        (DSV4, "host", None): [0, 0, 0, 0],
    },
    # Their stores know no retention, and the EAGLE group keeps no junction's tail.
    "0.27.1": {
        (DSV4_NO_EAGLE, "gpu", 0): [0, 0, 19968, 19968],
        (DSV4_NO_EAGLE, "host", 0): [0, 19968, 19968, 19968],
        (DSV4, "gpu", 0): [0, 0, 0, 0],
        (DSV4, "gpu", 4096): [0, 16384, 16384, 16384],
        (DSV4, "host", None): [0, 0, 0, 0],
    },
    # Its store knows no retention; the GPU cache knows no junctions.
    "0.25.1": {
        (DSV4_NO_EAGLE, "gpu", 0): [0, 0, 0, 0],
        (DSV4_NO_EAGLE, "host", 0): [0, 19968, 19968, 19968],
        (DSV4, "gpu", 4096): [0, 16384, 16384, 16384],
        (DSV4, "host", None): [0, 0, 0, 0],
    },
}
# Gemma without a drafter, retention 0: (tokens, edited at the end): (GPU, host)
EDITS = {
    "0.33.0": {(4100, 5): (0, 0), (4110, 5): (4096, 4096)},
    "0.29.0": {(4100, 5): (0, 4064), (4110, 5): (4096, 4096)},
    "0.27.1": {(4100, 5): (0, 4064), (4110, 5): (4096, 4096)},
    "0.26.0": {(4100, 5): (0, 4064), (4110, 5): (4096, 4096)},
    "0.25.1": {(4100, 5): (0, 4064), (4110, 5): (4096, 4096)},
}
SIBLINGS["0.26.0"] = SIBLINGS["0.27.1"]
# Measured as well, and the same.
for _release, _like in (
    ("0.28.0", "0.29.0"),
    ("0.30.0", "0.33.0"),
    ("0.31.0", "0.33.0"),
    ("0.32.0", "0.33.0"),
):
    for _figures in (REPLAYS, CHUNKS, SIBLINGS, EDITS):
        _figures[_release] = _figures[_like]

VERSION = release_adapter.version()


def test_the_figures_of_this_release_are_known():
    assert VERSION in REPLAYS


@pytest.mark.parametrize("case", REPLAYS.get(VERSION, {}), ids=str)
def test_replays(case):
    name, retention = case
    known = REPLAYS[VERSION][case]
    measured = sweep.replays(GEOMETRIES[name], retention, list(known))
    assert {r.length: (r.gpu, r.host) for r in measured} == known


@pytest.mark.parametrize("case", CHUNKS.get(VERSION, {}), ids=str)
def test_chunks_stored_for_49004_tokens(case):
    name, retention = case
    engine = Engine(GEOMETRIES[name], retention, gpu_blocks=24_000)
    first = engine.run(prompt(0, 49_004))
    assert first.stored_chunks == CHUNKS[VERSION][case]


@pytest.mark.parametrize("case", SIBLINGS.get(VERSION, {}), ids=str)
def test_siblings(case):
    geometry, tier, retention = case
    assert shared.hits(geometry, retention, tier) == SIBLINGS[VERSION][case]


@pytest.mark.parametrize("case", EDITS.get(VERSION, {}), ids=str)
def test_edits_near_the_end(case):
    scenario = scenarios.edit_near_end(*case)
    hits = tuple(
        play(Setup(GEMMA_NO_EAGLE, 0, tier).engine(), scenario.history, tier)[1].hit
        for tier in ("gpu", "host")
    )
    assert hits == EDITS[VERSION][case]


def test_a_drafter_hole_at_a_prefill_chunk_is_seen_by_the_sweep():
    # Fixed in 0.26.0.
    if_broken = {"0.25.1": [8514]}
    records = sweep.measure(GEMMA, [8193, 8514], [None])
    short = [r["length"] for r in records if r["host"] < r["want_host"]]
    assert short == if_broken.get(VERSION, [])
