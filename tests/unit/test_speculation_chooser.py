"""Choosing between proposers: scored by what came, used or not; bounded; and nobody is believed for what he claims."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from dataclasses import dataclass, field

import pytest

from shared.speculation import Chooser, Guess
from shared.speculation.chooser import (
    EXPLORATION,
    LEAST,
    MAX_GUESS_TOKENS,
    MAX_PROPOSERS,
    MEMORY,
    MOST,
    TRUST,
    UNKNOWN,
)
from tests.unit.speculation_harness import common_prefix

WRONG = 9_999


def best_of(chooser: Chooser, most: int = 8) -> str | None:
    guess = chooser.best(most)
    return guess.proposer if guess is not None else None


@dataclass
class Naive:
    """The definition: all tokens, all guesses, everything worked out anew from the beginning."""

    tokens: list[int]
    newest: dict[str, Guess] = field(default_factory=dict)
    scores: dict[str, dict[int, tuple[float, bool]]] = field(default_factory=dict)
    """By proposer and position: the confidence of the first token scored there, and whether it was right."""

    def offer(self, guess: Guess) -> None:
        self.scores.setdefault(guess.proposer, {})
        self.newest[guess.proposer] = guess
        self.score()

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.score()

    def score(self) -> None:
        for name, guess in self.newest.items():
            scores = self.scores[name]
            for position, token, confidence in zip(
                range(guess.start, len(self.tokens)), guess.token_ids, guess.confidence, strict=False
            ):
                right = self.tokens[position] == token
                if position > max(scores, default=-1):
                    scores[position] = (confidence, right)
                if not right:
                    break

    def best(self, most: int) -> tuple[str | None, tuple[int, ...]]:
        length = len(self.tokens)
        worths: list[tuple[float, int, str, tuple[int, ...]]] = []
        for order, (name, guess) in enumerate(self.newest.items()):
            known = length - guess.start
            if guess.token_ids[:known] != tuple(self.tokens[guess.start :])[: len(guess.token_ids)]:
                continue
            scores = self.scores[name]
            last = max(scores, default=0)
            weights = {position: MEMORY ** (last - position) for position in scores}
            evidence = sum(weights.values())
            wrong = sum(weights[p] * (not right) for p, (_, right) in scores.items())
            expected = sum(weights[p] * (1 - confidence) for p, (confidence, _) in scores.items())
            trust = TRUST * expected / evidence if evidence else 1.0
            excess = (wrong + trust) / (expected + trust)
            chances = [min(max(1 - (1 - c) * excess, LEAST), MOST) for c in guess.confidence[known : known + most]]
            worth = sum(math.prod(chances[: n + 1]) for n in range(len(chances)))
            worth *= 1 + EXPLORATION / (1 + evidence * MEMORY ** (length - last - 1))
            if chances:
                worths.append((worth, -order, name, guess.token_ids[known : known + most]))
        if not worths:
            return None, ()
        _, _, name, tokens = max(worths)
        return name, tokens


@pytest.mark.parametrize("seed", range(100))
def test_the_choice_is_that_of_the_definition(seed: int) -> None:
    """Proposers of all qualities, that come early, late, often, seldom, and are more or less sure of themselves."""
    rng = random.Random(seed)
    output = [rng.randrange(50) for _ in range(400)]
    skill = {name: rng.random() for name in "abc"}
    chooser, naive = Chooser(0), Naive([])
    length = 0
    while length < 300:
        for name in rng.sample("abc", rng.randint(0, 3)):
            start = max(0, length - rng.choice([0, 0, 0, 1, 3, 12]))
            right = output[start : start + rng.randint(0, 10)]
            tokens = tuple(t if rng.random() < skill[name] else WRONG for t in right)
            guess = Guess(start, tokens, tuple(rng.uniform(LEAST, MOST) for _ in tokens), name)
            chooser.offer(guess)
            naive.offer(guess)
        most = rng.randint(1, 8)
        best = chooser.best(most)
        expected = naive.best(most)
        if best is None:
            assert expected == (None, ())
        else:
            assert (best.proposer, best.token_ids) == expected
            assert best.start == length
            assert len(best.confidence) == len(best.token_ids)
        came = output[length : length + rng.choice([1, 1, 2, 5])]
        chooser.extend(came)
        naive.extend(came)
        length += len(came)
        assert chooser.length == length


def run(chooser: Chooser, chances: dict[str, float], tokens: int, rng: random.Random) -> dict[str, int]:
    """Proposers that guess eight tokens each step, each right with its chance; returns how often each was chosen."""
    chosen = dict.fromkeys(chances, 0)
    end = chooser.length + tokens
    while chooser.length < end:
        start = chooser.length
        output = tuple(range(start, start + 9))
        for name, chance in chances.items():
            chooser.offer(Guess(start, tuple(t if rng.random() < chance else WRONG for t in output[:8]), (), name))
        best = chooser.best(8)
        assert best is not None
        chosen[best.proposer] += 1
        right = common_prefix(best.token_ids, output)
        chooser.extend(output[: right + 1])
    return chosen


def test_the_better_proposer_is_chosen_and_one_that_was_not_chosen_wins_when_it_becomes_better() -> None:
    rng = random.Random(1)
    chooser = Chooser(0)
    run(chooser, {"a": 0.9, "b": 0.3}, 100, rng)
    chosen = run(chooser, {"a": 0.9, "b": 0.3}, 200, rng)
    assert chosen["a"] > 20 * chosen["b"]
    run(chooser, {"a": 0.3, "b": 0.9}, 60, rng)
    chosen = run(chooser, {"a": 0.3, "b": 0.9}, 200, rng)
    assert chosen["b"] > 5 * chosen["a"]


def test_the_guess_of_one_proposer_can_be_asked_for() -> None:
    chooser = Chooser(10)
    chooser.offer(Guess(10, (1, 2, 3), (0.9, 0.9, 0.9), "sure"))
    chooser.offer(Guess(10, (4, 5, 6), (0.3, 0.2, 0.1), "unsure"))
    assert best_of(chooser) == "sure"
    assert chooser.best(8, "sure") == chooser.best(8)
    unsure = chooser.best(2, "unsure")
    assert unsure is not None
    assert (unsure.start, unsure.token_ids, unsure.proposer) == (10, (4, 5), "unsure")
    assert unsure.confidence == pytest.approx((0.3, 0.2))
    assert chooser.best(8, "nobody") is None
    chooser.extend([1])
    assert chooser.best(8, "unsure") is None
    assert chooser.best(8, "sure").token_ids == (2, 3)  # type: ignore[union-attr]


def test_own_confidence_decides_between_guesses_while_it_is_true() -> None:
    chooser = Chooser(0)
    chooser.offer(Guess(0, (1, 2, 3), (0.9, 0.9, 0.9), "sure"))
    chooser.offer(Guess(0, (4, 5, 6), (0.3, 0.3, 0.3), "unsure"))
    assert best_of(chooser) == "sure"
    chooser.offer(Guess(0, (1,), (0.9,), "sure"))
    chooser.offer(Guess(0, (4, 5, 6, 7), (0.8, 0.8, 0.8, 0.8), "unsure"))
    assert best_of(chooser) == "unsure"
    assert best_of(chooser, 1) == "sure"


@pytest.mark.parametrize("claim", [1.0, 0.999, 7.0, math.inf, math.nan])
def test_who_claims_to_be_sure_and_is_wrong_is_soon_not_believed(claim: float) -> None:
    chooser = Chooser(0)
    for start in range(5):
        chooser.offer(Guess(start, (WRONG,) * 8, (claim,) * 8, "liar"))
        chooser.offer(Guess(start, (start, start + 1), (0.5, 0.5), "honest"))
        chooser.extend([start])
    chooser.offer(Guess(5, (WRONG,) * 8, (claim,) * 8, "liar"))
    chooser.offer(Guess(5, (5,), (0.5,), "honest"))
    assert best_of(chooser) == "honest"


def test_what_is_no_number_does_no_lasting_harm() -> None:
    chooser = Chooser(0)
    chooser.offer(Guess(0, (0,), (math.nan,), "a"))
    chooser.extend([0])
    chooser.offer(Guess(1, (1,), (0.5,), "a"))
    assert best_of(chooser) == "a"


def test_who_doubts_himself_and_is_right_is_believed_more_and_more() -> None:
    chooser = Chooser(0)
    chances: list[float] = []
    for start in range(20):
        chooser.offer(Guess(start, (start,), (0.3,), "modest"))
        best = chooser.best(1)
        assert best is not None
        chances += best.confidence
        chooser.extend([start])
    assert chances[0] == pytest.approx(0.3)
    assert chances == sorted(chances)
    assert chances[-1] > 0.8


def test_of_two_equal_guesses_that_of_the_seldom_tried_proposer_is_tried() -> None:
    chooser = Chooser(0)
    for start in range(8):  # as good as it claims, so that its confidence is not corrected
        chooser.offer(Guess(start, (start if start % 2 else WRONG,), (0.5,), "old"))
        chooser.extend([start])
    chooser.offer(Guess(8, (8,), (0.5,), "old"))
    chooser.offer(Guess(8, (9,), (0.5,), "new"))
    assert best_of(chooser) == "new"


def test_what_was_learned_long_ago_fades() -> None:
    forgetful = Chooser(0)
    for start in range(10):
        forgetful.offer(Guess(start, (WRONG,), (), "a"))
        forgetful.extend([start])
    forgetful.offer(Guess(10, (10,), (), "a"))
    bad = forgetful.best(1)
    forgetful.extend(list(range(10, 300)))
    forgetful.offer(Guess(300, (300,), (), "a"))
    forgetful.extend([300])
    forgetful.offer(Guess(301, (301,), (), "a"))
    better = forgetful.best(1)
    assert bad is not None
    assert better is not None
    assert bad.confidence[0] < 0.2 < UNKNOWN < better.confidence[0]


def test_a_guess_is_used_as_far_as_it_agrees_and_not_behind_a_mistake() -> None:
    chooser = Chooser(10)
    chooser.offer(Guess(10, (1, 2, 3, 4), (), "a"))
    chooser.extend([1, 2])
    best = chooser.best(8)
    assert best is not None
    assert (best.start, best.token_ids) == (12, (3, 4))
    chooser.extend([WRONG])
    assert chooser.best(8) is None
    chooser.extend([4])
    assert chooser.best(8) is None


def test_a_late_guess_is_scored_and_its_rest_is_used() -> None:
    chooser = Chooser(10)
    chooser.extend([1, 2, 3])
    chooser.offer(Guess(10, (1, 2, 3, 4), (), "late"))
    best = chooser.best(8)
    assert best is not None
    assert (best.start, best.token_ids) == (13, (4,))
    assert best.confidence[0] > UNKNOWN  # three tokens were right
    chooser.offer(Guess(11, (2, WRONG, 4, 5), (), "wrong"))
    chooser.offer(Guess(11, (2, 3), (), "too late"))
    assert best_of(chooser) == "late"
    assert {name: tally.late for name, tally in chooser.tallies.items()} == {"late": 0, "wrong": 0, "too late": 1}
    assert chooser.tallies["late"].offered == 1


def test_a_position_counts_once_however_often_it_is_guessed() -> None:
    once, often = Chooser(0), Chooser(0)
    once.extend([1, 2, 3])
    often.extend([1, 2, 3])
    once.offer(Guess(0, (1, 2, 3, 4), (), "a"))
    for _ in range(20):
        often.offer(Guess(0, (1, 2, 3, 4), (), "a"))
    assert once.best(4) == often.best(4)


def test_a_guess_from_further_on_continues_the_one_at_hand() -> None:
    chooser = Chooser(5)
    chooser.offer(Guess(5, (1, 2), (0.9, 0.8), "a"))
    chooser.offer(Guess(7, (3,), (0.7,), "a"))
    chooser.extend([1])
    chooser.offer(Guess(8, (4, 5), (0.6, 0.5), "a"))
    best = chooser.best(8)
    assert best is not None
    assert (best.start, best.token_ids) == (6, (2, 3, 4, 5))
    chooser.offer(Guess(7, (30,), (0.7,), "a"))
    best = chooser.best(8)
    assert best is not None
    assert best.token_ids == (2, 30)


def test_a_guess_from_further_on_that_continues_nothing_is_ignored() -> None:
    chooser = Chooser(5)
    chooser.offer(Guess(7, (3,), (), "a"))
    chooser.extend([1, 2])
    assert chooser.best(8) is None
    chooser.offer(Guess(7, (3, 4), (), "a"))
    chooser.offer(Guess(10, (6,), (), "a"))  # a gap
    best = chooser.best(8)
    assert best is not None
    assert best.token_ids == (3, 4)
    chooser.extend([WRONG])
    chooser.offer(Guess(9, (5,), (), "a"))  # goes on from what was refuted
    chooser.extend([WRONG])
    assert chooser.best(8) is None


def test_a_guess_that_is_fed_token_by_token_goes_on_for_ever() -> None:
    chooser = Chooser(0)
    chooser.offer(Guess(0, (0, 1), (), "a"))
    for length in range(500):
        chooser.offer(Guess(length + 2, (length + 2,), (), "a"))
        chooser.extend([length])
        best = chooser.best(8)
        assert best is not None
        assert best.token_ids == (length + 1, length + 2)


def test_a_newer_guess_replaces_the_older_one_of_the_same_proposer() -> None:
    chooser = Chooser(0)
    chooser.offer(Guess(0, (1, 2, 3), (), "a"))
    chooser.offer(Guess(0, (4,), (), "a"))
    best = chooser.best(8)
    assert best is not None
    assert best.token_ids == (4,)
    chooser.offer(Guess(0, (), (), "a"))
    assert chooser.best(8) is None


def test_proposers_and_guesses_are_bounded() -> None:
    chooser = Chooser(0)
    for n in range(100):
        chooser.offer(Guess(0, tuple(range(1000)), (), f"proposer-{n}"))
    assert len(chooser.tallies) == MAX_PROPOSERS
    best = chooser.best(1000)
    assert best is not None
    assert len(best.token_ids) == MAX_GUESS_TOKENS


@pytest.mark.parametrize("start", [-5, -1, 0, 10, 10**9])
def test_guesses_for_other_places_do_no_harm(start: int) -> None:
    chooser = Chooser(200)
    chooser.extend(list(range(200, 300)))
    chooser.offer(Guess(300, (300, 301), (), "good"))
    chooser.offer(Guess(start, tuple(range(start, start + 400)), (), "odd"))
    assert best_of(chooser) == "good"
    chooser.extend([300])
    assert best_of(chooser) == "good"


def test_a_guess_too_old_to_be_compared_proves_nothing() -> None:
    chooser = Chooser(200)
    chooser.extend(list(range(200, 300)))
    chooser.offer(Guess(200, tuple(range(300 - MAX_GUESS_TOKENS, 300)), (), "a"))
    chooser.offer(Guess(300, (300,), (), "a"))
    best = chooser.best(1)
    assert best is not None
    assert best.confidence == (UNKNOWN,)


def test_a_confidence_that_fits_no_guess_is_taken_for_none() -> None:
    chooser = Chooser(0)
    chooser.offer(Guess(0, (1, 2), (0.9,), "a"))
    best = chooser.best(8)
    assert best is not None
    assert best.confidence == (UNKNOWN, UNKNOWN)


def test_memory_does_not_grow_with_the_sequence() -> None:
    rng = random.Random(2)
    chooser = Chooser(0)
    chances = {"a": 0.9, "b": 0.5, "c": 0.1}
    run(chooser, chances, 500, rng)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(chooser, chances, 5000, rng)
        gc.collect()  # empties the interpreter's lists of unused tuples too
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown <= 20_000
