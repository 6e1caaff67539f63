"""Follows one request for one client: its logs, its deadlines, the client's going away, the gateway's stop.

All of them feed one mailbox, so that a token costs no task and no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import structlog

from services.gateway.deadlines import Deadlines, Overdue
from services.gateway.errors import SERVER, STOPPING_RETRY_S, ApiError, failure_of, overloaded
from shared.bus import LogEntry
from shared.protocol.records import Claimed, Ended, Tokens

MAILBOX: Final = 256
"""Entries held for a slow client; beyond it the logs' readers wait, and refill what they missed from history."""

ENDING_S: Final = 10.0
"""After the last deadline the terminal record must come within this time, or the log is out of reach."""

LONG_S: Final = 3600.0
"""The clock is looked at this often in any case."""

log = structlog.get_logger(__name__)


class ClientGone(Exception):
    """The client closed its connection, or takes nothing any more."""


ChoiceEntry = tuple[int, LogEntry]
"""Which choice, and a record of its log."""


@dataclass
class FollowedLog:
    """One choice's log as it is followed: what will be read, and what is known of what came before.

    `lost_unix_s`: when it counts as out of reach, set once its last deadline has passed.
    """

    entries: AsyncIterator[LogEntry]
    deadlines: Deadlines
    has_output: bool = False
    ended: Ended | None = None
    lost_unix_s: float | None = None

    def next_unix_s(self) -> float:
        return self.lost_unix_s or self.deadlines.next_unix_s()


class Follower:
    """`async with Follower(...) as follower: async for found in follower`: entries of all logs, each log's in order,
    and None after an idle time.

    Ends when every log has ended, or behind the record that tells of a failure. Raises ClientGone, or ApiError when the
    gateway stops or a log is out of reach.

    Args:
        logs: by choice, each with its reader, already subscribed; those that have ended before may be left out.
        on_overdue: called with a choice and the deadline that it has passed, and whether it has output yet; must have
            it ended, which then shows in its log.
        client_gone: waited for in a task of its own; returns when the client has disconnected.
        stopping: set when the gateway must let go of its clients.
        retry_after_s: what clients are told to wait when a log is out of reach, nobody knows for how long.
    """

    def __init__(
        self,
        logs: Mapping[int, FollowedLog],
        *,
        on_overdue: Callable[[int, Overdue, bool], None],
        client_gone: Callable[[], Awaitable[None]],
        stopping: asyncio.Event,
        idle_s: float,
        retry_after_s: int,
    ) -> None:
        self._logs = logs
        self._running = set(logs)
        self._on_overdue = on_overdue
        self._client_gone = client_gone
        self._stopping = stopping
        self._idle_s = idle_s
        self._retry_after_s = retry_after_s
        self._mailbox: asyncio.Queue[ChoiceEntry | None] = asyncio.Queue(MAILBOX)
        self._failure: Exception | None = None
        self._claimed = asyncio.Event()
        """Set when a claim has moved a deadline."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for name, work in (
            *((f"follow-log-{choice}", self._read(choice, followed)) for choice, followed in self._logs.items()),
            ("follow-client", self._watch_client()),
            ("follow-stop", self._watch_stop()),
            ("follow-clock", self._watch_clock()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._on_done)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[ChoiceEntry | None]:
        while self._running:
            found = await self._next()
            if self._failure is not None:
                raise self._failure
            yield found
            if found is not None and isinstance(ended := found[1].record, Ended):
                if failure_of(ended) is not None:
                    return
                self._running.discard(found[0])

    async def _next(self) -> ChoiceEntry | None:
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

    async def _read(self, choice: int, followed: FollowedLog) -> None:
        async for entry in followed.entries:
            match entry.record:
                case Claimed() as claim:
                    if followed.deadlines.claimed(claim):
                        self._claimed.set()
                case Tokens():
                    followed.has_output = True
                case Ended() as ended:
                    followed.ended = ended
            await self._mailbox.put((choice, entry))

    async def _watch_client(self) -> None:
        await self._client_gone()
        self._fail(ClientGone())

    async def _watch_stop(self) -> None:
        await self._stopping.wait()
        self._fail(
            overloaded(
                503,
                "gateway_stopping",
                "This gateway is stopping. The request goes on: follow it by its id, through another gateway or later.",
                STOPPING_RETRY_S,
            )
        )

    async def _watch_clock(self) -> None:
        """Have each choice ended that passes a deadline; its log must show that within `ENDING_S`."""
        while True:
            now = time.time()
            running = {choice: followed for choice, followed in self._logs.items() if followed.ended is None}
            for choice, followed in running.items():
                self._check(choice, followed, now)
            due_s = min((followed.next_unix_s() - now for followed in running.values()), default=LONG_S)
            self._claimed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(due_s, 0.0), LONG_S)):
                    await self._claimed.wait()

    def _check(self, choice: int, followed: FollowedLog, now: float) -> None:
        if followed.lost_unix_s is not None:
            if now >= followed.lost_unix_s:
                followed.lost_unix_s = math.inf
                text = "The request's log is out of reach; ask for it by its id."
                self._fail(overloaded(503, "log_unreachable", text, self._retry_after_s))
            return
        overdue = followed.deadlines.overdue(now)
        if overdue is None:
            return
        self._on_overdue(choice, overdue, followed.has_output)
        if overdue == "queue":
            followed.deadlines.queue_unix_s = None
        else:
            followed.lost_unix_s = now + ENDING_S
