"""A loop that is told to end does, even where the cancellation itself was swallowed."""

from __future__ import annotations

import asyncio
import contextlib

from services.gateway.cancellation import cancel_requested


async def test_a_loop_ends_although_its_cancellation_was_swallowed() -> None:
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        while not cancel_requested():
            rounds += 1
            with contextlib.suppress(asyncio.CancelledError):  # as a wait that the answer and the end reach together
                await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(task, timeout=5)
    assert rounds == 1
