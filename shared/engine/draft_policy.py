"""How many drafted tokens a step verifies: as many as make the expected tokens per second most. Pure; it has no clock.

A row more costs time, with jumps, or nothing where it stands in for one that pads; a draft is worth the probability
that it is accepted. Both are measured as steps go by. Nothing in here has a say in what is generated.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.05
"""The best that drafts can promise must be this much more than a plain step: drafting has costs beside the step, and
estimates are noisy, so that of many row counts one always looks cheap."""

NEARLY = 0.02
"""Of row counts that promise so much less than the best at most, the smallest is taken: near the best, drafts bring
about what they cost, and the estimates are no better than that."""

PRIOR_SLOPE = 0.1
"""What a row adds to a step of one row while nothing is measured. So steep that only few, likely drafts are tried."""

SETTLED = 5
"""A row count is known after this many steps. Their median is taken, so that one slow step does not bar it for long."""

MOST_WEIGHT = 16.0
"""Steps that an estimate rests on at most: about so many of a row count are needed until a change is believed."""

FORGET = 0.99
"""Share of an estimate's weight that is left after each step, of whatever row count."""

LARGEST_CHANGE = 1.5
"""A step counts as at most so many times slower or faster than thought: some wait for other processes."""

FRESH_STEPS = 512
"""After so many steps without it a row count is as good as unknown, but for the last estimate."""

EXPLORE_EVERY = 32
"""Steps with proposals from one try of a row count that is not well known to the next."""

PLAIN_EVERY = 4
"""One in so many steps is plain as long as it is not well known what a plain one takes: all is compared with that."""

PROMISING = 0.05
"""What such a try must promise beyond the best choice known, if its rise in cost is half of what is thought."""

PROBE_EVERY = 32
"""A sequence for which nothing was proposed is worth asking about after so many steps: text may have become easy."""

LOOK_EVERY = 8
"""Steps until `wanted` is worked out anew while the number of sequences stays the same."""

FIRST_GUESS = 0.5
"""Acceptance of a draft of which nothing is known."""

OWN_MEMORY, SHARED_MEMORY = 0.75, 0.99
"""What the past counts for after each verification, in one sequence and over all."""

OWN_DOUBT, SHARED_DOUBT = 4.0, 4.0
"""How many verifications the guess weighs that an estimate starts from."""

MOST_PROPOSERS = 8
"""Names told apart, as they come from outside; others are taken together."""

_LARGEST_UNIT = 1e9

_VISIBLE = 0.002
"""Change of an estimate, as a share of it, for which the costs of all row counts are worked out again."""

Floats = NDArray[np.float64]


@dataclass
class _Seconds:
    """Duration of steps of one padded row count. `weight` fades; `first` holds the first SETTLED of them.

    `shown` is what the costs of all row counts were last worked out from.
    """

    seconds: float = 0.0
    weight: float = 0.0
    last_step: int = 0
    shown: float = 0.0
    first: list[float] = field(default_factory=list)

    def add(self, seconds: float, step: int) -> None:
        if step - self.last_step >= FRESH_STEPS:
            self.weight = 0.0
            self.first.clear()
        self.weight = min(self.weight * FORGET ** (step - self.last_step), MOST_WEIGHT - 1) + 1
        self.last_step = step
        if len(self.first) < SETTLED:
            self.first.append(seconds)
            self.seconds = median(self.first)
        else:
            likely = min(max(seconds, self.seconds / LARGEST_CHANGE), self.seconds * LARGEST_CHANGE)
            self.seconds += (likely - self.seconds) / self.weight

    def is_settled(self, step: int) -> bool:
        return len(self.first) == SETTLED and step - self.last_step < FRESH_STEPS


