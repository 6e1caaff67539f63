"""Runs an Engine in a thread of its own beside an asyncio event loop, which it never blocks.

One queue leads into the thread (calls and proposals, in order), one leads out (results on the event loop).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import structlog
import torch

from shared.engine.engine import Engine
from shared.engine.errors import EngineStopped
from shared.engine.sequence import SequenceStep, StepStats

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

OnSteps = Callable[[list[SequenceStep], StepStats], None]
OnFailure = Callable[[list[str], BaseException], None]
AfterStep = Callable[[Engine, list[SequenceStep]], None]

_TICK_S = 0.5
"""An idle thread wakes this often, only to show that it is alive."""

_BLOCKED_S = 0.05
"""Pause when sequences wait but nothing can run, since no blocks are free."""

_BROKEN_AFTER = 3
"""This many steps in a row that raised: it is the engine, not what it was given."""


class AsyncEngine:
    """`on_steps` and `on_failure` are called on the event loop that called `start`.

    When a step raises, every started sequence is released and reported through `on_failure`; the engine goes on. When
    `fault` is set it is of no use any more: only a new process helps.

    `after_step`, where one is set, is called in the engine's thread with what each step did, before the event loop
    hears of it. It may use the engine, and must neither raise nor take long.
    """

    def __init__(self, engine: Engine, on_steps: OnSteps, on_failure: OnFailure) -> None:
        self.engine = engine
        self.progress_unix_s = time.time()
        self.after_step: AfterStep | None = None
        self.fault: Literal["", "engine_dead", "engine_broken"] = ""
        """Dead: the thread ended unasked. Broken: every step raises."""
        self._failed_in_a_row = 0
        self._on_steps = on_steps
        self._on_failure = on_failure
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._open = False
        """Whether the thread will still look into the inbox."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; call it on the event loop that shall receive the results."""
        if self._thread is not None:
            raise RuntimeError("the engine's thread was started already")
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Let the step in progress end, then stop the thread. Calls not yet run fail with EngineStopped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def call(self, fn: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(engine, *args)` in the engine's thread between two steps; returns its result or raises its error.

        A caller that is cancelled does not undo the call: it still runs. Raises EngineStopped.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if self._stopping:
                self._resolve(future, None, EngineStopped("the engine's thread has stopped"))
                return
            try:
                result = fn(self.engine, *args, **kwargs)
            except BaseException as error:  # handed to the caller, which knows what it means
                self._resolve(future, None, error)
            else:
                self._resolve(future, result, None)

        if not self._post(run):
            raise EngineStopped("the engine's thread is not running")
        return await future

    def post(self, fn: Callable[[Engine], None], then: Callable[[], None] | None = None) -> None:
        """Run `fn(engine)` in the engine's thread between two steps, behind all that was asked for before.

        Never blocks, may be called from any thread, gives no answer: an error is logged, and nothing happens once the
        thread has stopped. Afterwards `then` is called on the event loop.
        """

        def run() -> None:
            try:
                fn(self.engine)
            except Exception as error:
                _log.error("posted_call_failed", error=repr(error), exc_info=True)
            if then is not None:
                self._send(then)

        self._post(run)

    def propose(self, seq_id: str, start: int, token_ids: list[int], proposer: str = "") -> None:
        """Hand drafted tokens to the engine. Never blocks, may be called from any thread, gives no answer."""
        self.post(lambda engine: engine.propose(seq_id, start, token_ids, proposer))

    def _post(self, job: Callable[[], None]) -> bool:
        """Queue a job for the thread. False when the thread is not running."""
        with self._wake:
            if not self._open:
                return False
            self._inbox.append(job)
            self._wake.notify()
            return True

    # In the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self.engine.config.threads)
        try:
            while not self._stopping:
                self._turn()
        finally:
            with self._wake:
                if not self._stopping:
                    self.fault = "engine_dead"
                self._stopping, self._open = True, False
            while self._inbox:  # nobody may wait for an answer that never comes
                self._inbox.popleft()()

    def _turn(self) -> None:
        """What was asked for, then a step; waits when there is nothing to do."""
        self.progress_unix_s = time.time()
        while self._inbox:
            self._inbox.popleft()()
        if not self.engine.has_work:
            self._wait(_TICK_S)
        elif not self._step():
            self._wait(_BLOCKED_S)

    def _wait(self, most_s: float) -> None:
        with self._wake:
            if not self._inbox and not self._stopping:
                self._wake.wait(most_s)

    def _step(self) -> bool:
        """Returns whether anything ran."""
        engine = self.engine
        failed = engine.active_ids()  # before the step, which may have paused or ended some of them when it raises
        try:
            steps = engine.step()
        except Exception as error:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _BROKEN_AFTER:
                self.fault = "engine_broken"
            engine.take_failures()  # told with the others
            for seq_id in failed:
                engine.release(seq_id)
            _log.error("step_failed", sequences=len(failed), error=repr(error), exc_info=True)
            self._send(self._on_failure, failed, error)
            return True
        if steps:
            self._failed_in_a_row = 0
            if self.after_step is not None:
                self.after_step(engine, steps)
            self._send(self._on_steps, steps, engine.last_stats)
        failures = engine.take_failures()
        for seq_id, failure in failures:
            engine.release(seq_id)
            _log.error("sequence_failed", seq_id=seq_id, error=repr(failure), exc_info=failure)
            self._send(self._on_failure, [seq_id], failure)
        return bool(steps or failures)

    def _send(self, callback: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _resolve(self, future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._send(settle)
