"""What the gateway's tests share: a tiny model on disk, gateways as real processes, and a worker that tests direct.

The worker speaks the real protocol on a real NATS server in place of prefill and decode: it pulls, claims, appends,
acks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.bus import AppendRefused, Bus, Delivery, LogEntry, RequestLog, RequestUnknown, list_subjects
from shared.protocol.jobs import GenerationRequest, decode_request
from shared.protocol.records import Claimed, Ended, ErrorInfo, FinishReason, TokenLogprobs, Tokens, Usage
from shared.protocol.seeds import derived_seed
from shared.protocol.status import InstanceStatus
from shared.protocol.streams import REQUESTS

PATIENCE_S = 20.0
"""Bounds every wait of the tests; none of them measures time."""

STOP_S = 40.0
"""A gateway lets running answers go on for its drain time, 20 s, and finishes what came over NATS behind that."""

Start = Callable[..., "GatewayProcess"]
Open = Callable[..., Awaitable["Stream"]]
"""Types of the fixtures that start gateways and open streams."""

_seeds = itertools.count(1000)


def make_model(path: Path, context_length: int = 512) -> Path:
    """A model directory with a tokenizer of one token a byte, so that tests can count tokens."""
    path.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate(["<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"vocab_size": len(vocabulary), "max_position_embeddings": context_length, "eos_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system comes first') }}{% endif %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
    )
    save_file({"weight": np.zeros(4, np.float32)}, str(path / "model.safetensors"))
    return path


def fresh_seed() -> int:
    """Names a test's request: the directed worker hands it over by its seed."""
    return next(_seeds)


class GatewayProcess:
    """`python -m services.gateway` as its own process, on a free port, logging JSON to a file."""

    def __init__(
        self, nats_url: str, model: Path, directory: Path, *, env: Mapping[str, str] | None = None, **settings: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / f"gateway-{time.monotonic_ns()}.log"
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))},
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_MODEL": str(model),
            "HEADRACE_PORT": "0",
            "HEADRACE_NATS_WAIT_S": "10",
            "HEADRACE_SWEEP_INTERVAL_S": "0.3",
            **{f"HEADRACE_{name.upper()}": value for name, value in settings.items()},
            **(env or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self._asked = False

    def start(self) -> Self:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.gateway"], env=self._env, stdout=log, stderr=log
            )
        give_up = time.monotonic() + PATIENCE_S
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the gateway did not start: {self.log_path.read_text()[-2000:]}")
            self.url = next((line["url"] for line in self.log_lines() if line.get("event") == "listening"), "")
            time.sleep(0.05)
        while True:
            try:
                httpx.get(f"{self.url}/healthz", timeout=5).raise_for_status()
                return self
            except httpx.HTTPError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def log_lines(self) -> list[dict[str, Any]]:
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def terminate(self) -> None:
        """Once: a second signal would end it without ceremony."""
        if not self._asked and self.running.poll() is None:
            self._asked = True
            self.running.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        self.terminate()
        try:
            return self.running.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class Work:
    """One request in the directed worker's hands."""

    def __init__(self, delivery: Delivery, request: GenerationRequest, log: RequestLog) -> None:
        self.delivery = delivery
        self.request = request
        self.log = log
        self.index = 0

    async def claim(self) -> None:
        self.log.last_seq = self.log.last_seq or self.request.log_seq
        await self.log.append(Claimed(epoch=1, stage="prefill", worker="w", at_unix_s=time.time()))

    async def say(self, *texts: str) -> None:
        """One record of one token for each text."""
        for text in texts:
            await self.say_ids([self.index + 1], text)

    async def say_ids(self, ids: list[int], text: str) -> None:
        """One record; with made-up log probabilities where the request asks for them."""
        wanted = self.request.params.logprobs
        logprobs = [] if wanted is None else [made_up_logprobs(i, wanted) for i in ids]
        await self.log.append(Tokens(epoch=1, index=self.index, ids=ids, text=text, logprobs=logprobs))
        self.index += len(ids)

    async def end(self, reason: FinishReason = "stop", error: ErrorInfo | None = None) -> None:
        usage = Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self.index,
            cached_tokens=2,
            drafted_tokens=7,
            accepted_tokens=5,
        )
        await self.log.append(Ended(epoch=1, reason=reason, usage=usage, error=error, by="w"))
        await self.delivery.ack()


def made_up_logprobs(token_id: int, alternatives: int) -> TokenLogprobs:
    """The token is the second best; the others are its neighbours."""
    others = [token_id + n for n in range(1, alternatives)]
    top = [*others[:1], token_id, *others[1:]][:alternatives]
    return TokenLogprobs(-1.5 if others else -1.0, [(i, -1.0 - rank / 2) for rank, i in enumerate(top)])


