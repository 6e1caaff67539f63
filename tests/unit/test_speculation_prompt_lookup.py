"""Prompt lookup: the longest match, the given text, and the way back after a change."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from shared.speculation import PROMPT_LOOKUP, PromptLookup, Proposer
from shared.speculation.prompt_lookup import ALIGNED, FOUND
from shared.speculation.suffix_index import DEPTH
from tests.unit.speculation_harness import decode, edited, text

NEW = 5000
"""Tokens from here on occur in no original."""


def guessed(proposer: Proposer, most: int = 6) -> tuple[int, ...]:
    guess = proposer.propose(most)
    return guess.token_ids if guess is not None else ()


def naive(tokens: list[int], most: int) -> tuple[int, ...]:
    """The definition: longest match of the end; the most frequent token behind it, of equals the newest; and so on."""
    lengths = {
        start: next(
            (n for n in range(min(DEPTH, start)) if tokens[start - 1 - n] != tokens[len(tokens) - 1 - n]),
            min(DEPTH, start),
        )
        for start in range(1, len(tokens))
    }
    longest = max(lengths.values(), default=0)
    places = [start for start, length in lengths.items() if length == longest and longest >= 2]
    known = list(tokens)
    for offset in range(most if places else 0):
        nexts = [known[place + offset] for place in reversed(places)]
        best = max(nexts, key=nexts.count)
        places = [place for place in places if known[place + offset] == best]
        known.append(best)
    return tuple(known[len(tokens) :])


@pytest.mark.parametrize("seed", range(150))
def test_a_guess_is_what_a_search_would_find(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([2, 4, 9])) for _ in range(rng.randint(0, 60))]
    lookup = PromptLookup()
    lookup.extend(tokens)
    assert guessed(lookup, 12) == naive(tokens, 12)


def test_asking_again_gives_the_same_guess() -> None:
    rng = random.Random(1)
    original = text(rng, 300)
    lookup = PromptLookup(original)
    lookup.extend([*original, 1, 2, 3])
    for token in edited(rng, original, 0.05):
        first = lookup.propose(8)
        assert lookup.propose(8) == first
        assert guessed(lookup, 3) == (first.token_ids[:3] if first is not None else ())
        lookup.extend([token])


def test_guesses_start_at_the_sequences_end_whatever_the_reference() -> None:
    lookup = PromptLookup(reference=[7, 8, 9])
    lookup.extend([1, 2])
    guess = lookup.propose(2)
    assert guess is not None
    assert (guess.start, guess.token_ids, guess.proposer) == (2, (7, 8), PROMPT_LOOKUP)
    assert len(guess.confidence) == 2
    assert len(lookup) == 2


def test_a_repeating_text_is_continued_for_ever() -> None:
    lookup = PromptLookup()
    lookup.extend([7, 8, 9, 7, 8, 9, 7])
    assert guessed(lookup, 7) == (8, 9, 7, 8, 9, 7, 8)
    lookup.extend([8, 9, 7, 8, 9, 7, 8])
    assert guessed(lookup, 4) == (9, 7, 8, 9)


def test_a_reference_is_expected_from_its_beginning() -> None:
    lookup = PromptLookup(reference=list(range(100, 200)))
    lookup.extend(list(range(50)))
    assert guessed(lookup) == tuple(range(100, 106))
    lookup.extend([100, 101, 102])
    assert guessed(lookup) == tuple(range(103, 109))


def test_a_reference_that_has_ended_is_no_guess() -> None:
    lookup = PromptLookup(reference=[100, 101, 102, 103])
    lookup.extend([1, 2, 3])
    lookup.extend([100, 101])
    assert guessed(lookup) == (102, 103)
    lookup.extend([102, 103])
    assert guessed(lookup) == ()


def test_a_sequence_taken_over_half_way_goes_on_in_the_middle_of_the_reference() -> None:
    lookup = PromptLookup(reference=list(range(100, 200)))
    lookup.extend([*range(50), *range(100, 150)])
    assert guessed(lookup) == tuple(range(150, 156))


@pytest.fixture(params=["reference", "prompt"])
def copying(request: pytest.FixtureRequest) -> PromptLookup:
    """A sequence that copies 0 to 499, given as reference or as its prompt, and has come to 99."""
    original = list(range(500))
    lookup = PromptLookup(original if request.param == "reference" else ())
    lookup.extend([NEW, NEW + 1] if request.param == "reference" else [*original, NEW, NEW + 1])
    for token in range(100):
        lookup.propose(4)
        lookup.extend([token])
    assert guessed(lookup) == tuple(range(100, 106))
    return lookup


def test_after_a_replaced_token_it_goes_on_at_once(copying: PromptLookup) -> None:
    copying.extend([NEW + 2])
    assert guessed(copying) == tuple(range(101, 107))
    copying.extend([101])
    assert guessed(copying) == tuple(range(102, 108))


def test_two_replaced_tokens_within_one_step_are_two_changes(copying: PromptLookup) -> None:
    copying.extend([NEW + 2])
    copying.extend([101, 102, 103, 104, NEW + 3])
    assert guessed(copying) == tuple(range(106, 112))


def test_a_replaced_token_right_behind_another_change_is_one_more(copying: PromptLookup) -> None:
    copying.extend([NEW + 2, NEW + 3, 106, 107, 108])
    copying.extend([NEW + 4])
    assert guessed(copying) == tuple(range(110, 116))


@pytest.mark.parametrize("gap", [1, 2, 5, 20])
def test_after_a_deletion_it_goes_on_at_once(copying: PromptLookup, gap: int) -> None:
    copying.extend([100 + gap])
    assert guessed(copying) == tuple(range(101 + gap, 107 + gap))


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_after_an_insertion_one_token_shows_the_way_back(copying: PromptLookup, length: int) -> None:
    for token in range(length):
        copying.extend([NEW + 10 + token])
    copying.extend([100])
    assert guessed(copying) == tuple(range(101, 107))


@pytest.mark.parametrize(("removed", "inserted"), [(1, 3), (3, 1), (10, 10), (15, 2), (2, 15)])
def test_after_a_replaced_stretch_one_token_shows_the_way_back(
    copying: PromptLookup, removed: int, inserted: int
) -> None:
    for token in range(inserted):
        copying.extend([NEW + 10 + token])
    copying.extend([100 + removed])
    assert guessed(copying) == tuple(range(101 + removed, 107 + removed))


def test_changes_that_come_within_one_step_are_followed(copying: PromptLookup) -> None:
    copying.extend([100, NEW + 2, NEW + 3, 101, 102, 104, 105])
    assert guessed(copying) == tuple(range(106, 112))


def test_a_moved_stretch_is_found_as_soon_as_it_is_long_enough(copying: PromptLookup) -> None:
    copying.extend(list(range(400, 400 + ALIGNED + FOUND)))
    assert guessed(copying) == tuple(range(411, 417))
    copying.extend(list(range(411, 440)))
    assert guessed(copying) == tuple(range(440, 446))


def test_a_place_in_the_neighbourhood_is_believed_before_the_same_tokens_elsewhere() -> None:
    line = [1, 2, 3, 4]
    original = [*range(100, 120), *line, *range(120, 140), *line, *range(140, 160), *line, *range(160, 180)]
    lookup = PromptLookup(reference=original)
    lookup.extend([NEW])
    lookup.extend(list(range(100, 118)))
    lookup.extend([NEW + 1, 1, 2])  # the line comes three times; the first is meant
    assert guessed(lookup) == (3, 4, 120, 121, 122, 123)


def test_what_is_far_from_the_original_is_not_guessed_for_long(copying: PromptLookup) -> None:
    copying.extend([NEW + 2])
    assert guessed(copying)
    copying.extend([NEW + 3])
    assert guessed(copying) == ()
    copying.extend(list(range(NEW + 4, NEW + 200)))
    assert guessed(copying) == ()
    copying.extend(list(range(NEW + 200, NEW + 300)))
    copying.extend([100])
    assert guessed(copying) == ()
    copying.extend([101])
    assert guessed(copying) == tuple(range(102, 108))


def test_the_nearest_of_several_places_is_the_way_back() -> None:
    original = list(range(200))
    original[103] = original[112] = NEW + 50
    lookup = PromptLookup(original)
    lookup.extend([NEW])
    lookup.extend(list(range(100)))
    lookup.extend([NEW + 50])
    assert guessed(lookup) == tuple(range(104, 110))


def test_a_long_match_elsewhere_is_believed_before_one_token_in_the_neighbourhood() -> None:
    original = list(range(500))
    original[110] = 309
    lookup = PromptLookup(original)
    lookup.extend([NEW])
    lookup.extend(list(range(100)))
    lookup.extend(list(range(300, 310)))
    assert guessed(lookup) == tuple(range(310, 316))


def test_of_several_originals_the_one_that_is_copied_is_followed() -> None:
    same = list(range(ALIGNED))
    lookup = PromptLookup()
    lookup.extend([*same, *range(100, 120), *same, *range(200, 220), *same, *range(300, 320), *same])
    assert guessed(lookup, 2) == (300, 301)
    lookup.extend([200])
    lookup.extend([NEW])
    assert guessed(lookup, 3) == (202, 203, 204)


def test_a_reference_longer_than_the_window_is_used_from_its_beginning() -> None:
    lookup = PromptLookup(list(range(1000)), max_tokens=256)
    lookup.extend([NEW])
    assert guessed(lookup) == tuple(range(6))


def test_a_reference_that_the_prompt_pushed_out_is_not_guessed() -> None:
    lookup = PromptLookup(list(range(100)), max_tokens=256)
    lookup.extend(list(range(NEW, NEW + 250)))
    assert guessed(lookup) == ()


def test_confidence_follows_how_well_the_text_was_copied() -> None:
    rng = random.Random(3)
    original = list(range(400))
    surer = []
    for rate in (0.0, 0.2):
        lookup = PromptLookup(original)
        lookup.extend([NEW])
        for token in edited(rng, original[:200], rate, "r"):
            lookup.extend([token])
        lookup.extend([200, 201, 202])
        guess = lookup.propose(1)
        assert guess is not None
        surer.append(guess.confidence[0])
    assert surer[0] > 0.95
    assert 0.3 < surer[1] < 0.9


@pytest.mark.parametrize("given", ["reference", "prompt"])
@pytest.mark.parametrize(("kinds", "rate", "per_step"), [("r", 0.03, 4.3), ("i", 0.03, 4.5), ("d", 0.03, 7.0)])
def test_a_text_repeated_with_changes_takes_few_steps(kinds: str, rate: float, per_step: float, given: str) -> None:
    rng = random.Random(9)
    tokens = steps = drafted = accepted = 0
    for _ in range(6):
        original = text(rng, 500)
        output = edited(rng, original, rate, kinds)
        lookup = PromptLookup(original if given == "reference" else ())
        decoded = decode(lookup, [NEW] if given == "reference" else [*original, NEW], output)
        tokens += len(output)
        steps += decoded.steps
        drafted += decoded.drafted
        accepted += decoded.accepted
    assert tokens >= per_step * steps
    assert accepted >= 0.5 * drafted


def test_memory_is_bounded() -> None:
    tokens = list(range(6000))
    gc.collect()
    tracemalloc.start()
    try:
        lookup = PromptLookup(tokens, max_tokens=2048)
        for start in range(0, 6000, 100):
            lookup.extend(tokens[start : start + 100])
            lookup.propose(8)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 60 * 2048


@pytest.mark.parametrize("seed", range(60))
def test_no_history_breaks_it(seed: int) -> None:
    """A window that turns over many times, references of all sizes: guesses are tokens that occurred, within bounds."""
    rng = random.Random(seed)
    vocabulary = rng.choice([1, 2, 5, 300])
    reference = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 30, 600]))]
    lookup = PromptLookup(reference, max_tokens=256)
    length = 0
    for _ in range(200):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 1, 3, 9, 300]))]
        lookup.extend(tokens)
        length += len(tokens)
        most = rng.choice([1, 5, 40])
        guess = lookup.propose(most)
        if guess is not None:
            assert guess.start == length
            assert 0 < len(guess.token_ids) == len(guess.confidence) <= most
            assert all(0 <= token < vocabulary for token in guess.token_ids)
            assert all(0 < confidence <= 1 for confidence in guess.confidence)
