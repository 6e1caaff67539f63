"""One streamed request to an OpenAI-compatible server, timed. Never raises for a request that fails: it says how."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final, Literal

import httpx
import msgspec

from loadgen.errors import MalformedStream, ServerUnusable
from loadgen.outcome import Outcome
from loadgen.plan import RequestSpec, TokenCost, words
from loadgen.sse import EventParser

Api = Literal["chat", "completion"]
PATHS: Final[dict[Api, str]] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
MAX_DETAIL_CHARS: Final = 200
PROBE_WORDS: Final = (8, 72)


@dataclass(frozen=True)
class Target:
    """Where requests go and what they all share. `timeout_s` bounds a whole request; the key is never shown."""

    url: str
    model: str
    api: Api = "chat"
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 300.0
    connect_timeout_s: float = 5.0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _ErrorBody(msgspec.Struct):
    error: _Error


_chunk_decoder = msgspec.json.Decoder(_Chunk)


def open_http(url: str, api_key: str, max_connections: int, connect_timeout_s: float = 5.0) -> httpx.AsyncClient:
    """A connection pool. Whole requests are bounded by the caller; reads may be silent for as long as that."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(None, connect=connect_timeout_s),
        limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    )


async def first_model(http: httpx.AsyncClient, timeout_s: float = 10.0) -> str:
    """The first model that the server lists. Raises ServerUnusable."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await http.get("/v1/models")
            answer.raise_for_status()
            models = msgspec.json.decode(answer.content, type=_Models).data
    except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError) as error:
        raise ServerUnusable(f"{http.base_url} does not list its models: {type(error).__name__}: {error}") from error
    if not models:
        raise ServerUnusable(f"{http.base_url} serves no model")
    return models[0].id


class CompletionClient:
    """Sends requests to one target. `origin_s` is the phase's start on the `time.perf_counter` clock."""

    def __init__(self, http: httpx.AsyncClient, target: Target) -> None:
        self._http = http
        self.target = target

    async def send(self, spec: RequestSpec, origin_s: float, intended_s: float) -> Outcome:
        """Send one request and read its stream to the end."""
        outcome = Outcome(spec.number, spec.asked_prompt_tokens, spec.max_tokens, intended_s)
        outcome.sent_s = time.perf_counter() - origin_s
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._stream(spec, origin_s, outcome)
        except TimeoutError:
            _fail(outcome, "timeout", f"no end after {self.target.timeout_s:g} s")
        except httpx.ConnectTimeout as error:
            _fail(outcome, "connect_timeout", str(error))
        except httpx.ConnectError as error:
            _fail(outcome, "connect", str(error))
        except httpx.TransportError as error:
            _fail(outcome, "disconnected", f"{type(error).__name__}: {error}")
        except (MalformedStream, msgspec.MsgspecError) as error:
            _fail(outcome, "malformed", str(error))
        outcome.end_s = time.perf_counter() - origin_s
        return outcome

    async def measure_token_cost(self) -> TokenCost:
        """Two short probes tell how many tokens a word costs here. Raises ServerUnusable."""
        counts: list[tuple[int, int]] = []
        for number, count in enumerate(PROBE_WORDS):
            prompt = " ".join(words(f"probe:{number}", count))
            outcome = await self.send(RequestSpec(number, prompt, count, 1, 0), time.perf_counter(), 0.0)
            if outcome.error:
                raise ServerUnusable(f"a probe of {self.target.model} failed: {outcome.error} {outcome.error_detail}")
            counts.append((count, outcome.prompt_tokens))
        return TokenCost.from_probes(counts[0], counts[1])

    def _body(self, spec: RequestSpec) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.target.model,
            "max_tokens": spec.max_tokens,
            "temperature": self.target.temperature,
            "seed": spec.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.target.ignore_eos:
            body["ignore_eos"] = True
        if self.target.api == "chat":
            body["messages"] = [{"role": "user", "content": spec.prompt}]
        else:
            body["prompt"] = spec.prompt
        return body

    async def _stream(self, spec: RequestSpec, origin_s: float, outcome: Outcome) -> None:
        async with self._http.stream("POST", PATHS[self.target.api], json=self._body(spec)) as answer:
            outcome.request_id = answer.headers.get("x-request-id", "")
            if answer.status_code != 200:
                outcome.retry_after = answer.headers.get("retry-after")
                _fail(outcome, f"http_{answer.status_code}", _message(await answer.aread()))
                return
            parser = EventParser()
            async for data in answer.aiter_bytes():
                now_s = time.perf_counter() - origin_s
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        _settle(outcome, self.target.ignore_eos)
                        return
                    _take(_chunk_decoder.decode(event), now_s, outcome)
                    if outcome.error:
                        return
        _fail(outcome, "disconnected", "the stream ended before its [DONE]")


def _take(chunk: _Chunk, now_s: float, outcome: Outcome) -> None:
    if chunk.error is not None:
        _fail(outcome, f"error_event:{chunk.error.code or chunk.error.type or 'unknown'}", chunk.error.message)
        return
    if chunk.usage is not None:
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens
        outcome.counted_by_server = True
        if chunk.usage.prompt_tokens_details is not None:
            outcome.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
    for choice in chunk.choices:
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            outcome.text_s.append(now_s)
        if choice.finish_reason:
            outcome.finish_reason = choice.finish_reason


def _settle(outcome: Outcome, fixed_length: bool) -> None:
    """The stream came to its regular end: is it also whole?"""
    if not outcome.counted_by_server:
        outcome.output_tokens = len(outcome.text_s)
    if outcome.finish_reason is None:
        _fail(outcome, "no_finish_reason", "the stream ended without a finish reason")
    elif outcome.finish_reason in ("error", "cancelled"):
        _fail(outcome, f"finished:{outcome.finish_reason}", "")
    elif fixed_length and outcome.counted_by_server and outcome.output_tokens != outcome.asked_output_tokens:
        _fail(outcome, "wrong_length", f"{outcome.output_tokens} tokens came, {outcome.asked_output_tokens} were asked")


def _fail(outcome: Outcome, kind: str, detail: str) -> None:
    outcome.error = kind
    outcome.error_detail = detail[:MAX_DETAIL_CHARS]


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return body[:MAX_DETAIL_CHARS].decode("utf-8", "replace")
