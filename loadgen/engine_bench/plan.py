"""How much is measured: the whole benchmark, or a quick look."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """`rounds` of steps (some tens of milliseconds each), `context_rounds` of steps with long contexts, `long_rounds`
    of what takes seconds. `quality_tokens` bounds the text for perplexity. `requests` and what follows it describe the
    closed loops; `gguf` is the same model for llama.cpp.
    """

    rounds: int
    context_rounds: int
    long_rounds: int
    sampled_rows: int
    quality_tokens: int
    requests: int
    output_tokens: int
    prompt_tokens: int = 128
    seed: int = 1
    gguf: Path | None = None


FULL = Plan(
    rounds=15, context_rounds=7, long_rounds=3, sampled_rows=200, quality_tokens=8192, requests=16, output_tokens=64
)
QUICK = Plan(
    rounds=5, context_rounds=3, long_rounds=1, sampled_rows=64, quality_tokens=512, requests=4, output_tokens=16
)
