"""What happens to a request when its client, its gateway, its worker or NATS goes away, and when time runs out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from services.gateway.openai_schema import parse_call
from services.gateway.terms import keyed_request_id
from shared.bus import Bus
from shared.protocol.records import Accepted, Ended, ErrorInfo
from shared.protocol.streams import LOG, REQUESTS
from tests.conftest import NatsServer
from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Worker,
    chat_body,
    ended_of,
    entries_of,
    events_of,
    fresh_seed,
    make_model,
    text_of,
    until,
)

CHAT = "/v1/chat/completions"
Start = Callable[..., GatewayProcess]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateway-lifecycle")
    make_model(path / "tiny")
    make_model(path / "deserted")  # no worker serves it
    return path


@pytest.fixture(scope="module")
def start(nats_url: str, directory: Path) -> Iterator[Start]:
    """Starts gateways, and stops those that still run at the end."""
    started: list[GatewayProcess] = []

    def make(model: str = "tiny", url: str = nats_url, **settings: Any) -> GatewayProcess:
        started.append(GatewayProcess(url, directory / model, directory, **settings).start())
        return started[-1]

    yield make
    for process in started:
        if process.running.poll() is None:
            assert process.stop() == 0


@pytest.fixture(scope="module")
def first(start: Start) -> GatewayProcess:
    return start(disconnect_grace_s="1.5")


@pytest.fixture(scope="module")
def second(start: Start) -> GatewayProcess:
    return start(disconnect_grace_s="1.5")


@pytest.fixture(scope="module")
def deserted(start: Start) -> GatewayProcess:
    return start("deserted")


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


@pytest_asyncio.fixture(scope="module")
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with await Bus.connect(nats_url, name="test") as connected:
        yield connected


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        yield client


class Stream:
    """An open SSE answer, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.request_id = response.headers["x-headrace-request-id"]
        self.events: list[tuple[str | None, Any]] = []
        self._lines = response.aiter_lines()

    async def next(self) -> Any:
        """The data of the next event; raises StopAsyncIteration at the end."""
        event_id = None
        while True:
            line = await anext(self._lines)
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                self.events.append((event_id, data))
                return data

    async def rest(self) -> list[tuple[str | None, Any]]:
        try:
            while True:
                await self.next()
        except StopAsyncIteration:
            return self.events

    async def text(self, wanted: str) -> None:
        """Read until this much text has come."""
        async with asyncio.timeout(PATIENCE_S):
            while text_of(self.events) != wanted:
                await self.next()


@pytest_asyncio.fixture
async def open_stream(http: httpx.AsyncClient) -> AsyncIterator[Callable[..., Any]]:
    contexts: list[Any] = []

    async def opened(
        gateway: GatewayProcess, seed: int, headers: dict[str, str] | None = None, **fields: Any
    ) -> Stream:
        context = http.stream(
            "POST", gateway.url + CHAT, json=chat_body(seed, stream=True, **fields), headers=headers or {}
        )
        response = await context.__aenter__()
        contexts.append(context)
        assert response.status_code == 200, await response.aread()
        return Stream(response)

    yield opened
    for context in contexts:
        await context.__aexit__(None, None, None)


async def queued_subjects(bus: Bus) -> dict[str, int]:
    return (await bus.js.stream_info(REQUESTS.name, subjects_filter=">")).state.subjects or {}


# The client goes away


async def test_a_streaming_client_that_closes_its_socket_stops_the_work(
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Callable[..., Any]
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
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Callable[..., Any]
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
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Callable[..., Any],
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
    start: Start, second: GatewayProcess, worker: Worker, bus: Bus, open_stream: Callable[..., Any],
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
    first: GatewayProcess, second: GatewayProcess, worker: Worker, open_stream: Callable[..., Any],
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
    first: GatewayProcess, second: GatewayProcess, worker: Worker, open_stream: Callable[..., Any],
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
    first: GatewayProcess, worker: Worker, open_stream: Callable[..., Any], http: httpx.AsyncClient
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
    first: GatewayProcess, worker: Worker, bus: Bus, open_stream: Callable[..., Any]
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
    start: Start, deserted: GatewayProcess, bus: Bus, open_stream: Callable[..., Any]
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
    start: Start, bus: Bus, http: httpx.AsyncClient, open_stream: Callable[..., Any]
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
    start: Start, worker: Worker, http: httpx.AsyncClient, open_stream: Callable[..., Any]
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


# Stops and restarts


async def test_sigterm_lets_a_running_answer_end(start: Start, worker: Worker, open_stream: Callable[..., Any]) -> None:
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
    start: Start, second: GatewayProcess, worker: Worker, open_stream: Callable[..., Any], http: httpx.AsyncClient
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


async def test_a_stream_survives_a_restart_of_nats(
    own_nats: NatsServer, start: Start, open_stream: Callable[..., Any]
) -> None:
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
    own_nats: NatsServer, start: Start, open_stream: Callable[..., Any]
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


def worker_of(gateway: GatewayProcess) -> str:
    return next(str(line["worker"]) for line in gateway.log_lines() if line.get("event") == "listening")
