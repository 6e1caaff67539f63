"""Paged attention by the flash-attn package, for exactness 'fast': it may cut a row's keys as the batch suggests.

Used as `flash_attn_with_kvcache` documents itself: a paged cache `[blocks, block_tokens, kv_heads, head_dim]` whose
block length is a multiple of 256, `cache_seqlens` and `block_table` in int32, and causal masks aligned to the last key.
New K and V are stored before, by the kernel that the Triton attention uses. Importing this needs both packages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found, import-untyped, unused-ignore]

from shared.engine.batch import AttentionShape, Span
from shared.engine.kv_cache import KVCache
from shared.engine.triton_attention import TritonAttention, TritonPlan

_NARROW_ROWS = 16
"""Rows of sequences with at most this many new tokens attend as one batch, each like a sequence of its own."""


@dataclass
class _Call:
    """One call of the library: `rows` of the batch seen as [sequences, rows of each]."""

    rows: torch.Tensor
    """[sequences * rows of each] int64"""
    lengths: torch.Tensor
    """[sequences] int32: keys up to and with the last row; 0 for rows that pad"""
    table: torch.Tensor
    """[sequences, blocks] int32"""


@dataclass
class FlashPlan:
    """One batch: what is written, by the Triton plan, and the calls that read."""

    stored: TritonPlan
    calls: list[_Call]


class FlashAttention:
    """Attention over `cache` (bf16 or fp16) for models of `query_heads` heads and `context_length` positions."""

    def __init__(self, cache: KVCache, query_heads: int, context_length: int) -> None:
        self._cache = cache
        self._writer = TritonAttention(cache, query_heads, context_length)

    def plan(self, spans: list[Span], padded: int) -> FlashPlan:
        """Long sequences get a call each, the others one together."""
        stored = self._writer.plan(spans, padded)
        device = stored.table.device
        narrow = [s for s in spans if s.count <= _NARROW_ROWS]
        calls = []
        if narrow:
            rows = torch.from_numpy(np.concatenate([np.arange(s.first, s.first + s.count) for s in narrow])).to(device)
            calls.append(_row_call(stored, rows))
        for number, span in enumerate(spans):
            if span.count > _NARROW_ROWS:
                rows = torch.arange(span.first, span.first + span.count, device=device)
                length = torch.tensor([span.context], dtype=torch.int32, device=device)
                calls.append(_Call(rows, length, stored.table[number : number + 1]))
        return FlashPlan(stored, calls)

    def static_plan(self, padded: int) -> FlashPlan:
        """A plan for any batch of `padded` rows, to be filled by `refill`; as it is, all rows pad."""
        stored = self._writer.static_plan(padded)
        return FlashPlan(stored, [_row_call(stored, torch.arange(padded, device=stored.table.device))])

    def refill(self, plan: FlashPlan, spans: list[Span]) -> None:
        """Make a static plan that of these sequences, in place."""
        self._writer.refill(plan.stored, spans)
        (call,) = plan.calls
        fresh = _row_call(plan.stored, call.rows)
        call.lengths.copy_(fresh.lengths)
        call.table.copy_(fresh.table)

    def attend(
        self, plan: FlashPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Store the new K and V, then attend. q [1, query_heads, padded, head_dim]; k, v [1, kv_heads, padded,
        head_dim]. Returns [1, padded, query_heads, head_dim]; rows that pad are zero."""
        self._writer.store(plan.stored, layer, k, v)
        queries = q[0].transpose(0, 1)
        keys, values = self._cache.data[:, 0, layer], self._cache.data[:, 1, layer]
        out = torch.zeros(queries.shape, dtype=q.dtype, device=q.device)
        for call in plan.calls:
            found = flash_attn_with_kvcache(
                queries.index_select(0, call.rows).view(len(call.lengths), -1, *queries.shape[1:]),
                keys,
                values,
                cache_seqlens=call.lengths,
                block_table=call.table,
                softmax_scale=shape.scaling,
                causal=True,
                window_size=(-1, -1) if shape.window is None else (shape.window - 1, 0),
                softcap=shape.softcap or 0.0,
            )
            out.index_copy_(0, call.rows, found.flatten(0, 1))
        return out[None]


def _row_call(stored: TritonPlan, rows: torch.Tensor) -> _Call:
    """Each row as a sequence of one token that ends with it."""
    sequence = stored.row_sequence.index_select(0, rows)
    position = stored.row_position.index_select(0, rows)
    lengths = torch.where(sequence < 0, 0, position + 1).to(torch.int32)
    return _Call(rows, lengths, stored.table.index_select(0, sequence.clamp(min=0)))
