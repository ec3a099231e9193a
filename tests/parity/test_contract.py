# SPDX-License-Identifier: Apache-2.0
"""Each law says what it should, and finds a defect that is planted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from parity import contract, fuzz, limits, peer, regressions, release_adapter, scenarios
from parity.engine import Engine
from parity.geometry import PURE_SWA, SMALL, SMALL_NO_EAGLE, UNFLAGGED
from parity.history import MODES, Case, Sent, Setup, tokens_of
from parity.laws import Demand, Laws, positions, tail, unpeeked
from parity.stock import below_stock

# --- what the laws say ---


def sent(parts, hit: int = 0, output: tuple[int, ...] = (7,)) -> Sent:
    return Sent(tokens_of(parts), hit, 0, list(output))


@pytest.mark.parametrize(
    ("tokens", "law"),
    [
        (((1, 100),), "L1"),
        (((1, 100), (9, 50)), "L2"),
        (((1, 90), (9, 50)), "L4"),
        (((1, 40), (9, 50)), None),
        (((9, 50),), None),
    ],
)
def test_which_law_speaks(tokens, law):
    laws = Laws(Setup(SMALL, 0, "host"))
    laws.add(sent(((1, 100),)))
    found = laws.demand(tokens_of(tokens), 96)
    assert (found and found.law) == law


def test_the_second_sibling_makes_a_junction_and_the_third_is_owed_it():
    laws = Laws(Setup(SMALL, 0, "host"))
    laws.add(sent(((1, 300),)))
    assert laws.demand(tokens_of(((1, 110), (2, 100))), 96) is None
    laws.add(sent(((1, 110), (2, 100))))
    third = tokens_of(((1, 110), (3, 100)))
    assert laws.demand(third, 101) == Demand("L3", 96)
    assert laws.demand(tokens_of(((1, 200), (3, 100))), 192) is None


def test_a_sibling_is_owed_no_peek_that_only_the_first_text_has():
    laws = Laws(Setup(SMALL, 0, "host"))
    laws.add(sent(((1, 300),)))
    laws.add(sent(((1, 100), (2, 100))))
    # It has the drafter's block up to 104 in common with the first one alone.
    assert laws.demand(tokens_of(((1, 110), (3, 100))), 96) == Demand("L3", 64)
    assert laws.demand(tokens_of(((1, 103), (3, 100))), 64) == Demand("L3", 64)


def test_a_boundary_with_no_peek_of_its_prompt():
    setup = Setup(SMALL, 0, "host")
    one = sent(((1, 200),))
    for tokens, output, ends in ((97, (), {96}), (103, (), {96}), (104, (), set())):
        earlier = sent(((1, tokens),), output=output)
        assert unpeeked(setup, one, [earlier]) == ends
    assert unpeeked(setup, one, [sent(((1, 90), (2, 8)))]) == set()
    assert unpeeked(setup, one, [sent(((1, 97),), output=tuple(range(9)))]) == set()
    assert unpeeked(Setup(SMALL_NO_EAGLE, 0), one, [sent(((1, 97),))]) == set()
    # B parts from A past a boundary, whose peek block they do not share.
    first = sent(((1, 300),))
    for parted, ends in ((95, set()), (96, {96}), (103, {96}), (104, set())):
        assert unpeeked(setup, one, [first, sent(((1, parted), (2, 90)))]) == ends
    # Who shares B's own peek block joins nothing.
    assert unpeeked(setup, sent(((1, 100), (2, 50))), [first, one]) == set()
    again = [first, sent(((1, 100), (2, 90)))]
    assert unpeeked(setup, sent(((1, 100), (2, 50))), again) == set()


def test_without_full_attention_nothing_shows_a_junction():
    laws = Laws(Setup(PURE_SWA, 0, "gpu"))
    laws.add(sent(((1, 300),)))
    laws.add(sent(((1, 100), (2, 100))))
    assert laws.demand(tokens_of(((1, 100), (3, 100))), 96) is None


def test_an_edit_is_excused_where_nobody_computed_its_position():
    laws = Laws(Setup(SMALL_NO_EAGLE, 0, "host"))
    edited = tokens_of(((1, 330), (2, 20)))
    laws.add(sent(((1, 350),), hit=340))
    assert laws.demand(edited, 320) == Demand("L4", 320, excused=True)
    laws.add(sent(((1, 350),), hit=320))
    assert laws.demand(edited, 320) == Demand("L4", 320)


def test_an_edit_is_not_owed_on_the_host_at_an_interval_above_0():
    for tier, law in (("gpu", "L4"), ("host", None)):
        laws = Laws(Setup(SMALL_NO_EAGLE, 256, tier))
        laws.add(sent(((1, 350),)))
        found = laws.demand(tokens_of(((1, 330), (2, 20))), 320)
        assert (found and found.law) == law


def test_a_turn_is_owed_the_boundary_of_the_prompt():
    laws = Laws(Setup(SMALL_NO_EAGLE, 0, "host"))
    one = sent(((1, 100),), output=tuple(range(1, 81)))
    laws.add(one)
    assert laws.demand([*one.text, 5], 160) == Demand("L2", 96)
    eagle = Laws(Setup(SMALL, 0, "host"))
    eagle.add(one)
    assert eagle.demand([*one.text[:104], 5], 160) == Demand("L2", 96)
    assert eagle.demand([*one.text[:103], 5], 160) == Demand("L2", 64)
    # Where dense retention does not store the peek that was decoded.
    assert eagle.demand([*one.text[:104], 5], 160, 95) == Demand("L2", 64)


def test_a_turn_is_owed_no_peek_that_the_window_leaves_behind():
    # A chunk of two blocks is offered 32 tokens after its start, the window has 16.
    for chunk, tier, hit in ((1, "host", 64), (2, "host", 0), (2, "gpu", 64)):
        laws = Laws(Setup(SMALL, 0, tier, chunk))
        one = sent(((1, 79),), output=tuple(range(1, 81)))
        laws.add(one)
        assert laws.demand([*one.text, 5], 64) == Demand("L2", hit)
    # Of a prompt that completes it the peek block is stored in prefill.
    laws = Laws(Setup(SMALL, 0, "host", 2))
    one = sent(((1, 80),), output=tuple(range(1, 81)))
    laws.add(one)
    assert laws.demand([*one.text, 5], 64) == Demand("L2", 64)


def test_a_prompt_that_was_served_past_a_position_never_computed_its_tail():
    laws = Laws(Setup(SMALL_NO_EAGLE, 512, blocks_per_chunk=2))
    laws.add(Sent([0] * 129, 0, 0))
    served = Sent([0] * 125, 96, 0)
    laws.add(served)
    assert laws.demand([*served.tokens, 5], 64) == Demand("L2", 64, excused=True)
    assert laws.demand(served.tokens, 64) == Demand("L1", 64, excused=True)
    laws.add(Sent([0] * 125, 64, 0))
    assert laws.demand([*served.tokens, 5], 64) == Demand("L2", 64)


def test_who_repeats_decoded_text_parts_from_nothing_where_prompts_alone_are_kept():
    decoded, turn = [0] * 70, [7] + [0] * 70 + [1] * 57
    prompts_only = (("offload_prompt_only", True),)
    for options, demand in (((), Demand("L3", 64)), (prompts_only, None)):
        laws = Laws(Setup(SMALL_NO_EAGLE, 0, "host", options=options))
        laws.add(Sent([7], 0, 0, output=decoded))
        laws.add(Sent(turn, 0, 0))
        assert laws.demand([*turn[:71], 5], 64) == demand


def test_the_positions_of_a_prompt():
    setup = Setup(SMALL, 0, "host")
    assert positions(setup, Sent([0] * 355, 0, 0), [200]) == {
        288: {"edit"},
        320: {"extension", "resend"},
        352: {"turn"},
        192: {"junction"},
        160: {"junction"},
    }
    prompts_only = (("offload_prompt_only", True),)
    sparse = Setup(SMALL_NO_EAGLE, 256, "host", options=prompts_only)
    assert positions(sparse, Sent([0] * 352, 0, 0), []) == {
        352: {"extension"},
        320: {"resend"},
        256: {"segment"},
    }


def test_where_the_gpu_let_a_request_resume_the_host_keeps_a_position():
    both = Setup(SMALL, 256, "both")
    for local, resumed in ((128, {128: {"resumed"}}), (132, {}), (0, {})):
        assert positions(both, Sent([0] * 168, local, 0, local=local), []) == {
            160: {"extension", "resend", "turn"},
            **resumed,
        }


def test_a_tail_is_what_a_window_needs_and_the_peek_block():
    assert tail(Setup(SMALL, 0), 64) == {
        (1, 6), (1, 7), (2, 6), (2, 7), (2, 8), (3, 30), (3, 31),
        (4, 12), (4, 13), (4, 14), (4, 15),
    }  # fmt: skip
    assert tail(Setup(PURE_SWA, 0, blocks_per_chunk=2), 64) == {(0, 0), (0, 1), (0, 2)}


# --- cases ---


def test_a_case_is_what_its_json_says():
    for mode in MODES:
        for case in fuzz.sample(5, 3, (mode,)):
            again = Case.from_json(json.loads(json.dumps(case.to_json())))
            assert again == case
            assert again.digest == case.digest
    with pytest.raises(ValueError, match="no case"):
        Case.from_json({"name": "x"})


def test_a_seed_is_a_sample():
    assert fuzz.sample(8, 1) == fuzz.sample(8, 1)
    assert fuzz.sample(8, 1) != fuzz.sample(8, 2)


def test_a_regression_is_read_as_it_was_written(tmp_path):
    (case,) = fuzz.sample(1, 5)
    path = regressions.write("1.2.3", "L1", case, ["a word"], tmp_path)
    (again,) = regressions.read(tmp_path)
    assert again.digest == case.digest
    assert again.name == f"regression {path.stem}"
    assert list(tmp_path.iterdir()) == [path]


def _case(**more: Any) -> dict[str, Any]:
    send = {"kind": "send", "parts": [[1, 20]]}
    setup = {"geometry": "small-mtp", "retention": 0}
    return {"name": "x", "mode": "hits", "setup": setup, "history": [send]} | more


def _setup(**more: Any) -> dict[str, Any]:
    return _case(setup=_case()["setup"] | more)


def _event(**more: Any) -> dict[str, Any]:
    return _case(history=[*_case()["history"], _case()["history"][0] | more])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ([], "no case"),
        (_case(history="send"), "no case"),
        (_case(history=[3]), "no case"),
        (_case(history=[]), "history is empty"),
        (_case(mode="quick"), "no mode is named 'quick'"),
        (_case(delays="x"), "delays is 'x'"),
        (_setup(geometry="nope"), "no geometry is named 'nope'"),
        (_setup(tier="moon"), "no tier is named 'moon'"),
        (_setup(blocks_per_chunk=0), "blocks_per_chunk is 0"),
        (_setup(retention="x"), "retention is 'x'"),
        (_setup(retention=7), "retention is 7"),
        (_setup(options=[["gpu_block", 3]]), "no engine takes the option"),
        (_setup(options=[["gpu_blocks", 0]]), "gpu_blocks is 0"),
        (_event(kind="fly"), "no event is named 'fly'"),
        (_event(parts=[]), "no parts of a prompt"),
        (_event(parts=[[1, -4]]), "no parts of a prompt"),
        (_event(parts=[[1, 2, 3]]), "no parts of a prompt"),
        (_event(follows=1), "no earlier send is number 1"),
        (_event(max_tokens=0), "a number that is none"),
    ],
)
def test_a_file_that_cannot_be_played_is_refused_by_name(tmp_path, case, words):
    path = tmp_path / "mine.json"
    for text in ("[" * 100_000, '{"case": {"na', "null", json.dumps({"case": case})):
        path.write_text(text)
        with pytest.raises(
            regressions.Unusable, match=r"mine\.json.*remove it"
        ) as said:
            list(regressions.read(tmp_path))
        assert said.value.exit_code == 2
    assert words in str(said.value.format_message())
    path.write_text(json.dumps({"case": _case()}))
    assert len(list(regressions.read(tmp_path))) == 1


def test_half_a_regression_is_never_left(tmp_path, monkeypatch):
    (case,) = fuzz.sample(1, 5)
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space"))
    )
    with pytest.raises(OSError, match="no space"):
        regressions.write("1.2.3", "L1", case, ["a word"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_before_the_run(tmp_path):
    regressions.check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(
        regressions.Unusable, match=r"file .*exists.*: make it a folder"
    ):
        regressions.check_folder(tmp_path / "file")


def test_a_lost_peer_is_no_finding():
    class Peer:
        def ask(self, case: Case) -> None:
            raise peer.Lost("it ended")

    with pytest.raises(peer.Lost, match="it ended"):
        fuzz.Fuzz(30, 1, ("hits",), peer=Peer()).run(lambda failure: True)


# --- planted defects ---


def broken(case: Case, useful: bool = False) -> dict[str, list[str]]:
    """What the laws find, by law."""
    return {v.law: v.words for v in contract.judge(case, useful=useful) if v.words}


def fixed(name: str, retention: int = 0, tier: str = "host") -> Case:
    return next(
        case
        for case, _ in scenarios.fixed(SMALL_NO_EAGLE)
        if case.name == name
        and (case.setup.retention, case.setup.tier) == (retention, tier)
    )


@pytest.fixture
def sparse_engines(monkeypatch):
    """Change each engine with sparse retention as it is built."""

    def change(how) -> None:
        real = Setup.engine

        def engine(self, **more):
            built = real(self, **more)
            if self.retention is not None:
                how(built)
            return built

        contract.dense_run.cache_clear()
        monkeypatch.setattr(Setup, "engine", engine)

    return change


def losing(pick):
    """The host never takes the chunks that `pick` picks of group 1's."""

    def change(engine: Engine) -> None:
        manager = engine.parts.manager
        store = manager.prepare_store

        def prepare_store(keys, *args, **kwargs):
            keys = list(keys)
            lost = pick([key for key in keys if get_offload_group_idx(key) == 1])
            return store([k for k in keys if k not in lost], *args, **kwargs)

        manager.prepare_store = prepare_store

    return change


