"""`headrace status`: gathers the picture over NATS and from the supervisor, and prints it as a table or as JSON."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from services.cli.dead_letters import count_dead
from services.cli.overview import Row, merge
from services.cli.roll_call import NATS_WAIT_S, call_roll
from services.cli.spec import START_ORDER, StackSpec
from services.cli.supervisor import ProcessInfo
from shared.bus import Bus, BusError
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import PRIORITIES, Priority, Stage

PULLING: Final[tuple[Stage, ...]] = ("prefill", "decode")
_ALWAYS = ("running", "slots", "blocks_total", "blocks_used", "blocks_evictable", "leases", "transport")
"""Of each instance in the JSON, whether it has told them or not."""


class Report(msgspec.Struct, frozen=True):
    """What `status --json` prints. `problem` says why NATS told nothing.

    `waiting` has, for each stage that pulls work, the requests in its queue by priority.
    """

    model: str
    url: str
    nats_url: str
    supervisor_pid: int
    problem: str
    waiting: dict[str, dict[Priority, int]]
    dead_letters: int
    rows: list[Row]

    def depth(self, stage: str) -> int | None:
        return sum(self.waiting[stage].values()) if stage in self.waiting else None


async def gather(
    nats_url: str, spec: StackSpec | None, processes: dict[str, ProcessInfo], supervisor_pid: int, logs: Path
) -> Report:
    """Ask all instances. A missing NATS server is part of the report, not an error."""
    statuses: list[InstanceStatus] = []
    waiting: dict[str, dict[Priority, int]] = {}
    dead, problem, model = 0, "", spec.model if spec else ""
    try:
        async with await Bus.connect(nats_url, name="status", wait_s=NATS_WAIT_S) as bus:
            statuses = await call_roll(bus, processes)
            models = {status.model for status in statuses if status.model and status.stage != "draft"}
            model = ", ".join(sorted(models)) or model
            waiting = {stage: await _waiting(bus, stage, models) for stage in PULLING}
            dead = await count_dead(bus)
    except BusError as error:
        problem = str(error)
    return Report(
        model=model,
        url=spec.gateway_url() if spec else "",
        nats_url=re.sub(r"//[^@/]*@", "//", nats_url),
        supervisor_pid=supervisor_pid,
        problem=problem,
        waiting=waiting,
        dead_letters=dead,
        rows=merge(processes, statuses, time.time(), logs),
    )


async def _waiting(bus: Bus, stage: Stage, models: Iterable[str]) -> dict[Priority, int]:
    return {p: sum([await bus.queue_depth(stage, model, p) for model in models]) for p in PRIORITIES}


def as_json(report: Report) -> str:
    """Per stage, so that scripts can say `.stages.decode.instances[0].running`."""
    stages = {
        stage: {
            "queue_depth": report.depth(stage),
            "waiting": report.waiting.get(stage),
            "instances": [_instance_json(row) for row in report.rows if row.stage == stage],
        }
        for stage in START_ORDER
    }
    servers = [_instance_json(row) for row in report.rows if row.stage not in START_ORDER]
    whole = {
        "model": report.model,
        "url": report.url,
        "nats_url": report.nats_url,
        "supervisor_pid": report.supervisor_pid or None,
        "problem": report.problem,
        "dead_letters": report.dead_letters,
        "stages": stages,
        "servers": servers,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()


def _instance_json(row: Row) -> dict[str, Any]:
    """What the instance says of itself, and over it what the supervisor knows better."""
    told: dict[str, Any] = {}
    if row.status is not None:
        told = msgspec.json.decode(msgspec.json.encode(row.status))
        told |= {field: getattr(row.status, field) for field in _ALWAYS}  # zeros are left out of a status
        del told["stage"]
    return {
        **dict.fromkeys(_ALWAYS),
        **told,
        "blocks_free": _free(row.status) if row.status is not None else None,
        "instance": row.name,
        "state": row.state,
        "pid": row.pid or None,
        "up_since_unix_s": row.up_since_unix_s or None,
        "last_error": row.last_error,
    }


def print_table(report: Report, console: Console) -> None:
    console.print(status_table(report.rows, report.waiting))
    if line := speculation_line(report.rows):
        console.print(line, markup=False)
    if report.dead_letters:
        what = "dead letter" if report.dead_letters == 1 else "dead letters"
        console.print(f"{report.dead_letters} {what}, see `headrace dead list`", style="yellow", markup=False)
    if report.problem:
        console.print(f"NATS: {report.problem}", style="red", markup=False)
    if report.url:
        console.print(f"{report.model} at {report.url}", markup=False)


def status_table(rows: list[Row], waiting: Mapping[str, Mapping[Priority, int]]) -> Table:
    """`waiting` of a stage stands beside its first instance; used, evictable and free blocks add up to all."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("instance", "state", "up since", "waiting", "running"):
        table.add_column(column, no_wrap=True)
    for column in ("used", "evictable", "free", "leases"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("transport", no_wrap=True)
    table.add_column("last error", overflow="fold")
    stage = ""
    for row in rows:
        queue = waiting.get(row.stage) if row.stage != stage else None
        stage = row.stage
        cells = [row.state, _clock(row.up_since_unix_s), "" if queue is None else _queue(queue), *_load(row.status)]
        error = row.last_error.replace("[", r"\[")
        table.add_row(row.name, *cells, error, style="" if row.live else _style(row.state))
    return table


def speculation_line(rows: Iterable[Row]) -> str:
    """What became of the drafts of all decode workers that run; empty while there is nothing to tell.

    `k` is how many drafted tokens a step of a sequence verifies now; of such steps a share had a proposal in time.
    Workers that ask no drafter now, as its guesses bring too little, are counted.
    """
    told = [row.status.details for row in rows if row.status is not None and "speculation" in row.status.details]
    if told and all(details["speculation"] == "off" for details in told):
        return "speculation: off"
    drafted, steps = _total(told, "drafted"), _total(told, "steps")
    if not drafted:
        return ""
    lengths = [length for details in told if isinstance(length := details.get("draft_length"), int | float)] or [0.0]
    names = sorted({name.removeprefix("drafted.") for details in told for name in details if "drafted." in name})
    drafters = [details["drafters"] for details in told if "drafters" in details]
    resting = drafters.count("resting")
    shares = [f"{name} {_total(told, f'drafted.{name}') / drafted:.0%}" for name in names]
    return (
        f"speculation: {_total(told, 'accepted') / drafted:.0%} of {drafted:.0f} drafted tokens accepted, "
        f"k {sum(lengths) / len(lengths):.1f}, proposals ready in {_total(told, 'ready') / max(steps, 1):.0%} of steps "
        f"({', '.join(shares)})"
        + (f"; drafters rest for {resting} of {len(drafters)} decode workers" if resting else "")
    )


def _total(told: Iterable[Mapping[str, float | str]], name: str) -> float:
    return sum(value for details in told if isinstance(value := details.get(name, 0), int | float))


def _queue(waiting: Mapping[Priority, int]) -> str:
    """`3`, or `3 (1 high, 2 low)` where they are not all of the usual priority."""
    kinds = [f"{count} {priority}" for priority, count in waiting.items() if count]
    total = sum(waiting.values())
    return str(total) if waiting["normal"] == total else f"{total} ({', '.join(kinds)})"


def _load(status: InstanceStatus | None) -> list[str]:
    if status is None:
        return [""] * 6
    blocks = [status.blocks_used - _reclaimable(status), status.blocks_evictable, _free(status)]
    return [
        f"{status.running}/{status.slots}" if status.slots else str(status.running),
        *(str(count) if status.blocks_total else "" for count in blocks),
        str(status.leases) if status.stage == "kvstore" else "",
        status.transport,
    ]


def _reclaimable(status: InstanceStatus) -> int:
    """Evictable blocks among those that are called used: a store counts all that it keeps, a worker what is held."""
    return status.blocks_evictable if status.stage == "kvstore" else 0


def _free(status: InstanceStatus) -> int:
    """Blocks that are empty."""
    return status.blocks_total - status.blocks_used - status.blocks_evictable + _reclaimable(status)


def _clock(unix_s: float) -> str:
    """Time of day, with the date when it is not today's."""
    if not unix_s:
        return ""
    then, now = time.localtime(unix_s), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%d %b %H:%M", then)


def _style(state: str) -> str:
    return "yellow" if state in ("starting", "draining", "stopping", "drained") else "red"
