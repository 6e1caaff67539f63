"""Describes one ragged forward: which tokens, at which positions, whose KV blocks, and which rows' logits are wanted.

Built on the host with numpy once per step; every layer reuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from shared.engine.kv_cache import Index


@dataclass(frozen=True)
class SequenceRows:
    """`token_ids` are fed at positions `start ..` of a sequence whose first `start` tokens are cached.

    `num_logits` counts the last rows whose logits are wanted. `block_ids` must cover all positions.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    num_logits: int


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: batch rows `first ..`, positions `start ..`, `count` of them."""

    first: int
    start: int
    count: int
    blocks: Index

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class AttentionShape:
    """What a layer asks of attention: scores are q.k * scaling, capped by tanh (Gemma 2), over the last `window`
    tokens or all."""

    scaling: float
    window: int | None
    softcap: float | None


class AttentionBackend(Protocol):
    """Attention over the paged cache. A row's bits must not depend on anything but its own sequence."""

    def plan(self, spans: list[Span], padded: int) -> Any:
        """What `attend` wants to know of a batch of `padded` rows, made once and used by every layer."""

    def attend(
        self, plan: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Store the new K and V, then attend. q [1, query_heads, padded, head_dim]; k, v [1, kv_heads, padded,
        head_dim]. Returns [1, padded, query_heads, head_dim]; rows that pad are finite."""


@dataclass
class Batch:
    """Everything that a forward needs besides the weights. `padded` >= `tokens`: padding rows follow the real ones."""

    backend: AttentionBackend
    plan: Any
    tokens: int
    padded: int
    input_ids: torch.Tensor
    """[1, padded]"""
    position_ids: torch.Tensor
    """[1, padded]"""
    logit_rows: torch.Tensor
    """[safe count >= num_logits] rows of the hidden state that go through the head."""
    num_logits: int
    shapes_seen: dict[int, AttentionShape] = field(default_factory=dict)
    """Filled by the layers that attend through Transformers' interface."""


@dataclass(frozen=True)
class SafeSizes:
    """Each maps a row count to one at least as big at which results are proven not to depend on it (`row_safety`)."""

    rows: Callable[[int], int]
    head_rows: Callable[[int], int]


def lay_out(sequences: list[SequenceRows], input_ids: Index, positions: Index) -> list[Span]:
    """Place the sequences' tokens and positions one after the other in two arrays of at least as many rows."""
    spans: list[Span] = []
    first = 0
    for s in sequences:
        span = Span(first, s.start, len(s.token_ids), np.asarray(s.block_ids, np.int64))
        first += span.count
        input_ids[span.first : first] = s.token_ids
        positions[span.first : first] = np.arange(span.start, span.context)
        spans.append(span)
    return spans


class BatchBuilder:
    """Turns sequences into a Batch."""

    def __init__(self, backend: AttentionBackend, device: torch.device, safe: SafeSizes) -> None:
        self._backend = backend
        self._device = device
        self._safe = safe

    def build(self, sequences: list[SequenceRows]) -> Batch:
        """Rows stand in the order given."""
        tokens = sum(len(s.token_ids) for s in sequences)
        padded = self._safe.rows(tokens)
        input_ids = np.zeros(padded, np.int64)
        positions = np.zeros(padded, np.int64)
        spans = lay_out(sequences, input_ids, positions)
        logit_rows: list[int] = []
        for s, span in zip(sequences, spans, strict=True):
            end = span.first + span.count
            logit_rows.extend(range(end - s.num_logits, end))
        num_logits = len(logit_rows)
        if num_logits:
            logit_rows.extend([logit_rows[0]] * (self._safe.head_rows(num_logits) - num_logits))
        return Batch(
            backend=self._backend,
            plan=self._backend.plan(spans, padded),
            tokens=tokens,
            padded=padded,
            input_ids=self._tensor(input_ids)[None],
            position_ids=self._tensor(positions)[None],
            logit_rows=self._tensor(np.asarray(logit_rows, np.int64)),
            num_logits=num_logits,
        )

    def _tensor(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
