"""Attention over the paged cache, registered with Transformers' attention interface.

Bitwise independent of batch, chunking and block order: every row reduces over its context in tiles of fixed length, each
tile is a product of fixed shape (rows padded to a count proven safe), and tiles are summed in order, first to last. Tiles
and keys that a row must not see contribute exact zeros, so a longer neighbour changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from shared.engine.batch import TILE_TOKENS, Batch, QueryGroup
from shared.engine.errors import UnsupportedModel

ATTENTION_NAME = "headrace_paged"
BATCH_KEY = "headrace_batch"
"""Keyword that carries the Batch through the model to `paged_attention`."""

_IGNORED = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "cache", "output_attentions"}
_IGNORED |= {"past_key_values", "position_embeddings", "output_hidden_states", "logits_to_keep", "return_dict"}


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new K and V, then attend. Shapes: query [1, query_heads, padded, head_dim], key and value
    [1, kv_heads, padded, head_dim]; result [1, padded, query_heads, head_dim].

    Raises UnsupportedModel when the model asks for something that this function does not compute.
    """
    batch: Batch = kwargs.pop(BATCH_KEY)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in _IGNORED)
    if unknown or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} wants attention features not served: {unknown or 'a mask'}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch.layers_seen += 1
    cache = batch.cache
    head_dim = cache.head_dim
    for source, rows in ((key, cache.write_k[layer]), (value, cache.write_v[layer])):
        new = source[0].transpose(0, 1)[: batch.tokens].reshape(batch.tokens, -1)
        rows.index_copy_(0, batch.write_rows, new)
    q = query[0].transpose(0, 1).reshape(-1, head_dim)
    q = q * (head_dim**-0.5 if scaling is None else scaling)
    results: list[torch.Tensor] = []
    for read in batch.reads:
        shape = (read.tiles * cache.kv_heads, TILE_TOKENS, head_dim)
        k = cache.read_k[layer].index_select(0, read.head_rows).view(shape)
        v = cache.read_v[layer].index_select(0, read.head_rows).view(shape)
        for group in read.groups:
            used = group.tiles * cache.kv_heads
            results.append(_attend(q, k[:used], v[:used], group, cache.kv_heads, sliding_window, softcap))
    joined = results[0] if len(results) == 1 else torch.cat(results)
    out = joined.index_select(0, batch.out_rows)
    return out.view(1, batch.padded, -1, head_dim), None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: QueryGroup,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Rows of one group: [sequences * kv_heads * rows, head_dim]. k, v [tiles * kv_heads, TILE_TOKENS, head_dim]."""
    head_dim = q.shape[1]
    tile_q = q.index_select(0, group.q_rows).view(-1, group.rows, head_dim)
    scores = torch.bmm(tile_q, k.transpose(1, 2)).float()  # [tiles * kv_heads, rows, TILE_TOKENS]
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    scores = scores.view(group.tiles, kv_heads, group.rows, TILE_TOKENS)
    first, hidden = group.hidden(window)
    scores[first:].masked_fill_(hidden, float("-inf"))
    best = _over_tiles(scores.amax(-1), group, torch.maximum)  # [sequences, kv_heads, rows], exact in any order
    scores.sub_(best.index_select(0, group.tile_sequence).unsqueeze(-1))
    weights = scores.exp_()
    total = _over_tiles(weights.sum(-1), group, torch.add)
    tiles_out = torch.bmm(weights.view(-1, group.rows, TILE_TOKENS).to(v.dtype), v).float()
    out = _over_tiles(tiles_out.view(group.tiles, kv_heads, group.rows, head_dim), group, torch.add)
    return out.div_(total.unsqueeze(-1)).view(-1, head_dim).to(v.dtype)


def _over_tiles(parts: torch.Tensor, group: QueryGroup, combine: Any) -> torch.Tensor:
    """Combine [tiles, ...] into [sequences, ...], tile 0 first, one tile after the other."""
    total = parts[: group.sequences]
    for begin, end in group.spans[1:]:
        head = total[: end - begin]
        combine(head, parts[begin:end], out=head)
    return total


def register() -> None:
    """Make the attention known to Transformers under ATTENTION_NAME. Models then build no mask of their own."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
