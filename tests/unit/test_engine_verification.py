"""Drafts never change what is generated; proposals are used only where they agree with what a sequence has."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.verification import extended, usable_drafts, verify

tokens = st.integers(0, 3)


def target(context: list[int]) -> int:
    """A target whose choice depends on all that stands before."""
    return sum((i + 1) * t for i, t in enumerate(context)) % 4


def choice_after(context: list[int], drafts: list[int], count: int) -> int:
    return target([*context, *drafts[:count]])


@given(st.lists(tokens, min_size=1, max_size=6), st.lists(st.lists(tokens, max_size=5), min_size=1, max_size=8))
def test_verified_decoding_gives_the_tokens_of_undrafted_decoding(prompt: list[int], drafts: list[list[int]]) -> None:
    drafted = list(prompt)
    for run in drafts:
        chosen, accepted = verify(run, partial(choice_after, list(drafted), run))
        assert len(chosen) == accepted + 1
        assert chosen[:accepted] == run[:accepted]
        drafted += chosen
    plain = list(prompt)
    while len(plain) < len(drafted):
        plain.append(target(plain))
    assert drafted == plain


@given(st.lists(tokens, min_size=1, max_size=5))
def test_right_drafts_are_all_accepted_and_one_more_token_comes_with_them(prompt: list[int]) -> None:
    run: list[int] = []
    for _ in range(4):
        run.append(target([*prompt, *run]))
    chosen, accepted = verify(run, partial(choice_after, prompt, run))
    assert accepted == 4
    assert chosen == [*run, target([*prompt, *run])]


def test_no_choice_is_asked_for_behind_a_wrong_draft() -> None:
    asked = []

    def choose(i: int) -> int:
        asked.append(i)
        return 7

    assert verify([7, 8, 7], choose) == ([7, 7], 1)
    assert asked == [0, 1]


def test_a_right_draft_that_ends_the_sequence_ends_the_run_and_counts_as_right() -> None:
    chosen_so_far: list[int] = []

    def choose(i: int) -> int:
        chosen_so_far.append([7, 8, 9, 9][i])
        return chosen_so_far[-1]

    assert verify([7, 8, 9], choose, lambda: chosen_so_far[-1] == 8) == ([7, 8], 2)
    assert chosen_so_far == [7, 8]


@given(st.lists(tokens, min_size=1, max_size=8), st.integers(0, 10), st.lists(tokens, max_size=8), st.integers(-1, 5))
def test_only_the_part_of_a_proposal_that_continues_the_sequence_is_used(
    known: list[int], start: int, proposed: list[int], limit: int
) -> None:
    drafts = usable_drafts(known, start, proposed, limit)
    assert len(drafts) <= max(limit, 0)
    overlap = proposed[: max(len(known) - start, 0)]
    agrees = start <= len(known) and known[start : start + len(overlap)] == overlap
    if agrees:
        assert drafts == proposed[len(known) - start :][: max(limit, 0)]
    else:
        assert drafts == []


def test_a_proposal_that_lags_behind_the_sequence_gives_its_rest() -> None:
    assert usable_drafts([1, 2, 3, 4], 1, [2, 3, 4, 9, 8], limit=5) == [9, 8]


def test_a_proposal_before_the_beginning_or_beyond_the_end_gives_nothing() -> None:
    assert usable_drafts([1, 2], 3, [5], limit=5) == []
    assert usable_drafts([1, 2], -1, [0, 1, 2, 5], limit=5) == []


@given(st.lists(tokens, max_size=6), st.integers(0, 7), st.lists(tokens, max_size=6))
def test_the_later_proposal_counts_where_it_speaks_and_the_earlier_before_it(
    present: list[int], offset: int, proposed: list[int]
) -> None:
    found = extended(present, offset, proposed)
    if offset > len(present):
        assert found is None, "what lies between is not known"
    elif found is None:
        assert present[offset : offset + len(proposed)] == proposed, "nothing new"
    else:
        assert found == [*present[:offset], *proposed]
        assert found != present[: len(found)]


def test_a_run_that_goes_on_from_the_last_guess_extends_it() -> None:
    assert extended([4, 5], 2, [6, 7]) == [4, 5, 6, 7]
    assert extended([4, 5], 1, [5, 6]) == [4, 5, 6]
    assert extended([4, 5], 1, [9]) == [4, 9]
    assert extended([4, 5, 6], 0, [4, 5]) is None
    assert extended([], 0, [4]) == [4]
    assert extended([], 1, [4]) is None
