"""How a worker's process ends: by a signal, by a connection that is closed for good, by an engine that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.bus import Bus
from shared.protocol.jobs import GenerationRequest
from shared.protocol.records import Claimed
from tests.conftest import free_port
from tests.integration.holdings_harness import state_of, submit
from tests.unit.engine_harness import tiny_model

ROOT = Path(__file__).resolve().parents[2]
HANGS_ON = 2
"""A token of the prompt that `submit` sends."""

PATIENCE_S = 60.0


class Link:
    """A TCP connection between NATS clients and their server, on which the server may be made to say something."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._clients: list[asyncio.StreamWriter] = []
        self._copying: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The URL for clients, as long as the block runs."""
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        listener.close()
        for task in self._copying:
            task.cancel()
        await asyncio.wait(self._copying)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._clients.append(writer)
        self._copying |= {
            asyncio.create_task(self._copy(reader, to_server)),
            asyncio.create_task(self._copy(upstream, writer)),
        }

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def say(self, line: str) -> None:
        """To all clients, while the server itself is silent: in between two of its messages."""
        for writer in self._clients:
            writer.write(f"{line}\r\n".encode())


class Process:
    """A prefill worker as its own process, with a model that loads at once."""

    def __init__(self, nats_url: str, model: Path, *module: str, **settings: str) -> None:
        self.log = model.parent / f"{uuid.uuid4().hex}.log"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
            "HEADRACE_MODEL": str(model),
            "HEADRACE_INSTANCE": "prefill-0",
            "HEADRACE_KV_MEMORY_GIB": "0.01",
            "HEADRACE_TRANSPORT": "tcp",
            "HEADRACE_DTYPE": "fp32",
            **settings,
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *(module or ("services.prefill",))],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        try:
            return self._process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on: {self.log.read_text()[-2000:]}") from None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / uuid.uuid4().hex)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(nats_url: str, *module: str, **settings: str) -> Process:
        started.append(Process(nats_url, model, *module, **settings))
        return started[-1]

    yield make
    for process in started:
        process.close()


async def until_ready(bus: Bus, model: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not [s for s in bus.statuses.live("prefill", model.name) if s.state == "ready"]:
            await asyncio.sleep(0.05)


async def until_claimed(bus: Bus, request: GenerationRequest) -> Claimed:
    async with asyncio.timeout(PATIENCE_S):
        while not (claims := (await state_of(bus, request)).claims):
            await asyncio.sleep(0.05)
    return claims[-1]


async def test_a_connection_closed_for_good_ends_the_service_with_one_line(
    nats_url: str, model: Path, start: Callable[..., Process]
) -> None:
    """nats-py does not reconnect after an error that the server sent; a worker without NATS would serve nobody."""
    link = Link(urlsplit(nats_url).port or 0)
    async with link.open() as url, await Bus.connect(nats_url, name="test") as bus:
        process = start(url)
        await until_ready(bus, model)
        link.say("-ERR 'Authentication Expired'")
        assert await asyncio.to_thread(process.ended) == 1
    assert "headrace prefill: NATS closed this connection for good" in process.log.read_text()


async def test_sigterm_ends_an_idle_worker_with_status_0(
    nats_url: str, model: Path, start: Callable[..., Process]
) -> None:
    process = start(nats_url)
    async with await Bus.connect(nats_url, name="test") as bus:
        await until_ready(bus, model)
    process.terminate()
    assert await asyncio.to_thread(process.ended) == 0


async def test_sigterm_ends_a_worker_whose_engine_hangs_and_its_request_was_handed_back(
    nats_url: str, model: Path, start: Callable[..., Process]
) -> None:
    process = start(nats_url, "tests.integration.faulty_worker", "prefill", "hang", str(HANGS_ON), HEADRACE_DRAIN_S="1")
    async with await Bus.connect(nats_url, name="test") as bus:
        await until_ready(bus, model)
        request = await submit(bus, model.name)
        await until_claimed(bus, request)
        process.terminate()
        await asyncio.to_thread(process.ended)
        assert (await state_of(bus, request)).unproductive == []


async def test_a_worker_whose_engine_hangs_ends_itself_and_the_request_goes_on_elsewhere(
    nats_url: str, model: Path, start: Callable[..., Process]
) -> None:
    process = start(
        nats_url, "tests.integration.faulty_worker", "prefill", "hang", str(HANGS_ON), HEADRACE_STALL_S="1.5"
    )
    async with await Bus.connect(nats_url, name="test") as bus:
        await until_ready(bus, model)
        request = await submit(bus, model.name)
        hung = await until_claimed(bus, request)
        start(nats_url, HEADRACE_INSTANCE="prefill-1")
        async with asyncio.timeout(PATIENCE_S):
            while not (state := await state_of(bus, request)).output_ids:
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(process.ended) == 1
        assert [claim.worker == hung.worker for claim in state.claims] == [True, False]
