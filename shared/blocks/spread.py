"""Spreads blocks over stores: each at the first of its places that takes it, all places at once, in two rounds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from shared.protocol.blocks import Place
from shared.protocol.kv import MAX_BLOCKS

MAX_TRIES: Final = 2
"""Places that a block is tried at before it is given up."""


async def spread(
    items: Iterable[int],
    candidates: Callable[[int], Sequence[Place]],
    move: Callable[[Place, list[int]], Awaitable[list[bool]]],
) -> dict[int, Place]:
    """Where each item (a number of the caller's) succeeded; items that failed everywhere are absent.

    `candidates` orders an item's places. `move` tries up to MAX_BLOCKS items at one place, says which succeeded, and
    raises nothing.
    """
    left = list(items)
    done: dict[int, Place] = {}
    tried: dict[int, set[Place]] = defaultdict(set)
    for _ in range(MAX_TRIES):
        groups: dict[Place, list[int]] = defaultdict(list)
        for item in left:
            place = next((p for p in candidates(item) if p not in tried[item]), None)
            if place is not None:
                tried[item].add(place)
                groups[place].append(item)
        batches = [
            (place, group[start : start + MAX_BLOCKS])
            for place, group in groups.items()
            for start in range(0, len(group), MAX_BLOCKS)
        ]
        async with asyncio.TaskGroup() as tasks:
            moves = [tasks.create_task(_start(move, place, batch)) for place, batch in batches]
        for (place, batch), moved in zip(batches, moves, strict=True):
            done.update((item, place) for item, ok in zip(batch, moved.result(), strict=True) if ok)
        left = [item for item in left if item not in done]
        if not left:
            break
    return done


async def _start(
    move: Callable[[Place, list[int]], Awaitable[list[bool]]], place: Place, batch: list[int]
) -> list[bool]:
    return await move(place, batch)
