# SPDX-License-Identifier: Apache-2.0
"""The sweep and the fuzzer notice a defect that is planted."""

import itertools

from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from parity import fuzz, release_adapter, scenarios, sweep
from parity.geometry import DSV4, GEMMA_NO_EAGLE, SMALL, SMALL_NO_EAGLE
from parity.history import Setup


def lose_last_chunk(monkeypatch, group: int, sparse_only: bool = False) -> None:
    """Plant a defect: the host never takes the last chunk of a group."""
    real = CPUOffloadingManager.prepare_store
    real_engine = Setup.engine
    sound = set()

    def engine(self, **more):
        built = real_engine(self, **more)
        if sparse_only and self.retention is None:
            sound.add(built.parts.manager)
        return built

    def losing(self, keys, *args, **kwargs):
        keys = list(keys)
        of_group = [key for key in keys if get_offload_group_idx(key) == group]
        lost = [] if self in sound else of_group[-1:]
        return real(self, [k for k in keys if k not in lost], *args, **kwargs)

    monkeypatch.setattr(CPUOffloadingManager, "prepare_store", losing)
    monkeypatch.setattr(Setup, "engine", engine)


def short(geometry, lengths, retentions) -> list[tuple]:
    return [
        (record["retention"], record["length"])
        for record in sweep.measure(geometry, lengths, retentions)
        if record["host"] < record["want_host"] or record["gpu"] < record["want_gpu"]
    ]


def test_without_a_drafter_nothing_is_short():
    assert short(GEMMA_NO_EAGLE, [478, 512, 513, 4110], [None, 0, 4096]) == []


def test_a_lost_window_chunk_is_short_in_dense_and_sparse(monkeypatch):
    lose_last_chunk(monkeypatch, 1)
    assert short(GEMMA_NO_EAGLE, [513], [None, 0]) == [(None, 513), (0, 513)]


def test_lengths_cover_two_alignment_blocks_and_the_rest():
    lengths = sweep.lengths(DSV4)
    for centre in sweep.CENTRES:
        assert set(range(centre - 256, centre + 256)) <= set(lengths)
    assert len(lengths) >= 3 * 512 + sweep.RANDOM_LENGTHS
    assert max(lengths) <= 50_000


def test_a_sample_is_of_its_size_and_the_same_again():
    for sample in (1, 16, 60):
        lengths = sweep.lengths(DSV4, sample, seed=3)
        assert len(lengths) == sample
        assert lengths == sweep.lengths(DSV4, sample, seed=3)
        assert set(lengths) <= set(sweep.lengths(DSV4, seed=3))


def test_scenarios_find_a_lost_chunk(monkeypatch):
    case = scenarios.replay(513), SMALL_NO_EAGLE, (0,)
    assert list(scenarios.findings(*case)) == []
    lose_last_chunk(monkeypatch, 1, sparse_only=True)
    found = list(scenarios.findings(*case))
    assert [(f.tier, f.send, f.want) for f in found] == [("host", 1, 512)]


def test_fuzz_finds_a_lost_chunk_and_shrinks_it(monkeypatch):
    lose_last_chunk(monkeypatch, 1, sparse_only=True)
    cases = (fuzz.make("hits", seed, (SMALL_NO_EAGLE,)) for seed in itertools.count())
    host = (c for c in cases if c.setup.tier == "host" and c.setup.retention == 0)
    failing = next(case for case in itertools.islice(host, 50) if fuzz.check(case))
    small = fuzz.shrink(failing)
    assert fuzz.check(small)
    assert len(small.history) <= 3


def test_a_seed_is_a_history():
    for mode in fuzz.MODES:
        one, again = (fuzz.make(mode, 5).describe() for _ in range(2))
        assert one == again
        assert one != fuzz.make(mode, 6).describe()


def test_engines_are_what_they_were_asked_to_be():
    parts = Setup(SMALL, 64).engine().parts
    assert parts.hash_block == SMALL.hash_block
    assert release_adapter.version().count(".") == 2
