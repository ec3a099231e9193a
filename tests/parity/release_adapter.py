# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the vLLM release, and nothing else.

Builds vLLM's own scheduler, KV cache manager, OffloadingConnector (both roles) and
CPUOffloadingSpec from a `Geometry`, on the tree that `import vllm` finds. Only the
worker's byte copy is replaced, by the `OffloadingWorker` given to `build`.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

os.environ["VLLM_TARGET_DEVICE"] = "cpu"


@contextlib.contextmanager
def _distribution_for_cpu() -> Iterator[None]:
    """Let vLLM take the CPU platform, whatever the machine has.

    Before 0.28 it does so only if the distribution's version says "cpu", and it looks
    while the package is imported.
    """
    real = importlib.metadata.version

    def version_for_cpu(name: str) -> str:
        try:
            found = real(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            found = "0"
        return f"{found}+cpu" if name == "vllm" and "cpu" not in found else found

    importlib.metadata.version = version_for_cpu
    try:
        yield
    finally:
        importlib.metadata.version = real


with _distribution_for_cpu():
    import vllm
    from vllm.platforms import current_platform

import torch  # noqa: E402

# vLLM warns at each construction about what is on purpose here.
logging.getLogger("vllm").setLevel(logging.ERROR)

from vllm import SamplingParams  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: E402
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector,
)
from vllm.model_executor.models import registry  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: E402
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadingWorker,
    ReqContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # noqa: E402
