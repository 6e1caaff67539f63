"""An engine as a worker uses it: loaded off the event loop, with a queue of steps per sequence and waiting for room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import structlog
import torch

from shared.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    OutOfBlocks,
    PromptTooLong,
    Sequence,
    SequenceStep,
    SequenceTooLarge,
    StepStats,
    UnknownSequence,
)
from shared.engine.config import Dtype
from shared.models import ModelFiles, resolve_model
from shared.protocol.blocks import KVLayout
from shared.protocol.jobs import SamplingParams
from shared.settings import EngineSettings
from shared.telemetry.metrics import EngineMetrics
from shared.worker.holdings import Unservable
from shared.worker.step_feed import StepFeed

ROOM_CHECK_S = 0.25
"""How often a sequence that waits for blocks looks again, besides each time that blocks are freed."""

GIB = 1 << 30

log = structlog.get_logger(__name__)


def most_held(slots: int) -> int:
    """Requests that a worker with so many slots may hold at once: as many again when it takes over from others."""
    return 2 * slots


class StepListener(Protocol):
    def __call__(self, steps: list[SequenceStep], stats: StepStats) -> None: ...


@dataclass(frozen=True)
class BatchSizes:
    """What one forward may hold: sequences, tokens, and drafted tokens of one sequence."""

    sequences: int
    tokens: int
    drafts: int = 0

    @classmethod
    def of_worker(cls, slots: int, tokens: int, drafts: int = 0) -> BatchSizes:
        """Of one that may hold more than its slots when it takes over: they take part in its steps at once, as far as
        half of a step's tokens are left for prompts."""
        return cls(max(slots, min(most_held(slots), tokens // 2)), tokens, drafts)


@dataclass(frozen=True)
class _Opening:
    """A sequence that wants blocks. `entered`, on the event loop, tells that it has them, or why it never will."""

    sequence: Sequence
    begin_from: int | None
    entered: asyncio.Future[None]

    def enter(self, engine: Engine) -> None:
        """Raises OutOfBlocks when there are too few now."""
        engine.admit(self.sequence)
        if self.begin_from is not None and self.sequence.num_cached >= self.begin_from:
            engine.start(self.sequence)

    def settle(self, error: Exception | None = None) -> None:
        """May be called from any thread."""

        def tell() -> None:
            if self.entered.done():
                return
            if error is None:
                self.entered.set_result(None)
            else:
                self.entered.set_exception(error)

        self.entered.get_loop().call_soon_threadsafe(tell)


@dataclass(frozen=True)
class PoolUse:
    """Blocks: all, held by sequences, and held by nobody but kept for their contents; the rest are empty."""

    total: int
    used: int
    evictable: int


class EngineHost:
    """Owner of the engine of one worker process.

    Sequences are opened (blocks allocated), begun, followed through `feed`, and released.
    """

    def __init__(self, engine: Engine, model: ModelFiles, metrics: EngineMetrics) -> None:
        self.model = model
        self.layout: KVLayout = engine.layout
        self.feed = StepFeed()
        self._metrics = metrics
        self._line: dict[str, _Opening] = {}
        """Who waits for blocks, in the order of their coming. The engine's thread alone touches it."""
        self._private = itertools.count()
        self._told_queries = self._told_hits = 0
        self._listeners: list[StepListener] = []
        self._engine = engine
        self.async_engine = AsyncEngine(engine, on_steps=self._on_steps, on_failure=self.feed.fail)

    @classmethod
    async def load(
        cls, settings: EngineSettings, model_name: str, sizes: BatchSizes, metrics: EngineMetrics
    ) -> EngineHost:
        """Resolve the model and load it in a thread. Raises the named errors of `shared.models` and `shared.engine`."""
        began = time.monotonic()
        model = await asyncio.to_thread(resolve_model, model_name)
        engine = await asyncio.to_thread(Engine.load, engine_config(settings, model, sizes))
        took_s = round(time.monotonic() - began, 1)
        log.info("engine_loaded", model=model.name, layout=engine.layout.layout_id, took_s=took_s)
        return cls(engine, model, metrics)

    def start(self) -> None:
        self.async_engine.start()

    async def stop(self) -> None:
        await self.async_engine.stop()

    def listen(self, listener: StepListener) -> None:
        """Call back on the event loop after each step, beside the feed."""
        self._listeners.append(listener)

    @property
    def progress_unix_s(self) -> float:
        return self.async_engine.progress_unix_s

    @property
    def fault(self) -> str:
        """Why nothing can be computed here any more; empty as long as all is well."""
        return self.async_engine.fault

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def pool(self) -> PoolUse:
        """Blocks of the pool; read from the event loop, so it may lag the engine by a step."""
        pool = self._engine.pool
        return PoolUse(pool.num_blocks, pool.num_used, pool.num_idle)

    async def open(
        self,
        seq_id: str,
        token_ids: list[int],
        num_prompt: int,
        params: SamplingParams,
        *,
        salt: str | None,
        prefill_only: bool = False,
        speculate: bool = False,
        begin_from: int | None = None,
        pin: bool = False,
        ahead: bool = False,
    ) -> Sequence:
        """A new sequence with its blocks and its queue in `feed`; waits for room as long as the caller lets it.

        Whoever waits is served in the order of coming: a large one is not passed by small ones that would fit.

        The KV of its first `num_cached` tokens, whole blocks, is there already: never write to those. If that is at
        least `begin_from` tokens it joins the batch at once: one turn of the engine instead of two; otherwise, and
        without that number, call `begin`. Cached blocks are shared within one `salt`; None shares with nobody, so all
        is computed. With `pin` it is never preempted, so its blocks may be read at any time. One that is `ahead` takes
        part in steps before those that are not, once it has its blocks. When the known tokens end it already,
        `finish_reason` is set and it holds nothing. Release it in any case; a caller that is cancelled in here leaves
        nothing behind. Raises Unservable, EngineError.
        """
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        made: list[Sequence] = []
        if salt is None:
            salt = f"\0{seq_id}\0{next(self._private)}"  # no tenant has a NUL in its name

        def create(engine: Engine) -> Sequence:
            sequence = engine.new_sequence(
                seq_id,
                token_ids,
                num_prompt,
                params,
                prefill_only=prefill_only,
                speculate=speculate,
                salt=salt,
                ahead=ahead,
            )
            made.append(sequence)
            # From here, so that it comes behind the last step of an earlier sequence of this id and before its own.
            loop.call_soon_threadsafe(self.feed.open, seq_id)
            if pin:
                engine.pin(seq_id)
            opening = _Opening(sequence, begin_from, entered)
            if sequence.finish_reason is None:
                self._line[seq_id] = opening
                self._let_in(engine)
            else:
                opening.settle()
            return sequence

        try:
            sequence = await self.async_engine.call(create)
            while not entered.done():
                await asyncio.wait({entered}, timeout=ROOM_CHECK_S)
                if not entered.done():
                    await self.async_engine.call(self._let_in)
            entered.result()
        except BaseException as error:
            entered.cancel()
            self._release(seq_id, made)  # a call whose caller is cancelled still runs, and this one runs behind it
            if isinstance(error, (PromptTooLong, SequenceTooLarge)):
                raise Unservable("context_length_exceeded", str(error)) from error
            raise
        return sequence

    def _let_in(self, engine: Engine) -> None:
        """In the engine's thread: blocks for those that wait, up to the first that does not fit."""
        while self._line:
            seq_id, opening = next(iter(self._line.items()))
            error: Exception | None = None
            try:
                opening.enter(engine)
            except OutOfBlocks:
                return
            except Exception as failure:  # its own, and told to it alone
                error = failure
            del self._line[seq_id]
            opening.settle(error)

    @asynccontextmanager
    async def pinned(self, sequence: Sequence) -> AsyncIterator[list[int]]:
        """The sequence's complete blocks, safe from preemption inside the block; none if it was preempted or ended."""
        try:
            complete = await self.async_engine.call(Engine.pin, sequence.seq_id)
        except UnknownSequence:
            yield []
            return
        except asyncio.CancelledError:
            self._unpin(sequence)  # the call still runs
            raise
        try:
            yield complete
        finally:
            self._unpin(sequence)

    def _unpin(self, sequence: Sequence) -> None:
        self.async_engine.post(lambda engine: engine.unpin(sequence.seq_id))

    def block_buffer(self, block_id: int) -> Any:
        """The block's bytes inside the paged cache, while a sequence holds it: to be read once they are final, and to
        be written before the sequence begins, behind what it has cached."""
        return self._engine.block_buffer(block_id)

    async def begin(self, sequence: Sequence, loaded_tokens: int) -> None:
        """Tell how much of its KV cache was loaded and let it join the batch."""

        def start(engine: Engine) -> None:
            if loaded_tokens:
                engine.set_loaded(sequence, loaded_tokens)
            engine.start(sequence)

        await self.async_engine.call(start)

    def pause(self, sequence: Sequence) -> None:
        """Take it out of the batch after the step in progress, without waiting. It keeps its blocks."""
        self.async_engine.post(lambda engine: engine.pause(sequence.seq_id))

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back after the step in progress, without waiting. Idempotent; also ends a running sequence.

        Nobody may use its blocks any more. What is opened later, under the same id too, comes behind it.
        """
        self._release(sequence.seq_id)

    def _release(self, seq_id: str, made: list[Sequence] | None = None) -> None:
        """With `made` only if that is not empty by then: what an opening did not make is another's."""

        def release(engine: Engine) -> None:
            if made is None or made:
                self._line.pop(seq_id, None)
                engine.release(seq_id)
                self._let_in(engine)

        def released() -> None:
            if made is None or made:
                self.feed.close(seq_id)

        self.async_engine.post(release, released)

    def _on_steps(self, steps: list[SequenceStep], stats: StepStats) -> None:
        self._metrics.step_seconds.observe(stats.duration_s)
        self._metrics.batch_tokens.observe(stats.batch_tokens)
        self._metrics.num_running.set(stats.running)
        self._metrics.num_waiting.set(stats.waiting)
        self._metrics.kv_cache_usage.set(self.pool.used / max(self.pool.total, 1))
        queries, hits = self._engine.prefix_queries, self._engine.prefix_hits
        self._metrics.prefix_cache_queries.inc(queries - self._told_queries)
        self._metrics.prefix_cache_hits.inc(hits - self._told_hits)
        self._told_queries, self._told_hits = queries, hits
        self.feed.deliver(steps)
        for listener in self._listeners:
            listener(steps, stats)


def engine_config(settings: EngineSettings, model: ModelFiles, sizes: BatchSizes) -> EngineConfig:
    """The engine's part of a service's settings, with `auto` decided for this machine."""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.device != "auto":
        device = settings.device
    dtype: Dtype = "bf16" if device == "cuda" else "fp16-packed"
    if settings.dtype != "auto":
        dtype = settings.dtype
    return EngineConfig(
        model_path=model.path,
        model_name=model.name,
        fingerprint=model.fingerprint,
        device=device,
        dtype=dtype,
        attention=settings.attention,
        exactness=settings.exactness,
        cuda_graphs=settings.cuda_graphs,
        threads=settings.threads,
        block_tokens=settings.block_tokens,
        kv_memory_bytes=int(settings.kv_memory_gib * GIB),
        max_batch_tokens=sizes.tokens,
        max_running=sizes.sequences,
        max_draft_tokens=sizes.drafts,
        prefix_caching=settings.prefix_caching,
    )
