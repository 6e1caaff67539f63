"""Types `headrace` commands as an operator does, for a state directory and ports of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from services.cli.home import Home
from services.cli.leftovers import stack_processes
from tests.conftest import free_port

HEADRACE = Path(sys.executable).parent / "headrace"
SERVERS_ONLY = [
    part for stage in ("prefill", "decode", "draft", "gateway", "kvstore") for part in ("--scale", f"{stage}=0")
]


class Operator:
    """Types `headrace` commands for one state directory and its own ports."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.env = {
            **os.environ,
            "HEADRACE_HOME": str(root),
            "HEADRACE_NATS_PORT": str(free_port()),
            "HEADRACE_REDIS_PORT": str(free_port()),
            "HEADRACE_PORT": str(free_port()),
            "HEADRACE_NATS_URL": "",
            "HEADRACE_REDIS_URL": "",
        }

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HEADRACE, *arguments],
            check=False,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=180,
        )

    def ok(self, *arguments: str, **env: str) -> str:
        done = self.run(*arguments, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, *arguments: str, **env: str) -> str:
        """The one line that a refused command prints."""
        done = self.run(*arguments, **env)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        (line,) = done.stderr.splitlines()
        return line

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok("status", "--json"))
        return answer

    def stage(self, name: str) -> dict[str, dict[str, Any]]:
        return {entry["instance"]: entry for entry in self.status()["stages"][name]["instances"]}

    def server(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.status()["servers"] if entry["instance"] == name)

    def processes(self) -> list[psutil.Process]:
        spec = self.home.load_spec()
        return stack_processes(spec.stack_id) if spec is not None else []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Without those that only wait to be collected by a parent that does not."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def eventually(reached: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)
