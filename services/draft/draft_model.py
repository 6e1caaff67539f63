"""A smaller model as proposer: same engine, same sampling noise, always on its way ahead of what decode has confirmed.

Each step of its engine serves all sequences that are less than wanted ahead, of all decode workers. From the first
token that decode does not know it goes on in several ways: so one is there, too, where its first choice was wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import structlog
import torch

from services.draft.followers import Followers
from services.draft.known import SOON, Alternative, Wish
from services.draft.service import Drafted
from services.draft.settings import DraftSettings
from services.draft.vocabulary import require_same_vocabulary
from shared.engine import Engine, EngineError, Sequence, SequenceStep, StepStats
from shared.models import ModelError, ModelFiles
from shared.protocol.jobs import SamplingParams
from shared.telemetry.metrics import EngineMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.process import StartupError

HEALTH_CHECK_S = 1.0
STARVED_S = 2.0
"""A step that takes this long competes with others for a core."""

HUNG_AFTER = 3
"""A step that takes this many times `stall_s` never ends."""

ALTERNATIVE_TOKENS = 3
"""Guessed behind the first token of an alternative, at most: about as many as a step of decode verifies."""

FOLLOWED = 64
"""Tokens that may come next for which the table of followers is asked, the likeliest."""

FOLLOWED_BEHIND = 2
"""Tokens that the table adds at the end of what is guessed behind the first token of an alternative, at most."""

LEAST_ALTERNATIVE = 0.03
"""A token less likely than this is no alternative."""

LEAST_CHANCE = 0.05
"""Where the tokens guessed so far are less likely than this to come true, all of them, no other is guessed behind them:
it would hardly ever be of use, and the step takes memory bandwidth from decode's."""

log = structlog.get_logger(__name__)


class DraftModel:
    """The draft model in its engine thread, as the service speaks to it. Importing this module loads torch."""

    def __init__(
        self,
        host: EngineHost,
        max_sequences: int,
        alternatives: int,
        followers: Followers | None,
        yielding_thread: int | None,
    ) -> None:
        """`yielding_thread` is the engine's, where it runs on idle cores only."""
        self._host = host
        self._yielding_thread = yielding_thread
        self._drafter = Drafter(max_sequences, alternatives, followers)
        self._on_drafted: Callable[[list[Drafted]], None] = lambda drafted: None
        self._from_steps: deque[list[Drafted]] = deque()
        """What each step brought, on its way from the engine's thread to the event loop."""

    @classmethod
    async def load(cls, settings: DraftSettings, name: str, target: ModelFiles, metrics: EngineMetrics) -> DraftModel:
        """Raises StartupError when it cannot be loaded or speaks other tokens than the target."""
        sizes = BatchSizes(settings.draft_slots, settings.draft_batch_tokens)
        quick = settings.model_copy(update={"dtype": _dtype(settings)})
        try:
            host = await EngineHost.load(quick, name, sizes, metrics)
        except EngineError as error:
            raise StartupError(f"draft model {name}: {error}") from error
        require_same_vocabulary(target, host.model)
        try:
            followers = Followers.load(host.model.path)
        except ModelError as error:
            raise StartupError(f"draft model {name}: {error}") from error
        host.start()
        thread_id = None
        if _on_cpu(settings):
            thread_id = await host.async_engine.call(lambda engine: threading.get_native_id())
            _yield_to_others(thread_id)
        return cls(host, settings.max_sequences, settings.draft_alternatives, followers, thread_id)

    @property
    def name(self) -> str:
        return self._host.model.name

    def listen(self, on_drafted: Callable[[list[Drafted]], None]) -> None:
        """Call back on the event loop after each step that sampled anything."""

        def after_step(engine: Engine, steps: list[SequenceStep]) -> None:
            self._from_steps.append(self._drafter.after_step(engine, steps))

        def on_steps(steps: list[SequenceStep], stats: StepStats) -> None:
            # One step's at a time: what the next brought may belong behind the answer to a wish between the two.
            if drafted := self._from_steps.popleft():
                on_drafted(drafted)

        self._on_drafted = on_drafted
        self._host.async_engine.after_step = after_step
        self._host.listen(on_steps)

    def tell(self, wishes: list[Wish], granted: Callable[[list[Wish]], None]) -> None:
        """The newest wishes, the most urgent first. `granted` is called with those that cannot be fulfilled, behind
        all that was drafted before."""
        refused: list[Wish] = []

        def answer() -> None:
            granted(refused)
            self._on_drafted(taken_up)

        taken_up: list[Drafted] = []
        self._host.async_engine.post(
            lambda engine: refused.extend(self._drafter.take(engine, wishes, taken_up.append)), answer
        )

    def forget(self, request_id: str) -> None:
        self._host.async_engine.post(lambda engine: self._drafter.forget(engine, request_id))

    async def exit_when_broken(self, stall_s: float) -> None:
        """A hung engine cannot be interrupted from inside its process, nor a dead or broken one mended.

        Silence is counted in checks, so that one that was paused with its whole process is not taken for hung.
        """
        silent_checks, progress, competes = 0, self._host.progress_unix_s, False
        while True:
            await asyncio.sleep(HEALTH_CHECK_S)
            silent_checks = silent_checks + 1 if self._host.progress_unix_s == progress else 0
            progress = self._host.progress_unix_s
            # Where others leave it no core for so long it is in want of one, not hung; and it may hold what the loop
            # waits for.
            starves = silent_checks * HEALTH_CHECK_S >= STARVED_S
            if self._yielding_thread is not None and starves != competes:
                competes = starves
                (_compete if competes else _yield_to_others)(self._yielding_thread)
            hangs = silent_checks * HEALTH_CHECK_S > HUNG_AFTER * stall_s
            if fault := self._host.fault or ("engine_hangs" if hangs else ""):
                log.error(fault, model=self.name)
                os._exit(1)  # clean-up would wait for what hangs; decode goes on without drafts

    async def stop(self) -> None:
        await self._host.stop()


