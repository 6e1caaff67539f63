"""Several answers to one request, each with a log of its own: taken on, shown, resumed and ended as one."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.openai_schema import parse_call
from services.gateway.terms import keyed_request_id
from shared.bus import Bus
from shared.protocol.records import Accepted, ErrorInfo, choice_request_id
from shared.protocol.seeds import derived_seed
from shared.protocol.subjects import SUBMIT
from tests.conftest import NatsServer
from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Open,
    Start,
    Stream,
    Worker,
    chat_body,
    ended_of,
    entries_of,
    events_of,
    fresh_seed,
    queued_subjects,
    reserve,
    take_all,
    text_of,
    until,
)

CHAT = "/v1/chat/completions"
HELLO = "Hello, wörld!"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def all_ended(bus: Bus, request_id: str, choices: int) -> list[tuple[str, str | None]]:
    """Reason and error code of each choice's end, once all have ended."""
    ends = [await ended_of(bus, choice_request_id(request_id, choice)) for choice in range(choices)]
    return [(ended.reason, ended.error.code if ended.error else None) for ended in ends]


# Answers


async def test_the_openai_client_gets_n_answers_in_order_each_with_its_seed(
    client: AsyncOpenAI, worker: Worker
) -> None:
    seed = reserve(worker, 3)
    waiting = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES, seed=seed, n=3))
    works = await take_all(worker, seed, 3)
    for n in (2, 0, 1):  # not in order
        await works[n].say(f"answer {n}", "!")
        await works[n].end("length" if n == 1 else "stop")
    answer = await waiting
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["answer 0!", "answer 1!", "answer 2!"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    assert [choice.model_extra["seed"] for choice in answer.choices if choice.model_extra] == [
        derived_seed(seed, n) for n in range(3)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 6, 13)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_every_answers_seed_repeats_it_alone(client: AsyncOpenAI, worker: Worker) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=4)
    seeds = [choice.model_extra["seed"] for choice in answer.choices if choice.model_extra]
    assert len(set(seeds)) == 4
    assert answer.model_extra is not None
    assert seeds[0] == answer.model_extra["seed"]
    assert Counter(r.params.seed for r in worker.seen) >= Counter(seeds)


async def test_the_openai_client_streams_n_answers_with_one_finish_each_and_the_usage_at_the_end(
    client: AsyncOpenAI, worker: Worker
) -> None:
    seed = reserve(worker, 2)
    chunks = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=seed, n=2, stream=True, stream_options={"include_usage": True}
    )
    works = await take_all(worker, seed, 2)
    await works[1].say("b1")
    await works[0].say("a1")
    await works[1].say("b2")
    await works[1].end()
    await works[0].say("a2")
    await works[0].end("length")
    seen = [chunk async for chunk in chunks]
    choices = [choice for chunk in seen for choice in chunk.choices]
    for n, text in enumerate(("a1a2", "b1b2")):
        own = [choice for choice in choices if choice.index == n]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == text
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [("length", "stop")[n]]
    assert [bool(chunk.choices) for chunk in seen].index(False) == len(seen) - 1
    assert seen[-1].usage is not None
    assert (seen[-1].usage.prompt_tokens, seen[-1].usage.completion_tokens) == (7, 4)
    assert len({chunk.id for chunk in seen}) == 1


async def test_several_prompts_give_choices_in_the_order_of_the_prompts(client: AsyncOpenAI, worker: Worker) -> None:
    seed = fresh_seed()
    for prompt in (["ab", "cde"], [[66, 67], [68, 69, 70]]):
        answer = await client.completions.create(model="tiny", prompt=prompt, n=2, seed=seed)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [HELLO] * 4
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)
        by_id = {r.request_id: r for r in worker.seen}
        works = [by_id[choice_request_id(answer.id, n)] for n in range(4)]
        assert [len(work.prompt_ids) for work in works] == [2, 2, 3, 3]
        assert [work.params.seed for work in works] == [derived_seed(seed, n) for n in range(4)]
        assert [work.params.max_tokens for work in works] == [16] * 4
    chunks = await client.completions.create(model="tiny", prompt=["ab", "cde"], stream=True)
    texts: Counter[int] = Counter()
    async for chunk in chunks:
        texts[chunk.choices[0].index] += len(chunk.choices[0].text)
    assert texts == {0: len(HELLO), 1: len(HELLO)}


# The same request, seen again


