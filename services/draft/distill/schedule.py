"""Which texts each training step takes, and how large it is. Pure, and the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_WINDOW = 96
"""Texts that are sorted by length together, so that little of a batch is padding and yet no epoch is like another."""


def batches(lengths: Sequence[int], epochs: int, batch_tokens: int, seed: int) -> list[list[int]]:
    """Every text once an epoch, in batches of about `batch_tokens` tokens after padding; a longer text is alone."""
    found: list[list[int]] = []
    for epoch in range(epochs):
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(len(lengths))
        of_epoch: list[list[int]] = []
        for start in range(0, len(order), _WINDOW):
            window = sorted(order[start : start + _WINDOW].tolist(), key=lambda i: lengths[i])
            of_epoch += _cut(window, lengths, batch_tokens)
        found += [of_epoch[i] for i in random.permutation(len(of_epoch))]
    return found


def _cut(window: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """`window` ascends by length: a batch's last text is its longest."""
    cut: list[list[int]] = [[]]
    for text in window:
        if cut[-1] and lengths[text] * (len(cut[-1]) + 1) > batch_tokens:
            cut.append([])
        cut[-1].append(text)
    return [batch for batch in cut if batch]


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """For step 0 .. steps - 1: linear up, cosine down."""
    warmup = max(1, min(warmup, steps // 5))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
