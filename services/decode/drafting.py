"""Drafting beside the engine: after each step it takes the new tokens in and proposes what may come next.

So a proposal is there before the next step is planned, with no way over the event loop. What drafters outside guess is
weighed together with it. Nothing here waits for anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from services.decode.sequence_drafts import SequenceDrafts
from shared.engine import AsyncEngine, Engine, Sequence, SequenceStep
from shared.protocol.drafts import DRAFT_MODEL
from shared.speculation import Guess, RecentOutputs, Tally

RECENT_TOKENS, RECENT_GROUPS = 65_536, 16
"""Outputs remembered: tokens of each group, and groups. 44 bytes a token."""

REMEMBER_TOKENS = 256
"""Of an output that ended so many are taken in between two steps."""

CONTEXT_TOKENS = 64
"""What stands before them goes with them, to be recognized by."""

log = structlog.get_logger(__name__)

OnTallies = Callable[[Mapping[str, Tally]], None]


@dataclass(eq=False)
class Drafted:
    """A sequence that is drafted for. `group`: who shares outputs with it, a tenant under one salt."""

    sequence: Sequence
    drafts: SequenceDrafts
    group: str
    ended: bool = False


class Drafting:
    """Owner of the guesses for this worker's sequences, and of the outputs that they are taken from.

    Public methods are called on the event loop. `_sequences`, the drafts in it and `_outputs` belong to the engine's
    thread.
    """

    def __init__(self, engine: AsyncEngine, max_draft_tokens: int) -> None:
        self._engine = engine
        self._max_draft_tokens = max_draft_tokens
        self._sequences: dict[str, Drafted] = {}
        self._offered: deque[tuple[Drafted, Guess]] = deque()
        """Guesses from outside on their way into the engine's thread."""
        self._told_of_offers = False
        self._outputs = RecentOutputs(RECENT_TOKENS, RECENT_GROUPS)
        engine.after_step = self._after_step

    def begin(self, sequence: Sequence, reference: list[int], group: str) -> Drafted:
        """Draft for a sequence that is not in the batch yet, from when its tokens have been read, in a thread."""
        drafted = Drafted(sequence, SequenceDrafts(reference, self._outputs, group), group)
        known = list(sequence.token_ids)
        # A sleep of nothing lets the engine's thread have the interpreter, which else waits for it for milliseconds.
        reading = asyncio.get_running_loop().run_in_executor(None, drafted.drafts.read, known, lambda: time.sleep(0))
        reading.add_done_callback(lambda done: self._begin_with(drafted, done))
        return drafted

    def _begin_with(self, drafted: Drafted, reading: asyncio.Future[None]) -> None:
        if drafted.ended or reading.cancelled():
            return
        error = reading.exception()
        if error is not None:
            log.error("drafting_failed", request_id=drafted.sequence.seq_id, error=repr(error), exc_info=error)
        else:
            self._engine.post(lambda engine: self._add(engine, drafted))

    def offer(self, drafted: Drafted, guess: Guess) -> None:
        """A guess from outside. All that come during a step are looked at together behind it."""
        self._offered.append((drafted, guess))
        if not self._told_of_offers:
            self._told_of_offers = True
            self._engine.post(self._take_offers)

    def end(self, drafted: Drafted, on_tallies: OnTallies, *, remember: bool) -> None:
        """The sequence has ended here. With `remember` its output may be what others of its group say."""
        drafted.ended = True
        sequence = drafted.sequence
        self._engine.post(lambda engine: self._drop(drafted), lambda: on_tallies(drafted.drafts.tallies))
        if remember:
            self._remember(drafted.group, list(sequence.token_ids), sequence.num_prompt)

    def _remember(self, group: str, token_ids: list[int], start: int) -> None:
        """Take in the tokens from `start` on, part by part: one in each turn of the engine."""
        stop = start + REMEMBER_TOKENS
        part, before = token_ids[start:stop], token_ids[max(0, start - CONTEXT_TOKENS) : start]
        if part:
            self._engine.post(
                lambda engine: self._outputs.add(group, part, before),
                lambda: self._remember(group, token_ids, stop),
            )

    # In the engine's thread

    def _add(self, engine: Engine, drafted: Drafted) -> None:
        sequence = drafted.sequence
        self._sequences[sequence.seq_id] = drafted
        with self._harmless(drafted):
            drafted.drafts.extend(sequence.token_ids[drafted.drafts.length :])
            self._propose(engine, drafted, drafted.drafts.guess(self._max_draft_tokens))

    def _drop(self, drafted: Drafted) -> None:
        if self._sequences.get(drafted.sequence.seq_id) is drafted:
            del self._sequences[drafted.sequence.seq_id]

    def _take_offers(self, engine: Engine) -> None:
        self._told_of_offers = False  # first: what is appended from now on may come too late for this turn
        touched: dict[Drafted, None] = {}
        while self._offered:
            drafted, guess = self._offered.popleft()
            if self._sequences.get(drafted.sequence.seq_id) is drafted:
                with self._harmless(drafted):
                    drafted.drafts.offer(guess)
                    touched[drafted] = None
        for drafted in touched:
            with self._harmless(drafted):
                self._propose(engine, drafted, drafted.drafts.best(self._max_draft_tokens))

    def _after_step(self, engine: Engine, steps: list[SequenceStep]) -> None:
        for step in steps:
            drafted = self._sequences.get(step.seq_id)
            if drafted is not None and step.new_ids:
                with self._harmless(drafted):
                    self._follow(engine, drafted, step)

    @contextmanager
    def _harmless(self, drafted: Drafted) -> Iterator[None]:
        """Where drafting fails the sequence goes on without drafts."""
        try:
            yield
        except Exception as error:
            self._drop(drafted)
            log.error("drafting_failed", request_id=drafted.sequence.seq_id, error=repr(error), exc_info=True)

    def _follow(self, engine: Engine, drafted: Drafted, step: SequenceStep) -> None:
        drafts = drafted.drafts
        drafts.extend(step.new_ids)
        # Guessing takes time too, and where nothing is wanted, as under load, it would be for nothing.
        if step.wanted and step.finish_reason is None:
            self._propose(engine, drafted, drafts.guess(self._max_draft_tokens))

    @staticmethod
    def _propose(engine: Engine, drafted: Drafted, guess: Guess | None) -> None:
        if guess is not None:
            # A model says of each token how likely it is. Others say what is usual, which the engine measures better.
            stated = guess.confidence if guess.proposer == DRAFT_MODEL else ()
            engine.propose(drafted.sequence.seq_id, guess.start, list(guess.token_ids), guess.proposer, stated)