def test_l1_l2_and_l4_find_a_lost_chunk(sparse_engines):
    cases = {
        "L1": fixed("replay of 353"),
        "L2": fixed("353 extended by 32"),
        "L4": fixed("last 5 of 366 edited"),
    }
    for case in cases.values():
        assert not broken(case)
    sparse_engines(losing(lambda keys: keys[-1:]))
    for law, case in cases.items():
        assert "of 352" in broken(case)[law][0]


def test_l3_finds_a_lost_chunk(sparse_engines):
    case = fixed("4 siblings of 362 + 96, two kept", tier="both")
    assert "L3" not in broken(case)
    sparse_engines(losing(lambda keys: keys[:1]))
    assert "hits 0 of 352" in broken(case)["L3"][0]


def test_l5_finds_a_load_of_the_wrong_bytes(monkeypatch):
    (case, *_) = scenarios.crowds(SMALL_NO_EAGLE)
    real = Setup.engine

    def engine(self, **more):
        built = real(self, **more)
        built.ranks[0].spoil = lambda is_store, block, chunk: is_store
        return built

    monkeypatch.setattr(Setup, "engine", engine)
    assert any("does not hold" in words for words in broken(case)["L5"])


def test_l5_finds_what_vllm_raises(monkeypatch):
    def lookup(*args, **kwargs):
        raise KeyError("planted")

    case = fixed("replay of 353")
    monkeypatch.setattr(CPUOffloadingManager, "lookup", lookup)
    contract.dense_run.cache_clear()
    assert "KeyError in test_contract.py:lookup" in broken(case)["L5"][0]
    contract.dense_run.cache_clear()


