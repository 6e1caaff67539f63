"""The draft model's side of drafting, on tiny models: coupled choices, going on, going back, room."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.draft import draft_model
from services.draft.draft_model import (
    ALTERNATIVE_TOKENS,
    FOLLOWED_BEHIND,
    LEAST_ALTERNATIVE,
    LEAST_CHANCE,
    Drafter,
    DraftModel,
    _dtype,
)
from services.draft.followers import Followers
from services.draft.known import SOON, Alternative, Wish
from services.draft.service import Drafted
from services.draft.settings import DraftSettings
from shared.engine import Engine, Sequence
from shared.engine.batch import SequenceRows
from shared.models import ModelFiles
from shared.protocol.jobs import SamplingParams
from shared.telemetry.metrics import DraftMetrics
from tests.unit.engine_harness import (
    EOS,
    begin,
    byte_level_tokenizer,
    drain,
    greedy,
    load,
    outputs,
    sampled,
    tiny_model,
)

PROMPT = [(i * 37 + i * i) % 250 for i in range(45)]
LENGTH = 60

RULED: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 4.0, 17: -100.0, 40: 2.5},
}

PARAMS = {
    "greedy": greedy(LENGTH),
    "sampled": sampled(LENGTH, seed=5),
    "top-k and min-p": sampled(LENGTH, seed=6, top_k=20, min_p=0.02, temperature=1.4),
    "greedy with penalties and bias": greedy(LENGTH, **RULED),
    "sampled with penalties and bias": sampled(LENGTH, seed=7, **RULED),
    "with an end, not before 20 tokens": sampled(
        LENGTH, seed=8, ignore_eos=False, min_tokens=20, logit_bias={byte_level_tokenizer().token_to_id(EOS): 9.0}
    ),
    "with stop strings and logprobs": sampled(LENGTH, seed=9, stop=["never said"], logprobs=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def target(path: Path) -> Engine:
    return load(path, max_draft_tokens=0)


@pytest.fixture
def engine(path: Path) -> Engine:
    return load(path, max_draft_tokens=0)


@pytest.fixture(autouse=True)
def nothing_is_too_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are sure of nothing."""
    set_least(monkeypatch, chance=0.0, alternative=0.0)


def set_least(monkeypatch: pytest.MonkeyPatch, *, chance: float, alternative: float = 0.0) -> None:
    monkeypatch.setattr(draft_model, "LEAST_CHANCE", chance)
    monkeypatch.setattr(draft_model, "LEAST_ALTERNATIVE", alternative)


class Counting:
    """Counts the tokens that an engine computes."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine._runner.forward
        self.tokens = 0
        engine._runner.forward = self._counted  # type: ignore[method-assign]

    def _counted(self, rows: list[SequenceRows]) -> Any:
        self.tokens += sum(len(row.token_ids) for row in rows)
        return self._forward(rows)


def answer(target: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    begin(target, "target", prompt, params, speculate=False)
    found = outputs(drain(target))["target"]
    target.release("target")
    return found


def wish(
    tokens: list[int], confirmed: int, ahead: int, params: SamplingParams, name: str = "a", **changes: Any
) -> Wish:
    return Wish(name, tokens, confirmed, ahead, **{"num_prompt": len(PROMPT), "params": params, "salt": "s"} | changes)


def drafts(engine: Engine, name: str = "a") -> list[int]:
    """Run until everybody is as far ahead as wanted; all that the sequence has then."""
    drain(engine)
    return list(engine._sequences[name].token_ids)


@pytest.mark.parametrize("kind", PARAMS)
def test_a_draft_by_the_same_model_is_always_right(target: Engine, engine: Engine, kind: str) -> None:
    """Whatever shapes the target's choice shapes the draft's: then every difference is the model's own."""
    params = PARAMS[kind]
    tokens = PROMPT + answer(target, PROMPT, params)
    if kind.startswith("with an end"):
        assert 20 < len(tokens) - len(PROMPT) < LENGTH
    drafter = Drafter(4)
    confirmed = len(PROMPT)
    while confirmed < len(tokens):
        assert drafter.take(engine, [wish(tokens, confirmed, 7, params)]) == []
        assert drafts(engine) == tokens[: confirmed + 7]
        confirmed += 5


