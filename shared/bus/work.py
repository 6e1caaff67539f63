"""Pulling work from a JetStream work queue: into free slots only, by weighted priority, renewed while worked on."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from shared.bus.errors import PublishFailed
from shared.protocol.streams import StreamSpec
from shared.protocol.subjects import PRIORITIES, Priority, encode_token

ACK_WAIT_S = 2.0
"""Work that its holder has not renewed for this long is given to another worker."""

RENEW_S = 0.5
ANSWER_S = 2.0
SILENT_PULLS = 5
"""After this many unanswered pulls in a row the consumers are looked at and made again."""

WEIGHTS: dict[Priority, int] = {"high": 8, "normal": 4, "low": 1}
"""Of thirteen pulls under full load, how many try each priority first: a lower one is slowed, never starved."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Delivery:
    """One message of a work queue in this worker's hands.

    Exactly one of `ack`, `drop`, `give_back`, `discard` ends it. A worker that lost the request calls none: an ack by
    an earlier holder would delete the message under its successor.
    """

    message: Msg
    priority: Priority
    num_delivered: int
    published_unix_s: float

    @property
    def data(self) -> bytes:
        return self.message.data

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.message.headers or {})

    async def drop(self) -> None:
        """Done with it, without waiting: for a request that ended elsewhere, whose message may be gone already."""
        await self._send(self.message.ack)

    async def ack(self) -> None:
        """Done with it. Waits for the server's word; after a lost ack the redelivery finds the log ended."""
        try:
            await self.message.ack_sync(timeout=ANSWER_S)
        except (nats.errors.Error, TimeoutError) as error:
            log.warning("ack_unconfirmed", subject=self.message.subject, error=str(error))

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Hand it to another worker, at once or after a delay."""
        await self._send(lambda: self.message.nak(delay=delay_s or None))

    async def discard(self) -> None:
        """Never deliver it again: nobody could read it."""
        await self._send(self.message.term)

    async def renew(self) -> None:
        """Tell the server that it is still worked on; restarts the ack wait."""
        await self._send(self.message.in_progress)

    async def _send(self, answer: Callable[[], Awaitable[None]]) -> None:
        """An answer that cannot be sent is not repeated: the message is delivered again by itself."""
        try:
            await answer()
        except (nats.errors.Error, OSError) as error:
            log.warning("answer_not_sent", subject=self.message.subject, error=str(error))


class WorkQueue:
    """Pulls deliveries of one model's work, over one durable consumer per priority.

    Args:
        streams: where the work of each priority lies; it may be one stream for all.
        filters: subject filter per priority; the consumers of one stream must not overlap.
        durable: name prefix of the durable consumers, the same for all workers of the stage.
    """

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        streams: Mapping[Priority, StreamSpec],
        durable: str,
        filters: Mapping[Priority, str],
    ) -> None:
        self._client = client
        self._js = js
        self._streams = streams
        self._name = ", ".join(sorted({stream.name for stream in streams.values()}))
        self._filters = filters
        self._durables: dict[Priority, str] = {p: f"{durable}-{p}" for p in filters}
        self._turns = itertools.cycle(_interleave(WEIGHTS))
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._pulls = itertools.count()
        self._ready: deque[Delivery] = deque()
        self._awaited: set[str] = set()
        self._finished: set[str] = set()
        self._consumer_gone = False
        self._wanted = 0
        self._arrived = asyncio.Event()
        self._silent = 0

    @staticmethod
    def durable_name(stage: str, model: str) -> str:
        """Consumer names allow no dots, equals signs are fine."""
        return f"{stage}-{encode_token(model)}"

    async def open(self) -> None:
        """Create the consumers where they are missing, give them our ack wait, and listen for what they deliver.

        Raises PublishFailed when NATS is away; it may then be called again.
        """
        try:
            await self._ensure_consumers()
            self._inbox = self._client.new_inbox()
            self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._on_message)
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"the queue of {self._name} cannot be opened: {error}") from error

    async def close(self) -> None:
        """Stop pulling. What was not handed out, or comes later, goes back to the queue; without NATS by itself."""
        self._wanted = 0
        while self._ready:
            await self._ready.popleft().give_back()
        if self._subscription is None or not self._client.is_connected:
            return
        try:
            await self._client.flush(timeout=int(ANSWER_S))
            await self._subscription.unsubscribe()
        except (nats.errors.Error, OSError, RuntimeError) as error:  # a dead uvloop transport raises the last
            log.warning("queue_not_closed", stream=self._name, error=str(error))

    async def _ensure_consumers(self) -> None:
        for priority, name in self._durables.items():
            config = ConsumerConfig(
                durable_name=name,
                filter_subject=self._filters[priority],
                deliver_policy=DeliverPolicy.ALL,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                max_ack_pending=1024,
                max_waiting=512,
            )
            try:
                info = await self._js.consumer_info(self._streams[priority].name, name)
                if info.config.ack_wait == ACK_WAIT_S:
                    continue
            except NotFoundError:
                pass
            await self._js.add_consumer(self._streams[priority].name, config)

    async def pull(self, free: int, wait_s: float) -> list[Delivery]:
        """Up to `free` deliveries. Waits at most `wait_s` when there are none.

        First it asks without waiting, in weighted order of priority; only when all are empty it lets a request linger
        on each. Deliveries beyond `free` are given back at once. Raises PublishFailed when NATS is away.
        """
        if free <= 0:
            return []
        self._wanted = free
        try:
            if self._consumer_gone:
                self._consumer_gone = False
                log.warning("consumers_gone", stream=self._name)
                await self._ensure_consumers()
            while len(self._ready) < free and await self._pull_one():
                pass
            if not self._ready and not self._consumer_gone:
                await self._linger(wait_s)
            if self._consumer_gone and not self._ready:
                raise PublishFailed(f"the consumers of {self._name} are gone and will be made again")
            return self._take(free)
        except (nats.errors.Error, APIError) as error:
            raise PublishFailed(f"cannot pull from {self._name}: {error}") from error
        finally:
            self._wanted = 0

    @property
    def priorities(self) -> list[Priority]:
        """The highest first."""
        return [priority for priority in PRIORITIES if priority in self._filters]

    async def pull_from(self, priority: Priority) -> Delivery | None:
        """One delivery of this priority, without waiting; what is delivered again comes before what is new.

        Raises PublishFailed when NATS is away.
        """
        self._wanted = 1
        try:
            await self._pull_from(priority)
            return self._ready.popleft() if self._ready else None
        except (nats.errors.Error, APIError) as error:
            raise PublishFailed(f"cannot pull from {self._name}: {error}") from error
        finally:
            self._wanted = 0

    async def _pull_one(self) -> bool:
        """One delivery from the first priority that has any, beginning with the one whose turn it is."""
        first = next(self._turns)
        for priority in (first, *(p for p in PRIORITIES if p != first and p in self._filters)):
            if await self._pull_from(priority):
                return True
        return False

    async def _pull_from(self, priority: Priority) -> bool:
        """One delivery of this priority, if there is any now."""
        before = len(self._ready)
        pull = await self._request(priority, {"batch": 1, "no_wait": True})
        if await self._wait_for(self._answered(pull, before), ANSWER_S):
            self._silent = 0
        else:
            await self._note_silence()
        self._forget(pull)
        return len(self._ready) > before

    def _answered(self, pull: str, before: int) -> Callable[[], bool]:
        return lambda: len(self._ready) > before or pull in self._finished

    async def _linger(self, wait_s: float) -> None:
        expires_ns = max(int(wait_s * 1e9), 1_000_000)
        pulls = [await self._request(p, {"batch": 1, "expires": expires_ns}) for p in self._filters]
        answered = await self._wait_for(
            lambda: bool(self._ready) or all(p in self._finished for p in pulls), wait_s + ANSWER_S
        )
        self._forget(*pulls)
        if answered:
            self._silent = 0
        else:
            await self._note_silence()

    async def _note_silence(self) -> None:
        """A consumer that a server lost answers nothing, so look and make it again."""
        self._silent += 1
        if self._silent >= SILENT_PULLS:
            self._silent = 0
            log.warning("consumers_silent", stream=self._name)
            await self._ensure_consumers()

    async def _request(self, priority: Priority, request: dict[str, object]) -> str:
        pull = str(next(self._pulls))
        self._awaited.add(pull)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._streams[priority].name}.{self._durables[priority]}"
        await self._client.publish(subject, json.dumps(request).encode(), reply=f"{self._inbox}.{pull}")
        return pull

    async def _on_message(self, message: Msg) -> None:
        status = (message.headers or {}).get("Status")
        if status is not None:
            if status != "100":  # 404 nothing there, 408 expired, 409 refused, 503 nobody answers for the consumer
                pull = message.subject.rpartition(".")[2]
                if pull in self._awaited:
                    self._finished.add(pull)
                description = (message.headers or {}).get("Description", "")
                if status == "503" or (status == "409" and description == "Consumer Deleted"):
                    self._consumer_gone = True
            self._arrived.set()
            return
        metadata = message.metadata
        durable_priority = metadata.consumer.rpartition("-")[2]
        delivery = Delivery(
            message=message,
            priority=next(p for p in PRIORITIES if p == durable_priority),
            num_delivered=metadata.num_delivered or 1,
            published_unix_s=metadata.timestamp.timestamp() if metadata.timestamp else time.time(),
        )
        if self._wanted <= len(self._ready):
            await delivery.give_back()
            return
        self._ready.append(delivery)
        self._arrived.set()

    def _forget(self, *pulls: str) -> None:
        """Answers to these pulls are not waited for any more."""
        self._awaited.difference_update(pulls)
        self._finished.difference_update(pulls)

    def _take(self, free: int) -> list[Delivery]:
        return [self._ready.popleft() for _ in range(min(free, len(self._ready)))]

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return False
        return True


def _interleave(weights: dict[Priority, int]) -> list[Priority]:
    """Smooth weighted round robin: spreads each priority's turns evenly over the cycle."""
    credit = dict.fromkeys(weights, 0)
    order: list[Priority] = []
    for _ in range(sum(weights.values())):
        for priority, weight in weights.items():
            credit[priority] += weight
        chosen = max(credit, key=lambda p: credit[p])
        credit[chosen] -= sum(weights.values())
        order.append(chosen)
    return order
