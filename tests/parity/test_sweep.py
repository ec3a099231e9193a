# SPDX-License-Identifier: Apache-2.0
"""The sweep notices a defect that is planted."""

from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from parity import release_adapter, sweep
from parity.geometry import DSV4, GEMMA_NO_EAGLE, SMALL
from parity.history import Setup


def lose_last_chunk(monkeypatch, group: int) -> None:
    """Plant a defect: the host never takes the last chunk of a group."""
    real = CPUOffloadingManager.prepare_store

    def losing(self, keys, *args, **kwargs):
        keys = list(keys)
        lost = [key for key in keys if get_offload_group_idx(key) == group][-1:]
        return real(self, [k for k in keys if k not in lost], *args, **kwargs)

    monkeypatch.setattr(CPUOffloadingManager, "prepare_store", losing)


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


def test_engines_are_what_they_were_asked_to_be():
    parts = Setup(SMALL, 64).engine().parts
    assert parts.hash_block == SMALL.hash_block
    assert release_adapter.version().count(".") == 2
