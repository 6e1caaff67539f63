"""Presence, frequency and repetition penalties, and the token counts that they look at. No clock, no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.protocol.jobs import SamplingParams

_FIRST_ROOM = 256


class Penalties:
    """Owner of one sequence's token counts. `count` is a few operations; `apply` looks at the distinct tokens only.

    Presence and frequency penalties are OpenAI's: logit - presence * (occurs) - frequency * (how often), over the
    output. The repetition penalty is CTRL's (Keskar et al. 2019), over prompt and output: a positive logit is divided
    by it, another multiplied. It comes first.
    """

    def __init__(self, params: SamplingParams, prompt_ids: list[int]) -> None:
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._repetition = params.repetition_penalty
        seen = dict.fromkeys(prompt_ids) if self._repetition != 1 else {}
        self._place = {token: place for place, token in enumerate(seen)}
        """Token id -> its place in the arrays; only tokens that a penalty may touch have one."""
        room = _FIRST_ROOM + len(seen)
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(seen)] = list(seen)
        self._outputs = np.zeros(room, np.int64)
        """How often each stands in the output."""
        self._num_prompt = len(seen)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1

    def count(self, token: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
        self._ids[place] = token
        self._outputs[place] += 1

    def restart(self) -> None:
        """Forget the output."""
        for token in self._ids[self._num_prompt : len(self._place)].tolist():
            del self._place[token]
        self._outputs[:] = 0

    def apply(self, logits: NDArray[np.float64]) -> None:
        """Change `logits` [vocabulary] in place."""
        used = len(self._place)
        ids, outputs = self._ids[:used], self._outputs[:used]
        values = logits[ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * outputs + self._presence * (outputs > 0)
        logits[ids] = values
