"""A smaller model as proposer: same engine, same sampling noise, always on its way ahead of what decode has confirmed.

Each step of its engine serves all sequences that are less than wanted ahead, of all decode workers.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
import torch

from services.draft.known import Wish
from services.draft.service import Drafted
from services.draft.settings import DraftSettings
from services.draft.vocabulary import require_same_vocabulary
from shared.engine import Engine, EngineError, Sequence, SequenceStep, StepStats
from shared.models import ModelFiles
from shared.protocol.jobs import SamplingParams
from shared.telemetry.metrics import EngineMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.process import StartupError

HEALTH_CHECK_S = 1.0
HUNG_AFTER = 3
"""A step that takes this many times `stall_s` never ends."""

log = structlog.get_logger(__name__)


class DraftModel:
    """The draft model in its engine thread, as the service speaks to it. Importing this module loads torch."""

    def __init__(self, host: EngineHost, max_sequences: int) -> None:
        self._host = host
        self._drafter = Drafter(max_sequences)

    @classmethod
    async def load(cls, settings: DraftSettings, name: str, target: ModelFiles, metrics: EngineMetrics) -> DraftModel:
        """Raises StartupError when it cannot be loaded or speaks other tokens than the target."""
        sizes = BatchSizes(settings.draft_slots, settings.draft_batch_tokens)
        quick = settings.model_copy(update={"dtype": _dtype(settings)})
        try:
            host = await EngineHost.load(quick, name, sizes, metrics)
        except EngineError as error:
            raise StartupError(f"draft model {name}: {error}") from error
        require_same_vocabulary(target, host.model)
        host.start()
        return cls(host, settings.max_sequences)

    @property
    def name(self) -> str:
        return self._host.model.name

    def listen(self, on_drafted: Callable[[list[Drafted]], None]) -> None:
        """Call back on the event loop after each step that sampled anything."""

        def on_steps(steps: list[SequenceStep], stats: StepStats) -> None:
            drafted = [Drafted(step.seq_id, step.first_index, step.new_ids) for step in steps if step.new_ids]
            if drafted:
                on_drafted(drafted)

        self._host.listen(on_steps)

    def tell(self, wishes: list[Wish], granted: Callable[[list[Wish]], None]) -> None:
        """The newest wishes, the most urgent first. `granted` is called with those that cannot be fulfilled, behind
        all that was drafted before."""
        refused: list[Wish] = []
        self._host.async_engine.post(
            lambda engine: refused.extend(self._drafter.take(engine, wishes)), lambda: granted(refused)
        )

    def forget(self, request_id: str) -> None:
        self._host.async_engine.post(lambda engine: self._drafter.forget(engine, request_id))

    async def exit_when_broken(self, stall_s: float) -> None:
        """A hung engine cannot be interrupted from inside its process, nor a dead or broken one mended.

        Silence is counted in checks, so that one that was paused with its whole process is not taken for hung.
        """
        silent_checks, progress = 0, self._host.progress_unix_s
        while True:
            await asyncio.sleep(HEALTH_CHECK_S)
            silent_checks = silent_checks + 1 if self._host.progress_unix_s == progress else 0
            progress = self._host.progress_unix_s
            hangs = silent_checks * HEALTH_CHECK_S > HUNG_AFTER * stall_s
            if fault := self._host.fault or ("engine_hangs" if hangs else ""):
                log.error(fault, model=self.name)
                os._exit(1)  # clean-up would wait for what hangs; decode goes on without drafts

    async def stop(self) -> None:
        await self._host.stop()


@dataclass
class _Drafting:
    """One sequence of the draft model. The first `confirmed` of `tokens` were compared with the sequence's own."""

    tokens: list[int]
    sequence: Sequence
    confirmed: int


