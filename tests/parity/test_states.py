# SPDX-License-Identifier: Apache-2.0
"""Models with Mamba groups: the ledger follows states as it follows tokens."""

import random

import pytest

from parity import release_adapter
from parity.engine import Engine
from parity.geometry import MAMBA, MAMBA_FINE, MAMBA_MTP, STATES
from parity.prompts import prompt


def served(geometry) -> bool:
    """Whether the release serves a geometry; if not, it must say so."""
    if release_adapter.supports(geometry):
        return True
    with pytest.raises(ValueError, match="resumes where a Mamba group has no state"):
        Engine(geometry)
    return False


def engine_of(geometry, retention=None, **options) -> Engine:
    return Engine(
        geometry,
        retention,
        **{
            "gpu_blocks": 2000,
            "ledger": True,
            "max_num_batched_tokens": 256,
            "force": True,
            **options,
        },
    )


def test_what_resumes_without_a_state_is_refused():
    """0.25.1 takes the longest of the groups' hits as the local one."""
    tokens = prompt(1, 1000)
    engine = engine_of(MAMBA)
    engine.set_host(lookup=False)
    engine.run(tokens)
    engine.run(tokens[:500] + prompt(2, 200))
    wrong = any("group 1 lacks the state" in w for w in engine.ledger.findings)
    assert wrong != served(MAMBA)


@pytest.mark.parametrize("retention", [None, 0, 128])
@pytest.mark.parametrize("geometry", STATES, ids=lambda g: g.name)
def test_states_are_served_by_both_tiers(geometry, retention):
    if not served(geometry):
        return
    draw = random.Random(1)
    engine = engine_of(
        geometry,
        retention,
        accept=lambda: draw.randrange(3),
        workers=2,
        transfer_delay=lambda: draw.randrange(3),
    )
    tokens = prompt(1, 1000)
    wanted = 960 if geometry.eagle else 992
    first = engine.run(tokens, max_tokens=40)
    assert engine.run(tokens).num_local >= wanted
    engine.reset_gpu()
    assert engine.run(tokens).num_external == wanted
    engine.reset_gpu()
    turn = engine.run(tokens + first.output + prompt(2, 40))
    assert turn.num_external >= wanted
    shared = [
        engine.run(tokens[:500] + prompt(seed, 200)).num_local for seed in (3, 4, 5)
    ]
    assert shared[-1] >= 480 - geometry.peek
    engine.check_at_rest()
    assert engine.ledger.findings == []
    assert engine.ledger.loads > 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("geometry", STATES, ids=lambda g: g.name)
def test_states_survive_too_little_room(geometry, asynchronous):
    if not served(geometry):
        return
    draw = random.Random(2)
    engine = engine_of(
        geometry,
        gpu_blocks=40,
        host_chunks=40,
        async_scheduling=asynchronous,
        accept=lambda: draw.randrange(3),
        transfer_delay=lambda: draw.randrange(3),
    )
    alone = engine_of(geometry, ledger=False)
    prompts = [prompt(seed % 3, 200 + 9 * seed) for seed in range(6)]
    results = engine.run_all(prompts, max_tokens=70)
    assert [r.output for r in results] == [
        r.output for r in alone.run_all(prompts, max_tokens=70)
    ]
    engine.check_at_rest()
    assert engine.ledger.findings == []


def resumed(geometry, plant, **options) -> list[str]:
    """The findings of a prompt, its resends from GPU and host, and a turn."""
    engine = engine_of(geometry, **options)
    plant(engine)
    tokens = prompt(1, 300)
    output = engine.run(tokens, max_tokens=40).output
    for _ in range(2):
        engine.run(tokens + output + prompt(2, 9), max_tokens=9)
        engine.reset_gpu()
    return engine.ledger.findings


def test_a_copy_on_write_that_is_left_out_is_found():
    if not served(MAMBA_FINE):
        return

    def plant(engine):
        engine.ranks[0].copy_blocks = lambda copies: None

    assert resumed(MAMBA_FINE, lambda engine: None) == []
    assert resumed(MAMBA_FINE, plant) != []


def test_a_state_handed_over_for_another_boundary_is_found():
    def plant(engine):
        manager = engine.parts.scheduler.kv_cache_manager
        if not hasattr(manager, "take_boundary_state_offloads"):
            # Such a release stores states from the block table, one off here.
            tables = engine.ranks[0].submit_store

            def shifted(job_id, src_spec, dst_spec):
                src_spec.block_ids[:] = list(reversed(src_spec.block_ids))
                return tables(job_id, src_spec, dst_spec)

            engine.ranks[0].submit_store = shifted
            return
        take = manager.take_boundary_state_offloads

        def early():
            return {
                request: [(group, block, end - 32) for group, block, end in entries]
                for request, entries in take().items()
            }

        manager.take_boundary_state_offloads = early

    findings = resumed(MAMBA, plant, max_num_batched_tokens=32)
    assert any("does not hold block" in words for words in findings)


def test_a_state_after_a_rejected_draft_is_found():
    def plant(engine):
        rank = engine.ranks[0]
        advance = rank._advance

        def forgets_what_was_accepted(request_id, group, *rest):
            advance(request_id, group, *rest)
            column, _ = rank._states[request_id, group]
            rank._states[request_id, group] = (column, 0)

        rank._advance = forgets_what_was_accepted

    draw = random.Random(3)
    findings = resumed(MAMBA_MTP, plant, accept=lambda: draw.randrange(3))
    assert any("group 1 lacks the state" in words for words in findings)


def test_a_chunk_of_states_holds_the_one_at_its_end():
    for factor in (2, 4):
        engine = engine_of(MAMBA, blocks_per_chunk=factor)
        # Its last whole block ends where a chunk does.
        tokens = prompt(1, 900)
        engine.run(tokens)
        engine.reset_gpu()
        assert engine.run(tokens).num_external == 896
        assert engine.ledger.findings == []
