"""Clients over HTTP that do what a careful one does: retry with the same key, resume elsewhere by the last event id."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import httpx
import msgspec

from loadgen.chaos.reading import Reading, Shown
from loadgen.chaos.sse_events import SseEvent, SseReader
from loadgen.chaos.workload import Request
from loadgen.client import PATHS
from loadgen.errors import MalformedStream

PATIENCE_S: Final = 180.0
"""A client that got no whole answer for this long gives up: the run then counts its request as broken."""
SILENCE_S: Final = 30.0
"""Idle streams carry a comment every 15 s."""
WHOLE_SILENCE_S: Final = 90.0
RETRY_S: Final = 0.2
MAX_RETRY_AFTER_S: Final = 5.0
TRY_ELSEWHERE: Final = frozenset(
    {
        "gateway_overloaded",
        "gateway_stopping",
        "log_full",
        "log_unreachable",
        "queue_full",
        "queue_unavailable",
        "too_many_requests",
    }
)
"""Refusals before acceptance, and what one gateway cannot do though the request goes on."""


class _Elsewhere(Exception):
    """This connection is of no more use; the request may go on."""

    def __init__(self, wait_s: float = RETRY_S, *, refused: bool = False) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s
        self.refused = refused


class _Failed(Exception):
    """The gateway says that there is no answer."""


class HttpClients:
    """Clients of one tenant. Each call drives one reader until it has the whole answer, an error, or no patience."""

    def __init__(self, http: httpx.AsyncClient, gateways: list[str], model: str, key: str) -> None:
        self._http = http
        self._gateways = gateways
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def stream(self, request: Request, reading: Reading, idempotency_key: str) -> None:
        """Follow a request's events; it is sent first unless `reading` knows its id already."""
        await self._insist(request, reading, lambda url: self._stream_once(request, reading, idempotency_key, url))

    async def whole(self, request: Request, reading: Reading, idempotency_key: str) -> None:
        await self._insist(request, reading, lambda url: self._whole_once(request, reading, idempotency_key, url))

    async def _insist(self, request: Request, reading: Reading, once: Any) -> None:
        """One gateway after the other until there is an answer."""
        reading.sent_s = time.monotonic()
        turn = request.gateway + (reading.name != "client")
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not reading.done:
                    reading.gateway = turn % len(self._gateways)
                    try:
                        await once(self._gateways[reading.gateway])
                        reading.ended_s = time.monotonic()
                    except (_Elsewhere, httpx.TransportError, TimeoutError) as cause:
                        reading.gateway = -1
                        turn += 1
                        refused = isinstance(cause, _Elsewhere) and cause.refused
                        reading.refusals += refused
                        reading.reconnects += not refused
                        await asyncio.sleep(cause.wait_s if isinstance(cause, _Elsewhere) else RETRY_S)
        except TimeoutError:
            reading.error = f"no whole answer after {PATIENCE_S:.0f} s"
        except (_Failed, MalformedStream, msgspec.MsgspecError) as error:
            reading.error = str(error)
        finally:
            reading.gateway = -1

    async def _stream_once(self, request: Request, reading: Reading, idempotency_key: str, url: str) -> None:
        path = url + PATHS[request.api]
        if reading.request_id:
            resumed = {"Last-Event-ID": reading.last_event_id} if reading.last_event_id else {}
            opening = self._http.stream(
                "GET",
                f"{path}/{reading.request_id}",
                params={"stream": "true"},
                headers={**self._headers, **resumed},
            )
        else:
            body = {**request.body, "model": self._model, "stream": True}
            if request.include_usage:
                body["stream_options"] = {"include_usage": True}
            headers = {**self._headers, "Idempotency-Key": idempotency_key}
            opening = self._http.stream("POST", path, json=body, headers=headers)
        async with opening as answer:
            if answer.status_code != 200:
                raise _refusal(answer.status_code, await answer.aread(), _retry_after_s(answer))
            reading.accepted(answer.headers.get("x-headrace-request-id", reading.request_id))
            parser, chunks = SseReader(), aiter(answer.aiter_bytes())
            while True:
                async with asyncio.timeout(SILENCE_S):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    raise _Elsewhere
                for event in parser.feed(chunk):
                    if event.data == b"[DONE]":
                        return
                    take_event(reading, event, time.monotonic())
                if reading.cut_asked:
                    reading.cut_asked = False
                    raise _Elsewhere(0.0)

    async def _whole_once(self, request: Request, reading: Reading, idempotency_key: str, url: str) -> None:
        async with asyncio.timeout(WHOLE_SILENCE_S):
            answer = await self._http.post(
                url + PATHS[request.api],
                json={**request.body, "model": self._model},
                headers={**self._headers, "Idempotency-Key": idempotency_key},
            )
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content, _retry_after_s(answer))
        reading.accepted(answer.headers.get("x-headrace-request-id", ""))
        reading.whole = msgspec.json.decode(answer.content, type=dict[str, Any])
        reading.usage = reading.whole["usage"]


def take_event(reading: Reading, event: SseEvent, now_s: float) -> None:
    """Note what an event shows. Raises _Elsewhere or _Failed for an error event, MalformedStream for nonsense."""
    body = msgspec.json.decode(event.data, type=dict[str, Any])
    if "error" in body:
        raise _refusal(200, event.data)
    if not event.event_id:
        raise MalformedStream(f"an event without an id: {event.data[:200]!r}")
    reading.last_event_id = event.event_id
    if not body["choices"]:
        reading.usage, reading.usage_events = body["usage"], reading.usage_events + 1
        return
    (choice,) = body["choices"]
    index = int(choice["index"])
    delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
    reading.shown.append(
        Shown(
            at_s=now_s,
            choice=index,
            seq=_seq_of(event.event_id, index),
            text=delta or "",
            tokens=_logprob_entries(choice.get("logprobs")),
            finish=choice["finish_reason"] or "",
        )
    )


def _seq_of(event_id: str, choice: int) -> int:
    """`<request>:<seq>`, or with several choices `<request>:<newest>-<b0>-<b1>...` (docs/protocol.md)."""
    places = event_id.rpartition(":")[2].partition(".")[0]
    newest, *behind = (int(place) for place in places.split("-"))
    return newest - behind[choice] if behind else newest


def _logprob_entries(logprobs: dict[str, Any] | None) -> int:
    if logprobs is None:
        return -1
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


def _retry_after_s(answer: httpx.Response) -> float:
    """What the gateway asks for, bounded: a run does not wait for minutes."""
    return min(float(answer.headers.get("retry-after", RETRY_S)), MAX_RETRY_AFTER_S)


def _refusal(status: int, content: bytes, retry_after_s: float = RETRY_S) -> Exception:
    try:
        error = msgspec.json.decode(content, type=dict[str, Any])["error"]
        code, message = str(error.get("code")), str(error.get("message"))
    except (msgspec.MsgspecError, KeyError, TypeError):
        code, message = "", content[:200].decode(errors="replace")
    if code in TRY_ELSEWHERE:
        return _Elsewhere(retry_after_s, refused=code not in ("gateway_stopping", "log_unreachable"))
    return _Failed(f"{status} {code}: {message}")
