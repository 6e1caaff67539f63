"""A smaller model as proposer: same engine, same sampling noise, a few tokens ahead for many sequences at once."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import structlog

from services.draft.service import ModelTask
from services.draft.settings import DraftSettings
from services.draft.vocabulary import require_same_vocabulary
from shared.engine import Engine, EngineError, Sequence
from shared.models import ModelFiles
from shared.telemetry.metrics import EngineMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.process import StartupError

log = structlog.get_logger(__name__)


class DraftModel:
    """The draft model in its engine thread, as the service asks it. Importing this module loads torch."""

    def __init__(self, host: EngineHost, max_sequences: int) -> None:
        self._host = host
        self._proposer = ModelProposer(max_sequences)

    @classmethod
    async def load(cls, settings: DraftSettings, target: ModelFiles, metrics: EngineMetrics) -> DraftModel:
        """Raises StartupError when it cannot be loaded or speaks other tokens than the target."""
        sizes = BatchSizes(settings.draft_slots, settings.draft_batch_tokens)
        try:
            host = await EngineHost.load(settings, settings.draft_model, sizes, metrics)
        except EngineError as error:
            raise StartupError(f"draft model {settings.draft_model}: {error}") from error
        require_same_vocabulary(target, host.model)
        host.start()
        return cls(host, settings.max_sequences)

    async def propose(self, tasks: list[ModelTask]) -> dict[str, list[int]]:
        """Guesses per request id; those that do not fit now are left out."""
        return await self._host.async_engine.call(self._proposer.propose, tasks)

    async def forget(self, request_id: str) -> None:
        await self._host.async_engine.call(self._proposer.forget, request_id)

    async def stop(self) -> None:
        await self._host.stop()


class ModelProposer:
    """Runs in the engine thread; owner of the draft model's sequences, whose KV is rebuilt from tokens when missing.

    Between proposals a sequence is paused and keeps its blocks; the least recently used gives them up first.
    """

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()

    def propose(self, engine: Engine, tasks: list[ModelTask]) -> dict[str, list[int]]:
        """Guesses per request id, in one batch of steps; sequences that do not fit are left out."""
        guesses: dict[str, list[int]] = {}
        for task in tasks:
            try:
                self._start(engine, task)
            except EngineError as error:
                log.info("draft_left_out", request_id=task.request_id, reason=str(error))
                self.forget(engine, task.request_id)
                continue
            guesses[task.request_id] = []
        while engine.has_work:
            steps = engine.step()
            for request_id, failure in engine.take_failures():
                log.info("draft_failed", request_id=request_id, reason=str(failure))
                guesses.pop(request_id, None)
                self.forget(engine, request_id)
            for step in steps:
                guesses[step.seq_id] += step.new_ids
            if not steps and not self._make_room(engine, keep=guesses):
                for request_id in engine.active_ids():
                    self.forget(engine, request_id)
        return guesses

    def forget(self, engine: Engine, request_id: str) -> None:
        """Give the sequence's blocks back. Unknown ids are ignored."""
        if self._sequences.pop(request_id, None) is not None:
            engine.release(request_id)

    def _start(self, engine: Engine, task: ModelTask) -> None:
        """Make the sequence hold exactly the task's tokens and join the batch, keeping the KV of the common prefix."""
        sequence = self._sequences.get(task.request_id)
        if sequence is not None:
            self._sequences.move_to_end(task.request_id)
            engine.rewind(sequence, task.token_ids, pause_after=task.max_tokens)
            return
        while len(self._sequences) >= self._max_sequences:
            self.forget(engine, next(iter(self._sequences)))
        capacity = min(engine.context_length, engine.pool.num_blocks * engine.config.block_tokens)
        sequence = engine.new_sequence(
            task.request_id,
            list(task.token_ids),
            len(task.token_ids),
            msgspec.structs.replace(task.params, max_tokens=max(capacity - len(task.token_ids), 1)),
            speculate=False,
            pause_after=task.max_tokens,
            text=False,
            salt=task.request_id,  # what is asked here does not say whose it is, so nothing is shared
        )
        self._sequences[task.request_id] = sequence
        engine.start(sequence)

    def _make_room(self, engine: Engine, keep: dict[str, list[int]]) -> bool:
        """Release the least recently used sequence that is not being worked on. False when there is none."""
        oldest = next((request_id for request_id in self._sequences if request_id not in keep), None)
        if oldest is None:
            return False
        self.forget(engine, oldest)
        return True
