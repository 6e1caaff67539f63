"""The whole stack, started by the same command that users type, on free ports and in a directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import free_port
from tests.integration.otlp_receiver import OtlpReceiver, otlp_http_receiver

MODEL = "smollm2-135m-instruct"


class Stack:
    """A running `headrace up`, and the operator's commands on it."""

    def __init__(self, home: Path, extra_env: dict[str, str]) -> None:
        self.port = free_port()
        self.nats_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.env = {
            **os.environ,
            "HEADRACE_HOME": str(home),
            "HEADRACE_PORT": str(self.port),
            "HEADRACE_NATS_PORT": str(self.nats_port),
            "HEADRACE_REDIS_PORT": str(free_port()),
            **extra_env,
        }

    def headrace(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run one command; its output. Fails the test when the command fails."""
        done = subprocess.run(
            [Path(sys.executable).parent / "headrace", *arguments],
            check=False,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"headrace {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.headrace("status", "--json"))
        return result

    def instances(self, stage: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.status()["stages"][stage]["instances"]
        return result

    def pid_of(self, instance: str) -> int:
        """Asking takes a second: do it before the work that the instance is to be killed in."""
        (pid,) = [e["pid"] for e in self.instances(instance.partition("-")[0]) if e["instance"] == instance]
        return int(pid)

    @staticmethod
    def kill_9(pid: int) -> None:
        """kill -9 of one worker, as its machine would die."""
        os.kill(pid, signal.SIGKILL)

    def wait_until_idle(self, timeout_s: float = 30) -> None:
        """Until no worker holds a request and every block pool is free of holders."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            stages = self.status()["stages"]
            workers = [*stages["prefill"]["instances"], *stages["decode"]["instances"]]
            queued = stages["prefill"]["queue_depth"] or stages["decode"]["queue_depth"]
            if not queued and all(w["state"] == "ready" and w["running"] == w["blocks_used"] == 0 for w in workers):
                return
            time.sleep(0.5)
        raise AssertionError(f"not idle after {timeout_s:.0f} s: {self.status()}")

    def wait_ready(self, timeout_s: float = 60) -> None:
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise AssertionError("the stack did not become ready")


@pytest.fixture(scope="session")
def otlp() -> Iterator[OtlpReceiver]:
    with otlp_http_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, otlp: OtlpReceiver) -> Iterator[Stack]:
    running = Stack(
        tmp_path_factory.mktemp("headrace"),
        {**otlp.environment, "HEADRACE_KV_MEMORY_GIB": "0.5"},
    )
    running.headrace("up", "--detach", timeout_s=600)
    try:
        yield running
    finally:
        running.headrace("down")


@pytest.fixture(autouse=True)
def every_stage_is_back(stack: Stack) -> None:
    """Tests kill things; the next one starts with all stages serving."""
    stack.wait_ready()