from vllm.v1.outputs import (  # noqa: E402
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from .geometry import Geometry, Group  # noqa: E402

__all__ = [
    "OffloadingWorker",
    "Parts",
    "RequestStatus",
    "SlidingWindowManager",
    "TransferResult",
    "build",
    "drafters",
    "refusal",
    "store_heeds_retention",
    "supports",
    "supports_blocks_per_chunk",
    "version",
]

MAX_MODEL_LEN = 1 << 20
_NUM_DRAFTS = 2
_RETENTION_OPTION = "prefix_cache_retention_interval"
_RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


def version() -> str:
    """The version of the vLLM tree in use, without a local part (`+cpu`)."""
    tree = Path(vllm.__file__).resolve().parent.parent
    metadata = tree / "vllm.egg-info" / "PKG-INFO"
    if metadata.exists():
        for line in metadata.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ").split("+")[0]
    return vllm.__version__.split("+")[0]


@functools.cache
def _fix_first_hash() -> None:
    """Give the chain of block hashes the same start in every run."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    init_none_hash(sha256)
    if before is None:
        del os.environ["PYTHONHASHSEED"]
    else:
        os.environ["PYTHONHASHSEED"] = before


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """Looked at by each engine that is built, so it stays until the process ends."""
    return tempfile.TemporaryDirectory(prefix="parity-model-")


@functools.cache
def _model_config() -> ModelConfig:
    """The configuration of a model that is nowhere, so no hub is asked."""
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float16",
    }
    Path(_model_folder().name, "config.json").write_text(
        json.dumps(config), encoding="utf-8"
    )
    # vLLM looks at the model's class in a process of its own, whose start takes as long
    # as all that is simulated.
    in_subprocess = registry._run_in_subprocess
    registry._run_in_subprocess = lambda inspect_class: inspect_class()
    try:
        return ModelConfig(model=_model_folder().name, dtype="float16", seed=0)
    finally:
        registry._run_in_subprocess = in_subprocess


@contextlib.contextmanager
def _retention_in_environment(retention: int | None) -> Iterator[None]:
    """Up to 0.28 the retention interval is an environment variable."""
    before = os.environ.pop(_RETENTION_VARIABLE, None)
    if retention is not None:
        os.environ[_RETENTION_VARIABLE] = str(retention)
    try:
        yield
    finally:
        os.environ.pop(_RETENTION_VARIABLE, None)
        if before is not None:
            os.environ[_RETENTION_VARIABLE] = before


def _rank_block(group: Group, dcp: int) -> int:
    """Tokens of a block that one rank holds."""
    return group.block // dcp if group.kind == "full" else group.block


def _group_spec(
    group: Group, dcp: int, num_drafts: int
) -> FullAttentionSpec | SlidingWindowSpec | MambaSpec:
    if group.kind == "mamba":
        return MambaSpec(
            block_size=group.block,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=num_drafts,
        )
    # One number per token is enough: no bytes exist.
    common: dict[str, Any] = {
        "block_size": _rank_block(group, dcp),
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if group.kind == "full":
        return FullAttentionSpec(**common)
    if dcp > 1:
        common["dcp_sharded"] = False
    return SlidingWindowSpec(**common, sliding_window=group.window)


def _kv_cache_config(
    geometry: Geometry, gpu_blocks: int, retention: int | None
) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(
            [f"layer{i}"],
            _group_spec(group, geometry.dcp, _NUM_DRAFTS if geometry.eagle else 0),
            is_eagle_group=group.eagle,
        )
        for i, group in enumerate(geometry.groups)
    ]
    # The groups overlay one allocation, whose block is the largest group's page.
    page = max(group.kv_cache_spec.page_size_bytes for group in groups)
    size = page * gpu_blocks
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        names = [name for group in groups for name in group.layer_names]
        tensors = [KVCacheTensor(size=size, shared_by=names)]
    else:
        tensors = [
            KVCacheTensor(
                size=size,
                layers=group.layer_names,
                layer_stride=size,
                block_stride=page,
            )
            for group in groups
        ]
    config = KVCacheConfig(
        num_blocks=gpu_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
    )
    if hasattr(config, "prefix_cache_retention_interval"):
        config.prefix_cache_retention_interval = retention
    return config


def vllm_config_of(
    geometry: Geometry,
    retention: int | None,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    async_scheduling: bool,
    workers: int,
    extra_config: dict[str, Any],
) -> VllmConfig:
    """vLLM's configuration for a geometry, as the release builds it."""
    cache_config = CacheConfig(
        block_size=_rank_block(geometry.groups[0], geometry.dcp),
        enable_prefix_caching=True,
    )
    if hasattr(cache_config, "prefix_cache_retention_interval"):
        cache_config.prefix_cache_retention_interval = retention
    if geometry.has_mamba:
        cache_config.mamba_cache_mode = "align"
    if geometry.match:
        cache_config.prefix_match_unit = geometry.match
    if hasattr(cache_config, "kv_cache_layout"):
        # The engine resolves the layout before it builds a connector.
        cache_config.kv_cache_layout = "LBNHC"
    speculative_config = None
    if geometry.eagle:
        # "mtp" without a draft model: only the scheduler reads it here.
        speculative_config = SpeculativeConfig(
            model="ngram", num_speculative_tokens=_NUM_DRAFTS
        )
        speculative_config.method = "mtp"
    config = VllmConfig(
        model_config=_model_config(),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra_config,
        ),
    )
    # Set afterwards: the CPU platform would turn them off or change them.
    config.speculative_config = speculative_config
    config.scheduler_config.async_scheduling = async_scheduling
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = max_num_batched_tokens
    config.cache_config.enable_prefix_caching = True
    config.parallel_config.world_size = workers
    if geometry.dcp > 1:
        config.parallel_config.tensor_parallel_size = workers
        config.parallel_config.decode_context_parallel_size = geometry.dcp
    return config


