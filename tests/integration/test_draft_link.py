"""What decode tells drafters: each sequence to one of them, no word too many, and nothing waits for it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from services.decode.draft_link import DRAFT_SERVICE, MAX_HEARD, SURE_TOKENS, DraftLink
from shared.bus import Bus
from shared.protocol.drafts import (
    DRAFT_MODEL,
    MAX_CONTEXT_TOKENS,
    MAX_PROPOSALS,
    DraftContext,
    Proposal,
    Proposals,
    decode_context,
    encode_draft,
)
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import draft_subject, proposal_subject
from shared.speculation import Guess
from tests.integration.kv_harness import eventually

WORKER = "decode-0.x"


class Drafter:
    """Notes what it is told."""

    def __init__(self, bus: Bus, model: str, name: str) -> None:
        self.name = name
        self.contexts: list[DraftContext] = []
        self.state = "ready"
        self.details: dict[str, float | str] = {}
        self.bus = bus
        self._model = model

    async def open(self) -> None:
        await self.bus.client.subscribe(draft_subject(self._model, self.name), cb=self._on_context)
        await asyncio.sleep(0)
        await self.bus.client.flush(2)
        self.bus.announce(self._report)

    def _report(self) -> InstanceStatus:
        now = time.time()
        return InstanceStatus(
            "draft",
            self.name,
            self.name,
            1,
            "",
            now,
            now,
            state=self.state,
            model=self._model,  # type: ignore[arg-type]
            details=self.details,
        )

    async def _on_context(self, message: Msg) -> None:
        self.contexts.append(decode_context(message.data))

    async def drain(self) -> None:
        self.state = "draining"
        await self.bus.announce_now()

    async def say(self, *proposals: Proposal) -> None:
        await self.bus.client.publish(proposal_subject(WORKER), encode_draft(Proposals(list(proposals))))

    async def heard(self, count: int) -> list[DraftContext]:
        async def all_of_them() -> bool:
            return len(self.contexts) >= count

        await eventually(all_of_them)
        return self.contexts


class Stage:
    """A link that runs, and what it hands on."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.bus = bus
        self.model = model
        self.link = DraftLink(bus, model, WORKER)
        self.guesses: list[Guess] = []

    def join(self, request_id: str = "r1", prompt: int = 5) -> GenerationRequest:
        params = SamplingParams(max_tokens=9, seed=4, presence_penalty=0.5)
        request = GenerationRequest(
            request_id, "t", self.model, "chat", "normal", list(range(prompt)), params, 0, 0, 0, 0, salt="s"
        )
        self.link.join(request, list(request.prompt_ids), self.guesses.append)
        return request

    async def seen(self, *names: str) -> None:
        """Until exactly these drafters are ready, as the link sees it."""

        async def so() -> bool:
            live = self.bus.statuses.live("draft", self.model)
            return {status.instance for status in live if status.state == "ready"} == set(names)

        await eventually(so)


@pytest_asyncio.fixture
async def parts(nats_url: str) -> AsyncIterator[tuple[Stage, list[Drafter]]]:
    model = f"m{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await Bus.connect(nats_url, name="decode"))
        drafters = []
        for number in range(2):
            own = await stack.enter_async_context(await Bus.connect(nats_url, name=f"draft-{number}"))
            drafters.append(Drafter(own, model, f"draft-{number}-{model}"))
            await drafters[-1].open()
        stage = Stage(bus, model)
        await stage.link.open()
        running = asyncio.create_task(stage.link.run())
        await stage.seen(*(drafter.name for drafter in drafters))
        yield stage, drafters
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()


async def chosen(drafters: list[Drafter]) -> tuple[Drafter, Drafter]:
    """The one that was told of the sequence, and the other."""

    async def one() -> bool:
        return any(drafter.contexts for drafter in drafters)

    await eventually(one)
    first, other = sorted(drafters, key=lambda drafter: not drafter.contexts)
    return first, other


async def test_a_sequence_is_told_from_the_beginning_then_as_it_grows_then_forgotten(
    parts: tuple[Stage, list[Drafter]],
) -> None:
    stage, drafters = parts
    request = stage.join()
    drafter, other = await chosen(drafters)
    stage.link.grew("r1", [7, 8], 3)
    await drafter.heard(2)
    stage.link.grew("r1", [9], 6)
    await drafter.heard(3)
    stage.link.leave("r1")
    first, second, third, last = await drafter.heard(4)
    assert (first.start, first.token_ids, first.num_prompt, first.params, first.salt, first.tenant) == (
        0,
        request.prompt_ids,
        5,
        request.params,
        "s",
        "t",
    )
    assert (second.start, second.token_ids, second.wanted, second.params) == (5, [7, 8], SURE_TOKENS, None)
    assert (third.start, third.token_ids, third.wanted) == (7, [9], 13)
    assert last.forget
    assert not other.contexts
    assert len(stage.link) == 0


