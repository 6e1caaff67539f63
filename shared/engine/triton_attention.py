"""Paged attention on CUDA by Triton kernels: plans a batch as tensors of fixed shape, and starts the kernels.

A plan can be made once and refilled in place, which is what a captured graph needs. Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

from shared.engine.batch import AttentionShape, Span
from shared.engine.errors import EngineError
from shared.engine.kv_cache import KVCache
from shared.engine.triton_kernels import attend_kernel, merge_kernel, write_kernel

_MIN_TILE_ROWS = 16
"""The fewest rows that a matrix unit takes at once."""

_WIDE_TILE_ROWS = 64

_TILE_BYTES = 16 << 10
"""A tile of keys holds at most this much, so that two of keys and values fit every GPU since Ampere."""

_SECTION_TOKENS = 512
_MOST_SECTIONS = 32
"""Long contexts get longer sections instead of more of them."""

SPLIT_ROWS = 256
"""Batches of up to this many rows give each section of keys to a program of its own, else one walks them all. A
decode step has too few rows to fill a GPU otherwise; a prompt needs no more programs, and its parts would fill memory.
"""

_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
"""The same for all kernels. Without contraction of products and sums, code that is compiled twice rounds once."""


@dataclass(frozen=True)
class Variant:
    """How the work is dealt out: query rows of one program, and whether sections of keys get programs of their own."""

    tile_rows: int
    split: bool


@dataclass
class TritonPlan:
    """One batch, all int32. Groups are runs of rows of one sequence that share a program; empty ones are skipped."""

    variant: Variant
    groups: int
    sections: int
    rows: torch.Tensor
    """[4, padded]: each row's index into `table` (-1 for rows that pad) and its position; each group's first row and
    its number of rows"""
    table: torch.Tensor
    """[sequences, blocks] block ids"""

    def __post_init__(self) -> None:
        self.row_sequence, self.row_position, self.group_first, self.group_count = self.rows.unbind()


class TritonAttention:
    """Attention over `cache` for models of `query_heads` heads and `context_length` positions."""

    name = "triton"

    def __init__(self, cache: KVCache, query_heads: int, context_length: int) -> None:
        self._cache = cache
        self._device = cache.data.device
        self._query_heads = query_heads
        self._share = query_heads // cache.kv_heads
        self._share_pad = _power_of_two(self._share)
        dim_pad = max(_power_of_two(cache.head_dim), 16)
        self._heads = {"KV_HEADS": cache.kv_heads, "HEAD_DIM": cache.head_dim, "DIM_PAD": dim_pad}
        self._tile_tokens = tile_tokens(dim_pad, cache.data.element_size())
        self.section_tokens = max(_SECTION_TOKENS, _power_of_two(context_length) // _MOST_SECTIONS)
        self._most_sections = -(-context_length // self.section_tokens)
        self._table_width = -(-context_length // cache.block_tokens)
        narrow = max(_MIN_TILE_ROWS, self._share_pad)
        self.most_context = 2 * self.section_tokens + self._tile_tokens
        self._narrow = Variant(narrow, split=True)
        self.variants = [Variant(narrow, split=False), self._narrow, Variant(max(_WIDE_TILE_ROWS, narrow), split=False)]
        """Those that gave the first one's bits in every trial so far; the first is always there."""

    # Planning a batch

    def plan(self, spans: list[Span], padded: int) -> TritonPlan:
        """Which cache rows the batch reads and writes, and which queries share a program."""
        return self.plan_with(self._variant_for(padded), spans, padded)

    def plan_with(self, variant: Variant, spans: list[Span], padded: int) -> TritonPlan:
        """Like `plan`, with the work dealt out as `variant` says."""
        table = np.zeros((len(spans), max(len(s.blocks) for s in spans)), np.int32)
        rows, groups = self._describe(variant, spans, padded, table)
        sections = -(-max(s.context for s in spans) // self.section_tokens)
        on_device = (torch.from_numpy(array).to(self._device) for array in (rows, table))
        return TritonPlan(variant, groups, sections, *on_device)

    def static_plan(self, padded: int) -> TritonPlan:
        """A plan for any batch of `padded` rows, to be filled by `refill`; as it is, all rows pad.

        Raises EngineError for more rows than are served in this way.
        """
        if padded > SPLIT_ROWS:
            raise EngineError(f"batches of {padded} rows cannot be captured; at most {SPLIT_ROWS}")
        rows = torch.zeros((4, padded), dtype=torch.int32, device=self._device)
        rows[0].fill_(-1)
        table = torch.zeros((padded, self._table_width), dtype=torch.int32, device=self._device)
        return TritonPlan(self._variant_for(padded), padded, self._most_sections, rows, table)

    def refill(self, plan: TritonPlan, spans: list[Span]) -> None:
        """Make a static plan that of these sequences, in place."""
        width = max(len(s.blocks) for s in spans)
        table = np.zeros((len(spans), width), np.int32)
        rows, _ = self._describe(plan.variant, spans, plan.rows.shape[1], table)
        plan.rows.copy_(torch.from_numpy(rows))
        plan.table[: len(spans), :width].copy_(torch.from_numpy(table))

    def _variant_for(self, padded: int) -> Variant:
        wanted = self._narrow if padded <= SPLIT_ROWS else self.variants[-1]
        return wanted if wanted in self.variants else self.variants[0]

    def _describe(self, variant: Variant, spans: list[Span], padded: int, table: Any) -> tuple[Any, int]:
        """(rows [4, padded] as in TritonPlan, number of groups). Fills `table`."""
        rows = np.zeros((4, padded), np.int32)
        row_sequence, row_position, group_first, group_count = rows
        row_sequence.fill(-1)
        step = variant.tile_rows // self._share_pad
        groups = 0
        for number, span in enumerate(spans):
            at = slice(span.first, span.first + span.count)
            row_sequence[at] = number
            row_position[at] = np.arange(span.start, span.context)
            table[number, : len(span.blocks)] = span.blocks
            begins = np.arange(0, span.count, step)
            mine = slice(groups, groups + len(begins))
            group_first[mine] = span.first + begins
            group_count[mine] = np.minimum(step, span.count - begins)
            groups += len(begins)
        return rows, groups

    # Running

    def attend(
        self, plan: TritonPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Store the new K and V, then attend. q [1, query_heads, padded, head_dim]; k, v [1, kv_heads, padded,
        head_dim]. Returns [1, padded, query_heads, head_dim]; rows that pad are zero."""
        self.store(plan, layer, k, v)
        cache = self._cache
        padded = len(plan.row_sequence)
        out = q.new_zeros((1, padded, self._query_heads, cache.head_dim))
        q = q.to(cache.data.dtype)
        q = q if q.stride(3) == 1 else q.contiguous()
        split = plan.variant.split
        parts = self._parts(padded, plan.sections) if split else (out, out, out)
        walk = {
            "SHARE": self._share,
            "SHARE_PAD": self._share_pad,
            "SECTION_TOKENS": self.section_tokens,
            "WINDOW": shape.window or 0,
        }
        attend_kernel[(plan.groups, cache.kv_heads, plan.sections if split else 1)](
            q, cache.data[0, 0, layer], cache.data[0, 1, layer], out, *parts,
            plan.table, plan.row_sequence, plan.row_position,
            plan.group_first, plan.group_count, float(shape.scaling), float(shape.softcap or 1.0),
            q.stride(2), q.stride(1), cache.data.stride(0), plan.table.shape[1], plan.sections,
            BLOCK_TOKENS=cache.block_tokens, TILE_ROWS=plan.variant.tile_rows, TILE_TOKENS=self._tile_tokens,
            CAPPED=shape.softcap is not None, SPLIT=split, **self._heads, **walk, **_OPTIONS,
        )  # fmt: skip
        if split:
            merge_kernel[(padded, cache.kv_heads)](
                *parts, out, plan.row_sequence, plan.row_position, plan.sections, **self._heads, **walk, **_OPTIONS
            )
        return out

    def store(self, plan: TritonPlan, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new K and V, [1, kv_heads, padded, head_dim] each, where their positions are cached."""
        cache = self._cache
        k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
        write_kernel[(len(plan.row_sequence), cache.kv_heads)](
            k, v, cache.data[0, 0, layer], cache.data[0, 1, layer], plan.table, plan.row_sequence, plan.row_position,
            k.stride(2), k.stride(1), v.stride(2), v.stride(1), cache.data.stride(0), plan.table.shape[1],
            BLOCK_TOKENS=cache.block_tokens, **self._heads, **_OPTIONS,
        )  # fmt: skip

    def _parts(self, padded: int, sections: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where programs leave what they found in their section: largest score, sum of weights, weighted values."""
        slots = padded * self._query_heads * sections
        stats = torch.empty((2, slots), dtype=torch.float32, device=self._device)
        return stats[0], stats[1], torch.empty(slots * self._cache.head_dim, dtype=torch.float32, device=self._device)


def tile_tokens(dim_pad: int, element_bytes: int) -> int:
    """Keys in a tile: a function of the cache's layout alone, so that all workers sum alike."""
    return max(16, min(128, _TILE_BYTES // (dim_pad * element_bytes)))


def _power_of_two(n: int) -> int:
    """The smallest one that is at least `n`."""
    return int(triton.next_power_of_2(n))
