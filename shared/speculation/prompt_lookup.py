"""Prompt lookup: how the same tokens went on before, in the sequence itself or in a text given with it.

Source: Saxena, Prompt Lookup Decoding (2023). Two things go further than its search. The longest match counts, not the
latest n-gram. And where a text is copied with changes, a cursor in the original survives them: near the place where it
was lost it looks for the way back, which takes one or two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.speculation.proposer import Guess
from shared.speculation.suffix_index import DEPTH, SuffixIndex

PROMPT_LOOKUP = "prompt_lookup"

MAX_TOKENS = 65_536

SLICE_TOKENS = 256
"""Indexed at once, which takes about half a millisecond."""

FOUND = 3
"""A cursor is sure of its place again when this many tokens in a row agree with it."""

ALIGNED = 8
"""A match of this many tokens is a copy in the making: the cursor takes its place."""

AHEAD = 24
"""How far beyond the lost place the way back is looked for, in tokens of the original."""

GIVEN_UP = 256
"""Tokens without finding back after which the cursor is dropped."""

GRAM = 4
"""Tokens compared to find back."""

LIKELY = 0.8
"""Rate of agreement that a cursor begins with."""

MEMORY = 0.95
"""Weight of the past in a cursor's rate of agreement: about the last twenty tokens count."""


class _Cursor:
    """A place in the original that the sequence copies, kept across insertions, deletions and replacements."""

    def __init__(self, at: int, rate: float) -> None:
        self.at = at
        """Position of the token expected next."""
        self.run = 0
        """Tokens right before it that agree."""
        self.rate = rate
        """Share of recent tokens that were as expected."""
        self._lost_at = 0
        self._lost_for = 0

    @property
    def sure(self) -> bool:
        return self._lost_for == 0

    @property
    def hopeful(self) -> bool:
        """Lost, but worth a guess: one token was replaced, or the newest stands near the lost place."""
        return self._lost_for <= 1 or self.run > 0

    @property
    def given_up(self) -> bool:
        return self._lost_for > GIVEN_UP

    def follow(self, index: SuffixIndex, tokens: Sequence[int]) -> None:
        """The sequence, whose tokens the index has already, went on with `tokens`."""
        for token in tokens:
            agrees = index.token(self.at) == token
            self.rate = MEMORY * self.rate + (1 - MEMORY) * agrees
            if agrees:
                self.run += 1
                if self.run >= FOUND:
                    self._lost_for = 0
            else:
                if self.sure:
                    self._lost_at = self.at
                self.run = 0
                self._lost_for += 1
            self.at += 1  # after a difference too, as if one token had been replaced by another

    def find_back(self, index: SuffixIndex, tail: Sequence[int]) -> None:
        """Move to the place near the lost one behind which the most of the last tokens agree."""
        best, at = self.run, self.at
        stop = min(self._lost_at + self._lost_for + AHEAD, index.end - 1)
        for found in index.find(tail[-1], self._lost_at, stop):
            agreed = index.common_suffix(found + 1, tail, GRAM)
            if agreed > best or (agreed == best and abs(found + 1 - self.at) < abs(at - self.at)):
                best, at = agreed, found + 1
        self.at, self.run = at, best
        if best >= FOUND:
            self._lost_for = 0


def _at_once() -> None:
    """No pause."""


class PromptLookup:
    """The tokens of one sequence, and before them `reference`: a text that the output is likely to repeat.

    At first the output is expected to be the reference from its beginning on. Holds at most `max_tokens` of both, the
    newest; of the reference, no more than half of that.
    """

    name = PROMPT_LOOKUP

    def __init__(
        self, reference: Sequence[int] = (), max_tokens: int = MAX_TOKENS, pause: Callable[[], None] = _at_once
    ) -> None:
        """`pause` is called after each slice of a long reference."""
        self._index = SuffixIndex(max_tokens)
        self._length = 0
        self._tail: list[int] = []
        self._cursor: _Cursor | None = None
        self._copied: list[int] = []
        """Without a cursor: the positions from which the last guess was made, if it looked like a copy."""
        if reference:
            self._cursor = _Cursor(self._index.end, LIKELY)
            self._add(reference[: self._index.capacity // 2], pause)
            self._index.begin_text()
        self._behind_reference = self._index.end

    def __len__(self) -> int:
        """Tokens of the sequence, without the reference."""
        return self._length

    def extend(self, tokens: Sequence[int], pause: Callable[[], None] = _at_once) -> None:
        """`pause` is called after each slice of many tokens. The first call tells all that is known of the sequence:
        where it ends in the reference, if it does, the copy goes on."""
        if not tokens:
            return
        resumed = self._length == 0
        self._length += len(tokens)
        self._tail = [*self._tail, *tokens[-DEPTH:]][-DEPTH:]
        self._add(tokens, pause)
        if self._copied:
            self._cursor = _Cursor(max(self._copied, key=lambda at: self._agreed(at, tokens)), LIKELY)
            self._copied = []
        if self._cursor is None:
            return
        if resumed:
            self._place(self._cursor)
        elif self._cursor.at + len(tokens) < self._index.end:
            self._cursor.follow(self._index, tokens)
            if not self._cursor.sure:
                self._cursor.find_back(self._index, self._tail)
        else:  # more tokens at once than the index holds
            self._cursor = None
            return
        if self._cursor.given_up or self._cursor.at < self._index.oldest:
            self._cursor = None

    def propose(self, max_tokens: int) -> Guess | None:
        cursor = self._cursor
        if cursor is not None and cursor.sure:
            return self._copy(cursor, max_tokens)
        length, positions = self._index.longest_match(self._tail)
        if cursor is not None and cursor.hopeful and cursor.run + ALIGNED > length:
            return self._copy(cursor, max_tokens)
        self._copied = positions if length >= ALIGNED else []
        return self._guess(*self._index.follow(length, positions, max_tokens))

    def _add(self, tokens: Sequence[int], pause: Callable[[], None]) -> None:
        for start in range(0, len(tokens), SLICE_TOKENS):
            self._index.extend(tokens[start : start + SLICE_TOKENS])
            pause()

    def _place(self, cursor: _Cursor) -> None:
        """A sequence taken over half way goes on in the middle of the reference."""
        length, positions = self._index.longest_match(self._tail)
        inside = [at for at in positions if at < self._behind_reference]
        if length >= ALIGNED and inside:
            cursor.at = inside[0]

    def _agreed(self, position: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` stand from `position` on."""
        for place, token in enumerate(tokens):
            if self._index.token(position + place) != token:
                return place
        return len(tokens)

    def _copy(self, cursor: _Cursor, max_tokens: int) -> Guess | None:
        tokens, _ = self._index.follow(1, [cursor.at], max_tokens)
        return self._guess(tokens, [cursor.rate] * len(tokens))

    def _guess(self, tokens: list[int], confidence: list[float]) -> Guess | None:
        return Guess(self._length, tuple(tokens), tuple(confidence), self.name) if tokens else None
