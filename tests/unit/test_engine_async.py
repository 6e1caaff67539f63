"""The engine's thread: results arrive in order on the event loop, which never waits; failures leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from shared.engine import (
    AsyncEngine,
    Engine,
    EngineStopped,
    Sequence,
    SequenceStep,
    StepStats,
    UnknownSequence,
)
from shared.engine.detokenizer import Detokenizer
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import begin, drain, greedy, load, outputs, sampled, tiny_model

PROMPT = [(i * 37) % 250 for i in range(45)]


class Listener:
    """Collects what the engine says; `ended` is set when as many sequences ended as were asked for."""

    def __init__(self) -> None:
        self.steps: list[SequenceStep] = []
        self.stats: list[StepStats] = []
        self.failures: list[tuple[list[str], BaseException]] = []
        self.threads: set[int] = set()
        self.changed = asyncio.Event()

    def on_steps(self, steps: list[SequenceStep], stats: StepStats) -> None:
        self.threads.add(threading.get_ident())
        self.steps += steps
        self.stats.append(stats)
        self.changed.set()

    def on_failure(self, seq_ids: list[str], error: BaseException) -> None:
        self.threads.add(threading.get_ident())
        self.failures.append((seq_ids, error))
        self.changed.set()

    async def until_ended(self, *seq_ids: str) -> None:
        async with asyncio.timeout(60):
            while not set(seq_ids) <= {s.seq_id for s in self.steps if s.finish_reason}:
                self.changed.clear()
                await self.changed.wait()

    async def until_failed(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.failures) < count:
                self.changed.clear()
                await self.changed.wait()


def start(engine: Engine, seq_id: str, params: SamplingParams) -> Sequence:
    return begin(engine, seq_id, PROMPT, params)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def running(model_path: Path, listener: Listener) -> AsyncIterator[AsyncEngine]:
    engine = await asyncio.to_thread(load, model_path)
    running = AsyncEngine(engine, listener.on_steps, listener.on_failure)
    running.start()
    yield running
    await running.stop()


async def test_tokens_arrive_in_order_on_the_event_loop(
    running: AsyncEngine, listener: Listener, model_path: Path
) -> None:
    names = ("a", "b", "c")
    await asyncio.gather(*(running.call(start, n, sampled(40, seed=i)) for i, n in enumerate(names)))
    await listener.until_ended(*names)
    alone = load(model_path)
    for i, name in enumerate(names):
        start(alone, name, sampled(40, seed=i))
    assert outputs(listener.steps) == outputs(drain(alone))
    assert listener.threads == {threading.get_ident()}
    assert all(s.duration_s >= 0 and s.batch_tokens > 0 for s in listener.stats)


async def test_the_event_loop_turns_while_the_engine_computes(running: AsyncEngine, listener: Listener) -> None:
    await running.call(start, "s", greedy(300))
    turns = 0
    while not any(s.finish_reason for s in listener.steps):
        await asyncio.sleep(0)
        turns += 1
    assert turns > len(listener.stats)


async def test_a_call_returns_its_result_or_raises_its_error(running: AsyncEngine) -> None:
    assert await running.call(lambda engine: engine.pool.num_used) == 0
    with pytest.raises(UnknownSequence):
        await running.call(Engine.pin, "nobody")
    assert await running.call(lambda engine: threading.current_thread().name) == "engine"


async def test_a_cancelled_call_still_runs_and_disturbs_nothing(running: AsyncEngine) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(engine: Engine) -> None:
        entered.set()
        leave.wait(30)

    blocked = asyncio.create_task(running.call(slow))
    await asyncio.to_thread(entered.wait, 30)
    second = asyncio.create_task(running.call(lambda engine: done.append(1)))
    done: list[int] = []
    await asyncio.sleep(0)
    blocked.cancel()
    second.cancel()
    leave.set()
    await running.call(lambda engine: None)
    assert done == [1]
    assert blocked.cancelled()


async def test_what_is_posted_runs_in_order_and_an_error_in_it_ends_nothing(running: AsyncEngine) -> None:
    order: list[str] = []
    threads: list[int] = []
    told = asyncio.Event()

    def broken(engine: Engine) -> None:
        order.append("broken")
        raise RuntimeError("no")

    def tell() -> None:
        threads.append(threading.get_ident())
        told.set()

    running.post(lambda engine: order.append("first"))
    running.post(broken, tell)
    running.post(lambda engine: order.append("last"))
    assert await running.call(lambda engine: list(order)) == ["first", "broken", "last"]
    async with asyncio.timeout(10):
        await told.wait()
    assert threads == [threading.get_ident()]


async def test_proposals_from_any_thread_are_used_and_never_wait(
    running: AsyncEngine, listener: Listener, model_path: Path
) -> None:
    alone = load(model_path)
    start(alone, "s", greedy(200))
    expected = outputs(drain(alone))["s"]
    proposing = threading.Event()

    def propose() -> None:
        while not proposing.is_set():
            running.propose("s", len(PROMPT), expected)
            running.propose("nobody", 0, [1])
            time.sleep(0.001)

    thread = threading.Thread(target=propose)
    thread.start()
    try:
        await running.call(start, "s", greedy(200))
        await listener.until_ended("s")
    finally:
        proposing.set()
        thread.join()
    assert outputs(listener.steps)["s"] == expected
    assert sum(s.accepted for s in listener.steps) > 20


async def test_a_step_that_raises_reports_and_releases_the_running_and_the_engine_goes_on(
    running: AsyncEngine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = running.engine._runner
    forward = type(runner).forward
    await running.call(start, "a", greedy(500))
    await running.call(start, "b", greedy(500))

    def broken(*args: object) -> object:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(runner), "forward", broken)
    await listener.until_failed(1)
    monkeypatch.setattr(type(runner), "forward", forward)
    ((failed, error),) = listener.failures
    assert sorted(failed) == ["a", "b"]
    assert "device is gone" in str(error)
    assert await running.call(lambda engine: engine.pool.num_used) == 0
    await running.call(start, "c", greedy(5))
    await listener.until_ended("c")


async def test_a_sequence_that_fails_alone_is_reported_and_released_alone(
    running: AsyncEngine, listener: Listener
) -> None:
    def poison(engine: Engine) -> None:
        sequence = engine.new_sequence("bad", PROMPT, len(PROMPT), greedy(5), salt="bad")
        engine.admit(sequence)
        engine.block_buffer(sequence.block_ids[0])[:] = 255  # every float is NaN
        engine.set_loaded(sequence, 16)
        engine.start(sequence)

    await running.call(poison)
    await running.call(start, "good", greedy(20))
    await listener.until_ended("good")
    await listener.until_failed(1)
    assert [ids for ids, _ in listener.failures] == [["bad"]]
    await running.call(Engine.release, "good")
    assert await running.call(lambda engine: engine.pool.num_used) == 0


class BrokenDetokenizer:
    stopped = False

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def push(self, _: int) -> str:
        raise self._error


def start_with(engine: Engine, error: BaseException) -> None:
    """A neighbour that pauses after the step in which `bad` fails."""
    begin(engine, "good", PROMPT[:20], greedy(8), prefill_only=True)
    bad = begin(engine, "bad", PROMPT[20:], greedy(8))
    bad.detokenizer = cast(Detokenizer, BrokenDetokenizer(error))


async def test_any_error_of_one_sequence_leaves_its_neighbours_their_step(
    running: AsyncEngine, listener: Listener
) -> None:
    await running.call(start_with, ValueError("no text"))
    await listener.until_failed(1)
    assert [ids for ids, _ in listener.failures] == [["bad"]]
    assert [len(ids) for ids in outputs(listener.steps).values()] == [1]
    assert listener.steps[0].seq_id == "good"
    assert running.fault == ""


async def test_a_step_that_raises_late_fails_also_what_it_has_paused_already(
    running: AsyncEngine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def late(engine: Engine) -> list[SequenceStep]:
        step(engine)
        raise RuntimeError("too late")

    monkeypatch.setattr(Engine, "step", late)
    await running.call(lambda engine: begin(engine, "s", PROMPT[:20], greedy(8), prefill_only=True))
    await listener.until_failed(1)
    assert [ids for ids, _ in listener.failures] == [["s"]]
    assert await running.call(lambda engine: engine.pool.num_used) == 0


async def test_an_engine_whose_every_step_raises_says_that_it_is_broken(
    running: AsyncEngine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = type(running.engine._runner)
    forward = runner.forward

    def broken(*args: object) -> object:
        raise RuntimeError("the device is gone")

    for broken_steps in (2, 3):
        monkeypatch.setattr(runner, "forward", broken)
        for n in range(broken_steps):
            assert running.fault == ""
            before = len(listener.failures)
            await running.call(start, f"bad-{n}", greedy(5))
            await listener.until_failed(before + 1)
        if broken_steps == 2:
            monkeypatch.setattr(runner, "forward", forward)
            await running.call(start, "good", greedy(5))
            await listener.until_ended("good")
    assert running.fault == "engine_broken"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_whose_thread_died_says_so(running: AsyncEngine) -> None:
    class Panic(BaseException):
        pass

    await running.call(start_with, Panic("as pyo3 raises it"))
    async with asyncio.timeout(30):
        while not running.fault:
            await asyncio.sleep(0.01)
    assert running.fault == "engine_dead"
    with pytest.raises(EngineStopped):
        await running.call(lambda engine: None)


async def test_an_idle_engine_shows_that_it_is_alive_and_does_not_spin(running: AsyncEngine) -> None:
    await running.call(lambda engine: None)
    before, cpu = running.progress_unix_s, time.process_time()
    while running.progress_unix_s == before:
        await asyncio.sleep(0.02)
    assert time.process_time() - cpu < 0.2


async def test_a_sequence_that_waits_for_blocks_does_not_make_the_thread_spin(
    running: AsyncEngine, listener: Listener
) -> None:
    def take_all(engine: Engine) -> list[int]:
        return engine.pool.allocate(engine.pool.num_free)

    blocks = await running.call(take_all)
    await running.call(start, "s", greedy(5))
    cpu = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - cpu < 0.25
    assert listener.steps == []
    await running.call(lambda engine: engine.pool.free(blocks))
    await listener.until_ended("s")


async def test_after_stop_nothing_runs_and_callers_are_told(model_path: Path, listener: Listener) -> None:
    engine = await asyncio.to_thread(load, model_path)
    idle = AsyncEngine(engine, listener.on_steps, listener.on_failure)
    with pytest.raises(EngineStopped):
        await idle.call(lambda engine: None)
    idle.propose("s", 0, [1])
    await idle.stop()

    stopped = AsyncEngine(engine, listener.on_steps, listener.on_failure)
    stopped.start()
    with pytest.raises(RuntimeError, match="already"):
        stopped.start()
    await stopped.call(start, "s", greedy(500))
    entered, leave = threading.Event(), threading.Event()

    def slow(engine: Engine) -> str:
        entered.set()
        leave.wait(30)
        return "done"

    first = asyncio.create_task(stopped.call(slow))
    await asyncio.to_thread(entered.wait, 30)
    late = asyncio.create_task(stopped.call(lambda engine: "late"))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stopped.stop())
    await asyncio.sleep(0)
    leave.set()
    await stopping
    assert await first == "done"
    with pytest.raises(EngineStopped):
        await late
    with pytest.raises(EngineStopped):
        await stopped.call(lambda engine: None)
    stopped.propose("s", 0, [1])
    await stopped.stop()
    assert stopped.fault == ""
