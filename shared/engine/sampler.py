"""Chooses one token from one row of logits. A pure function of (row, parameters, position, tokens before it).

The order: penalties, bias and `min_tokens` (the rules), temperature, top-k, top-p, min-p, Gumbel noise. The choice is
the arg max of logit/temperature + noise over what is left, so no draft, neighbour or worker has a say in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.engine.logit_rules import LogitRules
from shared.engine.noise import gumbel
from shared.engine.selection import largest, nucleus
from shared.protocol.jobs import SamplingParams

Row = NDArray[np.float32] | NDArray[np.float64]


def choose_token(
    logits: NDArray[np.float32], params: SamplingParams, position: int, rules: LogitRules | None = None
) -> int:
    """The first of `ranked_tokens`."""
    return ranked_tokens(logits, params, position, rules)[0]


def ranked_tokens(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    rules: LogitRules | None = None,
    runners_up: int = 0,
) -> list[int]:
    """The choice, and up to so many `runners_up`, whose logit/temperature + noise comes next; no token that is barred.

    `logits` [vocabulary]; `position` is the absolute index, in prompt and output, of the token to be chosen. `rules`
    know the output before it. Raises FloatingPointError when the largest logit, before or after the rules, is not a
    finite number.
    """
    row: Row = logits
    best = _best(row)
    if rules is not None and rules.active:
        row = rules.apply(logits)
        best = _best(row)
    if params.temperature == 0:
        return _ranked(row, runners_up, best)
    ids, scaled = candidates(row, params)
    if len(ids) == 1:
        return [int(ids[0])]
    perturbed = scaled + gumbel(params.seed, position, ids)
    return [int(ids[index]) for index in _ranked(perturbed, runners_up, int(perturbed.argmax()))]


def _ranked(row: Row, runners_up: int, best: int) -> list[int]:
    """`best`, and the indices of the next-largest values. For a few, arg max after arg max beats any partition."""
    ranked = [best]
    if runners_up:
        left = row.copy()
        for _ in range(runners_up):
            left[ranked[-1]] = -np.inf
            following = int(left.argmax())
            if left[following] == -np.inf:
                break
            ranked.append(following)
    return ranked


def _best(row: Row) -> int:
    """The lowest id of the largest logit."""
    best = int(row.argmax())  # the first maximum, or the first NaN
    if not np.isfinite(row[best]):
        raise FloatingPointError(f"the largest logit is {row[best]}")
    return best


def candidates(row: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, ascending; (logit - largest logit) / temperature) of the tokens that top-k, then top-p, then min-p leave.

    Equal logits rank by id, lower first. top-p keeps the smallest set of best tokens whose share of what top-k left
    reaches `top_p`; min-p keeps those at least `min_p` times as probable as the best.
    """
    scaled = np.subtract(row, row.max(), dtype=np.float64)
    with np.errstate(over="ignore"):  # a temperature close to 0 sends all but the best to -inf
        scaled /= params.temperature
    ids = np.arange(len(scaled))
    if 0 < params.top_k < len(ids):
        ids, scaled = _keep(ids, scaled, largest(scaled, params.top_k))
    if params.top_p < 1:
        ids, scaled = _keep(ids, scaled, nucleus(scaled, params.top_p))
    if params.min_p > 0:
        ids, scaled = _keep(ids, scaled, np.flatnonzero(scaled >= np.log(params.min_p)))
    return ids, scaled


def _keep(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], kept: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return ids[kept], scaled[kept]
