"""Server-sent events from bytes, by the HTML standard's rules (9.2.6), as far as a completion stream needs them.

Lines are split at CR, LF and CRLF only: text may hold separators (U+2028, U+0085) that general line readers break at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from loadgen.errors import MalformedStream

MAX_EVENT_BYTES: Final = 4 << 20


class EventParser:
    """Feed it chunks as they come; it gives back the data of each complete event. Other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Data of the events that this chunk completes. Raises MalformedStream when an event grows without end."""
        buffer = self._buffer + chunk
        # A CR at the very end may be half of a CRLF: it waits for the next chunk.
        held_back = buffer[-1:] == b"\r"
        lines = (buffer[:-1] if held_back else buffer).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines.pop() + (b"\r" if held_back else b"")
        if len(self._buffer) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise MalformedStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line:
                if self._data:
                    event, self._data = b"\n".join(self._data), []
                    yield event
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
