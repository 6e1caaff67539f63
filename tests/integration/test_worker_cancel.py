"""A request that ends from outside is let go wherever it is: the engine computes no more of it and keeps nothing."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus.streams import stream_config
from shared.protocol.jobs import GenerationRequest
from shared.protocol.streams import JOBS
from tests.conftest import NatsServer
from tests.integration.kv_harness import GIB, eventually
from tests.integration.pipeline_harness import BLOCK, CHUNK, OUTPUT, Gate, Pipeline, Running, pipeline_on, text
from tests.unit.engine_harness import tiny_model

LONG = text(1, 10 * CHUNK + 5)
SHORT = text(2, 3 * BLOCK + 5)
PATIENT_S = 60.0
"""A time-out that no test waits for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, model) as made:
        yield made


async def until_held(worker: Running, request: GenerationRequest) -> None:
    async def held() -> bool:
        return request.request_id in worker.worker.holdings.ids()

    await eventually(held)


async def until_interrupted(worker: Running, request: GenerationRequest) -> None:
    """Until the work on it was told to stop, and has had a turn to begin with its clean-up."""
    async with asyncio.timeout(10):
        while (held := worker.worker.holdings._held.get(request.request_id)) is not None and not held.stop_reason:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)


async def until_let_go(worker: Running, request: GenerationRequest) -> None:
    """Until the worker's part of it is over, long before any time-out."""

    async def let_go() -> bool:
        return request.request_id not in worker.worker.holdings.ids()

    await eventually(let_go, within_s=10)


async def until_no_leases(pipeline: Pipeline, worker: Running) -> None:
    async def none() -> bool:
        stats = await worker.kv.stats(pipeline.running_store.place)
        return stats is not None and stats.leases == 0

    await eventually(none)


async def assert_cancelled_once(pipeline: Pipeline, request: GenerationRequest, tokens: int) -> None:
    """The terminal record is the log's last word, and nothing waits in a queue any more."""
    state = await pipeline.state(request)
    assert state.ended is not None
    assert state.ended.reason == "cancelled"
    assert len(state.output_ids) == tokens
    for stage in ("prefill", "decode"):
        assert await pipeline.bus.queue_depth(stage, pipeline.model.name) == 0


async def test_a_prompt_cancelled_between_chunks_costs_no_chunk_more(pipeline: Pipeline) -> None:
    prefill = await pipeline.prefill()
    gate = Gate(prefill.host)
    long = await pipeline.submit(LONG)
    gate.let(2)
    await gate.until_begun(3)
    await pipeline.cancel(long)
    await until_let_go(prefill, long)
    gate.open()
    await prefill.until_idle()
    assert gate.begun == 3
    assert prefill.count("prompt_tokens_computed", stage="prefill") == 2 * CHUNK, "what it could still have used"
    await assert_cancelled_once(pipeline, long, tokens=0)
    await until_no_leases(pipeline, prefill)


async def test_a_prompt_whose_cancel_was_not_heard_of_is_let_go_too(pipeline: Pipeline) -> None:
    prefill = await pipeline.prefill()
    gate = Gate(prefill.host)
    long = await pipeline.submit(LONG)
    gate.let(2)
    await gate.until_begun(3)
    await pipeline.cancel(long, hint=False)
    await until_let_go(prefill, long)
    gate.open()
    await prefill.until_idle()
    assert gate.begun == 3
    await assert_cancelled_once(pipeline, long, tokens=0)
    await until_no_leases(pipeline, prefill)


async def test_a_short_prompt_behind_a_cancelled_one_is_served_as_if_that_had_never_come(pipeline: Pipeline) -> None:
    prefill = await pipeline.prefill(slots=1)
    await pipeline.decode()
    expected = await pipeline.ask(SHORT, salt="first time")
    gate = Gate(prefill.host)
    long = await pipeline.submit(LONG)
    gate.let(1)
    await gate.until_begun(2)
    short = await pipeline.submit(SHORT, salt="second time")
    await pipeline.cancel(long)
    await until_let_go(prefill, long)
    gate.open()
    state = await pipeline.until_ended(short)
    assert state.output_ids == expected.output_ids
    assert gate.begun == 3, "one step for the short prompt"
    await prefill.until_idle()
    await assert_cancelled_once(pipeline, long, tokens=0)


