"""Drafts in a whole engine: how proposals join, what each step tells about them, and that only what pays is verified.

Durations are given, not taken: what is verified then follows from the tokens alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.engine import AsyncEngine, Engine, SequenceStep
from shared.engine.draft_policy import SETTLED, Acceptance, Candidate, DraftPolicy
from tests.unit.engine_harness import begin, drain, greedy, load, outputs, sampled, tiny_model

PROMPT = [(i * 37) % 250 for i in range(45)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> Engine:
    return load(model_path)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Every draft that fits is verified."""
    yield loaded
    for seq_id in list(loaded._sequences):
        loaded.release(seq_id)
    assert loaded.pool.num_used == 0


def expected_ids(engine: Engine, params: Any, prompt: list[int] = PROMPT) -> list[int]:
    begin(engine, "plain", prompt, params, speculate=False)
    found = outputs(drain(engine))["plain"]
    engine.release("plain")
    return found


def adaptive(path: Path, cost_s: Callable[[int], float], **changes: Any) -> tuple[Engine, DraftPolicy]:
    """An engine whose steps take `cost_s` of their rows, none of which pads, as far as its policy is told."""
    engine = load(path, adaptive_drafts=True, **changes)
    policy = engine._draft_policy
    assert policy is not None
    observe = policy.cost.observe
    policy.cost.observe = lambda rows, *_: observe(rows, rows, cost_s(rows))  # type: ignore[method-assign]
    return engine, policy


# How proposals join


def test_a_drafter_that_goes_on_from_its_own_guess_extends_its_proposal(engine: Engine) -> None:
    expected = expected_ids(engine, greedy(12))
    begin(engine, "s", PROMPT, greedy(12))
    engine.step()
    at = len(PROMPT) + 1
    engine.propose("s", at, expected[1:3], "model")
    engine.propose("s", at + 2, expected[3:5], "model")
    engine.propose("s", at + 4, expected[5:6], "another")
    engine.propose("s", at + 7, expected[8:9], "beyond a gap")
    (step,) = engine.step()
    assert (step.offered, step.drafted, step.accepted, step.proposer) == (5, 5, 5, "model")


def test_a_later_proposal_replaces_an_earlier_one_unless_it_says_less_of_the_same(engine: Engine) -> None:
    expected = expected_ids(engine, greedy(30))
    sequence = begin(engine, "s", PROMPT, greedy(30))
    engine.step()

    def verified(*proposals: tuple[int, list[int], str]) -> tuple[int, int, str]:
        """(drafted, accepted, proposer); positions and the true next tokens count from the end of the sequence."""
        for offset, ids, name in proposals:
            engine.propose("s", len(sequence.token_ids) + offset, ids, name)
        (step,) = engine.step()
        return step.drafted, step.accepted, step.proposer

    def right(count: int) -> list[int]:
        known = len(sequence.output_ids)
        return expected[known : known + count]

    wrong = [(right(1)[0] + 1) % 250, 3, 3]
    assert verified((0, wrong, "first"), (0, right(2), "later")) == (2, 2, "later")
    assert verified((0, right(3), "long"), (0, right(1), "short")) == (3, 3, "long")
    assert verified((0, right(1), "short"), (0, right(3), "long")) == (3, 3, "long")
    assert verified((0, right(3), "first"), (2, [(right(3)[2] + 1) % 250], "of the third")) == (3, 2, "first")
    agreeing = [*sequence.token_ids[-2:], *right(2)]
    assert verified((0, wrong, "first"), (-2, agreeing, "overlapping")) == (2, 2, "overlapping")
    assert verified((0, right(2), "first"), (-1, [251, 3, 3], "of another past")) == (2, 2, "first")
    assert verified((0, right(2), "first"), (1, [*right(2)[1:], engine.vocab_size], "no token")) == (2, 2, "first")
    assert verified((0, right(2), "first"), (0, [], "silent")) == (2, 2, "first")


