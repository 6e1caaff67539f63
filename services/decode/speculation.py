"""Speculation of one decode worker: drafting beside the engine, drafters outside, and what became of the drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.decode.demand import Demand
from services.decode.draft_link import DRAFT_SERVICE, FIRST_WANTED, DraftLink
from services.decode.drafting import Drafted, Drafting
from services.decode.settings import DecodeSettings
from shared.bus import Bus
from shared.engine import Sequence, SequenceStep, StepStats
from shared.protocol.drafts import DRAFT_MODEL
from shared.protocol.jobs import GenerationRequest
from shared.speculation import Tally
from shared.telemetry.metrics import SpeculationMetrics
from shared.worker.engine_host import EngineHost
from shared.worker.holdings import Holding

STEPS_SHOWN = 32
"""The present draft length is the mean over about so many steps."""


@dataclass
class Outcome:
    """What became of one request's drafts, by proposer: how many were verified, and how many of them were right."""

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, step: SequenceStep) -> None:
        if step.drafted:
            self.drafted[step.proposer] += step.drafted
            self.accepted[step.proposer] += step.accepted


class Speculation:
    """Owner of all guesses for the sequences of one worker. Nothing waits for it; the output never depends on it."""

    def __init__(
        self, bus: Bus, host: EngineHost, settings: DecodeSettings, worker: str, metrics: SpeculationMetrics
    ) -> None:
        self.totals = Outcome()
        """Of all requests so far."""
        self._rows = self._ready = 0
        self._draft_length = 0.0
        self._on = settings.speculation == "auto"
        self._metrics = metrics
        metrics.observe_drafters(asked=self._on)
        self._demand = Demand(settings.least_drafted)
        self._link = DraftLink(bus, host.model.name, worker)
        self._drafting = Drafting(host.async_engine, settings.max_draft_tokens)
        self._drafted: dict[str, Drafted] = {}
        host.listen(self._on_steps)

    def __len__(self) -> int:
        """Sequences that are drafted for."""
        return len(self._drafted) + len(self._link)

    async def open(self) -> None:
        if self._on:
            await self._link.open()

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._link.run()] if self._on else []

    def applies_to(self, holding: Holding) -> bool:
        """Not to one that is suspected of crashing workers: it shall have as few causes as can be."""
        return self._on and holding.request.speculation == "auto" and not holding.alone

    def begin(self, sequence: Sequence, request: GenerationRequest) -> None:
        """Draft for a sequence that is about to join the batch, if it may have drafts."""
        if not sequence.speculate:
            return
        group = f"{request.tenant}\0{request.salt}"
        drafted = self._drafting.begin(sequence, request.prediction_ids, group)
        self._drafted[request.request_id] = drafted
        wanted = FIRST_WANTED if self._demand.asks else 0
        self._link.join(request, sequence.token_ids, lambda guess: self._drafting.offer(drafted, guess), wanted)

    def grew(self, step: SequenceStep) -> None:
        """A sequence has new tokens."""
        drafted = self._drafted.get(step.seq_id)
        self.totals.add(step)
        if step.drafted:
            self._metrics.observe(step.proposer, step.drafted, step.accepted)
        if drafted is not None:
            asks = step.finish_reason is None and self._asks_outside(step) and self._demand.asks
            self._link.grew(step.seq_id, list(step.new_ids), step.wanted if asks else 0)

    def end(self, request_id: str) -> None:
        """The sequence has ended here. Its output is remembered for its tenant if it is whole."""
        drafted = self._drafted.pop(request_id, None)
        if drafted is not None:
            self._link.leave(request_id)
            self._drafting.end(drafted, self._count, remember=drafted.sequence.finish_reason is not None)

    def describe(self) -> dict[str, float | str]:
        """For the status: what became of all drafts since the start, and how many are verified in a step now.

        `drafters` are `asked`, or `resting` while their guesses bring too little.
        """
        if not self._on:
            return {"speculation": "off"}
        told: dict[str, float | str] = {
            "speculation": "auto",
            "drafted": self.totals.drafted.total(),
            "accepted": self.totals.accepted.total(),
            "steps": self._rows,
            "ready": self._ready,
            "draft_length": round(self._draft_length, 2),
            "drafters": "asked" if self._demand.asks else "resting",
        }
        for proposer in self.totals.drafted:
            told[f"drafted.{proposer}"] = self.totals.drafted[proposer]
            told[f"accepted.{proposer}"] = self.totals.accepted[proposer]
        return told

    def _asks_outside(self, step: SequenceStep) -> bool:
        """Whether a drafter's guess could be of use."""
        drafted = self._drafted.get(step.seq_id)
        return drafted is not None and step.wanted > 0 and drafted.drafts.asks_outside

    def _on_steps(self, steps: list[SequenceStep], stats: StepStats) -> None:
        if not stats.speculating:
            return
        # Where there is no drafter, as while one restarts, none brings too little.
        asking = sum(self._asks_outside(step) and self._link.has_drafter(step.seq_id) for step in steps)
        brought = sum(step.accepted for step in steps if step.proposer in (DRAFT_MODEL, DRAFT_SERVICE))
        self._demand.observe(stats.speculating, asking, brought)
        self._rows += stats.speculating
        self._ready += stats.ready
        self._draft_length += (stats.drafted / stats.speculating - self._draft_length) / STEPS_SHOWN
        self._metrics.observe_step(stats.speculating, stats.ready, self._draft_length)
        self._metrics.observe_drafters(asked=self._demand.asks)

    def _count(self, tallies: Mapping[str, Tally]) -> None:
        for proposer, tally in tallies.items():
            self._metrics.observe_guesses(proposer, tally.offered, tally.late)
