"""The command line, `python -m loadgen [run|bench|mix|overload|spec]`: reads options, runs phases, writes the report.

The options of `spec` stand beside what it runs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import typer
import uvloop
from rich.console import Console

from loadgen.client import CompletionClient, Target, first_model, open_http
from loadgen.display import print_phases
from loadgen.errors import LoadgenError
from loadgen.lengths import FORMS, parse_lengths
from loadgen.machine import machine_facts
from loadgen.report import RunReport, Slo, encode_report
from loadgen.runner import MAX_REQUESTS
from loadgen.scenarios import BenchPlan, MixPlan, OverloadPlan, Session, bench, mix, overload, poisson, warm_up
from loadgen.scenarios import replay as replay_trace
from loadgen.spec_bench.command import spec_command
from loadgen.traces import TraceScale, read_trace

COMMANDS: Final = ("run", "bench", "mix", "overload", "spec")
DEFAULT_REQUESTS: Final = 32
MAX_IN_FLIGHT: Final = 256
API_KEY_VARIABLES: Final = ("HEADRACE_API_KEY", "OPENAI_API_KEY")

app = typer.Typer(add_completion=False, no_args_is_help=False, help="Load for an OpenAI-compatible HTTP endpoint.")

Url = Annotated[str, typer.Option("--url", envvar="HEADRACE_URL", help="Base URL of the server")]
Model = Annotated[str, typer.Option("--model", help="Model name; the first one that the server lists when empty")]
Seed = Annotated[int | None, typer.Option("--seed", help="Repeats prompts, lengths and arrivals; drawn when not given")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft-ms", help="SLO: time to first token")]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot-ms", help="SLO: time per output token after the first")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the whole report to this file")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one request may take")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, max=1000, help="Requests before the measurement")]
Quiet = Annotated[bool, typer.Option("--no-progress", help="No progress bar")]
ApiOption = Annotated[Literal["chat", "completion"], typer.Option("--api", help="Endpoint to use")]


@app.command("run")
def run_command(
    ctx: typer.Context,
    *,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    api: ApiOption = "chat",
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Closed loop: requests kept in flight")] = 4,
    rate: Annotated[float | None, typer.Option(help="Open loop instead: requests per second")] = None,
    process: Annotated[
        Literal["poisson", "constant"], typer.Option("--arrivals", help="Open loop: how requests arrive")
    ] = "poisson",
    trace: Annotated[
        Path | None, typer.Option(help="Open loop instead: replay an Azure .csv or Mooncake .jsonl")
    ] = None,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Trace: multiplies lengths")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0.0, help="Trace: multiplies time between requests")] = 1.0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Trace: longer prompts are cut")] = 4096,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Trace: longer outputs are cut")] = 1024,
    requests: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Number of requests")] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds in which requests may start")] = None,
    prompt_tokens: Annotated[str, typer.Option(help=f"Prompt lengths: {FORMS}")] = "128",
    output_tokens: Annotated[str, typer.Option(help=f"Output lengths: {FORMS}")] = "64",
    shared_prefix_tokens: Annotated[int, typer.Option(min=0, help="Start of the prompt that all requests share")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for the full output length")] = True,
    max_in_flight: Annotated[
        int, typer.Option(min=1, max=4096, help="Open loop: bound on requests out")
    ] = MAX_IN_FLIGHT,
    seed: Seed = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    timeout: Timeout = 300.0,
    warmup: Warmup = 2,
    json: Json = None,
    no_progress: Quiet = False,
) -> None:
    """One phase: a closed loop by default, an open loop with --rate, a replay with --trace."""
    prompt, output = _or_exit(lambda: (parse_lengths(prompt_tokens), parse_lengths(output_tokens)))
    scale = TraceScale(length_scale, time_scale, max_prompt_tokens, max_output_tokens)
    limit = requests if requests or duration else DEFAULT_REQUESTS
    recorded = _or_exit(lambda: read_trace(trace, limit or MAX_REQUESTS, scale, duration_s=duration)) if trace else None

    async def phases(session: Session) -> None:
        if recorded is not None:
            await replay_trace(session, recorded, {"scale": asdict(scale)})
            return
        planner = session.planner("run", prompt, output, shared_prefix_tokens)
        if rate is not None:
            name = f"{process} {rate:g}/s"
            await poisson(session, name, planner, rate, process=process, limit=limit, duration_s=duration)
        else:
            await session.closed(f"closed {concurrency}", planner, concurrency, limit=limit, duration_s=duration)

    target = Target(url, model, api, temperature, ignore_eos, timeout)
    _execute(
        ctx, target, phases, max_in_flight=max(max_in_flight, concurrency if rate is None and trace is None else 1)
    )


@app.command("bench")
def bench_command(
    ctx: typer.Context,
    *,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    phase_s: Annotated[float, typer.Option(min=1.0, help="Seconds in which a phase starts requests")] = 25.0,
    prompt_tokens: Annotated[str, typer.Option(help=f"Prompt lengths: {FORMS}")] = "128",
    output_tokens: Annotated[str, typer.Option(help=f"Output lengths: {FORMS}")] = "48",
    rate: Annotated[
        float | None, typer.Option(help="Rate of the Poisson phase; 60% of the best closed loop when not given")
    ] = None,
    seed: Seed = None,
    slo_ttft_ms: SloTtft = 2000.0,
    slo_tpot_ms: SloTpot = 200.0,
    timeout: Timeout = 120.0,
    warmup: Warmup = 2,
    json: Json = None,
    no_progress: Quiet = False,
) -> None:
    """Two minutes: closed loops of 1, 4 and 8 requests, then Poisson arrivals."""
    prompt, output = _or_exit(lambda: (parse_lengths(prompt_tokens), parse_lengths(output_tokens)))
    plan = BenchPlan(phase_s=phase_s, prompt=prompt, output=output, rate_per_s=rate)
    _execute(ctx, Target(url, model, timeout_s=timeout), lambda session: bench(session, plan))


@app.command("mix")
def mix_command(
    ctx: typer.Context,
    *,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    short_clients: Annotated[int, typer.Option(min=1, max=256, help="Short chats kept in flight")] = 3,
    alone_s: Annotated[float, typer.Option(min=1.0, help="Seconds of short chats alone, for comparison")] = 25.0,
    long_prompt_tokens: Annotated[str, typer.Option(help=f"Long prompts: {FORMS}")] = "1000",
    long_every_s: Annotated[float, typer.Option(min=0.01, help="Seconds between long prompts")] = 3.0,
    long_requests: Annotated[int, typer.Option(min=1, max=10_000, help="Number of long prompts")] = 8,
    seed: Seed = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    timeout: Timeout = 300.0,
    warmup: Warmup = 2,
    json: Json = None,
    no_progress: Quiet = False,
) -> None:
    """Long prompts beside steady short chats: what do the long ones cost the short ones' inter-token latency?"""
    plan = MixPlan(
        short_clients=short_clients,
        alone_s=alone_s,
        long_prompt=_or_exit(lambda: parse_lengths(long_prompt_tokens)),
        long_every_s=long_every_s,
        long_requests=long_requests,
    )
    session = _execute(ctx, Target(url, model, timeout_s=timeout), lambda session: mix(session, plan))
    alone, beside = session.phases[0].itl_ms, session.phases[1].itl_ms
    if alone.p99 > 0:
        session.console.print(
            f"short chats' ITL p99: {alone.p99:.0f} ms alone, {beside.p99:.0f} ms beside long prompts "
            f"({beside.p99 / alone.p99:.1f} times); longest stall {beside.max:.0f} ms"
        )


