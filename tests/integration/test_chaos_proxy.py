"""The proxy that makes a bad network: cuts, holds and refuses what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadgen.chaos.proxy import Proxy
from tests.conftest import free_port


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[Proxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1024):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    upstream = ("127.0.0.1", free_port())
    async with await asyncio.start_server(echo, *upstream), Proxy(("127.0.0.1", free_port()), upstream) as proxy:
        yield proxy


class Peer:
    """A client of the echo server that calls itself `name`, as NATS clients do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, proxy: Proxy, name: str) -> Peer:
        peer = cls(*await asyncio.open_connection(*proxy.listen))
        hello = f'CONNECT {{"verbose": false, "name": "{name}", "lang": "python3"}}\r\n'
        assert await peer.says(hello.encode()) == hello.encode()
        return peer

    async def says(self, data: bytes) -> bytes:
        self.writer.write(data)
        async with asyncio.timeout(2):
            return await self.reader.readexactly(len(data))

    async def is_cut(self) -> bool:
        try:
            async with asyncio.timeout(2):
                return not await self.reader.read(1)
        except ConnectionResetError:
            return True


async def test_what_is_sent_comes_back_and_a_cut_hits_only_whom_it_names() -> None:
    async with echo_behind_proxy() as proxy:
        decode, gateway = await Peer.connect(proxy, "headrace-decode-0-71"), await Peer.connect(proxy, "gateway-7")
        assert await decode.says(b"x" * 100_000) == b"x" * 100_000
        assert proxy.cut(lambda link: link.name.endswith("-71")) == 1
        assert await decode.is_cut()
        assert await gateway.says(b"still here") == b"still here"


async def test_a_held_connection_passes_nothing_until_it_flows_again() -> None:
    async with echo_behind_proxy() as proxy:
        held, other = await Peer.connect(proxy, "a-1"), await Peer.connect(proxy, "a-2")
        links = proxy.hold(lambda link: link.name == "a-1")
        assert len(links) == 1
        held.writer.write(b"late")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await held.reader.read(1)
        assert await other.says(b"now") == b"now"
        for link in links:
            link.flows.set()
        async with asyncio.timeout(2):
            assert await held.reader.readexactly(4) == b"late"


async def test_a_server_that_is_away_resets_and_refuses_until_it_is_back() -> None:
    async with echo_behind_proxy() as proxy:
        peer = await Peer.connect(proxy, "a-1")
        proxy.refuse()
        assert await peer.is_cut()
        with pytest.raises(OSError):  # noqa: PT011 - the kind of refusal is the system's
            await asyncio.open_connection(*proxy.listen)
        await proxy.open()
        await Peer.connect(proxy, "a-1")


async def test_a_proxy_without_its_server_cuts_who_connects() -> None:
    async with Proxy(("127.0.0.1", free_port()), ("127.0.0.1", free_port())) as proxy:
        peer = Peer(*await asyncio.open_connection(*proxy.listen))
        assert await peer.is_cut()
