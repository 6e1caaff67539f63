"""The pure parts of the load generator: arrivals, lengths, plans, event parsing and figures."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import Process, arrivals
from loadgen.errors import BadSpec, MalformedStream
from loadgen.lengths import parse_lengths
from loadgen.outcome import Outcome
from loadgen.plan import WORDS, SyntheticPlanner, TokenCost, TracePlanner
from loadgen.report import Slo, meets, percentile, spread, summarize
from loadgen.sse import MAX_EVENT_BYTES, EventParser
from loadgen.traces import TraceRequest


@given(
    st.sampled_from(["poisson", "constant"]),
    st.floats(0.01, 1000),
    st.integers(),
    st.floats(0.1, 20),
    st.integers(1, 500),
)
def test_arrivals_ascend_within_their_bounds_and_repeat_with_the_seed(
    process: Process, rate: float, seed: int, duration_s: float, limit: int
) -> None:
    offsets = list(arrivals(process, rate, seed, duration_s=duration_s, limit=limit))
    assert offsets == sorted(offsets)
    assert all(0 <= offset < duration_s for offset in offsets)
    assert len(offsets) <= limit
    assert offsets == list(arrivals(process, rate, seed, duration_s=duration_s, limit=limit))


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    offsets = np.array(list(arrivals("poisson", 5.0, seed=1, duration_s=None, limit=20_000)))
    gaps = np.diff(offsets)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


@pytest.mark.parametrize(("rate", "bounds"), [(0.0, {"limit": 1}), (-1.0, {"limit": 1}), (1.0, {})])
def test_arrivals_without_end_or_rate_are_refused(rate: float, bounds: dict[str, Any]) -> None:
    with pytest.raises(BadSpec):
        arrivals("poisson", rate, 0, **({"duration_s": None, "limit": None} | bounds))


@pytest.mark.parametrize(
    ("spec", "low", "high"), [("128", 128, 128), ("uniform:16:256", 16, 256), ("lognormal:200:0.8:1000", 1, 1000)]
)
def test_lengths_stay_within_their_bounds(spec: str, low: int, high: int) -> None:
    rng = random.Random(0)
    drawn = [parse_lengths(spec).sample(rng) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high


def test_a_lognormal_length_has_its_median() -> None:
    rng = random.Random(0)
    lengths = parse_lengths("lognormal:200:0.8")
    assert float(np.median([lengths.sample(rng) for _ in range(20_000)])) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "x",
        "0",
        "-3",
        "1.5",
        "uniform:1",
        "uniform:9:3",
        "lognormal:10",
        "lognormal:nan:1",
        "lognormal:10:-1",
        "5:6",
        "1e9",
    ],
)
def test_a_bad_length_is_refused_by_name(spec: str) -> None:
    with pytest.raises(BadSpec, match="length"):
        parse_lengths(spec)


@given(st.integers(), st.integers(0, 1000))
def test_a_request_depends_on_seed_and_number_only(seed: int, number: int) -> None:
    planner = SyntheticPlanner(seed, parse_lengths("uniform:5:50"), parse_lengths("uniform:1:9"), label="phase")
    assert planner.request(number) == planner.request(number)
    assert planner.request(number).prompt != planner.request(number + 1).prompt


def test_phases_share_no_prompt() -> None:
    first, second = (
        SyntheticPlanner(1, parse_lengths("64"), parse_lengths("8"), label=label).request(0) for label in ("one", "two")
    )
    assert first.prompt.split()[:8] != second.prompt.split()[:8]


@given(st.floats(0, 60), st.floats(0.5, 3), st.integers(100, 2000))
def test_prompts_have_the_tokens_that_were_asked_by_the_measured_cost(
    fixed: float, per_word: float, tokens: int
) -> None:
    def server(words: int) -> int:
        return round(fixed + per_word * words)

    cost = TokenCost.from_probes((8, server(8)), (72, server(72)))
    planner = SyntheticPlanner(1, parse_lengths(str(tokens)), parse_lengths("1"), cost)
    assert server(len(planner.request(0).prompt.split())) == pytest.approx(tokens, rel=0.03, abs=3)


def test_a_server_without_counts_costs_a_token_a_word() -> None:
    assert TokenCost.from_probes((8, 0), (72, 0)) == TokenCost(0, 1)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    planner = SyntheticPlanner(1, parse_lengths("100"), parse_lengths("1"), shared_prefix_tokens=60)
    first, second = (planner.request(number).prompt.split() for number in (0, 1))
    assert first[:60] == second[:60]
    assert first[60:] != second[60:]
    assert len(first) == len(second) == 100


def test_trace_prompts_share_what_the_trace_shares() -> None:
    requests = [
        TraceRequest(0.0, 100, 5, (7, 8), 40.0),
        TraceRequest(1.0, 120, 5, (7, 9), 40.0),
        TraceRequest(2.0, 10, 5, (7,), 40.0),
    ]
    first, second, third = (TracePlanner(1, requests).request(number).prompt.split() for number in range(3))
    assert [len(first), len(second), len(third)] == [100, 120, 10]
    assert first[:40] == second[:40]
    assert first[40:80] != second[40:80]
    assert third[:9] == first[:9]


data_lines = st.binary(min_size=1, max_size=30).filter(lambda data: not set(data) & {10, 13})
payloads = st.lists(st.lists(data_lines, min_size=1, max_size=3), max_size=8)


@given(payloads, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(1, 9), min_size=1, max_size=50))
def test_events_come_whole_however_the_bytes_are_cut(
    events: list[list[bytes]], newline: bytes, sizes: list[int]
) -> None:
    stream = b""
    for lines in [*events, [b"[DONE]"]]:
        stream += b": note" + newline + b"event: x" + newline
        stream += b"".join(b"data: " + line + newline for line in lines) + newline
    stream += b":"
    parser, seen, at = EventParser(), [], 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        seen += list(parser.feed(stream[at : at + size]))
        at += size
    assert seen == [*(b"\n".join(lines) for lines in events), b"[DONE]"]


def test_text_separators_that_are_no_line_ends_stay_in_the_data() -> None:
    data = '{"content":"a\u2028b\u0085c"}'.encode()
    assert list(EventParser().feed(b"data: " + data + b"\n\n")) == [data]


def test_lines_of_one_event_are_joined() -> None:
    assert list(EventParser().feed(b"data: a\ndata:b\n\n")) == [b"a\nb"]


def test_an_endless_event_is_refused() -> None:
    parser = EventParser()
    assert list(parser.feed(b"x" * MAX_EVENT_BYTES)) == []
    with pytest.raises(MalformedStream):
        list(parser.feed(b"x"))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def outcome(
    intended: float, sent: float, text: list[float], tokens: int, error: str | None = None, end: float | None = None
) -> Outcome:
    last = end if end is not None else text[-1]
    return Outcome(
        0,
        10,
        tokens,
        intended,
        sent,
        text,
        last,
        10,
        2,
        tokens,
        True,
        None if error else "stop",
        error,
        error_detail="why",
    )


def test_latencies_count_from_the_intended_time() -> None:
    late = outcome(intended=1.0, sent=4.0, text=[5.0, 5.1, 5.4], tokens=5)
    assert late.ttft_s == pytest.approx(4.0)
    assert late.e2e_s == pytest.approx(4.4)
    assert late.tpot_s == pytest.approx(0.1)
    assert late.gaps_s == pytest.approx([0.1, 0.3])


def test_a_phase_adds_up() -> None:
    outcomes = [
        outcome(0.0, 0.0, [0.1, 0.2], 2),
        outcome(0.0, 0.5, [1.0, 2.0], 3),
        outcome(1.0, 1.0, [1.5], 1, error="timeout", end=4.0),
        outcome(1.0, 1.0, [], 0, error="http_429", end=1.1),
        outcome(1.0, 1.0, [], 0, error="http_429", end=1.1),
    ]
    report = summarize("x", {}, outcomes, Slo(ttft_ms=500, tpot_ms=None))
    assert (report.sent, report.succeeded, report.failed, report.wall_s) == (5, 2, 3, 4.0)
    assert report.errors == {"http_429": 2, "timeout": 1}
    assert (report.input_tokens, report.cached_input_tokens, report.output_tokens) == (20, 4, 5)
    assert report.output_tokens_per_s == pytest.approx(5 / 4)
    assert (report.ttft_ms.n, report.ttft_ms.max) == (2, 1000.0)
    assert report.send_delay_ms.max == 500.0
    assert report.goodput is not None
    assert (report.goodput.requests, report.goodput.fraction) == (1, 0.2)
    assert len(report.error_examples) == 3


def test_an_empty_phase_is_a_report_of_zeros() -> None:
    report = summarize("x", {}, [], Slo(1, 1))
    assert (report.sent, report.wall_s, report.requests_per_s, report.ttft_ms) == (0, 0.0, 0.0, spread([]))


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), True),
        (Slo(ttft_ms=150), True),
        (Slo(ttft_ms=50), False),
        (Slo(tpot_ms=99), False),
        (Slo(tpot_ms=101), True),
    ],
)
def test_goodput_keeps_each_bound(slo: Slo, good: bool) -> None:
    assert meets(outcome(0.0, 0.0, [0.1, 0.2], 2), slo) is good
    assert not meets(outcome(0.0, 0.0, [0.1, 0.2], 2, error="timeout"), Slo())


def test_every_word_is_distinct_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() for word in WORDS)
    assert math.log2(len(WORDS)) > 5
