"""Describes one ragged forward: which tokens, where their KV goes, and which cached tiles each row reads.

Built on the host with numpy once per step; every layer reuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from shared.engine.kv_cache import KVCache

TILE_TOKENS = 128
"""Attention reduces over the context in tiles of this length, in order. It fixes the rounding: changing it changes bits."""

NARROW_ROWS = 8
"""Sequences with at most this many new tokens share one attention group; longer ones are cut in row chunks."""

CHUNK_ROWS = 64
"""Query positions of a long sequence that attend together."""

GROUP_TILES = 256
"""Most tiles that the sequences of one narrow group may have together, which bounds the scratch memory."""

Index = NDArray[np.int64]


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
    """Query rows that attend together: `sequences` of them, `rows` each (padded to a safe count), over `tiles` tiles.

    Tiles are ordered by their index within the sequence, longest sequence first: tile j of all sequences that have one
    is the slice `spans[j]`, and belongs to sequences 0, 1, 2 ... of the group.
    """

    q_rows: torch.Tensor
    """[tiles * kv_heads * rows] rows of the query seen as [tokens * query_heads, head_dim]."""
    tile_sequence: torch.Tensor
    """[tiles] sequence of each tile."""
    spans: list[tuple[int, int]]
    sequences: int
    rows: int
    tiles: int
    mask_from: int
    """Tiles before this one are visible to all rows."""
    row_positions: torch.Tensor
    """[tiles, 1, rows, 1] absolute position of each query row."""
    key_positions: torch.Tensor
    """[tiles, 1, 1, TILE_TOKENS]"""
    _masks: dict[int | None, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def hidden(self, window: int | None) -> tuple[int, torch.Tensor]:
        """(first tile, mask from that tile on): true where a row must not see a key.

        Hidden are later tokens and those that a sliding window of `window` tokens has passed.
        """
        found = self._masks.get(window)
        if found is None:
            first = 0 if window is not None else self.mask_from
            keys, rows = self.key_positions[first:], self.row_positions[first:]
            mask = keys > rows
            if window is not None:
                mask |= keys <= rows - window
            found = self._masks[window] = (first, mask)
        return found


@dataclass
class TileRead:
    """One gather of K and V tiles, `[tiles, kv_heads, TILE_TOKENS]` head rows, and the query groups that use them."""

    head_rows: torch.Tensor
    tiles: int
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
    reads: list[TileRead]
    out_rows: torch.Tensor
    """[padded * query_heads] row of each output head in the groups' results, one group after the other."""
    logit_rows: torch.Tensor
    """[safe count >= num_logits] rows of the hidden state that go through the head."""
    num_logits: int
    layers_seen: int = 0


