"""Linear layers for few rows on CPU: fp16 weights in fbgemm's packed form, and siblings fused into one product."""

from __future__ import annotations

import torch
from torch import nn

_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Children that Transformers calls one after the other on the same input; fused where all are plain Linear layers."""


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with weights rounded to fp16 and sums in fp32. The fp32 weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
        # The overload's own __call__ inspects its arguments for 5 us each time; the operator below it does not.
        self._product = torch.ops.quantized.linear_dynamic_fp16.default._op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], fp32."""
        return self._product(x, self._packed)  # type: ignore[no-any-return]


class FusedPart(nn.Module):
    """Stands where one of several siblings stood. The first one called with an input computes for all of them."""

    def __init__(self, first: FusedPart | None, index: int, product: nn.Module, widths: list[int]) -> None:
        """`first` is the part of index 0, which holds the product; None when this is it."""
        super().__init__()
        self._index = index
        self._widths = widths
        self._last = index == len(widths) - 1
        # Not a submodule: the product belongs to the first part alone.
        self.__dict__["_first"] = first or self
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        if first is None:
            self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., this part's width]"""
        first: FusedPart = self.__dict__["_first"]
        if first._input is not x:
            first._input = x
            first._parts = first.product(x).split_with_sizes(self._widths, -1)
        part = first._parts[self._index]
        if self._last:
            first._input, first._parts = None, ()
        return part


def _as_linear(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [out, in], bias) of a plain linear layer, else None. Transformers' Conv1D keeps its weight transposed."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return module.get_parameter("weight").T, module.get_parameter("bias")
    return None


def replace_linears(model: nn.Module, *, packed: bool) -> None:
    """Fuse sibling projections and, when `packed`, hold every linear layer's weight as packed fp16."""
    if packed:
        torch.backends.quantized.engine = "fbgemm"

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        if packed:
            return PackedLinear(weight, bias)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return linear

    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in _GROUPS:
            found = [_as_linear(children[n]) for n in names if type(children.get(n)) is nn.Linear]
            parts = [p for p in found if p is not None]
            if len(parts) != len(names) or len({p[1] is None for p in parts}) != 1:
                continue
            if len({p[0].shape[1] for p in parts}) != 1:
                continue
            biases = [p[1] for p in parts if p[1] is not None]
            product = make(torch.cat([p[0].detach() for p in parts]), torch.cat(biases).detach() if biases else None)
            first: FusedPart | None = None
            for index, name in enumerate(names):
                part = FusedPart(first, index, product, [p[0].shape[0] for p in parts])
                first = first or part
                setattr(parent, name, part)
                del children[name]
        for name, child in children.items():
            linear = _as_linear(child) if packed else None
            if linear is not None:
                weight, bias = linear
                setattr(parent, name, PackedLinear(weight, bias.detach() if bias is not None else None))
