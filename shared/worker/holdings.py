"""The requests that this worker holds: claiming them, renewing them, losing them, giving them back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog

from shared.bus import (
    RENEW_S,
    AppendRefused,
    Bus,
    BusError,
    Delivery,
    LogState,
    PublishFailed,
    RequestUnknown,
)
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Claimed, Ended, ErrorInfo, HandedBack, Usage
from shared.telemetry.metrics import QueueMetrics
from shared.worker.holding import Holding, StopReason, Unservable, WorkerUnfit, deadline_of, is_ours
from shared.worker.owed import OwedHandBacks
from shared.worker.takeover import Decision, WorkStage, crashed_claims, decide

HOLDER_WAIT_S = 1.0
"""A delivery whose holder is alive comes back after this long at most; sooner if its last word gets stale sooner."""

HOLDER_FRESH_S = 1.8
"""A holder that has not said for this long that it holds the request counts as gone."""

STALE_MARGIN_S = 0.05
"""How long after a holder's word has got stale its request is looked at again."""

SUSPECT_PATIENCE_S = 1.0
"""How long what runs here may go on beside a suspect that waits; it is handed back then."""

LET_GO_S = 4.0
"""How long the others are told what was handed back."""

FAILED_WAIT_S = 1.0
LOOK_S = 0.5
MAX_REQUEST_ID_CHARS = 256
CLAIM_PATIENCE_S = 5.0
HAND_BACK_PATIENCE_S = 1.0
HAND_BACK_TRIES = 3

MESSAGES = {
    "queue_timeout": "no {stage} worker took the request before its queue deadline",
    "deadline_exceeded": "the request's deadline passed before it was finished",
    "worker_crashed": "the request was given up: {stage} workers crashed each time they ran it, even alone",
}

