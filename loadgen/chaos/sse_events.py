"""Server-sent events with their ids, by the HTML standard's rules (9.2.6): what a client resumes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from loadgen.errors import MalformedStream

_MAX_EVENT_BYTES: Final = 4 << 20


class SseEvent(msgspec.Struct, frozen=True):
    """`event_id` is empty for an event without an id of its own."""

    event_id: str
    data: bytes


class SseReader:
    """Feed it chunks as they come; it gives back each complete event. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._id = ""

    def feed(self, chunk: bytes) -> Iterator[SseEvent]:
        """Raises MalformedStream when an event grows without end."""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise MalformedStream(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        for line in (raw.removesuffix(b"\r") for raw in lines):
            if not line:
                if self._data:
                    yield SseEvent(self._id, b"\n".join(self._data))
                self._data, self._id = [], ""
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self._id = line[3:].strip().decode()
