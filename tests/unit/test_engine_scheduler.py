"""The scheduler's invariants under random load: budget, blocks, order, progress. No model: a step is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.block_pool import BlockPool
from shared.engine.errors import OutOfBlocks
from shared.engine.scheduler import Scheduler, Work
from shared.engine.sequence import Sequence
from shared.protocol.jobs import SamplingParams

BLOCK_TOKENS = 4
BUDGET = 16
MAX_RUNNING = 4
MAX_DRAFTS = 3


def sequence(arrival: int, prompt: int, output: int, *, drafts: int = 0) -> Sequence:
    return Sequence(
        seq_id=f"s{arrival}",
        token_ids=[7] * prompt,
        num_prompt=prompt,
        params=SamplingParams(max_tokens=output, seed=0),
        max_length=prompt + output,
        speculate=True,
        pause_after=None,
        detokenizer=None,
        arrival=arrival,
        proposal=(0, [7] * (prompt + drafts)) if drafts else None,
    )


@dataclass
class World:
    """A scheduler and the sequences that it was given; `step` acts as the engine, with token 7 as every choice."""

    blocks: int
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=BUDGET,
            max_running=MAX_RUNNING,
            max_draft_tokens=MAX_DRAFTS,
            on_allocate=self.allocated.extend,
        )

    def add(self, new: Sequence) -> None:
        self.sequences.append(new)
        self.scheduler.add(new)

    def step(self) -> list[Work]:
        before = {s.seq_id: s.num_computed for s in self.scheduler.running}
        work = self.scheduler.schedule()
        self.check(work)
        for w in work:
            s = w.sequence
            assert before.get(s.seq_id, 0) == s.num_computed or s.seq_id not in before
            s.num_computed += w.count
            if w.samples:
                s.token_ids += [7] * (len(w.drafts) + 1)
                s.num_computed += len(w.drafts)
            if len(s.token_ids) >= s.max_length:
                self.scheduler.remove(s)
                self.scheduler.release(s)
                self.sequences.remove(s)
        return work

    def check(self, work: list[Work]) -> None:
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
        held = [b for s in self.sequences for b in s.block_ids]
        assert len(held) == len(set(held)) == self.pool.num_used
        assert [s.arrival for s in self.scheduler.waiting] == sorted(s.arrival for s in self.scheduler.waiting)


requests = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 6), st.integers(0, 4))


@settings(deadline=None, max_examples=200)
@given(st.lists(requests, min_size=1, max_size=10), st.integers(18, 40))
def test_every_sequence_ends_within_bounds_and_no_block_is_lost(
    load: list[tuple[int, int, int, int]], blocks: int
) -> None:
    world = World(blocks)
    arrivals = [(sequence(i, *load[i][:2], drafts=load[i][2]), load[i][3]) for i in range(len(load))]
    steps = 0
    while arrivals or world.sequences:
        while arrivals and arrivals[0][1] <= 0:
            world.add(arrivals.pop(0)[0])
        arrivals = [(s, delay - 1) for s, delay in arrivals]
        oldest = min(world.sequences, key=lambda s: s.arrival, default=None)
        progress = (len(oldest.token_ids), oldest.num_computed) if oldest else (0, 0)
        work = world.step()
        if oldest is not None:
            assert work, "the oldest sequence fits alone, so something can always run"
            assert (len(oldest.token_ids), oldest.num_computed) > progress, "the oldest always gets on"
        steps += 1
        assert steps < 2_000
    assert world.pool.num_free == blocks


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 3))
def test_decode_rows_are_in_every_step_however_long_the_prompts(prompt: int, decoding: int) -> None:
    world = World(64)
    for i in range(decoding):
        world.add(sequence(i, 1, 20))
    world.step()
    world.add(sequence(9, prompt + 2, 5))
    for _ in range(6):
        work = world.step()
        assert [w.sequence.arrival for w in work][:decoding] == list(range(decoding))
        assert all(w.count == 1 for w in work[:decoding])


def test_a_long_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    world = World(64)
    world.add(sequence(0, 1, 50))
    world.add(sequence(1, 40, 5))
    counts = []
    while world.sequences[1].num_pending > 1:
        counts.append(world.step()[1].count)
    assert counts == [15, 15, 10]


def test_the_youngest_is_preempted_and_comes_back_before_newer_ones() -> None:
    world = World(6)
    old, young = sequence(0, 8, 16), sequence(1, 8, 8)
    world.add(old)
    world.add(young)
    world.step()
    newer = sequence(2, 4, 2)
    world.add(newer)
    while young.state == "running":
        world.step()
    assert young.state == "waiting"
    assert young.block_ids == []
    assert young.num_computed == 0
    assert old.state == "running"
    while old.state == "running" and old in world.sequences:
        world.step()
        assert not (newer.state == "running" and young.state == "waiting" and young in world.sequences)
    while world.sequences:
        world.step()
    assert world.pool.num_free == 6


def test_a_pinned_sequence_keeps_its_blocks() -> None:
    world = World(6)
    old, young = sequence(0, 8, 16), sequence(1, 8, 8)
    world.add(old)
    world.add(young)
    world.step()
    young.pins = 1
    blocks = list(young.block_ids)
    for _ in range(12):
        world.step()
        assert young.block_ids[: len(blocks)] == blocks
        assert old.state == "running", "it stands still, but gives nothing up"
    young.pins = 0
    while world.sequences:
        world.step()
    assert world.pool.num_free == 6


def test_drafts_never_cost_another_sequence_its_blocks() -> None:
    world = World(4)
    drafting, other = sequence(1, 7, 9, drafts=3), sequence(0, 7, 2)
    world.add(other)
    world.add(drafting)
    world.step()
    work = world.step()
    assert {w.sequence.seq_id for w in work} == {"s0", "s1"}
    assert other.state == "running" or other not in world.sequences


def test_a_new_sequence_is_not_admitted_before_those_that_wait_for_blocks() -> None:
    world = World(6)
    world.add(sequence(0, 8, 16))
    world.add(sequence(1, 8, 8))
    world.step()
    while not world.scheduler.waiting:
        world.step()
    assert world.pool.num_free > 0
    with pytest.raises(OutOfBlocks, match="owed"):
        world.scheduler.admit(sequence(5, 1, 1), 2)
    assert world.sequences[0].block_ids


def test_every_block_is_announced_to_whoever_clears_it() -> None:
    world = World(20)
    for i in range(3):
        world.add(sequence(i, 9, 4))
    world.step()
    assert sorted(world.allocated) == sorted(b for s in world.sequences for b in s.block_ids)


def test_released_sequences_leave_nothing_behind() -> None:
    world = World(20)
    one = sequence(0, 9, 4)
    world.add(one)
    world.step()
    world.scheduler.release(one)
    world.scheduler.release(one)
    assert world.pool.num_used == 0
    assert world.scheduler.schedule() == []
