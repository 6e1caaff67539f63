"""Decode workers that crash, hang or are paused in mid-answer: others go on, and what crashes them is found."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.bus import Bus, LogEntry, LogState
from shared.protocol.records import Claimed, Ended, Tokens
from shared.protocol.subjects import dead_subject
from tests.e2e.conftest import MODEL, Stack

ROOT = Path(__file__).resolve().parents[2]
POISON = 40_111
"""A token id that no other prompt of these tests holds."""

OUTPUT = 40
PATIENCE_S = 400


class Supervised:
    """A faulty decode worker, started again whenever it ends, as a supervisor would."""

    def __init__(self, stack: Stack, fault: str, **settings: str) -> None:
        secret = (Path(stack.env["HEADRACE_HOME"]) / "secret").read_text().strip()
        self._environment = {
            **stack.env,
            "HEADRACE_NATS_URL": stack.nats_url,
            "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{stack.env['HEADRACE_REDIS_PORT']}/0",
            "HEADRACE_SECRET": secret,
            "HEADRACE_MODEL": MODEL,
            "HEADRACE_INSTANCE": "decode-9",
            "HEADRACE_KV_MEMORY_GIB": "0.2",
            **settings,
        }
        self._command = [sys.executable, "-m", "tests.integration.faulty_worker", "decode", fault, str(POISON)]
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run)
        self.statuses: list[int] = []

    def _run(self) -> None:
        while not self._stopping:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.statuses.append(self._process.wait())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join(timeout=60)


@contextmanager
def faulty_decode(stack: Stack, fault: str, **settings: str) -> Iterator[Supervised]:
    running = Supervised(stack, fault, **settings)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def decode_instances(stack: Stack, count: int) -> Iterator[None]:
    stack.headrace("scale", f"decode={count}")
    try:
        yield
    finally:
        stack.headrace("scale", "decode=1")


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    async with await Bus.connect(stack.nats_url, name="test") as connected:
        yield connected


async def ask(stack: Stack, prompt: list[int], output: int = OUTPUT, seed: int = 7) -> dict[str, Any]:
    """One whole answer, or the error instead of one."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "temperature": 0.8, "seed": seed}
        answer = await client.post("/v1/completions", json=body | {"ignore_eos": True})
        result: dict[str, Any] = answer.json() | {"request_id": answer.headers["x-headrace-request-id"]}
        return result


async def entries_of(bus: Bus, request_id: str) -> list[LogEntry]:
    return await bus.open_log("default", request_id).read()


async def state_of(bus: Bus, request_id: str) -> LogState:
    return LogState.replay(await entries_of(bus, request_id))


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [1000 + (number * 977 + i * i * 13) % 30_000 for i in range(length)]


@pytest.mark.timeout(600)  # the worker starts five times
async def test_a_poison_request_is_convicted_and_its_seven_neighbours_finish_right(stack: Stack, bus: Bus) -> None:
    prompts = [prompt_of(n) for n in range(7)]
    poison = [*prompt_of(7), POISON, 1234]
    undisturbed = await asyncio.gather(*(ask(stack, prompt, seed=n) for n, prompt in enumerate(prompts)))
    expected = [(await state_of(bus, answer["request_id"])).output_ids for answer in undisturbed]
    assert [len(ids) for ids in expected] == [OUTPUT] * 7
    with decode_instances(stack, 0), faulty_decode(stack, "abort") as faulty:
        asking = [asyncio.create_task(ask(stack, prompt, seed=n)) for n, prompt in enumerate(prompts)]
        ended = await ask(stack, poison)
        answers = await asyncio.gather(*asking)
    assert ended["error"]["code"] == "worker_crashed"
    states = [await state_of(bus, answer["request_id"]) for answer in answers]
    assert [state.output_ids for state in states] == expected
    assert [state.ended.reason for state in states if state.ended is not None] == ["length"] * 7
    claims = [c for c in (await state_of(bus, ended["request_id"])).claims if c.stage == "decode"]
    assert [claim.alone for claim in claims] == [False, False, True, True]
    dead = await bus.js.get_last_msg("HR_DEAD", dead_subject("decode", "default", ended["request_id"]))
    headers = dead.headers or {}
    assert headers["Headrace-Cause"] == "worker_crashed"
    assert headers["Headrace-Claims"].split(",") == [claim.worker for claim in claims]
    assert faulty.statuses.count(-signal.SIGABRT) == len(claims)


