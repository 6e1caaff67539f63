"""Ends instances in good order: SIGTERM, time to hand their work back, and a word on how each of them ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from services.cli.errors import SupervisorGone
from services.cli.home import Home
from services.cli.overview import Row
from services.cli.spec import StackSpec, number_of, parse_stage, stage_of
from services.cli.supervisor import Supervisor
from services.cli.supervisor_config import STOP_WAIT_S

_POLL_S = 0.05
_GRACE_S = 10.0
"""For the supervisor to kill what did not end by itself."""

WITHOUT: Final = {
    "prefill": "requests wait in the queue for its return",
    "decode": "requests wait in the queue for its return",
    "draft": "decode goes on without drafts",
    "kvstore": "decode workers compute each prompt again",
}


@dataclass(frozen=True)
class Ending:
    """How one instance ended. `exit_status` is negative after a signal; None when it did not run when it was asked."""

    name: str
    took_s: float
    exit_status: int | None

    @property
    def clean(self) -> bool:
        return self.exit_status in (0, None)

    def __str__(self) -> str:
        if self.exit_status is None:
            return f"{self.name} was not running"
        if self.exit_status < 0:
            return f"{self.name} was killed after {self.took_s:.1f} s (it has {STOP_WAIT_S} s to hand its work back)"
        return f"{self.name} ended in {self.took_s:.1f} s with exit status {self.exit_status}"


def drain(supervisor: Supervisor, names: Collection[str], ended: Callable[[Ending], None]) -> list[Ending]:
    """Stop instances together; `ended` is told of each as it ends. They stay down until somebody starts them.

    Raises SupervisorGone, also when one outlives SIGKILL.
    """
    began = time.monotonic()
    before = supervisor.processes()
    supervisor.begin_stop(names)
    endings: dict[str, Ending] = {}
    while len(endings) < len(set(names)):
        processes = supervisor.processes()
        took_s = time.monotonic() - began
        for name in sorted(set(names) - endings.keys()):
            info = processes.get(name)
            if info is None or info.down:
                ran = info is not None and name in before and bool(before[name].pid)
                endings[name] = Ending(name, took_s, info.exit_status if info is not None and ran else None)
                ended(endings[name])
        if took_s > STOP_WAIT_S + _GRACE_S:
            raise SupervisorGone(f"{', '.join(set(names) - endings.keys())} outlived SIGKILL; see `headrace status`")
        time.sleep(_POLL_S)
    return list(endings.values())


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
