"""Serves contexts with proposals, newest context first: an overtaken context is never worked on."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from opentelemetry.context import Context

from services.draft.prompt_lookup import PromptLookup
from services.draft.settings import DraftSettings
from shared.bus import Bus
from shared.protocol.drafts import DraftContext, Proposal, decode_context, encode_draft
from shared.protocol.jobs import SamplingParams
from shared.protocol.subjects import draft_subject
from shared.telemetry import attributes as attr
from shared.telemetry import extract_context, record_span
from shared.telemetry.metrics import DraftMetrics

FORGET_CHECK_S = 5.0

PROMPT_LOOKUP, DRAFT_MODEL = "prompt_lookup", "draft_model"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ModelTask:
    """Guess `max_tokens` tokens behind `token_ids` with the target's sampling parameters."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int


class Model(Protocol):
    """A draft model; what it cannot guess now is left out."""

    async def propose(self, tasks: list[ModelTask]) -> dict[str, list[int]]: ...

    async def forget(self, request_id: str) -> None: ...


@dataclass
class _Known:
    """What is known of one sequence, and the newest question about it."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    question: DraftContext | None = None
    asked_s: float = field(default_factory=time.monotonic)
    trace: Context | None = None
    since_unix_s: float = field(default_factory=time.time)
    proposed: int = 0


class DraftService:
    """Owner of the sequences that decode workers have told about; bounded, least recently used forgotten first.

    Without a draft model it proposes by prompt lookup alone; with one, the model answers where lookup finds nothing.
    """

    def __init__(
        self, bus: Bus, settings: DraftSettings, model: str, metrics: DraftMetrics, draft_model: Model | None
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._model = model
        self._metrics = metrics
        self._draft_model = draft_model
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asked = asyncio.Event()
        self.last_error = ""

    def __len__(self) -> int:
        return len(self._known)

    async def run(self, stop: asyncio.Event) -> None:
        """Answer contexts until `stop`."""
        subscription = await self._bus.client.subscribe(
            draft_subject(self._model, self._settings.instance), cb=self._on_context
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                asked = asyncio.create_task(self._asked.wait())
                await asyncio.wait({asked, stopping}, timeout=FORGET_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                self._asked.clear()
                await self._answer_all()
                await self._forget_silent()
        finally:
            stopping.cancel()
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def _on_context(self, message: Msg) -> None:
        try:
            context = decode_context(message.data)
        except msgspec.DecodeError as error:
            log.warning("context_unreadable", error=str(error))
            return
        self._metrics.contexts.inc()
        if context.forget:
            await self._forget(context.request_id)
            return
        known = self._known.get(context.request_id)
        if known is None or context.start == 0:
            known = self._known[context.request_id] = _Known(trace=extract_context(message.headers))
        self._known.move_to_end(context.request_id)
        if context.start > len(known.lookup):
            del self._known[context.request_id]
            await self._send(context, Proposal(context.request_id, 0, [], resend=True))
            return
        known.lookup.extend(context.token_ids[len(known.lookup) - context.start :])
        if known.question is not None:
            self._metrics.contexts_dropped.inc()
        known.question, known.asked_s = context, time.monotonic()
        while len(self._known) > self._settings.max_sequences:
            await self._forget(next(iter(self._known)))
        self._asked.set()

    async def _answer_all(self) -> None:
        """Answer every open question: by lookup at once, the others by the model in one batch."""
        tasks: list[tuple[DraftContext, ModelTask]] = []
        for request_id, known in list(self._known.items()):
            question = known.question
            if question is None:
                continue
            known.question = None
            most = min(question.max_tokens, self._settings.max_proposal_tokens)
            guess = known.lookup.propose(most)
            if guess:
                await self._propose(question, known, guess, PROMPT_LOOKUP)
            elif self._draft_model is not None:
                tasks.append((question, ModelTask(request_id, list(known.lookup.tokens), _params(question), most)))
        if tasks and self._draft_model is not None:
            await self._ask(self._draft_model, tasks)

    async def _ask(self, draft_model: Model, tasks: list[tuple[DraftContext, ModelTask]]) -> None:
        guesses = await draft_model.propose([task for _, task in tasks])
        for question, task in tasks:
            known, guess = self._known.get(task.request_id), guesses.get(task.request_id)
            if known is not None and guess:
                await self._propose(question, known, guess, DRAFT_MODEL, start=len(task.token_ids))

    async def _propose(
        self, question: DraftContext, known: _Known, guess: list[int], proposer: str, start: int | None = None
    ) -> None:
        self._metrics.proposed_tokens.labels(proposer).inc(len(guess))
        self._metrics.propose_seconds.labels(proposer).observe(time.monotonic() - known.asked_s)
        known.proposed += len(guess)
        position = len(known.lookup) if start is None else start
        await self._send(question, Proposal(question.request_id, position, guess, proposer))

    async def _send(self, question: DraftContext, proposal: Proposal) -> None:
        if not self._bus.connected:
            return
        try:
            await self._bus.client.publish(question.reply_to, encode_draft(proposal))
        except nats.errors.Error as error:
            log.warning("proposal_not_sent", request_id=question.request_id, error=str(error))

    async def _forget_silent(self) -> None:
        """A decode worker that died never says that its sequences ended. The longest silent come first."""
        oldest_s = time.monotonic() - self._settings.forget_after_s
        while self._known and next(iter(self._known.values())).asked_s < oldest_s:
            await self._forget(next(iter(self._known)))

    async def _forget(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        if known is not None and known.proposed:
            record_span(
                "draft",
                known.since_unix_s,
                time.time(),
                context=known.trace,
                attributes={attr.REQUEST_ID: request_id, attr.DRAFTED_TOKENS: known.proposed},
            )
        if self._draft_model is not None:
            await self._draft_model.forget(request_id)


def _params(question: DraftContext) -> SamplingParams:
    """The target's sampling, so that the same noise leads to the same choice wherever the logits allow it."""
    return SamplingParams(
        max_tokens=question.max_tokens,
        seed=question.seed,
        temperature=question.temperature,
        top_p=question.top_p,
        top_k=question.top_k,
        min_p=question.min_p,
        ignore_eos=True,
    )
