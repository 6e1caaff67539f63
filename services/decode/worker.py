"""Serves decode work: pull, fetch blocks, run in the batch, append tokens to the log, store finished blocks back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry import trace

from services.decode.load_turns import LoadTurns
from services.decode.settings import DecodeSettings
from services.decode.speculation import Outcome, Speculation
from shared.blocks import BlockKey, KVClient, block_keys
from shared.bus import Bus, Delivery, LogState, WorkQueue
from shared.engine import Sequence, SequenceStep
from shared.protocol.blocks import BlockRef, Manifest, Place
from shared.protocol.jobs import DecodeJob, decode_job
from shared.protocol.records import Claimed, Ended, FinishReason, Tokens, Usage
from shared.telemetry import attributes as attr
from shared.telemetry import tracer
from shared.telemetry.metrics import DecodeMetrics
from shared.worker.block_push import BlockPush
from shared.worker.cleanup import run_to_end
from shared.worker.engine_host import EngineHost
from shared.worker.holdings import Holding
from shared.worker.lease_releases import LeaseReleases
from shared.worker.stage_worker import OtherLayout, StageWorker, Work

LEASE_CHECK_S = 0.5
MAX_RECORD_TOKENS = 512
"""Tokens in one record of the log, so that one made during an outage fits a message: 0.6 KB each with 20 logprobs."""

log = structlog.get_logger(__name__)


@dataclass
class _Stored:
    """What stores may hold of a running request: the prompt's blocks, and those that this worker found or put."""

    job: DecodeJob
    push: BlockPush | None = None

    def at(self, places: list[Place]) -> list[bytes]:
        """The keys of the blocks that were last seen at one of these places."""
        refs = [*self.job.manifest.blocks, *(self.push.refs if self.push is not None else ())]
        return list(dict.fromkeys(ref.key for ref in refs if any(place in places for place in ref.places)))


