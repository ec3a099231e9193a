# SPDX-License-Identifier: Apache-2.0
"""The simulated server's parts that need vLLM but no server."""

import dataclasses
import sys
import time
from pathlib import Path

import pytest

from . import release_adapter
from .geometry import GEOMETRIES

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from vllm.v1.kv_cache_interface import FullAttentionSpec

from simulated_server import executor
from simulated_server.profiles import PROFILES
from simulated_server.settings import Settings

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    def get_global_kv_cache_groups(config, specs):
        return get_kv_cache_groups(config, specs[0])


def groups_of(name: str, mtp: int) -> list:
    """What vLLM makes of a profile's layers."""
    profile = PROFILES[name]
    geometry = GEOMETRIES[profile.geometry]
    if not mtp:
        geometry = geometry.without_eagle("none")
    config = release_adapter.vllm_config_of(
        geometry, None, max_num_batched_tokens=8192, max_num_seqs=1,
        async_scheduling=False, workers=1, extra_config={"cpu_bytes_to_use": 1},
    )  # fmt: skip
    config.cache_config.block_size = profile.block_size
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = profile.layout
    specs = executor.kv_cache_specs(Settings(name, mtp, 1, "unused"))
    return get_global_kv_cache_groups(config, [specs])


@pytest.mark.parametrize("mtp", [0, 1, 2])
@pytest.mark.parametrize("name", PROFILES)
def test_vllm_makes_the_groups_that_a_profile_names(name: str, mtp: int) -> None:
    groups = groups_of(name, mtp)
    executor.check_groups(Settings(name, mtp, 1, "unused"), groups)
    flagged = [group for group in groups if group.is_eagle_group]
    # Where no spec says that it drafts vLLM knows only DeepSeek-V4's drafter.
    says = any(f.name == "is_draft" for f in dataclasses.fields(FullAttentionSpec))
    knows = name == "deepseek-v4-flash" or says
    assert len(flagged) == bool(mtp and knows)
    if flagged:
        drafter = PROFILES[name].layers(True)[-1].name
        assert drafter in flagged[0].layer_names


def test_other_groups_than_the_profiles_are_refused() -> None:
    groups = groups_of("gemma", 0)
    with pytest.raises(ValueError, match="gpt-oss: groups"):
        executor.check_groups(Settings("gpt-oss", 0, 1, "unused"), groups)


class Blocks:
    """As vLLM describes the blocks of a transfer."""

    def __init__(self, count: int) -> None:
        self.block_ids = list(range(count))


def test_transfers_take_as_long_as_their_bytes() -> None:
    worker = executor.TimedWorker(block_bytes=1000, bytes_per_s=100_000)
    began = time.monotonic()
    assert worker.submit_load(1, None, Blocks(10))
    assert worker.submit_load(2, None, Blocks(10))
    assert worker.submit_store(3, Blocks(5), None)
    assert worker.get_finished() == []
    worker.wait({3})
    # Stores do not wait for loads.
    assert [r.job_id for r in worker.get_finished()] == [3]
    worker.wait({2})
    assert 0.2 <= time.monotonic() - began < 1
    done = worker.get_finished()
    assert [(r.job_id, r.transfer_size) for r in done] == [(1, 10_000), (2, 10_000)]
    assert done[0].transfer_time == pytest.approx(0.1)


def test_without_a_time_model_transfers_are_done_at_once() -> None:
    worker = executor.TimedWorker(block_bytes=1000, bytes_per_s=None)
    worker.submit_load(1, None, Blocks(10))
    (done,) = worker.get_finished()
    # vLLM divides bytes by seconds.
    assert done.success and done.transfer_time > 0
