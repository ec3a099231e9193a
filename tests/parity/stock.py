# SPDX-License-Identifier: Apache-2.0
"""L6, never worse than stock: compares figures of two trees. Needs no vLLM."""

from collections.abc import Mapping
from typing import Any


def below_stock(patched: Mapping[str, Any], stock: Mapping[str, Any]) -> list[str]:
    """The sends of a case that hit less than on stock, in words.

    `patched` is an L6 verdict, `stock` one or what `contract.figures` returns. Where
    stock stores with sparse retention all that it stores with dense, its hits have a
    price that sparse retention is there to avoid: then a send need only hit what L1 to
    L4 ask for. The same where what stock serves is an accident (`limits.ASTRAY`), and
    where it serves more than was computed, or joins the tail of one prompt with the
    peek block of another (`laws.unpeeked`).

    A send is excused that resumes where an earlier one was served past, if all sends
    together hit no less than on stock: who is not served computes, and stores, more.
    So is one that the GPU serves further than stock's, up to less than the least load
    (`Setup.least_load`) below what stock loaded.
    """
    align = patched["align"]
    words = []
    for number, (mine, theirs, owed) in enumerate(
        zip(patched["hits"], stock["hits"], patched["owed"], strict=False)
    ):
        want = theirs // align * align
        wrong = theirs > patched["computed"][number]
        joined = want in patched["unpeeked"][number]
        if stock["priced"] or wrong or joined or patched["astray"]:
            want = min(want, owed or 0)
        if number in patched["excused"] and (
            sum(patched["hits"][: number + 1]) >= sum(stock["hits"][: number + 1])
        ):
            continue
        served = stock["local"][number] < patched["local"][number] == mine
        if served and want - mine < patched["least_load"]:
            continue
        if mine < want:
            words.append(f"send {number} hits {mine}, on stock {want}")
    return words
