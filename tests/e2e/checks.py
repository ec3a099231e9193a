# SPDX-License-Identifier: Apache-2.0
"""What every test asks of a request that the host tier served."""

from .engine import Engine, Served


def assert_restored(served: Served, cold: Served) -> None:
    """Something came from the host, it is right, and so is the answer.

    ``cold`` is the same request's, with nothing cached.
    """
    assert served.loaded > 0, "nothing was loaded: an equal answer would say nothing"
    assert_right(served, cold)


def assert_right(served: Served, cold: Served) -> None:
    """Whatever came from wherever is right."""
    assert all(block.right for block in served.restored)
    # Each restored block lies where a cold engine computes the same bytes.
    assert len(served.at) == len(served.restored)
    assert wrong_places(served, cold) == []
    assert served.answer == cold.answer


def wrong_places(served: Served, cold: Served) -> list[tuple[int, int]]:
    """The restored blocks, by group and place, whose bytes a cold engine's are not."""
    return sorted(p for p in served.at if served.contents[p] != cold.contents[p])


def boundary(engine: Engine, tokens: int) -> int:
    """The most that a resend of so many tokens can hit on the host."""
    whole = (tokens - engine.peek) // engine.chunk * engine.chunk
    # The last token is computed always.
    return min(whole, tokens - 1)
