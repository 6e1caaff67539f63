"""What a drafter knows of one sequence: its tokens, everybody's guesses, and which of them to tell decode. Pure.

Also whether the draft model shall guess for it: a model's steps cost time that other sequences could have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.protocol.drafts import DRAFT_MODEL, DraftContext, Proposal
from shared.protocol.jobs import SamplingParams
from shared.speculation import Chooser, Guess, PromptLookup, Proposer, RecentOutputs, SuffixProposer

MEMORY = 0.97
"""Weight of what was learned one token ago about the draft model in this sequence."""

USUAL, TRUST = 0.7, 2.0
"""How often a token of the draft model is thought to be right before it is known, and the tokens that this weighs."""

READ_TOKENS = 256
"""Read by the proposers at once, which takes about half a millisecond."""

SOON = 2
"""Tokens beyond those known from which on a guess is of use: decode computes the first of them already."""

LEAST = 0.2
"""A model that is right more seldom than this is not asked until its failures have faded.

Its guess is there in time only where the one before was right too: it helps with about the square of this, and its
steps take memory bandwidth from decode's. Where alternatives made up for wrong ones it may be right more seldom.
"""


@dataclass(frozen=True, eq=False)
class Wish:
    """What the draft model shall do for a sequence: be `ahead` tokens beyond the first `confirmed` of `tokens`.

    0: rest. `tokens` may grow meanwhile, but never change; a sequence that began anew has another list.
    """

    request_id: str
    tokens: list[int]
    confirmed: int
    ahead: int
    num_prompt: int
    params: SamplingParams
    salt: str


class Alternative(NamedTuple):
    """A guess from another first token on, and how likely each of its tokens is behind those before it.

    The first is one that the draft model thinks possible; what follows is its guess, or what a table says: the last
    `from_table` of them.
    """

    token_ids: list[int]
    confidence: list[float]
    from_table: int = 0


class GapError(Exception):
    """A context does not continue what is known of the sequence."""


class KnownSequence:
    """Begins with a context from position 0. What came is read by the proposers part by part, before they are asked."""

    def __init__(self, context: DraftContext, outputs: RecentOutputs, *, most: int, with_model: bool) -> None:
        """`most`: tokens guessed beyond those known."""
        self.request_id = context.request_id
        self.group = f"{context.tenant}\0{context.salt}"
        """Who shares recent outputs: a tenant under one salt."""
        self.token_ids: list[int] = []
        self.num_prompt = context.num_prompt
        self.reply_to = context.reply_to
        self.wanted = 0
        self._most = most
        self._params = context.params
        self._salt = context.salt
        self._proposers: list[Proposer] = [PromptLookup(), SuffixProposer(outputs, self.group)]
        self._num_read = 0
        """Tokens that the proposers have heard of."""
        self._chooser = Chooser(0)
        self._looked_up: list[int] = []
        """The best guess of those without a model, when they were last asked."""
        self._came_true = False
        """Whether it was right as far as one knows."""
        self._sent: dict[bool, list[int]] = {}
        """What decode was told of the tokens beyond those known, by whether a model guessed: it keeps one of each."""
        self._said_something = False
        """Since the newest context."""
        self._has_model = with_model and context.params is not None and context.num_prompt > 0
        self._record = _Record()
        self._told_record = _Record()
        """The same, where an alternative that came true is as good as the first choice."""
        self._drafted: list[int] = []
        """The draft model's tokens beyond those known, as far as they were not refuted."""
        self._alternatives: Sequence[Alternative] = ()
        """What the draft model guesses should the first of `_drafted` be wrong, from the same position on."""
        self._alternatives_told = True
        self.alternative_came = False
        """Whether the first token of the newest context was one of those, and not the draft model's first choice."""
        self._refuted_at: int | None = 0
        """The model goes on from something else until it has heard of the first so many tokens. It knows none yet."""

    def extend(self, context: DraftContext) -> None:
        """Take a newer context. Raises GapError when it leaves tokens out or contradicts those known."""
        overlap = len(self.token_ids) - context.start
        if overlap < 0:
            raise GapError(f"{len(self.token_ids)} tokens known, a context starts at {context.start}")
        told_twice = min(overlap, len(context.token_ids))
        if self.token_ids[context.start : context.start + told_twice] != context.token_ids[:told_twice]:
            raise GapError(f"a context contradicts the {len(self.token_ids)} tokens known")
        new_ids = context.token_ids[overlap:]
        self.reply_to = context.reply_to
        self.wanted = min(context.wanted, self._most)
        agreed = _common(self._drafted, new_ids)
        self._record.add(agreed, agreed < min(len(self._drafted), len(new_ids)), len(new_ids))
        if agreed < min(len(self._drafted), len(new_ids)):
            self._refuted_at = len(self.token_ids) + len(new_ids)
        came = self._alternative(new_ids) if agreed == 0 else None
        self.alternative_came = came is not None
        told = came.token_ids if came is not None else self._drafted
        agreed = _common(told, new_ids)
        wrong = agreed < min(len(told), len(new_ids))
        self._told_record.add(agreed, wrong, len(new_ids))
        of_model = len(told) - (came.from_table if came is not None else 0)
        if came is not None and of_model > 1:
            self._record.add(min(agreed, of_model) - 1, wrong and agreed < of_model, 0)
        self._drafted = _rest(told[:of_model], new_ids)
        if new_ids:
            self._alternatives = ()
            compared = min(len(self._looked_up), len(new_ids))
            self._came_true = 0 < compared == _common(self._looked_up, new_ids)
            self._looked_up = _rest(self._looked_up, new_ids)
        # Decode may have lost it, or not have been ready for it: what has nothing to be added to is told again.
        sent = self._sent if self._said_something else {}
        if came is not None and self._alternatives_told:
            sent = sent | {True: came.token_ids}
        self._sent = {by_model: _rest(tokens, new_ids) for by_model, tokens in sent.items()}
        self._said_something = False
        self.token_ids += new_ids
        self._chooser.extend(new_ids)
        if came is not None:
            self._offer(len(self.token_ids) - len(new_ids), came.token_ids, came.confidence)

    @property
    def all_read(self) -> bool:
        return self._num_read == len(self.token_ids)

    def read_on(self) -> int:
        """Let the proposers read the next tokens, READ_TOKENS at most; returns how many."""
        part = self.token_ids[self._num_read : self._num_read + READ_TOKENS]
        for proposer in self._proposers:
            proposer.extend(part)
        self._num_read += len(part)
        return len(part)

    def look_up(self) -> None:
        """Let those guess that need no model, which have read all."""
        for proposer in self._proposers:
            guess = proposer.propose(self.wanted) if self.wanted else None
            if guess is not None:
                self._chooser.offer(guess)
        best = self._chooser.best(self.wanted) if self.wanted else None
        self._looked_up = list(best.token_ids) if best is not None and best.proposer != DRAFT_MODEL else []

    def wish(self) -> Wish | None:
        """What to ask of the draft model. It rests where another's guess is expected to bring as many right tokens and
        the one before came true, and where it was hardly ever right itself."""
        if not self._has_model or self._params is None or len(self.token_ids) < self.num_prompt:
            return None
        ahead = self.wanted if self._model_pays() else 0
        return Wish(
            self.request_id, self.token_ids, len(self.token_ids), ahead, self.num_prompt, self._params, self._salt
        )

    def granted(self, wish: Wish) -> None:
        """The draft model has heard of the wish: what it says from now on goes on from those tokens."""
        if wish.tokens is self.token_ids and self._refuted_at is not None and wish.confirmed >= self._refuted_at:
            self._refuted_at = None
            self._drafted = []  # an alternative's rest: the model tells it, if that is what it goes on from

    def refused(self, wish: Wish) -> None:
        """The draft model cannot take this sequence."""
        if wish.tokens is self.token_ids:
            self._has_model = False

    def drafted(self, output_index: int, token_ids: list[int], confidence: list[float]) -> int:
        """The draft model guessed these tokens of the output, each that likely behind those before it; returns how many
        of them may still come true."""
        if self._refuted_at is not None:
            return 0
        start = self.num_prompt + output_index
        late = self.token_ids[start : start + len(token_ids)]
        agreed = _common(token_ids, late)
        for record in (self._record, self._told_record):
            record.add(agreed, agreed < len(late), 0)
        if agreed < len(late):
            self._refuted_at = len(self.token_ids)
            return 0
        if start + len(late) != len(self.token_ids) + len(self._drafted):
            return 0
        self._drafted += token_ids[len(late) :]
        self._offer(start, token_ids, confidence)
        return len(token_ids) - len(late)

    def drafted_otherwise(self, output_index: int, alternatives: Sequence[Alternative]) -> bool:
        """The draft model told all that it guesses should that token be another; returns whether it may still be."""
        if self._refuted_at is not None or self.num_prompt + output_index != len(self.token_ids):
            return False
        if alternatives == self._alternatives:
            return False
        self._alternatives, self._alternatives_told = alternatives, False
        return True

    def proposals(self) -> list[Proposal]:
        """What decode should be told now, where it says more than decode was told before: the best guess, and the draft
        model's own where that is another's. Decode has other guesses at hand, and experience of its own with each.

        All of it from the first unknown token on: a part alone would not tell what it goes on from, and decode, which
        may have that token already, could take the continuation of a wrong guess for one of the right token.
        """
        best = self._chooser.best(self.wanted) if self.wanted else None
        if best is None:
            return []
        found = [self._news(best)]
        if best.proposer != DRAFT_MODEL and (own := self._chooser.best(self.wanted, DRAFT_MODEL)) is not None:
            found.append(self._news(own))
        return [proposal for proposal in found if proposal is not None]

    def _news(self, guess: Guess) -> Proposal | None:
        tokens, by_model = list(guess.token_ids), guess.proposer == DRAFT_MODEL
        alternatives = list(self._alternatives) if by_model and not self._alternatives_told else []
        told = self._sent.get(by_model, [])[: len(tokens)] == tokens
        if not alternatives and (told or len(tokens) < SOON):
            return None
        self._sent[by_model] = tokens
        self._alternatives_told = self._alternatives_told or bool(alternatives)
        self._said_something = True
        return Proposal(
            self.request_id,
            guess.start,
            tokens,
            guess.proposer,
            _rounded(guess.confidence),
            alternatives=[other.token_ids for other in alternatives],
            alternative_confidence=[_rounded(other.confidence) for other in alternatives],
        )

    def _offer(self, start: int, token_ids: list[int], confidence: list[float]) -> None:
        self._chooser.offer(Guess(start, tuple(token_ids), tuple(confidence), DRAFT_MODEL))

    def _alternative(self, new_ids: list[int]) -> Alternative | None:
        """The alternative whose first token came."""
        return next((guess for guess in self._alternatives if guess.token_ids[:1] == new_ids[:1]), None)

    def _model_pays(self) -> bool:
        if not self.wanted or self._told_record.rate * self._record.rate < LEAST**2:
            return False
        best = self._chooser.best(self.wanted)
        if best is None or best.proposer == DRAFT_MODEL or not self._came_true:
            return True
        return _expected(best.confidence) < _expected([self._record.rate] * self.wanted)


class _Record:
    """How often the draft model's tokens were right, of those behind right ones. Fades with every token that came."""

    def __init__(self) -> None:
        self._right = 0.0
        self._tried = 0.0

    def add(self, right: int, wrong: bool, came: int) -> None:
        fade = MEMORY**came
        self._right = self._right * fade + right
        self._tried = self._tried * fade + right + wrong

    @property
    def rate(self) -> float:
        return (self._right + TRUST * USUAL) / (self._tried + TRUST)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _rest(guessed: list[int], came: list[int]) -> list[int]:
    """What is left of a guess after `came`; nothing when that refutes it."""
    return guessed[len(came) :] if _common(guessed, came) == min(len(guessed), len(came)) else []


def _rounded(chances: Sequence[float]) -> list[float]:
    return [round(chance, 3) for chance in chances]


def _expected(chances: Sequence[float]) -> float:
    """How many of the guessed tokens are right before the first that is not."""
    expected, all_right = 0.0, 1.0
    for chance in chances:
        all_right *= chance
        expected += all_right
    return expected
