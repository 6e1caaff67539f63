"""Prefill of a long prompt beside the machine's own matrix-product rate: a big sgemm, and the model's own products."""

from __future__ import annotations

from functools import partial

import torch

from loadgen.engine_bench.counting import causal_attention_flops
from loadgen.engine_bench.errors import MeasurementError
from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.products import Products
from loadgen.engine_bench.section import Line, Section, Value
from loadgen.engine_bench.steps import has_room
from loadgen.engine_bench.subjects import PACKED, Subjects
from loadgen.engine_bench.timing import Contender, Times, interleave
from loadgen.engine_bench.transformers_peer import ATTENTIONS
from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner

TOKENS = 1024
SGEMM_SIZE = 2048
_SGEMM_FLOPS = 2 * SGEMM_SIZE**3


def measure(subjects: Subjects, plan: Plan) -> Section:
    """Raises MeasurementError when the prompt does not fit."""
    chunk = subjects.config("fp16-packed").max_batch_tokens
    ids = (subjects.prose * (1 + TOKENS // len(subjects.prose)))[:TOKENS]
    left, right = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE)
    contenders: dict[str, Contender] = {"sgemm": Contender(partial(torch.mm, left, right))}
    flops: dict[str, float] = {"sgemm": _SGEMM_FLOPS}
    for dtype in PACKED:
        runner, products = subjects.runner(dtype), Products(subjects.runner(dtype))
        if not has_room(runner, 1, TOKENS):
            raise MeasurementError(f"a prompt of {TOKENS} tokens does not fit the model or the KV cache")
        prefill(runner, ids[:chunk], chunk)  # sizes are proven at first use
        contenders[dtype] = Contender(partial(prefill, runner, ids, chunk))
        flops[dtype] = products.flops(TOKENS, 1) + _attention_flops(runner)
        contenders[_products(dtype)] = Contender(products.call(chunk, 0))
        flops[_products(dtype)] = products.flops(chunk, 0)
    for name in ATTENTIONS:
        contenders[name] = subjects.transformers.prefill(name, ids)
        flops[name] = flops["fp16-packed"]
    times = interleave(contenders, plan.long_rounds, threads=subjects.threads, warm_ups=0)
    return _section(times, flops, chunk)


def prefill(runner: ModelRunner, ids: list[int], chunk: int) -> None:
    """Feed a prompt as the scheduler would; the last row's logits are computed."""
    blocks = list(range(-(-len(ids) // runner.cache.block_tokens)))
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        last = start + len(part) == len(ids)
        runner.forward([SequenceRows(part, start, blocks, 1 if last else 0)])


def _attention_flops(runner: ModelRunner) -> int:
    layout = runner.layout
    return causal_attention_flops(TOKENS, layout.layers, runner.model.query_heads, layout.head_dim)


def _section(times: dict[str, Times], flops: dict[str, float], chunk: int) -> Section:
    faster = min(ATTENTIONS, key=lambda name: times[name].median_s)
    names = [*PACKED, faster]
    rate = {name: flops[name] / t.median_s / 1e9 for name, t in times.items()}

    def against_products(measured: dict[str, float]) -> list[Value]:
        return [measured[_products(dtype)] for dtype in PACKED]

    shares = {_products(dtype): 100 * rate[dtype] / rate[_products(dtype)] for dtype in PACKED}
    lines = [
        Line("whole prompt", "CPU s", [times[n].cpu_ms / 1e3 for n in names]),
        Line("whole prompt", "wall s", [times[n].wall_ms / 1e3 for n in names]),
        Line("prefill", "tokens/s", [TOKENS / times[n].median_s for n in names]),
        Line("products and attention, GFLOP", "", [flops[n] / 1e9 for n in names]),
        Line("rate", "GFLOP/s", [rate[n] for n in [*names, "sgemm"]]),
        Line(f"own products alone, {chunk} rows", "GFLOP/s", against_products(rate)),
        Line("prefill / own products", "%", against_products(shares)),
        Line("prefill / sgemm", "%", [100 * rate[n] / rate["sgemm"] for n in names]),
    ]
    columns = [*PACKED, f"TF {faster}", f"sgemm {SGEMM_SIZE}"]
    notes = [
        "Attention's operations are those of causal pairs: half of all.",
        "TF: Transformers in fp32, the whole prompt at once, the faster of sdpa and eager.",
    ]
    return Section("prefill", f"prefill, {TOKENS} tokens in chunks of {chunk}", columns, lines, notes)


def _products(dtype: str) -> str:
    return f"{dtype} products"
