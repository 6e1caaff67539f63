"""Paged attention as Triton kernels, compiled for the device at first use (Tillet et al., 2019; online softmax after
Milakov and Gimelshein, 2018). What they compute for a row depends on that row's own tokens only.

Numbers that differ between batches, or between a trial and a model, are not specialised: what was compiled and tried at
load is what serves.

Keys are cut at fixed positions into sections, and those into tiles. A section's tiles are walked in order from nothing,
and sections are merged in order. So it does not matter which program walks which section, nor beside which rows.
"""

# What a kernel takes are pointers, numbers and compile-time constants of Triton's own; Python's types do not apply.
# Triton comes with CUDA builds of torch only, so it may be missing where types are checked.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: allow-untyped-calls, no-warn-unused-ignores

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped]
import triton.language as tl  # type: ignore[import-not-found, import-untyped]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_width", "k_row", "k_head", "v_row", "v_head"])
def write_kernel(
    k,
    v,
    keys,
    values,
    table,
    row_sequence,
    row_position,
    k_row,
    k_head,
    v_row,
    v_head,
    block_stride,
    table_width,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Program (row, kv head): store the row's new K and V where its position is cached. Rows that pad store nothing."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(row_sequence + row)
    if sequence < 0:
        return
    position = tl.load(row_position + row)
    dims = tl.arange(0, DIM_PAD)
    stored = dims < HEAD_DIM
    block = tl.load(table + sequence.to(tl.int64) * table_width + position // BLOCK_TOKENS)
    at = block.to(tl.int64) * block_stride + ((position % BLOCK_TOKENS) * KV_HEADS + head) * HEAD_DIM
    new_k = tl.load(k + row.to(tl.int64) * k_row + head * k_head + dims, mask=stored, other=0.0)
    tl.store(keys + at + dims, new_k, mask=stored)
    new_v = tl.load(v + row.to(tl.int64) * v_row + head * v_head + dims, mask=stored, other=0.0)
    tl.store(values + at + dims, new_v, mask=stored)


@triton.jit
def _merge(top, norm, acc, more_top, more_norm, more_acc):
    """Two parts of a softmax-weighted sum as one: `top` is a part's largest score (log2), `norm` the sum of weights.

    A part of nothing (top -inf, norm 0, acc 0) changes no bit of the other.
    """
    high = tl.maximum(top, more_top)
    safe = tl.where(high == float("-inf"), 0.0, high)
    left = tl.exp2(top - safe)
    right = tl.exp2(more_top - safe)
    return high, norm * left + more_norm * right, acc * left[:, None] + more_acc * right[:, None]


@triton.jit
def _attend_section(
    query,
    keys,
    values,
    table_row,
    position,
    kv_head,
    begin,
    end,
    scale,
    softcap,
    block_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """(top, norm, acc) of query [TILE_ROWS, DIM_PAD] over the keys at positions `begin`, a multiple of the tile, to
    `end`. `position` [TILE_ROWS] is where each row stands."""
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    spoilt = tl.zeros([TILE_ROWS], tl.int32)
    dims = tl.arange(0, DIM_PAD)
    in_head = dims < HEAD_DIM
    for tile in range(begin, end, TILE_TOKENS):
        key = tile + tl.arange(0, TILE_TOKENS)
        cached = key < end
        block = tl.load(table_row + key // BLOCK_TOKENS, mask=cached, other=0)
        at = block.to(tl.int64) * block_stride + ((key % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(keys + at[None, :] + dims[:, None], mask=in_head[:, None] & cached[None, :], other=0.0)
        score = tl.dot(query, k, input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); large x give exactly 1 or -1.
            score = (1.0 - 2.0 / (tl.exp2(score / softcap * (2.0 * _LOG2_E)) + 1.0)) * softcap
        visible = (key[None, :] <= position[:, None]) & cached[None, :]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(visible, score * _LOG2_E, float("-inf"))
        high = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        v = tl.load(values + at[:, None] + dims[None, :], mask=cached[:, None] & in_head[None, :], other=0.0)
        # A weight of zero would not stop a NaN: values that are no numbers reach the rows that see them, and no others.
        sound = tl.abs(v.to(tl.float32)) < float("inf")
        v = tl.where(sound, v, 0.0)
        faulty = tl.max(tl.where(sound, 0, 1), 1)
        spoilt = tl.maximum(spoilt, tl.max(tl.where(visible, faulty[None, :], 0), 1))
        norm = norm * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = high
    return top, tl.where(spoilt > 0, float("nan"), norm), acc


@triton.jit
def _store_rows(out, norm, acc, row, head, real, dims, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """out [rows, HEADS, HEAD_DIM]. A zero gets no sign: whether an empty part was merged would decide over it."""
    result = acc / tl.where(real, norm, 1.0)[:, None]
    result = tl.where(result == 0.0, 0.0, result)
    at = (row.to(tl.int64) * HEADS + head) * HEAD_DIM
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_width", "sections", "q_row", "q_head"])
def attend_kernel(
    q,
    keys,
    values,
    out,
    part_top,
    part_norm,
    part_acc,
    table,
    row_sequence,
    row_position,
    group_first,
    group_count,
    scale,
    softcap,
    q_row,
    q_head,
    block_stride,
    table_width,
    sections,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    SECTION_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (group, kv head[, section]): rows `group_first ..` of one sequence, `group_count` of them, neighbours in
    position; row m of the tile is query head `m % SHARE_PAD` of the kv head's share and token `m // SHARE_PAD`.

    With SPLIT it leaves one section's part for `merge_kernel`, else it merges all sections and stores the result.
    """
    group = tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(group_count + group)
    if count == 0:
        return
    first = tl.load(group_first + group)
    sequence = tl.load(row_sequence + first)
    start = tl.load(row_position + first)
    m = tl.arange(0, TILE_ROWS)
    token = m // SHARE_PAD
    head = kv_head * SHARE + m % SHARE_PAD
    real = (token < count) & (m % SHARE_PAD < SHARE)
    row = first + token
    position = start + token
    dims = tl.arange(0, DIM_PAD)
    q_at = row.to(tl.int64) * q_row + head * q_head
    query = tl.load(q + q_at[:, None] + dims[None, :], mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    end = start + count
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start - WINDOW + 1, 0) // TILE_TOKENS * TILE_TOKENS
    table_row = table + sequence.to(tl.int64) * table_width
    if SPLIT:
        section = tl.program_id(2)
        begin = tl.maximum(section * SECTION_TOKENS, lowest)
        section_end = tl.minimum((section + 1) * SECTION_TOKENS, end)
        if begin >= section_end:
            return
        top, norm, acc = _attend_section(
            query, keys, values, table_row, position, kv_head, begin, section_end, scale, softcap, block_stride,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE_ROWS, TILE_TOKENS, WINDOW, CAPPED,
        )  # fmt: skip
        part = (row.to(tl.int64) * (KV_HEADS * SHARE) + head) * sections + section
        tl.store(part_top + part, top, mask=real)
        tl.store(part_norm + part, norm, mask=real)
        mask = real[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(part_acc + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    else:
        top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
        for section_begin in range(lowest // SECTION_TOKENS * SECTION_TOKENS, end, SECTION_TOKENS):
            more_top, more_norm, more_acc = _attend_section(
                query, keys, values, table_row, position, kv_head, tl.maximum(section_begin, lowest),
                tl.minimum(section_begin + SECTION_TOKENS, end), scale, softcap, block_stride,
                KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE_ROWS, TILE_TOKENS, WINDOW, CAPPED,
            )  # fmt: skip
            top, norm, acc = _merge(top, norm, acc, more_top, more_norm, more_acc)
        _store_rows(out, norm, acc, row, head, real, dims, KV_HEADS * SHARE, HEAD_DIM)


@triton.jit(do_not_specialize=["sections"])
def merge_kernel(
    part_top,
    part_norm,
    part_acc,
    out,
    row_sequence,
    row_position,
    sections,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SECTION_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (row, kv head): merge the parts of the sections that the row sees any key of, in order."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    if tl.load(row_sequence + row) < 0:
        return
    position = tl.load(row_position + row)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(position - WINDOW + 1, 0)
    share = tl.arange(0, SHARE_PAD)
    head = kv_head * SHARE + share
    real = share < SHARE
    dims = tl.arange(0, DIM_PAD)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    top = tl.full([SHARE_PAD], float("-inf"), tl.float32)
    norm = tl.zeros([SHARE_PAD], tl.float32)
    acc = tl.zeros([SHARE_PAD, DIM_PAD], tl.float32)
    for section in range(lowest // SECTION_TOKENS, position // SECTION_TOKENS + 1):
        part = (row.to(tl.int64) * (KV_HEADS * SHARE) + head) * sections + section
        more_top = tl.load(part_top + part, mask=real, other=float("-inf"))
        more_norm = tl.load(part_norm + part, mask=real, other=0.0)
        more_acc = tl.load(part_acc + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        top, norm, acc = _merge(top, norm, acc, more_top, more_norm, more_acc)
    rows = row + share * 0
    _store_rows(out, norm, acc, rows, head, real, dims, KV_HEADS * SHARE, HEAD_DIM)
