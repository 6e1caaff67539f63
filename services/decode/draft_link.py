"""The decode side of speculation: tells drafters how sequences grow, and passes their proposals to the engine.

Core NATS, no waiting, no retries: a lost message costs one proposal. Nothing here can change the output.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from services.decode.draft_length import DraftLength
from services.decode.settings import DecodeSettings
from shared.bus import Bus
from shared.engine import AsyncEngine
from shared.protocol.drafts import DraftContext, decode_proposal, encode_draft
from shared.protocol.jobs import GenerationRequest
from shared.protocol.subjects import draft_subject, proposal_subject
from shared.telemetry import inject_headers

LOOK_AHEAD = 2
"""A proposal arrives while the next step already runs, so it covers this many times the wanted length."""

log = structlog.get_logger(__name__)


@dataclass
class _Drafted:
    """What one drafter knows of a sequence."""

    request: GenerationRequest
    length: DraftLength
    token_ids: list[int]
    trace_headers: dict[str, str]
    drafter: str = ""
    sent: int = 0
    last_proposer: str = ""


class DraftLink:
    """Owner of the conversation with the drafters of this worker's model."""

    def __init__(self, bus: Bus, engine: AsyncEngine, settings: DecodeSettings, model: str, worker: str) -> None:
        self._bus = bus
        self._engine = engine
        self._settings = settings
        self._model = model
        self._inbox = proposal_subject(worker)
        self._sequences: dict[str, _Drafted] = {}
        self.proposals = 0

    async def open(self) -> None:
        await self._bus.client.subscribe(self._inbox, cb=self._on_proposal)

    def join(self, request: GenerationRequest, token_ids: list[int]) -> None:
        """A sequence begins (or resumes) with these tokens."""
        if self._settings.speculation == "auto" and request.speculation == "auto":
            self._sequences[request.request_id] = _Drafted(
                request, DraftLength(self._settings.max_draft_tokens), list(token_ids), inject_headers()
            )

    async def grew(self, request_id: str, new_ids: list[int], drafted: int, accepted: int) -> str:
        """Tell the drafter about new tokens; returns who proposed what was just verified."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return ""
        proposer = sequence.last_proposer
        sequence.length.observe(drafted, accepted)
        sequence.token_ids += new_ids
        await self.ask(request_id)
        return proposer

    async def ask(self, request_id: str) -> None:
        """Ask for a proposal behind what the sequence has, unless load or experience speak against it."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.length.length == 0 or len(self._sequences) > self._settings.max_speculating:
            return
        drafter = self._drafter_of(request_id)
        if drafter is None:
            return
        if drafter != sequence.drafter:
            sequence.drafter, sequence.sent = drafter, 0
        params = sequence.request.params
        context = DraftContext(
            request_id=request_id,
            tenant=sequence.request.tenant,
            start=sequence.sent,
            token_ids=sequence.token_ids[sequence.sent :],
            reply_to=self._inbox,
            max_tokens=LOOK_AHEAD * sequence.length.length + 1,
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
        )
        if await self._send(drafter, context, sequence.trace_headers if sequence.sent == 0 else None):
            sequence.sent = len(sequence.token_ids)

    async def leave(self, request_id: str) -> None:
        """The sequence has ended here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None and sequence.sent:
            await self._send(
                sequence.drafter,
                DraftContext(request_id, sequence.request.tenant, 0, [], self._inbox, forget=True),
            )

    def _drafter_of(self, request_id: str) -> str | None:
        """Rendezvous hashing over the living drafters: a request stays with its drafter until that dies."""
        live = [status.instance for status in self._bus.statuses.live("draft", self._model) if status.state == "ready"]
        if not live:
            return None
        return max(live, key=lambda name: hashlib.blake2b(f"{name}/{request_id}".encode(), digest_size=8).digest())

    async def _send(self, drafter: str, context: DraftContext, headers: dict[str, str] | None = None) -> bool:
        if not self._bus.connected:  # a context is worth nothing after a reconnect
            return False
        try:
            await self._bus.client.publish(
                draft_subject(self._model, drafter), encode_draft(context), headers=headers or None
            )
        except nats.errors.Error as error:
            log.warning("context_not_sent", request_id=context.request_id, error=str(error))
            return False
        return True

    async def _on_proposal(self, message: Msg) -> None:
        try:
            proposal = decode_proposal(message.data)
        except msgspec.DecodeError as error:
            log.warning("proposal_unreadable", error=str(error))
            return
        sequence = self._sequences.get(proposal.request_id)
        if sequence is None:
            return
        if proposal.resend:
            sequence.sent = 0
            await self.ask(proposal.request_id)
            return
        self.proposals += 1
        sequence.last_proposer = proposal.proposer
        if len(self._sequences) <= self._settings.max_speculating and sequence.length.length:
            # Enough for the step that runs now and the one after it, each at the present length.
            most = len(sequence.token_ids) - proposal.start + LOOK_AHEAD * sequence.length.length + 1
            self._engine.propose(proposal.request_id, proposal.start, list(proposal.token_ids[: max(most, 0)]))
