# SPDX-License-Identifier: Apache-2.0
"""One of vLLM's engines with a tiny model, a small GPU cache and a host tier."""

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from . import ledger, weights
from .contents import Contents, Place
from .drafter import Drafts
from .ledger import Restored
from .models import VOCABULARY, Model

ANSWER = 12
# The host tier: any check's prompts fit but those that are to overflow it.
CHUNKS = 320


@dataclass(frozen=True)
class Answer:
    """All that a model says: what wrong KV would change."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = field(repr=False)
    drafts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Served:
    """An answer, and where the prompt's KV came from.

    ``cached`` counts the tokens that were not computed, ``restored`` the blocks that
    came from the host. ``contents`` are digests of the prompt's KV by group and place,
    ``at`` the places of the restored blocks.
    """

    answer: Answer
    cached: int
    restored: list[Restored] = field(repr=False)
    contents: dict[Place, bytes] = field(repr=False)
    at: set[Place] = field(repr=False)

    @property
    def loaded(self) -> int:
        """The bytes that came from the host."""
        return sum(block.size for block in self.restored)


class Engine:
    """The engine and what is observed of it; requests run one at a time."""

    def __init__(self, model: Model, factor: int):
        self.model, self.factor = model, factor
        self._folder = tempfile.TemporaryDirectory()
        config = Path(self._folder.name) / "config.json"
        config.write_text(json.dumps(model.config))
        speculative = {"method": "mtp", "num_speculative_tokens": model.drafts}
        self.llm = LLM(
            self._folder.name,
            skip_tokenizer_init=True,
            load_format=weights.FORMAT,
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=4,
            block_size=model.block,
            kv_cache_memory_bytes=model.gpu_bytes,
            enable_prefix_caching=True,
            disable_hybrid_kv_cache_manager=False,
            async_scheduling=False,
            speculative_config=speculative if model.drafts else None,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "RecordingSpec",
                    "spec_module_path": "e2e.ledger",
                    "cpu_bytes_to_use": 1,
                    "chunks": CHUNKS,
                    "blocks_per_chunk": factor,
                    # vLLM's default, and the other: answers are stored as well.
                    "offload_prompt_only": factor == 1,
                },
            },
        )
        config = self.llm.llm_engine.vllm_config
        self.ledger = ledger.LEDGERS[config.kv_transfer_config.engine_id]
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        layers = config.compilation_config.static_forward_context
        self.contents = Contents(core.scheduler, layers)
        self.drafts: Drafts | None = None
        if model.drafts:
            self.drafts = Drafts(core.model_executor.driver_worker.model_runner.drafter)

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Random tokens, the same for the same seed; ``tokens`` times the scale."""
        draw = random.Random(seed)
        return [draw.randrange(VOCABULARY) for _ in range(tokens * self.model.scale)]

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of full attention's."""
        return self.model.block * self.factor

    @property
    def peek(self) -> int:
        """Tokens behind a hit that must be stored for the drafter."""
        blocks = [g.kv_cache_spec.block_size for g in self.groups if g.is_eagle_group]
        return max(blocks, default=0) * self.factor

    @property
    def groups(self) -> list:
        """vLLM's KV cache groups."""
        return self.scheduler.kv_cache_config.kv_cache_groups

    def close(self) -> None:
        """Let go of everything, for the next engine in this process."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.scheduler, self.drafts, self.contents
        cleanup_dist_env_and_memory()
        self._folder.cleanup()

    def empty_gpu(self) -> None:
        """Only the host keeps what it has."""
        assert self.llm.reset_prefix_cache()

    def empty(self) -> None:
        """Both tiers are as in a new engine."""
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.ledger.clear()

    def serve(
        self,
        tokens: Sequence[int],
        *,
        answer: int = ANSWER,
        known: Sequence[int] | None = None,
    ) -> Served:
        """Generate; ``known``: the text from which drafts are taken."""
        if self.drafts:
            self.drafts.start(known)
        self.contents.forget()
        self.ledger.take_restored()
        (output,) = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(tokens))],
            SamplingParams(
                temperature=0, max_tokens=answer, ignore_eos=True, logprobs=3,
                detokenize=False,
            ),
            use_tqdm=False,
        )  # fmt: skip
        said = output.outputs[0]
        found = tuple(said.token_ids)
        restored = self.ledger.take_restored()
        # No block is in two groups.
        blocks = {each.block for each in restored}
        return Served(
            Answer(
                found,
                tuple(
                    tuple((token, each.logprob) for token, each in position.items())
                    for position in said.logprobs
                ),
                tuple(self.drafts.proposed) if self.drafts else (),
            ),
            output.num_cached_tokens,
            restored,
            self.contents.digests,
            {place for place, block in self.contents.blocks.items() if block in blocks},
        )

    def cold(self, tokens: Sequence[int], **options) -> Served:
        """The same when nothing is cached anywhere."""
        self.empty()
        served = self.serve(tokens, **options)
        assert (served.cached, served.loaded) == (0, 0)
        return served
