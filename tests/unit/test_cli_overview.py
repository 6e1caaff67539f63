"""The merged picture of supervisor and statuses, the watch on instances that keep dying, and the status output."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from services.cli.overview import merge
from services.cli.readiness import MAX_DEATHS, DeathWatch
from services.cli.status_report import Report, as_json, print_table
from services.cli.supervisor import ProcessInfo
from shared.protocol.status import InstanceStatus

NOW = 1_000_000.0


def process(name: str, state: str = "RUNNING", pid: int = 10, start: int = int(NOW) - 5) -> ProcessInfo:
    return ProcessInfo(name, state, pid, start, 0, 0, "")


def status(instance: str, pid: int = 10, **fields: object) -> InstanceStatus:
    stage = instance.partition("-")[0]
    base = {"worker": f"{instance}.x", "host": "h", "started_unix_s": NOW, "sent_unix_s": NOW, "state": "ready"}
    return InstanceStatus(stage=stage, instance=instance, pid=pid, **{**base, **fields})  # type: ignore[arg-type]


def states(processes: list[ProcessInfo], statuses: list[InstanceStatus], logs: Path = Path("/none")) -> dict[str, str]:
    return {row.name: row.state for row in merge({p.name: p for p in processes}, statuses, NOW, logs)}


def test_a_running_process_is_ready_when_it_says_so_and_starting_until_then() -> None:
    assert states([process("decode-0")], [status("decode-0")]) == {"decode-0": "ready"}
    assert states([process("decode-0")], []) == {"decode-0": "starting"}
    assert states([process("decode-0")], [status("decode-0", state="draining")]) == {"decode-0": "draining"}


def test_what_a_killed_run_said_last_is_not_taken_for_its_successors_state() -> None:
    assert states([process("decode-0", pid=11)], [status("decode-0", pid=10)]) == {"decode-0": "starting"}


def test_a_process_that_never_announces_itself_is_silent_not_starting() -> None:
    assert states([process("decode-0", start=int(NOW) - 3600)], []) == {"decode-0": "silent"}


def test_the_dead_are_shown_with_the_last_complaint_of_their_log(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").write_text(
        '{"event": "load_failed", "level": "error", "why": "no memory"}\n{"event": "bye", "level": "info"}\n'
    )
    processes = {"decode-0": process("decode-0", "BACKOFF", pid=0)}
    (row,) = merge(processes, [status("decode-0")], NOW, tmp_path)
    assert (row.state, row.up_since_unix_s) == ("restarting", 0.0)
    assert "load_failed why=no memory" in row.last_error


def test_instances_that_were_started_elsewhere_are_shown_too_in_the_order_of_the_pipeline() -> None:
    processes = [process("gateway-0"), process("decode-10"), process("decode-9"), process("nats")]
    names = list(states(processes, [status("prefill-other-host", pid=99)]))
    assert names == ["nats", "prefill-other-host", "decode-9", "decode-10", "gateway-0"]


def test_an_instance_that_dies_again_and_again_is_hopeless_and_one_that_died_once_is_not() -> None:
    watch = DeathWatch()
    for start in range(100, 100 + MAX_DEATHS):
        assert watch.hopeless({"draft-0": process("draft-0", "STARTING", start=start)}) is None
    assert watch.hopeless({"draft-0": process("draft-0", "BACKOFF", start=100 + MAX_DEATHS - 1)}) == "draft-0"
    assert DeathWatch().hopeless({"draft-0": process("draft-0", "FATAL")}) == "draft-0"
    assert DeathWatch().hopeless({"draft-0": process("draft-0", "STOPPED", start=0)}) is None


def report() -> Report:
    processes = {name: process(name) for name in ("nats", "decode-0", "decode-1")}
    told = [status("decode-0", running=2, slots=16, blocks_total=100, blocks_used=7, transport="ucx")]
    rows = merge(processes, told, NOW, Path("/none"))
    return Report("m", "http://127.0.0.1:8000", "nats://127.0.0.1:4222", 1, "", {"decode": 3}, rows)


def test_the_json_has_every_field_of_every_instance_null_where_unknown() -> None:
    decode = json.loads(as_json(report()))["stages"]["decode"]
    assert decode["queue_depth"] == 3
    first, second = decode["instances"]
    assert (first["instance"], first["running"], first["slots"], first["blocks_used"]) == ("decode-0", 2, 16, 7)
    assert (first["transport"], first["state"], first["pid"]) == ("ucx", "ready", 10)
    assert (second["instance"], second["running"], second["state"]) == ("decode-1", None, "starting")


def test_the_table_shows_load_and_queue() -> None:
    out = io.StringIO()
    print_table(report(), Console(file=out, width=160))
    line = next(line for line in out.getvalue().splitlines() if line.startswith("decode-0"))
    assert line.split()[-4:] == ["3", "2/16", "7/100", "ucx"]