@dataclass
class _Drafting:
    """One sequence of decode's. The first `confirmed` of `tokens` were compared with those of the model's `sequence`.

    `forks` have another token than that one there, the likeliest first; once they were made it has `forked`.
    """

    request_id: str
    tokens: list[int]
    sequence: Sequence
    confirmed: int
    ahead: int
    forks: list[Sequence] = field(default_factory=list)
    forked: bool = False
    followed: list[Alternative] | None = None
    """What the table says of other tokens there; None: not asked yet."""

    def fork_chance(self, fork: Sequence) -> float:
        """How likely the fork's own first token was found."""
        ranking = self.sequence.rankings[self.confirmed]
        return ranking.chances[ranking.token_ids.index(fork.token_ids[self.confirmed])]


class Drafter:
    """Runs in the engine thread; owner of the draft model's sequences, whose KV is rebuilt from tokens when missing.

    A sequence that is as far ahead as wanted is paused and keeps its blocks; when blocks are short the forks go, then
    those that were not asked about for longest give up theirs.
    """

    def __init__(self, max_sequences: int, alternatives: int = 0, followers: Followers | None = None) -> None:
        self._max_sequences = max_sequences
        self._alternatives = alternatives
        self._followers = followers if alternatives else None
        self._drafting: OrderedDict[str, _Drafting] = OrderedDict()
        self._names = itertools.count()
        self._of_sequence: dict[str, _Drafting] = {}
        """Whose each sequence of the engine is, forks included."""

    def take(
        self, engine: Engine, wishes: list[Wish], on_taken_up: Callable[[Drafted], None] = lambda drafted: None
    ) -> list[Wish]:
        """Let each sequence go on from a guess that agrees with what is confirmed, else from that.

        Returns the wishes that cannot be fulfilled: longer than the model's context or its cache, say. Where it is
        an alternative `on_taken_up` hears what follows the confirmed tokens in it, and where no step follows all that
        there is to say.
        """
        refused: list[Wish] = []
        for wish in wishes:
            try:
                self._take(engine, wish, on_taken_up)
            except EngineError as error:
                log.info("draft_left_out", request_id=wish.request_id, reason=str(error))
                self.forget(engine, wish.request_id)
                refused.append(wish)
            except Exception as error:  # the others' wishes are none the worse
                log.error("draft_failed", request_id=wish.request_id, error=repr(error), exc_info=True)
                self.forget(engine, wish.request_id)
                refused.append(wish)
        self._make_room(engine)
        for wish in wishes:
            if (drafting := self._drafting.get(wish.request_id)) is not None:
                self._fork(engine, drafting)
                if wish.ahead and not any(map(_is_active, (drafting.sequence, *drafting.forks))):
                    for told in self._alternatives_of(drafting, with_table=True):
                        on_taken_up(told)
        return refused

    def after_step(self, engine: Engine, steps: list[SequenceStep]) -> list[Drafted]:
        """What the step brought: tokens, and alternatives where these are complete or there are tokens to tell too."""
        grown: dict[str, tuple[_Drafting, list[SequenceStep]]] = {}
        for step in steps:
            drafting = self._of_sequence.get(step.seq_id)
            if drafting is not None and step.new_ids:
                grown.setdefault(drafting.request_id, (drafting, []))[1].append(step)
        drafted: list[Drafted] = []
        for request_id, (drafting, own_steps) in grown.items():
            try:
                drafted += self._grown(engine, drafting, own_steps)
            except Exception as error:  # the others' guesses are none the worse
                log.error("draft_failed", request_id=request_id, error=repr(error), exc_info=True)
                self.forget(engine, request_id)
        return drafted

    def _grown(self, engine: Engine, drafting: _Drafting, steps: list[SequenceStep]) -> list[Drafted]:
        drafted: list[Drafted] = []
        for step in steps:
            if step.seq_id == drafting.sequence.seq_id:
                confidence = _chances(drafting.sequence, len(drafting.sequence.token_ids) - len(step.new_ids))
                drafted.append(Drafted(drafting.request_id, step.first_index, step.new_ids, confidence))
        self._fork(engine, drafting)
        self._rest_where_unlikely(engine, drafting)
        resting = not _is_active(drafting.sequence)
        complete = not any(map(_is_active, drafting.forks))
        if drafted or complete:
            # With the first guess that is told, not before.
            soon = resting or len(drafting.sequence.token_ids) >= drafting.confirmed + SOON
            drafted += self._alternatives_of(drafting, with_table=soon)
        return drafted

    def _alternatives_of(self, drafting: _Drafting, *, with_table: bool) -> list[Drafted]:
        """All that is guessed should another token come than the likeliest; an empty list where there is nothing."""
        at = drafting.confirmed
        found = [
            Alternative(fork.token_ids[at:], [drafting.fork_chance(fork), *_chances(fork, at + 1)])
            for fork in drafting.forks
            if len(fork.token_ids) > at + 1
        ]
        found = self._lengthened(drafting, found)
        if with_table:
            forked = {guess.token_ids[0] for guess in found}
            found += [guess for guess in self._followed(drafting) if guess.token_ids[0] not in forked]
        return [Drafted(drafting.request_id, at - drafting.sequence.num_prompt, [], [], found)] if found else []

    def forget(self, engine: Engine, request_id: str) -> None:
        """Give the sequence's blocks back. Unknown ids are ignored."""
        drafting = self._drafting.pop(request_id, None)
        if drafting is not None:
            self._drop_forks(engine, drafting)
            self._release(engine, drafting.sequence)

    def _take(self, engine: Engine, wish: Wish, on_taken_up: Callable[[Drafted], None]) -> None:
        """Raises EngineError."""
        drafting = self._drafting.get(wish.request_id)
        if drafting is not None and drafting.tokens is not wish.tokens:  # it began anew, maybe with another prompt
            self.forget(engine, wish.request_id)
            drafting = None
        if wish.ahead == 0:
            if drafting is not None:
                engine.pause(drafting.sequence.seq_id)
                self._drop_forks(engine, drafting)
        elif drafting is None:
            self._begin(engine, wish)
        else:
            self._drafting.move_to_end(wish.request_id)
            taken_up = self._take_up(engine, drafting, wish)
            self._go_on(engine, drafting, wish)
            behind = drafting.sequence.token_ids[wish.confirmed :]
            if taken_up and behind:
                chances = _chances(drafting.sequence, wish.confirmed)
                on_taken_up(Drafted(wish.request_id, wish.confirmed - wish.num_prompt, behind, chances))

    def _take_up(self, engine: Engine, drafting: _Drafting, wish: Wish) -> bool:
        """Go on with the fork that has the token which came, where the sequence has another."""
        at = drafting.confirmed
        if wish.confirmed == at:
            return False
        forks = drafting.forks
        usable = [f for f in forks if f.token_ids[at] == wish.tokens[at] and f.state not in ("failed", "released")]
        if usable:
            forks.remove(usable[0])
            forks.append(drafting.sequence)
            drafting.sequence = usable[0]
        self._drop_forks(engine, drafting)
        drafting.forked, drafting.followed = False, None
        return bool(usable)

    def _go_on(self, engine: Engine, drafting: _Drafting, wish: Wish) -> None:
        sequence = drafting.sequence
        if sequence.state in ("failed", "released"):
            raise EngineError("it failed in a step of the draft model")
        confirmed = wish.tokens[drafting.confirmed : wish.confirmed]
        if sequence.token_ids[drafting.confirmed : wish.confirmed] != confirmed:
            engine.rewind(sequence, wish.tokens[: wish.confirmed], pause_after=wish.ahead)
            _require_all(sequence, wish)
        elif sequence.finish_reason is None:  # else it ends where the model thinks that the text ends
            engine.pause(sequence.seq_id)
            missing = wish.confirmed + wish.ahead - len(sequence.token_ids)
            if missing > 0 and _is_worth_going_on(sequence, wish.confirmed, least=SOON):
                engine.start(sequence, pause_after=missing)
        drafting.confirmed, drafting.ahead = wish.confirmed, wish.ahead

    def _begin(self, engine: Engine, wish: Wish) -> None:
        while len(self._drafting) >= self._max_sequences:
            self.forget(engine, next(iter(self._drafting)))
        capacity = min(engine.context_length, engine.pool.num_blocks * engine.config.block_tokens)
        sequence = engine.new_sequence(
            wish.request_id,
            wish.tokens[: wish.confirmed],
            wish.num_prompt,
            _drafting_params(wish.params, capacity - wish.num_prompt),
            speculate=False,
            pause_after=wish.ahead,
            text=False,
            salt=wish.salt or f"\0{wish.request_id}",  # without a salt nobody says whose it is: nothing is shared
            runners_up=FOLLOWED if self._followers is not None else self._alternatives,
        )
        drafting = _Drafting(wish.request_id, wish.tokens, sequence, wish.confirmed, wish.ahead)
        self._drafting[wish.request_id] = self._of_sequence[sequence.seq_id] = drafting
        _require_all(sequence, wish)
        engine.start(sequence)

    def _fork(self, engine: Engine, drafting: _Drafting) -> None:
        """Once the first unknown token is guessed, go on from the next-likeliest ones too, where there is room."""
        ranking = drafting.sequence.rankings.get(drafting.confirmed)
        if ranking is None or drafting.forked:
            return
        drafting.forked = True
        count = min(ALTERNATIVE_TOKENS, drafting.ahead - 1)
        others = list(zip(ranking.token_ids, ranking.chances, strict=True))[1 : 1 + self._alternatives]
        for token in [token for token, chance in others if chance >= LEAST_ALTERNATIVE] if count else []:
            if engine.num_running + engine.num_waiting >= engine.config.max_running:
                return
            name = f"{drafting.request_id}\0{next(self._names)}"
            try:
                fork = engine.fork(drafting.sequence, name, drafting.confirmed, token, pause_after=count)
            except EngineError:  # no room
                return
            if fork.num_pending > 1:  # nothing is cached: all of the text would be computed again
                engine.release(name)
                return
            if fork.finish_reason is not None:
                engine.release(name)
                continue
            engine.start(fork)
            drafting.forks.append(fork)
            self._of_sequence[name] = drafting

    def _followed(self, drafting: _Drafting) -> list[Alternative]:
        """What the table says should another token come than the one that the draft model thinks likeliest."""
        ranking = drafting.sequence.rankings.get(drafting.confirmed)
        if self._followers is None or ranking is None:
            return []
        if drafting.followed is None:
            before = drafting.tokens[drafting.confirmed - 1]
            following, chances = self._followers.guess(before, np.array(ranking.token_ids[1:], np.int64))
            guessed = [
                Alternative([token, follower], [chance, sure], from_table=1)
                for token, chance, follower, sure in zip(
                    ranking.token_ids[1:], ranking.chances[1:], following.tolist(), chances.tolist(), strict=True
                )
                if follower >= 0
            ]
            drafting.followed = self._lengthened(drafting, guessed)
        return drafting.followed

    def _lengthened(self, drafting: _Drafting, guesses: list[Alternative]) -> list[Alternative]:
        """With what the table says behind them, as long as all of it may well come true once the first token has."""
        if self._followers is None:
            return guesses
        before = drafting.tokens[drafting.confirmed - 1]
        for _ in range(FOLLOWED_BEHIND if guesses else 0):
            ends = np.array([(before, *guess.token_ids)[-2:] for guess in guesses], np.int64)
            following, chances = self._followers.guess(ends[:, 0], ends[:, 1])
            guesses = [
                Alternative([*guess.token_ids, follower], [*guess.confidence, sure], guess.from_table + 1)
                if follower >= 0 and math.prod(guess.confidence[1:]) * sure >= LEAST_CHANCE
                else guess
                for guess, follower, sure in zip(guesses, following.tolist(), chances.tolist(), strict=True)
            ]
        return guesses

    @staticmethod
    def _rest_where_unlikely(engine: Engine, drafting: _Drafting) -> None:
        """Go on with those only whose next token may well be of use."""
        if not _is_worth_going_on(drafting.sequence, drafting.confirmed, least=SOON):
            engine.pause(drafting.sequence.seq_id)
        for fork in drafting.forks:
            if not _is_worth_going_on(fork, drafting.confirmed + 1, least=1, chance=drafting.fork_chance(fork)):
                engine.pause(fork.seq_id)

    def _drop_forks(self, engine: Engine, drafting: _Drafting) -> None:
        for fork in drafting.forks:
            self._release(engine, fork)
        drafting.forks = []

    def _release(self, engine: Engine, sequence: Sequence) -> None:
        self._of_sequence.pop(sequence.seq_id, None)
        engine.release(sequence.seq_id)

    def _make_room(self, engine: Engine) -> None:
        """Room for what the running sequences are about to compute, from forks, then from those that rest, the oldest
        first."""
        active = set(engine.active_ids())
        running = [d.sequence for d in self._drafting.values() if d.sequence.seq_id in active]
        missing = sum(_missing_blocks(engine, sequence) for sequence in running)
        for drafting in self._drafting.values():
            crowded = engine.num_running + engine.num_waiting > engine.config.max_running
            if crowded or missing > engine.pool.num_free or any(fork.preemptions for fork in drafting.forks):
                self._drop_forks(engine, drafting)
        for request_id in [name for name, d in self._drafting.items() if d.sequence.seq_id not in active]:
            if missing <= engine.pool.num_free:
                return
            self.forget(engine, request_id)


