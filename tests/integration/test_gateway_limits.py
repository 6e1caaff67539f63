"""When enough is enough: the queue of each priority, the expected wait, a tenant's share, slots, room in the log."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from services.gateway.openai_schema import parse_call
from services.gateway.terms import keyed_request_id
from shared.bus import Bus, Delivery, list_subjects
from shared.protocol.jobs import GenerationRequest, decode_request
from shared.protocol.records import Accepted, Ended, choice_request_id
from shared.protocol.seeds import derived_seed
from shared.protocol.streams import LOG, REQUESTS
from shared.protocol.subjects import PRIORITIES, Priority
from tests.conftest import NatsServer
from tests.integration.gateway_harness import (
    GatewayProcess,
    Open,
    Start,
    Work,
    Worker,
    chat_body,
    ended_of,
    entries_of,
    fresh_seed,
    queued_subjects,
    until,
)

CHAT = "/v1/chat/completions"


def filler(priority: Priority = "normal") -> str:
    """A subject under which a message takes a place in the queue."""
    return f"hr.req.other.{priority}.default.filler{fresh_seed()}"


async def ask(
    http: httpx.AsyncClient, gateway: GatewayProcess, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = chat_body(fresh_seed(), **fields)
    return await http.post(gateway.url + CHAT, json=body, headers=headers or {}, timeout=90)


async def until_empty(bus: Bus) -> None:
    async def empty() -> bool:
        return not await queued_subjects(bus)

    await until(empty)


def assert_refused(answer: httpx.Response, status: int, code: str) -> int:
    """What the client is told to wait, in seconds."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    retry_after_s = int(answer.headers["retry-after"])
    assert 1 <= retry_after_s <= 60
    return retry_after_s


# The queue itself


async def test_over_all_gateways_the_queue_takes_as_much_of_a_priority_as_it_is_set_to_and_no_more(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    settings = {"max_queued_normal": "5", "max_queued_low": "2", "queue_timeout_s": "3"}
    gateways = [start("deserted", url=own_nats.url, **settings) for _ in range(2)]
    both = [
        ask(http, gateway, model="deserted", priority=priority)
        for _ in range(8)
        for gateway in gateways
        for priority in ("normal", "low")
    ]
    codes = Counter(answer.json()["error"]["code"] for answer in await asyncio.gather(*both))
    assert codes == {"queue_timeout": 7, "queue_full": 25}
    for gateway in gateways:
        assert gateway.stop() == 0


async def test_a_full_queue_of_one_priority_leaves_the_others_open(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, max_queued_normal="1")
    async with await Bus.connect(own_nats.url, name="test") as bus, Worker.running(own_nats.url, "tiny"):
        await bus.js.publish(filler("normal"), b"")
        for _ in range(2):  # once by the queue's own word, and later by the gateway's look at it
            assert_refused(await ask(http, gateway), 503, "queue_full")
            assert_refused(await ask(http, gateway, stream=True), 503, "queue_full")
            assert (await ask(http, gateway, priority="high")).status_code == 200
            assert (await ask(http, gateway, priority="low")).status_code == 200
            await asyncio.sleep(1.2)
    assert gateway.stop() == 0


async def test_other_services_leave_the_limits_of_the_queue_as_gateways_set_them(
    own_nats: NatsServer, start: Start
) -> None:
    gateway = start(url=own_nats.url, max_queued_high="11", max_queued_normal="12", max_queued_low="13")
    for _ in range(2):
        async with await Bus.connect(own_nats.url, name="prefill") as bus:
            limits = [(await bus.js.stream_info(REQUESTS[p].name)).config.max_msgs for p in PRIORITIES]
            assert limits == [11, 12, 13]
    assert gateway.stop() == 0


async def test_work_that_the_queue_refuses_leaves_an_ended_log_and_a_free_key_however_soon_the_client_retries(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, max_queued_normal="1")
    async with await Bus.connect(own_nats.url, name="test") as bus, Worker.running(own_nats.url, "tiny"):
        for _ in range(8):
            seed, subject = fresh_seed(), filler()
            await until_empty(bus)
            key = {"idempotency-key": f"refused-{seed}"}
            await bus.js.publish(subject, b"")
            assert_refused(await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key), 503, "queue_full")
            entries = await entries_of(bus, keyed_request_id("chat", "default", key["idempotency-key"], 0))
            if entries:  # it has ended before its client was told
                last = entries[-1].record
                assert isinstance(last, Ended)
                assert last.error is not None
                assert last.error.code == "queue_full"
            await bus.js.purge_stream(REQUESTS["normal"].name, subject=subject)

            async def served(seed: int = seed, key: dict[str, str] = key) -> bool:
                """Until the gateway's next look at the queue it may be refused again, then without a log."""
                answer = await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key)
                return answer.status_code == 200

            await until(served)
        for subject in await list_subjects(bus.client, LOG.name):
            await ended_of(bus, subject.rpartition(".")[2])
    assert gateway.stop() == 0


