"""Speculation never changes the output: whatever is guessed, by whom, and whether it comes late or not at all."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from services.decode.demand import FIRST_REST, SETTLE_STEPS, TRY_STEPS
from services.decode.draft_link import DRAFT_SERVICE
from services.decode.worker import DecodeWorker
from shared.bus import Bus
from shared.engine import SequenceStep
from shared.engine.draft_policy import Candidate, DraftPolicy
from shared.protocol.drafts import DRAFT_MODEL, DraftContext, Proposal, Proposals, decode_context, encode_draft
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import TokenLogprobs, Tokens
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import draft_subject
from shared.speculation import PROMPT_LOOKUP, SUFFIX_TREE
from tests.integration.gateway_harness import entries_of
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import Pipeline, Running, pipeline_on, text
from tests.unit.engine_harness import tiny_model

OUTPUT = 40
VOCABULARY = 250

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -100.0}},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "min tokens": {"temperature": 0.9, "ignore_eos": False, "min_tokens": 30},
    "max tokens": {"temperature": 0.0, "max_tokens": 7},
}


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    reason: str


class Generous(DraftPolicy):
    """Verifies all that is offered, so that a test does not depend on how long steps take."""

    def choose(self, candidates: list[Candidate], base_rows: int, *, chunk_tokens: int = 0, spare: int) -> list[int]:
        for candidate in candidates:
            candidate.acceptance.wanted = 8
        return [candidate.length for candidate in candidates]


class Deaf(Generous):
    """Would like guesses, and verifies none."""

    def choose(self, candidates: list[Candidate], base_rows: int, *, chunk_tokens: int = 0, spare: int) -> list[int]:
        return [0 for _ in super().choose(candidates, base_rows, chunk_tokens=chunk_tokens, spare=spare)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, model) as made:
        await made.prefill(slots=8)
        yield made


def prompt_of(number: int) -> list[int]:
    return text(number, 21) * 3


async def speculating(pipeline: Pipeline, **changes: Any) -> Running:
    decode = await pipeline.decode(speculation="auto", **changes)
    set_policy(decode, Generous)
    return decode


def seen(decode: Running) -> tuple[float | None, float | str]:
    """Whether drafters are asked, as metrics and status tell it."""
    assert isinstance(decode.worker, DecodeWorker)
    gauge = decode.registry.get_sample_value("headrace_spec_decode_drafters_asked")
    return gauge, decode.worker.speculation.describe()["drafters"]


def set_policy(decode: Running, policy: type[DraftPolicy]) -> None:
    engine = decode.host.async_engine.engine
    engine._draft_policy = engine._scheduler._draft_policy = policy(16, engine.config.max_batch_tokens)


async def answer_of(pipeline: Pipeline, request: GenerationRequest) -> Answer:
    state = await pipeline.until_ended(request)
    records = [entry.record for entry in await entries_of(pipeline.bus, request.request_id, "t")]
    tokens = [record for record in records if isinstance(record, Tokens)]
    assert state.ended is not None
    return Answer(
        state.output_ids,
        "".join(record.text for record in tokens),
        [logprob for record in tokens for logprob in record.logprobs],
        state.ended.reason,
    )


async def answers(pipeline: Pipeline, cases: dict[str, dict[str, Any]], **fields: Any) -> dict[str, Answer]:
    """All cases at once, each with a prompt of its own that repeats itself."""
    requests = {
        name: await pipeline.submit(prompt_of(number), seed=number, output=OUTPUT, params=params, **fields)
        for number, (name, params) in enumerate(cases.items())
    }
    return {name: await answer_of(pipeline, request) for name, request in requests.items()}


async def plain_answers(pipeline: Pipeline) -> tuple[dict[str, dict[str, Any]], dict[str, Answer]]:
    """The cases, one of them with a stop string from the middle of what it says, and their undrafted answers."""
    await pipeline.decode(speculation="off")
    plain = await answers(pipeline, {"greedy": CASES["greedy"]})
    said = plain["greedy"].text
    cases = {"stop string": CASES["greedy"] | {"stop": [said[len(said) // 2 :][:3]]}} | CASES
    expected = await answers(pipeline, cases)
    assert expected["stop string"].reason == "stop"
    assert len(expected["stop string"].ids) < OUTPUT
    assert len(expected["logprobs"].logprobs) == OUTPUT
    assert len(expected["max tokens"].ids) == 7
    return cases, expected


Guesses = Callable[[DraftContext, list[int]], list[Proposal]]
"""What a drafter says to a context: (the context, all tokens it knows of the sequence) -> proposals."""


class Drafter:
    """A drafter of the test's own: real messages, and the guesses that the test wants."""

    def __init__(self, bus: Bus, model: str, name: str, guesses: Guesses) -> None:
        self.name = name
        self.contexts: list[DraftContext] = []
        self.known: dict[str, list[int]] = {}
        self.silent = False
        self.sent = 0
        self.gaps: list[DraftContext] = []
        """Contexts that left something out, or told it twice."""
        self._bus = bus
        self._model = model
        self._guesses = guesses

    async def open(self) -> None:
        await self._bus.client.subscribe(draft_subject(self._model, self.name), cb=self._on_context)
        await asyncio.sleep(0)
        await self._bus.client.flush(2)
        self._bus.announce(self._report)

    def _report(self) -> InstanceStatus:
        now = time.time()
        return InstanceStatus("draft", self.name, self.name, 1, "", now, now, state="ready", model=self._model)

    async def _on_context(self, message: Msg) -> None:
        context = decode_context(message.data)
        self.contexts.append(context)
        if context.forget:
            self.known.pop(context.request_id, None)
            return
        known = self.known.setdefault(context.request_id, [])
        if context.start == 0:
            known.clear()
        if context.start != len(known):
            self.gaps.append(context)
        known += context.token_ids
        if self.silent:
            return
        for proposal in self._guesses(context, known):
            self.sent += 1
            await self._bus.client.publish(context.reply_to, encode_draft(Proposals([proposal])))