def _on_cpu(settings: DraftSettings) -> bool:
    return settings.device == "cpu" or not torch.cuda.is_available()


def _dtype(settings: DraftSettings) -> str:
    """A guess need not be exact: 8-bit products take half the time and memory bandwidth of a step on CPU."""
    if settings.dtype == "auto" and _on_cpu(settings) and "fbgemm" in torch.backends.quantized.supported_engines:
        return "int8"
    return settings.dtype


def _yield_to_others(thread_id: int) -> None:
    """Let this process's thread run where nobody else wants the core: a guess is never worth a wait of decode's.

    SCHED_IDLE is more than the lowest priority: to Linux a core with such a thread is free, so that what wakes up goes
    there and not to the core on which decode computes.
    """
    try:
        os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux, or a sandbox forbids it
        log.info("draft_priority_kept", reason=repr(error))


def _compete(thread_id: int) -> None:
    """Undo `_yield_to_others`."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(thread_id, os.SCHED_OTHER, os.sched_param(0))


def _drafting_params(params: SamplingParams, room: int) -> SamplingParams:
    """The target's sampling, so that the same noise leads to the same choice wherever the logits allow it.

    Text is not made here: stop strings end nothing, and nobody sees log probabilities.
    """
    return msgspec.structs.replace(params, max_tokens=max(min(params.max_tokens, room), 1), stop=[], logprobs=None)


def _is_active(sequence: Sequence) -> bool:
    """Whether it is, or waits to be, in the engine's batch."""
    return sequence.state in ("running", "waiting")


