"""Lets the target write the corpus: many texts at once in one engine, each continued turn by turn.

A text depends on its number alone, not on what else is in the batch: an interrupted run goes on with the same texts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.draft.distill.conversations import Script, Turn
from services.draft.distill.corpus import Corpus, Text, WrittenTurn
from services.draft.distill.errors import DistillError
from shared.engine import Engine, SequenceStep
from shared.protocol.records import TokenLogprobs

Report = Callable[[int], None]
"""Called with the tokens that the target has made so far, in all texts."""


class _TextInMaking:
    """One text as it grows. It is in the engine as a sequence of its own for each turn."""

    def __init__(self, script: Script, number: int) -> None:
        self.number = number
        self._script = script
        self.tokens, self._to_come = script.begin(number)
        self._given = len(self.tokens)
        self._made = [False] * len(self.tokens)
        self._chosen_of: list[TokenLogprobs] = []
        self._turns: list[WrittenTurn] = []
        self._turn: Turn | None = None
        self._first = 0
        self._ended_by: int | None = None
        """The token that ended the last turn, if one did."""

    @property
    def num_made(self) -> int:
        return len(self._chosen_of)

    def next_turn(self) -> Turn | None:
        """What the target shall write now; None when the text is complete."""
        if not self._to_come:
            return None
        behind = [] if self._turn is None else self._script.behind(self._turn.role)
        turn = self._script.fits(self._to_come[0], len(self.tokens) + len(behind))
        if turn is None:
            return None
        self._close_turn(behind)
        self._turn, self._first = turn, len(self.tokens)
        self._to_come.pop(0)
        return turn

    def take(self, step: SequenceStep) -> bool:
        """Append what a step made. Returns whether the turn has ended."""
        assert self._turn is not None  # noqa: S101 (a step comes after its turn)
        self.tokens += step.new_ids
        self._made += [True] * len(step.new_ids)
        self._chosen_of += step.logprobs
        if step.finish_reason is None:
            return False
        params = self._turn.params
        self._turns.append(WrittenTurn(self._turn.role, self._first, len(self.tokens), params.temperature, params.seed))
        self._ended_by = self.tokens[-1] if step.finish_reason == "stop" else None
        return True

    def _close_turn(self, behind: list[int]) -> None:
        """Put the template's marks behind the last turn. A mark that the target wrote itself is there already.

        Another one that ended the turn is taken back, since no chat would have both.
        """
        if self._turn is None:
            return
        if self._ended_by is not None and behind and self._ended_by == behind[0]:
            behind = behind[1:]
        elif self._ended_by is not None:
            self.tokens.pop()
            self._made.pop()
            self._chosen_of.pop()
            last = self._turns[-1]
            self._turns[-1] = WrittenTurn(last.role, last.first, last.end - 1, last.temperature, last.seed)
        self.tokens += behind
        self._made += [False] * len(behind)

    def finished(self) -> Text:
        top = self._script.top
        ids = np.zeros((self.num_made, top), np.int32)
        logprobs = np.full((self.num_made, top), -np.inf, np.float16)
        for row, chosen in enumerate(self._chosen_of):
            count = len(chosen.top)
            ids[row, :count] = [token for token, _ in chosen.top]
            logprobs[row, :count] = [value for _, value in chosen.top]
        return Text(
            self.number, np.array(self.tokens, np.int32), np.array(self._made), ids, logprobs, tuple(self._turns)
        )


class Generator:
    """Runs texts through one engine, as many at once as it has places for."""

    def __init__(self, engine: Engine, script: Script, corpus: Corpus) -> None:
        self._engine = engine
        self._script = script
        self._corpus = corpus
        self._running: dict[str, _TextInMaking] = {}
        self._numbers = corpus.numbers()
        self._done = 0
        """Made tokens of the finished texts among those that `_numbers` has given."""
        self._turns_begun = 0

    def run(self, tokens: int, report: Report) -> list[int]:
        """Until the first texts hold `tokens` made tokens; returns their numbers. Raises DistillError."""
        try:
            while (found := self._corpus.first_texts(tokens)) is None:
                self._begin_texts(tokens)
                for step in self._engine.step():
                    self._take(step)
                if failures := self._engine.take_failures():
                    raise DistillError(f"the target failed while it wrote: {failures[0][1]}")
                report(self._corpus.num_made + self._in_making())
        finally:
            for seq_id in list(self._running):
                self._engine.release(seq_id)
            self._running.clear()
            self._corpus.flush()
        return found

    def _in_making(self) -> int:
        return sum(text.num_made for text in self._running.values())

    def _begin_texts(self, tokens: int) -> None:
        """All that `_numbers` gave are begun or done; once these have enough tokens no other text is needed."""
        places = self._engine.config.max_running
        while len(self._running) < places and self._done + self._in_making() < tokens:
            number = next(self._numbers)
            if number in self._corpus:
                self._done += self._corpus.made_of(number)
            else:
                self._go_on(_TextInMaking(self._script, number))

    def _take(self, step: SequenceStep) -> None:
        text = self._running[step.seq_id]
        if text.take(step):
            del self._running[step.seq_id]
            self._engine.release(step.seq_id)
            self._go_on(text)

    def _go_on(self, text: _TextInMaking) -> None:
        turn = text.next_turn()
        if turn is None:
            self._corpus.add(text.finished())
            self._done += text.num_made
            return
        self._turns_begun += 1
        seq_id = f"text-{text.number}-{self._turns_begun}"
        sequence = self._engine.new_sequence(
            seq_id, list(text.tokens), len(text.tokens), turn.params, speculate=False, text=False
        )
        self._engine.start(sequence)
        self._running[seq_id] = text
