"""Answers `hr.ctl.retry`: the work of a dead letter is queued again, as a new request of the same tenant.

A message is `{"seq": N}`, the letter's sequence in the dead-letter stream; see docs/protocol.md.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from services.gateway.admission import Admission
from services.gateway.call import GenerationCall, TokenIds
from services.gateway.errors import ApiError, invalid
from services.gateway.limits import Limits
from services.gateway.openai_schema import parse_json
from services.gateway.responder import Responder
from services.gateway.settings import GatewaySettings
from services.gateway.submit import acceptance
from services.gateway.terms import Terms
from shared.bus import Bus
from shared.protocol.jobs import GenerationRequest, decode_request
from shared.protocol.streams import DEAD
from shared.protocol.subjects import RETRY
from shared.telemetry import inject_headers

MAX_PENDING: Final = 32
MAX_SEQ: Final = 2**63 - 1

log = structlog.get_logger(__name__)


class DeadLetters:
    """Takes dead letters back on, one at a time."""

    def __init__(
        self,
        bus: Bus,
        admission: Admission,
        limits: Limits,
        model: str,
        settings: GatewaySettings,
        draining: asyncio.Event,
    ) -> None:
        self._bus = bus
        self._admission = admission
        self._limits = limits
        self._settings = settings
        self._responder = Responder(
            bus,
            RETRY,
            model,
            self._answer,
            draining,
            workers=1,
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
        seq = parse_json(message.data).get("seq")
        if type(seq) is not int or not 0 < seq <= MAX_SEQ:
            raise invalid("'seq' must be the sequence of a dead letter.", "seq", "invalid_value")
        letter = await self._read(seq)
        try:
            request = decode_request(letter.data or b"")
        except msgspec.DecodeError as error:
            text = f"The dead letter {seq} is no request that could be read."
            raise ApiError(422, text, param="seq", code="dead_letter_unreadable") from error
        if self._responder.is_anothers(request.model):
            return None
        # The id comes from the letter, so that of two who retry it at once the second finds the first one's request.
        key = f"\0dead letter {seq} of {letter.time}"
        terms = Terms(
            min(max(request.queue_deadline_unix_s - request.created_unix_s, 1.0), self._settings.max_timeout_s),
            min(request.compute_timeout_s or self._settings.timeout_s, self._settings.max_timeout_s),
            key,
        )
        ticket = await self._admission.accept(call_of(request), request.tenant, terms, trace_headers=inject_headers())
        await self._remove(seq)
        log.info("dead_letter_queued_again", seq=seq, was=request.request_id, request_id=ticket.accepted.request_id)
        return acceptance(ticket)

    async def _read(self, seq: int) -> RawStreamMsg:
        try:
            return await self._bus.js.get_msg(DEAD.name, seq=seq)
        except NotFoundError as error:
            text = f"There is no dead letter {seq}; it may have been queued again already."
            raise ApiError(404, text, param="seq", code="not_found") from error
        except (APIError, nats.errors.Error, TimeoutError) as error:
            raise self._limits.unavailable(f"The dead letter cannot be read: {error}") from error

    async def _remove(self, seq: int) -> None:
        """A letter that stays is no harm: whoever retries it again finds the request that it has become."""
        try:
            await self._bus.js.delete_msg(DEAD.name, seq)
        except (APIError, nats.errors.Error, TimeoutError) as error:
            log.warning("dead_letter_not_removed", seq=seq, error=str(error))


def call_of(request: GenerationRequest) -> GenerationCall:
    """The call that gives the same work again, from the prompt's token ids. Its digest is only ever its own."""
    params = request.params
    return GenerationCall(
        api=request.api,
        model=request.model,
        prompts=(TokenIds(list(request.prompt_ids)),),
        n=1,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        logprobs=params.logprobs,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        speculation=request.speculation,
        priority=request.priority,
        stream=True,
        include_usage=False,
        user="",
        digest="dead letter",
        prediction=TokenIds(list(request.prediction_ids)),
    )