def test_what_remains_of_a_proposal_is_extended_as_the_sequence_grows(engine: Engine) -> None:
    expected = expected_ids(engine, greedy(40))
    sequence = begin(engine, "s", PROMPT, greedy(40))
    engine.step()
    start = len(PROMPT)
    engine.propose("s", start, expected[:30], "ahead")
    assert sequence.proposal is not None
    assert [step.accepted for step in engine.step()] == [8]
    engine.propose("s", start + 30, expected[30:36], "ahead")
    while sequence.finish_reason is None:
        (step,) = engine.step()
        assert step.accepted == step.drafted
    assert sequence.output_ids == expected


def test_a_proposal_takes_a_bounded_memory(engine: Engine) -> None:
    sequence = begin(engine, "s", PROMPT, greedy(500))
    engine.step()
    for _ in range(5):
        behind = len(sequence.token_ids) + len(sequence.proposal[1] if sequence.proposal else [])
        engine.propose("s", behind, [3] * 1_000)
    assert sequence.proposal is not None
    assert len(sequence.proposal[1]) == 4 * engine.config.max_draft_tokens


def stated(engine: Engine, seq_id: str) -> list[float]:
    """What was said of each of the drafts that the next step may verify, as its policy hears it."""
    engine._scheduler._draft_policy = policy = DraftPolicy(8, 128)
    heard: list[Candidate] = []

    def choose(candidates: list[Candidate], *_: Any, **__: Any) -> list[int]:
        heard.extend(candidates)
        return [0] * len(candidates)

    policy.choose = choose  # type: ignore[method-assign]
    try:
        engine.step()
    finally:
        engine._scheduler._draft_policy = None
    (candidate,) = [c for c in heard if c.length]
    assert len(candidate.confidence) in (0, candidate.length)
    return list(candidate.confidence)