async def test_a_prompt_cancelled_while_a_store_hangs_in_a_put_is_let_go_at_once(pipeline: Pipeline) -> None:
    prefill = await pipeline.prefill(kv_timeout_s=PATIENT_S)
    warm = await pipeline.submit(SHORT)  # so that there is a connection
    await until_handed_over(pipeline, warm)
    gate = Gate(prefill.host)
    pipeline.running_store.signal(signal.SIGSTOP)
    try:
        long = await pipeline.submit(LONG)
        gate.let(2)
        await gate.until_begun(3)
        await pipeline.cancel(long)
        await until_interrupted(prefill, long)
        gate.open()
        await until_let_go(prefill, long)
        await prefill.until_idle(within_s=10)
        assert gate.begun == 3, "not even while the put is given up"
    finally:
        pipeline.running_store.signal(signal.SIGCONT)
    await pipeline.cancel(warm)
    await until_no_leases(pipeline, prefill)


async def until_handed_over(pipeline: Pipeline, request: GenerationRequest) -> None:
    async def queued() -> bool:
        return await pipeline.bus.queue_depth("decode", pipeline.model.name) > 0

    await eventually(queued)
    assert len((await pipeline.state(request)).output_ids) == 1


async def test_a_request_whose_cached_blocks_a_hanging_store_holds_is_let_go_at_once(pipeline: Pipeline) -> None:
    warm = await pipeline.prefill()
    await pipeline.decode()
    await pipeline.ask(LONG)
    await pipeline.indexed(warm.host.layout.layout_id, LONG)
    prefill = await pipeline.prefill(kv_timeout_s=PATIENT_S)  # one that has nothing of it itself
    await pipeline.ask(SHORT)
    pipeline.running_store.signal(signal.SIGSTOP)
    try:
        again = await pipeline.submit(LONG)
        await until_held(prefill, again)
        await pipeline.cancel(again)
        await until_let_go(prefill, again)
        await prefill.until_idle(within_s=10)
    finally:
        pipeline.running_store.signal(signal.SIGCONT)
    assert prefill.count("prompt_tokens_computed", stage="prefill") == len(SHORT)
    await until_no_leases(pipeline, prefill)


async def test_a_request_cancelled_while_a_store_hangs_in_a_get_is_let_go_at_once(pipeline: Pipeline) -> None:
    await pipeline.prefill()
    decode = await pipeline.decode(decode_slots=1, kv_timeout_s=PATIENT_S)
    gate = Gate(decode.host)
    first = await pipeline.submit(SHORT)
    await gate.until_begun(1)
    second = await pipeline.submit(LONG)
    await until_handed_over(pipeline, second)
    pipeline.running_store.signal(signal.SIGSTOP)
    try:
        await pipeline.cancel(first)
        await until_held(decode, second)
        gate.open()
        await until_admitted(decode, second)
        await pipeline.cancel(second)
        await until_let_go(decode, second)
        await decode.until_idle(within_s=10)
        assert decode.count("kv_transfer_failures", hop="store_to_decode") == 0, "nothing timed out"
    finally:
        pipeline.running_store.signal(signal.SIGCONT)
    assert gate.begun == 1
    await assert_cancelled_once(pipeline, second, tokens=1)
    await until_no_leases(pipeline, decode)


async def until_admitted(worker: Running, request: GenerationRequest) -> None:
    async def admitted() -> bool:
        sequence = worker.host.async_engine.engine._sequences.get(request.request_id)
        return sequence is not None and sequence.state == "admitted"

    await eventually(admitted)


@pytest.mark.parametrize("hint", [True, False])
async def test_a_request_cancelled_in_decode_takes_part_in_no_step_more(pipeline: Pipeline, *, hint: bool) -> None:
    """Without the hint decode learns it from its next append, which the step in progress brings; the engine may have
    begun one more before the refusal comes."""
    await pipeline.prefill()
    decode = await pipeline.decode(drafts=0, speculation="auto")  # a token a step, and a sequence that is drafted for
    gate = Gate(decode.host)
    request = await pipeline.submit(SHORT, output=200)
    gate.let(5)
    await gate.until_begun(6)

    async def five_more() -> bool:
        return len((await pipeline.state(request)).output_ids) == 1 + 5

    await eventually(five_more)
    await pipeline.cancel(request, hint=hint)
    if not hint:
        gate.let()
    await until_let_go(decode, request)
    gate.open()
    await decode.until_idle()
    assert 6 <= gate.begun <= (6 if hint else 7)
    await assert_cancelled_once(pipeline, request, tokens=6)
    await until_no_leases(pipeline, decode)


