# SPDX-License-Identifier: Apache-2.0
"""Prompts of an exact number of tokens."""

import pytest

from fake_server import FakeServer
from offload_parity.errors import UserError
from offload_parity.probes.prompts import PromptMaker, Template
from offload_parity.probes.server import Address, Server


def maker_of(fake: FakeServer) -> PromptMaker:
    return PromptMaker(Server(Address(fake.url)))


@pytest.mark.parametrize("length", [5, 6, 257, 4096])
def test_lengths_are_exact_and_seeds_repeat(fake, length: int) -> None:
    maker = maker_of(fake)
    assert maker.template == Template(2, 2)
    content = maker.prompt(length, "seed")
    assert len(fake.tokens(content)) == length
    maker.check(content, length)
    assert maker_of(fake).prompt(length, "seed") == content
    if length > 100:
        assert maker.prompt(length, "other").split()[:20] != content.split()[:20]


@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 300, 499])
def test_a_shared_prefix_is_exactly_so_long(fake, prefix: int) -> None:
    maker = maker_of(fake)
    one, other = (
        fake.tokens(maker.prompt(600, seed, prefix, "shared", mark=mark))
        for mark, seed in enumerate(("a", "b"))
    )
    same = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    # The template's first two tokens are always the same.
    assert same == max(prefix, 2)


def test_words_are_looked_for_where_letters_are_no_tokens(fake) -> None:
    fake.one_token = lambda word: len(word) > 1
    maker = maker_of(fake)
    assert "time" in maker.words and "a" not in maker.words
    assert len(fake.tokens(maker.prompt(500, 1))) == 500


def test_tokens_that_only_a_request_shows(fake) -> None:
    fake.unseen = 60
    maker = maker_of(fake)
    assert maker.template == Template(62, 2, 60)
    server = Server(Address(fake.url))
    assert server.chat(maker.prompt(500, 1)).prompt_tokens == 500
    maker.check(maker.prompt(500, 1), 500)
    with pytest.raises(UserError, match="ask for at least 65"):
        maker.prompt(64, 1)
    fake.unseen = 0
    fake.faults["/v1/chat/completions"] = lambda handler: handler.reply(
        {"usage": {"prompt_tokens": 5}}
    )
    with pytest.raises(UserError, match="3 tokens fewer than /tokenize says"):
        _ = maker_of(fake).template


def test_a_tokenizer_of_no_such_words(fake) -> None:
    fake.one_token = lambda word: False
    with pytest.raises(UserError, match="cannot be made"):
        maker_of(fake).prompt(500, 1)


def test_a_tokenizer_that_counts_otherwise_is_noticed(fake) -> None:
    maker = maker_of(fake)
    content = maker.prompt(500, 1)
    with pytest.raises(UserError, match="made for 501 tokens has 500"):
        maker.check(content, 501)
