"""What the student is trained on, and a softmax over a part of the vocabulary that stands for all of it.

The head is most of a small draft's arithmetic. Most of its rows matter at no position of a batch: those are stood for
by a random few, each counted as many times as there are rows for one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST = 1e-6
"""Probability below which the student's share of the target's unlisted tokens counts as this."""


@dataclass(frozen=True)
class Columns:
    """The tokens whose logits are computed: `ids` [s], and what is added to each one's logit, `log_weights` [s].

    The first `exact` of them ascend and count once.
    """

    ids: NDArray[np.int64]
    log_weights: NDArray[np.float32]
    exact: int

    def places(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Where `tokens` stand among the exact ids; every one must be there. Shape as `tokens`."""
        return np.searchsorted(self.ids[: self.exact], tokens)


def choose_columns(
    needed: NDArray[np.integer], always: NDArray[np.integer], vocabulary: int, others: int, random: np.random.Generator
) -> Columns:
    """`needed` and `always` exactly, and `others` of all the rest for the rest."""
    is_exact = np.zeros(vocabulary, np.bool_)
    is_exact[needed] = True
    is_exact[always] = True
    exact, rest = np.flatnonzero(is_exact), np.flatnonzero(~is_exact)
    drawn = np.sort(random.choice(rest, min(others, len(rest)), replace=False))
    weights = np.zeros(len(exact) + len(drawn), np.float32)
    if len(drawn):
        weights[len(exact) :] = math.log(len(rest) / len(drawn))
    return Columns(np.concatenate([exact, drawn]), weights, len(exact))


def distillation_loss(
    logits: torch.Tensor,
    top_places: torch.Tensor,
    top_logprobs: torch.Tensor,
    chosen_places: torch.Tensor,
    hard_share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, divergence), means over n positions, in nats.

    `logits` [n, s] already hold the columns' weights. `top_places` [n, k] says where the target's likeliest tokens are
    among the columns, `top_logprobs` [n, k] how likely it finds them (-inf: no such token). All its other tokens are
    one outcome, with what probability is left: the student is not told how the target spreads that. `chosen_places`
    [n] is the token that the target took.
    """
    total = torch.logsumexp(logits, 1)
    listed = top_logprobs > -math.inf
    theirs = torch.where(listed, top_logprobs, 0.0)
    weight = torch.where(listed, theirs.exp(), 0.0)
    ours = logits.gather(1, top_places) - total[:, None]
    left = (1 - weight.sum(1)).clamp(min=0.0)
    our_left = (1 - torch.where(listed, ours.exp(), 0.0).sum(1)).clamp(min=_LEAST)
    divergence = (weight * (theirs - ours)).sum(1) + left * (left.clamp(min=_LEAST).log() - our_left.log())
    hard = total - logits.gather(1, chosen_places[:, None])[:, 0]
    return divergence.mean() + hard_share * hard.mean(), divergence.detach().mean()
