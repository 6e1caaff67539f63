"""The index of what stood before: against a search through the whole window, and within its bounds."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from shared.speculation import suffix_index
from shared.speculation.suffix_index import DEPTH, DOUBT, LEAST_TOKENS, MAX_OCCURRENCES, NO_TOKEN, SuffixIndex
from tests.unit.speculation_harness import text

WITHOUT_END = 10**9


class Search:
    """The definition: all cells ever written, of which the newest are searched one by one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cells = [NO_TOKEN]

    def begin_text(self) -> None:
        self.cells.append(NO_TOKEN)

    def extend(self, tokens: list[int]) -> None:
        if len(tokens) > self.capacity - 2:
            self.begin_text()
        self.cells += tokens[2 - self.capacity :]

    @property
    def oldest(self) -> int:
        return max(0, len(self.cells) - self.capacity + 1)

    def longest_match(self, tail: list[int]) -> tuple[int, list[int]]:
        best, positions = 2, list[int]()
        for position in range(len(self.cells) - 1, self.oldest, -1):
            if self.cells[position] == NO_TOKEN:
                continue
            length = 0
            while (
                length < min(DEPTH, len(tail))
                and position - length - 1 >= self.oldest
                and self.cells[position - length - 1] == tail[-length - 1]
            ):
                length += 1
            if length > best:
                best, positions = length, []
            if length == best:
                positions.append(position)
        return (best, positions) if positions else (0, [])

    def follow(self, length: int, positions: list[int], most: int) -> tuple[list[int], list[float]]:
        guess, confidence = list[int](), list[float]()
        while len(guess) < most:
            cells = self.cells + guess
            nexts = [cells[p + len(guess)] for p in positions]
            counts = [(nexts.count(t), -nexts.index(t), t) for t in nexts if t != NO_TOKEN]
            if not counts:
                break
            votes, _, best = max(counts)
            confidence.append(votes / (len(positions) + DOUBT / (length + len(guess))))
            positions = [p for p in positions if cells[p + len(guess)] == best]
            guess.append(best)
        return guess, confidence


def random_history(rng: random.Random, index: SuffixIndex) -> Search:
    """The same texts for the index and the search: short ones, long ones, some longer than the window."""
    search = Search(index.capacity)
    vocabulary = rng.choice([2, 3, 8, 50])
    for _ in range(rng.randint(1, 25)):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 5, 30, 100, 300]))]
        if rng.random() < 0.5 and len(tokens) > 4:  # repetitions, so that there are long matches
            tokens = tokens[: len(tokens) // 3] * 3
        for part in [tokens] if rng.random() < 0.5 else [[token] for token in tokens]:
            index.extend(part)
            search.extend(part)
        if rng.random() < 0.6:
            index.begin_text()
            search.begin_text()
    return search


def random_tail(rng: random.Random, cells: list[int]) -> list[int]:
    """A stretch of what was written lately, sometimes with another beginning; often the very end."""
    end = rng.choice([len(cells), rng.randrange(1, len(cells) + 1)])
    tail = cells[max(0, end - rng.choice([1, 2, 3, 10, 100])) : end]
    while NO_TOKEN in tail:
        tail = tail[tail.index(NO_TOKEN) + 1 :]
    return [0, *tail] if rng.random() < 0.3 else tail


@pytest.mark.parametrize("seed", range(150))
def test_matches_and_continuations_are_those_that_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    index = SuffixIndex(rng.choice([256, 300, 512]), WITHOUT_END)
    search = random_history(rng, index)
    for _ in range(10):
        tail = random_tail(rng, search.cells[-400:])
        length, positions = index.longest_match(tail)
        assert (length, positions) == search.longest_match(tail)
        assert index.follow(length, positions, 12) == search.follow(length, positions, 12)


@pytest.mark.parametrize("seed", range(20))
def test_hashes_that_all_collide_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "_MASK", 3)
    rng = random.Random(seed)
    index = SuffixIndex(512, WITHOUT_END)
    search = random_history(rng, index)
    for _ in range(10):
        tail = random_tail(rng, search.cells[-400:])
        assert index.longest_match(tail) == search.longest_match(tail)


