"""Answers `hr.submit`: clients without HTTP get the same admission, and then follow the log on NATS themselves.

A message is an OpenAI request body in JSON: a chat request if it has `messages`, else a completion. Its NATS headers
are HTTP's: Authorization, Idempotency-Key, X-Headrace-Timeout-S, X-Headrace-Queue-Timeout-S, traceparent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from nats.aio.msg import Msg

from services.gateway.admission import Admission, Part, Ticket
from services.gateway.auth import Keyring
from services.gateway.errors import ApiError, internal
from services.gateway.limits import Limits
from services.gateway.metrics import Observation
from services.gateway.openai_schema import parse_call, parse_json
from services.gateway.responder import Responder
from services.gateway.results import prompt_tokens_of
from services.gateway.settings import GatewaySettings
from services.gateway.terms import parse_terms
from shared.bus import Bus
from shared.protocol.records import Api
from shared.protocol.subjects import SUBMIT, live_subject, log_subject
from shared.telemetry import extract_context
from shared.telemetry.metrics import GatewayMetrics

WORKERS: Final = 8
MAX_PENDING: Final = 256


class Submissions:
    """Takes requests from NATS clients."""

    def __init__(
        self,
        bus: Bus,
        admission: Admission,
        limits: Limits,
        keyring: Keyring,
        metrics: GatewayMetrics,
        model: str,
        settings: GatewaySettings,
        draining: asyncio.Event,
    ) -> None:
        self._admission = admission
        self._keyring = keyring
        self._metrics = metrics
        self._model = model
        self._settings = settings
        self._responder = Responder(
            bus,
            SUBMIT,
            model,
            self._answer,
            draining,
            workers=WORKERS,
            max_pending=MAX_PENDING,
            retry_after_s=limits.backlog.retry_after_s,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self._responder.run()

    async def finish(self, patience_s: float) -> None:
        """See `Responder.finish`."""
        await self._responder.finish(patience_s)

    async def _answer(self, message: Msg) -> dict[str, Any] | None:
        headers = {name.lower(): value for name, value in (message.headers or {}).items()}
        fields = parse_json(message.data)
        if self._responder.is_anothers(fields.get("model")):
            return None
        tenant = self._keyring.tenant(headers.get("authorization"))
        api: Api = "chat" if "messages" in fields else "completion"
        observation = Observation(self._metrics, api, self._model, extract_context(headers))
        failure: ApiError | None = internal()
        try:
            call = parse_call(fields, api)
            terms = parse_terms(headers, call, self._settings)
            observation.called(call)
            ticket = await self._admission.accept(call, tenant, terms, trace_headers=observation.trace_headers())
            observation.accepted(ticket, user=call.user)
            failure = None
        except ApiError as error:
            failure = error
            raise
        finally:
            observation.close(failure)
        return acceptance(ticket)


def acceptance(ticket: Ticket) -> dict[str, Any]:
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
        "queue_deadline_unix_s": accepted.queue_deadline_unix_s,
        "compute_timeout_s": accepted.compute_timeout_s,
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