def test_l6_and_l7_find_a_chunk_that_nobody_needs(monkeypatch):
    case = fixed("replay of 368", 256)
    assert not broken(case, useful=True)
    real = Setup.engine

    def engine(self, **more):
        return real(Setup(self.geometry, None, self.tier, 1, self.options), **more)

    monkeypatch.setattr(Setup, "engine", engine)
    found = broken(case, useful=True)
    assert "of no named position" in found["L6"][0]
    assert "of no complete tail" in found["L7"][0]


def test_l7_finds_a_tail_that_misses_a_chunk(sparse_engines):
    case = fixed("replay of 368")
    sparse_engines(losing(lambda keys: keys[-1:]))
    assert any("of no complete tail" in x for x in broken(case, useful=True)["L7"])


def test_l7_finds_a_tail_without_which_as_much_is_hit(monkeypatch):
    case = fixed("replay of 368")
    longer = {352: tail(Setup(SMALL_NO_EAGLE, 0), 352) | {(1, 39)}}
    assert longer[352] > tail(Setup(SMALL_NO_EAGLE, 0), 352)
    monkeypatch.setattr(
        contract, "tail", lambda setup, place: longer.get(place) or tail(setup, place)
    )
    words = broken(case, useful=True)["L7"]
    assert any("at 352" in x and "without any one of 1 chunks" in x for x in words)


