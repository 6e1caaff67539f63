"""Whose guess to believe: every proposer's guess is scored against the tokens that came, used or not. Pure.

So a proposer that was not chosen can win later. A few numbers per proposer and its newest guess: bounded, and each
token is compared at most once per proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.speculation.proposer import Guess

MAX_PROPOSERS = 8
MAX_GUESS_TOKENS = 64

MEMORY = 0.97
"""Weight of what was learned one token ago: about the last 33 tokens count. What was learned long ago fades."""

TRUST = 2.0
"""Tokens for which a proposer's own confidence is believed without evidence: how slowly it is corrected."""

UNKNOWN = 0.5
"""Confidence per token of a proposer that states none."""

LEAST, MOST = 0.02, 0.98
"""Nothing is held to be surer or less sure than this."""

EXPLORATION = 0.5
"""Part by which the guesses of a proposer of which nothing is known are overrated."""


@dataclass
class Tally:
    """What became of one proposer's guesses in one sequence."""

    offered: int = 0
    """Guesses that came."""
    late: int = 0
    """Guesses whose every token was decided already when they came."""


class _Candidate:
    """One proposer: its newest guess, and how its guesses went."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.start = 0
        """Position of the guess's first token: the sequence's end."""
        self.tokens: tuple[int, ...] = ()
        """What is left of the guess; empty when it was refuted."""
        self.confidence: tuple[float, ...] = ()
        self._scored = 0
        """Position behind the last one at which this proposer was scored."""
        self._evidence = 0.0
        self._wrong = 0.0
        self._wrong_expected = 0.0

    def take(self, guess: Guess, length: int) -> None:
        """Keep a guess for a sequence of `length` tokens; one from further on can only continue the guess at hand."""
        tokens = guess.token_ids
        stated = guess.confidence if len(guess.confidence) == len(tokens) else (UNKNOWN,) * len(tokens)
        confidence = tuple(map(_plausible, stated))
        kept = guess.start - self.start
        if guess.start <= length:
            self.start = guess.start
        elif 0 < kept <= len(self.tokens):
            tokens, confidence = self.tokens[:kept] + tokens, self.confidence[:kept] + confidence
        else:
            return
        self.tokens, self.confidence = tokens[:MAX_GUESS_TOKENS], confidence[:MAX_GUESS_TOKENS]

    def compare(self, tokens: Sequence[int]) -> None:
        """The sequence has `tokens` from the guess's start on."""
        for place, (token, guessed) in enumerate(zip(tokens, self.tokens, strict=False)):
            self._learn(self.start + place, self.confidence[place], token == guessed)
            if token != guessed:
                self.tokens = self.confidence = ()
                return
        self.start += len(tokens)
        self.tokens, self.confidence = self.tokens[len(tokens) :], self.confidence[len(tokens) :]

    def chances(self, max_tokens: int) -> tuple[float, ...]:
        """Probability of each token if those before it are right: its own confidence, corrected by experience."""
        excess = self._excess()
        return tuple(_plausible(1 - (1 - c) * excess) for c in self.confidence[:max_tokens])

    def bonus(self, length: int) -> float:
        """Factor by which a guess is overrated for lack of evidence."""
        return 1 + EXPLORATION / (1 + self._evidence * MEMORY ** (length - self._scored))

    def _excess(self) -> float:
        """How many times as often as it expects this proposer is wrong."""
        if self._evidence == 0:
            return 1.0
        believed = TRUST * self._wrong_expected / self._evidence
        return (self._wrong + believed) / (self._wrong_expected + believed)

    def _learn(self, position: int, confidence: float, right: bool) -> None:
        if position < self._scored:
            return  # the same position in an older guess of the same proposer
        fade = MEMORY ** (position + 1 - self._scored)
        self._scored = position + 1
        self._evidence = self._evidence * fade + 1
        self._wrong = self._wrong * fade + (not right)
        self._wrong_expected = self._wrong_expected * fade + 1 - confidence


class Chooser:
    """The guesses for one sequence, which has `length` tokens now. At most MAX_PROPOSERS proposers are heard."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._candidates: dict[str, _Candidate] = {}
        self._recent: list[int] = []
        """The last tokens that came, against which late guesses are scored."""

    @property
    def length(self) -> int:
        return self._length

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """By proposer."""
        return {name: candidate.tally for name, candidate in self._candidates.items()}

    def offer(self, guess: Guess) -> None:
        """Take a guess; it replaces the proposer's earlier one. Late ones are scored, and used as far as they agree.

        One from beyond the sequence's end continues the proposer's guess, if that reaches so far and still holds.
        """
        candidate = self._candidates.get(guess.proposer)
        if candidate is None:
            if len(self._candidates) >= MAX_PROPOSERS:
                return
            candidate = self._candidates[guess.proposer] = _Candidate()
        candidate.tally.offered += 1
        known = self._length - guess.start
        if known >= len(guess.token_ids):
            candidate.tally.late += 1
        if known > len(self._recent):
            return
        candidate.take(guess, self._length)
        if known > 0:
            candidate.compare(self._recent[-known:])

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has grown by `tokens`: score the guesses."""
        for candidate in self._candidates.values():
            if candidate.tokens:
                candidate.compare(tokens)
        self._length += len(tokens)
        self._recent = [*self._recent, *tokens[-MAX_GUESS_TOKENS:]][-MAX_GUESS_TOKENS:]

    def came(self, start: int) -> Sequence[int]:
        """The tokens from position `start` on; none where that is not known any more, or not yet."""
        known = self._length - start
        return self._recent[-known:] if 0 < known <= len(self._recent) else []

    def best(self, max_tokens: int, proposer: str | None = None) -> Guess | None:
        """The guess from the sequence's end on of which the most tokens are expected to be right; None without any.

        With `proposer` only its own. The confidence is what experience makes of the proposer's.
        """
        best: Guess | None = None
        most = 0.0
        for name, candidate in self._candidates.items():
            if proposer is not None and name != proposer:
                continue
            chances = candidate.chances(max_tokens)
            expected = _expected_tokens(chances) * candidate.bonus(self._length)
            if expected > most:
                best = Guess(self._length, candidate.tokens[:max_tokens], chances, name)
                most = expected
        return best


def _plausible(probability: float) -> float:
    return max(LEAST, min(MOST, probability))  # in this order not a number is a number


def _expected_tokens(chances: Sequence[float]) -> float:
    """Expected length of the right beginning."""
    expected, all_right = 0.0, 1.0
    for chance in chances:
        all_right *= chance
        expected += all_right
    return expected