async def test_a_request_cancelled_while_it_waits_for_blocks_leaves_the_others_undisturbed(pipeline: Pipeline) -> None:
    await pipeline.prefill()
    decode = await pipeline.decode()
    expected = await pipeline.ask(LONG)
    blocks = len(LONG) // BLOCK + 4
    decode = await pipeline.decode(kv_memory_gib=blocks * decode.host.layout.block_bytes / GIB)
    assert decode.host.pool.total < 2 * (len(LONG) // BLOCK)
    gate = Gate(decode.host)
    first = await pipeline.submit(LONG)
    await gate.until_begun(1)
    second = await pipeline.submit(text(3, len(LONG)))
    await until_held(decode, second)
    await pipeline.cancel(second)
    await until_let_go(decode, second)
    gate.open()
    assert (await pipeline.until_ended(first)).output_ids == expected.output_ids
    await decode.until_idle()
    await assert_cancelled_once(pipeline, second, tokens=1)


STRANGER = "hr.job.another.normal.t.id"


@pytest.fixture
async def own_pipeline(own_nats: NatsServer, redis_url: str, model: Path) -> AsyncIterator[Pipeline]:
    async with pipeline_on(own_nats.url, redis_url, model) as made:
        yield made


async def stuck(pipeline: Pipeline, within_s: float = 60) -> tuple[Running, GenerationRequest]:
    """A prefill worker with a request that it cannot hand over: the job queue takes one job and has a stranger's."""
    prefill = await pipeline.prefill()
    await pipeline.bus.js.update_stream(replace(stream_config(JOBS), max_msgs=1))
    await pipeline.bus.js.publish(STRANGER, b"x")
    request = await pipeline.submit(SHORT, within_s=within_s)

    async def refused() -> bool:
        return "full" in prefill.worker.last_error and prefill.host.pool.used == 0

    await eventually(refused)
    assert prefill.worker.holdings.ids() == [request.request_id]
    return prefill, request


async def test_one_that_cannot_be_handed_over_holds_no_blocks_and_goes_on_when_there_is_room(
    own_pipeline: Pipeline,
) -> None:
    pipeline = own_pipeline
    prefill, request = await stuck(pipeline)
    await pipeline.bus.js.purge_stream(JOBS.name, subject=STRANGER)
    await until_handed_over(pipeline, request)
    await prefill.until_idle()


@pytest.mark.parametrize("hint", [True, False])
async def test_one_that_is_cancelled_while_it_cannot_be_handed_over_is_let_go(
    own_pipeline: Pipeline, *, hint: bool
) -> None:
    prefill, request = await stuck(own_pipeline)
    await own_pipeline.cancel(request, hint=hint)
    await until_let_go(prefill, request)
    await assert_cancelled_once(own_pipeline, request, tokens=1)
    await until_no_leases(own_pipeline, prefill)


async def test_one_that_cannot_be_handed_over_ends_at_its_deadline(own_pipeline: Pipeline) -> None:
    prefill, request = await stuck(own_pipeline, within_s=4)
    state = await own_pipeline.until_ended(request)
    assert state.ended is not None
    assert state.ended.error is not None
    assert state.ended.error.code == "deadline_exceeded"
    await prefill.until_idle()


async def test_one_that_cannot_be_handed_over_is_handed_back_by_a_drain(own_pipeline: Pipeline) -> None:
    prefill, request = await stuck(own_pipeline)
    await prefill.end()
    records = [entry.record for entry in await own_pipeline.bus.open_log("t", request.request_id).read()]
    assert [type(record).__name__ for record in records] == ["Accepted", "Claimed", "Tokens", "HandedBack"]
    await own_pipeline.bus.js.purge_stream(JOBS.name, subject=STRANGER)
    await own_pipeline.prefill()
    await until_handed_over(own_pipeline, request)
    await own_pipeline.decode()
    assert len((await own_pipeline.until_ended(request)).output_ids) == OUTPUT
