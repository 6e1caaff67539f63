"""When time runs out, and when enough is enough: deadlines, the queue, slots, room in the log."""

from __future__ import annotations

import time

import httpx

from services.gateway.terms import keyed_request_id
from shared.bus import Bus
from shared.protocol.records import Accepted
from shared.protocol.streams import LOG, REQUESTS
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
    queued_subjects,
    text_of,
    until,
    worker_of,
)

CHAT = "/v1/chat/completions"


# Time runs out


async def test_without_a_worker_a_request_waits_for_its_queue_deadline_and_says_what_is_missing(
    deserted: GatewayProcess, bus: Bus, http: httpx.AsyncClient
) -> None:
    ready = await http.get(deserted.url + "/readyz")
    assert (ready.status_code, ready.json()["missing"]) == (
        503,
        ["a prefill worker for deserted", "a decode worker for deserted"],
    )
    headers = {"x-headrace-queue-timeout-s": "0.5"}
    body = chat_body(fresh_seed()) | {"model": "deserted"}
    answer = await http.post(deserted.url + CHAT, json=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "queue_timeout")
    assert "no prefill worker is running" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    streamed = await http.post(deserted.url + CHAT, json={**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    assert events_of(streamed.text)[-1][1]["error"]["code"] == "queue_timeout"
    ended = await ended_of(bus, streamed.headers["x-headrace-request-id"])
    assert (ended.reason, ended.error.code if ended.error else None) == ("error", "queue_timeout")

    async def empty() -> bool:
        return not any(".deserted." in subject for subject in await queued_subjects(bus))

    await until(empty)


async def test_a_claimed_request_is_ended_at_its_total_deadline(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, {"x-headrace-timeout-s": "1.5"})
    work = await worker.take(seed)
    await work.claim()
    await work.say("slow")
    events = await stream.rest()
    assert text_of(events) == "slow"
    assert events[-1][1]["error"]["code"] == "deadline_exceeded"
    assert (await ended_of(bus, stream.request_id)).usage.completion_tokens == 1


async def test_a_request_whose_gateway_died_is_ended_by_another_gateway(
    start: Start, deserted: GatewayProcess, bus: Bus, open_stream: Open
) -> None:
    victim = start("deserted")
    stream = await open_stream(victim, fresh_seed(), {"x-headrace-queue-timeout-s": "2"}, model="deserted")
    victim.kill()
    ended = await ended_of(bus, stream.request_id)
    assert ended.error is not None
    assert ended.error.code == "queue_timeout"
    assert "no prefill worker is running" in ended.error.message
    assert ended.by != worker_of(victim)


async def test_a_log_that_was_begun_and_never_queued_is_ended_at_its_deadline(start: Start, bus: Bus) -> None:
    request_id, now = f"chatcmpl-orphan{fresh_seed()}", time.time()
    await bus.create_log(Accepted(request_id, "default", "deserted", "chat", now, now + 0.5, 1, 1))
    start("deserted")  # looks for such logs when it starts
    ended = await ended_of(bus, request_id)
    assert ended.error is not None
    assert ended.error.code == "deadline_exceeded"


# Enough is enough


async def test_a_long_queue_refuses_new_work_with_retry_after(
    start: Start, bus: Bus, http: httpx.AsyncClient, open_stream: Open
) -> None:
    small = start("deserted", max_waiting="1")
    stream = await open_stream(small, fresh_seed(), model="deserted")

    async def refused() -> bool:
        answer = await http.post(
            small.url + CHAT,
            json=chat_body(fresh_seed()) | {"model": "deserted"},
            headers={"x-headrace-queue-timeout-s": "0.2"},
        )
        if answer.status_code != 429:
            return False
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        return True

    await until(refused)
    await stream.response.aclose()


async def test_a_gateway_with_all_slots_taken_refuses_and_recovers(
    start: Start, worker: Worker, http: httpx.AsyncClient, open_stream: Open
) -> None:
    small, seed = start(max_concurrent="1"), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(small, seed)
    answer = await http.post(small.url + CHAT, json=chat_body(fresh_seed()))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_overloaded")
    assert "retry-after" in answer.headers
    work = await worker.take(seed)
    await work.claim()
    await work.end()
    await stream.rest()

    async def served() -> bool:
        return (await http.post(small.url + CHAT, json=chat_body(fresh_seed()))).status_code == 200

    await until(served)


async def test_a_log_stream_that_would_drop_running_requests_refuses_new_ones(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start("deserted", url=own_nats.url)
    async with await Bus.connect(own_nats.url, name="test") as bus:
        config = (await bus.js.stream_info(LOG.name)).config
        await bus.js.update_stream(config.evolve(max_bytes=20_000))
        for n in range(30):
            await bus.js.publish(f"hr.tok.default.filler{n}", b"x" * 900)

        async def refused() -> bool:
            answer = await http.post(
                gateway.url + CHAT,
                json=chat_body(1) | {"model": "deserted"},
                headers={"x-headrace-queue-timeout-s": "0.2"},
            )
            return bool(answer.json()["error"]["code"] == "log_full" and answer.headers["retry-after"])

        await until(refused)
    assert gateway.stop() == 0


async def test_work_that_the_queue_refuses_is_a_429_and_its_log_ends_and_frees_the_key(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway, seed = start(url=own_nats.url), fresh_seed()
    key = {"idempotency-key": f"refused-{seed}"}
    async with await Bus.connect(own_nats.url, name="test") as bus:
        config = (await bus.js.stream_info(REQUESTS.name)).config
        await bus.js.update_stream(config.evolve(max_msgs=1))
        await bus.js.publish("hr.req.other.normal.default.filler", b"")
        answer = await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        ended = await ended_of(bus, keyed_request_id("chat", "default", key["idempotency-key"], 0))
        assert ended.error is not None
        assert ended.error.code == "queue_full"
        await bus.js.update_stream(config)
        async with Worker.running(own_nats.url, "tiny"):
            assert (await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key)).status_code == 200
    assert gateway.stop() == 0
