"""Starts a gateway: settings, port, model, NATS, HTTP. What keeps it from starting is one line on stderr."""

from __future__ import annotations

import asyncio
import socket
import sys

import structlog
import uvloop
from pydantic import ValidationError

from services.gateway.app import create_app
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer, PortTaken, bind
from services.gateway.settings import GatewaySettings, load_settings
from shared.bus import Bus, BusError
from shared.models import ChatTokenizer, ModelError, resolve_model
from shared.telemetry import configure_logging, setup_tracing, shutdown_tracing
from shared.telemetry.metrics import GatewayMetrics

log = structlog.get_logger(__name__)


def main() -> int:
    """The exit status: 0 after a stop, 1 when it cannot start, 2 for settings that make no sense."""
    try:
        settings = load_settings()
    except ValidationError as error:
        for fault in error.errors(include_input=False, include_url=False):
            print(f"HEADRACE_{'_'.join(map(str, fault['loc'])).upper()}: {fault['msg']}", file=sys.stderr)
        return 2
    configure_logging("gateway", settings.instance, settings.log_level, settings.log_format)
    setup_tracing("gateway", settings.instance)
    try:
        listener = bind(settings.host, settings.port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, listener))
    except KeyboardInterrupt:
        return 130
    except (PortTaken, ModelError, BusError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    finally:
        shutdown_tracing()
    return 0


async def serve(settings: GatewaySettings, listener: socket.socket) -> None:
    """Serve on a bound socket until a signal. Raises ModelError or BusError when it cannot start or go on."""
    model = await asyncio.to_thread(resolve_model, settings.model)
    tokenizer = await asyncio.to_thread(ChatTokenizer.load, model.path)
    host = settings.reachable_host
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    async with await Bus.connect(settings.nats_url, name="gateway", wait_s=settings.nats_wait_s) as bus:
        await bus.limit_requests(settings.max_queued)
        gateway = Gateway(settings, bus, model, tokenizer, GatewayMetrics(settings.instance), url)
        server = GatewayServer(create_app(gateway), gateway)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(gateway.run(), name="gateway"), group.create_task(bus.watch())]
                log.info("listening", url=url, model=model.name, worker=gateway.worker)
                await server.serve(sockets=[listener])
                if not server.force_exit:
                    await gateway.finish()
                for task in beside:
                    task.cancel()
        except ExceptionGroup as failed:
            if len(failed.exceptions) > 1 or not isinstance(failed.exceptions[0], BusError):
                raise
            raise failed.exceptions[0] from failed