class Drafter:
    """Runs in the engine thread; owner of the draft model's sequences, whose KV is rebuilt from tokens when missing.

    A sequence that is as far ahead as wanted is paused and keeps its blocks; when blocks are short those that were not
    asked about for longest give up theirs.
    """

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._drafting: OrderedDict[str, _Drafting] = OrderedDict()

    def take(self, engine: Engine, wishes: list[Wish]) -> list[Wish]:
        """Let each sequence go on from its own guess where that agrees, else from what is confirmed.

        Returns the wishes that cannot be fulfilled: longer than the model's context or its cache, say.
        """
        refused: list[Wish] = []
        for wish in wishes:
            try:
                self._take(engine, wish)
            except EngineError as error:
                log.info("draft_left_out", request_id=wish.request_id, reason=str(error))
                self.forget(engine, wish.request_id)
                refused.append(wish)
            except Exception as error:  # the others' wishes are none the worse
                log.error("draft_failed", request_id=wish.request_id, error=repr(error), exc_info=True)
                self.forget(engine, wish.request_id)
                refused.append(wish)
        self._make_room(engine)
        return refused

    def forget(self, engine: Engine, request_id: str) -> None:
        """Give the sequence's blocks back. Unknown ids are ignored."""
        if self._drafting.pop(request_id, None) is not None:
            engine.release(request_id)

    def _take(self, engine: Engine, wish: Wish) -> None:
        """Raises EngineError."""
        drafting = self._drafting.get(wish.request_id)
        if drafting is not None and drafting.tokens is not wish.tokens:  # it began anew, maybe with another prompt
            self.forget(engine, wish.request_id)
            drafting = None
        if wish.ahead == 0:
            engine.pause(wish.request_id)
        elif drafting is None:
            self._begin(engine, wish)
        else:
            self._drafting.move_to_end(wish.request_id)
            self._go_on(engine, drafting, wish)

    def _go_on(self, engine: Engine, drafting: _Drafting, wish: Wish) -> None:
        sequence = drafting.sequence
        if sequence.state in ("failed", "released"):
            raise EngineError("it failed in a step of the draft model")
        confirmed = wish.tokens[drafting.confirmed : wish.confirmed]
        if sequence.token_ids[drafting.confirmed : wish.confirmed] != confirmed:
            engine.rewind(sequence, wish.tokens[: wish.confirmed], pause_after=wish.ahead)
            _require_all(sequence, wish)
        elif sequence.finish_reason is None:  # else it ends where the model thinks that the text ends
            engine.pause(sequence.seq_id)
            missing = wish.confirmed + wish.ahead - len(sequence.token_ids)
            if missing > 0:
                engine.start(sequence, pause_after=missing)
        drafting.confirmed = wish.confirmed

    def _begin(self, engine: Engine, wish: Wish) -> None:
        while len(self._drafting) >= self._max_sequences:
            self.forget(engine, next(iter(self._drafting)))
        capacity = min(engine.context_length, engine.pool.num_blocks * engine.config.block_tokens)
        sequence = engine.new_sequence(
            wish.request_id,
            wish.tokens[: wish.confirmed],
            wish.num_prompt,
            _drafting_params(wish.params, capacity - wish.num_prompt),
            speculate=False,
            pause_after=wish.ahead,
            text=False,
            salt=wish.salt or f"\0{wish.request_id}",  # without a salt nobody says whose it is: nothing is shared
        )
        self._drafting[wish.request_id] = _Drafting(wish.tokens, sequence, wish.confirmed)
        _require_all(sequence, wish)
        engine.start(sequence)

    def _make_room(self, engine: Engine) -> None:
        """Blocks for what the running sequences are about to compute, from those that rest, the oldest first."""
        active = set(engine.active_ids())
        missing = sum(_missing_blocks(engine, d.sequence) for name, d in self._drafting.items() if name in active)
        for request_id in [name for name in self._drafting if name not in active]:
            if missing <= engine.pool.num_free:
                return
            self.forget(engine, request_id)


def _dtype(settings: DraftSettings) -> str:
    """A guess need not be exact: 8-bit products take half the time and memory bandwidth of a step on CPU."""
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    if settings.dtype == "auto" and on_cpu and "fbgemm" in torch.backends.quantized.supported_engines:
        return "int8"
    return settings.dtype


def _drafting_params(params: SamplingParams, room: int) -> SamplingParams:
    """The target's sampling, so that the same noise leads to the same choice wherever the logits allow it.

    Text is not made here: stop strings end nothing, and nobody sees log probabilities.
    """
    return msgspec.structs.replace(params, max_tokens=max(min(params.max_tokens, room), 1), stop=[], logprobs=None)


def _require_all(sequence: Sequence, wish: Wish) -> None:
    """Raises EngineError when the confirmed tokens already end the sequence in the draft model's eyes."""
    if sequence.finish_reason is not None or len(sequence.token_ids) != wish.confirmed:
        raise EngineError(f"sequence {sequence.seq_id} has no room, or no reason, to go on behind its tokens")


def _missing_blocks(engine: Engine, sequence: Sequence) -> int:
    """What it lacks until it pauses."""
    left = (sequence.pause_after or 0) - sequence.num_sampled
    length = min(len(sequence.token_ids) + max(left, 0), sequence.max_length)
    return max(-(-length // engine.config.block_tokens) - len(sequence.block_ids), 0)
