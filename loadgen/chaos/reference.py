"""The undisturbed run: every request once, without speculation and faults, some of them alone in their batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from loadgen.chaos.errors import ReferenceFailed
from loadgen.chaos.http_client import HttpClients
from loadgen.chaos.observer import Observer
from loadgen.chaos.reading import Reading
from loadgen.chaos.verify import Answer, answer_of, check_log
from loadgen.chaos.workload import Request
from shared.protocol.records import choice_request_id

TOGETHER: Final = 8

Expected = dict[int, list[Answer]]
"""By request number: an answer for each choice."""


async def reference(
    clients: HttpClients,
    observer: Observer,
    tenant: str,
    requests: Sequence[Request],
    *,
    seed: int,
    alone: int,
    label: str,
    progress: Callable[[int], None],
) -> Expected:
    """Run them all. Raises ReferenceFailed, which names the request."""
    expected: Expected = {}
    waiting = list(requests)
    random.Random(f"{seed}:alone").shuffle(waiting)

    async def run(request: Request) -> None:
        expected[request.number] = await _run(clients, observer, tenant, request, label)
        progress(len(expected))

    for request in waiting[:alone]:
        await run(request)
    queue = iter(waiting[alone:])

    async def client() -> None:
        for request in queue:
            await run(request)

    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    return expected


async def _run(clients: HttpClients, observer: Observer, tenant: str, request: Request, label: str) -> list[Answer]:
    plain = msgspec.structs.replace(request, body={**request.body, "speculation": "off"}, client="whole")
    reading = Reading("client", "whole")
    await clients.whole(plain, reading, f"{label}-{request.number}")
    if not reading.done:
        raise ReferenceFailed(f"request {request.number} of the undisturbed run failed: {reading.error}")
    answers = []
    for choice in range(request.choices):
        entries = await observer.read_log(tenant, choice_request_id(reading.request_id, choice))
        try:
            answer = answer_of(entries)
        except ValueError as error:
            raise ReferenceFailed(f"{reading.request_id}, choice {choice}, of the undisturbed run: {error}") from error
        verdict = check_log(entries, answer, speculates=False)
        if not verdict.ok:
            raise ReferenceFailed(f"{reading.request_id}, choice {choice}: {'; '.join(verdict.problems)}")
        answers.append(answer)
    return answers
