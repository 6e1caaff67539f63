"""For loops that wait on NATS: whether they were told to end, even where the cancellation itself got lost."""

from __future__ import annotations

import asyncio


def cancel_requested() -> bool:
    """Whether the current task has been cancelled.

    `asyncio.wait_for` of Python 3.11, which nats-py waits with, swallows a cancellation that arrives together with the
    answer. A loop without an end would then go on for ever, and with it the gateway that is to stop.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