class StepCost:
    """Seconds of a step by its rows, for up to `max_rows` of them; learned from the steps that ran.

    Row counts that are padded to the same one cost the same. Between those measured it is interpolated, beyond them it
    goes on as `PRIOR_SLOPE` says. Before anything is measured only the ratios mean something.
    """

    def __init__(self, max_rows: int) -> None:
        rows = np.arange(max_rows + 1)
        self._padded: NDArray[np.int64] = rows.copy()
        self._tried = np.zeros(max_rows + 1, np.bool_)
        self._measured: dict[int, _Seconds] = {}
        self._steps = 0
        self._curve: Floats | None = None
        self.chunk_token_s = 0.0
        """What a token of a prompt adds to a step."""

    def observe(self, rows: int, padded: int, seconds: float) -> None:
        """A step of `rows` decode and drafted rows, computed as `padded` of them, took so long; no prompt was in it.

        What is tried for the first time is not believed: kernels are compiled and row counts proven in that step.
        """
        self._steps += 1
        tried = bool(self._tried[rows])
        if not tried:
            self._padded[rows : padded + 1] = padded
            self._tried[rows : padded + 1] = True
            self._curve = None
            return
        measured = self._measured.setdefault(padded, _Seconds(last_step=self._steps))
        measured.add(seconds, self._steps)
        if abs(measured.seconds - measured.shown) > _VISIBLE * measured.shown:
            self._curve = None

    def observe_chunk(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` decode and drafted rows and so many `tokens` of prompts took so long.

        It says nothing about row counts, which are padded together with the prompts'.
        """
        self._steps += 1
        if not self._measured:
            return
        each_s = max(seconds - (float(self.expected()[rows]) if rows else 0.0), 0.0) / tokens
        if not self.chunk_token_s:
            self.chunk_token_s = each_s
        likely = min(max(each_s, self.chunk_token_s / LARGEST_CHANGE), self.chunk_token_s * LARGEST_CHANGE)
        self.chunk_token_s += (likely - self.chunk_token_s) / MOST_WEIGHT

    def expected(self) -> Floats:
        """Seconds of a step without prompts, by rows."""
        if self._curve is None:
            for measured in self._measured.values():
                measured.shown = measured.seconds
            self._curve = self._through(sorted(self._measured))
        return self._curve

    def is_known(self, rows: int) -> bool:
        """Whether such steps were measured, several times and not long ago."""
        measured = self._measured.get(int(self._padded[rows]))
        return measured is not None and measured.is_settled(self._steps)

    def hopeful(self) -> Floats:
        """The same, with half the rise from a row count that is well known to one that is not."""
        settled = [rows for rows in sorted(self._measured) if self._measured[rows].is_settled(self._steps)]
        likely = self._through(settled)
        if not settled:
            return self.expected()
        below = np.searchsorted(settled, self._padded, side="right") - 1
        known = np.array([self._measured[rows].seconds for rows in settled])
        floor = np.where(below < 0, likely, np.minimum(known[np.maximum(below, 0)], likely))
        return np.asarray((likely + floor) / 2)

    def _through(self, counts: list[int]) -> Floats:
        """The prior's shape, bent so that it goes through what was measured at `counts`, ascending."""
        if not counts:
            return _prior(self._padded)
        found = np.array([self._measured[rows].seconds for rows in counts])
        bend = np.interp(self._padded, counts, found / _prior(np.array(counts)))
        return np.asarray(_prior(self._padded) * bend, np.float64)


def _prior(rows: NDArray[np.int64]) -> Floats:
    return np.asarray(1 + PRIOR_SLOPE * (rows - 1), np.float64)


class _Record:
    """How often the drafts at each position were right, of those behind right ones, in units of the newest.

    The past fades, that is: the unit grows.
    """

    def __init__(self, positions: int) -> None:
        self.right = [0.0] * positions
        self.tried = [0.0] * positions
        self.unit = 1.0

    def add(self, right: int, wrong: bool, memory: float) -> None:
        """The first `right` positions were right, and with `wrong` the one behind them was not."""
        self.unit /= memory
        if self.unit > _LARGEST_UNIT:
            self.right = [n / self.unit for n in self.right]
            self.tried = [n / self.unit for n in self.tried]
            self.unit = 1.0
        for i in range(right):
            self.right[i] += self.unit
            self.tried[i] += self.unit
        if wrong:
            self.tried[right] += self.unit


class Acceptance:
    """What became of the drafts of one sequence, by proposer. The policy writes it, the sequence carries it along.

    `wanted` is how many drafts would be verified in a step if they were there; 1 when it is time to ask again.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.proposer = ""
        self.unoffered_steps = 0
        self.records: dict[str, _Record] = {}
        self.chances: dict[str, list[float]] = {}


class Candidate(NamedTuple):
    """A decoding sequence that may be drafted for, and the `length` of what `proposer` has offered; 0: nothing.

    `confidence` is what it says of each of these drafts, or empty.
    """

    acceptance: Acceptance
    proposer: str
    length: int
    confidence: Sequence[float] = ()


class DraftPolicy:
    """Owner of what was measured in one engine: of its steps, and of its proposers over all sequences."""

    def __init__(self, max_drafts: int, max_rows: int) -> None:
        """At most `max_drafts` of a sequence, and `max_rows` rows in all, are in one step."""
        self.cost = StepCost(max_rows)
        self._max_drafts = max_drafts
        self._max_rows = max_rows
        self._records: dict[str, _Record] = {}
        self._usual: dict[str, list[float]] = {}
        self._since_explored = 0
        self._since_looked = 0
        self._base_rows = 0

    def choose(self, candidates: list[Candidate], base_rows: int, *, chunk_tokens: int = 0, spare: int) -> list[int]:
        """How many drafts of each candidate to verify beside `base_rows` decode rows; `spare` in all at most."""
        self._usual.clear()
        self._look_ahead(candidates, base_rows)
        if not any(c.length for c in candidates):
            return [0] * len(candidates)
        offered = [self._offered(c) for c in candidates]
        self._since_explored += 1
        may_try = not chunk_tokens
        if may_try and self._since_explored % PLAIN_EVERY == 0 and not self.cost.is_known(base_rows):
            return [0] * len(candidates)
        extra_s = chunk_tokens * self.cost.chunk_token_s
        spare = min(spare, self._max_rows - base_rows)
        lengths, rate = best_lengths(offered, base_rows, self.cost.expected(), extra_s, spare)
        if may_try and self._since_explored >= EXPLORE_EVERY:
            self._since_explored = 0
            hoped, hoped_rate = best_lengths(offered, base_rows, self.cost.hopeful(), extra_s, spare)
            if hoped_rate > rate * (1 + PROMISING):
                return hoped
        return lengths

    def _offered(self, candidate: Candidate) -> list[float]:
        """The probability that its first draft is accepted, that the first two are, and so on.

        What was said of these very drafts tells more than what became of others at their positions.
        """
        if candidate.confidence:
            return list(itertools.accumulate(candidate.confidence, operator.mul))
        return self.chances(candidate.acceptance, candidate.proposer)[: candidate.length]

    def forget_outcomes(self) -> None:
        """Of all proposers; what steps cost is still known."""
        self._records.clear()

    def judge(self, acceptance: Acceptance, proposer: str, offered: Sequence[int], new_ids: Sequence[int]) -> None:
        """Compare what was offered with the tokens that came, whether it was verified or not."""
        judged = list(zip(offered[: self._max_drafts], new_ids, strict=False))
        right = next((i for i, (draft, token) in enumerate(judged) if draft != token), len(judged))
        name = self._name(proposer)
        for records, memory in ((self._records, SHARED_MEMORY), (acceptance.records, OWN_MEMORY)):
            if name not in records:
                records[name] = _Record(self._max_drafts)
            records[name].add(right, right < len(judged), memory)
        acceptance.chances.pop(name, None)

    def chances(self, acceptance: Acceptance, proposer: str) -> list[float]:
        """The probability that the first draft is accepted, that the first two are, and so on.

        Where the sequence has shown little, its estimate for a position leans on the proposer's in all sequences and on
        the position before.
        """
        name = self._name(proposer)
        found = acceptance.chances.get(name)
        if found is None:
            general = self._general(name)
            own = acceptance.records.get(name) or _Record(self._max_drafts)
            doubt = OWN_DOUBT * own.unit
            found, before, chance = [], general[0], 1.0
            for usual, right, tried in zip(general, own.right, own.tried, strict=True):
                before = (doubt * (usual + before) / 2 + right) / (doubt + tried)
                chance *= before
                found.append(chance)
            acceptance.chances[name] = found
        return found

    def _general(self, name: str) -> list[float]:
        """For each position the probability, over all sequences, that it is accepted if those before were.

        As of the last step.
        """
        found = self._usual.get(name)
        if found is None:
            shared = self._records.get(name) or _Record(self._max_drafts)
            doubt = SHARED_DOUBT * shared.unit
            found, before = [], FIRST_GUESS
            for right, tried in zip(shared.right, shared.tried, strict=True):
                before = (doubt * before + right) / (doubt + tried)
                found.append(before)
            self._usual[name] = found
        return found

    def _name(self, proposer: str) -> str:
        return proposer if proposer in self._records or len(self._records) < MOST_PROPOSERS else ""

    def _look_ahead(self, candidates: list[Candidate], base_rows: int) -> None:
        """Set `wanted` of all candidates now and then, as if all had long proposals."""
        for c in candidates:
            if c.length:
                c.acceptance.proposer, c.acceptance.unoffered_steps = c.proposer, 0
            else:
                c.acceptance.unoffered_steps += 1
        self._since_looked += 1
        if self._since_looked >= LOOK_EVERY or base_rows != self._base_rows:
            self._since_looked, self._base_rows = 0, base_rows
            full = [self.chances(c.acceptance, c.acceptance.proposer) for c in candidates]
            spare = self._max_rows - base_rows
            for c, wanted in zip(
                candidates, best_lengths(full, base_rows, self.cost.expected(), 0.0, spare)[0], strict=True
            ):
                c.acceptance.wanted = wanted
        for c in candidates:
            if not c.acceptance.wanted and c.acceptance.unoffered_steps % PROBE_EVERY == PROBE_EVERY - 1:
                c.acceptance.wanted = 1


def best_lengths(
    chances: list[list[float]], base_rows: int, cost_s: Floats, extra_s: float, spare: int
) -> tuple[list[int], float]:
    """(how many drafts of each sequence make tokens per second most, that rate); fewest of those nearly as good.

    Every one of `base_rows` sequences gives a token anyway, and each draft one more with its chance, never larger than
    that of those before it. `cost_s` holds the seconds of a step by its rows, to which `extra_s` is added. It may jump,
    so every total up to `spare` is looked at; of each total the likeliest drafts are the best. Drafts that do not
    promise MARGIN more than none are not worth it.
    """
    none = [0] * len(chances)
    plain = base_rows / (float(cost_s[base_rows]) + extra_s)
    drafts = np.array([chance for row in chances for chance in row])
    order = np.argsort(-drafts, kind="stable")[: max(spare, 0)]
    if not len(order):
        return none, plain
    tokens = base_rows + drafts[order].cumsum()
    seconds = cost_s[base_rows + 1 : base_rows + 1 + len(order)] + extra_s
    rates = tokens / seconds
    best = float(rates.max())
    if best <= plain * (1 + MARGIN):
        return none, plain
    enough = int((rates >= best * (1 - NEARLY)).argmax())
    # Behind these, all that a step of the same cost holds: rows that pad it anyway.
    most = enough + int(np.where(seconds[enough:] <= seconds[enough], rates[enough:], 0.0).argmax())
    owners = np.repeat(np.arange(len(chances)), [len(row) for row in chances])
    lengths: list[int] = np.bincount(owners[order[: most + 1]], minlength=len(chances)).tolist()
    return lengths, float(rates[most])
