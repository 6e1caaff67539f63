"""How a run looks on a terminal: one progress bar per phase, then a table. Quiet where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.outcome import Outcome
from loadgen.report import PhaseReport, Spread


class PhaseProgress:
    """A bar that follows a phase by requests, where their number is known, and otherwise by time."""

    def __init__(
        self, console: Console, name: str, *, limit: int | None, duration_s: float | None, shown: bool
    ) -> None:
        by_time = limit is None
        self._duration_s = duration_s if by_time else None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[seconds]}") if by_time else MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not (shown and console.is_terminal),
            transient=True,
        )
        total = limit if limit is not None else duration_s
        self._task = self._progress.add_task(name, total=total, figures="", seconds="")
        self._began_s = time.perf_counter()
        self._running = self._done = self._failed = self._tokens = 0

    def __enter__(self) -> PhaseProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def began(self) -> None:
        self._running += 1
        self._show()

    def ended(self, outcome: Outcome) -> None:
        self._running -= 1
        self._done += 1
        self._failed += not outcome.ok
        self._tokens += outcome.output_tokens
        self._show()

    def _show(self) -> None:
        elapsed_s = max(time.perf_counter() - self._began_s, 1e-9)
        failed = f", [red]{self._failed} failed[/red]" if self._failed else ""
        figures = f"{self._running} running, {self._done} done{failed}, {self._tokens / elapsed_s:.0f} tok/s"
        if self._duration_s is None:
            self._progress.update(self._task, completed=self._done, figures=figures)
        else:
            shown_s = min(elapsed_s, self._duration_s)
            self._progress.update(
                self._task, completed=shown_s, figures=figures, seconds=f"{shown_s:.0f}/{self._duration_s:.0f} s"
            )


def print_phases(console: Console, phases: list[PhaseReport]) -> None:
    """One column a phase, one row a figure."""
    table = Table(title="milliseconds are p50 / p95 / p99", title_justify="left", title_style="dim")
    table.add_column("")
    for phase in phases:
        table.add_column(phase.name, justify="right")
    rows = [
        ("requests ok / sent", [f"{p.succeeded} / {p.sent}" for p in phases]),
        ("wall s", [f"{p.wall_s:.1f}" for p in phases]),
        ("requests/s", [f"{p.requests_per_s:.2f}" for p in phases]),
        ("tokens/s in", [f"{p.input_tokens_per_s:.1f}" for p in phases]),
        ("tokens/s out", [f"{p.output_tokens_per_s:.1f}" for p in phases]),
        ("TTFT ms", [_three(p.ttft_ms) for p in phases]),
        ("ITL ms", [_three(p.itl_ms) for p in phases]),
        ("ITL worst ms", [f"{p.itl_ms.max:.0f}" for p in phases]),
        ("TPOT ms", [_three(p.tpot_ms) for p in phases]),
        ("end to end ms", [_three(p.e2e_ms) for p in phases]),
        ("sent late ms", [_three(p.send_delay_ms) for p in phases]),
    ]
    if any(p.refused for p in phases):
        rows.append(("refused", [str(p.refused) for p in phases]))
        rows.append(("refused after ms", [_three(p.refusal_ms) for p in phases]))
        rows.append(("worst refusal ms", [f"{p.refusal_ms.max:.0f}" if p.refused else "-" for p in phases]))
    if any(p.cached_input_tokens for p in phases):
        rows.append(("cached input tokens", [str(p.cached_input_tokens) for p in phases]))
    if any(p.goodput for p in phases):
        rows.append(("goodput", [_goodput(p) for p in phases]))
    if any(p.errors for p in phases):
        rows.append(("errors", ["\n".join(f"{n} {kind}" for kind, n in p.errors.items()) or "-" for p in phases]))
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    for phase in phases:
        for example in phase.error_examples:
            console.print(f"{phase.name}: {example}", style="red", markup=False)


def _three(spread: Spread) -> str:
    return f"{spread.p50:.0f} / {spread.p95:.0f} / {spread.p99:.0f}" if spread.n else "-"


def _goodput(phase: PhaseReport) -> str:
    if phase.goodput is None:
        return "-"
    return f"{phase.goodput.requests_per_s:.2f}/s ({phase.goodput.fraction:.0%})"
