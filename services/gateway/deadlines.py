"""When a request must be ended for taking too long, and what to say about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.errors import SERVER
from shared.protocol.records import ErrorInfo
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Stage

Overdue = Literal["queue", "total"]


@dataclass
class Deadlines:
    """Two moments in Unix seconds. `queue_unix_s` is None once a worker took the request, or where it is not known."""

    total_unix_s: float
    queue_unix_s: float | None = None

    def overdue(self, now_unix_s: float) -> Overdue | None:
        if now_unix_s >= self.total_unix_s:
            return "total"
        if self.queue_unix_s is not None and now_unix_s >= self.queue_unix_s:
            return "queue"
        return None

    def next_unix_s(self) -> float:
        return min(self.total_unix_s, self.queue_unix_s or self.total_unix_s)


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
