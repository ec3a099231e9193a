# SPDX-License-Identifier: Apache-2.0
"""At these lengths the release as published writes and loads nothing back."""

from .checks import assert_restored
from .conftest import on_engines_and_lengths
from .engine import Engine
from .models import EXAONE_FULL, EXAONE_WINDOW

BOTH = (EXAONE_FULL, EXAONE_WINDOW)


@on_engines_and_lengths(BOTH, [1])
def test_stored_and_never_loaded(engine: Engine, tokens: int) -> None:
    text = engine.prompt(tokens, tokens)
    engine.cold(text)
    assert engine.ledger.digests, "nothing was stored"
    engine.empty_gpu()
    again = engine.serve(text)
    assert (again.cached, again.loaded) == (0, 0)


@on_engines_and_lengths(BOTH, [1], {1: (64, 128, 160, 320, 512)})
def test_what_it_does_load_is_right(engine: Engine, tokens: int) -> None:
    text = engine.prompt(tokens, tokens)
    cold = engine.cold(text)
    engine.empty_gpu()
    again = engine.serve(text)
    assert_restored(again, cold)
