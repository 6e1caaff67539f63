"""Fixtures of the tests that start gateways: their models, gateways on demand, a directed worker, open streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from shared.bus import Bus
from tests.integration.gateway_harness import PATIENCE_S, GatewayProcess, Stream, Worker, chat_body, make_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateways")
    make_model(path / "tiny")
    make_model(path / "deserted")  # no worker serves it
    return path


@pytest.fixture(scope="module")
def start(nats_url: str, directory: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways, and stops those that still run at the end."""
    started: list[GatewayProcess] = []

    def make(model: str = "tiny", url: str = nats_url, **settings: Any) -> GatewayProcess:
        started.append(GatewayProcess(url, directory / model, directory, **settings).start())
        return started[-1]

    def stop(process: GatewayProcess) -> None:
        if process.running.poll() is None:
            assert process.stop() == 0

    with ExitStack() as stopping:  # all of them, also when one does not stop well
        yield make
        for process in started:
            stopping.callback(stop, process)


@pytest.fixture(scope="module")
def first(start: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start(disconnect_grace_s="1.5")


@pytest.fixture(scope="module")
def second(start: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start(disconnect_grace_s="1.5")


@pytest.fixture(scope="module")
def deserted(start: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start("deserted")


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


@pytest_asyncio.fixture(scope="module")
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with await Bus.connect(nats_url, name="test") as connected:
        yield connected


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        yield client


@pytest_asyncio.fixture
async def open_stream(http: httpx.AsyncClient) -> AsyncIterator[Callable[..., Awaitable[Stream]]]:
    """Opens streamed chats, and closes them at the end."""
    contexts: list[Any] = []

    async def opened(
        gateway: GatewayProcess, seed: int, headers: dict[str, str] | None = None, **fields: Any
    ) -> Stream:
        body = chat_body(seed, stream=True, **fields)
        context = http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=headers or {})
        response = await context.__aenter__()
        contexts.append(context)
        assert response.status_code == 200, await response.aread()
        return Stream(response)

    yield opened
    for context in contexts:
        await context.__aexit__(None, None, None)


@pytest_asyncio.fixture
async def client(first: GatewayProcess, worker: Worker) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{first.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as made:
        yield made
