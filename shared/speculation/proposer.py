"""What a proposer is: it is told how one sequence grows, and guesses how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Guess:
    """Guessed tokens from absolute position `start` of the sequence on; prompt tokens count.

    `confidence[i]` estimates the probability that token `i` is right if all before it are. It has one entry per token,
    or none at all where the proposer has no idea. `alternatives` go on from other tokens at `start`, each with its
    confidence if any are given.
    """

    start: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...] = ()
    proposer: str = ""
    alternatives: tuple[tuple[int, ...], ...] = ()
    alternative_confidence: tuple[tuple[float, ...], ...] = ()


class Proposer(Protocol):
    """One sequence's source of guesses that needs no model. Belongs to one thread, like the sequence."""

    @property
    def name(self) -> str: ...

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has grown by `tokens`: first everything known of it (the prompt), then each step's tokens."""

    def propose(self, max_tokens: int) -> Guess | None:
        """How the sequence goes on, at most `max_tokens` tokens, from its end. None: no idea."""
