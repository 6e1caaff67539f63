"""The merged picture of supervisor and statuses, the watch on instances that keep dying, and the status output."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.cli.overview import ERROR_SHOWN_S, merge
from services.cli.readiness import MAX_DEATHS, DeathWatch
from services.cli.status_report import Report, as_json, print_table
from services.cli.supervisor import ProcessInfo
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Priority

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


def report(**fields: object) -> Report:
    processes = {name: process(name) for name in ("nats", "kvstore-0", "decode-0", "decode-1")}
    told = [
        status("decode-0", running=2, slots=16, blocks_total=100, blocks_used=7, blocks_evictable=5, transport="ucx"),
        status("kvstore-0", blocks_total=50, blocks_used=20, blocks_evictable=12, leases=3, transport="ucx"),
    ]
    waiting: dict[str, dict[Priority, int]] = {"decode": {"high": 1, "normal": 2, "low": 0}}
    base = Report("m", "http://127.0.0.1:8000", "nats://127.0.0.1:4222", 1, "", waiting, 0, [])
    return msgspec.structs.replace(base, rows=merge(processes, told, NOW, Path("/none")), **fields)


def printed(shown: Report) -> str:
    out = io.StringIO()
    print_table(shown, Console(file=out, width=160))
    return out.getvalue()


def cells(shown: Report, instance: str) -> list[str]:
    """Those with something in them."""
    (line,) = [line for line in printed(shown).splitlines() if line.startswith(f"{instance} ")]
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]


def test_the_json_has_every_field_of_every_instance_null_where_unknown() -> None:
    decode = json.loads(as_json(report()))["stages"]["decode"]
    assert (decode["queue_depth"], decode["waiting"]) == (3, {"high": 1, "normal": 2, "low": 0})
    first, second = decode["instances"]
    assert (first["instance"], first["running"], first["slots"], first["blocks_used"]) == ("decode-0", 2, 16, 7)
    assert (first["transport"], first["state"], first["pid"]) == ("ucx", "ready", 10)
    assert (second["instance"], second["running"], second["state"]) == ("decode-1", None, "starting")
    assert (first["blocks_evictable"], first["blocks_free"], second["blocks_free"]) == (5, 88, None)
    assert json.loads(as_json(report()))["stages"]["draft"]["queue_depth"] is None


def test_the_table_shows_load_and_who_waits_with_which_priority() -> None:
    assert cells(report(), "decode-0")[3:] == ["3 (1 high, 2 normal)", "2/16", "7", "5", "88", "ucx"]
    usual = report(waiting={"decode": {"high": 0, "normal": 2, "low": 0}})
    assert cells(usual, "decode-0")[3] == "2"


def test_used_evictable_and_free_blocks_of_a_store_add_up_to_all_and_its_leases_are_shown() -> None:
    assert cells(report(), "kvstore-0")[3:] == ["0", "8", "12", "30", "3", "ucx"]


def test_dead_letters_are_shown_when_there_are_some() -> None:
    assert "dead" not in printed(report())
    assert "2 dead letters, see `headrace dead list`" in printed(report(dead_letters=2))
    assert json.loads(as_json(report(dead_letters=2)))["dead_letters"] == 2


def test_what_became_of_drafts_is_told_for_all_decode_workers_together() -> None:
    def line(*details: dict[str, float | str]) -> str:
        told = [status(f"decode-{n}", details=of) for n, of in enumerate(details)]
        shown = msgspec.structs.replace(report(), rows=merge({}, told, NOW, Path("/none")))
        return next((line for line in printed(shown).splitlines() if line.startswith("speculation")), "")

    first: dict[str, float | str] = {
        "speculation": "auto",
        "drafted": 30,
        "accepted": 20,
        "steps": 40,
        "ready": 10,
        "draft_length": 3.0,
        "drafted.draft_model": 30,
    }
    second = first | {"drafted": 10, "accepted": 10, "draft_length": 2.0, "drafted.draft_model": 0}
    assert line(first, second | {"drafted.prompt_lookup": 10}) == (
        "speculation: 75% of 40 drafted tokens accepted, k 2.5, proposals ready in 25% of steps "
        "(draft_model 75%, prompt_lookup 25%)"
    )
    resting = line(first | {"drafters": "resting"}, second | {"drafters": "asked"}, {"speculation": "off"})
    assert resting.endswith("; drafters rest for 1 of 2 decode workers")
    assert "rest" not in line(first | {"drafters": "asked"})
    assert line(first | {"drafted": 0}) == ""
    assert line({"speculation": "off"}) == "speculation: off"
    assert line({}) == ""


def test_a_stopped_instance_is_drained_and_a_stopped_server_is_not() -> None:
    stopped = [process("decode-0", "STOPPED", pid=0), process("nats", "STOPPED", pid=0)]
    assert states(stopped, []) == {"nats": "stopped", "decode-0": "drained"}


@pytest.mark.parametrize(
    ("age_s", "shown"), [(5, "no route (5 s ago)"), (125, "no route (2 min ago)"), (ERROR_SHOWN_S + 1, "")]
)
def test_an_error_is_shown_with_its_age_and_not_for_ever(age_s: float, shown: str) -> None:
    told = [
        status("decode-0", last_error="no route", last_error_unix_s=NOW - age_s),
        status("decode-elsewhere", last_error="no route", last_error_unix_s=NOW - age_s),
    ]
    ours, elsewhere = merge({"decode-0": process("decode-0")}, told, NOW, Path("/none"))
    assert (ours.last_error, elsewhere.last_error) == (shown, shown)


def test_an_error_that_holds_now_is_shown_as_it_is() -> None:
    (row,) = merge(
        {"kvstore-0": process("kvstore-0")}, [status("kvstore-0", last_error="no index")], NOW, Path("/none")
    )
    assert row.last_error == "no index"


def test_what_the_log_says_of_a_death_is_shown_before_what_the_supervisor_says(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").write_text("ValueError: no such dtype\n")
    dead = msgspec.structs.replace(
        process("decode-0", "BACKOFF", pid=0), spawn_error="Exited too quickly (process ...)"
    )
    (row,) = merge({"decode-0": dead}, [], NOW, tmp_path)
    assert row.last_error == "ValueError: no such dtype"
    unable = msgspec.structs.replace(dead, spawn_error="can't find command '/bin/nats'")
    (row,) = merge({"decode-0": unable}, [], NOW, tmp_path)
    assert row.last_error == "can't find command '/bin/nats'"
