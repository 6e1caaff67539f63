"""Bugs of the kind that recovery code has, to be put into it one at a time: the simulation must find each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import shared.bus.follow
import shared.bus.log
import shared.worker.holdings
from services.decode.worker import DecodeWorker
from services.gateway.sweep import Sweep
from services.prefill.worker import PrefillWorker
from shared.bus import AppendRefused, Bus, Delivery, LogReader, LogState, RequestLog
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Ended
from shared.worker.holdings import Holding, Holdings
from shared.worker.owed import OwedHandBacks
from shared.worker.takeover import Decision, decide

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def appends_without_expected_sequence() -> contextlib.AbstractContextManager[Any]:
    return patch.object(shared.bus.log, "_HEADER_EXPECTED", "X-Ignored")


def appends_again_behind_whatever_is_there() -> contextlib.AbstractContextManager[Any]:
    """After an append whose answer was lost, it does not look whether the last record is its own."""

    async def is_last(self: RequestLog, data: bytes, give_up: float) -> bool:
        self.last_seq = (await self._last_raw())[0]
        return False

    return patch.object(RequestLog, "_is_last", is_last)


def takes_its_own_record_for_anothers() -> contextlib.AbstractContextManager[Any]:
    async def is_last(self: RequestLog, data: bytes, give_up: float) -> bool:
        return False

    return patch.object(RequestLog, "_is_last", is_last)


def acks_what_it_has_lost() -> contextlib.AbstractContextManager[Any]:
    run = Holdings._run

    async def run_and_ack(self: Holdings, holding: Holding, work: Any) -> None:
        try:
            await run(self, holding, work)
        except AppendRefused:
            await holding.delivery.ack()
            raise

    return patch.object(Holdings, "_run", run_and_ack)


def counts_crashes_by_deliveries() -> contextlib.AbstractContextManager[Any]:
    take = Holdings.take

    async def take_or_give_up(
        self: Holdings, delivery: Delivery, request: GenerationRequest, assumed: LogState
    ) -> Holding | None:
        if delivery.num_delivered >= 4:
            state = await self._bus.open_log(request.tenant, request.request_id).state()
            with contextlib.suppress(AppendRefused):
                return await self._settle(delivery, request, state, Decision("give_up", "worker_crashed"))
        return await take(self, delivery, request, assumed)

    return patch.object(Holdings, "take", take_or_give_up)


def believes_a_first_delivery() -> contextlib.AbstractContextManager[Any]:
    """The log is not read when the server says that it delivers for the first time, whatever the append says."""
    take = Holdings.take

    async def take_first(
        self: Holdings, delivery: Delivery, request: GenerationRequest, assumed: LogState
    ) -> Holding | None:
        if delivery.num_delivered == 1:
            try:
                return await self._claim(delivery, request, assumed, alone=False)
            except AppendRefused:
                await delivery.ack()  # somebody else was faster
                return None
        return await take(self, delivery, request, assumed)

    return patch.object(Holdings, "take", take_first)


def samples_logged_tokens_again() -> contextlib.AbstractContextManager[Any]:
    """A successor begins where prefill ended and not where the last holder did."""
    hold = Holdings._hold

    def hold_from_the_start(self: Holdings, holding: Holding) -> Holding:
        del holding.state.output_ids[1:]
        return hold(self, holding)

    return patch.object(Holdings, "_hold", hold_from_the_start)


def hands_back_what_is_anothers() -> contextlib.AbstractContextManager[Any]:
    return patch.object(shared.worker.holdings, "is_ours", lambda last, holding: True)


def forgets_what_it_could_not_hand_back() -> contextlib.AbstractContextManager[Any]:
    return patch.object(OwedHandBacks, "owe", lambda *claim, **more: None)


def runs_suspects_beside_others() -> contextlib.AbstractContextManager[Any]:
    def decide_never_busy(*args: Any, **facts: Any) -> Decision:
        return decide(*args, **{**facts, "busy": False})

    return patch.object(shared.worker.holdings, "decide", decide_never_busy)


def convicts_by_any_two_crashes() -> contextlib.AbstractContextManager[Any]:
    return patch("shared.worker.takeover.CONVICTED_AFTER", 0)


def acks_before_the_job_is_stored() -> contextlib.AbstractContextManager[Any]:
    hand_over = PrefillWorker._hand_over

    async def ack_and_hand_over(self: PrefillWorker, holding: Holding, *args: Any, **more: Any) -> None:
        await holding.delivery.drop()
        await hand_over(self, holding, *args, **more)

    return patch.object(PrefillWorker, "_hand_over", ack_and_hand_over)


def acks_before_the_terminal_record() -> contextlib.AbstractContextManager[Any]:
    end = DecodeWorker._end

    async def ack_and_end(self: DecodeWorker, holding: Holding, *args: Any, **more: Any) -> None:
        await holding.delivery.drop()
        await end(self, holding, *args, **more)

    return patch.object(DecodeWorker, "_end", ack_and_end)


def ends_what_has_ended() -> contextlib.AbstractContextManager[Any]:
    """Who cancels from outside does not look for a terminal record first."""
    state = RequestLog.state

    async def state_without_end(self: RequestLog) -> LogState:
        found = await state(self)
        found.ended = None
        return found

    end_request = Bus.end_request

    async def end_anyway(self: Bus, tenant: str, request_id: str, ended: Ended) -> bool:
        with patch.object(RequestLog, "state", state_without_end):
            return await end_request(self, tenant, request_id, ended)

    return patch.object(Bus, "end_request", end_anyway)


def readers_overlook_gaps() -> contextlib.AbstractContextManager[Any]:
    on_live = LogReader._on_live

    async def pretend(self: LogReader, message: Any) -> None:
        await on_live(self, message)
        seq, _, entry = self._live.pop()
        previous = self._live[-1][0] if self._live else self._last_seq
        self._live.append((seq, previous, entry))

    return patch.object(LogReader, "_on_live", pretend)


def readers_never_ask_after_silence() -> contextlib.AbstractContextManager[Any]:
    return patch.object(shared.bus.follow, "SILENCE_S", 3600.0)


def forgets_requests_without_work() -> contextlib.AbstractContextManager[Any]:
    """The sweep does not look for logs whose gateway died before it queued the work."""

    async def find_none(self: Sweep, queued: Any) -> None:
        return

    return patch.object(Sweep, "_find_orphans", find_none)


MUTANTS: tuple[Mutant, ...] = (
    appends_without_expected_sequence,
    appends_again_behind_whatever_is_there,
    takes_its_own_record_for_anothers,
    acks_what_it_has_lost,
    counts_crashes_by_deliveries,
    believes_a_first_delivery,
    samples_logged_tokens_again,
    hands_back_what_is_anothers,
    forgets_what_it_could_not_hand_back,
    runs_suspects_beside_others,
    convicts_by_any_two_crashes,
    acks_before_the_job_is_stored,
    acks_before_the_terminal_record,
    ends_what_has_ended,
    readers_overlook_gaps,
    readers_never_ask_after_silence,
    forgets_requests_without_work,
)

THEMES_OF_RARE: dict[Mutant, str] = {hands_back_what_is_anothers: "drains"}
"""Runs of which theme to look at for a mutant that does harm in one of hundreds only."""
