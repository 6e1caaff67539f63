"""The `headrace` command with a real supervisor and real servers: start, status, kill, stale state, errors, end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.supervisor import Supervisor
from tests.integration.cli_harness import HEADRACE, SERVERS_ONLY, Operator, alive, eventually


@pytest.fixture
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("hr") / "h")
    yield operator
    if operator.home.load_spec() is not None:
        operator.run("down")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A stack that several tests use; each leaves it running."""
    operator = Operator(tmp_path_factory.mktemp("hr") / "h")
    operator.ok("up", "--detach", *SERVERS_ONLY)
    yield operator
    operator.ok("down")


def test_a_stack_starts_is_seen_and_ends_without_leaving_a_process(operator: Operator) -> None:
    assert "ready after" in operator.ok("up", "--detach", *SERVERS_ONLY)
    status = operator.status()
    assert {entry["instance"]: entry["state"] for entry in status["servers"]} == {"nats": "ready", "valkey": "ready"}
    assert status["stages"].keys() == {"gateway", "prefill", "decode", "draft", "kvstore"}
    processes = operator.processes()
    assert {psutil.Process(entry["pid"]) for entry in status["servers"]} <= set(processes)
    assert len(processes) == 3
    operator.ok("down")
    assert alive(processes) == []
    assert "no stack is running" in operator.refused("status")
    assert "no stack is running" in operator.refused("down")


def test_the_embedded_nats_keeps_its_streams_over_a_restart_of_the_stack(operator: Operator) -> None:
    operator.ok("up", "--detach", *SERVERS_ONLY)
    operator.ok("status")  # sets up the streams
    operator.ok("down")
    assert any((operator.home.nats_store / "jetstream").rglob("HR_LOG"))
    operator.ok("up", "--detach", *SERVERS_ONLY)
    assert operator.status()["problem"] == ""


def test_a_killed_server_is_started_again(running: Operator) -> None:
    before = running.server("nats")["pid"]
    assert "killed nats" in running.ok("kill", "nats")
    eventually(lambda: running.server("nats")["pid"] not in (None, before))
    eventually(lambda: running.server("nats")["state"] == "ready")


def test_a_restart_replaces_the_process_and_returns_when_it_runs(running: Operator) -> None:
    before = running.server("valkey")["pid"]
    running.ok("restart", "valkey")
    assert running.server("valkey")["pid"] not in (None, before)


def test_a_second_up_is_refused_and_disturbs_nothing(running: Operator) -> None:
    before = running.status()
    assert "running already" in running.refused("up", "--detach", *SERVERS_ONLY)
    assert running.status()["servers"] == before["servers"]


def test_a_stage_is_scaled_killed_and_restarted_while_its_other_instances_run_on(operator: Operator) -> None:
    servers_and_store = [*SERVERS_ONLY, "--scale", "kvstore=1"]
    operator.ok("up", "--detach", *servers_and_store, HEADRACE_STORE_MEMORY_GIB="0.05")
    first = operator.stage("kvstore")["kvstore-0"]

    assert "kvstore: 1 -> 2" in operator.ok("scale", "kvstore=2")
    scaled = operator.stage("kvstore")
    assert {name: entry["state"] for name, entry in scaled.items()} == {"kvstore-0": "ready", "kvstore-1": "ready"}
    assert scaled["kvstore-0"]["worker"] == first["worker"]

    operator.ok("kill", "kvstore#1")
    eventually(lambda: operator.stage("kvstore")["kvstore-1"]["state"] == "ready")
    killed = operator.stage("kvstore")
    assert killed["kvstore-1"]["pid"] != scaled["kvstore-1"]["pid"]
    assert killed["kvstore-0"]["worker"] == first["worker"]

    operator.ok("restart", "kvstore#0")
    restarted = operator.stage("kvstore")
    assert restarted["kvstore-0"]["pid"] != first["pid"]
    assert restarted["kvstore-0"]["state"] == "ready", "the command returned before the instance could serve"
    assert restarted["kvstore-1"]["worker"] == killed["kvstore-1"]["worker"]

    assert "kvstore: 2 -> 1" in operator.ok("scale", "kvstore=1")
    remaining = operator.stage("kvstore")
    assert list(remaining) == ["kvstore-0"]
    assert remaining["kvstore-0"]["worker"] == restarted["kvstore-0"]["worker"]


@pytest.mark.parametrize("next_command", ["up", "down"])
def test_what_a_killed_supervisor_left_behind_is_seen_and_cleaned_up(operator: Operator, next_command: str) -> None:
    operator.ok("up", "--detach", *SERVERS_ONLY)
    left = [process for process in operator.processes() if "supervisord" not in " ".join(process.cmdline())]
    os.kill(Supervisor(operator.home.socket).pid(), signal.SIGKILL)
    eventually(lambda: not Supervisor(operator.home.socket).alive())
    assert "2 of its processes still run" in operator.refused("status")
    if next_command == "up":
        assert "ended 2 processes" in operator.ok("up", "--detach", *SERVERS_ONLY)
    else:
        operator.ok("down")
    assert alive(left) == []


