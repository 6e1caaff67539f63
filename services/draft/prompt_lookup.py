"""Prompt lookup: what followed the same few tokens the last time. Pure, incremental, no model.

Source: Saxena, Prompt Lookup Decoding (2023). An index of n-grams replaces its search, so a proposal costs O(length).
"""

from __future__ import annotations

MIN_N, MAX_N = 2, 4


class PromptLookup:
    """The n-grams of one sequence. `extend` and `propose` cost a few dictionary operations per token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}
        """n-gram -> position behind its latest occurrence that has a follower."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens. The n-grams that end right before each new token get it as their follower."""
        for token in token_ids:
            end = len(self._tokens)
            for n in range(MIN_N, MAX_N + 1):
                if end >= n:
                    self._followers[tuple(self._tokens[end - n : end])] = end
            self._tokens.append(token)

    def propose(self, max_tokens: int) -> list[int]:
        """The tokens that followed the longest known n-gram at the end; empty when there is none.

        Where the copied stretch reaches the end of the sequence it goes on with its own guesses: a loop stays a loop.
        """
        for n in range(MAX_N, MIN_N - 1, -1):
            if len(self._tokens) < n:
                continue
            source = self._followers.get(tuple(self._tokens[-n:]))
            if source is None:
                continue
            guess: list[int] = []
            for position in range(source, source + max_tokens):
                behind = position - len(self._tokens)
                guess.append(self._tokens[position] if behind < 0 else guess[behind])
            return guess
        return []
