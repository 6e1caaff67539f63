"""The simulated NATS server answers as the real one does: the same calls to both, the same answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import nats
import nats.errors
import pytest
from nats.js.api import ConsumerConfig, RePublish, RetentionPolicy, StreamConfig
from nats.js.errors import APIError

from tests.simulation.client import SimClient, connect
from tests.simulation.network import Server
from tests.simulation.patches import production_code_in
from tests.simulation.world import Process, World

Seen = list[Any]
ACK_WAIT_S = 0.4


class Talk:
    """A client and the names of one scenario."""

    def __init__(self, client: Any, name: str) -> None:
        self.nc = client
        self.js = client.jetstream(timeout=2)
        self.name = name
        self.inbox = ""
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()

    def subject(self, *tokens: str) -> str:
        return ".".join((self.name, *tokens))

    async def work_queue(self, **more: Any) -> None:
        await self.js.add_stream(
            StreamConfig(
                name=self.name,
                subjects=[f"{self.name}.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                max_msgs_per_subject=1,
                discard="new",  # type: ignore[arg-type]
                discard_new_per_subject=True,
                allow_direct=True,
                **more,
            )
        )
        await self.js.add_consumer(
            self.name, ConsumerConfig(durable_name="c", ack_wait=ACK_WAIT_S, filter_subject=f"{self.name}.>")
        )

    async def log(self) -> None:
        await self.js.add_stream(
            StreamConfig(
                name=self.name,
                subjects=[f"{self.name}.>"],
                allow_direct=True,
                republish=RePublish(src=f"{self.name}.>", dest=f"live.{self.name}.>"),
            )
        )

    async def put(self, *tokens: str, data: bytes = b"x", expect: int | None = None) -> Any:
        """Publish and wait for the answer: the sequence, or the error's code and text."""
        headers = None if expect is None else {"Nats-Expected-Last-Subject-Sequence": str(expect)}
        reply = await self.nc.request(self.subject(*tokens), data, timeout=2, headers=headers)
        answer = msgspec.json.decode(reply.data)
        if "error" in answer:
            return answer["error"]["err_code"], answer["error"]["description"]
        return answer["seq"]

    async def listen(self) -> None:
        self.inbox = self.nc.new_inbox()

        async def keep(message: Any) -> None:
            self.arrived.put_nowait(message)

        await self.nc.subscribe(f"{self.inbox}.*", cb=keep)
        await asyncio.sleep(0.02)

    async def ask(self, pull: str, **request: Any) -> None:
        await self.nc.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.c", msgspec.json.encode(request), reply=f"{self.inbox}.{pull}"
        )

    async def next(self, within_s: float = 1.0) -> Any:
        """The next message of any pull, or None."""
        try:
            async with asyncio.timeout(within_s):
                return await self.arrived.get()
        except TimeoutError:
            return None

    async def pull(self) -> Any:
        await self.ask("p", batch=1, no_wait=True)
        return await self.next()


def shown(message: Any, of: Talk) -> Any:
    """What of a pulled message or status must agree."""
    if message is None:
        return None
    headers = message.headers or {}
    if "Status" in headers:
        return headers["Status"], headers.get("Description", "").partition("\n")[0]
    return message.data, message.metadata.num_delivered, message.metadata.sequence.stream


async def appends(t: Talk) -> Seen:
    await t.log()
    return [
        await t.put("a", expect=0),
        await t.put("a", expect=0),
        await t.put("b", expect=0),
        await t.put("a", expect=1),
        await t.put("a", expect=1),
        await t.put("a", expect=9),
        await t.put("a"),
        (await t.js.stream_info(t.name)).state.last_seq,
    ]


