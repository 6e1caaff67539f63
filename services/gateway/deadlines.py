"""When a request must be ended for taking too long, and what to say about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from services.gateway.errors import SERVER
from shared.protocol.deadlines import compute_deadline
from shared.protocol.records import Accepted, Claimed, ErrorInfo
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Stage

Overdue = Literal["queue", "total"]


@dataclass
class Deadlines:
    """Moments in Unix seconds by which one choice must have been taken by a worker, and must have ended.

    Its compute time counts from its first claim. `queue_unix_s` is None where it is not known, or was acted upon.
    """

    latest_unix_s: float
    queue_unix_s: float | None = None
    compute_timeout_s: float = 0.0
    first_claim_unix_s: float | None = None

    @classmethod
    def of(cls, accepted: Accepted, first_claim: Claimed | None) -> Self:
        return cls(
            accepted.deadline_unix_s,
            accepted.queue_deadline_unix_s or None,
            accepted.compute_timeout_s,
            first_claim.at_unix_s if first_claim is not None else None,
        )

    def claimed(self, claim: Claimed) -> bool:
        """Take note of a claim. Whether it was the first: later ones change nothing."""
        if self.first_claim_unix_s is not None:
            return False
        self.first_claim_unix_s = claim.at_unix_s
        return True

    @property
    def end_unix_s(self) -> float:
        return compute_deadline(self.latest_unix_s, self.compute_timeout_s, self.first_claim_unix_s)

    def overdue(self, now_unix_s: float) -> Overdue | None:
        if now_unix_s >= self.end_unix_s:
            return "total"
        if self._waits and now_unix_s >= (self.queue_unix_s or 0):
            return "queue"
        return None

    def next_unix_s(self) -> float:
        return min(self.end_unix_s, self.queue_unix_s or self.end_unix_s) if self._waits else self.end_unix_s

    @property
    def _waits(self) -> bool:
        return self.first_claim_unix_s is None and self.queue_unix_s is not None


def overdue_error(overdue: Overdue, stage: Stage, workers: Sequence[InstanceStatus], waited_s: float) -> ErrorInfo:
    """Why it took too long: `stage` is the one whose turn it was, `workers` its live instances for the model."""
    ready = [worker for worker in workers if worker.state == "ready"]
    if not ready:
        cause = f"no {stage} worker is running"
    elif overdue == "queue":
        cause = f"all {len(ready)} {stage} workers are busy"
    else:
        cause = f"the {stage} stage did not finish it"
    if overdue == "queue":
        return ErrorInfo(f"No worker took the request within {waited_s:.0f} s: {cause}.", SERVER, "queue_timeout")
    return ErrorInfo(f"The request was not finished within {waited_s:.0f} s: {cause}.", SERVER, "deadline_exceeded")
