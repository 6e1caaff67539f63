"""A scheduler with a simulated engine and memory: every row holds a digest of all tokens up to it, so reuse shows."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.engine.block_pool import BlockPool
from shared.engine.draft_policy import DraftPolicy
from shared.engine.scheduler import Scheduler, Work
from shared.engine.sequence import Sequence as EngineSequence
from shared.engine.verification import verify
from shared.protocol.jobs import SamplingParams

BLOCK_TOKENS = 4
BUDGET = 16
MAX_RUNNING = 4
MAX_DRAFTS = 3
STARTED = ("running", "waiting")


def sequence(
    arrival: int,
    prompt: int | list[int],
    output: int,
    *,
    drafts: int = 0,
    salt: str | None = None,
    pause_after: int | None = None,
) -> EngineSequence:
    """A prompt of that many sevens, or of these tokens. Sequences share blocks only when they are given one salt."""
    tokens = [7] * prompt if isinstance(prompt, int) else list(prompt)
    return EngineSequence(
        seq_id=f"s{arrival}",
        token_ids=tokens,
        num_prompt=len(tokens),
        params=SamplingParams(max_tokens=output, seed=0),
        max_length=len(tokens) + output,
        speculate=True,
        pause_after=pause_after,
        detokenizer=None,
        arrival=arrival,
        proposal=(0, [7] * (len(tokens) + drafts)) if drafts else None,
        salt=f"s{arrival}" if salt is None else salt,
    )


def kv_rows(salt: str, tokens: Sequence[int]) -> list[int]:
    """What the memory of a sequence must hold."""
    value = zlib.crc32(salt.encode())
    rows = []
    for token in tokens:
        value = hash((value, token))
        rows.append(value)
    return rows


@dataclass
class World:
    """A scheduler and the sequences that it was given; `step` acts as the engine, which chooses by the last row."""

    blocks: int
    choose: Callable[[int], int] = lambda _: 7
    keep_finished: bool = False
    prefix_caching: bool = True
    draft_policy: DraftPolicy | None = None
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    sequences: list[EngineSequence] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    rows_computed: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=BUDGET,
            max_running=MAX_RUNNING,
            max_draft_tokens=MAX_DRAFTS,
            prefix_caching=self.prefix_caching,
            on_allocate=self._clear,
            draft_policy=self.draft_policy,
        )

    def _clear(self, block_ids: list[int]) -> None:
        self.allocated += block_ids
        for block_id in block_ids:
            for slot in range(BLOCK_TOKENS):
                self.memory.pop((block_id, slot), None)

    def add(self, new: EngineSequence) -> None:
        if new not in self.sequences:
            self.sequences.append(new)
        new.num_sampled = 0
        self.scheduler.add(new)

    def release(self, old: EngineSequence) -> None:
        self.sequences.remove(old)
        self.scheduler.release(old)
        old.state = "released"

    def run(self, most: int = 500) -> None:
        """Step until every started sequence has ended or paused."""
        while any(s.state in STARTED for s in self.sequences):
            assert self.step(), "nothing can run"
            most -= 1
            assert most, "no end"

    def step(self) -> list[Work]:
        work = self.scheduler.schedule()
        self._check(work)
        for w in work:
            self._finish(w, self._compute(w))
        self.check_blocks()
        return work

    def write(self, s: EngineSequence, position: int, value: int) -> None:
        block_id = s.block_ids[position // BLOCK_TOKENS]
        assert [block_id in other.block_ids for other in self.sequences].count(True) == 1, "a shared block is read only"
        assert block_id not in self.pool._key_of, "a cached block is read only"
        self.memory[block_id, position % BLOCK_TOKENS] = value

    def _compute(self, work: Work) -> list[int]:
        """Write the rows of the known tokens and the drafts; returns what the choosing rows hold."""
        s, start = work.sequence, work.sequence.num_computed
        value = zlib.crc32(s.salt.encode())
        if start:
            value = self.memory[s.block_ids[(start - 1) // BLOCK_TOKENS], (start - 1) % BLOCK_TOKENS]
        rows = []
        for i, token in enumerate([*s.token_ids[start : start + work.count], *work.drafts]):
            value = hash((value, token))
            self.write(s, start + i, value)
            rows.append(value)
        self.rows_computed += len(rows)
        return rows[work.count - 1 :]

    def _finish(self, work: Work, rows: list[int]) -> None:
        s = work.sequence
        s.num_computed += work.count
        if work.samples:
            chosen, accepted = verify(work.drafts, lambda i: self.choose(rows[i]))
            s.token_ids += chosen
            s.num_computed += accepted
            s.num_sampled += len(chosen)
            if len(s.token_ids) >= s.max_length:
                self.scheduler.remove(s)
                s.state = "finished"
            elif s.pause_after is not None and s.num_sampled >= s.pause_after:
                self.scheduler.remove(s)
                s.state = "paused"
        self.scheduler.commit(s)
        if s.state == "finished" and not self.keep_finished:
            self.release(s)

    def _check(self, work: list[Work]) -> None:
        assert sum(w.count + len(w.drafts) for w in work) <= BUDGET
        assert len(self.scheduler.running) <= MAX_RUNNING
        assert len({w.sequence.seq_id for w in work}) == len(work)
        seen_prompt = False
        for w in work:
            s = w.sequence
            assert s.state == "running"
            assert w.count >= 1
            assert s.num_computed + w.count + len(w.drafts) <= len(s.block_ids) * BLOCK_TOKENS
            assert w.samples == (s.num_computed + w.count == len(s.token_ids))
            assert len(w.drafts) <= MAX_DRAFTS
            assert len(s.token_ids) + len(w.drafts) < s.max_length
            seen_prompt |= s.num_pending > 1
            assert s.num_pending > 1 or not seen_prompt, "decode rows stand before prompt chunks"

    def check_blocks(self) -> None:
        """Every block is in one place, its holders are counted, and no one's writable part is known to others."""
        pool = self.pool
        holders = Counter(b for s in self.sequences for b in s.block_ids)
        assert pool._holders == holders
        empty, idle = set(pool._empty), set(pool._idle)
        assert sorted([*empty, *idle, *holders]) == list(range(self.blocks))
        assert (pool.num_free, pool.num_used) == (self.blocks - len(holders), len(holders))
        assert {b: k for k, b in pool._block_of.items()} == pool._key_of
        assert idle <= set(pool._key_of)
        assert not empty & set(pool._key_of)
        for s in self.sequences:
            assert len(set(s.block_ids)) == len(s.block_ids)
            full = s.num_computed // BLOCK_TOKENS
            assert s.num_committed == (full if self.prefix_caching else 0)
            assert all(holders[b] == 1 and b not in pool._key_of for b in s.block_ids[full:])
            assert s.num_computed < len(s.token_ids), "the last known token is always fed"
            rows = kv_rows(s.salt, s.token_ids[: s.num_computed])
            assert rows == [
                self.memory[s.block_ids[p // BLOCK_TOKENS], p % BLOCK_TOKENS] for p in range(s.num_computed)
            ]
        ages = [s.arrival for s in self.scheduler.waiting]
        assert ages == sorted(ages)
