# SPDX-License-Identifier: Apache-2.0
"""The bench measures the calls that it says it measures, and leaves no trace."""

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from parity import bench
from parity.engine import Engine
from parity.geometry import DSV4


def records(count: bool) -> dict[tuple[int, str], dict]:
    return {
        (retention, r["case"]): r
        for retention in (0, 4096)
        for r in bench.measured((2048,), count, retention)
    }


def test_counts_grow_with_what_is_looked_at():
    found = records(count=True)
    hit = found[0, "hit"]
    assert hit["external"] == 1792
    # seven full-attention chunks and the peek chunk's tails at least
    assert hit["figures"]["host lookups"] >= 2048 // 256
    assert found[0, "miss"]["figures"]["host lookups"] == 1
    assert found[0, "miss"]["figures"]["mask elements"] >= 2048 // 4
    again = found[4096, "hit"]
    assert hit["figures"]["host lookups"] == again["figures"]["host lookups"]


def test_each_decision_takes_time_where_it_is_made():
    found = records(count=False)
    for record in found.values():
        decisions = {"store", "lookup", "load", "GPU store", "GPU lookup"}
        assert set(record["figures"]) == decisions
        assert all(seconds > 0 for seconds in record["figures"].values())
    local = found[0, "hit on the GPU"]
    assert local["local"] and not local["external"]


def test_nothing_stays_wrapped():
    engine = Engine(DSV4, 0, gpu_blocks=2000, host_chunks=2000)
    parts = engine.parts
    mask = vars(SlidingWindowManager)["reachable_block_mask"]
    for count in (False, True):
        with bench.metered(parts, count):
            pass
        assert "lookup" not in vars(parts.manager)
        for owner, method in parts.decisions().values():
            assert method not in vars(owner)
    assert vars(SlidingWindowManager)["reachable_block_mask"] is mask


def test_siblings_part_at_four_tenths():
    engine = Engine(DSV4, 0, gpu_blocks=2000, host_chunks=2000)
    prompts = bench.Prompts(engine.parts, 2000)
    first, _ = prompts.first(1000)
    for number in (1, 2):
        tokens, hashes = prompts.sibling(1000, number)
        assert len(tokens) == 1000 and len(hashes) == 250
        assert tokens[:400] == first[:400] and tokens[400] != first[400]