class DecodeWorker(StageWorker):
    """Turns blocks into tokens. The log is the truth: what it holds is never sampled again."""

    def __init__(
        self, bus: Bus, host: EngineHost, kv: KVClient, settings: DecodeSettings, worker: str, metrics: DecodeMetrics
    ) -> None:
        self._releases = LeaseReleases(kv)
        super().__init__(
            "decode",
            bus,
            host,
            worker,
            metrics.queue,
            slots=settings.decode_slots,
            stall_s=settings.stall_s,
            drain_s=settings.drain_s,
            on_dropped=self._releases.add,
        )
        self._kv = kv
        self._settings = settings
        self._metrics = metrics
        self._turns = LoadTurns()
        self._stored: dict[str, _Stored] = {}
        """By request, as long as this worker works on it."""
        self.speculation = Speculation(bus, host, settings, worker, metrics.speculation)

    def _queue(self) -> WorkQueue:
        return self._bus.job_queue(self._host.model.name)

    async def _prepare(self) -> None:
        await self.speculation.open()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._renew_leases(), self._releases.run(), *self.speculation.background()]

    def _read(self, delivery: Delivery) -> Work:
        job = decode_job(delivery.data)
        ours = self._host.layout.layout_id
        if job.manifest.layout_id != ours:
            raise OtherLayout(
                f"{job.request.request_id} has KV layout {job.manifest.layout_id}, this worker has {ours}: "
                "start prefill and decode with the same model, dtype and block size"
            )
        return Work(job.request, _assumed(job), lambda holding: self._decode(holding, job))

    async def _decode(self, holding: Holding, job: DecodeJob) -> None:
        self._stored[holding.request_id] = _Stored(job)
        try:
            end_turn = await self._turns.take(job.manifest, self._settings.block_tokens)
            try:
                await self._generate(holding, job, end_turn)
            finally:
                end_turn()
        finally:
            del self._stored[holding.request_id]
        await self._releases.add(holding.request_id)

    async def _generate(self, holding: Holding, job: DecodeJob, on_loaded: Callable[[], None]) -> None:
        """One that is suspected uses nothing that others computed: wrong KV would convict it, and each later request
        with that prefix."""
        request = holding.request
        tokens = [*request.prompt_ids, *holding.state.output_ids]
        sequence = await self._host.open(
            request.request_id,
            tokens,
            len(request.prompt_ids),
            request.params,
            salt=None if holding.alone else request.salt,
            speculate=self.speculation.applies_to(holding),
        )
        push = BlockPush(
            self._host,
            self._kv,
            sequence,
            request.request_id,
            self._settings.lease_s,
            tenant=request.tenant,
            pinned=False,
            timeout_s=self._settings.kv_timeout_s,
        )
        self._stored[request.request_id].push = push
        try:
            if sequence.finish_reason is not None:  # the last holder died between its last token and its last word
                await self._end(holding, job, sequence.finish_reason, len(holding.state.output_ids), Outcome())
                return
            self.speculation.begin(sequence, request)
            loaded = 0 if holding.alone else await self._load(sequence, request.salt, job.manifest, push)
            await self._host.begin(sequence, loaded)
            on_loaded()
            await self._emit(holding, job, sequence, push)
        finally:
            self._host.pause(sequence)  # no step more, even if a transfer takes its time to end
            try:
                await run_to_end(push.abandon)
            finally:
                self._host.release(sequence)
                self.speculation.end(request.request_id)

    async def _load(self, sequence: Sequence, salt: str, manifest: Manifest, push: BlockPush) -> int:
        """Fetch the stored prefix into the sequence's blocks, behind what this worker has cached; the tokens whose KV
        is there then. The rest is recomputed.

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
        placed = next((i for i, ref in enumerate(wanted) if not ref.places), len(wanted))
        own = sequence.num_cached // block_tokens
        fetched = await self._fetch(wanted[own:placed], sequence.block_ids[own:placed])
        usable = own + len(fetched)
        push.already_stored([ref for ref in wanted[: min(placed, usable)] if ref.n_tokens == block_tokens])
        return min(sequence.num_cached + sum(ref.n_tokens for ref in fetched), len(sequence.token_ids) - 1)

    async def _fetch(self, refs: list[BlockRef], block_ids: list[int]) -> list[BlockRef]:
        """Fetch blocks into the cache; those that are there now, up to the first that did not come."""
        if not refs:
            return []
        with tracer().start_as_current_span("kv.get", attributes={attr.BLOCKS: len(refs)}) as span:
            buffers = [self._host.block_buffer(block_id) for block_id in block_ids]
            arrived = await self._kv.get(refs, buffers, timeout_s=self._settings.kv_timeout_s)
            usable = arrived.index(False) if False in arrived else len(arrived)
            span.set_attribute(attr.BLOCK_HITS, usable)
        return refs[:usable]

    async def _emit(self, holding: Holding, job: DecodeJob, sequence: Sequence, push: BlockPush) -> None:
        """Append what the engine makes until the sequence ends. One append at a time; newer tokens ride in the next."""
        request_id = holding.request_id
        emitted = len(holding.state.output_ids)
        steps, outcome = 0, Outcome()
        while True:
            batch = [await self._host.feed.next(request_id), *self._host.feed.ready(request_id)]
            for step in batch:
                outcome.add(step)
                self.speculation.grew(step)
            steps += len(batch)
            for record in token_records(batch, holding.epoch, emitted):
                began = time.monotonic()
                await holding.log.append(record)
                self._metrics.append_seconds.observe(time.monotonic() - began)
                emitted += len(record.ids)
            self._offer_full_blocks(sequence, holding.request.salt, batch[-1].num_computed, push)
            reason = batch[-1].finish_reason
            if reason is not None:
                await self._end(holding, job, reason, emitted, outcome)
                self._metrics.decode_time.observe(time.time() - holding.claimed_unix_s)
                self._annotate(steps, emitted, outcome, reason)
                await push.linger(self._settings.kv_timeout_s)
                return

    def _offer_full_blocks(self, sequence: Sequence, salt: str, num_computed: int, push: BlockPush) -> None:
        full = num_computed // self._settings.block_tokens
        if full <= push.block_count:
            return
        covered = sequence.token_ids[: full * self._settings.block_tokens]
        keys: list[BlockKey] = block_keys(self._host.layout.layout_id, salt, covered, self._settings.block_tokens)
        push.offer(list(keys[push.block_count : full]))

    async def _end(
        self, holding: Holding, job: DecodeJob, reason: FinishReason, completion: int, outcome: Outcome
    ) -> None:
        usage = Usage(
            prompt_tokens=len(holding.request.prompt_ids),
            completion_tokens=completion,
            cached_tokens=job.cached_tokens,
            drafted_tokens=outcome.drafted.total(),
            accepted_tokens=outcome.accepted.total(),
        )
        await holding.log.append(Ended(epoch=holding.epoch, reason=reason, usage=usage))

    @staticmethod
    def _annotate(steps: int, emitted: int, outcome: Outcome, reason: str) -> None:
        span = trace.get_current_span()
        for proposer, drafted in outcome.drafted.items():
            span.set_attribute(f"{attr.PROPOSER}.{proposer}.drafted_tokens", drafted)
            span.set_attribute(f"{attr.PROPOSER}.{proposer}.accepted_tokens", outcome.accepted[proposer])
        span.set_attributes(
            {
                attr.STEPS: steps,
                attr.GEN_AI_USAGE_OUTPUT_TOKENS: emitted,
                attr.DRAFTED_TOKENS: outcome.drafted.total(),
                attr.ACCEPTED_TOKENS: outcome.accepted.total(),
                attr.GEN_AI_RESPONSE_FINISH_REASONS: [reason],
            }
        )

    async def _renew_leases(self) -> None:
        """Keep the blocks of running requests from eviction; a dead worker's leases end by themselves.

        The first renewal comes soon after the claim: it cuts prefill's lease, which reaches to the deadline, to ours. A
        store in which the lease has ended meanwhile, since nobody renewed it or the store was out of reach, gives it
        again for what it still has.
        """
        renewed_s: dict[str, float] = {}
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            held = self.holdings.ids()
            renewed_s = {request_id: at_s for request_id, at_s in renewed_s.items() if request_id in held}
            for request_id in held:
                if time.monotonic() - renewed_s.get(request_id, -math.inf) >= self._settings.lease_s / 3:
                    renewed_s[request_id] = time.monotonic()
                    await self._renew_lease(request_id)

    async def _renew_lease(self, request_id: str) -> None:
        lost = await self._kv.renew(request_id, self._settings.lease_s)
        stored = self._stored.get(request_id)  # none once its work is over and its lease released
        if not lost or stored is None or not (keys := stored.at(lost)):
            return
        held = await self._kv.lease(request_id, keys, self._settings.lease_s, tenant=stored.job.request.tenant)
        if any(held):
            log.info("lease_taken_again", request_id=request_id, blocks=sum(held), gone=len(held) - sum(held))


def _assumed(job: DecodeJob) -> LogState:
    """How the log stood at hand-over, as far as it matters: whose claim was the first is not told, only when."""
    claims = [Claimed(job.epoch, "prefill", "", job.first_claim_unix_s)] if job.first_claim_unix_s else []
    return LogState(epoch=job.epoch, claims=claims, last_seq=job.log_seq, output_ids=list(job.output_ids))


def token_records(steps: list[SequenceStep], epoch: int, index: int) -> Iterator[Tokens]:
    """What the steps made, from output token `index` on, in as few records as the bound allows; no step is split."""
    held: list[SequenceStep] = []
    for step in [*steps, None]:
        held_tokens = sum(len(s.new_ids) for s in held)
        if held_tokens and (step is None or held_tokens + len(step.new_ids) > MAX_RECORD_TOKENS):
            ids = [token for s in held for token in s.new_ids]
            logprobs = [token for s in held for token in s.logprobs]
            yield Tokens(epoch=epoch, index=index, ids=ids, text="".join(s.text for s in held), logprobs=logprobs)
            index += len(ids)
            held = []
        if step is not None:
            held.append(step)
