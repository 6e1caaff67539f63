"""What choosing a token costs, on rows of logits that the model gave for a real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.subjects import Subjects
from loadgen.engine_bench.timing import Contender, interleave, p95
from shared.engine.batch import SequenceRows
from shared.engine.logit_rules import LogitRules
from shared.engine.logprobs import token_logprobs
from shared.engine.sampler import choose_token
from shared.protocol.jobs import SamplingParams

PROMPT, OUTPUT = 200, 100
"""Tokens that penalties look at."""

TOP_LOGPROBS = 5

_NUCLEUS = SamplingParams(max_tokens=1, seed=1, temperature=1.0, top_p=0.95)
_PENALISED = SamplingParams(
    max_tokens=1,
    seed=1,
    temperature=1.0,
    top_p=0.95,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
)
MODES = {
    "greedy": SamplingParams(max_tokens=1, seed=1, temperature=0.0),
    "temperature 1, top-p 0.95": _NUCLEUS,
    "same with all three penalties": _PENALISED,
}


def measure(subjects: Subjects, plan: Plan) -> Section:
    runner = subjects.runner("fp16-packed")
    ids = subjects.prose[: min(plan.sampled_rows, subjects.config("fp16-packed").max_batch_tokens)]
    blocks = list(range(-(-len(ids) // runner.cache.block_tokens)))
    logits = runner.forward([SequenceRows(ids, 0, blocks, len(ids))])
    contenders: dict[str, Contender] = {}
    for name, params in MODES.items():
        rules = LogitRules.of(params, subjects.prose[:PROMPT], frozenset(), runner.model.vocab_size)
        if rules is not None:
            for token in subjects.prose[PROMPT : PROMPT + OUTPUT]:
                rules.add(token)
        contenders[name] = Contender(_choice(cycle(logits), params, rules, logprobs=False))
    contenders[f"top-p 0.95 with {TOP_LOGPROBS} logprobs"] = Contender(
        _choice(cycle(logits), _NUCLEUS, None, logprobs=True)
    )
    times = interleave(contenders, len(logits), threads=1)
    lines = [
        Line(name, "ms a row", [t.cpu_ms, p95(t.cpu_s) * 1e3, t.wall_ms, p95(t.wall_s) * 1e3])
        for name, t in times.items()
    ]
    title = f"sampling, {runner.model.vocab_size:,} logits"
    return Section("sampling", title, ["CPU, median", "CPU, p95", "wall, median", "wall, p95"], lines)


def _choice(
    rows: Iterator[NDArray[np.float32]], params: SamplingParams, rules: LogitRules | None, *, logprobs: bool
) -> Callable[[], None]:
    """All that the engine does with one row besides detokenizing."""

    def run() -> None:
        row = next(rows)
        token = choose_token(row, params, PROMPT + OUTPUT, rules)
        if logprobs:
            token_logprobs(row, token, TOP_LOGPROBS)
        if rules is not None:
            rules.add(token)

    return run
