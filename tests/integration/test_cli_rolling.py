"""`headrace drain` and `headrace restart` on real processes: who serves meanwhile, and what a killed command leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from services.cli.stack import Stack
from services.cli.supervisor import Supervisor
from shared.bus import Bus
from shared.models import resolve_model
from tests.integration.cli_harness import HEADRACE, SERVERS_ONLY, Operator, alive, eventually

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("hr") / "h")
    operator.env["HEADRACE_STORE_MEMORY_GIB"] = "0.05"
    yield operator
    if operator.home.load_spec() is not None:
        operator.ok("down")


@pytest.fixture
def operator(shared_stack: Operator) -> Operator:
    """Of a stack with one KV store, the stage that starts in no time."""
    spec = shared_stack.home.load_spec()
    if spec is None:
        shared_stack.ok("up", "--detach", *SERVERS_ONLY, "--scale", "kvstore=1")
    elif spec.counts["kvstore"] != 1 or spec.spares or states(shared_stack) != {"kvstore-0": "ready"}:
        shared_stack.ok("scale", "kvstore=1")
    return shared_stack


def states(operator: Operator, stage: str = "kvstore") -> dict[str, str]:
    return {name: entry["state"] for name, entry in operator.stage(stage).items()}


@contextmanager
def repeating(act: Callable[[], None]) -> Iterator[None]:
    """Do something over and over in a thread of its own while the body runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_drained_instance_stays_down_until_restart_or_scale_brings_it_back(operator: Operator) -> None:
    operator.ok("scale", "kvstore=2")
    drained = operator.ok("drain", "kvstore#0")
    assert "kvstore-0 ended in" in drained
    assert "with exit status 0" in drained
    assert "no other kvstore" not in drained, "kvstore-1 is live"
    assert states(operator) == {"kvstore-0": "drained", "kvstore-1": "ready"}
    assert "no other kvstore instance is live" in operator.ok("drain", "kvstore#1")
    assert "kvstore-1 was not running" in operator.ok("drain", "kvstore")
    assert states(operator) == {"kvstore-0": "drained", "kvstore-1": "drained"}
    assert not any(entry["pid"] for entry in operator.stage("kvstore").values())

    assert "starting kvstore-1, which was down" in operator.ok("restart", "kvstore#1")
    assert states(operator) == {"kvstore-0": "drained", "kvstore-1": "ready"}
    operator.ok("scale", "kvstore=2")
    assert states(operator) == {"kvstore-0": "ready", "kvstore-1": "ready"}


def test_a_drain_that_ends_otherwise_than_with_0_is_one_line_and_exit_status_1(operator: Operator) -> None:
    pid = operator.stage("kvstore")["kvstore-0"]["pid"]
    os.kill(pid, signal.SIGSTOP)  # so that it cannot end in order
    with subprocess.Popen(
        [HEADRACE, "drain", "kvstore"], env=operator.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as draining:
        supervisor = Supervisor(operator.home.socket)
        eventually(lambda: supervisor.processes()["kvstore-0"].state == "STOPPING")
        os.kill(pid, signal.SIGKILL)
        _, stderr = draining.communicate(timeout=60)
    assert draining.returncode == 1
    (line,) = stderr.splitlines()
    assert "kvstore-0 was killed after" in line
    assert str(operator.home.log_of("kvstore-0")) in line
    assert states(operator) == {"kvstore-0": "drained"}


def test_servers_are_not_drained(operator: Operator) -> None:
    assert "`headrace restart nats`" in operator.refused("drain", "nats")


def watched(operator: Operator, *command: str) -> tuple[str, list[set[str]]]:
    """What a command says, and which stores were ready at each look while it ran, from the first one that was."""
    seen: list[set[str]] = []

    async def watch(done: asyncio.Event) -> None:
        async with await Bus.connect(f"nats://127.0.0.1:{operator.env['HEADRACE_NATS_PORT']}", name="test") as bus:
            while not done.is_set():
                await asyncio.sleep(0.05)
                alive_now = [s for s in bus.statuses.live("kvstore") if psutil.pid_exists(s.pid)]
                seen.append({s.instance for s in alive_now if s.state == "ready"})

    async def run() -> str:
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(done))
            try:
                return await asyncio.to_thread(operator.ok, *command)
            finally:
                done.set()

    said = asyncio.run(run())
    return said, seen[next(index for index, ready in enumerate(seen) if ready) :]


def test_a_lone_instance_restarts_behind_a_spare_so_that_one_is_ready_all_the_time(operator: Operator) -> None:
    before = operator.stage("kvstore")["kvstore-0"]["pid"]
    said, seen = watched(operator, "restart", "kvstore")
    assert "starting kvstore-spare" in said
    assert all(seen), "at some time no store was ready"
    assert {"kvstore-spare"} in seen, "the old one was not stopped before the new one started"
    after = operator.stage("kvstore")
    assert list(after) == ["kvstore-0"]
    assert after["kvstore-0"]["pid"] != before
    spec = operator.home.load_spec()
    assert spec is not None
    assert spec.spares == {}


@pytest.mark.slow
def test_where_another_instance_is_live_no_spare_is_started(operator: Operator) -> None:
    operator.ok("scale", "kvstore=2")
    before = operator.stage("kvstore")
    said = operator.ok("restart", "kvstore")
    assert "spare" not in said
    after = operator.stage("kvstore")
    assert {name: entry["state"] for name, entry in after.items()} == {"kvstore-0": "ready", "kvstore-1": "ready"}
    assert all(after[name]["pid"] != before[name]["pid"] for name in before)


