"""`headrace up`: checks, model, launch, wait, hand over to the user; and in the foreground, the end on Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console

from services.cli.errors import SupervisorGone
from services.cli.home import Home
from services.cli.interrupts import Interrupted, Interrupts
from services.cli.preflight import memory_needed, require_disk, require_free, require_memory, stack_ports
from services.cli.readiness import await_ready
from services.cli.settings import CliSettings
from services.cli.spec import SERVERS, START_ORDER, StackSpec, stop_wait_s
from services.cli.stack import Stack, clear_stale, launch
from services.cli.startup_view import ModelProgress, StartupView
from shared.models import ModelError, ModelFiles, resolve_model
from shared.models.drafts import draft_of
from shared.protocol.subjects import Stage

_POLL_S = 0.2
_OTHER_COMMAND_S = 60.0


def up(settings: CliSettings, counts: dict[Stage, int], *, detach: bool, console: Console) -> None:
    """Bring a stack up; in the foreground, stay until it ends or a signal asks to end it."""

    def say(text: str) -> None:
        console.print(text, markup=False)

    home = Home.open(settings.home)
    with Interrupts.install() as interrupts:
        stack = _launched(home, settings, counts, interrupts, console)
        if detach:
            say("runs in the background: `headrace status`, `headrace logs -f`, `headrace down`")
            return
        say("Ctrl-C stops everything")
        while not interrupts.count and stack.supervisor.alive():
            time.sleep(_POLL_S)
        if interrupts.count:
            _stop(stack, interrupts, console)
        else:
            _explain_end(stack, console)


def make_spec(settings: CliSettings, counts: dict[Stage, int]) -> StackSpec:
    """The stack that settings and `--scale` options ask for. Model paths become absolute: services run elsewhere."""
    servers = tuple(
        server for server, url in zip(SERVERS, (settings.nats_url, settings.redis_url), strict=True) if not url
    )
    return StackSpec(
        stack_id=uuid.uuid4().hex,
        model=_absolute(settings.model),
        draft_model="auto" if settings.draft_model == "auto" else _absolute(settings.draft_model),
        nats_url=settings.nats_url or f"nats://127.0.0.1:{settings.nats_port}",
        redis_url=settings.redis_url or f"redis://127.0.0.1:{settings.redis_port}/0",
        servers=servers,
        nats_port=settings.nats_port,
        redis_port=settings.redis_port,
        gateway_port=settings.port,
        counts={stage: counts.get(stage, 1) for stage in START_ORDER},
        stop_wait_s=stop_wait_s(settings.drain_s),
    )


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    """A command that streams an answer, to be pasted into a shell as it is."""
    body = json.dumps(
        {"model": model, "stream": True, "messages": [{"role": "user", "content": "What is a headrace?"}]}
    )
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if with_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def _launched(
    home: Home, settings: CliSettings, counts: dict[Stage, int], interrupts: Interrupts, console: Console
) -> Stack:
    """A stack that is ready. Exits with 130 when the user does not want to wait for it."""
    began = time.monotonic()
    try:
        with home.changing():
            stack = _start(home, settings, counts, interrupts, console)
    except Interrupted:
        console.print("interrupted before it was ready", markup=False)
        raise SystemExit(130) from None
    console.print(f"ready after {time.monotonic() - began:.1f} s", markup=False)
    _invite(stack, console)
    return stack


def _start(
    home: Home, settings: CliSettings, counts: dict[Stage, int], interrupts: Interrupts, console: Console
) -> Stack:
    def say(text: str) -> None:
        console.print(text, markup=False)

    spec = make_spec(settings, counts)
    with interrupts.raising():
        clear_stale(home, say)
        _check(home, spec, settings, console)
    say(f"state in {home.root}")
    stack = launch(home, spec, settings.threads, say)
    try:
        with interrupts.raising(), StartupView(console) as view:
            asyncio.run(await_ready(stack, view.show, settings.start_timeout_s))
    except BaseException:
        say("stopping what was started")
        stack.kill()
        raise
    return stack


def _check(home: Home, spec: StackSpec, settings: CliSettings, console: Console) -> None:
    """All that can be known to fail beforehand, and the model, which may take minutes to fetch."""
    require_free(stack_ports(spec))
    require_disk(home.root)
    files = _model(spec.model, console)
    # Where `auto` finds nothing that can be used a drafter goes on with lookups.
    shipped = spec.draft_model == "auto"
    name = draft_of(spec.model) if shipped else spec.draft_model
    draft = None
    with suppress(ModelError) if shipped else nullcontext():
        draft = _model(name, console) if name else None
    draft_bytes = _weights(draft) if draft else 0
    require_memory(
        memory_needed(
            spec,
            weights_bytes=_weights(files),
            draft_weights_bytes=draft_bytes,
            kv_memory_gib=settings.kv_memory_gib,
            store_memory_gib=settings.store_memory_gib,
        )
    )


def _model(name: str, console: Console) -> ModelFiles:
    with ModelProgress(console, name) as progress:
        return resolve_model(name, progress=progress.report)


def _weights(files: ModelFiles) -> int:
    return sum(path.stat().st_size for path in files.path.glob("*.safetensors"))


def _invite(stack: Stack, console: Console) -> None:
    if not stack.spec.counts.get("gateway"):
        return
    url = stack.spec.gateway_url()
    model = resolve_model(stack.spec.model, fetch=False).name
    console.print(f"{model} answers at {url}/v1 (OpenAI's API)", markup=False)
    console.print("try `headrace chat`, or:", markup=False)
    # Not wrapped by the console: the line must survive being copied.
    console.out(curl_line(url, model, with_key=_asks_for_keys()), highlight=False)


def _asks_for_keys() -> bool:
    return bool(os.environ.get("HEADRACE_API_KEYS"))


def _stop(stack: Stack, interrupts: Interrupts, console: Console) -> None:
    console.print("stopping (Ctrl-C again kills at once)", markup=False)
    try:
        with interrupts.raising(beyond=interrupts.count):
            stack.stop(lambda text: console.print(text, markup=False))
    except Interrupted:
        stack.kill()
    console.print("stopped", markup=False)


def _explain_end(stack: Stack, console: Console) -> None:
    """The supervisor is gone without our doing: `headrace down` from elsewhere, or it was killed."""
    with stack.home.changing(_OTHER_COMMAND_S):
        if stack.home.load_spec() is None:
            console.print("stopped by another command", markup=False)
            return
        stack.kill()
    raise SupervisorGone(f"the supervisor died, its processes were ended; see {stack.home.log_of('supervisor')}")


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if model and path.exists() else model
