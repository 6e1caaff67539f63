"""How a decode step grows with its context, beside the speed at which this machine reads memory."""

from __future__ import annotations

from functools import partial

import numpy as np

from loadgen.engine_bench.counting import fit_line
from loadgen.engine_bench.errors import MeasurementError
from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.steps import has_room, sequences_at
from loadgen.engine_bench.subjects import Subjects
from loadgen.engine_bench.timing import Contender, interleave

BATCH = 8
CONTEXTS = (512, 1024, 2048, 4096)
_READ_BYTES = 256 << 20


def measure(subjects: Subjects, plan: Plan) -> Section:
    """Raises MeasurementError when fewer than two contexts fit."""
    runner = subjects.runner("fp16-packed")
    contexts = [context for context in CONTEXTS if has_room(runner, BATCH, context + 1)]
    if len(contexts) < 2:
        raise MeasurementError(f"{BATCH} sequences of {CONTEXTS[1]} tokens do not fit the model or the KV cache")
    contenders = {
        str(context): Contender(partial(runner.forward, sequences_at(runner, BATCH, context))) for context in contexts
    }
    array = np.ones(_READ_BYTES // 4, np.float32)
    contenders["read"] = Contender(array.sum)
    times = interleave(contenders, plan.context_rounds, threads=subjects.threads)

    per_token = runner.layout.block_bytes / runner.layout.block_tokens
    steps = [times[str(context)] for context in contexts]
    fit = fit_line([context / 1000 for context in contexts], [t.median_s * 1e3 for t in steps])
    slope_bytes = BATCH * 1000 * per_token
    read_gb_s = _READ_BYTES / times["read"].median_s / 1e9
    lines = [
        Line("step", "CPU ms", [t.cpu_ms for t in steps]),
        Line("step", "wall ms", [t.wall_ms for t in steps]),
        Line("KV read in a step", "MB", [BATCH * context * per_token / 1e6 for context in contexts]),
        Line("slope", "ms per 1,000 tokens of context", [fit.slope]),
        Line("largest distance from the line", "%", [100 * fit.worst]),
        Line("KV read at the slope", "GB/s", [slope_bytes / fit.slope / 1e6]),
        Line("memory read, numpy sum", "GB/s", [read_gb_s]),
    ]
    columns = [f"{context:,} tokens" for context in contexts]
    note = f"fp16-packed. KV: {per_token:,.0f} bytes a token in {runner.layout.kv_dtype}."
    return Section("context", f"decode step by context, batch {BATCH}", columns, lines, [note])
