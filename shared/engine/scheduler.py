"""Decides what the next forward holds: decode rows first, then drafts, then prompt chunks. Pure; it has no clock.

Invariants: a step has at most `max_batch_tokens` rows and `max_running` sequences; each sequence's blocks cover what it
is about to compute; a sequence is preempted only for an older one (or yields itself), and never while pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.block_pool import BlockPool
from shared.engine.errors import OutOfBlocks
from shared.engine.sequence import Sequence
from shared.engine.verification import usable_drafts


@dataclass(frozen=True)
class Work:
    """`count` known tokens of `sequence` to feed, then `drafts`. `samples`: this feeds the last token that it has."""

    sequence: Sequence
    count: int
    drafts: list[int]
    samples: bool


class Scheduler:
    """Owns the order of sequences. `running` take part in steps; `waiting` come back, oldest first, as blocks allow."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_batch_tokens: int,
        max_running: int,
        max_draft_tokens: int,
        on_allocate: Callable[[list[int]], None] | None = None,
    ) -> None:
        """`on_allocate` learns which blocks get a new holder, before anything is written to them."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_draft_tokens = max_draft_tokens
        self._on_allocate = on_allocate
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    # Membership

    def add(self, sequence: Sequence) -> None:
        """The sequence waits for a place in the running batch; it may hold blocks already."""
        sequence.state = "waiting"
        self.waiting.append(sequence)
        self.waiting.sort(key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Take the sequence out of the batch; its blocks stay with it."""
        for group in (self.running, self.waiting):
            if sequence in group:
                group.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence out and free its blocks."""
        self.remove(sequence)
        self._free(sequence)

    # Blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for a sequence that has not started. Those that wait for theirs go first. Raises OutOfBlocks."""
        owed = sum(self.blocks_for(len(s.token_ids)) for s in self.waiting if not s.block_ids)
        missing = self.blocks_for(tokens) - len(sequence.block_ids)
        if missing > 0 and missing + owed > self._pool.num_free:
            raise OutOfBlocks(
                f"sequence {sequence.seq_id} wants {missing} KV blocks; {self._pool.num_free} are free and "
                f"{owed} of them are owed to waiting sequences"
            )
        self._grow(sequence, tokens)

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence blocks for `tokens` tokens. Raises OutOfBlocks and changes nothing."""
        missing = self.blocks_for(tokens) - len(sequence.block_ids)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            sequence.block_ids.extend(blocks)
            if self._on_allocate is not None:
                self._on_allocate(blocks)

    def _free(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0

    # One step

    def schedule(self) -> list[Work]:
        """The work of the next forward, in the order of its rows; empty when nothing can run."""
        self._resume()
        work = self._decode_work()
        budget = self._max_batch_tokens - sum(1 + len(w.drafts) for w in work)
        for sequence in [s for s in self.running if s.num_pending > 1]:
            count = min(budget, sequence.num_pending)
            if count and self._secure(sequence, sequence.num_computed + count):
                work.append(Work(sequence, count, [], samples=count == sequence.num_pending))
                budget -= count
        # A sequence may have been preempted for an older one after its work was noted.
        return [w for w in work if w.sequence.state == "running"]

    def _decode_work(self) -> list[Work]:
        """One row for each decoding sequence, and the drafts that fit. Prompts keep half of what the rows leave."""
        decoding = [s for s in self.running if s.num_pending == 1]
        ready = [s for s in decoding if self._secure(s, len(s.token_ids))]
        spare = self._max_batch_tokens - len(ready)
        if len(decoding) < len(self.running):
            spare //= 2
        work = []
        for sequence in ready:
            drafts = self._drafts(sequence, spare) if sequence.state == "running" else []
            spare -= len(drafts)
            work.append(Work(sequence, 1, drafts, samples=True))
        return work

    def _resume(self) -> None:
        """Move waiting sequences into the batch, oldest first, while there is room for all that they know."""
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            try:
                self._grow(sequence, len(sequence.token_ids))
            except OutOfBlocks:
                return
            self.waiting.pop(0)
            sequence.state = "running"
            self.running.append(sequence)
            self.running.sort(key=_age)

    def _secure(self, sequence: Sequence, tokens: int) -> bool:
        """Make sure of the blocks for `tokens`, preempting younger sequences, the youngest first.

        False when there are none left: then the sequence stands still, or, as the youngest of several, yields its own
        blocks to the others.
        """
        while sequence.state == "running":
            try:
                self._grow(sequence, tokens)
            except OutOfBlocks:
                others = [s for s in (*self.running, *self.waiting) if s is not sequence]
                younger = [s for s in others if s.block_ids and s.arrival > sequence.arrival]
                victims = [s for s in younger if not s.pins]
                if victims:
                    self._preempt(max(victims, key=_age))
                    continue
                if others and not younger and not sequence.pins:
                    self._preempt(sequence)
                return False
            else:
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        if sequence.state == "running":
            self.running.remove(sequence)
            self.add(sequence)

    def _drafts(self, sequence: Sequence, spare: int) -> list[int]:
        """The drafts to verify: never more than may still be generated, and none that would cost another its blocks."""
        if sequence.proposal is None or not sequence.speculate:
            return []
        start, proposed = sequence.proposal
        left = sequence.max_length - len(sequence.token_ids)
        if sequence.pause_after is not None:
            left = min(left, sequence.pause_after - sequence.num_sampled)
        room = (len(sequence.block_ids) + self._pool.num_free) * self._block_tokens - len(sequence.token_ids)
        limit = min(self._max_draft_tokens, spare, left - 1, room)
        drafts = usable_drafts(sequence.token_ids, start, proposed, limit)
        self._grow(sequence, len(sequence.token_ids) + len(drafts))
        return drafts


def _age(sequence: Sequence) -> int:
    """Smaller is older."""
    return sequence.arrival
