"""Takes a validated call on, or refuses it: the same for HTTP and NATS.

The order is the promise: the reader is subscribed, the log is begun, the work is stored in the queue; only then is the
request accepted.
"""

from __future__ import annotations

import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import msgspec

from services.gateway.deadlines import Deadlines
from services.gateway.endings import Ending, Endings
from services.gateway.errors import ApiError, failure_of, overloaded, too_large, unknown_model
from services.gateway.limits import Limits
from services.gateway.openai_schema import GenerationCall
from services.gateway.prompts import Prompter
from services.gateway.settings import GatewaySettings
from services.gateway.terms import Terms, keyed_request_id, new_request_id
from shared.bus import (
    Bus,
    BusError,
    DuplicateWork,
    LogExists,
    LogReader,
    LogState,
    PublishFailed,
    QueueFull,
    RequestUnknown,
)
from shared.protocol.jobs import GenerationRequest, SamplingParams, encode_work
from shared.protocol.records import Accepted

MAX_ATTEMPTS: Final = 16
"""Failed runs under one idempotency key before the key itself is refused."""

_SEEDS: Final = 2**53
"""Drawn seeds are exact in every language's JSON numbers."""

_JOB_BYTES_PER_TOKEN: Final = 8
_JOB_BYTES: Final = 16 << 10
"""What the hand-over to decode adds to the request: its block references and the first output."""


@dataclass(frozen=True)
class Ticket:
    """An accepted request. `joined`: an earlier request with the same idempotency key began it.

    `reader` is subscribed to the log since before it was begun; None where the caller follows it itself.
    """

    accepted: Accepted
    log_seq: int
    deadlines: Deadlines
    joined: bool
    reader: LogReader | None


