"""Recent outputs by tenant: what they propose, who sees them, how they are forgotten."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc

from shared.speculation import SUFFIX_TREE, Guess, Proposer, RecentOutputs, SuffixProposer
from shared.speculation.suffix_tree import LEAST_PROBABILITY
from tests.unit.speculation_harness import decode, edited, text


def guess_of(outputs: RecentOutputs, tenant: str, tokens: list[int], most: int = 8) -> Guess | None:
    proposer: Proposer = SuffixProposer(outputs, tenant)
    proposer.extend(tokens)
    return proposer.propose(most)


def test_an_earlier_output_is_continued_from_the_sequences_end() -> None:
    outputs = RecentOutputs()
    outputs.add("a", list(range(100, 200)))
    guess = guess_of(outputs, "a", [1, 2, 3, *range(120, 160)], most=4)
    assert guess is not None
    assert (guess.start, guess.token_ids, guess.proposer) == (43, (160, 161, 162, 163), SUFFIX_TREE)
    assert len(guess.confidence) == 4


def test_nothing_known_is_no_guess() -> None:
    outputs = RecentOutputs()
    assert guess_of(outputs, "a", [1, 2, 3]) is None
    outputs.add("a", [])
    outputs.add("a", [7, 8, 9])
    assert guess_of(outputs, "a", []) is None
    assert guess_of(outputs, "a", [1, 2, 3]) is None


def test_the_same_question_is_answered_from_its_first_token_on() -> None:
    outputs = RecentOutputs()
    template = [1, 2, 3, 4]
    outputs.add("a", [50, 51, 52], prompt=[20, 21, *template])
    outputs.add("a", [60, 61, 62], prompt=[30, 31, *template])
    guess = guess_of(outputs, "a", [20, 21, *template])
    assert guess is not None
    assert guess.token_ids == (50, 51, 52)


def test_the_most_frequent_continuation_wins_and_of_equal_ones_the_newest() -> None:
    outputs = RecentOutputs()
    for last in (10, 11, 11, 12):
        outputs.add("a", [1, 2, 3, last])
    guess = guess_of(outputs, "a", [1, 2, 3])
    assert guess is not None
    assert guess.token_ids == (11,)
    outputs.add("a", [1, 2, 3, 12])
    guess = guess_of(outputs, "a", [1, 2, 3])
    assert guess is not None
    assert guess.token_ids == (12,)


def test_the_longer_match_wins_over_the_more_frequent_one() -> None:
    outputs = RecentOutputs()
    for _ in range(5):
        outputs.add("a", [9, 2, 3, 10])
    outputs.add("a", [1, 2, 3, 11])
    guess = guess_of(outputs, "a", [1, 2, 3])
    assert guess is not None
    assert guess.token_ids == (11,)


def test_a_guess_is_as_long_as_it_is_sure() -> None:
    outputs = RecentOutputs()
    outputs.add("a", list(range(1000)))
    lengths = [len(g.token_ids) for n in (2, 8, 32) if (g := guess_of(outputs, "a", list(range(500 - n, 500)), 200))]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == 3
    for _ in range(10):
        outputs.add("b", list(range(1000)))
    surer = guess_of(outputs, "b", [498, 499], 200)
    assert surer is not None
    assert len(surer.token_ids) > lengths[0]
    assert math.prod(surer.confidence) >= LEAST_PROBABILITY


def test_a_fork_without_a_favourite_is_doubted() -> None:
    outputs = RecentOutputs()
    for last in range(100, 116):
        outputs.add("a", [1, 2, 3, 4, 5, last])
    guess = guess_of(outputs, "a", [1, 2, 3])
    assert guess is not None
    assert guess.token_ids == (4, 5)
    assert min(guess.confidence) > 0.9


def test_tenants_never_see_each_others_outputs() -> None:
    rng = random.Random(5)
    outputs = RecentOutputs(256, 3)
    alphabets = {tenant: range(1000 * n, 1000 * n + 4) for n, tenant in enumerate(("", "a", "b", "ab"))}
    for _ in range(500):
        tenant = rng.choice(list(alphabets))
        outputs.add(tenant, [rng.choice(alphabets[tenant]) for _ in range(rng.randint(1, 60))])
        asked = rng.choice(list(alphabets))
        tail = [rng.choice(alphabets[rng.choice([asked, tenant])]) for _ in range(4)]
        guess = guess_of(outputs, asked, tail)
        assert guess is None or set(guess.token_ids) <= set(alphabets[asked])
        assert len(outputs) <= 3


def test_the_tenant_that_was_silent_longest_is_forgotten() -> None:
    outputs = RecentOutputs(max_tenants=2)
    outputs.add("a", [1, 2, 3])
    outputs.add("b", [1, 2, 3])
    assert guess_of(outputs, "a", [1, 2]) is not None
    outputs.add("c", [1, 2, 3])
    assert [t for t in "abc" if outputs.of(t) is not None] == ["a", "c"]
    assert guess_of(outputs, "b", [1, 2]) is None


def test_a_proposer_outlives_its_tenants_eviction() -> None:
    outputs = RecentOutputs(max_tenants=1)
    outputs.add("a", [1, 2, 3])
    proposer = SuffixProposer(outputs, "a")
    proposer.extend([1, 2])
    outputs.add("b", [5, 6, 7])
    assert proposer.propose(4) is None
    outputs.add("a", [1, 2, 4])
    guess = proposer.propose(4)
    assert guess is not None
    assert guess.token_ids == (4,)


def test_old_outputs_give_way_to_new_ones() -> None:
    outputs = RecentOutputs(max_tokens=512)
    for n in range(20):
        outputs.add("a", list(range(100 * n, 100 * n + 100)))
    known = [n for n in range(20) if guess_of(outputs, "a", list(range(100 * n + 90, 100 * n + 96))) is not None]
    assert known == list(range(15, 20))


def test_memory_is_bounded_over_all_tenants() -> None:
    rng = random.Random(6)
    written = [text(rng, 500) for _ in range(36)]
    gc.collect()
    tracemalloc.start()
    try:
        outputs = RecentOutputs(max_tokens=1024, max_tenants=4)
        for n, tokens in enumerate(written):
            outputs.add(f"tenant-{n % 12}", tokens, prompt=tokens)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 4 * 1024 * 60


def test_a_sequence_keeps_its_tail_alone() -> None:
    outputs = RecentOutputs()
    proposer = SuffixProposer(outputs, "a")
    tokens = list(range(20_000))
    gc.collect()
    tracemalloc.start()
    try:
        for start in range(0, 20_000, 100):
            proposer.extend(tokens[start : start + 100])
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 4096
    outputs.add("a", list(range(19_900, 20_100)))
    guess = proposer.propose(3)
    assert guess is not None
    assert (guess.start, guess.token_ids) == (20_000, (20_000, 20_001, 20_002))


def test_an_answer_that_comes_again_with_changes_takes_few_steps() -> None:
    rng = random.Random(7)
    outputs = RecentOutputs()
    answers = [text(rng, 400) for _ in range(20)]
    for answer in answers:
        outputs.add("a", answer, prompt=text(rng, 30))
    again = edited(rng, answers[3], rate=0.02)
    decoded = decode(SuffixProposer(outputs, "a"), [1, 2, 3], again)
    assert decoded.steps * 4 <= len(again)
    assert decoded.accepted >= 0.6 * decoded.drafted
