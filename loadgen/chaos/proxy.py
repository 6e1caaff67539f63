"""A TCP proxy whose connections can be reset, held up or refused: what a bad network does, between two processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

_CHUNK: Final = 64 << 10
_NATS_NAME: Final = re.compile(rb'^CONNECT \{.*?"name": ?"([^"]*)"', re.MULTILINE)


@dataclass(eq=False)
class Link:
    """One proxied connection. `name` is what a NATS client calls itself, empty for other protocols."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    name: str = ""
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_passed: int = 0

    def reset(self) -> None:
        self.flows.set()
        for writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """Listens on one address and forwards to another. Use as an async context manager."""

    def __init__(self, listen: tuple[str, int], upstream: tuple[str, int]) -> None:
        self.listen = listen
        self._upstream = upstream
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Take connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, *self.listen)

    def refuse(self) -> None:
        """Reset what is open and refuse what comes, until `open`: a server that is gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def close(self) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def links(self, matches: Callable[[Link], bool] = lambda _: True) -> list[Link]:
        return [link for link in self._links if matches(link)]

    def cut(self, matches: Callable[[Link], bool] = lambda _: True) -> int:
        """Reset connections; how many."""
        chosen = self.links(matches)
        for link in chosen:
            link.reset()
        return len(chosen)

    def hold(self, matches: Callable[[Link], bool]) -> list[Link]:
        """Let nothing pass on these connections until their `flows` is set again."""
        chosen = self.links(matches)
        for link in chosen:
            link.flows.clear()
        return chosen

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - streams run their callbacks as tasks
        self._tasks.add(task)
        try:
            await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, up_writer)
        link.flows.set()
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, up_writer, link, names=True))
                group.create_task(_pump(up_reader, writer, link, names=False))
        finally:
            self._links.discard(link)
            link.reset()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link, *, names: bool) -> None:
    """Until either side ends; the other side is then ended too."""
    try:
        while data := await reader.read(_CHUNK):
            if names and not link.name and (match := _NATS_NAME.search(data)):
                link.name = match[1].decode(errors="replace")
            await link.flows.wait()
            writer.write(data)
            await writer.drain()
            link.bytes_passed += len(data)
    except OSError:
        pass
    finally:
        link.reset()