@asynccontextmanager
async def drafter(pipeline: Pipeline, guesses: Guesses) -> AsyncIterator[Drafter]:
    """One that all workers of the pipeline see."""
    name = f"draft-{uuid.uuid4().hex[:6]}"
    async with await Bus.connect(pipeline.bus.client.connected_url.geturl(), name=name) as bus:
        made = Drafter(bus, pipeline.model.name, name, guesses)
        await made.open()

        async def seen() -> bool:
            buses = [running.bus for running in pipeline._workers.values()]
            return all(name in [s.instance for s in bus.statuses.live("draft", pipeline.model.name)] for bus in buses)

        await eventually(seen)
        yield made


class Paced:
    """Lets a worker's engine begin a step only when the drafter has heard of all tokens and its guesses have arrived.

    So what is verified does not depend on who is quicker.
    """

    def __init__(self, decode: Running, other: Drafter) -> None:
        assert isinstance(decode.worker, DecodeWorker)
        self._engine = decode.host.async_engine.engine
        self._drafting = decode.worker.speculation._drafting
        self._link = decode.worker.speculation._link
        self._drafter = other
        self._taken, self._sent_before = 0, other.sent
        self._step, self._take = self._engine.step, self._link._take
        self._engine.step = self._paced  # type: ignore[method-assign]
        self._link._take = self._count  # type: ignore[method-assign]

    def release(self) -> None:
        self._engine.step = self._step  # type: ignore[method-assign]

    def _count(self, proposal: Proposal) -> None:
        self._taken += 1
        self._take(proposal)

    def _paced(self) -> list[SequenceStep]:
        if all(map(self._is_told, self._engine.active_ids())) and not self._coming():
            return self._step()
        time.sleep(0.0005)
        return []  # the engine's thread looks at what has arrived, and asks again

    def _is_told(self, seq_id: str) -> bool:
        told = self._link._sequences.get(seq_id)
        if told is None or len(told.token_ids) > len(self._engine._sequences[seq_id].token_ids):
            return True
        known = self._drafter.known.get(seq_id, [])
        is_whole = len(told.token_ids) == len(self._engine._sequences[seq_id].token_ids)
        return is_whole and (not told.wanted or len(known) == len(told.token_ids))

    def _coming(self) -> bool:
        return self._taken < self._drafter.sent - self._sent_before or bool(self._drafting._offered)


def lies(context: DraftContext, known: list[int]) -> list[Proposal]:
    ids = [random.randrange(VOCABULARY) for _ in range(12)]
    others = [[random.randrange(VOCABULARY) for _ in range(4)] for _ in range(7)]
    sure = [[0.99] * 4] * 7
    return [Proposal(context.request_id, len(known), ids, DRAFT_MODEL, [0.99] * 12, False, others, sure)]


