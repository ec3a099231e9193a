# SPDX-License-Identifier: Apache-2.0
"""The worker that copies, alone: which bytes go where."""

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from .torch_offloading import BlockPair, TorchOffloadingWorker, pairs


def test_a_group_may_begin_inside_a_chunk() -> None:
    blocks = GPULoadStoreSpec([7, 8, 9, 5], group_sizes=[3, 1], block_indices=[1, 4])
    assert list(pairs(blocks, CPULoadStoreSpec([20, 21, 30]), 2)) == [
        BlockPair(0, 7, 20, 1),
        BlockPair(0, 8, 21, 0),
        BlockPair(0, 9, 21, 1),
        BlockPair(1, 5, 30, 0),
    ]


def test_group_without_blocks_takes_no_chunk() -> None:
    blocks = GPULoadStoreSpec([5], group_sizes=[0, 1], block_indices=[0, 3])
    assert list(pairs(blocks, CPULoadStoreSpec([9]), 1)) == [BlockPair(1, 5, 9, 0)]


def test_only_a_groups_own_layers_are_copied_and_no_padding() -> None:
    engine = [torch.arange(40, dtype=torch.int8).view(4, 10) for _ in range(2)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 10) for tensor in engine],
        [[CanonicalKVCacheRef(0, 8)], [CanonicalKVCacheRef(1, 10)]],
    )
    worker = TorchOffloadingWorker(caches, blocks_per_chunk=1, num_chunks=2)
    blocks = GPULoadStoreSpec([1, 2], group_sizes=[1, 1], block_indices=[0, 0])
    chunks = CPULoadStoreSpec([0, 1])
    before = [tensor.clone() for tensor in engine]
    assert worker.submit_store(1, blocks, chunks)
    for tensor in engine:
        tensor.zero_()
    assert worker.submit_load(2, chunks, blocks)
    assert [(r.job_id, r.success, r.transfer_size) for r in worker.get_finished()] == [
        (1, True, 18),
        (2, True, 18),
    ]
    assert worker.get_finished() == []
    assert torch.equal(engine[0][1, :8], before[0][1, :8])
    assert torch.equal(engine[1][2], before[1][2])
    # The rest stays as it was.
    assert engine[0].sum() == before[0][1, :8].sum()
    assert engine[1].sum() == before[1][2].sum()
