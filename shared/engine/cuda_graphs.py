"""Captured forwards for decode steps and verifications: the same kernels, started by one call instead of hundreds.

A graph repeats what it was captured from, on the same memory. So a StaticBatch holds the inputs of one row count in
place, and a batch that fits is written into them. Everything else runs eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from shared.engine.batch import AttentionBackend, Batch, SequenceRows, Span, lay_out

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Row counts that are captured, after padding to safe ones: decode steps, and verifications with the same rows."""

CAPTURE_BUDGET_S = 30.0
"""Captures stop after this long; row counts that were not reached run eagerly."""

_WARM_UPS = 2
"""Forwards before a capture: kernels are compiled and workspaces are made in them, which a capture forbids."""

Forward = Callable[[Batch], torch.Tensor]
"""A batch to its logits [1, rows, vocabulary], on the device."""


@runtime_checkable
class StaticBackend(AttentionBackend, Protocol):
    """An attention whose plans are tensors of fixed shape."""

    def static_plan(self, padded: int) -> Any:
        """A plan for any batch of `padded` rows; all rows pad until it is filled."""

    def refill(self, plan: Any, spans: list[Span]) -> None:
        """Make a static plan that of these sequences, in place."""


class StaticBatch:
    """The inputs of one row count, at fixed addresses. Every row's logits are wanted."""

    def __init__(self, backend: StaticBackend, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._backend = backend
        self._tokens = torch.zeros((2, rows), dtype=torch.long, device=device)
        self.batch = Batch(
            backend=backend,
            plan=backend.static_plan(rows),
            tokens=rows,
            padded=rows,
            input_ids=self._tokens[:1],
            position_ids=self._tokens[1:],
            logit_rows=torch.arange(rows, device=device),
            num_logits=rows,
        )

    def fill(self, sequences: list[SequenceRows]) -> int:
        """Write a batch that `fits` into the inputs. Returns how many of the rows are its own, which come first."""
        tokens = np.zeros((2, self.rows), np.int64)
        spans = lay_out(sequences, tokens[0], tokens[1])
        self._tokens.copy_(torch.from_numpy(tokens))
        self._backend.refill(self.batch.plan, spans)
        return spans[-1].first + spans[-1].count


def fits(sequences: list[SequenceRows]) -> bool:
    """Whether it is a decode step or a verification: each row's logits are wanted."""
    return all(s.num_logits == len(s.token_ids) for s in sequences)


@dataclass
class _Captured:
    static: StaticBatch
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    """[1, rows, vocabulary], written by each replay"""


class GraphSet:
    """The captured row counts of one model. One thread uses it, the one that runs forwards."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Captured] = {}

    @property
    def row_counts(self) -> list[int]:
        return sorted(self._by_rows)

    def capture(self, row_counts: list[int], forward: Forward, backend: StaticBackend, device: torch.device) -> None:
        """Capture row counts, smallest first, until CAPTURE_BUDGET_S have passed.

        The graphs share one pool of memory: no two of them run at once. Raises RuntimeError when the model does what a
        graph cannot hold.
        """
        give_up_s = time.monotonic() + CAPTURE_BUDGET_S
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for rows in sorted(row_counts):
            if time.monotonic() > give_up_s:
                return
            static = StaticBatch(backend, rows, device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    forward(static.batch)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads (UCX, copies of blocks) go on calling CUDA meanwhile; only this one's calls are captured.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = forward(static.batch)
            self._by_rows[rows] = _Captured(static, graph, logits)

    def size_for(self, rows: int) -> int | None:
        """The smallest captured row count that holds so many."""
        return min((n for n in self._by_rows if n >= rows), default=None)

    def run(self, sequences: list[SequenceRows]) -> torch.Tensor | None:
        """Logits [1, rows, vocabulary], to be read before the next run; None when no captured row count will do."""
        size = self.size_for(sum(len(s.token_ids) for s in sequences))
        if size is None or not fits(sequences):
            return None
        captured = self._by_rows[size]
        count = captured.static.fill(sequences)
        captured.graph.replay()
        return captured.logits[:, :count]
