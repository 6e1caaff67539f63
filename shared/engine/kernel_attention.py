"""Paged attention on CPU by kernels of ours: each row alone, in a fixed order, straight from the cache's blocks."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from shared.engine.batch import AttentionShape, Span
from shared.engine.kernels import LayerCache, SequenceTable, library
from shared.engine.kv_cache import KVCache

_SHARED_WORK = 4096
"""Pairs of tokens from which on handing work to other threads, some 50 us, is worth it."""


class KernelAttention:
    """Attention over `cache` (fp32 or fp16, on CPU) for models of `query_heads` heads, on up to `threads` threads."""

    def __init__(self, cache: KVCache, query_heads: int, threads: int = 1) -> None:
        """Raises EngineError when the kernels were not built."""
        self._library = library()
        self._cache = cache
        self._query_heads = query_heads
        self._layers: dict[tuple[int, AttentionShape], LayerCache] = {}
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "attention") if threads > 1 else None
        self._scratch: NDArray[np.float32] = np.empty((threads, 0), np.float32)

    def plan(self, spans: list[Span], padded: int) -> SequenceTable:
        """The batch's sequences and blocks, in the form that every layer's kernels read; rows that pad are skipped."""
        longest = max(span.context for span in spans)
        needed = self._library.hr_attend_scratch(longest, self._cache.head_dim)
        if self._scratch.shape[1] < needed:
            self._scratch = np.empty((self._threads, needed), np.float32)
        sequences = np.empty((len(spans), 4), np.int64)
        offset = 0
        for row, span in zip(sequences, spans, strict=True):
            row[:] = (span.first, span.count, span.start, offset)
            offset += len(span.blocks)
        return SequenceTable(sequences, np.concatenate([span.blocks for span in spans]), self._scratch)

    def layer_cache(self, layer: int, shape: AttentionShape) -> LayerCache:
        """The kernels' description of one layer. It lives as long as this object."""
        found = self._layers.get((layer, shape))
        if found is None:
            cache = self._cache
            found = self._layers[layer, shape] = LayerCache(
                keys=cache.data[0, 0, layer].data_ptr(),
                values=cache.data[0, 1, layer].data_ptr(),
                element_bytes=cache.data.element_size(),
                block_tokens=cache.block_tokens,
                block_stride=cache.data.stride(0) * cache.data.element_size(),
                kv_heads=cache.kv_heads,
                head_dim=cache.head_dim,
                share=self._query_heads // cache.kv_heads,
                window=shape.window or 0,
                scaling=shape.scaling,
                softcap=shape.softcap or 0.0,
            )
        return found

    def attend(
        self, plan: SequenceTable, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Store the new K and V, then attend. q [1, query_heads, padded, head_dim]; k, v [1, kv_heads, padded,
        head_dim]. Returns [1, padded, query_heads, head_dim]."""
        described = ctypes.addressof(self.layer_cache(layer, shape))
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        if k.stride() != v.stride():
            k, v = k.contiguous(), v.contiguous()
        self._library.hr_write_kv(described, plan.address, k.data_ptr(), v.data_ptr(), k.stride(2), k.stride(1))
        out = q.new_zeros((1, q.shape[2], q.shape[1], q.shape[3]))
        self.attend_stored(described, plan, q.data_ptr(), q.stride(2), q.stride(1), out.data_ptr())
        return out

    def attend_stored(
        self, layer_cache: int, plan: SequenceTable, q: int, token_stride: int, head_stride: int, out: int
    ) -> None:
        """Attention alone, on addresses. The new K and V must have been stored."""
        call = (layer_cache, plan.address, q, token_stride, head_stride, out)
        attend = self._library.hr_attend
        if self._helpers is None or plan.work < _SHARED_WORK:
            attend(*call, 0, 1)
            return
        others = [self._helpers.submit(attend, *call, thread, self._threads) for thread in range(1, self._threads)]
        attend(*call, 0, self._threads)
        for other in others:
            other.result()
