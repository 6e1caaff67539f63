"""One picture of a stack from two sources: what the supervisor knows of processes, what instances say of themselves.

The supervisor alone knows the dead, the statuses alone know load; instances started elsewhere have only a status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from services.cli.log_files import last_complaint
from services.cli.spec import SERVERS, START_ORDER, stage_of
from services.cli.supervisor import ProcessInfo
from shared.protocol.status import InstanceStatus

SILENT_AFTER_S = 60.0
"""A process that has run for this long without announcing itself is not just starting."""

ERROR_SHOWN_S = 600.0
"""What went wrong longer ago has mended itself since."""

_DIED = ("Exited too quickly", "Bad exit code")
"""All that the supervisor can say of a process that started; its log says more."""

_PROCESS_STATES: Final = {
    "BACKOFF": "restarting",
    "FATAL": "failed",
    "EXITED": "exited",
    "STOPPED": "drained",
    "STOPPING": "stopping",
}


class Row(msgspec.Struct, frozen=True):
    """One instance or server. States: ready, starting, draining, stopping, drained, silent, restarting, failed, exited.

    A drained instance stays down until it is started again; of a server that is "stopped".
    `status` is None for servers and for instances that do not announce themselves (yet).
    """

    name: str
    stage: str
    state: str
    pid: int
    up_since_unix_s: float
    last_error: str
    status: InstanceStatus | None

    @property
    def live(self) -> bool:
        return self.state == "ready"


def merge(
    processes: Mapping[str, ProcessInfo], statuses: Sequence[InstanceStatus], now_unix_s: float, logs: Path
) -> list[Row]:
    """Rows in the order of the pipeline. What a former run of an instance said is not taken for the present."""
    told = {status.instance: status for status in statuses}
    rows = [_supervised(info, told.pop(info.name, None), now_unix_s, logs) for info in processes.values()]
    rows += [_foreign(status, now_unix_s) for status in told.values()]
    order: dict[str, int] = {name: position for position, name in enumerate((*SERVERS, *START_ORDER))}
    return sorted(rows, key=lambda row: (order.get(row.stage, len(order)), len(row.name), row.name))


def _supervised(info: ProcessInfo, status: InstanceStatus | None, now_unix_s: float, logs: Path) -> Row:
    if status is not None and status.pid != info.pid:
        status = None
    state = _PROCESS_STATES.get(info.state) or _live_state(info, status, now_unix_s)
    if info.name in SERVERS and state == "drained":
        state = "stopped"
    log = logs / f"{info.name}.log"
    last_error = _recent_error(status, now_unix_s) if status is not None else ""
    if state in ("restarting", "failed", "exited", "silent"):
        unsaid = not info.spawn_error or info.spawn_error.startswith(_DIED)
        last_error = last_complaint(log) if unsaid else info.spawn_error
    return Row(
        name=info.name,
        stage=stage_of(info.name),
        state=state,
        pid=info.pid,
        up_since_unix_s=float(info.start_unix_s) if info.pid else 0.0,
        last_error=last_error,
        status=status,
    )


def _recent_error(status: InstanceStatus, now_unix_s: float) -> str:
    """An instance tells its last error for ever: shown with its age, then not any more."""
    if not status.last_error or not status.last_error_unix_s:
        return status.last_error
    age_s = max(now_unix_s - status.last_error_unix_s, 0.0)
    if age_s > ERROR_SHOWN_S:
        return ""
    age = f"{age_s:.0f} s" if age_s < 60 else f"{age_s / 60:.0f} min"
    return f"{status.last_error} ({age} ago)"


def _live_state(info: ProcessInfo, status: InstanceStatus | None, now_unix_s: float) -> str:
    if info.name in SERVERS:
        return "ready" if info.state == "RUNNING" else "starting"
    if status is not None:
        return status.state
    return "silent" if now_unix_s - info.start_unix_s > SILENT_AFTER_S else "starting"


def _foreign(status: InstanceStatus, now_unix_s: float) -> Row:
    return Row(
        name=status.instance,
        stage=status.stage,
        state=status.state,
        pid=status.pid,
        up_since_unix_s=status.started_unix_s,
        last_error=_recent_error(status, now_unix_s),
        status=status,
    )