def test_confirmed_guesses_are_not_computed_again(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter, counting = Drafter(4), Counting(engine)
    for confirmed in range(len(PROMPT), len(PROMPT) + 40, 3):
        drafter.take(engine, [wish(tokens, confirmed, 6, greedy(LENGTH))])
        assert drafts(engine) == tokens[: confirmed + 6]
    assert counting.tokens == confirmed + 6 - 1  # each token but the last was fed once


def test_a_refuted_guess_is_replaced_and_the_common_beginning_kept(target: Engine, engine: Engine) -> None:
    params = sampled(LENGTH, seed=5)
    said = answer(target, PROMPT, params)
    other = (said[2] + 1) % 250
    tokens = [*PROMPT, *said[:2], other]
    goes_on = answer(target, tokens, params)  # noise goes by the position, so the prompt's length does not matter
    drafter = Drafter(4)
    drafter.take(engine, [wish(tokens, len(PROMPT), 8, params)])
    assert drafts(engine) == [*PROMPT, *said[:8]]
    counting = Counting(engine)
    drafter.take(engine, [wish(tokens, len(tokens), 8, params)])
    assert drafts(engine) == [*tokens, *goes_on[:8]]
    assert counting.tokens == 8


def test_a_sequence_overtaken_in_a_step_goes_on_from_what_is_confirmed(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(4)
    drafter.take(engine, [wish(tokens, len(PROMPT), 4, greedy(LENGTH))])
    engine.step()  # one guess, while decode was told four tokens by others
    drafter.take(engine, [wish(tokens, len(PROMPT) + 4, 4, greedy(LENGTH))])
    assert drafts(engine) == tokens[: len(PROMPT) + 8]


def test_nothing_is_drafted_beyond_an_end(target: Engine, engine: Engine) -> None:
    params = PARAMS["with an end, not before 20 tokens"]
    tokens = PROMPT + answer(target, PROMPT, params)
    drafter = Drafter(4)
    for confirmed in (len(tokens) - 3, len(tokens) - 1):
        assert drafter.take(engine, [wish(tokens, confirmed, 16, params)]) == []
        assert drafts(engine) == tokens


def test_a_resting_sequence_keeps_what_it_has_and_computes_nothing(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(4)
    drafter.take(engine, [wish(tokens, len(PROMPT), 8, greedy(LENGTH))])
    engine.step()
    counting = Counting(engine)
    drafter.take(engine, [wish(tokens, len(PROMPT) + 1, 0, greedy(LENGTH))])
    assert not engine.has_work
    drafter.take(engine, [wish(tokens, len(PROMPT) + 5, 3, greedy(LENGTH))])
    assert drafts(engine) == tokens[: len(PROMPT) + 8]
    assert counting.tokens == 7  # of 53 tokens the prompt's 45 were computed, and the last is not


def test_a_sequence_that_begins_anew_is_another_one(target: Engine, engine: Engine) -> None:
    drafter = Drafter(4)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH))])
    drain(engine)
    shorter = PROMPT[:20]
    expected = shorter + answer(target, shorter, greedy(LENGTH))[:4]
    drafter.take(engine, [wish(shorter, 20, 4, greedy(LENGTH), num_prompt=20)])
    assert drafts(engine) == expected


def test_what_exceeds_the_draft_model_is_refused_and_leaves_nothing(path: Path) -> None:
    engine = load(path, max_draft_tokens=0)
    drafter = Drafter(4)
    long = [n % 250 for n in range(engine.context_length + 10)]
    for refused in (
        wish(long, len(long), 4, greedy(LENGTH), num_prompt=len(long)),
        wish(long, engine.context_length, 4, greedy(4000)),
        wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH, logit_bias={99_999: 1.0})),
        wish([*PROMPT, byte_level_tokenizer().token_to_id(EOS)], len(PROMPT) + 1, 4, greedy(LENGTH, ignore_eos=False)),
    ):
        assert drafter.take(engine, [refused]) == [refused]
        assert engine.pool.num_used == 0
        assert not engine.has_work


