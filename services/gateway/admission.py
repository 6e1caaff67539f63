"""Takes a validated call on, or refuses it: the same for HTTP and NATS.

The order is the promise: the readers are subscribed, the logs are begun, the work is stored in the queue; only then is
the request accepted. A request with several choices is taken on with all of them or not at all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from services.gateway.attachment import Attachments
from services.gateway.call import GenerationCall
from services.gateway.deadlines import Deadlines
from services.gateway.drafts import Draft
from services.gateway.endings import Ending, Endings
from services.gateway.errors import ApiError, failure_of, too_large, unknown_model
from services.gateway.limits import Limits
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
    QueueFull,
    RequestUnknown,
)
from shared.protocol.jobs import encode_work
from shared.protocol.records import Accepted, choice_request_id

MAX_ATTEMPTS: Final = 16
"""Failed runs under one idempotency key before the key itself is refused."""

_SEEDS: Final = 2**53
"""Drawn seeds are exact in every language's JSON numbers."""

_JOB_BYTES_PER_TOKEN: Final = 8
_JOB_BYTES: Final = 16 << 10
"""What the hand-over to decode adds to the request: its block references and the first output."""


@dataclass(frozen=True)
class Part:
    """One choice of an accepted request.

    `log_seq`: the sequence of its log's latest record known. `reader` is subscribed to the log; None where the caller
    follows it itself.
    """

    accepted: Accepted
    log_seq: int
    deadlines: Deadlines
    reader: LogReader | None


@dataclass(frozen=True)
class Ticket:
    """An accepted request. `joined`: an earlier request with the same idempotency key began it."""

    parts: Sequence[Part]
    joined: bool

    @property
    def accepted(self) -> Accepted:
        """The record that stands for the whole request: the first choice's."""
        return self.parts[0].accepted

    @property
    def choices(self) -> list[Accepted]:
        return [part.accepted for part in self.parts]


