"""The conversation with the drafters of this worker's model: tells how sequences grow, and hands on what they guess.

Core NATS, no retries, and nobody waits for it: a lost message costs a guess. Nothing here can change the output.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from shared.bus import Bus
from shared.protocol.drafts import (
    DRAFT_MODEL,
    MAX_CONTEXT_TOKENS,
    MAX_PROPOSAL_TOKENS,
    DraftContext,
    Proposal,
    decode_proposals,
    encode_draft,
)
from shared.protocol.jobs import GenerationRequest
from shared.protocol.subjects import draft_subject, proposal_subject
from shared.speculation import Guess
from shared.telemetry import inject_headers

DRAFT_SERVICE = "draft_service"
"""Who guessed where it was not a model: those without one have names of their own in this process."""

FIRST_WANTED = 2
"""Drafts of a sequence that are worth asking for before its first step tells."""

SURE_TOKENS = 9
"""Tokens beyond those known that a drafter may say at least, where any are wanted."""

MAX_HEARD = MAX_PROPOSAL_TOKENS
"""Proposals for a sequence that are looked at between two of its steps."""

RESEND_EVERY_S = 1.0
"""How often a drafter may ask for a whole sequence."""

SEND_TIMEOUT_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Told:
    """What one drafter knows of a sequence: the first `sent` of its `token_ids`, and how many more are `wanted`."""

    request: GenerationRequest
    token_ids: list[int]
    on_guess: Callable[[Guess], None]
    wanted: int
    drafter: str = ""
    sent: int = 0
    told_wanted: int = 0
    heard: int = 0
    resent_s: float = -math.inf
    trace_headers: dict[str, str] = field(default_factory=inject_headers)


class DraftLink:
    """Owner of what drafters were told. `run` sends; the other methods only note what there is to send."""

    def __init__(self, bus: Bus, model: str, worker: str) -> None:
        self._bus = bus
        self._model = model
        self._inbox = proposal_subject(worker)
        self._sequences: dict[str, Told] = {}
        self._changed: dict[str, None] = {}
        """Requests with something to tell, in the order of their turn."""
        self._leaving: deque[tuple[str, DraftContext]] = deque()
        """Drafters, and what they shall forget."""
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sequences)

    async def open(self) -> None:
        await self._bus.client.subscribe(self._inbox, cb=self._on_proposals)

    async def run(self) -> None:
        """Send what there is to send, each sequence's newest state."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._leaving or self._changed:
                if self._leaving:  # first, as the same request may have come back
                    await self._send(*self._leaving.popleft())
                    continue
                told = self._sequences.get(request_id := next(iter(self._changed)))
                del self._changed[request_id]
                if told is not None:
                    await self._tell(told)

    def join(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        on_guess: Callable[[Guess], None],
        wanted: int = FIRST_WANTED,
    ) -> None:
        """A sequence begins, or goes on, with these tokens. `wanted` as in `grew`."""
        self._sequences[request.request_id] = Told(request, list(token_ids), on_guess, _ahead(wanted))
        self._note(request.request_id)

    def grew(self, request_id: str, new_ids: list[int], wanted: int) -> None:
        """`wanted`: drafts that the next steps could verify each; 0 where guesses would be of no use now."""
        told = self._sequences.get(request_id)
        if told is not None:
            told.token_ids += new_ids
            told.wanted = _ahead(wanted)
            told.heard = 0
            self._note(request_id)

    def has_drafter(self, request_id: str) -> bool:
        """Whether a living drafter was told of the sequence, as far as one knows."""
        told = self._sequences.get(request_id)
        return told is not None and bool(told.drafter)

    def leave(self, request_id: str) -> None:
        """The sequence has ended here."""
        told = self._sequences.pop(request_id, None)
        if told is not None:
            self._forget(told)

    def _note(self, request_id: str) -> None:
        self._changed[request_id] = None
        self._wake.set()

    def _forget(self, told: Told) -> None:
        if told.sent:
            request, rest = told.request, told.token_ids[told.sent :][:MAX_CONTEXT_TOKENS]
            # What it was not told of the output yet helps it with others of the tenant.
            start = told.sent if rest else 0
            context = DraftContext(request.request_id, request.tenant, start, rest, self._inbox, forget=True)
            self._leaving.append((told.drafter, context))
            self._wake.set()
        told.drafter, told.sent, told.told_wanted = "", 0, 0

    async def _tell(self, told: Told) -> None:
        """What is new to the drafter. Where nothing is wanted it is told once, and hears of the tokens later."""
        if not told.wanted and not told.told_wanted:
            return
        drafter = self._drafter_of(told.request.request_id)
        if drafter != told.drafter:
            self._forget(told)
        if drafter is None:
            return
        told.drafter = drafter
        while True:
            context = self._context(told)
            headers = told.trace_headers if told.sent == 0 else None
            # Before it is sent: meanwhile the sequence may leave, or the drafter ask for all of it.
            told.sent = sent = context.start + len(context.token_ids)
            told.told_wanted = context.wanted
            if not await self._send(drafter, context, headers):
                if told.sent == sent:
                    told.sent, told.told_wanted = context.start, 0
                return
            if told.sent >= len(told.token_ids) or self._sequences.get(context.request_id) is not told:
                return

    def _context(self, told: Told) -> DraftContext:
        request = told.request
        token_ids = told.token_ids[told.sent : told.sent + MAX_CONTEXT_TOKENS]
        is_all = told.sent + len(token_ids) == len(told.token_ids)
        begins = told.sent == 0
        return DraftContext(
            request_id=request.request_id,
            tenant=request.tenant,
            start=told.sent,
            token_ids=token_ids,
            reply_to=self._inbox,
            wanted=told.wanted if is_all else 0,
            num_prompt=len(request.prompt_ids) if begins else 0,
            params=request.params if begins else None,
            salt=request.salt if begins else "",
        )

    def _drafter_of(self, request_id: str) -> str | None:
        """Rendezvous hashing over the living drafters: a request moves when its drafter dies, or to a new one with as
        many others as are that one's share."""
        live = [
            status.instance
            for status in self._bus.statuses.live("draft", self._model)
            if status.state == "ready" and status.details.get("speculation") != "off"
        ]
        if not live:
            return None
        return max(live, key=lambda name: hashlib.blake2b(f"{name}/{request_id}".encode(), digest_size=8).digest())

    async def _send(self, drafter: str, context: DraftContext, headers: dict[str, str] | None = None) -> bool:
        if not self._bus.connected:  # a context is worth nothing after a reconnect
            return False
        try:
            data = encode_draft(context)
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._bus.client.publish(draft_subject(self._model, drafter), data, headers=headers or None)
        except (nats.errors.Error, TimeoutError, ValueError) as error:
            log.warning("context_not_sent", request_id=context.request_id, error=repr(error))
            return False
        return True

    async def _on_proposals(self, message: Msg) -> None:
        try:
            proposals = decode_proposals(message.data)
        except msgspec.DecodeError as error:
            log.warning("proposals_unreadable", error=str(error))
            return
        for proposal in proposals.items:
            self._take(proposal)

    def _take(self, proposal: Proposal) -> None:
        told = self._sequences.get(proposal.request_id)
        if told is None or told.heard >= MAX_HEARD:
            return
        told.heard += 1
        if proposal.resend:
            now = time.monotonic()
            if now - told.resent_s >= RESEND_EVERY_S:
                told.resent_s = now
                told.sent = 0
                self._note(proposal.request_id)
            return
        name = DRAFT_MODEL if proposal.proposer == DRAFT_MODEL else DRAFT_SERVICE
        told.on_guess(
            Guess(
                proposal.start,
                tuple(proposal.token_ids),
                tuple(proposal.confidence),
                name,
                tuple(map(tuple, proposal.alternatives)),
                tuple(map(tuple, proposal.alternative_confidence)),
            )
        )


def _ahead(wanted: int) -> int:
    """Tokens beyond those known: for the step that runs when they are told, and for the one that can use them.

    What is wanted usually is no limit where a drafter is sure of more.
    """
    return min(max(2 * wanted + 1, SURE_TOKENS), MAX_PROPOSAL_TOKENS) if wanted else 0