def test_a_wish_that_fails_is_refused_and_the_others_are_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    start = engine.start

    def failing(sequence: Sequence, **changes: Any) -> None:
        if sequence.seq_id == "bad":
            raise IndexError("no such thing")
        start(sequence, **changes)

    monkeypatch.setattr(engine, "start", failing)
    wishes = [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH), name=name) for name in ("first", "bad", "last")]
    drafter = Drafter(4)
    assert drafter.take(engine, wishes) == [wishes[1]]
    assert list(engine._sequences) == ["first", "last"]
    assert len(drafts(engine, "last")) == len(PROMPT) + 4


def test_a_growing_sequence_ends_where_the_draft_models_context_does(path: Path, target: Engine) -> None:
    short = load(path, max_draft_tokens=0, kv_memory_bytes=100_000)
    room = short.pool.num_blocks * short.config.block_tokens
    assert len(PROMPT) < room < 400
    tokens = PROMPT + answer(target, PROMPT, greedy(400))
    drafter = Drafter(4)
    drafter.take(short, [wish(tokens, room - 5, 8, greedy(400))])
    assert drafts(short) == tokens[:room]
    late = wish(tokens, room + 1, 8, greedy(400))
    assert drafter.take(short, [late]) == [late]


def test_blocks_come_from_those_not_asked_about_for_longest(path: Path, target: Engine) -> None:
    small = load(path, max_draft_tokens=0, kv_memory_bytes=200_000, prefix_caching=False)
    per_sequence = -(-(len(PROMPT) + 8) // small.config.block_tokens)
    fit = small.pool.num_blocks // per_sequence
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(100)
    for number in range(2 * fit):
        assert drafter.take(small, [wish(tokens, len(PROMPT), 8, greedy(LENGTH), name=f"s{number}")]) == []
        assert drafts(small, f"s{number}") == tokens[: len(PROMPT) + 8]
    assert list(small._sequences) == [f"s{number}" for number in range(fit, 2 * fit)]
    assert drafter.take(small, [wish(tokens, len(PROMPT) + 2, 8, greedy(LENGTH), name="s0")]) == []
    assert drafts(small, "s0") == tokens[: len(PROMPT) + 10]  # rebuilt from the tokens


def test_no_more_sequences_than_allowed_are_kept(engine: Engine) -> None:
    drafter = Drafter(2)
    for number in range(5):
        drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH), name=f"s{number}")])
        drain(engine)
    assert list(engine._sequences) == ["s3", "s4"]


def test_one_batch_serves_all_that_are_behind(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(8)
    wishes = [wish(tokens, len(PROMPT) + n, 6, greedy(LENGTH), name=f"s{n}") for n in range(5)]
    drafter.take(engine, wishes)
    while any(sequence.num_pending > 1 for sequence in engine._sequences.values()):
        engine.step()
    assert len(engine.step()) > 1
    drain(engine)
    for n in range(5):
        assert engine._sequences[f"s{n}"].token_ids == tokens[: len(PROMPT) + n + 6]


# Alternatives


def told(drafter: Drafter, engine: Engine) -> list[Drafted]:
    """What is said of all sequences until they are as far ahead as wanted."""
    said: list[Drafted] = []
    while engine.has_work:
        said += drafter.after_step(engine, engine.step())
    return said


def alternatives(said: list[Drafted]) -> list[list[int]]:
    """The newest ones."""
    return [[guess.token_ids for guess in item.alternatives] for item in said if item.alternatives][-1]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "sampled with penalties and bias"])
def test_each_alternative_goes_on_as_the_text_with_its_first_token_does(
    target: Engine, engine: Engine, kind: str
) -> None:
    params = PARAMS[kind]
    said = answer(target, PROMPT, params)
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 7, params)])
    brought = told(drafter, engine)
    assert [token for item in brought for token in item.token_ids] == said[:7]
    found = alternatives(brought)
    assert len({said[0], *(guess[0] for guess in found)}) == 4
    for guess in found:
        other = target.new_sequence("other", [*PROMPT, guess[0]], len(PROMPT), params, pause_after=ALTERNATIVE_TOKENS)
        target.start(other)
        drain(target)
        assert other.token_ids == [*PROMPT, *guess]
        target.release("other")


