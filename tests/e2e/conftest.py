# SPDX-License-Identifier: Apache-2.0
"""An engine for each model, and which tests belong to which package and process."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest
from xdist.scheduler import LoadScopeScheduling

from .engine import Engine
from .models import MODELS, CannotRunError, Model

# E2E_TREE=stock: the vllm on PYTHONPATH is the release as published.
_STOCK = os.environ.get("E2E_TREE") == "stock"
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if path.name.startswith("test_stock") != _STOCK
]

# Shorter ones have no chunk of two blocks with a peek behind it.
LENGTHS = {1: (100, 300, 340, 400), 2: (160, 300, 340, 400)}


def on_engines(
    models: Iterable[Model] = MODELS, factors: Iterable[int] = (1, 2)
) -> pytest.MarkDecorator:
    """Run a test on an engine of each model, with chunks of so many blocks."""
    cases = [
        pytest.param((m, n), id=f"{m.name}-{n}") for m, n in product(models, factors)
    ]
    return pytest.mark.parametrize("engine", cases, indirect=True)


def on_engines_and_lengths(
    models: Iterable[Model] = MODELS,
    factors: Iterable[int] = (1, 2),
    lengths: Mapping[int, Iterable[int]] = MappingProxyType(LENGTHS),
) -> pytest.MarkDecorator:
    """The same with prompts of several lengths, ``lengths`` by blocks per chunk."""
    cases = [
        pytest.param((m, n), tokens, id=f"{m.name}-{n}-{tokens}")
        for m, n in product(models, factors)
        for tokens in lengths[n]
    ]
    return pytest.mark.parametrize("engine, tokens", cases, indirect=["engine"])


class ByEngine(LoadScopeScheduling):
    """Tests on one engine go to one process: to start it takes as long as they do."""

    def _split_scope(self, nodeid: str) -> str:
        engine = re.search(r"\[(.+?-[12])(-\d+)?\]$", nodeid)
        return engine[1] if engine else nodeid


def pytest_xdist_make_scheduler(config, log) -> ByEngine:
    """Whatever ``--dist`` says."""
    return ByEngine(config, log)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One engine at a time: pytest closes it before it makes the next."""
    model, factor = request.param
    try:
        model.prepare()
    except CannotRunError as error:
        pytest.skip(str(error))
    made = Engine(model, factor)
    yield made
    made.close()
