"""Attention over the paged cache, registered with Transformers' attention interface.

Bitwise independent of batch, chunking and block order: scores and softmax are computed for each row on its own, over a
context length that is proven to give the same bits as any longer one; values are summed in tiles of fixed length, in
order. What a row must not see contributes exact zeros, so padding and longer neighbours change nothing.
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
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in _IGNORED:
            raise UnsupportedModel(f"{type(module).__name__} wants attention with {name!r}, which is not served")
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own, which is not served")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch.layers_seen += 1
    cache, tokens = batch.cache, batch.tokens
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    for source, rows in ((key, cache.write_k[layer]), (value, cache.write_v[layer])):
        new = source.transpose(1, 2).reshape(batch.padded, kv_heads * head_dim)
        rows.index_copy_(0, batch.write_rows, new if tokens == batch.padded else new[:tokens])
    q = query.transpose(1, 2).reshape(-1, head_dim) * (head_dim**-0.5 if scaling is None else scaling)
    results: list[torch.Tensor] = []
    for read in batch.reads:
        shape = (read.sequences, read.context, kv_heads, head_dim)
        k = cache.read_k[layer].index_select(0, read.rows).view(shape)
        v = cache.read_v[layer].index_select(0, read.rows).view(shape)
        results.extend(attend(q, k, v, group, sliding_window, softcap) for group in read.groups)
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return joined.index_select(0, batch.out_rows).view(1, batch.padded, -1, head_dim), None


def attend(
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


def register() -> None:
    """Make the attention known to Transformers under ATTENTION_NAME. Models then build no mask of their own."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
