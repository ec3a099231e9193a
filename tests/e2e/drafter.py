# SPDX-License-Identifier: Apache-2.0
"""See what the drafter proposes, and make some of its drafts come true.

Random weights accept no draft. To see drafts accepted the drafter runs as it is, so its
KV is written, and then its result is overwritten with the continuation that the model
is known to give, every third draft spoiled.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from .models import VOCABULARY


class Drafts:
    """Stands between one engine's drafter and its caller; one request at a time."""

    def __init__(self, drafter) -> None:
        self.proposed: list[tuple[int, ...]] = []
        self.places: list[int] = []
        self.known: Sequence[int] | None = None
        self._given = 0
        self._propose = drafter.propose
        drafter.propose = self.propose

    def start(self, known: Sequence[int] | None) -> None:
        """Forget what was proposed; ``known``: the text to take drafts from."""
        self.proposed, self.places, self.known = [], [], known
        self._given = 0

    def counts(self) -> tuple[int, int]:
        """Of the last request's drafts: how many were accepted, how many were not."""
        accepted = sum(b - a - 1 for a, b in pairwise(self.places))
        drafted = sum(len(drafts) for drafts in self.proposed[:-1])
        return accepted, drafted - accepted

    def propose(self, *args, **kwargs) -> torch.Tensor:
        """The drafter's own drafts, or those of the known text."""
        next_tokens = kwargs["next_token_ids"]
        metadata = kwargs["common_attn_metadata"]
        rejected = kwargs.get("num_rejected_tokens_gpu")
        at = int(metadata.seq_lens[0]) - (0 if rejected is None else int(rejected[0]))
        drafts = self._propose(*args, **kwargs)
        self.proposed.append(tuple(drafts[0].tolist()))
        self.places.append(at)
        if self.known is not None:
            assert int(next_tokens[0]) == self.known[at], "not where the text says"
            drafts = drafts.clone()
            drafts[0] = torch.tensor(self._from_text(at + 1, drafts.shape[1]))
        return drafts

    def _from_text(self, start: int, count: int) -> list[int]:
        assert self.known is not None
        drafts = [*self.known[start : start + count], *[0] * count][:count]
        for i, token in enumerate(drafts):
            self._given += 1
            if self._given % 3 == 0:
                drafts[i] = (token + 1) % VOCABULARY
        return drafts
