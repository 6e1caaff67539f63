"""What is left when all requests are done: leases, queued messages, blocks with holders, memory."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Final

import msgspec

from loadgen.chaos.observer import Observer
from loadgen.chaos.stack import Stack

SETTLE_S: Final = 180.0
"""Longer than any lease that a dead holder may leave."""
MEMORY_SLACK: Final = 0.05
FILL: Final = 1.5
BLOCK_TOKENS: Final = 32
"""The default of HEADRACE_BLOCK_TOKENS."""
_POLL_S: Final = 0.5
_REST_S: Final = 3.0


class Memory(msgspec.Struct, frozen=True):
    """Resident bytes of one process before and after, and whether it is the same process.

    `cache_bytes`: what a cache that nobody filled before may take meanwhile.
    """

    instance: str
    before_bytes: int
    after_bytes: int
    same_process: bool
    cache_bytes: int = 0

    @property
    def grew(self) -> bool:
        return self.after_bytes > self.before_bytes * (1 + MEMORY_SLACK) + self.cache_bytes

    @property
    def growth(self) -> float:
        return self.after_bytes / self.before_bytes - 1 if self.before_bytes else 0.0


class Leaks(msgspec.Struct, frozen=True):
    """`settle_s`: how long after the last request nothing was held any more. `left`: what was held even then.

    Memory is judged where the caches of prefill and decode were full before, since they take theirs as they fill. A
    drafter's fills as guesses are asked of it, however much is generated: it may grow by that.
    """

    settle_s: float
    left: dict[str, int]
    memory: list[Memory]
    dead_letters: int
    caches_were_full: bool

    def problems(self) -> list[str]:
        held = [f"{what}: {count} left after {self.settle_s:.0f} s" for what, count in self.left.items()]
        grown = [
            f"{m.instance} grew by {m.growth:.1%}, from {m.before_bytes >> 20} to {m.after_bytes >> 20} MiB"
            for m in self.memory
            if self.caches_were_full and m.grew
        ]
        dead = [f"{self.dead_letters} dead letters"] if self.dead_letters else []
        return [*held, *grown, *dead]


async def held(observer: Observer) -> dict[str, int]:
    """What is in use at this moment, without what is zero. Cached blocks that nobody holds are not in use."""
    found = {f"messages in {stream}": count for stream, count in (await observer.queued()).items()}
    for status in observer.statuses():
        found[f"requests of {status.instance}"] = len(status.holds)
        if status.stage in ("prefill", "decode"):
            found[f"blocks of {status.instance}"] = status.blocks_used
        if status.stage == "kvstore":
            found[f"leases of {status.instance}"] = status.leases
            found[f"leased blocks of {status.instance}"] = status.blocks_used - status.blocks_evictable
    return {what: count for what, count in found.items() if count}


async def settle(observer: Observer, within_s: float = SETTLE_S) -> tuple[float, dict[str, int]]:
    """Wait until nothing is held; how long that took, and what is left."""
    began = time.monotonic()
    while True:
        await observer.ping()
        await asyncio.sleep(_POLL_S)
        left = await held(observer)
        took_s = time.monotonic() - began
        if not left or took_s > within_s:
            return took_s, left


async def resident(stack: Stack, observer: Observer) -> dict[str, tuple[int, int]]:
    """By instance: its process id and resident bytes, after a rest in which freed memory may go back."""
    await asyncio.sleep(_REST_S)
    pids = {status.instance: status.pid for status in observer.statuses() if status.instance in stack.instances}
    by_pid = await asyncio.to_thread(_resident_bytes, list(pids.values()))
    return {instance: (pid, by_pid.get(pid, 0)) for instance, pid in pids.items()}


def caches_full(observer: Observer, tokens: int) -> bool:
    """Whether so many tokens, spread over the workers of a stage, have surely filled every block of their caches."""
    totals = [(status.stage, status.blocks_total) for status in observer.statuses()]
    return all(
        tokens > FILL * BLOCK_TOKENS * sum(total for of, total in totals if of == stage)
        for stage in ("prefill", "decode")
    )


def compare(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], draft_cache_bytes: int
) -> list[Memory]:
    return [
        Memory(
            instance,
            before[instance][1],
            after_bytes,
            before[instance][0] == pid,
            draft_cache_bytes if instance.startswith("draft-") else 0,
        )
        for instance, (pid, after_bytes) in sorted(after.items())
        if instance in before
    ]


def _resident_bytes(pids: list[int]) -> dict[int, int]:
    """As `ps` tells it, in KiB."""
    told = subprocess.run(  # noqa: S603 - numbers are the only arguments
        ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))],  # noqa: S607
        check=False,
        capture_output=True,
        text=True,
        timeout=10,
    ).stdout
    return {int(pid): int(kib) << 10 for pid, kib in (line.split() for line in told.splitlines())}