@pytest.mark.parametrize("kind", ["greedy", "sampled", "sampled with penalties and bias"])
@pytest.mark.parametrize("place", [0, 2])
def test_an_alternative_that_comes_true_is_gone_on_with_and_not_computed_again(
    engine: Engine, kind: str, place: int
) -> None:
    params = PARAMS[kind]
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(tokens := list(PROMPT), len(PROMPT), 7, params)])
    first, *rest = alternatives(told(drafter, engine))[place]
    tokens.append(first)
    taken_up: list[Drafted] = []
    counting = Counting(engine)
    assert drafter.take(engine, [wish(tokens, len(tokens), 7, params)], taken_up.append) == []
    assert [(item.request_id, item.first_index, item.token_ids) for item in taken_up] == [("a", 1, rest)]
    brought = told(drafter, engine)
    goes_on = [*rest, *(token for item in brought for token in item.token_ids)]
    assert {item.request_id for item in brought} == {"a"}
    # Its last token and the next ones but the last, and three new alternatives without their last tokens.
    assert counting.tokens == 7 - len(rest) + 3 * ALTERNATIVE_TOKENS
    fresh = Drafter(4)
    fresh.take(engine, [wish(list(tokens), len(tokens), 7, params, name="fresh", num_prompt=len(PROMPT))])
    assert drafts(engine, "fresh") == [*tokens, *goes_on]
    for other in (drafter, fresh):
        for name in ("a", "fresh"):
            other.forget(engine, name)
    assert engine.pool.num_used == 0
    assert not engine._sequences
    assert not drafter._of_sequence


def test_what_follows_in_an_alternative_may_be_wrong_too(target: Engine, engine: Engine) -> None:
    params = sampled(LENGTH, seed=5)
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(tokens := list(PROMPT), len(PROMPT), 7, params)])
    first, second, *_ = alternatives(told(drafter, engine))[0]
    tokens += [first, (second + 1) % 250, 5]
    taken_up: list[Drafted] = []
    drafter.take(engine, [wish(tokens, len(tokens), 7, params)], taken_up.append)
    assert not taken_up
    brought = told(drafter, engine)
    assert [token for item in brought for token in item.token_ids] == answer(target, tokens, params)[:7]


def test_alternatives_that_did_not_come_true_hold_nothing(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter, plain = Drafter(4, alternatives=3), Drafter(4)
    drafter.take(engine, [wish(tokens, len(PROMPT), 7, greedy(LENGTH))])
    told(drafter, engine)
    assert len(engine._sequences) == 4
    drafter.take(engine, [wish(tokens, len(PROMPT) + 1, 0, greedy(LENGTH))])
    assert list(engine._sequences) == ["a"]
    assert not engine.has_work
    drafter.take(engine, [wish(tokens, len(PROMPT) + 5, 7, greedy(LENGTH))])
    told(drafter, engine)
    assert len(engine._sequences) == 4
    drafter.forget(engine, "a")
    assert engine.pool.num_used == 0
    plain.take(engine, [wish(tokens, len(PROMPT), 7, greedy(LENGTH))])
    told(plain, engine)
    assert list(engine._sequences) == ["a"]


def test_what_the_table_says_of_tokens_that_were_not_gone_on_from_is_told_too(target: Engine, engine: Engine) -> None:
    size = engine.vocab_size
    every = np.arange(size)
    table = Followers({"keys": every, "next": (every + 1) % size, "percent": np.full(size, 50)})
    drafter = Drafter(4, alternatives=2, followers=table)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 5, greedy(LENGTH))])
    found = [item.alternatives for item in told(drafter, engine) if item.alternatives][-1]
    firsts = [guess.token_ids[0] for guess in found]
    assert len(set(firsts)) == len(firsts)
    assert answer(target, PROMPT, greedy(LENGTH))[0] not in firsts
    of_table = [guess for guess in found if guess.from_table == len(guess.token_ids) - 1]
    assert len(of_table) > 10
    for guess in of_table:
        assert guess.token_ids == [(guess.token_ids[0] + n) % size for n in range(2 + FOLLOWED_BEHIND)]
        assert guess.confidence[1:] == [0.5] * (1 + FOLLOWED_BEHIND)


