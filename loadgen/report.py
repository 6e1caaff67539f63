"""From outcomes to figures: percentiles, rates, goodput, errors. Pure; how they are shown is not decided here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.outcome import Outcome

MAX_EXAMPLES = 5


class Spread(msgspec.Struct, frozen=True):
    """A distribution in milliseconds over `n` values; all zero when there are none."""

    n: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Slo(msgspec.Struct, frozen=True):
    """What a good request must keep, in milliseconds; None is no bound. `tpot_ms` is per token after the first."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Goodput(msgspec.Struct, frozen=True):
    """Requests that succeeded within the SLO, as a rate and as a part of all that were sent."""

    slo: Slo
    requests: int
    requests_per_s: float
    fraction: float


class PhaseReport(msgspec.Struct, frozen=True):
    """One stretch of load. Latencies and tokens are those of successful requests; `errors` has the others by kind.

    `itl_ms` is over all gaps between chunks of text, `tpot_ms` over requests. `send_delay_ms` is how late requests
    left the generator: large values mean that it, or its limit of requests in flight, held the load back.
    `refused`: those of the failed that were told to come again later, and `refusal_ms` how long it took to tell them,
    from when they were sent.
    """

    name: str
    load: dict[str, Any]
    wall_s: float
    sent: int
    succeeded: int
    failed: int
    errors: dict[str, int]
    error_examples: list[str]
    finish_reasons: dict[str, int]
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_counted_by: str
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    send_delay_ms: Spread
    goodput: Goodput | None = None
    refused: int = 0
    refusal_ms: Spread = Spread()


@dataclass(frozen=True)
class RunReport:
    """All phases of a run with what is needed to repeat it."""

    configuration: dict[str, Any]
    machine: dict[str, Any]
    started_at: str
    phases: list[PhaseReport] = field(default_factory=list)
    version: int = 1


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy's default. Raises ValueError without values."""
    if not ascending:
        raise ValueError("no values")
    rank = (len(ascending) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (rank - low)


def spread(seconds: Iterable[float]) -> Spread:
    values = sorted(value * 1e3 for value in seconds)
    if not values:
        return Spread()
    p50, p95, p99 = (round(percentile(values, percent), 3) for percent in (50, 95, 99))
    return Spread(len(values), round(math.fsum(values) / len(values), 3), p50, p95, p99, round(values[-1], 3))


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was good. A single token has no time per token to miss."""
    if not outcome.ok or outcome.ttft_s is None:
        return False
    if slo.ttft_ms is not None and outcome.ttft_s * 1e3 > slo.ttft_ms:
        return False
    return slo.tpot_ms is None or outcome.tpot_s is None or outcome.tpot_s * 1e3 <= slo.tpot_ms


def summarize(name: str, load: dict[str, Any], outcomes: Sequence[Outcome], slo: Slo | None = None) -> PhaseReport:
    """The report of one phase. The wall time runs from the phase's start to the end of its last request."""
    good = [outcome for outcome in outcomes if outcome.ok]
    bad = [outcome for outcome in outcomes if not outcome.ok]
    wall_s = max((outcome.end_s for outcome in outcomes), default=0.0)

    def per_s(count: float) -> float:
        return round(count / wall_s, 3) if wall_s > 0 else 0.0

    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    goodput = None
    if slo is not None:
        kept = sum(meets(outcome, slo) for outcome in outcomes)
        goodput = Goodput(slo, kept, per_s(kept), round(kept / len(outcomes), 4) if outcomes else 0.0)
    return PhaseReport(
        name=name,
        load=load,
        wall_s=round(wall_s, 3),
        sent=len(outcomes),
        succeeded=len(good),
        failed=len(bad),
        errors=dict(Counter(outcome.error or "" for outcome in bad).most_common()),
        error_examples=[_example(outcome) for outcome in bad[:MAX_EXAMPLES]],
        finish_reasons=dict(Counter(outcome.finish_reason or "none" for outcome in good).most_common()),
        input_tokens=input_tokens,
        cached_input_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=output_tokens,
        requests_per_s=per_s(len(good)),
        input_tokens_per_s=per_s(input_tokens),
        output_tokens_per_s=per_s(output_tokens),
        tokens_counted_by="server" if all(outcome.counted_by_server for outcome in good) else "chunks",
        ttft_ms=spread(outcome.ttft_s for outcome in good if outcome.ttft_s is not None),
        itl_ms=spread(gap for outcome in good for gap in outcome.gaps_s),
        tpot_ms=spread(outcome.tpot_s for outcome in good if outcome.tpot_s is not None),
        e2e_ms=spread(outcome.e2e_s for outcome in good),
        send_delay_ms=spread(outcome.sent_s - outcome.intended_s for outcome in outcomes),
        goodput=goodput,
        refused=sum(outcome.refused for outcome in bad),
        refusal_ms=spread(outcome.end_s - outcome.sent_s for outcome in bad if outcome.refused),
    )


def encode_report(report: RunReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def _example(outcome: Outcome) -> str:
    named = f" ({outcome.request_id})" if outcome.request_id else ""
    return f"request {outcome.number}{named}: {outcome.error}: {outcome.error_detail}".rstrip(": ")
