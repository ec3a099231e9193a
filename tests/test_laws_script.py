# SPDX-License-Identifier: Apache-2.0
"""What `make parity` makes of the verdicts of two trees."""

import laws


def verdict(tree: str, law: str, **more) -> dict:
    base = {
        "tree": tree, "law": law, "case": "replay [1]", "geometry": "g",
        "retention": 0, "tier": "host", "checks": 2, "words": [],
    }  # fmt: skip
    return base | more


def hits(tree: str, *figures: int) -> dict:
    return verdict(
        tree, "L6", hits=list(figures), stored=[5, 0], dense_stored=[9, 0],
        owed=[None, 32], align=32,
    )  # fmt: skip


def test_findings_are_counted_by_tree_and_law():
    found = laws.tally(
        [
            verdict("stock", "L1", words=["send 1 hits 0 of 32"]),
            verdict("patched", "L1"),
            verdict("patched", "L7", exempt={"full attention": 3}),
        ]
    )
    assert found["stock"].findings == {
        "L1": ["g, retention 0, host: replay [1]: send 1 hits 0 of 32"]
    }
    assert found["patched"].findings == {}
    assert found["patched"].checks == {"L1": 2, "L7": 2}
    assert found["patched"].exempt == {"full attention": 3}
    lines = laws.table({"1.2.3": found}).splitlines()
    assert "| 1.2.3 | L1 replay | 1 of 2 | 0 of 2 |" in lines


def test_a_patched_hit_below_stock_is_a_finding_of_l6():
    found = laws.tally([hits("stock", 0, 64), hits("patched", 0, 32)])
    assert found["stock"].findings == {}
    assert found["patched"].findings == {
        "L6": ["g, retention 0, host: replay [1]: send 1 hits 32, on stock 64"]
    }
    assert not laws.tally([hits("stock", 0, 64), hits("patched", 0, 64)])[
        "patched"
    ].findings


def test_another_case_is_not_compared():
    other = hits("stock", 0, 64) | {"case": "another"}
    assert not laws.tally([other, hits("patched", 0, 32)])["patched"].findings


def test_reports_that_are_not_as_stated_are_counted(capsys):
    base = {"release": "1.2.3", "report": "7", "title": "t", "law": "L1"}
    shows = base | {"found": True, "expected": True, "words": "send 1 hits 0 of 32"}
    missing = base | {"found": False, "expected": True, "words": ""}
    assert laws._print_reports([shows, missing]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "found by L1: send 1" in said[0]
    assert said[1].endswith("does not show (EXPECTED TO SHOW)")
