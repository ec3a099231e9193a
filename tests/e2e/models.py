# SPDX-License-Identifier: Apache-2.0
"""The tiny models: each one the layers of a real one, small."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

_S, _F = "sliding_attention", "full_attention"

VOCABULARY = 512

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "layer_types": [_S, _S, _S, _F],
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

_EXAONE = _COMMON | {
    "model_type": "exaone_moe",
    "architectures": ["ExaoneMoEForCausalLM"],
    "sliding_window": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_nextn_predict_layers": 1,
}


# DeepSeek-V4's ratios; what the kernels fix is as in the real model: the width of a
# head, of its rotated part and of the indexer's, and how many tokens that chooses.
_DEEPSEEK = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "index_topk": 512,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "num_hash_layers": 0,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "expert_dtype": "bf16",
}


class CannotRunError(Exception):
    """This machine lacks what a model needs."""


@dataclass(frozen=True)
class Model:
    """A model's configuration, and what the tests know of its cache.

    ``groups`` are the kinds of its KV cache groups, ``drafter`` the one that holds the
    drafter's layers. What is restored of the group ``unread`` is never read. The tests'
    prompts are ``scale`` times as long. ``prepare`` gives vLLM what it lacks.
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    groups: tuple[str, ...]
    drafter: str | None = None
    drafts: int = 0
    unread: int | None = None
    block: int = 32
    scale: int = 1
    gpu_bytes: int = 32 << 20
    prepare: Callable[[], None] = lambda: None


def _prepare_deepseek() -> None:
    # It imports the model, which others do not need.
    from . import deepseek

    deepseek.register()


GEMMA = Model(
    "gemma",
    _COMMON
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
    },
    ("window", "window", "window", "full"),
)
EXAONE_FULL = Model(
    "exaone-full-drafter",
    _EXAONE | {"mtp_layer_types": [_F]},
    ("window", "window", "full"),
    drafter="full",
    drafts=2,
)
EXAONE_WINDOW = Model(
    "exaone-window-drafter",
    _EXAONE | {"mtp_layer_types": [_S], "mtp_sliding_windows": [128]},
    ("window", "window", "window", "full", "window"),
    drafter="window",
    drafts=2,
)
DEEPSEEK = Model(
    "deepseek-v4",
    _DEEPSEEK,
    ("window", "window", "full", "window", "window"),
    # The state of the layer that compresses 128 tokens to one: a hit ends at a multiple
    # of 256, where the next 128 begin.
    unread=4,
    block=256,
    scale=4,
    gpu_bytes=512 << 20,
    prepare=_prepare_deepseek,
)
DEEPSEEK_MTP = replace(
    DEEPSEEK,
    name="deepseek-v4-mtp",
    groups=("window", "window", "window", "full", "window", "window"),
    drafter="window",
    drafts=2,
    unread=5,
)
MODELS = (GEMMA, EXAONE_FULL, EXAONE_WINDOW, DEEPSEEK, DEEPSEEK_MTP)
