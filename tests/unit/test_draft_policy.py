"""How many drafts are verified: what is best by the measured cost and acceptance, found out from the steps alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.draft_policy import (
    EXPLORE_EVERY,
    FRESH_STEPS,
    LOOK_EVERY,
    MARGIN,
    MOST_PROPOSERS,
    NEARLY,
    PROBE_EVERY,
    SETTLED,
    Acceptance,
    Candidate,
    DraftPolicy,
    StepCost,
    best_lengths,
)

MOST = 8
MAX_ROWS = 128

STAIRS = {3: 0.041, 4: 0.055, 8: 0.090, 16: 0.096, 24: 0.135, 32: 0.175, 64: 0.319, 128: 0.660}
"""Seconds by padded rows, with jumps: up to 3 rows are all one, and 16 cost hardly more than 8."""


def padded(rows: int) -> int:
    return next(n for n in STAIRS if n >= rows)


def stairs(rows: int) -> float:
    return STAIRS[padded(rows)]


def steep(rows: int) -> float:
    return 0.04 + 0.01 * rows


def rate_of(
    lengths: Sequence[int], chances: list[list[float]], base: int, cost_s: Callable[[int], float], extra_s: float = 0
) -> float:
    tokens = base + sum(sum(row[:n]) for row, n in zip(chances, lengths, strict=True))
    return tokens / (cost_s(base + sum(lengths)) + extra_s)


def brute_force(
    chances: list[list[float]], base: int, cost_s: Callable[[int], float], extra_s: float, spare: int
) -> float:
    """The rate of the fewest drafts that are nearly as good as the best of all ways, and of those free beside them."""
    best: dict[int, float] = {}
    """By the number of drafts."""
    for lengths in itertools.product(*(range(len(row) + 1) for row in chances)):
        total = sum(lengths)
        if total <= spare:
            best[total] = max(best.get(total, 0.0), rate_of(lengths, chances, base, cost_s, extra_s))
    most = max(best.values())
    if most <= best[0] * (1 + MARGIN):
        return best[0]
    enough = next(total for total in sorted(best) if total and best[total] >= most * (1 - NEARLY))
    return max(best[n] for n in best if n >= enough and cost_s(base + n) + extra_s <= cost_s(base + enough) + extra_s)


def even(probability: float, count: int = MOST) -> list[float]:
    """The chances of drafts that are all as likely if those before them were right."""
    return [probability ** (i + 1) for i in range(count)]


falling = st.lists(st.floats(0, 1), max_size=4).map(lambda row: list(itertools.accumulate(row, mul)))


@settings(deadline=None)
@given(
    st.lists(falling, min_size=1, max_size=4),
    st.integers(0, 5),
    st.lists(st.floats(0, 0.05), min_size=40, max_size=40),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 20),
)
def test_the_choice_is_the_best_of_all_for_any_cost_with_jumps(
    chances: list[list[float]], others: int, rises: list[float], extra_s: float, spare: int
) -> None:
    curve = np.array([0.03 + total for total in itertools.accumulate(rises)])
    base = len(chances) + others
    lengths, rate = best_lengths(chances, base, curve, extra_s, spare)
    assert all(n <= len(row) for n, row in zip(lengths, chances, strict=True))
    assert sum(lengths) <= spare
    assert rate == pytest.approx(rate_of(lengths, chances, base, curve.__getitem__, extra_s))
    assert rate == pytest.approx(brute_force(chances, base, curve.__getitem__, extra_s, spare))


def test_rows_that_pad_anyway_are_filled_and_a_jump_is_taken_only_where_it_pays() -> None:
    curve = np.array([stairs(rows) for rows in range(MAX_ROWS)])
    assert best_lengths([even(0.5)], 1, curve, 0.0, 100)[0] == [2], "two rows more cost nothing"
    assert best_lengths([even(0.95, 16)], 1, curve, 0.0, 100)[0] == [15], "over the jump, up to where it is flat"
    assert best_lengths([even(0.3)], 3, curve, 0.0, 100)[0] == [0]
    assert best_lengths([even(0.9), even(0.2)], 2, curve, 0.0, 1)[0] == [1, 0], "the likelier one has the free row"


def test_of_row_counts_that_are_nearly_as_good_the_smallest_is_taken() -> None:
    curve = np.array([0.03 + 0.0006 * rows for rows in range(MAX_ROWS)])
    chances = [[0.6, 0.3, 0.05, 0.03]]
    rates = [rate_of([n], chances, 1, curve.__getitem__) for n in range(5)]
    assert max(rates) == rates[3] > rates[2] > (1 - NEARLY) * rates[3] > rates[1]
    lengths, rate = best_lengths(chances, 1, curve, 0.0, 100)
    assert lengths == [2]
    assert rate == pytest.approx(rates[2])


def measured(
    policy: DraftPolicy, cost_s: Callable[[int], float], counts: list[int], pad: Callable[[int], int] = padded
) -> None:
    for rows in counts * (SETTLED + 1):
        policy.cost.observe(rows, pad(rows), cost_s(rows))


def taught(policy: DraftPolicy, acceptance: Acceptance, right: int, times: int = 30) -> None:
    """All but every fourth verification had `right` drafts right, and then a wrong one."""
    for i in range(times):
        policy.judge(acceptance, "p", [1] * MOST, [1] * (right if i % 4 else right // 2) + [2])


@pytest.mark.parametrize("base", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_with_measured_costs_the_choice_equals_brute_force(base: int, right: int) -> None:
    policy = DraftPolicy(4, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5, 9, 17])
    sequences = [Acceptance() for _ in range(min(base, 3))]
    for i, acceptance in enumerate(sequences):
        taught(policy, acceptance, max(right - i, 0))
    chances = [policy.chances(a, "p") for a in sequences]
    lengths = policy.choose([Candidate(a, "p", 4) for a in sequences], base, spare=100)
    found = rate_of(lengths, chances, base, stairs)
    assert found == pytest.approx(brute_force(chances, base, stairs, 0.0, 100), rel=1e-6)


def test_few_drafts_are_tried_while_nothing_is_known() -> None:
    for base, most in ((1, 3), (4, 1), (16, 0)):
        lengths = DraftPolicy(16, MAX_ROWS).choose([Candidate(Acceptance(), "p", 16)] * base, base, spare=100)
        assert min(most, 1) <= max(lengths) <= most


def test_no_more_drafts_are_chosen_than_were_offered_and_fit() -> None:
    policy = DraftPolicy(MOST, 20)
    measured(policy, lambda _: 0.04, [1, 4, 8, 16, 20])
    sure = [Acceptance() for _ in range(3)]
    for acceptance in sure:
        taught(policy, acceptance, MOST)
    candidates = [Candidate(a, "p", n) for a, n in zip(sure, (8, 2, 0), strict=True)]
    assert policy.choose(candidates, 3, spare=100) == [8, 2, 0]
    assert sum(policy.choose(candidates, 3, spare=5)) == 5
    assert sum(policy.choose(candidates, 15, spare=100)) == 5, "a step has 20 rows at most"
    assert policy.choose([], 3, spare=5) == []


# What a step costs


def test_the_first_step_of_a_row_count_is_not_believed() -> None:
    cost = StepCost(MAX_ROWS)
    cost.observe(1, 3, 9.0)
    before = cost.expected()
    assert before[3] / before[1] == 1, "one padded count, one cost"
    cost.observe(2, 3, 0.041)
    assert cost.expected()[1:4] == pytest.approx([0.041] * 3)


def test_a_few_slow_steps_hardly_move_an_estimate_and_a_lasting_change_does() -> None:
    cost = StepCost(MAX_ROWS)
    rng = random.Random(1)
    for _ in range(60):
        cost.observe(4, 4, 0.055 * rng.uniform(0.95, 1.05) * (5 if rng.random() < 0.05 else 1))
    assert cost.expected()[4] == pytest.approx(0.055, rel=0.06)
    for _ in range(40):
        cost.observe(4, 4, 0.110)
    assert cost.expected()[4] == pytest.approx(0.110, rel=0.06)


def test_one_slow_step_among_the_first_does_not_bar_a_row_count() -> None:
    for slow in range(SETTLED):
        cost = StepCost(MAX_ROWS)
        for i in range(SETTLED + 1):
            cost.observe(8, 8, 0.9 if i == slow + 1 else 0.09)
        assert cost.expected()[8] == pytest.approx(0.09)


def test_between_measured_row_counts_it_is_interpolated_and_beyond_them_the_prior_goes_on() -> None:
    cost = StepCost(MAX_ROWS)
    for rows, seconds in ((2, 0.040), (10, 0.080)):
        cost.observe(rows, rows, seconds)
        cost.observe(rows, rows, seconds)
    curve = cost.expected()
    assert curve[2] == pytest.approx(0.040)
    assert curve[10] == pytest.approx(0.080)
    assert curve[6] == pytest.approx(0.060, rel=0.05)
    assert all(a < b for a, b in itertools.pairwise(curve[1:]))


def test_a_step_with_a_prompt_in_it_spoils_no_row_count() -> None:
    cost = StepCost(MAX_ROWS)
    for _ in range(5):
        cost.observe(4, 4, 0.055)
    before = cost.expected()
    for tokens in (100, 20, 60):
        cost.observe_chunk(4, tokens, 0.055 + tokens * 0.005)
    assert (cost.expected() == before).all()
    assert cost.chunk_token_s == pytest.approx(0.005)


def test_beside_a_prompt_drafts_cost_relatively_less() -> None:
    chances = [even(0.6, 4)]
    curve = np.array([stairs(rows) for rows in range(MAX_ROWS)])
    assert best_lengths(chances, 3, curve, 0.0, 100)[0] == [0]
    assert best_lengths(chances, 3, curve, 0.5, 100)[0] != [0]
    policy = DraftPolicy(4, MAX_ROWS)
    measured(policy, stairs, [3, 4, 5, 9])
    policy.cost.observe_chunk(3, 100, 0.541)
    acceptance = Acceptance()
    candidates = [Candidate(acceptance, "p", 4)]
    assert policy.choose(candidates, 3, spare=100) == [0]
    assert policy.choose(candidates, 3, chunk_tokens=100, spare=100) != [0]


# What drafts are worth


def probabilities(policy: DraftPolicy, acceptance: Acceptance, proposer: str) -> list[float]:
    """Of each position, given that those before it were right."""
    chances = policy.chances(acceptance, proposer)
    return [b / a for a, b in itertools.pairwise([1.0, *chances])]


def test_a_lying_proposer_is_not_believed_for_long_and_the_next_sequence_knows() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5, 9])
    first, second = Acceptance(), Acceptance()
    drafted = 0
    for _ in range(50):
        (length,) = policy.choose([Candidate(first, "liar", MOST)], 3, spare=100)
        drafted += length
        policy.judge(first, "liar", [1] * MOST, [2])
    assert drafted <= 8
    assert probabilities(policy, second, "liar")[0] < 0.1
    assert probabilities(policy, second, "another")[0] == 0.5
    assert policy.choose([Candidate(second, "liar", MOST)], 3, spare=100) == [0]


def test_text_that_becomes_easy_is_noticed_without_verifying_anything() -> None:
    """What was offered is compared with the tokens that came, so nothing has to be tried."""
    policy = DraftPolicy(MOST, MAX_ROWS)
    measured(policy, steep, [3, 4, 5, 9], pad=int)
    acceptance = Acceptance()
    for _ in range(30):
        policy.judge(acceptance, "p", [1] * MOST, [2])
    candidates = [Candidate(acceptance, "p", MOST)]
    assert policy.choose(candidates, 3, spare=100) == [0]
    for _ in range(12):
        policy.judge(acceptance, "p", [1] * MOST, [1])
    assert policy.choose(candidates, 3, spare=100) != [0]


def test_acceptance_is_told_apart_by_position_sequence_and_proposer() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    copying, chatting = Acceptance(), Acceptance()
    for i in range(61):
        policy.judge(copying, "lookup", [1] * MOST, [1] * MOST if i % 3 else [2])
        policy.judge(copying, "model", [1] * MOST, [1, 1, 2])
        policy.judge(chatting, "lookup", [1] * MOST, [2])
    lookup, model = probabilities(policy, copying, "lookup"), probabilities(policy, copying, "model")
    assert 0.3 < lookup[0] < 0.7
    assert min(lookup[1:]) > lookup[0] + 0.1, "where the first is right the others are"
    assert min(model[:2]) > 0.8
    assert model[2] < 0.3
    assert probabilities(policy, chatting, "lookup")[0] < 0.2
    assert 0.15 < probabilities(policy, Acceptance(), "lookup")[0] < 0.5, "a new sequence begins with the mean"


def test_what_is_said_of_the_drafts_tells_more_than_what_became_of_others() -> None:
    """Many of a sure proposal are verified though none was right before, and none of an unsure one though all were."""
    policy = DraftPolicy(MOST, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5, 9])
    failed, trusted = Acceptance(), Acceptance()
    for _ in range(30):
        policy.judge(failed, "p", [1] * MOST, [2])
        policy.judge(trusted, "q", [1] * MOST, [1] * MOST + [2])

    def lengths(*confidence: float, base: int = 3) -> list[int]:
        candidates = [Candidate(failed, "p", MOST, confidence), Candidate(trusted, "q", MOST, confidence)]
        return [policy.choose([candidate], base, spare=100)[0] for candidate in candidates]

    assert lengths() == [0, 8]
    assert lengths(*[0.98] * MOST) == [8, 8]
    assert lengths(*[0.05] * MOST) == [0, 0]
    assert lengths(0.99, 0.99, *[0.01] * 6, base=1) == [2, 2]
    assert lengths(*[0.98] * 5, *[0.01] * 3) == [5, 5], "no further than it is sure and rows cost nothing"


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0.02, 0.98), max_size=4), min_size=1, max_size=3), st.integers(0, 3))
def test_with_what_is_said_the_choice_equals_brute_force(stated: list[list[float]], others: int) -> None:
    policy = DraftPolicy(4, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5, 9, 17])
    base = len(stated) + others
    lengths = policy.choose([Candidate(Acceptance(), "p", len(s), s) for s in stated], base, spare=100)
    chances = [list(itertools.accumulate(s, mul)) for s in stated]
    best = brute_force(chances, base, stairs, 0.0, 100)
    assert rate_of(lengths, chances, base, stairs) == pytest.approx(best, rel=1e-6)


def test_drafts_that_end_the_sequence_are_no_failures() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    acceptance = Acceptance()
    before = probabilities(policy, acceptance, "p")
    policy.judge(acceptance, "p", [1, 1, 1, 1], [1, 1])
    after = probabilities(policy, acceptance, "p")
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_names_from_outside_take_a_bounded_memory() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    acceptance = Acceptance()
    for i in range(1_000):
        policy.judge(acceptance, f"name {i}", [1] * 40, [1] * 41)
    assert len(policy._records) <= MOST_PROPOSERS + 1
    assert len(acceptance.records) <= MOST_PROPOSERS + 1
    assert len(acceptance.chances) <= MOST_PROPOSERS + 1


def test_what_is_worth_asking_for_follows_load_and_text() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    measured(policy, steep, [1, 2, 3, 4, 5, 9, 16, 17], pad=int)
    easy, hard = Acceptance(), Acceptance()
    for _ in range(30):
        policy.judge(easy, "p", [1] * MOST, [1, 1, 1, 1, 2])
        policy.judge(hard, "p", [1] * MOST, [2])
    policy.choose([Candidate(easy, "p", 3), Candidate(hard, "p", 3)], 2, spare=100)
    assert easy.wanted > 1
    assert hard.wanted == 0
    policy.choose([Candidate(easy, "p", 3), Candidate(hard, "p", 3)], 16, spare=100)
    assert easy.wanted == 0


def test_a_sequence_without_proposals_is_worth_asking_about_now_and_then() -> None:
    policy = DraftPolicy(MOST, MAX_ROWS)
    measured(policy, stairs, [3, 4, 5, 9])
    hard = Acceptance()
    for _ in range(30):
        policy.judge(hard, "p", [1] * MOST, [2])
    policy.choose([Candidate(hard, "p", 1)], 3, spare=100)
    asked = 0
    for _ in range(10 * PROBE_EVERY):
        assert policy.choose([Candidate(hard, "", 0)], 3, spare=100) == [0]
        asked += hard.wanted > 0
    assert 10 <= asked <= 10 * LOOK_EVERY


# Both, learned from the steps alone


@dataclass
class Machine:
    """Steps of a simulated engine: what they take, and what becomes of drafts that are right with known probability."""

    cost_s: Callable[[int], float]
    seed: int = 0
    noise: float = 0.08
    most: int = 16
    policy: DraftPolicy = field(init=False)
    rng: random.Random = field(init=False)
    seconds: float = 0.0
    tokens: int = 0
    totals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.most, MAX_ROWS)
        self.rng = random.Random(self.seed)

    def run(self, steps: int, sequences: list[tuple[Acceptance, float]], *, drafting: bool = True) -> float:
        """Tokens per second."""
        self.seconds, self.tokens = 0.0, 0
        for _ in range(steps):
            self._step(sequences, self.most if drafting else 0)
        return self.tokens / self.seconds

    def _step(self, sequences: list[tuple[Acceptance, float]], most: int) -> None:
        base = len(sequences)
        lengths = self.policy.choose([Candidate(a, "p", most) for a, _ in sequences], base, spare=MAX_ROWS - base)
        for (acceptance, probability), length in zip(sequences, lengths, strict=True):
            right = next((i for i in range(length + 1) if self.rng.random() >= probability), length + 1)
            made = [1] * length + [2] if right > length else [1] * right + [2]
            if right > length:
                made[-1] = 1
            self.tokens += len(made)
            self.policy.judge(acceptance, "p", [1] * most, made)
        rows = base + sum(lengths)
        seconds = self.cost_s(rows) * self.rng.lognormvariate(0, self.noise) * (3 if self.rng.random() < 0.02 else 1)
        self.seconds += self.cost_s(rows)
        self.totals.append(rows)
        self.policy.cost.observe(rows, padded(rows), seconds)


def smooth(rows: int) -> float:
    return 0.03 + 0.004 * padded(rows)


def best_rate(base: int, probability: float, cost_s: Callable[[int], float], most: int) -> float:
    curve = np.array([cost_s(rows) for rows in range(MAX_ROWS + 1)])
    return best_lengths([even(probability, most)] * base, base, curve, 0.0, MAX_ROWS - base)[1]


@pytest.mark.parametrize("cost_s", [stairs, smooth])
@pytest.mark.parametrize("base", [1, 2, 8])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8, 0.97])
def test_from_the_steps_alone_it_finds_nearly_the_best(
    cost_s: Callable[[int], float], base: int, probability: float
) -> None:
    machine = Machine(cost_s)
    sequences = [(Acceptance(), probability) for _ in range(base)]
    plain = base / cost_s(base)
    assert machine.run(300, sequences) >= 0.93 * plain, "learning costs little"
    found = machine.run(800, sequences)
    assert found >= 0.97 * plain, "it never costs"
    assert found >= 0.93 * best_rate(base, probability, cost_s, machine.most)


def steady(policy: DraftPolicy, chances: list[float], cost_s: Callable[[int], float], steps: int) -> list[int]:
    """Rows of each step of one sequence whose drafts always have these chances."""
    acceptance = Acceptance()
    acceptance.chances["p"] = chances
    rows = []
    for _ in range(steps):
        rows.append(1 + policy.choose([Candidate(acceptance, "p", len(chances))], 1, spare=100)[0])
        policy.cost.observe(rows[-1], padded(rows[-1]), cost_s(rows[-1]))
    return rows


def test_a_flat_stretch_beyond_a_jump_is_found_though_it_was_thought_too_dear() -> None:
    policy = DraftPolicy(15, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5])
    chances = even(0.9, 15)
    rows = steady(policy, chances, stairs, EXPLORE_EVERY * (SETTLED + 2))
    assert rows[:EXPLORE_EVERY].count(16) <= 1
    assert rows[0] == 3, "the best as far as is known"
    assert rows[-1] == 16
    assert rate_of([15], [chances], 1, stairs) > 1.2 * rate_of([2], [chances], 1, stairs)


def test_a_row_count_that_was_too_slow_is_tried_again_after_a_while() -> None:
    policy = DraftPolicy(15, MAX_ROWS)
    measured(policy, stairs, [1, 4, 5])
    measured(policy, lambda _: 0.5, [9])
    assert set(steady(policy, even(0.9, 15), stairs, FRESH_STEPS - 50)) == {3}
    assert steady(policy, even(0.9, 15), stairs, 100 + EXPLORE_EVERY * SETTLED * 2)[-1] == 16


def test_tries_of_unknown_row_counts_are_rare() -> None:
    machine = Machine(lambda rows: 0.04 + 0.02 * padded(rows), noise=0.02)
    sequences = [(Acceptance(), 0.4) for _ in range(4)]
    machine.run(600, sequences)
    known = len(machine.totals)
    machine.run(1_200, sequences)
    rare = [rows for rows in machine.totals[known:] if rows > 4]
    assert len(rare) <= 1_200 / EXPLORE_EVERY


@pytest.mark.parametrize("probability", [0.3, 0.6])
def test_when_others_come_and_go_it_follows(probability: float) -> None:
    machine = Machine(stairs, seed=3)
    for base in (1, 16, 2, 12, 1, 8):
        sequences = [(Acceptance(), probability) for _ in range(base)]
        assert machine.run(200, sequences) >= 0.93 * base / stairs(base)


def test_a_machine_that_becomes_slower_for_many_rows_is_followed() -> None:
    slow = False
    machine = Machine(lambda rows: stairs(rows) * (6 if slow and rows > 3 else 1))
    sequences = [(Acceptance(), 0.9)]
    machine.run(500, sequences)
    assert machine.totals[-1] > 3
    slow = True
    machine.run(100, sequences)
    assert sum(rows > 3 for rows in machine.totals[-60:]) <= 4
    slow = False
    machine.run(2_500, sequences)
    assert max(machine.totals[-50:], key=machine.totals[-50:].count) > 3
