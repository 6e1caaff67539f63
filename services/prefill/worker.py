"""Serves prefill work: pull, find cached blocks, compute the rest in chunks, hand over to decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from services.prefill.settings import PrefillSettings
from shared.blocks import BlockKey, KVClient, block_keys
from shared.bus import Bus, BusError, Delivery, DuplicateWork, LogState, PublishFailed, QueueFull
from shared.engine import Sequence as EngineSequence
from shared.engine import SequenceStep
from shared.protocol.blocks import BlockRef, Manifest
from shared.protocol.jobs import DecodeJob, GenerationRequest, decode_request
from shared.protocol.records import Ended, Tokens, Usage
from shared.telemetry import attributes as attr
from shared.telemetry import extract_context, inject_headers, record_span, tracer
from shared.telemetry.metrics import PrefillMetrics
from shared.worker.block_push import BlockPush
from shared.worker.engine_host import EngineHost
from shared.worker.holdings import Holding, Holdings

PULL_WAIT_S = 1.0
RETRY_S = 0.25
DEPTH_CHECK_S = 0.5

log = structlog.get_logger(__name__)


class PrefillWorker:
    """Owner of the prefill side of this process: its holdings and their tasks.

    State of a request lives in its log and its holding; a killed worker leaves nothing behind that another needs.
    """

    def __init__(
        self, bus: Bus, host: EngineHost, kv: KVClient, settings: PrefillSettings, worker: str, metrics: PrefillMetrics
    ) -> None:
        self._bus = bus
        self._host = host
        self._kv = kv
        self._settings = settings
        self._metrics = metrics
        self.holdings = Holdings(bus, "prefill", worker, metrics.queue, lambda: host.progress_unix_s, kv.release)
        self.last_error = ""
        self._depth_read_s = 0.0
        self._jobs_waiting = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then hand running work back."""
        queue = self._bus.request_queue(self._host.model.name)
        await queue.open()
        await self._bus.on_cancel(self.holdings.on_cancel)
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(self.holdings.renew_forever())
            while not stop.is_set():
                free = self._settings.prefill_slots - len(self.holdings)
                try:
                    if free <= 0 or self.holdings.stalled or await self._decode_is_behind():
                        await self.holdings.wait_freed(RETRY_S)
                        continue
                    deliveries = await queue.pull(free, PULL_WAIT_S)
                except BusError as error:
                    self.last_error = str(error)
                    log.warning("pull_failed", error=str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                for delivery in deliveries:
                    await self._take(delivery, tasks)
            renewing.cancel()
            await queue.close()
            await self.holdings.give_all_back(self._settings.drain_s)

    async def _decode_is_behind(self) -> bool:
        """Whether so many jobs wait for decode that more would only age there. Looked up twice a second."""
        now = time.monotonic()
        if now - self._depth_read_s >= DEPTH_CHECK_S:
            self._depth_read_s = now
            self._jobs_waiting = await self._bus.queue_depth("decode", self._host.model.name)
        return self._jobs_waiting >= self._settings.max_jobs_waiting

    async def _take(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        """Claim one delivery and serve it in a task of its own."""
        try:
            request = decode_request(delivery.data)
            assumed = LogState(last_seq=request.log_seq)
            holding = await self.holdings.take(delivery, request, assumed)
        except BusError as error:
            self.last_error = str(error)
            log.warning("take_failed", error=str(error))
            return
        if holding is not None:
            tasks.create_task(self._serve(holding), name=holding.request_id)

    async def _serve(self, holding: Holding) -> None:
        request, delivery = holding.request, holding.delivery
        context = extract_context(delivery.headers)
        now = time.time()
        self._metrics.queue.queue_time.observe(max(now - delivery.published_unix_s, 0.0))
        record_span(
            "queue.prefill",
            delivery.published_unix_s,
            now,
            context=context,
            attributes={attr.REQUEST_ID: request.request_id, attr.DELIVERY: delivery.num_delivered},
        )
        with tracer().start_as_current_span(
            "prefill",
            context=context,
            attributes={
                attr.REQUEST_ID: request.request_id,
                attr.EPOCH: holding.epoch,
                attr.GEN_AI_REQUEST_MODEL: request.model,
                attr.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_ids),
            },
        ):
            try:
                await self.holdings.serve(holding, self._prefill)
            except BusError as error:
                self.last_error = str(error)
                log.warning("request_left_to_redelivery", request_id=request.request_id, error=str(error))

    async def _prefill(self, holding: Holding) -> None:
        request = holding.request
        keys = block_keys(self._host.layout.layout_id, request.salt, request.prompt_ids, self._settings.block_tokens)
        if holding.state.output_ids:  # an earlier holder wrote the first token and died before its hand-over
            stored = await self._kv.find([key.key for key in keys])
            await self._kv.lease(request.request_id, [ref.key for ref in stored if ref], self._lease_s(request))
            await self._hand_over(holding, keys, stored, holding.state.output_ids, cached_tokens=0)
            return
        found = await self._find_prefix(request, keys)
        sequence = await self._host.open(
            request.request_id,
            list(request.prompt_ids),
            len(request.prompt_ids),
            request.params,
            prefill_only=True,
            begin=not found,
            pin=True,
        )
        push = BlockPush(self._host, self._kv, sequence, request.request_id, self._lease_s(request), pinned=True)
        try:
            cached = 0
            if found:
                cached = await self._load_cached(request, sequence, found, push)
                await self._host.begin(sequence, cached)
            final = await self._compute(sequence, keys, push)
            await holding.log.append(Tokens(epoch=holding.epoch, index=0, ids=list(final.new_ids), text=final.text))
            self._metrics.prefill_time.observe(time.time() - holding.claimed_unix_s)
            if final.finish_reason is not None:
                await holding.log.append(
                    Ended(
                        epoch=holding.epoch,
                        reason=final.finish_reason,
                        usage=Usage(len(request.prompt_ids), len(final.new_ids), cached_tokens=cached),
                    )
                )
                await push.finish()
                await self._kv.release(request.request_id)
                return
            push.offer(list(keys[push.block_count :]))
            refs = await push.finish()
            await self._hand_over(holding, keys, refs, list(final.new_ids), cached)
        finally:
            await asyncio.shield(push.abandon())
            await asyncio.shield(self._host.release(sequence))

    @staticmethod
    def _lease_s(request: GenerationRequest) -> float:
        return max(request.deadline_unix_s - time.time(), 1.0)

    async def _find_prefix(self, request: GenerationRequest, keys: Sequence[BlockKey]) -> list[BlockRef]:
        """The longest run of stored blocks from the start of the prompt.

        At least the prompt's last token is computed, since its logits give the first output token.
        """
        whole = (len(request.prompt_ids) - 1) // self._settings.block_tokens
        refs = await self._kv.find([key.key for key in keys[:whole]])
        found: list[BlockRef] = []
        for ref in refs:
            if ref is None:
                break
            found.append(ref)
        return found

    async def _load_cached(
        self, request: GenerationRequest, sequence: EngineSequence, found: list[BlockRef], push: BlockPush
    ) -> int:
        """Fetch stored blocks into the sequence's; tokens that need no computing, up to the first block that failed."""
        with tracer().start_as_current_span("kv.get", attributes={attr.BLOCKS: len(found)}) as span:
            await self._kv.lease(request.request_id, [ref.key for ref in found], self._lease_s(request))
            buffers = [self._host.block_buffer(block_id) for block_id in sequence.block_ids[: len(found)]]
            arrived = await self._kv.get(found, buffers, timeout_s=self._settings.kv_timeout_s)
            usable = arrived.index(False) if False in arrived else len(arrived)
            span.set_attribute(attr.BLOCK_HITS, usable)
        push.already_stored(found[:usable])
        cached = usable * self._settings.block_tokens
        self._metrics.engine.prompt_tokens_cached.inc(cached)
        return cached

    async def _compute(self, sequence: EngineSequence, keys: list[BlockKey], push: BlockPush) -> SequenceStep:
        """Follow the chunks, pushing each block that a chunk filled; the step with the first token."""
        began, chunk, done = time.time(), 0, sequence.num_computed
        while True:
            step = await self._host.feed.next(sequence.seq_id)
            now = time.time()
            record_span(
                "prefill.chunk",
                began,
                now,
                attributes={attr.CHUNK_INDEX: chunk, attr.CHUNK_TOKENS: step.num_computed - done},
            )
            self._metrics.engine.prompt_tokens_computed.inc(step.num_computed - done)
            began, chunk, done = now, chunk + 1, step.num_computed
            push.offer(list(keys[push.block_count : step.num_computed // self._settings.block_tokens]))
            if step.new_ids:
                return step

    async def _hand_over(
        self,
        holding: Holding,
        keys: list[BlockKey],
        refs: Sequence[BlockRef | None],
        output_ids: list[int],
        cached_tokens: int,
    ) -> None:
        """Publish the decode job; on return it is stored, and the request may be acked. Waits out a full queue."""
        blocks = [
            ref
            if ref is not None
            else BlockRef(key.key, key.n_tokens, self._host.layout.block_bytes, checksum=0, places=[])
            for key, ref in zip(keys, refs, strict=True)
        ]
        job = DecodeJob(
            request=holding.request,
            manifest=Manifest(self._host.layout.layout_id, len(holding.request.prompt_ids), blocks),
            output_ids=output_ids,
            epoch=holding.epoch,
            log_seq=holding.log.last_seq,
            published_unix_s=time.time(),
            cached_tokens=cached_tokens,
        )
        while True:
            try:
                await self._bus.publish_job(job, inject_headers())
                return
            except DuplicateWork:
                return
            except (QueueFull, PublishFailed) as error:
                self.last_error = str(error)
                log.warning("hand_over_waits", request_id=holding.request_id, error=str(error))
                await asyncio.sleep(RETRY_S)
