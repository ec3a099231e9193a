# SPDX-License-Identifier: Apache-2.0
"""The ledger is silent when all is well and speaks when a copy goes wrong."""

import random

import pytest

from parity.engine import Engine
from parity.geometry import (
    EXAONE_SWA,
    GEMMA_NO_EAGLE,
    GPT_OSS,
    PURE_FULL,
    SMALL,
    SMALL_NO_EAGLE,
    Group,
)
from parity.ledger import Ledger, LedgerWorker
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


# --- drafts ---


def drafting(geometry=SMALL, **options) -> Engine:
    """An engine whose drafter is sometimes right."""
    draw = random.Random(7)
    return Engine(
        geometry,
        gpu_blocks=3000,
        ledger=True,
        accept=lambda: draw.randrange(3),
        **options,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "geometry", [SMALL, GPT_OSS, EXAONE_SWA, PURE_FULL], ids=lambda g: g.name
)
def test_accepted_drafts_are_as_good_as_computed_tokens(geometry, asynchronous):
    plain = Engine(geometry, gpu_blocks=3000)
    engine = drafting(geometry, async_scheduling=asynchronous)
    tokens = prompt(1, 300)
    wanted = plain.run(tokens, max_tokens=90).output
    first = engine.run(tokens, max_tokens=90)
    assert first.output == wanted
    assert engine.drafts_accepted > 30
    assert engine.ledger.step < 70
    engine.reset_gpu()
    turn = engine.run(tokens + wanted + prompt(2, 60), max_tokens=40)
    # The prompt's own boundary at least; 0.25.1 stops there if asynchronous.
    assert turn.num_external >= 256
    engine.check_at_rest()
    assert engine.ledger.findings == []
    assert engine.ledger.stale_drafts == 0


def test_without_a_drafter_nothing_is_drafted():
    engine = drafting(SMALL_NO_EAGLE)
    engine.run(prompt(1, 100), max_tokens=20)
    assert engine.drafts_accepted == 0
    assert engine.ledger.step >= 20


def test_a_token_whose_place_a_rejected_draft_took_is_no_content():
    engine = Engine(PURE_FULL, gpu_blocks=3000, ledger=True)
    scheduler = engine.parts.scheduler
    update = scheduler.update_from_output

    def commits_what_was_only_sampled(*args):
        outputs = update(*args)
        for request in scheduler.running:
            scheduler.kv_cache_manager.cache_blocks(request, request.num_tokens)
        return outputs

    engine.run(prompt(2, 100), max_tokens=40)
    assert engine.ledger.findings == []
    scheduler.update_from_output = commits_what_was_only_sampled
    engine.run(prompt(1, 100), max_tokens=40)
    assert any("cached under a hash" in words for words in engine.ledger.findings)


def test_a_rejected_draft_ends_what_a_block_held_behind_it():
    ledger = Ledger((Group("full", 16),), 16, 1)
    rank = LedgerWorker(ledger)
    ledger.add_request("r", prompt(1, 40))
    rank.compute("r", [[1, 2, 3]], 0, 32, 32)
    rank.check_readable("r", [[1, 2, 3]], 32, True)
    assert ledger.findings == []
    rank.compute("r", [[1, 2, 3]], 30, 31, 33)
    rank.check_readable("r", [[1, 2, 3]], 32, True)
    assert "lacks the content of position 16" in ledger.findings[0]


def test_the_last_drafter_position_depends_on_the_next_token():
    """Two texts part at 64, where a block ends; the second one reads the first's."""
    ledger = Ledger((Group("full", 16, eagle=True),), 16, 1)
    rank = LedgerWorker(ledger)
    table = [[1, 2, 3, 4, 5]]
    ledger.add_request("one", prompt(1, 64) + prompt(2, 20))
    ledger.add_request("two", prompt(1, 64) + prompt(3, 20))
    rank.compute("one", table, 0, 70, 70)
    rank.check_readable("two", table, 48, True)
    assert ledger.stale_drafts == 0
    rank.check_readable("two", table, 64, True)
    assert ledger.stale_drafts == 1
    assert ledger.findings == []
