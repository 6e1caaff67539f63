"""What a student is worth as a drafter: how often its choice is the target's, on texts that it was not trained on.

The student chooses as the draft service has it choose: with the target's parameters, seed and noise, behind the tokens
that the target wrote. So nothing needs to be simulated: as long as all drafts before it were right, a drafter sees
exactly those tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from services.draft.distill.corpus import Text, WrittenTurn
from services.draft.distill.errors import DistillError
from services.draft.distill.student import Student
from shared.engine import Engine
from shared.engine.sampler import choose_token
from shared.protocol.jobs import SamplingParams

DRAFTED = 4
"""Tokens drafted at a time in the mean accepted length."""

_ROWS = 64
"""Positions whose logits over the whole vocabulary are in memory at once."""


class Acceptance(msgspec.Struct, frozen=True):
    """Over `positions` tokens: the share that the student would have chosen too, and how many of DRAFTED drafted
    tokens are accepted in the mean, when drafting begins anew behind each token that the target had to correct."""

    positions: int = 0
    share: float = 0.0
    mean_accepted: float = 0.0


class Accepted(msgspec.Struct, frozen=True):
    """Answers that the target chose greedily, and those that it sampled."""

    greedy: Acceptance
    sampled: Acceptance

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {found.share:.1%} ({found.mean_accepted:.2f} of {DRAFTED})"
            for name, found in (("greedy", self.greedy), ("sampled", self.sampled))
            if found.positions
        )


@dataclass
class Tally:
    """Adds up runs of right and wrong guesses, one run for each answer."""

    positions: int = 0
    right: int = 0
    rounds: int = 0
    accepted: int = 0
    _runs: list[int] = field(default_factory=list)

    def add(self, guesses: Sequence[bool]) -> None:
        self.positions += len(guesses)
        self.right += sum(guesses)
        at = 0
        while at < len(guesses):
            run = guesses[at : at + DRAFTED]
            accepted = run.index(False) if False in run else len(run)
            self.rounds += 1
            self.accepted += accepted
            at += accepted + 1  # behind the accepted ones the target itself adds a token

    def result(self) -> Acceptance:
        if not self.positions:
            return Acceptance()
        return Acceptance(self.positions, self.right / self.positions, self.accepted / self.rounds)


class _Tallies:
    """Up to `limit` positions for each kind of answer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of = {True: Tally(), False: Tally()}

    def wanted(self, texts: Iterable[Text]) -> Iterator[tuple[Text, WrittenTurn, Tally]]:
        """Held-out answers whose kind is not measured well enough yet."""
        for text in texts:
            for turn in text.turns:
                tally = self._of[turn.temperature == 0]
                if turn.role == "answer" and turn.end > turn.first and tally.positions < self._limit:
                    yield text, turn, tally

    def result(self) -> Accepted:
        return Accepted(self._of[True].result(), self._of[False].result())


def _params(turn: WrittenTurn) -> SamplingParams:
    return SamplingParams(max_tokens=turn.end - turn.first, seed=turn.seed, temperature=turn.temperature)


@torch.inference_mode()
def of_student(student: Student, texts: Iterable[Text], limit: int) -> Accepted:
    """In training: by the student's own forward, up to `limit` positions of each kind."""
    tallies = _Tallies(limit)
    for text, turn, tally in tallies.wanted(texts):
        tokens = torch.from_numpy(text.tokens[: turn.end].astype("int64")).to(student.head.device)
        hidden = student.hidden(tokens[None, :-1])[0, turn.first - 1 :]
        params = _params(turn)
        guesses: list[bool] = []
        for start in range(0, len(hidden), _ROWS):
            logits = (hidden[start : start + _ROWS] @ student.head.T).float().cpu().numpy()
            for row in logits:
                position = turn.first + len(guesses)
                guesses.append(choose_token(row, params, position) == int(text.tokens[position]))
        tally.add(guesses)
    return tallies.result()


def of_draft(engine: Engine, texts: Iterable[Text], limit: int) -> Accepted:
    """At the end: by the engine that serves drafts, with the finished draft loaded. Raises DistillError.

    The target's tokens are put to the draft for verification: those it confirms it would have proposed.
    """
    tallies = _Tallies(limit)
    for text, turn, tally in tallies.wanted(texts):
        tally.add(_confirmed(engine, text.tokens.tolist(), turn))
    return tallies.result()


def _confirmed(engine: Engine, tokens: list[int], turn: WrittenTurn) -> list[bool]:
    """For each token of the turn whether the engine's model chooses it. Raises DistillError."""
    name = "held-out"
    # One token of room behind the turn: its last is verified like the others.
    params = msgspec.structs.replace(_params(turn), max_tokens=turn.end - turn.first + 1, ignore_eos=True)
    sequence = engine.new_sequence(name, tokens[: turn.first], turn.first, params, text=False)
    guesses: list[bool] = []
    try:
        engine.start(sequence)
        while (position := turn.first + len(guesses)) < turn.end:
            engine.propose(name, position, tokens[position : turn.end])
            steps = engine.step()
            if failures := engine.take_failures():
                raise DistillError(f"the draft failed while it was measured: {failures[0][1]}")
            for step in steps:
                chosen = step.new_ids[: turn.end - position]
                guesses += [
                    token == tokens[position + place] for place, token in enumerate(chosen)
                ]  # all but the last are right, or they would not be there
            behind = turn.first + len(guesses)
            if guesses and not guesses[-1] and behind < turn.end:
                engine.rewind(sequence, tokens[:behind])
    finally:
        engine.release(name)
    return guesses