@dataclass
class Parts:
    """One engine's real parts, with one name for what each release calls its own."""

    scheduler: Scheduler
    workers: list[OffloadingConnector]
    groups: tuple[Group, ...]
    hash_block: int
    blocks_per_chunk: int
    _hasher: Callable[[Request], Any]
    _watched: Callable[..., Any] | None = None

    @property
    def connector(self) -> OffloadingConnector:
        """The scheduler-role connector."""
        return self.scheduler.connector

    @property
    def manager(self) -> Any:
        """The real CPUOffloadingManager."""
        return self.connector.connector_scheduler.manager

    # --- requests ---

    def request(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        hashes: Sequence[Any] | None = None,
    ) -> Request:
        """A request that generates exactly max_tokens tokens.

        `hashes` are the prompt's block hashes, if known: hashing a prompt costs more
        than scheduling it. They may go on past the prompt's end.
        """
        prompt_hashes = None
        if hashes is not None:
            prompt_hashes = list(hashes[: len(tokens) // self.hash_block])

        def hasher(request: Request) -> Any:
            if prompt_hashes is not None and request.num_tokens == len(tokens):
                return prompt_hashes[len(request.block_hashes) :]
            return self._hasher(request)

        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )

    def block_hashes(self, tokens: Sequence[int]) -> list[Any]:
        """The block hashes of a prompt, one per `hash_block` tokens."""
        return list(self.request("hashes-only", tokens, 1).block_hashes)

    def output(
        self, sampled: dict[str, list[int]], received: set[str], worker_meta: Any
    ) -> ModelRunnerOutput:
        """The model runner's output of one step: tokens sampled per request."""
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=list(sampled.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(),
                finished_recving=received,
                kv_connector_worker_meta=worker_meta,
            ),
        )

    def block_copies(self, scheduled: Any) -> list[tuple[int, int]]:
        """(from, to) of the GPU blocks to copy before a step computes.

        copy_kv_cache_blocks_inplace in vllm/v1/worker/utils.py does so at once, after
        the connector's handle_preemptions and before it starts its loads.
        """
        copies = getattr(scheduled, "kv_cache_block_copies", None) or ()
        return [(copy.src_block_id, copy.dst_block_id) for copy in copies]

    def num_drafts(self, scheduled: Any) -> int:
        """Tokens that the drafter proposes per request after a step."""
        # From 0.30 on a step whose drafts nobody would verify proposes none.
        if getattr(scheduled, "skip_drafts", False):
            return 0
        return scheduled.num_spec_tokens_to_schedule

    def propose(self, drafts: dict[str, list[int]]) -> None:
        """Tell the scheduler of drafts, as EngineCore.post_step does.

        Not with asynchronous scheduling, where only the worker knows them.
        """
        self.scheduler.update_draft_token_ids(
            DraftTokenIds(list(drafts), list(drafts.values()))
        )

    def decisions(self) -> dict[str, tuple[Any, str]]:
        """Where each decision on a prefix is made: name to (object, its method)."""
        coordinator = self.scheduler.kv_cache_manager.coordinator
        return {
            "store": (self.connector, "build_connector_meta"),
            "lookup": (self.connector, "get_num_new_matched_tokens"),
            "load": (self.connector, "update_state_after_alloc"),
            "GPU store": (coordinator, "cache_blocks"),
            "GPU lookup": (coordinator, "find_longest_cache_hit"),
        }

    def abort(self, request_id: str) -> None:
        """Abort a request, if it is not done."""
        if request_id in self.scheduler.requests:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # --- the host tier ---

    def set_host(self, *, lookup: bool, store: bool) -> None:
        """Whether the host tier finds what it has and takes what it is given."""
        manager = self.manager
        # An attribute of the instance hides the class's method, until it is deleted.
        for name, enabled, answer in (
            ("lookup", lookup, LookupResult.MISS),
            ("prepare_store", store, None),
        ):
            if enabled:
                vars(manager).pop(name, None)
                if name == "prepare_store" and self._watched is not None:
                    manager.prepare_store = self._watched
            else:
                setattr(manager, name, lambda *_, _answer=answer, **__: _answer)

    @property
    def _host_chunks(self) -> Mapping[Any, Any]:
        """The "lru" policy's mapping from key to chunk, oldest first."""
        policy = self.manager._policy
        return policy.chunks if hasattr(policy, "chunks") else policy.blocks

    @property
    def num_host_chunks(self) -> int:
        """Chunks in the host tier."""
        return len(self._host_chunks)

    def host_entries(self) -> list[tuple[int, bytes, int, bool]]:
        """(group, block hash, host chunk id, ready) of each chunk the host holds."""
        return [
            (
                get_offload_group_idx(key),
                bytes(get_offload_block_hash(key)),
                _chunk_id(chunk),
                chunk.is_ready,
            )
            for key, chunk in self._host_chunks.items()
        ]

    def host_chunk(self, group: int, block_hash: bytes) -> Any | None:
        """The manager's record of a chunk, or None."""
        return self.manager._policy.get(make_offload_key(block_hash, group))

    def drop_host_chunk(self, group: int, block_hash: bytes) -> Callable[[], None]:
        """Take one chunk out of the host tier; returns what puts it back.

        Its memory is given to no other chunk meanwhile. Put back, it is the most
        recently used chunk. No reset of the host may come in between.

        Raises:
            LookupError: the host does not hold the chunk.
            ValueError: the chunk is being stored or loaded, so it cannot go; or, when
                it is put back, the host has stored it anew.
        """
        manager, key = self.manager, make_offload_key(block_hash, group)
        name = f"host chunk {block_hash.hex()[:16]} of group {group}"
        chunk = manager._policy.get(key)
        if chunk is None:
            raise LookupError(f"{name} is not stored")
        if chunk.ref_cnt != 0:
            raise ValueError(f"{name} is in use: finish its transfers first")
        manager._policy.remove(key)
        _count_evictable(manager, -1)

        def restore() -> None:
            if manager._policy.get(key) is not None:
                raise ValueError(f"{name} was stored anew: switch stores off before")
            context = [ReqContext(req_id="restore")]
            if (
                "req_context"
                not in inspect.signature(manager._policy.insert).parameters
            ):
                context = []
            manager._policy.insert(key, chunk, *context)
            _count_evictable(manager, 1)

        return restore

    def chunk_hash(
        self, request_hashes: Sequence[bytes], group: int, chunk: int
    ) -> Any:
        """The hash under which a request's chunk of a group is stored."""
        size = self.groups[group].block * self.blocks_per_chunk
        return self.last_hash(request_hashes, size, chunk)

    def last_hash(self, request_hashes: Sequence[bytes], size: int, index: int) -> Any:
        """The last hash of a request's block or chunk, of ``size`` tokens each."""
        return request_hashes[(index + 1) * size // self.hash_block - 1]

    def watch_chunks(self, given: Callable[[int, bytes, int], None]) -> None:
        """Call `given(group, block hash, chunk id)` when a chunk is given to a key."""
        manager = self.manager
        prepare_store = type(manager).prepare_store

        def watched(keys: Any, *args: Any, **kwargs: Any) -> Any:
            output = prepare_store(manager, keys, *args, **kwargs)
            if output is not None:
                for key, chunk in zip(
                    output.keys_to_store,
                    output.store_spec.block_ids.tolist(),
                    strict=True,
                ):
                    given(
                        get_offload_group_idx(key),
                        bytes(get_offload_block_hash(key)),
                        chunk,
                    )
            return output

        self._watched = watched
        manager.prepare_store = watched

    # --- the GPU cache ---

    def cached_blocks(self) -> Iterator[tuple[int, int, bytes]]:
        """(block id, group, block hash) of each block the GPU prefix cache serves."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None and not block.is_null:
                yield (
                    block.block_id,
                    get_group_id(block.block_hash),
                    bytes(get_block_hash(block.block_hash)),
                )

    def reset_gpu(self, running: bool) -> bool:
        """Empty the GPU prefix cache; with `running` preempt what runs first."""
        scheduler = self.scheduler
        jobs = self.connector.connector_scheduler._jobs.values()
        if running and (
            any(
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                for request in scheduler.requests.values()
            )
            # One that was aborted holds its blocks until they are loaded.
            or any(not job.is_store for job in jobs)
        ):
            # vLLM says that it does not support this.
            return False
        return scheduler.reset_prefix_cache(reset_running_requests=running)

    # --- at rest ---

    def leaks(self) -> list[str]:
        """What an engine with nothing to do should not hold any more."""
        found = []
        pool = self.scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if used:
            found.append(f"{used} GPU blocks are in use")
        for chunk in self._host_chunks.values():
            if chunk.ref_cnt != 0:
                kind = "being stored" if chunk.ref_cnt < 0 else "pinned"
                found.append(f"host chunk {_chunk_id(chunk)} is still {kind}")
        connector = self.connector.connector_scheduler
        for name in ("_jobs", "_req_status", "_block_id_to_pending_jobs"):
            if left := getattr(connector, name):
                found.append(f"the connector's {name} still holds {len(left)}")
        loading = getattr(connector, "_chunks_being_loaded", None) or getattr(
            connector, "_blocks_being_loaded", None
        )
        if loading:
            found.append(f"the connector still marks {len(loading)} chunks as loading")
        return found


def _chunk_id(chunk: Any) -> int:
    return chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id


def _count_evictable(manager: Any, change: int) -> None:
    """The manager counts the chunks that it could evict."""
    for name in ("_num_evictable_cache_chunks", "_num_evictable_cache_blocks"):
        if hasattr(manager, name):
            setattr(manager, name, getattr(manager, name) + change)


def _host_capacity(manager: Any) -> int:
    return (
        manager._num_chunks if hasattr(manager, "_num_chunks") else manager._num_blocks
    )


def build(
    geometry: Geometry,
    *,
    retention: int | None,
    blocks_per_chunk: int,
    gpu_blocks: int,
    host_chunks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    async_scheduling: bool,
    offload_prompt_only: bool,
    worker_factory: Callable[[int], OffloadingWorker],
    workers: int = 1,
    force: bool = False,
) -> Parts:
    """Build the real parts of one engine.

    Args:
        geometry: the model's KV cache groups.
        retention: None (dense), 0, or a number of tokens.
        blocks_per_chunk: GPU blocks per host chunk.
        gpu_blocks: size of the GPU block pool, in blocks shared by all groups.
        host_chunks: capacity of the host tier in chunks.
        max_num_batched_tokens: the prefill budget of a step.
        max_num_seqs: requests that run at once.
        async_scheduling: use AsyncScheduler.
        offload_prompt_only: keep decoded tokens out of the host tier.
        worker_factory: called with a rank, returns what replaces the byte copy.
        workers: number of worker processes imitated.
        force: do not ask `refusal`.

    Raises:
        ValueError: vLLM refuses the combination; see `refusal`.
    """
    assert current_platform.is_cpu()
    if not force and (reason := refusal(geometry, blocks_per_chunk, retention)):
        raise ValueError(reason)
    if workers % geometry.dcp:
        raise ValueError(
            f"{workers} workers: not a multiple of the {geometry.dcp} ranks that "
            f"{geometry.name} is spread over"
        )
    _fix_first_hash()
    kv_cache_config = _kv_cache_config(geometry, gpu_blocks, retention)
    page = kv_cache_config.kv_cache_tensors[0].size // gpu_blocks
    unit = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
    chunk_bytes = -(-page * blocks_per_chunk * workers // unit) * unit
    extra_config: dict[str, Any] = {
        "spec_name": "CPUOffloadingSpec",
        "cpu_bytes_to_use": chunk_bytes * host_chunks,
        "offload_prompt_only": offload_prompt_only,
    }
    if blocks_per_chunk > 1:
        _set_blocks_per_chunk(extra_config, geometry, blocks_per_chunk)
    with _retention_in_environment(retention):
        config = vllm_config_of(
            geometry,
            retention,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            async_scheduling=async_scheduling,
            workers=workers,
            extra_config=extra_config,
        )
        config.cache_config.num_gpu_blocks = gpu_blocks
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(
            kv_cache_config, config
        )
        if hasattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens"):
            # As EngineCore does for both roles of the connector.
            kv_cache_config.hash_block_size = hash_block
            kv_cache_config.cache_hit_alignment_tokens = (
                kv_cache_utils.resolve_cache_hit_alignment_tokens(
                    kv_cache_config, config, scheduler_block, hash_block
                )
            )
        scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
        connectors = []
        for rank in range(workers):
            connector = OffloadingConnector(
                config, KVConnectorRole.WORKER, kv_cache_config
            )
            # In place of register_kv_caches, which would wrap real tensors.
            connector.connector_worker.worker = worker_factory(rank)
            connectors.append(connector)
    parts = Parts(
        scheduler=scheduler,
        workers=connectors,
        groups=geometry.groups,
        hash_block=hash_block,
        blocks_per_chunk=blocks_per_chunk,
        _hasher=get_request_block_hasher(hash_block, sha256),
    )
    _check(parts, host_chunks, retention, blocks_per_chunk)
    return parts


@functools.cache
def _has_blocks_per_chunk() -> bool:
    """Whether the release takes the chunk factor as such."""
    from vllm.v1.kv_offload import base

    source = inspect.getsource(base)
    with contextlib.suppress(ImportError):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

        source += inspect.getsource(config)
    return '"blocks_per_chunk"' in source


def store_heeds_retention() -> bool:
    """Whether the offload store keeps less with a retention interval than without.

    Stock's does since 0.30 (SchedulerOffloadConfig)."""
    return "retention_interval" in SchedulerOffloadConfig._fields


def supports_blocks_per_chunk(geometry: Geometry, blocks_per_chunk: int) -> bool:
    """Whether the release can be told this chunk factor for these groups."""
    uniform = len({group.block for group in geometry.groups}) == 1
    return blocks_per_chunk == 1 or uniform or _has_blocks_per_chunk()


def refusal(
    geometry: Geometry, blocks_per_chunk: int = 1, retention: int | None = None
) -> str | None:
    """Why the release cannot serve a geometry with these options, or None."""
    release = f"vLLM {version()}"
    if not supports_blocks_per_chunk(geometry, blocks_per_chunk):
        return f"{release} has no chunk factor for groups of different block sizes"
    # _validate_prefix_cache_retention_interval: 0 is the default where it is an option.
    harmless = (None, 0) if hasattr(CacheConfig, _RETENTION_OPTION) else (None,)
    if not geometry.has_sliding_window and retention not in harmless:
        return f"{release} refuses retention for full attention alone"
    if geometry.has_mamba and not hasattr(
        KVCacheManager, "get_computed_blocks_for_connector"
    ):
        # Scheduler.schedule takes the longest of the groups' local hits.
        return (
            f"{release} resumes where a Mamba group has no state, if it has a connector"
        )
    if geometry.match and not hasattr(CacheConfig, "prefix_match_unit"):
        return f"{release} has no hits that end inside a block"
    if geometry.dcp > 1:
        windows = [group for group in geometry.groups if group.kind == "swa"]
        if hasattr(FullAttentionSpec, "dcp_sharded"):
            # HybridKVCacheCoordinator: only a drafter's groups may be on every rank.
            windows = [group for group in windows if not group.eagle]
        elif len(geometry.groups) > 1 and not hasattr(
            kv_cache_utils, "resolve_dcp_kv_block_size"
        ):
            # resolve_kv_cache_block_sizes
            return f"{release} has no context parallelism for several groups"
        if windows:
            return f"{release} has no context parallelism for sliding windows"
    return None


def supports(
    geometry: Geometry, blocks_per_chunk: int = 1, retention: int | None = None
) -> bool:
    """Whether the release can serve a geometry with these options."""
    return refusal(geometry, blocks_per_chunk, retention) is None


@functools.cache
def drafters(geometry: Geometry) -> dict[str, frozenset[int]]:
    """Per tier, "gpu" and "host", the groups that match one block past a hit.

    Those flagged as a drafter's; on the GPU those of the same spec as well
    (verify_and_split_kv_cache_groups in vllm/v1/core/kv_cache_coordinator.py). Where
    there is a drafter and none is flagged a release may take all of them.
    """
    groups = geometry.groups
    flagged = frozenset(i for i, group in enumerate(groups) if group.eagle)
    if flagged or not geometry.eagle:
        alike = {i for i, g in enumerate(groups) if replace(g, eagle=True) in groups}
        return {"gpu": frozenset(alike), "host": flagged}
    parts = build(
        geometry,
        retention=None,
        blocks_per_chunk=1,
        gpu_blocks=16,
        host_chunks=16,
        max_num_batched_tokens=8192,
        max_num_seqs=1,
        async_scheduling=False,
        offload_prompt_only=False,
        worker_factory=lambda rank: None,
    )
    configs = parts.connector.connector_scheduler.config.kv_group_configs
    coordinator = parts.scheduler.kv_cache_manager.coordinator
    return {
        "gpu": frozenset(coordinator.eagle_group_ids),
        "host": frozenset(i for i, c in enumerate(configs) if c.is_eagle_group),
    }


def _set_blocks_per_chunk(
    extra_config: dict[str, Any], geometry: Geometry, blocks_per_chunk: int
) -> None:
    """Say the chunk factor in the words of the release."""
    if _has_blocks_per_chunk():
        extra_config["blocks_per_chunk"] = blocks_per_chunk
    else:
        extra_config["block_size"] = geometry.groups[0].block * blocks_per_chunk


def _check(
    parts: Parts, host_chunks: int, retention: int | None, blocks_per_chunk: int
) -> None:
    """The engine is the one that was asked for; each of these failed silently once."""
    scheduler = parts.scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    assert coordinator.retention_interval == retention
    assert scheduler.kv_cache_manager.enable_caching
    assert _host_capacity(parts.manager) == host_chunks
    connector_config = scheduler.connector.connector_scheduler.config
    factor = getattr(connector_config, "blocks_per_chunk", None)
    if factor is None:
        factor = connector_config.block_size_factor
    assert factor == blocks_per_chunk
    assert tuple(_group_blocks(connector_config)) == tuple(
        group.block for group in parts.groups
    )


def _group_blocks(connector_config: Any) -> Iterator[int]:
    """Tokens per GPU block of each group, as the connector counts them."""
    for group in connector_config.kv_group_configs:
        tokens = getattr(group, "tokens_per_block", None)
        yield group.gpu_block_size if tokens is None else tokens