class Admission:
    def __init__(
        self,
        bus: Bus,
        prompter: Prompter,
        limits: Limits,
        endings: Endings,
        model: str,
        worker: str,
        settings: GatewaySettings,
    ) -> None:
        self._bus = bus
        self._prompter = prompter
        self._limits = limits
        self._endings = endings
        self._model = model
        self._worker = worker
        self._settings = settings

    async def accept(
        self,
        call: GenerationCall,
        tenant: str,
        terms: Terms,
        *,
        trace_headers: dict[str, str],
        follow_in: AsyncExitStack | None = None,
    ) -> Ticket:
        """Queue a call, or join the run that its idempotency key began.

        A key is bound to a run that is going on or has answered; one that was cancelled or has failed frees it, so that
        a retry is of use.

        Raises ApiError: 400 or 413 for what cannot be served, 404 for another model, 422 for a key that was used with
        another body, 429 and 503 for what cannot be taken on now.
        """
        if call.model != self._model:
            raise unknown_model(call.model, self._model)
        self._limits.check_queue()
        draft = await self._draft(call, tenant, terms)
        if terms.idempotency_key is None:
            draft = msgspec.structs.replace(draft, request_id=new_request_id(call.api))
            return await self._start(draft, call, trace_headers, follow_in, digest="")
        for attempt in range(MAX_ATTEMPTS):
            request_id = keyed_request_id(call.api, tenant, terms.idempotency_key, attempt)
            draft = msgspec.structs.replace(draft, request_id=request_id)
            state = await self._earlier_run(draft)
            if state is None:
                try:
                    return await self._start(draft, call, trace_headers, follow_in, digest=call.digest)
                except LogExists:  # a twin was faster
                    state = await self._earlier_run(draft)
            if state is not None and not (state.ended is not None and failure_of(state.ended)):
                return await self._join(draft, call, state, trace_headers, follow_in)
        raise ApiError(
            422,
            f"{MAX_ATTEMPTS} runs under this idempotency key have failed; use another.",
            code="idempotency_exhausted",
        )

    async def _draft(self, call: GenerationCall, tenant: str, terms: Terms) -> GenerationRequest:
        """The work message, but for its id and its log. Raises ApiError."""
        prompt_ids = await self._prompter.token_ids(call)
        params = SamplingParams(
            max_tokens=self._prompter.max_tokens(call, len(prompt_ids), self._settings.default_max_tokens),
            seed=secrets.randbelow(_SEEDS) if call.seed is None else call.seed,
            temperature=call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            min_p=call.min_p,
            stop=call.stop,
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
        )
        now = time.time()
        draft = GenerationRequest(
            request_id="",
            tenant=tenant,
            model=self._model,
            api=call.api,
            priority=call.priority,
            prompt_ids=prompt_ids,
            params=params,
            created_unix_s=now,
            queue_deadline_unix_s=now + terms.queue_timeout_s,
            deadline_unix_s=now + terms.timeout_s,
            log_seq=0,
            salt=tenant,
            speculation=call.speculation,
        )
        needed = len(encode_work(draft)) + _JOB_BYTES + _JOB_BYTES_PER_TOKEN * len(prompt_ids)
        if needed > self._bus.max_payload:
            raise too_large(
                f"A prompt of {len(prompt_ids)} tokens makes messages of about {needed} bytes; "
                f"the NATS server takes {self._bus.max_payload} (its max_payload)."
            )
        return draft

    async def _start(
        self,
        draft: GenerationRequest,
        call: GenerationCall,
        trace_headers: dict[str, str],
        follow_in: AsyncExitStack | None,
        *,
        digest: str,
    ) -> Ticket:
        """Begin a run. Raises LogExists when the id is taken, ApiError when it cannot be stored."""
        reader = await self._subscribe(draft, follow_in)
        accepted = Accepted(
            request_id=draft.request_id,
            tenant=draft.tenant,
            model=draft.model,
            api=draft.api,
            created_unix_s=draft.created_unix_s,
            deadline_unix_s=draft.deadline_unix_s,
            prompt_tokens=len(draft.prompt_ids),
            seed=draft.params.seed,
            priority=draft.priority,
            gateway=self._worker,
            include_usage=call.include_usage,
            body_digest=digest,
        )
        try:
            log_seq = (await self._bus.create_log(accepted, trace_headers)).last_seq
            await self._publish(msgspec.structs.replace(draft, log_seq=log_seq), trace_headers)
        except PublishFailed as error:
            refusal = self._unavailable(error)
        except QueueFull as error:
            refusal = overloaded(429, "queue_full", f"The queue is full: {error}", self._settings.retry_after_s)
        else:
            deadlines = Deadlines(draft.deadline_unix_s, draft.queue_deadline_unix_s)
            return Ticket(accepted, log_seq, deadlines, joined=False, reader=reader)
        # What was stored is not known when an answer was lost: the log must end in any case.
        self._endings.request(Ending(accepted, "error", refusal.info()))
        raise refusal

    async def _join(
        self,
        draft: GenerationRequest,
        call: GenerationCall,
        state: LogState,
        trace_headers: dict[str, str],
        follow_in: AsyncExitStack | None,
    ) -> Ticket:
        """Follow the run that an earlier request with this key began. Raises ApiError 422 when that asked otherwise."""
        accepted = state.accepted
        if accepted is None or accepted.body_digest != call.digest:
            raise ApiError(
                422,
                "This idempotency key was used with another body; use a new key for a new request.",
                param="idempotency-key",
                code="idempotency_key_reused",
            )
        deadlines = Deadlines(accepted.deadline_unix_s)
        if state.ended is None and not state.claims:
            # The gateway that began it may have died before the work was queued. A second copy cannot be stored.
            waits = draft.queue_deadline_unix_s - draft.created_unix_s
            deadlines.queue_unix_s = accepted.created_unix_s + waits
            work = msgspec.structs.replace(
                draft,
                params=msgspec.structs.replace(draft.params, seed=accepted.seed),
                created_unix_s=accepted.created_unix_s,
                queue_deadline_unix_s=deadlines.queue_unix_s,
                deadline_unix_s=accepted.deadline_unix_s,
                log_seq=state.last_seq,
            )
            try:
                await self._publish(work, trace_headers)
            except (PublishFailed, QueueFull) as error:
                raise self._unavailable(error) from error
        reader = await self._subscribe(draft, follow_in)
        return Ticket(accepted, state.last_seq, deadlines, joined=True, reader=reader)

    async def _earlier_run(self, draft: GenerationRequest) -> LogState | None:
        try:
            return await self._bus.open_log(draft.tenant, draft.request_id).state()
        except RequestUnknown:
            return None
        except BusError as error:
            raise self._unavailable(error) from error

    async def _publish(self, work: GenerationRequest, trace_headers: dict[str, str]) -> None:
        try:
            await self._bus.publish_request(work, trace_headers)
        except DuplicateWork:
            return  # stored by a try whose answer was lost, or by a twin

    async def _subscribe(self, draft: GenerationRequest, follow_in: AsyncExitStack | None) -> LogReader | None:
        if follow_in is None:
            return None
        return await follow_in.enter_async_context(self._bus.follow(draft.tenant, draft.request_id))

    def _unavailable(self, error: BusError) -> ApiError:
        return overloaded(
            503, "queue_unavailable", f"The request could not be stored: {error}", self._settings.retry_after_s
        )
