"""An OpenAI-compatible server with known behaviour, to test the load generator: the model's name picks the script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

TEMPLATE_TOKENS = 10
LONG_PROMPT_WORDS = 200
CROWD = 4
"""Requests at once that the model `crowded` serves."""


@dataclass
class Seen:
    """What reached the server."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cut_off: int = 0


class ScriptedServer:
    """Runs in a thread. `seen` may be read and replaced between loads."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._one_at_a_time = asyncio.Lock()
        self._long_running = 0
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._completion)
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "steady"}, {"id": "faulty"}]}

    async def _chat(self, request: Request) -> Any:
        body = await request.json()
        return await self._answer(body, body["messages"][0]["content"], lambda text: {"delta": {"content": text}})

    async def _completion(self, request: Request) -> Any:
        body = await request.json()
        return await self._answer(body, body["prompt"], lambda text: {"text": text})

    async def _answer(self, body: dict[str, Any], prompt: str, choice: Any) -> Any:
        number = len(self.seen.bodies)
        self.seen.bodies.append(body)
        self.seen.at_s.append(time.perf_counter())
        if body["model"] == "faulty" and number % 6 in (1, 2) and body["max_tokens"] > 1:
            status = 429 if number % 6 == 1 else 503
            return JSONResponse({"error": {"message": "busy", "code": "queue_full"}}, status_code=status)
        if body["model"] == "crowded" and self.seen.running >= CROWD:
            refusal = {"error": {"message": "busy", "code": "queue_full"}}
            return JSONResponse(refusal, status_code=503, headers={"retry-after": "3"})
        stream = self._counted(self._script(body, prompt, number, choice))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-request-id": f"req-{number}"})

    async def _counted(self, stream: AsyncIterator[str]) -> AsyncIterator[str]:
        self.seen.running += 1
        self.seen.most_running = max(self.seen.most_running, self.seen.running)
        try:
            async for part in stream:
                yield part
        except asyncio.CancelledError:
            self.seen.cut_off += 1
            raise
        finally:
            self.seen.running -= 1

    async def _script(self, body: dict[str, Any], prompt: str, number: int, choice: Any) -> AsyncIterator[str]:
        model, tokens = body["model"], body["max_tokens"]
        fault = number % 6 if model == "faulty" and tokens > 1 else 0
        if model == "serial":
            async with self._one_at_a_time:
                await asyncio.sleep(0.1)
        if model == "half slow" and tokens > 1:
            await asyncio.sleep(3.0 if number % 2 else 0.0)
        if model == "stuck" and tokens > 1:
            await asyncio.sleep(600)
        long = len(prompt.split()) > LONG_PROMPT_WORDS
        self._long_running += long
        try:
            yield event({"choices": [choice("")]})
            if long:
                await asyncio.sleep(0.3)
            sent = tokens // 2 if model == "short" and tokens > 1 else tokens
            for index in range(sent):
                await asyncio.sleep(0.05 if self._long_running and not long else 0.005)
                yield ": keep-alive\r\n" + event({"choices": [choice(f"t{index}\u2028")]})
                if fault == 3:
                    yield event({"error": {"message": "worker lost", "code": "worker_lost"}})
                if fault == 4:
                    raise ConnectionResetError("the server dies")
                if fault == 5:
                    yield "data: {nonsense\n\n"
        finally:
            self._long_running -= long
        yield event({"choices": [choice("") | {"finish_reason": "length"}]})
        usage = {"prompt_tokens": len(prompt.split()) + TEMPLATE_TOKENS, "completion_tokens": sent}
        if model != "uncounted":
            yield event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}})
        if model != "no end" or tokens == 1:
            yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\r\n\r\n"


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