def test_l8_finds_a_host_that_adds_nothing_to_the_gpu(monkeypatch):
    cases = [c for c, _ in scenarios.fixed(SMALL_NO_EAGLE) if c.mode == "mixed"]
    assert not any(broken(case) for case in cases)
    real = OffloadingConnector.get_num_new_matched_tokens

    def matched(self, request, num_computed_tokens):
        if num_computed_tokens:
            return 0, False
        return real(self, request, num_computed_tokens)

    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", matched)
    found = [broken(case) for case in cases]
    assert any("the host alone" in words for x in found for words in x.get("L8", ()))


def test_l6_compares_with_stock():
    mine = {
        "hits": [0, 320, 352, 0],
        "priced": False,
        "owed": [None, 352, 352, None],
        "excused": [],
        "computed": [0, 400, 400, 64],
        "align": 32,
        "unpeeked": [[], [], [], []],
        "local": [0, 0, 352, 0],
        "least_load": 0,
        "astray": False,
    }
    stock = {**mine, "hits": [0, 351, 400, 63]}
    assert below_stock(mine, stock) == [
        "send 2 hits 352, on stock 384",
        "send 3 hits 0, on stock 32",
    ]
    # Who was served more before may lack what it did not compute, and no more.
    excused = {**mine, "excused": [3]}
    assert below_stock(excused, stock)[1:] == ["send 3 hits 0, on stock 32"]
    assert below_stock({**excused, "hits": [0, 384, 384, 0]}, stock) == [
        "send 3 hits 0, on stock 32"
    ]
    assert below_stock({**excused, "hits": [0, 430, 384, 0]}, stock) == []
    # Nor one whose tail and peek block two prompts kept that had no more.
    joined = {**mine, "unpeeked": [[], [], [384], [64]]}
    assert below_stock(joined, stock) == ["send 3 hits 0, on stock 32"]
    # The GPU serves further, so the rest is less than what vLLM loads.
    loaded = {**stock, "local": [0, 0, 320, 0]}
    both = {**mine, "least_load": 33}
    assert below_stock(both, loaded) == ["send 3 hits 0, on stock 32"]
    for same in ({**both, "least_load": 32}, {**both, "local": [0, 0, 320, 0]}):
        assert len(below_stock(same, loaded)) == 2
    assert len(below_stock(both, {**stock, "local": [0, 0, 352, 0]})) == 2
    dense = {**stock, "priced": True}
    # It stores all that dense retention does: only what the laws ask for counts.
    assert below_stock(mine, dense) == []
    assert below_stock({**mine, "astray": True}, stock) == []
    # What nobody computed is no hit to be compared with.
    assert below_stock({**mine, "computed": [0, 400, 399, 62]}, stock) == []
    dense["hits"] = [0, 352, 400, 63]
    assert below_stock(mine, dense) == ["send 1 hits 320, on stock 352"]


