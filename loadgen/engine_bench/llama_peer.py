"""llama.cpp through llama-cpp-python, where somebody has installed it. This project never does."""

from __future__ import annotations

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

MODULE = "llama_cpp"


def is_installed() -> bool:
    return importlib.util.find_spec(MODULE) is not None


def version() -> str:
    return str(importlib.import_module(MODULE).__version__)


class LlamaPeer:
    def __init__(self, gguf: Path, threads: int, context: int) -> None:
        """Raises ValueError, as llama-cpp-python does, for a file that it cannot load."""
        module: Any = importlib.import_module(MODULE)
        self._llama = module.Llama(
            str(gguf), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, ids: list[int], new_tokens: int) -> list[float]:
        """Times of arrival, on the `perf_counter` clock, of `new_tokens` greedy ones."""
        self._llama.reset()
        arrivals: list[float] = []
        fed = ids
        for _ in range(new_tokens):
            self._llama.eval(fed)
            fed = [self._llama.sample(temp=0.0)]
            arrivals.append(time.perf_counter())
        return arrivals