class Admission:
    def __init__(
        self,
        bus: Bus,
        prompter: Prompter,
        limits: Limits,
        endings: Endings,
        attachments: Attachments,
        model: str,
        worker: str,
        settings: GatewaySettings,
    ) -> None:
        self._bus = bus
        self._prompter = prompter
        self._limits = limits
        self._endings = endings
        self._attachments = attachments
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
        held: AsyncExitStack | None = None,
    ) -> Ticket:
        """Queue a call, or join the run that its idempotency key began.

        `held` is for a caller that follows the request: it gets a reader for each choice, and beside the slot that the
        caller has taken one for each further choice.

        A key is bound to a run that is going on or has answered; one that was cancelled or has failed frees it, so that
        a retry is of use.

        Raises ApiError: 400 or 413 for what cannot be served, 404 for another model, 422 for a key that was used with
        another body, 429 and 503 for what cannot be taken on now.
        """
        if call.model != self._model:
            raise unknown_model(call.model, self._model)
        self._limits.check_choices(call.n, len(call.prompts), followed=held is not None)
        if held is not None:
            held.enter_context(self._limits.slots(call.choices - 1))
        if terms.idempotency_key is None:
            return await self._start(call, tenant, terms, new_request_id(call.api), trace_headers, held)
        for attempt in range(MAX_ATTEMPTS):
            request_id = keyed_request_id(call.api, tenant, terms.idempotency_key, attempt)
            states = await self._earlier_run(tenant, request_id)
            if not states:
                try:
                    return await self._start(call, tenant, terms, request_id, trace_headers, held)
                except LogExists:  # a twin was faster
                    states = await self._earlier_run(tenant, request_id)
            if states and not any(state and state.ended and failure_of(state.ended) for state in states):
                draft = (await self._draft(call, tenant, terms)).named(request_id, call.digest)
                return await self._join(draft, states, trace_headers, held)
        raise ApiError(
            422,
            f"{MAX_ATTEMPTS} runs under this idempotency key have failed; use another.",
            code="idempotency_exhausted",
        )

    async def _draft(self, call: GenerationCall, tenant: str, terms: Terms) -> Draft:
        """All that will be stored, but for the request's id. Raises ApiError."""
        prompts = await self._prompter.token_ids(call)
        chat_default = self._settings.default_max_tokens
        limits = [self._prompter.output_limit(call, len(ids), chat_default, n) for n, ids in enumerate(prompts)]
        now = time.time()
        draft = Draft(
            call=call,
            prompts=prompts,
            output_limits=limits,
            prediction=await self._prompter.prediction_ids(call),
            seed=secrets.randbelow(_SEEDS) if call.seed is None else call.seed,
            tenant=tenant,
            gateway=self._worker,
            created_unix_s=now,
            queue_deadline_unix_s=now + terms.queue_timeout_s,
            compute_timeout_s=terms.timeout_s,
            deadline_unix_s=now + terms.queue_timeout_s + terms.timeout_s,
        )
        longest = max(range(len(prompts)), key=lambda n: len(prompts[n]))
        tokens = len(prompts[longest])
        needed = len(encode_work(draft.work(longest * call.n, 0))) + _JOB_BYTES + _JOB_BYTES_PER_TOKEN * tokens
        if needed > self._bus.max_payload:
            beside = f" and a prediction of {len(draft.prediction)}" if draft.prediction else ""
            raise too_large(
                f"A prompt of {tokens} tokens{beside} makes messages of about {needed} bytes; "
                f"the NATS server takes {self._bus.max_payload} (its max_payload)."
            )
        return draft

    async def _start(
        self,
        call: GenerationCall,
        tenant: str,
        terms: Terms,
        request_id: str,
        trace_headers: dict[str, str],
        held: AsyncExitStack | None,
    ) -> Ticket:
        """Begin a run. Raises LogExists when its id is taken, ApiError when it cannot be stored or must not be."""
        self._limits.check_size(call.n, len(call.prompts), call.priority)
        wanted = (call.priority, call.choices, terms.queue_timeout_s)
        self._limits.check(*wanted)  # first of all, since it costs nothing
        ids = [choice_request_id(request_id, choice) for choice in range(call.choices)]
        with self._limits.quota.storing(tenant, ids):
            try:
                await self._limits.quota.check(tenant, ids)
            except BusError as error:
                raise self._unavailable(error) from error
            with self._limits.place(*wanted):
                digest = call.digest if terms.idempotency_key is not None else ""
                draft = (await self._draft(call, tenant, terms)).named(request_id, digest)
                readers = await self._subscribe(draft, held)
                log_seqs = await self._store(draft, [None] * draft.choices, trace_headers)
        parts = []
        for choice, (log_seq, reader) in enumerate(zip(log_seqs, readers, strict=True)):
            opening = draft.opening(choice)
            parts.append(Part(opening, log_seq, Deadlines.of(opening, None), reader))
        return Ticket(parts, joined=False)

    async def _join(
        self,
        draft: Draft,
        states: Sequence[LogState | None],
        trace_headers: dict[str, str],
        held: AsyncExitStack | None,
    ) -> Ticket:
        """Follow the run that an earlier request with this key began. Raises ApiError 422 when that asked otherwise.

        The gateway that began it may have died before everything was stored: what is missing is stored now.
        """
        accepted = states[0].accepted if states[0] is not None else None
        if accepted is None or accepted.body_digest != draft.digest:
            raise ApiError(
                422,
                "This idempotency key was used with another body; use a new key for a new request.",
                param="idempotency-key",
                code="idempotency_key_reused",
            )
        begun = draft.as_begun(accepted)
        log_seqs = await self._store(begun, states, trace_headers)
        readers = await self._subscribe(begun, held)
        parts = []
        for choice, (state, log_seq, reader) in enumerate(zip(states, log_seqs, readers, strict=True)):
            opening = state.accepted if state is not None and state.accepted is not None else begun.opening(choice)
            claim = state.claims[0] if state is not None and state.claims else None
            parts.append(Part(opening, log_seq, Deadlines.of(opening, claim), reader))
        return Ticket(parts, joined=True)

    async def _earlier_run(self, tenant: str, request_id: str) -> list[LogState | None]:
        """The state of each choice's log, None for one that was not begun; empty when there was no such run."""
        try:
            first = await self._state(tenant, request_id)
            if first is None:
                return []
            choices = first.accepted.choices if first.accepted is not None else 1
            others = [await self._state(tenant, choice_request_id(request_id, c)) for c in range(1, choices)]
        except BusError as error:
            raise self._unavailable(error) from error
        return [first, *others]

    async def _state(self, tenant: str, request_id: str) -> LogState | None:
        try:
            return await self._bus.open_log(tenant, request_id).state()
        except RequestUnknown:
            return None

    async def _store(self, draft: Draft, states: Sequence[LogState | None], trace_headers: dict[str, str]) -> list[int]:
        """Begin the logs that are missing, the first choice's before all others, and queue what nobody has taken.

        Returns the sequence of each log's latest record. Raises LogExists when the first log was to be begun and its id
        is taken; ApiError when something cannot be stored, and then nothing is left that nobody would end.
        """
        begun: list[Accepted] = []
        log_seqs: list[int] = []
        unclaimed: list[int] = []
        try:
            for choice, known in enumerate(states):
                state = known
                if state is None:
                    begun.append(draft.opening(choice))
                    state = await self._begin(begun[-1], trace_headers)
                log_seqs.append(state.last_seq)
                if state.ended is None and not state.claims:
                    unclaimed.append(choice)
            for choice in unclaimed:
                await self._publish(draft, choice, log_seqs[choice], trace_headers)
        except LogExists:
            raise
        except QueueFull as error:
            refusal = self._limits.backlog.full(draft.call.priority, f"The queue is full: {error}")
            await self._give_up(begun, states, refusal, certain=True)
        except BusError as error:
            refusal = self._unavailable(error)
            await self._give_up(begun, states, refusal, certain=False)
        else:
            return log_seqs
        raise refusal

    async def _give_up(
        self, begun: Sequence[Accepted], states: Sequence[LogState | None], refusal: ApiError, *, certain: bool
    ) -> None:
        """End what was begun, since a request is taken on with all its choices or not at all.

        That includes the choices of an earlier run when one that it lacks could not be stored. A run that lacks none
        goes on, as long as somebody follows it. `certain`: it is known what was stored; else the ends come later, and
        a run under a key has its grace period: the client's retry may have been taken on by another gateway by then.
        """
        known = [state.accepted for state in states if state is not None and state.accepted is not None]
        if not begun or (not certain and begun[0].body_digest):
            self._attachments.left(sorted([*known, *begun], key=lambda accepted: accepted.choice))
            return
        running = [s.accepted for s in states if s is not None and s.accepted is not None and s.ended is None]
        endings = [Ending(accepted, "error", refusal.info(), may_come=not certain) for accepted in (*running, *begun)]
        if certain:
            await self._endings.settle(endings)
        else:
            for ending in endings:
                self._endings.request(ending)

    async def _begin(self, opening: Accepted, trace_headers: dict[str, str]) -> LogState:
        """The state of a log that has its first record now. Raises LogExists for the first choice's only.

        Whoever begins the first log begins the others, unless a retry of the same request has seen them missing.
        """
        try:
            log = await self._bus.create_log(opening, trace_headers)
            return LogState(accepted=opening, last_seq=log.last_seq)
        except LogExists:
            if opening.choice == 0:
                raise
        return await self._bus.open_log(opening.tenant, opening.request_id).state()

    async def _publish(self, draft: Draft, choice: int, log_seq: int, trace_headers: dict[str, str]) -> None:
        try:
            await self._bus.publish_request(draft.work(choice, log_seq), trace_headers)
        except DuplicateWork:
            return  # stored by a try whose answer was lost, or by a twin

    async def _subscribe(self, draft: Draft, held: AsyncExitStack | None) -> list[LogReader | None]:
        """A reader for each choice's log."""
        if held is None:
            return [None] * draft.choices
        return [
            await held.enter_async_context(self._bus.follow(draft.tenant, draft.choice_id(choice)))
            for choice in range(draft.choices)
        ]

    def _unavailable(self, error: BusError) -> ApiError:
        return self._limits.unavailable(f"The request could not be stored: {error}")
