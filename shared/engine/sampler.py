"""Chooses one token from one row of logits. A pure function of (row, parameters, absolute position).

The choice is the arg max over the candidates of logit/temperature + Gumbel noise, so it depends on nothing but the
logits: not on drafts, not on neighbours, not on the worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.engine.noise import gumbel
from shared.protocol.jobs import SamplingParams

_FIRST_GUESS = 256
"""Candidates tried first for top-p: most distributions hold their nucleus in fewer."""


def choose_token(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """`logits` [vocabulary]; `position` is the absolute index, in prompt and output, of the token to be chosen.

    Raises FloatingPointError when the largest logit is not a finite number.
    """
    best = int(logits.argmax())  # the first maximum (so the lowest id wins ties), or the first NaN
    if not np.isfinite(logits[best]):
        raise FloatingPointError(f"the largest logit is {logits[best]}")
    if params.temperature == 0:
        return best
    ids, scaled = candidates(logits, params)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[(scaled + gumbel(params.seed, position, ids)).argmax()])


def candidates(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, logits/temperature) of the tokens that top-k, then top-p, then min-p leave.

    Equal logits rank by id, lower first. top-p keeps the smallest set of best tokens whose share of what top-k left
    reaches `top_p`. Sorted by rank when top-k or top-p is on, by id otherwise.
    """
    scaled = logits.astype(np.float64)
    scaled /= params.temperature
    vocabulary = len(scaled)
    top_k = params.top_k if 0 < params.top_k < vocabulary else 0
    if not top_k and params.top_p >= 1:
        if params.min_p <= 0:
            return np.arange(vocabulary), scaled
        kept = np.flatnonzero(scaled >= scaled.max() + np.log(params.min_p))
        return kept, scaled[kept]
    ids = _top_k(scaled, top_k) if top_k else _nucleus_superset(scaled, params.top_p)
    best = scaled[ids]
    if params.top_p < 1:
        weights = np.exp(best - best[0])
        total = weights.sum() if top_k else np.exp(scaled - best[0]).sum()
        before = np.cumsum(weights) - weights
        count = max(1, int(np.count_nonzero(before < params.top_p * total)))
        ids, best = ids[:count], best[:count]
    if params.min_p > 0:
        count = max(1, int(np.count_nonzero(best >= best[0] + np.log(params.min_p))))
        ids, best = ids[:count], best[:count]
    return ids, best


def _top_k(scaled: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Ids of the `k` largest, best first; equal values by id. Sorts only those, not the vocabulary."""
    threshold = np.partition(scaled, len(scaled) - k)[len(scaled) - k]
    ids = np.flatnonzero(scaled >= threshold)  # ascending ids, with every tie of the threshold
    return ids[np.argsort(-scaled[ids], kind="stable")][:k]


def _nucleus_superset(scaled: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Ids, best first, that surely hold at least `top_p` of the whole probability."""
    shifted = np.exp(scaled - scaled.max())
    wanted = top_p * shifted.sum()
    k = _FIRST_GUESS
    while k < len(scaled):
        ids = _top_k(scaled, k)
        if shifted[ids].sum() > wanted * (1 + 1e-9):
            return ids
        k *= 8
    return np.argsort(-scaled, kind="stable")
