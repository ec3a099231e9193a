# SPDX-License-Identifier: Apache-2.0
"""What the host tier restores gives the answer that a cold engine gives, exactly."""

from .checks import assert_restored, assert_right, boundary
from .conftest import on_engines, on_engines_and_lengths
from .engine import Engine
from .models import MODELS

DRAFTING = [model for model in MODELS if model.drafts]


@on_engines()
def test_vllm_makes_the_groups_that_are_meant(engine: Engine) -> None:
    kinds = [
        "window" if getattr(group.kv_cache_spec, "sliding_window", None) else "full"
        for group in engine.groups
    ]
    drafter = [k for k, g in zip(kinds, engine.groups, strict=True) if g.is_eagle_group]
    assert tuple(kinds) == engine.model.groups
    assert drafter == ([engine.model.drafter] if engine.model.drafts else [])


@on_engines_and_lengths()
def test_resend(engine: Engine, tokens: int) -> None:
    text = engine.prompt(tokens, tokens)
    cold = engine.cold(text)
    kept = engine.serve(text)
    assert (kept.cached > 0, kept.loaded) == (True, 0), "the GPU did not serve it"
    assert kept.answer == cold.answer
    engine.empty_gpu()
    back = engine.serve(text)
    assert_restored(back, cold)
    assert back.cached == boundary(engine, len(text))


@on_engines()
def test_second_turn(engine: Engine) -> None:
    first = engine.prompt(300, 1)
    said = engine.cold(first, answer=40).answer.tokens
    second = [*first, *said, *engine.prompt(50, 2)]
    cold = engine.cold(second)
    engine.empty()
    engine.serve(first, answer=40)
    engine.empty_gpu()
    assert_restored(engine.serve(second), cold)


@on_engines()
def test_siblings(engine: Engine) -> None:
    shared = engine.prompt(256, 3)
    texts = [shared + engine.prompt(100, seed) for seed in (4, 5, 6, 7)]
    cold = [engine.cold(text) for text in texts]
    engine.empty()
    for number, text in enumerate(texts):
        engine.empty_gpu()
        served = engine.serve(text)
        assert_right(served, cold[number])
        # The second shows where they part.
        if number >= 2:
            assert_restored(served, cold[number])
            assert served.cached == boundary(engine, len(shared) + 1)


@on_engines(DRAFTING)
def test_drafts_accepted_and_rejected(engine: Engine) -> None:
    text = engine.prompt(300, 8)
    plain = engine.cold(text, answer=40).answer
    known = [*text, *plain.tokens]
    cold = engine.cold(text, answer=40, known=known)
    accepted, rejected = engine.drafts.counts()
    assert accepted > 0 and rejected > 0
    assert cold.answer.tokens == plain.tokens
    engine.empty_gpu()
    assert_restored(engine.serve(text, answer=40, known=known), cold)
    # What lies behind the prompt was written beside rejected drafts.
    second = [*known, *engine.prompt(50, 9)]
    longer = engine.cold(second)
    engine.empty()
    engine.serve(text, answer=40, known=known)
    engine.empty_gpu()
    assert_restored(engine.serve(second), longer)


@on_engines()
def test_eviction(engine: Engine) -> None:
    engine.empty()
    before = engine.ledger.evicted
    cold = {}
    # Until a few prompts are gone from the host, in part or whole.
    for seed in range(100, 200):
        cold[seed] = engine.serve(engine.prompt(300, seed), answer=4)
        assert (cold[seed].cached, cold[seed].loaded) == (0, 0)
        engine.empty_gpu()
        if engine.ledger.evicted - before > 50:
            break
    assert engine.ledger.evicted - before > 50, "the host was never full"
    hits = []
    for seed in reversed(cold):
        served = engine.serve(engine.prompt(300, seed), answer=4)
        engine.empty_gpu()
        assert_right(served, cold[seed])
        hits.append(served.loaded > 0)
    assert any(hits) and not all(hits), hits
