"""The metrics of each service. Names follow vLLM's where they mean the same (`vllm:x` is `headrace_x`); units in names.

A service makes one of the classes at the bottom and passes it, or one of its groups, to whoever measures. Two in one
process need registries of their own.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Info

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
ITL_BUCKETS_S: Final = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
E2E_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
STEP_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TRANSFER_BUCKETS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LAG_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TOKEN_BUCKETS: Final = (
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
)


class ProcessMetrics:
    """What every service reports about itself."""

    def __init__(self, stage: str, instance: str, registry: CollectorRegistry) -> None:
        info = Info("headrace_build", "Version and place of this process", registry=registry)
        info.info({"stage": stage, "instance": instance, "version": metadata.version("headrace")})
        self.event_loop_lag = Histogram(
            "headrace_event_loop_lag_seconds",
            "How late the event loop ran a due timer",
            ["stage"],
            buckets=LAG_BUCKETS_S,
            registry=registry,
        ).labels(stage)
        self.num_running = Gauge(
            "headrace_num_requests_running", "Requests in work at this instance", ["stage"], registry=registry
        ).labels(stage)


class KVTransferMetrics:
    """KV blocks that this process moved or looked for. `hop` names direction and peers, such as `prefill_to_store`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter("headrace_kv_transfer_bytes", "KV bytes moved", ["hop", "transport"], registry=registry)
        self._seconds = Histogram(
            "headrace_kv_transfer_seconds",
            "Seconds of one exchange of KV blocks",
            ["hop", "transport"],
            buckets=TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self.blocks_hit = Counter("headrace_kv_blocks_hit", "Blocks found and used", registry=registry)
        self.blocks_miss = Counter("headrace_kv_blocks_miss", "Blocks wanted and not had", registry=registry)
        self.blocks_checksum_failed = Counter(
            "headrace_kv_blocks_checksum_failed", "Blocks that arrived damaged", registry=registry
        )
        self.transfer_failures = Counter(
            "headrace_kv_transfer_failures", "Exchanges that failed or timed out", ["hop"], registry=registry
        )

    def observe_transfer(self, hop: str, transport: str, n_bytes: int, seconds: float) -> None:
        """Count one exchange, however many blocks it carried."""
        self._bytes.labels(hop, transport).inc(n_bytes)
        self._seconds.labels(hop, transport).observe(seconds)


class QueueMetrics:
    """Work that a stage takes from its queue."""

    def __init__(self, stage: str, registry: CollectorRegistry) -> None:
        self.queue_time = Histogram(
            "headrace_request_queue_time_seconds",
            "From publication of the work to its start",
            ["stage"],
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        ).labels(stage)
        self.claims = Counter(
            "headrace_request_claims", "Requests that this instance took over", ["stage"], registry=registry
        ).labels(stage)
        self.redeliveries = Counter(
            "headrace_request_redeliveries", "Deliveries after the first", ["stage"], registry=registry
        ).labels(stage)
        self.lost = Counter(
            "headrace_request_lost_claims",
            "Requests dropped because another holder or a canceller was first",
            ["stage"],
            registry=registry,
        ).labels(stage)


class EngineMetrics:
    """The engine's steps and its block pool."""

    def __init__(self, stage: str, registry: CollectorRegistry, process: ProcessMetrics) -> None:
        self.num_running = process.num_running
        self.num_waiting = Gauge(
            "headrace_num_requests_waiting", "Requests that wait in the engine for blocks", ["stage"], registry=registry
        ).labels(stage)
        self.step_seconds = Histogram(
            "headrace_engine_step_seconds",
            "Seconds of one forward over the batch",
            ["stage"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        ).labels(stage)
        self.batch_tokens = Histogram(
            "headrace_engine_batch_tokens",
            "Tokens in one forward",
            ["stage"],
            buckets=TOKEN_BUCKETS,
            registry=registry,
        ).labels(stage)
        self.kv_cache_usage = Gauge(
            "headrace_kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", ["stage"], registry=registry
        ).labels(stage)
        self.prefix_cache_queries = Counter(
            "headrace_prefix_cache_queries", "Tokens looked up in this worker's own cache", ["stage"], registry=registry
        ).labels(stage)
        self.prefix_cache_hits = Counter(
            "headrace_prefix_cache_hits", "Tokens whose KV was in this worker's own cache", ["stage"], registry=registry
        ).labels(stage)
        self.prompt_tokens_computed = Counter(
            "headrace_prompt_tokens_computed", "Prompt tokens that ran through the model", ["stage"], registry=registry
        ).labels(stage)
        self.prompt_tokens_cached = Counter(
            "headrace_prompt_tokens_cached", "Prompt tokens whose KV came from a store", ["stage"], registry=registry
        ).labels(stage)


class SpeculationMetrics:
    """Drafted tokens, by who proposed them, and whether there were any in time. Names are vLLM's where it has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"headrace_spec_decode_{name}", what, labels, registry=registry)

        self._drafts = counter("num_drafts", "Proposals that were verified, wholly or in part", "proposer")
        self._draft_tokens = counter("num_draft_tokens", "Drafted tokens that were verified", "proposer")
        self._accepted_tokens = counter("num_accepted_tokens", "Drafted tokens that were kept", "proposer")
        self._wasted_tokens = counter("num_wasted_tokens", "Drafted tokens verified for nothing", "proposer")
        self._tokens_at = counter("num_draft_tokens_per_pos", "Drafted tokens by place in the draft", "position")
        self._accepted_at = counter("num_accepted_tokens_per_pos", "Kept tokens by place in the draft", "position")
        self._guesses = counter("num_guesses", "Guesses of ended requests, chosen or not", "proposer")
        self._late = counter("num_late_guesses", "Guesses all of whose tokens were decided already", "proposer")
        self._rows = counter("num_sequence_steps", "Steps of sequences that could use drafts")
        self._ready = counter("num_ready_sequence_steps", "Those of them that had a proposal in time")
        self._draft_length = Gauge(
            "headrace_spec_decode_draft_length",
            "Drafted tokens verified in a step of a sequence, mean over the last steps",
            registry=registry,
        )
        self._drafters_asked = Gauge(
            "headrace_spec_decode_drafters_asked",
            "1 while drafters are asked for guesses, 0 while they are left alone",
            registry=registry,
        )

    def observe(self, proposer: str, drafted: int, accepted: int) -> None:
        """One step of a sequence verified so many tokens of a proposal, of which the first `accepted` were right."""
        self._drafts.labels(proposer).inc()
        self._draft_tokens.labels(proposer).inc(drafted)
        self._accepted_tokens.labels(proposer).inc(accepted)
        self._wasted_tokens.labels(proposer).inc(drafted - accepted)
        for position in range(drafted):
            self._tokens_at.labels(position).inc()
        for position in range(accepted):
            self._accepted_at.labels(position).inc()

    def observe_step(self, sequences: int, ready: int, draft_length: float) -> None:
        """A step held so many sequences that could use drafts, `ready` of them with a proposal."""
        self._rows.inc(sequences)
        self._ready.inc(ready)
        self._draft_length.set(draft_length)

    def observe_drafters(self, *, asked: bool) -> None:
        """Whether drafters are asked for guesses now."""
        self._drafters_asked.set(asked)

    def observe_guesses(self, proposer: str, guesses: int, late: int) -> None:
        """What one proposer guessed for a request that has ended."""
        self._guesses.labels(proposer).inc(guesses)
        self._late.labels(proposer).inc(late)


class GatewayMetrics:
    """What clients see. The label `model_name` is vLLM's; unknown models are never a label."""

    def __init__(self, instance: str, registry: CollectorRegistry = REGISTRY) -> None:
        model = ["model_name"]
        self.process = ProcessMetrics("gateway", instance, registry)
        self.ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From arrival at the gateway to the first token",
            model,
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl = Histogram(
            "headrace_inter_token_latency_seconds",
            "Between token records of one request",
            model,
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "headrace_e2e_request_latency_seconds",
            "From arrival at the gateway to the end of the request",
            model,
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens accepted", model, registry=registry)
        self.generation_tokens = Counter("headrace_generation_tokens", "Tokens sent", model, registry=registry)
        self.finished = Counter(
            "headrace_request_success",
            "Requests that ended, by reason",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.rejected = Counter(
            "headrace_requests_rejected",
            "Requests refused before acceptance, by error code",
            ["code"],
            registry=registry,
        )
        self.disconnects = Counter("headrace_client_disconnects", "Clients that left before the end", registry=registry)


class PrefillMetrics:
    def __init__(self, instance: str, registry: CollectorRegistry = REGISTRY) -> None:
        self.process = ProcessMetrics("prefill", instance, registry)
        self.queue = QueueMetrics("prefill", registry)
        self.engine = EngineMetrics("prefill", registry, self.process)
        self.kv = KVTransferMetrics(registry)
        self.prefill_time = Histogram(
            "headrace_request_prefill_time_seconds",
            "From the start of a request's prefill to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )


class DecodeMetrics:
    def __init__(self, instance: str, registry: CollectorRegistry = REGISTRY) -> None:
        self.process = ProcessMetrics("decode", instance, registry)
        self.queue = QueueMetrics("decode", registry)
        self.engine = EngineMetrics("decode", registry, self.process)
        self.kv = KVTransferMetrics(registry)
        self.speculation = SpeculationMetrics(registry)
        self.decode_time = Histogram(
            "headrace_request_decode_time_seconds",
            "From the start of a request's decode to its end",
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self.append_seconds = Histogram(
            "headrace_log_append_seconds",
            "One compare-and-set append to a request's log",
            buckets=TRANSFER_BUCKETS_S,
            registry=registry,
        )


class DraftMetrics:
    def __init__(self, instance: str, registry: CollectorRegistry = REGISTRY) -> None:
        self.process = ProcessMetrics("draft", instance, registry)
        self.engine = EngineMetrics("draft", registry, self.process)
        self.contexts = Counter("headrace_draft_contexts", "Contexts received", registry=registry)
        self.contexts_dropped = Counter(
            "headrace_draft_contexts_dropped", "Contexts overtaken by newer ones before work began", registry=registry
        )
        self.proposed_tokens = Counter(
            "headrace_draft_proposed_tokens", "Tokens proposed", ["proposer"], registry=registry
        )
        self.propose_seconds = Histogram(
            "headrace_draft_propose_seconds",
            "From a context's arrival to the first proposal after it",
            ["proposer"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self.model_tokens = Counter(
            "headrace_draft_model_tokens", "Tokens that the draft model made", registry=registry
        )
        self.model_tokens_wasted = Counter(
            "headrace_draft_model_tokens_wasted",
            "Those that were refuted, or decided otherwise, before decode could hear of them",
            registry=registry,
        )
        self.alternatives_used = Counter(
            "headrace_draft_alternatives_used",
            "Wrong guesses of the draft model for which it had told how the right token goes on",
            registry=registry,
        )
        self.model_rests = Counter(
            "headrace_draft_model_rests",
            "Contexts for which the draft model was not asked, as another's guess was thought as good",
            registry=registry,
        )
        self.resends = Counter(
            "headrace_draft_resends", "Sequences that had to be told again from the beginning", registry=registry
        )
        self.sequences = Gauge("headrace_draft_sequences", "Sequences remembered", registry=registry)


class KVStoreMetrics:
    def __init__(self, instance: str, registry: CollectorRegistry = REGISTRY) -> None:
        self.process = ProcessMetrics("kvstore", instance, registry)
        self.kv = KVTransferMetrics(registry)
        self.capacity_bytes = Gauge("headrace_kv_store_capacity_bytes", "Size of the pool", registry=registry)
        self.used_bytes = Gauge("headrace_kv_store_used_bytes", "Bytes of the pool that hold blocks", registry=registry)
        self.blocks = Gauge("headrace_kv_store_blocks", "Blocks held", registry=registry)
        self.leases = Gauge("headrace_kv_store_leases", "Leases alive", registry=registry)
        self.leases_given_back = Counter(
            "headrace_kv_store_leases_given_back", "Leases of ended requests, ended by the store", registry=registry
        )
        self.blocks_evicted = Counter("headrace_kv_blocks_evicted", "Blocks evicted for room", registry=registry)
        self.puts_refused = Counter(
            "headrace_kv_store_puts_refused", "Puts refused, by reason", ["reason"], registry=registry
        )
        self.index_failures = Counter(
            "headrace_kv_index_failures", "Writes to the index that failed and were put off", registry=registry
        )
