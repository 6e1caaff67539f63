"""Whether a request could be served now, end to end, and what is missing if not."""

from __future__ import annotations

import asyncio
from typing import Final

from shared.bus import Bus
from shared.protocol.subjects import Stage

NEEDED: Final[tuple[Stage, ...]] = ("prefill", "decode")
"""Draft and KV store speed things up; a request ends well without them."""


class Readiness:
    def __init__(self, bus: Bus, model: str, draining: asyncio.Event) -> None:
        self._bus = bus
        self._model = model
        self._draining = draining

    def missing_stages(self) -> list[Stage]:
        """Stages without a ready worker of the model."""
        return [
            stage
            for stage in NEEDED
            if not any(worker.state == "ready" for worker in self._bus.statuses.live(stage, self._model))
        ]

    def missing(self) -> list[str]:
        """What keeps requests from being served; empty when ready."""
        if self._draining.is_set():
            return ["this gateway is stopping"]
        if not self._bus.connected:
            return ["NATS"]
        return [f"a {stage} worker for {self._model}" for stage in self.missing_stages()]