SAID = (0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.mark.parametrize("known", [0, 1, 3])
def test_what_is_said_of_each_draft_stays_with_it(engine: Engine, known: int) -> None:
    """Where the first of them stand in the sequence already, and as it grows."""
    expected = expected_ids(engine, greedy(12))
    sequence = begin(engine, "s", PROMPT, greedy(12))
    while len(sequence.output_ids) < known + 1:
        engine.step()
    engine.propose("s", len(PROMPT) + 1, expected[1:6], "model", SAID)
    assert sequence.confidence == list(SAID[known:])
    for later in range(known, 4):
        assert stated(engine, "s") == list(SAID[later:])
    assert sequence.output_ids == expected[: 1 + 4]


def test_what_is_said_is_as_bounded_as_the_proposal(engine: Engine) -> None:
    sequence = begin(engine, "s", PROMPT, greedy(500))
    engine.step()
    engine.propose("s", len(PROMPT) + 1, [3] * 100, "model", tuple(n / 100 for n in range(100)))
    limit = 4 * engine.config.max_draft_tokens
    assert sequence.confidence == [n / 100 for n in range(limit)]
    assert stated(engine, "s") == [n / 100 for n in range(8)], "the policy hears of as many as may be verified"


def test_what_was_said_of_a_proposal_is_said_of_no_other(engine: Engine) -> None:
    expected = expected_ids(engine, greedy(20))
    sequence = begin(engine, "s", PROMPT, greedy(20))
    engine.step()
    at = len(PROMPT) + 1
    engine.propose("s", at, expected[1:4], "model", SAID[:3])
    engine.propose("s", at, expected[1:3], "silent")
    assert sequence.confidence == list(SAID[:3]), "one that says less of the same changes nothing"
    engine.propose("s", at, expected[1:3], "model", (0.3, 0.4))
    assert sequence.confidence == [0.3, 0.4, SAID[2]], (
        "unless it is the same proposer's, which is more or less sure now"
    )
    engine.propose("s", at + 3, expected[4:6], "model", SAID[3:])
    assert sequence.confidence == [], "of what is joined nobody spoke as a whole"
    assert stated(engine, "s") == []
    engine.propose("s", at + 1, expected[2:5], "model", SAID[:3])
    assert sequence.confidence == [], "says less of the same"
    engine.propose("s", at + 1, [7, 7, 7], "model", SAID[:3])
    assert sequence.confidence == list(SAID[:3])
    engine.propose("s", at + 1, [8, 8, 8], "model", SAID[:2])
    assert sequence.confidence == [], "one for each token, or none"
    engine.propose("s", at + 1, [9, 9, 9], "model", SAID[:3])
    engine.propose("s", at + 1, [6, 6, 6], "lookup")
    assert sequence.confidence == [], "another's guess"
    engine.propose("s", at + 1, [9, 9, 9], "model", SAID[:3])
    engine.propose("s", at + 1, [5, 5, engine.vocab_size], "model", SAID[2:])
    assert (sequence.proposal, sequence.confidence) == ((at + 1, [9, 9, 9]), list(SAID[:3])), "what is dropped"


def test_a_sure_proposal_is_verified_and_an_unsure_one_is_not_whatever_became_of_others(model_path: Path) -> None:
    """Also where the policy has seen nothing of the proposer yet."""
    engine, _ = adaptive(model_path, lambda rows: 0.04 + 0.004 * rows)
    engine.measure_costs()
    expected = expected_ids(engine, greedy(100))
    sequence = begin(engine, "s", PROMPT, greedy(100))
    engine.step()
    drafted: dict[float, list[int]] = {0.97: [], 0.1: []}
    for chance in [0.97, 0.1] * 4:
        known = len(sequence.output_ids)
        engine.propose("s", len(PROMPT) + known, expected[known : known + 8], "model", (chance,) * 8)
        drafted[chance] += [step.drafted for step in engine.step()]
    assert min(drafted[0.97]) >= 6
    assert max(drafted[0.1]) == 0
    assert sequence.output_ids == expected[: len(sequence.output_ids)]


# What steps tell


def test_each_step_tells_what_was_offered_verified_and_right_and_by_whom(engine: Engine) -> None:
    expected = expected_ids(engine, greedy(20))
    begin(engine, "s", PROMPT, greedy(20))
    begin(engine, "silent", PROMPT[:9], greedy(20))
    begin(engine, "off", PROMPT[:7], greedy(20), speculate=False)
    drained = engine.step()
    assert all(step.offered == step.drafted == 0 and step.proposer == "" for step in drained)
    assert (engine.last_stats.speculating, engine.last_stats.ready) == (0, 0)
    engine.propose("s", len(PROMPT), [*expected[:3], (expected[3] + 1) % 250, 3], "lookup")
    engine.propose("off", 7, [1, 2, 3], "ignored")
    steps = {step.seq_id: step for step in engine.step()}
    told = [(s.offered, s.drafted, s.accepted, s.proposer) for s in (steps["s"], steps["silent"], steps["off"])]
    assert told == [(4, 4, 2, "lookup"), (0, 0, 0, ""), (0, 0, 0, "")]
    stats = engine.last_stats
    assert (stats.speculating, stats.ready, stats.drafted, stats.accepted) == (2, 1, 4, 2)


async def test_the_name_of_the_proposer_passes_the_thread(model_path: Path) -> None:
    expected = expected_ids(load(model_path), greedy(8))
    ended = asyncio.Event()
    seen: list[SequenceStep] = []

    def on_steps(steps: list[SequenceStep], _: object) -> None:
        seen.extend(steps)
        if steps[-1].finish_reason:
            ended.set()

    engine = AsyncEngine(load(model_path), on_steps, lambda *_: ended.set())

    def start(engine: Engine) -> None:
        begin(engine, "s", PROMPT, greedy(8))

    engine.start()
    try:
        engine.post(start)
        engine.propose("s", len(PROMPT), expected, "lookup")
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        await engine.stop()
    assert [step.proposer for step in seen if step.drafted] == ["lookup"]


# What is verified


def test_as_many_right_drafts_are_verified_as_rows_cost_little(model_path: Path) -> None:
    engine, _ = adaptive(model_path, lambda rows: 0.04 + 0.001 * rows)
    params = sampled(300)
    expected = expected_ids(engine, params)
    sequence = begin(engine, "s", PROMPT, params)
    steps = []
    while sequence.finish_reason is None:
        engine.propose("s", len(PROMPT), expected[: len(sequence.output_ids) + 12], "right")
        steps += engine.step()
    assert sequence.output_ids == expected
    assert [step.drafted for step in steps[-12:-2]] == [8] * 10
    assert sequence.acceptance.wanted == 8


def test_a_lying_proposer_is_soon_not_verified_and_one_that_tells_the_truth_again_is(model_path: Path) -> None:
    engine, _ = adaptive(model_path, lambda rows: 0.04 + 0.004 * rows)
    params = greedy(400)
    expected = expected_ids(engine, params)
    sequence = begin(engine, "s", PROMPT, params)
    lied: list[int] = []
    while len(sequence.output_ids) < 150:
        known = len(sequence.output_ids)
        engine.propose("s", len(sequence.token_ids), [(t + 1) % 250 for t in expected[known : known + 5]], "fickle")
        lied += [step.drafted for step in engine.step()]
    assert sum(lied) < 20
    assert sum(lied[-50:]) == 0
    assert sequence.acceptance.wanted == 0
    true: list[int] = []
    while sequence.finish_reason is None:
        engine.propose("s", len(PROMPT), expected[: len(sequence.output_ids) + 9], "fickle")
        true += [step.drafted for step in engine.step()]
    assert sequence.output_ids == expected
    assert next(i for i, drafted in enumerate(true) if drafted) < 30
    assert max(true) == 8


def test_under_load_nothing_is_verified_where_rows_are_dear(model_path: Path) -> None:
    engine, _ = adaptive(model_path, lambda rows: 0.02 + 0.01 * rows if rows <= 8 else 0.1 * rows)
    prompts = {f"s{i}": PROMPT[i : i + 20] for i in range(8)}
    expected = {name: expected_ids(engine, greedy(60), prompt) for name, prompt in prompts.items()}
    alone = begin(engine, "s0", prompts["s0"], greedy(60))

    def run() -> list[int]:
        drafted = []
        while any(s.finish_reason is None for s in engine._sequences.values()):
            for name, sequence in engine._sequences.items():
                guess = [(t + (i % 3 == 2)) % 250 for i, t in enumerate(expected[name])]
                known = len(sequence.output_ids)
                engine.propose(name, len(sequence.token_ids), guess[known : known + 6], "mostly right")
            drafted.append(sum(step.drafted for step in engine.step()))
        return drafted

    assert sum(run()) > 20
    assert alone.output_ids == expected["s0"]
    engine.release("s0")
    sequences = {name: begin(engine, name, prompt, greedy(60)) for name, prompt in prompts.items()}
    drafted = run()
    assert sum(map(bool, drafted[10:])) <= 3
    assert {name: s.output_ids for name, s in sequences.items()} == expected


def test_steps_with_prompts_teach_no_row_count(model_path: Path) -> None:
    engine = load(model_path, adaptive_drafts=True)
    policy = engine._draft_policy
    assert policy is not None
    seen: list[int] = []
    observe = policy.cost.observe

    def note(rows: int, padded: int, seconds: float) -> None:
        assert padded == engine._runner.padded_rows(rows) >= rows
        assert 0 < seconds < 60
        seen.append(rows)
        observe(rows, padded, seconds)

    policy.cost.observe = note  # type: ignore[method-assign]
    begin(engine, "a", PROMPT, greedy(40))
    engine.step()
    assert seen == []
    for _ in range(SETTLED + 1):
        engine.step()
    assert seen == [1] * (SETTLED + 1)
    assert policy.cost.is_known(1)
    begin(engine, "b", PROMPT[::-1] * 5, greedy(5))
    engine.step()
    engine.step()
    assert seen == [1] * (SETTLED + 1)
    assert policy.cost.chunk_token_s > 0
    engine.step()
    assert seen[-1] == 2
    drain(engine)


def test_an_engine_without_drafts_or_told_to_verify_all_has_no_policy(model_path: Path) -> None:
    assert load(model_path, adaptive_drafts=True, max_draft_tokens=0)._draft_policy is None
    assert load(model_path, adaptive_drafts=False)._draft_policy is None


@pytest.mark.parametrize("params", [greedy(80), sampled(80, seed=5, presence_penalty=0.7, logprobs=2)])
def test_tokens_and_logprobs_do_not_depend_on_what_the_policy_measured(model_path: Path, params: Any) -> None:
    """Real durations, and some that are nonsense; proposals that are right, wrong, late and of several proposers."""
    plain = load(model_path)
    begin(plain, "s", PROMPT, params, speculate=False)
    reference = drain(plain)
    expected = outputs(reference)["s"]
    noise = itertools.cycle([1e-6, 0.3, 0.001, 0.02, 5.0])
    for engine in (
        load(model_path, adaptive_drafts=True),
        adaptive(model_path, lambda _: next(noise))[0],
        adaptive(model_path, lambda _: 0.01)[0],
    ):
        sequence = begin(engine, "s", PROMPT, params)
        begin(engine, "neighbour", PROMPT[3:], sampled(120, seed=8))
        steps = []
        for turn in itertools.count():
            if sequence.finish_reason is not None:
                break
            known = len(sequence.output_ids)
            guess = [(t + (turn % 3 == 1 and i == 2)) % 250 for i, t in enumerate(expected[known : known + 7])]
            engine.propose("s", len(sequence.token_ids), guess, f"proposer {turn % 2}")
            engine.propose("s", len(sequence.token_ids) + 5, [3, 4, 5], "beyond")
            engine.propose("neighbour", len(PROMPT) - 3 + known, guess, "wrong")
            steps += engine.step()
        mine = [step for step in steps if step.seq_id == "s"]
        assert outputs(mine)["s"] == expected
        assert [p for step in mine for p in step.logprobs] == [p for step in reference for p in step.logprobs]


# What steps cost, measured before there is work


def free(rows: int) -> float:
    """Up to five rows cost as much as one."""
    return 0.02 + 0.002 * max(rows - 5, 0)


def test_unlikely_drafts_are_verified_where_rows_were_measured_to_cost_nothing(model_path: Path) -> None:
    drafted = {}
    for measured in (False, True):
        engine, policy = adaptive(model_path, free, max_draft_tokens=16)
        if measured:
            unknown = list(policy.chances(Acceptance(), ""))
            engine.measure_costs()
            policy.choose([], 1, spare=1)  # what it knows of proposers is looked up anew in each step
            assert policy.chances(Acceptance(), "") == unknown, "what was made up says nothing about proposers"
            assert policy.cost.expected()[1:7] == pytest.approx([free(rows) for rows in range(1, 7)])
        params = sampled(120, seed=3)
        expected = expected_ids(engine, params)
        sequence = begin(engine, "s", PROMPT, params)
        drafted[measured] = 0
        while sequence.finish_reason is None:
            place = len(sequence.output_ids)
            if place % 20:  # nineteen of twenty are wrong
                engine.propose("s", len(sequence.token_ids), [0, 0, 0, 0], "poor")
            elif place:
                engine.propose("s", len(sequence.token_ids), expected[place : place + 1], "poor")
            drafted[measured] += sum(step.drafted for step in engine.step())
        assert list(sequence.output_ids) == expected
        engine.release("s")
        assert engine.pool.num_used == 0
    assert drafted[True] > 2 * drafted[False]


def test_where_the_cache_is_too_small_nothing_is_measured(model_path: Path) -> None:
    engine, policy = adaptive(model_path, free, max_draft_tokens=16, kv_memory_bytes=9 << 12)
    before = policy.cost.expected().tolist()
    engine.measure_costs()
    assert policy.cost.expected().tolist() == before
    assert engine.pool.num_used == 0
