"""Prefill and decode workers in this process, with a real NATS server, KV store and index, and a client of them."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from services.decode.settings import DecodeSettings
from services.decode.worker import DecodeWorker
from services.prefill.settings import PrefillSettings
from services.prefill.worker import PrefillWorker
from shared.blocks import BlockIndex, KVClient, block_keys
from shared.bus import Bus, LogState, new_worker_id
from shared.engine.batch import SequenceRows
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.records import Accepted, Ended, Usage
from shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.kv_link import open_kv
from tests.integration.kv_harness import GIB, SECRET, StoreProcess, eventually

BLOCK = 16
CHUNK = 64
OUTPUT = 20


@dataclass
class Running:
    """A worker in this process, with what it counted."""

    bus: Bus
    host: EngineHost
    worker: PrefillWorker | DecodeWorker
    kv: KVClient
    registry: CollectorRegistry
    end: Callable[[], Awaitable[None]]
    """SIGTERM: drains and closes everything."""

    def count(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(f"headrace_{name}_total", labels) or 0)

    async def until_idle(self, within_s: float = 15.0) -> None:
        """Until nothing is held, neither requests nor blocks nor what belongs to one."""

        async def idle() -> bool:
            engine = self.host.async_engine.engine
            speculation = self.worker.speculation if isinstance(self.worker, DecodeWorker) else None
            return not (
                len(self.worker.holdings)
                or self.host.pool.used
                or engine._sequences
                or engine.has_work
                or self.host.feed._queues
                or (speculation is not None and (len(speculation) or speculation._drafting._sequences))
                or [task for task in asyncio.all_tasks() if task.get_name().startswith("push-")]
            )

        await eventually(idle, within_s)


class Gate:
    """Holds an engine's steps up: each computes only when it was let through. A step that waits here is in progress."""

    def __init__(self, host: EngineHost) -> None:
        self._runner = host.async_engine.engine._runner
        self._forward = self._runner.forward
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.begun = 0
        self._runner.forward = self._gated  # type: ignore[method-assign]

    def _gated(self, rows: list[SequenceRows]) -> NDArray[np.float32]:
        self.begun += 1
        assert self._is_open or self._permits.acquire(timeout=60)
        return self._forward(rows)

    def let(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        """From now on steps are only counted."""
        self._is_open = True
        self._permits.release()

    async def until_begun(self, steps: int) -> None:
        """Until that many steps were begun; the last of them is in progress."""

        async def begun() -> bool:
            return self.begun >= steps

        await eventually(begun)
        assert self.begun == steps


class Pipeline:
    """Workers, a KV store and a client of one test; each may be replaced by one that knows nothing."""

    def __init__(self, model: Path, nats_url: str, redis_url: str, bus: Bus) -> None:
        self.model = model
        self.bus = bus
        self._urls = {"nats_url": nats_url, "redis_url": redis_url}
        self._store: StoreProcess | None = None
        self._workers: dict[str, Running] = {}

    async def store(self) -> None:
        """A store that is up and empty, instead of any before. The workers know, the index still names the old one."""
        await self.close_store()
        name = f"store-{uuid.uuid4().hex[:8]}"
        self._store = StoreProcess(name, "tcp", blocks=256, **self._urls).start()
        for worker in self._workers.values():
            await self._known_to(worker.bus)

    async def _known_to(self, bus: Bus) -> None:
        """Wait until a worker sees this test's store."""

        async def known() -> bool:
            stores = [s.instance for s in bus.statuses.live("kvstore") if s.state == "ready"]
            return self._store is not None and self._store.name in stores

        await eventually(known)

    async def close_store(self) -> None:
        if self._store is not None:
            self._store.kill()

    @property
    def running_store(self) -> StoreProcess:
        assert self._store is not None
        return self._store

    async def prefill(self, slots: int = 2, **changes: Any) -> Running:
        fields = self._settings("prefill-0") | {"prefill_slots": slots, "prefill_chunk_tokens": CHUNK} | changes
        settings = PrefillSettings(**fields, _env_file=None)
        metrics = PrefillMetrics("prefill-0", registry := CollectorRegistry())
        sizes = BatchSizes.of_worker(slots, settings.prefill_chunk_tokens)
        return await self._start("prefill", settings, sizes, metrics, registry, PrefillWorker)

    async def decode(self, drafts: int | None = None, **changes: Any) -> Running:
        """`drafts`: rows for the drafts of a sequence in a step, instead of what the settings say."""
        settings = DecodeSettings(**self._settings("decode-0") | {"speculation": "off"} | changes, _env_file=None)
        metrics = DecodeMetrics("decode-0", registry := CollectorRegistry())
        rows = settings.draft_rows if drafts is None else drafts
        sizes = BatchSizes.of_worker(settings.decode_slots, settings.decode_batch_tokens, rows)
        return await self._start("decode", settings, sizes, metrics, registry, DecodeWorker)

    def _settings(self, instance: str) -> dict[str, Any]:
        return {
            **self._urls,
            "model": str(self.model),
            "instance": instance,
            "secret": SECRET,
            "block_tokens": BLOCK,
            "kv_memory_gib": (4 << 20) / GIB,
            "transport": "tcp",
            "dtype": "fp32",
            "stall_s": 120.0,  # an engine that a test holds up does not hang
        }

    async def _start(
        self, stage: Any, settings: Any, sizes: BatchSizes, metrics: Any, registry: CollectorRegistry, kind: Any
    ) -> Running:
        if stage in self._workers:
            await self._workers[stage].end()
        stack = AsyncExitStack()
        bus = await stack.enter_async_context(await Bus.connect(settings.nats_url, name=settings.instance))
        watching = asyncio.create_task(bus.watch())
        await self._known_to(bus)
        host = await EngineHost.load(settings, settings.model, sizes, metrics.engine)
        kv = await stack.enter_async_context(open_kv(bus, settings, stage, "tcp", metrics.kv))
        worker = kind(bus, host, kv.client, settings, new_worker_id(settings.instance), metrics)
        host.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(worker.run(stop, lambda: None))

        async def end() -> None:
            stop.set()
            await serving
            await host.stop()
            watching.cancel()
            await asyncio.wait({watching})
            await stack.aclose()
            del self._workers[stage]

        self._workers[stage] = Running(bus, host, worker, kv.client, registry, end)
        return self._workers[stage]

    async def indexed(self, layout_id: str, prompt: list[int]) -> None:
        """Wait until the index knows all blocks of a prompt."""
        index = BlockIndex(self._urls["redis_url"])
        keys = [key.key for key in block_keys(layout_id, "tenant", prompt, BLOCK)]

        async def known() -> bool:
            return len(await index.lookup(keys)) == len(keys)

        await eventually(known)
        await index.close()

    async def close(self) -> None:
        try:
            for worker in list(self._workers.values()):
                await worker.end()
        finally:
            await self.close_store()

    async def submit(
        self,
        prompt: list[int],
        *,
        salt: str = "tenant",
        seed: int = 1,
        output: int = OUTPUT,
        within_s: float = 60,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> GenerationRequest:
        """A request for `output` tokens, accepted and queued; `params` and `fields` are added to what it asks for."""
        now = time.time()
        request_id = uuid.uuid4().hex
        name = self.model.name
        log = await self.bus.create_log(Accepted(request_id, "t", name, "chat", now, now + within_s, len(prompt), seed))
        request = GenerationRequest(
            request_id=request_id,
            tenant="t",
            model=name,
            api="chat",
            priority="normal",
            prompt_ids=prompt,
            params=SamplingParams(**{"max_tokens": output, "seed": seed, "ignore_eos": True} | (params or {})),
            created_unix_s=now,
            queue_deadline_unix_s=now + within_s,
            deadline_unix_s=now + within_s,
            log_seq=log.last_seq,
            salt=salt,
            **fields,
        )
        await self.bus.publish_request(request)
        return request

    async def state(self, request: GenerationRequest) -> LogState:
        return await self.bus.open_log("t", request.request_id).state()

    async def until_ended(self, request: GenerationRequest) -> LogState:
        """The request's log, once it has ended in whatever way."""

        async def has_ended() -> bool:
            return (await self.state(request)).ended is not None

        await eventually(has_ended, within_s=40)
        return await self.state(request)

    async def cancel(self, request: GenerationRequest, *, hint: bool = True) -> None:
        """What a canceller does: the terminal record, then the hint to the holders, which may be lost."""
        ended = Ended(epoch=0, reason="cancelled", usage=Usage(len(request.prompt_ids), 0))
        if hint:
            assert await self.bus.end_request("t", request.request_id, ended)
            return
        log = self.bus.open_log("t", request.request_id)
        await log.state()
        await log.append(ended)

    async def ask(self, prompt: list[int], *, salt: str = "tenant", seed: int = 1, output: int = OUTPUT) -> LogState:
        """One answer; its log when it has ended well."""
        state = await self.until_ended(await self.submit(prompt, salt=salt, seed=seed, output=output))
        assert state.ended is not None
        assert state.ended.reason == "length", state.ended
        assert len(state.output_ids) == output
        return state


@asynccontextmanager
async def pipeline_on(nats_url: str, redis_url: str, model: Path) -> AsyncIterator[Pipeline]:
    """A pipeline with a store and no workers yet; all of it is stopped at the end."""
    async with await Bus.connect(nats_url, name="client") as bus:
        watching = asyncio.create_task(bus.watch())
        made = Pipeline(model, nats_url, redis_url, bus)
        await made.store()
        try:
            yield made
        finally:
            await made.close()
            watching.cancel()
            await asyncio.wait({watching})


def cached(state: LogState) -> int:
    assert state.ended is not None
    assert state.ended.usage is not None
    return state.ended.usage.cached_tokens


def text(seed: int, length: int) -> list[int]:
    return [(i * 37 + seed * 101 + i * i) % 250 for i in range(length)]