@app.command("overload")
def overload_command(
    ctx: typer.Context,
    *,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Closed loop that finds the capacity")] = 16,
    capacity_s: Annotated[float, typer.Option(min=1.0, help="Seconds in which it starts requests")] = 30.0,
    phase_s: Annotated[float, typer.Option(min=1.0, help="Seconds of arrivals at 0.8, 1, 10 times that")] = 60.0,
    prompt_tokens: Annotated[str, typer.Option(help=f"Prompt lengths: {FORMS}")] = "64",
    output_tokens: Annotated[str, typer.Option(help=f"Output lengths: {FORMS}")] = "48",
    max_in_flight: Annotated[int, typer.Option(min=1, max=4096, help="Bound on requests out")] = 1024,
    seed: Seed = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    timeout: Timeout = 300.0,
    warmup: Warmup = 2,
    json: Json = None,
    no_progress: Quiet = False,
) -> None:
    """Ten times what the server can do: do accepted requests keep their latency, and are the others told at once?"""
    plan = OverloadPlan(
        concurrency=concurrency,
        capacity_s=capacity_s,
        phase_s=phase_s,
        prompt=_or_exit(lambda: parse_lengths(prompt_tokens)),
        output=_or_exit(lambda: parse_lengths(output_tokens)),
    )
    session = _execute(
        ctx, Target(url, model, timeout_s=timeout), lambda session: overload(session, plan), max_in_flight
    )
    if len(session.phases) == 4:
        _, calm, full, flood = session.phases
        session.console.print(
            f"accepted at {plan.flood:g} times the capacity: {flood.succeeded} of {flood.sent}, end to end p50 "
            f"{flood.e2e_ms.p50:.0f} ms ({full.e2e_ms.p50:.0f} ms at capacity, {calm.e2e_ms.p50:.0f} ms at "
            f"{plan.calm:g} of it), first token p50 {flood.ttft_ms.p50:.0f} ms ({full.ttft_ms.p50:.0f} and "
            f"{calm.ttft_ms.p50:.0f} ms); told to come later: {flood.refused}, after p50 "
            f"{flood.refusal_ms.p50:.0f} ms, p99 {flood.refusal_ms.p99:.0f} ms, at most {flood.refusal_ms.max:.0f} ms"
        )


