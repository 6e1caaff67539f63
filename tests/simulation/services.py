"""The programs of the simulated cluster: the services' own code, wired as their `main` modules do it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import nats.errors
from prometheus_client import CollectorRegistry

from services.decode.settings import DecodeSettings
from services.decode.worker import DecodeWorker
from services.gateway.admission import Admission
from services.gateway.attachment import Attachments
from services.gateway.call import GenerationCall, TokenIds
from services.gateway.deadlines import Overdue, overdue_error
from services.gateway.endings import Ending, Endings
from services.gateway.errors import ApiError
from services.gateway.limits import Limits
from services.gateway.settings import GatewaySettings
from services.gateway.sweep import Sweep
from services.gateway.terms import Terms, keyed_request_id
from services.prefill.settings import PrefillSettings
from services.prefill.worker import PrefillWorker
from shared.bus import Bus, LogEntry, new_worker_id
from shared.protocol.records import Accepted, Ended
from shared.protocol.status import InstanceStatus
from shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from shared.worker.engine_host import EngineHost
from shared.worker.reporting import Reporter
from shared.worker.stage_worker import StageWorker
from tests.simulation.engine import BLOCK_TOKENS, Poison, ScriptedEngine, SimAsyncEngine, SimKV
from tests.simulation.plan import TENANT, Asked, Plan
from tests.simulation.world import UNIX_EPOCH_S, Process, World

MODEL = "sim"
URL = "nats://simulated"
STALL_S = 2.5
SWEEP_S = 2.0


@cache
def prefill_metrics() -> PrefillMetrics:
    return PrefillMetrics("sim", CollectorRegistry())


@cache
def decode_metrics() -> DecodeMetrics:
    return DecodeMetrics("sim", CollectorRegistry())


@cache
def prefill_settings() -> PrefillSettings:
    return PrefillSettings(
        model=MODEL, block_tokens=BLOCK_TOKENS, stall_s=STALL_S, drain_s=5.0, kv_timeout_s=1.0, host="127.0.0.1"
    )


@cache
def decode_settings() -> DecodeSettings:
    return DecodeSettings(
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        stall_s=STALL_S,
        drain_s=5.0,
        kv_timeout_s=1.0,
        speculation="off",
        host="127.0.0.1",
    )


@cache
def gateway_settings() -> GatewaySettings:
    return GatewaySettings(model=MODEL)


@dataclass
class Ask:
    """One call of a client to one gateway. `state` is what the client knows."""

    process: Process
    state: Literal["waits", "accepted", "refused"] = "waits"

    @property
    def pending(self) -> bool:
        return self.state == "waits" and not self.process.dead


@dataclass
class Cluster:
    """What the processes of a run share: nothing of it is known to the code under test."""

    world: World
    plan: Plan
    kv: SimKV
    poison: dict[str, Poison]
    on_accepted: Callable[[str], None]
    """Told the id of each request that a gateway said it has accepted."""
    asks: dict[str, list[Ask]] = field(default_factory=dict)
    """By idempotency key."""
    coming: Counter[str] = field(default_factory=Counter)
    """By key, how many times its client will ask (again), if it has to."""
    accepted: dict[str, str] = field(default_factory=dict)
    """By key, the id of the request that a gateway has accepted last."""
    cancelled: set[str] = field(default_factory=set)

    def undecided(self, key: str) -> bool:
        """Whether its client still waits for a gateway's word, or will ask again."""
        return self.coming[key] > 0 or any(ask.pending for ask in self.asks.get(key, ()))


@dataclass
class WorkerProgram:
    """A worker process and the handles by which faults reach into it."""

    process: Process
    stage: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    engine: ScriptedEngine | None = None
    async_engine: SimAsyncEngine | None = None
    worker: StageWorker | None = None

    def drain(self) -> None:
        """SIGTERM."""
        if not self.process.dead:
            with self.process.entered():
                self.stop.set()

    def hang(self) -> None:
        if self.async_engine is not None:
            self.async_engine.hangs = True

    def fail_step(self) -> None:
        if self.engine is not None:
            self.engine.fail_next = True


async def run_worker(cluster: Cluster, program: WorkerProgram) -> None:
    """As `services.prefill.main.serve` and `services.decode.main.serve`, without metrics server and block transport."""
    process, plan = program.process, cluster.plan
    stage: str = program.stage
    update = {"instance": process.name, f"{stage}_slots": plan.slots}
    settings: PrefillSettings | DecodeSettings = (
        prefill_settings().model_copy(update=update)
        if stage == "prefill"
        else decode_settings().model_copy(update=update)
    )
    async with await Bus.connect(URL, name=process.name) as bus:
        reporter = Reporter(stage, settings, plan.slots, metrics_url="")  # type: ignore[arg-type]
        bus.announce(reporter.report)
        program.engine = engine = ScriptedEngine(process, stage, cluster.poison)
        metrics = prefill_metrics() if stage == "prefill" else decode_metrics()
        host = EngineHost(engine, SimpleNamespace(name=MODEL), metrics.engine)  # type: ignore[arg-type]
        assert isinstance(host.async_engine, SimAsyncEngine)
        program.async_engine = host.async_engine
        program.async_engine.step_s = plan.step_s
        await asyncio.sleep(0.05)  # it takes a while to load a model
        worker: StageWorker
        if isinstance(settings, PrefillSettings):
            worker = PrefillWorker(bus, host, cluster.kv, settings, reporter.worker, prefill_metrics())
        else:
            worker = DecodeWorker(bus, host, cluster.kv, settings, reporter.worker, decode_metrics())
        program.worker = worker
        host.start()
        reporter.ready(host, worker.holdings, lambda: (worker.last_error, worker.last_error_unix_s), lambda: "")
        await worker.run(program.stop, reporter.draining)
        await host.stop()


