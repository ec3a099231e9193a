# SPDX-License-Identifier: Apache-2.0
"""The exact-replay sweep: what does the same prompt hit when it is sent again?

For each prompt length: send once, send again with the host off (the GPU tier alone),
empty the GPU cache, send again (the host tier alone).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import release_adapter
from .engine import Engine
from .geometry import Geometry
from .prompts import prompt

RETENTIONS: tuple[int | None, ...] = (None, 0, 4096)
CENTRES = (500, 4096, 8192)
# One known length of each way in which a stock release falls short.
KNOWN = (4097, 4937, 6342, 7102, 7341, 7656, 8076, 8193, 8514, 9000)
RANDOM_LENGTHS = 200
MAX_LENGTH = 50_000
# A small block pool is emptied faster: engines for lengths up to each of these.
_POOL_LENGTHS = (10_000, MAX_LENGTH)
_BUDGET = 8192


@dataclass(frozen=True)
class Replay:
    """What one prompt's resend hit, in tokens, and what its first run stored."""

    length: int
    gpu: int
    host: int
    chunks: int


def lengths(geometry: Geometry, sample: int | None = None, seed: int = 0) -> list[int]:
    """Prompt lengths to try, ascending.

    Every length across two alignment blocks around `CENTRES`, `RANDOM_LENGTHS` more
    up to `MAX_LENGTH`, and the `KNOWN` ones; or `sample` of them, the known ones first.
    """
    draw = random.Random(seed)
    width = geometry.gpu_alignment
    swept = [n for centre in CENTRES for n in range(centre - width, centre + width)]
    drawn = draw.sample(range(1, MAX_LENGTH + 1), RANDOM_LENGTHS)
    if sample is None:
        return sorted({*swept, *drawn, *KNOWN})
    known = KNOWN[:sample]
    # Half near the alignment, half anywhere: each costs what its length costs.
    rest = sample - len(known)
    near = draw.sample(swept, min(len(swept), rest - rest // 2))
    return sorted({*known, *near, *drawn[: rest // 2]})


def replays(
    geometry: Geometry,
    retention: int | None,
    prompt_lengths: Sequence[int],
    blocks_per_chunk: int = 1,
) -> Iterator[Replay]:
    """Measure one geometry and retention on the vLLM tree in use."""
    tokens = prompt(0, max(prompt_lengths))
    hashes = None
    shortest = 0
    for longest in _POOL_LENGTHS:
        todo = [n for n in prompt_lengths if shortest < n <= longest]
        shortest = longest
        if not todo:
            continue
        blocks = sum(-(-(longest + _BUDGET) // g.block) + 1 for g in geometry.groups)
        engine = Engine(
            geometry,
            retention,
            blocks_per_chunk,
            gpu_blocks=blocks + 64,
            host_chunks=blocks + 64,
            max_num_batched_tokens=_BUDGET,
        )
        if hashes is None:
            hashes = engine.parts.block_hashes(tokens)
        for length in todo:
            yield _replay(engine, tokens[:length], hashes)


def _replay(engine: Engine, tokens: list[int], hashes: Any) -> Replay:
    first = engine.run(tokens, hashes=hashes)
    if first.num_hit:
        raise AssertionError(f"a first run of {len(tokens)} tokens hit {first.num_hit}")
    engine.set_host(lookup=False, store=False)
    gpu = engine.run(tokens, hashes=hashes)
    engine.set_host()
    engine.reset_gpu()
    host = engine.run(tokens, hashes=hashes)
    engine.reset_gpu()
    engine.reset_host()
    return Replay(len(tokens), gpu.num_local, host.num_external, first.stored_chunks)


def measure(
    geometry: Geometry,
    prompt_lengths: Sequence[int],
    retentions: Sequence[int | None] = RETENTIONS,
    blocks_per_chunk: int = 1,
) -> Iterator[dict[str, Any]]:
    """One JSON-able record per replay; dense retention always comes first.

    The figure that a tier has to reach ("want") is what dense retention hits in that
    tier, rounded down to the tier's alignment. A host tier that is itself broken when
    dense must not set the mark, so the dense GPU hit counts for the host as well.
    """
    align_gpu = geometry.gpu_alignment
    align_host = geometry.host_alignment(blocks_per_chunk)
    dense = {
        replay.length: replay
        for replay in replays(geometry, None, prompt_lengths, blocks_per_chunk)
    }
    for retention in retentions:
        for replay in (
            dense.values()
            if retention is None
            else replays(geometry, retention, prompt_lengths, blocks_per_chunk)
        ):
            reference = dense[replay.length]
            want_gpu = reference.gpu // align_gpu * align_gpu
            want_host = max(reference.gpu, reference.host) // align_host * align_host
            yield {
                "release": release_adapter.version(),
                "geometry": geometry.name,
                "blocks_per_chunk": blocks_per_chunk,
                "retention": retention,
                **asdict(replay),
                "want_gpu": want_gpu,
                "want_host": want_host,
                "align_gpu": align_gpu,
                "align_host": align_host,
            }
