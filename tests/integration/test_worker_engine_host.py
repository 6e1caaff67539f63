"""The engine as workers use it: what was asked for is done in order, so that one use of an id never sees another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from shared.engine import EngineError, Sequence
from shared.models import ModelFiles
from shared.telemetry.metrics import DecodeMetrics
from shared.worker import engine_host
from shared.worker.engine_host import EngineHost
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import Gate, text
from tests.unit.engine_harness import load, sampled, tiny_model

PROMPT, OTHER = text(1, 60), text(2, 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture
async def host(model: Path) -> AsyncIterator[EngineHost]:
    files = cast(ModelFiles, SimpleNamespace(name="tiny"))
    made = EngineHost(load(model), files, DecodeMetrics("decode-0", CollectorRegistry()).engine)
    made.start()
    yield made
    await made.stop()


async def begin(host: EngineHost, seq_id: str, prompt: list[int], **options: Any) -> Sequence:
    sequence = await host.open(seq_id, prompt, len(prompt), sampled(30), salt="", **options)
    await host.begin(sequence, 0)
    return sequence


async def first_ids(host: EngineHost, seq_id: str, count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        step = await host.feed.next(seq_id)
        assert not step.new_ids or step.first_index == len(ids)
        ids += step.new_ids
    return ids


def pins_of(sequence: Sequence, count: int) -> Callable[[], Awaitable[bool]]:
    async def as_many() -> bool:
        return sequence.pins == count

    return as_many


async def until_empty(host: EngineHost) -> None:
    async def empty() -> bool:
        return not (host.pool.used or host.feed._queues or host.async_engine.engine._sequences)

    await eventually(empty)


async def test_a_step_in_progress_is_not_told_to_the_next_use_of_its_id(host: EngineHost) -> None:
    """A request that is given back may come again to the same worker before a long step ends."""
    undisturbed = await begin(host, "undisturbed", OTHER)
    expected = await first_ids(host, "undisturbed", 5)
    host.release(undisturbed)
    await until_empty(host)
    gate = Gate(host)
    first = await begin(host, "s", PROMPT)
    gate.let(2)

    async def stepped() -> bool:
        return first.num_sampled == 2 and gate.begun >= 3

    await eventually(stepped)
    host.release(first)
    again = asyncio.create_task(begin(host, "s", OTHER))
    await asyncio.sleep(0.1)
    gate.open()
    second = await again
    assert await first_ids(host, "s", 5) == expected
    host.release(second)
    await until_empty(host)


@pytest.mark.parametrize("turns", range(8))
async def test_an_opening_that_is_cancelled_at_any_moment_leaves_nothing(host: EngineHost, turns: int) -> None:
    opening = asyncio.create_task(host.open("s", PROMPT, len(PROMPT), sampled(30), salt="", begin_from=0))
    for _ in range(turns):
        await asyncio.sleep(0.0005 * turns)
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled():
        host.release(opening.result())
    await until_empty(host)


async def test_an_opening_under_an_id_in_use_leaves_the_first_as_it_is(host: EngineHost) -> None:
    first = await begin(host, "s", PROMPT)
    with pytest.raises(EngineError, match="exists already"):
        await host.open("s", OTHER, len(OTHER), sampled(5), salt="")
    async with asyncio.timeout(20):
        await first_ids(host, "s", 5)
    assert first.state != "released"
    host.release(first)
    await until_empty(host)


async def test_a_sequence_that_waits_for_blocks_gets_those_of_one_that_is_released(host: EngineHost) -> None:
    total = host.pool.total
    hog = await host.open("hog", text(3, 1000), 1000, sampled(5), salt="", pin=True)
    hogs = [hog]
    while host.pool.used + 64 <= total:
        hogs.append(await host.open(f"hog{len(hogs)}", text(3 + len(hogs), 1000), 1000, sampled(5), salt="", pin=True))
    waiting = asyncio.create_task(host.open("late", text(99, 1000), 1000, sampled(5), salt=""))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    for sequence in hogs:
        host.release(sequence)
    async with asyncio.timeout(10):
        host.release(await waiting)
    await until_empty(host)


def fitting(blocks: int, seed: int = 1) -> list[int]:
    """A prompt that takes so many blocks, with the place for its next token."""
    return text(seed, 16 * blocks - 1)


async def fill(host: EngineHost, leave: int) -> list[Sequence]:
    """Hold blocks until so many are left free."""
    held: list[Sequence] = []
    while (free := host.pool.total - host.pool.used - leave) > 0:
        prompt = fitting(min(free, 60), seed=100 + len(held))
        held.append(await host.open(f"hog{len(held)}", prompt, len(prompt), sampled(5), salt="", pin=True))
    return held


class Openings:
    """Openings in the order in which they were asked for, and the names of those that got their blocks."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.entered: list[str] = []

    def ask(self, name: str, blocks: int) -> asyncio.Task[Sequence]:
        async def opened() -> Sequence:
            prompt = fitting(blocks)
            sequence = await self._host.open(name, prompt, len(prompt), sampled(5), salt=name)
            self.entered.append(name)
            return sequence

        return asyncio.create_task(opened())

    async def settle(self) -> None:
        """Until all that was asked for was tried once."""
        for _ in range(3):
            await asyncio.sleep(0)
            await self._host.async_engine.call(lambda _: None)


