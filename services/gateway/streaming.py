"""From a request's logs to server-sent events in OpenAI's format. Pure: no I/O, no clock.

A client that sends the id of the last event it saw (see `positions`) gets exactly what follows, from any gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from services.gateway.errors import ApiError, failure_of, from_info
from services.gateway.logprobs import LogprobWriter
from services.gateway.positions import CLOSING, Position
from services.gateway.results import usage_body, usage_of
from shared.bus import LogEntry
from shared.models import TokenBytes
from shared.protocol.records import Accepted, Ended, ErrorInfo, Tokens

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n"
"""A comment, without the empty line that ends an event: clients that remember the last id would take it for one."""


class _Choice:
    """What the stream has to know of one choice beyond the record at hand."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.ended: Ended | None = None
        self.logprobs: LogprobWriter | None = None


class EventStream:
    """Turns log entries into the bytes of one client's stream. Feed it each log from its beginning.

    The chat format opens each choice with the role once it is accepted. Tokens whose text is held back make an event
    only if they have log probabilities to show. The usage and `[DONE]` come when every choice has ended. A choice that
    fails is an `error` object and closes the stream without `[DONE]`: a cut answer must not look like a whole one.
    """

    def __init__(
        self,
        accepted: Accepted,
        fingerprint: str,
        tokens: TokenBytes,
        *,
        include_usage: bool,
        after: Position | None = None,
    ) -> None:
        self._accepted = accepted
        self._tokens = tokens
        self._after = after or Position.start(accepted.choices)
        self._shown = list(self._after.seqs)
        self._choices = [_Choice() for _ in range(accepted.choices)]
        self._include_usage = include_usage
        self.failure: ErrorInfo | None = None
        """Why the stream is closed without an answer."""
        chat = accepted.api == "chat"
        self._head = {
            "id": accepted.request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(accepted.created_unix_s),
            "model": accepted.model,
            "system_fingerprint": fingerprint,
        }

    @property
    def finished(self) -> bool:
        """Nothing will follow: every choice has ended, or one has failed."""
        return self.failure is not None or all(choice.ended is not None for choice in self._choices)

    def encode(self, choice: int, entry: LogEntry) -> bytes:
        """The events of one log record that the client has not seen; empty when it shows nothing."""
        if self.finished:
            return b""
        bodies = list(self._bodies(choice, entry))
        out = b""
        if entry.seq > self._shown[choice]:
            self._shown[choice] = entry.seq
            out = b"".join(self._event(body) for body in bodies)
        if not self.finished or self.failure is not None:
            return out
        if self._include_usage and not (self._after.part >= CLOSING and not out):
            pairs = [(c.accepted or self._accepted, c.ended) for c in self._choices if c.ended is not None]
            out += self._event({**self._head, "choices": [], "usage": usage_body(usage_of(pairs))}, CLOSING)
        return out + DONE

    def _bodies(self, index: int, entry: LogEntry) -> Iterator[dict[str, Any]]:
        choice = self._choices[index]
        match entry.record:
            case Accepted() as accepted:
                choice.accepted = accepted
                choice.logprobs = LogprobWriter(accepted, self._tokens)
                if accepted.api == "chat":
                    yield self._chunk(index, {"role": "assistant", "content": ""}, told_seed=accepted.seed)
            case Tokens() as tokens:
                logprobs = choice.logprobs.body(tokens) if choice.logprobs is not None else None
                if tokens.text or logprobs is not None:
                    yield self._chunk(index, {"content": tokens.text}, logprobs=logprobs)
            case Ended() as ended:
                choice.ended = ended
                self.failure = failure_of(ended)
                if self.failure is not None:
                    yield from_info(self.failure).body()
                else:
                    seed = choice.accepted.seed if choice.accepted is not None else None
                    yield self._chunk(index, {}, ended.reason, told_seed=seed)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        told_seed: int | None = None,
    ) -> dict[str, Any]:
        """One chunk of one choice. `told_seed`: the choice's seed, where the chunk is to tell it."""
        choice: dict[str, Any] = {"index": index}
        if self._accepted.api == "chat":
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        if told_seed is not None:
            choice["seed"] = told_seed
            chunk["seed"] = self._accepted.seed
        return chunk

    def _event(self, body: dict[str, Any], part: int = 0) -> bytes:
        return _event(body, Position(tuple(self._shown), part).event_id(self._accepted.request_id))


def error_event(error: ApiError) -> bytes:
    """For what went wrong at the gateway itself. Without an id: the log does not know of it."""
    return _event(error.body(), None)


def _event(body: dict[str, Any], event_id: str | None) -> bytes:
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
