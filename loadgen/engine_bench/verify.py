"""What verifying drafted tokens costs: a step of five rows of one sequence beside a step of one."""

from __future__ import annotations

from functools import partial

from loadgen.engine_bench.decode import CONTEXT
from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.steps import sequences_at
from loadgen.engine_bench.subjects import PACKED, Subjects
from loadgen.engine_bench.timing import Contender, interleave, ratio

DRAFTS = 4


def measure(subjects: Subjects, plan: Plan) -> Section:
    contenders: dict[str, Contender] = {}
    for dtype in PACKED:
        runner = subjects.runner(dtype)
        for rows in (1, 1 + DRAFTS):
            sequences = sequences_at(runner, 1, CONTEXT, rows)
            contenders[f"{dtype}/{rows}"] = Contender(partial(runner.forward, sequences))
    times = interleave(contenders, plan.rounds, threads=subjects.threads)
    plain = [times[f"{dtype}/1"] for dtype in PACKED]
    verifying = [times[f"{dtype}/{1 + DRAFTS}"] for dtype in PACKED]
    lines = [
        Line("1 row", "CPU ms", [t.cpu_ms for t in plain]),
        Line("1 row", "wall ms", [t.wall_ms for t in plain]),
        Line(f"{1 + DRAFTS} rows", "CPU ms", [t.cpu_ms for t in verifying]),
        Line(f"{1 + DRAFTS} rows", "wall ms", [t.wall_ms for t in verifying]),
        Line(f"{1 + DRAFTS} rows / 1 row", "", [ratio(v, p) for v, p in zip(verifying, plain, strict=True)]),
    ]
    return Section("verify", f"{DRAFTS} drafts verified, context {CONTEXT}", list(PACKED), lines)
