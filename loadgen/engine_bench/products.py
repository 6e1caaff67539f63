"""The matrix products of a forward alone: what no arrangement of the rest can save."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from loadgen.engine_bench.counting import product_flops
from shared.engine.packed_linear import ByteLinear, HalfLinear, Int8Linear, PackedLinear
from shared.engine.runner import ModelRunner

_LINEAR = (HalfLinear, PackedLinear, ByteLinear, Int8Linear, nn.Linear)


class Products:
    """A loaded model's own linear layers, in their order. Of a mixture of experts, all experts are called."""

    def __init__(self, runner: ModelRunner) -> None:
        found: list[nn.Module] = [m for m in runner.model.module.modules() if isinstance(m, _LINEAR)]
        self._head = next(m for m in reversed(found) if m.out_features == runner.model.vocab_size)
        self._layers = [m for m in found if m is not self._head]

    def flops(self, rows: int, head_rows: int) -> int:
        """Operations of one forward of `rows`, of which `head_rows` go through the head."""
        return sum(_flops(layer, rows) for layer in self._layers) + _flops(self._head, head_rows)

    def call(self, rows: int, head_rows: int) -> Callable[[], None]:
        """All products of one such forward, on random inputs."""
        widths = {_width(layer) for layer in self._layers}
        inputs = {width: torch.randn(1, rows, width) for width in widths}
        calls = [(layer.forward, inputs[_width(layer)]) for layer in self._layers]
        if head_rows:
            calls.append((self._head.forward, torch.randn(1, head_rows, _width(self._head))))

        @torch.inference_mode()
        def run() -> None:
            for product, x in calls:
                product(x)

        return run


def _width(layer: nn.Module) -> int:
    return int(layer.in_features)  # type: ignore[arg-type]


def _flops(layer: nn.Module, rows: int) -> int:
    return product_flops(rows, _width(layer), int(layer.out_features))  # type: ignore[arg-type]
