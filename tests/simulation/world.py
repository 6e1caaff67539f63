"""The deterministic scheduler: virtual time, and processes that each run an event loop of their own.

Everything that happens is an event on one heap; delays, and the order of what is due together, come from one seeded
generator. Only inside a process callbacks keep the order in which they became ready, as asyncio promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

UNIX_EPOCH_S = 1_800_000_000.0
MONOTONIC_EPOCH_S = 1000.0

TURN_S = 20e-6
"""Least time between two turns of one process's event loop."""

HICCUP_PROBABILITY, HICCUP_S = 0.01, 0.03
"""How often, and how long at most, the operating system lets a process wait for a core."""

MAX_EVENTS = 3_000_000
MAX_CLOSES = 8


class Livelock(Exception):
    """The simulation does more than any run should."""


class World:
    """Owner of virtual time, of all randomness and of the trace of one run."""

    def __init__(self, seed: int, *, keep_trace: bool = False, stop_at_failure: bool = False) -> None:
        self.seed = seed
        self._stop_at_failure = stop_at_failure
        self.random = random.Random(f"headrace-{seed}")
        self.now = 0.0
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.failures: list[str] = []
        self.trace: list[str] = []
        self.events = 0
        self.turns = 0
        self.closed = False
        self.counts: Counter[str] = Counter()
        self.keeps_trace = keep_trace
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """Have something happen at a moment; among those of one moment the generator chooses."""
        self._scheduled += 1
        heapq.heappush(self._heap, (when, self.random.random(), self._scheduled, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, act, *args)

    def note(self, what: str) -> None:
        """One line of the trace, which is hashed in any case."""
        if self.closed:
            return
        line = f"{self.now:11.6f} {what}"
        self._digest.update(line.encode())
        if self.keeps_trace:
            self.trace.append(line)

    def count(self, what: str) -> None:
        """For the summary of many runs."""
        self.counts[what] += 1

    def comment(self, what: str) -> None:
        """A line for people only."""
        if self.keeps_trace and not self.closed:
            self.trace.append(f"{self.now:11.6f} {what}")

    def fail(self, what: str) -> None:
        """A promise was broken."""
        if self.closed:
            return
        self.note(f"FAILED {what}")
        if what not in self.failures:
            self.failures.append(what)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds, which is looked at every 50 ms of it. False: not before `limit_s`."""
        heap = self._heap
        check_at = self.now
        while heap:
            when = heap[0][0]
            if when >= check_at:
                if until() or (self._stop_at_failure and self.failures):
                    self.enter(None)
                    return True
                if check_at >= limit_s:
                    break
                check_at = max(check_at, when) + 0.05
            _, _, _, act, args = heapq.heappop(heap)
            self.now = max(self.now, when)
            self.events += 1
            act(*args)
            if self.events > MAX_EVENTS:
                raise Livelock(f"seed {self.seed}: {MAX_EVENTS} events by {self.now:.1f} s")
        self.enter(None)
        return until()

    def enter(self, process: Process | None) -> Process | None:
        """Code runs as this process from now on: its loop is the running one, its clock is the clock. Returns as which
        it ran before."""
        before, self.current = self.current, process
        asyncio._set_running_loop(process.loop if process is not None else None)
        return before

    def close(self) -> None:
        """End all coroutines, each under its own loop, so that none ends later inside another run."""
        self.closed = True
        logging.disable()  # spans that end outside their context
        try:
            for process in self.processes:
                process.dispose()
        finally:
            logging.disable(logging.NOTSET)
        self._heap.clear()


class Process:
    """A program: one event loop and what runs on it. It can be stopped, continued and killed at any moment."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.stopped = False
        self.skew_s = 0.0
        """How much its wall clock is ahead of the true time."""
        self.on_kill: list[Callable[[], None]] = []
        self.loop = ProcessLoop(self)  # type: ignore[abstract]
        self._turn_due = False
        self._missed_turn = False
        world.processes.append(self)

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as the program. When it ends, the process has ended."""
        self.spawn(self._main(main), "main")

    async def _main(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except Exception as error:
            if not self.dead:
                self.world.fail(f"{self.name} ended with {describe(error)}")
        self.kill("ended")

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any] | None:
        """Begin a task in this process, from outside."""
        if self.dead:
            work.close()
            return None
        return self.loop.create_task(work, name=name)

    def kill(self, how: str = "killed") -> None:
        """Nothing of it runs any more, not even a finally block."""
        if self.dead:
            return
        self.world.note(f"{self.name} {how}")
        self.dead = True
        self.loop.ready.clear()
        for tell in self.on_kill:
            tell()

    def stop(self) -> None:
        """SIGSTOP: its callbacks wait while time goes on."""
        if not self.dead and not self.stopped:
            self.world.note(f"{self.name} stopped")
            self.stopped = True

    def resume(self) -> None:
        """SIGCONT: all timers that have passed meanwhile are due, all messages that came are there."""
        if self.stopped and not self.dead:
            self.world.note(f"{self.name} goes on")
            self.stopped = False
            if self._missed_turn:
                self._missed_turn = False
                self.world.at(self.world.now, self._turn)

    def wake(self) -> None:
        """Its loop has something to do."""
        if not self._turn_due and not self.dead:
            self._turn_due = True
            draw = self.world.random.random()
            delay = HICCUP_S * draw / HICCUP_PROBABILITY if draw < HICCUP_PROBABILITY else TURN_S * (0.5 + draw)
            self.world.after(delay, self._turn)

    def _turn(self) -> None:
        """One iteration of its event loop: what is ready now, nothing that becomes ready meanwhile."""
        if self.dead:
            return
        if self.stopped:
            self._missed_turn = True
            return
        self._turn_due = False
        self.world.turns += 1
        ready = self.loop.ready
        self.loop.ready = []
        before = self.world.enter(self)
        for handle in ready:
            if self.dead:
                break
            if not handle._cancelled:
                handle._run()
        self.world.enter(before)
        if self.loop.ready and not self.dead:
            self.wake()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Code inside runs as this process."""
        before = self.world.enter(self)
        try:
            yield
        finally:
            self.world.enter(before)

    def dispose(self) -> None:
        self.dead = True
        self.loop.ready.clear()
        with self.entered():
            for task in self.loop.tasks:
                if task.done():
                    continue
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                for _ in range(MAX_CLOSES):  # a finally block that awaits makes it refuse once
                    try:
                        coroutine.close()
                        break
                    except (RuntimeError, asyncio.CancelledError):
                        continue
        self.loop.tasks.clear()
        self.loop.ready.clear()


class ProcessLoop(asyncio.AbstractEventLoop):
    """An event loop whose time and turns are the world's. Just what asyncio's own parts and ours ask of a loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self.ready: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64

    def time(self) -> float:
        return MONOTONIC_EPOCH_S + self._world.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._process.dead

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._process.dead:
            self.ready.append(handle)
            self._process.wake()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._process.dead:
            self._world.at(max(when - MONOTONIC_EPOCH_S, self._world.now), self._due, timer)
        return timer

    def _due(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled() and not self._process.dead:
            self.ready.append(timer)
            self._process.wake()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        if len(self.tasks) > self._prune_at:
            self.tasks = [known for known in self.tasks if not known.done()]
            self._prune_at = 2 * len(self.tasks) + 64
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread that is done a moment later."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._world.random.uniform(0, 0.005), run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.dead:
            return
        error = context.get("exception")
        what = f"{context.get('message')}: {describe(error)}" if error is not None else str(context.get("message"))
        self._world.fail(f"{self._process.name}: {what}")


def describe(error: BaseException) -> str:
    """An error with those inside its group."""
    if isinstance(error, BaseExceptionGroup):
        return f"{error.message} [{', '.join(describe(inner) for inner in error.exceptions)}]"
    return repr(error)
