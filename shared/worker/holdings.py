"""The requests that this worker holds: claiming them, renewing them, losing them, giving them back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from shared.bus import RENEW_S, AppendRefused, Bus, BusError, Delivery, LogState, RequestLog, RequestUnknown
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Claimed, Ended, ErrorInfo, HandedBack, Usage
from shared.telemetry.metrics import QueueMetrics
from shared.worker.takeover import Decision, decide

HOLDER_WAIT_S = 1.0
"""A delivery whose holder is alive comes back after this long."""

HOLDER_FRESH_S = 2.5
"""A holder that has not said for this long that it holds the request counts as gone."""

MAX_REQUEST_ID_CHARS = 256
CLAIM_PATIENCE_S = 5.0
HAND_BACK_PATIENCE_S = 1.0

MESSAGES = {
    "queue_timeout": "no {stage} worker took the request before its queue deadline",
    "deadline_exceeded": "the request's deadline passed before it was finished",
    "worker_crashed": "the request was given up: every worker that took it ended without writing a token",
}

log = structlog.get_logger(__name__)

StopReason = Literal["ended", "drain"]


class Unservable(Exception):
    """No worker of this stage can ever serve the request; it ends with this message and `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Holding:
    """A claimed request. `state` is the log as it stood at the claim; `log` appends under the claim's epoch."""

    request: GenerationRequest
    delivery: Delivery
    log: RequestLog
    state: LogState
    epoch: int
    claimed_unix_s: float
    task: asyncio.Task[None] | None = None
    stop_reason: StopReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def stop(self, reason: StopReason) -> None:
        """Interrupt the work on it; the serving task cleans up and settles the delivery by the reason."""
        if self.stop_reason is None and self.task is not None and not self.task.done():
            self.stop_reason = reason
            self.task.cancel()


class Holdings:
    """Owner of all holdings of one worker of one stage.

    `stalled` tells that the engine hangs: such a worker renews nothing and claims nothing. `on_dropped` is told the id
    of each request that ended elsewhere, so that what it left behind can be freed.
    """

    def __init__(
        self,
        bus: Bus,
        stage: Literal["prefill", "decode"],
        worker: str,
        metrics: QueueMetrics,
        *,
        stalled: Callable[[], bool],
        on_dropped: Callable[[str], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._stage: Literal["prefill", "decode"] = stage
        self._worker = worker
        self._metrics = metrics
        self._stalled = stalled
        self._on_dropped = on_dropped
        self._held: dict[str, Holding] = {}
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def ids(self) -> list[str]:
        """For the status: empty when the engine hangs, so that others do not wait for this worker."""
        return [] if self._stalled() else list(self._held)

    async def take(self, delivery: Delivery, request: GenerationRequest, assumed: LogState) -> Holding | None:
        """Claim a delivered request, or settle its delivery when there is nothing to claim.

        `assumed` is how the log stood when the work was published. A first delivery is claimed on it without reading;
        all else is decided by what the log says, since a restarted NATS server counts deliveries from one again.
        Raises BusError when NATS is away: the delivery then comes again by itself.
        """
        state = assumed if delivery.num_delivered == 1 else None
        while True:
            on_assumption = state is not None
            if state is None:
                try:
                    state = await self._bus.open_log(request.tenant, request.request_id).state()
                except RequestUnknown:
                    log.error("request_without_log", request_id=request.request_id)
                    await delivery.ack()
                    return None
            decision = self._decide(state, request)
            if on_assumption and decision.action != "claim":
                state = None
                continue
            try:
                if decision.action == "claim":
                    return await self._claim(delivery, request, state)
                return await self._settle(delivery, request, state, decision)
            except AppendRefused:
                state = None  # somebody wrote since: look again

    def _decide(self, state: LogState, request: GenerationRequest) -> Decision:
        holder = state.holder
        return decide(
            state,
            stage=self._stage,
            worker=self._worker,
            held_here=request.request_id in self._held,
            holder_alive=holder is not None
            and self._bus.statuses.holder_alive(holder.worker, request.request_id, HOLDER_FRESH_S),
            now_unix_s=time.time(),
            queue_deadline_unix_s=request.queue_deadline_unix_s,
            deadline_unix_s=request.deadline_unix_s,
        )

    async def _claim(self, delivery: Delivery, request: GenerationRequest, state: LogState) -> Holding:
        """Raises AppendRefused when the log has grown since."""
        request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
        claim = Claimed(epoch=state.epoch + 1, stage=self._stage, worker=self._worker, at_unix_s=round(time.time(), 6))
        await request_log.append(claim, patience_s=CLAIM_PATIENCE_S)
        self._metrics.claims.inc()
        if delivery.num_delivered > 1:
            self._metrics.redeliveries.inc()
        log.info(
            "request_claimed",
            request_id=request.request_id,
            epoch=claim.epoch,
            delivery=delivery.num_delivered,
            resumed_tokens=len(state.output_ids),
        )
        return self._hold(Holding(request, delivery, request_log, state, claim.epoch, claim.at_unix_s))

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
                await delivery.give_back(HOLDER_WAIT_S)
            case "too_late" | "give_up":
                await self._end_at(state, request, decision)
                await delivery.ack()
                await self._on_dropped(request.request_id)
            case "hand_on":
                request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
                return self._hold(Holding(request, delivery, request_log, state, state.epoch, time.time()))
            case "claim":
                raise AssertionError("claims are not settled here")
        return None

    async def _end_at(self, state: LogState, request: GenerationRequest, decision: Decision) -> None:
        """End a request that nobody works on, if its log still stands at `state`. Raises AppendRefused."""
        ended = self._ended_with_error(request, state.epoch, len(state.output_ids), decision.reason)
        await self._bus.open_log(request.tenant, request.request_id, state.last_seq).append(ended)
        await self._bus.broadcast_cancel(request.request_id)
        log.warning("request_ended", request_id=request.request_id, code=decision.reason)
        if decision.action == "give_up":
            await self._bus.bury(self._stage, request, decision.reason)

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

        Returned: ack. Refused append: somebody else holds it, touch nothing. Stopped because it ended elsewhere: drop.
        Stopped by a drain: `hand_all_back` has settled it. Any other failure: give back with a delay; claims without
        progress bound the repeats. Raises BusError when NATS is away at the end; redelivery settles it then.
        """
        try:
            await self._run(holding, work)
        except AppendRefused as error:
            self._metrics.lost.inc()
            log.warning("request_lost", request_id=holding.request_id, epoch=holding.epoch, reason=str(error))
            if await self._has_ended(holding):
                await holding.delivery.drop()
                await self._on_dropped(holding.request_id)
        except asyncio.CancelledError:
            if holding.stop_reason is None:
                raise
            if holding.stop_reason == "ended":
                await holding.delivery.drop()
                await self._on_dropped(holding.request_id)
        finally:
            if self._held.get(holding.request_id) is holding:
                del self._held[holding.request_id]
            self._freed.set()

    async def _run(self, holding: Holding, work: Callable[[Holding], Awaitable[None]]) -> None:
        request = holding.request
        try:
            async with asyncio.timeout(max(request.deadline_unix_s - time.time(), 0.0)) as deadline:
                await work(holding)
            await holding.delivery.ack()
        except AppendRefused:
            raise
        except Unservable as error:
            usage = Usage(len(request.prompt_ids), len(holding.state.output_ids))
            info = ErrorInfo(message=str(error), type="invalid_request_error", code=error.code)
            await holding.log.append(Ended(epoch=holding.epoch, reason="error", usage=usage, error=info))
            await holding.delivery.ack()
            await self._on_dropped(holding.request_id)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                ended = self._ended_with_error(request, holding.epoch, 0, "deadline_exceeded")
                await self._bus.end_request(request.tenant, holding.request_id, ended)
                await holding.delivery.ack()
                await self._on_dropped(holding.request_id)
            else:
                log.exception("request_failed_here", request_id=holding.request_id, epoch=holding.epoch)
                await holding.delivery.give_back(HOLDER_WAIT_S)

    async def _has_ended(self, holding: Holding) -> bool:
        try:
            last = await self._bus.open_log(holding.request.tenant, holding.request_id).last()
        except BusError as error:
            log.warning("log_unchecked", request_id=holding.request_id, error=str(error))
            return False
        return isinstance(last.record, Ended)

    async def wait_freed(self, timeout_s: float) -> None:
        """Until a holding ends, at most `timeout_s`."""
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._freed.wait()

    async def renew_forever(self) -> None:
        """Renew each delivery while the engine makes progress. Run as a task of the worker."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._stalled():
                continue
            for holding in list(self._held.values()):
                await holding.delivery.renew()

    async def on_cancel(self, request_id: str) -> None:
        """A hint says that the request has ended; for a holding the log decides, for others it frees leftovers."""
        holding = self._held.get(request_id)
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            log.warning("cancel_hint_unusable", characters=len(request_id))
        elif holding is None:
            await self._on_dropped(request_id)
        elif await self._has_ended(holding):
            holding.stop("ended")

    async def hand_all_back(self) -> list[asyncio.Task[None]]:
        """Drain: hand all work to other workers at once, then interrupt it; the tasks that still clean up.

        The messages go back before the clean-up, which may take a while: appends that are still under way are refused
        or come before the next claim, as for any holder that is overtaken.
        """
        holdings = list(self._held.values())
        self._held.clear()
        await self._bus.announce_now()  # so that nobody waits for this worker as a living holder
        await asyncio.gather(*(self._hand_back(holding) for holding in holdings))
        return [holding.task for holding in holdings if holding.task is not None]

    async def _hand_back(self, holding: Holding) -> None:
        request_log = self._bus.open_log(holding.request.tenant, holding.request_id)
        try:
            last = await request_log.last()
            if not isinstance(last.record, Ended):
                request_log.last_seq = last.seq
                await request_log.append(
                    HandedBack(holding.epoch, self._stage, self._worker), patience_s=HAND_BACK_PATIENCE_S
                )
        except BusError as error:  # the claim then counts as one that made no progress
            log.warning("hand_back_unrecorded", request_id=holding.request_id, error=str(error))
        await holding.delivery.give_back()
        holding.stop("drain")
