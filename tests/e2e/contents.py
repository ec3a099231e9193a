# SPDX-License-Identifier: Apache-2.0
"""What the engine's own KV cache holds of a request, by the place in its text.

This asks neither the connector nor the host tier: the blocks are those of the request's
block table, and the bytes those that its attention layers read. So a block that was
stored under another's key, or loaded into another's place, is noticed too.
"""

import hashlib
from collections.abc import Iterator

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

Place = tuple[int, int]


class Contents:
    """Looks when a request's prompt has just been computed, before anything is freed.

    ``blocks`` says which block of the engine lies where, by group and number in the
    text; ``digests`` what it holds.
    """

    def __init__(self, scheduler, layers: dict) -> None:
        self.blocks: dict[Place, int] = {}
        self.digests: dict[Place, bytes] = {}
        self._scheduler = scheduler
        config = scheduler.kv_cache_config
        self._caches = [
            [group_kernel_blocks(layers[n].kv_cache, config.num_blocks) for n in names]
            for names in (group.layer_names for group in config.kv_cache_groups)
        ]
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._observe

    def forget(self) -> None:
        """The next request is another."""
        self.blocks, self.digests = {}, {}

    def _observe(self, scheduled, output):
        if not self.blocks and any(len(t) for t in output.sampled_token_ids):
            self.blocks = dict(self._prompt_blocks())
            self.digests = {
                place: self._digest(place[0], block)
                for place, block in self.blocks.items()
            }
        return self._update(scheduled, output)

    def _prompt_blocks(self) -> Iterator[tuple[Place, int]]:
        """The blocks that hold nothing but prompt."""
        (request,) = self._scheduler.requests.values()
        coordinator = self._scheduler.kv_cache_manager.coordinator
        for group, manager in enumerate(coordinator.single_type_managers):
            size = manager.kv_cache_spec.block_size
            whole = request.num_prompt_tokens // size
            held = manager.req_to_blocks[request.request_id][:whole]
            for index, block in enumerate(held):
                if not block.is_null:
                    yield (group, index), block.block_id

    def _digest(self, group: int, block: int) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for cache in self._caches[group]:
            page = cache[block].contiguous().flatten().view(torch.uint8)
            total.update(page.numpy().tobytes())
        return total.digest()
