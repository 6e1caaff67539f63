"""Chooses one token from one row of logits. A pure function of (row, parameters, position, tokens before it).

The order: penalties, bias and `min_tokens` (the rules), temperature, top-k, top-p, min-p, Gumbel noise. The choice is
the arg max of logit/temperature + noise over what is left, so no draft, neighbour or worker has a say in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.engine.logit_rules import LogitRules
from shared.engine.noise import gumbel
from shared.engine.selection import largest, nucleus
from shared.protocol.jobs import SamplingParams

Row = NDArray[np.float32] | NDArray[np.float64]


class Ranking(NamedTuple):
    """Tokens, the likeliest first, and the share that each has in the softmax of the values that were ranked.

    Those are the logits, when sampling divided by temperature and with noise: so the share tells how clear the choice
    was, either way.
    """

    token_ids: list[int]
    chances: list[float]


def choose_token(
    logits: NDArray[np.float32], params: SamplingParams, position: int, rules: LogitRules | None = None
) -> int:
    """The arg max of logit/temperature + noise.

    `logits` [vocabulary]; `position` is the absolute index, in prompt and output, of the token to be chosen. `rules`
    know the output before it. Raises FloatingPointError when the largest logit, before or after the rules, is not a
    finite number.
    """
    ids, _, best = _values(logits, params, position, rules)
    return best if ids is None else int(ids[best])


def rank_tokens(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    rules: LogitRules | None = None,
    runners_up: int = 0,
) -> Ranking:
    """The choice of `choose_token`, and up to so many `runners_up`, whose values come next; no token that is barred."""
    ids, values, _ = _values(logits, params, position, rules)
    possible = np.flatnonzero(values > -np.inf)
    values = values[possible].astype(np.float64)
    top = largest(values, 1 + runners_up)
    ranked = top[np.argsort(-values[top], kind="stable")]
    above = values - values[ranked[0]]
    chances = np.exp(above[ranked]) / np.exp(above).sum()
    places = possible[ranked]
    return Ranking((places if ids is None else ids[places]).tolist(), chances.tolist())


def _values(
    logits: NDArray[np.float32], params: SamplingParams, position: int, rules: LogitRules | None
) -> tuple[NDArray[np.int64] | None, Row, int]:
    """(ids of the tokens that may be chosen, ascending, or None for all; their values; the index of the largest)"""
    row: Row = logits
    best = _best(row)
    if rules is not None and rules.active:
        row = rules.apply(logits)
        best = _best(row)
    if params.temperature == 0:
        return None, row, best
    ids, scaled = candidates(row, params)
    if len(ids) == 1:
        return ids, scaled, 0
    perturbed = scaled + gumbel(params.seed, position, ids)
    return ids, perturbed, int(perturbed.argmax())


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
    ids = np.arange(len(row))
    if row.min() == -np.inf:  # barred, or not in a short head: there it is most of the row, and noise takes time
        ids = np.flatnonzero(row > -np.inf)
        row = row[ids]
    scaled = np.subtract(row, row.max(), dtype=np.float64)
    with np.errstate(over="ignore"):  # a temperature close to 0 sends all but the best to -inf
        scaled /= params.temperature
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
