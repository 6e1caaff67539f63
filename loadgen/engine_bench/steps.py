"""Sequences as a runner sees them in the middle of their lives, without the work of getting there."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner


def has_room(runner: ModelRunner, batch: int, tokens: int) -> bool:
    """Whether `batch` sequences of `tokens` fit the model's context and the KV cache."""
    blocks = -(-tokens // runner.cache.block_tokens)
    return tokens <= runner.model.context_length and batch * blocks <= runner.cache.num_blocks


def sequences_at(runner: ModelRunner, batch: int, context: int, rows: int = 1) -> list[SequenceRows]:
    """`batch` sequences of `context` cached tokens and `rows` new ones, all of whose logits are wanted.

    Their blocks lie scattered over the cache and hold random KV; there must be room for them.
    """
    blocks = -(-(context + rows) // runner.cache.block_tokens)
    order = np.random.default_rng(0).permutation(runner.cache.num_blocks)[: batch * blocks].tolist()
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(runner.cache.data.shape[1:], generator=generator).to(runner.cache.data.dtype)
    for block_id in order:
        runner.cache.data[block_id] = pattern
    return [
        SequenceRows([(i * 7919 + 11) % runner.model.vocab_size] * rows, context, order[i * blocks :][:blocks], rows)
        for i in range(batch)
    ]
