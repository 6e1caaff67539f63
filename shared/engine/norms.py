"""Replaces root-mean-square norms, five small operations in Transformers, by one that gives the same values."""

from __future__ import annotations

import torch
from torch import nn


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, each row on its own."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        size = weight.numel()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        # The mean's division by `size` is folded into both constants.
        self._scaled_weight = weight.detach() * size**0.5
        self._scaled_eps = eps * size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        scale = (x * x).sum(-1, keepdim=True).add_(self._scaled_eps).rsqrt_()
        return (x * scale).mul_(self._scaled_weight)


def replace_norms(model: nn.Module) -> None:
    """Replace norms named `*RMSNorm` where a trial input shows the plain formula; others stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if not type(child).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or eps is None:
                continue
            fused = FusedRMSNorm(weight, float(eps))
            trial = torch.linspace(-3, 3, 4 * weight.numel(), dtype=weight.dtype, device=weight.device)
            trial = trial.view(4, -1).sin()
            if torch.allclose(fused(trial), child(trial), rtol=1e-5, atol=1e-6):
                setattr(parent, name, fused)
