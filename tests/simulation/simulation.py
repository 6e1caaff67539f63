"""One run: starts the cluster, makes the faults of the plan, then heals everything and waits until all is done."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import shared.bus.bus
from shared.bus import RequestLog
from shared.bus.streams import stream_config
from shared.protocol.streams import STREAMS
from tests.simulation.audit import Audit
from tests.simulation.engine import SimKV
from tests.simulation.faults import Faults
from tests.simulation.network import Server
from tests.simulation.patches import production_code_in
from tests.simulation.plan import Asked, Plan, draw_plan
from tests.simulation.services import (
    Ask,
    Cluster,
    GatewayProgram,
    ReaderProgram,
    Reading,
    WorkerProgram,
    ids_of,
    run_worker,
)
from tests.simulation.world import UNIX_EPOCH_S, Process, World

BEGIN_S = 0.3
"""When the services are up, and clients and faults begin."""

FAULTS_UNTIL_S = 12.0
"""Faults that wait for an event that does not come are given up then."""

HEALED_WITHIN_S = 45.0
"""All requests end within this time once there are no more faults."""

SWEPT_WITHIN_S = 8.0
"""After its deadline a request that nobody knows of is ended by the sweep within this time."""

LET_GO_WITHIN_S = 6.0
"""Once all is done the workers hold nothing within this time: an ack whose answer is lost is waited for."""

QUIET_S = 0.5
"""How long the cluster is watched after that: nothing may happen to an ended request."""

RESTART_S = (0.3, 2.0)
"""A supervisor starts a dead service again after a time between these."""


@dataclass
class Result:
    """`failures` is empty when all promises were kept."""

    seed: int
    failures: list[str]
    trace_hash: str
    trace: list[str]
    virtual_s: float
    events: int
    turns: int
    faults: list[str]
    counts: Counter[str]


class Simulation:
    def __init__(self, plan: Plan, *, verbose: bool = False, stop_at_failure: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, keep_trace=verbose, stop_at_failure=stop_at_failure)
        self.server = Server(self.world)
        requests = {request_id: asked for asked in plan.requests for request_id in ids_of(asked)}
        self.audit = Audit(
            self.world, requests, strict=not plan.faults, crashes=plan.crashes, repeated=self.server.repeated
        )
        poison = {request_id: asked.poison for request_id, asked in requests.items() if asked.poison is not None}
        self.cluster = Cluster(self.world, plan, SimKV(self.world), poison, self._follow)
        self.workers: dict[str, WorkerProgram] = {}
        self.gateways: dict[str, GatewayProgram] = {}
        self.faults = Faults(self.world, self.server, self.workers, self.gateways)
        self._skews: dict[str, float] = {}
        self.server.weather.latency_s = plan.latency_s
        self.server.on_stored.append(self.audit.stored)
        self.server.jetstream.on_removed = self.audit.removed

    def run(self) -> Result:
        collecting = gc.isenabled()
        gc.disable()
        try:
            with production_code_in(self.world, self.server, self.audit.lost), self._streams(), self._limits():
                try:
                    self._start()
                    self._run()
                finally:
                    self.world.close()
        finally:
            if collecting:
                gc.enable()
        return Result(
            seed=self.plan.seed,
            failures=self.world.failures,
            trace_hash=self.world.trace_hash,
            trace=self.world.trace,
            virtual_s=self.world.now,
            events=self.world.events,
            turns=self.world.turns,
            faults=self.faults.made,
            counts=self.world.counts,
        )

    # The cluster

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        """In most runs the streams are there and known to be: looking at them would take a fifth of the time."""
        if self.plan.sets_up_streams:
            yield
            return
        for spec in STREAMS:
            self.server.jetstream.create(stream_config(spec).as_dict())

        async def nothing_to_do(_: object) -> None:
            return

        with patch.object(shared.bus.bus, "ensure_streams", nothing_to_do):
            yield

    @contextlib.contextmanager
    def _limits(self) -> Iterator[None]:
        with (
            patch.dict(RequestLog.append.__kwdefaults__, patience_s=self.plan.patience_s),
            patch.object(shared.bus.bus, "PENDING_BYTES", self.plan.buffer_bytes),
        ):
            yield

    def _start(self) -> None:
        plan, world = self.plan, self.world
        for n in range(plan.gateways):
            self._start_gateway(f"gateway-{n}")
        for n in range(plan.prefills):
            self._start_worker("prefill", f"prefill-{n}")
        for n in range(plan.decodes):
            self._start_worker("decode", f"decode-{n}")
        process = Process(world, "reader")
        self.reader = ReaderProgram(process)
        process.start(self.reader.run())
        for asked in plan.requests:
            for _ in range(2 if asked.twice else 1):
                self.cluster.coming[asked.key] += 1
                world.at(BEGIN_S + asked.at, self._ask, asked, asked.tries)
        self.faults.plan(plan.faults, BEGIN_S)

    def _new_process(self, name: str) -> Process:
        process = Process(self.world, name)
        if name not in self._skews:
            self._skews[name] = self.world.random.uniform(-0.1, 0.1)
        process.skew_s = self._skews[name]
        return process

    def _start_worker(self, stage: str, name: str) -> None:
        process = self._new_process(name)
        program = self.workers[name] = WorkerProgram(process, stage)
        process.on_kill.append(lambda: self._restart_later(self._start_worker, stage, name))
        process.start(run_worker(self.cluster, program))

    def _start_gateway(self, name: str) -> None:
        process = self._new_process(name)
        program = self.gateways[name] = GatewayProgram(process)
        process.on_kill.append(lambda: self._restart_later(self._start_gateway, name))
        process.start(program.run())

    def _restart_later(self, start: Callable[..., None], *args: Any) -> None:
        self.world.after(self.world.random.uniform(*RESTART_S), start, *args)

    def _ask(self, asked: Asked, tries: int) -> None:
        """A client calls a gateway, and another one, or the same, when that was of no use."""
        gateways = [g for g in self.gateways.values() if not g.process.dead and g.admission is not None]
        if not gateways:
            self.world.after(0.2, self._ask, asked, tries)
            return
        self.cluster.coming[asked.key] -= 1
        gateway = self.world.random.choice(gateways)
        self.world.note(f"client asks {gateway.process.name} for {asked.key}")
        if self.world.keeps_trace:
            self.world.comment(f"{asked.key}: {asked}")
        ask = Ask(gateway.process)
        self.cluster.asks.setdefault(asked.key, []).append(ask)
        self._follow(ids_of(asked)[0])
        gateway.process.spawn(gateway.submit(self.cluster, asked, ask), f"submit-{asked.key}")
        if tries > 1:
            self.cluster.coming[asked.key] += 1
            self.world.after(self.world.random.uniform(0.5, 5.0), self._ask_again, asked, tries - 1, ask)

    def _ask_again(self, asked: Asked, tries: int, last: Ask) -> None:
        if last.state == "accepted":
            self.cluster.coming[asked.key] -= 1
        elif last.pending:
            self.world.after(1.0, self._ask_again, asked, tries, last)
        else:
            self._ask(asked, tries)

    def _follow(self, request_id: str) -> None:
        if request_id not in self.reader.readings:
            reading = self.reader.readings[request_id] = Reading(request_id)
            self.reader.process.spawn(self.reader.follow(reading), f"follow-{request_id}")

    # The end

    def _run(self) -> None:
        world = self.world
        last_at = max((fault.at or 0.0 for fault in self.plan.faults), default=0.0) + BEGIN_S + 0.05
        world.run(lambda: world.now >= last_at and (self._done() or not self.faults.to_come), FAULTS_UNTIL_S)
        world.run(lambda: self.server.up and (self._done() or world.now >= last_at + 4.0), world.now + 20.0)
        self.faults.heal()
        if not world.run(self._done, world.now + HEALED_WITHIN_S):
            self._say_what_is_left()
        if self._orphans():
            world.run(lambda: not self._orphans(), self._last_deadline_s() + SWEPT_WITHIN_S)
            world.run(lambda: not self._readers_behind(), world.now + 3.0)
        if world.failures:
            return
        while True:  # what was sent before the sky cleared may begin something yet
            world.run(lambda: self._done() and not self._still_held(), world.now + LET_GO_WITHIN_S)
            before = len(self.audit.logs)
            world.run(lambda: False, world.now + QUIET_S)
            if len(self.audit.logs) == before:
                break
        self._check_end()

    def _done(self) -> bool:
        if any(self.cluster.undecided(asked.key) for asked in self.plan.requests):
            return False
        return not self._open() and not self._queued() and not self._readers_behind()

    def _orphans(self) -> list[str]:
        """Begun by a gateway that died before it could queue the work: nobody knows of them, and they end late."""
        return [
            request_id
            for request_id in self.audit.open_requests()
            if request_id not in self.cluster.accepted.values()
            and not self.audit.logs[request_id].state.claims
            and not any(message.endswith(f".{request_id}") for message in self._queued())
        ]

    def _open(self) -> list[str]:
        orphans = self._orphans()
        return [request_id for request_id in self.audit.open_requests() if request_id not in orphans]

    def _last_deadline_s(self) -> float:
        logs = (self.audit.logs[request_id].state.accepted for request_id in self._orphans())
        return max((log.deadline_unix_s - UNIX_EPOCH_S for log in logs if log is not None), default=0.0)

    def _queued(self) -> list[str]:
        return [
            f"{stream.name}/{message.subject}"
            for stream in self.server.jetstream.streams.values()
            if stream.work_queue
            for message in stream.messages.values()
        ]

    def _readers_behind(self) -> list[str]:
        orphans = self._orphans()
        return [
            r.request_id
            for r in self.reader.readings.values()
            if r.request_id in self.audit.logs and r.request_id not in orphans and not r.done
        ]

    def _say_what_is_left(self) -> None:
        for request_id in self._open():
            self.world.fail(f"{request_id} has not ended {HEALED_WITHIN_S:.0f} s after the last fault")
        for message in self._queued():
            self.world.fail(f"{message} is still queued {HEALED_WITHIN_S:.0f} s after the last fault")
        for request_id in self._readers_behind():
            self.world.fail(f"the reader of {request_id} has not seen its end")

    def _check_end(self) -> None:
        for asked in self.plan.requests:
            accepted = self.cluster.accepted.get(asked.key)
            self.audit.outcome(asked, ids_of(asked), accepted, accepted in self.cluster.cancelled)
        for request_id, reading in self.reader.readings.items():
            stored = (
                [entry.seq for entry in self.audit.logs[request_id].entries] if request_id in self.audit.logs else []
            )
            seen = [entry.seq for entry in reading.entries]
            if seen != stored:
                self.world.fail(f"the reader of {request_id} saw {seen}, stored are {stored}")
        for what in self._still_held():
            self.world.fail(what)

    def _still_held(self) -> list[str]:
        held: list[str] = []
        for program in self.workers.values():
            if program.process.dead or program.worker is None or program.engine is None:
                continue
            if len(program.worker.holdings) or program.worker.holdings.ids():
                held.append(f"{program.process.name} still holds {program.worker.holdings.ids()}")
            if program.engine.open_sequences:
                held.append(f"the engine of {program.process.name} still has {program.engine.open_sequences}")
        return held


def run_seed(seed: int, *, verbose: bool = False, stop_at_failure: bool = False) -> Result:
    """One run of the plan that the seed draws."""
    return Simulation(draw_plan(seed), verbose=verbose, stop_at_failure=stop_at_failure).run()
