# SPDX-License-Identifier: Apache-2.0
"""The ledger is silent when all is well and speaks when a copy goes wrong."""

import random

import pytest

from parity.engine import Engine
from parity.geometry import GEMMA_NO_EAGLE, SMALL, SMALL_NO_EAGLE
from parity.prompts import prompt


def play(engine: Engine, before_loads=lambda: None) -> None:
    tokens = prompt(1, 500)
    engine.run(tokens, max_tokens=5)
    before_loads()
    engine.reset_gpu()
    engine.run(tokens, max_tokens=5)
    engine.check_at_rest()


@pytest.mark.parametrize("geometry", [SMALL, GEMMA_NO_EAGLE], ids=lambda g: g.name)
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_to_say_when_all_is_well(geometry, workers):
    draw = random.Random(1)
    engine = Engine(
        geometry,
        gpu_blocks=3000,
        workers=workers,
        ledger=True,
        max_num_batched_tokens=128,
        transfer_delay=lambda: draw.randrange(4),
    )
    play(engine)
    assert engine.ledger.findings == []
    assert engine.ledger.loads > 0
    assert engine.ledger.loads % workers == 0


def test_a_store_of_the_wrong_bytes_is_found_when_it_is_loaded():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=3000, ledger=True)
    spoiled = []

    def spoil(is_store: bool, block: int, chunk: int) -> bool:
        if is_store and not spoiled:
            spoiled.append(chunk)
        return is_store and [chunk] == spoiled

    engine.ranks[0].spoil = spoil
    play(engine)
    assert f"chunk {spoiled[0]}" in engine.ledger.findings[0]


def test_a_load_of_the_wrong_bytes_is_found_in_the_gpu_cache():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=3000, ledger=True)
    spoiled = []

    def spoil(is_store: bool, block: int, chunk: int) -> bool:
        if not is_store and not spoiled:
            spoiled.append(chunk)
        return not is_store and [chunk] == spoiled

    engine.ranks[0].spoil = spoil
    play(engine)
    assert any("cached under a hash" in words for words in engine.ledger.findings)
    assert any("lacks the content" in words for words in engine.ledger.findings)


def test_a_load_from_another_chunk_is_found():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=3000, ledger=True)
    rank = engine.ranks[0]
    load = rank.submit_load

    def shifted(job_id, src_spec, dst_spec, *rest, **more):
        src_spec.block_ids[:] = list(reversed(src_spec.block_ids))
        return load(job_id, src_spec, dst_spec, *rest, **more)

    rank.submit_load = shifted
    play(engine)
    assert any("does not hold block" in words for words in engine.ledger.findings)


def test_a_copy_whose_source_changes_on_the_way_is_found():
    engine = Engine(
        SMALL_NO_EAGLE, gpu_blocks=3000, ledger=True, transfer_delay=lambda: 5
    )
    rank = engine.ranks[0]
    engine.submit(prompt(1, 500))
    for _ in range(2):
        engine.step()
    (transfer, *_) = rank._in_flight.values()
    group, block, *_ = transfer.pairs[0]
    rank._gpu[block] = (group, [None] * engine.ledger.units_per_block[group])
    engine.drain()
    assert any("changed while it was read" in x for x in engine.ledger.findings)


def test_a_chunk_left_pinned_is_a_leak():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=3000, ledger=True)

    def pin():
        next(iter(engine.parts._host_chunks.values())).ref_cnt += 1

    play(engine, before_loads=pin)
    assert any("still pinned" in words for words in engine.ledger.findings)
