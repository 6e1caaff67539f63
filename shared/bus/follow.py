"""Following a request's log as it grows: live records, history, and no gap between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.errors import BusError, RequestUnknown
from shared.bus.log import LogEntry, RequestLog
from shared.protocol.records import Ended, decode_record
from shared.protocol.subjects import live_subject

SILENCE_S = 1.0
"""After this long without a record the reader checks the tail: a lost last message shows no gap."""

LIVE_BUFFER = 1024
"""Live records held for a slow reader; what is dropped beyond that is read from history."""

log = structlog.get_logger(__name__)


class LogReader:
    """Yields each record of a log once, in order, and ends after the terminal one.

    It follows the stream's republished subject, whose messages name their predecessor, so that a gap is seen at once
    and filled by direct get. Use as an async context manager: it is subscribed when the block begins, so nothing
    that is appended afterwards can be missed.
    """

    def __init__(self, client: Client, tenant: str, request_id: str, after_seq: int = 0) -> None:
        self._client = client
        self._log = RequestLog(client, tenant, request_id)
        self._subject = live_subject(tenant, request_id)
        self._last_seq = after_seq
        self._live: deque[tuple[int, int, LogEntry]] = deque(maxlen=LIVE_BUFFER)
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> LogReader:
        self._subscription = await self._client.subscribe(self._subject, cb=self._on_live)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def _on_live(self, message: Msg) -> None:
        headers = message.headers or {}
        seq, previous = int(headers["Nats-Sequence"]), int(headers.get("Nats-Last-Sequence", 0))
        self._live.append((seq, previous, LogEntry(seq, decode_record(message.data))))
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[LogEntry]:
        for entry in await self._history():
            yield entry
            if isinstance(entry.record, Ended):
                return
        while True:
            for entry in await self._next():
                yield entry
                if isinstance(entry.record, Ended):
                    return

    async def _next(self) -> list[LogEntry]:
        """The next records in order; empty after a silence that hid nothing."""
        if not self._live:
            self._arrived.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._arrived.wait()
            except TimeoutError:
                return await self._history()
        seq, previous, entry = self._live.popleft()
        if seq <= self._last_seq:
            return []
        if previous == self._last_seq:
            self._last_seq = seq
            return [entry]
        return await self._history()

    async def _history(self) -> list[LogEntry]:
        """What the stream holds behind the last record seen. Empty while NATS is away: the next silence asks again."""
        try:
            entries = await self._log.read(self._last_seq)
        except RequestUnknown:
            return []
        except BusError as error:
            log.warning("log_unreachable", request_id=self._log.request_id, error=str(error))
            return []
        if entries:
            self._last_seq = entries[-1].seq
        return entries