def _chances(sequence: Sequence, start: int) -> list[float]:
    """How likely each token from position `start` on was found; all of them were sampled lately."""
    return [sequence.rankings[position].chances[0] for position in range(start, len(sequence.token_ids))]


def _is_worth_going_on(sequence: Sequence, start: int, *, least: int, chance: float = 1.0) -> bool:
    """Whether it has fewer than `least` tokens from position `start` on, or these are likely: `chance` is that of what
    stands before them."""
    found = _chances(sequence, start)
    return len(found) < least or chance * math.prod(found) >= LEAST_CHANCE


def _require_all(sequence: Sequence, wish: Wish) -> None:
    """Raises EngineError when the confirmed tokens already end the sequence in the draft model's eyes."""
    if sequence.finish_reason is not None or len(sequence.token_ids) != wish.confirmed:
        raise EngineError(f"sequence {sequence.seq_id} has no room, or no reason, to go on behind its tokens")


def _missing_blocks(engine: Engine, sequence: Sequence) -> int:
    """What it lacks until it pauses."""
    left = (sequence.pause_after or 0) - sequence.num_sampled
    length = min(len(sequence.token_ids) + max(left, 0), sequence.max_length)
    return max(-(-length // engine.config.block_tokens) - len(sequence.block_ids), 0)
