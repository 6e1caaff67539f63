"""Prefill and decode workers whose KV store damages blocks, hangs or dies: they compute again and answer the same."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio

from shared.blocks import block_keys, exchange
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.records import Accepted, HandedBack
from shared.transport.tcp import TcpTransport
from tests.integration.kv_harness import SECRET, eventually
from tests.integration.pipeline_harness import BLOCK, Gate, Pipeline, Running, pipeline_on, text
from tests.unit.engine_harness import tiny_model

PROMPT_BLOCKS = 8
DAMAGED = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(
    model: Path, nats_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pipeline]:
    monkeypatch.setenv("HEADRACE_STORE_FAULT_INJECTION", "true")
    async with pipeline_on(nats_url, redis_url, model) as made:
        yield made


def keys_of(worker: Running, prompt: list[int]) -> list[bytes]:
    return [key.key for key in block_keys(worker.host.layout.layout_id, "tenant", prompt, BLOCK)]


async def damage(pipeline: Pipeline, keys: list[bytes]) -> None:
    """Flip a byte of each block in the store's memory."""
    connection = await TcpTransport().connect("127.0.0.1", pipeline.running_store.port, SECRET.encode(), 5)
    for key in keys:
        assert await exchange.corrupt_block(connection, key)
    connection.close()


async def leases(worker: Running, pipeline: Pipeline) -> int:
    stats = await worker.kv.stats(pipeline.running_store.place)
    assert stats is not None
    return stats.leases


def no_leases(worker: Running, pipeline: Pipeline) -> Callable[[], Awaitable[bool]]:
    async def none_left() -> bool:
        return await leases(worker, pipeline) == 0

    return none_left


async def stored_checksums(worker: Running, keys: list[bytes]) -> list[int | None]:
    return [ref.checksum if ref else None for ref in await worker.kv._ask_stores(keys)]


async def test_decode_computes_again_what_the_store_damaged_and_the_bad_copies_are_dropped(pipeline: Pipeline) -> None:
    prefill, _ = await pipeline.prefill(), await pipeline.decode()
    prompt = text(1, PROMPT_BLOCKS * BLOCK + 5)
    expected = await pipeline.ask(prompt)
    cold = await pipeline.decode()
    keys = keys_of(prefill, prompt)[:PROMPT_BLOCKS]
    good = await stored_checksums(prefill, keys)
    await damage(pipeline, [keys[DAMAGED], keys[-1]])
    assert (await pipeline.ask(prompt)).output_ids == expected.output_ids
    assert cold.count("kv_blocks_checksum_failed") == 2
    assert cold.count("kv_blocks_miss") == 2

    async def stored_again() -> bool:
        return await stored_checksums(prefill, keys) == good

    await eventually(stored_again)
    another = await pipeline.decode()
    assert (await pipeline.ask(prompt)).output_ids == expected.output_ids
    assert another.count("kv_blocks_checksum_failed") == another.count("kv_blocks_miss") == 0


async def test_prefill_computes_nothing_from_a_damaged_block_and_stores_what_it_stored_before(
    pipeline: Pipeline,
) -> None:
    prefill, _ = await pipeline.prefill(), await pipeline.decode()
    prompt = text(2, PROMPT_BLOCKS * BLOCK + 5)
    expected = await pipeline.ask(prompt)
    keys = keys_of(prefill, prompt)
    await pipeline.indexed(prefill.host.layout.layout_id, prompt)
    good = await stored_checksums(prefill, keys)
    assert None not in good
    await damage(pipeline, [keys[DAMAGED]])
    fresh, _ = await pipeline.prefill(), await pipeline.decode()
    assert (await pipeline.ask(prompt)).output_ids == expected.output_ids
    assert fresh.count("kv_blocks_checksum_failed") == 1
    assert fresh.count("prompt_tokens_computed", stage="prefill") == len(prompt) - DAMAGED * BLOCK
    assert await stored_checksums(fresh, keys) == good
    assert all(await _verified(fresh, keys))


async def _verified(worker: Running, keys: list[bytes]) -> list[bool]:
    """Whether each stored block's bytes are those that its checksum stands for."""
    refs = [ref for ref in await worker.kv._ask_stores(keys) if ref is not None]
    return await worker.kv.get(refs, [bytearray(ref.n_bytes) for ref in refs], timeout_s=5)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_store_that_hangs_or_dies_in_the_middle_of_a_hand_over_changes_no_token(
    pipeline: Pipeline, fault: signal.Signals
) -> None:
    prompt = text(3, 20 * BLOCK + 5)
    prefill, decode = await pipeline.prefill(), await pipeline.decode(kv_timeout_s=0.5)
    expected = await pipeline.ask(prompt)
    await pipeline.store()
    prefill, decode = await pipeline.prefill(), await pipeline.decode(kv_timeout_s=0.5)
    gate = Gate(prefill.host)
    request = await pipeline.submit(prompt)
    gate.let(3)

    async def some_are_stored() -> bool:
        return any(await stored_checksums(prefill, keys_of(prefill, prompt)))

    await eventually(some_are_stored)
    pipeline.running_store.signal(fault)
    gate.open()
    assert (await pipeline.until_ended(request)).output_ids == expected.output_ids
    assert prefill.count("kv_transfer_failures", hop="prefill_to_store") > 0
    await prefill.until_idle()
    await decode.until_idle()


