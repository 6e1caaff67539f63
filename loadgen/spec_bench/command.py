"""`python -m loadgen spec`: which cells are measured, on which stack, and where the figures go.

Exit status 1 when ids differed, 2 when the comparison was not possible.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.machine import machine_facts
from loadgen.spec_bench.report import Report, cell_line, encode, show_cells, show_peers
from loadgen.spec_bench.run import Plan, comparison
from loadgen.spec_bench.stack import SCALE, own_target, running_target
from loadgen.spec_bench.workloads import MOST_CHATS, WORKLOADS, Size, WorkloadName

CONCURRENCIES: Final = (1, 4, 8)
PAIRS: Final = 9
QUICK_PAIRS: Final = 2
QUICK_SIZE: Final = Size(chat_tokens=24, edit_tokens=32, agent_tokens=24, turns=2, sentences=3)
MAX_CONCURRENCY: Final = 64
_WIDTH: Final = 210
"""Columns of the table where the output is no terminal."""


@dataclass(frozen=True)
class _Place:
    """The stack: one that runs with the state directory `attach`, or one of the run's own in `home`."""

    attach: Path | None
    home: Path | None
    model: str
    draft: str
    threads: int


def spec_command(
    workloads: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(WORKLOADS)}")] = "",
    concurrency: Annotated[str, typer.Option(help="Requests in flight, separated by commas")] = "",
    pairs: Annotated[
        int | None, typer.Option(min=1, help=f"Of each cell; {PAIRS}, or {QUICK_PAIRS} with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Short answers, few pairs: does it run?")] = False,
    peers: Annotated[bool, typer.Option(help="Transformers' assisted generation too, when the stack is down")] = False,
    peer_prompts: Annotated[int | None, typer.Option(min=1, max=MOST_CHATS, help="Of each workload")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats prompts and sampling; drawn when not given")] = None,
    model: Annotated[str, typer.Option(help="A name that HEADRACE_MODEL takes")] = "smollm2-135m-instruct",
    draft: Annotated[str, typer.Option(help="Draft model of stack and peers; the model's own when empty")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each service, and of the peers")] = 1,
    home: Annotated[Path | None, typer.Option(help="State and logs of the stack that is started")] = None,
    attach: Annotated[Path | None, typer.Option(help="Use the stack that runs with this HEADRACE_HOME instead")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file")] = None,
) -> None:
    """Tokens per second with speculation and without, in interleaved pairs; ids must be equal."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)
    size = QUICK_SIZE if quick else Size()
    plan = Plan(
        pairs=pairs or (QUICK_PAIRS if quick else PAIRS),
        workloads=chosen_workloads(workloads),
        concurrencies=chosen_concurrencies(concurrency),
        size=size,
        seed=secrets.randbelow(2**31) if seed is None else seed,
    )
    if plan.scripts > MOST_CHATS and not {"chat", "chat-sampled"}.isdisjoint(plan.workloads):
        raise typer.BadParameter(f"asks {plan.scripts} chats and has {MOST_CHATS}: fewer pairs, or fewer in flight")
    report = Report({**_facts(quick, plan), "model": model, "draft": draft or "default", "threads": threads})
    machine = f"{report.facts['cpu']} ({report.facts['cores']} cores)"
    console.print(f"{model} on {machine}, {threads} thread(s) a service, seed {plan.seed}", markup=False)

    def written(newer: Report) -> Report:
        """After each part, so that a run that is cut short leaves what it has."""
        if json is not None:
            json.write_bytes(encode(newer))
        return newer

    try:
        report = asyncio.run(_measure(_Place(attach, home, model, draft, threads), plan, report, console, written))
        show_cells(console, report.cells)
        if peers:
            prompts = peer_prompts or (1 if quick else 3)
            report = written(_measure_peers(model, draft, threads, plan, prompts, report, console))
            show_peers(console, report.peers, threads)
    except LoadgenError as error:
        Console(stderr=True).print(f"spec: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except asyncio.CancelledError as error:
        raise typer.Exit(143) from error
    for line in report.differing:
        console.print(line, style="red", markup=False)
    if report.differing:
        console.print(f"speculation changed the output; repeat with --seed {plan.seed}", style="red")
        raise typer.Exit(1)


async def _measure(
    place: _Place, plan: Plan, report: Report, console: Console, written: Callable[[Report], Report]
) -> Report:
    """Every cell; the stack is down again when this returns."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - asyncio.run made one
    # As Ctrl-C does: what was started must not outlive the run.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncExitStack() as held:
        if place.attach is not None:
            target = await running_target(place.attach)
        else:
            home = place.home or Path(tempfile.mkdtemp(prefix="headrace-spec-"))
            parts = ", ".join(f"{count} {stage}" for stage, count in SCALE.items())
            console.print(f"starting a stack in {home}: {parts}", markup=False)
            target = await held.enter_async_context(own_target(home, place.model, place.draft, place.threads))
        compared = await held.enter_async_context(comparison(target, plan))
        for workload in plan.workloads:
            for concurrency in plan.concurrencies:
                what = f"{workload}, {concurrency} in flight"
                with console.status(what) as status:

                    def progress(done: int, what: str = what) -> None:
                        status.update(f"{what}: {done} of {plan.pairs} pairs")

                    cell = await compared.cell(workload, concurrency, progress)
                report = written(msgspec.structs.replace(report, cells=[*report.cells, cell]))
                console.print(cell_line(cell), markup=False)
    if place.attach is None and place.home is None:
        shutil.rmtree(home, ignore_errors=True)
    return report


def _measure_peers(
    model: str, draft: str, threads: int, plan: Plan, prompts: int, report: Report, console: Console
) -> Report:
    from loadgen.spec_bench.peers import Peers  # noqa: PLC0415 - torch, only where it is asked for

    with console.status("loading Transformers"):
        found = Peers(model, draft, threads)
    for workload in plan.workloads:
        with console.status(f"Transformers, {workload}") as status:

            def progress(done: int, workload: str = workload) -> None:
                status.update(f"Transformers, {workload}: {done} of {prompts} prompts")

            cells = found.measure(workload, plan.size, plan.seed, prompts, progress)
        report = msgspec.structs.replace(report, peers=[*report.peers, *cells])
    return report


def _facts(quick: bool, plan: Plan) -> dict[str, str | int | float]:
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine_facts(),
        "load_before": round(os.getloadavg()[0], 2),
        "extent": "quick" if quick else "full",
        "seed": plan.seed,
        "pairs": plan.pairs,
        "warm_ups": plan.warm_ups,
        **msgspec.structs.asdict(plan.size),
    }


def chosen_workloads(text: str) -> list[WorkloadName]:
    """The names in `text`, separated by commas, in the order of the table; all when empty. Raises BadParameter."""
    wanted = [name.strip() for name in text.split(",") if name.strip()] or list(WORKLOADS)
    if unknown := [name for name in wanted if name not in WORKLOADS]:
        raise typer.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    return [name for name in WORKLOADS if name in wanted]


def chosen_concurrencies(text: str) -> list[int]:
    """The numbers in `text`, ascending; the usual ones when empty. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isdecimal() or not 1 <= int(part) <= MAX_CONCURRENCY for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers from 1 to {MAX_CONCURRENCY}")
    return sorted({int(part) for part in parts}) or list(CONCURRENCIES)
