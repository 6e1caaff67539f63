"""Prefill and decode workers with a real KV store: what a worker has itself is neither fetched nor computed again."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.decode.settings import DecodeSettings
from services.decode.worker import DecodeWorker
from services.prefill.settings import PrefillSettings
from services.prefill.worker import PrefillWorker
from shared.blocks import BlockIndex, block_keys
from shared.bus import Bus, LogState, new_worker_id
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.records import Accepted
from shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.kv_link import open_kv
from tests.integration.kv_harness import GIB, SECRET, StoreProcess, eventually
from tests.unit.engine_harness import tiny_model

BLOCK = 16
OUTPUT = 20


@dataclass
class Running:
    """A worker in this process, with what it counted."""

    bus: Bus
    host: EngineHost
    registry: CollectorRegistry
    end: Callable[[], Awaitable[None]]

    def count(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(f"headrace_{name}_total", labels) or 0)


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

    async def prefill(self, slots: int = 2) -> Running:
        settings = PrefillSettings(
            **self._settings("prefill-0"), prefill_slots=slots, prefill_chunk_tokens=64, _env_file=None
        )
        metrics = PrefillMetrics("prefill-0", registry := CollectorRegistry())
        sizes = BatchSizes(slots, settings.prefill_chunk_tokens)
        return await self._start("prefill", settings, sizes, metrics, registry, PrefillWorker)

    async def decode(self) -> Running:
        settings = DecodeSettings(**self._settings("decode-0"), speculation="off", _env_file=None)
        metrics = DecodeMetrics("decode-0", registry := CollectorRegistry())
        sizes = BatchSizes(settings.decode_slots, settings.decode_batch_tokens)
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

        self._workers[stage] = Running(bus, host, registry, end)
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
        for worker in list(self._workers.values()):
            await worker.end()
        await self.close_store()

    async def ask(self, prompt: list[int], *, salt: str = "tenant", seed: int = 1) -> LogState:
        """One answer of OUTPUT tokens; its log when it has ended well."""
        now = time.time()
        request_id = uuid.uuid4().hex
        params = SamplingParams(max_tokens=OUTPUT, seed=seed, ignore_eos=True)
        name = self.model.name
        log = await self.bus.create_log(Accepted(request_id, "t", name, "chat", now, now + 60, len(prompt), seed))
        await self.bus.publish_request(
            GenerationRequest(
                request_id=request_id,
                tenant="t",
                model=name,
                api="chat",
                priority="normal",
                prompt_ids=prompt,
                params=params,
                created_unix_s=now,
                queue_deadline_unix_s=now + 60,
                deadline_unix_s=now + 60,
                log_seq=log.last_seq,
                salt=salt,
            )
        )
        reader = self.bus.open_log("t", request_id)

        async def has_ended() -> bool:
            return (await reader.state()).ended is not None

        await eventually(has_ended, within_s=40)
        state = await reader.state()
        assert state.ended is not None
        assert state.ended.reason == "length", state.ended
        assert len(state.output_ids) == OUTPUT
        return state


def cached(state: LogState) -> int:
    assert state.ended is not None
    assert state.ended.usage is not None
    return state.ended.usage.cached_tokens


def text(seed: int, length: int) -> list[int]:
    return [(i * 37 + seed * 101 + i * i) % 250 for i in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with await Bus.connect(nats_url, name="client") as bus:
        watching = asyncio.create_task(bus.watch())
        made = Pipeline(model, nats_url, redis_url, bus)
        await made.store()
        yield made
        await made.close()
        watching.cancel()
        await asyncio.wait({watching})


async def test_the_same_prompt_again_is_neither_computed_nor_fetched(pipeline: Pipeline) -> None:
    prefill, decode = await pipeline.prefill(), await pipeline.decode()
    prompt = text(1, 7 * BLOCK + 5)
    first = await pipeline.ask(prompt)
    computed, moved = prefill.count("prompt_tokens_computed", stage="prefill"), decode.count("kv_blocks_hit")
    assert (cached(first), computed) == (0, len(prompt))
    again = await pipeline.ask(prompt)
    assert again.output_ids == first.output_ids
    assert cached(again) == 7 * BLOCK
    assert prefill.count("prompt_tokens_computed", stage="prefill") - computed == 5
    assert prefill.count("kv_blocks_hit") == 0
    assert decode.count("kv_blocks_hit") - moved == 1, "the last, partial block belongs to nobody else"
    assert prefill.count("prefix_cache_queries", stage="prefill") == 2 * len(prompt)
    assert prefill.count("prefix_cache_hits", stage="prefill") == 7 * BLOCK

    async def nothing_is_held() -> bool:
        return prefill.host.pool.used == decode.host.pool.used == 0

    await eventually(nothing_is_held)


async def test_the_next_turn_of_a_chat_finds_its_last_answer_where_it_was_made(pipeline: Pipeline) -> None:
    await pipeline.prefill()
    decode = await pipeline.decode()
    prompt = text(2, 5 * BLOCK)
    answer = await pipeline.ask(prompt)
    moved = decode.count("kv_blocks_hit")
    await pipeline.ask([*prompt, *answer.output_ids, *text(3, 2 * BLOCK)])
    full = (len(prompt) + OUTPUT - 1) // BLOCK
    whole = len(prompt) + OUTPUT + 2 * BLOCK
    assert decode.count("kv_blocks_hit") - moved == -(-whole // BLOCK) - full


async def test_what_is_cached_and_what_a_store_has_add_up(pipeline: Pipeline) -> None:
    """A new prefill worker knows the shorter prompt; what follows it in the longer one is only in the store."""
    await pipeline.prefill()
    await pipeline.decode()
    long = text(4, 9 * BLOCK + 3)
    expected = await pipeline.ask(long)
    fresh = await pipeline.prefill()
    assert cached(await pipeline.ask(long[: 4 * BLOCK + 1])) == 4 * BLOCK
    assert fresh.count("kv_blocks_hit") == 4
    again = await pipeline.ask(long)
    assert cached(again) == 9 * BLOCK
    assert fresh.count("kv_blocks_hit") == 9
    assert fresh.count("prompt_tokens_cached", stage="prefill") == 9 * BLOCK
    assert fresh.count("prompt_tokens_computed", stage="prefill") == 1 + 3
    assert again.output_ids == expected.output_ids


async def test_blocks_that_no_store_has_any_more_are_stored_again_for_decode(pipeline: Pipeline) -> None:
    """Nothing is computed, and yet a decode worker that knows nothing can load all of it.

    For some seconds the index still names the store that is gone.
    """
    prefill = await pipeline.prefill()
    await pipeline.decode()
    prompt = text(5, 6 * BLOCK + 2)
    expected = await pipeline.ask(prompt)
    await pipeline.indexed(prefill.host.layout.layout_id, prompt)
    await pipeline.store()
    cold = await pipeline.decode()
    computed = prefill.count("prompt_tokens_computed", stage="prefill")
    again = await pipeline.ask(prompt)
    assert again.output_ids == expected.output_ids
    assert prefill.count("prompt_tokens_computed", stage="prefill") - computed == 2
    assert cold.count("kv_blocks_hit") == 7
    assert cold.count("kv_blocks_miss") == 0


async def test_several_answers_to_one_prompt_are_prefilled_and_loaded_once(pipeline: Pipeline) -> None:
    prefill, decode = await pipeline.prefill(slots=4), await pipeline.decode()
    prompt = text(6, 8 * BLOCK + 7)
    answers = await asyncio.gather(*(pipeline.ask(prompt, seed=seed) for seed in range(6)))
    assert len({tuple(answer.output_ids) for answer in answers}) > 1
    assert prefill.count("prompt_tokens_computed", stage="prefill") == 8 * BLOCK + 6 * 7
    assert sorted(cached(answer) for answer in answers) == [0] + 5 * [8 * BLOCK]
    assert decode.count("kv_blocks_hit") == 8 + 6
    for seed, answer in enumerate(answers):
        assert (await pipeline.ask(prompt, seed=seed)).output_ids == answer.output_ids


async def test_tenants_share_nothing(pipeline: Pipeline) -> None:
    await pipeline.prefill()
    await pipeline.decode()
    prompt = text(7, 4 * BLOCK + 1)
    await pipeline.ask(prompt, salt="one")
    assert cached(await pipeline.ask(prompt, salt="two")) == 0
    assert cached(await pipeline.ask(prompt, salt="one")) == 4 * BLOCK