async def reads(t: Talk) -> Seen:
    await t.log()
    for n in range(5):
        await t.put("a", data=b"%d" % n)
        await t.put("b", data=b"other")
    seen: Seen = []
    for asked in ("a", "none"):
        reply = await t.nc.request(f"$JS.API.DIRECT.GET.{t.name}.{t.subject(asked)}", b"", timeout=2)
        headers = reply.headers or {}
        seen.append((reply.data, headers.get("Status"), headers.get("Nats-Sequence"), headers.get("Nats-Subject")))
    for query in (
        {"seq": 1, "next_by_subj": t.subject("a"), "batch": 3},
        {"seq": 4, "next_by_subj": t.subject("a"), "batch": 10},
        {"seq": 100, "next_by_subj": t.subject("a"), "batch": 10},
        {"seq": 1, "next_by_subj": t.subject("none"), "batch": 10},
    ):
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def keep(message: Any, answers: asyncio.Queue[Any] = answers) -> None:
            answers.put_nowait(message)

        inbox = t.nc.new_inbox()
        subscription = await t.nc.subscribe(inbox, cb=keep)
        await t.nc.publish(f"$JS.API.DIRECT.GET.{t.name}", msgspec.json.encode(query), reply=inbox)
        while True:
            message = await asyncio.wait_for(answers.get(), 2)
            headers = message.headers or {}
            seen.append(
                (message.data, headers.get("Status"), headers.get("Nats-Sequence"), headers.get("Nats-Num-Pending"))
            )
            if "Status" in headers:
                break
        await subscription.unsubscribe()
    return [tuple(str(v).replace(t.name, "S") for v in row) for row in seen]


async def republished(t: Talk) -> Seen:
    await t.log()
    seen: Seen = []

    async def keep(message: Any) -> None:
        headers = message.headers or {}
        seen.append(
            (message.data, headers["Nats-Sequence"], headers["Nats-Last-Sequence"], headers["Nats-Subject"][-1])
        )

    await t.nc.subscribe(f"live.{t.name}.a", cb=keep)
    await t.nc.flush()
    for subject, expect in (("a", 0), ("b", 0), ("a", 0), ("a", 1), ("b", 2), ("a", 3)):
        await t.put(subject, expect=expect)
    await asyncio.sleep(0.1)
    return seen


async def one_message_a_subject(t: Talk) -> Seen:
    await t.work_queue(max_msgs=2)
    await t.listen()
    seen = [await t.put("a", expect=0), await t.put("a", expect=0), await t.put("a")]
    message = await t.pull()
    await message.ack_sync()
    seen += [shown(message, t), await t.put("a", expect=0), await t.put("b"), await t.put("c")]
    return seen


async def pulls(t: Talk) -> Seen:
    await t.work_queue()
    await t.listen()
    seen = [shown(await t.pull(), t)]
    await t.ask("q", batch=1, expires=100_000_000)
    seen.append(shown(await t.next(), t))
    await t.ask("r", batch=1, expires=2_000_000_000)
    await t.put("a")
    seen.append(shown(await t.next(), t))
    await t.ask("s", batch=1, expires=2_000_000_000)
    await asyncio.sleep(0.05)
    await t.js.delete_consumer(t.name, "c")
    seen.append(shown(await t.next(), t))
    seen.append(shown(await t.pull(), t))
    return seen


async def redeliveries(t: Talk) -> Seen:
    await t.work_queue()
    await t.listen()
    await t.put("a")
    first = await t.pull()
    seen = [shown(first, t), shown(await t.pull(), t)]
    await asyncio.sleep(ACK_WAIT_S * 0.7)
    await first.in_progress()
    await asyncio.sleep(ACK_WAIT_S * 0.7)
    seen.append(shown(await t.pull(), t))  # renewed in time
    await asyncio.sleep(ACK_WAIT_S * 0.7)
    second = await t.pull()
    seen.append(shown(second, t))  # the ack wait is over
    await first.nak()  # an earlier holder's word counts as well
    await asyncio.sleep(0.05)
    third = await t.pull()
    seen.append(shown(third, t))
    await third.nak(delay=0.15)
    await asyncio.sleep(0.05)
    seen.append(shown(await t.pull(), t))
    await asyncio.sleep(0.2)
    fourth = await t.pull()
    seen.append(shown(fourth, t))
    await second.in_progress()
    await asyncio.sleep(ACK_WAIT_S * 0.7)
    seen.append(shown(await t.pull(), t))
    return seen


