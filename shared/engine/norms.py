"""Replaces root-mean-square norms, five small operations in Transformers, by one kernel that gives the same values."""

from __future__ import annotations

import torch
from torch import nn

from shared.engine.kernels import library


class KernelRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, each row on its own. For fp32 on CPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.eps = eps
        self._size = weight.numel()
        self._kernel = library().hr_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(
            x.data_ptr(),
            None,
            self.weight.data_ptr(),
            self.eps,
            out.data_ptr(),
            x.numel() // self._size,
            self._size,
        )
        return out


def replace_norms(model: nn.Module) -> None:
    """Replace norms named `*RMSNorm` where a trial input shows the plain formula; others stay as they are.

    Some models (Gemma) store the weight's distance from 1.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if not type(child).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or eps is None:
                continue
            trial = torch.linspace(-3, 3, 4 * weight.numel(), dtype=weight.dtype).view(4, -1).sin()
            expected = child(trial)
            for norm in (KernelRMSNorm(weight, float(eps)), KernelRMSNorm(weight + 1, float(eps))):
                if torch.allclose(norm(trial), expected, rtol=1e-5, atol=1e-6):
                    setattr(parent, name, norm)
                    break
