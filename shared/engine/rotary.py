"""Rotary position embeddings from a table, so that a position's values never depend on the rest of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared.engine.errors import UnsupportedModel

_CHUNK = 1024
"""Positions are computed in chunks of this fixed length, whatever the batch asks for."""

_FIXED_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}
"""Scalings whose frequencies depend on the position alone. `dynamic` and `longrope` look at the longest neighbour."""


class RotaryTable(nn.Module):
    """Answers like the rotary module it wraps, `(x, position_ids) -> (cos, sin)`, by looking the rows up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """position_ids [1, tokens] -> cos and sin, each [1, tokens, rotary_dim]."""
        key = (x.dtype, args, tuple(sorted(kwargs.items())))
        last = int(position_ids.max())
        table = self._tables.get(key)
        while table is None or last >= table[0].shape[0]:
            start = 0 if table is None else table[0].shape[0]
            chunk = torch.arange(start, start + _CHUNK, device=position_ids.device)[None]
            cos, sin = self.inner(x, chunk, *args, **kwargs)
            more = (cos[0], sin[0])
            table = more if table is None else (torch.cat((table[0], more[0])), torch.cat((table[1], more[1])))
            self._tables[key] = table
        rows = position_ids[0]
        return table[0].index_select(0, rows)[None], table[1].index_select(0, rows)[None]


def replace_rotary(model: nn.Module, model_type: str) -> None:
    """Wrap each rotary module. Raises UnsupportedModel for frequencies that depend on the batch."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not type(child).__name__.endswith("RotaryEmbedding"):
                continue
            types = getattr(child, "rope_type", "default")
            for rope_type in types.values() if isinstance(types, dict) else [types]:
                if rope_type not in _FIXED_TYPES:
                    raise UnsupportedModel(
                        f"model type {model_type!r} scales rotary positions by {rope_type!r}, which depends on the "
                        "longest sequence of a batch"
                    )
            setattr(parent, name, RotaryTable(child))
