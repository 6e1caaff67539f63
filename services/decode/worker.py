"""Serves decode work: pull, fetch blocks, run in the batch, append tokens to the log, store finished blocks back."""

from __future__ import annotations

import asyncio
import time

import structlog
from opentelemetry import trace

from services.decode.draft_link import DraftLink
from services.decode.settings import DecodeSettings
from shared.blocks import BlockKey, KVClient, block_keys
from shared.bus import Bus, BusError, Delivery, LogState
from shared.engine import Sequence
from shared.protocol.blocks import Manifest
from shared.protocol.jobs import DecodeJob, decode_job
from shared.protocol.records import Ended, FinishReason, Tokens, Usage
from shared.telemetry import attributes as attr
from shared.telemetry import extract_context, record_span, tracer
from shared.telemetry.metrics import DecodeMetrics
from shared.worker.block_push import BlockPush
from shared.worker.engine_host import EngineHost
from shared.worker.holdings import Holding, Holdings

PULL_WAIT_S = 1.0
RETRY_S = 0.25
OTHER_LAYOUT_DELAY_S = 1.0

log = structlog.get_logger(__name__)


class DecodeWorker:
    """Owner of the decode side of this process: its holdings and their tasks.

    The log is the truth: what it holds is never sampled again, and what it refuses is dropped.
    """

    def __init__(
        self, bus: Bus, host: EngineHost, kv: KVClient, settings: DecodeSettings, worker: str, metrics: DecodeMetrics
    ) -> None:
        self._bus = bus
        self._host = host
        self._kv = kv
        self._settings = settings
        self._metrics = metrics
        self.drafts = DraftLink(bus, host.async_engine, settings, host.model.name, worker)
        self.holdings = Holdings(bus, "decode", worker, metrics.queue, lambda: host.progress_unix_s, kv.release)
        self.last_error = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then hand running work back."""
        queue = self._bus.job_queue(self._host.model.name)
        await queue.open()
        await self.drafts.open()
        await self._bus.on_cancel(self.holdings.on_cancel)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self.holdings.renew_forever()),
                tasks.create_task(self._renew_leases()),
            ]
            while not stop.is_set():
                free = self._settings.decode_slots - len(self.holdings)
                if free <= 0 or self.holdings.stalled:
                    await self.holdings.wait_freed(RETRY_S)
                    continue
                try:
                    deliveries = await queue.pull(free, PULL_WAIT_S)
                except BusError as error:
                    self.last_error = str(error)
                    log.warning("pull_failed", error=str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                for delivery in deliveries:
                    await self._take(delivery, tasks)
            for task in background:
                task.cancel()
            await queue.close()
            await self.holdings.give_all_back(self._settings.drain_s)

    async def _take(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        """Claim one delivery and serve it in a task of its own."""
        try:
            job = decode_job(delivery.data)
            if job.manifest.layout_id != self._host.layout.layout_id:
                # Other numerics could change the output, so these blocks and this request are not ours to serve.
                self.last_error = (
                    f"{job.request.request_id} has KV layout {job.manifest.layout_id}, this worker has "
                    f"{self._host.layout.layout_id}: start prefill and decode with the same model, dtype and block size"
                )
                log.error("layout_refused", request_id=job.request.request_id, error=self.last_error)
                await delivery.give_back(OTHER_LAYOUT_DELAY_S)
                return
            assumed = LogState(epoch=job.epoch, last_seq=job.log_seq, output_ids=list(job.output_ids))
            holding = await self.holdings.take(delivery, job.request, assumed)
        except BusError as error:
            self.last_error = str(error)
            log.warning("take_failed", error=str(error))
            return
        if holding is not None:
            tasks.create_task(self._serve(holding, job), name=holding.request_id)

    async def _serve(self, holding: Holding, job: DecodeJob) -> None:
        request, delivery = holding.request, holding.delivery
        context = extract_context(delivery.headers)
        now = time.time()
        self._metrics.queue.queue_time.observe(max(now - delivery.published_unix_s, 0.0))
        record_span(
            "queue.decode",
            delivery.published_unix_s,
            now,
            context=context,
            attributes={attr.REQUEST_ID: request.request_id, attr.DELIVERY: delivery.num_delivered},
        )
        with tracer().start_as_current_span(
            "decode",
            context=context,
            attributes={
                attr.REQUEST_ID: request.request_id,
                attr.EPOCH: holding.epoch,
                attr.GEN_AI_REQUEST_MODEL: request.model,
                attr.RESUMED_TOKENS: len(holding.state.output_ids),
            },
        ):
            try:
                await self.holdings.serve(holding, lambda held: self._decode(held, job))
            except BusError as error:
                self.last_error = str(error)
                log.warning("request_left_to_redelivery", request_id=request.request_id, error=str(error))
            finally:
                await self.drafts.leave(request.request_id)

    async def _decode(self, holding: Holding, job: DecodeJob) -> None:
        request = holding.request
        tokens = [*request.prompt_ids, *holding.state.output_ids]
        sequence = await self._host.open(
            request.request_id,
            tokens,
            len(request.prompt_ids),
            request.params,
            speculate=request.speculation == "auto" and self._settings.speculation == "auto",
        )
        push = BlockPush(self._host, self._kv, sequence, request.request_id, self._settings.lease_s, pinned=False)
        try:
            if sequence.finish_reason is not None:  # the last holder died between its last token and its last word
                await self._end(holding, job, sequence.finish_reason, len(holding.state.output_ids), 0, 0)
                return
            loaded = await self._load(sequence, request.salt, job.manifest, push)
            self.drafts.join(request, tokens)
            await self._host.begin(sequence, loaded)
            await self.drafts.ask(request.request_id)
            await self._emit(holding, job, sequence, push)
        finally:
            await asyncio.shield(push.abandon())
            await asyncio.shield(self._host.release(sequence))
            await asyncio.shield(self._kv.release(request.request_id))

    async def _load(self, sequence: Sequence, salt: str, manifest: Manifest, push: BlockPush) -> int:
        """Fetch the stored prefix into the sequence's blocks; the tokens whose KV is loaded. The rest is recomputed.

        The manifest covers the prompt; blocks of tokens that an earlier holder generated are looked up by key.
        """
        block_tokens = self._settings.block_tokens
        wanted = manifest.blocks
        beyond = len(sequence.token_ids) // block_tokens
        if beyond * block_tokens > manifest.n_tokens:
            keys = block_keys(self._host.layout.layout_id, salt, sequence.token_ids, block_tokens)
            stored = await self._kv.find([key.key for key in keys[:beyond]])
            known = manifest.n_tokens // block_tokens
            wanted = [*manifest.blocks[:known]]
            for ref in stored[known:]:
                if ref is None:
                    wanted += manifest.blocks[known:] if len(wanted) == known else []
                    break
                wanted.append(ref)
        usable = next((i for i, ref in enumerate(wanted) if not ref.places), len(wanted))
        wanted = wanted[:usable]
        if not wanted:
            return 0
        with tracer().start_as_current_span("kv.get", attributes={attr.BLOCKS: len(wanted)}) as span:
            buffers = [self._host.block_buffer(block_id) for block_id in sequence.block_ids[: len(wanted)]]
            arrived = await self._kv.get(wanted, buffers, timeout_s=self._settings.kv_timeout_s)
            usable = arrived.index(False) if False in arrived else len(arrived)
            span.set_attribute(attr.BLOCK_HITS, usable)
        push.already_stored([ref for ref in wanted[:usable] if ref.n_tokens == block_tokens])
        return min(sum(ref.n_tokens for ref in wanted[:usable]), len(sequence.token_ids) - 1)

    async def _emit(self, holding: Holding, job: DecodeJob, sequence: Sequence, push: BlockPush) -> None:
        """Append what the engine makes until the sequence ends. One append at a time; newer tokens ride in the next."""
        request_id = holding.request_id
        emitted = len(holding.state.output_ids)
        steps = drafted = accepted = 0
        while True:
            batch = [await self._host.feed.next(request_id), *self._host.feed.ready(request_id)]
            ids: list[int] = []
            for step in batch:
                ids += step.new_ids
                drafted += step.drafted
                accepted += step.accepted
                proposer = await self.drafts.grew(request_id, list(step.new_ids), step.drafted, step.accepted)
                if step.drafted:
                    self._metrics.speculation.observe(proposer, step.drafted, step.accepted)
            steps += len(batch)
            if ids:
                began = time.monotonic()
                text = "".join(step.text for step in batch)
                await holding.log.append(Tokens(epoch=holding.epoch, index=emitted, ids=ids, text=text))
                self._metrics.append_seconds.observe(time.monotonic() - began)
                emitted += len(ids)
            self._offer_full_blocks(sequence, holding.request.salt, batch[-1].num_computed, push)
            reason = batch[-1].finish_reason
            if reason is not None:
                await self._end(holding, job, reason, emitted, drafted, accepted)
                self._metrics.decode_time.observe(time.time() - holding.claimed_unix_s)
                self._annotate(steps, emitted, drafted, accepted, reason)
                await push.finish()
                return

    def _offer_full_blocks(self, sequence: Sequence, salt: str, num_computed: int, push: BlockPush) -> None:
        full = num_computed // self._settings.block_tokens
        if full <= push.block_count:
            return
        covered = sequence.token_ids[: full * self._settings.block_tokens]
        keys: list[BlockKey] = block_keys(self._host.layout.layout_id, salt, covered, self._settings.block_tokens)
        push.offer(list(keys[push.block_count : full]))

    async def _end(
        self, holding: Holding, job: DecodeJob, reason: FinishReason, completion: int, drafted: int, accepted: int
    ) -> None:
        usage = Usage(
            prompt_tokens=len(holding.request.prompt_ids),
            completion_tokens=completion,
            cached_tokens=job.cached_tokens,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        await holding.log.append(Ended(epoch=holding.epoch, reason=reason, usage=usage))

    @staticmethod
    def _annotate(steps: int, emitted: int, drafted: int, accepted: int, reason: str) -> None:
        trace.get_current_span().set_attributes(
            {
                attr.STEPS: steps,
                attr.GEN_AI_USAGE_OUTPUT_TOKENS: emitted,
                attr.DRAFTED_TOKENS: drafted,
                attr.ACCEPTED_TOKENS: accepted,
                attr.GEN_AI_RESPONSE_FINISH_REASONS: [reason],
            }
        )

    async def _renew_leases(self) -> None:
        """Keep the blocks of running requests from eviction; a dead worker's leases end by themselves."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            for request_id in self.holdings.ids():
                await self._kv.renew(request_id, self._settings.lease_s)
