"""A NATS client with the face and the habits of nats-py: buffers while it is away, reconnects, calls back in order."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from tests.simulation.jetstream import Headers
from tests.simulation.network import MAX_PAYLOAD, Frame, Link, Server
from tests.simulation.world import Process, describe

Callback = Callable[[Msg], Awaitable[None]]
Told = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Version:
    major: int = 2
    minor: int = 11


class SimSubscription:
    """Messages are given to the callback one after the other."""

    def __init__(self, client: SimClient, sid: int, subject: str, queue: str, callback: Callback) -> None:
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self._client = client
        self._callback = callback
        self._pending: deque[Msg] = deque()
        self._pump: asyncio.Task[None] | None = None

    async def unsubscribe(self) -> None:
        if self._client.is_closed:
            raise nats.errors.ConnectionClosedError
        self._client.forget(self)
        self._pending.clear()
        if self._pump is not None:
            self._pump.cancel()

    def take(self, message: Msg) -> None:
        self._pending.append(message)
        if self._pump is None or self._pump.done():
            self._pump = self._client.process.loop.create_task(self._work_off(), name=f"sub-{self.subject}")

    async def _work_off(self) -> None:
        while self._pending:
            message = self._pending.popleft()
            try:
                await self._callback(message)
            except Exception as error:  # nats-py tells its error callback and goes on
                self._client.process.world.fail(f"{self._client.name}: callback of {self.subject}: {describe(error)}")


class SimClient:
    """One process's connection. Made by `connect`, which stands in for `nats.connect`."""

    def __init__(
        self, process: Process, server: Server, *, reconnect_wait_s: float, pending_bytes: int, **told: Told
    ) -> None:
        self.process = process
        self.name = process.name
        self.is_closed = False
        self.max_payload = MAX_PAYLOAD
        self.connected_server_version = Version()
        self._server = server
        self._reconnect_wait_s = reconnect_wait_s
        self._pending_bytes = pending_bytes
        self._told = told
        self._link: Link | None = None
        self._subscriptions: dict[int, SimSubscription] = {}
        self._sids = itertools.count(1)
        self._tokens = itertools.count()
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._answers_to = ""
        self._outbox: list[Frame] = []
        self._outbox_bytes = 0
        self._flushing = False
        self._pongs: deque[asyncio.Future[None]] = deque()
        process.on_kill.append(self._killed)

    # What the bus uses

    @property
    def is_connected(self) -> bool:
        return self._link is not None and not self.is_closed

    @property
    def is_reconnecting(self) -> bool:
        return self._link is None and not self.is_closed

    def jetstream(self, **options: Any) -> JetStreamContext:
        return JetStreamContext(self, **options)  # type: ignore[arg-type]

    def new_inbox(self) -> str:
        return f"_INBOX.read.{self.name}.{next(self._tokens)}"

    async def subscribe(self, subject: str, queue: str = "", cb: Callback | None = None) -> SimSubscription:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        assert cb is not None, "only callbacks are simulated"
        subscription = SimSubscription(self, next(self._sids), subject, queue, cb)
        self._subscriptions[subscription.sid] = subscription
        if self._link is not None:  # otherwise reconnecting does it
            self._write(Frame("SUB", subject, subscription.sid, queue=queue))
        return subscription

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: Headers | None = None
    ) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self._link is None and self._outbox_bytes + len(payload) > self._pending_bytes:
            raise nats.errors.OutboundBufferLimitError
        if len(payload) > self.max_payload:
            raise nats.errors.MaxPayloadError
        self._write(Frame("PUB", subject, 0, payload, reply, headers))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py's signature
        headers: Headers | None = None,
    ) -> Msg:
        if not self._answers_to:
            self._answers_to = f"_INBOX.answer.{self.name}"
            await self.subscribe(f"{self._answers_to}.*", cb=self._answered)
        inbox = f"{self._answers_to}.{next(self._tokens)}"
        future: asyncio.Future[Msg] = self.process.loop.create_future()
        self._answers[inbox] = future
        try:
            await self.publish(subject, payload, reply=inbox, headers=headers)
            async with asyncio.timeout(timeout):
                message = await future
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            self._answers.pop(inbox, None)
        if message.headers and message.headers.get("Status") == "503":
            raise nats.errors.NoRespondersError
        return message

    async def flush(self, timeout: float = 10) -> None:  # noqa: ASYNC109
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        pong = self.process.loop.create_future()
        self._pongs.append(pong)
        self._write(Frame("PING"))
        try:
            async with asyncio.timeout(timeout):
                await pong
        except TimeoutError:
            raise nats.errors.TimeoutError from None

    async def close(self) -> None:
        if self.is_closed:
            return
        self._flush()
        self.is_closed = True
        link, self._link = self._link, None
        if link is not None:
            link.close()
        await self._tell("closed_cb")

    # What the connection tells

    def ponged(self) -> None:
        if not self.process.dead and self._pongs:
            with self.process.entered():
                pong = self._pongs.popleft()
                if not pong.done():
                    pong.set_result(None)

    def arrived(self, sid: int, subject: str, data: bytes, headers: Headers | None, reply: str) -> None:
        if self.process.dead:
            return
        subscription = self._subscriptions.get(sid)
        if subscription is not None:
            message = Msg(self, subject, reply, data, dict(headers) if headers else None)  # type: ignore[arg-type]
            before = self.process.world.enter(self.process)
            subscription.take(message)
            self.process.world.enter(before)

    def disconnected(self, link: Link) -> None:
        if self._link is not link or self.process.dead:
            return
        self._link = None
        with self.process.entered():
            self.process.loop.create_task(self._reconnect(), name="reconnect")

    async def _reconnect(self) -> None:
        await self._tell("disconnected_cb")
        while True:
            await asyncio.sleep(self._reconnect_wait_s)
            if self.is_closed:
                return
            if self._server.up:
                await asyncio.sleep(self.process.world.random.uniform(0.0005, 0.003))
                if self._server.up:
                    break
        self.link_up()
        await self._tell("reconnected_cb")

    def link_up(self) -> None:
        self._link = self._server.connect(self)
        for subscription in self._subscriptions.values():
            self._link.send(Frame("SUB", subscription.subject, subscription.sid, queue=subscription.queue))
        self._flush()

    # Inside

    async def _answered(self, message: Msg) -> None:
        future = self._answers.pop(message.subject, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def _tell(self, whom: str) -> None:
        if whom in self._told:
            await self._told[whom]()

    def forget(self, subscription: SimSubscription) -> None:
        if self._subscriptions.pop(subscription.sid, None) is not None and self._link is not None:
            self._write(Frame("UNSUB", sid=subscription.sid))

    def _write(self, frame: Frame) -> None:
        """Written in the next turn of the loop, as by nats-py's flusher: a process may be stopped or die before."""
        self._outbox.append(frame)
        self._outbox_bytes += len(frame.data)
        if not self._flushing:
            self._flushing = True
            self.process.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._link is None or self.is_closed:
            return
        for frame in self._outbox:
            self._link.send(frame)
        self._outbox.clear()
        self._outbox_bytes = 0

    def _killed(self) -> None:
        link, self._link = self._link, None
        self.is_closed = True
        if link is not None:
            link.close()


async def connect(process: Process, server: Server, options: dict[str, Any]) -> SimClient:
    """`nats.connect` for code that runs as `process`. Raises NoServersError while the server is down."""
    await asyncio.sleep(process.world.random.uniform(0.0005, 0.003))
    if not server.up:
        raise nats.errors.NoServersError
    client = SimClient(
        process,
        server,
        reconnect_wait_s=options["reconnect_time_wait"],
        pending_bytes=options["pending_size"],
        **{name: told for name, told in options.items() if name.endswith("_cb") and told is not None},
    )
    client.link_up()
    return client
