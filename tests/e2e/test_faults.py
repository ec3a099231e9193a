# SPDX-License-Identifier: Apache-2.0
"""Wrong data is noticed: in the answer, whatever group it is in, and in the bytes."""

from .checks import assert_restored, wrong_places
from .conftest import on_engines
from .engine import Engine, Served
from .ledger import Fault, foreign_chunk, rotated_blocks

TOKENS = 340


def with_fault(engine: Engine, text: list[int], fault: Fault) -> Served:
    """A resend that loads through ``fault``."""
    engine.empty_gpu()
    engine.ledger.fault = fault
    try:
        served = engine.serve(text)
    finally:
        engine.ledger.fault = None
    assert served.loaded > 0
    return served


@on_engines()
def test_another_prompts_chunk_is_noticed(engine: Engine) -> None:
    text = engine.prompt(TOKENS, 31)
    cold = engine.cold(text)
    mine = set(engine.ledger.key_of)
    engine.empty_gpu()
    engine.serve(engine.prompt(TOKENS, 32))
    for group in range(len(engine.groups)):
        theirs = engine.ledger.chunks_of(group).keys() - mine
        served = with_fault(engine, text, foreign_chunk(group, max(theirs)))
        wrong = [block.group for block in served.restored if not block.right]
        assert wrong == [group]
        assert [place[0] for place in wrong_places(served, cold)] == [group]
        noticed = served.answer != cold.answer
        assert noticed == (group != engine.model.unread), f"group {group}"
    # Without a fault all is well again.
    engine.empty_gpu()
    assert_restored(engine.serve(text), cold)


@on_engines()
def test_blocks_in_another_order_are_noticed_by_their_bytes(engine: Engine) -> None:
    text = engine.prompt(TOKENS, 33)
    cold = engine.cold(text)
    for group in range(len(engine.groups)):
        served = with_fault(engine, text, rotated_blocks(group))
        wrong = [block.group for block in served.restored if not block.right]
        count = sum(block.group == group for block in served.restored)
        assert wrong == [group] * count and count > 1
        assert [place[0] for place in wrong_places(served, cold)] == wrong


@on_engines()
def test_contents_stored_under_anothers_key_are_noticed(engine: Engine) -> None:
    text = engine.prompt(TOKENS, 34)
    cold = engine.cold(text)
    for group in range(len(engine.groups)):
        engine.empty()
        engine.ledger.store_fault = rotated_blocks(group)
        try:
            engine.serve(text)
            # The store is made with the next step.
            engine.serve(engine.prompt(2, 35))
        finally:
            engine.ledger.store_fault = None
        engine.empty_gpu()
        served = engine.serve(text)
        # The worker cannot know: it brought back what was stored for the key.
        assert all(block.right for block in served.restored)
        assert {place[0] for place in wrong_places(served, cold)} == {group}