def test_a_bounded_walk_finds_more_than_half_of_the_longest_match_and_mostly_all_of_it() -> None:
    rng = random.Random(3)
    index, search = SuffixIndex(4096), Search(4096)
    tokens = text(rng, 4000)
    index.extend(tokens)
    search.extend(tokens)
    exact = 0
    for _ in range(200):
        at = rng.randrange(80, 4000)
        tail = [*tokens[at - 60 : at - rng.randint(2, 60)], *tokens[at - rng.randint(2, 60) : at]]
        length, longest = index.longest_match(tail)[0], search.longest_match(tail)[0]
        assert 2 * length > longest
        exact += length == longest
    assert exact >= 190


@pytest.mark.parametrize("gram", [2, 4, 8, 16])
def test_a_frequent_run_hides_no_match_of_twice_its_length(gram: int) -> None:
    index = SuffixIndex(8192)
    seldom, frequent = list(range(100, 100 + gram)), list(range(gram))
    index.extend([*seldom, *frequent, 77])
    index.extend([*frequent, 99] * (2 * MAX_OCCURRENCES))
    length, positions = index.longest_match([*seldom, *frequent])
    assert length == 2 * gram
    assert index.follow(length, positions, 1)[0] == [77]


def test_how_tokens_arrive_does_not_matter() -> None:
    rng = random.Random(1)
    tokens = text(rng, 3000)
    whole, pieces = SuffixIndex(1024), SuffixIndex(1024)
    whole.extend(tokens[:1000])
    whole.extend(tokens[1000:2000])
    whole.extend(tokens[2000:])
    rest = tokens
    while rest:
        cut = rng.randint(1, 40)
        pieces.extend(rest[:cut])
        rest = rest[cut:]
    for at in range(2100, 3000, 7):
        assert pieces.longest_match(tokens[at - 70 : at]) == whole.longest_match(tokens[at - 70 : at])


def test_texts_do_not_run_into_each_other() -> None:
    index = SuffixIndex(256)
    index.extend([1, 2, 3])
    index.begin_text()
    index.extend([4, 5, 6])
    assert index.longest_match([3, 4]) == (0, [])
    length, positions = index.longest_match([1, 2])
    assert index.follow(length, positions, 5)[0] == [3]


def test_a_loop_goes_on_for_ever() -> None:
    index = SuffixIndex(256)
    index.extend([7, 8, 9, 7, 8, 9, 7])
    length, positions = index.longest_match([7, 8, 9, 7])
    assert index.follow(length, positions, 7)[0] == [8, 9, 7, 8, 9, 7, 8]


def test_the_oldest_tokens_make_room() -> None:
    index = SuffixIndex(256)
    index.extend([1001, 1002, 1003])
    for token in range(252):
        index.extend([token])
        assert index.longest_match([1001, 1002])[0] == 2
    index.extend([999])
    assert index.longest_match([1001, 1002]) == (0, [])
    assert len(index) == 256


def test_positions_start_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "_LAST_POSITION", 1000)
    rng = random.Random(2)
    index = SuffixIndex(256)
    for _ in range(300):
        tokens = [rng.randrange(5) for _ in range(rng.randint(3, 40))]
        index.extend(tokens)
        index.begin_text()
        assert index.end <= 1002
        assert index.longest_match(tokens[:-1])[0] == min(len(tokens) - 1, DEPTH)


@pytest.mark.parametrize("shape", ["text", "one token", "counting"])
def test_memory_is_bounded_by_the_tokens_held(shape: str) -> None:
    rng = random.Random(4)
    tokens = {"text": text(rng, 10_000), "one token": [5] * 10_000, "counting": list(range(10_000))}[shape]
    gc.collect()
    tracemalloc.start()
    try:
        index = SuffixIndex(4096)
        for start in range(0, len(tokens), 500):
            index.extend(tokens[start : start + 500])
            index.begin_text()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == 4096
    assert held <= 60 * 4096


def test_an_index_too_small_for_its_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        SuffixIndex(LEAST_TOKENS - 1)
