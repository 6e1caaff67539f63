"""The supervisor of a stack: what dies early is started again, soon and for ever; a kill makes no wait longer."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

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
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[program:hopeless]
command = false
[program:sleeper]
command = sleep 1000
"""
SETTINGS = f"autorestart = true\nstartsecs = 3\nstartretries = {MAX_WAIT_S}\n"
_EVENT = re.compile(r"^([\d-]+ [\d:]+,\d+) \w+ (exited|spawned|gave up): '?([a-z]+)", re.MULTILINE)


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a supervisor with a program that cannot start and one that runs; neither may be given up."""
    root = tmp_path_factory.mktemp("sv")
    config = re.sub(r"(command = .*\n)", rf"\1{SETTINGS}", CONFIG.format(root=root))
    (root / "supervisord.conf").write_text(config)
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
