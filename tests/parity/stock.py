# SPDX-License-Identifier: Apache-2.0
"""L6, never worse than stock: compares figures of two trees. Needs no vLLM."""

from collections.abc import Mapping
from typing import Any


def below_stock(patched: Mapping[str, Any], stock: Mapping[str, Any]) -> list[str]:
    """The sends of a case that hit less than on stock, in words.

    `patched` is an L6 verdict, `stock` one or what `contract.figures` returns. Where
    stock stores with sparse retention all that it stores with dense and the patched
    tree does not, stock's hits have a price that sparse retention is there to avoid:
    then a send need only hit what L1 to L4 ask for. All sends before it are counted
    together: with another retention the GPU hits otherwise, so another send stores a
    chunk. The same where stock's tails are astray (`limits.ASTRAY`), and where it
    serves more than was computed.

    A send is excused that resumes where an earlier one was served past, if all sends
    together hit no less than on stock: who is not served computes, and stores, more.
    """
    align = patched["align"]
    words = []
    for number, (mine, theirs, owed) in enumerate(
        zip(patched["hits"], stock["hits"], patched["owed"], strict=False)
    ):
        want = theirs // align * align
        priced = not _is_sparse(stock, number) and _is_sparse(patched, number)
        wrong = theirs > patched["computed"][number]
        if priced or wrong or patched["astray"]:
            want = min(want, owed or 0)
        if number in patched["excused"] and (
            sum(patched["hits"][: number + 1]) >= sum(stock["hits"][: number + 1])
        ):
            continue
        if mine < want:
            words.append(f"send {number} hits {mine}, on stock {want}")
    return words


def _is_sparse(figures: Mapping[str, Any], number: int) -> bool:
    """Whether the sends before one store less than with dense retention."""
    return sum(figures["stored"][:number]) < sum(figures["dense_stored"][:number])
