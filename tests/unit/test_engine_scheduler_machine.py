"""Ten thousand random operations on scheduler, pool and prefix cache; after each, every block and row is checked."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.engine.errors import OutOfBlocks
from shared.engine.sequence import Sequence
from tests.unit.scheduler_world import BLOCK_TOKENS, MAX_RUNNING, STARTED, World, kv_rows, sequence

BLOCKS = 12
MOST_SEQUENCES = 8


def choose(row: int) -> int:
    return row % 3


def continuation(salt: str, tokens: list[int], count: int) -> list[int]:
    """The tokens that the simulated model goes on with."""
    made = list(tokens)
    for _ in range(count):
        made.append(choose(kv_rows(salt, made)[-1]))
    return made[len(tokens) :]


class SchedulerMachine(RuleBasedStateMachine):
    """Few tokens, salts and beginnings, so that sequences share, part and meet again; few blocks, to fight over."""

    operations: ClassVar[int] = 0
    seen: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(BLOCKS, choose=choose, keep_finished=True)
        self.arrivals = 0
        self.pinned: dict[str, list[int]] = {}

    def any_is(self, *states: str) -> bool:
        return any(s.state in states for s in self.world.sequences)

    def some(self, data: st.DataObject, *states: str) -> Sequence:
        """One of those that are in such a state, of which there are some."""
        found = [s for s in self.world.sequences if s.state in states]
        return found[data.draw(st.integers(0, len(found) - 1))]

    @precondition(lambda self: len(self.world.sequences) < MOST_SEQUENCES)
    @rule(
        shared=st.integers(0, 16),
        own=st.lists(st.integers(0, 2), max_size=4),
        output=st.integers(1, 28),
        salt=st.sampled_from(["a", "a", "b"]),
        pause_after=st.sampled_from([None, None, None, 1, 4]),
        start=st.sampled_from([True, True, False]),
    )
    def create(self, shared: int, own: list[int], output: int, salt: str, pause_after: int | None, start: bool) -> None:
        tokens = [*([0, 1, 2] * 6)[:shared], *own] or [1]
        new = sequence(self.arrivals, tokens, output, salt=salt, pause_after=pause_after)
        self.arrivals += 1
        self.world.sequences.append(new)
        if start:
            self.world.add(new)

    @precondition(lambda self: self.any_is("new"))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        s = self.some(data, "new")
        free, waiting = self.world.pool.num_free, [w for w in self.world.scheduler.waiting if not w.block_ids]
        try:
            self.world.scheduler.admit(s, len(s.token_ids) + 1)
        except OutOfBlocks:
            assert not s.block_ids
            assert self.world.pool.num_free == free
            return
        taken = free - self.world.pool.num_free
        assert not taken or taken + sum(-(-len(w.token_ids) // BLOCK_TOKENS) for w in waiting) <= free
        s.state = "admitted"
        self.seen.add("cached at admission" if s.num_computed else "admitted cold")

    @precondition(lambda self: self.any_is("admitted"))
    @rule(data=st.data(), part=st.floats(0, 1))
    def load(self, data: st.DataObject, part: float) -> None:
        """Somebody writes KV from elsewhere behind what the cache had."""
        s = self.some(data, "admitted")
        loaded = round(part * len(s.token_ids))
        rows = kv_rows(s.salt, s.token_ids)
        for position in range(s.num_computed, loaded):
            self.world.write(s, position, rows[position])
        s.num_computed = max(s.num_computed, min(loaded, len(s.token_ids) - 1))
        self.world.scheduler.commit(s)

    @precondition(lambda self: self.any_is("new", "admitted", "paused"))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        s = self.some(data, "new", "admitted", "paused")
        self.world.add(s)

    @precondition(lambda self: self.any_is(*STARTED))
    @rule(data=st.data(), right=st.integers(0, 3), wrong=st.booleans())
    def propose(self, data: st.DataObject, right: int, wrong: bool) -> None:
        s = self.some(data, *STARTED)
        guess = [*continuation(s.salt, s.token_ids, right), *([0, 0] if wrong else [])]
        s.proposal = (len(s.token_ids), guess)

    @precondition(lambda self: self.any_is("admitted", *STARTED))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        s = self.some(data, "admitted", *STARTED)
        if not s.pins:
            s.pins = 1
            self.pinned[s.seq_id] = s.block_ids[: s.num_computed // BLOCK_TOKENS]

    @precondition(lambda self: bool(self.pinned))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [s for s in self.world.sequences if s.pins]
        s = pinned[data.draw(st.integers(0, len(pinned) - 1))]
        s.pins = 0
        del self.pinned[s.seq_id]

    @precondition(lambda self: self.any_is("paused", "finished", *STARTED))
    @rule(data=st.data(), kept=st.floats(0, 1), tail=st.lists(st.integers(0, 2), min_size=0, max_size=5))
    def rewind(self, data: st.DataObject, kept: float, tail: list[int]) -> None:
        """As the engine does it for drafting: other tokens behind the prompt, then on."""
        s = self.some(data, "paused", "finished", *STARTED)
        if s.pins:
            return
        outputs = s.token_ids[s.num_prompt :]
        tokens = [*s.token_ids[: s.num_prompt + round(kept * len(outputs))], *tail]
        if len(tokens) >= s.max_length:
            return
        same = next((i for i, (a, b) in enumerate(zip(s.token_ids, tokens, strict=False)) if a != b), None)
        common = min(len(s.token_ids), len(tokens)) if same is None else same
        self.world.scheduler.remove(s)
        shared = any(self.world.pool._holders[b] > 1 for b in s.block_ids[common // BLOCK_TOKENS : s.num_committed])
        self.world.scheduler.rewind(s, min(common, len(tokens) - 1))
        s.token_ids, s.proposal = tokens, None
        self.world.add(s)
        self.seen.add("rewound into a shared block" if shared else "rewound")

    @precondition(lambda self: len(self.world.sequences) < MOST_SEQUENCES)
    @precondition(lambda self: self.any_is("paused", "finished", *STARTED))
    @rule(data=st.data(), part=st.floats(0, 1), token=st.integers(0, 2), more=st.integers(1, 9))
    def fork(self, data: st.DataObject, part: float, token: int, more: int) -> None:
        """As the engine does it for a drafter's second thoughts."""
        source = self.some(data, "paused", "finished", *STARTED)
        kept = source.num_prompt + round(part * (len(source.token_ids) - source.num_prompt))
        new = sequence(self.arrivals, [*source.token_ids[:kept], token], more + 1, salt=source.salt)
        if len(new.token_ids) + more > BLOCKS * BLOCK_TOKENS:
            return
        self.arrivals += 1
        free = self.world.pool.num_free
        try:
            copied = self.world.scheduler.fork(source, new, len(new.token_ids) + more)
        except OutOfBlocks:
            assert not new.block_ids
            assert self.world.pool.num_free == free
            return
        if copied is not None:
            for slot in range(BLOCK_TOKENS):
                if (copied[0], slot) in self.world.memory:
                    self.world.memory[copied[1], slot] = self.world.memory[copied[0], slot]
            self.seen.add("forked within a block")
        computed = min(source.num_computed, kept)
        keys = source.block_keys[: computed // BLOCK_TOKENS]
        # A failed one may have disowned a block that others hold too.
        assert new.num_computed >= computed or len(self.world.pool.lookup(keys)) < len(keys)
        new.state = "admitted"
        self.world.sequences.append(new)

    @precondition(lambda self: self.any_is("running"))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Its logits were no numbers: nothing that it computed may be found."""
        s = self.some(data, "running")
        if not s.num_computed:
            return
        self.world.scheduler.disown(s)
        self.world.scheduler.remove(s)
        s.state = "failed"
        assert not set(s.block_ids) & set(self.world.pool._key_of)

    @precondition(lambda self: bool(self.world.sequences))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        s = self.world.sequences[data.draw(st.integers(0, len(self.world.sequences) - 1))]
        self.pinned.pop(s.seq_id, None)
        self.world.release(s)

    @precondition(lambda self: self.any_is(*STARTED))
    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if any(s.state in STARTED for s in self.world.sequences):
                self._step()

    def _step(self) -> None:
        world = self.world
        before = {s.seq_id: (s.preemptions, len(s.token_ids), s.num_computed) for s in world.sequences}
        cached = {s.seq_id: s.num_cached for s in world.sequences}
        keyed = world.pool.num_cached
        started = [s for s in world.sequences if s.state in STARTED]
        oldest = min(started, key=lambda s: s.arrival)
        can_run = oldest.state == "running" and self._room_for(oldest)
        work = world.step()
        for s in world.sequences:
            if s.preemptions > before[s.seq_id][0]:
                self.seen.add("preempted")
                assert not s.pins
                spared = [o for o in world.sequences if o.state in STARTED and o.arrival > s.arrival and o.block_ids]
                assert all(o.pins for o in spared), "a younger one was spared"
            elif s.preemptions and s.num_computed and s in [w.sequence for w in work] and not before[s.seq_id][2]:
                self.seen.add("resumed")
            if s.num_cached > cached[s.seq_id]:
                self.seen.add("cached while it waited" if before[s.seq_id][2] else "cached at resumption")
        if can_run:
            assert (len(oldest.token_ids), oldest.num_computed) > before[oldest.seq_id][1:], "the oldest stood still"
        if world.pool.num_cached < keyed:
            self.seen.add("evicted")
        if any(w.drafts for w in work):
            self.seen.add("drafted")

    def _room_for(self, oldest: Sequence) -> bool:
        """Whether what nobody can be made to give up leaves enough for its next token.

        One that was pinned while it waits without blocks may get some in this step, and keeps them.
        """
        fixed = {b for s in self.world.sequences if s.pins or s.state not in STARTED for b in s.block_ids}
        wanted = self.world.scheduler.blocks_for(len(oldest.token_ids))
        waiting = [s for s in self.world.scheduler.waiting if s.pins and not s.block_ids]
        coming = sum(self.world.scheduler.blocks_for(len(s.token_ids)) for s in waiting)
        return wanted - len(set(oldest.block_ids) & fixed) <= BLOCKS - len(fixed) - coming

    @invariant()
    def every_block_and_row_is_right(self) -> None:
        type(self).operations += 1
        self.world.check_blocks()
        assert len(self.world.scheduler.running) <= MAX_RUNNING
        for s in self.world.sequences:
            if s.seq_id in self.pinned:
                held = self.pinned[s.seq_id]
                assert s.block_ids[: len(held)] == held, "somebody may be reading these"

    def teardown(self) -> None:
        """Whatever happened, the rest ends, with the tokens that the model gives, and nothing stays held."""
        for s in list(self.world.sequences):
            s.pins = 0
            if s.state not in STARTED:
                self.world.release(s)
        self.world.keep_finished = False
        ends = {s.seq_id: continuation(s.salt, s.token_ids, s.max_length - len(s.token_ids)) for s in self.rest()}
        rest, most = self.rest(), 400
        for s in rest:
            s.pause_after = None
        expected = {s.seq_id: [*s.token_ids, *ends[s.seq_id]] for s in rest}
        while self.rest():
            assert self.world.step(), "nothing can run"
            most -= 1
            assert most, "no end"
        for s in rest:
            assert s.token_ids == expected[s.seq_id]
        assert self.world.pool.num_used == 0
        assert self.world.pool.num_free == BLOCKS

    def rest(self) -> list[Sequence]:
        return list(self.world.sequences)


def test_ten_thousand_random_operations_lose_no_block_and_share_only_what_is_final() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=250, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert SchedulerMachine.operations >= 10_000
    assert SchedulerMachine.seen >= {
        "admitted cold",
        "cached at admission",
        "cached at resumption",
        "preempted",
        "evicted",
        "drafted",
        "rewound",
        "forked within a block",
    }
