"""Paged attention in plain torch operations, for devices without kernels of ours.

Bitwise independent of batch, chunking and block order: scores and softmax are computed for each row on its own, over a
context length that is proven to give the same bits as any longer one; values are summed in tiles of fixed length, in
order. What a row must not see contributes exact zeros, so padding and longer neighbours change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from shared.engine.batch import AttentionShape, Span
from shared.engine.kv_cache import Index, KVCache
from shared.engine.row_safety import VARIANTS, Probe, SafeSize, bits, safe_rows

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

_REFERENCE_CONTEXT = 8192
"""Context length, if the model has as many positions, to which the others are compared."""


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
class TorchPlan:
    """One batch as this attention sees it; the same for every layer."""

    tokens: int
    padded: int
    write_rows: torch.Tensor
    """[tokens] token rows that receive the new K and V."""
    reads: list[CacheRead]
    out_rows: torch.Tensor
    """[padded * query_heads] row of each output head in the groups' results, one group after the other."""


class TorchAttention:
    """Attention over `cache` for models of `query_heads` heads and `context_length` positions."""

    def __init__(self, cache: KVCache, query_heads: int, context_length: int) -> None:
        self._cache = cache
        self._query_heads = query_heads
        self._share = query_heads // cache.kv_heads
        self._device = cache.data.device
        self._context_length = context_length
        self._views = _Views(cache, read_tokens=math.gcd(cache.block_tokens, TILE_TOKENS))
        self._safe_rows = safe_rows("row count in attention", [self._rows_probe(n) for n in (1, 3)])
        self._safe_context = SafeSize("context length", self._is_safe_context(self._safe_rows.pad(4)), step=TILE_TOKENS)

    def attend(
        self, plan: TorchPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Store the new K and V, then attend. q [1, query_heads, padded, head_dim]; k, v [1, kv_heads, padded,
        head_dim]. Returns [1, padded, query_heads, head_dim]."""
        kv_heads, head_dim = self._cache.kv_heads, self._cache.head_dim
        views = self._views
        for source, rows in ((k, views.write_k[layer]), (v, views.write_v[layer])):
            new = source.transpose(1, 2).reshape(plan.padded, kv_heads * head_dim)
            rows.index_copy_(0, plan.write_rows, new if plan.tokens == plan.padded else new[: plan.tokens])
        scaled = q.transpose(1, 2).reshape(-1, head_dim) * shape.scaling
        results: list[torch.Tensor] = []
        for read in plan.reads:
            size = (read.sequences, read.context, kv_heads, head_dim)
            keys = views.read_k[layer].index_select(0, read.rows).view(size)
            values = views.read_v[layer].index_select(0, read.rows).view(size)
            results.extend(
                attend_group(scaled, keys, values, group, shape.window, shape.softcap) for group in read.groups
            )
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.index_select(0, plan.out_rows).view(1, plan.padded, -1, head_dim)

    # Planning a batch

    def plan(self, spans: list[Span], padded: int) -> TorchPlan:
        """Which cache rows the batch reads and writes, and which queries attend together."""
        out_rows = np.zeros(padded * self._query_heads, np.int64)
        reads = self._reads(spans, out_rows)
        written = [self._cache.token_rows(s.blocks, np.arange(s.start, s.context)) for s in spans]
        return TorchPlan(
            tokens=sum(s.count for s in spans),
            padded=padded,
            write_rows=self._tensor(np.concatenate(written)),
            reads=reads,
            out_rows=self._tensor(out_rows),
        )

    def _tensor(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _reads(self, spans: list[Span], out_rows: Index) -> list[CacheRead]:
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
                chunk = Span(span.first + begin, span.start + begin, count, span.blocks)
                groups.append(self._group([chunk], results, out_rows))
                results += len(groups[-1].q_rows)
            reads.append(self._read([span], groups))
        return reads

    def _read(self, spans: list[Span], groups: list[QueryGroup]) -> CacheRead:
        """Positions past a sequence's last block read its first block again: hidden by the mask, and never foreign."""
        context = max(g.context for g in groups)
        step = self._views.read_tokens
        rows = np.empty((len(spans), context // step), np.int64)
        for s, span in enumerate(spans):
            positions = np.arange(0, context, step)
            positions[positions >= len(span.blocks) * self._cache.block_tokens] = 0
            rows[s] = self._cache.token_rows(span.blocks, positions) // step
        return CacheRead(self._tensor(rows.reshape(-1)), len(spans), context, groups)

    def _group(self, spans: list[Span], results: int, out_rows: Index) -> QueryGroup:
        """Row m of a kv head is query head `m // width` of its share and new token `m % width`; the rest is padding,
        which repeats the sequence's first row."""
        kv_heads, share = self._cache.kv_heads, self._share
        width = max(s.count for s in spans)
        rows = self._safe_rows.pad(width * share)
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
            context=self._safe_context.pad(max(s.context for s in spans)),
            visible=int(starts.min()) + 1,
            row_positions=self._tensor((starts + token)[:, :, None]),
        )

    # Proofs

    def _rows_probe(self, sequences: int) -> Probe:
        """Attention over two tiles of random K and V, the same for each of `sequences`."""
        heads, dim, context = self._cache.kv_heads, self._cache.head_dim, 2 * TILE_TOKENS
        q, k, v = (
            self._random((VARIANTS, dim)),
            self._random((1, context, heads, dim)),
            self._random((1, context, heads, dim)),
        )

        def probe(variants: torch.Tensor) -> torch.Tensor:
            rows = len(variants)
            positions = (variants * 5 + TILE_TOKENS).to(self._device)
            group = QueryGroup(
                q_rows=variants.repeat(heads * sequences).to(self._device),
                sequences=sequences,
                rows=rows,
                context=context,
                visible=TILE_TOKENS,
                row_positions=positions[None, :, None].expand(sequences, -1, -1),
            )
            tiled = [t.expand(sequences, -1, -1, -1).contiguous() for t in (k, v)]
            out = attend_group(q, tiled[0], tiled[1], group, None, None).view(heads, sequences, rows, dim)
            return out.movedim(2, 0).reshape(rows, -1)

        return Probe(probe)

    def _is_safe_context(self, rows: int) -> Callable[[int], bool]:
        """Says whether attention over `context` tokens gives the bits that it gives over the reference length.

        Keys beyond the shorter of both are hidden, so this tells whether hidden padding changes anything. The reference
        depends on the model alone: all workers must agree.
        """
        heads, dim = min(2, self._cache.kv_heads), self._cache.head_dim
        reference = -(-min(self._context_length, _REFERENCE_CONTEXT) // TILE_TOKENS) * TILE_TOKENS
        known: list[torch.Tensor] = []

        def run(context: int, positions: torch.Tensor) -> torch.Tensor:
            group = QueryGroup(
                q_rows=torch.arange(rows, device=self._device).repeat(heads),
                sequences=1,
                rows=rows,
                context=context,
                visible=0,
                row_positions=positions[None, :, None],
            )
            beyond = (0, 0, 0, 0, 0, max(0, context - reference))
            k, v = (nn.functional.pad(t[:, :context], beyond) for t in known[1:])
            return attend_group(known[0], k, v, group, None, None)

        def is_safe(context: int) -> bool:
            if not known:
                shape = (1, reference, heads, dim)
                known.extend((self._random((rows, dim)), self._random(shape), self._random(shape)))
            last = min(context, reference) - 1
            positions = (last - 7 * torch.arange(rows, device=self._device)).clamp_(min=0)
            return bool((bits(run(context, positions)) == bits(run(reference, positions))).all())

        return is_safe

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(20_24)
        return torch.randn(shape, generator=generator).to(self._device, self._cache.data.dtype)


class _Views:
    """The cache as rows, shifted so that a token's row index finds the K or V of any layer. Writes take one token,
    reads `read_tokens` neighbouring ones: the read row of a token is its token row divided by that."""

    def __init__(self, cache: KVCache, *, read_tokens: int) -> None:
        """`read_tokens` must divide the block length."""
        self.read_tokens = read_tokens
        token_rows = cache.data.view(-1, cache.kv_heads * cache.head_dim)
        read_rows = token_rows.view(-1, read_tokens * cache.kv_heads * cache.head_dim)
        shifts = [[(kv * cache.layers + layer) * cache.block_tokens for layer in range(cache.layers)] for kv in (0, 1)]
        self.write_k, self.write_v = ([token_rows[s:] for s in shifts[kv]] for kv in (0, 1))
        self.read_k, self.read_v = ([read_rows[s // read_tokens :] for s in shifts[kv]] for kv in (0, 1))


def attend_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: QueryGroup, window: int | None, softcap: float | None
) -> torch.Tensor:
    """q [tokens * query_heads, head_dim]; k, v [sequences, context or more, kv_heads, head_dim].

    Returns [kv_heads * sequences * rows, head_dim].
    """
    sequences, rows, context = group.sequences, group.rows, group.context
    kv_heads, head_dim = k.shape[2:]
    tiles = context // TILE_TOKENS
    if k.shape[1] != context:
        k, v = k[:, :context], v[:, :context]
    head_q = q.index_select(0, group.q_rows).view(kv_heads, sequences, rows, head_dim).unbind()
    scores = q.new_empty((kv_heads, sequences, rows, context))
    for out, a, b in zip(scores.unbind(), head_q, k.permute(2, 0, 3, 1).unbind(), strict=True):
        torch.bmm(a, b, out=out)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    first, hidden = group.hidden(window)
    scores[..., first:].masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    weights = weights.view(kv_heads, sequences, rows, tiles, TILE_TOKENS).transpose(2, 3)
    weights = weights.reshape(kv_heads, sequences * tiles, rows, TILE_TOKENS)
    tile_v = v.reshape(sequences * tiles, TILE_TOKENS, kv_heads, head_dim).unbind(2)
    parts = q.new_empty((kv_heads, sequences * tiles, rows, head_dim))
    for out, a, b in zip(parts.unbind(), weights.unbind(), tile_v, strict=True):
        torch.bmm(a, b, out=out)
    tile_out = parts.float().view(kv_heads, sequences, tiles, rows, head_dim).unbind(2)
    total = tile_out[0]
    for part in tile_out[1:]:
        total += part
    return total.to(v.dtype).reshape(-1, head_dim)


def _narrow_groups(spans: list[Span]) -> list[list[Span]]:
    """Put sequences of similar context together, longest first."""
    groups: list[list[Span]] = []
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
