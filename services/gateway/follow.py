"""Follows one request for one client: its log, its deadlines, the client's going away, the gateway's stop.

All of them feed one mailbox, so that a token costs no task and no timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Self

import structlog

from services.gateway.deadlines import Deadlines, Overdue
from services.gateway.errors import SERVER, ApiError
from shared.bus import LogEntry
from shared.protocol.records import Claimed, Ended, Tokens

MAILBOX: Final = 256
"""Entries held for a slow client; beyond it the log's reader waits, and refills what it missed from history."""

ENDING_S: Final = 10.0
"""After the last deadline the terminal record must come within this time, or the log is out of reach."""

log = structlog.get_logger(__name__)


class ClientGone(Exception):
    """The client closed its connection, or takes nothing any more."""


class Follower:
    """`async with Follower(...) as follower: async for entry in follower`: log entries, and None after an idle time.

    Ends after the terminal record. Raises ClientGone, or ApiError when the gateway stops or the log is out of reach.

    Args:
        entries: the log's reader, already subscribed.
        has_output: whether the log held tokens before the entries that will be read.
        on_overdue: called once per deadline that passes, with whether there is output yet; must have the request ended,
            which then shows in the log.
        client_gone: waited for in a task of its own; returns when the client has disconnected.
        stopping: set when the gateway must let go of its clients.
    """

    def __init__(
        self,
        entries: AsyncIterator[LogEntry],
        deadlines: Deadlines,
        *,
        has_output: bool,
        on_overdue: Callable[[Overdue, bool], None],
        client_gone: Callable[[], Awaitable[None]],
        stopping: asyncio.Event,
        idle_s: float,
    ) -> None:
        self._entries = entries
        self._deadlines = deadlines
        self._has_output = has_output
        self._on_overdue = on_overdue
        self._client_gone = client_gone
        self._stopping = stopping
        self._idle_s = idle_s
        self._mailbox: asyncio.Queue[LogEntry | None] = asyncio.Queue(MAILBOX)
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for name, work in (
            ("follow-log", self._read),
            ("follow-client", self._watch_client),
            ("follow-stop", self._watch_stop),
            ("follow-clock", self._watch_clock),
        ):
            task = asyncio.create_task(work(), name=name)
            task.add_done_callback(self._on_done)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[LogEntry | None]:
        while True:
            entry = await self._next()
            if self._failure is not None:
                raise self._failure
            yield entry
            if entry is not None and isinstance(entry.record, Ended):
                return

    async def _next(self) -> LogEntry | None:
        if not self._mailbox.empty():
            return self._mailbox.get_nowait()
        try:
            async with asyncio.timeout(self._idle_s):
                return await self._mailbox.get()
        except TimeoutError:
            return None

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        if not self._mailbox.full():
            self._mailbox.put_nowait(None)  # wakes the reader; a full mailbox has no sleeping reader

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """A part that broke must not leave the client waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("follower_failed", part=task.get_name(), exc_info=error)
            self._fail(ApiError(500, "The request's log cannot be read.", type=SERVER, code="log_unreadable"))

    async def _read(self) -> None:
        async for entry in self._entries:
            if isinstance(entry.record, Claimed):
                self._deadlines.queue_unix_s = None
            elif isinstance(entry.record, Tokens):
                self._has_output = True
            await self._mailbox.put(entry)

    async def _watch_client(self) -> None:
        await self._client_gone()
        self._fail(ClientGone())

    async def _watch_stop(self) -> None:
        await self._stopping.wait()
        self._fail(
            ApiError(
                503,
                "This gateway is stopping. The request goes on: follow it by its id, through another gateway or later.",
                type=SERVER,
                code="gateway_stopping",
            )
        )

    async def _watch_clock(self) -> None:
        while (overdue := self._deadlines.overdue(time.time())) != "total":
            if overdue == "queue":
                self._on_overdue("queue", self._has_output)
                self._deadlines.queue_unix_s = None
            await asyncio.sleep(max(0.0, self._deadlines.next_unix_s() - time.time()))
        self._on_overdue("total", self._has_output)
        await asyncio.sleep(ENDING_S)
        self._fail(
            ApiError(
                503, "The request's log is out of reach; ask for it by its id.", type=SERVER, code="log_unreachable"
            )
        )
