"""The scheduler's invariants under random load: budget, blocks, order, progress. No model: a step is simulated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.draft_policy import Candidate, DraftPolicy
from shared.engine.errors import OutOfBlocks
from shared.engine.sequence import Sequence
from tests.unit.scheduler_world import BLOCK_TOKENS, BUDGET, MAX_DRAFTS, MAX_RUNNING, World, kv_rows, sequence

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


@settings(deadline=None, max_examples=200)
@given(st.lists(requests, min_size=1, max_size=10), st.integers(18, 40), st.randoms(use_true_random=False))
def test_every_sequence_ends_also_where_later_ones_are_older(
    load: list[tuple[int, int, int, int]], blocks: int, order: random.Random
) -> None:
    world = World(blocks)
    ages = order.sample(range(-len(load), 0), len(load))
    arrivals = [(sequence(age, *asked[:2], drafts=asked[2]), asked[3]) for age, asked in zip(ages, load, strict=True)]
    steps = 0
    while arrivals or world.sequences:
        while arrivals and arrivals[0][1] <= 0:
            world.add(arrivals.pop(0)[0])
        arrivals = [(s, delay - 1) for s, delay in arrivals]
        before = list(world.sequences)
        assert world.step() or not before, "something can always run"
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


def test_a_short_prompt_does_not_wait_until_a_longer_one_is_computed() -> None:
    world = World(64)
    world.add(sequence(0, 60, 2))
    world.step()
    world.add(sequence(1, 6, 2))
    assert [(w.sequence.arrival, w.count, w.samples) for w in world.step()] == [(0, 10, False), (1, 6, True)]


@settings(deadline=None)
@given(st.integers(20, 80), st.integers(2, 80), st.integers(2, 80))
def test_the_oldest_prompt_and_the_shortest_get_half_of_each_step_or_all_they_need(
    oldest: int, middle: int, youngest: int
) -> None:
    world = World(64)
    for arrival, length in enumerate((oldest, middle, youngest)):
        world.add(sequence(arrival, length, 1))
    while world.sequences:
        left = {s.arrival: s.num_pending for s in world.sequences}
        counts = {w.sequence.arrival: w.count for w in world.step()}
        assert sum(counts.values()) == min(BUDGET, sum(left.values())), "nothing is kept for nobody"
        first, shortest = min(left), min(left, key=lambda arrival: (left[arrival], arrival))
        assert counts[first] >= min(left[first], BUDGET // 2)
        assert counts[shortest] >= min(left[shortest], BUDGET // 2)


def test_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    world = World(64)
    for arrival in range(3):
        world.add(sequence(arrival, 32, 1))
    ended = []
    while world.sequences:
        ended += [w.sequence.arrival for w in world.step() if w.samples]
    assert ended == [0, 1, 2]


def test_nothing_is_kept_for_a_short_prompt_that_begins_like_the_one_being_computed() -> None:
    world = World(64)
    world.add(chat(0, [*PROMPT, *range(200, 260)]))
    world.add(chat(1, PROMPT))
    assert [(w.sequence.arrival, w.count) for w in world.step()] == [(0, BUDGET)]


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


def test_of_several_younger_ones_only_the_youngest_gives_up_its_blocks() -> None:
    world = World(9)
    old, middle, young = sequence(0, 12, 8), sequence(1, 11, 3), sequence(2, 11, 3)
    for s in (old, middle, young):
        world.add(s)
    while not young.preemptions:
        world.step()
    assert middle.preemptions == old.preemptions == 0
    assert middle.state == "running"
    world.run()


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


class Told(DraftPolicy):
    """A policy that says what it was told to, and notes what it was asked."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(MAX_DRAFTS, BUDGET)
        self.lengths = list(lengths)
        self.asked: list[tuple[list[int], int, int, int]] = []

    def choose(self, candidates: list[Candidate], base_rows: int, *, chunk_tokens: int = 0, spare: int) -> list[int]:
        self.asked.append(([c.length for c in candidates], base_rows, chunk_tokens, spare))
        return (self.lengths + [0] * len(candidates))[: len(candidates)]