app.command("spec")(spec_command)


def main() -> None:
    """`python -m loadgen --rate 2` means `python -m loadgen run --rate 2`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in (*COMMANDS, "--help"):
        arguments = ["run", *arguments]
    app(args=arguments, prog_name="loadgen")


T = TypeVar("T")


def _or_exit(act: Callable[[], T]) -> T:
    """Turn a fault of the user's or the server's into one line and exit status 2."""
    try:
        return act()
    except LoadgenError as error:
        Console(stderr=True).print(f"loadgen: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _execute(
    ctx: typer.Context,
    target: Target,
    phases: Callable[[Session], Awaitable[None]],
    max_in_flight: int = MAX_IN_FLIGHT,
) -> Session:
    """Run the phases, print the table, write the JSON. Exit status 1 when not one request succeeded."""
    options: dict[str, Any] = ctx.params
    seed = secrets.randbelow(2**31) if options["seed"] is None else int(options["seed"])
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    console = Console()

    async def everything() -> Session:
        key = next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), "")
        async with open_http(target.url, key, max_in_flight, target.connect_timeout_s) as http:
            model = target.model or await first_model(http)
            client = CompletionClient(http, replace(target, model=model))
            cost = await client.measure_token_cost()
            session = Session(client, cost, seed, _slo(options), console, not options["no_progress"], max_in_flight)
            await warm_up(session, options["warmup"])
            await phases(session)
            return session

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        session = _or_exit(lambda: runner.run(everything()))
    report = RunReport(_configuration(ctx, session), machine_facts(), started_at, session.phases)
    console.print(f"{session.client.target.model}, seed {seed}, {report.machine['cores']} cores")
    print_phases(console, session.phases)
    if options["json"]:
        options["json"].write_bytes(encode_report(report))
    if not any(phase.succeeded for phase in session.phases):
        raise typer.Exit(1)
    return session


def _slo(options: dict[str, Any]) -> Slo | None:
    ttft_ms, tpot_ms = options["slo_ttft_ms"], options["slo_tpot_ms"]
    if ttft_ms is None and tpot_ms is None:
        return None
    return Slo(ttft_ms, tpot_ms)


def _configuration(ctx: typer.Context, session: Session) -> dict[str, Any]:
    """Every option as used. Paths are reduced to names, and the URL loses any password."""
    options = {key: value.name if isinstance(value, Path) else value for key, value in ctx.params.items()}
    parts = urlsplit(options["url"])
    options["url"] = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    cost = {"fixed": round(session.cost.fixed, 2), "per_word": round(session.cost.per_word, 4)}
    return {
        "command": ctx.command.name,
        **options,
        "seed": session.seed,
        "model": session.client.target.model,
        "prompt_token_cost": cost,
    }