async def test_it_moves_with_all_its_tokens_when_its_drafter_goes(parts: tuple[Stage, list[Drafter]]) -> None:
    stage, drafters = parts
    request = stage.join()
    drafter, other = await chosen(drafters)
    await drafter.drain()
    await stage.seen(other.name)
    stage.link.grew("r1", [7], 2)
    (moved,) = await other.heard(1)
    assert (moved.start, moved.token_ids, moved.params) == (0, [*request.prompt_ids, 7], request.params)
    assert (await drafter.heard(2))[1].forget


async def test_requests_are_shared_out_and_only_those_of_a_dead_drafter_and_a_newcomers_share_move(
    parts: tuple[Stage, list[Drafter]], nats_url: str
) -> None:
    stage, drafters = parts
    names = [f"r{number}" for number in range(150)]
    for name in names:
        stage.join(name)

    async def places() -> dict[str, str]:
        """By request: the drafter that was told of the newest token."""
        for drafter in drafters:
            drafter.contexts.clear()
        for name in names:
            stage.link.grew(name, [7], 2)

        def told() -> dict[str, str]:
            return {c.request_id: d.name for d in drafters for c in d.contexts if not c.forget}

        async def all_of_them() -> bool:
            return len(told()) == len(names)

        await eventually(all_of_them)
        return told()

    first = await places()
    counts = Counter(first.values())
    assert min(counts[drafter.name] for drafter in drafters) > len(names) // 6
    assert await places() == first

    bus = await Bus.connect(nats_url, name="draft-2")
    third = Drafter(bus, stage.model, f"draft-2-{stage.model}")
    await third.open()
    drafters.append(third)
    await stage.seen(*(drafter.name for drafter in drafters))
    second = await places()
    moved = [name for name in names if second[name] != first[name]]
    assert {second[name] for name in moved} == {third.name}
    assert len(names) // 9 < len(moved) < len(names) * 5 // 9

    await bus.close()  # it says nothing more
    await stage.seen(*(drafter.name for drafter in drafters[:2]))
    assert await places() == first


async def test_without_drafters_nothing_is_said_and_a_new_one_hears_all(parts: tuple[Stage, list[Drafter]]) -> None:
    stage, drafters = parts
    for drafter in drafters:
        await drafter.drain()
    await stage.seen()
    stage.join()
    stage.link.grew("r1", [7], 2)
    drafters[0].state = "ready"
    await drafters[0].bus.announce_now()
    await stage.seen(drafters[0].name)
    stage.link.grew("r1", [8], 2)
    (told,) = await drafters[0].heard(1)
    assert told.token_ids == [0, 1, 2, 3, 4, 7, 8]


async def test_where_nothing_is_wanted_it_is_said_once_and_the_tokens_come_later(
    parts: tuple[Stage, list[Drafter]],
) -> None:
    stage, drafters = parts
    stage.join()
    drafter, _ = await chosen(drafters)
    stage.link.grew("r1", [7], 0)
    await drafter.heard(2)
    for token in (8, 9, 10):
        stage.link.grew("r1", [token], 0)
        await asyncio.sleep(0.01)
    stage.link.grew("r1", [11], 1)
    contexts = await drafter.heard(3)
    assert [(c.start, c.token_ids, c.wanted) for c in contexts[1:]] == [(5, [7], 0), (6, [8, 9, 10, 11], SURE_TOKENS)]


async def test_a_context_beyond_what_a_message_may_hold_goes_in_parts(parts: tuple[Stage, list[Drafter]]) -> None:
    stage, drafters = parts
    stage.join(prompt=MAX_CONTEXT_TOKENS + 10)
    drafter, _ = await chosen(drafters)
    first, second = await drafter.heard(2)
    assert (len(first.token_ids), first.wanted) == (MAX_CONTEXT_TOKENS, 0)
    assert (second.start, len(second.token_ids)) == (MAX_CONTEXT_TOKENS, 10)
    assert second.wanted > 0


