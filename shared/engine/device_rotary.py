"""Rotary tables on a GPU: whole from the first call on, so that looking them up never asks the device for a number.

The host could not run ahead of the device otherwise, and such a look-up could not be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared.engine.rotary import RotaryTable


class WholeRotaryTable(RotaryTable):
    """A RotaryTable that computes all positions of the model at once. The caller keeps to those positions."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """position_ids [1, tokens] -> cos and sin, each [1, tokens, rotary_dim]."""
        key = (x.dtype, args, tuple(sorted(kwargs.items())))
        if key not in self._tables:
            last = torch.tensor([[self._positions - 1]], device=position_ids.device)
            super().forward(x, last, *args, **kwargs)
        cos, sin = self._tables[key]
        rows = position_ids[0]
        return cos.index_select(0, rows)[None], sin.index_select(0, rows)[None]


def make_tables_whole(model: nn.Module) -> None:
    """Put a WholeRotaryTable where a RotaryTable stands. Both give the same bits."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is RotaryTable:
                setattr(parent, name, WholeRotaryTable(child.inner, child._positions))
