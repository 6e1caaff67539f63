"""Every stage restarts, one after the other, while streams run: nothing is lost, changed or refused."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from shared.bus import Bus
from shared.protocol.records import Ended
from shared.protocol.streams import LOG
from shared.protocol.subjects import STAGES, log_subject
from tests.e2e.conftest import MODEL, Stack

CLIENTS = 2
RESTART_S = 500

KINDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Describe a water mill."}], "temperature": 0.0},
    {"messages": [{"role": "user", "content": "Describe a river."}], "temperature": 0.9, "seed": 11},
    {"messages": [{"role": "user", "content": "Repeat: the wheel turns, the wheel turns, the wheel"}], "seed": 5},
    {"messages": [{"role": "user", "content": "Say what a sluice is. " * 40}], "temperature": 0.0},
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RESTART_S + 100)]


@dataclass
class Seen:
    """What the clients saw: request ids and texts by kind, and the times of silence in the order of their length."""

    answers: list[tuple[int, str, str]] = field(default_factory=list)
    silences_s: list[float] = field(default_factory=list)


async def stream(client: openai.AsyncOpenAI, kind: int, seen: Seen) -> None:
    request_id, text, reason = "", "", None
    last = time.monotonic()
    chunks = await client.chat.completions.create(model=MODEL, max_tokens=48, stream=True, **KINDS[kind])
    async for chunk in chunks:
        now = time.monotonic()
        seen.silences_s.append(now - last)
        last = now
        request_id = chunk.id
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert reason in ("stop", "length")
    seen.answers.append((kind, request_id, text))


async def keep_streaming(client: openai.AsyncOpenAI, kinds: list[int], seen: Seen, over: asyncio.Event) -> None:
    for kind in itertools.cycle(kinds):
        if over.is_set():
            return
        await stream(client, kind, seen)


async def watch(bus: Bus, over: asyncio.Event, deserted: Counter[str]) -> None:
    """Count the looks at which a stage had no ready instance."""
    while not over.is_set():
        await asyncio.sleep(0.1)
        for stage in STAGES:
            deserted[stage] += not any(status.state == "ready" for status in bus.statuses.live(stage))


async def outputs(bus: Bus, seen: Seen) -> list[tuple[int, list[int], str, str]]:
    """Kind, token ids, text and finish reason of each answer. Its first terminal record is the last of its log."""
    told = []
    for kind, request_id, text in seen.answers:
        async with bus.follow("default", request_id) as reader:
            (ending,) = [entry.seq async for entry in reader if isinstance(entry.record, Ended)]
        assert (await bus.js.get_last_msg(LOG.name, log_subject("default", request_id))).seq == ending
        state = await bus.open_log("default", request_id).state()
        assert state.ended is not None
        told.append((kind, state.output_ids, text, state.ended.reason))
    return told


async def test_a_rolling_restart_of_every_stage_under_load_loses_and_changes_nothing(
    stack: Stack, record_property: Any
) -> None:
    over = asyncio.Event()
    calm, disturbed, deserted = Seen(), Seen(), Counter[str]()
    # Each request on a connection of its own: one that rests may be closed under a client's hands by any HTTP server.
    http = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
    async with (
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        await Bus.connect(stack.nats_url, name="test") as bus,
    ):
        for kind in range(len(KINDS)):
            await stream(client, kind, calm)
        expected = {kind: told for kind, *told in await outputs(bus, calm)}
        pids = {stage: [entry["pid"] for entry in stack.instances(stage)] for stage in STAGES}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(bus, over, deserted))
            for number in range(CLIENTS):
                kinds = [(number + step) % len(KINDS) for step in range(len(KINDS))]
                tasks.create_task(keep_streaming(client, kinds, disturbed, over))
            try:
                said = await asyncio.to_thread(stack.headrace, "restart", timeout_s=RESTART_S)
            finally:
                over.set()
        assert said.splitlines()[-1].startswith("restarted kvstore-0, prefill-0, decode-0, draft-0, gateway-0")
        assert all(pids[stage] != [entry["pid"] for entry in stack.instances(stage)] for stage in STAGES)
        assert len(disturbed.answers) > len(KINDS)
        assert [told for told in await outputs(bus, disturbed) if told[1:] != tuple(expected[told[0]])] == []
    assert +deserted == Counter()
    longest = [round(silence, 2) for silence in sorted(disturbed.silences_s, reverse=True)[:5]]
    record_property("longest_silences_s", longest)
    print(f"{len(disturbed.answers)} streams, longest silences {longest} s")
