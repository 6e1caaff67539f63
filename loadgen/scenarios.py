"""What is run: one free phase, the `bench` preset, the `mix` preset of long prompts beside steady short chats, and the
`overload` preset of many times what the server can do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from loadgen.arrivals import Process, arrivals
from loadgen.client import CompletionClient
from loadgen.display import PhaseProgress
from loadgen.lengths import Lengths
from loadgen.outcome import Outcome
from loadgen.plan import Planner, SyntheticPlanner, TokenCost, TracePlanner
from loadgen.report import PhaseReport, Slo, summarize
from loadgen.runner import run_closed, run_open
from loadgen.traces import Trace

TOKENS_8, TOKENS_48, TOKENS_64, TOKENS_128, TOKENS_1000 = (
    Lengths(str(count), count, count) for count in (8, 48, 64, 128, 1000)
)

OPEN_LOOP_SHARE: Final = 0.6
"""The bench preset's open loop runs at this part of the best requests/s that its closed loops reached."""


@dataclass
class Session:
    """A target that was probed, and what all phases of a run share. Reports gather in `phases`."""

    client: CompletionClient
    cost: TokenCost
    seed: int
    slo: Slo | None
    console: Console
    show_progress: bool
    max_in_flight: int
    phases: list[PhaseReport] = field(default_factory=list)

    def planner(self, label: str, prompt: Lengths, output: Lengths, shared_prefix_tokens: int = 0) -> SyntheticPlanner:
        """Each label has prompts of its own, so that no phase finds its prefixes cached by the one before."""
        return SyntheticPlanner(self.seed, prompt, output, self.cost, shared_prefix_tokens, label)

    async def closed(
        self,
        name: str,
        planner: Planner,
        concurrency: int,
        *,
        limit: int | None = None,
        duration_s: float | None = None,
    ) -> PhaseReport:
        with self.progress(name, limit, duration_s) as progress:
            outcomes = await run_closed(
                self.client, planner, progress, concurrency=concurrency, limit=limit, duration_s=duration_s
            )
        load = {"loop": "closed", "concurrency": concurrency, "requests": limit, "duration_s": duration_s}
        return self.add(name, load, outcomes)

    async def open(
        self,
        name: str,
        planner: Planner,
        load: dict[str, Any],
        offsets_s: Iterable[float],
        *,
        limit: int | None = None,
        duration_s: float | None = None,
    ) -> PhaseReport:
        with self.progress(name, limit, duration_s) as progress:
            outcomes = await run_open(self.client, planner, progress, offsets_s, max_in_flight=self.max_in_flight)
        return self.add(name, {"loop": "open", "max_in_flight": self.max_in_flight, **load}, outcomes)

    def add(self, name: str, load: dict[str, Any], outcomes: Sequence[Outcome]) -> PhaseReport:
        report = summarize(name, load, outcomes, self.slo)
        self.phases.append(report)
        return report

    def progress(self, name: str, limit: int | None, duration_s: float | None) -> PhaseProgress:
        return PhaseProgress(self.console, name, limit=limit, duration_s=duration_s, shown=self.show_progress)


async def warm_up(session: Session, requests: int) -> None:
    """Requests that no report counts."""
    if requests:
        planner = session.planner("warm-up", TOKENS_64, TOKENS_8)
        await session.closed("warm-up", planner, min(requests, 4), limit=requests)
        session.phases.pop()


async def replay(session: Session, trace: Trace, load: dict[str, Any]) -> None:
    planner = TracePlanner(session.seed, trace.requests, session.cost)
    offsets_s = [request.offset_s for request in trace.requests]
    load = {"trace": trace.name, "requests": len(offsets_s), "clipped_requests": trace.clipped, **load}
    await session.open(f"trace {trace.name}", planner, load, offsets_s, limit=len(offsets_s))


async def poisson(
    session: Session,
    name: str,
    planner: Planner,
    rate_per_s: float,
    *,
    process: Process = "poisson",
    limit: int | None = None,
    duration_s: float | None = None,
) -> None:
    offsets_s = arrivals(process, rate_per_s, session.seed, duration_s=duration_s, limit=limit)
    load = {"arrivals": process, "rate_per_s": rate_per_s, "requests": limit, "duration_s": duration_s}
    await session.open(name, planner, load, offsets_s, limit=limit, duration_s=duration_s)


