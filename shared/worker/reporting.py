"""What a worker tells the status board about itself."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from shared.bus import new_worker_id
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Stage
from shared.settings import EngineSettings
from shared.worker.holdings import Holdings

if TYPE_CHECKING:  # a drafter without a model reports too, and loads no torch
    from shared.worker.engine_host import EngineHost


class Reporter:
    """Builds an instance's status from what it is made of; `starting` until `ready` is called."""

    def __init__(self, stage: Stage, settings: EngineSettings, slots: int, metrics_url: str) -> None:
        self._stage: Stage = stage
        self._settings = settings
        self._slots = slots
        self._metrics_url = metrics_url
        self._started_unix_s = time.time()
        self.worker = new_worker_id(settings.instance)
        self._host: EngineHost | None = None
        self._holdings: Holdings | None = None
        self._last_error: Callable[[], tuple[str, float]] = lambda: ("", 0.0)
        self._transport: Callable[[], str] = lambda: ""
        self._running: Callable[[], int] = lambda: 0
        self._details: Callable[[], dict[str, float | str]] = dict
        self._model = ""
        self._state: Literal["starting", "ready", "draining"] = "starting"

    def ready(
        self,
        host: EngineHost,
        holdings: Holdings,
        last_error: Callable[[], tuple[str, float]],
        transport: Callable[[], str],
        details: Callable[[], dict[str, float | str]] = dict,
    ) -> None:
        """The worker serves from now on. `last_error` gives its text, and when it was in Unix seconds."""
        self._host, self._holdings = host, holdings
        self._last_error, self._transport, self._details = last_error, transport, details
        self._model = host.model.name
        self._running = lambda: len(holdings)
        self._state = "ready"

    def ready_without_engine(
        self,
        model: str,
        running: Callable[[], int],
        last_error: Callable[[], tuple[str, float]],
        details: Callable[[], dict[str, float | str]] = dict,
    ) -> None:
        """A service whose work needs no engine of its own serves from now on."""
        self._model, self._running = model, running
        self._last_error, self._details = last_error, details
        self._state = "ready"

    def draining(self) -> None:
        """The worker takes no new work."""
        self._state = "draining"

    def report(self) -> InstanceStatus:
        """The status of this moment."""
        pool = self._host.pool if self._host is not None else None
        last_error, last_error_unix_s = self._last_error()
        return InstanceStatus(
            stage=self._stage,
            instance=self._settings.instance,
            worker=self.worker,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_unix_s=self._started_unix_s,
            sent_unix_s=time.time(),
            state=self._state,
            model=self._model,
            layout_id=self._host.layout.layout_id if self._host is not None else "",
            running=self._running(),
            holds=self._holdings.ids() if self._holdings is not None else [],
            let_go=self._holdings.let_go() if self._holdings is not None else [],
            slots=self._slots,
            blocks_total=pool.total if pool is not None else 0,
            blocks_used=pool.used if pool is not None else 0,
            blocks_evictable=pool.evictable if pool is not None else 0,
            transport=self._transport(),
            metrics_url=self._metrics_url,
            last_error=last_error,
            last_error_unix_s=last_error_unix_s,
            details=self._details(),
        )