async def test_a_large_opening_is_not_passed_by_small_ones_that_come_later(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are released are passed on at once: nobody has to look for them."""
    monkeypatch.setattr(engine_host, "ROOM_CHECK_S", 600.0)
    hogs, openings = await fill(host, leave=20), Openings(host)
    tasks = [openings.ask("large", 40), *(openings.ask(f"small{n}", 2) for n in range(8))]
    await openings.settle()
    assert openings.entered == []
    host.release(hogs[0])
    for task in tasks:
        async with asyncio.timeout(10):
            host.release(await task)
    assert openings.entered == ["large", *(f"small{n}" for n in range(8))]
    later = openings.ask("later", 2)
    await openings.settle()
    assert openings.entered[-1] == "later", "nobody waits any more"
    for sequence in (*hogs, await later):
        host.release(sequence)
    await until_empty(host)


async def test_openings_wait_no_longer_behind_one_that_is_cancelled(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "ROOM_CHECK_S", 600.0)
    hogs, openings = await fill(host, leave=20), Openings(host)
    large, small = openings.ask("large", 40), openings.ask("small", 2)
    await openings.settle()
    assert openings.entered == []
    large.cancel()
    await asyncio.wait({large})
    async with asyncio.timeout(10):
        host.release(await small)
    for hog in hogs:
        host.release(hog)
    await until_empty(host)


async def test_an_opening_that_fails_while_it_waits_fails_alone(host: EngineHost) -> None:
    hogs, openings = await fill(host, leave=20), Openings(host)
    large, small = openings.ask("large", 40), openings.ask("small", 2)
    await openings.settle()
    await host.async_engine.call(lambda engine: engine.release("large"))
    with pytest.raises(EngineError):
        async with asyncio.timeout(10):
            await large
    async with asyncio.timeout(10):
        host.release(await small)
    for hog in hogs:
        host.release(hog)
    await until_empty(host)


async def test_an_opening_that_finds_room_asks_the_engine_once(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call may wait for a whole step."""
    call, calls = host.async_engine.call, 0

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return await call(*args, **options)

    monkeypatch.setattr(host.async_engine, "call", counted)
    openings = Openings(host)
    tasks = [openings.ask(f"s{n}", 2) for n in range(3)]
    for task in tasks:
        host.release(await task)
    assert calls == 3
    await until_empty(host)


async def test_without_a_salt_cached_blocks_are_shared_with_nobody(host: EngineHost) -> None:
    async def cached_under(salt: str | None) -> int:
        sequence = await host.open("s", PROMPT, len(PROMPT), sampled(5), salt=salt)
        await host.begin(sequence, 0)
        await first_ids(host, "s", 1)
        host.release(sequence)
        return sequence.num_cached

    assert [await cached_under(salt) for salt in ("", "", None, None, "")] == [0, 48, 0, 0, 48]
    await until_empty(host)


async def test_pins_end_with_what_they_were_for_even_if_that_is_cancelled(host: EngineHost) -> None:
    gate = Gate(host)
    sequence = await begin(host, "s", PROMPT)
    entered = asyncio.Event()

    async def read() -> None:
        async with host.pinned(sequence):
            entered.set()
            await asyncio.sleep(60)

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    waiting.cancel()  # while the step in progress keeps it from its pin
    await asyncio.wait({waiting})
    gate.open()
    await entered.wait()
    await eventually(pins_of(sequence, 1))
    reading.cancel()
    await eventually(pins_of(sequence, 0))
    host.release(sequence)
    await until_empty(host)