async def test_when_a_joined_run_lacks_an_answer_that_does_not_fit_all_its_answers_end(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    """A gateway begins two of three logs, queues one choice and dies; the retry finds no room for the rest."""
    gateway, seed = start("deserted", url=own_nats.url, max_queued_normal="1"), fresh_seed()
    body = chat_body(seed, n=3) | {"model": "deserted"}
    async with await Bus.connect(own_nats.url, name="test") as bus:
        request_id = await begin_by_hand(bus, body, f"half-{seed}", choices=2)
        await bus.js.publish(filler(), b"")
        answer = await http.post(gateway.url + CHAT, json=body, headers={"idempotency-key": f"half-{seed}"})
        assert_refused(answer, 503, "queue_full")
        for suffix in ("", "-c1", "-c2"):
            ended = await ended_of(bus, request_id + suffix)
            assert (ended.reason, ended.error and ended.error.code) == ("error", "queue_full")
    assert gateway.stop() == 0


async def test_a_joined_run_that_is_whole_but_not_queued_ends_after_the_grace_period_when_nobody_comes_back(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    settings = {"max_queued_normal": "1", "disconnect_grace_s": "1"}
    gateway, seed = start("deserted", url=own_nats.url, **settings), fresh_seed()
    body = chat_body(seed) | {"model": "deserted"}
    async with await Bus.connect(own_nats.url, name="test") as bus:
        request_id = await begin_by_hand(bus, body, f"whole-{seed}", choices=1)
        await bus.js.publish(filler(), b"")
        answer = await http.post(gateway.url + CHAT, json=body, headers={"idempotency-key": f"whole-{seed}"})
        assert_refused(answer, 503, "queue_full")
        assert (await bus.open_log("default", request_id).state()).ended is None
        assert (await ended_of(bus, request_id)).reason == "cancelled"
    assert gateway.stop() == 0


async def begin_by_hand(bus: Bus, body: dict[str, Any], key: str, choices: int) -> str:
    """The first logs of a keyed request, as a gateway leaves them that dies before it queues anything."""
    request_id, now = keyed_request_id("chat", "default", key, 0), time.time()
    call = parse_call(body, "chat")
    for n in range(choices):
        await bus.create_log(
            Accepted(
                choice_request_id(request_id, n), "default", call.model, "chat", now, now + 60, 7,
                derived_seed(call.seed or 0, n), body_digest=call.digest, choices=call.choices, choice=n,
                queue_deadline_unix_s=now + 30, compute_timeout_s=30, background=True,
            )
        )  # fmt: skip
    return request_id


# The expected wait


class SlowWorker:
    """Serves one request after the other, as fast as it is told to; keeps the order in which it took them."""

    def __init__(self, bus: Bus, each_s: float) -> None:
        self.bus = bus
        self.each_s = each_s
        self.taken: list[GenerationRequest] = []

    async def run(self) -> None:
        queue = self.bus.request_queue("tiny")
        await queue.open()
        while True:
            for delivery in await queue.pull(1, 0.5):
                await self._serve(delivery)

    async def _serve(self, delivery: Delivery) -> None:
        request = decode_request(delivery.data)
        self.taken.append(request)
        work = Work(delivery, request, self.bus.open_log(request.tenant, request.request_id, request.log_seq))
        await work.claim()
        await asyncio.sleep(self.each_s)
        await work.say("done")
        await work.end()


@asynccontextmanager
async def slow_worker(nats_url: str, each_s: float) -> AsyncIterator[SlowWorker]:
    async with await Bus.connect(nats_url, name="slow-worker") as bus:
        named = Worker(bus, "tiny")
        bus.announce(lambda: named.status("prefill"))
        bus.announce(lambda: named.status("decode"))
        worker = SlowWorker(bus, each_s)
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            while not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=1)


async def flood(
    http: httpx.AsyncClient, gateway: GatewayProcess, per_s: float, seconds: float, **fields: Callable[[int], Any]
) -> list[httpx.Response]:
    """Requests at a steady rate, whatever becomes of them."""
    asked = []
    for n in range(int(per_s * seconds)):
        given = {name: value(n) for name, value in fields.items()}
        asked.append(asyncio.create_task(ask(http, gateway, **given)))
        await asyncio.sleep(1 / per_s)
    return await asyncio.gather(*asked)


async def test_beyond_the_wait_that_it_allows_the_gateway_refuses_and_what_it_accepts_is_served(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    """Several times what the worker can do, for a while; the hard limits are never reached."""
    gateway = start(url=own_nats.url, max_queue_wait_s="2", retry_after_s="60")
    async with slow_worker(own_nats.url, 0.1) as worker:
        answers = await flood(http, gateway, 40, 8)
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        waits = [assert_refused(answer, 503, "queue_full") for answer in refused]
        assert len(refused) > len(served) > 10
        assert len(worker.taken) == len(served)
        assert all(answer.json()["choices"][0]["message"]["content"] == "done" for answer in served)
        # Computed from the queue: the setting would be 60.
        assert max(waits) < 60
    assert gateway.stop() == 0


async def test_a_lower_priority_waits_longer_and_is_not_starved(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, max_queue_wait_s="2")
    async with slow_worker(own_nats.url, 0.05) as worker:
        answers = await flood(http, gateway, 60, 8, priority=lambda n: PRIORITIES[n % 3])
        for answer in answers:
            if answer.status_code != 200:
                assert_refused(answer, 503, "queue_full")
        taken = Counter(request.priority for request in worker.taken)
        assert sum(taken.values()) == sum(answer.status_code == 200 for answer in answers)
        assert taken["high"] > taken["normal"] > taken["low"] >= 3
    assert gateway.stop() == 0


async def test_a_request_that_would_time_out_in_the_queue_is_refused_at_once(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, max_queue_wait_s="60")
    async with slow_worker(own_nats.url, 0.2):
        waiting = [asyncio.create_task(ask(http, gateway)) for _ in range(25)]

        async def refused() -> bool:
            answer = await ask(http, gateway, queue_timeout_s=0.5)
            return answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"

        await until(refused)
        patient = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in patient} == {200}
    assert gateway.stop() == 0


async def test_joining_a_run_needs_no_place_in_the_queue(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway, seed = start(url=own_nats.url, max_queued_normal="1"), fresh_seed()
    key = {"idempotency-key": f"busy-{seed}"}
    async with await Bus.connect(own_nats.url, name="test") as bus, Worker.running(own_nats.url, "tiny"):
        first = await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key)
        assert first.status_code == 200
        await until_empty(bus)
        await bus.js.publish(filler(), b"")
        assert_refused(await ask(http, gateway), 503, "queue_full")
        again = await http.post(gateway.url + CHAT, json=chat_body(seed), headers=key)
        assert again.text == first.text
    assert gateway.stop() == 0


# One tenant's share


async def test_a_tenant_has_as_many_unfinished_requests_as_it_may_and_others_are_not_concerned(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    settings = {"max_tenant_unfinished": "3", "api_keys": "sk-a=acme.corp,sk-b=beta", "queue_timeout_s": "3"}
    gateway = start("deserted", url=own_nats.url, **settings)
    acme, beta = ({"authorization": f"Bearer {key}"} for key in ("sk-a", "sk-b"))
    many = [asyncio.create_task(ask(http, gateway, acme, model="deserted")) for _ in range(9)]
    async with await Bus.connect(own_nats.url, name="test") as bus:

        async def three_wait() -> bool:
            return len(await queued_subjects(bus)) == 3

        await until(three_wait)
        assert_refused(await ask(http, gateway, acme, model="deserted"), 429, "rate_limit_exceeded")
        other = ask(http, gateway, beta, model="deserted", n=3)
        assert (await other).json()["error"]["code"] == "queue_timeout"
        codes = Counter(answer.json()["error"]["code"] for answer in await asyncio.gather(*many))
        assert codes == {"queue_timeout": 3, "rate_limit_exceeded": 6}
        last = await ask(http, gateway, acme, model="deserted", n=4)  # more than it may ever have
        assert (last.status_code, last.json()["error"]["param"]) == (400, "n")
        assert (await ask(http, gateway, acme, model="deserted")).json()["error"]["code"] == "queue_timeout"
        for name in "xy":  # those that are being decoded count too
            await bus.js.publish(f"hr.job.any.low.acme=2e=corp.{name}", b"")
        assert_refused(await ask(http, gateway, acme, model="deserted", n=2), 429, "rate_limit_exceeded")
    assert gateway.stop() == 0


async def test_a_tenant_is_told_to_wait_as_long_as_its_requests_take(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start(url=own_nats.url, max_tenant_unfinished="2", retry_after_s="60")
    async with slow_worker(own_nats.url, 0.1):
        answers = await flood(http, gateway, 30, 3)
        refused = [answer for answer in answers if answer.status_code != 200]
        waits = [assert_refused(answer, 429, "rate_limit_exceeded") for answer in refused]
        assert waits[0] == 60  # nothing is known yet
        assert waits[-1] < 10
    assert gateway.stop() == 0


# The gateway's own


async def test_a_gateway_with_all_slots_taken_refuses_and_recovers(
    start: Start, worker: Worker, http: httpx.AsyncClient, open_stream: Open
) -> None:
    small, seed = start(max_concurrent="1"), fresh_seed()
    worker.reserve(seed)
    stream = await open_stream(small, seed)
    assert_refused(await ask(http, small), 503, "gateway_overloaded")
    work = await worker.take(seed)
    await work.claim()
    await work.end()
    await stream.rest()

    async def served() -> bool:
        return (await ask(http, small)).status_code == 200

    await until(served)


async def test_a_client_beyond_the_connections_that_a_gateway_keeps_is_told_when_to_come_again(
    start: Start, http: httpx.AsyncClient
) -> None:
    small = start(max_concurrent="1")
    crowd = [await asyncio.open_connection("127.0.0.1", int(small.url.rpartition(":")[2])) for _ in range(100)]
    try:
        answer = await ask(http, small)
        assert_refused(answer, 503, "gateway_overloaded")
        assert answer.headers["connection"] == "close"
    finally:
        for _, writer in crowd:
            writer.close()

    async def served() -> bool:
        return (await http.get(small.url + "/healthz")).status_code == 200

    await until(served)


async def test_a_log_stream_that_would_drop_running_requests_refuses_new_ones_until_they_must_have_ended(
    own_nats: NatsServer, start: Start, http: httpx.AsyncClient
) -> None:
    gateway = start("deserted", url=own_nats.url, max_timeout_s="20", retry_after_s="60")
    async with await Bus.connect(own_nats.url, name="test") as bus:
        config = (await bus.js.stream_info(LOG.name)).config
        await bus.js.update_stream(config.evolve(max_bytes=20_000))
        for n in range(30):
            await bus.js.publish(f"hr.tok.default.filler{n}", b"x" * 900)

        async def refused() -> bool:
            answer = await ask(http, gateway, model="deserted", queue_timeout_s=0.2)
            return bool(answer.json()["error"]["code"] == "log_full")

        await until(refused)
        # In the queue and at work, 20 s each: then nobody needs the oldest record any more.
        assert assert_refused(await ask(http, gateway, model="deserted"), 503, "log_full") <= 40
    assert gateway.stop() == 0
