"""Answers requests that come over NATS: a bounded number at a time, as one of its model's queue group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from services.gateway.cancellation import cancel_requested
from services.gateway.errors import STOPPING_RETRY_S, ApiError, internal, overloaded
from shared.bus import Bus
from shared.protocol.subjects import encode_token

log = structlog.get_logger(__name__)

Answer = Callable[[Msg], Awaitable[dict[str, Any] | None]]


class Responder:
    """The gateways of one model are a queue group; each group hears every message and answers those for its model. A
    model that no live gateway serves is refused by all of them.

    Args:
        answer: the reply to one message; None for a model that is another gateway's. Raises ApiError.
        draining: nothing new is taken once it is set.
        retry_after_s: told to those that come when too many wait already.
    """

    def __init__(
        self,
        bus: Bus,
        subject: str,
        model: str,
        answer: Answer,
        draining: asyncio.Event,
        *,
        workers: int,
        max_pending: int,
        retry_after_s: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._model = model
        self._answer = answer
        self._draining = draining
        self._workers = workers
        self._retry_after_s = retry_after_s
        self._pending: asyncio.Queue[Msg] = asyncio.Queue(max_pending)
        self._took_all = asyncio.Event()
        """Set when the gateway drains and all that NATS had sent to it is in `pending` or answered."""

    async def run(self) -> None:
        """Until cancelled. Takes nothing new once the gateway drains, and answers what it has taken."""
        subscription = await self._bus.client.subscribe(
            self._subject, queue=f"gateways-{encode_token(self._model)}", cb=self._on_message
        )
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(self._workers):
                    group.create_task(self._work_off(), name=f"{self._subject}-{n}")
                await self._draining.wait()
                try:
                    await subscription.drain()  # type: ignore[no-untyped-call]
                except (nats.errors.Error, TimeoutError) as error:
                    log.warning("subscription_not_drained", subject=self._subject, error=str(error))
                self._took_all.set()
        finally:
            if not self._draining.is_set() and not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def finish(self, patience_s: float) -> None:
        """While it drains: returns when all that was taken is answered. What is left after `patience_s` is refused."""
        try:
            async with asyncio.timeout(patience_s):
                await self._took_all.wait()
                await self._pending.join()
        except TimeoutError:
            log.warning("messages_refused", subject=self._subject, count=self._pending.qsize())
        text = "This gateway is stopping; try again."
        answer = refusal(overloaded(503, "gateway_stopping", text, STOPPING_RETRY_S))
        while not self._pending.empty():
            await _reply(self._pending.get_nowait(), answer)

    def is_anothers(self, model: object) -> bool:
        """Whether a live gateway of another model will answer."""
        return (
            isinstance(model, str)
            and model != self._model
            and any(gateway.model == model for gateway in self._bus.statuses.live("gateway"))
        )

    async def _on_message(self, message: Msg) -> None:
        if not message.reply:
            log.warning("message_without_reply_subject", subject=message.subject)
            return
        try:
            self._pending.put_nowait(message)
        except asyncio.QueueFull:
            text = "This gateway has too many submissions at once."
            await _reply(message, refusal(overloaded(503, "gateway_overloaded", text, self._retry_after_s())))

    async def _work_off(self) -> None:
        while not cancel_requested():
            message = await self._pending.get()
            try:
                answer = await self._answer(message)
            except ApiError as error:
                answer = refusal(error)
            except Exception:
                log.exception("message_not_answered", subject=message.subject)
                answer = refusal(internal())
            if answer is not None:
                await _reply(message, answer)
            self._pending.task_done()


def refusal(error: ApiError) -> dict[str, Any]:
    body = error.body()
    body["error"]["status"] = error.status
    if "Retry-After" in error.headers:
        body["error"]["retry_after_s"] = int(error.headers["Retry-After"])
    return body


async def _reply(message: Msg, answer: dict[str, Any]) -> None:
    try:
        await message.respond(msgspec.json.encode(answer))
    except nats.errors.Error as error:
        log.warning("message_not_replied", error=str(error))
