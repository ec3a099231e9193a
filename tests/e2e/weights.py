# SPDX-License-Identifier: Apache-2.0
"""Weights for the tiny models: random, the same in every process, and lively.

vLLM's own dummy weights make a model say one token for ever; then a wrong KV block
changes nothing that can be seen.
"""

import hashlib
import math

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

FORMAT = "offload_parity_random"


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(seed)


def values(name: str, like: torch.Tensor) -> torch.Tensor:
    """What the parameter ``name`` holds: drawn from its name alone."""
    drawn = torch.randn(like.shape, generator=_generator(name), dtype=torch.float32)
    if "norm" in name:
        return 1 + 0.1 * drawn
    if "embed" in name:
        return 0.02 * drawn
    if "lm_head" in name:
        return 0.3 * drawn
    if like.ndim < 2:
        return 0.1 * drawn
    return drawn / math.sqrt(like.shape[-1])


@register_model_loader(FORMAT)
class RandomWeights(BaseModelLoader):
    """A loader that needs no file."""

    def download_model(self, model_config) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config) -> None:
        """Fill every parameter."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values(name, parameter))
