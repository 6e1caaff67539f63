"""Hands the engine's step results to the task that serves each sequence."""

from __future__ import annotations

import asyncio

from shared.engine import SequenceStep


class EngineFailed(Exception):
    """A step of the engine raised while the sequence was in its batch."""


class StepFeed:
    """One unbounded queue per sequence; its length is bounded by the sequence's own token limit."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[SequenceStep | EngineFailed]] = {}

    def open(self, seq_id: str) -> None:
        self._queues[seq_id] = asyncio.Queue()

    def close(self, seq_id: str) -> None:
        self._queues.pop(seq_id, None)

    def deliver(self, steps: list[SequenceStep]) -> None:
        for step in steps:
            queue = self._queues.get(step.seq_id)
            if queue is not None:
                queue.put_nowait(step)

    def fail(self, seq_ids: list[str], error: BaseException) -> None:
        for seq_id in seq_ids:
            queue = self._queues.get(seq_id)
            if queue is not None:
                queue.put_nowait(EngineFailed(f"{seq_id}: {error!r}"))

    async def next(self, seq_id: str) -> SequenceStep:
        """The next step of a sequence. Raises EngineFailed."""
        item = await self._queues[seq_id].get()
        if isinstance(item, EngineFailed):
            raise item
        return item

    def ready(self, seq_id: str) -> list[SequenceStep]:
        """What has arrived besides, without waiting. Raises EngineFailed."""
        queue = self._queues[seq_id]
        steps: list[SequenceStep] = []
        while not queue.empty():
            item = queue.get_nowait()
            if isinstance(item, EngineFailed):
                raise item
            steps.append(item)
        return steps
