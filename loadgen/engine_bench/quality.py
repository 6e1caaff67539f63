"""What fewer bits cost: perplexity of a text, and how far the distributions move from those of plain Transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.steps import has_room
from loadgen.engine_bench.subjects import Subjects
from shared.engine.batch import SequenceRows
from shared.engine.config import Dtype
from shared.engine.runner import ModelRunner

WINDOW = 1024
DTYPES: tuple[Dtype, ...] = ("fp32", "fp16-packed", "int8")
_REFERENCE = "Transformers fp32"


@dataclass
class Score:
    """Sums over positions, in nats. `moved` counts those whose arg max is not the reference's; `divergence` is
    KL(reference || measured)."""

    positions: int = 0
    surprise: float = 0.0
    moved: int = 0
    divergence: float = 0.0

    def add(self, found: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """Log probabilities [rows, vocabulary], measured and by the reference; `targets` [rows]: what follows."""
        self.positions += len(targets)
        self.surprise -= float(found.gather(1, targets[:, None]).sum())
        self.moved += int((found.argmax(-1) != expected.argmax(-1)).sum())
        self.divergence += float((expected.exp() * (expected - found)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.positions)


def measure(subjects: Subjects, plan: Plan) -> Section:
    chunk = subjects.config("fp32").max_batch_tokens
    ids = subjects.prose[: plan.quality_tokens]
    runners = {dtype: subjects.runner(dtype) for dtype in DTYPES}
    window = next(w for w in (WINDOW, WINDOW // 2, chunk) if all(has_room(r, 1, w) for r in runners.values()))
    scores = {name: Score() for name in (_REFERENCE, *DTYPES)}
    for first in range(0, len(ids) - 1, window):
        part = ids[first : first + window]
        reference = subjects.transformers.logits(part)
        for start in range(0, len(part) - 1, chunk):
            targets = torch.tensor(part[start + 1 : start + chunk + 1])
            rows = slice(start, start + len(targets))
            expected = _logprobs(reference[rows])
            scores[_REFERENCE].add(expected, expected, targets)
            for dtype, runner in runners.items():
                scores[dtype].add(_logprobs(_logits(runner, part, rows)), expected, targets)
    return _section(scores, len(ids), window)


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def _logits(runner: ModelRunner, ids: list[int], rows: slice) -> torch.Tensor:
    """[rows, vocabulary]. The KV of the rows before is in the cache from the last call."""
    blocks = list(range(-(-len(ids) // runner.cache.block_tokens)))
    fed = ids[rows]
    return torch.from_numpy(runner.forward([SequenceRows(fed, rows.start, blocks, len(fed))]))


def _section(scores: dict[str, Score], tokens: int, window: int) -> Section:
    base = scores[_REFERENCE].perplexity
    found = list(scores.values())
    lines = [
        Line("perplexity", "", [s.perplexity for s in found]),
        Line("against Transformers fp32", "%", [100 * (s.perplexity / base - 1) for s in found]),
        Line("positions with another best token", "%", [100 * s.moved / s.positions for s in found]),
        Line("KL divergence", "nats a position", [s.divergence / s.positions for s in found]),
    ]
    note = f"{found[0].positions:,} positions of the text in this package, {tokens:,} tokens in windows of {window:,}."
    return Section("quality", "quality", ["TF fp32", *DTYPES], lines, [note])
