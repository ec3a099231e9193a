# SPDX-License-Identifier: Apache-2.0
"""Seeded prompts."""

import numpy as np

VOCABULARY = 50_000


def prompt(seed: int, length: int) -> list[int]:
    """`length` token ids drawn from a seed; other seeds share no prefix."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, VOCABULARY, size=length).tolist()
    # Block hashes chain, so a first token of its own keeps seeds apart.
    if tokens:
        tokens[0] = VOCABULARY + seed
    return tokens