def late(context: DraftContext, known: list[int]) -> list[Proposal]:
    """Right, and of no use: what has been decided, and a guess behind it that came too late to fit."""
    start = max(len(known) - 6, 0)
    return [
        Proposal(context.request_id, start, known[start:], DRAFT_MODEL),
        Proposal(context.request_id, start, [*known[start:], 1, 2, 3], DRAFT_MODEL, [0.9] * (len(known) - start + 3)),
    ]


def repeats(context: DraftContext, known: list[int]) -> list[Proposal]:
    return [Proposal(context.request_id, len(known), [known[-1]] * 16, DRAFT_MODEL, [0.99] * 16)] * 5


def nonsense(context: DraftContext, known: list[int]) -> list[Proposal]:
    """Well formed, and wrong in every way."""
    return [
        Proposal(context.request_id, len(known), [VOCABULARY * 1000, 2**31 - 1], DRAFT_MODEL, [1.0, 1.0]),
        Proposal(context.request_id, 2**31 - 1, [1], DRAFT_MODEL, [float("nan")]),
        Proposal(context.request_id, len(known) + 5, [1, 2], "stranger", [0.5]),
        Proposal(context.request_id, 0, [], "", resend=len(known) % 3 == 0),
        Proposal("another", len(known), [1, 2, 3], DRAFT_MODEL),
        Proposal(context.request_id, len(known), [3] * 64, PROMPT_LOOKUP, [1.0] * 64),
        Proposal(context.request_id, len(known), [], DRAFT_MODEL, alternatives=[[t, VOCABULARY * 9] for t in range(7)]),
        Proposal(context.request_id, 2**31 - 1, [1], DRAFT_MODEL, alternatives=[[], [3], [3]]),
        Proposal(context.request_id, 0, known[:1], DRAFT_MODEL, alternatives=[known[:16]] * 7),
        Proposal(context.request_id, len(known), [1], DRAFT_MODEL, [-3.0], False, [[2], [3, 4]], [[float("nan")] * 5]),
    ]


@pytest.mark.parametrize(
    ("guesses", "verified"),
    [(lies, DRAFT_MODEL), (late, DRAFT_MODEL), (repeats, DRAFT_MODEL), (nonsense, DRAFT_SERVICE)],
)
async def test_no_drafter_changes_an_answer(pipeline: Pipeline, guesses: Guesses, verified: str) -> None:
    cases, expected = await plain_answers(pipeline)
    decode = await speculating(pipeline)
    async with drafter(pipeline, guesses) as other:
        Paced(decode, other)
        assert await answers(pipeline, cases) == expected
        assert [context for context in other.contexts if context.start == 0 and context.params]
        assert not other.gaps
        assert await answers(pipeline, cases, speculation="off") == expected
        await decode.until_idle()
    assert isinstance(decode.worker, DecodeWorker)
    assert decode.worker.speculation.totals.drafted[verified] > 0


async def test_the_policy_that_ships_changes_no_answer(pipeline: Pipeline) -> None:
    cases, expected = await plain_answers(pipeline)
    decode = await pipeline.decode(speculation="auto")
    async with drafter(pipeline, repeats) as other:
        Paced(decode, other)
        for salt in ("one", "two", "three"):
            assert await answers(pipeline, cases, salt=salt) == expected
    assert isinstance(decode.worker, DecodeWorker)
    assert decode.worker.speculation.totals.drafted.total() > 0


async def test_a_drafter_that_is_right_is_believed_and_one_that_dies_is_missed_by_nobody(pipeline: Pipeline) -> None:
    """Sampled answers, which nothing in this process can guess."""
    cases = {f"{n}": {"temperature": 1.5} for n in range(4)}
    await pipeline.decode(speculation="off")
    expected = await answers(pipeline, cases)
    whole = {tuple(prompt_of(n)): [*prompt_of(n), *expected[f"{n}"].ids] for n in range(4)}

    def knows(context: DraftContext, known: list[int]) -> list[Proposal]:
        ids = whole[tuple(known[:63])][len(known) : len(known) + context.wanted]
        return [Proposal(context.request_id, len(known), ids, DRAFT_MODEL, [0.9] * len(ids))] if ids else []

    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    totals = decode.worker.speculation.totals
    async with drafter(pipeline, knows) as other:
        paced = Paced(decode, other)
        assert await answers(pipeline, cases, salt="first") == expected
        assert totals.accepted[DRAFT_MODEL] > 0
        other.silent = True
        assert await answers(pipeline, cases, salt="second") == expected
        paced.release()
    assert await answers(pipeline, cases, salt="third") == expected
    await decode.until_idle()


