"""Log probabilities as the real OpenAI client reads them: chats and completions, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from tests.integration.gateway_harness import Worker, fresh_seed, reserve, take_all

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_the_openai_client_reads_a_chats_log_probabilities(client: AsyncOpenAI, worker: Worker) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    waiting = asyncio.create_task(
        client.chat.completions.create(model="tiny", messages=MESSAGES, seed=seed, logprobs=True, top_logprobs=2)
    )
    work = await worker.take(seed)
    await work.claim()
    ids = byte_ids("é!")
    await work.say_ids(ids[:1], "")  # half a character, held back
    await work.say_ids(ids[1:], "é!")
    await work.end()
    choice = (await waiting).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert [entry.token for entry in content] == ["\\xc3", "\\xa9", "!"]
    assert bytes(byte for entry in content for byte in entry.bytes or []).decode() == choice.message.content == "é!"
    assert [entry.logprob for entry in content] == [-1.5] * 3
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-1.0, -1.5]] * 3
    assert content[2].top_logprobs[1].token == "!"


async def test_streamed_log_probabilities_come_with_their_tokens_even_while_the_text_is_held_back(
    client: AsyncOpenAI, worker: Worker
) -> None:
    seed = reserve(worker, 2)
    chunks = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=seed, n=2, stream=True, logprobs=True
    )
    works = await take_all(worker, seed, 2)
    ids = byte_ids("é!")
    for work in works:
        await work.say_ids(ids[:1], "")
        await work.say_ids(ids[1:], "é!")
        await work.end()
    seen: dict[int, list[tuple[str | None, list[str]]]] = {0: [], 1: []}
    async for chunk in chunks:
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            tokens = choice.logprobs.content or []
            assert all(entry.top_logprobs == [] for entry in tokens)
            seen[choice.index].append((choice.delta.content, [entry.token for entry in tokens]))
    assert seen == {n: [("", ["\\xc3"]), ("é!", ["\\xa9", "!"])] for n in (0, 1)}


async def test_the_openai_client_reads_a_completions_log_probabilities(client: AsyncOpenAI, worker: Worker) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [-1.0] * 4
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.top_logprobs == [{token: -1.0} for token in choice.logprobs.tokens]
    chunks = await client.completions.create(model="tiny", prompt="a", logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in chunks]
    offsets = [offset for part in parts if part is not None for offset in part.text_offset or []]
    assert offsets == [0, 1, 2, 3]
    plain = await client.completions.create(model="tiny", prompt="a")
    assert plain.choices[0].logprobs is None


def byte_ids(text: str) -> list[int]:
    """Ids of the tiny model's tokens: one a byte, in the order of their spelling, behind one special token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = [*printable, *(byte for byte in range(0x100) if byte not in printable)]
    return [1 + order.index(byte) for byte in text.encode()]
