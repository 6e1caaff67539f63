"""Watches a stack over NATS by the public protocol: every log as it grows, every instance's status, what is queued.

It shares no reading code with the product: what it finds must not depend on what it checks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError

from loadgen.chaos.errors import StackUnusable
from shared.protocol.records import Accepted, Claimed, Ended, Record, Tokens, decode_record
from shared.protocol.status import InstanceStatus, decode_status
from shared.protocol.streams import LOG
from shared.protocol.subjects import STATUS_PING, Stage, decode_token, log_subject

_ASK_S: Final = 2.0
_ASK_EVERY_S: Final = 0.25
_CONNECT_S: Final = 20.0
_FRESH_S: Final = 2.5
_GONE: Final = (nats.errors.Error, APIError, TimeoutError, ConnectionError)


class Entry(msgspec.Struct, frozen=True):
    """A stored record and its sequence in the stream."""

    seq: int
    record: Record


@dataclass
class Seen:
    """What the live records told of one log. A hint for aiming; verification reads the log itself."""

    accepted: Accepted | None = None
    claims: list[Claimed] = field(default_factory=list)
    claimed_s: float = 0.0
    tokens: int = 0
    tokens_of_claim: int = 0
    token_s: float = 0.0
    ended: bool = False

    @property
    def holder(self) -> str:
        """The worker that claimed it last; empty before the first and after the end."""
        return self.claims[-1].worker if self.claims and not self.ended else ""

    @property
    def stage(self) -> str:
        return self.claims[-1].stage if self.claims and not self.ended else ""

    def apply(self, record: Record, now_s: float) -> None:
        match record:
            case Accepted():
                self.accepted = record
            case Claimed():
                self.claims.append(record)
                self.claimed_s, self.tokens_of_claim = now_s, 0
            case Tokens():
                self.tokens += len(record.ids)
                self.tokens_of_claim += len(record.ids)
                self.token_s = now_s
            case Ended():
                self.ended = True


@dataclass(frozen=True)
class Heard:
    status: InstanceStatus
    at_s: float


class Observer:
    """One NATS connection that only looks. Use as an async context manager. Times are `time.monotonic`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client()
        self._changed = asyncio.Event()
        self.seen: dict[str, Seen] = {}
        self.heard: dict[str, Heard] = {}

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(_CONNECT_S):
                self._client = await connect(self._url, "chaos-observer")
                await self._client.subscribe("hr.live.>", cb=self._on_live)
                await self._client.subscribe("hr.status.>", cb=self._on_status)
        except TimeoutError as error:
            raise StackUnusable(f"no NATS server answers at {self._url}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def _on_live(self, message: Msg) -> None:
        request_id = decode_token(message.subject.rpartition(".")[2])
        self.seen.setdefault(request_id, Seen()).apply(decode_record(message.data), time.monotonic())
        self._changed.set()

    async def _on_status(self, message: Msg) -> None:
        status = decode_status(message.data)
        self.heard[status.instance] = Heard(status, time.monotonic())
        self._changed.set()

    def forget(self) -> None:
        """What is known of logs; those of requests that are over are of no more use."""
        self.seen.clear()

    async def change(self, within_s: float) -> None:
        """Return when something was heard, or after `within_s`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def ping(self) -> None:
        """Have every instance say how it is; the answers come within milliseconds. Silent while NATS is away."""
        if self._client.is_connected:
            try:
                await self._client.publish(STATUS_PING, b"")
            except nats.errors.Error:
                return

    def statuses(self, stage: Stage | None = None) -> list[InstanceStatus]:
        """Of the instances that were heard lately."""
        oldest = time.monotonic() - _FRESH_S
        return [
            heard.status
            for heard in self.heard.values()
            if heard.at_s >= oldest and stage in (None, heard.status.stage)
        ]

    def status(self, instance: str) -> InstanceStatus | None:
        return next((status for status in self.statuses() if status.instance == instance), None)

    async def until(self, reached: Callable[[], bool], within_s: float) -> bool:
        """Look again whenever something was heard, asking four times a second."""
        give_up, ask_s = time.monotonic() + within_s, 0.0
        while not reached():
            now = time.monotonic()
            if now > give_up:
                return False
            if now >= ask_s:  # and not whenever something was heard: the answers would lead to more questions
                ask_s = now + _ASK_EVERY_S
                await self.ping()
            await self.change(ask_s - now)
        return True

    async def read_log(self, tenant: str, request_id: str, after_seq: int = 0) -> list[Entry]:
        """The stored records behind a sequence. Raises StackUnusable when NATS does not answer for long."""
        return await read_log(self._client, log_subject(tenant, request_id), after_seq)

    async def queued(self) -> dict[str, int]:
        """Messages in each work-queue stream: waiting, or delivered and not acked. Raises StackUnusable."""
        streams = await self._streams()
        return {
            info["config"]["name"]: int(info["state"]["messages"])
            for info in streams
            if info["config"]["retention"] == "workqueue"
        }

    async def dead_letters(self) -> int:
        """Messages in streams of dead letters. Raises StackUnusable."""
        streams = await self._streams()
        return sum(int(i["state"]["messages"]) for i in streams if any("dead" in s for s in i["config"]["subjects"]))

    async def _streams(self) -> list[dict[str, Any]]:
        try:
            reply = await self._client.request("$JS.API.STREAM.LIST", b"", timeout=_ASK_S)
            streams: list[dict[str, Any]] = msgspec.json.decode(reply.data)["streams"]
        except (*_GONE, KeyError) as error:
            raise StackUnusable(f"JetStream does not list its streams: {error!r}") from error
        return streams


async def connect(url: str, name: str) -> Client:
    """A NATS connection that comes back by itself for ever."""

    async def quiet(_: Exception) -> None:
        return

    while True:
        try:
            return await nats.connect(
                url,
                name=name,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,
                error_cb=quiet,
            )
        except (OSError, nats.errors.Error):
            await asyncio.sleep(0.25)


async def read_log(client: Client, subject: str, after_seq: int, patience_s: float = 30.0) -> list[Entry]:
    """One direct get after the other until there is no next record. Raises StackUnusable after `patience_s`."""
    entries: list[Entry] = []
    give_up = time.monotonic() + patience_s
    while True:
        last = entries[-1].seq if entries else after_seq
        query = msgspec.json.encode({"seq": last + 1, "next_by_subj": subject})
        try:
            reply = await client.request(f"$JS.API.DIRECT.GET.{LOG.name}", query, timeout=_ASK_S)
        except _GONE as error:
            if time.monotonic() > give_up:
                raise StackUnusable(f"the log {subject} cannot be read: {error!r}") from error
            await asyncio.sleep(0.1)
            continue
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            return entries
        entries.append(Entry(int(headers["Nats-Sequence"]), decode_record(reply.data)))


def held_by(seen: dict[str, Seen], workers: Iterable[str]) -> list[str]:
    """Requests whose last claim is of one of these workers and that have not ended."""
    names = set(workers)
    return [request_id for request_id, log in seen.items() if log.holder in names]
