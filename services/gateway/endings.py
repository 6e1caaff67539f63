"""Ends requests from outside: cancelled, past a deadline, never queued. Keeps trying while NATS is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.js.errors import APIError

from services.gateway.cancellation import cancel_requested
from services.gateway.drafts import priority_of
from shared.bus import Bus, BusError, RequestUnknown
from shared.protocol.records import Accepted, Ended, ErrorInfo, FinishReason, Usage
from shared.protocol.streams import JOBS, REQUESTS
from shared.protocol.subjects import job_subject, request_subject

MAX_PENDING: Final = 4096
WORKERS: Final = 4
PATIENCE_S: Final = 60.0
RETRY_S: Final = 0.25
SETTLE_S: Final = 2.0
"""How long a refusal waits for the ends of what was begun for it, so that a quick retry finds no half of it."""

LATE_S: Final = 3.0
"""How long after NATS is back a record may still arrive that was sent before it went."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Ending:
    """A terminal record to append, unless the log has one by then.

    `may_come`: it is not known whether the log was begun; its first record may still be on its way.
    `unclaimed_only`: not once a worker has claimed the request.
    """

    accepted: Accepted
    reason: FinishReason
    error: ErrorInfo | None = None
    may_come: bool = False
    unclaimed_only: bool = False


class Endings:
    """A bounded queue of endings and the few workers that carry them out."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._worker = worker
        self._pending: asyncio.Queue[Ending] = asyncio.Queue(MAX_PENDING)

    def request(self, ending: Ending) -> None:
        """Have a request ended soon. When the queue is full the sweep will end it at its deadline."""
        try:
            self._pending.put_nowait(ending)
        except asyncio.QueueFull:
            log.warning("ending_dropped", request_id=ending.accepted.request_id, reason=ending.reason)

    def request_all(self, choices: Iterable[Accepted], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Have several choices of a request ended soon, for one reason."""
        for accepted in choices:
            self.request(Ending(accepted, reason, error))

    async def settle(self, endings: Iterable[Ending]) -> None:
        """Have requests ended now if that takes no longer than `SETTLE_S`, else soon."""
        waiting = list(endings)
        try:
            async with asyncio.timeout(SETTLE_S):
                while waiting:
                    await self.end(waiting[0])
                    waiting.pop(0)
        except (RequestUnknown, BusError, nats.errors.Error, TimeoutError, msgspec.DecodeError, ValueError) as error:
            log.warning("endings_put_off", count=len(waiting), error=str(error))
        for ending in waiting:
            self.request(ending)

    async def end(self, ending: Ending) -> bool:
        """Append the terminal record now and take the work out of the queues. False when the log had ended already, or
        is a worker's and was to be ended only if it was not.

        Raises RequestUnknown, or PublishFailed without NATS.
        """
        accepted = ending.accepted
        ended = Ended(
            epoch=0,  # the bus fills in what only the log knows
            reason=ending.reason,
            usage=Usage(prompt_tokens=accepted.prompt_tokens, completion_tokens=0),
            error=ending.error,
            by=self._worker,
        )
        names = (accepted.tenant, accepted.request_id)
        if ending.unclaimed_only:
            first = await self._bus.end_request(*names, ended, unclaimed_only=True)
            if not first and not isinstance((await self._bus.open_log(*names).last()).record, Ended):
                return False
        else:
            first = await self._bus.end_request(*names, ended)
        if first:
            code = ending.error.code if ending.error else None
            log.info("request_ended_from_outside", request_id=accepted.request_id, reason=ending.reason, code=code)
        await self.withdraw(accepted)
        return first

    async def withdraw(self, accepted: Accepted) -> None:
        """Delete the ended request's messages from the work queues.

        Without workers nobody would ack them, and they would fill the queue. A worker that holds one finds the terminal
        record at its next append; its ack then means nothing.
        """
        for stream, subject in _work_subjects(accepted):
            try:
                await self._bus.js.purge_stream(stream, subject=subject)
            except (nats.errors.Error, APIError, TimeoutError) as error:
                log.warning("work_not_withdrawn", request_id=accepted.request_id, stream=stream, error=str(error))

    async def finish(self, patience_s: float) -> None:
        """Returns when all that was requested so far is done, or after `patience_s`: the other gateways' sweeps end the
        rest at its deadline.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._pending.join()
        except TimeoutError:
            log.warning("endings_left", count=self._pending.qsize())

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for n in range(WORKERS):
                group.create_task(self._work_off(), name=f"endings-{n}")

    async def _work_off(self) -> None:
        while not cancel_requested():
            ending = await self._pending.get()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._insist(ending)
            except TimeoutError:
                log.error("request_not_ended", request_id=ending.accepted.request_id, reason=ending.reason)
            self._pending.task_done()

    async def _insist(self, ending: Ending) -> None:
        give_up_s = LATE_S if ending.may_come else 0.0
        while True:
            try:
                await self.end(ending)
                return
            except RequestUnknown:
                if give_up_s <= 0:
                    return
                give_up_s -= RETRY_S
                await asyncio.sleep(RETRY_S)
            except (msgspec.DecodeError, ValueError) as error:
                log.error("log_unreadable", request_id=ending.accepted.request_id, error=str(error))
                return
            except (BusError, nats.errors.Error) as error:
                log.warning("ending_put_off", request_id=ending.accepted.request_id, error=str(error))
                await asyncio.sleep(RETRY_S)


def _work_subjects(accepted: Accepted) -> tuple[tuple[str, str], ...]:
    """The streams and subjects where the request's work may lie."""
    priority = priority_of(accepted)
    names = (accepted.model, priority, accepted.tenant, accepted.request_id)
    return (REQUESTS[priority].name, request_subject(*names)), (JOBS.name, job_subject(*names))
