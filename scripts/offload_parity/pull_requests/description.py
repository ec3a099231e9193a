# SPDX-License-Identifier: Apache-2.0
"""The text of a pull request, in the sections of vLLM's template."""

import re
from collections.abc import Sequence

from .. import release as releases
from .. import version
from ..proof import HARDWARE, parse_claims
from ..release import Release
from ..verdicts import NAMES
from .branches import Branch, body_of
from .changes import Change, Related, subject
from .evidence import Evidence
from .identity import Submitter

PROJECT = version().partition(" ")[0]
TRACKER = "https://github.com/vllm-project/vllm/issues"
AI_STATEMENT = (
    "AI assistance was used for this change: its code, its tests and this text."
)
REVIEWED = (
    "The human who submits it has read every changed line, ran the tests and can "
    "defend it end to end."
)
SEARCHED = (
    "On the day of sending no open pull request did the same (the commands are in "
    "`ORDER.md`)."
)
EVALUATION = (
    "<!-- Model evaluation: add that of a real model on a GPU with offload on; nothing "
    "here computes tokens. -->"
)
NO_PROOF = "not shown: run `make proof`, then `make upstream` again"
_WHOLE_SERIES = (
    "Both on a CPU. What the whole series does, of which this is a part, measured on "
    "vLLM's scheduler with a simulated worker:"
)
NOT_RUN = "not run: give `make upstream` without `TESTS=0`"


def write(
    release: Release,
    branch: Branch,
    message: str,
    evidence: Evidence,
    who: Submitter,
    before: Sequence[Change],
    template: str,
) -> str:
    """The description; ``message`` is that of all its commits, one after the other.

    ``before`` are the changes that it builds on, ``template`` is vLLM's own.
    """
    change = branch.change
    parts = [
        f"<!-- title: {change.title} -->",
        "## Overview",
        change.summary or f"{change.title.partition('] ')[2]}.",
        _related_line(change),
        _order(branch, before),
        "## Claims",
        _claims(change, evidence),
        "## Validation",
        _validation(release, branch, message, evidence),
        "## Details",
        "### What was wrong, and why this way",
        unwrapped(body_of(f"\n{message}")),
        "### On which releases, since when",
        _releases(change, releases.supported()[-1]),
        "### Alternatives",
        change.alternatives or "None beside what is said above.",
        "### Related reports and pull requests",
        f"{_related(change.related)}\n\n- [ ] {SEARCHED}",
        "### AI assistance",
        f"{AI_STATEMENT} Its commits carry the trailer.\n\n- [ ] {REVIEWED}",
        f"Signed off by {who}.",
        checklist(template),
    ]
    return "\n\n".join(part for part in parts if part).rstrip() + "\n"


def unwrapped(text: str) -> str:
    """Its paragraphs on a line each: a tracker shows each end of a line as one."""
    return "\n\n".join(
        part
        if re.search(r"^([\s|#>`]|[-*+] |\d+\. )", part, re.MULTILINE)
        else " ".join(part.split("\n"))
        for part in re.split(r"\n\n+", text)
    )


def checklist(template: str) -> str:
    """The checklist of vLLM's template, for the submitter to tick; empty if none."""
    _, line, rest = template.partition("\n---\n")
    kept = rest.partition("**BEFORE SUBMITTING")[0].strip()
    return f"---\n\n{kept}" if line and kept else ""


def _link(number: int) -> str:
    return f"[#{number}]({TRACKER}/{number})"


def _related_line(change: Change) -> str:
    links = ", ".join(_link(one.number) for one in change.related)
    return f"Related: {links}" if links else ""


def _related(related: Sequence[Related]) -> str:
    if not related:
        return "None is known."
    return "\n".join(
        f"- {_link(one.number)}: {one.what}"
        + (f" {one.differs}" if one.differs else "")
        for one in related
    )


def _order(branch: Branch, before: Sequence[Change]) -> str:
    if not before:
        return "Applies by itself; nothing has to land before it."
    return "Lands after: " + "; ".join(change.title for change in before) + "."


def _claims(change: Change, evidence: Evidence) -> str:
    lines = []
    if evidence.failing is not None:
        tests = [row for row in evidence.failing if row.stock not in _NOT_FAILING]
        lines.append(
            f"Tests that fail on the release for the stated reason and pass with the "
            f"change: {len(tests)}."
        )
    else:
        lines.append(f"Tests that fail before and pass after: {NO_PROOF}.")
    for patch in change.patches:
        law, _, case = evidence.laws.get(patch.name, "").partition(" ")
        # What fails of vLLM's tests is shown below.
        if law in NAMES:
            one = f'"{subject(patch.title)}"' if change.patches[1:] else "it"
            lines.append(
                f"Without {one} a law of {PROJECT}'s simulation of vLLM's scheduler "
                f"breaks, {law} ({NAMES[law]}); shape, retention interval, tier and "
                f"case: `{case}`"
            )
    return "\n".join(f"- {line}" for line in lines)


_NOT_FAILING = ("passed", "skipped")


def _validation(
    release: Release, branch: Branch, message: str, evidence: Evidence
) -> str:
    claims, _ = parse_claims(message)
    files = sorted({claim.test.partition("::")[0] for claim in claims})
    names = [claim.test.rpartition("::")[2] for claim in claims]
    command = (
        f".venv/bin/python -m pytest {' '.join(files)} \\\n  -k '{' or '.join(names)}'"
        if claims
        else "it brings no test"
    )
    parts = [
        f"```console\n$ {command}\n```",
        f"On vLLM {release.version} with the tests of this change and not its code:",
        _block(_before(evidence)),
        "With the change:",
        _block(_after(evidence)),
    ]
    hardware = [c for c in claims if c.block == HARDWARE]
    if hardware:
        parts.append(
            "Not run, for want of hardware: "
            + "; ".join(f"`{c.test}` ({c.text})" for c in hardware)
        )
    parts += [
        _WHOLE_SERIES,
        evidence.table,
        evidence.costs,
        EVALUATION,
    ]
    return "\n\n".join(parts)


def _before(evidence: Evidence) -> str:
    if evidence.failing is None:
        return NO_PROOF
    return "\n".join(
        f"{'PASSED' if row.stock in _NOT_FAILING else 'FAILED'} {row.test}"
        + ("" if row.stock in _NOT_FAILING else f" - {row.stock[:160]}")
        for row in evidence.failing
        if row.stock != "skipped" and row.patched != "skipped"
    )


def _after(evidence: Evidence) -> str:
    if evidence.passing is None:
        return NOT_RUN
    return "\n".join(
        f"{'PASSED' if one.good else one.outcome.upper()} {one.test}"
        + (f" ({one.cases} cases)" if one.cases > 1 else "")
        + ("" if one.good else f" - {one.said}")
        for one in evidence.passing
        if not (one.good and one.said)
    )


def _block(text: str) -> str:
    return f"```text\n{text or 'nothing to show'}\n```"


def _releases(change: Change, first: Release) -> str:
    newest, oldest = change.seen_on[0], change.seen_on[-1]
    span = newest if newest == oldest else f"{oldest} to {newest}"
    words = (
        f"{PROJECT}, from which this comes, carries it for {span} "
        f"({', '.join(change.seen_on)}), where its tests fail on the release "
        "as published."
    )
    if oldest == first.version and not change.since:
        words += " No older release was looked at."
    return f"{words} {change.since}".strip()
