"""The synchronous core: sequences in, one ragged forward per `step`, tokens out. One thread may use it at a time.

It owns the sequences, the block pool and the runner, and knows nothing of event loops or other processes.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.engine.batch import SequenceRows
from shared.engine.block_pool import BlockPool
from shared.engine.config import EngineConfig
from shared.engine.detokenizer import Detokenizer
from shared.engine.draft_policy import DraftPolicy
from shared.engine.errors import BadLogits, EngineError, OutOfBlocks, PromptTooLong, SequenceTooLarge, UnknownSequence
from shared.engine.logit_rules import LogitRules
from shared.engine.logprobs import token_logprobs
from shared.engine.runner import ModelRunner
from shared.engine.sampler import choose_token, rank_tokens
from shared.engine.scheduler import Scheduler, Work
from shared.engine.sequence import Sequence, SequenceStep, StepStats, StopReason
from shared.engine.verification import extended, usable_drafts, verify
from shared.protocol.blocks import KVLayout
from shared.protocol.jobs import SamplingParams
from shared.protocol.records import TokenLogprobs

MEASURED_DRAFTS = (0, 1, 2, 3, 4, 5, 7, 11, 16)
"""Numbers of drafted rows whose steps are measured before an engine serves."""

STEPS_MEASURED = 4
"""Steps of each; the first, in which kernels may be compiled, does not count."""

_AHEAD = 1 << 62
"""Sequences that an engine never makes."""

_RANKINGS_KEPT = 64
"""A sequence's last positions of which it is remembered how likely their tokens were."""

_PROMPT_TAIL = 8
"""Ids of the prompt that the detokenizer sees as context of the first output token."""


