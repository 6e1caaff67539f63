"""Gateways that stop and NATS that restarts while answers are running."""

from __future__ import annotations

import asyncio

import httpx

from tests.conftest import NatsServer
from tests.integration.gateway_harness import (
    GatewayProcess,
    Open,
    Start,
    Worker,
    chat_body,
    ended_of,
    events_of,
    fresh_seed,
    text_of,
    until,
)

CHAT = "/v1/chat/completions"


# Stops and restarts


async def test_sigterm_lets_a_running_answer_end(start: Start, worker: Worker, open_stream: Open) -> None:
    leaving, seed = start(), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(leaving, seed)
    work = await worker.take(seed)
    await work.claim()
    leaving.terminate()
    await work.say("to the", " end")
    await work.end()
    events = await stream.rest()
    assert text_of(events) == "to the end"
    assert events[-1] == (None, "[DONE]")
    assert await asyncio.to_thread(leaving.stop) == 0


async def test_after_the_drain_time_clients_are_sent_elsewhere_and_the_request_goes_on(
    start: Start, second: GatewayProcess, worker: Worker, open_stream: Open, http: httpx.AsyncClient
) -> None:
    leaving, seed = start(drain_s="0.3"), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(leaving, seed)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a")
    await stream.text("a")
    leaving.terminate()
    events = await stream.rest()
    assert events[-1][1]["error"]["code"] == "gateway_stopping"
    assert await asyncio.to_thread(leaving.stop) == 0
    await work.say("b")
    await work.end()
    last_id = [event_id for event_id, _ in events if event_id][-1]
    rest = await http.get(
        f"{second.url}{CHAT}/{stream.request_id}", params={"stream": "true", "starting_after": last_id}
    )
    assert text_of(events_of(rest.text)) == "b"


async def test_a_client_that_waits_for_a_whole_answer_at_a_stopping_gateway_is_told_when_to_come_again(
    start: Start, worker: Worker, http: httpx.AsyncClient
) -> None:
    leaving, seed = start(drain_s="0.3"), fresh_seed()
    worker.reserve(seed)
    asked = asyncio.create_task(http.post(leaving.url + CHAT, json=chat_body(seed)))
    work = await worker.take(seed)
    await work.claim()
    leaving.terminate()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_stopping")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-should-retry"] == "false"
    await work.end()
    assert await asyncio.to_thread(leaving.stop) == 0


async def test_while_nats_is_away_clients_are_told_when_to_come_again(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, retry_after_s="17")
    own_nats.kill()

    async def noticed() -> bool:
        return bool((await http.get(gateway.url + "/readyz")).json()["missing"] == ["NATS"])

    await until(noticed)
    for stream in (False, True):
        answer = await http.post(gateway.url + CHAT, json=chat_body(fresh_seed(), stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
        assert answer.headers["retry-after"] == "17"
    for params in ({}, {"stream": "true"}):
        answer = await http.get(f"{gateway.url}{CHAT}/chatcmpl-any", params=params)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "log_unreachable")
        assert answer.headers["retry-after"] == "17"
    own_nats.start()
    assert gateway.stop() == 0


async def test_a_stream_survives_a_restart_of_nats(own_nats: NatsServer, start: Start, open_stream: Open) -> None:
    gateway, seed = start(url=own_nats.url), fresh_seed()
    async with Worker.running(own_nats.url, "tiny") as worker:
        worker.reserve(seed)
        stream = await open_stream(gateway, seed)
        work = await worker.take(seed)
        await work.claim()
        await work.say("a")
        await stream.text("a")
        own_nats.kill()
        own_nats.start()
        await work.say("b")
        await work.end()
        events = await stream.rest()
    assert text_of(events) == "ab"
    assert events[-1] == (None, "[DONE]")
    assert gateway.stop() == 0


async def test_a_client_that_leaves_while_nats_is_away_still_stops_the_work(
    own_nats: NatsServer, start: Start, open_stream: Open
) -> None:
    gateway, seed = start(url=own_nats.url), fresh_seed()
    async with Worker.running(own_nats.url, "tiny") as worker:
        worker.reserve(seed)
        stream = await open_stream(gateway, seed)
        await (await worker.take(seed)).claim()
        own_nats.kill()
        await stream.response.aclose()

        async def noticed() -> bool:
            return any(line.get("event") == "ending_put_off" for line in gateway.log_lines())

        await until(noticed)
        own_nats.start()
        assert (await ended_of(worker.bus, stream.request_id)).reason == "cancelled"
    assert gateway.stop() == 0