class Worker:
    """Pulls a model's requests. Those with a reserved seed wait for the test; the others get `answer` at once."""

    def __init__(self, bus: Bus, model: str, answer: tuple[str, ...] = ("Hello", ",", " wörld", "!")) -> None:
        self.bus = bus
        self.model = model
        self.answer = answer
        self.seen: list[GenerationRequest] = []
        """Each once, however often it was delivered."""
        self._reserved: dict[int, asyncio.Future[Work]] = {}
        self._held: dict[str, Work] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls, nats_url: str, model: str) -> AsyncIterator[Self]:
        async with await Bus.connect(nats_url, name="test-worker") as bus:
            worker = cls(bus, model)
            bus.announce(lambda: worker.status("prefill"))
            bus.announce(lambda: worker.status("decode"))
            tasks = [asyncio.create_task(worker._pull()), asyncio.create_task(worker._renew())]
            try:
                yield worker
            finally:
                # asyncio.wait_for, which nats-py uses, loses a cancellation that meets its result (Python 3.11).
                while any(not task.done() for task in tasks):
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=1)
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                for end in ends:
                    assert isinstance(end, asyncio.CancelledError), end

    def status(self, stage: Any) -> InstanceStatus:
        return InstanceStatus(
            stage=stage,
            instance=f"{stage}-test-{self.model}",
            worker=f"{stage}-test.1",
            pid=os.getpid(),
            host="127.0.0.1",
            started_unix_s=0,
            sent_unix_s=time.time(),
            state="ready",
            model=self.model,
        )

    def reserve(self, seed: int) -> None:
        """From now on, requests with this seed are for `take`."""
        self._reserved[seed] = asyncio.get_running_loop().create_future()

    async def take(self, seed: int) -> Work:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reserved[seed]

    async def _pull(self) -> None:
        queue = self.bus.request_queue(self.model)
        await queue.open()
        while True:
            for delivery in await queue.pull(8, 0.5):
                request = decode_request(delivery.data)
                if all(known.request_id != request.request_id for known in self.seen):
                    self.seen.append(request)
                log = self.bus.open_log(request.tenant, request.request_id, request.log_seq)
                work = Work(delivery, request, log)
                waiting = self._reserved.get(request.params.seed)
                if waiting is None:
                    await self._answer(work)
                elif not waiting.done():
                    self._held[request.request_id] = work
                    waiting.set_result(work)

    async def _answer(self, work: Work) -> None:
        try:
            await work.claim()
            await work.say(*self.answer)
            await work.end()
        except AppendRefused:  # ended from outside, in this test or an earlier one
            await work.delivery.ack()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(0.7)
            for work in list(self._held.values()):
                await work.delivery.renew()


def reserve(worker: Worker, choices: int) -> int:
    """A seed whose choices are all for `take_all`."""
    seed = fresh_seed()
    for choice in range(choices):
        worker.reserve(derived_seed(seed, choice))
    return seed


async def take_all(worker: Worker, seed: int, choices: int) -> list[Work]:
    """The work of all choices, claimed."""
    works = [await worker.take(derived_seed(seed, choice)) for choice in range(choices)]
    for work in works:
        await work.claim()
    return works


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what other processes do, with patience."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def queued_subjects(bus: Bus) -> dict[str, int]:
    """The subjects of all requests that wait for prefill."""
    found: dict[str, int] = {}
    for spec in REQUESTS.values():
        found |= await list_subjects(bus.client, spec.name)
    return found


def worker_of(gateway: GatewayProcess) -> str:
    """The name under which a gateway ends requests."""
    return next(str(line["worker"]) for line in gateway.log_lines() if line.get("event") == "listening")


async def entries_of(bus: Bus, request_id: str, tenant: str = "default") -> list[LogEntry]:
    return await bus.open_log(tenant, request_id).read()


async def ended_of(bus: Bus, request_id: str, tenant: str = "default") -> Ended:
    """Waits for a log's terminal record."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                last = await bus.open_log(tenant, request_id).last()
                if isinstance(last.record, Ended):
                    return last.record
            except RequestUnknown:
                pass
            await asyncio.sleep(0.05)


def events_of(body: str) -> list[tuple[str | None, Any]]:
    """Parse a whole SSE body strictly: (id, data) of each event; comments are skipped."""
    assert body.endswith("\n\n") or not body
    events: list[tuple[str | None, Any]] = []
    for block in body.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            assert set(fields) <= {"id", "data"}, fields
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


def text_of(events: list[tuple[str | None, Any]], index: int = 0) -> str:
    """The visible text of one choice in a stream of either format."""
    text = ""
    for _, data in events:
        for choice in data.get("choices", []) if isinstance(data, dict) else []:
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


class Stream:
    """An open SSE answer, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.request_id = response.headers["x-headrace-request-id"]
        self.events: list[tuple[str | None, Any]] = []
        self._lines = response.aiter_lines()

    async def next(self) -> Any:
        """The data of the next event; raises StopAsyncIteration at the end."""
        event_id = None
        while True:
            line = await anext(self._lines)
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                self.events.append((event_id, data))
                return data

    async def rest(self) -> list[tuple[str | None, Any]]:
        try:
            while True:
                await self.next()
        except StopAsyncIteration:
            return self.events

    async def text(self, wanted: str, index: int = 0) -> None:
        """Read until this much text has come."""
        async with asyncio.timeout(PATIENCE_S):
            while text_of(self.events, index) != wanted:
                await self.next()


def chat_body(seed: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": seed, **fields}
