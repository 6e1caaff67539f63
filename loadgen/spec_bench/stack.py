"""The stack whose speculation is measured: one of the run's own, or one that runs already."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loadgen.chaos.errors import StackUnusable
from loadgen.chaos.servers import free_port
from loadgen.chaos.stack import Stack

SCALE: Final = {"gateway": 1, "prefill": 1, "decode": 1, "draft": 1, "kvstore": 1}
_OPEN_TENANT: Final = "default"
"""Whose requests without a key are."""
_PATIENCE_S: Final = 600
"""All of a batch's prompts may wait for the one prefill worker."""


@dataclass(frozen=True)
class Side:
    """Who sends the requests of one side. The key is empty where none is asked for."""

    tenant: str
    key: str


@dataclass(frozen=True)
class Target:
    """Where requests go and where their logs are. `metrics_urls`: decode workers and drafters."""

    url: str
    model: str
    nats_url: str
    metrics_urls: tuple[str, ...]
    without: Side
    speculating: Side

    @property
    def apart(self) -> bool:
        """Tenants share nothing: neither side finds the other's answers or KV blocks."""
        return self.without.tenant != self.speculating.tenant


@asynccontextmanager
async def own_target(home: Path, model: str, draft: str, threads: int) -> AsyncIterator[Target]:
    """Start a stack in `home`, one of each service, and take it down again. Raises StackUnusable.

    `HEADRACE_` variables that say how services work are kept, those that say where they are found are not. An empty
    `draft` leaves the draft model to them.
    """
    home.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - before anything runs
    sides = [Side(tenant, f"spec-bench-key-of-{tenant}") for tenant in ("without", "speculating")]
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
        "HEADRACE_HOME": str(home),
        "HEADRACE_MODEL": model,
        **({"HEADRACE_DRAFT_MODEL": draft} if draft else {}),
        "HEADRACE_THREADS": str(threads),
        "HEADRACE_NATS_URL": "",
        "HEADRACE_REDIS_URL": "",
        "HEADRACE_METRICS_PORT": "0",
        **{f"HEADRACE_{name}": str(free_port()) for name in ("PORT", "NATS_PORT", "REDIS_PORT")},
        "HEADRACE_API_KEYS": msgspec.json.encode({side.key: side.tenant for side in sides}).decode(),
        "HEADRACE_MAX_QUEUE_WAIT_S": str(_PATIENCE_S),
        "HEADRACE_STANDING_QUEUE_WAIT_S": str(_PATIENCE_S),
        "HEADRACE_QUEUE_TIMEOUT_S": str(_PATIENCE_S),
    }
    stack = Stack(home, environment, [], "", model, dict(SCALE))
    await stack.up()
    try:
        yield await _look_at(stack, *sides)
    finally:
        await stack.down()


async def running_target(home: Path) -> Target:
    """The stack that `headrace up` started with this state directory, open to all. Raises StackUnusable."""
    stack = Stack(home, {**os.environ, "HEADRACE_HOME": str(home)}, [], "", "", {})
    everybody = Side(_OPEN_TENANT, "")
    return await _look_at(stack, everybody, everybody)


async def _look_at(stack: Stack, without: Side, speculating: Side) -> Target:
    told: dict[str, Any] = msgspec.json.decode(await stack.headrace("status", "--json"))
    stages = told["stages"]
    urls = [entry["url"] for entry in stages["gateway"]["instances"] if entry.get("url")]
    if not urls or told["problem"]:
        raise StackUnusable(f"the stack in {stack.home} has no gateway that answers: {told['problem']}")
    workers = [*stages["decode"]["instances"], *stages["draft"]["instances"]]
    metrics_urls = tuple(entry["metrics_url"] for entry in workers if entry.get("metrics_url"))
    return Target(urls[0], told["model"], told["nats_url"], metrics_urls, without, speculating)
