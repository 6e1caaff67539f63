"""Who follows a request whose client may come back, at any gateway: it outlives the last one by a grace period only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from services.gateway.cancellation import cancel_requested
from services.gateway.endings import Endings
from shared.bus import Bus, BusError, RequestUnknown
from shared.protocol.records import Accepted, Ended
from shared.protocol.subjects import attached_subject

MAX_GRACES: Final = 4096
ANSWER_S: Final = 2.0

log = structlog.get_logger(__name__)


class Attachments:
    """Makes this gateway's followers known to the others, and cancels a request that nobody has come back to.

    `run` must be running for `left` to have an effect; a gateway that stops or dies cancels nothing.
    """

    def __init__(self, bus: Bus, endings: Endings, grace_s: float) -> None:
        self._bus = bus
        self._endings = endings
        self._grace_s = grace_s
        self._left: asyncio.Queue[tuple[float, Sequence[Accepted]]] = asyncio.Queue(MAX_GRACES)

    @asynccontextmanager
    async def attach(self, accepted: Accepted) -> AsyncIterator[None]:
        """For the time that a client follows the request. Nothing to do for one that ends with its client."""
        if not accepted.background:
            yield
            return

        async def answer(question: Msg) -> None:
            await question.respond(b"")

        subject = attached_subject(accepted.tenant, accepted.request_id)
        subscription = await self._bus.client.subscribe(subject, cb=answer)
        try:
            yield
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def anyone(self, accepted: Accepted) -> bool:
        """Whether any gateway has a client on this request. Doubt counts as yes."""
        subject = attached_subject(accepted.tenant, accepted.request_id)
        try:
            await self._bus.client.request(subject, b"", timeout=ANSWER_S)
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.Error, TimeoutError):
            return True
        return True

    def left(self, choices: Sequence[Accepted]) -> None:
        """The client has gone: cancel all of the request's choices, the first of which carries its id.

        At once, or after the grace period when the client said that it might come back.
        """
        if not choices[0].background:
            self._endings.request_all(choices, "cancelled")
            return
        self._begin_grace(choices)

    async def run(self) -> None:
        """Until cancelled. The period is the same for all, so the queue is in order of time."""
        loop = asyncio.get_running_loop()
        while not cancel_requested():
            due_s, choices = await self._left.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not await self.anyone(choices[0]):
                self._endings.request_all(choices, "cancelled")
            elif await self._goes_on(choices):
                self._begin_grace(choices)  # whoever came back with GET may leave as well, and tells nobody

    def _begin_grace(self, choices: Sequence[Accepted]) -> None:
        due_s = asyncio.get_running_loop().time() + self._grace_s
        try:
            self._left.put_nowait((due_s, choices))
        except asyncio.QueueFull:
            log.warning("grace_not_kept", request_id=choices[0].request_id)
            self._endings.request_all(choices, "cancelled")

    async def _goes_on(self, choices: Sequence[Accepted]) -> bool:
        """Whether any of a request's logs is unfinished. Doubt counts as yes."""
        for accepted in choices:
            try:
                last = await self._bus.open_log(accepted.tenant, accepted.request_id).last()
            except RequestUnknown:
                continue
            except (BusError, msgspec.DecodeError):
                return True
            if not isinstance(last.record, Ended):
                return True
        return False