async def test_a_drafter_whose_first_choice_is_always_wrong_helps_by_its_alternatives(pipeline: Pipeline) -> None:
    cases = {f"{n}": {"temperature": 1.5} for n in range(4)}
    await pipeline.decode(speculation="off")
    expected = await answers(pipeline, cases)
    whole = {tuple(prompt_of(n)): [*prompt_of(n), *expected[f"{n}"].ids] for n in range(4)}

    turns = Counter[str]()

    def doubts(context: DraftContext, known: list[int]) -> list[Proposal]:
        """Says nothing more where an alternative has come true."""
        turns[context.request_id] += 1
        right = whole[tuple(known[:63])][len(known) : len(known) + 4]
        if turns[context.request_id] % 2 == 0 or not right:
            return []
        wrong, strange = (right[0] + 1) % VOCABULARY, (right[0] + 2) % VOCABULARY
        others = [[strange, 3, 3], right]
        chances = [[0.02, 0.1, 0.1], [0.07, *[0.9] * (len(right) - 1)]]
        return [Proposal(context.request_id, len(known), [wrong], DRAFT_MODEL, [0.9], False, others, chances)]

    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    async with drafter(pipeline, doubts) as other:
        Paced(decode, other)
        assert await answers(pipeline, cases, salt="first") == expected
        await decode.until_idle()
    assert decode.worker.speculation.totals.accepted[DRAFT_MODEL] > 0


