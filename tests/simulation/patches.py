"""Makes the production modules see the world: its clock, its randomness, its NATS, its engines."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn
from unittest.mock import patch

import nats
import structlog

import shared.worker.engine_host
from shared.worker.step_feed import EngineFailed
from tests.simulation import client
from tests.simulation.engine import SimAsyncEngine
from tests.simulation.network import Server
from tests.simulation.world import MONOTONIC_EPOCH_S, UNIX_EPOCH_S, World, describe

EXPECTED_ERRORS = frozenset({"engine_hangs", "dead_letter_lost", "drain_took_too_long"})
"""What a service may log as an error under the faults that are made here; `request_failed_here` for a failed step."""


class Exited(BaseException):
    """`os._exit` was called: the process is gone, and nothing catches this."""


@contextlib.contextmanager
def production_code_in(
    world: World, server: Server, on_lost: Callable[[str, int], None] = lambda _request_id, _epoch: None
) -> Iterator[None]:
    """Inside, and only inside, the services' code may run. `on_lost` is told of each request that a worker gives up."""

    def unix_s() -> float:
        skew = world.current.skew_s if world.current is not None else 0.0
        return UNIX_EPOCH_S + world.now + skew

    def monotonic_s() -> float:
        return MONOTONIC_EPOCH_S + world.now

    def token_hex(n_bytes: int = 8) -> str:
        return world.random.randbytes(n_bytes).hex()

    def exit_now(status: int) -> None:
        assert world.current is not None
        world.current.kill(f"exits with {status}")
        raise Exited

    async def connect(url: str, **options: Any) -> client.SimClient:
        assert world.current is not None
        return await client.connect(world.current, server, options)

    def keep(_: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        name = world.current.name if world.current is not None else "?"
        line = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("exc_info", "event"))
        if world.keeps_trace:
            world.comment(f"{name} | {event['event']} {line}")
        if event["event"] == "request_lost":
            on_lost(event["request_id"], event["epoch"])
        error = sys.exc_info()[1]
        expected = event["event"] in EXPECTED_ERRORS or isinstance(error, EngineFailed)
        if method in ("error", "exception", "critical") and not expected:
            world.fail(f"{name} logged {event['event']} {line} {describe(error) if error else ''}")
        raise structlog.DropEvent

    before = structlog.get_config()
    random_state = random.getstate()
    random.seed(world.random.random())
    level = logging.DEBUG if world.keeps_trace else logging.WARNING
    structlog.configure(
        processors=[keep],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    try:
        with (
            patch.object(time, "time", unix_s),
            patch.object(time, "monotonic", monotonic_s),
            patch.object(secrets, "token_hex", token_hex),
            patch.object(os, "_exit", exit_now),
            patch.object(nats, "connect", connect),
            patch.object(shared.worker.engine_host, "AsyncEngine", SimAsyncEngine),
        ):
            yield
    finally:
        structlog.configure(**before)
        random.setstate(random_state)
