# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU backend lacks for DeepSeek-V4: small kernels, and the MTP model.

The backend computes the model itself, and its caches are laid out as on a GPU; only
what fills its index tables is written for Triton, which is not there. These stand-ins
do the same in torch, registered as vLLM registers its own for the CPU. The MTP model is
made of the backend's own layers.
"""

import functools

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mhc import HCHeadOp
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import maybe_prefix
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.models.deepseek_v4.cpu.model import DeepseekV4DecoderLayer
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

from .models import CannotRunError

# Some of the compiled kernels that the model calls.
_COMPILED = (
    "flash_mla_with_kvcache_cpu",
    "fused_qnorm_rope_kv_insert_cpu",
    "save_partial_states_cpu",
    "compress_norm_rope_store_cpu",
    "topk_transform_512_cpu",
)
# The model's, and its drafter's.
_TYPES = ("deepseek_v4", "deepseek_mtp")
_MLA = "vllm.v1.attention.backends.mla"


def compressed_slots(
    compressed_slot_mapping_ptr, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    block_table_ptr, block_table_stride, block_size, dcp_world_size, cp_interleave,
    COMPRESS_RATIO, PAD_ID, TRITON_BLOCK_SIZE,
) -> None:  # fmt: skip
    """Where the state of each token that completes a compressed one is kept."""
    assert dcp_world_size == 1
    for row in range(len(seq_lens_ptr)):
        start, end = query_start_loc_ptr[row : row + 2].tolist()
        length = int(seq_lens_ptr[row])
        position = torch.arange(length - (end - start), length)
        ends_one = (position + 1) % COMPRESS_RATIO == 0
        valid = ends_one & (slot_mapping_ptr[start:end] != PAD_ID)
        place = position // COMPRESS_RATIO
        block = block_table_ptr[row][place * valid // block_size].long()
        slot = block * block_size + place % block_size
        compressed_slot_mapping_ptr[start:end] = torch.where(valid, slot, PAD_ID)


def prefill_gather_lens(
    prefill_gather_lens_ptr, seq_lens_ptr, query_start_loc_ptr, replay_start_ptr,
    num_prefills, num_decodes, window_size, BLOCK_SIZE,
) -> None:  # fmt: skip
    """How many tokens of the window a prefill reads."""
    rows = slice(num_decodes, num_decodes + num_prefills)
    query = query_start_loc_ptr.diff()[rows]
    before = (seq_lens_ptr[rows] - query - replay_start_ptr[rows]).clamp(min=0)
    prefill_gather_lens_ptr[:num_prefills] = query + before.clamp(max=window_size - 1)


def window_slots(
    swa_indices_ptr, swa_indices_stride, swa_lens_ptr, window_size, index_width,
    left_visible_ptr, right_visible_ptr, query_start_loc_ptr, seq_lens_ptr,
    token_to_req_indices_ptr, is_valid_token_ptr, block_table_ptr, block_table_stride,
    block_size, replay_start_ptr, token_offset, HAS_IMAGE, TRITON_BLOCK_SIZE,
) -> None:  # fmt: skip
    """The slots that each token's window covers."""
    assert not HAS_IMAGE
    # The buffers may be longer than this step.
    count = min(len(swa_lens_ptr), len(token_to_req_indices_ptr) - token_offset)
    tokens = slice(token_offset, token_offset + count)
    row = token_to_req_indices_ptr[tokens].long()
    query_start = query_start_loc_ptr[row]
    before = seq_lens_ptr[row] - (query_start_loc_ptr[row + 1] - query_start)
    position = before + torch.arange(token_offset, token_offset + count) - query_start
    start = (position - (window_size - 1)).clamp(min=0)
    start = torch.maximum(start, replay_start_ptr[row])
    valid = is_valid_token_ptr[tokens]
    length = torch.where(valid, position + 1 - start, 0)
    offset = torch.arange(index_width)
    seen = offset < length[:, None]
    place = ((start[:, None] + offset) * seen).long()
    slot = block_table_ptr[row[:, None], place // block_size] * block_size
    swa_lens_ptr[:count] = length
    swa_indices_ptr.flatten(1)[:count, :index_width] = torch.where(
        seen, slot + place % block_size, -1
    )


def uniform_decode(
    seq_lens_ptr, decode_seq_lens_ptr, block_table_ptr, block_table_stride,
    expanded_block_table_ptr, expanded_bt_stride, decode_lens_ptr, max_decode_len,
    BLOCK_SIZE,
) -> None:  # fmt: skip
    """Each drafted token as a request of its own."""
    count = min(len(decode_seq_lens_ptr), len(seq_lens_ptr) * max_decode_len)
    index = torch.arange(count)
    row = index // max_decode_len
    length = seq_lens_ptr[row] - max_decode_len + index % max_decode_len + 1
    decode_seq_lens_ptr[:count] = length.clamp(min=0)
    width = min(block_table_ptr.shape[1], expanded_block_table_ptr.shape[1])
    expanded_block_table_ptr[:count, :width] = block_table_ptr[row, :width]
    decode_lens_ptr[:count] = 1


def prefill_chunk(
    query_start_loc_ptr, uncompressed_seq_lens_ptr, cu_compressed_seq_lens_ptr,
    row_start_cu_compressed_seq_lens_ptr, token_to_seq_ptr,
    cu_compressed_seq_len_ks_ptr, cu_compressed_seq_len_ke_ptr, query_slice_start,
    query_slice_stop, DCP_RANK, DCP_WORLD, DCP_INTERLEAVE, BLOCK_SIZE, COMPRESS_RATIO,
) -> None:  # fmt: skip
    """Which compressed tokens each token of a prefill may choose from."""
    assert DCP_WORLD == 1
    for row in range(len(uncompressed_seq_lens_ptr)):
        start, end = query_start_loc_ptr[row : row + 2].tolist()
        low, high = max(start, query_slice_start), min(end, query_slice_stop)
        before = int(uncompressed_seq_lens_ptr[row]) - (end - start)
        seen = (before + 1 + torch.arange(low, high) - start) // COMPRESS_RATIO
        first = row_start_cu_compressed_seq_lens_ptr[row]
        out = slice(low - query_slice_start, high - query_slice_start)
        cu_compressed_seq_len_ks_ptr[out] = first
        cu_compressed_seq_len_ke_ptr[out] = (first + seen).to(torch.int32)
        a, b = cu_compressed_seq_lens_ptr[row : row + 2].tolist()
        token_to_seq_ptr[a:b] = row


def requests_of_tokens(
    query_start_loc, output, num_reqs, num_mapped, num_tokens, num_warps
) -> None:
    """The request of each token; 0 for those behind the last."""
    output[:num_tokens] = 0
    output[:num_mapped] = torch.repeat_interleave(
        torch.arange(num_reqs, dtype=output.dtype), query_start_loc.diff()
    )[:num_mapped]


class MtpLayer(nn.Module):
    """One layer of the drafter: the embedding and the state, mixed, then a block."""

    def __init__(self, config, vllm_config, buffer: torch.Tensor, prefix: str) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        linear = {"bias": False, "return_bias": False}
        self.e_proj = ReplicatedLinear(width, width, prefix=f"{prefix}.e", **linear)
        self.h_proj = ReplicatedLinear(width, width, prefix=f"{prefix}.h", **linear)
        self.mtp_block = DeepseekV4DecoderLayer(vllm_config, prefix, buffer)
        streams = config.hc_mult
        self.hc_head_fn = nn.Parameter(
            torch.empty(streams, streams * width, dtype=torch.float32), False
        )
        self.hc_head_base = nn.Parameter(
            torch.empty(streams, dtype=torch.float32), False
        )
        self.hc_head_scale = nn.Parameter(torch.empty(1, dtype=torch.float32), False)
        self.hc_head = HCHeadOp()
        self.norm = RMSNorm(width, eps)

    def streams(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual streams of the flat hidden state."""
        return hidden.view(-1, self.config.hc_mult, self.config.hidden_size)

    def forward(self, tokens, positions, hidden, embedded) -> torch.Tensor:
        """The streams behind the block, flat."""
        embedded = torch.where(positions[:, None] == 0, 0, embedded)
        mixed = self.h_proj(self.hnorm(self.streams(hidden).contiguous()))
        mixed = mixed + self.e_proj(self.enorm(embedded)).unsqueeze(1)
        out, *_ = self.mtp_block(mixed, positions, tokens)
        return out.flatten(1)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """One vector for each token, of its streams."""
        mixed = self.hc_head(
            self.streams(hidden), self.hc_head_fn, self.hc_head_scale,
            self.hc_head_base, self.config.rms_norm_eps, self.config.hc_eps,
        )  # fmt: skip
        return self.norm(mixed)


class Predictor(nn.Module):
    """The drafter's embedding and its layer."""

    def __init__(self, vllm_config, prefix: str) -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        buffer = torch.empty(tokens, config.index_topk, dtype=torch.int32)
        number = config.num_hidden_layers
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        layer = MtpLayer(config, vllm_config, buffer, f"{prefix}.layers.{number}")
        self.layers = nn.ModuleDict({str(number): layer})

    @property
    def layer(self) -> MtpLayer:
        """The only one."""
        return next(iter(self.layers.values()))


class DeepseekV4Mtp(nn.Module):
    """DeepSeek-V4's drafter, as vLLM's proposer calls it."""

    def __init__(self, *, vllm_config, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self.config = config
        self.model = Predictor(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size,
            prefix=maybe_prefix(prefix, "lm_head"),
        )  # fmt: skip
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The tokens' vectors."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids, positions, hidden_states, intermediate_tensors=None,
        inputs_embeds=None, spec_step_idx=0,
    ) -> torch.Tensor:  # fmt: skip
        """The drafter's state, which the next step is given."""
        embedded = inputs_embeds
        if embedded is None:
            embedded = self.embed_input_ids(input_ids)
        return self.model.layer(input_ids, positions, hidden_states, embedded)

    def compute_logits(self, hidden_states, spec_step_idx=0) -> torch.Tensor:
        """What the drafter would say."""
        return self.logits_processor(self.lm_head, self.model.layer.head(hidden_states))


_check = CpuPlatform.check_and_update_config


def keep_prefix_caching(vllm_config) -> None:
    """The platform's check, whose word on caching is not taken.

    Without AMX it turns chunked prefill and prefix caching off for every model with
    MLA. DeepSeek-V4's kernels can do both: they address their caches by slots.
    """
    model = vllm_config.model_config
    if model is None or model.hf_config.model_type not in _TYPES:
        _check(vllm_config)
        return
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    wanted = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
    batch = scheduler.max_num_batched_tokens
    _check(vllm_config)
    scheduler.enable_chunked_prefill, cache.enable_prefix_caching = wanted
    scheduler.max_num_batched_tokens = batch


def no_plan(self, num_decode_tokens: int) -> dict:
    """No plan for any kind of layer: 0.32.0's own for the CPU lacks two kinds."""
    return DeepseekSparseSWAMetadataBuilder.build_tile_scheduler(self, 0)


def missing_kernels() -> list[str]:
    """What vLLM's compiled backend for this processor does not have."""
    current_platform.import_kernels()
    return [name for name in _COMPILED if not hasattr(torch.ops._C, name)]


@functools.cache
def register() -> None:
    """Give vLLM the kernels and the drafter.

    Raises:
        CannotRunError: the compiled part is not there for this processor.
    """
    if missing := missing_kernels():
        raise CannotRunError(
            "vLLM's CPU kernels for this processor lack DeepSeek-V4's "
            f"({missing[0]} and others): they need AVX512-BF16"
        )
    CpuPlatform.check_and_update_config = staticmethod(keep_prefix_caching)
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_plan
    register_kernels(
        {
            f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": (
                compressed_slots
            ),
            f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": (
                prefill_gather_lens
            ),
            f"{_MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": window_slots,
            f"{_MLA}.indexer.PrepareUniformDecodeKernel.kernel": uniform_decode,
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": (
                requests_of_tokens
            ),
            f"{_MLA}.indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk,
        }
    )
    ModelRegistry.register_model("DeepSeekV4MTPModel", DeepseekV4Mtp)