# Leases


async def lease_left_s(pipeline: Pipeline, redis_url: str, request: GenerationRequest) -> float:
    """What the store shows of it in Redis; 0 when there is none."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        left_ms = await client.pttl(f"hr:kv:lease:{pipeline.running_store.name}:{request.request_id}")
        return max(left_ms, 0) / 1000


async def test_a_lease_reaches_to_the_deadline_at_hand_over_and_is_cut_when_decode_has_claimed(
    pipeline: Pipeline, redis_url: str
) -> None:
    prefill = await pipeline.prefill()
    request = await pipeline.submit(text(4, PROMPT_BLOCKS * BLOCK + 5), within_s=900)
    until_then = 0.0

    async def handed_over() -> bool:
        nonlocal until_then
        until_then = await lease_left_s(pipeline, redis_url, request)
        return len((await pipeline.state(request)).output_ids) == 1 and until_then > 0

    await eventually(handed_over)
    assert 850 < until_then <= 900
    decode = await pipeline.decode(lease_s=60)
    gate = Gate(decode.host)

    async def cut() -> bool:
        return 0 < await lease_left_s(pipeline, redis_url, request) <= 60

    await eventually(cut)
    gate.open()
    await pipeline.until_ended(request)
    await eventually(no_leases(prefill, pipeline))


async def test_compute_time_bounds_the_lease_where_it_ends_before_the_deadline(
    pipeline: Pipeline, redis_url: str
) -> None:
    prefill, now = await pipeline.prefill(), time.time()
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        tenant="t",
        model=pipeline.model.name,
        api="chat",
        priority="normal",
        prompt_ids=text(5, PROMPT_BLOCKS * BLOCK + 5),
        params=SamplingParams(max_tokens=2, seed=1),
        created_unix_s=now,
        queue_deadline_unix_s=now + 60,
        deadline_unix_s=now + 900,
        compute_timeout_s=100,
        log_seq=1,
    )
    accepted = Accepted(request.request_id, "t", request.model, "chat", now, now + 900, len(request.prompt_ids), 1)
    log = await pipeline.bus.create_log(accepted)
    await pipeline.bus.publish_request(msgspec.structs.replace(request, log_seq=log.last_seq))

    async def leased() -> bool:
        return await lease_left_s(pipeline, redis_url, request) > 0

    await eventually(leased)
    assert 50 < await lease_left_s(pipeline, redis_url, request) <= 101
    await prefill.until_idle()


async def test_a_request_cancelled_while_its_blocks_are_on_their_way_leaves_no_lease(pipeline: Pipeline) -> None:
    prefill = await pipeline.prefill()
    gate = Gate(prefill.host)
    request = await pipeline.submit(text(6, 20 * BLOCK + 5))
    gate.let(3)

    async def leased() -> bool:
        return await leases(prefill, pipeline) == 1

    await eventually(leased)
    await pipeline.cancel(request)
    gate.open()
    await prefill.until_idle()
    await eventually(no_leases(prefill, pipeline))


async def test_a_drained_worker_leaves_the_lease_to_its_successor(pipeline: Pipeline) -> None:
    """Prefill hands back in mid-prompt; another one puts again under the same lease, and decode ends it."""
    prompt = text(7, 20 * BLOCK + 5)
    first = await pipeline.prefill()
    gate = Gate(first.host)
    request = await pipeline.submit(prompt)
    gate.let(3)

    async def leased() -> bool:
        return await leases(first, pipeline) == 1

    await eventually(leased)
    restarting = asyncio.create_task(pipeline.prefill())

    async def handed_back() -> bool:
        entries = await pipeline.bus.open_log("t", request.request_id).read()
        return any(isinstance(entry.record, HandedBack) for entry in entries)

    await eventually(handed_back)
    gate.open()
    second, _ = await restarting, await pipeline.decode()
    state = await pipeline.until_ended(request)
    assert [claim.stage for claim in state.claims] == ["prefill", "prefill", "decode"]
    await eventually(no_leases(second, pipeline))