async def test_a_drafter_whose_guesses_nobody_verifies_rests_until_they_are(pipeline: Pipeline) -> None:
    await pipeline.decode(speculation="off")
    expected = await answers(pipeline, {"0": {"temperature": 1.5}})
    whole = [*prompt_of(0), *expected["0"].ids]

    def knows(context: DraftContext, known: list[int]) -> list[Proposal]:
        ids = whole[len(known) : len(known) + min(context.wanted, 2)]
        return [Proposal(context.request_id, len(known), ids, DRAFT_MODEL, [0.9] * len(ids))] if ids else []

    decode = await speculating(pipeline)
    async with drafter(pipeline, knows) as other:
        Paced(decode, other)

        async def asked(salt: str) -> list[int]:
            """By context of one request: the tokens asked for."""
            other.contexts.clear()
            assert await answers(pipeline, {"0": {"temperature": 1.5}}, salt=salt) == expected
            await decode.until_idle()
            return [context.wanted for context in other.contexts if not context.forget]

        assert all((await asked("verified"))[:-2]), "but for the end"
        set_policy(decode, Deaf)
        assert seen(decode) == (1, "asked")
        told = []
        while any(await asked(f"unused {len(told)}")):
            told.append(seen(decode))
            assert len(told) < 20
        assert (0, "resting") in told
        set_policy(decode, Generous)
        for round_ in range((FIRST_REST + SETTLE_STEPS + TRY_STEPS) // OUTPUT + 1):
            await asked(f"tried again {round_}")
        assert all((await asked("trusted again"))[:-2])
        assert seen(decode) == (1, "asked")


async def test_a_drafter_that_comes_is_asked_at_once_however_long_there_was_none(pipeline: Pipeline) -> None:
    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    for number in range(6):  # three times as many steps as a drafter is given to bring something
        request = await pipeline.submit(prompt_of(1), salt=f"{number}", params={"temperature": 1.5}, output=OUTPUT)
        await pipeline.until_ended(request)
    async with drafter(pipeline, repeats) as other:
        Paced(decode, other)
        request = await pipeline.submit(prompt_of(1), salt="asked", params={"temperature": 1.5}, output=OUTPUT)
        await pipeline.until_ended(request)
        await decode.until_idle()
        assert other.contexts[0].wanted
        assert decode.worker.speculation._demand.asks


async def test_a_drafter_hears_of_a_sequence_as_of_its_request_and_of_its_end(pipeline: Pipeline) -> None:
    decode = await speculating(pipeline)
    params = {"temperature": 0.5, "presence_penalty": 0.5, "logit_bias": {4: 1.0}, "min_tokens": 3}
    async with drafter(pipeline, lies) as other:
        request = await pipeline.submit(prompt_of(1), params=params, salt="salted")
        answer = await answer_of(pipeline, request)
        await decode.until_idle()

        async def forgotten() -> bool:
            return other.contexts[-1].forget

        await eventually(forgotten)
        first = other.contexts[0]
        assert (first.start, first.num_prompt, first.params, first.salt, first.tenant) == (
            0,
            len(request.prompt_ids),
            request.params,
            "salted",
            "t",
        )
        told = [*first.token_ids]
        for context in other.contexts[1:-1]:
            assert context.params is None
            told += context.token_ids
        assert told == [*request.prompt_ids, *answer.ids][: len(told)]
        await answer_of(pipeline, await pipeline.submit(prompt_of(2), speculation="off"))
        assert other.contexts[-1].request_id == request.request_id, "who wants no drafts is not talked about"


async def test_unreadable_proposals_are_dropped(pipeline: Pipeline) -> None:
    cases, expected = await plain_answers(pipeline)
    decode = await speculating(pipeline)
    sent = 0

    def garbage(context: DraftContext, known: list[int]) -> list[Proposal]:
        nonlocal sent
        sent += 1
        asyncio.get_running_loop().create_task(pipeline.bus.client.publish(context.reply_to, b"\xc1" * 99))
        return []

    async with drafter(pipeline, garbage):
        assert await answers(pipeline, cases) == expected
        await decode.until_idle()
    assert sent > 0


async def test_an_answer_given_before_is_guessed_for_its_tenant_alone(pipeline: Pipeline) -> None:
    """Sampled hot, so that the answer itself is no help; the same seed gives the same one."""
    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    accepted = decode.worker.speculation.totals.accepted
    hot = {"hot": {"temperature": 1.5}}

    first = await answers(pipeline, hot, salt="one")
    assert accepted[SUFFIX_TREE] == 0
    assert await answers(pipeline, hot, salt="other") == first
    assert accepted[SUFFIX_TREE] == 0
    assert await answers(pipeline, hot, salt="one") == first
    assert accepted[SUFFIX_TREE] > OUTPUT / 2


async def test_a_prediction_is_looked_up(pipeline: Pipeline) -> None:
    hot = {"hot": {"temperature": 1.5}}
    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    accepted = decode.worker.speculation.totals.accepted
    first = await answers(pipeline, hot, salt="one")
    before = accepted[PROMPT_LOOKUP]
    changed = [*first["hot"].ids[:20], 5, *first["hot"].ids[21:]]
    assert await answers(pipeline, hot, salt="other", prediction_ids=changed) == first
    assert accepted[PROMPT_LOOKUP] - before > OUTPUT / 2


async def test_what_became_of_drafts_is_counted(pipeline: Pipeline) -> None:
    decode = await speculating(pipeline)
    assert isinstance(decode.worker, DecodeWorker)
    async with drafter(pipeline, repeats) as other:
        Paced(decode, other)
        request = await pipeline.submit(prompt_of(1), params={"temperature": 0.0}, output=OUTPUT)
        state = await pipeline.until_ended(request)
        await decode.until_idle()
    assert state.ended is not None
    usage = state.ended.usage
    names = (PROMPT_LOOKUP, SUFFIX_TREE, DRAFT_MODEL, DRAFT_SERVICE)

    def counted(what: str) -> int:
        return sum(decode.count(f"spec_decode_{what}", proposer=name) for name in names)

    assert 0 < usage.accepted_tokens <= usage.drafted_tokens == counted("num_draft_tokens")
    assert counted("num_accepted_tokens") == usage.accepted_tokens
    assert counted("num_wasted_tokens") == usage.drafted_tokens - usage.accepted_tokens

    async def told() -> bool:  # from the engine's thread, behind the end of the sequence
        return decode.count("spec_decode_num_guesses", proposer=DRAFT_MODEL) > 0

    await eventually(told)
    positions = [decode.count("spec_decode_num_draft_tokens_per_pos", position=str(at)) for at in range(16)]
    assert sum(positions) == usage.drafted_tokens
    assert 0 < decode.count("spec_decode_num_ready_sequence_steps") <= decode.count("spec_decode_num_sequence_steps")
    told = decode.worker.speculation.describe()
    assert (told["drafted"], told["accepted"]) == (usage.drafted_tokens, usage.accepted_tokens)
    assert told["steps"] == decode.count("spec_decode_num_sequence_steps")
