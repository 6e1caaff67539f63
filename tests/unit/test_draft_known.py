"""What a drafter tells decode of one sequence, and when it lets the draft model work."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.draft.known import READ_TOKENS, Alternative, GapError, KnownSequence, Wish
from shared.protocol.drafts import DRAFT_MODEL, DraftContext, Proposal
from shared.protocol.jobs import SamplingParams
from shared.speculation import PROMPT_LOOKUP, SUFFIX_TREE, Guess, RecentOutputs

PARAMS = SamplingParams(max_tokens=100, seed=1)
STRANGE = list(range(1000, 1020))
"""A prompt in which no token stands twice: lookups have no idea."""


def context(start: int, token_ids: list[int], wanted: int = 6) -> DraftContext:
    if start:
        return DraftContext("r", "t", start, token_ids, "inbox", wanted)
    return DraftContext("r", "t", 0, token_ids, "inbox", wanted, num_prompt=len(token_ids), params=PARAMS, salt="s")


def known(
    prompt: list[int], wanted: int = 6, *, most: int = 16, with_model: bool = True, outputs: RecentOutputs | None = None
) -> KnownSequence:
    first = context(0, prompt, wanted)
    made = KnownSequence(first, outputs or RecentOutputs(), most=most, with_model=with_model)
    made.extend(first)
    look_up(made)
    return made


def look_up(sequence: KnownSequence) -> None:
    while not sequence.all_read:
        sequence.read_on()
    sequence.look_up()


def asked(sequence: KnownSequence) -> Wish:
    """A wish that the model has heard of."""
    wish = sequence.wish()
    assert wish is not None
    sequence.granted(wish)
    return wish


def grow(sequence: KnownSequence, token_ids: list[int], wanted: int = 6) -> None:
    sequence.extend(context(len(sequence.token_ids), token_ids, wanted))
    look_up(sequence)


def drafted(sequence: KnownSequence, output_index: int, token_ids: list[int], chance: float = 0.9) -> int:
    return sequence.drafted(output_index, token_ids, [chance] * len(token_ids))


def drafted_otherwise(sequence: KnownSequence, output_index: int, guesses: list[list[int]]) -> bool:
    found = [Alternative(guess, [0.2, *[0.8] * (len(guess) - 1)]) for guess in guesses]
    return sequence.drafted_otherwise(output_index, found)


def news(sequence: KnownSequence) -> Proposal | None:
    """The only thing that there is to tell, if any."""
    found = sequence.proposals()
    assert len(found) <= 1
    return found[0] if found else None


def told(proposal: Proposal | None) -> tuple[int, list[int], str] | None:
    return (proposal.start, proposal.token_ids, proposal.proposer) if proposal is not None else None


def test_what_came_is_read_in_parts() -> None:
    first = context(0, list(range(2 * READ_TOKENS + 5)))
    sequence = KnownSequence(first, RecentOutputs(), most=16, with_model=False)
    sequence.extend(first)
    assert [sequence.read_on() for _ in range(4)] == [READ_TOKENS, READ_TOKENS, 5, 0]
    assert sequence.all_read
    grow(sequence, [100, 101, 102])
    assert told(news(sequence)) == (2 * READ_TOKENS + 8, list(range(103, 109)), PROMPT_LOOKUP)


def test_a_guess_that_got_longer_is_told_from_the_first_unknown_token_on() -> None:
    """Decode may know by then that its beginning was wrong, and what goes on from that is no guess any more."""
    sequence = known(STRANGE)
    assert news(sequence) is None
    assert asked(sequence).ahead == 6
    drafted(sequence, 0, [1, 2])
    assert told(news(sequence)) == (20, [1, 2], DRAFT_MODEL)
    assert news(sequence) is None
    drafted(sequence, 2, [3])
    assert told(news(sequence)) == (20, [1, 2, 3], DRAFT_MODEL)
    grow(sequence, [1, 2, 3])
    assert news(sequence) is None
    drafted(sequence, 3, [4, 5])
    assert told(news(sequence)) == (23, [4, 5], DRAFT_MODEL)


def test_the_next_token_alone_is_not_told() -> None:
    """Decode computes it already."""
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1])
    assert news(sequence) is None
    drafted(sequence, 1, [2])
    assert told(news(sequence)) == (20, [1, 2], DRAFT_MODEL)
    grow(sequence, [1, 2])
    drafted(sequence, 2, [3])
    assert news(sequence) is None
    drafted_otherwise(sequence, 2, [[7, 8]])
    proposal = news(sequence)
    assert told(proposal) == (22, [3], DRAFT_MODEL), "with alternatives it says more"
    assert proposal.alternatives == [[7, 8]]  # type: ignore[union-attr]


@pytest.mark.parametrize("came", [[1], [1, 2]])
def test_what_is_left_of_what_was_told_is_not_told_again(came: list[int]) -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2, 3, 4])
    assert told(news(sequence)) == (20, [1, 2, 3, 4], DRAFT_MODEL)
    grow(sequence, came)
    assert news(sequence) is None
    drafted(sequence, 4, [5])
    assert told(news(sequence)) == (20 + len(came), [1, 2, 3, 4, 5][len(came) :], DRAFT_MODEL)


def test_what_nothing_is_added_to_is_told_again_in_case_it_was_lost() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2, 3, 4, 5])
    assert told(news(sequence)) == (20, [1, 2, 3, 4, 5], DRAFT_MODEL)
    grow(sequence, [1])
    assert news(sequence) is None
    grow(sequence, [2])
    assert told(news(sequence)) == (22, [3, 4, 5], DRAFT_MODEL)
    grow(sequence, [3])
    assert news(sequence) is None


def test_of_lookups_the_one_that_decode_forgot_for_another_is_told_again() -> None:
    """Decode keeps one guess of all lookups of a drafter."""
    sequence = known(STRANGE)

    def look(name: str, token_ids: list[int], chance: float) -> None:
        sequence._chooser.offer(Guess(len(sequence.token_ids), tuple(token_ids), (chance,) * len(token_ids), name))

    look("first", [5, 6, 7, 8, 9], 0.5)
    assert told(news(sequence)) == (20, [5, 6, 7, 8, 9], "first")
    look("second", [5, 66, 67], 0.98)
    assert told(news(sequence)) == (20, [5, 66, 67], "second")
    sequence.extend(context(20, [5, 6], 6))
    assert told(news(sequence)) == (22, [7, 8, 9], "first")


@pytest.mark.parametrize(
    ("guessed", "came", "right", "tried"),
    [
        (Alternative([5, 6], [0.2, 0.3]), [5, 7], 0, 1),
        (Alternative([5, 6], [0.2, 0.3], 1), [5, 7], 0, 0),
        (Alternative([5, 6, 8], [0.2, 0.3, 0.4], 1), [5, 6, 7], 1, 1),
        (Alternative([5, 6, 8], [0.2, 0.3, 0.4], 1), [5, 6, 8], 1, 1),
        (Alternative([5, 6, 8], [0.2, 0.3, 0.4], 1), [5, 7, 8], 0, 1),
        (Alternative([5, 6, 8], [0.2, 0.3, 0.4]), [5, 6, 7], 1, 2),
    ],
)
def test_what_the_table_got_wrong_or_right_does_not_count_for_the_model(
    guessed: Alternative, came: list[int], right: int, tried: int
) -> None:
    sequence, plain = known(STRANGE), known(STRANGE)
    for one, alternatives in ((sequence, [guessed]), (plain, [])):
        asked(one)
        drafted(one, 0, [1, 2])
        one.drafted_otherwise(0, alternatives)
        grow(one, came)
    assert sequence._record._right - plain._record._right == right
    assert sequence._record._tried - plain._record._tried == tried


def test_a_token_of_the_table_that_was_wrong_refutes_nothing_of_the_model() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2])
    sequence.drafted_otherwise(0, [Alternative([5, 6, 8], [0.2, 0.3, 0.4], from_table=1)])
    grow(sequence, [5])
    first = sequence.wish()
    assert first is not None
    rate = sequence._record.rate
    grow(sequence, [6, 7])  # the model, which goes on from the alternative, has not heard of the first yet
    assert sequence._record.rate > rate
    sequence.granted(first)
    assert drafted(sequence, 1, [6, 7, 9, 11]) == 2
    assert told(news(sequence)) == (len(STRANGE) + 3, [9, 11], DRAFT_MODEL)


def test_what_follows_a_refuted_guess_is_not_told() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1])
    grow(sequence, [7])
    late = sequence.wish()
    assert drafted(sequence, 1, [2]) == 0  # it was computed behind the 1 that is wrong
    assert news(sequence) is None
    assert late is not None
    sequence.granted(late)
    assert drafted(sequence, 1, [8, 9]) == 2
    assert told(news(sequence)) == (21, [8, 9], DRAFT_MODEL)


def test_a_wish_from_before_the_refutation_does_not_make_it_undone() -> None:
    sequence = known(STRANGE)
    first = sequence.wish()
    assert first is not None
    assert drafted(sequence, 0, [1]) == 0  # of a sequence of this name that ended before
    sequence.granted(first)
    assert drafted(sequence, 0, [1]) == 1
    grow(sequence, [7])
    sequence.granted(first)
    assert drafted(sequence, 1, [2]) == 0


def test_late_guesses_count_only_as_far_as_they_reach_beyond() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    grow(sequence, [1, 2])
    assert drafted(sequence, 0, [1]) == 0
    assert drafted(sequence, 1, [2]) == 0
    assert drafted(sequence, 2, [3]) == 1
    assert drafted(sequence, 3, [4]) == 1
    assert told(news(sequence)) == (22, [3, 4], DRAFT_MODEL)


def test_a_late_guess_that_is_wrong_refutes_what_follows() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    grow(sequence, [1, 2])
    assert drafted(sequence, 0, [1]) == 0
    assert drafted(sequence, 1, [9]) == 0
    assert drafted(sequence, 2, [3]) == 0
    asked(sequence)
    assert drafted(sequence, 2, [4]) == 1


def test_alternatives_are_told_with_the_models_guess() -> None:
    sequence = known(STRANGE)
    assert not drafted_otherwise(sequence, 0, [[3, 4]])  # of a sequence of this name that ended before
    asked(sequence)
    drafted(sequence, 0, [1, 2])
    assert news(sequence).alternatives == []  # type: ignore[union-attr]
    assert drafted_otherwise(sequence, 0, [[5, 6], [7, 8]])
    proposal = news(sequence)
    assert told(proposal) == (20, [1, 2], DRAFT_MODEL)
    assert proposal.alternatives == [[5, 6], [7, 8]]  # type: ignore[union-attr]
    assert news(sequence) is None
    drafted(sequence, 2, [3])
    assert news(sequence).alternatives == []  # type: ignore[union-attr] # decode has them
    assert not drafted_otherwise(sequence, 0, [[5, 6], [7, 8]])
    assert drafted_otherwise(sequence, 0, [[5, 6, 9], [7, 8]])
    assert news(sequence).alternatives == [[5, 6, 9], [7, 8]]  # type: ignore[union-attr]
    grow(sequence, [1])
    assert not sequence.alternative_came
    drafted(sequence, 3, [4])
    proposal = news(sequence)
    assert told(proposal) == (21, [2, 3, 4], DRAFT_MODEL)
    assert proposal.alternatives == []  # type: ignore[union-attr]


def test_an_alternative_that_came_true_is_the_guess() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2])
    drafted_otherwise(sequence, 0, [[5, 6], [7, 8, 9, 10]])
    assert told(news(sequence)) == (20, [1, 2], DRAFT_MODEL)
    grow(sequence, [7, 8])
    assert sequence.alternative_came
    assert news(sequence) is None, "decode was told"
    assert drafted(sequence, 2, [3]) == 0  # behind the 1 that was wrong
    assert not drafted_otherwise(sequence, 0, [[5, 6, 7], [7, 8, 9, 10]])
    asked(sequence)
    assert drafted(sequence, 2, [9, 10]) == 2  # what it goes on from
    assert news(sequence) is None
    assert drafted(sequence, 4, [11]) == 1
    proposal = news(sequence)
    assert told(proposal) == (22, [9, 10, 11], DRAFT_MODEL)
    assert proposal.alternatives == []  # type: ignore[union-attr]
    grow(sequence, [9])
    assert not sequence.alternative_came


def test_an_alternative_that_came_true_before_decode_was_told_is_told() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2])
    assert told(news(sequence)) == (20, [1, 2], DRAFT_MODEL)
    drafted_otherwise(sequence, 0, [[5, 6], [7, 8, 9, 10]])
    grow(sequence, [7, 8])
    assert told(news(sequence)) == (22, [9, 10], DRAFT_MODEL)


def test_a_model_that_could_not_go_on_from_an_alternative_is_heard_all_the_same() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2])
    drafted_otherwise(sequence, 0, [[7, 8, 9]])
    grow(sequence, [7])
    asked(sequence)
    assert drafted(sequence, 1, [8]) == 1
    assert drafted(sequence, 2, [9]) == 1
    assert drafted(sequence, 3, [10]) == 1
    assert told(news(sequence)) == (21, [8, 9, 10], DRAFT_MODEL)


def test_alternatives_of_a_position_that_is_decided_are_not_told() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    drafted(sequence, 0, [1, 2, 3])
    drafted_otherwise(sequence, 0, [[5, 6], [7, 8]])
    grow(sequence, [1])
    assert not drafted_otherwise(sequence, 0, [[5, 6, 7], [7, 8, 9]])
    assert news(sequence).alternatives == []  # type: ignore[union-attr]
    assert drafted_otherwise(sequence, 1, [[4, 4]])
    grow(sequence, [9])
    assert news(sequence) is None


def test_the_models_guess_is_told_beside_a_better_one_and_alternatives_go_with_it() -> None:
    """Decode, which has more to go by, chooses."""
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3])
    asked(sequence)
    drafted(sequence, 0, [9])
    drafted_otherwise(sequence, 0, [[7, 8]])
    lookup, model = sequence.proposals()
    assert told(lookup) == (8, [4, 5, 1, 2, 3, 4], PROMPT_LOOKUP)
    assert (lookup.alternatives, lookup.alternative_confidence) == ([], [])
    assert told(model) == (8, [9], DRAFT_MODEL)
    assert (model.alternatives, model.alternative_confidence) == ([[7, 8]], [[0.2, 0.8]])


def test_of_both_only_the_news_is_told() -> None:
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3])
    assert told(news(sequence)) == (8, [4, 5, 1, 2, 3, 4], PROMPT_LOOKUP)
    asked(sequence)
    drafted(sequence, 0, [9, 10], 0.3)
    assert told(news(sequence)) == (8, [9, 10], DRAFT_MODEL)
    assert sequence.proposals() == []
    drafted_otherwise(sequence, 0, [[7, 8]])
    assert news(sequence).alternatives == [[7, 8]]  # type: ignore[union-attr]
    drafted(sequence, 2, [11], 0.1)
    assert told(news(sequence)) == (8, [9, 10, 11], DRAFT_MODEL)
    assert sequence.proposals() == []
    grow(sequence, [4, 5])
    assert told(news(sequence)) == (10, [1, 2, 3, 4, 5, 1], PROMPT_LOOKUP)


def test_where_the_models_guess_is_the_best_nobody_elses_is_told() -> None:
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3])
    asked(sequence)
    drafted(sequence, 0, [9, 10, 11, 12, 13, 14], 0.98)
    assert told(news(sequence)) == (8, [9, 10, 11, 12, 13, 14], DRAFT_MODEL)


def test_each_token_is_told_with_the_models_own_confidence() -> None:
    sequence = known(STRANGE)
    asked(sequence)
    sequence.drafted(0, [1, 2], [0.51234, 0.4])
    sequence.drafted_otherwise(0, [Alternative([5, 6], [0.0768, 0.6]), Alternative([7, 8, 9], [0.05, 0.9, 0.7])])
    proposal = news(sequence)
    assert proposal is not None
    assert proposal.confidence == [0.512, 0.4]
    assert proposal.alternatives == [[5, 6], [7, 8, 9]]
    assert proposal.alternative_confidence == [[0.077, 0.6], [0.05, 0.9, 0.7]]
    grow(sequence, [7])
    asked(sequence)
    drafted_otherwise(sequence, 1, [[4, 4]])
    proposal = news(sequence)
    assert told(proposal) == (21, [8, 9], DRAFT_MODEL)
    # What it said of these tokens, as far as one whose first choice was wrong is believed.
    first, second = proposal.confidence  # type: ignore[union-attr]
    assert second < first < 0.9
    assert (1 - second) / (1 - first) == pytest.approx(3, rel=0.02)


def test_lookups_guess_where_text_repeats_and_the_model_rests() -> None:
    rng = random.Random(3)
    text = [rng.randrange(5000) for _ in range(200)]
    sequence = known(text + text[:20])
    at = 20
    for _ in range(20):
        grow(sequence, text[at : at + 3])
        at += 3
        proposal = told(news(sequence))
        assert proposal is None or proposal[2] == PROMPT_LOOKUP
    wish = sequence.wish()
    assert wish is not None
    assert wish.ahead == 0


def test_a_lookup_that_has_proved_nothing_yet_does_not_stop_the_model() -> None:
    sequence = known([*range(100), *range(40)])
    assert told(news(sequence)) == (140, list(range(40, 46)), PROMPT_LOOKUP)
    assert asked(sequence).ahead == 6
    grow(sequence, [40, 41, 42])
    assert asked(sequence).ahead == 0
    grow(sequence, [7])
    assert asked(sequence).ahead == 6


def test_where_text_no_longer_repeats_the_model_is_asked_again() -> None:
    rng = random.Random(3)
    text = [rng.randrange(5000) for _ in range(200)]
    sequence = known(text + text[:20])
    for at in range(20, 80, 3):
        grow(sequence, text[at : at + 3])
    for token in range(5000, 5010):
        grow(sequence, [token])
    assert asked(sequence).ahead == 6


def test_a_model_that_is_always_wrong_rests_until_that_is_long_ago() -> None:
    sequence = known(STRANGE)
    count = 0
    for token in range(2000, 2200):
        wish = asked(sequence)
        if wish.ahead:
            count += 1
            drafted(sequence, len(sequence.token_ids) - 20, [1])
        grow(sequence, [token])
    assert 10 < count < 80


@pytest.mark.parametrize(
    ("every", "with_alternatives", "asked_on"), [(8, True, True), (8, False, False), (500, True, False)]
)
def test_alternatives_make_up_for_some_wrong_choices(every: int, with_alternatives: bool, asked_on: bool) -> None:
    """But what follows an alternative are first choices again, and must be right to be of use."""
    sequence = known(STRANGE)
    rested = 0
    for token in range(2001, 2200):
        rested += asked(sequence).ahead == 0
        index = len(sequence.token_ids) - 20
        drafted(sequence, index, [token if token % every == 0 else 1])
        if with_alternatives:
            drafted_otherwise(sequence, index, [[token]])
        grow(sequence, [token])
    assert (rested == 0) == asked_on


def test_what_followed_in_an_alternative_counts_as_right() -> None:
    sequence = known(STRANGE)
    for token in range(2000, 2100, 2):
        assert asked(sequence).ahead == 6
        index = len(sequence.token_ids) - 20
        drafted(sequence, index, [1, 2])
        drafted_otherwise(sequence, index, [[token, token + 1]])
        grow(sequence, [token, token + 1])


def test_recent_outputs_of_the_tenant_are_proposed() -> None:
    outputs = RecentOutputs()
    answer = list(range(3000, 3040))
    outputs.add("t\0s", answer, prompt=STRANGE)
    sequence = known(STRANGE, outputs=outputs, with_model=False)
    assert told(news(sequence)) == (20, answer[:6], SUFFIX_TREE)
    assert sequence.wish() is None


def test_nothing_is_looked_up_asked_or_told_where_decode_wants_nothing() -> None:
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3], wanted=0)
    assert news(sequence) is None
    assert asked(sequence).ahead == 0
    grow(sequence, [4], wanted=2)
    assert told(news(sequence)) == (9, [5, 1], PROMPT_LOOKUP)


def test_nobody_is_further_ahead_than_allowed() -> None:
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3], wanted=6, most=2)
    assert told(news(sequence)) == (8, [4, 5], PROMPT_LOOKUP)
    assert known(STRANGE, most=2).wish().ahead == 2  # type: ignore[union-attr]


def test_a_refused_sequence_is_left_to_the_lookups() -> None:
    sequence = known([1, 2, 3, 4, 5, 1, 2, 3])
    wish = sequence.wish()
    assert wish is not None
    sequence.refused(wish)
    assert sequence.wish() is None
    assert news(sequence) is not None


def test_the_model_waits_until_the_whole_prompt_is_told() -> None:
    first = DraftContext("r", "t", 0, STRANGE[:10], "inbox", 4, num_prompt=20, params=PARAMS, salt="s")
    sequence = KnownSequence(first, RecentOutputs(), most=8, with_model=True)
    sequence.extend(first)
    assert sequence.wish() is None
    grow(sequence, STRANGE[10:], wanted=4)
    assert asked(sequence).confirmed == 20


def test_contexts_may_overlap_but_leave_nothing_out_and_change_nothing() -> None:
    sequence = known(STRANGE)
    grow(sequence, [1, 2, 3])
    sequence.extend(context(21, [2, 3, 4]))
    assert sequence.token_ids == [*STRANGE, 1, 2, 3, 4]
    for wrong in (context(25, [6]), context(22, [9]), context(22, [9, 4, 5])):
        with pytest.raises(GapError):
            sequence.extend(wrong)
    sequence.extend(context(22, [3]))  # older than what is known, and right
    assert sequence.token_ids == [*STRANGE, 1, 2, 3, 4]


@given(st.lists(st.tuples(st.sampled_from("mdg"), st.integers(1, 4), st.booleans()), max_size=80))
def test_decode_could_always_put_together_what_it_is_told(events: list[tuple[str, int, bool]]) -> None:
    """Every message goes on from the sequence's end, or from what the same proposer said before of the same guess."""
    rng = random.Random(1)
    sequence = known(STRANGE)
    truth = [rng.randrange(4) for _ in range(400)]
    model: list[int] = list(STRANGE)
    """What the model has, confirmed and guessed."""
    pending: list[Wish] = []
    guess: dict[str, list[int]] = {}
    for kind, count, right in events:
        end = len(sequence.token_ids)
        if kind == "m":  # the model hears the newest wish
            if pending:
                wish = pending[-1]
                if model[: wish.confirmed] != wish.tokens[: wish.confirmed]:
                    model = wish.tokens[: wish.confirmed]
                for earlier in pending:
                    sequence.granted(earlier)
                pending = []
        elif kind == "d":
            token = truth[len(model) - 20] if right else 5
            model.append(token)
            drafted(sequence, len(model) - 21, [token])
        else:
            new_ids = truth[end - 20 : end - 20 + count]
            grow(sequence, new_ids)
            guess = {name: ids[count:] if ids[:count] == new_ids[: len(ids)] else [] for name, ids in guess.items()}
            wish = sequence.wish()
            assert wish is not None
            pending.append(wish)
        for proposal in sequence.proposals():
            assert proposal.token_ids
            offset = proposal.start - len(sequence.token_ids)
            had = guess.get(proposal.proposer, [])
            assert 0 <= offset <= len(had)
            guess[proposal.proposer] = had[:offset] + proposal.token_ids