class SimPrompter:
    """Prompts are token ids already."""

    async def token_ids(self, call: GenerationCall) -> list[list[int]]:
        return [prompt.ids for prompt in call.prompts if isinstance(prompt, TokenIds)]

    async def prediction_ids(self, call: GenerationCall) -> list[int]:
        return []

    def output_limit(self, call: GenerationCall, prompt_tokens: int, chat_default: int, prompt: int = 0) -> int:
        return call.max_tokens or chat_default


def call_of(asked: Asked) -> GenerationCall:
    return GenerationCall(
        api="chat",
        model=MODEL,
        prompts=(TokenIds([3 + n for n in range(asked.prompt)]),),
        n=1,
        max_tokens=asked.max_tokens,
        min_tokens=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        logprobs=None,
        seed=asked.seed,
        stop=[],
        stop_token_ids=[],
        ignore_eos=False,
        speculation="off",
        priority=asked.priority,  # type: ignore[arg-type]
        stream=True,
        include_usage=False,
        user="",
        digest=f"{asked.prompt}-{asked.seed}-{asked.max_tokens}",
    )


def ids_of(asked: Asked) -> list[str]:
    """The ids that the request's runs can have, one for each failed run under its key."""
    return [keyed_request_id("chat", TENANT, asked.key, attempt) for attempt in range(8)]


@dataclass
class GatewayProgram:
    """A gateway without HTTP: takes requests on, ends them, sweeps."""

    process: Process
    bus: Bus | None = None
    endings: Endings | None = None
    admission: Admission | None = None
    worker: str = ""

    async def submit(self, cluster: Cluster, asked: Asked, ask: Ask) -> None:
        """Answer one call of a client."""
        if self.admission is None or self.endings is None:
            ask.state = "refused"
            return
        terms = Terms(asked.queue_s, asked.compute_s, asked.key)
        try:
            ticket = await self.admission.accept(call_of(asked), TENANT, terms, trace_headers={})
        except ApiError as error:
            if error.status == 422:
                self.process.world.fail(f"{asked.key} was refused with {error.body()}")
            ask.state = "refused"
            return
        ask.state = "accepted"
        accepted = ticket.accepted
        cluster.accepted[asked.key] = accepted.request_id
        cluster.on_accepted(accepted.request_id)
        if asked.cancel_after_s is not None:
            await asyncio.sleep(asked.cancel_after_s)
            cluster.cancelled.add(accepted.request_id)
            self.endings.request(Ending(accepted, "cancelled"))

    def end_overdue(self, accepted: Accepted, overdue: Overdue, has_output: bool) -> None:
        assert self.endings is not None
        error = overdue_error(overdue, "decode" if has_output else "prefill", [], time.time() - accepted.created_unix_s)
        self.endings.request(Ending(accepted, "error", error))

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            stage="gateway",
            instance=self.process.name,
            worker=self.worker,
            pid=1,
            host="sim",
            started_unix_s=UNIX_EPOCH_S,
            sent_unix_s=time.time(),
            state="ready",
            model=MODEL,
        )

    async def run(self) -> None:
        async with await Bus.connect(URL, name=self.process.name) as bus:
            self.worker = new_worker_id(self.process.name)
            endings = Endings(bus, self.worker)
            settings = gateway_settings()
            attachments = Attachments(bus, endings, settings.disconnect_grace_s)
            prompter: Any = SimPrompter()
            limits = Limits(bus, MODEL, settings)  # it takes no samples here, so it only counts
            sweep = Sweep(bus, endings, self.end_overdue, SWEEP_S)
            bus.announce(self.status)
            self.admission = Admission(bus, prompter, limits, endings, attachments, MODEL, self.worker, settings)
            self.bus, self.endings = bus, endings
            async with asyncio.TaskGroup() as group:
                group.create_task(endings.run())
                group.create_task(sweep.run())
                group.create_task(attachments.run())


@dataclass
class Reading:
    """What a client saw of a request, over all its connections."""

    request_id: str
    entries: list[LogEntry] = field(default_factory=list)
    done: bool = False


async def read(bus: Bus, reading: Reading, leaves_after: Callable[[], int]) -> None:
    """Follow a log with the real reader; now and then go away and come back with the last position."""
    while not reading.done:
        budget = leaves_after()
        after = reading.entries[-1].seq if reading.entries else 0
        async with bus.follow(TENANT, reading.request_id, after) as reader:
            async for entry in reader:
                reading.entries.append(entry)
                if isinstance(entry.record, Ended):
                    reading.done = True
                budget -= 1
                if budget == 0:
                    break


@dataclass
class ReaderProgram:
    """Clients' connections in a process of their own."""

    process: Process
    readings: dict[str, Reading] = field(default_factory=dict)
    bus: Bus | None = None

    async def run(self) -> None:
        async with await Bus.connect(URL, name=self.process.name) as bus:
            self.bus = bus
            await bus.watch()

    async def follow(self, reading: Reading) -> None:
        while self.bus is None:
            await asyncio.sleep(0.01)
        draw = self.process.world.random
        try:
            await read(self.bus, reading, lambda: draw.choice((1, 2, 3, 5, 1000)))
        except nats.errors.Error as error:
            self.process.world.fail(f"the reader of {reading.request_id} failed: {error!r}")
