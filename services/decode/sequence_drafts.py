"""The guesses for one sequence: by proposers in this process and by drafters outside, and whose of them to believe.

Pure; used by one thread at a time. Nothing in here has a say in what is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shared.speculation import Chooser, Guess, PromptLookup, Proposer, RecentOutputs, SuffixProposer, Tally

ENOUGH_TOKENS = 4.0
"""Where a guess made in this process is expected to have so many right tokens, none is wanted from outside."""


class SequenceDrafts:
    """`read` what is known of the sequence, then `extend` it with each step's tokens."""

    def __init__(self, reference: Sequence[int], outputs: RecentOutputs, group: str) -> None:
        """`reference` is a text that the output is likely to repeat, `group` whose `outputs` may be looked at."""
        self._reference = reference
        self._outputs = outputs
        self._group = group
        self._local: tuple[Proposer, ...] = ()
        self._untold: list[int] = []
        """The newest tokens, which the proposers hear of when they are asked: under load nobody asks."""
        self._chooser = Chooser(0)
        self._branching: Guess | None = None
        """The newest guess with alternatives, until the token comes at which they part."""
        self.asks_outside = True
        """Whether a guess from outside could be of use. Other threads may read it."""

    @property
    def length(self) -> int:
        """Tokens of the sequence, as far as they were told."""
        return self._chooser.length

    @property
    def tallies(self) -> Mapping[str, Tally]:
        return self._chooser.tallies

    def read(self, token_ids: Sequence[int], pause: Callable[[], None]) -> None:
        """All that is known of the sequence; takes milliseconds for a thousand tokens, with a `pause` now and then."""
        lookup = PromptLookup(self._reference, pause=pause)
        lookup.extend(token_ids, pause)
        suffix = SuffixProposer(self._outputs, self._group)
        suffix.extend(token_ids)
        self._chooser.extend(token_ids)
        self._local = (lookup, suffix)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._untold += token_ids
        self._chooser.extend(token_ids)
        self._turn_to_alternative()

    def _tell(self) -> None:
        for proposer in self._local:
            proposer.extend(self._untold)
        self._untold = []

    def offer(self, guess: Guess) -> None:
        """A guess from outside."""
        self._chooser.offer(guess)
        if guess.alternatives:
            self._branching = guess
            self._turn_to_alternative()

    def _turn_to_alternative(self) -> None:
        """Once the token has come that tells which of a guess and its alternatives can be right."""
        guess = self._branching
        if guess is None or guess.start >= self.length:
            return
        self._branching = None
        came = tuple(self._chooser.came(guess.start)[:1])
        if came and guess.token_ids[:1] != came:
            found = next((i for i, tokens in enumerate(guess.alternatives) if tokens[:1] == came), None)
            if found is not None:
                confidence = guess.alternative_confidence[found : found + 1] or ((),)
                self._chooser.offer(Guess(guess.start, guess.alternatives[found], confidence[0], guess.proposer))

    def guess(self, max_tokens: int) -> Guess | None:
        """Let the proposers of this process guess, and choose among all."""
        self._tell()
        for proposer in self._local:
            found = proposer.propose(max_tokens)
            if found is not None:
                self._chooser.offer(found)
        best = self.best(max_tokens)
        inside = best is not None and any(best.proposer == proposer.name for proposer in self._local)
        self.asks_outside = best is None or not inside or _expected_tokens(best) < ENOUGH_TOKENS
        return best

    def best(self, max_tokens: int) -> Guess | None:
        return self._chooser.best(max_tokens)


def _expected_tokens(guess: Guess) -> float:
    """How many of its tokens are right before the first that is not."""
    expected, all_right = 0.0, 1.0
    for chance in guess.confidence:
        all_right *= chance
        expected += all_right
    return expected