class Disturbance:
    """A long answer that runs on one of two decode workers; `worker` holds it now."""

    def __init__(self, stack: Stack, bus: Bus, prompt: list[int], output: int, seed: int) -> None:
        self._stack, self._bus = stack, bus
        self._asking = asyncio.create_task(self._follow(prompt, output, seed))
        self.request_id = ""
        self.gaps: list[float] = []

    async def _follow(self, prompt: list[int], output: int, seed: int) -> str:
        """The streamed text, and the pauses in it."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "temperature": 0.8, "seed": seed}
        text, last_s = "", 0.0
        async with (
            httpx.AsyncClient(base_url=self._stack.url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True, "stream": True}) as stream,
        ):
            self.request_id = stream.headers["x-headrace-request-id"]
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    now = time.monotonic()
                    self.gaps += [now - last_s] if last_s else []
                    last_s, text = now, text + line
        assert text.endswith("data: [DONE]")
        return text

    async def holder(self, tokens: int, but: str = "") -> str:
        """The decode worker that holds it, once that many tokens are there."""
        async with asyncio.timeout(60):
            while True:
                if self.request_id:
                    state = await state_of(self._bus, self.request_id)
                    holder = state.holder
                    if len(state.output_ids) >= tokens and holder is not None and holder.worker != but:
                        assert state.ended is None, "it ended before it was disturbed"
                        return holder.worker
                await asyncio.sleep(0.02)

    async def end(self) -> LogState:
        await self._asking
        entries = await entries_of(self._bus, self.request_id)
        assert [isinstance(e.record, Ended) for e in entries] == [False] * (len(entries) - 1) + [True]
        epoch = 0
        for entry in entries:
            if isinstance(entry.record, Claimed):
                epoch = entry.record.epoch
            if isinstance(entry.record, Tokens):
                assert entry.record.epoch == epoch, "a token of a holder that had lost the request"
        return LogState.replay(entries)


def both_ready(stack: Stack) -> dict[str, int]:
    """Two decode workers that serve; the process id of each by instance name."""
    give_up = time.monotonic() + 120
    while len(ready := [e for e in stack.instances("decode") if e["state"] == "ready"]) < 2:
        assert time.monotonic() < give_up
    return {entry["instance"]: entry["pid"] for entry in ready}


@pytest.fixture(scope="module")
def two_decodes(stack: Stack) -> Iterator[None]:
    with decode_instances(stack, 2):
        yield


async def test_kill_9_of_a_decode_worker_sends_its_request_to_the_other(
    stack: Stack, bus: Bus, two_decodes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = both_ready(stack)
    undisturbed = await state_of(bus, (await ask(stack, prompt_of(20), 120))["request_id"])
    request = Disturbance(stack, bus, prompt_of(20), 120, seed=7)
    killed = await request.holder(tokens=15)
    stack.kill_9(pids[killed.partition(".")[0]])
    state = await request.end()
    assert state.output_ids == undisturbed.output_ids
    successors = [claim.worker for claim in state.claims if claim.stage == "decode"][1:]
    assert [name.partition(".")[0] for name in successors] == [({*pids} - {killed.partition(".")[0]}).pop()]
    with capsys.disabled():
        print(f"\nkill -9 of decode: the client's longest pause was {max(request.gaps):.1f} s")


async def test_a_paused_decode_worker_that_wakes_up_after_a_takeover_does_no_harm(
    stack: Stack, bus: Bus, two_decodes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = both_ready(stack)
    undisturbed = await state_of(bus, (await ask(stack, prompt_of(21), 200))["request_id"])
    request = Disturbance(stack, bus, prompt_of(21), 200, seed=7)
    paused = await request.holder(tokens=15)
    os.kill(pids[paused.partition(".")[0]], signal.SIGSTOP)
    try:
        await request.holder(tokens=20, but=paused)
    finally:
        os.kill(pids[paused.partition(".")[0]], signal.SIGCONT)
    state = await request.end()
    assert state.output_ids == undisturbed.output_ids
    assert [claim.worker == paused for claim in state.claims if claim.stage == "decode"] == [True, False]
    after = {e["instance"]: e["pid"] for e in stack.instances("decode")}
    assert after == pids, "the paused worker lives on"
    stack.wait_until_idle()
    with capsys.disabled():
        print(f"\npause of decode: the client's longest pause was {max(request.gaps):.1f} s")