@pytest.mark.parametrize("percent", [4, 90])
def test_the_table_goes_on_behind_what_the_model_guessed_while_that_is_likely(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    least = 1e-6
    monkeypatch.setattr(draft_model, "LEAST_CHANCE", least)
    size = engine.vocab_size
    every = np.arange(size)

    def forked(table: Followers) -> list[Alternative]:
        """Those that the draft model went on from."""
        drafter = Drafter(4, alternatives=2, followers=table)
        drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 5, greedy(LENGTH))])
        found = [item.alternatives for item in told(drafter, engine) if item.alternatives][-1]
        drafter.forget(engine, "a")
        return [guess for guess in found if len(guess.token_ids) - guess.from_table > 1]

    alone = forked(Followers({"keys": every[:0], "next": every[:0], "percent": every[:0]}))
    assert len(alone) == 2
    assert all(guess.from_table == 0 for guess in alone)
    longer = forked(Followers({"keys": every, "next": (every + 1) % size, "percent": np.full(size, percent)}))
    assert [guess.token_ids[: len(own.token_ids)] for guess, own in zip(longer, alone, strict=True)] == [
        own.token_ids for own in alone
    ]
    for guess, own in zip(longer, alone, strict=True):
        likely, added = math.prod(own.confidence[1:]), 0
        while added < FOLLOWED_BEHIND and likely * percent / 100 >= least:
            likely, added = likely * percent / 100, added + 1
        assert guess.from_table == added
        assert guess.token_ids[len(own.token_ids) :] == [(own.token_ids[-1] + 1 + n) % size for n in range(added)]
    assert percent < 90 or any(guess.from_table for guess in longer)


def test_a_sequence_whose_guess_fails_is_left_out_and_the_others_go_on(
    target: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter(4, alternatives=2)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 5, greedy(LENGTH), name) for name in ("a", "b")])
    chances = draft_model._chances

    def fail(sequence: Sequence, start: int) -> list[float]:
        if sequence.seq_id == "a":
            raise KeyError(start)
        return chances(sequence, start)

    monkeypatch.setattr(draft_model, "_chances", fail)
    said = told(drafter, engine)
    assert {item.request_id for item in said} == {"b"}
    assert [token for item in said for token in item.token_ids] == answer(target, PROMPT, greedy(LENGTH))[:5]
    drafter.forget(engine, "b")
    assert engine.pool.num_used == 0


def test_alternatives_are_told_with_what_there_is_to_tell_and_when_they_are_complete(
    target: Engine, engine: Engine
) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(4, alternatives=2)
    drafter.take(engine, [wish(tokens, len(PROMPT), 5, greedy(LENGTH))])
    told(drafter, engine)
    drafter.take(engine, [wish(tokens, len(PROMPT) + 1, 5, greedy(LENGTH))])
    said = told(drafter, engine)
    assert [
        (item.first_index, item.token_ids, [len(guess.token_ids) for guess in item.alternatives]) for item in said
    ] == [
        (5, [tokens[len(PROMPT) + 5]], []),
        (1, [], [2, 2]),
        (1, [], [4, 4]),
    ]


