"""Closed loops on the engine, in one thread, no queue, no HTTP: the baseline of the pipeline's figures.

They are those of `python -m loadgen bench`, so that both stand side by side: what the pipeline costs in TTFT and time
per output token, and what it gains by separate pools.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from statistics import median

from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.subjects import Subjects
from loadgen.engine_bench.timing import p95
from shared.engine import Engine
from shared.engine.config import Dtype
from shared.protocol.jobs import SamplingParams

CONCURRENCIES = (1, 4, 8)

VOCABULARY = (1000, 30_000)
"""Token ids that prompts are drawn from: plain words of every model that fits here."""


@dataclass
class Request:
    """Times in seconds on the monotonic clock."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(len(self.arrivals_s) - 1, 1)


@dataclass(frozen=True)
class Loop:
    """One closed loop. Latencies in milliseconds."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    output_tokens_per_s: float


def measure(subjects: Subjects, plan: Plan, dtype: Dtype) -> Section:
    run_loop(subjects.engine(dtype), 1, 2, plan.prompt_tokens, 4, plan.seed)  # first touches of memory
    requests = [max(plan.requests, 2 * n) for n in CONCURRENCIES]
    loops = [
        run_loop(subjects.engine(dtype), n, count, plan.prompt_tokens, plan.output_tokens, plan.seed + n)
        for n, count in zip(CONCURRENCIES, requests, strict=True)
    ]
    lines = [
        Line("requests", "", requests),
        Line("TTFT, p50", "ms", [median(loop.ttft_ms) for loop in loops]),
        Line("TTFT, p95", "ms", [p95(loop.ttft_ms) for loop in loops]),
        Line("TPOT, p50", "ms", [median(loop.tpot_ms) for loop in loops]),
        Line("TPOT, p95", "ms", [p95(loop.tpot_ms) for loop in loops]),
        Line("output", "tokens/s", [loop.output_tokens_per_s for loop in loops]),
    ]
    title = f"closed loops, {plan.prompt_tokens} + {plan.output_tokens}, {dtype}"
    return Section("loops", title, [f"{n} in flight" for n in CONCURRENCIES], lines)


def run_loop(
    engine: Engine, concurrency: int, requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> Loop:
    """Keep `concurrency` sequences in the engine until `requests` have been served. Blocks."""
    draw = random.Random(seed)
    low, high = VOCABULARY if engine.vocab_size >= VOCABULARY[1] else (0, engine.vocab_size)
    params = SamplingParams(max_tokens=output_tokens, seed=seed, temperature=0.0, ignore_eos=True)
    running: dict[str, Request] = {}
    done: list[Request] = []
    began_s = time.monotonic()
    sent = 0
    while len(done) < requests:
        while len(running) < concurrency and sent < requests:
            name = f"r{sent}"
            ids = [draw.randrange(low, high) for _ in range(prompt_tokens)]
            sequence = engine.new_sequence(name, ids, len(ids), params, speculate=False)
            running[name] = Request(time.monotonic())
            engine.start(sequence)
            sent += 1
        for step in engine.step():
            now_s = time.monotonic()
            running[step.seq_id].arrivals_s += [now_s] * len(step.new_ids)
            if step.finish_reason is not None:
                engine.release(step.seq_id)
                done.append(running.pop(step.seq_id))
    took_s = time.monotonic() - began_s
    return Loop(
        ttft_ms=[request.ttft_s * 1e3 for request in done],
        tpot_ms=[request.tpot_s * 1e3 for request in done],
        output_tokens_per_s=len(done) * output_tokens / took_s,
    )
