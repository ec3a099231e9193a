# SPDX-License-Identifier: Apache-2.0
"""A vLLM executor that computes nothing and acknowledges every transfer.

vLLM imports it in its own processes by ``--distributed-executor-backend``. What it is
to imitate comes as JSON in the environment (``settings``).
"""

import copy
import inspect
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from parity.geometry import GEOMETRIES, Group

from .profiles import PROFILES, Layer
from .settings import Settings

# What every request decodes, and what the drafter proposes: no draft is accepted.
TOKEN = 5
DRAFT = 6

_MAX_NAP_S = 0.02


def _kv_cache_spec(layer: Layer) -> KVCacheSpec:
    """What a real layer's ``get_kv_cache_spec`` returns, in the release's own words."""
    if layer.mla:
        cls = MLAAttentionSpec if layer.window is None else SlidingWindowMLASpec
    else:
        cls = FullAttentionSpec if layer.window is None else SlidingWindowSpec
    known = inspect.signature(cls).parameters
    fields: dict[str, Any] = {
        "block_size": layer.block,
        "num_kv_heads": layer.heads,
        "head_size": layer.head_size,
        "dtype": getattr(torch, layer.dtype),
    }
    if layer.window is not None:
        fields["sliding_window"] = layer.window
    if layer.mla:
        fields["alignment"] = layer.alignment
        fields["max_tp_shards"] = 1
        ratio = "tokens_per_state" if "tokens_per_state" in known else "compress_ratio"
        fields[ratio] = layer.ratio
    if layer.packed_bytes is not None:
        fields |= {
            "cache_dtype_str": "fp8_ds_mla",
            "model_version": "deepseek_v4",
            # Up to 0.25 the bytes follow from the two above.
            "state_content_bytes": layer.packed_bytes,
        }
    fields["is_draft"] = layer.draft
    return cls(**{name: value for name, value in fields.items() if name in known})


def kv_cache_specs(settings: Settings) -> dict[str, KVCacheSpec]:
    """The specs of all layers of the profile."""
    layers = PROFILES[settings.profile].layers(settings.mtp > 0)
    return {layer.name: _kv_cache_spec(layer) for layer in layers}