def test_forks_give_way_to_the_sequences_of_others(path: Path, target: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    small = load(path, max_draft_tokens=0, kv_memory_bytes=200_000)
    # What they are to be told is the same: with a salt of its own each has its blocks for itself.
    fit = small.pool.num_blocks // -(-(len(PROMPT) + 9) // small.config.block_tokens)
    drafter = Drafter(100, alternatives=3)
    for number in range(2 * fit):
        name = f"s{number}"
        assert drafter.take(small, [wish(tokens, len(PROMPT), 8, greedy(LENGTH), name=name, salt=name)]) == []
        told(drafter, small)
        assert small._sequences[name].token_ids == tokens[: len(PROMPT) + 8]
        assert small._sequences[name].preemptions == 0
    held = [name for name in small._sequences if "\0" not in name]
    assert held == [f"s{number}" for number in range(2 * fit - len(held), 2 * fit)]
    assert len(held) >= fit - 3
    for name in held:
        drafter.forget(small, name)
    assert small.pool.num_used == 0


def test_forks_take_no_place_in_a_step_from_another_sequence(path: Path, target: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    narrow = load(path, max_draft_tokens=0, max_running=4)
    drafter = Drafter(8, alternatives=7)
    drafter.take(narrow, [wish(tokens, len(PROMPT), 8, greedy(LENGTH), name="first")])
    drafter.after_step(narrow, narrow.step())
    assert narrow.num_running + narrow.num_waiting == 4
    drafter.take(narrow, [wish(tokens, len(PROMPT), 8, greedy(LENGTH), name=f"s{n}") for n in range(3)])
    assert set(narrow.active_ids()) == {"first", "s0", "s1", "s2"}
    said = told(drafter, narrow)
    assert {item.request_id for item in said} == {"first", "s0", "s1", "s2"}


def test_forks_whose_blocks_were_taken_are_given_up(target: Engine, engine: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    drafter = Drafter(8, alternatives=3)
    drafter.take(engine, [wish(tokens, len(PROMPT), 8, greedy(LENGTH))])
    for _ in range(2):
        drafter.after_step(engine, engine.step())
    engine._scheduler._preempt(engine._scheduler.running[-1])
    assert engine._scheduler.waiting[0].seq_id != "a"
    drafter.take(engine, [wish(tokens, len(PROMPT), 8, greedy(LENGTH), name="b")])
    assert set(engine._sequences) == {"a", "b"}


def test_without_cached_prefixes_there_are_no_alternatives(path: Path, target: Engine) -> None:
    tokens = PROMPT + answer(target, PROMPT, greedy(LENGTH))
    engine = load(path, max_draft_tokens=0, prefix_caching=False)
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(tokens, len(PROMPT), 7, greedy(LENGTH))])
    assert not any(item.alternatives for item in told(drafter, engine))
    assert list(engine._sequences) == ["a"]


# How likely it finds them, and how far it goes


def confidence_of(said: list[Drafted]) -> list[float]:
    return [chance for item in said for chance in item.confidence]


def options(said: list[Drafted]) -> list[Alternative]:
    """The newest alternatives."""
    return list([item.alternatives for item in said if item.alternatives][-1])


def probabilities(target: Engine, tokens: list[int]) -> list[float]:
    """Of each token behind the prompt and those before it; all are among the likeliest there."""
    found = []
    for place, token in enumerate(tokens):
        begin(target, "p", [*PROMPT, *tokens[:place]], greedy(1, logprobs=5))
        (step,) = drain(target)
        found.append(math.exp(dict(step.logprobs[0].top)[token]))
        target.release("p")
    return found


def steps_until_unlikely(chances: list[float], least_chance: float, *, least: int, before: float = 1.0) -> int:
    """How many tokens with these chances are guessed."""
    together = enumerate(itertools.accumulate(chances, mul, initial=before))
    return next((n for n, chance in together if n >= least and chance < least_chance), len(chances))


def test_each_token_is_told_with_the_models_probability(target: Engine, engine: Engine) -> None:
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 7, greedy(LENGTH))])
    said = told(drafter, engine)
    tokens = [token for item in said for token in item.token_ids]
    assert confidence_of(said) == pytest.approx(probabilities(target, tokens), rel=1e-4)
    found = options(said)
    assert len(found) == 3
    for guess in found:
        assert guess.confidence == pytest.approx(probabilities(target, guess.token_ids), rel=1e-4)


