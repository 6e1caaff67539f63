"""Prompt lookup and the adaptive draft length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.decode.draft_length import DraftLength
from services.draft.prompt_lookup import MAX_N, MIN_N, PromptLookup

token_lists = st.lists(st.integers(0, 3), max_size=60)


def naive(tokens: list[int], max_tokens: int) -> list[int]:
    """The definition: longest n-gram at the end, latest earlier occurrence, copied on with its own guesses."""
    for n in range(MAX_N, MIN_N - 1, -1):
        gram = tokens[-n:]
        if len(gram) < n:
            continue
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == gram:
                text = list(tokens)
                for offset in range(max_tokens):
                    text.append(text[start + n + offset])
                return text[len(tokens) :]
    return []


@given(token_lists, st.integers(1, 20))
def test_prompt_lookup_is_what_a_search_would_find(tokens: list[int], max_tokens: int) -> None:
    lookup = PromptLookup()
    lookup.extend(tokens)
    assert lookup.propose(max_tokens) == naive(tokens, max_tokens)


@given(token_lists, st.data())
def test_prompt_lookup_does_not_depend_on_how_tokens_arrive(tokens: list[int], data: st.DataObject) -> None:
    whole, pieces = PromptLookup(), PromptLookup()
    whole.extend(tokens)
    rest = tokens
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.extend(rest[:cut])
        rest = rest[cut:]
    assert pieces.propose(8) == whole.propose(8)


def test_a_repeating_text_is_continued_for_ever() -> None:
    lookup = PromptLookup()
    lookup.extend([7, 8, 9, 7, 8, 9, 7])
    assert lookup.propose(7) == [8, 9, 7, 8, 9, 7, 8]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=200), st.integers(1, 8))
def test_draft_length_stays_in_its_bounds(outcomes: list[tuple[int, int]], most: int) -> None:
    length = DraftLength(most)
    for drafted, accepted in outcomes:
        length.observe(drafted, min(drafted, accepted))
        assert 0 <= length.length <= most


def test_wrong_guesses_switch_drafting_off_and_probes_switch_it_on_again() -> None:
    length = DraftLength(8)
    for _ in range(40):
        length.observe(length.length, 0)
        if length.length == 0:
            break
    assert length.length == 0
    for _ in range(200):
        length.observe(length.length, length.length)
    assert length.length == 8