async def late_acks(t: Talk) -> Seen:
    await t.work_queue()
    await t.listen()
    await t.put("a")
    first = await t.pull()
    await asyncio.sleep(ACK_WAIT_S * 1.5)
    second = await t.pull()
    await first.ack_sync()
    seen = [shown(second, t), await t.put("a", expect=0)]  # deleted under its successor
    third = await t.pull()
    seen.append(shown(third, t))
    await second.ack_sync()  # an answer to what is gone
    await third.term()
    await asyncio.sleep(0.05)
    seen.append(await t.put("a", expect=0))
    return seen


async def purged(t: Talk) -> Seen:
    await t.work_queue()
    await t.listen()
    await t.put("a")
    await t.put("b")
    held = await t.pull()
    seen: Seen = [await t.js.purge_stream(t.name, subject=t.subject("a"))]
    await asyncio.sleep(ACK_WAIT_S * 1.5)
    seen.append(shown(await t.pull(), t))  # the other one, and not again what was purged
    await held.ack_sync()
    info = await t.js.stream_info(t.name, subjects_filter=">")
    seen.append({subject[-1]: count for subject, count in (info.state.subjects or {}).items()})
    seen.append((await t.js.consumer_info(t.name, "c")).num_pending)
    return seen


async def lists(t: Talk) -> Seen:
    await t.work_queue()
    await t.listen()
    for subject in ("a", "b", "c"):
        await t.put(subject)
    await t.pull()
    info = await t.js.consumer_info(t.name, "c")
    seen: Seen = [info.num_pending, info.num_ack_pending, info.config.ack_wait]
    query = msgspec.json.encode({"subjects_filter": ">", "offset": 1})
    page = msgspec.json.decode((await t.nc.request(f"$JS.API.STREAM.INFO.{t.name}", query, timeout=2)).data)
    seen += [page["total"], len(page["state"]["subjects"])]
    raw = await t.js.get_msg(t.name, subject=t.subject("b"), direct=True)
    seen.append((raw.seq, raw.data))
    for call in (
        t.js.get_msg(t.name, subject=t.subject("z"), direct=True),
        t.js.stream_info("NONE"),
        t.js.consumer_info(t.name, "none"),
    ):
        try:
            await call
        except APIError as error:
            seen.append((type(error).__name__, error.err_code))
    await t.js.add_consumer(
        t.name, ConsumerConfig(durable_name="c", ack_wait=7 * ACK_WAIT_S, filter_subject=f"{t.name}.>")
    )
    seen.append((await t.js.consumer_info(t.name, "c")).config.ack_wait)
    return seen


async def nobody_there(t: Talk) -> Seen:
    try:
        await t.nc.request(f"nobody.{t.name}", b"", timeout=1)
    except nats.errors.NoRespondersError:
        return ["no responders"]
    return ["an answer"]


SCENARIOS = [
    appends,
    reads,
    republished,
    one_message_a_subject,
    pulls,
    redeliveries,
    late_acks,
    purged,
    lists,
    nobody_there,
]


async def on_real_server(url: str, scenario: Callable[[Talk], Awaitable[Seen]], name: str) -> Seen:
    client = await nats.connect(url)
    try:
        return await scenario(Talk(client, name))
    finally:
        await client.close()


def on_simulated_server(scenario: Callable[[Talk], Awaitable[Seen]], name: str) -> Seen:
    world = World(1)
    server = Server(world)
    process = Process(world, "test")
    seen: list[Seen] = []

    async def main() -> None:
        options = {"reconnect_time_wait": 0.1, "pending_size": 1 << 20}
        client: SimClient = await connect(process, server, options)
        seen.append(await scenario(Talk(client, name)))

    with production_code_in(world, server):
        process.start(main())
        world.run(lambda: process.dead, 60.0)
        world.close()
    assert not world.failures
    return seen[0]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_simulated_server_answers_as_the_real_one(
    nats_url: str, scenario: Callable[[Talk], Awaitable[Seen]]
) -> None:
    name = f"S{uuid.uuid4().hex[:8]}"
    real = asyncio.run(on_real_server(nats_url, scenario, name))
    assert on_simulated_server(scenario, name) == real
