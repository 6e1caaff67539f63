"""Matrix products on CUDA that give a row the same bits in every batch.

cuBLAS picks its kernel by the shape of the whole product, so a row's sums are ordered differently among 8 rows than
among 300. Here rows go through products of few fixed shapes: tiles of `TILE_ROWS`, and larger ones where those were
seen, on this device and for these weights, to give the bits of the tiles.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from shared.engine.errors import NumericsError

TILE_ROWS = 64
"""Rows of every small product. A decode step is bound by reading weights, so that rows that pad cost little."""

LARGER_ROWS = (1024, 512, 256, 128)
"""Tried at load, largest first; prompts need them, since each tile reads the weights again."""

_WORKSPACE = ":4096:8"
"""One of the two settings under which cuBLAS promises the same result in each run, whatever else the device does."""


def prepare_device() -> None:
    """What torch must be told before the first product: sums in fp32, and nothing that varies between runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_bf16_reduced_precision_reduction = False


class TiledLinear(nn.Module):
    """`x @ weight.T + bias`, computed in products of the row counts in `sizes` only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A parameter that embeddings share stays that one, so that it is moved to the device once.
        shared = isinstance(weight, nn.Parameter) and weight.is_contiguous()
        self.weight = weight if shared else nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().contiguous(), requires_grad=False)
        self.sizes: tuple[int, ...] = (TILE_ROWS,)
        """Row counts that give the same bits, largest first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        # Contiguous, because the distance between rows is part of what cuBLAS decides by.
        flat = x.reshape(-1, self.in_features).contiguous()
        rows = len(flat)
        missing = -rows % TILE_ROWS
        if missing:
            flat = nn.functional.pad(flat, (0, 0, 0, missing))
        parts = [nn.functional.linear(part, self.weight, self.bias) for part in torch.split(flat, self._cut(len(flat)))]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out[:rows].view(*x.shape[:-1], self.out_features)

    def _cut(self, rows: int) -> list[int]:
        """Sizes that add up to `rows`, a multiple of TILE_ROWS."""
        cut: list[int] = []
        for size in self.sizes:
            count, rows = divmod(rows, size)
            cut += [size] * count
        return cut


def prove_tiles(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Find which larger products may be used, for each kind of TiledLinear; returns that by kind.

    Raises NumericsError when the place of a row within one tile decides over its bits: then nothing here helps.
    """
    kinds: dict[str, list[TiledLinear]] = {}
    for layer in module.modules():
        if isinstance(layer, TiledLinear):
            bias = "" if layer.bias is None else "+bias"
            kinds.setdefault(f"{layer.in_features}->{layer.out_features}{bias}", []).append(layer)
    for kind, layers in kinds.items():
        sizes = _proven_sizes(layers[0], kind)
        for layer in layers:
            layer.sizes = sizes
    return {kind: layers[0].sizes for kind, layers in kinds.items()}


@torch.inference_mode()
def _proven_sizes(layer: TiledLinear, kind: str) -> tuple[int, ...]:
    weight = layer.weight
    generator = torch.Generator().manual_seed(20_26)
    x = torch.randn((LARGER_ROWS[0], layer.in_features), generator=generator).to(weight.device, weight.dtype)
    expected = _bits(layer, torch.split(x, TILE_ROWS))
    turn = TILE_ROWS // 2 - 3
    turned = (tile.roll(turn, 0) for tile in torch.split(x, TILE_ROWS))
    found = _bits(layer, turned).view(-1, TILE_ROWS, layer.out_features).roll(-turn, 1)
    if not torch.equal(found.reshape(expected.shape), expected):
        raise NumericsError(
            f"a product {kind} of {TILE_ROWS} rows depends on where a row stands on this device; only exactness 'fast' "
            "can be served"
        )
    larger = (n for n in LARGER_ROWS if torch.equal(_bits(layer, torch.split(x, n)), expected))
    return (*larger, TILE_ROWS)


def _bits(layer: TiledLinear, tiles: Iterable[torch.Tensor]) -> torch.Tensor:
    """The product of each tile, one below the other, as integers; they stay on the device, since a head's are large."""
    out = torch.cat([nn.functional.linear(tile.contiguous(), layer.weight, layer.bias) for tile in tiles])
    return out.view(torch.int16 if out.element_size() == 2 else torch.int32)
