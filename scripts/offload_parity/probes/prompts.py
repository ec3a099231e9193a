# SPDX-License-Identifier: Apache-2.0
"""Prompts of an exact number of tokens, for any tokenizer."""

import random
import string
from dataclasses import dataclass
from functools import cached_property

from ..errors import UserError
from .server import Server

# Tried in this order. In most vocabularies a short common word with the space before it
# is one token, whatever stands around it.
_LETTERS = tuple(string.ascii_lowercase)
_COMMON = """
time year people way day man thing woman life child world school state family
student group country problem hand part place case week company system program
question work government number night point home water room mother area money story
fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name team minute
idea body back parent face level office door health art war history party result
change morning reason research girl guy moment air teacher force education
"""
_SAMPLE = 400
_LEAST_WORDS = 16


@dataclass(frozen=True)
class Template:
    """What the server puts around the content, in tokens.

    Attributes:
        before, after: the content.
        unseen: those of `before` that only the usage of a request shows: some models'
            requests are not rendered as /tokenize does.
    """

    before: int
    after: int
    unseen: int = 0

    @property
    def overhead(self) -> int:
        """Tokens of the template alone."""
        return self.before + self.after


class PromptMaker:
    """Makes prompts whose length the server's own tokenizer confirms.

    The first look at `template` or `words` asks the server, with one short request.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], Template]:
        """Words that are one token each wherever they stand, and the overhead."""
        for candidates in (_LETTERS, tuple(_COMMON.split())):
            words = self._one_token_words(candidates)
            if len(words) >= _LEAST_WORDS:
                return words, self._template(words)
        raise UserError(
            f"{self._server.url}: the tokenizer has fewer than {_LEAST_WORDS} of the "
            "words tried as single tokens: prompts of an exact length cannot be made"
        )

    def _one_token_words(self, candidates: tuple[str, ...]) -> tuple[str, ...]:
        first = candidates[0]
        overhead = 2 * self._count([first] * 2) - self._count([first] * 4)
        good = [w for w in candidates if self._count([w] * 8) == overhead + 8]
        if len(good) < _LEAST_WORDS:
            return ()
        # Two words beside each other might be joined.
        mixed = random.Random("sample").choices(good, k=_SAMPLE)
        return tuple(good) if self._count(mixed) == overhead + _SAMPLE else ()

    def _template(self, words: tuple[str, ...]) -> Template:
        one = self._server.tokenize(text([words[0]] * 4))
        other = self._server.tokenize(text([words[1]] * 4))
        before = _common(one, other)
        after = _common(one[before:][::-1], other[before:][::-1])
        if before + after + 4 != len(one):
            raise UserError(
                f"{self._server.url}: the chat template changes with the content: "
                "prompts of an exact length cannot be made"
            )
        unseen = self._server.chat(text([words[0]] * 4)).prompt_tokens - len(one)
        if unseen < 0:
            raise UserError(
                f"{self._server.url}: a request has {-unseen} tokens fewer than "
                "/tokenize says: does something between change the prompt?"
            )
        return Template(before + unseen, after, unseen)

    def _count(self, words: list[str]) -> int:
        return len(self._server.tokenize(text(words)))

    @property
    def words(self) -> tuple[str, ...]:
        """The words in use."""
        return self._found[0]

    @property
    def template(self) -> Template:
        """What the chat template adds."""
        return self._found[1]

    def prompt(
        self,
        length: int,
        seed: object,
        prefix: int = 0,
        prefix_seed: object = None,
        mark: int | None = None,
    ) -> str:
        """Content that makes `length` input tokens, the same for the same seed.

        Args:
            length: with the template's tokens.
            seed: other seeds share nothing, but for the template and the prefix.
            prefix: as many input tokens, the template's among them, are drawn from
                `prefix_seed` instead.
            mark: other marks part at the very first token after the prefix.

        Raises:
            UserError: so few tokens cannot be, or the prefix does not fit.
        """
        template = self.template
        count = length - template.overhead
        if count < 1:
            raise UserError(
                f"{length} tokens: the chat template alone has {template.overhead}, so "
                f"ask for at least {template.overhead + 1}"
            )
        shared = max(prefix - template.before, 0)
        if shared >= count:
            raise UserError(
                f"a shared prefix of {prefix} tokens leaves no room in {length}: at "
                f"most {length - template.after - 1}"
            )
        own = self._draw(seed, count - shared)
        if mark is not None:
            own[0] = self.words[mark % len(self.words)]
        return text([*self._draw(prefix_seed, shared), *own])

    def _draw(self, seed: object, count: int) -> list[str]:
        return random.Random(f"offload parity {seed}").choices(self.words, k=count)

    def check(self, content: str, length: int) -> None:
        """Ask the server's tokenizer.

        Raises:
            UserError: it counts otherwise.
        """
        counted = len(self._server.tokenize(content)) + self.template.unseen
        if counted != length:
            raise UserError(
                f"{self._server.url}: a prompt made for {length} tokens has {counted} "
                "by its tokenizer; report this with the model's name"
            )


def text(words: list[str]) -> str:
    """Words as content, each with the space that belongs to its token."""
    return "".join(f" {word}" for word in words)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
