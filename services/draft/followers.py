"""Which token most often stood behind two others, or behind one, in text that the target wrote: a guess for no cost.

The draft model goes on from a few tokens that may come; for all others that are at all likely there is this table, and
behind what the model guessed as well. It is counted when a draft is distilled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from shared.models.drafts import FOLLOWERS
from shared.models.errors import ModelUnusable

LEAST_COUNT = 5
"""Times that two tokens must have stood together, so that what followed them is believed more than what usually follows
the second of them."""

LEAST_PERCENT = 10
"""What follows more seldom than this is no guess."""

DOUBT = 2
"""Other followers that are thought to have been seen as well."""

_SHIFT = 32

Arrays = dict[str, NDArray[np.integer]]


class Followers:
    """A table from `count_followers`, or as `FOLLOWERS` in a draft's directory holds it."""

    def __init__(self, arrays: Arrays) -> None:
        """Raises KeyError when an array is missing, ValueError when they are no such table."""
        self._keys, self._next, self._percent = (arrays[name] for name in ("keys", "next", "percent"))
        parts = (self._keys, self._next, self._percent)
        if any(part.shape != (self._keys.size,) or part.dtype.kind not in "iu" for part in parts):
            raise ValueError("keys, next and percent must be whole numbers, as many of each")
        if len(self) and ((np.diff(self._keys) <= 0).any() or self._next.min() < 0 or self._percent.max() > 100):
            raise ValueError("keys must ascend, tokens be no less than 0, and percent no more than 100")

    @classmethod
    def load(cls, directory: Path) -> Followers | None:
        """None where the draft has none. Raises ModelUnusable."""
        path = directory / FOLLOWERS
        if not path.is_file():
            return None
        try:
            return cls(load_file(path))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelUnusable(f"{path} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._keys)

    def guess(
        self, before: int | NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(what most likely follows `before`, one or [n], and each of `token_ids` [n]; how likely), [n] each; -1 and 0:
        no idea."""
        if not len(self):
            return np.full(len(token_ids), -1), np.zeros(len(token_ids))
        pairs, alone = self._find(_pair(before, token_ids)), self._find(_alone(token_ids))
        found = np.where(pairs >= 0, pairs, alone)
        known = found >= 0
        following = np.where(known, self._next[found], -1).astype(np.int64)
        return following, np.where(known, self._percent[found] / 100, 0.0)

    def _find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where they stand in the table; -1: nowhere."""
        places = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[places] == keys, places, -1)


def count_followers(texts: Iterable[tuple[NDArray[np.int32], NDArray[np.bool_]]]) -> Arrays:
    """From texts' tokens [n], and which of them the target chose [n]: only these count as followers."""
    none = np.empty(0, np.int64)
    found = [(none, none, none), *map(_triples, texts)]
    firsts, seconds, thirds = (np.concatenate(part) for part in zip(*found, strict=True))
    pairs = _commonest(_pair(firsts, seconds), thirds, LEAST_COUNT)
    alone = _commonest(_alone(seconds), thirds, 1)
    keys, following, percent = (np.concatenate(part) for part in zip(pairs, alone, strict=True))
    order = np.argsort(keys)
    return {"keys": keys[order], "next": following[order].astype(np.int32), "percent": percent[order].astype(np.uint8)}


def _triples(
    text: tuple[NDArray[np.int32], NDArray[np.bool_]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    tokens, made = text
    at = np.flatnonzero(made[2:]) + 2
    whole: NDArray[np.int64] = tokens.astype(np.int64)
    return whole[at - 2], whole[at - 1], whole[at]


def _commonest(
    keys: NDArray[np.int64], following: NDArray[np.int64], least: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(keys that came at least `least` times; the commonest follower of each, of equals the lowest; in how many of 100
    cases), where that are enough."""
    both, counts = np.unique(np.stack([keys, following]), axis=1, return_counts=True)
    order = np.lexsort((both[1], -counts, both[0]))  # by key, the commonest follower first
    sorted_keys = both[0][order]
    first = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
    totals = np.add.reduceat(counts[order], first)
    best = order[first]
    percent = 100 * counts[best] // (totals + DOUBT)
    kept = (totals >= least) & (percent >= LEAST_PERCENT)
    return both[0][best][kept], both[1][best][kept], percent[kept]


def _pair(first: NDArray[np.int64] | int, second: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(((np.asarray(first, np.int64) + 1) << _SHIFT) + second)


def _alone(token: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs begin above these."""
    return token.astype(np.int64)
