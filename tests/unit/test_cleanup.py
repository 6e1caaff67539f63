"""Clean-up runs to its end, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from shared.worker.cleanup import run_to_end


async def test_every_step_runs_although_the_caller_is_cancelled_twice() -> None:
    done: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.05)
        done.append("slow")

    async def last() -> None:
        done.append("last")

    async def caller() -> None:
        await run_to_end(slow, last)
        done.append("never")

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["slow", "last"]


async def test_a_step_that_fails_does_not_stop_the_next() -> None:
    done: list[str] = []

    async def broken() -> None:
        raise RuntimeError("no")

    async def last() -> None:
        done.append("last")

    await run_to_end(broken, last)
    assert done == ["last"]
