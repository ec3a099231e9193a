# SPDX-License-Identifier: Apache-2.0
"""When a cost is too high: noise, trifles, growth, and what was hit."""

from offload_parity import costs


def timed(tree: str, seconds: float, *, length=200_000, case="miss", hit=0) -> dict:
    return {
        "kind": "timed", "tree": tree, "retention": 0, "length": length, "case": case,
        "local": hit, "external": 0, "figures": {"store": seconds, "lookup": 0.0},
    }  # fmt: skip


def judged(*records: dict) -> list[str]:
    return costs.faults(costs.timings(records))


def test_slower_than_stock_is_a_fault() -> None:
    stock, patched = [timed("stock", 0.01)] * 2, [timed("patched", 0.02)] * 2
    (store, total) = judged(*stock, *patched)
    assert store == (
        "miss of 200000 tokens at retention 0: store takes 2.00 times stock's 10.0 ms "
        "(noise 1.00)"
    )
    assert "all takes 2.00 times" in total
    assert judged(*[timed("stock", 0.02)] * 2, *[timed("patched", 0.01)] * 2) == []


def test_noise_of_the_same_run_is_allowed_for() -> None:
    stock = [timed("stock", 0.010), timed("stock", 0.013)]
    assert judged(*stock, *[timed("patched", 0.0125)] * 2) == []
    assert judged(*stock, *[timed("patched", 0.0145)] * 2)


def test_a_trifle_is_no_fault() -> None:
    assert judged(*[timed("stock", 0.0015)] * 2, *[timed("patched", 0.0024)] * 2) == []
    assert judged(*[timed("stock", 1e-5)] * 2, *[timed("patched", 9e-4)] * 2) == []


def test_where_more_is_hit_the_sum_counts() -> None:
    def both(stock_lookup: float, patched_store: float) -> list[str]:
        one = timed("stock", 0.02)
        other = timed("patched", patched_store, hit=256)
        one["figures"]["lookup"] = stock_lookup
        other["figures"]["lookup"] = 0.02
        return judged(one, one, other, other)

    assert both(0.01, 0.005) == []
    (fault,) = both(0.01, 0.02)
    assert ": all takes" in fault


def test_growth_is_held_against_the_length_in_the_patched_tree_only() -> None:
    def records(tree: str, longest: float) -> list[dict]:
        return [
            timed(tree, seconds, length=length)
            for length, seconds in (
                (10_000, 0.001), (200_000, 0.02), (1_000_000, longest)
            )
            for _ in range(2)
        ]  # fmt: skip

    assert judged(*records("stock", 0.5), *records("patched", 0.1)) == []
    found = judged(*records("stock", 0.5), *records("patched", 0.4))
    assert found == [
        f"miss at retention 0: {d} grows faster than the prompt, 4.0 times the cost "
        "per token (noise 1.00)"
        for d in ("store", "all")
    ]


def test_growth_within_the_noise_is_no_fault() -> None:
    def records(tree: str, noise: float, longest: float) -> list[dict]:
        return [
            timed(tree, seconds * factor, length=length)
            for length, seconds in ((200_000, 0.02), (1_000_000, longest))
            for factor in (1, noise)
        ]

    # Of 1.7 and of 2.3 times the cost per token.
    for longest, noise, faults in ((0.17, 1.0, 2), (0.17, 1.4, 0), (0.23, 1.4, 2)):
        trees = records("stock", noise, longest), records("patched", noise, longest)
        assert len(judged(*trees[0], *trees[1])) == faults


def test_stored_chunks_become_requests_that_fit() -> None:
    record = {
        "kind": "stored", "tree": "patched", "geometry": "dsv4-mtp", "retention": 4096,
        "length": 49_004, "chunks": 467, "resent": 0, "hit": 48_896,
    }  # fmt: skip
    (row,) = costs.stored([record], 1_039_680)
    assert row["requests_in_64_GiB_two_ranks"] == 70
    assert row["requests_in_64_GB"] == 131
    assert row["megabytes"] == 485.5


def test_summary_holds_ratios_and_no_times() -> None:
    records = [
        *[timed("stock", 0.01)] * 2,
        *[timed("patched", 0.005)] * 2,
        timed("stock", 0.0) | {"kind": "counted", "figures": {"host lookups": 7}},
        timed("patched", 0.0, hit=256)
        | {"kind": "counted", "figures": {"host lookups": 3}},
    ]
    found = costs.summary(records, 1000)
    assert {r["ratio"] for r in found["patched_over_stock"]} == {0.5}
    assert found["counts"] == [
        {
            "retention": 0, "case": "miss", "length": 200_000,
            "stock": {"host lookups": 7, "hit": 0},
            "patched": {"host lookups": 3, "hit": 256},
        }
    ]  # fmt: skip
    text = costs.report(found)
    assert "| store | miss | 0 | 0.5 |" in text
