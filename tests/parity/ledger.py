# SPDX-License-Identifier: Apache-2.0
"""What every GPU block and host chunk holds, kept beside vLLM's own books.

The content of a cache is what tokens computed it. A *unit* is `hash_block` tokens, the
finest step of vLLM's block hashes; its content is the tokens themselves and a digest of
all tokens before them. In a drafter's group it is also the token that came next, on
which the last position depends, and for which no hash stands. A block of a Mamba group
holds one state; the last unit computed stands for it, as that names all tokens before.
The ledger never asks vLLM which content is where: it follows the forward passes and the
transfers, and compares with what vLLM believes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import release_adapter
from .geometry import Group

# (digest of everything before, the unit's tokens), in a drafter's group with the token
# that came next as a third; None: nothing that has a name.
Unit = tuple[Any, ...] | None
Content = tuple[Unit, ...]
_MAX_FINDINGS = 20


class Text:
    """A request's tokens as units. The list may grow while the request decodes."""

    def __init__(self, tokens: list[int], size: int) -> None:
        self._tokens = tokens
        self._size = size
        self._full: list[tuple[int, tuple[int, ...]]] = []

    def unit(self, index: int, filled: int | None = None) -> Unit:
        """Unit `index`, of which only the first `filled` tokens exist."""
        while len(self._full) < index:
            self._append()
        if filled is None or filled == self._size:
            while len(self._full) <= index:
                self._append()
            return self._full[index]
        start = index * self._size
        return self._digest(index), tuple(self._tokens[start : start + filled])

    def state(self, end: int) -> Unit:
        """The state after the first `end` tokens."""
        index = (end - 1) // self._size
        return self.unit(index, end - index * self._size)

    def token(self, position: int) -> int:
        """One token."""
        return self._tokens[position]

    def _digest(self, index: int) -> int:
        return hash(self._full[index - 1]) if index else 0

    def _append(self) -> None:
        index = len(self._full)
        tokens = tuple(self._tokens[index * self._size : (index + 1) * self._size])
        assert len(tokens) == self._size, "a unit past the end of the text"
        self._full.append((self._digest(index), tokens))


def _begins_with(unit: Unit, wanted: Unit) -> bool:
    """Whether `unit` holds at least what `wanted` holds."""
    if unit is None or wanted is None:
        return False
    return unit[0] == wanted[0] and unit[1][: len(wanted[1])] == wanted[1]


def _holds(have: Content | None, wanted: Content | None) -> bool:
    """Whether a block holds what its hash stands for, which may end inside it."""
    if have is None or wanted is None:
        return False
    return have == wanted or all(
        unit is not None and unit[:2] == other
        for unit, other in zip(have, wanted, strict=False)
    )


@dataclass
class _Transfer:
    """A transfer in flight, and what its source held when it was submitted."""

    is_store: bool
    pairs: list[tuple[int, int, int, int]]  # (group, GPU block, chunk, place in chunk)
    due: int
    seen: list[Any] = field(default_factory=list)
    junk: set[tuple[int, int, int, int]] = field(default_factory=set)
    request_id: str | None = None
    first_blocks: Sequence[int] = ()


