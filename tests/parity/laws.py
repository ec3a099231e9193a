# SPDX-License-Identifier: Apache-2.0
"""Which law says what a request must hit, given the requests before it."""

from collections.abc import Sequence

from .history import Setup


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts share at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Laws:
    """Follows the requests of one engine and judges the next one's hits.

    L1 replay, L2 extension, L3 siblings, L4 edit near the end: such a request hits
    what dense retention hits, rounded down to the tier's alignment.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._align = setup.alignment
        # Where either tier may serve, a law that speaks of a distance must hold for
        # both.
        self._near = self._align
        if setup.tier == "both":
            self._near = min(self._align, setup.geometry.gpu_alignment)
        # A prompt and the whole text, decoded tokens too.
        self._texts: list[tuple[list[int], list[int]]] = []
        # Where one request parted from an earlier one, and in which text.
        self._junctions: list[tuple[int, list[int]]] = []

    def forget(self) -> None:
        """Every cache was emptied."""
        self._texts.clear()
        self._junctions.clear()

    def law(self, tokens: list[int]) -> tuple[str, int | None] | None:
        """The law that speaks of a prompt, and a limit to what it asks for, if any."""
        shared = max((common_prefix(tokens, t) for _, t in self._texts), default=0)
        if not shared:
            return None
        limit = None
        for prompt, text in self._texts:
            if common_prefix(tokens, text) < shared:
                continue
            if shared == len(tokens) and len(tokens) == len(prompt):
                return "L1 replay", None
            if shared == len(prompt):
                return "L2 extension", None
            if shared > len(prompt):
                # It repeats decoded text: the prompt's own boundary is owed.
                peek = self._setup.geometry.peek * self._setup.blocks_per_chunk
                limit = max(limit or 0, len(prompt) - peek)
        if limit is not None:
            return "L2 turn", limit
        if any(
            place // self._near == shared // self._near
            and common_prefix(tokens, text) >= place // self._near * self._near
            for place, text in self._junctions
        ):
            return "L3 siblings", None
        retention = self._setup.retention
        if retention == 0 or self._setup.tier == "gpu":
            for prompt, text in self._texts:
                if common_prefix(tokens, text) == shared and len(
                    prompt
                ) - self._align <= shared < len(prompt):
                    return "L4 edit near the end", None
        return None

    def want(self, tokens: list[int], dense_hit: int) -> tuple[str, int] | None:
        """The law that speaks of a prompt and the tokens it must hit."""
        found = self.law(tokens)
        if found is None:
            return None
        name, limit = found
        mark = dense_hit if limit is None else min(dense_hit, limit)
        return name, mark // self._align * self._align

    def add(self, prompt: list[int], output: list[int]) -> None:
        """A request finished."""
        shared = max((common_prefix(prompt, t) for _, t in self._texts), default=0)
        if shared and shared < len(prompt):
            self._junctions.append((shared, prompt))
        # The last decoded token was never computed.
        self._texts.append((prompt, prompt + output[:-1]))
