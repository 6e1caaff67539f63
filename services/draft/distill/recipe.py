"""What decides the outcome: two runs with one recipe on one machine write the same draft, however often interrupted."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

MAX_LENGTH = 1024
"""Tokens of a text at most, whatever the target's context: a draft must also work far into a chat."""


class CorpusRecipe(msgspec.Struct, frozen=True):
    """Decides a corpus token for token; how much of it is made is not its matter.

    `numerics` is the path of the engine's products. A corpus is to learn from, or `held_out` to measure on.
    `prompts_sha256` is of the file of prompts, empty without one. `max_length` bounds a text, in tokens; `top` is how
    many of the target's likeliest tokens are kept for each position.
    """

    target: str
    fingerprint: str
    numerics: str
    seed: int
    held_out: bool = False
    prompts_sha256: str = ""
    max_length: int = MAX_LENGTH
    top: int = 20
    v: int = 2


class TrainingRecipe(msgspec.Struct, frozen=True):
    """Decides the student, given the corpus.

    `tokens` of the corpus, made by the target, are used `epochs` times. `layers` are the target's layers that the
    student starts from. A step takes texts of about `batch_tokens` tokens; the learning rate rises for `warmup` steps
    to its peak and falls to nothing along a cosine. `precision` is that of the products in a step. The loss is the
    divergence from the target's distribution plus `hard_share` times the cross entropy of the token that it chose.
    """

    corpus: CorpusRecipe
    tokens: int
    layers: list[int]
    epochs: int
    precision: Literal["fp32", "bf16"] = "fp32"
    batch_tokens: int = 1024
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    hard_share: float = 0.2
    v: int = 1

    @property
    def digest(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def starting_layers(of: int, count: int) -> list[int]:
    """Which `count` of a target's `of` layers the student starts from: the first ones.

    With the default model they learn faster than any pair with a later layer, which expects what is not there.
    """
    return list(range(min(count, of)))