@pytest.mark.parametrize("place", [0, 2])
def test_what_is_gone_on_with_was_as_likely_as_was_told(engine: Engine, place: int) -> None:
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(tokens := list(PROMPT), len(PROMPT), 7, sampled(LENGTH, seed=5))])
    guess = options(told(drafter, engine))[place]
    tokens.append(guess.token_ids[0])
    taken_up: list[Drafted] = []
    drafter.take(engine, [wish(tokens, len(tokens), 7, sampled(LENGTH, seed=5))], taken_up.append)
    assert taken_up == [Drafted("a", 1, guess.token_ids[1:], guess.confidence[1:])]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_it_rests_where_its_guess_is_unlikely_and_goes_on_once_that_came_true(
    target: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    params = PARAMS[kind]
    tokens = PROMPT + answer(target, PROMPT, params)
    free, drafter = Drafter(4), Drafter(4)
    free.take(engine, [wish(tokens, len(PROMPT), 40, params, name="free")])
    chances = confidence_of(told(free, engine))
    assert len(chances) == 40
    set_least(monkeypatch, chance=(least := math.sqrt(math.prod(chances[:4]) * math.prod(chances[:5]))))
    ahead, reached = [], 0
    for confirmed in range(0, 30, 2):
        now = wish(tokens, len(PROMPT) + confirmed, 8, params)
        drafter.take(engine, [now])
        told(drafter, engine)
        limit = steps_until_unlikely(chances[confirmed : confirmed + 8], least, least=SOON)
        reached = max(reached, confirmed + limit)
        assert engine._sequences["a"].token_ids == tokens[: len(PROMPT) + reached]
        ahead.append(reached - confirmed)
        drafter.take(engine, [now])
        assert not engine.has_work, "the same wish changes nothing"
    assert ahead[0] == 5
    assert min(ahead) >= SOON
    assert len(set(ahead)) > 1


def test_however_unlikely_the_next_tokens_are_guessed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    set_least(monkeypatch, chance=2.0)
    drafter = Drafter(4, alternatives=2)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 8, greedy(LENGTH))])
    said = told(drafter, engine)
    assert len(confidence_of(said)) == SOON
    assert [len(guess.token_ids) for guess in options(said)] == [2, 2], "its first, and one that was computed"
    assert not engine.has_work


def test_a_refuted_guess_that_rested_is_replaced(
    target: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_least(monkeypatch, chance=2.0)
    said = answer(target, PROMPT, greedy(LENGTH))
    tokens = [*PROMPT, (said[0] + 1) % 250]
    goes_on = answer(target, tokens, greedy(LENGTH))
    drafter = Drafter(4)
    drafter.take(engine, [wish(tokens, len(PROMPT), 8, greedy(LENGTH))])
    assert len(confidence_of(told(drafter, engine))) == SOON
    drafter.take(engine, [wish(tokens, len(tokens), 8, greedy(LENGTH))])
    assert [token for item in told(drafter, engine) for token in item.token_ids] == goes_on[:SOON]


def test_an_alternative_rests_where_all_of_it_is_unlikely(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = greedy(LENGTH)
    drafter = Drafter(4, alternatives=3)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 7, params)])
    found = options(told(drafter, engine))
    seen = set()
    for guess in found:
        for least in itertools.accumulate(guess.confidence, mul):
            drafter.forget(engine, "a")
            set_least(monkeypatch, chance=least)
            drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 7, params)])
            lengths = [len(item.token_ids) for item in options(told(drafter, engine))]
            assert lengths == [
                1 + steps_until_unlikely(other.confidence[1:], least, least=1, before=other.confidence[0])
                for other in found
            ]
            seen.update(lengths)
    assert seen == {2, 3, 4}


def test_unlikely_tokens_are_no_alternatives(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(8, alternatives=3)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH))])
    found = options(told(drafter, engine))
    drafter.forget(engine, "a")
    for count, guess in enumerate(found, start=1):
        set_least(monkeypatch, chance=0.0, alternative=guess.confidence[0])
        drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH))])
        assert options(told(drafter, engine)) == found[:count]
        drafter.forget(engine, "a")
    set_least(monkeypatch, chance=0.0, alternative=found[0].confidence[0] * 1.01)
    drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 4, greedy(LENGTH))])
    assert not any(item.alternatives for item in told(drafter, engine))
    assert list(engine._sequences) == ["a"]