def test_the_fuzzer_finds_a_lost_chunk_and_shrinks_it(sparse_engines):
    sparse_engines(losing(lambda keys: keys[-1:]))
    found = []
    run = fuzz.Fuzz(60, 0, ("hits",), (SMALL_NO_EAGLE,))
    run.run(lambda failure: found.append(failure))
    (failure,) = found
    assert failure.words == broken(failure.case)[failure.law]
    assert len(failure.case.history) <= 3


def test_each_known_limit_of_the_release_is_still_one():
    """Where it fails a law holds that did not: its limit has to go."""
    for limit in limits.LIMITS:
        if limit.release == release_adapter.version():
            found = {v.law: v.more for v in contract.judge(limit.case(), useful=True)}
            assert found[limit.law]["limited"][str(limit)]


def test_no_limit_speaks_of_another_law_or_tier():
    for limit in limits.LIMITS:
        setup = limit.case().setup
        assert limits.of(limit.release, limit.law, setup) is limit
        assert limits.of("1.2.3", limit.law, setup) is None
        assert limits.of(limit.release, "L5", setup) is None
        if "gpu" not in limit.tiers:
            gpu = replace(setup, tier="gpu")
            assert limits.of(limit.release, limit.law, gpu) is None


def test_on_the_gpu_groups_of_the_drafters_spec_peek_too():
    assert [Setup(SMALL, 0, "gpu").drafts(i) for i in range(5)] == [0, 1, 1, 0, 0]
    assert [Setup(SMALL, 0, "host").drafts(i) for i in range(5)] == [0, 0, 1, 0, 0]
    assert Setup(UNFLAGGED, 0, "gpu").peek == 32


def test_l6_finds_a_block_that_the_gpu_keeps_for_nothing(monkeypatch):
    case = fixed("replay of 351", tier="gpu")
    assert not broken(case)
    real = Setup.engine

    def engine(self, **more):
        return real(Setup(self.geometry, None, self.tier, 1, self.options), **more)

    monkeypatch.setattr(Setup, "engine", engine)
    assert "blocks of no named position" in broken(case)["L6"][0]
