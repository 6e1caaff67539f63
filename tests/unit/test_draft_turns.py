"""What a drafter makes of the contexts that came between two of its turns, and whom one bad sequence does not harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from services.draft import service
from services.draft.known import READ_TOKENS, Alternative, KnownSequence, Wish
from services.draft.service import CONTEXT_TOKENS, REMEMBER_TOKENS, Drafted, DraftService
from services.draft.settings import DraftSettings
from shared.bus import Bus
from shared.protocol.drafts import DRAFT_MODEL, DraftContext, Proposal, decode_proposals, encode_draft
from shared.protocol.jobs import SamplingParams
from shared.protocol.subjects import proposal_subject
from shared.speculation import SUFFIX_TREE, RecentOutputs
from shared.telemetry.metrics import DraftMetrics
from shared.worker.reporting import Reporter

INBOX = proposal_subject("decode-0.a")
PARAMS = SamplingParams(max_tokens=100, seed=1)
REPEATS, GOES_ON = [5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5, 6, 7, 8, 9]


class Outbox:
    """A bus that keeps what is sent."""

    connected = True

    def __init__(self) -> None:
        self.client = self
        self.sent: list[tuple[str, list[Proposal]]] = []
        self.error: Exception | None = None

    async def publish(self, subject: str, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((subject, decode_proposals(data).items))

    def told(self) -> dict[str, list[int]]:
        """What was proposed since this was asked last, by request."""
        told = {item.request_id: item.token_ids for _, items in self.sent for item in items}
        self.sent.clear()
        return told


class Model:
    """A draft model that only listens."""

    def __init__(self) -> None:
        self.told: list[Wish] = []
        self.forgotten: list[str] = []

    def listen(self, on_drafted: Callable[[list[Drafted]], None]) -> None:
        pass

    def tell(self, wishes: list[Wish], granted: Callable[[list[Wish]], None]) -> None:
        self.told += wishes

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class Drafter:
    """A service whose turns come when a test says so."""

    def __init__(self, **settings: Any) -> None:
        self.outbox, self.model, self.registry = Outbox(), Model(), CollectorRegistry()
        self.service = DraftService(
            cast(Bus, self.outbox),
            DraftSettings(model="tiny", instance="draft-0", _env_file=None, **settings),
            "tiny",
            DraftMetrics("draft-0", self.registry),
            self.model,
        )

    async def take(self, context: DraftContext) -> None:
        await self.service._on_context(Msg(cast(Client, None), data=encode_draft(context)))

    async def begin(self, name: str, prompt: list[int], wanted: int = 8, reply_to: str = INBOX) -> None:
        await self.take(DraftContext(name, "t", 0, prompt, reply_to, wanted, len(prompt), PARAMS, "s"))

    async def grow(self, name: str, start: int, token_ids: list[int], wanted: int = 8) -> None:
        await self.take(DraftContext(name, "t", start, token_ids, INBOX, wanted))

    async def forget(self, name: str, start: int = 0, token_ids: list[int] | None = None) -> None:
        await self.take(DraftContext(name, "t", start, token_ids or [], INBOX, forget=True))

    async def turn(self) -> None:
        await asyncio.sleep(0)  # as it waits to be woken
        self.service._wake.clear()
        await self.service._turn()

    async def turns(self) -> int:
        """Until it has nothing more to do; returns how many."""
        count = 0
        while self.service._wake.is_set():
            await self.turn()
            count += 1
        return count


def fail_for(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """The sequence of this name can no longer do this."""
    whole = getattr(KnownSequence, method)

    def failing(self: KnownSequence, *given: Any) -> Any:
        if self.request_id == name:
            raise RuntimeError("no such thing")
        return whole(self, *given)

    monkeypatch.setattr(KnownSequence, method, failing)


async def test_only_the_newest_context_of_a_burst_counts() -> None:
    drafter = Drafter()
    await drafter.begin("burst", REPEATS)
    for at in range(30):
        await drafter.grow("burst", len(REPEATS) + at, [at % 7 + 20])
    await drafter.turn()
    assert [wish.confirmed for wish in drafter.model.told] == [len(REPEATS) + 30]
    ((subject, items),) = drafter.outbox.sent
    assert (subject, [item.start for item in items]) == (INBOX, [len(REPEATS) + 30])


async def test_a_turn_sends_one_message_to_each_decode_worker() -> None:
    drafter, other = Drafter(), proposal_subject("decode-1.b")
    for name, reply_to in (("a", INBOX), ("b", other), ("c", INBOX), ("d", other), ("e", INBOX)):
        await drafter.begin(name, REPEATS, reply_to=reply_to)
    await drafter.grow("unknown", 40, [1])
    await drafter.turn()
    sent = {subject: {item.request_id for item in items} for subject, items in drafter.outbox.sent}
    assert sent == {INBOX: {"a", "c", "e", "unknown"}, other: {"b", "d"}}
    assert len(drafter.outbox.sent) == 2


async def test_what_the_model_guesses_otherwise_is_told_with_its_guess_and_counted_when_it_comes_true() -> None:
    drafter = Drafter()
    await drafter.begin("r", [30, 31, 32])
    await drafter.turn()
    drafter.service._on_granted(drafter.model.told, [])
    sure, first = [0.9, 0.8], [Alternative([5, 6], [0.1, 0.9]), Alternative([7, 8], [0.05, 0.7])]
    drafter.service._on_drafted([Drafted("r", 0, [1, 2], sure), Drafted("r", 0, [], [], first)])
    await drafter.turn()
    more = [Alternative([5, 6, 9], [0.1, 0.9, 0.5]), Alternative([7, 8, 9], [0.05, 0.7, 0.6])]
    drafter.service._on_drafted([Drafted("r", 0, [], [], more)])
    await drafter.turn()
    told = [item for _, items in drafter.outbox.sent for item in items]
    assert [(item.start, item.token_ids, item.confidence) for item in told] == [(3, [1, 2], sure)] * 2
    assert [item.alternatives for item in told] == [[[5, 6], [7, 8]], [[5, 6, 9], [7, 8, 9]]]
    assert [item.alternative_confidence for item in told] == [
        [guess.confidence for guess in guesses] for guesses in (first, more)
    ]
    for at, token in enumerate([7, 8, 33], start=3):
        await drafter.grow("r", at, [token])
    assert drafter.registry.get_sample_value("headrace_draft_alternatives_used_total") == 1


async def test_the_models_guess_goes_out_beside_a_better_one() -> None:
    drafter = Drafter()
    await drafter.begin("r", REPEATS)
    await drafter.turn()
    assert drafter.outbox.told() == {"r": GOES_ON}
    drafter.service._on_granted(drafter.model.told, [])
    drafter.service._on_drafted([Drafted("r", 0, [30, 31], [0.6, 0.5])])
    await drafter.turn()
    ((_, items),) = drafter.outbox.sent
    assert [(item.proposer, item.token_ids, item.confidence) for item in items] == [(DRAFT_MODEL, [30, 31], [0.6, 0.5])]


async def test_a_long_context_is_read_in_parts_and_holds_up_nobody() -> None:
    drafter = Drafter()
    long = [*range(10, 10 + 8 * READ_TOKENS), 40, 41, 42]
    await drafter.begin("short", REPEATS)
    await drafter.begin("long", long)
    await drafter.turn()
    assert drafter.outbox.told() == {"short": GOES_ON}
    assert [wish.request_id for wish in drafter.model.told] == ["short"], "the model's turn comes when all is read"
    assert await drafter.turns() == 8
    assert drafter.outbox.told() == {"long": list(range(43, 51))}
    assert [wish.request_id for wish in drafter.model.told] == ["short", "long"]


async def test_no_more_than_a_part_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter()
    read, most = 0, 0
    whole = KnownSequence.read_on

    def counted(self: KnownSequence) -> int:
        nonlocal read, most
        read += (count := whole(self))
        most = max(most, read)
        return count

    async def beside() -> None:
        nonlocal read
        while True:
            read = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(KnownSequence, "read_on", counted)
    for number in range(20):
        await drafter.begin(f"r{number}", [(number + at) % 5000 for at in range(3 * READ_TOKENS + number)])
    assert read == 0, "nothing is read where contexts come in"
    beside_it = asyncio.create_task(beside())
    await drafter.turns()
    beside_it.cancel()
    assert READ_TOKENS <= most < 2 * READ_TOKENS


@pytest.mark.parametrize("begins_anew", [True, False])
async def test_a_sequence_that_goes_while_others_are_read_is_not_worked_on(
    monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    """And one that begins anew under its name is looked at in the next turn."""
    drafter = Drafter()
    await drafter.begin("long", list(range(10, 10 + 2 * READ_TOKENS)))
    await drafter.begin("goes", [*range(1000, 1000 + READ_TOKENS - 3), 1000, 1001, 1002])
    pause = asyncio.sleep

    async def goes_meanwhile(seconds: float) -> None:
        monkeypatch.setattr(service.asyncio, "sleep", pause)
        await drafter.forget("goes")
        if begins_anew:
            await drafter.begin("goes", REPEATS)

    monkeypatch.setattr(service.asyncio, "sleep", goes_meanwhile)
    await drafter.service._turn()
    assert drafter.model.told == []
    await drafter.turns()
    assert [wish.confirmed for wish in drafter.model.told if wish.request_id == "goes"] == [7] * begins_anew
    assert drafter.outbox.told().get("goes") == (GOES_ON if begins_anew else None)


async def test_a_long_output_is_remembered_in_parts_each_with_what_stood_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Drafter()
    added: list[tuple[int, int]] = []
    whole = RecentOutputs.add

    def counted(self: RecentOutputs, tenant: str, tokens: list[int], prompt: list[int]) -> None:
        added.append((len(tokens), len(prompt)))
        whole(self, tenant, tokens, prompt)

    monkeypatch.setattr(RecentOutputs, "add", counted)
    prompt, said = list(range(4000, 4100)), [n % 3001 for n in range(2 * REMEMBER_TOKENS + 10)]
    await drafter.begin("long", prompt, wanted=0)
    await drafter.grow("long", len(prompt), said, wanted=0)
    await drafter.forget("long")
    assert added == [], "not where contexts come in"
    await drafter.turn()
    assert added == [(REMEMBER_TOKENS, CONTEXT_TOKENS)], "one part a turn"
    await drafter.turns()
    assert added[1:] == [(REMEMBER_TOKENS, CONTEXT_TOKENS), (10, CONTEXT_TOKENS)]
    for asked, answer in ((prompt, said[:8]), (said[240:256], said[256:264])):
        await drafter.begin("again", asked)
        await drafter.turn()
        assert [item.proposer for _, items in drafter.outbox.sent for item in items] == [SUFFIX_TREE]
        assert drafter.outbox.told() == {"again": answer}


async def test_no_more_outputs_wait_to_be_remembered_than_allowed() -> None:
    drafter = Drafter()
    for number in range(300):
        await drafter.begin(f"r{number}", REPEATS)
        await drafter.grow(f"r{number}", len(REPEATS), [number])
        await drafter.forget(f"r{number}")
    assert len(drafter.service._ended) == service.MOST_ENDED
    assert await drafter.turns() == service.MOST_ENDED


async def test_tokens_that_come_with_the_end_are_remembered_too() -> None:
    drafter = Drafter()
    prompt, said = list(range(4000, 4020)), list(range(300, 330))
    await drafter.begin("r", prompt)
    await drafter.grow("r", len(prompt), said[:10])
    await drafter.forget("r", len(prompt) + 8, said[8:])
    await drafter.turns()
    await drafter.begin("again", [*prompt, *said[:20]])
    drafter.outbox.told()
    await drafter.turn()
    assert drafter.outbox.told() == {"again": said[20:28]}
    await drafter.forget("again")
    assert drafter.service._num_tokens == 0


async def test_last_tokens_that_continue_nothing_are_left_out() -> None:
    drafter = Drafter()
    await drafter.begin("gap", REPEATS)
    await drafter.forget("gap", 40, [1, 2])
    await drafter.forget("unknown", 40, [1, 2])
    await drafter.turns()
    assert (len(drafter.service), drafter.service._num_tokens) == (0, 0)
    assert drafter.model.forgotten == ["gap"]
    assert drafter.service.last_error == "", "that is no fault"
    assert drafter.outbox.told() == {}, "nobody is asked for what has ended"


@pytest.mark.parametrize("method", ["extend", "read_on", "look_up", "wish", "proposals"])
async def test_where_drafting_for_a_sequence_fails_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    drafter, began = Drafter(), time.time()
    fail_for(monkeypatch, "bad", method)
    for name in ("first", "bad", "last"):
        await drafter.begin(name, REPEATS)
    await drafter.turns()
    assert set(drafter.outbox.told()) == {"first", "last"}
    assert (len(drafter.service), drafter.service._num_tokens) == (2, 2 * len(REPEATS))
    assert drafter.model.forgotten == ["bad"]
    assert not drafter.service._ended, "nor is its output remembered"
    assert "no such thing" in drafter.service.last_error
    assert began <= drafter.service.last_error_unix_s <= time.time()


async def test_an_output_that_cannot_be_remembered_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no such thing")

    drafter = Drafter()
    monkeypatch.setattr(RecentOutputs, "add", failing)
    await drafter.begin("r", REPEATS)
    await drafter.grow("r", len(REPEATS), [1] * 1000)
    await drafter.forget("r")
    await drafter.begin("other", REPEATS)
    await drafter.turns()
    assert set(drafter.outbox.told()) == {"other"}


async def test_what_cannot_be_sent_is_the_last_error() -> None:
    drafter, began = Drafter(), time.time()
    assert (drafter.service.last_error, drafter.service.last_error_unix_s) == ("", 0.0)
    drafter.outbox.error = nats.errors.OutboundBufferLimitError()
    await drafter.begin("r", REPEATS)
    await drafter.turn()
    assert "not sent" in drafter.service.last_error
    assert began <= drafter.service.last_error_unix_s <= time.time()


def test_a_drafter_tells_the_board_its_last_error_and_details() -> None:
    reporter = Reporter("draft", DraftSettings(model="tiny", instance="draft-0", _env_file=None), 3, metrics_url="")
    reporter.ready_without_engine("tiny", lambda: 2, lambda: ("no route", 5.0), lambda: {"speculation": "off"})
    status = reporter.report()
    assert (status.state, status.model, status.running) == ("ready", "tiny", 2)
    assert (status.last_error, status.last_error_unix_s) == ("no route", 5.0)
    assert status.details == {"speculation": "off"}


@pytest.mark.parametrize(
    "reply_to",
    [
        "hr.ctl.cancel",
        "_INBOX.x",
        "inbox",
        "",
        "hr.prop.",
        "hr.prop.a.b",
        "hr.prop.*",
        "hr.prop.>",
        "hr.prop.a b\r\nPUB",
    ],
)
async def test_nobody_is_answered_but_decode_workers(reply_to: str) -> None:
    drafter = Drafter()
    await drafter.begin("r", REPEATS, reply_to=reply_to)
    await drafter.take(DraftContext("unknown", "t", 40, [1], reply_to, 8))
    await drafter.turn()
    assert (len(drafter.service), drafter.outbox.sent) == (0, [])


async def test_no_more_sequences_and_tokens_are_kept_than_allowed() -> None:
    drafter = Drafter(max_sequences=3, max_known_tokens=1024)
    for number in range(5):
        await drafter.begin(f"r{number}", REPEATS)
    assert list(drafter.service._served) == ["r2", "r3", "r4"]
    await drafter.turn()
    drafter.outbox.sent.clear()
    await drafter.grow("r4", len(REPEATS), [7])
    await drafter.grow("r0", len(REPEATS), [7])
    await drafter.turn()
    assert [i.request_id for _, items in drafter.outbox.sent for i in items if i.resend] == ["r0"]
    await drafter.begin("large", [n % 999 for n in range(1010)])
    assert list(drafter.service._served) == ["r4", "large"]


async def test_silent_sequences_are_forgotten() -> None:
    drafter = Drafter(forget_after_s=8)
    for name in ("silent", "heard"):
        await drafter.begin(name, REPEATS)
        drafter.service._served[name].heard_s -= 9
    await drafter.grow("heard", len(REPEATS), [7])
    await drafter.turn()
    assert list(drafter.service._served) == ["heard"]
    assert drafter.model.forgotten == ["silent"]
