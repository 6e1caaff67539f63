"""The command line: `python -m loadgen.chaos --seed 7`.

Exit status 1 when a promise was broken or a fault hit nothing, 2 when the run was not possible.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.chaos.report import Report, encode, print_report
from loadgen.chaos.run import CHAOS, REFERENCE, Plan, chaos_run
from loadgen.chaos.schedule import whole_pass
from loadgen.chaos.stack import SCALE, own_stack, running_stack
from loadgen.chaos.workload import WAVE
from loadgen.errors import LoadgenError

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def main(
    seed: Annotated[
        int | None, typer.Option(envvar="HEADRACE_CHAOS_SEED", help="Repeats requests and schedule; else drawn")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="At least this many, in waves of 8, one fault a wave")] = 200,
    minutes: Annotated[float, typer.Option(min=0.0, help="Go on in rounds until this much time has passed")] = 0.0,
    alone: Annotated[int, typer.Option(min=0, help="Requests of the undisturbed run that run alone")] = 20,
    only: Annotated[list[str] | None, typer.Option(help="Make these faults only; may be repeated")] = None,
    home: Annotated[Path | None, typer.Option(help="State and logs of the stack that is started")] = None,
    attach: Annotated[Path | None, typer.Option(help="Use the stack that runs with this HEADRACE_HOME instead")] = None,
    model: Annotated[str, typer.Option(help="A name that HEADRACE_MODEL takes")] = "smollm2-135m-instruct",
    json: Annotated[Path | None, typer.Option(help="Write the whole report to this file")] = None,
) -> None:
    """Kill, stop, cut and restart every process of a stack under load, and compare every answer."""
    # A pipe has no width, and a table that is cut to a guess is of no use.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed}")

    def say(text: str) -> None:
        console.print(text, markup=False)

    async def everything() -> Report:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio.run made one
        # As Ctrl-C does: what was started must not outlive the run.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        async with AsyncExitStack() as held:
            if attach is not None:
                stack = await running_stack(attach)
            else:
                place = home or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
                say(f"starting a stack in {place}: " + ", ".join(f"{count} {stage}" for stage, count in SCALE.items()))
                stack = await held.enter_async_context(own_stack(place, model, SCALE, (REFERENCE, CHAOS)))
            waves = math.ceil(requests / WAVE)
            if not only:
                waves = max(waves, whole_pass(stack.available))
            plan = Plan(seed, waves, alone, minutes, tuple(only or ()))
            chaos = await held.enter_async_context(chaos_run(stack, plan, say))
            try:
                await chaos.run()
            finally:
                print_report(chaos.report, console)
                if json is not None:
                    json.write_bytes(encode(chaos.report))
            return chaos.report

    try:
        report = asyncio.run(everything())
    except LoadgenError as error:
        Console(stderr=True).print(f"chaos: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except asyncio.CancelledError as error:
        raise typer.Exit(143) from error
    if report.problems():
        verdict = "promises were broken"
    elif report.missed:
        verdict = "every promise was kept, but not under every fault"
    else:
        console.print("every promise was kept")
        return
    console.print(f"{verdict}; repeat with --seed {seed}")
    raise typer.Exit(1)