def test_as_it_ships_a_sure_model_goes_as_far_as_wanted_and_has_no_alternatives(
    target: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_least(monkeypatch, chance=LEAST_CHANCE, alternative=LEAST_ALTERNATIVE)
    for temperature, far in ((0.005, 8), (2.0, SOON)):
        params = sampled(LENGTH, seed=5, temperature=temperature, top_p=1.0)
        said = answer(target, PROMPT, params)
        drafter = Drafter(4, alternatives=3)
        drafter.take(engine, [wish(list(PROMPT), len(PROMPT), 8, params)])
        brought = told(drafter, engine)
        tokens = [token for item in brought for token in item.token_ids]
        assert tokens == said[: len(tokens)]
        assert far <= len(tokens) <= (8 if far == 8 else 5)
        assert any(item.alternatives for item in brought) == (far != 8)
        drafter.forget(engine, "a")


# Its place beside decode


async def thread_policy(path: Path) -> int:
    """Of the thread in which a draft model computes."""
    settings = DraftSettings(
        model=str(path), device="cpu", dtype="fp32", block_tokens=16, kv_memory_gib=0.01, _env_file=None
    )
    metrics = DraftMetrics("draft-0", CollectorRegistry()).engine
    model = await DraftModel.load(settings, str(path), ModelFiles("tiny", path, "f"), metrics)
    try:
        return await model._host.async_engine.call(lambda engine: os.sched_getscheduler(threading.get_native_id()))
    finally:
        await model._host.stop()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has it")
async def test_on_cpu_guesses_are_computed_where_nobody_else_wants_the_core(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getscheduler(0)
    assert await thread_policy(path) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before, "that thread alone"
    monkeypatch.setattr(draft_model, "_on_cpu", lambda settings: False)
    assert await thread_policy(path) == before


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has it")
async def test_one_that_gets_no_core_for_long_competes_for_one_until_it_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "HEALTH_CHECK_S", 0.05)
    monkeypatch.setattr(draft_model, "STARVED_S", 0.2)
    settings = DraftSettings(
        model=str(path), device="cpu", dtype="fp32", block_tokens=16, kv_memory_gib=0.01, _env_file=None
    )
    metrics = DraftMetrics("draft-0", CollectorRegistry()).engine
    model = await DraftModel.load(settings, str(path), ModelFiles("tiny", path, "f"), metrics)
    watch = asyncio.create_task(model.exit_when_broken(1000.0))
    thread_id, goes_on = model._yielding_thread, threading.Event()
    assert thread_id is not None

    async def until(policy: int) -> None:
        async with asyncio.timeout(30):
            while os.sched_getscheduler(thread_id) != policy:
                # As a thread that has work takes its turns.
                model._host.async_engine.post(lambda engine: None)
                await asyncio.sleep(0.01)

    try:
        await until(os.SCHED_IDLE)
        model._host.async_engine.post(lambda engine: goes_on.wait(30))
        await until(os.SCHED_OTHER)
        goes_on.set()
        await until(os.SCHED_IDLE)
    finally:
        goes_on.set()
        watch.cancel()
        await model.stop()


async def test_where_that_is_forbidden_it_computes_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert await thread_policy(path) == os.sched_getscheduler(0)
    monkeypatch.delattr(os, "sched_setscheduler")
    assert await thread_policy(path) == os.sched_getscheduler(0)


@pytest.mark.parametrize(
    ("asked", "device", "fbgemm", "expected"),
    [
        ("auto", "cpu", True, "int8"),
        ("auto", "cpu", False, "auto"),
        ("fp32", "cpu", True, "fp32"),
        ("auto", "cuda", True, "auto"),
    ],
)
def test_guesses_are_computed_in_8_bits_on_cpu_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: str, fbgemm: bool, expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        type(torch.backends.quantized), "supported_engines", ["onednn", *(["fbgemm"] if fbgemm else [])], raising=False
    )
    assert _dtype(DraftSettings(dtype=asked, device=device, _env_file=None)) == expected  # type: ignore[arg-type]
