"""The engine alone, as the baseline of the pipeline: one aggregated worker in this process, no queue, no HTTP.

`python -m loadgen.engine_bench` runs the closed loops of `python -m loadgen bench` on it, so that the figures stand
side by side: what the pipeline costs in TTFT and time per output token, and what it gains by separate pools.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from shared.engine import Engine, EngineConfig
from shared.engine.config import Dtype
from shared.models import resolve_model
from shared.protocol.jobs import SamplingParams

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


class LoopResult(msgspec.Struct, frozen=True):
    """One closed loop. Latencies in milliseconds, rates in tokens per second."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms_p50: float
    ttft_ms_p95: float
    tpot_ms_p50: float
    tpot_ms_p95: float
    output_tokens_per_s: float


def run_loop(
    engine: Engine, concurrency: int, requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> LoopResult:
    """Keep `concurrency` sequences in the engine until `requests` have been served. Blocks."""
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=output_tokens, seed=seed, temperature=0.0, ignore_eos=True)
    running: dict[str, Request] = {}
    done: list[Request] = []
    began_s = time.monotonic()
    sent = 0
    while len(done) < requests:
        while len(running) < concurrency and sent < requests:
            name = f"r{sent}"
            ids = [draw.randrange(*VOCABULARY) for _ in range(prompt_tokens)]
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
    ttft = [request.ttft_s * 1e3 for request in done]
    tpot = [request.tpot_s * 1e3 for request in done]
    return LoopResult(
        concurrency=concurrency,
        requests=len(done),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_ms_p50=median(ttft),
        ttft_ms_p95=_p95(ttft),
        tpot_ms_p50=median(tpot),
        tpot_ms_p95=_p95(tpot),
        output_tokens_per_s=len(done) * output_tokens / took_s,
    )


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def main(
    model: Annotated[str, typer.Option(help="A name that HEADRACE_MODEL takes")] = "smollm2-135m-instruct",
    dtype: Annotated[str, typer.Option(help="fp16-packed or fp32")] = "fp16-packed",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    requests: Annotated[int, typer.Option(min=2, help="Requests per concurrency")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seed: Annotated[int, typer.Option()] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file")] = None,
) -> None:
    """Run the closed loops at 1, 4 and 8 and print a table."""
    files = resolve_model(model)
    config = EngineConfig(
        model_path=files.path,
        model_name=files.name,
        fingerprint=files.fingerprint,
        kv_memory_bytes=1 << 30,
        dtype=msgspec.convert(dtype, type=Dtype),
        threads=threads,
    )
    engine = Engine.load(config)
    run_loop(engine, 1, 2, prompt_tokens, 4, seed)  # first touches of memory
    results = [run_loop(engine, c, max(requests, 2 * c), prompt_tokens, output_tokens, seed + c) for c in (1, 4, 8)]
    table = Table("concurrency", "requests", "TTFT p50/p95 ms", "TPOT p50/p95 ms", "output tokens/s")
    for r in results:
        table.add_row(
            str(r.concurrency),
            str(r.requests),
            f"{r.ttft_ms_p50:.0f} / {r.ttft_ms_p95:.0f}",
            f"{r.tpot_ms_p50:.1f} / {r.tpot_ms_p95:.1f}",
            f"{r.output_tokens_per_s:.1f}",
        )
    Console().print(f"engine alone: {files.name}, {dtype}, {threads} thread(s), {prompt_tokens} prompt tokens")
    Console().print(table)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))


if __name__ == "__main__":
    typer.run(main)
