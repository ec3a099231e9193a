# SPDX-License-Identifier: Apache-2.0
"""The simulated engine behaves as an engine does, on any tree."""

import random

import pytest

from parity import release_adapter
from parity.engine import Engine
from parity.geometry import (
    DSV4,
    GLM,
    GPT_OSS,
    GPT_OSS_NO_EAGLE,
    PURE_FULL,
    SMALL,
    SMALL_NO_EAGLE,
    SPREAD,
)
from parity.history import cut, tokens_of
from parity.laws import common_prefix
from parity.prompts import prompt


def test_a_replay_hits_the_gpu_then_the_host_then_nothing():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=2000)
    tokens = prompt(1, 500)
    assert engine.run(tokens).num_hit == 0
    again = engine.run(tokens)
    assert (again.num_local, again.num_external) == (480, 0)
    engine.reset_gpu()
    again = engine.run(tokens)
    assert (again.num_local, again.num_external) == (0, 480)
    engine.reset_gpu()
    engine.reset_host()
    assert engine.run(tokens).num_hit == 0


def test_a_host_that_is_off_neither_finds_nor_takes():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=2000)
    tokens = prompt(1, 500)
    engine.run(tokens)
    chunks = engine.num_host_chunks
    engine.reset_gpu()
    engine.set_host(lookup=False, store=False)
    assert engine.run(tokens + prompt(2, 200)).num_hit == 0
    assert engine.num_host_chunks == chunks
    engine.set_host()
    engine.reset_gpu()
    assert engine.run(tokens).num_external == 480


def test_a_chunk_taken_out_of_the_host_is_missed_until_it_is_back():
    engine = Engine(SMALL_NO_EAGLE, gpu_blocks=2000, ledger=True)
    tokens = prompt(1, 500)
    engine.run(tokens)
    stored = engine.num_host_chunks
    engine.set_host(store=False)
    hashes = engine.parts.block_hashes(tokens)
    key = 0, engine.parts.chunk_hash(hashes, 0, 7)
    restore = engine.parts.drop_host_chunk(*key)
    with pytest.raises(LookupError, match="group 0 is not stored"):
        engine.parts.drop_host_chunk(*key)
    assert (0, 7) not in engine.host_keys(tokens)
    engine.reset_gpu()
    assert engine.run(tokens).num_external == 7 * 32
    restore()
    engine.reset_gpu()
    assert engine.run(tokens).num_external == 480
    with pytest.raises(ValueError, match="stored anew"):
        restore()
    engine.check_at_rest()
    assert engine.ledger.findings == []
    # The manager still evicts all that is idle, and nothing else.
    engine.set_host()
    engine.reset_host()
    assert engine.num_host_chunks == 0 < stored


def test_a_chunk_that_is_being_stored_cannot_be_taken_out():
    engine = Engine(SMALL, gpu_blocks=2000, ledger=True, transfer_delay=lambda: 5)
    tokens = prompt(1, 500)
    engine.submit(tokens)
    while not engine.num_host_chunks:
        engine.step()
    hashes = engine.parts.block_hashes(tokens)
    with pytest.raises(ValueError, match="in use"):
        engine.parts.drop_host_chunk(0, engine.parts.chunk_hash(hashes, 0, 3))


def test_cached_keys_are_what_the_gpu_serves():
    engine = Engine(SMALL_NO_EAGLE, 0, gpu_blocks=2000)
    tokens = prompt(1, 500)
    assert engine.cached_keys(tokens) == []
    engine.run(tokens)
    keys = engine.cached_keys(tokens)
    assert [i for group, i in keys if group == 0] == list(range(15))
    # The window of group 1 before token 480, where a resend resumes.
    assert {(1, 58), (1, 59)} <= set(keys)
    assert (1, 3) not in keys
    engine.reset_gpu()
    assert engine.cached_keys(tokens) == []


def test_dense_retention_stores_every_full_attention_chunk():
    engine = Engine(SMALL, gpu_blocks=2000)
    tokens = prompt(1, 500)
    engine.run(tokens)
    keys = engine.host_keys(tokens)
    assert [i for group, i in keys if group == 0] == list(range(15))
    assert len(keys) == engine.num_host_chunks


def test_sparse_retention_reaches_both_tiers():
    tokens = prompt(1, 2000)
    sparse = Engine(SMALL_NO_EAGLE, 0, gpu_blocks=4000)
    dense = Engine(SMALL_NO_EAGLE, None, gpu_blocks=4000)
    assert sparse.run(tokens).stored_chunks < dense.run(tokens).stored_chunks / 2
    cached = [len(list(e.parts.cached_blocks())) for e in (sparse, dense)]
    assert cached[0] < cached[1] / 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_output_does_not_depend_on_where_the_prompt_came_from(asynchronous):
    engine = Engine(
        SMALL,
        gpu_blocks=4000,
        max_num_batched_tokens=128,
        async_scheduling=asynchronous,
    )
    prompts = [prompt(seed, 300 + seed) for seed in range(3)]
    cold = engine.run_all(prompts, max_tokens=9)
    engine.reset_gpu()
    warm = engine.run_all(prompts, max_tokens=9)
    assert all(result.num_external for result in warm)
    assert [len(result.output) for result in cold] == [9, 9, 9]
    assert [r.output for r in cold] == [r.output for r in warm]


def test_requests_that_do_not_fit_are_preempted_and_end():
    engine = Engine(GPT_OSS, gpu_blocks=60, host_chunks=30, ledger=True)
    results = engine.run_all([prompt(seed, 150) for seed in range(6)], max_tokens=120)
    engine.check_at_rest()
    assert [len(result.output) for result in results] == [120] * 6
    assert engine.ledger.findings == []
    assert engine.num_host_chunks == 30


