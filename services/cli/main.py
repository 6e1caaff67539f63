"""The commands of `headrace`. Each wires the parts of this package together; errors end as one line and exit code 1."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Annotated, Any

import pydantic
import structlog
import typer
from rich.console import Console

from services.cli import models
from services.cli.chat import Chat, converse
from services.cli.errors import CliError, StackNotRunning
from services.cli.home import Home
from services.cli.log_files import follow, readable, tail
from services.cli.readiness import await_instances
from services.cli.settings import CliSettings
from services.cli.spec import StackSpec, parse_scale, select
from services.cli.stack import Stack
from services.cli.status_report import as_json, gather, print_table
from services.cli.up import up as bring_up
from shared.bus import BusError
from shared.models import ModelError

app = typer.Typer(
    help="Serves language models as a pipeline of small services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")

# A pipe has no width: a table that is cut to a guess would lose what readers look for.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
problems = Console(stderr=True, highlight=False, soft_wrap=True)

Target = Annotated[str, typer.Argument(help="A stage, one instance (decode#1), or nats, valkey", metavar="STAGE[#N]")]


def main() -> None:
    """Entry point of the console script."""
    # Libraries' log lines have no place between what a command prints; their errors arrive as exceptions.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        app()
    except (CliError, ModelError, BusError) as error:
        _fail(" ".join(str(error).split()))
    except pydantic.ValidationError as error:
        _fail("; ".join(f"HEADRACE_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors(include_url=False)))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready")] = False,
    scale: Annotated[list[str] | None, typer.Option(help="STAGE=N, may be repeated", metavar="STAGE=N")] = None,
) -> None:
    """Start everything on this machine and show the way in."""
    bring_up(CliSettings(), dict(parse_scale(text) for text in scale or ()), detach=detach, console=console)


@app.command()
def down() -> None:
    """Stop everything that `up` started here."""
    home = Home.open(CliSettings().home)
    with home.changing():
        Stack.of(home, home.require_spec()).stop(_say)
    _say("stopped")


@app.command()
def status(as_json_: Annotated[bool, typer.Option("--json", help="For programs")] = False) -> None:
    """Show every instance: state, load, blocks, transport, last error."""
    settings = CliSettings()
    home = Home.open(settings.home)
    try:
        stack = Stack.attach(home)
    except StackNotRunning:
        if not settings.nats_url:  # a stack that is not ours may be looked at over its NATS server
            raise
        report = asyncio.run(gather(settings.nats_url, None, {}, 0, home.logs))
    else:
        processes = stack.supervisor.processes()
        report = asyncio.run(gather(stack.spec.nats_url, stack.spec, processes, stack.supervisor.pid(), home.logs))
    if as_json_:
        console.out(as_json(report), highlight=False)
    else:
        print_table(report, console)


@app.command()
def scale(
    change: Annotated[str, typer.Argument(metavar="STAGE=N", help="For example decode=2")],
    wait: Annotated[bool, typer.Option(help="Until new instances are ready")] = True,
) -> None:
    """Change the number of instances of a stage; all others run on."""
    settings = CliSettings()
    home = Home.open(settings.home)
    stage, count = parse_scale(change)
    with home.changing():
        stack = Stack.attach(home)
        before = stack.spec.counts[stage]
        stack = stack.scale(stage, count)
    if wait and count > before:
        asyncio.run(await_instances(stack, stack.spec.instances(stage), settings.start_timeout_s))
    _say(f"{stage}: {before} -> {count}")
    if stage == "gateway":
        _say(" ".join(stack.spec.gateway_url(number) for number in range(count)))


@app.command()
def restart(target: Target) -> None:
    """Restart instances one after the other, each drained first and ready before the next."""
    settings = CliSettings()
    home = Home.open(settings.home)
    with home.changing():
        stack = Stack.attach(home)
        names = select(stack.spec, target)
        for name in names:
            _say(f"restarting {name}")
            stack.restart(name)
            asyncio.run(await_instances(stack, [name], settings.start_timeout_s))
    _say(f"restarted {', '.join(names)}")


@app.command()
def kill(target: Target) -> None:
    """Kill instances as a crash would (SIGKILL); the supervisor starts them again."""
    names = Stack.attach(Home.open(CliSettings().home)).kill_instances(target)
    _say(f"killed {', '.join(names)}" if names else f"nothing of {target} is running at the moment")


@app.command()
def logs(
    target: Annotated[str | None, typer.Argument(metavar="[STAGE[#N]]", help="All when left out")] = None,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of each instance")] = 40,
    raw: Annotated[bool, typer.Option(help="As written: JSON lines")] = False,
) -> None:
    """Show what instances logged."""
    home = Home.open(CliSettings().home)
    spec = home.require_spec()
    names = spec.programs() if target is None else select(spec, target)

    def emit(name: str, line: str) -> None:
        console.out(
            f"{name} | {line if raw else readable(line)}" if len(names) > 1 else readable(line), highlight=False
        )

    for name in names:
        for line in tail(home.log_of(name), lines):
            emit(name, line)
    if follow_:
        follow({name: home.log_of(name) for name in names}, emit)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Of a gateway; the local stack's first when left out")] = "",
    model: Annotated[str, typer.Option(help="The gateway's first when left out")] = "",
    system: Annotated[str, typer.Option(help="System prompt")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Talk to the model in the terminal, or pipe one question per line."""
    settings = CliSettings()
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    conversation = Chat(
        url or _local_url(settings),
        model,
        system=system,
        options={key: value for key, value in options.items() if value is not None},
        api_key=settings.api_key.get_secret_value(),
    )
    try:
        converse(conversation, console)
    finally:
        conversation.close()


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str | None, typer.Argument(help="Built-in, hub name or .gguf file; HEADRACE_MODEL if none")] = None,
) -> None:
    """Download and convert a model, so that the stack starts without waiting."""
    models.fetch(name or CliSettings().model, console)


@model_app.command("list")
def model_list() -> None:
    """Show built-in and converted models."""
    models.show(console)


def _local_url(settings: CliSettings) -> str:
    spec: StackSpec | None = Home.open(settings.home).load_spec()
    return spec.gateway_url() if spec is not None else f"http://127.0.0.1:{settings.port}"


def _say(text: str) -> None:
    console.print(text, markup=False)


def _fail(text: str) -> None:
    problems.print(f"headrace: {text}", markup=False)
    sys.exit(1)
