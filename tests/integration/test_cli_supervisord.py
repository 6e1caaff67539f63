"""The supervisor of a stack: what dies early is started again, soon and for ever; a kill makes no wait longer."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.cli.draining import Ending, drain
from services.cli.supervisor import Supervisor
from services.cli.supervisord import MAX_WAIT_S
from tests.integration.cli_harness import eventually

DEATHS = 6
KILLS = 12

CONFIG = """\
[unix_http_server]
file = {root}/s.sock
[supervisord]
logfile = {root}/supervisor.log
pidfile = {root}/pid
childlogdir = {root}
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
HOPELESS = "[program:hopeless]\ncommand = false\n"
SLEEPER = "[program:sleeper]\ncommand = sleep 1000\n"
ORDERLY = """\
[program:orderly]
command = sh -c "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
"""
STUBBORN = """\
[program:stubborn]
command = sh -c "trap '' TERM; echo up; while :; do sleep 0.05; done"
stopwaitsecs = 1
"""
SETTINGS = f"autorestart = true\nstartsecs = 3\nstartretries = {MAX_WAIT_S}\n"
_EVENT = re.compile(r"^([\d-]+ [\d:]+,\d+) \w+ (exited|spawned|gave up): '?([a-z]+)", re.MULTILINE)


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a supervisor with a program that cannot start and one that runs; neither may be given up."""
    with supervising(tmp_path_factory.mktemp("sv"), HOPELESS, SLEEPER) as root:
        yield root


@contextmanager
def supervising(root: Path, *programs: str) -> Iterator[Path]:
    settings = (re.sub(r"(command = .*\n)", rf"\1{SETTINGS}", program) for program in programs)
    (root / "supervisord.conf").write_text(CONFIG.format(root=root) + "".join(settings))
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli.supervisord", "--nodaemon", "-c", root / "supervisord.conf"],
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            yield root
        finally:
            process.terminate()


def waits(root: Path, program: str) -> list[float]:
    """Seconds from each death to the next start, as the supervisor logged them."""
    found: list[float] = []
    died: datetime | None = None
    for when, what, name in _EVENT.findall((root / "supervisor.log").read_text()):
        if name != program:
            continue
        assert what != "gave up"
        at = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f")
        if what == "exited":
            died = at
        elif died is not None:
            found.append((at - died).total_seconds())
    return found


def test_what_cannot_start_is_tried_for_ever_and_what_is_killed_comes_back_at_once(root: Path) -> None:
    supervisor = Supervisor(root / "s.sock")
    eventually(supervisor.alive)
    for kill in range(KILLS):
        eventually(lambda: supervisor.processes()["sleeper"].pid != 0)
        assert supervisor.signal("sleeper", "KILL")
        eventually(lambda number=kill: len(waits(root, "sleeper")) > number)  # type: ignore[misc]
    assert max(waits(root, "sleeper")) < MAX_WAIT_S, "a kill made the wait longer"
    eventually(lambda: len(waits(root, "hopeless")) >= DEATHS)
    longest = max(waits(root, "hopeless"))
    assert 1 < longest < MAX_WAIT_S + 2, "waits grow to the bound and no further"
    assert supervisor.processes()["hopeless"].state in ("BACKOFF", "STARTING")


# Ending them


class Racing(Supervisor):
    """Kills a process just before its first call of `method`: the answer comes after the supervisor has found it dead,
    and before it acts on that.
    """

    def __init__(self, socket_path: Path, victim: int, method: str) -> None:
        super().__init__(socket_path)
        self._path = socket_path
        self._victim = victim
        self._method = method

    def _call(self, method: str, *arguments: Any, accept: tuple[int, ...] = ()) -> Any:
        if method != self._method:
            return super()._call(method, *arguments, accept=accept)
        self._method = ""
        daemon = psutil.Process(self.pid())
        # In its poll, with nothing left to do. When it goes on, it takes the connection, looks for the dead, reads the
        # question, answers it, and only then starts again what has ended.
        eventually(lambda: all(daemon.status() == psutil.STATUS_SLEEPING for _ in range(100)))
        daemon.suspend()
        os.kill(self._victim, signal.SIGKILL)
        eventually(lambda: psutil.Process(self._victim).status() == psutil.STATUS_ZOMBIE)
        body = xmlrpc.client.dumps(arguments, method)
        head = f"POST /RPC2 HTTP/1.1\r\nContent-Type: text/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self._path))
            connection.sendall((head + body).encode())
            daemon.resume()
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            try:
                (value,), _ = xmlrpc.client.loads(answer.read())
            except xmlrpc.client.Fault as fault:
                if fault.faultCode in accept:
                    return None
                raise
        return value


def drained(supervisor: Supervisor, name: str) -> Ending:
    (ending,) = drain(supervisor, [name], lambda _: None)
    assert supervisor.processes()[name].state == "STOPPED", "it does not stay down"
    return ending


LOOK, STOP = "supervisor.getAllProcessInfo", "supervisor.stopProcess"


@pytest.mark.parametrize(
    ("state", "method", "status"),
    [
        ("RUNNING", LOOK, -signal.SIGKILL),
        ("RUNNING", STOP, None),  # what has started in its place took the word on it away
        ("STARTING", LOOK, -signal.SIGKILL),
        ("STARTING", STOP, -signal.SIGKILL),
    ],
)
def test_what_crashes_as_it_is_drained_stays_down_and_is_told_from_what_ended_in_order(
    state: str, method: str, status: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with supervising(tmp_path_factory.mktemp("sv"), SLEEPER) as root:
        supervisor = Supervisor(root / "s.sock")
        eventually(supervisor.alive)
        eventually(lambda: supervisor.processes()["sleeper"].state == state)
        pid = supervisor.processes()["sleeper"].pid
        ending = drained(Racing(root / "s.sock", pid, method), "sleeper")
        assert (ending.by_itself, ending.exit_status, ending.clean) == (True, status, False)
        assert str(drained(supervisor, "sleeper")) == "sleeper was not running"


@pytest.mark.parametrize("method", [LOOK, STOP])
def test_what_crashes_as_it_is_removed_is_removed(method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with supervising(tmp_path_factory.mktemp("sv"), SLEEPER) as root:
        supervisor = Supervisor(root / "s.sock")
        eventually(supervisor.alive)
        eventually(lambda: supervisor.processes()["sleeper"].state == "RUNNING")
        Racing(root / "s.sock", supervisor.processes()["sleeper"].pid, method).remove(["sleeper"])
        assert supervisor.processes() == {}


def test_an_ending_tells_how_it_came_about(tmp_path_factory: pytest.TempPathFactory) -> None:
    with supervising(tmp_path_factory.mktemp("sv"), HOPELESS, SLEEPER, ORDERLY, STUBBORN) as root:
        supervisor, trapping = Supervisor(root / "s.sock", stop_wait_s=1), ("orderly", "stubborn")
        eventually(supervisor.alive)
        eventually(lambda: supervisor.processes()["hopeless"].state == "BACKOFF")
        hopeless = drained(supervisor, "hopeless")
        assert (hopeless.by_itself, hopeless.exit_status, hopeless.clean) == (True, 1, False)
        starting = drained(supervisor, "sleeper")
        assert "sleeper was still starting and ended in" in str(starting)
        assert starting.clean
        eventually(lambda: all(any(log.stat().st_size for log in root.glob(f"{name}-stdout*")) for name in trapping))
        orderly = drained(supervisor, "orderly")
        assert (orderly.exit_status, orderly.clean, orderly.by_itself) == (0, True, False)
        stubborn = drained(supervisor, "stubborn")
        assert "stubborn was killed after" in str(stubborn)
        assert "(it has 1 s to hand its work back)" in str(stubborn)
        assert not stubborn.clean
