"""The attention that models call: registered with Transformers' attention interface, done by an AttentionBackend."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from shared.engine.batch import AttentionShape, Batch
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

    Raises UnsupportedModel when the model asks for something that no backend computes.
    """
    batch: Batch = kwargs.pop(BATCH_KEY)
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in _IGNORED:
            raise UnsupportedModel(f"{type(module).__name__} wants attention with {name!r}, which is not served")
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own, which is not served")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = AttentionShape(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    batch.shapes_seen[layer] = shape
    return batch.backend.attend(batch.plan, layer, query, key, value, shape), None


def register() -> None:
    """Make the attention known to Transformers under ATTENTION_NAME. Models then build no mask of their own."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
