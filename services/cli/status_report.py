"""`headrace status`: gathers the picture over NATS and from the supervisor, and prints it as a table or as JSON."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.cli.overview import Row, merge
from services.cli.spec import START_ORDER, StackSpec
from services.cli.supervisor import ProcessInfo
from shared.bus import Bus, BusError
from shared.protocol.subjects import STATUS_PING

_NATS_WAIT_S = 2.0
_ANSWER_S = 1.2
"""Instances announce themselves each second and when asked."""
_POLL_S = 0.02
_ALWAYS = ("running", "slots", "blocks_total", "blocks_used", "transport")
"""Of each instance in the JSON, whether it has told them or not."""


class Report(msgspec.Struct, frozen=True):
    """What `status --json` prints. `queue_depth` is of stages that pull work; `problem` says why NATS told nothing."""

    model: str
    url: str
    nats_url: str
    supervisor_pid: int
    problem: str
    queue_depth: dict[str, int]
    rows: list[Row]


async def gather(
    nats_url: str, spec: StackSpec | None, processes: dict[str, ProcessInfo], supervisor_pid: int, logs: Path
) -> Report:
    """Ask all instances. A missing NATS server is part of the report, not an error."""
    statuses, depth, problem, model = [], {}, "", spec.model if spec else ""
    try:
        async with await Bus.connect(nats_url, name="status", wait_s=_NATS_WAIT_S) as bus:
            await bus.client.publish(STATUS_PING, b"")
            expected = {name for name, info in processes.items() if info.pid and name not in ("nats", "valkey")}
            deadline = time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
                if expected and expected <= {status.instance for status in bus.statuses.live()}:
                    break
            statuses = bus.statuses.live()
            models = {status.model for status in statuses if status.model and status.stage != "draft"}
            model = ", ".join(sorted(models)) or model
            for stage in ("prefill", "decode"):
                depth[stage] = sum([await bus.queue_depth(stage, name) for name in models])
    except BusError as error:
        problem = str(error)
    return Report(
        model=model,
        url=spec.gateway_url() if spec else "",
        nats_url=re.sub(r"//[^@/]*@", "//", nats_url),
        supervisor_pid=supervisor_pid,
        problem=problem,
        queue_depth=depth,
        rows=merge(processes, statuses, time.time(), logs),
    )


def as_json(report: Report) -> str:
    """Per stage, so that scripts can say `.stages.decode.instances[0].running`."""
    stages = {
        stage: {
            "queue_depth": report.queue_depth.get(stage),
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
        "instance": row.name,
        "state": row.state,
        "pid": row.pid or None,
        "up_since_unix_s": row.up_since_unix_s or None,
        "last_error": row.last_error,
    }


def print_table(report: Report, console: Console) -> None:
    console.print(status_table(report.rows, report.queue_depth))
    if report.problem:
        console.print(f"NATS: {report.problem}", style="red", markup=False)
    if report.url:
        console.print(f"{report.model} at {report.url}", markup=False)


def status_table(rows: list[Row], queue_depth: dict[str, int]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("instance", "state", "up since", "queue", "running", "blocks", "transport"):
        table.add_column(column, no_wrap=True)
    table.add_column("last error", overflow="fold")
    stage = ""
    for row in rows:
        depth = queue_depth.get(row.stage) if row.stage != stage else None
        stage = row.stage
        table.add_row(row.name, *_cells(row, depth), style="" if row.state == "ready" else _style(row.state))
    return table


def _cells(row: Row, depth: int | None) -> list[str]:
    status = row.status
    return [
        row.state,
        _clock(row.up_since_unix_s),
        "" if depth is None else str(depth),
        f"{status.running}/{status.slots}" if status and status.slots else str(status.running) if status else "",
        f"{status.blocks_used}/{status.blocks_total}" if status and status.blocks_total else "",
        status.transport if status else "",
        row.last_error.replace("[", r"\["),
    ]


def _clock(unix_s: float) -> str:
    """Time of day, with the date when it is not today's."""
    if not unix_s:
        return ""
    then, now = time.localtime(unix_s), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%d %b %H:%M", then)


def _style(state: str) -> str:
    return "yellow" if state in ("starting", "draining", "stopping") else "red"
