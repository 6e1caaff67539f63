"""The commands of `headrace`. Each wires the parts of this package together; errors end as one line and exit code 1."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import structlog
import typer
from rich.console import Console

from services.cli import dead_view, distillation, models
from services.cli.chat import Chat, converse
from services.cli.dead_letters import DeadLetter, Retried, newest, read, retry
from services.cli.draining import bereaved, faults
from services.cli.draining import drain as drain_instances
from services.cli.errors import CliError, DrainFailed, StackNotRunning, UnknownTarget
from services.cli.home import Home
from services.cli.log_files import follow, readable, tail
from services.cli.readiness import await_instances
from services.cli.roll_call import NATS_WAIT_S, rows_of
from services.cli.rolling import RollingRestart
from services.cli.settings import CliSettings
from services.cli.spec import SERVERS, StackSpec, parse_scale, select
from services.cli.stack import Stack
from services.cli.status_report import as_json, gather, print_table
from services.cli.up import up as bring_up
from shared.bus import Bus, BusError
from shared.models import ModelError

app = typer.Typer(
    help="Serves language models as a pipeline of small services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
dead_app = typer.Typer(help="Work that was given up.", no_args_is_help=True)
app.add_typer(dead_app, name="dead")

# A pipe has no width: a table that is cut to a guess would lose what readers look for.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
problems = Console(stderr=True, highlight=False, soft_wrap=True)

Target = Annotated[str, typer.Argument(help="A stage, one instance (decode#1), or nats, valkey", metavar="STAGE[#N]")]

DeadSeq = Annotated[int, typer.Argument(help="The number that `headrace dead list` shows", metavar="SEQ", min=1)]
Answer = TypeVar("Answer")


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
        rolling = RollingRestart(stack, _say, settings.start_timeout_s)
        rolling.retire_spare(stage, count)
        stack = rolling.stack.scale(stage, count)
        if wait:
            asyncio.run(await_instances(stack, stack.spec.instances(stage), settings.start_timeout_s))
    _say(f"{stage}: {before} -> {count}")
    if stage == "gateway":
        _say(" ".join(stack.spec.gateway_url(number) for number in range(count)))


@app.command()
def drain(target: Target) -> None:
    """Stop instances in good order: their work continues elsewhere at once. They stay down until restart or scale."""
    home = Home.open(CliSettings().home)
    with home.changing():
        stack = Stack.attach(home)
        names = select(stack.spec, target)
        if names[0] in SERVERS:
            raise UnknownTarget(f"{target} has no work to hand back; `headrace restart {target}` restarts it")
        for line in bereaved(asyncio.run(rows_of(stack)), names, stack.spec):
            _say(line)
        endings = drain_instances(stack.supervisor, names, lambda ending: _say(str(ending)))
    if fault := faults(endings, home):
        raise DrainFailed(fault)


@app.command()
def restart(
    target: Annotated[str, typer.Argument(help="The same, or all: every stage in turn", metavar="[STAGE[#N]]")] = "all",
    at_once: Annotated[bool, typer.Option(help="Without a spare: away until it is ready again")] = False,
) -> None:
    """Restart instances one after the other without a gap; a spare serves where there is no other."""
    settings = CliSettings()
    home = Home.open(settings.home)
    with home.changing():
        stack = Stack.attach(home)
        names = stack.spec.all_instances() if target == "all" else select(stack.spec, target)
        rolling = RollingRestart(stack, _say, settings.start_timeout_s)
        endings = rolling.at_once(names) if at_once or names[0] in SERVERS else rolling.run(names)
    _say(f"restarted {', '.join(rolling.restarted)}")
    if fault := faults(endings, home):
        raise DrainFailed(fault)


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


@dead_app.command("list")
def dead_list(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The newest so many")] = 100,
    as_json_: Annotated[bool, typer.Option("--json", help="For programs")] = False,
) -> None:
    """Show what was given up, and why."""
    letters = _over_nats(lambda bus: newest(bus, limit))
    console.out(dead_view.as_json(letters), highlight=False) if as_json_ else dead_view.print_list(letters, console)


@dead_app.command("show")
def dead_show(
    seq: DeadSeq,
    prompt: Annotated[bool, typer.Option("--prompt", help="With the ids of the prompt's tokens")] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="For programs")] = False,
) -> None:
    """Show all that is known of one dead letter; its prompt only when asked."""
    letter = _over_nats(lambda bus: read(bus, seq))
    if as_json_:
        console.out(dead_view.as_json(letter, prompt=prompt), highlight=False)
    else:
        dead_view.print_one(letter, console, prompt=prompt)


@dead_app.command("retry")
def dead_retry(seq: DeadSeq, as_json_: Annotated[bool, typer.Option("--json", help="For programs")] = False) -> None:
    """Queue the work of a dead letter again, as the same tenant under a new id."""

    async def again(bus: Bus) -> tuple[DeadLetter, Retried]:
        return await read(bus, seq), await retry(bus, seq)

    letter, retried = _over_nats(again)
    if as_json_:
        console.out(dead_view.as_json(retried), highlight=False)
    else:
        dead_view.print_retried(letter, retried, _local_url(CliSettings()), console)


@app.command()
def distill(
    target: Annotated[str, typer.Option(help="Model to draft for: built-in, hub name, directory or .gguf file")],
    out: Annotated[Path, typer.Option(help="Directory of the draft; an interrupted run goes on there")],
    tokens: Annotated[int, typer.Option(min=1, help="That the target writes to learn from")] = 400_000,
    layers: Annotated[int, typer.Option(min=1, help="Of the draft")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Times that the text is used")] = 4,
    head_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the draft knows, the commonest; 0: all")] = 8192,
    prompts: Annotated[Path | None, typer.Option(help="One a line; the target makes up its own when left out")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    pack: Annotated[Path | None, typer.Option(help="Also write the trained layers alone, 8 bits a weight")] = None,
) -> None:
    """Train a small draft model for a target on text that the target itself writes."""
    options: dict[str, Any] = {"target": target, "out": out, "tokens": tokens, "layers": layers, "epochs": epochs}
    options |= {
        "head-tokens": head_tokens,
        "prompts": prompts,
        "seed": seed,
        "threads": threads,
        "device": device,
        "pack": pack,
    }
    distillation.become({name: str(value) for name, value in options.items() if value is not None}, threads)


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


def _over_nats(ask: Callable[[Bus], Coroutine[Any, Any, Answer]]) -> Answer:
    """Ask over the NATS server of the stack that runs here, else over the one that HEADRACE_NATS_URL names."""
    settings = CliSettings()
    spec = Home.open(settings.home).load_spec()
    url = spec.nats_url if spec is not None else settings.nats_url
    if not url:
        raise StackNotRunning(f"no stack is running here ({settings.home}), and HEADRACE_NATS_URL names no other")

    async def connected() -> Answer:
        async with await Bus.connect(url, name="cli", wait_s=NATS_WAIT_S) as bus:
            return await ask(bus)

    return asyncio.run(connected())


def _say(text: str) -> None:
    console.print(text, markup=False)


def _fail(text: str) -> None:
    problems.print(f"headrace: {text}", markup=False)
    sys.exit(1)
