# SPDX-License-Identifier: Apache-2.0
"""The KV caches of known models, layer by layer. Needs no vLLM.

vLLM itself makes groups of the layers; ``geometry`` names what must come out
(``tests/parity/geometry.py``), and the executor checks it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layer:
    """One cache of one layer.

    Attributes:
        name: as vLLM names it.
        block: tokens per block.
        heads, head_size, dtype: of what is kept per token; both K and V unless `mla`.
        window: tokens of a sliding window; None: full attention.
        mla: one vector per state instead of K and V.
        ratio: tokens that one state stands for; `mla` only.
        alignment: bytes to which a page is rounded up; `mla` only.
        packed_bytes: bytes per state, if not what heads, head_size and dtype make.
        draft: the layer belongs to the drafter.
    """

    name: str
    block: int
    heads: int
    head_size: int
    dtype: Literal["bfloat16", "float32", "uint8"]
    window: int | None = None
    mla: bool = False
    ratio: int = 1
    alignment: int | None = None
    packed_bytes: int | None = None
    draft: bool = False


@dataclass(frozen=True)
class Profile:
    """A model as the engine sees it.

    Attributes:
        title: the model's name.
        geometry: the kinds of groups that vLLM makes of the layers.
        block_size: vLLM's option.
        layout: the KV cache layout of releases that have several.
        layers: makes the layers, with the drafter's or without.
    """

    title: str
    geometry: str
    block_size: int
    layout: str
    layers: Callable[[bool], list[Layer]]


def _deepseek_v4_flash(mtp: bool) -> list[Layer]:
    """43 layers and one MTP layer, fp8_ds_mla.

    Per layer a window, compressed caches and the compressors' states
    (vllm/models/deepseek_v4/attention.py and compressor.py).
    """
    mla = {"heads": 1, "mla": True, "alignment": 576}
    window = {**mla, "block": 64, "head_size": 512, "dtype": "uint8", "window": 128,
              "packed_bytes": 584}  # fmt: skip
    layers = []
    for i in range(43):
        prefix = f"model.layers.{i}.attn"
        layers.append(Layer(f"{prefix}.swa_cache", **window))
        if i < 2:
            continue
        ratio = 4 if i % 2 == 0 else 128
        layers.append(
            Layer(prefix, **mla, block=256, head_size=512, dtype="uint8", ratio=ratio,
                  packed_bytes=584)
        )  # fmt: skip
        # Ratio 4 keeps two overlapping states, each a sum and a score.
        wide, block = (2, 4) if ratio == 4 else (1, 8)
        state = {**mla, "block": block, "dtype": "float32", "window": wide * ratio}
        layers.append(
            Layer(f"{prefix}.compressor.state_cache", **state, head_size=2 * wide * 512)
        )
        if ratio == 4:
            layers.append(
                Layer(f"{prefix}.indexer.k_cache", **mla, block=256, head_size=132,
                      dtype="uint8", ratio=ratio)
            )  # fmt: skip
            layers.append(
                Layer(
                    f"{prefix}.indexer.compressor.state_cache",
                    **state,
                    head_size=2 * wide * 128,
                )
            )
    if mtp:
        # The last one: 0.25.1 takes the group of the last layer for the drafter's.
        layers.append(Layer("model.layers.43.attn.swa_cache", **window, draft=True))
    return layers


def _alternating(
    count: int, every: int, full: dict, window: dict, drafter: dict | None
) -> list[Layer]:
    """`count` layers, each `every`-th with full attention, and the drafter's."""
    layers = [
        Layer(f"model.layers.{i}.attn", dtype="bfloat16",
              **(full if (i + 1) % every == 0 else window))
        for i in range(count)
    ]  # fmt: skip
    if drafter is not None:
        name = f"model.layers.{count}.attn"
        layers.append(Layer(name, dtype="bfloat16", draft=True, **drafter))
    return layers


def _gemma(mtp: bool) -> list[Layer]:
    """Gemma 4 26B: full attention has half the bytes per token, so twice the block."""
    full = {"block": 16, "heads": 2, "head_size": 512}
    window = {"block": 16, "heads": 8, "head_size": 256, "window": 1024}
    return _alternating(30, 6, full, window, window if mtp else None)


def _gpt_oss(mtp: bool) -> list[Layer]:
    """gpt-oss-120b; an EAGLE3 drafter has one layer of full attention."""
    full = {"block": 16, "heads": 8, "head_size": 64}
    window = {**full, "window": 128}
    return _alternating(36, 2, full, window, full if mtp else None)


def _exaone(mtp: bool) -> list[Layer]:
    """EXAONE's MoE with a sliding window in its MTP layer."""
    full = {"block": 32, "heads": 8, "head_size": 128}
    window = {**full, "window": 128}
    return _alternating(48, 4, full, window, window if mtp else None)


PROFILES = {
    "deepseek-v4-flash": Profile(
        "DeepSeek-V4-Flash", "dsv4-mtp", 256, "BLHNC", _deepseek_v4_flash
    ),
    "gemma": Profile("Gemma", "gemma-eagle", 16, "LBHNC", _gemma),
    "gpt-oss": Profile("gpt-oss", "gpt-oss-eagle", 16, "LBHNC", _gpt_oss),
    "exaone": Profile("EXAONE", "exaone-swa-drafter", 32, "LBHNC", _exaone),
}
