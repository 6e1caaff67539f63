"""From a request's log to server-sent events in OpenAI's format. Pure: no I/O, no clock.

An event's id is `<request>:<seq>` or `<request>:<seq>.<n>`: the n-th event of the log record with that stream sequence.
A client that sends the last id it saw gets exactly what follows, from any gateway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.gateway.errors import ApiError, failure_of, from_info, invalid
from services.gateway.results import usage_body
from shared.bus import LogEntry
from shared.protocol.records import Accepted, Ended, ErrorInfo, Tokens

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

_POSITION = re.compile(r"(?:(?P<request>[A-Za-z0-9_-]{1,64}):)?(?P<seq>[0-9]{1,18})(?:\.(?P<part>[0-9]))?")


@dataclass(frozen=True, order=True)
class Position:
    """A place in a request's events: a log record's stream sequence, and which of the record's events, from 0."""

    seq: int
    part: int = 0

    @classmethod
    def parse(cls, text: str, request_id: str, param: str) -> Position:
        """From an event id, or a bare sequence. Raises ApiError 400 naming `param`, also for another request's id."""
        match = _POSITION.fullmatch(text.strip())
        if match is None or match["request"] not in (None, request_id):
            raise invalid(f"'{param}' must be the id of an event of this stream.", param, "invalid_value")
        return cls(int(match["seq"]), int(match["part"] or 0))

    def event_id(self, request_id: str) -> str:
        return f"{request_id}:{self.seq}" + (f".{self.part}" if self.part else "")


START: Final = Position(0)


class EventStream:
    """Turns log entries into the bytes of one client's stream.

    The chat format opens with the role once the request is accepted. Tokens whose text is held back make no event. A
    failure is an `error` object and closes the stream without `[DONE]`: a cut answer must not look like a whole one.
    """

    def __init__(self, accepted: Accepted, fingerprint: str, *, include_usage: bool, after: Position = START) -> None:
        self._accepted = accepted
        self._after = after
        self._include_usage = include_usage
        chat = accepted.api == "chat"
        self._head = {
            "id": accepted.request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(accepted.created_unix_s),
            "model": accepted.model,
            "system_fingerprint": fingerprint,
        }

    def encode(self, entry: LogEntry) -> bytes:
        """The events of one log record that the client has not seen; empty when it shows nothing."""
        out = b"".join(
            _event(body, position.event_id(self._accepted.request_id))
            for part, body in enumerate(self._bodies(entry))
            if (position := Position(entry.seq, part)) > self._after
        )
        if isinstance(entry.record, Ended) and failure_of(entry.record) is None:
            return out + DONE
        return out

    @staticmethod
    def failure(entry: LogEntry) -> ErrorInfo | None:
        """Why the request failed, if this is the record that says so."""
        return failure_of(entry.record) if isinstance(entry.record, Ended) else None

    def _bodies(self, entry: LogEntry) -> Iterator[dict[str, Any]]:
        match entry.record:
            case Accepted(seed=seed) if self._accepted.api == "chat":
                yield self._chunk({"role": "assistant", "content": ""}, seed=seed)
            case Tokens(text=text) if text:
                yield self._chunk({"content": text})
            case Ended() as ended if (failure := failure_of(ended)) is not None:
                yield from_info(failure).body()
            case Ended() as ended:
                yield self._chunk({}, ended.reason, seed=self._accepted.seed)
                if self._include_usage:
                    yield {**self._head, "choices": [], "usage": usage_body(ended.usage)}

    def _chunk(self, delta: dict[str, str], reason: str | None = None, seed: int | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self._accepted.api == "chat":
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice |= {"logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        if seed is not None:
            chunk["seed"] = seed
        return chunk


def error_event(error: ApiError) -> bytes:
    """For what went wrong at the gateway itself. Without an id: the log does not know of it."""
    return _event(error.body(), None)


def _event(body: dict[str, Any], event_id: str | None) -> bytes:
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
