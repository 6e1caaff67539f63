"""One request in a worker's hands: the claim it rests on, its deadline, and how the work on it is interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from shared.bus import Delivery, LogEntry, LogState, RequestLog
from shared.protocol.deadlines import compute_deadline
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Accepted

INSIST_S = 0.5

StopReason = Literal["ended", "deadline", "lost", "handed_back"]


class Unservable(Exception):
    """No worker of this stage can ever serve the request; it ends with this message and `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerUnfit(Exception):
    """This worker cannot go on, through no fault of the request; another one can."""


@dataclass
class Holding:
    """A claimed request. `state` is the log as it stood at the claim; `log` appends under the claim's epoch."""

    request: GenerationRequest
    delivery: Delivery
    log: RequestLog
    state: LogState
    epoch: int
    claimed_unix_s: float
    alone: bool = False
    """It may be what crashes its holders: nothing else runs here until it has made progress."""
    task: asyncio.Task[None] | None = None
    working: bool = True
    """Until the work on it has ended, in whatever way; the delivery is settled after that."""
    stop_reason: StopReason | None = None
    seen_seq: int = -1
    """Where its log stood when its delivery was renewed last."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def first_claim_unix_s(self) -> float:
        """When its compute time began."""
        return self.state.claims[0].at_unix_s if self.state.claims else self.claimed_unix_s

    @property
    def deadline_unix_s(self) -> float:
        return deadline_of(self.request, self.state, self.claimed_unix_s)

    def stop(self, reason: StopReason) -> None:
        """Interrupt the work on it; the serving task cleans up and settles the delivery by the reason."""
        if self.stop_reason is None and self.working and self.task is not None:
            self.stop_reason = reason
            self._interrupt()

    def _interrupt(self) -> None:
        """Until the work takes notice: asyncio.wait_for, on which nats-py waits, loses a cancellation that comes
        together with its result (Python 3.11)."""
        if self.working and self.task is not None and not self.task.done():
            self.task.cancel()
            asyncio.get_running_loop().call_later(INSIST_S, self._interrupt)


def deadline_of(request: GenerationRequest, state: LogState, claimed_unix_s: float | None) -> float:
    """When the request must have ended; its compute time began with its first claim, or begins with ours."""
    first = state.claims[0].at_unix_s if state.claims else claimed_unix_s
    return compute_deadline(request.deadline_unix_s, request.compute_timeout_s, first)


def is_ours(last: LogEntry, holding: Holding) -> bool:
    """Whether nobody has claimed the request since the holding's own claim."""
    return isinstance(last.record, Accepted) or last.record.epoch == holding.epoch
