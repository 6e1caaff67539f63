"""Decides what the next forward holds: decode rows first, then drafts, then prompt chunks. Pure; it has no clock.

Prompts are computed oldest first, but the one with the least left never waits for all of a longer one.

Invariants: a step has at most `max_batch_tokens` rows and `max_running` sequences; each sequence's blocks cover what it
is about to compute; a sequence is preempted only for an older one (or yields itself), and never while pinned. Of a
sequence's blocks those that are full and computed may be shared, the others are its own: a step writes only to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.engine.block_pool import BlockPool
from shared.engine.draft_policy import Candidate, DraftPolicy
from shared.engine.errors import OutOfBlocks
from shared.engine.prefix_keys import extend_keys
from shared.engine.sequence import Sequence
from shared.engine.verification import usable_drafts


@dataclass(frozen=True)
class Work:
    """`count` known tokens of `sequence` to feed, then `drafts`. `samples`: this feeds the last token that it has.

    `drafts` are the beginning of the `offered` ones: those of the proposal that could have been verified.
    """

    sequence: Sequence
    count: int
    drafts: list[int]
    samples: bool
    offered: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether it is a decode row, and no part of a prompt."""
        return self.samples and self.count == 1


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
        prefix_caching: bool = True,
        on_allocate: Callable[[list[int]], None] | None = None,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        """`on_allocate` learns which blocks are to be written by a new holder, before anything is.

        `draft_policy` decides how many of the drafts are verified; without one all that fit are.
        """
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_draft_tokens = max_draft_tokens
        self._prefix_caching = prefix_caching
        self._on_allocate = on_allocate
        self._draft_policy = draft_policy
        self.prefix_queries = 0
        """Tokens of all sequences when they first got blocks."""
        self.prefix_hits = 0
        """Those of them, and of what they waited to compute, whose KV was in the cache."""
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    @contextmanager
    def verifying_all(self) -> Iterator[None]:
        """All drafts that fit are verified meanwhile, whatever the policy thinks."""
        policy, self._draft_policy = self._draft_policy, None
        try:
            yield
        finally:
            self._draft_policy = policy

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
        """Blocks for a sequence that has not started. Those that wait for theirs go first. Raises OutOfBlocks.

        What the cache has of it counts as computed. A sequence that has its blocks already may be having them loaded,
        and keeps them.
        """
        if self.blocks_for(tokens) <= len(sequence.block_ids):
            return
        owed = sum(self.blocks_for(len(s.token_ids)) for s in self.waiting if not s.block_ids)
        self._take(sequence, tokens, spare=owed)

    def fork(self, source: Sequence, new: Sequence, tokens: int) -> tuple[int, int] | None:
        """Blocks for `tokens` tokens of `new`, which begins as `source` does: what is full comes from the cache.

        Returns blocks of `source` and `new`, whose contents the caller must copy: the one that what they have in common
        fills in part. It counts as computed. None where there is no such block. Raises OutOfBlocks.
        """
        new.block_keys = source.block_keys[: (len(new.token_ids) - 1) // self._block_tokens]
        self.admit(new, tokens)
        kept = min(source.num_computed, len(new.token_ids) - 1)
        block = kept // self._block_tokens
        if new.num_computed >= kept or new.num_computed // self._block_tokens != block:
            return None
        new.num_computed = kept
        return source.block_ids[block], new.block_ids[block]

    def commit(self, sequence: Sequence) -> None:
        """`num_computed` has grown: the blocks that it filled are final, and others may have them from now on.

        A block that another sequence committed first is given up for that one, unless somebody may be reading it.
        """
        full = sequence.num_computed // self._block_tokens
        if not self._prefix_caching or full <= sequence.num_committed:
            return
        extend_keys(sequence.block_keys, sequence.salt, sequence.token_ids, self._block_tokens, full)
        for index in range(sequence.num_committed, full):
            own = sequence.block_ids[index]
            first = self._pool.register(own, sequence.block_keys[index])
            if first != own and not sequence.pins:
                self._pool.share([first])
                self._pool.free([own])
                sequence.block_ids[index] = first
        sequence.num_committed = full

    def disown(self, sequence: Sequence) -> None:
        """The sequence's KV turned out to be wrong: nobody shall find it."""
        self._pool.forget(sequence.block_ids)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        """Only the first `kept` of its tokens stay: the blocks behind them become its own again, or are given back."""
        sequence.num_computed = min(sequence.num_computed, kept)
        first = own = sequence.num_computed // self._block_tokens
        while own < sequence.num_committed and self._pool.withdraw(sequence.block_ids[own]):
            own += 1
        if own < sequence.num_committed:  # others hold it
            self._pool.free(sequence.block_ids[own:])
            del sequence.block_ids[own:]
            sequence.num_computed = min(sequence.num_computed, own * self._block_tokens)
        sequence.num_committed = min(sequence.num_committed, first)
        del sequence.block_keys[kept // self._block_tokens :]

    def _take(self, sequence: Sequence, tokens: int, *, spare: int = 0) -> None:
        """Blocks for `tokens` tokens: shared ones as far as the cache goes beyond what is computed, then new ones.

        `spare` blocks must stay free when any are taken. Raises OutOfBlocks and changes nothing.
        """
        start = sequence.num_computed // self._block_tokens
        cached = self._cached(sequence, start)
        end = start + len(cached)
        replaced = sequence.block_ids[start:end]
        missing = max(self.blocks_for(tokens) - max(len(sequence.block_ids), end), 0)
        needed = missing + self._pool.count_idle(cached) - len(replaced)
        if needed > 0 and needed + spare > self._pool.num_free:
            raise OutOfBlocks(
                f"sequence {sequence.seq_id} wants {needed} more KV blocks; {self._pool.num_free} are free and "
                f"{spare} of them are owed to waiting sequences"
            )
        first_time = not sequence.block_ids and not sequence.preemptions
        if cached:
            self._pool.share(cached)
            self._pool.free(replaced)
            sequence.block_ids[start:end] = cached
            if not sequence.preemptions:
                gained = end * self._block_tokens - sequence.num_computed
                sequence.num_cached += gained
                self.prefix_hits += gained
            sequence.num_computed = end * self._block_tokens
            sequence.num_committed = end
        if first_time and self._prefix_caching:
            self.prefix_queries += len(sequence.token_ids)
        self._extend(sequence, missing)

    def _cached(self, sequence: Sequence, start: int) -> list[int]:
        """The cached blocks from block `start` on; never one that holds the last known token, which is always fed."""
        end = (len(sequence.token_ids) - 1) // self._block_tokens
        if not self._prefix_caching or start >= end:
            return []
        extend_keys(sequence.block_keys, sequence.salt, sequence.token_ids, self._block_tokens, end)
        return self._pool.lookup(sequence.block_keys[start:end])

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence blocks for `tokens` tokens. Raises OutOfBlocks and changes nothing."""
        self._extend(sequence, self.blocks_for(tokens) - len(sequence.block_ids))

    def _extend(self, sequence: Sequence, missing: int) -> None:
        if missing > 0:
            blocks = self._pool.allocate(missing)
            sequence.block_ids.extend(blocks)
            if self._on_allocate is not None:
                self._on_allocate(blocks)

    def _free(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_committed = 0

    # One step

    def schedule(self) -> list[Work]:
        """The work of the next forward, in the order of its rows; empty when nothing can run."""
        self._resume()
        for sequence in self.running:
            if sequence.num_pending > 1:
                self._take(sequence, 0)  # others may have computed what it was about to
        work = self._decode_work()
        budget = self._max_batch_tokens - sum(1 + len(w.drafts) for w in work)
        in_work: set[bytes] = set()
        prompts = [s for s in self.running if s.num_pending > 1]
        shortest, kept = self._shortest(prompts, budget)
        for sequence in prompts:
            if sequence is shortest:
                kept = 0
            count = min(budget - kept, sequence.num_pending)
            if not count or self._better_later(sequence, count, in_work):
                continue
            if self._secure(sequence, sequence.num_computed + count):
                work.append(Work(sequence, count, [], samples=count == sequence.num_pending))
                in_work.update(self._keys_of(sequence, count))
                budget -= count
        # A sequence may have been preempted for an older one after its work was noted.
        return [w for w in work if w.sequence.state == "running"]

    def _decode_work(self) -> list[Work]:
        """One row for each decoding sequence, and the drafts that fit. Prompts keep half of what the rows leave."""
        decoding = [s for s in self.running if s.num_pending == 1]
        ready = [s for s in decoding if self._secure(s, len(s.token_ids))]
        ready = [s for s in ready if s.state == "running"]
        spare = self._max_batch_tokens - len(ready)
        prompt_tokens = sum(s.num_pending for s in self.running if s.num_pending > 1)
        if len(decoding) < len(self.running):
            spare //= 2
        offers = [self._offered(s) for s in ready]
        lengths = self._lengths(ready, offers, spare, prompt_tokens)
        work = []
        for sequence, offered, length in zip(ready, offers, lengths, strict=True):
            drafts = offered[: max(min(length, spare, self._room(sequence)), 0)]
            self._grow(sequence, len(sequence.token_ids) + len(drafts))
            spare -= len(drafts)
            work.append(Work(sequence, 1, drafts, samples=True, offered=offered))
        return work

    def _lengths(self, ready: list[Sequence], offers: list[list[int]], spare: int, prompt_tokens: int) -> list[int]:
        """How many drafts of each decoding sequence shall be verified."""
        if self._draft_policy is None:
            return [len(offered) for offered in offers]
        drafting = [i for i, s in enumerate(ready) if s.speculate]
        chosen = self._draft_policy.choose(
            [_candidate(ready[i], len(offers[i])) for i in drafting],
            len(ready),
            chunk_tokens=min(prompt_tokens, self._max_batch_tokens - len(ready)),
            spare=spare,
        )
        lengths = [0] * len(ready)
        for i, length in zip(drafting, chosen, strict=True):
            lengths[i] = length
        return lengths

    def _shortest(self, prompts: list[Sequence], budget: int) -> tuple[Sequence | None, int]:
        """The prompt with the least left, and what older ones must leave of the budget for it: half of it at most.

        So a short prompt does not wait until a long one is done, and the oldest gets half of each step at least.
        """
        shortest = min(prompts, key=lambda s: s.num_pending, default=None)  # of several the oldest
        if shortest is None or shortest is prompts[0]:
            return None, 0
        kept = min(shortest.num_pending, budget // 2)
        if self._better_later(shortest, kept, set(self._keys_of(prompts[0], budget))):
            return None, 0
        return shortest, kept

    def _keys_of(self, sequence: Sequence, count: int) -> list[bytes]:
        """Keys of the blocks that the next `count` tokens fill."""
        start, end = sequence.num_computed, sequence.num_computed + count
        return sequence.block_keys[start // self._block_tokens : end // self._block_tokens]

    def _better_later(self, sequence: Sequence, count: int, in_work: set[bytes]) -> bool:
        """Whether most of this chunk is computed in this step anyway, for an older sequence with the same beginning."""
        same = sum(1 for key in self._keys_of(sequence, count) if key in in_work)
        return 2 * same * self._block_tokens > count

    def _resume(self) -> None:
        """Move waiting sequences into the batch, oldest first, while there is room for all that they know."""
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            try:
                self._take(sequence, len(sequence.token_ids))
            except OutOfBlocks:
                # While others run, blocks will come free; else only those behind it in the queue can hold them.
                behind = [s for s in self.waiting[1:] if s.block_ids and not s.pins]
                if self.running or not behind:
                    return
                self._preempt(behind[-1])
                continue
            self.waiting.pop(0)
            sequence.state = "running"
            self.running.append(sequence)
            self.running.sort(key=_age)

    def _secure(self, sequence: Sequence, tokens: int) -> bool:
        """Make sure of the blocks for `tokens`, preempting younger sequences, the youngest first.

        False when there are none left: then the sequence stands still, or, as the youngest of several, yields its own
        blocks to the older ones.
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
                older = any(s.arrival < sequence.arrival for s in others)
                if older and not younger and not sequence.pins:
                    self._preempt(sequence)
                return False
            else:
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self._free(sequence)
        if sequence.state == "running":
            self.running.remove(sequence)
            self.add(sequence)

    def _offered(self, sequence: Sequence) -> list[int]:
        """The drafts that may be verified: never more than may still be generated, and none that would cost another its
        blocks."""
        if sequence.proposal is None or not sequence.speculate:
            return []
        start, proposed = sequence.proposal
        left = sequence.max_length - len(sequence.token_ids)
        if sequence.pause_after is not None:
            left = min(left, sequence.pause_after - sequence.num_sampled)
        limit = min(self._max_draft_tokens, left - 1, self._room(sequence))
        return usable_drafts(sequence.token_ids, start, proposed, limit)

    def _room(self, sequence: Sequence) -> int:
        """Tokens for which it has blocks or could have free ones, beyond those known."""
        return (len(sequence.block_ids) + self._pool.num_free) * self._block_tokens - len(sequence.token_ids)


def _candidate(sequence: Sequence, length: int) -> Candidate:
    """With what was said of its first `length` drafts that may be verified."""
    confidence: list[float] = []
    if length and sequence.proposal is not None:
        known = len(sequence.token_ids) - sequence.proposal[0]
        confidence = sequence.confidence[known : known + length]
    return Candidate(sequence.acceptance, sequence.proposer, length, confidence)


def _age(sequence: Sequence) -> int:
    """Smaller is older."""
    return sequence.arrival
