"""`headrace dead`: reads the dead-letter stream of a real NATS server, and has a gateway take its work up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from shared.bus import Bus
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.subjects import RETRY
from tests.conftest import NatsServer
from tests.integration.cli_harness import Operator

PROMPT = [41, 42, 43]


def request(request_id: str, tenant: str = "acme") -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        tenant=tenant,
        model="m.1",
        api="chat",
        priority="low",
        prompt_ids=PROMPT,
        params=SamplingParams(max_tokens=77, seed=5),
        created_unix_s=1.0,
        queue_deadline_unix_s=2.0,
        deadline_unix_s=3.0,
        log_seq=1,
    )


@pytest.fixture
def operator(own_nats: NatsServer, tmp_path: Path) -> Operator:
    """Of a machine where no stack runs; NATS is elsewhere."""
    operator = Operator(tmp_path / "h")
    operator.env["HEADRACE_NATS_URL"] = own_nats.url
    return operator


def on(operator: Operator, act: Any) -> Any:
    async def connected() -> Any:
        async with await Bus.connect(operator.env["HEADRACE_NATS_URL"], name="test") as bus:
            return await act(bus)

    return asyncio.run(connected())


def bury_three(operator: Operator) -> None:
    async def bury(bus: Bus) -> None:
        await bus.bury("decode", request("r-1"), "worker_crashed", ["decode-0.aa", "decode-1.bb"])
        await bus.bury_raw("hr.dead.prefill.unreadable", b"\xc1", "unreadable")
        await bus.bury("prefill", request("r-2", tenant="other"), "deadline_exceeded")

    on(operator, bury)


def test_the_list_shows_each_dead_letter_with_its_cause_and_the_workers_that_crashed(operator: Operator) -> None:
    assert "no dead letters" in operator.ok("dead", "list")
    bury_three(operator)
    rows = [line.split() for line in operator.ok("dead", "list").splitlines()]
    assert rows[0][:3] == ["seq", "time", "stage"]
    first, unreadable, last = rows[1:]
    assert first[0] == "1"
    assert first[3:] == ["decode", "r-1", "acme", "m.1", "worker_crashed", "decode-0.aa,", "decode-1.bb"]
    assert (unreadable[0], unreadable[3:]) == ("2", ["prefill", "(unreadable)", "unreadable"])
    assert (last[0], last[3:]) == ("3", ["prefill", "r-2", "other", "m.1", "deadline_exceeded"])
    newest = json.loads(operator.ok("dead", "list", "--limit", "2", "--json"))
    assert [(letter["seq"], letter["request_id"]) for letter in newest] == [(2, ""), (3, "r-2")]
    assert json.loads(operator.ok("status", "--json"))["dead_letters"] == 3
    assert "3 dead letters, see `headrace dead list`" in operator.ok("status")


def test_a_dead_letter_is_shown_without_its_prompt_unless_that_is_asked_for(operator: Operator) -> None:
    bury_three(operator)
    shown = operator.ok("dead", "show", "1")
    fields = dict(line.split("  ", 1) for line in shown.splitlines())
    assert {name: value.strip() for name, value in fields.items()}.items() >= {
        "seq": "1", "stage": "decode", "cause": "worker_crashed", "crashed workers": "decode-0.aa, decode-1.bb",
        "request": "r-1", "tenant": "acme", "model": "m.1", "priority": "low", "prompt tokens": "3", "max_tokens": "77",
    }.items()  # fmt: skip
    assert "41 42 43" not in shown
    assert "41 42 43" in operator.ok("dead", "show", "1", "--prompt")
    as_json = json.loads(operator.ok("dead", "show", "1", "--json"))
    assert "prompt_ids" not in as_json
    assert (as_json["prompt_tokens"], as_json["params"]["seed"]) == (3, 5)
    assert json.loads(operator.ok("dead", "show", "1", "--json", "--prompt"))["prompt_ids"] == PROMPT


def test_a_number_that_no_dead_letter_has_is_one_line(operator: Operator) -> None:
    bury_three(operator)
    assert "no dead letter 9; `headrace dead list`" in operator.refused("dead", "show", "9")

    async def remove(bus: Bus) -> None:
        await bus.js.delete_msg("HR_DEAD", 1)

    on(operator, remove)
    assert "no dead letter 1" in operator.refused("dead", "retry", "1")


@asynccontextmanager
async def gateway_answering(bus: Bus, answer: dict[str, Any]) -> AsyncIterator[list[Any]]:
    """Stands where a gateway would, with one answer for all; yields what it was asked."""
    asked: list[Any] = []

    async def reply(message: Msg) -> None:
        asked.append(json.loads(message.data))
        await message.respond(json.dumps(answer).encode())

    subscription = await bus.client.subscribe(RETRY, cb=reply)
    await bus.client.flush()
    yield asked
    await subscription.unsubscribe()


def retried(operator: Operator, answer: dict[str, Any], *options: str, refused: bool = False) -> tuple[str, list[Any]]:
    """What `headrace dead retry 1` says while a gateway answers so, and what the gateway was asked."""

    async def run(bus: Bus) -> tuple[str, list[Any]]:
        async with gateway_answering(bus, answer) as asked:
            command = operator.refused if refused else operator.ok
            return await asyncio.to_thread(command, "dead", "retry", "1", *options), asked

    said: tuple[str, list[Any]] = on(operator, run)
    return said


def test_a_retry_asks_a_gateway_and_says_where_the_new_request_is_read(operator: Operator) -> None:
    bury_three(operator)
    answer = {
        "request_id": "r-9", "tenant": "acme", "log_subject": "hr.tok.acme.r-9", "live_subject": "hr.live.acme.r-9",
    }  # fmt: skip
    said, asked = retried(operator, answer)
    assert asked == [{"seq": 1}]
    assert "1 is queued again as r-9" in said
    assert f"http://127.0.0.1:{operator.env['HEADRACE_PORT']}/v1/chat/completions/r-9" in said
    assert "hr.live.acme.r-9" in said
    said, _ = retried(operator, answer, "--json")
    assert json.loads(said) == answer


def test_what_keeps_a_retry_from_happening_is_one_line(operator: Operator) -> None:
    bury_three(operator)
    assert "no gateway runs" in operator.refused("dead", "retry", "1")
    full = {"error": {"message": "the queue is full", "code": "queue_full"}}
    line, _ = retried(operator, full, refused=True)
    assert "refused to retry 1: the queue is full" in line
    line, _ = retried(operator, {"what": 1}, refused=True)
    assert "cannot be read" in line


def test_without_a_stack_or_a_nats_url_there_is_nothing_to_ask(operator: Operator) -> None:
    assert "HEADRACE_NATS_URL" in operator.refused("dead", "list", HEADRACE_NATS_URL="")
