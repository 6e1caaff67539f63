"""Requests of one side, streamed as any client streams them; their ids and counts come from the logs, off the clock."""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from nats.aio.client import Client as Nats

from loadgen.chaos.http_client import HttpClients
from loadgen.chaos.observer import read_log
from loadgen.chaos.reading import Reading
from loadgen.chaos.verify import answer_of
from loadgen.chaos.workload import Request
from loadgen.spec_bench.errors import NotMeasured
from loadgen.spec_bench.stack import Side, Target
from loadgen.spec_bench.statistics import Arrival, Timing, arrivals, timing
from loadgen.spec_bench.workloads import Api, Script
from shared.protocol.records import Ended, Tokens
from shared.protocol.subjects import log_subject

_OFF: Final = {"speculation": "off"}


class Answered(msgspec.Struct, frozen=True):
    """One answer. `steps`: records behind the first token, so as many as the decode worker's steps or fewer."""

    ids: list[int]
    text: str
    reason: str
    arrivals: list[Arrival]
    drafted: int
    accepted: int
    steps: int


@dataclass(frozen=True)
class Round:
    """Answers by script and turn. All clients were at work from `since_s` until `until_s`."""

    answers: list[list[Answered]]
    since_s: float
    until_s: float

    @property
    def timing(self) -> Timing:
        streams = [answered.arrivals for turns in self.answers for answered in turns]
        return timing(streams, self.since_s, self.until_s)


class Clients:
    """Clients of one side, which say in each request whether it may speculate."""

    def __init__(self, http: httpx.AsyncClient, nats: Nats, target: Target, side: Side, *, speculate: bool) -> None:
        self._http = HttpClients(http, [target.url], target.model, side.key)
        self._nats = nats
        self._tenant = side.tenant
        self._speculation = "auto" if speculate else "off"
        self._label = f"spec-bench-{id(self)}-{self._speculation}"
        self._numbers = itertools.count()

    async def answers(self, scripts: Sequence[Script], in_flight: int) -> Round:
        """All turns of all scripts by `in_flight` clients, each of which takes the next one when it is done with one.

        Several first prompts are computed and stored beforehand: else the last stream would only begin when the first
        has ended. Raises NotMeasured.
        """
        if in_flight > 1:
            await asyncio.gather(
                *(self._send({**script.body([]), **_OFF, "max_tokens": 1}, "whole") for script in scripts)
            )
        left = collections.deque(enumerate(scripts))
        answers: list[list[Answered]] = [[] for _ in scripts]
        first_s: list[float] = []
        last_s: list[float] = []

        async def client() -> None:
            streams: list[list[Arrival]] = []
            while left:
                number, script = left.popleft()
                async for answered in self._turns(script):
                    answers[number].append(answered)
                    streams.append(answered.arrivals)
                    if len(streams) == 1:
                        first_s.append(min((arrival.at_s for arrival in answered.arrivals), default=0.0))
            last_s.append(max((arrival.at_s for stream in streams for arrival in stream), default=math.inf))

        clients = [asyncio.ensure_future(client()) for _ in range(in_flight)]
        try:
            await asyncio.gather(*clients)
        finally:  # when one fails the others end too
            for one in clients:
                one.cancel()
            await asyncio.wait(clients)
        return Round(answers, since_s=max(first_s), until_s=min(last_s))

    async def _turns(self, script: Script) -> AsyncIterator[Answered]:
        told: list[str] = []
        for _ in range(script.turns):
            body = {**script.body(told), "speculation": self._speculation}
            answered = await self._settle(await self._send(body, "stream"))
            told.append(answered.text)
            yield answered

    async def _send(self, body: dict[str, Any], kind: Any) -> Reading:
        number = next(self._numbers)
        api: Api = "chat" if "messages" in body else "completion"
        request = Request(number, api, body, kind, gateway=0, prompt="short")
        reading = Reading("client", kind)
        send = self._http.stream if kind == "stream" else self._http.whole
        await send(request, reading, f"{self._label}-{number}")
        if not reading.done:
            raise NotMeasured(f"request {reading.request_id or number} failed: {reading.error}")
        if reading.reconnects:
            raise NotMeasured(f"request {reading.request_id} was interrupted {reading.reconnects} times")
        return reading

    async def _settle(self, reading: Reading) -> Answered:
        entries = await read_log(self._nats, log_subject(self._tenant, reading.request_id), 0)
        try:
            answer = answer_of(entries)
        except ValueError as error:
            raise NotMeasured(f"{reading.request_id}: {error}") from error
        usage = next(entry.record.usage for entry in reversed(entries) if isinstance(entry.record, Ended))
        return Answered(
            ids=answer.ids,
            text=answer.text,
            reason=answer.reason,
            arrivals=arrivals(reading.shown, entries),
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
            steps=max(sum(isinstance(entry.record, Tokens) for entry in entries) - 1, 0),
        )
