"""Steps reach the task that serves their sequence, and failures do too."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine import SequenceStep
from shared.worker.step_feed import EngineFailed, StepFeed


def step(seq_id: str, index: int) -> SequenceStep:
    return SequenceStep(seq_id, index, [index], "x", index, None, 0, 0)


async def test_each_sequence_gets_its_own_steps_in_order() -> None:
    feed = StepFeed()
    feed.open("a")
    feed.open("b")
    waiting = asyncio.create_task(feed.next("a"))
    await asyncio.sleep(0)
    feed.deliver([step("a", 0), step("b", 0), step("nobody", 0)])
    feed.deliver([step("a", 1), step("a", 2)])
    assert await waiting == step("a", 0)
    assert feed.ready("a") == [step("a", 1), step("a", 2)]
    assert feed.ready("a") == []
    assert await feed.next("b") == step("b", 0)


async def test_a_failed_step_is_raised_where_its_sequences_are_served() -> None:
    feed = StepFeed()
    feed.open("a")
    feed.open("b")
    feed.fail(["a"], RuntimeError("out of memory"))
    with pytest.raises(EngineFailed, match=r"a: .*out of memory"):
        await feed.next("a")
    feed.deliver([step("b", 0)])
    assert await feed.next("b") == step("b", 0)
