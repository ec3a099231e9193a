# SPDX-License-Identifier: Apache-2.0
"""KV cache geometries: what kinds of groups a model has, and nothing of releases."""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        kind: "full" (full attention or MLA), "swa" (sliding window) or "mamba" (a
            block is the state after its last token, in vLLM's align mode).
        block: tokens per GPU block.
        window: attention window in tokens; "swa" only.
        eagle: the group holds an EAGLE/MTP drafter's layers.
    """

    kind: Literal["full", "swa", "mamba"]
    block: int
    window: int | None = None
    eagle: bool = False

    def __post_init__(self) -> None:
        if (self.kind == "swa") != (self.window is not None):
            raise ValueError(f"group {self}: exactly the swa groups have a window")

    @property
    def tail_blocks(self) -> int:
        """Blocks that must end at a position for a request to resume there."""
        if self.kind == "mamba":
            return 1
        if self.window is None:
            raise ValueError("a full-attention group needs all blocks, not a tail")
        return -(-(self.window - 1) // self.block)


@dataclass(frozen=True)
class Geometry:
    """A model's groups, and across how many ranks its full attention is spread.

    Attributes:
        name: a name that tells it from the others.
        groups: blocks count what all ranks of one hold together.
        dcp: ranks of decode context parallelism.
        match: tokens per block hash, if not what the blocks have in common. Beside a
            Mamba group a GPU hit may then end inside a block.
        unflagged_drafter: there is a drafter, but no group is flagged as its own (its
            layers share the target's cache, or nothing flags them).
    """

    name: str
    groups: tuple[Group, ...]
    dcp: int = 1
    match: int | None = None
    unflagged_drafter: bool = False

    def __post_init__(self) -> None:
        if any(g.block % self.dcp for g in self.groups if g.kind == "full"):
            raise ValueError(
                f"{self.name}: a block cannot be spread evenly over {self.dcp} ranks"
            )

    @property
    def eagle(self) -> bool:
        """Whether there is a drafter."""
        return self.unflagged_drafter or any(group.eagle for group in self.groups)

    @property
    def gpu_alignment(self) -> int:
        """Tokens to which a GPU prefix cache hit of all groups is aligned."""
        if self.match and self.has_mamba:
            return self.match
        return math.lcm(*(group.block for group in self.groups))

    @property
    def hash_block(self) -> int:
        """Tokens per block hash."""
        return self.match or math.gcd(*(group.block for group in self.groups))

    @property
    def has_sliding_window(self) -> bool:
        """Whether retention has an effect at all."""
        return any(group.kind != "full" for group in self.groups)

    @property
    def has_mamba(self) -> bool:
        """Whether some group keeps states: a position there costs a whole one."""
        return any(group.kind == "mamba" for group in self.groups)

    @property
    def peek(self) -> int:
        """Tokens of the largest block of the flagged groups, 0 if none is flagged."""
        return max((g.block for g in self.groups if g.eagle), default=0)

    def host_alignment(self, blocks_per_chunk: int = 1) -> int:
        """Tokens to which a host hit counts: the full-attention chunk.

        Without a full-attention group it is the largest chunk of all.
        """
        if self.match and self.has_mamba and blocks_per_chunk == 1:
            return self.match
        full = [g.block for g in self.groups if g.kind == "full"]
        return max(full or [g.block for g in self.groups]) * blocks_per_chunk

    def without_eagle(self, name: str) -> "Geometry":
        """The same groups with no drafter."""
        return replace(
            self, name=name, groups=tuple(replace(g, eagle=False) for g in self.groups)
        )

    def with_dcp(self, ranks: int) -> "Geometry":
        """The same groups with decode context parallelism over `ranks` ranks.

        A rank keeps its block's size, so that a block of full attention, of which
        each has a part, spans `ranks` times the tokens; a window is on every rank
        (`resolve_dcp_kv_block_size` in vllm/v1/core/kv_cache_utils.py).
        """
        return replace(
            self,
            name=f"{self.name}-dcp{ranks}",
            groups=tuple(
                replace(g, block=g.block * ranks) if g.kind == "full" else g
                for g in self.groups
            ),
            dcp=self.dcp * ranks,
        )


DSV4 = Geometry(
    "dsv4-mtp",
    (
        Group("full", 256),
        Group("swa", 64, 128),
        Group("swa", 64, 128, eagle=True),
        Group("swa", 4, 8),
        Group("swa", 8, 128),
    ),
)
DSV4_NO_EAGLE = DSV4.without_eagle("dsv4")
GEMMA = Geometry(
    "gemma-eagle",
    (
        Group("full", 32),
        Group("swa", 16, 1024),
        Group("swa", 16, 1024, eagle=True),
    ),
)
GEMMA_NO_EAGLE = GEMMA.without_eagle("gemma")

GPT_OSS = Geometry(
    "gpt-oss-eagle", (Group("full", 16, eagle=True), Group("swa", 16, 128))
)
GPT_OSS_NO_EAGLE = GPT_OSS.without_eagle("gpt-oss")
# Small blocks everywhere, a drafter whose peek is the whole alignment, and a window
# (an indexer's) that ends inside the alignment block: each position is near a boundary.
GLM = Geometry(
    "glm-mtp",
    (Group("full", 16), Group("full", 16, eagle=True), Group("swa", 4, 12)),
)
GLM_NO_EAGLE = GLM.without_eagle("glm")
EXAONE_FULL = Geometry(
    "exaone-full-drafter",
    (Group("full", 32), Group("swa", 32, 128), Group("full", 32, eagle=True)),
)
EXAONE_SWA = Geometry(
    "exaone-swa-drafter",
    (Group("full", 32), Group("swa", 32, 128), Group("swa", 32, 128, eagle=True)),
)
# DeepSeek-V4's shape at an eighth of its size: the same questions in short prompts.
SMALL = Geometry(
    "small-mtp",
    (
        Group("full", 32),
        Group("swa", 8, 16),
        Group("swa", 8, 16, eagle=True),
        Group("swa", 2, 4),
        Group("swa", 4, 16),
    ),
)
SMALL_NO_EAGLE = SMALL.without_eagle("small")
PURE_SWA = Geometry("pure-swa-eagle", (Group("swa", 16, 64, eagle=True),))
PURE_FULL = Geometry("pure-full-eagle", (Group("full", 16, eagle=True),))

# Qwen3-Next's shape: one attention group, several of states, blocks of one size.
MAMBA = Geometry("mamba", (Group("full", 32), Group("mamba", 32), Group("mamba", 32)))
MAMBA_MTP = Geometry(
    "mamba-mtp", (Group("full", 32), Group("mamba", 32), Group("full", 32, eagle=True))
)
# Hits that end inside a block, whose state is copied before it is written on.
MAMBA_FINE = replace(MAMBA, name="mamba-fine", match=8)
MAMBA_FINE_MTP = replace(MAMBA_MTP, name="mamba-fine-mtp", match=8)
STATES = (MAMBA, MAMBA_MTP, MAMBA_FINE)

# Decode context parallelism: everything spread, and a drafter that is on every rank.
SPREAD = tuple(
    geometry.with_dcp(2)
    for geometry in (
        PURE_FULL,
        Geometry("full-drafter", (Group("full", 32), Group("full", 32, eagle=True))),
        Geometry("swa-drafter", (Group("full", 32), Group("swa", 16, 64, eagle=True))),
    )
)

# A drafter that no group is flagged for, beside a window of one block.
UNFLAGGED = Geometry(
    "unflagged-drafter",
    (Group("full", 32), Group("swa", 32, 32)),
    unflagged_drafter=True,
)
# Full attention's blocks end inside the window's.
STRADDLING = Geometry("straddling", (Group("full", 32), Group("swa", 48, 48)))
# A window whose tokens before the next one are whole blocks: what a hit that ends one
# token before a block needs is one block more.
WHOLE = Geometry("whole-window", (Group("full", 32), Group("swa", 8, 17)))

# The shapes that the table is about.
SWEPT = (DSV4, DSV4_NO_EAGLE, GEMMA, GEMMA_NO_EAGLE)
GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        *SWEPT,
        GPT_OSS,
        GPT_OSS_NO_EAGLE,
        GLM,
        GLM_NO_EAGLE,
        EXAONE_FULL,
        EXAONE_SWA,
        SMALL,
        SMALL_NO_EAGLE,
        PURE_SWA,
        PURE_FULL,
        *STATES,
        MAMBA_FINE_MTP,
        *SPREAD,
        UNFLAGGED,
        STRADDLING,
        WHOLE,
    )
}
