"""Makes activation functions give an element the same bits wherever it stands.

Torch computes SiLU, GELU and sigmoid differently in whole vectors and in the few elements left over at the end of a run
(or of a thread's share). The wrapper leaves none over.
"""

from __future__ import annotations

import torch
from torch import nn

_VECTOR = 64
"""A multiple of the elements that any CPU loop of torch takes at once."""

_SERIAL_ELEMENTS = 32768 - _VECTOR
"""Torch splits elementwise work among threads only from 32,768 elements on."""

_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class UniformActivation(nn.Module):
    """An elementwise activation, evaluated in runs that are multiples of `_VECTOR` and small enough for one thread."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % _VECTOR == 0 and (torch.get_num_threads() == 1 or x.numel() <= _SERIAL_ELEMENTS):
            return self.inner(x)  # type: ignore[no-any-return]
        flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
        runs = [self.inner(run) for run in torch.split(flat, _SERIAL_ELEMENTS)]
        return torch.cat(runs)[: x.numel()].view(x.shape)


def replace_activations(model: nn.Module) -> None:
    """Wrap every parameterless activation module of `model`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _MODULES and not list(child.parameters()):
                setattr(parent, name, UniformActivation(child))
