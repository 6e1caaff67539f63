"""The parts of one gateway and how they are wired. Routes and NATS responders get this object and nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

from services.gateway.admission import Admission
from services.gateway.attachment import Attachments
from services.gateway.auth import Keyring
from services.gateway.dead_letters import DeadLetters
from services.gateway.deadlines import Overdue, overdue_error
from services.gateway.endings import Ending, Endings
from services.gateway.limits import Limits
from services.gateway.prompts import Prompter
from services.gateway.readiness import Readiness
from services.gateway.results import fingerprint_of
from services.gateway.settings import GatewaySettings
from services.gateway.submit import Submissions
from services.gateway.sweep import Sweep
from shared.bus import Bus, new_worker_id
from shared.models import ChatTokenizer, ModelFiles, TokenBytes
from shared.protocol.records import Accepted
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import STATUS_PING, Stage
from shared.telemetry import LoopLagMonitor
from shared.telemetry.metrics import GatewayMetrics

FINISH_S: Final = 4.0
"""How long a gateway that stops may take to answer what it has taken over NATS and to end what is to be ended."""

LEAST_FINISH_S: Final = 1.0


class Gateway:
    """Owns everything but the HTTP server and the NATS connection. `run` keeps its background work going."""

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        model: ModelFiles,
        tokenizer: ChatTokenizer,
        metrics: GatewayMetrics,
        url: str,
    ) -> None:
        self.settings = settings
        self.bus = bus
        self.model = model
        self.metrics = metrics
        self.url = url
        self.worker = new_worker_id(settings.instance)
        self.fingerprint = fingerprint_of(model.fingerprint)
        self.model_created_unix_s = int((model.path / "config.json").stat().st_mtime)
        self.keyring = Keyring(settings.tenants_by_key)
        self.draining = asyncio.Event()
        """Set when nothing new is taken on."""
        self.stopping = asyncio.Event()
        """Set when answers that still run must let go of their clients."""
        self.prompter = Prompter(tokenizer)
        self.tokens = TokenBytes(tokenizer.raw)
        self.limits = Limits(bus, model.name, settings)
        self.readiness = Readiness(bus, model.name, self.draining)
        self.endings = Endings(bus, self.worker)
        self.attachments = Attachments(bus, self.endings, settings.disconnect_grace_s)
        self.admission = Admission(
            bus, self.prompter, self.limits, self.endings, self.attachments, model.name, self.worker, settings
        )
        self._started_unix_s = time.time()
        self._submissions = Submissions(
            bus, self.admission, self.limits, self.keyring, metrics, model.name, settings, self.draining
        )
        self._dead_letters = DeadLetters(bus, self.admission, self.limits, model.name, settings, self.draining)
        self._sweep = Sweep(bus, self.endings, self.end_overdue, settings.sweep_interval_s)

    async def run(self) -> None:
        """All background work, until cancelled. A part that fails ends the gateway."""
        self.bus.announce(self.status)
        await self.bus.client.publish(STATUS_PING, b"")  # know the others now, not within a second
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in (
                    ("limits", self.limits.run()),
                    ("endings", self.endings.run()),
                    ("attachments", self.attachments.run()),
                    ("submissions", self._submissions.run()),
                    ("dead-letters", self._dead_letters.run()),
                    ("sweep", self._sweep.run()),
                    ("loop-lag", LoopLagMonitor(self.metrics.process.event_loop_lag).run()),
                ):
                    group.create_task(work, name=name)
        finally:
            self.prompter.close()

    async def finish(self) -> None:
        """While it drains, before `run` is cancelled: answer what came over NATS, and end what is to be ended."""
        give_up = time.monotonic() + FINISH_S
        await asyncio.gather(self._submissions.finish(FINISH_S), self._dead_letters.finish(FINISH_S))
        await self.endings.finish(max(give_up - time.monotonic(), LEAST_FINISH_S))

    def end_overdue(self, accepted: Accepted, overdue: Overdue, has_output: bool) -> None:
        """Have a request ended that is past a deadline, with the reason that the status board suggests."""
        stage: Stage = "decode" if has_output else "prefill"
        workers = self.bus.statuses.live(stage, accepted.model)
        error = overdue_error(overdue, stage, workers, time.time() - accepted.created_unix_s)
        self.endings.request(Ending(accepted, "error", error, unclaimed_only=overdue == "queue"))

    def status(self) -> InstanceStatus:
        self.metrics.process.num_running.set(self.limits.active)
        rates = self.limits.backlog.rates_per_s
        return InstanceStatus(
            stage="gateway",
            instance=self.settings.instance,
            worker=self.worker,
            pid=os.getpid(),
            host=self.settings.reachable_host,
            started_unix_s=self._started_unix_s,
            sent_unix_s=time.time(),
            state="draining" if self.draining.is_set() else "ready",
            model=self.model.name,
            running=self.limits.active,
            slots=self.settings.max_concurrent,
            url=self.url,
            metrics_url=f"{self.url}/metrics",
            details={
                "queue_waiting": float(self.limits.backlog.waiting),
                **{f"{stage}_per_s": round(per_s, 3) for stage, per_s in rates.items() if per_s is not None},
                "sweep_watched": float(self._sweep.watched),
            },
        )