class Wild(DraftPolicy):
    """Any lengths that are allowed."""

    def __init__(self, seed: int) -> None:
        super().__init__(MAX_DRAFTS, BUDGET)
        self.rng = random.Random(seed)

    def choose(self, candidates: list[Candidate], base_rows: int, *, chunk_tokens: int = 0, spare: int) -> list[int]:
        lengths = [self.rng.randint(0, c.length) for c in candidates]
        while sum(lengths) > spare:
            lengths[lengths.index(max(lengths))] -= 1
        return lengths


def test_the_policy_says_how_many_of_the_offered_drafts_are_verified() -> None:
    policy = Told(2, 0, 1)
    world = World(40, draft_policy=policy)
    for arrival, drafts in enumerate((9, 9, 2)):
        world.add(sequence(arrival, 1, 20, drafts=drafts))
    silent = sequence(3, 1, 20, drafts=5)
    silent.speculate = False
    world.add(silent)
    work = world.step()
    assert policy.asked == [([3, 3, 2], 4, 0, BUDGET - 4)]
    assert [w.drafts for w in work] == [[7, 7], [], [7], []]
    assert [len(w.offered) for w in work] == [3, 3, 2, 0]


def test_the_policy_learns_of_the_prompts_beside_the_drafts() -> None:
    policy = Told(3)
    world = World(40, draft_policy=policy)
    world.add(sequence(0, 1, 20, drafts=9))
    world.add(sequence(1, 9, 2))
    world.add(sequence(2, 30, 2))
    decode, *prompts = world.step()
    assert policy.asked == [([3], 1, BUDGET - 1, (BUDGET - 1) // 2)]
    assert len(decode.drafts) == 3
    assert [w.decodes for w in (decode, *prompts)] == [True, False, False]
    policy.asked.clear()
    world.run()


def test_chosen_drafts_take_only_free_blocks_also_together() -> None:
    world = World(3, draft_policy=Told(3, 3))
    both = [sequence(arrival, 2, 20, drafts=9) for arrival in range(2)]
    for s in both:
        world.add(s)
    world.step()
    assert [len(w.drafts) for w in world.step()] == [3, 1], "the first took the block that was left"
    assert [s.preemptions for s in both] == [0, 0]


@settings(deadline=None, max_examples=100)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(18, 40), st.integers(0, 1_000))
def test_whatever_the_policy_chooses_all_sequences_end_within_bounds(
    load: list[tuple[int, int, int, int]], blocks: int, seed: int
) -> None:
    world = World(blocks, draft_policy=Wild(seed))
    for arrival, (prompt, output, drafts, _) in enumerate(load):
        world.add(sequence(arrival, prompt, output, drafts=drafts))
    world.run(most=2_000)
    assert world.pool.num_free == blocks


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


# Prefix cache


def chat(arrival: int, prompt: list[int], output: int = 4) -> Sequence:
    return sequence(arrival, prompt, output, salt="tenant")


def ended(world: World, prompt: list[int], output: int = 4) -> None:
    """Leave the blocks of a finished sequence in the cache."""
    world.add(chat(len(world.allocated) + 1000, prompt, output))
    world.run()


PROMPT = list(range(100, 119))


def test_a_prompt_seen_before_is_taken_by_reference_and_only_its_rest_computed() -> None:
    world = World(30)
    first = chat(0, PROMPT, 20)
    world.add(first)
    world.step()
    world.step()
    before = world.rows_computed
    second = chat(1, [*PROMPT[:17], 5, 5, 5, 5])
    world.add(second)
    world.step()
    assert second.block_ids[:4] == first.block_ids[:4]
    assert not set(second.block_ids[4:]) & set(first.block_ids)
    assert second.num_cached == 16
    assert world.rows_computed - before == 1 + 5
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (19 + 21, 16)


@pytest.mark.parametrize(("length", "cached"), [(16, 12), (17, 16), (4, 0), (5, 4), (1, 0)])
def test_the_last_known_token_is_fed_again_even_if_its_block_is_cached(length: int, cached: int) -> None:
    world = World(30)
    ended(world, PROMPT)
    second = chat(1, PROMPT[:length])
    world.add(second)
    work = world.step()
    assert second.num_cached == cached
    assert [(w.count, w.samples) for w in work] == [(length - cached, True)]


def test_other_salts_and_other_beginnings_find_nothing() -> None:
    world = World(30)
    ended(world, PROMPT)
    for i, stranger in enumerate((sequence(1, PROMPT, 4, salt="other"), chat(2, [9, *PROMPT]), chat(3, PROMPT[4:]))):
        world.add(stranger)
        world.step()
        assert stranger.num_cached == 0, i


def test_blocks_are_counted_as_held_only_while_somebody_holds_them() -> None:
    world = World(30)
    ended(world, PROMPT)
    assert (world.pool.num_used, world.pool.num_free) == (0, 30)
    assert world.pool.num_cached == (len(PROMPT) + 4 - 1) // BLOCK_TOKENS
    one, two = chat(1, PROMPT), chat(2, PROMPT)
    world.scheduler.admit(one, 20)
    world.scheduler.admit(two, 20)
    assert world.pool.num_used == 4 + 1 + 1
    world.scheduler.release(one)
    assert world.pool.num_used == 5
    world.scheduler.release(two)
    assert world.pool.num_used == 0


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head() -> None:
    world = World(12)
    old, new, both = [1] * 17, [2] * 17, [3] * 16
    ended(world, old, 1)
    ended(world, new, 1)
    toucher = chat(1, old)
    world.scheduler.admit(toucher, 17)
    world.scheduler.release(toucher)
    world.scheduler.admit(big := chat(2, both), 16 + 4 * BLOCK_TOKENS - 8)
    assert len(big.block_ids) == 6

    def left(prompt: list[int]) -> int:
        probe = chat(3, prompt)
        world.scheduler.admit(probe, 1)
        found = probe.num_cached
        world.scheduler.release(probe)
        return found

    assert left(new) == 8, "two of its four blocks made room, the last ones"
    assert left(old) == 16


def test_admission_counts_cached_blocks_that_it_takes_as_no_longer_free() -> None:
    world = World(6)
    ended(world, [1] * 17, 1)
    held = sequence(1, 1, 1)
    world.scheduler.admit(held, 2 * BLOCK_TOKENS)
    asking = chat(2, [1] * 17)
    with pytest.raises(OutOfBlocks, match="wants 5 more"):
        world.scheduler.admit(asking, 17)
    assert (asking.block_ids, asking.num_computed, world.pool.num_used) == ([], 0, 2)
    world.scheduler.release(held)
    world.scheduler.admit(asking, 17)
    assert asking.num_cached == 16


def test_a_preempted_sequence_comes_back_without_computing_again_what_nobody_took() -> None:
    """Ten blocks: at five each the older one preempts, takes one of the five, and later ends."""
    world = World(10)
    old, young = sequence(0, 8, 16), sequence(1, 8, 16)
    world.add(old)
    world.add(young)
    while not young.preemptions:
        world.step()
    assert len(young.token_ids) == 21
    world.run()
    assert young.preemptions == 1
    assert world.rows_computed == 2 * 23 + BLOCK_TOKENS
    assert young.num_cached == world.scheduler.prefix_hits == 0, "its own blocks are no hit"


def test_only_full_blocks_of_accepted_tokens_can_be_found() -> None:
    world = World(30)
    drafting = chat(0, [7] * 6, 20)
    world.add(drafting)
    world.step()
    drafting.proposal = (7, [7, 8, 8])
    (work,) = world.step()
    assert work.drafts == [7, 8, 8]
    assert drafting.token_ids == [7] * 9
    assert drafting.num_computed == 8
    assert world.pool.num_cached == 2
    follower = chat(1, [7] * 8 + [8] * 5)
    world.add(follower)
    world.step()
    assert follower.num_cached == 8
    world.run()


def test_of_sequences_with_one_prompt_that_arrive_at_once_only_the_oldest_computes_it() -> None:
    world = World(40)
    twins = [chat(i, PROMPT, 6) for i in range(MAX_RUNNING)]
    for twin in twins:
        world.add(twin)
    while any(t.num_pending > 1 for t in twins):
        world.step()
    own = len(PROMPT) % BLOCK_TOKENS
    assert [t.num_cached for t in twins] == [0, 16, 16, 16]
    assert world.rows_computed <= len(PROMPT) + 3 * own + sum(len(t.output_ids) - 1 for t in twins)
    assert len({tuple(t.block_ids[:4]) for t in twins}) == 1
    world.run()


def test_a_twin_waits_a_step_even_when_the_budget_would_hold_both() -> None:
    world = World(40)
    one, two = chat(0, PROMPT[:7]), chat(1, PROMPT[:7])
    world.add(one)
    world.add(two)
    assert [w.sequence for w in world.step()] == [one]
    assert [(w.sequence, w.count) for w in world.step()] == [(one, 1), (two, 3)]
    world.run()


def test_a_short_common_beginning_keeps_nobody_waiting() -> None:
    world = World(40)
    world.add(chat(0, [1] * 4 + [2] * 2))
    world.add(chat(1, [1] * 4 + [3] * 5))
    assert [w.count for w in world.step()] == [6, 9]
    world.run()


def test_the_same_block_computed_twice_is_kept_once_unless_it_may_be_read() -> None:
    for pins in (0, 1):
        world = World(40)
        one, two = chat(0, PROMPT), chat(1, PROMPT)
        for s in (one, two):
            s.pins = pins
            world.sequences.append(s)
            world.scheduler.admit(s, 20)
        for s in (one, two):
            rows = kv_rows(s.salt, PROMPT)
            for position in range(18):
                world.write(s, position, rows[position])
            s.num_computed = 18
            world.scheduler.commit(s)
        world.check_blocks()
        assert (one.block_ids[:4] == two.block_ids[:4]) == (not pins)
        assert world.pool.num_used == (10 if pins else 6)
        for s in (one, two):
            world.add(s)
        world.run()
        assert world.pool.num_used == 0


@pytest.mark.parametrize("sharers", [0, 1])
def test_rewinding_into_a_full_block_takes_it_back_or_leaves_it_to_the_others(sharers: int) -> None:
    world = World(40)
    drafting = sequence(0, PROMPT, 20, salt="tenant", pause_after=9)
    world.add(drafting)
    world.run()
    assert drafting.num_computed == 27
    other = chat(1, [*drafting.token_ids, 1])
    for _ in range(sharers):
        world.sequences.append(other)
        world.scheduler.admit(other, 30)
    blocks = list(drafting.block_ids)
    world.scheduler.rewind(drafting, 22)
    drafting.token_ids = [*drafting.token_ids[:22], 9, 9]
    world.check_blocks()
    assert drafting.num_computed == (20 if sharers else 22)
    assert drafting.block_ids == (blocks[:5] if sharers else blocks)
    world.add(drafting)
    world.run()
    if sharers:
        world.add(other)
        world.run()


def test_a_sequence_that_waits_alone_gets_the_blocks_of_those_behind_it() -> None:
    """Nobody runs who could end, so blocks held by younger waiting ones would never come free."""
    world = World(9)
    first, second, third = sequence(0, 20, 4), sequence(1, 14, 2), sequence(2, 4, 2)
    for loaded in (second, third):
        world.sequences.append(loaded)
        world.scheduler.admit(loaded, 12 if loaded is second else 5)
    second.token_ids = second.token_ids[:12]
    for s in (first, second, third):
        world.add(s)
    assert [w.sequence for w in world.step()][:1] == [first]
    assert (second.preemptions, third.preemptions) == (0, 1), "the youngest went, and that was enough"
    world.run()


def test_what_a_failed_sequence_computed_is_not_found() -> None:
    world = World(30)
    failed = chat(0, PROMPT, 9)
    world.add(failed)
    world.step()
    world.step()
    world.scheduler.disown(failed)
    world.release(failed)
    assert world.pool.num_cached == 0
    world.add(again := chat(1, PROMPT))
    world.step()
    assert again.num_cached == 0


def test_without_prefix_caching_nothing_is_kept_or_found() -> None:
    world = World(30, prefix_caching=False)
    for i in range(3):
        world.add(again := sequence(i, PROMPT, 9, salt="tenant"))
        world.run()
        assert again.num_cached == 0
    assert world.pool.num_cached == 0
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (0, 0)