class BatchBuilder:
    """Turns sequences into a Batch. `pad_rows`, `pad_head_rows` and `pad_query_rows` give the safe row counts."""

    def __init__(
        self,
        cache: KVCache,
        query_heads: int,
        *,
        pad_rows: Callable[[int], int],
        pad_head_rows: Callable[[int], int],
        pad_query_rows: Callable[[int], int],
    ) -> None:
        self._cache = cache
        self._query_heads = query_heads
        self._share = query_heads // cache.kv_heads
        self._pad_rows = pad_rows
        self._pad_head_rows = pad_head_rows
        self._pad_query_rows = pad_query_rows
        self._device = cache.data.device

    def build(self, sequences: list[SequenceRows]) -> Batch:
        """Rows stand in the order given."""
        counts = [len(s.token_ids) for s in sequences]
        offsets = np.cumsum([0, *counts])
        tokens = int(offsets[-1])
        padded = self._pad_rows(tokens)
        input_ids = np.zeros(padded, np.int64)
        positions = np.zeros(padded, np.int64)
        write_rows = np.empty(tokens, np.int64)
        logit_rows: list[int] = []
        blocks = [np.asarray(s.block_ids, np.int64) for s in sequences]
        for i, s in enumerate(sequences):
            begin, end = offsets[i], offsets[i + 1]
            input_ids[begin:end] = s.token_ids
            positions[begin:end] = np.arange(s.start, s.start + counts[i])
            write_rows[begin:end] = self._cache.token_rows(blocks[i], positions[begin:end])
            logit_rows.extend(range(end - s.num_logits, end))
        num_logits = len(logit_rows)
        if num_logits:
            logit_rows.extend([logit_rows[0]] * (self._pad_head_rows(num_logits) - num_logits))
        out_rows = np.zeros(padded * self._query_heads, np.int64)
        reads = self._reads(sequences, counts, offsets, blocks, out_rows)
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
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _reads(
        self, sequences: list[SequenceRows], counts: list[int], offsets: Index, blocks: list[Index], out_rows: Index
    ) -> list[TileRead]:
        reads: list[TileRead] = []
        results = 0  # rows of the groups' results so far
        narrow = [i for i, n in enumerate(counts) if n <= NARROW_ROWS]
        tiles_of = [_tiles(s.start + n) for s, n in zip(sequences, counts, strict=True)]
        narrow.sort(key=lambda i: -tiles_of[i])
        while narrow:
            members = _take(narrow, tiles_of)
            firsts = np.array([offsets[i] for i in members])
            starts = np.array([sequences[i].start for i in members])
            lengths = np.array([counts[i] for i in members])
            group = self._group(firsts, starts, lengths, [tiles_of[i] for i in members], results, out_rows)
            results += group.sequences * self._cache.kv_heads * group.rows
            reads.append(self._read([blocks[i] for i in members], [tiles_of[i] for i in members], [group]))
        for i, n in enumerate(counts):
            if n <= NARROW_ROWS:
                continue
            groups = []
            for begin in range(0, n, CHUNK_ROWS):
                length = min(CHUNK_ROWS, n - begin)
                start = sequences[i].start + begin
                one = (np.array([offsets[i] + begin]), np.array([start]), np.array([length]))
                groups.append(self._group(*one, [_tiles(start + length)], results, out_rows))
                results += self._cache.kv_heads * groups[-1].rows
            reads.append(self._read([blocks[i]], [tiles_of[i]], groups))
        return reads

    def _read(self, blocks: list[Index], tiles: list[int], groups: list[QueryGroup]) -> TileRead:
        """Positions past a sequence's last block read its first block again: hidden by the mask, and never foreign."""
        ordered, _ = _tile_order(tiles)
        rows = np.empty((len(ordered), TILE_TOKENS), np.int64)
        for s, ids in enumerate(blocks):
            positions = np.arange(tiles[s] * TILE_TOKENS)
            positions[positions >= len(ids) * self._cache.block_tokens] = 0
            rows[ordered[:, 0] == s] = self._cache.token_rows(ids, positions).reshape(-1, TILE_TOKENS)
        heads = np.arange(self._cache.kv_heads)
        head_rows = rows[:, None, :] * self._cache.kv_heads + heads[None, :, None]
        return TileRead(head_rows=self._tensor(head_rows.reshape(-1)), tiles=len(ordered), groups=groups)

    def _group(
        self, firsts: Index, starts: Index, lengths: Index, tiles: list[int], results: int, out_rows: Index
    ) -> QueryGroup:
        """`firsts`, `starts`, `lengths` [sequences]: first batch row, its position, rows; longest sequence first."""
        kv_heads, share = self._cache.kv_heads, self._share
        width = int(lengths.max())
        rows = self._pad_query_rows(width * share)
        # Row m of a kv head is query head `m // width` of its share and new token `m % width`; the rest is padding.
        m = np.arange(rows)
        token = np.where(m < width * share, m % width, 0)
        head = np.where(m < width * share, m // width, 0)
        token = np.where(token[None, :] < lengths[:, None], token[None, :], 0)  # [sequences, rows]
        row_positions = starts[:, None] + token
        heads = np.arange(kv_heads)[:, None] * share + head[None, :]  # [kv_heads, rows]
        q_rows = (firsts[:, None] + token)[:, None, :] * self._query_heads + heads[None]  # [sequences, kv_heads, rows]
        for s, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
            t, q = np.arange(length)[:, None], np.arange(share * kv_heads)[None, :]
            kv_head, within = q // share, q % share
            found = results + (s * kv_heads + kv_head) * rows + within * width + t
            out_rows[first * self._query_heads : (first + length) * self._query_heads] = found.reshape(-1)
        ordered, spans = _tile_order(tiles)
        mask_from = int(starts[0] + 1) // TILE_TOKENS if len(tiles) == 1 else 0
        of, index = ordered[:, 0], ordered[:, 1]
        keys = index[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS)
        return QueryGroup(
            q_rows=self._tensor(q_rows[of].reshape(-1)),
            tile_sequence=self._tensor(of),
            spans=spans,
            sequences=len(tiles),
            rows=rows,
            tiles=len(ordered),
            mask_from=mask_from,
            row_positions=self._tensor(row_positions[of][:, None, :, None]),
            key_positions=self._tensor(keys[:, None, None, :]),
        )


def _tiles(context: int) -> int:
    return -(-context // TILE_TOKENS)


def _take(narrow: list[int], tiles_of: list[int]) -> list[int]:
    """Remove from `narrow`, and return, as many sequences as one group may hold, at least one."""
    total = 0
    for taken, i in enumerate(narrow):
        total += tiles_of[i]
        if taken and total > GROUP_TILES:
            members, narrow[:taken] = narrow[:taken], []
            return members
    members, narrow[:] = list(narrow), []
    return members


def _tile_order(tiles: list[int]) -> tuple[Index, list[tuple[int, int]]]:
    """([total, 2] (sequence, tile) by tile index then sequence, the slice of each tile index). `tiles` never grows."""
    pairs: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    for j in range(tiles[0]):
        begin = len(pairs)
        pairs.extend((s, j) for s, n in enumerate(tiles) if n > j)
        spans.append((begin, len(pairs)))
    return np.array(pairs, np.int64), spans
