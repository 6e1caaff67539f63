"""What the target is asked to write: texts numbered from 0, each a pure function of (target, recipe, number).

With a chat template the target writes both sides: from the template's opening on it plays the user until that turn
ends, then it answers, and so on. No model or file is touched here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from services.draft.distill.errors import DistillError
from shared.models import ChatTokenizer, TemplateError
from shared.protocol.jobs import SamplingParams

Role = Literal["user", "answer"]

USER_TOKENS = 160
ANSWER_TOKENS = 64, 512
"""Longest turns. Where an answer is cut is drawn between these two, evenly in its logarithm: how answers begin is seen
more often than how long ones go on, and each answer begins but few are long."""

_TURNS = (0.55, 0.2, 0.15, 0.1)
"""Shares of texts with 1, 2, 3 and 4 questions and answers."""

_TEMPERATURES, _TEMPERATURE_SHARES = (0.0, 0.7, 1.0), (0.4, 0.3, 0.3)
"""Of answers. The user's turns are all sampled at 1."""

_LEAST_ROOM = 64
"""A turn is begun only with room for this many tokens behind it."""

_HELD_OUT_EVERY, _HELD_OUT = 24, 3

_MARKS = ("QUESTIONMARKONE", "ANSWERMARKONE", "QUESTIONMARKTWO")
"""Stand for the contents when a template is taken apart; no template changes plain capitals."""


@dataclass(frozen=True)
class Markup:
    """Token ids that a chat template puts before a text's first question, before an answer, before a next question."""

    opening: list[int]
    before_answer: list[int]
    before_question: list[int]
    question_ends: list[int]
    """The first token behind a question, where it is a special one: writing it ends the turn."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> Markup | None:
        """None for a model without a chat template. Raises DistillError for one that cannot be taken apart."""
        roles = ("user", "assistant", "user")
        try:
            text = tokenizer.render_text(
                [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
            )
        except TemplateError as error:
            if "no chat template" in str(error):
                return None
            raise DistillError(f"the target's chat template cannot be used: {error}") from error
        pieces: list[str] = []
        for mark in _MARKS:
            piece, found, text = text.partition(mark)
            if not found:
                raise DistillError("the target's chat template leaves messages out, so its turns cannot be told apart")
            pieces.append(piece)
        opening, before_answer, before_question = (tokenizer.encode(p, add_special_tokens=False) for p in pieces)
        first = tokenizer.raw.get_added_tokens_decoder().get(before_answer[0]) if before_answer else None
        ends = before_answer[:1] if first is not None and first.special else []
        return cls(opening, before_answer, before_question, ends)


@dataclass(frozen=True)
class Turn:
    """What the target writes next: `params.max_tokens` at most, behind the tokens that the text has."""

    role: Role
    params: SamplingParams


@dataclass(frozen=True)
class Script:
    """How texts begin and go on. `prompts` are the beginnings, up to the first answer, that a file of prompts gave."""

    seed: int
    max_length: int
    top: int
    markup: Markup | None
    start_ids: list[int]
    prompts: Sequence[list[int]] = ()

    @classmethod
    def of(
        cls, tokenizer: ChatTokenizer, *, seed: int, max_length: int, top: int, prompts: Sequence[str] = ()
    ) -> Script:
        """Raises DistillError."""
        markup = Markup.of(tokenizer)
        start = tokenizer.encode("") or sorted(tokenizer.eos_token_ids)[:1]
        if markup is None and not start:
            raise DistillError("the target has no chat template and no token to begin a text with; give --prompts")
        if markup is None:
            begun = [tokenizer.encode(line) for line in prompts]
        else:
            begun = [tokenizer.render_chat([{"role": "user", "content": line}]) for line in prompts]
        longest = max_length - _LEAST_ROOM
        usable = [ids for ids in begun if 0 < len(ids) <= longest]
        if begun and len(usable) <= _HELD_OUT:
            raise DistillError(
                f"{len(usable)} of the {len(begun)} prompts leave room for an answer within {max_length} tokens; "
                f"at least {_HELD_OUT + 1} are needed, as one is kept for measuring"
            )
        if markup is not None and len(markup.opening) > longest:
            raise DistillError(f"the chat template alone fills the {max_length} tokens of a text")
        return cls(seed, max_length, top, markup, start, usable)

    def numbers(self, *, held_out: bool) -> Iterator[int]:
        """Ascending, without end: texts kept from training, or all others. Those of one prompt stay together."""
        for number in itertools.count():
            prompt = number % len(self.prompts) if self.prompts else number
            if (prompt % _HELD_OUT_EVERY == _HELD_OUT) == held_out:
                yield number

    def begin(self, number: int) -> tuple[list[int], list[Turn]]:
        """The tokens that the text begins with, and its turns to come."""
        random = np.random.default_rng([self.seed, number])
        rounds = 1 + int(random.choice(len(_TURNS), p=_TURNS)) if self.markup is not None else 1
        turns: list[Turn] = []
        for _ in range(rounds):
            temperature = float(random.choice(_TEMPERATURES, p=_TEMPERATURE_SHARES))
            longest = round(float(np.exp(random.uniform(*np.log(ANSWER_TOKENS)))))
            question, answer = (int(s) for s in random.integers(0, 1 << 62, 2))
            turns.append(self._turn("user", USER_TOKENS, 1.0, question))
            turns.append(self._turn("answer", longest, temperature, answer))
        if self.prompts:
            return list(self.prompts[number % len(self.prompts)]), turns[1:]
        if self.markup is None:
            return list(self.start_ids), turns[1:]
        return list(self.markup.opening), turns

    def _turn(self, role: Role, limit: int, temperature: float, seed: int) -> Turn:
        asks = role == "user"
        return Turn(
            role,
            SamplingParams(
                max_tokens=limit,
                seed=seed,
                temperature=temperature,
                stop_token_ids=self.markup.question_ends if asks and self.markup else [],
                min_tokens=3 if asks else 0,
                logprobs=self.top,
            ),
        )

    def fits(self, turn: Turn, length: int) -> Turn | None:
        """The turn, cut to the room behind `length` tokens; None when that is too little."""
        room = self.max_length - length
        if room < _LEAST_ROOM:
            return None
        limit = min(turn.params.max_tokens, room)
        return Turn(turn.role, msgspec.structs.replace(turn.params, max_tokens=limit))

    def behind(self, role: Role) -> list[int]:
        """What the template puts behind a turn of `role` when another follows."""
        assert self.markup is not None  # noqa: S101 (only chats have a second turn)
        return self.markup.before_answer if role == "user" else self.markup.before_question
