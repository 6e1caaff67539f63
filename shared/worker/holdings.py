"""The requests that this worker holds: taking them from the queue, renewing them, losing them, giving them back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import nats.errors
import structlog

from shared.bus import (
    RENEW_S,
    AppendRefused,
    Bus,
    BusError,
    Delivery,
    LogState,
    RequestLog,
    RequestUnknown,
)
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Claimed, Ended, ErrorInfo, Usage
from shared.telemetry.metrics import QueueMetrics
from shared.worker.takeover import Decision, decide

HOLDER_WAIT_S = 1.0
"""A delivery whose holder is alive comes back after this long."""

HOLDER_FRESH_S = 2.5
"""A holder that has not said for this long that it holds the request counts as gone."""

STALLED_S = 10.0
"""A worker whose engine made no turn for this long stops renewing: its requests move on."""

log = structlog.get_logger(__name__)


class Unservable(Exception):
    """No worker of this stage can ever serve the request; it ends with this message and `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


StopReason = Literal["ended", "drain", "deadline"]


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

    `progress_unix_s` tells when the engine last made a turn: a hung engine renews nothing and claims nothing.
    `on_dropped` is told the id of each request that was found ended, so that what it left behind can be freed.
    """

    def __init__(
        self,
        bus: Bus,
        stage: Literal["prefill", "decode"],
        worker: str,
        metrics: QueueMetrics,
        progress_unix_s: Callable[[], float],
        on_dropped: Callable[[str], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._stage: Literal["prefill", "decode"] = stage
        self._worker = worker
        self._metrics = metrics
        self._progress_unix_s = progress_unix_s
        self._on_dropped = on_dropped
        self._held: dict[str, Holding] = {}
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def ids(self) -> list[str]:
        """For the status: empty when the engine hangs, so that others do not wait for this worker."""
        return [] if self.stalled else list(self._held)

    @property
    def stalled(self) -> bool:
        return time.time() - self._progress_unix_s() > STALLED_S

    async def take(self, delivery: Delivery, request: GenerationRequest, assumed: LogState | None) -> Holding | None:
        """Claim a delivered request, or settle its delivery when there is nothing to claim.

        `assumed` is how the log stood when the work was published; a first delivery is claimed on it without reading.
        Raises BusError when NATS is away: the delivery then comes again by itself.
        """
        request_log = self._bus.open_log(request.tenant, request.request_id)
        state = assumed if delivery.num_delivered == 1 else None
        while True:
            if state is None:
                try:
                    state = await request_log.state()
                except RequestUnknown:
                    log.error("request_without_log", request_id=request.request_id)
                    await delivery.ack()
                    return None
            decision = self._decide(state, request)
            if decision.action != "claim":
                return await self._settle(delivery, request, state, decision)
            request_log.last_seq = state.last_seq
            claim = Claimed(
                epoch=state.epoch + 1, stage=self._stage, worker=self._worker, at_unix_s=round(time.time(), 6)
            )
            try:
                await request_log.append(claim)
            except AppendRefused:
                state = None  # somebody wrote since: look again
                continue
            break
        self._metrics.claims.inc()
        if delivery.num_delivered > 1:
            self._metrics.redeliveries.inc()
        holding = Holding(request, delivery, request_log, state, claim.epoch, claim.at_unix_s)
        self._held[request.request_id] = holding
        log.info(
            "request_claimed",
            request_id=request.request_id,
            epoch=claim.epoch,
            delivery=delivery.num_delivered,
            resumed_tokens=len(state.output_ids),
        )
        return holding

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

    async def _settle(
        self, delivery: Delivery, request: GenerationRequest, state: LogState, decision: Decision
    ) -> Holding | None:
        """All outcomes of a delivery but a claim. Only `hand_on` leaves something to do."""
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
                await self._end(request, decision)
                await delivery.ack()
                await self._on_dropped(request.request_id)
            case "hand_on":
                request_log = self._bus.open_log(request.tenant, request.request_id, state.last_seq)
                holding = Holding(request, delivery, request_log, state, state.epoch, time.time())
                self._held[request.request_id] = holding
                return holding
            case "claim":
                raise AssertionError("claims are not settled here")
        return None

    async def _end(self, request: GenerationRequest, decision: Decision) -> None:
        messages = {
            "queue_timeout": f"no {self._stage} worker took the request before its queue deadline",
            "deadline_exceeded": "the request's deadline passed before it was finished",
            "worker_crashed": "the request was given up: every worker that took it ended without writing a token",
        }
        ended = Ended(
            epoch=0,
            reason="error",
            usage=Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=0),
            error=ErrorInfo(message=messages[decision.reason], code=decision.reason),
            by=self._worker,
        )
        if await self._bus.end_request(request.tenant, request.request_id, ended):
            log.warning("request_ended", request_id=request.request_id, code=decision.reason)
        if decision.action == "give_up":
            await self._bus.bury(self._stage, request, decision.reason)

    async def serve(self, holding: Holding, work: Callable[[Holding], Awaitable[None]]) -> None:
        """Run `work` and settle the delivery by how it ends.

        Returned: ack. Refused append: somebody else holds it, touch nothing. Stopped: ack (ended elsewhere) or give
        back (drain). Any other failure: give back with a delay; claims without progress bound the repeats.
        """
        holding.task = asyncio.current_task()
        try:
            async with asyncio.timeout(max(holding.request.deadline_unix_s - time.time(), 0.0)) as deadline:
                await work(holding)
            await holding.delivery.ack()
        except Unservable as error:
            await self._append_error(holding, error.code, str(error))
            await holding.delivery.ack()
        except AppendRefused as error:
            self._metrics.lost.inc()
            log.warning("request_lost", request_id=holding.request_id, epoch=holding.epoch, reason=str(error))
        except asyncio.CancelledError:
            if holding.stop_reason == "ended":
                await holding.delivery.drop()
            elif holding.stop_reason == "drain":
                await holding.delivery.give_back()
            else:
                raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                await self._end(holding.request, Decision("too_late", "deadline_exceeded"))
                await holding.delivery.ack()
            else:
                log.exception("request_failed_here", request_id=holding.request_id, epoch=holding.epoch)
                await holding.delivery.give_back(HOLDER_WAIT_S)
        finally:
            self._held.pop(holding.request_id, None)
            self._freed.set()

    async def _append_error(self, holding: Holding, code: str, message: str) -> None:
        """End the request as its holder. Who was first, if not this worker, has ended or taken it."""
        usage = Usage(len(holding.request.prompt_ids), len(holding.state.output_ids))
        error = ErrorInfo(message=message, type="invalid_request_error", code=code)
        try:
            await holding.log.append(Ended(epoch=holding.epoch, reason="error", usage=usage, error=error))
        except AppendRefused as refused:
            log.warning("request_lost", request_id=holding.request_id, epoch=holding.epoch, reason=str(refused))

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
            if self.stalled:
                if self._held:
                    log.error("engine_stalled", held=len(self._held))
                continue
            for holding in list(self._held.values()):
                try:
                    await holding.delivery.renew()
                except nats.errors.Error as error:
                    log.warning("renewal_not_sent", request_id=holding.request_id, error=str(error))

    async def on_cancel(self, request_id: str) -> None:
        """A hint says that the request has ended; the log decides."""
        holding = self._held.get(request_id)
        if holding is None:
            return
        try:
            last = await self._bus.open_log(holding.request.tenant, request_id).last()
        except BusError as error:
            log.warning("cancel_hint_unchecked", request_id=request_id, error=str(error))
            return
        if isinstance(last.record, Ended):
            holding.stop("ended")

    async def give_all_back(self, within_s: float) -> None:
        """Drain: interrupt all work and hand it to other workers at once."""
        tasks = [h.task for h in self._held.values() if h.task is not None]
        for holding in list(self._held.values()):
            holding.stop("drain")
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
