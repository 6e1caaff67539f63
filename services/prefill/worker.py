"""Serves prefill work: pull, find cached blocks, compute the rest in chunks, hand over to decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from services.prefill.back_pressure import most_jobs_waiting
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
from shared.worker.lease_releases import LeaseReleases
from shared.worker.stage_worker import RETRY_S, StageWorker, Work

DEPTH_CHECK_S = 0.5


@dataclass(frozen=True)
class _Prefilled:
    """What decode needs to go on from a prompt: its blocks, the first token, and how much of it was cached."""

    refs: list[BlockRef]
    output_ids: list[int]
    cached_tokens: int


class PrefillWorker(StageWorker):
    """Turns prompts into KV blocks and first tokens, and hands them to decode."""

    def __init__(
        self, bus: Bus, host: EngineHost, kv: KVClient, settings: PrefillSettings, worker: str, metrics: PrefillMetrics
    ) -> None:
        self._releases = LeaseReleases(kv)
        super().__init__(
            "prefill",
            bus,
            host,
            worker,
            metrics.queue,
            slots=settings.prefill_slots,
            stall_s=settings.stall_s,
            drain_s=settings.drain_s,
            on_dropped=self._releases.add,
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

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._releases.run()]

    async def _may_pull(self) -> bool:
        """Not when so many jobs wait for decode that more would only age there: a client whose first token has come
        shall get the next ones.

        Looked up twice a second. What was handed over since is taken to wait, and looked up before that stops anything.
        """
        now, model = time.monotonic(), self._host.model.name
        most = most_jobs_waiting(self._settings.max_jobs_waiting, self._bus.statuses.live("decode", model))
        if self._jobs_waiting >= most or now - self._depth_read_s >= DEPTH_CHECK_S:
            self._depth_read_s = now
            self._jobs_waiting = await self._bus.queue_depth("decode", model)
        return self._jobs_waiting < most

    async def _prefill(self, holding: Holding) -> None:
        request = holding.request
        keys = block_keys(self._host.layout.layout_id, request.salt, request.prompt_ids, self._settings.block_tokens)
        if holding.state.output_ids:  # an earlier holder wrote the first token and died before its hand-over
            stored = await self._kv.find([key.key for key in keys])
            stored_keys = [ref.key for ref in stored if ref]
            await self._kv.lease(request.request_id, stored_keys, _lease_s(holding), tenant=request.tenant)
            await self._hand_over(holding, keys, stored, holding.state.output_ids, cached_tokens=0)
            return
        prefilled = await self._compute_prompt(holding, keys)
        if prefilled is None:
            await self._releases.add(request.request_id)
        else:
            await self._hand_over(holding, keys, prefilled.refs, prefilled.output_ids, prefilled.cached_tokens)

    async def _compute_prompt(self, holding: Holding, keys: list[BlockKey]) -> _Prefilled | None:
        """Compute and store the prompt's blocks and write the first token into the log. None when that ended it.

        Afterwards, in whatever way it ends, the engine holds nothing of the request. One that is suspected uses nothing
        that others computed: wrong KV would convict it, and each later request with that prefix. What it puts takes the
        place of other contents under the same keys.
        """
        request = holding.request
        found = [] if holding.alone else await self._find_prefix(request, keys)
        stored_tokens = len(found) * self._settings.block_tokens
        sequence = await self._host.open(
            request.request_id,
            list(request.prompt_ids),
            len(request.prompt_ids),
            request.params,
            salt=None if holding.alone else request.salt,
            prefill_only=True,
            begin_from=stored_tokens,
            pin=True,
            ahead=holding.epoch > 1,  # it was claimed before, and its client has waited since
        )
        own = sequence.num_cached
        push = BlockPush(
            self._host,
            self._kv,
            sequence,
            request.request_id,
            _lease_s(holding),
            tenant=request.tenant,
            pinned=True,
            timeout_s=self._settings.kv_timeout_s,
        )
        try:
            loaded = await self._load_cached(holding, sequence, own, found, push) if found else 0
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
                await push.linger(self._settings.kv_timeout_s)
                return None
            push.offer(list(keys[push.block_count :]))
            return _Prefilled(await push.finish(), list(final.new_ids), cached)
        finally:
            self._host.pause(sequence)  # no chunk more, even if a transfer takes its time to end
            try:
                await run_to_end(push.abandon)
            finally:
                self._host.release(sequence)

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
        self, holding: Holding, sequence: EngineSequence, own: int, found: list[BlockRef], push: BlockPush
    ) -> int:
        """Fetch stored blocks behind the first `own` tokens, which the worker has cached; the tokens that they hold.

        Stops at the first that failed. What no store holds any more is left to be pushed from this worker's copy.
        """
        found_keys = [ref.key for ref in found]
        tenant = holding.request.tenant
        leased = await self._kv.lease(holding.request_id, found_keys, _lease_s(holding), tenant=tenant)
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
        """Publish the decode job; on return it is stored, and the request may be acked.

        Waits out a full queue as long as the request lives.
        """
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
            first_claim_unix_s=holding.first_claim_unix_s,
        )
        while True:
            try:
                await self._bus.publish_job(job, inject_headers())
                self._jobs_waiting += 1
                return
            except DuplicateWork:
                return
            except MessageTooLarge as error:
                raise Unservable("request_too_large", str(error)) from error
            except (QueueFull, PublishFailed) as error:
                self._note("hand_over_waits", error)
                await asyncio.sleep(RETRY_S)


def _lease_s(holding: Holding) -> float:
    """How long stores are to keep the prompt's blocks: a job may wait for decode until the request must have ended.

    Decode's first renewal makes it shorter, and the stores themselves end the leases of requests that have ended.
    """
    return max(holding.deadline_unix_s - time.time(), 1.0)
