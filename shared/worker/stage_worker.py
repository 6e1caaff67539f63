"""Pull, claim, serve, settle, drain: what prefill and decode workers do alike."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from shared.bus import Bus, BusError, ConnectionLost, Delivery, LogState, WorkQueue
from shared.engine.errors import EngineStopped
from shared.protocol.jobs import GenerationRequest
from shared.protocol.subjects import Stage
from shared.telemetry import attributes as attr
from shared.telemetry import extract_context, record_span, tracer
from shared.telemetry.metrics import QueueMetrics
from shared.worker.engine_host import EngineHost, most_held
from shared.worker.holding import Holding, WorkerUnfit
from shared.worker.holdings import HOLDER_FRESH_S, Holdings

PULL_WAIT_S = 0.5
RETRY_S = 0.25
NO_PLACE_S = 2 * RETRY_S
"""When a request comes again that was delivered where there was only place for others. By then the worker has looked
for these again."""

UNREADABLE_DELAY_S = 5.0
STALL_CHECK_S = 1.0
STALLED_EXIT_AFTER = 3
"""A worker whose engine made no turn for this many times `stall_s` ends itself, to be started again."""

INSIST_S = 0.5
"""How often what must end is cancelled again: a cancellation may get lost, see `Holding.stop`."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Work:
    """A delivery, read: the request, how its log stood when it was published, and what to do once it is claimed."""

    request: GenerationRequest
    assumed: LogState
    serve: Callable[[Holding], Awaitable[None]]


class OtherLayout(Exception):
    """The work was made by workers of other numerics; serving it could change the output."""


