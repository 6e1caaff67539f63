"""What a request changes in a row of logits before a token is chosen: penalties, bias, no end before `min_tokens`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shared.engine.errors import EngineError
from shared.engine.penalties import Penalties
from shared.protocol.jobs import SamplingParams


class LogitRules:
    """The rules of one sequence, and what they remember of its output. `add` every output token, in order.

    A ban by `min_tokens` comes last, so that no bias overrules it.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: list[int], stop_ids: frozenset[int], vocab_size: int
    ) -> None:
        """`stop_ids`: what ends the sequence, and is barred while the output has fewer than `min_tokens` tokens.

        Raises EngineError for a bias on no token of the vocabulary and for numbers that cannot be applied.
        """
        strange = [token for token in params.logit_bias if not 0 <= token < vocab_size]
        if strange:
            raise EngineError(f"logit_bias names token {strange[0]}; the ids are 0 .. {vocab_size - 1}")
        numbers = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        if not all(map(math.isfinite, (*numbers, *params.logit_bias.values()))) or params.repetition_penalty <= 0:
            raise EngineError("penalties and biases must be finite numbers, and the repetition penalty above 0")
        self._penalties = Penalties(params, prompt_ids) if Penalties.wanted(params) else None
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float64)
        self._barred = np.array(sorted(t for t in stop_ids if 0 <= t < vocab_size), np.int64)
        self._min_tokens = params.min_tokens
        self._num_output = 0

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_ids: list[int], stop_ids: frozenset[int], vocab_size: int
    ) -> LogitRules | None:
        """The rules of a request, or None when it has none. Raises EngineError."""
        asked = params.logit_bias or params.min_tokens > 0 or Penalties.wanted(params)
        return cls(params, prompt_ids, stop_ids, vocab_size) if asked else None

    @property
    def active(self) -> bool:
        """Whether `apply` may change the next row."""
        return self._penalties is not None or len(self._biased) > 0 or self._num_output < self._min_tokens

    def add(self, token: int) -> None:
        """The output grew by `token`."""
        self._num_output += 1
        if self._penalties is not None:
            self._penalties.count(token)

    def restart(self) -> None:
        """Back to the prompt alone."""
        self._num_output = 0
        if self._penalties is not None:
            self._penalties.restart()

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The row [vocabulary] that the next output token is chosen from; a barred token has -inf."""
        shaped = logits.astype(np.float64)
        if self._penalties is not None:
            self._penalties.apply(shaped)
        shaped[self._biased] += self._bias
        if self._num_output < self._min_tokens:
            shaped[self._barred] = -np.inf
        return shaped
