"""One request inside the engine: its tokens, its blocks and how far its KV cache is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.engine.detokenizer import Detokenizer
from shared.engine.draft_policy import Acceptance
from shared.engine.logit_rules import LogitRules
from shared.engine.sampler import Ranking
from shared.protocol.jobs import SamplingParams
from shared.protocol.records import TokenLogprobs

StopReason = Literal["stop", "length"]
State = Literal["new", "admitted", "waiting", "running", "paused", "finished", "failed", "released"]


@dataclass(eq=False)
class Sequence:
    """State of one sequence; the engine changes it, others read it.

    `token_ids` is the prompt and the output so far. The KV of the first `num_computed` of them lies in `block_ids`
    (in order); the last token known is never computed before it is fed. `pause_after` parks the sequence once that
    many tokens were sampled since it started. It ends with `length` at `max_length` tokens in all. `proposal` is the
    newest drafted run: (absolute position, token ids), `confidence` the probability of each of these tokens if those
    before it are right, or empty; `proposer` who guessed its next token, `acceptance` what became of the drafts so far.
    While `pins` is not 0 it keeps its blocks. `rules`, if the request has any, know every output token in `token_ids`;
    one of `stop_ids` ends the sequence. `rankings` has, by the position of a token that was sampled lately, how likely
    it was, and up to `num_runners_up` others; None: nothing is kept.

    The first `num_committed` blocks are full, final and read only: others may hold them too, found by `block_keys`,
    which mix in the `salt`. The KV of `num_cached` tokens came from the prefix cache and was never computed here; what
    comes back after one of its `preemptions` does not count.

    States: new -> admitted (holds blocks) -> waiting <-> running -> paused, finished or failed -> released. Preemption
    takes the blocks of a running or waiting sequence, which then waits.
    """

    seq_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    max_length: int
    speculate: bool
    pause_after: int | None
    detokenizer: Detokenizer | None
    arrival: int
    rules: LogitRules | None = None
    stop_ids: frozenset[int] = frozenset()
    state: State = "new"
    num_computed: int = 0
    num_committed: int = 0
    num_cached: int = 0
    num_sampled: int = 0
    preemptions: int = 0
    salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    pins: int = 0
    proposal: tuple[int, list[int]] | None = None
    confidence: list[float] = field(default_factory=list)
    proposer: str = ""
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: StopReason | None = None
    num_runners_up: int | None = None
    rankings: dict[int, Ranking] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        """Tokens known whose KV is not computed yet: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


@dataclass(frozen=True)
class SequenceStep:
    """What one step did for one sequence.

    `new_ids` are the output tokens `first_index ..`; empty while a prompt is still being computed. `text` is what they
    add to the visible text. `num_computed` tokens of KV are now final in the sequence's blocks; `num_cached` of them
    came from the prefix cache. `proposer` had `offered` drafts that could be verified; `drafted` of them were, and the
    first `accepted` of those were right. `wanted` drafts are worth asking for, as long as load and text stay so.
    """

    seq_id: str
    first_index: int
    new_ids: list[int]
    text: str
    num_computed: int
    finish_reason: StopReason | None
    drafted: int
    accepted: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of `new_ids` when the request asked for them, else empty."""
    num_cached: int = 0
    offered: int = 0
    proposer: str = ""
    wanted: int = 0


@dataclass(frozen=True)
class StepStats:
    """One step as a whole. `started_s` is on the monotonic clock; `batch_tokens` counts real rows, not padding.

    Of `speculating` sequences, which could have used drafts, `ready` had a proposal in time.
    """

    started_s: float
    duration_s: float
    batch_tokens: int
    running: int
    waiting: int
    drafted: int
    accepted: int
    speculating: int = 0
    ready: int = 0
