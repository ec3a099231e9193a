# SPDX-License-Identifier: Apache-2.0
"""vLLM's host tier on a machine without a GPU: the copies are torch's.

``CPUOffloadingSpec`` refuses a CPU, for its worker needs CUDA's streams. Keys, capacity
and eviction are vLLM's own here; only the worker that copies is another. vLLM finds it
by its documented settings for specs from outside, with ``tests`` on ``PYTHONPATH``::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TorchOffloadingSpec",
      "spec_module_path": "e2e.torch_offloading", "cpu_bytes_to_use": 1073741824}}'

It is meant for tests: a copy is done when it is submitted, on the engine's thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class BlockPair(NamedTuple):
    """One block of a transfer: in the engine, and as a part of a chunk in the host."""

    group: int
    block: int
    chunk: int
    part: int


def pairs(
    blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec, blocks_per_chunk: int
) -> Iterator[BlockPair]:
    """Which block of the engine belongs to which part of which chunk.

    A group's first block may lie inside its first chunk: what matters is its index
    among the request's blocks.
    """
    block_ids = iter(blocks.block_ids.tolist())
    chunk_ids = iter(chunks.block_ids.tolist())
    for group, (size, first) in enumerate(
        zip(blocks.group_sizes, blocks.block_indices, strict=True)
    ):
        chunk = -1
        for index in range(first, first + size):
            part = index % blocks_per_chunk
            if index == first or part == 0:
                chunk = next(chunk_ids)
            yield BlockPair(group, next(block_ids), chunk, part)


class TorchOffloadingWorker(OffloadingWorker):
    """Copies blocks between the engine's tensors and one host tensor for each."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int
    ):
        self.blocks_per_chunk = blocks_per_chunk
        self.refs = kv_caches.group_data_refs
        self.engine = [each.tensor for each in kv_caches.tensors]
        self.host = [
            torch.zeros((num_chunks, blocks_per_chunk, t.shape[1]), dtype=torch.int8)
            for t in self.engine
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        """Copy the engine's blocks to the host, at once."""
        chosen = pairs(src_spec, dst_spec, self.blocks_per_chunk)
        self._transfer(job_id, chosen, self.store_block)
        return True

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        """Copy the host's blocks to the engine, at once."""
        chosen = pairs(dst_spec, src_spec, self.blocks_per_chunk)
        self._transfer(job_id, chosen, self.load_block)
        return True

    def get_finished(self) -> list[TransferResult]:
        """The transfers since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def store_block(self, pair: BlockPair) -> None:
        """Copy one block to the host."""
        for engine, host in self.pages(pair):
            host.copy_(engine)

    def load_block(self, pair: BlockPair) -> None:
        """Copy one block to the engine."""
        for engine, host in self.pages(pair):
            engine.copy_(host)

    def pages(self, pair: BlockPair) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A block's bytes in the engine and in the host, layer by layer."""
        for ref in self.refs[pair.group]:
            size = ref.page_size_bytes
            yield (
                self.engine[ref.tensor_idx][pair.block, :size],
                self.host[ref.tensor_idx][pair.chunk, pair.part, :size],
            )

    def block_bytes(self, group: int) -> int:
        """The bytes of one block of a group, of all its layers."""
        return sum(ref.page_size_bytes for ref in self.refs[group])

    def _transfer(
        self,
        job_id: int,
        chosen: Iterable[BlockPair],
        copy: Callable[[BlockPair], None],
    ) -> None:
        began = time.perf_counter()
        size = 0
        for pair in chosen:
            copy(pair)
            size += self.block_bytes(pair.group)
        seconds = time.perf_counter() - began
        self._finished.append(TransferResult(job_id, True, size, seconds))


class TorchOffloadingSpec(CPUOffloadingSpec):
    """vLLM's host tier with a worker that needs no GPU."""

    def create_worker(self, kv_caches: CanonicalKVCaches) -> TorchOffloadingWorker:
        """The worker for these tensors."""
        return TorchOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, made once."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker
