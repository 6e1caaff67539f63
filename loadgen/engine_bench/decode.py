"""Decode steps at a short context: beside their matrix products alone, and beside Transformers."""

from __future__ import annotations

from functools import partial

from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.products import Products
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.steps import sequences_at
from loadgen.engine_bench.subjects import PACKED, Subjects
from loadgen.engine_bench.timing import Contender, Times, interleave, ratio
from loadgen.engine_bench.transformers_peer import ATTENTIONS

CONTEXT = 200
BATCHES = (1, 4, 8)


def measure(subjects: Subjects, plan: Plan) -> Section:
    found = [_at_batch(subjects, plan, batch) for batch in BATCHES]
    lines: list[Line] = []
    for dtype in PACKED:
        lines += [
            Line(f"{dtype} step", "CPU ms", [times[dtype].cpu_ms for times in found]),
            Line(f"{dtype} step", "wall ms", [times[dtype].wall_ms for times in found]),
            Line(f"{dtype} matrix products alone", "CPU ms", [times[_products(dtype)].cpu_ms for times in found]),
            Line(f"{dtype} step / products", "", [ratio(times[dtype], times[_products(dtype)]) for times in found]),
        ]
    lines += [
        Line(f"Transformers fp32 {name}", "CPU ms", [times[name].cpu_ms for times in found]) for name in ATTENTIONS
    ]
    lines += [
        Line(f"Transformers fp32 {name}", "wall ms", [times[name].wall_ms for times in found]) for name in ATTENTIONS
    ]
    lines += [
        Line(f"{dtype} / Transformers", "x tokens/s", [ratio(_faster(times), times[dtype]) for times in found])
        for dtype in PACKED
    ]
    lines.append(
        Line("int8 / fp16-packed", "x tokens/s", [ratio(times["fp16-packed"], times["int8"]) for times in found])
    )
    for dtype in PACKED:
        rates = [batch / times[dtype].median_s for batch, times in zip(BATCHES, found, strict=True)]
        lines.append(Line(dtype, "tokens/s", rates))
    return Section("decode", f"decode step, context {CONTEXT}", [f"batch {batch}" for batch in BATCHES], lines)


def _at_batch(subjects: Subjects, plan: Plan, batch: int) -> dict[str, Times]:
    contenders: dict[str, Contender] = {}
    for dtype in PACKED:
        runner = subjects.runner(dtype)
        sequences = sequences_at(runner, batch, CONTEXT)
        contenders[dtype] = Contender(partial(runner.forward, sequences))
        contenders[_products(dtype)] = Contender(Products(runner).call(batch, batch))
    for name in ATTENTIONS:
        contenders[name] = subjects.transformers.step(name, batch, subjects.prose[:CONTEXT])
    return interleave(contenders, plan.rounds, threads=subjects.threads)


def _products(dtype: str) -> str:
    return f"{dtype} products"


def _faster(times: dict[str, Times]) -> Times:
    return min((times[name] for name in ATTENTIONS), key=lambda found: found.median_s)
