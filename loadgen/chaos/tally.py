"""From what landed to the lines of the report: what each strike cost, and the sums of the run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.chaos.faults import Strike
from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Reading
from loadgen.chaos.report import Gap, Report, Struck
from loadgen.chaos.schedule import NO_FAULT
from loadgen.chaos.verify import Verdict
from loadgen.chaos.wave import Flight
from shared.protocol.records import Claimed, Tokens


@dataclass(frozen=True)
class Landed:
    """A request that is over: its logs as they were read, by choice, and what is wrong with it."""

    flight: Flight
    logs: list[list[Entry]]
    verdict: Verdict


def struck(made: Strike, wave: int, landed: Sequence[Landed]) -> Struck:
    """One strike and what became of the requests that it hit."""
    by_flight = {id(found.flight): found for found in landed}
    hit = [by_flight[id(flight)] for flight in made.hits]
    readings = [reading for found in hit for reading in found.flight.readings]
    gaps = [gap for reading in readings for gap in _gaps(reading, made)]
    return Struck(
        fault=made.fault.name,
        target=made.target,
        wave=wave,
        at_unix_s=round(made.at_unix_s, 3),
        lasted_s=round(max(0.0, made.over_s - made.at_s), 3),
        requests=[found.flight.request_id for found in hit],
        lost=sum(found.verdict.lost for found in hit),
        repeated=sum(found.verdict.repeated for found in hit),
        changed=sum(found.verdict.changed for found in hit),
        gaps=gaps,
        taken_over_ms=[ms for found in hit for log in found.logs for ms in _taken_over_ms(log, made)],
    )


def count(report: Report, found: Landed) -> None:
    """Add one request to the sums of the run."""
    records = [entry.record for log in found.logs for entry in log]
    report.requests += 1
    report.choices += len(found.logs)
    report.tokens += sum(len(record.ids) for record in records if isinstance(record, Tokens))
    report.readers += len(found.flight.readings)
    report.reconnects += sum(reading.reconnects for reading in found.flight.readings)
    report.refusals += sum(reading.refusals for reading in found.flight.readings)


def _taken_over_ms(log: Sequence[Entry], made: Strike) -> list[float]:
    """When another worker claimed what the struck one held; nothing where it held nothing, or ended it itself."""
    claims = [entry.record for entry in log if isinstance(entry.record, Claimed)]
    before = [claim for claim in claims if claim.at_unix_s <= made.at_unix_s]
    after = [claim for claim in claims if claim.at_unix_s > made.at_unix_s]
    if not before or not after or before[-1].worker.rpartition(".")[0] != made.target:
        return []
    same_stage = after[0].stage == before[-1].stage
    return [round((after[0].at_unix_s - made.at_unix_s) * 1e3, 1)] if same_stage else []


def _gaps(reading: Reading, made: Strike) -> list[Gap]:
    """Of one reader. Where there was no fault: the wait for the first token, and the longest silence after it."""
    first_s = next((shown.at_s for shown in reading.shown if shown.text or shown.tokens > 0), None)
    if first_s is None:
        return []
    if made.fault != NO_FAULT:
        return _after(reading, made.at_s, began=first_s <= made.at_s)
    waited_ms = round((first_s - reading.sent_s) * 1e3, 1)
    return [Gap(reading.request_id, reading.name, False, waited_ms, 0.0), *_after(reading, first_s, began=True)]


def _after(reading: Reading, since_s: float, *, began: bool) -> list[Gap]:
    found = reading.gap(since_s)
    if found is None:
        return []
    gap_s, ended_s = found
    return [Gap(reading.request_id, reading.name, began, round(gap_s * 1e3, 1), round(ended_s - since_s, 3))]
