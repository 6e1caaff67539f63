"""Describes one ragged forward: which tokens, where their KV goes, and which cached tokens each row reads.

Built on the host with numpy once per step; every layer reuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from shared.engine.kv_cache import Index, KVCache

TILE_TOKENS = 128
"""Attention sums values over the context in tiles of this length, in order. Changing it changes rounding."""

NARROW_ROWS = 8
"""Sequences with at most this many new tokens attend together; those of longer ones are cut in chunks."""

CHUNK_ROWS = 64
"""Query positions of a long sequence that attend together."""

_GROUP_TILES = 256
"""Most tiles that the sequences of one group may have together, which bounds the scratch memory."""

_GROUP_WASTE = 1.25
"""Sequences share a group while padding them to the longest costs at most this factor (or a tile each)."""


@dataclass(frozen=True)
class SequenceRows:
    """`token_ids` are fed at positions `start ..` of a sequence whose first `start` tokens are cached.

    `num_logits` counts the last rows whose logits are wanted. `block_ids` must cover all positions.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    num_logits: int


@dataclass
class QueryGroup:
    """Query rows that attend together: those of `sequences` sequences, `rows` each (padded to a safe count), over the
    first `context` cached tokens of each (whole tiles)."""

    q_rows: torch.Tensor
    """[kv_heads * sequences * rows] rows of the query seen as [tokens * query_heads, head_dim]."""
    sequences: int
    rows: int
    context: int
    visible: int
    """Keys before this one are visible to all rows."""
    row_positions: torch.Tensor
    """[sequences, rows, 1] absolute position of each query row."""
    _hidden: dict[int | None, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def hidden(self, window: int | None) -> tuple[int, torch.Tensor]:
        """(first key, mask [sequences, rows, context - first]): true where a row must not see a key.

        Hidden are later tokens and those that a sliding window of `window` tokens has passed.
        """
        found = self._hidden.get(window)
        if found is None:
            first = self.visible if window is None else 0
            keys = torch.arange(first, self.context, device=self.row_positions.device)
            mask = keys > self.row_positions
            if window is not None:
                mask |= keys <= self.row_positions - window
            found = self._hidden[window] = (first, mask)
        return found


@dataclass
class CacheRead:
    """One gather of K and V: `context` tokens (whole tiles) of each of `sequences`; and the groups that use it."""

    rows: torch.Tensor
    """[sequences * context / read_tokens] read rows."""
    sequences: int
    context: int
    groups: list[QueryGroup]


@dataclass
class Batch:
    """Everything that a forward needs besides the weights. `padded` >= `tokens`: padding rows follow the real ones."""

    cache: KVCache
    tokens: int
    padded: int
    input_ids: torch.Tensor
    """[1, padded]"""
    position_ids: torch.Tensor
    """[1, padded]"""
    write_rows: torch.Tensor
    """[tokens] token rows that receive the new K and V."""
    reads: list[CacheRead]
    out_rows: torch.Tensor
    """[padded * query_heads] row of each output head in the groups' results, one group after the other."""
    logit_rows: torch.Tensor
    """[safe count >= num_logits] rows of the hidden state that go through the head."""
    num_logits: int
    layers_seen: int = 0


@dataclass(frozen=True)
class _Span:
    """New tokens of one sequence: batch rows `first ..`, positions `start ..`, `count` of them."""

    first: int
    start: int
    count: int
    blocks: Index

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class SafeSizes:
    """Each maps a size to one at least as big at which results are proven not to depend on it (see `row_safety`)."""

    rows: Callable[[int], int]
    head_rows: Callable[[int], int]
    query_rows: Callable[[int], int]
    context: Callable[[int], int]
    """Gives whole tiles."""


class BatchBuilder:
    """Turns sequences into a Batch."""

    def __init__(self, cache: KVCache, query_heads: int, safe: SafeSizes) -> None:
        self._cache = cache
        self._query_heads = query_heads
        self._share = query_heads // cache.kv_heads
        self._safe = safe
        self._device = cache.data.device

    def build(self, sequences: list[SequenceRows]) -> Batch:
        """Rows stand in the order given."""
        spans: list[_Span] = []
        tokens = 0
        for s in sequences:
            spans.append(_Span(tokens, s.start, len(s.token_ids), np.asarray(s.block_ids, np.int64)))
            tokens += len(s.token_ids)
        padded = self._safe.rows(tokens)
        input_ids = np.zeros(padded, np.int64)
        positions = np.zeros(padded, np.int64)
        write_rows = np.empty(tokens, np.int64)
        logit_rows: list[int] = []
        for s, span in zip(sequences, spans, strict=True):
            at = slice(span.first, span.first + span.count)
            input_ids[at] = s.token_ids
            positions[at] = np.arange(span.start, span.context)
            write_rows[at] = self._cache.token_rows(span.blocks, positions[at])
            logit_rows.extend(range(at.stop - s.num_logits, at.stop))
        num_logits = len(logit_rows)
        if num_logits:
            logit_rows.extend([logit_rows[0]] * (self._safe.head_rows(num_logits) - num_logits))
        out_rows = np.zeros(padded * self._query_heads, np.int64)
        reads = self._reads(spans, out_rows)
        return Batch(
            cache=self._cache,
            tokens=tokens,
            padded=padded,
            input_ids=self._tensor(input_ids)[None],
            position_ids=self._tensor(positions)[None],
            write_rows=self._tensor(write_rows),
            reads=reads,
            out_rows=self._tensor(out_rows),
            logit_rows=self._tensor(np.asarray(logit_rows, np.int64)),
            num_logits=num_logits,
        )

    def _tensor(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _reads(self, spans: list[_Span], out_rows: Index) -> list[CacheRead]:
        """Fills `out_rows` on the way."""
        reads: list[CacheRead] = []
        results = 0  # rows of the groups' results so far
        for members in _narrow_groups([s for s in spans if s.count <= NARROW_ROWS]):
            group = self._group(members, results, out_rows)
            results += len(group.q_rows)
            reads.append(self._read(members, [group]))
        for span in spans:
            if span.count <= NARROW_ROWS:
                continue
            groups = []
            for begin in range(0, span.count, CHUNK_ROWS):
                count = min(CHUNK_ROWS, span.count - begin)
                chunk = _Span(span.first + begin, span.start + begin, count, span.blocks)
                groups.append(self._group([chunk], results, out_rows))
                results += len(groups[-1].q_rows)
            reads.append(self._read([span], groups))
        return reads

    def _read(self, spans: list[_Span], groups: list[QueryGroup]) -> CacheRead:
        """Positions past a sequence's last block read its first block again: hidden by the mask, and never foreign."""
        context = max(g.context for g in groups)
        step = self._cache.read_tokens
        rows = np.empty((len(spans), context // step), np.int64)
        for s, span in enumerate(spans):
            positions = np.arange(0, context, step)
            positions[positions >= len(span.blocks) * self._cache.block_tokens] = 0
            rows[s] = self._cache.token_rows(span.blocks, positions) // step
        return CacheRead(self._tensor(rows.reshape(-1)), len(spans), context, groups)

    def _group(self, spans: list[_Span], results: int, out_rows: Index) -> QueryGroup:
        """Row m of a kv head is query head `m // width` of its share and new token `m % width`; the rest is padding,
        which repeats the sequence's first row."""
        kv_heads, share = self._cache.kv_heads, self._share
        width = max(s.count for s in spans)
        rows = self._safe.query_rows(width * share)
        firsts = np.array([s.first for s in spans])[:, None]
        starts = np.array([s.start for s in spans])[:, None]
        counts = np.array([s.count for s in spans])[:, None]
        m = np.arange(rows)
        real = m < width * share
        head = np.where(real, m // width, 0)
        token = np.where(real & (m % width < counts), m % width, 0)  # [sequences, rows]
        heads = np.arange(kv_heads)[:, None, None] * share + head  # [kv_heads, 1, rows]
        q_rows = (firsts + token) * self._query_heads + heads  # [kv_heads, sequences, rows]
        query_head = np.arange(kv_heads * share)
        for s, span in enumerate(spans):
            t = np.arange(span.count)[:, None]
            found = results + (query_head // share * len(spans) + s) * rows + query_head % share * width + t
            at = span.first * self._query_heads
            out_rows[at : at + found.size] = found.reshape(-1)
        return QueryGroup(
            q_rows=self._tensor(q_rows.reshape(-1)),
            sequences=len(spans),
            rows=rows,
            context=self._safe.context(max(s.context for s in spans)),
            visible=int(starts.min()) + 1,
            row_positions=self._tensor((starts + token)[:, :, None]),
        )


def _narrow_groups(spans: list[_Span]) -> list[list[_Span]]:
    """Put sequences of similar context together, longest first."""
    groups: list[list[_Span]] = []
    needed = 0
    for span in sorted(spans, key=lambda s: -s.context):
        tiles = -(-span.context // TILE_TOKENS)
        needed += tiles
        if groups:
            size = len(groups[-1]) + 1
            padded = size * -(-groups[-1][0].context // TILE_TOKENS)
            if padded <= _GROUP_TILES and padded <= max(needed * _GROUP_WASTE, needed + size):
                groups[-1].append(span)
                continue
        groups.append([span])
        needed = tiles
    return groups