class Engine:
    """Made by `Engine.load`. Life of a sequence: new_sequence, admit, [set_loaded], start, step ..., release."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.layout: KVLayout = runner.layout
        self.pool = BlockPool(runner.cache.num_blocks)
        self.eos_token_ids = runner.model.eos_token_ids
        self.context_length = runner.model.context_length
        self.vocab_size = runner.model.vocab_size
        self.last_stats = StepStats(time.monotonic(), 0.0, 0, 0, 0, 0, 0)
        self._runner = runner
        self._tokenizer = tokenizer
        self._draft_policy: DraftPolicy | None = None
        if config.adaptive_drafts and config.max_draft_tokens:
            self._draft_policy = DraftPolicy(config.max_draft_tokens, config.max_batch_tokens)
        self._scheduler = Scheduler(
            self.pool,
            block_tokens=config.block_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_draft_tokens=config.max_draft_tokens,
            prefix_caching=config.prefix_caching,
            on_allocate=runner.cache.clear,
            draft_policy=self._draft_policy,
        )
        self._sequences: dict[str, Sequence] = {}
        self._failures: list[tuple[str, Exception]] = []
        self._arrivals = itertools.count()

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Blocks for seconds. Raises UnsupportedModel, NumericsError or EngineError."""
        runner = ModelRunner.load(config)
        path = config.model_path / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        return cls(config, runner, tokenizer)

    # Sequences

    def new_sequence(
        self,
        seq_id: str,
        token_ids: list[int],
        num_prompt: int,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
        speculate: bool = True,
        pause_after: int | None = None,
        text: bool = True,
        salt: str = "",
        ahead: bool = False,
        runners_up: int | None = None,
    ) -> Sequence:
        """Describe a sequence; it holds nothing yet. `token_ids` is the prompt and the output already known.

        Known output is authoritative: it is replayed, never sampled again, and `text` of later steps goes on where it
        stopped. When it already ends the sequence, `finish_reason` is set and the sequence need not be started.
        `prefill_only` pauses after one sampled token, `pause_after` after that many. `text=False` skips
        detokenization (and stop strings). Only sequences of one `salt` share cached blocks. One that is `ahead` counts
        as older than all that are not. With a number of `runners_up` it is kept how likely each sampled token was, and
        so many others. Raises EngineError (bad ids, id in use), PromptTooLong, SequenceTooLarge.
        """
        if seq_id in self._sequences:
            raise EngineError(f"sequence {seq_id} exists already; release it first")
        if not 0 < num_prompt <= len(token_ids):
            raise EngineError(f"sequence {seq_id}: num_prompt {num_prompt} is not within its {len(token_ids)} tokens")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise EngineError(f"sequence {seq_id}: token ids must lie in 0 .. {self.vocab_size - 1}")
        if num_prompt >= self.context_length:
            raise PromptTooLong(
                f"sequence {seq_id}: a prompt of {num_prompt} tokens fills the context of {self.context_length}"
            )
        max_length = min(self.context_length, num_prompt + params.max_tokens)
        if self._scheduler.blocks_for(max_length) > self.pool.num_blocks:
            raise SequenceTooLarge(
                f"sequence {seq_id} may grow to {max_length} tokens; the KV cache holds "
                f"{self.pool.num_blocks * self.config.block_tokens}: lower max_tokens or give it more memory"
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        sequence = Sequence(
            seq_id=seq_id,
            token_ids=list(token_ids[:num_prompt]),
            num_prompt=num_prompt,
            params=params,
            max_length=max_length,
            speculate=speculate,
            pause_after=1 if prefill_only else pause_after,
            detokenizer=self._detokenizer(token_ids[:num_prompt], params) if text else None,
            arrival=next(self._arrivals) - (_AHEAD if ahead else 0),
            rules=LogitRules.of(params, token_ids[:num_prompt], stop_ids, self.vocab_size),
            stop_ids=stop_ids,
            salt=salt,
            num_runners_up=runners_up,
        )
        self._replay(sequence, token_ids[num_prompt:])
        self._sequences[seq_id] = sequence
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Hold blocks for the tokens known and one more. Raises OutOfBlocks; then nothing is held.

        The first `num_computed // block_tokens` of them come from the prefix cache, full and read only; the others are
        zeroed and its own.
        """
        self._check_known(sequence)
        self._scheduler.admit(sequence, min(len(sequence.token_ids) + 1, sequence.max_length))
        if sequence.state == "new":
            sequence.state = "admitted"

    def block_buffer(self, block_id: int) -> Any:
        """The block's `layout.block_bytes` bytes, no copy: uint8 numpy array, on CUDA a device tensor.

        Only blocks of an admitted sequence that lie behind its `num_computed` tokens may be written.
        """
        return self._runner.cache.buffer(block_id)

    def set_loaded(self, sequence: Sequence, n_tokens: int) -> None:
        """The KV of the first `n_tokens` is in the blocks: cached ones, and behind them what was written from outside.

        The last known token is always fed again, since its logits are needed. Full blocks among them can be found by
        other sequences from now on. Raises EngineError when that is more than the sequence has or holds.
        """
        self._check_known(sequence)
        if not 0 <= n_tokens <= min(len(sequence.token_ids), len(sequence.block_ids) * self.config.block_tokens):
            raise EngineError(f"sequence {sequence.seq_id}: KV of {n_tokens} tokens does not fit what it has")
        if sequence.state != "admitted":
            raise UnknownSequence(f"sequence {sequence.seq_id} is {sequence.state}; only an admitted one can be loaded")
        sequence.num_computed = max(sequence.num_computed, min(n_tokens, len(sequence.token_ids) - 1))
        self._scheduler.commit(sequence)

    def start(self, sequence: Sequence, *, pause_after: int | None = None) -> None:
        """Join the running batch from the next step on; with `pause_after` until it has sampled that many more."""
        self._check_known(sequence)
        if sequence.state not in ("new", "admitted", "paused"):
            raise UnknownSequence(f"sequence {sequence.seq_id} is {sequence.state} and cannot be started")
        if sequence.finish_reason is not None:
            raise EngineError(f"sequence {sequence.seq_id} has ended already: {sequence.finish_reason}")
        sequence.num_sampled = 0
        if pause_after is not None:
            sequence.pause_after = pause_after
        self._scheduler.add(sequence)

    def pin(self, seq_id: str) -> list[int]:
        """Bar preemption of the sequence until `unpin`, so that its blocks can be read from outside between steps.

        Returns its full blocks, in order: fewer than expected, or none, after a preemption, and never one that is still
        being filled. Pins are counted. Raises UnknownSequence.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise UnknownSequence(f"sequence {seq_id} is not known to this engine, or was released")
        sequence.pins += 1
        return sequence.block_ids[: sequence.num_computed // self.config.block_tokens]

    def unpin(self, seq_id: str) -> None:
        """Undo one `pin`. Unknown ids are ignored: release ends all pins."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.pins = max(0, sequence.pins - 1)

    def propose(
        self, seq_id: str, start: int, token_ids: list[int], proposer: str = "", confidence: tuple[float, ...] = ()
    ) -> None:
        """Drafted tokens from absolute position `start` on; used in the next step if they agree with the sequence.

        `confidence` is the probability of each if those before it are right; where none is given it is taken from what
        became of the proposer's drafts. They may also go on from what was proposed before and still agrees. The later
        proposal wins, unless it says less of the same. Never an error: one for an unknown sequence, or that continues
        nothing, is dropped and leaves an earlier one in place.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        known = len(sequence.token_ids)
        limit = 4 * self.config.max_draft_tokens
        present = usable_drafts(sequence.token_ids, *sequence.proposal, limit) if sequence.proposal else []
        behind = start > known
        proposed = token_ids[:limit] if behind else usable_drafts(sequence.token_ids, start, token_ids, limit)
        joined = extended(present, max(start - known, 0), proposed)
        stated = not behind and len(confidence) == len(token_ids)
        if joined is None and stated and proposer == sequence.proposer and sequence.proposal:
            before = sequence.confidence[known - sequence.proposal[0] :]
            if len(before) == len(present):  # the same, but it is more or less sure of it now
                now = list(confidence[known - start :][:limit])
                sequence.proposal, sequence.confidence = (known, present), [*now, *before[len(now) :]]
        if joined is None or not all(0 <= t < self.vocab_size for t in proposed):
            return
        sequence.proposal = (known, joined[:limit])
        sequence.confidence = list(confidence[known - start :][:limit]) if stated else []
        if not behind:
            sequence.proposer = proposer

    def rewind(self, sequence: Sequence, token_ids: list[int], *, pause_after: int | None = None) -> None:
        """Replace the sequence's tokens, keeping the KV of the common beginning, and start it again.

        For drafting: back to the confirmed tokens, then on. Raises PromptTooLong, EngineError (fewer than the prompt,
        or ids that the model does not have).
        """
        self._check_known(sequence)
        if len(token_ids) < sequence.num_prompt:
            raise EngineError(f"sequence {sequence.seq_id}: cannot rewind into its prompt")
        if len(token_ids) >= sequence.max_length:
            raise PromptTooLong(f"sequence {sequence.seq_id}: {len(token_ids)} tokens leave no room for another")
        common = _common_prefix(sequence.token_ids, token_ids)
        if not all(0 <= token < self.vocab_size for token in token_ids[common:]):
            raise EngineError(f"sequence {sequence.seq_id}: token ids must lie in 0 .. {self.vocab_size - 1}")
        self._scheduler.remove(sequence)
        if sequence.detokenizer is not None:
            sequence.detokenizer = self._detokenizer(token_ids[: sequence.num_prompt], sequence.params)
        self._scheduler.rewind(sequence, min(common, len(token_ids) - 1))
        sequence.token_ids = list(token_ids[: sequence.num_prompt])
        sequence.finish_reason = None
        sequence.proposal = None
        sequence.rankings.clear()
        if sequence.rules is not None:
            sequence.rules.restart()
        self._replay(sequence, token_ids[sequence.num_prompt :])
        sequence.finish_reason = None
        sequence.num_sampled = 0
        sequence.pause_after = pause_after
        self._scheduler.add(sequence)

    def fork(self, sequence: Sequence, seq_id: str, length: int, token_id: int, *, pause_after: int) -> Sequence:
        """Another sequence: the first `length` tokens of `sequence`, then `token_id`. It holds blocks until it pauses.

        Where prefixes are cached, and the KV of those tokens is computed, it goes on with one row: full blocks are
        shared, one that is filled in part is copied. Counts as younger than all that are no forks. Raises EngineError,
        OutOfBlocks; then nothing is held.
        """
        self._check_known(sequence)
        if sequence.state == "failed" or not sequence.num_prompt <= length <= len(sequence.token_ids):
            raise EngineError(f"sequence {sequence.seq_id} has no {length} tokens of prompt and output to go on from")
        fork = self.new_sequence(
            seq_id,
            [*sequence.token_ids[:length], token_id],
            sequence.num_prompt,
            sequence.params,
            speculate=sequence.speculate,
            pause_after=pause_after,
            text=sequence.detokenizer is not None,
            salt=sequence.salt,
            runners_up=sequence.num_runners_up,
        )
        fork.arrival += _AHEAD
        try:
            copied = self._scheduler.fork(sequence, fork, min(len(fork.token_ids) + pause_after, fork.max_length))
        except OutOfBlocks:
            del self._sequences[seq_id]
            raise
        if copied is not None:
            self._runner.cache.copy(*copied)
        fork.state = "admitted"
        return fork

    def pause(self, seq_id: str) -> None:
        """Take the sequence out of the batch before the next step; it keeps its blocks, and `start` lets it go on.

        Unknown ids, and sequences that are not in the batch, are ignored.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.state in ("running", "waiting"):
            self._scheduler.remove(sequence)
            sequence.state = "paused"

    def release(self, seq_id: str) -> None:
        """Forget the sequence and give its blocks back, whatever it is doing; full ones stay in the prefix cache.

        Unknown ids are ignored.
        """
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._scheduler.release(sequence)
            sequence.state = "released"

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def prefix_queries(self) -> int:
        """Tokens of all sequences so far, as they were when they first got blocks."""
        return self._scheduler.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Tokens so far whose KV came from the prefix cache instead of being computed, preempted sequences left out."""
        return self._scheduler.prefix_hits

    def measure_costs(self) -> None:
        """Run steps with several numbers of drafted rows, so that the draft policy begins with measured costs.

        Without them a draft seems dearer than it is where rows cost next to nothing, and is never tried. Takes some
        forty steps; before any other sequence is there. Does nothing without a policy, or where there is no room.
        """
        if self._draft_policy is None:
            return
        counts = [n for n in MEASURED_DRAFTS if n <= self.config.max_draft_tokens]
        room = STEPS_MEASURED * sum(1 + n for n in counts)  # tokens, should all drafts be accepted
        if room >= min(self.context_length, self.pool.num_blocks * self.config.block_tokens):
            return
        params = SamplingParams(max_tokens=room, seed=0, temperature=0.0, ignore_eos=True)
        sequence = self.new_sequence("costs", [0], 1, params, text=False, salt="\0costs")
        try:
            with self._scheduler.verifying_all():
                self.start(sequence)
                for count in counts * STEPS_MEASURED:
                    if count:
                        self.propose("costs", len(sequence.token_ids), [0] * count)
                    self.step()
        finally:
            self.release("costs")
            self._draft_policy.forget_outcomes()

    def active_ids(self) -> list[str]:
        """Sequences that were started and have not ended."""
        return [s.seq_id for s in (*self._scheduler.running, *self._scheduler.waiting)]

    def take_failures(self) -> list[tuple[str, Exception]]:
        """Sequences that failed in steps since the last call; they hold their blocks until release."""
        failures, self._failures = self._failures, []
        return failures

    # Steps

    def step(self) -> list[SequenceStep]:
        """One forward over what the scheduler chose. Returns what happened to each sequence that took part.

        A sequence whose logits are unusable, or that fails otherwise on its own, is left out and told by
        `take_failures`. What is raised, such as a failed forward, concerns all that were in the batch.
        """
        started_s = time.monotonic()
        work = self._scheduler.schedule()
        steps: list[SequenceStep] = []
        if work:
            logits = self._runner.forward([_rows(w) for w in work])
            row = 0
            for item in work:
                rows = 1 + len(item.drafts) if item.samples else 0
                try:
                    step = self._finish_work(item, logits[row : row + rows])
                    self._scheduler.commit(item.sequence)
                    steps.append(step)
                except Exception as error:  # its own, whatever it is: the others' steps must not be lost with it
                    self._scheduler.disown(item.sequence)
                    self._scheduler.remove(item.sequence)
                    item.sequence.state = "failed"
                    self._failures.append((item.sequence.seq_id, error))
                row += rows
        duration_s = time.monotonic() - started_s
        self._learn_cost(work, duration_s)
        self.last_stats = StepStats(
            started_s=started_s,
            duration_s=duration_s,
            batch_tokens=sum(w.count + len(w.drafts) for w in work),
            running=self.num_running,
            waiting=self.num_waiting,
            drafted=sum(s.drafted for s in steps),
            accepted=sum(s.accepted for s in steps),
            speculating=sum(w.decodes and w.sequence.speculate for w in work),
            ready=sum(bool(w.offered) for w in work),
        )
        return steps

    def _learn_cost(self, work: list[Work], seconds: float) -> None:
        if self._draft_policy is None:
            return
        rows = sum(1 + len(w.drafts) for w in work if w.decodes)
        chunk_tokens = sum(w.count for w in work if not w.decodes)
        if chunk_tokens:
            self._draft_policy.cost.observe_chunk(rows, chunk_tokens, seconds)
        elif rows:
            self._draft_policy.cost.observe(rows, self._runner.padded_rows(rows), seconds)

    def _finish_work(self, work: Work, logits: NDArray[np.float32]) -> SequenceStep:
        """`logits` [1 + drafts, vocabulary] of the last known token and the drafts; empty within a prompt."""
        sequence = work.sequence
        known = len(sequence.token_ids)
        sequence.num_computed += work.count
        new_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        accepted = 0

        def generate(row: int) -> int:
            token = self._choose(sequence, logits[row])
            if sequence.params.logprobs is not None:
                logprobs.append(token_logprobs(logits[row], token, sequence.params.logprobs))
            texts.append(self._append(sequence, token))
            return token

        if work.samples:
            new_ids, accepted = verify(work.drafts, generate, lambda: sequence.finish_reason is not None)
            if self._draft_policy is not None and work.offered:
                self._draft_policy.judge(sequence.acceptance, sequence.proposer, work.offered, new_ids)
            sequence.num_computed += accepted
            sequence.num_sampled += len(new_ids)
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence)
                sequence.state = "finished"
            elif sequence.pause_after is not None and sequence.num_sampled >= sequence.pause_after:
                self._scheduler.remove(sequence)
                sequence.state = "paused"
        return SequenceStep(
            seq_id=sequence.seq_id,
            first_index=known - sequence.num_prompt,
            new_ids=new_ids,
            text="".join(texts),
            num_computed=sequence.num_computed,
            finish_reason=sequence.finish_reason,
            drafted=len(work.drafts),
            accepted=accepted,
            logprobs=logprobs,
            num_cached=sequence.num_cached,
            offered=len(work.offered),
            proposer=sequence.proposer if work.offered else "",
            wanted=sequence.acceptance.wanted,
        )

    @staticmethod
    def _choose(sequence: Sequence, logits: NDArray[np.float32]) -> int:
        position = len(sequence.token_ids)
        try:
            if sequence.num_runners_up is None:
                return choose_token(logits, sequence.params, position, sequence.rules)
            ranking = rank_tokens(logits, sequence.params, position, sequence.rules, sequence.num_runners_up)
        except FloatingPointError as error:
            raise BadLogits(f"sequence {sequence.seq_id}, position {position}: {error}") from error
        sequence.rankings[position] = ranking
        sequence.rankings.pop(position - _RANKINGS_KEPT, None)
        return ranking.token_ids[0]

    def _replay(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Append output tokens that are known already, until one ends the sequence; those after it are dropped."""
        for token in token_ids:
            self._append(sequence, token)
            if sequence.finish_reason is not None:
                break

    @staticmethod
    def _append(sequence: Sequence, token: int) -> str:
        """One more output token, which may end the sequence. Returns the text that becomes visible."""
        sequence.token_ids.append(token)
        if sequence.rules is not None:
            sequence.rules.add(token)
        detokenizer = sequence.detokenizer
        text = ""
        reason: StopReason | None = None
        if token in sequence.stop_ids:
            reason = "stop"
        elif detokenizer is not None:
            text = detokenizer.push(token)
            reason = "stop" if detokenizer.stopped else None
        if reason is None and len(sequence.token_ids) >= sequence.max_length:
            reason = "length"
        if reason is not None and detokenizer is not None:
            text += detokenizer.finish()
            reason = "stop" if detokenizer.stopped else reason
        sequence.finish_reason = reason
        return text

    def _detokenizer(self, prompt_ids: list[int], params: SamplingParams) -> Detokenizer:
        if self._tokenizer is None:
            raise EngineError(f"{self.config.model_path} has no tokenizer.json, so tokens cannot become text")
        return Detokenizer(self._tokenizer, params.stop, prompt_ids[-_PROMPT_TAIL:], params.min_tokens)

    def _check_known(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.seq_id) is not sequence:
            raise UnknownSequence(f"sequence {sequence.seq_id} is not known to this engine, or was released")


def _rows(work: Work) -> SequenceRows:
    sequence = work.sequence
    start = sequence.num_computed
    return SequenceRows(
        token_ids=[*sequence.token_ids[start : start + work.count], *work.drafts],
        start=start,
        block_ids=sequence.block_ids,
        num_logits=1 + len(work.drafts) if work.samples else 0,
    )


def _common_prefix(left: list[int], right: list[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
