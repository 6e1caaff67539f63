"""Rotary position embeddings from a table, so that a position's values never depend on the rest of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared.engine.errors import UnsupportedModel

_CHUNK = 1024
"""Positions are computed in chunks of this fixed length, whatever the batch asks for."""

_FIXED_TYPES = {"default", "linear", "llama3", "yarn", "proportional", "dynamic"}
"""Scalings whose frequencies depend on the position alone; `dynamic` ones do up to the model's number of positions."""


class RotaryTable(nn.Module):
    """Answers like the rotary module it wraps, `(x, position_ids) -> (cos, sin)`, by looking the rows up."""

    def __init__(self, inner: nn.Module, positions: int) -> None:
        """`inner` is never asked for positions from `positions` on."""
        super().__init__()
        self.inner = inner
        self._positions = positions
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """position_ids [1, tokens] -> cos and sin, each [1, tokens, rotary_dim]. Raises IndexError beyond the end."""
        key = (x.dtype, args, tuple(sorted(kwargs.items())))
        last = int(position_ids.max())
        if last >= self._positions:
            raise IndexError(f"position {last} is beyond the {self._positions} positions of the model")
        table = self._tables.get(key)
        while table is None or last >= table[0].shape[0]:
            start = 0 if table is None else table[0].shape[0]
            end = min(start + _CHUNK, self._positions)
            cos, sin = self.inner(x, torch.arange(start, end, device=position_ids.device)[None], *args, **kwargs)
            more = (cos[0], sin[0])
            table = more if table is None else (torch.cat((table[0], more[0])), torch.cat((table[1], more[1])))
            self._tables[key] = table
        rows = position_ids[0]
        return table[0].index_select(0, rows)[None], table[1].index_select(0, rows)[None]


def replace_rotary(model: nn.Module, model_type: str, positions: int) -> int:
    """Wrap each rotary module of a model with `positions` positions; returns how many of them can be served exactly.

    With `longrope`, all frequencies of a batch change once its longest sequence exceeds the length that the model was
    first trained for, so that is the number. Raises UnsupportedModel for scalings that are not known.
    """
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                found.append((parent, name, child))
                positions = min(positions, _exact_positions(child, model_type, positions))
    for parent, name, child in found:
        setattr(parent, name, RotaryTable(child, positions))
    return positions


def _exact_positions(rotary: Any, model_type: str, positions: int) -> int:
    types = getattr(rotary, "rope_type", "default")
    for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
        if rope_type == "longrope":
            rope = rotary.config.rope_parameters
            rope = rope if layer_type is None else rope[layer_type]
            positions = min(positions, int(rope["original_max_position_embeddings"]))
        elif rope_type not in _FIXED_TYPES:
            raise UnsupportedModel(
                f"model type {model_type!r} scales rotary positions by {rope_type!r}, which is not served"
            )
    return positions
