"""Prefill and decode workers with a real KV store: what a worker has itself is neither fetched nor computed again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from shared.blocks import block_keys, checksums
from shared.engine.batch import SequenceRows
from shared.worker.engine_host import EngineHost
from shared.worker.takeover import SUSPECT_AFTER
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import BLOCK, OUTPUT, Pipeline, Running, cached, pipeline_on, text
from tests.unit.engine_harness import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, model) as made:
        yield made


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
    assert prefill.host.pool.evictable == 7, "the full blocks are kept for the next"


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


WRONG = 0x3E
"""Each byte of a block that was computed wrong: numbers near 0.2, with a checksum of their own."""


def spoil_cache(host: EngineHost) -> None:
    for block_id in host.async_engine.engine.pool._block_of.values():
        host.block_buffer(block_id)[:] = WRONG


async def spoil_store(worker: Running, prompt: list[int]) -> None:
    layout = worker.host.layout
    keys = block_keys(layout.layout_id, "tenant", prompt, BLOCK)
    wrong = np.full(layout.block_bytes, WRONG, np.uint8)
    [checksum] = await checksums([wrong])
    refs = await worker.kv.put("", 0.0, [(key, wrong, checksum) for key in keys])
    assert all(ref.places for ref in refs)
    await until_indexed(worker, prompt, wrong=True)


async def until_indexed(worker: Running, prompt: list[int], *, wrong: bool) -> None:
    """Until the index tells of the prompt's full blocks that all are wrong ones, or none."""
    layout = worker.host.layout
    keys = block_keys(layout.layout_id, "tenant", prompt[: len(prompt) // BLOCK * BLOCK], BLOCK)
    [checksum] = await checksums([np.full(layout.block_bytes, WRONG, np.uint8)])

    async def indexed() -> bool:
        found = await worker.kv.find([key.key for key in keys])
        return all(ref is not None and (ref.checksum == checksum) == wrong for ref in found)

    await eventually(indexed)


def crash_steps(host: EngineHost, count: int) -> None:
    """The next steps fail, which counts as a crash of the requests in them."""
    runner = host.async_engine.engine._runner
    forward, left = runner.forward, count

    def crashing(sequences: list[SequenceRows]) -> NDArray[np.float32]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise RuntimeError("crashed by what it was given")
        return forward(sequences)

    runner.forward = crashing  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_suspect_is_computed_from_its_tokens_and_what_it_computes_takes_the_place_of_wrong_blocks(
    pipeline: Pipeline, stage: str
) -> None:
    """Wrong KV lies in the worker's cache and in the store. It passes every check, so all who use it go wrong."""
    prefill, decode = await pipeline.prefill(), await pipeline.decode()
    prompt = text(8, 7 * BLOCK + 5)
    expected = await pipeline.ask(prompt)
    suspected_by = prefill if stage == "prefill" else decode
    await suspected_by.until_idle()
    spoil_cache(suspected_by.host)
    await spoil_store(suspected_by, prompt)
    assert (await pipeline.ask(prompt)).output_ids != expected.output_ids, "this KV is wrong enough to be noticed"

    await suspected_by.until_idle()
    reused = suspected_by.count("prefix_cache_hits", stage=stage)
    fetched = suspected_by.count("kv_blocks_hit")
    crash_steps(suspected_by.host, SUSPECT_AFTER)
    suspect = await pipeline.ask(prompt)
    claims = [claim.alone for claim in suspect.claims if claim.stage == stage]
    assert claims == [*SUSPECT_AFTER * [False], True]
    assert suspect.output_ids == expected.output_ids
    assert suspected_by.count("prefix_cache_hits", stage=stage) - reused == SUSPECT_AFTER * 7 * BLOCK
    last_blocks = SUSPECT_AFTER if stage == "decode" else 0  # the partial one, which no cache has
    assert suspected_by.count("kv_blocks_hit") - fetched == last_blocks
    if stage == "prefill":
        assert cached(suspect) == 0

    await until_indexed(suspected_by, prompt, wrong=False)
    await suspected_by.until_idle()
    fresh, cold = await pipeline.prefill(), await pipeline.decode()
    again = await pipeline.ask(prompt)
    assert (again.output_ids, cached(again)) == (expected.output_ids, 7 * BLOCK)
    assert fresh.count("kv_blocks_hit") == 7
    assert cold.count("kv_blocks_hit") == 8
