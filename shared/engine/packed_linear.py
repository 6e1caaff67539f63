"""Linear layers on CPU with weights of 16 or 8 bits, and sibling projections as one product."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from shared.engine.errors import EngineError
from shared.engine.kernels import has_byte_products, library

PANEL = 32
"""Outputs that the kernel computes together."""

_QUAD = 4
"""Products of bytes that one instruction adds up."""

_LEVELS = 127
"""Steps of an 8-bit weight's magnitude."""

_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Children that Transformers calls one after the other on the same input; fused where all are plain Linear layers."""


class HalfLinear(nn.Module):
    """`x @ weight.T + bias` with weights rounded to fp16 and sums in fp32, by our kernel, on one thread.

    The same bits at any number of rows, and those of PackedLinear where the outputs are a multiple of 32; quicker than
    that at few rows, and the weights take no room for padding.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("panels", _panels(weight), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone(), persistent=False)
        # The kernel takes addresses; looking a buffer up costs more than calling it.
        self._panels_at = self.panels.data_ptr()
        self._bias_at = None if self.bias is None else self.bias.data_ptr()
        self._kernel = library().hr_linear_half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], fp32."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        self._kernel(
            x.data_ptr(),
            self._panels_at,
            self._bias_at,
            out.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
        )
        return out


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> fp16 [ceil(out / PANEL), in, PANEL], zeros behind the last output. Nothing becomes infinite."""
    size, depth = weight.shape
    limit = torch.finfo(torch.float16).max
    panels = torch.zeros((-(-size // PANEL), PANEL, depth), dtype=torch.float16)
    panels.view(-1, depth)[:size] = weight.detach().float().clamp(-limit, limit).half()
    return panels.transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with weights rounded to fp16 and sums in fp32, by fbgemm, on all of torch's threads."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        _use_fbgemm()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
        # The overload's own __call__ inspects its arguments for 5 us each time; the operator below it does not.
        self._product = torch.ops.quantized.linear_dynamic_fp16.default._op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], fp32."""
        return self._product(x, self._packed)  # type: ignore[no-any-return]


class ByteLinear(nn.Module):
    """`x @ weight.T + bias` with 8-bit weights (one scale for each output) and 8-bit inputs (one scale for each row).

    By our kernel, on one thread, where the processor has AVX-512 VNNI.

    The products are summed as integers, so they are exact, and a row's scale is its own: nothing depends on neighbours.
    """

    panels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._padded = -(-self.in_features // _QUAD) * _QUAD
        panels, scales, sums = _byte_panels(weight)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone(), persistent=False)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        self._weights_at = (panels.data_ptr(), scales.data_ptr(), sums.data_ptr(), bias_at)
        self._kernel = library().hr_linear_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], fp32."""
        x = x.contiguous()
        rows = x.numel() // self.in_features
        out = x.new_empty((*x.shape[:-1], self.out_features))
        room, row_scales = torch.empty((rows, self._padded), dtype=torch.uint8), torch.empty(rows)
        self._kernel(
            x.data_ptr(),
            *self._weights_at,
            out.data_ptr(),
            room.data_ptr(),
            row_scales.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
        )
        return out


def _byte_panels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> (int8 [ceil(out / PANEL), ceil(in / 4), PANEL, 4]; of each output, padded: its scale, fp32, and the
    sum of its bytes, int32)."""
    size, depth = weight.shape
    panels, quads = -(-size // PANEL), -(-depth // _QUAD)
    weight = weight.detach().float()
    scales = torch.ones(panels * PANEL)
    scales[:size] = (weight.abs().amax(1) / _LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
    padded = torch.zeros((panels * PANEL, quads * _QUAD), dtype=torch.int8)
    padded[:size, :depth] = (weight / scales[:size, None]).round().to(torch.int8)
    sums = padded.sum(1, dtype=torch.int32)
    return padded.view(panels, PANEL, quads, _QUAD).transpose(1, 2).contiguous(), scales, sums


class Int8Linear(nn.Module):
    """The same by fbgemm, on all of torch's threads and on any x86 processor; slower at few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._packed = _pack_int8(weight)
        self._levels = input_levels()
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
        kernels = library()
        self._unit_rows, self._scale_rows = kernels.hr_unit_rows, kernels.hr_scale_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], fp32."""
        x = x.contiguous()
        rows = x.numel() // self.in_features
        unit, scales = torch.empty_like(x), torch.empty(rows)
        self._unit_rows(x.data_ptr(), unit.data_ptr(), scales.data_ptr(), rows, self.in_features)
        out: torch.Tensor = self._product(unit, 1 / self._levels, _zero_point(self._levels), self._packed)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._scale_rows(out.data_ptr(), scales.data_ptr(), bias, rows, self.out_features)
        return out


def _use_fbgemm() -> None:
    """What is packed from now on is fbgemm's. Raises EngineError where torch was built without it (not on x86)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise EngineError(
            "torch was built without fbgemm for this processor; use dtype fp32, or fp16-packed with one thread"
        )
    torch.backends.quantized.engine = "fbgemm"


def _pack_int8(weight: torch.Tensor) -> torch.ScriptObject:
    _use_fbgemm()
    weight = weight.detach().float().contiguous()
    scales = (weight.abs().amax(1) / _LEVELS).clamp_(min=torch.finfo(torch.float32).tiny).double()
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():  # torch announces that this will go some day; the versions are pinned
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def _zero_point(levels: int) -> int:
    """Unsigned inputs stand for signed ones around the middle of what the kernel takes."""
    return levels + 1


@cache
def input_levels() -> int:
    """Into how many steps an input's magnitude is cut: 127, or 63 where the processor's 8-bit products overflow.

    Without VNNI instructions they add pairs in 16 bits, which large inputs and weights exceed; seen by a trial.
    """
    size = 64
    packed = _pack_int8(torch.ones(size, size))
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    exact = bool((product(torch.ones(4, size), 1 / 127, _zero_point(127), packed) > size - 1e-3).all())
    return 127 if exact else 63


class FusedPart(nn.Module):
    """Stands where one of several siblings stood. The first one called with an input computes for all of them."""

    def __init__(self, first: FusedPart | None, index: int, product: nn.Module, widths: list[int]) -> None:
        """`first` is the part of index 0, which holds the product; None when this is it."""
        super().__init__()
        self.width = widths[index]
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


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""(weight [out, in], bias or None) -> a module that computes `x @ weight.T + bias`."""


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """The weights as they are."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def linear_maker(dtype: str, threads: int) -> MakeLinear:
    """How linear layers are held under an EngineConfig's `dtype` and `threads`."""
    makers: dict[str, MakeLinear] = {
        "fp16-packed": HalfLinear if threads == 1 else PackedLinear,
        "int8": ByteLinear if threads == 1 and has_byte_products() else Int8Linear,
    }
    return makers.get(dtype, plain_linear)


def replace_linears(model: nn.Module, make: MakeLinear) -> None:
    """Fuse sibling projections, and hold every linear layer's weight as `make` does."""
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
            linear = _as_linear(child) if make is not plain_linear else None
            if linear is not None:
                weight, bias = linear
                setattr(parent, name, make(weight, bias.detach() if bias is not None else None))