class StageWorker(ABC):
    """Owner of one process's side of a stage: its holdings and their tasks.

    State of a request lives in its log and its holding; a killed worker leaves nothing behind that another needs.
    """

    def __init__(
        self,
        stage: Literal["prefill", "decode"],
        bus: Bus,
        host: EngineHost,
        worker: str,
        metrics: QueueMetrics,
        *,
        slots: int,
        stall_s: float,
        drain_s: float,
        on_dropped: Callable[[str], Awaitable[None]],
    ) -> None:
        self._stage: Stage = stage
        self._bus = bus
        self._host = host
        self._queue_metrics = metrics
        self._slots = slots
        self._stall_s = stall_s
        self._drain_s = drain_s
        self.holdings = Holdings(bus, stage, worker, metrics, stalled=self.stalled, on_dropped=on_dropped)
        self.last_error = ""
        self.last_error_unix_s = 0.0

    @abstractmethod
    def _queue(self) -> WorkQueue:
        """Where this stage pulls."""

    @abstractmethod
    def _read(self, delivery: Delivery) -> Work:
        """Raises msgspec.DecodeError, or OtherLayout."""

    async def _may_pull(self) -> bool:
        """Whether there is room behind this stage. Raises BusError."""
        return True

    async def _prepare(self) -> None:  # noqa: B027 - most stages have nothing to prepare
        """Before the first pull."""

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside pulling, until the drain."""
        return []

    def stalled(self) -> bool:
        return time.time() - self._host.progress_unix_s > self._stall_s

    async def run(self, stop: asyncio.Event, draining: Callable[[], None]) -> None:
        """Serve until `stop`; then call `draining` and hand running work back, in `drain_s` at most."""
        queue = self._queue()
        if not await self._open(queue, stop):
            return
        await self._prepare()
        await self._bus.on_cancel(self.holdings.on_cancel)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work)
                for work in (self.holdings.renew_forever(), self._exit_when_hung(), *self._background())
            ]
            while not stop.is_set():
                await self._pull(queue, tasks)
            give_up = asyncio.get_running_loop().call_later(self._drain_s, _exit_now, "drain_took_too_long")
            try:
                draining()
                await self._drain(queue, background)
            finally:
                give_up.cancel()

    async def _open(self, queue: WorkQueue, stop: asyncio.Event) -> bool:
        """Try until it works; False when the worker is to stop before."""
        while not stop.is_set():
            try:
                await queue.open()
                return True
            except BusError as error:
                self._note("queue_not_opened", error)
                await asyncio.sleep(RETRY_S)
        return False

    async def _drain(self, queue: WorkQueue, background: list[asyncio.Task[None]]) -> None:
        left = {*background, *await self.holdings.hand_all_back()}
        await queue.close()
        while left:
            for task in background:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=INSIST_S)

    async def _pull(self, queue: WorkQueue, tasks: asyncio.TaskGroup) -> None:
        """One round: wait for a free slot, or for work."""
        if self.holdings.exclusive:
            await self._attend_suspect(tasks)
            return
        try:
            if self._host.fault or self.stalled():
                await self.holdings.wait_freed(RETRY_S)
                return
            free = self._slots - len(self.holdings)
            if free <= 0 or not await self._may_pull():
                await self._take_over(queue, tasks)
                await self.holdings.wait_freed(RETRY_S)
                return
            deliveries = await queue.pull(free, PULL_WAIT_S)
        except BusError as error:
            self._note("pull_failed", error)
            if self._bus.client.is_closed:
                raise ConnectionLost("NATS closed this connection for good; restart the service") from error
            await asyncio.sleep(RETRY_S)
            return
        for delivery in deliveries:
            if self.holdings.exclusive:
                await delivery.give_back()
            else:
                await self._take(delivery, tasks)

    async def _take_over(self, queue: WorkQueue, tasks: asyncio.TaskGroup) -> None:
        """Where there is no place for others: take what other workers have lost, as many as there are slots.

        Their clients have been waiting since, and all slots may be taken for long. JetStream delivers again before it
        delivers anything new, so a priority is left alone once something came that nobody had claimed. Raises BusError.
        """
        missing = self._bus.statuses.missing(self._stage, self._host.model.name, HOLDER_FRESH_S)
        most = min(len(self.holdings) + missing, most_held(self._slots))
        for priority in queue.priorities:
            while len(self.holdings) < most and not self.holdings.exclusive:
                delivery = await queue.pull_from(priority)
                if delivery is None or not await self._take(delivery, tasks, claimed_only=True):
                    break

    async def _attend_suspect(self, tasks: asyncio.TaskGroup) -> None:
        """One round while a request that may crash its worker waits for its turn, or has it: nothing else begins."""
        delivery = None if self._host.fault or self.stalled() else await self.holdings.suspects_turn()
        if delivery is None:
            await self.holdings.wait_freed(RETRY_S)
        else:
            await self._take(delivery, tasks)

    async def _take(self, delivery: Delivery, tasks: asyncio.TaskGroup, *, claimed_only: bool = False) -> bool:
        """Claim one delivery and serve it in a task of its own. Nothing that a message holds can end the worker.

        With `claimed_only` what nobody has claimed before is given back, which False tells.
        """
        try:
            work = self._read(delivery)
        except OtherLayout as error:
            self._note("layout_refused", error)
            await delivery.give_back(RETRY_S)
            return True
        except msgspec.DecodeError as error:
            self._note("work_unreadable", error)
            await self._bury_unreadable(delivery)
            return True
        try:
            if claimed_only and not await self.holdings.was_claimed(work.request, work.assumed):
                await delivery.give_back(NO_PLACE_S)
                return False
            holding = await self.holdings.take(delivery, work.request, work.assumed)
        except BusError as error:
            self._note("take_failed", error)
            return True
        except (msgspec.DecodeError, ValueError) as error:
            self._note("log_unreadable", error)
            await delivery.give_back(UNREADABLE_DELAY_S)
            return True
        if holding is not None:
            holding.task = tasks.create_task(self._serve(holding, work), name=holding.request_id)
        return True

    async def _serve(self, holding: Holding, work: Work) -> None:
        """Serve under a span that continues the request's trace."""
        request, delivery = holding.request, holding.delivery
        context = extract_context(delivery.headers)
        now = time.time()
        if holding.state.epoch == work.assumed.epoch:  # later waits include the earlier holder's work
            self._queue_metrics.queue_time.observe(max(now - delivery.published_unix_s, 0.0))
        record_span(
            f"queue.{self._stage}",
            delivery.published_unix_s,
            now,
            context=context,
            attributes={attr.REQUEST_ID: request.request_id, attr.DELIVERY: delivery.num_delivered},
        )
        with tracer().start_as_current_span(
            self._stage,
            context=context,
            attributes={
                attr.REQUEST_ID: request.request_id,
                attr.EPOCH: holding.epoch,
                attr.GEN_AI_REQUEST_MODEL: request.model,
                attr.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_ids),
                attr.RESUMED_TOKENS: len(holding.state.output_ids),
            },
        ):
            try:
                await self.holdings.serve(holding, lambda held: _blameless(work, held))
            except BusError as error:
                self._note("request_left_to_redelivery", error)
            except Exception as error:
                self._note("request_not_settled", error)
                log.exception("request_not_settled", request_id=request.request_id)

    async def _bury_unreadable(self, delivery: Delivery) -> None:
        try:
            await self._bus.bury_raw(f"hr.dead.{self._stage}.unreadable", delivery.data, "unreadable")
        except BusError as error:
            self._note("dead_letter_refused", error)
            await delivery.give_back(UNREADABLE_DELAY_S)
        else:
            await delivery.discard()

    async def _exit_when_hung(self) -> None:
        """A hung engine cannot be interrupted from inside its process, nor a dead or broken one mended.

        Silence is counted in checks, so that one that was paused with its whole process is not taken for hung.
        """
        told, silent_checks, progress = False, 0, self._host.progress_unix_s
        while True:
            await asyncio.sleep(STALL_CHECK_S)
            if self._host.fault:
                _exit_now(self._host.fault)
            silent_checks = silent_checks + 1 if self._host.progress_unix_s == progress else 0
            progress = self._host.progress_unix_s
            silent_s = silent_checks * STALL_CHECK_S
            if silent_s > STALLED_EXIT_AFTER * self._stall_s:
                _exit_now("engine_hangs", silent_s=silent_s)
            stalled = self.stalled()
            if stalled and not told:
                self._note("engine_stalled", RuntimeError(f"no step for {self._stall_s:.0f} s"))
            told = stalled

    def _note(self, event: str, error: Exception) -> None:
        self.last_error, self.last_error_unix_s = str(error), time.time()
        log.warning(event, stage=self._stage, error=str(error))


async def _blameless(work: Work, holding: Holding) -> None:
    """An engine that has stopped is no failure of the request that comes to it. Raises WorkerUnfit for it."""
    try:
        await work.serve(holding)
    except EngineStopped as error:
        raise WorkerUnfit(str(error)) from error


def _exit_now(event: str, **details: object) -> None:
    """End the process without clean-up, which would wait for what hangs; the requests' logs hold all that matters."""
    log.error(event, **details)
    os._exit(1)