class Ledger:
    """The books of one engine, of which each rank keeps its own copy.

    Attributes:
        findings: what did not agree, in words; empty if all is well.
        loads, stores: blocks copied so far, all ranks together.
        junk_stores: blocks stored under a key that stands for something else. vLLM
            does that on purpose with blocks that no window can reach any more (the
            first ones of a chunk wider than the window); loading one is a finding.
        stale_drafts: requests that resumed where the drafter's last position before
            was computed with another next token. The peek block avoids most of them;
            where two texts part at a block's end vLLM keeps the first one's block,
            and drafts are verified, so it is no finding.
    """

    def __init__(
        self, groups: Sequence[Group], hash_block: int, blocks_per_chunk: int
    ) -> None:
        self.groups = groups
        self.size = hash_block
        self.blocks_per_chunk = blocks_per_chunk
        self.units_per_block = [group.block // hash_block for group in groups]
        # Units that a block has a place for.
        self.places = [
            1 if group.kind == "mamba" else units
            for group, units in zip(groups, self.units_per_block, strict=True)
        ]
        self.findings: list[str] = []
        self.loads = 0
        self.stores = 0
        self.junk_stores = 0
        self.stale_drafts = 0
        self.step = 0
        self.job_requests: dict[int, str] = {}
        self._texts: dict[str, Text] = {}
        self._known: dict[bytes, tuple[Text, int]] = {}
        self._registered: dict[str, int] = {}
        # Which key the manager gave each chunk id to, last, and as a job was made: a
        # reset gives chunks away while a job that writes them is not yet submitted.
        self.chunk_keys: dict[int, tuple[int, bytes]] = {}
        self._job_keys: dict[int, dict[int, tuple[int, bytes]]] = {}

    def find(self, words: str) -> None:
        """Write down something that did not agree."""
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(f"step {self.step}: {words}")

    def add_job(self, job_id: int, request_id: str, chunks: Iterable[int]) -> None:
        """A transfer job was made, for a request and with chunks of the host."""
        self.job_requests[job_id] = request_id
        self._job_keys[job_id] = {chunk: self.chunk_keys[chunk] for chunk in chunks}

    def key(self, job_id: int, chunk: int) -> tuple[int, bytes]:
        """(group, block hash) that a chunk was given to when the job was made."""
        return self._job_keys[job_id][chunk]

    # --- what things should be ---

    def text(self, request_id: str) -> Text:
        """The text of a request."""
        return self._texts[request_id]

    def add_request(self, request_id: str, tokens: list[int]) -> None:
        """Follow a request, whose `tokens` list grows as it decodes."""
        self._texts[request_id] = Text(tokens, self.size)

    def name_hashes(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Learn what content vLLM's hashes of a request stand for."""
        done = self._registered.get(request_id, 0)
        for index in range(done, len(hashes)):
            self._known[bytes(hashes[index])] = (self._texts[request_id], index)
        self._registered[request_id] = len(hashes)

    def expected(
        self, group: int, block_hash: bytes, blocks: int = 1
    ) -> list[Content | None]:
        """The contents of the `blocks` blocks of which the last ends where a hash ends.

        None where a chunk has no state: it holds that at its end.
        """
        text, last = self._known[block_hash]
        index = last // self.units_per_block[group]
        return [
            _block(text, self.groups[group], self.units_per_block[group], i, last)
            for i in range(index + 1 - blocks, index + 1)
        ]

    def block_of(
        self, request_id: str, group: int, index: int, block_hash: bytes
    ) -> Content | None:
        """The content of a request's block, up to where a hash ends."""
        _, last = self._known[block_hash]
        return _block(
            self._texts[request_id],
            self.groups[group],
            self.units_per_block[group],
            index,
            last,
        )


def _block(
    text: Text, group: Group, units: int, index: int, last: int
) -> Content | None:
    """Block `index` of a text, of which nothing after unit `last` counts."""
    if group.kind == "mamba":
        return (text.unit(last),) if index == last // units else None
    first = index * units
    return tuple(text.unit(i) for i in range(first, min(first + units, last + 1)))


class LedgerWorker(release_adapter.OffloadingWorker):
    """Stands for one rank's memory and its copies.

    A copy is done `delay()` steps after it was submitted, or when vLLM waits for it;
    both its source and its target are looked at in that moment, the latest possible.
    """

    def __init__(self, ledger: Ledger, delay: Callable[[], int] | None = None) -> None:
        self._ledger = ledger
        self._delay = delay
        self._gpu: dict[int, tuple[int, list[Unit]]] = {}
        self._host: dict[int, tuple[Any, list[Content | None]]] = {}
        self._in_flight: dict[int, _Transfer] = {}
        self._done: list[release_adapter.TransferResult] = []
        # (request, group): column of its block table with the running state, and how
        # many columns further it lies, one per accepted draft.
        self._states: dict[tuple[str, int], tuple[int, int]] = {}
        # Tests plant a defect here: called with each copy's GPU block and chunk.
        self.spoil: Callable[[bool, int, int], bool] | None = None

    # --- memory ---

    def _block(self, block_id: int, group: int) -> list[Unit]:
        owner, units = self._gpu.get(block_id, (None, None))
        if owner != group:
            units = [None] * self._ledger.places[group]
            self._gpu[block_id] = (group, units)
        return units

    def content(self, block_id: int, group: int) -> Content:
        """What a GPU block holds, seen as a block of a group."""
        owner, units = self._gpu.get(block_id, (None, ()))
        if owner != group:
            return (None,) * self._ledger.places[group]
        return tuple(units)

    def compute(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        start: int,
        valid: int,
        end: int,
        drafts: int = 0,
    ) -> None:
        """A forward pass over positions [start, end), rejected drafts from `valid` on.

        The last `drafts` positions were drafted. The text holds the token at `valid`:
        it was sampled, or the prompt goes on.
        """
        ledger = self._ledger
        text = ledger.text(request_id)
        size = ledger.size
        for group, table in enumerate(tables):
            if ledger.groups[group].kind == "mamba":
                self._advance(request_id, group, table, start, valid, end - drafts)
                continue
            per = ledger.units_per_block[group]
            for index in range(start // size, -(-end // size)):
                place = index // per
                if place >= len(table) or table[place] == 0:
                    # Positions of drafts may lie past what a request was given.
                    if index * size < valid:
                        ledger.find(
                            f"{request_id} computes position {index * size} of group "
                            f"{group} and has no block for it"
                        )
                    continue
                units = self._block(table[place], group)
                low = max(start - index * size, 0)
                high = min(valid - index * size, size)
                unit = self._computed(
                    units[index % per], text, index, low, high, request_id, group
                )
                old = units[index % per]
                # What lies beyond stays, unless the pass wrote there.
                beyond = min(end - index * size, size) <= high
                if not (beyond and _begins_with(old, unit) and len(old[1]) > high):
                    units[index % per] = unit

    # --- states, as vllm/v1/worker/mamba_utils.py moves them ---

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy GPU blocks, all at once."""
        read = [(to, self._gpu.get(source)) for source, to in copies]
        for to, content in read:
            if content is not None:
                self._gpu[to] = (content[0], list(content[1]))

    def carry_states(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        start: int,
        end: int,
        resumed: bool,
    ) -> None:
        """Copy the running states to where a pass over [start, end) writes them.

        preprocess_mamba: the block that holds the pass's last position.
        """
        for group, spec in enumerate(self._ledger.groups):
            if spec.kind != "mamba":
                continue
            key = request_id, group
            if resumed or key not in self._states:
                self._states[key] = ((start - 1) // spec.block, 0)
            column, accepted = self._states[key]
            current = -(-end // spec.block) - 1
            if start and column != current:
                state = self._state(tables[group], group, column + accepted)
                self._put_state(request_id, tables[group], group, current, state)
                accepted = 0
            self._states[key] = (current, accepted)

    def _state(self, table: Sequence[int], group: int, column: int) -> Unit:
        block = table[column] if column < len(table) else 0
        return self.content(block, group)[0] if block else None

    def _put_state(
        self,
        request_id: str,
        table: Sequence[int],
        group: int,
        column: int,
        state: Unit,
    ) -> None:
        if column >= len(table) or not table[column]:
            self._ledger.find(
                f"{request_id} has no block for the state in column {column} of group "
                f"{group}"
            )
            return
        self._gpu[table[column]] = (group, [state])

    def _advance(
        self,
        request_id: str,
        group: int,
        table: Sequence[int],
        start: int,
        valid: int,
        running: int,
    ) -> None:
        """Compute states: after `running` tokens, and after each draft behind them.

        postprocess_mamba: if an accepted token ends a block, its state goes there.
        """
        ledger = self._ledger
        text = ledger.text(request_id)
        column, accepted = self._states[request_id, group]
        right = not start or self._state(table, group, column + accepted) == text.state(
            start
        )
        if not right:
            ledger.find(
                f"{request_id} computes from {start}: group {group} lacks the state"
            )
        for end in range(running, valid + 1):
            state = text.state(end) if right else None
            self._put_state(request_id, table, group, column + end - running, state)
        accepted = valid - running
        block = ledger.groups[group].block
        boundary = valid // block * block
        if boundary >= running:
            state = self._state(table, group, column + boundary - running)
            self._put_state(request_id, table, group, boundary // block - 1, state)
            if boundary // block - 1 == column:
                accepted = 0
        self._states[request_id, group] = (column, accepted)

    def _computed(
        self,
        old: Unit,
        text: Text,
        index: int,
        low: int,
        high: int,
        request_id: str,
        group: int,
    ) -> Unit:
        """A unit after its tokens [low, high) were computed."""
        if high <= 0:
            return None
        if low:
            before = text.unit(index, low)
            if not _begins_with(old, before):
                self._ledger.find(
                    f"{request_id} computes from inside unit {index} of group {group}, "
                    "whose first part is not the request's"
                )
                return None
        unit = text.unit(index, high)
        if self._ledger.groups[group].eagle:
            unit = (*unit, text.token(index * self._ledger.size + high))
        return unit

    def check_readable(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        start: int,
        everything: bool,
    ) -> None:
        """The positions that attention at `start` reads hold the request's content.

        Full attention is looked at only if `everything`: its blocks stay.
        """
        ledger = self._ledger
        text = ledger.text(request_id)
        size = ledger.size
        for group, spec in enumerate(ledger.groups):
            # A state was looked at when the pass began.
            if spec.kind == "mamba" or (spec.window is None and not everything):
                continue
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            per = ledger.units_per_block[group]
            for index in range(first // size, -(-start // size)):
                wanted = text.unit(index, min(size, start - index * size))
                place = index // per
                block = tables[group][place] if place < len(tables[group]) else 0
                if not block or not _begins_with(
                    self.content(block, group)[index % per], wanted
                ):
                    ledger.find(
                        f"{request_id} resumes at {start}: group {group} lacks the "
                        f"content of position {index * size} (block {block})"
                    )
                    break
            if spec.eagle and everything and start and not start % size:
                index = start // size - 1
                block = tables[group][index // per]
                unit = self.content(block, group)[index % per]
                if unit is not None and unit[2] != text.token(start):
                    ledger.stale_drafts += 1

    # --- transfers ---

    def _pairs(self, gpu_spec: Any, host_spec: Any) -> list[tuple[int, int, int, int]]:
        """Which GPU block goes with which place of which chunk, as in vLLM's worker."""
        factor = self._ledger.blocks_per_chunk
        blocks = iter(gpu_spec.block_ids.tolist())
        chunks = host_spec.block_ids.tolist()
        pairs = []
        used = 0
        for group, count in enumerate(gpu_spec.group_sizes):
            if not count:
                continue
            skip = gpu_spec.block_indices[group] % factor
            for i in range(skip, skip + count):
                chunk = chunks[used + i // factor]
                pairs.append((group, next(blocks), chunk, i % factor))
            used += -(-(skip + count) // factor)
        if used != len(chunks):
            self._ledger.find(f"a transfer names {len(chunks)} chunks and uses {used}")
        return pairs

    def _submit(self, job_id: int, transfer: _Transfer) -> bool:
        transfer.due = self._ledger.step + (self._delay() if self._delay else 0)
        transfer.seen = [self._source(job_id, transfer, p) for p in transfer.pairs]
        self._in_flight[job_id] = transfer
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Take a store; counts the blocks that are not what their key stands for."""
        ledger = self._ledger
        transfer = _Transfer(True, self._pairs(src_spec, dst_spec), 0)
        for group, block, chunk, place in transfer.pairs:
            key_group, key_hash = ledger.key(job_id, chunk)
            if key_group != group:
                ledger.find(
                    f"job {job_id} stores a block of group {group} in chunk {chunk}, "
                    f"which is group {key_group}'s"
                )
                continue
            wanted = ledger.expected(group, key_hash, ledger.blocks_per_chunk)
            if not _holds(self.content(block, group), wanted[place]):
                ledger.junk_stores += 1
                transfer.junk.add((group, block, chunk, place))
        return self._submit(job_id, transfer)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Take a load; its chunks must be stored."""
        transfer = _Transfer(
            False,
            self._pairs(dst_spec, src_spec),
            0,
            request_id=self._ledger.job_requests[job_id],
            first_blocks=dst_spec.block_indices,
        )
        for _, _, chunk, place in transfer.pairs:
            if self._host_content(job_id, chunk, place) is None:
                self._ledger.find(f"job {job_id} loads chunk {chunk}, never stored")
        return self._submit(job_id, transfer)

    def _host_content(self, job_id: int, chunk: int, place: int) -> Content | None:
        key, contents = self._host.get(chunk, (None, None))
        if contents is None or key != self._ledger.key(job_id, chunk):
            return None
        return contents[place]

    def _source(self, job_id: int, transfer: _Transfer, pair: tuple[int, ...]) -> Any:
        group, block, chunk, place = pair
        if transfer.is_store:
            return self.content(block, group)
        return self._host_content(job_id, chunk, place)

    def _finish(self, job_id: int) -> None:
        transfer = self._in_flight.pop(job_id)
        ledger = self._ledger
        counts = [0] * len(ledger.groups)
        for pair, seen in zip(transfer.pairs, transfer.seen, strict=True):
            group, block, chunk, place = pair
            source = self._source(job_id, transfer, pair)
            _, key_hash = ledger.key(job_id, chunk)
            if (
                source != seen
                and pair not in transfer.junk
                # A block that is stored in part may be filled on meanwhile.
                and not _holds(
                    source,
                    ledger.expected(group, key_hash, ledger.blocks_per_chunk)[place],
                )
            ):
                ledger.find(
                    f"job {job_id}: {'block' if transfer.is_store else 'chunk'} "
                    f"{block if transfer.is_store else chunk} changed while it was read"
                )
            if self.spoil is not None and self.spoil(transfer.is_store, block, chunk):
                source = (None,) * ledger.places[group]
            if transfer.is_store:
                key = ledger.key(job_id, chunk)
                if self._host.get(chunk, (None,))[0] != key:
                    self._host[chunk] = (key, [None] * ledger.blocks_per_chunk)
                self._host[chunk][1][place] = source
                ledger.stores += 1
                continue
            index = transfer.first_blocks[group] + counts[group]
            counts[group] += 1
            wanted = ledger.block_of(transfer.request_id, group, index, key_hash)
            if not _holds(source, wanted):
                ledger.find(
                    f"job {job_id} loads for {transfer.request_id}: chunk {chunk} does "
                    f"not hold block {index} of group {group}"
                )
            empty = (None,) * ledger.places[group]
            self._gpu[block] = (group, list(source or empty))
            ledger.loads += 1
        self._done.append(release_adapter.TransferResult(job_id, success=True))

    def get_finished(self) -> list[Any]:
        """The transfers done by now."""
        for job_id in [
            job_id
            for job_id, transfer in self._in_flight.items()
            if transfer.due <= self._ledger.step
        ]:
            self._finish(job_id)
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Do these transfers now."""
        for job_id in sorted(job_ids):
            if job_id in self._in_flight:
                self._finish(job_id)

    def check_cached(self, cached: Iterable[tuple[int, int, bytes]]) -> None:
        """Each GPU block that is readable under a hash holds that content."""
        for block, group, block_hash in cached:
            wanted = self._ledger.expected(group, block_hash)[0]
            if not _holds(self.content(block, group), wanted):
                self._ledger.find(
                    f"block {block} of group {group} is cached under a hash whose "
                    "content it does not hold"
                )
