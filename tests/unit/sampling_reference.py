"""Sampling spelled out: slow, obvious, one token at a time. The engine's is held against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.engine.noise import gumbel
from shared.protocol.jobs import SamplingParams

Row = NDArray[np.float32] | NDArray[np.float64]


def reference_row(
    logits: Row,
    p: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Collection[int] = (),
) -> NDArray[np.float64]:
    """The row after penalties, bias and `min_tokens`."""
    row = [float(x) for x in logits]
    for token in {*prompt, *output}:
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token, times in Counter(output).items():
        row[token] -= p.presence_penalty + p.frequency_penalty * times
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if len(output) < p.min_tokens:
        for token in stop_ids:
            row[token] = -math.inf
    return np.array(row)


def reference_candidates(row: Row, p: SamplingParams) -> list[int]:
    """The definition: rank what has any probability by (logit down, id up); top-k, top-p of what is left, min-p against
    the best."""
    scaled = _scaled(row, p)
    order = sorted((i for i in range(len(scaled)) if scaled[i] > -np.inf), key=lambda i: (-scaled[i], i))
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        weights = np.exp(scaled[order])
        share, count = 0.0, 0
        while count < len(order) and share < p.top_p * weights.sum():
            share += weights[count]
            count += 1
        order = order[: max(count, 1)]
    if p.min_p:
        order = [i for i in order if scaled[i] >= math.log(p.min_p)]
    return sorted(order)


def reference_choice(row: Row, p: SamplingParams, position: int) -> int:
    return reference_ranking(row, p, position)[0]


def reference_ranking(row: Row, p: SamplingParams, position: int) -> list[int]:
    """All that could be chosen, the choice first."""
    ids, values = reference_values(row, p, position)
    ranking = sorted(zip(-values, ids, strict=True))
    return [token for score, token in ranking if score < np.inf]


def reference_values(row: Row, p: SamplingParams, position: int) -> tuple[list[int], NDArray[np.float64]]:
    """(tokens, that of each by which they are ranked)"""
    if p.temperature == 0:
        return list(range(len(row))), np.asarray(row, np.float64)
    ids = reference_candidates(row, p)
    return ids, _scaled(row, p)[ids] + gumbel(p.seed, position, np.array(ids))


def reference_distribution(row: Row, p: SamplingParams) -> dict[int, float]:
    """Probability of each token that may be chosen."""
    if p.temperature == 0:
        return {reference_choice(row, p, 0): 1.0}
    ids = reference_candidates(row, p)
    weights = np.exp(_scaled(row, p)[ids])
    shares = (weights / weights.sum()).tolist()
    return {token: share for token, share in zip(ids, shares, strict=True) if share > 0}


def _scaled(row: Row, p: SamplingParams) -> NDArray[np.float64]:
    values = np.asarray(row, np.float64)
    return np.asarray((values - values.max()) / p.temperature)


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """(statistic, the value that it exceeds once in 10,000 times if the counts follow `probabilities`).

    Cells of fewer than 5 expected counts are pooled, as the test's approximation asks. The limit is Wilson and
    Hilferty's (1931): the cube root of chi-square/df is close to normal with mean 1 - 2/(9 df) and variance 2/(9 df);
    3.719 standard deviations leave 1e-4 above. The seeds of all tests are fixed, so a limit that holds once holds
    always, while a distribution that is wrong by a few per cent exceeds it many times over with 20,000 draws.
    """
    expected = probabilities * counts.sum()
    assert abs(probabilities.sum() - 1) < 1e-9
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(counts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit
