"""Serves prefill work: pull, find cached blocks, compute the rest in chunks, hand over to decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.prefill.settings import PrefillSettings
from shared.blocks import BlockKey, KVClient, block_keys
from shared.bus import Bus, Delivery, DuplicateWork, LogState, MessageTooLarge, PublishFailed, QueueFull, WorkQueue
from shared.engine import Sequence as EngineSequence
from shared.engine import SequenceStep
from shared.protocol.blocks import BlockRef, Manifest
from shared.protocol.jobs import DecodeJob, GenerationRequest, decode_request
from shared.protocol.records import Ended, Tokens, Usage
from shared.telemetry import attributes as attr
from shared.telemetry import inject_headers, record_span, tracer
from shared.telemetry.metrics import PrefillMetrics
from shared.worker.block_push import BlockPush
from shared.worker.cleanup import run_to_end
from shared.worker.engine_host import EngineHost
from shared.worker.holdings import Holding, Unservable
from shared.worker.stage_worker import RETRY_S, StageWorker, Work

DEPTH_CHECK_S = 0.5


class PrefillWorker(StageWorker):
    """Turns prompts into KV blocks and first tokens, and hands them to decode."""

    def __init__(
        self, bus: Bus, host: EngineHost, kv: KVClient, settings: PrefillSettings, worker: str, metrics: PrefillMetrics
    ) -> None:
        super().__init__(
            "prefill",
            bus,
            host,
            worker,
            metrics.queue,
            slots=settings.prefill_slots,
            stall_s=settings.stall_s,
            drain_s=settings.drain_s,
            on_dropped=kv.release,
        )
        self._kv = kv
        self._settings = settings
        self._metrics = metrics
        self._depth_read_s = 0.0
        self._jobs_waiting = 0

    def _queue(self) -> WorkQueue:
        return self._bus.request_queue(self._host.model.name)

    def _read(self, delivery: Delivery) -> Work:
        request = decode_request(delivery.data)
        return Work(request, LogState(last_seq=request.log_seq), self._prefill)

    async def _may_pull(self) -> bool:
        """Not when so many jobs wait for decode that more would only age there. Looked up twice a second."""
        now = time.monotonic()
        if now - self._depth_read_s >= DEPTH_CHECK_S:
            self._depth_read_s = now
            self._jobs_waiting = await self._bus.queue_depth("decode", self._host.model.name)
        return self._jobs_waiting < self._settings.max_jobs_waiting

    async def _prefill(self, holding: Holding) -> None:
        request = holding.request
        keys = block_keys(self._host.layout.layout_id, request.salt, request.prompt_ids, self._settings.block_tokens)
        if holding.state.output_ids:  # an earlier holder wrote the first token and died before its hand-over
            stored = await self._kv.find([key.key for key in keys])
            await self._kv.lease(request.request_id, [ref.key for ref in stored if ref], self._lease_s(request))
            await self._hand_over(holding, keys, stored, holding.state.output_ids, cached_tokens=0)
            return
        found = await self._find_prefix(request, keys)
        stored_tokens = len(found) * self._settings.block_tokens
        sequence = await self._host.open(
            request.request_id,
            list(request.prompt_ids),
            len(request.prompt_ids),
            request.params,
            salt=request.salt,
            prefill_only=True,
            begin_from=stored_tokens,
            pin=True,
        )
        own = sequence.num_cached
        push = BlockPush(self._host, self._kv, sequence, request.request_id, self._lease_s(request), pinned=True)
        try:
            loaded = await self._load_cached(request, sequence, own, found, push) if found else 0
            if own < stored_tokens:
                await self._host.begin(sequence, own + loaded)
            push.offer(list(keys[push.block_count : (own + loaded) // self._settings.block_tokens]))
            final = await self._compute(sequence, keys, push, loaded)
            cached = final.num_cached + loaded
            await holding.log.append(
                Tokens(
                    epoch=holding.epoch,
                    index=0,
                    ids=list(final.new_ids),
                    text=final.text,
                    logprobs=list(final.logprobs),
                )
            )
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
            await run_to_end(push.abandon, lambda: self._host.release(sequence))

    def _lease_s(self, request: GenerationRequest) -> float:
        """A lease that nobody releases ends soon; one that ended too early costs a recomputation at worst."""
        left_s = request.deadline_unix_s - time.time()
        return max(min(left_s, self._settings.hand_over_lease_s), 1.0)

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
        self, request: GenerationRequest, sequence: EngineSequence, own: int, found: list[BlockRef], push: BlockPush
    ) -> int:
        """Fetch stored blocks behind the first `own` tokens, which the worker has cached; the tokens that they hold.

        Stops at the first that failed. What no store holds any more is left to be pushed from this worker's copy.
        """
        leased = await self._kv.lease(request.request_id, [ref.key for ref in found], self._lease_s(request))
        ours = min(own // self._settings.block_tokens, len(found))
        kept = leased.index(False) if False in leased[:ours] else ours
        usable = ours
        if ours < len(found):
            with tracer().start_as_current_span("kv.get", attributes={attr.BLOCKS: len(found) - ours}) as span:
                buffers = [self._host.block_buffer(block_id) for block_id in sequence.block_ids[ours : len(found)]]
                arrived = await self._kv.get(found[ours:], buffers, timeout_s=self._settings.kv_timeout_s)
                usable += arrived.index(False) if False in arrived else len(arrived)
                span.set_attribute(attr.BLOCK_HITS, usable - ours)
        push.already_stored(found[: usable if kept == ours else kept])
        loaded = (usable - ours) * self._settings.block_tokens
        self._metrics.engine.prompt_tokens_cached.inc(loaded)
        return loaded

    async def _compute(
        self, sequence: EngineSequence, keys: list[BlockKey], push: BlockPush, loaded: int
    ) -> SequenceStep:
        """Follow the chunks, pushing each block that a chunk filled; the step with the first token."""
        began, chunk, done = time.time(), 0, loaded
        while True:
            step = await self._host.feed.next(sequence.seq_id)
            now = time.time()
            computed = step.num_computed - step.num_cached - done
            record_span(
                "prefill.chunk",
                began,
                now,
                attributes={attr.CHUNK_INDEX: chunk, attr.CHUNK_TOKENS: computed},
            )
            self._metrics.engine.prompt_tokens_computed.inc(computed)
            began, chunk, done = now, chunk + 1, done + computed
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
            except MessageTooLarge as error:
                raise Unservable("request_too_large", str(error)) from error
            except (QueueFull, PublishFailed) as error:
                self._note("hand_over_waits", error)
                await asyncio.sleep(RETRY_S)
