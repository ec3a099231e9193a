# SPDX-License-Identifier: Apache-2.0
"""What was stored under which key, byte for byte, and whether a load brought it back.

The recording worker copies as its base does. After each copy it reads the engine's
tensors: a digest of every stored block is kept under the block's key, and every
restored block is held against the digest of the key that the host tier was asked for.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import get_offload_group_idx

from .torch_offloading import (
    BlockPair,
    TorchOffloadingSpec,
    TorchOffloadingWorker,
    pairs,
)

Fault = Callable[[list[BlockPair]], list[BlockPair]]


@dataclass(frozen=True)
class Restored:
    """A block of the engine's that was loaded, and whether with the right bytes.

    They are right if they are those that were stored for the key.
    """

    group: int
    block: int
    size: int
    right: bool


@dataclass
class Ledger:
    """One engine's host tier, seen by an observer.

    ``key_of`` says which key a chunk of the host holds. ``fault`` and ``store_fault``,
    when they are set, make wrong lists out of the blocks of the loads and the stores.
    """

    key_of: dict[int, bytes] = field(default_factory=dict)
    digests: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    restored: list[Restored] = field(default_factory=list)
    evicted: int = 0
    fault: Fault | None = None
    store_fault: Fault | None = None

    def watch(self, manager) -> None:
        """Keep the keys of the chunks that ``manager`` hands out."""
        prepare_store, prepare_load = manager.prepare_store, manager.prepare_load

        def store(keys, context):
            output = prepare_store(keys, context)
            if output is not None:
                chunks = output.store_spec.block_ids.tolist()
                self.evicted += len(output.evicted_keys)
                self.key_of.update(zip(chunks, output.keys_to_store, strict=True))
            return output

        def load(keys, context):
            spec = prepare_load(keys, context)
            for chunk, key in zip(spec.block_ids.tolist(), keys, strict=True):
                assert self.key_of[chunk] == key, "the chunk was given to another key"
            return spec

        manager.prepare_store, manager.prepare_load = store, load

    def clear(self) -> None:
        """The host tier was emptied."""
        self.key_of.clear()
        self.digests.clear()

    def take_restored(self) -> list[Restored]:
        """The blocks restored since the last call."""
        restored, self.restored = self.restored, []
        return restored

    def chunks_of(self, group: int) -> dict[int, bytes]:
        """The chunks that hold something of a group, with their keys."""
        return {
            chunk: key
            for chunk, key in self.key_of.items()
            if get_offload_group_idx(key) == group
        }


# The scheduler's and the worker's spec are two objects: they meet here, by engine.
LEDGERS: dict[str, Ledger] = {}


class RecordingWorker(TorchOffloadingWorker):
    """Writes in the ledger what it copied."""

    ledger: Ledger

    def store_block(self, pair: BlockPair) -> None:
        """Copy one block and keep its digest."""
        super().store_block(pair)
        key = self.ledger.key_of[pair.chunk]
        self.ledger.digests[key, pair.part] = self.digest(pair)

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        """Store, through the fault if there is one."""
        asked = list(pairs(src_spec, dst_spec, self.blocks_per_chunk))
        fault = self.ledger.store_fault
        self._transfer(job_id, fault(asked) if fault else asked, self.store_block)
        return True

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        """Load, through the fault if there is one, and compare."""
        asked = list(pairs(dst_spec, src_spec, self.blocks_per_chunk))
        fault = self.ledger.fault
        self._transfer(job_id, fault(asked) if fault else asked, self.load_block)
        for pair in asked:
            key = self.ledger.key_of[pair.chunk]
            right = self.digest(pair) == self.ledger.digests[key, pair.part]
            size = self.block_bytes(pair.group)
            self.ledger.restored.append(Restored(pair.group, pair.block, size, right))
        return True

    def digest(self, pair: BlockPair) -> bytes:
        """Of the bytes that the engine's tensors hold for a block."""
        total = hashlib.blake2b(digest_size=16)
        for engine, _ in self.pages(pair):
            total.update(engine.numpy().tobytes())
        return total.digest()


class RecordingSpec(TorchOffloadingSpec):
    """The host tier with a ledger; the setting ``chunks`` is its capacity."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.num_chunks = self.extra_config["chunks"]

    @property
    def ledger(self) -> Ledger:
        """The engine's own."""
        return LEDGERS.setdefault(self.config.engine_id, Ledger())

    def get_manager(self):
        """vLLM's manager, watched."""
        first = self._manager is None
        manager = super().get_manager()
        if first:
            self.ledger.watch(manager)
        return manager

    def create_worker(self, kv_caches) -> RecordingWorker:
        """The worker that writes in the ledger."""
        worker = RecordingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        worker.ledger = self.ledger
        return worker


def foreign_chunk(group: int, chunk: int) -> Fault:
    """The last block loaded of ``group`` comes from another chunk of the host's."""

    def fault(asked: list[BlockPair]) -> list[BlockPair]:
        at = max(i for i, pair in enumerate(asked) if pair.group == group)
        return [*asked[:at], asked[at]._replace(chunk=chunk), *asked[at + 1 :]]

    return fault


def rotated_blocks(group: int) -> Fault:
    """Each block of ``group`` in a transfer takes the next one's place."""

    def fault(asked: list[BlockPair]) -> list[BlockPair]:
        wrong = list(asked)
        at = [i for i, pair in enumerate(asked) if pair.group == group]
        for i, following in zip(at, [*at[1:], *at[:1]], strict=True):
            wrong[i] = asked[i]._replace(block=asked[following].block)
        return wrong

    return fault
