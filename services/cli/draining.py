"""Ends instances in good order: SIGTERM, time to hand their work back, and a word on how each of them ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from services.cli.errors import SupervisorGone
from services.cli.home import Home
from services.cli.overview import Row
from services.cli.spec import StackSpec, number_of, parse_stage, stage_of
from services.cli.supervisor import ProcessInfo, Supervisor

_POLL_S = 0.05

WITHOUT: Final = {
    "prefill": "requests wait in the queue for its return",
    "decode": "requests wait in the queue for its return",
    "draft": "decode goes on without drafts",
    "kvstore": "decode workers compute each prompt again",
}


@dataclass(frozen=True)
class Ending:
    """How one instance ended.

    `exit_status` is the signal's number below zero after a signal; None when it is not known, or when the instance did
    not run. `by_itself`: it had ended before it was asked to. `allowed_s` is what it had to hand its work back.
    """

    name: str
    took_s: float
    exit_status: int | None
    allowed_s: int
    by_itself: bool = False

    @property
    def clean(self) -> bool:
        """SIGTERM alone ends only what does not serve yet: a service takes its signals over before any work."""
        return self.exit_status == 0 if self.by_itself else self.exit_status in (0, None, -signal.SIGTERM)

    def __str__(self) -> str:
        if self.by_itself:
            return f"{self.name} had ended by itself before it was asked to, {_manner(self.exit_status)}"
        if self.exit_status is None:
            return f"{self.name} was not running"
        if self.exit_status == -signal.SIGTERM:
            return f"{self.name} was still starting and ended in {self.took_s:.1f} s"
        if self.exit_status < 0:
            return f"{self.name} was killed after {self.took_s:.1f} s (it has {self.allowed_s} s to hand its work back)"
        return f"{self.name} ended in {self.took_s:.1f} s with exit status {self.exit_status}"


def drain(supervisor: Supervisor, names: Collection[str], ended: Callable[[Ending], None]) -> list[Ending]:
    """Stop instances together; `ended` is told of each as it ends. They stay down until somebody starts them.

    Raises SupervisorGone, also when one outlives SIGKILL.
    """
    began = time.monotonic()
    left = set(names)
    before: dict[str, ProcessInfo] = {}
    own_ends: dict[str, int | None] = {}
    endings: list[Ending] = []
    while True:
        processes = supervisor.press_to_stop(left)
        before = before or processes
        took_s = time.monotonic() - began
        for name in sorted(left):
            first, info = before.get(name), processes.get(name)
            if first is not None and info is not None and _ended_by_itself(first, info):
                own_ends.setdefault(name, _own_status(info))
            if info is None or info.down:
                left.discard(name)
                ran = first is not None and info is not None and first.state != "STOPPED"
                status = own_ends.get(name, info.exit_status if info is not None and ran else None)
                endings.append(Ending(name, took_s, status, supervisor.stop_wait_s, by_itself=name in own_ends))
                ended(endings[-1])
        if not left:
            return endings
        if took_s > supervisor.stop_limit_s:
            raise SupervisorGone(f"{', '.join(sorted(left))} outlived SIGKILL; see `headrace status`")
        time.sleep(_POLL_S)


def _ended_by_itself(first: ProcessInfo, info: ProcessInfo) -> bool:
    """Whether a process has ended without being asked to, from a look at it now and the first one.

    The supervisor keeps what it knows of an unexpected end until the next start, which another process id tells of.
    """
    if first.state == "STOPPED":
        return False
    return info.state in ("EXITED", "BACKOFF") or bool(info.spawn_error) or info.pid not in (0, first.pid)


def _own_status(info: ProcessInfo) -> int | None:
    """The supervisor says 0, too, of what it could not start at all."""
    return None if info.pid or (info.spawn_error and not info.exit_status) else info.exit_status


def _manner(exit_status: int | None) -> str:
    if exit_status is None:
        return "nobody knows how"
    return f"by signal {-exit_status}" if exit_status < 0 else f"with exit status {exit_status}"


def faults(endings: Collection[Ending], home: Home) -> str:
    """One line on those that did not end with exit status 0; empty when all did."""
    bad = [ending for ending in endings if not ending.clean]
    logs = ", ".join(str(home.log_of(ending.name)) for ending in bad)
    return f"{'; '.join(map(str, bad))}; see {logs}" if bad else ""


def bereaved(rows: Collection[Row], names: Collection[str], spec: StackSpec) -> list[str]:
    """What it means that these instances go, where nothing else serves in their place."""
    lines = []
    for stage in dict.fromkeys(parse_stage(stage_of(name)) for name in names):
        if stage == "gateway":
            gone = [number_of(name) for name in names if stage_of(name) == stage and name in spec.instances(stage)]
            lines += [f"nobody answers at {spec.gateway_url(n)} until gateway-{n} returns" for n in gone]
        elif not any(row.stage == stage and row.live and row.name not in names for row in rows):
            lines.append(f"no other {stage} instance is live: {WITHOUT[stage]}")
    return lines
