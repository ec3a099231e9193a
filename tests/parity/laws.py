# SPDX-License-Identifier: Apache-2.0
"""The laws: what a request must hit, and what the host may store for it.

`Laws` says which of L1 to L4 speaks of a send, given the sends before it. `positions`
names where later requests can resume, for L6 and L7.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .history import Sent, Setup


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts share at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest_prefix(tokens: Sequence[int], texts: Iterable[Sequence[int]]) -> int:
    """Tokens that a prompt shares with some of these texts at their start."""
    return max((common_prefix(tokens, text) for text in texts), default=0)


def computed(tokens: Sequence[int], text: Sequence[int]) -> int:
    """Tokens of a prompt that a request with this text computed.

    The last one that is decoded never is.
    """
    return min(common_prefix(tokens, text), len(text) - 1)


@dataclass(frozen=True)
class Demand:
    """A law's demand on one send: `hit` tokens at least.

    `excused`: what the law would ask for if some earlier prompt had computed that
    position.
    """

    law: str
    hit: int
    excused: bool = False


class Laws:
    """Follows the sends of one engine and says what the next one must hit.

    L1 replay, L2 extension, L3 siblings, L4 edit near the end: such a request hits
    what dense retention hits, rounded down to the tier's alignment.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._align = setup.alignment
        # Where either tier may serve, a law that speaks of a distance must hold for
        # both.
        self._near = self._align
        if setup.tier == "both":
            self._near = min(self._align, setup.geometry.gpu_alignment)
        kinds = {group.kind for group in setup.geometry.groups}
        # Only full attention's blocks show where a shared prefix ends.
        self._has_junctions = "full" in kinds
        # At an interval above 0 the store does not keep that position (it costs more
        # than it brings); a Mamba group would keep a whole state for it.
        self._has_edits = "mamba" not in kinds and (
            setup.retention == 0 or setup.tier == "gpu"
        )
        self._states = [g.block for g in setup.geometry.groups if g.kind == "mamba"]
        # The host is offered a drafter's chunk of decoded tokens when the next one is
        # complete (storable_chunks): too late for a window that has moved past it.
        self._keeps_decoded_peek = setup.tier == "gpu" or all(
            group.kind != "swa" or 2 * setup.chunk(group) <= group.window
            for i, group in enumerate(setup.geometry.groups)
            if setup.drafts(i)
        )
        self._sent: list[Sent] = []
        # Where one request parted from an earlier one.
        self._junctions: list[tuple[int, Sent]] = []

    def forget(self) -> None:
        """Every cache was emptied."""
        self._sent.clear()
        self._junctions.clear()

    def shared(self, tokens: Sequence[int]) -> int:
        """Tokens that a prompt shares with some earlier text."""
        return longest_prefix(tokens, (sent.text for sent in self._sent))

    def demand(
        self, tokens: list[int], dense_hit: int, own_hit: int | None = None
    ) -> Demand | None:
        """The law that speaks of a prompt, and what it asks for; None if none does.

        Args:
            tokens: the prompt.
            dense_hit: what dense retention hits.
            own_hit: what it hits on the tier in question, if another tier's counts,
                too.
        """
        shared = self.shared(tokens)
        if not shared:
            return None
        mark = dense_hit // self._align * self._align
        nearest = [s for s in self._sent if common_prefix(tokens, s.text) == shared]
        # Who was served past a position never computed the tail below it.
        if whole := [sent for sent in nearest if shared == len(sent.tokens)]:
            law = "L1" if shared == len(tokens) else "L2"
            return Demand(law, mark, all(sent.hit > mark for sent in whole))
        if turns := [sent for sent in nearest if shared > len(sent.tokens)]:
            # It repeats decoded text: the prompt's own boundary is owed.
            own = dense_hit if own_hit is None else own_hit
            owed = (self._boundary(len(sent.tokens), shared, own) for sent in turns)
            limit = max(0, *owed)
            return Demand("L2", min(dense_hit, limit) // self._align * self._align)
        parted = [
            sent
            for place, sent in self._junctions
            if place // self._near == shared // self._near
            and common_prefix(tokens, sent.tokens) >= place // self._near * self._near
        ]
        if self._has_junctions and parted:
            # Of a drafter's block past the junction only what one of them computed is
            # kept; dense retention may have that of the text from which they parted.
            common = longest_prefix(tokens, (sent.tokens for sent in parted))
            most = max(common - self._setup.largest_peek, 0)
            mark = min(mark, most // self._align * self._align)
            return Demand("L3", mark, all(sent.hit > mark for sent in parted))
        if self._has_edits:
            near = [
                sent
                for sent in nearest
                if len(sent.tokens) - self._near <= shared < len(sent.tokens)
            ]
            if near:
                return Demand("L4", mark, all(sent.hit > mark for sent in near))
        return None

    def _boundary(self, prompt: int, shared: int, dense_hit: int) -> int:
        """Up to where a turn resumes that repeats `shared` tokens, more than a prompt.

        The prompt's last position, if decoded tokens complete its peek block and the
        host can keep that; a Mamba group would keep a whole state for it. Dense
        retention has to serve it as well: 0.25.1 leaves a drafter's last decoded chunk
        out of the store.
        """
        peek = self._setup.largest_peek
        if any(prompt % block for block in self._states):
            # Inside a block there is a state below the last token, not at the end.
            return prompt - max(peek, 1)
        last = prompt // self._align * self._align
        complete = shared if self._keeps_decoded_peek else prompt
        if not self._states and last + peek <= complete and last <= dense_hit:
            return last
        return prompt - peek

    def add(self, sent: Sent) -> None:
        """A send is done."""
        earlier = (shown(self._setup, one) for one in self._sent)
        shared = longest_prefix(sent.tokens, earlier)
        if shared and shows_parting(self._setup, shared, len(sent.tokens), self._align):
            self._junctions.append((shared, sent))
        self._sent.append(sent)


def prompts_only(setup: Setup) -> bool:
    """Whether the host keeps nothing of what is decoded."""
    return setup.tier != "gpu" and dict(setup.options).get("offload_prompt_only", False)


def shown(setup: Setup, sent: Sent) -> list[int]:
    """Of a request's text what a later one can be seen to part from.

    Where both tiers serve the GPU may have forgotten what was decoded."""
    return sent.tokens if prompts_only(setup) else sent.text


def unpeeked(setup: Setup, one: Sent, earlier: Sequence[Sent]) -> set[int]:
    """Boundaries of earlier prompts whose peek block a send does not share.

    Their last ones that have none, and those below where they parted from a text before
    if it lies past that place. A tail that is kept there all the same serves who finds
    the peek block in yet another text.
    """
    align, peek = setup.alignment, setup.largest_peek
    texts = [shown(setup, sent) for sent in earlier]
    found = set()
    for number, (sent, text) in enumerate(zip(earlier, texts, strict=True)):
        parted = longest_prefix(sent.tokens, texts[:number])
        same = common_prefix(one.tokens, text)
        for most, until in ((len(sent.tokens) - 1, len(text)), (parted, parted)):
            end = most // align * align
            if end + peek > until and end <= same < end + peek:
                found.add(end)
    return found


def shows_parting(setup: Setup, shared: int, prompt: int, align: int) -> bool:
    """Whether the tier sees that a prompt parts after `shared` tokens.

    Only whole blocks have hashes: one that ends before looks like a resend or a
    truncated prompt, which may keep nothing more. The GPU does not look at the last
    token, which is always computed; in the host the prompt's last block is missed, too.
    """
    last = prompt - 1 if setup.tier == "gpu" else prompt
    return shared // align < last // align


def positions(setup: Setup, sent: Sent, shared: Iterable[int]) -> dict[int, set[str]]:
    """Where a later request can resume, as the tier counts: position to its names.

    Where both tiers serve, as the host counts.

    Args:
        setup: sparse retention.
        sent: the request.
        shared: tokens that it shares with earlier texts it parted from.
    """
    prompt, text = len(sent.tokens), len(sent.text)
    on_gpu = setup.tier == "gpu"
    align = setup.alignment if on_gpu else setup.host_alignment
    peek = setup.peek
    named: dict[int, set[str]] = defaultdict(set)

    def name(word: str, tokens: int) -> int:
        place = tokens // align * align
        if place > 0:
            named[place].add(word)
        return place

    extension = name("extension", prompt - peek)
    name("resend", prompt - max(peek, 1))
    kinds = {group.kind for group in setup.geometry.groups}
    if (setup.retention == 0 or on_gpu) and "mamba" not in kinds:
        name("edit", extension - align)
    for place in shared:
        junction = place // align * align
        # The scheduler stops for a Mamba state at any junction of the GPU.
        if shows_parting(setup, place, prompt, align) or "mamba" in kinds:
            name("junction", junction)
            if peek:
                name("junction", junction - align)
    if not on_gpu and sent.local % align == 0:
        # Its siblings may resume there, when the GPU has forgotten it.
        name("resumed", sent.local)
    if not prompts_only(setup):
        name("turn", prompt)
        if text > prompt:
            name("finish", text - peek)
    if setup.retention:
        # The tail of a segment that the text only begins is there as far as it goes.
        reach = max((g.window or 0 for g in setup.geometry.groups), default=0)
        for place in range(setup.retention, text + reach + 1, setup.retention):
            name("segment", place)
    return dict(named)


def tail(setup: Setup, position: int) -> set[tuple[int, int]]:
    """(group, chunk) of each chunk but full attention's that serves a position."""
    chunks = set()
    for index, group in enumerate(setup.geometry.groups):
        if group.kind == "full":
            continue
        size = setup.chunk(group)
        if group.kind == "mamba":
            # A position may lie inside the block whose state serves it.
            chunks.add((index, -(-position // size) - 1))
            continue
        last = position // size
        window = -(-(group.window - 1) // size)
        chunks |= {(index, i) for i in range(max(last - window, 0), last)}
        if setup.drafts(index):
            chunks.add((index, last))
    return chunks