def test_at_once_restarts_without_a_spare(operator: Operator) -> None:
    before = operator.stage("kvstore")["kvstore-0"]["pid"]
    assert "spare" not in operator.ok("restart", "kvstore", "--at-once")
    after = operator.stage("kvstore")["kvstore-0"]
    assert (after["state"], after["pid"] != before) == ("ready", True)


@pytest.mark.slow
def test_all_is_every_stage_and_no_server(operator: Operator) -> None:
    before = operator.status()
    assert "restarted kvstore-0" in operator.ok("restart")
    after = operator.status()
    assert after["servers"] == before["servers"]
    assert after["stages"]["kvstore"]["instances"][0]["pid"] != before["stages"]["kvstore"]["instances"][0]["pid"]


def restart_killed_when(operator: Operator, reached: Callable[[], bool]) -> None:
    with subprocess.Popen([HEADRACE, "restart", "kvstore"], env=operator.env, stdout=subprocess.DEVNULL) as restarting:
        eventually(reached)
        restarting.kill()


@pytest.mark.slow
def test_a_restart_that_was_killed_leaves_a_spare_that_serves_until_the_next_one_removes_it(operator: Operator) -> None:
    supervisor = Supervisor(operator.home.socket)
    restart_killed_when(operator, lambda: supervisor.processes()["kvstore-0"].state == "STOPPING")
    eventually(lambda: states(operator) == {"kvstore-0": "drained", "kvstore-spare": "ready"})
    said = operator.ok("restart", "kvstore")
    assert "starting kvstore-0, which was down" in said
    assert "kvstore-spare ended in" in said
    assert states(operator) == {"kvstore-0": "ready"}


@pytest.mark.slow
def test_scale_removes_a_spare_that_a_killed_restart_left(operator: Operator) -> None:
    restart_killed_when(operator, lambda: "kvstore-spare" in Supervisor(operator.home.socket).processes())
    eventually(lambda: states(operator) == {"kvstore-0": "ready", "kvstore-spare": "ready"})
    operator.ok("scale", "kvstore=2")
    assert states(operator) == {"kvstore-0": "ready", "kvstore-1": "ready"}


@pytest.mark.slow
def test_scale_brings_back_whom_a_left_over_spare_stands_in_for_before_the_spare_goes(operator: Operator) -> None:
    supervisor = Supervisor(operator.home.socket)
    restart_killed_when(operator, lambda: supervisor.processes()["kvstore-0"].state == "STOPPING")
    eventually(lambda: states(operator) == {"kvstore-0": "drained", "kvstore-spare": "ready"})
    said, seen = watched(operator, "scale", "kvstore=2", "--no-wait")
    assert "kvstore-spare ended in" in said
    assert all(seen), "at some time no store was ready"
    eventually(lambda: states(operator) == {"kvstore-0": "ready", "kvstore-1": "ready"})
    spec = operator.home.load_spec()
    assert spec is not None
    assert spec.spares == {}


@pytest.mark.slow
def test_down_ends_a_spare_that_a_killed_restart_left(operator: Operator) -> None:
    restart_killed_when(operator, lambda: "kvstore-spare" in Supervisor(operator.home.socket).processes())
    processes = operator.processes()
    operator.ok("down")
    assert alive(processes) == []


@pytest.fixture
def public_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A gateway alone, of a model that the test may take away."""
    root = tmp_path_factory.mktemp("hr")
    shutil.copytree(resolve_model(MODEL).path, root / "model")
    operator = Operator(root / "h")
    operator.env |= {"HEADRACE_MODEL": str(root / "model")}
    operator.ok("up", "--detach", *SERVERS_ONLY)
    operator.ok("scale", "gateway=1")
    yield operator
    operator.run("down")


@pytest.mark.slow
def test_clients_that_connect_while_the_only_gateway_restarts_all_find_one(public_gateway: Operator) -> None:
    url = f"http://127.0.0.1:{public_gateway.env['HEADRACE_PORT']}/healthz"
    answers: list[int] = []
    before = public_gateway.stage("gateway")["gateway-0"]["pid"]
    with repeating(lambda: answers.append(httpx.get(url, timeout=10, trust_env=False).status_code)):
        public_gateway.ok("restart", "gateway")
    assert len(answers) > 100
    assert set(answers) == {200}
    after = public_gateway.stage("gateway")
    assert list(after) == ["gateway-0"]
    assert after["gateway-0"]["pid"] != before


@pytest.mark.slow
def test_a_left_over_spare_keeps_no_port_from_the_gateway_that_is_to_have_it(public_gateway: Operator) -> None:
    Stack.attach(public_gateway.home).add_spare("gateway", 1)  # as a killed restart of a gateway-1 leaves it
    eventually(lambda: states(public_gateway, "gateway") == {"gateway-0": "ready", "gateway-spare": "ready"})
    public_gateway.ok("scale", "gateway=2")
    assert states(public_gateway, "gateway") == {"gateway-0": "ready", "gateway-1": "ready"}


@pytest.mark.slow
def test_when_the_spare_cannot_start_nothing_is_restarted_and_one_line_says_why(public_gateway: Operator) -> None:
    before = public_gateway.stage("gateway")
    (Path(public_gateway.env["HEADRACE_MODEL"]) / "tokenizer.json").unlink()
    line = public_gateway.refused("restart", "gateway")
    assert "gateway-spare keeps dying: " in line
    after = public_gateway.stage("gateway")
    assert list(after) == ["gateway-0"]
    assert (after["gateway-0"]["state"], after["gateway-0"]["pid"]) == ("ready", before["gateway-0"]["pid"])
