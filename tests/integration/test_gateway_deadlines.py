"""When time runs out: queue time and compute time, whoever watches the clock, and whatever is down."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from services.gateway.endings import Ending, Endings
from shared.bus import Bus
from shared.protocol.blocks import Manifest
from shared.protocol.jobs import DecodeJob, GenerationRequest, SamplingParams
from shared.protocol.records import Accepted, Claimed, Ended
from shared.protocol.subjects import SUBMIT
from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Open,
    Start,
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


def code_of(ended: Ended) -> str | None:
    return ended.error.code if ended.error else None


async def opening_of(bus: Bus, request_id: str) -> Accepted:
    record = (await entries_of(bus, request_id))[0].record
    assert isinstance(record, Accepted)
    return record


# The queue


async def test_without_a_worker_a_request_waits_for_its_queue_deadline_and_says_what_is_missing(
    deserted: GatewayProcess, bus: Bus, http: httpx.AsyncClient
) -> None:
    ready = await http.get(deserted.url + "/readyz")
    assert (ready.status_code, ready.json()["missing"]) == (
        503,
        ["a prefill worker for deserted", "a decode worker for deserted"],
    )
    assert ready.headers["retry-after"] == "2"
    headers = {"x-headrace-queue-timeout-s": "0.5"}
    body = chat_body(fresh_seed()) | {"model": "deserted"}
    answer = await http.post(deserted.url + CHAT, json=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "queue_timeout")
    assert "no prefill worker is running" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["retry-after"] == "2"  # the setting, while no rate is known
    streamed = await http.post(deserted.url + CHAT, json={**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    assert events_of(streamed.text)[-1][1]["error"]["code"] == "queue_timeout"
    ended = await ended_of(bus, streamed.headers["x-headrace-request-id"])
    assert (ended.reason, code_of(ended)) == ("error", "queue_timeout")

    async def empty() -> bool:
        return not any(".deserted." in subject for subject in await queued_subjects(bus))

    await until(empty)


async def test_the_queue_time_out_may_stand_in_the_body(deserted: GatewayProcess, http: httpx.AsyncClient) -> None:
    body = chat_body(fresh_seed(), queue_timeout_s=0.3) | {"model": "deserted"}
    answer = await http.post(deserted.url + CHAT, json=body)
    assert answer.json()["error"]["code"] == "queue_timeout"


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
    assert code_of(await ended_of(bus, request_id)) == "deadline_exceeded"


async def test_a_record_that_arrives_after_its_request_was_refused_is_ended_too(bus: Bus) -> None:
    """An answer of NATS was lost, the request refused, and its first record still on its way."""
    request_id, now = f"chatcmpl-late{fresh_seed()}", time.time()
    accepted = Accepted(request_id, "default", "deserted", "chat", now, now + 600, 1, 1)
    endings = Endings(bus, "gateway-test.1")
    running = asyncio.create_task(endings.run())
    try:
        endings.request(Ending(accepted, "error", may_come=True))
        await asyncio.sleep(0.5)
        await bus.create_log(accepted)
        assert (await ended_of(bus, request_id)).reason == "error"
    finally:
        running.cancel()


# The computation


async def test_a_queue_time_out_that_comes_after_a_claim_leaves_the_work_where_it_is(bus: Bus) -> None:
    endings = Endings(bus, "test")
    now = time.time()
    accepted = Accepted(f"claimed-{now}", "default", "nobodys", "chat", now, now + 60, 3, 1)
    log = await bus.create_log(accepted)
    request = GenerationRequest(
        accepted.request_id,
        "default",
        "nobodys",
        "chat",
        "normal",
        [1, 2, 3],
        SamplingParams(4, 1),
        now,
        now,
        now + 60,
        1,
    )
    await bus.publish_request(request)
    await log.append(Claimed(1, "prefill", "p", now))
    assert not await endings.end(Ending(accepted, "error", None, unclaimed_only=True))
    assert (await bus.open_log("default", accepted.request_id).state()).ended is None
    assert any(accepted.request_id in subject.replace("=2e=", ".") for subject in await queued_subjects(bus))
    assert await endings.end(Ending(accepted, "cancelled"))
    assert not await endings.end(Ending(accepted, "error", None, unclaimed_only=True))
    assert not any(".nobodys." in subject for subject in await queued_subjects(bus))


async def test_compute_time_counts_from_the_first_worker_and_not_from_the_queue(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(first, seed, timeout_s=1.2, queue_timeout_s=30)
    accepted = await opening_of(bus, stream.request_id)
    assert accepted.compute_timeout_s == 1.2
    assert accepted.queue_deadline_unix_s == pytest.approx(accepted.created_unix_s + 30)
    assert accepted.deadline_unix_s == pytest.approx(accepted.created_unix_s + 31.2)
    work = await worker.take(seed)
    assert work.request.compute_timeout_s == 1.2
    assert work.request.queue_deadline_unix_s == accepted.queue_deadline_unix_s
    assert work.request.deadline_unix_s == accepted.deadline_unix_s
    await asyncio.sleep(1.5)  # longer than its compute time
    claimed = time.time()
    await work.claim()
    await work.say("slow")
    events = await stream.rest()
    assert time.time() - claimed > 1.1
    assert text_of(events) == "slow"
    assert events[-1][1]["error"]["code"] == "deadline_exceeded"
    ended = await ended_of(bus, stream.request_id)
    assert (ended.usage.completion_tokens, ended.by) == (1, worker_of(first))


async def test_headers_go_before_fields_of_the_body(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open
) -> None:
    headers = {"x-headrace-timeout-s": "7", "x-headrace-queue-timeout-s": "8"}
    stream = await open_stream(first, fresh_seed(), headers, timeout_s=1, queue_timeout_s=2)
    accepted = await opening_of(bus, stream.request_id)
    assert accepted.compute_timeout_s == 7
    assert accepted.deadline_unix_s == pytest.approx(accepted.created_unix_s + 15)
    await stream.rest()


async def test_nats_clients_have_both_time_outs(first: GatewayProcess, worker: Worker, bus: Bus) -> None:
    body = json.dumps(chat_body(fresh_seed(), timeout_s=7)).encode()
    headers = {"X-Headrace-Queue-Timeout-S": "8"}
    reply = json.loads((await bus.client.request(SUBMIT, body, timeout=PATIENCE_S, headers=headers)).data)
    accepted = await opening_of(bus, reply["request_id"])
    assert accepted.compute_timeout_s == reply["compute_timeout_s"] == 7
    assert accepted.queue_deadline_unix_s == reply["queue_deadline_unix_s"]
    assert accepted.queue_deadline_unix_s == pytest.approx(accepted.created_unix_s + 8)
    assert accepted.deadline_unix_s == pytest.approx(accepted.created_unix_s + 15)


@pytest.mark.parametrize("handed_over", [False, True])
async def test_compute_time_ends_where_no_gateway_follows_and_no_worker_is_left(
    start: Start, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Open, handed_over: bool
) -> None:
    """Its gateway dies, and the worker that claimed it is never heard of again; or decode is down as a whole."""
    victim, seed = start(), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(victim, seed, timeout_s=2, queue_timeout_s=600)
    work = await worker.take(seed)
    await asyncio.sleep(1.5)  # some sweeps have seen it unclaimed
    await work.claim()
    if handed_over:
        await work.say("x")
        manifest = Manifest("none", len(work.request.prompt_ids), [])
        await bus.publish_job(DecodeJob(work.request, manifest, [1], 1, work.log.last_seq, time.time()))
        await work.delivery.ack()
    victim.kill()
    claimed = next(e.record for e in await entries_of(bus, stream.request_id) if isinstance(e.record, Claimed))
    ended = await ended_of(bus, stream.request_id)
    assert time.time() > claimed.at_unix_s + 2
    assert (code_of(ended), ended.usage.completion_tokens) == ("deadline_exceeded", int(handed_over))
    assert ended.by != worker_of(victim)


async def test_a_continued_stream_keeps_the_clock_of_its_request(
    start: Start, worker: Worker, bus: Bus, open_stream: Open, http: httpx.AsyncClient
) -> None:
    victim, seed = start(), fresh_seed()
    heir = start(sweep_interval_s="3600")  # so that nobody but the continuation looks at the clock
    worker.reserve(seed)
    stream = await open_stream(victim, seed, timeout_s=3, queue_timeout_s=600)
    work = await worker.take(seed)
    await work.claim()
    await work.say("a")
    victim.kill()
    async with asyncio.timeout(PATIENCE_S):
        answer = await http.get(f"{heir.url}{CHAT}/{stream.request_id}", params={"stream": "true"})
    events = events_of(answer.text)
    assert text_of(events) == "a"
    assert events[-1][1]["error"]["code"] == "deadline_exceeded"