__all__ = ["Holding", "Holdings", "Unservable"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Suspect:
    """A delivery that is kept, not yet claimed, until this worker serves nothing else."""

    request_id: str
    tenant: str
    delivery: Delivery
    since_s: float


class Holdings:
    """Owner of all holdings of one worker of one stage.

    `stalled` tells that the engine hangs: such a worker renews nothing and claims nothing. `on_dropped` is told the id
    of each request that ended elsewhere, so that what it left behind can be freed.
    """

    def __init__(
        self,
        bus: Bus,
        stage: WorkStage,
        worker: str,
        metrics: QueueMetrics,
        *,
        stalled: Callable[[], bool],
        on_dropped: Callable[[str], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._stage: WorkStage = stage
        self._worker = worker
        self._metrics = metrics
        self._stalled = stalled
        self._on_dropped = on_dropped
        self._held: dict[str, Holding] = {}
        self._claiming: set[str] = set()
        self._owed = OwedHandBacks(bus)
        self._cleaning: set[asyncio.Task[None]] = set()
        """Tasks of what was handed back, as long as they free what it used here."""
        self._let_go: dict[str, float] = {}
        """When what was handed back was."""
        self._suspect: Suspect | None = None
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def ids(self) -> list[str]:
        """For the status, what others have to leave to this worker: also what it claims just now, and what it has let
        go without saying so in the log. Empty when the engine hangs, so that others do not wait for this worker."""
        return [] if self._stalled() else list(dict.fromkeys([*self._held, *self._claiming, *self._owed]))

    def let_go(self) -> list[str]:
        """For the status, what another has to take: what was handed back a moment ago, or all when the engine hangs."""
        oldest_s = time.monotonic() - LET_GO_S
        self._let_go = {request_id: at_s for request_id, at_s in self._let_go.items() if at_s > oldest_s}
        return [*self._let_go, *(self._held if self._stalled() else ())]

    async def was_claimed(self, request: GenerationRequest, assumed: LogState) -> bool:
        """Whether somebody has claimed the request since its work was published, or nobody has to any more.

        Raises BusError.
        """
        try:
            state = await self._bus.open_log(request.tenant, request.request_id).state()
        except RequestUnknown:
            return True
        return state.epoch > assumed.epoch or state.ended is not None

    async def take(self, delivery: Delivery, request: GenerationRequest, assumed: LogState) -> Holding | None:
        """Claim a delivered request, or settle its delivery when there is nothing to claim.

        `assumed` is how the log stood when the work was published. A first delivery is claimed on it without reading;
        all else is decided by what the log says, since a restarted NATS server counts deliveries from one again. A
        hand-back that is owed to the log goes first, or this worker would take its own claim for a crash.
        Raises BusError when NATS is away: the delivery then comes again by itself.
        """
        state = assumed if delivery.num_delivered == 1 and request.request_id not in self._owed else None
        while True:
            on_assumption = state is not None
            if state is None:
                try:
                    await self._owed.settle(request.request_id)
                    state = await self._bus.open_log(request.tenant, request.request_id).state()
                except AppendRefused:
                    continue
                except RequestUnknown:
                    log.error("request_without_log", request_id=request.request_id)
                    await delivery.ack()
                    return None
            decision = self._decide(state, request)
            if on_assumption and decision.action != "claim":
                state = None
                continue
            try:
                if decision.action in ("claim", "claim_alone"):
                    return await self._claim(delivery, request, state, alone=decision.action == "claim_alone")
                return await self._settle(delivery, request, state, decision)
            except AppendRefused:
                state = None  # somebody wrote since: look again

    def _decide(self, state: LogState, request: GenerationRequest) -> Decision:
        return decide(
            state,
            stage=self._stage,
            worker=self._worker,
            held_here=request.request_id in self._held,
            holder_alive=self._holder_alive_s(state, request.request_id) > 0,
            busy=bool(self._held or self._cleaning),
            now_unix_s=time.time(),
            queue_deadline_unix_s=request.queue_deadline_unix_s,
            deadline_unix_s=deadline_of(request, state, None),
        )

    def _holder_alive_s(self, state: LogState, request_id: str) -> float:
        """For how long the holder's last word counts, from now on."""
        if state.holder is None:
            return 0.0
        holder = state.holder
        return self._bus.statuses.holder_alive_s(holder.worker, request_id, HOLDER_FRESH_S, holder.at_unix_s)

    async def _claim(self, delivery: Delivery, request: GenerationRequest, state: LogState, *, alone: bool) -> Holding:
        """Raises AppendRefused when the log has grown since.

        A status that is sent meanwhile names the request: one that was sent after the claim's time and does not name it
        says that this worker does not work on it.
        """
        request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
        self._claiming.add(request.request_id)
        claim = Claimed(state.epoch + 1, self._stage, self._worker, at_unix_s=round(time.time(), 6), alone=alone)
        try:
            await request_log.append(claim, patience_s=CLAIM_PATIENCE_S)
        except PublishFailed:  # it may be stored all the same, now or when NATS is back
            self._owed.owe(request.tenant, request.request_id, claim, behind_seq=state.last_seq)
            raise
        finally:
            self._claiming.discard(request.request_id)
        self._owed.forget(request.request_id)
        self._let_go.pop(request.request_id, None)
        self._metrics.claims.inc()
        if delivery.num_delivered > 1:
            self._metrics.redeliveries.inc()
        log.info(
            "request_claimed",
            request_id=request.request_id,
            epoch=claim.epoch,
            delivery=delivery.num_delivered,
            resumed_tokens=len(state.output_ids),
            alone=alone,
        )
        return self._hold(Holding(request, delivery, request_log, state, claim.epoch, claim.at_unix_s, alone))

    def _hold(self, holding: Holding) -> Holding:
        self._held[holding.request_id] = holding
        return holding

    async def _settle(
        self, delivery: Delivery, request: GenerationRequest, state: LogState, decision: Decision
    ) -> Holding | None:
        """All outcomes of a delivery but a claim; only `hand_on` leaves something to do. Raises AppendRefused."""
        match decision.action:
            case "drop_ended":
                await delivery.ack()
                await self._on_dropped(request.request_id)
            case "drop_handed_on":
                await delivery.ack()
            case "renew":
                self._held[request.request_id].delivery = delivery
                await delivery.renew()
            case "wait_for_holder":
                alive_s = self._holder_alive_s(state, request.request_id)
                await delivery.give_back(min(alive_s + STALE_MARGIN_S, HOLDER_WAIT_S))
            case "wait_for_turn":
                self._suspect = Suspect(request.request_id, request.tenant, delivery, time.monotonic())
                log.warning("suspect_waits", request_id=request.request_id, held=len(self._held))
            case "too_late" | "give_up":
                await self._end_at(state, request, decision)
                await delivery.ack()
                await self._on_dropped(request.request_id)
            case "hand_on":
                request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
                return self._hold(Holding(request, delivery, request_log, state, state.epoch, time.time()))
            case "claim" | "claim_alone":
                raise AssertionError("claims are not settled here")
        return None

    async def _end_at(self, state: LogState, request: GenerationRequest, decision: Decision) -> None:
        """End a request that nobody works on, if its log still stands at `state`. Raises AppendRefused.

        What is given up is buried first: a worker that dies in between leaves that to the next, which buries it once.
        """
        crashed = [claim.worker for claim in crashed_claims(state, self._stage)]
        if decision.action == "give_up":
            await self._bus.bury(self._stage, request, decision.reason, crashed)
        ended = self._ended_with_error(request, state.epoch, len(state.output_ids), decision.reason)
        request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
        await request_log.append(ended, patience_s=CLAIM_PATIENCE_S)  # redelivery settles what could not be told
        await self._bus.broadcast_cancel(request.request_id)
        log.warning("request_ended", request_id=request.request_id, code=decision.reason, crashed=crashed)

    def _ended_with_error(self, request: GenerationRequest, epoch: int, output_tokens: int, code: str) -> Ended:
        return Ended(
            epoch=epoch,
            reason="error",
            usage=Usage(len(request.prompt_ids), output_tokens),
            error=ErrorInfo(message=MESSAGES[code].format(stage=self._stage), code=code),
            by=self._worker,
        )

    async def serve(self, holding: Holding, work: Callable[[Holding], Awaitable[None]]) -> None:
        """Run `work` and settle the delivery by how it ends.

        Returned: ack. Refused append: somebody else holds it, touch nothing. Stopped: see `_settle_stopped`. NATS away
        for too long, or WorkerUnfit: hand back. Any other failure counts as a crash: give back with a
        delay. Raises BusError when NATS is away at the end; redelivery settles it then.
        """
        left_s = max(holding.deadline_unix_s - time.time(), 0.0)
        deadline = asyncio.get_running_loop().call_later(left_s, holding.stop, "deadline")
        try:
            await self._run(holding, work)
        except AppendRefused as error:
            self._metrics.lost.inc()
            log.warning("request_lost", request_id=holding.request_id, epoch=holding.epoch, reason=str(error))
            if await self._has_ended(holding.request.tenant, holding.request_id):
                await self._drop(holding)
        except asyncio.CancelledError:
            if holding.stop_reason is None:
                raise
            await self._settle_stopped(holding, holding.stop_reason)
        finally:
            deadline.cancel()
            if self._held.get(holding.request_id) is holding:
                del self._held[holding.request_id]
            self._freed.set()

    async def _run(self, holding: Holding, work: Callable[[Holding], Awaitable[None]]) -> None:
        try:
            try:
                await work(holding)
            finally:
                holding.working = False  # what settles it is not interrupted
            await holding.delivery.ack()
        except AppendRefused:
            raise
        except Unservable as error:
            usage = Usage(len(holding.request.prompt_ids), len(holding.state.output_ids))
            info = ErrorInfo(message=str(error), type="invalid_request_error", code=error.code)
            await holding.log.append(Ended(epoch=holding.epoch, reason="error", usage=usage, error=info))
            await holding.delivery.ack()
            await self._on_dropped(holding.request_id)
        except (PublishFailed, WorkerUnfit) as error:
            log.warning("request_handed_back", request_id=holding.request_id, error=str(error))
            await self._hand_back(holding)
        except Exception:
            log.exception("request_failed_here", request_id=holding.request_id, epoch=holding.epoch)
            await holding.delivery.give_back(FAILED_WAIT_S)

    async def _settle_stopped(self, holding: Holding, reason: StopReason) -> None:
        """Ended elsewhere: drop. Past its deadline: end it. Lost: it is another's now, touch nothing. Handed back:
        whoever stopped it has settled it."""
        request = holding.request
        match reason:
            case "ended":
                await self._drop(holding)
            case "deadline":
                ended = self._ended_with_error(request, holding.epoch, 0, "deadline_exceeded")
                await self._bus.end_request(request.tenant, request.request_id, ended)
                await holding.delivery.ack()
                await self._on_dropped(request.request_id)
            case "lost":
                self._metrics.lost.inc()
                log.warning("request_lost", request_id=request.request_id, epoch=holding.epoch, reason="taken over")

    async def _drop(self, holding: Holding) -> None:
        await holding.delivery.drop()
        await self._on_dropped(holding.request_id)

    async def _has_ended(self, tenant: str, request_id: str) -> bool:
        try:
            last = await self._bus.open_log(tenant, request_id).last()
        except (BusError, msgspec.DecodeError) as error:
            log.warning("log_unchecked", request_id=request_id, error=str(error))
            return False
        return isinstance(last.record, Ended)

    async def wait_freed(self, timeout_s: float) -> None:
        """Until a holding ends, at most `timeout_s`."""
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._freed.wait()

    async def renew_forever(self) -> None:
        """Renew each delivery while the engine makes progress, and record what is owed. Run as a task of the worker."""
        while True:
            await asyncio.sleep(RENEW_S)
            steps = [(request_id, self._owed.try_to_settle(request_id)) for request_id in self._owed]
            if not self._stalled():
                steps += [(holding.request_id, self._renew(holding)) for holding in self._held.values()]
                if self._suspect is not None:
                    steps.append((self._suspect.request_id, self._suspect.delivery.renew()))
            await asyncio.gather(*(self._apart(request_id, step) for request_id, step in steps))

    @staticmethod
    async def _apart(request_id: str, step: Awaitable[None]) -> None:
        """What goes wrong with one request must not end the renewals of the others."""
        try:
            await step
        except Exception:
            log.exception("renewal_failed", request_id=request_id)

    async def _renew(self, holding: Holding) -> None:
        """Renew what is still ours. A request that wrote nothing since the last time may have ended or been taken over
        meanwhile, at the latest while this process was paused: then its message is another's."""
        if holding.log.last_seq == holding.seen_seq and (reason := await self._gone(holding)) is not None:
            holding.stop(reason)
            return
        holding.seen_seq = holding.log.last_seq
        if self._held.get(holding.request_id) is holding:
            await holding.delivery.renew()

    async def _gone(self, holding: Holding) -> Literal["ended", "lost"] | None:
        """Why it is not ours any more. None when it is, or when nobody can tell now."""
        try:
            async with asyncio.timeout(LOOK_S):
                last = await self._bus.open_log(holding.request.tenant, holding.request_id).last()
        except (BusError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("log_unchecked", request_id=holding.request_id, error=str(error))
            return None
        if last.seq == holding.log.last_seq:
            return None  # our own, be it the end
        if isinstance(last.record, Ended):
            return "ended"
        return None if is_ours(last, holding) else "lost"

    async def on_cancel(self, request_id: str) -> None:
        """A hint says that the request has ended; whether it has, the log decides. What others left is no concern of
        this worker: stores free it, with proof."""
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            log.warning("cancel_hint_unusable", characters=len(request_id))
            return
        holding, suspect = self._held.get(request_id), self._suspect
        if holding is not None:
            if await self._has_ended(holding.request.tenant, request_id):
                holding.stop("ended")
        elif (
            suspect is not None
            and suspect.request_id == request_id
            and await self._has_ended(suspect.tenant, request_id)
            and self._suspect is suspect
        ):
            self._suspect = None
            await suspect.delivery.drop()
            await self._on_dropped(request_id)

    @property
    def exclusive(self) -> bool:
        """Whether nothing new may be started: a suspect waits for its turn here or has it and made no progress yet, or
        what was handed back still frees what it used, so that its request must not come in again."""
        unproven = any(h.alone and not h.log.wrote_tokens for h in self._held.values())
        return unproven or self._suspect is not None or bool(self._cleaning)

    async def suspects_turn(self) -> Delivery | None:
        """The suspect that waits, to be taken again, once nothing else is served here; after a while the rest is
        handed back for it. None while there is nothing to take."""
        suspect = self._suspect
        if suspect is None:
            return None
        if not self._held and not self._cleaning:
            self._suspect = None
            return suspect.delivery
        if self._held and time.monotonic() - suspect.since_s >= SUSPECT_PATIENCE_S:
            log.warning("room_for_suspect", request_id=suspect.request_id, handed_back=len(self._held))
            await self._hand_held_back()
        return None

    async def hand_all_back(self) -> list[asyncio.Task[None]]:
        """Drain: hand all work to other workers at once and interrupt it; the tasks that still clean up."""
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            await suspect.delivery.give_back()
        await self._hand_held_back()
        return list(self._cleaning)

    async def _hand_held_back(self) -> None:
        """The messages go back before the clean-up ends, which may take a while: appends that are still under way are
        refused or come before the next claim, as for any holder that is overtaken."""
        holdings = list(self._held.values())
        self._held.clear()
        self._let_go |= dict.fromkeys((holding.request_id for holding in holdings), time.monotonic())
        for holding in holdings:
            if holding.task is not None:
                self._cleaning.add(holding.task)
                holding.task.add_done_callback(self._cleaned)
            holding.stop("handed_back")
        await self._bus.announce_now()  # so that nobody waits for this worker as a living holder
        await asyncio.gather(*(self._hand_back(holding) for holding in holdings))

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        self._freed.set()

    async def _hand_back(self, holding: Holding) -> None:
        """Say in the log that the claim ended in good order, or owe it that word while NATS is away, and give the
        message back, unless another has it."""
        self._let_go[holding.request_id] = time.monotonic()
        request_log = self._bus.open_log(holding.request.tenant, holding.request_id)
        back = HandedBack(holding.epoch, self._stage, self._worker)
        try:
            for _ in range(HAND_BACK_TRIES):
                last = await request_log.last()
                if isinstance(last.record, Ended):
                    await self._drop(holding)
                    return
                if not is_ours(last, holding):
                    return
                request_log.last_seq = last.seq
                with contextlib.suppress(AppendRefused):  # our own last append may have come in between
                    await request_log.append(back, patience_s=HAND_BACK_PATIENCE_S)
                    break
        except (BusError, msgspec.DecodeError) as error:
            log.warning("hand_back_unrecorded", request_id=holding.request_id, error=str(error))
            if not holding.log.wrote_tokens:  # a claim that made progress counts as no crash anyway
                claim = Claimed(holding.epoch, self._stage, self._worker, holding.claimed_unix_s, holding.alone)
                self._owed.owe(holding.request.tenant, holding.request_id, claim)
        await holding.delivery.give_back()