class TimedWorker(OffloadingWorker):
    """Copies nothing; a transfer ends when its bytes would have been copied.

    Args:
        block_bytes: bytes of one block of this rank.
        bytes_per_s: None: at once.
    """

    def __init__(self, block_bytes: int, bytes_per_s: float | None) -> None:
        self._block_bytes = block_bytes
        self._bytes_per_s = bytes_per_s
        # One queue per direction, as the real worker has a stream for each.
        self._free_at = {"load": 0.0, "store": 0.0}
        self._running: dict[int, tuple[float, TransferResult]] = {}

    def _submit(self, kind: str, job_id: int, gpu_spec: Any) -> bool:
        size = self._block_bytes * len(gpu_spec.block_ids)
        took = size / self._bytes_per_s if self._bytes_per_s else 0.0
        now = time.monotonic()
        self._free_at[kind] = done = max(now, self._free_at[kind]) + took
        # vLLM's counters divide by the time.
        result = TransferResult(job_id, True, size, max(took, 1e-9))
        self._running[job_id] = (done, result)
        return True

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._submit("store", job_id, src_spec)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
        return self._submit("load", job_id, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        now = time.monotonic()
        done = [job for job, (at, _) in self._running.items() if at <= now]
        return [self._running.pop(job)[1] for job in done]

    def wait(self, job_ids: set[int]) -> None:
        _sleep_until(
            max((self._running[j][0] for j in job_ids if j in self._running), default=0)
        )

    @property
    def next_done(self) -> float | None:
        """When the next transfer ends, on the monotonic clock."""
        return min((at for at, _ in self._running.values()), default=None)


def _sleep_until(at: float) -> None:
    if (left := at - time.monotonic()) > 0:
        time.sleep(left)


class SimulatedExecutor(Executor):
    """Every rank of the model, in the engine's own process."""

    def _init_executor(self) -> None:
        self._settings = Settings.from_environment()
        self._ranks = self.parallel_config.world_size
        self._connectors: list[Any] = []
        self._workers: list[TimedWorker] = []
        self._prompts: dict[str, int] = {}
        self._sampled: list[str] = []

    # --- the caches ---

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [kv_cache_specs(self._settings) for _ in range(self._ranks)]

    def determine_available_memory(self) -> list[int]:
        return [self._settings.gpu_bytes] * self._ranks

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[PROFILES[self._settings.profile].layout]] * self._ranks

    def set_kv_cache_layout(self, *args: Any, **kwargs: Any) -> None:
        return

    def compile_or_warm_up_model(self) -> None:
        return

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        check_groups(self._settings, kv_cache_configs[0].kv_cache_groups)
        config = kv_cache_configs[0]
        block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
        if _separate_tensors(config):
            block_bytes = sum(t.size for t in config.kv_cache_tensors)
            block_bytes //= config.num_blocks
        if self.vllm_config.kv_transfer_config is not None:
            self._connect(kv_cache_configs, block_bytes)
        self._report(config, block_bytes)

    def _connect(self, kv_cache_configs: list[Any], block_bytes: int) -> None:
        """Make the real worker-role connector of each rank, but for its byte copy."""
        for rank, kv_cache_config in enumerate(kv_cache_configs):
            own = copy.deepcopy(self.vllm_config)
            own.parallel_config.rank = rank
            with set_current_vllm_config(own):
                connector = KVConnectorFactory.create_connector(
                    own, KVConnectorRole.WORKER, kv_cache_config
                )
            worker = TimedWorker(block_bytes, self._settings.host_bytes_per_s)
            # In place of register_kv_caches, which would wrap real tensors.
            connector.connector_worker.worker = worker
            self._connectors.append(connector)
            self._workers.append(worker)

    def _report(self, config: Any, block_bytes: int) -> None:
        """Tell the parent process what came out."""
        groups = [
            asdict(group) | {"tail_blocks": group.tail_blocks if group.window else None}
            for group in map(_group, config.kv_cache_groups)
        ]
        host_blocks = 0
        if self._connectors:
            spec = self._connectors[0].connector_worker.spec
            known = hasattr(spec, "num_chunks")
            host_blocks = spec.num_chunks if known else spec.num_blocks
        facts = {
            "gpu_blocks": config.num_blocks,
            "host_blocks": host_blocks,
            "block_bytes": block_bytes,
            "groups": groups,
        }
        Path(self._settings.report).write_text(json.dumps(facts), encoding="utf-8")

    # --- a step ---

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        for connector in self._connectors:
            # Each process has a copy of its own, and takes things out of it.
            own = copy.deepcopy(metadata) if self._ranks > 1 else metadata
            connector.handle_preemptions(own)
            connector.bind_connector_metadata(own)
            connector.start_load_kv(None)
        began = time.monotonic()
        self._sampled = self._compute(scheduler_output)
        _sleep_until(began + self._duration(scheduler_output))
        outputs = [
            self._output(scheduler_output, connector)
            for connector in self._connectors or [None]
        ]
        output = outputs[0]
        if len(outputs) > 1:
            output = self.kv_output_aggregator.aggregate(outputs)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def _output(self, scheduled: Any, connector: Any) -> ModelRunnerOutput:
        """What one rank reports of a step."""
        transfers = None
        if connector is not None:
            connector.wait_for_save()
            sent, received = connector.get_finished(scheduled.finished_req_ids)
            transfers = KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[TOKEN] if i in self._sampled else [] for i in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transfers,
        )

    def _compute(self, scheduled: Any) -> list[str]:
        """The requests that sample a token: those whose tokens are all computed."""
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        computed, known = {}, {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
            known[new.req_id] = len(new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        for request_id, num_computed, num_output in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            computed[request_id] = num_computed
            known[request_id] = self._prompts[request_id] + num_output
        drafts = scheduled.scheduled_spec_decode_tokens
        return [
            request_id
            for request_id, count in scheduled.num_scheduled_tokens.items()
            if computed[request_id] + count - len(drafts.get(request_id, ()))
            >= known[request_id]
        ]

    def _duration(self, scheduled: Any) -> float:
        """Seconds that the step would have taken."""
        settings = self._settings
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            # A request waits for its load. Not for longer: another may come.
            due = [w.next_done for w in self._workers if w.next_done is not None]
            wait = min(due) - time.monotonic() if due else 0.0
            return min(max(wait, 0.0), _MAX_NAP_S)
        seconds = settings.decode_step_s if self._sampled else 0.0
        if settings.prefill_tokens_per_s:
            seconds += tokens / settings.prefill_tokens_per_s
        return seconds

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        raise NotImplementedError("each step's output comes with execute_model")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if not self._settings.mtp or not self._sampled:
            return None
        drafts = [[DRAFT] * self._settings.mtp for _ in self._sampled]
        return DraftTokenIds(list(self._sampled), drafts)

    # --- the rest ---

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return [None] * self._ranks

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
    ) -> Any:
        results = [None] * self._ranks
        if not non_block:
            return results
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        return False

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return


def _separate_tensors(config: Any) -> bool:
    """Whether each KVCacheTensor is memory of its own.

    From 0.29 on each describes a place in the same allocation, before only those with
    a `block_stride` do (CPUOffloadingSpec.__init__ in vllm/v1/kv_offload/cpu/spec.py).
    """
    tensor = config.kv_cache_tensors[0]
    return hasattr(tensor, "shared_by") and not tensor.block_stride


def _group(group: Any) -> Group:
    """A group of vLLM's in this project's words."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    window = getattr(spec, "sliding_window", None)
    kind = "full" if window is None else "swa"
    return Group(kind, spec.block_size, window, group.is_eagle_group)


def check_groups(settings: Settings, groups: list[Any]) -> None:
    """The engine is the one that the profile names; not so would go unnoticed.

    How many groups there are of a kind, and which is flagged as the drafter's, is the
    release's affair.

    Raises:
        ValueError: vLLM made other groups of the layers.
    """
    made = {(g.kind, g.block, g.window) for g in map(_group, groups)}
    geometry = GEOMETRIES[PROFILES[settings.profile].geometry]
    wanted = {(g.kind, g.block, g.window) for g in geometry.groups}
    if made != wanted:
        raise ValueError(f"{settings.profile}: groups {made}, expected {wanted}")
