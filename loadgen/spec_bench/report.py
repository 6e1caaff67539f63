"""The figures of a comparison, as they are written and as they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from loadgen.spec_bench.statistics import Interval
from loadgen.spec_bench.workloads import WorkloadName


class Proposed(msgspec.Struct, frozen=True):
    """Tokens of one proposer that were verified, and those of them that were kept."""

    drafted: int
    accepted: int


class Cell(msgspec.Struct, frozen=True):
    """One workload at one concurrency. A pair is the same requests with speculation and without.

    Rates are medians over pairs, in output tokens per second of as many streams together as are in flight: those of a
    stream behind its first token, as often. `by_the_clock`: the ratio of all tokens that came while every client was at
    work, waits between requests included; `at_once_*`: how many streams were in flight then. `tokens_per_step`: of the
    records of speculating requests. `accepted_length`: the mean of what a verification gives, the target's own token
    included; `ready`: the share of sequences' steps that had a proposal in time; both None where the worker does not
    count them. `repeated`: how much of the answers stands in the text that they were to repeat. `counters`: by how much
    those of decode worker and drafter rose.
    """

    workload: WorkloadName
    concurrency: int
    without_tokens_per_s: float
    with_tokens_per_s: float
    speed_up: Interval
    ratios: list[float]
    by_the_clock: Interval
    at_once_without: float
    at_once_with: float
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_step: float
    accepted_length: float | None
    ready: float | None
    proposers: dict[str, Proposed]
    repeated: float | None
    differing: list[str] = []
    counters: dict[str, float] = {}

    @property
    def acceptance(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def share(self, proposer: str) -> float:
        """Of all positions that were verified, those that this proposer drafted."""
        whole = sum(proposed.drafted for proposed in self.proposers.values())
        return self.proposers[proposer].drafted / whole if whole else 0.0


class PeerCell(msgspec.Struct, frozen=True):
    """One way of Transformers' `generate` on one workload. Rates: medians over prompts; `speed_up`: against plain."""

    workload: WorkloadName
    mode: str
    tokens_per_s: float
    speed_up: Interval
    same_ids: float
    """Share of answers whose ids are those of plain `generate`."""


class Report(msgspec.Struct, frozen=True):
    """`facts` describe machine, versions and settings."""

    facts: dict[str, str | int | float]
    cells: list[Cell] = []
    peers: list[PeerCell] = []
    version: int = 1

    @property
    def differing(self) -> list[str]:
        return [line for cell in self.cells for line in cell.differing]


def encode(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def proposers_of(counters: Mapping[str, float]) -> dict[str, Proposed]:
    """From what the decode worker's counters rose by; those that drafted nothing are left out."""
    found = {}
    for name, drafted in counters.items():
        if drafted and name.startswith(_DRAFTED):
            accepted = counters.get(name.replace(_DRAFTED, _ACCEPTED), 0)
            found[name.partition('proposer="')[2].partition('"')[0]] = Proposed(int(drafted), int(accepted))
    return found


_DRAFTED = "headrace_spec_decode_num_draft_tokens_total{"
_ACCEPTED = "headrace_spec_decode_num_accepted_tokens_total{"
_DRAFTS = "headrace_spec_decode_num_drafts_total"


def accepted_length(counters: Mapping[str, float], accepted: int) -> float | None:
    """Tokens that a verified draft gave on average, with the one that the target adds itself."""
    drafts = sum(value for name, value in counters.items() if name.partition("{")[0] == _DRAFTS)
    return 1 + accepted / drafts if drafts else None


def ready_share(counters: Mapping[str, float]) -> float | None:
    """Of the steps of sequences that could use drafts, those that had a proposal in time."""
    steps = counters.get("headrace_spec_decode_num_sequence_steps_total", 0)
    return counters.get("headrace_spec_decode_num_ready_sequence_steps_total", 0) / steps if steps else None


def cell_line(cell: Cell) -> str:
    """One line for those who watch."""
    return (
        f"{cell.workload}, {cell.concurrency} in flight: {cell.without_tokens_per_s:.1f} tokens/s without, "
        f"{cell.with_tokens_per_s:.1f} with, {_ratio(cell.speed_up)}"
    )


def show_cells(console: Console, cells: Sequence[Cell]) -> None:
    if not cells:
        return
    names = sorted({name for cell in cells for name in cell.proposers})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("workload", "in flight", "without", "with"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    figures = ("ratio [95%]", "clock", "pairs", "tokens/step", "accepted len", "ready", "drafted", "kept")
    for column in (*figures, *names, "repeats", "ids"):
        table.add_column(column.replace("_", " "), justify="right")
    for cell in cells:
        shares = [f"{cell.share(name):.0%}" if name in cell.proposers else "" for name in names]
        table.add_row(
            cell.workload,
            str(cell.concurrency),
            f"{cell.without_tokens_per_s:.1f}",
            f"{cell.with_tokens_per_s:.1f}",
            _ratio(cell.speed_up),
            f"{cell.by_the_clock.median:.2f}" if cell.by_the_clock.n else "-",
            str(cell.speed_up.n),
            f"{cell.tokens_per_step:.2f}",
            "" if cell.accepted_length is None else f"{cell.accepted_length:.2f}",
            "" if cell.ready is None else f"{cell.ready:.0%}",
            str(cell.drafted_tokens),
            f"{cell.acceptance:.0%}" if cell.drafted_tokens else "-",
            *shares,
            "" if cell.repeated is None else f"{cell.repeated:.0%}",
            "differ" if cell.differing else "equal",
        )
    console.print(table)
    console.print(
        " without, with: output tokens/s of all streams, behind each one's first token, medians over pairs. clock: the "
        "ratio with the waits between requests. drafted: positions that were verified; kept: of these. Shares of "
        "drafted positions by proposer.",
        style="dim",
        highlight=False,
    )


def show_peers(console: Console, cells: Sequence[PeerCell], threads: int) -> None:
    if not cells:
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("Transformers", "workload"):
        table.add_column(column)
    for column in ("tokens/s", "ratio to plain [95%]", "prompts", "same ids"):
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(
            cell.mode,
            cell.workload,
            f"{cell.tokens_per_s:.1f}",
            _ratio(cell.speed_up),
            str(cell.speed_up.n),
            f"{cell.same_ids:.0%}",
        )
    console.print(table)
    console.print(
        f" generate in fp32, {threads} thread(s), greedy, one request at a time.", style="dim", highlight=False
    )


def _ratio(found: Interval) -> str:
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.n else "-"
