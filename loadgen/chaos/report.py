"""What a run found: one row a fault, what differed, what was left. As a table on the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.chaos.leaks import Leaks


class Gap(msgspec.Struct, frozen=True):
    """The longest silence that one reader of a hit request saw, and when it ended: seconds after the strike.

    `began`: its first token had come before the strike. For the others the silence is the wait for that token, which
    is long without any fault too.
    """

    request_id: str
    reader: str
    began: bool
    gap_ms: float
    ended_s: float


class Struck(msgspec.Struct, frozen=True):
    """One fault that hit work in flight. `gaps` are of streaming readers whose answer went on after it.

    `taken_over_ms`: for each answer that the struck worker held, when another worker claimed it.
    """

    fault: str
    target: str
    wave: int
    at_unix_s: float
    lasted_s: float
    requests: list[str]
    lost: int
    repeated: int
    changed: int
    gaps: list[Gap]
    taken_over_ms: list[float] = []


class Broken(msgspec.Struct, frozen=True):
    """A request of which a promise was broken, and where to look."""

    request_id: str
    number: int
    wave: int
    faults: list[str]
    problems: list[str]
    logs: str


class Report(msgspec.Struct):
    """Everything about one run. `missed`: faults that found no work in flight, and so count for nothing."""

    seed: int
    started_at: str
    machine: dict[str, Any]
    scale: dict[str, int]
    requests: int = 0
    choices: int = 0
    tokens: int = 0
    readers: int = 0
    reconnects: int = 0
    refusals: int = 0
    wall_s: float = 0.0
    struck: list[Struck] = []
    aborted: str = ""
    missed: list[str] = []
    unavailable: list[str] = []
    broken: list[Broken] = []
    leaks: list[Leaks] = []

    def problems(self) -> list[str]:
        """Every broken promise, one line each; none for a good run."""
        requests = [
            f"request {b.number} ({b.request_id}, wave {b.wave}, {' + '.join(b.faults)}): {problem}"
            for b in self.broken
            for problem in b.problems
        ]
        stopped = [f"the run could not go on: {self.aborted}"] if self.aborted else []
        return [*stopped, *requests, *(problem for leaks in self.leaks for problem in leaks.problems())]


class Quantiles(msgspec.Struct, frozen=True):
    """By nearest rank; NaN of nothing."""

    n: int
    p50: float
    p99: float
    max: float


class Row(msgspec.Struct, frozen=True):
    """One line of the table: all strikes of one fault.

    `gap_ms` is of readers that had begun to read when it struck, `first_ms` how long the others waited in all,
    `taken_over_ms` when another worker had claimed what the struck one held.
    """

    fault: str
    strikes: int
    requests: int
    lost: int
    repeated: int
    changed: int
    gap_ms: Quantiles
    first_ms: Quantiles
    taken_over_ms: Quantiles


def rows(struck: Sequence[Struck]) -> list[Row]:
    """In the order of the faults' names, and a last one for all."""
    names = sorted({strike.fault for strike in struck})
    return [_row(name, [s for s in struck if s.fault == name]) for name in names] + [_row("all", struck)]


def _row(name: str, struck: Sequence[Struck]) -> Row:
    gaps = [gap for strike in struck for gap in strike.gaps]
    return Row(
        fault=name,
        strikes=len(struck),
        requests=sum(len(strike.requests) for strike in struck),
        lost=sum(strike.lost for strike in struck),
        repeated=sum(strike.repeated for strike in struck),
        changed=sum(strike.changed for strike in struck),
        gap_ms=quantiles(gap.gap_ms for gap in gaps if gap.began),
        first_ms=quantiles(gap.gap_ms for gap in gaps if not gap.began),
        taken_over_ms=quantiles(ms for strike in struck for ms in strike.taken_over_ms),
    )


def quantiles(values: Iterable[float]) -> Quantiles:
    ordered = sorted(values)
    if not ordered:
        return Quantiles(0, math.nan, math.nan, math.nan)
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return Quantiles(len(ordered), p50, p99, ordered[-1])


def print_report(report: Report, console: Console) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for column in (
        "strikes",
        "requests",
        "lost",
        "repeated",
        "changed",
        "gap p50",
        "p99",
        "max",
        "first p50",
        "max",
        "taken over",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows(report.struck):
        gaps = map(
            _ms,
            (row.gap_ms.p50, row.gap_ms.p99, row.gap_ms.max, row.first_ms.p50, row.first_ms.max, row.taken_over_ms.max),
        )
        counts = (row.strikes, row.requests, row.lost, row.repeated, row.changed)
        table.add_row(row.fault, *map(str, counts), *gaps, style="red" if row.lost + row.repeated + row.changed else "")
    console.print(table)
    console.print(
        "milliseconds; gap: longest silence of a reader that had begun to read when the fault struck; "
        "first: wait for the first token of the others; taken over: longest time until another worker had claimed it"
    )
    console.print(
        f"{report.requests} requests, {report.choices} answers of {report.tokens} tokens, {report.readers} readers "
        f"({report.reconnects} reconnects, {report.refusals} refusals) in {report.wall_s:.0f} s, seed {report.seed}"
    )
    for leaks in report.leaks:
        console.print(
            f"nothing was held {leaks.settle_s:.1f} s after the last request" if not leaks.left else "work was left"
        )
        for memory in leaks.memory:
            same = "same process" if memory.same_process else "new process"
            same += "" if leaks.caches_were_full else ", not judged: caches were not full before"
            console.print(
                f"  {memory.instance}: {memory.before_bytes >> 20} -> {memory.after_bytes >> 20} MiB "
                f"({memory.growth:+.1%}, {same})"
            )
    for name in report.missed:
        console.print(f"missed: {name} (no work in flight in that state)", style="yellow", markup=False)
    for name in report.unavailable:
        console.print(f"not made here: {name}", style="yellow", markup=False)
    for problem in report.problems():
        console.print(f"BROKEN {problem}", style="red", markup=False, soft_wrap=True)


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def encode(report: Report) -> bytes:
    """The report with the table's rows and the problems in words. NaN becomes null."""
    whole = msgspec.to_builtins(report)
    whole["table"] = msgspec.to_builtins(rows(report.struck))
    whole["problems"] = report.problems()
    return msgspec.json.format(msgspec.json.encode(whole), indent=1)
