"""What happens to a request when its client or its gateway goes away, and when it is cancelled or fails."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.openai_schema import parse_call
from services.gateway.terms import keyed_request_id
from shared.bus import Bus
from shared.protocol.records import Accepted, Ended, ErrorInfo
from tests.integration.gateway_harness import (
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
    text_of,
    until,
    worker_of,
)

CHAT = "/v1/chat/completions"


# The client goes away


async def test_a_streaming_client_that_closes_its_socket_stops_the_work(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed)
    work = await worker.take(seed)
    await work.claim()
    await work.say("one")
    await stream.text("one")
    await stream.response.aclose()
    ended = await ended_of(bus, stream.request_id)
    assert (ended.reason, ended.usage.completion_tokens) == ("cancelled", 1)
    assert ended.by == worker_of(first)

    async def withdrawn() -> bool:
        return not any(stream.request_id in subject for subject in await queued_subjects(bus))

    await until(withdrawn)


async def test_a_waiting_client_that_closes_its_socket_stops_the_work(
    first: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    host, port = first.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(chat_body(seed)).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
    work = await worker.take(seed)
    await work.claim()
    writer.close()
    assert (await ended_of(bus, work.request.request_id)).reason == "cancelled"


async def test_the_openai_client_that_closes_its_stream_stops_the_work(
    first: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    async with AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], seed=seed, stream=True
        )
        work = await worker.take(seed)
        await work.claim()
        await stream.close()
    assert (await ended_of(bus, work.request.request_id)).reason == "cancelled"


async def test_with_an_idempotency_key_the_work_outlives_its_client_by_the_grace_period_only(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, {"idempotency-key": f"grace-{seed}"})
    work = await worker.take(seed)
    await work.claim()
    left = time.time()
    await stream.response.aclose()
    assert (await ended_of(bus, stream.request_id)).reason == "cancelled"
    assert time.time() - left > 1.4


async def test_a_client_that_comes_back_elsewhere_within_the_grace_period_keeps_the_work_alive(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open,
    http: httpx.AsyncClient,
) -> None:  # fmt: skip
    seed, key = fresh_seed(), {"idempotency-key": f"back-{fresh_seed()}"}
    worker.reserve(seed)
    stream = await open_stream(first, seed, key)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a")
    await stream.text("a")
    await stream.response.aclose()
    again = await open_stream(second, seed, key)
    assert again.request_id == stream.request_id
    await again.text("a")
    left = {"event": "request_ended_from_outside", "request_id": stream.request_id}
    await asyncio.sleep(2.5)  # longer than the grace period of the first gateway
    assert not any(left.items() <= line.items() for line in first.log_lines())
    await work.say("b")
    await work.end()
    assert text_of(await again.rest()) == "ab"


async def test_in_the_background_the_work_outlives_its_client_by_the_grace_period_only(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, background=True)
    work = await worker.take(seed)
    await work.claim()
    accepted = (await entries_of(bus, stream.request_id))[0].record
    assert isinstance(accepted, Accepted)
    assert accepted.background
    left = time.time()
    await stream.response.aclose()
    assert (await ended_of(bus, stream.request_id)).reason == "cancelled"
    assert time.time() - left > 1.4


async def test_a_client_that_comes_back_with_get_keeps_background_work_alive_until_it_leaves_for_good(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open,
    http: httpx.AsyncClient,
) -> None:  # fmt: skip
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, background=True)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a")
    await stream.text("a")
    await stream.response.aclose()
    url = f"{second.url}{CHAT}/{stream.request_id}"
    async with http.stream("GET", url, params={"stream": "true"}) as response:
        again = Stream(response)
        await again.text("a")
        await asyncio.sleep(3.5)  # more than two grace periods
        await work.say("b")
        await again.text("ab")
    assert (await ended_of(bus, stream.request_id)).reason == "cancelled"


async def test_background_work_that_ended_while_nobody_looked_can_be_read(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open,
    http: httpx.AsyncClient,
) -> None:  # fmt: skip
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, background=True)
    work = await worker.take(seed)
    await stream.response.aclose()
    await work.claim()
    await work.say("a", "b")
    await work.end()
    await asyncio.sleep(2)  # the grace period passes
    answer = (await http.get(f"{second.url}{CHAT}/{stream.request_id}")).json()
    assert (answer["status"], answer["choices"][0]["message"]["content"]) == ("completed", "ab")


async def test_several_readers_follow_one_request_through_several_gateways(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, open_stream: Open, http: httpx.AsyncClient
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a")
    await stream.text("a")
    urls = [f"{gateway.url}{CHAT}/{stream.request_id}" for gateway in (first, second, second)]
    reading = [asyncio.create_task(http.get(url, params={"stream": "true"})) for url in urls]
    gone = asyncio.create_task(http.get(urls[0], params={"stream": "true"}))
    await asyncio.sleep(0.3)
    gone.cancel()  # one that only looked on
    await work.say("b", "c")
    await work.end()
    events = await stream.rest()
    assert text_of(events) == "abc"
    for read in reading:
        assert events_of((await read).text) == events


# The same request, seen again


async def test_a_stream_resumed_at_any_event_through_another_gateway_gives_exactly_the_rest(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    body = chat_body(fresh_seed(), stream=True, stream_options={"include_usage": True})
    answer = await http.post(first.url + CHAT, json=body)
    events = events_of(answer.text)
    url = f"{second.url}{CHAT}/{answer.headers['x-headrace-request-id']}"
    assert events_of((await http.get(url, params={"stream": "true"})).text) == events
    for n, (event_id, _) in enumerate(events[:-1], start=1):
        by_query = await http.get(url, params={"stream": "true", "starting_after": event_id})
        assert events_of(by_query.text) == events[n:]
        by_header = await http.get(url, params={"stream": "true"}, headers={"last-event-id": event_id or ""})
        assert events_of(by_header.text) == events[n:]


async def test_a_bad_place_to_resume_from_is_refused(
    first: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    request_id = (await http.post(first.url + CHAT, json=chat_body(fresh_seed()))).json()["id"]
    for place in ("x", "chatcmpl-other:3", "999999999", f"{request_id}:-1"):
        answer = await http.get(f"{first.url}{CHAT}/{request_id}", params={"stream": "true", "starting_after": place})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "starting_after"


async def test_when_its_gateway_is_killed_a_client_goes_on_at_another_one(
    start: Start, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open,
    http: httpx.AsyncClient,
) -> None:  # fmt: skip
    victim, seed = start(), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(victim, seed)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a", "b")
    await stream.text("ab")
    victim.kill()
    with pytest.raises(httpx.HTTPError):
        await stream.rest()
    await work.say("c")
    url = f"{second.url}{CHAT}/{stream.request_id}"
    async with http.stream(
        "GET", url, params={"stream": "true"}, headers={"last-event-id": stream.events[-1][0] or ""}
    ) as response:
        resumed = Stream(response)
        await resumed.text("c")
        await work.say("d")
        await work.end("length")
        events = await resumed.rest()
    assert text_of(events) == "cd"
    assert events[-1] == (None, "[DONE]")
    assert [type(entry.record) for entry in await entries_of(bus, stream.request_id)].count(Ended) == 1


async def test_a_request_can_be_looked_up_from_queue_to_end(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, open_stream: Open,
    http: httpx.AsyncClient,
) -> None:  # fmt: skip
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed)
    url = f"{second.url}{CHAT}/{stream.request_id}"
    work = await worker.take(seed)
    assert (await http.get(url)).json()["status"] == "queued"
    await work.claim()
    await work.say("par")
    half = (await http.get(url)).json()
    assert (half["status"], half["choices"][0]["message"]["content"], half["usage"]) == ("in_progress", "par", None)
    await work.say("tial")
    await work.end()
    await stream.rest()
    whole = (await http.get(url)).json()
    assert (whole["status"], whole["choices"][0]["message"]["content"]) == ("completed", "partial")
    assert whole["usage"]["completion_tokens"] == 2
    assert (await http.get(f"{second.url}/v1/completions/{stream.request_id}")).status_code == 404


# Cancelled and failed


@pytest.mark.parametrize(("method", "suffix"), [("POST", "/cancel"), ("DELETE", "")])
async def test_a_cancelled_stream_ends_with_an_error_event_and_no_done(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, open_stream: Open,
    http: httpx.AsyncClient, method: str, suffix: str,
) -> None:  # fmt: skip
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed)
    work = await worker.take(seed)
    await work.claim()
    await work.say("x")
    url = f"{second.url}{CHAT}/{stream.request_id}"
    assert (await http.request(method, url + suffix)).json()["status"] == "cancelled"
    events = await stream.rest()
    assert events[-1][1]["error"]["code"] == "cancelled"
    assert (await http.request(method, url + suffix)).json()["status"] == "cancelled"


async def test_cancelling_a_finished_request_changes_nothing(
    first: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    request_id = (await http.post(first.url + CHAT, json=chat_body(fresh_seed()))).json()["id"]
    assert (await http.post(f"{first.url}{CHAT}/{request_id}/cancel")).json()["status"] == "completed"


async def test_a_waiting_client_of_a_cancelled_request_is_told_and_its_library_does_not_retry(
    first: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    async with AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=2) as client:
        waiting = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], seed=seed)
        )
        work = await worker.take(seed)
        await http.post(f"{first.url}{CHAT}/{work.request.request_id}/cancel")
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
    assert (caught.value.status_code, caught.value.code) == (499, "cancelled")
    assert [r.params.seed for r in worker.seen].count(seed) == 1


async def test_a_failed_request_is_an_error_status_or_an_error_event(
    first: GatewayProcess, worker: Worker, open_stream: Open, http: httpx.AsyncClient
) -> None:
    error = ErrorInfo("it broke", code="engine_failed")
    seeds = [fresh_seed(), fresh_seed()]
    for seed in seeds:
        worker.reserve(seed)
    waiting = asyncio.create_task(http.post(first.url + CHAT, json=chat_body(seeds[0])))
    stream = await open_stream(first, seeds[1])
    for seed in seeds:
        work = await worker.take(seed)
        await work.claim()
        await work.say("half")
        await work.end("error", error)
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert answer.headers["x-headrace-request-id"].startswith("chatcmpl-")
    events = await stream.rest()
    assert events[-1][1]["error"] == answer.json()["error"]
    async with AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0) as client:
        seed = fresh_seed()
        worker.reserve(seed)
        chunks = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], seed=seed, stream=True
        )
        work = await worker.take(seed)
        await work.claim()
        await work.end("error", error)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in chunks:
                pass


# Idempotency


async def test_retries_with_a_key_join_the_first_run(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    key = {"idempotency-key": f"join-{fresh_seed()}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": key["idempotency-key"]}]}
    before = len(worker.seen)
    answers = await asyncio.gather(
        *(http.post(gateway.url + CHAT, json=body, headers=key) for gateway in [first, second] * 4)
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert len(worker.seen) - before == 1
    # Streamed, later, elsewhere: still the same run.
    streamed = await http.post(second.url + CHAT, json={**body, "stream": True}, headers=key)
    assert text_of(events_of(streamed.text)) == answers[0].json()["choices"][0]["message"]["content"]
    assert len(worker.seen) - before == 1


async def test_a_key_used_with_another_body_is_refused(
    first: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    key = {"idempotency-key": f"other-{fresh_seed()}"}
    assert (await http.post(first.url + CHAT, json=chat_body(1), headers=key)).status_code == 200
    answer = await http.post(first.url + CHAT, json=chat_body(2), headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_a_run_that_failed_frees_its_key(first: GatewayProcess, worker: Worker, http: httpx.AsyncClient) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    key = {"idempotency-key": f"failed-{seed}"}
    waiting = asyncio.create_task(http.post(first.url + CHAT, json=chat_body(seed), headers=key))
    work = await worker.take(seed)
    await work.claim()
    await work.end("error", ErrorInfo("it broke"))
    assert (await waiting).status_code == 500
    worker.reserve(seed)
    waiting = asyncio.create_task(http.post(first.url + CHAT, json=chat_body(seed), headers=key))
    work = await worker.take(seed)
    await work.claim()
    await work.end()
    assert (await waiting).status_code == 200


async def test_a_retry_queues_the_work_that_a_dying_gateway_left_unqueued(
    first: GatewayProcess, worker: Worker, bus: Bus, http: httpx.AsyncClient
) -> None:
    """The log is begun and the gateway dies: found out by the tests' own hand, with the id that a key gives."""
    seed = fresh_seed()
    body = chat_body(seed)
    request_id = keyed_request_id("chat", "default", f"left-{seed}", 0)
    now = time.time()
    await bus.create_log(
        Accepted(
            request_id, "default", "tiny", "chat", now, now + 60, 7, seed, body_digest=parse_call(body, "chat").digest
        )
    )
    answer = await http.post(first.url + CHAT, json=body, headers={"idempotency-key": f"left-{seed}"})
    assert (answer.status_code, answer.json()["id"]) == (200, request_id)
