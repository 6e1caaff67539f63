"""Guesses beside the engine: ready before the next step, of one's own tenant, and never in the engine's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.decode.drafting import REMEMBER_TOKENS, Drafted, Drafting
from services.decode.sequence_drafts import SequenceDrafts
from shared.engine import Engine, Sequence, SequenceStep
from shared.models import ModelFiles
from shared.protocol.drafts import DRAFT_MODEL
from shared.speculation import PROMPT_LOOKUP, SUFFIX_TREE, Guess, RecentOutputs, Tally, prompt_lookup
from shared.speculation.prompt_lookup import SLICE_TOKENS
from shared.speculation.suffix_index import SuffixIndex
from shared.telemetry.metrics import DecodeMetrics
from shared.worker.engine_host import EngineHost
from tests.unit.engine_harness import load, sampled, tiny_model

COPIED = list(range(40, 80))


def read(token_ids: list[int], reference: list[int] | None = None, outputs: RecentOutputs | None = None) -> Any:
    drafts = SequenceDrafts(reference or [], outputs or RecentOutputs(), "t")
    drafts.read(token_ids, lambda: None)
    return drafts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=90), st.lists(st.integers(0, 5), max_size=60), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_sequence_read_in_slices_is_the_sequence_read_at_once(
    token_ids: list[int], reference: list[int], remembered: bool
) -> None:
    outputs = RecentOutputs()
    if remembered:
        outputs.add("t", token_ids[::-1])
    whole = read(token_ids, reference, outputs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_lookup, "SLICE_TOKENS", 7)
        sliced = read(token_ids, reference, outputs)
    assert (sliced.length, sliced.guess(8)) == (whole.length, whole.guess(8))
    for drafts in (whole, sliced):
        drafts.extend([1, 2, 3])
    assert sliced.guess(8) == whole.guess(8)


@pytest.mark.parametrize("reference", [0, 5])
def test_others_get_a_turn_while_a_long_prompt_and_a_long_prediction_are_read(
    reference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed, read = [0], SuffixIndex.extend

    def extend(index: SuffixIndex, tokens: list[int]) -> None:
        indexed[-1] += len(tokens)
        read(index, tokens)

    monkeypatch.setattr(SuffixIndex, "extend", extend)
    drafts = SequenceDrafts([9] * (reference * SLICE_TOKENS), RecentOutputs(), "t")
    drafts.read([7] * (10 * SLICE_TOKENS), lambda: indexed.append(0))
    assert indexed == [SLICE_TOKENS] * (10 + reference) + [0]


def test_a_prediction_is_copied_from_its_beginning_however_often_the_prompt_has_it() -> None:
    prompt = [*range(1000, 1000 + SLICE_TOKENS - 20), *COPIED, 5, 6, *COPIED, 9]
    assert read(prompt, reference=COPIED).guess(6).token_ids == tuple(COPIED[:6])


def test_nobody_outside_is_asked_while_a_copy_goes_well() -> None:
    drafts = read([*COPIED, 1, 2, *COPIED[:20]])
    assert drafts.guess(16).token_ids == tuple(COPIED[20:36])
    assert not drafts.asks_outside
    drafts.extend([999])
    drafts.guess(16)
    assert drafts.asks_outside


def test_a_guess_from_outside_is_taken_where_it_promises_more() -> None:
    drafts = read([1, 2, 3, 4])
    assert drafts.guess(8) is None
    assert drafts.asks_outside
    drafts.offer(Guess(4, (5, 6, 7), (0.9, 0.9, 0.9), "draft_model"))
    assert drafts.best(2).token_ids == (5, 6)
    drafts.extend([5])
    assert drafts.guess(8).token_ids == (6, 7)
    assert drafts.asks_outside


def branching(start: int, alternatives: tuple[tuple[int, ...], ...], token_ids: tuple[int, ...] = (5, 6, 7)) -> Guess:
    return Guess(start, token_ids, (0.9,) * len(token_ids), "draft_model", alternatives)


def test_where_a_guess_was_wrong_an_alternative_with_the_right_token_takes_over() -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(branching(4, ((8, 9, 10), (11, 12, 13, 14))))
    assert drafts.best(8).token_ids == (5, 6, 7)
    drafts.extend([11])
    assert drafts.guess(8).token_ids == (12, 13, 14)
    drafts.extend([12, 13])
    assert drafts.guess(8).token_ids == (14,)


def test_an_alternative_is_as_sure_as_was_said_of_it() -> None:
    guess = Guess(4, (5, 6), (0.5, 0.5), "draft_model", ((8, 9, 10), (11, 12, 13)), ((0.2, 0.9, 0.1), (0.1, 0.6, 0.7)))
    drafts = read([1, 2, 3, 4])
    drafts.offer(guess)
    drafts.extend([11])
    first, second = drafts.best(8).confidence
    # It was wrong twice as often as it expected, of which half is believed: a third more.
    assert (first, second) == (pytest.approx(1 - 0.4 * 4 / 3), pytest.approx(1 - 0.3 * 4 / 3))


@pytest.mark.parametrize("said", [(), ((0.3, 0.9, 0.9),), ((0.3, 0.9, 0.9), ()), ((), (0.9,))])
def test_an_alternative_of_which_nothing_is_said_is_neither_sure_nor_unsure(
    said: tuple[tuple[float, ...], ...],
) -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(Guess(4, (5, 6), (0.5, 0.5), "draft_model", ((8, 9, 10), (11, 12, 13)), said))
    drafts.extend([11])
    assert drafts.best(8).token_ids == (12, 13)
    assert drafts.best(8).confidence == (pytest.approx(1 - 0.5 * 4 / 3),) * 2


def test_a_guess_that_goes_on_keeps_the_alternatives_to_it() -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(branching(4, ((8, 9),)))
    drafts.offer(branching(4, (), (5, 6, 7, 8)))
    drafts.extend([8])
    assert drafts.guess(8).token_ids == (9,)


def test_an_alternative_that_begins_as_the_guess_does_replaces_nothing() -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(branching(4, ((5, 20, 21),)))
    drafts.extend([5])
    assert drafts.guess(8).token_ids == (6, 7)


@pytest.mark.parametrize("came", [[5], [99], [5, 8], [99, 8]])
def test_alternatives_are_gone_once_another_token_came(came: list[int]) -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(branching(4, ((8, 9, 10),)))
    drafts.extend(came)
    left = (6, 7) if came == [5] else ()
    best = drafts.best(8)
    assert (best.token_ids if best is not None else ()) == left
    assert drafts._branching is None


def test_a_late_alternative_is_used_as_far_as_it_agrees() -> None:
    drafts = read([1, 2, 3, 4])
    drafts.extend([8, 9])
    drafts.offer(branching(4, ((11, 12), (8, 9, 10))))
    assert drafts.best(8).token_ids == (10,)
    drafts = read([1, 2, 3, 4])
    drafts.extend([8, 20])
    drafts.offer(branching(4, ((8, 9, 10),)))
    assert drafts.best(8) is None
    assert drafts._branching is None


@pytest.mark.parametrize(
    "guess",
    [
        branching(4, ((), (5, 5), ())),
        branching(4, ((5, 20, 21),)),
        branching(4, ((8, 2**31 - 1),), ()),
        branching(0, ((8, 9),)),
        branching(2**31 - 1, ((8, 9),)),
        branching(3, ((8, 9),), (4,)),
        Guess(4, (5, 6, 7), (float("nan"),), "draft_model", ((8, 9),) * 7),
    ],
)
def test_strange_alternatives_do_no_harm(guess: Guess) -> None:
    drafts = read([1, 2, 3, 4])
    drafts.offer(guess)
    for token in (5, 6, 7, 8, 9):
        drafts.extend([token])
        best = drafts.guess(8)
        assert best is None or best.start == drafts.length
    drafts.offer(branching(drafts.length, ((40, 41),)))
    drafts.extend([40])
    assert drafts.guess(8).token_ids == (41,)


@pytest.mark.parametrize(
    ("proposer", "stated"), [(DRAFT_MODEL, (0.9, 0.8)), (PROMPT_LOOKUP, ()), ("draft_service", ())]
)
def test_the_engine_hears_how_sure_a_model_is_and_measures_the_others_itself(
    proposer: str, stated: tuple[float, ...]
) -> None:
    told: list[tuple[Any, ...]] = []
    engine = SimpleNamespace(propose=lambda *given: told.append(given))
    drafted = SimpleNamespace(sequence=SimpleNamespace(seq_id="s"))
    Drafting._propose(cast(Engine, engine), cast(Drafted, drafted), None)
    Drafting._propose(cast(Engine, engine), cast(Drafted, drafted), Guess(7, (1, 2), (0.9, 0.8), proposer))
    assert told == [("s", 7, [1, 2], proposer, stated)]


# Beside an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture
async def host(model: Path) -> AsyncIterator[EngineHost]:
    files = cast(ModelFiles, SimpleNamespace(name="tiny"))
    made = EngineHost(load(model, adaptive_drafts=True), files, DecodeMetrics("decode-0", CollectorRegistry()).engine)
    policy = made.async_engine.engine._draft_policy
    assert policy is not None
    policy.choose = lambda candidates, *_, **__: [_all_of(c) for c in candidates]  # type: ignore[method-assign]
    made.start()
    yield made
    await made.stop()


def _all_of(candidate: Any) -> int:
    candidate.acceptance.wanted = 8
    return int(candidate.length)


async def sequence_of(host: EngineHost, seq_id: str, prompt: list[int], output: int, seed: int = 3) -> Sequence:
    params = sampled(output, seed=seed, temperature=1.5)
    return await host.open(seq_id, prompt, len(prompt), params, salt="", speculate=True)


async def steps_of(host: EngineHost, sequence: Sequence) -> list[SequenceStep]:
    await host.begin(sequence, 0)
    steps: list[SequenceStep] = []
    while not steps or steps[-1].finish_reason is None:
        steps.append(await host.feed.next(sequence.seq_id))
    return steps


async def until_begun(drafting: Drafting, seq_id: str) -> None:
    async with asyncio.timeout(10):
        while seq_id not in drafting._sequences:
            await asyncio.sleep(0.001)


def accepted_of(proposer: str, steps: list[SequenceStep]) -> int:
    return sum(step.accepted for step in steps if step.proposer == proposer)


async def run(
    host: EngineHost, drafting: Drafting, seq_id: str, group: str, output: int = 30, reference: list[int] | None = None
) -> tuple[list[int], list[SequenceStep], Mapping[str, Tally]]:
    """The output, the steps that made it, and the tallies."""
    sequence = await sequence_of(host, seq_id, [3, 1, 4, 1, 5], output)
    drafted = drafting.begin(sequence, reference or [], group)
    await until_begun(drafting, seq_id)
    steps = await steps_of(host, sequence)
    told: asyncio.Future[Mapping[str, Tally]] = asyncio.get_running_loop().create_future()
    drafting.end(drafted, told.set_result, remember=True)
    host.release(sequence)
    tallies = await told
    await host.async_engine.call(lambda engine: None)
    return list(sequence.output_ids), steps, tallies


async def test_a_proposal_is_ready_for_every_step_from_the_first(host: EngineHost) -> None:
    drafting = Drafting(host.async_engine, 8)
    plain, _, _ = await run(host, drafting, "plain", "one")
    output, steps, tallies = await run(host, drafting, "predicted", "other", reference=plain)
    assert output == plain
    assert len(steps) < len(plain) / 4
    # The first step computes the prompt; drafts are verified in decode rows.
    assert all(step.offered for step in steps[1:-1])
    assert {step.proposer for step in steps if step.offered} == {PROMPT_LOOKUP}
    assert tallies[PROMPT_LOOKUP].offered >= len(steps) - 2
    assert not drafting._sequences


async def test_outputs_are_remembered_for_their_group_alone(host: EngineHost) -> None:
    drafting = Drafting(host.async_engine, 8)
    first, steps, _ = await run(host, drafting, "a", "one")
    output, others, _ = await run(host, drafting, "b", "other")
    assert output == first
    assert len(others) == len(steps)
    assert not accepted_of(SUFFIX_TREE, others)
    output, again, _ = await run(host, drafting, "c", "one")
    assert output == first
    assert len(again) < len(steps) / 2
    assert accepted_of(SUFFIX_TREE, again)


async def test_a_long_output_is_remembered_part_by_part(host: EngineHost) -> None:
    drafting = Drafting(host.async_engine, 8)
    parts: list[int] = []
    add = drafting._outputs.add
    drafting._outputs.add = (  # type: ignore[method-assign]
        lambda group, tokens, prompt=(): (parts.append(len(tokens)), add(group, tokens, prompt))[1]
    )
    output, _, _ = await run(host, drafting, "long", "one", output=2 * REMEMBER_TOKENS + 10)
    async with asyncio.timeout(10):
        while sum(parts) < len(output):
            await asyncio.sleep(0.001)
    assert parts == [REMEMBER_TOKENS, REMEMBER_TOKENS, 10]


async def test_a_proposer_that_fails_costs_the_drafts_alone(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = Drafting(host.async_engine, 8)
    expected, _, _ = await run(host, drafting, "plain", "one")
    guess = SequenceDrafts.guess
    calls = 0

    def fails(self: SequenceDrafts, max_tokens: int) -> Guess | None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise ValueError("broken")
        return guess(self, max_tokens)

    monkeypatch.setattr(SequenceDrafts, "guess", fails)
    output, _, _ = await run(host, drafting, "broken", "other", reference=expected[:5])
    assert output == expected
    assert calls == 3
    assert host.fault == ""


async def test_a_sequence_that_ends_before_it_was_read_is_not_begun(host: EngineHost) -> None:
    drafting = Drafting(host.async_engine, 8)
    sequence = await sequence_of(host, "gone", [1, 2, 3], 10)
    drafted = drafting.begin(sequence, [], "one")
    told: asyncio.Future[Mapping[str, Tally]] = asyncio.get_running_loop().create_future()
    drafting.end(drafted, told.set_result, remember=False)
    host.release(sequence)
    await told
    async with asyncio.timeout(10):
        while drafted.drafts.length < 3:
            await asyncio.sleep(0.001)
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)  # whose end is told behind that of the reading
    await host.async_engine.call(lambda engine: None)
    assert not drafting._sequences


def test_what_goes_on_from_a_wrong_guess_is_not_proposed_behind_the_right_token() -> None:
    """As a drafter says it that had not heard of the token yet."""
    drafts = read([5, 6, 7])
    drafts.offer(Guess(3, (8,), (0.9,), "outside"))
    drafts.extend([9])
    drafts.offer(Guess(3, (8, 1, 2), (0.9, 0.9, 0.9), "outside"))
    assert drafts.best(8) is None
    drafts.offer(Guess(3, (9, 1, 2), (0.9, 0.9, 0.9), "outside"))
    assert drafts.best(8).token_ids == (1, 2)  # type: ignore[union-attr]
