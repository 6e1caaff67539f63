"""The one table of JetStream streams. `shared.bus` creates them from it; nothing else declares a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from shared.protocol.subjects import PRIORITIES, Priority

GIB: Final = 1 << 30
MIB: Final = 1 << 20


class StreamSpec(msgspec.Struct, frozen=True):
    """One stream. Work queues refuse new messages when full; the log drops the oldest, which admission prevents.

    `adjustable`: `max_msgs` is what a new stream begins with; gateways set it, and nobody else sets it back.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    max_bytes: int
    max_age_s: float
    max_msgs: int = -1
    adjustable: bool = False
    max_msgs_per_subject: int = -1
    discard: Literal["new", "old"] = "new"
    discard_new_per_subject: bool = False
    allow_direct: bool = False
    republish: tuple[str, str] | None = None


def _requests(priority: Priority) -> StreamSpec:
    return StreamSpec(
        name=f"HR_REQ_{priority.upper()}",
        subjects=(f"hr.req.*.{priority}.>",),
        retention="workqueue",
        max_bytes=128 * MIB,
        max_age_s=3 * 3600,
        max_msgs=1024,
        adjustable=True,
        max_msgs_per_subject=1,
        discard_new_per_subject=True,
        allow_direct=True,
    )


REQUESTS: Final[Mapping[Priority, StreamSpec]] = {priority: _requests(priority) for priority in PRIORITIES}
"""One stream for each priority, so that each has a limit that the queue itself keeps, over all gateways."""

JOBS: Final = StreamSpec(
    name="HR_JOB",
    subjects=("hr.job.>",),
    retention="workqueue",
    max_bytes=512 * MIB,
    max_age_s=3 * 3600,
    max_msgs=4096,
    max_msgs_per_subject=1,
    discard_new_per_subject=True,
    allow_direct=True,
)
LOG: Final = StreamSpec(
    name="HR_LOG",
    subjects=("hr.tok.>",),
    retention="limits",
    max_bytes=GIB,
    max_age_s=4 * 3600,
    discard="old",
    allow_direct=True,
    republish=("hr.tok.>", "hr.live.>"),
)
DEAD: Final = StreamSpec(
    name="HR_DEAD",
    subjects=("hr.dead.>",),
    retention="limits",
    max_bytes=64 * MIB,
    max_age_s=7 * 86400,
    discard="old",
)

STREAMS: Final[tuple[StreamSpec, ...]] = (*REQUESTS.values(), JOBS, LOG, DEAD)

SINGLE_REQUESTS: Final = "HR_REQ"
"""Where an earlier version kept requests of all priorities; see `shared.bus.upgrade`."""
