"""Log probabilities of a chosen token and its best alternatives, under the model's own distribution. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shared.engine.selection import largest
from shared.protocol.records import TokenLogprobs


def token_logprobs(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """`logits` [vocabulary] as the model gave them: no penalty, bias, temperature or filter is in the result.

    The `top` alternatives rank by log probability, then by id; those that the model rules out (-inf) are left out,
    since JSON has no such number. `token` may be among them.
    """
    logprobs = np.subtract(logits, logits.max(), dtype=np.float64)
    logprobs -= math.log(np.exp(logprobs).sum())
    ids = largest(logprobs, top)
    best = logprobs[ids]
    ranked = np.argsort(-best, kind="stable")  # ids ascend, so equal ones stay in their order
    pairs = zip(ids[ranked].tolist(), best[ranked].tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), [(i, value) for i, value in pairs if value > -math.inf])
