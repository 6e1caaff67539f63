"""The memory of the paged KV cache and the views that attention reads and writes. Knows nothing of sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.protocol.blocks import KVLayout

Index = NDArray[np.int64]

_PAGE = 4096


class KVCache:
    """One tensor `[num_blocks, 2 (K, V), layers, block_tokens, kv_heads, head_dim]`, each block contiguous.

    A token's *token row* is its index in the cache seen as `[num_blocks * 2 * layers * block_tokens, kv_heads *
    head_dim]` for layer 0's K; the K or V of another layer lies a fixed number of rows behind it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.layers = layout.layers
        self.block_tokens = layout.block_tokens
        self.kv_heads = layout.kv_heads
        self.head_dim = layout.head_dim
        shape = (num_blocks, 2, layout.layers, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.data = _zeros(shape, getattr(torch, layout.kv_dtype), device)
        self.rows_per_block = 2 * layout.layers * layout.block_tokens

    def clear(self, block_ids: list[int]) -> None:
        """Zero the blocks, so that no value of an earlier holder (a NaN, say) can reach a new one."""
        for block_id in block_ids:
            self.data[block_id].zero_()
        if self.data.device.type == "cuda" and block_ids:
            # UCX, which knows nothing of torch's stream, may fill the block next.
            torch.cuda.current_stream(self.data.device).synchronize()

    def copy(self, source: int, target: int) -> None:
        """Give block `target` the contents of block `source`."""
        self.data[target].copy_(self.data[source])

    def buffer(self, block_id: int) -> Any:
        """The block's bytes, writable and without a copy: a uint8 numpy array on CPU, a device tensor on CUDA."""
        flat = self.data[block_id].view(-1).view(torch.uint8)
        return flat.numpy() if self.data.device.type == "cpu" else flat

    def token_rows(self, block_ids: Index, positions: Index) -> Index:
        """Token rows of a sequence's positions, given its blocks in order. Shapes: [blocks], [any] -> [any] int64."""
        rows: Index = block_ids[positions // self.block_tokens] * self.rows_per_block + positions % self.block_tokens
        return rows


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPU the pages are mapped at first use: touching gigabytes at start would take seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _PAGE, np.uint8)
    skipped = -raw.ctypes.data % _PAGE
    return torch.from_numpy(raw[skipped : skipped + size]).view(dtype).view(shape)
