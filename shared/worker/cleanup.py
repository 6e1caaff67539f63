"""Clean-up that runs to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)


async def run_to_end(*steps: Callable[[], Awaitable[object]]) -> None:
    """Run each step, whatever the ones before it raise and however often the caller is cancelled meanwhile.

    A cancellation that arrives during the steps is raised after the last.
    """

    async def run() -> None:
        for step in steps:
            try:
                await step()
            except Exception:
                log.exception("clean_up_failed")

    task = asyncio.create_task(run(), name="clean-up")
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