@dataclass(frozen=True)
class BenchPlan:
    """Closed loops of rising concurrency, then a Poisson stretch. No phase starts a request after `phase_s` seconds."""

    concurrencies: tuple[int, ...] = (1, 4, 8)
    phase_s: float = 25.0
    prompt: Lengths = TOKENS_128
    output: Lengths = TOKENS_48
    rate_per_s: float | None = None


async def bench(session: Session, plan: BenchPlan) -> None:
    for concurrency in plan.concurrencies:
        name = f"closed {concurrency}"
        planner = session.planner(name, plan.prompt, plan.output)
        await session.closed(name, planner, concurrency, duration_s=plan.phase_s)
    best_per_s = max((phase.requests_per_s for phase in session.phases), default=0.0)
    rate_per_s = plan.rate_per_s or round(best_per_s * OPEN_LOOP_SHARE, 3)
    if rate_per_s > 0:  # otherwise nothing succeeded, and there is no rate to choose
        name = f"poisson {rate_per_s:.2g}/s"
        await poisson(
            session, name, session.planner(name, plan.prompt, plan.output), rate_per_s, duration_s=plan.phase_s
        )


@dataclass(frozen=True)
class MixPlan:
    """Steady short chats, first alone for `alone_s`, then while a long prompt arrives every `long_every_s`."""

    short_clients: int = 3
    short_prompt: Lengths = TOKENS_64
    short_output: Lengths = TOKENS_64
    alone_s: float = 25.0
    long_prompt: Lengths = TOKENS_1000
    long_output: Lengths = TOKENS_8
    long_every_s: float = 3.0
    long_requests: int = 8


async def mix(session: Session, plan: MixPlan) -> None:
    alone = session.planner("short alone", plan.short_prompt, plan.short_output)
    await session.closed("short alone", alone, plan.short_clients, duration_s=plan.alone_s)
    beside = session.planner("short beside long", plan.short_prompt, plan.short_output)
    long = session.planner("long", plan.long_prompt, plan.long_output)
    offsets_s = arrivals("constant", 1 / plan.long_every_s, session.seed, duration_s=None, limit=plan.long_requests)
    finished = asyncio.Event()

    async def send_long() -> list[Outcome]:
        try:
            return await run_open(session.client, long, progress, offsets_s, max_in_flight=session.max_in_flight)
        finally:
            finished.set()

    expected_s = plan.long_every_s * plan.long_requests
    with session.progress("short beside long", None, expected_s) as progress:
        async with asyncio.TaskGroup() as group:
            long_task = group.create_task(send_long())
            short_task = group.create_task(
                run_closed(session.client, beside, progress, concurrency=plan.short_clients, stop=finished.is_set)
            )
    load = {"loop": "closed", "concurrency": plan.short_clients, "until": "the long prompts have ended"}
    session.add("short beside long", load, short_task.result())
    load = {"loop": "open", "arrivals": "constant", "every_s": plan.long_every_s, "requests": plan.long_requests}
    session.add("long prompts", load, long_task.result())


@dataclass(frozen=True)
class OverloadPlan:
    """What the server can do, found by a closed loop; then arrivals at a part of it, at it, and at many times it."""

    concurrency: int = 16
    capacity_s: float = 30.0
    phase_s: float = 60.0
    calm: float = 0.8
    flood: float = 10.0
    prompt: Lengths = TOKENS_64
    output: Lengths = TOKENS_48


async def overload(session: Session, plan: OverloadPlan) -> None:
    name = f"closed {plan.concurrency}"
    planner = session.planner(name, plan.prompt, plan.output)
    found = await session.closed(name, planner, plan.concurrency, duration_s=plan.capacity_s)
    if found.requests_per_s <= 0:  # nothing succeeded, and there is nothing to be a multiple of
        return
    for times in (plan.calm, 1.0, plan.flood):
        name = f"{times:g} x capacity"
        planner = session.planner(name, plan.prompt, plan.output)
        await poisson(session, name, planner, round(found.requests_per_s * times, 3), duration_s=plan.phase_s)
