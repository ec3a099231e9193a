# SPDX-License-Identifier: Apache-2.0
"""An engine that computes nothing: vLLM's scheduling with transfers in no time."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import release_adapter
from .geometry import Geometry
from .ledger import Ledger, LedgerWorker

# Steps in a row in which nothing is computed and no copy ends: a hang, reported as one.
_MAX_IDLE_STEPS = 100


@dataclass
class Result:
    """What one request did.

    Attributes:
        num_local: prompt tokens hit in the GPU prefix cache.
        num_external: prompt tokens loaded from the host tier.
        stored_chunks: chunks the host tier gained while the request ran alone.
        output: tokens generated.
    """

    num_local: int
    num_external: int
    stored_chunks: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def num_hit(self) -> int:
        """Prompt tokens that were not computed."""
        return self.num_local + self.num_external


class AcknowledgingWorker(release_adapter.OffloadingWorker):
    """Copies nothing and reports each transfer as done at once."""

    def __init__(self) -> None:
        self._finished: list[release_adapter.TransferResult] = []

    def _submit(self, job_id: int) -> bool:
        self._finished.append(release_adapter.TransferResult(job_id, success=True))
        return True

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._submit(job_id)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
        return self._submit(job_id)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return


class Engine:
    """vLLM's scheduler, KV cache manager and offloading connector on one geometry.

    Args:
        geometry: the model's KV cache groups.
        retention: None (dense), 0 or a number of tokens.
        blocks_per_chunk: GPU blocks per host chunk.
        gpu_blocks: GPU block pool, in blocks shared by all groups.
        host_chunks: capacity of the host tier in chunks.
        max_num_batched_tokens: the prefill budget of a step.
        max_num_seqs: requests that run at once.
        async_scheduling: schedule a step before the previous one's output is known.
        offload_prompt_only: keep decoded tokens out of the host tier.
        workers: ranks, each with a copy of the cache of its own; at least as many as
            the geometry is spread over.
        ledger: keep the books of what is where (see ledger.py), and check them.
        transfer_delay: steps that the next copy takes; needs the ledger.
        accept: how many of the next drafts are right; None: none is. Drafts are made
            for the geometries with a drafter.
        force: build what the release serves wrongly, too.

    Raises:
        ValueError: vLLM refuses the combination; see `release_adapter.refusal`.
    """

    def __init__(
        self,
        geometry: Geometry,
        retention: int | None = None,
        blocks_per_chunk: int = 1,
        gpu_blocks: int = 200_000,
        host_chunks: int = 200_000,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 16,
        async_scheduling: bool = False,
        offload_prompt_only: bool = False,
        workers: int = 1,
        ledger: bool = False,
        transfer_delay: Callable[[], int] | None = None,
        accept: Callable[[], int] | None = None,
        force: bool = False,
    ) -> None:
        workers = max(workers, geometry.dcp)
        self.geometry = geometry
        self.retention = retention
        self.async_scheduling = async_scheduling
        self.ledger: Ledger | None = None
        self.ranks: list[LedgerWorker] = []
        if ledger:
            self.ledger = Ledger(geometry.groups, geometry.hash_block, blocks_per_chunk)
            self.ranks = [
                LedgerWorker(self.ledger, transfer_delay) for _ in range(workers)
            ]
        elif transfer_delay is not None:
            raise ValueError("transfer_delay needs ledger=True")
        self.parts = release_adapter.build(
            geometry,
            retention=retention,
            blocks_per_chunk=blocks_per_chunk,
            gpu_blocks=gpu_blocks,
            host_chunks=host_chunks,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            async_scheduling=async_scheduling,
            offload_prompt_only=offload_prompt_only,
            workers=workers,
            force=force,
            worker_factory=lambda rank: (
                self.ranks[rank] if ledger else AcknowledgingWorker()
            ),
        )
        if self.ledger is not None:
            assert self.parts.hash_block == self.ledger.size
            keys = self.ledger.chunk_keys
            self.parts.watch_chunks(
                lambda group, block_hash, chunk: keys.update(
                    {chunk: (group, block_hash)}
                )
            )
        self.results: dict[str, Result] = {}
        self.drafts_accepted = 0
        self._accept = accept
        self._drafts: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._prompt_lengths: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._unapplied: list[tuple] = []
        self._received: dict[str, set[int]] = {}
        self._next_id = 0

    # --- requests ---

    def submit(
        self, tokens: Sequence[int], max_tokens: int = 1, hashes: Any = None
    ) -> str:
        """Hand a request to the scheduler without stepping; returns its id."""
        request_id = f"r{self._next_id}"
        self._next_id += 1
        request = self.parts.request(request_id, tokens, max_tokens, hashes)
        self._tokens[request_id] = list(tokens)
        self._prompt_lengths[request_id] = len(tokens)
        if self.ledger is not None:
            self._requests[request_id] = request
            self.ledger.add_request(request_id, self._tokens[request_id])
            self.ledger.name_hashes(request_id, request.block_hashes)
        self.parts.scheduler.add_request(request)
        return request_id

    def run(
        self, tokens: Sequence[int], max_tokens: int = 1, hashes: Any = None
    ) -> Result:
        """Run one request to its end, with every transfer done.

        `hashes`: the prompt's block hashes, where many requests share a prompt.
        """
        before = self.num_host_chunks
        request_id = self.submit(tokens, max_tokens, hashes)
        self.drain()
        result = self.results[request_id]
        result.stored_chunks = self.num_host_chunks - before
        return result

    def run_all(
        self, prompts: Iterable[Sequence[int]], max_tokens: int = 1
    ) -> list[Result]:
        """Run requests at the same time; results in the order given."""
        ids = [self.submit(tokens, max_tokens) for tokens in prompts]
        self.drain()
        return [self.results[request_id] for request_id in ids]

    def drain(self) -> None:
        """Step until no request and no transfer is left.

        Raises:
            RuntimeError: the engine does not come to rest.
        """
        idle = 0
        while self.busy:
            idle = 0 if self.step() else idle + 1
            if idle > _MAX_IDLE_STEPS:
                raise RuntimeError(f"nothing happens in {idle} steps, yet it is busy")

    @property
    def busy(self) -> bool:
        """Whether a request or a transfer is unfinished."""
        return bool(
            self._unapplied
            or self.parts.scheduler.has_requests()
            or self.parts.connector.has_pending_push_work()
        )

    # --- one step ---

    def step(self) -> bool:
        """One engine step: schedule, transfer, "compute", update.

        Returns whether anything was computed or copied.
        """
        scheduled = self.parts.scheduler.schedule()
        if self.ledger is not None:
            self.ledger.step += 1
            jobs = scheduled.kv_connector_metadata
            for job_id, job in jobs.load_jobs.items():
                self.ledger.add_job(job_id, job.req_id, job.src_spec.block_ids.tolist())
            for job_id, job in jobs.store_jobs.items():
                self.ledger.add_job(job_id, job.req_id, job.dst_spec.block_ids.tolist())
        metadata = scheduled.kv_connector_metadata
        copies = self.parts.block_copies(scheduled)
        for number, worker in enumerate(self.parts.workers):
            # Each process has a copy of its own, and takes things out of it.
            own = metadata if len(self.parts.workers) == 1 else copy.deepcopy(metadata)
            worker.handle_preemptions(own)
            if self.ranks:
                self.ranks[number].copy_blocks(copies)
            worker.bind_connector_metadata(own)
            worker.start_load_kv(None)
        sampled = self._execute(scheduled)
        received, worker_meta = self._finish_transfers(scheduled)
        output = self.parts.output(sampled, received, worker_meta)
        self._unapplied.append((scheduled, output))
        # With asynchronous scheduling the scheduler hears of a step one step late.
        keep = int(self.async_scheduling and bool(scheduled.num_scheduled_tokens))
        while len(self._unapplied) > keep:
            self._update(*self._unapplied.pop(0))
        if self._drafts and not self.async_scheduling:
            self.parts.propose(self._drafts)
        if self.ledger is not None:
            self._check_step()
        return bool(scheduled.num_scheduled_tokens or worker_meta is not None)

    def _finish_transfers(self, scheduled) -> tuple[set[str], Any]:
        """Requests whose load every rank has done, and what the ranks report."""
        merged = None
        for rank, worker in enumerate(self.parts.workers):
            worker.wait_for_save()
            for request_id in worker.get_finished(scheduled.finished_req_ids)[1]:
                self._received.setdefault(request_id, set()).add(rank)
            meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            if meta is not None:
                merged = meta if merged is None else merged.aggregate(meta)
        everywhere = {
            request_id
            for request_id, ranks in self._received.items()
            if len(ranks) == len(self.parts.workers)
        }
        for request_id in everywhere:
            del self._received[request_id]
        return everywhere, merged

    def _execute(self, scheduled) -> dict[str, list[int]]:
        """Compute nothing; sample for each request whose prompt is complete.

        Drafts that continue the text are accepted, and one token more is sampled.
        """
        resumed = self._take_schedule(scheduled)
        sampled: dict[str, list[int]] = {}
        passes = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            drafts = self._scheduled_drafts(request_id, scheduled)
            tokens = self._tokens[request_id]
            start = self._computed[request_id]
            end = start + count
            valid = end - len(drafts)
            new = sampled[request_id] = []
            if valid >= len(tokens):
                new.append(_next_token(tokens))
                for draft in drafts:
                    if draft != new[-1]:
                        break
                    new.append(_next_token(tokens + new))
                valid += len(new) - 1
                self.drafts_accepted += len(new) - 1
                tokens.extend(new)
            self._computed[request_id] = valid
            passes.append((request_id, start, valid, end, len(drafts)))
        for rank in self.ranks:
            # A layer writes what all requests compute before any of them reads.
            for request_id, start, _, end, _ in passes:
                tables = self._tables[request_id]
                rank.carry_states(request_id, tables, start, end, request_id in resumed)
            for request_id, *positions in passes:
                rank.compute(request_id, self._tables[request_id], *positions)
            for request_id, start, *_ in passes:
                rank.check_readable(
                    request_id, self._tables[request_id], start, request_id in resumed
                )
        self._draft(sampled, self.parts.num_drafts(scheduled))
        return sampled

    def _draft(self, sampled: dict[str, list[int]], count: int) -> None:
        """Propose `count` tokens per request, of which `accept` says how many fit."""
        self._drafts = {}
        if not self.geometry.eagle:
            return
        for request_id, new in sampled.items():
            right = self._accept() if self._accept and new and count else 0
            drafts = self._drafts[request_id] = []
            for i in range(count if new else 0):
                token = _next_token(self._tokens[request_id] + drafts)
                drafts.append(token if i < right else (token + 1) % 50_000)

    def _scheduled_drafts(self, request_id: str, scheduled) -> list[int]:
        """The drafts that a step verifies."""
        drafts = list(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
        if self.async_scheduling:
            # The scheduler has placeholders, the worker what it proposed.
            own = self._drafts.get(request_id, [])[: len(drafts)]
            drafts[: len(own)] = own
        return drafts

    def _take_schedule(self, scheduled) -> set[str]:
        """Follow block tables and computed positions as a worker does.

        Only the worker knows how far a running request is: with asynchronous
        scheduling the scheduler still counts drafts that were not accepted.

        Returns the requests that start or resume in this step.
        """
        resumed = set()
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            resumed.add(new.req_id)
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed, new_blocks, decoded in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.new_block_ids,
            cached.num_output_tokens,
            strict=True,
        ):
            if request_id in cached.resumed_req_ids:
                # What a forced preemption threw away is decoded again.
                del self._tokens[request_id][
                    self._prompt_lengths[request_id] + decoded :
                ]
                self._computed[request_id] = computed
                self._tables[request_id] = [list(ids) for ids in new_blocks]
                resumed.add(request_id)
            elif new_blocks is not None:
                for table, ids in zip(
                    self._tables[request_id], new_blocks, strict=True
                ):
                    table.extend(ids)
        return resumed

    def _check_step(self) -> None:
        for request_id, request in list(self._requests.items()):
            self.ledger.name_hashes(request_id, request.block_hashes)
            if request_id not in self.parts.scheduler.requests:
                del self._requests[request_id]
        for rank in self.ranks:
            rank.check_cached(self.parts.cached_blocks())

    def _update(self, scheduled, output) -> None:
        outputs = self.parts.scheduler.update_from_output(scheduled, output)
        for per_client in outputs.values():
            for item in per_client.outputs:
                stats = item.prefill_stats
                if stats is not None:
                    self.results[item.request_id] = Result(
                        num_local=stats.num_local_cached_tokens,
                        num_external=stats.num_external_cached_tokens,
                    )
                if item.new_token_ids:
                    self.results[item.request_id].output.extend(item.new_token_ids)

    # --- events ---

    def abort(self, request_id: str) -> None:
        """The client goes away; nothing happens if the request is done."""
        self.parts.abort(request_id)

    def reset_gpu(self, running: bool = False) -> None:
        """Empty the GPU prefix cache.

        With `running` requests may be running, which are preempted; the cache stays
        as it is while one of them waits for a load.

        Raises:
            RuntimeError: some block is still in use, without `running`.
        """
        while self._unapplied:
            self._update(*self._unapplied.pop(0))
        if self.parts.reset_gpu(running) or running:
            return
        raise RuntimeError("the GPU cache cannot be emptied: blocks are in use")

    def reset_host(self) -> None:
        """Empty the host tier; requests may be running."""
        self.parts.connector.reset_cache()

    def set_host(self, *, lookup: bool = True, store: bool = True) -> None:
        """Whether the host tier finds what it has and takes what it is given.

        With both off the connector stays in place, as its presence changes block
        hashes and more, and the GPU cache is on its own.
        """
        self.parts.set_host(lookup=lookup, store=store)

    def check_at_rest(self) -> None:
        """With nothing left to do nothing may be held: adds to the findings."""
        for leak in self.parts.leaks():
            self.ledger.find(f"at rest {leak}")

    # --- what is stored ---

    @property
    def num_host_chunks(self) -> int:
        """Chunks in the host tier."""
        return self.parts.num_host_chunks

    def host_keys(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(group, chunk index) of each chunk of a prompt that the host holds."""
        hashes = self.parts.block_hashes(tokens)
        stored = {(group, key) for group, key, _, _ in self.parts.host_entries()}
        chunks = []
        for index, group in enumerate(self.geometry.groups):
            chunk = group.block * self.parts.blocks_per_chunk
            for i in range(len(tokens) // chunk):
                if (index, self.parts.chunk_hash(hashes, index, i)) in stored:
                    chunks.append((index, i))
        return chunks

    def cached_keys(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(group, block index) of each block of a prompt that the GPU cache serves."""
        hashes = self.parts.block_hashes(tokens)
        cached = {(group, key) for _, group, key in self.parts.cached_blocks()}
        return [
            (index, i)
            for index, group in enumerate(self.geometry.groups)
            for i in range(len(tokens) // group.block)
            if (index, bytes(self.parts.last_hash(hashes, group.block, i))) in cached
        ]


def _next_token(tokens: Sequence[int]) -> int:
    """A deterministic continuation: the same prompt always decodes the same."""
    return (tokens[-1] * 31 + len(tokens) * 17 + 7) % 50_000
