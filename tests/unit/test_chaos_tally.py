"""What a strike cost, as its line of the report tells it."""

from __future__ import annotations

from loadgen.chaos.faults import Strike
from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Reading, Shown
from loadgen.chaos.report import Report
from loadgen.chaos.schedule import FAULTS, NO_FAULT
from loadgen.chaos.tally import Landed, count, struck
from loadgen.chaos.verify import Verdict
from loadgen.chaos.wave import Flight
from loadgen.chaos.workload import wave_of_requests
from shared.protocol.records import Claimed, Tokens


def entry(record: Claimed) -> Entry:
    return Entry(10 + record.epoch, record)


def landed(number: int, times: list[float], verdict: Verdict) -> Landed:
    flight = Flight(wave_of_requests(1, 0)[number], "x")
    shown = [Shown(0.1, 0, 1), *(Shown(at, 0, n, text="x") for n, at in enumerate(times, start=2))]
    flight.readings = [Reading("client", "stream", f"r{number}", shown=shown, sent_s=0.0, reconnects=1, refusals=2)]
    return Landed(flight, [[Entry(1, Tokens(1, 0, [5, 6], "x"))]], verdict)


def test_a_strike_counts_only_those_it_hit_and_tells_begun_from_waiting_readers() -> None:
    begun = landed(0, [1.0, 1.1, 4.0, 4.1], Verdict(lost=1, repeated=2, changed=3, problems=["p"]))
    waiting = landed(1, [6.0, 6.5], Verdict(problems=[]))
    silent = landed(2, [], Verdict(problems=[]))
    spared = landed(3, [1.0, 9.0], Verdict(lost=7, problems=["p"]))
    hit = [found.flight for found in (begun, waiting, silent)]
    row = struck(Strike(FAULTS[0], "decode-1", hit, at_s=2.0, over_s=2.5), 4, [begun, waiting, silent, spared])
    assert (row.lost, row.repeated, row.changed) == (1, 2, 3)
    assert row.requests == ["r0", "r1", "r2"]
    assert [(gap.began, gap.gap_ms, gap.ended_s) for gap in row.gaps] == [(True, 2900.0, 2.0), (False, 6000.0, 4.0)]
    assert (row.wave, row.lasted_s, row.target) == (4, 0.5, "decode-1")


def test_a_takeover_counts_from_the_strike_to_the_next_claim_of_what_its_target_held() -> None:
    claims = [Claimed(1, "prefill", "prefill-0.a", 98.0), Claimed(2, "decode", "decode-1.a", 99.0)]
    held, spared, over = (landed(number, [1.0], Verdict(problems=[])) for number in range(3))
    held.logs[0] += [*map(entry, claims), entry(Claimed(3, "decode", "decode-0.a", 102.5))]
    spared.logs[0] += [*map(entry, claims[:1]), entry(Claimed(2, "decode", "decode-0.a", 102.5))]
    over.logs[0] += map(entry, claims)
    made = Strike(FAULTS[0], "decode-1", [f.flight for f in (held, spared, over)], at_s=2.0, at_unix_s=100.0)
    assert struck(made, 0, [held, spared, over]).taken_over_ms == [2500.0]
    before_decode = Strike(FAULTS[1], "prefill-0", [spared.flight], at_s=2.0, at_unix_s=100.0)
    assert struck(before_decode, 0, [spared]).taken_over_ms == []


def test_without_a_fault_the_gaps_are_those_of_the_load() -> None:
    found = landed(0, [1.0, 1.1, 1.6], Verdict(problems=[]))
    row = struck(Strike(NO_FAULT, "-", [found.flight], at_s=50.0), 0, [found])
    assert [(gap.began, gap.gap_ms) for gap in row.gaps] == [(False, 1000.0), (True, 500.0)]


def test_the_sums_of_a_run_count_every_request() -> None:
    report = Report(1, "now", {}, {})
    for number in range(3):
        count(report, landed(number, [1.0], Verdict(problems=[])))
    assert (report.requests, report.choices, report.tokens, report.readers) == (3, 3, 6, 3)
    assert (report.reconnects, report.refusals) == (3, 6)
