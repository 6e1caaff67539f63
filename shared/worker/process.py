"""Life cycle of a service process: telemetry up, event loop, signals, one-line errors, telemetry down."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType

import structlog
import uvloop

from shared.protocol.subjects import Stage
from shared.settings import CommonSettings
from shared.telemetry import configure_logging, setup_tracing, shutdown_tracing

MAX_TASKS_LOGGED, MAX_FRAMES_LOGGED = 64, 12
CLOSE_S = 15.0
"""Longest time that closing everything may take behind the drain; then the process ends as it is."""

log = structlog.get_logger(__name__)


class StartupError(Exception):
    """The service cannot start, and the message is the one line that tells its operator what to do."""


def run_service(
    stage: Stage,
    settings: CommonSettings,
    main: Callable[[asyncio.Event], Awaitable[None]],
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Run `main(stop)` on uvloop until it returns; `stop` is set by SIGTERM or SIGINT. Returns the exit status.

    After the signal it takes the settings' `drain_s` and CLOSE_S at most, even if a thread hangs.
    `expected` errors and StartupError end in one line on stderr and status 1; others keep their traceback.
    """
    configure_logging(stage, settings.instance, settings.log_level, settings.log_format)
    setup_tracing(stage, settings.instance)
    stop_within_s = getattr(settings, "drain_s", 0.0) + CLOSE_S
    try:
        uvloop.run(_with_signals(main, stop_within_s))
    except Exception as error:
        leaves = _leaves(error)
        if not all(isinstance(leaf, (StartupError, *expected)) for leaf in leaves):
            raise
        for leaf in leaves:
            sys.stderr.write(f"headrace {stage}: {leaf}\n")
        return 1
    finally:
        shutdown_tracing()
    return 0


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]], stop_within_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    give_up = threading.Timer(stop_within_s, _exit_now)
    give_up.daemon = True

    def on_signal() -> None:
        if not stop.is_set():
            give_up.start()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, _log_tasks)
    await main(stop)
    log.info("service_stopped")


def _exit_now() -> None:
    log.error("stop_took_too_long")
    os._exit(1)


def _log_tasks() -> None:
    """SIGUSR1: where every task waits, for a service that seems to hang. Code positions only, never data."""
    for task in list(asyncio.all_tasks())[:MAX_TASKS_LOGGED]:
        frames = [f"{f.f_code.co_filename.rpartition('/')[2]}:{f.f_lineno} {f.f_code.co_name}" for f in _frames(task)]
        log.info("task", task=task.get_name(), waits_at=frames[-MAX_FRAMES_LOGGED:])


def _frames(task: asyncio.Task[object]) -> list[FrameType]:
    """The chain of awaits from the task's coroutine to what it waits for; `Task.get_stack` gives the outermost only."""
    frames: list[FrameType] = []
    awaited: object = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append(frame)
        awaited = getattr(awaited, "cr_await", None)
    return frames


def _leaves(error: Exception) -> list[Exception]:
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
