"""Talks with the decode workers of one model: takes contexts, and sends what is guessed, a message a turn to each.

Of the contexts of one sequence only the newest is worked on. What to guess and to tell is decided in `known`. Nothing
holds up the event loop for long: what is long is read, and remembered, part by part.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from opentelemetry.context import Context

from services.draft.known import READ_TOKENS, Alternative, GapError, KnownSequence, Wish
from services.draft.settings import DraftSettings
from shared.bus import Bus
from shared.protocol.drafts import (
    MAX_PROPOSALS,
    DraftContext,
    Proposal,
    Proposals,
    decode_context,
    encode_draft,
)
from shared.protocol.subjects import decode_token, draft_subject, proposal_subject
from shared.speculation import RecentOutputs
from shared.telemetry import attributes as attr
from shared.telemetry import extract_context, record_span
from shared.telemetry.metrics import DraftMetrics

CHECK_S = 5.0
"""How often silent sequences are looked for."""

SEND_TIMEOUT_S = 1.0

REMEMBER_TOKENS = 256
"""Of an output that ended so many are taken in in one turn."""

CONTEXT_TOKENS = 64
"""What stands before them goes with them, to be recognized by."""

MOST_ERROR_CHARACTERS = 200

MOST_ENDED = 256
"""Outputs that wait to be remembered; where more end at once the oldest are left out."""

log = structlog.get_logger(__name__)


class Drafted(NamedTuple):
    """Tokens `first_index ..` of a sequence's output, as the draft model guesses them, and how likely it finds each.

    Or what it guesses should the token there be another than it thinks: all such `alternatives`, as far as they are.
    """

    request_id: str
    first_index: int
    token_ids: list[int]
    confidence: list[float]
    alternatives: Sequence[Alternative] = ()


class Model(Protocol):
    """A draft model that goes on from its own guesses until it is told something else. Nothing here waits for it."""

    def listen(self, on_drafted: Callable[[list[Drafted]], None]) -> None:
        """Call back on the event loop after each of its steps."""

    def tell(self, wishes: list[Wish], granted: Callable[[list[Wish]], None]) -> None:
        """The newest wishes. `granted` is called on the event loop, behind all that was drafted before it heard of
        them, with those that it cannot fulfil."""

    def forget(self, request_id: str) -> None: ...


@dataclass
class _Served:
    """A sequence, and the conversation about it."""

    known: KnownSequence
    trace: Context | None
    since_unix_s: float
    heard_s: float
    asked_s: float | None = None
    """When the context came that was not answered yet."""
    proposed: int = 0


class _Ended(NamedTuple):
    """A sequence whose output is to be remembered from `start` on."""

    request_id: str
    group: str
    token_ids: list[int]
    start: int


class DraftService:
    """Owner of the sequences that decode workers have told about; bounded, least recently used forgotten first.

    Those without a model guess as soon as a context comes, the draft model all the time.
    """

    def __init__(
        self, bus: Bus, settings: DraftSettings, model: str, metrics: DraftMetrics, draft_model: Model | None
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._model = model
        self._metrics = metrics
        self._draft_model = draft_model
        self._outputs = RecentOutputs(settings.recent_tokens, settings.recent_tenants)
        self._served: OrderedDict[str, _Served] = OrderedDict()
        self._num_tokens = 0
        """In all sequences together."""
        self._ended: deque[_Ended] = deque(maxlen=MOST_ENDED)
        self._asked: OrderedDict[str, None] = OrderedDict()
        """Sequences with a context that was not looked at yet, the newest last."""
        self._guessed: dict[str, None] = {}
        """Sequences of which the draft model has said more."""
        self._unknown: dict[str, DraftContext] = {}
        """Contexts that continue nothing known here."""
        self._wake = asyncio.Event()
        self.last_error = ""
        self.last_error_unix_s = 0.0
        if draft_model is not None:
            draft_model.listen(self._on_drafted)

    def __len__(self) -> int:
        return len(self._served)

    async def run(self, stop: asyncio.Event) -> None:
        """Answer contexts until `stop`."""
        subscription = await self._bus.client.subscribe(
            draft_subject(self._model, self._settings.instance), cb=self._on_context
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                woken = asyncio.create_task(self._wake.wait())
                await asyncio.wait({woken, stopping}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                self._wake.clear()
                await self._turn()
        finally:
            stopping.cancel()
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    # What comes in, on the event loop

    async def _on_context(self, message: Msg) -> None:
        try:
            context = decode_context(message.data)
        except msgspec.DecodeError as error:
            log.warning("context_unreadable", error=str(error))
            return
        if not _is_proposal_subject(context.reply_to):  # else a drafter would publish wherever it is told to
            log.warning("context_asks_to_reply_elsewhere", request_id=context.request_id, reply_to=context.reply_to)
            return
        self._metrics.contexts.inc()
        with self._harmless(context.request_id):
            if context.forget:
                self._end(context)
            else:
                self._take_or_ask(context, message)
        self._wake.set()

    def _end(self, context: DraftContext) -> None:
        """Decode has said its last about a sequence: tokens, maybe, that it had not told."""
        served = self._served.get(context.request_id)
        if served is not None and context.token_ids:
            try:
                self._extend(served, context)
            except GapError as error:
                log.debug("last_tokens_left_out", request_id=context.request_id, reason=str(error))
        self._forget(context.request_id)

    def _take_or_ask(self, context: DraftContext, message: Msg) -> None:
        try:
            self._take(context, message)
        except GapError as error:
            log.debug("context_continues_nothing", request_id=context.request_id, reason=str(error))
            self._forget(context.request_id)
            self._unknown[context.request_id] = context

    def _take(self, context: DraftContext, message: Msg) -> None:
        """Raises GapError."""
        served = self._served.get(context.request_id)
        if context.start == 0:
            self._drop(context.request_id)  # the model finds out from the new list of tokens
            most = self._settings.max_proposal_tokens
            known = KnownSequence(context, self._outputs, most=most, with_model=self._draft_model is not None)
            trace = served.trace if served is not None else extract_context(message.headers)
            since_unix_s = served.since_unix_s if served is not None else time.time()
            served = _Served(known, trace, since_unix_s, time.monotonic())
            self._served[context.request_id] = served
        elif served is None:
            raise GapError("nothing known, and the context is no beginning")
        self._extend(served, context)
        self._served.move_to_end(context.request_id)
        served.heard_s = served.asked_s = time.monotonic()
        if context.request_id in self._asked:
            self._metrics.contexts_dropped.inc()
        self._asked[context.request_id] = None
        self._asked.move_to_end(context.request_id)
        self._make_room()

    def _extend(self, served: _Served, context: DraftContext) -> None:
        """Raises GapError."""
        before = len(served.known.token_ids)
        try:
            served.known.extend(context)
        finally:
            self._num_tokens += len(served.known.token_ids) - before
        self._metrics.alternatives_used.inc(served.known.alternative_came)

    def _on_drafted(self, drafted: list[Drafted]) -> None:
        for request_id, first_index, token_ids, confidence, alternatives in drafted:
            self._metrics.model_tokens.inc(len(token_ids))
            served = self._served.get(request_id)
            if served is not None and alternatives and served.known.drafted_otherwise(first_index, alternatives):
                self._guessed[request_id] = None
            usable = served.known.drafted(first_index, token_ids, confidence) if served is not None else 0
            self._metrics.model_tokens_wasted.inc(len(token_ids) - usable)
            if usable:
                self._guessed[request_id] = None
        if self._guessed:
            self._wake.set()

    def _on_granted(self, wishes: list[Wish], refused: list[Wish]) -> None:
        for wish in wishes:
            served = self._served.get(wish.request_id)
            if served is not None and wish not in refused:
                served.known.granted(wish)
            elif served is not None:
                served.known.refused(wish)

    # What goes out

    async def _turn(self) -> None:
        """Look at what has come, tell the model, and say what there is to say: one message to each decode worker."""
        outgoing: dict[str, list[Proposal]] = {}
        asked, self._asked = self._asked, OrderedDict()
        guessed, self._guessed = self._guessed, {}
        unknown, self._unknown = self._unknown, {}
        self._remember_part()  # first, as the next question may be the same
        for request_id, context in unknown.items():
            if context.wanted and request_id not in self._served:
                self._metrics.resends.inc()
                outgoing.setdefault(context.reply_to, []).append(Proposal(request_id, 0, [], resend=True))
        self._tell_model(await self._look_up(asked))
        for request_id in {**asked, **guessed}:
            with self._harmless(request_id):
                served = self._served.get(request_id)
                if served is None:
                    continue
                for proposal in served.known.proposals():
                    self._count(served, proposal)
                    outgoing.setdefault(served.known.reply_to, []).append(proposal)
        for reply_to, proposals in outgoing.items():
            for first in range(0, len(proposals), MAX_PROPOSALS):
                await self._send(reply_to, Proposals(proposals[first : first + MAX_PROPOSALS]))
        self._forget_silent()
        self._metrics.sequences.set(len(self._served))

    async def _look_up(self, asked: OrderedDict[str, None]) -> list[tuple[_Served, Wish]]:
        """Let each read on, and those guess that have read all; the others' turn comes again, so that nobody waits for
        a long text of another's. Returns what to ask of the model."""
        wishes: list[tuple[_Served, Wish]] = []
        num_read = 0
        for request_id in reversed(asked):
            if num_read >= READ_TOKENS:  # other contexts come in meanwhile, and sequences may go or begin anew
                await asyncio.sleep(0)
                num_read = 0
            with self._harmless(request_id):
                served = self._served.get(request_id)
                if served is None:
                    continue
                num_read += served.known.read_on()
                if not served.known.all_read:
                    self._ask_again(request_id)
                    continue
                served.known.look_up()
                if (wish := served.known.wish()) is not None:
                    wishes.append((served, wish))
                    self._metrics.model_rests.inc(served.known.wanted > 0 and not wish.ahead)
        return wishes

    def _ask_again(self, request_id: str) -> None:
        """In the next turn, as one of the older contexts."""
        if request_id not in self._asked:
            self._asked[request_id] = None
            self._asked.move_to_end(request_id, last=False)
        self._wake.set()

    def _tell_model(self, wishes: list[tuple[_Served, Wish]]) -> None:
        """Of those that are still served: the model would work for nobody."""
        told = [wish for served, wish in wishes if self._served.get(wish.request_id) is served]
        if told and self._draft_model is not None:
            self._draft_model.tell(told, lambda refused: self._on_granted(told, refused))

    def _count(self, served: _Served, proposal: Proposal) -> None:
        self._metrics.proposed_tokens.labels(proposal.proposer).inc(len(proposal.token_ids))
        served.proposed += len(proposal.token_ids)
        if served.asked_s is not None:
            self._metrics.propose_seconds.labels(proposal.proposer).observe(time.monotonic() - served.asked_s)
            served.asked_s = None

    async def _send(self, reply_to: str, proposals: Proposals) -> None:
        if not self._bus.connected:  # a guess is worth nothing after a reconnect
            return
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._bus.client.publish(reply_to, encode_draft(proposals))
        except (nats.errors.Error, TimeoutError) as error:
            log.warning("proposals_not_sent", reply_to=reply_to, error=repr(error))
            self._note_error(f"proposals not sent: {error!r}")

    # What fails

    @contextmanager
    def _harmless(self, request_id: str) -> Iterator[None]:
        """Where drafting for a sequence fails it goes on without drafts, and the others with them."""
        try:
            yield
        except Exception as error:
            log.error("drafting_failed", request_id=request_id, error=repr(error), exc_info=True)
            self._note_error(f"drafting failed: {error!r}")
            self._drop(request_id)
            if self._draft_model is not None:
                self._draft_model.forget(request_id)

    def _note_error(self, text: str) -> None:
        self.last_error, self.last_error_unix_s = text[:MOST_ERROR_CHARACTERS], time.time()

    # What is forgotten

    def _make_room(self) -> None:
        most = self._settings
        while len(self._served) > most.max_sequences or self._num_tokens > most.max_known_tokens:
            self._forget(next(iter(self._served)))

    def _forget_silent(self) -> None:
        """A decode worker that died never says that its sequences ended. The longest silent come first."""
        oldest_s = time.monotonic() - self._settings.forget_after_s
        while self._served and next(iter(self._served.values())).heard_s < oldest_s:
            self._forget(next(iter(self._served)))

    def _forget(self, request_id: str) -> None:
        """The sequence has ended, or is given up. Its output helps the next ones of its tenant."""
        served = self._drop(request_id)
        if served is None:
            return
        known = served.known
        first = max(known.num_prompt - CONTEXT_TOKENS, 0)
        self._ended.append(_Ended(request_id, known.group, known.token_ids[first:], known.num_prompt - first))
        self._wake.set()
        record_span(
            "draft",
            served.since_unix_s,
            time.time(),
            context=served.trace,
            attributes={attr.REQUEST_ID: request_id, attr.DRAFTED_TOKENS: served.proposed},
        )
        if self._draft_model is not None:
            self._draft_model.forget(request_id)

    def _remember_part(self) -> None:
        """Of one output; the next part in the next turn."""
        if not self._ended:
            return
        request_id, group, token_ids, start = self._ended.popleft()
        stop = start + REMEMBER_TOKENS
        with self._harmless(request_id):
            self._outputs.add(group, token_ids[start:stop], token_ids[max(start - CONTEXT_TOKENS, 0) : start])
            if stop < len(token_ids):
                self._ended.appendleft(_Ended(request_id, group, token_ids, stop))
        if self._ended:
            self._wake.set()

    def _drop(self, request_id: str) -> _Served | None:
        served = self._served.pop(request_id, None)
        if served is not None:
            self._num_tokens -= len(served.known.token_ids)
        return served


def _is_proposal_subject(subject: str) -> bool:
    """Whether this is how a decode worker's subject is called, with nothing in it that NATS could misread."""
    try:
        return subject == proposal_subject(decode_token(subject.rpartition(".")[2]))
    except ValueError:
        return False