def test_block_hashes_given_are_those_computed():
    engine = Engine(DSV4, gpu_blocks=4000)
    tokens = prompt(1, 1500)
    hashes = engine.parts.block_hashes(tokens)
    engine.run(tokens[:1026], hashes=hashes, max_tokens=3)
    assert (
        engine.run(tokens[:1026]).num_local
        == engine.run(tokens[:1026], hashes=hashes).num_local
        > 0
    )


def test_a_prompt_is_a_prefix_of_a_longer_one_of_its_seed():
    assert prompt(3, 1000)[:613] == prompt(3, 613)
    assert common_prefix(prompt(3, 500), prompt(4, 500)) == 0


def test_cutting_parts_cuts_tokens():
    parts = ((1, 40), (2, 30))
    for length in (0, 1, 40, 41, 70):
        assert tokens_of(cut(parts, length)) == tokens_of(parts)[:length]


def test_common_prefix_of_random_texts():
    draw = random.Random(1)
    for _ in range(200):
        one = [draw.randint(0, 1) for _ in range(draw.randint(0, 9))]
        other = [draw.randint(0, 1) for _ in range(draw.randint(0, 9))]
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        assert common_prefix(one, other) == same


def served(geometry, **options) -> Engine:
    """An engine after a replay, an extension and siblings, hits from the host."""
    engine = Engine(
        geometry,
        gpu_blocks=4000,
        ledger=True,
        max_num_batched_tokens=geometry.gpu_alignment * 5,
        **options,
    )
    align = geometry.host_alignment(engine.parts.blocks_per_chunk)
    tokens = prompt(1, 10 * align + 3)
    assert engine.run(tokens, max_tokens=3).num_hit == 0
    engine.reset_gpu()
    peek = geometry.peek * engine.parts.blocks_per_chunk
    wanted = (len(tokens) - max(peek, 1)) // align * align
    for resend in (tokens, tokens + prompt(2, 2 * align)):
        assert engine.run(resend).num_external >= wanted
        engine.reset_gpu()
    for seed in (3, 4, 5):
        last = engine.run(tokens[: 6 * align] + prompt(seed, 2 * align))
        engine.reset_gpu()
    assert last.num_external >= (6 * align - peek) // align * align
    engine.check_at_rest()
    assert engine.ledger.findings == []
    return engine


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("geometry", [GLM, GPT_OSS_NO_EAGLE], ids=lambda g: g.name)
def test_small_blocks_are_served_at_each_chunk_factor(geometry, factor):
    if release_adapter.supports(geometry, factor):
        assert served(geometry, blocks_per_chunk=factor).ledger.loads > 0
    else:
        with pytest.raises(ValueError, match="no chunk factor for groups of different"):
            Engine(geometry, blocks_per_chunk=factor)


@pytest.mark.parametrize("geometry", SPREAD, ids=lambda g: g.name)
def test_context_parallel_ranks_each_have_their_part(geometry):
    if not release_adapter.supports(geometry):
        with pytest.raises(ValueError, match="no context parallelism for several"):
            Engine(geometry)
        return
    ledger = served(geometry).ledger
    assert ledger.loads > 0
    assert ledger.loads % 2 == 0


def test_retention_needs_something_to_keep_less_of():
    assert release_adapter.supports(PURE_FULL)
    assert release_adapter.supports(SMALL, 1, 4096)
    with pytest.raises(ValueError, match="refuses retention for full attention alone"):
        Engine(PURE_FULL, 4096)


def test_windows_are_not_spread():
    with pytest.raises(ValueError, match="no context parallelism for s"):
        Engine(GPT_OSS.with_dcp(2))


def test_a_spread_block_spans_the_tokens_of_all_ranks():
    geometry = SMALL.with_dcp(2)
    assert (geometry.gpu_alignment, SMALL.gpu_alignment) == (64, 32)
    assert (geometry.peek, geometry.hash_block) == (8, 2)
    assert PURE_FULL.with_dcp(2).peek == 2 * PURE_FULL.peek
    engine = Engine(PURE_FULL.with_dcp(2), gpu_blocks=100)
    assert engine.parts.hash_block == 32
    assert len(engine.parts.workers) == 2
    with pytest.raises(ValueError, match="3 workers: not a multiple of the 2 ranks"):
        Engine(PURE_FULL.with_dcp(2), workers=3)


def test_ranks_of_different_speed_do_as_well_as_one():
    """A load ends when the slowest rank has it, in whatever order."""
    draw = random.Random(3)
    engine = Engine(
        SMALL,
        gpu_blocks=3000,
        workers=2,
        ledger=True,
        max_num_batched_tokens=128,
        transfer_delay=lambda: draw.choice((0, 9)),
    )
    slow = dict.fromkeys(range(2), 0)
    tokens = prompt(1, 500)
    engine.run(tokens, max_tokens=20)
    for rank, own in enumerate(engine.ranks):
        own._delay = lambda rank=rank: 7 * rank
        finish = own._finish

        def counted(job_id, rank=rank, finish=finish):
            slow[rank] = engine.ledger.step
            finish(job_id)

        own._finish = counted
    engine.reset_gpu()
    engine.submit(tokens + prompt(2, 40))
    while not engine.results:
        engine.step()
    engine.drain()
    assert engine.results["r1"].num_external == 480
    assert slow[1] > slow[0]
    engine.check_at_rest()
    assert engine.ledger.findings == []
