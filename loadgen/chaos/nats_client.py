"""Clients without HTTP: they submit over NATS and follow the logs by the rules of docs/protocol.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from loadgen.chaos.errors import StackUnusable
from loadgen.chaos.http_client import PATIENCE_S, RETRY_S, TRY_ELSEWHERE
from loadgen.chaos.observer import Entry, read_log
from loadgen.chaos.reading import Reading, Shown
from loadgen.chaos.workload import Request
from shared.protocol.records import Ended, Tokens, choice_request_id, decode_record
from shared.protocol.subjects import SUBMIT, live_subject, log_subject

SILENCE_S: Final = 1.0
ANSWER_S: Final = 5.0


class NatsClients:
    """Clients of one tenant on one connection."""

    def __init__(self, client: Client, model: str, tenant: str, key: str) -> None:
        self._client = client
        self._model = model
        self._tenant = tenant
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def run(self, request: Request, reading: Reading, idempotency_key: str) -> None:
        """Submit, unless `reading` knows the request's id already, and follow every choice to its end."""
        reading.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                if not reading.request_id:
                    reading.accepted(await self._submit(request, reading, idempotency_key))
                await asyncio.gather(*(self._follow(reading, choice) for choice in range(request.choices)))
            reading.ended_s = time.monotonic()
        except TimeoutError:
            reading.error = f"no whole answer after {PATIENCE_S:.0f} s"
        except StackUnusable as error:
            reading.error = str(error)

    async def _submit(self, request: Request, reading: Reading, idempotency_key: str) -> str:
        body = msgspec.json.encode({**request.body, "model": self._model})
        headers = {**self._headers, "Idempotency-Key": idempotency_key}
        while True:
            try:
                reply = await self._client.request(SUBMIT, body, timeout=ANSWER_S, headers=headers)
                answer = msgspec.json.decode(reply.data, type=dict[str, Any])
            except (nats.errors.Error, TimeoutError):
                reading.reconnects += 1
                await asyncio.sleep(RETRY_S)
                continue
            if "error" not in answer:
                return str(answer["request_id"])
            code = str(answer["error"].get("code"))
            if code not in TRY_ELSEWHERE:
                raise StackUnusable(f"{code}: {answer['error'].get('message')}")
            reading.refusals += 1
            await asyncio.sleep(RETRY_S)

    async def _follow(self, reading: Reading, choice: int) -> None:
        async for entry in follow(self._client, self._tenant, choice_request_id(reading.request_id, choice)):
            text, tokens, finish = "", 0, ""
            match entry.record:
                case Tokens() as record:
                    text, tokens = record.text, len(record.ids)
                case Ended() as record:
                    finish = record.reason
            reading.shown.append(Shown(time.monotonic(), choice, entry.seq, text, tokens, finish))


async def follow(client: Client, tenant: str, request_id: str) -> AsyncIterator[Entry]:
    """Every record of a log once and in order, live ones as they come. Raises StackUnusable when NATS stays away."""
    arrived: asyncio.Queue[Msg] = asyncio.Queue()

    async def on_message(message: Msg) -> None:
        arrived.put_nowait(message)

    live = await client.subscribe(live_subject(tenant, request_id), cb=on_message)
    subject = log_subject(tenant, request_id)
    try:
        last, entries = 0, await read_log(client, subject, 0)
        while True:
            for entry in entries:
                last = entry.seq
                yield entry
                if isinstance(entry.record, Ended):
                    return
            entries = await _next(client, subject, arrived, last)
    finally:
        if not client.is_closed:
            await live.unsubscribe()


async def _next(client: Client, subject: str, arrived: asyncio.Queue[Msg], last: int) -> list[Entry]:
    try:
        async with asyncio.timeout(SILENCE_S):
            message = await arrived.get()
    except TimeoutError:
        return await read_log(client, subject, last)
    headers = message.headers or {}
    seq, previous = int(headers["Nats-Sequence"]), int(headers.get("Nats-Last-Sequence", 0))
    if seq <= last:
        return []
    if previous == last:
        return [Entry(seq, decode_record(message.data))]
    return await read_log(client, subject, last)