async def test_n_answers_resumed_at_any_event_through_another_gateway_lose_and_repeat_nothing(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient, open_stream: Open
) -> None:
    seed = reserve(worker, 3)
    stream = await open_stream(first, seed, n=3, stream_options={"include_usage": True}, logprobs=True)
    works = await take_all(worker, seed, 3)
    for n in (0, 2, 1, 1, 0, 2):
        await works[n].say(f"{n}{works[n].index} ")
    for n in (1, 0, 2):
        await works[n].end()
    events = await stream.rest()
    url = f"{second.url}{CHAT}/{stream.request_id}"
    assert events[-1] == (None, "[DONE]")
    for n, (event_id, _) in enumerate(events[:-1], start=1):
        rest = events_of((await http.get(url, params={"stream": "true", "starting_after": event_id})).text)
        assert by_choice(events[:n] + rest) == by_choice(events)
        assert len(rest) == len(events) - n
        assert rest[-1] == (None, "[DONE]")
    replay = events_of((await http.get(url, params={"stream": "true"})).text)
    assert by_choice(replay) == by_choice(events)
    assert replay[-2][1]["usage"] == events[-2][1]["usage"]
    assert replay[-2][1]["usage"]["completion_tokens"] == 6


def by_choice(events: list[tuple[str | None, Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for _, data in events:
        for choice in data["choices"] if isinstance(data, dict) else []:
            found.setdefault(choice["index"], []).append(choice)
    return found


async def test_when_its_gateway_is_killed_the_client_goes_on_with_all_answers_at_another_one(
    start: Start, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient, open_stream: Open
) -> None:
    victim, seed = start(), reserve(worker, 2)
    stream = await open_stream(victim, seed, n=2)
    works = await take_all(worker, seed, 2)
    await works[0].say("a", "b")
    await works[1].say("x")
    await works[1].end()
    await stream.text("ab", 0)
    await stream.text("x", 1)
    victim.kill()
    with pytest.raises(httpx.HTTPError):
        await stream.rest()
    last_id = stream.events[-1][0] or ""
    url = f"{second.url}{CHAT}/{stream.request_id}"
    async with http.stream("GET", url, params={"stream": "true"}, headers={"last-event-id": last_id}) as response:
        resumed = Stream(response)
        await works[0].say("c")
        await resumed.text("c", 0)
        await works[0].end()
        events = await resumed.rest()
    assert (text_of(events, 0), text_of(events, 1)) == ("c", "")
    finished = Counter(
        choice["index"]
        for _, data in [*stream.events, *events]
        for choice in (data["choices"] if isinstance(data, dict) else [])
        if choice["finish_reason"]
    )
    assert finished == {0: 1, 1: 1}
    assert events[-1] == (None, "[DONE]")


async def test_a_request_with_n_is_looked_up_as_one_and_its_parts_have_no_address(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient, open_stream: Open
) -> None:
    seed = reserve(worker, 2)
    stream = await open_stream(first, seed, n=2)
    url = f"{second.url}{CHAT}/{stream.request_id}"
    works = await take_all(worker, seed, 2)
    await works[1].say("b")
    await works[1].end()
    half = (await http.get(url)).json()
    assert (half["status"], half["usage"]) == ("in_progress", None)
    assert [(c["message"]["content"], c["finish_reason"]) for c in half["choices"]] == [("", None), ("b", "stop")]
    await works[0].end()
    await stream.rest()
    whole = (await http.get(url)).json()
    assert (whole["status"], whole["usage"]["prompt_tokens"]) == ("completed", 7)
    assert (await http.get(f"{url}-c1")).status_code == 404
    assert (await http.post(f"{url}-c1/cancel")).status_code == 404
    for place in ("1", "1-0", "1-0-2", "99999999-0-0"):
        answer = await http.get(url, params={"stream": "true", "starting_after": place})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


async def test_retries_with_a_key_join_all_answers_of_the_first_run(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    key = {"idempotency-key": f"join-{fresh_seed()}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": key["idempotency-key"]}], "n": 3}
    before = len(worker.seen)
    answers = await asyncio.gather(
        *(http.post(gateway.url + CHAT, json=body, headers=key) for gateway in [first, second] * 3)
    )
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.text for answer in answers}) == 1
    assert len({request.request_id for request in worker.seen[before:]}) == 3
    other = await http.post(first.url + CHAT, json={**body, "n": 2}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_a_retry_stores_what_a_dying_gateway_left_out(
    first: GatewayProcess, worker: Worker, bus: Bus, http: httpx.AsyncClient
) -> None:
    """Two of three logs are begun, nothing is queued, and the gateway dies: done here with the id that a key gives."""
    seed = fresh_seed()
    body = chat_body(seed, n=3)
    request_id, now = keyed_request_id("chat", "default", f"left-{seed}", 0), time.time()
    digest = parse_call(body, "chat").digest
    for n in range(2):
        await bus.create_log(
            Accepted(
                choice_request_id(request_id, n), "default", "tiny", "chat", now, now + 60, 0 if n else 7,
                derived_seed(seed, n), body_digest=digest, choices=3, choice=n,
            )
        )  # fmt: skip
    answer = await http.post(first.url + CHAT, json=body, headers={"idempotency-key": f"left-{seed}"})
    assert (answer.status_code, answer.json()["id"]) == (200, request_id)
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == [HELLO] * 3
    assert answer.json()["usage"]["prompt_tokens"] == 7


async def test_a_nats_client_is_told_every_answers_subjects(first: GatewayProcess, worker: Worker, bus: Bus) -> None:
    seed = fresh_seed()
    reply = await bus.client.request(SUBMIT, json.dumps(chat_body(seed, n=3)).encode(), timeout=PATIENCE_S)
    answer = json.loads(reply.data)
    request_id = answer["request_id"]
    assert (answer["seed"], answer["prompt_tokens"]) == (seed, 7)
    assert [choice["seed"] for choice in answer["choices"]] == [derived_seed(seed, n) for n in range(3)]
    for n, choice in enumerate(answer["choices"]):
        assert choice["request_id"] == choice_request_id(request_id, n)
        assert choice["log_subject"] == f"hr.tok.default.{choice['request_id']}"
        assert choice["live_subject"] == f"hr.live.default.{choice['request_id']}"
        opening = (await entries_of(bus, choice["request_id"]))[0]
        assert opening.seq == choice["log_seq"]
        assert isinstance(opening.record, Accepted)
        assert (opening.record.choices, opening.record.choice) == (3, n)
    assert await all_ended(bus, request_id, 3) == [("stop", None)] * 3


# All or nothing


async def test_when_the_queue_takes_some_answers_only_the_request_is_refused_and_nothing_is_left(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway, seed = start("deserted", url=own_nats.url), fresh_seed()
    key = {"idempotency-key": f"refused-{seed}"}
    async with await Bus.connect(own_nats.url, name="test") as bus:
        await bus.limit_requests({"normal": 2})
        body = chat_body(seed, n=4) | {"model": "deserted"}
        answer = await http.post(gateway.url + CHAT, json=body, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        request_id = keyed_request_id("chat", "default", key["idempotency-key"], 0)
        assert await all_ended(bus, request_id, 4) == [("error", "queue_full")] * 4

        async def nothing_queued() -> bool:
            return not await queued_subjects(bus)

        await until(nothing_queued)
    assert gateway.stop() == 0


async def test_each_answer_takes_a_slot_of_the_gateway(start: Start, worker: Worker, http: httpx.AsyncClient) -> None:
    small = start(max_concurrent="3", max_n="16")
    for fields, status, code in (
        ({"n": 4}, 400, "invalid_value"),  # it would never fit
        ({"n": 17}, 400, "invalid_value"),
        ({"n": 3}, 200, None),
    ):
        answer = await http.post(small.url + CHAT, json=chat_body(fresh_seed(), **fields))
        assert answer.status_code == status, answer.text
        assert answer.json().get("error", {}).get("code") == code


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_failed_answer_fails_the_request_and_stops_the_others(
    first: GatewayProcess, worker: Worker, bus: Bus, client: AsyncOpenAI, streamed: bool
) -> None:
    seed = reserve(worker, 3)

    async def ask() -> None:
        asked = {"model": "tiny", "messages": MESSAGES, "seed": seed, "n": 3, "stream": streamed}
        answer: Any = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
        if streamed:
            async for _ in answer:
                pass

    waiting = asyncio.create_task(ask())
    works = await take_all(worker, seed, 3)
    await works[0].say("fine")
    await works[0].end()
    await works[2].say("half")
    await works[1].end("error", ErrorInfo("it broke", code="engine_failed"))
    with pytest.raises(openai.APIError, match="it broke") as caught:
        await waiting
    assert caught.value.code == "engine_failed"
    request_id = works[0].request.request_id
    assert await all_ended(bus, request_id, 3) == [
        ("stop", None), ("error", "engine_failed"), ("error", "engine_failed")
    ]  # fmt: skip


async def test_over_nats_one_failed_answer_ends_the_others_though_no_gateway_follows_them(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    seed = reserve(worker, 4)
    reply = await bus.client.request(SUBMIT, json.dumps(chat_body(seed, n=4)).encode(), timeout=PATIENCE_S)
    request_id = json.loads(reply.data)["request_id"]
    works = await take_all(worker, seed, 4)
    await works[1].say("fine")
    await works[1].end()
    await asyncio.sleep(1.5)  # some sweeps
    states = [await bus.open_log("default", choice_request_id(request_id, n)).state() for n in (0, 2, 3)]
    assert [state.ended for state in states] == [None] * 3
    await works[2].end("error", ErrorInfo("it broke", code="engine_failed"))
    assert await all_ended(bus, request_id, 4) == [
        ("error", "engine_failed"), ("stop", None), ("error", "engine_failed"), ("error", "engine_failed")
    ]  # fmt: skip


async def test_over_nats_one_cancelled_answer_cancels_the_others(
    first: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    seed = reserve(worker, 2)
    reply = await bus.client.request(SUBMIT, json.dumps(chat_body(seed, n=2)).encode(), timeout=PATIENCE_S)
    request_id = json.loads(reply.data)["request_id"]
    works = await take_all(worker, seed, 2)
    await works[1].end("cancelled")
    assert [reason for reason, _ in await all_ended(bus, request_id, 2)] == ["cancelled", "cancelled"]


# The end comes from outside


async def test_a_client_that_leaves_stops_all_answers(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = reserve(worker, 3)
    stream = await open_stream(first, seed, n=3)
    works = await take_all(worker, seed, 3)
    await works[1].say("x")
    await works[1].end()
    await stream.text("x", 1)
    await stream.response.aclose()
    assert await all_ended(bus, stream.request_id, 3) == [("cancelled", None), ("stop", None), ("cancelled", None)]


async def test_with_a_key_all_answers_outlive_the_client_by_the_grace_period(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = reserve(worker, 2)
    stream = await open_stream(first, seed, {"idempotency-key": f"grace-{seed}"}, n=2)
    await take_all(worker, seed, 2)
    left = time.time()
    await stream.response.aclose()
    assert await all_ended(bus, stream.request_id, 2) == [("cancelled", None)] * 2
    assert time.time() - left > 0.9


@pytest.mark.parametrize(("method", "suffix"), [("POST", "/cancel"), ("DELETE", "")])
async def test_cancelling_ends_all_answers(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus, http: httpx.AsyncClient,
    open_stream: Open, method: str, suffix: str,
) -> None:  # fmt: skip
    seed = reserve(worker, 3)
    stream = await open_stream(first, seed, n=3)
    works = await take_all(worker, seed, 3)
    await works[0].end()
    answer = await http.request(method, f"{second.url}{CHAT}/{stream.request_id}{suffix}")
    assert answer.json()["status"] == "cancelled"
    events = await stream.rest()
    assert events[-1][1]["error"]["code"] == "cancelled"
    assert await all_ended(bus, stream.request_id, 3) == [("stop", None), ("cancelled", None), ("cancelled", None)]


async def test_an_answer_that_no_worker_takes_in_time_ends_the_request(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = reserve(worker, 2)
    stream = await open_stream(first, seed, {"x-headrace-queue-timeout-s": "1"}, n=2)
    work = await worker.take(seed)
    await work.claim()
    await work.say("one")
    events = await stream.rest()
    assert events[-1][1]["error"]["code"] == "queue_timeout"
    assert await all_ended(bus, stream.request_id, 2) == [("error", "queue_timeout")] * 2


async def test_at_the_deadline_all_answers_end_even_when_their_gateway_has_died(
    start: Start, bus: Bus, open_stream: Open
) -> None:
    victim = start("deserted")
    start("deserted")
    headers = {"x-headrace-timeout-s": "1", "x-headrace-queue-timeout-s": "1"}
    stream = await open_stream(victim, fresh_seed(), headers, n=3, model="deserted")
    victim.kill()
    ends = await all_ended(bus, stream.request_id, 3)
    assert {reason for reason, _ in ends} == {"error"}
    assert {code for _, code in ends} <= {"queue_timeout", "deadline_exceeded"}


async def test_a_running_answer_is_ended_at_the_deadline_of_the_request(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = reserve(worker, 2)
    stream = await open_stream(first, seed, {"x-headrace-timeout-s": "1.5"}, n=2)
    works = await take_all(worker, seed, 2)
    await works[0].say("done")
    await works[0].end()
    events = await stream.rest()
    assert events[-1][1]["error"]["code"] == "deadline_exceeded"
    assert await all_ended(bus, stream.request_id, 2) == [("stop", None), ("error", "deadline_exceeded")]
