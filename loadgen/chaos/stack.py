"""The stack under test: started through `headrace up` with servers and proxies of the run's own, or one that runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from loadgen.chaos.errors import FaultUnavailable, StackUnusable
from loadgen.chaos.observer import Observer
from loadgen.chaos.proxy import Proxy
from loadgen.chaos.schedule import Needs
from loadgen.chaos.servers import Servers, free_port
from shared.protocol.status import InstanceStatus

SCALE: Final[Mapping[str, int]] = {"gateway": 2, "prefill": 2, "decode": 2, "draft": 1, "kvstore": 2}
_UP_S: Final = 600.0
_COMMAND_S: Final = 240.0
_KV_HOST: Final = "127.0.0.2"
"""Stores listen on 127.0.0.1 and tell workers this address, where the run's proxies stand."""
_DRAFT_CACHE_GIB: Final = 0.25
"""A drafter's default of HEADRACE_KV_MEMORY_GIB."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Stack:
    """A running stack, and what the run may do to it. `keys` are API keys by tenant; empty where none are asked for."""

    home: Path
    environment: dict[str, str]
    gateways: list[str]
    nats_url: str
    model: str
    scale: dict[str, int]
    keys: dict[str, str] = field(default_factory=dict)
    servers: Servers | None = None
    kv_proxies: dict[int, Proxy] = field(default_factory=dict)

    @property
    def available(self) -> frozenset[Needs]:
        """What the faults that can be made here need."""
        return frozenset(("nothing", "proxies")) if self.servers is not None else frozenset(("nothing",))

    @property
    def draft_cache_bytes(self) -> int:
        """What the KV cache of a drafter takes when it is full."""
        return int(float(self.environment.get("HEADRACE_KV_MEMORY_GIB", _DRAFT_CACHE_GIB)) * (1 << 30))

    @property
    def instances(self) -> list[str]:
        return [f"{stage}-{n}" for stage, count in self.scale.items() for n in range(count)]

    async def headrace(self, *arguments: str, timeout_s: float = _COMMAND_S) -> str:
        """Run one of the operator's commands; its output. Raises StackUnusable when it fails or hangs.

        When this is cancelled the command is asked to end: `up` then takes down what it started.
        """
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "headrace"),
            *arguments,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is this process's to answer
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise StackUnusable(f"headrace {' '.join(arguments)} did not end within {timeout_s:.0f} s") from error
        except asyncio.CancelledError:
            if process.returncode is None:
                await _finished(_end(process))
            raise
        text = output.decode(errors="replace")
        if process.returncode != 0:
            raise StackUnusable(f"headrace {' '.join(arguments)} failed: {text.strip()[-600:]}")
        return text

    async def up(self) -> None:
        """Start it in the background, as many instances as `scale` says. Raises StackUnusable."""
        wanted = [option for stage, count in self.scale.items() for option in ("--scale", f"{stage}={count}")]
        try:
            await self.headrace("up", "--detach", *wanted, timeout_s=_UP_S)
        except (asyncio.CancelledError, StackUnusable):
            with suppress(StackUnusable):  # there is none, unless it came up just then, or hung half way
                await self.down()
            raise

    async def down(self) -> None:
        """Take it down, also while the run is being cancelled, however often. Raises StackUnusable."""
        await _finished(self.headrace("down"))

    async def await_whole(self, observer: Observer, within_s: float = 120.0) -> None:
        """Return when every instance says that it is ready and a gateway would serve. Raises StackUnusable."""

        def missing() -> list[str]:
            ready = {status.instance for status in observer.statuses() if status.state == "ready"}
            return [name for name in self.instances if name not in ready]

        if not await observer.until(lambda: not missing(), within_s):
            raise StackUnusable(f"{', '.join(missing())} not ready within {within_s:.0f} s; logs are in {self.home}")
        give_up = asyncio.get_running_loop().time() + within_s
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            for url in self.gateways:
                while not await _serves(http, url):
                    if asyncio.get_running_loop().time() > give_up:
                        raise StackUnusable(f"{url} does not serve; logs are in {self.home}")
                    await asyncio.sleep(0.1)

    async def open_kv_proxies(self, observer: Observer) -> None:
        """Stand between the workers and every store that appears, until cancelled. Stores choose their ports."""
        while True:
            for status in observer.statuses("kvstore"):
                place = status.place
                if place is not None and place.host == _KV_HOST and place.port not in self.kv_proxies:
                    proxy = Proxy((_KV_HOST, place.port), ("127.0.0.1", place.port))
                    await proxy.open()
                    self.kv_proxies[place.port] = proxy
            await observer.change(0.25)

    def send_signal(self, status: InstanceStatus, number: signal.Signals) -> None:
        """Raises FaultUnavailable when the process has gone meanwhile."""
        try:
            os.kill(status.pid, number)
        except ProcessLookupError as error:
            raise FaultUnavailable(f"{status.instance} (process {status.pid}) has gone") from error


@asynccontextmanager
async def own_stack(
    home: Path, model: str, scale: Mapping[str, int], tenants: tuple[str, ...], kv_memory_gib: float = 0.12
) -> AsyncIterator[Stack]:
    """Start one in `home` and take it down again. Raises StackUnusable.

    KV caches are small, so that the reference fills them and their memory is all touched before it is measured; and
    drafters are always asked, so that they are at work whenever they are struck.
    """
    home.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - before anything runs
    keys = {tenant: f"chaos-key-of-{tenant}" for tenant in tenants}
    port = free_port()
    async with AsyncExitStack() as held:
        servers = await held.enter_async_context(Servers(home))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
            **_ONE_THREAD,
            **servers.environment(),
            "HEADRACE_HOME": str(home),
            "HEADRACE_MODEL": model,
            "HEADRACE_PORT": str(port),
            "HEADRACE_ADVERTISE_HOST": _KV_HOST,
            "HEADRACE_API_KEYS": msgspec.json.encode({key: tenant for tenant, key in keys.items()}).decode(),
            "HEADRACE_KV_MEMORY_GIB": str(kv_memory_gib),
            "HEADRACE_STORE_MEMORY_GIB": str(2 * kv_memory_gib),
            "HEADRACE_LEAST_DRAFTED": "0",
        }
        gateways = [f"http://127.0.0.1:{port + n}" for n in range(scale["gateway"])]
        stack = Stack(home, environment, gateways, servers.nats_url, model, dict(scale), keys, servers)
        await stack.up()
        held.push_async_callback(_close, stack)
        yield stack


async def running_stack(home: Path) -> Stack:
    """One that `headrace up` started. Its servers cannot be taken away by the run. Raises StackUnusable."""
    stack = Stack(home, {**os.environ, "HEADRACE_HOME": str(home)}, [], "", "", {})
    told: dict[str, Any] = msgspec.json.decode(await stack.headrace("status", "--json"))
    stages = told["stages"]
    stack.nats_url, stack.model = told["nats_url"], told["model"]
    stack.scale = {stage: len(found["instances"]) for stage, found in stages.items()}
    stack.gateways = [entry["url"] for entry in stages["gateway"]["instances"] if entry.get("url")]
    if not stack.gateways or told["problem"]:
        raise StackUnusable(f"the stack in {home} has no gateway that answers: {told['problem']}")
    return stack


async def _close(stack: Stack) -> None:
    """Nothing of it may be stopped when it is asked to end, nor may its servers be out of reach."""
    if stack.servers is not None:
        for proxy in stack.servers.proxies.values():
            await proxy.open()
    try:
        await stack.down()
    finally:
        for proxy in stack.kv_proxies.values():
            await proxy.close()


async def _serves(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz")).is_success
    except httpx.HTTPError:
        return False


async def _finished(work: Coroutine[Any, Any, object]) -> None:
    """Wait for it even if this is cancelled meanwhile, and say so then. Raises what it raises."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_COMMAND_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
