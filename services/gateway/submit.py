"""Answers `hr.submit`: clients without HTTP get the same admission, and then follow the log on NATS themselves.

The gateways of one model are a queue group; each group hears every submission and answers those for its model. A model
that no live gateway serves is refused by all of them.

A message is an OpenAI request body in JSON: a chat request if it has `messages`, else a completion. Its NATS headers
are HTTP's: Authorization, Idempotency-Key, X-Headrace-Timeout-S, X-Headrace-Queue-Timeout-S, traceparent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from services.gateway.admission import Admission, Part, Ticket
from services.gateway.auth import Keyring
from services.gateway.errors import ApiError, internal, overloaded
from services.gateway.metrics import Observation
from services.gateway.openai_schema import parse_call, parse_json
from services.gateway.results import prompt_tokens_of
from services.gateway.settings import GatewaySettings
from services.gateway.terms import parse_terms
from shared.bus import Bus
from shared.protocol.records import Api
from shared.protocol.subjects import SUBMIT, encode_token, live_subject, log_subject
from shared.telemetry import extract_context
from shared.telemetry.metrics import GatewayMetrics

WORKERS: Final = 8
MAX_PENDING: Final = 256

log = structlog.get_logger(__name__)


class Submissions:
    """Takes requests from NATS clients, a bounded number at a time, as one of its model's queue group."""

    def __init__(
        self,
        bus: Bus,
        admission: Admission,
        keyring: Keyring,
        metrics: GatewayMetrics,
        model: str,
        settings: GatewaySettings,
        draining: asyncio.Event,
    ) -> None:
        self._bus = bus
        self._admission = admission
        self._keyring = keyring
        self._metrics = metrics
        self._model = model
        self._settings = settings
        self._draining = draining
        self._pending: asyncio.Queue[Msg] = asyncio.Queue(MAX_PENDING)

    async def run(self) -> None:
        """Until cancelled. Takes nothing new once the gateway drains."""
        subscription = await self._bus.client.subscribe(
            SUBMIT, queue=f"gateways-{encode_token(self._model)}", cb=self._on_message
        )
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(WORKERS):
                    group.create_task(self._work_off(), name=f"submissions-{n}")
                await self._draining.wait()
                await subscription.unsubscribe()
        finally:
            if not self._draining.is_set() and not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def _on_message(self, message: Msg) -> None:
        if not message.reply:
            log.warning("submission_without_reply_subject")
            return
        try:
            self._pending.put_nowait(message)
        except asyncio.QueueFull:
            text = "This gateway has too many submissions at once."
            await _reply(message, _refusal(overloaded(503, "gateway_overloaded", text, self._settings.retry_after_s)))

    async def _work_off(self) -> None:
        while True:
            message = await self._pending.get()
            answer = await self._answer(message)
            if answer is not None:
                await _reply(message, answer)

    async def _answer(self, message: Msg) -> dict[str, Any] | None:
        """None for a model that is another gateway's."""
        headers = {name.lower(): value for name, value in (message.headers or {}).items()}
        observation: Observation | None = None
        try:
            fields = parse_json(message.data)
            if self._is_anothers(fields.get("model")):
                return None
            tenant = self._keyring.tenant(headers.get("authorization"))
            terms = parse_terms(headers, self._settings)
            api: Api = "chat" if "messages" in fields else "completion"
            observation = Observation(self._metrics, api, self._model, extract_context(headers))
            call = parse_call(fields, api)
            observation.called(call)
            ticket = await self._admission.accept(call, tenant, terms, trace_headers=observation.trace_headers())
            observation.accepted(ticket, user=call.user)
            observation.close()
            return _acceptance(ticket)
        except ApiError as error:
            if observation is not None:
                observation.close(error)
            return _refusal(error)
        except Exception:
            log.exception("submission_failed")
            if observation is not None:
                observation.close(internal())
            return _refusal(internal())

    def _is_anothers(self, model: object) -> bool:
        return (
            isinstance(model, str)
            and model != self._model
            and any(gateway.model == model for gateway in self._bus.statuses.live("gateway"))
        )


def _acceptance(ticket: Ticket) -> dict[str, Any]:
    """The reply: the request, and where each choice is to be followed. The first choice stands at the top as well."""
    accepted = ticket.accepted
    return {
        **_place(ticket.parts[0]),
        "tenant": accepted.tenant,
        "model": accepted.model,
        "api": accepted.api,
        "prompt_tokens": prompt_tokens_of(part.accepted for part in ticket.parts),
        "created_unix_s": accepted.created_unix_s,
        "deadline_unix_s": accepted.deadline_unix_s,
        "joined": ticket.joined,
        "choices": [_place(part) for part in ticket.parts],
    }


def _place(part: Part) -> dict[str, Any]:
    names = (part.accepted.tenant, part.accepted.request_id)
    return {
        "request_id": part.accepted.request_id,
        "seed": part.accepted.seed,
        "live_subject": live_subject(*names),
        "log_subject": log_subject(*names),
        "log_seq": part.log_seq,
    }


def _refusal(error: ApiError) -> dict[str, Any]:
    body = error.body()
    body["error"]["status"] = error.status
    if "Retry-After" in error.headers:
        body["error"]["retry_after_s"] = int(error.headers["Retry-After"])
    return body


async def _reply(message: Msg, answer: dict[str, Any]) -> None:
    try:
        await message.respond(msgspec.json.encode(answer))
    except nats.errors.Error as error:
        log.warning("submission_not_answered", error=str(error))
