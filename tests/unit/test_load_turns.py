"""Who loads a prompt's blocks when several need them: one first, and nobody waits for more than one."""

from __future__ import annotations

import asyncio

from services.decode.load_turns import LoadTurns
from shared.protocol.blocks import BlockRef, Manifest

BLOCK = 4


def manifest(n_tokens: int, name: bytes = b"") -> Manifest:
    blocks = [BlockRef(name + bytes([i]), BLOCK, 1, 0, []) for i in range(-(-n_tokens // BLOCK))]
    return Manifest("layout", n_tokens, blocks)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_others_wait_until_the_first_has_loaded_and_then_all_go_on() -> None:
    turns = LoadTurns()
    end = await turns.take(manifest(9), BLOCK)
    others = [asyncio.create_task(turns.take(manifest(9 + i), BLOCK)) for i in range(3)]
    await settle()
    assert not any(other.done() for other in others)
    end()
    end()
    await settle()
    assert all(other.done() for other in others)


async def test_other_prompts_and_prompts_without_a_full_block_wait_for_nobody() -> None:
    turns = LoadTurns()
    async with asyncio.timeout(5):
        await turns.take(manifest(9), BLOCK)
        await turns.take(manifest(9, b"other"), BLOCK)
        await turns.take(manifest(13), BLOCK)
        for _ in range(2):
            await turns.take(manifest(3), BLOCK)


async def test_one_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    turns = LoadTurns()
    end = await turns.take(manifest(8), BLOCK)
    waiting = asyncio.create_task(turns.take(manifest(8), BLOCK))
    await settle()
    waiting.cancel()
    await asyncio.wait({waiting})
    end()
    async with asyncio.timeout(5):
        first = await turns.take(manifest(8), BLOCK)
        end()  # an old turn that ends again does not end this one
        second = asyncio.create_task(turns.take(manifest(8), BLOCK))
        await settle()
        assert not second.done()
        first()
        await second