def test_ctrl_c_in_the_foreground_stops_everything(operator: Operator) -> None:
    with subprocess.Popen(
        [HEADRACE, "up", *SERVERS_ONLY], env=operator.env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as foreground:
        assert foreground.stdout is not None
        for line in foreground.stdout:
            if "Ctrl-C stops everything" in line:
                break
        processes = operator.processes()
        os.killpg(foreground.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        assert foreground.wait(timeout=60) == 0
        assert "stopped" in foreground.stdout.read()
    assert len(processes) == 3
    assert alive(processes) == []


def test_ctrl_c_while_things_start_stops_what_was_started(operator: Operator) -> None:
    # A gateway without workers is never ready, so the start goes on until it is interrupted.
    with subprocess.Popen(
        [HEADRACE, "up", *SERVERS_ONLY, "--scale", "gateway=1"], env=operator.env, stdout=subprocess.PIPE, text=True
    ) as foreground:
        eventually(lambda: len(operator.processes()) == 4)
        processes = operator.processes()
        foreground.send_signal(signal.SIGINT)
        assert foreground.wait(timeout=60) == 130
    assert alive(processes) == []
    assert operator.home.load_spec() is None


def test_down_from_elsewhere_ends_the_foreground_command_in_peace(operator: Operator) -> None:
    with subprocess.Popen([HEADRACE, "up", *SERVERS_ONLY], env=operator.env, stdout=subprocess.PIPE) as foreground:
        eventually(lambda: operator.run("status").returncode == 0)
        eventually(lambda: operator.run("down").returncode == 0)
        assert foreground.wait(timeout=60) == 0


@pytest.mark.parametrize("variable", ["HEADRACE_NATS_PORT", "HEADRACE_REDIS_PORT", "HEADRACE_PORT"])
def test_a_port_in_use_is_named_with_its_holder_and_the_variable_that_moves_it(
    operator: Operator, variable: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = operator.refused("up", "--detach", **{variable: port})
    assert port in line
    assert variable in line
    assert str(os.getpid()) in line
    assert operator.home.load_spec() is None


def test_one_port_for_two_servers_is_refused(operator: Operator) -> None:
    line = operator.refused("up", "--detach", HEADRACE_PORT=operator.env["HEADRACE_NATS_PORT"])
    assert "cannot be for the embedded NATS server and for gateway-0; set HEADRACE_PORT" in line


def test_too_little_memory_is_said_before_anything_starts(operator: Operator) -> None:
    line = operator.refused("up", "--detach", HEADRACE_KV_MEMORY_GIB="100000")
    assert "HEADRACE_KV_MEMORY_GIB" in line
    assert operator.processes() == []


def test_an_unusable_model_is_said_before_anything_starts(operator: Operator) -> None:
    assert "no model 'nonsense'" in operator.refused("up", "--detach", HEADRACE_MODEL="nonsense")


def test_wrong_names_are_one_line(running: Operator) -> None:
    assert "no stage 'decoder'" in running.refused("scale", "decoder=2")
    assert "STAGE=N" in running.refused("scale", "decode")
    assert "no instance 'decode#7'" in running.refused("kill", "decode#7")
    assert "no stage or server 'nothing'" in running.refused("restart", "nothing")
    assert "no stage or server 'nothing'" in running.refused("logs", "nothing")


@pytest.mark.parametrize(
    ("variable", "value"), [("HEADRACE_PORT", "http"), ("HEADRACE_NATS_PORT", "0"), ("HEADRACE_KV_MEMORY_GIB", "-1")]
)
def test_a_wrong_setting_is_named(operator: Operator, variable: str, value: str) -> None:
    assert variable in operator.refused("up", "--detach", **{variable: value})


def test_an_instance_that_cannot_start_fails_the_start_with_its_own_words_and_leaves_nothing(
    operator: Operator, tmp_path: Path
) -> None:
    done = operator.run("up", "--detach", *SERVERS_ONLY, "--scale", "gateway=1", HEADRACE_MAX_BODY_BYTES="not-a-number")
    assert done.returncode == 1
    assert "gateway-0 keeps dying" in done.stderr
    assert "Traceback" not in done.stderr
    assert operator.processes() == []
    assert operator.home.load_spec() is None


def test_logs_of_a_server_are_shown_and_followed(running: Operator) -> None:
    assert "Server is ready" in running.ok("logs", "nats")
    with subprocess.Popen(
        [HEADRACE, "logs", "-f", "-n", "0"], env=running.env, stdout=subprocess.PIPE, text=True
    ) as following:
        try:
            assert following.stdout is not None
            time.sleep(1.5)
            running.ok("kill", "nats")
            first = following.stdout.readline()
            following.send_signal(signal.SIGINT)
            assert first.startswith("nats | ")
            following.wait(timeout=10)
        finally:
            following.kill()


def test_external_servers_are_used_and_not_supervised(operator: Operator, nats_url: str, redis_url: str) -> None:
    operator.ok("up", "--detach", *SERVERS_ONLY, HEADRACE_NATS_URL=nats_url, HEADRACE_REDIS_URL=redis_url)
    status = operator.status()
    assert (status["servers"], status["nats_url"], status["problem"]) == ([], nats_url, "")


def test_two_stacks_live_side_by_side(running: Operator, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Operator(tmp_path_factory.mktemp("hr") / "h")
    other.ok("up", "--detach", *SERVERS_ONLY)
    other.ok("down")
    assert running.status()["problem"] == ""
    assert len(running.processes()) == 3