async def test_guesses_are_handed_on_under_names_that_none_in_this_process_has(
    parts: tuple[Stage, list[Drafter]],
) -> None:
    stage, drafters = parts
    stage.join()
    drafter, _ = await chosen(drafters)
    await drafter.say(
        Proposal("r1", 5, [1, 2], DRAFT_MODEL, [0.5, 0.25], False, [[3, 4], [5]], [[0.25, 0.5], [0.125]]),
        Proposal("unknown", 5, [9], DRAFT_MODEL),
        Proposal("r1", 5, [3], "prompt_lookup"),
    )

    async def two() -> bool:
        return len(stage.guesses) == 2

    await eventually(two)
    model, other = stage.guesses
    assert model == Guess(5, (1, 2), (0.5, 0.25), DRAFT_MODEL, ((3, 4), (5,)), ((0.25, 0.5), (0.125,)))
    assert other == Guess(5, (3,), (), DRAFT_SERVICE)


async def test_a_flood_of_guesses_is_bounded_between_two_steps(parts: tuple[Stage, list[Drafter]]) -> None:
    stage, drafters = parts
    stage.join()
    drafter, _ = await chosen(drafters)

    async def flood() -> None:
        for _ in range(0, MAX_HEARD + 9, MAX_PROPOSALS):
            await drafter.say(*[Proposal("r1", 5, [1], DRAFT_MODEL)] * MAX_PROPOSALS)
        await drafter.say(Proposal("r2", 5, [1], DRAFT_MODEL))

    stage.join("r2")

    async def done(count: int) -> None:
        async def all_heard() -> bool:
            return len(stage.guesses) >= count

        await eventually(all_heard)

    await flood()
    await done(MAX_HEARD + 1)
    assert len(stage.guesses) == MAX_HEARD + 1
    stage.link.grew("r1", [7], 2)
    await flood()
    await done(2 * MAX_HEARD + 2)
    assert len(stage.guesses) == 2 * MAX_HEARD + 2


@pytest.mark.parametrize(("spacing_s", "answered"), [(0.0, 5), (3600.0, 1)])
async def test_a_drafter_may_ask_for_the_whole_but_not_all_the_time(
    parts: tuple[Stage, list[Drafter]], monkeypatch: pytest.MonkeyPatch, spacing_s: float, answered: int
) -> None:
    monkeypatch.setattr("services.decode.draft_link.RESEND_EVERY_S", spacing_s)
    stage, drafters = parts
    stage.join()
    drafter, _ = await chosen(drafters)
    for number in range(5):
        before = len(drafter.contexts)
        await drafter.say(Proposal("r1", 0, [], resend=True))
        if number < answered:
            await drafter.heard(before + 1)
    stage.link.grew("r1", [7], 2)
    contexts = await drafter.heard(2 + answered)
    assert [c.start for c in contexts] == [0] * (1 + answered) + [5]


async def test_what_was_not_told_yet_goes_with_the_farewell(parts: tuple[Stage, list[Drafter]]) -> None:
    """So that the drafter remembers the whole output for others of the tenant."""
    stage, drafters = parts
    stage.join()
    drafter, _ = await chosen(drafters)
    stage.link.grew("r1", [7, 8], 0)
    await drafter.heard(2)  # it is told once that nothing is wanted
    stage.link.grew("r1", [9], 0)
    stage.link.leave("r1")
    last = (await drafter.heard(3))[2]
    assert (last.forget, last.start, last.token_ids) == (True, 7, [9])


async def test_a_drafter_with_speculation_off_is_told_nothing(parts: tuple[Stage, list[Drafter]]) -> None:
    stage, drafters = parts
    off: dict[str, float | str] = {"speculation": "off"}

    async def announce(first: dict[str, float | str], second: dict[str, float | str]) -> None:
        for drafter, details in zip(drafters, (first, second), strict=True):
            drafter.details = details
            await drafter.bus.announce_now()

        async def known() -> bool:
            told = {status.instance: status.details for status in stage.bus.statuses.live("draft", stage.model)}
            return told == {drafter.name: drafter.details for drafter in drafters}

        await eventually(known)

    await announce(off, off)
    stage.join()
    await announce(off, {})
    stage.link.grew("r1", [7], 2)
    (context,) = await drafters[1].heard(1)
    assert context.token_ids[-1] == 7  # and nobody was told before
    assert not drafters[0].contexts
