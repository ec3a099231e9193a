# SPDX-License-Identifier: Apache-2.0
"""Each thing that the checks compare is noticed, if it is all that is wrong."""

from dataclasses import replace

import pytest

from .checks import assert_restored
from .engine import Answer, Served
from .ledger import Restored

ANSWER = Answer((7,), (((7, -0.5), (8, -1.5)),), ((9, 9),))
BLOCK = Restored(group=0, block=3, size=64, right=True)
PLACE = (0, 1)
COLD = Served(ANSWER, 0, [], {PLACE: b"right"}, set())
BACK = Served(ANSWER, 32, [BLOCK], {PLACE: b"right"}, {PLACE})


def said(**other) -> Served:
    return replace(BACK, answer=replace(ANSWER, **other))


def test_a_right_answer_passes() -> None:
    assert_restored(BACK, COLD)


@pytest.mark.parametrize(
    "back",
    [
        said(tokens=(8,)),
        said(logprobs=(((7, -0.25), (8, -1.5)),)),
        said(drafts=((9, 8),)),
        replace(BACK, restored=[], at=set()),
        replace(BACK, restored=[replace(BLOCK, right=False)]),
        replace(BACK, contents={PLACE: b"wrong"}),
        replace(BACK, at=set()),
    ],
    ids=["token", "logprob", "draft", "nothing", "bytes", "contents", "place"],
)
def test_one_wrong_thing_is_noticed(back: Served) -> None:
    with pytest.raises(AssertionError):
        assert_restored(back, COLD)
